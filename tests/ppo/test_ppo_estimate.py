"""What `elasticrl plan` says, against bytes that are there: parameters exactly, activations within a stated factor."""

import math

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from elasticrl.config.training import Lora, Model
from elasticrl.config.tree import Tree
from elasticrl.ppo import estimate, models, shapes, tiny
from elasticrl.ppo.losses import logprobs
from elasticrl.ppo.rollout import weights
from elasticrl.runtime.lanes import Deal
from elasticrl.runtime.optim import AdamW
from elasticrl.runtime.planned import share
from elasticrl.runtime.replicated import Replicated
from elasticrl.runtime.team import local

FACTOR = 1.15  # of what autograd keeps: the formulas leave out positions and masks of a few bytes


def tree(path, **sections):
    plain = {
        "job": {"name": "job", "program": "elasticrl.ppo"},
        "node": {"device": "cpu"},
        "membership": {"min_nodes": 1, "max_nodes": 2},
        "lanes": {"count": 4},
        "vault": {"copies": 0},
        "ppo": {"batch": 64, "mini_batch": 32, "micro_tokens": 40, "epochs": 2},
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


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    return tiny.write(tmp_path_factory.mktemp("mixture"), arch="qwen3_moe", hidden=32, layers=2)


@pytest.mark.parametrize("arch", ["qwen2", "llama", "qwen3_moe"])
def test_parameters_are_counted_exactly(folders, mixture, arch):
    folder = folders.get(arch, mixture)
    shape, model = shapes.read(folder), Model()
    assert shape.count == count(models.actor(model, folder, seed=0))
    assert shape.scorer == count(models.critic(model, folder))
    assert shapes.read(folders["reward"]).reward == count(models.reward_model(model, folders["reward"]))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("arch", ["qwen2", "llama", "qwen3_moe"])
def test_a_reference_takes_the_memory_that_the_plan_says(folders, mixture, arch, dtype):
    folder = folders.get(arch, mixture)
    ref = models.reference(Model(dtype=dtype), folder)
    (line,) = (
        line for line in estimate.read(tree(folder, model={"dtype": dtype})).memory
        if (line.role, line.what) == ("ref", "weights")
    )  # fmt: skip
    assert line.bytes == sum(p.numel() * p.element_size() for p in ref.parameters())


@pytest.mark.parametrize("targets", [(), ("q_proj", "v_proj")])
def test_adapters_are_counted_exactly(folders, targets):
    actor = models.actor(Model(lora=Lora(rank=3, targets=targets)), folders["qwen2"], seed=0)
    shape = shapes.read(folders["qwen2"])
    assert shape.adapters(3, targets) == count(actor, trained=True)
    assert shape.count + shape.adapters(3, targets) == count(actor)


@pytest.mark.parametrize(
    ("arch", "checkpointing"), [("qwen2", False), ("llama", False), ("llama", True), ("qwen3_moe", False)]
)
@pytest.mark.parametrize(("prompt", "answer", "micro"), [(6, 4, 4), (60, 40, 4), (30, 30, 8)])
def test_activations_are_estimated_within_a_factor(tmp_path, arch, checkpointing, prompt, answer, micro):
    path = tiny.write(tmp_path, arch=arch, hidden=64, layers=4, positions=128)
    model = models.actor(Model(gradient_checkpointing=checkpointing), path, seed=0).train()
    rows = {
        "tokens": torch.randint(0, 10, (micro, prompt + answer)),
        "start": torch.full((micro,), prompt),
        "mask": torch.ones(micro, answer, dtype=torch.bool),
    }
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(value):
        storage = value.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage
        return value

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda value: value):
        logits, _ = models.response_logits(model, rows)
        logprobs(logits, rows["tokens"][:, -answer:]).sum()
    found = sum(storage.nbytes() for storage in kept.values())
    shape = shapes.read(path)
    tokens = micro * (prompt + answer)
    said = 4 * shape.saved(tokens, micro * answer, checkpointing=checkpointing)
    if checkpointing:  # the hook sees what is kept, not the one layer that is computed again at a time
        said -= 4 * shape.saved(tokens, 0, checkpointing=False) // shape.layers
        assert found / 2 < said < found * 2
    else:
        assert found / FACTOR < said < found * FACTOR


