"""How much a job's program does for its own recovery, as one word; and what a plan may use because of it.

The one idea: all else is alike at all levels (who is in, who is watched, what is judged, who is kept out), so nothing asks
which level a job is on. It asks whether a means is there: `settings.means.in_place`, and that follows from this table alone.
"""

from collections.abc import Mapping
from dataclasses import replace
from enum import StrEnum
from types import MappingProxyType
from typing import Final

from elasticrl.base.value import dataclass


class Level(StrEnum):
    """What the program does."""

    SUPERVISED = "supervised"  # nothing: any script that torchrun runs
    TOLD = "told"  # it says which step it is at
    KEPT = "kept"  # it hands its whole state over at each step, and takes it back when it begins
    EXACT = "exact"  # it computes in lanes, and leaves a broken group in place


@dataclass(frozen=True, slots=True, kw_only=True)
class Means:
    """What there is to recover by."""

    in_place: (
        bool  # a living worker takes its seat in the next gang; else each gang begins with fresh processes on all nodes
    )
    commits: bool  # the runtime seals and commits steps: there is a newest one to go back to, to save, or to wait for
    joins: bool  # the program asks for its rank; else it trains from its first line
    tells: bool  # it says which steps it makes
    keeps: bool  # its state is in the vaults, with copies on other nodes


RUNTIME: Final = Means(in_place=True, commits=True, joins=True, tells=True, keeps=True)
SCRIPT: Final = Means(in_place=False, commits=False, joins=False, tells=False, keeps=False)
TELLS: Final = replace(SCRIPT, tells=True)
KEEPS: Final = replace(TELLS, keeps=True)

#: What each level has.
MEANS: Final[Mapping[Level, Means]] = MappingProxyType(
    {Level.SUPERVISED: SCRIPT, Level.TOLD: TELLS, Level.KEPT: KEEPS, Level.EXACT: RUNTIME}
)


def means_of(level: str) -> Means:
    """What the level of this name has."""
    return MEANS[Level(level)]


#: What each level gives, and what to add for the next one. For people.
GIVES: Final[Mapping[Level, str]] = MappingProxyType(
    {
        Level.SUPERVISED: (
            "level supervised: after a fault all workers start again, and the script resumes from its own checkpoint. "
            "Level told (one line: elasticrl.beat(step=step)) adds steps, phases and a restart at hangs: docs/LEVELS.md."
        ),
        Level.TOLD: (
            "level told: steps and phases are known, hangs are found; after a fault all workers start again from the script's "
            "own checkpoint. Level kept (three lines: elasticrl.keep) loses no step: docs/LEVELS.md."
        ),
        Level.KEPT: (
            "level kept: the state is in memory, with copies on other nodes; after a fault all workers start again from the "
            "newest step. Level exact (elasticrl.runtime.join) also keeps the processes, and the bits: docs/LEVELS.md."
        ),
        Level.EXACT: "",
    }
)
