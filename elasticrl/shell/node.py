"""One member at work: the loop, its sight of the store and its office there, put together.

The daemon adds beats, an agent and a control socket to it; the torchrun rendezvous adds torchrun's workers.
"""

import asyncio
import time
from collections.abc import Callable
from typing import Any

from elasticrl.contract.events import Action, Event, Leave, Seen, Watch
from elasticrl.contract.model import Record, View
from elasticrl.core.node.state import Decision, State
from elasticrl.shell.loop import Loop, Perform, nobody
from elasticrl.shell.office import Office
from elasticrl.shell.sight import Sight
from elasticrl.shell.trace import Trace
from elasticrl.store.protocol import Lease, Store, StoreError


class Node:
    """A member of a job, as far as the store and the core go."""

    def __init__(
        self,
        state: State,
        store: Store,
        hands: tuple[Perform, ...],
        *,
        log: Any,
        trace: Trace | None = None,
        lease: Lease | None = None,
        decided: Callable[[Event, Decision], None] = nobody,
        met: Callable[[Record], None] = nobody,
        asked: Callable[[int], None] = nobody,
        took: Callable[[str, float], None] = nobody,
    ) -> None:
        """`decided`: told after every step of the core; `met`, `asked`: as `Sight` has them; `took`: told how long each action
        on the store took.
        """
        self.store = store
        self.log = log
        self.loop = Loop(state, (self._watch, self._act, *hands), log=log, trace=trace, decided=decided)
        self.sight = Sight(
            store, state.me, changed=self._changed, complain=lambda text: log.info("store.unreadable", text=text),
            met=met, asked=asked,
        )  # fmt: skip
        self.office = Office(
            store,
            state.me,
            self.sight,
            ttl_s=state.settings.membership.lease_ttl_s,
            post=self.post,
            clock=time.monotonic,
            lease=lease,
        )
        self._took = took
        self._watching: asyncio.Task[None] | None = None
        self._everyone = False

    def post(self, event: Event) -> None:
        """Tell the core that something has happened. Call it from the event loop's thread."""
        self.loop.post(event)

    async def run(self) -> Leave:
        """Until the core decides to leave; then the lease is revoked, so that the others know at once."""
        self._start_watching(everyone=False)
        try:
            left = await self.loop.run()
        finally:
            if self._watching is not None:
                self._watching.cancel()
                await asyncio.gather(self._watching, return_exceptions=True)
        try:
            await self.office.retire()
        except StoreError as error:
            self.log.info("store.failed", action="revoke", error=str(error))  # the lease ends by itself
        return left

    def _changed(self, view: View) -> None:
        self.post(Seen(now=time.monotonic(), view=view))

    async def _watch(self, action: Action) -> bool:
        if not isinstance(action, Watch):
            return False
        # It is wished for until all is seen; a reading that takes longer than that must not begin anew each time.
        if self._watching is None or self._watching.done() or action.everyone != self._everyone:
            self._start_watching(everyone=action.everyone)
        return True

    async def _act(self, action: Action) -> bool:
        begun = time.monotonic()
        performed = await self.office.perform(action)
        if performed:
            self._took(type(action).__name__, time.monotonic() - begun)
        return performed

    def _start_watching(self, *, everyone: bool) -> None:
        if self._watching is not None:
            self._watching.cancel()
        self._everyone = everyone
        self._watching = asyncio.create_task(self.sight.watch_for_ever(self.log, everyone=everyone), name="watch")
