"""A daemon that will not go on, and says in a sentence what an operator has to change first.

The one idea: only what is written as a refusal is one. systemd starts no daemon again that refused, so a ValueError of Python's
own, or one out of the core, must not pass for a refusal: it is a bug, and a restart may get past it.
"""

import errno
from typing import Final

FULL: Final = frozenset(
    {errno.ENOSPC, errno.EDQUOT}
)  # a disk that takes nothing: that passes when somebody has made room
FAILED: Final = 1  # the exit code of a daemon that cannot go on, and has not refused: systemd starts another


class Refusal(ValueError):
    """What the operator asked for cannot be; the message says why, and what to do."""
