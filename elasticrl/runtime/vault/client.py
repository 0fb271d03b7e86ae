"""The worker's side of the vault: snapshots that cost the training thread next to nothing, and state read back from memory.

The one idea: the training thread only says *what* its state is; a thread of the vault's copies it, straight into the file that
buddies and successors will read, while parameters don't change (rollout, forward, backward). `Ticket.taken` is the moment from
which they may change again: waiting for it is the only stall there is. What changes within a step is little, and copied first.
"""

import queue
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from elasticrl.base.address import CONTROL
from elasticrl.runtime.vault import faults, layout
from elasticrl.runtime.vault.channel import STILL
from elasticrl.runtime.vault.control import TURN_S, Control
from elasticrl.runtime.vault.errors import VaultError
from elasticrl.runtime.vault.holdings import Holding, Whole, holding_of
from elasticrl.runtime.vault.layout import Shape, Stamp, Table, Torn
from elasticrl.runtime.vault.piece import Piece, reads
from elasticrl.runtime.vault.registered import Cudart, Registered
from elasticrl.runtime.vault.slots import PART, Pinned, Slot, Slots, files, pin
from elasticrl.runtime.vault.source import Shard, Source, shard_of, views
from elasticrl.runtime.vault.version import Lineage, Made, Version

_T = TypeVar("_T")
_Of = TypeVar("_Of")
AT_ONCE = 8  # shards that are asked for at the same time; a vault hears 128 callers
PAUSE_S = 0.05  # between two attempts to get a shard
LIGHT = "-on"  # after a writer's name: what lies on its other shards has files of its own, which are small


@dataclass(frozen=True, slots=True, kw_only=True)
class Content:
    """What a worker's shard holds now: pieces, the live tensors they are in, and everything else ready for JSON.

    `values` must be a tree of its own: it is written out later, when the live objects have gone on.

    Example: Content(table=Table((Piece("w", "float32", (8,), (0,), (4,)),)), tensors=(w[:4],), values={"schedule": {"n": 3}})
    """

    table: Table
    tensors: tuple[torch.Tensor, ...]
    values: Mapping[str, Any] = field(default_factory=dict)
    steady: int = 0  # so many of the first tensors stay as they are until the next update


class Ticket:
    """A snapshot on its way. `loose`: all may change again but what is steady. `taken`: that too. `sealed`: it is whole in this
    node's vault.
    """

    def __init__(self, stamp: Stamp) -> None:
        self.stamp = stamp
        self.path: Path | None = None
        self.seal = 0  # what tells this version in that file from whatever comes there later
        self.busy_s = 0.0  # processor time of the vault's thread, once it is sealed
        self._loose = threading.Event()
        self._taken = threading.Event()
        self._sealed = threading.Event()
        self._error: Exception | None = None

    def wait_loose(self, timeout_s: float) -> None:
        """Until what is not steady may change; VaultError if that fails."""
        self._wait(self._loose, timeout_s, "begun to be copied")

    def wait_taken(self, timeout_s: float) -> None:
        """Until the tensors may change; VaultError if that fails."""
        self._wait(self._taken, timeout_s, "copied out of the worker's memory")

    def wait_sealed(self, timeout_s: float) -> None:
        """Until it would survive this worker; VaultError if it won't."""
        self._wait(self._sealed, timeout_s, "sealed")

    @property
    def copied(self) -> bool:
        """Whether all of it may change again."""
        return self._taken.is_set()

    @property
    def done(self) -> bool:
        """Whether nothing more will happen to it."""
        return self._sealed.is_set()

    def _wait(self, event: threading.Event, timeout_s: float, what: str) -> None:
        if not event.wait(timeout_s):
            raise VaultError(f"The snapshot of step {self.stamp.version} was not {what} within {timeout_s:g} s.")
        if self._error is not None:
            raise VaultError(f"The snapshot of step {self.stamp.version} failed: {self._error}") from self._error

    def wait_still(self, timeout_s: float) -> None:
        """Until nothing of it is copied any more, whatever has come of it."""
        if not self._taken.wait(timeout_s):
            raise VaultError(f"The snapshot of step {self.stamp.version} was still being copied after {timeout_s:g} s.")

    def mark_loose(self) -> None:
        """For the vault's thread: what is left to copy is steady."""
        self._loose.set()

    def mark_taken(self) -> None:
        """For the vault's thread: the copy is made."""
        self._taken.set()

    def finish(self, error: Exception | None) -> None:
        """For the vault's thread: it is sealed, or failed."""
        self._error = error
        self._loose.set()
        self._taken.set()
        self._sealed.set()


