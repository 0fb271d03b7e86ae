"""What every bench prints: a table for people, one JSON object for machines, and the machine it was measured on.

The one idea about noise: a bench loads the machine as others do, so others are looked for where nothing of the bench runs:
before it, between its trials, and after it.
"""

import argparse
import json
import os
import platform
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from math import comb
from pathlib import Path
from typing import Any

from elasticrl.base.process import life

ROOT = Path(__file__).parents[1]
LOOK_S, LOOKS = 0.4, 3  # a look, and how many of them for what a trial has left to end
QUIET = 0.25  # of all processors: more, and others are there
BLIPS = 0.1  # of all looks: a cron job's second is no reason to doubt an hour
STOLEN = 0.05  # of the processors' time, by a hypervisor for its other guests


def summary(values: Sequence[float]) -> dict[str, float | int]:
    """Median, range and count."""
    if not values:
        return {"count": 0}
    return {"median": statistics.median(values), "min": min(values), "max": max(values), "count": len(values)}


def interval(values: Sequence[float]) -> tuple[float, float] | None:
    """Between which two of the values the median lies with 95 % at least; None if there are too few to tell."""
    row, n = sorted(values), len(values)
    outside = [
        sum(comb(n, i) for i in range(k + 1)) * 2 / 2**n for k in range(n // 2)
    ]  # below row[k] or above row[-k-1]
    sure = [k for k, chance in enumerate(outside) if chance <= 0.05]
    return (row[sure[-1]], row[-sure[-1] - 1]) if sure else None


def against(between: tuple[float, float] | None, goal: float, *, least: bool = False) -> str:
    """What an `interval` says of a goal, which is the most that it may be, or the least; with the goal within it, nothing.

    >>> [against(between, 1.02) for between in ((1.0, 1.02), (1.03, 1.1), (1.0, 1.1), None)]
    ['met', 'missed', 'too noisy to tell', 'too few to tell']
    >>> [against(between, 3.0, least=True) for between in ((3.0, 3.4), (2.0, 2.9), (2.5, 3.5))]
    ['met', 'missed', 'too noisy to tell']
    """
    if between is None:
        return "too few to tell"
    low, high = between
    met, missed = (low >= goal, high < goal) if least else (high <= goal, low > goal)
    return "met" if met else "missed" if missed else "too noisy to tell"


def machine() -> dict[str, Any]:
    """Where this was measured, and what."""
    packages = {name: version(name) for name in ("torch", "grpcio", "elasticrl")}
    return {
        "cores": os.cpu_count(),
        "cpu": cpu(),
        "load": os.getloadavg()[0],
        "python": platform.python_version(),
        **packages,
        "commit": commit(),
    }


def cpu() -> str:
    """The processors' name."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.machine())


def commit() -> str:
    """Of this checkout, with a + where the package is another than committed; empty where there is none, or no git."""
    if shutil.which("git") is None:
        return ""
    git = ["git", "-C", str(ROOT)]
    head = subprocess.run([*git, "rev-parse", "--short=10", "HEAD"], capture_output=True, text=True, check=False)
    if head.returncode:
        return ""
    same = subprocess.run([*git, "diff", "--quiet", "HEAD", "--", "elasticrl"], capture_output=True, check=False)
    return head.stdout.strip() + ("+" if same.returncode else "")


def end_cleanly() -> None:
    """SIGTERM unwinds, as Ctrl-C does, so that what a bench has started ends with it."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))


def some_of(known: Collection[str]) -> Callable[[str], list[str]]:
    """The type of an option that names some of these, with commas between. It refuses all that it does not know at once."""

    def read(text: str) -> list[str]:
        names = text.split(",")
        if unknown := [name for name in names if name not in known]:
            raise argparse.ArgumentTypeError(f"unknown: {', '.join(map(repr, unknown))}; known: {', '.join(known)}")
        return names

    return read


def noisy(looks: Sequence[float], stolen: float = 0.0) -> str:
    """A warning when others were using the machine: by what they took at each look, and by what a hypervisor kept for them.

    >>> noisy([0.02, 0.1])
    ''
    >>> noisy([0.02, 0.6])
    'too noisy to tell: others took up to 60 % of the processors at 1 of 2 looks'
    """
    loud, why = [share for share in looks if share > QUIET], []
    if len(loud) > BLIPS * len(looks):
        most = f"{100 * max(loud):.0f} %"
        why.append(f"others took up to {most} of the processors at {len(loud)} of {len(looks)} looks")
    if stolen > STOLEN:
        why.append(f"the hypervisor gave {100 * stolen:.0f} % of the processors' time to others")
    return f"too noisy to tell: {' and '.join(why)}" if why else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticks:
    """How the processors have spent their time so far. Example: Ticks(busy=5200, stolen=61, idle=49561)"""

    busy: int  # the stolen ones are not in it
    stolen: int
    idle: int

    @classmethod
    def read(cls, text: str) -> "Ticks":
        """From what is in /proc/stat; what guests take is in user and nice already."""
        user, nice, system, idle, iowait, irq, softirq, steal = map(int, text.split(maxsplit=9)[1:9])
        return cls(busy=user + nice + system + irq + softirq, stolen=steal, idle=idle + iowait)

    def since(self, before: "Ticks") -> "Ticks":
        """What came to it."""
        return Ticks(busy=self.busy - before.busy, stolen=self.stolen - before.stolen, idle=self.idle - before.idle)

    def share(self, what: int) -> float:
        """Of all of it."""
        return what / max(1, self.busy + self.stolen + self.idle)


def ticks() -> Ticks:
    """Now."""
    return Ticks.read(Path("/proc/stat").read_text())


def cpu_s(pid: int) -> float:
    """What a process, which runs, has taken of the processors so far."""
    now = life(pid)
    if now is None:
        raise ProcessLookupError(f"process {pid} has ended")
    return now.cpu_s


class Watch:
    """What others take of the machine from the beginning of a bench to its end."""

    def __init__(self) -> None:
        self.load, self.begun = os.getloadavg()[0], ticks()
        self.looks: list[float] = []
        self.look()

    def look(self) -> float:
        """The share of all processors that others take now, while nothing of the bench runs; between trials."""
        quietest = 1.0
        for _ in range(LOOKS):
            before = ticks()
            time.sleep(LOOK_S)  # the look itself
            passed = ticks().since(before)
            quietest = min(quietest, passed.share(passed.busy + passed.stolen))
            if quietest <= QUIET:
                break
        self.looks.append(quietest)
        return quietest

    @property
    def stolen(self) -> float:
        """Of the processors' time since the beginning."""
        passed = ticks().since(self.begun)
        return passed.share(passed.stolen)

    def noise(self) -> str:
        """After a last look: why nothing can be told; empty if it can."""
        self.look()
        return noisy(self.looks, self.stolen)

    def machine(self) -> dict[str, Any]:
        """The machine, its load before and after, and what others took of it."""
        others = {"others": summary(self.looks), "stolen": self.stolen}
        return {**machine(), "load": self.load, "load_after": os.getloadavg()[0], **others}


def show(title: str, head: Sequence[str], rows: Sequence[Sequence[str]], notes: Sequence[str] = ()) -> None:
    """The table."""
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    print(title)
    for row in (head, *rows):
        print("  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    for note in notes:
        print(f"  {note}")


def seconds(found: Mapping[str, float | int]) -> str:
    """A summary as text."""
    if not found.get("count"):
        return "never"
    return f"{found['median']:.3f} s ({found['min']:.3f}-{found['max']:.3f}, n={found['count']})"


def judged(
    bench: str, title: str, found: Mapping[str, Any], goals: Mapping[str, float], watch: Watch, *, as_json: bool,
    notes: Sequence[str] = (),
) -> int:  # fmt: skip
    """The end of a bench: what was found beside the most that each may be, and the exit code: 0 if all goals are met."""
    noise = watch.noise()
    values = {name: found[name]["median"] if isinstance(found[name], dict) else found[name] for name in goals}
    met = {name: values[name] <= goal for name, goal in goals.items()}
    if as_json:
        machine = watch.machine()
        dump({"bench": bench, "results": found, "goals": goals, "met": met, "noise": noise, "machine": machine})
    else:
        rows = [
            (name, f"{values[name]:.4g}", f"at most {goal:g}", "yes" if met[name] else "no")
            for name, goal in goals.items()
        ]
        show(title, ("what", "measured", "goal", "met"), rows, [*notes, *([noise] if noise else [])])
    return 0 if all(met.values()) else 1


def dump(result: Mapping[str, Any]) -> None:
    """The object."""
    print(json.dumps(result, indent=1, default=str))
