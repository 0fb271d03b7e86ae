"""Engines on other nodes: the same samples as in the worker, through any of their deaths; nobody without the job's key.

Real engine processes with the program `torch`, asked over TCP on loopback. tests/daemon/test_rollout_nodes.py has them under
daemons.
"""

import json
import os
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from away_kit import KEY, Node, Trainer, inline
from served_kit import LIMITS, end, moved, pid_of, requests, same, until

from chaos.patience import patience
from elasticrl.base.strangers import PLACES
from elasticrl.config.training import Model
from elasticrl.ppo import models
from elasticrl.ppo.batches import Block, take
from elasticrl.ppo.roles import Roles
from elasticrl.ppo.rollout import weights
from elasticrl.ppo.rollout.away import Rest, Roll, shares
from elasticrl.ppo.rollout.engine import EngineFailed, StaleWeights
from elasticrl.ppo.rollout.feeder import REST_S, Feeder, Line
from elasticrl.ppo.rollout.process import the_key
from elasticrl.ppo.rollout.service import Unfit
from elasticrl.ppo.rollout.wire import PROTOCOL, SOCKET, Frame, Inbox, Lost, Refused, Talk
from elasticrl.runtime.vault.channel import Signer


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
        node.hello()  # it is there to be ended
        node.attendant.close()
        end(node.home)


@pytest.fixture
def trainer(tmp_path, nodes, actor):
    found = Trainer(tmp_path, nodes, actor)
    yield found
    found.engine.end()


# ---- roles that live there


@pytest.fixture
def judging(tmp_path, folders):
    """Two engines with a reference and a reward model."""
    judges = {"ref": folders["qwen2"], "reward": folders["reward"]}
    both = [Node(tmp_path, name, folders["qwen2"], judges=judges) for name in ("r0", "r1")]
    yield both
    for node in both:
        node.hello()
        node.attendant.close()
        end(node.home)


def block(seed):
    """Rows as a trainer cuts them."""
    chance = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 10, (4, 13), generator=chance)
    attention = torch.ones(4, 13, dtype=torch.bool)
    attention[0, :3] = attention[1, 11:] = False
    rows = {"tokens": tokens, "attention": attention, "mask": attention[:, 7:].clone()}
    return take(rows, Block(torch.arange(4), 13, 6))


def test_what_roles_elsewhere_say_is_bit_for_bit_what_the_worker_s_own_would_though_an_engine_dies(
    tmp_path, judging, actor, folders
):
    trainer = Trainer(tmp_path, judging, actor, judges=("ref", "reward"))
    struck = []

    turns = []

    def turn():  # in the middle of its share: asks begin in the first turn, and a turn is 20 ms
        turns.append(True)
        if not struck and len(turns) > 4:
            os.killpg(pid_of(judging[1].home), signal.SIGKILL)
            struck.append(True)
            judging[1].attendant.lost("killed by the test")

    cut = [block(seed) for seed in range(200)]
    ref = models.reference(Model(), folders["qwen2"])
    roles = Roles(model=Model(), actor=ref, ref=ref)
    reward = models.reward_model(Model(), folders["reward"])
    trainer.on_turn = turn
    said = trainer.engine.judge("ref", cut)  # no weights have been published: none are needed
    trainer.on_turn = lambda: None
    assert struck
    assert any(sentence.startswith("rollout engine of r1 at") for sentence in trainer.said), (
        "it was asked, and died of it"
    )
    with torch.no_grad():
        assert all(torch.equal(a, roles.reference(rows)[0]) for a, rows in zip(said, cut, strict=True))
        scores = trainer.engine.judge("reward", cut)
        whole = (models.whole_scores(reward, rows["tokens"], rows["attention"]) for rows in cut)
        assert all(torch.equal(a, b) for a, b in zip(scores, whole, strict=True))
    trainer.engine.end()


def test_an_engine_is_not_asked_for_a_role_that_it_has_not_and_survives_nonsense(nodes, judging):
    with Talk(nodes[0].remote(), within_s=20.0) as talk:
        talk.send("judge", b"", role="ref", id=0, shape=[1, 1, 1])
        with pytest.raises(Refused, match="does not know 'judge'"):
            talk.receive()
    for shape in ([4, 13, 6], [0, 13, 6], [1, 2], "x"):
        with Talk(judging[0].remote(), within_s=20.0) as talk:
            talk.send("judge", b"too short", role="ref", id=0, shape=shape)
            with pytest.raises(Lost, match="hung up"):
                talk.receive()
    assert judging[0].hello()["pid"] == pid_of(judging[0].home)


