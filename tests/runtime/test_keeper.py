"""What survives a worker, one station at a time: a real vault directory, a real writer."""

import shutil
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
from vault_nodes import cluster, holdings, ring, until

from chaos.patience import patience
from elasticrl.config.tree import Tree
from elasticrl.contract.orders import Place
from elasticrl.runtime.checkpoint.parts import Parts
from elasticrl.runtime.context import Context
from elasticrl.runtime.keeper import Keeper, facts_of
from elasticrl.runtime.vault import layout
from elasticrl.runtime.vault.version import Cut, Version


def begun(context: Context, say: Callable[[str], None], *nodes: str, writer: str = "w0", start: int = 0) -> Keeper:
    """A worker's, in a gang of its own on the first of these nodes."""
    keeper = Keeper(context, writer=writer, say=say)
    place = Place(generation=1, born=1, rank=0, world=1, all_lanes=1, nodes=nodes)
    history = (Cut(1, Version(start)),)
    keeper.begin(place, lineage=history, segments=(), lanes=(0,), facts=facts_of(context, batch=1, data=""))
    return keeper


def test_what_was_cleared_away_before_it_was_copied_is_brought_back_and_copied(tmp_path: Path):
    plain = {"job": {"name": "job"}, "checkpoint": {"dir": str(tmp_path / "saves")}, "vault": {"copies": 1}}
    plain["timeouts"] = {"floor": "10s"}  # its vault has that long to come back
    told: list[str] = []
    with cluster(tmp_path, 2) as nodes:
        ring(nodes)
        here = nodes[0]
        context = Context(tree=Tree.model_validate(plain), node="n0", vault=here.directory, alone=False)
        keeper = begun(context, told.append, "n0", "n1")
        here.kill()  # nobody copies it for now
        keeper.keep(Parts(model=torch.nn.Linear(3, 2)), Version(1), steps=1, whole=True)
        keeper.kept.ticket.wait_sealed(5)
        shutil.rmtree(here.directory)
        back = threading.Timer(0.3, lambda: (here.start(), ring([here, nodes[1]])))
        back.start()
        keeper.await_copies(lambda: None)
        back.join()
        assert not keeper.late
        assert {"n0", "n1"} <= {held.at for held in holdings(nodes)}
        keeper.close(over=False)


def test_copies_that_come_no_nearer_are_given_up_before_somebody_calls_it_a_hang_and_slow_ones_are_not(tmp_path: Path):
    plain = {"job": {"name": "job"}, "checkpoint": {"dir": str(tmp_path / "saves")}, "vault": {"copies": 1}}
    plain["timeouts"] = {"floor": "1500ms"}
    told: list[str] = []
    with cluster(tmp_path, 2) as nodes:
        ring(nodes)
        here, there = nodes
        context = Context(tree=Tree.model_validate(plain), node="n0", vault=here.directory, alone=False)
        keeper = begun(context, told.append, "n0", "n1")
        parts = Parts(model=torch.nn.Linear(1 << 15, 1 << 10))  # 128 MiB: more than sockets hold
        over = threading.Event()

        def crawl() -> None:
            while not over.is_set():
                there.signal(signal.SIGSTOP)
                over.wait(0.1)
                there.signal(signal.SIGCONT)
                time.sleep(
                    0.006
                )  # what a stopped server gets done in it is little: the pace is the test's subject, not a wait

        slow = threading.Thread(target=crawl)
        slow.start()
        try:
            keeper.keep(parts, Version(1), steps=1, whole=True)
            start = time.monotonic()
            keeper.await_copies(lambda: None)
            assert not keeper.late
            assert time.monotonic() - start > 0.75 * 1.5, "it was not slow enough to tell"
        finally:
            over.set()
            slow.join()
        keeper.sealed("d")
        there.signal(signal.SIGSTOP)
        keeper.keep(parts, Version(2), steps=2, whole=True)
        keeper.kept.ticket.wait_sealed(5)
        start = time.monotonic()
        keeper.await_copies(lambda: None)
        assert keeper.late
        assert time.monotonic() - start < patience(3.0), "that is a seventh of vault.timeout"
        assert "step 2.0 has too few copies" in told[-1]
        there.signal(signal.SIGCONT)
        until(lambda: keeper.vault.wait_copied(keeper.kept.ticket, 5) == 1, "the copy is there")
        keeper.await_copies(lambda: None)
        assert not keeper.late
        keeper.close(over=False)


