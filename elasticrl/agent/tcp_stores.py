"""The TCPStores this node offers: a fresh one on a new port for every generation that it may head.

torch's own handler keeps one store for ever, and new workers then read dead peers' addresses out of it. Here the newest store
is advertised until a plan uses it; it then serves that generation, and the next one gets another. They live in the agent, so
no worker's death closes one and no rank has to leave last.
"""

from collections import deque

from torch._C._distributed_c10d import TCPStore

from elasticrl.base.address import join
from elasticrl.base.listening import listening


class TcpStores:
    """Those of one node. The two that were used last are kept: the generation before may still be leaving."""

    def __init__(self, host: str) -> None:
        self._host = host
        self._used: deque[TCPStore] = deque(maxlen=2)
        self._offer, self.endpoint = open_store(host)

    def plan_uses(self, endpoint: str) -> None:
        """A plan names this endpoint; if it is ours, the next plan shall have another."""
        if endpoint == self.endpoint:
            self._used.append(self._offer)
            self._offer, self.endpoint = open_store(self._host)


def open_store(host: str) -> tuple[TCPStore, str]:
    """A store that listens on this host's address, on a port nobody else has."""
    opened, port = listening(host, 1024)
    store = TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=opened)
    return store, join(host, port)
