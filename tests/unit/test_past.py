"""What befell a job so far: counted once, told by whoever leads, shown by status, page and demonstration."""

import asyncio
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import reduce

import pytest

from elasticrl.base.words import past as words
from elasticrl.cli import render
from elasticrl.contract.cause import Cause, Why
from elasticrl.contract.evidence import of_exit
from elasticrl.contract.model import Commit, Exit, Intent, Member, Phase, Plan, Quarantine, Record, Seat, View, Work
from elasticrl.contract.verdict import Confidence, Fault, Known, Verdict
from elasticrl.core.judge.judge import judge
from elasticrl.daemon.web import piece
from elasticrl.shell import keys
from elasticrl.status import past
from elasticrl.status.past import Broken, Missing, Moves, Past, Roster, Scribe, forget, lasting
from elasticrl.status.picture import picture
from elasticrl.status.recovery import Done, Stages
from elasticrl.store.memory import MemoryStore
from elasticrl.store.protocol import Compare, Entry, Op, StoreError, TxnResult

DIED = Verdict(
    fault=Fault.DEAD_RANK, ranks=(1,), nodes=("n1",), cause="rank 1 died: <signal 9>", remedy="Read its log."
)
KILLED = Broken(at=940.0, verdict=DIED, said=DIED.said, generation=3, broke=2, seconds=0.214)


def test_a_fault_that_is_told_anew_counts_once_and_a_later_one_again() -> None:
    once = Past(began=100.0).after(KILLED)
    better = replace(KILLED, said="n1: its memory was full")
    assert (once.faults, once.after(better)) == (1, Past(began=100.0, faults=1, last=better))
    twice = once.after(replace(KILLED, generation=5, broke=4))
    assert twice.faults == 2
    assert twice.after(better) == twice, "the older one told anew is not the last"


def test_a_fault_is_told_at_what_it_cost_whom_it_cost_most() -> None:
    # Found by a new user: `status` said 0.15 s, `incidents` 0.3: the leader had heard of the death by the plan.
    dear = replace(KILLED, at=939.9, seconds=0.35, steps=1, said="n1: as a deputy has it")
    once = Past(began=100.0).after(replace(KILLED, steps=0))
    assert once.cost(dear).last == replace(KILLED, at=939.9, seconds=0.35, steps=1), "in the words of who led"
    assert once.cost(dear).after(KILLED) == once.cost(dear), "though he tells it anew"
    assert once.cost(replace(KILLED, seconds=None, steps=None)) == once, "who does not know its end"
    assert once.cost(replace(dear, generation=4)) == once, "of another fault"


def test_those_who_tell_what_a_fault_cost_at_once_do_not_overwrite_each_other() -> None:
    class Far(MemoryStore):
        async def get(self, key: str) -> Entry | None:
            entry = await super().get(key)
            await asyncio.sleep(0.01)  # others read the same before anybody writes
            return entry

    async def main() -> Past | None:
        store = Far()
        await Scribe().write(store, 100.0, KILLED)
        costs = (replace(KILLED, seconds=seconds) for seconds in (0.3, 0.9, 0.4))
        await asyncio.gather(*(Scribe().write(store, 200.0, each, anew=False) for each in costs))
        return await past.read(store)

    assert asyncio.run(main()) == Past(began=100.0, faults=1, last=replace(KILLED, seconds=0.9))


def test_status_and_page_say_what_happened_after_everybody_is_back() -> None:
    n0 = Member(node="n0", incarnation=1)
    plan = Plan(
        generation=4,
        phase=Phase.TRAIN,
        seats=(Seat(member=n0, born=1),),
        causes=(Cause(why=Why.POLICY, said="1 node joined"),),
    )
    seen = picture(
        "ppo", View(plan=plan, leader=n0), {"n0": Record(member=n0)}, {}, needs=1, now=1000.0,
        past=Past(began=100.0, faults=2, last=KILLED),
    )  # fmt: skip
    assert (seen.uptime_s, seen.faults, seen.mtbf_s, seen.last_s) == (900.0, 2, 450.0, 60.0)
    said = (
        "2 faults in 15 m (one every 7 m 30 s). Last fault 60 s ago: n1: rank 1 died: <signal 9>. Recovered in 0.21 s."
    )
    assert render.status(asdict(seen), colour=False).splitlines()[2] == said
    steady = "2 faults so far. Last fault: n1: rank 1 died: <signal 9>. Recovered in 0.21 s."
    assert steady in render.status(asdict(seen), colour=False, ages=False)
    assert steady.replace("<", "&lt;").replace(">", "&gt;") in piece(seen), "nothing that changes at each look"


