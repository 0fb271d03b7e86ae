"""Roles that are sharded and put away each in its own way: the same bits where all strategies are exact, else close."""

import json
import random
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1] / "runtime"))

from alone import live
from gang_kit import Nodes

from elasticrl.config.training import Lora, Model
from elasticrl.ppo import models, tiny
from elasticrl.ppo.frozen import Word, checksum, odd
from elasticrl.ppo.idle import Idle
from elasticrl.runtime.chronicle import read
from elasticrl.runtime.data.audit import audit

STEPS = 4
AWAY = {"offload": "cpu"}


@pytest.fixture(scope="module")
def conf(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("models")
    chance = random.Random(5)
    (folder / "prompts.jsonl").write_text(
        "\n".join(json.dumps({"prompt": f"{chance.randrange(10_000):04}"}) for _ in range(500))
    )
    return {
        "ppo": {
            "batch": 48, "mini_batch": 24, "micro_tokens": 60, "epochs": 1, "lr": 4e-3, "critic_lr": 4e-3,
            "kl": {"coef": 0.01},
        },
        "model": {"path": tiny.write(folder / "actor", hidden=32, layers=2)},
        "reward": {"model": tiny.write(folder / "reward", arch="llama", hidden=32, layers=1, seed=2, kind="reward")},
        "rollout": {"max_tokens": 4},
        "data": {"path": str(folder / "prompts.jsonl"), "max_prompt": 6},
    }  # fmt: skip


def trained(folder: Path, conf: dict[str, Any], *present: str, kill: str = "", **sections: Any) -> tuple[Any, Any]:
    """(digests, notes of each step). With 4 lanes for 3 workers, some play ghosts."""
    conf = {**conf, **{name: {**conf.get(name, {}), **more} for name, more in sections.items()}}
    copies = min(1, len(present) - 1)
    with Nodes(folder, steps=STEPS, lanes=4, program="elasticrl.ppo.__main__", conf=conf, copies=copies) as gang:
        gang.env["ELASTICRL_HISTORY"] = str(folder / "history")
        gang.plan(*present)
        if kill:
            gang.until_sealed(1)
            gang.kill_worker(kill)
            gang.plan(*present)
        gang.until_done(within_s=120.0)
        used = audit(gang.run_dir)
        assert used.ok, used.sentence
        assert (used.steps, used.samples) == (STEPS, STEPS * 48)
        notes = [json.loads(line) for line in (folder / "history").read_text().splitlines()]
        return dict(read(gang.run_dir).steps), notes


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory, conf: dict[str, Any]) -> tuple[Any, Any]:
    """Everything replicated, one worker."""
    return trained(tmp_path_factory.mktemp("plain"), conf, "n0")


def test_each_role_in_its_own_way_gives_the_same_bits(tmp_path: Path, conf, plain):
    placement = {
        "actor": {"strategy": "replicated", **AWAY}, "critic": {"strategy": "fsdp", **AWAY},
        "ref": {"strategy": "fsdp", **AWAY}, "reward": {"strategy": "fsdp", **AWAY},
    }  # fmt: skip
    found, _ = trained(tmp_path, conf, "n0", "n1", "n2", placement=placement, kill="n1")
    assert found == plain[0]


def test_in_bfloat16_two_workers_come_to_one_s_bits_and_an_actor_begins_at_its_reference(tmp_path: Path, conf):
    """Of two sharded roles matrices are gathered in bfloat16, and for answers, which are generated in float32, they are not."""
    narrow = {**conf["model"], "dtype": "bfloat16"}
    apart = {role: {"strategy": "fsdp"} for role in ("actor", "critic", "ref", "reward")}
    alone, notes = trained(tmp_path / "one", conf, "n0", model=narrow)
    both, _ = trained(tmp_path / "two", conf, "n0", "n1", model=narrow, placement=apart, kill="n1")
    assert both == alone
    assert notes[0]["kl"] == 0.0 < notes[-1]["kl"]


