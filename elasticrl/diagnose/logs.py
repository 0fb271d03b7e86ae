"""Log lines of any job as evidence, while they are written or years later.

The one idea: almost no line of a log matters, so three sieves follow each other. A handful of substrings is searched in
whole chunks of bytes, at memory speed; the few lines found, with their neighbours, are mended into records (what a terminal
wrapped, what Ray and srun prefixed); only records meet the table of `texts`. Nothing here decides what a line means for
the job: that is `core.judge.judge`.
"""

import gzip
import re
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import field, replace
from pathlib import Path
from typing import Final

from elasticrl.base.regular import open_regular
from elasticrl.base.value import dataclass
from elasticrl.contract.evidence import Evidence, Kind, Sign
from elasticrl.diagnose.exceptions import Tracebacks
from elasticrl.diagnose.record import broken_off, facts
from elasticrl.diagnose.roll import Roll
from elasticrl.diagnose.transport import Ways

#: What is searched for in whole chunks. Each word costs about 0.6 ns a byte, so a text that always stands beside another
#: word (RuntimeError, ProcessGroupNCCL) needs none of its own; a test holds that a line of every kind is found.
SIEVE: Final = (
    b"NCCL", b"rror", b"emory", b"illed", b"onnect", b"NVRM", b"ignal", b"xception", b"ailed", b"No space",
    b"terminate called", b"but didn't", b"return code", b"marked dead", b"amdgpu",
    b"blocked for", b"ink down", b"nforce fail", b"imed out", b"ERROR", b"atal:", b"Interrupt",
)  # fmt: skip
#: Searched for as well where the kernel speaks.
KERNEL_SIEVE: Final = (
    b"lockup", b"LOCKUP", b"Kernel panic", b"ink ", b"is lost", b"not responding", b"oom", b"Xid", b"fallen off", b"GSP",
    b"halted", b"ealth compromised", b"detected", b"Surprise", b"end of device", b"read-only", b"NETDEV", b"reaped",
    b"table full", b"uvm_spin", b"reboot", b"timeout",
)  # fmt: skip
ALL_WORDS: Final = SIEVE + KERNEL_SIEVE
#: Not "memory: 30.1GiB(40%)", "peak_memory_alloc:12.3": what trainers print of each step, and no failure.
_EMORY = re.compile(
    rb"emory(?![\w./-]{0,40}[\"']?[:= |(]{1,4}[\d.]{1,12} ?(?:[kKMGT]i?B|%)|"
    rb"[\w./-]{0,30}_(?:gb|mb|gib|GB|MB|GiB|pct|percent|active|alloc|allocated|reserved)[\"')]?[:= |]{1,4}[\d.])"
)
_KERNEL = re.compile(rb"(?:^|\n)\[ {0,8}\d{1,9}\.\d{6}\]")

NEAR, AFTER = 3, 4  # neighbouring lines that a hit is read with: what a terminal wrapped, the last frame of a traceback
BEFORE = 6  # as NEAR, where a signal is named: torchrun's report has the rank and its place that far above
WHOLE = 1 << 17  # bytes at a log's beginning of which each line is looked at, whatever its words: 0.1 s
CHUNK = 1 << 20  # bytes read from a file at once
LONGEST = 1 << 18  # a line that is longer is taken in parts
LINE = 6000  # what is kept of a longer line, around the hit
RECORD = 6000
HELD = 64  # lines that may wait for their neighbours
FEW = 16  # facts that are alike of which the first and the last are kept: a log may hold a million of them
MOST = 65_536  # facts that are kept in all

