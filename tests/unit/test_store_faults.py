"""What failures mean, what settings are refused, how keys are spelled: the pure parts of the store."""

import dataclasses

import pytest

from elasticrl.store import StoreRefused, StoreSettings, Tls, etcd, wire
from elasticrl.store.faults import Fate, judge


@pytest.mark.parametrize(
    ("code", "detail", "fate"),
    [
        # Nothing was applied, so even a transaction may be tried again.
        ("UNAVAILABLE", "etcdserver: no leader", Fate.NOT_APPLIED),
        (
            "UNAVAILABLE",
            "failed to connect to all addresses; last error: UNKNOWN: Connection refused",
            Fate.NOT_APPLIED,
        ),
        ("UNAVAILABLE", "connections to all backends failing; last error: UNKNOWN: x", Fate.NOT_APPLIED),
        ("UNAVAILABLE", "DNS resolution failed for h9:2379: C-ares status is not ARES_SUCCESS", Fate.NOT_APPLIED),
        ("RESOURCE_EXHAUSTED", "etcdserver: too many requests", Fate.NOT_APPLIED),
        # It may have been applied.
        ("UNAVAILABLE", "Socket closed", Fate.UNKNOWN),
        ("UNAVAILABLE", "recvmsg:Connection reset by peer", Fate.UNKNOWN),
        ("UNAVAILABLE", "etcdserver: request timed out, possibly due to previous leader failure", Fate.UNKNOWN),
        ("UNAVAILABLE", "etcdserver: leader changed", Fate.UNKNOWN),
        ("DEADLINE_EXCEEDED", "Deadline Exceeded", Fate.UNKNOWN),
        ("UNKNOWN", "raft proposal dropped", Fate.UNKNOWN),
        ("INTERNAL", "Received RST_STREAM with error code 2", Fate.UNKNOWN),
        # No trying helps.
        ("RESOURCE_EXHAUSTED", "etcdserver: mvcc: database space exceeded", Fate.REFUSED),
        ("RESOURCE_EXHAUSTED", "grpc: received message larger than max (3 vs. 2)", Fate.REFUSED),
        ("PERMISSION_DENIED", "etcdserver: permission denied", Fate.REFUSED),
        ("INVALID_ARGUMENT", "etcdserver: request is too large", Fate.REFUSED),
        ("A_CODE_OF_THE_FUTURE", "", Fate.REFUSED),
        # Something else does.
        ("RESOURCE_EXHAUSTED", "CLIENT: Received message larger than max (5024478 vs. 4194304)", Fate.TOO_BIG),
        ("RESOURCE_EXHAUSTED", "Received message larger than max (5024478 vs. 4194304)", Fate.TOO_BIG),
        ("UNAUTHENTICATED", "etcdserver: invalid auth token", Fate.TOKEN),
        ("INVALID_ARGUMENT", "etcdserver: revision of auth store is old", Fate.TOKEN),
        ("OUT_OF_RANGE", "etcdserver: mvcc: required revision has been compacted", Fate.COMPACTED),
        ("NOT_FOUND", "etcdserver: requested lease not found", Fate.LEASE_GONE),
        ("FAILED_PRECONDITION", "etcdserver: lease already exists", Fate.LEASE_EXISTS),
        ("FAILED_PRECONDITION", "etcdserver: authentication is not enabled", Fate.NO_AUTH),
    ],
)
def test_a_failure_is_judged_by_whether_the_request_was_applied(code: str, detail: str, fate: Fate) -> None:
    assert judge(code, detail).fate is fate


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"endpoints": ()}, "no endpoints"),
        ({"endpoints": ("h1",)}, "'h1' is not host:port"),
        ({"endpoints": ("ftp://h1:1",)}, "scheme 'ftp'"),
        ({"namespace": "elasticrl/"}, "must begin and end with '/'"),
        ({"namespace": "/elasticrl"}, "must begin and end with '/'"),
        ({"username": "me"}, "belong together"),
        ({"tls": Tls(ca="ca.pem", cert="c.pem")}, "belong together"),
    ],
)
def test_settings_that_could_never_work_are_refused_at_once(change: dict[str, object], words: str) -> None:
    good = StoreSettings(endpoints=("h1:2379",), namespace="/elasticrl/job/")
    with pytest.raises(StoreRefused, match=words):
        dataclasses.replace(good, **change)


def test_a_password_is_not_shown() -> None:
    assert "hunter2" not in repr(StoreSettings(endpoints=("h1:2379",), username="me", password="hunter2"))


@pytest.mark.parametrize(
    ("version", "warned"),
    [
        ("3.4.23", False),
        ("3.5.0", True),
        ("3.5.1", True),
        ("3.5.2", True),
        ("3.5.3", False),
        ("3.6.0-rc.1", False),
        ("3.3.9", True),
        ("x", True),
    ],
)
def test_versions_with_known_data_corruption_are_warned_of(version: str, warned: bool) -> None:
    assert (etcd.version_warning(version) is not None) is warned


def test_a_prefix_ends_where_the_next_begins() -> None:
    assert wire.prefix_end(b"/a/") == b"/a0"
    assert wire.prefix_end(b"a\xff\xff") == b"b"
    assert wire.prefix_end(b"\xff") == b"\0"  # etcd's "to the end"


def test_a_namespace_is_put_on_and_taken_off_and_odd_keys_survive() -> None:
    names = wire.Names("/elasticrl/job/")
    assert names.span("plan") == (b"/elasticrl/job/plan", b"")
    assert names.span("members/") == (b"/elasticrl/job/members/", b"/elasticrl/job/members0")
    assert names.span("") == (b"/elasticrl/job/", b"/elasticrl/job0")
    odd = names.relative(b"/elasticrl/job/\xff\xfe")
    assert names.span(odd)[0] == b"/elasticrl/job/\xff\xfe"
