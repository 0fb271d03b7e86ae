"""Which guarantee holds for a run, as its log says."""

from typing import Any

import pytest

from elasticrl.config.tree import Tree
from elasticrl.ppo import guarantee
from elasticrl.ppo.report import guarantee_event

VLLM = {"rollout": {"engine": "vllm"}}
INVARIANT = {"rollout": {"engine": "vllm", "vllm": {"batch_invariant": True}}}
NODES = {"rollout": {"engine": "vllm", "nodes": 2}}
SAME = "the same bits for any number of workers and through any fault"
FRESH = "vLLM on a GPU rounds otherwise in another batch"
CLOSE = "close, not exact: every sample is used exactly once"
URL = "scores of an endpoint are recorded before they are first used, and replayed"


def of(device: str, **sections: Any) -> guarantee.Guarantee:
    return guarantee.of(Tree.model_validate({"job": {"name": "j"}, **sections}), device)


@pytest.mark.parametrize(
    ("device", "sections", "holds", "said"),
    [
        ("cpu", {}, "bits", [SAME]),
        ("cuda", {"model": {"strategy": "fsdp"}, "rollout": {"engine": "served"}}, "bits", [SAME]),
        ("cuda", {"rollout": {"engine": "served", "nodes": 2}}, "bits", [SAME]),
        ("cpu", VLLM, "bits", [SAME]),
        ("cpu", {**VLLM, "lanes": {"threads": 2}}, "ledger", ["vLLM on several threads", "is a fresh sample"]),
        ("cpu", {"lanes": {"threads": 2}}, "bits", [SAME]),
        ("cuda", VLLM, "ledger", [FRESH, "is a fresh sample", "used exactly once"]),
        ("cuda", INVARIANT, "bits", [SAME]),
        ("cpu", NODES, "ledger", [FRESH]),
        ("cuda", {**VLLM, "ppo": {"algorithm": "dpo"}}, "bits", [SAME]),
        ("cpu", {"model": {"strategy": "deepspeed"}}, "close", [CLOSE]),
        ("cpu", {"placement": {"critic": {"strategy": "deepspeed"}}}, "close", [CLOSE]),
        ("cuda", {**VLLM, "model": {"strategy": "deepspeed"}}, "ledger", [CLOSE, FRESH]),
        ("cpu", {"reward": {"url": "http://h/score"}}, "bits", [SAME, URL]),
        ("cuda", {**VLLM, "reward": {"url": "http://h/score"}}, "ledger", [FRESH, URL]),
        ("cpu", {"lanes": {"exact": "warn"}}, "bits", [SAME, "is let in, and the plan that does it says so"]),
        ("cpu", {"lanes": {"exact": "off"}}, "bits", [SAME, "nobody looks"]),
    ],
)
def test_what_holds_follows_from_configuration_and_device(device, sections, holds, said):
    found = of(device, **sections)
    assert found.holds == holds
    for part in said:
        assert part in found.text
    assert len(found.text.split("; ")) == len(
        [part for part in said if part not in ("is a fresh sample", "used exactly once")]
    )
    assert (SAME in found.text) == (holds == "bits")


def test_it_is_an_event_with_the_sentence():
    event = guarantee_event(of("cpu"), 3)
    assert (event.name, event.step, event.scalars) == ("ppo.guarantee", 3, {})
    assert event.fields == {"holds": "bits", "reason": of("cpu").text}
    assert event.line == f"[Guarantee 3] {SAME}, on nodes that compute alike"


@pytest.mark.parametrize(("engine", "holds"), [("served", "ledger"), ("vllm", "ledger"), ("torch", "bits")])
def test_a_mixture_of_experts_in_an_engine_of_its_own_has_the_ledger_alone(engine, holds):
    tree = Tree.model_validate({"job": {"name": "j"}, "rollout": {"engine": engine}})
    found = guarantee.of(tree, "cpu", experts=True)
    assert (found.holds, "a mixture of experts" in found.text) == (holds, holds == "ledger")
