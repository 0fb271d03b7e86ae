"""A curriculum's rows: how levels are mixed, each sample once in an epoch of its level, and where a job goes on."""

import json
import random
from collections import Counter
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import pytest

from elasticrl.certificate import form
from elasticrl.certificate.dealt import dealt
from elasticrl.runtime.data.cursor import Cursor, Segment, Walk
from elasticrl.runtime.data.levels import fault, pattern
from elasticrl.runtime.vault.errors import CheckpointRefused, DataError

LEVELS, STAGES = (30, 50, 20), ((0, 1, 0, 0), (5, 2, 1, 0), (12, 1, 3, 4))
WALK = Walk(name="p", content="c", size=100, lanes=4, per_lane=4, seed=7, levels=LEVELS, stages=STAGES)


def level_of(index: int) -> int:
    return 0 if index < 30 else 1 if index < 80 else 2


def steps_of(cursor: Cursor, steps: range) -> list[list]:
    lanes = range(cursor.walk.lanes)
    return [[sample for lane in lanes for sample in cursor.ids(step, 0, lane)] for step in steps]


CHANCE = random.Random(1)
MIXES = [
    (1,),
    (3, 1),
    (1, 3, 4),
    (0, 7, 0, 2),
    (997, 3),
    (20, 30, 10),
    (3, 20, 3, 20, 5, 60),
    (1,) * 20,
    (900, *(5,) * 20),
]
MIXES += [(*(CHANCE.choice([0, 1, 3, 20, 60]) for _ in range(CHANCE.randrange(2, 12))), 7) for _ in range(30)]


@pytest.mark.parametrize("weights", MIXES, ids=str)
def test_a_pattern_has_each_level_as_often_as_it_weighs_and_never_off_by_a_whole_sample(weights):
    found, whole = pattern(weights), sum(weights)
    counts = Counter(found)
    assert [counts[level] * whole for level in range(len(weights))] == [weight * len(found) for weight in weights]
    least = Fraction(1, max(2 * sum(map(bool, weights)) - 2, 1))
    seen = Counter[int]()
    for length, level in enumerate(found, 1):
        seen[level] += 1
        off = [abs(seen[level] - Fraction(length * weight, whole)) for level, weight in enumerate(weights)]
        assert max(off) <= 1 - least


