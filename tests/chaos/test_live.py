"""Real nodes, real faults: one job in one lab takes scenario after scenario, each judged by itself, the whole at the end."""

import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from chaos import faults
from chaos.case import Violation
from chaos.faults import ALL, IN_A_REFORM, IN_A_STEP, INSIDE, OF_PPO, PLACES, Fault, check
from chaos.history import (
    Committed,
    Eased,
    Elected,
    Ended,
    Fact,
    Loaded,
    Missed,
    Planned,
    Proved,
    Resumed,
    Sealed,
    Struck,
)
from chaos.live import box, everywhere, proc
from chaos.live.checks import judge_live
from chaos.live.drive import IN_FILES, Drive, Outcome, Waiting, due_in, places, wanted_end
from chaos.live.lab import Lab, leftovers
from chaos.live.labjob import PPO_PROGRAM, PROGRAM, is_sealed, newest, ppo_conf
from chaos.live.play import BASE, Play, draw, why_not
from chaos.live.strikes import NEEDS, Hands
from chaos.live.told import Told
from chaos.patience import patience
from chaos.run import LIVE, SCENARIOS
from chaos.scenario import Expect, Scenario, load, save
from chaos.sim.cluster import Shape
from elasticrl.config import dumps
from elasticrl.config import load as configured
from elasticrl.contract.cause import Cause, Why
from elasticrl.contract.model import Member, Phase, Plan, Rung, Seat
from elasticrl.runtime.progress import Timeline
from elasticrl.runtime.vault.layout import SEAL_AT
from elasticrl.runtime.vault.slots import Slots

# A selection: each kind of victim once. `make full` has the second half too; `make chaos` runs all, and then random ones.
CHOSEN = (
    "worker-killed-before-it-reduces", "agent-dies-live", "store-loses-its-data", "two-daemons-of-one-name", "cable-pulled",
    "disk-full-while-saving", "starved-node", "power-cut-before-a-seal",
    *(
        pytest.param(name, marks=pytest.mark.slow)
        for name in (
            "worker-out-of-memory", "daemon-of-the-leader-dies", "vault-loses-its-port", "store-leader-dies",
            "store-away-and-a-worker-dies",
        )
    ),
)  # fmt: skip
pytestmark = pytest.mark.timeout(280)


@dataclass(slots=True)
class Bench:
    """A lab, and the job that runs in it; another one after a job that a scenario left in ruins."""

    lab: Lab
    drive: Drive | None = None
    jobs: int = 0

    def play(self, scenario: Scenario) -> Outcome:
        """One scenario."""
        if self.drive is None:
            self.jobs += 1
            shape = Scenario(name="tests", shape=Shape(nodes=len(self.lab.boxes), settings=BASE))
            self.drive = Drive(self.lab, shape, name=f"t{self.jobs}").__enter__()
        outcome = self.drive.scenario(scenario)
        if outcome.violations:
            self.drive.keep(self.lab.folder / "failed" / scenario.name, "see the test")
            self.lab.keep = True
            self.end()
        return outcome

    def end(self) -> None:
        drive, self.drive = self.drive, None
        if drive is not None:
            drive.__exit__()


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    why = box.missing()
    if why:
        print(f"nodes on loopback, without power, cables, disks and cgroups: {why}")
    with Lab(3, boxes=not why) as lab:
        found = Bench(lab)
        yield found
        found.end()
    assert not lab.left


@pytest.mark.parametrize("name", CHOSEN)
def test_the_job_survives(bench: Bench, name: str) -> None:
    scenario = load(LIVE / f"{name}.yaml")
    if why := why_not(scenario, boxes=bench.lab.real, lacks=bench.lab.lacks):
        pytest.skip(why)
    outcome = bench.play(scenario)
    assert not outcome.violations, "\n".join(map(str, outcome.violations))
    assert len(outcome.struck) == len(scenario.faults)


