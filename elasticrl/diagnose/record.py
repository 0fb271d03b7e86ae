"""What one record of a log proves: torch's own accounts of a collective, the table of `texts`, and exceptions that no row of it
explains. Pure.
"""

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from elasticrl.contract.evidence import Evidence, Kind, Sign
from elasticrl.diagnose.exceptions import LastFrame, exception_in, sign_of
from elasticrl.diagnose.rows import Text
from elasticrl.diagnose.texts import TEXTS

_WORK = re.compile(r"WorkNCCL\(")
_WORK_FIELDS: Final = {
    "seq": re.compile(r"SeqNum ?= ?(\d{1,18})"),
    "op": re.compile(r"OpType ?= ?(\w{1,40})"),
    "numel_in": re.compile(r"NumelIn ?= ?(\d{1,18})"),
    "numel_out": re.compile(r"NumelOut ?= ?(\d{1,18})"),
    "timeout_ms": re.compile(r"Timeout\(ms\) ?= ?(\d{1,15})(?=\D?\)|,|$)"),
    "elapsed_ms": re.compile(r"ran.{0,2}for.{0,2}?(\d{1,15})"),
}
_SHAPE = re.compile(r"TensorShape ?= ?\[([\d, ]{0,120})\]")
_STATUS = re.compile(r"(?:Timeout at NCCL work|detected by watchdog at work(?: sequence id)?).{0,3}?(?P<seq>\d{1,18})")
_ENQUEUED = re.compile(r"[Ll]ast enqueued (?:NCCL )?work.{0,3}?(-?\d{1,18})")
_COMPLETED = re.compile(r"last completed (?:NCCL )?work.{0,3}?(-?\d{1,18})")
_GROUP = re.compile(
    r"\[PG (?:ID )?(?P<id>\d{1,9})(?: PG GUID (?P<guid>[^\s(\]]{1,60}))? ?(?:\((?P<name>[^()\]]{1,60})\))? ?Rank \d{1,6}\]"
)
_SIGNALLED = re.compile(r"dump signal due to a collective timeout from {1,3}rank (\d{1,6})")
_STUCK = re.compile(r"watchdog got stuck for (?P<seconds>\d{1,9}) ?seconds")
_ABORTED = re.compile(r"communicator was aborted on rank (\d{1,6})")
_COUNTED = re.compile(r"world_size=(\d{1,9}), worker_count=(\d{1,9})")
_FINGERPRINT = re.compile(r"CollectiveFingerPrint\(SequenceNumber=(?P<seq>\d{1,18}), ?OpType=(?P<op>\w{1,40})")

#: c10d phrases without numbers, as (needle, kind, sign).
_PHRASES: Final = (
    ("Heartbeat monitor timed out", Kind.HEARTBEAT_MONITOR, Sign.WATCHDOG_STUCK),
    ("eceived a dump signal", Kind.DUMP_SIGNAL, Sign.TOLD),
    ("flight recorder dump signal", Kind.DUMP_SIGNAL, Sign.TOLD),
    ("preparing to dump debug info", Kind.DUMP_SIGNAL, Sign.TOLD),
    ("to signal dumping", Kind.DUMP_SIGNAL, Sign.TOLD),
    ("\"should dump\" flag", Kind.TCPSTORE_ERROR, Sign.STORE_GONE),
    ("operations have failed or timed out", Kind.TEAR_DOWN, Sign.TOLD),
    ("To avoid data inconsistency", Kind.TEAR_DOWN, Sign.TOLD),
    ("Terminating the process after attempting to dump", Kind.TEAR_DOWN, Sign.TOLD),
    ("WorkNCCL::checkTimeout", Kind.WATCHDOG_ERROR, Sign.WAITED),
    ("watchdog thread terminated with exception", Kind.WATCHDOG_ERROR, Sign.TOLD),
    ("Exception raised from ncclCommWatchdog", Kind.WATCHDOG_ERROR, Sign.TOLD),
    ("caught async NCCL error", Kind.WATCHDOG_ERROR, Sign.TOLD),
    ("timed out waiting for flight recorder", Kind.DUMP_SIGNAL, Sign.TOLD),
)  # fmt: skip
#: Words without which a record needs no look at the c10d expressions.
_C10D: Final = ("ProcessGroupNCCL", "WorkNCCL", "atchdog", "NCCL work", "PG status", "communicator was aborted",
                "dump signal", "should dump", "failed or timed out", "data inconsistency",
                "signal dumping", "dump debug info", "enqueued", "worker_count")  # fmt: skip


