"""The report: what a run left, read, reckoned with and drawn."""

import json
import os
import re
import shutil
import subprocess
import sys
import tracemalloc
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from report_kit import NASTY, leave, lines_of, log
from typer.testing import CliRunner

from elasticrl.cli.main import build
from elasticrl.contract.beats import Snapshot, Stage
from elasticrl.contract.evidence import of_exit
from elasticrl.contract.model import Exit
from elasticrl.core.judge.judge import judge
from elasticrl.daemon.steps import Line, Marks, after
from elasticrl.diagnose import incident
from elasticrl.report.charts import COLOURS, DRAWN, TOLD, timed
from elasticrl.report.owners import Unchosen
from elasticrl.report.page import DARK, LIGHT, LISTED, page
from elasticrl.report.read import read
from elasticrl.report.story import Span, Story, heat, tell
from elasticrl.report.text import clock, facts, human, text, within
from elasticrl.report.values import Left, Took
from elasticrl.runtime.chronicle import Chronicle
from elasticrl.runtime.data.cursor import Cursor, Walk
from elasticrl.runtime.data.ledger import Ledger
from elasticrl.runtime.vault.version import Cut, Version


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return leave(tmp_path / "toy run")


def story_of(folder: Path) -> Story:
    return tell(read(folder))


def test_a_run_is_told_from_its_logs(run: Path) -> None:
    story = story_of(run)
    assert (story.left.job, story.nodes, story.steps, story.outcome) == ("toy", ("n0", "n1", "n2"), 10, "all done")
    assert [(g.number, g.rung, g.world, g.fault) for g in story.generations] == [
        (1, "start", 3, False), (2, "reform", 2, True), (3, "start", 3, False), (4, "start", 3, False),
    ]  # fmt: skip
    slowest = story.recoveries[0]
    assert (slowest.node, slowest.total_s, slowest.stages["first_step"]) == ("n2", 0.7, 0.2)
    assert len(story.left.incidents) == 1
    assert story.curve[-1].facts == {"reward": 0.9, "kl": 0.1, "loss": -9.0}


MADE = {"job": "toy", "node": "n0", "level": "info", "at": "2026-11-21T20:34:06.600000Z"}
TIMES: dict[str, Any] = {
    "at": 1795293244.0,
    "node": "n0",
    "rank": 0,
    "step": 1,
    "generation": 1,
    "seconds": {"rollout": 0.2},
}
DONE = {**MADE, "event": "recovery.done", "generation": 2, "rung": "reform", "total_s": 0.6, "stages": {"decide": 0.1}}
EVALUATED = {"step": 3, "evaluated": {"score": 0.5}, "samples": [{"prompt": "p", "answer": "a", "score": 0.5}]}


def said_by_ppo(**more: object) -> str:
    told = {"event": "ppo.step", "step": 3, "generation": 1, "seconds": {"update": 0.1}, "metrics": {"loss": 0.5}}
    return json.dumps(told | more)


@pytest.mark.parametrize(
    ("file", "line"),
    [
        *(("steps.jsonl", json.dumps({**TIMES, name: "#"})) for name in ("at", "rank", "step", "generation", "steps", "bytes")),
        *(("steps.jsonl", json.dumps({**TIMES, name: {"rollout": "#"}})) for name in ("seconds", "waited")),
        *(("history.jsonl", json.dumps({"step": 3, "reward": 0.5, "generation": 1, name: "#"}))
          for name in ("step", "reward", "generation", "wall", "kl")),
        *(("history.jsonl", json.dumps(EVALUATED | more)) for more in ({"step": "#"}, {"evaluated": {"score": "#"}},
          {"samples": [{"prompt": "p", "answer": "a", "score": "#", "parts": {"x": "#"}}]})),
        *(("attempt_1.log", said_by_ppo(**more))
          for more in ({"step": "#"}, {"metrics": {"reward": "#"}}, {"seconds": {"update": "#"}}, {"ts": "#"})),
        *(("n3.daemon.log", json.dumps({**DONE, name: "#"})) for name in ("total_s", "generation")),
        ("n3.daemon.log", json.dumps({**DONE, "stages": {"decide": "#"}})),
        *(("n3.daemon.log", json.dumps({**MADE, "event": event, "step": "#", "generation": "#", "world": "#", "members": "#"}))
          for event in ("workers.changed", "plan.adopted", "checkpoint.committed", "worker.ended")),
    ],
)  # fmt: skip
def test_no_number_of_a_line_ends_the_report(tmp_path: Path, file: str, line: str) -> None:
    (tmp_path / "n0.daemon.log").write_text("".join(json.dumps(row) + "\n" for row in lines_of("n0")))
    rows = [{**TIMES, "step": step, "at": 1795293243.0 + step} for step in (1, 2, 3)]
    good = [json.dumps(row) for row in rows] if file == "steps.jsonl" else []
    for number in ("1e999", "-1e999", "NaN", "9" * 400, "-" + "9" * 400, "1e15", "-1e15", "1e300", "9" * 290):
        (tmp_path / file).write_text("\n".join([*good, line.replace('"#"', number)]) + "\n")
        assert "toy: " in text(story_of(tmp_path)), number


