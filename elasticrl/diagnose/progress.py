r"""How far a script says in its log that it is: `step 120/500`, a bar of tqdm, `{'loss': ..., 'epoch': 0.24}`. Pure.

The one idea: a line of progress is one that a row of a table knows, and that says something else than the lines before it. So a
bar that is only drawn anew is no progress, whatever it writes. What comes in is bounded: of much only the newest is read.

    reader = Reader().after(b"step 119/500 loss 2.31\nstep 120/500 loss 2.30\n")
    reader.milestone  # Milestone(unit="step", at=120, of=500)
    reader.moves      # 2
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final

from elasticrl.base.expression import expected
from elasticrl.base.value import dataclass
from elasticrl.contract.model import Milestone

PIECE: Final = 1 << 13  # bytes that are read at once, the newest
LINES: Final = 64  # and lines of them
HALF: Final = 1000  # letters of a long line that are read at its beginning, and at its end
SAID: Final = 8  # of the newest lines it is remembered what they said
OFTEN: Final = 3  # lines of one kind that are more than a remark

N: Final = r"(?P<n>\d{1,3}(?:,\d{3}){1,4}+|\d{1,15}+)"
OF: Final = r"(?P<of>\d{1,3}(?:,\d{3}){1,4}+|\d{1,15}+)"
DECIMAL: Final = r"(?P<n>\d{1,9}(?:\.\d{1,9})?)"
END: Final = r"(?!\.?\w)"  # of a number: neither `1.5` nor `2nd` is a step
IS: Final = r"""["']?\s{0,20}[:=#]?\s{0,20}\[?["']?\s{0,20}"""  # between a name and its value
BAR: Final = r"\d{1,3}%\|[^|]{0,400}\|\s{0,20}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One kind of line.

    Example: Row(name="step of", pattern=re.compile(...), unit="step")
    """

    name: str
    pattern: re.Pattern[str]
    unit: str  # what its number counts; "": nothing that tells how far the script is, only that it goes on
    label: re.Pattern[str] | None = None  # what stands before a match must be this


def _row(name: str, unit: str, pattern: str, label: str | None = None) -> Row:
    found = re.compile(pattern, re.IGNORECASE)
    return Row(name=name, pattern=found, unit=unit, label=re.compile(label, re.IGNORECASE) if label else None)


#: The surest first. A line is of the first kind that knows it.
ROWS: Final = (
    # Megatron: ` iteration      120/     500 | consumed samples: ...`; NeMo: `Training epoch 0, iteration 120/499 | lr: ...`
    _row("iteration of", "step", rf"\biter(?:ation)?{IS}{N}\s{{0,20}}/\s{{0,20}}{OF}{END}"),
    # `step 120/500`, `Step [120/500]`, `step 120 of 500`
    _row("step of", "step", rf"(?<![a-z])step{IS}{N}\s{{0,20}}(?:/|of)\s{{0,20}}{OF}{END}"),
    # torchvision and the ImageNet example: `Epoch: [0][ 120/500]  Time ...`
    _row("epoch's step of", "step", rf"\bepoch:?\s{{0,20}}\[\d{{1,9}}\]\s{{0,20}}\[\s{{0,20}}{N}/{OF}\]"),
    # verl: `step:120 - ...`; torchtitan: `step: 120  loss: ...`; nanoGPT: `iter 120: loss ...`; `'global_step': 120`
    _row("step", "step", rf"(?<![a-z])(?:step|iter|iteration){IS}{N}{END}"),
    # tqdm, and what draws with it (transformers, Lightning): ` 24%|##4       | 120/500 [00:12<00:38,  9.93it/s]`
    _row(
        "bar", "step", rf"{BAR}{N}/{OF} \[[^\[\]]{{1,300}}\]",
        r"(?:^|.*(?:train|step|epoch\s*\d|iter|batch|optim|progress|\|).*)$",
    ),
    # Bars of something else: `Map: 100%|...`, `Evaluating: ...`, one that counts in thousands, one without a total.
    _row("other bar", "", rf"{BAR}[\d.]{{1,15}}[kMGT]?/[\d.]{{1,15}}[kMGT]? \[[^\[\]]{{1,300}}\]"),
    _row("bar without a total", "", r"(?<![\w.])\d{1,15}+[a-z]{1,12} \[[^\[\]]{1,300}/s[^\[\]]{0,300}\]"),
    # The MNIST example: `Train Epoch: 1 [1280/60000 (2%)]  Loss: ...`
    _row("sample of", "sample", rf"\[{N}/{OF}\s{{0,20}}\(\d"),
    # transformers: `{'loss': 2.31, 'grad_norm': 1.2, 'learning_rate': 1e-05, 'epoch': 0.24}`
    _row("epoch of transformers", "epoch", rf"""["']epoch["']: ["']?{DECIMAL}{END}"""),
    _row("epoch of", "epoch", rf"\bepoch{IS}{N}\s{{0,20}}(?:/|of)\s{{0,20}}{OF}{END}"),
    _row("epoch", "epoch", rf"\bepoch{IS}{N}{END}"),
    _row("loss", "", r"""\bloss["']?\s{0,20}[:=]?\s{0,20}["']?-?\d"""),
)  # fmt: skip
#: Rows whose line need not have ended: it is whole when its last bracket is there. tqdm ends it when it draws the next.
BARS: Final = frozenset({"bar", "other bar", "bar without a total"})
COLOURS: Final = re.compile(r"\x1b\[[0-9;]{0,20}[A-Za-z]")
ENDS: Final = re.compile(rb"[\r\n]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """Lines of one kind: the bar of one loop, the steps of one trainer."""

    row: int
    label: str  # what stands before, without numbers
    of: float
    milestone: Milestone
    lines: int = 1

    def same(self, other: "Series") -> bool:
        """Do both count the same thing?"""
        return (self.row, self.label, self.of) == (other.row, other.label, other.of)

    @property
    def over(self) -> bool:
        """Has it come to its end?"""
        return 0 < self.of <= self.milestone.at


@dataclass(frozen=True, slots=True, kw_only=True)
class Reader:
    """What one process's log has said so far. `rows`: the table, or the one row that is given."""

    rows: tuple[Row, ...] = ROWS
    tail: bytes = b""  # the beginning of its next line
    moves: int = 0  # lines that said that it goes on
    said: tuple[str, ...] = ()  # by the newest of them
    current: Series | None = None  # what tells how far it is
    rival: Series | None = None  # what else counts something, since the newest line of that

    @property
    def milestone(self) -> Milestone | None:
        """How far it is, by its log; None: the log has not said."""
        return self.current.milestone if self.current else None

    def after(self, data: bytes) -> "Reader":
        """It has written this."""
        reader = self
        *whole, tail = ENDS.split((self.tail + data)[-PIECE:])
        for line in whole[-LINES:]:
            reader = reader.read(line)
        reader = reader.read(tail, BARS) if tail else reader
        return replace(reader, tail=tail[-2 * HALF :])

    def read(self, line: bytes, only: frozenset[str] | None = None) -> "Reader":
        """A line. `only`: of one that may go on, the rows that know its end."""
        text = readable(line)
        number, found = next(_matches(self.rows, text), (0, None))
        if found is None or (only is not None and self.rows[number].name not in only):
            return self
        row = self.rows[number]
        what = f"{row.name} {found[0] if row.unit else text}"
        if what in self.said:
            return self
        reader = replace(self, moves=self.moves + 1, said=(*self.said[1 - SAID :], what))
        if not row.unit:
            return reader
        milestone = milestone_of(row.unit, found)
        if milestone is None:
            return reader
        label = re.sub(r"[^a-z]", "", text[: found.start()].lower()) if row.label else ""
        return reader.counts(Series(row=number, label=label, of=milestone.of, milestone=milestone))

    def counts(self, new: Series) -> "Reader":
        """A line that counts something: the same as before, or something else, which may be what tells from now on."""
        now = self.current
        if now is not None and now.same(new):
            return replace(self, current=replace(new, lines=now.lines + 1), rival=None)
        rival = replace(new, lines=self.rival.lines + 1) if self.rival and self.rival.same(new) else new
        if now is None or now.over or supersedes(rival, now):
            return replace(self, current=rival, rival=None)
        return replace(self, rival=rival)


def supersedes(new: Series, now: Series) -> bool:
    """Does this tell how far the script is, in place of that? What is surer does. Of two of a kind the one that came again and
    again does, so the bar of an evaluation does not take the place of the training's. What is less sure does where the other
    was a remark, such as "resumes from step 120".
    """
    if new.row < now.row:
        return True
    if new.row == now.row:
        return new.lines >= max(OFTEN, now.lines)
    return now.lines == 1 and new.lines >= OFTEN


def _matches(rows: Sequence[Row], text: str) -> Iterator[tuple[int, re.Match[str]]]:
    for number, row in enumerate(rows):
        found = row.pattern.search(text)
        if found and (row.label is None or row.label.match(text[: found.start()].strip(" :"))):
            yield number, found


def milestone_of(unit: str, found: re.Match[str]) -> Milestone | None:
    """What a match says; None if that is no number."""
    groups = found.groupdict()
    try:
        at, of = (float((groups.get(name) or "0").replace(",", "")) for name in ("n", "of"))
    except ValueError:
        return None
    if not (0.0 <= at <= 1e15 and 0.0 <= of <= 1e15):
        return None
    return Milestone(unit=unit, at=round(at, 4), of=of)


def readable(line: bytes) -> str:
    """As text, without colours; of a long line its beginning and its end."""
    text = COLOURS.sub("", line.decode(errors="replace"))
    return text if len(text) <= 2 * HALF else f"{text[:HALF]} {text[-HALF:]}"


def given(expression: str) -> tuple[Row, ...]:
    r"""The table with which an operator's expression alone is looked for. Raises ValueError with a sentence.

    >>> given(r"update (\d+)")[0].pattern.search("update 17")["n"]
    '17'
    """
    if not expression:
        return ROWS
    return (Row(name="given", pattern=expected(expression), unit="step"),)
