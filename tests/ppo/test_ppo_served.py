"""The engine beside the worker: the same samples as in it, through any death of either; never by stale or torn weights.

All with the program `torch`, which needs no more than the worker does. tests/vllm does the like with vLLM.
"""

import errno
import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
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

from chaos.patience import patience
from elasticrl.config.training import Model
from elasticrl.contract.beats import Beat
from elasticrl.contract.model import OUTSIDE
from elasticrl.ppo import models
from elasticrl.ppo.rollout import weights
from elasticrl.ppo.rollout.attend import LOOK_S, START_LOCK
from elasticrl.ppo.rollout.engine import EngineFailed, StaleWeights
from elasticrl.ppo.rollout.inline import TorchEngine
from elasticrl.ppo.rollout.outside import SIGN_S
from elasticrl.ppo.rollout.process import Server
from elasticrl.ppo.rollout.served import SILENT_S, Served
from elasticrl.ppo.rollout.service import LOADS, Unfit
from elasticrl.ppo.rollout.torch_process import TorchProgram
from elasticrl.ppo.rollout.vllm_process import Extension, fit, taken
from elasticrl.ppo.rollout.wire import PROTOCOL, SOCKET, STRANGERS, Frame, Inbox, Lost, Refused, Talk


@pytest.fixture
def actor(folders):
    return models.actor(Model(), folders["qwen2"], seed=0)


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """Where an engine is, for all tests that leave it as they found it: alive, or dead."""
    folder = tmp_path_factory.mktemp("engine")
    yield folder
    end(folder)


@pytest.fixture
def trainer(home, folders, actor):
    found = Trainer(home, service(folders["qwen2"]))
    found.enter(actor)
    yield found
    found.attendant.close()


def inline(actor, asked):
    return TorchEngine(actor, SAMPLING).generate(asked, version=0)


# ---- samples


def test_samples_are_bit_for_bit_those_of_the_worker_s_own_engine(trainer, actor):
    trainer.engine.publish(3)
    found = trainer.engine.generate(requests(40), version=3)
    assert found.version == 3
    assert same(found, inline(actor, requests(40)))
    mixed = requests(40)[::-3]
    trainer.enter(actor, life="2 here")
    trainer.engine.publish(4)
    assert same(trainer.engine.generate(mixed, version=4), inline(actor, mixed))
    assert trainer.engine.generate([], version=4).tokens.shape == (0, 13)


def test_new_weights_make_new_samples_and_old_ones_are_refused(trainer, actor):
    trainer.engine.publish(0)
    before = trainer.engine.generate(requests(20), version=0)
    with pytest.raises(StaleWeights, match="version 1 were asked for, those published are of 0"):
        trainer.engine.generate(requests(1), version=1)
    moved(actor)
    trainer.engine.publish(1)
    after = trainer.engine.generate(requests(20), version=1)
    assert same(after, inline(actor, requests(20)))
    assert not torch.equal(before.tokens, after.tokens)
    with trainer.attendant.talk(trainer.check) as talk:
        old = asdict(weights.Tag(life="1 here", version=0))
        talk.send("generate", b"\0" * 4, tag=old, ids=["0"], seeds=[1], lengths=[1], widths=[0])
        with pytest.raises(Refused, match="version 0 of life '1 here' was asked, it has 1") as refused:
            talk.receive()
        assert refused.value.kind == "stale"


def test_of_a_model_with_adapters_they_alone_are_sent_and_the_samples_are_the_worker_s_own(tmp_path, folders):
    lora = {"rank": 2, "alpha": 8.0, "targets": ["q_proj", "v_proj"]}
    actor = models.actor(Model.model_validate_json(json.dumps({"lora": lora})), folders["qwen2"], seed=3)
    trainer = Trainer(tmp_path / "engine", service(folders["qwen2"], lora=lora))
    trainer.enter(actor)
    trainer.engine.publish(0)
    before = trainer.engine.generate(requests(20), version=0)
    assert same(before, inline(actor, requests(20)))
    with torch.no_grad():
        for name, param in actor.named_parameters():
            if param.requires_grad:
                param.add_(0.3 * torch.randn(param.shape, generator=torch.Generator().manual_seed(len(name))))
    trainer.engine.publish(1)
    after = trainer.engine.generate(requests(20), version=1)
    assert same(after, inline(actor, requests(20)))
    assert not torch.equal(before.tokens, after.tokens)
    page = json.loads((trainer.home / weights.PAGE).read_text())
    sent = [name for bucket in page["buckets"] for name, *_ in bucket["tensors"]]
    assert sent
    assert all(".lora_" in name for name in sent)
    trainer.engine.end()


def test_the_same_version_of_another_life_is_not_taken_for_this_one(trainer, actor):
    trainer.engine.publish(5)
    trainer.engine.generate(requests(1), version=5)
    moved(actor)
    trainer.enter(actor, life="1 there")
    trainer.engine.found.clear()
    trainer.engine.publish(5)
    assert same(trainer.engine.generate(requests(8), version=5), inline(actor, requests(8)))


def test_a_second_worker_of_the_node_waits_for_the_weights_that_the_first_hands_over(trainer, home, folders, actor):
    second = Trainer(home, service(folders["qwen2"]))
    second.enter(actor, life="7 here", writes=False)
    trainer.enter(actor, life="7 here")
    second.engine.publish(9)
    late = threading.Timer(0.3, trainer.engine.publish, [9])
    late.start()
    assert same(second.engine.generate(requests(8), version=9), inline(actor, requests(8)))
    late.join()
    impatient = Trainer(home, service(folders["qwen2"]), limits=replace(LIMITS, sync_s=0.2))
    impatient.enter(actor, life="8 here", writes=False)
    impatient.engine.publish(9)
    with pytest.raises(StaleWeights, match="has not handed over version 9"):
        impatient.engine.generate(requests(1), version=9)
    second.attendant.close()
    impatient.attendant.close()


