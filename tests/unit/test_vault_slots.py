"""The files of a vault: which may be written, which must stay."""

import fcntl
import os
import resource
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from chaos.patience import patience
from elasticrl.runtime.vault import layout
from elasticrl.runtime.vault.errors import VaultError
from elasticrl.runtime.vault.layout import Stamp, Table, Torn
from elasticrl.runtime.vault.piece import Piece
from elasticrl.runtime.vault.slots import MAX_FILES, Pinned, Slots, clean, files, parse_name, pin, prepare, sweep
from elasticrl.runtime.vault.version import Made, Version

TABLE = Table((Piece("w", "uint8", (100,), (0,), (100,)),))


def keep(slots: Slots, step: int, *, generation: int = 1, finish: bool = True, sealed: tuple[Made, ...] = ()) -> Path:
    """What a worker does for one version."""
    stamp = Stamp(
        job="j", node="n0", writer="w0", version=Version(step), generation=generation, shard=0, world=1, lineage=()
    )
    text = layout.header(stamp, TABLE, {})
    shape = layout.shape_of(text, TABLE.starts[-1])
    slot = slots.take(shape.total, below=(stamp.version, generation), sealed=sealed)
    slot.memory[shape.data_start : shape.data_start + 100] = bytes([step % 256]) * 100
    if finish:
        layout.seal(slot.memory, shape, text, layout.sums_of(slot.memory, shape))
    slot.unlock()
    return slot.path


def versions(directory: Path) -> list[tuple[int, int]]:
    """(step, generation) of all that is whole."""
    found = []
    for path, _ in files(directory):
        shard = pin(path)
        if isinstance(shard, Pinned):
            with shard:
                assert shard.view(0) == bytes([shard.sealed.stamp.version.step % 256]) * 100
                found.append((shard.sealed.stamp.version.step, shard.sealed.stamp.generation))
    return sorted(found)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "vault"


def make(home: Path, **kwargs) -> Slots:
    return Slots(home, origin="n0", writer="w0", **kwargs)


def test_two_newest_versions_stay_in_three_files_whatever_the_number_of_steps(home: Path):
    slots = make(home)
    for step in range(20):
        keep(slots, step)
        assert versions(home)[-2:] == [(s, 1) for s in range(max(step - 1, 0), step + 1)]
    assert len(list(files(home))) == 3


def test_what_was_sealed_last_stays_whatever_the_number_of_steps_that_are_not(home: Path):
    slots = make(home)
    for step in range(6):
        keep(slots, step, sealed=((Version(step - 1), 1),))
    for step in range(6, 20):
        keep(slots, step, sealed=((Version(5), 1),))
        assert {(5, 1), (step - 1, 1), (step, 1)} <= set(versions(home))
    slots.close()
    successor = make(home)  # a worker that is born later, and is told by its gang
    keep(successor, 6, generation=2, sealed=((Version(5), 1),))
    keep(successor, 7, generation=2, sealed=((Version(5), 1),))
    assert (5, 1) in versions(home)
    for step in (8, 9, 10):
        keep(successor, step, generation=2, sealed=((Version(step - 1), 2),))
    assert (5, 1) not in versions(home), "a newer one is sealed"
    assert len(list(files(home))) == 3, "it takes no more memory"


def test_a_torn_file_is_used_first_and_costs_no_version(home: Path):
    slots = make(home)
    keep(slots, 1)
    keep(slots, 2)
    torn = keep(slots, 3, finish=False)
    assert versions(home) == [(1, 1), (2, 1)]
    assert keep(slots, 3) == torn
    assert versions(home)[-2:] == [(2, 1), (3, 1)]


def test_a_successor_takes_over_files_and_what_they_hold(home: Path):
    slots = make(home)
    keep(slots, 1)
    keep(slots, 2)
    slots.close()
    successor = make(home)
    keep(successor, 3)
    assert versions(home) == [(1, 1), (2, 1), (3, 1)]
    assert len(list(files(home))) == 3


def test_a_pinned_version_stays_and_another_file_is_taken(home: Path):
    slots = make(home)
    pinned = pin(keep(slots, 1))
    assert isinstance(pinned, Pinned)
    for step in range(2, 8):
        keep(slots, step)
    assert (1, 1) in versions(home)
    assert len(list(files(home))) == 4
    pinned.close()
    for step in range(8, 12):
        keep(slots, step)
    assert (1, 1) not in versions(home)
    assert len(list(files(home))) == 4


