"""The lab's clock that is off: what is shown jumps, and how long a wait takes does not."""

import os
import subprocess
import sys
import time
from pathlib import Path

from chaos.live import clock

SHOWS = "import time; b = time.monotonic(); time.sleep(0.2); print(time.time(), time.monotonic() - b)"
# As C++ waits: by the time of day, as libc tells it.
WAITS = """
import ctypes, time
libc, now = ctypes.CDLL(None), (ctypes.c_long * 2)()
semaphore = ctypes.create_string_buffer(32)
libc.sem_init(semaphore, 0, 0)
libc.clock_gettime(0, now)
now[0] += 1
begun = time.monotonic()
libc.sem_timedwait(semaphore, now)
print(time.monotonic() - begun)
"""


def said(off: clock.FalseClock, script: str) -> list[float]:
    command = [sys.executable, "-I", "-S", "-c", script]
    done = subprocess.run(
        command, env={**os.environ, **off.environment()}, capture_output=True, text=True, check=True, timeout=30
    )
    return [float(word) for word in done.stdout.split()]


def test_a_process_sees_another_time_of_day_until_it_is_put_right_and_waits_as_long_as_ever(tmp_path: Path) -> None:
    assert not clock.lacking(), "`make system` installs it"
    off = clock.FalseClock(tmp_path / "n0.clock")
    for off_s in (3600.0, -3600.0, 0.0):
        off.show(off_s, drift=0.02 if off_s else 0.0)
        shown, slept = said(off, SHOWS)
        assert abs(shown - time.time() - off_s) < 10.0
        assert 0.19 < slept < 5.0
        (waited,) = said(off, WAITS)
        assert 0.9 < waited < 6.0
