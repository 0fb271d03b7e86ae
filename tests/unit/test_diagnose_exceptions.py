"""Exceptions that no row of the table knows: what is guessed of them, how sure it is, and what goes before the guess."""

import pytest

from elasticrl.contract.evidence import Sign
from elasticrl.contract.verdict import Confidence, Fault, Known, Verdict
from elasticrl.core.judge.judge import judge
from elasticrl.diagnose.exceptions import LastFrame, sign_of
from elasticrl.diagnose.logs import Parser
from elasticrl.diagnose.record import SHORT, candidates
from elasticrl.diagnose.texts import TEXTS

MINE = 'Traceback (most recent call last):\n  File "/job/train.py", line 7, in step\n    loss = model(batch)\n'
THEIRS = '  File "/env/site-packages/lib/core.py", line 9, in call\n    return self.inner(x)\n'
STANDARD = (
    '  File "/usr/lib/python3.11/json/decoder.py", line 340, in decode\n    raise JSONDecodeError("Extra data", s)\n'
)
WAIT = (
    "[rank1]:[E611 10:42:28 ProcessGroupNCCL.cpp:616] [Rank 1] Watchdog caught collective operation timeout: "
    "WorkNCCL(SeqNum=9, OpType=ALLREDUCE, NumelIn=64, NumelOut=64, Timeout(ms)=600000) ran for 600012 milliseconds\n"
)


def told(log: str) -> Verdict:
    return judge(Parser(source="job.log").read(log.encode()))


@pytest.mark.parametrize(
    ("log", "fault", "confidence"),
    [
        (MINE + "RuntimeError: something of the model\n", Fault.USER_ERROR, Confidence.LOW),
        (MINE + "Exception: something of the model\n", Fault.USER_ERROR, Confidence.LOW),
        (MINE + "some.library.Unsupported: call_method\n", Fault.USER_ERROR, Confidence.LOW),
        (MINE + "KeyError: 'labels'\n", Fault.USER_ERROR, Confidence.MEDIUM),
        (MINE + THEIRS + "KeyError: 'labels'\n", Fault.USER_ERROR, Confidence.LOW),
        (MINE + STANDARD + "json.decoder.JSONDecodeError: Extra data: line 2\n", Fault.USER_ERROR, Confidence.LOW),
        (MINE + "ValueError: bad shape of the batch\n", Fault.USER_ERROR, Confidence.LOW),
        (MINE + "AttributeError: 'Plugin' object has no attribute 'mesh'\n", Fault.USER_ERROR, Confidence.LOW),
        (MINE + THEIRS + "AttributeError: 'Plugin' object has no attribute 'mesh'\n", Fault.VERSION_MISMATCH, Confidence.LOW),
        (MINE + THEIRS + "AttributeError: 'NoneType' object has no attribute 'mesh'\n", Fault.USER_ERROR, Confidence.LOW),
        (MINE + "ValueError: this needs a newer torch, please upgrade\n", Fault.VERSION_MISMATCH, Confidence.LOW),
        (MINE + "RuntimeError: Kit requires GPUs with sm75 or higher\n", Fault.VERSION_MISMATCH, Confidence.LOW),
        (MINE + "ValueError: no decode kernel for this shape\n", Fault.VERSION_MISMATCH, Confidence.LOW),
        (MINE + "ValueError: No valid attention backend found\n", Fault.VERSION_MISMATCH, Confidence.LOW),
        (MINE + "AssertionError: fp8 needs an fp8 query; enable --query-config\n", Fault.CONFIG, Confidence.LOW),
        (MINE + "ValueError: the cache is too small. Set CACHE_SPACE_GB to more\n", Fault.CONFIG, Confidence.LOW),
        (MINE + "ValueError: no room. Decrease `max_model_len` to fit\n", Fault.CONFIG, Confidence.LOW),
        (MINE + "ValueError: use a tensor of two dimensions\n", Fault.USER_ERROR, Confidence.LOW),
        (MINE + "RuntimeError: the worker process has died\n", Fault.DEAD_RANK, Confidence.LOW),
        (MINE + "FooError: no answer, timed out\n", Fault.HOST_HANG, Confidence.LOW),
        (MINE + "FooError: the connection was lost\n", Fault.NETWORK, Confidence.LOW),
        (MINE + "KeyboardInterrupt\n", Fault.HOST_HANG, Confidence.LOW),
        (MINE, Fault.USER_ERROR, Confidence.LOW),
        (MINE + "AssertionError()\n", Fault.USER_ERROR, Confidence.LOW),
        (MINE.replace("loss = model(batch)", 'raise KeyError("labels")'), Fault.USER_ERROR, Confidence.MEDIUM),
        ('  File "/usr/lib/queue.py", line 180, in get\n    self.not_empty.wait()\n', Fault.HOST_HANG, Confidence.LOW),
    ],
)  # fmt: skip
def test_an_exception_that_no_row_knows_is_guessed_and_is_sure_of_nothing_but_plain_mistakes(
    log: str, fault: Fault, confidence: Confidence
) -> None:
    verdict = told(log)
    assert (verdict.fault, verdict.confidence) == (fault, confidence), verdict.cause


