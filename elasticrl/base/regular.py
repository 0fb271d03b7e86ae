"""Opens files that somebody left in a folder: regular ones only.

The one idea: a name in a folder may be a pipe that nobody writes to, and whoever opens it waits for ever. So a file is opened
without waiting, and looked at when it is open: a look before that would be of another file.
"""

import errno
import os
import stat
from io import BufferedReader, TextIOWrapper
from pathlib import Path
from typing import Final, TextIO

LARGEST: Final = 1 << 30  # bytes that are read at once


def regular_handle(path: Path) -> int:
    """A regular file, to be read; OSError for anything else that bears the name."""
    found = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(found).st_mode):
        os.close(found)
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return found


def open_regular(path: Path) -> BufferedReader:
    """The same as a stream of bytes."""
    return os.fdopen(regular_handle(path), "rb")


def read_regular(path: Path) -> bytes:
    """All that is in it; OSError also for one that is too large to be in memory."""
    with open_regular(path) as file:
        if os.fstat(file.fileno()).st_size > LARGEST:
            raise OSError(errno.EFBIG, f"it is over {LARGEST >> 20} MiB large", str(path))
        return file.read()


def open_regular_text(path: Path) -> TextIO:
    """The same as lines of text; what is none of it is replaced."""
    return TextIOWrapper(open_regular(path), encoding="utf-8", errors="replace")
