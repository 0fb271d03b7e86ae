"""`elasticrl init`: what it writes for the scripts of other people is accepted, and starts."""

import importlib.util
import os
import pty
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from elasticrl.cli.init import Asked, lines_of, problems
from elasticrl.cli.reading import read
from elasticrl.config import load
from elasticrl.contract.level import Level
from tests.levels.scripts import HERE

pytestmark = pytest.mark.timeout(240)
REFUSED = 2
SCRIPTS = {
    "ddp.py": ("loop of torch", "elasticrl.beat(step=step)"),
    "fsdp2.py": ("FSDP2 loop", "elasticrl.beat(step=step)"),
    "hf.py": ("transformers.Trainer", "Elastic, transformers.Trainer"),
    "sft.py": ("SFTTrainer", "callbacks=[elasticrl.hf.Callback()]"),
    "trl_ppo.py": ("PPOTrainer", "elasticrl.beat(step=state.global_step)"),
    "accel.py": ("Accelerate loop", "elasticrl.beat(step=step)"),
    "lightning_plain.py": ("Lightning Trainer", "elasticrl.lightning.Callback"),
    "titan.py": ("torchtitan", "elasticrl.beat(step=step)"),
}


def command(*words: str, folder: Path, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "elasticrl.cli.main", *words],
        cwd=folder, env={**os.environ, "XDG_STATE_HOME": f"{folder}/state", **env}, stdin=subprocess.DEVNULL,
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


@pytest.mark.parametrize("script", SCRIPTS)
def test_it_knows_the_trainer_and_that_the_script_resumes(script: str) -> None:
    found = read(HERE / script)
    name, following = SCRIPTS[script]
    assert (found.kind.name, found.resumes) == (name, True)
    assert any(following in (line or "") for line in (found.kind.told, found.kind.exact))


@pytest.mark.parametrize(
    ("text", "level"),
    [
        ("import elasticrl\nelasticrl.beat(step=1)", "told"),
        ("from elasticrl import beat\nbeat(step=1)", "told"),
        ("import elasticrl.hf\ncallbacks=[elasticrl.hf.Callback()]", "told"),
        ("import elasticrl\nelasticrl.beat(step=1)\n','.join([])", "told"),
        ("import elasticrl\nkept = elasticrl.keep(model=1)", "kept"),
        ("import elasticrl.hf\ncallbacks=[elasticrl.hf.Callback(keep=True)]", "kept"),
        ("import elasticrl.titan\nclass T(elasticrl.titan.Kept, object): pass", "kept"),
        ("from elasticrl import hf\nclass T(hf.Elastic, object): pass", "exact"),
        ("import elasticrl.runtime as rt\nwith rt.join() as run: pass", "exact"),
        ("import os\nos.path.join('a', 'b')", "supervised"),
    ],
)
def test_what_a_script_calls_says_its_level(tmp_path: Path, text: str, level: str) -> None:
    (tmp_path / "train.py").write_text(text)
    assert read(tmp_path / "train.py").level == level


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("level", Level)
@pytest.mark.parametrize("store", [None, "etcd-1:2379"])
def test_a_configuration_has_at_most_twelve_keys(script: str, level: str, store: str | None) -> None:
    for nodes in ("1", "1:3", "2:4"):
        asked = Asked(script=str(HERE / script), nodes=nodes, level=str(level), store=store, args=("--lr", "1e-4"))
        lines = lines_of(asked, read(HERE / script))
        assert len(lines) <= 12
        assert all(line.why for line in lines)


