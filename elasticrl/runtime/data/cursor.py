"""The cursor: which samples each lane of each step gets, as a pure function. Imports nothing but the standard library.

The one idea: all epochs, each in its own order, are one endless row of samples. Draw number d takes the next `lanes x per_lane`
of them, wherever the epoch edges fall. What has to be kept is only where the row was joined on if the batch or the data ever
changed (`Segment`). With a curriculum there is such a row for each level of the data, and `levels` says whose turn it is.

The order of an epoch is a keyed permutation that is computed index by index (a Feistel network), so a billion samples cost no
memory, and no library's generator can change it under us from one version to the next.
"""

import hashlib
import json
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from typing import Any, Literal

from elasticrl.runtime.data.levels import MOST, Stage, Stretch, counts, drawn, fault, stretches, turned
from elasticrl.runtime.vault.errors import CheckpointRefused, DataError

_MASK = (1 << 64) - 1
ROUNDS = 6
LARGEST = 1 << 24  # samples of a step, all turns together
LATER: Mapping[str, Any] = {"spans": 1, "levels": (), "stages": ()}  # of a walk: not written where it has none of them


@dataclass(frozen=True, slots=True, order=True)
class SampleId:
    """Sample `index` of the data, as it comes in `epoch`. Example: SampleId(2, 517), written 2:517."""

    epoch: int
    index: int

    def __str__(self) -> str:
        return f"{self.epoch}:{self.index}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Walk:
    """How a job goes through its data.

    Example: Walk(name="prompts.jsonl", content="9f86d081884c7d65", size=10_000, lanes=8, per_lane=16, seed=7)
    """

    name: str = "data"
    content: str = ""  # what tells this data from other data of that name: a digest, a version
    size: int | None = None  # samples of an epoch; None: a stream, whose end is seen when it comes
    lanes: int = 1
    per_lane: int = 1
    spans: int = 1  # neighbouring lanes that have the same samples, as those that a prompt's answers are dealt to
    draws: int = 1  # updates of a step that take new samples; PPO takes them once, for the rollout
    turns: int = 1  # how often a step goes over its samples (PPO's epochs); for the audit
    seed: int = 0
    shuffle: bool = True
    edge: Literal["straddle", "drop"] = (
        "straddle"  # at an epoch's end: batches go on into the next one, or the rest is left out
    )
    epochs: int | None = None  # None: as long as the job runs
    levels: tuple[
        int, ...
    ] = ()  # samples of each level, which follow each other in the data; none: there are no levels
    stages: tuple[Stage, ...] = ()  # and how they are mixed, from which step on

    @property
    def batch(self) -> int:
        """Samples of one draw, all lanes together."""
        return self.lanes // self.spans * self.per_lane

    @property
    def usable(self) -> int:
        """Samples of an epoch that are used."""
        assert self.size is not None, "a stream's size is not known"
        return self.size if self.edge == "straddle" else self.size // self.batch * self.batch


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """From draw `first` on, `walk` holds, beginning at sample number `offset` of `epoch`."""

    first: int
    epoch: int
    offset: int
    walk: Walk
    used: tuple[int, ...] = ()  # with levels: how many samples of each were used before
    turned: int = 0  # with levels: how many of these are from the pattern that it goes on with

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        row = {"first": self.first, "epoch": self.epoch, "offset": self.offset, "walk": _plain(self.walk)}
        return row | ({"used": list(self.used), "turned": self.turned} if self.walk.levels else {})

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> "Segment":
        """The reverse of `to_json`."""
        said = dict(row["walk"])
        said["levels"] = tuple(said.get("levels", ()))
        said["stages"] = tuple(tuple(stage) for stage in said.get("stages", ()))
        walk = Walk(**said)
        used_of, turned_of = tuple(row.get("used", ())), row.get("turned", 0)
        numbers = [walk.lanes, walk.per_lane, walk.spans, walk.draws, walk.turns]
        numbers += [walk.size] if walk.size is not None else []
        whole = all(type(number) is int for number in numbers) and walk.spans > 0
        used = walk.batch * walk.draws * walk.turns if whole else 0
        if min(numbers) < 1 or not 1 <= used <= LARGEST or (walk.size is not None and walk.usable < 1):
            raise ValueError(f"no cursor walks so: {walk}")
        if (walk.levels or walk.stages) and (why := fault(walk.levels, walk.stages, walk.size)):
            raise ValueError(f"no cursor walks so: {why}")
        if len(used_of) != len(walk.levels) or any(type(count) is not int or count < 0 for count in used_of):
            raise ValueError(f"no cursor was there: {used_of} of the levels {walk.levels}")
        if type(turned_of) is not int or not 0 <= turned_of < (MOST if walk.levels else 1):
            raise ValueError(f"no cursor was there: {turned_of} samples into a pattern")
        found = cls(
            first=int(row["first"]), epoch=int(row["epoch"]), offset=int(row["offset"]), walk=walk, used=used_of,
            turned=turned_of,
        )  # fmt: skip
        if walk.levels and min(found.stretches[0].before) < 0:
            raise ValueError(f"no cursor was there: {turned_of} samples into a pattern, of {used_of}")
        return found

    def sample(self, number: int) -> SampleId:
        """The sample at `number` places after the segment's beginning."""
        walk = self.walk
        if walk.levels:
            return self._of_level(*drawn(self.stretches, number))
        epochs, place = divmod(self.offset + number, walk.usable)
        epoch = self.epoch + epochs
        assert walk.size is not None
        return SampleId(epoch, permuted(place, walk.size, order_key(walk.seed, epoch)) if walk.shuffle else place)

    def _of_level(self, level: int, number: int) -> SampleId:
        """The sample at `number` places from the beginning of a level, whose epochs are its own."""
        walk, size = self.walk, self.walk.levels[level]
        epochs, place = divmod(number, size)
        epoch = self.epoch + epochs
        if walk.shuffle:
            place = permuted(place, size, order_key(walk.seed, epoch, "level", level))
        return SampleId(epoch, sum(walk.levels[:level]) + place)

    @property
    def stretches(self) -> tuple[Stretch, ...]:
        """Where the mix of levels changes."""
        walk = self.walk
        return stretches(
            walk.stages, self.used, first=self.first * walk.batch, step=walk.batch * walk.draws, turned=self.turned
        )  # fmt: skip

    def after(self, draw: int) -> tuple[int, int, tuple[int, ...]]:
        """(epoch, offset in it, samples of each level) where a draw begins. With levels the epoch is that of none of them: it
        is what all of theirs are counted from.
        """
        number = (draw - self.first) * self.walk.batch
        if self.walk.levels:
            return self.epoch, 0, counts(self.stretches, number)
        epochs, offset = divmod(self.offset + number, self.walk.usable)
        return self.epoch + epochs, offset, ()

    @property
    def steps(self) -> int | None:
        """How many whole steps the walk has from here to its last epoch's end; None: no end."""
        if self.walk.epochs is None or self.walk.size is None:
            return None
        left = (self.walk.epochs - self.epoch) * self.walk.usable - self.offset
        return max(left, 0) // self.walk.batch // self.walk.draws


