"""Real agents, real workers, real signals; the test gives the orders that a daemon would give."""

import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from agent_nodes import Lab, Node, gang, lab, launch, stepping, training

from chaos.patience import patience
from elasticrl.agent import warm
from elasticrl.agent.reports import news
from elasticrl.base.process import life
from elasticrl.contract import wire
from elasticrl.contract.model import MEETING, Work
from elasticrl.contract.orders import Halt, Kill, Launch, Park, Reform
from elasticrl.contract.settings import Timeouts
from elasticrl.contract.wire import Report

STEP = re.compile(r"step (\d+) generation (\d+) rank (\d+) world (\d+) digest (\w+)")


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """Two nodes of one worker each."""
    with lab(
        tmp_path_factory.mktemp("pair"), 2, args=("--child", "--save-every", "1000"),
        timeouts=Timeouts(default_phase_s=1.0), log_limit_bytes=4000, log_keep=99,
    ) as made:  # fmt: skip
        yield made


@pytest.fixture(scope="module")
def duo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """One node of two workers, whose agent may be killed."""
    with lab(tmp_path_factory.mktemp("duo"), 1, slots=2, stop_s=2.0) as made:
        yield made


def pid(node: Node, slot: int = 0) -> int:
    return node.now.workers[slot].pid


def logs_of(node: Node, generation: int, rank: int) -> list[Path]:
    """A rank's log and its rotated predecessors, the oldest first."""
    folder = Path(node.spec.log_dir) / f"attempt_{generation}"
    return sorted(
        folder.glob(f"rank_{rank}.log*"), key=lambda path: -int(path.suffix[1:]) if path.suffix != ".log" else 0
    )


def steps(node: Node, generation: int, rank: int) -> list[int]:
    text = "".join(path.read_text() for path in logs_of(node, generation, rank))
    return [int(found[1]) for found in STEP.finditer(text)]


async def gone(process: int, within_s: float = 5.0) -> float:
    begun = time.monotonic()
    while life(process) is not None:
        assert time.monotonic() < begun + patience(within_s), f"process {process} is still there"
        await asyncio.sleep(0.001)
    return time.monotonic() - begun


def held(process: int) -> set[str]:
    """The names of the files that it has open."""
    found = set()
    for at in Path(f"/proc/{process}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile: the fork server gets some with each process
            found.add(at.readlink().name)
    return found


def command(process: int) -> bytes:
    return Path(f"/proc/{process}/cmdline").read_bytes()


def called(process: int) -> str:
    return Path(f"/proc/{process}/comm").read_text().strip()


def parent_of(process: int) -> int:
    return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])


def environment(process: int) -> dict[str, str]:
    pairs = Path(f"/proc/{process}/environ").read_bytes().decode().split("\0")
    return dict(pair.split("=", 1) for pair in pairs if "=" in pair)


async def replaced(a: Node, b: Node, generation: int) -> None:
    """`b`'s worker is killed, a spare takes its place in the next generation, and `a`'s is told to form it in place."""
    os.kill(pid(b), signal.SIGKILL)
    await a.until(lambda r: r.work is Work.PARKED)
    await b.until(lambda r: r.work is Work.FAILED and r.warm)
    endpoint = a.now.endpoint
    a.send(Reform(place=gang(generation + 1, [a, b], a, born=generation, endpoint=endpoint)))
    b.send(Launch(place=gang(generation + 1, [a, b], b, endpoint=endpoint)))


