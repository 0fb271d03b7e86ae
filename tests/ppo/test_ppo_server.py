"""A server of vLLM's or SGLang's kind as engine: by the weights that it was given and no others, whoever starts it anew.

All with a server of ours that answers as theirs do. tests/vllm does the like with `vllm serve`.
"""

from contextlib import closing, contextmanager
from dataclasses import replace

import pytest
import torch
from elastic_kit import events
from served_kit import LIMITS, SAMPLING, Trainer, end, gang, job, moved, outcome, requests, service, until
from server_kit import serving

from elasticrl.config.training import Model
from elasticrl.ppo import models, tiny
from elasticrl.ppo.batches import Block, take
from elasticrl.ppo.losses import logprobs
from elasticrl.ppo.roles import response
from elasticrl.ppo.rollout import weights
from elasticrl.ppo.rollout.engine import Draw, EngineFailed, StaleWeights
from elasticrl.ppo.rollout.inline import TorchEngine
from elasticrl.ppo.rollout.server_process import Failed, Http, ServerProgram, claimed
from elasticrl.ppo.rollout.service import Served, Unfit
from elasticrl.store.embedded import free_ports

GAP = 1e-5  # nats, float32


def at(url):
    return Served(url=url, weights="", at_once=8, load_s=30.0, answer_s=600.0)


@contextmanager
def trained_by(fake, folder, path, actor, *, limits=LIMITS):
    """A trainer whose engine asks that server."""
    what = service(path, program="server", server=at(fake.url))
    trainer = Trainer(folder / "engine", what, limits=limits)
    trainer.enter(actor)
    try:
        yield trainer
    finally:
        trainer.on_turn = lambda: None
        trainer.attendant.close()
        end(folder / "engine")


@pytest.fixture
def actor(folders):
    return models.actor(Model(), folders["qwen2"], seed=0)


def gap(actor, samples):
    """The greatest difference between a token's log-probability here and there."""
    whole = {"tokens": samples.tokens, "attention": samples.attention, "mask": samples.mask}
    rows = take(whole, Block(torch.arange(len(samples.mask)), *samples.tokens.shape[1:], *samples.mask.shape[1:]))
    with torch.no_grad():
        logits, _ = models.response_logits(actor, rows)
    mine = logprobs(logits, response(rows), 1.0)
    return (mine - samples.logprobs)[samples.mask].abs().max()


def afresh(trainer, asked, version):
    """Generated now, not remembered."""
    trainer.engine.found.clear()
    return trainer.engine.generate(asked, version=version)


@pytest.mark.parametrize("dialect", ["vllm", "sglang"])
def test_samples_are_by_the_weights_that_were_given_last(tmp_path, folders, actor, dialect):
    moved(actor)  # so the server's own weights are others
    with (
        serving(dialect, folders["qwen2"], tmp_path) as fake,
        trained_by(fake, tmp_path, folders["qwen2"], actor) as trainer,
    ):
        trainer.engine.publish(1)
        first = trainer.engine.generate(requests(40), version=1)
        assert gap(actor, first) < GAP
        lengths = first.mask.sum(1).tolist()
        assert len(set(lengths)) > 1, "no sample ended early: the test would prove less than it says"
        for tokens, length, ended in zip(first.tokens[:, 7:].tolist(), lengths, first.ended.tolist(), strict=True):
            assert (tokens[length - 1] == SAMPLING.eos[0]) == ended
        moved(actor)
        assert gap(actor, first) > 100 * GAP, "the update was too small to show anything"
        trainer.engine.publish(2)
        assert gap(actor, trainer.engine.generate(requests(40), version=2)) < GAP
        with pytest.raises(StaleWeights):
            trainer.engine.generate(requests(1), version=1)
        assert not list((tmp_path / "engine").glob("elasticrl-weights-*")), "weights that nobody needs stay in memory"