@pytest.mark.parametrize(
    "at", ["9999-12-31T23:59:59-12:00", "0001-01-01T00:00:00+05:00", "0001-01-01T00:00:00", "1e999"]
)
def test_no_moment_of_a_line_ends_the_report(tmp_path: Path, at: str) -> None:
    rows = [*lines_of("n0"), {**MADE, "event": "plan.adopted", "at": at}]
    (tmp_path / "n0.daemon.log").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "attempt_1.log").write_text(said_by_ppo(ts=at))
    (tmp_path / "incidents").mkdir()
    told = {**json.loads(next(iter(made_incident(tmp_path).glob("*.json"))).read_text()), "began": at}
    (tmp_path / "incidents" / "a.json").write_text(json.dumps(told))
    assert "toy: " in text(story_of(tmp_path))


def made_incident(folder: Path) -> Path:
    evidence = (of_exit(Exit(generation=1, slot=0, step=4, cause="x", own=False, signal=9), rank=1, node="n1"),)
    built = incident.build(lines_of("n0")[4:8], judge(evidence), evidence, job="toy", node="n0")
    assert built is not None
    incident.save(folder / "made", built)
    return folder / "made"


def test_a_run_of_a_script_is_told_by_how_far_its_log_said_that_it_was(tmp_path: Path) -> None:
    lines = [line for line in lines_of("n0") if "step" not in line or not line["step"]]
    lines += [
        log(8.0 + n, "milestone.read", "n0", generation=3, said=f"step {n} of 500", unit="step", count=n)
        for n in (1, 2)
    ]
    (tmp_path / "n0.daemon.log").write_text("".join(json.dumps(line) + "\n" for line in lines))
    story = story_of(tmp_path)
    assert facts(story)[0] == ("how far", "step 2 of 500", "as the script's own log said last")
    assert "toy: step 2 of 500 (by the script's log) on 1 nodes" in text(story)


def test_a_node_whose_daemon_was_killed_was_away_until_it_started_again(run: Path) -> None:
    story = story_of(run)
    spans = [
        (span.state, round(span.start - story.begin, 1), round(span.end - story.begin, 1))
        for span in story.spans
        if span.node == "n1"
    ]
    # Its last sign of life is its last step's line, 3 s before the log's next line.
    away_from = max(end for state, _, end in spans if end < 9.05)
    assert away_from < 9.0
    assert ("starting", 9.1, 10.1) in spans


def test_the_time_in_which_the_whole_gang_trained_is_told(run: Path) -> None:
    story = story_of(run)
    assert story.since is not None
    assert round(story.since - story.begin, 1) == 2.0
    assert story.trained is not None
    assert 0.85 < story.trained < 0.97  # all but the reform, and n1's way in


def test_goodput_counts_sealed_steps_once_each_at_what_a_step_usually_takes(run: Path) -> None:
    story = story_of(run)
    assert story.since is not None
    # Ten steps of 0.6 s as most took, though the slow rank's took 1.0 s.
    assert story.goodput == pytest.approx(10 * 0.6 / (story.until - story.since))
    again = run / "log" / "n0" / "steps.jsonl"
    lines = again.read_text().splitlines()
    again.write_text("\n".join([*lines, lines[-1]]) + "\n")
    assert story_of(run).goodput == story.goodput


def test_a_slow_rank_stands_out_by_its_own_work(run: Path) -> None:
    found = story_of(run).heat
    assert found is not None
    assert found.worst == pytest.approx(0.9 / 0.5, rel=0.01)
    assert all(value is None or value > 1.5 for value in found.cells[2])
    assert all(value is None or value < 1.0 for value in found.cells[0])


def test_waits_do_not_make_a_rank_slow() -> None:
    rows = [
        Took(at=float(s), node="n", rank=r, step=s, generation=1, seconds={"u": 2.0}, waited={"u": 1.0 if r else 0.0})
        for s in range(4) for r in range(3)
    ]  # fmt: skip
    found = heat(rows)
    assert found is not None
    assert found.cells[0] == (2.0, 2.0, 2.0, 2.0)
    assert found.cells[1] == pytest.approx((2 / 3,) * 4)


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.append(tag)
        for name, value in attrs:
            if name == "id":
                self.ids.append(str(value))
            if name in {"href", "src"}:
                self.links.append(str(value))


def test_an_incident_that_several_nodes_saw_is_told_once(run: Path) -> None:
    folder = run / "state" / "toy"
    (first,) = incident.found([folder / "n0" / "incidents"])[0]
    late = replace(
        first, node="n2", id="20261121203407-g2", seconds=9.0, evidence=(), verdict=replace(first.verdict, because=())
    )
    incident.save(folder / "n2" / "incidents", late)
    (told,) = story_of(run).incidents
    assert (told.node, told.seconds, told.verdict.because) == ("n0, n2", 9.0, first.verdict.because)


