"""The small parts of a node's live inquiry, without a daemon."""

import asyncio
import io
import json
import os
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from core_kit import record
from diagnosis_kit import NODES, capped, leader

from chaos.patience import patience
from elasticrl.agent.gather import Beating, Stride
from elasticrl.agent.spec import Spec
from elasticrl.agent.spec import environment as environment_of
from elasticrl.config import Tree
from elasticrl.config.cluster import Job
from elasticrl.contract.beats import Beat, Page, Snapshot, Stage
from elasticrl.contract.events import Event, Found, Probe, Probed, Tick
from elasticrl.contract.evidence import Evidence, Kind, Sign
from elasticrl.contract.model import Phase, Work
from elasticrl.contract.settings import Health
from elasticrl.contract.verdict import Confidence, Fault, Verdict, surest
from elasticrl.contract.wire import Report, Worker
from elasticrl.core.node import dossier
from elasticrl.daemon import incidents, inquiry
from elasticrl.daemon.history import History
from elasticrl.daemon.inquiry import Inquiry, of_its_gang
from elasticrl.daemon.links import Reserved, Ways, results_of
from elasticrl.daemon.machine import HUNG_S
from elasticrl.daemon.secret import probe_token
from elasticrl.daemon.shared import Desk, Site
from elasticrl.diagnose import environment, health, incident, nvidia
from elasticrl.diagnose.probe import HEAD, digest
from elasticrl.diagnose.tail import Tail
from elasticrl.telemetry.log import set_up


def joined(node: Inquiry, post: Any = lambda _: None, state: Any = None) -> None:
    """Somebody hears what it finds out."""
    node.join(post, state, kept=lambda *_: None, latency=dict)


def test_a_logs_line_speaks_of_the_gang_whose_log_it_is() -> None:
    line = Evidence(kind=Kind.EXCEPTION, sign=Sign.PROGRAM, source="/var/log/j/n0/attempt_14/rank_3.log")
    assert of_its_gang(line).generation == 14
    assert of_its_gang(Evidence(kind=Kind.XID, sign=Sign.GPU_BROKEN, source="kernel")).generation is None


def test_what_a_probe_prints_beside_its_results_is_passed_over() -> None:
    said = [b"warning: x\n", b'{"node": "a", "peer": "b", "tcp": "ok"}\n', b"{}\n"]
    assert [(result.node, result.tcp) for result in results_of(said)] == [("a", "ok")]


def test_a_probe_bears_what_nobody_without_the_secret_can_guess(tmp_path: Path) -> None:
    """Found by reading: it bore the job's name and the generation, and a forged answer can cost a node its seat."""
    secret = b"s" * 32
    place = Site(node="n0", job="toy", host="127.0.0.1", runtime=tmp_path, state=tmp_path, disks={})

    async def asked() -> bytes:
        desk = Desk(Tree(job=Job(name="toy")), place, SimpleNamespace(info=lambda *_, **__: None))
        desk.post = lambda _: None
        ways = Ways(desk)
        ways.secret = secret
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as peer:
            peer.bind(("127.0.0.1", 0))
            peer.setblocking(False)
            nodes = {"n0": ways.open(0), "n1": f"127.0.0.1:{peer.getsockname()[1]}"}
            ways.answer(Probe(generation=7, targets={"n1": ""}, nodes=nodes, pairs=(("n0", "n1"),)), ())
            try:
                return await asyncio.wait_for(asyncio.get_running_loop().sock_recv(peer, 1 << 16), 60.0)
            finally:
                await desk.clear()
                ways.close()

    token = HEAD.unpack_from(asyncio.run(asked()))[2]
    assert token == digest(probe_token(secret, 7))
    assert token not in {digest("toy/g7"), digest(probe_token(secret, 8)), digest(probe_token(b"t" * 32, 7))}


