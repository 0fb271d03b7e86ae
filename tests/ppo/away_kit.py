"""Rollout nodes, and a trainer that asks them."""

import json

import torch
from served_kit import LIMITS, SAMPLING, service

from elasticrl.ppo.rollout import weights
from elasticrl.ppo.rollout.attend import Attendant
from elasticrl.ppo.rollout.away import Away, Roll
from elasticrl.ppo.rollout.inline import TorchEngine
from elasticrl.ppo.rollout.wire import Remote

KEY = "5f" * 32


class Node:
    """A rollout node, as far as trainers know it: an engine behind a door."""

    def __init__(self, folder, name, path, **more):
        self.name, self.home = name, folder / name
        key = folder / "key"
        key.write_text(KEY)
        key.chmod(0o600)
        page = service(path, listen="127.0.0.1:0", job="job", node=name, key_file=str(key), **more)
        self.said = []
        self.attendant = Attendant(self.home, page, LIMITS, python=None, say=self.said.append)

    def hello(self):
        with self.attendant.talk(lambda: None) as talk:
            return talk.ask("hello")

    @property
    def address(self):
        return f"127.0.0.1:{self.hello()['port']}"

    def remote(self, key=KEY, job="job"):
        return Remote(address=self.address, job=job, node="n0", key=key.encode())


class Trainer:
    """One worker's end, and the list that its daemon would keep."""

    def __init__(
        self,
        folder,
        nodes,
        actor,
        *,
        life="1 here",
        writes=True,
        wait_s=60.0,
        limits=LIMITS,
        judges=(),
        transport="tcp",
    ):
        self.folder, self.said, self.on_turn = folder, [], lambda: None
        self.list = folder / "rollouts.json"
        self.know(*nodes)
        makes = service("anywhere", device="cpu", judges=dict.fromkeys(judges, "")).makes
        roll = Roll(self.list, job="job", node="n0")
        self.engine = Away(
            roll,
            folder / "weights",
            SAMPLING,
            makes,
            limits,
            wait_s=wait_s,
            transport=transport,
            say=self.said.append,
            check=self.turn,
        )
        self.actor = actor
        self.enter(life, writes=writes)

    def turn(self):
        self.on_turn()

    def know(self, *nodes):
        fresh = self.folder / "fresh"
        fresh.write_text(json.dumps({"key": KEY, "engines": {node.name: node.address for node in nodes}}))
        fresh.rename(self.list)

    def enter(self, life="1 here", *, writes=True):
        source = lambda _version: weights.buckets(self.actor, nbytes=1 << 12, dtype=torch.float32)  # noqa: E731
        self.engine.enter(life=life, source=source, writes=writes, gathers=False)


def inline(actor, asked):
    return TorchEngine(actor, SAMPLING).generate(asked, version=0)
