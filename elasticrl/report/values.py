"""What a run left, as values: what `read` makes of its files, and `story` reckons from.

The one idea: what grows with nodes and days is kept as figures, not as lines. Of a daemon's log that is when its node changed
its state; of steps' times what no line may be missing for, beside rows of which a part will do.
"""

from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from elasticrl.base.parsed import HIGHEST
from elasticrl.contract.evaluated import Evaluated
from elasticrl.diagnose.incident import Incident
from elasticrl.runtime.checkpoint.shelf import Entry
from elasticrl.runtime.chronicle import History
from elasticrl.runtime.data.audit import Audit


@dataclass(frozen=True, slots=True, kw_only=True)
class Happening:
    """One event of a daemon's log.

    Example: Happening(at=1763764533.58, node="n0", name="plan.adopted", said={"generation": 1})
    """

    at: float  # seconds since 1970
    node: str
    name: str
    said: Mapping[str, Any]

    def whole(self, field_name: str) -> int:
        """A field that is a whole number; 0 if it is not there."""
        value = self.said.get(field_name)
        return value if isinstance(value, int) and -HIGHEST < value < HIGHEST else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Took:
    """What one rank's step took.

    Example: Took(at=1763764533.58, node="n0", rank=0, step=3, generation=1, seconds={"update": 0.5})
    """

    at: float
    node: str
    rank: int
    step: int
    generation: int
    seconds: Mapping[str, float]
    waited: Mapping[str, float] = field(default_factory=dict)
    steps: int = 1
    bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """What the trainer noted of a step.

    Example: Note(step=3, generation=1, facts={"reward": 0.4, "kl": 0.1}, at=1763764533.58)
    """

    step: int
    generation: int
    facts: Mapping[str, float]
    at: float | None = None  # seconds since 1970, where it was written down


@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """When a node changed what it did, and when it showed signs of life; both in the order of time.

    Example: Life(at=array("d", [1.0]), what=array("I", [0]), words=("training",), signs=array("d", [1.0, 4.5]))
    """

    at: "array[float]" = field(default_factory=lambda: array("d"))
    what: "array[int]" = field(default_factory=lambda: array("I"))  # places in `words`
    words: Sequence[str] = ()
    signs: "array[float]" = field(default_factory=lambda: array("d"))

    def __iter__(self) -> Iterator[tuple[float, str]]:
        """(when, what) of each change: the word of a `workers.changed`, or `daemon.started`, `.adopted`, `.stopped`."""
        for at, what in zip(self.at, self.what, strict=True):
            yield at, self.words[what]


@dataclass(frozen=True, slots=True, kw_only=True)
class Log:
    """What all daemons' logs come to."""

    events: int = 0
    begin: float = 0.0
    end: float = 0.0
    nodes: Mapping[str, Life] = field(default_factory=dict)
    plans: Mapping[int, Happening] = field(default_factory=dict)  # each generation, as the first node adopted it
    recovered: Mapping[int, Happening] = field(default_factory=dict)  # each, by the node that it took longest on
    # Each step, and when first: that of a commit, and that a node's workers were seen at.
    committed: Mapping[int, float] = field(default_factory=dict)
    reached: Mapping[int, float] = field(default_factory=dict)
    steps: int = 0  # the newest that was trained
    trained: int = 0  # the first
    milestone: str = ""  # how far a script was that told no steps, by its own log


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """What all lines of steps' times come to: figures that would be wrong if a line were left out."""

    lines: int = 0
    begin: float = 0.0
    end: float = 0.0
    nodes: Mapping[str, "array[float]"] = field(
        default_factory=dict
    )  # and each one's last signs of life before its starts
    sealed: Mapping[int, float] = field(default_factory=dict)  # each step, and when first
    steps: int = 0
    # Of those lines that are of steps; None: there is none.
    first: int | None = None  # the step before the first of them
    newest: int = 0
    began: float = 0.0  # when the first of them did


@dataclass(frozen=True, slots=True, kw_only=True)
class Left:
    """All that a run left behind, as far as it was found."""

    where: str
    job: str = ""
    log: Log = field(default_factory=Log)
    pace: Pace = field(default_factory=Pace)
    took: tuple[Took, ...] = ()  # all lines of steps' times, or those of every `every`th step
    every: int = 1
    said: tuple[Took, ...] = ()  # the same by rank 0's own word, without times of day
    notes: tuple[Note, ...] = ()
    noted: int = 1  # they are of every so manieth step
    evaluated: tuple[Evaluated, ...] = ()  # in the order of their steps
    incidents: tuple[Incident, ...] = ()  # each once; `node` names all who saw it
    untold: int = 0  # older ones
    checkpoints: tuple[Entry, ...] = ()
    digests: History | None = None
    samples: Audit | None = None
    files: tuple[str, ...] = ()  # what was read, in words
    unread: tuple[str, ...] = ()  # and what could not be, or was passed over
