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

What makes one generation of the runtime is in `_enter`: reach the store, form the group, agree, restore, go on.
"""

from __future__ import annotations

import gc
import os
import random
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from copy import deepcopy
from datetime import UTC, datetime
from math import inf
from typing import IO, TYPE_CHECKING, Any, Self

import numpy as np
import torch
from torch._C._distributed_c10d import HashStore, Store
from torch.torch_version import TorchVersion

from elasticrl.config import Tree
from elasticrl.contract.beats import Beat, Stage
from elasticrl.contract.model import OUTSIDE, STATES, Rung
from elasticrl.contract.orders import Halt, Place
from elasticrl.contract.seat import NoSeat, Order, OwnSeat
from elasticrl.runtime import alike, notes
from elasticrl.runtime.agree import Agreed, exchange
from elasticrl.runtime.buffers import Buffers
from elasticrl.runtime.checkpoint import tree as trees
from elasticrl.runtime.checkpoint.flat import FlatShard
from elasticrl.runtime.checkpoint.load import open_checkpoint, permitted
from elasticrl.runtime.checkpoint.manifest import Conditions, differences, parse_name
from elasticrl.runtime.checkpoint.parts import Ambient, Emptied, Part, Parts
from elasticrl.runtime.checkpoint.parts import Replicated as Plain
from elasticrl.runtime.checkpoint.shelf import read_manifest
from elasticrl.runtime.context import VAULT, Context, context
from elasticrl.runtime.data.cursor import Cursor, SampleId, Segment
from elasticrl.runtime.data.loader import StreamLoader
from elasticrl.runtime.digest import Digest
from elasticrl.runtime.group import Broken, Gang, GangError, Interrupt, form, reach
from elasticrl.runtime.keeper import SLICE_S, Keeper, facts_of
from elasticrl.runtime.lanes import Deal
from elasticrl.runtime.lone import claim
from elasticrl.runtime.meet import Meeting
from elasticrl.runtime.misuse import Misuse
from elasticrl.runtime.progress import Progress, Timeline
from elasticrl.runtime.rng import Streams, seed
from elasticrl.runtime.scalars import Tally
from elasticrl.runtime.search import Search, thin
from elasticrl.runtime.spread import strategy_for
from elasticrl.runtime.step import Lane, Step
from elasticrl.runtime.strategy import Reduced, Strategy
from elasticrl.runtime.traffic import Meter
from elasticrl.runtime.trained import Build, Optimizer, Settings, Trained, check_rules, rules, strategy_of
from elasticrl.runtime.vault.errors import CheckpointRefused, CheckpointStorage, Outlived, VaultError
from elasticrl.runtime.vault.version import Lineage, Version, grow
from elasticrl.runtime.zero import CLOSE, Zero

if TYPE_CHECKING:
    from pathlib import Path

    from torch.distributed.device_mesh import DeviceMesh

    from elasticrl.runtime.shard import Shard
    from elasticrl.runtime.vault.piece import Piece
    from elasticrl.runtime.vault.source import Source

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
    torch.set_num_threads(found.tree.lanes.threads)
    if found.device == "cuda":
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
        self.timeline = Timeline()
        self.progress = Progress()
        self.parts_per_lane = 1  # backward passes of a lane in an update, each a leaf of the tree
        self.meter = Meter()  # what this process's collectives cost
        self.sealed = 0  # steps that no single fault can take back
        self.sealed_digest: str | None = None  # of the state after them; None where none was made (see lanes.digest)
        self._seat = seat
        self._beat = seat.beat if seat else Beat()
        self._search = Search(where, seat, self._beat, self._say)
        self._keeper: Keeper | None = None
        self._claim: IO[str] | None = None  # on this run's memory, without a daemon
        self._roles: dict[str, Trained] = {}
        self._others: dict[str, Part] = {}
        self._parts = Parts()
        self._cursor: Cursor | None = None
        self._place: Place | None = None
        self._gang: Gang | None = None
        self._flag = Interrupt()
        self._deal = Deal.contiguous(1, 1)
        self._lineage: Lineage = ()
        self._counts: dict[Version, int] = {}  # a version's number of updates: what a shard calls it
        self._now = Version(0)  # of the newest state that was kept
        self._cut: GangError | None = None
        self._inside = False  # it trains: a plan that only adds to its gang need not end that at once
        self._added: Interrupt | None = None  # the flag of a generation in which this rank was told of such a plan
        self._joined: Interrupt | None = None  # and in which it has seen that those are there whom the plan adds
        self._parting = False  # all ranks know it, and part at the next state that is kept
        self._parted = False  # they have: those who come now are all there
        self._guarded = False
        self._fills = False
        self._lane: Lane | None = None
        self._used: list[tuple[int, int, tuple[SampleId, ...]]] = []
        self._changed = False  # an update since the newest state that was kept, after which the step could be taken up
        self._counted = False  # the step's updates are made in `updates`
        self._worth = True  # whether to keep another state inside of this step, as all ranks know
        self._ending = False  # all ranks know that some of them are asked to end
        self._digest: tuple[Digest, ...] = ()  # of the newest version, this rank's part
        self._asked: int | None = None  # so many steps, by the script or the file; None: as many as there are data for
        self._limit: int | None = None  # so many steps, as of this generation: a restored cursor may have more or fewer
        self._turning: Strategy | None = None  # whose lane it is
        self._restored: int | None = None  # steps of a state that was restored, and not told of yet
        self._saved_last = False
        self._refused = 0  # generations in a row that could not be restored from the vaults
        self._first: dict[str, Any] | None = None  # parts' state before anything was done, until an update is sealed
        self._begun = False  # an update was sealed: there is no beginning anew
        self._told_close = False  # that the bits are not exact
        self._letting_go: list[Callable[[], None]] = []  # what others hold of a generation that is over
        self._on_disk = -1  # so many updates are in the checkpoint that this generation went on from

    # ---- what a script calls

    def register(
        self,
        *,
        model: torch.nn.Module | Build | None = None,
        optimizer: Optimizer | None = None,
        **parts: Part,
    ) -> None:
        """What is trained, and whatever else belongs to the state: anything with state_dict and load_state_dict, or pieces.

        `optimizer` is a Rule (AdamW, SGD of `runtime.optim`), a function from a parameter's name to one, or a torch AdamW or
        SGD over the model's parameters, whose groups are then looked at before each update. For strategies `fsdp` and
        `deepspeed`, `model` is a function of a DeviceMesh that returns the model, for `fsdp` with `fully_shard` applied: each
        generation builds it anew.
        """
        if model is not None:
            if optimizer is None:
                raise Misuse("register(model=...) needs optimizer=... too: a rule such as AdamW(lr=3e-4).")
            self.train(model=(model, optimizer))
        elif optimizer is not None:
            raise Misuse("register(optimizer=...) needs model=... too.")
        for name, part in parts.items():
            self._check_open("register")
            if name in self._others or name in self._roles or name in {"run", "ledger", "ambient"}:
                raise Misuse(f"There is a part called {name!r} already.")
            if isinstance(part, Cursor):
                if self._cursor is not None:
                    raise Misuse("There can be one cursor: it is what the ledger is audited against.")
                self._cursor = part
            self._others[name] = part

    def train(self, **roles: tuple[torch.nn.Module | Build, Optimizer]) -> None:
        """Several models that are updated together, each with its optimizer: actor=(model, AdamW()), critic=..."""
        self._check_open("train")
        for name, (model, optimizer) in roles.items():
            self._roles[name] = role = Trained(model, rules(optimizer, model), Buffers(name))
            if isinstance(model, torch.nn.Module):
                check_rules(name, model, role.rule_of)
            if isinstance(optimizer, torch.optim.Optimizer):
                self._others[f"{name}_settings"] = Settings(optimizer)

    @property
    def model(self) -> torch.nn.Module:
        """The registered model, as this generation computes with it."""
        return self.role("model").model

    def role(self, name: str) -> Trained:
        """One of what `train` was given."""
        try:
            return self._roles[name]
        except KeyError:
            raise Misuse(f"{name!r} is not trained here; there are {sorted(self._roles)}.") from None

    def on_let_go(self, call: Callable[[], None]) -> None:
        """`call` is called between two generations, before the next one's models are built: for who keeps one of those that
        `model` or `role` gave. With `fsdp` and `deepspeed` there would be two of it in memory.
        """
        self._letting_go.append(call)

    def steps(self, limit: int | None = None) -> Iterator[Step]:
        """The steps, from where the job is; one that was cut short comes again. Ends when all are made, or it is time to end.

        `limit` stands in for `job.steps`, if given.
        """
        if not self._roles:
            raise Misuse("Nothing is registered: call run.register(model=..., optimizer=...) before run.steps().")
        self._asked = limit or self.tree.job.steps
        while self._enter():
            with suppress(GangError):  # kept in _cut by whoever raised it
                while not (self._ending or self._parting or self._cut):
                    if self._limit is not None and self.progress.step >= self._limit:
                        self._finish()
                        break
                    yield self._begin_step()
                    if not self._cut:
                        self._end_step()
            over = self._beat.now.phase == "done"
            self._leave()
            if self._seat and self._seat.halt and self._seat.halt.save and not over and not self._saved_last:
                self._say(
                    "ended without a last save: the gang broke up first; the newest steps are in the vaults alone"
                )
            if self._seat is None and (over or self._ending):
                return

    def end(self, steps: int) -> None:
        """The job is over when so many steps are made: in place of the limit of `steps`, for scripts that find it out on the
        way. All ranks must call it alike, in a step, or in the `load_state_dict` of a part that has kept it.
        """
        self._asked = self._limit = steps

    def lanes(self) -> Iterator[Lane]:
        """The lanes that this rank carries now, one after the other."""
        yield from self._pass_over("model")

    def updates(self, count: int) -> Iterator[int]:
        """The updates of a step that has several, by number, each to end with `run.update()`. After a fault the step comes
        again from its first one that is not whole everywhere, where others make all of a step again: states between them are
        kept (`vault.inside`). The body runs from its top then, so what is registered changes after the updates, not before.
        """
        while self._cut is None and self.progress.update < count:
            self._counted, number = True, self.progress.update
            yield number
            if self._cut is None and self.progress.update != number + 1:
                made = self.progress.update - number
                raise Misuse(
                    f"run.updates({count}) counts its rounds by run.update(), which was called {made} times in one."
                )

    def update(
        self, *, scale: float | None = None, max_norm: float | None = None, lr_factor: float = 1.0
    ) -> Reduced | None:
        """The sum of all lanes' gradients times `scale` (1 / lanes if None), clipped to `max_norm`, applied on every rank.

        None if the step was cut short: it will come again.
        """
        scale = 1.0 / self.tree.lanes.count if scale is None else scale
        found = self.update_all(scale=scale, max_norm=max_norm, lr_factor=lr_factor)
        return None if found is None else found[next(iter(self._roles))]

    @property
    def fills(self) -> bool:
        """While a sharded model is built: are its trained weights overwritten at once by what was kept? A builder need not read
        them then (`runtime.outline`).
        """
        return self._fills

    def phase(self, name: str) -> AbstractContextManager[None]:
        """What is inside is this phase: for beats, and for the budget after which a hang is one. Where ranks wait for each
        other inside, all enter it: who waits in another phase is measured by that one's budget.
        """
        if name in STATES:
            raise Misuse(
                f"run.phase({name!r}): no phase can be called so: it is what the runtime calls a state of its own."
            )
        return self._beat.within(name)

    @property
    def streams(self) -> Streams:
        """The job's random streams at the present step and update."""
        return Streams(seed=self.tree.job.seed, step=self.progress.step, update=self.progress.update)

    @property
    def carried(self) -> Sequence[int]:
        """The lanes that are here in this generation."""
        return self._deal.carried[self._place.rank if self._place else 0]

    @property
    def rounds(self) -> int:
        """Lanes of the rank that carries most: so many passes all make where they must keep step."""
        return self._deal.rounds

    @property
    def rank(self) -> int:
        """In this generation; before the first, in that. For names and logs; nothing that is computed may depend on it."""
        if self._place is None and self._seat is not None:
            return int(os.environ.get("RANK", "0"))
        return self._place.rank if self._place else 0

    @property
    def world(self) -> int:
        """Ranks of this generation; before the first, of that."""
        if self._place is None and self._seat is not None:
            return int(os.environ.get("WORLD_SIZE", "1"))
        return self._place.world if self._place else 1

    @property
    def first(self) -> bool:
        """Of the workers of its node this one speaks for the node."""
        return self._place is None or self._place.slot == 0

    @property
    def mesh(self) -> DeviceMesh:
        """Of this generation's ranks, for models that are sharded and not trained."""
        from torch.distributed.device_mesh import DeviceMesh

        return DeviceMesh.from_group(self._gang_now.group, self.context.device)

    @property
    def life(self) -> str:
        """What tells this generation of the job from any other, also of a job that had the same name: its gang's store."""
        return f"{self._place.generation} {self._place.endpoint}" if self._place else ""

    def check(self, what: str) -> None:
        """Raises GangError if the gang was told to part: for those who wait for something that is no collective."""
        self._flag.check(what)

    def waits(self, *, alone: bool = False) -> None:
        """For those who wait for something outside of the gang, under a deadline of their own: no hang, so the phase's budget
        counts from here. `alone`: the others may be through with it, and wait for this worker, which is excused until the next
        phase or collective begins, or `with run.alone():` ends. To be called now and then, by the training thread, which alone
        beats.
        """
        self._beat.still(OUTSIDE if alone else "")

    def alone(self) -> AbstractContextManager[None]:
        """Inside, `waits(alone=True)` may be called: behind it, this worker is at work again. For the training thread."""
        return self._beat.alone()

    @contextmanager
    def outside(self) -> Iterator[None]:
        """Inside, something outside of the gang is waited for, which is no work of this rank's. For the training thread."""
        begun = time.perf_counter()
        try:
            with self._beat.waiting():
                yield
        finally:
            self.meter.waited_s += time.perf_counter() - begun

    @property
    def generation(self) -> int:
        """This generation's number."""
        return self._place.generation if self._place else 0

    # ---- what a trainer with several roles and updates calls

    def passes(self, role: str) -> Iterator[Lane]:
        """As `lanes`, for one of several roles. With `parts_per_lane`, `lane.index` counts leaves: divmod it by that."""
        yield from self._pass_over(role)

    def update_all(
        self, *, scale: float = 1.0, max_norm: float | None = None, lr_factor: float = 1.0, keeps: bool | None = None
    ) -> Mapping[str, Reduced] | None:
        """One version of all roles: none applies before all of them are reduced everywhere. Without `keeps` the state after it
        is none that the step could be taken up from, and is not kept. None: it is one inside of `updates` only, as a body that
        does not know how many updates are made would make them all once more.
        """
        try:
            self._raise_cut()
            found = self._update(scale, max_norm, lr_factor)
            self._changed = self._counted if keeps is None else keeps
            return found
        except GangError as error:
            self._cut_by(error)
            if self._guarded:
                raise
            return None

    def used(self, lane: int, ids: Sequence[SampleId], turn: int = 0) -> None:
        """These samples of a lane enter the next update."""
        if self._cut is None:
            self._used.append((lane * self.parts_per_lane, turn, tuple(ids)))

    def exchange(self, tallies: Mapping[int, Tally]) -> Tally:
        """The whole batch's tally from each carried lane's. Collective: use it inside of `with step:`."""
        self._raise_cut()
        sample = next(iter(tallies.values()))
        zero = sample.like([0.0] * sample.width)
        n = self.parts_per_lane
        leaves = {lane * n + i: zero if i else tally for lane, tally in tallies.items() for i in range(n)}
        return next(iter(self._roles.values())).live.exchange(leaves)

    def tell(self, words: Any) -> list[Any]:
        """Every rank's words, in rank order; plain values. Collective: use it inside of `with step:`."""
        self._raise_cut()
        return exchange(self._gang_now, words)

    def keep(self, *, always: bool = True) -> None:
        """The state is worth keeping although no update was made: a rollout is done. Use it inside of `with step:`. What
        updates change is as it was kept before, and is not copied once more; where it was not (`vault.every`), nothing is.
        Not `always` means: where it costs no more than `vault.inside` of the time since the last one.
        """
        self._raise_cut()
        full = self._hold().full
        if full is not None and self._counts.get(full) != self.progress.count:
            return
        self._settle_votes()  # where all hear of each other how long it is since the last one
        if always or self._worth:
            # In a gang that is broken up it may be what an aborted pass let through.
            self._flag.check("keeping what was made")
            unchanged = self._roles if full is not None else ()
            self._snapshot(Version(self.progress.step, self.progress.mark + 1), whole=False, unchanged=unchanged)
            self._hold().loose()  # the script goes on, and may change in place what it registered
            self._part_inside()

    def digest(self) -> str:
        """Of all roles' parameters and optimizer state as they are now. Collective."""
        return " ".join(f"{name}:{role.live.digest().hex}" for name, role in sorted(self._roles.items()))

    # ---- life

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._leave()
        if self._keeper is not None:
            if kind is None:
                self._see_committed()
            over = kind is None and self.progress.step >= (self._limit or 0)
            self._keeper.close(over=over, failed=kind is not None)
            self._keeper = None
        if self._claim is not None:
            self._claim.close()
            self._claim = None

    def _see_committed(self) -> None:
        """What was saved last is marked as committed on the disk too, by us: nobody does when we have ended."""
        keeper, parsed = self._hold(), parse_name(self._hold().marked or "")
        if self._seat is None or parsed is None:
            return  # not one that published, or alone, where a save is a commit
        limit_s = (self._seat.halt.within_s if self._seat.halt else self.tree.recovery.drain_s) / 2
        limit = time.monotonic() + limit_s
        if self._beat.now.phase != "done":
            self._beat.parked(self.generation)  # waiting for the store is no hang
        while (told := self._seat.committed) is None or told.step < parsed[0].step:
            if time.monotonic() > limit:
                self._say(
                    f"step {parsed[0].step} is saved as {keeper.marked}, but was not committed within {limit_s:g} s: the store "
                    "was away, or the plan had changed. If `elasticrl status` does not name it either, a later run goes on "
                    "from the commit before it."
                )
                return
            time.sleep(SLICE_S)
        self._poll()

    # ---- inside: a generation

    def _enter(self) -> bool:
        """Take a place and be ready to train there; False when it is time to end."""
        while (place := self._next_place()) is not None:
            self.timeline.begin()
            self._flag = Interrupt(self._waits, self.meter)
            self._place, self._cut, self._ending = place, None, False
            self._parted, self._parting = self._parting, False
            if self._seat is not None:
                self._seat.on_order(self._told)
            try:
                with self._beat.waiting():
                    self._form(place)
                    self._beat.restoring()
                    self._restore(place)
                self._beat.training()
            except GangError as error:
                self._cut_by(error)
                if self._gang is None and isinstance(
                    error, Broken
                ):  # an interface that is not there; nobody else would say it
                    self._say(f"generation {place.generation} was not formed: {error}")
            except (VaultError, CheckpointStorage) as error:  # what was to be read died too: the next plan knows
                self._refused += 1
                if self._seat is None or self._refused > PATIENCE:
                    raise
                self._cut_by(GangError(str(error)))
            else:
                self._refused, self._inside = 0, True
                self._say(
                    f"generation {place.generation}: rank {place.rank} of {place.world}, lanes "
                    f"{', '.join(map(str, self.carried))}, from step {self._now} ({self.timeline})"
                )
                return True
            self._leave()
        return False

    def _next_place(self) -> Place | None:
        if self._seat is not None:
            return self._seat.wait(done=self._beat.now.state is Stage.DONE)
        if self._place is not None:
            return None
        if VAULT not in os.environ:  # else somebody's server has it
            self._claim = claim(self.context.vault, self.context.notes_dir)
        keeper = self._hold()
        shelf = keeper.shelf()
        known = [holding.generation for holding in keeper.holdings()] + [entry.generation for entry in shelf]
        generation, lanes = max(known, default=0) + 1, self.tree.lanes.count
        newest = max(shelf, key=lambda entry: (entry.generation, entry.version), default=None)
        saved = newest.version.step if newest else 0  # elsewhere, perhaps: memory here may be older
        return Place(
            generation=generation, born=generation, rank=0, world=1, all_lanes=lanes, resume=saved, nodes=(self.context.node,)
        )  # fmt: skip

    def _told(self, order: Order) -> None:
        """In the watcher's thread: whatever it is, only an order to end with this step lets the step be finished."""
        if isinstance(order, Halt) and order.save:
            return
        flag, place = self._flag, self._place  # in this order: the training thread may be on its way to the next
        if isinstance(order, Place) and place is not None:
            if order.generation <= place.generation:
                return  # the one that was just taken
            if order.grows and order.generation == place.generation + 1 and (self._inside or self._search.waits):
                self._added = self._search.coming = flag
                # Of those that train one is enough: the others hear of it in a vote. Who waits for disks takes none.
                if place.rank == 0 or not self._inside:
                    more = order.world - place.world
                    threading.Thread(target=self._await_newcomers, args=(order, more, flag), daemon=True).start()
                return
        flag.set(order.reason or "the plan changed")
        gang = self._gang
        if gang is not None:
            gang.interrupt(order.reason or "the plan changed")

    def _await_newcomers(self, order: Place, more: int, flag: Interrupt) -> None:
        """In a thread of its own, while the gang trains, or waits for disks, which ends then. Where they do not come, a later
        plan says so, which sets the flag.
        """
        while flag is self._flag:
            try:
                store = reach(order.host, order.port, flag, self.tree.recovery.reform_s)
                Meeting(store, generation=order.generation, world=order.world).wait_for(more, flag, inf)
            except GangError as error:
                if flag.reason is not None:
                    return
                self._say(f"who is to come in generation {order.generation} cannot be seen yet: {error}")
                time.sleep(SLICE_S)  # before it is reached anew
            else:
                self._joined = flag
                if self._search.waits:
                    flag.set(order.reason or "the plan changed")
                return

    def _form(self, place: Place) -> None:
        conf = self.tree
        limit = conf.recovery.reform_s
        if self._seat is None:
            store: Store = HashStore()
        else:
            if not place.endpoint:  # found by a new user, whose etcd had gone and come: the program was blamed for it
                raise GangError("the plan names no place to meet, as no agent had offered one: the next plan will")
            store = reach(place.host, place.port, self._flag, limit)
            self.timeline.mark("reach")
            self._meet(store, place)
        self.timeline.mark("meet")
        self._gang = form(
            generation=place.generation,
            rank=place.rank,
            world=place.world,
            store=store,
            backend="elastic" if place.backend == "gloo" else self.context.backend,
            form_s=limit,
            timeout_s=conf.timeouts.collective_s,
            flag=self._flag,
        )
        self.timeline.mark("form")

    def _meet(self, store: Store, place: Place) -> None:
        """Until all are there. Where some may still load, or the gang that grows trains on, waiting is no hang, and the plan's
        own deadline ends it: the next plan sets the flag.
        """
        limits = self.tree.recovery
        last = place.grows and self._parted  # those of the gang that there was come when all others are there
        newcomer = place.grows and place.born == place.generation
        halted = 0.0

        def turn() -> None:
            nonlocal halted
            if place.rung != Rung.REFORM and (newcomer or not place.grows):
                self._beat.still()
            if newcomer and self._seat and self._seat.halt:
                halted = halted or time.monotonic()
                if time.monotonic() > halted + limits.reform_s / 4:  # a gang that has parted for us is here by then
                    raise GangError("it is time to end, and the gang that this worker was to join has not come")

        meeting = Meeting(store, generation=place.generation, world=place.world)
        meeting.wait_for_all(self._flag, limits.reform_s if last else inf, turn)

    def _restore(self, place: Place) -> None:
        """Everything registered as it was after the newest version that is whole everywhere."""
        keeper, gang = self._hold(), self._gang
        assert gang is not None
        keeper.still()
        agreed = self._search.agree(place, keeper, gang)
        self.timeline.mark("agree")
        kept = self._spread(place, agreed)
        self.timeline.mark("spread")
        self._fill(place, agreed, kept)
        self._limit = self._asked or (self._cursor.steps if self._cursor else None)
        # Before anything is published, which would make them alike.
        alike.check_beginning(agreed, gang, self._cursor, self._roles)
        alike.check_buffers(gang, self._roles, self._others, self._say)
        for role in self._roles.values():
            role.live.publish()
        self.timeline.mark("publish")
        self._changed, self._used, self._digest, self._restored = False, [], (), None
        self._worth = True
        self._counts = {self._now: self.progress.count}
        self._on_disk = self.progress.count if agreed.checkpoint is not None else -1
        # Into the vaults at once: what lies there of another history is dead from now on; and what a node kept for one that
        # died would lie with it alone until the next step is sealed.
        if not agreed.remembered or thin(agreed, self.tree.vault.copies, gang.world):
            self._snapshot(self._now, whole=not self._now.update)
            if keeper.kept is not None:
                keeper.kept.asked = agreed.checkpoint is not None  # it is on the disk already
        if agreed.remembered and keeper.kept is None and not self._now.update:
            # What was restored is digested too: it must be what it was. (What is kept anew is, as all that is kept.)
            self._digest, self._restored = self._digests(), self._now.step
        self._tell_sealed(self._now.step, None)

    def _spread(self, place: Place, agreed: Agreed) -> set[str]:
        """New strategies around the models. Returns the roles whose shard is in this process's memory already."""
        fsdp = any(strategy_of(self.tree, name) == "fsdp" for name in self._roles)
        n, lanes = self.parts_per_lane, place.all_lanes
        self._deal = Deal.interleaved(lanes, place.world) if fsdp else Deal.contiguous(lanes, place.world)
        leaves = Deal(
            lanes=lanes * n,
            carried=tuple(tuple(lane * n + i for lane in mine for i in range(n)) for mine in self._deal.carried),
        )
        count = self._counts.get(agreed.version) if agreed.remembered else None
        self._counts = {}  # until all is restored: a shard that was only begun must not pass for one that is whole
        kept: set[str] = set()
        held = self._let_go(count)
        # With something allowed to be amiss in a checkpoint, a role of its own may not be in it.
        filled = agreed.remembered or (agreed.checkpoint is not None and not self.tree.checkpoint.allow)
        for name, role in self._roles.items():
            shard = held.pop(name, None)
            self._fills = filled and strategy_of(self.tree, name) == "fsdp"
            try:
                role.strategy = strategy_for(
                    name, role, self.context, self._gang_now, deal=leaves, shard=shard, fills=self._fills
                )
            finally:
                self._fills = False
            if shard is not None and role.strategy.shard is shard and count is not None:
                shard.go_to(count)
                kept.add(name)
        if not self._told_close and any(isinstance(role.strategy, Zero) for role in self._roles.values()):
            self._told_close = True
            self._say(CLOSE)
        return kept

    def _let_go(self, count: int | None) -> dict[str, Shard]:
        """Ends the last generation's strategies, all before a new one is built: with a sharded model there would be two of it
        in memory. Returns the roles' shards that have the state after `count` updates.
        """
        for call in self._letting_go:
            call()
        held: dict[str, Shard] = {}
        built = False
        for name, role in self._roles.items():
            if role.strategy is not None:
                if count is not None and count in role.strategy.shard.held:
                    held[name] = role.strategy.shard
                built = built or not isinstance(role.given, torch.nn.Module)
            role.let_go()
        self._turning, self._parts = None, Parts()
        if built:
            gc.collect()  # FSDP2 and DeepSpeed tie a model and its hooks into circles
        return held

    def _fill(self, place: Place, agreed: Agreed, kept: set[str]) -> None:
        """Fills all that is registered, from the vault, a checkpoint or anew; what is `kept` stays as it is."""
        self._parts = self._whole_state()
        if self._cursor is not None:
            self._cursor.allow |= set(self.tree.checkpoint.allow)
        facts = facts_of(
            self.context,
            batch=self._cursor.batch if self._cursor else 0,
            data=self._cursor.describe() if self._cursor else "",
        )
        self._permit(agreed, facts)
        values = self._read(place, agreed, kept)
        self._permit_memory(agreed)
        self._now = agreed.version
        self._lineage = grow(agreed.lineage, place.generation, agreed.version)
        self._begin_keeping(place, agreed, facts)
        if "ledger" in values:
            self._hold().restored(trees.join(values["ledger"], {}))
        self.timeline.mark("restore")
        for sentence in agreed.passed_over:
            self._say(sentence)
        if agreed.version.step < place.resume:
            self._say(
                f"step {place.resume} was committed, but cannot be read: {agreed.version.step} is the newest that is good"
            )

    def _whole_state(self) -> Parts:
        """All that is registered, and what the run keeps beside it."""
        parts = Parts()
        for name, role in self._roles.items():
            parts.register(name, FlatShard(role.live.shard, model=name, optimizer=f"{name}_optimizer"), steady=True)
        for name, part in self._others.items():
            parts.register(name, part)
        parts.register("run", self.progress)
        parts.register("ambient", Ambient())  # for libraries that draw from nobody's stream
        parts.register("ledger", self._hold().ledger)
        return parts

    def _read(self, place: Place, agreed: Agreed, kept: set[str]) -> Mapping[str, Any]:
        """Puts what was agreed on into the parts, or puts them back to the beginning; raises where that would lose steps.
        Returns the values that were read.
        """
        keeper, parts, allow = self._hold(), self._parts, self.tree.checkpoint.allow
        values: Mapping[str, Any] = {}
        lived = self._note_first(agreed, parts)
        models = {name: role.live.shard.layout.shapes for name, role in self._roles.items()}
        if agreed.whole is not None:
            timeout_s = self.tree.vault.timeout_s

            def choose(source: Source) -> Sequence[Piece]:
                alike.check_kept(source, models)
                return parts.needs(source, but=kept)

            with keeper.vault.gather(
                agreed.whole,
                choose=choose,
                timeout_s=timeout_s,
                check=lambda: self._flag.check("getting shards"),
            ) as source:
                self.timeline.mark("gather")
                parts.restore(source, allow=() if agreed.remembered else allow, but={*kept, "ledger"})
                values = source.values
            keeper.void_after(agreed.whole.version, agreed.whole.generation)
        elif agreed.checkpoint is not None:
            with open_checkpoint(keeper.place, agreed.checkpoint, check=False) as source:
                alike.check_kept(source, models)
                parts.restore(source, allow=allow, but={"ledger"})
                values = source.values
        elif not (self.progress.count or place.resume or self._begun):
            self._begin_anew(parts, lived)
        elif not place.resume:
            raise Outlived(
                f"what was made until step {self.progress.step} is lost with those who had it, and nothing was saved before: "
                "a fresh process begins anew, as this one's model is no longer what it began with"
            )
        else:
            raise CheckpointRefused(
                f"Step {max(place.resume, self.progress.step)} was reached, but no vault and no checkpoint at {keeper.place} "
                "has a whole state. Bring the checkpoints back, or start a job of another name."
            )
        return values

    def _begin_keeping(self, place: Place, agreed: Agreed, facts: Conditions) -> None:
        """From here on the keeper keeps what this generation makes."""
        keeper = self._hold()
        keeper.publishing(rank=place.rank, nodes=place.nodes, soon=agreed.exposed)
        keeper.begin(
            generation=place.generation,
            rank=place.rank,
            world=place.world,
            slots=place.slots,
            nodes=place.nodes,
            lineage=self._lineage,
            segments=self._segments,
            lanes=self.carried,
            facts=facts,
            whole=agreed.whole if agreed.remembered else None,
        )
        if agreed.published:
            keeper.whole(agreed.published)

    @property
    def _segments(self) -> tuple[Segment, ...]:
        """What the ledger is audited against: the cursor's, else those of the stream that is registered."""
        streams = (part for part in self._others.values() if isinstance(part, StreamLoader))
        walked = self._cursor or next(streams, None)
        return walked.segments if walked else ()

    def _permit(self, agreed: Agreed, facts: Conditions) -> None:
        """What differs from the run that wrote the checkpoint is said, or refused."""
        if agreed.checkpoint is None:
            return
        place = self._hold().place
        written = agreed.manifest or read_manifest(place, agreed.checkpoint)
        for change in permitted(place, written, facts, allow=self.tree.checkpoint.allow):
            self._say(change.sentence)

    def _permit_memory(self, agreed: Agreed) -> None:
        """The same of what a vault had: somebody may have changed the configuration while nobody trained."""
        cursor, before = self._cursor, self.progress.facts
        now: dict[str, Any] = {
            "lanes": self.tree.lanes.count,
            "batch": cursor.batch if cursor else 0,
            "data": cursor.describe() if cursor else "",
            "threads": self.tree.lanes.threads,
        }
        self.progress.facts = now
        if agreed.whole is None or agreed.checkpoint is not None:
            return
        found = differences(Conditions(**before), Conditions(**now), allow=self.tree.checkpoint.allow)
        if refused := [change.sentence for change in found if change.refuse]:
            said = " ".join(refused)
            raise CheckpointRefused(f"This run can't continue from step {agreed.version} in memory. {said}")
        for change in found:
            self._say(change.sentence)

    def _note_first(self, agreed: Agreed, parts: Parts) -> bool:
        """What a beginning anew would begin with, if this is one that nobody has put anything into yet. Returns whether this
        process has lived through a beginning before.
        """
        if self._first is not None:
            return True
        if not (agreed.version.step or self.progress.count or self._begun):
            whole = {name: parts.part(name) for name in (*self._others, "ambient")}
            self._first = {name: deepcopy(p.state_dict()) for name, p in whole.items() if isinstance(p, Plain)}
        return False

    def _begin_anew(self, parts: Parts, lived: bool) -> None:
        """Nothing was kept yet: whoever lived through a fault of the very first step is put back to the beginning too."""
        assert self._first is not None
        for name in (*self._others, "ambient") if lived else ():
            part = parts.part(name)
            if isinstance(part, Plain):
                part.load_state_dict(deepcopy(self._first[name]))
            elif isinstance(part, Emptied):
                part.empty()

    def _leave(self) -> None:
        self._inside = False
        if self._seat is not None:
            self._seat.on_order(None)
        if self._lane is not None:
            self._lane = None
        if self._gang is not None:
            if self._cut:
                self._say(f"left generation {self.generation}: {self._cut}")
            self._gang.leave()
            self._gang = None

    # ---- inside: a step

    def _begin_step(self) -> Step:
        self._beat.phase("update")
        self._poll()
        step = Step(self.progress.step)
        step._run = self  # noqa: SLF001
        self._used, self._counted = [], False
        self._hold().loose()
        return step

    def _end_step(self) -> None:
        """The body is through: its state is kept, and the next step may come."""
        progress = self.progress
        if self._lane is not None:
            raise Misuse(f"lane {self._lane.index} was not done(): call lane.done() after its backward pass.")
        for role in self._roles.values():
            role.buffers.check()
        if self._cursor is not None:
            self._cursor.advance(progress.step, self._cursor.walk.draws - 1)
        self._settle_votes()
        progress.step, progress.update, progress.mark = progress.step + 1, 0, 0
        self._snapshot(Version(progress.step), whole=True)
        self._heed_halts()
        if self._ending:
            self._save_last()

    def _heed_halts(self) -> None:
        """Before a gang parts to grow: all are through with what was kept, and nobody has been asked to end meanwhile."""
        if self._parting and not self._ending:
            self._ending = any(exchange(self._gang_now, self._asked_to_end))

    def _part_inside(self) -> None:
        """A state inside of the step is kept: the gang that is to grow goes on from it."""
        self._heed_halts()
        if self._parting and not self._ending:
            raise GangError("the gang grows, and this state is kept")

    @property
    def _asked_to_end(self) -> bool:
        halt = self._seat.halt if self._seat else None
        return halt is not None and halt.save

    def _settle_votes(self) -> None:
        """A second state of a step is kept: the one before must be sealed by then, as before an update."""
        if not self._unsealed and self._restored is None:
            return
        self._hold().await_copies(self._check, self._beat.waiting)
        self._notes_heard(exchange(self._gang_now, (*self._notes(), *self._hold().say())))

    @property
    def _unsealed(self) -> bool:
        kept = self._hold().kept
        return kept is not None and not kept.sealed

    def _snapshot(self, version: Version, *, whole: bool, unchanged: Collection[str] = ()) -> None:
        progress = self.progress
        if not whole:
            progress.mark = version.update
        due = version.step % self.tree.vault.every == 0 or version.step == self._limit
        if due or not whole or self._ending or self._parting:
            self._hold().keep(self._parts, version, steps=progress.step, whole=whole, unchanged=unchanged)
            self._digest = self._digests() if whole else ()
        # A shard holds two versions: older ones need not be looked for in it.
        self._counts = {v: c for v, c in self._counts.items() if c >= progress.count - 1} | {version: progress.count}
        self._now, self._changed = version, False

    def _pass_over(self, role: str) -> Iterator[Lane]:
        if self._cut:
            return
        strategy = self.role(role).live
        try:
            if self._changed and self._worth:  # a further update of this step: the last one's state is kept first
                self._settle_votes()
                self._snapshot(Version(self.progress.step, self.progress.mark + 1), whole=False)
                self._hold().loose()
                self._part_inside()
            for turn in strategy.turns:
                self._flag.check(f"lane {turn.lane}")
                self._lane = Lane(self, turn, strategy.begin(turn), self.streams)
                self._turning = strategy
                lane = self._lane
                yield lane
                if self._cut:
                    return
                if not lane.over:
                    raise Misuse(f"lane {lane.index} was not done(): call lane.done() after its backward pass.")
        except GangError as error:
            self._cut_by(error)
            if self._guarded:
                raise

    def _done(self) -> None:
        self._lane = None
        if self._turning is None or self._cut:
            return
        try:
            self._turning.done()
        except GangError as error:
            self._cut_by(error)
            if self._guarded:
                raise

    def _take(self, lane: Lane) -> tuple[SampleId, ...]:
        if self._cursor is None:
            raise Misuse("lane.ids() needs a cursor: run.register(data=Cursor(...)).")
        draws = self._cursor.walk.draws
        update = self.progress.update
        ids = self._cursor.ids(self.progress.step, update % draws, lane.index // self.parts_per_lane)
        lane.used(ids, turn=update // draws)
        return ids

    def _update(self, scale: float, max_norm: float | None, lr_factor: float) -> Mapping[str, Reduced]:
        keeper, progress = self._hold(), self.progress
        found: dict[str, Reduced] = {}
        # Before the vote: its outcome tells everybody that everybody had waited.
        keeper.await_copies(self._check, self._beat.waiting)
        keeper.taken()
        self._flag.check("update")  # a gang of one comes to no collective that would look
        said = (*self._notes(), *keeper.say())
        last = list(self._roles)[-1]
        for name, role in self._roles.items():
            found[name] = role.live.reduce(said if name == last else ())
        if not self._notes_heard(
            found[last].notes
        ):  # else a gradient of corrupted parameters is no doing of the script's
            alike.check_finite(found, progress)
        for role in self._roles.values():
            role.live.apply(scale=scale, max_norm=max_norm, lr_factor=lr_factor)
        for role in self._roles.values():
            role.live.publish()
        for role in self._roles.values():
            role.live.seal()
        for lane, turn, ids in self._used:
            keeper.used(Version(progress.step, progress.mark + 1), lane // self.parts_per_lane, ids, turn)
        self._used = []
        progress.update += 1
        progress.count += 1
        self._poll()
        return found

    def _notes(self) -> tuple[float, ...]:
        """What this rank has to say with its vote."""
        keeper = self._hold()
        return notes.write(
            ending=self._asked_to_end,
            added=2 if self._joined is self._flag else 1 if self._added is self._flag else 0,
            late=keeper.late,
            cost_s=keeper.cost_s,
            since_s=keeper.since_s,
            digests=self._digest,
        )

    def _notes_heard(self, rows: Sequence[Sequence[float]]) -> Sequence[int]:
        """The gang has voted, so everybody had waited for copies: what was kept is sealed. Returns the ranks that diverged."""
        rows = self._hold().hear(rows)
        heard, keeper = notes.read(rows, self._digest), self._hold()
        self._digest = ()  # told once
        self._worth = heard.worth(self.tree.vault.inside)
        self._ending, self._parting = self._ending or heard.ending, self._parting or heard.parting
        alike.check_replicas(heard.odd, self._gang_now, self._now, self._say)
        if keeper.kept is None and self._restored is not None:
            self._tell_sealed(self._restored, heard.digest)
            keeper.chronicled(self._restored, heard.digest)
            self._restored = None
        kept = keeper.sealed(heard.digest, late=heard.late)
        if kept is not None and self.progress.count:
            self._first, self._begun = None, True
        if kept is not None and kept.whole and not heard.late:  # late: it is not yet beyond the reach of a fault
            self._tell_sealed(kept.steps, heard.digest)
        return heard.odd

    def _digests(self) -> tuple[Digest, ...]:
        strategies = {name: role.live for name, role in self._roles.items()}
        return notes.digests(strategies, self.progress.count, self.tree.lanes.digest)

    def _finish(self) -> None:
        """All steps are made: what they came to is sealed and on the disk before this worker says so."""
        self._settle_votes()
        if self._on_disk != self.progress.count:
            if self._hold().kept is None:  # restored from memory: whoever was to save it died
                self._snapshot(self._now, whole=True)
            self._save_last()
        self._beat.done()

    def _save_last(self) -> None:
        keeper = self._hold()
        self._settle_votes()
        if keeper.kept is not None and keeper.kept.whole and keeper.kept.steps:
            with self.phase("save"):
                with self.alone():
                    keeper.save_last(keeper.kept, self._check, lambda: self.waits(alone=True))
                self._saved_last = True
                exchange(self._gang_now, [])  # nobody ends before everybody's shard is written
                keeper.written(keeper.kept)
        self._poll()

    # ---- inside: small things

    def _hold(self) -> Keeper:
        if self._keeper is None:
            slot = self._place.slot if self._place else 0
            self._keeper = Keeper(self.context, writer=f"w{slot}", say=self._say)
        return self._keeper

    @property
    def _gang_now(self) -> Gang:
        assert self._gang is not None
        return self._gang

    def _poll(self) -> None:
        """Saves that have ended, and commits that were made."""
        keeper = self._hold()
        keeper.poll()
        parsed = parse_name(keeper.saved or "")
        if keeper.saved and parsed and keeper.saved != self._beat.now.manifest:
            self._beat.saved(parsed[0].step, keeper.saved)
            if self.context.alone:
                keeper.committed(keeper.saved, generation=self.generation)
        told = self._seat.committed if self._seat else None
        if told is not None:
            # Of a gang that grows the commit has the next one's number; and what an earlier one saves its writers finish.
            keeper.committed(told.manifest, generation=min(told.generation, self.generation))

    def _tell_sealed(self, steps: int, digest: str | None) -> None:
        if steps > self.sealed or (steps == self.sealed and digest is not None):
            self.sealed, self.sealed_digest = steps, digest
        self._beat.sealed(steps, self._untold)

    def _check(self) -> None:
        self._flag.check("waiting for copies")

    def _cut_by(self, error: GangError) -> None:
        """The step is over, and will come again."""
        # They would hold what the step's frames hold: GPU memory.
        error.__traceback__ = error.__context__ = error.__cause__ = None
        self._cut = self._cut or error

    def _raise_cut(self) -> None:
        if self._cut is not None:
            raise self._cut

    def _waits(self, doing: str | None) -> None:
        """A collective takes long: whoever looks at our beat should know that we are not the cause."""
        if doing is None:
            self._beat.arrived()
        else:
            collective = self._gang.collective if self._gang else None
            number, op = (collective.number, collective.op) if collective else (0, doing)
            self._beat.collective(number, op, self._untold)

    @property
    def _untold(self) -> int:
        """Bytes that this process's collectives have sent, and its beat does not say yet."""
        return self.meter.moved - self._beat.now.bytes

    def _check_open(self, doing: str) -> None:
        if self._place is not None:
            raise Misuse(
                f"{doing}() comes before run.steps(): what belongs to the state cannot change in the middle of a job."
            )

    def _say(self, sentence: str) -> None:
        print(f"{datetime.now(UTC).isoformat(timespec='milliseconds')} elasticrl: {sentence}", flush=True)
