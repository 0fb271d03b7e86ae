"""The simulator is worth believing: same seed, same run; derived beats agree with real ones; all named scenarios hold."""

import hashlib
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from chaos import history
from chaos.faults import KINDS, Fault
from chaos.history import Sealed, Struck, Suspicion
from chaos.scenario import Scenario, Unusable, big, draw, load, save, scripted
from chaos.sim.cluster import Shape
from chaos.sim.drive import run
from chaos.sim.store import Store
from chaos.sim.world import Network, World
from elasticrl.contract import events
from elasticrl.contract.level import Level
from elasticrl.contract.model import Member, Record
from elasticrl.contract.settings import Membership, Settings

ROOT = Path(__file__).parent.parent.parent
SCENARIOS = sorted((ROOT / "chaos" / "scenarios").glob("*.yaml"))

DIGEST = """
import hashlib
from chaos import history
from chaos.scenario import draw
from chaos.sim.drive import run
for seed in (3, 9, 23, 238):
    told = "\\n".join(history.line(fact) for fact in run(draw(seed), str(seed)).history)
    print(seed, hashlib.sha256(told.encode()).hexdigest())
"""


def digests(hash_seed):
    done = subprocess.run(
        [sys.executable, "-c", DIGEST],
        env={**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    return done.stdout


@pytest.mark.long
def test_the_same_seed_is_the_same_run_under_any_hash_seed():
    assert digests("1") == digests("31337")


def test_another_seed_is_another_run():
    runs = [run(draw(4), seed).history for seed in ("4", "5")]
    told = [hashlib.sha256("\n".join(map(history.line, facts)).encode()).hexdigest() for facts in runs]
    assert told[0] != told[1]


@pytest.mark.parametrize("apart_s", [0.0, 0.05])
def test_news_of_others_is_gathered_and_what_else_is_new_is_shown_once_and_at_once(apart_s):
    world = World("1")
    store = Store(world, Network(), 0.01, apart_s, many=0, gather_s=10.0)
    me, other = (Member(node=name, incarnation=1) for name in ("n00", "n01"))
    mine, its = (store.grant(member, 1e6) for member in (me, other))
    store.put_record(Record(member=me), mine)
    store.put_record(Record(member=other), its)
    views = []
    store.watch(me, views.append, everyone=True)
    world.run(1.0)
    assert len(views) == 1

    def look(generation):
        store.inspect(events.Inspect(generation=generation, if_leader=store.shared.leader_revision))

    def shown():
        return views[-1].look, *(views[-1].records[name].step for name in ("n00", "n01"))

    store.put_record(Record(member=other, step=1), its)
    look(1)  # apart, what is gathered is not yet shown with it
    world.run(2.0)
    assert (len(views), shown()) == (2, (1, 0, 0) if apart_s else (1, 0, 1))
    store.put_record(Record(member=other, step=2), its)
    store.put_record(Record(member=me, step=5), mine)  # of its own records it is told at once, with all others
    world.run(3.0)
    assert (len(views), shown()) == (3, (1, 5, 2))
    look(2)
    store.put_record(Record(member=other, step=3), its)
    look(3)
    world.run(4.0)
    assert (len(views), shown()) == (4, (3, 5, 2) if apart_s else (3, 5, 3))
    world.run(100.0)
    assert (len(views), shown()) == (5 if apart_s else 4, (3, 5, 3)), "nothing is shown twice"


@pytest.mark.long
@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.stem)
def test_every_named_scenario_holds(path):
    scenario = load(path)
    found = run(scenario, scenario.seed).violations
    assert not found, "\n".join(map(str, found))


def test_there_are_scenarios_enough():
    assert len(SCENARIOS) >= 95


def suspicions(scenario, seed, *, each):
    shape = replace(scenario.shape, each_beat=each)
    facts = run(replace(scenario, shape=shape), seed).history
    return [(f.node, f.other, f.suspected, f.at) for f in facts if isinstance(f, Suspicion)]


FAULTS = (
    Fault(kind="isolate", node="n01", at=8.0, for_s=2.0, way="in", scope="beat"),
    Fault(kind="cut_link", node="n03", peer="n04", at=12.0, for_s=1.7, scope="beat"),
    Fault(kind="pause_daemon", node="n02", at=18.0, for_s=0.6),
    Fault(kind="pause_daemon", node="n05", at=20.0, for_s=2.0),
    Fault(kind="kill_daemon", node="n06", at=25.0, for_s=1.3),
)


@pytest.mark.parametrize("nodes", [7, 24])
def test_derived_beats_agree_with_beats_sent_one_by_one(nodes):
    membership = Membership(min_nodes=nodes, neighbours=2)  # nobody can be put out: one plan, so the suspicions compare
    shape = Shape(nodes=nodes, settings=Settings(lanes=4 * nodes, membership=membership))
    scenario = Scenario(name="beats", shape=shape, faults=FAULTS, trouble_s=34)
    derived, sent = (suspicions(scenario, "1", each=each) for each in (False, True))
    assert len(derived) > 10
    first = [sorted(row[:3] for row in rows if row[3] < 14) for rows in (derived, sent)]
    assert first[0] == first[1]
    for one, other in zip(sorted(derived), sorted(sent), strict=True):
        assert one[:3] == other[:3]
        assert abs(one[3] - other[3]) <= membership.beat_s + 0.01


def test_a_scenario_survives_being_saved(tmp_path):
    for seed in (1, 7, 42, 99):
        scenario = draw(seed)
        save(scenario, tmp_path / "saved.yaml")
        assert replace(load(tmp_path / "saved.yaml"), name=scenario.name) == scenario


def test_a_scenario_with_an_unknown_key_is_refused(tmp_path):
    path = tmp_path / "bad.yaml"
    path.write_text("shape: {nodez: 3}\n")
    with pytest.raises(Unusable, match="nothing reads 'nodez'"):
        load(path)
    path.write_text("faults: [{kind: kill_wroker, at: 3}]\n")
    with pytest.raises(Unusable, match="there is no fault 'kill_wroker'"):
        load(path)


@pytest.mark.long
def test_every_slot_of_a_big_run_strikes_and_is_over_before_its_like():
    scenario = big(48, minutes=2.0, every_s=5.0, seed=1)
    result = run(scenario, "1")
    assert not result.violations, list(map(str, result.violations))
    assert [fault.at for fault in scenario.faults] == [5.0 * i for i in range(1, 24)]
    struck = {fact.number: fact.at for fact in result.history if isinstance(fact, Struck)}
    assert sorted(struck) == list(range(23))
    assert all(at - scenario.faults[number].at < 1.0 for number, at in struck.items() if at > 10)


@pytest.mark.long
def test_every_kind_of_fault_can_strike():
    struck = set()
    for kind in KINDS:
        fault = Fault(
            kind=kind,
            at=9.0,
            node="n01",
            peer="n02",
            for_s=2.0 if KINDS[kind].for_s else None,
            value=max(KINDS[kind].value),
        )
        late = 1 if kind == "join_node" else 0
        fault = replace(fault, node="n04") if late else fault
        if kind == "torn_save":
            fault = replace(fault, at=None, when="saving")
        shape = Shape(nodes=5, late=late, settings=Settings(lanes=20, membership=Membership(min_nodes=2)))
        scenario = Scenario(name=kind, shape=shape, faults=(fault,), trouble_s=18)
        if kind == "quiet_log":
            scenario = scripted(scenario, Level.SUPERVISED)
        if kind == "start_again":
            scenario = replace(scenario, faults=(Fault(kind="stop", at=6.0), fault))
        result = run(scenario, "1")
        struck |= {fact.kind for fact in result.history if isinstance(fact, Struck)}
        assert not result.violations, (kind, list(map(str, result.violations)))
        if kind not in ("stop", "crash_loop"):
            assert any(isinstance(fact, Sealed) and fact.at > 18 for fact in result.history)
    assert struck == set(KINDS)


@pytest.mark.long
@pytest.mark.parametrize("level", [Level.SUPERVISED, Level.TOLD])
def test_scripts_survive_what_random_seeds_do_to_them(level):
    for seed in range(8):
        result = run(scripted(draw(seed), level), str(seed))
        assert not result.violations, (seed, list(map(str, result.violations)))
