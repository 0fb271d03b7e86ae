"""Snapshots by a worker: what they cost, what a kill leaves, and how another gang gets them back."""

import gc
import json
import os
import shutil
import signal
import socket
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from state_jobs import Job, Rollout, pinned, same
from vault_nodes import Node, cluster, holdings, ring, until

from chaos.patience import patience
from elasticrl.runtime.checkpoint.parts import Parts
from elasticrl.runtime.vault import faults, layout
from elasticrl.runtime.vault.channel import CAME, STILL
from elasticrl.runtime.vault.client import Content, Vault
from elasticrl.runtime.vault.control import Control
from elasticrl.runtime.vault.errors import VaultError
from elasticrl.runtime.vault.holdings import Whole, newest_whole
from elasticrl.runtime.vault.layout import Table
from elasticrl.runtime.vault.piece import Piece
from elasticrl.runtime.vault.piece import whole as whole_piece
from elasticrl.runtime.vault.slots import Pinned, files, pin
from elasticrl.runtime.vault.source import Source, shard_of
from elasticrl.runtime.vault.version import Version


def content(*tensors: torch.Tensor) -> Content:
    pieces = (whole_piece(f"t{i}", str(t.dtype).removeprefix("torch."), tuple(t.shape)) for i, t in enumerate(tensors))
    return Content(table=Table(tuple(pieces)), tensors=tensors, values={"part": {"n": 1}})


def one(vault: Vault, step: int, what: Content, *, generation: int = 1):
    return vault.snapshot(what, version=Version(step), generation=generation, shard=0, world=1)


def held(directory: Path) -> dict[int, torch.Tensor]:
    """The first tensor of each whole version."""
    found = {}
    for path, _ in files(directory):
        shard = pin(path)
        if isinstance(shard, Pinned):
            with shard:
                shard.verify()
                found[shard.sealed.stamp.version.step] = shard_of(shard).tensors[0].clone()
    return found


def test_what_is_kept_is_the_state_at_the_time_whatever_happens_after_it_was_taken(tmp_path: Path):
    vault = Vault(tmp_path / "v", job="j", node="n0")
    weights = torch.zeros(100_000)
    table = content(weights)
    for step in range(10):
        weights.fill_(step)
        ticket = one(vault, step, table)
        vault.settle(5)
        weights.fill_(-1)
    ticket.wait_sealed(5)
    found = held(tmp_path / "v")
    assert sorted(found) == [7, 8, 9]
    for step, tensor in found.items():
        assert torch.equal(tensor, torch.full((100_000,), float(step)))
    vault.close()


def test_the_tensors_of_a_snapshot_that_is_sealed_are_held_no_longer(tmp_path: Path):
    vault = Vault(tmp_path / "v", job="j", node="n0")
    weights = torch.zeros(100)
    gone = weakref.ref(weights)
    one(vault, 0, content(weights)).wait_sealed(5)
    del weights
    until(lambda: gone() is None, "the tensors to be let go of", 5.0)
    vault.close()


def test_what_a_step_changes_is_copied_first_and_may_change_while_the_rest_is_copied(tmp_path: Path):
    vault = Vault(tmp_path / "v", job="j", node="n0")
    params, rows = torch.zeros(10_000_000), torch.zeros(1000)
    what = replace(content(params, rows), steady=1)
    early = 0
    for step in range(5):
        params.fill_(step)
        rows.fill_(step)
        ticket = one(vault, step, what)
        vault.loosen(5)
        rows.fill_(-1)
        early += not ticket.copied
        vault.settle(5)
        params.fill_(-1)
        ticket.wait_sealed(5)
        assert ticket.path is not None
        shard = pin(ticket.path)
        assert isinstance(shard, Pinned)
        with shard:
            assert [set(tensor.tolist()) for tensor in shard_of(shard).tensors] == [{float(step)}, {float(step)}]
    assert early > 0, "the rest was waited for too"
    vault.close()