# ---- samples


def test_samples_of_two_engines_are_bit_for_bit_those_of_the_worker_s_own(trainer, nodes, actor):
    trainer.engine.publish(3)
    assert same(trainer.engine.generate(requests(40), version=3), inline(actor, requests(40)))
    assert trainer.engine.generate([], version=3).tokens.shape == (0, 13)
    for node in nodes:
        assert node.hello()["tag"] == {"life": "1 here", "version": 3}
    told = [sentence for sentence in trainer.said if "over TCP" in sentence]
    assert len(told) == 2
    assert all("by the probe" in sentence for sentence in told)


def test_new_weights_reach_both_and_old_ones_are_not_generated_by(trainer, nodes):
    trainer.engine.publish(0)
    with pytest.raises(StaleWeights, match="version 1 were asked for, those published are of 0"):
        trainer.engine.generate(requests(1), version=1)
    other = models.actor(Model(), str(nodes[0].attendant.service.model), seed=0)
    moved(other)
    trainer.actor = other
    trainer.enter("2 after a reform")
    trainer.engine.publish(0)
    assert same(trainer.engine.generate(requests(20), version=0), inline(other, requests(20)))
    with Talk(nodes[0].remote(), within_s=20.0) as talk:
        old = asdict(weights.Tag(life="1 here", version=0))
        talk.send("generate", b"\0" * 4, tag=old, ids=["0"], seeds=[1], lengths=[1], widths=[0])
        with pytest.raises(Refused, match="version 0 of life '1 here' was asked, it has 0 of life '2 after") as refused:
            talk.receive()
        assert refused.value.kind == "stale"


def test_an_engine_s_death_costs_what_it_had_not_finished_and_it_comes_back_fed(trainer, nodes, actor):
    trainer.engine.publish(2)
    struck = []

    def turn():
        if not struck and len(trainer.engine.found) > 0:
            os.killpg(pid_of(nodes[1].home), signal.SIGKILL)
            struck.append(len(trainer.engine.found))
            nodes[1].attendant.lost("killed by the test")

    trainer.on_turn = turn
    found = trainer.engine.generate(requests(400), version=2)
    trainer.on_turn = lambda: None
    assert struck, "it was not struck in the middle"
    assert 0 < struck[0] < 400
    assert same(found, inline(actor, requests(400)))
    assert any(sentence.startswith("rollout engine of r1 at") for sentence in trainer.said)
    tag = nodes[1].hello()["tag"]  # it is back; its weights lay in its own memory
    assert tag == {"life": "1 here", "version": 2}


def test_who_missed_its_orders_asks_no_further_once_another_life_has_begun(trainer):
    trainer.engine.publish(6)
    with ThreadPoolExecutor(1) as ahead:
        flight = ahead.submit(trainer.engine.generate, requests(600), version=6)
        until(lambda: len(trainer.engine.found) > 0, "the first sample")
        trainer.enter(life="2 after a reform")
        with pytest.raises(StaleWeights, match="another life of the gang has begun"):
            flight.result(60.0)
    assert 0 < len(trainer.engine.found) < 600


def test_an_engine_that_answers_again_has_not_failed_in_a_row(trainer, nodes):
    rest = trainer.engine.rest
    trainer.engine.publish(0)
    for node in nodes:
        for _ in range(7):
            rest.begin(node.name, node.address)
        rest.until[node.name] = time.monotonic()  # its rest is over
    trainer.engine.generate(requests(8), version=0)
    rest.begin("r0", nodes[0].address)
    assert rest.until["r0"] < time.monotonic() + patience(2 * REST_S)
    assert "r1" not in rest.failures


def test_an_engine_that_comes_late_is_fed_and_asked(tmp_path, nodes, actor):
    trainer = Trainer(tmp_path, [], actor)
    trainer.engine.publish(5)
    late = threading.Timer(0.3, trainer.know, nodes)
    late.start()
    assert same(trainer.engine.generate(requests(8), version=5), inline(actor, requests(8)))
    late.join()
    trainer.engine.end()
    assert not (tmp_path / "weights" / weights.FILE).exists(), "its memory is given back"


