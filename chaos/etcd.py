"""Several etcd members on this machine's loopback, to be killed, frozen and revived: for tests, benches and chaos.

The one idea: a member is an `Embedded` with fixed ports, so each can be treated like any process and started again.
"""

import asyncio
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from elasticrl.store.embedded import LOOPBACK, Embedded, Process, free_ports
from elasticrl.store.protocol import StoreStart
from elasticrl.store.settings import StoreSettings, Tls

_PATIENCE_S = 10.0


class LocalCluster:
    """An etcd of one or more members. It dies with the thread that started it.

    Example: async with LocalCluster(folder, members=3) as etcd: ... etcd.endpoints, etcd.kill(0), await etcd.revive(0)
    """

    def __init__(
        self,
        folder: Path,
        *,
        members: int = 3,
        binary: str | None = None,
        tls: Tls | None = None,
        args: Sequence[str] = (),
    ) -> None:
        ports = [free_ports() for _ in range(members)]
        names = [f"m{index}" for index in range(members)]
        cluster = ",".join(f"{name}=http://{LOOPBACK}:{peer}" for name, (_, peer) in zip(names, ports, strict=True))
        self.tls = tls
        self._members = [
            Embedded(
                folder=folder / name,
                binary=binary,
                die_with_parent=True,
                name=name,
                ports=pair,
                cluster=cluster,
                tls=tls,
                args=tuple(args),
            )
            for name, pair in zip(names, ports, strict=True)
        ]
        self._processes: list[Process] = []

    @property
    def endpoints(self) -> tuple[str, ...]:
        """What goes into `StoreSettings.endpoints`, in the order of the members' numbers."""
        return tuple(process.endpoint for process in self._processes)

    async def __aenter__(self) -> Self:
        """Start all members and wait until they serve."""
        try:
            self._processes = [await member.start(serves=False) for member in self._members]
            await asyncio.gather(*(member.ensure() for member in self._members))
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *exc: object) -> None:
        """Kill all members."""
        for index in range(len(self._processes)):
            self.kill(index)
        await asyncio.gather(*(process.close() for process in self._processes))

    def kill(self, index: int) -> None:
        """As a power cut does."""
        self._processes[index].send(signal.SIGKILL)

    async def freeze(self, index: int) -> None:
        """From now on it keeps its connections and answers nothing."""
        self._processes[index].send(signal.SIGSTOP)
        deadline = time.monotonic() + _PATIENCE_S
        while not self._processes[index].stopped:  # the signal takes a moment to reach every thread of a busy process
            if time.monotonic() > deadline:
                raise StoreStart(f"etcd member {index} goes on running after SIGSTOP")
            await asyncio.sleep(0.001)

    def thaw(self, index: int) -> None:
        """Go on."""
        self._processes[index].send(signal.SIGCONT)

    async def revive(self, index: int, *, serves: bool = True) -> None:
        """Start a killed member again, on its data and its ports."""
        await self._processes[index].close()
        self._processes[index] = await self._members[index].start(serves=serves)

    async def leader(self) -> int:
        """The number of the member that leads."""
        from elasticrl.store.etcd import EtcdStore

        deadline = time.monotonic() + _PATIENCE_S
        async with EtcdStore(StoreSettings(endpoints=self.endpoints, tls=self.tls)) as store:
            while True:
                status = await store.status()
                for index, endpoint in enumerate(status.endpoints):
                    if endpoint.leader:
                        return index
                if time.monotonic() > deadline:
                    raise StoreStart(f"the etcd cluster has no leader after {_PATIENCE_S:g} s: {status}")
                await asyncio.sleep(0.02)
