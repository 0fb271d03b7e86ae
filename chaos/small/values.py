"""Values that are known by a number: what is equal has one number, so that states of a small world are tuples of numbers.

The one idea: `core.step` knows no time but differences. Here it is always asked at the moment 0, and a core's memory is kept
with its times counted from there, so two nodes that are in the same situation at different hours are one value, and what the
core decides in it has to be computed once.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import cache
from math import ceil, inf
from typing import Any, Final

from elasticrl.contract import events
from elasticrl.contract.events import Action
from elasticrl.contract.evidence import Evidence
from elasticrl.contract.model import Plan, View
from elasticrl.core.node.state import Lead, State
from elasticrl.core.step import step

GRID_S: Final = 1.0  # time passes in such steps: a timer fires at the first of them that is not before it
JUST: Final = 1e-5  # an event comes this much after its moment, so that what is due at the moment is due
NEVER: Final = 99  # in steps of time: no timer
#: What was longer ago than this was this long ago, for no duration that it is compared with is longer (`world.settings`).
OLD_S: Final = 9.0
OLDEST_S: Final = {
    "leased": 4.0,  # a lease
    "adopted": 4.0,  # twice the time of a drain
    "moved_at": 2.0,  # a budget
    "looked_at": 2.0,
    "leaving_since": 2.0,  # a drain
    "reported": 2.0,  # until a record is written anew
    "vacant_since": 1.0,
    "since": 4.0,  # a lease
    "planned_at": 4.0,  # a rung
    "loaded_at": 4.0,
    "restored_at": 4.0,
    "parted_at": 4.0,
    "ready_at": 1.0,  # what settling takes
    "excused_at": 2.0,
    "stop_at": 2.0,
    "stalled_at": 4.0,
    "failed_at": 4.0,
    "done_at": 2.0,
    "doubted": 4.0,  # a lease, and a second
    "sent": 1.0,  # until what was lost is asked again
}


class Numbers:
    """All values that were met, by number."""

    def __init__(self) -> None:
        self.values: list[Any] = [None]
        self._by_key: dict[Any, int] = {None: 0}
        self._by_id: dict[int, int] = {id(None): 0}

    def of(self, value: Any) -> int:
        """The number of this value."""
        number = self._by_id.get(id(value))
        return number if number is not None else self._of(value)

    def _of(self, value: Any) -> int:
        key = self.key(value)
        number = self._by_key.get(key)
        if number is None:
            number = len(self.values)
            self.values.append(value)
            self._by_key[key] = number
            self._by_id[id(value)] = number
        return number

    def one(self, value: Any) -> Any:
        """The value that stands for all that are equal to it."""
        return self.values[self.of(value)]

    def key(self, value: Any) -> Any:
        """What tells this value from others, as a tuple of plain values and numbers."""
        if value is None or isinstance(value, str | int | float):
            return value
        if isinstance(value, tuple):
            return tuple(map(self.part, value))
        if isinstance(value, frozenset):
            return frozenset(map(self.part, value))
        if isinstance(value, Mapping):
            return ("map", *sorted(((self.part(k), self.part(v)) for k, v in value.items()), key=repr))
        if isinstance(value, State):
            return ("State", *(self.part(part) for part in vars(value).values()))
        kind: Any = type(value)
        assert hasattr(kind, "__dataclass_fields__"), f"no value of a small world: {value!r}"
        return (kind, *(self.part(getattr(value, name)) for name in _names(kind)))

    def part(self, value: Any) -> Any:
        """The same of what lies in another value: a number where it has one of its own."""
        if value is None or isinstance(value, str | int | float):
            return value
        return self.key(value) if isinstance(value, tuple | frozenset) else ("#", self.of(value))


@cache
def _names(kind: Any) -> tuple[str, ...]:
    return tuple(field.name for field in fields(kind))


TIMES: Final = (
    "stalled_at", "moved_at", "looked_at", "leased", "adopted", "leaving_since", "reported", "lost_since", "vacant_since",
)  # fmt: skip
LEAD_TIMES: Final = frozenset({
    "since", "planned_at", "loaded_at", "restored_at", "parted_at", "ready_at", "failed_at", "excused_at", "done_at", "stop_at",
    "backend_since",
})  # fmt: skip
LEAD_TABLES: Final = frozenset({"doubted", "absent", "confined", "well", "let_back"})  # of times

GROUPS: Final = tuple(field.name for field in fields(Lead) if field.name not in {"since", "rows"})


def ago(name: str, at: float, by_s: float = 0.0) -> float:
    """A time, `by_s` later: rounded, and no longer ago than anybody asks."""
    if at in (inf, -inf):
        return at
    return max(-OLDEST_S.get(name, OLD_S), round(at - by_s, 1))


def timeless(facts: tuple[Evidence, ...]) -> tuple[Evidence, ...]:
    """Facts as of just now, whenever they came: in a small world none is forgotten."""
    if all(fact.when in (None, 0.0) for fact in facts):
        return facts
    return tuple(replace(fact, when=0.0) if fact.when else fact for fact in facts)


def recent(facts: tuple[Evidence, ...], first: int) -> tuple[Evidence, ...]:
    """Those that no later gang has made a thing of the past."""
    kept = tuple(fact for fact in facts if fact.generation is None or fact.generation >= first)
    return timeless(facts if len(kept) == len(facts) else kept)


def plain_plan(plan: Plan) -> Plan:
    """A plan without what its verdict's facts say of time."""
    verdict = plan.verdict
    if verdict is None or timeless(verdict.because) is verdict.because:
        return plan
    return replace(plan, verdict=replace(verdict, because=timeless(verdict.because)))


