"""Flight recorders as torch writes them, read; and what real ones say of a fault, the way a node tells it."""

import json
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from elasticrl.contract.verdict import Fault, Known
from elasticrl.core.judge.judge import judge
from elasticrl.diagnose import recorder, stalled
from elasticrl.diagnose.recorder import Entry, entries
from elasticrl.diagnose.stacks import Frame, Stack

REAL = Path(__file__).parent.parent / "data" / "recorder"
INSIDE = Frame(file="/x/torch/distributed/distributed_c10d.py", line=9, name="all_reduce")


@pytest.mark.parametrize(
    ("case", "odd", "fault"),
    [
        ("h100_shape", 1, Fault.DESYNC),
        ("h100_skip", 1, Fault.HOST_HANG),
        ("shape", 2, Fault.DESYNC),
        ("skipped", 1, Fault.HOST_HANG),
    ],
)
def test_what_real_ranks_recorded_names_the_one_that_was_made_to_fail(case: str, odd: int, fault: Fault) -> None:
    """Three over NCCL on one H100, after a real watchdog timeout, and three over gloo, as the workers hand them over."""
    dumps = {rank: entries(json.loads((REAL / f"{case}_{rank}.json").read_bytes())) for rank in range(3)}
    assert all(dumps.values())
    # Who waits is seen in its stack. Whom sizes part is known without.
    waiting = {rank: Stack(pid=rank, frames=(INSIDE,)) for rank in range(3) if rank != odd}
    facts = stalled.positions(dumps, waiting if fault is Fault.HOST_HANG else {}, lambda rank: f"n{rank:02}")
    verdict = judge(facts, Known(world=3))
    assert (verdict.fault, verdict.ranks) == (fault, (odd,)), verdict.cause


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["collective_seq_id", "input_sizes", "process_group", "frames", "profiling_name", "state", "is_p2p"]
            ),
            inner,
            max_size=7,
        )
    ),
    max_leaves=12,
)


@settings(deadline=None)
@example({0: {"entries": []}, 1: {"entries": [{"collective_seq_id": -1}]}})
@given(
    st.dictionaries(st.integers(0, 3), st.lists(JSON, max_size=4).map(lambda listed: {"entries": listed}), max_size=4)
)
def test_no_dump_breaks_what_is_told_of_it(dumps: dict[int, object]) -> None:
    stalled.positions({rank: entries(dump) for rank, dump in dumps.items()}, {}, lambda _: None)


@pytest.mark.parametrize("text", ["[]", "{}", '{"entries": 3}', '{"entries": "abc"}', '{"entries": [3, [], null]}'])
def test_what_is_no_dump_has_no_entries(text: str) -> None:
    assert entries(json.loads(text)) == ()


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"token": 3', '{"token": "1"}', "[" * 100_000, '"' + "x" * 9])
def test_what_is_no_answer_is_waited_for(tmp_path: Path, text: str) -> None:
    (tmp_path / "answer").write_text(text)
    assert recorder._answer(tmp_path / "answer", "2") is None


def test_a_dump_is_read_as_torch_writes_it() -> None:
    raw = {"collective_seq_id": 3, "process_group": ["7", "mesh_dp"], "profiling_name": "nccl:all_reduce",
    "input_sizes": [[4, 8], [2]],
           "input_dtypes": ["Float", "Float"], "state": "started", "is_p2p": False,
           "frames": [{"name": "all_reduce", "filename": "/x/torch/distributed/c10d.py", "line": 1},
                      {"name": "step", "filename": "/job/train.py", "line": 88}]}  # fmt: skip
    p2p = {**raw, "is_p2p": True}
    (entry,) = entries({"version": "2.10", "entries": [raw, p2p]})
    assert entry == Entry(
        group="7", seq=3, op="all_reduce", sizes=((4, 8), (2,)), dtypes=("Float", "Float"), state="started"
    )
    assert entry.numel == 34


def test_what_was_entered_after_a_moment_is_left_out_so_that_a_gang_that_is_no_more_can_be_compared() -> None:
    def raw(seq: int, pg: int, at: int) -> dict[str, object]:
        return {"collective_seq_id": seq, "process_group": ["", "default_pg"], "pg_id": pg, "time_created_ns": at,
                "profiling_name": "gloo:all_reduce", "input_sizes": [[4]], "input_dtypes": ["Float"]}  # fmt: skip

    dump = {"entries": [raw(7, 0, 10), raw(8, 0, 20), raw(1, 1, 30), raw(2, 1, 40)]}
    assert [entry.seq for entry in entries(dump)] == [1, 2]
    assert [entry.seq for entry in entries(dump, until_ns=25)] == [7, 8]


def test_a_long_list_of_tensors_is_told_in_few_words_that_still_tell_two_apart() -> None:
    def many(last: int) -> Entry:
        return Entry(
            group="0", seq=1, op="all_reduce_coalesced", sizes=((64, 64),) * 99 + ((last,),), dtypes=("Float",)
        )

    assert many(7).call == many(7).call
    assert many(7).call.what != many(8).call.what
    assert len(many(7).call.what) < 80
    uneven = [Entry(group="0", seq=1, op="all_to_all", sizes=((n,),), dtypes=("Float",)).call.what for n in (3, 9)]
    assert uneven[0] == uneven[1]
