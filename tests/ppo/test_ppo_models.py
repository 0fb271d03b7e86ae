"""Roles through transformers: what is loaded, what is trained, what is written."""

import json
import resource
import shutil
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import product
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import peft
import pytest
import torch
import torch.distributed as dist
import transformers
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    GenerationConfig,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForTokenClassification,
    LlamaPreTrainedModel,
    MixtralConfig,
    MixtralForCausalLM,
    Phi3Config,
)
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding

from elasticrl.config.training import Lora, Model
from elasticrl.config.tree import Tree
from elasticrl.ppo import models, tiny
from elasticrl.ppo.__main__ import shards
from elasticrl.ppo.batches import Block, take
from elasticrl.ppo.rollout.inline import left_padded
from elasticrl.runtime import reading
from elasticrl.runtime.buffers import Buffers
from elasticrl.runtime.fsdp import Fsdp, give_memory
from elasticrl.runtime.lanes import Deal
from elasticrl.runtime.misuse import Misuse
from elasticrl.runtime.optim import AdamW
from elasticrl.runtime.outline import outlined
from elasticrl.runtime.reading import Unreadable
from elasticrl.runtime.spread import strategy_for
from elasticrl.runtime.team import local


def test_a_model_with_another_tokenizer_than_the_actor_s_is_refused(tmp_path):
    words = (*tiny.WORDS[1:10], tiny.WORDS[0], *tiny.WORDS[10:])  # the digits in another order
    other, same = (
        tiny.write(tmp_path / name, kind="reward", words=its) for name, its in (("other", words), ("same", tiny.WORDS))
    )
    bare = tmp_path / "bare"
    bare.mkdir()
    models.check_tokens(tiny.tokenizer(), same, "reward.model")
    models.check_tokens(tiny.tokenizer(), str(bare), "reward.model")
    models.check_tokens(
        tiny.tokenizer((*tiny.WORDS, "<more>")), same, "reward.model"
    )  # as some classes add of themselves
    with pytest.raises(models.ModelError, match=r"reward\.model.* has another tokenizer .*10 are others to it \('0'"):
        models.check_tokens(tiny.tokenizer(), other, "reward.model")


def test_dropout_does_not_act_in_updates_alone(tmp_path):
    config = GPT2Config(vocab_size=14, n_positions=16, n_embd=16, n_layer=1, n_head=2, resid_pdrop=0.1, embd_pdrop=0.1)
    GPT2LMHeadModel(config).save_pretrained(tmp_path)
    actor = models.actor(Model(), str(tmp_path), seed=0)
    tokens = torch.tensor([[1, 2, 3]])
    with torch.no_grad():
        assert torch.equal(actor.train()(tokens).logits, actor.eval()(tokens).logits)


@pytest.fixture
def rows():
    tokens, attention = left_padded([(12, 1, 2, 13), (12, 3, 13)], 5, 10)
    response = torch.tensor([[2, 1, 11], [3, 11, 10]])
    mask = torch.tensor([[True, True, True], [True, True, False]])
    found = {"tokens": torch.cat([tokens, response], 1), "attention": torch.cat([attention, mask], 1), "mask": mask}
    return take(found, Block(torch.arange(2), 8, 3))


