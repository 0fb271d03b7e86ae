"""Where a new gang goes on from: every rank says what its node still has, and all come to the same conclusion.

The one idea: nothing is decided by one rank for the others. Each gets everybody's words, and the choice is a pure function of
those (`holdings.newest_whole`); only what is on disks is looked at by rank 0 alone, because checking it takes reading it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from elasticrl.base.parsed import parsed
from elasticrl.runtime.checkpoint.manifest import Manifest
from elasticrl.runtime.group import settle
from elasticrl.runtime.torch_names import all_gather_single
from elasticrl.runtime.vault.holdings import Holding, Whole, newest_whole
from elasticrl.runtime.vault.version import Lineage, Version, lineage_from_json, mark

if TYPE_CHECKING:
    from typing import Protocol

    from elasticrl.runtime.checkpoint.shelf import Found
    from elasticrl.runtime.group import Gang

    class Ranks(Protocol):
        """Who speak with each other, as one of them sees it."""

        @property
        def rank(self) -> int:
            """Its number."""

        @property
        def world(self) -> int:
            """How many they are."""

        @property
        def backend(self) -> str:
            """What carries their words."""

        @property
        def group(self) -> dist.ProcessGroup | None:
            """None: torch's default group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreed:
    """What the gang goes on from: a version in the vaults, a checkpoint, or (neither) the beginning. Both: a checkpoint whose
    parts were on the nodes' own disks, and are in their vaults now.

    Example: Agreed(version=Version(1284), lineage=(...), whole=Whole(...))
    """

    version: Version
    lineage: Lineage
    whole: Whole | None = None
    checkpoint: str | None = None
    passed_over: tuple[str, ...] = ()  # a sentence for everything newer that would not do
    manifest: Manifest | None = None  # of `checkpoint`: one rank has read it, or no rank can read all of it
    published: str | None = (
        None  # a newer checkpoint than the commit that is whole on the nodes' disks, unknown to rank 0
    )
    exposed: bool = False  # what is on the nodes' disks would not bring back what was committed
    pace_s: float = 0.0  # a step takes so long, by the slowest who knows; 0: nobody does
    copy_s: float = 0.0  # a state with its copies takes so long of a processor, in the same way

    @property
    def remembered(self) -> bool:
        """Does it come from memory, where survivors may have it as it is?"""
        return self.whole is not None and self.checkpoint is None


def agree(
    node: str, holdings: Sequence[Holding], gang: Gang, look: Callable[[], Found | None], *, floor: int,
    committed: int | None, disk: bool, pace_s: float = 0.0, copy_s: float = 0.0,
) -> Agreed:  # fmt: skip
    """The newest version whose every shard is in somebody's vault, if it is no older than step `floor`, which generation
    `committed` has committed (None: this rank does not know); else the newest good checkpoint, for which rank 0 takes a `look`.
    `disk`: do not look into vaults. `pace_s`: this rank's steps took so long, `copy_s`: its states. Collective.
    """
    said = {
        "vault": [holding.to_json() for holding in holdings],
        "committed": committed,
        "pace_s": pace_s,
        "copy_s": copy_s,
    }
    rows, lineages = exchange_with(gang, said, (holding.lineage for holding in holdings))
    everything = [Holding.from_json(row, lineages) for words in rows for row in words["vault"]]
    by = known([words["committed"] for words in rows])
    whole = None if disk else newest_whole(everything, here=node, floor=Version(floor), committed=by)
    if whole is not None:
        return Agreed(
            version=whole.version,
            lineage=whole.lineage,
            whole=whole,
            passed_over=whole.passed_over,
            pace_s=slowest(rows, "pace_s"),
            copy_s=slowest(rows, "copy_s"),
        )
    found: dict[str, Any] = {}
    if gang.rank == 0:
        good = look()
        if good is not None:
            manifest = good.manifest
            found = {
                "name": manifest.name,
                "version": [manifest.version.step, manifest.version.update],
                "lineage": [cut.to_json() for cut in manifest.lineage],
                "passed_over": good.passed_over,
                "manifest": manifest.encode().decode(),
            }
    said = _told(gang, found, 0)
    if not said:
        return Agreed(version=Version(0), lineage=())
    return Agreed(
        version=Version(*said["version"]),
        lineage=lineage_from_json(said["lineage"]),
        checkpoint=str(said["name"]),
        passed_over=tuple(said["passed_over"]),
        manifest=Manifest.decode(str(said["manifest"]).encode(), f"the manifest of {said['name']}"),
    )


