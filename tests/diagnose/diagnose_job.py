"""A rank of a gloo gang that can be asked where it is. `python diagnose_job.py FOLDER RANK WORLD WHAT`.

WHAT: wait (in an all_reduce that never ends), loader (sleeps in a `__next__`), skip, other, shape, type (see `main`).
It prints "at" when it is about to be where the test wants it.
"""

import os
import sys
import time
from datetime import timedelta
from pathlib import Path

from elasticrl.diagnose import witness

folder, rank, world, what = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
os.environ.update(witness.environment(200))
witness.stand(folder)

import torch  # noqa: E402 - the recorder's size is read at import
import torch.distributed as dist  # noqa: E402


class Loader:
    """A data set that hangs."""

    def __iter__(self):
        return self

    def __next__(self):
        print("at", flush=True)
        time.sleep(600)


def main() -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=120))
    usual = torch.ones(64)
    for _ in range(3):
        dist.all_reduce(usual)
    if what == "loader":
        for _ in Loader():
            pass
    print("at", flush=True)
    if what == "skip":  # what the others are in
        time.sleep(600)
    try:
        if what == "other":
            dist.broadcast(usual, 0)
        odd = {"shape": torch.ones(32), "type": torch.ones(64, dtype=torch.int32)}
        dist.all_reduce(odd.get(what, usual))
    except RuntimeError as error:  # a peer has left: gloo ends a rank that gets more bytes than it expects
        print(error, file=sys.stderr, flush=True)
    time.sleep(600)


main()
