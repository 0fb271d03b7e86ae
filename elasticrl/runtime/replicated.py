"""Strategy `replicated`: every rank holds all parameters and a shard of the optimizer's state.

The idea: gradients never leave flat buckets. A backward pass leaves each lane's gradient in a bucket row; rows of sibling lanes
are added as soon as both are there, in place, so a rank keeps only the whole subtrees of its lanes. Each such row is cut in
`world` parts and goes out as it is in one all-to-all, while the backward pass is still busy with the next bucket. A rank gets
its own part of every subtree in the gang, finishes the tree, and after the update one all-gather per bucket brings the
parameters together, straight into the memory that the model computes with.

With the lanes dealt evenly this moves the bytes of a reduce-scatter and an all-gather, which is what an all-reduce moves.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from math import prod
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist

from elasticrl.runtime.digest import MASK, digest_of, outliers, signed, strangers
from elasticrl.runtime.group import settle
from elasticrl.runtime.lanes import Deal, Fold, Node, Turn
from elasticrl.runtime.layout import UNIT, Bucket, Piece, buckets, common, striped, up
from elasticrl.runtime.names import parameters
from elasticrl.runtime.pages import Touch
from elasticrl.runtime.shard import Shard
from elasticrl.runtime.strategy import Point, Strategy, gather
from elasticrl.runtime.team import cuts_of, lie_in, local, local_grad, whole_name
from elasticrl.runtime.torch_names import all_gather_single

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

    from torch.utils.hooks import RemovableHandle

    from elasticrl.runtime.layout import Layout
    from elasticrl.runtime.optim import Rule
    from elasticrl.runtime.scalars import Tally
    from elasticrl.runtime.team import Team
    from elasticrl.runtime.tokens import Tokens

BUCKET_BYTES = 16 << 20  # each bucket costs about a millisecond of gloo; DDP uses 25 MiB


SPARE = 64 * UNIT  # elements of a bucket's memory beyond its size: as many as a gang of 64 rounds up to


class _Row(NamedTuple):
    """Memory for one bucket's gradient. The views are made once: each pass asks for all of them."""

    store: torch.Tensor  # all of the memory
    flat: torch.Tensor
    places: tuple[torch.Tensor, ...]  # one for each parameter, in its shape


