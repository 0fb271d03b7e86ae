"""What each worker's phases took, step by step, on disk: `steps.jsonl` in the node's log folder, for `elasticrl report`.

The one idea: a beat says since when its worker has been in its phase, so whoever looks now and then knows the length of every
phase that lasted longer than a look, to the microsecond, and the worker pays nothing for it. What a rank spent waiting in
collectives is counted in looks, and so only as fine as they are.
"""

import asyncio
import json
import os
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import field
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Final

from elasticrl.base.ticks import until_next
from elasticrl.base.value import dataclass
from elasticrl.contract.beats import Page, Snapshot, Stage
from elasticrl.contract.wire import Worker

if TYPE_CHECKING:  # prometheus' client is imported where metrics are served
    from elasticrl.telemetry.metrics import Metrics

NAME: Final = "steps.jsonl"
LOOK_S: Final = 0.05  # between looks, at least; a phase shorter than a look may be counted to the one before it
LOOKS: Final = 10  # in the shortest step: longer steps are looked at less often,
SELDOM_S: Final = 0.2  # but never less than that; halves of it, so that looks are where beats and other looks are
LINE_S: Final = 0.2  # that a line is of, at least: shorter steps share one,
SHARED_S: Final = 0.1  # and are looked at so often: their phases are shorter than any look
MOST: Final = 1000  # steps of a line that are counted one by one: a line of more would hold up the daemon's beats
IDLE_S: Final = 0.5  # between looks for workers, while there are none
LIMIT: Final = 16 * 1024 * 1024  # bytes of a file; then it becomes `steps-old.jsonl`
ENCODE: Final = json.JSONEncoder(separators=(",", ":")).encode


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One rank's step.

    Example: Line(step=1284, generation=14, rank=2, seconds={"values": 0.1, "update": 0.4}, waited={"update": 0.1}, bytes=8192)
    """

    step: int
    steps: int = 1  # that the line is of: several, where they are short
    generation: int
    rank: int
    seconds: Mapping[str, float]
    waited: Mapping[str, float]
    bytes: int  # moved by its collectives


@dataclass(frozen=True, slots=True, kw_only=True)
class Marks:
    """What is known of a worker since its last line."""

    last: Snapshot
    at: float  # when it was looked at
    began: float  # when the line did, and with what
    step: int
    bytes: int
    fresh: bool = False  # a process that has not told of any step yet
    seconds: Mapping[str, float] = field(default_factory=dict)
    waited: Mapping[str, float] = field(default_factory=dict)


def after(marks: Marks | None, now: float, beat: Snapshot, rank: int) -> tuple[Marks, Line | None]:
    """The marks after another look, and the line of the steps that have ended since the last line, if one is due."""
    # A new generation goes on with the step that was cut short. A process without one made none of those that it resumes after.
    if marks is None or marks.last.pid != beat.pid or not marks.last.generation:
        return _anew(beat, now, fresh=True), None
    last = marks.last
    if marks.fresh and beat.step != last.step and (last.state is not Stage.TRAINING or beat.step != last.step + 1):
        return _anew(
            beat, now
        ), None  # nor of those that it was given from others' memory, which its first word may be of
    seconds, waited = dict(marks.seconds), dict(marks.waited)
    if beat.since > last.since:
        seconds[last.phase] = seconds.get(last.phase, 0.0) + beat.since - last.since
    if last.waiting:
        waited[last.phase] = waited.get(last.phase, 0.0) + now - marks.at
    if beat.step == last.step or now < marks.began + LINE_S:
        began, step, moved = marks.began, marks.step, marks.bytes
        return Marks(
            last=beat, at=now, began=began, step=step, bytes=moved, fresh=marks.fresh and beat.step == last.step,
            seconds=seconds, waited=waited,
        ), None  # fmt: skip
    line = Line(
        step=beat.step,
        steps=max(1, beat.step - marks.step),
        generation=beat.generation,
        rank=rank,
        seconds={name: round(value, 6) for name, value in seconds.items()},
        waited={name: round(min(value, seconds.get(name, 0.0)), 3) for name, value in waited.items()},
        bytes=beat.bytes - marks.bytes,
    )
    return _anew(beat, now), line


def _anew(beat: Snapshot, now: float, *, fresh: bool = False) -> Marks:
    return Marks(last=beat, at=now, began=now, step=beat.step, bytes=beat.bytes, fresh=fresh)


def pause(step_s: float) -> float:
    """Seconds until the next look, where the shortest step takes this long.

    >>> [pause(step_s) for step_s in (0.01, 0.3, 1.0, 1.9, 60.0)]
    [0.1, 0.05, 0.1, 0.1, 0.2]
    """
    if step_s < LINE_S:
        return SHARED_S
    return next((look_s for look_s in (SELDOM_S, SELDOM_S / 2) if look_s <= step_s / LOOKS), LOOK_S)


def count(metrics: "Metrics", line: Line) -> None:
    """A worker's steps in the node's metrics. Those that share a line count as so many of the same length, up to a number."""
    total_s = sum(line.seconds.values())
    told = [(metrics.phase_s.labels(phase=phase), seconds) for phase, seconds in line.seconds.items()]
    for histogram, seconds in [(metrics.step_s, total_s), *told]:
        for _ in range(min(line.steps, MOST)):
            histogram.observe(seconds / line.steps)
    for phase, seconds in line.waited.items():
        metrics.waited_s.labels(phase=phase).inc(seconds)
    metrics.collective_bytes.inc(max(0, line.bytes))


class StepLog:
    """Looks at the workers' beats, and writes a line for each step of each."""

    def __init__(
        self,
        path: Path,
        node: str,
        workers: Callable[[], Iterable[Worker]],
        tell: Callable[[Line], None] | None = None,
    ) -> None:
        self._tell = tell
        self._path = path
        self._node = node
        self._workers = workers
        self._pages: dict[str, Page] = {}
        self._marks: dict[str, Marks] = {}
        self._pause_s = SELDOM_S  # until it is known how long a step takes
        self._file: FileIO | None = None  # kept open: there are lines five times a second

    async def run(self) -> None:
        """Until it is cancelled. A disk that takes nothing costs lines, and nothing else."""
        try:
            while True:
                lines = self.look(time.monotonic())
                if lines:
                    with suppress(OSError):
                        self._write(lines)
                    self._pause_s = pause(min(sum(line.seconds.values()) / line.steps for line in lines))
                for line in lines:
                    if self._tell:
                        self._tell(line)
                await asyncio.sleep(until_next(self._pause_s if self._pages else IDLE_S, time.time()))
        finally:
            self.close()

    def look(self, now: float) -> list[Line]:
        """All workers once."""
        found: list[Line] = []
        present = {worker.beat: worker.rank for worker in self._workers()}
        for gone in self._pages.keys() - present:
            del self._pages[gone]  # not closed: that would remove the agent's file
            self._marks.pop(gone, None)
        for beat, rank in present.items():
            if beat not in self._pages:
                try:
                    self._pages[beat] = Page(Path(beat))
                except OSError:
                    continue  # it has ended since it was told of, or it cannot be read now; the next look tries again
            seen, marks = self._pages[beat].read(), self._marks.get(beat)
            if seen is None or (marks is not None and seen is marks.last):
                continue  # it has said nothing new; what it has waited counts when it does
            self._marks[beat], line = after(marks, now, seen, rank)
            if line is not None:
                found.append(line)
        return found

    def _write(self, lines: Iterable[Line]) -> None:
        at = round(time.time(), 3)
        text = "".join(
            ENCODE({
                "at": at, "node": self._node, "rank": line.rank, "step": line.step, "steps": line.steps,
                "generation": line.generation, "seconds": line.seconds, "waited": line.waited, "bytes": line.bytes,
            }) + "\n" for line in lines
        )  # fmt: skip
        self._place().write(text.encode())

    def _place(self) -> FileIO:
        """Where the next lines go: a new file if the present one is full, or somebody has removed it."""
        if self._file is not None:
            here = os.fstat(self._file.fileno())
            if here.st_nlink and here.st_size <= LIMIT:
                return self._file
            self.close()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        if self._path.exists() and self._path.stat().st_size > LIMIT:
            self._path.replace(self._path.with_name("steps-old.jsonl"))
        self._file = FileIO(self._path, "a", opener=lambda path, flags: os.open(path, flags | os.O_NOFOLLOW, 0o640))
        return self._file

    def close(self) -> None:
        """Let go of the file."""
        if self._file is not None:
            self._file.close()
            self._file = None