def test_a_killed_worker_is_replaced_by_a_spare_while_the_survivor_keeps_its_process(pair: Lab) -> None:
    async def scenario(a: Node, b: Node) -> None:
        one = launch([a, b])
        await training([a, b], one)
        await stepping(a, 5)
        await b.until(lambda r: r.warm)
        survivor, victim = pid(a), pid(b)
        assert (called(survivor), called(victim)) == ("elasticrl-r0", "elasticrl-r1")

        at = time.monotonic()
        os.kill(victim, signal.SIGKILL)
        report = await b.until(lambda r: r.exit is not None)
        noticed = time.monotonic() - at
        assert report.work is Work.FAILED
        assert report.exit is not None
        assert (report.exit.cause, report.exit.own, report.exit.generation) == ("signal 9 (SIGKILL)", False, one)
        assert report.warm  # the spare is there already

        await a.until(lambda r: r.work is Work.PARKED)
        endpoint, ordered = a.now.endpoint, time.monotonic()
        a.send(Reform(place=gang(one + 1, [a, b], a, born=one, endpoint=endpoint)))
        b.send(Launch(place=gang(one + 1, [a, b], b, endpoint=endpoint)))
        await training([a, b], one + 1)
        print(
            f"\nnoticed in {1000 * noticed:.0f} ms; spare in the gang {1000 * (time.monotonic() - ordered):.0f} ms after the "
            f"order, {1000 * (time.monotonic() - at):.0f} ms after the kill"
        )
        assert noticed < 1.0  # mostly a few milliseconds, as was printed
        assert (pid(a), a.now.born, b.now.born) == (survivor, one, one + 1)
        assert pid(b) != victim
        assert called(pid(b)) == "elasticrl-r1"
        assert a.now.endpoint != endpoint  # the next generation will meet in a store of its own
        await stepping(b, report.exit.step + 3)

        # Every generation has its folder. What was printed before the kill is there, and no step is missing or made twice.
        logs = Path(b.spec.log_dir)
        assert (logs / "latest").readlink() == Path(f"attempt_{one + 1}")
        before, after = steps(b, one, 1), steps(a, one + 1, 0)
        assert before == list(range(1, report.exit.step + 1))
        survivors = steps(a, one, 0) + after
        assert survivors == list(range(1, len(survivors) + 1))
        (end,) = b.now.ended
        assert end.exit == report.exit
        assert end.said.startswith(f"step {report.exit.step} ")

    pair.run(scenario)


def test_a_stopped_worker_is_seen_and_killed_at_once_with_its_children(pair: Lab) -> None:
    async def scenario(a: Node, b: Node) -> None:
        one = launch([a, b])
        await training([a, b], one)
        await stepping(a, 3)
        child = int(re.findall(r"child (\d+)", logs_of(b, one, 1)[0].read_text())[0])
        stopped = pid(b)
        os.kill(stopped, signal.SIGSTOP)
        seen = await b.until(lambda r: r.stall is not None and r.stall.stopped, 10.0)
        victim = await a.until(lambda r: r.work is Work.STALLED, 10.0)
        assert victim.stall is not None
        assert victim.stall.waiting
        assert not victim.stall.stopped
        b.send(Kill(slot=0, cause=str(seen.stall), sign=seen.stall.sign))
        assert await gone(stopped) < 0.5
        report = await b.until(lambda r: r.exit is not None, 2.0)
        assert report.exit is not None
        assert report.exit.cause.startswith("stopped in update for")
        assert not report.exit.own
        await gone(child)
        await a.until(lambda r: r.work is Work.PARKED)  # the victim is freed by that alone

    pair.run(scenario)


def test_a_worker_that_hangs_outside_a_collective_is_told_from_its_victim(pair: Lab) -> None:
    async def scenario(a: Node, b: Node) -> None:
        await training([a, b], launch([a, b]))
        pair.fault("hang", rank=1)
        culprit = await b.until(lambda r: r.stall is not None, 10.0)
        victim = await a.until(lambda r: r.stall is not None, 10.0)
        assert culprit.stall is not None
        assert victim.stall is not None
        assert (culprit.stall.waiting, culprit.stall.stopped, culprit.work) == (False, False, Work.TRAINING)
        assert (victim.stall.waiting, victim.work) == (True, Work.STALLED)

    pair.run(scenario)


@pytest.mark.parametrize(
    ("do", "cause"),
    [
        ("raise", "exit code 1: ValueError: bad prompt"),
        ("exit", "exit code 3"),
        ("torn", "exit code 1"),
        ("record", "exit code 4: KeyError: 'reward'"),
        ("segv", "signal 11 (SIGSEGV)"),
    ],
)
def test_what_a_program_does_to_itself_is_its_own_doing(pair: Lab, do: str, cause: str) -> None:
    async def scenario(a: Node, b: Node) -> None:  # noqa: ARG001
        pair.fault(do, step=3)
        one = launch([a])
        report = await a.until(lambda r: r.work is Work.FAILED and r.generation == one)
        assert report.exit is not None
        assert (report.exit.cause, report.exit.own, report.exit.step) == (cause, True, 2)
        (end,) = report.ended
        assert end.rank == 0
        if do == "raise":
            assert end.said == "ValueError: bad prompt"
        assert bool(end.core) == (do == "segv")

    pair.run(scenario)