NOTHING = _Row(torch.empty(0), torch.empty(0), ())  # in place of a row of zeros, which nobody fills and adds up


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """The memory of a strategy that is spent, for the next one's: no collective writes to it any more. New memory takes a
    second for four gigabytes, and in the first step every rank would wait for it.

    Example: Rows(buckets=(Bucket(...),), params=(tensor([0.31, ...]),), version=1284, leaves=((...),), inbox=(None,))
    """

    buckets: tuple[Bucket, ...]
    params: tuple[torch.Tensor | None, ...]  # what the model computes with, by bucket, each with some room to spare
    version: int | None  # whose parameters are in it
    leaves: tuple[tuple[torch.Tensor, ...], ...]  # of lanes' gradients
    inbox: tuple[torch.Tensor | None, ...]
    shard: Shard | None = None  # one of which nothing is worth keeping but its memory


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

    Long because a lane's gradient goes through all of it: hook, row, tree, all-to-all, shard.
    """

    listens = True

    def __init__(
        self, model: torch.nn.Module, rule_of: Callable[[str], Rule], *, deal: Deal, rank: int = 0,
        group: dist.ProcessGroup | None = None, bucket_bytes: int = BUCKET_BYTES, point: Point = lambda _name: None,
        shard: Shard | None = None, offload: bool = False, team: Team | None = None, tokens: Tokens | None = None,
        rows: Rows | None = None, fills: bool = False,
    ) -> None:  # fmt: skip
        """With a `team` the model is one that its members have cut up between them: see `runtime.team`. With `tokens` each of
        its passes is for some of a lane's tokens: see `runtime.tokens`.

        `shard` is that of an earlier generation, if it is cut as this one's will be: its versions are kept. `rows` are those
        of an earlier generation, which stay where they are, with the parameters that they hold. With `fills` all of the state
        is filled before anybody computes with it: without such parameters those of the model are worth nothing.

        With `offload` the optimizer's state is in the host's memory, and computed there.
        """
        super().__init__(deal, rank, group, point, team, tokens)
        self.model = model
        # Backward passes finish the last layers first, so those fill the first bucket.
        named = [(name, param) for name, param in parameters(model) if param.requires_grad][::-1]
        kinds = {(param.dtype, param.device) for _, param in named}
        if len(kinds) != 1:
            raise ValueError(f"trainable parameters must be of one dtype on one device, not {sorted(map(str, kinds))}")
        (dtype, self._device) = kinds.pop()
        self.params = [param for _, param in named]
        self._shapes = [(name, tuple(param.shape)) for name, param in named]
        self._bucket = bucket_bytes // dtype.itemsize
        self.cuts = cuts_of(named, team) if team else {}
        self.buckets = self._buckets(team.index if team else 0)
        layout = striped(self.buckets, deal.world)
        kept = shard is not None and (shard.layout, shard.rank) == (layout, rank)
        host = torch.device("cpu") if offload else self._device
        by_name = rule_of if team is None else lambda name: rule_of(whole_name(name))
        old = None if team else shard or (rows.shard if rows else None)
        self._shard = (
            shard if kept and shard else Shard(layout, rank, by_name, dtype=dtype, device=host, old=old, fills=fills)
        )
        self._parts = [up(bucket.size, UNIT * deal.world) // deal.world for bucket in self.buckets]
        if rows is None or rows.buckets != self.buckets:
            rows = None
        self.shows = rows.version if rows else None
        self._rows = [self._store(i, rows.params[i] if rows else None) for i in range(len(self.buckets))]
        self._flat = [row[: part * deal.world] for row, part in zip(self._rows, self._parts, strict=True)]
        blank = fills and self.shows is None
        self._adopt(fill=not kept and not blank, carry=not blank)
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
        come = sum(map(len, self._subtrees))
        boxes: tuple[torch.Tensor | None, ...] = rows.inbox if rows else (None,) * len(self.buckets)
        self._boxes = [
            box
            if box is not None and box.numel() >= come * part
            else torch.empty(come * part, dtype=dtype, device=self.wire)
            for box, part in zip(boxes, self._parts, strict=True)
        ]
        self._new = (
            [] if group is None else [new for new, old in zip(self._boxes, boxes, strict=True) if new is not old]
        )
        self._inbox = [box[: come * part].view(come, part) for box, part in zip(self._boxes, self._parts, strict=True)]
        self._spare: list[list[_Row]] = [[] for _ in self.buckets]
        self._names = [name for bucket in self.buckets for name, _, _ in bucket.params]
        self._heard: dict[int, dict[int, int]] = {}  # by leaf and parameter
        for b, leaves in enumerate(rows.leaves if rows else ()):
            self._spare[b] = [self._row_of(b, leaf) for leaf in leaves if leaf.numel() >= self._flat[b].numel()]
        for param in self.params:
            param.grad = None
        self._touch: Touch | None = None
        self._asked = False  # all were asked who has the parameters, and
        self._coming: list[dist.Work] | None = None  # these bring them; None: too few have them
        self._start()

    @property
    def turns(self) -> tuple[Turn, ...]:
        """The passes this rank makes in each update."""
        return self.dealt(ghosts=False)  # a pass needs nobody else, or those with the same lanes: no ghosts

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
        """One striping of the buckets for each member."""
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
        if self._touch is not None:
            self._touch.end()
        self._filling.clear()  # they refer to us: without them all rows go at once, and not when Python next looks for circles

    @property
    def rows(self) -> Rows:
        """What the next generation may use again: nothing of what a collective may still write to."""
        nothing: tuple[None, ...] = (None,) * len(self.buckets)
        late = {n % len(self.buckets) for n, work in enumerate(self._works) if not work.is_completed()}
        if (
            self.wire.type != "cpu"
        ):  # there torch keeps memory, and a collective that was waited for may still be under way
            return Rows(buckets=self.buckets, params=nothing, version=None, leaves=((),) * len(nothing), inbox=nothing)
        return Rows(
            buckets=self.buckets,
            params=nothing if self.shows is None else tuple(self._rows),
            version=self.shows,
            # What is sent late from there goes to those who are in a group that we have left.
            leaves=tuple(tuple(self._leaves(b)) for b in range(len(self.buckets))),
            inbox=tuple(None if b in late else box for b, box in enumerate(self._boxes)),
        )

    def ahead(self) -> Rows:
        """The same before there is a gang, with memory for all of a first step. This strategy is spent then."""
        for b in range(len(self.buckets)):
            self._spare[b] += [self._room(b) for _ in self._subtrees[self.rank]]
            for row in (self._boxes[b], *(row.flat for row in self._spare[b])):
                row.zero_()
        self._shard.touch()
        made = replace(self.rows, shard=self._shard, params=tuple(self._rows))
        self.close()
        return made

    def touch(self) -> Touch | None:
        """Has the new memory come meanwhile that a first step writes to. None where memory takes no time."""
        if self.wire.type == "cpu":
            new = [*self._shard.new(), *self._new]
            for b, spare in enumerate(self._spare):
                made = [self._room(b) for _ in range(len(self._subtrees[self.rank]) - len(spare))]
                new += [row.flat for row in made]
                spare.extend(made)
            self._touch, self._new = Touch(new), []
        return self._touch

    def _leaves(self, b: int) -> Iterator[torch.Tensor]:
        filling = self._filling[b]
        for row in (*self._spare[b], *filling.fold.parts.values(), *([filling.row] if filling.row else [])):
            if row is not NOTHING:
                yield row.store

    def _store(self, bucket: int, kept: torch.Tensor | None) -> torch.Tensor:
        """Memory for a bucket's parameters. A gang of another size needs some units more or fewer: there are some to spare."""
        if kept is not None and kept.numel() >= self._parts[bucket] * self.deal.world:
            return kept
        store = torch.empty(self._room_of(bucket), dtype=self._shard.grad.dtype, device=self.wire)
        for gap in self.buckets[bucket].gaps(store.numel()):
            store[gap] = 0
        return store

    def _room_of(self, bucket: int) -> int:
        return max(self._parts[bucket] * self.deal.world, up(self.buckets[bucket].size) + SPARE)

    def _adopt(self, *, fill: bool, carry: bool) -> None:
        """Moves the parameters into the flat rows, with their values if those are worth it (`carry`), and these into this
        rank's shard if it is to be filled.
        """
        at = 0
        params = iter(self.params)
        for flat, bucket, part in zip(self._flat, self.buckets, self._parts, strict=True):
            for (_, shape, begin), param in zip(bucket.params, params, strict=False):
                place = flat[begin : begin + prod(shape)]
                if local(param).data_ptr() != place.data_ptr():
                    if carry:
                        place.copy_(local(param).detach().reshape(-1))
                    lie_in(param, place.view(shape))
            if fill:
                self._shard.state[0, at : at + part] = flat[self.rank * part : (self.rank + 1) * part]
            at += part

    # Phase one, lane by lane.

    def begin(self, turn: Turn) -> Tally:
        """Starts a lane's pass: its buckets take what it computes."""
        tally = super().begin(turn)
        for b, filling in enumerate(self._filling):
            filling.node, row = filling.fold.take(self.leaf(turn.lane))
            filling.fresh = row is None
            filling.row = self._fresh(b) if row is None or row is NOTHING else row
            if row is NOTHING:
                filling.row.flat.zero_()
            filling.missing = set(range(len(self.buckets[b].params)))
        return tally

    def _fresh(self, b: int) -> _Row:
        """A row for somebody's gradient."""
        return self._spare[b].pop() if self._spare[b] else self._room(b)

    def _room(self, b: int) -> _Row:
        return self._row_of(b, torch.empty(self._room_of(b), dtype=self._shard.grad.dtype, device=self.wire))

    def _row_of(self, b: int, store: torch.Tensor) -> _Row:
        """Zeros where no parameter is, since padding is sent and added too."""
        flat, params = store[: self._flat[b].numel()], self.buckets[b].params
        for gap in self.buckets[b].gaps(flat.numel()):
            flat[gap] = 0
        return _Row(store, flat, tuple(flat[begin : begin + prod(shape)].view(shape) for _, shape, begin in params))

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
        """Expects these leaves from other ranks."""
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
        if left is NOTHING or right is NOTHING:  # by identity: tensors have an equality of their own
            row = right if left is NOTHING else left
            row.flat.add_(0.0)  # as a row of zeros would: it makes 0.0 of -0.0
            return row
        self._spare[b].append(right)
        left.flat.add_(right.flat)
        return left

    def _finish(self, turn: Turn) -> None:
        for b, filling in enumerate(self._filling):
            if self.left_out and len(filling.missing) == len(self.buckets[b].params):
                self._leave_out(b)
            for j in sorted(filling.missing):
                self._collect(b, j, None)  # a parameter that this lane had no use for
            assert filling.row is None, f"bucket {b} of lane {turn.lane}"

    def _leave_out(self, b: int) -> None:
        """This lane's gradient is 0, at no cost."""
        filling = self._filling[b]
        assert filling.row is not None
        assert filling.node is not None
        if filling.fresh:
            self._spare[b].append(filling.row)
            filling.fold.put(filling.node, NOTHING)
        else:
            filling.row.flat.add_(0.0)
            filling.fold.put(filling.node, filling.row)
        filling.row = None
        filling.missing.clear()
        self._send()

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
                if ready is NOTHING:
                    ready = self._filling[b].fold.parts[mine[wave]] = self._fresh(b)
                    ready.flat.zero_()
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
                total = filling.fold.total()
                grad.zero_() if total is NOTHING else grad.copy_(total.flat)
            else:
                for wave in range(self._waves):
                    self._works[wave * len(self.buckets) + b].wait()
                away = grad.device != self.wire  # the tree is finished where the model is, and then sent home
                whole = torch.empty_like(grad, device=self.wire) if away else grad
                self._finish_tree(self._inbox[b], whole)
                if away:
                    grad.copy_(whole)
            # Taken out of the tree: where a later bucket's wait is cut short, a row that is in both would be given to two lanes
            # of the next generation. Found by kills beside load, in a model of several buckets.
            while filling.fold.parts:
                _, row = filling.fold.parts.popitem()
                if row is not NOTHING:
                    self._spare[b].append(row)
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

    def hand_over(self, old: Shard | None, version: int | None) -> list[tuple[int, Piece]]:
        """Brings what this rank's shard lacks of that version from ranks that have it in their shards of an earlier gang.
        This process has it in its `old` one, or nothing (None). Returns what no rank had. Collective.
        """
        world = self.deal.world
        said = [0.0, 0.0] if old is None else [float(len(old.layout.pieces)), float(old.rank)]
        told = gather(torch.tensor(said, dtype=torch.float64, device=self.wire), [2] * world, self.group)
        had: dict[tuple[int, int], int] = {}  # which part of how many, and who has it: of two that have one, the first
        for rank, part in enumerate(told):
            size, number = (int(word) for word in part.tolist())
            if size:
                had.setdefault((size, number), rank)
        lacks, state = list(self._shard.pieces), None
        if old is not None and version is not None:
            lacks = [] if old is self._shard else common(self._shard.pieces, old.pieces)[1]
            state = old.held[version]
        cuts = {size for size, _ in had}
        stay = cuts == {world} and all(number == rank for (_, number), rank in had.items())
        if self.group is not None and len(cuts) == 1 and not stay:
            before = striped(self.buckets, cuts.pop())
            owners = {rank: before.pieces[number] for (_, number), rank in had.items()}
            lacks = self._exchange(owners, lacks, state if self.rank in owners else None)
        return [(row, piece) for row in range(len(self._shard.rows)) for piece in lacks]

    def _exchange(
        self, owners: Mapping[int, Sequence[Piece]], lacks: list[Piece], state: torch.Tensor | None
    ) -> list[Piece]:
        """Each rank sends of its pieces what others lack, bucket by bucket, which bounds the memory for it."""
        rows, layout, me = len(self._shard.rows), self._shard.layout, self.rank
        comes: list[list[tuple[Piece, Piece]]] = []
        goes: list[list[tuple[Piece, Piece]]] = []
        for rank in range(self.deal.world):
            found, lacks = common(lacks, owners.get(rank, ()) if rank != me else ())
            comes.append(found)
            wanted = common(layout.pieces[rank], owners.get(rank, ()))[1] if rank != me else []
            goes.append(common(wanted, owners.get(me, ()))[0])
        for bucket in self.buckets:
            names = {name for name, _, _ in bucket.params}
            sent = [[theirs for _, theirs in pairs if theirs.name in names] for pairs in goes]
            got = [[mine for mine, _ in pairs if mine.name in names] for pairs in comes]
            out = (
                [state[:, piece.there].reshape(-1) for pieces in sent for piece in pieces] if state is not None else []
            )
            ins, outs = ([rows * sum(piece.count for piece in pieces) for pieces in each] for each in (got, sent))
            box = torch.empty(sum(ins), dtype=self._shard.grad.dtype, device=self.wire)
            into = torch.cat(out).to(self.wire) if out else self._nothing
            dist.all_to_all_single(box, into, ins, outs, group=self.group)
            settle(self.group)
            at = 0
            for piece in (piece for pieces in got for piece in pieces):
                part = box[at : at + rows * piece.count].view(rows, piece.count)
                self._shard.state[:, piece.there] = part
                at += rows * piece.count
        return lacks

    def show_ahead(self) -> None:
        """As Strategy.show_ahead."""
        self._asked, self._coming = True, self._begin_show(has=self.shows is not None)

    def forget(self) -> None:
        """As Strategy.forget. What still comes is held by the group, and `rows` does not give that memory on."""
        self._asked, self._coming = False, None

    def show(self) -> None:
        """As Strategy.show. Who has the parameters keeps them, and those who have them send them to the others, each a part."""
        works = self._coming if self._asked else self._begin_show(has=self.shows == self.shard.version)
        self._asked, self._coming = False, None
        if works is None:
            self.publish()
            return
        for work in works:
            work.wait()
        self.shows = self.shard.version

    def _begin_show(self, *, has: bool) -> list[dist.Work] | None:
        """None where too few have the parameters: then an all-gather of the shards moves less. Until they have come nobody
        shows any: where that is cut short, a late peer may still read or write here, and `rows` does not give this memory on.
        """
        mine = torch.tensor([float(has)], dtype=torch.float64, device=self.wire)
        have = [bool(part[0]) for part in gather(mine, [1] * self.deal.world, self.group)]
        givers = [rank for rank, had in enumerate(have) if had]
        if len(givers) == self.deal.world:
            return []
        if 2 * len(givers) < self.deal.world:
            return None
        self.shows = None
        return [self._hand_on(flat, givers) for flat in self._flat]

    def _hand_on(self, flat: torch.Tensor, givers: list[int]) -> dist.Work:
        """A bucket's parameters, from those who have them to those who do not."""
        world, size = self.deal.world, flat.numel()
        part = up(size, UNIT * len(givers)) // len(givers)
        starts = {rank: min(i * part, size) for i, rank in enumerate(givers)}
        sizes = [min(starts[rank] + part, size) - starts[rank] if rank in starts else 0 for rank in range(world)]
        into, sent, comes, goes = flat, self._nothing, sizes, [0] * world
        if (start := starts.get(self.rank)) is not None:
            count = sizes[self.rank]
            into, comes, goes = self._nothing, goes, [0 if rank in starts else count for rank in range(world)]
            mine, takers = flat[start : start + count], world - len(givers)
            sent = mine if takers == 1 else torch.cat([mine] * takers)
        work: dist.Work = dist.all_to_all_single(into, sent, comes, goes, group=self.group, async_op=True)
        return work

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
