"""Log lines become evidence: every shape since torch 1.8, however a terminal or a launcher mangled it."""

# ruff: noqa: E501, ISC004 -- a line of a log is as long as it is

import time
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from logs_kit import parse

from chaos.patience import patience
from elasticrl.contract.evidence import Evidence, Kind, Sign
from elasticrl.contract.verdict import Confidence, Fault, Known
from elasticrl.core.judge.judge import judge
from elasticrl.diagnose.logs import Parser, node_of, rank_of, read

HERE = Path(__file__).parent.parent
OWN = sorted((HERE / "data" / "nccl_logs").glob("*.txt"))
#: Real excerpts, where they lie beside the checkout; what their threads proved, as classes.
SHARED = HERE.parent.parent / "shared" / "nccl_logs"
PROVEN = {
    "ecc_accelerate1192": {"gpu_fault"}, "elastic_store_lost_67742": {"coordinator"}, "nccl_oom_opensora386": {"oom_gpu"},
    "nccl_remoteerror_ib5_deepep106": {"dead_rank"}, "nccl_ib_status12_vendor129_1814": {"network"},
    "nccl_ibv_modify_qp_nodevice_925": {"network"}, "nccl_mismatch_296": {"desync"},
    "pgwrapper_opendde23_shape_mismatch": {"desync"}, "rccl_1026_warn_noise": {"unknown"},
    "t1.12_megatron1051_dataprovider": {"host_hang"}, "t2.03_llamacookbook567_split_seed": {"desync"},
    "t2.04_particleflow390_rank0_only_test": {"host_hang", "desync"}, "t2.05_diffsynth458_coalesced": {"desync"},
    "t2.05_motip52_mmap_hostmem": {"oom_host"}, "t2.09_automodel1038_consolidation_60s": {"config", "host_hang"},
    "xid79_nvsentinel155": {"gpu_fault"},
}  # fmt: skip

LINE = (
    "[rank7]:[E419 10:42:28.858931807 ProcessGroupNCCL.cpp:616] [Rank 7] Watchdog caught collective operation timeout: "
    "WorkNCCL(SeqNum=4486, OpType=ALLTOALL, NumelIn=1048576, NumelOut=2097152, Timeout(ms)=600000) ran for 600013 "
    "milliseconds before timing out."
)
SEEN = Evidence(
    kind=Kind.WATCHDOG_TIMEOUT, sign=Sign.WAITED, rank=7, op="ALLTOALL", seq=4486, numel_in=1048576, numel_out=2097152,
    timeout_ms=600000, elapsed_ms=600013,
)  # fmt: skip
FIELDS = ("kind", "rank", "op", "seq", "numel_in", "numel_out", "timeout_ms", "elapsed_ms")


def fields(fact: Evidence) -> tuple[object, ...]:
    return tuple(getattr(fact, name) for name in FIELDS)


def timeouts(text: str) -> list[Evidence]:
    return [fact for fact in parse(text) if fact.kind is Kind.WATCHDOG_TIMEOUT]


def labelled(path: Path) -> tuple[dict[str, str], str]:
    head, body = path.read_text().split("---\n", 1)
    labels = dict(line[2:].partition(":")[::2] for line in head.splitlines())
    return {key: value.strip() for key, value in labels.items()}, body


@pytest.mark.parametrize("path", OWN, ids=lambda path: path.stem)
def test_each_case_gets_its_class_and_never_an_innocent_culprit(path: Path) -> None:
    labels, body = labelled(path)
    parser = Parser(source=path.name)
    verdict = judge(parser.read(body.encode()), Known(heard=frozenset(parser.ranks)))
    assert verdict.fault == labels["class"], verdict.cause
    assert verdict.ranks == tuple(map(int, labels["ranks"].split()))
    assert not labels["nodes"] or verdict.nodes == tuple(labels["nodes"].split())
    assert "localhost" not in verdict.nodes  # it may be any process of that machine
    assert verdict.fault is Fault.UNKNOWN or verdict.because
    assert verdict.remedy