# ---- deaths


STOPPED = pytest.param(signal.SIGSTOP, id="stopped", marks=pytest.mark.slow)


@pytest.mark.parametrize("how", [pytest.param(signal.SIGKILL, id="killed"), STOPPED])
def test_an_engine_s_death_costs_its_unfinished_samples_time_alone(home, folders, actor, how):
    limits = LIMITS if how == signal.SIGKILL else replace(LIMITS, health_s=8.0)
    trainer = Trainer(home, service(folders["qwen2"]), limits=limits)
    trainer.enter(actor)
    trainer.engine.publish(2)
    first = trainer.ready()
    struck = trainer.kill_when(lambda: len(trainer.engine.found) > 0, how)
    found = trainer.engine.generate(requests(400), version=2)
    assert struck, "it was not struck in the middle"
    assert 0 < struck[0] < 400
    assert same(found, inline(actor, requests(400)))
    assert pid_of(home) != first
    assert gone(first)
    assert any("another is started" in sentence for sentence in trainer.said)
    trainer.attendant.close()


def test_who_waits_for_its_engine_says_so_until_it_has_its_samples(home, folders, actor):
    """Else it is taken for one that hangs, and so are those who wait for it in a collective."""
    trainer = Trainer(home, service(folders["qwen2"]), limits=replace(LIMITS, health_every_s=0.2))
    try:
        trainer.enter(actor)
        trainer.engine.publish(0)
        pid = trainer.ready()
        trainer.waited.clear()
        trainer.engine.generate(requests(8), version=0)
        assert trainer.waited == [], "the engine was there"
        os.killpg(pid, signal.SIGKILL)
        until(lambda: not trainer.attendant.up, "its death is known")
        begun = time.monotonic()
        trainer.engine.generate(requests(8, start=8), version=0)
        took = time.monotonic() - begun
        assert took > 1.0, "an engine's start takes longer"
        assert trainer.waited[0] - begun < 1.0 + LOOK_S
        signs = [begun, *trainer.waited, begun + took]
        assert max(after - before for before, after in pairwise(signs)) < SIGN_S + 1.0
    finally:
        trainer.attendant.end()


def test_an_engine_that_stands_still_is_not_waited_for_as_long_as_one_that_takes_weights(tmp_path, folders, actor):
    """Found live: it was asked whether it has the weights, and had `sync_timeout` for that; its worker was ended as one that
    hangs.
    """
    limits = replace(LIMITS, health_s=2.0, sync_s=patience(LIMITS.sync_s))
    trainer = Trainer(tmp_path / "engine", service(folders["qwen2"]), limits=limits)
    trainer.enter(actor)
    pid = trainer.ready()
    trainer.engine.publish(0)
    trainer.waited.clear()
    os.kill(pid, signal.SIGSTOP)
    begun = time.monotonic()
    found = trainer.engine.generate(requests(8), version=0)
    took = time.monotonic() - begun
    assert same(found, inline(actor, requests(8)))
    assert gone(pid)
    assert took < limits.sync_s - 5.0
    signs = [begun, *trainer.waited, begun + took]
    assert max(after - before for before, after in pairwise(signs)) < SILENT_S + SIGN_S + 0.5
    trainer.engine.end()


def test_who_hears_of_its_engine_again_is_at_work_again_before_it_has_its_samples(home, folders, actor):
    trainer, back = Trainer(home, service(folders["qwen2"])), []

    @contextmanager
    def alone():
        yield
        back.append(time.monotonic())

    trainer.engine._alone = alone
    trainer.enter(actor)
    trainer.engine.publish(0)
    pid = trainer.ready()
    back.clear()
    os.kill(pid, signal.SIGSTOP)
    goes_on = threading.Timer(2.5, os.kill, (pid, signal.SIGCONT))
    goes_on.start()
    trainer.engine.generate(requests(64), version=0)
    assert trainer.waited, "it said that it waits"
    assert len(back) == 2, "as soon as it heard anything, and at the end"
    assert back[0] < back[1]
    trainer.attendant.close()


def test_who_waits_for_an_engine_that_takes_weights_says_so_too(home, folders, actor):
    trainer = Trainer(home, service(folders["qwen2"]), limits=replace(LIMITS, sync_s=3.0))
    trainer.enter(actor)
    pid = trainer.ready()
    trainer.engine.publish(31)
    assert trainer.waited == [], "it took them at once"
    os.kill(pid, signal.SIGSTOP)
    try:
        begun = time.monotonic()
        trainer.engine.publish(32)
        took = time.monotonic() - begun
    finally:
        os.kill(pid, signal.SIGCONT)
        trainer.attendant.close()
    assert took > 3.0, "it was not waited for"
    signs = [begun, *trainer.waited, begun + took]
    assert max(after - before for before, after in pairwise(signs)) < SIGN_S + 1.0


