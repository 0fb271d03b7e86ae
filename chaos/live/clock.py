"""A wall clock that is off, for the processes of one node.

The one idea: wall clocks have no namespace, so what asks for the time of day is answered by a library of ours (`clock.c`),
which looks at a file. Debian's libfaketime was tried: with monotonic clocks left alone, each sleep of Python's failed.
"""

import shutil
import struct
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final

SOURCE: Final = Path(__file__).with_name("clock.c")
COMPILER: Final = "cc"


def lacking() -> str:
    """Why there can be none here; empty if there can."""
    return "" if shutil.which(COMPILER) else "no C compiler (Debian: gcc, libc6-dev)"


class FalseClock:
    """One node's. What it shows changes at once, in all processes that look at it.

    Example: FalseClock(folder / "n1.clock").show(3600.0, drift=0.02)
    """

    def __init__(self, told: Path) -> None:
        self._told = told
        self._library = told.with_name("clock.so")

    def show(self, off_s: float, *, drift: float = 0.0) -> None:
        """The true time and so much, and so much more of each second from now on."""
        said = struct.pack("@3q", round(off_s * 1e9), round(drift * 1e6), time.time_ns())
        if not self._told.exists():
            self._told.write_bytes(said)
        with self._told.open("r+b") as file:  # the same file: it is mapped
            file.write(said)

    def environment(self) -> Mapping[str, str]:
        """Of the processes that are to look at it."""
        if not self._library.exists():
            subprocess.run(
                [COMPILER, "-shared", "-fPIC", "-O2", "-Wall", "-o", str(self._library), str(SOURCE), "-ldl"],
                check=True, capture_output=True, timeout=60,
            )  # fmt: skip
        return {"LD_PRELOAD": str(self._library), "FALSE_CLOCK": str(self._told)}
