"""The small signed datagrams by which nodes hear each other: beats, questions and answers. Standard library only.

The one idea: a datagram says "this life of this node is here, for you" and nothing else. It is signed with the job's secret,
for one node alone, and carries a number that rises within a life: neither a stranger nor an echo is taken for a neighbour. Each
process draws a number when it begins, its *session*, which those who send to it must name: so what was recorded for one process
is nothing to the next. Where the sender can be answered is signed as well: the source of a datagram proves nothing.
"""

import hmac
import secrets
import struct
from dataclasses import dataclass
from typing import Final

from elasticrl.base.address import reachable
from elasticrl.contract.model import Member

MAGIC: Final = b"eRL2"
HEAD: Final = struct.Struct("!4sBQQQQQIHH")  # magic, then as in `Said`; of node and address the lengths
MAC_BYTES: Final = 16
BEAT, PING, PONG = 1, 2, 3
TIMED = 4  # an answer, as PONG, that says how long the question had lain on the machine that answers
HELLO = 5  # the answer to who does not know our session: now it does


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """What one datagram says.

    Example: Said(kind=BEAT, member=Member(node="n03", incarnation=2), number=1041, session=77, to=91, address="10.0.0.3:7461")
    """

    kind: int
    member: Member  # who sends it
    number: int
    session: int  # the sender's
    to: int = 0  # the receiver's, as far as the sender knows it; 0: it does not
    asked: int = 0  # of an answer: the question's number
    lain_s: float = 0.0  # of a TIMED: how long the question had lain, to the microsecond
    address: str = ""  # where the sender hears


def session() -> int:
    """A process's own."""
    return secrets.randbits(63) + 1


def seal(secret: bytes, said: Said, receiver: str) -> bytes:
    """The datagram, for that node."""
    name, address = said.member.node.encode(), said.address.encode()
    lain = max(0, min(int(said.lain_s * 1e6), 0xFFFFFFFF))
    numbers = (said.kind, said.member.incarnation, said.number, said.session, said.to, said.asked, lain)
    body = HEAD.pack(MAGIC, *numbers, len(name), len(address)) + name + address
    return body + _mac(secret, body, receiver)


def unseal(secret: bytes, data: bytes, receiver: str) -> Said | str:
    """What a datagram for this node says, or what is wrong with it."""
    if len(data) < HEAD.size + MAC_BYTES or data[:4] != MAGIC:
        return "not a beat"
    body, mac = data[:-MAC_BYTES], data[-MAC_BYTES:]
    if not hmac.compare_digest(_mac(secret, body, receiver), mac):
        return "signed with another key, or for another node: another job, or a stranger"
    _, kind, incarnation, number, own, to, asked, lain, name, address = HEAD.unpack_from(body)
    if len(body) != HEAD.size + name + address:
        return "cut short"
    node, where = body[HEAD.size : HEAD.size + name], body[HEAD.size + name :]
    said = Said(
        kind=kind, member=Member(node=node.decode(errors="replace"), incarnation=incarnation), number=number, session=own,
        to=to, asked=asked, lain_s=lain / 1e6, address=where.decode(errors="replace"),
    )  # fmt: skip
    # One that no socket takes would end ours: found by hostile beats of a member, after which a node was deaf for good.
    return said if kind == PONG or reachable(said.address) else f"no answer can be sent to {said.address[:60]!r}"


def _mac(secret: bytes, body: bytes, receiver: str) -> bytes:
    return hmac.digest(secret, body + receiver.encode(), "sha256")[:MAC_BYTES]  # the body says itself where it ends
