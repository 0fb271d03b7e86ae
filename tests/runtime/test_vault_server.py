"""The vault server as a real process: copies, fetches, deaths, strangers."""

import asyncio
import json
import os
import resource
import shutil
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from vault_nodes import KEY, Node, cluster, holdings, pattern, ring, until

from chaos.patience import patience
from elasticrl.runtime.vault import layout
from elasticrl.runtime.vault.channel import MAC_BYTES, MAX_HELLO, Channel, load_key, welcome
from elasticrl.runtime.vault.errors import CopiesLate, VaultError
from elasticrl.runtime.vault.holdings import newest_whole
from elasticrl.runtime.vault.push import Caller
from elasticrl.runtime.vault.server import Options, Server
from elasticrl.runtime.vault.slots import Pinned, Slots, files, pin
from elasticrl.runtime.vault.transfer import offer, promised
from elasticrl.runtime.vault.version import Version

BIG = 10 * layout.BLOCK  # more blocks than may be in flight


def held(node: Node) -> list[tuple[int, str]]:
    """(step, whose) of what a node's vault holds."""
    return sorted((holding.version.step, holding.node) for holding in holdings([node]))


def copied(node: Node, step: int, *, generation: int = 1, timeout_s: float = 5.0) -> int:
    return node.control.copied("w0", version=Version(step), generation=generation, timeout_s=timeout_s)


def test_a_copy_on_a_buddy_outlives_its_node(tmp_path: Path):
    with cluster(tmp_path, 3) as nodes:
        ring(nodes)
        for number, node in enumerate(nodes):
            node.announce(node.keep(7, shard=number, world=3, size=BIG))
        assert [copied(node, 7) for node in nodes] == [1, 1, 1]
        assert held(nodes[1]) == [(7, "n0"), (7, "n1")]
        nodes[0].kill()
        whole = newest_whole(holdings(nodes[1:]), here="n2")
        assert whole is not None
        assert whole.sources == (("n1",), ("n2", "n1"), ("n2",))
        answer = nodes[2].control.ask(
            "fetch", timeout_s=5.0, at="n1", step=7, update=0, generation=1, shard=0, world=3, blocks=None, by="w0"
        )
        fetched = pin(nodes[2].directory / answer["file"])
        assert isinstance(fetched, Pinned)
        with fetched:
            fetched.verify()
            assert bytes(fetched.view(0)) == pattern(7, 0, BIG)


def test_the_newest_versions_are_copied_and_memory_stays_bounded(tmp_path: Path):
    with cluster(tmp_path, 2) as nodes:
        ring(nodes)
        for step in range(12):
            nodes[0].announce(nodes[0].keep(step))
            assert copied(nodes[0], step) == 1
        assert held(nodes[1]) == [(step, "n0") for step in (9, 10, 11)]
        assert len(list(files(nodes[1].directory))) == 3


def test_a_buddy_keeps_the_copy_of_what_was_sealed_last_until_a_newer_one_is(tmp_path: Path):
    with cluster(tmp_path, 2) as nodes:
        ring(nodes)

        def copied(step: int, sealed: int) -> list[int]:
            nodes[0].announce(nodes[0].keep(step, sealed=sealed))
            until(
                lambda: nodes[0].control.copied("w0", version=Version(step), generation=1, timeout_s=5) == 1, "a copy"
            )
            return sorted(h.version.step for h in holdings([nodes[1]]) if h.node == "n0")

        for step in range(1, 5):
            copied(step, sealed=step - 1)
        assert [copied(step, sealed=4) for step in range(5, 9)][-1] == [4, 7, 8], (
            "another vault copies nothing meanwhile"
        )
        assert 4 not in [copied(step, sealed=step - 1) for step in range(9, 12)][-1]


