"""Loading: a lane's samples, ready when they are asked for, by threads or processes.

The one idea: what will be asked for next is known, because the cursor is a function. So the loader works ahead, and after a
reform keeps what it has for the lanes that stayed and loads the rest; there is no position to restore, rewind or lose.
"""

import multiprocessing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import BrokenExecutor, Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal, Protocol, runtime_checkable

from elasticrl.runtime.data.cursor import Cursor, SampleId, Segment, Walk
from elasticrl.runtime.vault.errors import DataError


@runtime_checkable
class MapStyle(Protocol):
    """A dataset that can be asked for any sample. With `sample(id)` it is told the epoch too, for augmentation by seed."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


@dataclass(frozen=True, slots=True)
class Batch:
    """One lane's samples of one draw. `data` is what `collate` made of them."""

    ids: tuple[SampleId, ...]
    data: Any


Key = tuple[int, int, int]
"""Step, update, lane."""


class Loader:
    """Loads what a cursor names.

    `kind`: "thread" suits data in memory or on disk; "process" keeps heavy Python work out of the trainer (the dataset is sent
    to the workers once, so it must be picklable, and nothing is forked: the trainer has threads). A worker process that dies
    is replaced, and its samples are loaded again: they have names.
    """

    def __init__(
        self, dataset: Any, cursor: Cursor, *, collate: Callable[[list[Any]], Any] = list, workers: int = 2,
        kind: Literal["thread", "process"] = "thread", ahead: int = 2, timeout_s: float = 120.0,
    ) -> None:  # fmt: skip
        if not isinstance(dataset, MapStyle):
            raise DataError(
                f"{type(dataset).__name__} has no length or no items by number: for a stream use StreamLoader."
            )
        if len(dataset) != cursor.walk.size:
            raise DataError(
                f"The dataset has {len(dataset)} samples and the cursor counts {cursor.walk.size}: it is not the data that "
                f"{cursor.walk.name} was when the run was planned."
            )
        self._dataset = dataset
        self._cursor = cursor
        self._collate = collate
        self._workers = max(workers, 1)
        self._kind = kind
        self._ahead = ahead
        self._timeout_s = timeout_s
        self._ready: dict[Key, Future[list[Any]]] = {}
        self._pool = self._open()

    def fetch(self, step: int, lanes: Iterable[int], update: int = 0) -> dict[int, Batch]:
        """The samples of these lanes; DataError names those that could not be had. What comes next is begun meanwhile."""
        lanes = tuple(lanes)
        wanted = {lane: self._cursor.ids(step, update, lane) for lane in lanes}
        for lane in lanes:
            self._begin((step, update, lane))
        self._look_ahead(step, update, lanes)
        return {lane: Batch(ids, self._collate(self._take((step, update, lane), ids))) for lane, ids in wanted.items()}

    def close(self) -> None:
        """End the workers."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._ready.clear()

    # -- inside

    def _open(self) -> Executor:
        if self._kind == "thread":
            return ThreadPoolExecutor(self._workers, thread_name_prefix="data")
        context = multiprocessing.get_context("forkserver")
        return ProcessPoolExecutor(self._workers, mp_context=context, initializer=_adopt, initargs=(self._dataset,))

    def _begin(self, key: Key) -> None:
        if key in self._ready:
            return
        self._ready[key] = future = self._submit(key)
        if future.done() and isinstance(future.exception(), BrokenExecutor):  # a worker was killed since the last fetch
            self._begin_again(key)

    def _submit(self, key: Key) -> Future[list[Any]]:
        """A pool that is known to be broken takes nothing; whoever wants these samples hears of it as if it broke later."""
        ids = self._cursor.ids(*key)
        try:
            if self._kind == "thread":
                return self._pool.submit(_load, self._dataset, ids)
            return self._pool.submit(_load_adopted, ids)
        except BrokenExecutor as error:
            failed: Future[list[Any]] = Future()
            failed.set_exception(error)
            return failed

    def _begin_again(self, first: Key) -> None:
        """New workers, and all that is not taken yet loaded by them."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._pool = self._open()
        pending = [first, *(key for key in self._ready if key != first)]
        self._ready.clear()
        for key in pending:
            self._ready[key] = self._submit(key)

    def _look_ahead(self, step: int, update: int, lanes: Sequence[int]) -> None:
        """Begin the next draws, and forget what nobody will ask for any more."""
        walk = self._cursor.walk
        draw = self._cursor.draw(step, update)
        last = None if self._cursor.steps is None else self._cursor.steps * walk.draws
        coming = [
            (*divmod(number, walk.draws), lane)
            for number in range(draw + 1, draw + 1 + self._ahead)
            if last is None or number < last
            for lane in lanes
        ]
        useful = {*coming, *((step, update, lane) for lane in lanes)}
        for key in [key for key in self._ready if key not in useful]:
            self._ready.pop(key).cancel()
        for key in coming:
            self._begin(key)

    def _take(self, key: Key, ids: tuple[SampleId, ...]) -> list[Any]:
        for attempt in (1, 2):
            try:
                return self._ready.pop(key).result(self._timeout_s)
            except BrokenExecutor as error:
                # One sample that kills its worker would kill the next one too; a worker that the machine killed would not.
                if attempt == 2:
                    raise DataError(f"Loading {_name(key, ids)} killed its worker process twice: {error}") from error
                self._begin_again(key)
            except TimeoutError as error:
                raise DataError(
                    f"{_name(key, ids)} were not loaded within {self._timeout_s:g} s: the storage hangs, or it "
                    "takes longer: then give Loader(timeout_s=...) more."
                ) from error
        raise AssertionError(key)


