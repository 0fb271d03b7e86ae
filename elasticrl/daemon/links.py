"""The ways from this node to others: what NCCL has chosen, how long beats take, and what a probe of them says."""

import asyncio
import json
import os
import socket
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress

from elasticrl.base.address import join, split
from elasticrl.base.inherited import inherited
from elasticrl.base.parsed import parsed
from elasticrl.contract.events import Found, Probe, Probed
from elasticrl.contract.evidence import Evidence, Kind, Sign
from elasticrl.contract.model import Phase
from elasticrl.contract.pairs import Result, findings, late_ways, result_of
from elasticrl.core.node import dossier
from elasticrl.daemon.secret import probe_token
from elasticrl.daemon.shared import Desk

TRIES = 20  # to find a port that is free for both
STUB = "ELASTICRL_PROBE_NCCL"  # stub:FILE, for the NCCL round of a probe where there is no GPU


class Ways:
    """From one node."""

    def __init__(self, desk: Desk) -> None:
        self.latency: Callable[[], Mapping[str, float]]  # seconds of a round trip to each neighbour (`Inquiry.join`)
        self.secret = b""  # the job's, from the store
        self._desk = desk
        self._chosen: frozenset[str] = frozenset()  # that NCCL has chosen, as far as it has said so
        self._late: tuple[int, frozenset[str]] = (0, frozenset())  # neighbours that are far away, and under which plan
        self._probing = 0
        self._port: Reserved | None = None

    def open(self, number: int) -> str:
        """Keep a port for probes (0: any); where this node is tested."""
        self._port = Reserved(self._desk.site.host, number)
        if not self._port.held:
            self._desk.log.info("probe.taken", address=self._port.address)
        return self._port.address

    def close(self) -> None:
        """Of that port."""
        if self._port is not None:
            self._port.close()

    def note_sockets(self, ways: Collection[str]) -> None:
        """NCCL has fallen back to sockets, as its own lines say, where it need not: said once."""
        fresh = frozenset(ways) - self._chosen
        self._chosen |= fresh
        if not fresh:
            return
        from elasticrl.diagnose import fabric, transport

        if said := transport.sockets(fresh, fabric.active(self._desk.site.root)):
            self._desk.log.info("transport.sockets", said=said, remedy=transport.REMEDY)

    def look(self) -> None:
        """A way that takes long holds all ranks up, and none of them stands still: it is known by the beats' round trips."""
        took = self.latency()
        late = late_ways(took)
        plan = self._desk.state().view.plan if took else None
        if plan is None or plan.phase is not Phase.TRAIN or (plan.generation, late) == self._late:
            return
        before, self._late = self._late, (plan.generation, late)
        if not late and (before[0] != plan.generation or not before[1]):
            return  # else it is taken back
        facts = tuple(
            Evidence(
                kind=Kind.PROBE, sign=Sign.DELAYED if peer in late else Sign.HEALTHY, node=self._desk.site.node, peer=peer,
                detail=f"a round trip takes {1000 * seconds:.0f} ms, elsewhere {1000 * min(took.values()):.1f} ms"
                if peer in late else "", source=dossier.WAYS, generation=plan.generation,
            )
            for peer, seconds in sorted(took.items())
        )  # fmt: skip
        self._desk.post(Found(now=time.monotonic(), evidence=facts))

    def answer(self, action: Probe, unreachable: tuple[str, ...]) -> None:
        """Answer at once who cannot be reached; if all can, test the way to them thoroughly, in a process of its own."""
        deep = bool(action.pairs) and not unreachable and self._port is not None
        ways = tuple(
            Evidence(
                kind=Kind.PROBE, sign=Sign.UNREACHABLE if peer in unreachable else Sign.HEALTHY, node=self._desk.site.node,
                peer=peer, detail="does not answer datagrams" if peer in unreachable else "", source="probe",
                generation=action.generation,
            )
            for peer in sorted(action.targets)
        )  # fmt: skip
        if unreachable:
            self._desk.post(Found(now=time.monotonic(), evidence=ways))
        self._desk.post(Probed(now=time.monotonic(), generation=action.generation, unreachable=unreachable, more=deep))
        if deep and self._probing != action.generation:
            self._probing = action.generation
            self._desk.spawn(self._test(action), "probe")

    async def _test(self, action: Probe) -> None:
        """Runs this node's part of a probe in a process of its own, and posts what it said within the time."""
        from elasticrl.diagnose import doctor

        assert self._port is not None
        begun, within_s = time.monotonic(), 0.8 * self._desk.tree.recovery.probe_s
        task = {
            "me": self._desk.site.node, "token": probe_token(self.secret, action.generation), "nodes": dict(action.nodes),
            "rounds": [[list(pair)] for pair in action.pairs], "within_s": within_s,
            "start_s": min(4.0, 0.4 * within_s), "gloo_s": min(4.0, 0.4 * within_s),
            "facts": json.dumps(doctor.versions()), "nccl": os.environ.get(STUB) or ("on" if self._desk.on_gpus else "off"),
        }  # fmt: skip
        self._port.release()
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-P", "-m", "elasticrl.diagnose.probe", "-",
                stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL,
                env={**inherited(os.environ), **self._desk.env},
            )  # fmt: skip
        except OSError as error:
            # No memory, or no process number: who waits for results is told at once that there are none.
            self._port.keep()
            self._tell(action, begun, (), f"the test's process cannot be started ({error.strerror or error})")
            return
        said: list[bytes] = []
        self._desk.spawn(self._end(process, within_s + 2.0), "probe's end")
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps(task).encode())
        process.stdin.close()
        with suppress(TimeoutError):  # what it has not said by then comes too late
            async with asyncio.timeout(within_s + 1.0):
                while len(said) < len(action.pairs) and (line := await process.stdout.readline()):
                    said.append(line)
        results = tuple(results_of(said))
        self.note_sockets({result.transport for result in results if result.transport})
        told = "; ".join(f"{fact.node}-{fact.peer}: {fact.sign.value} ({fact.detail})" for fact in findings(results))
        self._tell(action, begun, results, told or "nothing")

    def _tell(self, action: Probe, begun: float, results: tuple[Result, ...], said: str) -> None:
        now = time.monotonic()
        self._desk.post(Probed(now=now, generation=action.generation, unreachable=(), results=results))
        self._desk.log.info(
            "probe.done", generation=action.generation, pairs=len(results), said=said, took_s=round(now - begun, 3)
        )

    async def _end(self, process: asyncio.subprocess.Process, within_s: float) -> None:
        """A probe that has said all goes on to answer others; not for ever."""
        try:
            async with asyncio.timeout(within_s):
                await process.wait()
        except TimeoutError:
            pass
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
            if self._port is not None:
                self._port.keep()


