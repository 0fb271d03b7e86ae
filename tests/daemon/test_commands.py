"""Every command of the README's table, run as an operator would, on one job: while it trains, as it is stopped, and after."""

import json
import os
import re
import signal
from pathlib import Path

import pytest
from test_quick_start import BLOCKS, PATIENCE_S, ROOT, answer, clone, elasticrl, model, said, until  # noqa: F401 - a fixture

TABLE = [
    cell
    for row in re.findall(r"^\| (`elasticrl .*?) \|", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    for cell in re.findall(r"`elasticrl ([a-z-]+(?: [a-z]+(?:\\\|[a-z]+)+)?)", row)
]
VERBS = {
    f"{verb} {name}".strip()
    for verb, _, names in (cell.partition(" ") for cell in TABLE)
    for name in names.split(r"\|")
}
STARTED = {"run", "daemon", "agent", "demo"}  # `run` starts daemons and they agents; `demo` has tests of its own

pytestmark = pytest.mark.timeout(600)


def test_every_command_of_the_table_does_what_it_says(clone: Path) -> None:  # noqa: F811 - the fixture
    done: set[str] = set()

    def runs(command: str, phrase: str = "", code: int = 0) -> str:
        """It ends with that code and says that; the verb is done."""
        ended, text = said(clone, f"elasticrl {command}")
        assert (ended, phrase in text) == (code, True), f"elasticrl {command}: {ended}\n{text}"
        words = command.split()
        done.add(" ".join(words[: 2 if words[0] in {"config", "checkpoint"} else 1]))
        return text

    def comes(command: str, phrase: str) -> str:
        """The same, once it says that: it asks about what happens elsewhere."""
        until(lambda: phrase in said(clone, f"elasticrl {command}")[1] or None, f"{phrase!r} of elasticrl {command}")
        return runs(command, phrase)

    model(clone / "run" / "demo")
    runs("config check configs/one-machine.yaml", "ok: configs/one-machine.yaml")
    runs("config show configs/one-machine.yaml ppo.lr=1e-2", "# command line")
    runs("config diff configs/one-machine.yaml configs/cluster.yaml", "job.name")
    runs("config schema", '"properties"')
    runs("plan configs/one-machine.yaml model.path=run/demo/model", "activations")
    runs("version --verbose", "torch")
    runs("doctor --config configs/one-machine.yaml", "versions: ")

    ppo = next(line for block in BLOCKS for line in block if "model.path=" in line)
    with elasticrl(clone, ppo, f"vault.dir={clone}/vault", "job.steps=100000", "checkpoint.every=3") as run:
        try:
            until(lambda: answer(clone, "elasticrl status"), "the first steps")
            rows = json.loads(runs("top --json", '"rank"'))
            os.kill(rows[1]["pid"], signal.SIGKILL)
            comes("incidents last", "SIGKILL")
            comes("status", "1 fault in")
            runs("events n1", "n1")
            runs("logs 0", "rank 0")
            runs("diagnose", "VERDICT  nothing that is known speaks of a fault")
            runs("pause --yes")
            comes("status", "PAUSED")
            runs("resume")
            comes("status", "TRAINING")
            runs("admit n1", "n1")
            runs("drain n2 --yes")
            comes("status", "2 of 2 nodes")
            comes("status", "committed")
            runs("stop --yes")
            out, _ = run.communicate(timeout=PATIENCE_S)
            assert (run.returncode, "stopped, as somebody asked for" in out, "why: " in out) == (75, True, False), out
        finally:
            run.kill()
            run.wait()

    home = "run/checkpoints/one-ppo"
    runs("support-bundle run --config configs/one-machine.yaml -o all.tar", "all.tar")
    runs("report run --text", "INCIDENTS")
    runs(f"verify {home}", "same bits")
    runs(f"audit {home}", "exactly once")
    runs(f"checkpoint list {home}", "step-")
    runs(f"checkpoint verify {home}", "good")
    runs(f"checkpoint prune {home} --keep-last 1 --yes")
    runs(f"checkpoint export {home} hf", "safetensors")
    runs(f"checkpoint assemble {home} whole", "", 2)
    trace = next((clone / "run" / "state").glob("one-ppo/*/trace/*.jsonl")).relative_to(clone)
    runs(f"replay {trace}")
    assert done == VERBS - STARTED, "the table has others"