@pytest.mark.parametrize(
    ("base", "kind", "place"),
    [
        ("worker", "kill_daemon", "reform after meet"),
        pytest.param("join", "kill_worker", "reform after restore", marks=pytest.mark.slow),
        pytest.param("save", "kill_agent", "published", marks=pytest.mark.slow),
    ],
)
def test_a_second_fault_strikes_at_a_place_that_the_first_ones_recovery_announces(
    bench: Bench, base: str, kind: str, place: str
) -> None:
    second = next(fault for fault in everywhere.WORST if fault.kind == kind)
    outcome = bench.play(everywhere.case(base, second, place))
    assert not outcome.violations, "\n".join(map(str, outcome.violations))
    assert everywhere.result(outcome) == "passed"


@pytest.mark.timeout(600)  # the undisturbed run is as long as all of the above was
def test_in_the_end_the_bits_are_the_same_and_nothing_is_left(bench: Bench) -> None:
    """After all of the above: the audit is exact, the digests are the undisturbed run's, no process, socket or key is left."""
    assert bench.drive is not None, "the last scenario left the job in ruins"
    found = bench.drive.finish()
    assert not found, "\n".join(map(str, found))
    assert {fact.what for fact in bench.drive.eye.facts if isinstance(fact, Proved)} >= {
        "audit",
        "bits",
        "processes",
        "keys",
    }
    bench.end()


def test_what_failed_leaves_a_folder_with_everything_and_can_be_repeated(tmp_path: Path) -> None:
    """A vault dies, and the scenario expects a cause that nobody has."""
    scenario = Scenario(
        name="words-that-nobody-says",
        shape=Shape(nodes=2, settings=BASE),
        faults=(Fault(kind="kill_vault", at=0.0, node="n1"),),
        expect=Expect(caused="nobody"),
    )
    score = Play(tmp_path, say=lambda _: None, boxes=not box.missing()).files([scenario])
    ((again, what),) = score.failed
    assert "no plan was caused by" in what
    command = shlex.split(again)
    assert command[:4] == ["python", "-m", "chaos.run", "live"]
    saved = load(Path(command[4]))
    folder = Path(command[4]).parent
    assert (saved.faults, saved.expect) == (scenario.faults, scenario.expect)
    assert not why_not(saved)
    assert (folder / "again").read_text().startswith(again)
    struck = [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]
    assert any("kill_vault" in map(str, fact.values()) for fact in struck)
    for name in ("job/n1.daemon.log", "job/history/n1.jsonl", "e0.etcd.log", "state"):
        assert (folder / name).stat().st_size > 0 or name == "e0.etcd.log", name  # etcd has nothing to complain of
    stacks = {path: path.read_text() for path in (folder / "stacks").glob("n1/*")}
    workers = [text for text in stacks.values() if "Stack (most recent call first)" in text and "job.py" in text]
    assert workers, "no worker's Python stack"
    assert any("elasticrl.cli.main daemon" in text and "State:" in text for text in stacks.values())
    assert any("etcd" in path.read_text() for path in (folder / "stacks").glob("e0/*"))


def test_what_a_killed_driver_left_is_cleared_away_by_the_next() -> None:
    if why := box.missing():
        pytest.skip(why)
    code = (
        "import time; from chaos.live.lab import Lab\n"
        "with Lab(1, members=0) as lab: print(lab.name, lab.boxes['n0'].pid, flush=True); time.sleep(60)"
    )
    with tempfile.TemporaryDirectory() as folder:
        driver = subprocess.Popen(
            [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2],
            env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "TMPDIR": folder},
        )  # fmt: skip
        assert driver.stdout is not None
        name, pid = driver.stdout.readline().split()
        driver.send_signal(signal.SIGKILL)
        driver.wait()
        driver.stdout.close()
        assert leftovers(name), "there was nothing to clear away"
        assert list(Path(folder).glob("elx-*/disk"))
        with Lab(1, members=0) as lab:
            pass
        assert not lab.left
        assert not leftovers(name)
        assert not list(Path(folder).iterdir()), "its folder, with what was mounted there"
    assert not proc.alive(int(pid))


