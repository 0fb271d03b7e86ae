"""Two machines with one name, as after an image was cloned: they would be one node twice, so one of them goes.

The one idea: the later life stays. It has found the name free, and who is there already has lost it meanwhile, or is told so by
the record in the place of its own.
"""

from collections.abc import Collection

from elasticrl.base.address import split
from elasticrl.contract.model import Member, Record


def elsewhere(record: Record, here: Collection[str]) -> bool:
    """Whether it is of a daemon that is at none of these addresses; torchrun's agents do not say where they are.

    >>> record = Record(member=Member(node="n0", incarnation=2), beat="10.0.0.7:7461")
    >>> elsewhere(record, {"10.0.0.3"}), elsewhere(record, {"10.0.0.7"}), elsewhere(Record(member=record.member), {"10.0.0.3"})
    (True, False, False)
    """
    return bool(record.beat) and split(record.beat)[0] not in here


def yields(me: Member, beat: str, record: Record) -> bool:
    """Whether this node's daemon, heard at `beat`, goes for who has put that record in the place of its own. Of two that began
    at one moment the same one goes, whoever asks.

    >>> other = Record(member=Member(node="n0", incarnation=2), beat="10.0.0.7:7461")
    >>> [yields(Member(node="n0", incarnation=life), "10.0.0.3:7461", other) for life in (1, 2, 3)]
    [True, True, False]
    >>> yields(Member(node="n0", incarnation=1), "10.0.0.7:1", other)  # this machine's own, of a daemon that comes after us
    False
    """
    return elsewhere(record, {split(beat)[0]}) and (record.member.incarnation, record.beat) > (me.incarnation, beat)


def namesake(record: Record) -> str:
    """What an operator is told."""
    return (
        f"another machine is {record.member.node}: {record.member}, at {record.beat}. Give each node a name of its own "
        "(node.name, or ELASTICRL__NODE__NAME in its environment)"
    )


def twin(record: Record) -> str:
    """The same, where that daemon is this machine's own."""
    node = record.member.node
    return (
        f"{node} runs on this machine already: {record.member}, heard at {record.beat}. End that one first (elasticrl drain "
        f"{node}, or systemctl stop elasticrl), or give this one a name of its own (node.name, or another job.name)"
    )
