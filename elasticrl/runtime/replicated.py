"""Strategy `replicated`: every rank holds all parameters and a shard of the optimizer's state.

The idea: gradients never leave flat buckets. A backward pass leaves each lane's gradient in a bucket row; rows of sibling lanes
are added as soon as both are there, in place, so a rank keeps only the whole subtrees of its lanes. Each such row is cut in
`world` parts and goes out as it is in one all-to-all, while the backward pass is still busy with the next bucket. A rank gets
its own part of every subtree in the gang, finishes the tree, and after the update one all-gather per bucket brings the
parameters together, straight into the memory that the model computes with.

With the lanes dealt evenly this moves the bytes of a reduce-scatter and an all-gather, which is what an all-reduce moves.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist

from elasticrl.runtime.digest import MASK, digest_of, outliers, signed, strangers
from elasticrl.runtime.lanes import Deal, Fold, Node, Turn
from elasticrl.runtime.layout import UNIT, Bucket, buckets, striped, up
from elasticrl.runtime.names import parameters
from elasticrl.runtime.shard import Shard
from elasticrl.runtime.strategy import Point, Strategy, gather
from elasticrl.runtime.team import cuts_of, lie_in, local, local_grad, whole_name
from elasticrl.runtime.torch_names import all_gather_single

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence

    from torch.utils.hooks import RemovableHandle

    from elasticrl.runtime.layout import Layout
    from elasticrl.runtime.optim import Rule
    from elasticrl.runtime.scalars import Tally
    from elasticrl.runtime.team import Team

BUCKET_BYTES = 16 << 20  # each bucket costs about a millisecond of gloo; DDP uses 25 MiB


class _Row(NamedTuple):
    """Memory for one bucket's gradient. The views are made once: each pass asks for all of them."""

    flat: torch.Tensor
    places: tuple[torch.Tensor, ...]  # one for each parameter, in its shape


@dataclass(slots=True)
class _Filling:
    """One bucket in one update: the subtrees added up so far, and the row that the present lane's gradient goes to."""

    fold: Fold[_Row]
    node: Node | None = None
    row: _Row | None = None
    fresh: bool = True  # the row has no lane in it yet: copy, don't add
    missing: set[int] = field(default_factory=set)  # parameters of the bucket whose gradient is still to come


