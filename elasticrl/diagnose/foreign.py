"""The ranks of any job on this machine, found from outside and looked at while they run: torchrun, accelerate, Slurm, mpirun.

The one idea: a launcher tells a rank its number by its environment, and the kernel shows that. So nothing of ours need run
in the job, and nothing is asked of it: stacks are read from its memory (py-spy), all else from /proc. A single look says
where a rank is. Several looks say whether it moves: who moves is judged only if others stand still and wait for it.
"""

import os
import shutil
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Final

from elasticrl.base import process
from elasticrl.base.value import dataclass
from elasticrl.contract.evidence import Evidence, Kind, Sign
from elasticrl.contract.verdict import Known, Verdict, rank_names
from elasticrl.core.judge.judge import judge
from elasticrl.diagnose import afar_probe, health, kernel_log, stacks
from elasticrl.diagnose.stacks import Stack

#: How launchers say which rank a process is, and of how many: (rank, world). The first that a job uses counts.
NAMES: Final = (
    ("RANK", "WORLD_SIZE"), ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"), ("PMI_RANK", "PMI_SIZE"),
    ("SLURM_PROCID", "SLURM_NTASKS"),
)  # fmt: skip
#: What else is read of an environment: which job it is, and how many of its ranks are on this machine.
ELSE: Final = ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "SLURM_JOB_ID")
LOOKS: Final = 4
APART_S: Final = 1.0  # between two looks


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """A process as /proc shows it.

    Example: Seen(pid=4711, parent=4700, env={"RANK": "3", "WORLD_SIZE": "8", "MASTER_PORT": "29500"})
    """

    pid: int
    parent: int
    env: Mapping[str, str]
    host: str = ""  # "" is this machine


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A job's ranks on this machine.

    Example: Job(name="10.0.0.1:29500", ranks={3: 4711}, world=8, gone=(2,))
    """

    name: str
    ranks: Mapping[int, int]  # rank -> pid
    world: int | None = None
    gone: tuple[int, ...] = ()  # ranks that belong on this machine and have no process any more


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """What several looks at a job gave."""

    job: Job
    evidence: tuple[Evidence, ...]
    verdict: Verdict
    said: str  # where the ranks are, in one sentence
    moving: tuple[int, ...]  # ranks that went on meanwhile
    blind: str = ""  # why there are no stacks, if there are none
    hosts: tuple[str, ...] = ()  # what each of several machines told, in words


class NoJob(Exception):
    """There are no ranks to look at; says why and what to do."""


def job(seen: Sequence[Seen], *, pids: Sequence[int] = (), slurm: str = "", address: str = "") -> Job:
    """The job that these processes are of, or that Slurm knows by this number; else the one that is there. Pure."""
    if not pids and not slurm:
        return _only(seen, address)
    within = _below(seen, pids) if pids else [one for one in seen if one.env.get("SLURM_JOB_ID") == slurm]
    if not within:
        what = f"processes {', '.join(map(str, pids))}" if pids else f"processes of Slurm's job {slurm}"
        raise NoJob(f"There are no {what} on this machine. Look where its ranks run: ps -ef, or squeue -j JOB -o %N.")
    for rank_name, world_name in NAMES:
        found = [one for one in within if one.env.get(rank_name, "").isdigit()]
        if found:
            return _job(found, rank_name, world_name)
    if not pids:
        raise NoJob(
            f"No process of Slurm's job {slurm} here says which rank it is (by {', '.join(name for name, _ in NAMES)}). "
            "Name the ranks themselves: elasticrl diagnose --pid PID --pid PID."
        )
    here = {one.pid for one in seen}
    chosen = [pid for pid in pids if pid in here]
    return Job(name="processes that were named, in that order", ranks=dict(enumerate(chosen)))


def _only(seen: Sequence[Seen], address: str) -> Job:
    """The one job among all processes of some machines: with this MASTER_ADDR:MASTER_PORT, if it is given."""
    for rank_name, world_name in NAMES:
        found = [
            one
            for one in seen
            if one.env.get(rank_name, "").isdigit()
            and (not address or f"{one.env.get('MASTER_ADDR', '')}:{one.env.get('MASTER_PORT', '')}" == address)
        ]
        if found:
            return _job(found, rank_name, world_name)
    named = f" with MASTER_ADDR:MASTER_PORT {address}" if address else ""
    raise NoJob(
        f"No process{named} on these machines says which rank it is (by {', '.join(name for name, _ in NAMES)}), or this user "
        "may not read it. Ask as the job's user, or as root."
    )


def _job(found: Sequence[Seen], rank_name: str, world_name: str) -> Job:
    """A dataloader's workers and other children have the environment of their rank: the topmost process is the rank."""
    address = {one.pid: (one.env.get("MASTER_ADDR", ""), one.env.get("MASTER_PORT", "")) for one in found}
    names = sorted(set(address.values()))
    if len(names) > 1:
        listed = "; ".join(
            f"{host}:{port} (process {next(p for p, name in address.items() if name == (host, port))})"
            for host, port in names
        )
        raise NoJob(
            f"These are ranks of {len(names)} jobs: {listed}. Name one process of the job that you mean: --pid PID. "
            "With --host: --job ADDRESS:PORT."
        )
    rank_of = {one.pid: int(one.env[rank_name]) for one in found}
    tops = [one for one in found if rank_of.get(one.parent) != rank_of[one.pid]]
    where: dict[int, set[str]] = {}
    for one in tops:
        where.setdefault(rank_of[one.pid], set()).add(one.host)
    if twice := sorted(rank for rank, machines in where.items() if len(machines) > 1):
        raise NoJob(
            f"Rank {twice[0]} runs on {' and on '.join(sorted(where[twice[0]]))}: these are two jobs, or one machine by two "
            "names. Name the machines of one job only."
        )
    ranks = {rank_of[one.pid]: one.pid for one in sorted(tops, key=lambda one: -one.pid)}
    worlds = {int(one.env[world_name]) for one in found if one.env.get(world_name, "").isdigit()}
    host, port = names[0]
    return Job(
        name=f"{host}:{port}" if port else f"ranks by {rank_name}", ranks=dict(sorted(ranks.items())),
        world=max(worlds, default=None), gone=_gone(tops, rank_of, set(ranks)),
    )  # fmt: skip


