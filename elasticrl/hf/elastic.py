"""The loop of a Hugging Face trainer over lanes.

    class Trainer(elasticrl.hf.Elastic, GRPOTrainer): ...

The one idea: a trainer computes one lane as if that were the whole world, with the lane's own random numbers, in any process.
So all that it gathers "over all processes" (rewards, advantages, metrics) is a function of the lane alone. Two things cross
from lane to lane, and both are folded in the order of lanes: gradients, and the number of items (tokens) of the batch, by which
a loss that is a mean over tokens is divided. That number is known before any backward pass: a step first prepares all its lanes
(GRPO generates and scores here), then tells the ranks how many items each lane has, then trains on them.

Hooks that are missing, so a method with an underscore is overridden, and the line that each would need:
    _inner_training_loop   in `Trainer.train`: `return self.training_loop(args, trial, ignore_keys_for_eval)`
    _prepare_inputs        in `Trainer.training_step`: `inputs = self.prepare_inputs(inputs)`, in which GRPO generates
    _get_learning_rate     in `Trainer._maybe_log_save_evaluate`: `logs["learning_rate"] = self.learning_rate()`
The parts of transformers' loop are called by their names: `_init_training_state`, `_maybe_log_save_evaluate`, `_evaluate`,
`_finalize_training`, `_get_num_items_in_batch`, `_track_num_input_tokens`, `_remove_unused_columns` and
`_get_collator_with_removed_columns`. TRL has no public name for its metrics (book.py).
"""

# ruff: noqa: SLF001 - the parts of transformers' loop are its own methods
from __future__ import annotations

import time
from contextlib import nullcontext
from math import floor
from typing import TYPE_CHECKING, Any

import torch

from elasticrl.hf.book import Book
from elasticrl.hf.checks import check
from elasticrl.hf.frozen import checksums, compare
from elasticrl.hf.place import join
from elasticrl.hf.state import State
from elasticrl.runtime.data.cursor import Cursor, Walk
from elasticrl.runtime.misuse import Misuse
from elasticrl.runtime.optim import follow

if TYPE_CHECKING:
    from collections.abc import Callable

    from elasticrl.runtime.run import Run
    from elasticrl.runtime.step import Step
    from elasticrl.runtime.strategy import Reduced

# What it is put before: a transformers.Trainer, which has the names that are used here and not defined.
_Trainer: Any = object


