"""A slow cable, put in while a node of the lab runs: `python delay.py PID WIRE BRIDGE DELAY_MS`, until it is killed.

Not every kernel has netem. The node's wire leaves the bridge, a TAP device takes its place there, and this program carries the
frames between the two, each after a while. PID is a process of the node.
"""

import ctypes
import fcntl
import heapq
import os
import select
import socket
import struct
import subprocess
import sys
import time

TUNSETIFF, TAP, NO_HEADER, NEW_NET = 0x400454CA, 0x0002, 0x1000, 0x40000000
SIOCETHTOOL, OUTGOING = 0x8946, 4
CHECKSUMS, SEGMENTS, MORE_SEGMENTS = 0x17, 0x1F, 0x24  # to be made by the kernel, not by a device that is none


def tap(name: str) -> int:
    """A TAP device of this name, as long as it is open."""
    handle = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(handle, TUNSETIFF, struct.pack("16sH22x", name.encode(), TAP | NO_HEADER))
    return handle


def plain_frames(pid: str, device: str) -> None:
    """What leaves this device is complete: who carries it by hand would carry holes."""
    libc = ctypes.CDLL(None, use_errno=True)
    here, there = os.open("/proc/self/ns/net", os.O_RDONLY), os.open(f"/proc/{pid}/ns/net", os.O_RDONLY)
    assert libc.setns(there, NEW_NET) == 0
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            for what in (CHECKSUMS, SEGMENTS, MORE_SEGMENTS):
                value = ctypes.create_string_buffer(struct.pack("II", what, 0))
                request = struct.pack("16sP16x", device.encode(), ctypes.addressof(value))
                fcntl.ioctl(sock, SIOCETHTOOL, request)
    finally:
        assert libc.setns(here, NEW_NET) == 0


def main(pid: str, wire: str, bridge: str, delay_ms: str) -> None:
    """Until it is killed."""
    plain_frames(pid, "eth0")
    device = f"{wire}d"
    far = tap(device)
    near = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
    near.bind((wire, 0))
    near.setblocking(False)
    for command in (["set", wire, "nomaster"], ["set", wire, "promisc", "on"], ["set", device, "master", bridge, "up"]):
        subprocess.run(["ip", "link", *command], check=True)
    print("ready", flush=True)
    held: list[tuple[float, int, bool, bytes]] = []
    poll, number = select.poll(), 0
    poll.register(near, select.POLLIN)
    poll.register(far, select.POLLIN)
    while True:
        wait_ms = max(0.0, (held[0][0] - time.monotonic()) * 1000) if held else 1000.0
        for handle, _ in poll.poll(wait_ms):
            outward = handle == near.fileno()
            try:
                frame, about = near.recvfrom(65600) if outward else (os.read(far, 65600), ("", 0, 0))
            except BlockingIOError:
                continue
            if about[2] == OUTGOING:
                continue  # what we have just sent
            number += 1
            heapq.heappush(held, (time.monotonic() + float(delay_ms) / 1000, number, outward, frame))
        while held and held[0][0] <= time.monotonic():
            _, _, outward, frame = heapq.heappop(held)
            try:
                os.write(far, frame) if outward else near.send(frame)
            except OSError:
                pass  # a full queue drops, as a switch does


if __name__ == "__main__":
    main(*sys.argv[1:])