@pytest.mark.parametrize("path", OWN, ids=lambda path: path.stem)
def test_a_case_reads_the_same_behind_its_label_in_small_pieces_and_as_a_file(path: Path) -> None:
    _, body = labelled(path)
    whole = Parser().read(body.encode())
    pieces = Parser()
    found = [fact for i in range(0, len(body), 97) for fact in pieces.feed(body.encode()[i : i + 97])] + pieces.flush()
    assert found == whole
    with_label = [fact.line for fact in read([path]).evidence]
    assert with_label == [fact.line for fact in whole]


def test_the_real_excerpts_beside_the_checkout_are_read_whole_and_judged_right() -> None:
    """Where they are not there, the cases above, of the same shapes, stand for them."""
    right = 0
    present = sorted(SHARED.glob("*.txt"))
    for path in present:
        _, body = labelled(path)
        verdict = judge(Parser(source=path.name).read(body.encode()))
        works = [line for line in body.splitlines() if "WorkNCCL(" in line and "…" not in line]
        facts = timeouts(body)
        assert len([fact for fact in facts if fact.timeout_ms]) >= len(works), path.name
        for fact in facts:
            assert None not in {fact.rank, fact.op}, path.name
        known = PROVEN.get(path.stem)
        right += known is not None and verdict.fault in known
        wrong = known is not None and verdict.fault not in known
        assert not (wrong and verdict.confidence is not Confidence.LOW), (
            f"{path.name}: confidently wrong: {verdict.cause}"
        )
    assert not present or right >= 0.9 * len(PROVEN)


SHAPES = {
    "1.8, no number": (
        "  what():  [Rank 2] Watchdog caught collective operation timeout: WorkNCCL(OpType=ALLREDUCE, Timeout(ms)=1800000) "
        "ran for 1803211 milliseconds before timing out.",
        {"rank": 2, "op": "ALLREDUCE", "timeout_ms": 1800000, "elapsed_ms": 1803211},
    ),
    "1.9, blocking wait with a shape": (
        "RuntimeError: [Rank 1] Caught collective operation timeout: WorkNCCL(OpType=ALLREDUCE, TensorShape=[12, 20], "
        "Timeout(ms)=1800000) ran for 1800592 milliseconds before timing out.",
        {"rank": 1, "op": "ALLREDUCE", "numel_in": 240, "elapsed_ms": 1800592},
    ),
    "1.10, cut off by a report": (
        "RuntimeError: NCCL communicator was aborted on rank 6.  Original reason for failure was: [Rank 6] Watchdog caught "
        "collective operation timeout: WorkNCCL(SeqNum=3300, OpType=ALLREDUCE, Timeout(ms)=180…",
        {"rank": 6, "seq": 3300, "op": "ALLREDUCE", "timeout_ms": None},
    ),
    "2.0, Ray": (
        "(RayTrainWorker pid=41, ip=192.0.2.12) [E ProcessGroupNCCL.cpp:821] [Rank 21] Watchdog caught collective operation "
        "timeout: WorkNCCL(SeqNum=53, OpType=ALLREDUCE, Timeout(ms)=1800000) ran for 1808400 milliseconds before timing out.",
        {"rank": 21, "node": "192.0.2.12", "seq": 53},
    ),
    "2.5, default group": (
        "[rank5]:[E421 23:04:29.14 ProcessGroupNCCL.cpp:1595] [PG ID 0 PG GUID 0(default_pg) Rank 5] Process group watchdog "
        "thread terminated with exception: [Rank 5] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=93, "
        "OpType=BROADCAST, NumelIn=10, NumelOut=10, Timeout(ms)=600000) ran for 600073 milliseconds before timing out.",
        {"rank": 5, "group": "default_pg", "seq": 93, "op": "BROADCAST", "numel_out": 10, "at": "23:04:29.14"},
    ),
    "2.6, srun": (
        "1: [rank1]:[E702 13:22:50.10 ProcessGroupNCCL.cpp:629] [Rank 1] Watchdog caught collective operation timeout: "
        "WorkNCCL(SeqNum=91, OpType=ALLREDUCE, NumelIn=11, NumelOut=11, Timeout(ms)=240000) ran for 240005 milliseconds "
        "before timing out.",
        {"rank": 1, "seq": 91, "timeout_ms": 240000},
    ),
    "2.4, a k for a blank": (
        "[rank1]:[E801 08:37:42.731552721kProcessGroupNCCL.cpp:607] [Rank 1] Watchdog caught collective operation timeout: "
        "WorkNCCL(SeqNum=46, OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=1800000) rankforr1800011 milliseconds.",
        {"rank": 1, "seq": 46, "at": "08:37:42.731552721"},
    ),
    "the prefix is the global rank, the bracket the group's": (
        "[rank9]:[E801 08:37:42.7 ProcessGroupNCCL.cpp:607] [Rank 1] Watchdog caught collective operation timeout: "
        "WorkNCCL(SeqNum=46, OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=1800000) ran for 1800011 milliseconds",
        {"rank": 9},
    ),
    "colours, glued to a progress bar": (
        "Epoch 3:  45%|███  | 12/26 [00:31<00:40]\x1b[36m[rank2]:[E801 08:37:42.7 ProcessGroupNCCL.cpp:607] [Rank 2] Watchdog "
        "caught collective operation timeout: WorkNCCL(SeqNum=46, OpType=ALLGATHER, NumelIn=1, NumelOut=4, "
        "Timeout(ms)=1800000) ran for 1800011 milliseconds before timing out.\x1b[0m",
        {"rank": 2, "op": "ALLGATHER", "numel_out": 4},
    ),
}  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_of_the_watchdogs_line_is_parsed(shape: str) -> None:
    line, expected = SHAPES[shape]
    (fact,) = timeouts(line)
    assert {name: getattr(fact, name) for name in expected} == expected


