"""Probes of real nodes: processes on loopback, and network namespaces with faults between them."""

import json
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from itertools import permutations
from pathlib import Path

import pytest
import torch
from diagnose_net import Net, cannot, network, probe

from chaos.patience import patience
from elasticrl.contract.evidence import Evidence, Sign
from elasticrl.contract.pairs import everyone
from elasticrl.contract.verdict import Confidence, Fault
from elasticrl.core.judge.judge import judge
from elasticrl.core.judge.matrix import late, trips
from elasticrl.diagnose.probe import Task, task_of

pytestmark = pytest.mark.timeout(240)


def free(count: int) -> list[int]:
    """Ports that nobody has at this moment, for TCP and UDP."""
    held = [socket.socket() for _ in range(count)]
    for sock in held:
        sock.bind(("127.0.0.1", 0))
    ports = [sock.getsockname()[1] for sock in held]
    for sock in held:
        sock.close()
    return ports


def signs(facts: tuple[Evidence, ...]) -> dict[tuple[str, str], Sign]:
    return {(str(fact.node), str(fact.peer)): fact.sign for fact in facts}


def test_two_healthy_nodes_are_measured_from_datagrams_to_gloo_and_nobody_is_blamed() -> None:
    ends = {f"n{i}": f"127.0.0.1:{port}" for i, port in enumerate(free(2))}
    results, facts = probe(ends)
    assert [(result.tcp, result.gloo) for result in results] == [("ok", "ok")] * 2
    for result in results:
        assert result.mtu == result.largest == 9216
        assert result.latency_ms is not None
        assert result.p99_ms is not None
        assert 0 < result.latency_ms <= result.p99_ms
        assert result.mbps is not None
        assert result.mbps > 1
    assert signs(facts) == {("n0", "n1"): Sign.HEALTHY}
    assert judge(facts).nodes == ()


def test_together_all_pairs_are_tested_one_at_a_time_and_each_node_knows_all_that_was_found() -> None:
    ends = {f"n{i}": f"127.0.0.1:{port}" for i, port in enumerate(free(4))}
    more = {"nodes": ends, "rounds": everyone(ends), "together": True, "facts": "{}"}
    results, facts = probe(ends, gloo_s=0.0, within_s=40.0, **more)
    assert len(results) == 4 * 12, "each has its own row, and the three others'"
    assert Counter((result.node, result.peer) for result in results) == Counter(dict.fromkeys(permutations(ends, 2), 4))
    assert all(result.tcp == "ok" and result.mbps for result in results), results
    assert set(signs(facts).values()) == {Sign.HEALTHY}


def test_together_with_one_that_is_not_there_the_others_still_end_in_time_and_name_it() -> None:
    ends = {f"n{i}": f"127.0.0.1:{port}" for i, port in enumerate(free(4))}
    begin = time.monotonic()
    more = {"nodes": ends, "rounds": everyone(ends), "together": True}
    results, facts = probe(ends, absent={"n3"}, gloo_s=0.0, start_s=2.0, within_s=20.0, **more)
    assert time.monotonic() - begin < patience(30)
    assert {(result.node, result.peer) for result in results} == set(permutations(ends, 2)) - {
        ("n3", f"n{i}") for i in range(3)
    }
    assert judge(facts).nodes == ("n3",)


def test_gloo_is_tried_along_the_ring_only_where_all_pairs_are_tested() -> None:
    ends = {f"n{i}": f"127.0.0.1:{9000 + i}" for i in range(6)}
    plain = {"me": "n0", "token": "t", "nodes": ends, "rounds": everyone(ends), "together": True}
    assert (len(task_of(plain).partners), set(task_of(plain).near)) == (5, {"n1", "n5"})
    alone = task_of({**plain, "together": False})
    assert alone.near == alone.partners


