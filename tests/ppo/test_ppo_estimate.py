"""What `elasticrl plan` says, against bytes that are there: parameters exactly, activations within a stated factor."""

import math

import pytest
import torch

from elasticrl.config.training import Lora, Model
from elasticrl.config.tree import Tree
from elasticrl.ppo import estimate, models, shapes, tiny
from elasticrl.ppo.losses import logprobs
from elasticrl.runtime.lanes import Deal
from elasticrl.runtime.optim import AdamW
from elasticrl.runtime.replicated import Replicated

FACTOR = 1.15  # of what autograd keeps: the formulas leave out positions and masks of a few bytes


def tree(path, **sections):
    plain = {
        "job": {"name": "job", "program": "elasticrl.ppo"},
        "node": {"device": "cpu"},
        "membership": {"min_nodes": 1, "max_nodes": 2},
        "lanes": {"count": 4},
        "vault": {"copies": 0},
        "ppo": {"batch": 64, "mini_batch": 32, "micro_batch": 4, "epochs": 2},
        "model": {"path": str(path)},
        "reward": {"function": "elasticrl.ppo.tasks:reverse"},
        "rollout": {"max_tokens": 4},
        "data": {"path": "x", "max_prompt": 6},
    }
    for name, values in sections.items():
        plain.setdefault(name, {}).update(values)
    return Tree.model_validate(plain)


def count(model, *, trained=False):
    return sum(p.numel() for p in model.parameters() if p.requires_grad or not trained)


@pytest.mark.parametrize("arch", ["qwen2", "llama"])
def test_parameters_are_counted_exactly(folders, arch):
    shape, model = shapes.read(folders[arch]), Model()
    assert shape.count == count(models.actor(model, folders[arch], seed=0))
    assert shape.scorer == count(models.critic(model, folders[arch]))
    assert shapes.read(folders["reward"]).reward == count(models.reward_model(model, folders["reward"]))


@pytest.mark.parametrize("targets", [(), ("q_proj", "v_proj")])
def test_adapters_are_counted_exactly(folders, targets):
    actor = models.actor(Model(lora=Lora(rank=3, targets=targets)), folders["qwen2"], seed=0)
    shape = shapes.read(folders["qwen2"])
    assert shape.adapters(3, targets) == count(actor, trained=True)
    assert shape.count + shape.adapters(3, targets) == count(actor)


@pytest.mark.parametrize(("arch", "checkpointing"), [("qwen2", False), ("llama", False), ("llama", True)])
@pytest.mark.parametrize(("prompt", "answer", "micro"), [(6, 4, 4), (60, 40, 4), (30, 30, 8)])
def test_activations_are_estimated_within_a_factor(tmp_path, arch, checkpointing, prompt, answer, micro):
    path = tiny.write(tmp_path, arch=arch, hidden=64, layers=4, positions=128)
    model = models.actor(Model(gradient_checkpointing=checkpointing), path, seed=0).train()
    rows = {
        "tokens": torch.randint(0, 10, (micro, prompt + answer)),
        "attention": torch.ones(micro, prompt + answer, dtype=torch.bool),
        "mask": torch.ones(micro, answer, dtype=torch.bool),
    }
    rows["attention"][0, :2] = False
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(value):
        storage = value.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage
        return value

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda value: value):
        logits, _ = models.response_logits(model, rows)
        logprobs(logits, rows["tokens"][:, -answer:]).sum()
    found = sum(storage.nbytes() for storage in kept.values())
    shape = shapes.read(path)
    said = 4 * micro * shape.saved(prompt + answer, answer, head=True, checkpointing=checkpointing)
    if checkpointing:  # the hook sees what is kept, not the one layer that is computed again at a time
        said -= 4 * micro * shape.saved(prompt + answer, answer, head=False, checkpointing=False) // shape.layers
        assert found / 2 < said < found * 2
    else:
        assert found / FACTOR < said < found * FACTOR


def test_the_state_of_replicated_is_what_its_formulas_say(folders):
    """Flat weights, gradient rows and both versions of the shard, up to the padding of each parameter to 64 numbers."""
    conf = tree(folders["qwen2"], ppo={"micro_batch": 2})
    said = {(line.role, line.what): line.bytes for line in estimate.read(conf, workers=1).memory}
    actor = models.actor(conf.model, folders["qwen2"], seed=0)
    strategy = Replicated(actor, lambda _name: AdamW(), deal=Deal.contiguous(16, 1))
    tokens = torch.zeros(2, 10, dtype=torch.long)
    for turn in strategy.turns:
        strategy.begin(turn)
        actor(input_ids=tokens).logits.sum().backward()
        strategy.done()
    strategy.reduce()
    flat = sum(row.nbytes for row in strategy._flat)
    rows = sum(row.flat.nbytes for spare in strategy._spare for row in spare) + strategy.shard.grad.nbytes
    near = {"rel": 0.03}
    assert said["actor", "weights"] == pytest.approx(flat, **near)
    assert said["actor", "gradients"] == pytest.approx(rows, **near)
    assert said["actor", "optimizer"] == pytest.approx(strategy.shard._both.nbytes, **near)


def test_the_cache_is_what_generation_keeps(folders):
    conf = tree(folders["llama"])
    said = next(line.bytes for line in estimate.read(conf).transient if line.role == "rollout")
    model = models.reference(Model(), folders["llama"])
    with torch.no_grad():
        cache = model(input_ids=torch.zeros(16, 10, dtype=torch.long), use_cache=True).past_key_values
    kept = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    assert said == kept * (1 + 1 / len(cache.layers))


@pytest.mark.parametrize(
    ("world", "sections", "trees"),
    [(2, {}, 1), (1, {}, 1), (3, {"lanes": {"count": 8}}, 2), (2, {"ppo": {"micro_batch": 2}}, 1)],
)
def test_the_wire_follows_from_how_lanes_are_dealt(folders, world, sections, trees):
    found = estimate.read(tree(folders["qwen2"], **sections), workers=world)
    sent = {line.what: line.bytes for line in found.wire if line.role == "actor"}
    one = 4 * 4 * shapes.read(folders["qwen2"]).count * (world - 1) / world  # four updates of four bytes each
    assert sent["all_gather"] == math.floor(one)
    assert sent["all_to_all"] == math.floor(trees * one)


def test_rollout_nodes_are_sent_all_the_weights_each(folders):
    def lines(**rollout):
        found = estimate.read(tree(folders["qwen2"], rollout={"engine": "served", **rollout}))
        return {line.what: line.bytes for line in found.wire}, {
            budget.phase: budget.seconds for budget in found.budgets
        }

    beside, away = lines(), lines(nodes=2)
    assert "weights" not in beside[0]
    assert away[0]["weights"] == 2 * 4 * shapes.read(folders["qwen2"]).count
    assert away[1]["sync"] > beside[1]["sync"] == 0.0
