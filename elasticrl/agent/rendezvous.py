"""The entry point `torchrun.handlers`: how `torchrun --rdzv-backend=elasticrl` finds us.

torch loads it whenever its rendezvous package is imported, in workers too, so nothing heavy may be imported here: the handler
itself (`elasticrl.agent.torchrun`) comes when one is wanted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters

BACKEND = "elasticrl"


def create(params: RendezvousParameters) -> RendezvousHandler:
    """A handler for torchrun's parameters."""
    from elasticrl.agent.torchrun import ElasticRendezvous

    return ElasticRendezvous(params)


def creator() -> Callable[[RendezvousParameters], RendezvousHandler]:
    """What the entry point names: called without arguments, it returns the creator."""
    return create


def register() -> None:
    """For programs that launch from code, where entry points may not be installed. Any number of times."""
    from torch.distributed.elastic.rendezvous import rendezvous_handler_registry

    rendezvous_handler_registry.register(BACKEND, create)
