"""`elasticrl events` and `elasticrl logs`, asked of real control sockets: who reads them is a person, unless he says --json."""

import asyncio
import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from elasticrl.cli import render
from elasticrl.cli.main import build
from elasticrl.daemon.control import Control
from elasticrl.daemon.history import KEPT, History

STEP = {
    "event": "ppo.step",
    "at": "2026-11-23T16:00:01.250000+00:00",
    "node": "n0",
    "step": 7,
    "seconds": {"update": 0.5},
}
ADVICE = {**STEP, "event": "ppo.advice", "step": 8, "rule": "padding", "text": "pack the rows"}
LOG = f"loading the model\n[Step 7] update: 500ms\n{json.dumps(STEP)}\n{{not JSON\n{json.dumps(ADVICE)}\nlast words"


class Machine:
    """Daemons as far as they are asked for lines: their sockets, their events, and where their workers write."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.logs: dict[str, list[dict[str, Any]]] = {}  # by node
        self.histories: dict[str, History] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self._open: list[Control] = []

    def node(self, name: str, *, job: str = "j") -> History:
        home = self.folder / job / name
        home.mkdir(parents=True)
        history = self.histories[name] = History()
        logs = self.logs[name] = []

        async def answer(verb: str, question: Mapping[str, Any], asker: object) -> Any:  # noqa: ARG001
            assert verb == "logs"
            return logs

        self._open.append(Control(home / "control.sock", answer, {"events": history.read}))
        self._wait(self._open[-1].open())
        return history

    def says(self, node: str, at: str, event: str, **fields: Any) -> None:
        history = self.histories[node]
        line = {"at": at, "level": "info", "job": "j", "node": node, "event": event, **fields}
        self._loop.call_soon_threadsafe(history, None, "", line)

    def writes(self, node: str, rank: int, text: str, *, generation: int = 1) -> Path:
        log = self.folder / f"attempt_{generation}" / f"rank_{rank}.log"
        log.parent.mkdir(exist_ok=True)
        log.write_text(text)
        self.logs[node][:] = [entry for entry in self.logs[node] if entry["rank"] != rank]
        self.logs[node].append({"rank": rank, "pid": 1, "log": str(log)})
        return log

    def close(self) -> None:
        for control in self._open:
            self._wait(control.close())
        self._wait(self._hang_up())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _hang_up(self) -> None:
        """Who followed has gone, which a daemon notices at its next line."""
        readers = asyncio.all_tasks() - {asyncio.current_task()}
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)

    def _wait(self, work: Any) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(10.0)

    def asked(self, *arguments: str) -> Result:
        return CliRunner().invoke(build(arguments), [*arguments, "--run-dir", str(self.folder)])

    @contextmanager
    def followed(self, *arguments: str) -> Iterator["subprocess.Popen[str]"]:
        command = [sys.executable, "-m", "elasticrl.cli.main", *arguments, "--follow", "--run-dir", str(self.folder)]
        before = signal.signal(
            signal.SIGINT, signal.default_int_handler
        )  # ignored in a shell's background, and inherited
        try:
            process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        finally:
            signal.signal(signal.SIGINT, before)
        with process:
            try:
                yield process
                process.send_signal(signal.SIGINT)
                assert process.wait(10.0) == 0
            finally:
                process.kill()


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    made = Machine(tmp_path)
    try:
        yield made
    finally:
        made.close()


def read(process: "subprocess.Popen[str]", count: int) -> list[str]:
    assert process.stdout is not None
    return [process.stdout.readline().rstrip("\n") for _ in range(count)]


def test_a_workers_log_is_shown_to_people_and_each_thing_once(machine: Machine) -> None:
    machine.node("n0")
    log = machine.writes("n0", 0, LOG + "\n")
    said = machine.asked("logs").output.splitlines()
    assert said == [
        f"==> rank 0: {log} <==",
        "loading the model",
        "[Step 7] update: 500ms",  # and not the event that says the same
        "{not JSON",
        "2026-11-23T16:00:01.250 info    n0 ppo.advice  pack the rows  step=8 seconds=(update 0.5) rule=padding",
        "last words",
    ]


def test_json_is_the_events_alone_as_they_were_written(machine: Machine) -> None:
    machine.node("n0")
    machine.writes("n0", 0, LOG)
    assert machine.asked("logs", "--json").output.splitlines() == [json.dumps(STEP), json.dumps(ADVICE)]


def test_the_last_lines_of_a_rank_are_found_in_a_file_that_is_longer_than_one_looks_at_first(machine: Machine) -> None:
    machine.node("n0")
    machine.node("n1")
    machine.writes("n0", 0, "nobody asks for this\n")
    machine.writes("n1", 1, "the first\n" + f"{json.dumps(STEP)}\n" * 20_000 + "the last\n")
    assert machine.asked("logs", "1", "-n", "2", "--json").output.splitlines() == [json.dumps(STEP)] * 2
    assert machine.asked("logs", "1", "-n", "1").output.splitlines()[1:] == ["the last"]
    assert machine.asked("logs", "1", "-n", "100000").output.splitlines()[1] == "the first"
    refused = machine.asked("logs", "3")
    assert (refused.exit_code, refused.stderr) == (1, "no worker of rank 3 runs on this machine; ranks here: 0, 1\n")


def test_followed_logs_go_on_into_the_next_generations_file_and_to_new_nodes(machine: Machine) -> None:
    machine.node("n0")
    log = machine.writes("n0", 0, "before\n")
    with machine.followed("logs") as process:
        assert read(process, 2) == [f"==> rank 0: {log} <==", "before"]
        with log.open("a") as file:
            file.write("a torn ")
            file.flush()
            file.write(f"line\n{json.dumps(ADVICE)}\n")
        first, second = read(process, 2)
        assert (first, second.split("  ")[-2]) == ("a torn line", "pack the rows")
        later = machine.writes("n0", 0, "again\n", generation=2)
        assert read(process, 2) == [f"==> rank 0: {later} <==", "again"]
        machine.node("n1")
        beside = machine.writes("n1", 1, "here too\n", generation=2)
        assert read(process, 2) == [f"==> rank 1: {beside} <==", "here too"]


def test_events_are_those_of_all_of_the_jobs_daemons_here_in_the_order_of_their_clocks(machine: Machine) -> None:
    machine.node("n0")
    machine.node("n1")
    machine.says("n0", "2026-11-23T16:00:01Z", "plan.adopted", generation=1, reason="3 nodes train")
    machine.says("n1", "2026-11-23T16:00:02Z", "worker.exited", cause="signal 9 (SIGKILL)", slot=0)
    machine.says("n0", "2026-11-23T16:00:03Z", "neighbour.suspected", neighbour="n1")
    names = [line.split()[2:4] for line in machine.asked("events").output.splitlines()]
    assert names == [["n0", "plan.adopted"], ["n1", "worker.exited"], ["n0", "neighbour.suspected"]]
    of_n1 = [json.loads(line)["event"] for line in machine.asked("events", "n1", "--json").output.splitlines()]
    assert of_n1 == ["worker.exited", "neighbour.suspected"]
    with machine.followed("events") as process:
        assert [line.split()[3] for line in read(process, 3)] == [
            "plan.adopted",
            "worker.exited",
            "neighbour.suspected",
        ]
        machine.says("n1", "2026-11-23T16:00:04Z", "leader.elected")
        assert read(process, 1)[0].endswith("n1 leader.elected")


def test_of_several_jobs_one_must_be_named(machine: Machine) -> None:
    machine.node("n0")
    machine.node("n9", job="other")
    machine.says("n9", "2026-11-23T16:00:01Z", "leader.elected")
    assert "several jobs run here (j, other)" in machine.asked("events").stderr
    assert "leader.elected" in machine.asked("events", "--job", "other").output


def test_colours_are_for_terminals() -> None:
    line = {
        "at": "2026-11-23T16:00:01Z",
        "level": "warning",
        "node": "n1",
        "event": "worker.exited",
        "cause": "signal 9",
    }
    assert "\033" not in render.event(line)  # a test's output is none
    assert render.event(line, colour=True).startswith("\033[2m2026")


def test_events_of_a_node_are_not_those_of_others_whose_names_begin_or_end_alike(machine: Machine) -> None:
    machine.node("n0")
    reasons = (
        "n1/2 died (lease)",
        "n10/1 died (lease)",
        "n1.b/1 died",
        "rack-n1 died",
        "it waits for n1.",
        "without n1",
    )
    for number, reason in enumerate(reasons):
        machine.says("n0", f"2026-07-01T10:00:0{number}", "plan.adopted", reason=reason)
    lines = [json.loads(line) for line in machine.asked("events", "n1", "--json").output.splitlines()]
    assert [line["reason"] for line in lines] == ["n1/2 died (lease)", "it waits for n1.", "without n1"]


def test_commits_in_a_row_do_not_push_out_what_befell_the_job() -> None:
    history = History()
    history(None, "", {"event": "plan.adopted", "at": "2026-11-27T00:00:01+00:00"})
    for step in range(3 * KEPT):
        history(None, "", {"event": "checkpoint.committed", "step": step, "at": "2026-11-27T00:00:02+00:00"})
    history(None, "", {"event": "worker.exited", "at": "2026-11-27T00:00:03+00:00"})
    history(None, "", {"event": "checkpoint.committed", "step": 9000, "at": "2026-11-27T00:00:04+00:00"})
    kept = [(line["event"], line.get("step")) for line in history.since(datetime(1970, 1, 1, tzinfo=UTC))]
    commits = [("checkpoint.committed", 3 * KEPT - 1), ("worker.exited", None), ("checkpoint.committed", 9000)]
    assert kept == [("plan.adopted", None), *commits]