@pytest.mark.slow
def test_without_namespaces_processes_are_killed_all_the_same(tmp_path: Path) -> None:
    scenarios = [
        load(LIVE / f"{name}.yaml") for name in ("worker-killed-before-it-reduces", "vault-dies", "cable-pulled")
    ]
    said: list[str] = []
    score = Play(tmp_path, say=said.append, boxes=False).files(scenarios)
    assert not score.failed, score.failed
    assert score.played == 2
    assert any("cable-pulled: left out: without namespaces" in line for line in said)


@pytest.mark.slow
@pytest.mark.timeout(1200)  # eight workers, a job for all of them, and the undisturbed one
def test_teams_on_real_nodes_lose_members_and_end_with_the_bits_of_one_team(tmp_path: Path) -> None:
    scenarios = [load(path) for path in sorted(LIVE.glob("*team*.yaml"))]
    assert all(scenario.shape.slots == 4 and scenario.shape.settings.team == 2 for scenario in scenarios)
    score = Play(tmp_path, boxes=not box.missing()).files(scenarios)
    assert not score.failed, score.failed
    assert score.played >= len(scenarios) - 1 >= 6, "without namespaces there is no power to cut"


# ---- pure parts


def test_every_worst_fault_meets_every_announced_place_once() -> None:
    every = list(everywhere.cases())
    assert (
        len({scenario.name for scenario in every})
        == len(every)
        == 10 * sum(len(base.places) for base in everywhere.BASES.values())
    )
    assert not [why for scenario in every if (why := why_not(scenario))]
    assert not [why for scenario in every for fault in scenario.faults if (why := check(fault))]
    known = {fault.place for scenario in every for fault in scenario.faults if fault.when}
    assert known == {*PLACES} - {*INSIDE} - {"held"}
    assert [wanted_end(scenario) for scenario in every] == sorted(wanted_end(scenario) for scenario in every)


def _case_with(struck: list[str], *checks: str) -> Outcome:
    scenario = everywhere.case("worker", everywhere.WORST[3], "forming")
    return Outcome(scenario, [Violation(check=check, at=1.0, what="so") for check in checks], struck)


def test_a_case_counts_if_both_faults_struck_in_their_order() -> None:
    both = ["kill_worker", "kill_daemon"]
    assert everywhere.result(_case_with(both)) == "passed"
    assert everywhere.result(_case_with(both[::-1])) == "missed"
    assert everywhere.result(_case_with(both[:1], "every_fault_struck")) == "missed"
    assert everywhere.result(_case_with(both, "every_fault_proved")) == "missed"
    assert everywhere.result(_case_with(both[:1], "every_fault_struck", "back_within_budget")) == "failed"
    assert everywhere.result(_case_with(both, "back_within_budget")) == "failed"


def test_a_case_that_did_not_strike_is_tried_again_and_then_told_of() -> None:
    missed = _case_with(["kill_worker"], "every_fault_struck")
    tour = everywhere.Tour(deque([missed.scenario]))
    played = 0
    for scenario in tour.some(lambda: False):
        assert scenario is missed.scenario
        assert tour.heard(missed) == []
        played += 1
    assert played == everywhere.TRIES
    said: list[str] = []
    tour.show(said.append)
    assert "0 passed, 1 missed, 0 failed" in said[0]
    assert said[-1].endswith("1 did not strike: worker-kill_daemon-forming; 0 were not played")
    assert [v.check for v in tour.heard(_case_with([], "back_within_budget"))] == ["back_within_budget"]
    tour.show(said.append)
    assert "2 cases: 0 passed, 1 failed, 1 did not strike" in said[-1]


def test_a_seed_draws_the_same_scenarios_again_and_they_survive_a_file(tmp_path: Path) -> None:
    ours = [draw(chance, str(i), 4) for chance in (Random("a"),) for i in range(40)]
    assert ours == [draw(chance, str(i), 4) for chance in (Random("a"),) for i in range(40)]
    for scenario in ours:
        assert not why_not(scenario)
        save(scenario, tmp_path / "x.yaml")
        assert load(tmp_path / "x.yaml").faults == scenario.faults
    assert len({fault.kind for scenario in ours for fault in scenario.faults}) > 15