class Vault:
    """One worker's access to its node's vault. Works without a server too, then without copies.

    `writer` names the worker on its node ("w0", "w1", ...); a worker that takes a dead one's place takes its files as well.
    """

    def __init__(
        self, directory: Path, *, job: str, node: str, writer: str = "w0", keep: int = 2, deadline_s: float = 5.0
    ) -> None:
        self.directory = directory
        self.job = job
        self.node = node
        self.writer = writer
        self.notice = ""  # why the server does not know of the last snapshot, if it doesn't
        self.slower = ""  # why a GPU's snapshots are copied through pageable memory, if they are
        self.sealed: tuple[
            Made, ...
        ] = ()  # what the gang can go on from, wherever it lies: it stays, here and at buddies
        self.control = Control(directory / CONTROL, deadline_s=deadline_s)
        self._deadline_s = deadline_s
        self._slots = Slots(directory, origin=node, writer=writer, keep=keep)
        self._light = Slots(directory, origin=node, writer=f"{writer}{LIGHT}", keep=keep)
        self._views: dict[int, tuple[object, Table, int, tuple[torch.Tensor, ...]]] = {}
        self._registered: Registered | None = None  # once a GPU's tensors come; the vault's thread's alone
        self._queue: queue.Queue[Callable[[], None] | None] = queue.Queue(maxsize=1)
        self._last: Ticket | None = None
        self._news: queue.SimpleQueue[str | Version | None] = queue.SimpleQueue()  # for the server; None: no more
        self._threads = [
            threading.Thread(target=self._run, name=f"vault-{writer}", daemon=True),
            threading.Thread(target=self._announce, name=f"vault-{writer}-announce", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    # -- writing

    def snapshot(
        self, content: Content, *, version: Version, generation: int, shard: int, world: int, lineage: Lineage = (),
        base: Version | None = None,
    ) -> Ticket:  # fmt: skip
        """Begin to keep `content`; returns at once. Its tensors must not change before `Ticket.wait_taken`. With `base` it lies
        on that version, of the same generation and world: what it leaves out is there.

        A snapshot that is still under way is waited for first: there is one at a time.
        """
        assert 0 <= shard < world, f"shard {shard} of {world}"
        assert len(content.tensors) == len(content.table.pieces)
        stamp = Stamp(
            job=self.job, node=self.node, writer=self.writer if base is None else f"{self.writer}{LIGHT}",
            version=version, generation=generation, shard=shard, world=world, lineage=lineage, base=base,
            sealed=self.sealed,
        )  # fmt: skip
        ticket = Ticket(stamp)
        ready = _cuda_event(content.tensors)
        self._put(lambda: self._keep(ticket, content, ready))
        self._last = ticket
        return ticket

    def loosen(self, timeout_s: float) -> None:
        """Wait until the last snapshot lets all but the parameters change: the line to put before a step."""
        if self._last is not None:
            self._last.wait_loose(timeout_s)

    def still(self, timeout_s: float) -> None:
        """Wait until the last snapshot is not being copied any more, whether or not it came to anything."""
        if self._last is not None:
            self._last.wait_still(timeout_s)

    def settle(self, timeout_s: float) -> None:
        """Wait until the last snapshot lets the parameters change: the line to put before an update."""
        if self._last is not None:
            self._last.wait_taken(timeout_s)

    def wait_copied(self, ticket: Ticket, timeout_s: float) -> int:
        """Until the buddies have it too; how many there are. CopiesLate names those that don't."""
        limit = time.monotonic() + timeout_s
        ticket.wait_sealed(timeout_s)
        return self.control.copied(
            ticket.stamp.writer,
            version=ticket.stamp.version,
            generation=ticket.stamp.generation,
            timeout_s=max(limit - time.monotonic(), 0.001),
        )

    def void_after(self, version: Version, generation: int) -> None:
        """The gang goes on from `version` as `generation` left it: what this worker holds beyond that has no future."""
        done = threading.Event()

        def run() -> None:
            for slots in (self._slots, self._light):
                slots.void_after(version, generation)
            done.set()

        self._put(run)
        if not done.wait(self._deadline_s):
            raise VaultError(
                f"The vault's thread did not forget what came after step {version} within {self._deadline_s:g} s."
            )

    def release(self, version: Version) -> None:
        """`version` is whole everywhere. The server is told in the background; one that does not hear keeps more for longer."""
        self._news.put(version)

    def mend(self) -> None:
        """Somebody has cleared the directory away, or a file in it: bring back what is still in this worker's memory."""

        def run() -> None:
            try:
                for name in (*self._slots.mend(), *self._light.mend()):
                    self._news.put(name)
            except (OSError, VaultError) as error:
                self.notice = str(error)

        self._put(run)

    def _put(self, work: Callable[[], None]) -> None:
        try:
            self._queue.put(work, timeout=self._deadline_s)
        except queue.Full:
            raise VaultError(
                f"The vault's thread has been busy with one snapshot for over {self._deadline_s:g} s: "
                f"is {self.directory} still answering?"
            ) from None

    def _run(self) -> None:
        while (work := self._queue.get()) is not None:
            work()
            del work  # and with it what it has kept, which would stay until the next comes

    def _keep(self, ticket: Ticket, content: Content, ready: "torch.cuda.Event | None") -> None:
        stamp, table = ticket.stamp, content.table
        begun = time.thread_time()
        try:
            text = layout.header(stamp, table, content.values)
            shape = layout.shape_of(text, table.starts[-1])
            slots = self._slots if stamp.base is None else self._light
            below = stamp.version, stamp.generation
            slot = slots.take(shape.total, below=below, sealed=stamp.sealed, within_s=self._deadline_s / 2)
            try:
                targets, steady = self._targets(slot, table, shape), content.steady
                if ready is not None:
                    self._register(slot, content.tensors)
                _copy(targets[steady:], content.tensors[steady:], ready)
                ticket.mark_loose()
                _copy(targets[:steady], content.tensors[:steady], ready)
                ticket.mark_taken()
                memory = slot.memory
                ticket.seal = layout.seal(memory, shape, text, layout.sums_of(memory, shape))
                slot.remember(ticket.seal, stamp.version, stamp.generation)
            finally:
                slot.unlock()
        except (OSError, VaultError, RuntimeError) as error:
            ticket.finish(error)
            return
        ticket.path = slot.path
        ticket.busy_s = time.thread_time() - begun
        ticket.finish(None)
        self._news.put(slot.path.name)

    def _announce(self) -> None:
        """Tell the server of each writer's newest sealed file, and what it may release. A thread of its own: a server that
        hangs must hold up neither a snapshot nor the training.
        """
        over = False
        with closing(Control(self.control.path, deadline_s=self._deadline_s)) as control:
            while not over:
                newest: dict[str, str | Version] = {}  # by its writer: a light state lies on another one's file
                news = self._news.get()
                with suppress(queue.Empty):
                    while news is not None:
                        whose = "" if isinstance(news, Version) else news.rpartition("+")[0]
                        newest.pop(whose, None)  # told in the order in which the newest came
                        newest[whose] = news
                        news = self._news.get_nowait()
                    over = True
                for told in newest.values():
                    if isinstance(told, Version):
                        with suppress(VaultError):  # the next generation says it again
                            control.release(told)
                        continue
                    try:
                        control.ask("sealed", file=told)
                        self.notice = ""
                    except VaultError as error:
                        self.notice = str(error)  # a server that comes back finds the file by itself

    def _targets(self, slot: Slot, table: Table, shape: Shape) -> tuple[torch.Tensor, ...]:
        """Tensors over the slot's memory, kept as long as neither the mapping nor the table changes."""
        key = id(slot)
        held = self._views.get(key)
        if held is not None and held[0] is slot.mapping and held[1] is table and held[2] == shape.data_start:
            return held[3]
        made = views(slot.mapping, shape.data_start, table)
        self._views[key] = (slot.mapping, table, shape.data_start, made)
        return made

    def _register(self, slot: Slot, tensors: Sequence[torch.Tensor]) -> None:
        """A GPU copies into this slot's memory directly from now on, where that can be had."""
        if self._registered is None:
            device = next(tensor.device for tensor in tensors if tensor.is_cuda)
            cudart: Cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call] # torch has not annotated it
            self._registered = Registered(cudart, self._say_slower, choose=lambda: torch.cuda.set_device(device))
        self._registered.know(id(slot), slot.mapping)

    def _say_slower(self, why: str) -> None:
        self.slower = why

    # -- reading

    def holdings(self, *, own: bool = False) -> tuple[Holding, ...]:
        """What lies whole in this node's vault, whoever wrote it, or with `own` this worker. Asks no server."""
        found: list[Holding] = []
        mine = {(self.node, self.writer), (self.node, f"{self.writer}{LIGHT}")}
        for path, name in files(self.directory):
            if own and (name.origin, name.writer) not in mine:
                continue
            shard = None if name.writer.startswith(PART) else pin(path)
            if isinstance(shard, Pinned):
                with shard:
                    found.append(holding_of(shard.sealed, self.node))
        return tuple(found)

    def gather(
        self,
        whole: Whole,
        choose: Callable[[Source], Sequence[Piece]] | None = None,
        *,
        timeout_s: float = 60.0,
        check: Callable[[], None] = lambda: None,
        nearer: Callable[[], None] = lambda: None,
    ) -> Source:
        """The state of `whole`: from this node's memory what is here, from others only the blocks that are needed.

        A vault that is away for a moment, because it is being started again, is waited for; one that fetches has as long as
        it takes, if nothing is silent for `timeout_s`. `check` may raise meanwhile: somebody wants us elsewhere. `nearer` is
        called as more has come or was checked, by the thread that asked.
        `choose` is shown the outline (all pieces and values, the data of remote ones not yet there) and says which pieces it
        will read; None reads everything.
        """
        name = f"step {whole.version} of generation {whole.generation}"
        first: list[int] | None = None if choose is None else []
        with ExitStack() as pins:
            seen: list[tuple[Whole, int, Callable[..., _Part]]] = []
            for layer in whole.layers:
                local = {number: pins.enter_context(shard) for number, shard in self._local(layer)}
                look: Callable[..., _Part] = partial(self._look, layer, local, timeout_s=timeout_s, check=check)
                seen += [(layer, number, look) for number in range(layer.world)]

            def outline(of: tuple[Whole, int, Callable[..., _Part]], control: Control) -> _Part:
                layer, number, look = of
                part = self._nearest(layer, number, partial(look, number, first, control=control), check=check)
                pins.enter_context(part.shard)  # at once: another one may not be had
                return part

            parts = self._each(outline, seen, nearer)
            wanted: Sequence[Piece] | None = None
            if choose is not None:
                outlines = [
                    shard_of(part.shard, under=layer is not whole)
                    for (layer, _, _), part in zip(seen, parts, strict=True)
                ]
                wanted = choose(Source(outlines, name=name))

            def whole_of(of: tuple[tuple[Whole, int, Callable[..., _Part]], _Part], control: Control) -> Shard:
                (layer, number, look), part = of
                obtain = partial(self._obtain, partial(look, control=control), control.nearer, number, part, wanted)
                shard = pins.enter_context(self._nearest(layer, number, obtain, check=check, answered=part.node))
                return shard_of(shard, under=layer is not whole)

            shards = self._each(whole_of, list(zip(seen, parts, strict=True)), nearer)
            return Source(shards, name=name, pins=pins.pop_all())

    def _each(
        self, get: Callable[[_Of, Control], _T], of: Sequence[_Of], nearer: Callable[[], None] = lambda: None
    ) -> list[_T]:
        """What `get` brings of each, some at once, each over a connection of its own: a question takes as long as another
        node takes to answer, and a shard as long as another node takes to send it. The nodes begin at different ones, and do
        not all ask one vault at a time. `nearer` is called as more of it is here, and not while nothing comes.
        """
        free: queue.SimpleQueue[Control] = queue.SimpleQueue()
        more = threading.Event()

        def run(one: _Of) -> _T:
            control = free.get()
            try:
                control.nearer = more.set
                found = get(one, control)
                more.set()
                return found
            finally:
                free.put(control)

        with ExitStack() as over:
            free.put(self.control)
            for _ in range(1, min(AT_ONCE, len(of))):
                free.put(over.enter_context(closing(Control(self.control.path, deadline_s=self._deadline_s))))
            pool = ThreadPoolExecutor(AT_ONCE, thread_name_prefix=f"vault-{self.writer}-asks")
            over.callback(pool.shutdown, cancel_futures=True)  # waits for those under way, which have deadlines
            first = zlib.crc32(self.node.encode()) % len(of)
            turned = {at: pool.submit(run, of[at]) for at in (*range(first, len(of)), *range(first))}
            while (ends := wait(turned.values(), TURN_S, FIRST_EXCEPTION)).not_done:
                if any(future.exception() for future in ends.done):
                    break
                if more.is_set():
                    more.clear()
                    nearer()
            return [turned[at].result() for at in range(len(of))]

    def _local(self, whole: Whole) -> Iterator[tuple[int, Pinned]]:
        """The shards of `whole` that are in this node's memory, pinned, by number; each once."""
        seen: set[int] = set()
        for path, name in files(self.directory):
            found = None if name.writer.startswith(PART) else pin(path)
            if not isinstance(found, Pinned):
                continue
            number = found.sealed.stamp.shard
            if number not in seen and _is(found.sealed.stamp, whole, number):
                seen.add(number)
                yield number, found
            else:
                found.close()

    def _look(
        self, whole: Whole, local: Mapping[int, Pinned], number: int, blocks: list[int] | None, node: str, *,
        timeout_s: float, check: Callable[[], None], control: Control | None = None,
    ) -> "_Part":  # fmt: skip
        """A shard as a node holds it: header, table and values, and at least these blocks of its data."""
        if node == self.node:
            if number not in local:
                raise VaultError(f"{self.directory} does not hold it any more")
            return _Part(local[number], node, None)
        answer = (control or self.control).ask(
            "fetch", timeout_s=timeout_s, turn=check, **{STILL: True}, at=node, step=whole.version.step,
            update=whole.version.update, generation=whole.generation, shard=number, world=whole.world, blocks=blocks,
            by=self.writer,
        )  # fmt: skip
        path = self.directory / str(answer["file"])
        found = pin(path)
        if blocks is not None:
            path.unlink(missing_ok=True)  # of use to nobody else: its memory goes back when we let go of it, or end
        if isinstance(found, Torn):
            raise VaultError(f"shard {number} was fetched from {node} but is {found.reason} here")
        return _Part(found, node, frozenset(answer["blocks"]))

    def _obtain(
        self, look: Callable[..., "_Part"], nearer: Callable[[], None], number: int, part: "_Part",
        wanted: Sequence[Piece] | None, node: str,
    ) -> Pinned:  # fmt: skip
        """One shard, with the data of the wanted pieces, checked. `part` is what is here of it already."""
        with ExitStack() as pins:
            if node != part.node:
                part = look(number, None if wanted is None else [], node)
                pins.enter_context(part.shard)
            blocks = _blocks(part.shard, wanted)
            if not part.has(blocks):
                part.shard.close()  # an outline has served its purpose
                part = look(number, blocks, node)
            pins.enter_context(part.shard)

            def told() -> Iterator[int]:  # a large shard takes its time
                for block in blocks:
                    nearer()
                    yield block

            # What came from another node was checked as it came, into a file that is ours alone.
            if part.blocks is None and (bad := layout.damage(part.shard.memory, part.shard.sealed, told())):
                raise VaultError(f"{part.shard.path} has {len(bad)} blocks that changed after they were sealed")
            pins.pop_all()
            return part.shard

    def _nearest(
        self, whole: Whole, number: int, attempt: Callable[[str], _T], *, check: Callable[[], None], answered: str = ""
    ) -> _T:
        """The first of the vaults that hold a shard from which the attempt succeeds. One that has answered is asked first."""
        limit = time.monotonic() + self._deadline_s
        while True:
            failures: list[str] = []
            for node in sorted(whole.sources[number], key=lambda node: node != answered):
                try:
                    return attempt(node)
                except VaultError as error:
                    failures.append(str(error))
            check()
            if not failures or time.monotonic() > limit:
                break
            time.sleep(PAUSE_S)  # up to the deadline; what is waited for is another process that starts
        raise VaultError(
            f"Shard {number} of {whole.world} of step {whole.version} cannot be had: {'; '.join(failures) or 'nobody has it'}"
        )

    def close(self) -> None:
        """End the threads; the files stay."""
        with suppress(queue.Full):
            self._queue.put(None, timeout=self._deadline_s)
        self._threads[0].join(self._deadline_s)
        self._news.put(None)
        self._threads[1].join(self._deadline_s)
        self.control.close()
        self._views.clear()
        if self._registered is not None and not self._threads[0].is_alive():
            self._registered.close()
        self._slots.close()
        self._light.close()


@dataclass(frozen=True, slots=True)
class _Part:
    """What is here of a shard that `node` holds: these blocks of its data, or all."""

    shard: Pinned
    node: str
    blocks: frozenset[int] | None

    def has(self, blocks: Sequence[int]) -> bool:
        return self.blocks is None or self.blocks.issuperset(blocks)


def _blocks(shard: Pinned, wanted: Sequence[Piece] | None) -> list[int]:
    """The blocks of a shard that hold wanted pieces."""
    if wanted is None:
        return list(range(shard.sealed.shape.blocks))
    needed = {read.source for read in reads(wanted, shard.sealed.table.pieces).reads}
    return sorted({block for piece in needed for block in layout.blocks_of(shard.sealed, piece)})


def _is(stamp: Stamp, whole: Whole, number: int) -> bool:
    return (stamp.version, stamp.generation, stamp.world, stamp.shard) == (
        whole.version,
        whole.generation,
        whole.world,
        number,
    )


def _cuda_event(tensors: Sequence[torch.Tensor]) -> "torch.cuda.Event | None":
    """On a GPU: the point in the training thread's stream up to which the tensors must be computed."""
    if not any(tensor.is_cuda for tensor in tensors):
        return None
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return event


def _copy(targets: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor], ready: "torch.cuda.Event | None") -> None:
    device = next((tensor.device for tensor in tensors if tensor.is_cuda), None)
    with torch.no_grad():
        if ready is None or device is None:
            for target, tensor in zip(targets, tensors, strict=True):
                faults.reach("vault.copy")
                target.copy_(tensor)
            return
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call] # torch has not annotated it
        with torch.cuda.stream(stream):  # and its device: this thread has chosen none
            stream.wait_event(ready)
            for target, tensor in zip(targets, tensors, strict=True):
                target.copy_(tensor, non_blocking=True)
        stream.synchronize()