_ANSI = re.compile(
    r"\x1b\[[0-9;?]{0,20}[A-Za-z]|\[\d{1,3}(?:;\d{1,3}){0,4}m"
)  # some pipes lose the escape and keep the rest
_RAY = re.compile(r"\((?:raylet|\w{1,60} pid=\d{1,9})(?:, ip=(?P<ip>[\w.:]{1,45}))?\) ?")
_SRUN = re.compile(r"\s{0,8}(?:\[?(?P<task>\d{1,5})\]?: |\[default(?P<default>\d{1,5})\]:)")
_SPEAKS = re.compile(rb"^\[(?:rank|default)(\d{1,6})\]:", re.MULTILINE)
EARLY = 5_000  # lines, in which whoever writes to this log is expected to have spoken, whatever it said
_RETURNED = re.compile(rb"\.(?:cc|h):\d{1,5} -> [1-9]")  # how NCCL tells where a call of its own failed
_RANK_PREFIX = re.compile(r"\[rank(\d{1,6})\]:?")
_RANK_SAID = re.compile(r"\[[^\[\]]{0,120}?\bRank (\d{1,6})\]")
_NODE = re.compile(r"(?:^|\s)([A-Za-z][\w.-]{0,80}):\d{1,9}:\d{1,9} \[\d{1,3}\]")
_SYSLOG_NODE = re.compile(r"^[A-Z][a-z]{2} +\d{1,2} \d\d:\d\d:\d\d ([\w.-]{1,80}) (?:kernel|systemd|slurm\w{0,10})")
_HEAD = re.compile(
    r"\s*(?:\[(?:rank|default)\d|\[[EWFI](?:\d{3,4}|[ k]P)|\[?\d{4}[-/]\d\d[-/]\d\d|\((?:raylet\)|\w+ pid=)|[\w.-]+:\d+:"
    r"\d+ \[\d|"
    r"terminate called|what\(\)|frame #|Exception raised|Traceback|File \"|[\w.]{0,80}(?:Error|Exception|Warning)\b|NVRM|"
    r"\[ *\d+\.\d+\]|"
    r"WARNING|ERROR|INFO|Fatal|\*\*\*|Last error|NCCL WARN|\w{1,60}\.cc:\d|\d{1,5}: |CUDA |Epoch|- |\[\d{1,9}\] |\d\d:"
    r"\d\d:\d\d|[EWIF]\d{4} \d\d:)"
)
_GLOG = re.compile(r"\[[EWFI](?:(?P<month>\d\d?)(?P<day>\d\d)[ k](?P<time>\d\d:\d\d:\d\d(?:\.\d{1,9})?))?")
_BARE_GLOG = re.compile(r"(?:^|\s)[EWIF](?P<month>\d\d)(?P<day>\d\d) (?P<time>\d\d:\d\d:\d\d\.\d{1,9})")
_ISO = re.compile(r"\d{4}[-/](?P<month>\d\d)[-/](?P<day>\d\d)[T _](?P<time>\d\d:\d\d:\d\d(?:[.,]\d{1,9})?)")
_SYSLOG = re.compile(r"(?:^|\s)(?P<name>[A-Z][a-z]{2}) {1,2}(?P<day>\d{1,2}) (?P<time>\d\d:\d\d:\d\d)")
_UPTIME = re.compile(r"\[ {0,8}(?P<uptime>\d{1,9}\.\d{6})\]")
# torchrun's report of failures: a block for each; the root cause has number 0 and is printed last.
_REPORT_RANK = re.compile(r"^\s{0,8}rank {1,12}: (\d{1,6}) \(local_rank")
_REPORT_NUMBER = re.compile(r"^\s{0,8}\[(\d{1,5})\]:\s{0,4}$")
_MONTHS = "JanFebMarAprMayJunJulAugSepOctNovDec"


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A line as it was found, and what its prefixes say of it."""

    number: int
    raw: str
    text: str  # without colours and launchers' prefixes
    rank: int | None
    node: str | None
    prefix: str = ""  # the launcher's, which names the process: lines of two processes are never one message
    hit: bool = True  # it may be a sign of trouble


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """What was one message before a terminal cut it: text, where each line's part begins in it, and the lines."""

    text: str
    parts: tuple[tuple[int, Line], ...]

    def line_at(self, position: int) -> Line:
        """The line in which a position lies."""
        return next(line for start, line in reversed(self.parts) if start <= position)


