"""How a sealed version goes from one vault to another: the same two coroutines for a push to a buddy and for a fetch.

The one idea: the receiver acknowledges each block after it has checked it, and only a window's worth is in flight, so a slow
receiver slows its sender and nothing piles up in between. What arrives is written in place and sealed last, as a worker does.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from elasticrl.runtime.vault import faults, layout
from elasticrl.runtime.vault.channel import Channel, PeerError
from elasticrl.runtime.vault.layout import Sealed, Shape, Stamp
from elasticrl.runtime.vault.slots import Pinned, Slot


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """What the other side is about to send."""

    stamp: Stamp
    shape: Shape
    text: bytes
    sums: bytes


async def offer(channel: Channel, frame: Mapping[str, object], sealed: Sealed) -> None:
    """Announce a version: its header and its sums, so that the receiver can check each block as it comes."""
    await channel.send({**frame, "data_bytes": sealed.shape.data_bytes}, sealed.text)
    await channel.send({"ok": True}, sealed.sums)


async def promised(channel: Channel, frame: Mapping[str, object], size: int) -> Offer:
    """Read the rest of an offer; PeerError if it makes no sense."""
    text = await channel.read(size)
    _, size = await channel.receive()
    sums = await channel.read(size)
    try:
        stamp, table = layout.parse_header(text)
    except (ValueError, KeyError, TypeError, OverflowError) as error:
        raise PeerError(f"a shard offered by {channel.peer} has a header that is not understood: {error}") from error
    shape = layout.shape_of(text, table.starts[-1])
    if shape.data_bytes != frame.get("data_bytes") or len(sums) != 4 * shape.blocks:
        raise PeerError(f"a shard offered by {channel.peer} contradicts itself about its size")
    return Offer(stamp=stamp, shape=shape, text=text, sums=sums)


async def send_blocks(channel: Channel, shard: Pinned, blocks: Sequence[int], window_bytes: int) -> None:
    """Send these blocks; each is acknowledged. The file is pinned until the last is: its pages are what is on the way."""
    acknowledged = 0
    window = max(1, window_bytes // layout.BLOCK)
    with shard.open() as file:
        for number, index in enumerate(blocks):
            while number - acknowledged >= window:
                acknowledged = await _acknowledge(channel, acknowledged)
            start, stop = shard.sealed.shape.block(index)
            await channel.send_file({"block": index}, file, start, stop - start)
            faults.reach("vault.send.block")
        while acknowledged < len(blocks):
            acknowledged = await _acknowledge(channel, acknowledged)


async def _acknowledge(channel: Channel, count: int) -> int:
    answer, _ = await channel.receive()
    if not answer.get("ok"):
        raise PeerError(f"{channel.peer}: {answer.get('why', 'refused a block')}")
    return count + 1


async def receive_blocks(channel: Channel, slot: Slot, offered: Offer, blocks: Sequence[int]) -> None:
    """Take these blocks into `slot`, check each against the offered sums, and seal."""
    memory = slot.memory
    for expected in blocks:
        frame, size = await channel.receive()
        start, stop = offered.shape.block(expected)
        if frame.get("block") != expected or size != stop - start:
            raise PeerError(f"{channel.peer} sent {size} bytes as block {frame.get('block')}; block {expected} was due")
        await channel.read_into(memory[start:stop])
        if layout.checksum(memory[start:stop]) != offered.sums[4 * expected : 4 * expected + 4]:
            # The sender's memory was used again while it read, or a bit changed on the way: either way not this version.
            raise PeerError(
                f"block {expected} of {offered.stamp.node}'s step {offered.stamp.version} does not have its checksum "
                f"when it comes from {channel.peer}"
            )
        faults.reach("vault.receive.block")
        await channel.send({"ok": True})
    layout.seal(memory, offered.shape, offered.text, offered.sums)
