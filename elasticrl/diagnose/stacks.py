"""Where every rank is at this moment, and in one sentence: "rank 3 is in its dataloader, 7 others in all_reduce".

The one idea: what matters of a stack is one word, the *activity*. A table names them by files and functions; the innermost
frame that is in the table decides, because who waits in a collective in the middle of a save waits in a collective. A stack
says where somebody is, and not that he is stuck there: only beside others who wait does it speak against him.
"""

import linecache
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from elasticrl.base.parsed import parsed
from elasticrl.base.process import state
from elasticrl.base.value import dataclass
from elasticrl.contract.evidence import SAVE, Evidence, Kind, Sign
from elasticrl.contract.verdict import rank_names
from elasticrl.diagnose import witness

LOOK_S: Final = 0.01  # between looks at the files while an answer is awaited
SETTLED_S: Final = 0.06  # a stack that has not grown for so long is whole: its end bears no mark
TRIM: Final = 1 << 20  # bytes of old stacks after which a file is begun anew
SPY_S: Final = 5.0  # py-spy needs about 0.3 s; no longer than this even where the deadline is far


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """One call.

    Example: Frame(file="/job/loader.py", line=12, name="__next__")
    """

    file: str
    line: int
    name: str

    def __str__(self) -> str:
        return f"{self.name} ({self.file.rsplit('/', 1)[-1]}:{self.line})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """Where a process is. Without frames `absent` says why there are none.

    Example: Stack(pid=4711, frames=(Frame(file="/job/loader.py", line=12, name="__next__"),), how="faulthandler")
    """

    pid: int
    frames: tuple[Frame, ...] = ()  # of the main thread, innermost first
    how: str = ""  # what took it: faulthandler, py-spy
    absent: str = ""
    state: str = ""  # the kernel's letter, if there are no frames: T stopped, D in the kernel, "" gone


@dataclass(frozen=True, slots=True, kw_only=True)
class Activity:
    """What a stack means.

    Example: Activity(what="data", words="in its dataloader", frame=Frame(file="/job/loader.py", line=12, name="__next__"))
    """

    what: str
    words: str
    frame: Frame | None = None
    op: str | None = None

    @property
    def waits(self) -> bool:
        """Whether it is others that are waited for here."""
        return self.what in {"collective", "setup", "gpu", "copies"}


_C10D = r"torch/distributed/(distributed_c10d|_functional_collectives|c10d_logger|nn/functional)\.py$"
_OPS = (
    r"(all_reduce|all_gather|all_gather_into_tensor|all_gather_object|all_gather_single|all_to_all|all_to_all_single|"
    r"barrier|broadcast|broadcast_object_list|gather|gather_object|reduce|reduce_scatter|reduce_scatter_tensor|"
    r"reduce_scatter_single|scatter|scatter_object_list|send|recv|batch_isend_irecv|all_reduce_coalesced|"
    r"all_gather_coalesced|wait_tensor)$"
)
_ANY = r""

#: (what, the file, the function, in words). The first row that the innermost fitting frame meets.
STRONG: Final = tuple(
    (what, re.compile(file), re.compile(name), words)
    for what, file, name, words in (
        ("collective", _C10D, _OPS, "in {op}"),
        ("setup", r"torch/distributed/(distributed_c10d|rendezvous)\.py$",
         r"(init_process_group|new_group|_new_process_group_helper|_store_based_barrier|monitored_barrier|rendezvous)",
         "forming a group"),
        ("setup", r"elasticrl/runtime/group\.py$", r"form$", "forming a group"),
        ("copies", r"elasticrl/runtime/(vault/control|keeper)\.py$", r"(copied|await_copies)$",
         "waiting for its buddies to have copies"),
        ("data", r"(torch/utils/data/|/datasets/|/webdataset/)", _ANY, "in its dataloader"),
        ("data", _ANY, r"(__next__|_next_data)$", "in its dataloader"),
        ("data", r"elasticrl/runtime/data/", _ANY, "in its dataloader"),
        ("compile", r"(torch/_dynamo/|torch/_inductor/|/triton/)", _ANY, "compiling"),
        ("save", r"(torch/serialization|torch/distributed/checkpoint/|safetensors/|elasticrl/runtime/checkpoint/)",
         r"(?i).*(save|write|dump|commit|publish|sync)", "saving"),
        ("save", _ANY, r"(save|save_checkpoint|async_save|save_pretrained|save_model|_save)$", "saving"),
        ("load", r"(torch/serialization|torch/distributed/checkpoint/|safetensors/|elasticrl/runtime/checkpoint/)",
         r"(?i).*(load|read)", "loading"),
        ("gpu", r"torch/(cuda|accelerator)/", r"synchronize$", "waiting for its GPU"),
        ("import", r"<frozen importlib", _ANY, "importing"),
        ("network", r"/(urllib3?|requests|http|httpx|httpcore|aiohttp|grpc)/|/ssl\.py$|/socket\.py$", _ANY,
         "in a network call"),
    )
)  # fmt: skip
#: Asked only if no frame shows a clear activity: what programs sleep in, whatever they do.
WEAK: Final = tuple(
    (what, re.compile(file), re.compile(name), words)
    for what, file, name, words in (
        # The runtime's own wait, and a plain Work's: its file has no frame, its line says it.
        ("collective", r"elasticrl/runtime/group\.py$", r"(wait|_run|bounded|synchronize)$", "in a collective"),
        ("gpu", r"elasticrl/runtime/group\.py$", r"settle$", "waiting for its GPU"),
        ("child", r"/subprocess\.py$", _ANY, "waiting for a child process"),
        ("lock", r"/(threading|queue|multiprocessing/\w+|concurrent/futures/\w+)\.py$",
         r"(acquire|wait|get|join|result|recv|_recv|poll|put)", "waiting for a lock or a queue"),
    )
)  # fmt: skip
_WORK_WAIT = re.compile(r"\b(work|works?\[\w+\]|handle|req|request|w)\.wait\(|\.wait_tensor\(|all_reduce\(|all_gather")


def activity(frames: Sequence[Frame]) -> Activity:
    """What a main thread is doing.

    >>> activity([Frame(file="/job/loader.py", line=12, name="__next__"), Frame(file="/job/train.py", line=3, name="f")]).words
    'in its dataloader'
    """
    for table in (STRONG, WEAK):
        for frame in frames:
            for what, file, name, words in table:
                if file.search(frame.file) and name.match(frame.name):
                    op = frame.name if "{op}" in words else None
                    return Activity(what=what, words=words.format(op=op), frame=_telling(what, frames, frame), op=op)
    if frames and _WORK_WAIT.search(linecache.getline(frames[0].file, frames[0].line)):
        return Activity(what="collective", words="in a collective", frame=frames[0])
    # DDP's reducer waits there in C++, and on a GPU the main thread does for autograd's own: neither has a frame. Found live:
    # the rank that waited for the gradients of one that hung in its loader was named in its place.
    if frames and frames[0].name == "_engine_run_backward":
        return Activity(what="collective", words="in backward, where it waits for gradients", frame=frames[0])
    return Activity(what="code", words="in its own code" if frames else "nowhere", frame=frames[0] if frames else None)


def _telling(what: str, frames: Sequence[Frame], matched: Frame) -> Frame:
    """The frame that a reader wants: what the process is busy with, or who waits for the lock."""
    if what in {"data", "save", "load"}:
        return frames[0]
    if what in {"lock", "child"}:
        return next((frame for frame in frames if not any(row[1].search(frame.file) for row in WEAK)), matched)
    return matched


_HEAD: Final = "Stack (most recent call first):"
_FRAME = re.compile(r'^  File "(?P<file>.{0,1000})", line (?P<line>\d{1,9}|\?\?\?) in (?P<name>.{0,500})$')


def parse(text: str) -> tuple[Frame, ...]:
    """The frames in faulthandler's text of one thread, innermost first; of two answers in a row, those of the newer one."""
    _, _, newest = text.rpartition(_HEAD)
    return tuple(
        Frame(file=found["file"], line=int(found["line"]) if found["line"].isdigit() else 0, name=found["name"])
        for line in newest.splitlines()
        if (found := _FRAME.match(line))
    )


