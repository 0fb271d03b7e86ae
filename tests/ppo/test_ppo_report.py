"""What is told of a step: once, when it is sealed, by one worker; and where it goes."""

import io
import json
import sys
import threading
import time
from dataclasses import replace
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from chaos.patience import patience
from elasticrl.config.tree import Tree
from elasticrl.contract.evaluated import Evaluated, Sample
from elasticrl.ppo import report, sinks
from elasticrl.ppo.advice import WINDOW, Adviser, Seen
from elasticrl.ppo.guarantee import Guarantee
from elasticrl.ppo.report import Comm, Report, Reporter
from elasticrl.ppo.sinks import Event, Sinks
from elasticrl.runtime.scalars import Tally
from elasticrl.runtime.spikes import Spike
from elasticrl.runtime.strategy import Reduced
from elasticrl.runtime.traffic import Cost, Meter, sent

COSTS = {"all_to_all": Cost(times=8, bytes=3 << 20, seconds=0.012), "all_gather": Cost(times=4, bytes=0, seconds=0.003)}


class Kept:
    def __init__(self):
        self.events: list[Event] = []
        self.closed = False

    def write(self, event):
        self.events.append(event)

    def close(self):
        self.closed = True


def a_step(number, reward=0.7):
    return (
        Report(step=number, metrics={"reward": reward, "kl": 0.02}, seconds={"rollout": 0.185, "update": 0.2}),
        Comm(step=number, costs=COSTS, sync_s=0.061, timeouts=0),
        Seen(step=number, seconds={"rollout": 0.185, "update": 0.2}, padding=0.9),
        {"generation": 3, "world": 2, "made": 1.5},
    )


def told(kept, name="ppo.step"):
    return [event.step for event in kept.events if event.name == name]


def test_a_step_is_told_when_it_is_sealed_and_as_it_was_made_last():
    kept = Kept()
    reporter = Reporter(Sinks(lambda: [kept]), Adviser())
    reporter.tell(sealed=0, rank=0, kept=[[], []])
    reporter.keep(*a_step(0, reward=0.1))
    reporter.tell(sealed=0, rank=0, kept=[[0], [0]])
    assert kept.events == []
    reporter.keep(*a_step(0, reward=0.2))  # a fault: the step is made again
    reporter.tell(sealed=1, rank=0, kept=[[0], [0]])
    reporter.tell(sealed=1, rank=0, kept=[[], []])
    assert told(kept) == [0]
    assert kept.events[0].fields["metrics"]["reward"] == 0.2


def test_a_step_whose_teller_died_is_told_by_the_next_that_knows_of_it():
    kept = Kept()
    survivor = Reporter(Sinks(lambda: [kept]), Adviser())
    survivor.keep(*a_step(4))
    survivor.keep(*a_step(5))
    survivor.tell(sealed=5, rank=1, kept=[[], [4, 5]])  # rank 0 is a fresh process
    assert told(kept) == [4]
    survivor.tell(sealed=6, rank=1, kept=[[5], [5]])
    assert told(kept) == [4]
    survivor.keep(*a_step(6))
    survivor.close(sealed=7, rank=1)
    assert told(kept) == [4]
    assert kept.closed


def test_nothing_is_opened_by_a_worker_that_tells_nothing():
    opened = []
    reporter = Reporter(Sinks(lambda: opened.append(1) or [Kept()]), Adviser())
    reporter.keep(*a_step(0))
    reporter.tell(sealed=1, rank=1, kept=[[0], [0]])
    reporter.close(sealed=1, rank=1)
    assert opened == []


def test_lines_say_what_is_usual_once_that_is_known_and_advice_comes_with_its_step():
    kept = Kept()
    reporter = Reporter(Sinks(lambda: [kept]), Adviser())
    for number in range(WINDOW + 1):
        reporter.keep(*a_step(number))
        reporter.tell(sealed=number + 1, rank=0, kept=[[number]])
    lines = [event.line for event in kept.events if event.step in (0, WINDOW) and event.name != "ppo.advice"]
    assert lines == [
        "[Step 0] rollout: 185ms | update: 200ms | reward 0.700 kl 0.020",
        "[Comm 0] all_gather: 4 of 0.0MiB 3ms | all_to_all: 8 of 3.0MiB 12ms | waits 15ms | sync 61ms | timeouts 0",
        "[Step 10] rollout: 185ms | update: 200ms | reward 0.700 kl 0.020",
        (
            "[Comm 10] all_gather: 4 of 0.0MiB 3ms (usually 3ms) | all_to_all: 8 of 3.0MiB 12ms (usually 12ms) | "
            "waits 15ms (usually 15ms) | sync 61ms (usually 61ms) | timeouts 0"
        ),
    ]
    [advice] = [event for event in kept.events if event.name == "ppo.advice"]
    assert advice.step == WINDOW - 1
    assert advice.fields["numbers"]["share"] == 0.9


