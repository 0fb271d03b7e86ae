"""What a script may do inside of its steps, and what is said where it cannot be meant: real scripts, alone."""

import re
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from alone import Life, start

from elasticrl.runtime.data.audit import audit
from elasticrl.runtime.misuse import Misuse
from elasticrl.runtime.run import join
from elasticrl.runtime.vault.errors import DataError

CHANGES = """
class Rows:
    def __init__(self):
        self.rows = torch.zeros(5_000_000)

    def state_dict(self):
        return {"rows": self.rows}

    def load_state_dict(self, state):
        self.rows.copy_(state["rows"])

part = Rows()
with elasticrl.runtime.join("job.yaml") as run:
    run.register(model=torch.nn.Linear(2, 2), optimizer=SGD(lr=0.1), part=part)
    for step in run.steps(3):
        with step:
            part.rows.fill_(step + 1)
            run.keep()
            part.rows.fill_(-1)
            ticket = run._keeper.kept.ticket
            ticket.wait_sealed(20)
            with pin(ticket.path) as shard:
                found = [t for t in shard_of(shard).tensors if t.numel() == 5_000_000]
                print("kept", *(value.item() for tensor in found for value in tensor.unique()), flush=True)
        for lane in run.lanes():
            run.model(torch.ones(2)).sum().backward()
            lane.done()
        run.update()
"""


def test_what_was_kept_inside_of_a_step_is_as_it_was_whatever_the_script_changes_next(tmp_path: Path):
    life = start(tmp_path, CHANGES)
    assert life.returncode == 0, life.stderr
    kept = [line for line in life.stdout.splitlines() if line.startswith("kept")]
    assert kept == ["kept 1.0", "kept 2.0", "kept 3.0"]


GIVEN_UP = """
with elasticrl.runtime.join("job.yaml") as run:
    run.register(model=torch.nn.Linear(2, 2), optimizer=SGD(lr=0.1))
    for step in run.steps(3):
        with step:
            for lane in run.lanes():
                run.model(torch.ones(2)).sum().backward()
                lane.done()
            if step == 1:
                run._generation.flag.set("another plan")
                raise ValueError("no number, as an aborted collective left it")
            run.update()
        if step == 1:
            print(run._generation.cut, flush=True)
            break
"""


def test_what_a_program_says_of_a_step_that_is_given_up_is_no_fault_of_its_own(tmp_path: Path):
    life = start(tmp_path, GIVEN_UP)
    assert life.returncode == 0, life.stderr
    said = "ValueError (no number, as an aborted collective left it) in a step that was given up: another plan"
    assert said in life.stdout


KEEPS = """
with elasticrl.runtime.join("job.yaml") as run:
    run.register(model=torch.nn.Linear(2, 2), optimizer=SGD(lr=0.1))
    for step in run.steps(3):
        with step:
            run._sealing.settle()  # as after a resume in the middle of a step: there is nothing to be voted on
            before = run._keeper.kept
            run._generation.flag.set("another plan")
            run.keep()
        print("kept" if run._keeper.kept is not before else "not kept", run._generation.cut, flush=True)
        break
"""


def test_what_was_made_in_a_gang_that_is_broken_up_is_not_kept(tmp_path: Path):
    life = start(tmp_path, KEEPS)
    assert life.returncode == 0, life.stderr
    assert "not kept keeping what was made was given up: another plan" in life.stdout.splitlines()


EPOCH = """
import sys

with elasticrl.runtime.join("job.yaml") as run:
    walk = Walk(size=1000, lanes=1, per_lane=int(sys.argv[2]), epochs=1)
    run.register(model=torch.nn.Linear(2, 2), optimizer=SGD(lr=0.1), data=Cursor(walk))
    for step in run.steps(int(sys.argv[1]) or None):
        for lane in run.lanes():
            print("used", *(sample.index for sample in lane.ids()), flush=True)
            run.model(torch.ones(2)).sum().backward()
            lane.done()
        run.update()
"""


def used(life: Life) -> list[int]:
    """The samples that it says it used."""
    assert life.returncode == 0, life.stderr
    return [int(word) for line in life.stdout.splitlines() if line.startswith("used") for word in line.split()[1:]]


def test_a_run_that_goes_on_with_another_batch_ends_where_its_data_does(tmp_path: Path):
    before = used(start(tmp_path, EPOCH, "50", "10"))
    after = used(start(tmp_path, EPOCH, "0", "20", allow=["batch"]))
    assert sorted(before + after) == list(range(1000))


TURNS = """
with elasticrl.runtime.join("job.yaml") as run:
    run.register(
        model=torch.nn.Linear(2, 2), optimizer=SGD(lr=0.1), data=Cursor(Walk(size=100, per_lane=5, draws=2, turns=2))
    )
    for step in run.steps(3):
        for number in range(4):
            for lane in run.lanes():
                lane.ids()
                run.model(torch.ones(2)).sum().backward()
                lane.done()
            run.update()
"""


