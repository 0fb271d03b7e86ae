"""Where a new gang goes on from whose nodes have disks of their own: `agree`, with everybody's disk in place of one for all.

The one idea: a disk gives back only what its node wrote, so a checkpoint is there when all its nodes are. Each says what it
has, all choose the same, and each puts its part back into its vault. Nodes that are missing are waited for: they may still be
starting. What never comes is said; an older checkpoint that is whole is taken, or none: nobody begins anew beside a commit.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from elasticrl.base.words import count
from elasticrl.runtime.agree import Agreed, exchange, exchange_with, known, slowest
from elasticrl.runtime.checkpoint.local import NEWEST, Choice, Held, bring, choose, held
from elasticrl.runtime.checkpoint.manifest import name_of
from elasticrl.runtime.vault.errors import CheckpointError, CheckpointRefused, CheckpointStorage, VaultError
from elasticrl.runtime.vault.holdings import Holding, Whole, newest_whole
from elasticrl.runtime.vault.version import Version, alive

if TYPE_CHECKING:
    from elasticrl.runtime.checkpoint.place import Place
    from elasticrl.runtime.group import Gang

Had = tuple[tuple[Held, ...], tuple[str, ...]]  # by a disk, and a sentence for each checkpoint that is not good
Patiently = Callable[[Callable[[], Had]], Had]


@dataclass(frozen=True, slots=True, kw_only=True)
class Disk:
    """A worker's end of its node's disk, and the vault that the disk's shards go into.

    Example: Disk(place=place("/data/ppo/n03"), vault=Path("/dev/shm/elasticrl/ppo/n03"), job="ppo", node="n03", speaks=True)
    """

    place: Place
    vault: Path
    job: str
    node: str
    speaks: bool  # one worker of each node does
    timeout_s: float = 60.0  # for one shard to be in the vault
    offers: int = NEWEST  # so many of its checkpoints are told of


def agree_on_disks(
    disk: Disk, holdings: Sequence[Holding], gang: Gang, *, floor: int, committed: int | None, reload: bool,
    commit: str | None, waited_s: float, wait: Callable[[str, float], None], patiently: Patiently, pace_s: float = 0.0,
    copy_s: float = 0.0,
) -> Agreed:  # fmt: skip
    """The newest version whose every shard is in somebody's vault, if it is no older than step `floor`, which generation
    `committed` has committed (None: this rank does not know); else the newest checkpoint of which all parts are on the disks
    that are here. `reload`: do not look into vaults. Collective.

    `wait` is called with a sentence, and with how long somebody has `waited_s` already, where something newer is known and
    lies on disks that are not here. It returns when that was long enough, and raises when others have come. `patiently` reads
    a disk again until it answers, for as long as that may take. `pace_s`: this rank's steps took so long, `copy_s`: its states.
    """
    for read in (_at_once, patiently):
        mine, bad, away = _held(disk, commit, read)
        said = {
            "node": disk.node, "disk": [each.to_json() for each in mine], "problems": bad, "away": away,
            "vault": [h.to_json() for h in holdings], "waited_s": waited_s, "committed": committed,
            "pace_s": pace_s, "copy_s": copy_s,
        }  # fmt: skip
        lineages_here = (*(h.lineage for h in holdings), *(each.manifest.lineage for each in mine))
        rows, lineages = exchange_with(gang, said, lineages_here)
        memory = [Holding.from_json(row, lineages) for words in rows for row in words["vault"]]
        everybody = [_known(Held.from_json(row, lineages), floor) for words in rows for row in words["disk"]]
        by = known([words["committed"] for words in rows])
        whole = None if reload else newest_whole(memory, here=disk.node, floor=Version(floor), committed=by)
        if whole is not None:
            remembered = _from_memory(whole, everybody, disk.node, floor)
            return replace(remembered, pace_s=slowest(rows, "pace_s"), copy_s=slowest(rows, "copy_s"))
        if not any(words["away"] for words in rows):
            break
    choice = choose(everybody, here=disk.node)
    here = {str(words["node"]) for words in rows}
    if why := _lacking(choice, floor, here):
        wait(why, max(float(words["waited_s"]) for words in rows))
    problems = [str(problem) for words in rows for problem in words["problems"]]
    while choice.whole is not None:
        torn = _bring(disk, choice.whole, gang)
        if not torn:
            return _from_disks(choice, everybody, gang, problems)
        problems += torn.values()
        name = name_of(choice.whole.version, choice.whole.generation)
        everybody = [each for each in everybody if each.manifest.name != name or each.node not in torn]
        choice = choose(everybody, here=disk.node)
    if found := [*(short.said for short in choice.short), *problems]:
        raise CheckpointRefused(
            f"No checkpoint is whole on the disks of the {count(len(here), 'node')} that are here: "
            f"{'; '.join(found)}. Bring the missing nodes back with their disks, or put their folders ({disk.place} there) on "
            "nodes of the same names; or start a job of another name. Nothing was changed."
        )
    return Agreed(version=Version(0), lineage=())


def _at_once(read: Callable[[], Had]) -> Had:
    return read()


def _held(disk: Disk, commit: str | None, read: Patiently) -> tuple[tuple[Held, ...], tuple[str, ...], bool]:
    """What this node's disk has, if this worker speaks for it; and whether it does not answer just now."""
    if not disk.speaks:
        return (), (), False
    try:
        return *read(lambda: held(disk.place, disk.node, commit=commit, most=disk.offers)), False
    except CheckpointError as error:
        return (), (f"{disk.node}: {error}",), isinstance(error, CheckpointStorage)


