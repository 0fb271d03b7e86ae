"""Who takes part in a job: a node, and which of its lives."""

from elasticrl.base.value import dataclass


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Member:
    """One life of one node's daemon and workers: a daemon that restarts without its workers is a new member.

    Example: Member(node="n03", incarnation=2), written n03/2.
    """

    node: str
    incarnation: int

    def __eq__(self, other: object) -> bool:
        if other.__class__ is not Member:
            return NotImplemented
        return self is other or (self.node == other.node and self.incarnation == other.incarnation)

    def __hash__(self) -> int:
        return hash(self.node)  # of two lives of a node one is looked up, and it is asked for at each event

    def __str__(self) -> str:
        return f"{self.node}/{self.incarnation}"
