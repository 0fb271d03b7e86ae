"""How each fault of the vocabulary is done to real processes, cables and disks, and how it is known that it struck.

The one idea: a strike gives back whom it touched, how to undo it, and a proof. A process is killed when it is gone, a frame is
lost when the rule has counted it, a disk is full when a write has failed; a strike without its proof has tested nothing. What
is done to the store and to disks stands in `storage`.
"""

import json
import math
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from functools import partial
from pathlib import Path
from threading import Timer

from chaos.faults import INSIDE, Fault
from chaos.history import Asked
from chaos.live import net
from chaos.live.box import Box
from chaos.live.clock import FalseClock
from chaos.live.errors import BoxError, NotStruck
from chaos.live.eye import Eye
from chaos.live.labjob import LabJob, gone, send
from chaos.live.proc import alive, command_line, environment, parent, stopped
from chaos.live.reach import TERM_S, Done, Undo
from chaos.live.storage import StorageHands
from elasticrl.contract.model import Intent, Phase
from elasticrl.daemon.client import Unanswered
from elasticrl.store.protocol import StoreUnavailable

#: What needs namespaces, cables, cgroups or a disk of the lab's own.
LACKS_BOXES = (
    "power_cut", "pause_node", "cut_link", "isolate", "leader_alone", "partition", "cut_store", "store_alone", "lossy_node",
    "mtu_hole", "late_node", "link_down", "slow_link", "starve_node", "oom_worker", "disk_full", "disk_read_only", "port_taken",
    "slow_disk", "slow_store_disk",
)  # fmt: skip
#: What a kind needs of the machine beside namespaces, by the names of `box.lacking`.
NEEDS = {
    "oom_worker": ("memory",), "starve_node": ("cpu",), "pause_node": ("freezer",), "late_node": ("tun",),
    "slow_disk": ("blkio", "loop"), "slow_store_disk": ("blkio", "loop"), "wrong_clock": ("clock",),
}  # fmt: skip
ORDER_S = 8.0  # for a worker to take an order
LEAVE_S = 60.0  # for a node that was told to leave
ZONE = "<+14>-14"  # as far as a clock on the wall can be from here, and no file is needed for it
DRIFT = 0.02  # of a clock that is off
PUT_RIGHT_S = 6.0  # after it came back: it trains by then
NEAR_S = 60.0
GIVEN_UP = 4  # an engine is asked three times before it is killed
BURST_BYTES = 140_000
BURST = (
    "import socket,sys\ns=socket.socket(socket.AF_INET,socket.SOCK_DGRAM)\n"
    f"for _ in range({BURST_BYTES // 1400}): s.sendto(bytes(1400), (sys.argv[1], 9))\n"
)
BUSY = "import time\nwhile time.thread_time() < 0.1: pass\n"


def left_out(kinds: Iterable[str], *, boxes: bool, lacks: Mapping[str, str]) -> dict[str, str]:
    """The kinds that cannot be done on this machine, each with what is lacking.

    >>> left_out(["late_node", "kill_worker"], boxes=True, lacks={"tun": "no /dev/net/tun"})
    {'late_node': 'no /dev/net/tun'}
    """
    found: dict[str, str] = {}
    for kind in sorted(set(kinds)):
        missing = [lacks[need] for need in NEEDS.get(kind, ()) if need in lacks]
        if not boxes and kind in LACKS_BOXES:
            found[kind] = "no namespaces"
        elif missing:
            found[kind] = ", ".join(missing)
    return found


def put_right(clock: FalseClock) -> None:
    """It jumps to the true time."""
    with suppress(OSError):  # the lab has gone
        clock.show(0.0)


