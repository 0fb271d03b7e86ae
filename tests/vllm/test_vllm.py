"""vLLM itself, on a CPU: samples that depend on the request and the weights alone, through any death of the engine."""

from dataclasses import replace

import elastic_kit
import pytest
import torch
import turns_kit
from served_kit import (
    LIMITS,
    SAMPLING,
    Trainer,
    end,
    gang,
    gone,
    home_of,
    job,
    moved,
    outcome,
    pid_of,
    requests,
    returned,
    same,
    service,
    strike,
    struck,
    until,
)

from elasticrl.config.training import Model
from elasticrl.ppo import models, tiny
from elasticrl.ppo.batches import Block, take
from elasticrl.ppo.losses import logprobs
from elasticrl.ppo.roles import response
from elasticrl.ppo.rollout import weights
from elasticrl.ppo.rollout.engine import Draw, StaleWeights
from elasticrl.ppo.rollout.inline import TorchEngine
from elasticrl.ppo.rollout.vllm_process import fit, installed

pytestmark = pytest.mark.timeout(
    900
)  # engines take 7 s of processor time each to start, and the first test of a gang waits twice
GAP = 1e-5  # nats, float32: between vLLM's forward passes and the trainer's (5e-7 to 2e-6 seen)
PATIENT = replace(LIMITS, start_s=250.0, health_s=60.0)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tiny.write(tmp_path_factory.mktemp("model"), hidden=64, layers=2, heads=2)  # vLLM wants heads of 16 and more


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    folder = tmp_path_factory.mktemp("engine")
    yield folder
    end(folder)


@pytest.fixture
def actor(path):
    return models.actor(Model(), path, seed=0)


@pytest.fixture
def trainer(home, path, actor):
    found = Trainer(home, service(path, program="vllm"), limits=PATIENT)
    found.enter(actor)
    yield found
    found.attendant.close()


def gap(actor, samples, temperature=1.0):
    """The greatest difference between a token's log-probability here and there."""
    whole = {"tokens": samples.tokens, "attention": samples.attention, "mask": samples.mask}
    rows = take(whole, Block(torch.arange(len(samples.mask)), *samples.tokens.shape[1:], *samples.mask.shape[1:]))
    with torch.no_grad():
        logits, _ = models.response_logits(actor, rows)
    mine = logprobs(logits, response(rows), temperature)
    assert not samples.logprobs[~samples.mask].any()
    return (mine - samples.logprobs)[samples.mask].abs().max()


def afresh(trainer, asked, version):
    """Generated now, not remembered."""
    trainer.engine.found.clear()
    return trainer.engine.generate(asked, version=version)


def test_the_version_that_is_locked_is_one_that_works():
    fit(installed())


def test_a_sample_depends_on_its_request_and_the_weights_alone(trainer):
    trainer.engine.publish(1)
    whole = trainer.engine.generate(requests(60), version=1)
    lengths = whole.mask.sum(1)
    assert len(set(lengths.tolist())) > 1, "no sample ended early: the test would prove less than it says"
    for tokens, mask, ended in zip(whole.tokens[:, 7:].tolist(), whole.mask, whole.ended.tolist(), strict=True):
        length = int(mask.sum())
        assert (tokens[length - 1] == SAMPLING.eos[0]) == ended
        assert ended or length == SAMPLING.max_tokens
    backwards = afresh(trainer, requests(60)[::-1], 1)
    assert torch.equal(backwards.tokens.flip(0), whole.tokens)
    assert torch.equal(backwards.logprobs.flip(0), whole.logprobs)
    alone = afresh(trainer, requests(1, 37), 1)
    assert torch.equal(alone.tokens[0], whole.tokens[37])
    assert torch.equal(alone.logprobs[0], whole.logprobs[37])
    other = afresh(trainer, [replace(r, seed=r.seed + 1000) for r in requests(60)], 1)
    assert not torch.equal(other.tokens, whole.tokens)


def test_logprobs_are_the_trainer_s_within_the_stated_gap_before_and_after_an_update(trainer, actor):
    trainer.engine.publish(2)
    before = trainer.engine.generate(requests(60), version=2)
    assert gap(actor, before) < GAP
    moved(actor)
    assert gap(actor, before) > 100 * GAP, "the update was too small to show anything"
    trainer.engine.publish(3)
    after = trainer.engine.generate(requests(60), version=3)
    assert gap(actor, after) < GAP, "old weights, or what they left in the cache of prefixes"
    with pytest.raises(StaleWeights):
        trainer.engine.generate(requests(1), version=2)


def test_an_engine_killed_in_the_middle_costs_its_unfinished_samples_time_alone(trainer, home, actor):
    trainer.engine.publish(4)
    asked = requests(400)
    wanted = trainer.engine.generate(asked, version=4)
    trainer.engine.found.clear()
    first = trainer.ready()
    at = trainer.kill_when(lambda: len(trainer.engine.found) > 0)
    found = trainer.engine.generate(asked, version=4)
    assert at, "it was not struck in the middle"
    assert 0 < at[0] < 400
    assert same(found, wanted)
    assert pid_of(home) != first
    assert gone(first)
    moved(actor)
    trainer.engine.publish(5)
    assert gap(actor, trainer.engine.generate(asked, version=5)) < GAP