def test_while_copies_are_late_what_was_sealed_last_stays_here_and_at_the_buddies(tmp_path: Path):
    """Found live: a vault that was gone for seconds cost the steps since the newest checkpoint."""
    plain = {"job": {"name": "job"}, "checkpoint": {"dir": str(tmp_path / "saves")}, "vault": {"copies": 1}}
    plain["timeouts"] = {"floor": "500ms"}
    with cluster(tmp_path, 2) as nodes:
        ring(nodes)
        context = Context(tree=Tree.model_validate(plain), node="n0", vault=nodes[0].directory, alone=False)
        keeper = begun(context, lambda _: None, "n0", "n1")
        parts = Parts(model=torch.nn.Linear(3, 2))

        def made(step: int, *, late: bool) -> set[Version]:
            keeper.keep(parts, Version(step), steps=step, whole=True)
            keeper.await_copies(lambda: None)
            keeper.sealed("d", late=keeper.late or late)
            return {held.version for held in holdings(nodes) if held.node == "n0"}

        for step in (1, 2, 3):
            made(step, late=False)
        for step in (4, 5, 6, 7):
            assert Version(3) in made(step, late=True), "another rank's copies are late: this one's are there"
        assert all(Version(3) in {held.version for held in holdings([node])} for node in nodes)
        for step in (8, 9, 10):
            made(step, late=False)
        assert Version(3) not in {held.version for held in holdings(nodes)}
        nodes[1].kill()
        assert [Version(10) in made(step, late=False) for step in (11, 12, 13, 14)] == [True] * 4
        keeper.close(over=False)


def test_copies_of_what_was_gone_on_from_hold_up_nobody_and_it_stays_where_it_was_until_the_next_is_sealed(
    tmp_path: Path,
):
    plain = {"job": {"name": "job"}, "checkpoint": {"dir": str(tmp_path / "saves")}, "vault": {"copies": 1}}
    plain["timeouts"] = {"floor": "10s"}
    with cluster(tmp_path, 2) as nodes:
        ring(nodes)
        here, there = nodes
        context = Context(tree=Tree.model_validate(plain), node="n0", vault=here.directory, alone=False)
        keeper = begun(context, print, "n0", "n1")
        before = keeper.vault.sealed = ((Version(7), 0),)
        parts = Parts(model=torch.nn.Linear(3, 2))
        there.signal(signal.SIGSTOP)
        keeper.keep(parts, Version(7), steps=7, whole=True)
        keeper.kept.again = True
        start = time.monotonic()
        keeper.await_copies(lambda: None)
        assert time.monotonic() < start + patience(2.0)
        assert keeper.late, "nobody may take it for sealed"
        keeper.sealed("d", late=True)
        assert (keeper.late, keeper.vault.sealed) == (False, before)
        there.signal(signal.SIGCONT)
        keeper.keep(parts, Version(8), steps=8, whole=True)
        keeper.await_copies(lambda: None)  # as ever
        assert not keeper.late
        keeper.sealed("e")
        assert keeper.vault.sealed == ((Version(8), 1),)
        keeper.close(over=False)


def test_where_copies_are_late_ones_own_seal_is_waited_for_all_the_same(tmp_path: Path, monkeypatch):
    plain = {"job": {"name": "job"}, "checkpoint": {"dir": str(tmp_path / "saves")}, "vault": {"copies": 1}}
    sums_of = layout.sums_of

    def slowly(*args):  # as for a large shard
        time.sleep(0.5)
        return sums_of(*args)

    monkeypatch.setattr(layout, "sums_of", slowly)
    told: list[str] = []
    with cluster(tmp_path, 2) as nodes:
        ring(nodes)
        context = Context(tree=Tree.model_validate(plain), node="n0", vault=nodes[0].directory, alone=False)
        keeper = begun(context, told.append, "n0", "n1")
        nodes[1].kill()
        keeper.late = True  # of the last
        keeper.keep(Parts(model=torch.nn.Linear(3, 2)), Version(1), steps=1, whole=True)
        start = time.monotonic()
        keeper.await_copies(lambda: None)
        assert keeper.kept.ticket.done
        assert time.monotonic() - start < patience(2.0), "and the copies for a moment only"
        assert keeper.late
        keeper.close(over=False)


