"""The verdict: the first cause wins over the loudest, a rank that only waited is never blamed, unknown is better than wrong."""

import ast
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elasticrl.contract.evidence import SAVE, Call, Evidence, Kind, Sign, of_exit, of_stall
from elasticrl.contract.model import Exit, Stall
from elasticrl.contract.verdict import Confidence, Fault, Known, Verdict
from elasticrl.core.judge import judge as judging
from elasticrl.core.judge.judge import judge
from elasticrl.core.judge.meanings import CONSEQUENCES, HARD, MEANINGS

EIGHT = Known(world=8, heard=frozenset(range(8)), nodes={rank: f"n{rank // 2:02}" for rank in range(8)})


def wait(rank: int, **known: object) -> Evidence:
    fact = Evidence(
        kind=Kind.WATCHDOG_TIMEOUT, sign=Sign.WAITED, rank=rank, op="ALLREDUCE", seq=4486, numel_in=64, numel_out=64,
        timeout_ms=600_000, elapsed_ms=600_010, when=1000.0, clock="glog",
    )  # fmt: skip
    return replace(fact, **known)  # type: ignore[arg-type]


def waits(*ranks: int, **known: object) -> list[Evidence]:
    return [wait(rank, **known) for rank in ranks]


def stalled(rank: int, phase: str = "update", *, waiting: bool = True, stopped: bool = False) -> Evidence:
    stall = Stall(slot=0, step=9, phase=phase, for_s=12.0, budget_s=10.0, waiting=waiting, stopped=stopped)
    return of_stall(stall, rank=rank, node=f"n{rank // 2:02}", when=50.0)


def ended(rank: int, cause: str, *, own: bool = False, when: float = 50.0, **more: object) -> Evidence:
    left = Exit(generation=3, slot=0, step=9, cause=cause, own=own, **more)
    return of_exit(left, rank=rank, node=f"n{rank // 2:02}", when=when)


def probe(node: str, peer: str, sign: Sign = Sign.UNREACHABLE) -> Evidence:
    return Evidence(kind=Kind.PROBE, sign=sign, node=node, peer=peer, source="probe")


def logged(sign: Sign, rank: int | None = None, **known: object) -> Evidence:
    return replace(Evidence(kind=Kind.EXCEPTION, sign=sign, rank=rank, when=300.0, clock="glog"), **known)  # type: ignore[arg-type]


def test_what_most_nodes_say_of_a_broken_nccl_is_told_and_may_have_a_remedy_of_its_own() -> None:
    # As said on an H100: of two that test each other the second only sees the first go away.
    lost = "all_reduce: . This may indicate a possible application crash on rank 0 or a network set up issue."
    none = "all_reduce: Bootstrap : no socket interface found"
    pairs = (("n0", "n1", lost), ("n0", "n2", none), ("n1", "n2", none))
    found = judge([replace(probe(a, b, Sign.NCCL_BROKEN), detail=said) for a, b, said in pairs])
    assert found.fault is Fault.FABRIC
    assert none in found.cause
    assert "NCCL_SOCKET_IFNAME names an interface" in found.remedy


NOISE = [logged(Sign.PROGRAM, 1, when=None), logged(Sign.GPU_MEMORY, 1, when=None), logged(Sign.RAISED, 1, when=None)]

