"""Who is put out where a port is crowded with strangers: connections that have not yet proved that they are the job's.

The one idea: a member proves itself within a round trip, and whoever only sits there does not. So a newcomer is never turned
away for strangers: the one that has waited longest makes room, first of all one of the same address. The addresses of the job's
nodes have their places apart, so that no crowd from elsewhere costs a member one.
"""

from collections.abc import Collection, Mapping
from typing import Final, TypeVar

PLACES: Final = 128  # for strangers, but those from the job's own nodes
OF_ONE: Final = 32  # of them from one address: a node's workers may all come at once
HELLO_S: Final = 3.0  # for a stranger to prove itself: a busy machine takes a second to answer

Who = TypeVar("Who")


def put_out(waiting: Mapping[Who, str], address: str, ours: Collection[str] = ()) -> Who | None:
    """Which of those who wait (each with its address, the oldest first) makes room for one from `address`; None: there is room.
    `ours`: the addresses of the job's nodes, where they are known.

    >>> put_out({n: "10.0.0.9" for n in range(OF_ONE)}, "10.0.0.9"), put_out({n: "10.0.0.9" for n in range(OF_ONE)}, "10.0.0.3")
    (0, None)
    """
    alike = [who for who, at in waiting.items() if at == address]
    if len(alike) >= OF_ONE:
        return alike[0]
    if address in ours:
        return None
    others = [who for who, at in waiting.items() if at not in ours]
    return others[0] if len(others) >= PLACES else None