def test_who_has_waited_for_its_engine_is_at_work_again(tmp_path, actor):
    # Found by reading: weights were brought together and written in the phase of the wait before: its worker was killed, or a
    # network that fell silent excused.
    beat, phases = Beat(), []
    none = SimpleNamespace(home=tmp_path, limits=LIMITS, up=False, say=lambda _: None)  # an attendant without an engine
    engine = Served(none, SAMPLING, waits=lambda: beat.still(OUTSIDE), alone=beat.alone)

    def source(_version):
        for bucket in weights.buckets(actor, nbytes=1 << 12, dtype=torch.float32):
            phases.append(beat.now.phase)
            yield bucket

    engine.enter(life="1 here", source=source, writes=True, gathers=False)
    beat.phase("sync")
    with (tmp_path / weights.LOCK).open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        reader = threading.Timer(SIGN_S + 0.5, fcntl.flock, (file, fcntl.LOCK_UN))
        reader.start()
        begun = beat.now.since
        engine.publish(1)
        reader.join(10)
    assert beat.now.since > begun + SIGN_S, "it did not say that it waits"
    assert set(phases) == {"sync"}
    assert beat.now.phase == "sync"
    beat.phase("rollout")
    ends = time.monotonic() + SIGN_S + 0.2

    def done():
        time.sleep(0.02)
        phases.append(beat.now.phase)
        return time.monotonic() > ends

    engine.wait(done)
    assert phases[-1] == OUTSIDE
    assert beat.now.phase == "rollout"


def test_what_was_finished_is_not_generated_again_when_a_step_is_cut_short(trainer, actor):
    trainer.engine.publish(6)

    class Cut(Exception):
        pass

    def turn():
        if len(trainer.engine.found) > 0:
            raise Cut

    trainer.on_turn = turn
    with pytest.raises(Cut):
        trainer.engine.generate(requests(400), version=6)
    kept = dict(trainer.engine.found)
    assert 0 < len(kept) < 400
    trainer.on_turn = lambda: None
    trainer.enter(actor, life="2 after a reform")
    trainer.engine.publish(6)
    assert same(trainer.engine.generate(requests(400), version=6), inline(actor, requests(400)))
    assert all(trainer.engine.found[request] is one for request, one in kept.items())


def test_who_is_overtaken_by_another_life_waits_for_its_own_orders(trainer, home, folders, actor):
    class Orders(Exception):
        pass

    trainer.engine.publish(6)
    second = Trainer(home, service(folders["qwen2"]), limits=replace(LIMITS, sync_s=60.0))
    second.enter(actor, life="2 after a reform")
    second.ready()

    def turn():
        if len(trainer.engine.found) > 0 and weights.tag_of(home).life == "1 here":
            second.engine.publish(6)
            late.start()

    def orders():
        raise Orders

    late = threading.Timer(0.2, lambda: setattr(trainer, "on_turn", orders))
    trainer.on_turn = turn
    with pytest.raises(Orders):
        trainer.engine.generate(requests(400), version=6)
    late.join()
    assert same(second.engine.generate(requests(8), version=6), inline(actor, requests(8)))
    second.attendant.close()


def test_who_missed_its_orders_asks_no_further_once_another_life_has_begun(trainer, actor):
    trainer.engine.publish(6)
    with ThreadPoolExecutor(1) as ahead:
        flight = ahead.submit(trainer.engine.generate, requests(400), version=6)
        until(lambda: len(trainer.engine.found) > 0, "the first sample")
        trainer.enter(actor, life="2 after a reform")
        with pytest.raises(StaleWeights, match="another life of the gang has begun"):
            flight.result(60.0)
    assert 0 < len(trainer.engine.found) < 400
    trainer.engine.publish(6)
    assert same(trainer.engine.generate(requests(400), version=6), inline(actor, requests(400)))


def test_an_idle_engine_that_dies_is_back_before_anybody_asks(home, folders, actor):
    trainer = Trainer(home, service(folders["qwen2"]), limits=replace(LIMITS, health_every_s=0.2))
    trainer.enter(actor)
    trainer.engine.publish(1)
    first = trainer.ready()
    os.kill(first, signal.SIGKILL)
    until(lambda: len([s for s in trainer.said if "started" in s and "process" in s]) > 0, "a new engine")
    assert pid_of(home) != first
    with Talk(home / SOCKET, within_s=20.0) as talk:
        assert talk.ask("hello")["tag"] == {"life": "1 here", "version": 1}, (
            "it reads the weights that lie there by itself"
        )
    trainer.attendant.close()


def slow_to_read(home, actor, version):
    """Weights of that version, whose file is a pipe: an engine that takes them reads until somebody has written all of it."""
    tag = weights.Tag(life="1 here", version=version)
    weights.write(home, tag, weights.buckets(actor, nbytes=1 << 12, dtype=torch.float32), within_s=5.0)
    content = (home / weights.FILE).read_bytes()
    (home / weights.FILE).unlink()
    os.mkfifo(home / weights.FILE)
    return tag, content


def test_an_engine_that_takes_weights_is_not_ended_by_the_worker_that_is_idle(trainer, home, folders, actor):
    pid = trainer.ready()
    tag, content = slow_to_read(home, actor, 21)
    idle = Trainer(home, service(folders["qwen2"]), limits=replace(LIMITS, health_every_s=0.1, health_s=1.5))
    try:
        idle.ready()
        with Talk(home / SOCKET, within_s=20.0) as talk:
            talk.send("load", tag=asdict(tag))
            time.sleep(4.0)  # it took 3.2 s to look, to look again and to kill
            assert not gone(pid)
            (home / weights.FILE).write_bytes(content)
            assert talk.receive().says["op"] == "loaded"
        until(lambda: idle.attendant.up and not (home / LOADS).exists(), "an engine that works")
        assert pid_of(home) == pid
        assert [sentence for sentence in idle.said if "adopted" not in sentence] == []
    finally:
        weights.forget(home)
        idle.attendant.close()


