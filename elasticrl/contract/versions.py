"""Which node runs other versions than the others.

The one idea: what most nodes have is usual, and who has something else is odd; where nothing has most, all are. Versions that
no gang can do with (`FATAL`) are evidence against a node; the others are worth a word to an operator.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Final

from elasticrl.base.parsed import parsed
from elasticrl.base.value import dataclass
from elasticrl.contract.model import Record

#: What workers of one gang say to each other: votes, digests, how buffers are told. Raised with each change of it; those who
#: speak another one get no seat beside them (`Scene.ready`). Vaults and engines have numbers of their own.
WIRE: Final = "4"
FATAL: Final = frozenset({"torch", "nccl"})
REMEDY: Final = "Install the same on all nodes, then restart their agents (drain, start), one after the other."


@dataclass(frozen=True, slots=True, kw_only=True)
class Differs:
    """A node that is odd. Example: Differs(node="n03", name="python", mine="3.11.8", usual="3.11.7")"""

    node: str
    name: str
    mine: str
    usual: str = ""  # what most have; "": nothing has most


def odd(of: Mapping[str, Mapping[str, str]], *, missing: str = "") -> tuple[Differs, ...]:
    """The odd ones among nodes, of each of which versions are known by name. `missing`: what a node has that names none; ""
    where that says nothing, as it may be of an older elasticrl, or have no card.

    >>> [each.node for each in odd({"a": {"torch": "2.13.0"}, "b": {"torch": "2.13.0"}, "c": {"torch": "2.12.1"}})]
    ['c']
    """
    found = []
    for name in sorted({name for each in of.values() for name in each}):
        said = {node: has for node, each in of.items() if (has := each.get(name, missing))}
        (usual, most), *others = Counter(said.values()).most_common()
        tie = bool(others) and others[0][1] == most
        found += [
            Differs(node=node, name=name, mine=mine, usual="" if tie else usual)
            for node, mine in sorted(said.items())
            if others and (tie or mine != usual)
        ]
    return tuple(found)


def sentence(found: Iterable[Differs]) -> str:
    """Who differs, in words; "" if nobody does.

    >>> sentence([Differs(node="n03", name="python", mine="3.11.8", usual="3.11.7")])
    'n03 runs python 3.11.8, the others 3.11.7'
    >>> sentence([Differs(node=node, name="elasticrl", mine=mine) for node, mine in (("n0", "0.1"), ("n1", "0.2"))])
    'n0 runs elasticrl 0.1; n1 runs elasticrl 0.2'
    """
    return "; ".join(
        f"{each.node} runs {each.name} {each.mine}" + (f", the others {each.usual}" if each.usual else "")
        for each in found
    )


def claimed(records: Mapping[str, Record]) -> dict[str, dict[str, str]]:
    """What each node's workers say that they run. Older ones name torch alone, in the fingerprint of their bits."""
    said = {node: read(record.versions) or read(record.bits, "torch") for node, record in sorted(records.items())}
    return {node: each for node, each in said.items() if each}


def wire(record: Record) -> str:
    """What its workers speak; "" if they do not say."""
    return read(record.versions).get("wire", "")


@lru_cache(maxsize=256)  # of thousands of nodes most say the same
def read(text: str, *names: str) -> dict[str, str]:
    """Versions by name, or only those of these names; {} if it says none."""
    try:
        plain = parsed(text) if text else {}
    except ValueError:
        return {}
    said = plain if isinstance(plain, dict) else {}
    return {str(name): str(value) for name, value in said.items() if value and (not names or name in names)}