class Hands(StorageHands):
    """What does harm to one job in one lab."""

    def __init__(self, job: LabJob, eye: Eye) -> None:
        super().__init__(job, eye)
        self.tokens = 0  # of orders to workers

    def strike(self, fault: Fault) -> Done | None:
        """Put it in, now; None if that cannot be done at the moment."""
        # Each method below, or in `StorageHands`, that bears a kind's name.
        strike: Callable[[Fault], Done | None] = getattr(self, "_" + fault.kind)
        try:
            return strike(fault)
        except StoreUnavailable:
            return None  # another fault has it

    @classmethod
    def can(cls, kind: str) -> bool:
        """Is this fault known here?"""
        return hasattr(cls, "_" + kind)

    # ---- signals

    def _running(self, fault: Fault, find: Callable[[str], int]) -> tuple[str, int]:
        """The node and a process there; 0 where there is no power, and where all stands still: nothing that is frozen dies."""
        node = self.whom(fault.node)
        box = self.lab.boxes.get(node)
        return node, find(node) if box is not None and box.on and not box.frozen else 0

    def _end(self, fault: Fault, find: Callable[[str], int], number: int = signal.SIGKILL) -> Done | None:
        node, pid = self._running(fault, find)
        if not pid or not send(pid, number):
            return None
        if not gone(pid, TERM_S):
            raise NotStruck(f"process {pid} of {node} survived {signal.Signals(number).name}")
        return Done(nodes=(node,), detail=f"pid {pid}, {signal.Signals(number).name}")

    def _halt(self, fault: Fault, find: Callable[[str], int]) -> Done | None:
        node, pid = self._running(fault, find)
        if not pid or not send(pid, signal.SIGSTOP):
            return None
        deadline = time.monotonic() + 5.0
        while not stopped(pid) and alive(pid) and time.monotonic() < deadline:
            time.sleep(0.001)
        if alive(pid) and not stopped(pid):
            raise NotStruck(f"process {pid} of {node} goes on after SIGSTOP")
        outer = parent(
            pid
        )  # nsenter, if it was started from outside: it stands still with its child, and never wakes of itself

        def go() -> None:
            send(pid, signal.SIGCONT)
            if "nsenter" in command_line(outer):
                send(outer, signal.SIGCONT)

        return Done(nodes=(node,), detail=f"pid {pid} stopped", undo=go)

    def _worker_of(self, fault: Fault) -> Callable[[str], int]:
        """Finds the worker in its slot."""
        return partial(self.job.worker, slot=fault.slot)

    def _kill_worker(self, fault: Fault) -> Done | None:
        return self._end(fault, self._worker_of(fault))

    def _term_worker(self, fault: Fault) -> Done | None:
        return self._end(fault, self._worker_of(fault), signal.SIGTERM)

    def _stop_worker(self, fault: Fault) -> Done | None:
        return self._halt(fault, self._worker_of(fault))

    def _kill_spare(self, fault: Fault) -> Done | None:
        return self._end(fault, self.job.spare)

    def _term_spare(self, fault: Fault) -> Done | None:
        return self._end(fault, self.job.spare, signal.SIGTERM)

    def _stop_spare(self, fault: Fault) -> Done | None:
        return self._halt(fault, self.job.spare)

    def _kill_agent(self, fault: Fault) -> Done | None:
        return self._end(fault, self.job.agent)

    def _term_agent(self, fault: Fault) -> Done | None:
        node, pid = self._running(fault, self.job.agent)
        if not pid or node in self.off or not self.job.daemon(node) or not send(pid, signal.SIGTERM):
            return None
        self.off.add(node)  # it leaves as if it were drained: agent and daemon end
        return Done(
            nodes=(node,), detail=f"pid {pid}, SIGTERM", undo=self._left(node),
            proof=lambda: "" if gone(pid, LEAVE_S) else f"the agent of {node} runs {LEAVE_S:.0f} s after SIGTERM",
        )  # fmt: skip

    def _pause_agent(self, fault: Fault) -> Done | None:
        return self._halt(fault, self.job.agent)

    def _kill_vault(self, fault: Fault) -> Done | None:
        return self._end(fault, self.job.vault)

    def _term_vault(self, fault: Fault) -> Done | None:
        return self._end(fault, self.job.vault, signal.SIGTERM)

    def _pause_vault(self, fault: Fault) -> Done | None:
        return self._halt(fault, self.job.vault)

    def _kill_engine(self, fault: Fault) -> Done | None:
        return self._end(fault, self.job.engine)

    def _term_engine(self, fault: Fault) -> Done | None:
        return self._end(fault, self.job.engine, signal.SIGTERM)

    def _pause_engine(self, fault: Fault) -> Done | None:
        """For longer than its health may take it is replaced, for a shorter time it is waited for."""
        done, for_s, health_s = (
            self._halt(fault, self.job.engine),
            fault.for_s or 0.0,
            self.job.tree.rollout.health_timeout_s,
        )
        if done is None or health_s <= for_s <= GIVEN_UP * health_s:
            return done
        node, struck = done.nodes[0], self.job.engine(done.nodes[0])

        def proof() -> str:
            replaced = self.job.engine(node) != struck
            if replaced == (for_s > health_s):
                return ""
            return (
                f"the engine of {node} stood still for {for_s:g} s and was {'replaced' if replaced else 'waited for'}"
            )

        return replace(done, proof=proof)

    def _lose_vault(self, fault: Fault) -> Done | None:
        node = self.whom(fault.node)
        folder = self.job.vault_dir(node) if node else None
        if folder is None or not any(folder.glob("*.shard")):
            return None  # there is nothing to be lost yet
        done = self._end(replace(fault, node=node), self.job.vault)
        if done is not None:
            shutil.rmtree(folder, ignore_errors=True)
            if any(folder.glob("*.shard")):
                raise NotStruck(f"{folder} is still there")
        return done

    def _kill_daemon(self, fault: Fault) -> Done | None:
        return self._back_later(self._end(fault, self.job.daemon))

    def _term_daemon(self, fault: Fault) -> Done | None:
        return self._back_later(self._end(fault, self.job.daemon, signal.SIGTERM))

    def _pause_daemon(self, fault: Fault) -> Done | None:
        return self._halt(fault, self.job.daemon)

    def _back_later(
        self, done: Done | None, *overrides: str, env: Mapping[str, str] | None = None, boots: bool = False
    ) -> Done | None:
        """Its daemon is to run again, when the fault is over, with this; and is then seen to have it. A node that `boots`, as
        nothing of it is left, begins no job that was stopped meanwhile.
        """
        if done is None:
            return None
        node = done.nodes[0]
        self.off.add(node)
        struck = self.job.daemons[node]

        def back() -> None:
            self.off.discard(node)
            if boots and self._stopped():
                self.dark.add(node)
                for folder in ("/dev/shm/elasticrl", "/run/elasticrl"):  # which a boot has empty
                    shutil.rmtree(self.lab.boxes[node].path(f"{folder}/{self.job.name}"), ignore_errors=True)
                return
            wanted = bool(overrides or env)
            if self._started_since(node, struck, 20.0):
                if not wanted:
                    return
                send(self.job.daemon(node), signal.SIGTERM)
                self._started_since(node, self.job.daemons[node], 20.0)
            self.job.start(node, *overrides, env=env)
            self._has(node, overrides, env or {})

        return Done(nodes=done.nodes, detail=done.detail, undo=back)

    def _started_since(self, node: str, struck: "subprocess.Popen[bytes]", within_s: float) -> bool:
        """Whether the end of another fault has started this node's daemon again already, once the one that was struck is gone:
        its outer process may take a moment longer than the inner one.
        """
        with suppress(subprocess.TimeoutExpired):
            struck.wait(within_s)
        return self.job.daemons[node] is not struck and self.job.ended(node) is None

    def _has(self, node: str, overrides: tuple[str, ...], env: Mapping[str, str]) -> None:
        """The daemon was started like that. Of one that stands still from the start, nothing is known."""
        wanted = [*overrides, *(f"{name}={value}" for name, value in env.items())]
        deadline = time.monotonic() + 10.0
        while wanted and not self.lab.boxes[node].frozen:
            pid = self.job.daemon(node)
            words = [*command_line(pid).split(), *environment(pid)]
            if all(word in words for word in wanted):
                return
            if time.monotonic() > deadline:
                raise NotStruck(f"the daemon of {node} was not started with {' '.join(wanted)}")
            time.sleep(0.02)

    # ---- what a worker does to itself

    def _order(self, fault: Fault, do: str, **more: object) -> Done | None:
        node, slot = self.whom(fault.node), self.job.slot(fault.slot)
        if not node or not self.job.worker(node, slot):
            return None
        self.tokens += 1
        token = self.tokens
        inside = fault.place in INSIDE
        place, step = (fault.place, fault.step) if inside else ("", 0)  # a place that shows elsewhere has been reached
        path = self.job.order(node, do=do, place=place, step=step, token=token, slot=slot, **more)
        if not self._taken(token):
            path.unlink(missing_ok=True)
            return None
        return Done(nodes=(node,), detail=f"the worker did it to itself ({do})")

    def _taken(self, token: int) -> bool:
        """Has a worker taken this order, within some seconds?"""
        deadline = time.monotonic() + ORDER_S
        while token not in self.eye.here and time.monotonic() < deadline:
            time.sleep(0.01)
            self.eye.look()
        return token in self.eye.here

    def _crash_worker(self, fault: Fault) -> Done | None:
        return self._order(fault, "raise", text=f"bad prompt {self.tokens}")

    def _hang_worker(self, fault: Fault) -> Done | None:
        return self._order(fault, "hang")

    def _always(self, node: str, **what: object) -> Done:
        """An order that stays; the worker says once that it has taken it."""
        self.tokens += 1
        token = self.tokens
        path = self.job.order(node, token=token, stays=True, **what)
        return Done(
            nodes=(node,), undo=lambda: path.unlink(missing_ok=True),
            proof=lambda: "" if token in self.eye.here else f"no worker of {node} came to it",
        )  # fmt: skip

    def _slow_worker(self, fault: Fault) -> Done | None:
        node, slot = self.whom(fault.node), self.job.slot(fault.slot)
        if not node or not self.job.worker(node, slot):
            return None
        done = self._always(node, do="slow", place="before rollout", value=0.1 * max(1.0, fault.value), slot=slot)
        return replace(done, detail=f"{fault.value:g} times")

    def _crash_loop(self, _: Fault) -> Done | None:
        self.tokens += 1
        what = {"do": "raise", "place": "after rollout", "step": self.eye.newest + 2, "text": "bad prompt of all"}
        for node in self.lab.boxes:  # whoever has the rank by then: one death is one attempt
            self.job.order(node, token=self.tokens, stays=True, rank=0, **what)
        if not self._taken(self.tokens):
            raise NotStruck("no worker raised")
        return Done(nodes=(), detail="every attempt raises")

    def _sick_node(self, fault: Fault) -> Done | None:
        node = self.whom(fault.node)
        return self._always(node, do="raise", place="before rollout", text=f"sick {node}") if node else None

    def _oom_worker(self, fault: Fault) -> Done | None:
        node = self.whom(fault.node)
        top = self.lab.boxes[node].groups.get("memory") if node else None
        if top is None or self._order(replace(fault, node=node), "grow") is None:
            return None
        group = top / "tight"
        group.mkdir(exist_ok=True)
        (group / "memory.limit_in_bytes").write_text(str(64 << 20))
        before = oom_kills(group)
        # Whoever has taken the order: a plan may have put another process there since it was written.
        pid = self.lab.boxes[node].host_pid(self.eye.here[self.tokens])
        if pid:  # 0 would be this very process
            with suppress(OSError):  # it has gone
                (group / "cgroup.procs").write_text(str(pid))
        (self.job.history / f"{node}.go.{self.tokens}").touch()
        if pid and not gone(pid, 20.0):
            raise NotStruck(f"process {pid} of {node} outgrew 64 MiB and lives")
        kills = oom_kills(group) - before
        return (
            Done(nodes=(node,), detail=f"ended by the kernel: oom_kill {kills}") if kills else None
        )  # another plan was first

    def _starve_node(self, fault: Fault) -> Done | None:
        box = self._powered(fault)
        if box is None or "cpu" not in box.groups:
            return None
        before = box.throttled
        box.share(fault.value or 0.1)

        def proof() -> str:
            if box.throttled == before and not box.frozen:  # on a fast machine the job may want less than its share
                box.start([sys.executable, "-I", "-S", "-c", BUSY], self.job.folder / "probe.log").wait(60.0)
            return "" if box.throttled > before else f"{box.name} was never denied a core"

        return Done(
            nodes=(box.name,), detail=f"{fault.value or 0.1:.2f} of a core", undo=lambda: box.share(None), proof=proof
        )

    # ---- nodes

    def _kill_node(self, fault: Fault) -> Done | None:
        return self._back_later(self._all_killed(fault), boots=True)

    def _wrong_zone(self, fault: Fault) -> Done | None:
        return self._back_later(self._all_killed(fault), env={"TZ": ZONE})

    def _wrong_clock(self, fault: Fault) -> Done | None:
        done = self._all_killed(fault)
        if done is None:
            return None
        (node,) = done.nodes
        off_s = math.copysign(max(abs(fault.value), 2 * NEAR_S), fault.value)  # else the proof would be none
        clock = FalseClock(self.job.folder / f"{node}.clock")
        clock.show(off_s, drift=DRIFT)
        later = self._back_later(done, env=clock.environment())
        assert later is not None
        assert later.undo is not None
        begun, back = time.time(), later.undo

        def back_and_put_right() -> None:
            back()
            self._says_it_is(node, begun + off_s)
            right = Timer(PUT_RIGHT_S, put_right, (clock,))
            right.daemon = True
            right.start()

        return replace(later, detail=f"{done.detail}, {off_s:+.0f} s", undo=back_and_put_right)

    def _says_it_is(self, node: str, at: float) -> None:
        """Its daemon logs by that clock, to a minute. Of one that stands still from the start, nothing is known."""
        deadline = time.monotonic() + 10.0
        while not self.lab.boxes[node].frozen:
            *_, last = ["", *self.job.log(node).read_text(encoding="utf-8").splitlines()]
            with suppress(ValueError, KeyError):  # just being written
                if abs(datetime.fromisoformat(json.loads(last)["at"]).timestamp() - at) < NEAR_S:
                    return
            if time.monotonic() > deadline:
                raise NotStruck(f"the clock of {node} is not off: its log says {last[-200:]}")
            time.sleep(0.1)

    def _all_killed(self, fault: Fault) -> Done | None:
        box = self._powered(fault)
        if box is None or box.frozen:
            return None
        daemon = self.job.daemon(box.name)
        pids = [daemon, *(pid for pid in reversed(box.pids()) if pid != daemon)]
        for pid in pids:
            if pid:
                send(pid, signal.SIGKILL)
        left = [pid for pid in pids if pid and not gone(pid)]
        if left:
            raise NotStruck(f"processes {left} of {box.name} survived SIGKILL")
        return Done(nodes=(box.name,), detail=f"{len(pids)} processes")

    def _power_cut(self, fault: Fault) -> Done | None:
        box = self._powered(fault)
        if box is None:
            return None
        net.wire(box, up=False)  # first: nobody hears a FIN
        box.kill()
        self.off.add(box.name)

        def back() -> None:
            box.boot()
            self.off.discard(box.name)
            if self._stopped():  # a boot begins no job that was stopped
                self.dark.add(box.name)
            else:
                self.job.start(box.name)

        return Done(nodes=(box.name,), detail="the cable first", undo=back)

    def _pause_node(self, fault: Fault) -> Done | None:
        box = self._powered(fault)
        if box is None or "freezer" not in box.groups:
            return None
        box.freeze()
        deadline = time.monotonic() + 5.0
        while not box.frozen:
            if time.monotonic() > deadline:
                box.unfreeze()
                raise NotStruck(f"{box.name} does not freeze")
            time.sleep(0.005)
        return Done(nodes=(box.name,), undo=box.unfreeze)

    def _join_node(self, fault: Fault) -> Done | None:
        node = self.whom(fault.node) if fault.node else min(self.off, default="")
        if not node or node not in self.off:
            return None
        if not self.lab.boxes[node].on:
            self.lab.boxes[node].boot()
        self.off.discard(node)
        self.job.start(node)
        return Done(nodes=(node,))

    # ---- cables

    def _drop(self, nodes: tuple[str, ...], matches: list[str], detail: str = "") -> Done:
        rule = self.lab.net.drop(*matches)
        return Done(
            nodes=nodes, detail=detail, undo=lambda: self.lab.net.heal(rule),
            proof=lambda: "" if self.lab.net.dropped(rule) else "no frame was dropped",
        )  # fmt: skip

    def _cut(self, nodes: tuple[str, ...], some: list[Box], others: list[Box], way: str, detail: str) -> Done:
        """Nothing passes between these; a datagram that is sent on purpose shows it."""
        done = self._drop(nodes, net.between(some, others, way), detail)
        sender, hearer = (some, others) if way in ("both", "out") else (others, some)
        for box in [box for box in sender if box.on][:1]:
            for other in hearer:
                box.run("bash", "-c", f"echo > /dev/udp/{other.address}/9", check=False)
        return done

    def _cut_link(self, fault: Fault) -> Done | None:
        a, b = self._powered(fault), self.lab.boxes.get(self.whom(fault.peer))
        if a is None:
            return None
        if b is None or b is a:
            b = next((box for box in self.boxes(a.name) if box.on), None)
        if b is None:
            return None
        return self._cut((a.name, b.name), [a], [b], fault.way, fault.way)

    def _isolate(self, fault: Fault) -> Done | None:
        box = self._powered(fault)
        if box is None:
            return None
        others = self.boxes(box.name)
        return self._cut(tuple(b.name for b in (box, *others)), [box], others, fault.way, f"{box.name} {fault.way}")

    def _leader_alone(self, fault: Fault) -> Done | None:
        box = self._powered(fault)
        if box is None:
            return None
        others = [*self.boxes(box.name), *self.stores()]
        return self._cut(tuple(self.lab.boxes), [box], others, "both", f"{box.name} alone")

    def _partition(self, _: Fault) -> Done | None:
        names = sorted(self.lab.boxes)
        half = [self.lab.boxes[name] for name in names[: len(names) // 2]]
        return self._cut(tuple(names), half, self.boxes(*(box.name for box in half)), "both", "in halves")

    def _cut_store(self, fault: Fault) -> Done | None:
        box = self._powered(fault)
        if box is None:
            return None
        if fault.value:
            share = int(1000 * min(0.9, fault.value))
            matches = [f"{m} numgen random mod 1000 < {share}" for m in net.between([box], self.stores(), fault.way)]
            return self._drop((box.name,), matches, f"{share / 10:g} % of the way to the store")
        return self._cut((box.name,), [box], self.stores(), fault.way, fault.way)

    def _store_alone(self, _: Fault) -> Done | None:
        return self._cut((), self.boxes(), self.stores(), "both", "no node reaches it")

    def _lossy_node(self, fault: Fault) -> Done | None:
        box = self._powered(fault)
        if box is None:
            return None
        share = int(1000 * min(0.9, fault.value or 0.2))
        luck = f"numgen random mod 1000 < {share}"
        matches = [f"iifname {box.wire} {luck}", f"oifname {box.wire} {luck}"]
        return self._drop((box.name,), matches, f"{share / 10:g} %")

    def _mtu_hole(self, fault: Fault) -> Done | None:
        box = self._powered(fault)
        if box is None:
            return None
        size = int(fault.value or 600)
        return self._drop(
            (box.name,), [f"{way} {box.wire} meta length gt {size}" for way in ("iifname", "oifname")], f"{size} B"
        )

    def _link_down(self, fault: Fault) -> Done | None:
        box = self._powered(fault)
        if box is None:
            return None
        net.wire(box, up=False)
        flags = Path(f"/sys/class/net/{box.wire}/flags").read_text(encoding="ascii")
        if int(flags, 16) & 1:
            raise NotStruck(f"{box.wire} is still up")
        return Done(nodes=(box.name,), undo=lambda: net.wire(box, up=True))

    def _slow_link(self, fault: Fault) -> Done | None:
        box = self._powered(fault)
        if box is None:
            return None
        net.slow(box, fault.value or 1.0)
        # More than the rate lets pass at once; what the job itself sends may be less.
        other = next(iter(self.boxes(box.name)))
        box.run(sys.executable, "-I", "-S", "-c", BURST, other.address)
        if not net.queued(box):
            net.fast(box)
            raise NotStruck(f"{box.name} sent {BURST_BYTES} bytes at once, and no packet has waited")
        return Done(nodes=(box.name,), detail=f"{fault.value or 1.0:g} Mbit/s", undo=lambda: net.fast(box))

    def _late_node(self, fault: Fault) -> Done | None:
        box = self._powered(fault)
        up = next((member.box for member in self.lab.members.values() if not member.down), None)
        if box is None or box.frozen or up is None:
            return None
        delay = fault.value or 20.0
        back = net.late(box, self.lab.name, delay)
        try:
            took = net.round_trip(box, up.address, 2379)
        except BoxError:  # something else has cut it off from the store meanwhile: it is tried again
            back()
            return None
        if took < delay:
            back()
            raise NotStruck(f"a round trip from {box.name} takes {took:.1f} ms, with {delay:g} ms each way")
        return Done(nodes=(box.name,), detail=f"{delay:g} ms each way", undo=back)

    # ---- operators

    def _asked(self, asked: str, verb: str, **fields: str | bool) -> bool:
        try:
            self.job.ask(asked, verb, **fields)
        except (Unanswered, OSError):
            return False
        return True

    def _anyone_asked(self, verb: str, **fields: str | bool) -> bool:
        """By whoever takes it, as an operator would try: a node that is cut off from the store takes nothing."""
        return any(self._asked(node, verb, **fields) for node in self.askable())

    def askable(self) -> list[str]:
        """The nodes whose daemons could be asked for something."""
        return [n for n, box in self.lab.boxes.items() if box.on and n not in self.off and self.job.daemon(n)]

    def _stopped(self) -> bool:
        return self.eye.plan is not None and self.eye.plan.phase is Phase.STOP

    def _pause_job(self, verb: str, undo: str) -> Done | None:
        if not self._anyone_asked(verb):
            return None

        def back() -> None:
            deadline = time.monotonic() + 30.0
            while not self._stopped() and not self._anyone_asked(undo):
                if time.monotonic() > deadline:
                    raise BoxError(f"nobody takes {undo!r}")
                time.sleep(0.2)

        return Done(nodes=(), undo=back)

    def _pause(self, _: Fault) -> Done | None:
        before = len(self.eye.facts)

        def proof() -> str:
            asked = (fact.verb for fact in self.eye.facts[before:] if isinstance(fact, Asked))
            return "" if Intent.PAUSE in asked else "the store has not said that a pause is asked"

        done = self._pause_job("pause", "resume")
        return done and replace(done, proof=proof)

    def _stop(self, _: Fault) -> Done | None:
        return Done(nodes=()) if self._anyone_asked("stop") else None

    def _admit(self, fault: Fault) -> Done | None:
        node = self.whom(fault.node)
        return Done(nodes=()) if node and self._anyone_asked("admit", node=node) else None

    def _drain(self, fault: Fault) -> Done | None:
        node = self.whom(fault.node)
        if not node or node in self.off or not self._anyone_asked("drain", node=node, force=True):
            return None
        self.off.add(node)
        return Done(nodes=(node,), undo=self._left(node))

    def _left(self, node: str) -> Undo:
        """Start a node again that was told to leave, as soon as it has."""
        told = self.job.daemons[node]

        def back() -> None:
            again = self._started_since(node, told, LEAVE_S)
            self.off.discard(node)
            if again:
                return
            if self._stopped():  # it has left, or was stopped with the others: it may end either way
                self.dark.add(node)
            else:
                self.job.start(node)

        return back

    def _drain_and_back(self, fault: Fault) -> Done | None:
        return self._drain(fault)

    def _two_daemons(self, fault: Fault) -> Done | None:
        node = self.whom(fault.node)
        if not node or not self.job.daemon(node) or self.lab.boxes[node].frozen:
            return None
        process = self.job.start(node, count=False)
        try:
            code = process.wait(60.0)
        except subprocess.TimeoutExpired:
            raise NotStruck(f"a second daemon of {node} runs") from None
        if code == 0:
            raise NotStruck(f"a second daemon of {node} ended with 0 instead of being refused")
        return Done(nodes=(), detail=f"refused with {code}")

    def _changed_config(self, fault: Fault) -> Done | None:
        done = self._end(fault, self.job.daemon, signal.SIGTERM)
        return self._back_later(done, "membership.suspect=1900ms", "checkpoint.keep_last=2")

    def _port_taken(self, fault: Fault) -> Done | None:
        node = self.whom(fault.node)
        pid = self.job.vault(node) if node else 0
        if not pid:
            return None
        box = self.lab.boxes[node]
        port = listening(box, pid)
        code = (
            "import socket,sys,time\ns=socket.socket();s.setsockopt(socket.SOL_SOCKET,socket.SO_REUSEADDR,1)\n"
            "open('/run/ready','w').close(); end=time.time()+8\n"
            "while True:\n  try: s.bind((sys.argv[1],int(sys.argv[2]))); break\n"
            "  except OSError:\n    if time.time()>end: sys.exit(3)\n    time.sleep(.0005)\n"
            "s.listen(); open('/run/taken','w').close(); time.sleep(3600)\n"
        )
        ready, taken = box.path("/run/ready"), box.path("/run/taken")
        ready.unlink(missing_ok=True)
        taken.unlink(missing_ok=True)
        thief = box.start(
            [sys.executable, "-I", "-S", "-c", code, box.address, str(port)], self.job.folder / "thief.log"
        )
        deadline = time.monotonic() + 9.0
        while not ready.exists() and thief.poll() is None and time.monotonic() < deadline:
            time.sleep(0.002)
        send(pid, signal.SIGKILL)
        while not taken.exists() and thief.poll() is None and time.monotonic() < deadline:
            time.sleep(0.002)
        inner = next((p for p in box.pids() if "time.sleep(3600)" in command_line(p)), 0)

        def back() -> None:
            if inner:
                send(inner, signal.SIGKILL)

        if not taken.exists():
            back()
            raise NotStruck(f"the vault of {node} was back on port {port} before it could be taken")
        return Done(nodes=(node,), detail=f"port {port}", undo=back)


def oom_kills(group: Path) -> int:
    """How many processes of this memory cgroup the kernel has ended so far."""
    lines = (group / "memory.oom_control").read_text().splitlines()
    return int(next((line.split()[1] for line in lines if line.startswith("oom_kill ")), 0))


def listening(box: Box, pid: int) -> int:
    """The TCP port on which a process listens."""
    inodes = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):
            target = str(link.readlink())
            if target.startswith("socket:["):
                inodes.add(target[8:-1])
    for line in Path(f"/proc/{pid}/net/tcp").read_text(encoding="ascii").splitlines()[1:]:
        fields = line.split()
        if fields[3] == "0A" and fields[9] in inodes:
            return int(fields[1].partition(":")[2], 16)
    raise NotStruck(f"process {pid} of {box.name} listens nowhere")


__all__ = ["LACKS_BOXES", "NEEDS", "Hands", "left_out"]
