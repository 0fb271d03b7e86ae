"""Ways that are cut: what is known of them, the tests of the node that stays out, and what its record says."""

import asyncio
import socket
from dataclasses import replace
from itertools import pairwise

import pytest
from core_kit import Life, member, plan, seat

from elasticrl.contract.cause import Cause, Why
from elasticrl.contract.events import Seen, Tick, Tried, Try
from elasticrl.contract.evidence import Evidence, Kind, Sign
from elasticrl.contract.model import Member, Quarantine, Record, View
from elasticrl.core.lead.probing import cut_ways
from elasticrl.daemon.links import closed
from elasticrl.shell import keys
from elasticrl.shell.sight import Sight
from elasticrl.store.memory import MemoryServer, MemoryStore
from elasticrl.store.protocol import Put

CUT = Quarantine(member=member("n02"), cause=Cause(why=Why.UNREACHED), cuts=(("n02", "n01"), ("n01", "n02")), found=2)


class Out(Life):
    """A node without a seat, and what it finds when it tests its ways."""

    def __init__(self) -> None:
        super().__init__("n02/1")
        self.asked: list[float] = []  # when it did
        self.reached: tuple[str, ...] = ()

    def at(self, now, event, label=None):
        decision = super().at(now, event, label)
        for action in decision.actions:
            if isinstance(action, Try):
                assert action.targets == {"n01": "n01:7461"}
                self.asked.append(now)
                out = tuple(action.targets.keys() - set(self.reached))
                super().at(now + 0.01, Tried(now=0, found=action.found, reached=self.reached, unreachable=out))
        return decision


def kept_out(barred: Quarantine) -> Out:
    life = Out()
    life.leased(0.1)
    life.seen(0.2, "the others train", leader=member("n00"), plan=plan(3, "n00", "n01"), plan_revision=4, barred=barred)
    return life


def tries_of(life: Out, until: float, *reached: str) -> list[float]:
    """When this node tests its ways from now on, if that always ends so."""
    life.asked, life.reached, now = [], reached, life.now
    while now < until:
        now += 0.25
        life.leased(now)
        life.at(now + 0.1, Tick(now=0))
    return life.asked


def test_a_node_tests_its_cut_ways_at_pauses_that_grow() -> None:
    life = kept_out(CUT)
    asked = tries_of(life, 400.0)
    pauses = [b - a for a, b in pairwise([0.2, *asked])]
    assert pauses[1] < 2.0
    assert all(after > before - 0.3 for before, after in pairwise(pauses)), "to a quarter of a second"
    assert 40.0 < pauses[-1] <= 60.5
    assert len(asked) < 60
    assert (life.view.own.tested, life.view.own.reached) == (2, ())
    assert "no seat until a test of the connection to n01 passes" in life.state.reason


def test_that_a_way_carries_again_stands_in_the_record() -> None:
    life = kept_out(CUT)
    tries_of(life, 2.0, "n01")
    assert CUT.beyond(life.view.own) == frozenset()
    assert "no seat until" not in life.state.reason
    anew = replace(CUT, found=9)
    assert anew.beyond(life.view.own) == {"n01"}, "that was before the way was found cut again"


def test_who_has_a_seat_or_no_cut_way_to_it_tests_nothing() -> None:
    assert not tries_of(kept_out(replace(CUT, cuts=())), 3.0)
    life = kept_out(CUT)
    life.seen(0.3, "let in", plan=plan(4, "n00", "n01", "n02"), plan_revision=5)
    assert not tries_of(life, 3.0)


def test_who_has_a_seat_tests_the_ways_to_those_alone_who_have_none() -> None:
    cuts = (*CUT.cuts, ("n02", "n03"), ("n03", "n02"))
    asked = []

    class Seated(Life):
        def at(self, now, event, label=None):
            decision = super().at(now, event, label)
            asked.extend(dict(action.targets) for action in decision.actions if isinstance(action, Try))
            return decision

    life = Seated("n02/1")
    life.leased(0.1)
    train = plan(3, "n00", "n01", "n02", spares=(seat("n03"),))
    life.seen(0.2, "let in", leader=member("n00"), plan=train, plan_revision=4, barred=replace(CUT, cuts=cuts))
    life.at(0.3, Tick(now=0))
    assert {name for targets in asked for name in targets} == {"n03"}


def test_a_cut_way_binds_whichever_life_of_its_node() -> None:
    assert CUT.beyond(Record(member=member("n02/2"))) == {"n01"}
    assert not CUT.binds(member("n02/2"))


@pytest.mark.parametrize(
    ("ways", "pairs"),
    [
        ((), (("n02", "n00"), ("n00", "n02"), ("n02", "n01"), ("n01", "n02"))),
        ((("n02", "n01"),), (("n02", "n00"), ("n00", "n02"), ("n02", "n01"))),
        ((("n00", "n02"),), (("n00", "n02"), ("n02", "n01"), ("n01", "n02"))),
    ],
)
def test_what_a_probe_found_of_a_nodes_ways_is_told_by_direction(ways, pairs) -> None:
    facts = [Evidence(kind=Kind.PROBE, sign=Sign.ONE_WAY, node=a, peer=b) for a, b in ways]
    assert cut_ways("n02", {"n02": {"n01"}, "n00": {"n02"}, "n01": ()}, facts) == pairs


def test_a_node_that_watches_only_its_own_sees_what_keeps_it_out() -> None:
    async def seen() -> View:
        store, looked, views = MemoryStore(MemoryServer()), asyncio.Event(), list[View]()
        await store.txn((), [Put(key=keys.quarantine_key("n02"), value=keys.dump(CUT))])

        def changed(view: View) -> None:
            views.append(view)
            looked.set()

        sight = Sight(store, Member(node="n02", incarnation=1), changed=changed, complain=lambda _: None)
        task = asyncio.create_task(sight.watch(everyone=False))
        await asyncio.wait_for(looked.wait(), 5)
        task.cancel()
        return views[-1]

    view = asyncio.run(seen())
    assert (view.barred, view.quarantines) == (CUT, None)


def test_a_way_carries_where_a_connection_stands() -> None:
    async def tried() -> tuple[str, ...]:
        with socket.create_server(("127.0.0.1", 0)) as opened, socket.socket() as other:
            other.bind(("127.0.0.1", 0))  # taken, and nobody listens
            doors = {name: "{}:{}".format(*door.getsockname()) for name, door in (("n00", opened), ("n01", other))}
            return await closed(doors, within_s=2.0)

    assert asyncio.run(tried()) == ("n01",)


def test_what_is_seen_of_a_quarantine_does_not_outlive_it() -> None:
    life = kept_out(CUT)
    tries_of(life, 2.0)
    life.view = replace(life.view, revision=life.view.revision + 1, barred=None)
    life.at(3.0, Seen(now=0, view=life.view))
    assert not tries_of(life, 6.0)