class Replicated(Strategy):
    """The parameters of `model` are moved into flat memory, and stay there; the model is otherwise untouched.

    A lane is one backward pass: whoever wants smaller ones takes more lanes.
    """

    listens = True

    def __init__(
        self, model: torch.nn.Module, rule_of: Callable[[str], Rule], *, deal: Deal, rank: int = 0,
        group: dist.ProcessGroup | None = None, bucket_bytes: int = BUCKET_BYTES, point: Point = lambda _name: None,
        shard: Shard | None = None, offload: bool = False, team: Team | None = None,
    ) -> None:  # fmt: skip
        """With a `team` the model is one that its members have cut up between them: see `runtime.team`.

        `shard` is that of an earlier generation, if it is cut as this one's will be: its versions are kept.

        With `offload` the optimizer's state is in the host's memory, and computed there.
        """
        super().__init__(deal, rank, group, point, team)
        self.model = model
        # Backward passes finish the last layers first, so those fill the first bucket.
        named = [(name, param) for name, param in parameters(model) if param.requires_grad][::-1]
        kinds = {(param.dtype, param.device) for _, param in named}
        if len(kinds) != 1:
            raise ValueError(f"trainable parameters must be of one dtype on one device, not {sorted(map(str, kinds))}")
        (dtype, self._device) = kinds.pop()
        norms = [name for name, module in model.named_modules() if getattr(module, "track_running_stats", False)]
        if norms:
            raise ValueError(f"{norms[0]} keeps running statistics, which no lane owns; use LayerNorm or GroupNorm")
        self.params = [param for _, param in named]
        self._shapes = [(name, tuple(param.shape)) for name, param in named]
        self._bucket = bucket_bytes // dtype.itemsize
        self.cuts = cuts_of(named, team) if team else {}
        self.buckets = self._buckets(team.index if team else 0)
        layout = striped(self.buckets, deal.world)
        kept = shard is not None and (shard.layout, shard.rank) == (layout, rank)
        host = torch.device("cpu") if offload else self._device
        by_name = rule_of if team is None else lambda name: rule_of(whole_name(name))
        self._shard = shard if kept and shard else Shard(layout, rank, by_name, dtype=dtype, device=host)
        self._parts = [up(bucket.size, UNIT * deal.world) // deal.world for bucket in self.buckets]
        self._flat = [self._row(i) for i in range(len(self.buckets))]
        self._adopt(fill=not kept)
        self._index = [(b, i) for b, bucket in enumerate(self.buckets) for i in range(len(bucket.params))]
        self._hooks: list[RemovableHandle] = [
            param.register_post_accumulate_grad_hook(partial(self._arrived, i))  # type: ignore[no-untyped-call]
            for i, param in enumerate(self.params)
        ]
        self._subtrees = [deal.subtrees(r) for r in range(deal.world)]
        self._waves = max(len(mine) for mine in self._subtrees)
        # All subtrees of the gang in the order they arrive here: wave by wave, in a wave by rank.
        self._arrivals = [[mine[j] for mine in self._subtrees if j < len(mine)] for j in range(self._waves)]
        self._nothing = torch.empty(0, dtype=dtype, device=self.wire)
        self._inbox = [
            torch.empty(sum(map(len, self._subtrees)), part, dtype=dtype, device=self.wire) for part in self._parts
        ]
        self._spare: list[list[_Row]] = [[] for _ in self.buckets]
        self._names = [name for bucket in self.buckets for name, _, _ in bucket.params]
        self._heard: dict[int, dict[int, int]] = {}  # by leaf and parameter
        for param in self.params:
            param.grad = None
        self._start()

    @property
    def turns(self) -> tuple[Turn, ...]:
        """The passes this rank makes in each update."""
        return self.deal.turns(self.rank, ghosts=False)  # a forward pass here needs nobody else: no ghosts

    def replica(self, names: Collection[str] | None = None) -> int:
        """A digest of the parameters that this rank computes with, or of `names` of them; all ranks' should be equal at any
        sealed version.
        """
        each = zip(self.params, (name for bucket in self.buckets for name, _, _ in bucket.params), strict=True)
        mine = ((local(param), name) for param, name in each if names is None or name in names)
        return sum(digest_of(param.detach().view(-1), 0, "param", name) for param, name in mine) & MASK

    def diverged(self) -> tuple[int, ...]:
        """The ranks whose parameters are not what most ranks compute with: silent corruption. Collective."""
        said = [self.replica(), self.replica(self.common)] if self.team else [self.replica()]
        mine = torch.tensor([signed(word) for word in said], dtype=torch.int64, device=self.wire)
        rows = [row.tolist() for row in gather(mine, [len(said)] * self.deal.world * self.members, self.everyone)]
        odd = strangers([row[0] for row in rows], self.members)
        return tuple(sorted({*odd, *(outliers([row[1] for row in rows]) if self.team else ())}))

    def layouts(self) -> Sequence[Layout]:
        """As Strategy.layouts."""
        return [striped(self._buckets(index), self.deal.world) for index in range(self.members)]

    def _buckets(self, index: int) -> tuple[Bucket, ...]:
        """Of what the members of that index have."""
        cuts = ((self.cuts.get(name), name, shape) for name, shape in self._shapes)
        return buckets(
            [(cut.called(index), cut.box(index)[1]) if cut else (name, shape) for cut, name, shape in cuts],
            self._bucket,
        )

    def close(self) -> None:
        """Takes the hooks out of the model, for the next generation's strategy to put in its own."""
        for hook in self._hooks:
            hook.remove()
        self._filling.clear()  # they refer to us: without them all rows go at once, and not when Python next looks for circles

    def _row(self, bucket: int) -> torch.Tensor:
        """A bucket's row of memory. Zeros, since padding is sent and added too."""
        return torch.zeros(self._parts[bucket] * self.deal.world, dtype=self._shard.grad.dtype, device=self.wire)

    def _adopt(self, *, fill: bool) -> None:
        """Moves the parameters' values into the flat rows, and into this rank's shard if it is to be filled."""
        at = 0
        params = iter(self.params)
        for flat, bucket, part in zip(self._flat, self.buckets, self._parts, strict=True):
            for (_, shape, begin), param in zip(bucket.params, params, strict=False):
                place = flat[begin : begin + prod(shape)]
                place.copy_(local(param).detach().reshape(-1))
                lie_in(param, place.view(shape))
            if fill:
                self._shard.state[0, at : at + part] = flat[self.rank * part : (self.rank + 1) * part]
            at += part

    # Phase one, lane by lane.

    def begin(self, turn: Turn) -> Tally:
        """As Strategy.begin."""
        tally = super().begin(turn)
        for b, filling in enumerate(self._filling):
            filling.node, row = filling.fold.take(turn.lane)
            filling.fresh = row is None
            filling.row = row if row is not None else self._spare[b].pop() if self._spare[b] else self._room(b)
            filling.missing = set(range(len(self.buckets[b].params)))
        return tally

    def _room(self, b: int) -> _Row:
        flat = self._row(b)
        params = self.buckets[b].params
        return _Row(flat, tuple(flat[begin : begin + prod(shape)].view(shape) for _, shape, begin in params))

    def _arrived(self, i: int, param: torch.nn.Parameter) -> None:
        """Autograd has this parameter's gradient for this pass. Called for each one in each pass, so it does little."""
        b, j = self._index[i]
        filling = self._filling[b]
        leaf = self.turn.lane if self.turn is not None else -1
        twice = i in self._heard[leaf] if self.repeats else j not in filling.missing
        if twice:
            raise RuntimeError(
                f"lane {self.turn.lane} ran backward twice; a lane is one backward pass: take more lanes instead"
                if self.turn is not None
                else "a backward pass outside of a lane: call begin(turn) first, so that its gradient has an owner"
            )
        assert param.grad is not None
        grad = param.grad if self.team is None else local_grad(param)
        if leaf in self._heard:
            self._heard[leaf][i] = digest_of(grad.reshape(-1), 0, "grad", self._names[i])
        if not self.repeats:
            self._collect(b, j, grad)
        param.grad = None

    def listen(self, leaves: Iterable[int]) -> None:
        """As Strategy.listen."""
        self._heard = {leaf: {} for leaf in leaves}

    def heard(self, leaf: int) -> int:
        """As Strategy.heard. A parameter without a gradient counts as one whose gradient is 0."""
        return sum(self._heard[leaf].values()) & MASK

    def _collect(self, b: int, j: int, grad: torch.Tensor | None) -> None:
        filling = self._filling[b]
        assert filling.row is not None
        place = filling.row.places[j]
        if filling.fresh:
            place.zero_() if grad is None else place.copy_(grad)
        else:  # an absent gradient is added as zero, not skipped: it would be, had the lane come from another rank
            place.add_(0.0 if grad is None else grad)
        filling.missing.discard(j)
        if not filling.missing:
            self._complete(b)

    def _complete(self, b: int) -> None:
        """The bucket has all of this lane. Sibling subtrees join; one that nobody here can add to is ready to go."""
        filling = self._filling[b]
        assert filling.row is not None
        assert filling.node is not None
        filling.fold.put(filling.node, filling.row)
        filling.row = None
        self._send()

    def _join(self, b: int, left: _Row, right: _Row) -> _Row:
        self._spare[b].append(right)
        left.flat.add_(right.flat)
        return left

    def _finish(self, turn: Turn) -> None:
        for b, filling in enumerate(self._filling):
            for j in sorted(filling.missing):
                self._collect(b, j, None)  # a parameter that this lane had no use for
            assert filling.row is None, f"bucket {b} of lane {turn.lane}"

    def _send(self) -> None:
        """Starts every all-to-all whose turn it is and whose rows are ready. All ranks start them in the same order: wave by
        wave, in a wave bucket by bucket.
        """
        if self.group is None:
            return
        mine = self._subtrees[self.rank]
        while self._sent < self._waves * len(self.buckets):
            wave, b = divmod(self._sent, len(self.buckets))
            row = self._nothing
            if wave < len(mine):
                ready = self._filling[b].fold.parts.get(mine[wave])
                if ready is None:
                    return
                row = ready.flat
            part = self._parts[b]
            before = sum(map(len, self._arrivals[:wave]))
            inbox = self._inbox[b][before : before + len(self._arrivals[wave])]
            comes = [part if wave < len(theirs) else 0 for theirs in self._subtrees]
            goes = [part if wave < len(mine) else 0] * self.deal.world
            self._works.append(
                dist.all_to_all_single(inbox.view(-1), row, comes, goes, group=self.group, async_op=True)
            )
            self._sent += 1

    def _reduce(self) -> None:
        """Waits for what the gang sent, and finishes the tree for this rank's part of each bucket."""
        at = 0
        for b, part in enumerate(self._parts):
            grad = self._shard.grad[at : at + part]
            at += part
            filling = self._filling[b]
            if b == len(self.buckets) // 2:
                self.point("reduce")
            if self.group is None:
                grad.copy_(filling.fold.total().flat)
            else:
                for wave in range(self._waves):
                    self._works[wave * len(self.buckets) + b].wait()
                away = grad.device != self.wire  # the tree is finished where the model is, and then sent home
                whole = torch.empty_like(grad, device=self.wire) if away else grad
                self._finish_tree(self._inbox[b], whole)
                if away:
                    grad.copy_(whole)
            self._spare[b] += filling.fold.parts.values()
        self._start()

    def _finish_tree(self, inbox: torch.Tensor, grad: torch.Tensor) -> None:
        """The gang's subtrees, in the order they arrive in, into their sum. The last addition writes where it belongs."""
        left_over = len(inbox) - 1

        def add(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
            nonlocal left_over
            left_over -= 1
            return torch.add(left, right, out=grad) if left_over == 0 else left.add_(right)

        fold = Fold[torch.Tensor](self.deal.lanes, add)
        for node, row in zip((n for wave in self._arrivals for n in wave), inbox, strict=True):
            fold.put(node, row)
        if len(inbox) == 1:
            grad.copy_(fold.total())

    def _start(self) -> None:
        self._filling = [_Filling(Fold(self.deal.lanes, partial(self._join, b))) for b in range(len(self.buckets))]
        self._heard = {}
        self._works: list[dist.Work] = []
        self._sent = 0

    # Phase two.

    def _publish(self, params: torch.Tensor) -> None:
        at = 0
        works: list[dist.Work] = []
        for b, (flat, part) in enumerate(zip(self._flat, self._parts, strict=True)):
            mine = params[at : at + part].to(self.wire)
            at += part
            if b == len(self._flat) // 2:
                self.point("gather")
            if self.group is None:
                flat.copy_(mine)
            else:
                works.append(all_gather_single(flat, mine, group=self.group, async_op=True))
        for work in works:
            work.wait()