@pytest.mark.parametrize(
    ("script", "needs"),
    [
        ("ddp.py", "torch"),
        ("fsdp2.py", "torch"),
        ("sft.py", "trl"),
        ("accel.py", "accelerate"),
        ("lightning_plain.py", "lightning"),
    ],
)
def test_what_it_writes_is_accepted_without_a_word(tmp_path: Path, script: str, needs: str) -> None:
    if importlib.util.find_spec(needs) is None and os.environ.get("ELASTICRL_HF") != "required":
        pytest.skip(needs)  # `make hf` has it, and there it is a failure that one is missing
    done = command("init", "--script", str(HERE / script), "--nodes", "2:4", "--workers", "8", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "# Start it: elasticrl run job.yaml --nodes 4" in done.stdout
    assert "# Level told needs this" in done.stdout
    check = command("config", "check", "job.yaml", folder=tmp_path)
    assert (check.returncode, check.stdout.splitlines()[0][:3]) == (0, "ok:")
    assert yaml.safe_load((tmp_path / "job.yaml").read_text())["membership"]["min_nodes"] == 2


@pytest.mark.parametrize("level", ["kept", "exact"])
def test_a_job_of_many_workers_is_accepted_at_every_level(tmp_path: Path, level: str) -> None:
    words = (
        "--script",
        str(HERE / "ddp.py"),
        "--nodes",
        "2:4",
        "--workers",
        "8",
        "--level",
        level,
        "--store",
        "etcd-1:2379",
    )
    assert command("init", *words, folder=tmp_path).returncode == 0
    assert load(tmp_path / "job.yaml", (), {}).lanes.count == (32 if level == "exact" else 8)


def test_all_problems_are_said_at_once_and_nothing_is_written(tmp_path: Path) -> None:
    words = ("--script", "gone.py", "--nodes", "4:2", "--workers", "0", "--level", "super", "--store", "etcd")
    done = command("init", *words, folder=tmp_path)
    assert done.returncode == REFUSED
    said = done.stderr.splitlines()
    assert [line.split()[0] for line in said] == ["--script", "--nodes", "--workers", "--level", "--store"]
    assert list(tmp_path.glob("*.yaml")) == []
    assert problems(Asked(script=str(HERE / "ddp.py"), nodes="x"))[0].startswith("--nodes x: write MIN:MAX")


def test_a_file_that_is_there_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("mine: 1\n")
    done = command("init", "--script", str(HERE / "ddp.py"), folder=tmp_path)
    assert done.returncode == REFUSED
    assert "job.yaml is there already" in done.stderr
    assert (tmp_path / "job.yaml").read_text() == "mine: 1\n"


def test_a_script_without_a_resume_and_a_level_that_it_does_not_reach_are_said(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("from trl import GRPOTrainer\nGRPOTrainer().train()\n")
    done = command("init", "--script", "train.py", "--level", "exact", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "does not seem to load a checkpoint" in done.stdout
    assert "class Trainer(elasticrl.hf.Elastic, GRPOTrainer): ..." in done.stdout


def test_a_resume_that_may_take_half_a_checkpoint_is_said(tmp_path: Path) -> None:
    text = "from transformers import Trainer, trainer_utils\n"
    text += "Trainer().train(resume_from_checkpoint=trainer_utils.get_last_checkpoint('out'))\n"
    (tmp_path / "train.py").write_text(text)
    done = command("init", "--script", "train.py", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "elasticrl.hf.latest(output_dir)" in done.stdout


def test_on_a_terminal_it_asks_three_questions(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    asks = subprocess.Popen(
        [sys.executable, "-m", "elasticrl.cli.main", "init"], cwd=tmp_path, stdin=theirs, stdout=subprocess.PIPE, text=True,
        env={**os.environ, "XDG_STATE_HOME": f"{tmp_path}/state"},
    )  # fmt: skip
    os.close(theirs)
    try:
        os.write(ours, f"{HERE / 'ddp.py'}\n2:4\n8\n".encode())
        said, _ = asks.communicate(timeout=120)
    finally:
        os.close(ours)
        asks.kill()
    assert asks.returncode == 0, said
    assert [said.count(word) for word in ("Training script", "Nodes, as MIN:MAX", "Workers on each node")] == [1, 1, 1]
    written = yaml.safe_load((tmp_path / "job.yaml").read_text())
    assert (written["membership"]["min_nodes"], written["node"]["workers"], written["job"]["level"]) == (
        2,
        8,
        "supervised",
    )


@pytest.fixture
def short() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="li-") as folder:  # sockets live below it
        yield Path(folder)


def test_a_job_runs_with_what_it_wrote(short: Path) -> None:
    tmp_path = short
    (tmp_path / "own").mkdir()
    own = ("--steps", "40", "--save", f"{tmp_path}/own", "--history", f"{tmp_path}/history")
    done = command("init", "--script", str(HERE / "ddp.py"), "--nodes", "1:2", "--", *own, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    (tmp_path / "x").mkdir()
    run = command("run", "job.yaml", "--nodes", "2", folder=tmp_path, XDG_RUNTIME_DIR=f"{tmp_path}/x")
    assert run.returncode == 0, run.stdout + run.stderr
    assert "the script has ended with exit code 0 on all ranks" in run.stdout
    assert {line.split()[-1] for line in (tmp_path / "history").read_text().splitlines()} >= {"1", "40"}