def test_a_job_without_a_fault_says_so_and_one_that_nobody_wrote_of_says_nothing() -> None:
    assert (
        words(asdict(picture("ppo", View(), {}, {}, needs=1, now=1000.0, past=Past(began=950.0)))) == "no fault in 50 s"
    )
    assert words(asdict(picture("ppo", View(), {}, {}, needs=1, now=1000.0))) == ""
    not_over = Past(began=1.0, faults=1, last=replace(KILLED, seconds=None, lasts=True))
    assert words(asdict(picture("ppo", View(), {}, {}, needs=1, now=1000.0, past=not_over))).endswith(
        "Not recovered yet."
    )


def test_leaders_write_one_after_the_other_and_the_next_goes_on_with_what_was_there() -> None:
    async def main() -> Past | None:
        store, first, second = MemoryStore(), Scribe(), Scribe()
        await first.write(store, 100.0)
        await asyncio.gather(
            *(first.write(store, 200.0, replace(KILLED, generation=g, broke=g - 1)) for g in (3, 4, 5))
        )
        await second.write(store, 300.0)
        await second.write(store, 400.0, replace(KILLED, generation=7))
        return await past.read(store)

    assert asyncio.run(main()) == Past(began=100.0, faults=4, last=replace(KILLED, generation=7))


def test_a_store_that_is_away_is_tried_again_and_what_cannot_be_read_is_begun_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(past, "PAUSES_S", (0.0, 0.01, 0.01))

    class Away(MemoryStore):
        tries = 0

        async def txn(self, compares: Sequence[Compare], then: Sequence[Op]) -> TxnResult:
            self.tries += 1
            if self.tries == 1:
                raise StoreError("no leader")
            return await super().txn(compares, then)

    async def main() -> tuple[Past | None, int]:
        store = Away()
        await MemoryStore.put(store, keys.PAST, b"no JSON")
        await Scribe().write(store, 100.0, KILLED)
        return await past.read(store), store.tries

    assert asyncio.run(main()) == (Past(began=100.0, faults=1, last=KILLED), 2)


def test_who_begins_to_lead_tells_what_the_last_leader_had_not_told_and_leaves_what_he_had() -> None:
    async def told(*words: Broken) -> list[Broken | None]:
        store, found = MemoryStore(), []
        for word in words:
            await Scribe().write(store, 100.0, word, anew=False)
            written = await past.read(store)
            assert written is not None
            found.append(written.last)
        return found

    better, later = replace(KILLED, said="n1: its memory was full"), replace(KILLED, generation=5)
    assert asyncio.run(told(KILLED, better, later, better)) == [KILLED, KILLED, later, later]


def test_what_it_cost_is_said_with_it() -> None:
    def said(steps: int | None) -> str:
        past = Past(began=1.0, faults=1, last=replace(KILLED, steps=steps))
        return words(asdict(picture("ppo", View(), {}, {}, needs=1, now=1000.0, past=past)))

    assert said(0).endswith("Recovered in 0.21 s; no steps lost.")
    assert said(3).endswith("Recovered in 0.21 s; 3 steps lost.")
    assert said(None).endswith("Recovered in 0.21 s.")


