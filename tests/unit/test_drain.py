"""Which nodes may be asked to leave: those that the others can do without, as the leader would count them."""

import asyncio
from functools import partial

import pytest

from elasticrl.contract.cause import Cause, Why
from elasticrl.contract.model import Member, Phase, Plan, Quarantine, Record, Seat, Verb, View, Work
from elasticrl.contract.settings import Membership, Settings
from elasticrl.core.lead.drain import refusal
from elasticrl.daemon.control import Refused
from elasticrl.daemon.operators import ask, in_turn, spared
from elasticrl.shell import keys
from elasticrl.store.memory import MemoryServer, MemoryStore


def member(node: str) -> Member:
    return Member(node=node, incarnation=1)


def seen(seated: str, *more: Record, phase: Phase = Phase.TRAIN, gone: str = "") -> View:
    """Nodes a, b, c ... have seats and train; `gone` has no lease any more; others have records of their own."""
    seats = tuple(Seat(member=member(node), born=1) for node in seated)
    plan = Plan(generation=3, phase=phase, seats=seats, lanes=8)
    records = {
        node: Record(member=member(node), work=Work.TRAINING, generation=3, born=1)
        for node in seated
        if node not in gone
    }
    return View(plan=plan, records=records | {record.member.node: record for record in more}, quarantines={})


def spare(node: str, **fields: object) -> Record:
    return Record(member=member(node), warm=True, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("view", "least", "asked", "stays"),
    [
        (seen("abc"), 2, "", False),
        (seen("ab"), 2, "", True),
        (seen("a"), 1, "", True),
        (seen("abc"), 2, "b", True),  # another was asked just before, and has not said so yet
        (seen("abc"), 3, "b", False),  # they are too few already
        (seen("ab", spare("c")), 2, "", False),  # which takes its place
        (seen("ab", spare("c")), 2, "c", True),  # but was asked to leave, too
        (seen("ab", spare("c", leaving=True)), 2, "", True),
        (seen("ab", Record(member=member("c"))), 2, "", True),  # not warm yet: the job would hold for it
        (seen("abc", gone="c"), 2, "", True),
        (seen("ab", phase=Phase.HOLD), 2, "", True),  # paused: it could not go on
        (seen("a", phase=Phase.HOLD), 2, "", False),  # it holds as it is
        (seen("ab", phase=Phase.STOP), 2, "", False),
        (View(records={"a": spare("a")}), 1, "", True),  # no plan yet: it would leave for ever
        (seen("bc", spare("a"), phase=Phase.STOP), 1, "", True),  # that is the plan of the life before
        (View(plan=seen("ab").plan), 2, "", False),  # nobody can say
    ],
)  # fmt: skip
def test_who_cannot_be_spared_stays(view: View, least: int, asked: str, stays: bool) -> None:
    settings = Settings(lanes=8, membership=Membership(min_nodes=least))
    said = refusal(view, settings, "a", [member(node) for node in asked])
    assert bool(said) is stays
    assert not refusal(view, settings, "z")  # who has no seat can always go


def test_a_spare_in_quarantine_takes_nobodys_place_and_an_earlier_lifes_request_counts_for_nothing() -> None:
    settings = Settings(lanes=8, membership=Membership(min_nodes=2))
    view = seen("ab", spare("c"))
    kept_out = {"c": Quarantine(member=member("c"), cause=Cause(why=Why.POLICY, said="silent"))}
    assert refusal(View(plan=view.plan, records=view.records, quarantines=kept_out), settings, "a")
    assert not refusal(view, settings, "a", [Member(node="c", incarnation=0)])


def test_the_sentence_says_what_is_needed_and_how_to_do_it_anyway() -> None:
    settings = Settings(lanes=8, membership=Membership(min_nodes=2))
    assert refusal(seen("ab"), settings, "b") == (
        "b stays: without it 1 of the 2 nodes are left that the job needs (membership.min_nodes), and it would hold until "
        "another comes. Start one first, or let it leave all the same: elasticrl drain b --force"
    )


def test_before_the_first_plan_the_sentence_says_what_ends_the_job() -> None:
    said = refusal(View(records={"a": spare("a")}), Settings(lanes=8), "a")
    assert said == (
        "a stays: there is no plan yet that it could leave, and the first may need it. Ask again when the job trains, "
        "or end it: elasticrl stop"
    )


def test_of_two_who_look_at_the_same_moment_one_looks_again_and_is_refused() -> None:
    view, settings = seen("abc"), Settings(lanes=8, membership=Membership(min_nodes=2))

    async def play() -> tuple[list[str | Refused | None], list[str]]:
        store, both = MemoryStore(MemoryServer()), asyncio.Barrier(2)
        for record in (view.records or {}).values():
            await store.put(keys.member_key(record.member.node), keys.dump(record))

        async def drain(node: str) -> str | None:
            looks = 0

            async def look() -> int | None:
                nonlocal looks
                looks += 1
                found = await spared(store, view, settings, node, own="z")
                if looks == 1:
                    await both.wait()
                return found

            write = partial(ask, store, Verb.DRAIN, node, view, job="j", by="somebody", needs=2)
            return await in_turn(look, lambda after: write(after=after))

        async def said(node: str) -> str | Refused | None:
            try:
                return await drain(node)
            except Refused as error:
                return error

        told = await asyncio.gather(said("a"), said("b"))
        return [*told], [entry.key for entry in (await store.scan(keys.DRAINS)).entries]

    told, drains = asyncio.run(play())
    (no,) = (each for each in told if isinstance(each, Refused))
    assert "1 of the 2 nodes are left that the job needs" in str(no)
    assert len(drains) == 1
    assert keys.drain_key(str(no).split()[0]) not in drains
