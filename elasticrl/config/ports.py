"""Where a node listens that a configuration may fix: one row to each port. To add a port, add a row.

The one idea: who checks that a port is free, and the rules that keep two of them apart, read the same rows. A port of 0 is in
nobody's way: it is any free one, or none.
"""

from collections.abc import Callable
from typing import Literal

from elasticrl.base.value import dataclass
from elasticrl.config.tree import Tree


@dataclass(frozen=True, slots=True, kw_only=True)
class Listener:
    """One port, of one kind.

    Example: Listener(name="web", key="web.port", kind="tcp", address=lambda t: t.web.address, port=lambda t: t.web.port)
    """

    name: str
    key: str
    kind: Literal["tcp", "udp"]
    address: Callable[[Tree], str]  # "": any of this machine
    port: Callable[[Tree], int]


def _node(t: Tree) -> str:
    return t.node.address or ""


PORTS: tuple[Listener, ...] = (
    Listener(name="beats", key="node.beat_port", kind="udp", address=_node, port=lambda t: t.node.beat_port),
    Listener(name="probe.udp", key="node.probe_port", kind="udp", address=_node, port=lambda t: t.node.probe_port),
    Listener(name="probe.tcp", key="node.probe_port", kind="tcp", address=_node, port=lambda t: t.node.probe_port),
    Listener(name="vault", key="vault.port", kind="tcp", address=_node, port=lambda t: t.vault.port),
    Listener(name="rollout", key="rollout.port", kind="tcp", address=_node, port=lambda t: t.rollout.port),
    Listener(
        name="metrics",
        key="telemetry.metrics_port",
        kind="tcp",
        address=lambda t: t.telemetry.metrics_address,
        port=lambda t: t.telemetry.metrics_port,
    ),
    Listener(name="web", key="web.port", kind="tcp", address=lambda t: t.web.address, port=lambda t: t.web.port),
)
