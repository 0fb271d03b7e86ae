"""Runs the parts: each in processes of its own, within its share of the time, and whatever one does, the others still run.

The one idea: every process of a part has a word in its environment that no other process has. So all of them are found again,
however they were started and whoever their parent is now; nothing else is ever ended. A part that is late gets SIGABRT: Python
then writes what each thread is at (PYTHONFAULTHANDLER). SIGKILL comes after it. Only the standard library is imported.
"""

import json
import os
import re
import resource
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from bench.gpu.found import End, Part, Row, row_of

MARK = "ELASTICRL_GPU_PART"  # the word's variable
APART_S = 0.05  # between the first words of two of them
ABORT_S = 3.0  # for stacks to be written
GONE_S = 10.0  # for what was killed to be gone
LEAST_S = 5.0  # less is no time to begin in
LINES = 40  # of an end, and of each stack
FILES, MOST = 12, 4000  # of stacks at most, and letters of each
NOISE = ("Extension modules:",)
STACK = re.compile(r"^(?:Fatal Python error|(?:Current thread|Thread) 0x)", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A part that is to be run. Those of one `stage` may run side by side.

    Example: Task(name="bits", title="the same digests", command=("python", "-m", "bench.gpu.bits"), limit_s=60.0)
    """

    name: str
    title: str
    command: Sequence[str]  # "{rows}" and "{folder}" in it are where it writes rows, and where it may leave files
    limit_s: float
    stage: int = 0
    env: Mapping[str, str] = field(default_factory=dict)


def drive(
    tasks: Sequence[Task], folder: Path, *, limit_s: float, at_once: int = 1, told: Callable[[Part], None] = print
) -> list[Part]:
    """All of them in the order of their stages, so many at once, within the time of all. Each is `told` when it has ended.
    Whoever ends this ends what runs of it.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    deadline = time.monotonic() + limit_s
    words = {task.name: secrets.token_hex(8) for task in tasks}
    found: dict[str, Part] = {}

    def one(task: Task) -> None:
        part = run(task, folder / task.name, min(task.limit_s, deadline - time.monotonic()), words[task.name])
        found[task.name] = part
        told(part)

    for stage in sorted({task.stage for task in tasks}):
        with ThreadPoolExecutor(at_once) as pool:
            try:
                for done in [pool.submit(one, task) for task in tasks if task.stage == stage]:
                    done.result()
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                for word in words.values():
                    end(word)
                raise
    return [found[task.name] for task in tasks]


def run(task: Task, folder: Path, limit_s: float, word: str) -> Part:
    """One part, to its end or ours, its processes marked with this word. Nothing of it is left running."""
    if limit_s < min(LEAST_S, task.limit_s):
        return Part(name=task.name, title=task.title, end="no time", took_s=0.0, limit_s=task.limit_s)
    folder.mkdir(parents=True)
    rows, log = folder / "rows.jsonl", folder / "part.log"
    command = [each.format(rows=rows, folder=folder) for each in task.command]
    env = {
        **os.environ,
        "PYTHONFAULTHANDLER": "1",
        "PYTHONUNBUFFERED": "1",
        "TMPDIR": str(folder),
        **task.env,
        MARK: word,
    }
    begun = time.monotonic()
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
        )
    late = False
    try:
        process.wait(limit_s)
    except subprocess.TimeoutExpired:
        late = True
        abort(word)
    finally:
        end(word)
        process.wait(GONE_S)
    took_s, seen = time.monotonic() - begun, read(rows)
    bad = process.returncode != 0 or any(row.state == "failed" for row in seen) or not seen
    how: End = "late" if late else "failed" if bad else "passed"
    return Part(
        name=task.name, title=task.title, end=how, took_s=took_s, limit_s=limit_s, rows=tuple(seen),
        said="" if how == "passed" else last_lines(text_of(log)), stacks=dict(stacks(folder)) if late else {},
    )  # fmt: skip


def read(rows: Path) -> list[Row]:
    """What a part wrote, however far it came. The last line may not be whole."""
    text = rows.read_text(encoding="utf-8") if rows.exists() else ""
    return [row_of(json.loads(line)) for line in text[: text.rfind("\n") + 1].splitlines()]


def marked(word: str) -> Iterator[int]:
    """The processes of a part."""
    for path in Path("/proc").iterdir():
        if path.name.isdigit() and int(path.name) != os.getpid():
            with suppress(OSError):
                if f"{MARK}={word}\0".encode() in (path / "environ").read_bytes():
                    yield int(path.name)


def abort(word: str) -> None:
    """Its Python processes write what they are at, and end."""
    for pid in marked(word):
        with suppress(OSError):
            if "python" in Path(f"/proc/{pid}/exe").readlink().name:
                os.kill(pid, signal.SIGABRT)
                time.sleep(APART_S)  # some write to one file
    time.sleep(ABORT_S)  # nobody tells when all have written


def end(word: str) -> None:
    """All of its processes, until there is none: they may be starting others."""
    deadline = time.monotonic() + GONE_S
    while (pids := [pid for pid in marked(word) if not _ended(pid)]) and time.monotonic() < deadline:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)  # between looks whether they are gone


def _ended(pid: int) -> bool:
    """A zombie has an environment no more; one that is just being taken apart may still show it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def text_of(log: Path) -> str:
    """As far as it is text."""
    return log.read_text(encoding="utf-8", errors="replace")


def last_lines(text: str, lines: int = LINES) -> str:
    """Of what it printed, before what threads were at.

    >>> last_lines("one\\ntwo\\nthree\\nFatal Python error: Aborted\\n", 2)
    'two\\nthree'
    """
    found = STACK.search(text)
    return "\n".join(text[: found.start() if found else None].splitlines()[-lines:])


def stacks(folder: Path) -> Iterator[tuple[str, str]]:
    """What its processes were at, by the file that they wrote it to."""
    logs = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.suffix in {".log", ".txt", ".err"}]
    for path in sorted(logs, key=lambda path: path.stat().st_mtime, reverse=True)[: 4 * FILES]:
        text = text_of(path)
        if found := STACK.search(text):
            yield (
                str(path.relative_to(folder)),
                "\n".join(line for line in text[found.start() :].splitlines() if not line.startswith(NOISE))[:MOST],
            )


def python(*words: str) -> tuple[str, ...]:
    """A command of this interpreter."""
    return (sys.executable, *words)
