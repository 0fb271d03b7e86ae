"""Beats over real UDP sockets on loopback: heard, doubted, answered by an agent, refused from strangers."""

import asyncio
import select
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from chaos.patience import patience
from elasticrl.agent.datagram import BEAT, PING, TIMED, Said, seal, unseal
from elasticrl.agent.echo import Echo, leave_note
from elasticrl.base.address import join, split
from elasticrl.contract.events import Cleared, Event, Suspected
from elasticrl.contract.model import Member, Phase, Plan, Seat
from elasticrl.contract.settings import Membership
from elasticrl.daemon.neighbours import ROUND_TRIPS, SENDERS, Neighbours, lain_s

SECRET = b"s" * 32
SETTINGS = Membership(beat_s=0.02, suspect_s=0.15)
A, B = Member(node="a", incarnation=1), Member(node="b", incarnation=1)


class End:
    def __init__(self, me: Member, secret: bytes = SECRET) -> None:
        self.events: list[Event] = []
        self.refused: list[str] = []
        self.it = Neighbours(
            me, secret, SETTINGS, post=self.events.append, doubt_s=0.05,
            refused=lambda _, problem, more: self.refused.append(f"{problem} {more}"),
        )  # fmt: skip
        self.task: asyncio.Task[None] | None = None

    async def open(self) -> "End":
        await self.it.open("127.0.0.1")
        self.task = asyncio.create_task(self.it.beat())
        return self

    async def close(self) -> None:
        assert self.task
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)
        self.it.close()

    def heard(self) -> list[str]:
        return [
            f"{type(event).__name__} {event.node}" for event in self.events if isinstance(event, Suspected | Cleared)
        ]


def beat(me: Member, end: End, number: int, address: str = "127.0.0.1:9") -> bytes:
    """One of this node's for that end."""
    told = Said(kind=BEAT, member=me, number=number, session=1, to=end.it._session, address=address)
    return seal(SECRET, told, end.it._me.node)


async def until(claim: Callable[[], bool], within_s: float = 20.0) -> None:
    deadline = time.monotonic() + patience(within_s)
    while not claim():
        assert time.monotonic() < deadline, "it did not happen"
        await asyncio.sleep(0.005)


def plan(a: End, b: End, echo: str = "") -> Plan:
    seats = (Seat(member=A, born=1, beat=a.it.address), Seat(member=B, born=1, beat=b.it.address, echo=echo))
    return Plan(generation=1, phase=Phase.TRAIN, seats=seats)


def test_a_silent_neighbour_is_suspected_and_a_new_daemon_at_another_address_clears_it() -> None:
    async def script() -> None:
        a, b = await End(A).open(), await End(B).open()
        both = plan(a, b)
        a.it.follow(both)
        b.it.follow(both)
        await until(lambda: a.it.heard > 5 and b.it.heard > 5)
        assert a.heard() == []
        await b.close()
        await until(lambda: a.heard()[-1:] == ["Suspected b"])
        again = await End(B).open()
        again.it.follow(both)
        await until(lambda: a.heard()[-1:] == ["Cleared b"])
        await until(lambda: again.it.heard > 3)  # a has learned the new address
        await again.close()
        await a.close()

    asyncio.run(script())


def test_an_agent_answers_for_a_silent_daemon(tmp_path: Path) -> None:
    async def script() -> None:
        a, b, echo = await End(A).open(), await End(B).open(), Echo(tmp_path)
        await echo.open("127.0.0.1")
        leave_note(tmp_path, B, SECRET)
        both = plan(a, b, echo.address)
        a.it.follow(both)
        b.it.follow(both)
        await until(lambda: a.it.heard > 5)
        await b.close()
        before = a.it.heard
        await until(lambda: a.it.heard > before + 20)
        assert a.heard() == []
        echo.close()
        await until(lambda: a.heard()[-1:] == ["Suspected b"])
        await a.close()

    asyncio.run(script())


def test_a_doubted_neighbour_that_lives_is_not_suspected_and_a_dead_one_is_at_once() -> None:
    async def script() -> None:
        a, b = await End(A).open(), await End(B).open()
        both = plan(a, b)
        a.it.follow(both)
        b.it.follow(both)
        await until(lambda: a.it.heard > 3)
        a.it.doubt()
        await asyncio.sleep(0.1)
        assert a.heard() == []
        await b.close()
        doubted_at = time.monotonic()
        a.it.doubt()
        await until(lambda: a.heard()[-1:] == ["Suspected b"])
        assert time.monotonic() - doubted_at < patience(SETTINGS.suspect_s)
        await a.close()

    asyncio.run(script())


