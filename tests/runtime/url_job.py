"""What a rank does with a checkpoint at a URL, in a gang: tests/runtime/test_checkpoint_url.py runs it."""

import torch.distributed as dist

from elasticrl.runtime.checkpoint.far import Patience
from elasticrl.runtime.checkpoint.place import Url
from elasticrl.runtime.checkpoint.shelf import read_manifest
from elasticrl.runtime.fetched import open_together
from elasticrl.runtime.group import form
from elasticrl.runtime.vault.errors import StateError


class Watched(Url):
    """A store, and what was asked of it."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.asked: list[str] = []

    def read(self, name: str, file: str) -> bytes:
        self.asked.append(file)
        return super().read(name, file)

    def part(self, name: str, file: str, start: int, stop: int) -> bytes:
        self.asked.append(file)
        return super().part(name, file, start, stop)


def reads(rank: int, world: int, store: dist.Store, *, generation: int, url: str, name: str) -> tuple[list[str], str]:
    """The tables and data files that this rank asked for, to read what lies in the shard of its number alone; and what became
    of it.
    """
    gang = form(generation=generation, rank=rank, world=world, store=store)
    place = Watched(url)
    manifest = read_manifest(place, name)
    place.asked.clear()
    said = ""
    try:
        open_together(place, manifest, gang, lambda source: source.shards[rank].pieces, Patience())
    except StateError as error:
        said = f"{type(error).__name__}: {error}"
    gang.leave()
    return place.asked, said
