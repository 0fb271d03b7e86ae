"""Real agents, real workers, real signals. One gang of two nodes serves as many claims as can share it."""

import asyncio
import json
import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

from agent_nodes import Node, gang, launch, nodes, stepping, training

from elasticrl.agent import wire
from elasticrl.agent.beats import life
from elasticrl.core.model import Work
from elasticrl.core.settings import Timeouts

STEP = re.compile(r"step (\d+) generation (\d+) rank (\d+) world (\d+) digest (\w+)")


def pid(node: Node, slot: int = 0) -> int:
    return node.now.workers[slot].pid


def steps(path: Path) -> list[tuple[int, ...]]:
    return [tuple(map(int, m.groups()[:4])) for m in STEP.finditer(path.read_text())]


async def gone(process: int, within_s: float = 5.0) -> float:
    begun = time.monotonic()
    while life(process) is not None:
        assert time.monotonic() < begun + within_s, f"process {process} is still there"
        await asyncio.sleep(0.001)
    return time.monotonic() - begun


def test_a_killed_worker_is_replaced_by_a_spare_while_the_survivor_keeps_its_process(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    async def scenario() -> None:
        async with nodes(tmp_path, 2) as (a, b):
            launch(1, [a, b])
            await training([a, b], 1)
            await stepping(a, 5)
            survivor, victim = pid(a), pid(b)

            at = time.monotonic()
            os.kill(victim, signal.SIGKILL)
            report = await b.until(lambda r: r.exit is not None)
            noticed = time.monotonic() - at
            assert report.work is Work.FAILED
            assert report.exit is not None
            assert (report.exit.cause, report.exit.own, report.exit.generation) == ("signal 9 (SIGKILL)", False, 1)
            assert report.warm  # the spare is there at once

            await a.until(lambda r: r.work is Work.PARKED)
            endpoint = a.now.endpoint
            a.send(wire.Reform(gang=gang(2, [a, b], a, born=1, endpoint=endpoint)))
            at_launch = time.monotonic()
            b.send(wire.Launch(gang=gang(2, [a, b], b, endpoint=endpoint)))
            await training([a, b], 2)
            again, handed_over = time.monotonic() - at, time.monotonic() - at_launch
            assert pid(a) == survivor
            assert pid(b) != victim
            assert b.now.born == 2
            assert a.now.born == 1
            await stepping(b, 12)
            record_property("noticed_ms", round(1000 * noticed, 1))
            record_property("spare_in_gang_ms", round(1000 * handed_over, 1))
            record_property("recovered_ms", round(1000 * again, 1))
            print(
                f"noticed {1000 * noticed:.0f} ms, spare in the gang {1000 * handed_over:.0f} ms, all {1000 * again:.0f} ms"
            )
            assert noticed < 0.05 or os.getloadavg()[0] > 2.5

            # Every generation has its folder; nothing that was printed before the kill is lost, and no step is missing.
            logs = Path(b.spec.log_dir)
            assert (logs / "latest").resolve() == logs / "attempt_2"
            first, second = steps(logs / "attempt_1" / "rank_1.log"), steps(logs / "attempt_2" / "rank_1.log")
            assert [s[0] for s in first] == list(range(1, len(first) + 1))
            assert report.exit.step == first[-1][0]
            assert second[0][0] <= first[-1][0] + 1
            assert [e.exit for e in b.now.ended] == [report.exit]
            assert b.now.ended[0].tail[-1].startswith(f"step {first[-1][0]} ")
            # Each generation met in a store of its own, on a port of its own.
            assert endpoint != a.now.endpoint

    asyncio.run(scenario())


def test_a_daemon_that_comes_back_is_shown_everything_and_training_does_not_notice(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with nodes(tmp_path, 1, slots=2) as (a,):
            launch(1, [a], slots=2)
            await training([a], 1)
            before = a.now
            os.kill(before.workers[1].pid, signal.SIGKILL)
            await a.until(lambda r: r.work is Work.FAILED)
            assert a.now.exit is not None
            assert a.now.exit.slot == 1
            await gone(before.workers[0].pid)  # a seat fails whole
            launch(2, [a], slots=2)
            await training([a], 2)
            await a.disconnect()
            at = await stepping(a, 3)

            a.reports.clear()
            a.connect()
            first = await a.until(lambda _: True)
            assert first.generation == 2
            assert first.work is Work.TRAINING
            assert [w.slot for w in first.workers] == [0, 1]
            assert all((seen := life(w.pid)) is not None and seen.started == w.started for w in first.workers)
            assert [e.exit.cause for e in first.ended] == ["signal 9 (SIGKILL)"]  # told again to whom it may be new
            await stepping(a, at + 3)
            a.send(wire.Acknowledge(ended=(first.ended[0].number,)))
            await a.until(lambda r: not r.ended)

    asyncio.run(scenario())


def test_a_stopped_worker_is_seen_and_killed_at_once(tmp_path: Path) -> None:
    async def scenario() -> None:
        limits = Timeouts(default_phase_s=1.0)
        async with nodes(tmp_path, 2, args=("--child",), timeouts=limits) as (a, b):
            launch(1, [a, b])
            await training([a, b], 1)
            await stepping(a, 3)
            child = int(re.findall(r"child (\d+)", b.logs())[0])
            stopped = pid(b)
            os.kill(stopped, signal.SIGSTOP)
            seen = await b.until(lambda r: r.stall is not None and r.stall.stopped, 10.0)
            victim = await a.until(lambda r: r.work is Work.STALLED, 10.0)
            assert victim.stall is not None
            assert victim.stall.waiting
            assert not victim.stall.stopped
            b.send(wire.Kill(slot=0, cause=str(seen.stall)))
            assert await gone(stopped) < 0.5
            report = await b.until(lambda r: r.exit is not None, 2.0)
            assert report.exit is not None
            assert report.exit.cause.startswith("stopped in update for")
            assert not report.exit.own
            await gone(child)  # its children end with it
            await a.until(lambda r: r.work is Work.PARKED)

    asyncio.run(scenario())


def test_the_agents_death_ends_its_workers_even_a_stopped_one(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with nodes(tmp_path, 1, slots=2) as (a,):
            launch(1, [a], slots=2)
            await training([a], 1)
            workers = [w.pid for w in a.now.workers]
            os.kill(workers[1], signal.SIGSTOP)
            os.kill(a.now.pid, signal.SIGKILL)
            for worker in workers:
                await gone(worker, 2.0)
            # A new agent in the same place starts clean.
            await a.disconnect()
            a.process.wait(5)  # type: ignore[attr-defined]
            a.reports.clear()
            a.start()
            fresh = await a.until(lambda r: r.warm, 60.0)
            assert fresh.work is Work.NONE
            assert sum(1 for _ in (a.runtime / "beats").iterdir()) == fresh.spares

    asyncio.run(scenario())


def test_what_a_program_raises_is_its_own_doing_and_ends_up_in_the_exit_record(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with nodes(tmp_path, 1, args=("--raise-at", "3")) as (a,):
            launch(1, [a])
            report = await a.until(lambda r: r.work is Work.FAILED)
            assert report.exit is not None
            assert report.exit.own
            assert report.exit.cause == "exit code 1: ValueError: bad prompt"
            assert report.exit.step == 2
            (end,) = report.ended
            assert (end.code, end.rank) == (1, 0)
            assert 'raise ValueError("bad prompt")' in end.traceback
            assert end.tail[-1] == "ValueError: bad prompt"

    asyncio.run(scenario())


def test_a_bad_signal_is_the_programs_own_doing(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with nodes(tmp_path, 1, args=("--exit-at", "2:SEGV")) as (a,):
            launch(1, [a])
            report = await a.until(lambda r: r.work is Work.FAILED)
            assert report.exit is not None
            assert (report.exit.cause, report.exit.own) == ("signal 11 (SIGSEGV)", True)
            assert report.ended[0].core

    asyncio.run(scenario())


def test_a_halt_that_saves_lets_the_gang_end_at_one_step_with_a_checkpoint(tmp_path: Path) -> None:
    saves = tmp_path / "saves"

    async def scenario() -> None:
        async with nodes(tmp_path, 2, args=("--save", str(saves), "--save-every", "1000")) as (a, b):
            launch(1, [a, b])
            await training([a, b], 1)
            await stepping(a, 3)
            for node in (a, b):
                node.send(wire.Halt(generation=1, save=True, within_s=10.0, reason="stopped by an operator"))
            for node in (a, b):
                await node.until(lambda r: r.work is Work.NONE and not r.workers, 10.0)
            assert a.now.step == b.now.step == a.now.saved
            assert a.now.manifest == f"step-{a.now.saved:08d}"
            assert json.loads((saves / a.now.manifest).read_text())["step"] == a.now.saved
            assert not a.now.ended  # a clean end is no fault
            assert not b.now.ended
            # What was saved under generation 1 is still there to be committed, and the seat can be taken again.
            assert a.now.generation == 1
            resume = a.now.saved
            launch(2, [a], resume=resume)
            await training([a], 2)
            assert await stepping(a, resume + 1) > resume
            a.send(wire.Halt(generation=2, save=False, within_s=0.0, reason="out of the plan"))
            await a.until(lambda r: r.work is Work.NONE and not r.workers, 2.0)
            assert not a.now.ended

    asyncio.run(scenario())


def test_park_keeps_the_state_and_a_reform_goes_on_with_it(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with nodes(tmp_path, 1, args=("--steps", "20"), log_limit_bytes=400, log_keep=9) as (a,):
            launch(1, [a])
            await training([a], 1)
            await stepping(a, 3)
            worker = pid(a)
            a.send(wire.Park(generation=2, endpoint="", reason="held"))
            parked = await a.until(lambda r: r.work is Work.PARKED and r.generation == 2)
            assert parked.born == 1
            a.send(wire.Reform(gang=gang(3, [a], a, born=1)))
            await training([a], 3)
            assert pid(a) == worker
            await a.until(lambda r: r.work is Work.DONE)
            # Rotated by size, and over all files every step is there once.
            logs = sorted(Path(a.spec.log_dir).glob("attempt_*/rank_0.log*"))
            assert len(logs) > 2
            assert sorted(s[0] for log in logs for s in steps(log)) == list(range(1, 21))
            a.send(wire.Halt(generation=4, save=True, within_s=5.0, reason="all steps are made"))
            await a.until(lambda r: not r.workers)
            assert not a.now.ended

    asyncio.run(scenario())


def test_a_module_that_cannot_be_imported_is_named(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with nodes(tmp_path, 1, preload=("no_such_module",), cold=True) as (a,):
            report = await a.until(lambda r: bool(r.problem), 60.0)
            assert "No module named 'no_such_module'" in report.problem
            assert not report.warm

    asyncio.run(scenario())


def test_an_agent_without_a_daemon_for_too_long_ends_and_leaves_nothing(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with nodes(tmp_path, 1, orphan_s=1.0, stop_s=2.0) as (a,):
            launch(1, [a])
            await training([a], 1)
            worker, agent = pid(a), a.now.pid
            await a.disconnect()
            assert await asyncio.to_thread(a.process.wait, 15) == 0  # type: ignore[attr-defined]
            assert life(worker) is None
            assert life(agent) is None
            assert not any((a.runtime / "beats").iterdir())
            a.process = None

    asyncio.run(scenario())