#: name -> (evidence, class, ranks, nodes). Each is judged again with rank 1, who is innocent, made noisy.
INJECTED: dict[str, tuple[list[Evidence], Fault, tuple[int, ...], tuple[str, ...]]] = {
    "SIGSTOP": ([*(stalled(r) for r in (0, 1, 2)), stalled(3, waiting=False, stopped=True)], Fault.HOST_HANG, (3,),
    ("n01",)),
    "SIGTERM, not of the agent's": ([ended(3, "signal 15 (SIGTERM)", signal=15), Evidence(kind=Kind.KERNEL, sign=Sign.LINK,
    node="n00", source="health", detail="40 tx_dropped")], Fault.DEAD_RANK, (3,), ("n01",)),
    "SIGKILL": ([ended(3, "signal 9 (SIGKILL)", signal=9), ended(2, "exit code 1: RuntimeError: Connection closed by peer",
    when=50.1)],
                Fault.DEAD_RANK, (3,), ("n01",)),
    "sleep in the dataloader": ([*(stalled(r) for r in (0, 1, 2)), stalled(3, "data", waiting=False)], Fault.HOST_HANG,
    (3,), ("n01",)),
    "sleep in save": ([*(stalled(r) for r in (0, 1, 2)), stalled(3, "save", waiting=False)], Fault.HOST_HANG, (3,),
    ("n01",)),
    "another shape": ([Evidence(kind=Kind.RECORDER, sign=Sign.MISMATCH, rank=3, ranks=(3,), op="all_reduce", seq=41,
    source="recorder"),
                       *(stalled(r) for r in (0, 1, 2, 3))], Fault.DESYNC, (3,), ("n01",)),
    "a skipped collective": ([Evidence(kind=Kind.RECORDER, sign=Sign.ABSENT, rank=3, op="all_reduce", seq=41,
    source="recorder"),
                              *(stalled(r) for r in (0, 1, 2))], Fault.HOST_HANG, (3,), ("n01",)),
    "a slow rank": ([Evidence(kind=Kind.BEAT, sign=Sign.SLOW, rank=3, node="n01", detail="update", source="beats")],
                    Fault.STRAGGLER, (3,), ("n01",)),
    "a node's power": ([Evidence(kind=Kind.NODE, sign=Sign.NODE_GONE, node="n03", source="lease"),
                        ended(0, "exit code 1: RuntimeError: Connection reset by peer")], Fault.DEAD_NODE, (), ("n03",)),
    "a link down": ([*(stalled(r) for r in range(4)), probe("n00", "n03"), probe("n01", "n03"), probe("n03", "n00")],
                    Fault.NETWORK, (), ("n03",)),
    "NCCL broken, gloo fine": ([*(stalled(r) for r in range(4)), probe("n00", "n03", Sign.NCCL_BROKEN),
                                probe("n01", "n03", Sign.NCCL_BROKEN), probe("n00", "n01", Sign.HEALTHY)], Fault.FABRIC,
                                (), ("n03",)),
    "MTU black hole": ([*(stalled(r) for r in range(4)), Evidence(kind=Kind.PROBE, sign=Sign.MTU, node="n02",
    source="probe")],
                       Fault.NETWORK, (), ("n02",)),
    "a full disk": ([logged(Sign.DISK_FULL, 3, kind=Kind.DISK), ended(3, "exit code 1: OSError: No space left on device",
    own=True),
                     *waits(0, 2)], Fault.DISK, (3,), ("n01",)),
    "host memory in a cgroup": ([ended(3, "signal 9 (SIGKILL)", signal=9), Evidence(kind=Kind.OOM_KILLER, sign=Sign.OOM_KILLED,
    rank=3,
                                 node="n01", source="cgroup")], Fault.OOM_HOST, (3,), ("n01",)),
    "a wrong interface": ([ended(3, "exit code 1: RuntimeError", own=True), logged(Sign.SETTING, 3)], Fault.CONFIG, (3,),
    ("n01",)),
    "two versions of torch": ([Evidence(kind=Kind.VERSION, sign=Sign.VERSIONS, node="n02", detail="torch 2.12",
    source="join")],
                              Fault.VERSION_MISMATCH, (), ("n02",)),
}  # fmt: skip


@pytest.mark.parametrize("noisy", [False, True])
@pytest.mark.parametrize("fault", INJECTED)
def test_an_injected_fault_gets_its_class_and_culprit_also_beside_a_noisy_innocent(fault: str, noisy: bool) -> None:
    facts, expected, ranks, nodes = INJECTED[fault]
    hard = any(fact.kind in HARD and fact.rank is not None and fact.sign in MEANINGS for fact in facts)
    verdict = judge([*(NOISE if noisy and hard else []), *facts], EIGHT)
    assert (verdict.fault, verdict.ranks) == (expected, ranks), verdict.cause
    assert set(nodes) <= set(verdict.nodes)
    assert verdict.because
    assert verdict.against


def test_waits_alone_name_nobody_and_are_never_sure() -> None:
    verdict = judge(waits(*range(8)), EIGHT)
    assert (verdict.ranks, verdict.nodes, verdict.confidence) == ((), (), Confidence.LOW)


def test_the_first_cause_wins_over_the_loudest() -> None:
    verdict = judge([*waits(0, 1, 2, 4, 5), logged(Sign.GPU_BROKEN, 3, when=395.0), *waits(6, 7)], EIGHT)
    assert (verdict.fault, verdict.ranks) == (Fault.GPU_FAULT, (3,))


