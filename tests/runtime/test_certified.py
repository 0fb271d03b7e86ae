"""A certificate of a real run: five workers are killed, and it checks, against the run, against the model, and by replay."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from alone import live
from gang_kit import Nodes

from elasticrl.config import dumps
from elasticrl.runtime.checkpoint.manifest import MANIFEST, Manifest, seal
from elasticrl.runtime.checkpoint.place import place
from elasticrl.runtime.checkpoint.shelf import mark_committed

JOB = Path(__file__).parent / "run_job.py"
EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "supervised.py"
KILLS = ("n1", "n0", "n2", "n0", "n1")
STEPS = 24


def certify(*arguments: object, ok: int = 0) -> str:
    """What the command prints; its exit code must be `ok`."""
    done = subprocess.run(
        [sys.executable, "-m", "elasticrl.cli.main", "certify", *map(str, arguments)],
        capture_output=True, text=True, timeout=600, env=os.environ | {"COLUMNS": "200", "NO_COLOR": "1"},
    )  # fmt: skip
    assert done.returncode == ok, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


def a_run(folder: Path) -> tuple[Path, Path]:
    """With five kills: its directory, and its configuration."""
    conf = {
        "job": {"program": str(JOB), "args": ("--step-ms", "0")},
        "store": {"embedded": True},
        "checkpoint": {"dir": str(folder / "saves"), "every": 5, "keep_last": 9},
    }
    with Nodes(folder, steps=STEPS, step_ms=20.0, conf=conf) as nodes:
        nodes.plan("n0", "n1", "n2")
        for node in KILLS:
            nodes.until_new(2)
            nodes.commit()
            nodes.kill_worker(node)
            nodes.plan("n0", "n1", "n2")
        nodes.until_done()
        config = folder / "job.yaml"
        config.write_text(dumps(nodes.tree))
        return nodes.run_dir, config


@pytest.mark.long
def test_a_run_with_five_kills_has_a_certificate_that_checks_and_replays(tmp_path: Path) -> None:
    run, config = a_run(tmp_path / "job")
    key, cert, model = tmp_path / "key", tmp_path / "run.cert.json", tmp_path / "model"
    certify("--new-key", key)
    said = certify(run, "--key", key, "-o", cert)
    assert f"{STEPS} steps, {STEPS * 108} samples each used exactly once" in said
    assert "recoveries: 5" in said
    body = json.loads(cert.read_text())["body"]
    assert [each["cause"] for each in body["generations"]] == [f"generation {number}" for number in range(1, 7)]
    assert {node["name"] for node in body["nodes"]} == {"n0", "n1", "n2"}
    assert body["model"]["digest"] == body["states"][-1]["digest"]
    # Its exported model is the certified one, and the steps come to the same bits on one worker.
    export = [sys.executable, "-m", "elasticrl.cli.main", "checkpoint", "export", str(run), str(model)]
    subprocess.run(export, check=True, timeout=120, stdout=subprocess.DEVNULL)
    pub = tmp_path / "key.pub"
    again = ("--replay", "7..11", "--config", config, "--within", 120)
    assert "steps 7..11 computed again to the same bits" in certify(
        "--check", cert, "--key", pub, "--run", run, "--model", model, *again
    )
    # Another's key, another's configuration, and a model of which one bit is another one.
    other = tmp_path / "other"
    certify("--new-key", other)
    assert "it is signed with another key" in certify("--check", cert, "--key", f"{other}.pub", ok=1)
    other_seed = json.loads(config.read_text())
    other_seed["job"]["seed"] = 8
    config.write_text(json.dumps(other_seed))
    assert "the configuration is not the run's" in certify("--check", cert, "--run", run, *again, ok=1)
    (weights,) = model.glob("*.safetensors")
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    assert f"the model in {model} is not the run's" in certify("--check", cert, "--model", model, ok=1)
    # A checkpoint of which one bit is another one.
    newest = max(run.glob("step-*"))
    data_file = next(newest.glob("data-0000.distcp"))
    changed = bytearray(data_file.read_bytes())
    changed[len(changed) // 2] ^= 1
    data_file.write_bytes(changed)
    assert "was changed: its sha256 is" in certify("--check", cert, "--run", run, ok=1)


def test_a_resume_from_a_checkpoint_with_another_chain_is_told(tmp_path: Path) -> None:
    script = Path(shutil.copy(EXAMPLE, tmp_path))
    assert live(script, "--steps", "8").returncode == 0
    run = tmp_path / "run" / "supervised"
    newest = max(run.glob("step-*"))
    manifest = Manifest.decode((newest / MANIFEST).read_bytes(), "m")
    assert len(manifest.chain) == 64
    forged = (newest / MANIFEST).read_bytes().replace(manifest.chain.encode(), b"0" * 64)
    body = json.loads(forged)["body"]
    (newest / MANIFEST).write_bytes(seal(body))
    (newest / "COMMITTED").unlink()
    mark_committed(place(run), newest.name)
    life = live(script, "--steps", "12")
    assert life.returncode == 0, life.stderr
    assert "has not the chain of digests that its checkpoint names" in life.stdout
    certify("--new-key", tmp_path / "key")
    said = certify(run, "--key", tmp_path / "key", "-o", tmp_path / "c", ok=1)
    assert f"{newest.name} is a checkpoint from a fork" in said
    assert not (tmp_path / "c").exists()


def test_what_is_asked_wrongly_is_refused(tmp_path: Path) -> None:
    assert "name a run's directory" in certify(ok=2)
    assert "name the key to sign with" in certify(tmp_path, ok=2)
    assert "make one with" in certify(tmp_path, "--key", tmp_path / "absent", ok=2)
    assert "only with --check FILE" in certify(tmp_path, "--replay", "1..2", ok=2)
    assert "cannot be read" in certify("--check", tmp_path / "absent", ok=2)
    (tmp_path / "c").write_text("{}")
    assert "name the run" in certify("--check", tmp_path / "c", "--replay", "1..2", ok=2)
    assert "this is no certificate" in certify("--check", tmp_path / "c", ok=1)
