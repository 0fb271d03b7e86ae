"""Which rollout engines there are: watched in the store by a training node's daemon, and written down for its workers.

The one idea: workers have no way to the store, and need none: a small file that only they can read names every engine that is
up and the key to be let in by. It is replaced whole when that changes; while the store is away it says what was true last.
"""

import asyncio
import json
from contextlib import aclosing
from pathlib import Path
from typing import Any, Final

from elasticrl.base.owned import write_private
from elasticrl.contract.model import Rollout
from elasticrl.daemon.secret import engine_key
from elasticrl.shell import keys
from elasticrl.shell.sight import AGAIN_S
from elasticrl.store import Store, StoreError

NAME: Final = "rollouts.json"  # in the node's runtime directory


def engines_of(rollouts: dict[str, Rollout]) -> dict[str, str]:
    """Where each engine that is up is asked, by node."""
    return {node: one.address for node, one in sorted(rollouts.items()) if one.up and one.address}


class Roll:
    """Run `run` beside the daemon's loop."""

    def __init__(self, path: Path, *, log: Any) -> None:
        self._path, self.log = path, log
        self._rollouts: dict[str, Rollout] = {}
        self._written: dict[str, str] | None = None

    async def run(self, store: Store, secret: bytes) -> None:
        """Until cancelled."""
        said = ""
        while True:
            try:
                await self._follow(store, engine_key(secret))
            except (StoreError, OSError) as error:  # an outage, a full disk: that may pass
                if str(error) != said:
                    self.log.info("store.failed", action="rollouts", error=str(error))
                said = str(error)
            await asyncio.sleep(AGAIN_S)

    async def _follow(self, store: Store, key: str) -> None:
        listing = await store.scan(keys.ROLLOUTS)
        self._rollouts = {}
        for entry in listing.entries:
            self._see(entry.key, entry.value)
        self._write(key)
        async with aclosing(store.watch((keys.ROLLOUTS,), listing.revision + 1)) as batches:  # type: ignore[type-var]
            async for batch in batches:
                if batch.relist is not None:
                    return
                for event in batch.events:
                    self._see(event.key, event.entry.value if event.entry else None)
                self._write(key)

    def _see(self, key: str, value: bytes | None) -> None:
        node = key.removeprefix(keys.ROLLOUTS)
        try:
            rollout = keys.load(Rollout, value, key) if value is not None else None
        except keys.Unreadable as error:
            self.log.info("store.unreadable", text=str(error))
            return
        if rollout is None:
            self._rollouts.pop(node, None)
        else:
            self._rollouts[node] = rollout

    def _write(self, key: str) -> None:
        """For the workers, when it has changed."""
        engines = engines_of(self._rollouts)
        if engines != self._written:
            write_private(self._path, json.dumps({"key": key, "engines": engines}))
            self._written = engines
            self.log.info("rollouts.changed", engines=engines)