@dataclass(slots=True)
class Parser:
    """One stream of lines. Feed it bytes as they come; `flush` when the stream pauses, and at its end.

    >>> facts = Parser(source="rank3.log").read(b"node-a:1:2 [0] x.cc:1 NCCL WARN Cuda failure 'out of memory'")
    >>> [(str(fact.kind), fact.node) for fact in facts]
    [('oom', 'node-a')]
    """

    source: str = ""
    rank: int | None = None  # whose stream it is, if it is one rank's
    node: str | None = None
    whole: int = WHOLE  # bytes at the beginning of which each line is looked at
    ranks: set[int] = field(default_factory=set)  # heard of in the lines that were looked at
    ways: Ways = field(default_factory=Ways)  # that NCCL has chosen
    _left: bytes = b""
    _past: int = 0  # bytes before `_left`
    _number: int = 1  # of the first line in `_left`
    _done: int = 0  # number of the last line that was looked at
    _time: tuple[str, float, str] | None = None
    _reported: int | None = None  # the rank of torchrun's report's present block
    _root: bool = True  # whether that block is the root cause
    _traced: Tracebacks = field(default_factory=Tracebacks)
    _roll: Roll = field(default_factory=Roll)

    def read(self, data: bytes) -> list[Evidence]:
        """All of a stream at once."""
        return [*self.feed(data), *self.end()]

    def feed(self, data: bytes) -> list[Evidence]:
        """What these bytes give. The last few lines wait for those that follow them."""
        self._left += data
        # A hostile stream without line ends must not be kept for ever.
        if len(self._left) < LONGEST and self._left.count(b"\n") <= HELD:
            return []
        held = self._left.rfind(b"\n")
        for _ in range(BEFORE + AFTER):
            held = self._left.rfind(b"\n", 0, max(held, 0))
        cut = held + 1 if held >= 0 else (len(self._left) if len(self._left) >= LONGEST else 0)
        found = self._scan(cut)
        # The lines before the cut stay as the next hits' context.
        keep = cut
        for _ in range(BEFORE + 1):
            keep = self._left.rfind(b"\n", 0, max(keep, 0))
        keep = keep + 1 if keep >= 0 else 0
        if cut - keep > LONGEST:
            keep = cut
        self._number += self._left.count(b"\n", 0, keep)
        self._left = self._left[keep:]
        self._past += keep
        return found

    def flush(self) -> list[Evidence]:
        """What the lines give that still wait for their neighbours."""
        found = self._scan(len(self._left))
        self._number += self._left.count(b"\n")
        self._past += len(self._left)
        self._left = b""
        return found

    def end(self) -> list[Evidence]:
        """What is left when nothing more can come: the last lines, tracebacks without an end, a roll that was not completed."""
        if self.whole:
            self.whole = self._past + len(self._left)  # the last lines are all looked at, whatever their words
        found = self.flush()
        known = {"node": self.node, "rank": self.rank, "source": self.source, "line_no": max(self._number - 1, 1)}
        left = (*map(broken_off, self._traced.broken_off()), self._roll.fact())
        return found + [replace(fact, **known) for fact in left if fact]  # type: ignore[arg-type]

    def skip(self, data: bytes) -> list[Evidence]:
        """Leave these bytes out. What those before them give, whose neighbours do not come."""
        found = self.flush()
        self._number += data.count(b"\n")
        self._past += len(data)
        return found

    def _scan(self, cut: int) -> list[Evidence]:
        """Evidence in the lines of `_left` that begin before `cut` and were not looked at before."""
        found: list[Evidence] = []
        self.ways.read(self._left[:cut])
        if self._number < EARLY:
            self.ranks.update(map(int, _SPEAKS.findall(self._left, 0, cut)))
        for window in self._windows(cut):
            for record in records(window):
                found += self._judge(record)
        return found

    def _windows(self, cut: int) -> Iterator[list[Line]]:
        """Each hit before `cut` with the lines around it; hits that are close together share one window."""
        data = self._left
        hits = sorted(_hits(data, cut, self.whole - self._past))
        number, counted = self._number, 0
        window: list[Line] = []
        last_end = 0
        for hit in hits:
            if hit < last_end:
                continue
            start = data.rfind(b"\n", 0, hit) + 1
            number += data.count(b"\n", counted, start)
            counted = start
            if number <= self._done:
                continue
            first = start
            back = 0
            near = BEFORE if data.startswith((b"ignal", b"rror_file"), hit) else NEAR
            while back < near and first > last_end:
                first = data.rfind(b"\n", 0, first - 1) + 1
                back += 1
            if window and (first > last_end or number - back > self._done + 1):
                yield window
                window = []
            window += self._lines(data, max(first, last_end), start, number - back)
            end = data.find(b"\n", hit)
            end = len(data) if end < 0 else end
            window.append(self._line(number, _around(data, start, end, hit)))
            self._done = number
            last_end = end + 1
            # Lines after the hit are taken even if they are hits themselves: they are in the same window then.
            for _ in range(AFTER):
                if last_end >= len(data):
                    break
                end = data.find(b"\n", last_end)
                end = len(data) if end < 0 else end
                self._done += 1
                window.append(self._line(self._done, _around(data, last_end, end, last_end)))
                last_end = end + 1
        if window:
            yield window

    def _lines(self, data: bytes, start: int, end: int, number: int) -> list[Line]:
        lines = data[start:end].split(b"\n")[:-1] if end > start else []
        fresh = [(number + i, line) for i, line in enumerate(lines) if number + i > self._done]
        return [self._line(n, _around(line, 0, len(line), 0)) for n, line in fresh]

    def _line(self, number: int, raw: bytes) -> Line:
        text = raw.decode(errors="replace").rstrip("\r")
        clean = _ANSI.sub("", text) if "[" in text else text
        rank, node, prefix = None, None, ""
        if clean.startswith("# "):
            clean = ""  # a comment of whoever collected the log
        for _ in range(3):  # prefixes stand before prefixes
            if match := _RAY.match(clean):
                node = match["ip"] or node
            elif match := _SRUN.match(clean):
                task = match["task"] or match["default"]
                rank = int(task) if match["default"] else rank
            else:
                break
            prefix += match[0]
            clean = clean[match.end() :]
        if match := _RANK_PREFIX.match(clean):
            rank = int(match[1])
        return Line(
            number=number,
            raw=text,
            text=clean,
            rank=rank,
            node=node,
            prefix=prefix,
            hit=b"NCCL INFO" not in raw
            or any(map(raw.replace(b"NCCL INFO", b"").__contains__, ALL_WORDS))
            or _RETURNED.search(raw) is not None
            or b"lo:127." in raw,
        )

    def _judge(self, record: Record) -> Iterator[Evidence]:
        text = record.text
        time = self._clock(text)
        self._report(text)
        first = record.parts[0][1]
        self._roll.read(text)
        frame, ended = self._traced.follow(first.rank if first.rank is not None else first.prefix, text, first.number)
        if not any(line.hit for _, line in record.parts):
            return  # a neighbour, read for its time and its place in a report
        for position, fact in sorted(facts(text, frame, ended), key=lambda pair: pair[0]):
            line = record.line_at(position)
            if (
                fact.kind is Kind.EXIT
                and self._reported is not None
                and text.lstrip().startswith(("exitcode", "traceback"))
            ):
                rank: int | None = self._reported
                sign = fact.sign if self._root else Sign.TOLD
            else:
                rank = fact.rank if fact.rank is not None else _rank_at(text, position, line, self.rank)
                sign = fact.sign
            if rank is not None:
                self.ranks.add(rank)
            node = fact.node or line.node or _node_in(text[: position + 1]) or self.node
            yield replace(
                fact, rank=rank, sign=sign, node=node, line=line.raw[:1000], line_no=line.number, source=self.source,
                at=time[0] if time else None, when=time[1] if time else None, clock=time[2] if time else "",
            )  # fmt: skip

    def _report(self, text: str) -> None:
        """Follow torchrun's report: who is meant by the lines to come."""
        if number := _REPORT_NUMBER.match(text):
            self._root = number[1] == "0"
        elif match := _REPORT_RANK.match(text):
            self._reported = int(match[1])

    def _clock(self, text: str) -> tuple[str, float, str] | None:
        """The time that a record bears, else the newest before it in this stream."""
        if time := _time_in(text):
            self._time = time if time[2] != "uptime" else (time[0], time[1], f"uptime:{self.source}")
        return self._time


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What some logs gave. `ranks` are those that were heard of; `unread` are files that could not be read, with the reason.
    `more`: facts that were like those in `evidence`, and are not among them.
    """

    evidence: tuple[Evidence, ...]
    ranks: frozenset[int]
    files: tuple[str, ...]
    unread: tuple[str, ...] = ()
    ways: Ways = field(default_factory=Ways)
    more: int = 0


@dataclass(slots=True)
class Kept:
    """Facts in bounded memory: of those that are alike in all that a verdict compares, the first few and the last few."""

    seen: int = 0
    held: int = 0
    _rows: dict[tuple[object, ...], tuple[list[tuple[int, Evidence]], deque[tuple[int, Evidence]]]] = field(
        default_factory=dict
    )

    def add(self, fact: Evidence) -> None:
        """One more, in the order that they are found in."""
        self.seen += 1
        alike = (fact.source, fact.kind, fact.sign, fact.rank, fact.group, fact.node, fact.peer)
        first, last = self._rows.get(alike) or ([], deque(maxlen=FEW))
        full = self.held >= MOST
        if full and len(last) == 0:
            return
        self._rows[alike] = first, last
        into = first if len(first) < FEW else last
        self.held += len(last) < FEW if into is last else 1
        into.append((self.seen, fact))

    def facts(self) -> tuple[Evidence, ...]:
        """Those that were kept, in that order."""
        rows = (pair for first, last in self._rows.values() for pair in (*first, *last))
        return tuple(fact for _, fact in sorted(rows, key=lambda pair: pair[0]))


def read(paths: Iterable[Path]) -> Reading:
    """Evidence in files, and in all files under directories, in the order of time where their clocks agree."""
    kept = Kept()
    ranks: set[int] = set()
    ways = Ways()
    files, unread = [], []
    for path in _files(paths):
        parser = Parser(source=str(path), rank=rank_of(path), node=node_of(path))
        try:
            for fact in _read_file(path, parser):
                kept.add(fact)
        except OSError as error:
            unread.append(f"{path}: {error.strerror or error}")
            continue
        files.append(str(path))
        ways.add(parser.ways)
        ranks |= parser.ranks | ({parser.rank} if parser.rank is not None else set())
    heard = frozenset(ranks)
    evidence = kept.facts()
    return Reading(
        evidence=evidence, ranks=heard, files=tuple(files), unread=tuple(unread), ways=ways, more=kept.seen - len(evidence)
    )  # fmt: skip


def rank_of(path: Path) -> int | None:
    """The rank whose log this is, if its name says so: rank_3.log, worker-3.out, 3.log, torchrun's 3/stderr.log."""
    if match := re.search(r"(?:rank|worker|proc)[_.-]?(\d{1,6})(?!\d)", path.name):
        return int(match[1])
    if re.fullmatch(r"\d{1,6}", path.stem):
        return int(path.stem)
    if path.stem in {"stdout", "stderr"} and path.parent.name.isdigit():
        return int(path.parent.name)
    return None


