"""Which samples each step must have used: what the cursor deals, computed again for ten thousand steps in seconds.

The one idea: the description of the data says everything. This is `audit`'s expectation, with numpy where it is there: the same
permutation, over many samples at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from elasticrl.runtime.data.cursor import Segment, order_key, permuted

if TYPE_CHECKING:
    import numpy as np

    Numbers = np.ndarray[Any, np.dtype[np.int64]]

SAMPLES = 1 << 16  # that are computed at once
Sample = tuple[int, int]
"""Epoch and index."""


def dealt(
    segments: Sequence[Segment], steps: range, ends: Mapping[int, int]
) -> Iterator[tuple[int, list[Sample], int]]:
    """Of each step: its samples, and how often it uses each. `ends`: of a stream's epochs, the last sample that was seen."""
    if segments[-1].walk.size is None:
        yield from _streamed(segments[0], steps, ends)
        return
    at = steps.start
    while at < steps.stop:
        segment = next((s for s in reversed(segments) if s.first <= at * s.walk.draws), segments[0])
        size = segment.walk.batch * segment.walk.draws
        later = [-(-s.first // s.walk.draws) for s in segments if -(-s.first // s.walk.draws) > at]
        end = min([steps.stop, at + max(SAMPLES // size, 1), *later])
        start = (at * segment.walk.draws - segment.first) * segment.walk.batch
        samples = _samples(segment, range(start, start + (end - at) * size))
        for step in range(at, end):
            yield step, samples[(step - at) * size :][:size], segment.walk.turns
        at = end


def first_of(segments: Sequence[Segment]) -> int:
    """The first step that takes samples."""
    return segments[0].first // segments[0].walk.draws


def _streamed(segment: Segment, steps: range, ends: Mapping[int, int]) -> Iterator[tuple[int, list[Sample], int]]:
    walk = segment.walk
    size = walk.batch * walk.draws
    row = ((epoch, index) for epoch in sorted(ends) for index in range(ends[epoch] + 1))
    for step in steps:
        yield step, [sample for sample, _ in zip(row, range(size), strict=False)], walk.turns


def _samples(segment: Segment, numbers: range) -> list[Sample]:
    try:
        import numpy as np
    except ModuleNotFoundError:  # slower by twenty times
        return [(sample.epoch, sample.index) for sample in map(segment.sample, numbers)]
    walk = segment.walk
    row = np.arange(numbers.start, numbers.stop, dtype=np.int64)
    if walk.levels:
        return _levelled(segment, row)
    assert walk.size is not None
    row += segment.offset
    epochs, found = _ordered(segment, row // walk.usable, row % walk.usable, walk.size)
    return list(zip(epochs.tolist(), found.tolist(), strict=True))


def _levelled(segment: Segment, row: Numbers) -> list[Sample]:
    """`Segment.sample` of many, with levels."""
    import numpy as np

    its, walk = segment.stretches, segment.walk
    levels, counts, indices = np.empty_like(row), np.empty_like(row), np.empty_like(row)
    for stretch, end in zip(its, [*(later.start for later in its[1:]), row[-1] + 1], strict=True):
        mine = (row >= stretch.start) & (row < end)
        rounds, rest = np.divmod(row[mine] - stretch.began, len(stretch.pattern))
        levels[mine] = level = np.array(stretch.pattern)[rest]
        counts[mine] = (
            np.array(stretch.before)[level] + rounds * np.array(stretch.shares)[level] + np.array(stretch.nth)[rest]
        )
    epochs = counts
    for number, size in enumerate(walk.levels):
        mine = levels == number
        epochs[mine], found = _ordered(segment, counts[mine] // size, counts[mine] % size, size, "level", number)
        indices[mine] = found + sum(walk.levels[:number])
    return list(zip(epochs.tolist(), indices.tolist(), strict=True))


def _ordered(segment: Segment, epochs: Numbers, places: Numbers, size: int, *names: object) -> tuple[Numbers, Numbers]:
    """Epochs of the job, and the indices in them, of places in epochs of a segment."""
    import numpy as np

    found, epochs, walk = places.copy(), epochs + segment.epoch, segment.walk
    for epoch in np.unique(epochs).tolist() if walk.shuffle else ():
        mine = epochs == epoch
        found[mine] = _permuted(places[mine], size, order_key(walk.seed, epoch, *names))
    return epochs, found


def _permuted(places: Numbers, size: int, key: tuple[int, ...]) -> Any:
    """`cursor.permuted` of many."""
    import numpy as np

    if size >= 1 << 62:
        return [permuted(place, size, key) for place in places.tolist()]
    half = max(((size - 1).bit_length() + 1) // 2, 1)
    mask, shift = np.uint64((1 << half) - 1), np.uint64(half)
    index = places.astype(np.uint64)
    todo = np.arange(len(index))
    while len(todo):
        left, right = index[todo] >> shift, index[todo] & mask
        for word in key:
            left, right = right, left ^ (_mix(right ^ np.uint64(word)) & mask)
        index[todo] = (left << shift) | right
        todo = todo[index[todo] >= np.uint64(size)]
    return index.astype(np.int64)


def _mix(word: Any) -> Any:
    """`cursor._mix`: numpy's 64-bit numbers overflow as that one masks."""
    import numpy as np

    word = (word ^ (word >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    word = (word ^ (word >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return word ^ (word >> np.uint64(31))
