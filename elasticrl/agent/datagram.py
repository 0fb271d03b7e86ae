"""The small signed datagrams by which nodes hear each other: beats, questions and answers. Standard library only.

The one idea: a datagram says "this life of this node is here" and nothing else. It is signed with the job's secret and
carries a number that rises within a life, so that neither a stranger nor an echo is taken for a neighbour.
"""

import hmac
import struct
from typing import Final

from elasticrl.core.model import Member

MAGIC: Final = b"eRL1"
HEAD: Final = struct.Struct("!4sBQQH")  # magic, kind, incarnation, number, length of the node's name
ANSWERED: Final = struct.Struct("!IQ")  # microseconds, the question's number; behind the name, in a TIMED only
MAC_BYTES: Final = 16
BEAT, PING, PONG = 1, 2, 3
TIMED = 4  # an answer, as PONG, that says to which question, and how long that had lain on the machine that answers


def seal(secret: bytes, kind: int, member: Member, number: int, *, lain_s: float = 0.0, to: int = 0) -> bytes:
    """A datagram.

    Example: seal(secret, BEAT, Member(node="n03", incarnation=2), 1041)
    """
    name = member.node.encode()
    body = HEAD.pack(MAGIC, kind, member.incarnation, number, len(name)) + name
    if kind == TIMED:
        body += ANSWERED.pack(max(0, min(int(lain_s * 1e6), 0xFFFFFFFF)), to)
    return body + hmac.digest(secret, body, "sha256")[:MAC_BYTES]


def unseal(secret: bytes, data: bytes) -> tuple[int, Member, int] | str:
    """Kind, sender and number of a datagram, or what is wrong with it."""
    if len(data) < HEAD.size + MAC_BYTES or data[:4] != MAGIC:
        return "not a beat"
    body, mac = data[:-MAC_BYTES], data[-MAC_BYTES:]
    if not hmac.compare_digest(hmac.digest(secret, body, "sha256")[:MAC_BYTES], mac):
        return "signed with another key: another job, or a stranger"
    _, kind, incarnation, number, length = HEAD.unpack_from(body)
    if len(body) != HEAD.size + length + (ANSWERED.size if kind == TIMED else 0):
        return "cut short"
    name = body[HEAD.size : HEAD.size + length].decode(errors="replace")
    return kind, Member(node=name, incarnation=incarnation), number


def answered(data: bytes) -> tuple[float, int]:
    """Of a TIMED that was unsealed: how many seconds the question had lain, and its number."""
    microseconds, to = ANSWERED.unpack_from(data, len(data) - MAC_BYTES - ANSWERED.size)
    return float(microseconds) / 1e6, int(to)
