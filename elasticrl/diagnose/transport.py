"""Which way NCCL says it has chosen, in its own lines (`NCCL_DEBUG=INFO`), and whether that is the one it should have.

The one idea: these lines are no failure and there are thousands of them, so they never become evidence: a set of ways is all
that is kept. NCCL falls back to sockets without a warning, and a job over sockets is only slow.
"""

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Final

SOCKETS: Final = "NET/Socket"
INFO: Final = b"NCCL INFO "
#: "n01:71:94 [0] NCCL INFO Using network Socket", "... Channel 00/0 : 0[0] -> 1[0] [send] via NET/IB/0/GDRDMA", and what tells
#: that it had, or was to have, something better than sockets. Each begins with a text of its own, which is found at once.
_CHOSE = re.compile(rb"NCCL INFO Using network (\w[^\r\n]{0,40})")
_VIA = re.compile(rb"\] via (NET/[A-Za-z]\w{0,30}|P2P|SHM)")
_HAD = re.compile(rb"NCCL INFO NET/IB ?: Using (\[\d[^\r\n;]{1,400})")
_ASKED = re.compile(rb"NCCL INFO NCCL_IB_HCA set (?:by environment )?to ([^\s]{1,200})")
LINES: Final = (
    500  # of each kind whose node is looked for, of one piece of a log: channels are as many as ways times peers
)


@dataclass(slots=True)
class Ways:
    """What was said so far: each way, with the nodes that said so."""

    chosen: dict[str, set[str]] = field(default_factory=dict)  # "NET/IB", "P2P" -> nodes
    had: dict[str, str] = field(default_factory=dict)  # node -> the RDMA devices that NCCL found, or was told to use

    def read(self, data: bytes) -> None:
        """Add what these lines say."""
        if INFO not in data:
            return
        for node, network in _said(_CHOSE, data):
            self.chosen.setdefault(f"NET/{network}", set()).update(node)
        for node, way in _said(_VIA, data):
            self.chosen.setdefault(way, set()).update(node)
        for node, devices in _said(_HAD, data):
            self.had.update(dict.fromkeys(node, devices))
        for node, names in _said(_ASKED, data):
            self.had = {**dict.fromkeys(node, f"NCCL_IB_HCA={names}"), **self.had}

    def add(self, other: "Ways") -> None:
        """Another stream's too."""
        for way, nodes in other.chosen.items():
            self.chosen.setdefault(way, set()).update(nodes)
        self.had.update(other.had)

    def plain(self) -> dict[str, list[str]]:
        """For JSON."""
        return {way: sorted(nodes) for way, nodes in sorted(self.chosen.items())}

    @property
    def said(self) -> str:
        """For people; "" if NCCL has not said.

        >>> Ways(chosen={"NET/IB": {"n1", "n0"}, "P2P": {"n0"}}).said
        'NET/IB (n0, n1), P2P (n0)'
        """
        return ", ".join(f"{way} ({few(nodes)})" if nodes else way for way, nodes in self.plain().items())

    @property
    def fallen(self) -> str:
        """Who went over sockets although NCCL had found something better there, or was told to use it; "" if nobody."""
        nodes = [node for node in sorted(self.chosen.get(SOCKETS, ())) if node in self.had]
        return f"{few(nodes)} took sockets, and had {self.had[nodes[0]]}" if nodes else ""


def _said(expression: re.Pattern[bytes], data: bytes) -> Iterator[tuple[tuple[str, ...], str]]:
    """What NCCL's lines say, each with whose line it is: one node, or none where the log does not tell."""
    for match in islice(expression.finditer(data), LINES):
        begin = max(data.rfind(b"\n", 0, match.start()) + 1, match.start() - 400)
        before, info, _ = data[begin : match.end()].partition(INFO)
        if info:
            yield tuple(_node(before)), match[1].decode(errors="replace").strip()


def _node(before: bytes) -> Iterator[str]:
    """Of "... n01:71:94 [0] ": n01."""
    for word in before.split()[-2:]:
        host, *numbers = word.rsplit(b":", 2)
        if len(numbers) == 2 and all(map(bytes.isdigit, numbers)):
            yield host.rpartition(b":")[2].decode(errors="replace")[:80]


REMEDY: Final = (
    "See NCCL's lines on NET/IB: the port's state (ibstat), the device in the container (--device=/dev/infiniband), its user's "
    "memlock limit, libibverbs, NCCL_IB_HCA. NCCL_NET=IB fails instead of falling back."
)


def sockets(ways: Collection[str], ports: Collection[str]) -> str:
    """What is to be said if NCCL goes over sockets on a node with active RDMA ports; "" if nothing."""
    over = sorted(way for way in ways if SOCKETS in way.split("+"))
    if not over or not ports:
        return ""
    return f"NCCL goes over sockets, and {few(ports)} {'are active RDMA ports' if len(ports) > 1 else 'is an active RDMA port'}"


def few(names: Collection[str]) -> str:
    """Names, and how many more.

    >>> few([f"n{i}" for i in range(9)])
    'n0, n1, n2, n3, n4, n5 and 3 more'
    """
    listed = sorted(names)
    return ", ".join(listed) if len(listed) <= 7 else f"{', '.join(listed[:6])} and {len(listed) - 6} more"