def test_a_fault_that_the_plan_answers_is_told_before_its_incident_is_written() -> None:
    # Found by a newcomer: "no fault in 62 s" stood below "rank 0 died", and the fault before was told as the last.
    died = of_exit(
        Exit(generation=3, slot=0, step=4, cause="signal 9 (SIGKILL)", own=False, signal=9), rank=1, node="n1"
    )
    verdict = judge([died], Known(world=2, nodes={}))
    plan = Plan(
        generation=4,
        phase=Phase.TRAIN,
        seats=(Seat(member=N0, born=1),),
        causes=(Cause(why=Why.POLICY, said="so"),),
        verdict=verdict,
    )

    def said(last: Broken | None, faults: int) -> str:
        past = Past(began=100.0, faults=faults, last=last)
        return words(asdict(picture("ppo", View(plan=plan), {}, {}, needs=1, now=1000.0, past=past)))

    assert said(None, 0).startswith("1 fault in 15 m. Last fault: ")
    assert said(KILLED, 1).startswith("2 faults in 15 m")
    assert f": {verdict.said}. " in said(KILLED, 1)
    assert said(replace(KILLED, generation=4), 1).startswith("1 fault in 15 m"), "it is the one that was written"


N0, N1, N2 = (Member(node=f"n{number}", incarnation=1) for number in range(3))


LOST = Verdict(
    fault=Fault.DEAD_NODE, nodes=("n1", "n2"), cause="n1 and n2 are gone", confidence=Confidence.HIGH,
    remedy="Look whether they have power.",
)  # fmt: skip
HELD = Plan(
    generation=6,
    phase=Phase.HOLD,
    seats=(Seat(member=N0, born=1),),
    causes=(Cause(why=Why.POLICY, said="held"),),
    verdict=LOST,
)


def test_a_fault_for_which_a_gang_holds_is_the_last_one_until_it_is_over() -> None:
    # Found by a reader: as two nodes died, `status` told of them while the job held; then of the fault before, as the plan
    # by which the others went on answers nothing; and of them again once a step was sealed.
    (open_,) = lasting(None, HELD, Stages(sign_at=1.0, broke=5), at=950.0)
    before = Past(began=100.0, faults=1, last=replace(KILLED, generation=5, broke=4))
    held = before.after(open_)
    goes_on = replace(HELD, generation=7, phase=Phase.TRAIN, verdict=None, causes=(Cause(why=Why.WENT_ON),))

    def seen(past: Past, plan: Plan, work: Work) -> tuple[str, str]:
        records = {"n0": Record(member=N0, generation=plan.generation, work=work)}
        found = picture("ppo", View(plan=plan, leader=N0), records, {}, needs=1, now=1000.0, past=past)
        return words(asdict(found)), " ".join(found.advice)

    end = Done(generation=7, broke=5, rung="restart", total_s=8.25, stages={}, lost=3)
    over = held.over(end, goes_on, 960.0)
    told = over.after(
        replace(KILLED, verdict=LOST, said=LOST.said, generation=7, broke=5, seconds=8.25, steps=3, rung="restart")
    )
    screens = [
        seen(held, HELD, Work.PARKED),
        seen(held, goes_on, Work.JOINING),
        seen(held, goes_on, Work.TRAINING),
        seen(over, goes_on, Work.TRAINING),
        seen(told, goes_on, Work.TRAINING),
    ]
    recovered = "Recovered in 8.25 s (all workers were restarted); 3 steps lost."
    assert [said.partition("n1 and n2 are gone. ")[2] for said, _ in screens] == [
        "Not recovered yet.", "Not recovered yet.", "Training again.", recovered, recovered,
    ]  # fmt: skip
    for said, advice in screens:
        assert said.startswith("2 faults in 15 m")
        assert "dead_node (n1, n2): Look whether they have power." in advice
    later = told.after(replace(KILLED, generation=8, broke=7))
    assert later.faults == 3
    assert told.over(replace(end, generation=9, broke=8), goes_on, 960.0) == told, "it was over before"
    joined = replace(goes_on, generation=8, causes=(Cause(why=Why.JOINED, who=(Member(node="n1", incarnation=2),)),))
    assert "dead_node" not in seen(told, joined, Work.TRAINING)[1], "another plan has come since"


