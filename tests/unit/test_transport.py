"""Which way NCCL says it took."""

import json
from pathlib import Path

import pytest
import typer
from logs_kit import parse
from typer.testing import CliRunner

from elasticrl.cli import diagnose
from elasticrl.contract.evidence import Sign
from elasticrl.diagnose.logs import Parser
from elasticrl.diagnose.tail import Tail
from elasticrl.diagnose.transport import Ways, sockets

#: As NCCL 2.18 to 2.27 write it, with what launchers put before it.
IB = """\
node-a:4121:4121 [0] NCCL INFO Bootstrap : Using eth0:10.0.0.1<0>
node-a:4121:4209 [0] NCCL INFO NCCL_IB_HCA set to mlx5
node-a:4121:4209 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB/SHARP [1]mlx5_1:1/IB [RO]; OOB eth0:10.0.0.1<0>
node-a:4121:4209 [0] NCCL INFO Using network IB
node-a:4121:4209 [0] NCCL INFO comm 0x55d1 rank 0 nranks 16 cudaDev 0 nvmlDev 0 busId 1b000 commId 0x91 - Init START
node-a:4121:4209 [0] NCCL INFO Channel 00/04 :    0   7   6   5   4   3   2   1   8
node-a:4121:4209 [0] NCCL INFO Channel 02/0 : 15[7] -> 0[0] [receive] via NET/IB/0/GDRDMA
node-a:4121:4209 [0] NCCL INFO Channel 00/0 : 0[0] -> 7[7] via P2P/CUMEM/read
"""
FALLEN = """\
(WorkerDict pid=81, ip=10.0.0.9) node-b:81:120 [3] NCCL INFO NCCL_IB_HCA set by environment to =mlx5_0,mlx5_1
[rank3]: node-b:81:120 [3] NCCL INFO NET/IB : No device found.
node-b:81:120 [3] NCCL INFO NET/Socket : Using [0]eth0:10.0.0.9<0>
node-b:81:120 [3] NCCL INFO Using network Socket
node-b:81:120 [3] NCCL INFO Channel 00/0 : 3[3] -> 4[0] [send] via NET/Socket/0
node-b:81:120 [3] NCCL INFO Channel 00 : 3[3] -> 2[2] via SHM/direct/direct
"""


def test_nccls_own_lines_say_which_way_it_took_and_who_said_so() -> None:
    ways = Ways()
    ways.read(IB.encode())
    assert ways.plain() == {"NET/IB": ["node-a"], "P2P": ["node-a"]}
    assert ways.fallen == ""
    ways.read(FALLEN.encode())
    assert ways.said == "NET/IB (node-a), NET/Socket (node-b), P2P (node-a), SHM (node-b)"
    assert ways.fallen == "node-b took sockets, and had NCCL_IB_HCA==mlx5_0,mlx5_1"


def test_sockets_where_nothing_better_is_known_of_are_no_fault() -> None:
    ways = Ways()
    ways.read("\n".join(line for line in FALLEN.splitlines() if "IB_HCA" not in line).encode())
    assert (ways.said, ways.fallen) == ("NET/Socket (node-b), SHM (node-b)", "")


def test_these_lines_are_no_evidence_and_are_found_in_pieces_too() -> None:
    assert {fact.sign for fact in parse(IB + FALLEN)} <= {Sign.NOISE}
    parser = Parser()
    for byte in range(0, len(IB), 7):
        parser.feed(IB.encode()[byte : byte + 7])
    parser.flush()
    assert parser.ways.plain() == {"NET/IB": ["node-a"], "P2P": ["node-a"]}


@pytest.mark.parametrize(
    "text", ["via NET/Socket/0", "NCCL INFO", "NCCL INFO Using network ", "NCCL INFO ] via P2P", "\0" * 99]
)
def test_pieces_of_such_lines_break_nothing(text: str) -> None:
    ways = Ways()
    ways.read(text.encode())
    assert (set(ways.chosen) <= {"P2P"}, ways.fallen, "?" in ways.said) == (True, "", False)


def test_who_writes_like_nccl_is_not_taken_for_it_and_who_is_unknown_is_named_by_nobody() -> None:
    ways = Ways()
    ways.read(
        b"NCCL INFO Using network Socket\nmy router: [2] via SHM\nNCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/IPC\n"
    )
    assert (ways.said, ways.fallen) == ("NET/Socket, P2P", "")


def test_diagnose_says_it_beside_the_verdict(tmp_path: Path) -> None:
    (tmp_path / "rank_0.log").write_text(IB)
    (tmp_path / "rank_3.log").write_text(FALLEN)
    app = typer.Typer()
    app.callback()(lambda: None)
    diagnose.register(app)
    page = CliRunner().invoke(app, ["diagnose", "--log", str(tmp_path)]).stdout
    assert "NCCL        chose NET/IB (node-a), NET/Socket (node-b), P2P (node-a), SHM (node-b)" in page
    assert "node-b took sockets" in page
    answer = json.loads(CliRunner().invoke(app, ["diagnose", "--log", str(tmp_path), "--json"]).stdout)
    assert answer["transport"]["NET/Socket"] == ["node-b"]
    assert answer["sockets"].startswith("node-b took sockets")
    assert answer["verdict"]["class"] == "unknown"


def test_workers_logs_are_asked_while_they_are_written(tmp_path: Path) -> None:
    log = tmp_path / "rank_3.log"
    log.write_text("")
    tail = Tail(node="n0")
    tail.follow({3: log})
    assert tail.ways == frozenset()
    log.write_text(FALLEN)
    tail.look(1.0)
    tail.look(2.0)
    assert tail.ways == {"NET/Socket", "SHM"}
    tail.close()


def test_sockets_beside_active_ports_are_told_and_nothing_else_is() -> None:
    assert sockets({"NET/Socket", "P2P"}, {"mlx5_0:1"}) == "NCCL goes over sockets, and mlx5_0:1 is an active RDMA port"
    assert "are active" in sockets({"NET/Socket+P2P"}, {"mlx5_0:1", "mlx5_1:1"})
    assert sockets({"NET/IB", "P2P"}, {"mlx5_0:1"}) == ""
    assert sockets({"NET/Socket"}, ()) == ""
