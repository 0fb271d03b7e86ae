"""One job per trainer, and one fault after the other: what each costs is read from the lines that the script writes."""

import importlib.util
import os
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.levels.scripts import HERE, NODES, Line, Running

SIDE = Path(os.environ.get("ELASTICRL_SIDE", HERE.parents[1] / ".venv"))  # packages that do not fit beside the others


@dataclass(frozen=True, slots=True, kw_only=True)
class Trainer:
    """A script, and what it needs. Example: Trainer(script="sft.py", needs=("trl",), model="causal")"""

    script: str
    needs: tuple[str, ...] = ()
    model: str | None = None  # what its --model is in the folder of models
    side: str | None = None  # a folder of packages that come before the others
    conf: Mapping[str, Any] = field(default_factory=dict)

    @property
    def fixed(self) -> bool:
        """Does it train at one size only?"""
        return bool(self.conf.get("membership", {}).get("fixed"))

    @property
    def path(self) -> Path | None:
        """Where its own packages are."""
        return SIDE / self.side if self.side else None

    @property
    def lacks(self) -> str:
        """What it needs and is not here."""
        if self.path and not self.path.is_dir():
            return f"{self.path} (see `make trainers`)"
        return ", ".join(name for name in self.needs if importlib.util.find_spec(name) is None)


HF = ("transformers", "accelerate", "datasets")
TRL = (*HF, "trl")
TRAINERS: Mapping[str, Trainer] = {
    "ddp": Trainer(script="ddp.py"),
    "fsdp2": Trainer(script="fsdp2.py"),
    "transformers": Trainer(script="hf.py", needs=HF),
    "sft": Trainer(script="sft.py", needs=TRL, model="causal"),
    "dpo": Trainer(script="dpo.py", needs=TRL, model="causal"),
    "grpo": Trainer(script="grpo.py", needs=TRL, model="causal"),
    "ppo": Trainer(script="trl_ppo.py", needs=HF, model="", side="trl112"),
    "accelerate": Trainer(script="accel.py", needs=("accelerate",)),
    "lightning": Trainer(script="lightning_plain.py", needs=("lightning",)),
    # Its data loader does not resume at another size.
    "torchtitan": Trainer(
        script="titan.py",
        needs=("datasets",),
        model="causal",
        side="titan",
        conf={"membership": {"fixed": True, "min_nodes": 1}},
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Of one fault: seconds to the next step of all ranks, and the steps that were made and had to be made again.

    Example: Cost(fault="worker", seconds=0.6, lost=4, world=3)
    """

    fault: str
    seconds: float
    lost: int
    world: int


def cost(run: Running, fault: str, at: float, world: int, old: set[int]) -> Cost:
    """Wait until a gang of this size has made some steps, in processes that did not train before; what that took."""
    found: dict[int, list[Line]] = {}

    def made() -> bool:
        found.clear()
        for line in run.lines(at):
            if line.world == world and line.pid not in old:
                found.setdefault(line.rank, []).append(line)
        return len(found) == world and all(len(each) >= 3 for each in found.values())

    run.until(made, f"steps in a world of {world} after: {fault}")
    first = max(each[0].at for each in found.values())
    begun = min(each[0].step for each in found.values())
    before = max((line.step for line in run.lines() if line.pid in old), default=0)
    return Cost(fault=fault, seconds=first - at, lost=max(0, before + 1 - begun), world=world)


def models(folder: Path, trainer: Trainer) -> Path:
    """The folder with tiny models that this trainer's script takes, written once."""
    for kind in ("causal", "reward") if trainer.model is not None else ():
        if not (folder / kind).exists():
            from elasticrl.ppo import tiny

            tiny.write(folder / kind, hidden=16, layers=1, heads=2, kind=kind)
    return folder


def workers(run: Running) -> set[int]:
    """All processes that have trained so far."""
    return {line.pid for line in run.lines()}


@contextmanager
def environ(trainer: Trainer) -> Iterator[None]:
    """What the daemons, and so the workers, inherit."""
    before = os.environ.get("PYTHONPATH")
    if trainer.path:
        os.environ["PYTHONPATH"] = os.pathsep.join([str(trainer.path), *([before] if before else [])])
    try:
        yield
    finally:
        os.environ.pop("PYTHONPATH", None)
        if before is not None:
            os.environ["PYTHONPATH"] = before


def ride(name: str, models: Path) -> list[Cost]:
    """Start the script on three nodes; kill a worker, stop one, kill a node, let it come back, and let the script end."""
    trainer = TRAINERS[name]
    args = [] if trainer.model is None else ["--model", str(models / trainer.model)]
    costs = []
    with (
        environ(trainer),
        Running(trainer.script, "--steps", "100000", "--last", "{folder}/last", *args, conf=trainer.conf) as run,
    ):
        run.job.start(*NODES)
        run.trains(3, steps=12)
        run.warm()
        old = workers(run)
        costs.append(cost(run, "worker", run.hit("n1"), 3, old))
        run.warm()
        old = workers(run)
        costs.append(cost(run, "stopped", run.hit("n2", signal.SIGSTOP), 3, old))
        named(run, "n2")
        run.warm()
        old = workers(run)
        at = run.kill_node("n2")
        if trainer.fixed:
            run.until(lambda: run.job.ask("n0", "status")["state"] == "HOLDING", "a hold")
        else:
            costs.append(cost(run, "node", at, 2, old))
            old = workers(run)
            at = time.monotonic()
        run.job.start("n2")
        costs.append(cost(run, "node is back", at, 3, old))
        last = max(line.step for line in run.lines()) + 10
        (run.job.folder / "last").write_text(str(last))
        assert run.ends() == [0, 0, 0]
        assert {line.step for line in run.lines()} >= set(range(1, last + 1)), "each step was made"
        assert run.causes()[-1][0] == ["script_ended"]
        run.job.check()
    return costs


def named(run: Running, node: str) -> None:
    """The worker that was stopped is named: by the verdict, and in `status`."""
    (stalled,) = run.job.events(node, "worker.stalled")
    assert stalled["stopped"]
    stopped = [line for line in run.job.events("n0", "verdict.found") if line["fault"] == "host_hang"]
    assert stopped[0]["nodes"] == [node]
    assert "found" in run.job.ask("n0", "status")["causes"]
