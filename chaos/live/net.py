"""What happens to the lab's cables: frames that are dropped on the bridge, and slow wires.

The one idea: every rule counts what it drops, so a network fault can prove that it struck. Rules belong to a table of the
lab's own in the bridge family; the driver, which is not behind the bridge, always hears the store.
"""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from chaos.live.box import Box, host
from chaos.live.errors import BoxError


@dataclass(frozen=True, slots=True)
class Rule:
    """Some frames that are dropped, as one chain of the table. Example: Rule("f3")"""

    chain: str


class Net:
    """The rules of one lab."""

    def __init__(self, table: str) -> None:
        self.table = table
        self._numbers: Iterator[int] = count()

    def up(self) -> None:
        """An empty table."""
        self._nft(f"add table bridge {self.table}")

    def drop(self, *matches: str) -> Rule:
        """Frames that match any of these are lost.

        Example: net.drop("iifname elx0n0 oifname elx0n1")
        """
        rule = Rule(f"f{next(self._numbers)}")
        lines = [f"add chain bridge {self.table} {rule.chain} {{ type filter hook forward priority 0; }}"]
        lines += [f"add rule bridge {self.table} {rule.chain} {match} counter drop" for match in matches]
        self._nft("\n".join(lines))
        return rule

    def dropped(self, rule: Rule) -> int:
        """How many frames it has dropped so far."""
        listed = host("nft", "-j", "list", "chain", "bridge", self.table, rule.chain).stdout
        total = 0
        for entry in json.loads(listed)["nftables"]:
            for part in entry.get("rule", {}).get("expr", ()):
                total += part.get("counter", {}).get("packets", 0)
        return total

    def heal(self, rule: Rule) -> None:
        """Drop them no more."""
        self._nft(f"delete chain bridge {self.table} {rule.chain}")

    def _nft(self, text: str) -> None:
        done = subprocess.run(["nft", "-f", "-"], input=text, capture_output=True, text=True, timeout=30.0)
        if done.returncode:
            raise BoxError(f"nft: {text}: {done.stderr.strip()}")


def between(some: list[Box], others: list[Box], way: str = "both") -> list[str]:
    """Matches for frames from some boxes to others (out), back (in), or both."""
    found = []
    for a in some:
        for b in others:
            if way in ("both", "out"):
                found.append(f"iifname {a.wire} oifname {b.wire}")
            if way in ("both", "in"):
                found.append(f"iifname {b.wire} oifname {a.wire}")
    return found


def slow(box: Box, mbit: float) -> None:
    """It sends no faster than this."""
    rate = f"{max(1, int(1000 * mbit))}kbit"
    box.run("tc", "qdisc", "replace", "dev", "eth0", "root", "tbf", "rate", rate, "burst", "32kb", "latency", "400ms")


def queued(box: Box) -> int:
    """Packets that had to wait or were dropped by the rate."""
    said = json.loads(box.run("tc", "-s", "-j", "qdisc", "show", "dev", "eth0", "root").stdout)
    return sum(entry.get("overlimits", 0) + entry.get("drops", 0) for entry in said)


def fast(box: Box) -> None:
    """No limit any more."""
    if box.on:
        box.run("tc", "qdisc", "delete", "dev", "eth0", "root", check=False)


def late(box: Box, bridge: str, delay_ms: float) -> Callable[[], None]:
    """Each frame to and from it takes so long; what takes the delay out."""
    script = Path(__file__).with_name("delay.py")
    command = [sys.executable, str(script), str(box.pid), box.wire, bridge, f"{delay_ms:g}"]
    carrier = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert carrier.stdout is not None
    with carrier.stdout as pipe:
        said = pipe.readline()

    def back() -> None:
        carrier.kill()
        carrier.wait(10.0)
        host(
            "ip", "link", "set", box.wire, "promisc", "off", "master", bridge, check=False
        )  # a power cut takes the wire

    if said != "ready\n":
        back()
        raise BoxError(f"{box.name}'s cable could not be replaced")
    return back


def round_trip(box: Box, address: str, port: int) -> float:
    """Milliseconds until a connection from there stands."""
    code = (
        "import socket,sys,time\nt=time.monotonic()\n"
        "socket.create_connection((sys.argv[1],int(sys.argv[2])),10).close()\nprint((time.monotonic()-t)*1000)\n"
    )
    return float(box.run(sys.executable, "-I", "-S", "-c", code, address, str(port)).stdout)


def wire(box: Box, *, up: bool) -> None:
    """Plug its cable in or pull it. Without power it has none: a new one comes when it boots."""
    if box.on:
        host("ip", "link", "set", box.wire, "up" if up else "down")