def test_two_copies_survive_any_two_nodes(tmp_path: Path):
    with cluster(tmp_path, 4) as nodes:
        ring(nodes, copies=2)
        for number, node in enumerate(nodes):
            node.announce(node.keep(7, shard=number, world=4))
        assert [copied(node, 7) for node in nodes] == [2, 2, 2, 2]
        nodes[0].kill()
        nodes[1].kill()
        whole = newest_whole(holdings(nodes[2:]), here="n2")
        assert whole is not None
        assert whole.sources == (("n2",), ("n2", "n3"), ("n2", "n3"), ("n3",))


def test_a_ring_known_later_copies_what_is_newest_already(tmp_path: Path):
    with cluster(tmp_path, 2) as nodes:
        nodes[0].announce(nodes[0].keep(3))
        ring(nodes)
        assert copied(nodes[0], 3) == 1


def test_copies_go_to_the_new_buddy_when_the_ring_changes(tmp_path: Path):
    with cluster(tmp_path, 3) as nodes:
        ring(nodes)
        nodes[0].announce(nodes[0].keep(3))
        assert copied(nodes[0], 3) == 1
        nodes[1].kill()
        ring([nodes[0], nodes[2]], generation=2)
        assert copied(nodes[0], 3) == 1
        assert held(nodes[2]) == [(3, "n0")]
        with pytest.raises(VaultError, match="older"):
            ring([nodes[0], nodes[2]], generation=1)


def test_a_killed_server_comes_back_with_what_was_whole_and_goes_on_copying(tmp_path: Path):
    with cluster(tmp_path, 2) as nodes:
        ring(nodes)
        nodes[0].announce(nodes[0].keep(3))
        assert copied(nodes[0], 3) == 1
        nodes[0].kill()
        nodes[0].keep(5)
        torn = nodes[0].keep(6)
        with torn.open("r+b") as file:
            file.seek(layout.HEADER_AT - 8)
            file.write(bytes(8))
        nodes[0].start()
        assert nodes[0].dropped == [torn.name]
        assert copied(nodes[0], 5) == 1  # nobody told it of the ring or the file
        assert held(nodes[0]) == [(3, "n0"), (5, "n0")]


@pytest.mark.parametrize("point", ["vault.receive.block@2", "vault.seal.last", "vault.seal.done"])
def test_a_receiver_killed_while_it_receives_has_nothing_torn_and_gets_it_later(tmp_path: Path, point: str):
    giver, taker = Node(tmp_path, 0), Node(tmp_path, 1)
    try:
        giver.start()
        taker.start(fault=f"{point}:kill")
        ring([giver, taker])
        giver.announce(giver.keep(3, size=BIG))
        assert taker.process is not None
        assert taker.process.wait(10) == -signal.SIGKILL, "the fault never fired"
        taker.kill()
        for path, _ in files(taker.directory):
            found = pin(path)
            assert isinstance(found, Pinned) == (point == "vault.seal.done")
        with pytest.raises(VaultError, match=r"was not copied within 0\.3 s: copies to n1"):
            copied(giver, 3, timeout_s=0.3)
        taker.start()
        assert copied(giver, 3) == 1
        assert held(taker) == [(3, "n0")]
    finally:
        giver.stop()
        taker.stop()


def test_a_receiver_that_goes_between_a_frame_and_its_data_is_a_connection_that_ended(tmp_path: Path):
    file = tmp_path / "data"
    file.write_bytes(bytes(4096))

    async def send() -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket() as ours:
            ours.connect(listener.getsockname())
            listener.accept()[0].close()
            channel = Channel(ours, deadline_s=5.0)
            with file.open("rb") as opened:
                await channel.send_file({"block": 0}, opened, 0, 4096)

    with pytest.raises(ConnectionError):
        asyncio.run(send())


