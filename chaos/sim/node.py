"""One virtual node: the shell around `core.step`, as thin as the real one.

The one idea: what the shell does with actions and events is the same as in `elasticrl.shell.loop`: one action at a time for
each subject, each with a deadline, no replies. All else here is a node's body: power, clock, daemon, agent, vault.
"""

from collections.abc import Callable, Hashable
from dataclasses import replace
from math import inf
from typing import TYPE_CHECKING

from chaos.history import Asked, Began, Bug, Died, Halted, Left, Repeated, Spun, Started, Suspicion, Tested
from chaos.sim.store import LeaseGone
from chaos.sim.vault import Vault
from chaos.sim.world import Clock
from elasticrl.contract import events, orders
from elasticrl.contract.events import Action, Event
from elasticrl.contract.evidence import Evidence, Kind, Sign
from elasticrl.contract.model import (
    LOADING,
    MEETING,
    OUTSIDE,
    UNTOLD,
    Exit,
    Lap,
    Member,
    Milestone,
    Pace,
    Phase,
    Plan,
    Record,
    Stall,
    Verb,
    View,
    Work,
)
from elasticrl.core.node.follow import trains_on
from elasticrl.core.node.state import State
from elasticrl.core.node.suspect import Detector, lives, somebody_left, watched
from elasticrl.core.step import step, subject
from elasticrl.shell.sight import MANY

if TYPE_CHECKING:
    from chaos.sim.cluster import Cluster
    from chaos.sim.gang import Gang

REQUEST_S = 1.0  # a store request's deadline
SPIN = 400  # core steps of one node in one second that nothing explains
ORDERS = 3  # the same order within the core's `retry_s` that nothing explains
STEP_BYTES = 5_000_000  # that each rank sends in a step
SHARE_OF_OWN = 0.4  # of a step, in which a worker waits for nobody
COUNTED = (orders.Launch, orders.Reform, orders.Park)
ORDERED = (orders.Launch, orders.Reform, orders.Park, orders.Halt, orders.Kill)
ALIVE = (Work.JOINING, Work.TRAINING, Work.PARKED, Work.STALLED, Work.DONE)


