"""What can be seen of a job from outside: every write in the store, every line of workers and daemons, as facts.

The one idea: the eye only reads what was written. The store's watch gives each plan, commit, leader and quarantine in the order
in which they became true; files give the rest. Nothing here asks a daemon how it is.
"""

import asyncio
import json
import threading
import time
from contextlib import aclosing, suppress
from pathlib import Path
from typing import Any, Self

from chaos.history import (
    CROSSING_S,
    Asked,
    Bug,
    Committed,
    Confined,
    Died,
    Elected,
    Expired,
    Fact,
    Left,
    Planned,
    Resumed,
    Saved,
    Sealed,
    Started,
)
from chaos.live.labjob import LabJob
from elasticrl.contract.model import Commit, Intent, Member, Phase, Plan, Quarantine, Record, deal
from elasticrl.shell import keys
from elasticrl.shell.keys import namespace
from elasticrl.shell.sight import Wanted
from elasticrl.store import StoreSettings
from elasticrl.store.etcd import EtcdStore
from elasticrl.store.protocol import Event as Change
from elasticrl.store.protocol import StoreError


class Eye:
    """Looks at one job. Use it as a context; `look` brings the facts up to date."""

    def __init__(self, job: LabJob, begun: float) -> None:
        self.job, self.begun = job, begun
        self.facts: list[Fact] = []
        self.plan: Plan | None = None
        self.plans: dict[int, Plan] = {}
        self._planned_at: dict[int, float] = {}  # when each was seen here
        self._told: set[bytes] = set()  # plans, commits and quarantines, as they stood in the store
        self.leader = ""
        self.commit = 0
        self.members: dict[str, Record] = {}
        self.held: dict[str, str] = {}  # node -> member under quarantine
        self._held_since: dict[str, float] = {}
        self.sealed: dict[int, dict[str, int]] = {}  # generation -> node -> newest step that it knows to be sealed
        self.sealed_at = 0.0  # when a step was sealed last
        self.newest = 0  # step
        self._newest_at, self._after = 0.0, 0.0  # when that was told first, and the one before
        self.here: dict[
            int, int
        ] = {}  # tokens of orders that were taken, and the pids that their workers have among their own
        self.paused_since: float | None = None
        self._changes: list[tuple[float, Change]] = []
        self._lock = threading.Lock()
        self._whole: dict[str, bool] = {}  # a manifest: was its checkpoint there when it was committed?
        self._early: list[dict[str, Any]] = []
        self._offsets: dict[Path, int] = {}
        self._resumed: set[int] = set()
        self._over = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._watch, name="eye", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._task.cancel)
        self._thread.join(10.0)

    @property
    def now(self) -> float:
        """Seconds since the run began."""
        return time.monotonic() - self.begun

    # ---- the store

    def _watch(self) -> None:
        async def main() -> None:
            settings = StoreSettings(endpoints=self.job.lab.endpoints, namespace=namespace(self.job.name))
            async with EtcdStore(settings, say=lambda *_, **__: None) as store:
                revision = 0
                while not self._over.is_set():
                    try:
                        if not revision:
                            listing = await store.scan("")
                            entries = sorted(listing.entries, key=lambda e: e.mod_revision)  # as they came
                            found = [Change(key=e.key, entry=e, revision=listing.revision) for e in entries]
                            self._take(found)
                            revision = listing.revision + 1
                        async with aclosing(store.watch([""], revision)) as batches:  # type: ignore[type-var] # a generator, which has aclose; the protocol says iterator
                            async for batch in batches:
                                self._take(list(batch.events))
                                revision = 0 if batch.relist else batch.revision + 1
                    except StoreError:  # a fault's doing: what was missed is read as soon as it is over
                        await asyncio.sleep(0.2)

        asyncio.set_event_loop(self._loop)
        self._task = self._loop.create_task(main())
        with suppress(asyncio.CancelledError):
            self._loop.run_until_complete(self._task)
        self._loop.close()

    def _take(self, changes: list[Change]) -> None:
        newer = False  # is a commit that came later, but with this one, whole? Then it may have made place for itself already
        for change in reversed(changes):
            if change.key == keys.COMMIT and change.entry:
                manifest = keys.load(Commit, change.entry.value, change.key).manifest
                place = self.job.saves / manifest
                newer = self._whole[manifest] = newer or (place.is_dir() and any(place.iterdir()))
        with self._lock:
            self._changes += [(self.now, change) for change in changes]

    # ---- putting it together

    def look(self) -> list[Fact]:
        """What is new, oldest first."""
        before = len(self.facts)
        with self._lock:
            changes, self._changes = self._changes, []
        for at, change in changes:
            self._changed(at, change)
        for node in self.job.lab.boxes:
            self._early += self._lines(self.job.history / f"{node}.jsonl")
            for line in self._lines(self.job.log(node)):
                self._daemon_said(node, line)
        # A worker may have begun before the watch has told us of its plan.
        lines, self._early = sorted(self._early, key=lambda line: line["at"]), []
        for line in lines:
            if line["generation"] in self.plans:
                self._worker_said(line)
            else:
                self._early.append(line)
        fresh = sorted(self.facts[before:], key=lambda fact: fact.at)
        self.facts[before:] = fresh
        return fresh

    def note(self, fact: Fact) -> None:
        """Something that the driver knows."""
        self.facts.append(fact)

    def _changed(self, at: float, change: Change) -> None:
        key, value = change.key, change.entry.value if change.entry else None
        if value is not None and (key in {keys.PLAN, keys.COMMIT} or key.startswith(keys.QUARANTINES)):
            if value in self._told:
                return  # read once more, after the watch had broken, or written once more to a store that had lost it
            self._told.add(value)
        if key == keys.PLAN and value is not None:
            plan = keys.load(Plan, value, key)
            paused = at - self.paused_since if self.paused_since is not None else 0.0
            self.plan = self.plans[plan.generation] = plan
            self._planned_at.setdefault(plan.generation, at)
            self.facts.append(
                Planned(
                    at=at,
                    plan=plan,
                    by=self.leader,
                    committed=self.commit,
                    paused_s=paused,
                    held=tuple(
                        member for node, member in self.held.items() if at - self._held_since[node] > CROSSING_S
                    ),
                )
            )
        elif key == keys.COMMIT and value is not None:
            commit = keys.load(Commit, value, key)
            whole = self._whole.get(commit.manifest, False)
            self.facts.append(
                Saved(at=at, step=commit.step, version=commit.step, digest="", manifest=commit.manifest, whole=whole)
            )
            self.facts.append(
                Committed(at=at, step=commit.step, generation=commit.generation, manifest=commit.manifest)
            )
            self.commit = commit.step
        elif key == keys.LEADER:
            self.leader = str(keys.load(Member, value, key)) if value is not None else ""
            if self.leader:
                self.facts.append(Elected(at=at, member=self.leader))
        elif key == keys.INTENT and value is not None:
            self._intent(at, value)
        elif key.startswith(keys.QUARANTINES):
            self._confined(at, key.removeprefix(keys.QUARANTINES), value)
        elif key.startswith(keys.MEMBERS):
            node = key.removeprefix(keys.MEMBERS)
            if value is not None:
                self.members[node] = keys.load(Record, value, key)
            elif node in self.members:
                self.facts.append(Expired(at=at, member=str(self.members.pop(node).member)))

    def _intent(self, at: float, value: bytes) -> None:
        wanted = keys.load(Wanted, value, keys.INTENT).intent
        if wanted is Intent.PAUSE:
            self.paused_since = at
        else:
            self.paused_since = None
        if wanted is not Intent.RUN:
            self.facts.append(Asked(at=at, verb=wanted.value, node=""))

    def _confined(self, at: float, node: str, value: bytes | None) -> None:
        if value is None:
            self._free(node)
            return
        found = keys.load(Quarantine, value, node)
        if found.held:
            self.held[node] = str(found.member)
            self._held_since.setdefault(node, at)
        else:
            self._free(node)
        self.facts.append(
            Confined(
                at=at, node=node, member=str(found.member), cause=found.cause, strikes=found.strikes, held=found.held
            )
        )

    def _free(self, node: str) -> None:
        self.held.pop(node, None)
        self._held_since.pop(node, None)

    def _lines(self, path: Path) -> list[dict[str, Any]]:
        try:
            with path.open("rb") as file:
                file.seek(self._offsets.get(path, 0))
                data = file.read()
        except OSError:
            return []
        whole = data[: data.rfind(b"\n") + 1]
        self._offsets[path] = self._offsets.get(path, 0) + len(whole)
        found: list[dict[str, Any]] = []
        for text in whole.splitlines():
            try:
                body = json.loads(text)
            except ValueError:
                body = {"event": "text", "text": text.decode(errors="replace")}
            found.append(body if isinstance(body, dict) else {"event": "text", "text": str(body)})
        return found

    def _worker_said(self, line: dict[str, Any]) -> None:
        at, generation, step = line["at"] - self.begun, line["generation"], line["step"]
        # A busy eye may see a plan after its workers have begun: what they say of it comes after it all the same.
        at = max(at, self._planned_at.get(generation, at))
        if line["what"] == "here":
            self.here[line["token"]] = line["pid"]
        elif line["what"] == "began" and generation not in self._resumed and generation in self.plans:
            plan = self.plans[generation]
            self._resumed.add(generation)
            ranges = tuple((lanes.start, lanes.stop) for lanes in deal(plan.lanes, plan.carriers))
            nodes = tuple(seat.member.node for seat in plan.seats)
            self.facts.append(
                Resumed(
                    at=at,
                    generation=generation,
                    version=step,
                    digest="",
                    source="",
                    whole=-1,
                    nodes=nodes,
                    ranges=ranges,
                )
            )
        elif line["what"] == "sealed":
            self.sealed.setdefault(generation, {})[line["node"]] = step
            if step > self.newest:
                self._after = self._newest_at  # workers tell in turn, and of each version once
                self.newest, self._newest_at = step, at
            self.sealed_at = max(self.sealed_at, at)
            if generation in self._resumed:
                digest = line["digest"]
                self.facts.append(
                    Sealed(at=at, generation=generation, version=step, step=step, digest=digest, after=self._after)
                )

    def _daemon_said(self, node: str, line: dict[str, Any]) -> None:
        match line.get("event"):
            case "daemon.started":
                self.facts.append(Started(at=self.now, member=line["member"], adopted=bool(line["adopted"])))
            case "daemon.stopped" if line.get("workers") == "ended":
                self.facts.append(
                    Left(at=self.now, member=line.get("member", node), code=int(line["code"]), reason=line["reason"])
                )
            case "worker.exited":
                self.facts.append(
                    Died(
                        at=self.now,
                        node=node,
                        generation=int(line["generation"]),
                        step=int(line["step"]),
                        cause=str(line["cause"]),
                        own=bool(line["own"]),
                    )
                )
            case "bug":
                self.facts.append(Bug(at=self.now, node=node, error=str(line.get("exception", line))[-2000:]))
            case "text" if line["text"].startswith("Traceback"):
                self.facts.append(Bug(at=self.now, node=node, error="a traceback in the daemon's log"))

    # ---- how it is

    def training(self, nodes: int, steps: int, since: float) -> bool:
        """Do so many nodes train under the newest plan, all with this many steps sealed since then?"""
        plan = self.plan
        if plan is None or plan.phase is not Phase.TRAIN or len(plan.seats) < nodes:
            return False
        known = self.sealed.get(plan.generation, {})
        fresh = [
            f for f in self.facts[-400:] if isinstance(f, Sealed) and f.generation == plan.generation and f.at > since
        ]
        return len({f.step for f in fresh}) >= steps and all(seat.member.node in known for seat in plan.seats)
