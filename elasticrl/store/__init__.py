"""Where the cluster keeps its one file of truth: the `Store` protocol, and the clients and servers that fulfil it.

Read `protocol` first. `etcd` is the default client, `etcd3_client` the package of that name behind the same protocol,
`embedded` starts a real one on this machine. `memory` is an etcd in this process for tests: no setting leads to it.
"""

from elasticrl.store.protocol import (
    Absent,
    Batch,
    Compare,
    Delete,
    EndpointStatus,
    Entry,
    Event,
    Get,
    Lease,
    LeaseGone,
    Listing,
    Op,
    Put,
    Response,
    Say,
    Status,
    Store,
    StoreAmbiguous,
    StoreError,
    StoreRefused,
    StoreStart,
    StoreUnavailable,
    TxnResult,
    Unchanged,
)
from elasticrl.store.settings import StoreSettings, Tls, namespace

__all__ = [
    "Absent",
    "Batch",
    "Compare",
    "Delete",
    "EndpointStatus",
    "Entry",
    "Event",
    "Get",
    "Lease",
    "LeaseGone",
    "Listing",
    "Op",
    "Put",
    "Response",
    "Say",
    "Status",
    "Store",
    "StoreAmbiguous",
    "StoreError",
    "StoreRefused",
    "StoreSettings",
    "StoreStart",
    "StoreUnavailable",
    "Tls",
    "TxnResult",
    "Unchanged",
    "namespace",
    "open_store",
]


def open_store(settings: StoreSettings, *, say: Say | None = None) -> Store:
    """A store as the settings describe it. Call it inside the event loop that will use it; close it (`async with`).

    Nothing is connected yet: the first call does that, and tells if nobody answers.
    """
    # Imported when asked for: gRPC costs a tenth of a second, and `etcd3` may not be installed.
    if settings.client == "etcd3":
        from elasticrl.store.etcd3_client import Etcd3Store

        return Etcd3Store(settings, say=say)
    from elasticrl.store.etcd import EtcdStore

    return EtcdStore(settings, say=say)
