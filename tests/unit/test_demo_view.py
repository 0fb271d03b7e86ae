"""The demonstration's view: lines where nobody looks, and on a terminal what changes below them, gone when it ends."""

import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from elasticrl.cli.demo import Show, Stuck, job, learned
from elasticrl.config import load

SCRIPT = """
import sys
from dataclasses import asdict
from pathlib import Path
from elasticrl.cli.demo import Lines, View
from elasticrl.status.picture import Picture, Row
lines = Lines(Path(sys.argv[1]))
lines.read()
with View() as view:
    view.line("   step  15  kill -9 of [n1]'s worker")
    view.picture = asdict(Picture(job="demo", state="TRAINING", reason="all train", rows=(
        Row(node="n1", member="n1/1", state="training", rank=1, step=15, phase="rollout"),)))
    view.draw(lines)
    view.line("   verdict   dead_rank: n1")
"""


def shown(tmp_path: Path, *, terminal: bool) -> str:
    notes = tmp_path / "history.jsonl"
    notes.write_text("".join(json.dumps({"step": step, "reward": step / 8, "at": step}) + "\n" for step in range(8)))
    command = [sys.executable, "-c", SCRIPT, str(notes)]
    if not terminal:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
    ours, theirs = pty.openpty()
    env = {**os.environ, "TERM": "xterm", "COLUMNS": "100", "LINES": "30"}
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=env)
    os.close(theirs)
    data = b""
    try:
        while more := os.read(ours, 65536):
            data += more
    except OSError:  # the other end is closed
        pass
    os.close(ours)
    assert process.wait() == 0, data.decode()
    return data.decode()


def test_without_a_terminal_there_are_lines_alone(tmp_path: Path) -> None:
    assert shown(tmp_path, terminal=False) == "   step  15  kill -9 of [n1]'s worker\n   verdict   dead_rank: n1\n"


def test_on_a_terminal_nodes_phases_and_reward_stand_below_the_lines_and_go_at_the_end(tmp_path: Path) -> None:
    text = shown(tmp_path, terminal=True)
    assert "kill -9 of [n1]'s worker" in text
    assert "verdict   dead_rank: n1" in text
    for piece in ("TRAINING", "rollout", "reward ▁▃▅▇"):
        assert piece in text, text
    assert "\033[?25h" in text, "the cursor is back"
    after = text[text.rindex("verdict   dead_rank: n1") :]
    assert "\033[2K" in after, "what changed is wiped away"


@pytest.mark.parametrize(
    ("rewards", "said"),
    [
        ([0.1] * 5 + [0.3] * 20 + [0.7] * 5, "0.10 in the first 5 steps, 0.70 in the last 5"),
        ([0.1] * 5 + [0.9] * 20 + [0.1] * 5, "0.10 in the first 5 steps, 0.10 in the last 5: it has NOT learned"),
        ([0.1] * 29 + [1.0], "it has NOT learned"),  # one lucky step
        ([0.7] * 30, "it has NOT learned"),  # it knew before
        ([0.1] * 25 + [0.35] * 5, "it has NOT learned"),
    ],
)
def test_a_model_that_knows_no_more_than_at_first_has_not_learned(rewards: list[float], said: str) -> None:
    knows, told = learned(rewards)
    assert said in told
    assert knows == ("NOT" not in said)


def test_a_folder_that_cannot_be_one_is_refused_with_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("precious")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(Stuck, match=r"cannot be made \(Not a directory\): name another with --folder"):
            Show(folder=folder, steps=1, device="cpu").prepare()


def test_paths_may_have_in_them_what_yaml_knows_as_its_own(tmp_path: Path) -> None:
    odd = tmp_path / "RL, v2 #3: {x}"
    file = tmp_path / "job.yaml"
    file.write_text(job("demo-1", odd, Path("/v, #"), steps=30, device="cpu"))
    tree = load(file)
    assert (tree.checkpoint.dir, tree.vault.dir) == (str(odd / "checkpoints"), "/v, #")


def test_a_folder_with_somebody_elses_job_is_left_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("job: {name: mine, program: train.py}\n")
    (tmp_path / "train.py").write_text("precious")
    with pytest.raises(Stuck, match="not of an earlier demo"):
        Show(folder=tmp_path, steps=1, device="cpu").prepare()
    assert (tmp_path / "train.py").read_text() == "precious"
