"""The ledger and its audit: exactly once, through kills, reforms and rollbacks; and every way to fail it is named."""

import os
import random
import re
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import pytest

from elasticrl.runtime.data.audit import Audit, audit
from elasticrl.runtime.data.cursor import Cursor, SampleId, Walk
from elasticrl.runtime.data.ledger import FOLDER, Ledger, Record, decode, encode
from elasticrl.runtime.vault import faults
from elasticrl.runtime.vault.errors import DataError
from elasticrl.runtime.vault.version import KEPT_CUTS, Cut, Lineage, Version, grow

WALK = Walk(name="d", size=50, lanes=4, per_lane=3, seed=1)


def deal(lanes: int, world: int) -> list[range]:
    ends = [rank * lanes // world for rank in range(world + 1)]
    return [range(a, b) for a, b in pairwise(ends)]


class Gang:
    """The ledgers of a generation's workers; `step` does what an update does."""

    def __init__(self, root: Path, world: int, *, walk: Walk = WALK) -> None:
        self.root = root
        self.cursor = Cursor(walk)
        self.generation = 0
        self.lineage: Lineage = ()
        self.ledgers: list[Ledger] = []
        self.numbers = count()
        self.reform(world, Version(-1), {})

    def reform(self, world: int, start: Version, values: dict, *, keep: int = 0) -> None:
        """A new generation from `start`; the first `keep` workers survive, the others are new processes."""
        self.generation += 1
        self.lineage = grow(self.lineage, self.generation, start)
        new = [Ledger(self.root, writer=f"w{next(self.numbers)}") for _ in range(world - keep)]
        self.ledgers = self.ledgers[:keep] + new
        for ledger, lanes in zip(self.ledgers, deal(self.cursor.walk.lanes, world), strict=True):
            ledger.begin(generation=self.generation, lineage=self.lineage, segments=self.cursor.segments, lanes=lanes)
            ledger.restored(values)

    def step(self, step: int, *, only: int | None = None) -> None:
        walk = self.cursor.walk
        for rank, lanes in enumerate(deal(walk.lanes, len(self.ledgers))):
            if only is not None and rank >= only:
                continue
            for lane in lanes:
                ids = self.cursor.ids(step, 0, lane)
                for turn in range(walk.turns):
                    self.ledgers[rank].record(Version(step, turn), lane, ids, turn=turn)

    def values(self) -> dict:
        """What the vault has of all shards."""
        return {key: rows for ledger in self.ledgers for key, rows in ledger.values().items()}


def test_an_undisturbed_run_is_proved(tmp_path: Path):
    gang = Gang(tmp_path, 3)
    for step in range(10):
        gang.step(step)
    found = audit(tmp_path)
    assert found.ok, found.sentence
    assert (found.steps, found.samples, found.superseded) == (10, 120, 0)
    assert "each used exactly once" in found.sentence


def test_rollbacks_supersede_and_do_not_count_twice(tmp_path: Path):
    gang = Gang(tmp_path, 3)
    for step in range(6):
        gang.step(step)
        if step == 3:
            kept = gang.values()
    gang.reform(2, Version(3), kept)
    for step in range(4, 8):
        gang.step(step)
    found = audit(tmp_path)
    assert found.ok, found.sentence
    assert (found.steps, found.samples, found.superseded, found.generations) == (8, 96, 8, 2)


@pytest.mark.long
def test_a_run_of_more_generations_than_a_lineage_keeps_is_proved(tmp_path: Path):
    gang = Gang(tmp_path, 1)
    for step in range(KEPT_CUTS + 40):
        gang.step(step)
        for ledger in gang.ledgers:
            ledger.flushing(Version(step))
            ledger.committed(Version(step))
        gang.reform(1, Version(step), {}, keep=step % 2)
    found = audit(tmp_path)
    assert found.ok, found.sentence
    assert (found.steps, found.samples) == (KEPT_CUTS + 40, 12 * (KEPT_CUTS + 40))


@pytest.mark.parametrize(("before", "after"), [(1, 2), (3, 1)])
def test_a_run_that_goes_on_with_another_number_of_turns_is_proved(tmp_path: Path, before: int, after: int):
    gang = Gang(tmp_path, 2, walk=replace(WALK, turns=before))
    for step in range(4):
        gang.step(step)
    gang.cursor.advance(3)
    resumed = Cursor(replace(WALK, turns=after))
    resumed.load_state_dict(gang.cursor.state_dict())
    gang.cursor = resumed
    gang.reform(2, Version(3, before), gang.values())
    for step in range(4, 7):
        gang.step(step)
    found = audit(tmp_path)
    assert found.ok, found.sentence
    assert (found.steps, found.samples) == (7, 12 * (4 * before + 3 * after))


def test_a_step_that_was_under_way_does_not_count_as_missing_unless_it_was_committed(tmp_path: Path):
    gang = Gang(tmp_path, 2)
    for step in range(4):
        gang.step(step)
    gang.step(4, only=1)
    found = audit(tmp_path)
    assert found.ok, found.sentence
    assert (found.steps, found.samples) == (4, 48)
    found = audit(tmp_path, through=Version(4))
    assert len(found.missing) == 6
    assert "NOT exactly once, 6 findings: step 4: sample" in found.sentence


def audited_while(root: Path, goes_on: Callable[[], None]) -> Audit:
    """Audits while a run goes on: w0's file has been read by then, and that of w1 is still to be read.

    Python itself says when that is opened.
    """
    waiting = [goes_on]

    def opening(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and waiting and str(arguments[0]).startswith(f"{root / FOLDER / 'w1-'}"):
            waiting.pop()()

    sys.addaudithook(opening)  # for good: it does nothing any more once the run has gone on
    try:
        found = audit(root)
        assert not waiting, "the run has not gone on"
    finally:
        waiting.clear()
    return found


def test_a_run_that_goes_on_while_it_is_read_loses_nothing(tmp_path: Path):
    # Found by a user: the file that was read first ended thousands of steps before that which was read last.
    gang = Gang(tmp_path, 2)
    for step in range(4):
        gang.step(step)
    gang.step(4, only=1)

    def goes_on() -> None:
        for lane in (2, 3):
            gang.ledgers[1].record(Version(4), lane, gang.cursor.ids(4, 0, lane))
        for step in range(5, 9):
            gang.step(step)

    found = audited_while(tmp_path, goes_on)
    assert found.ok, found.sentence
    assert (found.last, found.steps, found.samples) == (4, 5, 60)
    assert found.beyond == 8, "four steps of two lanes of w1"
    assert found.sentence.endswith(
        "judged through step 4: the run goes on, and what it has written meanwhile is left out"
    )
    assert "goes on" not in audit(tmp_path).sentence


def test_a_sample_that_is_lost_in_the_middle_is_found_while_the_run_goes_on(tmp_path: Path):
    gang = Gang(tmp_path, 2)
    gang.step(0)
    lost = gang.cursor.ids(1, 0, 3)[0]
    for lane in range(4):
        ids = gang.cursor.ids(1, 0, lane)
        gang.ledgers[lane // 2].record(Version(1), lane, ids[1:] if lane == 3 else ids)
    gang.step(2)

    def goes_on() -> None:
        for step in (3, 4, 5):
            gang.step(step)

    found = audited_while(tmp_path, goes_on)
    assert found.missing == (f"step 1: sample {lost} was not used",)
    assert "NOT exactly once, 1 finding" in found.sentence
    assert "judged through step 2: the run goes on" in found.sentence


def test_a_generation_that_begins_while_the_ledger_is_read_supersedes_nothing_of_it(tmp_path: Path):
    gang = Gang(tmp_path, 2)
    for step in range(6):
        gang.step(step)
        if step == 3:
            kept = gang.values()

    def goes_on() -> None:
        gang.reform(2, Version(3), kept, keep=2)
        for step in range(4, 9):
            gang.step(step)

    found = audited_while(tmp_path, goes_on)
    assert found.ok, found.sentence
    assert (found.last, found.superseded, found.generations) == (5, 0, 1)
    found = audit(tmp_path)
    assert found.ok, found.sentence
    assert (found.last, found.superseded, found.beyond) == (8, 8, 0)


def test_one_nodes_ledger_is_no_proof_and_names_the_nodes_that_it_lacks(tmp_path: Path):
    cursor, nodes = Cursor(WALK), ("n-0", "n1", "n2")
    for node, lanes in zip(nodes, deal(WALK.lanes, 3), strict=True):
        ledger = Ledger(tmp_path / node, writer=f"{node}-w0")
        lineage = (Cut(1, Version(-1)),)
        ledger.nodes = nodes
        ledger.begin(generation=1, lineage=lineage, segments=cursor.segments, lanes=lanes)
        for step in range(5):
            for lane in lanes:
                ledger.record(Version(step), lane, cursor.ids(step, 0, lane))
    found = audit(tmp_path / "n-0")
    assert not found.ok
    assert (found.absent, found.missing) == (("n1", "n2"), ())
    assert found.sentence.startswith(
        "NOT proven, 1 finding: the ledgers of n1, n2 are not here, and samples are missing"
    )
    assert audit(tmp_path).ok, "side by side they prove it"


@pytest.mark.parametrize("seed", range(8))
def test_random_kills_joins_and_leaves_lose_and_repeat_nothing(tmp_path: Path, seed: int):
    chance = random.Random(seed)
    gang = Gang(tmp_path, chance.randint(1, 4))
    kept = [(Version(-1), gang.values())]
    step = faults_fired = 0
    while step < 30:
        if chance.random() < 0.4:  # the step breaks off after some workers wrote it down, or is undone after all did
            gang.step(step, only=chance.randint(0, len(gang.ledgers)))
            start, values = chance.choice(kept[-2:])
            survivors = chance.randint(0, len(gang.ledgers))
            world = chance.randint(1, 4)
            gang.reform(world, start, values, keep=min(survivors, world))
            kept = [(v, x) for v, x in kept if v <= start]
            step = start.step + 1
            faults_fired += 1
            continue
        gang.step(step)
        kept.append((Version(step), gang.values()))
        if chance.random() < 0.2:
            for ledger in gang.ledgers:
                ledger.flushing(Version(step))
                ledger.committed(Version(step))
            kept = [(Version(step), gang.values())]
        step += 1
    assert faults_fired > 3
    found = audit(tmp_path, through=Version(29))
    assert found.ok, found.sentence
    assert (found.steps, found.samples) == (30, 360)


def test_what_a_lost_disk_took_with_it_comes_back_from_the_vault(tmp_path: Path):
    gang = Gang(tmp_path, 2)
    for step in range(3):
        gang.step(step)
    values = gang.values()
    lost = tmp_path / FOLDER / f"{gang.ledgers[1].writer}.jsonl"
    lost.unlink()
    assert not audit(tmp_path, through=Version(2)).ok
    gang.reform(1, Version(2), values, keep=1)
    found = audit(tmp_path, through=Version(2))
    assert found.ok, found.sentence
    assert found.samples == 36


def test_rows_written_again_by_a_lanes_new_owner_count_once(tmp_path: Path):
    gang = Gang(tmp_path, 2)
    gang.step(0)
    gang.reform(1, Version(0), gang.values(), keep=1)
    found = audit(tmp_path)
    assert found.ok, found.sentence
    assert found.repeated == 2


def test_committed_rows_need_not_travel(tmp_path: Path):
    gang = Gang(tmp_path, 1)
    for step in range(4):
        gang.step(step)
    ledger = gang.ledgers[0]
    ledger.flushing(Version(2))
    ledger.committed(Version(2))
    assert [len(rows.splitlines()) for rows in ledger.values().values()] == [1, 1, 1, 1]


def test_several_turns_over_a_steps_samples_are_each_counted(tmp_path: Path):
    from dataclasses import replace

    gang = Gang(tmp_path, 2, walk=replace(WALK, turns=2))
    gang.step(0)
    found = audit(tmp_path)
    assert found.ok, found.sentence
    assert found.samples == 24


def test_a_sample_used_twice_is_named(tmp_path: Path):
    gang = Gang(tmp_path, 1)
    gang.step(0)
    twice = gang.cursor.ids(0, 0, 2)
    gang.ledgers[0].record(Version(0), 3, twice[:1])
    found = audit(tmp_path, through=Version(0))
    assert found.duplicates == (
        f"step 0: sample {twice[0]} was used twice (lane 2 of generation 1, lane 3 of generation 1)",
    )
    gang.step(1)
    gang.ledgers[0].record(Version(1), 3, twice[1:2])
    found = audit(tmp_path)
    assert any(f"sample {twice[1]} was used in step 0 and in step 1" in text for text in found.duplicates)
    assert any("is not among the step's samples" in text for text in found.problems)
    assert not found.ok


def test_a_sample_left_out_is_named(tmp_path: Path):
    gang = Gang(tmp_path, 1)
    gang.step(0)
    for lane in range(4):
        ids = gang.cursor.ids(1, 0, lane)
        gang.ledgers[0].record(Version(1), lane, ids[1:] if lane == 2 else ids)
    gang.step(2)
    found = audit(tmp_path)
    assert found.missing == (f"step 1: sample {gang.cursor.ids(1, 0, 2)[0]} was not used",)


def test_a_generation_that_left_the_history_does_not_count_however_far_it_went(tmp_path: Path):
    gang = Gang(tmp_path, 2)
    stale = gang.ledgers[0]
    gang.step(0)
    values = gang.values()
    gang.reform(2, Version(0), values)
    gang.step(1)
    for lane in (0, 1):
        stale.record(Version(1), lane, gang.cursor.ids(1, 0, lane))
    found = audit(tmp_path)
    assert found.ok, found.sentence
    assert found.superseded == 2


def test_a_worker_killed_in_the_middle_of_a_line_leaves_a_ledger_that_reads(tmp_path: Path):
    child = os.fork()
    if not child:
        os.environ[faults.FAULT] = "ledger.write@6:kill"
        faults.reset()
        gang = Gang(tmp_path, 1)
        gang.step(0)
        gang.step(1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL, "the fault never fired"
    found = audit(tmp_path)
    assert found.ok, found.sentence
    assert (found.steps, found.torn) == (1, 1)


def test_a_changed_line_is_a_problem(tmp_path: Path):
    gang = Gang(tmp_path, 1)
    gang.step(0)
    path = tmp_path / FOLDER / f"{gang.ledgers[0].writer}.jsonl"
    data = path.read_bytes()
    path.write_bytes(data.replace(b'"record"', b'"recorb"', 1))
    found = audit(tmp_path, through=Version(0))
    assert found.problems == (f"line 2 of {path.name} was changed",)
    assert len(found.missing) == 3


def test_a_lane_that_is_not_carried_cannot_be_recorded(tmp_path: Path):
    gang = Gang(tmp_path, 2)
    with pytest.raises(DataError, match="Lane 3 is not carried here in generation 1"):
        gang.ledgers[0].record(Version(0), 3, [SampleId(0, 0)])


def test_no_ledger_is_an_error_and_no_proof(tmp_path: Path):
    with pytest.raises(DataError, match="no ledger"):
        audit(tmp_path)


def test_lines_and_records_come_back(tmp_path: Path):
    record = Record(
        serial=("w", 3), generation=2, version=Version(4, 1), lane=5, turn=1, ids=(SampleId(0, 7), SampleId(1, 2))
    )
    line = encode({"record": record.to_json()})
    body = decode(line.rstrip(b"\n"))
    assert body is not None
    assert Record.from_json(body["record"]) == record
    for at in range(len(line) - 1):
        changed = bytearray(line.rstrip(b"\n"))
        changed[at] ^= 4
        assert decode(bytes(changed)) is None
    assert tmp_path


def test_a_streams_run_is_proved_by_its_own_continuity(tmp_path: Path):
    """Nobody knows a stream's samples beforehand; that none is missing between two that were used, can be known."""
    walk = Walk(name="s", size=None, lanes=2, per_lane=2, shuffle=False)
    from elasticrl.runtime.data.cursor import Segment

    ledger = Ledger(tmp_path, writer="w")
    segment = Segment(first=0, epoch=0, offset=0, walk=walk)
    ledger.begin(generation=1, lineage=(Cut(1, Version(-1)),), segments=[segment], lanes=[0, 1])
    row = [SampleId(epoch, index) for epoch in range(2) for index in range(6)]
    for step in range(3):
        for lane in range(2):
            ledger.record(Version(step), lane, row[4 * step + 2 * lane :][:2])
    assert audit(tmp_path, through=Version(2)).ok
    ledger.record(Version(3), 0, [SampleId(2, 0), SampleId(2, 2)])
    ledger.record(Version(3), 1, [SampleId(2, 3), SampleId(2, 4)])
    found = audit(tmp_path, through=Version(3))
    assert found.missing == ("step 3: sample 2:1 was not used",)


def test_lines_that_a_full_disk_did_not_take_are_written_when_there_is_room_again(tmp_path: Path):
    gang = Gang(tmp_path, 1)
    gang.step(0)
    (ledger,) = gang.ledgers
    disk = os.dup(ledger.files[0])
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, ledger.files[0])
    with pytest.raises(DataError, match="takes no more lines"):
        ledger.record(Version(1), 0, gang.cursor.ids(1, 0, 0))
    os.dup2(disk, ledger.files[0])
    for lane in (1, 2, 3):
        ledger.record(Version(1), lane, gang.cursor.ids(1, 0, lane))
    found = audit(tmp_path)
    assert found.ok, found.sentence
    assert found.steps == 2
    for fd in (disk, full):
        os.close(fd)


class Full:
    """A ledger's disk that is full for a while."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    def __enter__(self) -> None:
        self._disk = os.dup(self._ledger.files[0])
        full = os.open("/dev/full", os.O_WRONLY)
        os.dup2(full, self._ledger.files[0])
        os.close(full)

    def __exit__(self, *_: object) -> None:
        os.dup2(self._disk, self._ledger.files[0])
        os.close(self._disk)


def test_lines_of_the_dead_that_found_no_room_are_written_when_there_is_room_again(tmp_path: Path):
    """The disk fills up, a worker dies, and its place is taken before there is room."""
    gang = Gang(tmp_path, 1)
    (dead,) = gang.ledgers
    with Full(dead):
        for step in range(3):
            for lane in range(4):
                with suppress(DataError):
                    dead.record(Version(step), lane, gang.cursor.ids(step, 0, lane))
        travelled = dead.values()
    dead.close()
    gang.generation += 1
    gang.lineage = grow(gang.lineage, gang.generation, Version(2))
    heir = Ledger(tmp_path, writer="heir")
    with Full(heir):
        with suppress(DataError):
            heir.begin(generation=gang.generation, lineage=gang.lineage, segments=gang.cursor.segments, lanes=range(4))
        with pytest.raises(DataError, match="takes no more lines"):
            heir.restored(travelled)
        assert heir.values() == travelled, "and whoever comes after the heir has them all"
        heir.flushing(Version(2))
        heir.committed(Version(2))
        assert heir.values() == travelled, "no commit lets go of what is on no disk"
    heir.catch_up()
    heir.committed(Version(2))
    assert heir.values() == travelled, "it is in the file now, which nobody flushed before that commit"
    heir.flushing(Version(2))
    heir.committed(Version(2))
    assert not any(heir.values().values())
    found = audit(tmp_path)
    assert found.ok, found.sentence
    assert found.steps == 3


def generated(root: Path, lives: list[tuple[int, int | None, dict[int, int]]], *, twice: int | None = None) -> Audit:
    """The audit of lives, each (its first step, the bound of staleness, by which weights its steps' samples are), one turn
    after the other. `twice`: in that step's second turn other weights are named.
    """
    walk, lineage = replace(WALK, turns=2), ()
    for number, (start, stale, by) in enumerate(lives, 1):
        lineage = grow(lineage, number, Version(start - 1, 1))
        ledger, cursor = Ledger(root, writer=f"w{number}"), Cursor(walk)
        ledger.begin(
            generation=number, lineage=lineage, segments=cursor.segments, lanes=range(walk.lanes),
            plan={"stale": stale} if stale is not None else None,
        )  # fmt: skip
        for step, weights in by.items():
            for lane in range(walk.lanes):
                for turn in range(walk.turns):
                    its = weights - 1 if turn and step == twice else weights
                    ledger.record(Version(step, turn), lane, cursor.ids(step, 0, lane), turn=turn, by=its)
        ledger.close()
    return audit(root)


def test_an_audit_says_how_old_the_weights_were_that_generated_the_samples(tmp_path: Path):
    found = generated(tmp_path, [(0, 2, {0: 0, 1: 0, 2: 0, 3: 2, 4: 2})])
    assert found.sentence.endswith("; each generated by one set of weights, at most 2 steps old")
    assert found.oldest == 2


@pytest.mark.parametrize(
    ("lives", "twice", "why"),
    [
        (
            [(0, 2, {0: 0, 1: 0, 2: 0, 3: 0})],
            None,
            "step 3: lane 0 has samples that the weights of step 0 are said to have",
        ),
        (
            [(0, 0, {0: 0, 1: 2})],
            None,
            "step 1: lane 0 has samples that the weights of step 2 are said to have generated",
        ),
        ([(0, 2, {0: 0, 1: 1})], 1, "was generated by the weights of step 1 and by those of step 0"),
        (
            [(0, 4, {0: 0, 1: 0}), (2, 1, {2: 0, 3: 0})],
            None,
            "step 3: .* the weights of step 0 .*rollout.staleness was 1",
        ),
    ],
    ids=["too old", "from the future", "two sets", "another bound"],
)
def test_an_audit_finds_weights_that_cannot_have_generated_a_sample(tmp_path: Path, lives: Any, twice: Any, why: str):
    found = generated(tmp_path, lives, twice=twice)
    assert not found.ok
    assert re.search(why, found.sentence)
    assert not any("step 2:" in problem for problem in found.problems), "begun under the bound before"


def test_a_ledger_that_does_not_say_how_old_samples_may_be_is_not_held_to_it(tmp_path: Path):
    assert generated(tmp_path, [(0, None, {0: 0, 1: 0, 2: 0})]).ok