def test_of_two_causes_the_earlier_one_is_the_verdict_and_the_other_is_told() -> None:
    early, late = logged(Sign.HOST_MEMORY, 2, when=100.0), logged(Sign.DISK_FULL, 5, when=220.0)
    verdict = judge([late, early], EIGHT)
    assert (verdict.fault, verdict.ranks) == (Fault.OOM_HOST, (2,))
    assert any("disk full" in doubt for doubt in verdict.against)


def test_a_cause_beside_how_it_showed_is_the_deeper_one() -> None:
    """The SIGKILL is seen first; the kernel's line that explains it comes a moment later."""
    killed = ended(3, "signal 9 (SIGKILL)", signal=9, when=50.0)
    kernel = Evidence(kind=Kind.OOM_KILLER, sign=Sign.OOM_KILLED, node="n01", when=51.0, clock="core", source="kernel")
    assert judge([killed, kernel], EIGHT).fault is Fault.OOM_HOST


def test_a_machine_whose_memory_was_seen_full_first_does_not_hide_the_rank_that_was_killed_for_it() -> None:
    full = Evidence(
        kind=Kind.OOM, sign=Sign.HOST_MEMORY, node="n01", detail="memory.cgroup: 100%", when=49.0, clock="core",
        source="health",
    )  # fmt: skip
    killed = ended(
        3, "out of memory: the kernel killed a process of this node's cgroup for want of memory", sign=Sign.OOM_KILLED
    )
    verdict = judge([full, killed], EIGHT)
    assert (verdict.fault, verdict.ranks, verdict.nodes) == (Fault.OOM_HOST, (3,), ("n01",))
    elsewhere = judge([replace(full, node="n00"), killed], EIGHT)
    assert elsewhere.fault is Fault.OOM_HOST


def test_what_came_after_the_end_is_no_cause() -> None:
    verdict = judge([*waits(0, 1), logged(Sign.PROGRAM, 0, when=1010.0)], EIGHT)
    assert verdict.fault is not Fault.USER_ERROR


def test_an_error_that_its_rank_survived_is_no_cause() -> None:
    """It was caught long before the wait began (1000 s - 600 s)."""
    verdict = judge([logged(Sign.GPU_MEMORY, 0, when=200.0), *waits(0, 1)], EIGHT)
    assert verdict.fault is not Fault.OOM_GPU


def test_what_is_only_likely_is_not_laid_at_the_door_of_a_rank_that_is_seen_in_the_collective_with_all_others() -> None:
    """Found where one node's packets took long: its gang stood still, and an innocent rank's log spoke of a CUDA error."""
    seen = [replace(stalled(rank), detail="in update") for rank in range(8)]
    claim = logged(Sign.BAD_ACCESS, 1, when=None, source="rank_1.log", line_no=7)
    verdict = judge([claim, *seen], EIGHT)
    assert (verdict.fault, verdict.ranks) == (Fault.NETWORK, ())
    gone = judge([claim, *(fact for fact in seen if fact.rank != 1)], EIGHT)
    assert (gone.fault, gone.ranks) == (Fault.USER_ERROR, (1,)), "who is not seen there may well have broken"


def test_the_same_number_of_different_groups_is_not_compared() -> None:
    apart = [*waits(0, 1, group="tp0"), *waits(2, 3, group="tp1", numel_in=32, numel_out=32)]
    assert judge(apart, EIGHT).fault is not Fault.DESYNC
    together = [*waits(0, 1, group="dp"), *waits(2, group="dp", numel_in=32, numel_out=32)]
    assert (judge(together, EIGHT).fault, judge(together, EIGHT).ranks) == (Fault.DESYNC, (2,))


def test_numbers_without_a_group_are_not_compared_if_a_rank_shows_two() -> None:
    mixed = [wait(0, seq=7), wait(0, seq=90), wait(1, seq=7, numel_in=1, numel_out=1), wait(1, seq=90)]
    assert judge(mixed, EIGHT).fault is not Fault.DESYNC


def entered(rank: int, *calls: tuple[str, int], first: int = 41, sign: Sign = Sign.BEHIND) -> Evidence:
    """What a rank's recorder shows of its last collectives."""
    seen = tuple(Call(seq=first + i, what=what, numel=numel) for i, (what, numel) in enumerate(calls))
    return Evidence(
        kind=Kind.RECORDER, sign=sign, rank=rank, group="default_pg", op="all_reduce", seq=seen[-1].seq, calls=seen,
        node=f"n{rank // 2:02}", source="recorder", generation=3,
    )  # fmt: skip


