"""Flight recorders of real gloo ranks, asked for while the ranks are stuck, and judged as a node tells of them."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from diagnose_gang import gang, stop, until

from chaos.patience import patience
from elasticrl.base.process import state
from elasticrl.contract.evidence import Evidence
from elasticrl.contract.verdict import Fault, Known
from elasticrl.core.judge.judge import judge
from elasticrl.diagnose import stalled, witness
from elasticrl.diagnose.logs import Parser
from elasticrl.diagnose.recorder import Entry, ask, collect, entries


def when_stuck(folder: Path, workers: dict[int, int], lengths: dict[int, int]) -> dict[int, tuple[Entry, ...]]:
    """The recorders, once each rank has entered as many collectives as it ever will."""
    dumps: dict[int, tuple[Entry, ...]] = {}

    def stuck() -> bool:
        dumps.update(collect(folder, workers, within_s=10.0))
        # At least: gloo may take one operation's message for another's, and let a rank go on that should not.
        return all(len(dumps.get(rank, ())) >= length for rank, length in lengths.items())

    until(stuck, 20.0, f"ranks have entered {lengths} collectives")
    return dumps


def told(dumps: dict[int, tuple[Entry, ...]]) -> tuple[Evidence, ...]:
    """What their nodes tell of the recorders, without a stack."""
    return stalled.positions(dumps, {}, lambda rank: f"n{rank:02}")


@pytest.mark.parametrize(
    ("whats", "ranks"),
    [
        (("wait", "wait", "other"), (2,)),
        # As many bytes, read as other numbers: nobody hangs, and the sums are rubbish.
        (("type", "wait", "wait"), (0,)),
    ],
)
def test_the_rank_that_differs_is_named_from_the_recorders_alone(
    whats: tuple[str, ...], ranks: tuple[int, ...], tmp_path: Path
) -> None:
    with gang(tmp_path, *whats) as workers:
        dumps = when_stuck(tmp_path, workers, dict.fromkeys(workers, 4))
    verdict = judge(told(dumps), Known(world=3))
    assert (verdict.fault, verdict.ranks) == (Fault.DESYNC, ranks), (verdict.cause, dumps)


def test_a_rank_with_another_shape_is_named_by_its_own_last_words(tmp_path: Path) -> None:
    """Gloo ends the rank that brought less, so there is nobody to ask."""
    with gang(tmp_path, "wait", "shape", "wait") as workers:
        until(lambda: state(workers[1]) in {"Z", ""}, 20.0, "rank 1 was ended by gloo")
        dumps = when_stuck(tmp_path, {0: workers[0], 2: workers[2]}, {0: 4, 2: 4})
        logged = [fact for rank in workers for fact in Parser(rank=rank).read((tmp_path / f"{rank}.err").read_bytes())]
    verdict = judge([*logged, *told(dumps)], Known(world=3))
    assert (verdict.fault, verdict.ranks) == (Fault.DESYNC, (1,)), (verdict.cause, logged)


def test_a_stopped_rank_costs_the_deadline_and_no_other_ones_answer(tmp_path: Path) -> None:
    with gang(tmp_path, "wait", "wait", "skip") as workers:
        when_stuck(tmp_path, workers, {0: 4, 1: 4, 2: 3})
        stop(workers[2])
        began = time.monotonic()
        dumps = collect(tmp_path, workers, within_s=1.0)
        assert time.monotonic() - began < patience(2.0)
    assert {rank: dump[-1].seq for rank, dump in dumps.items()} == {0: 4, 1: 4}


def test_who_has_no_recorder_or_is_gone_does_not_hold_up_the_others(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from elasticrl.diagnose import witness\n"
        "witness.stand(Path(sys.argv[1])); print('at', flush=True); time.sleep(600)\n"  # until it is killed
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE)
    gone = subprocess.Popen(["true"])
    gone.wait()
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"at\n"
        began = time.monotonic()
        assert collect(tmp_path, {0: process.pid, 1: gone.pid}, within_s=20.0) == {0: ()}
        assert time.monotonic() - began < patience(10.0)
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def test_an_older_question_that_is_heard_later_does_not_take_back_the_answer_to_a_newer_one(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from elasticrl.diagnose import witness\n"
        "witness.stand(Path(sys.argv[1])); print('at', flush=True); time.sleep(600)\n"  # until it is killed
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE)
    answers = witness.recorder_file(tmp_path, process.pid)

    def answered() -> str:
        return str(json.loads(answers.read_bytes())["token"]) if answers.exists() else ""

    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"at\n"
        older, newer = "1" * 24, "2" * 24
        assert ask(tmp_path, process.pid, newer)
        deadline = time.monotonic() + patience(20.0)
        while answered() != newer and time.monotonic() < deadline:
            time.sleep(0.01)  # between looks, up to the deadline
        assert ask(tmp_path, process.pid, older)
        for _ in range(30):
            time.sleep(0.01)  # it answers a question in a few milliseconds: an answer to the older one would come now
            assert answered() == newer
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def raw(seq: int, pg_id: int, group: str = "0") -> dict[str, object]:
    return {"collective_seq_id": seq, "pg_id": pg_id, "process_group": [group, ""], "profiling_name": "gloo:all_reduce"}


def test_a_group_that_was_left_is_not_taken_for_the_one_that_followed_it() -> None:
    """A survivor's recorder still holds the collectives of earlier generations, under the same name."""
    survivor = {"entries": [raw(1, 0), raw(2, 0), raw(3, 0), raw(1, 1, "tp"), raw(1, 2), raw(2, 2)]}
    assert [(entry.group, entry.seq) for entry in entries(survivor)] == [("0", 1), ("0", 2), ("tp", 1)]
