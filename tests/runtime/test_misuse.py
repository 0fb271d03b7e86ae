"""Mistakes of scripts, above all those that a script of torchrun brings along: each ends in a sentence that says what to do."""

import re

import pytest
from alone import start

SCRIPT = """
import torch.distributed as dist
from elasticrl.config import load
from torch.nn.parallel import DistributedDataParallel as DDP

def job(what):
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2)) if what == "norm" else torch.nn.Linear(2, 2)
    optimizer, parts, rounds = SGD(lr=0.1), {}, 2 if what == "updates" else 1
    with elasticrl.runtime.join(load("job.yaml", [f"job.name={what}"])) as run:
        if what == "ddp":
            model = DDP(model)
        elif what == "barrier":
            dist.barrier()
        elif what == "group":
            dist.init_process_group("gloo")
        elif what == "made":
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        elif what == "cursor":
            parts["data"] = Cursor(Walk(size=100, per_lane=5))
        elif what == "parallel":
            model = torch.nn.DataParallel(model)
        scaler = torch.amp.GradScaler("cpu")
        run.register(model=model, optimizer=optimizer, **parts)
        data = torch.randn(100, 5, 2)
        batches = iter(torch.utils.data.DataLoader(data, batch_size=1) if what == "loader" else data)
        for step in run.steps(3):
            for number in range(rounds):
                for lane in run.lanes():
                    if what in ("number", "numbers"):
                        lane.used(3 if what == "number" else [1, 2])
                    if what == "elsewhere":
                        run.used(lane.index, ["7"])
                    loss = run.model(next(batches)).sum()
                    (scaler.scale(loss) if what == "scaler" else loss).backward()
                    lane.done()
                    if what == "early":
                        break
                if what == "lanes":
                    for lane in run.lanes():
                        pass
                if what == "scaler":
                    scaler.step(torch.optim.SGD(model.parameters()))
                if what != "update":
                    run.update()
                if what == "twice":
                    run.update()

import sys

for what in sys.argv[1:]:
    try:
        job(what)
        print(f"{what}: through")
    except elasticrl.runtime.misuse.Misuse as error:
        print(f"{what}: {error}")
    if what == "made":
        dist.destroy_process_group()
"""

SAID = {
    "ddp": r"There is no process group here: .* Remove DistributedDataParallel",
    "barrier": r"There is no process group here: the runtime makes one inside",
    "group": r"There is no process group here: .* Remove DistributedDataParallel, init_process_group",
    "made": r"This script has made a process group. There is no process group here",
    "parallel": r"model is a DataParallel: register the model inside of it, which is its \.module",
    "norm": r"1 of model is a BatchNorm1d with running statistics, .*: use LayerNorm or GroupNorm",
    "update": r"Step 0 has ended, and the gradients of model were not used: call run.update\(\) after the lanes",
    "lanes": r"The lanes of model are asked for again, .*: call run.update\(\) after each round of lanes",
    "early": r"run.update\(\) came after 1 of the 2 lanes of model that are here: walk all of run.lanes\(\)",
    "twice": r"run.update\(\) came after 0 of the 2 lanes of model that are here",
    "number": r"lane.used\(ids\) takes a list of SampleId, and 3 is none: pass what the cursor",
    "numbers": r"lane.used\(ids\) takes a list of SampleId, and 1 is none",
    "elsewhere": r"run.used\(ids\) takes a list of SampleId, and '7' is none",
    "cursor": r"Step 0 has used no sample of the registered cursor: take each lane's samples from lane.ids\(\)",
    "loader": r"A torch DataLoader is read from, and step 0 has named no sample: .* Take samples by their number",
    "scaler": r"A GradScaler looks at gradients that the runtime has taken, .* Use LossScaler",
    "nothing": r"through",
    "updates": r"through",
}


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What each was told, all in one process."""
    life = start(tmp_path_factory.mktemp("misuse"), SCRIPT, *SAID, lanes=2)
    assert life.returncode == 0, life.stderr
    lines = (line.partition(": ") for line in life.stdout.splitlines())
    return {what: said for what, _, said in lines if what in SAID}


@pytest.mark.parametrize("what", SAID)
def test_a_mistake_is_a_sentence_with_its_remedy(told: dict[str, str], what: str):
    assert re.search(SAID[what], told[what]), told[what]
