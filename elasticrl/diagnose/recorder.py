"""Flight recorders compared: who is behind, who never entered, who entered another collective, whose host is elsewhere.

The one idea: every rank of a process group issues the same collectives in the same order, so each rank's dump is one row of
a table whose columns are sequence numbers. The first column in which the rows differ is where it went wrong; a row that ends
early belongs to the rank that the others wait for. Dumps come as JSON from the workers: torch writes pickles, and a pickle
from another process is never loaded here. With gloo the entries' state stays "scheduled", so states only sharpen the answer.
"""

import json
import os
import secrets
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import blake2b
from math import prod
from pathlib import Path
from typing import Final

from elasticrl.core.evidence import Call, Evidence, Kind, Sign
from elasticrl.core.value import dataclass
from elasticrl.diagnose import witness

#: Collectives whose sizes may differ from rank to rank.
UNEVEN = (
    "all_to_all",
    "alltoall",
    "gather",
    "scatter",
    "send",
    "recv",
    "reduce_scatter",
    "allgather_into_tensor_coalesced",
    "coalesced",
)
EVEN = ("all_gather", "allgather", "_all_gather_base", "_reduce_scatter_base")
WORDS: Final = 60  # characters of a collective that other nodes are told of


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One collective as one rank entered it.

    Example: Entry(group="0", seq=41, op="all_reduce", sizes=((1024,),), dtypes=("Float",), frame="train.py:88 step")
    """

    group: str
    seq: int
    op: str
    sizes: tuple[tuple[int, ...], ...] = ()
    dtypes: tuple[str, ...] = ()
    state: str = ""
    frame: str = ""  # where the program called it

    @property
    def signature(self) -> tuple[object, ...]:
        """What must be the same on all ranks."""
        even = self.op.startswith(EVEN) or not self.op.startswith(UNEVEN)
        return (self.op, self.dtypes, self.sizes) if even else (self.op, self.dtypes)

    @property
    def call(self) -> Call:
        """What other nodes are told of it."""
        even = len(self.signature) == 3
        shapes = " ".join("x".join(map(str, size)) or "scalar" for size in self.sizes) if even else ""
        what = " ".join(filter(None, (self.op, shapes, "/".join(sorted(set(self.dtypes))))))
        # Many tensors make a long list: two that differ at its end must not look alike where it is cut.
        cut = what if len(what) <= WORDS else f"{what[:WORDS]}… #{blake2b(what.encode(), digest_size=4).hexdigest()}"
        return Call(seq=self.seq, what=cut, numel=self.numel)

    @property
    def numel(self) -> int | None:
        """Elements that this rank brought."""
        return sum(prod(size) for size in self.sizes) if self.sizes else None

    def __str__(self) -> str:
        shapes = " ".join("x".join(map(str, size)) or "scalar" for size in self.sizes)
        return " ".join(filter(None, (f"{self.op} {self.seq}", shapes, "/".join(sorted(set(self.dtypes))))))


def entries(dump: object, *, until_ns: int | None = None) -> tuple[Entry, ...]:
    """A dump's collectives, oldest first, or those entered until a moment (by the wall clock): the groups that were there then.

    Point-to-point operations have counters of their own and are left out.
    """
    listed = dump.get("entries") if isinstance(dump, Mapping) else None
    if not isinstance(listed, Sequence) or isinstance(listed, str):
        return ()
    # A process that has reformed has had several groups of one name, each counting from 1: only the newest is compared.
    newest: dict[str, tuple[object, list[Entry]]] = {}
    for raw in listed:
        if not isinstance(raw, Mapping) or (entry := _entry(raw)) is None or not _by_then(raw, until_ns):
            continue
        number, kept = newest.setdefault(entry.group, (raw.get("pg_id"), []))
        if kept and (number != raw.get("pg_id") or entry.seq < kept[-1].seq):
            newest[entry.group] = (raw.get("pg_id"), kept := [])
        kept.append(entry)
    return tuple(entry for _, kept in newest.values() for entry in kept)


def _by_then(raw: Mapping[object, object], until_ns: int | None) -> bool:
    if until_ns is None:
        return True
    created = raw.get("time_created_ns")
    return isinstance(created, int) and created <= until_ns


def collect(
    folder: Path, workers: Mapping[int, int], *, within_s: float, until_ns: int | None = None
) -> dict[int, tuple[Entry, ...]]:
    """The recorder of each rank that answers in time (rank -> pid); the others have no row, and `compare` says so.

    The answer is read by the worker itself and comes as JSON; see `witness`.
    """
    deadline = time.monotonic() + within_s
    # Tells this answer from one to an earlier question; that to a later one, somebody else's, will do.
    token = f"{time.monotonic_ns():016x}{secrets.token_hex(4)}"
    waiting = {rank: pid for rank, pid in sorted(workers.items()) if ask(folder, pid, token)}
    found: dict[int, tuple[Entry, ...]] = {}
    while waiting and time.monotonic() < deadline:
        for rank, pid in list(waiting.items()):
            answer = _answer(witness.recorder_file(folder, pid), token)
            if answer is not None:
                found[rank] = entries(answer.get("dump"), until_ns=until_ns)
                del waiting[rank]
        time.sleep(LOOK_S)
    return found


LOOK_S: Final = 0.01  # between looks for answers
LARGEST: Final = 64 << 20  # bytes of an answer: 2,000 entries are 1 MB


def ask(folder: Path, pid: int, token: str) -> bool:
    """Put the question into the worker's pipe. Opened so, a pipe without a reader is an error, and a full one too."""
    try:
        pipe = os.open(witness.ask_file(folder, pid), os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        os.write(pipe, token.encode() + b"\n")
    except OSError:
        return False
    finally:
        os.close(pipe)
    return True


def _answer(file: Path, token: str) -> Mapping[str, object] | None:
    try:
        if file.stat().st_size > LARGEST:
            return None
        answer = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    return answer if isinstance(answer, dict) and str(answer.get("token", "")) >= token else None


def load(text: str | bytes) -> tuple[Entry, ...]:
    """A dump as JSON. What is no dump has no entries."""
    try:
        return entries(json.loads(text))
    except (ValueError, RecursionError):
        return ()


def compare(dumps: Mapping[int, Sequence[Entry]], *, expected: Iterable[int] = ()) -> tuple[Evidence, ...]:
    """Evidence from the dumps of all ranks. `expected` are the ranks that were asked: one that gave none cannot run."""
    found: list[Evidence] = []
    groups: dict[str, dict[int, dict[int, Entry]]] = {}
    for rank, listed in sorted(dumps.items()):
        for entry in listed:
            groups.setdefault(entry.group, {}).setdefault(rank, {})[entry.seq] = entry
    silent = sorted(set(expected) - set(dumps))
    if silent and dumps:
        found += [
            Evidence(
                kind=Kind.RECORDER,
                sign=Sign.ABSENT,
                rank=rank,
                detail="gave no flight-recorder dump",
                source="recorder",
            )
            for rank in silent
        ]
    for group, rows in sorted(groups.items()):
        # A rank that has dumped and shows nothing of a group belongs to another group, unless it is the only group.
        members = sorted(dumps) if len(groups) == 1 else sorted(rows)
        found += _compare_group(group, {rank: rows.get(rank, {}) for rank in members})
    return tuple(found)


def _compare_group(group: str, rows: Mapping[int, Mapping[int, Entry]]) -> Iterator[Evidence]:
    """What one group's records prove: a collective that some entered otherwise, or that some never entered."""
    if len(rows) < 2:
        return
    last = {rank: max(row, default=-1) for rank, row in rows.items()}
    if odd := _first_difference(rows):
        seq, ranks, usual = odd
        for rank in ranks:
            mine = rows[rank][seq]
            yield _evidence(Sign.MISMATCH, rank, group, mine, f"entered {mine}, others {usual}", ranks)
        return
    front = max(last.values())
    behind = sorted(rank for rank, seq in last.items() if seq < front)
    ahead = [rank for rank in rows if rank not in behind]
    wanted = rows[ahead[0]][front]
    if len(behind) * 2 > len(rows):
        # Most have not come (yet): that a few are ahead proves nothing about anybody.
        for rank in ahead:
            yield _evidence(
                Sign.WAITED, rank, group, rows[rank][front], f"waits in {wanted}; most ranks have not entered it"
            )
        return
    for rank in ahead:
        if behind or rows[rank][front].state not in {"completed", ""}:
            yield _evidence(Sign.WAITED, rank, group, rows[rank][front], f"waits in {wanted}")
    for rank in behind:
        newest = rows[rank].get(last[rank])
        if newest is None:
            yield _evidence(
                Sign.ABSENT, rank, group, wanted, f"never entered a collective of this group; others are in {wanted}"
            )
            continue
        at = f" (last seen at {newest.frame})" if newest.frame else ""
        done = newest.state == "completed"
        sign = Sign.HOST_STUCK if done else Sign.ABSENT
        said = f"entered nothing after {newest}{at}; others are in {wanted}"
        yield _evidence(sign, rank, group, wanted, ("its host is between collectives: " if done else "") + said)


def _first_difference(rows: Mapping[int, Mapping[int, Entry]]) -> tuple[int, tuple[int, ...], Entry] | None:
    """The first number at which ranks entered different collectives: it, who is odd, and what is usual."""
    shared: Counter[int] = Counter(seq for row in rows.values() for seq in row)
    for seq in sorted(seq for seq, count in shared.items() if count > 1):
        here = {rank: row[seq] for rank, row in rows.items() if seq in row}
        kinds = Counter(entry.signature for entry in here.values())
        if len(kinds) == 1:
            continue
        (usual, most), *_ = kinds.most_common()
        tied = [signature for signature, count in kinds.items() if count == most]
        odd = [rank for rank, entry in here.items() if len(tied) > 1 or entry.signature != usual]
        example = next(entry for entry in here.values() if entry.signature == usual)
        return seq, tuple(sorted(odd)), example
    return None


def _evidence(sign: Sign, rank: int, group: str, entry: Entry, detail: str, ranks: tuple[int, ...] = ()) -> Evidence:
    return Evidence(
        kind=Kind.RECORDER, sign=sign, rank=rank, ranks=ranks, group=group, op=entry.op, seq=entry.seq, numel_in=entry.numel,
        detail=detail[:300], source="recorder",
    )  # fmt: skip


def _entry(raw: Mapping[object, object]) -> Entry | None:
    seq = raw.get("collective_seq_id")
    if not isinstance(seq, int) or isinstance(seq, bool) or seq < 0 or raw.get("is_p2p") is True:
        return None
    named = raw.get("process_group")
    group = (
        str(named[0] or "default_pg")  # the gang's own has no name; its number differs from process to process
        if isinstance(named, Sequence) and not isinstance(named, str) and named
        else str(raw.get("pg_id", "0"))
    )
    name = str(raw.get("profiling_name", "")).split(":", 1)[-1]
    return Entry(
        group=group[:80], seq=seq, op=name[:80], sizes=_sizes(raw.get("input_sizes")), dtypes=_strings(raw.get("input_dtypes")),
        state=str(raw.get("state") or ""), frame=_frame(raw.get("frames")),
    )  # fmt: skip


def _sizes(value: object) -> tuple[tuple[int, ...], ...]:
    if not isinstance(value, Sequence) or isinstance(value, str):
        return ()
    return tuple(
        tuple(n for n in size if isinstance(n, int))
        for size in value
        if isinstance(size, Sequence) and not isinstance(size, str)
    )


def _strings(value: object) -> tuple[str, ...]:
    return tuple(map(str, value)) if isinstance(value, Sequence) and not isinstance(value, str) else ()


def _frame(value: object) -> str:
    """The program's own frame: the newest that is not torch's."""
    if not isinstance(value, Sequence) or isinstance(value, str):
        return ""
    for frame in value:
        if isinstance(frame, Mapping) and "/torch/" not in str(frame.get("filename", "")):
            return (
                f"{str(frame.get('filename', '')).rsplit('/', 1)[-1]}:{frame.get('line', '')} {frame.get('name', '')}"[
                    :120
                ]
            )
    return ""
