"""Each trainer makes the same bits on one worker, two and three, and through kills; every sample is used exactly once."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import hf_job
import pytest
import torch
from gang_kit import Nodes, digests
from safetensors.torch import load_file

from elasticrl.ppo import tiny
from elasticrl.runtime.data.audit import audit

STEPS, LANES = hf_job.STEPS, 5


def nodes(
    folder: Path,
    kind: str,
    models: Path,
    *args: str,
    copies: int = 1,
    step_ms: float = 0.0,
    steps: int = 0,
    **more: Any,
) -> Nodes:
    """A gang of the job `kind`, with these arguments of its trainer."""
    made = Nodes(folder, steps=steps, lanes=LANES, copies=copies, program="hf_job")
    made.args = [kind, "--folder", str(models), "--step-ms", str(step_ms), "--more", json.dumps(more), *args]
    return made


def proof(run_dir: Path, steps: int = STEPS) -> None:
    found = audit(run_dir)
    assert found.ok, found.sentence
    assert found.steps == steps, found.sentence


def alone(folder: Path, kind: str, models: Path, *args: str, steps: int = STEPS, **more: Any) -> dict[int, str]:
    """The digests of a gang of one that nothing happens to."""
    with nodes(folder, kind, models, *args, copies=0, **more) as one:
        one.plan("n0")
        one.until_done()
        proof(one.run_dir, steps)
        return digests(one.run_dir)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for kind in hf_job.KINDS:
        hf_job.model_of(folder, kind)
    return folder


@pytest.fixture(scope="module")
def undisturbed(models: Path, tmp_path_factory: pytest.TempPathFactory):
    """By trainer, the digests of a gang of one."""
    found: dict[str, dict[int, str]] = {}

    def of(kind: str) -> dict[int, str]:
        if kind not in found:
            found[kind] = alone(tmp_path_factory.mktemp(kind), kind, models)
        return found[kind]

    return of


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("kind", hf_job.KINDS)
def test_any_number_of_workers_makes_the_same_bits(tmp_path: Path, models, undisturbed, kind: str, world: int):
    with nodes(tmp_path, kind, models) as gang:
        gang.plan(*(f"n{i}" for i in range(world)))
        gang.until_done()
        assert digests(gang.run_dir) == undisturbed(kind)
        proof(gang.run_dir)


@pytest.mark.parametrize("kind", hf_job.KINDS)
def test_kills_joins_and_leaves_cost_no_bit_and_no_sample(tmp_path: Path, models, undisturbed, kind: str):
    with nodes(tmp_path, kind, models, step_ms=100.0) as gang:
        gang.plan("n0", "n1", "n2")
        gang.until_new(1)
        survivor = gang.workers["n2"].process.pid
        for victim in ("n1", "n0", "n1", "n0"):  # of any rank, and of the one that logs
            gang.kill_worker(victim)
            gang.plan("n0", "n1", "n2")
            gang.until_new(1)
        gang.lose("n1")
        gang.plan("n0", "n2")
        gang.until_new(1)
        assert gang.workers["n2"].process.pid == survivor
        gang.plan("n2", "n0", "n3")
        gang.until_done()
        assert digests(gang.run_dir) == undisturbed(kind)
        proof(gang.run_dir)


def test_adapters_with_dropout_are_exact_too(tmp_path: Path, models):
    undisturbed = alone(tmp_path / "alone", "sft", models, "--lora")
    with nodes(tmp_path / "gang", "sft", models, "--lora", step_ms=100.0) as gang:
        gang.plan("n0", "n1", "n2")
        gang.until_new(2)
        gang.kill_worker("n1")
        gang.plan("n0", "n1", "n2")
        gang.until_done()
        assert digests(gang.run_dir) == undisturbed


def test_an_evaluation_changes_no_bit(tmp_path: Path, models, undisturbed):
    out = tmp_path / "model"
    how = {"eval_strategy": "steps", "eval_steps": 3, "per_device_eval_batch_size": hf_job.ROWS}
    with nodes(tmp_path, "grpo", models, "--model-out", str(out), **how) as gang:
        gang.plan("n0", "n1")
        gang.until_done()
        assert digests(gang.run_dir) == undisturbed("grpo")
    told = [line for line in json.loads((out / "log.json").read_text()) if "eval_loss" in line]
    assert [line["step"] for line in told] == [3, 6, 9, 12]


def test_a_job_that_has_lost_all_memory_goes_on_from_the_disk(tmp_path: Path, models):
    constant = {"lr_scheduler_type": "constant", "warmup_steps": 0}
    undisturbed = alone(tmp_path / "alone", "sft", models, **constant)
    out = tmp_path / "model"
    with nodes(tmp_path, "sft", models, "--model-out", str(out), copies=0, max_steps=5, **constant) as gang:
        gang.plan("n0")
        gang.until_done()
        assert gang.resume == 5
        gang.lose("n0")
        gang.args[gang.args.index("--more") + 1] = json.dumps({"max_steps": STEPS, **constant})
        gang.rung = 4
        gang.plan("n1", "n2")
        gang.until(lambda: "from step 5.0" in gang.workers["n1"].text, "word of where it goes on", 90.0)
        gang.until_done()
        assert digests(gang.run_dir) == undisturbed
        proof(gang.run_dir)
    steps = [line["step"] for line in json.loads((out / "log.json").read_text()) if "loss" in line]
    assert steps == [2, 4, 6, 8, 10, 12], "what was logged before is known"


@pytest.mark.slow
def test_the_example_learns(tmp_path: Path):
    script = Path(__file__).parents[2] / "docs" / "examples" / "trl_grpo.py"
    said = subprocess.run(
        [sys.executable, str(script), "--steps", "40"],
        cwd=tmp_path,
        check=True,
        timeout=280,
        capture_output=True,
        text=True,
    ).stdout
    rewards = [float(found) for found in re.findall(r"'reward': '([-0-9.e]+)'", said)]
    assert len(rewards) == 8
    assert rewards[-1] > rewards[0] + 0.15
    assert (tmp_path / "run" / "trl-grpo" / "model.safetensors").exists()


def test_what_is_logged_is_of_all_lanes_and_survives_who_logs(tmp_path: Path, models):
    logs = []
    for name, kills in (("alone", 0), ("gang", 2)):
        out = tmp_path / name / "model"
        with nodes(
            tmp_path / name, "sft", models, "--model-out", str(out), step_ms=100.0, copies=min(kills, 1)
        ) as gang:
            members = ("n0", "n1", "n2") if kills else ("n0",)
            gang.plan(*members)
            for _ in range(kills):
                gang.until_new(2)
                gang.kill_worker("n0")
                gang.plan("n1", "n2", "n0")
            gang.until_done()
        lines = json.loads((out / "log.json").read_text())
        logs.append(
            [
                {key: value for key, value in line.items() if "runtime" not in key and "per_sec" not in key}
                for line in lines
            ]
        )
    assert logs[0] == logs[1]
    assert [line["step"] for line in logs[0]] == [2, 4, 6, 8, 10, 12, 12]
    assert logs[0][-2]["loss"] < 0.9 * logs[0][0]["loss"], "it learns"


def test_a_callback_that_stops_the_training_ends_the_job_for_all(tmp_path: Path, models, undisturbed):
    with nodes(tmp_path, "sft", models, "--stop", "7", step_ms=100.0) as gang:
        gang.plan("n0", "n1")
        gang.until_new(2)
        gang.kill_worker("n1")
        gang.plan("n0", "n1")
        gang.until_done()
        proof(gang.run_dir, 7)
        assert digests(gang.run_dir) == {step: undisturbed("sft")[step] for step in range(8)}


@pytest.mark.parametrize("kind", hf_job.KINDS)
def test_the_stock_trainer_comes_to_the_same_weights(tmp_path: Path, models, kind: str):
    """In one process, with the same samples in the same micro-batches, to the accuracy of floats."""
    out, steps = tmp_path / "model", 5
    more: dict[str, Any] = {"max_steps": steps, "train_sampling_strategy": "sequential", "optim": "adamw_torch"}
    with nodes(tmp_path, kind, models, "--fixed", "--model-out", str(out), copies=0, **more) as one:
        one.plan("n0")
        one.until_done()
    more |= {"gradient_accumulation_steps": LANES} | ({"shuffle_dataset": False} if kind == "grpo" else {})
    command = [sys.executable, hf_job.__file__, kind, "--folder", str(models), "--stock", "--fixed"]
    command += ["--model-out", str(tmp_path / "stock"), "--more", json.dumps(more)]
    subprocess.run(command, check=True, cwd=tmp_path, timeout=200)
    before, ours, theirs = (
        load_file(Path(place) / "model.safetensors")
        for place in (hf_job.model_of(models, kind), out, tmp_path / "stock")
    )
    assert theirs.keys() == ours.keys()
    moved = max(float((theirs[name] - before[name]).abs().max()) for name in ours)
    assert moved > 3e-3
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[name], rtol=0.0, atol=2e-5, msg=name)
    logs = [json.loads((place / "log.json").read_text()) for place in (out, tmp_path / "stock")]
    losses, norms = ([[line[name] for line in log if "loss" in line] for log in logs] for name in ("loss", "grad_norm"))
    assert losses[0] == pytest.approx(losses[1], abs=2e-4)
    assert norms[0] == pytest.approx(norms[1], rel=1e-3)


def test_a_node_with_another_base_model_under_its_adapters_ends(tmp_path: Path, models):
    mine = tmp_path / "models"
    shutil.copytree(models, mine)
    with nodes(tmp_path, "sft", mine, "--lora", step_ms=200.0) as gang:
        gang.plan("n0", "n1")
        gang.until_new(2)
        gang.kill_worker("n1")
        tiny.write(hf_job.model_of(mine, "sft"), hidden=32, layers=1, heads=2, seed=1)
        gang.plan("n0", "n1")
        odd = gang.workers["n1"]
        odd.process.join(100)
        assert "that are not trained are others on rank 1 than the job has computed with" in odd.text
        assert gang.workers["n0"].process.exitcode is None, "the others wait for a good one"


@pytest.mark.parametrize(
    ("kind", "more", "said"),
    [
        ("sft", {"gradient_accumulation_steps": 4}, f"set gradient_accumulation_steps=1 and lanes.count to .*: {4 * LANES}"),
        ("grpo", {"per_device_train_batch_size": 4, "generation_batch_size": 12}, "must be a multiple of the second"),
        ("grpo", {"num_iterations": 2}, "num_iterations is 2: a step has one update"),
        ("plain", {"optim": "adafactor"}, r"Adafactor keeps exp_avg_sq_row of shape \[64\] for a parameter"),
        ("plain", {"lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "epoch"}, "must be a function of the step"),
        ("sft", {"max_steps": STEPS + 1}, "Set job.steps to 0"),
        ("plain", {"train_sampling_strategy": "group_by_length"}, "the order is the job's own"),
    ],
)  # fmt: skip
def test_what_cannot_be_done_is_refused_with_what_to_do(
    tmp_path: Path, models, kind: str, more: dict[str, Any], said: str
):
    with nodes(tmp_path, kind, models, copies=0, steps=STEPS, **more) as gang:
        gang.plan("n0")
        worker = gang.workers["n0"]
        worker.process.join(100)
        assert worker.process.exitcode == 1
        assert re.search(said, worker.text), worker.text[-2000:]