def known(told: Iterable[int | None]) -> int | None:
    """Which generation committed the floor, if any rank knows it."""
    return max((generation for generation in told if generation is not None), default=None)


def slowest(rows: Iterable[Mapping[str, Any]], what: str) -> float:
    """How long that takes, by everybody's words."""
    return max((float(words[what]) for words in rows), default=0.0)


def exchange_with(
    gang: Ranks, words: Mapping[str, Any], lineages: Iterable[Lineage]
) -> tuple[list[Any], dict[str, Lineage]]:
    """Everybody's words, and the lineages that they speak of, by their marks. Each lineage is sent once, by the first rank that
    has it: with everybody's words, which are as long as the longest, it would come from all. Collective.
    """
    mine = {mark(lineage): lineage for lineage in lineages}
    rows = exchange(gang, {**words, "marks": list(mine)})
    first: dict[str, int] = {}
    for rank, row in enumerate(rows):
        for each in row["marks"]:
            first.setdefault(each, rank)
    found: dict[str, Lineage] = {}
    for speaker in sorted(set(first.values())):
        its = [each for each, rank in first.items() if rank == speaker]
        said = [[cut.to_json() for cut in mine[each]] for each in its] if gang.rank == speaker else []
        found |= zip(its, map(lineage_from_json, _told(gang, said, speaker)), strict=True)
    return rows, found


def exchange(gang: Ranks, words: Any) -> list[Any]:
    """Everybody's words, in rank order, as JSON: nothing that comes over a network is ever unpickled. Collective."""
    device = _device(gang)
    mine = _written(words).to(device)
    sizes = torch.empty(gang.world, dtype=torch.int64, device=device)
    all_gather_single(sizes, torch.tensor([mine.numel()], device=device), group=gang.group)
    settle(gang.group)
    longest = int(sizes.max())
    padded = torch.zeros(longest, dtype=torch.uint8, device=device)
    padded[: mine.numel()] = mine
    everyone = torch.empty(longest * gang.world, dtype=torch.uint8, device=device)
    all_gather_single(everyone, padded, group=gang.group)
    settle(gang.group)
    rows = everyone.cpu().view(gang.world, longest)
    return [parsed(bytes(row[:size].numpy().tobytes())) for row, size in zip(rows, sizes.tolist(), strict=True)]


def _told(gang: Ranks, words: Any, speaker: int) -> Any:
    """What rank `speaker` says, as JSON. Collective."""
    return parsed(told_bytes(gang, json.dumps(words).encode(), speaker))


def told_bytes(gang: Ranks, mine: bytes, speaker: int) -> bytes:
    """The bytes of rank `speaker`, one at least; those of the others are not looked at. Collective."""
    device = _device(gang)
    said = torch.frombuffer(bytearray(mine or b"-"), dtype=torch.uint8).to(device)
    size = torch.tensor([said.numel()], device=device)
    dist.broadcast(size, group=gang.group, group_src=speaker)
    settle(gang.group)
    if gang.rank != speaker:
        said = torch.empty(int(size), dtype=torch.uint8, device=device)
    dist.broadcast(said, group=gang.group, group_src=speaker)
    settle(gang.group)
    return bytes(said.cpu().numpy().tobytes())


def _written(words: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(json.dumps(words).encode()), dtype=torch.uint8)


def _device(gang: Ranks) -> str:
    return "cuda" if gang.backend == "nccl" else "cpu"