def facts(text: str, frame: LastFrame | None = None, ended: re.Match[str] | None = None) -> list[tuple[int, Evidence]]:
    """All of it, each with its place in the text. `frame` is the last frame of the traceback that it ends, if it ends one, and
    `ended` an exception of whatever type at that end.
    """
    found = list(_c10d(text)) if any(word in text for word in _C10D) else []
    found += _table(text)
    if any(fact.sign not in {Sign.TOLD, Sign.NOISE} for _, fact in found) or "terminate called" in text:
        return found
    match = ended or exception_in(text)
    return [*found, *([raised] if match and (raised := _raised(match, frame)) else [])]


def broken_off(frame: LastFrame) -> Evidence | None:
    """What a traceback without an end tells; None: nothing."""
    where = frame.at or frame.file
    if frame.waits:
        return Evidence(kind=Kind.STACK, sign=Sign.WAITED, detail=f"in {where}"[:160])
    if frame.raises:
        raised = _raised(frame.raises, frame)
        return raised[1] if raised else None
    return Evidence(kind=Kind.EXCEPTION, sign=Sign.CUT_OFF, detail=f"a traceback that breaks off in {where}"[:160])


def _c10d(text: str) -> Iterator[tuple[int, Evidence]]:
    works = [match.start() for match in _WORK.finditer(text)]
    for start, end in zip(works, [*works[1:], len(text)], strict=False):
        if fact := _work(text[start : min(end, start + 700)]):
            yield start, replace(fact, group=_group(text[max(0, start - 250) : start]))
    for match in _STATUS.finditer(text):
        tail = text[match.start() : match.start() + 400]
        yield match.start(), _status(tail, int(match["seq"]), text[max(0, match.start() - 250) : match.start()])
    for match in _SIGNALLED.finditer(text):
        group = _group(text[max(0, match.start() - 250) : match.start()])
        waits = Evidence(kind=Kind.WATCHDOG_STATUS, sign=Sign.WAITED, rank=int(match[1]), group=group)
        yield match.start(), replace(waits, detail="timed out in a collective, as others were told")
    for match in _STUCK.finditer(text):
        group = _group(text[max(0, match.start() - 250) : match.start()])
        stuck = int(match["seconds"]) * 1000
        yield (
            match.start(),
            Evidence(kind=Kind.HEARTBEAT_MONITOR, sign=Sign.WATCHDOG_STUCK, elapsed_ms=stuck, group=group),
        )
    for match in _ABORTED.finditer(text):
        yield (
            match.start(),
            Evidence(kind=Kind.WATCHDOG_ERROR, sign=Sign.TOLD, rank=int(match[1]), detail="communicator aborted"),
        )
    for match in _COUNTED.finditer(text):
        if int(match[2]) > int(match[1]):
            detail = "more workers than the group has: an earlier run's are counted in the same store or file"
            yield match.start(), Evidence(kind=Kind.TCPSTORE_ERROR, sign=Sign.SETTING, detail=detail)
    for needle, kind, sign in _PHRASES:
        at = text.find(needle)
        if at < 0:
            continue
        fact = Evidence(kind=kind, sign=sign, group=_group(text[max(0, at - 250) : at]))
        if kind is Kind.DUMP_SIGNAL:
            fact = replace(
                fact, last_enqueued=_number(_ENQUEUED, text[at:]), last_completed=_number(_COMPLETED, text[at:])
            )
        yield at, fact


def _work(text: str) -> Evidence | None:
    """WorkNCCL(...) and what follows it. Fields are looked for one by one: interleaved lines lose some, not all."""
    values = {name: match[1] for name, expression in _WORK_FIELDS.items() if (match := expression.search(text))}
    if "op" not in values and "seq" not in values:
        return None
    numbers = {name: int(value) for name, value in values.items() if name != "op"}
    if "numel_in" not in numbers and (shape := _SHAPE.search(text)):
        numbers["numel_in"] = _product(shape[1])
    return Evidence(
        kind=Kind.WATCHDOG_TIMEOUT, sign=Sign.WAITED, op=values.get("op"), seq=numbers.get("seq"),
        numel_in=numbers.get("numel_in"), numel_out=numbers.get("numel_out"), timeout_ms=numbers.get("timeout_ms"),
        elapsed_ms=numbers.get("elapsed_ms"), detail="timed out in a collective",
    )  # fmt: skip


def _status(text: str, seq: int, before: str) -> Evidence:
    return Evidence(
        kind=Kind.WATCHDOG_STATUS, sign=Sign.WAITED, seq=seq, group=_group(before), last_enqueued=_number(_ENQUEUED, text),
        last_completed=_number(_COMPLETED, text), detail="watchdog's status",
    )  # fmt: skip


def _group(before: str) -> str | None:
    """The process group by a name that is the same on all of its ranks: the GUID, with its description if it has one."""
    matches = list(_GROUP.finditer(before))
    if not matches:
        return None
    match = matches[-1]
    name = match["name"]
    if name == "default_pg":
        return name
    unique = match["guid"] or match["id"]
    return f"{unique}({name})" if name else unique