SMALL, LARGE, LAST = ("all_reduce 64 Float", 64), ("all_reduce 128 Float", 128), ("all_reduce 9 Float", 9)
SHORT = logged(Sign.MISMATCH, 1, kind=Kind.GLOO_ERROR, when=None, line_no=7)  # gloo ended rank 1, who brought less


@pytest.mark.parametrize(
    ("facts", "ranks"),
    [
        # One node sees one rank only, and the odd one has gone on: its newest collective is another one by now.
        ([entered(0, SMALL), entered(2, LARGE, LAST), entered(4, SMALL)], (2,)),
        ([entered(0, SMALL), entered(2, ("broadcast 64 Float", 64)), entered(4, SMALL)], (2,)),
        ([entered(0, SMALL), entered(2, SMALL, LAST), entered(4, SMALL)], ()),
        ([entered(0, SMALL), entered(2, LAST, first=9)], ()),
        # Who brought less is dead: the odd one, if the others brought the same; else it was with those that brought least.
        ([SHORT, entered(0, SMALL), entered(2, SMALL)], (1,)),
        ([SHORT, entered(0, SMALL), entered(2, LARGE)], (2,)),
        ([SHORT, replace(SHORT, rank=0), entered(2, LARGE)], (2,)),
        # One against one, for the others have not come yet: who did what had never been done is odd.
        ([SHORT, entered(0, SMALL, SMALL), entered(2, SMALL)], (1,)),
        ([SHORT, entered(0, SMALL, LARGE), entered(2, SMALL)], (0,)),
        ([entered(0, SMALL, SMALL), entered(2, SMALL, LARGE)], (2,)),
        ([SHORT, entered(0, SMALL)], (0, 1)),
    ],
)  # fmt: skip
def test_across_nodes_ranks_are_compared_by_their_last_collectives(
    facts: list[Evidence], ranks: tuple[int, ...]
) -> None:
    died = [replace(ended(1, "signal 6 (SIGABRT)", signal=6), generation=3)] if SHORT in facts else []
    verdict = judge([*died, *facts], Known(world=5))
    assert verdict.ranks == ranks, verdict.cause
    assert (verdict.fault is Fault.DESYNC) == bool(ranks)


def test_whom_gloo_ends_for_bringing_less_is_not_named_before_others_have_shown_what_they_brought() -> None:
    verdict = judge([SHORT, ended(1, "signal 6 (SIGABRT)", signal=6)], EIGHT)
    assert (verdict.fault, verdict.ranks, verdict.nodes) == (Fault.DESYNC, (), ())
    assert "rank 1 or a peer entered" in verdict.cause


def test_what_recorders_prove_is_not_undone_by_what_the_one_whom_gloo_ended_had_printed_before() -> None:
    noise = [replace(fact, line_no=9, generation=3) for fact in NOISE]
    died = replace(ended(1, "signal 6 (SIGABRT)", signal=6), generation=3)
    before = judge([*noise, died], EIGHT)
    assert Sign.ABORTED in {fact.sign for fact in before.because}, "by which the others' recorders are asked for"
    after = judge([*noise, died, SHORT, entered(0, SMALL), entered(2, LARGE)], EIGHT)
    assert (after.fault, after.ranks) == (Fault.DESYNC, (2,))


def test_who_is_seen_to_keep_up_with_the_others_is_not_believed_to_have_broken_whatever_its_log_says() -> None:
    waiting = [
        Evidence(kind=Kind.STACK, sign=Sign.WAITED, rank=r, op="all_reduce", source="faulthandler") for r in (0, 1)
    ]
    away = Evidence(kind=Kind.STACK, sign=Sign.ELSEWHERE, rank=2, detail="in its dataloader", source="faulthandler")
    noise = [replace(fact, line_no=9) for fact in (*NOISE, logged(Sign.LINK, 1, when=None, kind=Kind.NCCL_WARN))]
    assert judge([*noise, *waiting, away], Known(world=3)).ranks == (2,)
    cut = [probe("n00", "n02"), probe("n01", "n02"), probe("n00", "n01", Sign.HEALTHY)]
    assert judge([*noise, *waiting, *cut], Known(world=3)).nodes == ("n02",)


