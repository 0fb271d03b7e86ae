"""Products of a few rows: each row has its bits by itself, so answers of several blocks share a pass and nobody sees it."""

from dataclasses import replace

import pytest
import torch
from ppo_job import job
from torch import nn
from torch.nn.functional import linear

from elasticrl.config.training import Model
from elasticrl.ppo import models, tiny
from elasticrl.ppo.rollout import inline, products
from elasticrl.ppo.rollout.engine import Request, Sampling
from elasticrl.ppo.rollout.inline import TorchEngine
from elasticrl.ppo.rollout.lean import Lean

EOS, PAD = tiny.WORDS.index(tiny.EOS), tiny.WORDS.index(tiny.PAD)
SAMPLING = Sampling(prompt_tokens=9, max_tokens=24, rows=16, eos=(EOS,), pad=PAD)
SHAPES = [(384, 384), (1024, 320), (96, 100), (77, 333), (1, 32), (32, 1), (4097, 64)]
here = pytest.mark.skipif(not products.alike(), reason="this processor has no such products")


@here
@pytest.mark.parametrize(("outer", "inner"), SHAPES)
@pytest.mark.parametrize("keep", [True, False])
def test_a_row_has_its_bits_by_itself(outer, inner, keep):
    module, chance = nn.Linear(inner, outer), torch.Generator().manual_seed(outer)
    x = torch.randn(70, 1, inner, generator=chance)
    with torch.no_grad():
        whole = products.Product(module, keep=True)(x)
        its = products.Product(module, keep=keep)
        for rows in (*range(1, 20), 31, 64, 69):
            assert torch.equal(its(x[:rows]), whole[:rows]), rows
            assert torch.equal(its(x[70 - rows :]), whole[70 - rows :]), rows
        assert torch.equal(its(x[3, 0]), whole[3, 0])
        assert torch.allclose(whole, linear(x, module.weight, module.bias), atol=1e-4)


def test_what_is_no_plain_product_stays_torch_s():
    module = nn.Linear(4, 3).double()
    x = torch.randn(2, 4, dtype=torch.float64)
    with torch.no_grad():
        assert torch.equal(products.Product(module, keep=True)(x), linear(x, module.weight, module.bias))
        assert products.Product(module, keep=True)(x[:0]).shape == (0, 3)


@here
def test_a_model_s_products_are_its_own_again_afterwards():
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    model[2].forward = odd = lambda x: x  # somebody else's
    x = torch.randn(3, 8)
    with torch.no_grad():
        before = model(x)
        with products.quick(model, keep=True) as apart:
            assert apart
            assert isinstance(model[0].forward, products.Product)
            assert model[2].forward is odd
            assert torch.allclose(model(x), before, atol=1e-6)
            model[0].weight.mul_(2)  # it is packed already: who changes weights leaves first
        assert "forward" not in vars(model[0])
        assert torch.equal(model(x), model[1](linear(x, model[0].weight, model[0].bias)))


@pytest.fixture(scope="module", params=[("qwen2", 64, 4), ("llama", 40, 4), ("qwen2", 36, 2)], ids=str)
def actor(request, tmp_path_factory):
    arch, hidden, heads = request.param
    folder = tiny.write(tmp_path_factory.mktemp("model"), arch=arch, hidden=hidden, heads=heads, positions=64)
    return models.actor(Model(), folder, seed=0)


def asked(block, count, seed):
    return [
        Request(
            id=f"{block}{i}",
            prompt=tuple((i + k) % 10 for k in range(1 + i * 5 % 9)),
            seed=seed + i,
            width=9,
            block=block,
        )
        for i in range(count)
    ]


@here
def test_blocks_that_share_a_pass_have_the_bits_that_each_has_alone(actor, monkeypatch):
    blocks = [asked("a", 12, 1000), asked("b", 5, 2000), asked("c", 16, 3000), asked("d", 1, 4000)]
    shared = []
    lean = Lean.__call__
    monkeypatch.setattr(Lean, "__call__", lambda self, its: shared.append(len(its)) or lean(self, its))
    engine = TorchEngine(actor, SAMPLING)
    beside = engine.generate([one for block in blocks for one in block], version=0)
    assert max(shared) == 4
    assert len(shared) > 10, "the model's own pass judged the shared one wrong, and took its place"
    alone = [engine.generate(block, version=0) for block in blocks]
    for name in ("tokens", "attention", "mask", "logprobs", "ended"):
        assert torch.equal(getattr(beside, name), torch.cat([getattr(one, name) for one in alone])), name
    assert len(set(beside.mask.sum(1).tolist())) > 5, "answers that are alike in length prove little"


@here
def test_the_model_s_own_passes_have_the_lean_ones_bits(actor, monkeypatch):
    wanted = TorchEngine(actor, SAMPLING).generate(asked("a", 12, 1000), version=0)
    monkeypatch.setattr(Lean, "of", lambda _: None)
    for lockstep in (False, True):
        found = TorchEngine(actor, SAMPLING, lockstep=lockstep).generate(asked("a", 12, 1000), version=0)
        assert torch.equal(found.tokens, wanted.tokens)
        assert torch.equal(found.logprobs, wanted.logprobs)


def test_without_such_products_each_block_has_passes_of_its_own(actor, monkeypatch):
    monkeypatch.setattr(products, "alike", lambda: False)
    shared, crowds = [], inline.crowds
    monkeypatch.setattr(inline, "crowds", lambda sizes, most: shared.append(most) or crowds(sizes, most))
    both = [*asked("a", 6, 1000), *asked("b", 6, 2000)]
    found = TorchEngine(actor, SAMPLING).generate(both, version=0)
    assert shared == [1]
    alone = TorchEngine(actor, replace(SAMPLING)).generate(both[6:], version=0)
    assert torch.equal(found.logprobs[6:], alone.logprobs)


@here
def test_a_worker_s_lanes_share_passes_in_a_step_and_its_bits_are_those_of_lanes_that_do_not(folders, monkeypatch):
    shared, lean = [], Lean.__call__
    monkeypatch.setattr(Lean, "__call__", lambda self, its: shared.append(len(its)) or lean(self, its))

    def made():
        shared.clear()
        trainer, run = job(folders["qwen2"])
        report = trainer.step(0)
        return run.digest(), dict(report.metrics)

    wanted = made()
    assert max(shared) == 4, "no two lanes shared a pass"
    assert len(shared) > 1, "the model's own pass judged the shared one wrong, and took its place"
    monkeypatch.setattr(TorchEngine, "crowds", lambda _, sizes: [[at] for at in range(len(sizes))])
    assert made() == wanted
    assert set(shared) == {1}