def test_the_page_is_complete_in_itself_and_escapes_what_it_shows(run: Path) -> None:
    made = page(story_of(run))
    tags = Tags()
    tags.feed(made)
    assert "script" not in tags.names
    assert all(link.startswith("#") for link in tags.links)
    assert set(re.findall(r"https?://[^\"' )<]+", made)) <= {"http://www.w3.org/2000/svg"}
    assert len(tags.ids) == len(set(tags.ids)), "drawings must not share ids"
    assert {link[1:] for link in tags.links} <= set(tags.ids)
    assert tags.names.count("svg") == 12, "six drawings, each for a wide page and for a phone"
    assert "prefers-color-scheme: dark" in made
    assert "&lt;script&gt;" in made
    assert len(made) < 600_000


def test_every_colour_of_a_drawing_is_one_of_both_themes(run: Path) -> None:
    made = page(story_of(run))
    assert set(COLOURS) <= set(LIGHT)
    assert set(LIGHT) == set(DARK)
    drawn = "".join(re.findall(r"<svg.*?</svg>", made, flags=re.DOTALL))
    assert not [value for value in re.findall(r"(?:fill|stroke): (#[0-9a-f]{6})", drawn) if value != "#ffffff"]
    assert not set(COLOURS.values()) & set(re.findall(r"#[0-9a-f]{6}", drawn)), "a stand-in was left"


def test_a_history_with_the_time_of_day_is_drawn_over_time_too(run: Path) -> None:
    history = [{"at": 1.0 + s, "wall": story_of(run).begin + 2.0 + s, "step": s, "reward": s / 10} for s in range(10)]
    (run / "history.jsonl").write_text("".join(json.dumps(row) + "\n" for row in history))
    story = story_of(run)
    found = timed(story)
    assert len(found) == 10
    assert found[0] == (pytest.approx(2.0, abs=0.01), 0.0)
    assert "When it learned it" in page(story)
    elsewhere = replace(story, curve=tuple(replace(note, at=1.0) for note in story.curve))
    assert timed(elsewhere) == [], "the history of another day is no part of this picture"


SAMPLES = [
    {"prompt": NASTY, "answer": "x" * 999, "score": 0.75, "parts": {"right": 1.0, "brief": -0.25}},
    {"prompt": "3141", "answer": "14\x1b[31m\n13", "score": 0.0, "parts": {"right": 0.0, "brief": 0.0}},
]


def evaluations_of(run: Path) -> None:
    """In the trainer's history, which now begins with one; and the last of them again, in a worker's log."""
    history = [
        {"step": 0, "evaluated": {"score": 0.25, "pass@1": 0.5}, "samples": SAMPLES[:1]},
        *({"step": s, "reward": s / 10, "reward/right": s / 20, "reward/right_std": 9.0} for s in range(10)),
        {"step": 10, "evaluated": {"score": 0.5, "pass@1": 0.625}, "samples": SAMPLES},
        {"step": 11, "evaluated": "nonsense"},
    ]
    (run / "history.jsonl").write_text("".join(json.dumps(row) + "\n" for row in history))
    event = {
        "ts": "2026-11-21T20:34:11Z",
        "event": "ppo.evaluate",
        "step": 10,
        "metrics": {"score": 0.5},
        "samples": SAMPLES,
    }
    (run / "log" / "n0" / "rank_0.log").write_text(f"[Evaluate 10] score 0.500\n{json.dumps(event)}\n")


def test_evaluations_and_their_answers_are_tables_in_which_nothing_is_more_than_text(run: Path) -> None:
    evaluations_of(run)
    story = story_of(run)
    assert [(each.step, dict(each.figures)) for each in story.left.evaluated] == [
        (0, {"score": 0.25, "pass@1": 0.5}), (10, {"score": 0.5}),
    ]  # fmt: skip
    assert "2 evaluations" in story.left.files
    assert {name for note in story.curve for name in note.facts} == {"reward", "reward/right"}
    made, said = page(story), text(story)
    assert "<h2>Held-out prompts</h2>" in made
    assert "<td>n1/1: &lt;script&gt;alert(1)&lt;/script&gt; &amp; died; 2 nodes train</td>" in made
    assert "<script" not in made
    assert f"<td>{'x' * 400}</td><td>0.75</td><td>1</td><td>-0.25</td>" in made
    assert "x" * 401 not in made
    assert "HELD-OUT PROMPTS\nafter step  score  pass@1\n0           0.25   0.5\n10          0.5" in said
    assert "SOME ANSWERS to them, after step 10" in said
    assert "\x1b" not in said
    assert "reward/right 0.000 at step 0, 0.450 at step 9" in said


@pytest.mark.long
def test_an_incident_stands_on_the_timeline_in_the_row_of_whom_it_names(run: Path) -> None:
    story = story_of(run)
    assert story.incidents
    wide = page(story).partition('aria-label="what each node did when"')[2].split("</svg>")[0]
    told = [said for said in re.findall(r"<title>([^<]*)", wide) if said.startswith("incident: ")]
    named = sum(max(1, sum(node in story.nodes for node in each.verdict.nodes)) for each in story.incidents)
    assert len(told) == named
    unknown = replace(story.incidents[0], verdict=replace(story.incidents[0].verdict, nodes=("elsewhere",)))
    assert page(replace(story, incidents=(unknown,))).count("<title>incident: ") == 2, "for wide pages and for phones"


