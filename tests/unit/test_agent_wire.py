import asyncio
import json
from pathlib import Path

import pytest

from elasticrl.agent.link import Link
from elasticrl.contract import events, seat, wire
from elasticrl.contract.cause import Cause, Why
from elasticrl.contract.evidence import Sign
from elasticrl.contract.model import Commit, Exit, Member, Phase, Plan, Rung, Seat, Stall, Work
from elasticrl.contract.orders import Halt, Kill, Launch, Order, Park, Place, Reform, place_of

A, C = (Member(node=name, incarnation=1) for name in ("a", "c"))
PLAN = Plan(
    generation=14,
    phase=Phase.TRAIN,
    seats=(
        Seat(member=A, born=12, slots=2),
        Seat(member=C, born=14, slots=2),
    ),
    resume=1260,
    rung=Rung.REFORM,
    lanes=8,
    endpoint="10.0.0.1:40123",
    causes=(Cause(why=Why.EXPIRED, who=(Member(node="b", incarnation=1),)),),
)


def test_a_member_learns_its_ranks() -> None:
    place = place_of(PLAN, C)
    assert (place.rank, place.slots, place.world, place.born) == (2, 2, 4, 14)
    assert place.nodes == ("a", "a", "c", "c")
    assert place.prefix == "g14/"
    first = place_of(PLAN, A)
    lanes = [each.at(slot, "").lanes for each in (first, place) for slot in range(2)]
    assert lanes == [range(2), range(2, 4), range(4, 6), range(6, 8)]


@pytest.mark.parametrize(
    "order",
    [
        Launch(place=place_of(PLAN, C)),
        Reform(place=place_of(PLAN, C)),
        Park(generation=14, endpoint="10.0.0.1:40123", reason="held"),
        Halt(generation=14, save=True, within_s=60.0, reason="stopped by an operator"),
        Kill(slot=1, cause="stopped in rollout for 12.0 s (budget 10.0 s)", sign=Sign.STOPPED),
    ],
)
def test_every_order_survives_the_wire(order: Order) -> None:
    line = wire.encode(order)
    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1
    assert wire.decode(line) == order


def test_actions_on_the_store_do_not_travel_to_the_agent() -> None:
    assert "KeepAlive" not in wire.KINDS


def test_a_report_survives_the_wire_and_is_the_event_that_the_core_knows() -> None:
    ended = Exit(generation=14, slot=1, step=1283, cause="signal 9 (SIGKILL)", own=False, signal=9)
    stall = Stall(slot=0, step=1283, phase="update", for_s=12.0, budget_s=10.0, waiting=True)
    report = wire.Report(
        work=Work.FAILED, generation=14, born=12, warm=True, step=1283, saved=1280, manifest="step-00001280",
        exit=ended, stall=stall, endpoint="h:1", unlogged="full", ended=(wire.Ended(number=3, exit=ended, rank=1, said="b"),),
    )  # fmt: skip
    assert wire.decode(wire.encode(report)) == report
    assert report.into(events.Workers, now=5.0) == events.Workers(
        now=5.0, work=Work.FAILED, generation=14, born=12, warm=True, step=1283, saved=1280, manifest="step-00001280",
        exit=ended, stall=stall, endpoint="h:1", unlogged="full",
    )  # fmt: skip


def test_a_newer_versions_extra_field_is_passed_over() -> None:
    plain = json.loads(wire.encode(Kill(slot=1, cause="x", sign=Sign.STOPPED)))
    assert wire.decode(json.dumps({**plain, "mercy": True}).encode()) == Kill(slot=1, cause="x", sign=Sign.STOPPED)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (b"{", "not JSON"),
        (b'{"v":1,"is":"Kill"}', "another protocol"),
        (b"[]", "another protocol"),
        (b'{"v":3,"is":"Os.system"}', "unknown message"),
        (b'{"v":3,"is":"Kill","slot":"first","cause":"x"}', "slot"),
        (b'{"v":3,"is":"Kill","slot":1}', "cause"),
    ],
)
def test_what_is_not_the_protocol_is_refused_with_a_sentence(line: bytes, says: str) -> None:
    with pytest.raises(wire.Garbled, match=says):
        wire.decode(line)


def test_an_order_to_a_worker_survives_its_socket() -> None:
    place = Place(
        generation=14, born=12, rank=2, world=4, slot=0, slots=2, all_lanes=8, resume=1260, rung=Rung.REFORM,
        endpoint="[::1]:40123", nodes=("a", "a", "c", "c"), reason=PLAN.reason,
    )  # fmt: skip
    for order in (place, Park(generation=15), Halt(generation=15, save=True, within_s=1.5)):
        assert seat.read(json.loads(seat.write(order))) == order
    assert seat.read({**json.loads(seat.write(place)), "role": "train"}) == place, "as agents before this one wrote it"
    assert (place.host, place.port) == ("::1", 40123)
    env = seat.rank_env(place)
    assert (env["RANK"], env["LOCAL_RANK"], env["WORLD_SIZE"], env["LOCAL_WORLD_SIZE"]) == ("2", "0", "4", "2")
    assert (env["GROUP_RANK"], env["GROUP_WORLD_SIZE"], env["MASTER_ADDR"], env["MASTER_PORT"]) == (
        "1",
        "2",
        "::1",
        "40123",
    )


def test_a_process_without_an_agent_is_told_so() -> None:
    with pytest.raises(seat.NoSeat, match="not started by an elasticrl agent"):
        seat.OwnSeat.here()


def test_a_commit_survives_both_wires() -> None:
    commit = Commit(step=1280, manifest="step-00001280", generation=14)
    assert wire.decode(wire.encode(commit)) == commit
    line = json.loads(seat.write(commit))
    assert line == {"is": "Commit", "step": 1280, "manifest": "step-00001280", "generation": 14, "written": 0.0}


def test_an_agent_that_is_not_understood_is_asked_ever_more_rarely(tmp_path: Path) -> None:
    # Found by reading: twenty times a second, for ever, with a line of the log each.
    asked: list[float] = []

    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(asyncio.get_running_loop().time())
        writer.write(b"what is this\n")
        writer.close()

    async def run() -> None:
        server = await asyncio.start_unix_server(answer, tmp_path / "agent.sock")
        task = asyncio.create_task(Link(tmp_path / "agent.sock", lambda _: None).run())
        await asyncio.sleep(1.5)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        server.close()

    asyncio.run(run())
    assert 3 <= len(asked) <= 7
