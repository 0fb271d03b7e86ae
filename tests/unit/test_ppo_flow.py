"""A step as declared: what its order, its overlap and its recovery follow from."""

import pytest

from elasticrl.config.training import Kl, Ppo
from elasticrl.ppo import flow
from elasticrl.ppo.flow import Flow, Stage
from elasticrl.ppo.staleness import Staleness

PPO = flow.of(Ppo())


def names(stages):
    return [stage.name for stage in stages]


def test_the_order_of_ppo_follows_from_what_each_stage_needs():
    assert PPO.phases == ("rollout", "reward", "logprobs", "ref", "values", "advantage", "update", "sync")
    shuffled = Flow(name="x", given=PPO.given, stages=PPO.stages[::-1], trained=PPO.trained)
    assert [set(names(wave)) for wave in shuffled.waves()] == [set(names(wave)) for wave in PPO.waves()]


def test_what_needs_nothing_of_each_other_may_run_at_the_same_time():
    assert names(PPO.waves()[1]) == ["reward", "logprobs", "ref", "values"]


@pytest.mark.parametrize(
    ("have", "updates", "again"),
    [
        (set(), 0, ["rollout", "reward", "logprobs", "ref", "values", "advantage", "update", "sync"]),
        ({"samples", "scores"}, 0, ["logprobs", "ref", "values", "advantage", "update", "sync"]),
        ({"samples", "scores", "logprobs", "values", "advantages", "returns"}, 1, ["ref", "update", "sync"]),
        # What was made with the weights before the first update cannot be made with those after it.
        ({"samples", "scores", "ref_logprobs", "values", "advantages", "returns"}, 1, None),
        (set(), 2, None),
    ],
)
def test_what_is_done_again_after_a_fault_is_what_was_lost(have, updates, again):
    found = PPO.again(have, updates=updates)
    assert (None if found is None else names(found)) == again


@pytest.mark.parametrize(("asked", "keeps"), [(False, "worth it"), (True, "always")])
def test_samples_are_kept_before_a_slow_scorer_is_asked_and_with_their_scores_in_any_case(asked, keeps):
    kept = {stage.name: stage.keeps for stage in flow.of(Ppo(), asked=asked).stages if stage.keeps != "never"}
    assert kept == {"rollout": keeps, "reward": "always"}


def test_an_algorithm_has_only_the_stages_it_needs():
    assert "values" not in flow.of(Ppo(algorithm="grpo", group=4))
    assert "ref" not in flow.of(Ppo(kl=Kl(where="off")))
    assert flow.of(Ppo(), tied=True).trained == ("actor",)
    assert flow.of(Ppo(algorithm="dpo")).phases == ("ref", "update")
    assert flow.of(Ppo(algorithm="kto")).phases == ("ref", "baseline", "update")
    for without in (Ppo(algorithm="sft"), Ppo(algorithm="dpo", preference_loss="simpo")):
        assert "ref" not in flow.of(without)
        assert flow.of(without).phases == ("update",)


def test_scores_choose_what_is_computed_where_more_is_generated_than_trained_on():
    more = flow.of(Ppo(algorithm="grpo", group=4, filter_groups=True, gen_batch=128))
    assert names(more.waves()[1]) == ["reward"]
    assert names(more.waves()[2]) == ["logprobs", "ref"]


def test_a_declaration_that_cannot_run_is_refused():
    with pytest.raises(AssertionError, match="nobody writes"):
        Flow(name="x", given=(), stages=(Stage(name="a", role="actor", reads=("b",), writes=("c",)),), trained=())
    circle = (
        Stage(name="a", role="r", reads=("y",), writes=("x",)),
        Stage(name="b", role="r", reads=("x",), writes=("y",)),
    )
    with pytest.raises(AssertionError, match="wait for each other"):
        Flow(name="x", given=(), stages=circle, trained=())


def test_the_graph_as_text():
    assert (
        PPO.text({"critic": "every worker, fsdp"})
        == """\
ppo: one step trains actor and critic; given prompts
  1  rollout    rollout  prompts -> samples  @ every worker
  2  reward     reward   samples -> scores  @ every worker
  |  logprobs   actor    samples -> logprobs  @ every worker
  |  ref        ref      samples -> ref_logprobs  @ every worker
  |  values     critic   samples -> values  @ every worker, fsdp
  3  advantage  job      samples, scores, logprobs, ref_logprobs, values -> advantages, returns  @ every worker
  4  update     actor+critic samples, logprobs, advantages, returns, values -> weights  @ every worker
  5  sync       rollout  weights -> published  @ every worker
  |  marks stages that need nothing of each other"""
    )


def test_with_staleness_the_next_samples_come_before_the_update_in_the_phase_of_the_rollout():
    ahead = flow.of(Ppo(), staleness=Staleness(steps=1))
    assert names(ahead.order) == [
        "rollout", "reward", "logprobs", "ref", "values", "advantage", "ahead", "update", "sync",
    ]  # fmt: skip
    assert names(ahead.waves()[1]) == ["reward", "logprobs", "ref", "values", "ahead"]
    assert ahead.phases == PPO.phases
    assert ahead.again({"samples", "scores"}, updates=1) is None


def test_an_engine_of_its_own_generates_ahead_beside_the_update_too_so_the_step_is_not_taken_up_from_within_it():
    beside = flow.of(Ppo(), staleness=Staleness(steps=1), apart=True)
    assert names(beside.order)[-3:] == ["update", "ahead", "sync"]
    assert beside.phases == PPO.phases
    judged = beside.made([stage.name for stage in beside.order[: names(beside.order).index("update")]])
    assert beside.again(judged, updates=1) is None
    assert names(beside.again(judged | {"ahead"}, updates=1)) == ["update", "sync"]
    assert names(flow.of(Ppo()).again(judged, updates=1)) == ["update", "sync"]


def test_in_longer_periods_samples_are_to_be_had_again_from_within_an_update_too():
    beside = flow.of(Ppo(), staleness=Staleness(steps=2), apart=True)
    judged = beside.made([stage.name for stage in beside.order[: names(beside.order).index("update")]])
    assert names(beside.again(judged, updates=1)) == ["update", "ahead", "sync"]
