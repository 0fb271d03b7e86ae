"""How to reach a store. `elasticrl.config` produces these values; nothing in this package reads a file but certificates."""

from dataclasses import field
from typing import Literal

from elasticrl.base.value import dataclass
from elasticrl.store.protocol import StoreRefused


@dataclass(frozen=True, slots=True, kw_only=True)
class Tls:
    """Files in PEM form. Only `ca`: the server is verified; `cert` and `key` as well: mutual TLS.

    Example: Tls(ca="/etc/elasticrl/ca.pem", cert="/etc/elasticrl/node.pem", key="/etc/elasticrl/node.key")
    """

    ca: str | None = None  # None: the system's certificate authorities
    cert: str | None = None
    key: str | None = None
    server_name: str | None = (
        None  # the name to expect in the server's certificate, where it is not the endpoint's host
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreSettings:
    """One connection. Durations are in seconds.

    Example: StoreSettings(endpoints=("h1:2379", "h2:2379", "h3:2379"), namespace="/elasticrl/ppo-7b/")
    """

    endpoints: tuple[str, ...]  # host:port, or http(s)://host:port; all of them members of one etcd
    namespace: str = "/"  # begins and ends with "/"; every key lies under it
    client: Literal["grpc", "etcd3"] = "grpc"
    try_timeout_s: float = 0.5  # one try of a call, before the next endpoint is asked
    timeout_s: float = 5.0  # a call with all its tries
    ping_s: float = 5.0  # between pings on a silent connection; etcd hangs up on those who ping more often
    ping_timeout_s: float = 3.0  # a ping without an answer for this long ends the connection
    pause_s: float = 1.0  # the longest pause between tries, and between attempts to connect
    page: int = 256  # keys per request of a long listing
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    tls: Tls | None = None

    def __post_init__(self) -> None:
        """Refuse what could never work, rather than find out at the first call."""
        if not self.endpoints:
            raise StoreRefused("the store has no endpoints; name at least one host:port")
        for endpoint in self.endpoints:
            target(endpoint)
        if not (self.namespace.startswith("/") and self.namespace.endswith("/")):
            raise StoreRefused(
                f"the store's namespace {self.namespace!r} must begin and end with '/', as '/elasticrl/job/'"
            )
        if (self.username is None) != (self.password is None):
            raise StoreRefused("the store's username and password belong together; give both or neither")
        if self.tls and (self.tls.cert is None) != (self.tls.key is None):
            raise StoreRefused(
                "the store's client certificate and key belong together; give both (mutual TLS) or neither"
            )


def namespace(job: str, prefix: str = "/elasticrl") -> str:
    """What precedes all keys of a job.

    >>> namespace("ppo-7b")
    '/elasticrl/ppo-7b/'
    """
    return f"{prefix}/{job}/"


def target(endpoint: str) -> tuple[str, bool]:
    """An endpoint as host:port, and whether it asks for TLS by its scheme.

    >>> target("https://h1:2379")
    ('h1:2379', True)
    >>> target("127.0.0.1:2379")
    ('127.0.0.1:2379', False)
    """
    scheme, mark, rest = endpoint.rpartition("://")
    if mark and scheme not in {"http", "https"}:
        raise StoreRefused(f"the endpoint {endpoint!r} has the scheme {scheme!r}; expected http, https or none")
    host, colon, port = rest.rstrip("/").rpartition(":")
    if not (host and colon and port.isdigit()):
        raise StoreRefused(f"the endpoint {endpoint!r} is not host:port")
    return f"{host}:{port}", scheme == "https"