def test_a_node_that_was_taken_for_dead_and_lives_has_a_bad_link() -> None:
    gone = Evidence(kind=Kind.NODE, sign=Sign.NODE_GONE, node="n03", source="leader", when=50.0, clock="core")
    noise = [
        replace(fact, line_no=9, node="n00", when=49.5, clock="core") for fact in (*NOISE, logged(Sign.BAD_ACCESS, 1))
    ]
    assert (judge([*noise, gone]).fault, judge([*noise, gone]).nodes) == (Fault.DEAD_NODE, ("n03",))
    lives = replace(gone, sign=Sign.UNHEARD, source="daemon", when=51.0)
    assert (judge([gone]).fault, judge([gone]).nodes) == (Fault.DEAD_NODE, ("n03",))
    assert (judge([gone, lives]).fault, judge([gone, lives]).nodes) == (Fault.NETWORK, ("n03",))


def test_nodes_that_go_at_one_stroke_are_all_named() -> None:
    # Found by new users: of two nodes that were killed at once one was told of, and one node told of the other.
    def gone(node: str, when: float) -> Evidence:
        return Evidence(
            kind=Kind.NODE, sign=Sign.NODE_GONE, node=node, source="leader", when=when, clock="core",
            detail="is not heard by n0",
        )  # fmt: skip

    both = judge([gone("n3", 50.0), gone("n2", 50.04)])
    assert both.nodes == ("n2", "n3")
    assert both.said == "n2 and n3 stopped responding (n3: is not heard by n0)"
    assert judge([gone("n3", 50.0), gone("n2", 53.0)]).said == "n3 stopped responding (is not heard by n0)", (
        "another fault"
    )


def test_a_log_that_claims_that_a_wait_has_ended_does_not_make_a_later_death_a_part_of_its_end() -> None:
    claimed = replace(wait(2), when=40.0, clock="core", line_no=8)
    died = replace(ended(3, "signal 9 (SIGKILL)", signal=9, when=50.0), clock="core")
    noise = [replace(fact, when=40.0, clock="core", line_no=9) for fact in (*NOISE, logged(Sign.BAD_ACCESS, 1))]
    verdict = judge([*noise, claimed, died], EIGHT)
    assert (verdict.fault, verdict.ranks) == (Fault.DEAD_RANK, (3,))


def test_who_is_seen_to_abort_is_named_and_not_who_complains_in_its_log() -> None:
    noise = [replace(fact, line_no=9) for fact in (*NOISE, logged(Sign.BAD_ACCESS, 1), logged(Sign.LINK, 1))]
    verdict = judge([*noise, ended(3, "signal 6 (SIGABRT)", signal=6)], EIGHT)
    assert (verdict.fault, verdict.ranks, verdict.confidence) == (Fault.DEAD_RANK, (3,), Confidence.LOW)
    waited = [replace(wait(r), line_no=4) for r in range(8)]
    link = logged(Sign.LINK, 5, kind=Kind.NCCL_WARN, line_no=3)
    all_aborted = [ended(r, "signal 6 (SIGABRT)", signal=6) for r in range(8)]
    assert judge([link, *waited, *all_aborted], EIGHT).fault is Fault.NETWORK, "as watchdogs do, when they have waited"


def test_a_full_disk_explains_no_silence_and_no_broken_way() -> None:
    full = Evidence(kind=Kind.DISK, sign=Sign.DISK_FULL, node="n03", detail="checkpoint.space", source="health")
    gone = Evidence(kind=Kind.NODE, sign=Sign.NODE_GONE, node="n03", source="leader")
    assert judge([full, gone]).fault is Fault.DEAD_NODE
    assert judge([full, probe("n00", "n03", Sign.MTU), probe("n01", "n03", Sign.MTU)]).fault is Fault.NETWORK
    assert judge([full, ended(6, "signal 9 (SIGKILL)", signal=9)]).fault is Fault.DEAD_RANK
    noise = [replace(fact, line_no=9, node="n00") for fact in NOISE]
    noise = [*noise, replace(wait(1), when=10.0, clock="core", line_no=8)]
    later = replace(full, when=50.0, clock="core")
    assert (judge([*noise, later]).fault, judge([*noise, later]).nodes) == (Fault.DISK, ("n03",))
    assert judge([full, ended(6, "exit code 1: OSError", own=True)]).fault is Fault.DISK


