"""Settings that change in a job's life: nothing that was generated under the old ones is taken for a step of the new ones."""

from dataclasses import replace

import pytest
import torch
from ppo_job import job, settings

from elasticrl.config.training import Kl
from elasticrl.ppo.__main__ import Feed
from elasticrl.ppo.elastic import BufferPart, weights_of
from elasticrl.ppo.run import Ahead, Buffer
from elasticrl.ppo.staleness import Staleness
from elasticrl.runtime.data.cursor import Cursor, Walk
from elasticrl.runtime.vault.errors import CheckpointRefused


def dealt(folders, group, *, stages=(), after=None):
    """(trainer, run) of a job whose prompts a cursor deals, from the beginning or `after` step 0 of another one."""
    trainer, run = job(
        folders["qwen2"],
        ppo=settings(algorithm="grpo", group=group, epochs=1, kl=Kl(where="off")),
        staleness=Staleness(steps=1),
    )
    data, spans = trainer.feed.prompts, trainer.groups.spans
    levels = (len(data) // 2,) * 2 if stages else ()
    walk = Walk(size=len(data), lanes=4, per_lane=1, spans=spans, seed=1, levels=levels, stages=stages)
    cursor = Cursor(walk, group=group, allow=("batch", "data"))
    if after is not None:
        its, other = after
        other.advance(0)
        cursor.load_state_dict(other.state_dict())
        run.buffer.load_state_dict(its.buffer.state_dict())
    trainer.feed = trainer.generator.feed = Feed(cursor, data)
    return trainer, run, cursor


def rolled_out(trainer, run):
    """Step 1: how many samples it generates, and the ids that its lanes have."""
    run.streams = run.streams.at(step=1)
    run.begin(1)
    asked, generate = list[str](), trainer.engine.generate

    def spy(requests, *, version):
        asked.extend(request.id for request in requests)
        return generate(requests, version=version)

    trainer.engine.generate = spy
    trainer.generator.rollout()
    return len(asked), run.buffer.ids


@pytest.mark.parametrize(
    ("group", "was", "now"),
    [
        (8, (), ()),
        (16, (), ()),
        (8, ((0, 1, 1),), ((0, 1, 1),)),
        (8, ((0, 1, 1),), ((0, 1, 0),)),
    ],
)
def test_what_was_generated_ahead_for_other_lanes_of_other_prompts_is_generated_anew(folders, group, was, now):
    # Found by reading: lane 0 alone was looked at, which begins with the same samples in groups of 8 and of 16, and where
    # another stage takes over. So old answers were scored against other prompts.
    trainer, run, cursor = dealt(folders, 8, stages=was)
    trainer.step(0)
    early = run.buffer.ahead[1].ids
    later, anew, _ = dealt(folders, group, stages=now, after=(run, cursor))
    asked, ids = rolled_out(later, anew)
    members = later.groups.members
    assert ids == {lane: [f"{name}.{i}" for name, _ in later.feed(1, lane) for i in members(lane)] for lane in range(4)}
    assert ids[0] == early[0]
    assert (ids == early, asked) == ((True, 0) if (group, now) == (8, was) else (False, 32))


WALK = Walk(name="d", content="9f", size=100, lanes=8, per_lane=2, spans=2, seed=1)
LEVELS = {"levels": (60, 40), "stages": ((0, 1, 1), (9, 1, 2))}


@pytest.mark.parametrize(
    ("was", "now"),
    [
        (Cursor(WALK, group=16), Cursor(replace(WALK, spans=4, per_lane=4), group=16)),
        (Cursor(WALK, group=8), Cursor(WALK, group=16)),
        (Cursor(WALK), Cursor(replace(WALK, content="86"))),
        (Cursor(replace(WALK, **LEVELS)), Cursor(replace(WALK, **LEVELS | {"stages": ((0, 1, 1), (9, 1, 3))}))),
    ],
    ids=["layout", "group", "data", "stages"],
)
def test_rows_of_a_step_that_was_dealt_otherwise_are_nobodys_between_steps_and_refused_inside_of_one(was, now):
    # Found by reading: `--allow` is for what comes, and kept rows of "2 prompts x 8" were read as "4 prompts x 4".
    lanes = range(8)
    rows = {lane: {"tokens": torch.zeros(2, 3, dtype=torch.int64)} for lane in lanes}
    ids = {lane: ["0:9"] for lane in lanes}

    def part(buffer, cursor):
        return BufferPart(buffer, lambda: list(lanes), lanes=8, recipe=cursor.recipe)

    between = part(Buffer(step=4, ahead={5: Ahead(16, "it", rows, ids)}), was).values()
    inside = part(Buffer(step=4, rows=rows, ids=ids), was).values()
    for values in (between, inside):
        fresh = Buffer()
        same = part(fresh, was)
        same.prepare(values)
        same.restored(values)
        assert bool(fresh.ahead) == (values is between)
        assert any(fresh.rows.values()) == (values is inside)
        same.prepare(
            {**values, "head": {k: v for k, v in values["head"].items() if k != "recipe"}}
        )  # of an earlier version
    buffer = Buffer()
    other = part(buffer, now)
    other.prepare(between)
    other.restored(between)
    assert not buffer.ahead
    assert not any(buffer.rows.values())
    with pytest.raises(
        CheckpointRefused, match=r"inside of step 4, whose samples were dealt otherwise.* until that step is"
    ):
        other.prepare(inside)


def test_a_step_may_be_gone_on_with_over_its_samples_another_time_or_for_more_epochs():
    assert Cursor(WALK).recipe() == Cursor(replace(WALK, turns=3, epochs=9)).recipe()


@pytest.mark.parametrize(
    ("was", "now", "ages"),
    [
        # Found by reading: the samples of steps 3 and 4 were written down as step 0's, by the rule, and step 2's made them.
        (0, 4, [0, 0, 0, 1, 2, 1]),
        # Found by reading: those of steps 2 and 3 were taken, which were 2 and 3 steps old under a bound of 1.
        (4, 1, [0, 1, 0, 1, 1, 1]),
    ],
)
def test_under_another_bound_of_staleness_the_weights_are_written_down_that_made_the_samples(folders, was, now, ages):
    made, found, kept = dict[str, int](), [], None
    for staleness, steps in ((was, range(2)), (now, range(2, 6))):
        trainer, run = job(folders["qwen2"], ppo=settings(epochs=1), staleness=Staleness(steps=staleness))
        if kept is not None:
            run.buffer.load_state_dict(kept)
        generate, first = trainer.engine.generate, steps.start

        def spy(requests, *, version, generate=generate, first=first):
            made.update((request.id, first + version // 2) for request in requests)  # 2 updates a step
            return generate(requests, version=version)

        trainer.engine.generate = spy
        for step in steps:
            trainer.step(step)
            by = {weights for lane in run.lanes for weights in weights_of(run.buffer, lane, run.buffer.ids[lane])}
            assert by == {made[name] for lane in run.lanes for name in run.buffer.ids[lane]}
            found += [step - weights for weights in by]
        kept = run.buffer.state_dict()
    assert found == ages