def test_a_spike_is_told_with_its_step_and_outlives_the_worker_that_saw_it():
    spike = Spike(name="actor_norm", value=81.2, usual=1.31, spread=0.2)
    done = Reduced(norm=81.2, tally=Tally(), skipped=True, spikes=(spike,))
    facts = {"reward": 0.5} | report.spiked(done, 1, {})
    facts |= report.spiked(Reduced(norm=1.3, tally=Tally()), 2, facts)
    again = Report.of(4, json.loads(json.dumps(facts)), {"update": 0.2})  # as the buffer's state has it
    assert again.metrics == {"reward": 0.5, "spikes": 1.0}
    kept = Kept()
    reporter = Reporter(Sinks(lambda: [kept]), Adviser())
    reporter.keep(again, *a_step(4)[1:])
    reporter.tell(sealed=5, rank=0, kept=[[4]])
    [event] = [event for event in kept.events if event.name == "ppo.spike"]
    assert event.line == "[Spike 4] update 1: actor_norm is 81.2, and 1.31 +- 0.2 before; the update was left out"
    assert (event.fields["update"], event.fields["skipped"]) == (1, True)
    stream = io.StringIO()
    sinks.Lines(stream, plain=True).write(event)
    assert json.loads(stream.getvalue().splitlines()[1])["level"] == "warning"


def conf(**telemetry):
    plain = {
        "job": {"name": "job", "steps": 200, "program": "elasticrl.ppo"},
        "data": {"path": "x"},
        "telemetry": {"format": "json", **telemetry},
        "reward": {"function": "a:b"},
        "membership": {"max_nodes": 2},
    }
    return Tree.model_validate(plain)


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_each_sink_takes_what_it_can_show(tmp_path, monkeypatch):
    monkeypatch.setenv(sinks.HISTORY, str(tmp_path / "history"))
    out = Terminal()
    wandb = {} if find_spec("wandb") else {"wandb": "project"}
    where = sinks.opened(conf(tensorboard=str(tmp_path / "curves"), **wandb), out)
    for number in range(2):
        made, comm, _, gang = a_step(number)
        where.write(report.step_event(made, {}, gang))
        where.write(report.comm_event(comm, {}))
    where.close()
    text = out.getvalue()
    assert ("telemetry.wandb is set, but wandb is not installed: nothing is sent" in text) == bool(wandb)
    assert "[Step 1] rollout: 185ms" in text
    assert "2 of 200 steps\r" in text
    plain = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    assert [(line["event"], line["step"]) for line in plain] == [
        ("ppo.step", 0),
        ("ppo.comm", 0),
        ("ppo.step", 1),
        ("ppo.comm", 1),
    ]
    history = [json.loads(line) for line in (tmp_path / "history").read_text().splitlines()]
    assert [(line["step"], line["generation"], line["reward"]) for line in history] == [(0, 3, 0.7), (1, 3, 0.7)]
    assert all(abs(line["wall"] - time.time()) < 60 for line in history), "the time of day, beside the monotonic one"
    curves = EventAccumulator(str(tmp_path / "curves")).Reload()
    rows = [(row.step, round(row.value, 3)) for row in curves.Scalars("step/reward")]
    assert rows == [(0, 0.7), (1, 0.7)]
    assert "comm/all_to_all_bytes" in curves.Tags()["scalars"]


def test_a_meter_counts_what_goes_to_others():
    import torch

    row = torch.zeros(12)
    assert sent("all_gather", (torch.zeros(36), row), 0, 3) == 2 * 48
    assert sent("all_to_all", (row, row, [], []), 0, 3) == 32
    assert sent("all_to_all", (row, row, [4, 4, 4], [8, 4, 0]), 0, 3) == 16
    assert sent("all_to_all", (row, row[:0], [4, 4, 4], [0, 0, 0]), 0, 3) == 0
    assert sent("all_reduce", ([row],), 0, 2) == 48
    meter = Meter()
    meter.begun("alltoall_base", (row, row, [], []), rank=0, world=2)
    meter.waited("alltoall_base", 0.5)
    meter.timeouts += 1
    assert meter.taken() == ({"all_to_all": Cost(times=1, bytes=24, seconds=0.5)}, 1)
    assert meter.taken() == ({}, 0)
    assert (meter.waited_s, meter.moved) == (0.5, 24), "in all, whoever took the rest"


