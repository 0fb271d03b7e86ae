import subprocess
import sys
import time

from chaos.patience import MOST, patience


def test_a_test_waits_as_long_as_it_says_at_least_and_has_an_end() -> None:
    assert 2.0 <= patience(2.0) <= 2.0 * MOST


def test_it_waits_longer_beside_others_that_compute() -> None:
    spin = [sys.executable, "-c", "while True: pass"]
    busy = [subprocess.Popen(spin) for _ in range(12)]
    try:
        seen = []
        deadline = time.monotonic() + 60.0
        while not any(each > 2.0 for each in seen) and time.monotonic() < deadline:
            time.sleep(0.1)
            seen.append(patience(1.0))
    finally:
        for process in busy:
            process.kill()
            process.wait()
    assert any(each > 2.0 for each in seen), seen
