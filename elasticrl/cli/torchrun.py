"""`elasticrl run` in torchrun's words: `--nnodes 2:4 --nproc-per-node 8 -m pkg.train --arg`, or `--standalone train.py`.

The one idea: torchrun's options are a table. What means something here becomes `elasticrl run`'s own words. What does not is
left out with a sentence, or refused with one: all that is wrong is said at once. Only the number of GPUs is looked up.
"""

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from elasticrl.cli.script import MARK, Script

#: Options of `elasticrl run` itself: with a value, and without.
OWN: Final = frozenset({"--nodes", "--workers", "--level", "--every", "--allow"})
OWN_FLAGS: Final = frozenset({"--adopt", "--help"})
MODULE: Final = frozenset({"-m", "--module"})
LOOPBACK: Final = frozenset({"", "localhost", "127.0.0.1", "::1", "[::1]"})


class Wrong(ValueError):
    """A value cannot be used; the sentence says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A command line, understood.

    Example: Asked(own=("--workers", "8"), script=Script(program="pkg.train", args=("--arg",), module=True))
    """

    own: tuple[str, ...] = ()  # the command's own words
    script: Script | None = None
    notes: tuple[str, ...] = ()  # what was left out, and why
    problems: tuple[str, ...] = ()  # why nothing can be run


def _nodes(value: str) -> list[str]:
    least, _, most = value.partition(":")
    most = most or least
    if not (least.isdecimal() and most.isdecimal() and 0 < int(least) <= int(most)):
        raise Wrong("write N or MIN:MAX, such as 2:4")
    return ["--nodes", most, f"membership.min_nodes={int(least)}"]


def _workers(value: str) -> list[str]:
    if value.isdecimal() and int(value) > 0:
        return ["--workers", value]
    gpus = gpus_here(os.environ)
    if value == "cpu" or (value == "auto" and not gpus):
        return ["--workers", str(os.cpu_count() or 1)]
    if value in {"gpu", "auto"} and gpus:
        return ["--workers", str(gpus)]
    raise Wrong("there is no GPU here" if value == "gpu" else "write a number, or auto, gpu or cpu")


def gpus_here(env: Mapping[str, str], devices: Path = Path("/dev")) -> int:
    """How many GPUs a job on this machine would see, without asking CUDA."""
    said = env.get("CUDA_VISIBLE_DEVICES")
    if said is not None:
        return len([name for name in said.split(",") if name.strip() not in {"", "-1"}])
    return len(list(devices.glob("nvidia[0-9]*")))


def _restarts(value: str) -> list[str]:
    if not value.isdecimal():
        raise Wrong("write a number")
    return [f"recovery.no_progress_limit={int(value) + 1}"]


def _grace(value: str) -> list[str]:
    if not value.isdecimal():
        raise Wrong("write whole seconds")
    return [f"recovery.grace={value}s"]


def _logs(value: str) -> list[str]:
    return [f"telemetry.log_dir={json.dumps(str(Path(value).absolute()))}"]


#: What becomes words of our own. Those with `=` are values of the configuration, and stand last.
MEANS: Final[Mapping[str, Callable[[str], list[str]]]] = {
    "--nnodes": _nodes,
    "--nproc-per-node": _workers,
    "--max-restarts": _restarts,
    "--shutdown-timeout": _grace,
    "--log-dir": _logs,
}
SAME: Final = {"--nnodes": "--nodes", "--nproc-per-node": "--workers"}  # and may not be given beside these
#: What `elasticrl run` does anyhow.
DONE: Final = frozenset({"--standalone", "--run-path"})
OWN_MEETING: Final = "elasticrl run brings an etcd and a rendezvous of its own"
OWN_LOGS: Final = "each rank writes into a log of its own, and rank 0's is shown"
#: What is left out, and why. All of these have a value.
IDLE: Final[Mapping[str, str]] = {
    **dict.fromkeys(("--rdzv-backend", "--rdzv-id", "--rdzv-conf"), OWN_MEETING),
    **dict.fromkeys(
        ("-r", "--redirects", "-t", "--tee", "--local-ranks-filter", "--duplicate-stdout-filters",
         "--duplicate-stderr-filters"),
        OWN_LOGS,
    ),
    "--monitor-interval": "the kernel says when a worker ends",
    "--start-method": "workers come from a fork server, which keeps them warm",
    "--event-log-handler": "events are in the daemons' logs (elasticrl events)",
    "--role": "the role is called train",
    "--signals-to-handle": "a signal ends the job in order, whichever it is",
}  # fmt: skip
#: What says where other machines are: left out where there is one node, else refused.
ELSEWHERE: Final = frozenset({"--rdzv-endpoint", "--node-rank", "--master-addr", "--master-port", "--local-addr"})
CLUSTER: Final = (
    "elasticrl run plays all nodes on this machine. For several machines start a daemon on each (elasticrl init --store ..., "
    "docs/QUICKSTART.md), or leave this out"
)
#: What is refused, and why; those of VALUED have a value.
REFUSED: Final[Mapping[str, str]] = {
    "--no-python": "workers are Python processes that are warm before they run the script. Name a Python script or module",
    "--virtual-local-rank": "each worker sees all GPUs of its node, and takes the one of its LOCAL_RANK. Leave it out",
    "--numa-binding": "workers are not bound to NUMA nodes. Leave it out, or start elasticrl run under numactl",
    "--logs-specs": "where logs go is telemetry.log_dir. Leave it out",
}
VALUED: Final = frozenset({"--numa-binding", "--logs-specs", *ELSEWHERE, *IDLE, *MEANS})


