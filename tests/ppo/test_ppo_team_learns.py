"""PPO and GRPO with models that a team shares: the gradient is that of one worker but for rounding, and rewards rise."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from elastic_kit import small

sys.path.insert(0, str(Path(__file__).parents[1] / "runtime"))

from gang_kit import Nodes

from elasticrl.ppo import tiny
from elasticrl.runtime.checkpoint.load import open_checkpoint
from elasticrl.runtime.checkpoint.place import place
from elasticrl.runtime.vault.source import dtype_of

MOMENT, OF_OPTIMIZER = ".exp_avg", "_optimizer.state."
GRPO = {"algorithm": "grpo", "group": 8, "kl": {"where": "loss", "coef": 0.05}, "entropy_coef": 0.01}


def nodes(folder: Path, conf: dict[str, Any], *, steps: int, copies: int) -> Nodes:
    return Nodes(folder, steps=steps, lanes=2, program="elasticrl.ppo.__main__", conf=conf, copies=copies)


def gradient(folder: Path, conf: dict[str, Any], *, teams: int, **model: Any) -> dict[str, torch.Tensor]:
    """Of the first update, by parameter: Adam's first moment is a tenth of it."""
    size = model.get("tp", 1) * model.get("cp", 1)
    conf = {**conf, "model": {**conf["model"], **model}, "node": {"workers": size}}
    with nodes(folder, conf, steps=1, copies=min(size, size * teams - 1)) as gang:
        gang.plan(*(f"n{i}" for i in range(size * teams)))
        gang.until_done(within_s=120.0)
        where, found = place(gang.run_dir), {}
    with open_checkpoint(where, where.names()[-1]) as source:
        for role in ("actor", "critic"):
            for name, piece in source.wholes(f"{role}{OF_OPTIMIZER}").items():
                if name.endswith(MOMENT):
                    found[name] = torch.empty(piece.shape, dtype=dtype_of(piece.dtype))
                    source.fill([(piece, found[name])])
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arch", "ppo", "model"),
    [
        ("qwen2", {}, {"tp": 2}),
        ("qwen2", GRPO, {"tp": 2, "strategy": "fsdp"}),
        ("llama", {}, {"cp": 2}),
        ("qwen3_moe", GRPO | {"router_aux_coef": 0.1}, {"tp": 2}),
        ("qwen3_moe", GRPO | {"router_aux_coef": 0.1}, {"cp": 2, "strategy": "fsdp"}),
    ],
)
def test_teams_have_the_gradient_of_one_worker(tmp_path: Path, arch: str, ppo: dict[str, Any], model: dict[str, Any]):
    conf = small(tmp_path)
    conf["ppo"] = {"batch": 16, "mini_batch": 16, "micro_tokens": 160, "lr": 1e-3, **ppo}
    words = (*tiny.WORDS, "<one>")
    conf["model"] = {"path": tiny.write(tmp_path / "small", arch=arch, hidden=32, layers=2, words=words)}
    expected = gradient(tmp_path / "one", conf, teams=1)
    found = gradient(tmp_path / "teams", conf, teams=2, **model)
    assert found.keys() == expected.keys()
    assert len(expected) > 10
    largest = max(float(one.norm()) for one in expected.values())
    apart = {name: float((found[name] - one).norm()) / largest for name, one in expected.items()}
    assert {name: far for name, far in apart.items() if far > 1e-4} == {}


@pytest.mark.parametrize(
    ("steps", "ppo"),
    [
        pytest.param(16, {"gamma": 0.05, "critic_lr": 8e-3, "kl": {"coef": 0.002}}, marks=pytest.mark.long),
        pytest.param(32, {"algorithm": "grpo", "group": 8, "kl": {"where": "off"}}, marks=pytest.mark.slow),
    ],
    ids=["ppo", "grpo"],
)
def test_a_team_learns_to_reverse_digits(tmp_path: Path, steps: int, ppo: dict[str, Any]):
    conf = small(tmp_path)
    conf["ppo"] = {
        "batch": 64, "mini_batch": 32, "micro_tokens": 320, "epochs": 2, "lr": 8e-3, "clip_high": 0.5,
        "entropy_coef": 0.05, **ppo,
    }  # fmt: skip
    conf["model"] = {"path": tiny.write(tmp_path / "small", hidden=32, layers=1), "tp": 2}
    conf["node"] = {"workers": 2}
    with nodes(tmp_path / "gang", conf, steps=steps, copies=1) as gang:
        gang.env["ELASTICRL_HISTORY"] = str(tmp_path / "history")
        gang.plan("n0", "n1")
        gang.until_done(within_s=180.0)
    rewards = [json.loads(line)["reward"] for line in (tmp_path / "history").read_text().splitlines()]
    assert len(rewards) == steps
    assert sum(rewards[:3]) / 3 < 0.12, "it knew before"
    assert sum(rewards[-4:]) / 4 > 0.2, rewards