def test_a_step_that_goes_over_its_draws_again_uses_each_of_them_again(tmp_path: Path):
    life = start(tmp_path, TURNS)
    assert life.returncode == 0, life.stderr
    found = audit(tmp_path / "saves" / "job")
    assert (found.ok, found.samples) == (True, 3 * 10 * 2), found.sentence


ROUNDS = """
with elasticrl.runtime.join("job.yaml") as run:
    run.register(model=torch.nn.Linear(2, 2), optimizer=SGD(lr=0.1))
    for step in run.steps(3):
        for number in run.updates(2):
            print("round", number, flush=True)
"""


def test_a_round_of_updates_without_an_update_is_refused(tmp_path: Path):
    life = start(tmp_path, ROUNDS)
    assert "run.updates(2) counts its rounds by run.update(), which was called 0 times in one" in life.stderr
    assert life.stdout.count("round") == 1


TALLIES = """
with elasticrl.runtime.join("job.yaml") as run:
    run.register(model=torch.nn.Linear(2, 2), optimizer=SGD(lr=0.1))
    for step in run.steps(1):
        for lane in run.lanes():
            lane.tally.add(loss=1.0)
            if lane.index == 0:
                lane.tally.add(aux=2.0)
            run.model(torch.ones(2)).sum().backward()
            lane.done()
        run.update()
"""


def test_lanes_that_tally_under_other_names_are_refused(tmp_path: Path):
    life = start(tmp_path, TALLIES, lanes=2)
    assert "Lane 1 tallied loss, and lane 0 aux, loss: tally the same names in every lane" in life.stderr


NAN = """
with elasticrl.runtime.join("job.yaml") as run:
    good, bad = torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)
    run.train(actor=(good, SGD(lr=0.1)), critic=(bad, SGD(lr=0.1)))
    try:
        for step in run.steps(3):
            before = [param.clone() for model in (good, bad) for param in model.parameters()]
            with step:
                for role, model in (("actor", good), ("critic", bad)):
                    for lane in run.passes(role):
                        loss = model(torch.ones(2)).sum()
                        (loss * float("nan") if step == 2 and role == "critic" else loss).backward()
                        lane.done()
                run.update_all(max_norm=1.0)
    finally:
        after = [param for model in (good, bad) for param in model.parameters()]
        print("unchanged", all(map(torch.equal, before, after)), "after", run.progress.count, flush=True)
"""


def test_a_gradient_that_is_not_finite_is_refused_before_anything_is_applied(tmp_path: Path):
    life = start(tmp_path, NAN)
    assert life.returncode == 1
    assert "NotFinite: The norm of the gradient of critic is nan in update 0 of step 2: nothing of it" in life.stderr
    assert "unchanged True after 2" in life.stdout


SPIKE = """
from elasticrl.runtime.spikes import Guard

with elasticrl.runtime.join("job.yaml") as run:
    run.register(model=torch.nn.Linear(2, 1), optimizer=SGD(lr=0.1))
    guard = Guard(sigma=6.0, window=4, in_a_row=2, does="warn")
    for step in run.steps(8):
        for lane in run.lanes():
            run.model(torch.ones(2) * (1000 if step == 5 else 0 if step == 3 else 1)).sum().backward()
            lane.done()
        done = run.update_all(guard=guard)
        print("step", step, [spike.name for spike in done["model"].spikes], run.progress.past.spiked, flush=True)
"""


def test_a_script_that_wants_to_be_told_of_spikes_reads_of_them(tmp_path: Path):
    life = start(tmp_path, SPIKE)
    assert life.returncode == 0, life.stderr
    assert "step 5 ['model_norm'] 5" in life.stdout
    assert "step 6 [] 5" in life.stdout
    said = [line for line in (life.stdout + life.stderr).splitlines() if "is a spike, and is applied" in line]
    assert [line.partition("update ")[2].partition(",")[0] for line in said] == ["0 of step 5 is a spike"]


STREAM = """
import sys

class Numbers:
    def __iter__(self):
        return iter(range(7))

with elasticrl.runtime.join("job.yaml") as run:
    stream = StreamLoader(Numbers(), Walk(size=None, shuffle=False, lanes=2, per_lane=2))
    run.register(model=torch.nn.Linear(2, 2), optimizer=SGD(lr=0.1))
    if sys.argv[1] == "registered":
        run.register(data=stream)
    for step in run.steps(5):
        batches = stream.fetch(step, run.carried)
        for lane in run.lanes():
            lane.used(batches[lane.index].ids)
            run.model(torch.ones(2)).sum().backward()
            lane.done()
        run.update()
stream.close()
"""


