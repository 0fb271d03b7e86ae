"""What each screen says, in golden files: `golden/screens/NAME.txt`, made of fixed values.

Other tests ask for values. After a wanted change of words: `GOLDEN=write pytest tests/unit/test_screens.py`; then read the
diff.
"""

import os
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from picture_kit import N0, N1, seen
from report_kit import leave
from typer.testing import CliRunner

from elasticrl.cli import diagnose, doctor, render, top
from elasticrl.cli.main import build
from elasticrl.contract.cause import GONE, Cause, Why, gone, sentence
from elasticrl.contract.evidence import Evidence, Kind, Sign, of_exit
from elasticrl.contract.model import (
    LOADING,
    Commit,
    Exit,
    Intent,
    Member,
    Milestone,
    Phase,
    Plan,
    Quarantine,
    Record,
    Rollout,
    Rung,
    Seat,
    Stall,
    Strike,
    View,
    Work,
)
from elasticrl.contract.pairs import Result
from elasticrl.contract.verdict import Known
from elasticrl.core.judge.judge import judge
from elasticrl.diagnose import incident, report
from elasticrl.diagnose.health import Check, Level
from elasticrl.diagnose.logs import Reading
from elasticrl.status.past import Broken, Missing, Past
from elasticrl.status.picture import picture

GOLDEN = Path(__file__).parent / "golden" / "screens"
ROOT = Path(__file__).parents[2]
N2 = Member(node="n2", incarnation=1)
DIED = Exit(generation=3, slot=0, step=41, cause="signal 9 (SIGKILL)", own=False, signal=9)
KILLED = judge((of_exit(DIED, rank=1, node="n1"),), Known(world=3))
LOG = (
    {"event": "workers.changed", "work": "training", "generation": 13, "born": 13, "step": 128},
    {"event": "worker.exited", "level": "warning", "generation": 13, "slot": 0, "step": 131, "cause": "signal 9 (SIGKILL)",
     "own": False, "signal": 9},
    {"event": "plan.adopted", "generation": 14, "phase": "train", "rung": "replace", "reason": "n1/1: signal 9 (SIGKILL)"},
    {"event": "workers.changed", "work": "training", "generation": 14, "born": 14, "step": 131},
    {"event": "recovery.done", "generation": 14, "rung": "replace", "total_s": 0.34, "stages": {"detect": 0.02}},
    {"event": "verdict.found", "fault": "dead_rank", "ranks": [1], "nodes": ["n1"], "cause": KILLED.cause,
     "confidence": "medium", "remedy": KILLED.remedy},
    {"event": "ppo.step", "step": 132, "seconds": {"update": 0.5}, "metrics": {"reward": 0.712345, "kl": 0.5}},
)  # fmt: skip
LINES = tuple(
    {"job": "ppo", "node": "n0", "level": "info", "at": f"2026-11-21T20:34:{10 + at:09.6f}Z", **line}
    for at, line in enumerate(LOG)
)


def told(*screens: tuple[str, str]) -> str:
    """Several screens, each under a line that says what it is of."""
    return "\n".join(f"=== {title}\n{text.rstrip()}\n" for title, text in screens)


def asked(*arguments: object) -> str:
    """What a command prints."""
    done = CliRunner(env={"COLUMNS": "200", "NO_COLOR": "1"}).invoke(
        build([str(arguments[0])]), list(map(str, arguments))
    )
    return done.output + (f"(exit code {done.exit_code})\n" if done.exit_code else "")


def train(*causes: Cause, rung: Rung = Rung.REFORM, phase: Phase = Phase.TRAIN, **more: object) -> Plan:
    seats = (Seat(member=N0, born=1), Seat(member=N1, born=1), Seat(member=N2, born=1))
    return Plan(generation=3, phase=phase, rung=rung, seats=seats, causes=causes, **more)


def job(
    plan: Plan, records: dict[str, Record], quarantines: dict[str, Quarantine] | None = None, **more: object
) -> str:
    commit = Commit(step=40, generation=3, manifest="m40", written=960.0)
    intent = more.pop("intent", Intent.RUN)
    view = View(plan=plan, commit=commit, leader=N0, intent=intent)
    named = {"needs": 2, "now": 1000.0, "node": "n0", **more}
    return render.status(asdict(picture("ppo", view, records, quarantines or {}, **named)), colour=False)


def record(member: Member, work: Work = Work.TRAINING, **more: object) -> Record:
    return Record(member=member, **{"work": work, "generation": 3, "step": 41, "phase": "rollout", **more})


def three(**more: Record) -> dict[str, Record]:
    return {**{member.node: record(member, beat_at=999.6) for member in (N0, N1, N2)}, **more}


