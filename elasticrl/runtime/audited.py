"""A lane that is computed twice, on its way through one update: who does it, what they came to, what is done about it.

The one idea: whoever computes a lane again gets it from the script's own loop, as a ghost. Its gradient and its tally become a
digest and are thrown away, so nothing of the run changes. What the ranks found is told to all of them, so all judge alike at
the same moment, before anything of the update is applied.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from hashlib import blake2b
from typing import TYPE_CHECKING, Protocol

import torch
import torch.distributed as dist

from elasticrl.runtime.agree import exchange
from elasticrl.runtime.audit import Computed, Finding, deciders, drawn, judge, second
from elasticrl.runtime.digest import MASK, digest_of
from elasticrl.runtime.group import settle
from elasticrl.runtime.interrupt import GangError
from elasticrl.runtime.layout import UNIT
from elasticrl.runtime.optim import apply, scaled
from elasticrl.runtime.rng import seed
from elasticrl.runtime.vault.source import dtype_of, name_of

if TYPE_CHECKING:
    from elasticrl.runtime.generation import Generation
    from elasticrl.runtime.group import Gang
    from elasticrl.runtime.progress import Progress
    from elasticrl.runtime.scalars import Tally
    from elasticrl.runtime.strategy import Strategy

Rows = Mapping[str, torch.Tensor]

WINDOW = 1 << 20  # elements of a shard whose update is computed twice


class Miscomputed(RuntimeError):
    """What this rank computed, or keeps, is not what the same input comes to on other nodes."""


class Doubted(RuntimeError):
    """Two nodes have computed a lane to different results, and nobody can say which is right. All ranks raise it."""


class Audits:
    """What a script says of its lanes, through all generations."""

    def __init__(self) -> None:
        # What a lane's passes are made from: by the rank that carries it, and for one that does not (None: it is over).
        self.give: Callable[[int], Rows] | None = None
        self.take: Callable[[int, Rows | None], None] | None = None
        self.by_itself = False  # the script asks which lanes are here, and so prepares them by itself
        self.off = -1  # the generation that has found that its lanes are no function of their samples


class Audit:
    """Of one lane, in one update of one role."""

    def __init__(
        self, generation: Generation, audits: Audits, strategy: Strategy, progress: Progress, role: str, lane: int
    ) -> None:
        self.generation, self.audits, self.strategy, self.lane = generation, audits, strategy, lane
        self._where = f"lane {lane} of update {progress.update} of step {progress.step} ({role})"
        parts = generation.parts_per_lane
        self._leaves = range(lane * parts, (lane + 1) * parts)
        place, world = generation.place, generation.gang.world
        self._nodes = place.nodes or ("",) * world
        self._owner = next(rank for rank, mine in enumerate(generation.deal.carried) if lane in mine)
        chance = seed("audit", generation.worker.context.tree.job.seed, role, progress.step, progress.update, "who")
        self._second, self._chance = second(self._nodes, self._owner, chance), chance
        self._tallies: dict[int, Tally] = {}
        self._drawn = True  # each lane of this rank has drawn its samples by its number
        strategy.listen(self._leaves)

    def made(self, leaf: int, tally: Tally, *, drew: bool) -> None:
        """A pass of this rank's is over."""
        self._drawn = self._drawn and drew
        if leaf in self._leaves:
            self._tallies[leaf] = tally

    def again(self) -> Iterator[int]:
        """All own lanes are done. The leaves that this rank is to compute once more. Raises what the comparison comes to."""
        gang, nodes = self.generation.gang, self._nodes
        able = self.audits.give is not None or (self._drawn and not self.audits.by_itself)
        told = exchange(gang, {"able": able, "result": self._result() if gang.rank == self._owner else ""})
        if not all(one["able"] for one in told):
            self.generation.worker.say_once(
                "audit.lanes: lanes are not computed twice, as this program does not draw their samples by lane.ids() alone"
            )
            return
        found = [Computed(rank=self._owner, result=told[self._owner]["result"])]
        with _Lent(self.audits, gang, self.lane, self._owner):
            yield from self._by((self._second,), found)
            if found[0].result == found[1].result:
                self._say_alike()
                return
            yield from self._by(deciders(nodes, self._owner, self._second, self._chance), found)
        if answered(self.generation, self._nodes, self._where, found):
            self.audits.off = self.generation.place.generation

    def _by(self, ranks: tuple[int, ...], found: list[Computed]) -> Iterator[int]:
        """These ranks compute it; what each came to is known to all."""
        gang = self.generation.gang
        mine = ""
        if gang.rank in ranks:
            self.strategy.listen(self._leaves)
            yield from self._leaves
            mine = self._result()
        told = exchange(gang, mine)
        found += [Computed(rank=rank, result=told[rank]) for rank in ranks]

    def _result(self) -> str:
        """All bits of the lane's gradients, and all that it tallied."""
        words = blake2b(digest_size=8)
        for leaf in self._leaves:
            row = self._tallies[leaf].row()
            words.update(struct.pack(f"<Q{len(row)}d", self.strategy.heard(leaf), *row))
        return words.hexdigest()

    def _say_alike(self) -> None:
        if self._second == self._owner:
            said = "there is no other rank to do it: a device that is wrong twice in the same way is not found"
        elif len(set(self._nodes)) == 1:
            said = "by another rank of the same node, as there is no other node"
        elif len(set(self._nodes)) == 2:
            said = "on another node; of two nodes that differ nobody could say which is right"
        else:
            said = "on another node"
        self.generation.worker.say_once(f"audit.lanes: a lane was computed twice, and came to the same ({said})")