@pytest.mark.parametrize("weights", MIXES[:8], ids=str)
@pytest.mark.parametrize("lanes", [1, 16])
def test_a_step_is_off_by_less_than_two_samples_and_all_steps_of_a_stage_together_by_less_than_one(weights, lanes):
    levels = (40,) * len(weights)
    cursor = Cursor(Walk(size=sum(levels), lanes=lanes, per_lane=16 // lanes, levels=levels, stages=((0, *weights),)))
    seen = Counter[int]()
    for step, samples in enumerate(steps_of(cursor, range(25)), 1):
        found = Counter(sample.index // 40 for sample in samples)
        seen += found
        shares = [Fraction(weight, sum(weights)) for weight in weights]
        assert all(abs(found[level] - 16 * share) < 2 for level, share in enumerate(shares))
        assert all(abs(seen[level] - 16 * step * share) < 1 for level, share in enumerate(shares))


def test_a_level_that_weighs_nothing_never_comes():
    assert set(pattern((0, 7, 0, 2))) == {1, 3}


def test_each_stage_mixes_the_levels_as_it_says_from_its_first_step_on():
    for step, samples in enumerate(steps_of(Cursor(WALK), range(40))):
        weights = next(stage[1:] for stage in reversed(STAGES) if stage[0] <= step)
        found = Counter(level_of(sample.index) for sample in samples)
        assert all(abs(found[i] - 16 * weight / sum(weights)) <= 1 for i, weight in enumerate(weights)), step
        assert all(not found[i] for i, weight in enumerate(weights) if not weight)


@pytest.mark.parametrize("shuffle", [True, False])
def test_each_sample_comes_once_in_an_epoch_of_its_level(shuffle):
    cursor = Cursor(replace(WALK, shuffle=shuffle))
    drawn = [sample for samples in steps_of(cursor, range(60)) for sample in samples]
    assert len(set(drawn)) == len(drawn) == 960
    for level, size in enumerate(LEVELS):
        mine = [sample for sample in drawn if level_of(sample.index) == level]
        epochs = Counter(sample.epoch for sample in mine)
        assert [sample.epoch for sample in mine] == sorted(sample.epoch for sample in mine)
        assert all(epochs[epoch] == size for epoch in range(len(epochs) - 1))
        orders = [[s.index for s in mine if s.epoch == epoch] for epoch in (0, 1)]
        assert (orders[0] == orders[1]) == (not shuffle)


@pytest.mark.parametrize("resumed", [0, 3, 5, 9, 12, 31])
@pytest.mark.parametrize("lanes", [4, 8])
def test_a_job_goes_on_where_it_was_on_as_many_lanes_or_others(resumed, lanes):
    wanted = [sample for samples in steps_of(Cursor(WALK), range(40)) for sample in samples]
    cursor = Cursor(WALK)
    for step in range(resumed):
        cursor.advance(step)
    walk = replace(WALK, lanes=lanes, per_lane=16 // lanes)
    again = Cursor(walk, allow=["lanes"])
    again.load_state_dict(cursor.state_dict())
    drawn = [sample for samples in steps_of(again, range(resumed, 40)) for sample in samples]
    before = [sample for samples in steps_of(Cursor(WALK), range(resumed)) for sample in samples]
    assert len(set(drawn) | set(before)) == 640
    assert before + drawn == wanted, "a pattern goes on where it was"
    restored = Cursor(walk)
    restored.load_state_dict(again.state_dict())
    assert restored.segments == again.segments


def test_another_batch_or_other_stages_go_on_with_the_samples_that_are_left():
    cursor = Cursor(WALK)
    for step in range(7):
        cursor.advance(step)
    before = [sample for samples in steps_of(cursor, range(7)) for sample in samples]
    for allow, walk in (("batch", replace(WALK, per_lane=5)), ("data", replace(WALK, stages=((0, 0, 0, 1),)))):
        again = Cursor(walk)
        with pytest.raises(CheckpointRefused, match=f"The walk's {allow} changed"):
            again.load_state_dict(cursor.state_dict())
        again = Cursor(walk, allow=[allow])
        again.load_state_dict(cursor.state_dict())
        samples = [sample for found in steps_of(again, range(7, 60)) for sample in found]
        assert len({*samples, *before}) == len(samples) + len(before)
        if allow == "batch":
            twelfth = Counter(level_of(sample.index) for sample in steps_of(again, range(12, 13))[0])
            assert abs(twelfth[2] - 10) <= 1, "stages are counted in steps"
            wanted = [sample for found in steps_of(Cursor(WALK), range(12)) for sample in found]
            assert [*before, *samples[: 5 * 16]] == wanted, "in the same order, up to the next stage"
        else:
            assert {level_of(sample.index) for sample in samples} == {2}


@pytest.mark.parametrize("other", [Walk(name="q", content="d", size=77, lanes=4, per_lane=4), WALK])
def test_other_data_begin_in_an_epoch_that_was_never_used(other):
    first = WALK if other is not WALK else Walk(name="q", content="d", size=77, lanes=4, per_lane=4)
    cursor = Cursor(first)
    for step in range(50):
        cursor.advance(step)
    before = {sample for samples in steps_of(cursor, range(50)) for sample in samples}
    again = Cursor(other, allow=["data"])
    again.load_state_dict(cursor.state_dict())
    after = [sample for samples in steps_of(again, range(50, 60)) for sample in samples]
    assert not before & set(after)
    assert min(sample.epoch for sample in after) > max(sample.epoch for sample in before)


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("after", [6, 7, 12, 13])
def test_a_certificate_deals_the_same_samples(shuffle, after):
    cursor = Cursor(replace(WALK, shuffle=shuffle))
    cursor.advance(after)
    again = Cursor(replace(WALK, shuffle=shuffle, per_lane=5), allow=["batch"])
    again.load_state_dict(cursor.state_dict())
    assert again.segments[1].turned or after != 6, "nothing begins within a pattern"
    for its in (cursor, again):
        assert tuple(Segment.from_json(json.loads(json.dumps(one.to_json()))) for one in its.segments) == its.segments
        for steps in (range(30), range(9, 14)):
            found = [samples for _, samples, _ in dealt(its.segments, steps, {})]
            wanted = [its.ids(step, 0, lane) for step in steps for lane in range(4)]
            assert [s for samples in found for s in samples] == [(s.epoch, s.index) for mine in wanted for s in mine]


def test_a_certificate_names_levels_and_spans_where_a_job_has_them_and_older_ones_are_read():
    # Found by the fuzz of certificates: those from before there were levels were said to be none.
    text = (Path(__file__).parents[1] / "data" / "run.cert.json").read_bytes()
    older = form.read(text)
    assert older.text == text
    cursor = Cursor(WALK)
    cursor.advance(6)
    again = Cursor(replace(WALK, lanes=8, spans=2, stages=WALK.stages), allow=["lanes"])
    again.load_state_dict(cursor.state_dict())
    assert again.segments[1].turned
    newer = replace(older, body=replace(older.body, segments=again.segments))
    assert form.read(newer.text) == newer
    spelt_out = text.replace(b'"size":50,', b'"size":50,"spans":1,')
    assert spelt_out != text
    with pytest.raises(form.Unfit, match="not written as certificates are"):
        form.read(spelt_out)


@pytest.mark.parametrize("turned", [-1, 1000, True, "1", 3])
def test_a_segment_in_a_pattern_that_was_never_begun_is_refused(turned):
    row = Cursor(WALK).segments[0].to_json()
    with pytest.raises(ValueError, match="no cursor was there"):
        Segment.from_json(row | {"turned": turned})


@pytest.mark.parametrize(
    ("levels", "stages"),
    [
        ((30, 50), STAGES),
        ((30, 50, 20), ()),
        ((30, 50, 20), ((1, 1, 1, 1),)),
        ((30, 50, 20), ((0, 1, 1, 1), (0, 1, 1, 1))),
        ((30, 50, 20), ((0, 0, 0, 0),)),
        ((30, 50, 20), ((0, 1, 1),)),
        ((30, 50, 20), ((0, 1, 1, 999),)),
        ((0, 80, 20), STAGES),
        ((), STAGES),
    ],
)
def test_what_is_no_curriculum_is_refused_in_a_configuration_and_in_a_file(levels, stages):
    assert fault(levels, stages, 100)
    with pytest.raises(DataError, match="is refused"):
        Cursor(replace(WALK, levels=levels, stages=stages))
    row = Cursor(WALK).segments[0].to_json()
    row["walk"] |= {"levels": levels, "stages": stages}
    with pytest.raises(ValueError, match="no cursor"):
        Segment.from_json(row)


@pytest.mark.parametrize("used", [[], [1, 2], [1, 2, -1], [1, 2, True], "abc"])
def test_a_place_that_no_cursor_was_at_is_refused(used):
    row = Cursor(WALK).segments[0].to_json() | {"used": used}
    with pytest.raises(ValueError, match="no cursor was there"):
        Segment.from_json(row)
