"""How many members one etcd carries: thousands of simulated members, each with its own lease, record and watch of the plan.

    python bench/scale.py [--members 4096] [--rounds 3] [--steady-s 20] [--json]

round    every member takes a lease and publishes its record; when the leader has seen all it writes a plan; the round is
         over when every member has seen the plan. Requests are counted by etcd itself.
steady   nobody does anything but renew its lease (TTL 10 s, every 4 s): what etcd needs of a core.
death    one member stops renewing: from the end of its lease until every other member has seen the plan without it.

Each member has a client and a connection of its own, as in a cluster; together they are two processes beside etcd. (Members
that share connections renew one after the other and wake etcd for each, which costs it half as much again.)
"""

import argparse
import asyncio
import multiprocessing
import resource
import shutil
import sys
import tempfile
import time
import urllib.request
from contextlib import AsyncExitStack, aclosing
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.report import Watch, cpu_s, end_cleanly, judged, summary
from elasticrl.contract.cause import Cause, Why
from elasticrl.contract.model import Member, Phase, Plan, Record, Seat
from elasticrl.core.node.follow import TOGETHER_S
from elasticrl.shell import keys
from elasticrl.shell.office import together
from elasticrl.store import Put, StoreSettings, open_store
from elasticrl.store.embedded import Embedded

TTL_S = 10.0
KEEPALIVE_S = 4.0
PROCESSES = 2
OPENING = 64  # connections that a process opens at once
DEATHS = 3
GOALS = {"round_s": 5.0, "requests_per_member": 5.0, "etcd_core_share": 0.15, "death_s": 1.0}


class Crowd:
    """Some of the members, in one process."""

    def __init__(self, endpoint: str, numbers: range, pipe: Any) -> None:
        self.endpoint, self.numbers, self.pipe = endpoint, numbers, pipe
        self.seen: dict[int, float] = {}  # generation -> when the last of this crowd saw it
        self.missing: dict[int, int] = {}
        self.generation = 0
        self.everybody = asyncio.Event()
        self.dead: set[int] = set()
        self.sent: dict[int, float] = {}
        self.renewed = 0

    async def run(self) -> None:
        async with AsyncExitStack() as stack:
            settings = StoreSettings(
                endpoints=(self.endpoint,), namespace=keys.namespace("scale"), try_timeout_s=20.0, timeout_s=60.0
            )
            stores = {n: await stack.enter_async_context(open_store(settings)) for n in self.numbers}
            opening = asyncio.Semaphore(OPENING)
            revision = min(await asyncio.gather(*(self.open(store, opening) for store in stores.values())))
            watching = [asyncio.create_task(self.watch(stores[n], revision)) for n in self.numbers]
            await asyncio.sleep(0)
            loop = asyncio.get_running_loop()
            self.pipe.send("watching")
            leases: dict[int, int] = {}
            renewing: dict[int, asyncio.Task[None]] = {}
            while True:
                order, value = await loop.run_in_executor(None, self.pipe.recv)
                if order == "join":
                    gate = asyncio.Semaphore(256)
                    for task in renewing.values():
                        task.cancel()
                    await asyncio.gather(*(self.join(stores[n], n, leases, gate, value) for n in self.numbers))
                    renewing = {n: asyncio.create_task(self.renew(stores[n], n, leases)) for n in self.numbers}
                    self.pipe.send("joined")
                elif order == "plan":
                    await self.until(value)
                    self.pipe.send(self.seen[value])
                elif order == "renewed":
                    ended = [task for task in renewing.values() if task.done() and not task.cancelled()]
                    for task in ended:
                        task.result()
                    self.pipe.send(self.renewed)
                elif order == "die":
                    self.dead.add(value)
                    if value in renewing:
                        await renewing[value]  # a last renewal may be under way
                    self.pipe.send(self.sent.get(value, 0.0))
                else:
                    for task in (*watching, *renewing.values()):
                        task.cancel()
                    await asyncio.gather(*watching, *renewing.values(), return_exceptions=True)
                    return

    async def open(self, store: Any, opening: asyncio.Semaphore) -> int:
        async with opening:
            return int((await store.scan(keys.PLAN)).revision)

    async def watch(self, store: Any, revision: int) -> None:
        async with aclosing(store.watch([keys.PLAN], revision + 1)) as batches:
            async for batch in batches:
                for event in batch.events:
                    # Not parsed here: thousands of members share this process, and in a cluster each parses once.
                    generation = event.revision
                    self.missing.setdefault(generation, len(self.numbers))
                    self.missing[generation] -= 1
                    if self.missing[generation] == 0:
                        self.seen[generation] = time.monotonic()
                        self.everybody.set()

    async def until(self, generation: int) -> None:
        async with asyncio.timeout(60.0):
            while generation not in self.seen:
                self.everybody.clear()
                await self.everybody.wait()

    async def join(
        self, store: Any, number: int, leases: dict[int, int], gate: asyncio.Semaphore, incarnation: int
    ) -> None:
        async with gate:
            lease = await store.grant(TTL_S)
            leases[number], self.sent[number] = lease.id, lease.sent
            member = Member(node=f"n{number:05d}", incarnation=incarnation)
            await store.put(
                keys.member_key(member.node),
                keys.dump(Record(member=member, warm=True, beat=f"10.0.0.1:{number}")),
                lease.id,
            )

    async def renew(self, store: Any, number: int, leases: dict[int, int]) -> None:
        await asyncio.sleep(KEEPALIVE_S * (number % 1000) / 1000)  # as in a cluster, where nobody starts together
        await together(TTL_S)
        while number not in self.dead:
            lease = await store.keepalive(leases[number])
            self.sent[number] = lease.sent
            self.renewed += 1
            await asyncio.sleep(KEEPALIVE_S - TOGETHER_S)
            await together(TTL_S)