def test_a_full_disk_explains_no_hang_but_one_in_a_save() -> None:
    """Found live: a hang soon after a disk was full was blamed on the disk, and cost a probe and a restart of all."""
    full = Evidence(kind=Kind.DISK, sign=Sign.DISK_FULL, node="n03", detail="checkpoint.space", source="health")
    seen = [
        Evidence(kind=Kind.STACK, sign=Sign.WAITED, rank=r, op="all_reduce", source="faulthandler") for r in range(7)
    ]
    for phase, fault in (("", Fault.HOST_HANG), (SAVE, Fault.DISK)):
        away = Evidence(kind=Kind.STACK, sign=Sign.ELSEWHERE, rank=7, node="n03", phase=phase, source="faulthandler")
        assert judge([full, *seen, away], EIGHT).fault is fault
        stuck = judge([full, *seen, stalled(7, "save" if fault is Fault.DISK else "data", waiting=False)], EIGHT)
        assert stuck.fault is fault
    assert judge([replace(full, node="n00"), *seen, away], EIGHT).ranks == (7,), "the other node's disk"
    assert judge([full, *seen], EIGHT).fault is Fault.DISK, "nothing was seen to befall anybody"


@pytest.mark.parametrize(
    ("phase", "fault"),
    [("save", Fault.DISK), ("save_eval", Fault.HOST_HANG), ("savepoint", Fault.HOST_HANG), ("update", Fault.HOST_HANG)],
)
def test_a_full_disk_explains_who_stands_in_a_save_and_in_no_phase_that_is_called_alike(
    phase: str, fault: Fault
) -> None:
    full = Evidence(kind=Kind.DISK, sign=Sign.DISK_FULL, node="n03", detail="checkpoint.space", source="health")
    assert judge([full, stalled(6, phase, waiting=False)], EIGHT).fault is fault
    hung = ended(6, "stalled in it for 12.0 s (budget 10.0 s)", sign=Sign.HOST_STUCK, phase=phase)
    assert judge([full, hung], EIGHT).fault is fault


def test_a_full_disk_explains_no_mistake_of_the_program() -> None:
    """Found live: a bad prompt, seconds after a disk had been full, was blamed on the disk."""
    full = Evidence(kind=Kind.DISK, sign=Sign.DISK_FULL, node="n03", detail="checkpoint.space", source="health")
    bad = ended(6, "exit code 1: ValueError: bad prompt 3", own=True, raised="ValueError")
    verdict = judge([full, bad], EIGHT)
    assert (verdict.fault, verdict.ranks) == (Fault.USER_ERROR, (6,))
    assert "bad prompt 3" in verdict.cause
    for torn in ("OSError: [Errno 28]", "FileNotFoundError: x", "sqlite3.OperationalError: disk I/O error"):
        assert judge([full, ended(6, f"exit code 1: {torn}", own=True)], EIGHT).fault is Fault.DISK, torn
    said = logged(Sign.DISK_FULL, 6, kind=Kind.DISK, line_no=9, node="n03", detail="No space left on device")
    assert judge([said, bad], EIGHT).fault is Fault.USER_ERROR, "a save had failed, and training had gone on"
    memory = replace(full, sign=Sign.HOST_MEMORY, kind=Kind.OOM, detail="memory")
    assert judge([memory, bad], EIGHT).fault is Fault.USER_ERROR


def test_nothing_that_a_program_prints_silences_its_node_or_stops_it() -> None:
    """Found live: a cable was out of a node whose rank had complained before."""
    noise = [replace(fact, line_no=9, node="n00") for fact in (*NOISE, logged(Sign.DISK_FULL, 1, kind=Kind.DISK))]
    gone = Evidence(kind=Kind.NODE, sign=Sign.NODE_GONE, node="n00", source="leader")
    assert judge([*noise, gone], EIGHT).fault is Fault.DEAD_NODE
    assert judge([*noise, stalled(1, stopped=True)], EIGHT).fault is Fault.HOST_HANG
    killed = ended(1, "out of memory: Killed process 7 (python)", sign=Sign.OOM_KILLED)
    assert judge([*noise, killed], EIGHT).fault is Fault.OOM_HOST
    assert judge([*noise, ended(1, "exit code 1: ValueError", own=True)], EIGHT).fault is not Fault.DEAD_RANK
    memory = logged(Sign.HOST_MEMORY, 1, line_no=9, node="n00")
    assert judge([memory, gone], EIGHT).fault is Fault.OOM_HOST, "a node without memory may fall silent"


