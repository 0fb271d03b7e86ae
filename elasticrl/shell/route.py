"""This host's address on a way: where those at its other end most likely reach it. The routing table knows; nothing is sent."""

import socket
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Final

from elasticrl.base.address import loops, split
from elasticrl.store.settings import target

ABROAD: Final = "192.0.2.1"  # of a network that is kept for documentation: the way there is the default route


def way_to(host: str) -> str:
    """This host's address on the way to that one."""
    family, _, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


def hosts(endpoints: Iterable[str]) -> list[str]:
    """Of etcd's endpoints.

    >>> hosts(["etcd-1:2379", " https://[fe80::1]:2379", ""])
    ['etcd-1', 'fe80::1']
    """
    return [split(target(endpoint.strip())[0])[0] for endpoint in endpoints if endpoint.strip()]


def found(towards: Iterable[str], way: Callable[[str], str] = way_to) -> list[str]:
    """The addresses on the ways to those hosts to which there is one."""
    ways = []
    for host in towards:
        with suppress(OSError):  # another may have a name that is known here
            ways.append(way(host))
    return ways


def outward(endpoints: Iterable[str], way: Callable[[str], str] = way_to) -> str | None:
    """This host's address for other nodes: that of the default route, or else of the way to a store elsewhere. The loopback's
    where the store is on this machine; None if no way leads to it.
    """
    stores = hosts(endpoints)
    for towards in ([ABROAD], stores):  # names are asked for only where there is no default route
        if abroad := [address for address in found(towards, way) if not loops(address)]:
            return abroad[0]
    return "127.0.0.1" if all(map(loops, stores)) else None
