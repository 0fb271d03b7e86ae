"""`elasticrl events` and `elasticrl logs`: what this machine's daemons and workers say, line by line.

The one idea: an event is one JSON object wherever it is written, and one readable line wherever it is shown (`render.event`).
What a program prints besides passes through, without what would steer a terminal. Several daemons' lines are one story, in the
order of their clocks.
"""

import json
import queue
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from elasticrl.base.parsed import parsed
from elasticrl.base.regular import open_regular
from elasticrl.base.words import plain
from elasticrl.cli import find, render
from elasticrl.cli.main import Exit
from elasticrl.cli.operate import StoreAt, failed, from_store
from elasticrl.cli.options import AsJson, Job, Run
from elasticrl.daemon.client import Unanswered, ask, ask_stream

LOOK_S: Final = 0.2  # between looks at files that are followed
MOVED_S: Final = 1.0  # between questions to the daemons which files those are
SETTLE_S: Final = 0.1  # without a line from any daemon, until those that have come are put in order
WITHIN_S: Final = 15.0  # for a daemon to go on answering
BLOCK: Final = 1 << 20  # bytes of a log's end that are looked at first
SAID: Final = re.compile(
    r"\[\w+ (\d+)\] "
)  # the trainer's line for people, which stands before the event that tells the same
Follow = Annotated[bool, typer.Option("--follow", "-f", help="Go on with what comes.")]


def register(app: typer.Typer) -> None:
    """Add the verbs."""
    app.command()(events)
    app.command()(logs)


def events(
    node: Annotated[str | None, typer.Argument(help="Only what speaks of this node.", show_default=False)] = None,
    follow: Follow = False,
    job: Job = None,
    run_dir: Run = None,
    as_json: AsJson = False,
    store: StoreAt = None,
) -> None:
    """The newest events that this machine's daemons logged; with --store, what the store says of plan, commit and nodes."""
    lines = from_store(store, job, node, follow=follow) if store else told(run_dir, job, node, follow=follow)
    none = True
    with suppress(KeyboardInterrupt):
        for line in lines:
            typer.echo(json.dumps(line) if as_json else render.event(line))
            none = False
    if none and node and not follow:
        raise failed(f"nothing speaks of {node}; elasticrl status shows who is there", job, store)


def logs(
    rank: Annotated[int | None, typer.Argument(help="Only this rank.", show_default=False)] = None,
    lines: Annotated[int, typer.Option("--lines", "-n", min=0, help="How many of each.")] = 20,
    follow: Follow = False,
    job: Job = None,
    run_dir: Run = None,
    as_json: Annotated[bool, typer.Option("--json", help="Only the events among them, as they were written.")] = False,
) -> None:
    """The last lines that this machine's workers wrote: what their program printed, and its events in words."""
    sockets = daemons(run_dir, job)
    paths = written(sockets)
    readers = {each: Reader(path, as_json=as_json) for each, path in sorted(paths.items()) if rank in (None, each)}
    if not readers:
        whose, here = "" if rank is None else f" of rank {rank}", ", ".join(map(str, sorted(paths))) or "none"
        typer.echo(f"no worker{whose} runs on this machine; ranks here: {here}", err=True)
        raise typer.Exit(Exit.FAILED)
    try:
        for each, reader in readers.items():
            if not as_json:
                typer.echo(head(each, reader.path))
            for line in reader.last(lines):
                typer.echo(line)
        if follow:
            with suppress(KeyboardInterrupt):
                go_on(readers, lambda: find.sockets(run_dir, sockets[0].parent.parent.name), rank, as_json=as_json)
    finally:
        for reader in readers.values():
            reader.close()


# ---- what daemons say


def told(run_dir: Path | None, job: str | None, node: str | None, *, follow: bool) -> Iterator[dict[str, Any]]:
    """The events of all daemons of the job on this machine, as one story. Those of one that ends end."""
    sockets = daemons(run_dir, job)
    said: queue.SimpleQueue[Mapping[str, Any] | Unanswered | None] = queue.SimpleQueue()
    for path in sockets:
        threading.Thread(target=listen, args=(path, node, said), kwargs={"follow": follow}, daemon=True).start()
    left, failed = len(sockets), False
    while left:
        batch = [said.get(), *since(said)] if follow else list(ending(said, left))
        yield from in_order([dict(item) for item in batch if isinstance(item, Mapping)])
        for error in (item for item in batch if isinstance(item, Unanswered)):
            typer.echo(str(error), err=True)
            failed = True
        left -= sum(not isinstance(item, Mapping) for item in batch)
    if failed:
        raise typer.Exit(Exit.FAILED)


def listen(path: Path, node: str | None, said: "queue.SimpleQueue[Any]", *, follow: bool) -> None:
    """One daemon's events into the queue; then None, or why it ended."""
    try:
        for line in ask_stream(path, "events", deadline_s=None if follow else WITHIN_S, node=node, follow=follow):
            said.put(line)
    except Unanswered as error:
        said.put(error)
    else:
        said.put(None)


def since(said: "queue.SimpleQueue[Any]") -> Iterator[Any]:
    """What else comes until nothing has for a moment, or for a second in all."""
    end = time.monotonic() + 10 * SETTLE_S
    while (left := end - time.monotonic()) > 0:
        try:
            yield said.get(timeout=min(SETTLE_S, left))
        except queue.Empty:
            return


def ending(said: "queue.SimpleQueue[Any]", left: int) -> Iterator[Any]:
    """Everything, until so many daemons have said their last."""
    while left:
        item = said.get()
        left -= not isinstance(item, Mapping)
        yield item


