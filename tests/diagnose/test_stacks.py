"""Stacks of real processes: one in a `__next__`, others in a collective, one that is stopped."""

import subprocess
import sys
import time
from pathlib import Path

import pytest
from diagnose_gang import gang, stop, until

from chaos.patience import patience
from elasticrl.contract.evidence import SAVE, Sign
from elasticrl.contract.verdict import Fault
from elasticrl.core.judge.judge import judge
from elasticrl.diagnose import recorder, witness
from elasticrl.diagnose.stacks import Frame, Stack, activity, collect, evidence, parse, summary


def where(folder: Path, workers: dict[int, int], expected: dict[int, str]) -> dict[int, Stack]:
    """The stacks, once each rank has gone the last few instructions to where it was sent."""
    seen: dict[int, Stack] = {}

    def there() -> bool:
        seen.update(collect(folder, workers, within_s=10.0, spy=""))
        return {rank: activity(stack.frames).what for rank, stack in seen.items()} == expected

    until(there, 20.0, lambda: f"ranks are at {expected}; seen {seen}")
    return seen


def test_the_rank_in_its_dataloader_is_told_from_those_that_wait_and_from_one_that_is_stopped(tmp_path: Path) -> None:
    with gang(tmp_path, "wait", "loader", "wait", "wait") as workers:
        where(tmp_path, workers, {0: "collective", 1: "data", 2: "collective", 3: "collective"})
        stop(workers[2])
        began = time.monotonic()
        seen = collect(tmp_path, workers, within_s=5.0, spy="")
        took_s = time.monotonic() - began
    assert took_s < patience(2.0), "a process that cannot run costs no more than those that can"
    assert (seen[2].frames, seen[2].absent) == ((), "the process is stopped")
    text = summary(evidence(seen))
    assert "rank 1 is in its dataloader: __next__ (diagnose_job.py:" in text
    assert "ranks 0, 3 are in all_reduce" in text
    assert "rank 2 gave no stack (the process is stopped)" in text
    signs = {fact.rank: fact.sign for fact in evidence(seen)}
    assert signs == {0: Sign.WAITED, 1: Sign.ELSEWHERE, 2: Sign.STOPPED, 3: Sign.WAITED}


def test_the_stacks_of_a_stalled_gang_are_enough_for_a_verdict(tmp_path: Path) -> None:
    with gang(tmp_path, "wait", "wait", "loader") as workers:
        seen = where(tmp_path, workers, {0: "collective", 1: "collective", 2: "data"})
    verdict = judge(evidence(seen, node_of=lambda rank: f"n{rank:02}"))
    assert (verdict.fault, verdict.ranks, verdict.nodes) == (Fault.HOST_HANG, (2,), ("n02",))
    assert "dataloader" in verdict.cause