def test_what_a_fault_cost_is_told_as_soon_as_it_is_over_and_once() -> None:
    answers = replace(HELD, phase=Phase.TRAIN)
    end = Done(generation=6, broke=5, rung="reform", total_s=0.5, stages={}, lost=0)
    once = Past(began=100.0).over(end, answers, 960.0)
    assert once.last is not None
    assert (once.faults, once.last.at, once.last.seconds, once.last.said) == (1, 959.5, 0.5, "n1 and n2 are gone")
    told = replace(once.last, said="n1 and n2 are gone, as more is known", seconds=0.6)
    assert once.after(told) == replace(once, last=told)
    assert Past(began=100.0).over(end, replace(answers, verdict=None), 960.0).faults == 0
    unknown = replace(LOST, fault=Fault.UNKNOWN)
    assert Past(began=100.0).over(end, replace(answers, verdict=unknown), 960.0).faults == 0, "its incident may know"
    leaves = replace(
        HELD,
        verdict=unknown,
        causes=(Cause(why=Why.UNSPARED, who=(Member(node="n1", incarnation=1),)),),
        saves=True,
    )
    assert lasting(None, leaves, Stages(), at=950.0) == ()


def test_what_happens_before_a_fault_is_over_belongs_to_it() -> None:
    past, before = Past(began=100.0, faults=0), None
    for plan in (HELD, replace(HELD, generation=7, phase=Phase.PROBE), replace(HELD, generation=8, phase=Phase.TRAIN)):
        past = reduce(Past.after, lasting(before, plan, Stages(sign_at=1.0, broke=5), at=950.0), past)
        before = plan
    assert (past.faults, past.last and past.last.said) == (1, LOST.said)
    assert (
        past.over(Done(generation=8, broke=5, rung="reform", total_s=2.0, stages={}, lost=0), HELD, 960.0).faults == 1
    )


def test_a_plan_that_ends_its_fault_is_written_down_once_it_is_over_and_one_without_a_fault_never() -> None:
    trains, sign = replace(HELD, phase=Phase.TRAIN), Stages(sign_at=1.0, broke=5)
    assert lasting(None, trains, sign, at=950.0) == ()
    assert lasting(None, trains, Stages(), at=950.0) == (), "nobody has seen a sign here"
    assert lasting(trains, replace(HELD, phase=Phase.STOP), sign, at=950.0) == ()
    well = replace(trains, generation=5, verdict=None)
    assert lasting(well, replace(HELD, verdict=None), sign, at=950.0) == (), "nobody knows of what"
    later = replace(HELD, generation=7, verdict=None)
    assert lasting(trains, later, Stages(sign_at=9.0, broke=6), at=950.0) == (), "what broke since is not that one"
    assert lasting(trains, replace(later, phase=Phase.TRAIN), Stages(), at=950.0) == (), (
        "it was over, and somebody joined"
    )


def test_a_plan_that_is_read_anew_breaks_nothing_and_what_is_over_does_not_begin_again() -> None:
    # Found by a recording: who came to lead read the plan again, and the next node's death was told as the fault before it.
    trains = replace(HELD, phase=Phase.TRAIN)
    assert lasting(trains, replace(trains), Stages(), at=950.0) == ()
    assert lasting(HELD, replace(HELD), Stages(), at=950.0) == ()
    over = Past(began=100.0).after(replace(KILLED, generation=6, broke=5))
    assert over.after(replace(KILLED, generation=6, broke=5, seconds=None, rung="", lasts=True)) == over


def test_a_hold_that_is_no_pause_goes_on_with_the_fault_before_it() -> None:
    # Found by a reader: who did not join in time was the reason of a hold without a verdict, and one fault counted as two.
    answers, held = replace(HELD, phase=Phase.TRAIN), replace(HELD, generation=7, verdict=None)
    for before in (answers, HELD):
        past = reduce(Past.after, lasting(before, held, Stages(sign_at=1.0, broke=5), at=950.0), Past(began=100.0))
        assert past.last is not None
        assert (past.faults, past.last.lasts) == (1, True)
        end = Done(generation=8, broke=5, rung="reform", total_s=9.0, stages={}, lost=0)
        over = past.over(end, replace(held, generation=8, phase=Phase.TRAIN), 960.0)
        assert over.last is not None
        assert (over.faults, over.last.lasts, over.last.seconds) == (1, False, 9.0)
        assert over.after(replace(over.last, said="as its incident has it")).faults == 1