def in_order(lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """By time; lines of one moment, and those without a time, stay as they came.

    >>> [line["event"] for line in in_order([{"at": "2", "event": "b"}, {"at": "1", "event": "a"}])]
    ['a', 'b']
    """
    return sorted(lines, key=lambda line: str(line.get("at", "")))


# ---- what workers write


def head(rank: int, path: Path) -> str:
    """Whose lines follow."""
    return plain(f"==> rank {rank}: {path} <==")


def go_on(
    readers: dict[int, "Reader"], sockets: Callable[[], Sequence[Path]], rank: int | None, *, as_json: bool
) -> None:
    """Lines as they are written, and the files of later generations and nodes, until somebody interrupts."""
    shown = (max(readers), readers[max(readers)].path)
    asked = time.monotonic()
    while True:
        if time.monotonic() > asked + MOVED_S:
            asked = time.monotonic()
            for each, path in written(sockets(), patiently=True).items():
                if each in readers:
                    readers[each].move(path)
                elif rank in (None, each):
                    readers[each] = Reader(path, as_json=as_json, begin=True)
        for each, reader in sorted(readers.items()):
            for path, line in reader.new():
                if shown != (each, path) and not as_json:
                    typer.echo(head(each, path))
                shown = (each, path)
                typer.echo(line)
        time.sleep(LOOK_S)  # files that are written tell nobody; Ctrl-C ends the waiting


class Reader:
    """One worker's log, as it is shown."""

    def __init__(self, path: Path, *, as_json: bool, begin: bool = False) -> None:
        from elasticrl.diagnose.tail import Growing

        self._file, self._as_json = Growing(path), as_json
        self._file.open(begin=begin)
        self._rest = b""  # of a line that has no end yet
        self._before = ""  # the line before
        self._left: list[tuple[Path, str]] = []  # of the file before this one

    @property
    def path(self) -> Path:
        """Where it lies."""
        return self._file.path

    def last(self, count: int) -> list[str]:
        """The last lines of what there was when it was opened; or why they cannot be read."""
        end, block = self._file.read, BLOCK
        while True:
            start = max(0, end - block)
            try:
                with open_regular(self.path) as file:
                    file.seek(start)
                    data = file.read(end - start)
            except OSError as error:
                return [f"{self.path} cannot be read: {error.strerror}"]
            if start:
                data = data.partition(b"\n")[2]
            whole, _, self._rest = data.rpartition(b"\n")
            self._before = ""
            found = self._shown(whole.split(b"\n") if whole else [])
            if len(found) >= count or not start:
                return found[max(0, len(found) - count) :]
            block *= 8

    def new(self) -> list[tuple[Path, str]]:
        """The lines that came since, each with the file that it is from."""
        left, self._left = self._left, []
        *whole, self._rest = (self._rest + self._file.gained()).split(b"\n")
        return left + [(self.path, line) for line in self._shown(whole)]

    def move(self, path: Path) -> None:
        """It is written there from now on."""
        if path == self.path:
            return
        from elasticrl.diagnose.tail import Growing

        self._left = self.new() + [(self.path, line) for line in self._shown([self._rest] if self._rest else [])]
        self._file.close()
        self._file, self._rest, self._before = Growing(path), b"", ""
        self._file.open(begin=True)

    def close(self) -> None:
        """Let go of it."""
        self._file.close()

    def _shown(self, lines: Sequence[bytes]) -> list[str]:
        found = []
        for line in (data.decode(errors="replace") for data in lines):
            said = shown(line, self._before, as_json=self._as_json)
            found += [] if said is None else [said]
            self._before = line
        return found


def shown(line: str, before: str, *, as_json: bool = False, colour: bool | None = None) -> str | None:
    """How a line of a worker's log is shown, by the one `before` it; None: not at all.

    >>> shown("loading the model", ""), shown("loading the model", "", as_json=True)
    ('loading the model', None)
    >>> shown('{"event": "ppo.step", "step": 7}', "[Step 7] rollout: 185ms | reward 0.710")
    """
    event = event_of(line)
    if event is None:
        return None if as_json else plain(line, keep="\t")
    if as_json:
        return line if plain(line, keep="\t") == line else json.dumps(event)
    told_already = SAID.match(before)
    if told_already and told_already[1] == str(event.get("step")):
        return None
    return render.event(event, colour=colour)


def event_of(line: str) -> dict[str, Any] | None:
    """The event that this line is, or None."""
    if not line.startswith("{"):
        return None
    try:
        event = parsed(line)
    except ValueError:
        return None
    return event if isinstance(event, dict) and isinstance(event.get("event"), str) else None


# ---- whom to ask


def daemons(run_dir: Path | None, job: str | None) -> list[Path]:
    """The control sockets of all daemons of the job on this machine; if there is none, a sentence ends the command."""
    try:
        return find.daemons(run_dir, job)
    except find.NotFound as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(Exit.FAILED) from None


def written(sockets: Sequence[Path], *, patiently: bool = False) -> dict[int, Path]:
    """Each rank's log, as its node's daemon says. Who does not answer costs its own ranks; if nobody does, a sentence ends
    the command, unless it goes on `patiently`: a daemon may be restarted.
    """
    found, silent = dict[int, Path](), deque[Unanswered]()
    for path in sockets:
        try:
            found |= {int(entry["rank"]): Path(entry["log"]) for entry in ask(path, "logs")}
        except Unanswered as error:
            silent.append(error)
    if len(silent) == len(sockets) and not patiently:
        typer.echo(str(silent[0]), err=True)
        raise typer.Exit(Exit.FAILED)
    return found