def test_pins_that_are_never_released_are_an_error_with_a_sentence(home: Path):
    slots = make(home)
    pins = [pin(keep(slots, step)) for step in range(MAX_FILES)]
    with pytest.raises(VaultError, match="pinned: a reader has not let go"):
        keep(slots, 99)
    for one in pins:
        assert isinstance(one, Pinned)
        one.close()


def test_a_file_pinned_as_it_appears_is_passed_over_and_used_the_next_time(home: Path):
    slots = make(home)
    home.joinpath("n0+w0+0.shard").touch(
        mode=0o600
    )  # as a vault sees it that looks around between its making and its lock
    with home.joinpath("n0+w0+0.shard").open() as reader:
        fcntl.flock(reader, fcntl.LOCK_SH)
        assert keep(slots, 1).name == "n0+w0+1.shard"
    assert keep(slots, 2).name == "n0+w0+0.shard"
    assert versions(home) == [(1, 1), (2, 1)]


@contextmanager
def looked_at(home: Path) -> Iterator[None]:
    """As by a vault that looks around all the time."""
    prepare(home)
    over = threading.Event()

    def look() -> None:
        while not over.is_set():
            for path, _ in files(home):
                if isinstance(found := pin(path), Pinned):
                    found.close()

    looking = [threading.Thread(target=look) for _ in range(2)]
    for each in looking:
        each.start()
    try:
        yield
    finally:
        over.set()
        for each in looking:
            each.join()


def test_a_vault_that_looks_around_all_the_time_stops_no_writer(home: Path):
    with looked_at(home):
        for turn in range(100):
            for path, _ in files(home):
                path.unlink()
            slots = make(home)
            for step in range(4):
                keep(slots, step)
            assert (3, 1) in versions(home), turn
            slots.close()


@pytest.mark.long
def test_what_was_cleared_away_is_brought_back_however_often_somebody_looks_at_its_new_file(home: Path):
    with looked_at(home):
        for _ in range(1000):
            for path, _ in files(home):
                path.unlink()
            slots = make(home)
            keep(slots, 1)
            for path, _ in files(home):
                path.unlink()
            deadline = time.monotonic() + patience(10.0)
            while not versions(home):
                slots.mend()
                assert time.monotonic() < deadline, "it is lost for good"
            slots.close()


def test_what_could_not_be_mapped_is_not_held_for_ever(home: Path):
    slots = make(home)
    path = keep(slots, 1)
    before = len(list(Path("/proc/self/fd").iterdir()))
    os.truncate(path, 1 << 30)  # a hole: for it there is no room in the address space
    limits = resource.getrlimit(resource.RLIMIT_AS)
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken + (256 << 20), limits[1]))
    try:
        with pytest.raises(OSError, match="Cannot allocate"):
            pin(path)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
    assert len(list(Path("/proc/self/fd").iterdir())) == before