def status(_: Path) -> str:
    broken = Broken.of(KILLED, at=959.0, generation=3, broke=2)
    past = Past(began=100.0, faults=2, last=replace(broken, seconds=0.21, steps=0, rung="replace"), most=3)
    silent = Cause(why=Why.SILENT, who=(N2,), nodes=("n0", "n1"))
    kept_out = {"n2": Quarantine(member=N2, cause=Cause(why=Why.FAILED_AGAIN, who=(N2,), count=3, step=41))}
    stall = Stall(slot=0, step=41, phase="update", for_s=9.0, budget_s=8.0, waiting=True)
    two = {name: record for name, record in three().items() if name != "n2"}
    script = {"n0": record(N0, milestone=Milestone(unit="epoch", at=2, of=5, read=990.0)), "n1": record(N1)}
    began = Cause(why=Why.BEGUN)
    return told(
        ("two nodes train", render.status(asdict(seen()), colour=False)),
        ("after two faults", job(train(silent, verdict=KILLED), three(), past=past, planned_s=41.0)),
        ("a node has gone", job(train(silent), two, past=replace(past, missing=(Missing(member=N2, at=940.0),)))),
        ("a worker has failed", job(train(began), three(n1=record(N1, Work.FAILED, exit=DIED)))),
        ("workers wait", job(
            train(Cause(why=Why.STALLED), phase=Phase.PROBE), three(n1=record(N1, Work.STALLED, stall=stall))
        )),
        ("a node is kept out", job(
            replace(train(silent), seats=(Seat(member=N0, born=1), Seat(member=N1, born=1))), three(n2=Record(member=N2)),
            kept_out,
        )),
        ("a node joins", job(
            replace(train(Cause(why=Why.JOINED, who=(N2,)), rung=Rung.START), seats=(
                Seat(member=N0, born=1), Seat(member=N1, born=1), Seat(member=N2, born=3)
            )),
            {**{name: replace(each, work=Work.JOINING, born=1) for name, each in two.items()},
             "n2": record(N2, Work.JOINING, phase=LOADING, step=0, born=3)},
        )),
        ("paused", job(
            train(Cause(why=Why.PAUSED, nodes=("an operator",)), phase=Phase.HOLD),
            {name: replace(each, work=Work.NONE, warm=True) for name, each in three().items()}, intent=Intent.PAUSE,
        )),
        ("too few", job(train(Cause(why=Why.TOO_FEW, count=1, of=2), phase=Phase.HOLD), {"n0": record(N0, Work.PARKED)})),
        ("etcd is silent", job(train(began), {"n0": record(N0)}, silent=True)),
        ("etcd is away, and a gang broke", job(train(began), three(n1=record(N1, Work.PARKED)), away=True)),
        ("a rollout node", job(train(began), three(), {}, rollouts={
            "g0": Rollout(member=Member(node="g0", incarnation=1), up=True, address="10.0.0.9:8000", version=40),
        }, engines=2)),
        ("a script that tells nothing but a log", job(train(began), script)),
        ("a daemon died, and a node cannot get ready", job(train(began), {
            **three(n1=record(N1, taken_at=995.0, taken="died")),
            "n3": Record(member=Member(node="n3", incarnation=1), problem="exit code 1: No module named 'peft'"),
        })),
        ("finished", job(train(Cause(why=Why.FINISHED, step=41), phase=Phase.STOP, exit_code=0), {})),
        ("crash loop", job(train(Cause(why=Why.CRASH_LOOP, said="n1/1: exit code 1", count=3, step=41), phase=Phase.STOP,
                                 exit_code=70, strike=Strike(step=41, count=3, cause=began)), {})),
        ("begun again", job(train(Cause(why=Why.STOPPED, nodes=("an operator",)), phase=Phase.STOP, exit_code=75), {
            "n0": record(Member(node="n0", incarnation=2), Work.NONE),
        })),
        ("no plan yet", render.status(asdict(picture("ppo", View(), {"n0": Record(member=N0)}, {}, needs=2)), colour=False)),
    )  # fmt: skip


def reasons(_: Path) -> str:
    """What the plan's line says, one for each kind of cause; and what stands beside the name of a node that has gone."""
    full = {"who": (N2,), "nodes": ("n0", "n1"), "step": 1280, "count": 2, "of": 3, "seconds": 5.0}
    rows = [f"{why}: {sentence(Cause(why=why, **full, setting='recovery.reform', said='WORDS'))}" for why in Why]
    return told(
        ("for each cause", "\n".join(rows)),
        (
            "beside its name",
            "\n".join(f"{why}: {gone(Cause(why=why, nodes=('n0', 'n1'), said='n2/2'))}" for why in GONE),
        ),
    )


def top_(_: Path) -> str:
    row = top.Row(
        node="n0", rank=0, team=None, pid=4711, state="training", step=1284, step_s=0.52, phase="update", phase_s=0.3,
        waits=0.1, cpu=0.98, memory=412_000_000, bytes_s=81_920.0, shares={"update": 0.9, "rollout": 0.1},
    )  # fmt: skip
    young = replace(row, rank=None, pid=4712, state="joining", step=0, step_s=None, bytes_s=0.0, shares={"load": 1.0})
    return told(
        ("two workers", "\n".join(top.shown([row, young]))),
        ("one of a team", "\n".join(top.shown([replace(row, team=3, bytes_s=0.0)]))),
    )


