"""torch's optimizers as rules: the same bits as on a whole parameter, however it is cut; refused with the reason else."""

import pytest
import torch
from exact_job import Lion
from rule_kit import cut_anywhere
from torch import nn
from torch.optim import (
    ASGD,
    LBFGS,
    SGD,
    Adadelta,
    Adafactor,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    Muon,
    NAdam,
    Optimizer,
    RAdam,
    RMSprop,
    Rprop,
    SparseAdam,
)  # fmt: skip

from elasticrl.runtime import optim
from elasticrl.runtime.misuse import Misuse
from elasticrl.runtime.optim import apply, follow, rows_of, scaled, stock
from elasticrl.runtime.stock import ROW, Stepper


class Renamed(AdamW):
    """A subclass that changes the step: half of it."""

    def step(self, closure=None):
        for group in self.param_groups:
            group["lr"] /= 2
        super().step(closure)
        for group in self.param_groups:
            group["lr"] *= 2


KINDS = [
    (Adam, {"weight_decay": 0.1}),
    (Adam, {"amsgrad": True, "maximize": True}),
    (AdamW, {"amsgrad": True, "fused": True}),
    (NAdam, {"weight_decay": 0.1, "decoupled_weight_decay": True}),
    (RAdam, {}),
    (Adamax, {}),
    (Adadelta, {"lr": 1.0}),
    (Adagrad, {"initial_accumulator_value": 0.1, "lr_decay": 0.01}),
    (RMSprop, {"momentum": 0.9, "centered": True}),
    (Rprop, {}),
    (SGD, {"momentum": 0.9, "dampening": 0.1, "maximize": True}),
    (Lion, {"weight_decay": 0.1}),
    (Renamed, {}),
]


def ids(value) -> str:
    return value.__name__ if isinstance(value, type) else "-".join(value) if isinstance(value, dict) else ""


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Bit for bit, NaN too."""
    return torch.equal(one.contiguous().view(torch.int32), other.contiguous().view(torch.int32))


@pytest.mark.parametrize(("kind", "settings"), KINDS, ids=ids)
def test_an_optimizer_gives_the_bits_of_its_own_steps_on_a_whole_parameter(kind, settings):
    rule = stock(kind, **{"lr": 0.01, **settings})
    size = ROW + 64
    theirs = nn.Parameter(torch.randn(size // 64, 64))
    plain = {name: value for name, value in settings.items() if name != "fused"}
    stepper = kind([theirs], **{"lr": 0.01, **plain})
    old = torch.zeros(1 + len(rule.slots), size)
    old[0] = theirs.detach().view(-1)
    for count, factor in enumerate((1.0, 0.5, 2.0, 0.1, 0.3), start=1):
        theirs.grad = torch.randn(size // 64, 64)
        stepper.param_groups[0]["lr"] = rule.lr * factor
        new = torch.empty_like(old)
        apply(scaled(rule, factor), old, new, theirs.grad.view(-1) * 4, scale=0.25, count=count)
        old = new
        stepper.step()
        assert same(old[0], theirs.detach().view(-1)), f"update {count}"
    for row, name in enumerate(rule.slots, start=1):
        assert same(old[row], stepper.state[theirs][name].view(-1)), name


@pytest.mark.parametrize(("kind", "settings"), KINDS, ids=ids)
def test_an_optimizer_does_not_care_where_an_element_lies_nor_how_many_threads_there_are(kind, settings):
    cut_anywhere(stock(kind, **settings))


def test_a_number_that_follows_from_the_count_is_found_again_by_a_process_that_is_new():
    state = torch.randn(3, 64)
    grad, made = torch.randn(64), []
    known = stock(NAdam)
    for count in range(1, 13):
        after = torch.empty_like(state)
        apply(known, state, after, grad, scale=1.0, count=count)
    for rule, count in ((known, 12), (stock(NAdam), 12), (known, 12)):
        after = torch.empty_like(state)
        apply(rule, state, after, grad, scale=1.0, count=3)  # it goes back, and forward again
        apply(rule, state, after, grad, scale=1.0, count=count)
        made.append(after)
    assert same(made[0], made[1])
    assert same(made[0], made[2])


class Plain(Optimizer):
    """What the following do besides."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    def step(self, closure=None):  # noqa: ARG002
        for group in self.param_groups:
            for param in group["params"]:
                self.one(param.data, param.grad, group, self.state[param])


class Normed(Plain):
    def one(self, value, grad, group, state):  # noqa: ARG002
        value.sub_(grad / grad.norm(), alpha=group["lr"])


class ByRow(Plain):
    def one(self, value, grad, group, state):  # noqa: ARG002
        value.sub_(grad - grad.mean(-1, keepdim=True) if grad.dim() > 1 else grad, alpha=group["lr"])


class Drawing(Plain):
    def one(self, value, grad, group, state):  # noqa: ARG002
        value.sub_(grad * torch.rand(()), alpha=group["lr"])


class Counting(Plain):
    steps = 0

    def one(self, value, grad, group, state):  # noqa: ARG002
        self.steps += 1
        value.sub_(grad, alpha=group["lr"] / self.steps)


class Grouped(Plain):
    def one(self, value, grad, group, state):  # noqa: ARG002
        group["k"] = group.get("k", 0) + 1
        value.sub_(grad, alpha=group["lr"])


class Blocks(Plain):
    """As 8-bit ones do."""

    def one(self, value, grad, group, state):
        state["state1"] = (grad.view(-1, 64) / (top := grad.view(-1, 64).abs().amax(1, keepdim=True)) * 127).to(
            torch.int8
        )
        state["absmax1"] = top
        value.sub_(grad, alpha=group["lr"])