def crowd(endpoint: str, numbers: range, pipe: Any) -> None:
    asyncio.run(Crowd(endpoint, numbers, pipe).run())


class Leader:
    """Watches all records, and writes plans."""

    def __init__(self, store: Any, members: int) -> None:
        self.store, self.members = store, members
        self.records: dict[str, bytes] = {}
        self.changed = asyncio.Event()
        self.gone: list[tuple[str, float]] = []
        self.news: set[str] = set()  # whose record changed since that was looked at

    async def watch(self, revision: int) -> None:
        async with aclosing(self.store.watch([keys.MEMBERS], revision + 1)) as batches:
            async for batch in batches:
                for event in batch.events:
                    if event.entry is None:
                        self.records.pop(event.key, None)
                        self.gone.append((event.key, time.monotonic()))
                    else:
                        self.records[event.key] = event.entry.value
                        self.news.add(event.key)
                self.changed.set()

    async def until(self, count: int, incarnation: int) -> None:
        mark = f'"incarnation":{incarnation}'.encode()
        there = {key for key, value in self.records.items() if mark in value}
        async with asyncio.timeout(120.0):
            while len(there) < count:
                self.news.clear()
                self.changed.clear()
                await self.changed.wait()
                # Of the news alone: to look through thousands of records for each that comes took this process a core.
                there |= {key for key in self.news if mark in self.records.get(key, b"")}

    async def plan(self, generation: int) -> int:
        seats = tuple(
            Seat(member=keys.load(Record, value, key).member, born=generation, beat="10.0.0.1:1000")
            for key, value in sorted(self.records.items())
        )
        plan = Plan(
            generation=generation, phase=Phase.TRAIN, seats=seats, lanes=len(seats), causes=(Cause(why=Why.BEGUN),)
        )
        answer = await self.store.txn((), [Put(key=keys.PLAN, value=keys.dump(plan))])
        return int(answer.revision)