def test_every_live_scenario_can_be_read_and_played() -> None:
    paths = sorted(LIVE.glob("*.yaml"))
    assert len(paths) >= 50
    assert not [path.stem for path in paths if why_not(load(path))]
    assert sum(not why_not(load(path)) for path in SCENARIOS.glob("*.yaml")) >= 50


def test_each_fault_of_real_machines_has_a_hand() -> None:
    """That the others strike in the simulator is shown there; whichever the live driver does not know, it leaves out."""
    assert not [kind for kind in faults.LIVE if not Hands.can(kind)]
    assert not set(NEEDS) - {kind for kind in ALL if Hands.can(kind)}


@pytest.mark.parametrize(
    ("kind", "facility"), [(kind, facility) for kind, needs in NEEDS.items() for facility in needs]
)
def test_a_machine_that_lacks_something_leaves_out_what_needs_it_and_says_so(kind: str, facility: str) -> None:
    lacks = {facility: f"no {facility} for you"}
    scenario = replace(KILL, faults=(Fault(kind=kind, at=0.0), *KILL.faults))
    assert not why_not(scenario)
    assert why_not(scenario, lacks=lacks) == f"this machine has no {facility} for you, which {kind} needs"
    assert not why_not(KILL, lacks=lacks)
    drawn = [draw(chance, str(i), 3, lacks=lacks) for chance in (Random("b"),) for i in range(300)]
    assert kind not in {fault.kind for some in drawn for fault in some.faults}


# ---- places


@contextmanager
def alone(program: Path, tmp_path: Path, first: str) -> Iterator[Callable[[str, int, int], dict[str, Any]]]:
    """The job in one process, without a daemon: at `first` it waits. What comes out waits for its arrival, and sends it on."""
    history = tmp_path / "history"
    history.mkdir()
    plain: dict[str, Any] = ppo_conf(tmp_path) | {"rollout": {"max_tokens": 4}} if program == PPO_PROGRAM else {}
    plain |= {
        "job": {"name": "alone", "program": str(program), "args": []},
        "node": {"device": "cpu", "interface": "lo", "name": "n0"},
        "membership": {"min_nodes": 1, "max_nodes": 1},
        "store": {"embedded": True},
        "lanes": {"count": 2},
        "vault": {"copies": 0, "dir": str(tmp_path / "vault")},
        "checkpoint": {"dir": str(tmp_path / "saves")},
    }
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(plain))
    (tmp_path / "config.json").write_text(dumps(configured(tmp_path / "job.yaml", [])))
    env = {"ELASTICRL_CONFIG": str(tmp_path / "config.json"), "ELASTICRL_NODE": "n0", "OMP_NUM_THREADS": "1"}
    lines = history / "n0.jsonl"

    def order(place: str, token: int, step: int) -> None:
        (history / "n0.new").write_text(json.dumps({"do": "wait", "place": place, "token": token, "step": step}))
        (history / "n0.new").replace(history / "n0.order")

    order(first, 1, 0)
    with (tmp_path / "log").open("wb") as log:
        job = subprocess.Popen(
            [sys.executable, str(program), "--step-ms", "10", "--history", str(history)],
            env={**os.environ, **env}, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
        )  # fmt: skip

    def arrived(after: str, token: int, step: int) -> dict[str, Any]:
        deadline = time.monotonic() + patience(60.0)
        while not lines.exists() or f'"token": {token}}}' not in lines.read_text():
            assert job.poll() is None, (tmp_path / "log").read_text()[-2000:]
            assert time.monotonic() < deadline, f"the job never came to its place number {token}"
            time.sleep(0.01)
        # Read before it is let go: it may be at the next place at once.
        told = [line for line in map(json.loads, lines.read_text().splitlines()) if line["what"] == "here"]
        if after:
            order(after, token + 1, step)
        (history / f"n0.go.{token}").touch()
        return dict(told[-1])

    try:
        yield arrived
    finally:
        job.kill()
        job.wait()