@pytest.mark.parametrize("dialect", ["vllm", "sglang"])
def test_a_server_that_is_started_anew_generates_nothing_by_the_weights_that_it_began_with(
    tmp_path, folders, actor, dialect
):
    moved(actor)
    with (
        serving(dialect, folders["qwen2"], tmp_path) as fake,
        trained_by(fake, tmp_path, folders["qwen2"], actor) as trainer,
    ):
        trainer.engine.publish(1)
        trainer.engine.generate(requests(4), version=1)
        fake.kill()  # while nobody asks
        fake.start()
        until(lambda: answers(fake), "the next server")
        assert gap(actor, afresh(trainer, requests(40), 1)) < GAP
        struck = []

        def turn():  # while some are under way
            if not struck and len(trainer.engine.found) > 5:
                struck.append(len(trainer.engine.found))
                fake.kill()
                fake.start()

        trainer.on_turn = turn
        assert gap(actor, afresh(trainer, requests(60, 100), 1)) < GAP
        assert struck
        assert struck[0] < 60, "it was killed when all was there"


def holds(fake):
    return fake.ask("/weight_info")["weight_version"]


def answers(fake):
    try:
        return bool(fake.ask("/version" if "vllm" in fake.command else "/get_server_info"))
    except Failed:
        return False


@pytest.mark.parametrize("dialect", ["vllm", "sglang"])
def test_what_is_held_out_is_drawn_as_it_asks_beside_what_is_trained_on(tmp_path, folders, actor, dialect):
    with (
        serving(dialect, folders["qwen2"], tmp_path) as fake,
        trained_by(fake, tmp_path, folders["qwen2"], actor) as trainer,
    ):
        trainer.engine.publish(1)
        greedy = [replace(one, draw=Draw(tokens=4, temperature=0.0)) for one in requests(16)]
        mixed = trainer.engine.generate([*requests(16), *greedy], version=1)
        assert torch.equal(mixed.tokens[:16], afresh(trainer, requests(16), 1).tokens)
        likeliest = TorchEngine(actor, replace(SAMPLING, temperature=0.0)).generate(requests(16), version=0)
        assert torch.equal(mixed.tokens[16:, :11], likeliest.tokens[:, :11])
        assert (mixed.mask[16:].sum(1) <= 4).all()
        assert not torch.equal(mixed.tokens[:16], mixed.tokens[16:])


def test_weights_that_somebody_else_has_put_there_are_noticed_and_replaced(tmp_path, folders, actor):
    moved(actor)
    with (
        serving("vllm", folders["qwen2"], tmp_path) as fake,
        trained_by(fake, tmp_path, folders["qwen2"], actor) as trainer,
    ):
        trainer.engine.publish(1)
        trainer.engine.generate(requests(4), version=1)
        before = trainer.ready()
        fake.ask("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": folders["qwen2"]}})
        fake.ask("/update_weight_version", {"new_version": "another"})
        assert gap(actor, afresh(trainer, requests(20), 1)) < GAP
        assert trainer.ready() != before
        assert fake.ask("/weight_info")["weight_version"].startswith("elasticrl-1-")


def test_a_server_that_hangs_is_said_to_and_goes_on_when_it_can(tmp_path, folders, actor):
    impatient = replace(LIMITS, health_s=4.0)
    with (
        serving("vllm", folders["qwen2"], tmp_path) as fake,
        trained_by(fake, tmp_path, folders["qwen2"], actor, limits=impatient) as trainer,
    ):
        trainer.engine.publish(1)
        trainer.engine.generate(requests(4), version=1)
        fake.hang.touch()

        def turn():
            if any("said nothing for 4 s" in said for said in trainer.said):
                fake.hang.unlink(missing_ok=True)

        trainer.on_turn = turn
        assert gap(actor, afresh(trainer, requests(8), 1)) < GAP
        assert not fake.hang.exists(), "it was never missed"


def test_what_a_server_lacks_is_said_at_once_with_what_to_do(tmp_path, folders):
    with serving("vllm", folders["qwen2"], tmp_path, "--room", "12") as fake:
        until(lambda: answers(fake), "the server")
        what = service(folders["qwen2"], program="server", server=at(fake.url))
        with pytest.raises(Unfit, match=r"takes 12 tokens at most.*13 together"):
            ServerProgram(what)
        fits = replace(what, sampling=replace(SAMPLING, max_tokens=3))
        with claimed(fake.url), pytest.raises(Failed, match="another job's engine"):
            claimed(fake.url)
        with closing(ServerProgram(fits)) as program:
            assert program.versions == {"vllm": "0.32.0"}


