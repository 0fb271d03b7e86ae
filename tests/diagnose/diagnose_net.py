"""Nodes as network namespaces on one bridge, with faults; all of it goes away in the end, whatever happens.

No nftables: a blackhole rule drops what comes from somebody silently, and a small MTU on the far side of a veth pair swallows
large frames as a misconfigured switch does.
"""

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Any

from elasticrl.contract.evidence import Evidence
from elasticrl.contract.pairs import Result, findings, result_of, schedule

LIMIT_S = 60.0


def ip(*arguments: str, check: bool = True) -> None:
    """The program `ip`."""
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, timeout=20)
    assert not check or done.returncode == 0, f"ip {' '.join(arguments)}: {done.stderr}"


def cannot() -> str:
    """Why there can be no namespaces here; "" if there can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "there is no `ip` (iproute2)"
    name = f"elx{os.getpid()}"
    if subprocess.run(["ip", "netns", "add", name], capture_output=True).returncode != 0:
        return "this machine allows no network namespaces"
    subprocess.run(["ip", "netns", "del", name], capture_output=True)
    return ""


class Net:
    """n0, n1, ... at 10.93.0.10, .11, ..."""

    def __init__(self, count: int, mark: str) -> None:
        self.mark = mark
        self.nodes = [f"n{i}" for i in range(count)]
        self.bridge = f"elb{mark}"

    def namespace(self, node: str) -> str:
        return f"el{self.mark}{node}"

    def far(self, node: str) -> str:
        """The switch's end of a node's cable."""
        return f"ev{self.mark}{node}"

    def address(self, node: str) -> str:
        return f"10.93.0.{10 + int(node[1:])}"

    def up(self) -> None:
        ip("link", "add", self.bridge, "type", "bridge")
        ip("link", "set", self.bridge, "up")
        for node in self.nodes:
            space = self.namespace(node)
            ip("netns", "add", space)
            ip("link", "add", self.far(node), "type", "veth", "peer", "name", "eth0", "netns", space)
            ip("link", "set", self.far(node), "master", self.bridge, "up")
            ip("-n", space, "addr", "add", f"{self.address(node)}/24", "dev", "eth0")
            ip("-n", space, "link", "set", "eth0", "up")
            ip("-n", space, "link", "set", "lo", "up")

    def down(self) -> None:
        for node in self.nodes:
            ip("netns", "del", self.namespace(node), check=False)
            ip("link", "del", self.far(node), check=False)
        ip("link", "del", self.bridge, check=False)

    def cut(self, node: str) -> None:
        """The cable."""
        ip("link", "set", self.far(node), "down")

    def deafen(self, node: str, sender: str) -> None:
        """What the sender sends does not arrive at the node; the other way it does."""
        space = self.namespace(node)
        # The kernel asks the table of its own addresses first; it has to move behind the rule.
        ip("-n", space, "rule", "add", "pref", "100", "lookup", "local")
        ip("-n", space, "rule", "del", "pref", "0", check=False)
        ip("-n", space, "rule", "add", "pref", "50", "from", self.address(sender), "iif", "eth0", "blackhole")

    def narrow(self, node: str, mtu: int) -> None:
        """Larger packets to and from this node vanish, and nobody says so."""
        ip("link", "set", self.far(node), "mtu", str(mtu))

    @contextlib.contextmanager
    def delayed(self, node: str, delay_ms: float) -> Iterator[None]:
        """Its cable is replaced by one on which every frame takes so long, each way."""
        ip("link", "del", self.far(node))
        script = str(Path(__file__).with_name("diagnose_delay.py"))
        where = [self.namespace(node), f"{self.address(node)}/24", self.bridge, self.far(node)]
        switch = subprocess.Popen([sys.executable, script, *where, str(delay_ms)], stdout=subprocess.PIPE, text=True)
        assert switch.stdout is not None
        try:
            assert switch.stdout.readline() == "ready\n"
            yield
        finally:
            switch.kill()
            switch.wait()
            switch.stdout.close()

    def probe(self, **task: Any) -> tuple[list[Result], tuple[Evidence, ...]]:
        """All nodes test each other, as processes of their own."""
        ends = {node: f"{self.address(node)}:7733" for node in self.nodes}
        return probe(ends, lambda node: ["ip", "netns", "exec", self.namespace(node)], **task)


def probe(
    ends: dict[str, str],
    inside: Callable[[str], list[str]] = lambda _: [],
    absent: AbstractSet[str] = frozenset(),
    **task: Any,
) -> tuple[list[Result], tuple[Evidence, ...]]:
    """One process for each node, which knows of those that it tests, as in a gang."""
    running = {}
    pairs = [pair for turn in schedule(ends) for pair in turn]
    for node in sorted(set(ends) - absent):
        known = {name: end for name, end in ends.items() if name == node or {name, node} in map(set, pairs)}
        own = [[pair] for pair in pairs if node in pair]
        plain = {
            "me": node,
            "token": "t",
            "nodes": known,
            "rounds": own,
            "within_s": 30.0,
            "gloo_s": 10.0,
            "start_s": 8.0,
            **task,
        }
        command = [*inside(node), sys.executable, "-m", "elasticrl.diagnose.probe", "-"]
        running[node] = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        stdin = running[node].stdin
        assert stdin is not None
        stdin.write(json.dumps(plain))
        stdin.close()
        running[node].stdin = None
    results = []
    try:
        for process in running.values():
            said, _ = process.communicate(timeout=LIMIT_S)
            assert process.returncode == 0
            results += [result_of(json.loads(line)) for line in said.splitlines()]
    finally:
        for process in running.values():
            process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()
    return results, findings(results, asked=[pair for turn in schedule(ends) for pair in turn])


@contextlib.contextmanager
def network(count: int) -> Iterator[Net]:
    """It goes down whatever happens."""
    net = Net(count, f"{os.getpid() % 10000:04}")
    try:
        net.up()
        yield net
    finally:
        net.down()
