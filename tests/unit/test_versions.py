"""Whose Python, NCCL, torch or elasticrl is another: found in what all nodes' records claim, and said in one sentence."""

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from core_kit import record
from diagnosis_kit import NODES, leader

from elasticrl.config import Tree
from elasticrl.config.cluster import Job, Node
from elasticrl.contract import versions
from elasticrl.contract.events import Found
from elasticrl.contract.evidence import Evidence, Sign
from elasticrl.contract.model import Record, View
from elasticrl.contract.verdict import Fault
from elasticrl.core.judge.judge import judge
from elasticrl.daemon.history import History
from elasticrl.daemon.inquiry import Inquiry
from elasticrl.daemon.shared import Site
from elasticrl.runtime import bits
from elasticrl.status.picture import picture
from elasticrl.telemetry.log import set_up

SAME = {"python": "3.11.7", "elasticrl": "0.1.0", "wire": "1", "torch": "2.13.0", "nccl": "2.30.4"}


class Led:
    """The leader's inquiry, and what it makes of the records."""

    def __init__(self, folder: Path, device: str) -> None:
        place = Site(node="n00", job="j", host="127.0.0.1", runtime=folder, state=folder, disks={})
        self._life, self._posted, self._screen = leader(), [], io.StringIO()  # type: ignore[var-annotated]
        tree = Tree(job=Job(name="j"), node=Node(device=device))  # type: ignore[arg-type]
        self._inquiry = Inquiry(tree, place, log=set_up(self._screen, pretty=False), history=History())
        self._inquiry.join(self._posted.append, lambda: self._life.state, kept=lambda *_: None, latency=dict)

    def sees(self, **odd: str) -> tuple[Evidence, ...]:
        """n01 runs what the others do, but for these."""
        self._posted.clear()
        state = self._life.state = self._life.state.but(view=replace(self._life.state.view, records=claiming(**odd)))
        self._inquiry.comparison.decided(state)
        return tuple(fact for event in self._posted if isinstance(event, Found) for fact in event.evidence)

    @property
    def said(self) -> list[str]:
        lines = map(json.loads, self._screen.getvalue().splitlines())
        return [line["said"] for line in lines if line["event"] == "versions.differ"]


def claiming(**odd: str) -> dict[str, Record]:
    return {name: record(name, versions=json.dumps(SAME | (odd if name == "n01" else {}))) for name in NODES}


@pytest.fixture
def led(tmp_path: Path) -> Led:
    return Led(tmp_path, "cuda")


def test_another_nccl_is_a_verdict_as_another_torch_is(led: Led) -> None:
    for name, mine in (("nccl", "2.27.3"), ("torch", "2.12.1")):
        verdict = judge(led.sees(**{name: mine}))
        assert (verdict.fault, verdict.nodes) == (Fault.VERSION_MISMATCH, ("n01",))
        assert f"{name} {mine}, others {SAME[name]}" in verdict.cause
    assert {fact.sign for fact in led.sees()} == {Sign.HEALTHY}, "it has been taken back"
    assert led.said == []


def test_where_no_card_carries_the_job_another_nccl_is_worth_a_word(tmp_path: Path) -> None:
    led = Led(tmp_path, "cpu")
    assert led.sees(nccl="2.27.3") == ()
    assert led.said == ["n01 runs nccl 2.27.3, the others 2.30.4"]


def test_another_python_or_elasticrl_is_said_once_and_puts_nobody_out(led: Led) -> None:
    # A rolling upgrade has nodes of two versions for a while: nobody is to be kept out for it.
    assert led.sees(elasticrl="0.2.0", python="3.11.8") == ()
    assert led.sees(elasticrl="0.2.0", python="3.11.8") == ()
    assert led.said == ["n01 runs elasticrl 0.2.0, the others 0.1.0; n01 runs python 3.11.8, the others 3.11.7"]
    assert led.sees() == ()
    assert led.sees(python="3.11.8") == ()
    assert led.said[1:] == ["n01 runs python 3.11.8, the others 3.11.7"]


def test_who_does_not_say_what_it_runs_is_not_odd() -> None:
    older = {**claiming(), "n01": record("n01", bits=json.dumps({"torch": "2.13.0", "isa": "AVX2"}))}
    assert versions.claimed(older)["n01"] == {"torch": "2.13.0"}
    assert versions.odd(versions.claimed(older)) == ()
    garbled = {**claiming(), "n01": record("n01", versions="{", bits="x")}
    assert versions.odd(versions.claimed(garbled)) == ()


def test_of_two_that_differ_both_are_named() -> None:
    found = versions.odd({"a": {"python": "3.11.7"}, "b": {"python": "3.12.1"}})
    assert versions.sentence(found) == "a runs python 3.11.7; b runs python 3.12.1"


def test_another_wire_is_said_and_puts_nobody_out(led: Led) -> None:
    assert led.sees(wire="2") == ()
    assert led.said == ["n01 runs wire 2, the others 1"]


def test_status_says_it() -> None:
    advice = picture("j", View(), claiming(python="3.11.8"), {}, needs=1).advice
    assert advice[-1].startswith("n01 runs python 3.11.8, the others 3.11.7. Install the same on all nodes")
    assert not any("runs" in said for said in picture("j", View(), claiming(torch="2.12.1"), {}, needs=1).advice)


def test_a_worker_says_what_it_runs() -> None:
    said = json.loads(bits.versions())
    assert said["torch"] == torch.__version__
    assert said["python"].startswith("3.")
    assert ("nccl" in said) == torch.cuda.is_available()
    assert said["elasticrl"]
    assert said["wire"] == versions.WIRE
