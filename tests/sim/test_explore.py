"""The search of small worlds: it ends, it finds what is broken, and its nodes are the simulator's."""

import json
import subprocess
import sys
from dataclasses import replace
from random import Random

import pytest

from chaos.faults import Fault
from chaos.history import Planned
from chaos.mutants import ROOT
from chaos.scenario import Scenario
from chaos.sim.cluster import Cluster, Shape
from chaos.sim.drive import run
from chaos.sim.world import World as Virtual
from chaos.small.search import Bound, Search, one_of, words
from chaos.small.shelf import Held
from chaos.small.world import ALIVE, Node, Rules, Timer, Turn, World, settings
from elasticrl.contract.model import Member, Phase, Plan, Seat
from elasticrl.contract.orders import Halt

SHAPE = Shape(nodes=2, settings=settings(2), warm_s=(0.8, 0.8), step_s=1.0, save_every=1, save_s=0.6, agent_s=1.0)


@pytest.mark.long
def test_two_nodes_and_one_fault_of_any_kind_at_any_moment() -> None:
    result = Search(Rules(2), Bound(faults=1)).run()
    assert result.found == []
    assert result.left == 0, "all of it was searched"
    assert result.states > 5_000
    assert set(result.kinds) == {
        "kill_worker", "kill_node", "kill_daemon", "lose_lease", "cut_store", "store_outage", "cut", "drain", "stop",
        "lose_request", "lose_answer", "repeat_request",
    }  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize(
    ("guard", "faults", "check"),
    [
        ("a commit is fenced by the plan", ["1"], "commits_only_rise"),
        ("a commit is fenced by the commit before it", ["1", "--kinds", "repeat_request"], "commits_only_rise"),
        (
            "a plan is fenced by the plan before it",
            ["2", "--kinds", "kill_node repeat_request"],
            "one_plan_per_generation",
        ),
    ],
)
def test_a_broken_guard_is_found(guard: str, faults: list[str], check: str) -> None:
    command = [sys.executable, "-O", "-m", "chaos.explore", "--json", "--broken", guard, "--faults", *faults]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=300.0, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    assert json.loads(done.stdout)["check"] == check


def test_symmetric_states_are_one() -> None:
    rules = Rules(2)
    start = rules.start(1)
    worlds = [rules.after(start, ("fault", "kill_node", i, 1)).world for i in (0, 1)]
    assert worlds[0] != worlds[1]
    assert rules.swapped(worlds[0], (1, 0)) == worlds[1]
    assert one_of(rules, worlds[0]) == one_of(rules, worlds[1])


def test_what_is_equal_but_for_the_hour_is_one_state() -> None:
    rules = Rules(2)
    search = Search(rules, Bound(faults=0))
    result = search.run()
    assert result.left == 0, "a job that trains for ever has an end of states"
    assert all(search.next), "and each has a next one"


# What was found on the core, move by move. A node's first record comes once more, late, as that node takes the office.
LATE_RECORD = """
news 0 everything, news 0 tell, news 1 everything, news 1 tell, fault lose_request Publish of n0/1, request Publish of n1/1,
news 1 members, request Publish of n1/1, news 1 members, request Campaign of n1/1, news 0 leader, news 1 leader,
news 1 everything, time, timer 0 warm, news 0 tell, timer 1 warm, news 1 tell, request Publish of n0/1, news 0 members,
news 1 members, request Publish of n1/1, news 1 members, request Propose of n1/1, news 0 plan, news 0 everything, news 0 tell,
news 1 plan, news 1 tell, request Publish of n0/1, stray stray Publish of n0/1, fault lose_lease 1 1, news 0 leader,
news 0 members, news 1 leader, news 1 members, request Campaign of n0/1, news 0 leader, news 1 leader, request Propose of n0/1
"""


def test_a_plan_has_a_place_to_meet_though_its_leaders_record_is_an_old_one() -> None:
    rules = Rules(2)
    world = rules.start(2)
    for word in LATE_RECORD.replace("\n", " ").strip().split(", "):
        moves = {words(rules, move): move for move in [*rules.moves(world), *rules.urgent(world), *rules.faults(world)]}
        world = rules.after(world, moves[word]).world
    plan = rules.plan(world)
    assert plan is not None
    assert (plan.generation, [str(seat.member) for seat in plan.seats]) == (2, ["n0/1"])
    assert plan.endpoint == "n0:20001"


# ---- the same as the simulator's