def test_a_process_that_holds_the_gil_in_native_code_still_shows_its_stack(tmp_path: Path) -> None:
    code = (
        "import sys, re; from pathlib import Path; from elasticrl.diagnose import witness\n"
        "witness.stand(Path(sys.argv[1])); print('at', flush=True)\n"
        "def burn(): re.match('(a+)+$', 'a' * 40 + 'b')\n"  # exponential: hours, without ever giving the GIL away
        "burn()\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"at\n"
        frames: tuple[Frame, ...] = ()

        def burning() -> bool:
            nonlocal frames
            frames = collect(tmp_path, {0: process.pid}, within_s=5.0, spy="")[0].frames
            return any(frame.name == "burn" for frame in frames)

        until(burning, 10.0, "the expression is being matched")
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def test_a_worker_lives_through_a_thousand_of_questions(tmp_path: Path) -> None:
    """To walk the frames of a thread that goes on running, here the one that reads the recorder, ends the process."""
    code = (
        "import sys, time; from pathlib import Path; from elasticrl.diagnose import witness\n"
        "witness.stand(Path(sys.argv[1])); print('at', flush=True)\n"
        "time.sleep(600)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"at\n"
        answers = witness.stack_file(tmp_path, process.pid).open()
        with answers:
            for asked in range(1000):
                assert recorder.ask(tmp_path, process.pid, f"{asked:08x}")
                witness.signal_main(process.pid)
                answer = ""

                def whole() -> bool:
                    nonlocal answer
                    answer += answers.read()
                    return answer.endswith("in <module>\n") or process.poll() is not None

                until(whole, 5.0, "it answers")
                assert process.poll() is None, f"question {asked + 1} ended it"
                assert [frame.name for frame in parse(answer)] == ["<module>"]
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def test_nobody_is_killed_by_being_asked_and_a_dead_one_is_said_to_be_dead(tmp_path: Path) -> None:
    """A real-time signal ends a process that does not expect it."""
    stranger = subprocess.Popen(["sleep", "60"])
    gone = subprocess.Popen(["true"])
    gone.wait()
    try:
        assert not witness.listens(stranger.pid)
        seen = collect(tmp_path, {0: stranger.pid, 1: gone.pid}, within_s=1.0, spy="")
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()
    assert {rank: stack.absent for rank, stack in seen.items()} == {
        0: "the process has no witness",
        1: "the process is gone",
    }
    assert {fact.sign for fact in evidence(seen)} == {Sign.TOLD}


def test_a_witness_leaves_nothing_when_it_ends(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from elasticrl.diagnose import witness\n"
        "w = witness.stand(Path(sys.argv[1])); n = len(list(Path(sys.argv[1]).iterdir())); w.close()\n"
        "print(n, len(list(Path(sys.argv[1]).iterdir())), witness.listens(w.pid))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=30, check=True
    )
    assert done.stdout == "2 0 False\n"


def frames(*listed: str) -> list[Frame]:
    return [Frame(file=file, line=1, name=name) for file, _, name in (item.partition(" ") for item in listed)]


C10D = "/env/torch/distributed/distributed_c10d.py"


@pytest.mark.parametrize(
    ("stack", "what"),
    [
        (frames(f"{C10D} all_reduce", "/job/train.py step"), "collective"),
        (frames("/e/elasticrl/runtime/group.py wait", f"{C10D} broadcast", "/job/train.py step"), "collective"),
        (frames("/e/elasticrl/runtime/group.py wait", "/job/train.py step"), "collective"),
        (frames("/e/elasticrl/runtime/group.py settle", "/e/elasticrl/runtime/agree.py exchange"), "gpu"),
        # A save that waits for the others waits: it is not the save that hangs.
        (frames(f"{C10D} gather_object", "/env/torch/distributed/checkpoint/utils.py reduce_scatter",
                "/job/train.py save"), "collective"),
        (frames("/usr/lib/python3.11/threading.py wait", "/usr/lib/python3.11/queue.py get",
                "/env/torch/utils/data/dataloader.py _try_get_data", "/job/train.py main"), "data"),
        (frames("/env/torch/serialization.py _save", "/env/torch/serialization.py save", "/job/t.py main"), "save"),
        (frames("/job/t.py save_checkpoint", "/job/t.py main"), "save"),
        (frames("/env/torch/cuda/__init__.py synchronize", "/job/t.py step"), "gpu"),
        (frames("/env/torch/_inductor/compile_fx.py compile", "/job/t.py step"), "compile"),
        (frames("/usr/lib/python3.11/ssl.py read", "/usr/lib/python3.11/http/client.py readinto", "/job/r.py s"),
         "network"),
        (frames("/usr/lib/python3.11/threading.py acquire", "/job/t.py step"), "lock"),
        (frames(f"{C10D} init_process_group", "/job/t.py main"), "setup"),
        # Another node's vault has not taken its copy yet: that is no hang of this rank's host.
        (frames("/e/elasticrl/runtime/vault/control.py _exchange", "/e/elasticrl/runtime/vault/control.py ask",
                "/e/elasticrl/runtime/vault/control.py copied", "/job/t.py step"), "copies"),
        (frames("/e/elasticrl/runtime/vault/control.py _exchange", "/e/elasticrl/runtime/vault/control.py ask",
                "/e/elasticrl/runtime/vault/control.py release", "/job/t.py step"), "code"),
        (frames("/job/t.py step", "/job/t.py main"), "code"),
        ([], "code"),
    ],
)  # fmt: skip
def test_a_place_is_known_by_its_innermost_telling_frame(stack: list[Frame], what: str) -> None:
    assert activity(stack).what == what
    (seen,) = evidence({0: Stack(pid=7, frames=tuple(stack))})
    assert (seen.phase == SAVE) is (what == "save")


def test_who_is_elsewhere_is_named_only_if_the_others_wait() -> None:
    """A stack says where a rank is, not that it is stuck there."""
    busy = {rank: Stack(pid=rank, frames=tuple(frames("/job/t.py step")), how="faulthandler") for rank in range(4)}
    assert {fact.sign for fact in evidence(busy)} == {Sign.ELSEWHERE}
    assert judge(evidence(busy)).ranks == ()
    waits = Stack(pid=3, frames=tuple(frames(f"{C10D} all_reduce")), how="faulthandler")
    assert judge(evidence({**busy, 3: waits})).ranks == (), "most are elsewhere: one is merely ahead"
    assert judge(evidence({**busy, 2: waits, 3: waits})).ranks == (0, 1)


@pytest.mark.parametrize(
    "text", ["", "\n\n", "Thread 0x1\n", "Stack (most recent call first):\n", "x" * 100_000, "Thread 0xzz:\n"]
)
def test_what_is_no_stack_has_no_frames(text: str) -> None:
    assert not any(parse(text))


def test_py_spy_is_asked_where_a_process_cannot_answer(tmp_path: Path) -> None:
    spy = tmp_path / "py-spy"
    spy.write_text(
        '#!/bin/sh\n[ $1 = dump ] && echo \'[{"thread_name": "other", "frames": []}, {"thread_name": "MainThread",'
        ' "frames": [{"name": "Loader.__next__", "filename": "/job/loader.py", "line": 7}]}]\'\n'
    )
    spy.chmod(0o755)
    stopped = subprocess.Popen(["sleep", "60"])
    try:
        stop(stopped.pid)
        (seen,) = collect(tmp_path, {5: stopped.pid}, within_s=5.0, spy=str(spy)).values()
    finally:
        stopped.kill()
        stopped.wait()
    assert (seen.how, activity(seen.frames).what) == ("py-spy", "data")
    (fact,) = evidence({5: seen})
    assert summary([fact]) == "rank 5 is in its dataloader: __next__ (loader.py:7), stopped"
    assert fact.sign is Sign.STOPPED, "where it was stopped matters less than that it was"