def collect(folder: Path, workers: Mapping[int, int], *, within_s: float, spy: str | None = None) -> dict[int, Stack]:
    """Each rank's stack (rank -> pid), all asked at once. It takes as long as the slowest, and no longer than `within_s`.

    `spy` is the py-spy to use for processes that cannot answer; None: the one on PATH, "" for none.
    """
    deadline = time.monotonic() + within_s
    sizes = {pid: _ask(folder, pid) for pid in workers.values()}
    texts = _await(folder, {pid: size for pid, size in sizes.items() if size is not None}, deadline)
    spy = shutil.which("py-spy") or "" if spy is None else spy
    return {rank: _stack(pid, texts.get(pid, ""), spy, deadline) for rank, pid in sorted(workers.items())}


def _ask(folder: Path, pid: int) -> int | None:
    """Send the signal, and say how long the file was; None if there is no use in waiting."""
    file = witness.stack_file(folder, pid)
    if state(pid) in {"", "T", "t", "Z", "X"} or not witness.listens(pid):
        return None
    try:
        size = file.stat().st_size
        if size > TRIM:
            os.truncate(file, 0)
            size = 0
        witness.signal_main(pid)
    except OSError:
        return None
    return size


def _await(folder: Path, sizes: Mapping[int, int], deadline: float) -> dict[int, str]:
    """What each file has gained, once it has stopped growing."""
    grown: dict[int, tuple[int, float]] = {pid: (size, 0.0) for pid, size in sizes.items()}
    done: dict[int, str] = {}
    while len(done) < len(sizes) and time.monotonic() < deadline:
        now = time.monotonic()
        for pid in sorted(set(sizes) - set(done)):
            file = witness.stack_file(folder, pid)
            try:
                size = file.stat().st_size
            except OSError:
                done[pid] = ""
                continue
            before, since = grown[pid]
            if size != before:
                grown[pid] = (size, now)
            elif size > sizes[pid] and now - since > SETTLED_S:
                done[pid] = _tail(file, sizes[pid])
        time.sleep(LOOK_S)
    return done


