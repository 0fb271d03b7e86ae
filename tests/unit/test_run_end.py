"""The end of `elasticrl run`, whatever signals come meanwhile; with a real process and real signals."""

import signal
import subprocess
import sys

import pytest

ENDS = """
import sys, time
from elasticrl.cli.serve import Ending

ending = Ending(60.0)
try:
    print("begun", flush=True)
    time.sleep(60)
except KeyboardInterrupt:
    print("ending", flush=True)
sys.stdin.readline()  # in the middle of the end
ending.done()
print("ended", flush=True)
sys.stdin.readline()
sys.exit(130)
"""


def as_at_a_terminal() -> None:
    """The tests may run under nohup, or in the background of a shell, with these ignored."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_second_signal_is_answered_and_breaks_nothing(first: signal.Signals) -> None:
    # It broke the end: daemons and agents were left for up to 69 s.
    process = subprocess.Popen(
        [sys.executable, "-c", ENDS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        preexec_fn=as_at_a_terminal,  # noqa: PLW1509
    )  # fmt: skip
    with process:
        assert process.stdin
        assert process.stdout
        assert process.stderr
        try:
            assert process.stdout.readline() == "begun\n"
            process.send_signal(first)
            assert process.stdout.readline() == "ending\n"
            for again in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                process.send_signal(again)
                assert process.stderr.readline().startswith("it is ending already, which may take 60 s")
            process.stdin.write("\n")
            process.stdin.flush()
            assert process.stdout.readline() == "ended\n"
            process.send_signal(signal.SIGTERM)  # too late for anything
            process.stdin.write("\n")
            process.stdin.flush()
            assert process.wait(20.0) == 130
        finally:
            process.kill()
