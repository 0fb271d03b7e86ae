"""Durations and sizes as people write them (`200ms`, `10s`, `4GiB`) and as the code holds them (float seconds, int bytes).

The one idea: a value in a file carries its unit, a name in the code does. So the key `lease_ttl: 10s` is the attribute
`lease_ttl_s == 10.0`, and a bare `10` in a file is refused, because nobody can tell what it meant.
"""

import re
from decimal import Decimal

KiB, MiB, GiB = 1 << 10, 1 << 20, 1 << 30

DURATION = r"^[0-9]+(\.[0-9]+)?(ms|s|m|h|d)$"
SIZE = r"^[0-9]+(\.[0-9]+)?(B|KiB|MiB|GiB|TiB)$"
COUNT = r"([0-9]+(?:_[0-9]+)*(?:\.[0-9]+)?(e\+?[0-9]{1,2})?)(K|M|B|T)?"

_SECONDS = {"d": Decimal(86400), "h": Decimal(3600), "m": Decimal(60), "s": Decimal(1), "ms": Decimal("0.001")}
_BYTES = {"TiB": 1 << 40, "GiB": GiB, "MiB": MiB, "KiB": KiB, "B": 1}
_COUNTS = {"T": 10**12, "B": 10**9, "M": 10**6, "K": 10**3, None: 1}
_SPLIT = re.compile(r"([0-9.]+)([A-Za-z]+)")


def parse_duration(text: str) -> float:
    """Seconds.

    >>> parse_duration("200ms"), parse_duration("1.5m")
    (0.2, 90.0)
    """
    number, unit = _parts(text, DURATION)
    return float(number * _SECONDS[unit])


def format_duration(seconds: float) -> str:
    """The plainest writing that parses back to the same float.

    >>> format_duration(0.2), format_duration(90.0), format_duration(3600.0), format_duration(3.4), format_duration(0.0)
    ('200ms', '90s', '1h', '3.4s', '0s')
    """
    exact = Decimal(repr(seconds))
    units = ("d", "h", "m", "s") if exact >= 1 else ("ms",)
    for unit in units:
        count = exact / _SECONDS[unit]
        if count and count == count.to_integral_value():
            return f"{count:.0f}{unit}"
    return f"{exact:f}".removesuffix(".0") + "s"


def parse_size(text: str) -> int:
    """Bytes.

    >>> parse_size("4GiB"), parse_size("1.5KiB")
    (4294967296, 1536)
    """
    number, unit = _parts(text, SIZE)
    count = number * _BYTES[unit]
    if count != count.to_integral_value():
        raise ValueError(f"{text} is not a whole number of bytes")
    return int(count)


def parse_count(text: str) -> int:
    """How many, as sizes of models are written.

    >>> parse_count("7B"), parse_count("350M"), parse_count("1.5e9"), parse_count("7_000_000_000")
    (7000000000, 350000000, 1500000000, 7000000000)
    """
    match = re.fullmatch(COUNT, text)
    if match is None:
        raise ValueError(f"{text} is no number of things: write it like 7B, 350M, 1.5e9 or 7_000_000_000")
    count = Decimal(match[1]) * _COUNTS[match[3]]
    if count < 1 or count != count.to_integral_value():
        raise ValueError(f"{text} is not a whole number of things, at least 1")
    return int(count)


def format_size(count: int) -> str:
    """The largest unit that is exact.

    >>> format_size(4 << 30), format_size(1536), format_size(0)
    ('4GiB', '1536B', '0B')
    """
    for unit, scale in _BYTES.items():
        if count and count % scale == 0 and count // scale < 10_000:
            return f"{count // scale}{unit}"
    return f"{count}B"


def _parts(text: str, pattern: str) -> tuple[Decimal, str]:
    match = _SPLIT.fullmatch(text) if re.match(pattern, text) else None
    if match is None:
        raise ValueError(f"{text} has no unit that is known here")
    return Decimal(match[1]), match[2]
