"""Rollout engine `torch`: generation in the worker, with the weights it trains.

The idea: the requests of a *block*, which are a lane's, go through the model together, and what shapes they have follows from
these requests and their answers alone. So it does not matter who generates a block, or when: the bits are the same. Prompts go
through the model by their lengths, in a few passes; then each pass makes one token of each answer. Rows that have ended leave.
Requests of no block each have the shapes that are the same for all, of `rows` rows: what is missing is filled up with copies.
Noise is one uniform number per token from the request's own seed, turned into a token by the inverse of the cumulated
probabilities. Where a product's rows do not depend on each other, several blocks share a pass, and nobody sees it in the bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import pad

from elasticrl.ppo.losses import logprobs, tempered
from elasticrl.ppo.rollout import room
from elasticrl.ppo.rollout.engine import Request, Samples, Sampling, StaleWeights
from elasticrl.ppo.rollout.lean import Lean, Next
from elasticrl.ppo.rollout.products import quick, stand_alone
from elasticrl.ppo.sizes import width_of

if TYPE_CHECKING:
    from torch import nn

FINENESS = 2.0**40  # of a probability, when it becomes a whole number
MIN_ROWS = 8  # matrix products of fewer than about 5 rows take other kernels, which give other bits than a larger batch
PARTS = 4  # passes over a block's prompts at most
CROWD = 64  # rows that go on together, if bits let them
CROWDED = 0.75  # a block becomes smaller as soon as no more than this part of its rows goes on
Part = tuple[list[int], int]  # rows of a block, and how wide their prompts are


class TorchEngine:
    """Generates with `model`, a causal language model of transformers.

    With `lockstep` every call makes the same number of forward passes, whatever ends early: needed where a forward pass is a
    collective (FSDP, ZeRO), so that all ranks join in it. With `whole` only the first pass is one where FSDP has cut the model
    up: what it has put together stays so until the call is over. `check` is called for each token, and raises if somebody wants
    us elsewhere: survivors of a fault who finished their answers first would miss the time in which the gang forms anew.
    """

    by_lane = alike = True

    def __init__(
        self, model: nn.Module, sampling: Sampling, *, lockstep: bool = False, whole: bool = False,
        check: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        self.model, self.sampling, self.lockstep, self.whole = model, sampling, lockstep, whole
        self.check = check
        self.rows = max(sampling.rows, MIN_ROWS)
        self.version = 0
        self.fits = False
        self._lean: Lean | None = None

    def publish(self, version: int) -> None:
        """The weights are the trainer's own: there is nothing to move."""
        self.version = version

    @torch.no_grad()
    def generate(self, requests: Sequence[Request], *, version: int) -> Samples:
        """Block by block."""
        if version != self.version:
            raise StaleWeights(
                f"weights of version {version} were asked for, the engine has {self.version}; publish them first"
            )
        assert all(request.draw is None for request in requests), "this engine draws as its `sampling` says"
        self.model.eval()
        self.fits = room.fits(self.model)
        keep = self.whole or not self.lockstep  # else a pass puts together what would be packed, and lets go of it
        with _whole(self.model, self.whole) as stays, quick(self.model, keep=keep) as apart:
            self._lean = Lean.of(self.model) if self.fits else None
            every = self.lockstep and not stays
            # Without requests a block of padding goes through all the same: it may be a collective.
            blocks = list(together(requests, self.rows)) or [[]]
            asked = [[requests[at] for at in block] for block in blocks]
            groups = crowds([len(block) for block in blocks], CROWD if apart and self._lean else 1)
            try:
                parts = [part for group in groups for part in self._beside([asked[at] for at in group], every)]
            finally:
                self._lean = None  # it holds the weights
        back = torch.tensor([at for block in blocks for at in block], dtype=torch.long).argsort()
        tokens, attention, mask, scores, ended = (torch.cat(column)[back] for column in zip(*parts, strict=True))
        return Samples(
            ids=tuple(request.id for request in requests),
            tokens=tokens,
            attention=attention,
            mask=mask,
            logprobs=scores,
            ended=ended,
            version=version,
        )

    def crowds(self, sizes: Sequence[int]) -> list[list[int]]:
        """Which of so many blocks, of so many requests, are best asked for at once: those that will share passes."""
        model = self.model
        shares = not self.lockstep and room.fits(model) and stand_alone(model) and Lean.of(model) is not None
        return crowds(sizes, CROWD if shares else 1)

    def _beside(self, blocks: Sequence[Sequence[Request]], every: bool) -> list[tuple[torch.Tensor, ...]]:
        """What several blocks make whose tokens go through the model in one pass."""
        begun = [_Block(self, requests, every) for requests in blocks]
        going, logits = begun, [block.logits for block in begun]
        for t in range(self.sampling.max_tokens):
            if t:
                self.check()
                logits = self._next([block.next(t) for block in going], first=t == 1)
            going = [block for block, its in zip(going, logits, strict=True) if block.take(t, its)]
            if not going:
                break
        made = [block.made() for block in begun]
        self.check()  # of what an aborted collective let through nobody has seen anything yet
        return made

    def _next(self, blocks: Sequence[Next], *, first: bool) -> list[torch.Tensor]:
        """[rows, vocabulary] after each block's tokens. The `first` time the model's own passes judge the lean one."""
        if self._lean and not first:
            return self._lean(blocks)
        found = self._lean(blocks) if self._lean else None
        if found is not None:
            for block in blocks:
                for layer in block.cache.layers:
                    layer.forget()
        made: list[torch.Tensor] = []
        for block in blocks:
            out: Any = self.model(
                input_ids=block.tokens,
                attention_mask=block.seen,
                position_ids=block.position,
                past_key_values=block.cache,
                use_cache=True,
                logits_to_keep=1,
            )
            made.append(out.logits[:, -1])
        if found is not None and not all(torch.equal(ours, its) for ours, its in zip(found, made, strict=True)):
            self._lean = None
        return made

    def prompts(
        self,
        prompts: torch.Tensor,
        seen: torch.Tensor,
        position: torch.Tensor,
        parts: Sequence[Part],
        of: torch.Tensor,
        passes: int,
    ) -> tuple[torch.Tensor, Any]:
        """(logits [rows, vocabulary] of the first token, the cache). Each part is a pass; `passes` are made at least, since a
        pass may be a collective. `of`: the row that went through the model for each.
        """
        made, whole = [], prompts.shape[1]
        nothing: Part = ([0], width_of(1, whole))
        for at, width in [*parts, *[nothing] * (passes - len(parts))]:
            self.check()
            index, begin = torch.tensor(at, device=prompts.device), whole - width
            out: Any = self.model(
                input_ids=prompts[index, begin:],
                attention_mask=seen[index, begin:],
                position_ids=position[index, begin:],
                use_cache=True,
                logits_to_keep=1,
            )
            rows, places = (of[:, None] == index).nonzero(as_tuple=True)  # who has these prompts, and where in the pass
            made.append((rows, places, out.past_key_values, out.logits[:, -1]))
        made = made[: len(parts)]
        logits = torch.empty_like(made[0][3][:1]).repeat(len(prompts), 1)
        for rows, places, _, mine in made:
            logits[rows] = mine[places]
        if not self.fits:
            return logits, made[0][2]
        return logits, room.joined([(rows, places, cache) for rows, places, cache, _ in made], whole)