def test_who_does_not_speak_for_its_node_says_what_it_has_written_itself(tmp_path: Path):
    plain = {"job": {"name": "job"}, "checkpoint": {"dir": str(tmp_path / "saves")}}
    told: list[str] = []
    with cluster(tmp_path, 1) as nodes:
        context = Context(tree=Tree.model_validate(plain), node="n0", vault=nodes[0].directory, alone=False)
        keepers = [begun(context, told.append, "n0", writer=writer) for writer in ("w0", "w1")]
        for keeper in keepers:
            keeper.keep(Parts(model=torch.nn.Linear(3, 2)), Version(1), steps=1, whole=True)
        keepers[0].kept.ticket.wait_sealed(5)
        assert {held.writer for held in keepers[1].holdings(speaks=False)} == {"w1"}
        assert {held.writer for held in keepers[0].holdings()} == {"w0", "w1"}
        for keeper in keepers:
            keeper.close(over=False)


def test_a_server_that_hangs_as_a_generation_seals_its_first_state_holds_up_nobody(tmp_path: Path):
    plain = {"job": {"name": "job"}, "checkpoint": {"dir": str(tmp_path / "saves")}, "vault": {"copies": 0}}
    with cluster(tmp_path, 1) as (node,):
        node.keep(1)  # by a worker that is gone
        context = Context(tree=Tree.model_validate(plain), node="n0", vault=node.directory, alone=False)
        keeper = begun(context, lambda _: None, "n0", writer="w1", start=2)
        keeper.keep(Parts(model=torch.nn.Linear(3, 2)), Version(3), steps=3, whole=True)
        keeper.await_copies(lambda: None)
        assert {held.version for held in holdings([node])} == {Version(1), Version(3)}
        keeper.sealed("d", late=True)
        assert not keeper._released, "copies of it still come: what they lie on is needed"
        keeper.kept.sealed = False
        node.signal(signal.SIGSTOP)
        start = time.monotonic()
        keeper.sealed("d")
        assert time.monotonic() - start < patience(2.0), "that is a tenth of vault.timeout"
        node.signal(signal.SIGCONT)
        until(lambda: {held.version for held in holdings([node])} == {Version(3)}, "what is of no use has gone")
        keeper.close(over=False)


def test_a_server_that_does_not_hear_of_snapshots_is_said_once_and_again_after_it_heard(tmp_path: Path):
    plain = {"job": {"name": "job"}, "checkpoint": {"dir": str(tmp_path / "saves")}, "vault": {"copies": 0}}
    told: list[str] = []
    with cluster(tmp_path, 1) as (node,):
        context = Context(tree=Tree.model_validate(plain), node="n0", vault=node.directory, alone=False)
        keeper = begun(context, told.append, "n0")
        parts, steps = Parts(model=torch.nn.Linear(3, 2)), iter(range(1, 9))

        def keep(heard: bool) -> None:
            for _ in range(2):
                step = next(steps)
                keeper.keep(parts, Version(step), steps=step, whole=True)
                keeper.await_copies(lambda: None)
                until(lambda: bool(keeper.vault.notice) != heard, "the server heard, or did not")

        node.kill()
        keep(heard=False)
        node.start()
        keep(heard=True)
        assert len(told) == 1
        time.sleep(0.5)  # until no announcement is under way: one that the kill cuts is told in words of its own
        node.kill()
        keep(heard=False)
        assert len(told) == 2
        assert all("did not answer 'sealed'" in sentence for sentence in told)
        keeper.close(over=False)