def test_a_probe_whose_process_cannot_be_started_says_so_at_once_and_keeps_its_port(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The leader waited for its results until the probe's time was over, and anybody could take the port.
    monkeypatch.setattr(sys, "executable", str(tmp_path / "nothing"))
    place = Site(node="n0", job="toy", host="127.0.0.1", runtime=tmp_path, state=tmp_path, disks={})
    screen, told = io.StringIO(), list[Event]()

    async def answered() -> bool:
        desk = Desk(Tree(job=Job(name="toy")), place, set_up(screen, pretty=False))
        desk.post = told.append
        ways = Ways(desk)
        nodes = {"n0": ways.open(0), "n1": "127.0.0.1:9"}
        ways.answer(Probe(generation=7, targets={"n1": ""}, nodes=nodes, pairs=(("n0", "n1"),)), ())
        try:
            async with asyncio.timeout(patience(10.0)):
                while desk._tasks:  # noqa: ASYNC110 - the desk tells nobody
                    await asyncio.sleep(0.01)
            return ways._port is not None and ways._port.held
        finally:
            ways.close()

    assert asyncio.run(answered()), "somebody else may have the port by now"
    assert "bug" not in screen.getvalue()
    first, last = (event for event in told if isinstance(event, Probed))
    assert (first.more, last.more, last.results) == (True, False, ())
    (line,) = map(json.loads, screen.getvalue().splitlines())
    assert line["said"] == "the test's process cannot be started (No such file or directory)"


def test_a_look_that_fails_keeps_no_other_one_back_and_begins_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A machine that gives no more threads made its daemon blind for good: no log was read any more.
    monkeypatch.setattr(inquiry, "AGAIN_S", 0.02)
    place = machine_of(tmp_path, {"proc/meminfo": b"MemTotal: 1000 kB\nMemAvailable: 1 kB\n"})  # which each look tells
    screen = io.StringIO()
    tree = Tree.model_validate({"job": {"name": "j"}, "health": {"sample": "20ms"}})
    node = Inquiry(tree, place, log=set_up(screen, pretty=False), history=History())
    told: set[Sign] = set()
    looked, sample = list[str](), node.machine.sample

    async def fails_once() -> None:
        looked.append("health")
        if len(looked) == 1:
            raise RuntimeError("can't start new thread")
        await sample()

    monkeypatch.setattr(node.machine, "sample", fails_once)
    log = tmp_path / "attempt_1" / "rank_0.log"
    log.parent.mkdir()
    log.touch()

    async def live() -> None:
        both = asyncio.Event()

        def post(event: Event) -> None:
            assert isinstance(event, Found)
            told.update(fact.sign for fact in event.evidence if fact.sign)
            if told >= {Sign.HOST_MEMORY, Sign.GPU_MEMORY}:
                both.set()

        joined(node, post)
        running = asyncio.create_task(node.run({}))
        worker = Worker(rank=0, slot=0, pid=1, started=1, beat="", log=str(log))
        node.heard(Report(work=Work.TRAINING, generation=1, workers=(worker,), pid=1))
        async with asyncio.timeout(patience(20.0)):
            while not looked:  # noqa: ASYNC110 - until it has failed
                await asyncio.sleep(0.01)
            log.write_text("torch.OutOfMemoryError: CUDA out of memory.\n")
            await both.wait()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    asyncio.run(live())
    bugs = [line for text in screen.getvalue().splitlines() if (line := json.loads(text))["event"] == "bug"]
    assert [bug["action"] for bug in bugs] == ["inquiry"], "it is said, and once"


def test_a_reserved_port_is_free_for_the_probe_and_for_nobody_else() -> None:
    port = Reserved("127.0.0.1", 0)
    host, _, number = port.address.rpartition(":")
    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
        with socket.socket(socket.AF_INET, kind) as other:
            try:
                other.bind((host, int(number)))
            except OSError:
                continue
            raise AssertionError(f"{kind} is free")
    port.release()
    with socket.socket() as probe:
        probe.bind((host, int(number)))
    port.keep()
    assert port.address == f"{host}:{number}"
    port.close()


#: In a network of its own, with eight ports to choose from, of which two are somebody else's for datagrams.
FEW_PORTS = """
import socket
from pathlib import Path
from elasticrl.base.address import split
from elasticrl.daemon.links import Reserved
Path("/proc/sys/net/ipv4/ip_local_port_range").write_text("50000 50007")
taken = [socket.socket(socket.AF_INET, socket.SOCK_DGRAM) for _ in range(2)]
for number, sock in enumerate(taken, 50000):
    sock.bind(("0.0.0.0", number))
for _ in range(20):
    port = Reserved("0.0.0.0", 0)
    assert len(port._held) == 2 and split(port.address)[1] > 50001, port.address
    port.release()
    port.keep()
    assert {sock.getsockname()[1] for sock in port._held} == {split(port.address)[1]}
    port.close()
"""


def test_a_port_that_somebody_has_for_datagrams_alone_is_not_tried_again_and_again() -> None:
    command = ["unshare", "--net", sys.executable, "-c", FEW_PORTS]
    if os.geteuid() != 0 or subprocess.run(["unshare", "--net", "true"], capture_output=True).returncode != 0:
        pytest.skip("a network of its own needs root")
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_the_surest_verdict_is_told_and_of_equals_the_first() -> None:
    def told(fault: Fault, confidence: Confidence) -> Verdict:
        return Verdict(fault=fault, cause="x", confidence=confidence)

    unknown, low = told(Fault.UNKNOWN, Confidence.HIGH), told(Fault.NETWORK, Confidence.LOW)
    high, also = told(Fault.DESYNC, Confidence.HIGH), told(Fault.DISK, Confidence.HIGH)
    assert surest([unknown, low, high, also]) is high
    assert surest([unknown]) is unknown


def test_the_log_lines_since_a_moment() -> None:
    history = History()
    for second in (10, 20, 30):
        history(None, "info", {"event": "e", "at": f"2026-11-21T20:34:{second}.500000Z"})
    found = history.since(datetime(2026, 11, 21, 20, 34, 15, tzinfo=UTC))
    assert [line["at"][17:19] for line in found] == ["20", "30"]


def test_the_last_words_of_a_rank_that_is_not_followed_any_more_are_read(tmp_path: Path) -> None:
    log = tmp_path / "rank_0.log"
    log.write_text("")
    tail = Tail(node="n0")
    tail.follow({0: log})
    log.write_text("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n")
    tail.follow({})
    assert {fact.sign for fact in tail.look(5.0)} == {Sign.GPU_MEMORY}
    assert tail.look(6.0) == []


def test_a_page_tells_what_a_worker_has_spent_on_its_own_work_and_not_what_it_waited(tmp_path: Path) -> None:
    beat = Beat(tmp_path / "page")
    beat.training()
    beat.phase("rollout")
    beat.phase("update")
    beat.collective(1, "all_reduce")
    waiting_from = dict(beat.now.spent)["update"]
    beat.arrived()
    assert dict(beat.now.spent)["update"] == waiting_from, "nobody worked meanwhile"
    beat.phase("save")
    read = Page(tmp_path / "page").read()
    assert read is not None
    assert [name for name, _ in read.spent] == ["rollout", "update"]


def test_a_steps_time_is_what_was_spent_between_two_looks_by_the_steps_that_were_made() -> None:
    def seen(step: int, spent: float, pid: int = 7) -> list[Beating]:
        beat = Snapshot(generation=3, step=step, pid=pid, state=Stage.TRAINING, spent=(("update", spent),))
        return [Beating(slot=0, beat=beat)]

    first = Stride().after(seen(10, 1.0), 0.0, 1.0)
    assert first.took == ()
    assert first.after(seen(12, 1.4), 0.5, 1.0) is first, "too soon"
    later = first.after(seen(14, 1.8), 1.0, 1.0)
    assert [(pace.slot, pace.phase, pace.seconds) for pace in later.took] == [(0, "update", 0.2)]
    assert later.after(seen(14, 1.9), 2.5, 1.0) is later, "no step was made"
    assert later.after(seen(3, 0.1, pid=8), 3.0, 1.0).took == (), "another process"


def machine_of(folder: Path, files: dict[str, bytes]) -> Site:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return Site(node="n00", job="j", host="127.0.0.1", runtime=folder, state=folder, disks={}, root=folder)


def test_sockets_on_a_node_with_active_rdma_ports_are_said_once_and_elsewhere_not(tmp_path: Path) -> None:
    port = "sys/class/infiniband/mlx5_0/ports/1/"
    for state, expected in (
        (b"4: ACTIVE\n", ["NCCL goes over sockets, and mlx5_0:1 is an active RDMA port"]),
        (b"1: DOWN\n", []),
    ):
        place = machine_of(tmp_path, {port + "state": state, port + "link_layer": b"InfiniBand\n"})
        screen = io.StringIO()
        node = Inquiry(Tree(job=Job(name="j")), place, log=set_up(screen, pretty=False), history=History())
        for ways in ({"P2P"}, {"NET/Socket+P2P"}, {"NET/Socket+P2P"}, set[str]()):
            node.ways.note_sockets(ways)
        said = [json.loads(line) for line in screen.getvalue().splitlines()]
        assert [line["said"] for line in said if line["event"] == "transport.sockets"] == expected
        assert all(line["remedy"] for line in said)


def test_what_a_worker_has_written_before_its_daemon_hears_of_it_is_read_and_an_adopted_ones_is_not(
    tmp_path: Path,
) -> None:
    node = Inquiry(
        Tree(job=Job(name="j")), machine_of(tmp_path, {}), log=set_up(io.StringIO(), pretty=False), history=History()
    )
    told: list[Event] = []

    def attempt(generation: int, said: str) -> Report:
        log = tmp_path / f"attempt_{generation}" / "rank_0.log"
        log.parent.mkdir()
        log.write_text(said)
        worker = Worker(rank=0, slot=0, pid=1, started=1, beat="", log=str(log))
        return Report(work=Work.PARKED, generation=generation, workers=(worker,), pid=1)

    async def hear() -> None:
        heard = asyncio.Event()
        joined(node, lambda event: (told.append(event), heard.set()))
        reading = asyncio.create_task(node._read_logs())
        node.heard(attempt(1, "torch.OutOfMemoryError: CUDA out of memory.\n"))
        await asyncio.sleep(0.3)
        node.heard(attempt(2, "RuntimeError: ifa != nullptr. Unable to find address for: eth9\n"))
        await asyncio.wait_for(heard.wait(), 10.0)
        reading.cancel()
        node.heard(None)

    asyncio.run(hear())
    (found,) = told
    assert isinstance(found, Found)
    assert [(fact.sign, fact.generation) for fact in found.evidence] == [(Sign.SETTING, 2)]


def test_gpus_that_cannot_be_asked_are_told_of_once(tmp_path: Path) -> None:
    if (health.ROOT / nvidia.NVIDIA).exists():
        pytest.skip("this machine has a GPU")
    screen = io.StringIO()
    place = machine_of(tmp_path, {nvidia.NVIDIA: b"NVRM version: 1\n"})
    node = Inquiry(Tree(job=Job(name="j")), place, log=set_up(screen, pretty=False), history=History())

    async def look() -> None:
        for _ in range(3):
            await node.machine.ask_all()

    asyncio.run(look())
    (said,) = [line for text in screen.getvalue().splitlines() if (line := json.loads(text))["event"] == "cards.unseen"]
    assert "a driver, but" in said["said"]
    assert said["level"] == "warning"


def test_a_gpu_that_has_gone_from_the_bus_is_found_by_the_daemon_which_does_not_look_at_each_sample(
    tmp_path: Path,
) -> None:
    card = "sys/bus/pci/devices/0000:1b:00.0/"
    place = machine_of(
        tmp_path,
        {
            card + "vendor": b"0x10de\n",
            card + "class": b"0x030200\n",
            card + "config": b"\xff" * 64,
            card + "driver/x": b"",
        },
    )
    node = Inquiry(Tree(job=Job(name="j")), place, log=set_up(io.StringIO(), pretty=False), history=History())
    asyncio.run(node.machine.ask_all())
    _, facts, _ = node.machine.look(health.counters(0.0, tmp_path))
    (broken,) = (fact for fact in facts if fact.sign is Sign.GPU_BROKEN)
    assert (broken.node, broken.source) == ("n00", dossier.HEALTH)
    (tmp_path / card / "config").write_bytes(bytes.fromhex("de103023"))
    asyncio.run(node.machine.ask_all())
    assert broken in node.machine.look(health.counters(0.0, tmp_path))[1], "it was looked at a moment ago"
    node.machine._due.clear()  # two minutes later
    asyncio.run(node.machine.ask_all())
    assert Sign.HEALTHY in {fact.sign for fact in node.machine.look(health.counters(0.0, tmp_path))[1]}, (
        "and is taken back"
    )


def test_a_disk_that_hangs_is_broken_after_a_while_and_keeps_no_other_fact_back(tmp_path: Path) -> None:
    little = b"MemTotal: 1000 kB\nMemAvailable: 1 kB\n"
    place = replace(machine_of(tmp_path, {"proc/meminfo": little}), disks={"checkpoint": tmp_path / "saves"})
    node = Inquiry(Tree(job=Job(name="j")), place, log=set_up(io.StringIO(), pretty=False), history=History())

    def signs() -> set[Sign]:
        return {fact.sign for fact in node.machine.look(health.counters(0.0, tmp_path))[1]}

    asyncio.run(node.machine.ask_all())
    assert Sign.DISK_BROKEN not in signs(), "it is there, and answers"
    node.machine._asked["checkpoint"] = time.monotonic() - HUNG_S - 1.0
    assert {Sign.DISK_BROKEN, Sign.HOST_MEMORY} <= signs()
    del node.machine._asked["checkpoint"]
    assert Sign.DISK_BROKEN not in signs()


def test_a_gpu_driver_that_hangs_is_asked_once_and_nothing_else_waits_for_it_nor_does_this_nodes_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = b"3,1,1000000,-;NVRM: Xid (PCI:0000:07:00): 48, pid=9, an uncorrectable error\n"
    new = b"3,339,512200417,-;NVRM: Xid (PCI:0000:44:00): 79, pid=1, GPU has fallen off the bus\n"
    little = b"MemTotal: 1000 kB\nMemAvailable: 1 kB\n"  # which each look tells again
    place = machine_of(tmp_path, {"dev/kmsg": old, "proc/meminfo": little, nvidia.NVIDIA: b"NVRM version: 1\n"})
    asked, over = list[float](), threading.Event()

    def hang() -> None:
        asked.append(time.monotonic())
        over.wait(30.0)

    monkeypatch.setitem(sys.modules, "pynvml", SimpleNamespace(nvmlInit=hang, NVMLError=OSError))
    tree = Tree.model_validate({"job": {"name": "j"}, "health": {"sample": "20ms"}})
    node = Inquiry(tree, place, log=set_up(io.StringIO(), pretty=False), history=History())
    told: list[Evidence] = []

    def seen(sign: Sign) -> list[Evidence]:
        return [fact for fact in told if fact.sign is sign]

    async def live() -> None:
        looked, heard = asyncio.Event(), asyncio.Event()

        def post(event: Event) -> None:
            assert isinstance(event, Found)
            told.extend(event.evidence)
            if asked and len(seen(Sign.HOST_MEMORY)) >= 5:
                looked.set()
            if seen(Sign.GPU_BROKEN):
                heard.set()

        joined(node, post)
        running = asyncio.create_task(node.run({}))
        async with asyncio.timeout(patience(20.0)):
            await looked.wait()
            with (tmp_path / "dev/kmsg").open("ab") as ring:
                ring.write(new)
            await heard.wait()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    begun = time.monotonic()
    try:
        asyncio.run(live())
        assert time.monotonic() - begun < patience(20.0), "its end has waited"
    finally:
        over.set()
    assert len(asked) == 1
    assert [(fact.node, "79" in fact.line) for fact in seen(Sign.GPU_BROKEN)] == [("n00", True)]


def test_a_node_that_comes_back_with_the_others_torch_is_not_said_to_have_another(tmp_path: Path) -> None:
    life, posted = leader(), []
    place = Site(node="n00", job="j", host="127.0.0.1", runtime=tmp_path, state=tmp_path, disks={})
    node = Inquiry(Tree(job=Job(name="j")), place, log=set_up(io.StringIO(), pretty=False), history=History())
    joined(node, posted.append, lambda: life.state)

    def seen(torch: str) -> dossier.Filed:
        claims = {
            name: record(name, bits=json.dumps({"torch": torch if name == "n01" else "2.13.0"})) for name in NODES
        }
        life.state = life.state.but(view=replace(life.state.view, records=claims))
        posted.clear()
        node.comparison.decided(life.state)
        return tuple(fact for event in posted for fact in event.evidence)

    known = dossier.file((), seen("2.9.1"), 1.0)
    assert [(fact.sign, fact.node) for fact in known] == [(Sign.VERSIONS, "n01")]
    assert seen("2.9.1") == (), "it is told once"
    well = dossier.file(known, seen("2.13.0"), 2.0)
    assert [fact.sign for fact in well] == [Sign.HEALTHY], "it has been taken back"
    again = dossier.file(well, seen("2.9.1"), 3.0)
    assert [fact.sign for fact in again] == [Sign.VERSIONS]


@pytest.mark.parametrize("recovers", [False, True], ids=["it stays so", "a plan follows"])
def test_what_a_cap_forbids_is_an_incident_though_no_recovery_ends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recovers: bool
) -> None:
    monkeypatch.setattr(incidents, "LATER_S", 0.1)
    life, history, screen = (
        leader({"gpu_fault": "quarantine"}, health=Health(quarantine_share=0.1)),
        History(),
        io.StringIO(),
    )
    place = Site(node="n00", job="j", host="127.0.0.1", runtime=tmp_path, state=tmp_path, disks={})

    async def found() -> None:
        log = set_up(screen, pretty=False, tap=history)
        node = Inquiry(Tree(job=Job(name="j")), place, log=log, history=history)
        joined(node, state=lambda: life.state)
        for action in capped(life, 2.0):
            log.info(action.event, **action.fields)
        node.decided(Tick(now=2.0), life.state, None)
        if recovers:
            plan = replace(life.view.plan, generation=2, phase=Phase.HOLD)
            life.seen(2.05, "another plan", plan=plan, plan_revision=20)
        await asyncio.sleep(0.4)

    asyncio.run(found())
    kept, unread = incident.found([incident.folder_of(tmp_path, "j", "n00")])
    assert not unread
    assert "bug" not in screen.getvalue()
    assert len(kept) == (0 if recovers else 1)
    if kept:
        assert (kept[0].verdict.fault, kept[0].verdict.nodes, kept[0].generation) == (Fault.GPU_FAULT, ("n01",), 1)
        assert "n01 is not kept out: policy says quarantine, and no more than 0 nodes" in incident.page(kept[0])


