"""`elasticrl verify`, `audit` and `checkpoint` as processes, on runs that real workers made and in which some were killed."""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import kept_job
import pytest
from forked_workers import Workers
from safetensors.torch import load_file

from elasticrl.runtime.chronicle import read
from elasticrl.runtime.data.ledger import FOLDER, decode, encode


def elasticrl(*arguments: object, ok: int = 0, answer: str | None = None) -> str:
    """What a command prints; its exit code must be `ok`."""
    done = subprocess.run(
        [sys.executable, "-m", "elasticrl.cli.main", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=120,
        input=answer or "",
        env=os.environ | {"COLUMNS": "200", "NO_COLOR": "1"},
    )
    assert done.returncode == ok, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    """Three runs of 8 steps: undisturbed on one worker; on two, killed and gone on with by one; with a flipped bit."""
    root = tmp_path_factory.mktemp("runs")
    workers = Workers(2)
    found = {name: root / name for name in ("quiet", "killed", "flipped")}
    try:
        workers.run(kept_job.generation, 1, number=1, root=str(found["quiet"]), until=8)
        # Killed in step 5 (version 3 is committed), so 4 is computed again.
        kill = {"number": 2, "root": str(found["killed"]), "until": 8, "die_at": 5}
        assert workers.run(kept_job.generation, 2, answers=[0], **kill)[0] is None, "the kill never happened"
        workers.close()
        workers = Workers(2)
        workers.run(kept_job.generation, 1, number=3, root=str(found["killed"]), until=8)
        workers.run(kept_job.generation, 2, number=4, root=str(found["killed"]), until=10)
        workers.run(kept_job.generation, 1, number=5, root=str(found["flipped"]), until=8, flip_at=3)
        yield found
    finally:
        workers.close()


def test_a_run_is_found_below_what_is_named(runs: dict[str, Path], tmp_path: Path) -> None:
    shutil.copytree(runs["killed"], tmp_path / "job" / "checkpoints" / "killed")
    assert "each used exactly once" in elasticrl("audit", tmp_path / "job")
    assert "each to the same bits" in elasticrl("verify", tmp_path / "job")
    assert "each used exactly once" in elasticrl("audit", tmp_path)
    shutil.copytree(runs["quiet"], tmp_path / "job" / "undisturbed" / "quiet")
    said = elasticrl("audit", tmp_path / "job", ok=2)
    assert f"name one: {tmp_path}/job/checkpoints/killed, {tmp_path}/job/undisturbed/quiet" in said


@pytest.fixture
def copy(runs: dict[str, Path], tmp_path: Path) -> Path:
    """The killed run, to be broken."""
    return Path(shutil.copytree(runs["killed"], tmp_path / "run"))


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 0x10
    path.write_bytes(data)


def test_a_run_that_was_killed_has_the_bits_of_an_undisturbed_one(runs: dict[str, Path]):
    assert elasticrl("verify", runs["quiet"], runs["killed"]) == "the same bits in 8 steps (0 to 7)\n"
    assert "10 steps in 3 generations" in elasticrl("verify", runs["killed"])
    assert "1 step computed again, each to the same bits" in elasticrl("verify", runs["killed"])
    found = json.loads(elasticrl("verify", runs["quiet"], runs["killed"], "--json"))
    assert found["ok"] is True
    assert found["compared"]["steps"] == 8
    assert (found["runs"][1]["rerun"], found["runs"][1]["torn"]) == (1, 0)


def test_the_first_step_where_runs_part_is_named(runs: dict[str, Path]):
    said = elasticrl("verify", runs["quiet"], runs["flipped"], ok=1)
    assert said.startswith("they part at step 3 (")
    found = json.loads(elasticrl("verify", runs["quiet"], runs["flipped"], "--json", ok=1))
    assert found["compared"]["parted"] == 3
    quiet, flipped = read(runs["quiet"]).steps, read(runs["flipped"]).steps
    assert found["compared"]["digests"] == [quiet[3], flipped[3]]


def test_a_step_computed_again_to_other_bits_fails_the_run_by_itself(copy: Path):
    for path in sorted((copy / "digests").iterdir()):
        lines = [decode(line) for line in path.read_bytes().splitlines()]
        if any(line and line.get("generation") == 3 for line in lines):
            changed = [{**line, "digest": "0" * 16} if line and line.get("step") == 4 else line for line in lines]
            path.write_bytes(b"".join(encode(line) for line in changed if line))
    said = elasticrl("verify", copy, ok=1)
    assert re.search(r"step 4 has 2 different digests: 0{16} \(generation 3, w0-\w+\) and \w{16} \(generation 2", said)
    assert json.loads(elasticrl("verify", copy, "--json", ok=1))["ok"] is False


def test_nothing_to_read_is_refused(tmp_path: Path):
    assert "There is no chronicle in" in elasticrl("verify", tmp_path, ok=2)
    assert "There is no ledger in" in elasticrl("audit", tmp_path, ok=2)
    assert "is not a directory" in elasticrl("checkpoint", "list", tmp_path / "nowhere", ok=2)
    assert elasticrl("checkpoint", "list", tmp_path) == f"no checkpoints at {tmp_path}\n"
    assert "there is no checkpoint at" in elasticrl("checkpoint", "verify", tmp_path, ok=2)


def test_the_audit_proves_exactly_once_through_a_kill(runs: dict[str, Path]):
    said = elasticrl("audit", runs["killed"])
    assert "240 samples in 10 steps and 3 generations: each used exactly once" in said
    found = json.loads(elasticrl("audit", runs["killed"], "--json", "--through", 9))
    assert (found["ok"], found["samples"]) == (True, 240)
    assert found["superseded"] > 0
    assert "up to step 9 only" in elasticrl("audit", runs["killed"], "--through", 10, ok=1)


def test_the_audit_names_a_sample_that_was_lost(copy: Path):
    # Generation 3's record of step 4, lane 2 is dropped; generation 2's is superseded and doesn't count.
    for path in sorted((copy / FOLDER).iterdir()):
        rows = [row for line in path.read_bytes().splitlines() if (row := decode(line))]
        path.write_bytes(b"".join(encode(row) for row in rows if row.get("record", [])[2:6] != [3, 4, 0, 2]))
    said = elasticrl("audit", copy, ok=1)
    assert "NOT exactly once, 6 findings: step 4: sample" in said
    assert json.loads(elasticrl("audit", copy, "--json", ok=1))["ok"] is False


def test_nodes_directories_side_by_side_are_one_run(runs: dict[str, Path], tmp_path: Path):
    for number, name in enumerate(("ledger", "digests")):
        for path in sorted((runs["killed"] / name).iterdir()):
            node = tmp_path / f"n{(number + int('w1' in path.name)) % 2}" / name
            node.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, node)
    assert "240 samples" in elasticrl("audit", tmp_path)
    assert "the same bits in 10 steps" in elasticrl("verify", tmp_path, runs["killed"])


