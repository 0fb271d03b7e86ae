"""The ledger's root: one hash that stands for all samples of all steps.

The one idea: a step's samples are the leaves of a tree, and the steps' roots are the leaves of another. So a step that is wrong
can be named, and one sample can be shown to be in it with a few hashes. A leaf has another first byte than a node, so that
neither can be taken for the other; what has no neighbour goes up as it is.
"""

import struct
from collections.abc import Iterable, Sequence
from hashlib import sha256
from typing import Final

LEAF: Final = struct.Struct(">cQQQI")  # a mark, the step, epoch and index of a sample, and how often the step uses it
EMPTY: Final = sha256(b"").digest()


def leaf(step: int, epoch: int, index: int, turns: int) -> bytes:
    """One sample of one step."""
    return sha256(LEAF.pack(b"\0", step, epoch, index, turns)).digest()


def root(leaves: Sequence[bytes]) -> bytes:
    """Of a tree over these, in their order.

    >>> root([]) == EMPTY, root([b"a" * 32]) == b"a" * 32
    (True, True)
    """
    row = list(leaves)
    while len(row) > 1:
        pairs = [sha256(b"\1" + row[i] + row[i + 1]).digest() for i in range(0, len(row) - 1, 2)]
        row = pairs + row[len(pairs) * 2 :]
    return row[0] if row else EMPTY


def root_of(step: int, samples: Iterable[tuple[int, int]], turns: int) -> str:
    """Of a step that uses these samples, (epoch, index) each, so many times."""
    pack = LEAF.pack
    return root([sha256(pack(b"\0", step, epoch, index, turns)).digest() for epoch, index in sorted(samples)]).hex()


def root_of_steps(roots: Iterable[str]) -> str:
    """Of the ledger: from the roots of its steps, in their order."""
    return root([bytes.fromhex(each) for each in roots]).hex()