def test_an_engine_that_takes_weights_is_waited_for_by_who_asked_it_to(home, folders, actor):
    trainer = Trainer(home, service(folders["qwen2"]), limits=replace(LIMITS, health_s=1.5))
    pid = trainer.ready()
    tag, content = slow_to_read(home, actor, 23)
    try:
        with trainer.attendant.talk(trainer.check) as talk, ThreadPoolExecutor(1) as beside:
            asked = beside.submit(trainer.engine._load, talk, tag)
            time.sleep(4.0)
            assert not asked.done(), "it is silent for longer than health_timeout, and for a reason"
            (home / weights.FILE).write_bytes(content)
            asked.result(20.0)
        assert trainer.ready() == pid
    finally:
        weights.forget(home)
        trainer.attendant.close()


def test_who_hears_late_of_an_engine_s_death_leaves_the_next_one_alone(tmp_path, folders):
    """Found by reading: it was killed as it started, which counted against its own worker."""
    limits = replace(LIMITS, health_s=2.0, starts=1)
    first, second = (Trainer(tmp_path / "engine", service(folders["qwen2"]), limits=limits) for _ in range(2))
    pid = first.ready()
    assert second.ready() == pid
    os.killpg(pid, signal.SIGKILL)
    first.attendant.lost("it hung up")
    until(lambda: pid_of(first.home) != pid, "the next engine")
    new = pid_of(first.home)
    second.attendant.lost("nobody answers")
    assert first.ready() == second.ready() == new
    second.attendant.close()
    first.attendant.end()
    assert not first.home.exists()


def test_an_engine_in_the_middle_of_a_long_block_hears_who_comes(tmp_path, folders, actor):
    """Found by reading: it answered nobody meanwhile, and was killed for it by who waited for nothing of it."""
    long = replace(SAMPLING, max_tokens=1200, eos=())
    limits = replace(LIMITS, health_every_s=0.1, health_s=1.5)
    first = Trainer(tmp_path, service(folders["qwen2"], sampling=long))
    pid = first.ready()
    idle = Trainer(tmp_path, service(folders["qwen2"], sampling=long), limits=limits)  # which finds its engine there
    try:
        idle.ready()
        first.enter(actor)
        first.engine.publish(0)
        with ThreadPoolExecutor(1) as ahead:
            flight = ahead.submit(first.engine.generate, requests(16), version=0)
            took = []
            while not flight.done():
                begun = time.monotonic()
                with Talk(tmp_path / SOCKET, within_s=20.0) as talk:
                    assert talk.ask("hello")["tag"] == {"life": "1 here", "version": 0}
                took.append(time.monotonic() - begun)
            assert len(took) > 5
            assert max(took) < 0.8, "the block is of seconds"
            flight.result(60.0)
        assert pid_of(tmp_path) == pid
        assert [sentence for sentence in idle.said if "adopted" not in sentence] == []
    finally:
        idle.attendant.close()
        first.attendant.end()
    assert not (tmp_path / weights.FILE).exists()


def test_an_engine_that_takes_weights_for_longer_than_it_may_is_ended(trainer, home, folders, actor):
    pid = trainer.ready()
    tag, _ = slow_to_read(home, actor, 22)
    limits = replace(LIMITS, health_every_s=0.1, health_s=1.5, sync_s=0.5)
    idle = Trainer(home, service(folders["qwen2"]), limits=limits)
    try:
        idle.ready()
        with Talk(home / SOCKET, within_s=20.0) as talk:
            talk.send("load", tag=asdict(tag))
            with pytest.raises(Lost):
                talk.receive()
        until(lambda: gone(pid), "its end")
        weights.forget(home)  # the next one would have to read them
        assert "rollout engine: it said nothing for 1.5 s; it is killed" in idle.said
        assert idle.ready() != pid
    finally:
        idle.attendant.close()


def read_by_somebody(pipe, held):
    """Whether somebody has opened it for reading: who then waits for us, as long as it is held."""
    with suppress(OSError):  # ENXIO: nobody yet
        held.append(os.open(pipe, os.O_WRONLY | os.O_NONBLOCK))
    return bool(held)


def test_an_engine_that_holds_on_to_old_weights_is_ended_so_that_new_ones_can_be_written(trainer, home, folders, actor):
    pid = trainer.ready()
    tag, _ = slow_to_read(home, actor, 120)
    limits = replace(LIMITS, health_s=1.5, sync_s=0.5)
    writer = Trainer(home, service(folders["qwen2"]), limits=limits)
    writer.enter(actor)
    try:
        writer.ready()
        with Talk(home / SOCKET, within_s=20.0) as talk:
            talk.send("load", tag=asdict(tag))
            held = []
            until(lambda: read_by_somebody(home / weights.FILE, held), "an engine that reads")
            (home / weights.FILE).unlink()  # a pipe cannot be written over; the engine has it open
            writer.engine.publish(121)
            os.close(held[0])
        assert gone(pid)
        assert same(writer.engine.generate(requests(20), version=121), inline(actor, requests(20)))
    finally:
        weights.forget(home)
        writer.attendant.close()


def test_weights_that_somebody_else_holds_on_to_are_an_error_with_a_sentence(tmp_path, folders, actor):
    limits = replace(LIMITS, start_s=2.0, health_s=1.0, sync_s=0.3, starts=1)
    writer = Trainer(tmp_path, service(folders["qwen2"]), limits=limits)
    writer.enter(actor)
    try:
        with (tmp_path / weights.LOCK).open("ab") as other:
            fcntl.flock(other, fcntl.LOCK_SH)
            with pytest.raises(EngineFailed, match=r"stayed in use for 2 s, though the rollout engine was to be ended"):
                writer.engine.publish(1)
    finally:
        writer.attendant.end()