def test_a_snapshot_returns_before_the_copy_is_made(tmp_path: Path):
    """40 MB take some ten milliseconds to copy; the training thread is back in a fraction of that."""
    vault = Vault(tmp_path / "v", job="j", node="n0")
    large = content(torch.zeros(10_000_000))
    one(vault, 0, large).wait_sealed(10)
    calls = []
    for step in range(1, 8):
        began = time.perf_counter()
        ticket = one(vault, step, large)
        calls.append(time.perf_counter() - began)
        ticket.wait_sealed(10)
    assert sorted(calls)[3] < 0.01
    vault.close()


def test_a_worker_without_a_server_keeps_state_and_says_that_nobody_copies_it(tmp_path: Path):
    vault = Vault(tmp_path / "v", job="j", node="n0")
    ticket = one(vault, 3, content(torch.ones(5)))
    ticket.wait_sealed(5)
    until(lambda: "did not answer" in vault.notice, "the missing server is noticed")
    with pytest.raises(VaultError, match="copies wait until it is back"):
        vault.wait_copied(ticket, 0.2)
    vault.close()


def test_a_server_that_hangs_holds_up_no_snapshot(tmp_path: Path):
    with cluster(tmp_path, 1) as (node,):
        vault = Vault(node.directory, job="job", node="n0", deadline_s=3.0)
        one(vault, 0, content(torch.ones(1000))).wait_sealed(5)
        node.signal(signal.SIGSTOP)
        began = time.monotonic()
        for step in range(1, 6):
            one(vault, step, content(torch.ones(1000))).wait_sealed(5)
        assert time.monotonic() - began < patience(1.5)
        assert sorted(held(node.directory)) == [3, 4, 5]
        node.signal(signal.SIGCONT)
        until(lambda: node.control.ask("status")["holdings"] == 3, "the server answers again")
        vault.close()


@contextmanager
def hung(tmp_path: Path) -> Iterator[tuple[Sequence[Node], Vault]]:
    """Two nodes and a worker of the first, whose server hangs while it is told of the first snapshot."""
    with cluster(tmp_path, 2) as nodes:
        ring(nodes)
        vault = Vault(nodes[0].directory, job="job", node="n0", deadline_s=3.0)
        nodes[0].signal(signal.SIGSTOP)
        one(vault, 0, content(torch.ones(1000))).wait_sealed(5)
        until(vault._news.empty, "the thread has taken the first, and asks")
        yield nodes, vault


def test_a_server_that_hung_is_told_of_the_newest_file_of_each_writer(tmp_path: Path):
    with hung(tmp_path) as (nodes, vault):
        full = one(vault, 1, content(torch.ones(1000)))
        full.wait_sealed(5)
        light = vault.snapshot(
            content(torch.ones(10)), version=Version(1, 1), generation=1, shard=0, world=1, base=Version(1)
        )
        light.wait_sealed(5)
        nodes[0].signal(signal.SIGCONT)
        assert vault.wait_copied(light, 10) == 1
        assert vault.wait_copied(full, 5) == 1, "the light state lies on one that only this node has"
        vault.close()


def test_what_was_to_be_told_as_the_vault_closes_is_told(tmp_path: Path):
    with hung(tmp_path) as (nodes, vault):
        one(vault, 1, content(torch.ones(1000))).wait_sealed(5)
        resume = threading.Timer(0.5, nodes[0].signal, (signal.SIGCONT,))
        resume.start()
        vault.close()
        resume.join()
        assert nodes[0].control.copied("w0", version=Version(1), generation=1, timeout_s=5.0) == 1