def test_a_slow_way_is_seen_through_the_noise_of_an_innocent_log() -> None:
    late = [probe("n00", "n03", Sign.DELAYED), probe("n01", "n03", Sign.DELAYED), probe("n00", "n01", Sign.HEALTHY)]
    verdict = judge([*(replace(fact, line_no=9) for fact in NOISE), *late], EIGHT)
    assert (verdict.fault, verdict.nodes) == (Fault.NETWORK, ("n03",))


def test_who_was_waiting_a_moment_before_it_was_seen_elsewhere_moves_on() -> None:
    """Found where packets took 200 ms: all waited for most of the time, and one was looked at between two collectives."""
    seen = [
        Evidence(kind=Kind.STACK, sign=Sign.WAITED, rank=r, op="all_reduce", source="faulthandler") for r in range(1, 8)
    ]
    away = Evidence(kind=Kind.STACK, sign=Sign.ELSEWHERE, rank=0, source="faulthandler", when=50.2, clock="core")
    assert judge([*seen, stalled(0), away], EIGHT).fault is Fault.NETWORK
    assert judge([*seen, stalled(0), replace(away, when=60.0)], EIGHT).ranks == (0,)
    assert judge([*seen, away], EIGHT).ranks == (0,)


def test_a_host_that_a_log_names_is_told_by_the_name_of_its_node() -> None:
    link = logged(Sign.LINK, 5, kind=Kind.NCCL_WARN, node="node7", line_no=3)
    assert judge([link], EIGHT).nodes == ("n02",)
    assert judge([replace(link, node="n03", peer="n01")], EIGHT).nodes == ("n01", "n03")
    assert judge([link]).nodes == ("node7",), "where nothing is known of the gang, that is all there is"


def test_sizes_may_differ_where_the_operation_lets_them() -> None:
    uneven = [wait(0, op="ALLTOALL", group="ep"), wait(1, op="ALLTOALL", group="ep", numel_in=9, numel_out=9)]
    assert judge(uneven, EIGHT).fault is not Fault.DESYNC


def test_the_rank_that_never_enqueued_is_named_and_the_waiting_ones_are_not() -> None:
    status = {"kind": Kind.WATCHDOG_STATUS, "op": None, "numel_in": None, "numel_out": None, "group": "default_pg"}
    rows = [wait(r, seq=42, last_enqueued=42, last_completed=41, **status) for r in (0, 1, 2)]
    rows.append(wait(3, seq=40, last_enqueued=40, last_completed=39, **status))
    assert (judge(rows, EIGHT).fault, judge(rows, EIGHT).ranks) == (Fault.HOST_HANG, (3,))


def test_the_first_collective_that_never_worked_blames_no_rank() -> None:
    verdict = judge(waits(*range(8), seq=1), EIGHT)
    assert (verdict.fault, verdict.ranks) == (Fault.FABRIC, ())


def test_who_is_outside_of_collectives_while_the_others_wait_is_named_with_where_it_is() -> None:
    def seen(rank: int, sign: Sign, detail: str) -> Evidence:
        return Evidence(kind=Kind.STACK, sign=sign, rank=rank, detail=detail, source="faulthandler")

    data = "in its dataloader: __next__ (loader.py:12)"
    looks = [*(seen(r, Sign.WAITED, "in all_reduce") for r in (0, 1, 2)), seen(3, Sign.ELSEWHERE, data)]
    verdict = judge(looks, EIGHT)
    assert (verdict.fault, verdict.ranks, verdict.nodes) == (Fault.HOST_HANG, (3,), ("n01",))
    assert verdict.cause == f"rank 3 is outside of collectives, {data}, while ranks 0-2 wait"
    assert data in judge([*looks, stalled(3, "data", waiting=False)], EIGHT).cause, (
        "beats say that, the stack says where"
    )
    assert judge([looks[0], *(seen(r, Sign.ELSEWHERE, data) for r in (1, 2, 3))], EIGHT).ranks == ()


def test_one_absent_rank_is_named_and_five_are_not() -> None:
    assert judge(waits(0, 1, 2, 3, 4, 6, 7), EIGHT).ranks == (5,)
    assert judge(waits(0, 1, 2), EIGHT).ranks == ()


