"""The shards of a vault's directory: which are whole, and files for those that come from elsewhere.

The one idea: a file counts when its seal does. What is known of one is known by that seal, and read again when it has changed;
what is on its way has a file of its own, and leaves nothing behind if it does not all arrive.
"""

import asyncio
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path

from elasticrl.runtime.vault import layout
from elasticrl.runtime.vault.channel import Channel
from elasticrl.runtime.vault.errors import VaultError
from elasticrl.runtime.vault.holdings import Holding, holding_of
from elasticrl.runtime.vault.layout import Torn
from elasticrl.runtime.vault.slots import FETCHED, PART, Pinned, Slot, Slots, drop, files, part, pin
from elasticrl.runtime.vault.transfer import Offer, receive_blocks
from elasticrl.runtime.vault.version import Version


class Stock:
    """One directory's, which one server has."""

    def __init__(self, directory: Path, node: str, deadline_s: float) -> None:
        self.directory, self.node, self._deadline_s = directory, node, deadline_s
        self._known: dict[Path, tuple[int, Holding]] = {}
        self._incoming: dict[tuple[str, str], tuple[Slots, asyncio.Lock]] = {}
        self._parts = 0  # how many were fetched: no two have one name

    def close(self) -> None:
        """Lets go of the files. They stay."""
        for slots, _ in self._incoming.values():
            slots.close()

    def scan(self) -> list[tuple[Path, Holding]]:
        """The whole shards in the directory. Only headers of files whose seal has changed are read again."""
        present: dict[Path, tuple[int, Holding]] = {}
        for path, name in files(self.directory):
            if name.writer.startswith(PART):
                continue
            known = self._known.get(path)
            if known is not None and known[0] == _seal_of(path):
                present[path] = known
                continue
            shard = pin(path)
            if isinstance(shard, Pinned):
                with shard:
                    present[path] = (shard.sealed.seal, holding_of(shard.sealed, self.node))
        self._known = present
        return [(path, holding) for path, (_, holding) in present.items()]

    def find(self, version: Version, *, generation: int, shard: int, world: int) -> Pinned | None:
        """A shard that is whole here, for the caller to close."""
        for path, held in self.scan():
            if (held.version, held.generation, held.shard, held.world) != (version, generation, shard, world):
                continue
            found = pin(path)
            if isinstance(found, Pinned):
                if (found.sealed.stamp.version, found.sealed.stamp.generation) == (version, generation):
                    return found
                found.close()
        return None

    def has(self, offered: Offer) -> bool:
        """Is the very same here already?"""
        stamp = offered.stamp
        for path, held in self.scan():
            if (held.node, held.writer, held.version) == (stamp.node, stamp.writer, stamp.version):
                found = pin(path)
                if isinstance(found, Pinned):
                    with found:
                        if (found.sealed.text, found.sealed.sums) == (offered.text, offered.sums):
                            return True
        return False

    def drop_before(self, floor: Version, *, fetched: bool) -> tuple[list[str], bool]:
        """The names of what has gone, and whether something stays because somebody looks at it just now."""
        families: dict[tuple[str, str], list[tuple[Path, Version | None]]] = {}
        copies: dict[tuple[str, str], list[Path]] = {}
        holdings = dict(self.scan())
        for path, name in files(self.directory):
            if name.writer.startswith((PART, FETCHED)):
                copies.setdefault((name.origin, name.writer), []).append(path)
                continue
            version = holdings[path].version if path in holdings else _version_of(path)
            families.setdefault((name.origin, name.writer), []).append((path, version))
        removed: list[str] = []
        stale = 0
        for family, members in families.items():
            versions = [version for _, version in members if version is not None]
            # A family without any sealed version is just being written for the first time.
            if not versions or max(versions) >= floor:
                continue
            stale += len(members)
            removed += self._drop(family, [path for path, _ in members])
        glanced = len(removed) < stale
        for family, paths in copies.items() if fetched else ():
            removed += self._drop(family, paths)
        return removed, glanced

    def _drop(self, family: tuple[str, str], paths: Iterable[Path]) -> list[str]:
        """Remove these, but for what is being written or read; the names of those that are gone."""
        if family in self._incoming and self._incoming[family][1].locked():
            return []  # more of it is just coming
        slots = self._incoming.pop(family, None)
        if slots is not None:
            slots[0].close()
        return [path.name for path in paths if drop(path)]

    async def take(
        self, channel: Channel, offered: Offer, writer: str, blocks: Iterable[int], *, announce: bool = False
    ) -> Path:
        """Receive into a file of our own; nothing of it remains if it does not all arrive."""
        family = (offered.stamp.node, writer)
        if family not in self._incoming:
            # What was fetched is for one restore; what is kept for another node outlives the next version of it.
            keep = 0 if writer.startswith(FETCHED) else 2
            slots = Slots(self.directory, origin=family[0], writer=family[1], keep=keep)
            self._incoming[family] = (slots, asyncio.Lock())
        slots, lock = self._incoming[family]
        async with asyncio.timeout(self._deadline_s):
            await lock.acquire()
        try:
            stamp = offered.stamp
            # Fresh memory takes time (a third of a second per gigabyte), which is not everybody's.
            below = stamp.version, stamp.generation
            take = partial(slots.take, offered.shape.total, below=below, sealed=stamp.sealed)
            slot = await _whole(take, Slot.unlock)
            try:
                if announce:
                    await channel.send({"ok": True})
                await receive_blocks(channel, slot, offered, tuple(blocks))
            finally:
                slot.unlock()
            return slot.path
        finally:
            lock.release()

    async def take_part(self, channel: Channel, offered: Offer, writer: str, blocks: Iterable[int]) -> Path:
        """Receive these blocks into a file with memory for them alone. It is the caller's: he pins it and removes its name."""
        shape, blocks = offered.shape, tuple(blocks)
        self._parts += 1
        take = partial(
            part,
            self.directory,
            origin=offered.stamp.node,
            writer=writer,
            number=self._parts,
            nbytes=shape.total,
            ranges=[(0, shape.data_start), *map(shape.block, blocks), (shape.sums_start, shape.total)],
        )
        slot = await _whole(take, _remove)
        try:
            await receive_blocks(channel, slot, offered, blocks)
        except BaseException:
            slot.path.unlink(missing_ok=True)
            raise
        finally:
            slot.close()
        return slot.path


async def _whole(take: Callable[[], Slot], undo: Callable[[Slot], None]) -> Slot:
    """A slot that is taken in a thread; who is cancelled meanwhile lets go of it before anybody else takes one."""
    work = asyncio.ensure_future(asyncio.to_thread(take))
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        with suppress(OSError, VaultError):
            undo(await work)
        raise


def _remove(slot: Slot) -> None:
    slot.path.unlink(missing_ok=True)
    slot.close()


def _seal_of(path: Path) -> int:
    """The seal in the file as it stands; 0 if there is none."""
    try:
        with path.open("rb") as file:
            prelude = file.read(layout.HEADER_AT)
    except FileNotFoundError:
        return 0
    return layout.seal_now(memoryview(prelude)) if len(prelude) == layout.HEADER_AT else 0


def _version_of(path: Path) -> Version | None:
    shard = pin(path)
    if isinstance(shard, Torn):
        return None
    with shard:
        return shard.sealed.stamp.version