def _gone(tops: Iterable[Seen], rank_of: Mapping[int, int], here: set[int]) -> tuple[int, ...]:
    """A launcher numbers the ranks of a machine in a row, and tells each how many they are."""
    expected: set[int] = set()
    for one in tops:
        local, count = one.env.get("LOCAL_RANK", ""), one.env.get("LOCAL_WORLD_SIZE", "")
        if local.isdigit() and count.isdigit():
            first = rank_of[one.pid] - int(local)
            expected |= set(range(first, first + int(count)))
    return tuple(sorted(expected - here))


def _below(seen: Sequence[Seen], pids: Sequence[int]) -> list[Seen]:
    """Those processes and all that they have started."""
    children: dict[int, list[Seen]] = {}
    for one in seen:
        children.setdefault(one.parent, []).append(one)
    open_, found = [one for one in seen if one.pid in pids], {}
    while open_:
        one = open_.pop()
        if one.pid not in found:
            found[one.pid] = one
            open_ += children.get(one.pid, [])
    return list(found.values())


def processes(root: Path = Path("/proc")) -> list[Seen]:
    """All that this user may read. The environment is the one that a process was started with."""
    wanted = {name for pair in NAMES for name in pair} | set(ELSE)
    return [Seen(pid=one["pid"], parent=one["parent"], env=one["env"]) for one in afar_probe.processes(wanted, root)]


def look(job: Job, *, spy: str | None = None, apart_s: float = APART_S) -> Look:
    """Look at it several times and judge it. It takes some seconds, and stops nothing."""
    spy = _spy() if spy is None else spy
    looks = [_stacks(job, spy)]
    for _ in range(LOOKS - 1):
        time.sleep(apart_s)
        looks.append(_stacks(job, spy))
    gone = {*job.gone, *(rank for rank, pid in job.ranks.items() if process.state(pid) in {"", "Z", "X"})}
    found = judged(job, looks, gone, _machine(job))
    blind = "" if any(stack.frames for stack in looks[-1].values()) or not looks[-1] else _blind(spy)
    return replace(found, blind=blind)