def plain(action: Action) -> Action:
    """An action without times."""
    match action:
        case events.Publish(record=record) if timeless(record.evidence) is not record.evidence:
            return replace(action, record=replace(record, evidence=timeless(record.evidence)))
        case events.Propose(plan=plan) if plain_plan(plan) is not plan:
            return replace(action, plan=plain_plan(plan))
        case _:
            return action


@dataclass(slots=True)
class Cores:
    """What the cores decide, each question computed once."""

    numbers: Numbers = field(default_factory=Numbers)
    asked: int = 0
    _decided: dict[tuple[int, int], tuple[int, int, tuple[int, ...]]] = field(default_factory=dict)
    _later: dict[tuple[int, int], int] = field(default_factory=dict)
    _swapped: dict[tuple[int, tuple[int, ...]], int] = field(default_factory=dict)

    def of(self, number: int) -> State:
        """A core's memory."""
        state: State = self.numbers.values[number]
        return state

    def decide(self, core: int, event: int) -> tuple[int, int, tuple[int, ...]]:
        """The core's next memory, in how many steps of time it is to be woken, and its actions."""
        found = self._decided.get((core, event))
        if found is None:
            self.asked += 1
            decision = step(self.of(core), self.numbers.values[event])
            actions = tuple(
                self.numbers.of(plain(action)) for action in decision.actions if not isinstance(action, events.Say)
            )
            wake = NEVER if decision.wake_at == inf else max(1, ceil((decision.wake_at - 2 * JUST) / GRID_S))
            found = self.remember(decision.state), min(wake, NEVER), actions
            self._decided[core, event] = found
        return found

    def later(self, core: int, steps: int) -> int:
        """The same memory, so many steps of time later."""
        found = self._later.get((core, steps))
        if found is None:
            found = self.remember(self.of(core), steps * GRID_S)
            self._later[core, steps] = found
        return found

    def remember(self, state: State, by_s: float = 0.0) -> int:
        """The number of this memory, `by_s` later."""
        one, before = self.numbers.one, vars(state)
        times = {name: ago(name, at, by_s) for name in TIMES if (at := before[name]) is not None}
        trial, workers, probed = state.trial, state.workers, state.probed
        first = state.view.generation - 1
        return self.numbers.of(
            state.but(
                **times,
                view=self.view(state.view),
                workers=one(replace(workers, now=0.0)) if workers else None,
                probed=one(replace(probed, now=0.0)) if probed else None,
                trial=replace(trial, since=ago("", trial.since, by_s), at=ago("", trial.at, by_s)) if trial else None,
                evidence=recent(state.evidence, first),
                lead=self._lead(state.lead, first, by_s) if state.lead else None,
                sent={about: (one(plain(action)), ago("sent", at, by_s)) for about, (action, at) in state.sent.items()},
                reason="",
                calm_until=-inf,  # what is only remembered to save work tells no two memories apart
            )
        )

    def view(self, view: View) -> View:
        """A view made of values that stand for all that are equal."""
        one = self.numbers.one
        records = one(view.records) if view.records is not None else None
        quarantines = one(view.quarantines) if view.quarantines is not None else None
        found: View = one(
            replace(view, revision=1, plan=one(view.plan), own=one(view.own), records=records, quarantines=quarantines)
        )
        return found

    def _lead(self, lead: Lead, first: int, by_s: float) -> Lead:
        lead = replace(_later(lead, by_s), **{name: _later(getattr(lead, name), by_s) for name in GROUPS}, rows=None)
        known, custody = lead.dossier, lead.custody
        finding = known.finding
        if finding is not None:
            verdict = replace(finding.verdict, because=timeless(finding.verdict.because))
            finding = replace(finding, of=timeless(finding.of), verdict=verdict)
        doubted = {member: at for member, at in custody.doubted.items() if at > -OLDEST_S["doubted"]}
        custody = replace(custody, doubted=doubted, put_out=(0.0,) * len(custody.put_out))
        known = replace(
            known, facts=recent(known.facts, first), finding=finding, passed=dict.fromkeys(known.passed, 0.0),
            marks=tuple((0.0, step) for _, step in known.marks), read={},
        )  # fmt: skip
        return replace(lead, custody=custody, dossier=known)

    # ---- symmetric nodes

    def swapped(self, number: int, order: tuple[int, ...]) -> int:
        """The same value, of which node `i` is called as node `order[i]` was."""
        if number == 0:
            return 0
        found = self._swapped.get((number, order))
        if found is None:
            found = self.numbers.of(_renamed(self.numbers.values[number], order))
            self._swapped[number, order] = found
        return found