@pytest.mark.parametrize(
    "point",
    [
        "vault.reserve@3",
        "vault.begin@3",
        "vault.copy@5",
        "vault.copy@6",
        "vault.seal.sums@3",
        "vault.seal.header@3",
        "vault.seal.last@3",
    ],
)
def test_a_worker_killed_anywhere_in_a_snapshot_leaves_the_version_before(tmp_path: Path, point: str):
    child = os.fork()
    if not child:
        try:
            os.environ[faults.FAULT] = f"{point}:kill"
            faults.reset()
            vault = Vault(tmp_path / "v", job="j", node="n0")
            for step in range(1, 9):
                one(vault, step, content(torch.full((1000,), float(step)), torch.ones(3))).wait_sealed(10)
        finally:
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL, "the fault never fired"
    found = held(tmp_path / "v")
    assert max(found) == 2
    assert all(torch.equal(tensor, torch.full((1000,), float(step))) for step, tensor in found.items())
    successor = Vault(tmp_path / "v", job="j", node="n0")
    for step in (3, 4):
        one(successor, step, content(torch.full((1000,), float(step)), torch.ones(3))).wait_sealed(10)
    assert {3, 4} <= set(held(tmp_path / "v"))
    assert len(list(files(tmp_path / "v"))) == 3
    successor.close()


def test_a_full_memory_is_an_error_at_the_next_wait_and_not_the_end_of_the_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    vault = Vault(tmp_path / "v", job="j", node="n0")
    one(vault, 1, content(torch.ones(10))).wait_sealed(5)
    faults.reset()
    monkeypatch.setenv(faults.FAULT, "vault.reserve:full")
    one(vault, 2, content(torch.ones(10_000)))
    with pytest.raises(VaultError, match=r"The snapshot of step 2\.0 failed: The vault needs .* Enlarge that tmpfs"):
        vault.settle(5)
    monkeypatch.delenv(faults.FAULT)
    assert list(held(tmp_path / "v")) == [1]
    one(vault, 3, content(torch.ones(10_000))).wait_sealed(5)
    assert 3 in held(tmp_path / "v")
    vault.close()
    faults.reset()


def test_what_came_after_the_agreed_version_is_forgotten(tmp_path: Path):
    vault = Vault(tmp_path / "v", job="j", node="n0")
    for step in (1, 2, 3):
        one(vault, step, content(torch.full((10,), float(step)))).wait_sealed(5)
    vault.void_after(Version(2), 1)
    assert sorted(held(tmp_path / "v")) == [1, 2]
    vault.close()


def test_training_goes_on_while_a_snapshot_is_taken(tmp_path: Path):
    """The copy must not hold the interpreter: another thread of Python makes progress meanwhile."""
    vault = Vault(tmp_path / "v", job="j", node="n0")
    large = content(torch.zeros(25_000_000))
    one(vault, 0, large).wait_sealed(20)
    ticket = one(vault, 1, large)
    spins = 0
    while not ticket.done:
        spins += 1
    assert spins > 1000
    assert threading.active_count() < 20
    vault.close()


def restore_all(world: int, vaults: dict[str, Vault], found: Whole) -> list[Job]:
    """What each rank of a new gang of `world` does on its node."""
    jobs = []
    for rank, vault in zip(range(world), vaults.values(), strict=False):
        job = Job(seed=50 + rank, rank=rank, world=world)
        with vault.gather(found, job.parts.needs) as source:
            job.parts.restore(source)
        jobs.append(job)
    return jobs


@pytest.mark.parametrize(("size", "asks"), [(1000, 1), (3_000_000, 2)])
def test_a_small_shard_of_another_node_is_asked_for_once(size: int, asks: int, tmp_path: Path):
    """A large one twice: first what there is, then the blocks that are needed. Each question costs a recovery milliseconds."""
    with cluster(tmp_path, 2) as nodes:
        ring(nodes, copies=0)
        there, here = (Vault(node.directory, job="job", node=node.name) for node in nodes)
        one(there, 0, content(torch.arange(size, dtype=torch.float32))).wait_sealed(10)
        found = newest_whole(holdings(nodes), here="n1")
        asked = []
        ask = here.control.ask
        here.control.ask = lambda op, **fields: asked.append(op) or ask(op, **fields)
        into = torch.zeros(10)
        wanted = [Piece("t0", "float32", (size,), (size - 10,), (10,))]
        with here.gather(found, lambda _: wanted) as source:
            source.fill([(wanted[0], into)])
        assert asked == ["fetch"] * asks
        assert into.tolist() == [float(n) for n in range(size - 10, size)]
        there.close()
        here.close()


