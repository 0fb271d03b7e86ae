"""Where a step's report goes: lines for people, events for machines, TensorBoard, wandb, MLflow, a bar, a history file.

The idea: a report is a few events with plain fields, made once; each sink takes what it can show. Only sealed steps get here,
so a step that was made twice after a fault is reported once.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from html import escape
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from queue import Full, Queue
from threading import Thread
from typing import TYPE_CHECKING, Any, Protocol, TextIO

from elasticrl.base.words import bar
from elasticrl.telemetry.events import BY_NAME, names

if TYPE_CHECKING:
    from elasticrl.config import Tree

HISTORY = "ELASTICRL_HISTORY"  # a file that gets a line for each step, for demonstrations and tests
ANSWER_S = 5.0  # for each answer of Weights & Biases, while training waits: two at its beginning, one at its end; and of MLflow
WAITING = 1000  # events that MLflow has not taken yet
PARTS = "reward/"  # before the name of one of several rewards
CURVES = ("reward", "kl", "preference_loss", "right", "loss")


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One thing to report. `line` is how people read it; `scalars` are its numbers by name, for curves.

    Example: Event(name="ppo.step", step=7, fields={"reward": 0.7}, line="[Step 7] ...", scalars={"reward": 0.7})
    """

    name: str  # as declared in telemetry.events
    step: int
    fields: Mapping[str, Any]
    line: str
    scalars: Mapping[str, float]


class Sink(Protocol):
    """Anything that shows events."""

    def write(self, event: Event) -> None:
        """In the order in which they came about."""

    def close(self) -> None:
        """The job's end here."""


class NoSink(ValueError):
    """A sink was asked for that cannot be had; the message says what to install."""


class Lines:
    """For people: one line for each event. As JSON beside it, where logs are to be JSON."""

    def __init__(self, stream: TextIO, *, plain: bool) -> None:
        self._stream, self._plain = stream, plain

    def write(self, event: Event) -> None:
        """Both, if asked."""
        print(event.line, file=self._stream, flush=True)
        if self._plain:
            at = {"ts": datetime.now(UTC).isoformat(), "event": event.name, "level": BY_NAME[event.name].level}
            head = {**at, **names(os.environ), "step": event.step}
            print(json.dumps(head | dict(event.fields)), file=self._stream, flush=True)

    def close(self) -> None:
        """Nothing to do."""


class Bar:
    """A progress bar under the lines, on a terminal."""

    def __init__(self, stream: TextIO, steps: int) -> None:
        self._stream, self._steps = stream, steps

    def write(self, event: Event) -> None:
        """Drawn over when the next line comes."""
        if event.name == "ppo.step":
            self._stream.write(f"{bar(event.step + 1, self._steps)}\r")
            self._stream.flush()

    def close(self) -> None:
        """Leaves the cursor on a line of its own."""
        self._stream.write("\n")
        self._stream.flush()


class Dispensable:
    """What training does without: where it refuses, that is said once, and nothing more is written to it."""

    def __init__(self, out: TextIO, sorry: str, refusals: tuple[type[Exception], ...] = (OSError,)) -> None:
        self._out, self._sorry, self._refusals = out, sorry, refusals
        self._held: Any = None  # what is written to, as long as it takes it

    @contextmanager
    def _softly(self) -> Iterator[None]:
        try:
            yield
        except self._refusals as error:
            self._held = None
            print(self._sorry.format(error=str(error) or type(error).__name__), file=self._out, flush=True)


class History(Dispensable):
    """One JSON line for each step: what a curve is drawn from; and one for each evaluation, with its samples."""

    def __init__(self, path: Path, out: TextIO) -> None:
        super().__init__(out, f"{path} cannot be written to ({HISTORY}): {{error}}. Nothing more is written to it.")
        self._held = path

    def write(self, event: Event) -> None:
        """Steps and evaluations."""
        found: dict[str, Any] = {}
        if event.name == "ppo.step":
            found |= {name: event.fields[name] for name in ("generation", "world", "made")}
            found |= {
                name: value
                for name, value in event.fields["metrics"].items()
                if name in CURVES or name.startswith(PARTS)
            }
        elif event.name == "ppo.evaluate":
            found |= {"evaluated": event.fields["metrics"], "samples": event.fields["samples"]}
        if found and self._held is not None:
            # Monotonic for durations; the wall clock is for whoever lays other curves beside these.
            at = {"at": time.monotonic(), "wall": round(time.time(), 3), "step": event.step}
            with self._softly(), self._held.open("a", encoding="utf-8") as file:
                file.write(json.dumps(at | found) + "\n")

    def close(self) -> None:
        """Nothing to do."""