def _later(group: Any, by_s: float) -> Any:
    """One of the groups of what a leader remembers, `by_s` later."""
    names = _names(group.__class__)
    now: dict[str, Any] = {}
    for name in LEAD_TIMES.intersection(names):
        at = getattr(group, name)
        now[name] = at if at is None else ago(name, at, by_s)
    for name in LEAD_TABLES.intersection(names):
        now[name] = {key: ago(name, at, by_s) for key, at in getattr(group, name).items()}
    return replace(group, **now)


NAME: Final = re.compile(r"\bn(\d)\b")


def _renamed(value: Any, order: tuple[int, ...]) -> Any:
    match value:
        case None | bool() | int() | float():
            return value
        case str():
            plain = type(value) is str and "n" in value
            return NAME.sub(lambda found: f"n{order[int(found[1])]}", value) if plain else value
        case tuple():
            return tuple(_renamed(item, order) for item in value)
        case frozenset():
            return frozenset(_renamed(item, order) for item in value)
        case Mapping():
            return {_renamed(key, order): _renamed(item, order) for key, item in value.items()}
        case State():
            return value.but(
                **{name: _renamed(item, order) for name, item in vars(value).items() if name != "settings"}
            )
        case _ if is_dataclass(value):
            kind: Any = type(value)
            return kind(**{name: _renamed(getattr(value, name), order) for name in _names(kind)})
    raise AssertionError(f"no value of a small world: {value!r}")