async def closed(doors: Mapping[str, str], *, within_s: float) -> tuple[str, ...]:
    """To whom no connection stands within the time (name -> host:port). Where it stands it is closed, without a word."""

    async def tried(address: str) -> bool:
        with suppress(OSError, TimeoutError):
            async with asyncio.timeout(within_s):
                _, writer = await asyncio.open_connection(*split(address))
            writer.close()
            return True
        return False

    stand = await asyncio.gather(*map(tried, doors.values()))
    return tuple(node for node, stands in zip(doors, stand, strict=True) if not stands)


def results_of(said: list[bytes]) -> Iterator[Result]:
    """What a probe's process has printed; a line that is none is passed over."""
    for line in said:
        with suppress(ValueError):
            yield result_of(parsed(line))


class Reserved:
    """A port, TCP and UDP, that nobody else gets while nobody uses it."""

    def __init__(self, host: str, port: int) -> None:
        self._host, self._port = host, port  # 0: any, until one was taken; others are told of that one
        self._held: list[socket.socket] = []
        self.keep()
        self.address = join(host, self._port)

    @property
    def held(self) -> bool:
        """It is ours."""
        return bool(self._held)

    def keep(self) -> None:
        """Take it (again). If somebody was quicker, probes find this node unreachable over it, which is said there."""
        for _ in range(TRIES):
            number = self._port
            try:
                for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
                    number = self._bind(kind, number)
            except OSError:
                self.release()
                continue
            self._port = number  # only now: one that is free for TCP alone would be tried again and again
            return

    def _bind(self, kind: socket.SocketKind, number: int) -> int:
        """The port that it has become: where none was asked for, the kernel chooses."""
        sock = socket.socket(socket.AF_INET6 if ":" in self._host else socket.AF_INET, kind)
        self._held.append(sock)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((self._host, number))
        return int(sock.getsockname()[1])

    def release(self) -> None:
        """For who uses it now."""
        for sock in self._held:
            sock.close()
        self._held = []

    close = release