def test_what_is_held_out_is_drawn_as_it_asks_beside_what_is_trained_on(trainer, actor):
    trainer.engine.publish(6)
    greedy = [replace(one, draw=Draw(tokens=4, temperature=0.0)) for one in requests(20)]
    mixed = trainer.engine.generate([*requests(20), *greedy], version=6)
    assert torch.equal(mixed.tokens[:20], afresh(trainer, requests(20), 6).tokens)
    likeliest = TorchEngine(actor, replace(SAMPLING, temperature=0.0)).generate(requests(20), version=0)
    assert torch.equal(mixed.tokens[20:, :11], likeliest.tokens[:, :11])
    assert (mixed.mask[20:].sum(1) <= 4).all()


def test_at_another_temperature_logprobs_are_of_what_was_sampled_from(tmp_path, path, actor):
    warm = Trainer(tmp_path, service(path, program="vllm", sampling=replace(SAMPLING, temperature=0.7)), limits=PATIENT)
    warm.enter(actor)
    warm.engine.publish(0)
    samples = warm.engine.generate(requests(40), version=0)
    assert gap(actor, samples, 0.7) < GAP
    assert gap(actor, samples, 1.0) > 100 * GAP

    def most():
        yield from list(weights.buckets(actor, nbytes=1 << 12, dtype=torch.float32))[:-1]

    warm.engine.enter(life="2 here", source=most, writes=True, gathers=False)
    with pytest.raises(StaleWeights, match="were not sent"):
        warm.engine.publish(0)
    warm.attendant.close()
    until(lambda: gone(pid_of(tmp_path)), "the end of an engine with half a set of weights")


@pytest.mark.slow
def test_turns_and_evaluations_of_them_go_through_it_to_the_same_bits_though_a_worker_dies(tmp_path):
    conf = turns_kit.small(tmp_path)
    conf["model"]["path"] = tiny.write(tmp_path / "wide", hidden=64, layers=2, heads=2, words=turns_kit.WORDS)
    vllm = {"gpu_memory_utilization": 0.05, "kv_cache": "8MiB", "max_num_seqs": 64}
    conf["rollout"] |= {"engine": "vllm", "vllm": vllm, "start_timeout": "250s", "health_timeout": "60s"}
    conf["evaluate"] = {"every": 4, "prompts": conf["data"]["path"], "limit": 10, "samples": 2}
    found = []
    for name, kills in (("alone", 0), ("struck", 1)):
        with elastic_kit.nodes(tmp_path / name, conf, copies=0) as one:
            one.plan("n0")
            for _ in range(kills):
                one.until_sealed(2, within_s=280.0)
                one.kill_worker("n0")
                one.plan("n0")
            one.until_done(within_s=400.0)
            found.append(elastic_kit.outcome(one))
    assert found[0] == found[1]


@pytest.fixture(scope="module")
def conf(tmp_path_factory):
    vllm = {"gpu_memory_utilization": 0.05, "kv_cache": "8MiB", "max_num_seqs": 64}
    more = {"engine": "vllm", "vllm": vllm, "start_timeout": "250s"}
    return job(tmp_path_factory.mktemp("job"), more, hidden=64, heads=2)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, conf):
    with gang(tmp_path_factory.mktemp("alone") / "gang", conf, world=1) as alone:
        alone.plan("n0")
        alone.until_done(within_s=280.0)
        return outcome(alone)


def test_two_workers_come_to_the_bits_of_one_through_the_deaths_of_engines_and_a_worker(tmp_path, conf, undisturbed):
    with gang(tmp_path, conf, world=2) as both:
        strike(tmp_path, "n0", "sync", 1)
        strike(tmp_path, "n1", "rollout", 3)
        both.plan("n0", "n1")
        both.until(lambda: struck(tmp_path, "n1"), "the end of n1's engine", 280.0)
        returned(both, tmp_path, "n0")
        both.kill_worker("n0")
        both.plan("n0", "n1")
        both.until_done(within_s=280.0)
        assert struck(tmp_path, "n0")
        assert "adopted" in both.workers["n0"].text
        assert outcome(both) == undisturbed
    for node in ("n0", "n1"):
        home = home_of(tmp_path, node)
        until(lambda home=home: not home.exists(), f"the end of {node}'s engine with the job, and of all that it had")


@pytest.mark.parametrize(
    ("strategy", "world"),
    [
        ("replicated", 3),
        pytest.param("fsdp", 2, marks=pytest.mark.slow),
        pytest.param("replicated", 4, marks=pytest.mark.slow),
    ],
)
def test_any_number_of_workers_comes_to_the_bits_of_one(tmp_path, conf, undisturbed, strategy, world):
    with gang(tmp_path, conf, world=world, strategy=strategy) as many:
        strike(tmp_path, "n1", "rollout", 3)
        many.plan(*(f"n{i}" for i in range(world)))
        many.until_done(within_s=800.0)
        assert struck(tmp_path, "n1")
        assert outcome(many) == undisturbed