STATUS = {
    "[rank2]:[E ProcessGroupNCCL.cpp:1537] [PG 0 Rank 2] Timeout at NCCL work: 15, last enqueued NCCL work: 20, last completed "
    "NCCL work: 14.": ("0", 15, 20, 14),
    "[rank7]:[E318 13:39:53.7 ProcessGroupNCCL.cpp:1785] [PG ID 2 PG GUID 9 Rank 7] Exception (either an error or timeout) "
    "detected by watchdog at work: 15, last enqueued NCCL work: 20, last completed NCCL work: 14.": ("9", 15, 20, 14),
    "[rank1]:[E702 13:22:50.1 ProcessGroupNCCL.cpp:2168] [PG ID 1 PG GUID 3(mesh_tp) Rank 1]  failure detected by watchdog at "
    "work sequence id: 15 PG status: last enqueued work: 20, last completed work: -1": ("3(mesh_tp)", 15, 20, -1),
}  # fmt: skip


@pytest.mark.parametrize(("line", "expected"), STATUS.items())
def test_the_watchdogs_status_names_group_and_counters(line: str, expected: tuple[object, ...]) -> None:
    facts = [fact for fact in parse(line) if fact.kind is Kind.WATCHDOG_STATUS]
    assert [(f.group, f.seq, f.last_enqueued, f.last_completed) for f in facts] == [expected]


def test_a_dump_signal_that_names_a_rank_says_that_this_rank_waited() -> None:
    said = (
        "[rank7]:[E710 18:00:32.6 ProcessGroupNCCL.cpp:1987] [PG ID 0 PG GUID 0(default_pg) Rank 7] Received a dump signal due to "
        "a collective timeout from  rank 3 and we will try our best to dump the debug info."
    )
    (waited,) = (fact for fact in parse(said) if fact.kind is Kind.WATCHDOG_STATUS)
    assert (waited.sign, waited.rank, waited.group) == (Sign.WAITED, 3, "default_pg")
    assert not [fact for fact in parse(said.replace(" rank 3", "this local rank")) if fact.kind is Kind.WATCHDOG_STATUS]