@pytest.mark.parametrize("strategy", ["replicated", "fsdp", pytest.param("deepspeed", marks=pytest.mark.slow)])
def test_sharded_models_are_gone_before_the_next_generation_builds_its_own(tmp_path: Path, conf, strategy: str):
    critic = {"strategy": "replicated" if strategy == "replicated" else "fsdp", **AWAY}
    placement = {"actor": {"strategy": strategy}, "critic": critic, "ref": {"strategy": "fsdp", **AWAY}}
    with Nodes(
        tmp_path, steps=STEPS, lanes=4, program="ppo_ends", conf={**conf, "placement": placement}, copies=1
    ) as gang:
        gang.plan("n0", "n1")
        gang.until_sealed(1)
        gang.kill_worker("n1")
        gang.plan("n0", "n1")
        gang.until_new(1)
        made = re.findall(r"(.*) built beside (\d) (\w+)", gang.workers["n0"].text)
        again = {"replicated": [], "fsdp": ["outlined", "outlined"], "deepspeed": ["whole", "outlined"]}[strategy]
        ref = ("ref", "0", "whole")
        assert made == [*[("a role", "0", "whole") for _ in again], ref, *[("a role", "0", how) for how in again], ref]


@pytest.mark.parametrize("strategy", ["replicated", "fsdp"])
def test_a_node_that_reads_another_reference_is_named_and_left_out(tmp_path: Path, conf, plain, strategy: str):
    ref = tmp_path / "ref"
    shutil.copytree(conf["model"]["path"], ref)
    conf = {**conf, "model": {**conf["model"], "ref_path": str(ref)}, "placement": {"ref": {"strategy": strategy}}}
    with Nodes(tmp_path, steps=STEPS, lanes=4, program="elasticrl.ppo.__main__", conf=conf, copies=1) as gang:
        gang.plan("n0", "n1")
        gang.until_sealed(1)
        gang.kill_worker("n1")
        tiny.write(ref, hidden=32, layers=2, seed=1)  # as a hub whose model was changed
        gang.plan("n0", "n1")
        who = "rank 1 (n1)" if strategy == "replicated" else "rank 0 (n0), rank 1 (n1)"  # where all read it again
        said = f"of ref, read from {ref}, are others than the job has computed with on {who}."
        for worker in (gang.workers["n0"], gang.workers["n1"]):
            gang.until(lambda worker=worker: said in worker.text, said, 60.0)
        gang.workers["n1"].process.join(60)
        if strategy == "fsdp":
            assert "Misuse: The frozen weights" in gang.workers["n1"].text
            return
        assert "OtherFiles: The frozen weights" in gang.workers["n1"].text
        gang.lose("n1")
        gang.plan("n0")
        gang.until_done()
        assert dict(read(gang.run_dir).steps) == plain[0]


def test_a_gang_of_fresh_workers_knows_what_the_job_has_computed_with(tmp_path: Path, conf):
    ref = tmp_path / "ref"
    shutil.copytree(conf["model"]["path"], ref)
    conf = {**conf, "model": {**conf["model"], "ref_path": str(ref)}}
    with Nodes(tmp_path, steps=STEPS, lanes=4, program="elasticrl.ppo.__main__", conf=conf, copies=1) as gang:
        gang.plan("n0", "n1")
        gang.until_sealed(1)
        for name in ("n0", "n1"):
            gang.kill_worker(name)
        tiny.write(ref, hidden=32, layers=2, seed=1)
        gang.plan("n0", "n1")  # from the vaults, which have outlived all that had seen it
        said = f"Misuse: The frozen weights of ref, read from {ref}, are others than the job has computed with on rank 0 (n0), "
        for worker in (gang.workers["n0"], gang.workers["n1"]):
            gang.until(lambda worker=worker: said in worker.text, said, 60.0)


def test_the_base_under_adapters_is_compared_and_what_trains_is_not(conf):
    path, config = conf["model"]["path"], Model(lora=Lora(rank=2))
    sums = [checksum(models.actor(config, path, seed=seed)) for seed in (0, 1)]
    assert sums[0] == sums[1] is not None
    other = models.actor(config, path, seed=0)
    next(p for p in other.parameters() if not p.requires_grad).data.view(-1)[5] += 1e-3
    assert checksum(other) != sums[0]
    assert checksum(models.actor(Model(), path, seed=0)) is None
    tied = models.actor(Model(), path, seed=0)
    tied.lm_head.weight = tied.get_input_embeddings().weight
    assert checksum(tied) is None, "one tensor under two names"


