"""The chain: a value for each digest that names all digests before it. Standard library only.

The one idea: a link is a hash of the link before, the step and the step's digest. So one link stands for a whole history,
whoever computed it. It is a part of the state: who goes on from a step goes on from its link, and two histories that part once
never have a link in common again.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import sha256


def link(before: str, step: int, digest: str) -> str:
    """The link of the state after `step` steps, whose digest this is. `before` is empty for the first.

    >>> link("", 0, "9f86d081884c7d65")[:16]
    '2b7eb4039692cb04'
    """
    return sha256(f"elasticrl chain 1 {before} {step} {digest}".encode()).hexdigest()


@dataclass(slots=True)
class Chain:
    """The newest link that is known, and of which step it is.

    >>> chain = Chain()
    >>> chain.add(0, "9f86d081884c7d65")
    >>> chain.head == link("", 0, "9f86d081884c7d65")
    True
    """

    step: int = -1
    head: str = ""

    def add(self, step: int, digest: str) -> None:
        """One more. Who begins anew, or hears of a step twice, changes nothing."""
        if step > self.step:
            self.step, self.head = step, link(self.head, step, digest)

    def at(self, step: int) -> str:
        """The link of this step; empty if another is the newest, or if none was made (lanes.digest: off)."""
        return self.head if step == self.step else ""

    def go_to(self, step: int, head: str) -> None:
        """As it was there."""
        self.step, self.head = step, head
