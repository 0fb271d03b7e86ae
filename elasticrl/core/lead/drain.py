"""May a node be asked to leave, or do the others need it?

The one idea: what the leader would make of it is found out by its own rule, on what it would see then. So whoever asks is told
before anything is done; what is decided when a node does leave, for whatever reason, stays the leader's.
"""

from collections.abc import Collection
from dataclasses import replace
from math import inf

from elasticrl.contract.model import Member, Phase, Plan, Record, View
from elasticrl.contract.settings import Settings
from elasticrl.core.lead.scene import Scene
from elasticrl.core.node.state import Lead


def needed(view: View) -> int:
    """Nodes below which the job holds, as who leads has it configured, or somebody; 0: nobody says so."""
    records = view.records or {}
    leader = records.get(view.leader.node) if view.leader else None
    return (leader and leader.needs) or max((record.needs for record in records.values()), default=0)


def refusal(view: View, settings: Settings, node: str, asked: Collection[Member] = ()) -> str:
    """Why this node is not to leave unasked twice; empty if the others can spare it, or are too few already.

    `asked`: who was asked to leave before, and may not have said yet that it does. Without records nobody can say.
    """
    plan, record = view.plan, (view.records or {}).get(node)
    if record is None:
        return ""
    if plan is None or (plan.phase is Phase.STOP and record.member not in plan.seat_of):
        # Found by a newcomer: asked in the first second, it stayed `leaving`, and the job without a first plan, for ever.
        return (
            f"{node} stays: there is no plan yet that it could leave, and the first may need it. Ask again when the job "
            "trains, or end it: elasticrl stop"
        )
    if plan.phase is Phase.STOP:
        return ""
    need = settings.membership.min_nodes
    before, after = (_left(view, plan, settings, {*asked, *more}) for more in ((), (record.member,)))
    if after >= need or before < need:
        return ""
    return (
        f"{node} stays: without it {after} of the {need} nodes are left that the job needs (membership.min_nodes), and it "
        f"would hold until another comes. Start one first, or let it leave all the same: elasticrl drain {node} --force"
    )


def _left(view: View, plan: Plan, settings: Settings, leaving: Collection[Member]) -> int:
    """How many nodes the next plan would seat."""

    def told(record: Record) -> Record:
        return replace(record, leaving=True) if record.member in leaving else record

    records = {node: told(record) for node, record in (view.records or {}).items()}
    nobody = Lead(since=-inf)  # with no timers: who is not there now is not waited for
    scene = Scene(settings, replace(view, records=records), plan, nobody, Member(node="", incarnation=0), 0.0)
    return len(scene.arrange(scene.fates, grow=False))
