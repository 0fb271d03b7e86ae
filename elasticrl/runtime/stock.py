"""A torch optimizer as a rule: its own `step`, on one row of elements at a time.

    run.register(model=model, optimizer=stock(torch.optim.Adam, lr=3e-4, amsgrad=True))

The one idea: whether an optimizer works element by element is not known from its name, so it is tried. It makes a few steps on
a parameter of the model's kind, and once more on that parameter as a row, cut at whole units. Only if every bit of values and
state is the same may it train: then it does not matter how a parameter is cut over the ranks.

What it keeps per element lies in the shard's rows. A number beside (`step`) has to follow from the count of updates alone, and
is made from that. What it keeps elsewhere would be nobody's state, so it is refused.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Any, Final

import torch
from torch import Tensor

from elasticrl.runtime.misuse import Misuse

ROW: Final = 32_768  # elements: torch gives no operation of so few to two threads, which would meet inside of a unit
LONG: Final = 131_072  # elements: as many as stay in cache
SHAPES: Final = {2: (64, 64), 3: (16, 16, 16), 4: (8, 8, 8, 8)}  # of the trial, by how many dimensions a parameter has
SIZE: Final = 4096
CUTS: Final = (0, 64, 1088, SIZE)
RATES: Final = (0.01, 0.03, 0.02)  # of the trial's steps
PLAIN: Final = ("foreach", "fused", "capturable", "differentiable")  # other ways to the same result, or nearly
REMEDY: Final = (
    "Use one that works element by element (AdamW, Adam, NAdam, RAdam, Adamax, Adagrad, RMSprop, SGD), or write an optim.Rule "
    'for it: docs/RUNTIME.md, "A rule of your own".'
)
KEPT: Final = 4  # counts whose numbers are remembered: a gang may go back some updates

Settings = tuple[tuple[str, Any], ...]  # of a parameter group, by name, without its parameters and learning rate
Numbers = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stock:
    """An optimizer of torch or of the script's own. `stock` and `optim.follow` make it.

    Example: stock(torch.optim.Adam, lr=3e-4, amsgrad=True)
    """

    lr: float
    settings: Settings
    stepper: Stepper

    @property
    def slots(self) -> tuple[str, ...]:
        """The state of an element, under the optimizer's names."""
        return self.stepper.slots

    def update(self, old: Tensor, new: Tensor, grad: Tensor, spare: Tensor, scale: float, count: int) -> None:
        """One step of torch's own optimizer, into `new`."""
        new.copy_(old)
        torch.mul(grad, scale, out=spare[0])
        group = {**dict(self.settings), "lr": self.lr}
        many = new.device.type != "cpu" or torch.get_num_threads() == 1
        row = LONG if many else ROW
        for start in range(0, grad.numel(), row):
            part = slice(start, start + row)
            self.stepper.step(new[:, part], spare[0, part], group, count)


def stock(kind: type[torch.optim.Optimizer], *, dims: Iterable[int] = (1, 2), **settings: Any) -> Stock:
    """The rule of an optimizer class with these settings; Misuse if it is none. `dims`: how many dimensions the model's
    parameters have. For models that are built anew in each generation, whose parameters no optimizer can be given.
    """
    try:
        optimizer = kind([torch.nn.Parameter(torch.zeros(SHAPES[2]))], **settings)
    except (TypeError, ValueError, RuntimeError) as error:
        raise Misuse(f"{kind.__name__}({', '.join(settings)}) cannot be made: {error}") from error
    return of_group(optimizer, optimizer.param_groups[0], dims=dims)


def of_group(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any], *, dims: Iterable[int], dtype: torch.dtype = torch.float32
) -> Stock:  # fmt: skip
    """The rule of one parameter group; Misuse if the optimizer does not work element by element."""
    settings = settings_of(optimizer, group)
    stepper = Stepper(optimizer)
    for count in sorted({max(1, min(number, max(SHAPES))) for number in dims}, reverse=True):
        _Trial(stepper, settings, SHAPES.get(count, (SIZE,)), dtype).run()
    stepper.dims = frozenset(dims)
    return Stock(lr=float(group["lr"]), settings=settings, stepper=stepper)


