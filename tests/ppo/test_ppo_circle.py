"""Weights sent to all engines at once: the same bytes, whatever breaks, and the other way where it does.

Real engine processes in a real gloo group with the writer, on loopback. NCCL is the same code in another group; with it on a
machine with two cards these run under ELASTICRL_TEST_DEVICE=cuda.
"""

import contextlib
import json
import os
import signal
import threading
from dataclasses import replace
from itertools import count

import pytest
import torch
from away_kit import Node, Trainer, inline
from served_kit import LIMITS, end, pid_of, requests, same, until

from elasticrl.config.training import Model
from elasticrl.ppo import models
from elasticrl.ppo.rollout import circle, feeder, weights
from elasticrl.ppo.rollout.circle import Circle, open_store
from elasticrl.ppo.rollout.intake import Intake
from elasticrl.ppo.rollout.wire import Frame
from elasticrl.runtime.interrupt import Interrupt

LIVES = count(1)
SHORT = replace(LIMITS, sync_s=24.0)  # a quarter of it for a circle to form, on a busy machine


@pytest.fixture(scope="module")
def actor(folders):
    return models.actor(Model(), folders["qwen2"], seed=0)


@pytest.fixture(scope="module")
def nodes(tmp_path_factory, folders):
    """Two engines for all tests, each of which leaves them alive."""
    folder = tmp_path_factory.mktemp("nodes")
    both = [Node(folder, name, folders["qwen2"]) for name in ("r0", "r1")]
    yield both
    for node in both:
        node.hello()
        node.attendant.close()
        end(node.home)


@pytest.fixture
def life():
    """Of a gang that no engine has weights of."""
    return f"{next(LIVES)} here"


@pytest.fixture
def trainer(tmp_path, nodes, actor, life):
    found = Trainer(tmp_path, nodes, actor, life=life, transport="gloo", limits=SHORT)
    connected(found, 2)
    yield found
    for node in nodes:
        with contextlib.suppress(OSError, ValueError):
            os.killpg(pid_of(node.home), signal.SIGCONT)
    found.engine.end()


def connected(trainer, engines):
    until(lambda: len(trainer.engine._feeder._lines) == engines, 60.0)


def told(trainer, words):
    return [sentence for sentence in trainer.said if words in sentence]


def has(node):
    return node.hello()["tag"]


def casting(trainer, version):
    """Whether a cast of that version has been announced to the engines."""
    cast = trainer.engine._feeder._cast
    return cast is not None and cast.tag.version == version and any(order["op"] == "cast" for order in cast.orders)


def test_both_engines_get_them_at_once_and_the_circle_is_kept_for_the_next(trainer, nodes, actor, life):
    for version in (1, 2, 3):
        trainer.engine.publish(version)
        assert [has(node) for node in nodes] == 2 * [{"life": life, "version": version}]
    assert len(told(trainer, "over gloo, to 2 engines at once")) == 6
    assert len(told(trainer, "weights go through a circle over gloo")) == 1, "it was formed once"
    assert all("by a probe of gloo" in one and "by those of TCP" in one for one in told(trainer, "through a circle"))
    assert not told(trainer, "over TCP in")
    assert same(trainer.engine.generate(requests(40), version=3), inline(actor, requests(40)))


def test_an_engine_that_dies_in_the_middle_costs_the_other_nothing_but_time(trainer, nodes, actor, life):
    trainer.engine.publish(1)
    os.killpg(pid_of(nodes[1].home), signal.SIGSTOP)  # so that it is in the middle, and stays there
    publishing = threading.Thread(target=trainer.engine.publish, args=(2,))
    publishing.start()
    until(lambda: casting(trainer, 2), 60.0)
    os.killpg(pid_of(nodes[1].home), signal.SIGKILL)
    nodes[1].attendant.lost("killed by the test")
    publishing.join()
    assert has(nodes[0]) == {"life": life, "version": 2}
    assert told(trainer, "weights of version 2 go to each engine by itself")
    assert told(trainer, "weights of version 2 to r0") == told(trainer, "MB over TCP in")[:1]
    trainer.know(*nodes)  # it is back, at another address
    connected(trainer, 2)
    trainer.engine.publish(3)
    assert len(told(trainer, "weights of version 3 to r")) == 2
    assert len(told(trainer, "weights go through a circle over gloo")) == 2, "another circle, with the new one"
    assert same(trainer.engine.generate(requests(40), version=3), inline(actor, requests(40)))


