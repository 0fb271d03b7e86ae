"""What befell a job so far: counted once, told by whoever leads, shown by status, page and demonstration."""

import asyncio
from dataclasses import asdict, replace

import pytest

from elasticrl.cli import render
from elasticrl.core.model import Member, Phase, Plan, Record, Seat, View
from elasticrl.core.words import past as words
from elasticrl.daemon import past
from elasticrl.daemon.past import Broken, Past, Scribe
from elasticrl.daemon.picture import picture
from elasticrl.daemon.web import piece
from elasticrl.shell import keys
from elasticrl.store.memory import MemoryStore
from elasticrl.store.protocol import StoreError

KILLED = Broken(at=940.0, fault="killed", said="n1: rank 1 died: <signal 9>", generation=3, seconds=0.214)


def test_a_fault_that_is_told_anew_counts_once_and_a_later_one_again() -> None:
    once = Past(began=100.0).after(KILLED)
    better = replace(KILLED, said="n1: its memory was full")
    assert (once.faults, once.after(better)) == (1, Past(began=100.0, faults=1, last=better))
    twice = once.after(replace(KILLED, generation=5))
    assert twice.faults == 2
    assert twice.after(better) == twice, "the older one told anew is not the last"


def test_status_and_page_say_what_happened_after_everybody_is_back() -> None:
    n0 = Member(node="n0", incarnation=1)
    plan = Plan(generation=4, phase=Phase.TRAIN, seats=(Seat(member=n0, born=1),), reason="1 node joined")
    seen = picture(
        "ppo", View(plan=plan, leader=n0), {"n0": Record(member=n0)}, {}, needs=1, now=1000.0,
        past=Past(began=100.0, faults=2, last=KILLED),
    )  # fmt: skip
    assert (seen.uptime_s, seen.faults, seen.mtbf_s, seen.last_s) == (900.0, 2, 450.0, 60.0)
    said = "2 faults in 15 m (one in 7 m); the last 60 s ago, over in 0.21 s: n1: rank 1 died: <signal 9>"
    assert render.status(asdict(seen), colour=False).splitlines()[2] == said
    steady = "2 faults so far; the last, over in 0.21 s: n1: rank 1 died: <signal 9>"
    assert steady in render.status(asdict(seen), colour=False, ages=False)
    assert steady.replace("<", "&lt;").replace(">", "&gt;") in piece(seen), "nothing that changes at each look"


def test_a_job_without_a_fault_says_so_and_one_that_nobody_wrote_of_says_nothing() -> None:
    assert (
        words(asdict(picture("ppo", View(), {}, {}, needs=1, now=1000.0, past=Past(began=950.0)))) == "no fault in 50 s"
    )
    assert words(asdict(picture("ppo", View(), {}, {}, needs=1, now=1000.0))) == ""
    lasting = Past(began=1.0, faults=1, last=replace(KILLED, seconds=None))
    assert ", not over: " in words(asdict(picture("ppo", View(), {}, {}, needs=1, now=1000.0, past=lasting)))


def test_leaders_write_one_after_the_other_and_the_next_goes_on_with_what_was_there() -> None:
    async def main() -> Past | None:
        store, first, second = MemoryStore(), Scribe(), Scribe()
        await first.write(store, 100.0)
        await asyncio.gather(*(first.write(store, 200.0, replace(KILLED, generation=g)) for g in (3, 4, 5)))
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

        async def put(self, key: str, value: bytes, lease: int = 0) -> int:
            self.tries += 1
            if self.tries == 1:
                raise StoreError("no leader")
            return await super().put(key, value, lease)

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
