import json
import os
import re
import subprocess
import sys
import time
from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import Any

import pytest

from elasticrl.agent.ends import said
from elasticrl.agent.exits import RECENT_S, Memory, Traces, exception_of, judge, killed_in, raised_of
from elasticrl.agent.gather import Beating, Usual, look, stall_of
from elasticrl.agent.spec import HUGE_PAGES, BadSpec, Spec, common_env, dump, environment, gives_back, load
from elasticrl.agent.warm import lost
from elasticrl.agent.worker import confess
from elasticrl.base.started import last_line
from elasticrl.contract.beats import Snapshot, Stage
from elasticrl.contract.evidence import Sign
from elasticrl.contract.model import LOADING, MEETING, OUTSIDE, Work
from elasticrl.contract.settings import Timeouts
from elasticrl.core.node.suspect import Budgets

THP = Path("/sys/kernel/mm/transparent_hugepage/enabled")
BUDGETS = Budgets(settings=Timeouts(default_phase_s=10.0))
BEAT = Snapshot(generation=14, step=100, state=Stage.TRAINING, phase="update", since=90.0, pid=7)


BROKEN = "elasticrl.runtime.interrupt.Broken"
#: What torch, gloo and NCCL say of a peer that went.
OF_PEERS = [
    "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [10.0.0.3]:53321",
    "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:598] Read error [10.0.0.3]:5: Connection reset by peer",
    "RuntimeError: [..gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 1800000ms for recv operation to complete",
    "DistBackendError: [1] is setting up NCCL via c10d key-value store, store->get('0') got error: Connection reset by peer",
    "DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:2251, remote process exited or there was a network error, 2.27.3",
    "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.",
    "torch.distributed.DistNetworkError: The client socket has failed to connect: [10.0.0.3]:29500 (Connection refused)",
]
#: What a program says of a server of its own.
OF_SERVERS = [
    "ConnectionError: HTTPConnectionPool(host='data', port=80): Max retries exceeded ([Errno 111] Connection refused)",
    "ConnectionError: ('Connection aborted.', ConnectionResetError(104, 'Connection reset by peer'))",
    "RuntimeError: upload failed: Broken pipe",
    "OSError: [Errno 32] Broken pipe",
    "OperationalError: could not connect to server: Connection refused. Is the server running on host db?",
    "Timed out waiting 500ms for recv",
]


@pytest.mark.parametrize(
    ("facts", "cause", "own"),
    [
        (Traces(code=1, message="ValueError: bad prompt"), "exit code 1: ValueError: bad prompt", True),
        (Traces(code=3), "exit code 3", True),
        (
            Traces(code=0, unjoined=True),
            "its program ended with exit code 0, and had never called elasticrl.runtime.join()",
            True,
        ),
        (Traces(code=-9), "signal 9 (SIGKILL)", False),
        (Traces(code=-15), "signal 15 (SIGTERM)", False),
        (Traces(code=-11), "signal 11 (SIGSEGV)", True),
        (Traces(code=-6), "signal 6 (SIGABRT)", True),
        # A script that aborts after torch's @record has written down why.
        (Traces(code=-6, message="ValueError: bad"), "signal 6 (SIGABRT): ValueError: bad", True),
        (Traces(code=-6, message="Broken: x", raised=BROKEN), "signal 6 (SIGABRT): Broken: x", False),
        (Traces(code=-9, killed="stopped in rollout for 12.0 s"), "stopped in rollout for 12.0 s", False),
        (Traces(code=-9, memory="Killed process 7"), "out of memory: Killed process 7", False),
        (Traces(code=None), "it ended, and nobody could say how", False),
        (
            Traces(code=1, message="Broken: allreduce 24 was broken", raised=BROKEN),
            "exit code 1: Broken: allreduce 24 was broken",
            False,
        ),
        (  # a program's own, or what it printed
            Traces(code=1, message="Broken: config line 4", raised="train.Broken"),
            "exit code 1: Broken: config line 4",
            True,
        ),
        (Traces(code=1, message="Broken: line 4"), "exit code 1: Broken: line 4", True),
        (
            Traces(code=1, message="RuntimeError: [x/pair.cc:537] Connection closed by peer [10.0.0.3]:1"),
            "exit code 1: RuntimeError: [x/pair.cc:537] Connection closed by peer [10.0.0.3]:1",
            False,
        ),
        (  # whom all nodes ask is no peer: judged so, healthy nodes were quarantined one after the other
            Traces(
                code=1, message="RewardError: reward endpoint http://r/ did not answer: [Errno 111] Connection refused"
            ),
            "exit code 1: RewardError: reward endpoint http://r/ did not answer: [Errno 111] Connection refused",
            True,
        ),
        *((Traces(code=1, message=said), f"exit code 1: {said}", False) for said in OF_PEERS),
        *((Traces(code=1, message=said), f"exit code 1: {said}", True) for said in OF_SERVERS),
        (
            Traces(code=1, message="BrokenPipeError: x", raised="BrokenPipeError"),
            "exit code 1: BrokenPipeError: x",
            False,
        ),
        (
            Traces(code=1, message="DistNetworkError: failed to recv", raised="torch.distributed.DistNetworkError"),
            "exit code 1: DistNetworkError: failed to recv",
            False,
        ),
    ],
)
def test_whose_doing_an_end_was(facts: Traces, cause: str, own: bool) -> None:
    signs = {bool(facts.killed): Sign.KILLED, bool(facts.memory): Sign.OOM_KILLED, facts.unjoined: Sign.UNJOINED}
    assert judge(facts) == (cause, own, signs.get(True, Sign.GONE if facts.code is None else None))


