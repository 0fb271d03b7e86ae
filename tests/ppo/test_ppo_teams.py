"""PPO and GRPO with models that a team shares: the same bits for any number of teams, and through the death of a member."""

import sys
from pathlib import Path
from typing import Any

import pytest
from elastic_kit import small

sys.path.insert(0, str(Path(__file__).parents[1] / "runtime"))

import asked_parts
import frozen_parts
from forked_workers import Workers
from gang_kit import Nodes, digests

from elasticrl.ppo import tiny
from elasticrl.runtime.data.audit import audit

STEPS = 3


def nodes(folder: Path, conf: dict[str, Any], *, copies: int) -> Nodes:
    return Nodes(folder, steps=STEPS, lanes=2, program="elasticrl.ppo.__main__", conf=conf, copies=copies)


def outcome(gang: Nodes) -> dict[int, str]:
    used = audit(gang.run_dir)
    assert used.ok, used.sentence
    assert used.steps == STEPS
    return digests(gang.run_dir)


@pytest.mark.parametrize(
    ("algorithm", "arch", "how", "strategy"),
    [
        pytest.param("ppo", "qwen2", "tp", "fsdp", marks=pytest.mark.slow),
        ("grpo", "qwen2", "tp", "replicated"),
        pytest.param("grpo", "qwen2", "tp", "fsdp", marks=pytest.mark.slow),
        pytest.param("grpo", "llama", "tp", "lora fsdp", marks=pytest.mark.slow),
        pytest.param("ppo", "qwen2", "cp", "fsdp", marks=pytest.mark.slow),
        pytest.param("grpo", "qwen2", "cp", "lora", marks=pytest.mark.slow),
        pytest.param("grpo", "qwen3_moe", "tp", "replicated", marks=pytest.mark.slow),
        pytest.param("grpo", "qwen3_moe", "tp", "fsdp", marks=pytest.mark.slow),
        pytest.param("grpo", "qwen3_moe", "cp", "replicated", marks=pytest.mark.slow),
    ],
)
def test_two_teams_that_lose_a_member_train_to_the_bits_of_one(
    tmp_path: Path, algorithm: str, arch: str, how: str, strategy: str
):
    """Two teams under `strategy`, and one that is replicated."""
    conf = small(tmp_path)
    more: dict[str, Any] = {"kl": {"coef": 0.01}}
    if algorithm == "grpo":
        more = {"algorithm": "grpo", "group": 4, "kl": {"where": "loss"}, "entropy_coef": 0.01}
    conf["ppo"] = {"batch": 16, "mini_batch": 16, "micro_tokens": 80, "lr": 4e-3, "critic_lr": 4e-3, **more}
    if arch == "qwen3_moe":
        conf["ppo"]["router_aux_coef"] = 0.01
    words = (*tiny.WORDS, "<one>")  # an odd number: neither a team nor FSDP2 cuts it evenly
    conf["model"] = {"path": tiny.write(tmp_path / "small", arch=arch, hidden=32, layers=1, words=words), how: 2}
    if "lora" in strategy:
        conf["model"]["lora"] = {"rank": 4}
    conf["node"] = {"workers": 2}
    with nodes(tmp_path / "one", conf, copies=1) as gang:
        gang.plan("n0", "n1")
        gang.until_done(within_s=120.0)
        expected = outcome(gang)
    if "fsdp" in strategy:
        conf["model"]["strategy"] = "fsdp"  # the same bits
    with nodes(tmp_path / "two", conf, copies=2) as gang:
        gang.plan("n0", "n1", "n2", "n3")
        gang.until_new(1, within_s=120.0)
        gang.kill_worker("n2")
        gang.plan("n0", "n1", "n2", "n3")
        gang.until_done(within_s=120.0)
        assert outcome(gang) == expected


@pytest.mark.parametrize(("how", "dtype"), [("tp", "float32"), ("tp", "bfloat16"), ("cp", "float32")])
def test_a_team_shares_its_reference_whose_files_are_read_once(tmp_path: Path, how: str, dtype: str):
    path = tiny.write(tmp_path / "small", hidden=32, layers=2)
    gang = Workers(2)
    try:
        first, second = gang.run(frozen_parts.through_two_gangs, 2, path=path, how=how, dtype=dtype)
    finally:
        gang.close()
    for found in (first, second):
        assert found["same"], "a later gang's has the same numbers"
        assert found["apart"] < (1e-5 if dtype == "float32" else 0.1)
        assert found["reads"] == 1
        assert found["bytes"] < (0.55 if how == "tp" else 1.01) * found["of"]


@pytest.mark.parametrize("how", ["tp", "cp"])
def test_a_team_makes_no_entropies_that_nobody_asks_for(tmp_path: Path, how: str):
    words = (*tiny.WORDS, *(f"<{number}>" for number in range(31 - len(tiny.WORDS))))
    path = tiny.write(tmp_path / "small", hidden=32, layers=1, words=words)
    gang = Workers(2)
    try:
        members = gang.run(asked_parts.asked, 2, path=path, how=how, words=len(words))
    finally:
        gang.close()
    for with_them, without in members:
        assert (with_them["entropy"], without["entropy"]) == (True, False)
        assert without["same"], "the same bits of log-probabilities and gradients"
        assert 0 < without["looks"] < with_them["looks"], "the logits are looked at less often"
        assert 0 < without["sent"] < with_them["sent"], "and fewer numbers go to the other member"


def test_members_that_share_tokens_generate_the_same_bits(tmp_path: Path):
    """Of one row a product takes another way than of several, and it takes the same one on all members."""
    path = tiny.write(tmp_path / "small", hidden=32, layers=2, words=(*tiny.WORDS, "<one>"))
    gang = Workers(2)
    try:
        first, second = gang.run(frozen_parts.generated, 2, path=path)
    finally:
        gang.close()
    assert first == second
