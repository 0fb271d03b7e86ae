"""Which updates are spikes: a function of the last ones, and of nothing else."""

import json
from collections.abc import Iterable
from dataclasses import replace
from random import Random
from statistics import mean, stdev

import pytest
from pydantic import ValidationError

from elasticrl.config.training import Spike
from elasticrl.runtime.progress import Progress
from elasticrl.runtime.scalars import Tally
from elasticrl.runtime.spikes import LEAST, Guard, Past, Spiked, check, seen
from elasticrl.runtime.strategy import Reduced

GUARD = Guard(sigma=6.0, window=8, in_a_row=3, does="skip")
USUAL = [1.0, 1.2, 0.9, 1.1]


def past_of(values: list[float], guard: Guard = GUARD) -> Past:
    past = Past()
    for value in values:
        past.add({"actor_norm": value}, guard, spiked=False, step=0)
    return past


def spiked(past: Past, value: float, guard: Guard = GUARD) -> bool:
    return bool(past.spikes({"actor_norm": value}, guard))


def test_a_value_is_a_spike_beyond_so_many_standard_deviations_of_those_before():
    edge = mean(USUAL) + GUARD.sigma * stdev(USUAL)
    assert not spiked(past_of(USUAL), edge * 0.999)
    [spike] = past_of(USUAL).spikes({"actor_norm": edge * 1.001}, GUARD)
    assert (spike.name, spike.usual, spike.spread) == ("actor_norm", pytest.approx(1.05), pytest.approx(stdev(USUAL)))
    assert not spiked(past_of(USUAL), 0.0), "what falls is none"


def made(past: Past, norms: Iterable[float], guard: Guard) -> list[bool]:
    """Updates one after another, one in each step: which were spikes."""
    found = []
    for step, norm in enumerate(norms):
        now = seen({"actor": Reduced(norm=norm, tally=Tally())}, guard)
        jumps = past.spikes(now, guard)
        check(jumps, past, guard, step=step, update=0)
        past.add(now, guard, spiked=bool(jumps), step=step)
        found.append(bool(jumps))
    return found


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


def test_a_new_level_is_usual_after_a_few_updates_though_these_were_left_out():
    guard, chance = Guard(sigma=6.0, window=128, in_a_row=8, does="skip"), Random(3)
    found = made(Past(), (chance.gauss(level, 0.1) for level in [1.0] * 128 + [5.0] * 64), guard)
    assert found[128:].index(False) <= 5
    assert not any(found[:128] + found[134:])


def test_what_is_left_out_does_not_make_the_rest_look_calmer_than_it_is():
    """Judged by what was applied alone, which has nothing beyond the edge, the edge would come nearer and nearer."""
    guard, chance = Guard(sigma=1.5, window=16, in_a_row=10**6, does="skip"), Random(3)
    found = made(Past(), (chance.gauss(10.0, 1.0) for _ in range(4000)), guard)
    assert sum(found) < 0.12 * len(found), "of a normal distribution 0.067 are"


def test_updates_that_have_nothing_to_learn_do_not_make_spikes_of_all_others():
    found = made(Past(), [0.0] * 40 + USUAL * 4 + [0.0] * 8 + USUAL * 4, GUARD)
    assert not any(found)
    past = past_of(USUAL)
    past.add({"actor_norm": 90.0}, GUARD, spiked=True, step=4)
    past.add({}, GUARD, spiked=False, step=5)
    assert past.steps(6) == 2, "nor is it a good update"


