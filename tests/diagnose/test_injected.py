"""Every fault of the table is done to real nodes, quiet and beside an innocent one that looks guilty: class, culprit, in time.

One lab and one job serve all rows, in turn. The time counts from the fault's beginning to the first word of the right verdict
by any daemon, and may be the phase's budget, as the daemons know it, and 5 s. Before that nobody may be sure that it was an
innocent.
"""

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import pytest
from injected_bed import NODES, Bed, Struck, bed, when

from chaos.live import net
from chaos.live.box import missing
from elasticrl.contract.verdict import Confidence, Fault

GRACE_S = 5.0
STARTS_S = 90.0  # for a node, on a busy machine; the time of what it starts with counts from then
CLAIMS = Path(__file__).with_name("injected_claims")
pytestmark = [pytest.mark.skipif(bool(missing()), reason=missing() or "-"), pytest.mark.timeout(900)]
Undo = Callable[[], object]


def nothing() -> None:
    """To be undone."""


def order(word: str) -> Callable[[Bed, str], Undo]:
    def strike(job: Bed, node: str) -> Undo:
        job.order(node, word)
        return nothing

    return strike


def slow(job: Bed, node: str) -> Undo:
    """Where two of three are slow nobody is: it has to be quick again before the next row."""
    job.order(node, "slow")
    return lambda: job.order(node, "quick")


def kill(job: Bed, node: str) -> Undo:
    job.kill(node)
    return nothing


def cut(way: str, *, longer_than: int = 0) -> Callable[[Bed, str], Undo]:
    """Between the node and its peers; the store stays in reach."""

    def strike(job: Bed, node: str) -> Undo:
        size = f" meta length gt {longer_than}" if longer_than else ""
        rule = job.drop(*(match + size for match in job.between(node, way)))
        return lambda: job.heal(rule)

    return strike


def one_link(job: Bed, node: str) -> Undo:
    rule = job.drop(*net.between([job.box(node)], [job.box(other(node))]))
    return lambda: job.heal(rule)


def cable_out(job: Bed, node: str) -> Undo:
    """Of the node, store and all: only when it is in again can anybody tell this from a power cut."""
    net.wire(job.box(node), up=False)
    time.sleep(3.0)  # that long it is out: over `suspect` and `doubt`, and under the lease
    net.wire(job.box(node), up=True)
    return nothing


def delay(job: Bed, node: str) -> Undo:
    return net.late(job.box(node), job.lab.name, 200.0)


