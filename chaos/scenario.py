"""A scenario is a cluster's shape, the faults that befall it, and what is expected: one YAML file, or one seed's draw.

The one idea: the random nemesis emits nothing but scenarios, so a failing seed becomes a regression by being saved.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from math import ceil, inf
from pathlib import Path
from random import Random
from typing import Any, Literal

import yaml
from pydantic import TypeAdapter, ValidationError

from chaos.faults import ALL, KINDS, PHASES, ROLES, Fault, check
from chaos.sim.cluster import Shape
from elasticrl.contract.level import Level
from elasticrl.contract.settings import Health, Membership, Recovery, Settings, Timeouts


@dataclass(frozen=True, slots=True, kw_only=True)
class Expect:
    """What a scenario demands beyond the guarantees."""

    generations_at_most: int | None = None  # plans written in the whole run
    generations_at_least: int | None = None
    rungs_at_most: int | None = None  # the highest rung that may be taken
    rungs_at_least: int | None = None  # and that has to be
    quarantined: tuple[str, ...] | None = None  # exactly these nodes, at some time
    strikes_at_most: int | None = None  # of any quarantine
    kept_out_at_most_s: float | None = None  # in any quarantine, until the node may have a seat again
    exit_code: int | None = None  # of the job
    back_within_s: float | None = None  # from each fault to the next sealed update
    seats: int | None = None  # in the last plan
    led_by: tuple[str, ...] | None = None  # exactly these nodes, one after the other
    seated: tuple[str, ...] | None = None  # exactly these, in rank order
    restarted_at_most: int | None = None  # worker processes started fresh after the first plan
    caused: str = (
        ""  # some plan or quarantine has this cause: its kind, who or what it names (`demands.fits`); "a; b + c"
    )
    because: tuple[str, ...] = ()  # some plan's verdict rests on these facts alone: their kinds and ranks, as "stack 1"
    ranks_kept: bool = False  # whoever is in two plans of one size in a row has the same rank in both
    seats_never_below: int | None = None  # in any plan that trains
    written_again_within_s: float | None = (
        None  # from when the store has lost data until some node has written the plan again
    )
    writes_at_most: int | None = None  # of nodes' records to the store, in the whole run
    tests_at_most: int | None = None  # of cut ways, by the nodes that wait for them to be whole
    advised: str = ""  # this stands in what the leader has told operators
    advised_times: int | None = None  # so often it has begun to say so
    refused: tuple[str, ...] | None = None  # exactly these nodes' drains, in this order, because the job needs them
    gone_within_s: float | None = None  # from an operator's drain to the node's leaving
    left_with_all_saved: bool = False  # nobody left before the newest whole step was committed
    ends_saved: bool = False  # when the last node left, the newest update that was sealed was committed
    steps_at_least: int | None = None
    still_at_most_s: float | None = None  # without a new update, while the job trains
    looks_at_least: int | None = None  # so often all are asked where their workers are
    looks_at_most: int | None = None
    nothing_lost: bool = False  # every gang goes on from the newest update that was sealed before


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One run, but for its seed."""

    name: str = ""
    about: str = ""
    seed: str = "0"  # unless the command line names another
    shape: Shape = field(default_factory=Shape)
    faults: tuple[Fault, ...] = ()
    trouble_s: float = 40.0  # how long anything may fail
    liveness_s: float = 240.0  # how long after the healing the job may take to be well
    all_must_strike: bool = True
    virtual: str = ""  # why only the simulator can meet the moment that it is about
    expect: Expect = field(default_factory=Expect)


class Unusable(ValueError):
    """A scenario file is not one."""


_reader = TypeAdapter(Scenario)


