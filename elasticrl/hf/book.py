"""What a trainer notes beside its loss: metrics, and how many tokens it has seen. Of each lane by itself, then of all.

The one idea: a trainer's notes are lists and counters that it only adds to. They are emptied before a lane and read after it,
so each note has a lane; and whoever carries which lane, all ranks put them together in the order of lanes.

Missing hook: a public name for TRL's `_metrics` and `_total_train_tokens`. In TRL's `_BaseTrainer` the line would be
`def metrics(self) -> dict[str, dict[str, list[float]]]`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import isnan
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from elasticrl.hf.elastic import Elastic

# A lane's words: its number, its metrics, and by how much each counter grew. Plain values, as they travel.
Words = list[Any]


class Book:
    """The notes of one step, from where it begins."""

    def __init__(self, trainer: Elastic) -> None:
        self._trainer = trainer
        self._before = self._counters
        self._held = {name: list(values) for name, values in self._metrics.items()}  # of steps that are not logged yet
        self._values: dict[int, dict[str, list[float]]] = {}
        self._counts: dict[int, list[float]] = {}

    @contextmanager
    def of(self, lane: int) -> Iterator[None]:
        """What is noted inside is this lane's. A lane may come several times."""
        self._metrics.clear()
        self._counters = self._before
        yield
        values = self._values.setdefault(lane, {})
        for name, noted in self._metrics.items():
            values.setdefault(name, []).extend(float(value) for value in noted if not isnan(value))
        grown = [after - before for after, before in zip(self._counters, self._before, strict=True)]
        counts = self._counts.get(lane, [0.0] * len(grown))
        self._counts[lane] = [one + more for one, more in zip(counts, grown, strict=True)]

    def words(self) -> list[Words]:
        """Of the lanes that are here."""
        return [[lane, self._values[lane], self._counts[lane]] for lane in sorted(self._values)]

    def close(self, told: Sequence[Sequence[Words]]) -> None:
        """All ranks' words: a metric is the mean over all lanes, a counter the sum."""
        lanes = sorted((words for rank in told for words in rank), key=lambda words: int(words[0]))
        self._counters = [
            before + sum(words[2][i] for words in lanes) for i, before in enumerate(self._before)
        ]  # fmt: skip
        self._metrics.clear()
        self._metrics.update(self._held)
        for name in sorted({name for words in lanes for name in words[1]}):
            found = [value for words in lanes for value in words[1].get(name, ())]
            if name == "num_tokens":  # a counter's present state, which TRL keeps among its metrics
                self._metrics[name] = [max(self._counters[:2])]
            elif found:
                self._metrics.setdefault(name, []).append(sum(found) / len(found))

    @property
    def _metrics(self) -> dict[str, list[float]]:
        """TRL's lists, by metric; transformers' own Trainer has none."""
        found: dict[str, list[float]] = getattr(self._trainer, "_metrics", {}).get("train", {})
        return found

    @property
    def _counters(self) -> list[float]:
        trainer = self._trainer
        return [getattr(trainer, "_total_train_tokens", 0), trainer.state.num_input_tokens_seen, trainer.current_flos]

    @_counters.setter
    def _counters(self, values: Sequence[float]) -> None:
        trainer = self._trainer
        trainer._total_train_tokens = int(values[0])  # noqa: SLF001 - TRL's, which has no public name
        trainer.state.num_input_tokens_seen = int(values[1])
        trainer.current_flos = values[2]