def test_whatever_answers_at_a_neighbours_address_copies_are_tried_again(tmp_path: Path):
    body = b"[" * MAX_HELLO  # an error, but none that reading a frame is known for
    with cluster(tmp_path, 1) as (node,), socket.create_server(("127.0.0.1", 0)) as stranger:
        stranger.settimeout(10)
        node.announce(node.keep(3))
        there = {"n0": node.address, "n1": f"127.0.0.1:{stranger.getsockname()[1]}"}
        node.control.ask("ring", generation=1, nodes=["n0", "n1"], addresses=there, copies=1)
        for _ in range(3):
            with stranger.accept()[0] as caller:
                caller.sendall(len(body).to_bytes(4, "big") + bytes(MAC_BYTES) + body)
        assert "copies to n1" in node.control.ask("status")["buddies"][0]["failing"]


def test_a_copy_that_arrives_in_the_moment_in_which_the_patience_ends_is_there(tmp_path: Path):
    with cluster(tmp_path, 2) as nodes:
        ring(nodes)
        late = 0
        for step in range(300):
            nodes[0].announce(nodes[0].keep(step))
            while True:
                try:
                    assert copied(nodes[0], step, timeout_s=0.0001 * (1 + step % 10)) == 1
                    break
                except CopiesLate:
                    late += 1
        assert late > 30, "patience never ended before a copy was there"


def test_a_frozen_buddy_is_named_within_the_deadline_and_served_when_it_wakes(tmp_path: Path):
    with cluster(tmp_path, 2) as nodes:
        ring(nodes)
        nodes[1].signal(signal.SIGSTOP)
        nodes[0].announce(nodes[0].keep(3, size=BIG))
        began = time.monotonic()
        with pytest.raises(VaultError, match="n1"):
            copied(nodes[0], 3, timeout_s=1.5)
        assert time.monotonic() - began < patience(3)
        until(lambda: nodes[0].control.ask("status")["buddies"][0]["failing"] != "", "the failure shows in status")
        nodes[1].signal(signal.SIGCONT)
        assert copied(nodes[0], 3) == 1


def test_a_shard_changed_after_it_was_sealed_is_not_accepted_as_a_copy(tmp_path: Path):
    with cluster(tmp_path, 2) as nodes:
        ring(nodes)
        path = nodes[0].keep(3, size=BIG)
        with path.open("r+b") as file:
            file.seek(layout.PAGE + 2 * layout.BLOCK)
            file.write(b"\xff")
        nodes[0].announce(path)
        with pytest.raises(VaultError, match=r"block 2 of n0's step 3\.0 does not have its checksum"):
            copied(nodes[0], 3, timeout_s=1.0)
        assert held(nodes[1]) == []


def test_a_part_of_a_shard_can_be_fetched_and_is_never_taken_for_the_whole(tmp_path: Path):
    with cluster(tmp_path, 2) as nodes:
        ring(nodes, copies=0)
        nodes[0].announce(nodes[0].keep(3, size=BIG))
        answer = nodes[1].control.ask(
            "fetch", timeout_s=5.0, at="n0", step=3, update=0, generation=1, shard=0, world=1, blocks=[4, 5], by="w0"
        )
        assert answer["nbytes"] == 2 * layout.BLOCK
        fetched = pin(nodes[1].directory / answer["file"])
        assert isinstance(fetched, Pinned)
        with fetched:
            assert layout.damage(fetched.memory, fetched.sealed, [4, 5]) == ()
            part = slice(4 * layout.BLOCK, 6 * layout.BLOCK)
            assert bytes(fetched.view(0)[part]) == pattern(3, 0, BIG)[part]
            with pytest.raises(VaultError, match="8 of 10 blocks"):
                fetched.verify()
        assert held(nodes[1]) == []


