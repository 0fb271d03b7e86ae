"""Logs that others hold open, and that nobody turns over: what is too long is moved beside, and the file begins anew.

The one idea: who writes with O_APPEND goes on at the new end, so nobody has to be told.
"""

import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Final

LIMIT: Final = 16 << 20  # bytes
OLD: Final = ".1"


def trim(path: Path, limit: int = LIMIT) -> bool:
    """Whether it was too long. A line that comes in just this moment may be lost; where there is no room, all that is old."""
    try:
        if path.stat().st_size <= limit:
            return False
        with suppress(OSError):
            shutil.copyfile(path, path.with_name(path.name + OLD))
        os.truncate(path, 0)
    except OSError:  # it is not there
        return False
    return True
