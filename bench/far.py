"""What is read of a checkpoint at a URL: by ranks that resume from it, by an export, and by the prune after each commit.

    python bench/far.py [--json] [--params 20000000] [--ranks 4]

A checkpoint of AdamW's state, as `fsdp` ranks keep it, lies in a store in memory that counts what is asked of it. *read* is
that count; *whole* is what it takes if whoever reads a file reads all of it, as it was before files were read in blocks. Bytes
do not depend on the machine or its load. A rank alone reads all tables; in a gang each table is read by one rank.
"""

import argparse
import shutil
import sys
import tempfile
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import torch
from fsspec.implementations.memory import MemoryFileSystem

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.report import dump
from elasticrl.runtime.checkpoint.export import export
from elasticrl.runtime.checkpoint.flat import FlatShard
from elasticrl.runtime.checkpoint.load import open_checkpoint
from elasticrl.runtime.checkpoint.manifest import Conditions, Manifest
from elasticrl.runtime.checkpoint.parts import Parts
from elasticrl.runtime.checkpoint.place import Url
from elasticrl.runtime.checkpoint.save import finish, write_shard
from elasticrl.runtime.checkpoint.shelf import mark_committed, newest_good, prune
from elasticrl.runtime.layout import Layout, Piece, up
from elasticrl.runtime.optim import AdamW
from elasticrl.runtime.shard import Shard
from elasticrl.runtime.vault.client import Vault
from elasticrl.runtime.vault.slots import Pinned, pin
from elasticrl.runtime.vault.version import Version

WIDTH = 1024


class Store(MemoryFileSystem):
    """fsspec's memory, and the bytes that were read of it."""

    protocol = ("benched",)
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    read: ClassVar[int] = 0

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return super()._strip_protocol(path.replace("benched://", "memory://", 1))

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **kwargs: Any) -> bytes:
        data = super().cat_file(path, start, end, **kwargs)
        Store.read += len(data)
        return data

    def _open(self, path: str, mode: str = "rb", **kwargs: Any) -> Any:
        Store.read += self.size(path) if mode == "rb" else 0
        return super()._open(path, mode, **kwargs)


fsspec.register_implementation("benched", Store, clobber=True)


def layout(params: int, world: int) -> Layout:
    """Square matrices with a bias each, cut by their rows, as FSDP2 does."""
    ranks: list[list[Piece]] = [[] for _ in range(world)]
    at = 0
    for number in range(max(1, params // (WIDTH * WIDTH + WIDTH))):
        for name, shape in ((f"layers.{number}.weight", (WIDTH, WIDTH)), (f"layers.{number}.bias", (WIDTH,))):
            height, row = -(-shape[0] // world), prod(shape[1:])
            for rank, mine in enumerate(ranks):
                start, stop = min(rank * height, shape[0]) * row, min((rank + 1) * height, shape[0]) * row
                if start < stop:
                    mine.append(Piece(name=name, shape=shape, start=start, stop=stop, at=at))
            at += up(height * row)
    return Layout(size=at, pieces=tuple(map(tuple, ranks)))


def parts(params: int, world: int, rank: int) -> Parts:
    shard = Shard(layout(params, world), rank, lambda _: AdamW(), dtype=torch.float32, device=torch.device("cpu"))
    return Parts(model=FlatShard(shard, optimizer="model_optimizer"))


def save(where: Url, folder: Path, params: int, world: int, step: int) -> Manifest:
    for rank in range(world):
        vault = Vault(folder / f"n{rank}", job="bench", node=f"n{rank}", keep=1)
        content = parts(params, world, rank).capture(rank, world)
        ticket = vault.snapshot(content, version=Version(step), generation=1, shard=rank, world=world)
        ticket.wait_sealed(120)
        assert ticket.path is not None
        found = pin(ticket.path)
        assert isinstance(found, Pinned)
        with found:
            write_shard(where, found)
        vault.close()
        shutil.rmtree(folder / f"n{rank}")
    manifest = finish(where, version=Version(step), generation=1, world=world, facts=Conditions(threads=1))
    mark_committed(where, manifest.name)
    return manifest


def read_by(act: Callable[[], object]) -> int:
    Store.read = 0
    act()
    return Store.read


def resumed(where: Url, name: str, params: int, world: int) -> list[int]:
    """Bytes that each rank reads of the data and its tables."""

    def one(rank: int) -> None:
        mine = parts(params, world, rank)
        with open_checkpoint(where, name, check=False) as source:
            source.bring(mine.needs(source))
            mine.restore(source)

    return [read_by(lambda rank=rank: one(rank)) for rank in range(world)]


def measure(params: int, ranks: int) -> dict[str, Any]:
    folder = Path(tempfile.mkdtemp(prefix="elasticrl-bench-"))
    where = Url("benched://run")
    try:
        for step in (1, 2):
            manifest = save(where, folder, params, ranks, step)
        name = manifest.name
        whole = sum(file.nbytes for file in manifest.files if file.shard is not None)
        same, fewer = resumed(where, name, params, ranks), resumed(where, name, params, ranks - 1)
        rows = [
            (f"the search for the newest good one, by rank 0 of {ranks}", read_by(lambda: newest_good(where)), whole),
            (f"a rank of {ranks} resumes what {ranks} saved", max(same), whole),
            (f"all {ranks} ranks of it", sum(same), ranks * whole),
            (f"a rank of {ranks - 1} resumes what {ranks} saved", max(fewer), whole),
            (f"all {ranks - 1} ranks of it", sum(fewer), (ranks - 1) * whole),
            ("an export of the model", read_by(lambda: export(where, name, folder / "out")), 2 * whole),
            ("the prune after a commit", read_by(lambda: prune(where, keep_last=1, generation=1, commit=name)), whole),
        ]
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return {"bench": "far", "params": params, "nbytes": whole, "rows": [[*row] for row in rows]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--params", type=int, default=20_000_000)
    parser.add_argument("--ranks", type=int, default=4)
    args = parser.parse_args()
    found = measure(args.params, args.ranks)
    if args.json:
        dump(found)
        return
    print(f"{found['params']:,} parameters, {found['nbytes'] / 1e6:.1f} MB\n\n{'':58} {'read':>12} {'whole':>12}")
    for what, read, whole in found["rows"]:
        print(f"{what:58} {read / 1e6:9.3f} MB {whole / 1e6:9.3f} MB")


if __name__ == "__main__":
    main()