def test_a_server_with_a_key_is_shown_it(tmp_path, folders, monkeypatch):
    with serving("sglang", folders["qwen2"], tmp_path, "--token", "w0rd") as fake:
        until(lambda: unauthorized(fake), "the server")
        with pytest.raises(Unfit, match=r"401.*ROLLOUT_SERVER_TOKEN"):
            ServerProgram(service(folders["qwen2"], program="server", server=at(fake.url)))
        monkeypatch.setenv("ROLLOUT_SERVER_TOKEN", "w0rd")
        what = service(folders["qwen2"], program="server", server=at(fake.url))
        with closing(ServerProgram(what)) as program:
            assert program.versions == {"sglang": "0.6.1"}


def unauthorized(fake):
    try:
        fake.ask("/get_server_info")
    except Failed as error:
        return "401" in str(error)
    return False


def test_a_server_that_does_not_take_the_weights_ends_its_engine_and_has_no_good_name(
    tmp_path, folders, actor, monkeypatch
):
    def gave_up(why):
        raise Failed(why)

    monkeypatch.setattr("elasticrl.ppo.rollout.server_process.gave_up", gave_up)
    with serving("vllm", tiny.write(tmp_path / "other", hidden=64), tmp_path) as fake:
        until(lambda: answers(fake), "the server")
        tag = weights.Tag(life="1 here", version=3)
        weights.write(tmp_path, tag, weights.buckets(actor, nbytes=1 << 12, dtype=torch.float32), within_s=1.0)
        what = service(folders["qwen2"], program="server", server=at(fake.url))
        with closing(ServerProgram(what)) as program, pytest.raises(Failed, match=r"did not take .*HTTP 500"):
            program.load(tmp_path, tag)
        assert fake.ask("/weight_info")["weight_version"] == "elasticrl-loads", "half of two sets has no good name"


def test_a_server_that_cannot_be_reached_is_a_failure_with_its_address():
    port = free_ports()[0]
    with pytest.raises(Failed, match=f"127.0.0.1:{port}/version did not answer"):
        Http(f"http://127.0.0.1:{port}", "").ask("/version", within_s=2.0)


def test_an_engine_whose_server_never_comes_fails_with_a_sentence(tmp_path, folders, actor):
    port = free_ports()[0]
    limits = replace(LIMITS, start_s=3.0, starts=1)
    what = service(folders["qwen2"], program="server", server=at(f"http://127.0.0.1:{port}"))
    trainer = Trainer(tmp_path / "engine", what, limits=limits)
    trainer.enter(actor)
    try:
        trainer.engine.publish(1)
        with pytest.raises(EngineFailed, match="did not answer"):
            trainer.engine.generate(requests(1), version=1)
    finally:
        trainer.attendant.close()


def test_a_job_trains_on_each_sample_once_and_evaluates_though_its_server_is_killed(tmp_path):
    conf = job(tmp_path, {"engine": "server"})
    evaluate = {"every": 2, "at_start": True, "prompts": conf["data"]["path"], "limit": 6, "samples": 2, "shown": 1}
    conf |= {"evaluate": evaluate, "telemetry": {"format": "json"}}
    with serving("vllm", conf["model"]["path"], tmp_path) as fake:
        conf["rollout"]["server"] = {"url": fake.url}
        with gang(tmp_path, conf, world=1) as nodes:
            nodes.plan("n0")
            nodes.until(lambda: answers(fake) and holds(fake).startswith("elasticrl-"), "the first weights", 200.0)
            fake.kill()
            fake.start()
            log = nodes.workers["n0"].log
            nodes.until_done(within_s=250.0)
        assert len(outcome(nodes)) > 0
    told = [event for event in events(log) if event["event"] == "ppo.evaluate"]
    assert [event["step"] for event in told] == [0, 2, 3]
    assert len({(event["metrics"]["score"], event["metrics"]["length"]) for event in told}) > 1, (
        "each by its own weights"
    )
    assert all(0 < event["metrics"]["length"] <= 4 for event in told)
