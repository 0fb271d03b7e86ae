"""The torch engine: what is sampled depends on the request and the weights, and on nothing else."""

import copy
import json
import shutil
from collections import Counter
from dataclasses import replace
from itertools import chain

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from elasticrl.config.training import Model
from elasticrl.config.tree import Tree
from elasticrl.ppo import models, tiny
from elasticrl.ppo.__main__ import shards
from elasticrl.ppo.batches import Block, take
from elasticrl.ppo.losses import logprobs
from elasticrl.ppo.roles import response
from elasticrl.ppo.rollout import weights
from elasticrl.ppo.rollout.configured import sampling_of
from elasticrl.ppo.rollout.engine import Request, Sampling, StaleWeights
from elasticrl.ppo.rollout.inline import PARTS, TorchEngine, draw
from elasticrl.runtime.interrupt import GangError

GAP = 1e-5  # nats, float32: between the cached forward passes of generation and the trainer's whole one (1e-7 to 1e-6 seen)
EOS, PAD = 11, 10
SAMPLING = Sampling(prompt_tokens=7, max_tokens=6, rows=16, eos=(EOS,), pad=PAD)


def requests(count, start=0):
    return [
        Request(id=str(i), prompt=tuple((i + k) % 10 for k in range(1 + i % 7)), seed=1000 + i, width=min(7, 2 + i % 7))
        for i in range(start, start + count)
    ]


def as_wide(count, width):
    return [replace(request, width=width) for request in requests(count)]


def row(samples, name):
    i = samples.ids.index(name)
    return [getattr(samples, part)[i] for part in ("tokens", "attention", "mask", "logprobs", "ended")]


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.fixture(scope="module", params=["qwen2", "llama"])
def actor(request, folders):
    return models.actor(Model(), folders[request.param], seed=0)


def test_a_sample_is_bitwise_the_same_alone_and_in_any_batch(actor):
    engine = TorchEngine(actor, SAMPLING)
    whole = engine.generate(requests(40), version=0)
    lengths = whole.mask.sum(1)
    assert len(set(lengths.tolist())) > 1, "no sample ended early: the test would prove less than it says"
    backwards = engine.generate(requests(40)[::-1], version=0)
    for i in (0, 3, 17, 39):
        alone = engine.generate(requests(1, i), version=0)
        few = engine.generate([*requests(3, 20), *requests(1, i), *requests(7, 5)], version=0)
        for other in (alone, few, backwards):
            assert same(row(whole, str(i)), row(other, str(i))), i


def test_a_narrow_prompt_makes_the_same_sample_but_for_its_last_bits(actor):
    engine = TorchEngine(actor, SAMPLING)
    wide, narrow = (engine.generate(asked, version=0) for asked in (as_wide(30, 0), requests(30)))
    assert torch.equal(wide.tokens, narrow.tokens)
    assert torch.equal(wide.attention, narrow.attention)
    assert (wide.logprobs - narrow.logprobs).abs().max() < GAP


