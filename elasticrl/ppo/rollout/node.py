"""`python -m elasticrl.ppo.rollout.node`: what a rollout node's daemon starts, which sees to it that an engine works there.

The idea: the daemon knows nothing of engines, and an engine nothing of daemons. Between the two is the attendant that a worker
would have, in a process of its own: it starts the engine or adopts the one that runs, and says on its output, a line of JSON
whenever that changes, whether one works, where it is asked, and by which weights it would generate. What it is told comes on
its input: `end`, or the end of it, when there is no daemon any more; then the engine stays, for the next one to adopt.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TextIO

from elasticrl.base.address import join, split
from elasticrl.config import loads
from elasticrl.contract.model import REFUSED
from elasticrl.ppo import models
from elasticrl.ppo.rollout.attend import Attendant, Limits
from elasticrl.ppo.rollout.configured import home_of, sampling_of
from elasticrl.ppo.rollout.engine import EngineFailed
from elasticrl.ppo.rollout.service import Service
from elasticrl.ppo.rollout.wire import SOCKET, Lost, Refused, Talk
from elasticrl.runtime.context import Context

if TYPE_CHECKING:
    from elasticrl.config import Tree

LOOK_S: Final = 0.5  # between looks at the engine


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """A line for the daemon. Example: Told(up=True, address="10.0.0.7:41327", pid=4711, version=2560)"""

    up: bool
    address: str = ""
    pid: int = 0
    version: int | None = None  # None: no weights yet
    note: str = ""


def service_of(tree: Tree, where: Context, listen: str, key_file: Path) -> Service:
    """An engine's page, as a worker would write it, with a door for those on other nodes."""
    sampling = sampling_of(tree, models.tokenizer(str(tree.model.path)))
    key = blake2b(key_file.read_bytes(), digest_size=8).hexdigest()
    return replace(
        Service.of(tree, sampling, device=where.device),
        listen=listen, job=where.job, node=where.node, key_file=str(key_file), key_digest=key,
    )  # fmt: skip


def looked(attendant: Attendant, listen: str) -> Told:
    """How the engine is."""
    if not attendant.up:
        return Told(up=False, note="its engine starts")
    with Talk(attendant.home / SOCKET, within_s=attendant.limits.health_s) as talk:
        hello: dict[str, Any] = talk.ask("hello")
    host, _ = split(listen)
    tag = hello["tag"]
    return Told(
        up=True, address=join(host, hello["port"]), pid=hello["pid"], version=tag["version"] if tag is not None else None
    )  # fmt: skip


class Keeper:
    """Says what it sees, until it is told to end."""

    def __init__(self, attendant: Attendant, listen: str, *, out: TextIO = sys.stdout) -> None:
        self._attendant, self._listen, self._out = attendant, listen, out
        self._ends = threading.Event()
        self.word = ""  # the last it was told

    def listen(self, lines: TextIO) -> None:
        """To the daemon; for a thread of its own."""
        for line in lines:
            self.word = line.strip()
        self._ends.set()

    def run(self) -> int:
        """The exit code: REFUSED if no engine can be had here."""
        said: Told | None = None
        while not self._ends.wait(LOOK_S):
            try:
                self._attendant.raise_if_failed()
                told = looked(self._attendant, self._listen)
            except EngineFailed as failed:
                self._say(Told(up=False, note=str(failed)))
                return REFUSED
            except Lost as lost:
                if self._attendant.up:
                    self._attendant.lost(str(lost))
                continue
            except Refused:
                continue
            if told != said:
                said = told
                self._say(told)
        return 0

    def _say(self, told: Told) -> None:
        fields = {name: getattr(told, name) for name in Told.__slots__}
        with suppress(OSError):  # there is no daemon any more, which the input says too
            self._out.write(json.dumps(fields) + "\n")
            self._out.flush()


def main() -> int:
    """To the end of the daemon, or of the job."""
    parser = argparse.ArgumentParser(description="Sees to a rollout node's engine; started by its daemon.")
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--node", required=True)
    parser.add_argument("--vault", type=Path, required=True, help="where a vault of this node would be")
    parser.add_argument("--listen", required=True, help="host:port for the trainers; port 0 is any")
    parser.add_argument("--key-file", type=Path, required=True)
    given = parser.parse_args()
    tree = loads(given.config.read_text(encoding="utf-8"))
    where = Context(tree=tree, node=given.node, vault=given.vault, alone=True)
    limits = Limits.of(tree)
    # Weights of a large model take longer to load than a sign of life may: nobody else here knows that they are on their way.
    limits = replace(limits, health_s=max(limits.health_s, limits.sync_s))
    service = service_of(tree, where, given.listen, given.key_file)
    attendant = Attendant(
        home_of(where), service, limits, python=tree.rollout.python,
        say=lambda sentence: print(time.strftime("%H:%M:%S"), sentence, file=sys.stderr, flush=True),
    )  # fmt: skip
    keeper = Keeper(attendant, given.listen)
    threading.Thread(target=keeper.listen, args=(sys.stdin,), name="daemon", daemon=True).start()
    code = keeper.run()
    if keeper.word == "end":
        attendant.end()
    else:
        attendant.close()
    return code


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # a thread may still wait for the daemon's next word
