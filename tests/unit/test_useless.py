"""Options that would do nothing are refused, all at once, with why."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from elasticrl.cli.main import build

CONFIG = str(Path(__file__).parents[2] / "configs" / "one-machine.yaml")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (["doctor", "--me", "a", "--least", "3"], "--me, --least: only for the test of other nodes"),
        (["plan", CONFIG, "--graph", "--json", "--workers", "2"], "--workers, --json: only without --graph"),
        (["diagnose", "--now", "x.log"], "--now: it asks the job that runs here"),
        (["diagnose", "--log", "x.log", "--job", "j", "--run-dir", "r"], "--job, --run-dir: only for the job"),
        (["diagnose", "--world", "3"], "--world: only for logs"),
        (["report", ".", "--text", "-o", "x.html"], "--output: only without --text"),
    ],
)
def test_what_would_do_nothing_is_refused(line: list[str], said: str) -> None:
    result = CliRunner().invoke(build(line), line)
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith(said)
    assert not result.stdout


def test_a_default_is_no_option_that_was_given() -> None:
    line = ["plan", CONFIG, "--graph"]
    result = CliRunner().invoke(build(line), line)
    assert result.exit_code == 0, result.output