def test_the_exception_is_read_from_torchs_error_file() -> None:
    data = {
        "message": {
            "message": "ValueError: two\nlines",
            "extraInfo": {"py_callstack": "Traceback ...", "timestamp": "1"},
        }
    }
    assert exception_of(data) == "ValueError: two"
    assert exception_of({"message": "<NONE>"}) == ""
    assert exception_of({"message": "plain"}) == "plain"
    assert exception_of([]) == ""


def test_what_was_raised_is_known_by_its_full_name_where_a_worker_of_ours_told_it(tmp_path: Path, monkeypatch) -> None:
    class Diverged(RuntimeError):
        """A program's own."""

    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error"))
    confess(Diverged("OtherFiles: no"), tmp_path / "error")
    told = json.loads((tmp_path / "error").read_text())
    assert exception_of(told) == "Diverged: OtherFiles: no"
    assert raised_of(told).startswith(f"{__name__}.test_what_was_raised")
    del told["message"]["extraInfo"]["raised"]
    assert raised_of(told) == "Diverged", "so it stands in torch's own error files"


def test_a_disk_that_fills_between_two_words_leaves_torchs(tmp_path: Path, monkeypatch) -> None:
    file = tmp_path / "error"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    (tmp_path / "error.whole").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left"):
        confess(ValueError("bad prompt"), file)
    assert exception_of(json.loads(file.read_text())) == "ValueError: bad prompt"


@pytest.mark.parametrize("file", ["", "/dev/null"], ids=["no name", "another file"])
def test_a_program_that_has_changed_where_its_error_goes_ends_all_the_same(file: str) -> None:
    """Found by reading: torch's wrapper went on then, and what it does can hang."""
    code = "from elasticrl.agent.worker import fail\ntry: 1 / 0\nexcept ZeroDivisionError as error: fail(error)"
    environment = {name: value for name, value in os.environ.items() if name != "TORCHELASTIC_ERROR_FILE"}
    environment |= {"TORCHELASTIC_ERROR_FILE": file} if file else {}
    ended = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    assert ended.stderr.rstrip().endswith("ZeroDivisionError: division by zero")


@pytest.mark.parametrize(
    "data",
    [None, [], {}, {"message": "Diverged"}, {"message": {"message": "Diverged at 412"}}, {"message": {"message": "x y: z"}},
     {"message": {"message": "", "extraInfo": {"raised": 7}}}, {"message": {"message": 3, "extraInfo": []}}],
)  # fmt: skip
def test_where_no_exception_is_told_of_there_is_no_name(data: object) -> None:
    assert raised_of(data) == ""