def _name(key: Key, ids: Sequence[SampleId]) -> str:
    step, update, lane = key
    shown = ", ".join(map(str, ids[:4])) + (", ..." if len(ids) > 4 else "")
    return f"samples {shown} (lane {lane} of step {step}.{update})"


_adopted: list[Any] = []


def _adopt(dataset: Any) -> None:
    """In a worker process: the dataset it will load from."""
    _adopted[:] = [dataset]


def _load_adopted(ids: tuple[SampleId, ...]) -> list[Any]:
    return _load(_adopted[0], ids)


def _load(dataset: Any, ids: tuple[SampleId, ...]) -> list[Any]:
    one = getattr(dataset, "sample", None)
    found: list[Any] = []
    for sample in ids:
        try:
            found.append(one(sample) if one is not None else dataset[sample.index])
        except Exception as error:
            error.add_note(f"while loading sample {sample}")
            raise
    return found


class StreamLoader:
    """Samples of an iterable, in its own order: lane after lane takes its share of each draw.

    Every worker walks the whole stream and keeps what its lanes need, so that any worker can carry any lane. An epoch ends
    where the iterator does, and the batch goes on into the next one; what a sample is called (epoch and place) is known once
    it has come. Epoch lengths that were seen are state: register it as a part, and a resumed run only walks the present epoch
    to its place again.
    """

    def __init__(
        self, stream: Any, walk: Walk, *, collate: Callable[[list[Any]], Any] = list, timeout_s: float = 120.0
    ) -> None:
        if walk.size is not None or walk.shuffle or walk.edge != "straddle":
            raise DataError(
                "A stream is walked in its own order and its length is not known: Walk(size=None, shuffle=False)."
            )
        if walk.spans != 1 or walk.levels or walk.stages:
            raise DataError(
                "A stream has no levels, and each of its samples goes to one lane: leave spans, levels and stages of Walk(...) "
                "as they are, or use a Cursor, which needs to know the number of samples."
            )
        self._stream = stream
        self.walk = walk
        self._collate = collate
        self._timeout_s = timeout_s
        self._ends: list[int] = []  # how many samples each past epoch had
        self._at: tuple[int, int] = (0, 0)  # epoch and place of the next sample the iterator gives
        self._items: Iterator[Any] | None = None
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="stream")  # one reader: a stream has one position
        self._coming: tuple[tuple[int, int, tuple[int, ...]], Future[dict[int, Batch]]] | None = None

    @property
    def segments(self) -> tuple[Segment, ...]:
        """As a cursor's: a stream is one walk from its beginning."""
        return (Segment(first=0, epoch=0, offset=0, walk=self.walk),)

    def fetch(self, step: int, lanes: Iterable[int], update: int = 0) -> dict[int, Batch]:
        """The samples of these lanes. The next draw is read meanwhile."""
        lanes = tuple(lanes)
        key = (step, update, lanes)
        if self._coming is not None and self._coming[0] == key:
            future = self._coming[1]
        else:
            future = self._pool.submit(self._read, *key)
        try:
            found = future.result(self._timeout_s)
        except TimeoutError as error:
            raise DataError(
                f"The stream {self.walk.name} gave nothing for step {step} within {self._timeout_s:g} s."
            ) from error
        follow = divmod(step * self.walk.draws + update + 1, self.walk.draws)
        self._coming = ((*follow, lanes), self._pool.submit(self._read, *follow, lanes))
        return found

    def close(self) -> None:
        """End the reader."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def state_dict(self) -> dict[str, Any]:
        """The lengths of past epochs: with them any draw can be found again."""
        return {"ends": list(self._ends), "batch": self.walk.batch, "draws": self.walk.draws, "name": self.walk.name}

    def load_state_dict(self, state: Mapping[str, Any], /) -> None:
        """Go on with a stream of which so many epochs are known."""
        now = self.state_dict()
        for name in ("name", "batch", "draws"):
            if state[name] != now[name]:
                raise DataError(
                    f"The stream's {name} was {state[name]!r} and is {now[name]!r}: the place in it can't be found."
                )
        self._pool.submit(self._known, list(state["ends"])).result(self._timeout_s)

    # -- in the reader's thread

    def _known(self, ends: list[int]) -> None:
        self._ends = max(self._ends, ends, key=len)

    def _read(self, step: int, update: int, lanes: tuple[int, ...]) -> dict[int, Batch]:
        self._seek((step * self.walk.draws + update) * self.walk.batch)
        kept: dict[int, tuple[list[SampleId], list[Any]]] = {lane: ([], []) for lane in lanes}
        for number in range(self.walk.batch):
            sample, item = self._next()
            lane = number // self.walk.per_lane
            if lane in kept:
                kept[lane][0].append(sample)
                kept[lane][1].append(item)
        return {lane: Batch(tuple(ids), self._collate(items)) for lane, (ids, items) in kept.items()}

    def _seek(self, number: int) -> None:
        """Have the iterator give sample `number` of the whole row next."""
        here = sum(self._ends[: self._at[0]]) + self._at[1]
        if self._items is None or number < here:
            epoch, rest = 0, number
            while epoch < len(self._ends) and rest >= self._ends[epoch]:
                rest -= self._ends[epoch]
                epoch += 1
            self._open(epoch)
            here = number - rest
        for _ in range(number - here):
            self._next()

    def _open(self, epoch: int) -> None:
        if hasattr(self._stream, "set_epoch"):
            self._stream.set_epoch(epoch)
        self._items = iter(self._stream)
        self._at = (epoch, 0)

    def _next(self) -> tuple[SampleId, Any]:
        assert self._items is not None
        for item in islice(self._items, 1):
            epoch, place = self._at
            self._at = (epoch, place + 1)
            return SampleId(epoch, place), item
        epoch, place = self._at
        if place == 0:
            raise DataError(
                f"The stream {self.walk.name} had no sample at all in epoch {epoch}: there is nothing to train on."
            )
        if epoch == len(self._ends):
            self._ends.append(place)
        elif self._ends[epoch] != place:
            raise DataError(
                f"Epoch {epoch} of the stream {self.walk.name} had {self._ends[epoch]} samples before and {place} now: it is "
                "not the same data, so samples can't be accounted for."
            )
        self._open(epoch + 1)
        return self._next()
