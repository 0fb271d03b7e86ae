"""A slow cable: a pair of TAP devices in a namespace's way, joined by a program that holds each frame for a while.

Not every kernel has netem. `python diagnose_delay.py NAMESPACE ADDRESS/24 BRIDGE DEVICE DELAY_MS` gives the namespace an eth0
whose other end is DEVICE on the bridge; it says "ready" and runs until it is killed, and its devices go with it.
"""

import ctypes
import heapq
import os
import select
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from chaos.live.delay import NEW_NET, tap


def tap_in(namespace: str, name: str) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    here, there = os.open("/proc/self/ns/net", os.O_RDONLY), os.open(f"/run/netns/{namespace}", os.O_RDONLY)
    assert libc.setns(there, NEW_NET) == 0
    try:
        return tap(name)
    finally:
        assert libc.setns(here, NEW_NET) == 0


def main(namespace: str, address: str, bridge: str, device: str, delay_ms: str) -> None:
    inner, outer = tap_in(namespace, "eth0"), tap(device)
    for command in (
        ["-n", namespace, "addr", "add", address, "dev", "eth0"],
        ["-n", namespace, "link", "set", "eth0", "up"],
        ["link", "set", device, "master", bridge, "up"],
    ):
        subprocess.run(["ip", *command], check=True)
    print("ready", flush=True)
    other, held, number = {inner: outer, outer: inner}, [], 0
    poll = select.poll()
    for handle in other:
        poll.register(handle, select.POLLIN)
    while True:
        wait_ms = max(0.0, (held[0][0] - time.monotonic()) * 1000) if held else 1000.0
        for handle, _ in poll.poll(wait_ms):
            number += 1
            heapq.heappush(
                held, (time.monotonic() + float(delay_ms) / 1000, number, other[handle], os.read(handle, 65600))
            )
        while held and held[0][0] <= time.monotonic():
            _, _, handle, frame = heapq.heappop(held)
            try:
                os.write(handle, frame)
            except OSError:
                pass  # a full queue drops, as a switch does


if __name__ == "__main__":
    main(*sys.argv[1:])