@pytest.mark.parametrize(
    ("line", "found"),
    [
        (
            "3,1042,99,-;Memory cgroup out of memory: Killed process 17711 (python) total-vm:321204kB, UID:0",
            (17711, "Memory cgroup out of memory: Killed process 17711 (python) total-vm:321204kB, UID:0"),
        ),
        (
            "3,1042,99,-;Out of memory: killed process 8 (x)\n SUBSYSTEM=mm\n",
            (8, "Out of memory: killed process 8 (x)"),
        ),
        ("6,1043,99,-;oom_reaper: reaped process 17711 (python)", None),
    ],
)
def test_the_kernels_log_names_whom_it_killed_for_want_of_memory(line: str, found: tuple[int, str] | None) -> None:
    assert killed_in(line) == found


def test_a_container_that_sees_only_its_own_group_counts_its_kills_too(tmp_path: Path) -> None:
    group, counter = tmp_path / "proc/self/cgroup", tmp_path / "sys/fs/cgroup/memory.events"
    for file in (group, counter):
        file.parent.mkdir(parents=True, exist_ok=True)
    group.write_text("0::/system.slice/docker-0123.scope\n")  # the host's path: there is none like it in here
    counter.with_name("memory.current").write_text("1\n")
    counter.write_text("oom 3\noom_kill 2\noom_group_kill 0\n")
    memory = Memory(tmp_path)
    assert memory.evidence(7, -9) == ""
    counter.write_text("oom 4\noom_kill 3\noom_group_kill 0\n")
    assert memory.evidence(7, 1) == ""
    assert str(counter) in memory.evidence(7, -9)
    assert memory.evidence(8, -9) == ""
    counter.write_text("oom 5\noom_kill 4\noom_group_kill 0\n")  # an engine's, say, whose end nobody asked about
    memory.look(time.monotonic() + 1.5 * RECENT_S)
    assert memory.evidence(9, -9) != "", "it has just been seen"
    counter.write_text("oom 6\noom_kill 5\noom_group_kill 0\n")
    for later in (3.0, 4.5):
        memory.look(time.monotonic() + later * RECENT_S)
    assert memory.evidence(10, -9) == "", "that was long ago"


def test_who_ends_as_its_log_is_turned_over_has_its_last_words_in_the_one_before(tmp_path: Path) -> None:
    log = tmp_path / "rank_0.log"
    log.write_text("step 81\n")
    assert said(log) == "step 81"
    log.rename(tmp_path / "rank_0.log.1")
    assert said(log) == "step 81"
    log.touch()
    assert said(log) == "step 81"


def test_the_last_line_of_a_log_is_bounded_and_never_empty_where_there_is_one(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("".join(f"line {n}\n" for n in range(100_000)) + "\n  \n")
    assert last_line(log) == "line 99999"
    log.write_text("x" * 100_000)
    assert last_line(log) == "x" * 500
    assert last_line(tmp_path / "none") == ""


def beating(slot: int = 0, **changes: object) -> Beating:
    about = {key: changes.pop(key) for key in ("stopped", "finished") if key in changes}
    return Beating(slot=slot, beat=replace(BEAT, **changes), **about)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("workers", "work"),
    [
        ([], Work.NONE),
        ([beating()], Work.TRAINING),
        ([beating(), beating(1, state=Stage.JOINING)], Work.JOINING),
        ([beating(), beating(1, generation=13)], Work.JOINING),  # told, and not there yet
        ([beating(state=Stage.PARKED), beating(1)], Work.PARKED),
        ([beating(state=Stage.PARKED, generation=13)], Work.JOINING),  # parked in an older one
        ([beating(since=1.0, waiting=True)], Work.STALLED),
        ([beating(since=1.0)], Work.TRAINING),  # it waits for nobody: its own node ends it by `stall`
        ([beating(finished=True), beating(1)], Work.TRAINING),
        ([beating(finished=True), beating(1, state=Stage.DONE)], Work.DONE),
    ],
)
def test_one_word_for_all_workers_of_a_node(workers: list[Beating], work: Work) -> None:
    assert look(workers, 14, BUDGETS, 95.0).work is work


def test_who_waits_outside_of_the_gang_is_what_a_node_shows_and_is_no_stall_as_long_as_it_says_so() -> None:
    victim = beating(0, since=1.0, waiting=True)
    found = look([victim, beating(1, since=94.0, phase=OUTSIDE)], 14, BUDGETS, 95.0, 1095.0)
    assert (found.phase, found.beat_at, found.work) == (OUTSIDE, 1094.0, Work.STALLED)
    silent = look([victim, beating(1, since=1.0, phase=OUTSIDE)], 14, BUDGETS, 1000.0).stall
    assert silent is not None
    assert (silent.slot, silent.waiting) == (1, False)


