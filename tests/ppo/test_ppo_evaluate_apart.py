"""Evaluations that the job's engine answers: as a worker would, for any deal of lanes, and through the engine's death."""

from dataclasses import replace

import pytest
from ppo_job import job
from served_kit import LIMITS, Trainer, end, service

from elasticrl.config.training import Evaluate
from elasticrl.ppo.evaluation import Evaluation
from elasticrl.ppo.rollout.engine import Draw, EngineFailed

ASKED = Evaluate(every=2, at_start=True, prompts="x", samples=3, temperature=0.7, limit=14, threshold=0.3, shown=2)
DRAW = Draw(tokens=3, temperature=0.7)


@pytest.fixture(scope="module")
def beside(tmp_path_factory, folders):
    """A trainer's end of an engine that serves the sampling of `ppo_job`."""
    home, plain = tmp_path_factory.mktemp("engine"), job(folders["qwen2"])[0].engine.sampling
    found = Trainer(home, service(folders["qwen2"], sampling=plain), limits=LIMITS)
    yield found
    found.on_turn = lambda: None
    found.attendant.close()
    end(home)


def made(folders, beside, *, draw=DRAW, carried=None):
    """What the weights that a job begins with come to, in the worker and by the engine beside it."""
    trainer, run = job(folders["qwen2"], evaluate=ASKED, carried=carried)
    here = trainer.evaluation
    here.engine.sampling = replace(here.engine.sampling, max_tokens=3)
    engine = beside.engine
    beside.enter(trainer.roles.actor, life=f"{id(run)} here")
    engine.found.clear()
    apart = Evaluation(run, engine, here.prompts, ASKED, lanes=4, steps=3, draw=draw)
    run.begin(0)
    for each in (here, apart):
        run.buffer.facts.clear()
        yield each.before(0, trainer.scorer, trainer.roles.tokenizer, trainer.idle)


def test_an_engine_beside_the_worker_answers_as_the_worker_does(folders, beside):
    here, apart = made(folders, beside)
    assert apart == here
    assert max(len(sample.answer) for sample in apart.samples) <= 3
    assert list(made(folders, beside, carried=((3, 1, 0, 2),))) == [here, apart]


def test_an_engine_that_dies_in_the_middle_changes_no_figure(folders, beside):
    runs = made(folders, beside)
    here = next(runs)
    beside.ready()
    struck = beside.kill_when(lambda: len(beside.engine.found) > 0)
    assert next(runs) == here
    assert struck
    assert struck[0] < 3 * 14, "all was there"


def test_an_engine_refuses_to_draw_what_cannot_be_drawn(folders, beside):
    for draw, why in (
        (Draw(tokens=5), "5 tokens were asked for, where 1 to 4 fit"),
        (replace(DRAW, temperature=-1.0), "nothing is drawn at temperature -1"),
        (replace(DRAW, top_p=0.0), "top_p 0"),
        (replace(DRAW, top_k=-2), "its top_k -2"),
    ):
        runs = made(folders, beside, draw=draw)
        next(runs)
        with pytest.raises(EngineFailed, match=why):
            next(runs)
