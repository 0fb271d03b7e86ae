"""The kernel's log, from a file that stands for its ring."""

from pathlib import Path

from elasticrl.diagnose import kernel_log

OLD = "6,1,1000000,-;Linux version 6.18\n"
NEW = "3,339,512200417,-;NVRM: Xid (PCI:0000:44:00): 79, pid=1, GPU has fallen off the bus\n"


def ring(root: Path) -> Path:
    path = root / "dev/kmsg"
    path.parent.mkdir(parents=True)
    path.write_text(OLD)
    return path


def test_who_watches_hears_what_is_new_and_once(tmp_path: Path) -> None:
    path = ring(tmp_path)
    watch = kernel_log.Watch(tmp_path)
    assert watch.read() == ""
    with path.open("a") as file:
        file.write(NEW)
    assert watch.read() == "[  512.200417] NVRM: Xid (PCI:0000:44:00): 79, pid=1, GPU has fallen off the bus"
    assert watch.read() == ""


def test_the_whole_log_is_there_or_why_it_is_not(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))  # without a journal
    assert kernel_log.whole(tmp_path) == ("", kernel_log.whole(tmp_path)[1])
    assert "add the user to the group systemd-journal" in kernel_log.whole(tmp_path)[1]
    ring(tmp_path)
    assert kernel_log.whole(tmp_path) == ("[    1.000000] Linux version 6.18", "kmsg")


def test_without_a_ring_the_journal_is_asked_from_its_cursor_on(tmp_path: Path, monkeypatch) -> None:
    journal = tmp_path / "journalctl"
    journal.write_text(
        "#!/bin/sh\n"
        'case "$*" in\n'
        '  *--after-cursor=c1*) echo "[   12.000000] eth0: link is down"; echo "-- cursor: c2";;\n'
        "  *--after-cursor=c2*) ;;\n"  # nothing new: no cursor either
        '  *) echo "-- cursor: c1";;\n'
        "esac\n"
    )
    journal.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    watch = kernel_log.Watch(tmp_path / "nothing")
    assert [watch.read() for _ in range(3)] == ["[   12.000000] eth0: link is down", "", ""]


def test_a_journal_that_was_late_at_boot_is_asked_again(tmp_path: Path, monkeypatch) -> None:
    journal = tmp_path / "journalctl"
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    watch = kernel_log.Watch(tmp_path / "nothing")
    assert watch.deaf
    assert watch.read() == ""
    journal.write_text(
        '#!/bin/sh\ncase "$*" in *--after-cursor=c1*) echo "[   12.000000] eth0: link is down";; esac\necho "-- cursor: c1"\n'
    )
    journal.chmod(0o755)
    assert [watch.read() for _ in range(2)] == ["", "[   12.000000] eth0: link is down"]
    assert not watch.deaf


def test_below_another_root_this_machines_journal_is_not_asked(tmp_path: Path, monkeypatch) -> None:
    journal = tmp_path / "journalctl"
    journal.write_text(f'#!/bin/sh\n[ "$1" = --root={tmp_path} ] && exit 1\necho "[   12.000000] eth0: link is down"\n')
    journal.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert kernel_log.whole(tmp_path)[0] == kernel_log.Watch(tmp_path).read() == ""
