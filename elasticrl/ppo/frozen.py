"""Models that only compute: where they are, and whether all ranks have the same ones.

The idea: nobody sends these weights to anybody, each rank reads them by itself. So a folder or a hub's name that holds others
by now gives a replaced node another reference, and no digest of what is trained would tell it from a healthy one. What the job
has computed with is a part of its state, so that a gang of fresh processes knows it too.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn
from zlib_ng.zlib_ng import crc32

from elasticrl.runtime.digest import outliers
from elasticrl.runtime.misuse import Misuse
from elasticrl.runtime.outline import give_memory
from elasticrl.runtime.team import local

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed.device_mesh import DeviceMesh

    from elasticrl.config import Tree
    from elasticrl.runtime.run import Run


ENDS = "ends"  # beside the roles: the tokens that end an answer, which come from files too


class OtherFiles(RuntimeError):
    """This rank has read other model files than the others, or than the job until now: it must not compute with them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Word:
    """What a rank tells of its frozen weights, by role. `proven` are those that the job has computed with, as far as it knows.

    Example: Word(node="n2", here={"ref": 0x3f0a91c4}, proven={})
    """

    node: str
    here: Mapping[str, int]
    proven: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What a member of a team has of a model that the team shares, from one generation to the next.

    Example: Part(index=1, params={"model.norm.weight": tensor([1.0, ...])})
    """

    index: int  # in its team
    params: Mapping[str, torch.Tensor]


class Frozen:
    """Whole on each worker, or with layers that are sharded, or shared by a team, and then built anew for each gang."""

    def __init__(self, tree: Tree, device: str) -> None:
        self._device = device
        frozen = {"ref": tree.placement.ref, "reward": tree.placement.reward}
        self._sharded = {role for role, placement in frozen.items() if placement.strategy == "fsdp"}
        self._shared = {"ref"} if tree.model.team > 1 else set[str]()
        self._team = tree.model.team
        self._parts: dict[str, Part] = {}
        self._make: dict[str, Callable[[], nn.Module | None]] = {}
        self._outline: dict[str, Callable[[], nn.Module | None]] = {}
        self._whole: dict[str, nn.Module | None] = {}
        self._here: dict[str, int] = {}
        self._proven: dict[str, int] = {}  # seen by this process
        self._others_allowed = "frozen" in tree.checkpoint.allow
        model = tree.model
        paths = {
            "actor": model.path, "critic": model.critic_path or model.path, "ref": model.ref_path or model.path,
            "reward": tree.reward.model,
        }  # fmt: skip
        self._what = {role: f"The frozen weights of {role}, read from {path}," for role, path in paths.items()}
        self._what[ENDS] = f"The tokens that end an answer, read from {model.path},"

    def model(
        self, role: str, make: Callable[[], nn.Module | None], outline: Callable[[], nn.Module | None] | None = None
    ) -> nn.Module | None:
        """It, if it is whole; else how it will be made is remembered, and its `outline`, if it can be made without weights."""
        if role in self._sharded or role in self._shared:
            self._make[role], self._outline[role] = make, outline or make
            return None
        made = make()
        self._note(role, made)
        self._whole[role] = made.to(self._device) if made is not None else None
        return self._whole[role]

    def whole(self, role: str) -> nn.Module | None:
        """It, if it is whole: the same in all generations."""
        return self._whole.get(role)

    def here(self, role: str, base: Run) -> nn.Module | None:
        """It, in this generation."""
        if role not in self._make:
            return self.whole(role)
        gc.collect()  # FSDP2 ties a model and its hooks into circles, and the last generation's has to go first
        if role in self._shared:
            return self._of_team(role, base)
        made = self._make[role]()
        self._note(role, made)
        return layered(made, base.mesh)

    def _of_team(self, role: str, base: Run) -> nn.Module | None:
        """As the team shares it. Its files are read once; later gangs get what this process kept of them."""
        from elasticrl.runtime.planned import share  # half a second of imports, which only teams need

        index, part = base.rank % self._team, self._parts.get(role)
        kept = part.params if part is not None and part.index == index else None
        made = self._outline[role]() if kept is not None else self._make[role]()
        if made is None:
            return None
        if not any(param.is_meta for param in made.parameters()):
            self._note(role, made)
        share(made, base.team_mesh)
        give_memory(made, self._device, kept)
        made.to(self._device)
        self._parts[role] = Part(index=index, params={name: local(it).detach() for name, it in made.named_parameters()})
        return made

    def within(self, role: str, make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
        """The same maker of a model that trains; what of it does not (the base under adapters) is told of too."""

        def noting() -> nn.Module:
            made = make()
            self._note(role, made)
            return made

        return noting

    def ends(self, tokens: Sequence[int]) -> None:
        """The tokens that end an answer, as this rank has read them: they decide samples, and are compared like weights."""
        self._here[ENDS] = crc32(repr(tuple(tokens)).encode())

    def compare(self, base: Run) -> None:
        """Once in each generation. OtherFiles on a rank that has other weights than the rest, or than the job until now; Misuse
        on all where nobody has those, or nobody can say whose are right. Collective.
        """
        restored = {} if self._others_allowed else base.progress.frozen
        mine = Word(node=base.context.node, here=self._here, proven=self._proven or restored)
        told = [Word(**words) for words in base.tell(asdict(mine))]
        for role, ranks in odd(told).items():
            everywhere, known = len(ranks) == len(told), any(role in word.proven for word in told)
            unlike = f"not alike on all ranks: others than {'each other' if everywhere else 'most have'}"
            who = ", ".join(f"rank {rank} ({told[rank].node})" for rank in ranks)
            sentence = (
                f"{self._what[role]} are {'others than the job has computed with' if known else unlike} on {who}. The folder, "
                "or what the hub has under that name, is another there: give every node the same files, best in a folder"
                + (", or continue with these: --allow frozen (checkpoint.allow)." if everywhere and known else ".")
            )
            if everywhere:
                raise Misuse(sentence)
            if base.rank in ranks:
                raise OtherFiles(sentence)
            print(sentence, flush=True)
        self._proven = dict(self._here)
        base.progress.frozen = self._proven

    def _note(self, role: str, made: nn.Module | None) -> None:
        """Summed while it is on the host, once for each time that it is read."""
        found = checksum(made) if made is not None else None
        if found is not None:
            self._here[role] = found


def odd(told: Sequence[Word]) -> dict[str, tuple[int, ...]]:
    """The ranks whose weights are not those that the job has computed with; where nobody has seen it compute, not most others'.

    >>> fresh, old = Word(node="b", here={"ref": 7}, proven={}), Word(node="a", here={"ref": 5}, proven={"ref": 5})
    >>> odd([fresh, old]), odd([old, old]), odd([fresh, fresh, Word(node="c", here={"ref": 6}, proven={})])
    ({'ref': (0,)}, {}, {'ref': (2,)})
    """
    found = {}
    for role in sorted({role for word in told for role in word.here}):
        values = [word.here.get(role, 0) for word in told]
        proven = {word.proven[role] for word in told if role in word.proven}
        strange = tuple(rank for rank, value in enumerate(values) if value not in proven)
        if ranks := strange if len(proven) == 1 else outliers(values):
            found[role] = ranks
    return found


def checksum(model: nn.Module) -> int | None:
    """Of all that is not trained; None if everything is. 10 GB/s and more: quicker than it was read."""
    named = model.named_parameters(remove_duplicate=False)  # a tied head has two names
    trained = {name for name, param in named if param.requires_grad}
    held = {name: tensor for name, tensor in model.state_dict().items() if name not in trained}
    total = 0
    for name, tensor in sorted(held.items()):
        total = crc32(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode(), total)
        total = crc32(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy(), total)
    return total if held else None


def layered(model: nn.Module | None, mesh: DeviceMesh) -> nn.Module | None:
    """Its layers sharded. What is around them stays whole: a reward model is asked for its parts, not as one."""
    from torch.distributed.fsdp import fully_shard

    for layers in (module for module in (model.modules() if model else ()) if isinstance(module, nn.ModuleList)):
        for layer in layers:
            # By itself: each layer is a root to FSDP2, which leaves roots whole after they have computed.
            fully_shard(layer, mesh=mesh, reshard_after_forward=True)
    return model.to(mesh.device_type) if model is not None else None
