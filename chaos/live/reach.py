"""Whom faults can reach in one job, and what a strike gives back: whom it touched, how to undo it, and a proof.

The one idea: a fault names a role, and who has it is looked up when it strikes.
"""

from collections.abc import Callable
from dataclasses import dataclass

from chaos.faults import Fault, holder
from chaos.live.box import Box
from chaos.live.eye import Eye
from chaos.live.lab import Lab
from chaos.live.labjob import LabJob

TERM_S = 30.0  # for who was sent SIGTERM
Undo = Callable[[], object]
Proof = Callable[[], str]  # empty, or why the fault did not strike


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """A fault that was put in."""

    nodes: tuple[str, ...]
    detail: str = ""
    undo: Undo | None = None
    proof: Proof | None = None  # asked before it is undone


class Reach:
    """One job in one lab, as those see it who are to do it harm."""

    def __init__(self, job: LabJob, eye: Eye) -> None:
        self.job, self.eye = job, eye
        self.lab: Lab = job.lab
        self.off: set[str] = set()  # nodes whose daemon is not to run now
        self.dark: set[str] = set()  # nodes that were lost, or have left, in a job that was stopped meanwhile

    def whom(self, role: str) -> str:
        """The node of a role; empty if nobody has it."""
        plan = self.eye.plan
        seats = [seat.member.node for seat in plan.seats] if plan else []
        leader = self.eye.leader.partition("/")[0]
        role = f"n{int(role[1:])}" if role[1:].isdigit() else role
        name = holder(role, seats=seats, leader=leader, spares=(node for node in self.lab.boxes if node not in seats))
        return name if name in self.lab.boxes else ""

    def boxes(self, *without: str) -> list[Box]:
        """All nodes but these."""
        return [box for name, box in self.lab.boxes.items() if name not in without]

    def stores(self) -> list[Box]:
        """The store's boxes."""
        return [member.box for member in self.lab.members.values()]

    def _powered(self, fault: Fault) -> Box | None:
        node = self.whom(fault.node)
        box = self.lab.boxes.get(node)
        return box if box is not None and box.on and node not in self.off else None