def test_a_peer_that_is_gone_is_looked_for_at_the_far_end() -> None:
    verdict = judge([logged(Sign.PEER_GONE, 3, peer="192.0.2.89")], EIGHT)
    assert (verdict.fault, verdict.ranks, verdict.nodes, verdict.confidence) == (
        Fault.DEAD_RANK, (), ("192.0.2.89",), Confidence.LOW,
    )  # fmt: skip


def test_two_nodes_that_cannot_reach_each_other_are_a_link_and_one_that_nobody_reaches_a_node() -> None:
    assert judge([probe("n00", "n01")]).nodes == ("n00", "n01")
    assert judge([probe("n00", "n01"), probe("n02", "n01")]).nodes == ("n01",)


def test_nothing_is_unknown_and_says_so() -> None:
    noise = Evidence(kind=Kind.NCCL_WARN, sign=Sign.NOISE, line="NCCL WARN Missing iommu=pt ... hang!")
    for evidence in ([], [noise]):
        verdict = judge(evidence)
        assert (verdict.fault, verdict.ranks, verdict.confidence) == (Fault.UNKNOWN, (), Confidence.LOW)


FACTS = st.builds(
    Evidence, kind=st.sampled_from(Kind), sign=st.sampled_from(Sign), rank=st.none() | st.integers(0, 7),
    node=st.none() | st.sampled_from(["a", "b"]), peer=st.none() | st.sampled_from(["b", "c"]),
    op=st.none() | st.sampled_from(["ALLREDUCE", "X"]),
    seq=st.none() | st.integers(0, 5), numel_in=st.none() | st.integers(0, 3), group=st.none() | st.sampled_from(["0",
    "1"]),
    last_enqueued=st.none() | st.integers(-1, 6), last_completed=st.none() | st.integers(-1, 6),
    when=st.none() | st.floats(0, 1e6), clock=st.sampled_from(["", "glog"]), elapsed_ms=st.none() | st.integers(0, 10**6),
    timeout_ms=st.none() | st.integers(1, 10**6), source=st.sampled_from(["", "log"]),
)  # fmt: skip


@settings(deadline=None)
@given(st.lists(FACTS, max_size=12))
def test_any_evidence_gives_a_whole_verdict_that_never_blames_who_only_waited(evidence: list[Evidence]) -> None:
    verdict = judge(evidence, EIGHT)
    assert isinstance(verdict, Verdict)
    assert verdict == judge(evidence, EIGHT)
    assert verdict.cause
    only_waited = {f.rank for f in evidence if f.rank is not None} - {
        rank for f in evidence if f.sign not in {Sign.WAITED, Sign.WATCHDOG_STUCK} or f.op or f.last_completed is not None
        for rank in (f.rank, *f.ranks)
    }  # fmt: skip
    assert not only_waited & set(verdict.ranks)


def test_every_sign_has_a_meaning_or_is_known_to_have_none() -> None:
    none = {Sign.NOISE, Sign.TOLD, Sign.WAITED, Sign.WATCHDOG_STUCK, Sign.SETUP_WAITED, Sign.HEALTHY, Sign.UNREACHABLE,
            Sign.NCCL_BROKEN, Sign.BEHIND, Sign.ONE_WAY, Sign.LOSSY, Sign.DELAYED,
            Sign.ELSEWHERE, Sign.ENTERED, Sign.LEFT, Sign.CUT_OFF}  # fmt: skip
    assert set(Sign) == none | set(MEANINGS) | set(CONSEQUENCES)


JUDGEMENT = {
    "meanings", "judge", "case", "parting", "causes", "desync", "hangs", "network", "victims",
}  # fmt: skip


@pytest.mark.parametrize("module", sorted(JUDGEMENT))
def test_the_judgement_imports_only_the_standard_library_and_the_vocabulary(module: str) -> None:
    tree = ast.parse((Path(judging.__file__).parent / f"{module}.py").read_text())
    names = {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    names |= {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    ours = {name for name in names if name.split(".")[0] not in sys.stdlib_module_names}
    words = {f"elasticrl.contract.{name}" for name in ("evidence", "verdict", "model", "partition")}
    assert ours <= {f"elasticrl.core.judge.{name}" for name in JUDGEMENT} | words | {"elasticrl.base.value"}
