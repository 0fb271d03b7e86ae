"""Which rows a lane puts into which update, and in blocks of which shape they go through a model.

The idea: a lane cuts its own samples, with an order drawn from a stream of its own. No order and no shape depends on the number
of workers, since no lane needs to know of the others. So the rows of an update may go through a model by their real lengths,
long ones with long ones: whoever carries the lane puts the same rows into the same passes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from elasticrl.ppo.sizes import Sizes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from elasticrl.runtime.rng import Streams

Rows = dict[str, torch.Tensor]  # tensors with the same first dimension: one entry per sample


def updates(rows: int, size: int, count: int, epochs: int, streams: Streams, *, unit: int = 1) -> list[torch.Tensor]:
    """The rows of each update of a step, for one lane: `count` updates of `size` rows in each epoch, which has each row once.

    `streams` are those of (seed, step, lane). `unit` neighbouring rows stay together. A lane with fewer rows than others makes
    as many updates, of which the last are short, or empty.
    """
    assert size % unit == 0, f"{size} rows of an update are not whole units of {unit}"
    assert rows % unit == 0, f"{rows} rows are not whole units of {unit}"
    assert rows <= size * count, f"{rows} rows do not fit into {count} updates of {size}"
    found: list[torch.Tensor] = []
    for epoch in range(epochs):
        units = torch.randperm(rows // unit, generator=streams.torch(f"mini-batches of epoch {epoch}"))
        order = (units[:, None] * unit + torch.arange(unit)).reshape(-1)
        found += [order[i * size : (i + 1) * size] for i in range(count)]
    return found


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """The samples of one pass, and what they are cut to. Without samples it is a pass of nothing, of one row. `unit` neighbours
    share a prompt, and are one row.

    Example: Block(index=tensor([4, 0, 7]), width=112, answer=48)
    """

    index: torch.Tensor
    width: int
    answer: int
    unit: int = 1
    tokens: int = 0  # that are no padding

    @property
    def places(self) -> int:
        """Tokens that are computed."""
        return max(len(self.index) // self.unit, 1) * self.width


def lengths(rows: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """(tokens, those of the answer) of each sample, without padding."""
    attention, answer = rows["attention"], rows["mask"].shape[1]
    return attention.sum(1), attention[:, attention.shape[1] - answer :].sum(1)


def blocks(index: torch.Tensor, rows: Mapping[str, torch.Tensor], sizes: Sizes) -> list[Block]:
    """The rows of `index` in passes, the longest first, each as wide as its longest row. One without rows where there are none,
    so that an empty lane has a loss like the others.
    """
    if not len(index):
        return [nothing(sizes)]
    total, answer = lengths(rows)
    units = index.view(-1, sizes.unit)
    longest = (total - answer)[units[:, 0]] + answer[units].sum(1) if sizes.share else total[units].amax(1)
    order = longest.argsort(descending=True, stable=True)
    widths, found = [sizes.width(length) for length in longest[order].tolist()], []
    for start, stop in runs(widths, sizes):
        mine = units[order[start:stop]].reshape(-1)
        of_answers = sizes.cut(max(int(answer[mine].max()), 1), sizes.answer)
        tokens = int((longest[order[start:stop]] if sizes.share else total[mine]).sum())
        found.append(Block(mine, widths[start], of_answers, sizes.unit if sizes.share else 1, tokens))
    return found


def runs(widths: Sequence[int], sizes: Sizes) -> list[tuple[int, int]]:
    """Where to cut units of falling widths into passes: so that these compute least, with what each pass costs by itself.

    >>> runs([700, 208, 160, 112], Sizes(tokens=4096, sample=768, answer=256))
    [(0, 1), (1, 4)]
    """
    costs, most = sizes.pass_costs, sizes.parts(len(widths) * sizes.unit)
    while len(found := _runs(widths, sizes, costs)) > most:
        costs = 2 * costs + 1
    return found


def _runs(widths: Sequence[int], sizes: Sizes, costs: int) -> list[tuple[int, int]]:
    """By the cheapest way to each place."""
    cheapest, come_from = [0], [0]
    for stop in range(1, len(widths) + 1):
        ways = []
        for start in reversed(range(stop)):
            if (stop - start) * sizes.unit > sizes.rows(widths[start]):
                break  # and a longer one is wider
            ways.append((cheapest[start] + (stop - start) * sizes.places(widths[start]) + costs, start))
        least, start = min(ways)
        cheapest.append(least)
        come_from.append(start)
    found, stop = [], len(widths)
    while stop:
        found.append((come_from[stop], stop))
        stop = come_from[stop]
    return found[::-1]


def nothing(sizes: Sizes) -> Block:
    """A pass of one row of padding, for who joins in a collective."""
    return Block(torch.empty(0, dtype=torch.long), sizes.width(1), sizes.cut(1, sizes.answer))


def take(rows: Mapping[str, torch.Tensor], block: Block) -> Rows:
    """The block's rows, prompt and answer without a gap, padded on the right alone: nothing real ever attends to padding, so
    no mask needs to say so. `start` is where each answer begins; what there is for each of its tokens is cut to `answer`.
    """
    if block.unit > 1:
        return _shared(rows, block)
    width, whole = block.width, rows["mask"].shape[1]
    if len(block.index):
        found = {name: value[block.index] for name, value in rows.items()}
    else:
        found = {name: value.new_zeros(1, *value.shape[1:]) for name, value in rows.items()}
        found["attention"] = ~found["attention"]
    tokens, attention = found.pop("tokens"), found.pop("attention")
    real_first = (~attention).to(torch.int8).argsort(dim=1, stable=True)[:, :width]
    found = {name: value[:, : block.answer] if value.dim() > 1 else value for name, value in found.items()}
    return found | {
        "tokens": tokens.gather(1, real_first),
        "attention": attention.gather(1, real_first),
        "start": attention[:, : attention.shape[1] - whole].sum(1).clamp(max=width),
    }


def _shared(rows: Mapping[str, torch.Tensor], block: Block) -> Rows:
    """The same where `block.unit` neighbours are one row: their prompt, then their answers one behind the other. `seen` says
    what a token attends to: the prompt, and its own answer up to itself. `position` counts as if each answer stood alone.
    `before` is where each token of an answer is drawn from, in the row `of` its sample; `response` are the answers' tokens.
    """
    width, whole, unit = block.width, rows["mask"].shape[1], block.unit
    found = {name: value[block.index] for name, value in rows.items()}
    tokens, attention = found.pop("tokens"), found.pop("attention")
    found = {name: value[:, : block.answer] if value.dim() > 1 else value for name, value in found.items()}
    answers = attention[:, attention.shape[1] - whole :].sum(1)
    prompts = attention.sum(1) - answers
    count = len(block.index) // unit
    packed = tokens.new_zeros(count, width)
    position, owner = packed.clone(), torch.full_like(packed, -1)
    before = tokens.new_zeros(len(block.index), block.answer)
    for row in range(count):
        first = row * unit
        at = head = int(prompts[first])
        packed[row, :head] = tokens[first][: tokens.shape[1] - whole][attention[first][: tokens.shape[1] - whole]]
        position[row, :head], owner[row, :head] = torch.arange(head), 0
        for i in range(first, first + unit):
            size = int(answers[i])
            end = at + size
            packed[row, at:end] = tokens[i, tokens.shape[1] - whole :][:size]
            position[row, at:end], owner[row, at:end] = torch.arange(head, head + size), 1 + i - first
            before[i] = (torch.arange(block.answer) + at - 1).clamp(max=width - 1)
            before[i, 0] = head - 1
            at = end
    places = torch.arange(width)
    mine = (owner[:, None] == 0) | (owner[:, None] == owner[:, :, None])  # [rows, from, to]
    return found | {
        "tokens": packed,
        "position": position,
        "seen": (mine & (places <= places[:, None]))[:, None],
        "before": before,
        "of": torch.arange(len(block.index)) // unit,
        "response": tokens[:, tokens.shape[1] - whole :][:, : block.answer],
    }