def test_what_was_fetched_takes_the_memory_of_what_was_asked_for_and_goes_with_the_next_release(tmp_path: Path):
    with cluster(tmp_path, 2) as nodes:
        ring(nodes, copies=0)
        nodes[0].announce(nodes[0].keep(3, size=BIG))
        wanted = {"step": 3, "update": 0, "generation": 1, "shard": 0, "world": 1, "at": "n0", "timeout_s": 5.0}

        def fetch(blocks: list[int] | None, by: str = "w0") -> Path:
            return nodes[1].directory / nodes[1].control.ask("fetch", **wanted, blocks=blocks, by=by)["file"]

        def taken(path: Path) -> int:
            return path.stat().st_blocks * 512

        assert taken(fetch([])) <= 16 * layout.PAGE
        pair = fetch([4, 5])
        assert 2 * layout.BLOCK <= taken(pair) <= 2 * layout.BLOCK + 16 * layout.PAGE
        read = fetch([1], by="w1")
        whole = [fetch(None) for _ in range(3)]
        assert [path for path, _ in files(nodes[1].directory)] == [*whole[:1], pair, read]
        reader = pin(read)
        assert isinstance(reader, Pinned)
        with reader:
            nodes[1].control.release(Version(3))
            assert [path for path, _ in files(nodes[1].directory)] == [read]
        nodes[1].control.release(Version(3))
        assert list(files(nodes[1].directory)) == []
        assert not open_shards(nodes[1])
        fetch(None)


def open_shards(node: Node) -> list[str]:
    """The files that a node's server has open or mapped, by name, removed ones too."""
    assert node.process is not None
    here = Path(f"/proc/{node.process.pid}")
    names = [str(link.readlink()) for link in (*(here / "fd").iterdir(), *(here / "map_files").iterdir())]
    return [name for name in names if ".shard" in name]


def test_a_part_for_which_there_is_no_memory_is_refused_with_a_sentence_and_leaves_nothing(tmp_path: Path):
    giver, taker = Node(tmp_path, 0), Node(tmp_path, 1)
    wanted = {"step": 3, "update": 0, "generation": 1, "shard": 0, "world": 1, "blocks": [1], "by": "w0"}
    try:
        giver.start()
        taker.start(fault="vault.reserve:full")
        ring([giver, taker], copies=0)
        giver.announce(giver.keep(3, size=BIG))
        with pytest.raises(
            VaultError, match=r"The vault needs 0\.00 GB for n0\+part-w0-w0\+1\.shard .* Enlarge that tmpfs"
        ):
            taker.control.ask("fetch", timeout_s=5.0, at="n0", **wanted)
        assert list(files(taker.directory)) == []
        assert not open_shards(taker)
        answer = taker.control.ask("fetch", timeout_s=5.0, at="n0", **wanted)
        assert answer["nbytes"] == layout.BLOCK
        taker.kill()
        taker.start()  # and one whose reader died before it had it goes with the server
        assert taker.dropped == [answer["file"]]
    finally:
        giver.stop()
        taker.stop()


def test_what_is_not_held_is_refused_with_a_sentence(tmp_path: Path):
    with cluster(tmp_path, 2) as nodes:
        ring(nodes)
        wanted = {"step": 3, "update": 0, "generation": 1, "shard": 0, "world": 1, "blocks": None, "by": "w0"}
        with pytest.raises(VaultError, match=r"n0 does not hold shard 0 of 1 of step 3\.0, generation 1"):
            nodes[1].control.ask("fetch", timeout_s=5.0, at="n0", **wanted)
        with pytest.raises(VaultError, match="n9 is not in the ring"):
            nodes[1].control.ask("fetch", timeout_s=5.0, at="n9", **wanted)


def test_a_node_with_another_key_gets_and_gives_nothing(tmp_path: Path):
    good, stranger = Node(tmp_path, 0), Node(tmp_path, 1, key="quite another key for strangers!")
    try:
        good.start()
        stranger.start()
        ring([good, stranger])
        stranger.announce(stranger.keep(3))
        with pytest.raises(VaultError, match="does not know the job's key"):
            copied(stranger, 3, timeout_s=0.5)
        wanted = {"step": 3, "update": 0, "generation": 1, "shard": 0, "world": 1, "blocks": None, "by": "w0"}
        with pytest.raises(VaultError, match="does not know the job's key"):
            good.control.ask("fetch", timeout_s=5.0, at="n1", **wanted)
        assert held(good) == []
    finally:
        good.stop()
        stranger.stop()