def _orders(chance: Random, generation: int, alive: list[bool], born: list[int]) -> tuple[list[str], list[int]]:
    """What each of two agents is told of the next plan, and when the workers in it were born."""
    fresh = [not lives or chance.random() < 0.3 for lives in alive]
    return ["launch" if new else "reform" for new in fresh], [
        generation if n else b for n, b in zip(fresh, born, strict=True)
    ]


@pytest.mark.parametrize("seed", range(20))
def test_agents_and_gangs_do_what_the_simulators_do(seed: int) -> None:
    """On a random schedule of plans, deaths, holds and ends, step by step."""
    chance, virtual, rules = Random(seed), Virtual(str(seed)), Rules(2, steps=1000)
    cluster = Cluster(virtual, SHAPE)
    theirs = list(cluster.nodes.values())
    for node in theirs:
        node.powered = True
        node.start_agent()
    blank = Node(heard=((0, 0, False),) * 2, agent=1, agents=1, timers=(Timer(1, "warm"),))
    ours = Turn(World(nodes=(blank, blank), held=rules.of(Held())))
    compared = []

    def plan(names: list[str], generation: int, born: list[int]) -> Plan:
        seats = tuple(Seat(member=Member(node=n, incarnation=1), born=b) for n, b in zip(names, born, strict=True))
        return Plan(generation=generation, phase=Phase.TRAIN, seats=seats, lanes=6, endpoint=f"{names[0]}:20001")

    for generation in range(1, 15):
        virtual.run(virtual.now + 4.0)
        for _ in range(4):
            while due := rules.urgent(ours.world):
                ours = rules.after(ours.world, due[0])
            ours = rules.after(ours.world, ("time",))
        now = [(str(n.work), n.generation, n.born if n.alive else 0, n.warm) for n in theirs]
        compared.append([str(n.work) for n in theirs])
        assert now == [
            (str(n.work), n.generation, n.born if n.work in ALIVE else 0, n.warm) for n in ours.world.nodes
        ], f"before generation {generation}"
        orders, born = _orders(chance, generation, [n.alive for n in theirs], [n.born for n in theirs])
        small, large = plan(list(rules.names), generation, born), plan([n.name for n in theirs], generation, born)
        what = chance.choice(("train", "train", "train", "park", "die", "halt"))
        for i, node in enumerate(theirs):
            match what:
                case "park":
                    node._park(large)
                    rules._park_for(ours, i, small)
                case "die" if i == 0:
                    node.dies("signal 9 (SIGKILL)", own=False, signal=9)
                    rules._dies(ours, i, "signal 9 (SIGKILL)", None)
                case "halt":
                    halt = Halt(generation=generation, save=False, within_s=0.0, reason="")
                    node._halt(halt)
                    rules._halt(ours, i, halt)
                case "train" if orders[i] == "launch":
                    node._launch(large, 0.0)
                    rules._launch(ours, i, small)
                case "train":
                    node._reform(large)
                    rules._reform(ours, i, small)
    assert {"training", "parked"} & {work for works in compared for work in works}, "something happened"


@pytest.mark.parametrize("kind", ["kill_worker", "kill_node", "kill_daemon", "drain"])
def test_a_whole_run_has_the_simulators_plans(kind: str) -> None:
    fault = Fault(kind=kind, node="n01", at=12.0, for_s=5.0 if kind == "kill_node" else None)
    # (A lease is as long here as there, but for a second: nothing shall hang on that.)
    patient = replace(SHAPE.settings, timeouts=replace(SHAPE.settings.timeouts, confirm_s=6.0))
    history = run(
        Scenario(shape=replace(SHAPE, settings=patient), faults=(fault,), trouble_s=25.0, all_must_strike=False), "0"
    ).history
    planned = [fact.plan for fact in history if isinstance(fact, Planned)]
    theirs = [(p.phase, p.rung, [s.member.node.replace("n0", "n") for s in p.seats]) for p in planned]
    rules = Rules(2)
    rules.settings = patient
    search = Search(rules, Bound(faults=1))
    world = search.first()
    for _ in range(60):  # until all is quiet
        world = rules.after(world, rules.moves(world)[0]).world
    ours = [rules.plan(world)]
    extra = (5,) if kind == "kill_node" else ()
    world = rules.after(world, ("fault", kind, 1, *extra)).world
    for _ in range(600):
        world = rules.after(world, rules.moves(world)[0]).world
        if (plan := rules.plan(world)) != ours[-1]:
            ours.append(plan)
    made = [(p.phase, p.rung, [s.member.node for s in p.seats]) for p in ours if p]
    assert len(made) > 1
    # The simulator starts a node again that has left.
    assert made == (theirs[: len(made)] if kind == "drain" else theirs)