def node_of(path: Path) -> str | None:
    """The node that a log comes from, if its name or its directory says so: node-07.log, host3/rank_0.log."""
    for part in (path.stem, path.parent.name):
        if match := re.search(r"(?:^|[_.])((?:node|host)[-_]?\d{1,6})(?:$|[_.])", part):
            return match[1]
    return None


def records(window: list[Line]) -> Iterator[Record]:
    """Lines, mended: what was cut by a terminal is one text again, even if another rank's line stands between."""
    current: list[Line] = []
    waiting: list[Line] = []  # an open record that another one interrupted
    for line in window:
        if current and _continues(current, line):
            current.append(line)
            continue
        if (
            waiting
            and not _HEAD.match(line.text)
            and line.text.strip()
            and line.prefix in {"", waiting[0].prefix}
            and not _open(current)
        ):
            yield _record([*waiting, line])
            waiting = []
            continue
        if waiting:
            yield _record(waiting)
            waiting = []
        if _open(current) and _HEAD.match(line.text):
            waiting = current
        elif current:
            yield _record(current)
        current = [line]
    for rest in (waiting, current):
        if rest:
            yield _record(rest)


def _read_file(path: Path, parser: Parser) -> Iterator[Evidence]:
    with open_regular(path) as file, gzip.open(file) if path.suffix == ".gz" else file as stream:
        while chunk := stream.read(CHUNK):
            yield from parser.feed(chunk)
    yield from parser.end()


