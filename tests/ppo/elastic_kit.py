"""A small PPO job on nodes that a test plans for itself: what it trains, and what has come of it."""

import json
import random
import signal
import sys
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "runtime"))

from gang_kit import Nodes

from elasticrl.ppo import tiny
from elasticrl.runtime.chronicle import read
from elasticrl.runtime.data.audit import audit

STEPS, LANES, SEED = 8, 4, 7


def small(folder: Path) -> dict[str, Any]:
    """The job's configuration, with its model and its prompts, one of which is too long, in this folder."""
    chance = random.Random(5)
    lines = [f'{{"prompt": "{chance.randrange(10_000):04}"}}' for _ in range(5000)]
    lines[7:7] = ['{"prompt": "123456789"}']
    (folder / "prompts.jsonl").write_text("\n".join(lines))
    return {
        "ppo": {
            "batch": 64, "mini_batch": 32, "micro_tokens": 40, "epochs": 2, "lr": 4e-3, "critic_lr": 4e-3,
            "kl": {"coef": 0.01, "target": 1.0, "horizon": 100},
        },
        "model": {"path": tiny.write(folder / "actor", hidden=32, layers=2)},
        "reward": {"function": "elasticrl.ppo.tasks:reverse"},
        "rollout": {"max_tokens": 4},
        "data": {"path": str(folder / "prompts.jsonl"), "max_prompt": 6},
        "vault": {"inside": 1},  # so that there are many states to go on from
    }  # fmt: skip


def mixed(folder: Path) -> dict[str, Any]:
    """The same with prompts of all lengths, few long ones: lanes come to one pass in an update, or to four."""
    chance = random.Random(6)
    sizes = [min(int(chance.lognormvariate(2.0, 0.8)) + 1, 42) for _ in range(5000)]
    conf = small(folder)
    lines = [json.dumps({"prompt": "".join(chance.choice("0123456789") for _ in range(size))}) for size in sizes]
    (folder / "prompts.jsonl").write_text("\n".join(lines))
    conf["data"]["max_prompt"], conf["rollout"]["max_tokens"] = 44, 20
    return {**conf, "ppo": {**conf["ppo"], "micro_tokens": 128}}


def nodes(
    folder: Path,
    conf: dict[str, Any],
    *,
    strategy: str = "replicated",
    copies: int = 1,
    program: str = "elasticrl.ppo.__main__",
) -> Nodes:
    conf = {**conf, "model": {**conf["model"], "strategy": strategy}}
    return Nodes(folder, steps=STEPS, lanes=LANES, program=program, conf=conf, copies=copies)


def outcome(gang: Nodes, group: int = 1) -> dict[int, str]:
    """The digests of all steps; every prompt of every step was used exactly once in each epoch, whole groups at once."""
    found = read(gang.run_dir)
    assert not found.findings, found.findings
    used = audit(gang.run_dir)
    assert used.ok, used.sentence
    assert (used.steps, used.samples) == (STEPS, STEPS * 64 // group * 2)
    return dict(found.steps)


def ending(gang: Nodes, **env: str) -> Path:
    """Its workers, of the program `ppo_ends`, end themselves where they are told to (`arm`), in this folder."""
    ends = gang.folder / "ends"
    ends.mkdir()
    gang.env |= {"PPO_ENDS": str(ends), **env}
    return ends


def strike(
    gang: Nodes, node: str, phase: str, *, after_ms: float, stay: bool = False, entry: int = 1, armed: bool = False
) -> None:
    """This node's worker ends itself in that phase of its next step (`ppo_ends`), and a fresh one takes its place. `armed`: it
    was told to before (`arm`).
    """
    members = gang.plan_now
    if not armed:
        arm(gang, node, phase, after_ms=after_ms, stay=stay, entry=entry)
    gang.workers[node].process.join(120)
    assert gang.workers[node].process.exitcode == -signal.SIGALRM, f"{phase} did not strike"
    gang.kill_worker(node)
    gang.plan(*members)


def arm(gang: Nodes, node: str, phase: str, *, after_ms: float, stay: bool = False, entry: int = 1) -> None:
    """This node's worker will end itself in that phase."""
    ends = Path(gang.env["PPO_ENDS"])
    (ends / "fresh").write_text(json.dumps({"phase": phase, "after_ms": after_ms, "stay": stay, "entry": entry}))
    (ends / "fresh").rename(ends / node)


def events(log: Path) -> list[dict[str, Any]]:
    """What a worker told as JSON."""
    return [json.loads(line) for line in log.read_text().splitlines() if line.startswith('{"ts"')]


def generated(path: Path) -> Counter[tuple[int, str]]:
    """In how many generations each sample was generated, by (step, id). Within one, ghosts are generated again."""
    notes = [json.loads(line) for line in path.read_text().splitlines()]
    made = {(note["version"] // 4, name, note["generation"]) for note in notes for name in note["ids"]}
    return Counter((step, name) for step, name, _ in made)