@pytest.mark.parametrize("log", [
    'Traceback (most recent call last):\n  File "/env/torch/distributed/run.py", line 9, in run\n    elastic_launch(\n',
    'Traceback (most recent call last):\n  File "/job/train.py", line 9, in setup\n    dist.init_process_group("nccl")\n',
    MINE.replace("loss = model(batch)", "raise ChildFailedError("),
    MINE + "torch.distributed.elastic.multiprocessing.errors.ChildFailedError:\n",
    MINE + "Exception: WorkerProc initialization failed due to an exception in a background process.\n",
    '  File "/job/a.py", line 9 in step\n',  # of faulthandler, which prints the innermost frame first
])  # fmt: skip
def test_who_only_passes_on_what_another_process_met_is_not_blamed(log: str) -> None:
    assert told(log).fault is Fault.UNKNOWN


def test_a_traceback_that_breaks_off_is_heard_only_if_nothing_else_is_said() -> None:
    assert told(WAIT + MINE).fault is Fault.HOST_HANG
    assert told("ConnectionResetError: [Errno 104]\n" + MINE).fault is Fault.DEAD_RANK


def test_a_traceback_is_not_ended_by_the_exception_of_another_speaker() -> None:
    mine = "".join(f"[rank0]: {line}\n" for line in MINE.splitlines())
    facts = Parser(source="job.log").read((mine + "[rank1]: KeyError: 'labels'\n").encode())
    assert {fact.sign for fact in facts} == {Sign.MISTAKE, Sign.CUT_OFF}


def test_a_stream_that_only_pauses_has_no_broken_traceback() -> None:
    parser = Parser(source="job.log")
    assert [*parser.feed(MINE.encode()), *parser.flush()] == []
    assert [fact.sign for fact in [*parser.feed(b"KeyError: 'labels'\n"), *parser.end()]] == [Sign.PROGRAM]


@pytest.mark.parametrize(("end", "fault"), [("KeyboardInterrupt\n", Fault.HOST_HANG), ("", Fault.USER_ERROR)])
def test_the_end_of_a_long_log_is_read_as_closely_as_its_beginning(end: str, fault: Fault) -> None:
    assert told("step 12 loss 0.1\n" * 20_000 + MINE + end).fault is fault
    assert told("step 12 loss 0.1\n" * 20_000 + MINE + end + "bye\n" * 4).fault is fault


def test_what_vague_words_say_gives_way_to_whoever_knows() -> None:
    verdict = told(
        "slurmstepd: error: Failed to create a cgroup\nRuntimeError: CUDA error: uncorrectable ECC error encountered\n"
    )
    assert verdict.fault is Fault.GPU_FAULT


def test_a_log_that_claims_two_classes_is_sure_of_none() -> None:
    line = "n:1:2 [0] NCCL WARN Call to connect to 192.0.2.7<4> failed : No route to host\n"
    assert told(line).confidence is Confidence.MEDIUM
    both = Parser(source="job.log").read((line + "[1] 812 segmentation fault\n").encode())
    assert judge(both).confidence is Confidence.LOW
    assert judge(both, Known(world=2, nodes={0: "n0", 1: "n1"})).confidence is Confidence.MEDIUM


def test_a_disk_is_not_blamed_for_the_words_of_a_library_that_carries_messages() -> None:
    said = "[1:0] ib_mlx5.c:7 UCX  ERROR mlx5dv failed on mlx5_0: Input/output error\n"
    assert told(said).fault in {Fault.NETWORK, Fault.FABRIC}
    assert told("OSError: [Errno 5] Input/output error: '/data/x'\n").fault is Fault.DISK


ROLL = "Initializing distributed: GLOBAL_RANK: {}, MEMBER: {}/4\n"


def test_a_roll_of_ranks_that_is_never_complete_is_a_matter_of_settings() -> None:
    some = "".join(ROLL.format(rank, rank + 1) for rank in range(3))
    assert (told(some).fault, told(some).confidence) == (Fault.CONFIG, Confidence.LOW)
    assert told(some + ROLL.format(1, 2)).confidence is Confidence.MEDIUM
    assert (
        told(some + "distributed_backend=nccl\nAll distributed processes registered. Starting\n").fault is Fault.UNKNOWN
    )
    assert told(some + ROLL.format(3, 4)).fault is Fault.UNKNOWN


@pytest.mark.parametrize("length", [0, 60, SHORT - 1, SHORT + 1])
def test_the_rows_that_may_match_are_those_whose_words_are_in_the_text(length: int) -> None:
    for row in TEXTS:
        text = "x" * length + row.needle + " y"
        assert list(candidates(text)) == [other for other in TEXTS if any(needle in text for needle in other.needles)]


def test_where_an_exception_ends_tells_a_library_from_the_program() -> None:
    said = "'Plugin' object has no attribute 'mesh'"
    assert sign_of("AttributeError", said, LastFrame("/env/site-packages/a/b.py", "call")) is Sign.MISFIT
    assert sign_of("AttributeError", said, LastFrame("/job/train.py", "main")) is Sign.MISTAKE
    assert sign_of("ChildFailedError", "", None) is None
