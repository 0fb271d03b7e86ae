# ruff: noqa: E501 - a mutant is a row of a table; its source text is quoted whole
"""The judge judged: each guard of the core is broken in turn, and some seed or scenario must notice.

The one idea: a mutant is a piece of the core's source and what to put in its place. It is loaded by an import hook in a process
of its own; a guard whose loss nobody notices is dead code or an unchecked guarantee.
"""

import importlib.abc
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Final

ROOT = Path(__file__).parent.parent
EACH_S = 15.0  # of computing, for one mutant
SEEDS = 60  # how far the search goes when the known catch fails


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """A guard and how it is broken. `caught_by` is where to look first: a scenario's name or a seed."""

    name: str
    module: str
    old: str
    new: str
    caught_by: str = ""


def _m(name: str, module: str, old: str, new: str, caught_by: str = "") -> Mutant:
    return Mutant(name=name, module=f"elasticrl.{module}", old=old, new=new, caught_by=caught_by)


def _s(name: str, old: str, new: str, caught_by: str = "") -> Mutant:
    return Mutant(name=name, module="chaos.sim.store", old=old, new=new, caught_by=caught_by)


MUTANTS: Final = (
    # What the store is asked to compare. The core names the revisions; here the comparison itself is broken.
    _s("a commit is fenced by the plan", "(self.shared.plan_revision, self.shared.commit_revision) != (action.if_plan, action.if_commit)", "self.shared.commit_revision != action.if_commit", "a-commit-under-an-older-plan"),
    _s("a commit is fenced by the commit before it", "(self.shared.plan_revision, self.shared.commit_revision) != (action.if_plan, action.if_commit)", "self.shared.plan_revision != action.if_plan", "late-duplicate-commit"),
    _s("a plan is fenced by the plan before it", "at != (action.if_plan, action.if_commit, action.if_leader)", "at[1:] != (action.if_commit, action.if_leader)", "late-commit-over-a-plan"),
    _s("a plan is fenced by the commit", "at != (action.if_plan, action.if_commit, action.if_leader)", "(at[0], at[2]) != (action.if_plan, action.if_leader)", "late-commit-over-a-plan"),
    _s("a drain is fenced by the drain before it", "        if self.drains != asked:\n", "        if False:\n", "two-drains-at-the-same-moment"),
    # Seeing and leading.
    _m("a lease counts from its sending", "core.step", "leased=max(sent, state.leased)", "leased=event.now", "slow-store"),
    _m("only a held lease leads", "core.step", "state.view.leader == state.me and lease_held(state, now)", "state.view.leader == state.me", "slow-store"),
    _m("suspicion ends with the neighbourhood", "core.step", "near = state.suspects.intersection(watched(", "return state.suspects.union(())\n    near = state.suspects.intersection(watched(", "kill-the-leader"),
    _m("an accusation is of a life", "core.node.suspect", "str(Member(node=node, incarnation=life)) in record.suspects", 'any(text.startswith(node + "/") for text in record.suspects)', "who-is-back-in-a-held-gang-is-not-accused"),
    _m("a convicted leader is replaced at once", "core.step", "state.view.leader is None or leader_convicted(state) or", "state.view.leader is None or", "kill-the-leader"),
    _m("a leader that was reborn is replaced at once", "core.step", "leader_convicted(state) or leader_reborn(state)", "leader_convicted(state)", "restarted-before-its-lease"),
    # A store that has lost what it knew.
    _m("what the store has lost is written again", "core.step", "if state.lost_since is None:\n        return NOTHING", "if True:\n        return NOTHING", "the-store-loses-its-data"),
    _m("a plan that nobody knows is not begun anew", "core.node.setback", "if newest <= state.view.generation:", "if plan is None or newest <= state.view.generation:", "a-lone-daemon-restarts-beside-an-empty-store"),
    _m("all whose workers run are held", "core.node.setback", "if r.work in ALIVE and r.generation == newest]", "if r.member == state.me]", "all-daemons-restart-beside-an-empty-store"),
    _m("nor is it by a leader without workers", "core.node.setback", "    if plan_of(state) is not None:\n        return workers_of(", "    if True:\n        return workers_of(", "a-newcomer-leads-as-nobody-knows-the-plan"),
    _m("an older plan is not followed", "core.node.setback", "if view.generation < plan.generation or (", "if False or (", "the-store-is-set-back"),
    _m("a pause outlives the store's loss", "core.node.setback", "if (view.lost or again) and view.intent_generation < known.intent_generation:", "if False:", "the-store-loses-its-data-in-a-pause"),
    _m("what is asked after the store's loss counts", "core.node.setback", "        if not _asked_since(known, view):", "        if True:", "a-resume-just-after-the-store-lost-its-data"),
    _s("what is written again is fenced by what was asked", "(self.shared.plan_revision, self.shared.commit_revision, self.shared.intent_revision)\n        if at != (action.if_plan, action.if_commit, action.if_intent):", "(self.shared.plan_revision, self.shared.commit_revision)\n        if at != (action.if_plan, action.if_commit):", "a-resume-as-a-lost-plan-is-written-again"),
    # Following.
    _m("workers cannot join one generation twice", "core.node.follow", "return state.joined >= plan.generation or (", "return (", "agent-dies"),
    _m("a step is committed once", "core.node.follow", "return here and workers.saved > state.view.committed", "return here and workers.saved > 0", "agent-dies"),
    _m("a victim of a stall is not killed", "core.node.follow", "or (stall.waiting and not stall.stopped):", "or False:", "data-link-down"),
    _m("the culprit of a stall is killed", "core.node.follow", "if stall is None or not alive(workers)", "if True or stall is None or not alive(workers)", "hang-outside-a-collective"),
    _m("a lost record is written again", "core.node.follow", "if record is not state.view.own:", "if record is not state.view.own and not (state.view.own is None and state.reported > 0):", "leader-cut-from-the-store"),
    # Below job.level exact.
    _m("a script begins afresh in each gang", "core.lead.scene", "        if not self.settings.means.in_place:\n            return self._train_afresh(", "        if False:\n            return self._train_afresh(", "a-script-loses-a-worker-and-a-node"),
    _m("a script is not parked", "core.node.follow", "    if state.settings.means.in_place:\n        return (Park(", "    if True:\n        return (Park(", "a-script-is-paused-and-goes-on"),
    _m("a script is not started again for each newcomer", "core.lead.growth", "if scene.now < due:  # each growth", "if False:  # each growth", "a-script-loses-a-worker-and-a-node"),
    _m("a script that has got on has no strike", "core.lead.lost_seats", "before = strike = None if scene.lasted else plan.strike", "before = strike = plan.strike", "a-script-fails-now-and-then"),
    _m("a node whose script has got on has not failed again", "core.lead.memory", "known = {} if scene.lasted else scene.lead.custody.failures", "known = scene.lead.custody.failures", "a-script-fails-now-and-then"),
    _m("a script's node keeps its seat until it has a process", "core.lead.scene", "ready = record.warm or not (self.settings.means.in_place or record.problem)", "ready = record.warm", "a-script-fails-twice-at-once"),
    _m("a peer's end does not speak against a script's node", "core.lead.scene", "return of_exit(record.exit).sign is Sign.PEER_GONE", "return False", "a-script-is-no-worse-than-its-peers"),
    _m("a script is finished without a commit of ours", "core.lead.intents", "if not scene.settings.means.commits:\n        made =", "if False:\n        made =", "a-script-loses-a-worker-and-a-node"),
    # Leading.
    _m("a restarted daemon is another member", "core.lead.scene", "if record.member != member:", "if False:", "restarted-before-its-lease"),
    _m("a stopped job stays stopped", "core.lead.intents", "if scene.plan and scene.plan.phase is Phase.STOP:", "if False:", "stopped-twice"),
    _m("a job is finished when its last step is committed", "core.lead.intents", "if scene.view.committed < scene.settings.steps:", "if False:", "all-steps-made"),
    _m("a job that is done waits for nobody who would join", "core.lead.intents", "for seat in plan.seats if not plan.grows or seat.born < plan.generation}", "for seat in plan.seats}", "a-gang-is-done-beside-who-would-join-and-saves-end-late"),
    _m("a leader whose own workers trained in a gang knows that it has grown", "core.lead.scene", "if self.formed == self.plan.generation or any(r.step > self.plan.resume for r in new):", "if False:", "a-leader-in-a-new-life-knows-of-a-newcomer-that-has-failed"),
    _m("so was who has failed with a newer state than the disk's", "core.lead.scene", " or any(r.step > self.plan.resume for r in new):", ":", "a-leader-in-a-new-life-knows-of-a-newcomer-that-has-failed"),
    _m("who has left a larger gang was there", "core.lead.scene", "if self.me not in plan.seat_of and any(record.born < plan.generation for record in left):", "if False:", "a-leader-in-a-new-life-knows-that-a-gang-had-grown"),
    _m("nobody speaks of itself before it has read the store", "core.node.follow", "    if lease_held(state, now) and state.view.revision > 0:\n", "    if lease_held(state, now):\n", "drained-and-its-daemon-restarts-beside-a-store-that-lags"),
    _m("a look at a gang is none at a later one", "core.node.follow", "view.look != plan.generation or ", "", "a-node-joins-after-a-look-at-a-gang-before"),
    _m("a failure that nobody has counted is told of before its seat is filled", "core.node.follow", "(uncounted or not workers.warm)", "not workers.warm", "a-crash-loop-beside-a-node-that-would-join"),
    _m("a quarantine counts before it is seen", "core.lead.scene", "self.lead.custody.confining.keys() | self._put_out", "self._put_out", "two-fail-before-the-first-ones-quarantine-is-seen"),
    _m("whom the plan put out counts before its quarantine is seen", "core.lead.scene", "self.lead.custody.confining.keys() | self._put_out", "self.lead.custody.confining.keys()", "a-new-leader-knows-the-plan-before-who-is-kept-out"),
    _m("a leader that is not new knows of its own quarantines", "core.lead.scene", " or self.now >= self.lead.since + self.settings.membership.lease_ttl_s:", ":", "let-in-again-and-another-is-sick"),
    _m("quarantines go with their plan", "core.lead.lead", "move.confine[:WITH_A_PLAN] if move.plan else ()", "()", "a-new-leader-knows-the-plan-before-who-is-kept-out"),
    _m("a refused plan's quarantines are not written", "core.lead.memory", " and node not in refused", "", "a-new-leader-knows-the-plan-before-who-is-kept-out"),
    _m("who trains has joined though its news is late", "core.lead.lost_seats", "if scene.settings.means.joins and scene.doing[Work.TRAINING] and scene.now < told_by:", "if False:", "who-trains-has-joined-though-its-news-is-late"),
    _m("the next life of a node is no spare beside its seat", "core.lead.scene", "if r.member.node not in here)", "if r.member not in {seat.member for seat in seats})", "a-job-is-stopped-as-a-seated-node-is-back-in-another-life"),
    _m("a pause is heeded", "core.lead.intents", "if scene.view.intent is not Intent.PAUSE:", "if True:", "pause-and-resume"),
    _m("who has failed in a held gang saves no more", "core.lead.intents", "r.work in (Work.NONE, Work.FAILED) for r", "r.work is Work.NONE for r", "stopped-as-a-held-gang-has-ended-unsaved"),
    _m("a stop is heeded", "core.lead.intents", "    if scene.view.intent is not Intent.STOP or scene.stop_answered:", "    if True:", "daemon-restarts-as-the-job-stops"),
    _m("a stop of the run before is not obeyed", "core.lead.intents", "    if scene.view.intent is not Intent.STOP or scene.stop_answered:", "    if scene.view.intent is not Intent.STOP:", "stopped-as-all-lose-power"),
    _m("a leader who came after a stop waits for the dead to go", "core.lead.intents", "if scene.older(scene.since) and scene.now < until:", "if False:", "stopped-as-all-lose-power"),
    _m("a plan resumes from the newest commit", "core.lead.scene", "resume=self.view.committed,", "resume=self.plan.resume if self.plan else 0,", "agent-dies"),
    _m("a crash loop ends the job", "core.lead.strikes", "if strike is None or worst(strike) < limit:", "if True:", "crash-loop"),
    _m("a death is seen, which is proof enough", "core.judge.policy", "return verdict.confidence is Confidence.HIGH or (seen and", "return verdict.confidence is Confidence.HIGH or (False and", "a-death-is-for-a-person"),
    _m("who all say that a peer is gone have failed", "core.lead.lost_seats", "ended = own or _unblamed(scene)", "ended = own", "every-rank-of-a-script-says-its-peer-went-again-and-again"),
    _m("nor does that speak against a node", "core.lead.scene", "return of_exit(record.exit).sign is Sign.PEER_GONE", "return False", "every-rank-says-its-peer-went-again-and-again"),
    _m("whom they lost is waited for before the end", "core.lead.lost_seats", "if not own and worst(strike) >= limit and scene.now < due:", "if False:", "victims-are-heard-of-before-the-one-that-died"),
    _m("a known death explains its victims", "core.lead.lost_seats", "        strike = explained(strike)", "        pass", "a-known-death-explains-the-victims-before-it"),
    _m("a later step is another failure", "core.lead.strikes", "if before is None or step > before.step:", "if before is None:", "same-bug-at-other-steps"),
    _m("whatever a crash loop says, it is one", "core.lead.strikes", "if own or unblamed or (same and step == before.step):", "if same and step == before.step:", "one-bug-that-says-another-thing-each-time"),
    _m("one witness proves nothing", "core.node.suspect", "max(1, most / 2)", "max(0, 0 * most)", "lossy-beats"),
    _m("those who hear a node speak for it", "core.node.suspect", "max(1, most / 2)", "1", "heard-by-half-of-its-neighbours"),
    _m("a deaf leader begins to wait anew", "core.lead.memory", "now if scene.anew else last.planned_at", "now if new_plan else last.planned_at", "a-deaf-leader-waits-anew"),
    _m("a stall with nobody to blame is probed", "core.lead.stalls", "or scene.lead.stalls.since is None:", "or True:", "data-link-down"),
    _m("a probe waits for the answers", "core.lead.probing", "if len(answers) < len(seats) + len(scene.spares) and scene.now < due:", "if False:", "data-link-down"),
    _m("the quarantined get no seat", "core.lead.scene", "node not in self.held and node not in self.conviction.guilty and not doubted", "node not in self.conviction.guilty and not doubted", "data-link-down"),
    _m("other bits get no seat", "core.lead.scene", "record.bits == self.bits or self.settings.exact != \"require\"", "True", "alien-bits"),
    _m("another wire gets no seat", "core.lead.scene", " and versions.wire(record) == self.wire", "", "another-wire"),
    _m("a gang is asked for its wire, not all", "core.lead.scene", "        said = next(filter(None, map(versions.wire, going)), \"\")\n", "        said = \"\"\n", "another-wire-is-the-commoner"),
    _m("the leaving lose their seat", "core.lead.scene", "        if record.leaving:\n", "        if False:\n", "drain-during-save"),
    _m("who leaves may lead the others out", "core.step", "    if state.leaving and seat_of(state) is None:\n", "    if state.leaving:\n", "all-drained-at-once"),
    _m("a gang forms before it holds to save", "core.lead.lost_seats", "    forms = scene.behind and", "    forms = False and", "drained-while-it-reforms"),
    _m("who cannot be spared ends with a save", "core.lead.lost_seats", "strike=scene.plan.strike, saves=True)", "strike=scene.plan.strike)", "a-held-node-saves-and-leaves"),
    _m("no more ranks than lanes", "core.lead.scene", "if ranks + seat.slots <= self.settings.lanes * self.settings.team:", "if True:", "no-more-ranks-than-lanes"),
    _m("a team needs one lane", "core.lead.scene", "self.settings.lanes * self.settings.team:", "self.settings.lanes:", "teams-lose-members"),
    _m("a dead member's team is named", "core.lead.scene", "self.plan.rank_of(member, left.slot) if left", "self.plan.rank_of(member, 0) if left", "the-team-of-a-dead-member-is-named"),
    _m("a death in a team is told by what was found, with its team", "core.lead.lost_seats", "count=own.count, of=own.of", "count=0, of=0", "the-team-of-a-dead-member-is-named"),
    _m("growth counts teams", "core.lead.growth", "sum(seat.slots for seat in seats) // team", "sum(seat.slots for seat in seats)", "no-growth-for-half-a-round-of-teams"),
    _m("no more nodes than allowed", "core.lead.scene", "room = membership.max_nodes - kept", "room = 10_000", "deposed-leader-writes-late"),
    _m("too few nodes hold", "core.lead.scene", "strike)\n        if len(seats) < need:\n            few =", "strike)\n        if False:\n            few =", "power-loss-of-all"),
    _m("survivors keep their order", "core.lead.scene", "                seats.append(fate.seat)\n", "                seats.insert(0, fate.seat)\n", "agent-dies"),
    _m("quarantines end", "core.lead.quarantines", "        if scene.now >= due:\n", "        if False:\n", "data-link-down"),
    _m("who died is not held to have been silent", "core.lead.quarantines", "member != before.member and ", "False and ", "killed-again-and-again"),
    _m("a good while is forgiven", "core.lead.quarantines", "for since, after, quarantine in (*served, *forgiven):", "for since, after, quarantine in served:", "a-good-while-is-forgiven"),
    _m("nodes come before the first plan", "core.lead.growth", "if len(seats) < most and scene.now < scene.settled_at and (scene.coming or not back):", "if False:", "agent-dies"),
    _m("a gang that is whole again waits for nobody", "core.lead.growth", " and (scene.coming or not back):", ":", "all-are-back-at-once"),
    _m("those whose workers ended to save are waited for", "core.lead.growth", "    if wait := ending(scene) or waking(scene):", "    if wait := ending(scene):", "workers-that-ended-to-save-are-waited-for"),
    _m("who has no workers yet has no seat", "core.lead.scene", "        if self.plan.phase is Phase.HOLD and record.work is Work.NONE:\n", "        if False:\n", "workers-that-ended-to-save-are-waited-for"),
    _m("growth must shorten a step", "core.lead.growth", "rounds(lanes, after) >= rounds(lanes, before):", "False:", "useless-growth"),
    _m("growth waits whether more come", "core.lead.growth", "    if scene.coming and scene.now < scene.settled_at:  #", "    if False:  #", "nodes-come-late"),
    _m("growth waits for those alone who are in sight", "core.lead.growth", "    if scene.coming and scene.now", "    if scene.now", "who-comes-alone-is-not-kept-waiting"),
    _m("a node that cannot be spared saves first", "core.lead.lost_seats", "    if spared := _leaves_too_few(scene):", "    if spared := None:", "drain-during-save"),
    _m("who is stopped while paused saves first", "core.lead.intents", "_ends_to_save(scene) or _forms_to_save(scene):", "_ends_to_save(scene):", "stopped-while-it-is-paused"),
    _m("who leaves a paused job saves first", "core.lead.intents", "    if leaving := _leave_while_paused(scene):", "    if leaving := None:", "all-drained-while-paused"),
    _m("what forms to save is not paused again", "core.lead.intents", "    if scene.plan.phase is Phase.TRAIN and stranding(scene):", "    if False:", "all-drained-while-paused"),
    _m("who cannot be spared saves before a pause", "core.lead.intents", "is Phase.TRAIN and stranding(scene)", "is Phase.TRAIN and scene.plan.saves and stranding(scene)", "drained-as-it-is-paused"),
    _m("a sick node is put away", "core.lead.lost_seats", "if counts and failures and", "if False and failures and", "sick-node"),
    _m("fresh workers where the plan asks for them", "core.node.follow", "if alive(workers) and workers.born == seat.born:", "if alive(workers):", "crash-loop"),
    _m("workers without a seat end", "core.node.follow", "    if alive(workers):\n        halt = Halt(generation=plan.generation, save=False", "    if False:\n        halt = Halt(generation=plan.generation, save=False", "two-seats-and-a-spare"),
    _m("quarantines are few", "core.lead.quarantines", "if member not in written][:room])", "if member not in written])", "many-fall-out-twice"),
    # Guards that nobody missed at first: each got a check, a scenario or both.
    _s("a plan is fenced by the office", "at != (action.if_plan, action.if_commit, action.if_leader)", "at[:2] != (action.if_plan, action.if_commit)", "a-plan-outlives-its-writer"),
    _m("a lost lease is lost", "core.step", "return state.but(leased=-inf, sent=sent_before), ()", "return state.but(sent=sent_before), ()", "a-lease-is-forgotten"),
    _m("a wish is not repeated before its time", "core.step", "last[0] == action and now < last[1] + retry_s", "False", "data-link-down"),
    _m("a seat without workers is given back", "core.node.follow", " or (seat.born < plan.generation and (uncounted or not workers.warm))", "", "two-deaths-one-spare-process"),
    _m("only the gang of this plan commits", "core.node.follow", "here = workers.generation == plan.generation and bool(plan.seats) and", "here = bool(plan.seats) and", "a-save-ends-late"),
    _m("a held node leaves when its state is safe", "core.node.follow", "if safe or late", "if late", "a-held-node-saves-and-leaves"),
    _m("a held node stays until its state is safe", "core.node.follow", "if safe or late", "if True", "a-held-node-saves-and-leaves"),
    _m("the word of the convicted does not count", "core.node.suspect", "accusers.difference_update(top)", "pass", "two-deaf-nodes-beside-one"),
    _m("a cut is probed, not judged", "core.node.suspect", "if any(other in against[node] for node in every for other in every):", "if False:", "every-second-node-cut-off"),
    _m("who left before the gang had formed is not waited for", "core.lead.lost_seats", "        return _broken_up(scene)", "        return Move(wake_at=scene.deadline)", "a-vault-is-lost-while-the-gang-forms"),
    _m("a gang that breaks up twice is probed", "core.lead.lost_seats", "if lead.formation.formed < plan.generation - 1 and", "if False and", "the-gang-breaks-up-twice-while-it-forms"),
    _m("a hold is no gang that broke up", "core.lead.lost_seats", " and not plan.says(Why.WENT_ON, Why.RESUMED):", ":", "a-gang-breaks-up-after-a-hold"),
    _m("a gang that breaks waits for nobody to load", "core.lead.lost_seats", " if s.member not in scene.left_behind]", "]", "a-node-dies-as-another-loads"),
    _m("a program may take its time to load", "core.lead.scene", "        if self.loading:\n", "        if False:\n", "a-model-that-loads-for-long"),
    _m("state may take its time to come back", "core.lead.scene", "self.now if self.restoring else self.lead.formation.restored_at", "self.lead.formation.planned_at", "a-state-that-takes-long-to-come-back"),
    _m("state that comes no nearer has no more time", "core.lead.scene", "return any(record.restores for record in self.doing[Work.JOINING])", "return bool(self.doing[Work.JOINING])", "a-state-that-comes-no-nearer"),
    _m("a gang that is to grow saves as it is", "core.lead.intents", "scene.trained or scene.still_trains or", "scene.trained or", "stopped-as-a-node-loads"),
    _m("a gang that does not grow goes on without who does not come", "core.lead.lost_seats", "    if not scene.grown and (move := _ungrown(scene)):\n        return move\n", "    if not scene.grown:\n        return Move()\n", "a-node-that-never-loads"),
    _m("who has joined once is there for good", "core.lead.scene", "        if self.plan is None or not self.plan.grows or self.lead.formation.grown == self.plan.generation:\n            return True\n        # A newcomer that was given state which is newer than the disk's had met all others by then.\n        new = (r for r in self.doing[Work.FAILED] if self.plan.seat_of[r.member].born == r.generation)\n        if self.formed == self.plan.generation or any(r.step > self.plan.resume for r in new):\n            return True\n        return bool(self.doing[Work.TRAINING] or self.doing[Work.STALLED]) or self.sealed_here\n", "        return self.plan is None or not self.plan.grows or self.trained\n", "a-lease-ends-long-after-another-joined"),
    _m("who has loaded has the rung's time from then on", "core.lead.scene", "begun = max(self.lead.formation.planned_at, self.lead.formation.loaded_at, self.lead.formation.parted_at)", "begun = self.lead.formation.planned_at", "a-model-that-loads-for-long"),
    _m("who comes and fails is no failure of the job", "core.lead.lost_seats", "if record.member not in scene.on_their_way]\n    own", "if True]\n    own", "a-newcomer-that-fails-again-and-again"),
    _m("that no program joins counts as a failure", "core.lead.lost_seats", "    if not silent and (move := _unjoined(scene)):\n        return move\n", "", "a-program-that-never-joins"),
    _m("a rung has a deadline", "core.lead.lost_seats", "    if scene.now < scene.deadline:\n        return Move(wake_at=scene.deadline)\n", "    if True:\n        return Move(wake_at=scene.deadline)\n", "a-link-breaks-while-forming"),
    _m("a blamed stall is not probed too", "core.lead.stalls", "    if scene.now < due:\n        return Move(wake_at=due, why=\"workers are stalled", "    if False:\n        return Move(wake_at=due, why=\"workers are stalled", "a-hang-is-found-after-its-victims"),
    _m("those out of reach lose their seats", "core.lead.probing", "fate if fate.seat and fate.seat.member.node in kept else replace(fate, seat=None) for fate", "fate for fate", "data-link-down"),
    _m("the doubted wait", "core.lead.scene", "node not in self.conviction.guilty and not doubted", "node not in self.conviction.guilty", "a-link-that-comes-and-goes"),
    _m("the leaving get no new seat", "core.lead.scene", "if not record.warm or record.leaving or", "if not record.warm or", "drained-in-a-pause"),
    _m("who alone has a shard is waited for though the store lost all leases", "core.lead.shards", "        return scene.leases_lost\n", "        return False\n", "a-daemon-is-away-as-the-store-loses-all-and-nobody-else-has-its-shard"),
    _m("a script starts again as its plan is written again", "core.node.setback", "    if trains and not state.settings.means.in_place:\n", "    if False:\n", "a-script-beside-a-store-that-lost-its-data"),
    _m("a failure is forgotten once the job has got on", "core.lead.scene", "strike=None if strike and self.newest > strike.step else strike,", "strike=strike,", "a-program-fails-twice-and-got-on-in-between"),
    _m("a pause is known before its news comes again", "core.node.setback", "if (view.lost or again) and", "if view.lost and", "a-pause-and-a-plan-that-was-written-again-are-heard-of-apart"),
    _m("that leases were lost outlives a leader", "core.lead.scene", "(self.plan.again or self.plan.leases_lost)", "self.plan.again", "a-daemon-is-away-as-the-store-loses-all-and-the-leader-changes"),
    _m("where all are back no lease is missed", "core.lead.scene", "leases_lost=self.leases_lost and any(", "leases_lost=self.leases_lost or any(", "a-leader-dies-soon-after-all-are-back-beside-a-store-that-lost-all"),
    _m("who alone has a shard is waited for before a further probe", "core.lead.probing", "plan.strike) if lost else None", "plan.strike) if False else None", "a-keeper-is-away-as-a-probe-is-made-across"),
    _m("a new leader waits for those who lost their leases with the store", "core.lead.scene", "waits = self.grace or member in", "waits = member in", "all-leases-lapse-and-a-worker-dies"),
    _m("of two ends the one that was found cut off stays out", "core.lead.scene", "key=self.found_cut_off.__contains__", "key=lambda _: False", "two-are-left-and-one-was-cut-off"),
    _m("what two ends say otherwise is tested again", "core.lead.probing", "    if out and len(seats) == len(plan.seats) and (again := _disagreeing(scene, answers)):\n", "    if False:\n", "cut-off-no-more-as-it-tests-itself"),
    _m("a test that is repeated names the same nodes", "core.lead.probing", "named if proven(verdict) else named & _named_before(plan)", "named", "large-frames-are-lost-from-one-test-to-the-next"),
    _m("a leader does not take itself for lost", "core.lead.lead", "    if view.own is not None:\n        return view\n", "    if True:\n        return view\n", "alone-and-its-lease-ends-as-its-daemon-is-back"),
    _m("it waits for the last of them too", "core.lead.scene", "if self.lead.formation.planned_at > -inf:\n            return self.lead.presence.lapsed\n", "if False:\n            return self.lead.presence.lapsed\n", "all-leases-lapse-and-a-worker-dies"),
    _m("a gang is not formed of the absent", "core.lead.growth", "    if scene.grace:", "    if False:", "the-leader-dies-before-a-pause-ends"),
    _m("rung 3 starts all afresh", "core.lead.scene", "        if rung >= Rung.RESTART:\n", "        if False:\n", "a-stall-that-nobody-caused"),
    _m("a failed worker is replaced by a warm one or not at all", "core.lead.scene", "replace(seat, born=self.plan.generation + 1) if ready else None, fresh=True", "replace(seat, born=self.plan.generation + 1), fresh=True", "two-deaths-one-spare-process"),
    _m("a plan names whose workers are fresh", "core.lead.scene", "replace(seat, born=self.plan.generation + 1) if ready", "seat if ready", "kill-a-worker"),
    _m("growth waits for the gang", "core.lead.lost_seats", "        return Move(wake_at=scene.deadline)", "        return None", "nodes-come-while-it-forms"),
    _m("a gap is filled", "core.lead.scene", "gaps = len(fates) - kept", "gaps = 0", "spare-takes-the-gap"),
    _m("a gap is filled in its place", "core.lead.scene", "            elif waiting:\n", "            elif False:\n", "spare-takes-the-gap"),
    _m("an unsure verdict is probed", "core.lead.probing", "or not scene.conviction.unsure:", "or True:", "every-second-node-cut-off"),
    _m("who was put out has no say", "core.node.suspect", "lives(plan, watched(plan, record.member, reach))", "lives(plan, plan.place)", "every-second-node-cut-off"),
    _m("a spare breaks the tie of two", "core.lead.probing", ", *scene.spares]", "]", "two-seats-and-a-spare"),
    _m("the place to meet is alive", "core.lead.scene", "next((endpoint for endpoint in offers if endpoint), self._met_before(seats))", "next(offers, \"\")", "the-agent-of-rank-0-is-away"),
    _m("the job's bits outlive its seats", "core.lead.scene", "        if self.plan and self.plan.bits:", "        if False:", "the-other-does-not-take-over"),
    # What was found out.
    _m("a culprit is looked at before it is ended", "core.node.follow", "state.looked_at < since and now < due:", "False:", "a-hang-is-looked-at"),
    _m("a look has its time", "core.node.follow", "state.looked_at < since and now < due:", "state.looked_at < since:", "a-hang-that-says-nothing"),
    _m("who was excused was so until now", "core.lead.memory", "scene.now if scene.excused or last.excused else", "scene.now if scene.excused else", "a-worker-is-back-from-a-server-and-on-its-way"),
    _m("a stall is probed though nobody can be looked at", "core.lead.stalls", "if scene.now < patience and not said(scene) and (why := _looked_at(scene)):", "if not said(scene) and (why := _looked_at(scene)):", "a-stall-that-says-nothing"),
    _m("a proven broken node is kept out", "core.lead.lost_seats", "    condemned = _condemned(scene)\n", "    condemned: dict[Member, str] = {}\n", "a-gpu-falls-off-the-bus"),
    _m("who was let back has paid", "core.lead.findings", "if fact.generation is not None or _new(fact, lead)", "if True", "a-gpu-falls-off-the-bus"),
    _m("facts of health count where nothing else speaks", "core.node.dossier", "    among = at_fault or seated\n", "    among = at_fault\n", "a-gpu-falls-off-the-bus"),
    _m("a leader whose workers are ahead of the store waits", "core.lead.lead", "if (waits := outrun(state, now)) is not None:", "if (waits := None) is not None:", "the-store-is-set-back-as-the-leader-restarts"),
    _m("it waits no longer than others may take", "core.node.setback", "if now >= due else Wish(wake_at=due)", "if False else Wish(wake_at=due)", "a-lone-daemon-restarts-beside-a-store-that-was-set-back"),
    # Who hears nobody, and whom a probe has not reached.
    _m("who does not hear another accuser has no say", "core.node.suspect", "doubtful = {node: _deaf(accusers, against) for node, accusers in against.items()}", "doubtful: dict[str, set[str]] = {}", "two-deaf-spares-beside-two-seats"),
    _m("a spare that a probe has not reached takes no place", "core.lead.probing", "grow=False, without=astray)", "grow=False)", "a-probe-finds-a-spare-out-of-reach"),
    _m("ways that fail and ways that pass are tested again", "core.lead.probing", "or proven(verdict) or plan.says(Why.RETESTED):", "or True:", "large-frames-are-no-more-lost-as-the-nodes-test"),
    # How a job is stopped.
    _m("who leaves saves with the others", "core.lead.intents", "seats, causes = scene.plan.seats if scene.plan else (), ", "seats, causes = scene.kept, ", "stopped-as-rank-0-is-drained"),
    _m("a save that goes on ends before the job", "core.lead.intents", "_ends_to_save(scene) or _forms_to_save(scene)", "_forms_to_save(scene)", "stopped-as-a-drain-that-cannot-be-spared-saves"),
    _m("a gang that broke is mended before it is stopped", "core.lead.intents", "    if _mends_to_save(scene):", "    if False:", "stopped-as-a-needed-daemon-is-away"),
    _m("a gang that was left is mended before it is stopped", "core.lead.intents", "return lost or bool(scene.doing[Work.PARKED]) or", "return lost or", "stopped-as-a-worker-dies-whose-node-cannot-say-so"),
    _m("what is to be mended has its time", "core.lead.intents", "scene.now >= scene.stop_due or not _broken(scene)", "not _broken(scene)", "stopped-while-one-that-is-needed-is-not-heard"),
    _m("a gang that breaks as it is to end forms once more", "core.lead.intents", "return _forms_without(scene) or Move()", "return Move()", "stopped-as-a-node-loses-its-power"),
    _m("it is stopped all the same", "core.lead.lead", "stops=stopped_by(scene) if plan.phase is Phase.TRAIN else None", "stops=None", "stopped-as-a-node-loses-its-power"),
    _m("too few form no gang before a stop", "core.lead.intents", "if len(scene.kept) < scene.settings.membership.min_nodes or forgone(", "if forgone(", "stopped-as-a-needed-node-loses-its-power"),
    _m("nor do those who have nothing to save", "core.lead.intents", "min_nodes or forgone(scene, scene.kept):", "min_nodes:", "stopped-as-the-only-keeper-loses-its-power"),
    _m("who has left in order is not mended without", "core.lead.intents", "any(cause.why is not Why.SILENT for cause in gone)", "False", "stopped-as-rank-0-is-drained"),
    _m("nobody waits to be mended who cannot be", "core.lead.intents", "return made and len(here) >=", "return made or len(here) >=", "stopped-with-too-few-to-save"),
    # What is kept by those who were put out.
    _m("those who were put out are waited for", "core.lead.lost_seats", "if wait := wait_for(scene, seats, causes, rung, strike, but=unfit):", "if wait := None:", "half-of-the-nodes-cut-off"),
    _m("those whom a probe puts out are waited for", "core.lead.probing", "if wait := wait_for(scene, left, causes, Rung.REFORM, plan.strike):", "if wait := None:", "two-halves-wait-for-each-other"),
    _m("a wait ends", "core.lead.shards", "if plan is None or scene.now >= until:", "if plan is None:", "two-halves-give-each-other-up"),
    _m("one waits once for each commit", "core.lead.shards", "plan.waited >= committed", "False", "two-halves-twice-before-a-commit"),
    _m("a gang's shards are known until the next one has made a step", "core.lead.scene", "return self.plan.gang if self.plan.gang and not self.settled else self.seated", "return self.seated", "half-of-the-nodes-cut-off-one-by-one"),
    _m("until a gang has made a step, the shards of the one before count", "core.lead.scene", "return self.rows is None or self.made >= self.rows.plan.generation or", "return True or", "silent-before-the-next-step-is-kept"),
    _m("what a gang went on from is no step of its own", "core.step", "and before.work in (Work.TRAINING, Work.STALLED)\n        and now.step > before.step", "and now.step >= before.step", "silent-before-the-next-step-is-kept"),
    _m("the newest sealed version is not pushed out of memory", "base.keeping", "first = [version for version in held if version in sealed]", "first: list[_V] = []", "a-daemon-takes-its-vault-along"),
    # Faults that never end.
    _m("who was found cut off has no seat before a test has passed", "core.lead.scene", "if node in self.apart and not self.apart[node]", "if False and not self.apart[node]", "a-way-cut-for-ever"),
    _m("the ways of whom the caps spare are known too", "core.lead.quarantines", "    for member in _fresh(scene, cuts):\n", "    for member in list(noted):\n", "a-node-without-data-that-cannot-be-spared"),
    _m("whom nobody hears is tested too before it is back", "core.lead.lost_seats", "confine=cut_off(scene, confine, cuts)", "confine=confine", "a-node-unheard-for-ever"),
    _m("after a hold a way is still known to be cut", "core.lead.scene", "if self.plan and self.plan.phase is Phase.HOLD and self.apart:", "if False:", "two-halves-without-data-for-ever"),
    _m("a hold goes on while a way is known to be cut", "core.lead.shards", "(scene.conviction.unsure or out)", "scene.conviction.unsure", "one-node-between-two-halves"),
    _m("a cut way is tested again and again", "core.node.follow", "if now < known.at + pause_s:", "if True:", "a-way-cut-for-ever"),
    _m("who trains tests a way whose other end waits for it", "core.node.follow", "(seated and plan.seat_at.keys() >= {*ends})", "seated", "the-cut-end-trains-and-the-other-waits"),
    _m("a held gang that has ended unsaved is not waited for", "core.lead.intents", "if ended and not (scene.behind and _commit_comes(scene, plan.seats[0])):", "if ended and not scene.behind:", "stopped-as-a-held-gang-has-ended-unsaved"),
    _m("the commit of a held gang's last save is waited for", "core.lead.intents", "record.saved > scene.view.committed", "False", "stopped-as-the-last-save-of-a-drain-waits-for-its-commit"),
    _m("who leaves before there is a plan leaves at once", "core.node.follow", "if state.leaving and state.view.revision and now >= due:", "if False:", "drained-before-the-first-plan"),
    _m("after a hold a seat without workers is that of fresh ones", "core.lead.scene", "return Fate(seat=replace(seat, born=self.plan.generation + 1))", "return Fate(seat=seat)", "a-worker-dies-as-a-needed-node-is-drained"),
    _m("a test is of what was found last", "contract.model", "record.reached if record.tested == self.found else ()", "record.reached", "a-way-that-heals-and-is-cut-again-for-ever"),
    _m("a way is tested before whichever life of a node is back", "core.lead.scene", "for peer in quarantine.beyond(record) if record else ():", "for peer in quarantine.beyond(record) if record and record.member == quarantine.member else ():", "a-way-cut-for-ever-as-leaders-change"),
    _m("who only waits is not forgiven", "core.lead.quarantines", "        if m in scene.lead.custody.well and scene.proves_well(m)\n", "        if m in scene.lead.custody.well\n", "a-way-that-fails-whenever-it-is-needed"),
    _m("whom its neighbours hear is waited for without a lease", "core.lead.scene", "waits = self.grace or member in self.unregistered", "waits = self.grace", "a-store-that-loses-a-third-for-ever"),
    _m("a gang trains though one is without a lease", "core.lead.scene", "there + len(self.unregistered) ==", "there ==", "a-store-that-loses-a-third-for-ever"),
    _m("who stays without a lease goes", "core.lead.scene", "and self.now < self.lead.presence.absent.get(seat.member, self.now) + waits_s", "and waits_s", "a-node-without-the-store-for-long"),
    _m("whom a neighbour does not hear goes with its lease", "core.lead.scene", "            and str(seat.member) not in doubted\n", "", "the-other-of-two-loses-its-power"),
    # Found by breaking all that there is (chaos/mutate.py): each got a scenario or a check.
    _s("the office is taken as it was seen", "if self.shared.leader_revision == over:", "if True:", "two-deaths-one-spare-process"),
    _m("a failure is counted once", "core.lead.memory", "elif last.generation < _born(scene, record):", "elif True:", "a-failure-is-counted-once"),
    _m("a drain beside a loss is no drain alone", "core.lead.lost_seats", "if not leaving or any(", "if not leaving or False and any(", "a-drain-beside-a-loss"),
    _m("a held node leaves when its time is up", "core.node.follow", "if safe or late", "if safe", "a-held-node-leaves-when-its-time-is-up"),
    _m("who misses two rungs is kept out", "core.lead.lost_seats", "unwanted = dict.fromkeys(cause.who, cause)", "unwanted = {}", "who-misses-two-rungs-is-kept-out"),
    _m("a probe that finds all well goes on from the vaults", "core.lead.probing", "Rung.RESTART if strike.count == 1 else Rung.RELOAD", "Rung.RELOAD", "a-stall-that-nobody-caused"),
    _m("nobody is kept out whom the job needs", "core.lead.quarantines", "if share <= left else", "if True else", "a-sick-node-that-is-needed-stays"),
    _m("a first quarantine is short", "core.lead.quarantines", "quarantine.strikes - 1", "quarantine.strikes", "a-first-quarantine-is-short"),
    _m("a quarantine lasts", "core.lead.quarantines", "        if scene.now >= due:\n", "        if True:\n", "a-first-quarantine-is-short"),
)  # fmt: skip


