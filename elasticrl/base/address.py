"""`host:port`, joined and taken apart; an IPv6 host stands in brackets. And what our unix sockets are called, and how long
their paths may be.
"""

from ipaddress import ip_address
from pathlib import PurePath
from typing import Final

CONTROL: Final = "control.sock"  # where a daemon answers in its folder, and a vault in its own
SOCKET_BYTES: Final = 107  # of a unix socket's path at most, says the kernel


def overlong(socket: PurePath) -> str:
    """Why a unix socket cannot have this path; empty if it can.

    >>> overlong(PurePath("/run/elasticrl/job/n0/control.sock"))
    ''
    """
    length = len(bytes(socket))
    return f"{socket} has {length} bytes, and a socket's path may have {SOCKET_BYTES}" if length > SOCKET_BYTES else ""


def join(host: str, port: int) -> str:
    """Host and port as one word.

    >>> join("10.0.0.3", 7461), join("fd00::3", 7461)
    ('10.0.0.3:7461', '[fd00::3]:7461')
    """
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split(where: str) -> tuple[str, int]:
    """The word as host and port again, as sockets take them; ValueError if it has no port.

    >>> split("[fd00::3]:7461")
    ('fd00::3', 7461)
    """
    host, _, port = where.rpartition(":")
    return host.strip("[]"), int(port)


def reachable(where: str) -> bool:
    """Can a socket send there as it is, without asking who has that name?

    >>> [reachable(where) for where in ("10.0.0.3:7461", "[fd00::3]:1", "n03:7461", "10.0.0.3:0", "10.0.0.3:70000", "")]
    [True, True, False, False, False, False]
    """
    try:
        host, port = split(where)
        ip_address(host)
    except ValueError:
        return False
    return 0 < port < 1 << 16


def loops(host: str) -> bool:
    """Does it lead to this machine itself, so that nobody outside can connect to it? Of names localhost alone is known to.

    >>> loops("127.0.1.1"), loops("::1"), loops("localhost"), loops("10.0.0.3"), loops("etcd-1")
    (True, True, True, False, False)
    """
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