def test_a_halt_that_saves_lets_the_gang_end_at_one_step_with_a_checkpoint(pair: Lab) -> None:
    async def scenario(a: Node, b: Node) -> None:
        one = launch([a, b])
        await training([a, b], one)
        await stepping(a, 3)
        for node in (a, b):
            node.send(Halt(generation=one, save=True, within_s=10.0, reason="stopped by an operator"))
        for node in (a, b):
            await node.until(lambda r: r.work is Work.NONE and not r.workers, 10.0)
        saved = a.now.saved
        assert a.now.step == b.now.step == saved >= 3
        assert json.loads((pair.saves / a.now.manifest).read_text())["step"] == saved
        assert a.now.generation == one  # under which it is to be committed
        assert not a.now.ended  # a clean end is no fault
        assert not b.now.ended
        two = launch([a], resume=saved)
        await training([a], two)
        assert await stepping(a, saved + 1) > saved

    pair.run(scenario)


def test_workers_that_were_to_end_and_are_told_of_another_gang_go_on_in_that_one(pair: Lab) -> None:
    """As where a node loses its power as the job is stopped: the time of the first order to end must not end the new gang."""

    async def scenario(a: Node, b: Node) -> None:
        one = launch([a, b])
        await training([a, b], one)
        await stepping(a, 3)
        first, silent = pid(a), pid(b)
        os.kill(silent, signal.SIGSTOP)
        a.send(Halt(generation=one + 1, save=True, within_s=1.0, reason="stopped by an operator"))
        a.send(Reform(place=gang(one + 2, [a], a, born=one)))
        await training([a], one + 2)
        await stepping(a, a.now.step + 40)  # of 50 ms: twice the time that the first order gave
        assert pid(a) == first
        a.send(Halt(generation=one + 3, save=True, within_s=10.0, reason="stopped by an operator"))
        await a.until(lambda r: r.work is Work.NONE and not r.workers, 10.0)
        assert a.now.saved == a.now.step > 40
        os.kill(silent, signal.SIGCONT)

    pair.run(scenario)


def test_park_keeps_process_and_state_and_a_reform_goes_on_with_them(pair: Lab) -> None:
    async def scenario(a: Node, b: Node) -> None:
        one = launch([a, b])
        await training([a, b], one)
        await stepping(a, 3)
        processes = pid(a), pid(b)
        for node in (a, b):
            node.send(Park(generation=one + 1, endpoint="", reason="held"))
        for node in (a, b):
            parked = await node.until(lambda r: r.work is Work.PARKED and r.generation == one + 1)
            assert parked.born == one
        a.send(Reform(place=gang(one + 2, [a], a, born=one)))
        await training([a], one + 2)
        last = max(steps(a, one, 0))
        await stepping(a, last + 100, 60.0)
        assert (pid(a), pid(b)) == processes
        made = steps(a, one + 2, 0)
        assert made[:100] == list(range(last + 1, last + 101))
        assert len(logs_of(a, one + 2, 0)) >= 2  # rotated by size, nothing lost between the files

    pair.run(scenario)


def test_fresh_processes_take_over_under_the_generation_that_ended_the_old_ones(pair: Lab) -> None:
    async def scenario(a: Node, b: Node) -> None:  # noqa: ARG001
        one = launch([a])
        await training([a], one)
        first = pid(a)
        # As a daemon orders where no process is warm: end those who are seated, and launch as soon as one is.
        a.send(Halt(generation=one + 1, save=False, within_s=0.0, reason="this generation starts afresh"))
        await a.until(lambda r: r.work is Work.NONE and not r.workers and r.warm)
        order = Launch(place=gang(one + 1, [a], a))
        a.send(order)
        await training([a], one + 1, 10.0)
        second = pid(a)
        assert second != first
        a.send(order)  # what was performed is passed over
        at = await stepping(a, 1)
        await stepping(a, at + 3)
        assert pid(a) == second

    pair.run(scenario)