def test_a_fault_that_a_pause_comes_into_is_told_though_nobody_times_its_end() -> None:
    answers, paused = replace(HELD, phase=Phase.TRAIN), replace(HELD, generation=7, verdict=None)
    told = lasting(answers, paused, Stages(sign_at=1.0, broke=5), at=950.0, paused=True)
    past = reduce(Past.after, told, Past(began=100.0))
    resumed = replace(paused, generation=8, phase=Phase.TRAIN, causes=(Cause(why=Why.RESUMED),))
    seen = picture("ppo", View(plan=resumed, leader=N0), {}, {}, needs=1, now=1000.0, past=past)
    assert words(asdict(seen)) == "1 fault in 15 m. Last fault 50 s ago: n1 and n2 are gone."
    assert not any("dead_node" in each for each in seen.advice), "no longer"
    both = replace(KILLED, said="n1 is gone; n2 is gone", seconds=None, generation=6, broke=5, lasts=True)
    held = Past(began=100.0).after(both)
    told = lasting(HELD, paused, Stages(), at=950.0, paused=True)
    assert reduce(Past.after, told, held).last == replace(both, lasts=False), "one for which it held"
    assert held.moved(Moves(paused=True), 960.0).last == replace(both, lasts=False), "and that is paused as it holds"
    assert lasting(answers, paused, Stages(), at=950.0, paused=True) == (), "it had sealed a step"


def test_a_job_that_begins_again_has_no_fault_that_lasts() -> None:
    held = lasting(None, HELD, Stages(sign_at=1.0, broke=5), at=950.0)
    ended = there(N0, N1)
    assert ended.plan is not None
    ended = replace(ended, plan=replace(ended.plan, phase=Phase.STOP, exit_code=75))
    past, roster = reduce(Past.after, held, Past(began=100.0, most=4)), Roster()
    assert roster.look(ended) is None
    moves = roster.look(there(N0, N1))
    assert moves is not None
    past = past.moved(moves, 970.0)
    again = there(N0, N1)
    seen = picture("ppo", again, again.records or {}, {}, needs=2, now=1000.0, past=past)
    assert ", over" not in words(asdict(seen))
    assert seen.advice == (), "nor a word of the nodes that it had then"


def test_faults_that_come_before_the_last_one_is_over_are_told_with_it() -> None:
    # Found by a reader: of two nodes that were killed at once the first was in no sentence while the others held.
    first, second, third = (replace(LOST, nodes=(node,), cause=f"{node} is gone") for node in ("n1", "n2", "n3"))
    answers = replace(HELD, generation=6, phase=Phase.TRAIN, verdict=first)
    held = replace(HELD, generation=7, verdict=second)
    sign, past = Stages(sign_at=1.0, broke=5), Past(began=100.0)
    past = reduce(Past.after, lasting(answers, held, sign, at=950.0), past)
    assert past.last is not None
    assert (past.last.said, past.last.verdict.nodes, past.last.broke) == ("n1 is gone; n2 is gone", ("n1", "n2"), 5)
    more = replace(HELD, generation=8, verdict=third)
    past = reduce(Past.after, lasting(held, more, sign, at=950.0), past)
    assert past.last is not None
    assert (past.faults, past.last.said) == (1, "n1 is gone; n2 is gone; n3 is gone")
    (alone,) = lasting(answers, held, Stages(sign_at=9.0, broke=6), at=950.0)
    assert alone.said == "n2 is gone", "the first one was over"