class Node:
    """A machine with one daemon, one agent, its workers, and its vault."""

    # Of thousands of nodes each attribute is looked for all the time, and they take less memory so.
    __slots__ = (
        "__dict__",  # what a test listens at, of one node
        "_endpoint", "agent_life", "agent_up", "answered", "beat_phase", "bits", "born", "chance", "clock", "cluster",
        "daemon_paused", "daemon_up", "dead", "detector", "doubted", "exit", "found", "frozen", "gang", "generation",
        "hung", "in_kernel", "inbox", "incarnation", "known_agent", "lap", "lease", "lease_sent", "life", "loaded_at",
        "looking", "manifest", "milestone", "mute_publish", "name", "near", "newer", "next_plan", "ordered",
        "ordered_at", "pace", "parts_ways", "phase", "powered", "quiet", "request", "restores", "running", "saved",
        "second", "sick", "since", "slots", "slow", "stall", "stands_in", "state", "step", "steps", "stopped",
        "strays", "telling", "tests", "vault", "vault_life", "wake_at", "wake_due", "wants_up", "warm", "warm_at",
        "way", "work", "world",
    )  # fmt: skip

    def __init__(self, cluster: "Cluster", name: str, slots: int) -> None:  # noqa: PLR0915 - all that a machine is
        self.cluster, self.world, self.name, self.slots = cluster, cluster.world, name, slots
        chance = self.world.chance("node " + name)
        self.chance = chance
        self.way = self.world.chance("net " + name)  # of its messages to the store
        self.clock = Clock(self.world, 1000 * chance.random(), 1 + 1e-4 * (chance.random() - 0.5))
        self.beat_phase = chance.random()
        self.incarnation = 0
        self.since = 0
        self.powered = self.frozen = self.daemon_up = self.agent_up = False
        self.daemon_paused = False
        self.life = 0  # rises when the daemon starts or ends: what was on its way to an earlier one is lost
        self.agent_life = 0
        self._endpoint = (-1, "")  # of which life of its agent; where
        self.known_agent = 0  # the life of the agent that a daemon knew last
        self.lease: int | None = None
        self.lease_sent = -inf  # true time at which the newest acknowledged keepalive was sent
        self.state: State | None = None
        self.detector = self._detector()
        self.quiet: tuple[Detector | None, int] = (None, 0)  # that would have said nothing, and when (`Beats.changes`)
        self.near: tuple[Member, ...] = ()  # who was around it when its ring was last asked for; (): ask
        self.doubted = -1  # the generation in which somebody's worker was seen to have left
        self.running: dict[
            Hashable, tuple[int, float]
        ] = {}  # by subject: which request, and until when it is waited for
        self.newer: events.Publish | None = None  # the newest record, decided while an older one was being written
        self.request = 0
        self.inbox: list[Event] = []
        self.wake_at = inf
        self.wake_due = inf
        self.second, self.steps = 0, 0
        self.ordered: tuple[type | None, int] = (None, 0)  # the newest order, of which generation
        self.ordered_at: list[float] = []  # when it was given
        self.wants_up, self.mute_publish = True, False
        # The plan that a daemon which began a life was shown first; -1: it adopted workers.
        self.found: int | None = None
        self.stands_in = False  # for a daemon that died
        # The agent and its workers.
        self.work, self.generation, self.born, self.warm = Work.NONE, 0, 0, False
        self.warm_at = 0.0
        self.bits, self.step = "", 0  # (what its first warm process has found out)
        self.phase = ""  # where it is one by which the core tells who is there
        self.loaded_at, self.restores = (
            -inf,
            False,
        )  # when the program has its model; state that is put back comes nearer
        self.next_plan: Plan | None = None  # that adds to the gang in which it trains on
        self.saved, self.manifest = 0, ""
        self.exit: Exit | None = None
        self.stall: Stall | None = None
        self.lap: Lap | None = None  # how long a step took lately, and in which gang
        self.milestone: Milestone | None = None  # that a script's log has told last
        self.looking: Stall | None = None  # whose scene is being looked at, or has been
        self.gang: Gang | None = None
        self.dead: set[int] = set()
        self.hung: set[int] = set()
        self.stopped: set[int] = set()
        # Its beats say that it waits for others, and it is in its own code; it stands still where no signal ends it.
        self.strays = self.in_kernel = False
        self.slow, self.parts_ways = 1.0, 0  # in so many gangs it enters another collective than the others
        self.pace: tuple[Pace, ...] = ()
        self.vault_life, self.tests = 0, 0  # the newest probe for which it has tested its ways thoroughly
        self.sick = self.telling = False
        self.vault = Vault()
        self.answered = False  # its agent answers for its daemon, which is gone

    # ---- life and death

    def boot(self, *, again: bool = False) -> None:
        """Power on: a new life. `again`: by itself, as after a power cut, and by no operator."""
        if self.powered:
            return
        self.powered, self.frozen, self.wants_up = True, False, True
        running = self.cluster.running
        if running is not None and self in running.seats:
            running.break_()  # its kernel answers again, and knows no such connection
        self.start_agent()
        self.start_daemon(again=again)

    def power_off(self) -> None:
        """Everything here is gone, and says nothing about it."""
        self.powered = False
        self.lose_vault()
        self._end_agent(silent=True)
        self.end_daemon()

    def kill_all(self) -> None:
        """All processes die; the kernel says so to their peers. The vault's memory goes with its process."""
        self.lose_vault()
        self._end_agent(silent=False)
        self.end_daemon()

    def lose_vault(self) -> None:
        """The memory snapshots of this node are gone."""
        self.vault.lose()
        self.vault_life += 1
        if self.gang is not None:
            self.gang.bereft(self)
        if self.cluster.shape.vault_moves:
            self.tell()

    def start_daemon(self, *, again: bool = False) -> None:
        """A daemon begins; it goes on with the life whose agent it finds. `again`: in place of one that died."""
        if self.daemon_up or not self.powered or not self.wants_up:
            return
        adopted = self.agent_up and self.agent_life == self.known_agent
        if not self.agent_up:
            self.start_agent()
        self.known_agent = self.agent_life
        if not adopted:
            self.incarnation += 1
            self.lease = None
            self.since = self.cluster.store.revision
        me = Member(node=self.name, incarnation=self.incarnation)
        self.life += 1
        self.daemon_up, self.daemon_paused = True, False
        self.answered, self.vault.serves = False, True  # what was held is found again
        bits = "" if self.cluster.shape.finds_bits else self.cluster.bits_of(self.name)
        card = Record(
            member=me,
            slots=self.slots,
            beat=f"{self.name}:7461",
            probe=f"{self.name}:7462" if self.cluster.shape.deep else "",
            bits=bits,
            since=self.since,
        )
        self.state = State(settings=self.cluster.settings_of(self.name), me=me, card=card, met=0 if adopted else None)
        self.detector = self._detector()
        self.near, self.doubted = (), -1
        self.running.clear()
        self.newer = None
        self.inbox.clear()
        self.lease_sent = -inf
        self.wake_at = self.wake_due = inf
        self.found, self.stands_in = -1 if adopted else None, again and not adopted
        self.world.note(Started(at=self.world.now, member=str(me), adopted=adopted))
        self.cluster.beats.changed(self.name)
        self.cluster.store.watch(me, self._seen(self.life), everyone=False)
        self.tell()
        self._round(self.life)

    def end_daemon(self) -> None:
        """The daemon is gone; what it had sent may still arrive."""
        if self.daemon_up:
            self.daemon_up = False
            self.life += 1
            self.cluster.store.unwatch(self.name)
            self.cluster.beats.changed(self.name)

    def kill_daemon(self) -> None:
        """Kill -9 of the daemon. Where its vault goes along, its workers train on, and its agent answers for it."""
        if self.cluster.shape.vault_goes:
            self.answered, self.vault.serves = True, False
        self.end_daemon()

    def _round(self, life: int) -> None:
        """The agent speaks at least this often."""
        if life == self.life and self.daemon_up:
            self.tell()
            self.world.later(self.cluster.agent_s * (0.9 + 0.2 * self.chance.random()), self._round, life)

    # ---- the loop

    @property
    def awake(self) -> bool:
        """Does the daemon run at this moment?"""
        return self.daemon_up and self.powered and not (self.frozen or self.daemon_paused)

    @property
    def answers(self) -> bool:
        """Do neighbours hear that it lives?"""
        return self.awake or (self.answered and self.agent_up and self.powered and not self.frozen)

    def post(self, event: Event) -> None:
        """Something happened to this node's core."""
        if not self.awake or self.inbox:
            self.inbox.append(event)
            return
        self._take(event)

    def thaw(self) -> None:
        """The daemon runs on: first what has come in, then what is due."""
        if not self.awake:
            return
        (waiting, self.inbox), life = (self.inbox, []), self.life
        seen = [event for event in waiting if isinstance(event, events.Seen)][-1:]
        for event in waiting:
            if not isinstance(event, events.Seen) or event in seen:
                self._take(replace(event, now=self.clock.now()))
            if life != self.life:
                return
        self._take(events.Tick(now=self.clock.now()))

    def _take(self, event: Event) -> None:
        if self.state is None or not self.daemon_up:
            return
        second = int(self.world.now)
        self.steps = self.steps + 1 if second == self.second else 1
        self.second = second
        if self.steps == SPIN:
            self.world.note(Spun(at=self.world.now, node=self.name, steps=self.steps))
            self.world.halted = True
        try:
            decision = step(self.state, event)
        except AssertionError as error:
            self.world.note(Bug(at=self.world.now, node=self.name, error=f"{error}"))
            return
        if self.world.overseer is not None:
            self.world.overseer(self, event, decision)
        before, self.state = self.state, decision.state
        self.cluster.steps += 1
        if before.view.plan is not self.state.view.plan:
            self._ring()
        view = self.state.view
        if isinstance(event, events.Seen) and somebody_left(view) and view.generation != self.doubted:
            self.doubted = view.generation
            self.cluster.beats.doubt_all(self)
        self.wake_at = decision.wake_at
        if self.wake_at < self.wake_due:
            self._alarm()
        life = self.life
        for action in decision.actions:
            self.perform(action)
            if life != self.life:
                return

    def _alarm(self) -> None:
        self.wake_due = self.wake_at
        delay = max(self.clock.true(self.wake_at) - self.world.now, 0.001)
        self.world.later(delay, self._wake, self.life, self.wake_due)

    def _wake(self, life: int, due: float) -> None:
        if life != self.life or due != self.wake_due:
            return
        self.wake_due = inf
        if not self.awake:
            return  # `thaw` ticks
        if self.clock.now() + 1e-9 < self.wake_at:
            self._alarm()
        else:
            self._take(events.Tick(now=self.clock.now()))

    def _seen(self, life: int) -> Callable[[View], None]:
        def deliver(view: View) -> None:
            if life != self.life:
                return
            first, plan = self.found is None, view.plan
            self.found = view.generation if self.found is None else self.found
            if first and self.stands_in and plan is not None and plan.phase is Phase.STOP:
                self._leave(plan.exit_code or 0, "it stands in for a daemon that died, which begins no job anew")
            else:
                self.post(events.Seen(now=self.clock.now(), view=view))

        return deliver

    def _ring(self) -> None:
        """The neighbours changed with the plan."""
        assert self.state is not None
        plan, reach = self.state.view.plan, self.cluster.settings.membership.neighbours
        place = plan.place.get(self.name, 0) if plan is not None else 0
        # Seats in the middle have the same ring as long as the same lives are around them, as mostly.
        near = plan.around[place - reach : place + reach + 1] if plan is not None and place >= reach else ()
        if near and near == self.near and self.cluster.beats.sends_none:
            return
        self.near = near if len(near) == 2 * reach + 1 else ()
        ring = watched(plan, self.state.me, reach)
        known = lives(plan, ring)
        if self.cluster.beats.stands(self.name, ring) and known == {
            n: heard.life for n, heard in self.detector.peers.items()
        }:
            return  # of thousands of nodes few have other neighbours after a plan
        self.detector = self.detector.watch(known, self.clock.now())
        self.cluster.beats.ring(self.name, ring)

    # ---- actions

    def perform(self, action: Action) -> None:  # noqa: C901, PLR0912 - a table of actions, the commonest first
        """What the core decided."""
        match action:
            case events.Say():
                pass
            case events.KeepAlive():
                self._send(action)
            case events.Publish(record=record):
                if record.evidence:
                    self._check_ranks(record)
                self._send(action)
            case events.Leave(code=code, reason=reason):
                self._leave(code, reason)
            case events.Watch(everyone=everyone):
                me, shown = self._me, self.state is not None and self.state.view.records is not None
                if everyone == shown:
                    self.world.note(Bug(at=self.world.now, node=self.name, error="it asks for news that it is shown"))
                self.world.later(
                    0.002,
                    self._now,
                    self.life,
                    lambda: self.cluster.store.watch(me, self._seen(self.life), everyone=everyone),
                )
            case _ if isinstance(action, ORDERED):
                if isinstance(action, COUNTED):
                    self._count(action)
                self.world.later(
                    0.001 + 0.002 * self.chance.random(), self._agent_does, self.agent_life, action, self._plan
                )
            case events.LookAt(generation=generation, request=request) if generation != self.generation:
                self._check_look(generation, request)
                self.world.later(0.001, self._unseen, self.life, request)
            case events.LookAt(generation=generation, request=request):
                self._check_look(generation, request)
                low, high = self.cluster.look_s
                delay = low + (high - low) * self.world.chance("look " + self.name).random()
                self.world.later(delay, self._looked, self.life, None, request)
            case events.Probe():
                self._count(action)
                self.world.later(0.2 + 0.3 * self.chance.random(), self._probed, self.life, action)
            case events.Try(found=found, targets=targets):
                self.world.later(
                    0.2 + 0.3 * self.chance.random(), self._tested, self.life, found, tuple(sorted(targets))
                )
            case _:
                self._send(action)

    def _count(self, action: orders.Launch | orders.Reform | orders.Park | events.Probe) -> None:
        """An order needs its time: the agent should not hear it more than a few times before that is over."""
        generation = action.place.generation if isinstance(action, orders.Launch | orders.Reform) else action.generation
        kind, now = type(action), self.world.now
        if (kind, generation) != self.ordered:
            self.ordered, self.ordered_at = (kind, generation), [now]
            return
        recent = [at for at in self.ordered_at if now - at < 0.9 * self.cluster.settings.retry_s] + [now]
        self.ordered_at = recent
        if len(recent) > ORDERS:
            order = f"{kind.__name__} {generation}"
            self.world.note(Repeated(at=now, node=self.name, order=order, times=len(recent)))

    @property
    def _me(self) -> Member:
        assert self.state is not None
        return self.state.me

    def _check_ranks(self, record: Record) -> None:
        """What a node says of a rank of its own is of one that it had in that generation."""
        for fact in record.evidence:
            gang = self.cluster.gangs.get(fact.generation or 0)
            if fact.rank is None or fact.node != self.name or gang is None or self._me not in gang.plan.seat_of:
                continue
            first = gang.plan.first_rank(self._me)
            if not first <= fact.rank < first + self.slots:
                error = (
                    f"it tells of rank {fact.rank} in generation {fact.generation}, which was none of its own: {fact}"
                )
                self.world.note(Bug(at=self.world.now, node=self.name, error=error))

    def _check_look(self, generation: int, request: int) -> None:
        """A request to look at a gang is none to look at a later one."""
        asked = self.cluster.store.looks.get(request, generation)
        if asked != generation:
            error = f"it looks at generation {generation}, of which nobody has asked, but of {asked}"
            self.world.note(Bug(at=self.world.now, node=self.name, error=error))

    def _now(self, life: int, what: Callable[[], None]) -> None:
        if life == self.life:
            what()

    def _probed(self, life: int, action: events.Probe) -> None:
        if life != self.life or not self.daemon_up:
            return
        if self.frozen or self.daemon_paused:
            self.world.later(0.5, self._probed, life, action)
            return
        self.cluster.reach("probing", self)
        out = tuple(t for t in sorted(action.targets) if not self.cluster.reachable(self.name, t))
        known = {end for pair in action.pairs for end in pair} <= action.nodes.keys()  # where the thorough tests answer
        more = bool(action.pairs) and known and not out
        self.post(events.Probed(now=self.clock.now(), generation=action.generation, unreachable=out, more=more))
        if more and self.tests != action.generation:
            self.tests = action.generation
            self.world.later(0.5 + 0.5 * self.chance.random(), self._probed_deeply, life, action)

    def _probed_deeply(self, life: int, action: events.Probe) -> None:
        if life == self.life and self.awake:
            peers = [a if b == self.name else b for a, b in action.pairs]
            found = tuple(self.cluster.tried(self.name, peer) for peer in peers)
            self.post(events.Probed(now=self.clock.now(), generation=action.generation, unreachable=(), results=found))

    def _tested(self, life: int, found: int, targets: tuple[str, ...]) -> None:
        if life == self.life and self.awake:
            net = self.cluster.net
            reached = tuple(t for t in targets if self.cluster.reachable(self.name, t) and net.linked(self.name, t))
            out = tuple(t for t in targets if t not in reached)
            self.world.note(Tested(at=self.world.now, node=self.name, passed=not out))
            self.post(events.Tried(now=self.clock.now(), found=found, reached=reached, unreachable=out))

    def _leave(self, code: int, reason: str) -> None:
        self.world.note(Left(at=self.world.now, member=str(self._me), code=code, reason=reason))
        self.wants_up = False
        self._end_agent(silent=False)
        lease, self.lease = self.lease, None
        self.end_daemon()
        if lease is not None:
            self.cluster.send(self.name, lambda: self.cluster.store.revoke(lease))

    # ---- the store

    def _send(self, action: Action) -> None:  # noqa: C901, PLR0915 - one request: what it does, what its answer and its silence do
        """One request to the store; its answer, if it comes, only ends the waiting for it, but for the lease's."""
        about = subject(action)
        if about in self.running and self.world.now < self.running[about][1]:
            if isinstance(action, events.Publish):
                self.newer = action
            return
        if isinstance(action, events.Publish) and (self.mute_publish or self.lease is None):
            return
        self.request += 1
        number, life = self.request, self.life
        self.running[about] = number, self.world.now + REQUEST_S
        sent, true_sent = self.clock.now(), self.world.now
        member, store = self._me, self.cluster.store

        def answer(result: object) -> None:
            if life != self.life or not self.daemon_up:
                return
            newer = None
            if self.running.get(about, (0, 0.0))[0] == number:
                del self.running[about]
                if isinstance(action, events.Publish):
                    newer, self.newer = self.newer, None
            if isinstance(result, LeaseGone):
                self.lease = None
                self.post(events.Leased(now=self.clock.now(), sent=0.0, held=False))
            elif isinstance(action, events.KeepAlive):
                if isinstance(result, int) and not isinstance(result, bool):
                    self.lease = result
                elif not result:
                    self.lease = None
                held = self.lease is not None
                self.lease_sent = max(self.lease_sent, true_sent) if held else -inf
                self.post(events.Leased(now=self.clock.now(), sent=sent, held=held))

            if newer is not None and newer != action and life == self.life:
                self._send(newer)

        lease = self.lease
        ttl_s = self.cluster.settings.membership.lease_ttl_s
        lapsed_s = max(0.0, self.world.now - self.lease_sent - ttl_s)

        def apply() -> object:
            match action:
                case events.KeepAlive():
                    return store.keepalive(lease) if lease is not None else store.grant(member, ttl_s)
                case events.Publish(record=record) if lease is not None:
                    store.put_record(record, lease)
                case events.Campaign(over=over) if lease is not None:
                    store.campaign(member, lease, over)
                case events.Propose():
                    store.propose(action, member, lapsed_s)
                case events.WriteCommit():
                    store.commit(action)
                case events.Restore():
                    store.restore(action, member)
                case events.Confine():
                    store.confine(action)
                case events.Inspect():
                    store.inspect(action)
                case events.Ask(verb=verb, node=node):
                    store.ask(verb, node)
            return None

        self.cluster.send(self.name, apply, answer, repeatable=not isinstance(action, events.KeepAlive), action=action)

    # ---- the detector

    def _detector(self) -> Detector:
        """One that knows nobody yet."""
        return Detector(settings=self.cluster.settings.membership, doubt_s=self.cluster.beats.doubt_s)

    def judge(self) -> None:
        """Ask the detector, and pass on what it says."""
        if not self.awake:
            return
        if len(self.cluster.names) >= MANY and self.cluster.beats.quiet(self):
            return
        self.cluster.beats.refresh(self)
        self.detector, suspected, cleared = self.detector.judge(self.clock.now())
        for other in suspected:
            self._suspect(other, suspected=True)
        for other in cleared:
            self._suspect(other, suspected=False)

    def _suspect(self, other: str, *, suspected: bool) -> None:
        self.world.note(Suspicion(at=self.world.now, node=self.name, other=other, suspected=suspected))
        kind = events.Suspected if suspected else events.Cleared
        self.post(kind(now=self.clock.now(), node=other))

    # ---- operators

    def asked(self, verb: Verb, node: str | None) -> None:
        """An operator at this node's control socket."""
        if self.awake:
            self.world.note(Asked(at=self.world.now, verb=verb.value, node=node or ""))
            self.post(events.Asked(now=self.clock.now(), verb=verb, node=node))

    # ---- the agent

    def start_agent(self) -> None:
        """An agent with no workers; its spares warm up."""
        if self.agent_up or not self.powered:
            return
        self.agent_up = True
        self.agent_life += 1
        if self.daemon_up:
            self.known_agent = self.agent_life
        self._clear()
        self.lap = None
        self.warm = False
        self._warm_up()

    def _warm_up(self) -> None:
        low, high = self.cluster.warm_s
        self.world.later(low + (high - low) * self.chance.random(), self._warmed, self.agent_life)

    def _warmed(self, life: int) -> None:
        if life != self.agent_life or not self.agent_up:
            return
        if self.frozen:
            self.world.later(1.0, self._warmed, life)
            return
        if not self.warm:
            self.warm, self.bits = True, self.cluster.bits_of(self.name)
            self.warm_at = self.world.now
            self.tell()

    def kill_agent(self) -> None:
        """Kill -9 of the agent: its workers die with it, the vault stays; systemd starts it again."""
        self._end_agent(silent=False)
        self.tell()
        self.world.later(1.0, self._agent_again, self.agent_life)

    def _agent_again(self, life: int) -> None:
        if life == self.agent_life and self.powered and self.wants_up:
            self.start_agent()
            self.tell()

    def _end_agent(self, *, silent: bool) -> None:
        if self.agent_up:
            self.agent_up = False
            self.agent_life += 1
            if self.answered:
                self.cluster.beats.changed(self.name)
            gang, self.gang, self.next_plan = self.gang, None, None
            told = self.generation
            self._clear()
            self.generation = told  # the daemon keeps the number until the next agent speaks (`Crew._lost`)
            self.saved, self.manifest = 0, ""
            self.warm = False
            if gang is not None:
                gang.lost(self, silent=silent)

    def _clear(self) -> None:
        self.work, self.generation, self.born = Work.NONE, 0, 0
        self.exit, self.stall, self.phase, self.milestone = None, None, "", None
        self.dead, self.hung, self.stopped, self.sick = set(), set(), set(), self.sick
        self.strays = self.in_kernel = False
        self.cluster.outside.discard(self.name)
        self.slow = 1.0
        self.pace, self.lap = (), None

    def measured(self, generation: int, took_s: float) -> None:
        """A step is made: how long its own work took, and all of it."""
        own_s = SHARE_OF_OWN * self.cluster.step_s * self.slow * (1 + 0.02 * self.world.chance("pace").random())
        self.pace = tuple(Pace(slot=slot, phase="rollout", seconds=own_s) for slot in range(self.slots))
        self.lap = Lap(generation=generation, seconds=took_s, bytes=STEP_BYTES)

    @property
    def alive(self) -> bool:
        """Are there worker processes that can go on?"""
        return self.agent_up and self.work in ALIVE

    @property
    def able(self) -> bool:
        """Can the workers act at this moment?"""
        return self.alive and self.powered and not (self.frozen or self.hung or self.stopped)

    def tell(self) -> None:
        """The agent tells the daemon how its workers are; what changes at one moment is told at once."""
        if not self.telling and self.daemon_up:
            self.telling = True
            self.world.later(0.001, self._tell)

    def _tell(self) -> None:
        self.telling = False
        if not self.daemon_up:
            return
        if self.stall is not None and self.looking is not self.stall:
            self.looking = self.stall
            low, high = self.cluster.look_s
            delay = low + (high - low) * self.world.chance("look " + self.name).random()
            self.world.later(delay, self._looked, self.life, self.stall, 0)
        self.post(
            events.Workers(
                now=self.clock.now(),
                work=self.work,
                generation=self.generation,
                born=self.born,
                warm=self.warm,
                step=self.step,
                phase=OUTSIDE if self.name in self.cluster.outside else self.phase,
                restores=self.restores and self.work is Work.JOINING,
                saved=self.saved,
                manifest=self.manifest,
                exit=self.exit,
                stall=self.stall,
                milestone=self.milestone,
                endpoint=self.endpoint if self.agent_up else "",
                bits=self.bits,
                versions=self.cluster.versions_of(self.name),
                pace=self.pace,
                lap=self.lap,
                vault=self.door if self.agent_up else "",
            )
        )
        self._check_ring()

    def _check_ring(self) -> None:
        """Does the core know in which gang's ring the vault is to keep shards? (Only shells ask it.)"""
        plan, here = self._plan, self.gang
        if self.state is None or plan is None or here is None or self.inbox or self.cluster.script:
            return
        ours, said = here.plan.generation, trains_on(self.state)
        if ours == plan.generation or not plan.grows:
            wrong = said
        else:
            old = self._me in here.plan.seat_of and plan.generation == ours + 1 and here.phase != "done" and self.alive
            wrong = old and not said
        if wrong:
            error = f"the vault is to keep the ring of {'another' if said else 'the new'} gang, and its workers are in {ours}"
            self.world.note(Bug(at=self.world.now, node=self.name, error=error))

    def _looked(self, life: int, stall: Stall | None, request: int) -> None:
        """The daemon has asked its workers where they are. One that is stopped cannot say."""
        if life != self.life or not self.daemon_up or (request == 0 and self.stall is not stall):
            return
        still = bool(self.hung or self.stopped)
        waits = self.gang is not None and self.gang.waits_since is not None and not still
        if waits and self.stall is not None and not self.stall.waiting:  # on its way from one collective to the next
            waits = self.world.chance("sight " + self.name).random() < 0.5
        sign = Sign.STOPPED if self.stopped else Sign.WAITED if waits else Sign.ELSEWHERE
        first = min(self.hung | self.stopped, default=0)
        # Of a node one of whose workers stands still each is told of; else the one that tells which way it is.
        inside = self.gang is not None and self.gang.waits_since is not None
        slots = range(self.slots) if self.strays or (still and inside) else (first,)
        seen = (
            Sign.ELSEWHERE if slot in self.hung else Sign.WAITED if self.strays or (inside and slot != first) else sign
            for slot in slots
        )
        facts = tuple(self._scene(slot, sign) for slot, sign in zip(slots, seen, strict=True))
        self.post(events.Found(now=self.clock.now(), evidence=facts, scene=request))

    def _unseen(self, life: int, request: int) -> None:
        """Of workers of another gang there is nothing to tell."""
        if life == self.life and self.daemon_up:
            self.post(events.Found(now=self.clock.now(), scene=request))

    def _scene(self, slot: int, sign: Sign) -> Evidence:
        """Where one of its workers is."""
        plan, me = self._plan, self._me
        known = plan is not None and plan.generation == self.generation and me in plan.seat_of
        waits = sign is Sign.WAITED
        parted = waits and self.gang is not None and self.gang.disagrees
        fact = Evidence(
            kind=Kind.RECORDER if parted else Kind.STACK,
            sign=sign,
            rank=plan.first_rank(me) + slot if plan is not None and known else None,
            node=self.name,
            generation=self.generation,
            detail="in all_reduce" if waits else "in its own code: loop (train.py:12)",
            source="sim",
        )
        op = "broadcast" if self.parts_ways else "all_reduce"
        return replace(fact, group="default_pg", seq=7, op=op) if parted else fact

    def finds(self, fact: Evidence) -> None:
        """Something about this machine comes to its daemon's notice."""
        if self.awake:
            self.post(events.Found(now=self.clock.now(), evidence=(fact,)))

    def reads(self, sign: Sign) -> None:
        """A line of one of its logs is a claim: of its rank 0's in its gang, or, of a disk, of no gang's."""
        plan = self._plan
        ours = sign is Sign.VERSIONS and plan is not None and self.work is not Work.NONE and self._me in plan.seat_of
        rank = plan.first_rank(self._me) if ours and plan is not None else None
        self.finds(
            Evidence(
                kind=Kind.VERSION if sign is Sign.VERSIONS else Kind.DISK,
                sign=sign,
                rank=rank,
                node=self.name,
                generation=self.generation if ours else None,
                detail="as a log says",
                line_no=1,
                source="worker.log",
            )
        )

    @property
    def door(self) -> str:
        """Of its vault, where that matters."""
        return f"{self.name}:{40000 + self.vault_life}" if self.cluster.shape.vault_moves else ""

    @property
    def endpoint(self) -> str:
        """Of the TCPStore that this agent offers."""
        if self.agent_life != self._endpoint[0]:
            self._endpoint = self.agent_life, f"{self.name}:{20000 + self.agent_life}"
        return self._endpoint[1]

    @property
    def _plan(self) -> Plan | None:
        return self.state.view.plan if self.state else None

    def _agent_does(self, life: int, action: Action, plan: Plan | None) -> None:
        if life != self.agent_life or not self.agent_up:
            return
        if self.frozen:
            self.world.later(0.2, self._agent_does, life, action, plan)
            return
        match action:
            case orders.Launch(leave_s=leave_s) if plan is not None:
                self._launch(plan, leave_s)
            case orders.Reform() if plan is not None:
                self._reform(plan)
            case orders.Park() if plan is not None:
                self._park(plan)
            case orders.Halt():
                self._halt(action)
            case orders.Kill() if self.in_kernel:
                pass
            case orders.Kill(slot=slot, cause=cause, sign=sign):
                self.world.later(self.cluster.shape.ends_s, self._ended, life, self.generation, cause, slot, sign)

    def _ended(self, life: int, generation: int, cause: str, slot: int, sign: Sign | None) -> None:
        if life == self.agent_life and self.agent_up and self.generation == generation:
            self.dies(cause, own=False, slot=slot, sign=sign)

    def _launch(self, plan: Plan, leave_s: float) -> None:
        if not self.warm or self.generation >= plan.generation:
            return
        if leave_s and self.gang is not None and self.cluster.script:
            self.gang.saves_by_itself()
        self.leave_gang()
        self._clear()
        self.warm = False
        self.work, self.generation, self.born = Work.JOINING, plan.generation, plan.generation
        self.step = min(self.step, plan.resume)  # what its workers before have made is none of these
        self.world.note(Began(at=self.world.now, node=self.name, generation=plan.generation, fresh=True))
        self.phase = LOADING
        if self.cluster.script:
            self.work, self.phase = Work.TRAINING, UNTOLD
        self._warm_up()
        self.cluster.reach("forming", self)
        begun = self.warm_at if self.cluster.shape.load_ahead else self.world.now
        loaded_at = max(self.world.now, begun + self.cluster.shape.load_s)
        self.loaded_at = loaded_at + 0.2 + 0.3 * self.chance.random()
        self._come(plan, 0.0)
        self.tell()

    def _reform(self, plan: Plan) -> None:
        # A worker that hangs does not hear of a new generation: it says nothing, and the agent nothing for it.
        if not self.able or self.generation >= plan.generation:
            return
        if plan.grows and self.work is Work.DONE:
            self.generation = plan.generation  # of its agent; the worker leaves such an order alone
            self.tell()
            return
        trains_on = plan.grows and self.gang is not None and self.gang.lets_train(plan)
        self.cluster.finishing.pop(self.name, None)  # a new gang is a newer order than the one to end
        if not trains_on:
            self.leave_gang()
        self.work, self.generation, self.stall = Work.JOINING, plan.generation, None
        self.world.note(Began(at=self.world.now, node=self.name, generation=plan.generation, fresh=False))
        self.cluster.reach("reform", self)
        if trains_on and self.gang is not None:
            self.next_plan = plan
        else:
            self._come(plan, 0.02 + 0.04 * self.chance.random())
        self.tell()

    def part(self) -> None:
        """Out of a group: to the next one, or, where that was not heard of yet, to wait for it."""
        self.gang, self.stall = None, None
        plan, self.next_plan = self.next_plan, None
        if plan is not None:
            self._come(plan, 0.02 + 0.04 * self.chance.random())
        else:
            self.work = Work.PARKED
        self.tell()

    def _come(self, plan: Plan, in_s: float) -> None:
        """To where its gang meets, once the program has loaded."""
        self.world.later(max(in_s, self.loaded_at - self.world.now), self._join, self.agent_life, plan)

    def _join(self, life: int, plan: Plan) -> None:
        comes = Work.TRAINING if self.cluster.script else Work.JOINING
        if life == self.agent_life and self.work is comes and self.generation == plan.generation:
            if not self.able:
                self.world.later(0.3, self._join, life, plan)
                return
            self.phase = UNTOLD if self.cluster.script else MEETING
            if self.born == plan.generation and not self.cluster.script:
                self.step = plan.resume  # as a beat says that has made no step yet
            self.cluster.gang(plan).join(self)
            self.tell()

    def _park(self, plan: Plan) -> None:
        if not self.able or self.generation >= plan.generation:
            return
        if self.cluster.script:
            self.world.note(Bug(at=self.world.now, node=self.name, error="a script was told to wait for another gang"))
        self.leave_gang()
        self.work, self.generation, self.stall = Work.PARKED, plan.generation, None
        self.cluster.reach("held", self)
        self.tell()

    def _halt(self, action: orders.Halt) -> None:
        if self.alive:
            self.world.note(
                Halted(at=self.world.now, node=self.name, generation=self.generation, under=action.generation)
            )
        if action.save and self.alive and not self.cluster.script:
            self.cluster.finish(self, action)
        elif action.save and self.alive and (self.hung or self.stopped):
            # A script that stands still does not heed SIGTERM, and is killed as its time is up.
            self.world.later(action.within_s, self._killed, self.agent_life, self.generation, action.generation)
        else:
            self.halted(action.generation if action.save else self.generation)

    def _killed(self, life: int, generation: int, under: int) -> None:
        if life == self.agent_life and self.agent_up and self.alive and self.generation == generation:
            self.halted(under)

    def halted(self, generation: int) -> None:
        """The workers have ended as they were asked to. The agent remembers the newest generation that it was told of; of one
        that had failed, that it has, until its next launch.
        """
        if self.work is Work.FAILED:
            return
        generation = max(self.generation, generation)
        self.leave_gang()
        self._clear()
        self.generation = generation
        self.tell()

    def leave_gang(self) -> None:
        """Out of the group: its sockets close, which the others notice."""
        gang, self.gang, self.next_plan = self.gang, None, None
        if gang is not None:
            gang.lost(self, silent=False)

    def stalls(self, phase: str, for_s: float, budget_s: float) -> None:
        """The agent finds a worker standing still outside a collective."""
        slot = min(self.hung | self.stopped, default=0)
        self.stall = Stall(
            slot=slot,
            step=self.step,
            phase=phase,
            for_s=for_s,
            budget_s=budget_s,
            waiting=False,
            stopped=bool(self.stopped),
        )
        self.tell()

    def found_still(self, stall: Stall | None) -> None:
        """The agent finds that a worker has stalled in its gang, if it has."""
        if stall is None:
            return
        self.stall = stall
        if stall.waiting and self.next_plan is None and self.cluster.budgets.acts(stall):
            self.work = Work.STALLED
        self.tell()

    def reset(self) -> None:
        """A script fails of a peer's end."""
        said = "[pair.cc:547] Connection closed by peer"
        self.dies(f"exit code 1: RuntimeError: {said}", own=False, raised="RuntimeError")

    def dies(
        self, cause: str, *, own: bool, slot: int = 0, signal: int = 0, sign: Sign | None = None, raised: str = ""
    ) -> None:
        """A worker ends."""
        if not self.alive:
            return
        gang = self.gang
        at = gang.attempted if gang is not None and not self.cluster.script else self.step
        self.exit = Exit(
            generation=self.generation,
            slot=slot,
            step=at,
            cause=cause,
            own=own,
            signal=signal,
            sign=sign,
            raised=raised,
        )
        if self.cluster.shape.torchrun:
            self.exit = Exit(generation=self.generation, slot=None, step=0, cause="its workers failed", own=False)
        self.cluster.broke_up_over(self.stall)
        self.work, self.stall = Work.FAILED, None
        self.hung, self.stopped = set(), set()
        self.world.note(
            Died(at=self.world.now, node=self.name, generation=self.generation, step=at, cause=cause, own=own)
        )
        self.leave_gang()
        self.tell()