def test_a_log_folder_that_takes_nothing_new_costs_neither_a_reform_nor_a_launch(pair: Lab) -> None:
    async def scenario(a: Node, b: Node) -> None:
        one = launch([a, b])
        await training([a, b], one)
        await stepping(a, 3)
        survivor = pid(a)
        for node in (a, b):
            (Path(node.spec.log_dir) / f"attempt_{one + 1}").write_text("no folder can be made here")
        await replaced(a, b, one)
        await training([a, b], one + 1, 15.0)
        assert pid(a) == survivor
        at = await stepping(a, 1)
        await stepping(a, at + 3)
        for node in (a, b):
            assert "takes nothing new (File exists)" in node.now.unlogged
            assert node.now.problem == ""  # that would be one of its processes
        assert "attempt_" not in b.now.workers[0].log  # it had no other yet
        for node, rank in ((a, 0), (b, 1)):
            log = Path(node.now.workers[0].log)
            text = "".join(path.read_text() for path in log.parent.glob(f"{log.name}*"))
            assert f"generation {one + 1} rank {rank}" in text
        for node in (a, b):
            node.send(Reform(place=gang(one + 2, [a, b], node, born=node.now.born, endpoint=a.now.endpoint)))
        await training([a, b], one + 2)
        assert logs_of(b, one + 2, 1)
        assert (a.now.unlogged, b.now.unlogged) == ("", "")

    pair.run(scenario)


def test_a_program_that_puts_its_own_in_place_of_its_output_is_reformed_like_any(pair: Lab) -> None:
    async def scenario(a: Node, b: Node) -> None:
        pair.fault("tee", step=2)
        one = launch([a, b])
        await training([a, b], one)
        await stepping(a, 4)
        survivor = pid(a)
        await replaced(a, b, one)
        await training([a, b], one + 1)
        at = await stepping(a, 1)
        await stepping(a, at + 3)
        assert pid(a) == survivor
        assert steps(a, one + 1, 0), "what it prints goes to the new generation's log"

    pair.run(scenario)


def test_a_daemon_that_comes_back_is_shown_everything_and_training_does_not_notice(duo: Lab) -> None:
    async def scenario(a: Node) -> None:
        one = launch([a], slots=2)
        await training([a], one)
        before = a.now
        os.kill(before.workers[1].pid, signal.SIGKILL)
        failed = await a.until(lambda r: r.work is Work.FAILED)
        assert failed.exit is not None
        assert failed.exit.slot == 1
        await gone(before.workers[0].pid)  # a seat fails whole
        await training([a], launch([a], slots=2))
        await a.disconnect()
        at = await stepping(a, 3)

        a.reports.clear()
        a.connect()
        first = await a.until(lambda _: True)
        assert (first.generation, first.work, [w.slot for w in first.workers]) == (one + 1, Work.TRAINING, [0, 1])
        assert all((seen := life(w.pid)) is not None and seen.started == w.started for w in first.workers)
        assert [end.exit.cause for end in first.ended] == ["signal 9 (SIGKILL)"]  # told again to whom it may be new
        await stepping(a, at + 3)
        a.send(wire.Acknowledge(ended=(first.ended[0].number,)))
        await a.until(lambda r: not r.ended)

    duo.run(scenario)


def test_the_environment_is_the_same_for_one_and_for_two_workers_a_node(pair: Lab, duo: Lab) -> None:
    # What a worker's libraries have read when they were loaded is what its fork server was started with.
    seen = []
    for node in (pair.nodes[0], duo.nodes[0]):
        server = environment(node.now.pid)
        seen.append({name: server[name] for name in server if name.endswith("_THREADS") or name.startswith("TORCH_")})
    assert seen[0] == seen[1]
    assert seen[0]["OMP_NUM_THREADS"] == "1"


