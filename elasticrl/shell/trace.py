"""Every event the core was given and what it decided, on disk, so that any decision can be made again: `elasticrl replay`.

The one idea: because `core.step` is pure, a state and the events after it are the whole story. A trace is two bounded files,
each beginning with the whole state, so that the older can be dropped. Of a `Seen` only what has changed since the last one is
written. Values are tagged JSON; reading it makes nothing but the core's own frozen values. A disk that takes nothing costs
lines, and nothing else.
"""

import dataclasses
import json
from collections.abc import Hashable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any, Final, TextIO

from elasticrl.base.parsed import parsed
from elasticrl.base.regular import open_regular_text
from elasticrl.base.value import dataclass
from elasticrl.contract import events, evidence, model, orders, pairs, settings, verdict
from elasticrl.contract.events import Action, Event, Seen
from elasticrl.contract.model import View
from elasticrl.core.judge import policy
from elasticrl.core.node import state, suspect
from elasticrl.core.node.state import Decision, Lead, State
from elasticrl.core.step import step
from elasticrl.shell.keys import Unreadable
from elasticrl.store.protocol import Say

TAG: Final = "~"
FORMAT: Final = 4
SHARED: Final = ("plan", "quarantines")  # of a view: mostly what they were, and large
# Remembered only to save work, and never asked for in a decision: it is found anew. (`compare=False` would not tell it: an
# Answer's words are not compared either, and are said.)
FOUND_ANEW: Final[Mapping[type, frozenset[str]]] = {Lead: frozenset({"rows"}), State: frozenset({"calm_until"})}
PLAIN: Final = frozenset({bool, int, float, str})
AGAIN_S: Final = 1.0  # between attempts to write to a disk that took nothing: each begins with the whole state


def _vocabulary() -> dict[str, type]:
    modules = (model, orders, events, settings, state, suspect, evidence, pairs, policy, verdict)
    found = (value for module in modules for value in vars(module).values() if isinstance(value, type))
    return {cls.__module__.rpartition(".")[2] + "." + cls.__name__: cls for cls in found}


CLASSES: Final = _vocabulary()


def name_of(cls: type) -> str:
    """How a class is written in a trace."""
    return cls.__module__.rpartition(".")[2] + "." + cls.__name__


@cache
def fields_of(cls: type) -> tuple[str, ...]:
    """The names of the fields of it that are written."""
    left_out = FOUND_ANEW.get(cls, frozenset())
    return tuple(field.name for field in dataclasses.fields(cls) if field.name not in left_out)


def encode(value: Any) -> Any:
    """A value of the core as plain JSON: tuples become lists, everything else but scalars an object with a tag."""
    kind = type(value)
    if value is None or kind in PLAIN:  # first what there is most of
        return value
    if isinstance(value, tuple):
        return [encode(item) for item in value]
    if dataclasses.is_dataclass(kind):
        return {TAG: name_of(kind), **{name: encode(getattr(value, name)) for name in fields_of(kind)}}
    if isinstance(value, Enum):
        return {TAG: name_of(kind), "is": value.value}
    if isinstance(value, frozenset):
        return {TAG: "set", "of": [encode(item) for item in sorted(value)]}
    if isinstance(value, Mapping):
        return {TAG: "map", "of": [[encode(key), encode(item)] for key, item in value.items()]}
    raise TypeError(f"a {type(value).__name__} has no place in a trace: {value!r}")


def decode(plain: Any) -> Any:
    """The value again."""
    if isinstance(plain, list):
        return tuple(decode(item) for item in plain)
    if not isinstance(plain, dict):
        return plain
    tag = plain.get(TAG)
    if tag == "set":
        return frozenset(decode(item) for item in plain["of"])
    if tag == "map":
        return {decode(key): decode(item) for key, item in plain["of"]}
    cls = CLASSES.get(str(tag))
    if cls is None:
        raise Unreadable(f"trace: {tag!r} is no part of the core's vocabulary; read it with the version that wrote it")
    if issubclass(cls, Enum):
        return cls(plain["is"])
    try:
        return cls(**{key: decode(item) for key, item in plain.items() if key != TAG})
    except TypeError as error:
        raise Unreadable(
            f"trace: {tag!r} was another thing ({error}); read it with the version that wrote it"
        ) from error


def changes(old: Mapping[str, Hashable] | None, new: Mapping[str, Hashable] | None) -> tuple[dict[str, Any], list[str]]:
    """What to set and what to remove to get from one mapping to the other."""
    old, new = old or {}, new or {}
    return {key: item for key, item in new.items() if old.get(key) is not item and old.get(key) != item}, sorted(
        old.keys() - new.keys()
    )


def unsaid(event: str, /, **fields: object) -> None:
    """Where nobody listens."""


