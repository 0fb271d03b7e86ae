"""What makes large clusters cheap changes no decision: each short cut answers what the long way does, at each event."""

from collections import Counter
from dataclasses import fields, replace
from random import Random

import pytest

from chaos.run import SCENARIOS
from chaos.same import digest
from chaos.scenario import big, draw, load
from chaos.sim.drive import Run
from chaos.sim.world import World
from elasticrl.core.lead.scene import Scene
from elasticrl.core.node.calm import calm
from elasticrl.core.node.follow import plan_of
from elasticrl.core.node.rows import rows_of
from elasticrl.core.node.state import State
from elasticrl.core.step import whole

NAMES = [field.name for field in fields(State)]


@pytest.mark.parametrize(
    "scenario", [big(48, 0.3, 1.0, 0), big(24, 0.5, 1.0, 1), draw(14), draw(238)], ids=lambda s: s.name
)
def test_what_is_answered_without_a_look_at_everything_is_what_a_look_answers(scenario):
    met = compared(scenario)
    assert met[True] > 0.2 * met[False] > 0


@pytest.mark.slow
def test_the_same_holds_in_every_scenario():
    met = sum((compared(load(path)) for path in sorted(SCENARIOS.glob("*.yaml"))), Counter())
    assert met[True] > 0.2 * met[False] > 0


def compared(scenario):
    """How often there was a short cut, and how often none; each was what the long way is."""
    run, met = Run(scenario, scenario.seed), Counter()

    def look(node, event, _):
        short = calm(node.state, event)
        met[short is not None] += 1
        if short is None:
            return
        long = whole(node.state, event)
        assert (short.actions, short.wake_at) == (long.actions, long.wake_at)
        assert [n for n in NAMES if getattr(short.state, n) != getattr(long.state, n)] == []

    run.world.overseer = look
    run.drive()
    return met


def test_rows_that_are_brought_up_to_date_are_those_that_are_made_anew_and_who_goes_on_by_them_does():
    run, kept = Run(big(48, 0.3, 1.0, 0), "0"), Counter()

    def look(node, event, decision):
        lead, before = decision.state.lead, node.state.lead
        if lead is None or lead.rows is None or (before is not None and before.rows is lead.rows):
            return
        kept[before is not None and before.rows is not None and before.rows.plan is lead.rows.plan] += 1
        assert rows_of(lead.rows.plan, lead.rows.ranked, None) == lead.rows
        assert sum(lead.rows.counts.values()) == sum(work is not None for work in lead.rows.works)
        state = decision.state
        scene = Scene(state.settings, state.view, plan_of(state), lead, state.me, event.now)
        assert scene.fates == tuple(map(scene._fate, lead.rows.plan.seats))

    run.world.overseer = look
    run.drive()
    assert kept[True] > 10


def test_things_happen_by_their_time_and_those_of_one_moment_as_they_were_put_there():
    world, chance, put, came = World("1"), Random(1), [], []

    def happens(number):
        came.append(number)
        assert put[number][0] == world.now
        for delay in (0.0, 1e-5, chance.random() / 100, 3 * chance.random(), 40.0):
            if len(put) < 3000:
                put.append((world.now + delay, len(put)))
                world.later(delay, happens, put[-1][1])

    put += [(0.5, 0), (0.5, 1), (0.0, 2), (61.0, 3)]
    for when, number in put[:4]:
        world.at(when, happens, number)
    for until in (0.5, 0.5, 7.0, 7.001, 100.0):
        world.run(until)
        assert world.now == until < world.due()
        assert came == [number for _, number in sorted(put)][: len(came)]
        assert len(came) == sum(when <= until for when, _ in put)
    world.run(1000.0)
    assert len(came) == len(put) == world.events == 3000


def test_a_run_has_one_digest_and_another_seed_another():
    scenario = replace(draw(14), trouble_s=5.0)
    assert digest(scenario, "1") == digest(scenario, "1") != digest(scenario, "2")
