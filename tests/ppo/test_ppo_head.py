"""Log-probabilities that the head makes part by part: those of whole logits, with their gradients, in less memory."""

import copy
import sys
from pathlib import Path

import pytest
import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

sys.path.insert(0, str(Path(__file__).parents[1] / "runtime"))

from elastic_kit import ending, mixed, nodes, outcome, strike

from elasticrl.config.training import Lora, Model
from elasticrl.ppo import head, models, tiny
from elasticrl.ppo.batches import Block, take
from elasticrl.ppo.roles import Roles

WORDS, ROWS, PROMPT, ANSWER = 512, 3, 6, 9
SHAPE = {
    "vocab_size": WORDS, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2,
}  # fmt: skip
MIXTURE = {
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
MIXTURES = ("Mixtral", "Qwen2Moe", "Qwen3Moe")
KINDS = {name.removesuffix("ForCausalLM"): name for name in head.KINDS}


class Largest(TorchDispatchMode):
    """The numbers of the largest tensor that anything inside made."""

    numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(made):
            if isinstance(leaf, torch.Tensor):
                self.numbers = max(self.numbers, leaf.numel())
        return made


def model(kind="Llama", *, tied=False, dtype=torch.float64):
    more = (MIXTURE if kind in MIXTURES else {}) | ({"head_dim": 4} if "Qwen3" in kind else {})
    config = getattr(transformers, f"{kind}Config")(**SHAPE, **more, tie_word_embeddings=tied)
    torch.manual_seed(3)
    return getattr(transformers, KINDS[kind])(config).to(dtype)


def rows(seed=1):
    g = torch.Generator().manual_seed(seed)
    attention = torch.ones(ROWS, PROMPT + ANSWER, dtype=torch.bool)
    attention[1, :3], attention[2, -4:] = False, False
    tokens = torch.randint(3, WORDS, attention.shape, generator=g)
    found = {"tokens": tokens, "attention": attention, "mask": attention[:, PROMPT:]}
    return take(found, Block(torch.arange(ROWS), PROMPT + ANSWER, ANSWER))


def said(of, *, most, temperature=0.7, entropy=True, slopes=False, dtype="float32"):
    """What is said, the gradients of a loss of it, and the largest tensor's numbers."""
    roles = Roles(model=Model(dtype=dtype), actor=of, temperature=temperature, most_logits=most)
    of.zero_grad()
    with Largest() as largest:
        found = roles.said(of, rows(), entropy=entropy, slopes=slopes)
        g = torch.Generator().manual_seed(9)
        weights = torch.randn(2, ROWS, ANSWER, generator=g).to(found.logprobs.dtype)
        loss = (found.logprobs * weights[0]).sum() + ((found.entropy * weights[1]).sum() if slopes else 0.0)
        loss.backward()
    grads = {name: param.grad.clone() for name, param in of.named_parameters() if param.grad is not None}
    return found, grads, largest.numbers


def alike(one, other, **close):
    torch.testing.assert_close(one[0].logprobs, other[0].logprobs, **close)
    torch.testing.assert_close(one[0].entropy, other[0].entropy, **close)
    assert one[1].keys() == other[1].keys()
    for name, grad in one[1].items():
        torch.testing.assert_close(grad, other[1][name], **close, msg=lambda said, name=name: f"{name}: {said}")


@pytest.mark.parametrize("slopes", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_answers_made_by_parts_are_those_of_whole_logits(kind, slopes):
    # Products of experts have no float64.
    dtype, close = (torch.float32, 1e-5) if kind in MIXTURES else (torch.float64, 1e-9)
    of = model(kind, tied=kind == "Qwen2", dtype=dtype)
    whole, parts = said(of, most=0, slopes=slopes), said(of, most=4 * WORDS, slopes=slopes)
    alike(whole, parts, rtol=close, atol=close)
    assert whole[2] >= ROWS * ANSWER * WORDS
    assert parts[2] < ROWS * ANSWER * WORDS
    assert "forward" not in vars(of.get_output_embeddings())


def test_a_pass_that_has_room_goes_as_a_whole():
    of = model()
    whole, roomy = said(of, most=0), said(of, most=ROWS * ANSWER * WORDS)
    assert all(torch.equal(grad, roomy[1][name]) for name, grad in whole[1].items())


@pytest.mark.parametrize("most", [0, 4 * WORDS])
def test_an_entropy_that_nobody_asks_for_is_not_there_and_changes_no_bit(most):
    of = model(dtype=torch.float32)
    with_it, without = said(of, most=most), said(of, most=most, entropy=False)
    assert with_it[0].entropy is not None
    assert without[0].entropy is None
    assert torch.equal(with_it[0].logprobs, without[0].logprobs)
    assert all(torch.equal(grad, without[1][name]) for name, grad in with_it[1].items())


def test_a_head_with_more_behind_it_is_left_alone():
    config = transformers.Gemma2Config(**SHAPE, head_dim=4, final_logit_softcapping=5.0, query_pre_attn_scalar=4)
    torch.manual_seed(3)
    of = transformers.Gemma2ForCausalLM(config).double()
    alike(said(of, most=0), said(of, most=WORDS), rtol=0, atol=0)


def test_adapters_get_their_gradients_and_the_head_none():
    of = models.with_adapters(model(dtype=torch.float32), Lora(rank=2, targets=("q_proj", "v_proj")), seed=1)
    whole, parts = said(of, most=0), said(of, most=4 * WORDS)
    alike(whole, parts, rtol=1e-5, atol=1e-5)
    assert all("lora" in name for name in parts[1])
    assert parts[2] < ROWS * ANSWER * WORDS


@pytest.mark.parametrize("slopes", [False, True])
def test_in_bfloat16_entropies_are_as_exact_as_those_of_whole_logits(slopes, monkeypatch):
    """On a GPU autocast would make their sums in bfloat16, on a processor it does not: so it is looked for too."""
    of, softened, narrow = model(dtype=torch.float32), head._softened, []

    def looked(logits):
        narrow.append(torch.is_autocast_enabled("cpu"))
        return softened(logits)

    monkeypatch.setattr(head, "_softened", looked)
    whole, parts = (said(of, most=most, dtype="bfloat16", slopes=slopes)[0] for most in (0, WORDS))
    assert parts.entropy.dtype == torch.float32
    torch.testing.assert_close(parts.entropy, whole.entropy, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(parts.logprobs, whole.logprobs, rtol=1e-5, atol=1e-5)
    assert narrow
    assert not any(narrow)


def test_in_bfloat16_the_sums_of_parts_are_not_rounded_in_between():
    of = model(dtype=torch.float32)
    exact = said(copy.deepcopy(of).double(), most=0)[1]["lm_head.weight"]
    whole, parts = (said(of, most=most, dtype="bfloat16")[1]["lm_head.weight"] for most in (0, WORDS))
    off = [float((grad.double() - exact).norm() / exact.norm()) for grad in (whole, parts)]
    assert off[1] < 1.2 * off[0] < 0.05


@pytest.mark.timeout(600)
@pytest.mark.parametrize("strategy", ["replicated", pytest.param("fsdp", marks=pytest.mark.long)])
def test_the_bits_are_the_same_in_a_gang_and_through_a_kill(tmp_path: Path, strategy: str):
    conf = mixed(tmp_path)
    words = (*tiny.WORDS, *(f"w{number}" for number in range(8192 - len(tiny.WORDS))))
    conf["model"]["path"] = tiny.write(tmp_path / "wide", hidden=16, layers=1, heads=2, words=words)
    conf["ppo"]["logits_mib"] = 1
    with nodes(tmp_path / "alone", conf, copies=0) as gang:
        gang.plan("n0")
        gang.until_done()
        undisturbed = outcome(gang)
    with nodes(tmp_path / "killed", conf, strategy=strategy, program="ppo_ends") as gang:
        ending(gang)
        gang.plan("n0", "n1")
        gang.until_sealed(2, within_s=240.0)
        strike(gang, "n1", "update", after_ms=15)
        gang.until_done(within_s=240.0)
        assert outcome(gang) == undisturbed