def test_one_that_stands_still_does_not_keep_the_others_from_theirs_and_gets_its_own_later(trainer, nodes, life):
    trainer.engine.publish(1)
    os.killpg(pid_of(nodes[1].home), signal.SIGSTOP)
    publishing = threading.Thread(target=trainer.engine.publish, args=(2,))
    publishing.start()
    until(lambda: has(nodes[0]) == {"life": life, "version": 2}, 60.0)
    os.killpg(pid_of(nodes[1].home), signal.SIGCONT)
    publishing.join()
    until(lambda: has(nodes[1]) == {"life": life, "version": 2}, 60.0)


def test_a_gang_that_breaks_in_the_middle_is_let_go_and_the_next_one_sends_its_own(trainer, nodes, actor, life):
    class Broke(RuntimeError):
        pass

    def breaks():
        if casting(trainer, 2):
            raise Broke

    trainer.engine.publish(1)
    os.killpg(pid_of(nodes[1].home), signal.SIGSTOP)
    trainer.on_turn = breaks
    with pytest.raises(Broke):
        trainer.engine.publish(2)
    trainer.on_turn = lambda: None
    os.killpg(pid_of(nodes[1].home), signal.SIGCONT)
    trainer.enter(f"{life}, after a reform")
    connected(trainer, 2)
    trainer.engine.publish(2)
    assert [has(node) for node in nodes] == 2 * [{"life": f"{life}, after a reform", "version": 2}]
    assert same(trainer.engine.generate(requests(8), version=2), inline(actor, requests(8)))


def test_what_does_not_form_is_followed_by_what_does(trainer, nodes, life, monkeypatch):
    """As on a machine whose cards cannot reach each other: NCCL forms nothing here."""
    monkeypatch.setattr(feeder, "transports", lambda *_, **__: ("nccl", "gloo"))
    trainer.engine.publish(4)
    assert [has(node) for node in nodes] == 2 * [{"life": life, "version": 4}]
    assert len(told(trainer, "no circle over nccl with 2 engines")) == 1
    assert len(told(trainer, "over gloo, to 2 engines at once")) == 2


def test_left_to_choose_it_takes_what_the_probe_found_quicker(tmp_path, nodes, actor, life):
    trainer = Trainer(tmp_path, nodes, actor, life=life, transport="auto")
    connected(trainer, 2)
    trainer.engine.publish(1)
    trainer.engine.publish(2)
    (said,) = told(trainer, "by a probe of gloo")
    within, apart = (float(said.split(word)[0].split()[-1]) for word in (" s by a probe", " s by those"))
    chosen = "through a circle over gloo" in said
    assert chosen or "over TCP, to each by itself" in said
    assert chosen == (within <= apart) or within == apart, said
    assert len(told(trainer, "over gloo, to 2" if chosen else "over TCP in")) == 4
    trainer.engine.end()


# ---- the two ends by themselves


@pytest.fixture
def ends(tmp_path, request):
    """A writer's end, and an engine's that it has met; the test's parameter is how long each wait may take."""
    within_s = getattr(request, "param", 20.0)
    store, at = open_store("127.0.0.1")
    says = {"op": "meet", "transport": "gloo", "store": at, "rank": 1, "world": 2, "within_s": within_s}
    (tmp_path / "engine").mkdir()
    intake = Intake(tmp_path / "engine")
    intake.take(7, "127.0.0.1", Frame(says=says))
    writer = Circle("gloo", store, 0, 2, host="127.0.0.1", within_s=within_s, flag=Interrupt())
    assert writer.probe() > 0.0
    yield writer, intake
    writer.leave()
    intake.left(7)


