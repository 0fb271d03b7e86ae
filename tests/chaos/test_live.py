"""Real nodes, real faults: one job in one lab takes scenario after scenario, each judged by itself, the whole at the end."""

import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random

import pytest

from chaos.checks import judge_live
from chaos.faults import ALL, Fault
from chaos.history import Elected, Ended, Fact, Loaded, Missed, Planned, Proved, Resumed, Sealed, Struck
from chaos.live import box
from chaos.live.drive import Drive, Verdict
from chaos.live.lab import Lab, leftovers
from chaos.live.play import BASE, Play, draw, why_not
from chaos.live.strikes import Hands
from chaos.run import LIVE, SCENARIOS
from chaos.scenario import Scenario, load, save
from chaos.sim.cluster import Shape
from elasticrl.core.model import Member, Phase, Plan, Seat

# A selection: each kind of victim once. `make chaos` runs all, and then random ones.
CHOSEN = (
    "worker-killed-before-it-reduces", "worker-stopped", "worker-out-of-memory", "agent-dies-live", "daemon-of-the-leader-dies",
    "daemon-hands-over", "two-daemons-of-one-name", "vault-dies", "vault-loses-its-port", "store-leader-dies",
    "store-away-and-a-worker-dies", "cable-pulled", "disk-full-while-saving", "starved-node", "power-cut-before-a-seal",
)  # fmt: skip
pytestmark = pytest.mark.timeout(280)


@dataclass(slots=True)
class Bench:
    """A lab, and the job that runs in it; another one after a job that a scenario left in ruins."""

    lab: Lab
    drive: Drive | None = None
    jobs: int = 0

    def play(self, scenario: Scenario) -> Verdict:
        """One scenario."""
        if self.drive is None:
            self.jobs += 1
            shape = Scenario(name="tests", shape=Shape(nodes=len(self.lab.boxes), settings=BASE))
            self.drive = Drive(self.lab, shape, name=f"t{self.jobs}").__enter__()
        verdict = self.drive.scenario(scenario)
        if verdict.violations:
            self.drive.keep(self.lab.folder / "failed" / scenario.name, "see the test")
            self.lab.keep = True
            self.end()
        return verdict

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


@pytest.mark.parametrize("name", CHOSEN)
def test_the_job_survives(bench: Bench, name: str) -> None:
    scenario = load(LIVE / f"{name}.yaml")
    if why := why_not(scenario, boxes=bench.lab.real):
        pytest.skip(why)
    verdict = bench.play(scenario)
    assert not verdict.violations, "\n".join(map(str, verdict.violations))
    assert len(verdict.struck) == len(scenario.faults)


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
        with Lab(1, members=0):
            pass
        assert not leftovers(name)
        assert not list(Path(folder).iterdir()), "its folder, with what was mounted there"
    assert not box.alive(int(pid))


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


# ---- pure parts


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
    assert len(paths) >= 30
    assert not [path.stem for path in paths if why_not(load(path))]
    assert sum(not why_not(load(path)) for path in SCENARIOS.glob("*.yaml")) >= 15


def test_every_fault_is_known_to_some_driver() -> None:
    assert not [
        name for name in ("kill_worker", "power_cut", "disk_full") if name not in ALL or not hasattr(Hands, f"_{name}")
    ]


def facts(*more: Fact) -> list[Fact]:
    seats = tuple(Seat(member=Member(node=node, incarnation=1), born=1) for node in ("n0", "n1"))
    plan = Plan(generation=1, phase=Phase.TRAIN, seats=seats, lanes=12, endpoint="n0:1", reason="first plan")
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


def test_a_fault_that_never_struck_fails_the_live_run() -> None:
    history = [fact for fact in facts(*steps(0.5, 1.1, 3.0)) if not isinstance(fact, Struck)]
    assert "every_fault_struck" in {violation.check for violation in judge_live(KILL, history)}