def wire(body: dict[str, object]) -> bytes:
    """An unsigned frame, as before the handshake has ended."""
    text = json.dumps({**body, "raw": 0}).encode()
    return len(text).to_bytes(4, "big") + bytes(16) + text


def heard(sock: socket.socket) -> dict[str, object]:
    size = int.from_bytes(sock.recv(4, socket.MSG_WAITALL), "big")
    sock.recv(16, socket.MSG_WAITALL)
    return dict(json.loads(sock.recv(size, socket.MSG_WAITALL)))


def test_a_caller_without_the_key_is_refused_even_if_it_does_not_care_who_we_are(tmp_path: Path):
    with cluster(tmp_path, 1) as (node,), socket.create_connection((node.host, node.port), timeout=5) as sock:
        assert heard(sock)["node"] == "n0"
        sock.sendall(wire({"v": 1, "node": "n1", "nonce": "00", "mac": "00"}))
        assert heard(sock)["ok"] is False
        until(lambda: "'n1' does not know the job's key" in node.control.ask("status")["complaint"], "it is noted")


def test_both_ends_of_a_conversation_notice_that_the_other_machine_is_gone():
    async def talk() -> list[tuple[int, ...]]:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            listener.setblocking(False)
            caller = Caller(job="job", node="n1", key=KEY.encode(), source="", deadline_s=5.0)
            called = asyncio.create_task(caller.call(f"127.0.0.1:{listener.getsockname()[1]}"))
            sock, _ = await asyncio.get_running_loop().sock_accept(listener)
            ends = (await welcome(sock, key=KEY.encode(), job="job", node="n0", deadline_s=5.0), await called)
            options = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
            found = []
            for end in ends:
                asked = end.sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
                found.append((asked, *(end.sock.getsockopt(socket.IPPROTO_TCP, option) for option in options)))
                end.close()
            return found

    assert asyncio.run(talk()) == [(1, 60, 10, 3)] * 2


def test_a_server_that_had_no_descriptor_free_hears_the_next_caller(tmp_path: Path):
    with cluster(tmp_path, 2) as nodes:
        assert nodes[1].process is not None
        pid = nodes[1].process.pid
        ring(nodes)
        usual = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        taken = {int(fd.name) for fd in Path(f"/proc/{pid}/fd").iterdir()}
        free = next(fd for fd in range(len(taken) + 1) if fd not in taken)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (free, usual[1]))
        nodes[0].announce(nodes[0].keep(3))
        with pytest.raises(VaultError, match=r"was not copied within 0\.5 s"):
            copied(nodes[0], 3, timeout_s=0.5)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, usual)
        assert copied(nodes[0], 3, timeout_s=10) == 1
        assert "Too many open files" in nodes[1].control.ask("status")["complaint"]


@pytest.mark.parametrize("crowd", ["one address", "many addresses", "a member's address"])
def test_strangers_who_say_nothing_turn_no_member_away(tmp_path: Path, crowd: str):
    # Found from outside: 140 idle connections to each vault stopped all copies; a recovery took 43.6 s.
    places = {"one address": "127.0.0.1", "a member's address": "127.0.1.1"}
    with cluster(tmp_path, 2) as nodes, ExitStack() as stack:
        nodes[1].kill()
        nodes[1].start(deadline_s=5.0)
        ring(nodes)
        for number in range(140):
            source = (places.get(crowd, f"127.0.2.{number + 1}"), 0)
            to = (nodes[1].host, nodes[1].port)
            stranger = stack.enter_context(socket.create_connection(to, timeout=20, source_address=source))
            with suppress(ConnectionResetError):
                stranger.recv(1)  # it has been let in, or not
        caller = Caller(job="job", node="n0", key=KEY.encode(), source=nodes[0].host, deadline_s=5.0)
        asyncio.run(caller.call(nodes[1].address)).close()
        nodes[0].announce(nodes[0].keep(3))
        assert copied(nodes[0], 3) == 1
        assert nodes[0].control.ask("status")["buddies"][0]["failing"] == ""