def _files(paths: Iterable[Path]) -> Iterator[Path]:
    for path in paths:
        if path.is_dir():
            yield from sorted(p for p in path.rglob("*") if p.is_file())
        else:
            yield path


def _hits(data: bytes, end: int, whole: int) -> Iterator[int]:
    """Where a word of the sieve stands; once a line and word is enough. Before `whole` each line counts."""
    begin = 0
    while begin < min(whole, end):
        after = data.find(b"\n", begin, end) + 1 or end
        if after - begin <= LINE:  # of a longer one it matters where the word stands
            yield begin
        begin = after
    kernel = data.find(b"kernel:", 0, end) >= 0 or _KERNEL.search(data, 0, min(end, 4096)) is not None
    for word in SIEVE + KERNEL_SIEVE if kernel else SIEVE:
        at = _found(data, word, 0, end)
        while at >= 0:
            if word == b"NCCL" and data.startswith(b" INFO", at + 4):
                # NCCL_DEBUG=INFO fills logs with thousands of these, and none is a failure.
                at = data.find(word, at + 9, end)
                continue
            yield at
            line_end = data.find(b"\n", at, end)
            if line_end < 0:
                # A long line without an end: a hit every LINE bytes will do.
                line_end = at + LINE
            at = _found(data, word, line_end, end)