@settings(max_examples=60, deadline=None)
@given(width=st.integers(62, 200), prefix=st.sampled_from(["", "(Actor pid=77, ip=192.0.2.1) ", "3: "]))
def test_a_line_wrapped_at_any_width_is_the_same_line(width: int, prefix: str) -> None:
    wrapped = "\n".join(prefix + LINE[i : i + width] for i in range(0, len(LINE), width))
    assert [fields(fact) for fact in timeouts(f"step 12 loss 0.1\n{wrapped}\nstep 13 loss 0.1\n")] == [fields(SEEN)]


def test_glued_lines_are_two_facts_and_each_has_its_own_rank() -> None:
    other = LINE.replace("ank7", "ank3").replace("ank 7", "ank 3").replace("4486", "4487")
    assert [fields(fact) for fact in timeouts(LINE + other)] == [fields(SEEN), fields(replace(SEEN, rank=3, seq=4487))]


def test_a_line_that_another_rank_interrupts_is_read_to_its_end() -> None:
    other = LINE.replace("ank7", "ank3").replace("ank 7", "ank 3")
    found = timeouts(f"{LINE[:180]}\n{other}\n{LINE[180:]}\n")
    assert sorted(fields(fact) for fact in found) == sorted([fields(SEEN), fields(replace(SEEN, rank=3))])


def test_a_numbered_fact_knows_its_line_after_megabytes_of_others() -> None:
    filler = "2026-11-20 13:24:05 step 12 loss 0.123 reward 0.5\n" * 60_000
    (fact,) = timeouts(filler + LINE + "\n" + filler)
    assert fact.line_no == 60_001
    assert fact.line == LINE


def test_of_torchruns_report_only_the_root_cause_speaks_against_its_rank() -> None:
    """The agent killed rank 0 itself, after rank 2 had failed."""
    _, body = labelled(HERE / "data" / "nccl_logs" / "torchrun_report.txt")
    exits = {(fact.rank, fact.sign) for fact in parse(body) if fact.kind is Kind.EXIT and fact.rank is not None}
    assert exits == {(0, Sign.TOLD), (2, Sign.CRASHED)}


def test_a_mentioned_possibility_is_no_evidence_of_it() -> None:
    said = (
        "(raylet) A worker died or was killed while executing a task. There are some potential root causes. (1) The process "
        "is killed by SIGKILL by OOM killer due to high memory usage."
    )
    assert {fact.sign for fact in parse(said)} == {Sign.KILLED}


TROUBLE = st.sampled_from([
    LINE, "[rank1]:[", "WorkNCCL(", "WorkNCCL(SeqNum=", "Timeout(ms)=", "[PG ID ", "NCCL WARN ", "RuntimeError: ", "Error" * 40,
    "NVRM: Xid (PCI:", "(RayWorker pid=", "\x1b[31m", "\r", "…", "\x00", "[Rank ", "aA_." * 50, "Got completion from peer ",
    "/dev/shm " * 30, "Detected mismatch between collectives on ranks. Rank 1", "1: 2: 3: ", "[" * 300, "exitcode : -9",
])  # fmt: skip
LINES = st.lists(st.lists(st.one_of(TROUBLE, st.text(max_size=30)), max_size=4).map("".join), max_size=90)


@pytest.mark.long
@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(lines=LINES, cut=st.integers(1, 400), sizes=st.lists(st.integers(1, 4000), min_size=1, max_size=5))
def test_no_text_breaks_the_parser_and_pieces_give_what_the_whole_gives(
    lines: list[str], cut: int, sizes: list[int]
) -> None:
    text = "\n".join(part for line in lines for part in (line[:cut], line[cut:]))
    data = text.encode(errors="replace")
    whole = Parser().read(data)
    parser, found, at, i = Parser(), [], 0, 0
    while at < len(data):
        found += parser.feed(data[at : at + sizes[i % len(sizes)]])
        at, i = at + sizes[i % len(sizes)], i + 1
    found += parser.flush()
    assert found == whole
    judge(whole)


@pytest.mark.parametrize("unit", ["Error ", "[rank1]:[PG ID 0 ", "WorkNCCL(SeqNum=1, ", "NCCL WARN NET/IB : Got completion from peer x ",
                                  "a.b.c.D" , "[[[[", "CUDA error: ", "/dev/shm failed ", "[1,2,3] joined but didn't finish "])  # fmt: skip
