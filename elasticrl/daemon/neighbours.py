"""Beats between neighbouring daemons, and the detector that judges their absence.

The one idea: a beat says only "this life of this node can still run and be heard here". A daemon that falls silent may be
restarting while its workers train on, so its agent is asked before anything is said of the node. Whether silence means
death is decided elsewhere, by several neighbours together.
"""

import asyncio
import os
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Mapping
from fcntl import ioctl
from typing import Any, Protocol

from elasticrl.agent.datagram import BEAT, HELLO, PING, PONG, TIMED, Said, seal, session, unseal
from elasticrl.base.address import join, split
from elasticrl.base.ticks import until_next
from elasticrl.contract.events import Cleared, Event, Suspected
from elasticrl.contract.model import Member, Plan
from elasticrl.contract.settings import Membership
from elasticrl.core.node.suspect import Detector, lives, watched

NOISE_S = 60.0  # between two lines on what one sender sends that cannot be read
SENDERS = 64  # that are told apart in that
TIMED_S = 0.35  # between questions whose answers are timed: every second beat
ROUND_TRIPS = 4  # to each neighbour, of which the quickest counts


class Sender(Protocol):
    """What is needed of a datagram transport."""

    def sendto(self, data: bytes, addr: tuple[str, int]) -> None:
        """Send, or drop."""

    def close(self) -> None:
        """Close the socket."""

    def get_extra_info(self, name: str) -> Any:
        """As asyncio's: "socket"."""