def events(_: Path) -> str:
    return told(("a recovery", "\n".join(render.event(line, colour=False) for line in LINES)))


def incidents(folder: Path) -> str:
    own = incident.build(list(LINES), KILLED, KILLED.because, job="ppo", node="n0")
    assert own is not None
    gpu = incident.load(ROOT / "tests" / "data" / "incidents" / "h100_fallback.json")
    for each in (own, gpu):
        incident.save(folder / each.job / each.node / "incidents", each)
    none = folder / "none"
    none.mkdir()
    return told(
        ("all of them", asked("incidents", "--state-dir", folder)),
        ("one", asked("incidents", own.id, "--state-dir", folder)),
        ("none", asked("incidents", "--state-dir", none)),
    )


def doctor_(_: Path) -> str:
    checks = [
        Check(name="versions", level=Level.OK, value="elasticrl 0.1.0, torch 2.13.0"),
        Check(name="shm.space", level=Level.WARN, value="1.2 GiB free", why="The vault keeps its copies in /dev/shm.",
              remedy="Make /dev/shm larger, or vault.window smaller."),
        Check(name="gpu.present", level=Level.SKIP, value="no nvidia-smi here"),
    ]  # fmt: skip
    pairs = [Result(node="n0", peer="n1", latency_ms=0.2, mbps=9400.0, tcp="ok"),
             Result(node="n0", peer="n2", latency_ms=0.2, mbps=940.0, tcp="ok")]  # fmt: skip
    checks += [*doctor.untested("did not end within 30 s"), *doctor.paced(pairs, least=1000.0)]
    return told(("this machine", doctor.page(checks)), ("the ways", doctor.drawn(doctor.measured(pairs))))


def plan(_: Path) -> str:
    own = ("job.program=train.py", "model.path=null", "model.strategy=fsdp", "store.embedded=true")
    config = ROOT / "configs" / "one-machine.yaml"
    return told(
        ("a model of one's own", asked("plan", config, "--parameters", "350M", "--memory", "80GiB", *own)),
        ("the stages of a step", asked("plan", config, "--graph")),
    )


def report_(folder: Path) -> str:
    return told(("in words", asked("report", leave(folder / "toy run"), "--text")))


def config_check(folder: Path) -> str:
    bad, good = folder / "bad.yaml", folder / "good.yaml"
    bad.write_text(
        "job: {name: demo, program: train.py}\nmembership:\n  keepalive: 6s\n  min_node: 2\nvault: {window: 16}\n"
    )
    good.write_text(
        "job: {name: demo, program: elasticrl.ppo}\nmodel: {path: m}\nstore: {embedded: true}\ndata: {path: p.jsonl}\n"
        "reward: {function: r:score}\n"
    )
    return told(("refused", asked("config", "check", bad)), ("taken", asked("config", "check", good)))


def diagnose_(_: Path) -> str:
    waits = [Evidence(kind=Kind.WATCHDOG_TIMEOUT, sign=Sign.WAITED, rank=rank, op="ALLREDUCE", seq=88, source=f"rank{rank}.log",
                      line_no=7, elapsed_ms=600_000, when=44_000.0, at="12:13:20") for rank in (0, 2)]  # fmt: skip
    facts = (*waits, of_exit(DIED, rank=1, node="n1"))
    verdict = judge(facts, Known(world=3))
    said = {"said": "ranks 0-2 run; where they are is unknown", "moved": [0], "reason": "first plan; 3 nodes train",
            "verdict": judge(()).plain(), "if_it_lasts": verdict.plain(), "before": verdict.plain()}  # fmt: skip
    logs = report.page(
        verdict,
        Reading(
            files=("rank0.log", "rank2.log"),
            ranks=frozenset({0, 2}),
            evidence=facts,
            unread=("rank1.log: gone",),
        ),
    )
    return told(
        ("logs", logs),
        ("a job that runs", "\n".join(diagnose.live(said))),
        ("one with a fault", "\n".join(diagnose.live({**said, "verdict": verdict.plain(), "if_it_lasts": None}))),
    )


SCREENS = {
    "status": status, "reasons": reasons, "top": top_, "events": events, "incidents": incidents, "doctor": doctor_,
    "plan": plan, "report": report_, "config-check": config_check, "diagnose": diagnose_,
}  # fmt: skip


@pytest.mark.parametrize("name", SCREENS)
def test_a_screen_says_what_it_said(name: str, tmp_path: Path) -> None:
    text = SCREENS[name](tmp_path).replace(str(tmp_path), "FOLDER").replace(str(ROOT), "ROOT")
    path = GOLDEN / f"{name}.txt"
    if os.environ.get("GOLDEN") == "write":
        path.write_text(text)
    assert text == path.read_text()


def test_there_is_a_golden_file_for_each_screen_and_no_other() -> None:
    assert {path.stem for path in GOLDEN.iterdir()} == SCREENS.keys()
