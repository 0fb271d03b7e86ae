"""Strategy `deepspeed`: ZeRO 1, 2 or 3 shards the model; its gradients are sums in DeepSpeed's order, so close but not exact.

The idea: DeepSpeed cuts, reduces and gathers, and steps an optimizer of ours. Which part of which parameter a rank owns is
read off its engine, so the rank's shard, with the next version beside the present one, is that of the other strategies: the
same vault, copies, two-phase update and checkpoints, and any other strategy or world size reads what this one keeps. What
DeepSpeed calls an optimizer step puts the shard's next version where DeepSpeed keeps its master weights.

An engine is bound to a group for good. A new generation therefore builds the model and the engine anew, as for `fsdp`.
"""

# ruff: noqa: SLF001 - DeepSpeed tells nobody but itself who owns what; test_zero notices when these names change
from __future__ import annotations

import importlib
import logging
import os
import warnings
from math import prod
from typing import TYPE_CHECKING, Any, Final, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from elasticrl.runtime.layout import Layout, Piece, up
from elasticrl.runtime.names import parameters
from elasticrl.runtime.shard import Shard
from elasticrl.runtime.strategy import Point, Strategy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from contextlib import AbstractContextManager
    from types import ModuleType

    from torch.utils.hooks import RemovableHandle

    from elasticrl.runtime.lanes import Deal, Turn
    from elasticrl.runtime.optim import Rule
    from elasticrl.runtime.scalars import Tally

CLOSE: Final = (
    "strategy deepspeed is close, not exact: every sample is used exactly once, but sums are taken in DeepSpeed's order, so "
    "other worlds and recoveries differ in the last bits"
)


class Zero(Strategy):
    """`build(mesh)` returns the whole model, with the same parameters for every world; DeepSpeed shards it in place.

    Long because most of it is the course of a step, which all strategies share (`Strategy`).
    """

    def __init__(
        self, build: Callable[[DeviceMesh], torch.nn.Module], rule_of: Callable[[str], Rule], *, deal: Deal, rank: int,
        group: dist.ProcessGroup, stage: int, offload: bool = False, device: str = "cpu", bucket_bytes: int = 16 << 20,
        point: Point = lambda _name: None, shard: Shard | None = None,
    ) -> None:  # fmt: skip
        """With `offload` the master weights and the optimizer's state are in the host's memory, and computed there.

        `shard` is that of an earlier generation, if it is cut as this one's will be: its versions are kept.
        """
        super().__init__(deal, rank, group, point)
        self.model = build(DeviceMesh.from_group(group, device))
        named = [(name, param) for name, param in parameters(self.model) if param.requires_grad]
        kinds = {param.dtype for _, param in named}
        if kinds != {torch.float32}:
            raise ValueError(f"trainable parameters must be float32, not {sorted(map(str, kinds))}")
        self._stage, self._device = stage, torch.device(device)
        self._params = [param for _, param in named]
        self._step = _Step(self._params, self._take)
        self._engine = _engine(
            self.model, self._step, group, self._device.type, settings(stage, offload, bucket_bytes // 4)
        )
        self._zero: Any = self._engine.optimizer
        layout = _layout(self._zero, named, deal.world)
        kept = shard is not None and (shard.layout, shard.rank) == (layout, rank)
        host = torch.device("cpu") if offload else self._device
        self._shard = (
            shard if kept and shard else Shard(layout, rank, rule_of, dtype=torch.float32, device=host, old=shard)
        )
        by_name = dict(named)
        self._places = [(piece.there, by_name[piece.name]) for piece in self._shard.pieces]
        for place, param in [] if kept else self._places:
            self._shard.state[0, place] = _master(param, place)
        self._ghosts: list[RemovableHandle] = []

    @property
    def turns(self) -> tuple[Turn, ...]:
        """The passes this rank makes in each update. From stage 2 on every backward pass is a collective: ghosts fill up."""
        return self.deal.turns(self.rank, ghosts=self._stage > 1)

    def begin(self, turn: Turn) -> Tally:
        """As Strategy.begin. DeepSpeed is told by hand what it would see for itself if its engine were what is called."""
        tally = super().begin(turn)
        self._engine.set_gradient_accumulation_boundary(len(self._done) + 1 == len(self.turns))
        self._zero.clear_backward_seen_flag()
        self._engine._backward_prologue()
        if turn.ghost:
            self._ghosts = [param.register_hook(torch.zeros_like) for param in self._params]  # type: ignore[no-untyped-call] # torch has no types for it
        return tally

    def close(self) -> None:
        """The model goes with its engine."""
        self._engine.destroy()

    def _finish(self, turn: Turn) -> None:
        for hook in self._ghosts:
            hook.remove()
        self._ghosts = []
        if self._zero._backward_active_depth:
            raise RuntimeError(f"lane {turn.lane} had no backward pass; every lane runs one")

    def _reduce(self) -> None:
        """The reducing was done in the last backward pass; DeepSpeed's sum is a mean over ranks."""
        self.point("reduce")
        for place, param in self._places:
            torch.mul(
                _grad(self._zero, param)[: place.stop - place.start], self.deal.world, out=self._shard.grad[place]
            )

    def _publish(self, params: torch.Tensor) -> None:
        self.point("gather")
        if self._shard.applied:
            self._engine.step()  # takes the next version from the shard, and gathers
            return
        self._put(params)
        if self._stage == 3:
            for number in range(len(self._zero.fp16_groups)):
                self._zero._reassign_or_swap_out_partitioned_parameters(number)
        else:
            self._zero.update_lp_params()

    def _take(self) -> None:
        self._put(self._shard.next[0])

    def _put(self, params: torch.Tensor) -> None:
        for place, param in self._places:
            _master(param, place).copy_(params[place])


class _Step(torch.optim.Optimizer):
    """What DeepSpeed steps, once for each of its groups. All that it knows of an optimizer is this."""

    def __init__(self, params: Sequence[torch.nn.Parameter], take: Callable[[], None]) -> None:
        super().__init__(params, {"lr": 0.0})
        self._take = take

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override] # torch types two ways to call it; DeepSpeed has one
        """The next version is made already."""
        del closure
        self._take()