def test_who_does_not_write_asks_until_the_weights_are_there(tmp_path, nodes, actor):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    first, second = Trainer(tmp_path / "a", nodes, actor), Trainer(tmp_path / "b", nodes, actor, writes=False)
    first.enter("9 here")
    second.enter("9 here", writes=False)
    second.engine.publish(1)
    late = threading.Timer(0.3, first.engine.publish, [1])
    late.start()
    assert same(second.engine.generate(requests(8), version=1), inline(actor, requests(8)))
    late.join()
    first.engine.end()


def test_an_engine_to_which_somebody_else_brought_weights_is_given_ours_again(tmp_path, trainer, nodes, actor):
    """Found by reading: of one who had been replaced, and whose cable healed, the engine's old weights were its last."""
    trainer.engine.publish(4)
    (tmp_path / "old").mkdir()
    old = Trainer(tmp_path / "old", nodes, actor, life="0 before")
    old.engine.publish(7)
    old.engine.end()
    assert nodes[0].hello()["tag"] == {"life": "0 before", "version": 7}
    assert same(trainer.engine.generate(requests(20), version=4), inline(actor, requests(20)))


def test_what_a_writer_that_died_left_in_memory_goes_with_the_next_life(tmp_path, nodes, actor):
    died = Trainer(tmp_path, nodes, actor)
    died.engine.publish(0)
    assert (tmp_path / "weights" / weights.FILE).exists()
    heir = Trainer(tmp_path, nodes, actor, life="2 here", writes=False)
    heir.engine.tidy()
    assert not (tmp_path / "weights" / weights.FILE).exists()
    died.engine.end()


def test_with_no_engine_a_trainer_waits_so_long_and_then_says_so(tmp_path, actor):
    trainer = Trainer(tmp_path, [], actor, wait_s=0.3)
    trainer.engine.publish(0)
    with pytest.raises(EngineFailed, match=r"no rollout node has said anything for 0.3 s \(rollout.wait\); 4 samples"):
        trainer.engine.generate(requests(4), version=0)
    trainer.engine.end()


def test_an_engine_of_another_configuration_is_not_asked(tmp_path, nodes, actor):
    trainer = Trainer(tmp_path, nodes, actor, wait_s=1.0)
    trainer.engine._makes = "something else"
    trainer.engine.publish(0)
    with pytest.raises(EngineFailed, match="would not be those of this configuration"):
        trainer.engine.generate(requests(4), version=0)
    trainer.engine.end()


# ---- who is let in, and with what


def test_nobody_is_let_in_without_the_job_s_key(nodes):
    node = nodes[0]
    before = len((node.home / "engine.log").read_text())
    with pytest.raises(Refused, match="r0 says: the caller does not know the job's key") as refused:
        Talk(node.remote(key="77" * 32), within_s=20.0)
    assert refused.value.kind == "key"
    with pytest.raises(Refused, match=f"for job 'job', not {PROTOCOL} for 'other'"):
        Talk(node.remote(job="other"), within_s=20.0)
    host, _, port = node.address.rpartition(":")
    for nonsense in (
        b"\xff" * 64,
        Frame(says={"v": PROTOCOL, "op": "hello"}).pack(),
        Frame(says={}, raw=b"x" * 8192).pack(),
    ):
        with socket.create_connection((host, int(port)), timeout=20.0) as sock:
            sock.sendall(nonsense)
            told = Inbox()
            frames = []
            while data := sock.recv(1 << 16):
                frames += told.feed(data)
        assert [frame.says["op"] for frame in frames] in (["challenge"], ["challenge", "no"])
    assert node.hello()["v"] == PROTOCOL
    assert (node.home / "engine.log").read_text()[before:].count("visitor") <= 1, "of strangers, a line a minute"