def test_members_are_counted_apart_from_strangers_and_are_told_where_they_are_too_many(tmp_path: Path):
    async def crowded() -> str:
        host = "127.0.0.1"
        options = Options(
            job="job", node="n0", directory=tmp_path / "n0", listen=f"{host}:0", key=KEY.encode(), callers=2
        )
        server = Server(options)
        await server.start()
        caller = Caller(job="job", node="n1", key=KEY.encode(), source="", deadline_s=5.0)
        held = [await caller.call(f"{host}:{server.port}") for _ in range(3)]
        try:
            await held[-1].ask({"op": "get"})
        except VaultError as error:
            return str(error)
        finally:
            for channel in held:
                channel.close()
            server.stop()
            await server.run()
        return "it was let in"

    assert "n0 hears 2 members already" in asyncio.run(crowded())


def test_a_frame_with_another_signature_or_sent_twice_ends_the_conversation(tmp_path: Path):
    async def look(channel: Channel) -> None:
        wanted = {"step": 3, "update": 0, "generation": 1, "shard": 0, "world": 1, "blocks": []}
        await promised(channel, *await channel.ask({"op": "get", **wanted}))

    async def converse(address: str, spoil: Callable[[Channel], None]) -> bool:
        caller = Caller(job="job", node="n1", key=KEY.encode(), source="", deadline_s=2.0)
        channel = await caller.call(address)
        await look(channel)
        spoil(channel)
        try:
            await look(channel)
        except (OSError, VaultError, TimeoutError):
            return False
        else:
            return True
        finally:
            channel.close()

    def other_key(channel: Channel) -> None:
        channel._signer._key = b"x" * 32

    def again(channel: Channel) -> None:
        channel._signer._sent -= 1

    with cluster(tmp_path, 1) as (node,):
        node.keep(3, size=BIG)
        assert asyncio.run(converse(node.address, lambda _: None))
        for spoil in (other_key, again):
            assert not asyncio.run(converse(node.address, spoil))
            until(lambda: "not signed" in node.control.ask("status")["complaint"], "it is noted")


def test_a_node_can_only_leave_its_own_shards(tmp_path: Path):
    async def leave(address: str, shard: Pinned) -> dict[str, object]:
        channel = await Caller(job="job", node="n5", key=KEY.encode(), source="", deadline_s=2.0).call(address)
        await offer(channel, {"op": "put"}, shard.sealed)
        answer, _ = await channel.receive()
        channel.close()
        return answer

    with cluster(tmp_path, 2) as nodes:
        shard = pin(nodes[1].keep(3))
        assert isinstance(shard, Pinned)
        with shard:
            answer = asyncio.run(leave(nodes[0].address, shard))
        assert answer["why"] == "n5 may not leave a shard of n1 of job job here"
        assert held(nodes[0]) == []


def test_two_jobs_on_one_host_do_not_meet(tmp_path: Path):
    one, other = Node(tmp_path, 0), Node(tmp_path, 1, job="another")
    try:
        one.start()
        other.start()
        ring([one, other])
        one.announce(one.keep(3))
        with pytest.raises(VaultError, match="two jobs on one host need two ports"):
            copied(one, 3, timeout_s=0.5)
    finally:
        one.stop()
        other.stop()


@pytest.mark.parametrize(
    "garbage",
    [
        b"",
        b"GET / HTTP/1.1\r\n\r\n",
        (1 << 31).to_bytes(4, "big"),
        (20).to_bytes(4, "big") + bytes(16) + b"[1,2,3]" * 3,
        (4096).to_bytes(4, "big") + bytes(16) + b"[" * 4096,
    ],
)
def test_a_stranger_who_talks_nonsense_harms_nobody(tmp_path: Path, garbage: bytes):
    with cluster(tmp_path, 2) as nodes:
        ring(nodes)
        with socket.create_connection((nodes[1].host, nodes[1].port), timeout=5) as sock:
            sock.sendall(garbage)
            nodes[0].announce(nodes[0].keep(3))
            assert copied(nodes[0], 3) == 1
        if garbage.endswith(b"["):  # found by reading: each was a traceback in a log without end
            until(lambda: "is not understood" in nodes[1].control.ask("status")["complaint"], "it is noted")