def test_a_stranger_is_refused_and_an_echo_is_not_taken_for_life() -> None:
    async def script() -> None:
        a, b, stranger = await End(A).open(), await End(B).open(), await End(B, secret=b"x" * 32).open()
        both = plan(a, b)
        a.it.follow(both)
        stranger.it.follow(both)
        await until(lambda: bool(a.refused))
        assert "another key" in a.refused[0]
        datagram, before = beat(B, a, time.monotonic_ns() + 10**12), a.it.heard
        for _ in range(2):
            a.it.datagram_received(datagram, ("127.0.0.1", 9))
            assert a.it.heard == before + 1
        for end in (a, b, stranger):
            await end.close()

    asyncio.run(script())


def test_what_a_stranger_sends_is_told_once_and_however_many_there_are_the_book_of_them_stays_small() -> None:
    async def script() -> None:
        a = await End(A).open()
        for _ in range(5):
            a.it.datagram_received(b"noise", ("127.0.0.1", 9))
        assert len(a.refused) == 1
        for port in range(1000, 3000):
            a.it.datagram_received(b"noise", ("127.0.0.1", port))
        assert len(a.it._noise) <= SENDERS + 1
        assert len(a.refused) <= SENDERS + 1
        await a.close()

    asyncio.run(script())


def test_a_recorded_beat_of_a_life_that_is_over_is_not_taken_for_its_nodes() -> None:
    async def script() -> None:
        a, b = await End(A).open(), await End(B).open()
        again = Member(node="b", incarnation=2)
        seats = (Seat(member=A, born=1, beat=a.it.address), Seat(member=again, born=1, beat=b.it.address))
        await b.close()
        a.it.follow(Plan(generation=2, phase=Phase.TRAIN, seats=seats))
        heard = a.it.heard
        a.it.datagram_received(beat(B, a, 5), ("127.0.0.1", 9))
        assert a.it.heard == heard
        a.it.datagram_received(beat(again, a, 5), ("127.0.0.1", 9))
        assert a.it.heard == heard + 1
        await a.close()

    asyncio.run(script())


def test_who_knows_of_no_plan_answers_those_that_a_plan_tells_to_listen_for_it() -> None:
    # The store went away when half of the nodes had read the plan.
    async def script() -> None:
        a, b = await End(A).open(), await End(B).open()
        a.it.follow(plan(a, b))
        await until(lambda: a.it.heard > 5 and a.heard()[-1:] != ["Suspected b"])
        assert b.it.sent == 0
        await a.close()
        await b.close()

    asyncio.run(script())


def test_what_was_recorded_of_a_neighbour_is_nothing_new_when_it_has_left_the_ring_and_is_back() -> None:
    async def script() -> None:
        a, b = await End(A).open(), await End(B).open()
        await b.close()
        recorded = beat(B, a, 5)
        a.it.follow(plan(a, b))
        a.it.datagram_received(recorded, ("127.0.0.1", 9))
        a.it.follow(Plan(generation=2, phase=Phase.TRAIN, seats=(Seat(member=A, born=1, beat=a.it.address),)))
        a.it.follow(plan(a, b))
        a.it.datagram_received(recorded, ("127.0.0.1", 9))
        assert a.it.heard == 1
        await a.close()

    asyncio.run(script())


def test_probing_names_who_does_not_answer() -> None:
    async def script() -> None:
        a, b = await End(A).open(), await End(B).open()
        assert await a.it.probe({"b": b.it.address, "c": "127.0.0.1:9"}, within_s=patience(0.5)) == ("c",)
        await a.close()
        await b.close()

    asyncio.run(script())


def test_a_datagram_that_was_changed_cut_or_lengthened_is_refused() -> None:
    said = Said(kind=TIMED, member=A, number=7, session=3, to=4, asked=5, lain_s=0.25, address="[fd00::3]:7461")
    whole = seal(SECRET, said, "b")
    assert unseal(SECRET, whole, "b") == said
    for at in range(len(whole)):
        assert isinstance(unseal(SECRET, whole[:at], "b"), str)
        assert isinstance(unseal(SECRET, whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :], "b"), str)
    assert isinstance(unseal(SECRET, whole + b"!", "b"), str)


def test_what_was_sent_to_one_node_is_nothing_to_another() -> None:
    whole = seal(SECRET, Said(kind=PING, member=A, number=7, session=3), "b1")
    for other in ("b", "b11", "c", ""):
        assert "for another node" in str(unseal(SECRET, whole, other))