def test_a_rank_that_waited_for_an_engine_elsewhere_is_not_ended_as_that_is_back() -> None:
    waits = beating(since=1.0, waiting=True)
    assert look([waits], 14, BUDGETS, 95.0).work is Work.STALLED, "its peer is excused, and so is it"
    released = beating(since=1.0, waited_s=93.9)
    assert look([released], 14, BUDGETS, 95.0).stall is None
    assert look([released], 14, BUDGETS, 950.0).stall is not None, "now it stands still by itself"


def test_a_node_loads_as_long_as_one_of_its_programs_has_not_asked_for_its_rank() -> None:
    loads = beating(1, since=50.0, state=Stage.WARM, phase=OUTSIDE)  # whatever it calls what it does
    assert look([beating(phase=MEETING, since=40.0), loads], 14, BUDGETS, 95.0).phase == LOADING
    assert look([beating(phase=MEETING, since=40.0)], 14, BUDGETS, 95.0).phase == MEETING


def test_state_is_put_back_as_long_as_it_comes_nearer() -> None:
    def shows(**more: Any) -> bool:
        forms = {"state": Stage.JOINING, "phase": MEETING, "since": 90.0, "nearer": 94.5, **more}
        return look([beating(**forms)], 14, BUDGETS, 95.0).restores

    assert shows()
    assert not shows(nearer=95.0 - 1.01 * BUDGETS.settings.floor_s), "none came for as long as the shortest budget"
    assert not shows(nearer=0.0), "it may be over in a moment"
    assert not shows(state=Stage.TRAINING)
    assert not shows(generation=13), "it is that of an earlier plan"


def test_of_several_stalls_the_stopped_one_is_named_then_the_one_that_waits_for_nobody() -> None:
    victims = [beating(0, since=1.0, waiting=True), beating(1, since=60.0, waiting=True)]
    first = look(victims, 14, BUDGETS, 95.0).stall
    assert first is not None
    assert first.slot == 0
    hung = look([*victims, beating(2, since=80.0)], 14, BUDGETS, 95.0).stall
    assert hung is not None
    assert (hung.slot, hung.waiting) == (2, False)
    workers = [*victims, beating(2, since=80.0), beating(3, since=80.0, waiting=True, stopped=True)]
    stopped = look(workers, 14, BUDGETS, 95.0).stall
    assert stopped is not None
    assert (stopped.slot, stopped.stopped) == (3, True)


def test_nobody_is_stalled_while_parked_or_done() -> None:
    for state in (Stage.PARKED, Stage.DONE):
        assert look([beating(since=0.0, state=state)], 14, BUDGETS, 1000.0).stall is None


def test_the_step_of_a_node_is_the_one_that_all_its_workers_have_sealed() -> None:
    seen = look([beating(step=101), beating(1, step=100, saved=90, manifest="step-90")], 14, BUDGETS, 95.0)
    assert (seen.step, seen.saved, seen.manifest) == (100, 90, "step-90")


def test_a_phases_budget_is_learned_from_how_long_it_took() -> None:
    pace = Usual(budgets=BUDGETS).learn([beating(since=90.0)], 90.1).learn([beating(since=90.6, phase="rollout")], 90.7)
    assert pace.budgets.took["update"].lately == (pytest.approx(0.6),)
    other = pace.learn([beating(since=99.0, pid=8)], 99.1)  # another process: nothing can be said
    assert other.budgets == pace.budgets


