"""An operator's regular expression for lines with a number, checked before anything is read by it.

The one idea: one that cannot be used is refused where it is written down, with a sentence; what reads by it never fails.
"""

import re
from typing import Final

LONGEST: Final = 200  # letters of one
NESTED: Final = re.compile(r"(?<!\\)[+*}]\??\)[+*{]")


def expected(expression: str) -> re.Pattern[str]:
    """An operator's expression, whose first group is the step, unless one is called `n`. Raises ValueError with a sentence."""
    if len(expression) > LONGEST:
        raise ValueError(f"it has {len(expression)} letters, and may have {LONGEST}")
    try:
        found = re.compile(expression)
        if found.groups and "n" not in found.groupindex:
            found = re.compile(_named(expression))
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(f"it is no regular expression ({error})") from None
    if NESTED.search(expression):
        raise ValueError("it repeats what has a repetition in it, which may take for ever")
    if "n" not in found.groupindex:
        raise ValueError("it has no group for the step")
    return found


def _named(expression: str) -> str:
    """With its first group called `n`."""
    at, within = 0, False
    while at < len(expression):
        letter = expression[at]
        if letter == "\\":
            at += 2
            continue
        within = letter == "[" or (within and letter != "]")
        if letter == "(" and not within and expression[at + 1 : at + 2] != "?":
            return f"{expression[: at + 1]}?P<n>{expression[at + 1 :]}"
        at += 1
    return expression
