"""Which signals end a process of ours, where whoever started it has TERM ignored."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from elasticrl.base.parent import stops

PASSES_OVER = """
import os, signal
from elasticrl.base.parent import pass_over, stops

assert stops() == (signal.SIGINT,)
pass_over()
os.kill(os.getpid(), signal.SIGTERM)
child = os.fork()
if child == 0:
    os.kill(os.getpid(), signal.SIGTERM)
    os._exit(1)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_term_ends_a_process_unless_it_is_ignored() -> None:
    assert stops() == (signal.SIGTERM, signal.SIGINT)


def test_a_worker_passes_over_a_term_that_is_ignored_and_what_it_forks_does_not() -> None:
    done = subprocess.run(
        ["bash", "-c", 'trap "" TERM; exec "$@"', "bash", sys.executable, "-c", PASSES_OVER],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr, done.stdout) == (0, "", "-15\n")


@pytest.mark.parametrize("trap", ['trap "" TERM; ', ""])
def test_a_vault_that_was_started_with_term_ignored_leaves_it_so(tmp_path: Path, trap: str) -> None:
    command = ["-m", "elasticrl.runtime.vault", "--job", "j", "--node", "n", "--dir", f"{tmp_path}/v"]
    vault = subprocess.Popen(
        ["bash", "-c", f'{trap}exec "$@"', "bash", sys.executable, *command], stdout=subprocess.PIPE, text=True
    )
    try:
        assert vault.stdout is not None
        assert '"ready": true' in vault.stdout.readline()
        status = Path(f"/proc/{vault.pid}/status").read_text(encoding="ascii")
        ignored = int(status.partition("SigIgn:")[2].split()[0], 16) >> signal.SIGTERM - 1 & 1
        assert bool(ignored) == bool(trap)
        vault.send_signal(signal.SIGINT)
        assert vault.wait(30) == 0
    finally:
        vault.kill()
        vault.wait()
        vault.stdout.close()
