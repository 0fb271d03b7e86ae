"""`python -m elasticrl.runtime.checkpoint`: the background writer of one worker. Started by `Saver`, ends with its worker."""

import argparse
import json
import os
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from elasticrl.runtime.checkpoint.manifest import Facts
from elasticrl.runtime.checkpoint.place import place
from elasticrl.runtime.checkpoint.saver import MESSAGE
from elasticrl.runtime.checkpoint.shelf import mark_committed, prune
from elasticrl.runtime.vault import faults
from elasticrl.runtime.vault.errors import DataError, StateError
from elasticrl.runtime.vault.layout import Torn
from elasticrl.runtime.vault.slots import adopt

GRACE_S = 5.0  # for shards of a gang that has broken up, once a later one saves


class Hope:
    """Why the other shards of a save will not come: their gang broke up before all had begun, and a later one is saving; or
    our worker has gone, and nobody is left to ask.

    Those who had begun finish even if their workers die, so they are given some time: at least `orphan_s`, and longer where
    our own shard took long. A writer that waited on would keep its shard's memory from the machine.
    """

    def __init__(self, sock: socket.socket, generation: int, orphan_s: float) -> None:
        self.own_s = 0.0  # what writing our shard took
        self._sock, self._generation, self._orphan_s = sock, generation, orphan_s
        self._since: float | None = None

    def __call__(self) -> str:
        """The sentence; empty as long as there is hope."""
        try:
            data = self._sock.recv(MESSAGE, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except (BlockingIOError, ConnectionResetError):
            return ""
        if not data:
            self._since = self._since or time.monotonic()
            patience = self._orphan_s + 3 * self.own_s
            over = time.monotonic() - self._since > patience
            return f"our worker has gone, and they did not come within {patience:.0f} s" if over else ""
        later = int(json.loads(data).get("generation", 0))
        if later <= self._generation:
            return ""
        self._since = self._since or time.monotonic()
        over = time.monotonic() - self._since > GRACE_S
        return f"generation {later} saves already, and this one's gang broke up" if over else ""


def save(request: dict[str, Any], fd: int, flush: Sequence[int], hope: Hope) -> dict[str, Any]:
    """Write one shard, and the manifest if this is the gang's finisher; what became of it.

    The files in `flush` are on their disk before the shard is told of: a published checkpoint has all workers' ledgers.
    """
    from elasticrl.runtime.checkpoint.save import finish, refuse, write_shard

    began = time.monotonic()
    answer: dict[str, Any] = {key: request[key] for key in ("step", "update", "generation")}
    pinned = adopt(Path(request["path"]), fd)
    if isinstance(pinned, Torn):
        os.close(fd)
        return {**answer, "ok": False, "why": f"the snapshot is {pinned.reason}"}
    with pinned:
        stamp = pinned.sealed.stamp
        where, written = place(request["where"]), False
        try:
            _flush(flush)
            entry = write_shard(where, pinned)
            written = True
            answer |= {"ok": True, "nbytes": entry.nbytes}
            hope.own_s = time.monotonic() - began
            if request["finish"]:
                manifest = finish(
                    where,
                    version=stamp.version,
                    generation=stamp.generation,
                    world=stamp.world,
                    facts=Facts(**request["facts"]),
                    parent=request["parent"],
                    lineage=stamp.lineage,
                    timeout_s=request["timeout_s"],
                    hopeless=hope,
                )
                answer |= {"manifest": manifest.name, "nbytes": manifest.nbytes}
        except (StateError, OSError) as error:
            answer |= {"ok": False, "why": str(error)}
            if not written:
                refuse(where, stamp)
    return {**answer, "seconds": round(time.monotonic() - began, 3)}


def _flush(files: Sequence[int]) -> None:
    try:
        for file in files:
            faults.reach("ledger.fsync")
            os.fsync(file)
    except OSError as error:
        raise DataError(
            f"The ledger cannot be flushed to its disk ({error.strerror}), so its step is not saved: free some space there."
        ) from error
    finally:
        for file in files:
            os.close(file)


def serve(fd: int, orphan_s: float) -> None:
    """Take requests until the worker has gone; what was asked for before that is done."""
    with socket.socket(fileno=fd) as sock:
        while True:
            try:
                data, fds, _, _ = socket.recv_fds(sock, MESSAGE, 4)
            except ConnectionResetError:  # the worker went without having read our last answer
                return
            if not data:
                return
            request = json.loads(data)
            if request["op"] == "save":
                answer = save(request, fds[0], fds[1:], Hope(sock, request["generation"], orphan_s))
                with suppress(OSError):  # a worker that has died asks for no answer
                    sock.send(json.dumps(answer).encode())
            elif request["op"] == "committed":
                with suppress(StateError, OSError):  # a disk that is ill is complained of at the next save
                    mark_committed(place(request["where"]), request["manifest"])
            else:
                with suppress(
                    StateError, OSError
                ):  # what could not be removed now is tried again after the next commit
                    prune(
                        place(request["where"]),
                        keep_last=request["keep_last"],
                        keep_every=request["keep_every"],
                        generation=request["generation"],
                        commit=request["commit"],
                    )


def main(argv: list[str] | None = None) -> int:
    """The exit code."""
    parser = argparse.ArgumentParser(prog="python -m elasticrl.runtime.checkpoint", description=__doc__)
    parser.add_argument("--writer", type=int, required=True, help="the descriptor of the socket to the worker")
    parser.add_argument(
        "--orphan-s", type=float, default=30.0, help="how long others are waited for without the worker"
    )
    args = parser.parse_args(argv)
    with suppress(OSError):
        os.nice(10)  # a checkpoint is never urgent
    import torch

    torch.set_num_threads(1)
    serve(args.writer, args.orphan_s)
    return 0


if __name__ == "__main__":
    sys.exit(main())