@pytest.mark.parametrize(
    "program", [pytest.param(PROGRAM, id="points"), pytest.param(PPO_PROGRAM, id="ppo", marks=pytest.mark.slow)]
)
def test_the_job_says_of_every_place_that_it_is_there(program: Path, tmp_path: Path) -> None:
    """So no playable scenario waits for a place that never comes: of those in a step, and in a reform as far as one process has
    them, this shows it; the others are seen. Found live: workers told of none of a reform's stages any more.
    """
    alone_has = [place for place in IN_A_REFORM if not place.endswith(("reach", "gather"))]
    every = [*alone_has, *(INSIDE if program == PPO_PROGRAM else IN_A_STEP)]
    with alone(program, tmp_path, every[0]) as arrived:
        for token, (place, after) in enumerate(pairwise([*every, ""]), 1):
            line = arrived(after, token, 3 if after in INSIDE else 0)
            assert line["place"] == place
            assert line["step"] >= 3 or place in alone_has


@pytest.mark.parametrize("fault", [Fault(kind=OF_PPO[0], at=0.0), Fault(kind="kill_worker", when="before sync")])
def test_what_only_ppo_has_is_left_out_where_something_else_trains(fault: Fault) -> None:
    scenario = replace(KILL, faults=(fault, *KILL.faults))
    assert why_not(scenario) == f"`shape.trainer` is not ppo, which {fault.kind} needs"
    assert not why_not(replace(scenario, shape=replace(SHAPE, trainer="ppo")))


def test_the_newest_line_of_each_of_a_nodes_workers_is_found(tmp_path: Path) -> None:
    history = tmp_path / "n1.jsonl"
    assert newest(history, 0, 4) == {}
    lines = [{"what": "sealed", "step": step, "rank": rank} for step in range(200) for rank in (4, 5, 6, 7)]
    history.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"rank": 5, "st')
    assert [newest(history, slot, 4) for slot in range(4)] == lines[-4:]
    assert newest(history, 0, 1) == lines[-1]


def test_which_of_a_nodes_workers_an_order_is_for(tmp_path: Path) -> None:
    """All of them see it: the one that it is for takes it."""
    (tmp_path / "n0.order").write_text(json.dumps({"do": "slow", "value": 0, "place": "", "token": 3, "slot": 1}))
    tree = SimpleNamespace(node=SimpleNamespace(workers=2))
    for rank, takes in ((4, False), (5, True)):
        with pytest.MonkeyPatch.context() as patched:
            patched.setenv("ELASTICRL_NODE", "n0")
            run: Any = SimpleNamespace(tree=tree, rank=rank, generation=1, world=6, timeline=Timeline())
            Told(str(tmp_path), run).at("before rollout", 7)
        assert (tmp_path / "n0.order").exists() is not takes
    assert [line["rank"] for line in map(json.loads, (tmp_path / "n0.jsonl").read_text().splitlines())] == [5]


def test_who_has_more_workers_than_this_machine_can_play_is_left_out() -> None:
    assert not why_not(replace(KILL, shape=Shape(nodes=2, slots=4, settings=replace(BASE, team=2))))
    assert (
        why_not(replace(KILL, shape=Shape(nodes=3, slots=4, settings=BASE)))
        == "3 nodes of 4 workers are for the simulator"
    )


def test_a_snapshot_on_its_way_is_told_from_one_that_is_there(tmp_path: Path) -> None:
    slots = Slots(tmp_path, origin="n1", writer="w0")
    slot = slots.take(4096)
    assert not is_sealed(slot.path)
    slot.memory[SEAL_AT] = 1
    assert is_sealed(slot.path)
    assert is_sealed(tmp_path / "gone.shard")


def plan_of(phase: Phase, generation: int = 2, rung: Rung = Rung.START) -> Planned:
    seats = tuple(Seat(member=Member(node=node, incarnation=1), born=1) for node in ("n0", "n1"))
    plan = Plan(
        generation=generation,
        phase=phase,
        seats=seats,
        lanes=12,
        endpoint="n0:1",
        causes=(Cause(why=Why.POLICY, said="because"),),
        rung=rung,
    )
    return Planned(at=2.0, plan=plan, by="n0/1", committed=0, paused_s=0.0)


