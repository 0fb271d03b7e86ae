"""What a script writes beside its optimizer: a rule, an average of the weights, the scale of a loss. Real scripts, alone."""

import runpy
from itertools import pairwise
from pathlib import Path

import exact_job
import torch
from alone import start

from elasticrl.runtime.layout import UNIT
from elasticrl.runtime.optim import CHUNK, apply, stock

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "own_rule.py"


def test_the_rule_of_the_example_is_lion_and_does_not_care_where_an_element_lies():
    rule = runpy.run_path(str(EXAMPLE))["Lion"](lr=0.01, weight_decay=0.1)
    size = CHUNK + 193 * UNIT
    old, grad = torch.randn(2, size), torch.randn(size)
    once, theirs = torch.empty_like(old), torch.empty_like(old)
    apply(rule, old, once, grad, scale=0.3, count=7)
    apply(stock(exact_job.Lion, lr=0.01, weight_decay=0.1), old, theirs, grad, scale=0.3, count=7)
    torch.testing.assert_close(once, theirs)
    for threads in (1, 3):
        torch.set_num_threads(threads)
        new = torch.empty_like(old)
        for lo, hi in pairwise((0, UNIT, 71 * UNIT, CHUNK + UNIT, size)):
            apply(rule, old[:, lo:hi], new[:, lo:hi], grad[lo:hi], scale=0.3, count=7)
        assert torch.equal(new, once), f"{threads} threads"
    torch.set_num_threads(1)


def test_the_example_goes_on_with_its_rules_and_its_average_where_it_was(tmp_path: Path):
    script = EXAMPLE.read_text().replace("join()", 'join("job.yaml")')
    last: list[str] = []
    for folder, lives in (("once", ("10",)), ("twice", ("7", "10"))):
        (tmp_path / folder).mkdir()
        for steps in lives:
            life = start(tmp_path / folder, script, "--steps", steps, lanes=2)
            assert life.returncode == 0, life.stderr
        last.append(life.stdout.splitlines()[-1])
    assert last[0].startswith("step 9 loss ")
    assert last[0] == last[1]


SCALED = """
import sys
from elasticrl.runtime.scaler import LossScaler

with elasticrl.runtime.join("job.yaml") as run:
    scaler = LossScaler(init_scale=2.0**129, growth_interval=3)
    run.register(model=torch.nn.Linear(2, 2), optimizer=AdamW(lr=0.1), scaler=scaler)
    for step in run.steps(int(sys.argv[1])):
        for lane in run.lanes():
            scaler.scale(run.model(torch.ones(2) + lane.index).square().sum()).backward()
            lane.done()
        done = scaler.update(run, max_norm=1.0)
        weights = "".join(f"{w:.9f} " for w in run.model.weight.view(-1).tolist())
        print("step", step, done.skipped, scaler.value.hex(), weights, flush=True)
"""


def test_an_update_that_overflows_is_left_out_and_the_scale_falls_and_grows_again(tmp_path: Path):
    lines: list[str] = []
    for steps in ("5", "9"):
        life = start(tmp_path, SCALED, steps, lanes=2)
        assert life.returncode == 0, life.stderr
        lines += [line for line in life.stdout.splitlines() if line.startswith("step")]
    rows = [line.split() for line in lines]
    skipped = [row[2] == "True" for row in rows]
    assert skipped[0], "it has overflowed"
    first = skipped.index(False)
    assert not any(skipped[first : first + 3])
    assert float.fromhex(rows[first + 2][3]) == 2 * float.fromhex(rows[first][3]), "it grows after three good updates"
    assert len({tuple(row[4:]) for row in rows[:first]}) == 1, "an update that is left out changes nothing"
