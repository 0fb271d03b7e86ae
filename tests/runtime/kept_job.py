"""A small run that keeps everything on disks: ledger, chronicle and checkpoints, by one or more workers, killed where told.

`generation` is called in worker processes. It goes on from the newest committed checkpoint in the run's directory, or from the
start, as a restarted job would.
"""

import os
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist
from state_jobs import resume
from torch import nn

from elasticrl.runtime.bits import bits
from elasticrl.runtime.checkpoint.flat import FlatShard
from elasticrl.runtime.checkpoint.manifest import Conditions
from elasticrl.runtime.checkpoint.parts import Parts
from elasticrl.runtime.checkpoint.place import place
from elasticrl.runtime.checkpoint.save import finish, write_shard
from elasticrl.runtime.checkpoint.shelf import mark_committed
from elasticrl.runtime.chronicle import Chronicle
from elasticrl.runtime.data.cursor import Cursor, Walk
from elasticrl.runtime.data.ledger import Ledger
from elasticrl.runtime.group import form
from elasticrl.runtime.lanes import Deal
from elasticrl.runtime.optim import AdamW
from elasticrl.runtime.replicated import Replicated
from elasticrl.runtime.rng import Streams
from elasticrl.runtime.vault.client import Vault
from elasticrl.runtime.vault.slots import Pinned, pin
from elasticrl.runtime.vault.version import Cut, Lineage, Version, grow

LANES = 4
WALK = Walk(name="numbers", size=50, lanes=LANES, per_lane=6, seed=7)
SAVE_EVERY = 2


def generation(
    rank: int,
    world: int,
    store: dist.Store,
    *,
    number: int,
    root: str,
    until: int,
    die_at: int | None = None,
    flip_at: int | None = None,
) -> int:
    """Steps to `until` of generation `number`; the last step. `die_at`: rank 0 is killed when it has recorded that step.
    `flip_at`: from that step on a bit of a parameter is another one, on all ranks.
    """
    run = Path(root)
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(3, 65), nn.Tanh(), nn.Linear(65, 2))
    gang = form(generation=number, rank=rank, world=world, store=store)
    strategy = Replicated(
        model,
        lambda _name: AdamW(lr=1e-2),
        deal=Deal.contiguous(LANES, world),
        rank=rank,
        group=gang.group,
    )
    lanes = strategy.deal.carried[rank]
    cursor, ledger = Cursor(WALK), Ledger(run, writer=f"w{rank}")
    chronicle = Chronicle(run, f"w{rank}", bits=lambda: str(bits()))
    parts = Parts(model=FlatShard(strategy.shard), cursor=cursor, ledger=ledger)
    where = place(run / "checkpoints")
    facts = Conditions(job="kept", lanes=LANES, batch=cursor.batch, data=cursor.describe())
    vault = Vault(run / "vault" / f"g{number}r{rank}", job="kept", node=f"n{rank:02d}", deadline_s=30.0)
    found = resume(where, facts)
    lineage: Lineage = (Cut(number, Version(-1)),)
    first, parent = 0, None
    if found is not None:
        lineage = grow(found[1].manifest.lineage, number, found[1].manifest.version)
        first, parent = found[1].manifest.version.step + 1, found[1].manifest.name
    ledger.begin(generation=number, lineage=lineage, segments=cursor.segments, lanes=lanes)
    if found is not None:
        parts.restore(found[0])
        strategy.publish()
    for step in range(first, until):
        for turn in strategy.turns:
            strategy.begin(turn)
            ids = cursor.ids(step, 0, turn.lane)
            ledger.record(Version(step), turn.lane, ids)
            x = torch.tensor([[sample.epoch, sample.index, 1.0] for sample in ids]) / 50
            noise = torch.randn(2, generator=Streams(seed=1, step=step, lane=turn.lane).torch("noise"))
            (model(x) - noise).square().mean().backward()
            strategy.done()
        if step == die_at and rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        strategy.update(scale=1 / LANES)
        if flip_at is not None and step == flip_at:
            strategy.shard.state[0, :1].view(torch.int32).bitwise_xor_(1)
        cursor.advance(step)
        chronicle.add(step=step, generation=number, digest=strategy.digest().hex)
        if (step + 1) % SAVE_EVERY == 0:
            ticket = vault.snapshot(
                parts.capture(rank, world),
                version=Version(step),
                generation=number,
                shard=rank,
                world=world,
                lineage=lineage,
            )
            ticket.wait_sealed(30)
            assert ticket.path is not None
            kept = pin(ticket.path)
            assert isinstance(kept, Pinned)
            with kept:
                write_shard(where, kept)
            if rank == 0:
                manifest = finish(
                    where,
                    version=Version(step),
                    generation=number,
                    world=world,
                    facts=facts,
                    parent=parent,
                    lineage=lineage,
                    timeout_s=30,
                )
                mark_committed(where, manifest.name)
            _published(run / "checkpoints" / f"step-{step:08d}-g{number}" / "COMMITTED")
            ledger.flushing(Version(step))
            ledger.committed(Version(step))
    vault.close()
    ledger.close()
    chronicle.close()
    strategy.close()
    gang.leave()
    return until - 1


def _published(path: Path) -> None:
    limit = time.monotonic() + 30
    while not path.exists():
        assert time.monotonic() < limit, f"{path} was not published"
        time.sleep(0.005)
