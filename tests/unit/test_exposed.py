"""The metrics' port: Prometheus gets them, and who says nothing takes no more than a place for some seconds."""

import socket
import time
from contextlib import ExitStack
from urllib.request import urlopen

from prometheus_client import CollectorRegistry, Counter

from chaos.patience import patience
from elasticrl.daemon.exposed import AT_ONCE, serve


def test_strangers_who_say_nothing_hold_so_many_places_and_no_more() -> None:
    registry = CollectorRegistry()
    Counter("asked", "How often.", registry=registry).inc()
    server = serve(registry, "127.0.0.1", 0)
    try:
        url = f"http://127.0.0.1:{server.server_port}/metrics"
        assert b"asked_total 1.0" in urlopen(url, timeout=10.0).read()
        with ExitStack() as stack:
            for _ in range(AT_ONCE):
                stack.enter_context(socket.create_connection(("127.0.0.1", server.server_port), timeout=10.0))
            deadline = time.monotonic() + patience(10.0)
            with socket.create_connection(("127.0.0.1", server.server_port), timeout=10.0) as late:
                assert late.recv(1) == b"", "it is hung up on"
            assert time.monotonic() < deadline - 6.0, "at once, and not when somebody's time was up"
        until = time.monotonic() + patience(10.0)
        while time.monotonic() < until:
            try:
                assert b"asked_total" in urlopen(url, timeout=10.0).read()
                break
            except OSError:
                time.sleep(0.05)  # until those who have hung up are noticed
        else:
            raise AssertionError("nobody is heard any more")
    finally:
        server.shutdown()
        server.server_close()