def written(folder, version, size=3 * weights.PIECE + 5):
    tag = weights.Tag(life="here", version=version)
    data = torch.arange(size // 4, dtype=torch.int32)
    weights.write(folder, tag, [[("a", data[:1000])], [("b", data[1000:])]], within_s=5.0)
    return tag, json.loads((folder / weights.PAGE).read_text())


def announced(page):
    return Frame(says={"op": "cast", "page": page, "within_s": 20.0})


WHOLE = Frame(says={"op": "whole"})


def test_what_is_cast_is_what_was_written_one_set_after_the_other(tmp_path, ends):
    writer, intake = ends
    for version in (1, 2):
        tag, page = written(tmp_path, version)
        with weights.outgoing(tmp_path, tag, within_s=5.0) as (_, pieces):
            assert not intake.take(7, "127.0.0.1", announced(page))
            writer.give(pieces)
        assert intake.take(7, "127.0.0.1", WHOLE)
        assert weights.tag_of(tmp_path / "engine") == tag
        assert weights.good(tmp_path / "engine", tag)


def test_what_was_changed_on_the_way_is_torn(tmp_path, ends):
    writer, intake = ends
    tag, page = written(tmp_path, 1)
    intake.take(7, "127.0.0.1", announced(page))
    with weights.outgoing(tmp_path, tag, within_s=5.0) as (_, pieces):
        spoiled = [bytearray(piece) for piece in pieces]
    spoiled[1][17] ^= 1
    writer.give(map(bytes, spoiled))
    with pytest.raises(weights.Torn, match="does not have its checksum"):
        intake.take(7, "127.0.0.1", WHOLE)
    assert weights.tag_of(tmp_path / "engine") is None


def test_a_writer_that_leaves_in_the_middle_leaves_no_set(tmp_path, ends):
    writer, intake = ends
    tag, page = written(tmp_path, 1)
    intake.take(7, "127.0.0.1", announced(page))
    with weights.outgoing(tmp_path, tag, within_s=5.0) as (_, pieces):
        writer.give([next(pieces)])
    writer.leave()
    with pytest.raises(weights.Torn, match="the circle broke"):
        intake.take(7, "127.0.0.1", WHOLE)
    assert weights.tag_of(tmp_path / "engine") is None


@pytest.mark.parametrize("ends", [3.0], indirect=True)
def test_an_engine_that_takes_nothing_is_waited_for_until_the_deadline(tmp_path, ends):
    writer, intake = ends
    _, page = written(tmp_path, 1)
    with pytest.raises(circle.FAILURES, match="imed out"):
        writer.give(bytes(weights.PIECE) for _ in range(64))
    intake.take(7, "127.0.0.1", announced(page))
    with pytest.raises(weights.Torn, match="the circle broke"):
        intake.take(7, "127.0.0.1", WHOLE)


def test_only_who_formed_a_circle_may_send_through_it_and_a_newer_one_takes_its_place(tmp_path, ends):
    _, intake = ends
    _, page = written(tmp_path, 1)
    with pytest.raises(weights.Torn, match="somebody else has formed a circle since"):
        intake.take(8, "127.0.0.1", announced(page))
    with pytest.raises(weights.Torn, match="somebody else has begun to bring weights since"):
        intake.take(8, "127.0.0.1", WHOLE)
    intake.take(8, "127.0.0.1", Frame(says={"op": "put", "page": page}))
    with pytest.raises(weights.Torn, match="somebody else has begun"):
        intake.take(7, "127.0.0.1", WHOLE)
    intake.left(8)


def test_a_circle_that_nobody_else_joins_is_given_up_by_its_deadline():
    store, _ = open_store("127.0.0.1")
    with pytest.raises(circle.FAILURES, match=r"did not appear in time|imed out"):
        Circle("gloo", store, 0, 2, host="127.0.0.1", within_s=0.5, flag=Interrupt())
    with pytest.raises(RuntimeError, match="no GPU"):
        Circle("nccl", store, 0, 2, host="127.0.0.1", within_s=0.5, flag=Interrupt())