def test_the_state_of_replicated_is_what_its_formulas_say(folders):
    """Flat weights, gradient rows and both versions of the shard, up to the padding of each parameter to 64 numbers."""
    conf = tree(folders["qwen2"], ppo={"micro_tokens": 20})
    said = {(line.role, line.what): line.bytes for line in estimate.read(conf, workers=1).memory}
    actor = models.actor(conf.model, folders["qwen2"], seed=0)
    strategy = Replicated(actor, lambda _name: AdamW(), deal=Deal.contiguous(32, 1))
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
    assert said["actor", "optimizer"] == pytest.approx(sum(each.nbytes for each in strategy.shard._both), **near)


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
    [(2, {}, 1), (1, {}, 1), (3, {"lanes": {"count": 8}}, 2), (2, {"ppo": {"micro_tokens": 20}}, 1)],
)
def test_the_wire_follows_from_how_lanes_are_dealt(folders, world, sections, trees):
    found = estimate.read(tree(folders["qwen2"], **sections), workers=world)
    sent = {line.what: line.bytes for line in found.wire if line.role == "actor"}
    one = 4 * 4 * shapes.read(folders["qwen2"]).count * (world - 1) / world  # four updates of four bytes each
    assert sent["all_gather"] == math.floor(one)
    assert sent["all_to_all"] == math.floor(trees * one)


def test_under_fsdp_matrices_are_gathered_in_bfloat16_where_a_pass_narrows_them(folders):
    def gathered(**model):
        found = estimate.read(tree(folders["qwen2"], model={"strategy": "fsdp", **model}), workers=2)
        return {line.role: line.bytes for line in found.wire if line.what == "all_gather"}

    wide, narrow, shape = gathered(), gathered(dtype="bfloat16"), shapes.read(folders["qwen2"])
    assert narrow["actor"] / wide["actor"] == pytest.approx(1 - shape.matrices / (2 * shape.count), rel=1e-4)
    layers = shape.layers * sum(linear.count for linear in shape.linears)
    assert narrow["critic"] / wide["critic"] == pytest.approx(1 - layers / (2 * shape.scorer), rel=1e-4)


def test_rollout_nodes_are_sent_all_the_weights_each(folders):
    def lines(**rollout):
        found = estimate.read(tree(folders["qwen2"], rollout={"engine": "served", **rollout}))
        return {line.what: line.bytes for line in found.wire}, {
            budget.phase: budget.seconds for budget in found.budgets
        }

    beside, away = lines(), lines(nodes=2)
    assert "weights" not in beside[0]
    assert away[0]["weights"] == 2 * 4 * shapes.read(folders["qwen2"]).count
    assert away[1]["sync"] > beside[1]["sync"] > 0


def figures(lines):
    return {(line.role, line.what): line.bytes for line in lines}


@pytest.mark.parametrize("strategy", ["replicated", "fsdp", "deepspeed"])
def test_what_is_offloaded_waits_in_the_hosts_memory(folders, strategy):
    def found(offload, device="cuda"):
        placement = {"actor": {"offload": offload}, "ref": {"offload": offload}}
        model = {"strategy": strategy, "zero_stage": 2}
        lanes = {"exact": "warn"}
        conf = tree(folders["qwen2"], node={"device": device}, placement=placement, model=model, lanes=lanes)
        return estimate.read(conf, workers=2)

    here, away = found("none"), found("cpu")
    before, after, host = figures(here.memory), figures(away.memory), figures(away.host)
    left = {"optimizer", "masters"} if strategy == "deepspeed" else {"optimizer"}
    assert before.keys() - after.keys() == {("ref", "weights"), *(("actor", what) for what in left)}
    assert all(host["actor", what] == before["actor", what] for what in left)
    assert before["actor", "gradients"] - after["actor", "gradients"] == host["actor", "gradient"] > 0
    changed = {("actor", "gradients"), ("ref", "weights")} | {("actor", what) for what in left}
    assert {key: value for key, value in before.items() if key not in changed} == {
        key: value for key, value in after.items() if key not in changed
    }
    assert host["ref", "weights, idle"] == before["ref", "weights"] == figures(away.transient)["ref", "weights"]
    assert (("actor", "weights, idle") in host) == (strategy != "deepspeed"), "DeepSpeed's weights stay"
    assert away.peak < here.peak
    assert found("cpu", "cpu") == found("none", "cpu"), "what is in the host's memory has nowhere to go"


