"""What the parts of `make gpu` find, as values: written as one JSON object, read back, and told as text.

The one idea: nothing is passed that did not run. A row says how it came out in one word. A row that only a card can settle says
`not on cpu` where there is none, although what surrounds it was run. Only the standard library is imported.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, get_args

State = Literal["passed", "failed", "figure", "not on cpu", "missing"]
End = Literal["passed", "failed", "late", "no time"]
STATES, ENDS = get_args(State), get_args(End)
WIDE = 128  # columns of the text


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One thing that was looked at.

    Example: Row(name="fsdp, 3 workers", state="passed") or Row(name="a step", state="figure", value=1.42, unit="s")
    """

    name: str
    state: State
    value: float | None = None  # of a figure
    unit: str = ""
    said: str = ""  # why it is not passed, or what a figure stands beside


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What one part found. `said` are the last lines of one that failed, `stacks` what its processes were at if it was late."""

    name: str
    title: str
    end: End
    took_s: float
    limit_s: float
    rows: tuple[Row, ...] = ()
    said: str = ""
    stacks: Mapping[str, str] = field(default_factory=dict)  # by the file that they were written to


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """A whole run."""

    device: str
    limit_s: float
    took_s: float
    machine: Mapping[str, str]
    parts: tuple[Part, ...]

    @property
    def good(self) -> bool:
        """Whether all parts ended in time, and nothing failed."""
        return all(part.end == "passed" for part in self.parts)


def row_of(plain: Mapping[str, Any]) -> Row:
    """From JSON; ValueError if it is none of ours."""
    row = Row(**plain)
    if row.state not in STATES:
        raise ValueError(f"{row.state!r} is not how a row comes out: {', '.join(STATES)}")
    return row


def dumped(result: Result) -> str:
    """As JSON."""
    return json.dumps(asdict(result), indent=1) + "\n"


def loaded(text: str) -> Result:
    """The reverse."""
    plain = json.loads(text)
    parts = []
    for part in plain.pop("parts"):
        rows = tuple(row_of(row) for row in part.pop("rows"))
        if part["end"] not in ENDS:
            raise ValueError(f"{part['end']!r} is not how a part ends: {', '.join(ENDS)}")
        parts.append(Part(**part, rows=rows))
    return Result(**plain, parts=tuple(parts))


def told(result: Result) -> str:
    """The text: what is wrong first, then part by part."""
    where = "the card" if result.device == "cuda" else "CPUs: a rehearsal, no result of a card"
    how = "all parts passed" if result.good else "NOT all parts passed"
    head = [
        f"make gpu on {where}: {how}, {result.took_s:.0f} s of {result.limit_s:.0f} s",
        *(f"{name}: {value}" for name, value in result.machine.items()),
    ]
    rows = [
        (part.name, part.end, f"{part.took_s:.0f} s of {part.limit_s:.0f} s", counts(part.rows))
        for part in result.parts
    ]
    return "\n".join(
        [*head, "", *table(("part", "end", "took", "rows"), rows), *(_part(part) for part in result.parts), ""]
    )


def counts(rows: Sequence[Row]) -> str:
    """How many came out how.

    >>> counts([Row(name="a", state="passed"), Row(name="b", state="figure"), Row(name="c", state="passed")])
    '2 passed, 1 figure'
    """
    found = {state: sum(row.state == state for row in rows) for state in STATES}
    return ", ".join(f"{count} {state}" for state, count in found.items() if count) or "none"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns."""
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in (head, *rows)
    ]


def _part(part: Part) -> str:
    lines = ["", f"{part.name}: {part.title}"]
    lines += ["  " + line for line in table(("what", "how", "value", "said"), [_cells(row) for row in part.rows])[1:]]
    if part.said:
        lines += ["  last lines:", *("    " + line for line in part.said.splitlines())]
    for place, stack in part.stacks.items():
        lines += [f"  {place} was at:", *("    " + line for line in stack.splitlines())]
    return "\n".join(lines)


def _cells(row: Row) -> tuple[str, str, str, str]:
    value = "" if row.value is None else f"{row.value:.4g} {row.unit}".strip()
    said = " / ".join(row.said.split("\n"))
    return row.name, row.state, value, said if len(said) <= WIDE else f"{said[: WIDE - 4]} ..."