@pytest.mark.parametrize("sources", [["127.0.0.1"], [f"127.0.2.{number + 1}" for number in range(250)]])
def test_strangers_who_say_nothing_take_no_more_than_so_many_descriptors_and_no_member_s_place(nodes, sources):
    host, _, port = nodes[0].address.rpartition(":")
    with ExitStack() as stack:
        for number in range(250):
            source = (sources[number % len(sources)], 0)
            stranger = socket.create_connection((host, int(port)), timeout=20.0, source_address=source)
            stack.enter_context(stranger)
            with suppress(ConnectionResetError):
                stranger.recv(1)  # it was let in, or not
        with Talk(nodes[0].remote(), within_s=20.0) as member:
            pid = member.ask("hello")["pid"]
        assert len(list(Path(f"/proc/{pid}/fd").iterdir())) < PLACES + 64


def test_an_engine_without_a_key_of_its_own_opens_no_door(tmp_path):
    file = tmp_path / "key"
    with pytest.raises(Unfit, match="cannot be read"):
        the_key(str(file))
    file.touch(mode=0o600)
    with pytest.raises(Unfit, match="is empty"):
        the_key(str(file))
    file.write_text("77" * 32)
    assert the_key(str(file)) == b"77" * 32
    file.chmod(0o644)
    with pytest.raises(Unfit, match="can be read by others"):
        the_key(str(file))


def test_a_frame_that_was_changed_repeated_or_sent_back_ends_the_conversation(nodes):
    with Talk(nodes[0].remote(), within_s=20.0) as talk:
        whole = bytearray(Frame(says={"v": PROTOCOL, "op": "hello"}).pack(talk._inbox.signer))
        whole[-3] ^= 1
        talk._sock.sendall(whole)
        with pytest.raises(Lost):
            talk.receive()
    with Talk(nodes[0].remote(), within_s=20.0) as talk:
        again = Frame(says={"v": PROTOCOL, "op": "hello"}).pack(talk._inbox.signer)
        talk._sock.sendall(again)
        assert talk.receive().says["op"] == "hello"
        talk._sock.sendall(again)
        with pytest.raises(Lost):
            talk.receive()
    ours = Signer(b"k" * 32, b"c", b"both nonces")
    with pytest.raises(ValueError, match="not signed"):
        list(Inbox(signer=Signer(b"k" * 32, b"c", b"both nonces")).feed(Frame(says={"op": "x"}).pack(ours)))


def page_of(tmp_path, actor, version):
    """A whole set, to be spoiled."""
    tag = weights.Tag(life="torn", version=version)
    source = weights.buckets(actor, nbytes=1 << 12, dtype=next(actor.parameters()).dtype)
    weights.write(tmp_path, tag, source, within_s=5.0)
    return tag, json.loads((tmp_path / weights.PAGE).read_text()), (tmp_path / weights.FILE).read_bytes()