def _found(data: bytes, word: bytes, start: int, end: int) -> int:
    """Where it stands next, as data.find has it."""
    if word != b"emory":
        return data.find(word, start, end)
    found = _EMORY.search(data, start, end)
    return found.start() if found else -1


def _around(data: bytes, start: int, end: int, hit: int) -> bytes:
    if end - start <= LINE:
        return data[start:end]
    first = max(start, min(hit - LINE // 3, end - LINE))
    return data[first : first + LINE]


def _open(lines: list[Line]) -> bool:
    """Whether the message so far seems cut: it has no end, and is long enough to have met a terminal's edge."""
    if not lines:
        return False
    text = "".join(line.text for line in lines[-4:])
    start = text.rfind("WorkNCCL(")
    if start >= 0:
        rest = text[start:]
        return not ("before timing out" in rest or "blocking wait" in rest or rest.rstrip().endswith(("…", "...")))
    if not re.search(r"NCCL|\[PG |^\[?(?:rank\d+\]:)?\[[EWF]\d|Error|error|watchdog", text):
        return False
    ends = (".", "…", "cluster]") if "atchdog caught" in text else (".", "…", ")", "!", ":", "cluster]")
    return len(lines[-1].text) >= 60 and not text.rstrip().endswith(ends)


def _continues(current: list[Line], line: Line) -> bool:
    if len(current) >= 12 or not line.text.strip() or not _open(current):
        return False
    if line.prefix not in {"", current[0].prefix}:
        return False
    if not _HEAD.match(line.text):
        return True
    # A launcher that prefixes every physical line: the rest of the message follows its prefix, and is no head itself.
    rest = _RANK_PREFIX.sub("", line.text, count=1).lstrip(" ")
    return (
        line.rank is not None
        and line.rank == current[0].rank
        and rest != line.text
        and not _HEAD.match(rest)
        and rest[:1].islower()
    )


def _record(lines: list[Line]) -> Record:
    parts: list[tuple[int, Line]] = []
    text = ""
    for i, line in enumerate(lines):
        parts.append((len(text), line))
        text += (
            line.text
            if i == 0
            else _RANK_PREFIX.sub("", line.text, count=1).removeprefix(" ")
            if _RANK_PREFIX.match(line.text)
            else line.text
        )
        if len(text) > RECORD:
            text = text[:RECORD]
            break
    return Record(text=text, parts=tuple(parts))


def _rank_at(text: str, position: int, line: Line, default: int | None) -> int | None:
    """Who says what stands at a position: the launcher's prefix (global) before the group's own number."""
    near = text[max(0, position - 400) : position + 1]
    prefixes = list(_RANK_PREFIX.finditer(near))
    said = list(_RANK_SAID.finditer(near))
    if prefixes and (not said or said[-1].start() - prefixes[-1].end() < 300):
        return int(prefixes[-1][1])
    if line.rank is not None:
        return line.rank
    if default is not None:
        return default
    return int(said[-1][1]) if said else None


def _node_in(text: str) -> str | None:
    match = _NODE.search(text) or _SYSLOG_NODE.search(text)
    return match[1] if match else None


def _time_in(text: str) -> tuple[str, float, str] | None:
    for expression, clock in (
        (_GLOG, "glog"),
        (_BARE_GLOG, "glog"),
        (_ISO, "iso"),
        (_SYSLOG, "syslog"),
        (_UPTIME, "uptime"),
    ):
        for match in expression.finditer(text[:400]):
            if clock == "uptime":
                return match["uptime"], float(match["uptime"]), clock
            if match["time"] is None:
                continue
            month = int(match["month"]) if clock != "syslog" else _MONTHS.find(match["name"]) // 3 + 1
            hours, minutes, seconds = match["time"].replace(",", ".").split(":")
            # The year is not in every format: within a year the order is right, and that is what logs of one job span.
            day = (month * 31 + int(match["day"])) * 86400
            return match["time"], day + int(hours) * 3600 + int(minutes) * 60 + float(seconds), clock
    return None