def test_each_token_that_the_model_itself_ends_with_ends_an_answer(folders, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(folders["qwen2"], folder)
    path, tokenizer = str(folder), models.tokenizer(folders["qwen2"])
    (folder / models.GENERATION_FILE).write_text(json.dumps({"eos_token_id": [3, EOS]}))
    tree = Tree.model_validate({"job": {"name": "j"}, "model": {"path": path}, "rollout": {"max_tokens": 6}})
    sampling = sampling_of(tree, tokenizer)
    assert sampling.eos == (EOS, 3)
    engine = TorchEngine(models.actor(Model(), path, seed=0), replace(sampling, prompt_tokens=7, rows=16))
    samples = engine.generate(requests(40), version=0)
    last = samples.tokens[torch.arange(40), 7 + samples.mask.sum(1) - 1]
    assert {3, EOS} <= set(last[samples.ended].tolist())
    (folder / models.GENERATION_FILE).unlink()
    assert sampling_of(tree, tokenizer).eos == (EOS,)


def blocks(count, *, most=7, prompts=7):
    """Of a lane, with prompts of unlike lengths."""
    return [
        Request(
            id=str(i),
            prompt=tuple((i + k) % 10 for k in range(1 + i * 5 % prompts)),
            seed=1000 + i,
            width=most,
            block="a",
        )
        for i in range(count)
    ]


def test_a_block_makes_the_samples_that_its_requests_make_by_themselves_but_for_their_last_bits(actor):
    sampling = replace(SAMPLING, max_tokens=40)
    asked, passes = blocks(12), []
    handle = actor.register_forward_pre_hook(
        lambda _, __, given: passes.append(tuple(given["input_ids"].shape)), with_kwargs=True
    )
    block = TorchEngine(actor, sampling).generate(asked, version=0)
    handle.remove()
    alone = TorchEngine(actor, sampling).generate([replace(r, block="") for r in asked], version=0)
    assert torch.equal(block.tokens, alone.tokens)
    assert torch.equal(block.mask, alone.mask)
    assert (block.logprobs - alone.logprobs).abs().max() < GAP
    prompts, answers = [shape for shape in passes if shape[1] > 1], [rows for rows, width in passes if width == 1]
    assert sum(rows for rows, _ in prompts) == 12
    assert answers == sorted(answers, reverse=True)
    assert answers[0] >= 9, "nobody has left"
    assert answers[-1] <= 3, "who has ended has not left"


def test_a_block_has_the_same_bits_whatever_else_is_asked_for_and_where_passes_are_collectives(actor):
    sampling = replace(SAMPLING, max_tokens=30)
    asked = blocks(12)
    wanted = TorchEngine(actor, sampling).generate(asked, version=0)
    others = [replace(r, id=f"{r.id}b", seed=r.seed + 77, block="b") for r in blocks(9)]
    mixed = [one for pair in zip(asked, [*others, *others[:3]], strict=True) for one in pair]
    mixed = list(dict.fromkeys(mixed))
    beside = TorchEngine(actor, sampling).generate(mixed, version=0)
    passes = []
    handle = actor.register_forward_hook(lambda *_: passes.append(1))
    joined = TorchEngine(actor, sampling, lockstep=True).generate(asked, version=0)
    handle.remove()
    assert len(passes) == PARTS - 1 + sampling.max_tokens
    for i in range(12):
        for found in (beside, joined):
            assert same(row(wanted, str(i)), row(found, str(i))), i


def test_prompts_of_a_block_go_through_the_model_by_their_lengths(actor):
    sampling = replace(SAMPLING, prompt_tokens=48)
    passes = []
    handle = actor.register_forward_pre_hook(
        lambda _, __, given: passes.append(tuple(given["input_ids"].shape)), with_kwargs=True
    )
    asked = blocks(16, most=48, prompts=48)
    TorchEngine(actor, sampling).generate(asked, version=0)
    handle.remove()
    prompts = [shape for shape in passes if shape[1] > 1]
    assert 1 < len(prompts) <= PARTS
    assert sum(rows * width for rows, width in prompts) < 0.75 * 16 * 48


def test_a_request_s_seed_makes_its_sample_and_another_seed_another(actor):
    engine = TorchEngine(actor, SAMPLING)
    once = engine.generate(requests(16), version=0)
    assert same(row(once, "3"), row(engine.generate(requests(16), version=0), "3"))
    other = engine.generate([replace(r, seed=r.seed + 1) for r in requests(16)], version=0)
    assert not torch.equal(once.tokens, other.tokens)


def test_lockstep_makes_as_many_passes_whatever_ends_and_the_same_samples(actor):
    calls = []
    handle = actor.register_forward_hook(lambda *_: calls.append(1))
    wanted = TorchEngine(actor, SAMPLING).generate(as_wide(9, 7), version=0)
    counts = []
    for asked in (as_wide(9, 7), as_wide(1, 3), []):  # a lane's prompts have one width
        calls.clear()
        found = TorchEngine(actor, SAMPLING, lockstep=True).generate(asked, version=0)
        counts.append(len(calls))
        if len(asked) == 9:
            assert torch.equal(found.tokens, wanted.tokens)
    handle.remove()
    assert counts == [PARTS - 1 + SAMPLING.max_tokens] * 3
    assert found.tokens.shape == (0, 13)


def test_who_is_wanted_elsewhere_leaves_at_the_next_token(actor):
    calls = []

    def check():
        calls.append(1)
        if len(calls) == 3:
            raise GangError("another plan")

    passes = []
    handle = actor.register_forward_hook(lambda *_: passes.append(1))
    with pytest.raises(GangError):
        TorchEngine(actor, SAMPLING, check=check).generate(requests(9), version=0)
    handle.remove()
    assert len(passes) == 2


@pytest.fixture
def mesh(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_the_weights_of_a_tied_actor_are_sent_after_a_pass_too(tmp_path, mesh):
    """Found by reading: FSDP's root is the actor with its head, and stays whole after a pass."""
    tied = models.actor(Model(value_head="tied"), tiny.write(tmp_path / "tied"), seed=0)
    whole = {name: param.detach().clone() for name, param in tied.actor.named_parameters()}
    cut = shards(lambda: tied)(mesh)
    mask = torch.ones(8, 4, dtype=torch.bool)
    tokens = torch.ones(8, 6, dtype=torch.long)
    with torch.no_grad():
        models.response_logits(cut, {"tokens": tokens, "start": torch.full((8,), 2), "mask": mask})
    sent = dict(chain.from_iterable(weights.buckets(cut.actor, nbytes=1 << 30, dtype=torch.float32, within=cut)))
    assert sent.keys() == whole.keys()
    assert all(torch.equal(sent[name], whole[name]) for name in whole)


def test_who_only_joins_in_putting_weights_together_keeps_none_of_them(actor, mesh, monkeypatch):
    """Found by reading: every rank copied all of the weights to its host, and threw them away."""
    cut, copied = shards(lambda: copy.deepcopy(actor))(mesh), []
    monkeypatch.setattr(torch.Tensor, "cpu", lambda it: copied.append(it.numel()) or it)
    wanted = list(weights.buckets(cut, nbytes=1 << 12, dtype=torch.float32))
    assert sum(copied) >= sum(param.numel() for param in actor.parameters())
    copied.clear()
    joined = list(weights.buckets(cut, nbytes=1 << 12, dtype=torch.float32, kept=False))
    assert len(joined) == len(wanted) > 1, "as many collectives"
    assert not any(joined)
    assert not copied


def test_what_fsdp_puts_together_stays_so_while_it_generates_and_is_cut_up_again_after(actor, mesh):
    wanted = TorchEngine(actor, SAMPLING).generate(as_wide(9, 7), version=0)
    cut = copy.deepcopy(actor)
    layers = next(module for module in cut.modules() if isinstance(module, nn.ModuleList))
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(cut, mesh=mesh)
    together = []  # at the beginning of each pass: whether the layers are
    cut.register_forward_pre_hook(lambda *_: together.append(not any(cut_up(layer) for layer in layers)))
    engine = TorchEngine(cut, SAMPLING, lockstep=True, whole=True)
    for asked, passes in ((as_wide(9, 7), None), (requests(1)[:0], 1)):
        together.clear()
        found = engine.generate(asked, version=0)
        assert together == [False] + [True] * (len(together) - 1)
        assert passes in {None, len(together)}, "nobody waits for more"
        assert all(cut_up(layer) for layer in layers)
        if asked:
            assert torch.equal(found.tokens, wanted.tokens)
            assert torch.equal(found.logprobs, wanted.logprobs)
    together.clear()
    engine.whole = False
    assert torch.equal(engine.generate(as_wide(9, 7), version=0).tokens, wanted.tokens)
    assert together == [False] * (PARTS - 1 + SAMPLING.max_tokens)
    cut.train()
    cut(input_ids=torch.ones(1, 4, dtype=torch.long)).logits.sum().backward()  # as a trainer goes on


def cut_up(layer):
    return all(isinstance(param, DTensor) for param in layer.parameters())


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_are_the_trainer_s_within_the_stated_gap(actor, temperature):
    sampling = replace(SAMPLING, temperature=temperature)
    samples = TorchEngine(actor, sampling).generate(requests(32), version=0)
    whole = {"tokens": samples.tokens, "attention": samples.attention, "mask": samples.mask}
    rows = take(whole, Block(torch.arange(32), 13, 6))
    with torch.no_grad():
        logits, _ = models.response_logits(actor, rows)
    trainer = logprobs(logits, response(rows), temperature)
    assert ((trainer - samples.logprobs)[samples.mask]).abs().max() < GAP
    assert not samples.logprobs[~samples.mask].any()


def test_a_response_ends_with_its_end_token_and_is_padding_after_it(actor):
    samples = TorchEngine(actor, replace(SAMPLING, max_tokens=12)).generate(requests(32), version=0)
    for tokens, mask, ended in zip(samples.tokens[:, 7:].tolist(), samples.mask, samples.ended.tolist(), strict=True):
        length = int(mask.sum())
        assert mask[:length].all()
        assert (tokens[length - 1] == EOS) == ended
        assert EOS not in tokens[: length - 1]
        assert set(tokens[length:]) <= {PAD}
        assert ended or length == 12
    assert 0 < samples.ended.sum() < 32


def test_stale_weights_do_not_generate(actor):
    engine = TorchEngine(actor, SAMPLING)
    engine.publish(7)
    assert engine.generate(requests(1), version=7).version == 7
    with pytest.raises(StaleWeights, match="version 8 were asked for, the engine has 7"):
        engine.generate(requests(1), version=8)


def test_tokens_come_as_often_as_their_probability_says():
    p = torch.tensor([0.5, 0.3, 0.15, 0.05])
    noise = (torch.arange(10_000, dtype=torch.float64) + 0.5) / 10_000
    logits = p.log().expand(len(noise), 4)

    def shares(**how):
        drawn = Counter(draw(logits, noise, replace(SAMPLING, **how)).tolist())
        return [round(drawn[token] / len(noise), 3) for token in range(4)]

    assert shares() == [0.5, 0.3, 0.15, 0.05]
    assert shares(top_k=2) == [0.625, 0.375, 0, 0]
    assert shares(top_p=0.6) == [0.625, 0.375, 0, 0]
    assert shares(top_p=0.5) == [1, 0, 0, 0]
    assert shares(top_k=3, top_p=0.9) == pytest.approx([0.526, 0.316, 0.158, 0], abs=0.001)
    assert shares(temperature=0.0) == [1, 0, 0, 0]
    assert shares(temperature=0.5)[0] == pytest.approx(0.25 / 0.365, abs=0.001)


def test_the_edges_of_the_noise_never_draw_what_has_no_probability():
    logits = torch.tensor([[-torch.inf, 0.0, -torch.inf]]).expand(2, 3)
    edges = torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64)
    assert draw(logits, edges, SAMPLING).tolist() == [1, 1]
    assert draw(logits, edges, replace(SAMPLING, top_p=0.9)).tolist() == [1, 1]
