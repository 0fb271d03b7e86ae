"""Bounded staleness under random schedules: however late engines are, whichever die or join, a staleness has one digest.

The engines are in this process, as many as the schedule has alive, and each has weights of its own.
tests/daemon/test_staleness_schedules.py has real ones under daemons.
"""

import random
import time
from collections import Counter
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from ppo_job import job, settings

from elasticrl.ppo.__main__ import Feed
from elasticrl.ppo.elastic import weights_of
from elasticrl.ppo.rollout.engine import Samples
from elasticrl.ppo.rollout.inline import TorchEngine
from elasticrl.ppo.staleness import Staleness
from elasticrl.runtime.data.audit import audit
from elasticrl.runtime.data.cursor import Cursor, SampleId, Walk
from elasticrl.runtime.data.ledger import Ledger
from elasticrl.runtime.vault.version import Cut, Version

SCHEDULES, LANES, ROWS = 5, 2, 4  # rows of a lane


class Killed(Exception):
    """The worker's gang is cut short."""


class Pool:
    """Some engines, of which each answers a few requests at a time. `chance` None: one engine, and nothing happens to it."""

    by_lane, alike = False, True

    def __init__(self, actor, sampling):
        self.actor, self.sampling, self.version = actor, sampling, -1
        self.begun, self.chance, self.faults = None, None, Counter()
        self.weights, self.engines = actor, [None]  # an engine without weights has just joined

    def crowds(self, sizes):
        return [list(range(len(sizes)))] if sizes else []

    def publish(self, version):
        self.weights, self.version = deepcopy(self.actor), version
        if self.begun is not None and version == self.begun.version:
            with torch.no_grad():
                for name, param in self.weights.named_parameters():
                    param.copy_(self.begun.held[name])
        self.engines = [None for _ in self.engines]  # each is fed when it is asked

    def generate(self, requests, *, version):
        assert version == self.version, "stale weights were asked for"
        todo, found = list(range(0, len(requests), ROWS)), {}  # a lane's are a block, which no engine splits
        while todo:
            if self.chance is not None:
                self.chance.shuffle(todo)
                self.happen()
            at, first = 0 if self.chance is None else self.chance.randrange(len(self.engines)), todo.pop()
            samples = self.answer(at, requests[first : first + ROWS])
            if samples is None:
                todo.append(first)
            else:
                found[first] = samples
        return joined([found[first] for first in sorted(found)])

    def answer(self, at, requests):
        """None: the engine died over it."""
        if self.engines[at] is None:
            self.engines[at] = TorchEngine(deepcopy(self.weights), self.sampling)
            self.engines[at].version = self.version
        samples = self.engines[at].generate(requests, version=self.version)
        if self.chance is not None and self.chance.random() < 0.3:
            self.faults["killed"] += 1
            self.engines[at] = None
            return None
        return samples

    def happen(self):
        what = self.chance.random()
        if what < 0.2:
            self.faults["joined"] += 1
            self.engines.append(None)
        elif what < 0.3 and len(self.engines) > 1:
            self.faults["left"] += 1
            self.engines.pop(self.chance.randrange(len(self.engines)))
        elif what < 0.6:
            self.faults["late"] += 1
            time.sleep(self.chance.uniform(0.0, 0.003))

    def wait(self, done):
        while not done():
            pass


def joined(parts):
    names = ("tokens", "attention", "mask", "logprobs", "ended")
    columns = {name: torch.cat([getattr(part, name) for part in parts]) for name in names}
    return Samples(ids=tuple(i for part in parts for i in part.ids), version=parts[0].version, **columns)


def played(folders, home: Path, behind: int, seed: int | None):
    """(its digest, its audit, what happened)."""
    chance, steps, cut = None if seed is None else random.Random(f"{behind} {seed}"), 2 * behind + 3, []

    def kill(phase):
        if chance is not None and chance.random() < 0.04:
            cut.append(phase)
            raise Killed

    ppo = settings(batch=LANES * ROWS, mini_batch=LANES * ROWS, epochs=1, micro_tokens=40)
    trainer, run = job(
        folders["qwen2"], ppo=ppo, lanes=LANES, steps=steps, engine=Pool, staleness=Staleness(steps=behind),
        begun=behind > 1, on_phase=kill,
    )  # fmt: skip
    trainer.engine.begun, trainer.engine.chance = trainer.generator.begun, chance
    data = trainer.feed.prompts
    cursor = Cursor(Walk(size=len(data), lanes=LANES, per_lane=ROWS, seed=1))
    trainer.feed = trainer.generator.feed = Feed(cursor, data)
    ledger = Ledger(home, writer="n0-w0")
    ledger.begin(
        generation=1,
        lineage=(Cut(1, Version(-1)),),
        segments=cursor.segments,
        lanes=range(LANES),
        plan={"stale": behind},
    )
    for step in range(steps):
        while True:
            try:
                trainer.step(step)
            except Killed:
                trainer.engine.version = -1  # another life: nobody knows what engines have
            else:
                break
        for lane in range(LANES):
            for by, names in weights_of(run.buffer, lane, run.buffer.ids[lane]).items():
                ids = [SampleId(*map(int, name.split(":"))) for name in names]
                ledger.record(Version(step, 1), lane, ids, by=by)
    ledger.close()
    return run.digest(), audit(home, through=Version(steps - 1, 1)), trainer.engine.faults + Counter(cut=len(cut))


@pytest.mark.long
@pytest.mark.parametrize("behind", [0, 1, 2, 4])
def test_each_staleness_has_one_digest_whatever_its_engines_do(folders, tmp_path, behind):
    digest, proved, _ = played(folders, tmp_path / "alone", behind, None)
    happened = Counter()
    for seed in range(SCHEDULES):
        found, its, faults = played(folders, tmp_path / str(seed), behind, seed)
        assert found == digest, f"schedule {seed}"
        assert its.ok, its.sentence
        assert (its.oldest, its.samples) == (behind, proved.samples)
        happened += faults
    assert min(happened[kind] for kind in ("killed", "joined", "left", "late", "cut")) > 0, happened
