"""What the verbs of operators ask before they do something, and that what they print can be copied where several jobs run."""

import asyncio
import json
import os
import pty
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from elasticrl.cli.main import build
from elasticrl.daemon.control import Asker, Control, Refused
from elasticrl.status.picture import Picture, Row

HOLDS = Picture(
    job="mine", state="HOLDING", generation=3, step=166, committed=160, nodes=1, known=2, needs=2, unsaved=6, node="n0",
    reason="1 of 2 nodes; see elasticrl status", here="waits: elasticrl stop ends the job",
    rows=(
        Row(node="n0", member="n0/1", state="parked", leader=True, rank=0, step=166),
        Row(node="n1", member="n1/1", state="gone"),
    ),
    advice=("n1 is gone: start elasticrl there again. If it is not to come back: elasticrl drain n1.",),
)  # fmt: skip
ENDS = (
    "job mine ends on all nodes at step 160, which is committed; too few are here to save: the 6 steps since are in memory "
    "alone. The daemons end with it (exit code 75). Say --yes to do it."
)
ANSWERS = {
    "pause": "job mine pauses at the next step; go on with: elasticrl resume",
    "resume": "job mine goes on",
}


class Daemon:
    """A control socket that answers as a daemon does."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.picture, self.asked = folder, HOLDS, list[str]()

    async def answer(self, verb: str, question: Mapping[str, Any], _: Asker) -> Any:
        if verb == "status":
            return asdict(self.picture)
        self.asked.append(verb)
        if verb not in ANSWERS:
            raise Refused(
                f"{verb} is not done; ask again: elasticrl {' '.join(filter(None, (verb, question.get('node'))))}"
            )
        return ANSWERS[verb]

    def told(self, *words: str) -> Result:
        return CliRunner().invoke(build(words), [*words, "--run-dir", str(self.folder)])


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    (tmp_path / "mine" / "n0").mkdir(parents=True)
    made, loop = Daemon(tmp_path), asyncio.new_event_loop()
    control = Control(tmp_path / "mine" / "n0" / "control.sock", made.answer, {})
    loop.run_until_complete(control.open())
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield made

    async def end() -> None:
        await asyncio.sleep(0.1)  # who came last may not have been let in yet, and asyncio forgets him then
        await control.close()
        answering = asyncio.all_tasks() - {asyncio.current_task()}
        await asyncio.wait_for(asyncio.gather(*answering, return_exceptions=True), 5.0)
        await asyncio.sleep(0.01)

    asyncio.run_coroutine_threadsafe(end(), loop).result(10)
    loop.call_soon_threadsafe(loop.stop)
    thread.join(10)
    loop.close()


@pytest.mark.parametrize(
    ("words", "asks"),
    [
        (["pause"], "job mine: no node makes steps any more until `elasticrl resume`. Say --yes to do it."),
        (
            ["pause", "--job", "mine"],
            "job mine: no node makes steps any more until `elasticrl resume --job mine`. Say --yes to do it.",
        ),
        (
            ["stop"],
            ENDS,
        ),
        (["drain", "n1"], "job mine: n1 is gone; nobody waits for it any more. Say --yes to do it."),
        (["drain"], "job mine: n0 leaves; the others reform without it (well under a second). Say --yes to do it."),
    ],
)  # fmt: skip
def test_what_is_asked_names_the_job_and_says_what_will_happen(daemon: Daemon, words: list[str], asks: str) -> None:
    said = daemon.told(*words)
    assert (said.exit_code, said.stderr) == (2, asks + "\n")
    assert daemon.asked == []


def test_a_job_that_trains_is_said_to_save(daemon: Daemon) -> None:
    daemon.picture = replace(HOLDS, unsaved=0)
    assert "job mine saves and ends on all nodes." in daemon.told("stop").stderr


def test_commands_in_answers_and_refusals_name_the_job_that_was_named(daemon: Daemon) -> None:
    assert daemon.told("pause", "--yes").stdout == ANSWERS["pause"] + "\n"
    assert daemon.told("pause", "--yes", "--job", "mine").stdout == f"{ANSWERS['pause']} --job mine\n"
    assert daemon.told("stop", "--yes", "--job", "mine").stderr.endswith("ask again: elasticrl stop --job mine\n")
    assert daemon.told("drain", "n2", "--yes", "--job", "mine").stderr.endswith("elasticrl drain n2 --job mine\n")


def test_what_status_shows_and_prints_as_json_names_the_job_that_was_named(daemon: Daemon) -> None:
    lines = daemon.told("status", "--job", "mine").stdout.splitlines()
    assert "n0 (this node): waits: elasticrl stop --job mine ends the job" in lines
    plain = json.loads(daemon.told("status", "--json", "--job", "mine").stdout)
    assert plain["advice"][0].endswith("elasticrl drain n1 --job mine.")
    assert plain["reason"].endswith("elasticrl status --job mine")
    assert "--job" not in daemon.told("status", "--json").stdout


@pytest.mark.parametrize(("state", "code"), [("FINISHED", 0), ("STOPPED", 1)])
def test_status_of_a_run_that_is_over_says_how_it_ended_and_by_its_exit_code(
    tmp_path: Path, state: str, code: int
) -> None:
    # Found by a reader of the README: of a run that had finished it was 1, and nothing on stdout with --json.
    (tmp_path / "mine").mkdir()
    note = {
        "job": "mine",
        "state": state,
        "step": 40,
        "committed": 40,
        "reason": "so",
        "at": time.time(),
        "left": "/a/b/c",
    }
    (tmp_path / "mine" / "ended.json").write_text(json.dumps(note))
    asked = ["status", "--job", "mine", "--run-dir", str(tmp_path)]
    said = CliRunner().invoke(build(asked), asked)
    assert said.exit_code == code
    assert "job mine ended" in (said.stdout if code == 0 else said.stderr)
    plain = CliRunner().invoke(build(asked), [*asked, "--json"])
    assert plain.exit_code == code
    assert json.loads(plain.stdout)["state"] == state
    drain = CliRunner().invoke(build(["drain"]), ["drain", "n1", *asked[1:]])
    assert (drain.exit_code, drain.stdout) == (1, ""), "what is over cannot be asked for anything"


def test_a_job_that_is_not_here_is_not_taken_for_no_job_at_all(daemon: Daemon) -> None:
    said = daemon.told("status", "--job", "minee")
    assert (said.exit_code, said.stderr) == (
        1,
        "no daemon of the job minee is here; jobs that run here: mine. Say which: --job mine\n",
    )


@pytest.mark.parametrize("keyboard", [True, False], ids=["terminal", "file"])
def test_who_leaves_the_watched_status_by_ctrl_c_is_told_so_by_the_exit_code(daemon: Daemon, keyboard: bool) -> None:
    # Found by a newcomer: it was 0 or 1, as the picture said, where the README says 130.
    terminal, inside = pty.openpty()
    command = [sys.executable, "-m", "elasticrl.cli.main", "status", "--watch", "--run-dir", str(daemon.folder)]
    reads, writes = os.pipe()
    out, text, deadline = terminal if keyboard else reads, "", time.monotonic() + 60
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # it may be ignored, as below `make &`
    try:
        watching = subprocess.Popen(
            command, stdin=inside, stdout=inside if keyboard else writes, env={**os.environ, "TERM": "xterm"}
        )
    finally:
        signal.signal(signal.SIGINT, before)
    try:
        while "HOLDING" not in text:
            assert time.monotonic() < deadline, text
            if select.select([out], [], [], 1.0)[0]:
                text += os.read(out, 65536).decode(errors="replace")
        watching.send_signal(signal.SIGINT)
        assert watching.wait(30) == 130
    finally:
        watching.kill()
        watching.wait()
        for handle in (terminal, inside, reads, writes):
            os.close(handle)


def test_a_store_of_the_jobs_own_is_not_called_one_without_endpoints() -> None:
    config = Path(__file__).parents[2] / "configs" / "one-machine.yaml"
    said = CliRunner().invoke(build(["status"]), ["status", "--store", str(config), "--job", "mine"])
    assert said.exit_code == 2
    assert "one-machine.yaml is embedded: it runs as long as the job, beside its daemons" in said.stderr
    assert said.stderr.endswith("without --store: elasticrl status --job mine\n")