def test_what_is_under_way_is_finished_before_weights_are_taken(trainer, home):
    """Of a vLLM that computes, the cache of prefixes by older weights stays."""
    trainer.engine.publish(23)
    pid = trainer.ready()
    later = weights.Tag(life="1 here", version=24)
    weights.write(home, later, trainer.engine._source(2), within_s=5.0)
    both = [{"op": "check"}, {"op": "load", "tag": asdict(later)}]
    with Talk(home / SOCKET, within_s=20.0) as talk:
        talk._sock.sendall(b"".join(Frame(says={"v": PROTOCOL, **says}).pack() for says in both))
        assert [frame.says["op"] for frame in (talk.receive(), talk.receive())] == ["sample", "loaded"]
    assert trainer.ready() == pid


@pytest.mark.slow
def test_weights_that_do_not_fit_cost_the_engine_that_meets_them_alone(tmp_path, folders, actor):
    most = list(weights.buckets(actor, nbytes=1 << 12, dtype=torch.float32))[:-1]
    trainer = Trainer(tmp_path, service(folders["qwen2"]), limits=replace(LIMITS, starts=2))
    try:
        pid = trainer.ready()
        weights.write(tmp_path, weights.Tag(life="1 here", version=1), most, within_s=5.0)
        os.killpg(pid, signal.SIGKILL)
        trainer.attendant.lost("killed by the test")
        trainer.enter(actor)
        trainer.ready()
        [said] = [sentence for sentence in trainer.said if "came to nothing" in sentence]
        assert "start 1 of 2 came to nothing: it ended with exit code 1: " in said
        assert re.search(r"\d+ weights were not sent \(.*, ...\)$", said)
        assert "Traceback" not in said
        trainer.engine.publish(2)
        assert same(trainer.engine.generate(requests(4), version=2), inline(actor, requests(4)))
    finally:
        trainer.attendant.end()


class Beaten(TorchProgram):
    """Somebody writes the weights anew just as it would take them."""

    def load(self, home, tag):
        with (home / weights.LOCK).open("ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            super().load(home, tag)


def test_an_engine_that_starts_beside_who_writes_weights_starts_without_them(tmp_path, folders, actor, capsys):
    tag = weights.Tag(life="1 here", version=1)
    weights.write(tmp_path, tag, weights.buckets(actor, nbytes=1 << 12, dtype=torch.float32), within_s=5.0)
    page = service(folders["qwen2"])
    server = Server(Beaten(page), page, tmp_path)
    server.prove()
    assert server.tag is None
    assert "stayed in use for 1 s" in capsys.readouterr().out


class Runner:
    """As much of vLLM's as takes weights: it puts the old ones away, and then reads."""

    def __init__(self, model):
        self.model, self.began = model, 0

    def get_model(self):
        self.model.load_weights = lambda given: {name for name, _ in given}
        return self.model

    def reload_weights(self, weights_iterator):
        self.began += 1
        self.model.load_weights(weights_iterator)


def test_a_worker_of_vllm_says_why_it_has_not_the_weights_and_touches_none_while_they_are_in_use(tmp_path, actor):
    tag = weights.Tag(life="1 here", version=1)
    worker = Extension()
    worker.model_runner = Runner(actor)
    load = lambda: worker.elasticrl_load(str(tmp_path), tag.life, tag.version, 0.1)  # noqa: E731
    whole = list(weights.buckets(actor, nbytes=1 << 12, dtype=torch.float32))
    weights.write(tmp_path, tag, whole, within_s=5.0)
    assert load() is None
    with (tmp_path / weights.LOCK).open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # as who writes holds it
        held = load()
    assert held == ("lost", f"the weights in {tmp_path} stayed in use for 0.1 s")
    assert worker.model_runner.began == 1
    weights.write(tmp_path, tag, whole[:-1], within_s=5.0)
    how, why = load()
    assert how == "torn"
    assert "weights of the model were not sent" in why
    taken([None, None])
    with pytest.raises(Lost, match="stayed in use"):
        taken([held, held])
    with pytest.raises(weights.Torn, match="stayed in use"):  # half of two sets
        taken([None, held])
    with pytest.raises(weights.Torn, match="not sent"):
        taken([held, (how, why)])


def test_a_trainer_s_restart_finds_the_engine_that_is_there(trainer, home, folders, actor):
    first = trainer.ready()
    trainer.attendant.close()
    late = Trainer(home, service(folders["qwen2"]))
    late.enter(actor)
    assert late.ready() == first
    assert any("adopted" in sentence for sentence in late.said)
    late.engine.publish(0)
    assert same(late.engine.generate(requests(4), version=0), inline(actor, requests(4)))
    late.attendant.close()


@pytest.mark.slow
def test_an_engine_that_nobody_needs_leaves_nothing_and_who_comes_as_it_goes_has_one_of_its_own(
    tmp_path, folders, actor
):
    first = Trainer(tmp_path / "engine", service(folders["qwen2"]))
    pid = first.ready()
    first.enter(actor)
    first.engine.publish(0)
    with (first.home / START_LOCK).open("ab") as lock:  # somebody looks at this very moment, and so does the next job
        fcntl.flock(lock, fcntl.LOCK_EX)
        second = Trainer(first.home, service(folders["qwen2"]))
        first.attendant.end()
        until(lambda: gone(pid), "the engine's end")
        shutil.rmtree(first.home)  # as whoever holds that lock may
    assert second.ready() != pid
    second.engine.end()
    assert not second.home.exists()


def test_two_workers_start_one_engine_which_another_configuration_replaces_and_which_ends_by_itself(
    tmp_path, folders, actor
):
    both = [Trainer(tmp_path, service(folders["qwen2"])) for _ in range(2)]
    pids = [one.ready() for one in both]
    assert pids[0] == pids[1]
    words = sorted(sentence.rpartition(" ")[2] for one in both for sentence in one.said)
    assert words == ["adopted", "started"]
    for one in both:
        one.attendant.close()
    other = Trainer(tmp_path, service(folders["qwen2"], sampling=replace(SAMPLING, max_tokens=3), idle_s=2.0))
    pid = other.ready()
    assert pid != pids[0]
    assert gone(pids[0])
    assert any("of another configuration" in sentence for sentence in other.said)
    other.enter(actor)
    other.engine.publish(0)
    assert other.engine.generate(requests(4), version=0).mask.shape == (4, 3)
    other.attendant.close()
    until(lambda: gone(pid), "the end of an engine that nobody speaks to")
    assert "no trainer has spoken for 2 s" in (tmp_path / "engine.log").read_text()
    assert not (tmp_path / SOCKET).exists()
    assert not (tmp_path / weights.FILE).exists(), "its memory is given back"


# ---- whole gangs


@pytest.fixture(scope="module")
def conf(tmp_path_factory):
    return job(tmp_path_factory.mktemp("job"), {"engine": "served"})


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, conf):
    """One worker, with the engine that is in it."""
    inside = {**conf, "rollout": {**conf["rollout"], "engine": "torch"}}
    with gang(tmp_path_factory.mktemp("inside") / "gang", inside, world=1) as alone:
        alone.plan("n0")
        alone.until_done()
        return outcome(alone)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("strategy", ["fsdp", pytest.param("replicated", marks=pytest.mark.slow)])