@contextmanager
def full() -> Iterator[None]:
    """No file gets memory."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_where_there_is_no_memory_for_another_file_one_that_is_read_is_waited_for(home: Path):
    """A save that takes longer than three steps, in a tmpfs that has room for three files."""
    slots = make(home)
    pinned = pin(keep(slots, 1))
    assert isinstance(pinned, Pinned)
    keep(slots, 2)
    keep(slots, 3)
    with full():
        with pytest.raises(VaultError, match="Enlarge that tmpfs"):
            keep(slots, 4)
        assert len(list(files(home))) == 3, "an empty one would be the first to be tried the next time"
        late = threading.Timer(0.2, pinned.close)
        late.start()
        slot = slots.take(100, below=(Version(4), 1), within_s=20.0)
        late.join()
        assert slot.path == pinned.path
        slot.unlock()
    assert versions(home) == [(2, 1), (3, 1)]


def test_a_file_that_has_memory_is_taken_before_an_empty_one_of_a_dead_writer(home: Path):
    slots = make(home)
    for step in (1, 2, 3):
        keep(slots, step)
    slots.close()
    (home / "n0+w0+3.shard").touch(mode=0o600)
    successor = make(home)
    with full():
        assert keep(successor, 4).name == "n0+w0+0.shard"
    assert versions(home) == [(2, 1), (3, 1), (4, 1)]


def test_a_file_being_written_cannot_be_pinned(home: Path):
    slots = make(home)
    slot = slots.take(5000)
    assert pin(slot.path) == Torn("being written")
    slot.unlock()
    assert pin(slot.path) == Torn("not sealed")


def test_rewriting_a_version_after_a_reform_keeps_the_old_cut_until_the_new_one_is_there(home: Path):
    slots = make(home)
    keep(slots, 9)
    keep(slots, 10)
    keep(slots, 10, generation=2, finish=False)
    assert versions(home) == [(9, 1), (10, 1)]
    keep(slots, 10, generation=2)
    assert (10, 1) in versions(home)
    assert (10, 2) in versions(home)


def test_versions_beyond_the_one_agreed_on_are_void(home: Path):
    slots = make(home)
    for step in (10, 11, 12):
        keep(slots, step)
    slots.void_after(Version(11), 1)
    assert versions(home) == [(10, 1), (11, 1)]
    keep(slots, 11, generation=2)
    keep(slots, 12, generation=2)
    assert versions(home) == [(11, 1), (11, 2), (12, 2)]


def test_what_a_futureless_generation_made_is_written_over_first(home: Path):
    """Else step 11 and 12 of generation 1 would count as the newest, and step 10, from which the gang went on, would go."""
    slots = make(home)
    for step in (10, 11, 12):
        keep(slots, step)
    keep(slots, 11, generation=2, finish=False)
    assert versions(home) == [(10, 1), (11, 1)]
    keep(slots, 11, generation=2)
    keep(slots, 12, generation=2)
    assert {(11, 2), (12, 2)} <= set(versions(home))


def test_a_larger_state_gets_a_larger_file_and_keeps_the_others(home: Path):
    slots = make(home)
    keep(slots, 1)
    slots.take(1 << 20).unlock()
    assert versions(home) == [(1, 1)]
    assert max(path.stat().st_size for path, _ in files(home)) >= 1 << 20


def test_a_much_smaller_state_gives_memory_back_one_file_at_a_time(home: Path):
    slots = make(home)
    for _ in range(3):
        slots.take(100 << 20).unlock()
    for step in range(4):
        keep(slots, step)
        assert versions(home)[-2:] == [(s, 1) for s in range(max(step - 1, 0), step + 1)]
    assert sum(path.stat().st_size for path, _ in files(home)) < 1 << 20


def test_a_file_removed_under_a_writer_is_not_written_into(home: Path):
    """A restarting server removes torn files: a worker that went on writing into a removed one would lose the version."""
    slots = make(home)
    keep(slots, 1)
    keep(slots, 2, finish=False)
    assert len(sweep(home)) == 1
    keep(slots, 2)
    assert versions(home) == [(1, 1), (2, 1)]


def test_sweeping_leaves_whole_files_and_those_being_written(home: Path):
    slots = make(home)
    keep(slots, 1)
    writing = slots.take(5000)
    assert sweep(home) == ()
    writing.unlock()
    assert sweep(home) == (writing.path.name,)
    assert versions(home) == [(1, 1)]


def test_a_forked_child_does_not_keep_its_parents_lock(home: Path):
    """A data loader's worker outlives a killed trainer for a moment: its inherited descriptor must not hold the file."""
    slots = make(home)
    slot = slots.take(5000)
    view = slot.memory  # as a tensor over it would: it keeps the mapping, and must not keep the lock
    ready, go = os.pipe(), os.pipe()
    child = os.fork()
    if not child:
        os.write(ready[1], b"x")
        os.read(go[0], 1)
        os._exit(0)
    os.read(ready[0], 1)
    slots.close()  # as the parent's death would
    assert pin(slot.path) == Torn("not sealed")
    os.write(go[1], b"x")
    os.waitpid(child, 0)
    assert len(view) >= 5000
    for end in (*ready, *go):
        os.close(end)


def test_a_directory_open_to_others_is_refused(tmp_path: Path):
    open_to_all = tmp_path / "v"
    open_to_all.mkdir(mode=0o777)
    open_to_all.chmod(0o777)
    with pytest.raises(VaultError, match="can be written to by everybody"):
        prepare(open_to_all)
    link = tmp_path / "link"
    link.symlink_to(tmp_path)
    with pytest.raises(VaultError, match="only user"):
        prepare(link)


def test_names_that_could_leave_the_directory_are_refused(home: Path):
    with pytest.raises(VaultError, match="cannot name"):
        Slots(home, origin="../n0", writer="w0")
    assert parse_name("n03+w0+1.shard") is not None
    assert parse_name("../n03+w0+1.shard") is None
    assert parse_name("n03+w0+1.shard.new") is None


def test_an_ended_job_leaves_no_memory_behind(home: Path):
    keep(make(home), 1)
    (home / "ring.json").write_text("{}")
    clean(home)
    assert not home.exists()