def _tail(file: Path, start: int) -> str:
    with file.open("rb") as stream:
        stream.seek(start)
        return stream.read(TRIM).decode(errors="replace")


def _stack(pid: int, text: str, spy: str, deadline: float) -> Stack:
    if frames := parse(text):
        return Stack(pid=pid, frames=frames, how="faulthandler")
    return spied(pid, spy, deadline)


def spied(pid: int, spy: str, deadline: float) -> Stack:
    """What can be had of a process that does not answer: from its memory, by py-spy, else from the kernel."""
    now = state(pid)
    if now in {"", "Z", "X"}:
        return Stack(pid=pid, absent="the process is gone")
    if spy and (frames := _spied(spy, pid, deadline)):
        return Stack(pid=pid, frames=frames, how="py-spy", state=now)
    why = {"T": "the process is stopped", "t": "a debugger holds the process"}.get(now)
    if now == "D":
        why = f"the process is in the kernel and does not come back{_wchan(pid)}"
    elif why is None:
        why = "the process did not answer in time" if witness.listens(pid) else "the process has no witness"
    return Stack(pid=pid, absent=why, state=now)


def _spied(spy: str, pid: int, deadline: float) -> tuple[Frame, ...]:
    """py-spy's view of the main thread. It reads another process's memory, so it may not be allowed to."""
    within_s = max(1.0, min(SPY_S, deadline - time.monotonic()))
    try:
        done = subprocess.run(
            [spy, "dump", "--pid", str(pid), "--nonblocking", "--json"], timeout=within_s, capture_output=True
        )
        threads = parsed(done.stdout) if done.returncode == 0 else []
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return ()
    return spied_frames(threads)


def spied_frames(threads: Any) -> tuple[Frame, ...]:
    """The main thread's frames in what py-spy printed, innermost first; () if there are none."""
    listed = [thread for thread in threads if isinstance(thread, dict)] if isinstance(threads, list) else []
    listed.sort(key=lambda thread: thread.get("thread_name") != "MainThread")
    stacks = (tuple(map(_spied_frame, thread.get("frames") or ())) for thread in listed)
    return next(filter(None, stacks), ())


def _spied_frame(raw: Mapping[str, Any]) -> Frame:
    line = raw.get("line")
    name = str(raw.get("name", "")).rpartition(".")[2]  # it says Loader.__next__ where faulthandler says __next__
    return Frame(file=str(raw.get("filename", "")), line=line if isinstance(line, int) else 0, name=name)


def _wchan(pid: int) -> str:
    try:
        name = Path(f"/proc/{pid}/wchan").read_text(encoding="ascii", errors="replace").strip("0\n ")
    except OSError:
        return ""
    return f" ({name})" if name else ""


def evidence(
    stacks: Mapping[int, Stack], *, node_of: Callable[[int], str | None] = lambda _: None
) -> tuple[Evidence, ...]:
    """What the stacks speak for. Whether who is elsewhere is at fault is the verdict's to say, when all ranks are known."""
    found = []
    for rank, stack in sorted(stacks.items()):
        sign, detail, op = _sign(stack)
        saves = bool(stack.frames) and activity(stack.frames).what == SAVE
        found.append(
            Evidence(
                kind=Kind.STACK, sign=sign, rank=rank, node=node_of(rank), op=op, detail=detail, source=stack.how or "stacks",
                line=" < ".join(map(str, stack.frames[:6])), phase=SAVE if saves else "",
            )
        )  # fmt: skip
    return tuple(found)


def _sign(stack: Stack) -> tuple[Sign, str, str | None]:
    stopped = stack.state in {"T", "t"}
    if not stack.frames:
        return Sign.STOPPED if stopped else Sign.HOST_STUCK if stack.state == "D" else Sign.TOLD, stack.absent, None
    at = activity(stack.frames)
    if stopped:
        return Sign.STOPPED, f"{at.words}: {at.frame}, stopped", None
    if at.waits:
        return (Sign.SETUP_WAITED if at.what == "setup" else Sign.WAITED), at.words, at.op
    return Sign.ELSEWHERE, f"{at.words}: {at.frame}", None


def summary(facts: Iterable[Evidence]) -> str:
    """Where ranks were seen, in one sentence, the fewest first.

    >>> summary(evidence({0: Stack(pid=1, absent="the process is stopped"), 1: Stack(pid=2, absent="the process is gone")}))
    'rank 0 gave no stack (the process is stopped); rank 1 gave no stack (the process is gone)'
    """
    alike: dict[str, list[int]] = {}
    for fact in facts:
        if fact.kind is Kind.STACK and fact.rank is not None:
            words = f"in {fact.op}" if fact.op else fact.detail
            alike.setdefault(words if fact.line else f"gave no stack ({words})", []).append(fact.rank)
    parts = []
    for words, ranks in sorted(alike.items(), key=lambda item: (len(item[1]), item[1])):
        verb = "" if words.startswith("gave") else "is " if len(ranks) == 1 else "are "
        parts.append(f"{rank_names(sorted(ranks))} {verb}{words}")
    return "; ".join(parts)