def settings_of(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> Settings:
    """What a group says beside its parameters and rate."""
    if "lr" not in group:
        raise Misuse(f"{_name(optimizer)} has no lr in its parameter groups, which schedules change here. {REMEDY}")
    return tuple(
        (name, False if name in PLAIN else _plain(value))
        for name, value in sorted(group.items())
        if name not in ("params", "param_names", "lr", "initial_lr")
    )


class Stepper:
    """One optimizer, to be stepped on rows. It holds no row itself."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.name = _name(optimizer)
        if not {"state", "param_groups"} <= vars(optimizer).keys():
            raise Misuse(f"{self.name} is a wrapper around another optimizer: give the one inside of it.")
        self.dims: frozenset[int] = frozenset()  # of the parameters that it was tried with
        self.slots: tuple[str, ...] = ()
        self.counts: dict[str, Any] = {}  # numbers that are the count of updates, as they are after the first
        self.others: tuple[str, ...] = ()  # numbers that follow from it, and are found by making the steps again
        self._twin = object.__new__(
            type(optimizer)
        )  # a copy without parameters and state; a copy.copy would lose attributes
        self._twin.__dict__.update(vars(optimizer))
        self._twin.__dict__.pop("step", None)  # a scheduler has put its own there, which steps the original
        self._replay: _Replay | None = None

    @property
    def attributes(self) -> dict[str, Any]:
        """What it keeps in itself."""
        return {name: _seen(value) for name, value in vars(self._twin).items() if name not in ("state", "param_groups")}

    def step(self, rows: Tensor, grad: Tensor, group: dict[str, Any], count: int) -> None:
        """Changes rows[1 + slots, n] in place."""
        state: dict[str, Any] = {}
        if count > 1:
            state = {**self.numbers(group, count - 1, rows.device), **dict(zip(self.slots, rows[1:], strict=True))}
        try:
            value, state, group = self.once(rows[0], grad, state, group)
        except KeyError as error:
            raise self._changed(str(error)) from error
        if odd := sorted(set(state) ^ {*self.slots, *self.counts, *self.others}):
            raise self._changed(", ".join(odd))
        for row, made in zip(rows, (value, *(state[name] for name in self.slots)), strict=True):
            if made.data_ptr() != row.data_ptr():  # it has put another tensor in its place
                row.copy_(made)

    def _changed(self, names: str) -> Misuse:
        return Misuse(
            f"{self.name} keeps other state than at register() ({names}): its settings were changed in the middle of the job. "
            "Leave them as they were; a schedule may change lr."
        )

    def once(
        self, value: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]
    ) -> tuple[Tensor, dict[str, Any], dict[str, Any]]:
        """One step of one parameter: its value, state and group after it."""
        param = torch.nn.Parameter(value)
        param.grad = grad
        self._twin.param_groups = [{**group, "params": [param]}]
        self._twin.state = defaultdict(dict, {param: state})
        self._twin.step()
        after, group = self._twin.state[param], self._twin.param_groups[0]
        self._twin.param_groups, self._twin.state = [], defaultdict(dict)
        return param.detach(), after, {name: value for name, value in group.items() if name != "params"}

    def numbers(self, group: dict[str, Any], count: int, device: torch.device) -> Numbers:
        """The numbers beside the state, as they are after `count` updates."""
        found = {name: _number(first, count, device) for name, first in self.counts.items()}
        if self.others:
            if self._replay is None:
                self._replay = _Replay(self, group)
            found |= self._replay.at(count, group)
        return found


class _Replay:
    """Numbers that follow from the count and the settings: steps of an element that nobody trains, made once more."""

    def __init__(self, stepper: Stepper, group: dict[str, Any]) -> None:
        self._stepper = stepper
        self._settings = {name: value for name, value in group.items() if name != "lr"}
        self._known: dict[int, Numbers] = {}
        self._begin()

    def _begin(self) -> None:
        self._count, self._value = 0, torch.ones(64)
        self._state: dict[str, Any] = {}

    def at(self, count: int, group: dict[str, Any]) -> Numbers:
        """After so many updates."""
        if (now := {name: value for name, value in group.items() if name != "lr"}) != self._settings:
            odd = [name for name in now if now[name] != self._settings.get(name)]
            raise Misuse(
                f"{self._stepper.name} keeps {', '.join(self._stepper.others)}, which follows from its settings in all updates "
                f"until now, and {', '.join(odd)} was changed in the middle of the job: let schedules change lr alone."
            )
        if count not in self._known and count < self._count:
            self._begin()
        while self._count < count:
            made = self._stepper.once(self._value, torch.ones(64), self._state, {**self._settings, "lr": RATES[0]})
            self._value, self._state, _ = made
            self._count += 1
            self._known[self._count] = {name: _copied(self._state[name]) for name in self._stepper.others}
            self._known.pop(self._count - KEPT, None)
        return {name: _copied(value) for name, value in self._known[count].items()}


class _Trial:
    """Does it work element by element? For parameters of one number of dimensions, with one group's settings."""

    def __init__(self, stepper: Stepper, settings: Settings, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self._stepper, self._settings, self._shape = stepper, settings, shape
        draws = torch.Generator().manual_seed(0)
        self._start = torch.randn(SIZE, generator=draws).to(dtype)
        sizes = 10.0 ** (torch.rand(len(RATES), SIZE, generator=draws) * 6 - 4)
        self._grads = (torch.randn(len(RATES), SIZE, generator=draws) * sizes).to(dtype)

    def run(self) -> None:
        """Misuse if not. The stepper knows its slots then."""
        before, drawn = self._stepper.attributes, torch.get_rng_state()
        whole = self._whole(RATES)
        other = self._whole(RATES[::-1])
        if not torch.equal(torch.get_rng_state(), drawn):
            torch.set_rng_state(drawn)
            raise self._refused("draws random numbers, which would depend on how parameters are cut")
        if kept := [name for name, value in self._stepper.attributes.items() if value != before.get(name)]:
            raise self._refused(f"keeps {', '.join(kept)} in itself and not in its state, so nobody would restore that")
        self._sort(whole, other)
        if torch.equal(whole[-1][0], self._start):
            raise self._refused("leaves a parameter as it was (is it a wrapper around another one? Then give that one)")
        self._compare(whole)

    def _whole(self, rates: Sequence[float]) -> list[tuple[Tensor, Numbers]]:
        """(value, state) after each step on the whole parameter."""
        value = self._start.clone().view(self._shape)
        state: dict[str, Any] = {}
        found: list[tuple[Tensor, Numbers]] = []
        for rate, grad in zip(rates, self._grads, strict=True):
            group = {**dict(self._settings), "lr": rate}
            try:
                value, state, after = self._stepper.once(value, grad.clone().view(self._shape), state, dict(group))
            except Exception as error:
                raise self._refused(f"cannot make a step of one parameter ({type(error).__name__}: {error})") from error
            if changed := [name for name in after if name not in group or _seen(after[name]) != _seen(group[name])]:
                raise self._refused(f"keeps {', '.join(changed)} in its parameter groups, so nobody would restore that")
            found.append((value.clone().view(-1), {name: _copied(one) for name, one in state.items()}))
        return found

    def _sort(self, whole: list[tuple[Tensor, Numbers]], other: list[tuple[Tensor, Numbers]]) -> None:
        """What of its state is per element, what is the count of updates, and what follows from it."""
        first, last = whole[0][1], whole[-1][1]
        if late := sorted(set(last) ^ set(first)):
            raise self._refused(f"keeps {', '.join(late)} in some steps and not in others")
        slots: list[str] = []
        counts: dict[str, Any] = {}
        others: list[str] = []
        for name, value in last.items():
            if isinstance(value, Tensor) and value.numel() > 1:
                self._check_slot(name, value)
                slots.append(name)
            elif not isinstance(value, (int, float, Tensor)):
                raise self._refused(f"keeps {name}, a {type(value).__name__}")
            elif all(float(state[name]) == count for count, (_, state) in enumerate(whole, start=1)):
                counts[name] = first[name]
            elif all(
                _seen(mine[name]) == _seen(theirs[name]) for (_, mine), (_, theirs) in zip(whole, other, strict=True)
            ):
                others.append(name)
            else:
                raise self._refused(
                    f"keeps {name}, one number that follows from the learning rates of all steps before"
                )
        found = (tuple(slots), set(counts), tuple(others))
        known = (self._stepper.slots, set(self._stepper.counts), self._stepper.others)
        if self._stepper.slots and found != known:
            raise self._refused(f"keeps {', '.join(slots)} for one parameter and {', '.join(known[0])} for another")
        self._stepper.slots, self._stepper.counts, self._stepper.others = found[0], counts, found[2]

    def _check_slot(self, name: str, value: Tensor) -> None:
        if tuple(value.shape) != self._shape:
            raise self._refused(
                f"keeps {name} of shape {list(value.shape)} for a parameter of shape {list(self._shape)}: not one number for "
                "each element"
            )
        if value.dtype != self._start.dtype:
            raise self._refused(
                f"keeps {name} as {value.dtype} for a parameter of {self._start.dtype}, and a shard has one dtype"
            )

    def _compare(self, whole: list[tuple[Tensor, Numbers]]) -> None:
        """The parameter as a row, in pieces, by the very steps that a job makes."""
        rows = torch.zeros(1 + len(self._stepper.slots), SIZE, dtype=self._start.dtype)
        rows[0] = self._start
        for count, (rate, (value, state)) in enumerate(zip(RATES, whole, strict=True), start=1):
            group = {**dict(self._settings), "lr": rate}
            for start, stop in pairwise(CUTS):
                grad = self._grads[count - 1, start:stop].clone()
                try:
                    self._stepper.step(rows[:, start:stop], grad, dict(group), count)
                except Misuse:
                    raise
                except Exception as error:
                    raise self._refused(f"cannot step a row of elements ({type(error).__name__}: {error})") from error
            for name, mine, theirs in zip(
                ("the value", *self._stepper.slots),
                rows,
                (value, *(state[n].reshape(-1) for n in self._stepper.slots)),
                strict=True,
            ):
                if odd := _differ(mine, theirs):
                    raise self._refused(
                        f"comes to other bits when a parameter of shape {list(self._shape)} is cut: {name} differs in {odd} of "
                        f"{prod(self._shape)} elements after {count} steps, so what it does to one depends on others"
                    )

    def _refused(self, why: str) -> Misuse:
        return Misuse(f"{self._stepper.name} {why}. {REMEDY}")


def _differ(one: Tensor, other: Tensor) -> int:
    """In how many elements, by their bits."""
    return int(
        (one.contiguous().view(torch.uint8) != other.contiguous().view(torch.uint8)).view(one.numel(), -1).any(1).sum()
    )


def _number(first: Any, count: int, device: torch.device) -> Any:
    """The count, as this optimizer keeps it."""
    if isinstance(first, Tensor):
        return torch.full_like(first, count, device=first.device if first.device.type == "cpu" else device)
    return type(first)(count)


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _plain(value: Any) -> Any:
    """A setting as a value that can be compared."""
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.item()
    return tuple(_plain(one) for one in value) if isinstance(value, (list, tuple)) else value


def _seen(value: Any) -> Any:
    """What tells whether a value was changed: plain values and tensors by what is in them, all else by what it is."""
    if isinstance(value, Tensor):
        return (tuple(value.shape), value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    if isinstance(value, Mapping):
        return {id(key) if isinstance(key, Tensor) else key: _seen(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_seen(one) for one in value]
    return value if isinstance(value, (int, float, str, bytes, bool, type(None))) else id(value)


def _name(optimizer: torch.optim.Optimizer) -> str:
    kind = type(optimizer)
    return f"torch.optim.{kind.__name__}" if kind.__module__.startswith("torch.optim") else kind.__name__
