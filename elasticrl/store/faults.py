"""What a failed call means: a pure table from gRPC's code and etcd's words to what may be done next.

The one idea: a failure is judged by one question, "was the request applied?". Only a certain no may be tried again
without thought; a perhaps is harmless for reads and repeatable writes and must be told to the caller of a transaction.
"""

from enum import Enum

from elasticrl.base.value import dataclass


class Fate(Enum):
    """Whether the request was applied, and so what may follow."""

    NOT_APPLIED = "not applied"  # certainly: try again, elsewhere
    UNKNOWN = "unknown"  # the answer was lost: perhaps applied, perhaps later
    TOKEN = "token"  # noqa: S105 - not applied; log in again, then try again
    TOO_BIG = "too big"  # the answer exceeds what we receive: ask for less
    COMPACTED = "compacted"  # the revision asked for is gone
    LEASE_GONE = "lease gone"
    LEASE_EXISTS = "lease exists"  # a grant with an id of our choosing was applied before
    NO_AUTH = "no auth"  # the server does not use passwords
    REFUSED = "refused"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A failed call, judged. `code` is gRPC's name for it, `detail` the words that came with it."""

    fate: Fate
    code: str
    detail: str

    def __str__(self) -> str:
        return f"{self.code}: {self.detail}" if self.detail else self.code


# Read from top to bottom; the first row whose code (None: any) and words fit decides. The words are etcd's own
# (api/v3rpc/rpctypes/error.go, the same since 3.4) and those of gRPC's core, compared without regard to case.
_TABLE: tuple[tuple[str | None, str, Fate], ...] = (
    ("UNAVAILABLE", "etcdserver: no leader", Fate.NOT_APPLIED),  # refused before it was proposed, thanks to `hasleader`
    ("UNAVAILABLE", "failed to connect to all addresses", Fate.NOT_APPLIED),
    ("UNAVAILABLE", "connections to all backends failing", Fate.NOT_APPLIED),  # the same, said by round_robin
    ("UNAVAILABLE", "dns resolution failed", Fate.NOT_APPLIED),
    ("UNAVAILABLE", "etcdserver: not capable", Fate.NOT_APPLIED),  # a member that has only just started
    ("UNAVAILABLE", "rpc not supported for learner", Fate.NOT_APPLIED),
    ("RESOURCE_EXHAUSTED", "etcdserver: too many requests", Fate.NOT_APPLIED),
    ("RESOURCE_EXHAUSTED", "grpc: received message larger than max", Fate.REFUSED),  # the server, of our request
    ("RESOURCE_EXHAUSTED", "received message larger than max", Fate.TOO_BIG),  # our side, of the answer
    ("RESOURCE_EXHAUSTED", "", Fate.REFUSED),  # "mvcc: database space exceeded"
    ("UNAUTHENTICATED", "", Fate.TOKEN),
    ("INVALID_ARGUMENT", "revision of auth store is old", Fate.TOKEN),
    ("INVALID_ARGUMENT", "user name is empty", Fate.TOKEN),  # users were switched on since we asked for none
    ("FAILED_PRECONDITION", "authentication is not enabled", Fate.NO_AUTH),
    ("FAILED_PRECONDITION", "lease already exists", Fate.LEASE_EXISTS),
    ("NOT_FOUND", "requested lease not found", Fate.LEASE_GONE),
    ("OUT_OF_RANGE", "required revision has been compacted", Fate.COMPACTED),
    ("UNAVAILABLE", "", Fate.UNKNOWN),
    ("DEADLINE_EXCEEDED", "", Fate.UNKNOWN),
    ("CANCELLED", "", Fate.UNKNOWN),
    ("ABORTED", "", Fate.UNKNOWN),
    ("INTERNAL", "", Fate.UNKNOWN),
    ("UNKNOWN", "", Fate.UNKNOWN),  # how etcd reports errors it has no code for, such as a dropped proposal
    (None, "", Fate.REFUSED),
)


def judge(code: str, detail: str) -> Fault:
    """The meaning of a failed call.

    >>> judge("UNAVAILABLE", "etcdserver: no leader").fate
    <Fate.NOT_APPLIED: 'not applied'>
    """
    words = detail.lower()
    fate = next(fate for row, part, fate in _TABLE if row in {None, code} and part in words)
    return Fault(fate=fate, code=code, detail=detail)