class _World:
    """What DeepSpeed calls an mpu: the gang's own group, in place of a copy that no interrupt would reach in time."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def get_data_parallel_group(self) -> dist.ProcessGroup:
        """All ranks."""
        return self._group

    def get_data_parallel_group_ranks(self) -> range:
        """All ranks."""
        return range(self._group.size())

    def get_data_parallel_world_size(self) -> int:
        """All ranks."""
        return self._group.size()

    def get_data_parallel_rank(self) -> int:
        """Ours."""
        return self._group.rank()

    def get_model_parallel_group(self) -> None:
        """There is none."""

    def get_model_parallel_world_size(self) -> int:
        """No model is cut across ranks but by ZeRO."""
        return 1

    def get_model_parallel_rank(self) -> int:
        """Alone."""
        return 0


def deepspeed(device: str = "cpu") -> ModuleType:
    """The package, told not to compile anything and to be quiet. ImportError if it is not there."""
    if device == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ.setdefault("DS_BUILD_OPS", "0")
    os.environ.setdefault("LOCAL_RANK", "0")  # an agent says it; without one there is one worker
    found = importlib.import_module("deepspeed")
    # An operator for memory shared by the ranks of one machine: half a minute of compiling, for what gloo does as well.
    importlib.import_module("deepspeed.ops").__compatible_ops__["deepspeed_shm_comm"] = False
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", message=r"`torch\.distributed\.\w+` is deprecated")  # by names that it calls
    return found


def gathered(params: Sequence[torch.Tensor]) -> AbstractContextManager[None]:
    """Within it parameters that stage 3 has sharded are whole, to be read. Collective."""
    return cast("AbstractContextManager[None]", deepspeed().zero.GatheredParameters(list(params)))


def settings(stage: int, offload: bool, bucket: int) -> dict[str, Any]:
    """DeepSpeed's configuration. Batches, clipping and accumulation are ours; it must not know better."""
    zero: dict[str, Any] = {
        "stage": stage,
        "reduce_bucket_size": bucket,
        "allgather_bucket_size": bucket,
        "overlap_comm": False,
        "stage3_param_persistence_threshold": 0,  # persistent ones would be gathered by a step only, not by a restore
        "stage3_prefetch_bucket_size": bucket,
    }
    if offload:
        zero["offload_optimizer"] = {"device": "cpu"}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": zero,
    }


_gang: list[dist.ProcessGroup] = []  # the one whose engines DeepSpeed's globals speak of