def test_a_vault_that_hangs_holds_up_several_shards_at_once_and_not_one_after_the_other(tmp_path: Path):
    """Found by reading: shards were asked for one after the other, each for as long as a vault takes to answer."""
    with cluster(tmp_path, 3) as nodes:
        ring(nodes, copies=0)
        world = 6
        for shard in range(world):
            vault = Vault(nodes[1].directory, job="job", node="n1", writer=f"w{shard}")
            what = content(torch.full((100,), float(shard)))
            vault.snapshot(what, version=Version(3), generation=1, shard=shard, world=world).wait_sealed(5)
            vault.close()
        here = Vault(nodes[2].directory, job="job", node="n2")
        whole = Whole(version=Version(3), generation=1, world=world, lineage=(), sources=(("n0", "n1"),) * world)
        nodes[0].signal(signal.SIGSTOP)
        began = time.monotonic()
        with here.gather(whole, lambda _: []) as source:
            took = time.monotonic() - began
            assert [shard.tensors[0].tolist() for shard in source.shards] == [[float(n)] * 100 for n in range(world)]
        assert 1.0 <= took < patience(4.0), "a vault gives another one second to answer"
        here.close()


def test_a_gang_of_two_goes_on_from_what_three_kept_although_a_node_is_lost(tmp_path: Path):
    with cluster(tmp_path, 3) as nodes:
        ring(nodes)
        job = Job(seed=1).train(3)
        before = job.state()
        vaults = {node.name: Vault(node.directory, job="job", node=node.name) for node in nodes}
        for rank, vault in enumerate(vaults.values()):
            rollout = Rollout(rank, 3)
            rollout.fill()
            parts = Parts(**{name: job.parts.part(name) for name in job.parts if name != "rollout"}, rollout=rollout)
            ticket = vault.snapshot(parts.capture(rank, 3), version=Version(7), generation=1, shard=rank, world=3)
            assert vault.wait_copied(ticket, 10) == 1
        nodes[1].kill()
        dead = vaults.pop("n1")
        found = newest_whole(holdings([nodes[0], nodes[2]]), here="n0")
        assert found is not None
        assert found.version == Version(7)
        assert found.sources == (("n0",), ("n2",), ("n0", "n2"))
        for other in restore_all(2, vaults, found):
            assert same(other.state(), before)
            assert [row.tolist()[0] for row in other.rollout.tokens] == [100 * lane for lane in other.rollout.lanes]
        for vault in (*vaults.values(), dead):
            vault.close()


def test_what_has_not_changed_is_read_from_the_version_that_has_it_although_a_node_is_lost(tmp_path: Path):
    with cluster(tmp_path, 3) as nodes:
        ring(nodes)
        job = Job(seed=1).train(3)
        vaults = {node.name: Vault(node.directory, job="job", node=node.name) for node in nodes}
        rollouts = [Rollout(rank, 3) for rank in range(3)]
        sizes = []
        for version, base, but in (
            (Version(7), None, ()),
            (Version(7, 1), Version(7), ("rollout",)),
            (Version(7, 2), Version(7), ("rollout",)),
        ):
            for rank, (vault, rollout) in enumerate(zip(vaults.values(), rollouts, strict=True)):
                if base is None:
                    rollout.fill()
                parts = Parts(
                    **{name: job.parts.part(name) for name in job.parts if name != "rollout"}, rollout=rollout
                )
                content = parts.capture(rank, 3, but=but)
                ticket = vault.snapshot(content, version=version, generation=1, shard=rank, world=3, base=base)
                assert vault.wait_copied(ticket, 10) == 1
            assert ticket.path is not None
            with pinned(ticket.path) as kept:
                sizes.append(kept.sealed.shape.data_bytes)
            before = job.state()
            job.train(1)
        assert sizes[0] > sizes[1] == sizes[2]
        nodes[1].kill()
        dead = vaults.pop("n1")
        found = newest_whole(holdings([nodes[0], nodes[2]]), here="n0")
        assert found is not None
        assert [(layer.version, layer.sources) for layer in found.layers] == [
            (version, (("n0",), ("n2",), ("n0", "n2"))) for version in (Version(7, 2), Version(7))
        ]
        for other in restore_all(2, vaults, found):
            assert same(other.state(), before)
            assert [row.tolist()[0] for row in other.rollout.tokens] == [100 * lane for lane in other.rollout.lanes]
        for vault in (*vaults.values(), dead):
            vault.close()


