"""`elasticrl run` in torchrun's words: what they mean here, what is left out with a sentence, what is refused."""

import os
from pathlib import Path

import pytest

from elasticrl.cli import torchrun
from elasticrl.cli.script import Script, name_of
from elasticrl.cli.torchrun import IDLE, MEANS, OWN_MEETING, REFUSED, VALUED, Asked, asked, gpus_here
from elasticrl.diagnose.program import absent, imports, module_file

TRAIN = Script(program="train.py", args=("--lr", "1e-4"))


def of(line: str) -> Asked:
    return asked(line.split())


@pytest.mark.parametrize(
    ("line", "own", "script"),
    [
        ("a.yaml ppo.lr=1", "a.yaml ppo.lr=1", None),
        ("--nodes 2 -- t.py -- -x", "--nodes 2", Script(program="t.py", args=("--", "-x"))),
        ("--nodes=2 -- t.py", "--nodes 2", Script(program="t.py")),
        ("a.yaml -- train.py --lr 1e-4", "a.yaml", TRAIN),
        ("--", "", Script(program="")),
        ("--workers 2 train.py --lr 1e-4", "--workers 2", TRAIN),
        ("--standalone --nproc-per-node=2 train.py --lr 1e-4", "--workers 2", TRAIN),
        ("--standalone --nproc_per_node 2 -- train.py --lr 1e-4", "--workers 2", TRAIN),
        (
            "--nnodes 2:4 --nproc-per-node 8 -m pkg.train --nodes 3",
            "--nodes 4 --workers 8 membership.min_nodes=2",
            Script(program="pkg.train", args=("--nodes", "3"), module=True),
        ),
        ("--nnodes=2 train.py", "--nodes 2 membership.min_nodes=2", Script(program="train.py")),
        ("-- -m pkg.train -m", "", Script(program="pkg.train", args=("-m",), module=True)),
        ("-m -- pkg.train", "", Script(program="pkg.train", module=True)),
        ("--max-restarts 3 a.yaml", "a.yaml recovery.no_progress_limit=4", None),
        ("--shutdown-timeout 30 train.py", "recovery.grace=30s", Script(program="train.py")),
        (
            "--allow data --adopt --level told --every 0.5 a.yaml",
            "--allow data --adopt --level told --every 0.5 a.yaml",
            None,
        ),
        ("job.program=train.py", "job.program=train.py", None),
        ("--help", "--help", None),
    ],
)
def test_what_means_something_here_is_understood(line: str, own: str, script: Script | None) -> None:
    assert of(line) == Asked(own=tuple(own.split()), script=script)


def test_logs_go_where_torchrun_was_told_to_put_them() -> None:
    assert of("--log-dir /var/my-logs train.py").own == ('telemetry.log_dir="/var/my-logs"',)


