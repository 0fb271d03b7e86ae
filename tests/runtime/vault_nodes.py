"""Real vault servers on loopback addresses, and a writer that does what a worker does, without a tensor library."""

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from chaos.patience import patience
from elasticrl.runtime.vault import layout
from elasticrl.runtime.vault.control import Control
from elasticrl.runtime.vault.holdings import Holding, holding_of
from elasticrl.runtime.vault.layout import Stamp, Table
from elasticrl.runtime.vault.piece import Piece
from elasticrl.runtime.vault.slots import Pinned, Slots, files, pin
from elasticrl.runtime.vault.version import Lineage, Version

KEY = "a key for tests, thirty-two bytes"


def until(condition: Callable[[], bool], what: str, timeout_s: float = 10.0) -> None:
    """Wait for a condition, with a deadline."""
    limit = time.monotonic() + patience(timeout_s)
    while not condition():
        assert time.monotonic() < limit, f"not within {timeout_s} s: {what}"
        time.sleep(0.01)


class Node:
    """One node: its directory, its vault server, one worker's files."""

    def __init__(self, root: Path, number: int, *, job: str = "job", key: str = KEY) -> None:
        self.name = f"n{number}"
        self.directory = root / self.name
        self.host = f"127.0.1.{number + 1}"
        self.job = job
        self.key = key
        self.port = 0
        self.process: subprocess.Popen[str] | None = None
        self.dropped: list[str] = []
        self.control = Control(self.directory / "control.sock", deadline_s=5.0)
        self._slots: Slots | None = None

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"

    def start(self, *more: str, fault: str = "", deadline_s: float = 1.0) -> "Node":
        """Start the server and wait until it says that it is ready."""
        environment = dict(os.environ)
        if fault:
            environment["ELASTICRL_FAULT"] = fault
        command = [sys.executable, "-m", "elasticrl.runtime.vault", "--job", self.job, "--node", self.name]
        command += ["--dir", str(self.directory), "--listen", self.address, "--deadline-s", str(deadline_s), *more]
        key = self.directory.with_name(f"{self.name}.key")
        key.parent.mkdir(parents=True, exist_ok=True)
        key.touch(0o600)
        key.write_text(self.key)
        command += ["--key-file", str(key)]
        self.process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        assert select.select([self.process.stdout], [], [], 20)[0], "the vault server did not become ready within 20 s"
        ready = json.loads(self.process.stdout.readline())
        self.port, self.dropped = ready["port"], ready["dropped"]
        return self

    def signal(self, number: int) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def kill(self) -> None:
        """kill -9, and wait for it."""
        if self.process is not None:
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
            self.process.wait(10)
            assert self.process.stdout is not None
            self.process.stdout.close()
            self.process = None

    def keep(
        self,
        step: int,
        *,
        shard: int = 0,
        world: int = 1,
        generation: int = 1,
        size: int = 100,
        lineage: Lineage = (),
        sealed: int | None = None,
    ) -> Path:
        """Seal a version of this node's worker; its bytes are `pattern(step, shard, size)`."""
        if self._slots is None:
            self._slots = Slots(self.directory, origin=self.name, writer="w0")
        stamp = Stamp(
            job=self.job,
            node=self.name,
            writer="w0",
            version=Version(step),
            generation=generation,
            shard=shard,
            world=world,
            lineage=lineage,
            sealed=() if sealed is None else ((Version(sealed), generation),),
        )
        table = Table((Piece("w", "uint8", (world * size,), (shard * size,), (size,)),))
        text = layout.header(stamp, table, {"part": {f"shard.{shard}": step}})
        shape = layout.shape_of(text, table.starts[-1])
        slot = self._slots.take(shape.total, below=(stamp.version, generation), sealed=stamp.sealed)
        slot.memory[shape.data_start : shape.data_start + size] = pattern(step, shard, size)
        layout.seal(slot.memory, shape, text, layout.sums_of(slot.memory, shape))
        slot.unlock()
        return slot.path

    def announce(self, path: Path) -> None:
        self.control.ask("sealed", file=path.name)

    def stop(self) -> None:
        self.kill()
        self.control.close()
        if self._slots is not None:
            self._slots.close()


def pattern(step: int, shard: int, size: int) -> bytes:
    """Bytes that no other version or shard has."""
    unit = b"%08d.%04d." % (step, shard)
    return (unit * (size // len(unit) + 1))[:size]


def ring(nodes: Sequence[Node], *, generation: int = 1, copies: int = 1) -> None:
    """Tell every node of all of them."""
    for node in nodes:
        if node.process is not None:
            node.control.ask(
                "ring",
                generation=generation,
                nodes=[n.name for n in nodes],
                addresses={n.name: n.address for n in nodes},
                copies=copies,
            )


def holdings(nodes: Sequence[Node]) -> tuple[Holding, ...]:
    """What these nodes' vaults hold whole, read from their files."""
    found = []
    for node in nodes:
        for path, name in files(node.directory):
            shard = None if name.writer.startswith("part-") else pin(path)
            if isinstance(shard, Pinned):
                with shard:
                    found.append(holding_of(shard.sealed, node.name))
    return tuple(found)


@contextmanager
def cluster(root: Path, count: int, **kwargs: str) -> Iterator[list[Node]]:
    """`count` nodes, started side by side; none outlives the test."""
    nodes = [Node(root, number, **kwargs) for number in range(count)]
    try:
        for node in nodes:
            node.start()
        yield nodes
    finally:
        for node in nodes:
            node.stop()


def in_own_mounts(script: str) -> list[str]:
    """The lines that a program prints in a mount namespace of its own. As root this must be possible: else it is a failure."""
    probe = subprocess.run(["unshare", "-m", "true"], capture_output=True, text=True, timeout=10)
    if probe.returncode and os.getuid():
        pytest.skip("only root may mount; refusals that are injected are tested beside this")
    assert not probe.returncode, probe.stderr
    command = ["unshare", "-m", sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()
