"""Flight recorders of all ranks, compared: the first column in which they differ is where it went wrong."""

import json
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from elasticrl.core.evidence import Evidence, Sign
from elasticrl.core.judge import judge
from elasticrl.core.verdict import Facts, Fault
from elasticrl.diagnose.recorder import Entry, compare, entries, load

REAL = Path(__file__).parent.parent / "data" / "recorder"


def row(*ops: str, size: int = 64, state: str = "scheduled", group: str = "0") -> list[Entry]:
    return [
        Entry(group=group, seq=i, op=op, sizes=((size,),), dtypes=("Float",), state=state, frame=f"train.py:{i} step")
        for i, op in enumerate(ops, start=1)
    ]


def signs(found: tuple[Evidence, ...]) -> dict[int | None, Sign]:
    return {fact.rank: fact.sign for fact in found}


def test_ranks_that_agree_give_no_evidence_against_anybody() -> None:
    same = {rank: row("all_reduce", "broadcast", state="completed") for rank in range(4)}
    assert compare(same) == ()
    stuck = compare({rank: row("all_reduce") for rank in range(4)})
    assert set(signs(stuck).values()) == {Sign.WAITED}
    assert judge(stuck).ranks == ()


def test_the_rank_that_is_behind_did_not_enter_what_the_others_are_in() -> None:
    found = compare({0: row("all_reduce", "all_reduce"), 1: row("all_reduce"), 2: row("all_reduce", "all_reduce")})
    assert signs(found) == {0: Sign.WAITED, 1: Sign.ABSENT, 2: Sign.WAITED}
    (behind,) = [fact for fact in found if fact.rank == 1]
    assert (behind.op, behind.seq, behind.numel_in) == ("all_reduce", 2, 64)
    assert "train.py:1" in behind.detail
    assert (judge(found).fault, judge(found).ranks) == (Fault.HOST_HANG, (1,))


def test_a_rank_that_has_finished_its_last_collective_is_stuck_on_its_host() -> None:
    found = compare(
        {
            0: row("all_reduce", "all_reduce"),
            1: row("all_reduce", state="completed"),
            2: row("all_reduce", "all_reduce"),
        }
    )
    assert signs(found)[1] is Sign.HOST_STUCK


@pytest.mark.parametrize(
    ("case", "signs_of", "fault", "seq"),
    [
        ("shape", {1: Sign.MISMATCH}, Fault.DESYNC, 42),
        ("skip", {0: Sign.WAITED, 1: Sign.HOST_STUCK, 2: Sign.WAITED}, Fault.HOST_HANG, 51),
    ],
)
def test_what_nccl_ranks_on_a_gpu_recorded(case: str, signs_of: dict[int, Sign], fault: Fault, seq: int) -> None:
    """Three ranks on one H100, after a real watchdog timeout. Without the collective that rank 1 left out it is one behind."""
    found = compare({rank: load((REAL / f"h100_{case}_{rank}.json").read_text()) for rank in range(3)})
    assert signs(found) == signs_of
    assert {fact.seq for fact in found} == {seq}
    assert (judge(found).fault, judge(found).ranks) == (fault, (1,))


def test_a_rank_that_never_entered_the_group_is_named() -> None:
    assert signs(compare({0: row("all_reduce"), 1: [], 2: row("all_reduce")}))[1] is Sign.ABSENT


def test_another_operation_size_or_type_at_the_same_number_is_a_mismatch_of_the_odd_one() -> None:
    usual = row("all_reduce", "all_reduce")
    bf16 = [*usual[:1], Entry(group="0", seq=2, op="all_reduce", sizes=((64,),), dtypes=("BFloat16",))]
    for odd in (row("all_reduce", "broadcast"), [*usual[:1], *row("x", "all_reduce", size=32)[1:]], bf16):
        found = compare({0: usual, 1: usual, 2: odd, 3: usual})
        assert signs(found) == {2: Sign.MISMATCH}
        assert (judge(found).fault, judge(found).ranks) == (Fault.DESYNC, (2,))
        assert found[0].seq == 2


def test_of_two_that_differ_both_are_named() -> None:
    assert set(signs(compare({0: row("all_reduce"), 1: row("broadcast")}))) == {0, 1}


def test_sizes_may_differ_in_an_all_to_all() -> None:
    assert Sign.MISMATCH not in signs(compare({0: row("all_to_all", size=3), 1: row("all_to_all", size=9)})).values()


def test_that_one_is_ahead_of_most_proves_nothing_about_anybody() -> None:
    found = compare({0: row("all_reduce", "all_reduce"), 1: row("all_reduce"), 2: row("all_reduce")})
    assert signs(found) == {0: Sign.WAITED}


def test_groups_are_compared_apart_and_only_among_their_ranks() -> None:
    dumps = {
        0: [*row("all_reduce"), *row("all_gather", "all_gather", group="tp0")],
        1: [*row("all_reduce"), *row("all_gather", "all_gather", group="tp0")],
        2: [*row("all_reduce"), *row("broadcast", group="tp1")],
        3: [*row("all_reduce"), *row("broadcast", group="tp1")],
    }
    assert set(signs(compare(dumps)).values()) == {Sign.WAITED}


def test_a_rank_that_gave_no_dump_cannot_run() -> None:
    found = compare({0: row("all_reduce"), 1: row("all_reduce")}, expected=range(3))
    assert signs(found)[2] is Sign.ABSENT
    assert judge(found, Facts(world=3)).ranks == (2,)


@pytest.mark.parametrize(
    ("case", "ranks", "fault"), [("skipped", (1,), Fault.HOST_HANG), ("shape", (2,), Fault.DESYNC)]
)
def test_dumps_of_real_gloo_ranks_name_the_rank_that_was_made_to_fail(
    case: str, ranks: tuple[int, ...], fault: Fault
) -> None:
    """Recorded from three processes over gloo with torch 2.13, as the workers hand them over."""
    dumps = {int(path.stem.rsplit("_", 1)[1]): load(path.read_text()) for path in sorted(REAL.glob(f"{case}_*.json"))}
    assert len(dumps) == 3
    assert all(dumps.values())
    verdict = judge(compare(dumps))
    assert (verdict.fault, verdict.ranks) == (fault, ranks), verdict.cause


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
def test_no_dump_breaks_the_comparison(dumps: dict[int, object]) -> None:
    compare({rank: entries(dump) for rank, dump in dumps.items()}, expected=range(4))


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"entries": 3}', '{"entries": "abc"}', "[" * 100_000, '"' + "x" * 9])
def test_what_is_no_dump_has_no_entries(text: str) -> None:
    assert load(text) == ()


def test_a_dump_is_read_as_torch_writes_it() -> None:
    raw = {"collective_seq_id": 3, "process_group": ["7", "mesh_dp"], "profiling_name": "nccl:all_reduce",
    "input_sizes": [[4, 8], [2]],
           "input_dtypes": ["Float", "Float"], "state": "started", "is_p2p": False,
           "frames": [{"name": "all_reduce", "filename": "/x/torch/distributed/c10d.py", "line": 1},
                      {"name": "step", "filename": "/job/train.py", "line": 88}]}  # fmt: skip
    p2p = {**raw, "is_p2p": True}
    (entry,) = load(json.dumps({"version": "2.10", "entries": [raw, p2p]}))
    assert entry == Entry(group="7", seq=3, op="all_reduce", sizes=((4, 8), (2,)), dtypes=("Float", "Float"),
        state="started",
                          frame="train.py:88 step")  # fmt: skip
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
