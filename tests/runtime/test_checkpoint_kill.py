"""kill -9 at every point of a save, of a commit and of a removal; full disks and read-only ones.

One process that has torch imported forks a child for each point: the child saves and dies there, the parent looks at the ruins.
"""

import os
import shutil
import signal
import tempfile
import textwrap
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from state_jobs import FACTS, pinned, resume, same
from vault_nodes import in_own_mounts

from elasticrl.runtime.checkpoint.load import open_checkpoint
from elasticrl.runtime.checkpoint.parts import Parts
from elasticrl.runtime.checkpoint.place import Place, place
from elasticrl.runtime.checkpoint.save import finish, write_shard
from elasticrl.runtime.checkpoint.shelf import listing, mark_committed, newest_good, prune
from elasticrl.runtime.vault import faults
from elasticrl.runtime.vault.client import Vault
from elasticrl.runtime.vault.errors import CheckpointStorage
from elasticrl.runtime.vault.version import Version


class State:
    """Two tensors and a number, all telling the step they are of."""

    def __init__(self, step: int) -> None:
        self.state: dict[str, Any] = {
            "w": torch.full((400, 64), float(step)),
            "m": torch.arange(200) * step,
            "step": step,
        }

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any], /) -> None:
        self.state = state


def snapshot(root: Path, step: int, world: int = 2) -> list[Path]:
    paths = []
    for rank in range(world):
        vault = Vault(root / f"n{rank}", job="j", node=f"n{rank}")
        content = Parts(state=State(step)).capture(rank, world)
        ticket = vault.snapshot(content, version=Version(step), generation=1, shard=rank, world=world)
        ticket.wait_sealed(5)
        vault.close()
        assert ticket.path is not None
        paths.append(ticket.path)
    return paths


def save(where: Place, paths: list[Path]) -> None:
    """A whole save as the gang does it, commit record included."""
    for path in paths:
        with pinned(path) as shard:
            write_shard(where, shard)
            version = shard.sealed.stamp.version
    manifest = finish(where, version=version, generation=1, world=len(paths), facts=FACTS, timeout_s=1.0)
    mark_committed(where, manifest.name)


def loaded(where: Place) -> int:
    """The step that a fresh start would resume from; every byte of it is checked."""
    found = resume(where, FACTS)
    assert found is not None
    state = State(0)
    Parts(state=state).restore(found[0])
    assert same(dict(sorted(state.state.items())), dict(sorted(State(state.state["step"]).state.items())))
    return int(state.state["step"])


def points(action: Callable[[], None], trace: Path) -> list[tuple[str, int]]:
    """Every point that `action` passes, as (name, how often by then)."""
    os.environ[faults.TRACE] = str(trace)
    try:
        action()
    finally:
        del os.environ[faults.TRACE]
    seen: Counter[str] = Counter()
    found = []
    for line in trace.read_text().splitlines():
        name = line.split("\t")[0]
        seen[name] += 1
        found.append((name, seen[name]))
    return found


def killed(action: Callable[[], None], fault: str) -> None:
    """Run `action` in a child that dies of `fault`; fails if it does not."""
    child = os.fork()
    if not child:
        os.environ[faults.FAULT] = fault
        faults.reset()
        try:
            action()
        finally:
            os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code == -signal.SIGKILL, f"{fault} never fired"