def test_a_disk_that_takes_long_to_keep_an_incident_holds_nobody_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Found by reading: beats and lease waited for it, just after a recovery, while checkpoints went to the same disk.
    monkeypatch.setattr(incidents, "LATER_S", 0.0)
    sync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda file: (time.sleep(0.6), sync(file)))
    life, history = leader({"gpu_fault": "quarantine"}, health=Health(quarantine_share=0.1)), History()
    place = Site(node="n00", job="j", host="127.0.0.1", runtime=tmp_path, state=tmp_path, disks={})

    async def longest() -> float:
        log = set_up(io.StringIO(), pretty=False, tap=history)
        node = Inquiry(Tree(job=Job(name="j")), place, log=log, history=history)
        joined(node, state=lambda: life.state)
        running = asyncio.create_task(node.run({}))
        await asyncio.sleep(0.1)
        for action in capped(life, 2.0):
            log.info(action.event, **action.fields)
        node.decided(Tick(now=2.0), life.state, None)
        ticks = [time.monotonic()]
        while ticks[-1] < ticks[0] + 0.3:
            await asyncio.sleep(0.01)
            ticks.append(time.monotonic())
        running.cancel()  # the daemon's end waits for what is being written
        await asyncio.gather(running, return_exceptions=True)
        return max(late - early for early, late in pairwise(ticks))

    assert asyncio.run(longest()) < 0.3
    kept, _ = incident.found([incident.folder_of(tmp_path, "j", "n00")])
    assert len(kept) == 1