class Cursor:
    """The samples of every (step, update, lane) of a job with map-style data. Steps count from 0.

    Register it as a part of the run's state: what it keeps is small, and is what a resumed run is checked against.
    """

    def __init__(self, walk: Walk, *, allow: Collection[str] = (), group: int = 1, trained: int | None = None) -> None:
        if walk.size is None:
            raise DataError("A Cursor needs to know the number of samples; for a stream use StreamLoader.")
        _check(walk)
        self.walk = walk
        self.group = group  # how many samples are made of each of the walk's, as of a prompt
        self.trained = trained  # how many of a step's samples are trained on, where it is not all of them
        self.allow = frozenset(allow)  # what may differ from the run that is gone on from
        start = Segment(first=0, epoch=0, offset=0, walk=walk, used=(0,) * len(walk.levels))
        self._segments: tuple[Segment, ...] = (start,)
        self._next = 0  # the draw after the newest one that was asked to be kept

    @property
    def segments(self) -> tuple[Segment, ...]:
        """Where the row was joined on, oldest first."""
        return self._segments

    @property
    def steps(self) -> int | None:
        """The number of steps until the data ends; None: it doesn't. A job that stops before is not finished."""
        last = self._segments[-1]
        return None if last.steps is None else last.first // last.walk.draws + last.steps

    @property
    def batch(self) -> int:
        """Samples of a whole step."""
        return self.walk.batch * self.walk.draws

    def describe(self) -> str:
        """For a checkpoint's facts: what must not change without being told."""
        walk = self.walk
        return f"{walk.name}:{walk.content}:{walk.size}:seed={walk.seed}:shuffle={walk.shuffle}:{walk.edge}"

    def recipe(self) -> str:
        """Stands for what steps are made of, as it is set: the walk and the group, without what may change at any time."""
        said = _plain(replace(self.walk, turns=1, epochs=None)) | {"group": self.group} | self._part
        return _digest(json.dumps(said, sort_keys=True))

    def made_of(self, step: int) -> str:
        """Stands for the samples of all lanes in a step. None of them is read."""
        draws, lanes = range(self.walk.draws), range(self.walk.lanes)
        ids = [str(sample) for update in draws for lane in lanes for sample in self.ids(step, update, lane)]
        return _digest(" ".join([self.recipe(), *ids]))

    def ids(self, step: int, update: int, lane: int) -> tuple[SampleId, ...]:
        """The samples of one lane. DataError beyond the last epoch: an exhausted run must not look like a finished one."""
        draw = self.draw(step, update)
        segment = next(s for s in reversed(self._segments) if s.first <= draw)
        walk = segment.walk
        if not 0 <= lane < walk.lanes:
            raise DataError(f"There is no lane {lane}: the data is cut into {walk.lanes} lanes.")
        start = (draw - segment.first) * walk.batch + lane // walk.spans * walk.per_lane
        if segment.steps is not None and draw - segment.first >= segment.steps * walk.draws:
            raise DataError(
                f"Step {step} needs samples beyond the last of {walk.epochs} epochs of {walk.name}: there are {self.steps} "
                "steps in all. Raise epochs in Walk(...), or end the job at that step (job.steps)."
            )
        return tuple(segment.sample(start + i) for i in range(walk.per_lane))

    def draw(self, step: int, update: int) -> int:
        """The number of a draw in the job."""
        if not 0 <= update < self.walk.draws or step < 0:
            raise DataError(
                f"Step {step}, update {update} takes no samples: Walk(draws={self.walk.draws}) says how many a step has."
            )
        return step * self.walk.draws + update

    def advance(self, step: int, update: int = 0) -> None:
        """The samples of this draw have been used: a run that is resumed with another batch goes on after them."""
        self._next = max(self._next, self.draw(step, update) + 1)

    # -- state

    def state_dict(self) -> dict[str, Any]:
        """Where the row was joined on, and how far it was used."""
        segments = [segment.to_json() for segment in self._segments]
        return {"next": self._next, "segments": segments, "group": self.group, **self._part}

    @property
    def _part(self) -> dict[str, int]:
        """Not written where all samples are trained on, as in states of before."""
        return {} if self.trained is None else {"trained": self.trained}

    def load_state_dict(self, state: Mapping[str, Any], /) -> None:
        """Go on where it was. Another batch, lane count or data than it was is refused unless it was allowed by name."""
        segments = tuple(Segment.from_json(row) for row in state["segments"])
        group = int(state.get("group", self.group))  # states of before had none
        if group != self.group and "batch" not in self.allow:
            raise CheckpointRefused(
                f"The walk's batch changed (group was {group} and is {self.group}): each of its prompts would be answered "
                "another number of times than the learning rate was chosen for. Set it back, or continue with --allow batch "
                "(checkpoint.allow)."
            )
        trained = state.get("trained", self.trained)
        if None not in (trained, self.trained) and trained != self.trained and "batch" not in self.allow:
            raise CheckpointRefused(
                f"The walk's batch changed ({trained} of each step's samples were trained on and {self.trained} are): the "
                "learning rate was chosen for the other number. Set it back (ppo.batch), or continue with --allow batch "
                "(checkpoint.allow)."
            )
        self._next = int(state["next"])
        self._segments = join_on(segments, self.walk, self._next, self.allow)


