"""Rules of thumb, as tables: what is advised, when, and with which numbers."""

from dataclasses import replace

import pytest

from elasticrl.ppo.advice import WINDOW, Adviser, Baseline, Seen, Slowness

CALM = Seen(
    step=0, seconds={"rollout": 0.1, "update": 0.6, "sync": 0.05}, micro_tokens=384, lane_batch=4, width=96, padding=0.2
)


def told(seen, steps=WINDOW, adviser=None, first=0):
    """All that is advised in so many steps that look like this one."""
    adviser = adviser or Adviser(Slowness(z=4.0, steps=3))
    return [advice for i in range(first, first + steps) for advice in adviser.look(replace(seen, step=i))]


def test_a_step_as_it_should_be_gets_no_advice():
    assert told(CALM) == []


@pytest.mark.parametrize(
    ("change", "rule", "numbers", "says"),
    [
        (
            {"seconds": {"rollout": 0.1, "update": 0.5, "sync": 0.4}},
            "sync",
            {"sync_s": 0.4, "step_s": 1.0, "share": 0.4},
            "sync takes 400ms, 40% of a step of 1000ms",
        ),
        (
            {"seconds": {"rollout": 0.9, "update": 0.5}, "quicker": ("rollout.engine: vllm", "rollout.staleness")},
            "rollout",
            {"rollout_s": 0.9, "update_s": 0.5},
            "rollout takes 900ms, update 500ms: the trainers wait for samples; use rollout.engine: vllm, or rollout.staleness",
        ),
        (
            {"seconds": {"rollout": 0.9, "update": 0.5}},
            "rollout",
            {"rollout_s": 0.9, "update_s": 0.5},
            "rollout takes 900ms, update 500ms: the trainers wait for samples; more rollout nodes or cards generate sooner",
        ),
        (
            {"own": [{"update": 0.5}, {"update": 0.51}, {"update": 0.9}]},
            "rank",
            {"rank": 2, "seconds": 0.9, "usual_s": 0.505},
            "rank 2 is slow: update takes 0.9 s, with the others 0.505 s",
        ),
        (
            {"padding": 0.75},
            "padding",
            {"share": 0.75, "micro_tokens": 384, "lane_batch": 4},
            "75% of what passes compute is padding: the 4 samples of a lane in an update are too unlike",
        ),
        (
            {"micro_tokens": 12, "lane_batch": 8, "width": 12},
            "micro_tokens",
            {"tokens": 12, "could": 96},
            "a pass has 12 tokens, under 64: ppo.micro_tokens may be 96",
        ),
    ],
)
def test_each_rule_speaks_with_its_numbers(change, rule, numbers, says):
    [advice] = told(replace(CALM, **change))
    assert advice.rule == rule
    assert advice.numbers | numbers == pytest.approx(dict(advice.numbers))
    assert advice.text.startswith(says)


@pytest.mark.parametrize(
    "change",
    [
        {"seconds": {"rollout": 0.1, "update": 0.6, "sync": 0.3}},  # exactly 30 %
        {"seconds": {"rollout": 0.01, "update": 0.004, "sync": 0.0}},  # too short to matter
        {"own": [{"update": 0.5}, {"update": 0.51}]},
        {"own": [{"update": 0.5}, {"update": 0.9}, {"update": 0.9}]},  # most of a gang: nobody is at fault
        {"padding": 0.5},
        {"micro_tokens": 12, "lane_batch": 1, "width": 12},  # there is no more to take
        {"micro_tokens": 64, "lane_batch": 8, "width": 64},
    ],
)
def test_what_is_within_bounds_gets_none(change):
    assert told(replace(CALM, **change)) == []


def test_one_odd_step_is_no_reason():
    adviser = Adviser()
    told(CALM, adviser=adviser)
    odd = replace(CALM, seconds={"rollout": 9.0, "update": 0.1})
    assert told(odd, steps=1, adviser=adviser, first=WINDOW) == []


def test_advice_is_given_once_and_again_only_after_it_was_untrue_for_long():
    adviser, bad = Adviser(), replace(CALM, padding=0.9)
    assert len(told(bad, steps=5 * WINDOW, adviser=adviser)) == 1
    assert told(CALM, steps=2 * WINDOW, adviser=adviser, first=5 * WINDOW) == []
    assert len(told(bad, steps=2 * WINDOW, adviser=adviser, first=7 * WINDOW)) == 1


def test_another_gang_is_measured_anew():
    adviser = Adviser(Slowness(z=4.0, steps=3))
    three = replace(CALM, own=[{"update": 0.5}, {"update": 0.51}, {"update": 0.9}])
    assert told(three, steps=WINDOW - 1, adviser=adviser) == []
    assert told(replace(CALM, own=[{"update": 0.5}] * 2), steps=1, adviser=adviser, first=WINDOW) == []
    assert len(adviser.past) == 1


def test_a_baseline_is_the_median_of_what_was_before():
    baseline = Baseline()
    rows = [baseline.usual({"rollout": float(i)}) for i in range(WINDOW + 2)]
    assert rows[:WINDOW] == [{}] * WINDOW
    assert rows[WINDOW] == {"rollout": 4.5}
    assert rows[WINDOW + 1] == {"rollout": 5.0}


def losses(*values):
    adviser = Adviser()
    seen = (replace(CALM, step=i, loss=value) for i, value in enumerate(values))
    return [advice.rule for each in seen for advice in adviser.look(each)]


def test_a_loss_that_leaves_the_range_of_the_last_steps_is_told():
    calm = [0.5 + 0.02 * (-1) ** i for i in range(WINDOW)]
    assert losses(*calm, 0.55, 0.45) == []
    assert losses(*calm, 1.5) == ["loss"]
    assert losses(*calm, float("nan")) == ["loss"]
    assert losses(*[None] * WINDOW, 1.5) == []
    assert losses(*[0.0] * WINDOW, 0.0) == []


def test_collectives_that_have_become_slower_than_they_were_are_told_with_both_figures():
    adviser, usual = Adviser(), replace(CALM, comm_s=0.2)
    assert told(usual, steps=3 * WINDOW, adviser=adviser) == []
    [advice] = told(replace(CALM, comm_s=0.5), steps=WINDOW, adviser=adviser, first=3 * WINDOW)
    # Said as soon as half of the last steps are slow.
    assert (advice.rule, dict(advice.numbers)) == ("comm", {"comm_s": pytest.approx(0.35), "usual_s": 0.2})
    assert advice.text.startswith("collectives take 350ms of a step, 200ms before")


@pytest.mark.parametrize(("before", "now"), [(0.2, 0.3), (0.001, 0.04), (0.5, 0.1)])
def test_collectives_that_are_as_fast_as_usual_or_short_are_not(before, now):
    adviser = Adviser()
    told(replace(CALM, comm_s=before), steps=3 * WINDOW, adviser=adviser)
    assert told(replace(CALM, comm_s=now), steps=2 * WINDOW, adviser=adviser, first=3 * WINDOW) == []