class Relay(asyncio.DatagramProtocol):
    """Hears what is sent to it, keeps it, and passes it on under its own address."""

    def __init__(self, to: str) -> None:
        self.to, self.heard, self.froms = split(to), [], set()  # type: ignore[var-annotated]

    async def open(self) -> "Relay":
        self.transport, _ = await asyncio.get_running_loop().create_datagram_endpoint(
            lambda: self, local_addr=("127.0.0.1", 0)
        )
        return self

    @property
    def address(self) -> str:
        return join(*self.transport.get_extra_info("sockname"))

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        self.heard.append(data)
        self.froms.add(addr)
        self.transport.sendto(data, self.to)


def test_who_passes_a_node_s_beats_on_under_another_address_gets_none_of_those_for_it() -> None:
    """Found from outside: relayed from another port, a node's beats brought the relay 56 of the 75 that were for the node."""

    async def script() -> None:
        a, b = await End(A).open(), await End(B).open()
        relay = await Relay(a.it.address).open()
        a.it.address = relay.address  # as far as b knows: so all that it sends goes through there
        seats = (Seat(member=A, born=1, beat=relay.address), Seat(member=B, born=1, beat=b.it.address))
        a.it.follow(Plan(generation=1, phase=Phase.TRAIN, seats=seats))
        b.it.follow(Plan(generation=1, phase=Phase.TRAIN, seats=seats))
        await until(lambda: a.it.heard > 20 and len(relay.heard) > 20 and "a" in b.it._took)
        assert relay.froms <= {split(b.it.address)}
        assert a.it._peers["b"] == split(b.it.address)
        relay.transport.close()
        for end in (a, b):
            await end.close()

    asyncio.run(script())


def test_what_was_recorded_for_a_daemon_is_nothing_to_the_next() -> None:
    """Found by reading: a restarted daemon had heard nothing yet, so each recorded beat was a new one to it."""

    async def script() -> None:
        a, b = await End(A).open(), await End(B).open()
        relay = await Relay(a.it.address).open()
        seat = Seat(member=A, born=1, beat=relay.address)
        a.it.follow(plan(a, b))
        a.it.address = relay.address
        b.it.follow(Plan(generation=1, phase=Phase.TRAIN, seats=(seat, Seat(member=B, born=1, beat=b.it.address))))
        await until(lambda: len(relay.heard) > 20)
        await b.close()
        await a.close()
        again = await End(A).open()
        again.it.follow(plan(again, b))
        for data in relay.heard:
            again.it.datagram_received(data, ("127.0.0.1", 9))
        await until(lambda: again.heard() == ["Suspected b"])
        for data in relay.heard:
            again.it.datagram_received(data, ("127.0.0.1", 9))
        again.it.judge(time.monotonic())
        assert (again.it.heard, again.heard()) == (0, ["Suspected b"])
        assert await again.it.probe({"b": b.it.address}, within_s=0.2) == ("b",)
        relay.transport.close()
        await again.close()

    asyncio.run(script())


@pytest.mark.parametrize("address", ["127.0.0.1:70000", "127.0.0.1:-1", "a\0b:9", "", "x:" + "9" * 5000])
def test_a_beat_whose_answer_no_socket_can_send_does_not_make_its_hearer_deaf(address: str) -> None:
    """Found by hostile beats of a member: the first answer closed the socket of who heard it."""

    async def script() -> None:
        a, b = await End(A).open(), await End(B).open()
        for number, to in enumerate((0, a.it._session), 1):
            asked = Said(
                kind=PING, member=Member(node="c", incarnation=1), number=number, session=3, to=to, address=address
            )
            a.it.datagram_received(seal(SECRET, asked, "a"), ("127.0.0.1", 9))
        assert await a.it.probe({"b": b.it.address}, within_s=5.0) == ()
        await a.close()
        await b.close()

    asyncio.run(script())


def test_a_recorded_answer_is_none_to_a_later_question() -> None:
    async def script() -> None:
        a, b = await End(A).open(), await End(B).open()
        assert await a.it.probe({"b": b.it.address}, within_s=5.0) == ()
        told = Said(
            kind=TIMED, member=B, number=time.monotonic_ns(), session=1, to=a.it._session, asked=a.it._number,
            address=b.it.address,
        )  # fmt: skip
        await b.close()
        probing = asyncio.create_task(a.it.probe({"b": b.it.address}, within_s=0.2))
        await asyncio.sleep(0.05)
        a.it.datagram_received(seal(SECRET, told, "a"), ("127.0.0.1", 9))
        assert await probing == ("b",)
        await a.close()

    asyncio.run(script())