class Elastic(_Trainer):  # type: ignore[misc] # a mixin: any trainer comes behind it
    """Put before a trainer of transformers or TRL: its `train()` is then a job of elasticrl.

    Example: class Trainer(Elastic, SFTTrainer): ...
    """

    control: Any  # transformers' TrainerControl

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        join()  # before the arguments and the model are made: generators are seeded, and Accelerate sees one process

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.run: Run = join()
        super().__init__(*args, **kwargs)
        self._ready: dict[int, Any] = {}  # each lane's inputs, as they go into the model
        self._began: bool | None = None  # on_train_begin was called here; as rank 0?
        self._compared = -1  # the generation whose ranks have told each other of their frozen weights
        check(self)

    # ---- what the rest of the job may ask

    @property
    def lanes_count(self) -> int:
        """Lanes of the job."""
        return self.run.tree.lanes.count

    @property
    def group(self) -> int:
        """Samples that are made of each prompt."""
        return int(getattr(self, "num_generations", 1))

    def is_world_process_zero(self) -> bool:
        """As transformers': of this generation."""
        return self.run.rank == 0

    def is_local_process_zero(self) -> bool:
        """As transformers'."""
        return self.run.first

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """As transformers', by rank 0. The others come back at once."""
        if self.is_world_process_zero():
            super().save_model(output_dir, _internal_call)

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """As transformers', on each rank, all of it: so all know the same numbers, and nobody waits. It draws from a stream of
        its own, so whether it is called changes no bit.
        """
        with self.run.phase("evaluate"), self.run.streams.ambient("evaluate"):
            found: dict[str, float] = super().evaluate(*args, **kwargs)
        return found

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """As transformers'. It goes on where the job is."""
        if resume_from_checkpoint:
            raise Misuse(
                "train(resume_from_checkpoint=...): a job goes on from its own memory or checkpoint by itself; leave it out. "
                "To begin with other weights, give the model that has them; to begin anew, give the job another job.name."
            )
        if self._began is not None:
            raise Misuse(
                "train() was called before: a process has one place in one job. Make a new job of what comes next."
            )
        return super().train(None, *args, **kwargs)

    # ---- the loop

    def _inner_training_loop(
        self, batch_size: int | None = None, args: Any = None, resume_from_checkpoint: Any = None, trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> Any:  # fmt: skip
        del batch_size, args, resume_from_checkpoint  # as __init__ has them; refused
        run, self._ignore, begun = self.run, ignore_keys_for_eval, time.time()
        self._walk = walk = self._samples()
        self._rows, self._collate = self._data()
        steps = self._steps(walk)
        self._prepare(trial, steps, epochs=steps * walk.batch / walk.usable)
        self._frozen = checksums(model=self.model, ref_model=getattr(self, "ref_model", None))
        self._cursor = Cursor(walk, group=self.group)
        run.register(
            model=self.model, optimizer=follow(self.optimizer, self.model), data=self._cursor, trainer=State(self)
        )
        with run:
            for step in run.steps(steps):
                self._take_rank()
                with step:
                    self._step_of(step)
            self._take_rank()
            return self._finalize_training(trial, steps * walk.batch * self.group, begun)

    def _samples(self) -> Walk:
        """The order of samples: a lane has `per_device_train_batch_size` of them, of whole groups."""
        args = self.args
        shuffle = args.train_sampling_strategy == "random" and getattr(args, "shuffle_dataset", True)
        return Walk(
            name="train_dataset",
            size=len(self.train_dataset),
            lanes=self.lanes_count,
            per_lane=args.per_device_train_batch_size // self.group,
            seed=args.seed if args.data_seed is None else args.data_seed,
            shuffle=shuffle,
            edge="drop" if args.dataloader_drop_last else "straddle",
        )

    def _steps(self, walk: Walk) -> int:
        """As max_steps says, else as many as the epochs have samples for."""
        args = self.args
        steps = args.max_steps if args.max_steps > 0 else floor(args.num_train_epochs * walk.usable / walk.batch)
        if steps < 1:
            raise Misuse(
                f"{args.num_train_epochs:g} epochs of {walk.usable} samples do not fill one step of {walk.batch} "
                "(lanes.count x per_device_train_batch_size): raise num_train_epochs, or make the batch smaller."
            )
        if self.run.tree.job.steps not in (0, steps):
            raise Misuse(
                f"job.steps is {self.run.tree.job.steps}, and the trainer's arguments (max_steps, num_train_epochs) come to "
                f"{steps}: the daemons would wait for steps that nobody makes. Set job.steps to 0: then the trainer says it."
            )
        return int(steps)

    def _data(self) -> tuple[Any, Callable[[list[Any]], Any]]:
        """The samples by number, and what makes a batch of some."""
        import datasets

        if isinstance(self.train_dataset, datasets.Dataset):
            return self._remove_unused_columns(self.train_dataset, description="Training"), self.data_collator
        return self.train_dataset, self._get_collator_with_removed_columns(self.data_collator, description="Training")

    def _prepare(self, trial: Any, steps: int, *, epochs: float) -> None:
        """Model, optimizer, schedule and state, as transformers has them when its loop begins."""
        per_epoch = max(1, floor(steps / max(epochs, 1e-9)))
        self._init_training_state(steps, per_epoch, -int(-epochs // 1), None, trial)
        self.create_optimizer()
        self.model_wrapped = self.accelerator.prepare_model(self.model)
        self.create_scheduler(num_training_steps=steps, optimizer=self.optimizer)
        if not hasattr(self.lr_scheduler, "lr_lambdas"):
            raise Misuse(
                f"lr_scheduler_type={self.args.lr_scheduler_type.value}: the learning rate must be a function of the step; use "
                "linear, cosine, constant or another one that is."
            )
        for group in self.optimizer.param_groups:  # what the schedule has made of them by now is `_factor`'s to say
            group["lr"] = group["initial_lr"]
        for name in ("model", "optimizer", "lr_scheduler"):
            setattr(self.callback_handler, name, getattr(self, name))
        self.current_gradient_accumulation_steps = 1
        self.accelerator.gradient_state._set_sync_gradients(True)
        self._tr_loss, self._total_loss_scalar = torch.zeros((), dtype=torch.float64), 0.0
        self._initial_global_step = self._initial_num_input_tokens_seen = self._globalstep_last_logged = 0

    def _take_rank(self) -> None:
        """Who speaks for the job may be another process now. Loggers begin in on_train_begin: whoever becomes rank 0 comes to
        it once more.
        """
        zero = self.is_world_process_zero()
        self.state.is_world_process_zero, self.state.is_local_process_zero = zero, self.is_local_process_zero()
        if hasattr(self, "log_completions"):
            self.log_completions = zero and self.args.log_completions
        if self._began is None or zero > self._began:
            self._began = zero
            self.control = self.callback_handler.on_train_begin(self.args, self.state, self.control)

    # ---- a step

    def _step_of(self, step: Step) -> None:
        """One step, from its samples to its log."""
        args, state, handler, walk = self.args, self.state, self.callback_handler, self._walk
        epoch = step * walk.batch // walk.usable
        if step == 0 and args.eval_on_start:
            self._evaluate(None, self._ignore, skip_scheduler=True)
        if step == 0 or epoch > (step - 1) * walk.batch // walk.usable:
            self.control = handler.on_epoch_begin(args, state, self.control)
        self.control = handler.on_step_begin(args, state, self.control)
        done = self._update(step)
        self.control = handler.on_optimizer_step(args, state, self.control)
        state.global_step, state.epoch = step + 1, (step + 1) * walk.batch / walk.usable
        self.control = handler.on_step_end(args, state, self.control)
        self._log(done)
        if state.epoch // 1 > epoch or state.global_step == state.max_steps:
            self.control = handler.on_epoch_end(args, state, self.control)
            self._log(done)
        if self.control.should_epoch_stop:
            raise Misuse(
                "A callback has set control.should_epoch_stop: epochs run into each other here; stop the training."
            )
        if self.control.should_training_stop:
            self.run.end(state.global_step)

    def _update(self, step: Step) -> Reduced:
        """The lanes that are here, and what all lanes come to."""
        run, lanes, book, self._ready = self.run, self.lanes_count, Book(self), {}
        if self._compared != run.generation:
            compare(run, self._frozen)
            self._compared = run.generation
        self.model.train()
        with run.phase("rollout") if self.group > 1 else nullcontext():
            items = [(lane, self._make(step, lane, book)) for lane in run.carried]
        share = self._share(items)
        for lane in run.lanes():
            lane.ids()
            with book.of(lane.index), lane.rng("train"):
                inputs = self._ready[lane.index]
                loss = self.training_step(self.model_wrapped, inputs, share)
                self._track_num_input_tokens(inputs)
                self.current_flos += float(self.floating_point_ops(inputs))
                lane.tally.add(loss=loss)
            lane.done()
        self._ready = {}
        book.close(run.tell(book.words()))
        self.control = self.callback_handler.on_pre_optimizer_step(self.args, self.state, self.control)
        norm = self.args.max_grad_norm if self.args.max_grad_norm > 0 else None
        done = run.update(max_norm=norm, lr_factor=self._factor(step))
        assert done is not None, "the step is guarded: what cuts it short is raised"
        self._tr_loss += done.tally.sums["loss"] / lanes
        return done

    def _make(self, step: Step, lane: int, book: Book) -> int | None:
        """A lane's inputs. Returns how many items its loss is a sum over; None: it is a mean of its own."""
        run = self.run
        ids = [sample.index for sample in self._cursor.ids(step, 0, lane)]
        with book.of(lane), run.streams.at(lane=lane).ambient("prepare"):
            rows = [self._rows[index] for index in ids for _ in range(self.group)]
            inputs = super()._prepare_inputs(self._collate(rows))
        self._ready[lane] = inputs
        counted = inputs.get("num_items_in_batch")  # of GRPO's answers
        counted = self._get_num_items_in_batch([inputs], self.args.device) if counted is None else counted
        return None if counted is None else int(counted)

    def _share(self, items: list[tuple[int, int | None]]) -> torch.Tensor | None:
        """What each lane's sum is divided by: the batch's items over the lanes, as the lanes' gradients are averaged."""
        counts = [count for told in self.run.tell([count for _, count in items]) for count in told]
        if None in counts:
            return None
        share = torch.tensor(max(sum(counts), 1) / self.lanes_count, device=self.args.device)
        for inputs in self._ready.values():
            if "num_items_in_batch" in inputs:
                inputs["num_items_in_batch"] = share
        return share

    def _prepare_inputs(self, inputs: Any) -> Any:
        """What was made for this step is ready."""
        return inputs if any(inputs is ready for ready in self._ready.values()) else super()._prepare_inputs(inputs)

    def _factor(self, step: int) -> float:
        """Of the learning rates, in this step."""
        return float(self.lr_scheduler.lr_lambdas[0](step))

    def _get_learning_rate(self) -> float:
        """In the step that was made last."""
        return float(self.optimizer.param_groups[0]["lr"]) * self._factor(max(self.state.global_step - 1, 0))

    def _log(self, done: Reduced) -> None:
        """As the arguments say. Nothing is saved: the job's checkpoints are."""
        self.control.should_save = False
        self._maybe_log_save_evaluate(
            self._tr_loss, done.norm / self.lanes_count, self.model_wrapped, None, self.state.epoch, self._ignore, None,
            learning_rate=self._get_learning_rate(),
        )  # fmt: skip