class Trace:
    """Writes a trace into `<folder>/trace-old.jsonl` and `trace-new.jsonl`, never more than `limit` bytes in all."""

    def __init__(self, folder: Path, limit: int, say: Say = unsaid) -> None:
        self._folder = folder
        self._half = limit // 2
        self._say = say
        self._size = 0
        self._view = View()
        self._file: TextIO | None = None  # None: the next line begins a file
        self._lost_at: float | None = None  # when the disk first took nothing
        self._again_at = 0.0

    def write(self, before: State, event: Event, actions: tuple[Action, ...]) -> None:
        """One step of the core: the state it started from is written only at the head of a file. It never raises OSError:
        the line is dropped, and what comes after it begins a file of its own, as no line can be read without those before.
        """
        if event.now < self._again_at:
            return
        try:
            if self._file is None or self._size > self._half:
                self._file = self._begin(before)
            self._put(self._file, self._line(event, actions))
        except OSError as error:
            self.close()
            self._again_at = event.now + AGAIN_S
            if self._lost_at is None:
                self._lost_at = event.now
                self._say("trace.lost", folder=str(self._folder), error=str(error))
        else:
            if self._lost_at is not None:
                self._say("trace.back", folder=str(self._folder), after_s=round(event.now - self._lost_at, 3))
                self._lost_at = None

    def close(self) -> None:
        """Leave the files as they are."""
        file, self._file = self._file, None
        if file is not None:
            with suppress(OSError):  # what was not written stays so
                file.close()

    def _line(self, event: Event, actions: tuple[Action, ...]) -> dict[str, Any]:
        gone: list[str] = []
        same: list[str] = []
        if isinstance(event, Seen):
            last, self._view = self._view, event.view
            records, gone = changes(last.records, event.view.records)
            same = [name for name in SHARED if unchanged(getattr(last, name), getattr(event.view, name))]
            view = replace(event.view, records=None if event.view.records is None else records)
            left_out: dict[str, Any] = dict.fromkeys(same)
            event = replace(event, view=replace(view, **left_out))
        return {"event": encode(event), "gone": gone, "same": same, "actions": encode(actions)}

    def _begin(self, before: State) -> TextIO:
        """A new file. Only once its head is written does it take the place of the other, which is lost with a full disk."""
        self.close()
        head, new, old = (self._folder / f"trace-{name}.jsonl" for name in ("head", "new", "old"))
        self._folder.mkdir(parents=True, exist_ok=True)
        file = head.open("w", encoding="utf-8")
        try:
            self._size, self._view = 0, before.view
            self._put(file, {"v": FORMAT, "state": encode(before)})
            if new.exists():
                new.replace(old)
            head.replace(new)
        except OSError:
            with suppress(OSError):
                file.close()
            raise
        return file

    def _put(self, file: TextIO, line: Mapping[str, Any]) -> None:
        text = json.dumps(line, separators=(",", ":")) + "\n"
        self._size += len(text)
        file.write(text)
        file.flush()


def unchanged(old: object, new: object) -> bool:
    """Need a part of a view not be written again?"""
    return new is not None and (new is old or new == old)


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """One step of a trace, decided again; `same` says whether the decision was the one that was written."""

    event: Event
    decision: Decision
    written: tuple[Action, ...]

    @property
    def same(self) -> bool:
        """Is the decision the one that was made then?"""
        return self.decision.actions == self.written


def replay(path: Path) -> Iterator[Replayed]:
    """Decide every step of a trace file again. A line that a killed daemon wrote half ends it."""
    present: State | None = None
    seen = View()  # the last one: what the next does not say is as it was
    with open_regular_text(path) as lines:
        for number, text in enumerate(lines, 1):
            try:
                line = parsed(text)
            except ValueError:
                return
            try:
                if "state" in line:
                    if line.get("v") != FORMAT:
                        raise Unreadable(
                            f"{path}:{number}: trace format {line.get('v')!r}, this elasticrl reads {FORMAT}"
                        )
                    present = decode(line["state"])
                    seen = present.view
                    continue
                if present is None:
                    raise Unreadable(f"{path}:{number}: a trace begins with a state; is this a trace?")
                event, written = decode(line["event"]), decode(line["actions"])
                if isinstance(event, Seen):
                    seen = whole(seen, event.view, line)
                    event = replace(event, view=seen)
            except (TypeError, LookupError, AttributeError) as error:
                raise Unreadable(f"{path}:{number}: this is no line of a trace ({error!r}); is this a trace?") from None
            decision = step(present, event)
            yield Replayed(event=event, decision=decision, written=written)
            present = decision.state


def whole(last: View, view: View, line: Mapping[str, Any]) -> View:
    """A view as it was, from the last one and what its line says of the difference."""
    view = replace(view, **{name: getattr(last, name) for name in line["same"]})
    if view.records is None:
        return view
    records = {**(last.records or {}), **view.records}
    for node in line["gone"]:
        records.pop(node, None)
    return replace(view, records=records)