def test_a_stream_that_is_registered_is_audited(tmp_path: Path):
    life = start(tmp_path, STREAM, "registered", lanes=2)
    assert life.returncode == 0, life.stderr
    found = audit(tmp_path / "saves" / "job")
    assert (found.ok, found.steps, found.samples) == (True, 5, 20), found.sentence


def test_an_audit_without_anything_to_hold_the_ledger_against_says_so(tmp_path: Path):
    life = start(tmp_path, STREAM, "not", lanes=2)
    assert life.returncode == 0, life.stderr
    with pytest.raises(DataError, match="register the Cursor or StreamLoader"):
        audit(tmp_path / "saves" / "job")


RULES = """
import sys

model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
optimizers = {
    "lacking": torch.optim.AdamW(model[0].parameters()),
    "none": "adamw",
    "torch": lambda name: torch.optim.SGD,
    "twice": [torch.optim.AdamW(model.parameters()), torch.optim.SGD(model[1].parameters())],
    "muon": torch.optim.Muon([model[0].weight, model[1].weight]),
    "several": [torch.optim.Adam(model[0].parameters()), torch.optim.SGD(model[1].parameters(), momentum=0.9)],
    "kinds": lambda name: SGD(momentum=0.9) if name.startswith("1") else AdamW(),
    "frozen": torch.optim.SGD([{"params": model[0].weight}, {"params": model[1].parameters(), "lr": 0.1}]),
}
model[0].bias.requires_grad_(sys.argv[1] != "frozen")
with elasticrl.runtime.join("job.yaml") as run:
    run.register(model=model, optimizer=optimizers[sys.argv[1]])
    print("registered")
"""


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("lacking", "1.weight of model has requires_grad and no rule: put it into the optimizer, or freeze it"),
        ("none", "optimizer=a str is no optimizer: give a rule such as AdamW(lr=3e-4)"),
        ("torch", "The optimizer of model gives SGD for 0.weight, which is no rule: a rule has lr, slots and update"),
        ("twice", "Two optimizers have 1.weight: give each parameter to one of them"),
        ("muon", "torch.optim.Muon cannot step a row of elements"),
    ],
)
def test_parameters_without_a_rule_and_what_is_no_rule_are_refused(tmp_path: Path, what: str, said: str):
    life = start(tmp_path, RULES, what)
    assert said in life.stderr
    assert "registered" not in life.stdout


@pytest.mark.parametrize("what", ["frozen", "kinds", "several"])
def test_a_frozen_parameter_needs_no_rule_and_others_may_have_rules_of_several_kinds(tmp_path: Path, what: str):
    life = start(tmp_path, RULES, what)
    assert "registered" in life.stdout, life.stderr


FIRST = """
with elasticrl.runtime.join("job.yaml") as run:
    run.register(model=torch.nn.Linear(2, 2), optimizer=SGD(lr=0.1), data=Cursor(Walk(size=100)))
    for step in run.steps(3):
        for lane in run.lanes():
            lane.ids()
            run.model(torch.ones(2)).sum().backward()
            lane.done()
        run.update()
        print("first", run._given._first is not None, flush=True)
"""


def test_the_state_before_all_updates_is_kept_aside_until_one_is_sealed(tmp_path: Path):
    life = start(tmp_path, FIRST)
    assert life.returncode == 0, life.stderr
    assert [line for line in life.stdout.splitlines() if line.startswith("first")] == [
        "first True",
        "first False",
        "first False",
    ]


BUFFERS = """
import sys

class Model(torch.nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.core = torch.nn.Linear(2, 2)
        self.seen = torch.nn.Module()
        self.seen.register_buffer("count", torch.zeros(()))
        self.register_buffer("table", torch.arange(4.0), persistent=False)

    def forward(self, x):
        if self.kind == "counts" or (self.kind == "trains" and self.training):
            self.seen.count += 1
        elif self.kind == "uncounted":
            self.seen.count.data += 1  # as BatchNorm's kernel does: torch does not tell that it was written to
        elif self.kind == "grows":
            self.register_buffer("table", torch.arange(4.0 + len(self.table)), persistent=False)
        return self.core(x)

kind, *how = sys.argv[1:]
model = Model(kind)
with elasticrl.runtime.join("job.yaml") as run:
    run.register(model=model, optimizer=SGD(lr=0.1), **({"seen": model.seen} if "registered" in how else {}))
    model.train("eval" not in how)
    for step in run.steps(6):
        for lane in run.lanes():
            run.model(torch.ones(2)).sum().backward()
            lane.done()
        run.update()
"""