def test_nodes_that_know_of_their_partners_only_know_each_other_by_name() -> None:
    """Found in a gang of six: datagrams bore a number, which meant another node to each, and ways that were well were cut."""
    ends = {f"n{i}": f"127.0.0.1:{port}" for i, port in enumerate(free(7))}
    results, facts = probe(ends, gloo_s=0.0)
    assert len(results) == 14
    assert all(result.answered and result.heard for result in results), results
    assert set(signs(facts).values()) == {Sign.HEALTHY}, facts


def test_nccl_that_fails_on_the_links_of_a_file_is_told_from_a_broken_network(tmp_path: Path) -> None:
    """The stub stands for NCCL. The same program with another file names another culprit."""
    ends = {f"n{i}": f"127.0.0.1:{port}" for i, port in enumerate(free(4))}
    for broken, nodes in (([["n2", "*"]], ("n2",)), ([["n0", "n1"]], ("n0", "n1"))):
        stub = tmp_path / "nccl.json"
        stub.write_text(json.dumps(broken))
        _, facts = probe(ends, nccl=f"stub:{stub}", gloo_s=0.0)
        verdict = judge(facts)
        assert (verdict.fault, verdict.nodes) == (Fault.FABRIC, nodes), facts


def test_a_node_that_is_not_there_costs_its_partners_their_deadlines_and_is_named() -> None:
    ends = {f"n{i}": f"127.0.0.1:{port}" for i, port in enumerate(free(4))}
    began = time.monotonic()
    _, facts = probe(ends, absent={"n3"}, gloo_s=0.0, start_s=3.0, within_s=12.0)
    assert time.monotonic() - began < patience(30.0)
    verdict = judge(facts)
    assert (verdict.fault, verdict.nodes) == (Fault.NETWORK, ("n3",)), facts