def test_every_place_is_in_a_step_or_seen_in_the_store_or_on_the_disk() -> None:
    elected, committed = Elected(at=1.0, member="n0/1"), Committed(at=1.0, step=4, generation=1, manifest="m")
    facts = [elected, committed, *map(plan_of, Phase)]
    seen = {place for fact in facts for place in places(fact)}
    assert set(PLACES) == {*INSIDE, *IN_A_REFORM, *seen, *IN_FILES}


@pytest.mark.parametrize(
    ("when", "nth", "due"),
    [
        ("before apply", 1, "before apply"),
        ("before apply", 10, "before apply step 490"),
        ("after seal step 20", 1, "after seal step 500"),
        ("after seal step 20", 3, "after seal step 503"),
        ("saving", 3, "saving"),
        ("saving step 50", 2, "saving step 530"),
    ],
)
def test_a_position_counts_from_the_scenarios_beginning(when: str, nth: int, due: str) -> None:
    found = due_in(Fault(kind="kill_worker", when=when, nth=nth), 480)
    assert found.when == due
    assert found.nth == (1 if found.place in IN_A_STEP else nth)


def test_a_fault_waits_for_the_nth_arrival_at_its_place_from_its_step_on() -> None:
    waiting = Waiting(0, Fault(kind="kill_worker", when="committing step 50", nth=2))
    arrivals = [
        ("committing", 40),
        ("saving", 60),
        ("committing", 50),
        ("reform", 51),
        ("committing", 60),
        ("committing", 70),
    ]
    assert [waiting.there(*arrival) for arrival in arrivals] == [False, False, False, False, True, True]


def test_a_position_that_cannot_be_is_refused() -> None:
    assert "no number" in check(Fault(kind="kill_worker", when="saving step late"))
    assert "counts from 1" in check(Fault(kind="kill_worker", when="saving", nth=0))
    assert "nth is 1" in check(Fault(kind="kill_worker", when="reform after meet", nth=2))
    assert not check(Fault(kind="kill_worker", when="saving step 50"))


def test_random_faults_strike_at_places_too() -> None:
    drawn = [f for chance in (Random("c"),) for i in range(200) for f in draw(chance, str(i), 4).faults]
    placed = [fault for fault in drawn if fault.when]
    assert 0.2 < len(placed) / len(drawn) < 0.4
    assert not [fault for fault in drawn if check(fault)]
    assert {fault.place for fault in placed} == {*IN_A_STEP, "saving", "published", "committing"}
    assert {fault.nth for fault in placed} > {1, 2}
    asked = {fault.kind for fault in placed if fault.place in IN_A_STEP}
    assert {ALL[kind].reach for kind in asked} <= {"node", "link"}


def facts(*more: Fact) -> list[Fact]:
    seats = tuple(Seat(member=Member(node=node, incarnation=1), born=1) for node in ("n0", "n1"))
    plan = Plan(generation=1, phase=Phase.TRAIN, seats=seats, lanes=12, endpoint="n0:1", causes=(Cause(why=Why.BEGUN),))
    planned = Planned(at=0.1, plan=plan, by="n0/1", committed=0, paused_s=0.0)
    ranges, nodes = ((0, 6), (6, 12)), ("n0", "n1")
    resumed = {"version": 0, "digest": "", "source": "", "whole": -1, "nodes": nodes, "ranges": ranges}
    return [
        Elected(at=0.0, member="n0/1"),
        planned,
        *(Resumed(at=0.2, generation=generation, **resumed) for generation in (1,)),
        Loaded(at=1.0, factor=2.0),
        Struck(at=1.0, number=0, kind="kill_worker", nodes=("n1",)),
        *more,
        Ended(at=99.0, alive=(), seated=(), want=3, lively=True),
    ]


def steps(*times: float) -> list[Fact]:
    return [Sealed(at=at, generation=1, version=i, step=i, digest=f"{i}") for i, at in enumerate(times, 1)]


