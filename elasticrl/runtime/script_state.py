"""What a script hands over to be kept, as parts of a state: its model, its optimizer, and what each rank has for itself.

The one idea: a module and an optimizer are the same on all ranks, or cut into DTensors, so each rank keeps its share of them.
Everything else (a sampler, a schedule, random generators) is small and may differ, so each rank keeps all of its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch

from elasticrl.runtime.checkpoint import tree
from elasticrl.runtime.checkpoint.parts import Ambient, Parts, Replicated, whole_room
from elasticrl.runtime.misuse import Misuse
from elasticrl.runtime.names import bare
from elasticrl.runtime.vault.errors import StateError
from elasticrl.runtime.vault.source import dtype_of, name_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from elasticrl.runtime.vault.piece import Piece

RANDOM: Final = "random"  # the part of the generators
LARGE: Final = 16 << 20  # bytes of tensors that a rank may have for itself: they lie in a header, which others read


class Optimizer:
    """An optimizer. The state of a parameter that is a DTensor is cut as the parameter is."""

    def __init__(self, name: str, optimizer: torch.optim.Optimizer) -> None:
        self._name, self._optimizer = name, optimizer

    def state_dict(self) -> Mapping[str, Any]:
        """The optimizer's own."""
        return self._optimizer.state_dict()

    def load_state_dict(self, state_dict: Any, /) -> None:
        """The reverse."""
        self._optimizer.load_state_dict(state_dict)

    def room(self, wholes: Mapping[str, Piece], /) -> dict[str, torch.Tensor]:
        """A DTensor like its parameter for the state of each that is one; whole tensors for the rest."""
        parameters = [parameter for group in self._optimizer.param_groups for parameter in group["params"]]
        found: dict[str, torch.Tensor] = {}
        plain: dict[str, Piece] = {}
        for name, piece in wholes.items():
            kind, _, rest = name.removeprefix(f"{self._name}.").partition(".")
            number = rest.partition(".")[0]
            parameter = parameters[int(number)] if kind == "state" and int(number) < len(parameters) else None
            if parameter is not None and hasattr(parameter, "to_local") and piece.shape == tuple(parameter.shape):
                found[name] = torch.empty_like(parameter, dtype=dtype_of(piece.dtype))
            else:
                plain[name] = piece
        return found | whole_room(plain)

    def check(self) -> None:
        """`Misuse` for a state that could not be cut again."""
        for parameter, state in self._optimizer.state.items():
            for key, value in state.items():
                if not hasattr(value, "to_local"):
                    continue
                if value.shape != parameter.shape or getattr(parameter, "placements", None) != value.placements:
                    raise Misuse(
                        f"elasticrl.keep: {self._name} has {key}, a DTensor of {list(value.shape)}, for a parameter of "
                        f"{list(parameter.shape)}: only state that is cut as its parameter is can be kept."
                    )


class Own:
    """What a rank has for itself. A rank that is new gets what all others have alike, else it begins with its own."""

    def __init__(self, name: str, what: Replicated, rank: int, say: Callable[[str], None]) -> None:
        self._name, self._what, self._rank, self._say = name, what, rank, say

    def pieces(self) -> tuple[()]:
        """None: it goes where the values go."""
        return ()

    def values(self) -> dict[str, Any]:
        """This rank's, with its tensors as bytes."""
        skeleton, tensors = tree.split(self._name, self._what.state_dict())
        if (nbytes := sum(_plain(key, tensor).nbytes for key, tensor in tensors.items())) > LARGE:
            raise Misuse(
                f"elasticrl.keep: {self._name}.state_dict() has tensors of {nbytes / 1e6:.0f} MB. What is no torch.nn.Module "
                f"and no torch.optim.Optimizer is kept for each rank, and may have {LARGE / 1e6:.0f} MB: make it a Module "
                "(torch.optim.swa_utils.AveragedModel is one)."
            )
        flat = {key: [name_of(t.dtype), list(t.shape), _bytes(t)] for key, t in tensors.items()}
        return {str(self._rank): {"tree": skeleton, "tensors": flat}}

    def restored(self, values: Mapping[str, Any], /) -> None:
        """The values of all ranks that there were."""
        first, *others = values.values()
        if str(self._rank) not in values and any(other != first for other in others):
            self._say(f"{self._name} differed from rank to rank: rank {self._rank} is new and begins with its own")
            return
        self._what.load_state_dict(self.state_of(values, self._rank))

    @staticmethod
    def state_of(values: Mapping[str, Any], rank: int) -> Any:
        """A rank's state dict among those of all; the first one's if it has none."""
        mine = values.get(str(rank)) or next(iter(values.values()))
        return tree.join(mine["tree"], {key: _tensor(*row) for key, row in mine["tensors"].items()})


