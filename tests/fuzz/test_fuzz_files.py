"""Files that somebody left: configurations, logs, ledgers, chronicles, checkpoints, incidents, traces, reports."""

import json
import tempfile
import zlib
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from fuzz_kit import HOSTILE, altered, changed, fuzzed, text_of, values, words
from hypothesis import given
from hypothesis import strategies as st

from elasticrl.base.redact import veiled
from elasticrl.certificate.check import check as check_certificate
from elasticrl.cli import render
from elasticrl.cli.lines import event_of, shown
from elasticrl.config import read as read_config
from elasticrl.contract.evidence import Evidence, Kind, Sign
from elasticrl.contract.verdict import Confidence, Fault, Known, Verdict
from elasticrl.core.judge.judge import judge
from elasticrl.diagnose import incident, logs, report
from elasticrl.diagnose.progress import HALF, SAID, Reader
from elasticrl.report.owners import Unchosen
from elasticrl.report.read import read as read_run
from elasticrl.report.story import tell
from elasticrl.report.text import text as report_text
from elasticrl.runtime import chronicle
from elasticrl.runtime.checkpoint import shelf
from elasticrl.runtime.checkpoint.manifest import Conditions as Written
from elasticrl.runtime.checkpoint.manifest import FileEntry, Manifest, seal
from elasticrl.runtime.checkpoint.place import place
from elasticrl.runtime.data.audit import audit
from elasticrl.runtime.vault.errors import CheckpointError, StateError
from elasticrl.runtime.vault.version import Version
from elasticrl.shell.keys import Unreadable
from elasticrl.shell.trace import replay

ROOT = Path(__file__).parents[2]
SAMPLES = sorted((path.read_bytes() for path in (ROOT / "configs").glob("*.yaml")), key=len)[:2]
LOGS = [path.read_bytes()[:3000] for path in sorted((ROOT / "tests" / "unit").rglob("*.log"))[:60]] or [
    b"RuntimeError: x\n"
]


def tidy(text: str) -> bool:
    return text.replace("\n", "").isprintable() or all(c.isprintable() or c in "\n\u00a0\u202f\u3000" for c in text)