def test_two_workers_with_engines_beside_them_train_to_the_same_bits_through_the_deaths_of_both(
    tmp_path, conf, undisturbed, strategy
):
    with gang(tmp_path, conf, world=2, strategy=strategy) as both:
        strike(tmp_path, "n0", "sync", 1)
        strike(tmp_path, "n1", "rollout", 3)
        both.plan("n0", "n1")
        both.until(lambda: struck(tmp_path, "n1"), "the end of n1's engine", 200.0)
        returned(both, tmp_path, "n0")
        kept = pid_of(home_of(tmp_path, "n0"))
        both.kill_worker("n0")
        both.plan("n0", "n1")
        both.until_done(within_s=250.0)
        assert struck(tmp_path, "n0")
        assert "adopted" in both.workers["n0"].text, [
            line for line in both.workers["n0"].text.splitlines() if "engine" in line
        ]
        assert f"process {kept} " in both.workers["n0"].text
        assert outcome(both) == undisturbed
    for node in ("n0", "n1"):
        home = home_of(tmp_path, node)
        until(lambda home=home: not home.exists(), f"the end of {node}'s engine with the job, and of all that it had")


@pytest.mark.slow
def test_an_actor_cut_up_by_zero_3_is_whole_and_new_in_the_engines_beside_two_workers(tmp_path, conf):
    """DeepSpeed's bits are those of a world: two workers' with engines beside them are two workers' with the engines in them.
    What an engine says of its tokens' probabilities goes into the losses (`importance_limit`): its weights show in the bits.
    """

    def trained(engine):
        more = {"model": {**conf["model"], "zero_stage": 3}, "rollout": {**conf["rollout"], "engine": engine}}
        with gang(tmp_path / engine, conf | more, world=2, strategy="deepspeed") as both:
            both.plan("n0", "n1")
            both.until_done(within_s=150.0)
            return outcome(both)

    assert trained("served") == trained("torch")


# ---- what cannot be


def test_an_engine_that_does_not_start_is_tried_so_often_and_then_said(tmp_path, folders, actor):
    trainer = Trainer(tmp_path, service(folders["qwen2"]), limits=replace(LIMITS, starts=2), python="false")
    trainer.enter(actor)
    trainer.engine.publish(0)
    with pytest.raises(EngineFailed, match="does not start: it ended with exit code 1: it said nothing"):
        trainer.engine.generate(requests(1), version=0)
    assert [s for s in trainer.said if "came to nothing" in s][-1].startswith("rollout engine: start 2 of 2")


MUTE = """
import os, socket, sys, threading
from pathlib import Path
from elasticrl.ppo.rollout.service import SPEC, Service
from elasticrl.ppo.rollout.wire import PROTOCOL, SOCKET, Frame, Inbox

home, lock = Path(sys.argv[sys.argv.index("--home") + 1]), int(sys.argv[sys.argv.index("--lock") + 1])
os.pwrite(lock, f"{os.getpid()}\\n".encode(), 0)
digest = Service.loads((home / SPEC).read_text()).digest
hello = {"op": "hello", "v": PROTOCOL, "pid": os.getpid(), "service": digest, "versions": {}}

def answer(visitor):
    inbox = Inbox()
    while data := visitor.recv(1 << 20):
        for frame in inbox.feed(data):
            if frame.says["op"] == "hello":
                visitor.sendall(Frame(says=hello).pack())

with socket.socket(socket.AF_UNIX) as door:
    door.bind(str(home / SOCKET))
    door.listen()
    Path(__file__).with_suffix(".pid").write_text(str(os.getpid()))
    while True:
        threading.Thread(target=answer, args=(door.accept()[0],)).start()
"""


