"""One generation as a worker lives it: from its place in a plan until it has left that plan's gang.

The one idea: what is true of one generation is in one value, which goes with it. The watcher's thread tells orders to the
generation that they came in, so nothing that was meant for one can be taken for the next one's.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from math import inf
from typing import TYPE_CHECKING

from torch._C._distributed_c10d import HashStore, Store

from elasticrl.contract.beats import Beat
from elasticrl.contract.model import Rung
from elasticrl.contract.orders import Halt, Place
from elasticrl.runtime.asked import Hop
from elasticrl.runtime.group import Gang, form
from elasticrl.runtime.interrupt import GangError, Interrupt, reach
from elasticrl.runtime.keeper import SLICE_S
from elasticrl.runtime.meet import Meeting
from elasticrl.runtime.progress import Timeline
from elasticrl.runtime.team import Team, form_team
from elasticrl.runtime.tokens import Tokens, form_tokens
from elasticrl.runtime.traffic import Meter

if TYPE_CHECKING:
    from elasticrl.contract.seat import Order, OwnSeat
    from elasticrl.runtime.context import Context
    from elasticrl.runtime.lanes import Deal


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """This process through all generations: its job, its seat, and what it says of itself.

    Example: Worker(context=context(None, seated=False), seat=None, beat=Beat())
    """

    context: Context
    seat: OwnSeat | None  # None: alone
    beat: Beat
    meter: Meter = field(default_factory=Meter)  # what its collectives cost
    timeline: Timeline = field(default_factory=Timeline)
    said: set[str] = field(default_factory=set)  # what need not be said again

    @property
    def asked_to_end(self) -> bool:
        """With the step that it makes, of which the state is saved."""
        halt = self.seat.halt if self.seat else None
        return halt is not None and halt.save

    @property
    def untold(self) -> int:
        """Bytes that its collectives have sent, and its beat does not say yet."""
        return self.meter.moved - self.beat.now.bytes

    def say(self, sentence: str) -> None:
        """Into its log."""
        print(f"{datetime.now(UTC).isoformat(timespec='milliseconds')} elasticrl: {sentence}", flush=True)

    def say_once(self, sentence: str) -> None:
        """The same, of what is so for all of its life."""
        if sentence not in self.said:
            self.said.add(sentence)
            self.say(sentence)


class Generation:
    """One, for one of its ranks. `told` is called by the watcher's thread, all else by the training thread."""

    def __init__(self, worker: Worker, place: Place, deal: Deal, *, parts_per_lane: int, parted: bool) -> None:
        self.worker, self.place, self.deal = worker, place, deal
        self.parts_per_lane = parts_per_lane
        self.flag = Interrupt(self._waits, worker.meter, worker.beat.nearer)
        self.cut: GangError | None = None  # why it ends
        self.fills = False  # a model is built whose weights are overwritten at once
        self.trains = False  # a plan that only adds to its gang need not end that at once
        self.misses = False  # a disk, and waits for it: nor need it this
        self.added = False  # this rank was told of such a plan
        self.joined = False  # and has seen that those are there whom the plan adds
        self.team: Team | None = None  # while it has a gang, where a model is cut over several ranks
        self.tokens: Tokens | None = None  # the same, where several ranks share the tokens of a sequence
        self._gang: Gang | None = None
        self._parted = parted  # the gang that this one adds to has: those who come are all there

    @property
    def gang(self) -> Gang:
        """Its gang, which has formed and was not left."""
        assert self._gang is not None, f"generation {self.place.generation} has no gang"
        return self._gang

    @property
    def carrier(self) -> int:
        """This rank's number among those that lanes are dealt to: its own, or its team's."""
        return self.place.rank * self.deal.world // self.place.world

    @property
    def carried(self) -> tuple[int, ...]:
        """The lanes that are here."""
        return self.deal.carried[self.carrier]

    @property
    def records(self) -> bool:
        """Does this rank write down what its lanes used? One of each team does."""
        return self.place.rank % (self.place.world // self.deal.world) == 0

    @property
    def alike(self) -> int:
        """Neighbouring ranks with parameters of their own each, after which these come again."""
        return self.team.size if self.team else 1

    @property
    def hops(self) -> tuple[Hop, ...]:
        """The groups of this rank's team, none without one: those who share tokens, and then each one's own team."""
        return tuple(Hop(group=its.group, index=its.index) for its in (self.tokens, self.team) if its is not None)

    @property
    def formed(self) -> bool:
        """Is there a gang?"""
        return self._gang is not None

    def cut_by(self, error: GangError) -> None:
        """It ends: the step that it makes will come again in the next one."""
        # They would hold what the step's frames hold: GPU memory.
        error.__traceback__ = error.__context__ = error.__cause__ = None
        self.cut = self.cut or error

    def check_cut(self) -> None:
        """Raises what has ended it."""
        if self.cut is not None:
            raise self.cut

    def form(self) -> None:
        """Meets the others, and is a gang with them. Collective."""
        place, conf, mark = self.place, self.worker.context.tree, self.worker.timeline.mark
        store: Store = HashStore()
        if self.worker.seat is not None:
            self.worker.seat.on_order(self.told)
            if not place.endpoint:  # found by a new user, whose etcd had gone and come: the program was blamed for it
                raise GangError("the plan names no place to meet, as no agent had offered one: the next plan will")
            store = reach(place.host, place.port, self.flag, conf.recovery.reform_s)
            mark("reach")
            self._meet(store)
        mark("meet")
        self._gang = form(
            generation=place.generation, rank=place.rank, world=place.world, store=store,
            backend="elastic" if place.backend == "gloo" else self.worker.context.backend, form_s=conf.recovery.reform_s,
            timeout_s=conf.timeouts.collective_s, flag=self.flag,
        )  # fmt: skip
        form_s, limit = timedelta(seconds=conf.recovery.reform_s), timedelta(seconds=conf.timeouts.collective_s)
        if (tp := conf.model.tp) > 1:
            self.team = form_team(self._gang.group, tp, form_s=form_s, limit=limit)
        if (cp := conf.model.cp) > 1:
            self.tokens = form_tokens(self._gang.group, cp, cuts=tp, form_s=form_s, limit=limit)
        mark("form")

    def leave(self) -> None:
        """Out of the gang at once, whatever the peers do."""
        self.trains = False
        if self.worker.seat is not None:
            self.worker.seat.on_order(None)
        if self._gang is not None:
            if self.cut:
                self.worker.say(f"left generation {self.place.generation}: {self.cut}")
            self._gang.leave()
            self._gang = self.team = self.tokens = None

    def told(self, order: Order) -> None:
        """In the watcher's thread: whatever it is, only an order to end with this step lets the step be finished."""
        place = self.place
        if isinstance(order, Halt) and order.save:
            return
        if isinstance(order, Place):
            if order.generation <= place.generation:
                return  # the one that was just taken
            if order.grows and order.generation == place.generation + 1 and (self.trains or self.misses):
                self.added = True
                # Of those that train one is enough: the others hear of it in a vote. Who waits for disks takes none.
                if place.rank == 0 or not self.trains:
                    threading.Thread(target=self._await_newcomers, args=(order,), daemon=True).start()
                return
        reason = order.reason or "the plan changed"
        self.flag.set(reason)
        if (gang := self._gang) is not None:
            gang.interrupt(reason)

    def _await_newcomers(self, order: Place) -> None:
        """In a thread of its own, while the gang trains, or waits for disks, which ends then. Where they do not come, a later
        plan says so, which sets the flag.
        """
        more = order.world - self.place.world
        while self.flag.reason is None:
            try:
                store = reach(order.host, order.port, self.flag, self.worker.context.tree.recovery.reform_s)
                Meeting(store, generation=order.generation, world=order.world).wait_for(more, self.flag, inf)
            except GangError as error:
                if self.flag.reason is None:
                    self.worker.say(f"who is to come in generation {order.generation} cannot be seen yet: {error}")
                    time.sleep(SLICE_S)  # before it is reached anew
            else:
                self.joined = True
                if self.misses:
                    self.flag.set(order.reason or "the plan changed")
                return

    def _meet(self, store: Store) -> None:
        """Until all are there. Where some may still load, or the gang that grows trains on, waiting is no hang, and the plan's
        own deadline ends it: the next plan sets the flag.
        """
        place, worker = self.place, self.worker
        reform_s = worker.context.tree.recovery.reform_s
        last = place.grows and self._parted  # those of the gang that there was come when all others are there
        newcomer = place.grows and place.born == place.generation
        halted = 0.0

        def turn() -> None:
            nonlocal halted
            if place.rung != Rung.REFORM and (newcomer or not place.grows):
                worker.beat.still()
            if newcomer and worker.seat and worker.seat.halt:
                halted = halted or time.monotonic()
                if time.monotonic() > halted + reform_s / 4:  # a gang that has parted for us is here by then
                    raise GangError("it is time to end, and the gang that this worker was to join has not come")

        meeting = Meeting(store, generation=place.generation, world=place.world)
        meeting.wait_for_all(self.flag, reform_s if last else inf, turn)

    def _waits(self, doing: str | None) -> None:
        """A collective takes long: whoever looks at our beat should know that we are not the cause."""
        beat = self.worker.beat
        if doing is None:
            beat.arrived()
        else:
            collective = self._gang.collective if self._gang else None
            number, op = (collective.number, collective.op) if collective else (0, doing)
            beat.collective(number, op, self.worker.untold)