class _Block:
    """Answers that are generated together."""

    def __init__(self, engine: TorchEngine, requests: Sequence[Request], every: bool) -> None:
        s, real = engine.sampling, len(requests)
        filler = requests[0] if requests else Request(id="", prompt=(s.pad,), seed=0, block="nothing")
        alone = not filler.block  # one shape for all
        filled = [*requests, *[filler] * ((engine.rows if alone else 1) - real)]
        device = next(engine.model.parameters()).device
        width = filler.width or s.prompt_tokens
        self.sampling, self.real, self.every, self.leaves = s, real, every, engine.fits and not alone
        self.lengths, self.width = [len(r.prompt) for r in filled], width
        self.prompts, self.seen = (x.to(device) for x in left_padded([r.prompt for r in filled], width, s.pad))
        self.noise = torch.stack([uniforms(r.seed, s.max_tokens) for r in filled]).to(device)
        self.eos = torch.tensor(s.eos, device=device)

        rows = len(filled)
        self.response = torch.full((rows, s.max_tokens), s.pad, device=device)
        self.mask = torch.zeros(rows, s.max_tokens, dtype=torch.bool, device=device)
        self.scores = torch.zeros(rows, s.max_tokens, device=device)
        self.ended = torch.arange(rows, device=device) >= real  # copies need not go on
        # All of what follows a prompt is attended to, padding after the end as well: nobody reads what it makes.
        self.attention = torch.cat([self.seen, torch.ones_like(self.mask)], 1)
        position = (self.seen.long().cumsum(1) - 1).clamp(min=0)
        parts, of = [(list(range(rows)), width)], list(range(rows))
        if self.leaves:  # a prompt of several requests goes through once
            firsts = {prompt: at for at, prompt in reversed([*enumerate(r.prompt for r in filled)])}
            of = [firsts[r.prompt] for r in filled]
            parts = by_length({at: self.lengths[at] for at in sorted(set(of))}, width)
        prefilled = self.prompts, self.attention[:, :width], position
        passes = PARTS if every else 0
        self.logits, self.cache = engine.prompts(*prefilled, parts, torch.tensor(of, device=device), passes)
        self.here, self.position = (
            torch.arange(rows, device=device),
            position[:, -1:],
        )  # the rows that are still gone on with
        self.begin = 0  # before it nobody of these has a token

    def next(self, t: int) -> Next:
        """What the token `t` of each row is made of."""
        return Next(
            tokens=self.response[self.here, t - 1 : t],
            seen=self.attention[self.here, self.begin : self.width + t],
            position=self.position,
            cache=self.cache,
        )

    def take(self, t: int, logits: torch.Tensor) -> bool:
        """Each row's token `t`, [rows, vocabulary]. Does anybody go on?"""
        here, s = self.here, self.sampling
        token, over = draw(logits, self.noise[here, t], s), self.ended[here]
        self.mask[here, t] = ~over
        self.response[here, t] = torch.where(over, s.pad, token)
        self.scores[here, t] = torch.where(over, 0.0, logprobs(logits[:, None], token[:, None], s.temperature)[:, 0])
        over = over | torch.isin(token, self.eos)
        self.ended[here] = over
        self.position = self.position + 1
        left = len(here) - int(over.sum())
        if self.leaves and 0 < left <= CROWDED * len(here):
            stay = (~over).nonzero()[:, 0]
            self.here, self.position = here[stay], self.position[stay]
            before, self.begin = self.begin, self.width - max(self.lengths[at] for at in self.here.tolist())
            for layer in self.cache.layers:
                layer.leave(stay, self.begin - before)
        return bool(left) or self.every

    def made(self) -> tuple[torch.Tensor, ...]:
        """The columns of its samples."""
        s = self.sampling
        tokens, seen = (
            pad(x, (s.prompt_tokens - self.width, 0), value=v) for x, v in ((self.prompts, s.pad), (self.seen, False))
        )
        found = (
            torch.cat([tokens, self.response], 1), torch.cat([seen, self.mask], 1), self.mask, self.scores, self.ended,
        )  # fmt: skip
        return tuple(value[: self.real].cpu() for value in found)