def load(path: Path) -> Scenario:
    """A scenario from a file; `name` is the file's, unless it says otherwise."""
    try:
        found = yaml.safe_load(path.read_text())
        if not isinstance(found, dict):
            raise Unusable(f"{path} holds no mapping")
        scenario = _reader.validate_python({"name": path.stem, **found})
    except (OSError, yaml.YAMLError, ValidationError) as error:
        raise Unusable(f"{path}: {error}") from None
    _known(found, asdict(Scenario()), str(path))
    problems = [problem for fault in scenario.faults if (problem := check(fault))]
    if problems:
        raise Unusable(f"{path}: {'; '.join(problems)}")
    return scenario


def _known(found: dict[str, object], default: dict[str, object], where: str) -> None:
    """A key that nothing reads would make a scenario claim what it does not test."""
    for key, value in found.items():
        if key not in default:
            raise Unusable(f"{where}: nothing reads {key!r}; there are {', '.join(default)}")
        inner = default[key]
        if isinstance(value, dict) and isinstance(inner, dict) and inner:
            _known(value, inner, f"{where}: {key}")


def save(scenario: Scenario, path: Path) -> None:
    """As a file that `load` reads; what is at its default is left out."""
    body = _differing(asdict(scenario), asdict(Scenario()))
    body["faults"] = [_differing(asdict(fault), asdict(Fault(kind=""))) for fault in scenario.faults]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(body, sort_keys=False, allow_unicode=True, width=110))


def _differing(value: dict[str, object], default: dict[str, object]) -> dict[str, object]:
    out: dict[str, object] = {}
    for key, item in value.items():
        before = default.get(key)
        if item == before:
            continue
        if isinstance(item, Level):
            out[key] = item.value
        elif isinstance(item, dict) and isinstance(before, dict):
            out[key] = _differing(item, before) if before else item
        else:
            out[key] = list(item) if isinstance(item, tuple) else item
    return out


# ---- what a seed draws


def draw(seed: int, nodes: int | None = None) -> Scenario:
    """The scenario of a seed: a cluster's shape, and which faults exist in it at all."""
    chance = Random(f"draw {seed}")
    shape = _shape(chance, nodes)
    least_s = min(shape.settings.recovery.start_s, shape.settings.recovery.restart_s)
    shape = replace(
        shape,
        load_s=min(0.4 * least_s, Random(f"load {seed}").choice((0.0, 0.0, 0.0, 3.0, 12.0))),
        vault_goes=Random(f"vault {seed}").random() < 0.15,
        apart_s=Random(f"apart {seed}").choice((0.0, 0.0, 0.05, 0.8)),
        deep=Random(f"deep {seed}").random() < 0.4,
        **_gathering(Random(f"gather {seed}")),
        settings=_wide(Random(f"wide {seed}"), shape.nodes - len(shape.alien), shape.settings),
    )
    if shape.deep:
        shape = replace(shape, settings=_willed(Random(f"policy {seed}"), shape.settings))
    trouble_s = chance.uniform(25, 70)
    names = [f"n{i:02d}" for i in range(shape.nodes)]
    return Scenario(
        name=f"seed {seed}",
        seed=str(seed),
        shape=shape,
        faults=(
            *_faults(chance, names, trouble_s),
            *_of_ways(Random(f"ways {seed}"), names, trouble_s, deep=shape.deep),
            *_of_losses(Random(f"lost {seed}"), trouble_s),
        ),
        trouble_s=trouble_s,
        all_must_strike=False,
    )


def scripted(scenario: Scenario, level: Level) -> Scenario:
    """The same with a script, below job.level exact, as its program: as `elasticrl.config` makes its settings."""
    shape, settings = scenario.shape, scenario.shape.settings
    membership = replace(settings.membership, grow="always", grow_every_s=3.0)
    seats = min(shape.nodes, membership.max_nodes)
    settings = replace(
        settings,
        level=level,
        steps=0,
        copies=0,
        exact="off",
        fallback="none",
        policy={},
        lanes=max(settings.lanes, seats * shape.slots),
        membership=membership,
        timeouts=replace(settings.timeouts, quiet_s=settings.timeouts.default_phase_s),
    )
    shape = replace(shape, settings=settings, script_steps=shape.settings.steps, alien=(), deep=False)
    return replace(scenario, shape=shape, name=f"{scenario.name} ({level})")