def test_a_fault_that_is_judged_better_is_told_in_the_newer_words_alone() -> None:
    # Found by a reader: a probe that found one end of a slow way to be at fault left the other one in the advice.
    way = replace(LOST, fault=Fault.NETWORK, nodes=("n1", "n2"), cause="the way between n1 and n2 takes long")
    end = replace(way, nodes=("n1",), cause="n1 is out of reach")
    probed, again = (
        replace(HELD, phase=Phase.PROBE, verdict=way),
        replace(HELD, generation=7, phase=Phase.TRAIN, verdict=end),
    )
    past = Past(began=100.0)
    for before, plan in ((None, probed), (probed, again)):
        past = reduce(Past.after, lasting(before, plan, Stages(sign_at=1.0, broke=5), at=950.0), past)
    assert past.last is not None
    assert (past.faults, past.last.said, past.last.verdict.nodes) == (1, "n1 is out of reach", ("n1",))


def test_who_led_and_lost_its_seat_leaves_the_end_to_a_deputy() -> None:
    async def main() -> Past | None:
        store = MemoryStore()
        await Scribe().write(store, 100.0, replace(KILLED, seconds=None, lasts=True))
        await Scribe().write(store, 100.0, KILLED, anew=False)
        return await past.read(store)

    assert asyncio.run(main()) == Past(began=100.0, faults=1, last=KILLED)


def test_of_two_nodes_that_died_one_after_the_other_the_advice_names_both() -> None:
    second = replace(LOST, nodes=("n2",), cause="n2 is gone")
    plan = replace(HELD, generation=7, phase=Phase.TRAIN, verdict=second)
    both = replace(KILLED, verdict=LOST, said=LOST.said, generation=7, broke=5)
    seen = picture("ppo", View(plan=plan, leader=N0), {}, {}, needs=1, now=1000.0, past=Past(began=1.0).after(both))
    assert any(each.startswith("dead_node (n1, n2): Look") for each in seen.advice)


def test_why_a_gang_is_on_gloo_stays_in_the_advice_and_counts_once() -> None:
    fabric = replace(LOST, fault=Fault.FABRIC, cause="NCCL does not form", remedy="Look at NCCL.")
    past = Past(began=100.0).after(replace(KILLED, verdict=fabric, said=fabric.said, generation=5, broke=4))
    stays = Plan(
        generation=7,
        phase=Phase.TRAIN,
        seats=(Seat(member=N0, born=1),),
        causes=(Cause(why=Why.POLICY, said="staying on gloo"),),
        backend="gloo",
    )
    seen = picture("ppo", View(plan=stays, leader=N0), {}, {}, needs=1, now=1000.0, past=past)
    assert seen.faults == 1
    assert any(each.startswith("fabric (n1, n2): Look at NCCL.") for each in seen.advice)
    back = replace(stays, generation=8, backend="")
    assert not picture("ppo", View(plan=back, leader=N0), {}, {}, needs=1, now=1000.0, past=past).advice


def test_what_a_cap_keeps_from_being_mended_is_another_fault_than_the_one_before_it() -> None:
    once = Past(began=100.0).after(KILLED)
    capped = once.after(replace(KILLED, broke=3, seconds=None))
    assert capped.faults == 2, "in the gang that answered the one before"
    assert (
        capped.over(Done(generation=4, broke=3, rung="reform", total_s=0.2, stages={}, lost=0), None, 960.0) == capped
    )
    assert capped.after(replace(KILLED, generation=4, broke=3)).faults == 3, (
        "what breaks that gang later is another one"
    )
    seen = picture("ppo", View(plan=Plan(generation=3, phase=Phase.TRAIN)), {}, {}, needs=1, now=1000.0, past=capped)
    assert "lost" not in words(asdict(seen))
    assert ", over" not in words(asdict(seen)), "as nobody knows"


def there(*members: Member, leaving: Member | None = None) -> View:
    seats = tuple(Seat(member=member, born=1) for member in (N0, N1))
    records = {each.node: Record(member=each, leaving=each == leaving) for each in members}
    return View(
        plan=Plan(generation=1, phase=Phase.TRAIN, seats=seats, causes=(Cause(why=Why.POLICY, said="so"),)),
        leader=N0,
        records=records,
    )


def rolled(*views: View) -> Past:
    past, roster = Past(began=0.0), Roster()
    for at, view in enumerate(views):
        moves = roster.look(view)
        past = past.moved(moves, float(at)) if moves else past
    return past


