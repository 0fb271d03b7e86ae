"""What is thrown at every reader, and how often: few examples in the tests, the same ones each time; an hour of fresh ones by
`make fuzz`.
"""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from math import inf
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st

EXAMPLES = int(os.environ.get("ELASTICRL_FUZZ_EXAMPLES", "30"))
FRESH = "ELASTICRL_FUZZ_EXAMPLES" in os.environ
#: Memory that all examples of a test together may take on top of what its process had. None of them is larger than 200 kB.
MEMORY = 400 << 20

# No deadline: on a busy machine any example may take long. A hang is what the time limit of all tests is for.
fuzzed = settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize=not FRESH,
    database=None,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.generate, Phase.shrink] if FRESH else [Phase.generate],
)

HOSTILE = (
    b"[" * 3000, b'{"a":' * 3000, b"\x00", b"\xff\xfe", b"NaN", b"1e999", b"9" * 5000, b'"\\ud800"', b"\x1b]0;x\x07", b"\r\n",
    b"\n\n", b"null", b"-1", b"4611686018427387904", b"A" * 70_000, b"%00", b"../../etc/passwd", b"'\"`$(id)", b"z1:",
    "\u202e\u00fc\u6f22".encode(),
)  # fmt: skip

numbers = st.one_of(
    st.integers(-3, 70), st.sampled_from([2**31, 2**53, 2**62, 2**63, 2**64, -(2**63), 10**30, 10**400, 10**15]),
    st.sampled_from([1e300, inf, -inf]),
    st.floats(allow_nan=True, allow_infinity=True),
)  # fmt: skip
words = st.one_of(
    st.text(max_size=12),
    st.sampled_from(
        ["", "n00", "train", "[" * 200, "\x1b[2J", "x" * 5000, "../..", "\ud800", "1/2", "61", str(2**62), "inf"]
    ),
)
values = st.recursive(
    st.one_of(st.none(), st.booleans(), numbers, words),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(words, inner, max_size=4)),
    max_leaves=12,
)


def changed(good: st.SearchStrategy[bytes]) -> st.SearchStrategy[bytes]:
    """Good bytes, with a few of them cut out, changed, or something hostile put between."""
    piece = st.one_of(st.sampled_from(HOSTILE), st.binary(max_size=20))
    edits = st.lists(st.tuples(st.floats(0, 1), st.integers(0, 30), piece), max_size=4)

    def apply(data: bytes, several: list[tuple[float, int, bytes]]) -> bytes:
        for where, length, fresh in several:
            at = int(where * len(data))
            data = data[:at] + fresh + data[at + length :]
        return data

    return st.builds(apply, good, edits)


def altered(good: dict[str, Any]) -> st.SearchStrategy[dict[str, Any]]:
    """A good object with some of its fields, at any depth, replaced by something else, or gone."""
    places = list(_places(good))
    edits = st.lists(st.tuples(st.sampled_from(places), st.one_of(values, st.just(...))), min_size=1, max_size=3)

    def apply(several: list[tuple[tuple[Any, ...], Any]]) -> dict[str, Any]:
        made: dict[str, Any] = json.loads(json.dumps(good))
        for place, fresh in several:
            at: Any = made
            try:
                for name in place[:-1]:
                    at = at[name]
                if fresh is ...:
                    del at[place[-1]]
                else:
                    at[place[-1]] = fresh
            except (LookupError, TypeError):
                continue  # an earlier edit took it away
        return made

    return st.builds(apply, edits)


def _places(value: Any, here: tuple[Any, ...] = ()) -> Any:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, each in inner:
        yield (*here, name)
        yield from _places(each, (*here, name))


def text_of(value: Any) -> bytes:
    """As JSON, infinite numbers and half letters among it."""
    return json.dumps(value).encode()


@contextmanager
def bounded() -> Iterator[None]:
    """What is done in it is held to the memory that it may take beside what the process has."""
    before = _peak()
    yield
    assert _peak(new=False) - before < MEMORY


def _peak(*, new: bool = True) -> int:
    """The most memory that this process has had, in bytes; from now on, if `new`."""
    if new:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    (line,) = (
        row for row in Path("/proc/self/status").read_text(encoding="ascii").splitlines() if row.startswith("VmHWM")
    )
    return int(line.split()[1]) << 10