@pytest.fixture
def ground() -> Iterator[tuple[Path, list[Path]]]:
    """Step 10 saved and committed, step 20 in the vault. In memory: a kill loses the same there, and a flush costs nothing."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        root = Path(directory)
        save(place(root / "good"), snapshot(root, 10))
        yield root, snapshot(root, 20)
    faults.reset()


def test_a_save_killed_at_any_point_leaves_the_previous_checkpoint_and_can_be_repeated(ground: tuple[Path, list[Path]]):
    root, paths = ground
    everything = points(lambda: save(place(root / "rehearsal"), paths), root / "trace")
    names = {name for name, _ in everything}
    assert names >= {
        "checkpoint.begin",
        "checkpoint.tensor",
        "checkpoint.write",
        "checkpoint.fsync",
        "checkpoint.rename",
        "checkpoint.manifest",
        "checkpoint.fsync_dir",
        "checkpoint.publish",
        "checkpoint.published",
        "checkpoint.put",
    }
    outcomes: Counter[int] = Counter()
    for name, count in everything:
        ruins = root / "ruins"
        shutil.copytree(root / "good", ruins)
        where = place(ruins)
        killed(lambda where=where: save(where, paths), f"{name}@{count}:kill")
        step = loaded(where)
        outcomes[step] += 1
        committed = [entry for entry in listing(where) if entry.committed]
        assert step == committed[0].version.step, f"after {name}@{count}"
        save(where, paths)  # the writer that takes over
        assert loaded(where) == 20, f"after {name}@{count}"
        prune(where, keep_last=5, generation=2)
        assert where.leftovers() == []
        shutil.rmtree(ruins)
    assert outcomes[10] >= 38
    assert outcomes[20] >= 1  # only once the commit record has its name


def test_everything_is_flushed_before_it_is_named_and_named_before_it_is_committed(ground: tuple[Path, list[Path]]):
    """What a power cut would find: a rename without a flush before it may survive where the data does not."""
    root, paths = ground
    points(lambda: save(place(root / "rehearsal"), paths), root / "trace")
    flushed: set[str] = set()
    renamed: list[str] = []
    before_publishing: list[str] = []
    order: list[str] = []
    for line in (root / "trace").read_text().splitlines():
        name, detail = line.split("\t")
        order.append(name)
        if name == "checkpoint.fsync":
            flushed.add(detail)
        elif name == "checkpoint.rename":
            old, new = detail.split()
            assert old in flushed, f"{new} got its name before it was flushed"
            renamed.append(Path(new).name)
        elif name == "checkpoint.publish":
            before_publishing = list(renamed)
    assert before_publishing[-1] == "manifest.json"
    assert renamed[-2:] == ["manifest.json", "COMMITTED"]
    publish = order.index("checkpoint.publish")
    assert order[publish - 1] == "checkpoint.fsync_dir"
    assert order[publish + 1] == "checkpoint.fsync_dir"
    assert order.count("checkpoint.rename") == len(renamed) == 8
    assert order[-1] == "checkpoint.fsync_dir"
    assert "checkpoint.write" not in order[publish:]


def test_a_removal_killed_at_any_point_leaves_no_half_checkpoint(ground: tuple[Path, list[Path]]):
    root, paths = ground
    save(place(root / "good"), paths)
    shutil.copytree(root / "good", root / "rehearsal")
    everything = points(lambda: prune(place(root / "rehearsal"), keep_last=1) and None, root / "trace")
    changes = [name for name, _ in everything if name != "checkpoint.list"]
    assert changes == ["checkpoint.trash", "checkpoint.remove"]
    for name, count in everything:
        ruins = root / "ruins"
        shutil.copytree(root / "good", ruins)
        killed(lambda: prune(place(ruins), keep_last=1) and None, f"{name}@{count}:kill")  # noqa: B023
        assert loaded(place(ruins)) == 20
        for entry in listing(place(ruins)):
            open_checkpoint(place(ruins), entry.name)
        assert prune(place(ruins), keep_last=1)
        assert [path.name for path in ruins.iterdir()] == ["step-00000020-g1"]
        shutil.rmtree(ruins)


@pytest.mark.parametrize(
    ("action", "reason"), [("full", "No space left on device"), ("readonly", "Read-only file system")]
)
@pytest.mark.parametrize("point", ["checkpoint.begin", "checkpoint.write@3", "checkpoint.fsync", "checkpoint.publish"])
def test_a_disk_that_refuses_is_a_sentence_and_costs_nothing(
    ground: tuple[Path, list[Path]], monkeypatch: pytest.MonkeyPatch, action: str, reason: str, point: str
):
    root, paths = ground
    where = place(root / "good")
    faults.reset()
    monkeypatch.setenv(faults.FAULT, f"{point}:{action}")
    with pytest.raises(CheckpointStorage, match=f"Saving .* failed: {reason}.*Training goes on"):
        save(where, paths)
    monkeypatch.delenv(faults.FAULT)
    assert loaded(where) == 10
    save(where, paths)
    assert loaded(where) == 20


def test_a_really_full_and_a_really_read_only_file_system(tmp_path: Path):
    """In a mount namespace of its own, on a tmpfs of 500 KB."""
    script = textwrap.dedent(
        f"""
        import subprocess, sys
        from pathlib import Path
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        from test_checkpoint_kill import CheckpointStorage, loaded, place, save, snapshot
        root = Path({str(tmp_path)!r})
        disk = root / "disk"
        disk.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=500k", "none", str(disk)], check=True)
        save(place(disk), snapshot(root, 10))
        for remount in (None, ["mount", "-o", "remount,ro", str(disk)]):
            if remount:
                subprocess.run(remount, check=True)
            for step in (20, 30, 40):
                try:
                    save(place(disk), snapshot(root, step))
                except CheckpointStorage as error:
                    print(error)
                    break
            else:
                raise SystemExit("the disk never was full")
            print(loaded(place(disk)) >= 10)
        """
    )
    lines = in_own_mounts(script)
    assert "No space left on device" in lines[0]
    assert "Read-only file system" in lines[2]
    assert lines[1] == lines[3] == "True"


def test_a_flipped_bit_in_any_file_is_stepped_over(ground: tuple[Path, list[Path]]):
    root, paths = ground
    where = place(root / "good")
    save(where, paths)
    directory = root / "good" / "step-00000020-g1"
    files = sorted(directory.iterdir())
    assert len(files) == 8
    for path in files:
        whole = path.read_bytes()
        for at in {0, 1, len(whole) // 3, len(whole) // 2, len(whole) - 1}:
            changed = bytearray(whole)
            changed[at] ^= 0x40
            path.write_bytes(changed)
            found = newest_good(where)
            assert found is not None
            assert found.manifest.version == Version(10), f"byte {at} of {path.name}"
            (sentence,) = found.passed_over
            assert path.name in sentence or "manifest" in sentence
        path.write_bytes(whole)
    assert loaded(where) == 20