def crowds(sizes: Sequence[int], most: int) -> list[list[int]]:
    """Which blocks go on together, by their rows: as many, one after the other, as have no more rows than `most`.

    >>> crowds([16, 16, 40, 100, 8], 64)
    [[0, 1], [2], [3], [4]]
    >>> crowds([16, 16], 1)
    [[0], [1]]
    """
    found: list[list[int]] = []
    rows = most + 1
    for at, size in enumerate(sizes):
        if rows + size > most:
            found.append([])
            rows = 0
        found[-1].append(at)
        rows += size
    return found


def together(requests: Sequence[Request], rows: int) -> Iterator[list[int]]:
    """The places of requests that are generated together: those of a block, or, of those of none, at most so many of one width.

    >>> asked = [Request(id=str(i), prompt=(1,), seed=0, width=width) for i, width in enumerate((16, 32, 16, 16, 32))]
    >>> list(together(asked, 2))
    [[0, 2], [3], [1, 4]]
    >>> list(together([Request(id=name, prompt=(1,), seed=0, block=name[0]) for name in ("a0", "b0", "a1", "a2")], 2))
    [[0, 2, 3], [1]]
    """
    for block, width in dict.fromkeys((request.block, request.width) for request in requests):
        its = [at for at, request in enumerate(requests) if (request.block, request.width) == (block, width)]
        size = len(its) if block else rows
        yield from (its[at : at + size] for at in range(0, len(its), size))