def _shape(chance: Random, nodes: int | None) -> Shape:
    nodes = nodes or chance.choice((3, 3, 4, 4, 5, 6, 8, 12, 16, 24))
    slots = chance.choice((1, 1, 1, 2, 2, 4))
    min_nodes = chance.randint(1, max(1, nodes // 2))
    wanted = nodes * slots
    return Shape(
        nodes=nodes,
        late=chance.choice((0, 0, 0, 1)) if nodes > 3 else 0,
        slots=slots,
        settings=Settings(
            lanes=max(
                slots * min_nodes, chance.choice((wanted, wanted, wanted + chance.randint(0, wanted), wanted - slots))
            ),
            steps=chance.choice((0, 0, 0, 0, 60)),
            copies=min(chance.choice((1, 1, 2)), min_nodes - 1),
            retry_s=chance.choice((0.3, 0.5, 1.0, 2.0)),
            membership=_membership(chance, nodes, min_nodes),
            recovery=Recovery(
                start_s=chance.choice((8, 20, 60)),
                reform_s=chance.choice((2, 4, 10)),
                replace_s=chance.choice((4, 8, 20)),
                restart_s=chance.choice((8, 15, 30)),
                reload_s=chance.choice((10, 20, 60)),
                probe_s=chance.choice((2, 4, 10)),
                drain_s=chance.choice((3, 8, 15)),
                no_progress_limit=chance.choice((2, 3, 3, 4)),
            ),
            health=Health(
                quarantine_s=chance.choice((4, 8, 15)),
                quarantine_max_s=30,
                quarantine_share=chance.choice((0.25, 0.5)),
                node_strikes=chance.choice((2, 3, 3)),
            ),
            timeouts=Timeouts(
                default_phase_s=chance.choice((3, 6, 12)),
                floor_s=chance.choice((1, 2)),
                slack=chance.choice((5, 10)),
                confirm_s=chance.choice((0.5, 1)),
            ),
        ),
        updates=chance.choice((1, 1, 2, 3)),
        save_every=chance.choice((2, 5, 10)),
        step_s=chance.choice((0.25, 0.5, 1.0)),
        save_s=chance.choice((0.2, 0.6, 3.0)),
        warm_s=chance.choice(((0.5, 1.0), (2.0, 5.0))),
        watch_s=chance.choice((0.005, 0.01, 0.05)),
        alien=("n01",) if chance.random() < 0.03 else (),
    )


def _membership(chance: Random, nodes: int, min_nodes: int) -> Membership:
    ttl_s = chance.choice((2.0, 3.0, 5.0, 10.0))
    beat_s = chance.choice((0.1, 0.2, 0.2))
    grow: Literal["useful", "always"] = chance.choice(("useful", "useful", "always"))
    return Membership(
        min_nodes=min_nodes,
        max_nodes=chance.choice((64, 64, 64, max(min_nodes, nodes - 1))),
        spares=chance.choice((0, 0, 1, 2)),
        settle_s=chance.choice((0.3, 1.0, 2.0)),
        grow=grow,
        lease_ttl_s=ttl_s,
        keepalive_s=ttl_s * chance.choice((0.25, 0.33)),
        report_s=chance.choice((2.0, 5.0)),
        beat_s=beat_s,
        suspect_s=beat_s * chance.choice((4, 6)),
        neighbours=chance.choice((1, 2, 2)),
        deputies=chance.choice((1, 2, 2, 3)),
        campaign_spread_s=chance.choice((0.2, 0.5)),
    )


def _gathering(chance: Random) -> dict[str, Any]:
    """One time in four news of others' records is gathered, as in a big cluster, and for longer than there."""
    return {"many": 0, "gather_s": chance.choice((0.002, 0.02))} if chance.random() < 0.25 else {}


def _wide(chance: Random, nodes: int, settings: Settings) -> Settings:
    """One time in three the ends of what `config check` accepts, of a few settings at once. `nodes`: as many can be seated."""
    if chance.random() < 2 / 3:
        return settings
    membership = settings.membership
    min_nodes = chance.choice((membership.min_nodes, nodes - 1, nodes))
    membership = replace(
        membership,
        min_nodes=min_nodes if min_nodes <= membership.max_nodes else membership.min_nodes,
        settle_s=chance.choice((0.0, membership.settle_s)),
        neighbours=chance.choice((membership.neighbours, 3)),
        deputies=chance.choice((membership.deputies, 0)),
        campaign_spread_s=chance.choice((membership.campaign_spread_s, 0.0)),
        rejoin_s=chance.choice((membership.rejoin_s, 0.0)),
        report_s=chance.choice((membership.report_s, 0.5, 20.0)),
    )
    return replace(
        settings,
        lanes=max(settings.lanes, membership.min_nodes * 4),
        copies=min(chance.choice((settings.copies, 1, 3)), membership.min_nodes - 1),
        membership=membership,
        recovery=replace(settings.recovery, no_progress_limit=chance.choice((settings.recovery.no_progress_limit, 1))),
        health=replace(
            settings.health,
            quarantine_share=chance.choice((settings.health.quarantine_share, 0.0, 1.0)),
            node_strikes=chance.choice((settings.health.node_strikes, 1)),
        ),
    )


def _willed(chance: Random, settings: Settings) -> Settings:
    """What the operator wants done about ways, and about who is slow, where probes and agents tell of them."""
    fallback: Literal["none", "gloo"] = chance.choice(("none", "gloo", "gloo"))
    words = {
        "fabric": "fallback" if fallback == "gloo" else "restart",
        "network": chance.choice(("restart", "quarantine")),
        "straggler": chance.choice(("report", "replace", "quarantine")),
    }
    health = replace(settings.health, straggler_steps=3)
    policy = {fault: word for fault, word in words.items() if chance.random() < 0.7}
    return replace(settings, policy=policy, fallback=fallback, health=health)


def _of_ways(chance: Random, names: list[str], trouble_s: float, *, deep: bool) -> tuple[Fault, ...]:
    """One time in two, where probes find it: NCCL does not work over a node's ways, or large frames are lost on them."""
    if not deep or chance.random() < 0.5:
        return ()
    kind = chance.choice(("nccl_breaks", "nccl_breaks", "mtu_hole"))
    at = round(chance.uniform(1, trouble_s), 3)
    return (Fault(kind=kind, at=at, node=chance.choice(names), for_s=lasting(chance, 2, 40), value=900.0),)


def _of_losses(chance: Random, trouble_s: float) -> tuple[Fault, ...]:
    """One time in thirty the store loses its data, or is set back."""
    if chance.random() > 1 / 30:
        return ()
    at = round(chance.uniform(1, trouble_s), 3)
    if chance.random() < 0.5:
        return (Fault(kind="store_wiped", at=at),)
    return (Fault(kind="store_set_back", at=at, for_s=lasting(chance, 1, 30)),)


#: What befalls single nodes of a big cluster, and its store.
EVERYDAY = (
    "kill_worker", "kill_node", "kill_daemon", "kill_agent", "power_cut", "hang_worker", "stop_worker", "pause",
    "store_failover", "store_compaction", "store_outage", "isolate",
)  # fmt: skip

#: Of these, what there is but one of.
WHOLE_JOB = ("pause", "store_failover", "store_compaction", "store_outage")


def big(nodes: int, minutes: float, every_s: float, seed: int) -> Scenario:
    """Many nodes for a long time, with an everyday fault every so often."""
    chance = Random(f"big {nodes} {seed}")
    names = [f"n{i:0{max(len(str(nodes - 1)), 2)}d}" for i in range(nodes)]
    trouble_s = minutes * 60.0
    times = [every_s * i for i in range(1, ceil(trouble_s / every_s))]
    drawn = [_fault(chance, chance.choice(EVERYDAY), names, trouble_s) for _ in times]
    faults = tuple(
        replace(fault, at=at, when="", nth=1, for_s=_until_over(fault, at, drawn, times), or_any=True)
        for fault, at in zip(drawn, times, strict=True)
    )
    # Leases as long as thousands of nodes would have them: deaths are found by beats, not by leases.
    membership = Membership(min_nodes=nodes // 2, max_nodes=nodes, settle_s=2.0, lease_ttl_s=30.0, keepalive_s=9.0)
    settings = Settings(lanes=nodes, membership=membership)
    # Agents that have nothing new to say speak as often as records are refreshed: most of the events are theirs.
    shape = Shape(nodes=nodes, settings=settings, step_s=2.0, save_every=10, agent_s=membership.report_s)
    # A third strike keeps a node out for four minutes, and a commit comes each 20 s.
    return Scenario(
        name=f"big-{nodes}-{seed}", seed=str(seed), shape=shape, faults=faults, trouble_s=trouble_s, liveness_s=360.0
    )


def _until_over(fault: Fault, at: float, drawn: list[Fault], times: list[float]) -> float | None:
    """How long it lasts: never for good, and what the whole job feels is over before its like is due again."""
    kind = KINDS[fault.kind]
    if kind.for_s is None:
        return None
    for_s = fault.for_s if fault.for_s is not None else kind.for_s[1]
    if fault.kind not in WHOLE_JOB:
        return for_s
    next_at = min((t for f, t in zip(drawn, times, strict=True) if t > at and f.kind in WHOLE_JOB), default=inf)
    return min(for_s, 0.8 * (next_at - at))


def _faults(chance: Random, names: list[str], trouble_s: float) -> tuple[Fault, ...]:
    """Swarm: a few kinds of faults exist in this run, and only those; sometimes none."""
    kinds = sorted(KINDS)
    some = chance.choices(kinds, [KINDS[kind].weight for kind in kinds], k=chance.choice((1, 1, 2, 3, 4, 8)))
    number = chance.choice((0, 1, 1, 2, 3, 5, 8, 12))
    return tuple(_fault(chance, chance.choice(some), names, trouble_s) for _ in range(number))


def _fault(chance: Random, kind: str, names: list[str], trouble_s: float) -> Fault:
    known = KINDS[kind]
    for_s = lasting(chance, *known.for_s) if known.for_s and chance.random() < 0.95 else None
    place, at = "", None
    if chance.random() < 0.35:
        phase = chance.choice(PHASES)
        place = chance.choice(
            (f"{chance.choice(('before', 'during', 'after'))} {phase}",) * 4
            + ("saving", "reform", "forming", "elected", "committing", "probing", "held")
        )
    else:
        at = round(chance.uniform(1, trouble_s), 3)
    nth = chance.choice((1, 2, 5, 20)) if place else 1
    fault = Fault(kind=kind, at=at, when=place, nth=nth, for_s=for_s)
    return replace(aimed(chance, fault, ROLES, names), scope=chance.choice(("all", "all", "beat", "data")))


# ---- what is drawn alike for the simulator and for real nodes


def lasting(chance: Random, low: float, high: float) -> float:
    """How long a fault lasts, evenly over the orders of magnitude."""
    drawn: float = low * (high / low) ** chance.random()
    return round(drawn, 2)


def aimed(chance: Random, fault: Fault, roles: Sequence[str], names: Sequence[str]) -> Fault:
    """At whom it goes, how strong it is and which way."""
    return replace(
        fault,
        node=chance.choice(roles) if chance.random() < 0.5 else chance.choice(names),
        peer=chance.choice(names),
        value=round(chance.uniform(*ALL[fault.kind].value), 3),
        way=chance.choice(("both", "both", "out", "in")),
    )