def test_the_control_socket_is_ours_alone_and_answers_mistakes(tmp_path: Path):
    with cluster(tmp_path, 1) as (node,):
        assert stat.S_IMODE((node.directory / "control.sock").stat().st_mode) == 0o600
        with pytest.raises(VaultError, match="'nonsense' is not one of"):
            node.control.ask("nonsense")
        with pytest.raises(VaultError, match="not understood"):
            node.control.ask("sealed")
        with pytest.raises(VaultError, match="is not a file of a worker of n0"):
            node.control.ask("sealed", file="../../etc/passwd")
        with socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(5)
            sock.connect(str(node.directory / "control.sock"))
            sock.sendall(b'{"v":99,"op":"status"}\nnot json\n')
            answers = sock.makefile()
            assert "speaks version 1" in json.loads(answers.readline())["why"]
            assert "not understood" in json.loads(answers.readline())["why"]


def test_a_server_that_does_not_answer_is_an_error_with_a_sentence(tmp_path: Path):
    node = Node(tmp_path, 0)
    with pytest.raises(VaultError, match="Snapshots go on in this node's memory"):
        node.control.ask("status")


def test_copies_that_could_not_be_made_are_refused_when_the_ring_is_told(tmp_path: Path):
    with cluster(tmp_path, 1) as (node,):
        with pytest.raises(VaultError, match="is to keep 1 copies elsewhere and has no address of n1"):
            node.control.ask("ring", generation=1, nodes=["n0", "n1"], addresses={"n0": node.address}, copies=1)
        node.control.ask(
            "ring", generation=1, nodes=["n0"], addresses={"n0": node.address}, copies=1
        )  # nobody else is in


def test_a_path_too_long_for_a_socket_is_refused_with_a_sentence(tmp_path: Path):
    command = [sys.executable, "-m", "elasticrl.runtime.vault", "--job", "job", "--node", "n0"]
    long = tmp_path / ("x" * 100)
    done = subprocess.run([*command, "--dir", str(long)], capture_output=True, text=True, timeout=20)
    assert done.returncode == 1
    assert "and a socket's path may have 107: shorten vault.dir" in done.stderr


def test_one_directory_has_one_server(tmp_path: Path):
    with cluster(tmp_path, 1) as (node,):
        command = [sys.executable, "-m", "elasticrl.runtime.vault", "--job", "job", "--node", "n0"]
        second = subprocess.run([*command, "--dir", str(node.directory)], capture_output=True, text=True, timeout=20)
        assert second.returncode == 1
        assert "Another vault server already serves" in second.stderr
        assert node.control.ask("status")["node"] == "n0"


def test_copies_without_a_key_are_refused(tmp_path: Path):
    command = [sys.executable, "-m", "elasticrl.runtime.vault", "--job", "job", "--node", "n0"]
    done = subprocess.run(
        [*command, "--dir", str(tmp_path / "v"), "--listen", "127.0.0.1:0"], capture_output=True, text=True, timeout=20
    )
    assert done.returncode == 1
    assert "has no key" in done.stderr
    shared = tmp_path / "key"
    shared.write_text("k" * 32)
    shared.chmod(0o644)
    with pytest.raises(VaultError, match="chmod 600"):
        load_key(shared)
    shared.chmod(0o600)
    assert load_key(shared) == b"k" * 32
    shared.write_text("short")
    with pytest.raises(VaultError, match="needs 16 or more"):
        load_key(shared)


