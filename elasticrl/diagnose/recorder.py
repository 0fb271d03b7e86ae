"""Flight recorders of a node's workers: each is asked for its own, and what it answers is read as its collectives.

The one idea: every rank of a process group issues the same collectives in the same order, so each rank's dump is one row of
a table whose columns are sequence numbers. A node has a few rows. `core.judge.parting` sees the last of all nodes' and says
where they part. Dumps come as JSON from the workers: torch writes pickles, and no pickle of others is ever loaded here.
With gloo the entries' state stays "scheduled", so states only sharpen the answer.
"""

import os
import secrets
import time
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from math import prod
from pathlib import Path
from typing import Final

from elasticrl.base.parsed import parsed
from elasticrl.base.regular import read_regular
from elasticrl.base.value import dataclass
from elasticrl.contract.evidence import Call
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

    Example: Entry(group="0", seq=41, op="all_reduce", sizes=((1024,),), dtypes=("Float",), state="started")
    """

    group: str
    seq: int
    op: str
    sizes: tuple[tuple[int, ...], ...] = ()
    dtypes: tuple[str, ...] = ()
    state: str = ""

    @property
    def call(self) -> Call:
        """What other nodes are told of it: what must be the same on all ranks."""
        even = self.op.startswith(EVEN) or not self.op.startswith(UNEVEN)
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
    """The recorder of each rank that answers in time (rank -> pid); the others have no row.

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
        answer = parsed(read_regular(file))
    except (OSError, ValueError):
        return None
    return answer if isinstance(answer, dict) and str(answer.get("token", "")) >= token else None


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
        state=str(raw.get("state") or ""),
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