def requests(endpoint: str) -> float:
    """How many requests etcd has started to serve, streams counted once."""
    with urllib.request.urlopen(f"http://{endpoint.removeprefix('http://')}/metrics", timeout=10.0) as answer:
        lines = answer.read().decode().splitlines()
    received = [line for line in lines if line.startswith("grpc_server_msg_received_total")]
    return sum(float(line.rpartition(" ")[2]) for line in received)


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    folder = Path(tempfile.mkdtemp(prefix="elasticrl-scale-"))
    etcd = Embedded(folder=folder, die_with_parent=True)
    process = await etcd.start()
    endpoint, members = process.endpoint, options.members
    context = multiprocessing.get_context("spawn")
    pipes, crowds = [], []
    share = -(-members // PROCESSES)
    for start in range(0, members, share):
        ours, theirs = context.Pipe()
        crowds.append(
            context.Process(
                target=crowd, args=(endpoint, range(start, min(members, start + share)), theirs), daemon=True
            )
        )
        pipes.append(ours)
    loop = asyncio.get_running_loop()

    async def tell(order: str, value: int = 0) -> list[Any]:
        for pipe in pipes:
            pipe.send((order, value))
        return await asyncio.gather(*(loop.run_in_executor(None, pipe.recv) for pipe in pipes))

    try:
        for one in crowds:
            one.start()
        await asyncio.gather(*(loop.run_in_executor(None, pipe.recv) for pipe in pipes))
        settings = StoreSettings(
            endpoints=(endpoint,), namespace=keys.namespace("scale"), try_timeout_s=20.0, timeout_s=60.0
        )
        async with open_store(settings) as store:
            leader = Leader(store, members)
            watching = asyncio.create_task(leader.watch((await store.scan(keys.MEMBERS)).revision))
            await asyncio.sleep(3.0)  # the watches are all registered
            rounds, asked = [], []
            for number in range(1, options.rounds + 1):
                before, begun = requests(endpoint), time.monotonic()
                # Both: a join that fails ends the bench at once.
                await asyncio.gather(tell("join", number), leader.until(members, number))
                revision = await leader.plan(number)
                seen = max(await tell("plan", revision))
                rounds.append(seen - begun)
                asked.append((requests(endpoint) - before) / members)
            await asyncio.sleep(KEEPALIVE_S)
            renewed, used, begun = sum(await tell("renewed")), cpu_s(process.pid), time.monotonic()
            await asyncio.sleep(options.steady_s)
            steady = (cpu_s(process.pid) - used) / (time.monotonic() - begun)
            renewals = (sum(await tell("renewed")) - renewed) / (time.monotonic() - begun)
            deaths = []
            for number in range(1, DEATHS + 1):
                leader.gone.clear()
                sent = max(await tell("die", members * number // (DEATHS + 1)))
                async with asyncio.timeout(3 * TTL_S):
                    while not leader.gone:
                        leader.changed.clear()
                        await leader.changed.wait()
                revision = await leader.plan(options.rounds + number)
                known = max(await tell("plan", revision))
                deaths.append(known - (sent + TTL_S))
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
        for pipe in pipes:
            pipe.send(("end", 0))
        for one in crowds:
            one.join(10.0)
    finally:
        for one in crowds:
            one.kill()
        await etcd.stop()
        shutil.rmtree(folder, ignore_errors=True)
    return {
        "members": members,
        "round_s": summary(rounds),
        "requests_per_member": summary(asked),
        "etcd_core_share": steady,
        "renewals_per_s": renewals,
        "etcd_us_per_renewal": steady / renewals * 1e6,
        "death_s": summary(deaths),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--members", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steady-s", type=float, default=20.0)
    parser.add_argument("--json", action="store_true")
    end_cleanly()
    options = parser.parse_args()
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # a connection for each member
    watch = Watch()
    found = asyncio.run(measure(options))
    notes = [
        f"{found['renewals_per_s']:.0f} renewals/s while steady; {options.members / KEEPALIVE_S:.0f} are due",
        f"{found['etcd_us_per_renewal']:.0f} us of etcd for each",
    ]
    title = f"{options.members} members on one etcd"
    return judged("scale", title, found, GOALS, watch, as_json=options.json, notes=notes)


if __name__ == "__main__":
    sys.exit(main())
