"""Engines beside a trainer, for tests: made with little said, looked at from outside, and ended by signals."""

import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from chaos.patience import patience
from elasticrl.ppo.rollout import weights
from elasticrl.ppo.rollout.attend import Attendant, Limits
from elasticrl.ppo.rollout.engine import Request, Samples, Sampling
from elasticrl.ppo.rollout.served import Served
from elasticrl.ppo.rollout.service import ENGINE_LOCK, Service
from elasticrl.ppo.rollout.wire import SOCKET, Lost, Talk

sys.path.insert(0, str(Path(__file__).parents[1] / "runtime"))

from gang_kit import Nodes

from elasticrl.ppo import tiny
from elasticrl.runtime.chronicle import read
from elasticrl.runtime.data.audit import audit

EOS, PAD = 11, 10
SAMPLING = Sampling(prompt_tokens=7, max_tokens=6, rows=16, eos=(EOS,), pad=PAD)
LIMITS = Limits(start_s=120.0, sync_s=30.0, health_every_s=60.0, health_s=20.0, starts=3)


def service(path: str, **more: Any) -> Service:
    plain: dict[str, Any] = {
        "program": "torch", "model": path, "sampling": SAMPLING, "dtype": "float32", "attention": "sdpa", "device": "cpu",
        "threads": 1, "idle_s": 600.0, "gpu_memory_utilization": 0.05, "kv_cache_bytes": 8 << 20, "tensor_parallel": 1,
        "max_num_seqs": 64, "chunked_prefill": True, "prefix_caching": True, "batch_invariant": False,
    }  # fmt: skip
    return Service(**(plain | more))


class Trainer:
    """One trainer's end: its engine, and what that said."""

    def __init__(
        self, home: Path, what: Service, *, limits: Limits = LIMITS, python: str | None = None,
        say: Callable[[str], None] | None = None,
    ) -> None:  # fmt: skip
        self.home, self.said = home, []
        self.attendant = Attendant(home, what, limits, python=python, say=say or self.said.append)
        self.waited: list[float] = []  # when it said that it waits for its engine
        self.engine = Served(
            self.attendant, what.sampling, check=self.check, waits=lambda: self.waited.append(time.monotonic())
        )
        self.on_turn: Callable[[], None] = lambda: None

    def check(self) -> None:
        self.on_turn()

    def enter(self, model: torch.nn.Module, *, life: str = "1 here", writes: bool = True) -> None:
        source = lambda _version: weights.buckets(model, nbytes=1 << 12, dtype=torch.float32)  # noqa: E731
        self.engine.enter(life=life, source=source, writes=writes, gathers=False)

    def ready(self) -> int:
        """Wait for the engine; its pid."""
        with self.attendant.talk(self.check) as talk:
            return int(talk.ask("hello")["pid"])

    def kill_when(self, claim: Callable[[], bool], how: int = signal.SIGKILL) -> list[int]:
        """At the first turn of waiting at which that holds. How many samples there were then, when it has happened."""
        struck: list[int] = []

        def turn() -> None:
            if not struck and claim():
                os.killpg(pid_of(self.home), how)
                struck.append(len(self.engine.found))

        self.on_turn = turn
        return struck


def requests(count: int, start: int = 0) -> list[Request]:
    return [
        Request(
            id=f"0:{i}",
            prompt=tuple((i + k) % 10 for k in range(1 + i % 7)),
            seed=(1 << 62) + i,
            width=min(7, 2 + i % 7),
        )
        for i in range(start, start + count)
    ]


def same(a: Samples, b: Samples) -> bool:
    pairs = [(getattr(a, name), getattr(b, name)) for name in ("tokens", "attention", "mask", "logprobs", "ended")]
    return a.ids == b.ids and all(torch.equal(x, y) for x, y in pairs)


def moved(model: torch.nn.Module) -> None:
    """As an update would."""
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(1.25)


def pid_of(home: Path) -> int:
    found = ""

    def begun() -> bool:  # the next one empties the file before it writes
        nonlocal found
        found = (home / ENGINE_LOCK).read_text()
        return bool(found)

    until(begun, "an engine that has begun")
    return int(found)


def gone(pid: int) -> bool:
    """Ended, or only not yet reaped."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def until(claim: Callable[[], bool], what: str, within_s: float = 60.0) -> None:
    deadline = time.monotonic() + patience(within_s)
    while not claim():
        assert time.monotonic() < deadline, f"not within {within_s} s: {what}"
        time.sleep(0.01)


def end(home: Path) -> None:
    """Whatever engine is there."""
    with suppress(Lost), Talk(home / SOCKET, within_s=20.0) as talk:
        talk.ask("end")
    until(lambda: gone(pid_of(home)), "the engine's end")


# ---- whole gangs

STEPS = 3


def job(folder: Path, engine: dict[str, Any], **shape: Any) -> dict[str, Any]:
    """The configuration of a small job of PPO."""
    chance = random.Random(5)
    folder.mkdir(parents=True, exist_ok=True)
    lines = [f'{{"prompt": "{chance.randrange(10_000):04}"}}' for _ in range(500)]
    (folder / "prompts.jsonl").write_text("\n".join(lines))
    return {
        "ppo": {
            "batch": 32, "mini_batch": 16, "micro_tokens": 40, "lr": 4e-3, "critic_lr": 4e-3, "kl": {"coef": 0.01},
            "importance_limit": 2.0,
        },
        "model": {"path": tiny.write(folder / "actor", **({"hidden": 32, "layers": 2} | shape))},
        "reward": {"function": "elasticrl.ppo.tasks:reverse"},
        "rollout": {"max_tokens": 4, "health_timeout": "60s", "start_timeout": "120s", "idle": "300s", **engine},
        "data": {"path": str(folder / "prompts.jsonl"), "max_prompt": 6},
    }  # fmt: skip


def gang(folder: Path, conf: dict[str, Any], *, world: int, strategy: str = "replicated") -> Nodes:
    """Of the program `engine_ends`, not yet planned."""
    conf = {**conf, "model": {**conf["model"], "strategy": strategy}}
    made = Nodes(folder, steps=STEPS, lanes=4, program="engine_ends", conf=conf, copies=min(1, world - 1))
    made.env["ENGINE_ENDS"] = str(folder / "ends")
    (folder / "ends").mkdir(parents=True)
    return made


def strike(folder: Path, node: str, phase: str, time: int) -> None:
    """The node's engine dies as its worker enters that phase for the so-manieth time. To be said before the gang is planned."""
    (folder / "ends" / node).write_text(json.dumps({"phase": phase, "time": time}))


def struck(folder: Path, node: str) -> bool:
    return (folder / "ends" / f"{node}.struck").exists()


def returned(gang: Nodes, folder: Path, node: str) -> None:
    """Waits for the engine that comes after the one that was struck there: only a process that is there can be adopted."""
    gang.until(lambda: struck(folder, node) and not gone(pid_of(home_of(folder, node))), f"{node}'s next engine", 200.0)


def home_of(folder: Path, node: str) -> Path:
    return folder / "vault" / f"{node}.engine"


def outcome(gang: Nodes) -> dict[int, str]:
    """The digests of all steps; every prompt of every step was used exactly once."""
    found, used = read(gang.run_dir), audit(gang.run_dir)
    assert not found.findings, found.findings
    assert used.ok, used.sentence
    assert (used.steps, used.samples) == (STEPS, STEPS * 32)
    return dict(found.steps)
