"""Where all workers are, asked of the whole job by an operator: on the memory store."""

import asyncio
import os
from contextlib import suppress
from pathlib import Path

import pytest
from core_kit import plan
from diagnosis_kit import fact

from elasticrl.contract.beats import Beat
from elasticrl.contract.evidence import Evidence, Kind, Sign
from elasticrl.contract.model import Member, Record, View, Work
from elasticrl.contract.settings import Settings
from elasticrl.contract.wire import Report, Worker
from elasticrl.core.node.state import State
from elasticrl.daemon.asking import Where, answer, ask, look, told
from elasticrl.shell.sight import Sight
from elasticrl.store.memory import MemoryServer, MemoryStore

ME = Member(node="n00", incarnation=1)


def test_all_who_answer_in_time_are_heard_and_an_old_question_is_not_answered_again() -> None:
    async def questions() -> None:
        server = MemoryServer()
        heard: dict[str, list[int]] = {}

        async def member(name: str, *, dumb: bool = False) -> None:
            store, me = MemoryStore(server), Member(node=name, incarnation=1)
            said = heard.setdefault(name, [])

            def asked(to: int) -> None:
                said.append(to)
                if not dumb:
                    task = asyncio.create_task(answer(store, Where(to=to, member=me, evidence=(away(1),)), 0))
                    tasks.append(task)

            sight = Sight(store, me, changed=lambda _: None, complain=lambda _: None, asked=asked)
            await sight.watch(everyone=False)

        tasks = [asyncio.create_task(member("n00")), asyncio.create_task(member("n01", dumb=True))]
        await asyncio.sleep(0.05)
        first = await ask(MemoryStore(server), {"n00", "n01"}, within_s=0.3)
        assert set(first) == {"n00"}
        assert [each.detail for each in first["n00"].evidence] == [away(1).detail]
        tasks.append(asyncio.create_task(member("n02")))
        await asyncio.sleep(0.05)
        assert heard["n02"] == [], "it was asked before its time"
        second = await ask(MemoryStore(server), {"n00", "n02"}, within_s=5.0)
        assert set(second) == {"n00", "n02"}
        assert len(heard["n00"]) == 2
        assert second["n00"].to > first["n00"].to
        for task in tasks:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    asyncio.run(questions())


def test_a_worker_that_has_just_ended_is_passed_over_and_leaves_nothing(tmp_path: Path) -> None:
    beats = [tmp_path / name for name in ("here", "gone")]
    beat = Beat(beats[0])
    beat.training()
    workers = tuple(
        Worker(slot=slot, rank=slot, pid=os.getpid(), started=1, beat=str(path), log="")
        for slot, path in enumerate(beats)
    )
    report = Report(work=Work.TRAINING, generation=3, workers=workers)
    said = asyncio.run(look(report, tmp_path / "witness", ME, 7, within_s=0.2))
    assert said.moved == ()
    assert [path.name for path in tmp_path.iterdir()] == ["here"]


def away(rank: int) -> Evidence:
    return fact(Sign.ELSEWHERE, rank, 3, kind=Kind.STACK, detail="in its dataloader: __next__ (loader.py:7)", line="x")


def there(rank: int) -> Evidence:
    return fact(Sign.WAITED, rank, 3, kind=Kind.STACK, op="all_reduce", line="x")


@pytest.mark.parametrize(("moved", "stalled"), [((), False), ((1,), False), ((), True)])
def test_that_somebody_is_elsewhere_is_no_verdict_on_a_job_that_goes_on(moved: tuple[int, ...], stalled: bool) -> None:
    state = State(
        settings=Settings(job="j"), me=ME, card=Record(member=ME), view=View(plan=plan(3, "n00", "n01", "n02", "n03"))
    )
    answers = {
        f"n0{rank}": Where(
            to=7, member=Member(node=f"n0{rank}", incarnation=1), evidence=(away(1) if rank == 1 else there(rank),),
            moved=tuple({rank} & set(moved)), stalled=stalled and rank == 0,
        )
        for rank in range(3)
    }  # fmt: skip
    found = told(state, answers, {"n03"})
    assert found["said"] == (
        "rank 1 is in its dataloader: __next__ (loader.py:7); ranks 0, 2 are in all_reduce; n03 has not answered"
    )
    assert found["moved"] == list(moved)
    lasting = found["if_it_lasts"]
    if stalled:
        assert (found["verdict"]["class"], found["verdict"]["culprit"]["ranks"], lasting) == ("host_hang", [1], None)
    else:
        assert found["verdict"]["class"] == "unknown"
        assert (lasting and lasting["culprit"]["ranks"]) == (None if moved else [1])


@pytest.mark.parametrize(
    ("answers", "silent", "said"),
    [
        (((0,), (1,)), (), "ranks 0-1 run; where they are is unknown"),
        (((), ()), (), "no workers run"),
        (((0,),), ("n01",), "rank 0 runs; where they are is unknown; n01 has not answered"),
        ((), ("n00", "n01"), "n00 has not answered; n01 has not answered"),
    ],
)
def test_that_nobody_has_said_where_workers_are_does_not_say_that_none_run(
    answers: tuple[tuple[int, ...], ...], silent: tuple[str, ...], said: str
) -> None:
    # Found by a new user: "no workers run" while two trained.
    state = State(settings=Settings(job="j"), me=ME, card=Record(member=ME), view=View(plan=plan(3, "n00", "n01")))
    heard = {
        f"n0{node}": Where(to=7, member=Member(node=f"n0{node}", incarnation=1), ranks=ranks)
        for node, ranks in enumerate(answers)
    }
    assert told(state, heard, silent)["said"] == said
