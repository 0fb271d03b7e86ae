"""A job that goes on from its checkpoint: with the data that it began with, or not at all."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "runtime"))

from alone import Life, live

from elasticrl.ppo import tiny
from elasticrl.runtime.chronicle import read

ROWS = [{"prompt": f"{number:03}", "chosen": f"{number:03}"[::-1], "rejected": "1"} for number in range(100)]


DPO = "algorithm: dpo, batch: 8"


def start(folder: Path, steps: int, allow: str = "", *, lanes: int = 2, ppo: str = DPO) -> Life:
    """One life of the job, alone."""
    (folder / "job.yaml").write_text(
        f"job: {{name: small, program: elasticrl.ppo, steps: {steps}}}\nnode: {{name: n0}}\nmembership: {{max_nodes: 1}}\n"
        f"checkpoint: {{dir: {folder}/run, every: 2, allow: [{allow}]}}\nvault: {{dir: {folder}/vault}}\n"
        f"store: {{embedded: true}}\nlanes: {{count: {lanes}}}\n"
        f"model: {{path: {folder}/actor}}\nrollout: {{max_tokens: 5}}\n"
        f"data: {{path: {folder}/pairs.jsonl, max_prompt: 6}}\n"
        f"reward: {{function: 'elasticrl.ppo.tasks:reverse'}}\nppo: {{{ppo}, mini_batch: 8, micro_tokens: 44, epochs: 1}}\n"
    )
    (folder / "job.py").write_text("from elasticrl.ppo.__main__ import main\n\nmain('job.yaml')\n")
    return live(folder / "job.py")


def write(folder: Path, rows: list[dict[str, str]]) -> None:
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_a_job_whose_data_were_changed_is_refused_unless_told(tmp_path: Path):
    tiny.write(tmp_path / "actor", hidden=16, layers=1)
    write(tmp_path, ROWS)
    first = start(tmp_path, 2)
    assert first.returncode == 0, first.stderr
    write(tmp_path, [*ROWS[:-1], {**ROWS[-1], "rejected": "2"}])  # as many, of the same lengths, under the same name
    refused = start(tmp_path, 4)
    assert refused.returncode != 0
    assert "data was" in refused.stderr
    assert "continue with --allow data (checkpoint.allow)" in refused.stderr
    assert max(read(tmp_path / "run" / "small").steps) == 2, "nothing was trained"
    allowed = start(tmp_path, 4, allow="data")
    assert allowed.returncode == 0, allowed.stderr
    assert max(read(tmp_path / "run" / "small").steps) == 4


@pytest.mark.slow
def test_a_job_whose_reference_was_changed_is_refused_unless_told(tmp_path: Path):
    tiny.write(tmp_path / "actor", hidden=16, layers=1)
    write(tmp_path, ROWS)
    first = start(tmp_path, 2)
    assert first.returncode == 0, first.stderr
    # The actor comes from the checkpoint, the reference from here.
    tiny.write(tmp_path / "actor", hidden=16, layers=1, seed=1)
    refused = start(tmp_path, 4)
    assert refused.returncode != 0
    assert f"of ref, read from {tmp_path}/actor, are others than the job has computed with on" in refused.stderr
    assert "continue with these: --allow frozen (checkpoint.allow)" in refused.stderr
    assert max(read(tmp_path / "run" / "small").steps) == 2, "nothing was trained"
    allowed = start(tmp_path, 4, allow="frozen")
    assert allowed.returncode == 0, allowed.stderr
    assert max(read(tmp_path / "run" / "small").steps) == 4
    again = start(tmp_path, 6)
    assert again.returncode == 0, again.stderr


@pytest.mark.slow
def test_a_job_whose_groups_were_changed_with_its_batch_is_refused_unless_told(tmp_path: Path):
    # Of as many prompts as before, so the data position says nothing of it.
    tiny.write(tmp_path / "actor", hidden=16, layers=1)
    write(tmp_path, ROWS)
    before, after = ("algorithm: grpo, " + said for said in ("batch: 8, group: 2", "batch: 16, group: 4"))
    first = start(tmp_path, 2, ppo=before)
    assert first.returncode == 0, first.stderr
    refused = start(tmp_path, 4, ppo=after)
    assert refused.returncode != 0
    assert "group was 2 and is 4" in refused.stderr
    assert max(read(tmp_path / "run" / "small").steps) == 2, "nothing was trained"
    allowed = start(tmp_path, 4, allow="batch", ppo=after)
    assert allowed.returncode == 0, allowed.stderr
    assert max(read(tmp_path / "run" / "small").steps) == 4


def test_a_job_goes_on_with_more_lanes_if_told(tmp_path: Path):
    tiny.write(tmp_path / "actor", hidden=16, layers=1)
    write(tmp_path, ROWS)
    first = start(tmp_path, 2, lanes=1)
    assert first.returncode == 0, first.stderr
    more = start(tmp_path, 4, allow="lanes", lanes=2)
    assert more.returncode == 0, more.stderr
    assert max(read(tmp_path / "run" / "small").steps) == 4
