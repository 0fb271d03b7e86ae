"""Models of transformers, cut by their own plans: a team computes what one process does."""

from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import planned_job
import pytest
import torch
from forked_workers import Workers

from elasticrl.runtime.misuse import Misuse
from elasticrl.runtime.vocabulary import loss, picked

GENERATION = count(1)
CLOSE = 2e-5  # sums are taken in another order


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    gang = Workers(2)
    yield gang
    gang.close()


@pytest.mark.parametrize("alike", [False, True])
@pytest.mark.parametrize("experts", ["eager", "grouped_mm", "batched_mm"])
def test_experts_that_are_dealt_compute_the_same_in_each_of_their_ways(workers: Workers, experts: str, alike: bool):
    how = {"kind": "mixtral", "experts": experts, "alike": alike}
    first, second = workers.run(planned_job.compare, 2, generation=next(GENERATION), **how)
    first.pop("elements"), second.pop("elements"), first.pop("of"), second.pop("of")
    assert first == second, "the members see the same"
    assert {name: apart for name, apart in first.items() if apart > CLOSE} == {}


@pytest.mark.parametrize("kind", planned_job.KINDS)
def test_a_team_computes_what_one_process_does_and_each_member_has_about_half(workers: Workers, kind: str):
    first, second = workers.run(planned_job.compare, 2, generation=next(GENERATION), kind=kind)
    elements = first.pop("elements"), second.pop("elements")
    whole = first.pop("of")
    second.pop("of")
    assert first == second, "the members see the same"
    assert {name: apart for name, apart in first.items() if apart > CLOSE} == {}
    assert max(elements) < 0.53 * whole


@pytest.mark.parametrize(
    ("kind", "how"),
    [
        *((kind, {}) for kind in planned_job.KINDS),
        ("llama", {"pad": "left", "length": 12}),
        ("qwen3", {"pad": "right", "attention": "sdpa"}),
        ("llama", {"checkpointing": True, "attention": "sdpa"}),
        ("llama", {"length": 1}),
        ("llama", {"num_key_value_heads": 1, "attention": "sdpa"}),
        ("qwen2", {"num_key_value_heads": 1}),
    ],
)
def test_members_that_share_tokens_compute_what_one_process_does(workers: Workers, kind: str, how: dict[str, Any]):
    first, second = workers.run(planned_job.split, 2, generation=next(GENERATION), kind=kind, **how)
    assert first == second, "the members see the same"
    assert {name: apart for name, apart in first.items() if apart > CLOSE} == {}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe", "llama-tied"])
def test_a_team_that_shares_layers_and_tokens_computes_what_one_process_does(kind: str):
    gang = Workers(4)
    try:
        found = gang.run(planned_job.split, 4, generation=next(GENERATION), kind=kind, cuts=2)
    finally:
        gang.close()
    assert all(one == found[0] for one in found)
    assert {name: apart for name, apart in found[0].items() if apart > CLOSE} == {}


@pytest.mark.parametrize(
    ("kind", "cuts", "how"),
    [
        ("phi", 2, {"wide": True}),
        ("phi", 1, {"wide": True}),
        ("llama", 2, {}),
        ("llama-tied", 2, {}),
        ("llama-tied", 1, {"length": 6}),
        ("qwen3_moe", 1, {"router_aux_loss_coef": 0.3}),
        ("mixtral", 2, {"router_aux_loss_coef": 0.3}),
        ("gemma", 2, {}),
    ],
)
def test_log_probabilities_need_no_whole_logits(workers: Workers, kind: str, cuts: int, how: dict[str, Any]):
    first, second = workers.run(planned_job.scored, 2, generation=next(GENERATION), kind=kind, cuts=cuts, **how)
    places = how.get("length", 9) - 1
    columns = first.pop("columns"), second.pop("columns")
    assert columns == ((34.0, 33.0) if cuts == 2 else (67.0, 67.0)), "of 67 words"
    assert first.pop("places") == second.pop("places") == (places if cuts == 2 else -(-places // 2))
    assert first == second, "the members see the same"
    close = 1e-10 if how.get("wide") else CLOSE
    assert {name: apart for name, apart in first.items() if apart > close} == {}


@pytest.mark.filterwarnings("ignore:The following .* keys did not match")  # peft's, of its own settings for experts
@pytest.mark.parametrize("kind", planned_job.MIXTURES)
@pytest.mark.parametrize("lora", [False, True])
def test_a_mixtures_loss_has_its_auxiliary_loss_as_transformers_own_has(kind: str, lora: bool):
    model: Any = planned_job.whole(kind)
    model = planned_job.adapted(model) if lora else model
    tokens = torch.randint(1, 67, (3, 8), generator=torch.Generator().manual_seed(1))
    how = {"attention_mask": (torch.arange(8) < 6).long().expand(3, -1)}
    for asked in (False, True):
        theirs = model(input_ids=tokens, labels=tokens, use_cache=False, output_router_logits=asked, **how).loss
        torch.testing.assert_close(loss(model, tokens, tokens, output_router_logits=asked, **how), theirs)


def test_an_auxiliary_loss_that_has_no_weight_is_refused():
    model: Any = planned_job.whole("mixtral")
    del model.router_aux_loss_coef
    tokens = torch.ones(1, 4, dtype=torch.long)
    with pytest.raises(Misuse, match="has no router_aux_loss_coef"):
        loss(model, tokens, tokens, output_router_logits=True)


def test_autocast_changes_no_entropy_and_no_gradient_of_one():
    logits = 4 * torch.randn(3, 5, 97, generator=torch.Generator().manual_seed(1))
    tokens = torch.arange(15).view(3, 5)
    found = []
    for on in (False, True):
        given = logits.clone().requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=on):
            log_p, entropy = picked(given, tokens, slopes=True)
            (log_p + entropy).sum().backward()
        found.append((log_p, entropy, given.grad))
    for plain, cast in zip(*found, strict=True):
        assert torch.equal(plain, cast)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "lora"), [("qwen3", False), ("llama-tied", False), ("qwen2", True)])
