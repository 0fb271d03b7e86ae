"""The store as this node sees it: a `View` kept up to date by a watch.

The one idea: entries are kept by key with the revision they were written at, so that scopes read at different revisions,
repeated events and a re-listing all lead to the same picture; the view is made from the picture when somebody looks.
"""

import asyncio
from collections.abc import Callable, Iterable
from contextlib import aclosing
from dataclasses import replace
from typing import Any, Final, TypeVar

from elasticrl.base.value import dataclass
from elasticrl.contract.model import Commit, Intent, Member, Plan, Quarantine, Record, View
from elasticrl.shell import keys
from elasticrl.shell.loop import nobody
from elasticrl.store.protocol import Batch, Entry, Event, Get, Store, StoreError

NAME: Final = 64  # letters of who asked for something
AGAIN_S: Final = 0.5  # between attempts to reach a store that is away
# Of thousands of members there is always one with news, and a leader that is told goes over all records, for 2 to 3.4 us each.
# So news of others is gathered first, for so long for each record: the leader then takes a fifth to a third of a processor.
GATHER_S: Final = 10e-6
MANY: Final = 500  # records from which on it is

T = TypeVar("T")
Whose = TypeVar("Whose", Record, Quarantine)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What lies at the `intent` key.

    Example: Wanted(intent=Intent.PAUSE, generation=14)
    """

    intent: Intent
    generation: int = 0
    by: str = ""  # who asked; "": not known


class Sight:
    """Watches the store for one member, and tells when there is something new to see."""

    def __init__(
        self,
        store: Store,
        me: Member,
        *,
        changed: Callable[[View], None],
        complain: Callable[[str], None],
        gather_s: float = GATHER_S,
        asked: Callable[[int], None] = nobody,
        met: Callable[[Record], None] = nobody,
    ) -> None:
        """`asked`: told the revision at which somebody asked where all workers are; `met`: what is in our record's place."""
        self._store = store
        self._me = me
        self._changed = changed
        self._complain = complain
        self._gather_s = gather_s
        self._asked, self._met = asked, met
        self._everyone = False
        self._revisions: dict[str, int] = {}  # of each key's newest event, deletions too
        self._records: dict[str, Record] = {}
        self._quarantines: dict[str, Quarantine] = {}
        self._gathering: asyncio.TimerHandle | None = None  # when what was gathered is told
        self._gathered = 0  # up to which revision
        self.view = View()

    @property
    def scopes(self) -> tuple[str, ...]:
        """What this node watches: the few keys that all need, and its own; the leader and its deputies also everybody's."""
        node = self._me.node
        shared = (keys.PLAN, keys.COMMIT, keys.LEADER, keys.INTENT, keys.LOOK, keys.WHERE, keys.drain_key(node))
        own = (keys.member_key(node), keys.quarantine_key(node))
        return (*shared, keys.MEMBERS, keys.QUARANTINES) if self._everyone else (*shared, *own)

    async def watch(self, *, everyone: bool) -> None:
        """Read the scopes, then follow them for ever. Cancel it to watch others."""
        self._everyone = everyone
        try:
            while True:
                revision = await self._read()
                self._tell(revision)
                async with aclosing(self._store.watch(self.scopes, revision + 1)) as batches:  # type: ignore[type-var]
                    async for batch in batches:
                        if batch.relist is not None:
                            self._complain(batch.relist)
                            break
                        self._apply(batch)
        finally:
            self._gather_no_more()

    async def watch_for_ever(self, log: Any, *, everyone: bool) -> None:
        """The same, and again whenever the store was away. Cancel it."""
        while True:
            try:
                await self.watch(everyone=everyone)
            except StoreError as error:
                log.info("store.failed", action="watch", error=str(error))
            except Exception:  # a blind node is of no use, and misses the job's end: look again, and say `bug`
                log.exception("bug", action="watch")
            await asyncio.sleep(AGAIN_S)

    async def _read(self) -> int:
        """All scopes, from one revision on. What was known and is not there any more is forgotten."""
        single = [scope for scope in self.scopes if not scope.endswith("/")]
        answer = await self._store.txn((), [Get(scope=scope) for scope in single])
        entries = [entry for response in answer.responses for entry in response.entries]
        for scope in self.scopes:
            if scope.endswith("/"):
                listing = await self._store.scan(scope)
                entries.extend(listing.entries)
        revision = (
            answer.revision
        )  # what was written since then is seen as it lies there, and told by the watch once more
        self._revisions.clear()
        self._records.clear()
        self._quarantines.clear()
        # Answers come from a majority, so revisions only rise; where they fall the store's data are others than they were.
        # What was gathered was seen too, told or not.
        epoch = self.view.epoch + (revision < max(self.view.revision, self._gathered))
        self._gathered = revision
        self.view = View(revision=revision, epoch=epoch)
        self._take(Event(key=entry.key, entry=entry, revision=entry.mod_revision) for entry in entries)
        return revision

    def _apply(self, batch: Batch) -> None:
        for event in batch.events:
            if event.key == keys.WHERE:
                self._asked(event.revision)
        self._take(batch.events)
        own = keys.member_key(self._me.node)
        others = all(event.key.startswith(keys.MEMBERS) and event.key != own for event in batch.events)
        if others and batch.events and len(self._records) >= MANY:
            self._tell_later(batch.revision)
        elif batch.events:
            self._tell(batch.revision)

    def _tell_later(self, revision: int) -> None:
        """Together with what else comes in a short while."""
        self._gathered = revision
        if self._gathering is None:
            pause_s = self._gather_s * len(self._records)
            self._gathering = asyncio.get_running_loop().call_later(pause_s, lambda: self._tell(self._gathered))

    def _gather_no_more(self) -> None:
        if self._gathering is not None:
            self._gathering.cancel()
            self._gathering = None

    def _tell(self, revision: int) -> None:
        self._gather_no_more()
        barred = self._quarantines.get(self._me.node)
        view = replace(self.view, revision=max(revision, self.view.revision), barred=barred)
        if self._everyone:
            view = replace(view, records=dict(self._records), quarantines=dict(self._quarantines))
        self.view = view
        self._changed(view)

    def _take(self, events: Iterable[Event]) -> None:
        for event in events:
            if event.revision <= self._revisions.get(event.key, 0):
                continue
            self._revisions[event.key] = event.revision
            try:
                self._see(event.key, event.entry)
            except keys.Unreadable as error:
                self._complain(str(error))
                if event.key == keys.COMMIT and self.view.commit is not None and event.entry is not None:
                    # What was committed is known. With this revision the next plan and the next commit replace what nobody
                    # can read; without it they would wait for an operator to delete it.
                    self.view = replace(self.view, commit_revision=event.revision)

    def _see(self, key: str, entry: Entry | None) -> None:
        """One key's new value into the picture; a value that cannot be read leaves the picture as it was."""
        revision = entry.mod_revision if entry else 0
        match key:
            case keys.PLAN:
                self.view = replace(self.view, plan=read(Plan, entry, key), plan_revision=revision)
            case keys.COMMIT:
                self.view = replace(self.view, commit=read(Commit, entry, key), commit_revision=revision)
            case keys.LEADER:
                self.view = replace(self.view, leader=read(Member, entry, key), leader_revision=revision)
            case keys.INTENT:
                wanted = read(Wanted, entry, key) or Wanted(intent=Intent.RUN)
                self.view = replace(
                    self.view,
                    intent=wanted.intent,
                    intent_generation=wanted.generation,
                    intent_by=wanted.by[:NAME],
                    intent_revision=revision,
                )
            case keys.LOOK:
                self.view = replace(self.view, look=read(int, entry, key) or 0, look_revision=revision)
            case _ if key == keys.drain_key(self._me.node):
                self.view = replace(self.view, drain=read(Member, entry, key))
            case _ if key.startswith(keys.MEMBERS):
                record = read(Record, entry, key)
                if key == keys.member_key(self._me.node):
                    self.view = replace(self.view, own=record if record and record.member == self._me else None)
                    if record is not None:
                        self._met(record)
                put(self._records, key.removeprefix(keys.MEMBERS), in_place(record, key))
            case _ if key.startswith(keys.QUARANTINES):
                put(self._quarantines, key.removeprefix(keys.QUARANTINES), in_place(read(Quarantine, entry, key), key))


def read(kind: type[T], entry: Entry | None, where: str) -> T | None:
    """An entry's value, or None if the key does not exist."""
    return keys.load(kind, entry.value, where) if entry else None


def in_place(value: Whose | None, key: str) -> Whose | None:
    """The same, where it is of the node that its key names: else one node would be two, and no plan can seat it twice."""
    if value is not None and value.member.node != key.partition("/")[2]:
        raise keys.Unreadable(f"{key} is of {value.member}; delete the key if no running elasticrl wrote it")
    return value


def put(picture: dict[str, T], name: str, value: T | None) -> None:
    """Set or remove."""
    if value is None:
        picture.pop(name, None)
    else:
        picture[name] = value