def judged(
    job: Job,
    looks: Sequence[Mapping[int, Stack]],
    gone: Collection[int],
    machine: Iterable[Evidence],
    *,
    nodes: Mapping[int, str] | None = None,
    silent: Iterable[Evidence] = (),
) -> Look:
    """What several looks at a job say, with what kernels said, and machines that do not answer. Pure.

    A silent machine explains only what nobody else does: where a rank that was seen is elsewhere, that one is waited for.
    """
    nodes = nodes or {}
    looks = [{rank: stack for rank, stack in each.items() if rank not in gone} for each in looks]
    telling = settled(looks)
    moving = tuple(sorted(set(looks[-1]) - set(telling)))
    waits = bool(telling) and not gone and all(s.frames and stacks.activity(s.frames).waits for s in telling.values())
    facts = (
        *stacks.evidence(telling, node_of=nodes.get),
        *(
            Evidence(kind=Kind.EXIT, sign=Sign.GONE, rank=rank, detail="its process is gone", source="processes")
            for rank in sorted(gone)
        ),
        *concerns(machine, gone),
        *(silent if waits else ()),
    )
    whole = job.world == len(job.ranks) + len(job.gone) and not moving
    known = Known(world=job.world if whole else None, heard=frozenset(job.ranks), nodes=nodes)
    return Look(job=job, evidence=facts, verdict=judge(facts, known), said=stacks.summary(facts), moving=moving)


def settled(looks: Sequence[Mapping[int, Stack]]) -> dict[int, Stack]:
    """The last look at those that it speaks for: who stands still, and who is busy elsewhere in each look while others stand in
    a collective. Pure.
    """
    last = looks[-1]
    still = {rank for rank in last if len({look[rank].frames for look in looks}) == 1}
    held_up = any(last[rank].frames and stacks.activity(last[rank].frames).waits for rank in still)
    busy = {rank for rank in set(last) - still if held_up and all(_outside(look[rank]) for look in looks)}
    return {rank: stack for rank, stack in last.items() if rank in still | busy}


def concerns(facts: Iterable[Evidence], gone: Collection[int]) -> tuple[Evidence, ...]:
    """What the kernel says of a machine and this job may have met: where all ranks live, whom it killed was another's. Pure."""
    return tuple(fact for fact in facts if gone or fact.sign is not Sign.OOM_KILLED)


def _outside(stack: Stack) -> bool:
    return bool(stack.frames) and not stacks.activity(stack.frames).waits


def _stacks(job: Job, spy: str) -> dict[int, Stack]:
    with ThreadPoolExecutor(max(1, min(8, len(job.ranks))), "elasticrl-look") as pool:
        taken = pool.map(lambda pid: _stack(pid, spy), job.ranks.values())
        return dict(zip(job.ranks, taken, strict=True))


def _stack(pid: int, spy: str) -> Stack:
    """As `stacks.collect` has it, of a process that bears no witness of ours."""
    stack = stacks.spied(pid, spy, time.monotonic() + stacks.SPY_S)
    return stack if stack.frames or stack.state not in {"R", "S"} else replace(stack, absent="no stack could be read")


def _spy() -> str:
    """py-spy, on the PATH or beside this Python."""
    import sys

    beside = Path(sys.executable).with_name("py-spy")
    return shutil.which("py-spy") or (str(beside) if os.access(beside, os.X_OK) else "")


def _blind(spy: str) -> str:
    if not spy:
        return "py-spy is not installed: no stack can be read. Install it (pip install py-spy) and ask again."
    return (
        "py-spy could not read the processes. Run this as root, or as the job's user where that is allowed "
        "(sysctl kernel.yama.ptrace_scope=0)."
    )


def _machine(job: Job) -> tuple[Evidence, ...]:
    """What the kernel has said of this machine since the job's ranks were started."""
    text, source = kernel_log.whole()
    began = min((process.started_at(pid) for pid in job.ranks.values()), default=0) / os.sysconf("SC_CLK_TCK")
    _, facts = health.kernel(text, source)
    return tuple(
        fact for fact in facts if fact.clock.startswith("uptime") and fact.when is not None and fact.when >= began > 0
    )


def moved(look: Look) -> str:
    """Who went on meanwhile, in words; "" if nobody did."""
    return f"{rank_names(look.moving)} made progress while this was asked" if look.moving else ""