def by_length(lengths: Mapping[int, int], most: int) -> list[Part]:
    """Which rows' prompts go through the model in one pass, and how wide that is: as many in each, with others of about their
    length.

    >>> by_length(dict(enumerate([300, 10, 12, 11, 280, 90, 9, 100])), 320)
    [([6, 1, 3, 2], 16), ([5, 7], 104), ([4, 0], 320)]
    """
    order = sorted(lengths, key=lambda at: lengths[at])
    each = -(-len(order) // PARTS)
    found: list[Part] = []
    for part in (order[at : at + each] for at in range(0, len(order), each)):
        width = width_of(lengths[part[-1]], most)
        if found and found[-1][1] == width:
            found[-1][0].extend(part)
        else:
            found.append((part, width))
    return found


@contextmanager
def _whole(model: nn.Module, wanted: bool) -> Iterator[bool]:
    """What a pass puts together of what FSDP has cut up stays so inside. True: so passes after the first send nothing."""
    if not wanted:
        yield False
        return
    from torch.distributed.fsdp import FSDPModule  # a slow import, of which others have no need

    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    inner = [unit for unit in units if unit is not model]  # the outermost stays whole after a pass by itself
    for unit in inner:
        unit.set_reshard_after_forward(False, recurse=False)
    try:
        yield bool(units)
    finally:
        for unit in inner:
            unit.set_reshard_after_forward(True, recurse=False)
            unit.reshard()


def left_padded(rows: Sequence[Sequence[int]], width: int, pad: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(tokens, which of them are not padding), [rows, width]."""
    tokens = torch.full((len(rows), width), pad)
    real = torch.zeros(len(rows), width, dtype=torch.bool)
    for i, row in enumerate(rows):
        assert 0 < len(row) <= width, f"a prompt of {len(row)} tokens, where 1 to {width} fit"
        tokens[i, width - len(row) :] = torch.tensor(row)
        real[i, width - len(row) :] = True
    return tokens, real


def uniforms(seed: int, count: int) -> torch.Tensor:
    """[count] float64 in [0, 1): a request's noise, one number per token."""
    return torch.rand(count, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def draw(logits: torch.Tensor, noise: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """[rows] tokens from logits [rows, vocabulary] and noise [rows]."""
    if sampling.temperature == 0.0:
        return logits.argmax(-1)
    p = tempered(logits, sampling.temperature).double().softmax(-1)
    if not sampling.top_k and sampling.top_p >= 1.0:
        return _invert(p, noise)
    p, order = p.sort(stable=True, dim=-1, descending=True)
    fine = _fine(p)
    kept = fine.cumsum(-1) - fine < sampling.top_p * FINENESS  # the likeliest is always kept
    if sampling.top_k:
        kept[:, sampling.top_k :] = False
    return order.gather(-1, _invert(torch.where(kept, p, 0.0), noise)[:, None])[:, 0]


def _fine(p: torch.Tensor) -> torch.Tensor:
    """Probabilities as whole numbers, whose sum is the same in whatever order a GPU takes it."""
    return (p * FINENESS).long()


def _invert(p: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """The first place at which the cumulated weights exceed noise x their total, so never one of weight 0."""
    cumulated = _fine(p).cumsum(-1)
    total = cumulated[:, -1:]
    goal = torch.minimum((noise[:, None] * total).long(), total - 1)
    places: torch.Tensor = torch.searchsorted(cumulated, goal, right=True)
    return places[:, 0]