#: Libraries that carry messages. They use the system's words for errors too, and then mean a link and no disk, a limit and no
#: memory that is full.
_CARRIERS: Final = re.compile(
    r"NET/|NCCL WARN|[Ll]ibfabric|\b(?:EFA|efa|OFI|RDMA)\b|UCX|\bucp_|\buct_|\bibv_|libibverbs|\bfi_\w|ORTE|OPAL|PMIX|MPI_|"
    r"mlx\d|gloo/|rdma_"
)


GRAM: Final = 4  # letters by which rows are found
SHORT: Final = 1000  # letters up to which that is faster than to look for each row's substring
_BY_GRAM: Final[dict[str, list[int]]] = {}
for _index, _row in enumerate(TEXTS):
    for _needle in _row.needles:
        _BY_GRAM.setdefault(_needle[:GRAM], []).append(_index)
_ALWAYS: Final = sorted(index for gram, rows in _BY_GRAM.items() if len(gram) < GRAM for index in rows)


def candidates(text: str) -> Iterator[Text]:
    """The rows of which a substring is in the text, in the table's order."""
    if len(text) > SHORT:
        yield from (row for row in TEXTS if _has(row, text))
        return
    grams = {text[at : at + GRAM] for at in range(len(text) - GRAM + 1)} & _BY_GRAM.keys()
    for index in sorted({*_ALWAYS, *(index for gram in grams for index in _BY_GRAM[gram])}):
        if _has(TEXTS[index], text):
            yield TEXTS[index]


def _has(row: Text, text: str) -> bool:
    return row.needle in text or (bool(row.more) and any(needle in text for needle in row.more))


def _table(text: str) -> Iterator[tuple[int, Evidence]]:
    seen: set[tuple[str, int]] = set()
    carried = _CARRIERS.search(text) is not None
    for row in candidates(text):
        if carried and row.kind is Kind.DISK:
            continue
        for match in row.expression.finditer(text):
            # Glued lines: the same family counts again further on, in another message.
            if row.family and any(family == row.family and abs(match.start() - at) < 200 for family, at in seen):
                continue
            seen.add((row.family, match.start()))
            fact = _fact(row, match)
            if carried and fact.sign is Sign.HOST_MEMORY:
                fact = replace(fact, sign=Sign.UNSUITED, detail="locked memory (ulimit -l), or memory")
            yield match.start(), fact


def _fact(row: Text, match: re.Match[str]) -> Evidence:
    named = {name: value.strip() for name, value in match.groupdict().items() if value}
    begin = match.start()
    while begin and match.string[begin - 1].isalpha() and match.start() - begin < 20:
        begin -= 1  # needles begin in the middle of a word, so that its capital does not matter
    detail = row.detail or match.string[begin : match.end()][:120].strip()
    if code := named.get("code"):
        detail = f"{row.detail} {code}" if row.detail else detail
    named_ranks = [int(part) for part in re.findall(r"\d{1,6}", named.get("ranks", ""))][:64]
    rank = int(named["rank"]) if "rank" in named else None
    fact = Evidence(
        kind=row.kind, sign=row.sign, rank=rank, peer=named.get("peer"), detail=detail,
        ranks=tuple(sorted({*named_ranks, *([rank] if rank is not None and row.sign is not Sign.SETUP_WAITED else [])})),
        elapsed_ms=int(named["seconds"]) if "seconds" in named else None,
    )  # fmt: skip
    if row.sign is Sign.MISMATCH and (print_ := _FINGERPRINT.search(match.string, match.start())):
        fact = replace(fact, seq=int(print_["seq"]), op=print_["op"])
    return fact


def _raised(match: re.Match[str], frame: LastFrame | None) -> tuple[int, Evidence] | None:
    """A Python exception that no row of a table explains."""
    name, said = match["name"].rsplit(".", 1)[-1], match["said"] or ""
    sign = sign_of(name, said, frame)
    if sign is None:
        return None
    detail = f"{name}: {said}" if said else name
    if sign is Sign.WAITED:
        by_hand = "interrupted by hand" + (f" in {frame.at or frame.file}" if frame else "")
        detail = by_hand if name == "KeyboardInterrupt" else detail
        return match.start("name"), Evidence(kind=Kind.STACK, sign=sign, detail=detail[:160])
    return match.start("name"), Evidence(kind=Kind.EXCEPTION, sign=sign, detail=detail[:160])


def _number(expression: re.Pattern[str], text: str) -> int | None:
    match = expression.search(text)
    return int(match[1]) if match else None


def _product(shape: str) -> int:
    product = 1
    for size in re.findall(r"\d{1,12}", shape)[:8]:
        product *= int(size)
    return product
