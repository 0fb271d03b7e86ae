"""What computes: versions, hardware and code, for a certificate. Asked once in a process, never in a step."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from functools import cache
from hashlib import sha256
from pathlib import Path

import elasticrl
from elasticrl.base.parsed import parsed
from elasticrl.base.regular import read_regular
from elasticrl.runtime.bits import device, versions


@cache
def node() -> Mapping[str, str]:
    """Versions and hardware of this node, as words.

    Example: {"python": "3.11.2", "elasticrl": "0.1.0", "wire": "3", "torch": "2.13.0+cpu", "device": "AMD EPYC 9B14", ...}
    """
    import torch

    return {
        **{name: str(value) for name, value in parsed(versions()).items()},
        "device": device(),
        "devices": str(torch.cuda.device_count() if torch.cuda.is_available() else os.cpu_count()),
        "isa": torch.backends.cpu.get_cpu_capability(),
    }


def script() -> Mapping[str, str]:
    """What this process runs. Example: {"script": "train.py", "sha256": "ab..."}"""
    main = Path(getattr(sys.modules.get("__main__"), "__file__", None) or sys.argv[0])
    try:
        return {"script": main.name, "sha256": sha256(read_regular(main)).hexdigest()}
    except OSError:
        return {"script": main.name, "sha256": ""}


@cache
def package() -> str:
    """A hash of all Python files of this package, by their names. It takes some tens of milliseconds: not for a trainer."""
    root, found = Path(elasticrl.__file__).parent, sha256()
    for path in sorted(root.rglob("*.py")):
        found.update(f"{path.relative_to(root)} {sha256(path.read_bytes()).hexdigest()}\n".encode())
    return found.hexdigest()