def test_the_fork_servers_death_is_survived_and_is_nobodys_own_doing(duo: Lab) -> None:
    async def scenario(a: Node) -> None:
        await training([a], launch([a], slots=2))
        server = parent_of(pid(a))
        assert server != a.now.pid
        assert command(server) == command(a.now.pid), "it is a fork of the agent, which had imported torch already"
        assert "agent.lock" not in held(server), "it would outlive the agent"
        os.kill(server, signal.SIGKILL)
        report = await a.until(lambda r: r.work is Work.FAILED)
        assert report.exit is not None
        assert not report.exit.own
        for _ in range(
            4
        ):  # a spare that is dying may still be handed a rank: that generation fails, and the next is planned
            await a.until(lambda r: r.warm, 60.0)
            one = launch([a], slots=2)
            report = await a.until(
                lambda r, one=one: r.generation == one and r.work in {Work.TRAINING, Work.FAILED}, 60.0
            )
            if report.work is Work.TRAINING:
                break
            assert report.exit is not None
            assert not report.exit.own
        assert report.work is Work.TRAINING
        assert parent_of(pid(a)) not in (server, a.now.pid)
        assert command(parent_of(pid(a))) != command(a.now.pid), "the agent has threads by now"

    duo.run(scenario)


def test_an_agent_that_is_terminated_lets_its_workers_save_and_leaves_nothing(duo: Lab) -> None:
    async def scenario(a: Node) -> None:
        await training([a], launch([a], slots=2))
        await stepping(a, 3)
        workers = [w.pid for w in a.now.workers]
        before = set(duo.saves.glob("*"))
        await a.disconnect()
        os.kill(a.now.pid, signal.SIGTERM)
        assert await asyncio.to_thread(a.process.wait, 15) == 0
        assert not any(life(worker) for worker in workers)
        assert not any((a.runtime / "beats").iterdir())
        assert not (a.runtime / "agent.sock").exists()
        assert any(not path.name.startswith(".") for path in set(duo.saves.iterdir()) - before)
        a.reports.clear()
        a.start()
        await a.until(lambda r: r.warm, 60.0)

    duo.run(scenario)


def test_an_agent_that_is_terminated_gives_a_save_the_time_that_its_daemon_gives_it(tmp_path: Path) -> None:
    """As at a shutdown: the nodes leave together, with a save that takes longer than `agent.stop_timeout`. systemd is told."""
    told, slow = tmp_path / "notify", ("--save-s", "4", "--save-every", "1000000")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(told))
        systemd.setblocking(False)
        with lab(tmp_path, args=slow, notify=told, stop_s=0.5) as alone:

            async def scenario(a: Node) -> None:
                one = launch([a])
                await training([a], one)
                await stepping(a, 3)
                os.kill(a.now.pid, signal.SIGTERM)
                await a.until(lambda r: bool(r.stopping), 5.0)
                a.send(Halt(generation=one, save=True, within_s=20.0, reason="n00 leaves"))
                assert await asyncio.to_thread(a.process.wait, 15) == 0
                (saved,) = (path for path in alone.saves.iterdir() if not path.name.startswith("."))
                assert json.loads(saved.read_text())["step"] >= 3

            alone.run(scenario)
        assert "EXTEND_TIMEOUT_USEC=40000000" in systemd.recv(4096).decode()


def test_the_agents_death_ends_its_workers_even_a_stopped_one(duo: Lab) -> None:
    async def scenario(a: Node) -> None:
        await training([a], launch([a], slots=2))
        workers = [w.pid for w in a.now.workers]
        os.kill(workers[1], signal.SIGSTOP)
        os.kill(a.now.pid, signal.SIGKILL)
        for worker in workers:
            await gone(worker, 2.0)
        await a.disconnect()

    duo.run(scenario)