def _known(each: Held, floor: int) -> Held:
    """The plan says that this step was committed. All may have lost their power before any wrote that down on its disk."""
    return replace(each, committed=each.committed or each.manifest.version == Version(floor))


def _from_memory(whole: Whole, everybody: Sequence[Held], here: str, floor: int) -> Agreed:
    """What lies on the disks is looked at all the same: a writer that outlived its worker may have made a checkpoint whole that
    nobody was told of, and a node that is gone for good has taken its part of the commit with it.
    """
    past = [
        each
        for each in everybody
        if each.manifest.version <= whole.version
        and alive(whole.lineage, each.manifest.generation, each.manifest.version)
    ]
    there = choose(past, here=here, uncommitted=True)
    name = name_of(there.whole.version, there.whole.generation) if there.whole and there.step > floor else None
    return Agreed(
        version=whole.version, lineage=whole.lineage, whole=whole, passed_over=whole.passed_over,
        published=name, exposed=there.step < floor,
    )  # fmt: skip


def _lacking(choice: Choice, floor: int, here: Collection[str]) -> str:
    """What was committed, and may be had from nodes that are not here; empty if nothing may. A node that is here and lacks its
    part has lost it: no waiting brings that back.
    """
    for short in choice.short:
        if not set(short.nodes) & set(here):
            return short.said
    if max([choice.step, *(short.step for short in choice.short)]) >= floor:
        return ""
    return f"step {floor} was committed, and none of the disks that are here has a part of it"


def _bring(disk: Disk, whole: Whole, gang: Gang) -> dict[str, str]:
    """Every node's part is in its vault, or a sentence for each node whose part is not good. Collective."""
    words: dict[str, str] = {}
    if disk.speaks:
        try:
            bring(disk.place, whole, disk.vault, job=disk.job, node=disk.node, timeout_s=disk.timeout_s)
        except CheckpointStorage as error:
            words = {"away": f"{disk.node}: {error}"}
        except (CheckpointError, OSError) as error:
            words = {"bad": str(error), "node": disk.node}
        except VaultError as error:
            words = {"full": f"{disk.node}: {error}"}
    rows = exchange(gang, words)
    if full := [row["full"] for row in rows if "full" in row]:
        raise VaultError("; ".join(full))
    if away := [row["away"] for row in rows if "away" in row]:
        raise CheckpointStorage("; ".join(away))
    return {row["node"]: row["bad"] for row in rows if "bad" in row}


def _from_disks(choice: Choice, everybody: Sequence[Held], gang: Gang, problems: Sequence[str]) -> Agreed:
    whole = choice.whole
    assert whole is not None
    name = name_of(whole.version, whole.generation)
    if whole.generation >= gang.generation:
        raise CheckpointRefused(
            f"{name} was saved by generation {whole.generation}, and this is generation {gang.generation}: the store has lost "
            "the job that saved it. Stop this one, and start a node that has a part of it with --adopt."
        )
    manifest = next(each.manifest for each in everybody if each.manifest.name == name)
    return Agreed(
        version=whole.version, lineage=whole.lineage, whole=whole, checkpoint=name,
        manifest=replace(manifest, own=None), passed_over=(*(short.said for short in choice.short), *problems),
    )  # fmt: skip
