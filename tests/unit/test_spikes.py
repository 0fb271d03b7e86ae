"""Which updates are spikes: a function of the last ones that were applied, and of nothing else."""

import json
from dataclasses import replace
from random import Random
from statistics import mean, stdev

import pytest

from elasticrl.runtime.progress import Progress
from elasticrl.runtime.scalars import Tally
from elasticrl.runtime.spikes import LEAST, Guard, Past, Spiked, check, seen
from elasticrl.runtime.strategy import Reduced

GUARD = Guard(sigma=6.0, window=8, in_a_row=3, does="skip")
USUAL = [1.0, 1.2, 0.9, 1.1]


def past_of(values: list[float], guard: Guard = GUARD) -> Past:
    past = Past()
    for value in values:
        past.add({"actor_norm": value}, guard, spiked=False)
    return past


def spiked(past: Past, value: float, guard: Guard = GUARD) -> bool:
    return bool(past.spikes({"actor_norm": value}, guard))


def test_a_value_is_a_spike_beyond_so_many_standard_deviations_of_those_before():
    edge = mean(USUAL) + GUARD.sigma * stdev(USUAL)
    assert not spiked(past_of(USUAL), edge * 0.999)
    [spike] = past_of(USUAL).spikes({"actor_norm": edge * 1.001}, GUARD)
    assert (spike.name, spike.usual, spike.spread) == ("actor_norm", pytest.approx(1.05), pytest.approx(stdev(USUAL)))
    assert not spiked(past_of(USUAL), 0.0), "what falls is none"


def test_nothing_is_one_until_half_a_window_was_seen():
    assert not spiked(past_of(USUAL[:3]), 1e9)
    assert spiked(past_of(USUAL), 1e9)


def test_what_has_hardly_moved_may_move_a_little():
    assert not spiked(past_of([2.0] * 4), 2.0 * (1 + 0.99 * GUARD.sigma * LEAST))
    assert spiked(past_of([2.0] * 4), 2.0 * (1 + 1.01 * GUARD.sigma * LEAST))


def test_what_is_older_than_the_window_is_forgotten():
    past = past_of([1e6] * 8 + USUAL * 2)
    assert len(past.values["actor_norm"]) == GUARD.window
    assert spiked(past, 50.0)


def test_a_spike_that_was_left_out_is_no_measure_of_the_next_and_one_that_was_applied_is():
    for does, after in (("skip", True), ("warn", False)):
        guard = replace(GUARD, does=does)
        past = past_of(USUAL, guard)
        past.add({"actor_norm": 100.0}, guard, spiked=True)
        assert spiked(past, 100.0, guard) == after


def test_so_many_in_a_row_end_the_job_and_one_good_update_between_them_does_not():
    past = past_of(USUAL)
    for value in (90.0, 90.0, 1.05, 90.0, 90.0):
        jumps = past.spikes({"actor_norm": value}, GUARD)
        check(jumps, past, GUARD, "Update 4 of step 7")
        past.add({"actor_norm": value}, GUARD, spiked=bool(jumps))
    jumps = past.spikes({"actor_norm": 90.0}, GUARD)
    with pytest.raises(Spiked, match=r"Update 4 of step 7 is spike number 3 in a row: actor_norm is 90, and 1\.05 "):
        check(jumps, past, GUARD, "Update 4 of step 7")
    check(jumps, past, replace(GUARD, does="warn"), "it is applied")


def test_stop_ends_the_job_at_the_first():
    stops, past = replace(GUARD, does="stop"), past_of(USUAL)
    check(past.spikes({"actor_norm": 1.0}, stops), past, stops, "Update 0 of step 9")
    with pytest.raises(Spiked, match=r"Update 0 of step 9 is a spike: .* Nothing of it was applied"):
        check(past.spikes({"actor_norm": 90.0}, stops), past, stops, "Update 0 of step 9")


def test_norms_of_all_roles_and_the_named_losses_are_looked_at_per_entry():
    found = {
        "critic": Reduced(norm=3.0, tally=Tally({"value_loss": 80.0, "clip_fraction": 3.0})),
        "actor": Reduced(norm=2.0, tally=Tally({"policy_loss": 8.0})),
    }
    guard = replace(GUARD, losses=("value_loss", "loss"), per=40.0)
    assert seen(found, guard) == {"critic_norm": 3.0, "actor_norm": 2.0, "value_loss": 2.0}


def test_a_job_that_is_taken_up_again_judges_by_the_same_bits():
    chance, guard = Random(7), replace(GUARD, window=6)
    went_on, progress = Past(), Progress()
    for number in range(60):
        now = {"actor_norm": chance.lognormvariate(0, 1), "value_loss": chance.gauss(0, 1e-3)}
        jumps = went_on.spikes(now, guard)
        assert progress.past.spikes(now, guard) == jumps
        for past in (went_on, progress.past):
            past.add(now, guard, spiked=bool(jumps))
        if number % 5 == 0:
            kept, progress = json.loads(json.dumps(progress.state_dict())), Progress()
            progress.load_state_dict(kept)
    assert any(len(values) == guard.window for values in went_on.values.values())
    assert progress.past == went_on


def test_a_state_of_before_there_were_guards_has_no_past():
    state = Progress().state_dict()
    del state["past"]
    progress = Progress(past=past_of(USUAL))
    progress.load_state_dict(state)
    assert progress.past == Past()