def test_a_doubted_neighbour_whose_daemon_and_agent_are_both_refused_is_suspected_at_once() -> None:
    async def script() -> None:
        a, b = End(A), await End(B).open()
        a.it = Neighbours(A, SECRET, SETTINGS, post=a.events.append, refused=lambda *_: None, doubt_s=10.0)
        await a.open()
        echo = Echo(Path("/nowhere"))
        await echo.open("127.0.0.1")
        a.it.follow(plan(a, b, echo.address))
        b.it.follow(plan(a, b, echo.address))
        await until(lambda: a.it.heard > 0)
        await b.close()
        a.it.doubt()
        await asyncio.sleep(0.02)
        assert a.heard() == [], "its agent is there still: it may answer yet"
        echo.close()
        await asyncio.sleep(0)  # the transport closes its socket in the loop's next turn
        a.it.detector = a.it.detector.hear("b", time.monotonic())
        begun = time.monotonic()
        a.it.doubt()
        await until(lambda: a.heard() == ["Suspected b"], 5.0)
        assert time.monotonic() - begun < patience(2.0)
        await a.close()

    asyncio.run(script())


def test_a_datagram_that_has_lain_here_is_known_to_have_lain() -> None:
    with (
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as here,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as there,
    ):
        here.bind(("127.0.0.1", 0))
        assert lain_s(here.fileno()) == 0.0, "nothing was read yet"
        lain = 0.0
        for _ in range(50):  # the kernel begins to stamp some time after it was first asked: later on a busy machine
            there.sendto(b"x", here.getsockname())
            time.sleep(0.1)
            here.recv(1)
            if (lain := lain_s(here.fileno())) >= 0.1:
                break
        assert 0.1 <= lain < patience(0.5)


def test_a_busy_machine_at_either_end_is_no_long_way() -> None:
    async def script(*, here: bool) -> None:
        a, b = await End(A).open(), await End(B).open()
        a.it.follow(plan(a, b))
        b.it.follow(plan(a, b))
        await until(lambda: a.it.heard > 0)
        for end in (a, b):
            assert end.task is not None
            end.task.cancel()
        await asyncio.sleep(0.05)
        a.it._took.clear()
        for _ in range(ROUND_TRIPS):
            a.it._send_to(PING, "b", a.it._peers["b"])
            while here and not select.select([b.it._transport.get_extra_info("socket")], [], [], 1.0)[0]:  # type: ignore[union-attr]
                pass
            if here:
                await asyncio.sleep(0)  # the question is read, and answered; what comes back lies here
                await asyncio.sleep(0)
            time.sleep(0.05)  # noqa: ASYNC251 - both stand still
            await asyncio.sleep(0.02)
        assert a.it.latency["b"] < 0.02, "what it has lain is no way"
        await a.close()
        await b.close()

    asyncio.run(script(here=True))
    asyncio.run(script(here=False))


class Slow(asyncio.DatagramProtocol):
    """One end of a slow way: what comes in here goes out at the other, later."""

    def __init__(self, to: str, delay_s: float) -> None:
        self.to, self.delay_s = split(to), delay_s
        self.other: Slow
        self.transport: asyncio.DatagramTransport

    def connection_made(self, transport: asyncio.DatagramTransport) -> None:  # type: ignore[override]
        self.transport = transport

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:  # noqa: ARG002 - asyncio's name
        asyncio.get_running_loop().call_later(self.delay_s, self.other.transport.sendto, data, self.other.to)


def test_a_way_that_takes_longer_than_the_time_between_two_questions_is_not_taken_for_a_short_one() -> None:
    async def script() -> None:
        a, b = await End(A).open(), await End(B).open()
        loop = asyncio.get_running_loop()
        near, far = (Slow(end.it.address, 0.4) for end in (a, b))
        near.other, far.other = far, near
        for end in (near, far):
            await loop.create_datagram_endpoint(lambda end=end: end, local_addr=("127.0.0.1", 0))  # type: ignore[misc]
        at_a, at_b = (join(*end.transport.get_extra_info("sockname")) for end in (near, far))
        a.it.address, b.it.address = at_b, at_a  # where they hear, as far as the other knows
        a.it.follow(Plan(generation=1, phase=Phase.TRAIN, seats=(
            Seat(member=A, born=1, beat=at_b), Seat(member=B, born=1, beat=at_a),
        )))  # fmt: skip
        b.it.follow(Plan(generation=1, phase=Phase.TRAIN, seats=(
            Seat(member=A, born=1, beat=at_b), Seat(member=B, born=1, beat=at_a),
        )))  # fmt: skip
        await until(lambda: "b" in a.it.latency)
        assert 0.8 <= a.it.latency["b"] < 2.0
        for slow in (near, far):
            slow.transport.close()
        await a.close()
        await b.close()

    asyncio.run(script())
