"""The one reader of JSON that comes from elsewhere: values of the store, lines on sockets, files of a run, replies over HTTP.

The one idea: `json` reads more than its callers can bear. Two hundred thousand brackets break any code that walks through them,
a number can be infinite, a letter can be half of one. So a caller gets a value of bounded depth and size, or a ValueError that
says why not, and handles it as it handles any text that is not JSON.

A log or a history of others goes on being read, whatever one of its lines says: `whole`, `real` and `instant` make of a field
the number that is reckoned with, or a ValueError as well.
"""

import json
from contextlib import suppress
from datetime import UTC, datetime
from itertools import chain
from math import isfinite
from typing import Any, Final

DEEP: Final = 64  # brackets within brackets; what we write has less than a dozen
LARGEST: Final = 64 << 20  # bytes, or letters
HIGHEST: Final = 1 << 53  # of what is counted: every whole number below it is a float too
YEAR_10000: Final = 253_402_300_800.0  # seconds since 1970: no calendar here has a later moment
LONGEST: Final = 300  # digits of a whole number: one that is longer fits into no float, and ends whoever divides by it


class Unfit(ValueError):
    """JSON, but none that is read; the message says why."""


def parsed(text: str | bytes, *, finite: bool = False, most: int = LARGEST) -> Any:
    """What a text says, or ValueError. `finite`: no number may be infinite or none at all; else they may, as a loss may be.

    >>> parsed(b'{"v": 1}')
    {'v': 1}
    >>> parsed("[" * 200_000)
    Traceback (most recent call last):
        ...
    elasticrl.base.parsed.Unfit: it has brackets in brackets, more than 64 deep
    >>> parsed("[1e999]", finite=True)
    Traceback (most recent call last):
        ...
    elasticrl.base.parsed.Unfit: it has a number that is not finite: 1e999
    >>> parsed("[" + "9" * 400 + "]")
    Traceback (most recent call last):
        ...
    elasticrl.base.parsed.Unfit: it has a number of over 300 digits
    """
    if len(text) > most:
        raise Unfit(f"it is over {most} bytes large")
    said = text if isinstance(text, str) else bytes(text).decode()
    try:
        value = (_FINITE if finite else _ANY).decode(said)
    except RecursionError:
        raise Unfit(TOO_DEEP) from None
    if said.count("[") + said.count("{") > DEEP:
        _bounded(value)
    if "\\ud" in said or "\\uD" in said:  # maybe half of a pair, which cannot be written anywhere
        value = json.loads(json.dumps(value, ensure_ascii=False).encode(errors="replace"))
    return value


TOO_DEEP: Final = f"it has brackets in brackets, more than {DEEP} deep"


def _bounded(value: Any) -> None:
    """Level by level, as to call oneself for each would end as the readers do."""
    level = [value]
    for _ in range(DEEP):
        inner = chain.from_iterable(each.values() if type(each) is dict else each for each in level)
        level = [each for each in inner if type(each) is dict or type(each) is list] if level else []
        if not level:
            return
    raise Unfit(TOO_DEEP)


def _finite(text: str) -> float:
    value = float(text)
    if not isfinite(value):
        raise Unfit(f"it has a number that is not finite: {text[:40]}")
    return value


def _whole(text: str) -> int:
    if len(text) > LONGEST:
        raise Unfit(f"it has a number of over {LONGEST} digits")
    return int(text)


_ANY: Final = json.JSONDecoder(parse_int=_whole)
_FINITE: Final = json.JSONDecoder(parse_int=_whole, parse_float=_finite, parse_constant=_finite)


def whole(value: Any) -> int:
    """What a field counts, or ValueError.

    >>> [whole(3), whole("3"), whole(3.0)]
    [3, 3, 3]
    >>> whole(float("inf"))
    Traceback (most recent call last):
        ...
    elasticrl.base.parsed.Unfit: inf is nothing that is counted
    """
    with suppress(OverflowError):
        number = int(value)
        if -HIGHEST < number < HIGHEST:
            return number
    raise Unfit(f"{value!s:.40} is nothing that is counted")


def real(value: Any, *, finite: bool = False) -> float:
    """What a field measures, or ValueError. A loss may be infinite, or no number at all; seconds are `finite`."""
    with suppress(OverflowError):
        number = float(value)
        if isfinite(number) or not finite:
            return number
    raise Unfit(f"{value!s:.40} is nothing that is measured")


def instant(value: Any) -> float:
    """A moment in seconds since 1970, or as ISO 8601 writes it (UTC where it names no zone); or ValueError."""
    if isinstance(value, str):
        moment = datetime.fromisoformat(value)
        value = (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    at = real(value, finite=True)
    if not 0 <= at < YEAR_10000 - 86400:  # what lasts a day from there can still be told
        raise Unfit(f"{value!s:.40} is no moment")
    return at
