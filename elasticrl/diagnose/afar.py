"""The ranks of a job that is not ours, on several machines, looked at from one of them over ssh.

The one idea: the other machine need have nothing but ssh and Python. What looks there (`afar_probe`) is sent to it as text, and
what it prints is read as text of strangers. All that is decided is decided here, as if all ranks ran on one machine. A machine
that does not answer is evidence: the others may be waiting for it.
"""

import os
import re
import signal
import subprocess
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from elasticrl.base.parsed import parsed
from elasticrl.base.value import dataclass
from elasticrl.contract.evidence import Evidence, Kind, Sign
from elasticrl.contract.verdict import Confidence, Fault
from elasticrl.diagnose import afar_probe, foreign, health, stacks
from elasticrl.diagnose.foreign import APART_S, ELSE, LOOKS, NAMES, Job, Look, NoJob, Seen
from elasticrl.diagnose.stacks import Stack

WITHIN_S: Final = 9.0  # for a machine's whole answer, the way to it included
LARGEST: Final = 16 << 20  # bytes of an answer
SPACE: Final = 1 << 32  # process numbers of different machines are kept apart by this
_NAME: Final = re.compile(r"[A-Za-z0-9_.:@%\[\]][A-Za-z0-9_.:@%\[\]-]{0,252}")
#: What ssh says if the machine, or the way to it, is at fault, and not a key or a setting.
_SILENT: Final = re.compile(
    r"timed out|No route to host|Network is unreachable|Host is down|Connection (?:closed|reset)|refused"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a machine told, or why it told nothing.

    Example: Answer(host="n02", silent=True, why="ssh: connect to host n02 port 22: No route to host")
    """

    host: str
    seen: tuple[Seen, ...] = ()
    looks: tuple[Mapping[int, Stack], ...] = ()  # pid -> stack, each time
    kernel: str = ""
    started: Mapping[int, float] | None = None  # pid -> seconds after the machine's start
    spy: bool = False
    why: str = ""
    silent: bool = False  # it did not answer at all: not a key, not a setting


def hosts(text: str) -> tuple[str, ...]:
    """The names in `h1,h2`; NoJob if one of them is no name of a machine.

    >>> hosts("n01,root@n02")
    ('n01', 'root@n02')
    """
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    wrong = [name for name in names if not _NAME.fullmatch(name)]
    if wrong or not names:
        raise NoJob(
            f"--host names no machine: {wrong[0] if wrong else text!r}. Give names as ssh knows them: --host n01,n02."
        )
    return names


def ask(names: Sequence[str], *, within_s: float = WITHIN_S) -> tuple[Answer, ...]:
    """All machines at once. It takes as long as the slowest, and no longer than `within_s`."""
    with ThreadPoolExecutor(len(names), "elasticrl-afar") as pool:
        return tuple(pool.map(lambda name: _ask(name, within_s), names))


def script(within_s: float) -> str:
    """What is sent to a machine."""
    wanted = [*(name for pair in NAMES for name in pair), *ELSE]
    order = {
        "wanted": wanted, "names": [rank for rank, _ in NAMES], "looks": LOOKS, "apart_s": APART_S, "within_s": within_s,
    }  # fmt: skip
    return f"{Path(afar_probe.__file__).read_text(encoding='utf-8')}\n\nmain({order!r})\n"


def _ask(host: str, within_s: float) -> Answer:
    command = [
        "ssh", "-T", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={max(1, int(within_s / 2))}", "--", host, "python3 -",
    ]  # fmt: skip
    try:
        child = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
        )
    except OSError as error:
        return Answer(host=host, why=f"ssh cannot be run here ({error.strerror}): install it")
    try:
        told, said = child.communicate(script(within_s).encode(), timeout=within_s)
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        child.communicate()
        return Answer(host=host, silent=True, why=f"it did not answer within {within_s:g} s")
    if child.returncode:
        words = said.decode(errors="replace").strip().splitlines()[-1:] or [f"ssh ended with {child.returncode}"]
        return Answer(host=host, silent=child.returncode == 255 and bool(_SILENT.search(words[0])), why=words[0][:200])
    try:
        return heard(host, parsed(told, most=LARGEST))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        return Answer(host=host, why=f"its answer cannot be read ({str(error)[:80]})")


def heard(host: str, told: Any) -> Answer:
    """What a machine printed, as values. It is not trusted: whatever does not fit raises."""
    seen = tuple(
        Seen(pid=int(one["pid"]), parent=int(one["parent"]), env={str(k): str(v) for k, v in one["env"].items()})
        for one in told["seen"]
    )
    looks = tuple({int(pid): _stack(int(pid), one) for pid, one in look.items()} for look in told["looks"])
    started = {int(pid): float(at) for pid, at in told["started"].items()}
    return Answer(
        host=host, seen=seen, looks=looks, started=started, kernel=str(told["kernel"]), spy=bool(told["spy"])
    )  # fmt: skip


def _stack(pid: int, told: Mapping[str, Any]) -> Stack:
    state = str(told["state"])
    frames = stacks.spied_frames(told.get("threads") or ())
    if frames:
        return Stack(pid=pid, frames=frames, how="py-spy", state=state)
    where = str(told.get("wchan", "")).strip("0\n ")[:60]
    why = {
        "": "the process is gone", "Z": "the process is gone", "X": "the process is gone", "T": "the process is stopped",
        "t": "a debugger holds the process",
        "D": f"the process is in the kernel and does not come back{f' ({where})' if where else ''}",
    }.get(state, "no stack could be read")  # fmt: skip
    return Stack(pid=pid, absent=why, state=state)


def look(answers: Sequence[Answer], *, slurm: str = "", address: str = "") -> Look:
    """The job that these machines showed, judged. Pure."""
    apart = [(number, one) for number, one in enumerate(answers) if not one.why]
    seen = [
        Seen(pid=each.pid + number * SPACE, parent=each.parent + number * SPACE, env=each.env, host=one.host)
        for number, one in apart
        for each in one.seen
    ]
    if not apart:
        raise NoJob("No machine answered: " + "; ".join(f"{one.host}: {one.why}" for one in answers) + ".")
    job = foreign.job(seen, slurm=slurm, address=address)
    node_of = {rank: answers[pid // SPACE].host for rank, pid in job.ranks.items()}
    taken = [
        {
            rank: stack
            for rank, pid in job.ranks.items()
            if (each := answers[pid // SPACE].looks) and (stack := each[min(turn, len(each) - 1)].get(pid % SPACE))
        }
        for turn in range(LOOKS)
    ]
    gone = {*job.gone, *(rank for rank, stack in taken[-1].items() if stack.state in {"", "Z", "X"})}
    found = foreign.judged(job, taken, gone, _kernels(apart, job), nodes=node_of, silent=_silent(answers))
    blind = [
        one.host for number, one in apart if not one.spy and any(pid // SPACE == number for pid in job.ranks.values())
    ]
    words = (
        f"py-spy is not installed on {', '.join(blind)}: no stack can be read there (pip install py-spy)"
        if blind
        else ""
    )
    return replace(_unsure(found), blind=words, hosts=tuple(_host(one, node_of) for one in answers))


def _silent(answers: Sequence[Answer]) -> tuple[Evidence, ...]:
    return tuple(
        Evidence(kind=Kind.NODE, sign=Sign.NODE_GONE, node=one.host, detail=f"over ssh: {one.why}", source="ssh")
        for one in answers
        if one.silent
    )


def _kernels(apart: Sequence[tuple[int, Answer]], job: Job) -> tuple[Evidence, ...]:
    """What the kernels said since the job's ranks were started there."""
    found: list[Evidence] = []
    for number, one in apart:
        here = [pid % SPACE for pid in job.ranks.values() if pid // SPACE == number]
        began = min((at for pid in here if (at := (one.started or {}).get(pid, 0.0))), default=0.0)
        _, facts = health.kernel(one.kernel, "kernel")
        found += [
            replace(fact, node=one.host)
            for fact in facts
            if fact.clock.startswith("uptime") and fact.when is not None and fact.when >= began > 0
        ]
    return tuple(found)


def _host(one: Answer, node_of: Mapping[int, str]) -> str:
    count = sum(node == one.host for node in node_of.values())
    return f"{one.host}: {one.why}" if one.why else f"{one.host}: {count} rank{'' if count == 1 else 's'}"


def _unsure(found: Look) -> Look:
    """A silent machine was asked by one way only: it may be that way that is broken."""
    verdict = found.verdict
    if verdict.fault is not Fault.DEAD_NODE or verdict.because[0].source != "ssh":
        return found
    return replace(
        found,
        verdict=replace(
            verdict, confidence=Confidence.MEDIUM,
            remedy="Check that machine's power, console and kernel log, and the way to it.",
            against=("it answers another way, or from another machine (then ssh to it from here is at fault)",),
        ),
    )  # fmt: skip