def test_who_goes_without_a_word_is_missing_until_it_is_back() -> None:
    all_three = there(N0, N1, N2)
    lost = rolled(all_three, there(N0, N1))
    assert lost.missing == (Missing(member=N2, at=1.0),)
    assert rolled(all_three, there(N0, N1), there(N0, N1, replace(N2, incarnation=2))).missing == ()
    assert rolled(all_three, there(N0, N1, N2, leaving=N2), there(N0, N1)).missing == (), "somebody has drained it"
    seen = rolled(all_three, there(N0, N1), there(N0), there(N0))
    assert [(each.member.node, each.at) for each in seen.missing] == [("n2", 1.0), ("n1", 2.0)]


def test_how_many_there_were_at_once_stays_known() -> None:
    assert rolled(there(N0, N1, N2), there(N0, N1, N2, leaving=N2), there(N0, N1)).most == 3
    assert rolled(there(N0, N1)).most == 2


def test_who_comes_to_lead_misses_those_of_the_plan() -> None:
    assert rolled(there(N1)).missing == (Missing(member=N0, at=0.0),), "the leader before may have died"
    again = rolled(there(N1)).moved(Roster().look(there(N1)) or pytest.fail("it looks for the first time"), 9.0)
    assert again.missing == (Missing(member=N0, at=0.0),), "since when stays"


def test_a_node_of_another_name_takes_the_place_of_who_is_missing() -> None:
    n7 = Member(node="n7", incarnation=1)
    lost = there(N0, N1)
    assert rolled(there(N0, N1, N2), lost, there(N0, N1, n7)).missing == ()
    assert rolled(lost, there(N0, N1, n7)).missing == ()


def test_a_node_that_was_drained_and_comes_back_does_not_take_the_place_of_one_that_died() -> None:
    n3 = Member(node="n3", incarnation=1)
    all_four, three, two = there(N0, N1, N2, n3), there(N0, N1, N2), there(N0, N1)
    back = there(N0, N1, replace(N2, incarnation=2))
    past = rolled(all_four, three, there(N0, N1, N2, leaving=N2), two, back)
    assert [each.member for each in past.missing] == [n3]
    n9 = Member(node="n9", incarnation=1)
    past = rolled(all_four, three, there(N0, N1, N2, leaving=N2), two, there(N0, N1, n9))
    assert past.missing == (), "but one of another name does, though fewer are there by now"
    assert past.left == ("n2",)


def test_who_was_let_go_though_the_others_hold_without_it_is_not_gone_without_a_word() -> None:
    view = there(N1)
    assert view.plan is not None
    unspared = Cause(why=Why.UNSPARED, who=(N0,))
    view = replace(view, plan=replace(view.plan, phase=Phase.HOLD, causes=(unspared,), saves=True), leader=N1)
    assert rolled(view).missing == ()
    seen = picture("ppo", view, view.records or {}, {}, needs=2, now=9.0, past=rolled(view), drains={"n0": N0})
    assert [(row.member, row.state) for row in seen.rows] == [("n0/1", "drained"), ("n1/1", "no worker")]
    assert seen.advice[0].startswith("1 more node is needed: start elasticrl on n0 again (it was drained)")


def test_whoever_ends_takes_the_list_along() -> None:
    ended = there(N0)
    plan = ended.plan
    assert plan is not None
    stopped = replace(ended, plan=replace(plan, phase=Phase.STOP, exit_code=75))
    assert rolled(there(N0, N1, N2), stopped).missing == (), "nodes go when a job ends"