def test_a_damaged_own_copy_is_passed_over_for_the_buddys(tmp_path: Path):
    with cluster(tmp_path, 2) as nodes:
        ring(nodes)
        vault = Vault(nodes[0].directory, job="job", node="n0")
        ticket = one(vault, 3, content(torch.arange(1000.0)))
        assert vault.wait_copied(ticket, 5) == 1
        assert ticket.path is not None
        with ticket.path.open("r+b") as file:
            file.seek(pinned(ticket.path).sealed.shape.data_start + 100)
            file.write(b"\xff")
        found = newest_whole(holdings(nodes), here="n0")
        assert found is not None
        assert found.sources == (("n0", "n1"),)
        with vault.gather(found) as source:
            assert torch.equal(source.shards[0].tensors[0], torch.arange(1000.0))
        vault.close()


def test_a_cleared_directory_costs_what_was_in_it_and_not_the_worker(tmp_path: Path):
    vault = Vault(tmp_path / "v", job="j", node="n0")
    for step in range(3):
        one(vault, step, content(torch.full((1000,), float(step)))).wait_sealed(5)
    shutil.rmtree(tmp_path / "v")
    for step in range(3, 6):
        one(vault, step, content(torch.full((1000,), float(step)))).wait_sealed(5)
    assert sorted(held(tmp_path / "v")) == [3, 4, 5]
    assert (tmp_path / "v").stat().st_mode & 0o077 == 0
    vault.close()


def test_what_was_cleared_away_is_brought_back_from_the_workers_memory_and_copied(tmp_path: Path):
    with cluster(tmp_path, 2) as nodes:
        ring(nodes)
        vault = Vault(nodes[0].directory, job="job", node="n0")
        one(vault, 3, content(torch.full((5000,), 3.0))).wait_sealed(5)
        ticket = one(vault, 4, content(torch.full((5000,), 4.0)))
        ticket.wait_sealed(5)
        nodes[0].kill()
        shutil.rmtree(nodes[0].directory)
        nodes[0].start()
        ring(nodes)
        with pytest.raises(VaultError):
            vault.wait_copied(ticket, 0.3)
        vault.mend()
        assert vault.wait_copied(ticket, 5) == 1
        assert {step: float(tensor[0]) for step, tensor in held(nodes[0].directory).items()} == {3: 3.0, 4: 4.0}
        one(vault, 5, content(torch.full((5000,), 5.0))).wait_sealed(5)
        assert sorted(held(nodes[0].directory)) == [3, 4, 5]
        vault.close()


def test_a_server_that_is_being_started_again_is_waited_for(tmp_path: Path):
    with cluster(tmp_path, 2) as nodes:
        ring(nodes)
        vault = Vault(nodes[0].directory, job="job", node="n0")
        assert vault.wait_copied(one(vault, 3, content(torch.arange(1000.0))), 5) == 1
        vault.close()
        found = newest_whole(holdings(nodes), here="n1")
        assert found is not None
        nodes[0].kill()
        shutil.rmtree(nodes[0].directory)
        other = Vault(nodes[0].directory, job="job", node="n0")
        back = threading.Timer(0.5, lambda: (nodes[0].start(), ring(nodes)))
        back.start()
        elsewhere = replace(found, sources=(("n1",),))
        with other.gather(elsewhere) as source:
            assert torch.equal(source.shards[0].tensors[0], torch.arange(1000.0))
        back.join()
        other.close()