class ShardAudit:
    """Of a window of one rank's shard, in one update: its state and gradient must come to the same next state elsewhere."""

    def __init__(self, generation: Generation, strategy: Strategy, progress: Progress, role: str, owner: int) -> None:
        self.generation, self.strategy, self.owner = generation, strategy, owner
        self._where = (
            f"the state of {role} that rank {owner} keeps, in update {progress.update} of step {progress.step},"
        )
        self._nodes = generation.place.nodes or ("",) * generation.gang.world
        self._chance = seed("audit", generation.worker.context.tree.job.seed, role, progress.count, "shard")
        size = strategy.shard.layout.size
        start = self._chance % max(1, (size - min(size, WINDOW)) // UNIT + 1) * UNIT
        self._window = slice(start, min(start + WINDOW, size))

    def compare(self, *, scale: float, lr_factor: float) -> None:
        """The update is applied, and not published. Collective; raises what the comparison comes to."""
        gang, shard, window = self.generation.gang, self.strategy.shard, self._window
        mine = gang.rank == self.owner
        own = {"state": shard.state[:, window], "grad": shard.grad[window]} if mine else {}
        rows = lend(gang, own, self.owner)

        def result(*, again: bool) -> str:
            return bits(self._again(rows, scale=scale, lr_factor=lr_factor) if again else shard.next[:, window])

        found = computed(gang, self._nodes, self.owner, self._chance, result)
        if unlike(found):
            answered(self.generation, self._nodes, self._where, found)

    def _again(self, rows: Rows, *, scale: float, lr_factor: float) -> torch.Tensor:
        shard, window = self.strategy.shard, self._window
        old, grad = (rows[name].to(shard.grad.device) for name in ("state", "grad"))
        new = torch.zeros_like(old)
        for rule, start, stop in shard.runs_of(self.owner):
            part = slice(max(start, window.start) - window.start, max(min(stop, window.stop) - window.start, 0))
            if part.start < part.stop:
                rows_of = (slice(None), part)
                rule = scaled(rule, lr_factor)  # noqa: PLW2901 - as Shard.apply
                count = shard.version + 1
                apply(rule, old[rows_of], new[rows_of], grad[part], scale=scale, count=count, rows=shard.rows)
        return new


class Result(Protocol):
    """What this rank has come to, as a digest, or what it comes to `again`."""

    def __call__(self, *, again: bool) -> str:
        """The digest."""


def computed(gang: Gang, nodes: Sequence[str], owner: int, chance: int, result: Result) -> list[Computed]:
    """What `owner` has come to, and a rank elsewhere; where they differ, those who decide too. Collective."""
    one = second(nodes, owner, chance)
    found: list[Computed] = []
    for ranks in ((owner,), (one,), deciders(nodes, owner, one, chance)):
        mine = result(again=bool(found)) if gang.rank in ranks else ""
        told = exchange(gang, mine)
        found += [Computed(rank=rank, result=told[rank]) for rank in ranks]
        if len(found) == 2 and not unlike(found):
            break
    return found


def in_teams(generation: Generation) -> bool:
    """Of teams nothing is computed twice. Whoever has asked for that, if only by default, reads so in the log."""
    worker, team = generation.worker, generation.place.team
    if team > 1 and worker.context.tree.audit.lanes != "0":
        worker.say_once(
            f"audit.lanes: nothing is computed twice, since workers are in teams of {team}. Digests of what all teams "
            "have alike are still compared (lanes.digest)."
        )
    return team > 1


def unlike(found: Sequence[Computed]) -> bool:
    """Do results differ?"""
    return len({one.result for one in found}) > 1


def twice(
    generation: Generation, audits: Audits, progress: Progress, what: str, result: Callable[[int], Result], *,
    lends: bool = False,
) -> None:  # fmt: skip
    """`what` this step made of each lane, its samples say, is made of one lane once more elsewhere, if it is its turn.
    Collective; raises what the comparison comes to.
    """
    tree, place = generation.worker.context.tree, generation.place
    if audits.off == place.generation or tree.lanes.exact != "require" or in_teams(generation):
        return
    key = (tree.job.seed, what, progress.step, 0)
    lane = drawn(*key, lanes=generation.deal.lanes, rate=tree.audit.lanes)
    if lane is None:
        return
    nodes = place.nodes or ("",) * generation.gang.world
    owner = next(rank for rank, mine in enumerate(generation.deal.carried) if lane in mine)
    beat = generation.worker.beat
    lent = _Lent(audits, generation.gang, lane, owner) if lends else nullcontext()
    with beat.within(beat.now.phase), lent:  # it has as long as the phase that made them
        found = computed(generation.gang, nodes, owner, seed("audit", *key, "who"), result(lane))
    if not unlike(found):
        generation.worker.say_once(f"audit.lanes: the {what} of a lane were made twice, and came to the same")
    elif answered(generation, nodes, f"the {what} of lane {lane} of step {progress.step}", found):
        audits.off = place.generation


def check_noted(generation: Generation, strategy: Strategy, role: str) -> None:
    """Before anything is made of an update, or it is left out: what this rank keeps is what it was after the last one."""
    if strategy.noted is None or strategy.noted == (strategy.shard.version, kept(strategy)):
        return
    if strategy.noted[0] == strategy.shard.version:
        raise Miscomputed(
            f"The state of {role} that rank {generation.gang.rank} keeps is not what it was after the last update: memory "
            "of this node corrupts data silently. Nothing of this update was published, and others make it again."
        )
    strategy.noted = None


def applied(
    generation: Generation, strategy: Strategy, progress: Progress, role: str, *, scale: float, max_norm: float | None,
    lr_factor: float,
) -> None:  # fmt: skip
    """Applies the update, and has it computed twice where that is due. Collective where it is."""
    factor = strategy.apply(scale=scale, max_norm=max_norm, lr_factor=lr_factor)
    owner = _looked_at(generation, strategy, role, progress.count)
    if owner is not None:
        ShardAudit(generation, strategy, progress, role, owner).compare(scale=factor, lr_factor=lr_factor)


def note(generation: Generation, strategy: Strategy, progress: Progress, role: str) -> None:
    """An update is sealed. Where the next one is looked at, the state is digested until then."""
    due = _looked_at(generation, strategy, role, progress.count) == generation.gang.rank
    strategy.noted = (strategy.shard.version, kept(strategy)) if due else None


def kept(strategy: Strategy) -> int:
    """The digest of this rank's shard."""
    return sum(strategy.shard.digest().values()) & MASK


def bits(rows: torch.Tensor) -> str:
    """The digest of some rows."""
    return f"{sum(digest_of(row.contiguous(), 0, str(i)) for i, row in enumerate(rows)) & MASK:016x}"


def _looked_at(generation: Generation, strategy: Strategy, role: str, count: int) -> int | None:
    """The rank whose shard is looked at in the update after `count`."""
    tree = generation.worker.context.tree
    if not strategy.listens or tree.lanes.exact != "require" or in_teams(generation):
        return None
    world = generation.gang.world
    return drawn(tree.job.seed, f"{role} shard", count, 0, lanes=world, rate=tree.audit.lanes)


def answered(generation: Generation, nodes: Sequence[str], where: str, found: Sequence[Computed]) -> bool:
    """Results differ. Nothing of the update is published: it is made again, without whoever is named. Returns true where the
    program is at fault, and goes on.
    """
    judged = judge(nodes, found)
    each = ", ".join(f"{one.result} by {_who(nodes, one.rank)}" for one in found)
    if judged.finding is Finding.UNLIKE:
        generation.worker.say(
            f"audit.lanes: {where} came to something else each time ({each}). What the program computes in a lane depends on "
            "more than the lane's samples, streams and parameters, or its operations are not deterministic. This gang does "
            "not compute lanes twice any more."
        )
        return True
    if judged.finding is Finding.DOUBTED:
        raise Doubted(
            f"{where} came to different results ({each}): one of these nodes computes wrongly, and two nodes cannot tell "
            "which. Or the program computes something else there. Nothing of this update was made. Test memory and device "
            "of both nodes, and take one out (elasticrl drain), or add a third, which decides."
        )
    who = ", ".join(_who(nodes, rank) for rank in judged.ranks)
    generation.worker.say(f"silent corruption: {where} came to different results ({each}): that of {who} stands alone")
    if generation.gang.rank in judged.ranks:
        raise Miscomputed(
            f"{where} came to different results ({each}), and that of {who} stands alone: memory, processor or GPU of this "
            "node corrupts data silently. Nothing of this update was made, and others make it again. Steps since the fault "
            "began may hold wrong bits of this node."
        )
    # Until the culprit's end breaks it, as any collective: who left at once would stand still before that end is seen, and the
    # leader would look for somebody who stalls.
    exchange(generation.gang, "")
    raise GangError(f"{who} has computed wrongly: {where}")


def _who(nodes: Sequence[str], rank: int) -> str:
    return f"rank {rank} ({nodes[rank]})" if nodes[rank] else f"rank {rank}"


class _Lent:
    """A lane's rows, for the time of an audit with whoever does not carry it. Collective to enter, if the script lends any."""

    def __init__(self, audits: Audits, gang: Gang, lane: int, owner: int) -> None:
        self._audits, self._gang, self._lane, self._owner = audits, gang, lane, owner

    def __enter__(self) -> None:
        give, take = self._audits.give, self._audits.take
        if give is None or take is None:
            return
        mine = self._gang.rank == self._owner
        rows = lend(self._gang, give(self._lane) if mine else {}, self._owner)
        if not mine:
            take(self._lane, rows)

    def __exit__(self, *_: object) -> None:
        if self._audits.take is not None and self._gang.rank != self._owner:
            self._audits.take(self._lane, None)


def lend(gang: Gang, rows: Rows, owner: int) -> Rows:
    """The rows of `owner`, on the host of each rank. Collective."""
    names = sorted(rows)
    shapes = [[name, name_of(rows[name].dtype), list(rows[name].shape)] for name in names]
    told = exchange(gang, shapes)[owner]
    device = "cuda" if gang.backend == "nccl" else "cpu"
    found: dict[str, torch.Tensor] = {}
    for name, dtype, shape in told:
        if gang.rank == owner:
            flat = rows[name].detach().contiguous().view(-1).view(torch.uint8).to(device)
        else:
            flat = torch.empty(shape, dtype=dtype_of(dtype)).view(-1).view(torch.uint8).to(device)
        if flat.numel():
            dist.broadcast(flat, group=gang.group, group_src=owner)
            settle(gang.group)
        found[name] = flat.cpu().view(dtype_of(dtype)).view(shape)
    return found


def audit_of(generation: Generation, audits: Audits, strategy: Strategy, progress: Progress, role: str) -> Audit | None:
    """The audit of this update of a role; None if none is due, or nobody can tell."""
    tree = generation.worker.context.tree
    if audits.off == generation.place.generation or not strategy.listens or in_teams(generation):
        return None
    if tree.lanes.exact != "require":
        return None
    lanes = generation.deal.lanes
    lane = drawn(tree.job.seed, role, progress.step, progress.update, lanes=lanes, rate=tree.audit.lanes)
    return None if lane is None else Audit(generation, audits, strategy, progress, role, lane)