def test_the_writer_is_there_before_a_save_is_due_and_not_long_before(tmp_path: Path):
    plain = {"job": {"name": "job"}, "checkpoint": {"dir": str(tmp_path / "saves"), "every": 10}}
    for name, every, there in (("soon", 10, True), ("late", 10_000_000, False)):
        tree = Tree.model_validate({**plain, "checkpoint": {**plain["checkpoint"], "every": every}})
        context = Context(tree=tree, node="n0", vault=tmp_path / name, alone=True)
        keeper = begun(context, lambda _: None, "n0")
        for step in (1, 2):
            assert keeper._saver is None, "how long a step takes is not known yet"
            keeper.keep(Parts(model=torch.nn.Linear(3, 2)), Version(step), steps=step, whole=True)
            keeper.await_copies(lambda: None)
            keeper.sealed("d")
        assert (keeper._saver is not None) == there
        keeper.close(over=True)


def test_a_last_save_that_was_begun_already_is_waited_for_and_not_begun_again(tmp_path: Path):
    plain = {"job": {"name": "job"}, "checkpoint": {"dir": str(tmp_path / "saves"), "every": 10}}
    context = Context(tree=Tree.model_validate(plain), node="n0", vault=tmp_path / "vault", alone=True)
    told: list[str] = []
    keeper = begun(context, told.append, "n0")
    keeper.keep(Parts(model=torch.nn.Linear(3, 2)), Version(10), steps=10, whole=True)
    keeper.await_copies(lambda: None)
    kept = keeper.sealed(None)  # step 10 is due: its save begins
    assert kept is not None
    keeper.save_last(kept, lambda: None)
    limit = time.monotonic() + patience(1.0)  # the writer is warm: a second save would be through in a tenth of that
    while time.monotonic() < limit:
        assert keeper.poll() == (), "it was saved a second time"
        time.sleep(0.02)
    assert [entry.name for entry in keeper.shelf()] == ["step-00000010-g1"]
    assert told == []
    keeper.close(over=True)


def test_a_shard_that_will_not_come_is_told_with_a_vote_and_its_save_given_up(tmp_path: Path, monkeypatch):
    """Found live: where its disk could not take even that word, nothing was saved until `checkpoint.timeout`."""
    plain = {"job": {"name": "job"}, "checkpoint": {"dir": str(tmp_path / "saves"), "every": 1}, "vault": {"copies": 0}}
    tree, parts = Tree.model_validate(plain), Parts(model=torch.nn.Linear(3, 2))
    told: list[str] = []
    keepers = []
    for rank in range(2):
        context = Context(tree=tree, node=f"n{rank}", vault=tmp_path / f"n{rank}", alone=False)
        keeper = Keeper(context, writer="w0", say=told.append)
        place = Place(generation=1, born=1, rank=rank, world=2, all_lanes=2, nodes=("n0", "n1"))
        history = (Cut(1, Version(0)),)
        keeper.begin(place, lineage=history, segments=(), lanes=(rank,), facts=facts_of(context, batch=1, data=""))
        keeper.keep(parts, Version(1), steps=1, whole=True)
        keeper.kept.ticket.wait_sealed(5)
        keepers.append(keeper)
    first, second = keepers
    first.sealed(None)
    # Its writer leaves no word, as on a read-only disk.
    monkeypatch.setenv("ELASTICRL_FAULT", "ledger.fsync@1:kill")
    second.sealed(None)
    failed: list[object] = []
    until(lambda: failed.extend(second.poll()) or failed, "the writer of rank 1 has died", 60)
    assert not list((tmp_path / "saves").rglob("*.refused"))
    said = [(7.0, *keeper.say()) for keeper in keepers]
    assert said == [(7.0, 0.0), (7.0, 1.0)]
    assert [keeper.hear(said) for keeper in keepers] == [[(7.0,), (7.0,)]] * 2
    found: list[object] = []
    until(lambda: found.extend(first.poll()) or found, "rank 0 gives the save up", 60)
    assert any("(missing: 1; the writing of 1 failed)" in line for line in told), told
    assert first.saved is None
    for keeper in keepers:
        keeper.close(over=False)
