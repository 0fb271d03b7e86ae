"""A socket that listens for peers, on a port nobody else has."""

import socket


def listening(host: str, backlog: int) -> tuple[int, int]:
    """On this host's address: the open socket's descriptor, which the caller owns, and its port."""
    family, kind, proto, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind, proto)
    listener.bind(address)
    listener.listen(backlog)
    port = int(listener.getsockname()[1])
    return listener.detach(), port