def test_a_head_is_shared_by_columns_and_by_places_at_once(kind: str, lora: bool):
    gang = Workers(4)
    try:
        found = gang.run(planned_job.scored, 4, generation=next(GENERATION), kind=kind, cuts=2, lora=lora)
    finally:
        gang.close()
    assert [one.pop("columns") for one in found] == [34.0, 33.0, 34.0, 33.0]
    assert {one.pop("places") for one in found} == {4.0}
    assert all(one == found[0] for one in found)
    assert {name: apart for name, apart in found[0].items() if apart > CLOSE} == {}


@pytest.mark.parametrize("cuts", [2, 1])
def test_adapters_are_shared_with_the_layers_that_they_are_on(workers: Workers, cuts: int):
    how = {"kind": "qwen3", "cuts": cuts, "lora": True}
    first, second = workers.run(planned_job.scored, 2, generation=next(GENERATION), **how)
    for one in (first, second):
        del one["columns"], one["places"]
    assert first == second, "the members see the same"
    assert sum("lora_" in name for name in first) == 2 * 2 * 7
    assert {name: apart for name, apart in first.items() if apart > CLOSE} == {}


def test_a_member_takes_half_of_what_logits_of_a_large_vocabulary_take(workers: Workers):
    how = {"words": 152_000, "places": 64}
    for cuts in (2, 1):
        for whole, part in workers.run(planned_job.peak_bytes, 2, generation=next(GENERATION), cuts=cuts, **how):
            assert part < 0.55 * whole, (cuts, part, whole)


@pytest.mark.parametrize("kind", ["llama", "gemma", "qwen3_moe", "mixtral"])
def test_a_member_reads_its_own_part_and_nothing_else(workers: Workers, kind: str, tmp_path: Path):
    how = {"kind": kind, "folder": str(tmp_path), "vocab_size": 4096, "hidden_size": 256, "intermediate_size": 1024}
    if kind == "qwen3_moe":
        how |= {"moe_intermediate_size": 512}
    for whole, part, odd in workers.run(planned_job.read_parts, 2, generation=next(GENERATION), **how):
        assert odd == []
        assert part < 0.6 * whole


@pytest.mark.parametrize("kind", ["llama", "qwen3_moe", "mixtral"])
def test_a_rank_reads_its_rows_of_what_fsdp_has_cut(kind: str, tmp_path: Path):
    gang = Workers(3)
    try:
        found = gang.run(planned_job.read_sharded, 3, generation=next(GENERATION), kind=kind, folder=str(tmp_path))
    finally:
        gang.close()
    assert found == [[], [], []]


def test_a_member_keeps_about_half_of_the_activations(workers: Workers):
    for whole, half in workers.run(planned_job.kept_bytes, 2, generation=next(GENERATION), length=200):
        assert half < 0.56 * whole


def test_models_whose_tokens_cannot_be_shared_are_refused_by_name(workers: Workers):
    cases = [
        ("llama", {"num_attention_heads": 3, "num_key_value_heads": 3, "hidden_size": 36}, "num_attention_heads is 3"),
        ("llama", {"attention_dropout": 0.1}, "attention_dropout: 0.1"),
        ("phi", {"resid_pdrop": 0.1}, "a dropout of 0.1"),
        ("gpt2", {"n_layer": 1}, "is not known for a gpt2"),
        ("llama", {}, "nothing is known of head"),
    ]
    for kind, sizes, said in cases:
        for found in workers.run(planned_job.refused_tokens, 2, generation=next(GENERATION), kind=kind, **sizes):
            assert said in found


def test_sizes_that_a_team_does_not_divide_are_refused_by_name(workers: Workers):
    cases = [
        ({"num_attention_heads": 3, "num_key_value_heads": 3, "hidden_size": 36}, "num_attention_heads is 3"),
        ({"num_key_value_heads": 1}, "num_key_value_heads is 1"),
        ({"intermediate_size": 45}, "gate_proj is cut along 45"),
        ({"kind": "mixtral", "num_local_experts": 3}, "mlp.experts has 3 experts, which model.tp: 2 does not divide"),
    ]
    for sizes, said in cases:
        for found in workers.run(planned_job.refused, 2, generation=next(GENERATION), **sizes):
            assert said in found