SHAPE = Shape(nodes=2, settings=BASE)
KILL = Scenario(name="x", shape=SHAPE, faults=(Fault(kind="kill_worker", at=0.0),))


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (steps(0.5, 1.1, 3.0), ""),
        (steps(0.5, 1.1, 30.0), "back_within_budget"),
        ([*steps(0.5, 1.1, 30.0), Struck(at=2.0, number=0, kind="disk_full", nodes=("n1",))], "back_within_budget"),
        (steps(0.5), "back_within_budget"),
        ([*steps(0.5, 1.1, 3.0), Missed(at=2.0, number=0, kind="kill_worker", why="it lives")], "every_fault_proved"),
        ([*steps(0.5, 1.1, 3.0), Proved(at=5.0, what="audit", ok=False, sentence="twice")], "what_the_end_shows"),
        (
            [*steps(0.5, 1.1, 3.0), Sealed(at=4.0, generation=1, version=2, step=2, digest="other")],
            "each_step_has_one_digest",
        ),
    ],
    ids=["well", "late", "late beside a short one", "never", "missed", "used twice", "other bits"],
)
def test_the_live_judge_sees(more: list[Fact], said: str) -> None:
    history = sorted(facts(*more), key=lambda fact: fact.at)
    assert {violation.check for violation in judge_live(KILL, history)} == ({said} if said else set())


@pytest.mark.parametrize(("most", "said"), [(1, {"expected_live"}), (2, set()), (None, set())])
def test_a_rung_above_the_scenarios_highest_fails_the_live_run(most: int | None, said: set[str]) -> None:
    replaced = plan_of(Phase.TRAIN, rung=Rung.REPLACE)
    history = sorted(facts(*steps(0.5, 1.1), replaced, *steps(3.0)), key=lambda fact: fact.at)
    scenario = replace(KILL, expect=Expect(rungs_at_most=most))
    found = judge_live(scenario, history)
    assert {violation.check for violation in found} & {"expected_live"} == said


def test_what_a_lab_has_left_fails_the_run(tmp_path: Path) -> None:
    lab = Lab(1, members=0, boxes=False)
    with lab:
        pass
    assert not lab.left
    lab.left = ["link elx0n0"]
    play = Play(tmp_path, say=lambda _: None, boxes=False)
    play._cleared(lab, "again")
    assert play.score.failed == [("again", f"{lab.name} has left link elx0n0")]


def test_a_fault_that_costs_no_step_is_not_blamed_for_the_hang_beside_it() -> None:
    full = Struck(at=2.0, number=0, kind="disk_full", nodes=("n1",))
    hang = Struck(at=1.0, number=0, kind="hang_worker", nodes=("n1",))
    for back, said in ((14.0, set()), (200.0, {"hang_worker", "disk_full"})):
        history = [*facts(*steps(0.5, 1.1, back, back + 0.1), full)]
        history = sorted(
            (hang if isinstance(f, Struck) and f is not full else f for f in history), key=lambda fact: fact.at
        )
        found = judge_live(KILL, history)
        assert {violation.what.partition(":")[0] for violation in found} == said


def test_a_fault_is_judged_when_all_that_stood_in_its_way_one_after_the_other_are_over() -> None:
    others = [
        Struck(at=1.0, number=0, kind="slow_disk", nodes=()),
        Struck(at=2.6, number=1, kind="kill_node", nodes=("n1",)),
        Struck(at=5.8, number=2, kind="pause", nodes=()),
        Eased(at=6.0, number=1, kind="kill_node"),
        Eased(at=12.0, number=2, kind="pause"),
    ]
    for back, said in ((12.3, set()), (200.0, {"slow_disk", "kill_node", "pause"})):
        facts_ = [fact for fact in facts(*steps(0.5, 1.1, 2.7, back, back + 0.1)) if not isinstance(fact, Struck)]
        found = judge_live(KILL, sorted([*facts_, *others], key=lambda fact: fact.at))
        late = {each.what.partition(":")[0] for each in found if each.check == "back_within_budget"}
        assert late == said


def test_a_fault_that_never_struck_fails_the_live_run() -> None:
    history = [fact for fact in facts(*steps(0.5, 1.1, 3.0)) if not isinstance(fact, Struck)]
    assert "every_fault_struck" in {violation.check for violation in judge_live(KILL, history)}