@pytest.mark.long
def test_of_thousands_of_spans_all_are_drawn_and_the_longest_say_what_they_are(run: Path) -> None:
    story = story_of(run)
    short = [
        Span(node="n0", start=story.begin + i / 500, end=story.begin + (i + 0.5) / 500, state="waiting")
        for i in range(2000)
    ]
    plans = [replace(story.generations[0], number=i, at=story.begin + i / 20) for i in range(200)]
    made = page(replace(story, spans=(*story.spans, *short), generations=tuple(plans)))
    wide = made[made.index('aria-label="what each node did when"') :].split("</svg>")[0]
    spans = [said for said in re.findall(r"<title>([^<]*)", wide) if not said.startswith(("generation", "incident"))]
    assert len(spans) == TOLD
    assert sum(said.startswith("n2 training") for said in spans) == 2
    assert 10 < wide.count("7.5px") <= 29, "numbers of generations have room"
    drawn = wide.count("var(--waiting)")
    assert drawn >= len(short), "what has no tooltip is drawn all the same"


def test_a_file_is_read_as_a_stream_and_a_torn_end_is_passed_over(run: Path) -> None:
    path = run / "log" / "n0" / "steps.jsonl"
    with path.open("a") as file:
        file.write("\n" + '{"at": 1795293290.0, "node": "n0", "rank": 0, "st')
    left = read(run)
    assert sum(line.node == "n0" for line in left.took) == 10
    assert left.took[0].seconds.keys() == {"rollout", "update"}