def test_a_phase_takes_as_long_as_its_parts_before_and_behind_waits_outside() -> None:
    said = [("reward", 90.0), (OUTSIDE, 92.0), (OUTSIDE, 92.5), ("reward", 110.0), (OUTSIDE, 111.0), ("reward", 111.5)]
    pace = Usual(budgets=BUDGETS)
    for phase, since in said:
        pace = pace.learn([beating(since=since, phase=phase)], since)
    assert pace.budgets.took.keys() == {OUTSIDE}, "it was never over"
    assert pace.budgets.took[OUTSIDE].lately == (0.5, 17.5), "the last was over before it had to be said again"
    over = pace.learn([beating(since=115.5, phase="update")], 115.5)
    assert over.budgets.took["reward"].lately == (2.0 + 1.0 + 4.0,)
    again = over.learn([beating(since=117.0, phase="reward")], 117.0).learn([beating(since=120.0)], 120.0)
    assert again.budgets.took["reward"].lately == (7.0, 3.0)
    cut = pace.learn([beating(since=115.5, phase="parked", state=Stage.PARKED)], 115.5)
    assert (cut.budgets, cut.halves) == (pace.budgets, {})
    for phase, since in (("fetch", 120.0), (OUTSIDE, 121.0), ("update", 125.0)):  # a script's: it does not go back
        again = again.learn([beating(since=since, phase=phase)], since)
    assert again.budgets.took["fetch"].lately == (1.0,)


@pytest.mark.parametrize("state", [Stage.PARKED, Stage.JOINING])
def test_a_phase_that_a_broken_gang_ended_teaches_nothing(state: Stage) -> None:
    # Else each hang made the next one's victims wait ten times as long.
    pace = Usual(budgets=BUDGETS).learn([beating(since=90.0)], 95.0)
    parked, formed = (
        beating(since=105.0, phase="parked", state=state),
        beating(since=105.0, phase="reform", generation=15),
    )
    assert pace.learn([parked], 105.1).budgets == BUDGETS
    assert pace.learn([formed], 105.1).budgets == BUDGETS


@pytest.mark.parametrize("waiting", [False, True])
def test_what_was_ended_as_a_hang_has_twice_as_long_at_its_step_and_no_other(*, waiting: bool):
    # Found by reading: an evaluation of 8 s every 500 steps of 50 ms was killed at its step for ever.
    settings = Timeouts(default_phase_s=60.0, floor_s=2.0)
    usual = Usual(budgets=reduce(lambda known, _: known.learn("update", 0.05), range(20), Budgets(settings=settings)))
    assert usual.budgets.budget("update") == 2.0
    slow, pace, tries = beating(since=90.0, step=499, waiting=waiting), usual, 1
    while tries < 10:
        now = slow.beat.since
        while now < slow.beat.since + 8.0 and not (stall := look([slow], 14, pace.budgets, now).stall):
            now += 0.05
            pace = pace.learn([slow], now)
        if not stall:
            break
        pace = pace.learn(
            [slow], now + 1.0
        )  # it is ended, and a fresh one comes to the step that was made and not sealed
        tries += 1
        slow = beating(since=now + 5.0, step=500, waiting=waiting, pid=7 + tries, generation=14 + tries)
        pace = pace.learn([slow], now + 5.0)
    assert tries == 3
    assert (pace.budgets.budget("update", 500), pace.budgets.budget("update", 502)) == (
        pytest.approx(14.3, abs=0.2),
        2.0,
    )
    through = pace.learn([replace(slow, beat=replace(slow.beat, since=slow.beat.since + 8.0, step=501))], 200.0)
    assert through.budgets.budget("update", 1000) == pytest.approx(16.0), "what was seen to pass may come again"
    for _ in range(10):
        pace = replace(pace, budgets=pace.budgets.end(replace(stall_of(slow, BUDGETS, 1000.0), for_s=50.0)))
    assert pace.budgets.budget("update", 500) == 60.0, "its cap"


def test_a_stopped_process_is_not_slow_and_teaches_nothing():
    pace = Usual(budgets=Budgets(settings=Timeouts()).learn("update", 0.05))
    pace = pace.learn([beating(since=90.0, stopped=True)], 95.0).learn([beating(since=96.0, pid=8)], 96.0)
    assert pace.budgets.budget("update", 100) == 2.0


def test_the_moment_between_a_reform_and_the_first_step_is_not_how_long_a_reform_takes() -> None:
    pace = (
        Usual(budgets=BUDGETS).learn([beating(since=90.0, phase="reform")], 90.0).learn([beating(since=90.01)], 90.02)
    )
    assert pace.budgets.budget("reform") == BUDGETS.budget("reform")