class Broken(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Loads one module with the guard broken; everything else as it is."""

    def __init__(self, mutant: Mutant) -> None:
        self.mutant = mutant
        self.path = ROOT / (mutant.module.replace(".", "/") + ".py")
        source = self.path.read_text()
        found = source.count(mutant.old)
        if found != 1:
            raise SystemExit(f"{mutant.name!r}: its guard occurs {found} times in {mutant.module}, not once")
        self.source = source.replace(mutant.old, mutant.new)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Only the mutated module."""
        del path, target
        return importlib.util.spec_from_loader(fullname, self) if fullname == self.mutant.module else None

    def exec_module(self, module: ModuleType) -> None:
        """Run the broken source."""
        exec(compile(self.source, str(self.path), "exec"), vars(module))


def _places(mutant: Mutant) -> Iterator[str]:
    """Where to look, the likeliest first."""
    scenarios = sorted(path.stem for path in (ROOT / "chaos" / "scenarios").glob("*.yaml"))
    if mutant.caught_by:
        yield mutant.caught_by
    yield from scenarios
    yield from (str(seed) for seed in range(SEEDS))


def hunt(name: str, budget_s: float) -> dict[str, str]:
    """In a process of its own, without the core's own asserts: break this guard, and look for a run that notices."""
    mutant = next(m for m in MUTANTS if m.name == name)
    sys.meta_path.insert(0, Broken(mutant))
    from chaos.scenario import draw, load
    from chaos.sim.drive import run

    for place in _places(mutant):
        if time.process_time() > budget_s:  # of computing, so that a busy machine finds the same
            break
        if place.isdigit():
            scenario = draw(int(place))
        else:
            scenario = load(ROOT / "chaos" / "scenarios" / f"{place}.yaml")
        try:
            found = run(scenario, scenario.seed).violations
        except NameError:  # a mutant that is none: that says nothing of who watches
            raise
        except Exception as error:  # noqa: BLE001 - a mutant that crashes has been noticed
            return {"by": place, "what": f"{type(error).__name__}: {error}"}
        if found:
            return {"by": place, "what": f"{found[0].check}: {found[0].what}"}
    return {}


def _hunt_apart(mutant: Mutant, budget_s: float) -> dict[str, str]:
    command = [sys.executable, "-O", "-m", "chaos.mutants", mutant.name, str(budget_s)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=20 * budget_s + 60)
    if done.returncode != 0:
        return {"by": "-", "what": (done.stderr or done.stdout).strip().splitlines()[-1]}
    found: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return found


def table(*, budget_s: float, only: str | None = None) -> int:
    """Break each guard in turn, over all cores; print who noticed; 1 if nobody noticed some, or a guard was not found."""
    chosen = [mutant for mutant in MUTANTS if only in (None, mutant.name)]
    workers = os.cpu_count() or 1
    deadline = time.monotonic() + budget_s
    missed = 0

    def one(mutant: Mutant) -> dict[str, str]:
        late = time.monotonic() > deadline
        return {"by": "-", "what": "no time left"} if late else _hunt_apart(mutant, EACH_S)

    with ThreadPoolExecutor(workers) as pool:
        for mutant, found in zip(chosen, pool.map(one, chosen), strict=True):
            missed += not found or found["by"] == "-"
            by = found.get("by", "NOBODY")
            print(f"{mutant.name:<68} {by:<28} {found.get('what', 'nobody noticed')[:110]}", flush=True)
    print(f"{len(chosen) - missed} of {len(chosen)} broken guards were noticed")
    return 1 if missed else 0


if __name__ == "__main__":
    print(json.dumps(hunt(sys.argv[1], float(sys.argv[2]))))
