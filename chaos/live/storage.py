"""Faults of what all nodes write to: the store's members, and the disks.

The one idea: they are everybody's, so a write of our own shows what was done to them: it was refused, or took as long as it
was to take. A member that was killed is gone.
"""

import asyncio
import json
import os
import shutil
import signal
import time
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from chaos.faults import Fault
from chaos.live.box import Box, host
from chaos.live.errors import BoxError, NotStruck
from chaos.live.labjob import gone, send
from chaos.live.proc import command_line, parent, stopped
from chaos.live.reach import TERM_S, Done, Reach
from elasticrl.shell.keys import namespace
from elasticrl.store import StoreSettings
from elasticrl.store.etcd import EtcdStore
from elasticrl.store.protocol import StoreError, StoreRefused

DISK_BYTES_S = 400_000  # that a slow disk takes of each node, divided by the fault's value
PROBE_BYTES, STORE_PROBE_BYTES = 65536, 16384  # that are written to see that it is slow


class StorageHands(Reach):
    """What does harm to the store and to the disks."""

    # ---- the store

    def _alarm(self, action: str) -> None:
        """As etcd raises it when its quota is used up, and an operator takes it back."""
        asked = {"memberID": "0", "alarm": "NOSPACE", "action": action}
        why: Exception | None = None
        for name, endpoint in zip(self.lab.members, self.lab.endpoints, strict=True):
            if self.lab.members[name].down:
                continue
            try:
                asked["memberID"] = posted(f"{endpoint}/v3/maintenance/status", {})["header"]["member_id"]
                if action == "DEACTIVATE":
                    for alarm in posted(f"{endpoint}/v3/maintenance/alarm", {"action": "GET"}).get("alarms", ()):
                        posted(f"{endpoint}/v3/maintenance/alarm", {**alarm, "action": action})
                else:
                    posted(f"{endpoint}/v3/maintenance/alarm", asked)
            except OSError as error:
                why = error
                continue
            return
        raise BoxError(f"no member of the store takes {action} of an alarm: {why}")

    def _store_full(self, _: Fault) -> Done | None:
        if all(member.down for member in self.lab.members.values()):
            return None  # another fault has the whole store: it is tried again
        self._alarm("ACTIVATE")

        async def refused() -> str:
            settings = StoreSettings(endpoints=self.lab.endpoints, namespace="/full/", timeout_s=3.0)
            async with EtcdStore(settings) as store:
                try:
                    await store.put("probe", b"x")
                except StoreError as error:
                    return str(error)
            return ""

        if not (said := asyncio.run(refused())):
            self._alarm("DEACTIVATE")
            raise NotStruck("the store still takes writes")

        def empty() -> None:
            deadline = time.monotonic() + TERM_S
            while True:
                try:
                    self._alarm("DEACTIVATE")
                except BoxError:  # a member that was just started again has no leader yet
                    if time.monotonic() > deadline:
                        raise
                    time.sleep(0.2)  # before it is asked again; TERM_S bounds it
                else:
                    return

        return Done(nodes=(), detail=said[:200], undo=empty)

    def _member(self, *, leading: bool) -> str:
        up = [name for name, member in self.lab.members.items() if not member.down and member.pid()]
        if len(up) < len(self.lab.members):
            return ""  # one at a time: two down are an outage, which is another fault
        leader = asyncio.run(self.lab.leading())
        return leader if leading else next(name for name in up if name != leader)

    def _down(self, names: list[str], number: int = signal.SIGKILL) -> Done | None:
        pids = {name: self.lab.members[name].pid() for name in names}
        if not names or not all(pids.values()):
            return None
        for name, pid in pids.items():
            self.lab.members[name].down = True
            send(pid, number)
        if not all(gone(pid, TERM_S) for pid in pids.values()):
            raise NotStruck(f"etcd {', '.join(names)} survived {signal.Signals(number).name}")

        def back() -> None:
            for name in names:
                self.lab.start_member(name)

        return Done(nodes=(), detail=f"{', '.join(names)}, {signal.Signals(number).name}", undo=back)

    def _kill_etcd(self, _: Fault) -> Done | None:
        name = self._member(leading=False)
        return self._down([name]) if name else None

    def _term_etcd(self, fault: Fault) -> Done | None:
        name = self._member(leading=fault.value > 0.5)
        return self._down([name], signal.SIGTERM) if name else None

    def _store_failover(self, _: Fault) -> Done | None:
        name = self._member(leading=True)
        return self._down([name]) if name else None

    def _store_outage(self, _: Fault) -> Done | None:
        # Beside a member that is down for longer, the others: it comes back when its own fault is over.
        return self._down([name for name, member in self.lab.members.items() if not member.down])

    def _store_wiped(self, _: Fault) -> Done | None:
        return self._begun_from(None)

    def _store_set_back(self, _: Fault) -> Done | None:
        backup = self.lab.folder / "backup"
        if backup.exists():
            return None  # another one is to come back first: it is tried again

        def kept() -> None:
            host("cp", "-a", "--sparse=always", str(self.lab.stores), str(backup))

        def back() -> None:
            if self._begun_from(backup) is None:
                raise BoxError("the store's members could not be ended to be set back")
            shutil.rmtree(backup)

        done = self._restarted(kept)
        return replace(done, detail="a backup was made", undo=back) if done else None

    def _begun_from(self, backup: Path | None) -> Done | None:
        """All members at once, on other data than they had: those of the backup, or none."""

        def other() -> None:
            for name in self.lab.members:
                place = self.lab.stores / name
                shutil.rmtree(place, ignore_errors=True)
                if backup is not None:
                    host("cp", "-a", "--sparse=always", str(backup / name), str(place))

        before = self._revision()
        done = self._restarted(other)
        if done is not None and (now := self._revision()) >= before:
            raise NotStruck(f"the store is at revision {now}, and was at {before}")
        return replace(done, detail=f"of {before} revisions it has {now} left") if done else None

    def _restarted(self, meanwhile: Callable[[], None]) -> Done | None:
        names = list(self.lab.members)
        done = None if any(member.down for member in self.lab.members.values()) else self._down(names)
        if done is None:
            return None
        meanwhile()
        for name in names:
            self.lab.start_member(name)
        self.lab.await_store()
        return Done(nodes=())

    def _revision(self) -> int:
        """The newest that a member knows of; with all of them up it is the store's."""
        found = [posted(f"{place}/v3/maintenance/status", {})["header"]["revision"] for place in self.lab.endpoints]
        return max(map(int, found))

    def _pause_etcd(self, fault: Fault) -> Done | None:
        name = self._member(leading=fault.value > 0.5)
        pid = self.lab.members[name].pid() if name else 0
        if not pid:
            return None
        member = self.lab.members[name]
        member.down = True
        send(pid, signal.SIGSTOP)

        outer = parent(pid)

        def go() -> None:
            send(pid, signal.SIGCONT)
            if "nsenter" in command_line(outer):
                send(outer, signal.SIGCONT)
            member.down = False

        return Done(
            nodes=(), detail=f"{name} stopped", undo=go, proof=lambda: "" if stopped(pid) else f"{name} went on"
        )

    def _store_compaction(self, _: Fault) -> Done | None:
        async def compact() -> None:
            settings = StoreSettings(endpoints=self.lab.endpoints, namespace=namespace(self.job.name), timeout_s=3.0)
            async with EtcdStore(settings) as store:
                listing = await store.scan("")
                await store.compact(listing.revision)

        try:
            asyncio.run(compact())
        except StoreRefused as refused:
            if "has been compacted" not in str(refused):
                raise
            return None  # nothing was written since the last time: not yet
        return Done(nodes=(), detail="everything but the newest revision")

    def _lose_lease(self, fault: Fault) -> Done | None:
        node = self.whom(fault.node)

        async def revoke() -> bool:
            settings = StoreSettings(endpoints=self.lab.endpoints, namespace=namespace(self.job.name), timeout_s=3.0)
            async with EtcdStore(settings) as store:
                entry = await store.get(f"members/{node}")
                if entry is None or not entry.lease:
                    return False
                await store.revoke(entry.lease)
                return True

        return Done(nodes=(node,)) if node and asyncio.run(revoke()) else None

    # ---- disks

    def _disk_full(self, _: Fault) -> Done | None:
        ballast, probe = self.lab.disk / "ballast", self.lab.disk / "probe"
        with ballast.open("wb", buffering=0) as file:
            for _attempt in range(10):  # the job itself may give something back meanwhile: an old checkpoint
                size = 1 << 29
                while size >= 4096:
                    try:
                        os.posix_fallocate(file.fileno(), file.tell(), size)
                        file.seek(size, os.SEEK_CUR)
                    except OSError:
                        size //= 2
                try:
                    probe.write_bytes(b"x" * 4096)
                except OSError:
                    return Done(nodes=(), detail="no byte left", undo=lambda: ballast.unlink(missing_ok=True))
                finally:
                    probe.unlink(missing_ok=True)
        ballast.unlink()
        raise NotStruck("a byte could still be written")

    def _disk_read_only(self, fault: Fault) -> Done | None:
        box = self._powered(fault)
        if box is None:
            return None
        place = str(self.lab.disk)
        box.run("mount", "--bind", place, place)
        if box.run("mount", "-o", "remount,bind,ro", place, check=False).returncode:  # a save has a file open there
            box.run("umount", "-l", place, check=False)
            return None
        if not box.run("touch", f"{place}/probe", check=False).returncode:
            box.run("umount", "-l", place, check=False)
            raise NotStruck(f"{box.name} could still write")
        boot = box.pid

        def undo() -> None:
            if box.on and box.pid == boot:  # one that was off meanwhile has the disk as it is, and would lose it
                box.run("umount", "-l", place, check=False)

        return Done(nodes=(box.name,), undo=undo)

    def _slow_disk(self, fault: Fault) -> Done | None:
        boxes = [box for box in self.lab.boxes.values() if box.on and not box.frozen]
        rate = DISK_BYTES_S / max(1.0, fault.value)
        return self._slowed(boxes, self.lab.device, rate, self.lab.disk / "probe", PROBE_BYTES)

    def _slow_store_disk(self, fault: Fault) -> Done | None:
        boxes = [member.box for member in self.lab.members.values() if not member.down]
        rate = 1000.0 * (fault.value or 50.0)
        return self._slowed(boxes, self.lab.store_device, rate, self.lab.stores / "probe", STORE_PROBE_BYTES)

    def _slowed(self, boxes: list[Box], device: str, rate: float, probe: Path, size: int) -> Done | None:
        """These write no faster than this to their disk; a file that is written there shows it."""
        boxes = [box for box in boxes if "blkio" in box.groups]
        if not boxes or not device:
            return None
        for box in boxes:
            box.disk_rate(device, rate)

        def back() -> None:
            for box in boxes:
                box.disk_rate(device, None)

        begun = time.monotonic()
        writing = boxes[0].start(
            ["dd", "if=/dev/zero", f"of={probe}", f"bs={size}", "count=1", "conv=fsync"], self.job.folder / "probe.log"
        )
        code, took_s = writing.wait(60.0), time.monotonic() - begun
        probe.unlink(missing_ok=True)
        if code:  # a disk that is full or read-only meanwhile takes nothing: it is tried again
            back()
            return None
        if took_s < 0.5 * size / rate:
            back()
            raise NotStruck(f"{size} bytes were on the disk after {took_s:.2f} s")
        return Done(nodes=(), detail=f"{rate / 1000:.0f} kB/s each", undo=back)

    def _newest_saved(self) -> Path | None:
        """The largest file of the newest checkpoint; None if there is none yet."""
        saves = sorted((path for path in self.job.saves.glob("step-*") if path.is_dir()), key=lambda path: path.name)
        files = [f for f in saves[-1].rglob("*") if f.is_file() and f.stat().st_size > 4096] if saves else []
        return max(files, key=lambda file: file.stat().st_size) if files else None

    def _corrupt_save(self, _: Fault) -> Done | None:
        target = self._newest_saved()
        if target is None:
            return None
        with target.open("r+b") as file:
            middle = target.stat().st_size // 2
            file.seek(middle)
            old = file.read(1)
            file.seek(middle)
            file.write(bytes([old[0] ^ 0x40]))
        return Done(nodes=(), detail=f"one bit of {target.relative_to(self.job.saves)}")

    def _tear_save(self, _: Fault) -> Done | None:
        target = self._newest_saved()
        if target is None:
            return None
        size = target.stat().st_size
        os.truncate(target, size // 2)
        return Done(nodes=(), detail=f"{size - size // 2} bytes of {target.relative_to(self.job.saves)}")


def posted(url: str, body: Mapping[str, object]) -> dict[str, Any]:
    """What etcd's gateway answers; OSError if it does not."""
    request = urllib.request.Request(url, json.dumps(body).encode())
    with urllib.request.urlopen(request, timeout=5.0) as reply:
        found: dict[str, Any] = json.load(reply)
    return found
