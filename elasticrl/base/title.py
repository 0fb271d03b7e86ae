"""What a process is called in `ps`, `top` and `pgrep`, where a worker, a spare and their agent would all be "python".

The one idea: the kernel keeps 15 bytes of a name beside the command line, and anybody may write their own.
"""

from contextlib import suppress
from pathlib import Path


def title(part: str) -> None:
    """Call this process by the part that it plays: "elasticrl-" and as much of it as has room ("agent", "spare", "r12")."""
    with suppress(OSError):  # no /proc, or one that cannot be written: it is a convenience
        Path("/proc/self/comm").write_bytes(f"elasticrl-{part}".encode()[:15])