def test_an_engine_that_answers_and_never_generates_is_none(tmp_path, folders, actor):
    mute, first = tmp_path / "mute.py", tmp_path / "first"
    mute.write_text(MUTE)
    first.write_text(
        "#!/bin/bash\n"
        f'mkdir {tmp_path}/once 2>/dev/null && exec {sys.executable} {mute} "$@"\n'
        f'exec {sys.executable} "$@"\n'
    )
    first.chmod(0o755)
    trainer = Trainer(
        tmp_path / "home", service(folders["qwen2"]), limits=replace(LIMITS, health_s=5.0), python=str(first)
    )
    try:
        trainer.enter(actor)
        assert trainer.ready() != int(mute.with_suffix(".pid").read_text())
        assert "rollout engine: it said nothing for 5 s; it is killed" in trainer.said
        trainer.engine.publish(0)
        assert same(trainer.engine.generate(requests(4), version=0), inline(actor, requests(4)))
    finally:
        trainer.attendant.end()


def test_a_log_that_takes_no_more_does_not_end_who_looks_after_the_engine(tmp_path, folders):
    def full(_sentence):
        raise OSError(errno.ENOSPC, "No space left on device")

    trainer = Trainer(tmp_path, service(folders["qwen2"]), limits=replace(LIMITS, health_every_s=0.1), say=full)
    try:
        first = trainer.ready()
        os.killpg(first, signal.SIGKILL)
        until(lambda: not trainer.attendant.up, "that it is missed")
        assert trainer.ready() != first
    finally:
        trainer.attendant.end()


def test_an_engine_that_dies_slowly_is_waited_for_before_another_is_started(tmp_path, folders, actor):
    """As one does that gives back a card's memory: its lock is free before it is over."""
    starts, dies = tmp_path / "starts", tmp_path / "dies"
    dies.write_text(
        "#!/bin/bash\n"
        'for lock; do :; done; eval "exec $lock>&-"\n'
        f"echo $(pgrep -c -f {dies}) >> {starts}\n"
        "sleep 0.5\n"
        "exit 1\n"
    )
    dies.chmod(0o755)
    trainer = Trainer(tmp_path / "home", service(folders["qwen2"]), limits=replace(LIMITS, starts=2), python=str(dies))
    trainer.enter(actor)
    trainer.engine.publish(0)
    with pytest.raises(EngineFailed, match="exit code 1"):
        trainer.engine.generate(requests(1), version=0)
    assert starts.read_text().split() == ["1", "1"], "one at a time"


def test_a_vllm_that_is_not_there_is_refused_at_once_with_what_to_do(tmp_path, folders):
    have = subprocess.run([sys.executable, "-c", "import vllm"], capture_output=True).returncode == 0
    assert not have, "this environment has vllm; run this test in the trainer's"
    trainer = Trainer(tmp_path, service(folders["qwen2"], program="vllm"))
    with pytest.raises(
        EngineFailed, match=r"there is no vllm in the environment of .* let rollout.python name an interpreter"
    ):
        trainer.ready()
    assert not [s for s in trainer.said if "came to nothing" in s], "it is not tried again"


@pytest.mark.parametrize(
    ("version", "good"), [("0.32.0", True), ("0.32.5", True), ("0.9.1", False), ("0.320.0", False)]
)
def test_versions_of_vllm_are_known_or_refused(version, good):
    if good:
        fit(version)
    else:
        with pytest.raises(Unfit, match=rf"vllm {version} is installed, and this engine works with 0\.32\.x"):
            fit(version)


# ---- weights


def test_weights_come_back_bit_for_bit_and_only_under_their_tag(tmp_path, actor):
    tag = weights.Tag(life="1 here", version=4)
    assert weights.tag_of(tmp_path) is None
    nbytes = weights.write(tmp_path, tag, weights.buckets(actor, nbytes=1 << 12, dtype=torch.float32), within_s=5.0)
    assert nbytes == sum(4 * param.numel() for param in actor.parameters())
    assert weights.tag_of(tmp_path) == tag
    found = dict(weights.read(tmp_path, tag, within_s=5.0))
    assert list(found) == [name for name, _ in actor.named_parameters()]
    assert all(torch.equal(found[name], param) for name, param in actor.named_parameters())
    with pytest.raises(weights.Torn, match="are not version 5"):
        next(weights.read(tmp_path, replace(tag, version=5), within_s=5.0))
    half = weights.buckets(actor, nbytes=1 << 30, dtype=torch.bfloat16)
    weights.write(tmp_path, tag, half, within_s=5.0)
    assert (tmp_path / weights.FILE).stat().st_size == nbytes // 2


@pytest.mark.parametrize("after", [0, 1, 3])
def test_a_writer_that_dies_leaves_no_set_that_passes_for_whole(tmp_path, actor, after):
    tag = weights.Tag(life="1 here", version=4)
    weights.write(tmp_path, tag, weights.buckets(actor, nbytes=1 << 12, dtype=torch.float32), within_s=5.0)

    def dies():
        for number, bucket in enumerate(weights.buckets(actor, nbytes=1 << 12, dtype=torch.float32)):
            if number == after:
                raise KeyboardInterrupt
            yield bucket

    with pytest.raises(KeyboardInterrupt):
        weights.write(tmp_path, replace(tag, version=5), dies(), within_s=5.0)
    assert weights.tag_of(tmp_path) is None
    with pytest.raises(weights.Torn):
        next(weights.read(tmp_path, tag, within_s=5.0))