class Neighbours(asyncio.DatagramProtocol):
    """This node's end of the beats.

    Long because it speaks with each neighbour in four ways (beats, questions, echoes, round trips) over one socket.
    """

    def __init__(
        self,
        me: Member,
        secret: bytes,
        settings: Membership,
        *,
        post: Callable[[Event], None],
        refused: Callable[[str, str, int], None],
        doubt_s: float = 0.15,
    ) -> None:
        self._me = me
        self._secret = secret
        self._settings = settings
        self._post = post
        self._refused = refused
        self._transport: Sender | None = None
        self._plan: Plan | None = None
        self._peers: dict[
            str, tuple[str, int]
        ] = {}  # whom we send to; a restarted daemon says, signed and to this very daemon, where it hears now
        self._agents: dict[str, tuple[str, int]] = {}  # who answers for a node whose daemon is silent
        self._lives: Mapping[str, int] = {}  # which life of each node the plan knows
        self._noise: dict[str, tuple[float, int]] = {}  # who sends what cannot be read: last told when, how many since
        self._session = session()
        self._sessions: dict[str, int] = {}  # of the others' daemons
        self._newest: dict[Member, int] = {}
        self._closed: set[tuple[str, int]] = set()  # addresses where, a kernel said, nobody listens any more
        self._probed_at = 0  # the number after which the probe that is going on began to ask
        self._answered: set[str] = set()  # nodes that answered it
        self._number = 0
        self._beating = asyncio.Event()  # there is somebody to send to
        self.detector = Detector(settings=settings, doubt_s=doubt_s)
        self._doubt_s = doubt_s
        self.sent = self.heard = 0
        self.address = ""
        self._took: dict[str, deque[float]] = {}  # the newest round trips

    async def open(self, host: str, port: int = 0) -> None:
        """Listen on this address; `address` then says where."""
        loop = asyncio.get_running_loop()
        transport, _ = await loop.create_datagram_endpoint(lambda: self, local_addr=(host, port))
        self._transport = transport
        tell_refusals(transport.get_extra_info("socket").fileno())
        lain_s(transport.get_extra_info("socket").fileno())  # from the first question on, the kernel notes it
        bound = transport.get_extra_info("sockname")
        self.address = join(*bound[:2])

    def close(self) -> None:
        """Fall silent."""
        if self._transport is not None:
            self._transport.close()

    async def beat(self) -> None:
        """Send and judge, for ever. Alone there is nobody to beat for."""
        timed = 0.0
        while True:
            await self._beating.wait()
            now = time.monotonic()
            self._send(BEAT)
            for node in self.detector.late(now):
                self._ask(node)
            if now >= timed + TIMED_S:
                timed = now
                for node, address in self._peers.items():
                    self._send_to(PING, node, address)
            self.judge(now)
            await asyncio.sleep(until_next(self._settings.beat_s, time.time()))

    @property
    def latency(self) -> dict[str, float]:
        """The quickest of each neighbour's last round trips, once there are enough, without those that a busy machine, ours or
        his, held up.
        """
        return {
            node: min(took) for node, took in self._took.items() if len(took) == ROUND_TRIPS and node in self._peers
        }

    def follow(self, plan: Plan | None) -> None:
        """Another plan, another ring."""
        if plan is self._plan:
            return
        self._plan = plan
        seats = {seat.member.node: seat for seat in plan.seats + plan.spares} if plan else {}
        ring = watched(plan, self._me, self._settings.neighbours)
        self._peers = {node: split(seats[node].beat) for node in ring if seats[node].beat}
        self._agents = {node: split(seats[node].echo) for node in ring if seats[node].echo}
        self._lives = lives(plan, ring)
        self._took = {
            node: took for node, took in self._took.items() if node in self._peers
        }  # who comes back begins anew
        # Kept of who has left the ring as well: what was recorded of it would be new when it comes back.
        self._newest = {
            member: number
            for member, number in self._newest.items()
            if member.incarnation >= self._lives.get(member.node, 0)
        }
        self._sessions = {node: known for node, known in self._sessions.items() if node in self._peers}
        self.detector = self.detector.watch({node: self._lives[node] for node in self._peers}, time.monotonic())
        if self._peers:
            self._beating.set()
        else:
            self._beating.clear()

    def doubt(self) -> None:
        """A collective broke: some neighbour may be gone. Ask all of them; who lives answers in a round trip."""
        now = time.monotonic()
        self._closed.clear()
        for node in self._peers:
            self.detector = self.detector.doubt(node, now)
        loop = asyncio.get_running_loop()
        for share in (
            0.0,
            0.05,
            0.15,
            0.35,
            0.65,
        ):  # a packet may be lost; a dying process refuses only when it has died
            loop.call_later(share * self._doubt_s, self._ask_all)
        loop.call_later(self._doubt_s + 0.001, lambda: self.judge(time.monotonic()))

    def judge(self, now: float) -> None:
        """Tell the core who has fallen silent, and who is heard again."""
        self.detector, suspected, cleared = self.detector.judge(now)
        for node in suspected:
            self._post(Suspected(now=now, node=node, silent_s=now - self.detector.peers[node].last))
        for node in cleared:
            self._post(Cleared(now=now, node=node))

    async def probe(self, targets: Mapping[str, str], within_s: float) -> tuple[str, ...]:
        """Ask these nodes for a sign (name -> beat address), several times; who gave none is returned."""
        self._answered.clear()
        self._probed_at = self._number
        asked = {node: split(beat) for node, beat in targets.items() if beat}
        deadline = time.monotonic() + within_s
        while time.monotonic() < deadline and not self._answered >= asked.keys():
            for node, address in asked.items():
                if node not in self._answered:
                    self._send_to(PING, node, address)
            await asyncio.sleep(min(0.05, within_s / 4))
        return tuple(sorted(targets.keys() - self._answered))

    def _ask_all(self) -> None:
        for node in self._peers:
            self._ask(node)

    def _ask(self, node: str) -> None:
        """Daemon and agent: one answer is enough."""
        for address in (self._peers.get(node), self._agents.get(node)):
            if address is not None:
                self._send_to(PING, node, address)

    def _send_to(self, kind: int, node: str, address: tuple[str, int], *, asked: Said | None = None) -> None:
        """`asked`: what this answers, if that was read just now."""
        if self._transport is None:
            return
        # From a clock that this node's agent and its next daemon share, and that nobody can set back.
        self._number = max(self._number + 1, time.monotonic_ns())
        # A refusal of an earlier datagram would otherwise be told in place of sending this one.
        if self._transport.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self._hear_refusals()
        said = Said(
            kind=kind, member=self._me, number=self._number, session=self._session, address=self.address,
            to=asked.session if asked else self._sessions.get(node, 0), asked=asked.number if asked else 0,
            lain_s=self._lain_s() if asked else 0.0,
        )  # fmt: skip
        self._transport.sendto(seal(self._secret, said, node), address)

    def _send(self, kind: int) -> None:
        for node, address in self._peers.items():
            self._send_to(kind, node, address)
            self.sent += 1

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        """A beat, a question, or noise."""
        said = unseal(self._secret, data, self._me.node)
        if isinstance(said, str):
            self._refuse(join(*addr[:2]), said)
            return
        member, node = said.member, said.member.node
        if member.incarnation < self._lives.get(node, 0):
            return  # of a life that is over
        if said.to != self._session:
            # Recorded for the daemon before this one, or sent by one that has not met this one: no sign of life. It is told.
            if said.kind in {BEAT, PING}:
                self._send_to(HELLO, node, split(said.address), asked=said)
            return
        if said.number <= self._newest.get(member, -1):
            return  # an echo
        if said.kind != PONG:  # an agent answers, but hears no beats
            self._sessions[node] = said.session
        self._newest[member] = said.number
        if node in self._peers:
            self.heard += 1
            if said.kind != PONG:
                self._peers[node] = split(said.address)
            self.detector = self.detector.hear(node, time.monotonic())
        if said.kind == PING:
            self._send_to(TIMED, node, split(said.address), asked=said)
        elif said.kind != BEAT and said.asked > self._probed_at:
            self._answered.add(node)
        if said.kind == TIMED and node in self._peers:
            # A question's number is when it was asked.
            took = time.monotonic() - said.asked / 1e9 - self._lain_s() - said.lain_s
            self._took.setdefault(node, deque(maxlen=ROUND_TRIPS)).append(max(0.0, took))

    def _refuse(self, sender: str, problem: str) -> None:
        """Say it once a minute of each sender: anybody can send us anything, and a log has an end."""
        now = time.monotonic()
        if sender not in self._noise and len(self._noise) >= SENDERS:
            self._noise = {who: told for who, told in self._noise.items() if now < told[0] + NOISE_S}
            sender = sender if len(self._noise) < SENDERS else "others"
        at, more = self._noise.get(sender, (-NOISE_S, 0))
        if now < at + NOISE_S:
            self._noise[sender] = at, more + 1
        else:
            self._noise[sender] = now, 0
            self._refused(sender, problem, more)

    def _lain_s(self) -> float:
        """How long the datagram that is being read has lain here. Who counts that in takes a busy machine for a long way.

        Found on a machine with ten times the load that it can bear: nodes in order were put out for answering late.
        """
        return 0.0 if self._transport is None else max(0.0, lain_s(self._transport.get_extra_info("socket").fileno()))

    def error_received(self, exc: Exception) -> None:  # noqa: ARG002 - asyncio's name; the queue says more
        """The kernel says that a datagram was not delivered."""
        self._hear_refusals()

    def _hear_refusals(self) -> None:
        """Mostly silence says the same, and is judged; but where daemon and agent of a doubted node are both refused, its
        kernel lives and has neither: they died, and no answer will come.
        """
        assert self._transport is not None
        self._closed |= refusals(self._transport.get_extra_info("socket").fileno())
        now = time.monotonic()
        for node, agent in self._agents.items():
            if {self._peers.get(node), agent} <= self._closed:
                self.detector = self.detector.gone(node)
        self.judge(now)