def test_a_shard_that_nobody_has_is_named_with_every_reason(tmp_path: Path):
    with cluster(tmp_path, 1) as (node,):
        ring([node])
        vault = Vault(node.directory, job="job", node="n0", deadline_s=0.3)
        nowhere = Whole(version=Version(3), generation=1, world=1, lineage=(), sources=(("n0", "n9"),), passed_over=())
        with pytest.raises(
            VaultError, match=r"Shard 0 of 1 of step 3\.0 cannot be had: .* does not hold it any more; node n9"
        ):
            vault.gather(nowhere)
        vault.close()


def parts() -> list[os.stat_result]:
    """The fetched parts that this process has open, each once, in the order in which they came."""
    found = {}
    for fd in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):
            if "+part-" in (name := str(fd.readlink())):
                found[name] = fd.stat()
    return [found[name] for name in sorted(found)]


def test_a_fetch_has_as_long_as_it_takes_and_is_given_up_when_another_plan_comes(tmp_path: Path):
    with ExitStack() as over:
        nodes = [Node(tmp_path, number).start(deadline_s=20.0) for number in range(2)]
        for node in nodes:
            over.callback(node.stop)
        ring(nodes, copies=0)
        taker = Vault(nodes[1].directory, job="job", node="n1", deadline_s=0.3)
        taker.control.ask("status")

        def kept(step: int) -> Whole:
            nodes[0].keep(step, size=3 * layout.BLOCK)
            sources = (("n0",),)
            return Whole(version=Version(step), generation=1, world=1, lineage=(), sources=sources, passed_over=())

        whole = kept(3)
        nodes[0].signal(signal.SIGSTOP)  # a long way
        begun = time.monotonic()
        nearer: list[float] = []
        late = threading.Timer(3.5, nodes[0].signal, [signal.SIGCONT])
        late.start()
        # And a second for the answer.
        with taker.gather(whole, timeout_s=1.0, nearer=lambda: nearer.append(time.monotonic())) as source:
            assert source.values
            assert not [at for at in nearer if at < begun + 3.0], "nothing has come yet"
        late.join()

        whole, begun = kept(4), time.monotonic()
        nodes[0].signal(signal.SIGSTOP)

        def check() -> None:
            if time.monotonic() > begun + 0.3:
                raise RuntimeError("another plan")

        with pytest.raises(RuntimeError, match="another plan"):
            taker.gather(whole, timeout_s=20.0, check=check)
        assert time.monotonic() < begun + patience(0.8)
        time.sleep(2.5)  # twice the server has had to say that it is at it, and could tell nobody
        nodes[0].signal(signal.SIGCONT)
        time.sleep(1.0)  # in which all of it could come
        assert {holding.version for holding in taker.holdings()} == {Version(3)}, "it was fetched for nobody"
        taker.close()


def test_a_state_comes_nearer_as_the_server_says_that_more_has_come_and_not_by_the_clock(tmp_path: Path):
    lines = ({STILL: True}, *({STILL: True, CAME: came} for came in (0, 7, 7, 9)), {"ok": True, "file": "it"})
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "control"))
        server.listen()
        control, heard = Control(tmp_path / "control"), []
        control.nearer = lambda: heard.append(None)

        def answer() -> None:
            with server.accept()[0] as caller:
                caller.recv(1 << 16)
                caller.sendall(b"".join(json.dumps(line).encode() + b"\n" for line in lines))

        thread = threading.Thread(target=answer)
        thread.start()
        assert control.ask("fetch", timeout_s=5.0)["file"] == "it"
        thread.join()
        control.close()
    assert len(heard) == 2