def test_a_changed_bit_is_found_and_does_not_generate(trainer, home, actor):
    trainer.ready()
    trainer.engine.publish(11)
    file = home / weights.FILE
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    tag = weights.Tag(life="1 here", version=11)
    with pytest.raises(weights.Torn, match="does not have its checksum"):
        list(weights.read(home, tag, within_s=5.0))
    os.kill(pid_of(home), signal.SIGKILL)  # the next one would have to read them
    trainer.attendant.lost("killed by the test")
    with pytest.raises(StaleWeights, match="no whole weights of version 11"):
        trainer.engine.generate(requests(4), version=11)
    trainer.engine.publish(12)
    assert same(trainer.engine.generate(requests(4), version=12), inline(actor, requests(4)))


def test_a_reader_waits_for_a_writer_but_not_for_ever(tmp_path, actor):
    tag = weights.Tag(life="1 here", version=1)

    def slow():
        with pytest.raises(Lost, match="stayed in use"):
            next(weights.read(tmp_path, tag, within_s=0.2))
        yield from weights.buckets(actor, nbytes=1 << 20, dtype=torch.float32)

    weights.write(tmp_path, tag, slow(), within_s=5.0)
    assert weights.tag_of(tmp_path) == tag


# ---- frames


def test_frames_come_whole_however_they_are_cut():
    sent = [Frame(says={"op": "sample", "id": str(i)}, raw=bytes(range(i))) for i in range(5)]
    stream = b"".join(frame.pack() for frame in sent)
    for size in (1, 7, 64, len(stream)):
        inbox, found = Inbox(), []
        for at in range(0, len(stream), size):
            found += inbox.feed(stream[at : at + size])
        assert found == sent


def test_what_is_no_frame_is_refused():
    with pytest.raises(ValueError, match=r"a frame of .* bytes was announced"):
        list(Inbox().feed(b"\xff" * 64))
    with pytest.raises(ValueError, match="Expecting"):
        list(Inbox().feed(b"\0\0\0\1" + b"\0" * 8 + b"?"))
    with pytest.raises(ValueError, match="brackets in brackets"):
        list(Inbox(limit=STRANGERS).feed((4000).to_bytes(4, "big") + b"\0" * 8 + b"[" * 4000))


def test_a_visitor_that_makes_no_sense_is_sent_away_and_the_others_stay(trainer, home):
    pid = trainer.ready()
    for nonsense in (
        b"\xff" * 64,
        Frame(says={"v": PROTOCOL, "op": "generate"}).pack(),
        Frame(says={"v": PROTOCOL}).pack(),
    ):
        with Talk(home / SOCKET, within_s=20.0) as talk:
            talk._sock.sendall(nonsense)
            with pytest.raises(Lost, match=r"hung up|cut short"):
                talk.receive()
    said = f"speaks version {PROTOCOL}, not {PROTOCOL + 1}"
    with Talk(home / SOCKET, within_s=20.0) as talk, pytest.raises(Refused, match=said):
        talk.ask("hello", v=PROTOCOL + 1)
    assert trainer.ready() == pid


@pytest.mark.parametrize(
    ("amiss", "why"),
    [
        ({"prompt": (3, 1 << 20)}, "token 1048576 of its prompt is none of the model's 14"),
        ({"prompt": (-1,)}, "token -1 of its prompt is none of the model's 14"),
        ({"prompt": tuple(range(8))}, "its prompt has 8 tokens, where 1 to 7 fit"),
        ({"prompt": ()}, "its prompt has 0 tokens, where 1 to 7 fit"),
        ({"seed": -1}, "its seed -1 is no whole number of 63 bits"),
    ],
)
def test_what_cannot_be_generated_is_refused_and_the_engine_stays(trainer, amiss, why):
    trainer.engine.publish(0)
    pid = trainer.ready()
    with pytest.raises(EngineFailed, match=f"sample '1' cannot be generated: {why}"):
        trainer.engine.generate([*requests(1), replace(requests(1)[0], **amiss)], version=0)
    assert trainer.ready() == pid


def test_what_one_visitor_asks_amiss_does_not_end_the_engine_for_the_others(trainer, home, actor):
    trainer.engine.publish(0)
    trainer.engine.generate(requests(1), version=0)
    pid = trainer.ready()
    with trainer.attendant.talk(lambda: None) as talk:
        tag = talk.ask("hello")["tag"]
    for amiss in (
        Frame(
            says={
                "v": PROTOCOL,
                "op": "generate",
                "tag": tag,
                "ids": ["0"],
                "seeds": [1],
                "lengths": [2],
                "widths": [0],
            },
            raw=b"few",
        ),
        Frame(says={"v": PROTOCOL, "op": "put", "page": {"tag": tag, "buckets": [{"bytes": float("inf")}]}}),
    ):
        with Talk(home / SOCKET, within_s=20.0) as talk:
            talk._sock.sendall(amiss.pack())
            with pytest.raises(Lost, match="hung up"):
                talk.receive()
    later = weights.Tag(life=tag["life"], version=1)
    weights.write(home, later, weights.buckets(actor, nbytes=1 << 12, dtype=torch.float32), within_s=1.0)
    with Talk(home / SOCKET, within_s=20.0) as talk:
        with (home / weights.LOCK).open("ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # as who writes holds it
            with pytest.raises(Refused, match="stayed in use for 1 s") as refused:
                talk.ask("load", tag=asdict(later))
            assert refused.value.kind == "torn"
        assert talk.ask("load", tag=asdict(later))["op"] == "loaded"
    assert trainer.ready() == pid
