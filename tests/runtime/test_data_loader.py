"""Loading what the cursor names: by threads and processes, through deaths, reforms and epoch edges."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from vault_nodes import until

from chaos.patience import patience
from elasticrl.runtime.data.audit import audit
from elasticrl.runtime.data.cursor import Cursor, SampleId, Walk
from elasticrl.runtime.data.loader import Batch, Loader, StreamLoader
from elasticrl.runtime.vault.errors import DataError

PAGE = Path(__file__).parents[2] / "docs" / "MIGRATING.md"
WALK = Walk(name="d", size=100, lanes=4, per_lane=3, seed=1)


class Squares:
    """A dataset that can be sent to a process."""

    def __init__(self, folder: str = "") -> None:
        self.folder = folder

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> int:
        if self.folder:
            (Path(self.folder) / str(os.getpid())).touch()
        return index * index


def deal(world: int) -> list[range]:
    ends = [rank * 4 // world for rank in range(world + 1)]
    return [range(a, b) for a, b in pairwise(ends)]


def expected(cursor: Cursor, step: int, lanes: range) -> dict[int, Batch]:
    return {lane: Batch(cursor.ids(step, 0, lane), [s.index**2 for s in cursor.ids(step, 0, lane)]) for lane in lanes}


@pytest.mark.parametrize("kind", ["thread", "process"])
def test_each_lane_gets_what_the_cursor_names_through_epoch_edges_and_reforms(kind: Any):
    cursor = Cursor(WALK)
    loader = Loader(Squares(), cursor, kind=kind, workers=2, timeout_s=60)
    for step in range(30):  # more than three epochs
        for lanes in [range(4)] if step < 10 else deal(1 + step % 3)[:1]:
            assert loader.fetch(step, lanes) == expected(cursor, step, lanes)
    assert loader.fetch(3, range(4)) == expected(cursor, 3, range(4))  # and back, as after a rollback
    loader.close()


def test_what_comes_next_is_loaded_before_it_is_asked_for():
    seen: list[int] = []
    more = threading.Event()

    class Watched(Squares):
        def __getitem__(self, index: int) -> int:
            seen.append(index)
            if len(seen) >= 12 * 3:
                more.set()
            return index

    cursor = Cursor(WALK)
    loader = Loader(Watched(), cursor, ahead=2)
    loader.fetch(0, range(4))
    assert more.wait(10), "two more steps were not loaded ahead"
    assert set(seen) == {s.index for step in range(3) for lane in range(4) for s in cursor.ids(step, 0, lane)}
    loader.close()


def test_loading_ahead_stops_at_the_last_epochs_end():
    cursor = Cursor(Walk(size=24, lanes=4, per_lane=3, epochs=1))
    loader = Loader([0] * 24, cursor)
    assert cursor.steps == 2
    loader.fetch(1, range(4))
    with pytest.raises(DataError, match="beyond the last"):
        loader.fetch(2, range(4))
    loader.close()


@pytest.mark.parametrize("aware", [False, True])  # does the pool know of it when it is asked again?
def test_a_worker_process_that_is_killed_is_replaced_and_its_samples_are_loaded_again(tmp_path: Path, aware: bool):
    cursor = Cursor(WALK)
    loader = Loader(Squares(str(tmp_path)), cursor, kind="process", workers=2, timeout_s=60)
    assert loader.fetch(0, range(4)) == expected(cursor, 0, range(4))
    for pid in tmp_path.iterdir():
        os.kill(int(pid.name), signal.SIGKILL)
    until(lambda: not aware or bool(loader._pool._broken), "the pool knows that its processes are gone", 30)
    for step in range(1, 8):
        assert loader.fetch(step, range(4)) == expected(cursor, step, range(4))
    loader.close()


class Deadly(Squares):
    def __getitem__(self, index: int) -> int:
        os.kill(os.getpid(), signal.SIGKILL)
        return index


def test_a_sample_that_kills_every_worker_is_named():
    cursor = Cursor(WALK)
    loader = Loader(Deadly(), cursor, kind="process", workers=1, timeout_s=60)
    with pytest.raises(
        DataError, match=r"Loading samples 0:\d+, .* \(lane 2 of step 0\.0\) killed its worker process twice"
    ):
        loader.fetch(0, [2])
    loader.close()


def test_storage_that_hangs_is_named_within_the_deadline():
    release = threading.Event()

    class Hanging(Squares):
        def __getitem__(self, index: int) -> int:
            release.wait(30)
            return index

    loader = Loader(Hanging(), Cursor(WALK), timeout_s=0.2)
    began = time.monotonic()
    with pytest.raises(DataError, match=r"were not loaded within 0\.2 s: the storage hangs"):
        loader.fetch(0, range(4))
    assert time.monotonic() - began < patience(5)
    release.set()
    loader.close()


def test_a_broken_sample_raises_its_own_error_with_its_name():
    class Broken(Squares):
        def __getitem__(self, index: int) -> int:
            raise ValueError("bad image")

    cursor = Cursor(WALK)
    loader = Loader(Broken(), cursor)
    with pytest.raises(ValueError, match="bad image") as caught:
        loader.fetch(0, [1])
    assert caught.value.__notes__ == [f"while loading sample {cursor.ids(0, 0, 1)[0]}"]
    loader.close()


def test_a_dataset_that_wants_the_epoch_is_told_it():
    class Augmented(Squares):
        def sample(self, sample: SampleId) -> str:
            return f"{sample.index} in epoch {sample.epoch}"

    cursor = Cursor(Walk(size=100, lanes=1, per_lane=150, shuffle=False))
    loader = Loader(Augmented(), cursor)
    data = loader.fetch(0, [0])[0].data
    assert data[0] == "0 in epoch 0"
    assert data[120] == "20 in epoch 1"
    loader.close()


def test_data_of_another_size_than_planned_is_refused():
    with pytest.raises(DataError, match="has 99 samples and the cursor counts 100"):
        Loader([0] * 99, Cursor(WALK))
    with pytest.raises(DataError, match="use StreamLoader"):
        Loader(iter([1]), Cursor(WALK))


STREAM = Walk(name="s", size=None, lanes=4, per_lane=3, shuffle=False)


class Stream:
    """Ten and a bit batches an epoch; its samples say which epoch and place they are."""

    def __init__(self, size: int = 125) -> None:
        self.size = size
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[tuple[int, int]]:
        epoch = self.epoch
        return ((epoch, place) for place in range(self.size))


def row(step: int, lane: int, size: int = 125) -> list[SampleId]:
    start = step * 12 + lane * 3
    return [SampleId(*divmod(number, size)) for number in range(start, start + 3)]


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_a_streams_samples_do_not_depend_on_the_number_of_workers_or_on_epoch_edges(world: int):
    for lanes in deal(world):
        loader = StreamLoader(Stream(), STREAM)
        for step in range(25):
            found = loader.fetch(step, lanes)
            for lane in lanes:
                assert list(found[lane].ids) == row(step, lane)
                assert found[lane].data == [(s.epoch, s.index) for s in row(step, lane)]
        loader.close()


def test_a_stream_goes_back_and_forth_and_changes_lanes():
    loader = StreamLoader(Stream(), STREAM)
    for step, lanes in [(0, range(4)), (15, range(2)), (3, range(2, 4)), (16, [3]), (16, [0, 3]), (17, [0, 3])]:
        found = loader.fetch(step, lanes)
        assert {lane: list(batch.ids) for lane, batch in found.items()} == {lane: row(step, lane) for lane in lanes}
    loader.close()


def test_a_resumed_stream_finds_its_place_without_walking_past_epochs_again():
    walked: list[int] = []

    class Counted(Stream):
        def __iter__(self) -> Iterator[tuple[int, int]]:
            walked.append(self.epoch)
            return super().__iter__()

    before = StreamLoader(Stream(), STREAM)
    for step in range(40):
        before.fetch(step, range(4))
    state = before.state_dict()
    before.close()
    assert state["ends"][:3] == [125, 125, 125]
    after = StreamLoader(Counted(), STREAM)
    after.load_state_dict(state)
    assert list(after.fetch(40, [2])[2].ids) == row(40, 2)
    assert walked == [3]
    after.close()


def test_a_run_resumed_at_a_streams_end_goes_on_and_does_not_end():
    loader = StreamLoader(Stream(12), STREAM)
    for step in range(5):
        assert list(loader.fetch(step, [0])[0].ids) == [SampleId(step, i) for i in range(3)]
    loader.close()


def test_a_stream_without_samples_or_with_other_samples_than_before_is_an_error():
    loader = StreamLoader(Stream(0), STREAM)
    with pytest.raises(DataError, match="no sample at all in epoch 0"):
        loader.fetch(0, [0])
    loader.close()

    loader = StreamLoader(Stream(100), STREAM)
    loader.load_state_dict({"ends": [125], "batch": 12, "draws": 1, "name": "s"})
    with pytest.raises(DataError, match="had 125 samples before and 100 now"):
        loader.fetch(10, [3])
    with pytest.raises(DataError, match="batch was 24 and is 12"):
        loader.load_state_dict({"ends": [], "batch": 24, "draws": 1, "name": "s"})
    loader.close()


def test_a_stream_that_hangs_is_named_within_the_deadline():
    release = threading.Event()

    def hang() -> Iterator[int]:
        release.wait(30)
        yield 1

    class Hanging:
        def __iter__(self) -> Iterator[int]:
            return hang()

    loader = StreamLoader(Hanging(), STREAM, timeout_s=0.2)
    with pytest.raises(DataError, match=r"gave nothing for step 0 within 0\.2 s"):
        loader.fetch(0, [0])
    release.set()
    loader.close()


def test_the_program_on_the_page_loads_ahead_and_uses_each_sample_once(tmp_path: Path):
    program, *_ = re.findall(r"```python\n(.+?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
    (tmp_path / "loads.py").write_text(program)
    done = subprocess.run([sys.executable, "loads.py"], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found = audit(tmp_path / "run" / "loads")
    assert (found.ok, found.steps) == (True, 20), found.sentence


@pytest.mark.parametrize("more", [{"spans": 2}, {"levels": (60, 65), "stages": ((0, 1, 1),)}, {"stages": ((0, 1),)}])
def test_a_stream_has_no_levels_and_no_lanes_with_the_same_samples(more):
    with pytest.raises(DataError, match="leave spans, levels and stages"):
        StreamLoader(Stream(), replace(STREAM, **more))
