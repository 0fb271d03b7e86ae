"""The chronicle: a step computed again must come to the same bits, two runs are compared, and no disk stops training."""

import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from elasticrl.runtime.bits import Bits
from elasticrl.runtime.chronicle import FOLDER, Chronicle, compare, read
from elasticrl.runtime.vault.errors import DataError

BITS = Bits(
    torch="2.13.0",
    device="cpu",
    isa="AVX512",
    threads=1,
    dtype="float32",
    deterministic=False,
    matmul="highest",
    onednn=True,
    libraries="",
    probe="00",
)


def run(root: Path, *generations: tuple[int, range, int], bits: str = "", kind: str = "full", salt: str = "") -> Path:
    """A run in which each (number, steps, world) generation wrote the digests of those steps."""
    for generation, steps, world in generations:
        for rank in range(world):
            chronicle = Chronicle(root, f"g{generation}-w{rank}", bits=lambda: bits, kind=kind)
            for step in steps:
                chronicle.add(step=step, generation=generation, digest=f"{salt}{step:04x}")
            assert not chronicle.problem
            chronicle.close()
    return root


def test_steps_that_were_computed_again_agree(tmp_path: Path):
    found = read(run(tmp_path, (1, range(6), 3), (2, range(4, 9), 2)))
    assert found.ok
    assert (len(found.steps), found.generations, found.rerun, found.lines) == (9, 2, 2, 28)
    assert found.steps[5] == "0005"
    assert found.sentence == "9 steps in 2 generations, 28 digests: 2 steps computed again, each to the same bits"


def test_a_step_computed_again_to_other_bits_is_found_and_the_newest_generation_counts(tmp_path: Path):
    run(tmp_path, (1, range(6), 2))
    run(tmp_path, (3, range(4, 6), 1), salt="f")
    found = read(tmp_path)
    assert not found.ok
    assert found.steps[3] == "0003"
    assert found.steps[4] == "f0004"
    assert len(found.findings) == 2
    assert "step 4 has 2 different digests: f0004 (generation 3, g3-w0-" in found.findings[0]
    assert "and 0004 (generation 1, g1-w0-" in found.findings[0]


def test_two_ranks_of_one_generation_that_differ_are_found(tmp_path: Path):
    run(tmp_path, (1, range(3), 2))
    odd = Chronicle(tmp_path, "odd")
    odd.add(step=2, generation=1, digest="beef")
    odd.close()
    found = read(tmp_path)
    assert len(found.findings) == 1
    assert "step 2 has 2 different digests" in found.sentence
    assert "beef (generation 1, odd-" in found.sentence


def test_runs_are_compared_to_the_first_step_where_they_part(tmp_path: Path):
    ours = read(run(tmp_path / "a", (1, range(10), 2)))
    assert compare(ours, read(run(tmp_path / "b", (1, range(12), 3)))).sentence == "the same bits in 10 steps (0 to 9)"
    run(tmp_path / "c", (1, range(4), 1))
    theirs = read(run(tmp_path / "c", (2, range(4, 8), 1), salt="f"))
    found = compare(ours, theirs)
    assert (found.ok, found.parted) == (False, 4)
    assert found.sentence == "they part at step 4 (0004 and f0004), of 8 steps that both have"


def test_runs_without_a_common_step_or_kind_are_not_called_the_same(tmp_path: Path):
    ours = read(run(tmp_path / "a", (1, range(3), 1)))
    apart = compare(ours, read(run(tmp_path / "b", (1, range(5, 8), 1))))
    assert not apart.ok
    assert "no step is in both" in apart.sentence
    sampled = compare(ours, read(run(tmp_path / "c", (1, range(3), 1), kind="sample")))
    assert not sampled.ok
    assert "kind 'full' and the other of kind 'sample'" in sampled.sentence


def test_where_runs_part_the_known_difference_is_told(tmp_path: Path):
    ours = read(run(tmp_path / "a", (1, range(3), 1), bits=str(BITS)))
    other = str(replace(BITS, threads=2, probe="01"))
    found = compare(ours, read(run(tmp_path / "b", (1, range(3), 1), salt="f", bits=other)))
    assert found.sentence.endswith("; the second computes other bits: torch threads 2 instead of 1")


def test_no_chronicle_is_an_error_and_not_an_agreement(tmp_path: Path):
    with pytest.raises(DataError, match="There is no chronicle in"):
        read(tmp_path)


@pytest.mark.parametrize("place", ["digest", "checksum"])
def test_a_changed_line_is_found_and_a_torn_last_one_is_not_counted(tmp_path: Path, place: str):
    run(tmp_path, (1, range(5), 1))
    (path,) = (tmp_path / FOLDER).iterdir()
    whole = path.read_bytes()
    path.write_bytes(whole[:-4])
    found = read(tmp_path)
    assert found.ok
    assert (found.torn, len(found.steps)) == (1, 4)
    at = whole.index(b'"0002"') + 2 if place == "digest" else whole.index(b"\n") + 1
    path.write_bytes(whole[:at] + (b"e" if whole[at : at + 1] != b"e" else b"a") + whole[at + 1 :])
    found = read(tmp_path)
    assert len(found.findings) == 1
    assert "was changed" in found.sentence


def test_what_was_added_survives_a_kill(tmp_path: Path):
    code = (
        "import os, signal, sys; from pathlib import Path; from elasticrl.runtime.chronicle import Chronicle\n"
        "c = Chronicle(Path(sys.argv[1]), 'w')\n"
        "for s in range(50): c.add(step=s, generation=1, digest=f'{s:x}')\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], timeout=60, check=False)
    assert done.returncode == -signal.SIGKILL
    assert len(read(tmp_path).steps) == 50


def test_a_full_disk_costs_the_lines_and_nothing_else(tmp_path: Path):
    """A limit on the file's size does what a full disk does: half a line is written, then nothing."""
    code = (
        "import resource, signal, sys; from pathlib import Path; from elasticrl.runtime.chronicle import Chronicle\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "c = Chronicle(Path(sys.argv[1]), 'w')\n"
        "for s in range(3): c.add(step=s, generation=1, digest=f'{s:x}')\n"
        "full = c.path.stat().st_size + 20\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (full, resource.RLIM_INFINITY))\n"
        "for s in range(3, 6): c.add(step=s, generation=1, digest=f'{s:x}')\n"
        "print(c.problem)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))\n"
        "for s in range(6, 9): c.add(step=s, generation=1, digest=f'{s:x}')\n"
        "print(repr(c.problem), c.lost)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], timeout=60, check=True, capture_output=True, text=True
    )
    told, after = done.stdout.splitlines()
    assert "takes no more lines" in told
    assert "3 steps cannot be compared" in told
    assert after == "'' 3"
    found = read(tmp_path)
    assert found.ok
    assert sorted(found.steps) == [0, 1, 2, 6, 7, 8]
    assert found.torn == 0


def test_a_directory_that_cannot_be_made_is_a_sentence_and_is_tried_again(tmp_path: Path):
    blocked = tmp_path / FOLDER
    blocked.write_text("a file where the directory should be")
    chronicle = Chronicle(tmp_path, "w")
    chronicle.add(step=0, generation=1, digest="00")
    assert "takes no more lines" in chronicle.problem
    blocked.unlink()
    chronicle.add(step=1, generation=1, digest="01")
    assert chronicle.problem == ""
    chronicle.close()
    assert dict(read(tmp_path).steps) == {1: "01"}
