"""Every event the core was given and what it decided, on disk, so that any decision can be made again: `elasticrl replay`.

The one idea: because `core.step` is pure, a state and the events after it are the whole story. A trace is two bounded files,
each beginning with the whole state, so that the older can be dropped. Of a `Seen` only the records that changed are
written. Values are tagged JSON; reading it makes nothing but the core's own frozen values.
"""

import dataclasses
import json
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any, Final

from elasticrl.core import events, evidence, model, pairs, policy, settings, state, suspect, verdict
from elasticrl.core.events import Action, Event, Seen
from elasticrl.core.model import View
from elasticrl.core.state import Decision, State
from elasticrl.core.step import step
from elasticrl.shell.keys import VERSION, Unreadable

TAG: Final = "~"


def _vocabulary() -> dict[str, type]:
    modules = (model, events, settings, state, suspect, evidence, pairs, policy, verdict)
    found = (value for module in modules for value in vars(module).values() if isinstance(value, type))
    return {cls.__module__.rpartition(".")[2] + "." + cls.__name__: cls for cls in found}


CLASSES: Final = _vocabulary()


def name_of(cls: type) -> str:
    """How a class is written in a trace."""
    return cls.__module__.rpartition(".")[2] + "." + cls.__name__


def encode(value: Any) -> Any:
    """A value of the core as plain JSON: tuples become lists, everything else but scalars an object with a tag."""
    if isinstance(value, Enum):
        return {TAG: name_of(type(value)), "is": value.value}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, tuple):
        return [encode(item) for item in value]
    if isinstance(value, frozenset):
        return {TAG: "set", "of": [encode(item) for item in sorted(value)]}
    if isinstance(value, Mapping):
        return {TAG: "map", "of": [[encode(key), encode(item)] for key, item in value.items()]}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: encode(getattr(value, field.name)) for field in dataclasses.fields(value)}
        return {TAG: name_of(type(value)), **fields}
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
    return cls(**{key: decode(item) for key, item in plain.items() if key != TAG})


def changes(old: Mapping[str, Hashable] | None, new: Mapping[str, Hashable] | None) -> tuple[dict[str, Any], list[str]]:
    """What to set and what to remove to get from one mapping to the other."""
    old, new = old or {}, new or {}
    return {key: item for key, item in new.items() if old.get(key) is not item and old.get(key) != item}, sorted(
        old.keys() - new.keys()
    )


class Trace:
    """Writes a trace into `<folder>/trace-old.jsonl` and `trace-new.jsonl`, never more than `limit` bytes in all."""

    def __init__(self, folder: Path, limit: int) -> None:
        self._folder = folder
        self._half = limit // 2
        self._size = 0
        self._view = View()
        folder.mkdir(parents=True, exist_ok=True)
        self._file = (folder / "trace-new.jsonl").open("a", encoding="utf-8")
        self._fresh = True

    def write(self, before: State, event: Event, actions: tuple[Action, ...]) -> None:
        """One step of the core: the state it started from is written only at the head of a file."""
        if self._fresh or self._size > self._half:
            self._begin(before)
        gone: list[str] = []
        if isinstance(event, Seen):
            records, gone = changes(self._view.records, event.view.records)
            self._view, whole = event.view, event.view
            event = replace(event, view=replace(whole, records=None if whole.records is None else records))
        self._put({"event": encode(event), "gone": gone, "actions": encode(actions)})

    def close(self) -> None:
        """Leave the files as they are."""
        self._file.close()

    def _begin(self, before: State) -> None:
        if self._file.tell():
            self._file.close()
            new, old = self._folder / "trace-new.jsonl", self._folder / "trace-old.jsonl"
            new.replace(old)
            self._file = new.open("w", encoding="utf-8")
        self._fresh, self._size, self._view = False, 0, before.view
        self._put({"v": VERSION, "state": encode(before)})

    def _put(self, line: Mapping[str, Any]) -> None:
        text = json.dumps(line, separators=(",", ":")) + "\n"
        self._size += len(text)
        self._file.write(text)
        self._file.flush()


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
    with path.open(encoding="utf-8") as lines:
        for number, text in enumerate(lines, 1):
            try:
                line = json.loads(text)
            except ValueError:
                return
            if "state" in line:
                if line.get("v") != VERSION:
                    raise Unreadable(f"{path}:{number}: trace format {line.get('v')!r}, this elasticrl reads {VERSION}")
                present = decode(line["state"])
                continue
            if present is None:
                raise Unreadable(f"{path}:{number}: a trace begins with a state; is this a trace?")
            event = decode(line["event"])
            if isinstance(event, Seen) and event.view.records is not None:
                records = {**(present.view.records or {}), **event.view.records}
                for node in line["gone"]:
                    records.pop(node, None)
                event = replace(event, view=replace(event.view, records=records))
            decision = step(present, event)
            yield Replayed(event=event, decision=decision, written=decode(line["actions"]))
            present = decision.state
