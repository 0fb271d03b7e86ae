"""What a script holds of a run inside of its loop: a step, and a lane's turn in it.

The one idea: a step is a number, and its body is all that is under way in it. A fault inside is kept in the body's generation,
cuts the step short, and is no error of the script's.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self

from elasticrl.runtime import alike, audited, spikes
from elasticrl.runtime.agree import exchange
from elasticrl.runtime.data.cursor import SampleId
from elasticrl.runtime.interrupt import GangError
from elasticrl.runtime.lanes import Turn
from elasticrl.runtime.misuse import Misuse
from elasticrl.runtime.trained import check_data
from elasticrl.runtime.vault.version import Version

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence
    from types import TracebackType

    from elasticrl.runtime.rng import Streams
    from elasticrl.runtime.scalars import Tally
    from elasticrl.runtime.sealing import Sealing
    from elasticrl.runtime.spikes import Guard, Spike
    from elasticrl.runtime.strategy import Reduced


class Step(int):
    """A step's number, counted from 0. As a context it swallows what cuts the step short; `steps` then repeats it."""

    _body: Body

    @classmethod
    def of(cls, number: int, body: Body) -> Self:
        """The step that `body` makes."""
        step = cls(number)
        step._body = body
        return step

    def __enter__(self) -> Self:
        self._body.guarded = True
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> bool:
        self._body.guarded = False
        generation = self._body.generation
        if not isinstance(error, GangError):
            # What an aborted collective let through may be anything, and a program that looks at it says so. Its own fault
            # comes again with the step.
            reason = generation.flag.reason
            if reason is None or not isinstance(error, Exception):
                return False
            error = GangError(f"{type(error).__name__} ({error}) in a step that was given up: {reason}")
        generation.cut_by(error)
        return True


class Lane:
    """One lane's turn: its samples, its random streams, its tally, its leaf of the gradient's tree."""

    def __init__(self, body: Body, turn: Turn, tally: Tally, streams: Streams) -> None:
        self.index, self.ghost = turn.lane, turn.ghost
        self.tally = tally
        self.streams = streams.at(lane=turn.lane)
        self._body = body
        self.over = False
        self.again = False  # it counts elsewhere, and is computed here to be compared

    @contextmanager
    def rng(self, purpose: str) -> Iterator[None]:
        """Inside, the ambient generators are this lane's stream of that name. What uses a result (loss.item()) belongs inside
        too: a pass that a fault cuts short (of fsdp, whose passes have collectives) ends here, without one.
        """
        try:
            with self.streams.ambient(purpose):
                yield
        except GangError as error:
            self._body.generation.cut_by(error)

    def ids(self) -> tuple[SampleId, ...]:
        """The samples of the registered cursor that this lane trains on now; they go into the ledger with the update."""
        return self._body.take(self)

    def used(self, ids: Sequence[SampleId], turn: int = 0) -> None:
        """These samples enter the next update, for scripts that choose samples by themselves."""
        named = named_samples(ids, "lane.used")
        if not self.ghost:
            self._body.used.append((self.index, turn, named, False, None))

    def leave_out(self) -> None:
        """In place of the backward pass: there is none, and its leaf is 0. With `fsdp` all ranks leave out the same turns."""
        self._body.leave_out()

    def done(self) -> None:
        """The backward pass is over."""
        self.over = True
        self._body.lane_done()


def named_samples(ids: Any, asked: str) -> tuple[SampleId, ...]:
    """What a script says that it uses; Misuse if these are no samples."""
    odd = [one for one in ids if not isinstance(one, SampleId)] if isinstance(ids, Iterable) else [ids]
    if odd:
        raise Misuse(
            f"{asked}(ids) takes a list of SampleId, and {odd[0]!r} is none: pass what the cursor or the loader gave "
            "(batch.ids), or SampleId(epoch, index) of elasticrl.runtime.data.cursor."
        )
    return tuple(ids)