IP_RECVERR, IPV6_RECVERR = 11, 25  # of Linux; Python has no names for them
SIOCGSTAMPNS = 0x8907  # when the kernel received the datagram that was read last


def lain_s(fd: int) -> float:
    """How long the datagram that was read last from this socket had lain there; 0 if the kernel does not say.

    The kernel's clock is the wall's: where that was set back in between, the answer is below 0.
    """
    stamp = struct.Struct("ll")
    try:
        seconds, nanoseconds = stamp.unpack(ioctl(fd, SIOCGSTAMPNS, bytes(stamp.size)))
    except OSError:  # it has not been asked before, or knows no such question
        return 0.0
    return time.time() - float(seconds) - float(nanoseconds) / 1e9


def tell_refusals(fd: int) -> None:
    """Have the kernel keep, for this socket, which datagrams were refused: without it, it tells only connected sockets."""
    with socket.socket(fileno=os.dup(fd)) as sock:
        if sock.family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, IPV6_RECVERR, 1)
        else:
            sock.setsockopt(socket.IPPROTO_IP, IP_RECVERR, 1)


def refusals(fd: int) -> set[tuple[str, int]]:
    """The addresses that refused a datagram since the last look."""
    found: set[tuple[str, int]] = set()
    with socket.socket(fileno=os.dup(fd)) as sock:
        for _ in range(64):
            try:
                _, _, _, to = sock.recvmsg(0, 0, socket.MSG_ERRQUEUE | socket.MSG_DONTWAIT)
            except OSError:  # the queue is empty
                break
            found.add((to[0], to[1]))
    return found
