"""Virtual workers: a gang that forms, agrees on a version, and makes updates in two phases.

The one idea: healthy ranks do the same thing at the same time, so a gang is one machine with one clock; only what differs (a
rank that hangs, a link that is down, a shard that was copied or not) is kept by node. A version is a number of updates, and
its digest a chain over the samples that went in, so equal digests mean equal bits.
"""

from dataclasses import replace
from functools import lru_cache
from hashlib import blake2b
from typing import TYPE_CHECKING

from chaos.history import Made, Resumed, Sealed
from chaos.sim.vault import Key
from elasticrl.contract.model import UNTOLD, Lap, Milestone, Plan, Rung, Work, deal
from elasticrl.core.node.suspect import Progress, Rhythm
from elasticrl.runtime.vault.version import Lineage, Version, grow

if TYPE_CHECKING:
    from chaos.sim.cluster import Cluster
    from chaos.sim.node import Node

PATIENCE = 0.75  # of the shortest budget: so long copies are waited for at first (`runtime.keeper`)
PHASES = ("rollout", "reduce", "apply", "gather", "seal")
SHARE = {"rollout": 0.4, "reduce": 0.15, "apply": 0.1, "gather": 0.15, "seal": 0.2}
COLLECTIVE = frozenset({"reduce", "gather", "seal"})  # the phases in which a worker waits for others


@lru_cache(maxsize=8)
def _lanes(ranges: tuple[tuple[int, int], ...]) -> str:
    return str(sorted(lane for first, end in ranges for lane in range(first, end)))


def chain(digest: str, version: int, ranges: tuple[tuple[int, int], ...]) -> str:
    """The digest after one update: it depends on which lanes' samples went in, not on who carried them."""
    lanes = _lanes(ranges)
    return blake2b(f"{digest}:{version}:{lanes}".encode(), digest_size=6).hexdigest()


def chain_whole(digest: str, version: int, lanes: int) -> str:
    """The digest after one update of an undisturbed run."""
    return chain(digest, version, ((0, lanes),))