def test_whose_frozen_weights_are_odd_is_said_by_who_has_computed_else_by_most():
    a, b, c = (Word(node="n", here={"ref": number}, proven={}) for number in (5, 6, 7))
    old = replace(b, proven={"ref": 6})
    assert odd([a, a, a]) == {}
    assert odd([a, a, b]) == {"ref": (2,)}
    assert odd([a, b]) == {"ref": (0, 1)}
    assert odd([a, a, old]) == {"ref": (0, 1)}
    assert odd([replace(a, proven={"ref": 6}), old, c]) == {"ref": (0, 2)}
    assert odd([replace(a, here={}), b]) == {"ref": (0, 1)}


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "away"), [(1, {}), (2, AWAY), (3, AWAY)])
def test_an_actor_under_deepspeed_beside_an_exact_critic_is_close(tmp_path: Path, conf, plain, stage: int, away):
    placement = {"actor": {"strategy": "deepspeed", **away}, "ref": {"strategy": "fsdp"}}
    model = {"zero_stage": stage}
    _, notes = trained(tmp_path, conf, "n0", "n1", "n2", placement=placement, model=model, kill="n1")
    for name in ("reward", "kl"):  # the sums' last bits, as test_zero has them, and no token sampled otherwise for it
        assert [note[name] for note in notes] == pytest.approx([note[name] for note in plain[1]], rel=1e-5)


def test_what_no_stage_needs_is_away_and_what_trains_is_back_after_each_stage():
    ref, actor = nn.Linear(2, 2), nn.Linear(2, 2)
    idle = Idle({"ref": ref, "actor": actor}, frozen=("ref",))
    for role in ("rollout", "actor", "ref", "job", "actor"):
        with idle.but(role):
            pass
    assert idle.moves == {"ref": 2, "actor": 2}  # frozen ones stay away until they are needed


def test_a_frozen_model_that_is_away_comes_back_in_the_next_generation():
    ref, reward, anew = nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)
    whole = {model: [p.detach().clone() for p in model.parameters()] for model in (ref, reward, anew)}
    elsewhere = {"frozen": ("ref", "reward"), "host": "nowhere"}  # so that what is on the CPU is moved, as from a GPU
    first = Idle({"ref": ref, "reward": reward}, **elsewhere)
    with first.but("ref"), first.but("actor"):
        assert not any(p.untyped_storage().nbytes() for model in (ref, reward) for p in model.parameters())
    second = Idle({"ref": ref, "reward": anew}, copies=first.copies, **elsewhere)  # the reward model was sharded
    with second.but("actor"):
        assert second.moves == {"ref": 0, "reward": 1}
    third = Idle({"ref": ref, "reward": anew}, copies=second.copies, **elsewhere)
    with third.but("ref+reward"):
        for model in (ref, anew):
            assert all(map(torch.equal, model.parameters(), whole[model]))


SHARDED = """
import sys
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from elasticrl.config.training import Model
from elasticrl.ppo import models
from elasticrl.ppo.frozen import layered

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
config = Model(dtype=sys.argv[2])
model = layered(models.reference(config, sys.argv[1]), DeviceMesh.from_group(dist.group.WORLD, "cpu"))
with torch.no_grad(), models.computing(config, "cpu"):
    model(input_ids=torch.tensor([[1, 2, 3]]))
kinds = [isinstance(param, DTensor) for layer in model.model.layers for param in layer.parameters()]
print(len(kinds), "sharded", all(kinds), flush=True)
"""


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])  # where layers have parameters of two types
def test_a_frozen_model_s_layers_are_sharded_again_after_they_have_computed(tmp_path: Path, conf, dtype: str):
    (tmp_path / "sharded.py").write_text(SHARDED)
    life = live(tmp_path / "sharded.py", conf["model"]["path"], dtype)
    assert life.returncode == 0, life.stderr
    assert life.stdout.endswith(" sharded True\n"), life.stdout


def test_a_fault_in_a_stage_brings_back_what_trains():
    idle = Idle({"actor": nn.Linear(2, 2)})
    with pytest.raises(KeyError), idle.but("reward"):
        raise KeyError
    with idle.but("reward"):
        assert idle.moves == {"actor": 2}