def _engine(model: torch.nn.Module, step: _Step, group: dist.ProcessGroup, device: str, config: dict[str, Any]) -> Any:
    """A new engine over the gang's group, on that kind of device: the model may have been built on the host."""
    package = deepspeed(device)
    if _gang != [group]:
        _gang[:] = [group]
        _begin(package, "gloo" if device == "cpu" else "nccl")
    engine, *_ = package.initialize(
        model=model, optimizer=step, model_parameters=step.param_groups[0]["params"], config=config, mpu=_World(group),
        dist_init_required=False,
    )  # fmt: skip
    return engine


def _begin(package: ModuleType, backend: str) -> None:
    """Forgets what an earlier gang's engines left in DeepSpeed's globals: its backend, and counters that name modules and
    parameters and must be alike on all ranks, of which some have just begun.
    """
    comm: Any = importlib.import_module("deepspeed.comm.comm")
    comm.cdb = None
    package.zero.Init.param_id = 0
    offload: Any = importlib.import_module("deepspeed.runtime.zero.parameter_offload").DeepSpeedZeRoOffload
    (count,) = offload._register_deepspeed_module.__defaults__
    count[0] = 0
    package.init_distributed(dist_backend=backend, auto_mpi_discovery=False, verbose=False)


def _layout(zero: Any, named: Sequence[tuple[str, torch.nn.Parameter]], world: int) -> Layout:
    """Which part of which parameter each rank owns, by DeepSpeed's rules."""
    cut = _by_parameter if hasattr(zero, "fp16_groups") else _by_row
    ranks: list[list[Piece]] = [[] for _ in range(world)]
    ends = [0] * world
    for name, shape, rank, start, stop in cut(zero, named, world):
        ranks[rank].append(Piece(name=name, shape=shape, start=start, stop=stop, at=ends[rank]))
        ends[rank] = up(ends[rank] + stop - start)
    return Layout(size=max(ends), pieces=tuple(map(tuple, ranks)))


_Part = tuple[str, tuple[int, ...], int, int, int]  # name, shape, rank, start, stop


def _by_row(zero: Any, named: Sequence[tuple[str, torch.nn.Parameter]], world: int) -> Iterable[_Part]:
    """Stages 1 and 2 put all parameters into one row and cut that into equal parts."""
    names = {id(param): name for name, param in named}
    for params, begins, size in zip(
        zero.round_robin_bit16_groups, zero.round_robin_bit16_offsets, zero.partition_size, strict=True
    ):
        for param, begin in zip(params, begins, strict=True):
            for rank in range(world):
                start, stop = max(rank * size, begin), min((rank + 1) * size, begin + param.numel())
                if start < stop:
                    yield names[id(param)], tuple(param.shape), rank, start - begin, stop - begin


def _by_parameter(_zero: Any, named: Sequence[tuple[str, torch.nn.Parameter]], world: int) -> Iterable[_Part]:
    """Stage 3 cuts every parameter into equal parts, the last ones shorter or empty."""
    for name, param in named:
        shape, part = tuple(param.ds_shape), param.ds_tensor.ds_numel  # type: ignore[attr-defined] # DeepSpeed put them there
        for rank in range(world):
            start, stop = min(rank * part, prod(shape)), min((rank + 1) * part, prod(shape))
            if start < stop:
                yield name, shape, rank, start, stop


def _master(param: Any, place: slice) -> torch.Tensor:
    """Where DeepSpeed keeps this rank's part of a parameter in full precision: a view."""
    found: torch.Tensor
    if hasattr(param, "ds_id"):
        found = param._z3_optimizer._get_fp32_opt_state_partition(param, release_swap_buffers=True)[0]
    else:
        found = param._hp_mapping.get_hp_fragment()
    return found.detach()[: place.stop - place.start]  # stage 3 pads the last rank's


def _grad(zero: Any, param: Any) -> torch.Tensor:
    """This rank's part of a parameter's gradient, as a row."""
    found: torch.Tensor
    if hasattr(param, "ds_id"):
        found = param._z3_optimizer.get_local_fp32_grad_for_param(param)
    elif zero.cpu_offload:
        part = param._hp_mapping
        where = part.get_hp_fragment_address()
        found = zero.single_partition_of_fp32_groups[part.param_group_index].grad.narrow(0, where.start, where.numel)
    else:
        found = param._hp_mapping.get_lp_grad_fragment(param._index_in_param_group)
    return found.reshape(-1)