def join_on(segments: tuple[Segment, ...], walk: Walk, draw: int, allow: Collection[str]) -> tuple[Segment, ...]:
    """The segments if `walk` holds from `draw` on. CheckpointRefused if it differs in a way that is not allowed.

    With the same data, not a sample is repeated or left out at the joint. Other data begin at their own beginning, in the
    next epoch. How often each sample is used (`turns`) changes from the next whole step on: what was used stays as it was.
    """
    last = segments[-1]
    free = replace(walk, epochs=last.walk.epochs, turns=last.walk.turns)  # these two may change at any time
    if free == last.walk and walk.turns == last.walk.turns:
        return (*segments[:-1], replace(last, walk=walk))
    # In as many lanes another layout is another batch; with other lanes it is what was asked for.
    shape = ("batch", "draws", *(("spans", "per_lane") if walk.lanes == last.walk.lanes else ()))
    changed: dict[str, tuple[dict[str, object], dict[str, object]]] = {
        "lanes": ({"lanes": last.walk.lanes}, {"lanes": walk.lanes}),
        "batch": ({part: getattr(last.walk, part) for part in shape}, {part: getattr(walk, part) for part in shape}),
        "data": (_data(last.walk) | {"stages": last.walk.stages}, _data(walk) | {"stages": walk.stages}),
    }
    for name, (old, new) in changed.items():
        if old != new and name not in allow:
            parts = ", ".join(f"{part} was {old[part]} and is {new[part]}" for part in old if old[part] != new[part])
            raise CheckpointRefused(
                f"The walk's {name} changed ({parts}): from step {draw // last.walk.draws} on other samples "
                f"would be used than planned. Set it back, or continue with --allow {name} (checkpoint.allow)."
            )
    if free == last.walk:
        draw = -(-draw // walk.draws) * walk.draws
    epoch, offset, used = last.after(draw)
    alike = walk.levels and (_data(walk), walk.stages, walk.draws) == (
        _data(last.walk),
        last.walk.stages,
        last.walk.draws,
    )
    within = turned(last.stretches, (draw - last.first) * last.walk.batch) if alike else 0
    if _data(last.walk) != _data(walk):
        most = max((its // size for its, size in zip(used, last.walk.levels, strict=True)), default=0)
        epoch, offset, used = (epoch + most + 1 if offset or used else epoch), 0, (0,) * len(walk.levels)
    offset = min(offset, walk.usable)
    # Draws are numbered by steps: a new number of draws a step begins at a whole step of its own.
    first = -(-draw // last.walk.draws) * walk.draws if last.walk.draws != walk.draws else draw
    return (*segments, Segment(first=first, epoch=epoch, offset=offset, walk=walk, used=used, turned=within))


def _plain(walk: Walk) -> dict[str, Any]:
    return {name: value for name, value in asdict(walk).items() if name not in LATER or value != LATER[name]}


def _digest(words: str) -> str:
    return hashlib.blake2b(words.encode(), digest_size=8).hexdigest()


def _data(walk: Walk) -> dict[str, object]:
    return {name: getattr(walk, name) for name in ("name", "content", "size", "seed", "shuffle", "edge", "levels")}


def _check(walk: Walk) -> None:
    for name in ("lanes", "per_lane", "spans", "draws", "turns"):
        if getattr(walk, name) < 1:
            raise DataError(f"Walk({name}={getattr(walk, name)}) is refused: it must be at least 1.")
    if walk.lanes % walk.spans:
        raise DataError(f"Walk(spans={walk.spans}) is refused: it must divide the {walk.lanes} lanes.")
    if walk.levels or walk.stages:
        why = fault(walk.levels, walk.stages, walk.size)
        if walk.edge != "straddle" or walk.epochs is not None:
            why = 'with levels an epoch has no edge: leave edge="straddle" and epochs=None'
        if why:
            raise DataError(f"Walk(levels=..., stages=...) is refused: {why}.")
    if walk.size is None:
        return
    if walk.size < 1:
        raise DataError(f"{walk.name} has no samples.")
    if walk.edge == "drop" and walk.size < walk.batch:
        raise DataError(
            f'{walk.name} has {walk.size} samples, which is less than one batch of {walk.batch}: with edge="drop" every epoch '
            'would be empty. Use edge="straddle", or a smaller batch.'
        )
    if walk.epochs is not None and walk.epochs * walk.usable < walk.batch * walk.draws:
        raise DataError(
            f"{walk.epochs} epochs of {walk.usable} samples do not fill one step of {walk.batch * walk.draws}: the job would "
            "end without a step and look finished. Raise epochs in Walk(...), or use a smaller batch."
        )


@lru_cache(maxsize=4096)
def order_key(*names: object) -> tuple[int, ...]:
    """The round keys of the permutation with these names."""
    digest = hashlib.blake2b("|".join(map(str, names)).encode(), digest_size=8 * ROUNDS).digest()
    return tuple(int.from_bytes(digest[8 * i : 8 * i + 8], "little") for i in range(ROUNDS))


def permuted(index: int, size: int, key: tuple[int, ...]) -> int:
    """Where a keyed permutation of `size` things puts `index`.

    >>> sorted(permuted(i, 5, order_key(1, 2)) for i in range(5))
    [0, 1, 2, 3, 4]
    """
    half = max(((size - 1).bit_length() + 1) // 2, 1)
    mask = (1 << half) - 1
    while True:  # walk the cycle until it is back inside: fewer than four rounds on average
        left, right = index >> half, index & mask
        for word in key:
            left, right = right, left ^ (_mix(right ^ word) & mask)
        index = left << half | right
        if index < size:
            return index


def _mix(word: int) -> int:
    """A 64-bit finaliser (splitmix64's): every output bit depends on every input bit."""
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _MASK
    return word ^ (word >> 31)