def test_spikes_in_so_many_steps_one_after_another_end_the_job_and_one_good_update_between_them_does_not():
    past, value = past_of(USUAL), 90.0
    for step, spikes in ((0, True), (1, True), (1, False), (2, True), (3, True), (3, True), (3, True)):
        value *= 100  # it grows on and on, so none of these is usual after the next
        now = {"actor_norm": value if spikes else 1.0}
        jumps = past.spikes(now, GUARD)
        assert bool(jumps) == spikes
        check(jumps, past, GUARD, step=step, update=1)
        past.add(now, GUARD, spiked=spikes, step=step)
    jumps = past.spikes({"actor_norm": value * 100}, GUARD)
    with pytest.raises(
        Spiked, match=r"Update 4 of step 7 is a spike: .* in 3 steps one after another, .* older checkpoint"
    ):
        check(jumps, past, GUARD, step=7, update=4)
    check(jumps, past, GUARD, step=3, update=9)  # a bad sample comes again in each epoch of its step
    check(jumps, past, replace(GUARD, does="warn"), step=7, update=4)  # it is applied


def test_what_is_bad_is_left_out_in_each_epoch_of_its_step():
    guard = Guard(sigma=6.0, window=128, in_a_row=8, does="skip")
    past, chance = Past(), Random(5)
    made(past, (chance.gauss(1.0, 0.1) for _ in range(64)), guard)
    for _epoch in range(4):
        for norm in (1.0, 40.0, 1.05, 55.0):
            jumps = past.spikes({"actor_norm": norm}, guard)
            assert bool(jumps) == (norm > 2.0)
            past.add({"actor_norm": norm}, guard, spiked=bool(jumps), step=64)
    assert past.values["actor_norm"].count(40.0) == 1


def test_a_row_is_of_what_was_left_out():
    past, warns = past_of(USUAL), replace(GUARD, does="warn")
    for step in range(1, 9):
        past.add({"actor_norm": 10.0**step}, warns, spiked=True, step=step)
    assert past.steps(9) == 1


def test_stop_ends_the_job_at_the_first():
    stops, past = replace(GUARD, does="stop"), past_of(USUAL)
    check(past.spikes({"actor_norm": 1.0}, stops), past, stops, step=9, update=0)
    with pytest.raises(Spiked, match=r"Update 0 of step 9 is a spike: .* Nothing of it was applied"):
        check(past.spikes({"actor_norm": 90.0}, stops), past, stops, step=9, update=0)


def test_norms_of_all_roles_and_the_named_losses_are_looked_at_per_entry():
    found = {
        "critic": Reduced(norm=3.0, tally=Tally({"value_loss": 80.0, "clip_fraction": 3.0})),
        "actor": Reduced(norm=2.0, tally=Tally({"policy_loss": 8.0})),
    }
    guard = replace(GUARD, losses=("value_loss", "loss"), per=40.0)
    assert seen(found, guard) == {"critic_norm": 3.0, "actor_norm": 2.0, "value_loss": 2.0}


def test_what_is_no_number_is_not_looked_at_nor_does_a_large_one_end_the_program():
    found = {"actor": Reduced(norm=float("nan"), tally=Tally({"value_loss": float("inf"), "loss": 0.0}))}
    assert seen(found, replace(GUARD, losses=("value_loss", "loss"))) == {}
    assert seen({"actor": Reduced(norm=1.2e154, tally=Tally())}, GUARD) == {}
    assert not spiked(past_of([*USUAL, 9e149, 9e149]), 2.0)


def test_a_job_that_is_taken_up_again_judges_by_the_same_bits():
    chance, guard = Random(7), replace(GUARD, window=6)
    went_on, progress = Past(), Progress()
    for number in range(60):
        now = {"actor_norm": chance.lognormvariate(0, 1), "value_loss": chance.gauss(0, 1e-3)}
        jumps = went_on.spikes(now, guard)
        assert progress.past.spikes(now, guard) == jumps
        for past in (went_on, progress.past):
            past.add(now, guard, spiked=bool(jumps), step=number)
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


@pytest.mark.parametrize("odd", [{"in_a_row": 1}, {"window": 5000}])  # a stop by another name; too much for each state
def test_a_row_of_one_and_a_window_that_fills_states_are_refused(odd: dict[str, int]):
    with pytest.raises(ValidationError, match=next(iter(odd))):
        Spike(does="skip", **odd)  # type: ignore[arg-type] # all keys here are whole numbers
