"""A checkpoint at a URL as a gang reads it.

The one idea: what comes from far comes once. Each table is read by one rank, which tells it to all; of the data each rank reads
the blocks that it needs. What any of them found is known to all before anybody puts it to use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from elasticrl.runtime.agree import exchange, told_bytes
from elasticrl.runtime.checkpoint.load import far_source, read_tables, refuse_part
from elasticrl.runtime.vault.errors import BlockCorrupt, CheckpointCorrupt, CheckpointStorage

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from elasticrl.runtime.agree import Ranks
    from elasticrl.runtime.checkpoint.far import Patience
    from elasticrl.runtime.checkpoint.manifest import Manifest
    from elasticrl.runtime.checkpoint.place import Url
    from elasticrl.runtime.vault.piece import Piece
    from elasticrl.runtime.vault.source import Source

BAD, AWAY = "bad", "away"  # under which a rank says what it found


def open_together(
    place: Url, manifest: Manifest, gang: Ranks, choose: Callable[[Source], Sequence[Piece]], patience: Patience
) -> Source:
    """The checkpoint as a source in which the pieces that this rank chooses are here, and checked. Collective.

    Where any rank found a changed byte all raise BlockCorrupt; CheckpointStorage where the store failed any of them. While one
    waits for the store the others wait for it in a collective, so its patience has to end before theirs.
    """
    refuse_part(place, manifest)
    words: dict[str, str] = {}
    texts: dict[int, bytes] = {}
    try:
        texts = read_tables(place, manifest, manifest.shards[gang.rank :: gang.world], patience)
    except (CheckpointCorrupt, CheckpointStorage) as error:
        words = _said(error)
    _judge(exchange(gang, words))
    # One by one, as bytes: together they may be longer than one message of words may be.
    told = {shard: told_bytes(gang, texts.get(shard, b""), at % gang.world) for at, shard in enumerate(manifest.shards)}
    try:
        source = far_source(place, manifest, told, patience)  # here all find the same
    except CheckpointCorrupt as error:
        raise BlockCorrupt(str(error)) from error
    words = {}
    try:
        source.bring(choose(source))
    except (CheckpointCorrupt, CheckpointStorage) as error:
        words = _said(error)
    _judge(exchange(gang, words))
    return source


def _said(error: CheckpointCorrupt | CheckpointStorage) -> dict[str, str]:
    return {BAD if isinstance(error, CheckpointCorrupt) else AWAY: str(error)}


def _judge(rows: Sequence[Mapping[str, str]]) -> None:
    """What others found is heard by all alike; what the store gave to nobody is not held against the checkpoint."""
    if bad := sorted({row[BAD] for row in rows if BAD in row}):
        raise BlockCorrupt("; ".join(bad))
    if away := sorted({row[AWAY] for row in rows if AWAY in row}):
        raise CheckpointStorage("; ".join(away))
