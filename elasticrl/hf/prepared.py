"""A loop of Accelerate over lanes: `elasticrl.hf.prepare` in place of `accelerator.prepare`.

    elasticrl.hf.join()
    accelerator = Accelerator()
    model, optimizer, loader, scheduler = elasticrl.hf.prepare(model, optimizer, loader, scheduler, epochs=3)
    for epoch in loader.epochs:
        for batch in loader:
            accelerator.backward(model(**batch).loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()

The one idea: the loader drives the job. Each of its batches is one lane; what the body does with it is that lane's forward and
backward pass. When the body asks for the next batch, the lane is done; after the last lane that is here, the update is made. So
what the body calls of the optimizer and the scheduler does nothing, and a step that was cut short is simply handed out again.

A pass over the loader is an epoch. A process that comes in late finds the passes that are over empty.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler

from elasticrl.hf.place import join
from elasticrl.runtime.data.cursor import Cursor, Walk
from elasticrl.runtime.misuse import Misuse
from elasticrl.runtime.optim import follow
from elasticrl.runtime.trained import strategy_of

if TYPE_CHECKING:
    from elasticrl.runtime.run import Run


def prepare(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, loader: DataLoader[Any], scheduler: LambdaLR | None = None,
    *, epochs: int, max_norm: float | None = None,
) -> tuple[torch.nn.Module, Optimizer, Loader, Scheduler]:  # fmt: skip
    """Make them parts of this job. `epochs`: passes over the data. `max_norm`: gradients are clipped to it, in place of
    `accelerator.clip_grad_norm_`.
    """
    from accelerate import Accelerator
    from accelerate.utils import send_to_device

    run = join()
    _check(run, loader, scheduler)
    accelerator = Accelerator()  # as the script's: they share their state
    model = accelerator.prepare_model(model)
    made = Loader(run, loader, epochs, lambda batch: send_to_device(batch, accelerator.device))
    run.register(model=model, optimizer=follow(optimizer, model), data=made.cursor)
    made.rates, made.max_norm = Scheduler(optimizer, scheduler), max_norm
    return model, Optimizer(optimizer), made, made.rates


class Optimizer:
    """What the script sees of its optimizer. The update is made by the loader, so `step` and `zero_grad` do nothing."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.param_groups = optimizer.param_groups

    def step(self) -> None:
        """Nothing."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Nothing: the gradient is this lane's until the next batch is asked for."""
        del set_to_none


class Scheduler:
    """Learning rates as a function of the step: nobody has to remember how often `step` was called."""

    def __init__(self, optimizer: torch.optim.Optimizer, scheduler: LambdaLR | None) -> None:
        self._groups = optimizer.param_groups
        self._factors: list[Any] = scheduler.lr_lambdas if scheduler else [lambda _: 1.0] * len(self._groups)
        self._rates = [float(group.get("initial_lr", group["lr"])) for group in self._groups]

    def at(self, step: int) -> None:
        """Set the rates of a step."""
        for group, rate, factor in zip(self._groups, self._rates, self._factors, strict=True):
            group["lr"] = rate * float(factor(step))

    def step(self) -> None:
        """Nothing."""

    def get_last_lr(self) -> list[float]:
        """Of each group, in the step that is made now."""
        return [float(group["lr"]) for group in self._groups]


class Loader:
    """Hands out the batches of the lanes that are here, epoch by epoch, and makes the updates. `len` is steps of an epoch."""

    rates: Scheduler
    max_norm: float | None

    def __init__(self, run: Run, loader: DataLoader[Any], epochs: int, placed: Any) -> None:
        self.run = run
        self.step = 0  # the step that is made now
        self._dataset, self._collate, self._placed = loader.dataset, loader.collate_fn, placed
        walk = Walk(
            name="loader",
            size=len(loader.dataset),  # type: ignore[arg-type] # checked
            lanes=run.tree.lanes.count,
            per_lane=loader.batch_size or 1,
            seed=run.tree.job.seed,
            shuffle=isinstance(loader.sampler, RandomSampler),
            edge="drop",
            epochs=epochs,
        )
        if not walk.usable:
            raise Misuse(
                f"The data have {walk.size} samples, and a step takes {walk.batch} (lanes.count x batch_size): make the batch "
                "smaller."
            )
        self.cursor = Cursor(walk)
        self._passes, self._job = 0, self._drive()
        self._epoch: int | None = None  # of the step whose lanes come next; None: not asked yet
        self._over = False

    def __len__(self) -> int:
        return self.cursor.walk.usable // self.cursor.walk.batch

    @property
    def epochs(self) -> Iterator[int]:
        """The epochs from where the job is: `for epoch in loader.epochs` spares a process that comes late those before."""
        while self._ready():
            assert self._epoch is not None
            self._passes = self._epoch
            yield self._epoch

    def __iter__(self) -> Iterator[Any]:
        """One epoch: the batches up to the first step of a later one."""
        self._passes += 1
        while self._ready() and self._epoch is not None and self._epoch < self._passes:
            self._epoch = None
            for batch in self._job:
                if isinstance(batch, Epoch):
                    self._epoch = batch.number
                    break
                yield batch
            else:
                self._over = True

    def _ready(self) -> bool:
        """Ask for the first step, if nobody has. Is there one more to make?"""
        if self._epoch is None and not self._over:
            first = next(self._job, None)
            self._over = first is None
            self._epoch = first.number if isinstance(first, Epoch) else None
        return not self._over

    def _drive(self) -> Iterator[Any]:
        """For each step its epoch, then the batches of its lanes. The body runs while one is handed out."""
        with self.run as run:
            for step in run.steps():
                self.step = int(step)
                with step:
                    yield Epoch(step // len(self))
                    yield from self._lanes()
                    self.rates.at(step)
                    run.update(max_norm=self.max_norm)

    def _lanes(self) -> Iterator[Any]:
        for lane in self.run.lanes():
            with lane.rng("train"):
                yield self._placed(self._collate([self._dataset[sample.index] for sample in lane.ids()]))
            lane.done()


@dataclass(frozen=True, slots=True)
class Epoch:
    """Told before the lanes of a step."""

    number: int


def _check(run: Run, loader: DataLoader[Any], scheduler: Any) -> None:
    """Misuse, with all that is refused."""
    from accelerate.state import AcceleratorState, GradientState

    wrong = []
    if strategy_of(run.tree, "model") != "replicated":
        wrong.append("model.strategy must be replicated: Accelerate's loop has the whole model in each process.")
    if isinstance(loader.dataset, IterableDataset) or not hasattr(loader.dataset, "__len__"):
        wrong.append("the loader's dataset must have a length: samples are asked for by number.")
    if loader.batch_size is None or not isinstance(loader.sampler, RandomSampler | SequentialSampler):
        wrong.append("the loader must have a batch_size, and shuffle or not: the order of samples is the job's own.")
    if scheduler is not None and not hasattr(scheduler, "lr_lambdas"):
        wrong.append(
            f"{type(scheduler).__name__}: the learning rate must be a function of the step; use LambdaLR, as "
            "transformers.get_scheduler makes."
        )
    if GradientState().num_steps != 1:
        wrong.append("gradient_accumulation_steps must be 1: a lane is one micro-batch, so raise lanes.count instead.")
    if AcceleratorState._shared_state and AcceleratorState().mixed_precision == "fp16":  # noqa: SLF001 - is there one?
        wrong.append("fp16 scales losses by what it saw before, which is nobody's state: use bf16.")
    if wrong:
        raise Misuse("elasticrl.hf.prepare: " + " ".join(wrong))
