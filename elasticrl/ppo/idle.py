"""Models that wait in the host's memory while no stage needs them.

The idea: a parameter's storage on the device is emptied and filled again, so every view of it (a strategy's flat rows, an
optimizer's, the module's own) stays the object that it was. What is on the host already is where it should wait: there nothing
is moved, and only the counts tell that the turn came.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from torch import nn


class Waiting(NamedTuple):
    """One storage on the device, and its bytes on the host."""

    storage: torch.UntypedStorage
    host: torch.Tensor


class Idle:
    """The offloaded roles. `frozen` ones never change, so their copy on the host is made once.

    Example: idle = Idle({"ref": reference}, frozen=("ref",)); with idle.but("actor"): train()
    """

    def __init__(
        self,
        models: Mapping[str, nn.Module],
        *,
        frozen: Collection[str] = (),
        stands_for: Mapping[str, str] | None = None,
        copies: Mapping[nn.Module, list[Waiting]] | None = None,
        host: str = "cpu",
    ) -> None:
        """`stands_for`: which role's model is used for one that has none of its own. `copies`: those of the generation before,
        whose frozen models may be away, and then have nothing else. `host`: the kind of device that nothing is moved from.
        """
        self._models, self._frozen, self._host = models, frozen, host
        self._stands_for = {"rollout": "actor", **(stands_for or {})}
        here = {model: role for role, model in models.items()}
        self.copies = {model: its for model, its in (copies or {}).items() if model in here}  # of frozen ones, for good
        self._away = {
            here[model]: its for model, its in self.copies.items() if any(not one.storage.nbytes() for one in its)
        }
        self.moves: dict[str, int] = dict.fromkeys(models, 0)  # how often each was put away

    @contextmanager
    def but(self, roles: str) -> Iterator[None]:
        """Within it those of a stage ("actor+critic") are here and the others away. After it all that train are here again: a
        fault may come at any time, and the next generation's strategy reads and writes them.
        """
        needed = {self._stands_for.get(role, role) for role in roles.split("+")}
        try:
            for role in self._models:
                if role in needed:
                    self._back(role)
                elif role not in self._away:
                    self._put(role)
            yield
        finally:
            for role in [role for role in self._away if role not in self._frozen]:
                self._back(role)

    def _put(self, role: str) -> None:
        self.moves[role] += 1
        model = self._models[role]
        copies = self.copies.get(model) or [_copy(storage) for storage in _storages(model, self._host)]
        if role in self._frozen:
            self.copies[model] = copies
        for storage, _ in copies:
            storage.resize_(0)
        self._away[role] = copies

    def _back(self, role: str) -> None:
        for storage, host in self._away.pop(role, ()):
            storage.resize_(host.numel())
            _bytes(storage).copy_(host)


def _storages(model: nn.Module, host: str) -> list[torch.UntypedStorage]:
    """What a model keeps on devices of another kind than `host`, each once."""
    found: dict[int, torch.UntypedStorage] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        storage = local.detach().untyped_storage()
        if storage.device.type != host and storage.nbytes():
            found[storage.data_ptr()] = storage
    return list(found.values())


def _copy(storage: torch.UntypedStorage) -> Waiting:
    return Waiting(storage=storage, host=_bytes(storage).to("cpu", copy=True))


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