@pytest.mark.parametrize("kind", ["counts", "trains", "uncounted"])
def test_a_buffer_that_changes_is_refused_by_its_name(tmp_path: Path, kind: str):
    assert "Misuse: The buffer seen.count of model has changed" in start(tmp_path, BUFFERS, kind).stderr


@pytest.mark.parametrize("how", [("counts", "registered"), ("trains", "eval"), ("grows",)])
def test_a_buffer_that_stays_or_is_registered_or_is_a_cache_that_grows_is_not(tmp_path: Path, how: Sequence[str]):
    life = start(tmp_path, BUFFERS, *how)
    assert life.returncode == 0, life.stderr


SMALLER = """
import sys

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body = torch.nn.Linear(2, 2)
        if sys.argv[1] == "whole":
            self.head = torch.nn.Linear(2, 2)

    def forward(self, rows):
        return self.head(self.body(rows)) if hasattr(self, "head") else self.body(rows)

with elasticrl.runtime.join("job.yaml") as run:
    run.register(model=Model(), optimizer=SGD(lr=0.1))
    for step in run.steps(int(sys.argv[2])):
        for lane in run.lanes():
            run.model(torch.ones(1, 2)).sum().backward()
            lane.done()
        run.update()
        if step == 2:
            raise RuntimeError("and its memory stays")
"""


@pytest.mark.parametrize(("steps", "memory"), [(2, "checkpoint"), (4, "vault")])
def test_weights_that_the_model_has_no_longer_are_missed(tmp_path: Path, steps: int, memory: str):
    assert start(tmp_path, SMALLER, "whole", str(steps)).returncode == (0 if memory == "checkpoint" else 1)
    life = start(tmp_path, SMALLER, "smaller", "4")
    assert life.returncode != 0
    said = "has 2 weights of model that the model of this run has not (model.head.bias, ...)"
    assert re.search(rf"{memory}.* {re.escape(said)}", life.stderr), life.stderr


WRAPPED = """
import sys
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import fully_shard

how, steps = sys.argv[1:]

def fresh():
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Tanh(), torch.nn.Linear(5, 2))
    if how != "plain":
        model[0] = checkpoint_wrapper(model[0])
    if how == "compiled":
        model[2] = torch.compile(model[2], backend="eager")
    return model

def build(mesh):
    return fully_shard(fresh(), mesh=mesh)

asked = set()

def rule(name):
    asked.add(name)
    return AdamW(lr=0.01)

with elasticrl.runtime.join("job.yaml") as run:
    run.register(model=build if run.tree.model.strategy == "fsdp" else fresh(), optimizer=rule)
    for step in run.steps(int(steps)):
        with step:
            for lane in run.lanes():
                run.model(torch.full((1, 3), step + lane.index + 0.5)).square().sum().backward()
                lane.done()
            run.update()
            print("made", step, run.digest())
print("asked", *sorted(asked))
"""


@pytest.mark.slow
def test_a_checkpoint_of_a_wrapped_model_is_read_by_one_that_is_not_and_the_other_way_round(tmp_path: Path):
    def lives(folder: str, *each: tuple[str, str]) -> list[str]:
        (tmp_path / folder).mkdir()
        made: list[str] = []
        for steps, (how, strategy) in enumerate(each, 4 - len(each)):
            life = start(tmp_path / folder, WRAPPED, how, str(steps), lanes=3, strategy=strategy)
            assert life.returncode == 0, life.stderr
            assert life.stdout.splitlines()[-1] == "asked 0.bias 0.weight 2.bias 2.weight"
            made += [line for line in life.stdout.splitlines() if line.startswith("made")]
        return made

    once = lives("once", ("plain", "replicated"))
    assert len(once) == 3
    assert once == lives("turns", ("compiled", "replicated"), ("plain", "fsdp"), ("checkpointed", "fsdp"))


PHASE = """
with elasticrl.runtime.join("job.yaml") as run:
    run.register(model=torch.nn.Linear(2, 2), optimizer=SGD(lr=0.1))
    for step in run.steps(1):
        with run.phase("evaluate"), run.phase("save-2_b"):
            print("may be")
        with run.phase("done"):
            print("may not be")
"""


def test_a_phase_cannot_be_called_as_a_state_of_the_runtime_is(tmp_path: Path):
    life = start(tmp_path, PHASE)
    assert "may be" in life.stdout
    assert "may not be" not in life.stdout
    assert (
        "Misuse: run.phase('done'): no phase can be called so: it is what the runtime calls a state of" in life.stderr
    )


def test_an_older_torch_is_refused_before_anything_is_made(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch, "__version__", "2.10.0+cu128")
    with pytest.raises(Misuse, match=r"torch 2\.10\.0\+cu128 is installed here, and this wants 2\.11\.0 or later"):
        join()
