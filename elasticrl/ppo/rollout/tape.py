"""A node's tape: replies of environments, written down as they come in, for the worker that takes a dead one's place.

The idea: what counts is the step's buffer in the vault, which is sealed before the next message goes out. The tape only saves
calls: it has the replies of a turn that was cut short. It lies beside the vault and so outlives a worker, not the node. A reply
is found by its sample, its turn and all that was said up to the message that it answers, so an old one can't be taken for
another.
"""

from __future__ import annotations

import json
import shutil
from contextlib import suppress
from dataclasses import asdict, dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, Any
from zlib import crc32

from elasticrl.base.parsed import parsed
from elasticrl.ppo.environments import Reply

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

STEPS = 2  # that are kept: a gang may go back into the step before the present one


@dataclass(frozen=True, slots=True, kw_only=True)
class Taped:
    """A reply, and what the environment saved of itself after it. Example: Taped(reply=Reply(observation="=42"), state=None)"""

    reply: Reply
    state: str | None = None


class Tape:
    """In `folder`, or in this process's memory alone where it is None."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._step = -1
        self._known: dict[tuple[int, str], Taped] = {}  # by lane and key
        self._read: set[int] = set()  # lanes whose files were read

    def begin(self, step: int) -> None:
        """Replies of this step come now, again perhaps."""
        if step != self._step:
            self._step, self._known, self._read = step, {}, set()
        if self._folder is not None:
            for old in self._folder.glob("*"):
                if not old.name.isdigit() or not step - STEPS < int(old.name) <= step:
                    shutil.rmtree(old, ignore_errors=True)

    def find(self, lane: int, key: str) -> Taped | None:
        """What was written down under this key."""
        if lane not in self._read:
            self._read.add(lane)
            self._load(lane)
        return self._known.get((lane, key))

    def add(self, lane: int, key: str, taped: Taped) -> None:
        """From now on it is known. A disk that is full costs no step: the vault decides."""
        self._known[lane, key] = taped
        if self._folder is None:
            return
        line = json.dumps({"key": key, **plain(taped)})
        with suppress(OSError):
            file = self._file(lane)
            file.parent.mkdir(parents=True, exist_ok=True)
            with file.open("a") as out:
                out.write(f"{crc32(line.encode()):08x} {line}\n")  # one write, so a torn line can only be the last

    def remove(self) -> None:
        """Nobody goes on here."""
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _load(self, lane: int) -> None:
        try:
            lines = self._file(lane).read_text().splitlines() if self._folder is not None else []
        except OSError:
            return
        for line in lines:
            found = _read(line)
            if found is not None:
                self._known.setdefault((lane, found[0]), found[1])

    def _file(self, lane: int) -> Path:
        assert self._folder is not None
        return self._folder / str(self._step) / str(lane)


def key_of(sample: str, turn: int, tokens: Sequence[int]) -> str:
    """Names a call. Example: "0:17 1 5f0c1a2b3c4d5e6f" of sample 0:17, its second turn, and all that was said up to there."""
    return f"{sample} {turn} {blake2b(repr(tuple(tokens)).encode(), digest_size=8).hexdigest()}"


def _read(line: str) -> tuple[str, Taped] | None:
    """What a line says; None if it was torn or is not ours."""
    sum_, _, text = line.partition(" ")
    if sum_ != f"{crc32(text.encode()):08x}":
        return None
    try:
        found: Any = parsed(text)
    except ValueError:  # larger or deeper than is read: it is asked again
        return None
    return found["key"], taped_of(found)


def plain(taped: Taped) -> dict[str, Any]:
    """As it is written, and as it travels."""
    found: dict[str, Any] = parsed(json.dumps(asdict(taped), default=str))
    return found


def taped_of(found: Mapping[str, Any]) -> Taped:
    """The reverse."""
    observation = found["reply"]["observation"]
    reply = Reply(
        **found["reply"] | {"observation": observation if isinstance(observation, str) else tuple(observation)}
    )
    return Taped(reply=reply, state=found["state"])