@dataclass(slots=True)
class _Reading:
    """The words, as far as they were read."""

    left: list[str]
    own: list[str]
    values: list[str]  # of the configuration
    notes: dict[str, list[str]]  # by the reason, what was left out for it
    problems: list[str]
    elsewhere: list[tuple[str, str]]
    given: list[str]
    module: bool = False

    def value_of(self, name: str, glued: str | None) -> str | None:
        if glued is not None:
            return glued
        if self.left and not self.left[0].startswith("--"):
            return self.left.pop(0)
        self.problems.append(f"{name} needs a value.")
        return None


def asked(words: Sequence[str]) -> Asked:
    """What `elasticrl run` was given behind its name.

    >>> found = asked(["--nnodes", "2:4", "--nproc-per-node=8", "-m", "pkg.train", "--arg"])
    >>> found.own, found.script
    (('--nodes', '4', '--workers', '8', 'membership.min_nodes=2'), Script(program='pkg.train', args=('--arg',), module=True))
    """
    at = _Reading(list(words), [], [], {}, [], [], [])
    script = None
    while at.left and script is None:
        word = at.left.pop(0)
        if word == MARK:
            script = _behind(at)
        elif not word.startswith("-"):
            script = _program(at, word)
        else:
            _option(at, word)
    if at.module and script is None:
        at.problems.append("-m needs the name of a module: -m pkg.train.")
    at.problems += _twice(at.given)
    at.problems += _far(at)
    notes = tuple(f"{', '.join(names)}: left out, as {why}." for why, names in at.notes.items())
    return Asked(own=(*at.own, *at.values), script=script, notes=notes, problems=tuple(at.problems))


def _behind(at: _Reading) -> Script:
    """Behind the mark all is the script's."""
    if at.left and at.left[0] in MODULE:
        at.left.pop(0)
        at.module = True
    program, *args = at.left or [""]
    return Script(program=program, args=tuple(args), module=at.module)


def _program(at: _Reading, word: str) -> Script | None:
    """A word without dashes: the script, or a configuration, or a value of one."""
    if at.module or (word.endswith(".py") and "=" not in word):
        return Script(program=word, args=tuple(at.left), module=at.module)
    at.own.append(word)
    return None


def _option(at: _Reading, word: str) -> None:
    name, sign, value = word.partition("=")
    glued = value if sign else None
    if name[:2] in {"-r", "-t"} and len(name) > 2 and not sign:
        name, glued = name[:2], name[2:]
    name = name.replace("_", "-")
    at.given.append(name)
    if name in OWN:
        taken = at.value_of(name, glued)
        at.own += [name, taken] if taken is not None else []
    elif name in OWN_FLAGS:
        at.own.append(name)
    elif name in MODULE:
        at.module = True
    elif name in VALUED:
        taken = at.value_of(name, glued)
        if taken is not None:
            _valued(at, name, taken)
    elif name in REFUSED:
        at.problems.append(f"{name}: {REFUSED[name]}.")
    elif name not in DONE:
        at.problems.append(f"{word}: neither elasticrl run nor torchrun has this option.")


def _valued(at: _Reading, name: str, value: str) -> None:
    if name in IDLE:
        at.notes.setdefault(IDLE[name], []).append(name)
    elif name in ELSEWHERE:
        at.elsewhere.append((name, value))
    elif name in REFUSED:
        at.problems.append(f"{name}: {REFUSED[name]}.")
    else:
        try:
            means = MEANS[name](value)
        except Wrong as error:
            at.problems.append(f"{name} {value}: {error}.")
            return
        at.values += [word for word in means if "=" in word]
        at.own += [word for word in means if "=" not in word]


def _twice(given: Sequence[str]) -> Iterator[str]:
    """What says the same."""
    for name, ours in SAME.items():
        if name in given and ours in given:
            yield f"{name} and {ours} say the same: give one of them."


def _far(at: _Reading) -> Iterator[str]:
    """Options that speak of other machines: wrong if there are several nodes, else of no use."""
    nodes = at.own[at.own.index("--nodes") + 1] if "--nodes" in at.own else "1"
    for name, value in at.elsewhere:
        if nodes == "1" or (name == "--rdzv-endpoint" and value.rpartition(":")[0] in LOOPBACK):
            at.notes.setdefault(OWN_MEETING, []).append(name)
        else:
            yield f"{name} {value}: {CLUSTER}."
