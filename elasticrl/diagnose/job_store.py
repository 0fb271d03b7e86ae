"""How a configuration's store is reached, and started where it is embedded: the one answer for the daemon, the doctor, and the
commands that go there themselves.

It lies here because this is the lowest layer that knows both the configuration and the store.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Final

from elasticrl.config import Tree, reveal
from elasticrl.store import StoreSettings, Tls, namespace

if TYPE_CHECKING:
    from elasticrl.store.embedded import Embedded

ETCD: Final = "etcd"  # the folder of an embedded one, below the job's state


def store_settings(tree: Tree, endpoints: tuple[str, ...] | None = None) -> StoreSettings:
    """How to reach the job's store; `endpoints` stand in for the configured ones, as those of an embedded etcd do."""
    conf = tree.store
    tls = Tls(ca=conf.tls.ca, cert=conf.tls.cert, key=conf.tls.key, server_name=conf.tls.server_name)
    return StoreSettings(
        endpoints=conf.endpoints if endpoints is None else endpoints,
        namespace=namespace(tree.job.name, conf.prefix),
        client=conf.client,
        try_timeout_s=conf.try_timeout_s,
        timeout_s=conf.timeout_s,
        ping_s=conf.ping_s,
        ping_timeout_s=conf.ping_timeout_s,
        username=conf.username,
        password=reveal(conf.password, conf.password_file) if conf.username else None,
        tls=tls if tls != Tls() else None,  # an https:// endpoint is encrypted without it, by the system's authorities
    )


def embedded(tree: Tree, *, dies_with_us: bool) -> "Embedded":
    """The job's etcd on this machine, for whoever starts it."""
    from elasticrl.store.embedded import Embedded

    folder = Path(tree.node.state_dir) / tree.job.name / ETCD
    return Embedded(folder=folder, binary=tree.store.embedded_binary, die_with_parent=dies_with_us)
