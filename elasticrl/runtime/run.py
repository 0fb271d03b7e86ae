"""What a training script sees of its gang: which step comes next, which lanes are here, and nothing of who died.

    with elasticrl.runtime.join() as run:
        run.register(model=model, optimizer=AdamW(lr=3e-4), data=cursor)
        for step in run.steps():
            for lane in run.lanes():
                with lane.rng("dropout"):
                    loss = model(batch(lane.ids())).mean()
                    loss.backward()
                lane.done()
            run.update(max_norm=1.0)

The one idea: a fault ends a *step*, never the loop. Whatever breaks inside of it (a peer died, a plan changed) is remembered,
the body runs out with nothing to do, and `steps` comes with the same step again: the group formed anew in place, everything
registered as it was after the newest update that is whole everywhere. A body that has collectives of its own, or that must
not go on after a cut, is put into `with step:`, which ends it at once. A gang that only grows loses nothing: it trains on until
the newcomers are there, and then to the next state that is kept.

A `Run` is what a script calls. What is true of one generation is in `generation`, what it begins with in `restore`, the states
that it makes in `sealing`, and what is under way in one step in `step`: each goes when that ends.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import IO, TYPE_CHECKING, Any, Self, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch.torch_version import TorchVersion

from elasticrl.config import Tree
from elasticrl.contract.beats import Beat, Stage
from elasticrl.contract.level import means_of
from elasticrl.contract.model import OUTSIDE, STATES
from elasticrl.contract.seat import NoSeat, OwnSeat
from elasticrl.runtime.agree import exchange
from elasticrl.runtime.asked import Kind, ask_once, asks
from elasticrl.runtime.audited import Result, Rows, twice
from elasticrl.runtime.checkpoint.parts import Part
from elasticrl.runtime.context import VAULT, Context, context
from elasticrl.runtime.data.cursor import SampleId
from elasticrl.runtime.generation import Generation, Worker
from elasticrl.runtime.group import Gang
from elasticrl.runtime.interrupt import Broken, GangError
from elasticrl.runtime.keeper import Keeper
from elasticrl.runtime.lanes import Deal
from elasticrl.runtime.lone import claim, only_place
from elasticrl.runtime.misuse import NO_GROUP, Misuse, explained
from elasticrl.runtime.progress import Progress, Sealed
from elasticrl.runtime.restore import restore
from elasticrl.runtime.rng import Streams, seed
from elasticrl.runtime.scalars import Tally
from elasticrl.runtime.sealing import Sealing, see_committed
from elasticrl.runtime.search import Search
from elasticrl.runtime.spikes import Guard
from elasticrl.runtime.spread import ahead, team_mesh
from elasticrl.runtime.step import Body, Lane, Step, named_samples
from elasticrl.runtime.strategy import Reduced
from elasticrl.runtime.team import check_team
from elasticrl.runtime.trained import NO_GANG, Build, Optimizer, Registered, Trained
from elasticrl.runtime.vault.errors import CheckpointStorage, VaultError

if TYPE_CHECKING:
    from pathlib import Path

    from torch.distributed.device_mesh import DeviceMesh

    from elasticrl.contract.orders import Place

T = TypeVar("T")
TORCH = "2.11.0"  # the oldest that `make compat` tries
PATIENCE = 2  # generations in a row in which the vaults refuse; then it is not somebody else's death


def join(config: Path | str | Tree | None = None) -> Run:
    """This process's place in its job: under an agent the one it gets from there, else a world of one.

    Generators are seeded from the job's seed here, so models built after this are alike on all ranks.
    """
    if TorchVersion(torch.__version__) < TORCH:
        raise Misuse(
            f"torch {torch.__version__} is installed here, and this wants {TORCH} or later: pip install torch=={TORCH}"
        )
    try:
        seat: OwnSeat | None = OwnSeat.here()
    except NoSeat:
        seat = None
    found = context(config, seated=seat is not None)
    if not means_of(found.tree.job.level).joins:
        raise Misuse(
            f"This script takes its place in the job itself: that is level exact, and job.level is {found.tree.job.level}. Set "
            "job.level: exact, or start it with elasticrl run --level exact."
        )
    torch.set_num_threads(found.tree.lanes.threads)
    if found.device == "cuda":
        if seat is not None:
            seat.claim()  # which card it has depends on its rank
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
        # The same bits need kernels that add in a fixed order. One that has no such version raises, and says so; if it only
        # warned, memory-efficient attention for one would add in any order although it can do better.
        torch.use_deterministic_algorithms(True, warn_only=found.tree.lanes.exact != "require")
    number = seed(found.tree.job.seed, "init")
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number & 0xFFFFFFFF)  # noqa: NPY002 - the generator that libraries use
    return Run(found, seat)


class Run:
    """A script's view of its job: what is trained, the steps and lanes, and what ranks tell each other."""

    def __init__(self, where: Context, seat: OwnSeat | None) -> None:
        self.context = where
        self.tree = where.tree
        self.progress = Progress()
        self.parts_per_lane = 1  # backward passes of a lane in an update, each a leaf of the tree
        self._worker = Worker(context=where, seat=seat, beat=seat.beat if seat else Beat())
        self.timeline, self.meter = self._worker.timeline, self._worker.meter
        self._given = Registered(where.tree)
        self._search = Search(self._worker)
        self._sealed = Sealed()
        self._keeper: Keeper | None = None
        self._claim: IO[str] | None = None  # on this run's memory, without a daemon
        self._generation: Generation | None = None  # the newest of which a place was taken
        self._sealing: Sealing | None = None  # its, once everything is restored
        self._body: Body | None = None  # of its newest step
        self._refused = 0  # generations in a row that could not be restored from the vaults

    # ---- what a script calls

    def register(
        self,
        *,
        model: torch.nn.Module | Build | None = None,
        optimizer: Optimizer | None = None,
        **parts: Part,
    ) -> None:
        """What is trained, and whatever else belongs to the state: anything with state_dict and load_state_dict, or pieces.

        `optimizer` is a Rule (AdamW, SGD, stock(...) of `runtime.optim`), a function from a parameter's name to one, or torch
        optimizers over the model's parameters, one or a list, whose groups are then looked at before each update. For
        strategies `fsdp` and `deepspeed`, `model` is a function of a DeviceMesh that returns the model, for `fsdp` with
        `fully_shard` applied: each generation builds it anew.
        """
        if model is not None:
            if optimizer is None:
                raise Misuse("register(model=...) needs optimizer=... too: a rule such as AdamW(lr=3e-4).")
            self.train(model=(model, optimizer))
        elif optimizer is not None:
            raise Misuse("register(optimizer=...) needs model=... too.")
        for name, part in parts.items():
            self._check_open("register")
            self._given.add(name, part)

    def train(self, **roles: tuple[torch.nn.Module | Build, Optimizer]) -> None:
        """Several models that are updated together, each with its optimizer: actor=(model, AdamW()), critic=..."""
        self._check_open("train")
        for name, (model, optimizer) in roles.items():
            self._given.train(name, model, optimizer)

    @property
    def model(self) -> torch.nn.Module:
        """The registered model, as this generation computes with it."""
        return self.role("model").model

    def role(self, name: str) -> Trained:
        """One of what `train` was given."""
        return self._given.role(name)

    def lends(self, give: Callable[[int], Rows], take: Callable[[int, Rows | None], None]) -> None:
        """For who keeps what a lane's passes are made from: a lane that is computed twice (`audit.lanes`) needs it on another
        rank too. `give(lane)` returns its tensors by name, `take(lane, rows)` puts them where the passes look, and
        `take(lane, None)` takes them away again.
        """
        self._given.audits.give, self._given.audits.take = give, take

    def on_let_go(self, call: Callable[[], None]) -> None:
        """`call` is called between two generations, before the next one's models are built: for who keeps one of those that
        `model` or `role` gave. With `fsdp` and `deepspeed` there would be two of it in memory.
        """
        self._given.letting_go.append(call)

    def steps(self, limit: int | None = None) -> Iterator[Step]:
        """The steps, from where the job is; one that was cut short comes again. Ends when all are made, or it is time to end.

        `limit` stands in for `job.steps`, if given.
        """
        if not self._given.roles:
            raise Misuse("Nothing is registered: call run.register(model=..., optimizer=...) before run.steps().")
        if self._generation is None and dist.is_initialized():
            raise Misuse(f"This script has made a process group. {NO_GROUP}")
        self._given.asked = limit or self.tree.job.steps or None
        beat, seat = self._worker.beat, self._worker.seat
        while (sealing := self._enter()) is not None:
            generation = sealing.generation
            with suppress(GangError):  # the step is over, and comes again
                while not (sealing.ending or sealing.parting or generation.cut):
                    if self._given.limit is not None and self.progress.step >= self._given.limit:
                        sealing.finish()
                        break
                    beat.phase("update")
                    sealing.poll()
                    self._body = Body(sealing)
                    yield Step.of(self.progress.step, self._body)
                    if not generation.cut:
                        self._body.end()
            over = beat.now.phase == "done"
            generation.leave()
            if self._worker.asked_to_end and not over and not sealing.saved_last:
                self._worker.say(
                    "ended without a last save: the gang broke up first; the newest steps are in the vaults alone"
                )
            if seat is None and (over or sealing.ending):
                return

    def claim(self) -> None:
        """Waits until this process has a rank, where it began before it had one (`agent.load_ahead`). `steps`, `rank` and
        `world` do it too: call it before anything else that only a process of the gang should do, such as opening a log.
        """
        if self._worker.seat is not None:
            self._worker.seat.claim()

    def end(self, steps: int) -> None:
        """The job is over when so many steps are made: in place of the limit of `steps`, for scripts that find it out on the
        way. All ranks must call it alike, in a step, or in the `load_state_dict` of a part that has kept it.
        """
        self._given.asked = steps

    def lanes(self) -> Iterator[Lane]:
        """The lanes that this rank carries now, one after the other."""
        return self._now.passes("model")

    def updates(self, count: int) -> Iterator[int]:
        """The updates of a step that has several, by number, each to end with `run.update()`. After a fault the step comes
        again from its first one that is not whole everywhere, where others make all of a step again: states between them are
        kept (`vault.inside`). The body runs from its top then, so what is registered changes after the updates, not before.
        """
        return self._now.updates(count)

    def update(
        self, *, scale: float | None = None, max_norm: float | None = None, lr_factor: float = 1.0
    ) -> Reduced | None:
        """The sum of all lanes' gradients times `scale` (1 / lanes if None), clipped to `max_norm`, applied on every rank.

        None if the step was cut short: it will come again.
        """
        scale = 1.0 / self.tree.lanes.count if scale is None else scale
        found = self.update_all(scale=scale, max_norm=max_norm, lr_factor=lr_factor)
        return None if found is None else found[next(iter(self._given.roles))]

    @property
    def fills(self) -> bool:
        """While a model is built that is sharded or shared by a team: are its trained weights overwritten at once by what was
        kept? A builder need not read them then (`runtime.outline`).
        """
        return self._generation is not None and self._generation.fills

    def phase(self, name: str) -> AbstractContextManager[None]:
        """What is inside is this phase: for beats, and for the budget after which a hang is one. Where ranks wait for each
        other inside, all enter it: who waits in another phase is measured by that one's budget.
        """
        if name in STATES:
            raise Misuse(
                f"run.phase({name!r}): no phase can be called so: it is what the runtime calls a state of its own."
            )
        return self._worker.beat.within(name)

    @property
    def streams(self) -> Streams:
        """The job's random streams at the present step and update."""
        return self.progress.streams(self.tree.job.seed)

    @property
    def carried(self) -> Sequence[int]:
        """The lanes that are here in this generation."""
        self._given.audits.by_itself = True
        return self._carried

    @property
    def _carried(self) -> Sequence[int]:
        return self._generation.carried if self._generation else (0,)

    @property
    def rounds(self) -> int:
        """Lanes of the rank, or team, that carries most: so many passes all make where they must keep step."""
        return self._generation.deal.rounds if self._generation else 1

    @property
    def rank(self) -> int:
        """In this generation; before the first, in that. For names and logs; nothing that is computed may depend on it."""
        return self._place.rank if self._place else self._to_be("RANK", 0)

    @property
    def world(self) -> int:
        """Ranks of this generation; before the first, of that."""
        return self._place.world if self._place else self._to_be("WORLD_SIZE", 1)

    @property
    def generation(self) -> int:
        """This generation's number."""
        return self._place.generation if self._place else 0

    @property
    def first(self) -> bool:
        """Of the workers of its node this one speaks for the node."""
        return self.slot == 0

    @property
    def slot(self) -> int:
        """This worker's number among those of its node."""
        return self._place.slot if self._place else 0

    @property
    def asks(self) -> bool:
        """Of the members of its team this one asks others for something, and all get it (`ask_once`)."""
        return self._generation is None or asks(self._generation.hops)

    @property
    def sealed(self) -> int:
        """Steps that no single fault can take back."""
        return self._sealed.steps

    @property
    def sealed_digest(self) -> str | None:
        """Of the state after them; None where none was made (see lanes.digest)."""
        return self._sealed.digest

    @property
    def mesh(self) -> DeviceMesh:
        """Of this generation's ranks, for models that are sharded and not trained."""
        from torch.distributed.device_mesh import DeviceMesh

        return DeviceMesh.from_group(self._gang.group, self.context.device)

    @property
    def team_mesh(self) -> DeviceMesh:
        """Of this generation's team, for models that it shares and does not train."""
        assert self._generation is not None
        return team_mesh(self._generation.team, self._generation.tokens, self.context.device)

    @property
    def life(self) -> str:
        """What tells this generation of the job from any other, also of a job that had the same name: its gang's store."""
        return f"{self._place.generation} {self._place.endpoint}" if self._place else ""

    def check(self, what: str) -> None:
        """Raises GangError if the gang was told to part: for those who wait for something that is no collective."""
        if self._generation is not None:
            self._generation.flag.check(what)

    def waits(self, *, alone: bool = False) -> None:
        """For those who wait for something outside of the gang, under a deadline of their own: no hang, so the phase's budget
        counts from here. `alone`: the others may be through with it, and wait for this worker, which is excused until the next
        phase or collective begins, or `with run.alone():` ends. To be called now and then, by the training thread, which alone
        beats.
        """
        self._worker.beat.still(OUTSIDE if alone else "")

    def alone(self) -> AbstractContextManager[None]:
        """Inside, `waits(alone=True)` may be called: behind it, this worker is at work again. For the training thread."""
        return self._worker.beat.alone()

    @contextmanager
    def outside(self) -> Iterator[None]:
        """Inside, something outside of the gang is waited for, which is no work of this rank's. For the training thread."""
        begun = time.perf_counter()
        try:
            with self._worker.beat.waiting():
                yield
        finally:
            self.meter.waited_s += time.perf_counter() - begun

    # ---- what a trainer with several roles and updates calls

    def passes(self, role: str) -> Iterator[Lane]:
        """As `lanes`, for one of several roles. With `parts_per_lane`, `lane.index` counts leaves: divmod it by that."""
        return self._now.passes(role)

    def update_all(
        self,
        *,
        scale: float = 1.0,
        max_norm: float | None = None,
        lr_factor: float = 1.0,
        keeps: bool | None = None,
        skips: bool | None = None,
        guard: Guard | None = None,
    ) -> Mapping[str, Reduced] | None:
        """One version of all roles: none applies before all of them are reduced everywhere. Without `keeps` the state after it
        is none that the step could be taken up from, and is not kept. None: it is one inside of `updates` only, as a body that
        does not know how many updates are made would make them all once more.

        A norm that is not finite ends the job; with `skips` all ranks leave the update out, and the ledger says so. Either, and
        not None, looks also at the tallied sums whose names end in loss. A `guard` (`runtime.spikes`) looks for norms and
        losses that are far above those of the updates before.
        """
        return self._now.update(
            scale=scale, max_norm=max_norm, lr_factor=lr_factor, keeps=keeps, skips=skips, guard=guard
        )

    def used(
        self, lane: int, ids: Sequence[SampleId], turn: int = 0, *, filtered: bool = False, by: int | None = None
    ) -> None:
        """These samples of a lane enter the next update, or were looked at and left out of it (`filtered`). `by`: the weights
        after so many steps have generated them.
        """
        self._now.used.append((lane * self.parts_per_lane, turn, named_samples(ids, "run.used"), filtered, by))

    def exchange(self, tallies: Mapping[int, Tally]) -> Tally:
        """The whole batch's tally from each carried lane's. Collective: use it inside of `with step:`."""
        self._now.generation.check_cut()
        sample = next(iter(tallies.values()))
        zero = sample.like([0.0] * sample.width)
        n = self.parts_per_lane
        leaves = {lane * n + i: zero if i else tally for lane, tally in tallies.items() for i in range(n)}
        return next(iter(self._given.roles.values())).live.exchange(leaves)

    def tell(self, words: Any) -> list[Any]:
        """Every rank's words, in rank order; plain values. Collective: use it inside of `with step:`."""
        if self._generation is not None:
            self._generation.check_cut()
        return exchange(self._gang, words)

    def ask_once(self, ask: Callable[[], T], kind: Kind[T]) -> T:
        """What `ask` comes to, which is no function of what a team's members know alike: one of them calls it, and all have
        what came. Without teams every worker calls its own. Collective of a team: use it inside of `with step:`.
        """
        generation = self._generation
        if generation is None or not generation.hops:
            return ask()
        generation.check_cut()
        return ask_once(generation.hops, ask, kind)

    def twice(self, what: str, result: Callable[[int], Result], *, lends: bool = False) -> None:
        """`what` this step made of each lane outside of its updates, its samples say, is made of one lane once more on another
        node if it is its turn (`audit.lanes`). `result(lane)` digests what this rank has made of it, or makes of it again. With
        `lends` it finds there what the lane's passes are made from (`Run.lends`). Collective: use it inside of `with step:`.
        """
        generation = self._generation
        assert generation is not None, "there is one inside of a step"
        generation.check_cut()
        twice(generation, self._given.audits, self.progress, what, result, lends=lends)

    def keep(self, *, always: bool = True) -> None:
        """The state is worth keeping although no update was made: a rollout is done. Use it inside of `with step:`. What
        updates change is as it was kept before, and is not copied once more; where it was not (`vault.every`), nothing is.
        Not `always` means: where it costs no more than `vault.inside` of the time since the last one.
        """
        self._now.keep(always=always)

    def scored(self, score: float) -> None:
        """The state that this step ends with was evaluated, and came to this score, higher is better. Its checkpoint says so
        (`checkpoint.keep_best`). All ranks must call it alike, after the step's updates.
        """
        self.progress.score = self.progress.step + 1, float(score)

    def digest(self) -> str:
        """Of all roles' parameters and optimizer state as they are now. Collective."""
        return " ".join(f"{name}:{role.live.digest().hex}" for name, role in sorted(self._given.roles.items()))

    # ---- life

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None = None, *_: object) -> None:
        if self._generation is not None:
            self._generation.leave()
        if self._keeper is not None:
            if kind is None:
                see_committed(self._worker, self._keeper, self.generation)
            over = kind is None and self.progress.step >= (self._given.limit or 0)
            self._keeper.close(over=over, failed=kind is not None)
            self._keeper = None
        if self._claim is not None:
            self._claim.close()
            self._claim = None
        if (sentence := explained(error)) is not None:
            raise sentence from error

    # ---- inside

    def _enter(self) -> Sealing | None:
        """Take a place and be ready to train there; None when it is time to end."""
        while (place := self._next_place()) is not None:
            self.timeline.begin()
            new = self._generation is None
            parted = self._sealing is not None and self._sealing.parting
            self._sealing = self._body = None
            self._generation = generation = self._generation_at(place, parted)
            beat, say = self._worker.beat, self._worker.say
            try:
                with beat.waiting():
                    if new and place.grows:  # the gang trains on meanwhile; others would wait for it
                        ahead(generation, self._given)
                        self.timeline.mark("ahead")
                    generation.form()
                    beat.restoring()
                    keeper = self._hold()
                    sealing = restore(generation, self._search, keeper, self._given, self.progress, self._sealed)
                beat.training()
            except GangError as error:
                generation.cut_by(error)
                # An interface that is not there; nobody else would say it.
                if not generation.formed and isinstance(error, Broken):
                    say(f"generation {place.generation} was not formed: {error}")
            except (VaultError, CheckpointStorage) as error:  # what was to be read died too: the next plan knows
                self._refused += 1
                if self._worker.seat is None or self._refused > PATIENCE:
                    raise
                generation.cut_by(GangError(str(error)))
            else:
                self._sealing, self._refused, generation.trains = sealing, 0, True
                say(
                    f"generation {place.generation}: rank {place.rank} of {place.world}, lanes "
                    f"{', '.join(map(str, self._carried))}, from step {sealing.now} ({self.timeline})"
                )
                return sealing
            generation.leave()
        return None

    def _next_place(self) -> Place | None:
        worker = self._worker
        if worker.seat is not None:
            return worker.seat.wait(done=worker.beat.now.state is Stage.DONE)
        if self._generation is not None:
            return None
        if VAULT not in os.environ:  # else somebody's server has it
            self._claim = claim(self.context.vault, self.context.notes_dir)
        return only_place(self._hold())

    def _generation_at(self, place: Place, parted: bool) -> Generation:
        dealt = Deal.interleaved if self._given.interleaved else Deal.contiguous
        check_team(self.tree.model, place)
        deal = dealt(place.all_lanes, place.world // place.team)
        return Generation(self._worker, place, deal, parts_per_lane=self.parts_per_lane, parted=parted)

    @property
    def _now(self) -> Body:
        """The step that is made."""
        if self._body is None:
            raise Misuse(NO_GANG)
        return self._body

    @property
    def _gang(self) -> Gang:
        if self._generation is None:
            raise Misuse(NO_GANG)
        return self._generation.gang

    @property
    def _place(self) -> Place | None:
        return self._generation.place if self._generation else None

    def _to_be(self, name: str, alone: int) -> int:
        """What the environment says of the first generation."""
        self.claim()
        return alone if self._worker.seat is None else int(os.environ.get(name, alone))

    def _check_open(self, doing: str) -> None:
        if self._generation is not None:
            raise Misuse(
                f"{doing}() comes before run.steps(): what belongs to the state cannot change in the middle of a job."
            )

    def _hold(self) -> Keeper:
        if self._keeper is None:
            slot = self._place.slot if self._place else 0
            self._keeper = Keeper(self.context, writer=f"w{slot}", say=self._worker.say)
        return self._keeper