class Body:
    """All that is under way in one step. It holds no tensors: a script may still have its step while the next gang's models are
    built.
    """

    def __init__(self, sealing: Sealing) -> None:
        self.sealing, self.generation, self.keeper = sealing, sealing.generation, sealing.keeper
        self.given, self.progress = sealing.given, sealing.progress
        self.guarded = False  # what cuts it short ends it at once
        # Leaf, turn and samples of the next update, whether it is made without them, and whose weights generated them.
        self.used: list[tuple[int, int, tuple[SampleId, ...], bool, int | None]] = []
        self.named = False  # some of the samples of an update were
        self._counted = False  # its updates are made in `updates`
        self._changed = False  # an update since the newest state that was kept, after which it could be taken up
        self._lane: Lane | None = None
        self._role = ""  # whose lane it is
        self._drew = False  # it has asked for its samples by its number
        self.keeper.loose()

    def passes(self, role: str) -> Iterator[Lane]:
        """The turns of this rank's lanes in one update of a role."""
        generation = self.generation
        if generation.cut:
            return
        strategy = self.given.role(role).live
        if strategy.walked:
            raise Misuse(
                f"The lanes of {role} are asked for again, and the gradients of those before were not used: call run.update() "
                "after each round of lanes."
            )
        with self._cut_short():
            if (
                self._changed and self.sealing.worth
            ):  # a further update of this step: the last one's state is kept first
                self.sealing.settle()
                self._keep()
            streams = self.progress.streams(generation.worker.context.tree.job.seed)
            audit = audited.audit_of(generation, self.given.audits, strategy, self.progress, role)
            for turn in strategy.turns:
                generation.flag.check(f"lane {turn.lane}")
                lane, self._drew = Lane(self, turn, strategy.begin(turn), streams), False
                yield from self._turn(role, lane)
                if generation.cut:
                    return
                if audit is not None:
                    audit.made(lane.index, lane.tally, drew=self._drew)
            if audit is None:
                return
            for leaf in audit.again():
                lane = Lane(self, Turn(lane=leaf, ghost=True), strategy.repeat(leaf), streams)
                lane.again = True
                with lane.streams.ambient("audit"):  # what is drawn outside of the lane's own streams leaves no trace
                    yield from self._turn(role, lane)
                if generation.cut:
                    return
                audit.made(leaf, lane.tally, drew=True)

    def _turn(self, role: str, lane: Lane) -> Iterator[Lane]:
        self._role, self._lane = role, lane
        yield lane
        if not self.generation.cut and not lane.over:
            raise Misuse(f"lane {lane.index} was not done(): call lane.done() after its backward pass.")

    def leave_out(self) -> None:
        """The lane's turn has no backward pass."""
        self.given.role(self._role).live.leave_out()

    def lane_done(self) -> None:
        """The backward pass of a lane's turn is over."""
        self._lane = None
        if self._role and not self.generation.cut:
            with self._cut_short():
                self.given.role(self._role).live.done()

    def take(self, lane: Lane) -> tuple[SampleId, ...]:
        """The cursor's samples for a lane's turn."""
        cursor, progress = self.given.cursor, self.progress
        if cursor is None:
            raise Misuse("lane.ids() needs a cursor: run.register(data=Cursor(...)).")
        draws = cursor.walk.draws
        ids = cursor.ids(progress.step, progress.update % draws, lane.index // self.generation.parts_per_lane)
        lane.used(ids, turn=progress.update // draws)
        self._drew = True
        return ids

    def updates(self, count: int) -> Iterator[int]:
        """The numbers of those updates that are not whole everywhere yet."""
        while self.generation.cut is None and self.progress.update < count:
            self._counted, number = True, self.progress.update
            yield number
            if self.generation.cut is None and self.progress.update != number + 1:
                made = self.progress.update - number
                raise Misuse(
                    f"run.updates({count}) counts its rounds by run.update(), which was called {made} times in one."
                )

    def update(
        self,
        *,
        scale: float,
        max_norm: float | None,
        lr_factor: float,
        keeps: bool | None,
        skips: bool | None,
        guard: Guard | None,
    ) -> Mapping[str, Reduced] | None:
        """One version of all roles. None: the step was cut short."""
        with self._cut_short():
            self.generation.check_cut()
            for name, role in self.given.roles.items():
                if (made := role.live.walked) < (lanes := len(role.live.turns)):
                    raise Misuse(
                        f"run.update() came after {made} of the {lanes} lanes of {name} that are here: walk all of run.lanes() "
                        f"(or run.passes({name!r})) before each update, and end each lane with lane.done()."
                    )
            found, diverged = self._reduce()
            for name, role in self.given.roles.items():
                audited.check_noted(self.generation, role.live, name)  # also where the update is left out
            # A gradient of corrupted parameters is no doing of the script's.
            odd, jumps = ("", ()) if diverged else self._odd(found, skips=skips, guard=guard)
            live = [role.live for role in self.given.roles.values()]
            for name, role in self.given.roles.items():
                if odd:
                    role.live.skip()
                else:
                    audited.applied(
                        self.generation,
                        role.live,
                        self.progress,
                        name,
                        scale=scale,
                        max_norm=max_norm,
                        lr_factor=lr_factor,
                    )
            for strategy in live:
                strategy.publish()
            for strategy in live:
                strategy.seal()
            found = {name: replace(reduced, skipped=bool(odd), spikes=jumps) for name, reduced in found.items()}
            self._say(odd, jumps)
            if guard and not diverged and (jumps or not odd):
                self.progress.past.add(spikes.seen(found, guard), guard, spiked=bool(jumps), step=self.progress.step)
            self._count(skipped=bool(odd), spike=bool(odd and jumps))
            for name, role in self.given.roles.items():
                audited.note(self.generation, role.live, self.progress, name)
            self._changed = self._counted if keeps is None else keeps
        return None if self.generation.cut else found

    def keep(self, *, always: bool) -> None:
        """The state as it is now is worth keeping, `always` or where that costs little. Raises what cuts the step short."""
        self.generation.check_cut()
        full = self.keeper.full
        if full is not None and self.given.counts.get(full) != self.progress.count:
            return
        self.sealing.settle()  # where all hear of each other how long it is since the last one
        if always or self.sealing.worth:
            # In a gang that is broken up it may be what an aborted pass let through.
            self.generation.flag.check("keeping what was made")
            self._keep(unchanged=self.given.roles if full is not None else ())

    def end(self) -> None:
        """The body is through: its state is kept, and the next step may come."""
        progress, given, sealing = self.progress, self.given, self.sealing
        if self._lane is not None:
            raise Misuse(f"lane {self._lane.index} was not done(): call lane.done() after its backward pass.")
        if lost := [name for name, role in given.roles.items() if role.live.walked]:
            raise Misuse(
                f"Step {progress.step} has ended, and the gradients of {', '.join(lost)} were not used: call run.update() "
                "after the lanes."
            )
        if progress.update:
            check_data(given, self.named, progress.step)
        for role in given.roles.values():
            role.buffers.check()
        if given.cursor is not None:
            given.cursor.advance(progress.step, given.cursor.walk.draws - 1)
        sealing.settle()
        progress.step, progress.update, progress.mark = progress.step + 1, 0, 0
        sealing.keep(Version(progress.step), whole=True)
        sealing.heed_halts()
        if sealing.ending:
            sealing.save_last()

    def _keep(self, unchanged: Collection[str] = ()) -> None:
        self.sealing.keep(Version(self.progress.step, self.progress.mark + 1), whole=False, unchanged=unchanged)
        self._changed = False
        self.keeper.loose()  # the script goes on, and may change in place what it registered
        self.sealing.part_inside()

    def _reduce(self) -> tuple[dict[str, Reduced], bool]:
        """Up to the vote, which seals the state before this update; and whether a rank's parameters were corrupt."""
        self.sealing.await_copies()
        self.keeper.taken()
        self.generation.flag.check("update")  # a gang of one comes to no collective that would look
        said = self.sealing.say()
        found: dict[str, Reduced] = {}
        last = list(self.given.roles)[-1]
        for name, role in self.given.roles.items():
            found[name] = role.live.reduce(said if name == last else ())
        return found, bool(self.sealing.hear(found[last].notes))

    def _odd(
        self, found: Mapping[str, Reduced], *, skips: bool | None, guard: Guard | None
    ) -> tuple[str, tuple[Spike, ...]]:
        """Why this update is left out, or "", and what of it has jumped. Raises where the job is to end."""
        progress = self.progress
        odd = alike.not_finite(found, losses=skips is not None)
        jumps = () if odd or guard is None else progress.past.spikes(spikes.seen(found, guard), guard)
        try:
            if not skips:
                alike.check_finite(odd, progress)
            if guard is not None:
                spikes.check(jumps, progress.past, guard, step=progress.step, update=progress.update)
        except (alike.NotFinite, spikes.Spiked):
            # Not before the others have come as far: a rank whose memory is at fault has left, and it is that one's failure.
            exchange(self.generation.gang, "")
            raise
        left_out = guard is not None and guard.does == "skip"
        return odd or (", ".join(map(str, jumps)) if left_out else ""), jumps

    def _say(self, odd: str, jumps: tuple[Spike, ...]) -> None:
        where, say = f"update {self.progress.update} of step {self.progress.step}", self.sealing.worker.say
        if odd:
            say(f"{where} is skipped on all ranks, and its samples count as used: {odd}.")
        elif jumps:
            say(f"{where} is a spike, and is applied: {', '.join(map(str, jumps))}.")

    def _count(self, *, skipped: bool, spike: bool) -> None:
        """An update is made."""
        progress = self.progress
        version = Version(progress.step, progress.mark + 1)
        for leaf, turn, ids, filtered, by in self.used if self.generation.records else ():
            lane = leaf // self.generation.parts_per_lane
            self.keeper.used(version, lane, ids, turn, skipped=skipped, spike=spike, filtered=filtered, by=by)
        self.named = self.named or bool(self.used)
        self.used = []
        progress.update += 1
        progress.count += 1
        self.sealing.poll()

    @contextmanager
    def _cut_short(self) -> Iterator[None]:
        """A fault inside is kept; where the script has a `with step:`, that ends."""
        try:
            yield
        except GangError as error:
            self.generation.cut_by(error)
            if self.guarded:
                raise