def test_an_offloaded_optimizer_is_as_large_on_the_host_as_planned(folders):
    conf = tree(folders["qwen2"], node={"device": "cuda"}, placement={"actor": {"offload": "cpu"}})
    said = figures(estimate.read(conf, workers=1).host)
    actor = models.actor(conf.model, folders["qwen2"], seed=0)
    shard = Replicated(actor, lambda _name: AdamW(), deal=Deal.contiguous(8, 1), offload=True).shard
    assert said["actor", "optimizer"] == pytest.approx(sum(each.nbytes for each in shard._both), rel=0.03)
    assert said["actor", "gradient"] == pytest.approx(shard.grad.nbytes, rel=0.03)
    assert said["actor", "weights, idle"] == sum(param.nbytes for param in actor.parameters())


def test_an_offloaded_reference_leaves_room_for_larger_passes(folders):
    conf = {"ppo": {"batch": 256, "mini_batch": 256, "micro_tokens": 10}, "node": {"device": "cuda"}}
    fixed = estimate.read(tree(folders["qwen2"], **conf), workers=2).fixed

    def largest(offload, limit):
        found = tree(folders["qwen2"], placement={"ref": {"offload": offload}}, **conf)
        return estimate.read(found, workers=2, memory_bytes=int(limit)).largest_micro_tokens

    sizes = [largest(offload, 2 * fixed) for offload in ("none", "cpu")]
    assert 0 < sizes[0] < sizes[1]
    assert largest("none", 1.2 * fixed) is None, "it is not the passes alone that need room: the cache does, too"


def test_a_served_engine_beside_the_worker_has_weights_of_its_own_and_their_file(folders, tmp_path):
    conf = tree(folders["llama"], rollout={"engine": "served"})
    served, plain = estimate.read(conf), estimate.read(tree(folders["llama"]))
    model = models.reference(Model(), folders["llama"])
    nbytes = sum(param.nbytes for param in model.parameters())
    cache = figures(plain.transient)["rollout", "KV cache"]
    more = {("rollout", "engine's weights"): nbytes, ("rollout", "KV cache"): cache}
    assert figures(served.memory) == figures(plain.memory) | more
    assert ("rollout", "KV cache") not in figures(served.transient)
    sent = weights.buckets(model, nbytes=1 << 14, dtype=torch.float32)
    written = weights.write(tmp_path, weights.Tag(life="1", version=0), sent, within_s=1.0)
    assert figures(served.host)["rollout", "file of weights"] == written == (tmp_path / weights.FILE).stat().st_size
    away = estimate.read(tree(folders["llama"], rollout={"engine": "served", "nodes": 2}))
    assert not [line for line in (*away.memory, *away.transient) if line.role == "rollout"]
    assert figures(away.host)["rollout", "file of weights"] == written