def test_torn_weights_are_refused_and_leave_none_that_pass_for_whole(tmp_path, nodes, actor):
    node = nodes[0]
    tag, page, data = page_of(tmp_path, actor, 7)
    spoiled = bytearray(data)
    spoiled[len(data) // 2] ^= 1
    for pieces, why in (
        ([bytes(spoiled)], "does not have its checksum"),
        ([data[:-100]], "were not sent whole"),
        ([data, b"more"], "more was sent"),
    ):
        with Talk(node.remote(), within_s=20.0) as talk:
            talk.send("put", page=page)
            for piece in pieces:
                talk.send("piece", piece)
            talk.send("whole")
            with pytest.raises(Refused, match=why) as refused:
                talk.receive()
            assert refused.value.kind == "torn"
        assert weights.tag_of(node.home) is None
    with Talk(node.remote(), within_s=20.0) as talk:  # a trainer that dies in the middle
        talk.send("put", page=page)
        talk.send("piece", data[:1000])
    with Talk(node.remote(), within_s=20.0) as talk, pytest.raises(Refused, match="no whole weights of version 7"):
        talk.ask("load", tag=asdict(tag))


def test_the_newest_who_brings_weights_is_believed(tmp_path, nodes, actor):
    node = nodes[0]
    tag, page, data = page_of(tmp_path, actor, 8)
    with Talk(node.remote(), within_s=20.0) as hung, Talk(node.remote(), within_s=20.0) as talk:
        hung.send("put", page=page)
        hung.send("piece", data[:1000])
        hung.ask("hello")
        talk.send("put", page=page)
        for at in range(0, len(data), 1000):
            talk.send("piece", data[at : at + 1000])
        assert talk.ask("whole")["op"] == "stored"
        hung.send("piece", data[1000:])
        with pytest.raises(Refused, match="somebody else has begun"):
            hung.receive()
        assert talk.ask("load", tag=asdict(tag))["op"] == "loaded"
    assert node.hello()["tag"] == asdict(tag)


# ---- pure parts


def test_the_missing_are_dealt_in_turn_over_who_is_there():
    asked = requests(5)
    assert shares(asked, ["r1", "r0"]) == {"r0": [asked[0], asked[2], asked[4]], "r1": [asked[1], asked[3]]}
    assert shares(asked[:1], ["r1", "r0"]) == {"r0": [asked[0]]}
    assert shares(asked, []) == {}


def test_who_fails_rests_the_longer_the_oftener_until_it_is_another():
    rest = Rest()
    assert rest.over("r0", "a:1")
    rest.begin("r0", "a:1")
    first = rest.until["r0"]
    rest.begin("r0", "a:1")
    assert rest.until["r0"] > first + 0.4
    assert not rest.over("r0", "a:1")
    assert rest.over("r0", "a:2"), "a new engine"


class Leaving(dict):
    """Lines of which each ends as soon as it has been looked at."""

    def __contains__(self, node):
        return self.pop(node, None) is not None


def test_an_engine_that_goes_while_it_is_looked_at_has_not_the_weights():
    feeder = Feeder(dict, None, "", LIMITS, lambda _why: None)
    feeder.close()
    tag = weights.Tag(life="1 here", version=0)
    line = Line(remote=None, host="", card=False, rate=1.0, has=tag)
    feeder._roll = lambda: {"r0": None, "r1": None}
    feeder._lines = {"r0": line, "r1": line}
    assert feeder.settled(tag)
    feeder._lines = Leaving(r1=line)
    assert not feeder.settled(tag)
    feeder._roll = lambda: {"r1": None}
    feeder._lines = Leaving(r1=line)
    assert feeder.settled(tag), "as it was at that moment"


def test_what_the_daemon_wrote_is_read_again_when_it_changes(tmp_path):
    roll = Roll(tmp_path / "list", job="job", node="n0")
    assert roll() == {}
    (tmp_path / "list").write_text(json.dumps({"key": KEY, "engines": {"r1": "b:2", "r0": "a:1"}}))
    assert {node: at.address for node, at in roll().items()} == {"r0": "a:1", "r1": "b:2"}
    (tmp_path / "new").write_text("half of a")
    (tmp_path / "new").rename(tmp_path / "list")
    assert list(roll()) == ["r0", "r1"], "what cannot be read changes nothing"


def test_signed_frames_come_whole_however_they_are_cut():
    sent = [Frame(says={"op": "piece", "n": i}, raw=bytes(range(i))) for i in range(5)]
    ours = Signer(b"k" * 32, b"c", b"x")
    stream = b"".join(frame.pack(ours) for frame in sent)
    for size in (1, 7, 64, len(stream)):
        inbox, found = Inbox(signer=Signer(b"k" * 32, b"s", b"x")), []
        for at in range(0, len(stream), size):
            found += inbox.feed(stream[at : at + size])
        assert found == sent


@pytest.mark.slow
def test_who_never_proves_anything_is_sent_away(nodes):
    host, _, port = nodes[0].address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=20.0) as sock:
        assert sock.recv(1 << 16), "the challenge"
        begun = time.monotonic()
        assert sock.recv(1) == b""
        assert time.monotonic() - begun < patience(10.0)
    until(lambda: nodes[0].hello()["v"] == PROTOCOL, "the engine goes on")
    assert (nodes[0].home / SOCKET).exists()


def test_limits_keep_a_frozen_engine_from_costing_more_than_its_share(tmp_path, nodes, actor):
    trainer = Trainer(tmp_path, nodes, actor, limits=replace(LIMITS, health_s=1.0, sync_s=2.0))
    trainer.engine.publish(4)
    frozen = pid_of(nodes[1].home)
    os.kill(frozen, signal.SIGSTOP)
    try:
        begun = time.monotonic()
        assert same(trainer.engine.generate(requests(8, start=500), version=4), inline(actor, requests(8, start=500)))
        trainer.engine.publish(5)
        assert time.monotonic() - begun < patience(15.0)
    finally:
        os.kill(frozen, signal.SIGCONT)
    trainer.engine.end()
