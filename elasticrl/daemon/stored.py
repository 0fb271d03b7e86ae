"""What the store says of a job at one moment, its secret too, which the first who asks makes: for a daemon that begins, and for
whoever asks how the job is.

The one idea: a function of a store alone, so who has no daemon reads the job as one does. What is followed as it changes is
`shell.sight`'s.
"""

import asyncio
import errno
import secrets
import socket
from contextlib import suppress
from typing import TypeVar

from elasticrl.base.address import split
from elasticrl.contract.model import Member, Phase, Plan, Quarantine, Record
from elasticrl.shell import keys
from elasticrl.store import Absent, Get, Listing, Put, Store

T = TypeVar("T")


async def read_all(store: Store) -> tuple[dict[str, Record], dict[str, Quarantine]]:
    """Everybody's record and quarantine, by node; without what cannot be read, of which those speak who watch it."""
    members, quarantines = await asyncio.gather(store.scan(keys.MEMBERS), store.scan(keys.QUARANTINES))
    return readable(Record, members, keys.MEMBERS), readable(Quarantine, quarantines, keys.QUARANTINES)


def readable(kind: type[T], listing: Listing, scope: str) -> dict[str, T]:
    """The values of a scope, by what follows its name."""
    found = {}
    for entry in listing.entries:
        with suppress(keys.Unreadable):
            found[entry.key.removeprefix(scope)] = keys.load(kind, entry.value, entry.key)
    return found


async def record_at(store: Store, key: str) -> Record | None:
    """What a member says of itself there; None for nobody, and for what cannot be read."""
    entry = await store.get(key)
    with suppress(keys.Unreadable):
        return keys.load(Record, entry.value, key) if entry else None
    return None


async def living_here(store: Store, node: str) -> Record | None:
    """What a node of that name says of itself whose daemon runs on this machine, and hears beats there; None if none does."""
    record = await record_at(store, keys.member_key(node))
    return record if record and record.beat and taken(*split(record.beat)) else None


def taken(host: str, port: int) -> bool:
    """Does a process of this machine hear datagrams at this address, which need not be one of this machine's?"""
    with suppress(OSError):
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as ours:
            try:
                ours.bind(address)
            except OSError as error:
                return error.errno == errno.EADDRINUSE
    return False


async def highest_incarnation(store: Store, node: str) -> int:
    """The newest life of this node that the store remembers anywhere; 0 if it does not know it."""
    places = (keys.PLAN, keys.member_key(node), keys.quarantine_key(node), keys.drain_key(node), keys.life_key(node))
    answer = await store.txn((), [Get(scope=place) for place in places])
    plan, record, quarantine, drain, life = (r.entries[0] if r.entries else None for r in answer.responses)
    members: list[Member] = []
    if plan:
        seats = keys.load(Plan, plan.value, keys.PLAN)
        members += [seat.member for seat in seats.seats + seats.spares]
    members += [keys.load(Record, record.value, record.key).member] if record else []
    members += [keys.load(Quarantine, quarantine.value, quarantine.key).member] if quarantine else []
    members += [keys.load(Member, each.value, each.key) for each in (drain, life) if each]
    return max((member.incarnation for member in members if member.node == node), default=0)


async def remember(store: Store, life: Member) -> None:
    """So that its node's next life is another one, wherever this one is forgotten. Found live: a node lost its power, its lease
    ran out, and the next plan did not name it. Nothing remembered that life, and the next one had its number.
    """
    await store.txn((), [Put(key=keys.life_key(life.node), value=keys.dump(life))])


async def at_first(store: Store) -> tuple[int, int]:
    """The store's revision as a daemon begins, and the newest generation then: what comes later, it has been there for."""
    answer = await store.txn((), [Get(scope=keys.PLAN)])
    entries = answer.responses[0].entries
    return answer.revision, keys.load(Plan, entries[0].value, keys.PLAN).generation if entries else 0


async def how_it_ended(store: Store) -> tuple[int, str] | None:
    """The exit code and the reason of a job that is over; None for one that is not."""
    entry = await store.get(keys.PLAN)
    plan = keys.load(Plan, entry.value, keys.PLAN) if entry else None
    return (plan.exit_code or 0, plan.reason) if plan is not None and plan.phase is Phase.STOP else None


def written_secret(secret: bytes) -> Put:
    """How the key that beats are signed with stands in the store."""
    return Put(key=keys.SECRET, value=secret.hex().encode())


async def the_secret(store: Store) -> bytes:
    """The key that this job's beats are signed with; the first daemon makes it."""
    entry = await store.get(keys.SECRET)  # first: a transaction that might write waits for the disks of a majority
    if entry is None:
        await store.txn([Absent(key=keys.SECRET)], [written_secret(secrets.token_bytes(32))])
        entry = await store.get(keys.SECRET)
    assert entry is not None, "the beats' key was there a moment ago"
    try:
        return bytes.fromhex(entry.value.decode())
    except ValueError:
        raise keys.Unreadable(
            f"{keys.SECRET} is not the key that beats are signed with; stop the job's daemons and delete it"
        ) from None