class TensorBoard(Dispensable):
    """Torch's own writer, which needs the package tensorboard."""

    def __init__(self, folder: str, out: TextIO) -> None:
        super().__init__(
            out,
            f"TensorBoard's curves cannot be written to {folder} (telemetry.tensorboard): {{error}}. Nothing more is written.",
        )
        module: Any = import_module("torch.utils.tensorboard")
        with self._softly():
            self._held = module.SummaryWriter(folder)

    def write(self, event: Event) -> None:
        """Numbers as curves, advice and an evaluation's samples as text."""
        if self._held is not None:
            with self._softly():
                for name, value in event.scalars.items():
                    self._held.add_scalar(name, value, event.step)
                if event.name == "ppo.advice":
                    self._held.add_text("advice", event.line, event.step)
                if event.fields.get("samples"):
                    self._held.add_text("samples", shown(event.fields["samples"]), event.step)

    def close(self) -> None:
        """Everything is in the file."""
        if self._held is not None:
            with self._softly():
                self._held.close()


class Wandb(Dispensable):
    """Weights & Biases, if installed. It may not be reached, or refuse."""

    def __init__(self, project: str, job: str, out: TextIO) -> None:
        wandb: Any = import_module("wandb")
        super().__init__(
            out,
            "Weights & Biases does not take this job's curves (telemetry.wandb): {error}. Nothing more is sent; see that this "
            "node reaches it, and that its key is in the daemon's environment (WANDB_API_KEY).",
            (wandb.Error, OSError),
        )
        within = dict.fromkeys(("init_timeout", "login_timeout", "finish_timeout"), ANSWER_S)
        with self._softly():
            # Under one name, whichever worker tells: the next one goes on with the same curves.
            settings = wandb.Settings(console="off", **within)
            self._held = wandb.init(project=project, name=job, id=job, resume="allow", settings=settings)

    def write(self, event: Event) -> None:
        """Numbers alone."""
        if self._held is not None and event.scalars:
            with self._softly():
                self._held.log(dict(event.scalars), step=event.step)

    def close(self) -> None:
        """Uploads what is left."""
        if self._held is not None:
            with self._softly():
                self._held.finish()


class Mlflow(Dispensable):
    """MLflow, if installed: the server of MLFLOW_TRACKING_URI, or files. It may not be reached, or refuse. All of it is done
    by one thread: each step would wait for an answer, and the package keeps its run by thread.
    """

    def __init__(self, experiment: str, job: str, out: TextIO) -> None:
        # Its own are 2 minutes for each try, and 7 more tries.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", f"{ANSWER_S:.0f}")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
        mlflow: Any = import_module("mlflow")
        super().__init__(
            out,
            "MLflow does not take this job's curves (telemetry.mlflow): {error}. Nothing more is sent; see that this node "
            "reaches it, and that its address is in the daemon's environment (MLFLOW_TRACKING_URI).",
            (mlflow.MlflowException, OSError),
        )
        self._waiting: Queue[Event | None] = Queue(WAITING)
        self._thread = Thread(target=self._send, args=(mlflow, experiment, job), name="mlflow", daemon=True)
        self._thread.start()

    def write(self, event: Event) -> None:
        """Numbers alone. Of a server that is slower than the steps some are left out."""
        if event.scalars:
            with suppress(Full):
                self._waiting.put_nowait(event)

    def close(self) -> None:
        """What is left is sent, as far as that is soon done."""
        with suppress(Full):
            self._waiting.put(None, timeout=ANSWER_S)
            self._thread.join(2 * ANSWER_S)

    def _send(self, mlflow: Any, experiment: str, job: str) -> None:
        with self._softly():
            mlflow.set_experiment(experiment)
            # Of one name, whichever worker tells: the next one goes on with the same curves.
            before = mlflow.search_runs(
                filter_string=f"attributes.run_name = '{job}'", max_results=1, output_format="list"
            )
            mlflow.start_run(run_id=before[0].info.run_id) if before else mlflow.start_run(run_name=job)
            self._held = mlflow
        while (event := self._waiting.get()) is not None:
            if self._held is not None:
                with self._softly():  # its names have no @
                    numbers = {name.replace("@", "_at_"): value for name, value in event.scalars.items()}
                    self._held.log_metrics(numbers, step=event.step)
        if self._held is not None:
            with self._softly():
                self._held.end_run()