@pytest.mark.skipif(find_spec("wandb") is None, reason="wants the package wandb (0.31), which elasticrl does not")
@pytest.mark.parametrize(
    ("env", "said"),
    [
        ({"WANDB_MODE": "offline"}, ""),
        ({}, "No API key configured"),
        ({"WANDB_API_KEY": "a" * 40, "WANDB_BASE_URL": "http://127.0.0.1:9"}, "connection refused"),
    ],
    ids=["offline", "no key", "not reached"],
)
def test_curves_go_to_weights_and_biases_or_it_is_said_why_not_and_training_goes_on(tmp_path, monkeypatch, env, said):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))  # its key may be in a file there
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    import_module("wandb").teardown()  # it remembers whom it knew before
    out, begun = io.StringIO(), time.monotonic()
    wandb = sinks.Wandb("project", "job", out)
    for number in range(3):
        wandb.write(Event(name="ppo.step", step=number, fields={}, line="", scalars={"reward": 0.5 + number}))
    wandb.write(Event(name="ppo.advice", step=2, fields={}, line="lower it", scalars={}))
    wandb.close()
    assert time.monotonic() - begun < patience(30)
    assert said in out.getvalue()
    assert ("Nothing more is sent" in out.getvalue()) == bool(said)
    if not said:
        [kept] = tmp_path.glob("wandb/offline-run-*/run-job.wandb")
        assert kept.read_bytes().count(b"reward") >= 3


SAMPLES = [
    {"prompt": "3141 | <b>", "answer": "1413\n*x*", "score": 0.75, "parts": {"right": 1.0, "brief": -0.25}},
    {"prompt": "2", "answer": "", "score": 0.0, "parts": {"right": 0.0, "brief": 0.0}},
]


def evaluated(step, score=0.5):
    samples = tuple(Sample(**sample) for sample in SAMPLES)
    return Evaluated(step=step, figures={"score": score, "pass@1": 0.25, "reward/right": 0.5}, samples=samples)


def test_an_evaluation_is_told_with_its_step_the_one_before_it_first(tmp_path):
    kept, out, path = Kept(), io.StringIO(), tmp_path / "history"
    written = [kept, sinks.History(path, out), sinks.TensorBoard(str(tmp_path / "curves"), out)]
    reporter = Reporter(Sinks(lambda: written), Adviser())
    made, *rest = a_step(0)
    reporter.keep(replace(made, evaluated=(evaluated(0), evaluated(1, score=0.6))), *rest)
    reporter.tell(sealed=0, rank=0, kept=[[0]])
    assert kept.events == [], "the step may be made again"
    reporter.close(sealed=1, rank=0)
    assert [(event.name, event.step) for event in kept.events] == [
        ("ppo.evaluate", 0), ("ppo.step", 0), ("ppo.comm", 0), ("ppo.evaluate", 1),
    ]  # fmt: skip
    last = kept.events[-1]
    assert last.line == "[Evaluate 1] score 0.600 pass@1 0.250"
    assert last.fields["samples"] == SAMPLES
    assert last.scalars == {"evaluate/score": 0.6, "evaluate/pass@1": 0.25, "evaluate/reward/right": 0.5}
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["step"] for line in lines if "reward" in line] == [0]
    assert [(line["step"], line["samples"]) for line in lines if "evaluated" in line] == [(0, SAMPLES), (1, SAMPLES)]
    curves = EventAccumulator(str(tmp_path / "curves")).Reload()
    assert [(row.step, round(row.value, 3)) for row in curves.Scalars("evaluate/score")] == [(0, 0.5), (1, 0.6)]
    [_, shown] = curves.Tensors("samples/text_summary")
    assert b"| prompt | answer | score | right | brief |" in shown.tensor_proto.string_val[0]
    assert b"| 3141 &#124; &lt;b&gt; | 1413<br>&#42;x&#42; | 0.75 | 1 | -0.25 |" in shown.tensor_proto.string_val[0]


class Tracking(ModuleType):
    """Stands for the package mlflow: what it is asked, and what it refuses."""

    class MlflowException(Exception):
        pass

    def __init__(self, refuses="", there=()):
        super().__init__("mlflow")
        self.__spec__ = ModuleSpec("mlflow", None)
        self.refuses, self.there, self.asked = refuses, there, []

    def __getattr__(self, name):
        if name not in {"set_experiment", "search_runs", "start_run", "log_metrics", "end_run"}:
            raise AttributeError(name)

        def ask(*args, **more):
            self.asked.append((name, *args, more))
            if name == self.refuses:
                raise self.MlflowException("it has no room")
            return list(self.there) if name == "search_runs" else None

        return ask