def test_a_vault_that_fetches_says_how_much_has_come(tmp_path: Path):
    with ExitStack() as over:
        giver = Node(tmp_path, 0).start(fault="vault.send.block@3:stop", deadline_s=20.0)
        over.callback(giver.stop)
        taken = Node(tmp_path, 1).start(deadline_s=20.0)
        over.callback(taken.stop)
        ring([giver, taken], copies=0)
        giver.keep(3, size=8 * layout.BLOCK)
        whole = Whole(version=Version(3), generation=1, world=1, lineage=(), sources=(("n0",),), passed_over=())
        taker = Vault(taken.directory, job="job", node="n1", deadline_s=0.3)
        begun = time.monotonic()
        nearer: list[float] = []
        late = threading.Timer(4.5, giver.signal, [signal.SIGCONT])
        late.start()
        with taker.gather(whole, timeout_s=3.0, nearer=lambda: nearer.append(time.monotonic())) as source:
            assert source.values
        late.join()
        assert len([at for at in nearer if at < begun + 4.0]) == 1, "some blocks came, and then none for long"
        taker.close()


def test_only_the_blocks_that_are_needed_are_fetched(tmp_path: Path):
    with cluster(tmp_path, 2) as nodes:
        ring(nodes, copies=0)
        giver = Vault(nodes[0].directory, job="job", node="n0")
        big = torch.arange(4_000_000.0)
        one(giver, 3, content(big, torch.ones(3))).wait_sealed(5)
        until(lambda: nodes[0].control.ask("status")["holdings"] == 1, "the server knows of it")
        taker = Vault(nodes[1].directory, job="job", node="n1")
        found = newest_whole(holdings(nodes), here="n1")
        assert found is not None
        wanted = [whole_piece("t1", "float32", (3,))]
        sizes: list[os.stat_result] = []

        def choose(_: Source) -> list[Piece]:
            sizes.extend(parts())
            return wanted

        with taker.gather(found, choose) as source:
            sizes.extend(parts()[-1:])
            target = torch.zeros(3)
            source.fill([(wanted[0], target)])
            assert target.tolist() == [1, 1, 1]
        assert [size.st_size > 16_000_000 for size in sizes] == [True, True]  # as long as the shard ...
        outline, block = (size.st_blocks * 512 for size in sizes)
        assert outline <= 16 * layout.PAGE  # ... with memory for what was asked for alone: header and sums,
        assert block <= layout.BLOCK + 16 * layout.PAGE  # and the one block of four that was sent
        del source
        gc.collect()  # what shows the memory keeps it
        assert parts() == []
        assert list(files(nodes[1].directory)) == []  # and nothing of it stays
        giver.close()
        taker.close()


def test_a_restore_that_fails_lets_go_of_what_it_had(tmp_path: Path):
    """A second fault while shards are gathered: the gang forms again in the same process, again and again."""
    with cluster(tmp_path, 3) as nodes:
        ring(nodes, copies=0)
        for number in (0, 1):
            nodes[number].keep(3, shard=number, world=3, size=2 * layout.BLOCK)
        taker = Vault(nodes[2].directory, job="job", node="n2", deadline_s=1.0)
        taker.control.ask("status")
        sources = (("n0",), ("n1",), ("n1",))
        whole = Whole(version=Version(3), generation=1, world=3, lineage=(), sources=sources)

        def wanted_elsewhere() -> None:
            raise RuntimeError("another plan")

        gc.collect()
        before = len(list(Path("/proc/self/fd").iterdir()))
        for check, failure in ((lambda: None, "Shard 2 of 3"), (wanted_elsewhere, "another plan")):
            with pytest.raises((VaultError, RuntimeError), match=failure):
                taker.gather(whole, lambda _: [], check=check)
            gc.collect()  # the memory goes when nobody shows it any more, the pins at once
            assert len(list(Path("/proc/self/fd").iterdir())) <= before  # what others left open may be closed meanwhile
        taker.close()
