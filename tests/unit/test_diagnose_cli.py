"""`elasticrl diagnose --log`: the form that scripts rely on, the page that people read, and nothing heavy imported."""

import gzip
import json
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from elasticrl.cli import diagnose
from elasticrl.diagnose import foreign

DATA = Path(__file__).parent.parent / "data" / "nccl_logs"
app = typer.Typer()
app.callback()(lambda: None)
diagnose.register(app)


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["diagnose", *map(str, arguments)])


def test_json_has_the_promised_form() -> None:
    result = run("--log", DATA / "odd_size_of_one_in_four.txt", "--json")
    assert result.exit_code == 0
    answer = json.loads(result.stdout)
    assert set(answer) == {"verdict", "evidence"}
    verdict = answer["verdict"]
    assert (verdict["class"], verdict["culprit"], verdict["confidence"]) == (
        "desync",
        {"ranks": [2], "nodes": []},
        "high",
    )
    assert isinstance(verdict["cause"], str)
    assert isinstance(verdict["remedy"], str)
    assert len(verdict["because"]) == 4
    fact = answer["evidence"][2]
    promised = ("kind", "rank", "op", "seq", "numel_in", "numel_out", "timeout_ms", "elapsed_ms", "group", "at")
    assert [fact[name] for name in promised] == [
        "watchdog_timeout", 2, "ALLREDUCE", 77, 2048, 2048, 600000, 600002, "3(mesh_dp)", "08:00:02.713449198",
    ]  # fmt: skip
    assert fact["line"].startswith("[rank2]:[E207")


def test_the_page_says_who_what_why_since_when_how_sure_and_what_to_do() -> None:
    page = run("--log", DATA / "oom_of_one_rank_others_wait.txt").stdout
    assert "VERDICT     oom_gpu: out of GPU memory (confidence high)" in page
    assert "CULPRIT     rank 5" in page
    assert "about 02:00:13" in page
    for title in ("CAUSE", "DO", "BECAUSE", "UNLESS", "READ"):
        assert f"\n{title}" in page
    assert "oom_of_one_rank_others_wait.txt:7" in page
    assert max(map(len, page.splitlines())) < 340


def test_several_files_and_directories_are_read_together(tmp_path: Path) -> None:
    for rank in (0, 1):
        (tmp_path / f"rank_{rank}.log").write_text(
            "RuntimeError: [pair.cc:534] Connection closed by peer [192.0.2.9]:4\n"
        )
    with gzip.open(tmp_path / "rank_2.log.gz", "wt") as stream:
        stream.write("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 3 GiB\n")
    answer = json.loads(run("--log", tmp_path, DATA / "rccl_healthy.txt", "--json").stdout)
    assert answer["verdict"]["class"] == "oom_gpu"
    assert answer["verdict"]["culprit"]["ranks"] == [2]


def test_without_a_log_and_a_daemon_it_cannot_be_done_and_says_what_can(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(foreign, "processes", list)  # somebody else's job may run on this machine
    result = run()
    assert result.exit_code == 1
    assert "elasticrl diagnose --log FILE" in result.stderr


def test_a_log_that_is_not_there_is_refused_with_the_reason(tmp_path: Path) -> None:
    result = run("--log", tmp_path / "none.log")
    assert result.exit_code == 2
    assert "No such file" in result.stderr
    assert run("--log", tmp_path).exit_code == 2


def test_it_imports_nothing_heavy() -> None:
    program = (
        "import sys; import elasticrl.cli.diagnose, elasticrl.diagnose.logs, elasticrl.diagnose.report; "
        "import elasticrl.core.judge.judge, elasticrl.diagnose.recorder, elasticrl.diagnose.environment; "
        "print(sorted({'torch', 'pydantic', 'grpc', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], timeout=60, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