@pytest.mark.parametrize("refuses", ["", "set_experiment", "start_run", "log_metrics", "end_run"])
def test_curves_go_to_mlflow_or_it_is_said_once_why_not_and_training_goes_on(monkeypatch, refuses):
    tracking, out = Tracking(refuses), io.StringIO()
    monkeypatch.setitem(sys.modules, "mlflow", tracking)
    for name in ("MLFLOW_HTTP_REQUEST_TIMEOUT", "MLFLOW_HTTP_REQUEST_MAX_RETRIES"):
        monkeypatch.delenv(name, raising=False)
    where = sinks.opened(conf(mlflow="papers"), out)
    for number in range(2):
        where.write(report.step_event(*a_step(number)[:1], {}, {}))
    where.write(report.evaluate_event(evaluated(2)))
    where.write(report.guarantee_event(Guarantee(holds="bits", text="the same"), 2))
    where.close()
    assert out.getvalue().count("MLflow does not take this job's curves (telemetry.mlflow): it has no room.") == bool(
        refuses
    )
    asked = [name for name, *_ in tracking.asked]
    whole = ["set_experiment", "search_runs", "start_run", "log_metrics", "log_metrics", "log_metrics", "end_run"]
    assert asked == (whole[: whole.index(refuses) + 1] if refuses else whole), "whoever refuses is not asked again"
    if not refuses:
        assert tracking.asked[0] == ("set_experiment", "papers", {})
        assert tracking.asked[2] == ("start_run", {"run_name": "job"})
        name, numbers, more = tracking.asked[-2]
        assert more == {"step": 2}
        assert numbers == {"evaluate/score": 0.5, "evaluate/pass_at_1": 0.25, "evaluate/reward/right": 0.5}


def test_the_next_worker_goes_on_with_the_same_run_of_mlflow(monkeypatch):
    tracking = Tracking(there=[SimpleNamespace(info=SimpleNamespace(run_id="a1"))])
    monkeypatch.setitem(sys.modules, "mlflow", tracking)
    sinks.Mlflow("papers", "job", io.StringIO()).close()
    assert tracking.asked[1][-1]["filter_string"] == "attributes.run_name = 'job'"
    assert tracking.asked[2] == ("start_run", {"run_id": "a1"})


def test_a_server_of_mlflow_that_does_not_answer_holds_up_no_step(monkeypatch):
    tracking, answers = Tracking(), threading.Event()
    tracking.set_experiment = lambda _: answers.wait(60)
    monkeypatch.setitem(sys.modules, "mlflow", tracking)
    monkeypatch.setattr(sinks, "WAITING", 3)
    sink, begun = sinks.Mlflow("papers", "job", io.StringIO()), time.monotonic()
    for number in range(9):
        sink.write(report.step_event(*a_step(number)[:1], {}, {}))
    assert time.monotonic() < begun + 30, "it was waited for"
    answers.set()
    while sink._thread.is_alive() and sum(name == "log_metrics" for name, *_ in tracking.asked) < 3:
        time.sleep(0.01)
    sink.close()
    assert [name for name, *_ in tracking.asked][-4:] == ["log_metrics"] * 3 + ["end_run"]


def test_without_the_package_it_is_said_that_nothing_goes_to_mlflow():
    if find_spec("mlflow"):
        pytest.skip("it is installed")
    out = io.StringIO()
    sinks.opened(conf(mlflow="papers"), out).write(report.evaluate_event(evaluated(2)))
    assert "telemetry.mlflow is set, but mlflow is not installed: nothing is sent" in out.getvalue()


def test_a_folder_for_curves_that_cannot_be_written_to_costs_the_curves_alone(tmp_path):
    (tmp_path / "file").touch()
    out = io.StringIO()
    step = Event(
        name="ppo.step", step=0, fields={"generation": 1, "world": 1, "made": 0, "metrics": {}}, line="", scalars={}
    )
    for where in (sinks.TensorBoard(str(tmp_path / "file/curves"), out), sinks.History(tmp_path / "file/history", out)):
        for _ in range(2):
            where.write(step)
        where.close()
    assert [line.partition(" cannot")[0] for line in out.getvalue().splitlines()] == [
        "TensorBoard's curves", f"{tmp_path}/file/history",
    ]  # fmt: skip