class Gang:
    """The workers of one generation."""

    def __init__(self, cluster: "Cluster", plan: Plan) -> None:
        self.cluster, self.world, self.plan = cluster, cluster.world, plan
        self.seats = [cluster.nodes[seat.member.node] for seat in plan.seats]
        self.names = frozenset(plan.seated)
        self._stuck: Node | None = None  # a rank that was seen not to move
        self.joined: set[str] = set()
        self.counted: set[str] = set()  # in the store of where it meets, which nobody takes back
        self.running = self.broken = False
        self.version = 0
        self.digest = ""
        self.phase = ""
        self.phase_at = 0.0
        self.waits_since: float | None = None  # something has kept this phase from ending since then
        self.waited_s = 0.0  # in this phase, while each of its workers could have gone on
        self.turn = 0  # rises with every phase: what was planned for an earlier one is void
        self.restarted_at = 0.0
        self.begun_at = 0.0  # the newest update
        self.ranges = tuple((r.start, r.stop) for r in deal(plan.lanes, plan.carriers)) if plan.world else ()
        self.own: dict[str, int] = {}  # each node's shards
        self.shards, self.holds = self._shards()
        self.sealed: tuple[Key, ...] = ()  # what was sealed last
        self.late = False  # the newest copies did not arrive in time
        self.kept_by = 0  # the generation that sealed the version in the vaults from which this one goes on
        self.lineage: Lineage = ()  # where it comes from, and where it began
        self.halting = self.saves_last = False  # after this step; now
        self.rhythm: Rhythm | None = None  # of a script's log

    def _shards(self) -> tuple[int, "dict[str, tuple[Node, ...]]"]:
        """All shards, and whose each node keeps: its own and those of the nodes before it in the ring."""
        own, rank = [], 0
        for seat in self.plan.seats:
            own.append(((1 << seat.slots) - 1) << rank)
            rank += seat.slots
        copies = min(self.cluster.settings.copies, len(own) - 1)
        holds = {}
        for i, node in enumerate(self.seats):
            holds[node.name] = tuple(self.seats[i - back] for back in range(copies + 1))
            self.own[node.name] = own[i]
        return (1 << rank) - 1, holds

    @property
    def attempted(self) -> int:
        """The step that is being made."""
        return self.version // self.cluster.updates

    # ---- forming

    def join(self, node: "Node") -> None:
        """A node's workers have come to the meeting."""
        if self.broken:
            self._park(node)
            return
        node.gang = self
        node.parts_ways = max(0, node.parts_ways - 1)
        self.joined.add(node.name)
        self.counted.add(node.name)
        node.restores = False
        if len(self.joined) == len(self.seats):
            self._meet()

    def _meet(self) -> None:
        if self.broken:
            return
        if self._astray() or self._hindered() or all(node.endpoint != self.plan.endpoint for node in self.seats):
            self.world.later(0.3, self._meet)
            return
        version, self.digest, source, whole = self._agree()
        self.version = version
        took = {"vault": 0.1, "start": 0.05, "disk": 0.5 * self.cluster.disk.factor}[source]
        if self.cluster.shape.restore_s and source != "start":
            took += self.cluster.shape.restore_s
            self._restores(self.world.now + took)
        self.world.later(took, self._form, source, whole)

    def _restores(self, until: float) -> None:
        """State is put back, and comes nearer as long as all move. Agents look at that after the shortest budget."""
        if self.broken or self.running:
            return
        comes = self.world.now < until and not self._hindered()
        for node in self.seats:
            if node.restores is not comes:
                node.restores = comes
                node.tell()
        if comes:
            self.world.later(min(self.cluster.settings.timeouts.floor_s, until - self.world.now), self._restores, until)

    def _agree(self) -> tuple[int, str, str, int]:
        """The version to go on from, its digest and source, and the newest that is whole in the members' vaults."""
        if self.cluster.script:
            return *self.cluster.own, "vault" if self.cluster.own[0] else "start", self.cluster.own[0]
        commit = self.cluster.store.shared.commit
        committed = commit.generation if commit and commit.step == self.plan.resume else None
        floor = self.plan.resume * self.cluster.updates
        whole, generation = self.cluster.newest_whole(self.seats, floor, committed)
        if self.plan.rung is not Rung.RELOAD and whole >= 0:
            self.kept_by, self.lineage = generation, self.cluster.lineages.get(generation, ())
            return whole, self.cluster.digests[whole, generation], "vault", whole
        save = self.cluster.disk.newest()
        if save is None:
            return 0, "", "start", whole
        self.lineage = save.lineage
        return save.version, save.digest, "disk", whole

    def _form(self, source: str, whole: int) -> None:
        if self.broken:
            return
        if self._hindered():
            self.world.later(0.3, self._form, source, whole)
            return
        generation = self.plan.generation
        self.running = True
        self.cluster.running = self
        self.lineage = self.cluster.lineages[generation] = grow(self.lineage, generation, Version(self.version))
        self.world.note(
            Resumed(
                at=self.world.now,
                generation=generation,
                version=self.version,
                digest=self.digest,
                source=source,
                whole=whole,
                nodes=tuple(node.name for node in self.seats),
                ranges=self.ranges,
            )
        )
        for node in self.seats:
            node.work, node.step, node.phase = Work.TRAINING, self.attempted, ""
            if self.cluster.script:
                node.step, node.phase = self.told(), UNTOLD
            elif self.kept_by:
                node.vault.void_after((self.version, self.kept_by))
            else:
                self._keep(node)
            node.tell()
        self.begun_at = self.world.now
        self.sealed = ((self.version, self.kept_by or generation),)
        self._give_copies()
        self._next(0 if self.version % self.cluster.updates == 0 else 1)

    def saves_by_itself(self) -> None:
        """A script that is given the time for it saves before it ends, where its gang is whole and it hears of that."""
        if self.running and not self.broken and self.cluster.settings.means.tells and not self._hindered():
            self.cluster.own = (self.version, self.digest)

    def told(self) -> int:
        """The step that a script's nodes know of."""
        return self.attempted if self.cluster.settings.means.tells else 0

    def _give_copies(self) -> None:
        """What the gang goes on from lies in the vaults as another has left it: each gives its own to those behind it."""
        if not self.kept_by:
            return
        key = (self.version, self.kept_by)
        copies = min(self.cluster.settings.copies, len(self.seats) - 1)
        for i, node in enumerate(self.seats):
            own = node.vault.of(node.name, key)
            for hop in range(1, copies + 1):
                behind = self.seats[(i + hop) % len(self.seats)]
                if own and node.vault.serves and behind.vault.serves:
                    behind.vault.keep(node.name, key, own, self.sealed)

    # ---- growing

    def lets_train(self, plan: Plan) -> bool:
        """Need a member not leave at once for this plan, which only adds to us?"""
        return self.running and not self.broken and self.phase != "done" and plan.generation == self.plan.generation + 1

    def _grows(self) -> bool:
        """A state was just kept. Rank 0 has seen that those who come are there: all part."""
        plan = self.seats[0].next_plan
        if plan is None or self.halting:
            return False
        there = self.cluster.gang(plan).counted
        if any(seat.born == plan.generation and seat.member.node not in there for seat in plan.seats):
            return False
        self.broken = True
        self.turn += 1
        for node in self.seats:
            if node.gang is self:
                node.part()
        return True

    # ---- stepping

    def _next(self, phase: int) -> None:
        if self.cluster.finished(self.version):
            self._done()
            return
        self.phase = PHASES[phase]
        self.phase_at = self.restarted_at = self.world.now
        self.waits_since, self.waited_s = None, 0.0
        self.turn += 1
        took = SHARE[self.phase] * self.cluster.step_s * max(node.slow for node in self.seats)
        if self._evaluates():
            took += self.cluster.shape.evaluates_s
            self.world.later(0.5, self._look_on, self.turn)
        if self.rhythm is not None:
            self.world.later(1.0, self._listen, self.turn)
        self.cluster.reach("before " + self.phase, self)
        if self.broken:
            return
        if "during " + self.phase in self.cluster.wanted:
            self.world.later(took / 2, self._midst, self.turn)
        self.world.later(took, self._end_phase, self.turn)

    def _midst(self, turn: int) -> None:
        if turn == self.turn and not self.broken:
            self.cluster.reach("during " + self.phase, self)

    def _end_phase(self, turn: int) -> None:
        if turn != self.turn or self.broken:
            return
        self._program_fails()
        if turn != self.turn:
            return  # the group is broken
        if self._hindered():
            self._wait(turn)
            return
        if self.waits_since is not None or self._evaluates():
            if self._goes_on(turn):
                return
            self._relieved()
        if self.phase == "seal" and not self._copied():
            self.world.later(0.1, self._end_phase, turn)
            return
        if self.phase != "seal":
            self.cluster.reach("after " + self.phase, self)
            if not self.broken:
                self.cluster.learn(self.phase, self.world.now - self.phase_at)
                self._next(PHASES.index(self.phase) + 1)
            return
        self._seal()

    def _program_fails(self) -> None:
        """What the program itself does wrong: the same at the same step, or on a sick node."""
        if self.phase != "reduce":
            return
        if self.cluster.loop_step is not None and self.attempted == self.cluster.loop_step:
            # One bug, and yet another text each time: found by reading, such a loop was none.
            kind = ("ValueError", "IndexError")[self.plan.generation % 2]
            self.seats[-1].dies(
                f"exit code 1: {kind}: bad prompt, {self.plan.generation} tokens", own=True, raised=kind
            )
            return
        if self.attempted == self.cluster.refused_step:
            name = "DistNetworkError"
            for node in self.seats:
                node.dies(f"exit code 1: {name}: Connection refused", own=False, raised=f"torch.distributed.{name}")
            return
        for node in self.seats:
            if node.sick and node.alive:
                node.dies("exit code 1: RuntimeError: bad memory", own=True, raised="RuntimeError")
                return

    def _astray(self) -> bool:
        """Has a vault moved from where the plan says that it is?"""
        return any(seat.vault != node.door for seat, node in zip(self.plan.seats, self.seats, strict=True))

    def _copied(self) -> bool:
        """Are the copies made, or waited for no longer? Where the last ones were late, little is expected of the next."""
        if self.cluster.script or (all(node.vault.serves for node in self.seats) and not self._astray()):
            self.late = False
            return True
        patience_s = 0.1 if self.late else PATIENCE * self.cluster.settings.timeouts.floor_s
        self.late = self.world.now >= self.phase_at + SHARE["seal"] * self.cluster.step_s + patience_s
        return self.late

    def _seal(self) -> None:
        self.version += 1
        self.digest = chain(self.digest, self.version, self.ranges)
        self.cluster.digests[self.version, self.plan.generation] = self.digest
        for node in self.seats:
            self._put(node, (self.version, self.plan.generation))
        saves = self.cluster.shape.script_saves
        if saves == 1 or self.version % (self.cluster.updates * saves) == 0:
            self.cluster.own = (self.version, self.digest)  # of a script
        generation, step = self.plan.generation, self.attempted
        if self.late:
            self.world.note(Made(at=self.world.now, generation=generation, version=self.version))
        else:
            self.cluster.learn("seal", self.world.now - self.phase_at)
            self.sealed = ((self.version, generation),)
            self.world.note(
                Sealed(at=self.world.now, generation=generation, version=self.version, step=step, digest=self.digest)
            )
            script, deep = self.cluster.script, self.cluster.shape.deep
            told, lap = (
                self.told() if script else step,
                Lap(generation=generation, seconds=self.cluster.step_s, bytes=1),
            )
            for node in self.seats:
                node.step, node.lap = told, None if script else lap
                if deep:
                    node.measured(generation, self.world.now - self.begun_at)
            self.begun_at = self.world.now
        whole_step = self.version % self.cluster.updates == 0
        self.cluster.reach("after seal", self)
        if self.broken:
            return
        if self.cluster.script:
            self._log()
            self._next(0 if whole_step else 1)
            return
        if self.halting and whole_step:
            self.saves_last = True
            self.cluster.disk.save_gang(self)
            return
        if self._grows():
            return
        if whole_step and step % self.cluster.save_every == 0:
            self.cluster.disk.save_gang(self)
        self._next(0 if whole_step else 1)

    def _keep(self, node: "Node") -> None:
        """This node's part of the present version: its own shards, and the copies that reach it."""
        self.cluster.digests[self.version, self.plan.generation] = self.digest
        self._put(node, (self.version, self.plan.generation))

    def _put(self, node: "Node", key: Key) -> None:
        for origin in self.holds[node.name]:
            if origin is node or (origin.vault.serves and node.vault.serves):
                node.vault.keep(origin.name, key, self.own[origin.name], self.sealed)

    def _done(self) -> None:
        self.turn += 1
        self.phase = "done"
        if not self.cluster.script:
            self.cluster.disk.save_gang(self)
        for node in self.seats:
            node.work, node.next_plan = Work.DONE, None
            node.tell()

    # ---- standing still

    def _hindered(self) -> bool:
        """Is there a rank that does not move, or a link that does not carry?"""
        stuck = self._stuck  # mostly it is the one of the last look
        if stuck is None or (stuck.gang is self and stuck.able):
            self._stuck = next((node for node in self.seats if node.gang is not self or not node.able), None)
        net = self.cluster.net
        if self.phase in COLLECTIVE and self.disagrees:
            return True
        if not (self.cluster.outside.isdisjoint(self.names) and self.cluster.returning.isdisjoint(self.names)):
            return True
        if self._stuck is not None or net.parted(self.names) or net.swallowed(self.names):
            return True
        return not self.plan.backend and net.fabric_broken(self.names)

    @property
    def disagrees(self) -> bool:
        """Do its ranks call different collectives?"""
        return 0 < sum(node.parts_ways > 0 for node in self.seats) < len(self.seats)

    def _evaluates(self) -> bool:
        """Is there something in this phase that only some steps have?"""
        every = self.cluster.shape.evaluates_every
        return bool(every) and self.phase == "rollout" and self.attempted > 0 and self.attempted % every == 0

    def _look_on(self, turn: int) -> None:
        """What each agent concludes from the beats of a worker that takes long, and waits for nobody."""
        if turn != self.turn or self.broken:
            return
        for node in self.seats:
            if node.stall is None and node.able:
                progress = Progress(slot=0, step=self.attempted, phase=self.phase, since=self.phase_at, waiting=False)
                node.found_still(self.cluster.budgets.stalled(progress, self.world.now))
        self.world.later(0.5, self._look_on, turn)

    def _log(self) -> None:
        """Does the script's log tell of progress at this step?"""
        every, now, mark = self.cluster.shape.log_every, self.world.now, self.attempted
        if not every or mark % every:
            return
        self.rhythm = self.rhythm.at(now, mark) if self.rhythm else Rhythm(newest=now, mark=mark)
        for node in self.seats:
            node.milestone = Milestone(unit="step", at=mark, read=round(now, 1))
        self._relieved()

    def _listen(self, turn: int) -> None:
        """What each agent concludes from a log that tells nothing more, whatever its workers do."""
        if turn != self.turn or self.broken:
            return
        for node in self.seats:
            if node.alive and node.powered and not node.frozen and (node.stall is None or node.stall.silent):
                progress = Progress(
                    slot=0, step=self.told(), phase=UNTOLD, since=self.phase_at, waiting=True, rhythm=self.rhythm
                )
                node.found_still(self.cluster.budgets.stalled(progress, self.world.now))
        self.world.later(1.0, self._listen, turn)

    def _wait(self, turn: int) -> None:
        if self.waits_since is None:
            self.waits_since = self.world.now
        if not any(node.hung or node.stopped for node in self.seats):
            self.waited_s += 0.1
        self._notice_stalls()
        self.world.later(0.1, self._end_phase, turn)

    def _notice_stalls(self) -> None:
        """What each agent concludes from its workers' beats."""
        budgets = self.cluster.budgets
        assert self.waits_since is not None
        waiting_in = self.phase if self.phase in COLLECTIVE else PHASES[PHASES.index(self.phase) + 1]
        due = min(self.phase_at + budgets.budget(self.phase), self.waits_since + budgets.budget(waiting_in))
        if self.world.now < due and not self.cluster.script:
            return
        for node in self.seats:
            if not (node.alive and node.powered and not node.frozen and node.gang is self):
                continue
            if node.name in self.cluster.outside | self.cluster.returning:
                continue  # it has a deadline of its own
            culprit = bool((node.hung and not node.strays) or node.stopped)
            slot, told = min(node.hung | node.stopped, default=0), node.stall
            if told is not None and (told.waiting if not culprit else not told.waiting or told.slot == slot):
                continue  # who went on for a moment waits once more; who stands still beside one that waits is told of
            script = self.cluster.script
            progress = Progress(
                slot=slot,
                step=self.attempted,
                phase=UNTOLD if script else self.phase if culprit else waiting_in,
                since=self.phase_at if culprit or self.phase in COLLECTIVE else self.waits_since,
                waiting=not node.stopped if script else not culprit,
                waited_s=self.waited_s if culprit else 0.0,
                stopped=bool(node.stopped),
                op=("broadcast" if node.parts_ways else "all_reduce") if self.disagrees else "",
                collective=7 if self.disagrees else 0,
                rhythm=self.rhythm,
            )
            node.found_still(budgets.stalled(progress, self.world.now))

    def _goes_on(self, turn: int) -> bool:
        """What a long wait was for is here, and the rest of the phase is ahead: who waited is between two collectives."""
        waited = [node for node in self.seats if node.stall is not None and node.stall.waiting and node.able]
        if self.cluster.script or not waited:
            return False
        for node in waited:
            assert node.stall is not None
            node.stall = replace(node.stall, waiting=False)
            node.work = (
                Work.TRAINING if node.work is Work.STALLED else node.work
            )  # (told of a larger gang it is JOINING)
            node.tell()
        self.world.later(SHARE[self.phase] * self.cluster.step_s, self._end_phase, turn)
        return True

    def _relieved(self) -> None:
        """What kept the gang is gone."""
        for node in self.seats:
            if node.gang is self and node.stall is not None:
                node.stall = None
                if node.work is Work.STALLED:
                    node.work = Work.TRAINING
                node.tell()

    # ---- how a group ends

    def lost(self, node: "Node", *, silent: bool) -> None:
        """A member's processes have left or died. Unless its whole node went silent, its peers' sockets tell."""
        self.joined.discard(node.name)
        if silent:
            return
        self.break_()
        self.cluster.beats.doubt(node.name)

    def bereft(self, node: "Node") -> None:
        """A member's vault went. Who trains has its state; who is about to restore it leaves, and the others notice nothing."""
        if not self.running and not self.broken and not self.cluster.script:
            self.broken = True
            self.joined.discard(node.name)
            self.world.later(0.005, self._park, node)

    def break_(self) -> None:
        """The group is broken: members leave it and wait, with what they hold."""
        if self.broken:
            return
        self.broken = True
        self.turn += 1
        for node in self.seats:
            self.cluster.broke_up_over(node.stall)
        if self.running and self.phase == "seal":
            self._half_sealed()
        low, high = 0.005, 0.1
        self.world.later(low + (high - low) * self.world.chance("break").random(), self._park_all)

    def _half_sealed(self) -> None:
        """The break came while shards were being kept and copied: some were, some not."""
        chance = self.world.chance("half sealed")
        share = chance.random()
        key = (self.version + 1, self.plan.generation)
        for node in self.seats:
            if node.agent_up and node.powered and chance.random() < share:
                self._put(node, key)

    def _park_all(self) -> None:
        for node in self.seats:
            self._leave(node)

    def _leave(self, node: "Node") -> None:
        if node.gang is self and node.name in self.cluster.outside:
            self.world.later(0.1, self._leave, node)  # it hears of nothing before its server has answered
        elif node.gang is self:
            self._park(node)

    def _park(self, node: "Node") -> None:
        node.gang = None
        if node.alive and (node.generation == self.plan.generation or node.next_plan is not None):
            if not node.able:
                # A worker that stands still cannot leave; its agent goes on watching it.
                self.cluster.watch_still(node, self.phase or "reform", self.phase_at or self.world.now)
            elif self.cluster.script:
                node.reset()
            else:
                node.part()
                self.cluster.broke_up(node)
