"""Incidents: built from log lines, kept as files, told as a page."""

import json
import os
import shutil
import tempfile
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from elasticrl.cli import incidents
from elasticrl.contract.evidence import Evidence, of_exit
from elasticrl.contract.model import Exit
from elasticrl.contract.verdict import Fault
from elasticrl.core.judge.judge import judge
from elasticrl.diagnose import incident
from elasticrl.diagnose.incident import Incident, Unreadable, build, found, load, page, save
from elasticrl.telemetry.events import BY_NAME


def line(second: float, event: str, **fields: object) -> dict[str, object]:
    return {"at": f"2026-11-21T20:34:{second:09.6f}Z", "event": event, "level": "info", "node": "n00", **fields}


KILLED = [
    line(10.0, "workers.changed", work="training", generation=13, born=13, step=128),
    line(15.12, "worker.exited", generation=13, slot=0, step=131, cause="signal 9 (SIGKILL)", own=False, signal=9),
    line(15.13, "beats.refused", sender="10.0.0.9", problem="not signed"),
    line(15.2, "plan.adopted", generation=14, phase="train", rung="replace", reason="n03/1 failed; a spare takes over"),
    line(15.4, "workers.changed", work="training", generation=14, born=14, step=131),
    line(15.46, "recovery.done", generation=14, rung="replace", total_s=0.34, stages={"detect": 0.02}),
]
EVIDENCE = (
    of_exit(Exit(generation=13, slot=0, step=131, cause="signal 9 (SIGKILL)", own=False, signal=9), rank=3, node="n03"),
)


def recorded() -> Incident:
    """NCCL's own network was cut under three ranks on one H100 (NCCL 2.28.9, `NCCL_SOCKET_IFNAME` an interface of its own)."""
    return load(Path(__file__).parents[1] / "data" / "incidents" / "h100_fallback.json")


def test_what_broke_real_nccl_is_found_and_told() -> None:
    told = page(recorded())
    assert "going on over gloo" in told
    assert "no socket interface found" in told
    assert "first step of generation 3 was sealed" in told
    assert recorded().verdict.fault is Fault.FABRIC


def killed() -> Incident:
    built = build(KILLED, judge(EVIDENCE), EVIDENCE, job="ppo-7b", node="n00")
    assert built is not None
    return built


def test_the_log_lines_of_a_killed_worker_become_its_incident() -> None:
    told = killed()
    assert told.id == "20261121203410-g14"
    assert (told.generation, told.steps, told.seconds) == (14, 0, 0.34)
    assert [moment.event for moment in told.timeline] == [
        "workers.changed", "worker.exited", "plan.adopted", "workers.changed", "recovery.done",
    ]  # fmt: skip
    assert told.actions == ("generation 14 (train, rung replace): n03/1 failed; a spare takes over",)
    assert (told.verdict.fault, told.verdict.ranks, told.verdict.nodes) == (Fault.DEAD_RANK, (3,), ("n03",))


def test_what_the_machine_was_short_of_is_told_and_is_not_when_it_began() -> None:
    lines = [line(9.0, "machine.starved", said="cpu.load 9.1 on 2 cores"), *KILLED]
    told = build(lines, judge(EVIDENCE), EVIDENCE, job="j", node="n00")
    assert told is not None
    assert told.began == killed().began
    assert "cpu.load 9.1 on 2 cores" in page(told)


def test_steps_that_were_made_again_are_counted_and_an_incident_that_lasts_says_so() -> None:
    reloaded = [*KILLED[:4], line(16.0, "workers.changed", work="training", generation=14, born=14, step=100)]
    told = build(reloaded, judge(EVIDENCE), EVIDENCE, job="j", node="n00")
    assert told is not None
    assert (told.steps, told.seconds, told.ended) == (31, None, "")
    assert "It lasts." in page(told)
    assert "31 steps were made again." in page(told)


def test_lines_in_any_order_make_the_same_incident_and_none_makes_none() -> None:
    assert build(reversed(KILLED), judge(EVIDENCE), EVIDENCE, job="ppo-7b", node="n00") == killed()
    assert build([], judge([]), job="j", node="n") is None
    assert build([line(1.0, "daemon.started")], judge([]), job="j", node="n") is None


def test_a_line_without_its_fields_is_told_with_a_question_mark() -> None:
    told = build([line(1.0, "worker.exited")], judge([]), job="j", node="n")
    assert told is not None
    assert told.timeline[0].text == "a worker (slot ?) ended at step ?: ?"


def test_every_event_that_is_told_exists_with_the_fields_it_is_told_by() -> None:
    for name, text in incident.TOLD.items():
        named = {part.partition("}")[0] for part in text.split("{")[1:]}
        assert named <= set(BY_NAME[name].fields), name


def test_the_page_answers_what_who_when_cost_and_what_to_do() -> None:
    text = page(killed())
    for part in (
        "INCIDENT 20261121203410-g14 of job ppo-7b", "It began at 2026-11-21 20:34:10.000", "over after 0.3 seconds",
        "No step was lost.", "a rank died (dead_rank)", "At fault: rank 3, node n03.", "What was done:",
        "What to do: See who sent the signal", "20:34:15.120  n00  a worker (slot 0) ended at step 131: signal 9",
    ):  # fmt: skip
        assert part in text, part
    assert max(map(len, text.splitlines())) < 230


def test_a_file_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    path = save(tmp_path / "incidents", killed())
    assert load(path) == killed()
    assert save(tmp_path / "incidents", killed()) == path
    assert [file.name for file in (tmp_path / "incidents").iterdir()] == [path.name]