def shown(samples: Sequence[Mapping[str, Any]]) -> str:
    r"""Samples as a table of Markdown. What is in them is text, whatever it looks like.

    >>> print(shown([{"prompt": "a|b", "answer": "<i>\n", "score": 0.5, "parts": {"brief": 1.0}}]))
    | prompt | answer | score | brief |
    | --- | --- | --- | --- |
    | a&#124;b | &lt;i&gt;<br> | 0.5 | 1 |
    """
    parts = list(dict.fromkeys(name for sample in samples for name in sample["parts"]))
    head = ["prompt", "answer", "score", *parts]

    def row(cells: Sequence[str]) -> str:
        return f"| {' | '.join(cells)} |"

    def plain(text: str) -> str:
        return "".join(f"&#{ord(c)};" if c in "|*_`[]#~\\" else c for c in escape(text)).replace("\n", "<br>")

    body = [
        [
            plain(each["prompt"]),
            plain(each["answer"]),
            f"{each['score']:g}",
            *(f"{each['parts'][name]:g}" for name in parts),
        ]
        for each in samples
    ]
    return "\n".join([row(head), row(["---"] * len(head)), *map(row, body)])


class Sinks:
    """All of them, opened when the first event comes: only one worker of a gang ever tells anything.

    Example: Sinks(lambda: [Lines(sys.stdout, plain=False)]).write(event)
    """

    def __init__(self, make: Callable[[], Sequence[Sink]]) -> None:
        self._make = make
        self._sinks: Sequence[Sink] = ()

    def write(self, event: Event) -> None:
        """To each."""
        self._sinks = self._sinks or self._make()
        for sink in self._sinks:
            sink.write(event)

    def close(self) -> None:
        """The job's end here."""
        for sink in self._sinks:
            sink.close()


def opened(tree: Tree, stream: TextIO | None = None) -> Sinks:
    """Those that the configuration and the environment ask for. NoSink if one of them cannot be had."""
    out, conf = stream or sys.stdout, tree.telemetry
    if conf.tensorboard is not None and find_spec("tensorboard") is None:
        raise NoSink(
            "telemetry.tensorboard is set, but the package is not installed: pip install 'elasticrl[tensorboard]'"
        )

    def make() -> list[Sink]:
        found: list[Sink] = [Lines(out, plain=conf.format == "json")]
        if path := os.environ.get(HISTORY):
            found.append(History(Path(path), out))
        if conf.tensorboard is not None:
            found.append(TensorBoard(conf.tensorboard, out))
        if conf.wandb is not None and find_spec("wandb") is not None:
            found.append(Wandb(conf.wandb, tree.job.name, out))
        elif conf.wandb is not None:
            print("telemetry.wandb is set, but wandb is not installed: nothing is sent", file=out, flush=True)
        if conf.mlflow is not None and find_spec("mlflow") is not None:
            found.append(Mlflow(conf.mlflow, tree.job.name, out))
        elif conf.mlflow is not None:
            print("telemetry.mlflow is set, but mlflow is not installed: nothing is sent", file=out, flush=True)
        if out.isatty() and tree.job.steps:
            found.append(Bar(out, tree.job.steps))
        return found

    return Sinks(make)
