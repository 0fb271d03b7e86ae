"""Running code that a policy has written, for rewards: a process with limits, without a network, in a folder of its own.

The idea: the kernel confines, not a list of forbidden words. The code has user, process and network namespaces of its own
(nobody to talk to, nobody to kill), Landlock (it reads Python and the system's libraries, and writes into its folder alone),
and limits of time, memory, files and processes. Where the kernel cannot do that, nothing is run.

    def passing(answers):
        return [float(run(answer.response + answer.record["test"]).ok) for answer in answers]

It is no virtual machine: a hole in the kernel is a hole here, and a socket in the file system can still be connected to. Give
the workers a user that owns little.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from elasticrl.ppo import confined

MiB = 1 << 20


class SandboxError(RuntimeError):
    """This machine cannot confine a process; the sentence says what is missing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What the code may use. Example: Limits(wall_s=2.0, memory_bytes=256 << 20)"""

    wall_s: float = 10.0
    cpu_s: int = 10
    memory_bytes: int = 1024 * MiB  # of addresses, of each process
    file_bytes: int = 16 * MiB  # of each file, and of each of the two outputs
    processes: int = 16
    output_bytes: int = 64 << 10  # that are returned of each output
    network: bool = False  # true leaves it the machine's


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """What came of it. Example: Ran(code=0, out="42", err="", late=False)"""

    code: int  # the exit code; below 0: the signal that ended it
    out: str
    err: str
    late: bool  # it was ended at `wall_s`

    @property
    def ok(self) -> bool:
        """It ended by itself, and well."""
        return self.code == 0 and not self.late


NO_LIMITS = Limits()


def run(source: str, *, stdin: str = "", limits: Limits = NO_LIMITS, python: str = sys.executable) -> Ran:
    """A program in Python. Raises SandboxError where it cannot be confined, and OSError where no process can be started, which
    an environment counts as trouble.
    """
    with tempfile.TemporaryDirectory(prefix="sandbox-") as folder:
        home = Path(folder)
        (home / "main.py").write_text(source, errors="replace")
        (home / "stdin").write_text(stdin, errors="replace")
        asked = [python, "-I", "-B", confined.__file__, json.dumps(asdict(limits))]
        with (home / "stdin").open("rb") as given, (home / "out").open("wb") as out, (home / "err").open("wb") as err:
            process = subprocess.Popen(
                asked, stdin=given, stdout=out, stderr=err, cwd=folder, env={"PATH": os.defpath, "HOME": folder},
                start_new_session=True,
            )  # fmt: skip
            late = False
            try:
                process.wait(limits.wall_s)
            except subprocess.TimeoutExpired:
                late = True
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        said = [(home / name).read_bytes()[: limits.output_bytes].decode(errors="replace") for name in ("out", "err")]
    if process.returncode == confined.REFUSED and not late:
        raise SandboxError(
            f"code was not run, because this machine cannot confine it ({said[1]}); sandboxes need user namespaces "
            "and Landlock (Linux 5.13), in a container perhaps its leave to use them"
        )
    return Ran(code=process.returncode, out=said[0], err=said[1], late=late)
