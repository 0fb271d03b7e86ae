"""Workers' logs followed while they are written."""

from pathlib import Path

import pytest

from elasticrl.contract.evidence import Evidence, Sign
from elasticrl.diagnose.tail import SILENCE_S, Tail

OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 3 GiB\n"


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "rank_3.log"
    path.write_text("step 1\n" + OOM)
    return path


def signs(facts: list[Evidence]) -> list[Sign]:
    return [fact.sign for fact in facts]


def write(path: Path, text: str) -> None:
    with path.open("a") as stream:
        stream.write(text)


def settled(tail: Tail, now: float) -> list[Evidence]:
    """A look, and another one after a moment of silence."""
    return [*tail.look(now), *tail.look(now + 2 * SILENCE_S)]


def test_what_is_written_from_now_on_is_evidence_and_what_was_before_is_history(log: Path) -> None:
    tail = Tail(node="n01")
    tail.follow({3: log})
    assert settled(tail, 10.0) == []
    write(log, "step 2\n" + OOM)
    assert tail.look(11.0) == [], "the lines that follow may belong to it"
    assert tail.look(11.1) == []
    (fact,) = tail.look(11.5)
    assert (fact.sign, fact.rank, fact.node, fact.when, fact.clock) == (Sign.GPU_MEMORY, 3, "n01", 11.5, "core")
    assert settled(tail, 12.0) == [], "once"
    tail.close()


def test_the_last_lines_of_who_has_ended_are_evidence_at_once(log: Path) -> None:
    tail = Tail()
    tail.follow({3: log})
    write(log, OOM)
    assert signs(tail.look(1.0, over=True)) == [Sign.GPU_MEMORY]
    assert settled(tail, 1.1) == [], "once"
    tail.close()


def test_a_fresh_process_is_read_from_its_beginning_and_a_file_may_come_later(log: Path, tmp_path: Path) -> None:
    tail = Tail()
    tail.follow({3: log, 4: tmp_path / "rank_4.log"}, begin=True)
    assert signs(settled(tail, 1.0)) == [Sign.GPU_MEMORY]
    (tmp_path / "rank_4.log").write_text(OOM)
    assert [(fact.rank, fact.sign) for fact in settled(tail, 2.0)] == [(4, Sign.GPU_MEMORY)]
    tail.close()


def test_a_rotated_file_is_read_to_its_end_and_the_new_one_from_its_beginning(log: Path) -> None:
    tail = Tail()
    tail.follow({3: log})
    write(log, OOM)
    log.rename(log.with_suffix(".1"))
    log.write_text("OSError: [Errno 28] No space left on device\n")
    found = [*tail.look(1.0), *tail.look(1.1), *tail.look(1.2), *tail.look(1.6)]
    assert signs(found) == [Sign.GPU_MEMORY, Sign.DISK_FULL]
    tail.close()


def test_a_file_that_was_cut_short_is_read_again_and_one_that_is_gone_does_no_harm(log: Path) -> None:
    tail = Tail()
    tail.follow({3: log})
    log.write_text("")
    assert tail.look(1.0) == []
    write(log, OOM)
    assert signs(settled(tail, 2.0)) == [Sign.GPU_MEMORY]
    log.unlink()
    assert settled(tail, 3.0) == []
    tail.follow({})
    assert settled(tail, 4.0) == []