@pytest.mark.parametrize(("visible", "gpus"), [(None, 3), ("0,3", 2), ("", 0), ("-1", 0)])
def test_the_gpus_are_counted_that_a_job_would_see(visible: str | None, gpus: int, tmp_path: Path) -> None:
    for name in ("nvidia0", "nvidia1", "nvidia2", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert gpus_here({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}, tmp_path) == gpus


def test_a_number_of_workers_can_be_that_of_the_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    for value in ("cpu", "auto"):
        assert of(f"--nproc-per-node {value} train.py").own == ("--workers", str(os.cpu_count()))
    assert of("--nproc-per-node gpu train.py").problems == ("--nproc-per-node gpu: there is no GPU here.",)


def test_what_has_no_use_here_is_left_out_and_said_once_for_each_reason() -> None:
    found = of(
        "--rdzv-backend=c10d --rdzv-id 7 --rdzv-endpoint h:29400 --master-port=1 -r 3 -t3 --tee 3 train.py --lr 1e-4"
    )
    assert (found.script, found.own, found.problems) == (TRAIN, (), ())
    assert found.notes == (
        f"--rdzv-backend, --rdzv-id, --rdzv-endpoint, --master-port: left out, as {OWN_MEETING}.",
        "-r, -t, --tee: left out, as each rank writes into a log of its own, and rank 0's is shown.",
    )
    assert of("--nnodes 2 --rdzv-endpoint localhost:0 train.py").problems == ()


def test_all_that_is_wrong_is_said_at_once() -> None:
    found = of(
        "--nnodes 4:2 --nproc-per-node many --no-python --numa-binding node --bogus --max-restarts x --nodes 3 --workers 2"
    )
    assert [problem.partition(":")[0] for problem in found.problems] == [
        "--nnodes 4", "--nproc-per-node many", "--no-python", "--numa-binding", "--bogus", "--max-restarts x",
        "--nnodes and --nodes say the same", "--nproc-per-node and --workers say the same",
    ]  # fmt: skip
    assert of("--nproc-per-node").problems == ("--nproc-per-node needs a value.",)
    assert of("-m").problems == ("-m needs the name of a module: -m pkg.train.",)


@pytest.mark.parametrize("option", ["--rdzv-endpoint=h1:29400", "--node-rank 1", "--master-addr h1", "--local-addr h1"])
def test_one_machine_of_several_is_sent_to_the_daemon(option: str) -> None:
    (problem,) = of(f"--nnodes 2 {option} train.py").problems
    assert "plays all nodes on this machine" in problem


def test_each_option_of_torchrun_is_in_the_table() -> None:
    from torch.distributed.run import get_args_parser

    known = {*MEANS, *IDLE, *REFUSED, *VALUED, *torchrun.DONE, *torchrun.MODULE, "-h", "--help"}
    names = {name.replace("_", "-") for action in get_args_parser()._actions for name in action.option_strings}
    assert names <= known, names - known
    valued = {
        name.replace("_", "-")
        for action in get_args_parser()._actions
        if action.nargs is None
        for name in action.option_strings
    }
    assert valued == VALUED & names


def test_a_module_is_found_without_being_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "pkg"
    (package / "inner").mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('imported')\n")
    (package / "train.py").write_text("import json\nfrom pkg import inner\nimport not_there_at_all\n")
    (package / "inner" / "__main__.py").write_text("import json\n")
    monkeypatch.chdir(tmp_path)
    assert module_file("pkg.train", tmp_path) == package / "train.py"
    assert module_file("pkg.inner", tmp_path) == package / "inner" / "__main__.py"
    assert module_file("pkg.nothing", tmp_path) is None
    assert module_file("json.tool", tmp_path) is not None
    assert imports("pkg.train") == ("json",)
    assert imports("not_there.at_all") == ()


@pytest.mark.parametrize(
    ("program", "why"),
    [
        ("pkg.train", "train.py needs the module not_there_at_all, which is not here"),
        ("not_there_at_all.train", "there is no module not_there_at_all.train here"),
        ("-m pkg.train", "name the module alone: job.program=pkg.train"),
        ("json.tool", ""),
    ],
)
def test_what_speaks_against_a_module_is_said_before_anything_starts(
    program: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from elasticrl.config import read

    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "__init__.py").touch()
    (tmp_path / "pkg" / "train.py").write_text("import not_there_at_all\n")
    monkeypatch.chdir(tmp_path)
    conf = tmp_path / "job.yaml"
    conf.write_text(f"job: {{name: j, level: supervised, program: '{program}'}}\nstore: {{embedded: true}}\n")
    tree = read(conf, ()).tree
    assert tree is not None
    found = absent(tree)
    assert why in found
    assert bool(why) == bool(found)


def test_two_scripts_of_one_name_are_two_jobs() -> None:
    one, other = name_of(Script(program="/a/My Train.py")), name_of(Script(program="/b/My Train.py"))
    assert one != other
    assert one.startswith("my-train-")
    assert name_of(Script(program="/a/7.py")).startswith("s-7-")
    assert name_of(Script(program="pkg.train", module=True)).startswith("pkg-train-")