def test_what_few_need_is_imported_by_who_waits_and_by_the_fork_server_when_the_gang_trains(tmp_path: Path) -> None:
    imported = tmp_path / "imported"
    (tmp_path / "needed_by_few.py").write_text(
        f"import os\nwith open({str(imported)!r}, 'a') as file:\n    file.write(f'{{os.getpid()}} ')\n"
    )

    def importers() -> list[int]:
        return [int(pid) for pid in imported.read_text().split()] if imported.exists() else []

    async def scenario(a: Node) -> None:
        begun = time.monotonic()
        while not importers():  # nobody calls the process that is there
            assert time.monotonic() < begun + patience(20.0)
            await asyncio.sleep(0.05)
        one = launch([a])
        await training([a], one)
        waited = pid(a)
        await a.until(lambda r: r.warm and r.spares == 1)
        assert importers() == [waited, parent_of(waited)], "the one who waited, then its fork server"
        os.kill(waited, signal.SIGKILL)
        await a.until(lambda r: r.exit is not None and r.warm)
        a.send(Launch(place=gang(one + 1, [a], a)))
        await training([a], one + 1)
        await a.until(lambda r: r.warm and r.spares == 1)
        assert len(importers()) == 2, "a spare has it from its fork server"
        assert "no_such_module is not imported beforehand: ModuleNotFoundError" in a.logs(), "and nobody died of that"

    path = os.pathsep.join([str(tmp_path), *sys.path])
    with lab(tmp_path, 1, later=("no_such_module", "needed_by_few"), env={"PYTHONPATH": path}) as made:
        made.run(scenario)


def test_a_module_that_starts_threads_costs_no_process(tmp_path: Path) -> None:
    text = "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n"
    (tmp_path / "has_threads.py").write_text(text)

    async def scenario(a: Node) -> None:
        one = launch([a])
        await training([a], one)
        waited, server = pid(a), parent_of(pid(a))
        await a.until(lambda r: r.warm and r.spares == 1)
        os.kill(waited, signal.SIGKILL)
        await a.until(lambda r: r.exit is not None and r.warm)
        a.send(Launch(place=gang(one + 1, [a], a)))
        await training([a], one + 1)
        assert parent_of(pid(a)) != server, "a process that cannot fork any more is left alone"

    path = os.pathsep.join([str(tmp_path), *sys.path])
    with lab(tmp_path, 1, later=("has_threads",), env={"PYTHONPATH": path}) as made:
        made.run(scenario)


def test_a_fork_server_that_is_not_ready_to_hear_it_is_not_ended_by_being_asked_for_the_rest() -> None:
    with subprocess.Popen(["sleep", "60"]) as other:  # as Python is until its first line
        try:
            assert not warm.complete(other.pid)
            time.sleep(0.1)
            assert other.poll() is None
        finally:
            other.kill()
    assert not warm.complete(other.pid), "it is gone"


def test_an_agent_that_ends_hears_no_signal_that_would_keep_it_from_clearing_away(tmp_path: Path) -> None:
    async def scenario(a: Node) -> None:
        assert (a.runtime / "fork.sock").exists()
        a.send(wire.Quit(reason="the test is over"))
        while a.process.poll() is None:
            for number in (warm.COMPLETE, signal.SIGTERM):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(a.process.pid, number)
            await asyncio.sleep(0.0005)
        assert a.process.returncode == 0
        assert not (a.runtime / "fork.sock").exists()

    with lab(tmp_path, 1) as made:
        made.run(scenario)


def test_a_module_that_cannot_be_imported_is_named_and_an_agent_without_a_daemon_ends(tmp_path: Path) -> None:
    async def scenario(a: Node) -> None:
        assert "No module named 'no_such_module'" in a.now.problem
        assert not a.now.warm
        starter.kill()
        starter.wait()
        assert a.process.poll() is None, "a daemon leads it"
        await a.disconnect()
        assert await asyncio.to_thread(a.process.wait, 8) == 0, "it does not wait for a start that it puts off"

    starter = subprocess.Popen(["sleep", "600"])
    try:
        with lab(tmp_path, 1, preload=("no_such_module",), led=(starter.pid,)) as made:
            made.run(scenario)
    finally:
        starter.kill()
        starter.wait()


def test_that_a_gang_has_parted_to_grow_is_told_at_once_as_vaults_follow_it():
    trains, parted = (Report(work=Work.JOINING, generation=14, step=9, phase=phase) for phase in ("update", MEETING))
    assert news(trains, 0, grows=True) != news(parted, 0, grows=True)
    assert news(trains, 0) == news(parted, 0), "another reform has no more reports for it"