@pytest.mark.parametrize("arch", ["qwen2", "llama"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_logits_and_values_are_of_the_state_before_each_response_token(folders, rows, arch, attention):
    model = Model(attention=attention)
    actor, critic = models.actor(model, folders[arch], seed=0), models.critic(model, folders[arch])
    torch.nn.init.normal_(critic.score.weight)
    with torch.no_grad():
        logits, none = models.response_logits(actor, rows)
        values = models.response_values(critic, rows)
        assert none is None
        for i in range(2):
            real = rows["tokens"][i][rows["attention"][i]][None]  # without padding: what the padded row must equal
            count = int(rows["mask"][i].sum())
            alone = actor(input_ids=real).logits[0, -count - 1 : -1]
            torch.testing.assert_close(logits[i, :count], alone, rtol=0, atol=1e-5)
            torch.testing.assert_close(
                values[i, :count], critic(input_ids=real).logits[0, -count - 1 : -1, 0], rtol=0, atol=1e-5
            )


def test_a_fresh_critic_values_everything_at_zero_and_a_saved_one_keeps_its_head(folders, rows, tmp_path):
    critic = models.critic(Model(), folders["qwen2"])
    assert not models.response_values(critic, rows).any()
    torch.nn.init.normal_(critic.score.weight)
    models.export(critic, tmp_path / "critic")
    again = models.critic(Model(), str(tmp_path / "critic"))
    assert torch.equal(models.response_values(critic, rows), models.response_values(again, rows))


def test_a_critic_that_begins_as_a_reward_model_keeps_its_trained_head(folders, rows):
    reward = models.reward_model(Model(), folders["reward"])
    critic = models.critic(Model(), folders["reward"])
    assert reward.score.weight.any()
    assert torch.equal(critic.score.weight, reward.score.weight)
    assert not critic.score.bias.any(), "which a reward model's head has not"
    assert models.response_values(critic, rows).any()


def test_an_exported_actor_and_tied_head_load_as_they_were(folders, rows, tmp_path):
    tied = models.actor(Model(value_head="tied"), folders["qwen2"], seed=0)
    torch.nn.init.normal_(tied.value_head.weight)
    logits, values = models.response_logits(tied, rows)
    assert values.shape == (2, 3)
    models.export(tied, tmp_path / "tied", models.tokenizer(folders["qwen2"]))
    again = models.actor(Model(value_head="tied"), str(tmp_path / "tied"), seed=1)
    for x, y in zip((logits, values), models.response_logits(again, rows), strict=True):
        assert torch.equal(x, y)
    plain = models.actor(Model(), str(tmp_path / "tied"), seed=1)  # the head is beside it, not in the way
    assert torch.equal(models.response_logits(plain, rows)[0], logits)


def test_only_trained_roles_are_trained_and_what_is_frozen_is_narrow(folders, rows):
    model = Model(dtype="bfloat16")
    judge, actor = models.reward_model(model, folders["reward"]), models.actor(model, folders["qwen2"], seed=0)
    assert not any(p.requires_grad for p in judge.parameters())
    assert {p.dtype for p in judge.parameters()} == {torch.bfloat16}
    assert {p.dtype for p in actor.parameters()} == {torch.float32}
    with models.computing(model, "cpu"):
        assert models.response_logits(actor, rows)[0].dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("arch", ["qwen2", "llama", "tied", "gpt2"])
def test_the_reference_computes_bit_for_bit_what_the_actor_does_before_its_first_update(
    folders, rows, tmp_path, arch, dtype
):
    path = folders.get(arch, str(tmp_path))
    if arch == "tied":  # one matrix is both embedding and head
        config = LlamaConfig.from_pretrained(folders["llama"], tie_word_embeddings=True)
        LlamaForCausalLM(config).save_pretrained(path)
    if arch == "gpt2":  # its matrices are no Linear
        config = GPT2Config(
            vocab_size=32, n_positions=16, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=1
        )
        GPT2LMHeadModel(config).save_pretrained(path)
    model = Model(dtype=dtype)
    ref, actor = models.reference(model, path), models.actor(model, path, seed=0)
    assert not any(p.requires_grad for p in ref.parameters())
    with torch.no_grad(), models.computing(model, "cpu"):
        assert torch.equal(*(models.response_logits(each, rows)[0] for each in (ref, actor)))
    narrow = sum(p.numel() for p in ref.parameters() if p.dtype == torch.bfloat16)
    assert (narrow > 0.5 * sum(p.numel() for p in ref.parameters())) is (dtype == "bfloat16")


def test_gradient_checkpointing_changes_no_gradient(folders, rows):
    grads = []
    for on in (False, True):
        actor = models.actor(Model(gradient_checkpointing=on), folders["qwen2"], seed=0).train()
        models.response_logits(actor, rows)[0].square().mean().backward()
        grads.append([p.grad for p in actor.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_a_reward_model_reads_the_last_attended_token_whatever_padding_follows(folders):
    model = models.reward_model(Model(), folders["reward"])
    tokens, attention = torch.tensor([[12, 1, 2, 11, 10, 10]]), torch.tensor([[True] * 4 + [False] * 2])
    scores = models.whole_scores(model, tokens, attention)
    torch.testing.assert_close(scores, models.whole_scores(model, tokens[:, :4], attention[:, :4]), rtol=0, atol=1e-5)
    assert scores.any()


def test_a_model_with_a_state_from_token_to_token_is_refused_in_a_sentence(tmp_path):
    config = transformers.MambaConfig(hidden_size=16, num_hidden_layers=1, vocab_size=16, state_size=4)
    transformers.MambaForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(models.ModelError, match="carry a state from token to token"):
        models.actor(Model(attention="eager"), str(tmp_path), seed=0)


def test_a_mixture_of_experts_is_known_by_its_configuration(folders, tmp_path):
    transformers.Qwen3MoeConfig(hidden_size=16, num_hidden_layers=1, num_experts=4).save_pretrained(tmp_path)
    assert models.has_experts(str(tmp_path))
    assert not models.has_experts(folders["qwen2"])


def test_a_model_that_cannot_serve_says_why(folders, tmp_path):
    with pytest.raises(models.ModelError, match="has no score head, so it is not a reward model"):
        models.reward_model(Model(), folders["qwen2"])
    with pytest.raises(models.ModelError, match="cannot be loaded"):
        models.actor(Model(), str(tmp_path), seed=0)
    with pytest.raises(models.ModelError, match=r"lacks \d+ weights"):
        models.actor(Model(), folders["reward"], seed=0)


def test_a_hub_that_is_not_reached_is_no_model_without_the_file(tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    away = "http://127.0.0.1:9/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", away)
    monkeypatch.setattr(time, "sleep", lambda _: None)  # the hub's client tries again for half a minute
    cached, commit = tmp_path / "models--maker--model", "0" * 40
    for place in (cached / "snapshots" / commit, cached / "refs", cached / ".no_exist" / commit):
        place.mkdir(parents=True)
    (cached / "refs" / "main").write_text(commit)
    (cached / "snapshots" / commit / "config.json").write_text("{}")
    tokens = SimpleNamespace(eos_token_id=11)
    with pytest.raises(models.ModelError, match=r"whether maker/model has a generation_config.json is not known here"):
        models.ends("maker/model", tokens)
    with monkeypatch.context() as offline:
        offline.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
        assert models.ends("maker/model", tokens) == (11,), "the cache is the model"
    (cached / ".no_exist" / commit / models.GENERATION_FILE).touch()  # as the hub has said before
    assert models.ends("maker/model", tokens) == (11,)
    (cached / ".no_exist" / commit / models.GENERATION_FILE).unlink()
    (cached / "snapshots" / commit / models.GENERATION_FILE).write_text('{"eos_token_id": [3, 11]}')
    assert models.ends("maker/model", tokens) == (11, 3)


@pytest.mark.parametrize("code", ["EntryNotFound", ""])  # the hub, and a mirror that only knows numbers
def test_a_hub_that_says_there_is_no_such_file_is_believed(tmp_path, monkeypatch, code):
    class Hub(BaseHTTPRequestHandler):
        def do_HEAD(self):
            self.send_response(404)
            self.send_header("X-Error-Code", code)
            self.end_headers()

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as hub:
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
        there = f"http://127.0.0.1:{hub.server_port}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", there)
        threading.Thread(target=hub.serve_forever, daemon=True).start()
        assert not models.has("maker/model", models.GENERATION_FILE)
        hub.shutdown()


def test_adapters_train_alone_and_the_reference_is_the_model_without_them(folders, rows, tmp_path):
    model = Model(lora=Lora(rank=2, alpha=4.0))
    plain = models.response_logits(models.actor(Model(), folders["qwen2"], seed=0), rows)[0]
    actor = models.actor(model, folders["qwen2"], seed=5)
    trained = {name: p for name, p in actor.named_parameters() if p.requires_grad}
    assert trained
    assert all(".lora_" in name for name in trained)
    twin = dict(models.actor(model, folders["qwen2"], seed=5).named_parameters())
    assert all(torch.equal(p, twin[name]) for name, p in trained.items())
    for name, p in trained.items():
        if "lora_B" in name:
            torch.nn.init.normal_(p)
    changed = models.response_logits(actor, rows)[0]
    assert not torch.equal(changed, plain)
    with models.without_adapters(actor):
        assert torch.equal(models.response_logits(actor, rows)[0], plain)
    models.export(actor, tmp_path / "merged")
    merged = models.response_logits(models.actor(Model(), str(tmp_path / "merged"), seed=0), rows)[0]
    torch.testing.assert_close(merged, changed, rtol=0, atol=1e-4)
    torch.testing.assert_close(models.response_logits(actor, rows)[0], changed, rtol=0, atol=1e-5)


def asked(rope: nn.Module, *lengths: int) -> None:
    """Puts texts of these lengths through it, one in each step."""
    found = Buffers("actor")
    found.begin(rope, ())
    for length in lengths:
        rope(torch.zeros(1), torch.arange(length)[None])
        found.check()


def test_rope_with_other_frequencies_for_long_texts_is_let_be_and_one_that_remembers_them_is_not():
    size = {"hidden_size": 8, "num_attention_heads": 1, "max_position_embeddings": 16}
    long = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    rope = Phi3RotaryEmbedding(Phi3Config(**size, original_max_position_embeddings=8, rope_parameters=long))
    short = rope.inv_freq
    asked(rope, 4, 9, 12, 4, 9)
    assert not torch.equal(rope.inv_freq, short)
    dynamic = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    asked(LlamaRotaryEmbedding(LlamaConfig(**size, rope_parameters=dynamic)), 4, 16)
    with pytest.raises(Misuse, match="The buffer inv_freq of actor has changed"):
        asked(LlamaRotaryEmbedding(LlamaConfig(**size, rope_parameters=dynamic)), 4, 17)


def tied(tmp_path, *, own_head: bool):
    """The folder of a model whose configuration ties its head; with its `own_head` its files hold another one all the same."""
    config = LlamaConfig(
        vocab_size=14, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2,
        tie_word_embeddings=not own_head,
    )  # fmt: skip
    made = LlamaForCausalLM(config)
    made.config.tie_word_embeddings = True
    weights = {name: value.clone() for name, value in made.state_dict().items() if own_head or "lm_head" not in name}
    made.config.save_pretrained(tmp_path)
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    return str(tmp_path)


def filled(outlined, whole):
    """An outline with the weights of a whole model."""
    assert all(param.is_meta for param in outlined.parameters())
    named = dict(whole.named_parameters())
    assert [*named] == [name for name, _ in outlined.named_parameters()], "what is tied is tied"
    for name, param in outlined.named_parameters():
        assert (param.shape, param.dtype, param.requires_grad) == (named[name].shape, named[name].dtype, True)
    for module, like in zip(outlined.modules(), whole.modules(), strict=True):
        for name in module._parameters:
            module._parameters[name] = like._parameters[name]
    return outlined


@pytest.mark.parametrize(
    ("arch", "role"),
    [("gpt2", "actor"), ("gpt2", "tied"), *product(["qwen2", "llama", "tied"], ["actor", "tied", "critic"])],
)
def test_a_model_without_its_weights_is_otherwise_the_one_that_is_read(folders, rows, tmp_path, arch, role):
    if arch == "gpt2":
        config = GPT2Config(vocab_size=14, n_positions=16, n_embd=16, n_layer=1, n_head=2, resid_pdrop=0.1)
        GPT2LMHeadModel(config).save_pretrained(tmp_path / arch)
        path = str(tmp_path / arch)
    else:
        path = tied(tmp_path / arch, own_head=False) if arch == "tied" else folders[arch]
    GenerationConfig(eos_token_id=[3, 4], max_length=77).save_pretrained(path)
    model = Model(value_head="separate" if role != "tied" else "tied", gradient_checkpointing=True)

    def made(weights: models.Weights):
        if role == "critic":
            return models.critic(model, path, weights=weights)
        return models.actor(model, path, seed=0, weights=weights)

    whole, outlined = made("read"), made("filled")
    if role == "tied":
        whole_body, body = whole.actor, filled(outlined.actor, whole.actor)
        assert torch.equal(whole.value_head.weight, outlined.value_head.weight)
    else:
        whole_body, body = whole, filled(outlined, whole)
    assert body.config.to_dict() == whole_body.config.to_dict()
    assert body.training is whole_body.training is False
    assert body.is_gradient_checkpointing is whole_body.is_gradient_checkpointing is True
    buffers = dict(whole_body.named_buffers())
    assert [name for name, _ in body.named_buffers()] == [*buffers]
    assert all(torch.equal(buffer, buffers[name]) for name, buffer in body.named_buffers())
    ask = models.response_values if role == "critic" else models.response_logits
    with torch.no_grad():
        said, expected = ask(outlined, rows), ask(whole, rows)
    if role == "critic":
        said, expected = (said, None), (expected, None)
    assert torch.equal(said[0], expected[0])
    assert (said[1] is None) == (expected[1] is None) == (role != "tied")
    for name, found in (("whole", whole), ("outlined", outlined)):
        models.export(found, tmp_path / name)
    files = [{file.name: file.read_bytes() for file in (tmp_path / name).iterdir()} for name in ("whole", "outlined")]
    assert files[0].keys() == files[1].keys()
    assert files[0] == files[1]


def test_what_is_more_than_weights_is_read(tmp_path, folders):
    path = tied(tmp_path / "untied", own_head=True)
    actor = models.actor(Model(), path, seed=0, weights="filled")
    assert not any(param.is_meta for param in actor.parameters()), "both are in its files, so they are not tied"
    assert not torch.equal(actor.lm_head.weight, actor.model.embed_tokens.weight)
    with pytest.raises(Unreadable, match="each of two weights that the model ties"):
        reading.read(outline_of(path), path)
    adapted = models.actor(Model(lora=Lora(rank=2)), folders["qwen2"], seed=0, weights="filled")
    assert not any(param.is_meta for param in adapted.parameters()), "nobody fills what is not trained"
    config = DeepseekV3Config(
        vocab_size=14, hidden_size=16, intermediate_size=32, moe_intermediate_size=8, num_hidden_layers=2, n_routed_experts=4,
        num_attention_heads=2, num_key_value_heads=2, first_k_dense_replace=1, n_group=2, topk_group=1, num_experts_per_tok=2,
        kv_lora_rank=8, q_lora_rank=8, qk_rope_head_dim=4, v_head_dim=8, qk_nope_head_dim=4,
    )  # fmt: skip
    DeepseekV3ForCausalLM(config).save_pretrained(tmp_path / "moe")
    routed = models.actor(Model(), str(tmp_path / "moe"), seed=0, weights="filled")
    assert not any(param.is_meta for param in routed.parameters()), "a buffer of its is in its files"
    with pytest.raises(Unreadable, match=r"e_score_correction_bias is no parameter but a buffer"):
        reading.read(outline_of(tmp_path / "moe"), tmp_path / "moe")


def outline_of(folder):
    """A model as a script's builder makes it, without weights."""
    with outlined():
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))


def test_names_that_are_changed_in_a_part_of_a_model_alone_are_not_guessed():
    class Pair(LlamaPreTrainedModel):
        def __init__(self, config, inner):
            super().__init__(config)
            self.inner = inner

    size = {
        "vocab_size": 14, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
        "num_key_value_heads": 2,
    }  # fmt: skip
    inner = MixtralForCausalLM(MixtralConfig(**size, num_local_experts=2))
    assert reading.blocks_of(inner, {}) == {}
    assert reading.blocks_of(Pair(LlamaConfig(**size), inner), {}) is None


@contextmanager
def mesh_of(rank, world):
    """A mesh of so many ranks, of which only one is there: enough for cutting a model up."""
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    try:
        yield init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
    finally:
        dist.destroy_process_group()


@pytest.mark.long
@pytest.mark.parametrize(
    ("arch", "role", "value_head"),
    [
        ("gpt2", "actor", "separate"), ("gpt2", "actor", "tied"), ("narrow", "actor", "separate"),
        *product(["qwen2", "llama", "tied"], ["actor"], ["separate", "tied"]),
        ("llama", "critic", "separate"), ("tied", "critic", "separate"),
    ],
)  # fmt: skip
def test_each_rank_reads_its_own_rows_and_they_are_those_of_the_model_that_is_read(
    folders, tmp_path, arch, role, value_head
):
    if arch == "gpt2":
        config = GPT2Config(vocab_size=14, n_positions=16, n_embd=16, n_layer=1, n_head=2)
        GPT2LMHeadModel(config).save_pretrained(tmp_path)
        path = str(tmp_path)
    elif arch == "narrow":  # its files are of bfloat16, and several
        made = LlamaForCausalLM.from_pretrained(folders["llama"], dtype=torch.bfloat16)
        made.save_pretrained(tmp_path, max_shard_size="20KB")
        assert len([*tmp_path.glob("*.safetensors")]) > 1
        path = str(tmp_path)
    else:
        path = tied(tmp_path, own_head=False) if arch == "tied" else folders[arch]
    model = Model(value_head=value_head)

    def cut(rank, weights):
        def make():
            if role == "critic":
                return models.critic(model, path, weights=weights)
            return models.actor(model, path, seed=0, weights=weights)

        def fill(made):
            assert any(param.is_meta for param in made.parameters()) == (weights == "later")
            if weights == "later":
                give_memory(made, "cpu")
                models.fill(made, path)

        with mesh_of(rank, 3) as mesh:
            return {name: param.to_local() for name, param in shards(make, fill)(mesh).named_parameters()}

    for rank in range(3):
        whole, rows = cut(rank, "read"), cut(rank, "later")
        assert [*whole] == [*rows]
        assert all(torch.equal(rows[name], local) for name, local in whole.items())


def test_a_builder_that_leaves_out_what_nobody_fills_is_told(folders):
    def build(fills, trains, anchored=False):
        def made(mesh):
            found = models.actor(Model(), folders["qwen2"], seed=0, weights="filled")
            if anchored:
                found.register_buffer("anchor", found.lm_head.weight.detach().clone())
            found.get_output_embeddings().requires_grad_(trains)
            return shards(lambda: found)(mesh)

        with mesh_of(0, 2) as mesh:
            return Fsdp(
                made, lambda _name: AdamW(lr=0.1), deal=Deal.interleaved(2, 2), rank=0, group=mesh.get_group(), fills=fills
            )  # fmt: skip

    assert not build(fills=True, trains=True).shard.state.any()
    with pytest.raises(Misuse, match=r"1 parameters have no memory \(lm_head.weight, .*\) and do not train"):
        build(fills=True, trains=False)
    with pytest.raises(
        Misuse, match=r"there is nothing yet that they are filled with: build them whole unless run\.fills"
    ):
        build(fills=False, trains=True)


def test_a_builder_that_obeys_is_asked_to_read_what_does_not_train(folders):
    with mesh_of(0, 2) as mesh:
        conf = Tree.model_validate({"job": {"name": "job"}, "model": {"strategy": "fsdp"}})
        gang = SimpleNamespace(rank=0, world=2, group=mesh.get_group())
        place = SimpleNamespace(team=1)
        generation: Any = SimpleNamespace(place=place, gang=gang, team=None, tokens=None, fills=True)
        told = []

        def build(trains):
            def made(mesh):
                told.append(generation.fills)
                found = models.actor(
                    Model(), folders["qwen2"], seed=0, weights="filled" if generation.fills else "read"
                )
                found.get_output_embeddings().requires_grad_(trains)
                return shards(lambda: found)(mesh)

            return made

        context: Any = SimpleNamespace(tree=conf, device="cpu")
        deal = Deal.interleaved(2, 2)
        for trains, expected in ((True, [True]), (False, [True, False])):
            told.clear()
            generation.fills = True
            role: Any = SimpleNamespace(given=build(trains), rule_of=lambda _name: AdamW(lr=0.1))
            built = strategy_for("actor", role, context, generation, deal=deal, shard=None, fills=True)
            assert told == expected
            assert not any(param.is_meta for param in built.model.parameters())
        whole = models.actor(Model(), folders["qwen2"], seed=0).lm_head.weight
        assert torch.equal(local(built.model.lm_head.weight), whole[: len(whole) // 2])


def test_what_trains_and_is_not_cut_over_the_gang_is_told():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head = nn.Linear(4, 6), nn.Linear(6, 4)

    def outside(mesh):
        model = Two()
        fully_shard(model.body, mesh=mesh)
        return model

    def columns(mesh):
        return fully_shard(Two(), mesh=mesh, shard_placement_fn=lambda param: Shard(param.ndim - 1))

    def another(_mesh):
        return fully_shard(Two(), mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard")))

    for build, said in (
        (outside, r"2 parameters that train are no part of what fully_shard put together \(head\.weight, "),
        (columns, r"body\.weight is cut along dimension 1"),
        (another, r"body\.weight is not cut over all 2 ranks of the gang"),
    ):
        with mesh_of(0, 2) as mesh, pytest.raises(Misuse, match=said):
            Fsdp(build, lambda _name: AdamW(lr=0.1), deal=Deal.interleaved(2, 2), rank=0, group=mesh.get_group())


def rewritten(folder, **config):
    """Its configuration, with some values of others'."""
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))
    return str(folder)


@pytest.mark.parametrize("weights", ["later", "filled"])
def test_what_is_read_otherwise_than_by_name_is_read_whole(tmp_path, folders, weights):
    def outlined(path):
        return any(param.is_meta for param in models.actor(Model(), path, seed=0, weights=weights).parameters())

    plain = shutil.copytree(folders["llama"], tmp_path / "plain")
    assert outlined(str(plain))
    named = shutil.copytree(plain, tmp_path / "named")
    other = {name: tensor + 1 for name, tensor in load_file(plain / "model.safetensors").items()}
    save_file(other, named / "other.safetensors", {"format": "pt"})
    assert not outlined(rewritten(named, transformers_weights="other.safetensors"))
    quantized = rewritten(shutil.copytree(plain, tmp_path / "quantized"), quantization_config={"quant_method": "fp8"})
    config = AutoConfig.from_pretrained(quantized)
    assert models._outline(AutoModelForCausalLM, quantized, Model(), config, weights) is None, "codes, and no weights"
    adapted = shutil.copytree(plain, tmp_path / "adapted")
    peft.get_peft_model(LlamaForCausalLM.from_pretrained(plain), peft.LoraConfig(r=2)).save_pretrained(adapted)
    assert not outlined(str(adapted)), "an adapter lies beside it"
    neox = GPTNeoXConfig(
        vocab_size=14,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        tie_word_embeddings=True,
    )
    GPTNeoXForCausalLM(neox).save_pretrained(tmp_path / "neox")
    stored = {
        name.replace("lm_head", "embed_out"): value
        for name, value in load_file(tmp_path / "neox/model.safetensors").items()
    }
    stored["embed_out.weight"] = stored["gpt_neox.embed_in.weight"] + 1
    save_file(stored, tmp_path / "neox/model.safetensors", {"format": "pt"})
    assert not outlined(str(tmp_path / "neox")), "its files have a head by another name, which is not tied then"


def test_rows_that_are_no_longer_there_are_missed(tmp_path, folders):
    path = shutil.copytree(folders["llama"], tmp_path / "model")

    def cut(spoil):
        def fill(made):
            give_memory(made, "cpu")
            spoil()
            models.fill(made, str(path))

        with mesh_of(0, 2) as mesh:
            shards(lambda: models.actor(Model(), str(path), seed=0, weights="later"), fill)(mesh)

    file = path / "model.safetensors"
    weights = load_file(file)
    narrow = {name: value.to(torch.float8_e4m3fn) for name, value in weights.items()}
    with pytest.raises(models.ModelError, match="is another one than as the model was made"):
        cut(lambda: save_file(narrow, file, {"format": "pt"}))
    save_file(weights, file, {"format": "pt"})
    fewer = {name: value for name, value in weights.items() if name != "lm_head.weight"}
    with pytest.raises(
        models.ModelError, match=r"lacks 1 weights that it had as the model was made \(lm_head.weight, "
    ):
        cut(lambda: save_file(fewer, file, {"format": "pt"}))
    save_file(weights, file, {"format": "pt"})
    with pytest.raises(models.ModelError, match=r"lacks \d+ weights that it had as the model was made"):
        cut(file.unlink)


def test_a_head_for_more_than_one_value_is_no_critic_s(tmp_path, folders):
    two = LlamaForTokenClassification.from_pretrained(folders["llama"], num_labels=2)
    two.save_pretrained(tmp_path)
    for weights in ("read", "later"):
        with pytest.raises((models.ModelError, RuntimeError)):
            models.critic(Model(), str(tmp_path), weights=weights)


def test_a_parameter_of_two_names_stays_one_and_nothing_is_written_in_its_place():
    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            table = nn.Parameter(torch.ones(3, 2))
            self.inp, self.out, self.big = table, table, nn.Linear(1 << 14, 1 << 15)

    torch.use_deterministic_algorithms(mode=True)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        with outlined():
            made = Shared()
        assert torch.utils.deterministic.fill_uninitialized_memory
    finally:
        torch.use_deterministic_algorithms(mode=False)
    assert made.inp is made.out
    assert made.inp.shape == (3, 2)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 20, "of 2 GiB"


@pytest.mark.parametrize(
    ("more", "steady"),
    [
        ({}, True),
        ({"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}}, False),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4}}, False),
        ({"num_experts": 4}, False),
    ],
)
def test_what_an_engine_says_is_taken_only_of_models_that_say_the_same_alone_and_in_company(
    more: dict[str, object], steady: bool
) -> None:
    text = SimpleNamespace(**more)
    assert models.steady(SimpleNamespace(get_text_config=lambda: text)) is steady
