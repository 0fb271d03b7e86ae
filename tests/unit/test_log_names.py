"""Whose a log line is: the job, which run of it, the node and its life, in every line of a process."""

import io
import json
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from elasticrl.agent.pool import Process
from elasticrl.contract import seat
from elasticrl.contract.model import Member, Phase, Plan, Seat
from elasticrl.contract.orders import Place, place_of
from elasticrl.daemon.secret import run_of
from elasticrl.telemetry import events
from elasticrl.telemetry.log import set_up

N0 = Member(node="n0", incarnation=1)


def lines(screen: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in screen.getvalue().splitlines()]


def test_every_line_says_whose_it_is_as_far_as_that_is_known() -> None:
    screen, names = io.StringIO(), {"job": "j", "node": "n0"}
    log = set_up(screen, pretty=False, names=lambda: names)
    early = log.bind()
    log.info("agent.failed", error="no memory")
    names |= {"run": "5d0c9e1f", "member": "n0/1"}
    early.info("store.resumed", endpoint="e", tries=1)
    log.info("leader.elected", member="n0/2")  # what a line says itself is what it says
    log.info("nobody.declared.this")
    said = lines(screen)
    assert [line["job"] for line in said] == ["j"] * 4
    assert [line.get("run") for line in said] == [None, *["5d0c9e1f"] * 3]
    assert [line.get("member") for line in said] == [None, "n0/1", "n0/2", "n0/1"]
    assert [line["event"] for line in said] == ["agent.failed", "store.resumed", "leader.elected", "bug"]


def test_a_run_is_told_by_its_stores_secret_and_does_not_give_it_away() -> None:
    one, other = run_of(bytes(32)), run_of(bytes(31) + b"\1")
    assert one == run_of(bytes(32)) != other
    assert (len(one), one in bytes(32).hex()) == (8, False)


def test_a_worker_finds_the_run_in_its_environment() -> None:
    plan = Plan(generation=3, phase=Phase.TRAIN, seats=(Seat(member=N0, born=3),), lanes=2, endpoint="10.0.0.1:4")
    place = seated(replace(place_of(plan, N0), run="5d0c9e1f"))
    assert events.names({"ELASTICRL_JOB": "j", "ELASTICRL_NODE": "n0"} | seat.rank_env(place)) == {
        "job": "j",
        "run": "5d0c9e1f",
        "node": "n0",
    }
    assert events.names({}) == {}


def seated(place: Place) -> Place:
    """What a process reads when it gets its rank."""
    ours, theirs = socket.socketpair()
    nowhere, none = Path("/nonexistent"), cast(Any, None)
    with ours, theirs:
        process = Process(
            number=1, pid=0, pidfd=-1, started=0, context=none, channel=ours, page=none, error_file=nowhere, log=nowhere,
            first_log=nowhere, witness=nowhere, parent=0,
        )  # fmt: skip
        process.assign(place.at(0, str(nowhere)))
        order = seat.read(json.loads(theirs.recv(65536)))
    assert isinstance(order, Place)
    return order