def test_evidence_survives_with_all_that_speaks(tmp_path: Path) -> None:
    fact = Evidence(kind=EVIDENCE[0].kind, sign=EVIDENCE[0].sign, rank=1, ranks=(1, 2), seq=4, op="X", line="a\nb")
    told = build(KILLED, judge([fact]), [fact], job="j", node="n")
    assert told is not None
    assert load(save(tmp_path, told)).evidence == (fact,)


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"v": 2}', '{"v": 1, "evidence": [{}]}', "null"])
def test_what_is_no_incident_is_said_and_the_others_are_told(text: str, tmp_path: Path) -> None:
    save(tmp_path, killed())
    (tmp_path / "bad.json").write_text(text)
    with pytest.raises(Unreadable, match=r"bad\.json"):
        load(tmp_path / "bad.json")
    incidents_, unread = found([tmp_path, tmp_path / "none"])
    assert [each.id for each in incidents_] == [killed().id]
    assert len(unread) == 1


def test_it_began_when_steps_ceased_though_the_first_sign_came_later() -> None:
    # Found by a new user: "It was over after 1.5 seconds", with a timeline of half a second.
    late = [{**each, "total_s": 9.0} if each["event"] == "recovery.done" else each for each in KILLED]
    told = build(late, judge(EVIDENCE), job="j", node="n")
    assert told is not None
    assert told.id == killed().id
    ended, began = (datetime.fromisoformat(at) for at in (told.ended, told.began))
    assert round((ended - began).total_seconds(), 3) == told.seconds == 9.0


def test_the_oldest_go_when_there_are_too_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(incident, "KEPT", 3)
    for second in range(6):
        lines = [{**each, "at": f"2026-11-21T20:35:{second:02}.0Z"} for each in KILLED]
        told = build(lines, judge(EVIDENCE), job="j", node="n")
        assert told is not None
        save(tmp_path, told)
    assert sorted(file.name for file in tmp_path.iterdir()) == [f"2026112120350{s}-g14.json" for s in (3, 4, 5)]


app = typer.Typer()
app.callback()(lambda: None)
incidents.register(app)


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["incidents", *map(str, arguments)])


def test_a_folder_that_is_closed_to_us_is_not_said_to_have_no_incidents() -> None:
    if os.geteuid():
        pytest.skip("only root can be somebody else for a moment")
    root = Path(tempfile.mkdtemp(dir="/tmp"))  # pytest's own are closed to others above it
    assert run("--state-dir", root).exit_code == 0  # what it imports may lie where only root can read,
    assert root.group()  # as may this
    job = root / "ppo-7b"
    try:
        root.chmod(0o755)
        job.mkdir(mode=0o750)
        os.chown(job, 0, 54321)
        os.seteuid(65534)
        said = run("--state-dir", root)
    finally:
        os.seteuid(0)
        shutil.rmtree(root)
    assert (said.exit_code, said.stdout) == (1, "")
    assert f"{job} is closed to this user: it is open to the group 54321" in said.stderr


def test_what_three_nodes_tell_alike_is_one_line(tmp_path: Path) -> None:
    for node in ("n00", "n01", "n02"):
        save(incident.folder_of(tmp_path, "j", node), replace(killed(), node=node))
    save(
        incident.folder_of(tmp_path, "j", "n03"), replace(killed(), node="n03", generation=15, id="20261121203410-g15")
    )
    first, second = run("--state-dir", tmp_path).stdout.splitlines()[1:]
    assert first.startswith("20261121203410-g14  n00, n01, n02  ")
    assert second.startswith("20261121203410-g15  n03  ")


def test_incidents_of_another_name_than_the_configuration_s_are_said_to_be_there(tmp_path: Path) -> None:
    """Found by a newcomer: it advised the very option that it had been given."""
    save(incident.folder_of(tmp_path, "mine", "n00"), killed())
    config = tmp_path / "job.yaml"
    config.write_text(
        f"job: {{name: toy, program: x.py}}\nstore: {{endpoints: [http://a:1]}}\nnode: {{state_dir: {tmp_path}}}\n"
    )
    assert run("--config", config).stdout == (
        f"no incidents of the job toy below {tmp_path}; there are those of mine: elasticrl incidents --state-dir {tmp_path}\n"
    )


@pytest.mark.parametrize("root", ["run/state", "run/demo/state"])
def test_those_of_a_run_are_found_from_its_folder_when_it_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, root: str
) -> None:
    # Found by a newcomer: once it was stopped there were "no incidents of the job mine below /var/lib/elasticrl".
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ELASTICRL_RUN_DIR", str(tmp_path / "none"))
    assert "no incidents" in run("--job", "mine").stdout
    save(incident.folder_of(tmp_path / root, "mine", "n00"), killed())
    assert killed().id in run("--job", "mine").stdout
    assert killed().id in run().stdout
    assert "no incidents of the job other" in run("--job", "other").stdout


def test_the_command_lists_them_tells_one_and_prints_json(tmp_path: Path) -> None:
    assert run("--state-dir", tmp_path).stdout.startswith(f"no incidents below {tmp_path}; ")
    assert f"no incidents below {tmp_path}; " in run("last", "--state-dir", tmp_path).stderr
    save(incident.folder_of(tmp_path, "ppo-7b", "n00"), killed())
    listed = run("--state-dir", tmp_path).stdout
    assert "20261121203410-g14" in listed
    assert "rank 3, n03" in listed
    for name in ("2026112", "last", killed().id):
        assert run(name, "--state-dir", tmp_path).stdout.startswith("INCIDENT 20261121203410-g14")
    assert json.loads(run("last", "--state-dir", tmp_path, "--json").stdout) == [killed().plain()]
    assert json.loads(run("--state-dir", tmp_path, "--json").stdout) == [killed().plain()]
    missing = run("nope", "--state-dir", tmp_path)
    assert missing.exit_code == 1
    assert "none is nope" in missing.stderr
