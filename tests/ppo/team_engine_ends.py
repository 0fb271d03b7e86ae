"""`elasticrl.ppo` whose engine is asked by one member of a team: says what was asked for and what came, and ends where a test
chooses.

`$TEAM_ENDS` is a folder. Each worker writes there, in a file of its own, what its engine was asked for (`asked-PID`), what its
lanes have of each step's samples and scores (`came-PID`), and which weights it handed over (`weights-PID`).

A file `rank1` in it, {"step": 1, "stage": "reward"}, ends the worker of that rank as it enters that stage of that step.
"""

import json
import os
import signal
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch

from elasticrl.ppo import __main__ as ppo
from elasticrl.ppo.flow import Stage
from elasticrl.ppo.rollout import weights
from elasticrl.ppo.rollout.engine import Request
from elasticrl.ppo.rollout.served import Served
from elasticrl.ppo.trainer import Trainer

gather, bring = Served._gather, Served._bring
advantage, reward = Trainer.advantage, Trainer.reward


def note(kind: str, **what: Any) -> None:
    with (Path(os.environ["TEAM_ENDS"]) / f"{kind}-{os.getpid()}").open("a") as file:
        file.write(json.dumps(what) + "\n")


def bits(*values: torch.Tensor) -> str:
    return blake2b(b"".join(one.contiguous().numpy().tobytes() for one in values), digest_size=8).hexdigest()


def gathering(engine: Served, tag: weights.Tag, requests: Sequence[Request]) -> None:
    lacking = [request for request in requests if request not in engine.found]
    gather(engine, tag, requests)
    note("asked", version=tag.version, ids=[request.id for request in lacking])


def bringing(engine: Served, tag: weights.Tag, buckets: Iterable[weights.Bucket]) -> None:
    made = list(buckets)
    kept = {name: bits(tensor) for bucket in made for name, tensor in bucket}
    bring(engine, tag, iter(made))
    note("weights", version=tag.version, tensors=kept)


def strike(trainer: Trainer, stage: Stage) -> None:
    path = Path(os.environ["TEAM_ENDS"]) / f"rank{trainer.run.base.rank}"  # type: ignore[attr-defined]
    if path.exists() and json.loads(path.read_text()) == {"step": trainer.run.buffer.step, "stage": stage.name}:
        path.rename(f"{path}.struck")
        os.kill(os.getpid(), signal.SIGKILL)


def scoring(trainer: Trainer, stage: Stage) -> None:
    strike(trainer, stage)
    reward(trainer, stage)


def having(trainer: Trainer, stage: Stage) -> None:
    for lane, rows in trainer.run.buffer.rows.items():
        names = ("tokens", "mask", "rollout_logprobs", "ended", "scores")
        found = bits(*(rows[name] for name in names))
        note("came", step=trainer.run.buffer.step, lane=lane, bits=found, version=trainer.run.version)
    strike(trainer, stage)
    advantage(trainer, stage)


def main() -> None:
    Served._gather, Served._bring = gathering, bringing  # type: ignore[method-assign]
    Trainer.reward, Trainer.advantage = scoring, having  # type: ignore[method-assign]
    ppo.main()