def no_room(job: Bed, node: str) -> Undo:
    """Its own disk for checkpoints is full."""
    place = job.live.saves.parent
    job.box(node).run("mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place))
    job.box(node).run("bash", "-c", f"head -c 2M /dev/zero > {place}/ballast", check=False)
    return lambda: job.box(node).run("umount", "-l", str(place))


def no_memory(job: Bed, node: str) -> Undo:
    """The node's cgroup has a limit, and its rank grows: the kernel ends it."""
    group = job.box(node).groups["memory"]
    used = int((group / "memory.usage_in_bytes").read_text())
    (group / "memory.limit_in_bytes").write_text(str(used + (96 << 20)))
    job.order(node, "grow")
    return lambda: (group / "memory.limit_in_bytes").write_text("-1")


def started(*overrides: str) -> Callable[[Bed, str], Undo]:
    """The node starts anew with this in its configuration."""

    def strike(job: Bed, node: str) -> Undo:
        job.restart(node, *overrides)
        return lambda: job.restart(node)

    return strike


def other(node: str) -> str:
    """Who is innocent."""
    return NODES[(NODES.index(node) + 1) % len(NODES)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A fault, and what is to be said of it."""

    name: str
    strike: Callable[[Bed, str], Undo]
    fault: Fault
    rank: bool = True  # is its rank named?
    ends: int = 1  # nodes that are named: 2 for a link
    more_s: float = 0.0  # before there can be anything to see: reports that are awaited
    begins: str = (
        ""  # what its node logs when the fault begins, if not with the strike: a node that starts takes its time
    )
    told: str = "verdict.found"
    chosen: bool = False  # for the default run

    def __str__(self) -> str:
        return self.name


ROWS = (
    Row(name="SIGKILL", strike=kill, fault=Fault.DEAD_RANK),
    Row(name="SIGSTOP", strike=order("stop"), fault=Fault.HOST_HANG),
    Row(name="sleep in the dataloader", strike=order("loader"), fault=Fault.HOST_HANG, chosen=True),
    Row(name="sleep in save", strike=order("save"), fault=Fault.HOST_HANG),
    Row(name="skips a collective", strike=order("skip"), fault=Fault.DESYNC),
    Row(name="another shape, smaller", strike=order("short"), fault=Fault.DESYNC),
    Row(name="another shape, larger", strike=order("wide"), fault=Fault.DESYNC),
    Row(name="another operation", strike=order("other"), fault=Fault.DESYNC),
    Row(name="host memory in a cgroup", strike=no_memory, fault=Fault.OOM_HOST, chosen=True),
    Row(name="a full disk", strike=no_room, fault=Fault.DISK, rank=False),
    Row(name="cable out", strike=cable_out, fault=Fault.NETWORK, rank=False),
    Row(name="cut off from its peers", strike=cut("both"), fault=Fault.NETWORK, rank=False),
    Row(name="is not heard (one way)", strike=cut("out"), fault=Fault.NETWORK, rank=False),
    Row(name="does not hear (one way)", strike=cut("in"), fault=Fault.NETWORK, rank=False),
    Row(name="a link down", strike=one_link, fault=Fault.NETWORK, rank=False, ends=2),
    Row(name="MTU black hole", strike=cut("both", longer_than=600), fault=Fault.NETWORK, rank=False, chosen=True),
    Row(name="200 ms delay", strike=delay, fault=Fault.NETWORK, rank=False),
    Row(name="a slow rank", strike=slow, fault=Fault.STRAGGLER, told="straggler.found", more_s=10.0),
    Row(
        name="an interface that is not there", strike=started("agent.env.GLOO_SOCKET_IFNAME=eth9"), fault=Fault.CONFIG,
        rank=False, begins="workers.changed",  # it comes back under another rank, or none
    ),
    Row(
        name="another torch is claimed", strike=started(f"agent.env.PYTHONPATH={CLAIMS}"), fault=Fault.VERSION_MISMATCH,
        rank=False, begins="agent.started",
    ),
)  # fmt: skip


@pytest.fixture(scope="module")
def job() -> Iterator[Bed]:
    with bed() as made:
        yield made


def right(row: Row, line: dict[str, object], struck: Struck) -> bool:
    """Does this line of a log say what it was, and who?"""
    if row.fault is Fault.STRAGGLER:
        return (line["rank"], line["node_slow"]) == (struck.rank, struck.node)
    nodes, ranks = cast("list[str]", line["nodes"]), line["ranks"]
    if line["fault"] != row.fault or struck.node not in nodes or len(nodes) != row.ends:
        return False
    return not row.rank or ranks == [struck.rank]


def judge(job: Bed, row: Row, node: str) -> tuple[float, float, str]:
    """Strike, and wait for the right word. How long it took, how long it might, and what was said."""
    job.until_well(300.0)  # so long on a busy machine, for spares as well: that is no part of the claim
    struck = job.mark(node)
    assert struck.rank >= 0, f"{node} has no rank to blame"
    undo = row.strike(job, node)
    limit_s = 12.0 + GRACE_S + row.more_s + (STARTS_S if row.begins else 10.0)
    try:
        job.until(lambda: any(right(row, line, struck) for line in job.since(struck, row.told)), limit_s, row.name)
    finally:
        undo()
    first = next(line for line in job.since(struck, row.told) if right(row, line, struck))
    began = [when(line["at"]) for line in job.since(struck, row.begins) if row.begins and line["node"] == node]
    took_s = when(str(first["at"])) - (began[0] if row.begins else struck.at)
    budgets = [
        float(line["budget_s"]) for line in job.since(struck, "worker.stalled") if when(line["at"]) <= when(first["at"])
    ]
    allowed_s = max(budgets, default=0.0) + GRACE_S + row.more_s
    found = [line for line in job.since(struck, "verdict.found") if line["at"] < first["at"]]
    earlier = [
        line for line in found if line.get("generation", struck.gang) >= struck.gang
    ]  # not of the gang before, told late
    blamed = {name for line in earlier if line["confidence"] == Confidence.HIGH for name in line["nodes"]}
    assert blamed <= {node}, earlier
    return took_s, allowed_s, str(first.get("cause") or first.get("reason"))


def say(row: Row, node: str, took_s: float, allowed_s: float, *, noisy: bool, cause: str) -> None:
    """A line of the table, for who runs it with ELASTICRL_TABLE=FILE."""
    if table := os.environ.get("ELASTICRL_TABLE"):
        with Path(table).open("a") as file:
            file.write(f"{row.name} | {row.fault} | {node} | {took_s:.1f} of {allowed_s:.1f} s | "
                       f"{'noisy' if noisy else 'quiet'} | {cause[:160]}\n")  # fmt: skip


def check(job: Bed, row: Row, *, noisy: bool) -> None:
    node = NODES[(ROWS.index(row) + noisy) % len(NODES)]
    if noisy:
        with job.noisy(other(node)):
            took_s, allowed_s, cause = judge(job, row, node)
    else:
        took_s, allowed_s, cause = judge(job, row, node)
    say(row, node, took_s, allowed_s, noisy=noisy, cause=cause)
    assert took_s <= allowed_s, cause
    job.check()


@pytest.mark.parametrize("row", [row for row in ROWS if row.chosen], ids=str)
def test_an_injected_fault_is_named_beside_a_noisy_innocent(job: Bed, row: Row) -> None:
    check(job, row, noisy=True)


@pytest.mark.slow
@pytest.mark.parametrize("noisy", [False, True], ids=["quiet", "noisy"])
@pytest.mark.parametrize("row", ROWS, ids=str)
def test_every_injected_fault_is_named_in_time(job: Bed, row: Row, *, noisy: bool) -> None:
    check(job, row, noisy=noisy)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after"), [("a full disk", "sleep in the dataloader"), ("host memory in a cgroup", "SIGKILL")]
)
def test_a_fault_is_not_explained_by_what_befell_the_same_node_before(job: Bed, before: str, after: str) -> None:
    """The disk is full still; there is room in memory again, and what was said of it is not a minute old."""
    rows, node = {row.name: row for row in ROWS}, NODES[1]
    job.until_well(300.0)
    first = job.mark(node)
    undo = rows[before].strike(job, node)
    try:
        job.until(
            lambda: any(right(rows[before], line, first) for line in job.since(first, "verdict.found")), 27.0, before
        )
        if rows[before].fault is not Fault.DISK:
            undo()
        struck = job.mark(node)
        took_s, allowed_s, cause = judge(job, rows[after], node)
    finally:
        undo()
    say(rows[after], node, took_s, allowed_s, noisy=False, cause=cause)
    assert took_s <= allowed_s, cause
    probes = [line for line in job.since(struck, "plan.adopted") if line["phase"] == "probe"]
    assert not probes, "it was known who it was"
    job.check()