class Narrow(Plain):
    def one(self, value, grad, group, state):
        state["exp_avg"] = grad.bfloat16()
        value.sub_(grad, alpha=group["lr"])


class Idle(Plain):
    def one(self, value, grad, group, state):
        pass


class Wrapper(Optimizer):
    def __init__(self, params, lr=0.1):
        self.inner = SGD(params, lr=lr)

    param_groups = property(lambda self: self.inner.param_groups)
    state = property(lambda self: self.inner.state)


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (Muon, "torch.optim.Muon cannot step a row of elements (ValueError: Param gradient must be a 2D matrix)"),
        (
            Adafactor,
            "keeps row_var of shape [64, 1] for a parameter of shape [64, 64]: not one number for each element",
        ),
        (ASGD, "keeps eta, one number that follows from the learning rates of all steps before"),
        (LBFGS, "cannot make a step of one parameter (TypeError"),
        (SparseAdam, "SparseAdam does not support dense gradients"),
        (Normed, "Normed comes to other bits when a parameter of shape [64, 64] is cut: the value differs in"),
        (ByRow, "ByRow comes to other bits when a parameter of shape [64, 64] is cut: the value differs in"),
        (Drawing, "draws random numbers, which would depend on how parameters are cut"),
        (Counting, "keeps steps in itself and not in its state, so nobody would restore that"),
        (Grouped, "keeps k in its parameter groups, so nobody would restore that"),
        (Blocks, "keeps state1 as torch.int8 for a parameter of torch.float32"),
        (Narrow, "keeps exp_avg as torch.bfloat16 for a parameter of torch.float32, and a shard has one dtype"),
        (Idle, "leaves a parameter as it was"),
        (Wrapper, "Wrapper is a wrapper around another optimizer: give the one inside of it"),
    ],
    ids=ids,
)
def test_what_does_not_work_element_by_element_is_refused_with_the_reason(kind, said):
    drawn = torch.get_rng_state()
    with pytest.raises(Misuse) as refused:
        stock(kind, lr=0.1)
    assert said in str(refused.value)
    assert "Use one that works element by element" in str(refused.value) or kind is Wrapper
    assert torch.equal(torch.get_rng_state(), drawn)


def test_settings_that_an_optimizer_does_not_know_are_refused():
    with pytest.raises(Misuse, match=r"Adam\(lr, momentum\) cannot be made"):
        stock(Adam, lr=0.1, momentum=0.9)


def test_the_scripts_own_optimizer_is_never_stepped_nor_changed():
    model = nn.Linear(8, 8)
    model(torch.ones(8)).sum().backward()
    before = [param.clone() for param in model.parameters()]
    optimizer = Adam(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    rule_of = follow(optimizer, model)
    old = torch.randn(3, 64)
    apply(rule_of("weight"), old, torch.empty_like(old), torch.randn(64), scale=1.0, count=1)
    assert all(map(torch.equal, before, model.parameters()))
    assert not optimizer.state
    assert optimizer.param_groups[0]["params"] == list(model.parameters())
    scheduler.step()
    assert rule_of("weight").lr == 0.05


def test_several_optimizers_share_a_model_and_each_keeps_its_own_state():
    model = nn.Linear(8, 8)
    several = [RMSprop([model.weight], lr=0.1), SGD([model.bias], lr=0.1, momentum=0.9)]
    rule_of = follow(several, model)
    rows = rows_of(rule_of, ["bias", "weight"])
    assert rows == ("param", "momentum_buffer", "square_avg")
    old, grad = torch.randn(3, 64), torch.randn(64)
    for name, row in (("weight", 2), ("bias", 1)):
        rule, new = rule_of(name), torch.empty(3, 64)
        apply(rule, old, new, grad, scale=1.0, count=2, rows=rows)
        alone = torch.empty(2, 64)
        apply(rule, old[[0, row]], alone, grad, scale=1.0, count=2)
        assert same(new[[0, row]], alone)
        assert same(new[3 - row], old[3 - row]), "another rule's state"
    with pytest.raises(Misuse, match="Two optimizers have weight: give each parameter to one of them"):
        follow([several[0], SGD(model.parameters())], model)


def test_a_setting_that_adds_state_in_the_middle_is_refused():
    model = nn.Linear(8, 8)
    optimizer = Adam(model.parameters())
    rule_of = follow(optimizer, model)
    optimizer.param_groups[0]["amsgrad"] = True
    state = torch.ones(3, 64)
    for count in (1, 2):
        with pytest.raises(Misuse, match=r"keeps other state than at register\(\) \('?max_exp_avg_sq"):
            apply(rule_of("weight"), state, torch.empty_like(state), torch.ones(64), scale=1.0, count=count)


def test_numbers_that_follow_from_settings_forbid_other_settings_in_the_middle():
    rule, state = stock(NAdam), torch.ones(3, 64)
    apply(rule, state, torch.empty_like(state), torch.ones(64), scale=1.0, count=2)
    changed = optim.replace(rule, settings=tuple((n, (0.5, 0.9) if n == "betas" else v) for n, v in rule.settings))
    with pytest.raises(Misuse, match=r"keeps mu_product, .* and betas was changed in the middle of the job"):
        apply(changed, state, torch.empty_like(state), torch.ones(64), scale=1.0, count=2)


def test_a_stepper_is_tried_with_the_dimensions_of_its_parameters():
    conv = nn.Conv2d(3, 3, 3)
    found = follow(Adam(conv.parameters()), conv)("weight")
    assert found.stepper.dims == {1, 4}
    assert isinstance(found.stepper, Stepper)