class Trainable:
    """Of a module what is trained: frozen parameters are as the script makes them. Filled in place."""

    def __init__(self, name: str, module: torch.nn.Module) -> None:
        self._name, self._module = name, module

    def state_dict(self) -> dict[str, Any]:
        """All but frozen parameters."""
        frozen = {name for name, parameter in self._module.named_parameters() if not parameter.requires_grad}
        return {name: value for name, value in self._module.state_dict().items() if name not in frozen}

    def load_state_dict(self, state_dict: Any, /) -> None:
        """The reverse."""
        self._module.load_state_dict(state_dict, strict=False)

    def room(self, wholes: Mapping[str, Piece], /) -> dict[str, torch.Tensor]:
        """Where it lives."""
        live = tree.split(self._name, self.state_dict())[1]
        fit = {
            name: live[name]
            for name, piece in wholes.items()
            if name in live and tuple(live[name].shape) == piece.shape
        }
        return fit | whole_room({name: piece for name, piece in wholes.items() if name not in fit})


def parts_of(
    given: Mapping[str, object], rank: int, *, random: bool, say: Callable[[str], None], frozen: bool = True
) -> Parts:
    """What the script named, ready to be kept. Modules come first, generators last. `Misuse` for what cannot be kept."""
    found = Parts()
    for name, what in sorted(given.items(), key=lambda item: not isinstance(item[1], torch.nn.Module)):
        if isinstance(what, torch.nn.Module):
            found.register(name, unwrapped(what) if frozen else Trainable(name, unwrapped(what)))
        elif isinstance(what, torch.optim.Optimizer):
            found.register(name, Optimizer(name, what))
        elif isinstance(what, Replicated):
            found.register(name, Own(name, what, rank, say))
        else:
            raise Misuse(f"elasticrl.keep: {name} is a {type(what).__name__} without state_dict and load_state_dict.")
    if random:
        found.register(RANDOM, Own(RANDOM, Ambient(), rank, say))
    return found


def unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    """The module inside of DistributedDataParallel, which puts a word before each name."""
    inner = model.module if isinstance(model, torch.nn.parallel.DistributedDataParallel) else model
    assert isinstance(inner, torch.nn.Module)
    return inner


def heads(given: Mapping[str, object]) -> dict[str, list[Any]]:
    """Of each parameter that is no DTensor: its dtype, shape and first elements. They must be the same on all ranks."""
    found: dict[str, list[Any]] = {}
    for name, what in given.items():
        if isinstance(what, torch.nn.Module):
            for key, parameter in unwrapped(what).named_parameters():
                if not hasattr(parameter, "to_local"):
                    first = parameter.detach().reshape(-1)[:4].double().tolist()
                    found[f"{name}.{bare(key)}"] = [name_of(parameter.dtype), list(parameter.shape), first]
    return found


def unlike(rows: list[dict[str, list[Any]]]) -> str:
    """Why these heads are not those of one state; "": they are."""
    for rank, row in enumerate(rows):
        for name in {**rows[0], **row}:
            if repr(rows[0].get(name)) != repr(row.get(name)):  # as text: NaN is not itself
                return (
                    f"elasticrl.keep: {name} is not the same on rank 0 and on rank {rank}, and is no DTensor. Of what is no "
                    "DTensor one value is kept for all ranks. Use FSDP2 or DTensor where ranks have different parameters."
                )
    return ""


def _plain(name: str, tensor: torch.Tensor) -> torch.Tensor:
    if hasattr(tensor, "to_local") or tensor.layout != torch.strided or tensor.is_quantized:
        raise StateError(
            f"{name} is a {type(tensor).__name__} (layout {tensor.layout}): only plain tensors can be kept there."
        )
    return tensor.detach()


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def _tensor(dtype: str, shape: list[int], data: bytes) -> torch.Tensor:
    if not data:
        return torch.empty(shape, dtype=dtype_of(dtype))
    return torch.frombuffer(bytearray(data), dtype=dtype_of(dtype)).view(shape)