def test_checkpoints_are_listed_newest_first(runs: dict[str, Path]):
    said = elasticrl("checkpoint", "list", runs["killed"])
    names = re.findall(r"^step-\S+", said, re.MULTILINE)
    assert names == [f"step-{n:08d}-g{g}" for n, g in ((9, 4), (7, 3), (5, 3), (3, 2), (1, 2))]
    assert said.count("committed") == 5
    found = json.loads(elasticrl("checkpoint", "list", f"file://{runs['killed']}/checkpoints", "--json"))
    assert [row["step"] for row in found["checkpoints"]] == [9, 7, 5, 3, 1]
    assert found["checkpoints"][0]["lanes"] == kept_job.LANES


def test_verify_names_the_bad_shard_and_its_node(copy: Path):
    assert "0 of 5 bad; a run would resume from step-00000009-g4" in elasticrl("checkpoint", "verify", copy)
    flip(copy / "checkpoints" / "step-00000009-g4" / "data-0001.distcp", 2000)
    said = elasticrl("checkpoint", "verify", copy, ok=1)
    assert "step-00000009-g4: data-0001.distcp (shard 1, written by n01) was changed" in said
    assert "1 of 5 bad; a run would resume from step-00000007-g3" in said
    found = json.loads(elasticrl("checkpoint", "verify", copy, "--json", ok=1))
    assert found["newest_good"] == "step-00000007-g3"
    assert found["checkpoints"][0]["problems"][0]["node"] == "n01"
    assert "good, committed" in elasticrl("checkpoint", "verify", copy, "step-00000007-g3")
    assert "no checkpoint step-7" in elasticrl("checkpoint", "verify", copy, "step-7", ok=2)


