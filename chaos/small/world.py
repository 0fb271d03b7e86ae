"""A small world as one value, and all that can happen in it next.

The one idea: a world is a tuple of numbers. `Rules.moves` says what may happen, `Rules.after` what the world is like then; the
decisions are `core.step`'s, the store's answers the simulator's store's. What is due at a moment happens in every order before
time goes on; a fault may come before any of it.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any, Final, NamedTuple

from chaos.history import Fact
from chaos.sim.store import ALL
from chaos.small.shelf import Held, Shelves
from chaos.small.values import GRID_S, JUST, NEVER, Cores
from elasticrl.contract import events, orders
from elasticrl.contract.evidence import Evidence, Kind, Sign
from elasticrl.contract.model import LOADING, MEETING, Exit, Member, Plan, Record, Rung, Stall, Verb, Work
from elasticrl.contract.settings import Health, Membership, Recovery, Settings, Timeouts
from elasticrl.core.node.state import State
from elasticrl.core.node.suspect import lives, watched
from elasticrl.core.step import subject

ALIVE: Final = frozenset({Work.JOINING, Work.TRAINING, Work.PARKED, Work.STALLED, Work.DONE})
TELL, EAR = "tell", "ear"  # an agent's word, and what the neighbours' detector says, on the way to the core
REQUEST: Final = 1  # steps of time for which an answer is waited for
SILENT: Final = 1  # steps of time without a beat after which a neighbour is suspected
BUDGET: Final = 2  # steps of time for which a worker may wait in a collective
FOR_S: Final = 2.0
HARD: Final = ("kill_node", "kill_daemon", "kill_worker")


def settings(nodes: int) -> Settings:
    """Short deadlines, all of them multiples of the step of time."""
    return Settings(
        lanes=6,
        retry_s=1.0,
        membership=Membership(
            min_nodes=1, max_nodes=nodes, lease_ttl_s=3.0, keepalive_s=1.0, report_s=2.0, settle_s=1.0, suspect_s=1.0,
            campaign_spread_s=0.0, rejoin_s=1.0,
        ),
        recovery=Recovery(start_s=4.0, reform_s=2.0, replace_s=3.0, restart_s=4.0, reload_s=4.0, probe_s=2.0, drain_s=2.0),
        health=Health(quarantine_s=4.0, quarantine_max_s=8.0),
        timeouts=Timeouts(default_phase_s=2.0, floor_s=1.0, slack=5.0, confirm_s=1.0, dump_s=1.0),
    )  # fmt: skip


class Timer(NamedTuple):
    """Something that a node does by itself, when so many steps of time have gone."""

    steps: int
    what: str
    about: int = 0  # a generation, a plan's number, a request
    more: int = 0


class Node(NamedTuple):
    """One node: its daemon, its agent, its workers, its vault."""

    life: int = 0
    up: bool = False  # the daemon runs
    core: int = 0
    wake: int = NEVER
    everyone: bool = False  # it watches all records
    news: tuple[str, ...] = ()  # scopes, the agent's word, the detector's: on their way to the core
    leased: bool = False  # it knows a lease of its own
    sent: int = NEVER  # steps of time since its newest acknowledged keepalive
    waits: tuple[tuple[int, int], ...] = ()  # answers that it waits for: of what, and how much longer
    newer: int = 0  # the newest record, decided while an older one was being written
    agent: int = 0  # the agent's life; 0: none
    agents: int = 0
    known: int = 0  # the agent's life that a daemon knew last
    work: str = Work.NONE
    generation: int = 0
    born: int = 0
    warm: bool = False
    step: int = 0
    phase: str = ""
    saved: int = 0
    exit: int = 0
    stall: bool = False
    gang: int = 0
    next: int = 0  # the plan that adds to the gang in which it trains on
    vault: tuple[int, int, int, int] = (-1, 0, 0, 0)  # version, generation, whose shards of it, of all
    lives: int = 0  # of the vault
    ends: int = 0  # under which generation its workers end with a save
    timers: tuple[Timer, ...] = ()
    heard: tuple[tuple[int, int, bool], ...] = ()  # of each node: which life, silent for how long, suspected
    away: int = 0  # for so long it does not reach the store
    wanted: bool = True  # it is to run
    orders: tuple[str, int, int] = ("", 0, 0)  # the newest order to its agent, for which plan, how often at this moment


class Gang(NamedTuple):
    """The workers of one generation."""

    generation: int
    plan: int
    joined: int = 0  # a mask of nodes
    counted: int = 0
    running: bool = False
    version: int = 0
    kept: int = 0
    steps: int = NEVER  # until its next act
    still: int = 0  # something has kept it from going on for so long
    halting: bool = False


class Save(NamedTuple):
    """A checkpoint on its way to the disk."""

    version: int
    head: int
    sources: tuple[tuple[int, int], ...]  # nodes, and which life of their vaults
    steps: int = 1


class Request(NamedTuple):
    """Something that was sent to the store."""

    node: int
    life: int
    action: int
    lapsed: int  # how long its sender's lease had been unsure, by a true clock
    stray: bool = False  # it may come at any time while a lease would last, or never
    left: int = 0  # how much of that is left


class Past(NamedTuple):
    """What the judge has to remember."""

    touched: int = 0  # nodes that something befell
    late: bool = False  # the store was slow, or away
    leader: int = 0
    asked: bool = False  # a stop was asked
    formed: bool = False  # the newest plan's gang has formed
    began: int = 0  # nodes whose workers were told of the newest plan
    sealed: int = -1
    ring: tuple[int, ...] = ()  # who sealed it, in rank order
    lost: int = 0  # whose memory has gone since


class World(NamedTuple):
    """All of it."""

    nodes: tuple[Node, ...]
    held: int  # by the store
    leases: tuple[tuple[int, int, int], ...] = ()  # node, life, and for how long
    gangs: tuple[Gang, ...] = ()
    saves: tuple[Save, ...] = ()
    disk: int = 0  # the newest step whose checkpoint is whole
    whole: int = 0  # a mask of steps that are
    requests: tuple[Request, ...] = ()
    down: int = 0  # for so long the store is down
    cuts: tuple[tuple[int, int, int], ...] = ()  # pairs of nodes that do not reach each other, and for how long
    faults: int = 0  # so many may still come
    turns: int = 0  # so often something that is due may still come before what is its turn
    past: Past = Past()


Move = tuple[Any, ...]  # what happens, and to whom: ("news", 0, "plan"), ("fault", "kill_node", 1, 2)


@dataclass(slots=True)
class Turn:
    """A world that is being changed."""

    world: World
    facts: list[Fact] = field(default_factory=list)
    events: list[tuple[str, Any]] = field(default_factory=list)  # what the judge asks for beside facts
    bug: str = ""


class Rules:
    """How a world goes on."""

    def __init__(self, nodes: int, *, steps: int = 2, cores: Cores | None = None) -> None:
        self.count, self.steps = nodes, steps
        self.settings = settings(nodes)
        self.names = tuple(f"n{i}" for i in range(nodes))
        self.cores = cores or Cores()
        self.shelves = Shelves(self.cores, self.names)
        self.of = self.cores.numbers.of
        self._ears: dict[int, tuple[int, ...]] = {}
        self.lease = round(self.settings.membership.lease_ttl_s / GRID_S)
        self.ticks = self.of(events.Tick(now=JUST))
        self.held_event = self.of(events.Leased(now=JUST, sent=0.0, held=True))
        self.gone_event = self.of(events.Leased(now=JUST, sent=0.0, held=False))

    def value(self, number: int) -> Any:
        """What has this number."""
        return self.cores.numbers.values[number]

    def member(self, node: int, life: int) -> Member:
        """A node's life."""
        return Member(node=self.names[node], incarnation=life)

    def plan(self, world: World) -> Plan | None:
        """The newest plan."""
        held: Held = self.value(world.held)
        return held.shared.plan

    def start(self, faults: int, turns: int = 0) -> World:
        """All nodes are switched on, and nothing has happened."""
        count = self.count
        blank = Node(heard=((0, 0, False),) * count)
        world = World(nodes=(blank,) * count, held=self.of(Held()), faults=faults, turns=turns)
        turn = Turn(world)
        for node in range(count):
            self._boot(turn, node)
        return turn.world

    # ---- what may happen

    def urgent(self, world: World) -> list[Move]:
        """What is due at this moment, in some order."""
        found: list[Move] = []
        for i, node in enumerate(world.nodes):
            found += [("timer", i, timer) for timer in node.timers if timer.steps == 0]
            if not node.up:
                continue
            blocked = world.down or node.away
            found += [("news", i, scope) for scope in node.news if scope in (TELL, EAR) or not blocked]
            if node.wake == 0:
                found.append(("tick", i))
        found += [("request", request) for request in world.requests if not request.stray]
        found += [("gang", gang.generation) for gang in world.gangs if gang.steps == 0]
        found += [("save", save) for save in world.saves if save.steps == 0]
        found += [("expire", i, life) for i, life, left in world.leases if left == 0 and not world.down]
        return found

    def moves(self, world: World) -> list[Move]:
        """All that may happen next, but for faults."""
        due = self.urgent(world)
        found: list[Move] = due[:1] or [("time",)]
        if world.turns:
            found += [("first", move) for move in due[1:]]
        found += [("stray", request) for request in world.requests if request.stray]
        return found

    def faults(self, world: World) -> Iterator[Move]:
        """Every fault that may come now."""
        if not world.faults or self.over(world):
            return
        for i, node in enumerate(world.nodes):
            yield from (("fault", *fault) for fault in self._faults_of(i, node))
        yield from (("fault", "lose_lease", i, life) for i, life, _ in world.leases)
        for request in world.requests:
            if not request.stray:
                yield from (("fault", kind, request) for kind in ("lose_request", "lose_answer", "repeat_request"))
        if not world.down:
            yield ("fault", "store_outage", self.lease + 1)
        if not world.cuts:
            pairs = combinations(range(self.count), 2)
            yield from (("fault", "cut", a, b, steps) for a, b in pairs for steps in (2 * self.lease, NEVER))
        # More than once: the second one comes to a job that is stopped.
        yield from (("fault", "stop", i) for i in [i for i, node in enumerate(world.nodes) if node.up][:1])

    def _faults_of(self, i: int, node: Node) -> Iterator[Move]:
        """Those of one node: before its lease is over it is back, or well after."""
        if node.agent and node.work in ALIVE:
            yield ("kill_worker", i)
        if node.up:
            yield from (("kill_daemon", i), ("drain", i))
            if not node.away:
                yield ("cut_store", i)
        if node.up or node.agent:
            yield from (("kill_node", i, 1), ("kill_node", i, self.lease + 2))

    def over(self, world: World) -> bool:
        """Has everybody left?"""
        return not any(node.up or node.agent or node.timers for node in world.nodes)

    def after(self, world: World, move: Move) -> Turn:
        """What comes of it."""
        turn = Turn(world)
        if move[0] == "fault":
            turn.world = turn.world._replace(faults=world.faults - 1)
            getattr(self, "_fault_" + move[1])(turn, *move[2:])
        elif move[0] == "first":
            turn.world = turn.world._replace(turns=world.turns - 1)
            getattr(self, "_on_" + move[1][0])(turn, *move[1][1:])
        else:
            getattr(self, "_on_" + move[0])(turn, *move[1:])
        self._tidy(turn)
        return turn

    def _tidy(self, turn: Turn) -> None:
        """What can have no effect any more is forgotten: so that two worlds which differ in that alone are one."""
        world = turn.world
        requests = tuple(sorted(r for r in world.requests if not r.stray or self._may_matter(world, r)))
        if requests != world.requests:
            turn.world = world._replace(requests=requests)

    def _may_matter(self, world: World, request: Request) -> bool:
        """Can this stray request still change the store? Revisions only rise: what fails once fails for ever."""
        shared, action = self.value(world.held).shared, self.value(request.action)
        match action:
            case events.Propose() | events.WriteCommit() | events.Restore():
                answer = self._asked(world, request)
                return bool(answer.held != world.held)
            case events.Publish():
                return self._leased(world, request.node, request.life)
            case events.Campaign(over=over):
                return self._leased(world, request.node, request.life) and over in (0, shared.leader_revision)
            case events.Confine(if_leader=leader) | events.Inspect(if_leader=leader):
                return bool(leader == shared.leader_revision)
        return True

    # ---- symmetric nodes

    def swapped(self, world: World, order: tuple[int, ...]) -> World:
        """The same world, in which node `i` is called as node `order[i]` was."""
        if order == tuple(range(self.count)):
            return world
        back = tuple(order.index(i) for i in range(self.count))

        def value(number: int) -> int:
            return self.cores.swapped(number, order)

        def mask(bits: int) -> int:
            return sum(1 << order[i] for i in range(self.count) if bits >> i & 1)

        def request(one: Request) -> Request:
            return one._replace(node=order[one.node], action=value(one.action))

        def node(one: Node) -> Node:
            version, by, shards, of = one.vault
            return one._replace(
                core=value(one.core), newer=value(one.newer), exit=value(one.exit), next=value(one.next),
                waits=tuple(sorted((value(about), left) for about, left in one.waits)),
                vault=(version, by, mask(shards), mask(of)), timers=tuple(sorted(map(timer, one.timers))),
                heard=tuple(one.heard[i] for i in back),
            )  # fmt: skip

        def timer(one: Timer) -> Timer:
            about = value(one.about) if one.what == "join" else one.about
            return one._replace(about=about, more=mask(one.more))

        past = world.past
        return world._replace(
            nodes=tuple(node(world.nodes[i]) for i in back),
            held=value(world.held),
            leases=tuple(sorted((order[i], life, left) for i, life, left in world.leases)),
            gangs=tuple(
                sorted(g._replace(plan=value(g.plan), joined=mask(g.joined), counted=mask(g.counted)) for g in world.gangs)
            ),
            saves=tuple(
                sorted(
                    save._replace(head=order[save.head], sources=tuple((order[i], life) for i, life in save.sources))
                    for save in world.saves
                )
            ),
            requests=tuple(sorted(map(request, world.requests))),
            cuts=tuple(sorted((min(order[a], order[b]), max(order[a], order[b]), left) for a, b, left in world.cuts)),
            past=past._replace(
                touched=mask(past.touched), leader=value(past.leader), began=mask(past.began), lost=mask(past.lost),
                ring=tuple(order[i] for i in past.ring),
            ),
        )  # fmt: skip

    # ---- changing a part

    def _node(self, turn: Turn, i: int, **changes: Any) -> Node:
        node = turn.world.nodes[i]._replace(**changes)
        nodes = turn.world.nodes
        turn.world = turn.world._replace(nodes=(*nodes[:i], node, *nodes[i + 1 :]))
        return node

    def _past(self, turn: Turn, **changes: Any) -> None:
        turn.world = turn.world._replace(past=turn.world.past._replace(**changes))

    def _hear(self, turn: Turn, i: int, *news: str) -> None:
        node = turn.world.nodes[i]
        if node.up and not set(news) <= set(node.news):
            self._node(turn, i, news=tuple(sorted({*node.news, *news})))

    def _later(self, turn: Turn, i: int, timer: Timer) -> None:
        timers = turn.world.nodes[i].timers
        self._node(turn, i, timers=tuple(sorted({*timers, timer})))

    # ---- the core

    def _post(self, turn: Turn, i: int, event: int) -> None:
        """An event reaches a core, and what it decides is done. A keepalive's answer comes at once: it touches nobody else."""
        waiting = [event]
        while waiting:
            node = turn.world.nodes[i]
            if not node.up:
                return
            try:
                core, wake, actions = self.cores.decide(node.core, waiting.pop(0))
            except AssertionError as error:
                turn.bug = f"{self.names[i]}: {error}"
                return
            self._node(turn, i, core=core, wake=wake)
            life = node.life
            for action in actions:
                waiting += self._perform(turn, i, action)
                if not turn.world.nodes[i].up or turn.world.nodes[i].life != life:
                    return

    def _perform(self, turn: Turn, i: int, number: int) -> list[int]:
        action = self.value(number)
        match action:
            case events.Leave(code=code):
                self._leaves(turn, i, code)
            case events.Watch(everyone=everyone):
                node = turn.world.nodes[i]
                news = tuple(scope for scope in node.news if scope in (TELL, EAR))
                self._node(turn, i, everyone=everyone, news=tuple(sorted((*news, ALL))))
            case orders.Launch(place=place):
                self._ordered(turn, i, "launch", place.generation)
                self._launch(turn, i, self._plan(turn, i))
            case orders.Reform(place=place):
                self._ordered(turn, i, "reform", place.generation)
                self._reform(turn, i, self._plan(turn, i))
            case orders.Park(generation=generation):
                self._ordered(turn, i, "park", generation)
                self._park_for(turn, i, self._plan(turn, i))
            case orders.Halt():
                self._halt(turn, i, action)
            case orders.Kill(cause=cause, sign=sign):
                self._dies(turn, i, cause, sign)
            case events.LookAt(request=request):
                self._later(turn, i, Timer(0, "looked", request))
            case events.Probe(generation=generation, targets=targets):
                self._ordered(turn, i, "probe", generation)
                self._later(turn, i, Timer(1, "probed", generation, self._mask(targets)))
            case events.Try(found=found, targets=targets):
                self._later(turn, i, Timer(1, "tried", found, self._mask(targets)))
            case _:
                return self._send(turn, i, number, action)
        return []

    def _plan(self, turn: Turn, i: int) -> Plan:
        """That a node's core sees, and gives its orders by."""
        state: State = self.value(turn.world.nodes[i].core)
        assert state.view.plan is not None
        return state.view.plan

    def _ordered(self, turn: Turn, i: int, what: str, generation: int) -> None:
        """An order needs its time: it is not given again at the same moment."""
        before = turn.world.nodes[i].orders
        times = before[2] + 1 if before[:2] == (what, generation) else 1
        self._node(turn, i, orders=(what, generation, times))
        if times > 1:
            turn.events.append(("ordered", (i, what, generation)))

    def _mask(self, names: Any) -> int:
        return sum(1 << self.names.index(name) for name in names)

    def _send(self, turn: Turn, i: int, number: int, action: events.Action) -> list[int]:
        """One request, as the shell makes it: one of a kind at a time."""
        node, about = turn.world.nodes[i], self._about(action)
        publishes = isinstance(action, events.Publish)
        if any(kind == about for kind, _ in node.waits):
            if publishes:
                self._node(turn, i, newer=number)
            return []
        if publishes and not node.leased:
            return []
        if isinstance(action, events.Campaign) and not node.leased:
            return []
        reached = not (turn.world.down or node.away)
        if isinstance(action, events.KeepAlive) and reached:
            return [self._kept_alive(turn, i)]
        self._node(turn, i, waits=tuple(sorted((*node.waits, (about, REQUEST)))))
        if reached:
            lapsed = max(0, min(node.sent, 2 * self.lease) - self.lease)
            request = Request(i, node.life, number, lapsed)
            turn.world = turn.world._replace(requests=tuple(sorted((*turn.world.requests, request))))
        return []

    def _about(self, action: events.Action) -> int:
        about = subject(action)
        return self.of((about,) if isinstance(about, str) else about)

    def _kept_alive(self, turn: Turn, i: int) -> int:
        """A keepalive and its answer."""
        node = turn.world.nodes[i]
        if node.leased and not self._leased(turn.world, i, node.life):
            self._node(turn, i, leased=False, sent=NEVER)
            return self.gone_event
        self._node(turn, i, leased=True, sent=0)
        others = (lease for lease in turn.world.leases if lease[:2] != (i, node.life))
        turn.world = turn.world._replace(leases=tuple(sorted((*others, (i, node.life, self.lease)))))
        return self.held_event

    def _leased(self, world: World, i: int, life: int) -> bool:
        return any(lease[:2] == (i, life) for lease in world.leases)

    def _asked(self, world: World, request: Request) -> Any:
        i = request.node
        leased = self._leased(world, i, request.life)
        member = self.member(i, request.life)
        return self.shelves.ask(world.held, request.action, member, leased, request.lapsed)

    def _applied(self, turn: Turn, request: Request) -> bool:
        """A request reaches the store. Does its sender's lease stand?"""
        answer = self._asked(turn.world, request)
        self._stored(turn, answer)
        return not answer.gone

    def _stored(self, turn: Turn, answer: Any) -> None:
        turn.facts += answer.facts
        turn.world = turn.world._replace(held=answer.held)
        for i, node in enumerate(turn.world.nodes):
            scopes = [*answer.shared, *(scope for whose, scope in answer.own if whose == i or node.everyone)]
            if scopes and ALL not in node.news:
                self._hear(turn, i, *scopes)

    def _answered(self, turn: Turn, request: Request, held: bool) -> None:
        """The answer comes back: it ends the waiting."""
        i, action = request.node, self.value(request.action)
        node = turn.world.nodes[i]
        if not node.up or node.life != request.life:
            return
        about = self._about(action)
        newer = 0
        if any(kind == about for kind, _ in node.waits):
            if isinstance(action, events.Publish):
                newer = node.newer
            waits = tuple(wait for wait in node.waits if wait[0] != about)
            self._node(turn, i, waits=waits, newer=0 if newer else node.newer)
        if not held:
            self._node(turn, i, leased=False)
            self._post(turn, i, self.gone_event)
        if newer and newer != request.action and turn.world.nodes[i].up:
            self._send(turn, i, newer, self.value(newer))

    # ---- what is due

    def _on_news(self, turn: Turn, i: int, scope: str) -> None:
        node = turn.world.nodes[i]
        left = () if scope == ALL else node.news
        kept = (TELL, EAR) if scope == ALL else ()
        news = tuple(s for s in (left or node.news) if s != scope and (scope != ALL or s in kept))
        node = self._node(turn, i, news=news)
        if scope == TELL:
            self._post(turn, i, self._word(node))
        elif scope == EAR:
            self._judge(turn, i)
        else:
            before = node.core
            event = self.shelves.seen(node.core, turn.world.held, scope, node.everyone)
            self._post(turn, i, event)
            if turn.world.nodes[i].core != before:
                self._ring(turn, i)

    def _word(self, node: Node) -> int:
        """What the agent says of its workers."""
        stall = (
            Stall(slot=0, step=node.step, phase="reduce", for_s=FOR_S, budget_s=FOR_S, waiting=True)
            if node.stall
            else None
        )
        return self.of(
            events.Workers(
                now=JUST,
                work=Work(node.work),
                generation=node.generation,
                born=node.born,
                warm=node.warm,
                step=node.step,
                phase=node.phase,
                saved=node.saved,
                manifest=f"step-{node.saved}" if node.saved else "",
                exit=self.value(node.exit),
                stall=stall,
                endpoint=self._endpoint(node),
            )
        )

    def _endpoint(self, node: Node) -> str:
        name = self.value(node.core).me.node if node.core else ""
        return f"{name}:{20000 + node.agent}" if node.agent else ""

    def _on_tick(self, turn: Turn, i: int) -> None:
        self._post(turn, i, self.ticks)

    def _on_request(self, turn: Turn, request: Request) -> None:
        self._take(turn, request)
        if turn.world.down or turn.world.nodes[request.node].away:
            return
        held = self._applied(turn, request)
        self._answered(turn, request, held)

    def _take(self, turn: Turn, request: Request) -> None:
        requests = list(turn.world.requests)
        requests.remove(request)
        turn.world = turn.world._replace(requests=tuple(requests))

    def _on_stray(self, turn: Turn, request: Request) -> None:
        self._take(turn, request)
        if not turn.world.down:
            self._applied(turn, request)

    def _on_expire(self, turn: Turn, i: int, life: int) -> None:
        self._drop(turn, i, life)

    def _drop(self, turn: Turn, i: int, life: int) -> None:
        leases = tuple(lease for lease in turn.world.leases if lease[:2] != (i, life))
        turn.world = turn.world._replace(leases=leases)
        self._stored(turn, self.shelves.drop(turn.world.held, self.member(i, life)))

    def _on_time(self, turn: Turn) -> None:
        """One step of time goes."""
        world = turn.world
        nodes = []
        for node in world.nodes:
            core = self.cores.later(node.core, 1) if node.up else node.core
            waits = tuple((about, left - 1) for about, left in node.waits if left > 1)
            over = any(left == 1 and self.value(about)[0] == "Publish" for about, left in node.waits)
            timers = tuple(timer._replace(steps=timer.steps - 1) for timer in node.timers)
            nodes.append(
                node._replace(
                    core=core,
                    wake=node.wake if node.wake == NEVER or not node.up else node.wake - 1,
                    waits=waits,
                    newer=0 if over else node.newer,
                    timers=tuple(sorted(timers)),
                    away=max(0, node.away - 1),
                    orders=("", 0, 0),
                    sent=node.sent if node.sent == NEVER else min(2 * self.lease + 1, node.sent + 1),
                )
            )
        down = max(0, world.down - 1)
        leases = tuple((i, life, left if down else max(0, left - 1)) for i, life, left in world.leases)
        if world.down and not down:  # the store is back, under a new leader of its own: leases begin anew
            leases = tuple((i, life, self.lease) for i, life, _ in world.leases)
        turn.world = world._replace(
            nodes=tuple(nodes), held=self.shelves.later(world.held), leases=leases, down=down,
            gangs=tuple(g._replace(steps=g.steps if g.steps == NEVER else g.steps - 1) for g in world.gangs),
            saves=tuple(save._replace(steps=save.steps - 1) for save in world.saves),
            requests=tuple(r._replace(left=r.left - 1) for r in world.requests if r.left > 1),
            cuts=tuple((a, b, left if left == NEVER else left - 1) for a, b, left in world.cuts if left > 1),
        )  # fmt: skip
        for i in range(self.count):
            self._listen(turn, i)

    # ---- beats

    def _ears_of(self, core: int) -> tuple[int, ...]:
        """Which life of each node this one listens to."""
        found = self._ears.get(core)
        if found is None:
            state: State = self.value(core)
            plan, reach = state.view.plan, self.settings.membership.neighbours
            known = lives(plan, watched(plan, state.me, reach))
            found = tuple(known.get(name, 0) for name in self.names)
            self._ears[core] = found
        return found

    def _ring(self, turn: Turn, i: int) -> None:
        """Another plan: other neighbours, or other lives of them."""
        node = turn.world.nodes[i]
        if not node.up:
            return
        ears = self._ears_of(node.core)
        heard = tuple(was if was[0] == life else (life, 0, False) for was, life in zip(node.heard, ears, strict=True))
        if heard != node.heard:
            self._node(turn, i, heard=heard)

    def _linked(self, world: World, a: int, b: int) -> bool:
        return not any({a, b} == {x, y} for x, y, _ in world.cuts)

    def _audible(self, world: World, speaker: int, life: int, listener: int) -> bool:
        node = world.nodes[speaker]
        return node.up and node.life == life and self._linked(world, speaker, listener)

    def _listen(self, turn: Turn, i: int) -> None:
        """Whose beats have come in this step of time, and whose not?"""
        node = turn.world.nodes[i]
        if not node.up:
            return
        heard, changed = [], False
        for other, (life, silent, suspected) in enumerate(node.heard):
            now = 0 if not life or self._audible(turn.world, other, life, i) else min(SILENT, silent + 1)
            changed = changed or (now >= SILENT) != suspected
            heard.append((life, now, suspected))
        self._node(turn, i, heard=tuple(heard))
        if changed:
            self._hear(turn, i, EAR)

    def _judge(self, turn: Turn, i: int) -> None:
        for other, (life, silent, suspected) in enumerate(turn.world.nodes[i].heard):
            if (silent >= SILENT) == suspected or not life:
                continue
            heard = list(turn.world.nodes[i].heard)
            heard[other] = (life, silent, silent >= SILENT)
            self._node(turn, i, heard=tuple(heard))
            kind = events.Suspected if silent >= SILENT else events.Cleared
            self._post(turn, i, self.of(kind(now=JUST, node=self.names[other])))

    # ---- lives

    def _boot(self, turn: Turn, i: int) -> None:
        """A node's power comes."""
        self._node(turn, i, wanted=True)
        for gang in turn.world.gangs:
            if gang.running and i in self._seats(gang):
                self._break(turn, gang.generation)
        self._start_agent(turn, i)
        self._start_daemon(turn, i)

    def _start_daemon(self, turn: Turn, i: int) -> None:
        node = turn.world.nodes[i]
        if node.up or not node.wanted:
            return
        adopted = bool(node.agent) and node.agent == node.known
        if not node.agent:
            self._start_agent(turn, i)
            node = turn.world.nodes[i]
        life = node.life if adopted else node.life + 1
        held: Held = self.value(turn.world.held)
        me = self.member(i, life)
        card = Record(member=me, beat=f"{self.names[i]}:7461", bits="same", since=held.intents)
        state = State(settings=self.settings, me=me, card=card, met=0 if adopted else None)
        core = self.cores.remember(state)
        self._node(
            turn, i, life=life, up=True, core=core, wake=0, everyone=False, news=(ALL, TELL), waits=(), newer=0,
            leased=node.leased if adopted else False, sent=NEVER, known=node.agent, heard=((0, 0, False),) * self.count,
        )  # fmt: skip

    def _end_daemon(self, turn: Turn, i: int) -> None:
        if turn.world.nodes[i].up:
            self._node(
                turn, i, up=False, core=0, wake=NEVER, everyone=False, news=(), waits=(), newer=0, sent=NEVER,
                heard=((0, 0, False),) * self.count,
                timers=tuple(t for t in turn.world.nodes[i].timers if t.what not in ("looked", "probed", "tried")),
            )  # fmt: skip

    def _start_agent(self, turn: Turn, i: int) -> None:
        node = turn.world.nodes[i]
        if node.agent:
            return
        agents = node.agents + 1
        node = self._node(turn, i, agent=agents, agents=agents, known=agents if node.up else node.known, warm=False)
        self._later(turn, i, Timer(1, "warm"))

    def _end_agent(self, turn: Turn, i: int, *, silent: bool) -> None:
        node = turn.world.nodes[i]
        if not node.agent:
            return
        self._leave_gang(turn, i, silent=silent)
        timers = tuple(t for t in turn.world.nodes[i].timers if t.what not in ("warm", "join", "halt", "reform"))
        self._node(
            turn, i, agent=0, work=Work.NONE, generation=0, born=0, warm=False, step=0, phase="", saved=0, exit=0,
            stall=False, next=0, ends=0, timers=timers,
        )  # fmt: skip

    def _lose_vault(self, turn: Turn, i: int) -> None:
        node = turn.world.nodes[i]
        self._node(turn, i, vault=(-1, 0, 0, 0), lives=min(9, node.lives + 1))
        self._past(turn, lost=turn.world.past.lost | 1 << i)
        gang = next((g for g in turn.world.gangs if g.generation == node.gang), None)
        if gang is not None and not gang.running:
            self._break(turn, gang.generation)

    def _leaves(self, turn: Turn, i: int, code: int) -> None:
        node = turn.world.nodes[i]
        turn.events.append(("left", (i, code)))
        self._past(turn, touched=turn.world.past.touched | 1 << i)
        self._node(turn, i, wanted=False)
        self._lose_vault(turn, i)
        self._end_agent(turn, i, silent=False)
        self._end_daemon(turn, i)
        self._node(turn, i, leased=False)
        if self._leased(turn.world, i, node.life) and not (turn.world.down or node.away):
            self._drop(turn, i, node.life)

    # ---- the agent

    def _on_timer(self, turn: Turn, i: int, timer: Timer) -> None:
        node = turn.world.nodes[i]
        self._node(turn, i, timers=tuple(t for t in node.timers if t != timer))
        match timer.what:
            case "warm":
                self._node(turn, i, warm=True)
                self._hear(turn, i, TELL)
            case "join":
                self._join(turn, i, timer.about)
            case "back":
                self._boot(turn, i)
            case "daemon":
                self._start_daemon(turn, i)
            case "halt":
                self._halted(turn, i, timer.about)
            case "looked":
                self._looked(turn, i, timer.about)
            case "probed":
                others = self._others(timer.more)
                out = tuple(self.names[o] for o in others if not self._reached(turn.world, i, o))
                self._post(turn, i, self.of(events.Probed(now=JUST, generation=timer.about, unreachable=out)))
            case "tried":
                others = self._others(timer.more)
                reached = tuple(self.names[o] for o in others if self._reached(turn.world, i, o))
                out = tuple(self.names[o] for o in others if not self._reached(turn.world, i, o))
                event = events.Tried(now=JUST, found=timer.about, reached=reached, unreachable=out)
                self._post(turn, i, self.of(event))

    def _others(self, mask: int) -> list[int]:
        return [i for i in range(self.count) if mask >> i & 1]

    def _reached(self, world: World, a: int, b: int) -> bool:
        return world.nodes[b].up and self._linked(world, a, b)

    def _looked(self, turn: Turn, i: int, request: int) -> None:
        node = turn.world.nodes[i]
        if not node.up:
            return
        state: State = self.value(node.core)
        plan = state.view.plan
        known = plan is not None and plan.generation == node.generation and state.me in plan.seat_of
        rank = plan.first_rank(state.me) if plan is not None and known else None
        fact = Evidence(
            kind=Kind.STACK, sign=Sign.WAITED if node.stall else Sign.ELSEWHERE, rank=rank, node=self.names[i],
            generation=node.generation, detail="in all_reduce" if node.stall else "in its own code: loop (train.py:12)",
            source="sim",
        )  # fmt: skip
        self._post(turn, i, self.of(events.Found(now=JUST, evidence=(fact,), scene=request)))

    def _launch(self, turn: Turn, i: int, plan: Plan) -> None:
        node = turn.world.nodes[i]
        if not node.agent or not node.warm or node.generation >= plan.generation:
            return
        self._leave_gang(turn, i, silent=False)
        number = self.of(plan)
        self._node(
            turn, i, warm=False, work=Work.JOINING, generation=plan.generation, born=plan.generation, exit=0, stall=False,
            phase=LOADING, ends=0,
        )  # fmt: skip
        self._began(turn, i, plan, fresh=True)
        self._later(turn, i, Timer(1, "warm"))
        self._later(turn, i, Timer(1, "join", number))
        self._hear(turn, i, TELL)

    def _began(self, turn: Turn, i: int, plan: Plan, *, fresh: bool) -> None:
        newest = self.plan(turn.world)
        if newest is not None and newest.generation == plan.generation:
            self._past(turn, began=turn.world.past.began | 1 << i)
        turn.events.append(("began", (i, plan, fresh)))

    def _reform(self, turn: Turn, i: int, plan: Plan) -> None:
        node = turn.world.nodes[i]
        if not node.agent or node.work not in ALIVE or node.generation >= plan.generation:
            return
        gang = self._gang(turn.world, node.gang)
        trains_on = plan.grows and gang is not None and gang.running and plan.generation == gang.generation + 1
        if not trains_on:
            self._leave_gang(turn, i, silent=False)
        timers = tuple(t for t in turn.world.nodes[i].timers if t.what != "halt")  # another gang is the newer order
        self._node(turn, i, work=Work.JOINING, generation=plan.generation, stall=False, ends=0, timers=timers)
        self._began(turn, i, plan, fresh=False)
        number = self.of(plan)
        if trains_on and gang is not None:
            self._node(turn, i, next=number)
            self._change(turn, gang._replace(steps=1) if gang.steps == NEVER else gang)
        else:
            self._later(turn, i, Timer(0, "join", number))
        self._hear(turn, i, TELL)

    def _park_for(self, turn: Turn, i: int, plan: Plan) -> None:
        node = turn.world.nodes[i]
        if not node.agent or node.work not in ALIVE or node.generation >= plan.generation:
            return
        self._leave_gang(turn, i, silent=False)
        self._node(turn, i, work=Work.PARKED, generation=plan.generation, stall=False)
        self._hear(turn, i, TELL)

    def _halt(self, turn: Turn, i: int, halt: orders.Halt) -> None:
        node = turn.world.nodes[i]
        alive = bool(node.agent) and node.work in ALIVE
        if alive:
            turn.events.append(("halted", (i, node.generation, halt.generation)))
        if not node.agent:
            return
        if not (halt.save and alive):
            self._halted(turn, i, halt.generation if halt.save else node.generation)
            return
        if node.ends:
            return
        self._node(turn, i, ends=halt.generation)
        self._later(turn, i, Timer(max(1, round(halt.within_s / GRID_S)), "halt", halt.generation))
        gang = self._gang(turn.world, node.gang)
        if gang is not None and gang.running:
            self._change(turn, gang._replace(halting=True, steps=1 if gang.steps == NEVER else gang.steps))
        elif not any(i in dict(save.sources) for save in turn.world.saves):
            self._later(turn, i, Timer(0, "halt", halt.generation))

    def _halted(self, turn: Turn, i: int, generation: int) -> None:
        node = turn.world.nodes[i]
        if not node.agent or node.work is Work.FAILED:  # an agent tells of that until its next launch
            return
        if node.ends and node.ends != generation:
            return
        generation = max(node.generation, generation)
        self._leave_gang(turn, i, silent=False)
        timers = tuple(t for t in turn.world.nodes[i].timers if t.what not in ("halt", "join"))
        self._node(
            turn, i, work=Work.NONE, generation=generation, born=0, exit=0, stall=False, phase="", ends=0, timers=timers
        )
        self._hear(turn, i, TELL)

    def _dies(self, turn: Turn, i: int, cause: str, sign: Sign | None) -> None:
        node = turn.world.nodes[i]
        if not node.agent or node.work not in ALIVE:
            return
        ended = Exit(generation=node.generation, slot=0, step=node.step, cause=cause, own=False, signal=9, sign=sign)
        self._leave_gang(turn, i, silent=False)
        timers = tuple(t for t in turn.world.nodes[i].timers if t.what not in ("join", "halt"))
        self._node(turn, i, exit=self.of(ended), work=Work.FAILED, stall=False, phase="", ends=0, timers=timers)
        self._hear(turn, i, TELL)

    # ---- gangs

    def _gang(self, world: World, generation: int) -> Gang | None:
        return next((gang for gang in world.gangs if gang.generation == generation), None) if generation else None

    def _change(self, turn: Turn, gang: Gang) -> None:
        others = (g for g in turn.world.gangs if g.generation != gang.generation)
        turn.world = turn.world._replace(gangs=tuple(sorted((*others, gang))))

    def _seats(self, gang: Gang) -> list[int]:
        return [self.names.index(seat.member.node) for seat in self.value(gang.plan).seats]

    def _join(self, turn: Turn, i: int, number: int) -> None:
        """A node's workers come to where their gang meets."""
        plan, node = self.value(number), turn.world.nodes[i]
        if not node.agent or node.work != Work.JOINING or node.generation != plan.generation:
            return
        self._node(turn, i, phase=MEETING, gang=plan.generation)
        self._hear(turn, i, TELL)
        gang = self._gang(turn.world, plan.generation) or Gang(plan.generation, number)
        gang = gang._replace(joined=gang.joined | 1 << i, counted=gang.counted | 1 << i)
        if gang.joined == sum(1 << seat for seat in self._seats(gang)):
            gang = gang._replace(steps=1)
        self._change(turn, gang)

    def _hindered(self, world: World, gang: Gang) -> bool:
        seats = self._seats(gang)
        if any(world.nodes[i].gang != gang.generation for i in seats):
            return True
        return any(not self._linked(world, a, b) for a in seats for b in seats if a < b)

    def _on_gang(self, turn: Turn, generation: int) -> None:
        gang = self._gang(turn.world, generation)
        assert gang is not None
        if self._hindered(turn.world, gang):
            self._change(turn, gang._replace(steps=1, still=min(BUDGET, gang.still + 1)))
            if gang.running and gang.still + 1 >= BUDGET:
                self._stalls(turn, gang)
            return
        if not gang.running:
            self._form(turn, gang)
            return
        if gang.still:
            self._relieved(turn, gang)
            gang = gang._replace(still=0)
        self._seal(turn, gang)

    def _stalls(self, turn: Turn, gang: Gang) -> None:
        for i in self._seats(gang):
            node = turn.world.nodes[i]
            if node.agent and node.work in ALIVE and node.gang == gang.generation and not node.stall:
                self._node(turn, i, stall=True, work=node.work if node.next else Work.STALLED)
                self._hear(turn, i, TELL)

    def _relieved(self, turn: Turn, gang: Gang) -> None:
        for i in self._seats(gang):
            node = turn.world.nodes[i]
            if node.gang == gang.generation and node.stall:
                self._node(turn, i, stall=False, work=Work.TRAINING if node.work == Work.STALLED else node.work)
                self._hear(turn, i, TELL)

    def _agreed(self, turn: Turn, gang: Gang) -> tuple[int, int, str]:
        """The version to go on from, the generation that kept it, and where it comes from."""
        plan: Plan = self.value(gang.plan)
        found: dict[tuple[int, int, int], int] = {}
        for i in self._seats(gang):
            version, generation, shards, of = turn.world.nodes[i].vault
            found[version, generation, of] = found.get((version, generation, of), 0) | shards
        whole = [(version, by) for (version, by, of), shards in found.items() if version >= 0 and shards == of]
        version, by = max(whole, default=(-1, 0))
        if plan.rung is not Rung.RELOAD and version >= plan.resume and version >= 0:
            return version, by, "vault"
        held: Held = self.value(turn.world.held)
        return held.shared.committed, 0, "disk" if held.shared.committed else "start"

    def _form(self, turn: Turn, gang: Gang) -> None:
        version, by, source = self._agreed(turn, gang)
        seats = self._seats(gang)
        turn.events.append(("resumed", (self.value(gang.plan), version, source, tuple(seats))))
        newest = self.plan(turn.world)
        if newest is not None and newest.generation == gang.generation:
            self._past(turn, formed=True)
        gang = gang._replace(running=True, version=version, kept=by, steps=1, still=0)
        self._change(turn, gang)
        for i in seats:
            self._node(turn, i, work=Work.TRAINING, step=version, phase="")
            self._hear(turn, i, TELL)
        if source == "vault":
            self._give_copies(turn, gang, seats)
        else:
            self._keep(turn, gang, seats)

    def _keep(self, turn: Turn, gang: Gang, seats: list[int]) -> None:
        """Each node keeps its own shard and those of the nodes before it."""
        copies = min(self.settings.copies, len(seats) - 1)
        everyone = sum(1 << i for i in seats)
        for place, i in enumerate(seats):
            mask = sum(1 << seats[(place - back) % len(seats)] for back in range(copies + 1))
            self._node(turn, i, vault=(gang.version, gang.generation, mask, everyone))

    def _give_copies(self, turn: Turn, gang: Gang, seats: list[int]) -> None:
        """What a gang goes on from lies as another has left it: each gives its own shard to those behind it."""
        copies = min(self.settings.copies, len(seats) - 1)
        found = (turn.world.nodes[i].vault for i in seats)
        of = next(vault[3] for vault in found if vault[:2] == (gang.version, gang.kept))
        key = (gang.version, gang.kept, of)
        held = {i: self._holds(turn.world.nodes[i], key) for i in seats}
        given = dict(held)
        for place, i in enumerate(seats):
            if held[i] >> i & 1:
                for hop in range(1, copies + 1):
                    given[seats[(place + hop) % len(seats)]] |= 1 << i
        for i in seats:
            self._node(turn, i, vault=(gang.version, gang.kept, given[i], of) if given[i] else (-1, 0, 0, 0))

    def _holds(self, node: Node, key: tuple[int, int, int]) -> int:
        version, by, shards, of = node.vault
        return shards if (version, by, of) == key else 0

    def _seal(self, turn: Turn, gang: Gang) -> None:
        seats = self._seats(gang)
        idle = gang.version >= self.steps
        if not idle:
            gang = gang._replace(version=gang.version + 1)
            self._keep(turn, gang, seats)
            self._past(turn, sealed=gang.version, ring=tuple(seats), lost=0)
            for i in seats:
                self._node(turn, i, step=gang.version)
                self._hear(turn, i, TELL)
        if gang.halting:
            self._change(turn, gang._replace(steps=NEVER))
            self._save(turn, gang, seats)
            return
        more = gang.version < self.steps or self._may_grow(turn.world, gang)
        self._change(turn, gang._replace(steps=1 if more or turn.world.cuts else NEVER))
        if self._grows(turn, gang):
            return
        if not idle:
            self._save(turn, gang, seats)

    def _may_grow(self, world: World, gang: Gang) -> bool:
        return any(world.nodes[i].next for i in self._seats(gang))

    def _grows(self, turn: Turn, gang: Gang) -> bool:
        seats = self._seats(gang)
        number = turn.world.nodes[seats[0]].next
        if not number:
            return False
        plan: Plan = self.value(number)
        to_be = self._gang(turn.world, plan.generation)
        there = to_be.counted if to_be else 0
        new = [self.names.index(s.member.node) for s in plan.seats if s.born == plan.generation]
        if any(not there >> i & 1 for i in new):
            return False
        self._break(turn, gang.generation)
        return True

    def _save(self, turn: Turn, gang: Gang, seats: list[int]) -> None:
        if any(save.version == gang.version for save in turn.world.saves):
            return
        sources = tuple((i, turn.world.nodes[i].lives) for i in seats)
        save = Save(gang.version, seats[0], sources)
        turn.world = turn.world._replace(saves=tuple(sorted((*turn.world.saves, save))))

    def _on_save(self, turn: Turn, save: Save) -> None:
        saves = tuple(s for s in turn.world.saves if s != save)
        turn.world = turn.world._replace(saves=saves)
        if all(turn.world.nodes[i].lives == life for i, life in save.sources):
            turn.world = turn.world._replace(whole=turn.world.whole | 1 << save.version)
            head = turn.world.nodes[save.head]
            if head.agent and save.version > head.saved:
                self._node(turn, save.head, saved=save.version)
                self._hear(turn, save.head, TELL)
        busy = {i for other in saves for i, _ in other.sources}
        for i, _ in save.sources:
            ends, gang = turn.world.nodes[i].ends, self._gang(turn.world, turn.world.nodes[i].gang)
            if gang is not None and set(self._seats(gang)) != set(dict(save.sources)):
                continue  # it is in another gang by now
            if ends and i not in busy:
                self._halted(turn, i, ends)

    def _leave_gang(self, turn: Turn, i: int, *, silent: bool) -> None:
        generation = turn.world.nodes[i].gang
        self._node(turn, i, gang=0, next=0)
        gang = self._gang(turn.world, generation)
        if gang is None:
            return
        self._change(
            turn, gang._replace(joined=gang.joined & ~(1 << i), steps=1 if gang.steps == NEVER else gang.steps)
        )
        if not silent:
            self._break(turn, generation)

    def _break(self, turn: Turn, generation: int) -> None:
        """The group is broken: its members leave it and wait, with what they hold."""
        gang = self._gang(turn.world, generation)
        if gang is None:
            return
        turn.world = turn.world._replace(gangs=tuple(g for g in turn.world.gangs if g.generation != generation))
        for i in self._seats(gang):
            node = turn.world.nodes[i]
            if node.gang == generation:
                self._part(turn, i)

    def _part(self, turn: Turn, i: int) -> None:
        node = turn.world.nodes[i]
        self._node(turn, i, gang=0, stall=False, next=0)
        if node.next:
            self._later(turn, i, Timer(0, "join", node.next))
        elif node.agent and node.work in ALIVE:
            self._node(turn, i, work=Work.PARKED)
            if node.ends:  # it ends without a save, unless another gang is told of first
                self._later(turn, i, Timer(0, "halt", node.ends))
        self._hear(turn, i, TELL)

    # ---- faults

    def _touch(self, turn: Turn, *nodes: int) -> None:
        self._past(turn, touched=turn.world.past.touched | sum(1 << i for i in set(nodes)))

    def _fault_kill_worker(self, turn: Turn, i: int) -> None:
        self._touch(turn, i)
        self._dies(turn, i, "signal 9 (SIGKILL)", None)

    def _fault_kill_daemon(self, turn: Turn, i: int) -> None:
        self._touch(turn, i)
        self._end_daemon(turn, i)
        self._later(turn, i, Timer(1, "daemon"))

    def _fault_kill_node(self, turn: Turn, i: int, back: int) -> None:
        self._touch(turn, i)
        self._lose_vault(turn, i)
        self._end_agent(turn, i, silent=False)
        self._end_daemon(turn, i)
        self._node(turn, i, timers=(Timer(back, "back"),), leased=False)

    def _fault_lose_lease(self, turn: Turn, i: int, life: int) -> None:
        self._touch(turn, i)
        self._drop(turn, i, life)

    def _fault_cut_store(self, turn: Turn, i: int) -> None:
        self._touch(turn, i)
        self._node(turn, i, away=self.lease + 2)

    def _fault_store_outage(self, turn: Turn, steps: int) -> None:
        self._past(turn, late=True)
        turn.world = turn.world._replace(down=steps)

    def _fault_cut(self, turn: Turn, a: int, b: int, steps: int) -> None:
        """For a while, or for ever."""
        self._touch(turn, a, b)
        world = turn.world
        gangs = tuple(g._replace(steps=1) if g.steps == NEVER and g.running else g for g in world.gangs)
        turn.world = world._replace(cuts=((a, b, steps),), gangs=gangs)

    def _fault_drain(self, turn: Turn, i: int) -> None:
        self._touch(turn, i)
        self._post(turn, i, self.of(events.Asked(now=JUST, verb=Verb.DRAIN, node=None)))

    def _fault_stop(self, turn: Turn, i: int) -> None:
        self._past(turn, asked=True)
        self._post(turn, i, self.of(events.Asked(now=JUST, verb=Verb.STOP, node=None)))

    def _fault_lose_request(self, turn: Turn, request: Request) -> None:
        """It may come later, or never."""
        self._strays(turn, request)
        self._take(turn, request)

    def _fault_lose_answer(self, turn: Turn, request: Request) -> None:
        """It is applied, and its sender does not hear of that."""
        self._touch(turn, request.node)
        self._past(turn, late=True)
        self._take(turn, request)
        self._applied(turn, request)

    def _fault_repeat_request(self, turn: Turn, request: Request) -> None:
        """It is applied, and may come once more."""
        self._strays(turn, request)
        self._on_request(turn, request)

    def _strays(self, turn: Turn, request: Request) -> None:
        self._touch(turn, request.node)
        self._past(turn, late=True)
        requests = (*turn.world.requests, request._replace(stray=True, left=self.lease))
        turn.world = turn.world._replace(requests=tuple(sorted(requests)))