def test_a_hostile_line_of_a_megabyte_takes_bounded_time(unit: str) -> None:
    data = (unit * (1_000_000 // len(unit))).encode()
    start = time.process_time()
    Parser().read(data + b"\n" + data[:5000])
    assert time.process_time() - start < patience(3.0)


def test_a_log_of_errors_only_takes_bounded_time() -> None:
    data = (LINE + "\n").encode() * 2_000
    start = time.process_time()
    assert len(Parser().read(data)) == 2_000
    assert time.process_time() - start < patience(4.0)


@pytest.mark.parametrize(
    "line",
    [
        "2026-11-20 13:24:05,120 INFO trainer step 1284 loss 0.0123 reward 0.51 kl 0.002 lr 3.0e-05 tokens 81920\n",
        "[rank3]:[titan] 2026-09-10 09:06:41,950 - root - INFO - step:  7  loss: 7.71  memory: 30.1GiB(40%)  tps: 1,234  mfu: 9.9%\n",
    ],
    ids=["plain", "torchtitan"],
)
def test_a_healthy_log_is_read_at_memory_speed(line: str) -> None:
    """The goal is 50 MB/s (measured: over 50); a loaded machine gets a wide margin."""
    data = (line * (16_000_000 // len(line)) + LINE + "\n").encode()
    start = time.process_time()
    parser = Parser()
    found = [
        fact for i in range(0, len(data), 1 << 20) for fact in parser.feed(data[i : i + (1 << 20)])
    ] + parser.flush()
    took = time.process_time() - start
    assert len(found) == 1
    assert len(data) / took > 25e6


def test_of_a_single_rank_that_waits_late_nobody_says_that_ranks_parted() -> None:
    late = LINE.replace("SeqNum=4486", "SeqNum=903144")
    alone = judge(parse(late))
    both = judge(parse(late + "\n" + late.replace("ank7", "ank3").replace("ank 7", "ank 3")))
    assert (alone.fault, both.fault) == (Fault.HOST_HANG, Fault.DESYNC)


def test_a_line_without_a_word_of_the_sieve_is_read_where_a_log_begins_or_ends_and_not_beside_a_job() -> None:
    line = b"Node unexpectedly rebooted\n"
    assert [fact.sign for fact in Parser().read(line)] == [Sign.NODE_GONE]
    assert Parser(whole=0).read(line) == []
    assert Parser().read(b"step 1\n" * 40_000 + line + b"step 1\n" * 40_000) == []
    assert [fact.sign for fact in Parser().read(b"step 1\n" * 40_000 + line)] == [Sign.NODE_GONE]


def test_names_of_files_tell_ranks_and_nodes() -> None:
    ranks = {
        name: rank_of(Path(name))
        for name in ("rank_3.log", "worker-12.out", "7.log", "attempt_0/3/stderr.log", "train.log")
    }
    assert list(ranks.values()) == [3, 12, 7, 3, None]
    assert node_of(Path("logs/node-07/rank_0.log")) == "node-07"


def test_a_directory_of_ranks_names_the_silent_one(tmp_path: Path) -> None:
    for rank in (0, 1, 3):
        (tmp_path / f"rank_{rank}.log").write_text(
            LINE.replace("ank7", f"ank{rank}").replace("ank 7", f"ank {rank}") + "\n"
        )
    (tmp_path / "rank_2.log").write_text("step 12\nloading shard 7\n")
    reading = read([tmp_path])
    verdict = judge(reading.evidence, Known(heard=reading.ranks))
    assert (verdict.fault, verdict.ranks) == (Fault.HOST_HANG, (2,))
    assert verdict.confidence is not Confidence.HIGH


def test_a_file_that_cannot_be_read_is_named_with_the_reason(tmp_path: Path) -> None:
    reading = read([tmp_path / "none.log"])
    assert reading.files == ()
    assert "No such file" in reading.unread[0]