def test_vllm_beside_the_worker_takes_its_share_of_the_device(folders):
    def found(memory=None, **vllm):
        conf = tree(folders["llama"], rollout={"engine": "vllm", "vllm": vllm}, model={"dtype": "bfloat16"})
        return estimate.read(conf, memory_bytes=memory)

    def takes(estimated):
        return {what: size for (role, what), size in figures(estimated.memory).items() if role == "rollout"}

    gib, count = 1 << 30, shapes.read(folders["llama"]).count
    assert takes(found(gib, gpu_memory_utilization=0.25)) == {"vllm": gib // 4}
    assert takes(found(gib, kv_cache=gib // 8)) == {"engine's weights": 2 * count, "KV cache": gib // 8}
    assert takes(found(gib, kv_cache=gib // 8, tensor_parallel=2))["engine's weights"] == count
    unsaid = found(gpu_memory_utilization=0.25)
    assert takes(unsaid) == {"engine's weights": 2 * count}
    assert any(note.startswith("vLLM fills 25% of the device") for note in unsaid.notes)
    assert figures(unsaid.host)["rollout", "file of weights"] == 2 * count
    assert not any("vLLM" in note for note in found(gib).notes)
    full = found(gib, gpu_memory_utilization=0.95)
    assert any(f"the peak of {full.peak:,} B is over 90%" in note for note in full.notes)


@pytest.mark.parametrize("strategy", ["replicated", "fsdp"])
def test_a_member_s_figures_are_its_part_of_the_whole(strategy):
    shape = shapes.Shape(layers=2, hidden=64, inner=128, heads=8, kv_heads=8, head=8, words=256)
    asked = ("actor", "weights"), ("critic", "weights"), ("ref", "weights"), ("rollout", "KV cache and weights")

    def found(tp):
        model = {"tp": tp, "strategy": strategy, "dtype": "bfloat16"}
        conf = tree("x", model=model, node={"workers": 8}, lanes={"count": 2}, rollout={"gather": True})
        said = estimate.of(conf, dict.fromkeys(("actor", "critic", "ref"), shape), workers=2 * tp)
        return figures((*said.memory, *said.transient))

    whole, part = found(1), found(8)
    for name in asked:
        assert part.get(name, 0) == pytest.approx(whole.get(name, 0) / 8, rel=1e-3), name
    assert part["ref", "weights"] > 0


def test_an_engine_beside_a_team_has_all_of_the_model_and_of_its_cache(folders):
    def found(tp):
        conf = tree(folders["llama"], model={"tp": tp}, node={"workers": 2}, rollout={"engine": "served"})
        said = figures(estimate.read(conf, workers=2 * tp).memory)
        return said["rollout", "engine's weights"], said["rollout", "KV cache"]

    assert found(2) == found(1)


@pytest.mark.parametrize("targets", [(), ("q_proj", "o_proj")])
def test_a_member_s_adapters_are_counted_exactly(folders, targets):
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        actor = models.actor(Model(lora=Lora(rank=4, targets=targets)), folders["llama"], seed=0)
        share(actor, mesh)
        mine = sum(local(param).numel() for param in actor.parameters() if param.requires_grad)
    finally:
        dist.destroy_process_group()
    shape = shapes.read(folders["llama"])
    assert shape.adapters(4, targets, cuts=2) == mine
    optimizer = figures(
        estimate.read(
            tree(folders["llama"], model={"tp": 2, "lora": {"rank": 4, "targets": targets}}, node={"workers": 2}),
            workers=2,
        ).memory
    )["actor", "optimizer"]
    assert optimizer == 2 * 3 * 4 * mine


def test_a_plan_says_that_a_group_lies_in_several_lanes(tmp_path):
    path = tiny.write(tmp_path, hidden=32, layers=2)
    ppo = {"algorithm": "grpo", "group": 32, "kl": {"where": "loss"}}
    notes = estimate.read(tree(path, ppo=ppo)).notes
    assert any(note.startswith("A group of 32 samples lies in 2 lanes, 16 in each") for note in notes)
    assert not any("lies in" in note for note in estimate.read(tree(path, ppo=ppo | {"group": 16})).notes)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("arch", ["qwen2", "llama"])
def test_copies_of_weights_that_a_backward_pass_reads_are_counted(tmp_path, arch, checkpointing):
    path = tiny.write(tmp_path, arch=arch, hidden=64, layers=4, positions=128)
    how = {"gradient_checkpointing": checkpointing, "dtype": "bfloat16"}
    model = models.actor(Model(**how), path, seed=0).train()
    rows = {
        "tokens": torch.randint(0, 10, (4, 10)),
        "start": torch.full((4,), 6),
        "mask": torch.ones(4, 4, dtype=torch.bool),
    }
    shaped = {shape for p in model.parameters() if p.dim() == 2 for shape in (p.shape, p.shape[::-1])}
    kept: dict[int, int] = {}

    def keep(value):
        if value.dtype == torch.bfloat16 and value.shape in shaped:
            kept[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
        return value

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda value: value), models.computing(Model(**how), "cpu"):
        logits, _ = models.response_logits(model, rows)
        logprobs(logits, rows["tokens"][:, -4:]).sum()

    conf = tree(path, model=how, ppo={"logits_mib": 0})
    (said,) = (
        line.bytes for line in estimate.read(conf).transient if (line.role, line.what) == ("actor", "activations")
    )
    shape, answers = shapes.read(path), 32  # of 40 tokens: of 8 samples at most 4 each
    plain = 2 * shape.saved(40, answers, checkpointing=checkpointing) + 4 * 4 * shape.logits(answers)
    again = sum(linear.count for linear in shape.linears) if checkpointing else 0  # the layer that is made again
    assert said - plain == pytest.approx(sum(kept.values()) + 2 * again, rel=0.01), "but for biases"