def test_the_linter_speaks_of_what_the_operator_has_set_and_not_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in list(os.environ):
        if name.startswith(("NCCL_", "TORCH_NCCL_", "RCCL_")):
            monkeypatch.delenv(name)
    conf = {"job": {"name": "j"}, "comm": {"profile": "ethernet"}, "agent": {"env": {"NCCL_TIMEOUT": "1800"}}}
    tree, screen = Tree.model_validate(conf), io.StringIO()
    place = Site(node="n00", job="j", host="127.0.0.1", runtime=tmp_path, state=tmp_path, disks={})
    added = environment.PROFILES["ethernet"].apply({})
    spec = Spec(job="j", node="n00", program=("x.py",), log_dir=str(tmp_path), env={**added, **tree.agent.env})
    Inquiry(tree, place, log=set_up(screen, pretty=False), history=History()).lint(environment_of(spec))
    said = [json.loads(line) for line in screen.getvalue().splitlines()]
    warned = [line["name"] for line in said if line["event"] == "environment.warning"]
    assert "NCCL_TIMEOUT" in warned
    assert "TORCH_NCCL_ASYNC_ERROR_HANDLING" not in warned
    (profile,) = [line for line in said if line["event"] == "environment.profile"]
    assert profile["added"] == [f"{name}={value}" for name, value in sorted(added.items())]