def test_a_spec_comes_back_from_its_file(tmp_path: Path) -> None:
    spec = Spec(job="j", node="n", program=("-m", "x"), log_dir="/tmp/x", timeouts=Timeouts(phase_s={"save": 9.0}))
    (tmp_path / "spec").write_text(dump(spec))
    assert load(tmp_path / "spec") == spec
    (tmp_path / "spec").write_text(dump(spec).replace('"slots": 1', '"slots": "all"'))
    with pytest.raises(BadSpec, match="slots"):
        load(tmp_path / "spec")
    with pytest.raises(BadSpec, match="cannot be read"):
        load(tmp_path / "none")


def test_thread_counts_do_not_depend_on_how_many_workers_a_node_has() -> None:
    one, eight = (common_env(Spec(job="j", node="n", program=("x",), log_dir="/tmp", slots=n)) for n in (1, 8))
    assert one == eight
    assert one["OMP_NUM_THREADS"] == "1"
    assert one["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0"


def test_torch_is_to_ask_for_huge_pages_unless_the_operator_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = Spec(job="j", node="n", program=("x",), log_dir="/tmp")
    monkeypatch.delenv(HUGE_PAGES, raising=False)
    usual = common_env(spec)[HUGE_PAGES]
    assert usual == str(int(not gives_back()))
    assert common_env(replace(spec, env={HUGE_PAGES: "yes"}))[HUGE_PAGES] == "yes"
    assert HUGE_PAGES not in common_env(replace(spec, script=True)), "a script runs as under torchrun"
    monkeypatch.setenv(HUGE_PAGES, "no")
    assert common_env(spec)[HUGE_PAGES] == environment(spec)[HUGE_PAGES] == "no"


@pytest.mark.parametrize(
    ("said", "gives"), [("9", True), ("-1", False), ("4294967295", False), ("11", False), ("", False), (None, False)]
)
def test_a_machine_that_gives_free_memory_back_is_known_by_its_kernel(
    tmp_path: Path, said: str | None, gives: bool
) -> None:
    if said is not None:
        (tmp_path / "order").write_text(f"{said}\n")
    assert gives_back(tmp_path / "order") is gives


@pytest.mark.skipif(
    not (THP.exists() and re.search(r"\[(always|madvise)\]", THP.read_text())),
    reason="this kernel gives nobody huge pages who asks for them",
)
def test_torch_knows_the_variable_that_asks_for_huge_pages() -> None:
    program = "import torch; kept = torch.ones(1 << 24); print(open('/proc/self/smaps').read())"
    env = {**os.environ, HUGE_PAGES: "1"}
    done = subprocess.run(
        [sys.executable, "-c", program], env=env, check=True, capture_output=True, text=True, timeout=60
    )
    assert sum(int(kb) for kb in re.findall(r"AnonHugePages: +(\d+) kB", done.stdout)) > 16 << 10


def test_nodes_that_share_a_machine_are_hosts_of_their_own_to_nccl_and_the_workers_of_a_node_are_not() -> None:
    hosts = [
        common_env(Spec(job="j", node=n, program=("x",), log_dir="/tmp", slots=2))["NCCL_HOSTID"] for n in ("a", "b")
    ]
    assert hosts == ["j.a", "j.b"]


def test_a_fork_loses_every_thread_but_those_that_come_again_by_themselves() -> None:
    assert lost(["python3", "jemalloc_bg_thd"]) == ["python3"]
    assert lost(["python3", "pt_autograd_0"]) == ["python3", "pt_autograd_0"]


def test_nccls_warnings_are_asked_for_unless_the_operator_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = Spec(job="j", node="n", program=("x",), log_dir="/tmp")
    monkeypatch.delenv("NCCL_DEBUG", raising=False)
    assert environment(spec)["NCCL_DEBUG"] == "WARN"
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    assert environment(spec)["NCCL_DEBUG"] == "INFO"


@pytest.mark.long
def test_a_program_that_was_imported_beforehand_is_run_without_a_warning(tmp_path: Path) -> None:
    (tmp_path / "trainer").mkdir()
    (tmp_path / "trainer" / "__init__.py").touch()
    (tmp_path / "trainer" / "__main__.py").write_text("import sys; print(__name__, sys.argv)")
    code = "import trainer.__main__; from elasticrl.agent.worker import run; run(('-m', 'trainer'), ('--fast',))"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.splitlines()[-1].startswith("__main__ [")
