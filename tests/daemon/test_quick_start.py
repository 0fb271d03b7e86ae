"""The quick start, run as it is written: its commands are read from the page, in the order in which a new user meets them. And
the table in docs/COMMANDS.md, all of it, on one job: while it trains, as it is stopped, and after.
"""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import pytest

from chaos.patience import patience
from elasticrl.ppo import tiny

ROOT = Path(__file__).parents[2]
BLOCKS = [
    [line.split(" #")[0].strip() for line in block.splitlines()]
    for block in re.findall(
        r"```sh\n(.*?)```", (ROOT / "docs" / "QUICKSTART.md").read_text(encoding="utf-8"), re.DOTALL
    )
]
SHOWN = re.search(
    r"It ends like this [^\n]*:\n\n```text\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL
)
TABLE = [
    cell
    for row in re.findall(
        r"^\| (`elasticrl .*?) \|", (ROOT / "docs" / "COMMANDS.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    for cell in re.findall(r"`elasticrl ([a-z-]+(?: [a-z]+(?:\\\|[a-z]+)+)?)", row)
]
VERBS = {
    f"{verb} {name}".strip()
    for verb, _, names in (cell.partition(" ") for cell in TABLE)
    for name in names.split(r"\|")
}
STARTED = {"run", "daemon", "agent", "demo"}  # `run` starts daemons and they agents; `demo` has tests of its own

ELSEWHERE = {name: value for name, value in os.environ.items() if name != "ELASTICRL_RUN_DIR"}  # of another job

T = TypeVar("T")
PATIENCE_S = 240.0  # on a machine that is busy with other tests
DEMO_S = 180.0  # what the first command may take, once all is installed: the README says two to three minutes

pytestmark = pytest.mark.timeout(900)


@pytest.fixture
def clone() -> Iterator[Path]:
    """A folder that looks like the repository's, for what is made below it. Its name is short: sockets lie there."""
    with tempfile.TemporaryDirectory(prefix="elasticrl-quick-") as folder:
        for name in ("configs", "docs"):
            (Path(folder) / name).symlink_to(ROOT / name)
        yield Path(folder)


def elasticrl(folder: Path, command: str, *more: str) -> subprocess.Popen[str]:
    """A command of the page, in that folder, with sockets of its own."""
    words = command.split()
    assert words[0] == "elasticrl"
    return subprocess.Popen(
        [sys.executable, "-m", "elasticrl.cli.main", *words[1:], *more], cwd=folder, text=True, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        env={**ELSEWHERE, "XDG_RUNTIME_DIR": str(folder), "PYTHONPATH": str(ROOT), "COLUMNS": "200"},
    )  # fmt: skip


def said(folder: Path, command: str, *more: str) -> tuple[int, str]:
    """Its exit code, and what it printed."""
    with elasticrl(folder, command, *more) as process:
        text, _ = process.communicate(timeout=PATIENCE_S * 2)
    return process.returncode, text


def until(look: Callable[[], T | None], what: str) -> T:
    deadline = time.monotonic() + patience(PATIENCE_S)
    while (found := look()) is None:
        assert time.monotonic() < deadline, f"not within {PATIENCE_S:.0f} s: {what}"
        time.sleep(0.1)
    return found


def answer(folder: Path, command: str, *more: str) -> str | None:
    """What it printed; None if it could not."""
    code, text = said(folder, command, *more)
    return text if code == 0 else None


def rows_of(text: str) -> list[dict[str, Any]] | None:
    """The rows of `top`, once there are several workers."""
    rows: list[dict[str, Any]] = json.loads(text)
    return rows if len(rows) > 1 else None


def last_words(folder: Path) -> str:
    """The ends of the demonstration's logs, which go with the folder."""
    logs = sorted((folder / "run" / "demo" / "log").rglob("*.log"))
    tails = ("\n".join(log.read_text(errors="replace").splitlines()[-60:]) for log in logs)
    return "\n".join(f"==> {log.name}\n{tail}" for log, tail in zip(logs, tails, strict=True))


@pytest.mark.slow  # two minutes
def test_make_run_and_the_report_do_what_the_first_block_says(clone: Path) -> None:
    make, activate, report = BLOCKS[0]
    steps = subprocess.run([*make.split(), "--dry-run"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert steps.splitlines()[-1] == ".venv/bin/elasticrl demo"
    assert activate == ". .venv/bin/activate"
    begun = time.monotonic()
    code, text = said(clone, "elasticrl demo")
    took_s = time.monotonic() - begun
    assert code == 0, text + last_words(clone)
    assert took_s <= DEMO_S, f"it took {took_s:.0f} s:\n{text}"
    for line in (
        "kill -9 of the worker on n1",
        "kill -9 of all of n2",
        "verdict   dead_rank: n1",
        "verdict   dead_node: n2",
        "each used exactly once",
        "undisturbed run: yes",
        "in the last 5",
    ):
        assert line in text
    assert SHOWN
    for line in SHOWN[1].splitlines():
        if line.strip() != "...":
            like = re.sub(r"\d+", r"\\d+", re.escape(line.strip()).replace(r"\ ", r"\s").replace(r"\s\s", r"\s+"))
            assert re.search(like, text), f"README shows {line!r}"
    code, text = said(clone, report)
    assert (code, "60 steps on 3 nodes, 2 faults" in text) == (0, True), text
    assert "When it learned it" in (clone / "report.html").read_text(encoding="utf-8")


@pytest.fixture
def running(clone: Path) -> Iterator[subprocess.Popen[str]]:
    check, run = next(block for block in BLOCKS if any(line.startswith("elasticrl run") for line in block))
    assert said(clone, check)[0] == 0
    with elasticrl(clone, run, f"vault.dir={clone}/vault") as process:  # /dev/shm is for all users of this machine
        try:
            yield process
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.communicate(timeout=PATIENCE_S)
            finally:
                process.kill()


def model(folder: Path) -> None:
    """A model and prompts where `make run` leaves them."""
    tiny.write(folder / "model", hidden=32, layers=2)
    rows = [json.dumps({"prompt": f"{number * 7919 % 10**4:04}"}) for number in range(256)]
    (folder / "prompts.jsonl").write_text("\n".join(rows) + "\n")


def test_a_worker_of_the_example_is_killed_and_the_job_goes_on(clone: Path, running: subprocess.Popen[str]) -> None:
    top, status, incidents, logs = next(block for block in BLOCKS if any("incidents" in line for line in block))

    def trains(after: int) -> dict[str, Any] | None:
        assert running.poll() is None, running.stdout.read() if running.stdout else ""
        text = answer(clone, status, "--json")
        picture = json.loads(text) if text else {"generation": 0}
        return picture if picture["generation"] > after else None

    before = until(lambda: trains(0), "the first steps")
    rows = json.loads(until(lambda: answer(clone, top, "--json"), "what top shows"))
    assert any(row["bytes_s"] > 0 for row in rows), "top says what the network carries"
    os.kill(rows[1]["pid"], signal.SIGKILL)
    after = until(lambda: trains(before["generation"]), "steps after the kill")
    assert after["step"] >= before["step"]
    told = until(lambda: answer(clone, incidents), "the incident")
    last = until(lambda: (trains(0) or {}).get("last"), "status says what happened")
    assert "SIGKILL" in last["said"]
    assert "1 fault in" in (answer(clone, status) or "")
    assert "SIGKILL" in told
    assert f"rank {rows[1]['rank']}" in told
    text = until(lambda: answer(clone, logs), "rank 2, whose node may have been let in a moment later")
    assert "==> rank 2: run/log/" in text
    running.send_signal(signal.SIGTERM)  # as Ctrl-C
    out, _ = running.communicate(timeout=PATIENCE_S)
    assert running.returncode == 130, out
    assert "logs in run/log/one-machine" in out
    assert not (clone / "vault" / "one-machine").exists()


def test_every_command_of_the_table_does_what_it_says(clone: Path) -> None:
    done: set[str] = set()

    def runs(command: str, phrase: str = "", code: int = 0) -> str:
        """It ends with that code and says that; the verb is done."""
        ended, text = said(clone, f"elasticrl {command}")
        assert (ended, phrase in text) == (code, True), f"elasticrl {command}: {ended}\n{text}"
        words = command.split()
        done.add(" ".join(words[: 2 if words[0] in {"config", "checkpoint"} else 1]))
        return text

    def comes(command: str, phrase: str, code: int = 0) -> str:
        """The same, once it says that: it asks about what happens elsewhere."""
        until(lambda: phrase in said(clone, f"elasticrl {command}")[1] or None, f"{phrase!r} of elasticrl {command}")
        return runs(command, phrase, code)

    def all_run(*commands: tuple[str, str] | tuple[str, str, int]) -> None:
        """Commands that have nothing to do with each other: two at a time."""
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda command: runs(*command), commands))

    model(clone / "run" / "demo")
    all_run(
        ("config check configs/one-machine.yaml", "ok: configs/one-machine.yaml"),
        ("config show configs/one-machine.yaml ppo.lr=1e-2", "# command line"),
        ("config diff configs/one-machine.yaml configs/cluster.yaml", "job.name"),
        ("config schema", '"properties"'),
        ("plan configs/one-machine.yaml model.path=run/demo/model", "activations"),
        ("version --verbose", "torch"),
    )
    runs("doctor --config configs/one-machine.yaml", "versions: ")

    ppo = next(line for block in BLOCKS for line in block if "model.path=" in line)
    with elasticrl(clone, ppo, f"vault.dir={clone}/vault", "job.steps=100000", "checkpoint.every=3") as run:
        try:
            until(lambda: answer(clone, "elasticrl status"), "the first steps")
            rows = until(lambda: rows_of(runs("top --json")), "workers of two nodes in top")
            os.kill(rows[1]["pid"], signal.SIGKILL)
            comes("incidents last", "SIGKILL")
            comes("status", "1 fault in")
            runs("events n1", "n1")
            runs("logs 0", "rank 0")
            runs("diagnose", "VERDICT  no fault is known")
            runs("pause --yes")
            comes("status", "PAUSED", 1)  # it does not train
            runs("resume")
            comes("status", "TRAINING")
            runs("admit n1", "n1")
            runs("drain n2 --yes")
            comes("status", "drained")
            until(lambda: json.loads(said(clone, "elasticrl status --json")[1])["committed"] or None, "a commit")
            runs("stop --yes")
            out, _ = run.communicate(timeout=PATIENCE_S)
            assert (run.returncode, "stopped, as somebody asked for" in out, "why: " in out) == (75, True, False), out
        finally:
            run.kill()
            run.wait()

    home = "run/checkpoints/one-ppo"
    trace = next((clone / "run" / "state").glob("one-ppo/*/trace/*.jsonl")).relative_to(clone)
    all_run(
        ("support-bundle run --config configs/one-machine.yaml -o all.tar", "all.tar"),
        ("init --script docs/examples/trl_grpo.py -o own.yaml", "wrote own.yaml"),
        ("report run --text", "INCIDENTS"),
        (f"verify {home}", "same bits"),
        (f"audit {home}", "exactly once"),
        (f"checkpoint list {home}", "step-"),
        (f"checkpoint verify {home}", "good"),
        (f"checkpoint assemble {home} whole", "put those of all nodes there", 2),
        (f"replay {trace}", ""),
    )
    runs("certify --new-key operator.key", "operator.key")
    runs(f"certify {home} --key operator.key -o run.cert.json", "each used exactly once")
    runs("certify --check run.cert.json --key operator.key.pub")
    runs(f"checkpoint prune {home} --keep-last 1 --yes")
    runs(f"checkpoint export {home} hf", "in hf")
    assert done == VERBS - STARTED, "the table has others"


def test_a_file_that_is_not_there_is_named_before_anything_starts(clone: Path) -> None:
    ppo = next(line for block in BLOCKS for line in block if "model.path=" in line)
    code, text = said(clone, ppo)
    assert code == 2
    assert text.strip() == "data.path: run/demo/prompts.jsonl is not here; name one that is: data.path=..."
    code, text = said(clone, ppo, "job.program=train.py")
    assert (code, text.strip()) == (2, "job.program: train.py is not here; name one that is: job.program=...")


@pytest.mark.slow  # a minute
def test_a_demonstration_that_is_interrupted_leaves_nothing_behind(clone: Path) -> None:
    with elasticrl(clone, "elasticrl demo --steps 30") as process:
        assert process.stdout is not None
        shown = ""
        while "Under three daemons" not in shown:
            line = process.stdout.readline()
            assert line, shown
            shown += line
        history = clone / "run" / "demo" / "history.jsonl"
        until(lambda: history.exists() or None, "the first step under daemons")
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130, out
    assert "nothing is left running" in out
    name = f"demo-{process.pid}"
    lines = [path.read_bytes().replace(b"\0", b" ") for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists()]
    assert not [line for line in lines if name.encode() in line or str(clone).encode() in line]
    assert not list(Path(f"/dev/shm/elasticrl-demo-{os.getuid()}").glob(name))
