"""What survives a worker: snapshots in the vault, copies at buddies, checkpoints on disk, the ledger and the chronicle.

The one idea: after each update the state goes through the same stations in the same order, and none of them is waited for until
the next update must know. `keep` begins a snapshot; `await_copies` is where the next update waits; once the gang has voted on
that update, everybody had waited, so what was kept is sealed (`sealed`): only then is it told, chronicled, and saved to disk.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from math import inf
from typing import Any

from elasticrl.config import Tree
from elasticrl.config.relations import OUR_TRAINER
from elasticrl.contract.orders import Place
from elasticrl.runtime import provenance
from elasticrl.runtime.bits import bits
from elasticrl.runtime.chain import Chain
from elasticrl.runtime.checkpoint.local import Published
from elasticrl.runtime.checkpoint.manifest import Conditions, name_of, parse_name
from elasticrl.runtime.checkpoint.parts import Parts
from elasticrl.runtime.checkpoint.place import place as place_of
from elasticrl.runtime.checkpoint.saver import Outcome, Own, Retention, Saver
from elasticrl.runtime.checkpoint.shelf import Entry, listing
from elasticrl.runtime.chronicle import Chronicle
from elasticrl.runtime.context import Context
from elasticrl.runtime.data.cursor import SampleId, Segment
from elasticrl.runtime.data.ledger import Ledger
from elasticrl.runtime.vault.client import Ticket, Vault
from elasticrl.runtime.vault.errors import CopiesLate, DataError, StateError, VaultError
from elasticrl.runtime.vault.holdings import Holding, Whole
from elasticrl.runtime.vault.slots import clean
from elasticrl.runtime.vault.version import Lineage, Version

NO_NEARER = 0.75  # of the shortest budget that any phase can have
SLICE_S = 0.05  # the longest that a decision to leave goes unnoticed while copies are waited for
RETRY_S = 2.0  # between attempts at a last save that failed


@dataclass(slots=True, kw_only=True)
class Kept:
    """One state on its way to be sealed. `steps` are the steps that are whole in it.

    Example: Kept(version=Version(12), steps=12, ticket=..., digest="9f86d081884c7d65", whole=True)
    """

    version: Version
    steps: int
    ticket: Ticket
    whole: bool  # at the end of a step
    light: bool = False  # lies on the newest that does not
    sealed: bool = False  # the gang has voted since everybody had it
    asked: bool = False  # its save was begun
    again: bool = False  # what the gang goes on from, kept once more: it is sealed where it came from


WARM_S = (
    20.0  # before a save is due, its writer is started: that takes seconds, in which steps would be made and not saved
)
CLOSE_S = 5.0  # for the writer to end, when all went well


class Keeper:
    """One worker's. It knows nothing of collectives: who calls it does.

    Long because the same states are kept in memory, by neighbours and on a disk, and each of the three waits for the others.
    """

    def __init__(self, context: Context, *, writer: str, say: Callable[[str], None]) -> None:
        self.context = context
        tree: Tree = context.tree
        self.vault = Vault(
            context.vault, job=context.job, node=context.node, writer=writer, deadline_s=tree.vault.timeout_s
        )
        try:
            self.ledger = Ledger(context.notes_dir, writer=f"{context.node}-{writer}")
        except OSError as error:
            raise DataError(
                f"The ledger cannot be begun in {context.notes_dir} ({error.strerror}): make it a directory that this user "
                "may write to (checkpoint.dir), with space on its disk."
            ) from error
        self.chronicle = Chronicle(
            context.notes_dir, f"{context.node}-{writer}", kind=tree.lanes.digest, bits=what_computes,
            script=provenance.script,
        )  # fmt: skip
        self.place = place_of(context.run_dir, answer_s=tree.checkpoint.answer_s)
        self.kept: Kept | None = None
        self.saved: str | None = None  # the newest checkpoint that is whole on disk, where it is ours to tell: rank 0's
        self.marked: str | None = None  # that whose commit this worker writes down on its disk, once it is made
        self._say = say
        self.late = False  # the newest copies did not arrive in time
        self._said: dict[str, str] = {}  # of what, what was complained of last
        self._noticed: set[str] = set()  # what the vault's server was said not to hear, since it last heard
        self._released = False
        self._saver: Saver | None = None
        self._whole: tuple[int, float] | None = None  # the newest whole step, and when it was sealed
        self.pace_s = 0.0  # a step takes so long; 0: it is not known yet
        self.copy_s = 0.0  # the newest state that lies on no other has taken so long of a processor, with its copies
        self._committed = ""
        self._generation, self._rank, self._world = 0, 0, 1
        self._own: Own | None = None  # what is written here, where each node has a disk of its own
        self._published: Published | None = None  # then: who has published what of this generation
        self._written = ""  # the newest checkpoint that this worker's writer has done its part of
        self._soon = False  # the next whole step is to be saved
        self._lost: deque[int] = deque()  # steps of this generation without our shard on disk, and nobody knows
        self._lineage: Lineage = ()
        self._copies = 0  # that this gang can have of each shard
        self.full: Version | None = None  # the newest state of this generation that lies on no other
        self.cost_s = 0.0  # what the newest such state cost whose copies all arrived; 0 until one did
        self._scarce = False  # its node has no processors to spare for copying
        self._begun, self._stalled_s = time.monotonic(), 0.0  # the newest state: since when, and what was waited for it
        self._facts = Conditions()
        self._chain = Chain()
        self.follows = Chain()  # what the checkpoint says that this generation goes on from

    # -- a generation begins

    def begin(
        self, place: Place, *, lineage: Lineage, segments: Iterable[Segment], lanes: Iterable[int], facts: Conditions,
        chain: Chain | None = None, whole: Whole | None = None, soon: bool = False,
    ) -> None:  # fmt: skip
        """This worker's place from now on, and the history and chain it goes on from. What it goes on from lies `whole` in the
        vaults, and stays there until this gang has sealed something; None: it came from elsewhere. `soon`: what is on disk
        would not bring the job back, so the next whole step is saved.
        """
        self._generation, self._rank, self._world = place.generation, place.rank, place.world
        self._lineage, self._facts, self._soon, self._chain = lineage, facts, soon, chain or Chain()
        nodes = sorted(set(place.nodes))
        if self.context.own_disk:
            mine = tuple(rank for rank, node in enumerate(place.nodes) if node == place.nodes[place.rank])
            self._own = Own(shards=mine, nodes=place.nodes)
            self._published = Published([place.nodes.index(node) for node in nodes])
            self.ledger.nodes = tuple(nodes)
        self._copies = 0 if self.context.alone else min(self.context.tree.vault.copies, len(nodes) - 1)
        threads = place.slots * self.context.tree.lanes.threads
        self._scarce = len(os.sched_getaffinity(0)) < 2 * threads
        self.cost_s, self._begun, self._stalled_s = 0.0, time.monotonic(), 0.0
        self.kept, self.full, self._released, self._whole = None, None, False, None
        self._lost.clear()
        self.vault.sealed = tuple((layer.version, layer.generation) for layer in whole.layers) if whole else ()
        with self._softly():
            self.ledger.begin(
                generation=place.generation, lineage=lineage, segments=segments, lanes=lanes, plan=self._plan(place)
            )  # fmt: skip

    def _plan(self, place: Place) -> dict[str, Any]:
        """What a certificate says of a generation, and of the node that this worker is on. And how old samples may be, which
        an audit holds their weights to.
        """
        tree = self.context.tree
        return {
            "cause": place.reason,
            "rung": place.rung.name.lower(),
            "seats": place.nodes,
            "config": self._facts.config,
            "node": self.context.node,
            "made": provenance.node(),
            **({"stale": tree.rollout.staleness} if tree.job.program == OUR_TRAINER else {}),
        }

    def restored(self, values: Any) -> None:
        """The ledger's rows as of the version that is gone on from."""
        with self._softly():
            self.ledger.restored(values)

    def holdings(self, *, speaks: bool = True) -> tuple[Holding, ...]:
        """What lies whole in this node's vault, once what this worker has under way is there too. Of several workers one
        `speaks` for the node, the others each of what they have written themselves: it may have been sealed a moment later.
        """
        if self.kept is not None:
            with suppress(VaultError):  # then it is not there, and the gang goes on from what is
                self.kept.ticket.wait_sealed(self.context.tree.vault.timeout_s)
        return self.vault.holdings(own=not speaks)

    # -- after an update

    def keep(self, parts: Parts, version: Version, *, steps: int, whole: bool, unchanged: Collection[str] = ()) -> None:
        """Begins a snapshot of everything registered; the tensors in it must stay until `taken`. Parts that are `unchanged`
        since `full` are left out: it lies on that.
        """
        self._notice()
        self._begun, self._stalled_s = time.monotonic(), 0.0
        ticket = self.vault.snapshot(
            parts.capture(self._rank, self._world, but=unchanged), version=version, generation=self._generation,
            shard=self._rank, world=self._world, lineage=self._lineage, base=self.full if unchanged else None,
        )  # fmt: skip
        self.kept = Kept(version=version, steps=steps, ticket=ticket, whole=whole, light=bool(unchanged))
        self.full = self.full if unchanged else version

    def loose(self) -> None:
        """Waits until what a step changes may change: all that is registered, but for what updates alone do."""
        with self._stalling():
            self.vault.loosen(self.context.tree.vault.timeout_s)

    def taken(self) -> None:
        """Waits until all registered state may change."""
        with self._stalling():
            self.vault.settle(self.context.tree.vault.timeout_s)

    def still(self) -> None:
        """Waits until nothing is copied any more, whatever has come of it: other state is about to be put in its place."""
        self.vault.still(self.context.tree.vault.timeout_s)

    def await_copies(
        self, check: Callable[[], None], waiting: Callable[[], AbstractContextManager[None]] = nullcontext
    ) -> None:
        """Waits until what was kept is whole here and at the buddies. `check` may raise: somebody wants us elsewhere. Inside of
        `waiting` it is the buddies that are waited for: found where the way to one took long, and who waited was blamed.

        Copies that do not arrive within `vault.timeout`, or come no nearer for so long that who waits here would soon be taken
        for one that hangs, are said to be `late` and not waited for: training goes on, and until they arrive a lost node may
        cost steps. Where the last ones were late, little is expected of the next. Of a state that is kept `again` they are not
        waited for at all, but for its being whole here: to wait would not make it safer, and no step was made since.
        """
        kept = self.kept
        if kept is None or kept.sealed:
            return
        if kept.again:
            with self._stalling():
                self._await_copies(kept, check, waiting, copies=0)
            self.late = self.late or not self._arrived(kept)
            self.cost_s = inf  # nobody knows yet: until one is known no state inside of a step is worth it
            return
        with self._stalling():
            self._await_copies(kept, check, waiting, copies=self._copies)
        if not self.late and not kept.light:
            # What was copied elsewhere was sent by this node, which in turn has taken as much from another.
            self.copy_s = kept.ticket.busy_s * (1 + 2 * self._copies)
            self.cost_s = (self.copy_s if self._scarce else 0.0) + self._stalled_s

    @property
    def since_s(self) -> float:
        """Since the newest state was begun, or this generation."""
        return time.monotonic() - self._begun

    @contextmanager
    def _stalling(self) -> Iterator[None]:
        """The training thread waits for what was kept: that is part of what it costs."""
        start = time.monotonic()
        try:
            yield
        finally:
            self._stalled_s += time.monotonic() - start

    def _await_copies(
        self, kept: Kept, check: Callable[[], None], waiting: Callable[[], AbstractContextManager[None]], *, copies: int
    ) -> None:
        tree = self.context.tree
        nearer, moved = time.monotonic(), 0
        deadline, late = nearer + tree.vault.timeout_s, self.late
        while True:
            check()
            try:
                kept.ticket.wait_sealed(SLICE_S)
                if copies:
                    with waiting():
                        self._wait_copied(kept.ticket)
            except VaultError as error:
                done, path = kept.ticket.done, kept.ticket.path  # in this order: it may be done just now
                if done and not path:
                    raise
                if path and not path.exists():  # cleared away after it was sealed: no copy of it would ever come
                    self.vault.mend()
                came = error.moved_bytes if isinstance(error, CopiesLate) else moved
                if came != moved or not path:
                    nearer, moved = time.monotonic(), came
                elif late:  # of buddies that had too little time for the last
                    deadline, late = min(deadline, time.monotonic() + 2 * SLICE_S), False
                if time.monotonic() > min(deadline, nearer + NO_NEARER * tree.timeouts.floor_s):
                    self._complain("copies", f"step {kept.version} has too few copies: {error}")
                    self.late = True
                    return
                time.sleep(SLICE_S / 5)  # a vault that is down refuses at once
            else:
                self._complain("copies", "")
                self.late = False
                return

    def _arrived(self, kept: Kept) -> bool:
        """Is it whole at the buddies by now?"""
        with suppress(VaultError):
            if self._copies:
                self._wait_copied(kept.ticket)
            return True
        return False

    def _wait_copied(self, ticket: Ticket) -> None:
        """A vault that has not been told of its neighbours yet has nobody to wait for, and would say that it is done."""
        found = self.vault.wait_copied(ticket, SLICE_S)
        if found < self._copies:
            raise VaultError(f"{found} of {self._copies} buddies are known to this node's vault")

    def used(self, version: Version, lane: int, ids: Collection[SampleId], turn: int = 0, **marks: Any) -> None:
        """These samples went into the update that leads to `version`, unless the ledger's `marks` say otherwise."""
        with self._softly():
            self.ledger.record(version, lane, ids, turn=turn, **marks)

    # -- sealed

    def sealed(self, digest: str | None, *, late: bool = False) -> Kept | None:
        """What was kept is whole everywhere, and the vaults keep it until a newer one is (`late`: but for copies that still
        come, and they keep the one before). Returns it, to be told; begins its save if one is due.
        """
        kept = self.kept
        if kept is None or kept.sealed:
            return None
        kept.sealed = True
        if not late:
            stamp = kept.ticket.stamp
            versions = (stamp.version,) if stamp.base is None else (stamp.version, stamp.base)
            self.vault.sealed = tuple((version, stamp.generation) for version in versions)
        if kept.again:
            self.late = False  # that says nothing of how soon the next one's copies come
        if kept.whole:
            self.chronicled(kept.steps, digest)
            self._paced(kept.steps)
        due = kept.steps % self.context.tree.checkpoint.every == 0 or self._soon
        if kept.whole and kept.steps and due:
            self._soon = False
            self.save(kept)
        elif kept.whole:
            self._prepare(kept.steps)
        if not self._released and not late and not self.context.alone:
            self._released = True  # the gang's first: what the dead left from before what it went on from may go
            self.vault.release(self._lineage[-1].start)
        return kept

    def chronicled(self, steps: int, digest: str | None) -> None:
        """The state after so many steps came to this digest, here and now."""
        if not digest:
            return
        self._chain.add(steps, digest)
        if self.follows.at(steps) and self.follows.head != self._chain.at(steps):
            self._say(
                f"step {steps}, which this run goes on from, has not the chain of digests that its checkpoint names: it is "
                "another state than the one that was saved, or lanes.digest was changed. `elasticrl certify` will refuse."
            )
        if self._rank == 0:
            self.chronicle.add(step=steps, generation=self._generation, digest=digest, link=self._chain.at(steps))
            self._complain("chronicle", self.chronicle.problem)

    def save(self, kept: Kept) -> None:
        """Begins to write a sealed snapshot to disk, in the background. A disk that is ill is said to be, and costs no step."""
        kept.asked = True
        with self._softly():
            self.ledger.catch_up()
        try:
            self._writer().save(
                kept.ticket,
                finish=self._publishes,
                own=self._own,
                parent=self._committed or None,
                flush=self.ledger.flushing(kept.version),
                chain=self._chain.at(kept.steps),
            )
        except (StateError, OSError) as error:
            self._complain("saves", str(error))
            self._lost.append(kept.version.step)

    def _paced(self, steps: int) -> None:
        """How long a step takes, from the last two of this generation."""
        now, before = time.monotonic(), self._whole
        self._whole = (steps, now)
        if before is not None and steps > before[0]:
            self.pace_s = (now - before[1]) / (steps - before[0])

    def _prepare(self, steps: int) -> None:
        """Has a writer started in good time. Found in the race: of a job's first second of steps nothing was on the disk."""
        every = self.context.tree.checkpoint.every
        if self._saver is None and 0 < (every - steps % every) * self.pace_s < WARM_S:
            with suppress(OSError):  # the save will say it
                self._writer()

    @property
    def _publishes(self) -> bool:
        """Whether it is this worker's writer that does: of the gang, or of its node."""
        return self._rank == (self._own.shards[0] if self._own else 0)

    def _writer(self) -> Saver:
        if self._saver is None:
            conf = self.context.tree.checkpoint
            self._saver = Saver(
                self.context.run_dir, facts=self._facts, timeout_s=conf.timeout_s, answer_s=conf.answer_s
            )
        self._saver.facts = self._facts
        return self._saver

    def save_last(self, kept: Kept, check: Callable[[], None], waits: Callable[[], None] = lambda: None) -> None:
        """Saves what a job ends with, or is interrupted at: waits for it, and tries again until it is on the disk. Up to
        `checkpoint.timeout` it is the disk that is waited for, as `waits` is told in each turn; after that it hangs.
        """
        if self.saved == self.name(kept) or (self._own and self._written == self.name(kept)):
            return
        limit = time.monotonic() + self.context.tree.checkpoint.timeout_s

        def turn() -> None:
            check()
            if time.monotonic() < limit:
                waits()

        if not kept.asked:  # twice at once, and the two would clear each other's files away
            self.save(kept)
        while True:
            outcomes = self.poll()
            mine = [out for out in outcomes if out.version == kept.version]
            if any(out.ok for out in mine) or self.saved == self.name(kept):
                return
            if mine or self._saver is None or not self._saver.busy_s:
                pause = time.monotonic() + RETRY_S
                while time.monotonic() < pause:
                    turn()
                    time.sleep(SLICE_S)
                self.save(kept)
            turn()
            time.sleep(0.005)

    def poll(self) -> tuple[Outcome, ...]:
        """What has become of saves since the last call."""
        outcomes = self._saver.poll() if self._saver is not None else ()
        for outcome in outcomes:
            if not outcome.ok:
                self._complain("saves", outcome.why)
                if outcome.generation == self._generation:
                    self._lost.append(outcome.version.step)
                continue
            self._complain("saves", "")
            self._written = name_of(outcome.version, outcome.generation)
            if not outcome.manifest:
                continue
            if self._published is None:
                self.saved = self.marked = outcome.manifest
            elif outcome.generation == self._generation:
                self._published.add(outcome.version.step)
        return outcomes

    def whole(self, manifest: str) -> None:
        """Every shard of this checkpoint is on disk: rank 0 says so, and whoever has published it will mark its commit."""
        if self._publishes:
            self.marked = manifest
        if self._rank == 0:
            self.saved = manifest

    def written(self, kept: Kept) -> None:
        """Everybody's last save has ended well."""
        if self._own:
            self.whole(self.name(kept))

    def say(self) -> tuple[float, ...]:
        """What this worker adds to its notes: a step of which its shard will not be written, 0 if there is none; and where each
        node has a disk of its own, a step that is on this one.

        Found live: a node's disk had turned read-only, so not even that its shard would not come could be written there; rank
        0's writer waited for it until `checkpoint.timeout`, and nothing was saved meanwhile.
        """
        lost = float(self._lost.popleft() if self._lost else 0)
        return (lost, self._published.say()) if self._published else (lost,)

    def hear(self, rows: Sequence[Sequence[float]]) -> Sequence[Sequence[float]]:
        """All ranks' notes, in rank order, without what each has added."""
        if self._published is not None:
            step = self._published.hear([row[-1] for row in rows])
            if step is not None:
                self.whole(name_of(Version(step), self._generation))
            rows = [row[:-1] for row in rows]
        for rank, row in enumerate(rows):
            if row[-1]:
                self._hear_lost(rank, Version(int(row[-1])))
        return [row[:-1] for row in rows]

    def _hear_lost(self, rank: int, version: Version) -> None:
        mine = self._own.shards if self._own else range(self._world)
        if self._saver is None or not self._publishes or rank == self._rank or rank not in mine:
            return
        try:
            self._saver.lost(version, generation=self._generation, shard=rank)
        except (StateError, OSError) as error:
            self._complain("saves", str(error))

    def shelf(self) -> tuple[Entry, ...]:
        """The checkpoints that are there."""
        return listing(self.place)

    def name(self, kept: Kept) -> str:
        """What the checkpoint of it is called."""
        return name_of(kept.version, self._generation)

    def committed(self, manifest: str, *, generation: int) -> None:
        """The store (or, alone, nobody but us) has made this checkpoint the newest. Once for each; old ones go."""
        if not manifest or manifest == self._committed:
            return
        self._committed = manifest
        parsed = parse_name(manifest)
        if parsed is not None:
            self.ledger.committed(parsed[0])
        conf = self.context.tree.checkpoint
        try:
            if self._publishes:  # by the writer: the training thread waits for no disk
                retention = Retention(keep_last=conf.keep_last, keep_every=conf.keep_every, keep_best=conf.keep_best)
                self._writer().committed(manifest, retention, generation=generation)
        except (StateError, OSError) as error:
            self._complain("saves", str(error))

    def void_after(self, version: Version, generation: int) -> None:
        """What lies in this worker's part of the vault beyond that has no future."""
        self.vault.void_after(version, generation)

    def close(self, *, over: bool, failed: bool = False) -> None:
        """Ends the threads. Alone, a job that is over leaves no memory behind.

        Who has failed does not wait for its writer, which outlives it. Found live: it took a second to die, in which its peers,
        out of the broken group already, had nobody to blame and all started afresh.
        """
        if self._saver is not None:
            self._saver.close(0.0 if failed else CLOSE_S)
        self.chronicle.close()
        self.ledger.close()
        self.vault.close()
        if over and self.context.alone:
            clean(self.context.vault)

    @contextmanager
    def _softly(self) -> Iterator[None]:
        """A ledger whose disk is full costs no step: its lines are in the vault too, and are written when there is room."""
        try:
            yield
        except DataError as error:
            self._complain("ledger", str(error))
        else:
            self._complain("ledger", "")

    def _notice(self) -> None:
        """Says why this node's vault server does not hear of snapshots: each reason once, until it hears of one again. And why
        a GPU's snapshots are slow, once.
        """
        self._complain("registered", self.vault.slower)
        notice = self.vault.notice
        if not notice:
            self._noticed.clear()
        elif notice not in self._noticed and not self.context.alone:  # alone there is no server to hear anything
            self._noticed.add(notice)
            self._say(notice)

    def _complain(self, of: str, problem: str) -> None:
        """Once for each change: a disk that stays full says so once."""
        if problem and problem != self._said.get(of):
            self._say(problem)
        self._said[of] = problem


def what_computes() -> str:
    """The fingerprint of what decides the bits here, for the chronicle; "" where its probe cannot be computed."""
    try:
        return str(bits())
    except RuntimeError:  # a GPU without room for it: two runs that part are then told apart without a reason
        return ""


def facts_of(context: Context, *, batch: int, data: str) -> Conditions:
    """What a later run is compared with before it may go on."""
    return Conditions(
        job=context.job,
        lanes=context.tree.lanes.count,
        batch=batch,
        data=data,
        config=context.config,
        tp=context.tree.model.tp,
        cp=context.tree.model.cp,
    )
