import json
from pathlib import Path

import pytest

from elasticrl.contract.beats import Beat
from elasticrl.contract.wire import Worker
from elasticrl.daemon.steps import LIMIT, MOST, Line, StepLog, count
from elasticrl.telemetry.metrics import Metrics


def fresh(folder: Path) -> tuple[StepLog, Beat]:
    """Of a worker that has no rank yet."""
    worker = Worker(slot=0, rank=2, pid=1, started=1, beat=str(folder / "page"), log="")
    return StepLog(folder / "log" / "steps.jsonl", "n0", lambda: (worker,)), Beat(folder / "page")


def of(folder: Path) -> tuple[StepLog, Beat]:
    log, beat = fresh(folder)
    beat.joining(generation=3, born=3, resume=4)
    beat.training()
    return log, beat


def steps_of(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def test_a_wait_of_many_looks_counts_whole_when_it_ends(tmp_path: Path) -> None:
    log, beat = of(tmp_path)
    beat.collective(1, "allreduce")
    for look in range(10):  # nothing new is said meanwhile
        log.look(100.0 + look / 20)
    beat.arrived()
    log.look(100.5)
    (marks,) = log._marks.values()
    assert marks.waited == pytest.approx({"reform": 0.5})


def test_lines_go_to_a_new_file_when_the_old_one_is_full_or_removed(tmp_path: Path) -> None:
    log, beat = of(tmp_path)
    log.look(100.0)
    path = tmp_path / "log" / "steps.jsonl"

    def seal(step: int) -> None:
        beat.sealed(step)
        log._write(log.look(100.0 + step))

    seal(5)
    seal(6)
    assert steps_of(path) == [5, 6]
    path.unlink()
    seal(7)
    assert steps_of(path) == [7]
    with path.open("a") as file:
        file.truncate(LIMIT + 1)
    seal(8)
    assert steps_of(path) == [8]
    assert path.with_name("steps-old.jsonl").stat().st_size > LIMIT
    log.close()


def test_short_steps_share_a_line_and_a_long_one_has_its_own(tmp_path: Path) -> None:
    log, beat = of(tmp_path)
    log.look(100.0)
    lines = []
    for look in range(1, 21):  # a step of 50 ms in each look, of which 64 bytes were moved
        beat.sealed(4 + look, moved=64)
        lines += log.look(100.0 + 0.0501 * look)
    assert [(line.step, line.steps, line.bytes) for line in lines] == [(4 + n, 4, 256) for n in (4, 8, 12, 16, 20)]
    beat.sealed(25)
    (line,) = log.look(102.0)
    assert (line.step, line.steps) == (25, 1)


def test_a_spare_that_gets_a_rank_of_a_resumed_job_has_made_none_of_the_steps_before(tmp_path: Path) -> None:
    log, beat = fresh(tmp_path)
    assert log.look(100.0) == []  # it has its rank, and does not know yet
    beat.joining(generation=3, born=3, resume=1_000_000)
    assert log.look(103.0) == []
    beat.training()
    log.look(103.5)
    beat.sealed(1_000_001, moved=64)
    (line,) = log.look(104.0)
    assert (line.step, line.steps, line.bytes) == (1_000_001, 1, 64)


def test_what_a_process_in_a_dead_one_s_place_goes_on_from_is_none_of_its_steps(tmp_path: Path) -> None:
    """Found by a newcomer: 17 steps in the 0.27 s of its reform, beside which everybody's took 171 times as long."""
    log, beat = fresh(tmp_path)
    assert log.look(100.0) == []
    beat.joining(generation=2, born=2, resume=0)  # nothing is on the disk yet
    assert log.look(100.3) == []
    beat.sealed(17)  # by what it was given from memory
    assert log.look(100.6) == []
    beat.sealed(18)
    beat.sealed(19)
    (line,) = log.look(101.0)
    assert (line.step, line.steps) == (19, 2)
    beat.joining(generation=3, born=2, resume=0)  # from here on it is a survivor
    assert log.look(101.1) == []
    beat.sealed(21)
    (line,) = log.look(101.5)
    assert (line.step, line.steps, line.generation) == (21, 2, 3)


def test_a_step_that_was_restored_and_is_sealed_later_is_none_of_its_steps_either(tmp_path: Path) -> None:
    log, beat = fresh(tmp_path)
    beat.joining(generation=2, born=2, resume=0)
    beat.training()
    assert log.look(100.0) == []
    beat.sealed(17)  # in the vote of its first update
    assert log.look(100.6) == []
    beat.sealed(18)
    (line,) = log.look(101.0)
    assert (line.step, line.steps) == (18, 1)


def test_a_line_of_very_many_steps_holds_nobody_up() -> None:
    metrics = Metrics()
    count(metrics, Line(step=10**9, steps=10**9, generation=1, rank=0, seconds={"sync": 1.0}, waited={}, bytes=0))
    assert metrics.registry.get_sample_value("elasticrl_step_seconds_count") == MOST


def test_a_step_is_counted_in_the_nodes_metrics() -> None:
    metrics = Metrics()
    count(
        metrics,
        Line(
            step=9, steps=2, generation=1, rank=0, seconds={"rollout": 0.6, "sync": 0.2}, waited={"sync": 0.1}, bytes=64
        ),
    )
    value = metrics.registry.get_sample_value
    assert value("elasticrl_step_seconds_count") == 2
    assert value("elasticrl_step_seconds_sum") == pytest.approx(0.8)
    assert value("elasticrl_phase_seconds_sum", {"phase": "rollout"}) == pytest.approx(0.6)
    assert value("elasticrl_phase_seconds_bucket", {"phase": "sync", "le": "0.1"}) == 2
    assert value("elasticrl_waited_seconds_total", {"phase": "sync"}) == pytest.approx(0.1)
    assert value("elasticrl_collective_bytes_total") == 64


def test_a_page_that_cannot_be_read_now_costs_its_lines_and_is_tried_again(tmp_path: Path) -> None:
    page = tmp_path / "page"
    page.mkdir()  # opening it is an OSError, as where descriptors or memory have run out
    worker = Worker(slot=0, rank=2, pid=1, started=1, beat=str(page), log="")
    log = StepLog(tmp_path / "log" / "steps.jsonl", "n0", lambda: (worker,))
    assert log.look(99.0) == []
    page.rmdir()
    beat = Beat(page)
    beat.joining(generation=3, born=3, resume=4)
    beat.training()
    log.look(100.0)
    beat.sealed(5)
    (line,) = log.look(101.0)
    assert line.step == 5