def test_a_task_for_somebody_else_is_refused_and_what_is_no_task_too() -> None:
    with pytest.raises(ValueError, match="who is none of n0"):
        Task(me="n9", token="t", nodes={"n0": "h:1"})
    plain = {"me": "n0", "token": "t", "nodes": {"n0": "h:1", "n1": "h:2"}, "rounds": [[["n0", "n1"]]]}
    assert task_of(plain).partners == ("n1",)
    for text in ("", "[]", '{"me": "n0"}', json.dumps({**plain, "strange": 1})):
        done = subprocess.run(
            [sys.executable, "-m", "elasticrl.diagnose.probe"], input=text, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 2, text
        assert "no task" in done.stderr


def test_what_bears_another_token_is_not_answered() -> None:
    """A probe of an earlier generation must not speak into this one."""
    (port,) = free(1)
    plain = {"me": "n0", "token": "new", "nodes": {"n0": f"127.0.0.1:{port}", "n1": "127.0.0.1:9"}, "gloo_s": 0.0,
             "start_s": 6.0, "within_s": 8.0}  # fmt: skip
    process = subprocess.Popen(
        [sys.executable, "-m", "elasticrl.diagnose.probe"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
    )
    try:
        assert process.stdin is not None
        process.stdin.write(json.dumps(plain))
        process.stdin.close()
        deadline = time.monotonic() + patience(20.0)
        while True:
            try:
                sock = socket.create_connection(("127.0.0.1", port), timeout=5.0)
                break
            except OSError:
                assert time.monotonic() < deadline
                time.sleep(0.05)
        with sock, suppress(OSError):  # it may have hung up by any of these
            sock.sendall(b"8 bytes!B" + b"x" * 1000)
            sock.shutdown(socket.SHUT_WR)
            assert sock.recv(16) == b""
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def net() -> Iterator[Net]:
    if reason := cannot():
        pytest.skip(reason)
    with network(4) as found:
        yield found


def test_a_healthy_network_has_no_culprit(net: Net) -> None:
    _, facts = net.probe()
    assert set(signs(facts).values()) == {Sign.HEALTHY}, facts


def test_a_node_whose_cable_is_out_is_named(net: Net) -> None:
    net.cut("n2")
    _, facts = net.probe(start_s=3.0, within_s=20.0, gloo_s=0.0)
    verdict = judge(facts)
    assert (verdict.fault, verdict.nodes, verdict.confidence) == (Fault.NETWORK, ("n2",), Confidence.HIGH), facts


def test_one_way_loss_names_the_link_and_the_direction(net: Net) -> None:
    net.deafen("n2", "n1")
    _, facts = net.probe(start_s=3.0, within_s=20.0, gloo_s=0.0)
    assert signs(facts)[("n1", "n2")] is Sign.ONE_WAY, facts
    verdict = judge(facts)
    assert (verdict.fault, verdict.nodes) == (Fault.NETWORK, ("n1", "n2"))
    assert "packets from n1 do not arrive at n2" in verdict.cause


def test_an_mtu_black_hole_is_told_from_a_cut_and_named(net: Net) -> None:
    net.narrow("n3", 1000)
    _, facts = net.probe(start_s=3.0, within_s=20.0, gloo_s=0.0)
    verdict = judge(facts)
    assert (verdict.fault, verdict.nodes) == (Fault.NETWORK, ("n3",)), facts
    assert "MTU black hole" in verdict.cause
    assert "over 1000 bytes vanish" in verdict.cause


def test_a_node_that_is_200_ms_away_is_named(net: Net) -> None:
    if not Path("/dev/net/tun").exists():
        pytest.skip("there is no /dev/net/tun to delay frames with")
    with net.delayed("n1", 100.0):  # each way
        _, facts = net.probe(within_s=40.0, gloo_s=0.0)
    verdict = judge(facts)
    assert (verdict.fault, verdict.nodes) == (Fault.NETWORK, ("n1",)), facts
    assert "answers late" in verdict.cause


def test_a_node_that_is_only_slow_is_the_odd_one_of_all_pairs_and_no_fault(net: Net) -> None:
    if not Path("/dev/net/tun").exists():
        pytest.skip("there is no /dev/net/tun to delay frames with")
    with net.delayed("n2", 5.0):
        ends = {node: f"{net.address(node)}:7733" for node in net.nodes}
        results, facts = net.probe(within_s=30.0, gloo_s=0.0, nodes=ends, rounds=everyone(ends), together=True)
    odd = late(trips(results))
    assert odd is not None
    assert (odd.said, odd.worst > 10.0) == ("n2", True), odd
    assert judge(facts).nodes == ()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_where_no_gpu_is_to_be_seen_nccl_is_not_called_broken() -> None:
    """As in a unit that hides devices, and where one node's driver is gone: the way was not tried."""
    ends = {f"n{i}": f"127.0.0.1:{port}" for i, port in enumerate(free(2))}
    results, facts = probe(ends, nccl="on", within_s=patience(20.0), gloo_s=patience(4.0))
    assert [(result.gloo, result.nccl) for result in results] == [("ok", None)] * 2
    assert signs(facts) == {("n0", "n1"): Sign.HEALTHY}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_nccl_is_tried_where_there_are_gpus_and_says_which_way_it_took(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "lo")
    ends = {f"n{i}": f"127.0.0.1:{port}" for i, port in enumerate(free(2))}
    results, facts = probe(ends, nccl="on", within_s=40.0, gloo_s=12.0)
    assert [(result.gloo, result.nccl, result.transport) for result in results] == [("ok", "ok", "NET/Socket")] * 2
    assert signs(facts) == {("n0", "n1"): Sign.HEALTHY}
    monkeypatch.setenv("NCCL_NET", "IB")  # which is not there
    results, facts = probe(ends, nccl="on", within_s=40.0, gloo_s=12.0)
    assert {result.gloo for result in results} == {"ok"}
    assert all("NET plugin" in str(result.nccl) for result in results), results
    assert judge(facts).fault is Fault.FABRIC