def long_run(folder: Path, *, nodes: int, steps: int) -> None:
    """Nodes that train together from 2 s on, a step each half second, and say much that no page tells."""
    for n in range(nodes):
        node = f"n{n:02d}"
        at = [log(2.0 + s / 100, "store.slow", node, said="x" * 60, after_s=s / 7) for s in range(5 * steps)]
        head = [
            log(0.0, "daemon.started", node, adopted=False),
            log(1.0, "plan.adopted", node, generation=1, rung="start", world=nodes, members=nodes, reason="first plan"),
            log(2.0, "workers.changed", node, work="training", generation=1, step=0),
        ]
        (folder / node).mkdir(parents=True)
        (folder / f"{node}.daemon.log").write_text("".join(json.dumps(row) + "\n" for row in [*head, *at]))
        rows = [
            {"at": 1795293242.0 + s / 2, "node": node, "rank": n, "step": s, "generation": 1, "bytes": 10,
             "seconds": {"rollout": 0.1, "values": 0.1, "update": 0.3}, "waited": {"update": 0.01}}
            for s in range(1, steps + 1)
        ]  # fmt: skip
        (folder / node / "steps.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.long
def test_memory_does_not_grow_with_nodes_and_days(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long_run(tmp_path, nodes=20, steps=201)
    monkeypatch.setattr("elasticrl.report.gather.LINES", 500)
    tracemalloc.start()
    try:
        story = story_of(tmp_path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 4 * 2**20, "kept as values, 20,160 events and 4,020 lines are tens of MiB"
    # What every line goes into is as it was: of 201 steps the last is kept though it is no 16th.
    assert (story.steps, len(story.nodes), story.left.pace.lines, story.left.log.events) == (201, 20, 4020, 20 * 1008)
    assert len(story.sealed) > 200
    assert story.goodput == pytest.approx(201 * 0.5 / (story.until - story.begin - 2.0), rel=1e-3)
    assert len(story.left.took) <= 520


@pytest.mark.long
def test_what_was_too_much_to_be_kept_is_said(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = page(story_of(run))
    assert "Left out" not in whole
    monkeypatch.setattr("elasticrl.report.gather.LINES", 7)
    monkeypatch.setattr("elasticrl.report.gather.CASES", 1)
    (first,) = incident.found([run / "state" / "toy" / "n0" / "incidents"])[0]
    newer = replace(first, id="20261121203907-g3", generation=3, began="2026-11-21T20:39:07.000Z")
    incident.save(run / "state" / "toy" / "n0" / "incidents", newer)
    story = story_of(run)
    said = (
        "Of 23 lines of steps&#x27; times those of each step that 4 divides are kept",
        "Of the trainer&#x27;s notes those of each step that 2 divides are kept.",
        "Of 2 incidents the newest 1 are told.",
    )
    made, told = page(story), text(story)
    for sentence in said:
        assert sentence in made
        assert f"Left out: {sentence.replace('&#x27;', chr(39))}" in told
    assert [each.generation for each in story.incidents] == [3]
    assert (story.steps, story.curve[-1].step) == (10, 9), "the newest step is told whichever it is"


@pytest.mark.long
def test_lines_and_bars_of_a_drawing_are_bounded_and_the_page_says_so(run: Path) -> None:
    story = story_of(run)
    plans = [
        replace(story.generations[0], number=i, at=story.begin + i / 400, rung="reform" if i % 100 == 50 else "start")
        for i in range(4000)
    ]
    spans = [
        Span(node="n0", start=story.begin + i / 2000, end=story.begin + (i + 0.5) / 2000, state="waiting")
        for i in range(DRAWN + 500)
    ]
    made = page(replace(story, generations=tuple(plans), spans=tuple(spans)))
    assert f"Of 4,000 generations at most {TOLD} are drawn as lines" in made
    assert f"Of {DRAWN + 500:,} bars the longest {DRAWN:,} are drawn." in made
    assert f"Generations: the newest {LISTED:,} of 4,000" in made
    wide = made[made.index('aria-label="what each node did when"') :].split("</svg>")[0]
    assert wide.count("<title>generation ") == TOLD
    assert sum(f"<title>generation {i}: " in wide for i in range(50, 4000, 100)) == 40, "no fault goes for a change"
    assert "are drawn" not in page(story)


def test_the_words_say_the_same(run: Path) -> None:
    told = text(story_of(run))
    for said in (
        "10 steps on 3 nodes, one fault",
        "reform",
        "0.7 s",
        "between faults",
        "a rank died",
        "SLOW RANKS",
        "by their own work",
        NASTY,
    ):
        assert said in told


@pytest.mark.long
def test_what_was_not_kept_is_said(run: Path) -> None:
    for path in run.rglob("steps.jsonl"):
        path.unlink()
    shutil.rmtree(run / "state")
    (run / "history.jsonl").unlink()
    attempt = run / "log" / "n0" / "attempt_2"
    attempt.mkdir()
    (attempt / "rank_0.log").write_text(
        "noise\n[Step 3] rollout: 185ms | update: 190ms | reward 0.710 kl 0.021\n"
        "[Step 4] rollout: 180ms | reward 0.72 kl 0.02\n"
    )
    story = story_of(run)
    assert story.phases[0] == (3, {"rollout": 0.185, "update": 0.19})
    assert story.phases_of == "as rank 0 printed them"
    assert story.curve[-1].facts == {"reward": 0.72, "kl": 0.02}
    assert story.heat is None
    assert any("steps.jsonl" in reason for reason in story.missing)
    assert any("No incident" in reason for reason in story.missing)
    assert "svg" in page(story)


def test_the_trainers_own_events_are_read_where_they_are(run: Path) -> None:
    attempt = run / "log" / "n0" / "attempt_1"
    attempt.mkdir()
    lines = [
        {"ts": f"2026-11-21T20:34:0{3 + s}+00:00", "event": "ppo.step", "step": s, "generation": 1, "seconds": {"update": 0.5},
         "metrics": {"reward": 0.5, "kl": 0.1, "policy_loss": -0.25}, "usual": {}}
        for s in range(3)
    ]  # fmt: skip
    torn = '{"event": "ppo.step", "step": 3}'
    (attempt / "rank_0.log").write_text("".join(f"[Step 0] said\n{json.dumps(line)}\n" for line in lines) + torn)
    story = story_of(run)
    assert [note.facts for note in story.curve] == [{"reward": 0.5, "kl": 0.1, "loss": -0.25}] * 3
    assert [round(x) for x, _ in timed(story)] == [3, 4, 5], "they say when, so the curve is drawn over time as well"


def test_how_a_rank_came_to_the_others_is_no_step_of_theirs(run: Path) -> None:
    before = story_of(run)
    came = {
        "at": 1795293250.0,
        "node": "n1",
        "rank": 1,
        "step": 8,
        "steps": 8,
        "generation": 3,
        "seconds": {"warm": 2.8},
    }
    with (run / "log" / "n1" / "steps.jsonl").open("a") as file:
        file.write(json.dumps(came) + "\n")
    assert dict(story_of(run).phases)[8] == dict(before.phases)[8]


def test_nothing_at_all_makes_no_report(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    said = CliRunner().invoke(build(["report"]), ["report", str(tmp_path)])
    assert said.exit_code == 2
    assert "nothing below" in said.stderr
    assert tell(Left(where="x")).steps == 0
    assert page(tell(Left(where="x", job="x")))


@pytest.mark.long
def test_the_verb_writes_a_file_or_prints(run: Path, tmp_path: Path) -> None:
    runner, app = CliRunner(), build(["report"])
    out = tmp_path / "r.html"
    assert runner.invoke(app, ["report", str(run), "-o", str(out)]).exit_code == 0
    assert out.read_text().startswith("<!doctype html>")
    said = runner.invoke(app, ["report", str(run), "--text"])
    assert said.exit_code == 0
    assert "GENERATIONS" in said.stdout


def test_a_run_of_several_days_says_which(run: Path) -> None:
    story = story_of(run)
    assert within(story, story.end) == clock(story.end)[11:]
    longer = replace(story, end=story.begin + 3 * 86400)
    assert within(longer, longer.end) == clock(longer.end)[5:]
    said = {name: meaning for name, _, meaning in facts(longer)}
    assert said["time"] == f"{clock(longer.begin)} to {clock(longer.end)[5:]} UTC"


def test_a_terminal_that_cannot_say_all_letters_ends_no_command(run: Path) -> None:
    command = [sys.executable, "-m", "elasticrl.cli.main", "report", str(run), "--text"]
    env = {**os.environ, "PYTHONIOENCODING": "iso8859-1"}
    done = subprocess.run(command, capture_output=True, env=env)
    assert done.returncode == 0, done.stderr
    assert b"GENERATIONS" in done.stdout


@pytest.mark.parametrize(
    ("seconds", "words"), [(0, "0"), (0.0994, "99 ms"), (59.94, "59.9 s"), (3599, "59 min 59 s"), (86400, "1 d")]
)
def test_durations(seconds: float, words: str) -> None:
    assert human(seconds) == words


def beat_of(**said: Any) -> Snapshot:
    return Snapshot(**{"state": Stage.TRAINING, **said})


def test_beats_become_a_step_with_the_time_of_each_phase() -> None:
    marks: Marks | None = None
    line: Line | None = None
    looks = [
        (10.0, beat_of(pid=1, generation=1, step=4, phase="rollout", since=9.9)),
        (10.1, beat_of(pid=1, generation=1, step=4, phase="rollout", since=9.9)),
        (10.2, beat_of(pid=1, generation=1, step=4, phase="update", since=10.15, waiting=True, bytes=70)),
        (10.3, beat_of(pid=1, generation=1, step=4, phase="update", since=10.15, bytes=70)),
        (10.4, beat_of(pid=1, generation=1, step=5, phase="rollout", since=10.36, bytes=100)),
    ]
    for now, beat in looks:
        assert line is None
        marks, line = after(marks, now, beat, rank=2)
    assert line is not None
    assert (line.step, line.rank, line.steps, line.bytes) == (5, 2, 1, 100)
    assert line.seconds == pytest.approx({"rollout": 0.25, "update": 0.21})
    assert line.waited == pytest.approx({"update": 0.1})


def test_a_step_that_was_cut_short_goes_on_in_the_next_generation_and_a_new_process_begins_anew() -> None:
    marks, line = after(None, 1.0, beat_of(pid=1, generation=1, step=4, phase="update", since=0.5), rank=0)
    marks, line = after(marks, 1.5, beat_of(pid=1, generation=2, step=4, phase="reform", since=1.2), rank=0)
    marks, line = after(marks, 2.0, beat_of(pid=1, generation=2, step=5, phase="rollout", since=1.9), rank=0)
    assert line is not None
    assert line.seconds == pytest.approx({"update": 0.7, "reform": 0.7})
    marks, line = after(marks, 3.0, beat_of(pid=2, generation=3, step=9, phase="update", since=2.5), rank=0)
    assert line is None
    assert marks.seconds == {}


def test_of_several_runs_and_jobs_the_newest_is_told_and_the_others_are_named(tmp_path: Path) -> None:
    """As in a machine's journal, which has all that ever ran there."""
    rows = [
        *(log(float(n), "plan.adopted", "n0", job="old", run="0a", generation=n, reason="old") for n in range(1, 10)),
        log(20.0, "plan.adopted", "n0", run="5d0c9e1f", generation=1, reason="begun before"),
        log(29.0, "daemon.started", "n0"),
        log(30.0, "plan.adopted", "n0", run="aa00bb11", generation=1, reason="first plan"),
        log(31.0, "workers.changed", "n0", run="aa00bb11", work="training", generation=1, step=0),
    ]
    (tmp_path / "n0.log").write_text("".join(json.dumps(row) + "\n" for row in rows))
    left = read(tmp_path)
    story = tell(left)
    assert left.job == "toy"
    assert [(each.number, each.reason) for each in story.generations] == [(1, "first plan")]
    assert story.end - story.begin == 1.0
    assert left.unread == ("job old, run 0a: another one (9 events)", "job toy, run 5d0c9e1f: another one (1 events)")


def test_logs_that_were_rotated_are_read_and_what_is_not_read_is_said(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (run / "history.jsonl").unlink()
    log_of = run / "log" / "n0" / "attempt_1" / "rank_0.log.1"
    log_of.parent.mkdir()
    log_of.write_text("[Step 3] reward 0.25\n")
    (run / "goes.log").symlink_to(run / "not there")
    assert [note.facts for note in read(run).notes] == [{"reward": 0.25}]
    monkeypatch.setattr("elasticrl.report.read.BIGGEST", 10)
    assert any("rank_0.log.1: over 0 MiB" in said for said in read(run).unread)


def test_where_times_of_old_steps_are_gone_figures_are_of_those_that_are_left(run: Path) -> None:
    for path in (run / "log").rglob("steps.jsonl"):
        path.write_text("".join(line + "\n" for line in path.read_text().splitlines() if json.loads(line)["step"] >= 6))
    story = story_of(run)
    assert story.counted is not None
    assert story.goodput == pytest.approx(5 * 0.8 / (story.until - story.counted))  # the median of two ranks
    assert max(age.end - age.start for age in story.sealed) < 2.0
    assert "as far as steps' times go back" in text(story)


def test_what_an_operator_asks_for_is_no_fault(tmp_path: Path) -> None:
    plans = [
        (1, "train", "start", ["begun"]),
        (2, "hold", "start", ["paused"]),
        (3, "train", "reform", ["resumed"]),
        (4, "train", "reform", ["left"]),
        (5, "hold", "reform", ["silent", "too_few"]),
        (6, "train", "reform", ["went_on"]),
    ]
    lines = [
        log(float(n), "plan.adopted", "n0", generation=n, phase=phase, rung=rung, causes=why, world=2, members=2)
        for n, phase, rung, why in plans
    ]
    (tmp_path / "n0.jsonl").write_text("\n".join(map(json.dumps, lines)))
    story = tell(read(tmp_path))
    assert [each.number for each in story.faults] == [5], "that it goes on when the node is back is the same fault's"
    assert [each.number for each in story.generations if each.fault] == [5, 6]


def test_a_history_of_another_run_beside_is_not_this_ones(run: Path) -> None:
    # Found by a newcomer: `report run` told the demonstration's rewards for a job that has none.
    before = [{"step": n, "reward": 0.5, "generation": 1, "wall": 1000.0 + n} for n in range(3)]
    ours = [{"step": n, "reward": 0.9, "generation": 1, "wall": 1795293242.0 + n} for n in range(3)]
    for name in ("history.jsonl", "demo.jsonl"):
        (run / name).unlink(missing_ok=True)
    (run / "old.jsonl").write_text("\n".join(map(json.dumps, before)))
    left = read(run)
    assert "old.jsonl: another run's history" in left.unread
    assert all(note.facts.get("reward") != 0.5 for note in left.notes)
    (run / "new.jsonl").write_text("\n".join(map(json.dumps, ours)))
    assert {note.facts["reward"] for note in read(run).notes} == {0.9}


def test_without_a_daemons_log_nobody_knows_of_faults(run: Path) -> None:
    for path in run.rglob("*"):
        if path.suffix in {".jsonl", ".log"} and "daemon.started" in path.read_text(encoding="utf-8", errors="replace"):
            path.unlink()
    said = text(tell(read(run)))
    assert "faults not known (no daemon's log is here)" in said
    assert "no fault" not in said


def used(folder: Path, steps: int) -> None:
    """The ledger of a job that has made so many steps of eight samples each."""
    cursor = Cursor(Walk(size=50, lanes=1, per_lane=8))
    ledger = Ledger(folder, writer="n0-w0")
    ledger.begin(generation=1, lineage=(Cut(1, Version(-1)),), segments=cursor.segments, lanes=[0])
    for step in range(steps):
        ledger.record(Version(step), 0, cursor.ids(step, 0, 0))
    ledger.close()


@pytest.fixture
def two(run: Path, tmp_path: Path) -> Path:
    """What `elasticrl run` leaves of job toy, beside a demonstration that makes rollouts and has faults."""
    folder = tmp_path / "two"
    shutil.copytree(run, folder / "demo")
    for path in [*(folder / "demo").rglob("*.daemon.log"), *(folder / "demo").rglob("incidents/*.json")]:
        path.write_text(path.read_text().replace('"job": "toy"', '"job": "demo-7"'))
    (folder / "demo" / "state" / "toy").rename(folder / "demo" / "state" / "demo-7")
    used(folder / "demo" / "checkpoints" / "demo-7", 9)
    digests = Chronicle(folder / "demo" / "checkpoints" / "demo-7", "n0-w0")
    digests.add(step=0, generation=1, digest="00")
    digests.close()
    logs = folder / "log" / "toy"
    (logs / "n0" / "attempt_1").mkdir(parents=True)
    rows = [row for row in lines_of("n0") if row.get("generation") in {None, 1}]
    (logs / "n0.daemon.log").write_text("".join(json.dumps(row) + "\n" for row in rows))
    took = {"at": 1795293244.0, "node": "n0", "rank": 0, "step": 1, "generation": 1, "seconds": {"update": 0.5}}
    (logs / "n0" / "steps.jsonl").write_text(json.dumps(took) + "\n")
    (logs / "n0" / "attempt_1" / "rank_0.log").write_text("step 1 loss 0.5\n")
    used(folder / "checkpoints" / "toy", 4)
    return folder


def test_of_two_jobs_below_one_folder_none_is_told_until_one_is_chosen(two: Path) -> None:
    # Found by a user: the phases, samples and digests of the demonstration stood in the page of another job.
    said = CliRunner().invoke(build(["report"]), ["report", str(two), "--text"])
    assert said.exit_code == 2
    assert f"several jobs' runs lie below {two}: demo-7, toy; name one: --job NAME" in said.stderr
    with pytest.raises(Unchosen, match=r"no run of job other lies below .*two: there are demo-7, toy"):
        read(two, job="other")
    chosen = CliRunner().invoke(build(["report"]), ["report", str(two), "--text", "--job", "toy"])
    assert chosen.exit_code == 0, chosen.output
    assert chosen.stdout.startswith("toy: ")


def test_the_page_of_one_job_has_nothing_of_another_that_lies_beside(two: Path) -> None:
    story = tell(read(two, job="toy"))
    left = story.left
    assert (left.job, story.nodes, story.faults, left.incidents) == ("toy", ("n0",), (), ())
    assert {name for _, spent in story.phases for name in spent} == {"update"}
    assert (left.pace.lines, left.notes, left.said, left.digests) == (1, (), (), None)
    assert left.samples is not None
    assert left.samples.steps == 4
    assert any(said.startswith("job demo-7: 5 of its files and folders") for said in left.unread)


def test_samples_of_a_run_that_goes_on_are_told_with_the_step_through_which_they_were_judged(two: Path) -> None:
    left = read(two, job="toy")
    assert left.samples is not None
    (meaning,) = (words for name, _, words in facts(tell(left)) if name == "samples")
    assert meaning == "each exactly once"
    goes_on = replace(left, samples=replace(left.samples, beyond=3))
    (meaning,) = (words for name, _, words in facts(tell(goes_on)) if name == "samples")
    assert meaning == "each exactly once, through step 3: the run goes on"


def test_a_job_is_told_alike_from_its_own_folder_and_from_one_above(two: Path) -> None:
    above, own = read(two, job="demo-7"), read(two / "demo")
    assert own.samples is not None
    assert (own.samples.steps, len(own.incidents), own.pace.lines, len(own.notes)) == (9, 1, 23, 10)
    assert own.digests is not None
    assert replace(above, where="", unread=()) == replace(own, where="", unread=())


def test_jobs_of_one_journal_are_told_by_name_too(tmp_path: Path) -> None:
    rows = [
        log(10.0, "plan.adopted", "n0", job="old", run="0a", generation=1, reason="old plan"),
        log(30.0, "plan.adopted", "n0", run="aa00bb11", generation=1, reason="first plan"),
    ]
    (tmp_path / "n0.log").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "n1.log").write_text(json.dumps(rows[0] | {"node": "n1"}) + "\n")  # was in the old one only
    assert read(tmp_path).job == "toy"
    story = tell(read(tmp_path, job="old"))
    assert (story.left.job, story.nodes) == ("old", ("n0", "n1"))
    assert [each.reason for each in story.generations] == ["old plan"]


def test_nodes_folders_side_by_side_with_checkpoints_copied_beside_are_one_run(run: Path) -> None:
    """As docs/OPERATIONS.md says: each node's journal, log folder and incidents, and the job's folder without its data."""
    used(run / "saves", 10)
    left = read(run)
    assert left.samples is not None
    assert (left.job, left.samples.steps, left.pace.lines, len(left.incidents)) == ("toy", 10, 23, 1)


def held(second_of_the_end: float) -> list[dict[str, object]]:
    """Of two nodes n1 leaves at 12 s, as it is asked to; n0 holds from 20 to 43 s, while its workers wait for the others."""
    plans = [
        (1.0, 1, "train", "start", 2, ["begun"]),
        (12.0, 2, "train", "reform", 1, ["left"]),
        (20.0, 3, "hold", "reform", 1, ["expired", "too_few"]),
        (43.0, 4, "train", "reform", 1, ["went_on"]),
    ]
    rows = [
        *(
            log(at, "plan.adopted", "n0", generation=n, phase=phase, rung=rung, causes=why, world=size, members=size)
            for at, n, phase, rung, size, why in plans
        ),
        *(log(2.0, "workers.changed", node, work="training", generation=1, step=0) for node in ("n0", "n1")),
        log(12.0, "workers.changed", "n1", work="none", generation=2, step=10),
        *(
            log(at, "recovery.done", "n0", generation=n, rung="reform", total_s=took, stages={"reform": took})
            for at, n, took in ((12.2, 2, 0.212), (43.5, 4, 0.5))
        ),
        log(second_of_the_end, "checkpoint.committed", "n0", step=20, generation=4, manifest="m"),
    ]
    return [row for row in rows if float(str(row["at"])[17:26]) <= second_of_the_end]


def told_of(folder: Path, rows: list[dict[str, object]]) -> dict[str, tuple[str, str]]:
    (folder / "n0.log").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {name: (value, meaning) for name, value, meaning in facts(tell(read(folder)))}


def test_time_in_which_the_job_held_is_not_trained(tmp_path: Path) -> None:
    # Found by a user: "trained 95.7 %" of a job that had held for 23 of 71 s.
    between = told_of(tmp_path, held(52.0))
    assert between["trained"][0] == "54.0%", "27 of 50 s"
    assert between["held"] == ("23 s", "of that time: paused, or fewer nodes than it needs, so that no step is made")
    at_last = told_of(tmp_path, held(42.0))
    assert at_last["trained"][0] == "45.0%", "18 of 40 s: it holds still"
    assert at_last["held"][0] == "22 s"
    assert "held" not in told_of(tmp_path, held(19.0))


def test_a_drain_is_no_recovery(tmp_path: Path) -> None:
    told_of(tmp_path, held(52.0))
    story = tell(read(tmp_path))
    assert [(each.generation, each.total_s) for each in story.recoveries] == [(4, 0.5)]
    assert "0.212 s" not in text(story)


def test_each_figure_says_what_it_is(run: Path) -> None:
    said = {name: meaning for name, _, meaning in facts(story_of(run))}
    assert said["goodput"] == (
        "of the time from its first training to its end: the sealed steps, each counted with the time of a usual step"
    )
    assert said["trained"] == (
        "of the same time: every node of the plan was training; the rest is starting, recovering and holding"
    )
    assert said["faults"] == "each answered by a new generation"


def test_incidents_are_counted_as_they_are_listed_and_by_who_tells_them(run: Path) -> None:
    folder = run / "state" / "toy"
    (first,) = incident.found([folder / "n0" / "incidents"])[0]
    incident.save(folder / "n2" / "incidents", replace(first, node="n2"))
    assert "1 incident in 2 nodes' words" in read(run).files