def test_the_time_that_a_job_was_stopped_for_does_not_count() -> None:
    began = there(N0, N1)
    assert began.plan is not None
    stopped = replace(
        began, plan=replace(began.plan, phase=Phase.STOP, exit_code=75),
        commit=Commit(step=40, generation=1, manifest="m", written=500.0),
    )  # fmt: skip

    def of(*views: View, began_at: float = 100.0) -> float:
        past, roster = Past(began=began_at), Roster()
        for view in views:
            moves = roster.look(view)
            past = past.moved(moves, 2000.0) if moves else past
        return 2000.0 - past.began - past.stopped_s

    again = replace(began, commit=stopped.commit)
    assert of(stopped, again) == 400.0
    assert of(stopped, again, replace(again, records={})) == 400.0, "once"
    assert of(again) == 1900.0, "another one leads"
    assert of(stopped, began) == 1900.0, "it was never saved"
    assert of(stopped, again, began_at=1990.0) == 0.0, "what is known of it began later than that"
    moves = Roster()
    assert moves.look(stopped) is None
    begun = moves.look(again)
    assert begun is not None
    assert Past(began=100.0, stopped_s=300.0, resumed=900.0).moved(begun, 2000.0).stopped_s == 1400.0, (
        "a pause counts once"
    )


def test_the_time_that_a_job_was_paused_for_does_not_count() -> None:
    trains = there(N0, N1)
    assert trains.plan is not None
    held = replace(trains, intent=Intent.PAUSE, plan=replace(trains.plan, phase=Phase.HOLD))
    asked, resumed = replace(trains, intent=Intent.PAUSE), replace(held, intent=Intent.RUN)

    def of(*views: View) -> float:
        past, roster = Past(began=0.0), Roster()
        for at, view in enumerate(views):
            moves = roster.look(view)
            past = past.moved(moves, 10.0 + 10.0 * at) if moves else past
        return past.stood_s(70.0)

    assert of(trains, asked, held, held, resumed, trains) == 20.0
    assert of(trains, held, there(N0), resumed, trains, held, trains) == 20.0, (
        "who went meanwhile is told as well; again"
    )
    assert of(trains, resumed, trains) == 0.0, "a hold that nobody asked for"
    assert of(held, trains) == 10.0, "who comes to lead counts from then on"
    assert of(trains, held) == 50.0, "it still is"
    still = Past(began=100.0, paused=300.0, stopped_s=50.0)
    assert (still.lasted_s(400.0), still.lasted_s(500.0)) == (150.0, 150.0)
    assert still.moved(Moves(begun=True, stopped=350.0), 1000.0).lasted_s(1000.0) == 150.0, "it was stopped meanwhile"


def test_status_shows_who_is_missing_and_what_to_do() -> None:
    # Found by a newcomer: six seconds after a node's death it was "2 of 2 nodes", and no word of it.
    view, past = there(N0, N1), Past(began=100.0, missing=(Missing(member=N2, at=968.0),))
    cause = Cause(why=Why.SILENT, who=(N2,), nodes=("n0", "n1"))
    kept_out = {"n2": Quarantine(member=N2, cause=cause)}
    seen = picture("ppo", view, view.records or {}, kept_out, needs=2, now=1000.0, past=past)
    lines = render.status(asdict(seen), colour=False).splitlines()
    assert lines[0].endswith("2 of 3 nodes, needs 2")
    assert [(row.node, row.state, row.rank, row.beat_s, row.note) for row in seen.rows][2] == (
        "n2",
        "gone",
        None,
        32.0,
        str(cause),
    )
    assert seen.advice[0] == (
        "n2 is gone: start elasticrl there again. If another node goes first, the job has to wait. If it will not come "
        "back: elasticrl drain n2."
    )
    easy = picture("ppo", view, view.records or {}, {}, needs=1, now=1000.0, past=past)
    assert "has to wait" not in easy.advice[0]
    assert easy.rows[2].note == "its lease expired"
    back = there(N0, N1, replace(N2, incarnation=2))
    assert len(picture("ppo", back, back.records or {}, {}, needs=2, now=1000.0, past=past).rows) == 3


def test_nobody_waits_for_a_node_that_is_let_go() -> None:
    async def main() -> tuple[bool, bool, Past | None]:
        store = MemoryStore()
        await Scribe().change(store, 1.0, lambda past: replace(past, missing=(Missing(member=N2, at=1.0),)))
        return await forget(store, "n2"), await forget(store, "n2"), await past.read(store)

    assert asyncio.run(main()) == (True, False, Past(began=1.0))
