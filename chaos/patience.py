"""How long a test, or a live scenario, waits: so much longer than on a quiet machine as this one is slower.

    deadline = time.monotonic() + patience(10.0)
    assert time.monotonic() - begun < patience(1.0)

A test that wants to see that something is quick is thus as strict as ever on a quiet machine, and no red one says only that
somebody else computed.
"""

import os
import time

SPIN_S = 0.005  # of computing, by which this process measures what it gets
MOST = 20.0  # beyond that a machine is not busy but broken


def slowdown() -> float:
    """How many times longer than on a quiet machine things take now: by what this process gets, and by who waits beside it."""
    begun, limit = time.perf_counter(), time.process_time() + SPIN_S
    while time.process_time() < limit:
        pass
    got = (time.perf_counter() - begun) / SPIN_S
    waiting = os.getloadavg()[0] / (os.cpu_count() or 1)
    return min(max(1.0, got, waiting), MOST)


def patience(seconds: float) -> float:
    """This many seconds of a quiet machine."""
    return seconds * slowdown()