def test_a_stopped_server_leaves_the_files_and_an_ended_job_leaves_none(tmp_path: Path):
    node = Node(tmp_path, 0)
    try:
        node.start()
        node.announce(node.keep(3))
        node.signal(signal.SIGTERM)
        assert node.process is not None
        assert node.process.wait(10) == 0
        assert len(list(files(node.directory))) == 1
        node.kill()
        node.start()
        node.control.ask("end")
        assert node.process is not None
        assert node.process.wait(10) == 0
        assert not node.directory.exists()
    finally:
        node.stop()


def test_files_of_writers_that_are_gone_are_released_once_all_others_are_beyond(tmp_path: Path):
    with cluster(tmp_path, 3) as nodes:
        ring(nodes)
        for node in nodes:
            node.announce(node.keep(3))
            assert copied(node, 3) == 1
        nodes[0].kill()
        ring(nodes[1:], generation=2)
        for step in (4, 5):
            for node in nodes[1:]:
                node.announce(node.keep(step, generation=2))
                assert copied(node, step, generation=2) == 1
        assert (3, "n0") in held(nodes[1])
        nodes[1].control.release(Version(5))
        assert held(nodes[1]) == [(step, node) for step in (3, 4, 5) for node in ("n1", "n2")]
        nodes[1].announce(nodes[1].keep(6, generation=2))
        assert copied(nodes[1], 6, generation=2) == 1


def test_what_is_being_written_is_not_released_under_its_writer(tmp_path: Path):
    with cluster(tmp_path, 1) as (node,):
        old = node.keep(1)
        slots = Slots(node.directory, origin="n0", writer="w0")
        slot = slots.take(1000, below=(Version(9), 1))
        node.control.release(Version(5))
        assert not old.exists()
        assert slot.path.exists(), "a state that is just being kept"
        slot.unlock()
        slots.close()


def test_what_somebody_looks_at_just_as_it_may_go_goes_a_moment_later(tmp_path: Path):
    with cluster(tmp_path, 1) as (node,):
        old = node.keep(1)
        looked = pin(old)
        assert isinstance(looked, Pinned)
        begun = time.monotonic()
        threading.Timer(0.15, looked.close).start()
        node.control.release(Version(5))
        assert time.monotonic() - begun > 0.1, "a second look"
        assert not old.exists(), "nothing releases it before the next generation"


def test_a_buddy_that_lost_its_memory_has_the_copies_again_with_the_next_plan(tmp_path: Path):
    with cluster(tmp_path, 2) as nodes:
        ring(nodes)
        here, there = nodes
        here.announce(here.keep(1))
        until(lambda: any(h.at == "n1" for h in holdings(nodes)), "a copy")
        there.kill()
        shutil.rmtree(there.directory)
        there.start()  # at the port that it had
        ring(nodes, generation=2)
        until(lambda: any(h.at == "n1" for h in holdings(nodes)), "the copy again")


def test_copies_leave_from_the_interface_they_were_told_to(tmp_path: Path):
    """n0 listens on 127.0.1.1, so its calls come from there, not from where the route would have them."""
    giver = Node(tmp_path, 0)
    with socket.create_server(("127.0.1.2", 0)) as listener:
        listener.settimeout(5)
        try:
            giver.start()
            giver.control.ask(
                "ring",
                generation=1,
                nodes=["n0", "n1"],
                addresses={"n0": giver.address, "n1": f"127.0.1.2:{listener.getsockname()[1]}"},
                copies=1,
            )
            giver.announce(giver.keep(3))
            sock, peer = listener.accept()
            sock.close()
            assert peer[0] == "127.0.1.1"
        finally:
            giver.stop()


def test_the_server_imports_neither_torch_nor_numpy():
    code = "import sys, elasticrl.runtime.vault.server, elasticrl.runtime.vault.__main__; print(sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=20, env={**os.environ})
    assert done.returncode == 0, done.stderr
    assert "'torch'" not in done.stdout
    assert "'numpy'" not in done.stdout