@fuzzed
@given(changed(st.sampled_from(SAMPLES)))
def test_a_configuration_is_taken_or_refused_with_findings(data: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "c.yaml"
        path.write_bytes(data)
        loaded = read_config(path)
        assert loaded.tree is not None or loaded.errors
        assert all(tidy(str(finding)) for finding in loaded.findings)


@fuzzed
@given(
    st.dictionaries(st.sampled_from(["job", "store", "lanes", "agent", "timeouts", "reward", "policy", "x"]), values),
    st.text(max_size=30),
)
def test_settings_of_any_shape_are_taken_or_refused_with_findings(tree: dict[str, Any], override: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "c.yaml"
        path.write_bytes(text_of(tree))
        loaded = read_config(path, [f"job.name={override}", f"agent.env.{override}=1"])
        assert loaded.tree is not None or loaded.errors


PROGRESS = [
    b"step 120/500 loss 2.3\n", b"\r 24%|##4       | 120/500 [00:12<00:38,  9.93it/s]", b"{'loss': 2.31, 'epoch': 0.24}\n",
    b"iteration      120/     500 | consumed samples\n", b"Epoch: [0][ 120/5005]\t\r\n", b"1,234it [00:12, 9.9it/s]\n",
]  # fmt: skip


@fuzzed
@given(st.lists(changed(st.sampled_from(PROGRESS)), max_size=30), st.lists(st.integers(0, 2000), max_size=8))
def test_how_far_a_log_says_that_a_script_is_does_not_depend_on_where_looks_cut_it(
    lines: list[bytes], cuts: list[int]
) -> None:
    log = b"".join(lines)[:4000] + b"\n"
    places = [0, *sorted(cuts), len(log)]
    reader = Reader()
    for begin, end in pairwise(places):
        reader = reader.after(log[begin:end])
        assert len(reader.tail) <= 2 * HALF
        assert len(reader.said) <= SAID
    assert reader.milestone is None or str(reader.milestone).isprintable()
    assert (reader.milestone is None) == (Reader().after(log).milestone is None)


@fuzzed
@given(st.lists(changed(st.sampled_from(LOGS)), min_size=1, max_size=4))
def test_logs_give_a_verdict(several: list[bytes]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for number, data in enumerate(several):
            (Path(folder) / f"rank_{number}.log{'.gz' if number == 3 else ''}").write_bytes(data)
        reading = logs.read([Path(folder)])
        verdict = judge(reading.evidence, Known(heard=reading.ranks))
        json.dumps(report.plain(verdict, reading.evidence, reading.ways))
        assert report.page(verdict, reading)


EVENT = {"at": "2026-11-28T04:00:00Z", "event": "plan.adopted", "level": "info", "node": "n00", "job": "j", "generation": 1,
         "step": 3, "reason": "x", "members": ["n00"]}  # fmt: skip
STEP = {
    "at": 1.0,
    "node": "n00",
    "rank": 0,
    "step": 3,
    "steps": 1,
    "generation": 1,
    "seconds": {"rollout": 0.1},
    "waited": 0.1,
    "bytes": 9,
}
NOTE = {"step": 3, "reward": 0.5, "loss": 0.1, "generation": 1, "at": "2026-11-28T04:00:00Z"}
INCIDENT = {
    **incident.Incident(
        id="2026-n00-1", job="j", node="n00", began="2026-11-28T04:00:00Z", ended="2026-11-28T04:00:01Z", generation=1,
        verdict=Verdict(fault=Fault.DEAD_RANK, ranks=(1,), nodes=("n00",), cause="x", confidence=Confidence.HIGH),
        evidence=(Evidence(kind=Kind.EXIT, sign=Sign.KILLED, rank=1, detail="signal 9"),),
        timeline=(incident.Moment(at="2026-11-28T04:00:00Z", node="n00", event="plan.adopted", text="y"),), actions=("z",),
        steps=0, seconds=1.0,
    ).plain()
}  # fmt: skip
INCIDENT = json.loads(json.dumps(INCIDENT))
RECOVERED = {
    **EVENT,
    "event": "recovery.done",
    "rung": "reform",
    "total_s": 0.6,
    "stages": {"decide": 0.1, "reform": 0.5},
}
CHANGED = {**EVENT, "event": "workers.changed", "work": "training"}
COMMITTED = {**EVENT, "event": "checkpoint.committed", "manifest": "m"}
SPOKEN = {"event": "ppo.step", "step": 3, "generation": 1, "seconds": {"update": 0.1}, "metrics": {"reward": 0.5, "loss": 0.1},
          "ts": "2026-11-28T04:00:00Z"}  # fmt: skip
EVALUATED = {"event": "ppo.evaluate", "step": 3, "metrics": {"score": 0.5},
             "samples": [{"prompt": "p", "answer": "a", "score": 0.5, "parts": {"x": 0.5}}]}  # fmt: skip


@fuzzed
@given(st.one_of(altered(EVENT), st.dictionaries(words, values)), st.booleans())
def test_an_event_is_shown_as_text(event: dict[str, Any], as_json: bool) -> None:
    line = text_of(event).decode()
    said = shown(line, "", as_json=as_json, colour=False)
    assert said is None or tidy(said)
    if found := event_of(line):
        assert tidy(render.event(found, colour=False))


@fuzzed
@given(changed(st.sampled_from([*LOGS, *SAMPLES, text_of(EVENT)])))
def test_no_text_breaks_the_veil(data: bytes) -> None:
    veiled(data.decode(errors="replace"))


@fuzzed
@given(changed(altered(INCIDENT).map(text_of)))
def test_an_incident_is_told_or_named_as_unreadable(data: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "a.json").write_bytes(data)
        found, unread = incident.found([Path(folder)])
        assert len(found) + len(unread) == 1
        for each in found:
            assert incident.page(each)
            json.dumps(each.plain())


@fuzzed
@given(
    st.lists(st.one_of(*map(altered, (EVENT, RECOVERED, CHANGED, COMMITTED))), max_size=6),
    st.lists(altered(STEP), max_size=6),
    st.lists(altered(NOTE), max_size=6),
    st.lists(st.one_of(altered(SPOKEN), altered(EVALUATED)), max_size=4),
    altered(INCIDENT),
)
def test_a_run_is_reported_whatever_it_left(
    events: list[dict[str, Any]],
    steps: list[dict[str, Any]],
    notes: list[dict[str, Any]],
    spoken: list[dict[str, Any]],
    told: dict[str, Any],
) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "incidents").mkdir()
        (folder / "incidents" / "a.json").write_bytes(text_of(told))
        for file, lines in (
            ("n00.log", [EVENT, *events]),
            ("steps.jsonl", [STEP, *steps]),
            ("history.jsonl", [NOTE, *notes]),
            ("attempt_1.log", [SPOKEN, *spoken]),
        ):
            (folder / file).write_bytes(b"\n".join(map(text_of, lines)))
        with suppress(Unchosen):
            assert report_text(tell(read_run(folder)))


def checked(body: Any) -> bytes:
    text = text_of(body)
    return b"%08x %s\n" % (zlib.crc32(text), text)


GENERATION = {"generation": 1, "lineage": [], "nodes": ["n00"], "segments": [[0, 8, [4, 1, 1, 100, 0, 7]]]}
RECORD = {"record": ["w", 1, 1, 0, 0, 0, 0, [[0, 1], [0, 2]]]}
CHRONICLE = [{"chronicle": 1, "kind": "bits", "bits": "{}"}, {"step": 1, "generation": 1, "digest": "ab"}]


@fuzzed
@given(
    st.lists(st.one_of(altered(GENERATION), altered(RECORD), st.dictionaries(words, values)).map(checked), max_size=8),
    st.sampled_from(HOSTILE),
)
def test_a_ledger_is_judged_or_refused_with_a_sentence(lines: list[bytes], hostile: bytes) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "ledger"
        folder.mkdir()
        (folder / "n00-w-1.jsonl").write_bytes(checked(GENERATION) + b"".join(lines) + hostile)
        with suppress(StateError):
            assert audit(Path(name)).sentence


@fuzzed
@given(
    st.lists(st.one_of(altered(CHRONICLE[0]), altered(CHRONICLE[1])).map(checked), max_size=8), st.sampled_from(HOSTILE)
)
def test_a_chronicle_is_read_or_refused_with_a_sentence(lines: list[bytes], hostile: bytes) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / chronicle.FOLDER
        folder.mkdir()
        (folder / "n00-w-1.jsonl").write_bytes(checked(CHRONICLE[0]) + b"".join(lines) + hostile)
        with suppress(StateError):
            history = chronicle.read(Path(name))
            assert chronicle.compare(history, history).sentence


CERTIFICATE = ROOT / "tests" / "data" / "run.cert.json"  # of tests/unit/certificate_kit.py, whose key nobody has
SIGNED = json.loads(CERTIFICATE.read_bytes())


@fuzzed
@given(
    st.one_of(
        altered(SIGNED).map(lambda value: json.dumps(value, sort_keys=True, separators=(",", ":")).encode() + b"\n"),
        changed(st.just(CERTIFICATE.read_bytes())),
        st.sampled_from(HOSTILE),
    )
)
def test_a_certificate_is_checked_and_said_to_be_none(text: bytes) -> None:
    found = check_certificate(text)
    assert found.sentence
    assert found.ok == (text == CERTIFICATE.read_bytes())


MANIFEST = Manifest(
    version=Version(10, 0), generation=1, world=1, parent=None, facts=Written(job="j"), contents={"model": 4},
    files=(FileEntry(name="shard-0.data", nbytes=4, sha256="ab", shard=0, node="n00"),),
)  # fmt: skip
BODY = json.loads(MANIFEST.encode())["body"]


@fuzzed
@given(
    st.one_of(altered(BODY).map(seal), changed(st.just(MANIFEST.encode())), st.sampled_from(HOSTILE)),
    changed(st.just(b"COMMITTED")),
)
def test_a_folder_of_checkpoints_is_listed_and_verified(manifest: bytes, committed: bytes) -> None:
    with tempfile.TemporaryDirectory() as name:
        for one, body in ((MANIFEST.name, manifest), (replace(MANIFEST, generation=2).name, MANIFEST.encode())):
            folder = Path(name) / one
            folder.mkdir()
            (folder / "manifest.json").write_bytes(body)
            (folder / "COMMITTED").write_bytes(committed)
            (folder / "shard-0.data").write_bytes(b"data")
        where = place(name)
        entries = shelf.listing(where)
        assert len(entries) == 2
        for entry in entries:
            assert all(problem.sentence for problem in shelf.verify(where, entry.name))
        with suppress(CheckpointError):
            shelf.newest_good(where)


@fuzzed
@given(
    st.lists(
        st.one_of(values, st.just({"v": 1, "state": {}}), altered({"event": {}, "actions": [], "state": {"v": 1}})),
        max_size=4,
    )
)
def test_a_trace_is_replayed_or_refused_with_a_sentence(lines: list[Any]) -> None:
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "t.jsonl"
        path.write_bytes(b"\n".join(map(text_of, lines)))
        with suppress(Unreadable):
            list(replay(path))
