"""What every bench prints: a table for people, one JSON object for machines, and the machine it was measured on."""

import json
import os
import platform
import signal
import statistics
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any


def summary(values: Sequence[float]) -> dict[str, float | int]:
    """Median, range and count."""
    if not values:
        return {"count": 0}
    return {"median": statistics.median(values), "min": min(values), "max": max(values), "count": len(values)}


def machine() -> dict[str, Any]:
    """Where this was measured."""
    packages = {name: version(name) for name in ("torch", "grpcio", "elasticrl")}
    return {"cores": os.cpu_count(), "load": os.getloadavg()[0], "python": platform.python_version(), **packages}


def end_cleanly() -> None:
    """SIGTERM unwinds, as Ctrl-C does, so that what a bench has started ends with it."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))


def noisy(before: float, after: float) -> str:
    """A warning when others were using the machine."""
    cores = os.cpu_count() or 1
    busy = max(before, after)
    return (
        f"too noisy to tell: the load was {busy:.1f} on {cores} cores before the bench began"
        if before > cores * 0.75
        else ""
    )


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


def dump(result: Mapping[str, Any]) -> None:
    """The object."""
    print(json.dumps(result, indent=1, default=str))