def test_prune_asks_and_never_takes_the_newest_good_one(copy: Path):
    def names() -> list[str]:
        return sorted(path.name for path in (copy / "checkpoints").iterdir())

    before = names()
    for name in ("step-00000009-g4", "step-00000007-g3"):
        flip(copy / "checkpoints" / name / "data-0000.distcp", 2000)
    assert "Say --yes" in elasticrl("checkpoint", "prune", copy, "--keep-last", 1, ok=2)
    assert elasticrl("checkpoint", "prune", copy, "--keep-last", 1, "--dry-run").split() == [
        "step-00000007-g3",
        "step-00000003-g2",
        "step-00000001-g2",
    ]
    assert names() == before
    found = json.loads(elasticrl("checkpoint", "prune", copy, "--keep-last", 1, "--yes", "--json"))
    assert len(found["names"]) == 3
    assert names() == ["step-00000005-g3", "step-00000009-g4"]  # the newest, and the newest good one
    assert "may go" in elasticrl("checkpoint", "prune", copy, "--keep-last", 1, "--yes")
    for name in names():
        flip(copy / "checkpoints" / name / "data-0000.distcp", 3000)
    assert "No checkpoint at" in elasticrl("checkpoint", "prune", copy, "--keep-last", 1, "--yes", ok=1)


def test_prune_clears_what_broken_saves_left_and_leaves_a_save_that_goes_on(copy: Path):
    for name in ("step-00000008-g3", "step-00000010-g4", "step-00000011-g4"):
        (copy / "checkpoints" / f".saving-{name}").mkdir()
    two_hours_ago = time.time() - 7200.0
    os.utime(
        copy / "checkpoints" / ".saving-step-00000008-g3", (two_hours_ago, two_hours_ago)
    )  # of an earlier generation
    os.utime(copy / "checkpoints" / ".saving-step-00000010-g4", (1.0, 1.0))
    gone = elasticrl("checkpoint", "prune", copy, "--keep-last", 9, "--yes").split()
    assert gone[:2] == [".saving-step-00000008-g3", ".saving-step-00000010-g4"]
    left = [path.name for path in (copy / "checkpoints").glob(".saving-*")]
    assert left == [".saving-step-00000011-g4"]


def test_export_writes_safetensors_from_the_newest_good_one(copy: Path, tmp_path: Path):
    flip(copy / "checkpoints" / "step-00000009-g4" / "data-0001.distcp", 2000)
    (tmp_path / "config.json").write_text("{}")
    said = elasticrl("checkpoint", "export", copy, tmp_path / "out", "--beside", tmp_path / "config.json")
    assert "step 9.0 of generation 4 is not good" in said
    assert "step-00000007-g3: 2 files" in said
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert {name: tuple(t.shape) for name, t in tensors.items()} == {
        "0.weight": (65, 3),
        "0.bias": (65,),
        "2.weight": (2, 65),
        "2.bias": (2,),
    }
    assert "exists already" in elasticrl("checkpoint", "export", copy, tmp_path / "out", ok=1)
    bad = ("checkpoint", "export", copy, tmp_path / "bad", "--name", "step-00000009-g4")
    assert "shard 1, written by n01" in elasticrl(*bad, ok=1)
    assert not (tmp_path / "bad").exists()


def test_looking_at_checkpoints_imports_no_torch(runs: dict[str, Path]):
    script = (
        "import sys; from elasticrl.cli.main import main\n"
        "try: main(sys.argv[1:])\nexcept SystemExit as e: assert not e.code, e.code\n"
        "heavy = [n for n in ('torch', 'grpc', 'numpy') if n in sys.modules]; assert not heavy, heavy"
    )
    for verb in (("verify",), ("audit",), ("checkpoint", "list"), ("checkpoint", "verify")):
        subprocess.run([sys.executable, "-c", script, *verb, str(runs["quiet"])], check=True, timeout=60)
