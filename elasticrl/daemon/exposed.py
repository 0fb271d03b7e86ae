"""The metrics over HTTP, for Prometheus.

The one idea: a daemon that many ask, or one that asks and says nothing, must go on all the same. So few are heard at a time,
and each says what it wants within seconds.
"""

import socket
from socketserver import ThreadingMixIn
from threading import BoundedSemaphore, Thread
from typing import Any, Final
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, make_wsgi_app

AT_ONCE: Final = 16  # who is heard; the next is hung up on
WITHIN_S: Final = 5.0  # for a request, and for its answer to be taken


class _Handler(WSGIRequestHandler):
    timeout = WITHIN_S

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - its name there
        """Who asks is nobody's business."""


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True

    def __init__(self, address: tuple[str, int]) -> None:
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self._room = BoundedSemaphore(AT_ONCE)
        super().__init__(address, _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        """In a thread of its own, if there is room."""
        if self._room.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """In that thread."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._room.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Whoever asked has gone, or said nothing in time."""


def serve(registry: CollectorRegistry, host: str, port: int) -> WSGIServer:
    """Until its `shutdown` and `server_close`; OSError if the port cannot be had."""
    server = _Server((host, port))
    server.set_app(make_wsgi_app(registry))
    Thread(target=server.serve_forever, name="elasticrl-metrics", daemon=True).start()
    return server
