"""What comes from outside takes time in proportion to its size, and bounded memory, whatever is in it."""

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from elasticrl.config import read
from elasticrl.config.load import MANY as TOLD
from elasticrl.contract.verdict import Fault, Known
from elasticrl.core.judge.judge import judge
from elasticrl.diagnose import logs
from elasticrl.diagnose.tail import MANY, PIECE, Tail

WAIT = (
    "[rank{rank}]:[E419 10:42:{second:02d}.858931807 ProcessGroupNCCL.cpp:616] [Rank {rank}] Watchdog caught collective "
    "operation timeout: WorkNCCL(SeqNum={i}, OpType=ALLREDUCE, NumelIn=1024, NumelOut=1024, Timeout(ms)=600000) ran for 600013 "
    "milliseconds before timing out.\n"
)
DENSE = {
    "waits": WAIT,
    "memory": "2024-01-01 10:42:{second:02d} RuntimeError: CUDA error: out of memory number {i}\n",
    "both": WAIT + "2024-01-01 10:42:{second:02d} RuntimeError: CUDA error: out of memory number {i}\n",
    "ends": "[rank{rank}]: worker exitcode  : -9 (pid: {i})\nSignal 9 (SIGKILL) received by PID {i}\n",
    "ranks": "[rank{i}]: ValueError: {i}\n[rank{i}]:[PG ID {i} PG GUID {i}(g{i}) Rank {i}] last enqueued work: {i}, last "
    "completed work: {i}\n",
    "xids": "[{i:8d}.123456] NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus\n[rank{rank}]: ValueError\n",
}


def dense(form: str, size: int) -> bytes:
    lines, length, i = [], 0, 0
    while length < size:
        lines.append(form.format(i=i, rank=i % 8, second=i % 60))
        length, i = length + len(lines[-1]), i + 1
    return "".join(lines).encode()


def seconds(work: Callable[[], object]) -> float:
    """Of this process; the less disturbed of two."""
    took = []
    for _ in range(2):
        begin = time.process_time()
        work()
        took.append(time.process_time() - begin)
    return min(took)


def grows(work: Callable[[int], Callable[[], object]], size: int) -> float:
    """How many times as long four times the size takes: 4 if it is linear, 16 if it is quadratic."""
    return seconds(work(4 * size)) / seconds(work(size))


@pytest.mark.parametrize("form", DENSE)
def test_to_judge_a_log_of_faults_takes_time_in_proportion_to_its_size(form: str) -> None:
    def work(size: int) -> Callable[[], object]:
        evidence = logs.Parser(source="rank.log").read(dense(DENSE[form], size))
        return lambda: judge(evidence, Known(heard=frozenset(range(8))))

    assert grows(work, 40_000) < 9


@pytest.mark.long
@pytest.mark.parametrize("form", DENSE)
def test_to_read_a_log_of_faults_takes_time_in_proportion_to_its_size(form: str) -> None:
    assert grows(lambda size: lambda: logs.Parser().read(dense(DENSE[form], size)), 40_000) < 9


def test_of_a_million_facts_that_are_alike_a_reading_keeps_the_first_and_the_last(tmp_path: Path) -> None:
    path = tmp_path / "rank_0.log"
    path.write_bytes(dense(DENSE["memory"], 400_000))
    reading = logs.read([path])
    assert len(reading.evidence) <= 2 * logs.FEW
    assert reading.more > 1_000
    numbers = [fact.line_no for fact in reading.evidence]
    assert numbers == sorted(numbers, key=lambda number: number or 0)
    assert numbers[0] == 1
    assert numbers[-1] == path.read_bytes().count(b"\n")
    assert judge(reading.evidence, Known(heard=reading.ranks)).fault is Fault.OOM_GPU


def test_facts_of_which_no_two_are_alike_are_kept_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "MOST", 100)
    kept = logs.Kept()
    for fact in logs.Parser().read(dense(DENSE["ranks"], 100_000)):
        kept.add(fact)
    assert len(kept.facts()) == kept.held <= 100 < kept.seen


def test_a_worker_that_prints_faults_without_end_costs_its_daemon_little_and_its_last_words_are_read(
    tmp_path: Path,
) -> None:
    path = tmp_path / "rank_0.log"
    path.write_bytes(dense(DENSE["memory"], 3 << 20) + b"[rank0]: ValueError: the end\n" + b"done\n" * 10)
    tail = Tail()
    tail.follow({0: path}, begin=True)
    found = tail.look(0.0) + tail.look(1.0, over=True)
    tail.close()
    assert len(found) < 2 * MANY + 3 * PIECE // len(DENSE["memory"])
    assert any("the end" in fact.line and fact.line_no == path.read_bytes().count(b"\n") - 10 for fact in found)


def test_a_configuration_of_strange_keys_is_refused_in_time_that_hardly_grows_with_their_number(tmp_path: Path) -> None:
    sample = (Path(__file__).parents[2] / "configs" / "one-machine.yaml").read_text()

    def work(count: int) -> Callable[[], object]:
        path = tmp_path / f"{count}.yaml"
        path.write_text(sample + "".join(f"strange_key_{i}: {i}\n" for i in range(count)))
        return lambda: read(path)

    assert grows(work, 500) < 9
    loaded = read(tmp_path / "2000.yaml")
    assert loaded.tree is None
    assert len(loaded.findings) == TOLD + 1, (
        "reading takes the same for all; to guess what each was meant to be does not"
    )
    assert "1900 more keys from here on are none" in str(loaded.findings[-1])
