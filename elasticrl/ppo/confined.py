"""The inside of `sandbox.run`, as a program: it gives up what it may do, and then runs `main.py` of its folder.

The idea: everything is taken away by the kernel before the first line of foreign code runs, and cannot be had back. It imports
nothing of ours and nothing that is not Python's own: it runs isolated, in a process that will not be trusted any more.
"""

import ctypes
import json
import os
import resource
import runpy
import signal
import sys
from pathlib import Path

NEW_IPC, NEW_USER, NEW_PID, NEW_NET = 0x08000000, 0x10000000, 0x20000000, 0x40000000
DEATH_SIGNAL, NO_NEW_PRIVILEGES = 1, 38
CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446  # Landlock's, on every architecture
READS = 0b1101  # execute, read a file, list a folder
OF_FILES = 0b100_0000_0000_0111  # what may be said of a file
REFUSED = 97  # exit code: the machine cannot take away what should be

libc = ctypes.CDLL(None, use_errno=True)


class Ruleset(ctypes.Structure):
    """struct landlock_ruleset_attr."""

    _fields_ = (("handled", ctypes.c_uint64),)


class Beneath(ctypes.Structure):
    """struct landlock_path_beneath_attr."""

    _pack_ = 1
    _fields_ = (("allowed", ctypes.c_uint64), ("parent", ctypes.c_int32))


def main() -> None:
    """Confine, then run."""
    limits = json.loads(sys.argv[1])
    libc.prctl(DEATH_SIGNAL, signal.SIGKILL)
    must(
        libc.unshare(NEW_USER | NEW_PID | NEW_IPC | (0 if limits["network"] else NEW_NET)),
        "no namespaces of a user's own",
    )
    child = os.fork()  # the first process of its own numbers: with it all others end
    if child:
        _, status = os.waitpid(child, 0)
        code = os.waitstatus_to_exitcode(status)
        if code < 0:
            signal.signal(-code, signal.SIG_DFL) if -code != signal.SIGKILL else None
            os.kill(os.getpid(), -code)
        os._exit(code)
    libc.prctl(DEATH_SIGNAL, signal.SIGKILL)
    only_files(Path.cwd())
    for kind, most in (
        (resource.RLIMIT_CPU, limits["cpu_s"]),
        (resource.RLIMIT_AS, limits["memory_bytes"]),
        (resource.RLIMIT_FSIZE, limits["file_bytes"]),
        (resource.RLIMIT_NPROC, limits["processes"]),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(kind, (most, most))
    sys.argv = ["main.py"]
    runpy.run_path("main.py", run_name="__main__")


def only_files(folder: Path) -> None:
    """From now on: Python and the system's libraries to be read, and this folder."""
    abi = libc.syscall(CREATE_RULESET, None, 0, 1)
    must(abi, "no Landlock")
    every = (1 << min(12 + abi, 15)) - 1 if abi < 3 else (1 << 15) - 1
    rules = libc.syscall(CREATE_RULESET, ctypes.byref(Ruleset(every)), ctypes.sizeof(Ruleset), 0)
    must(rules, "no Landlock rules")
    packages = [path for path in sys.path if path.endswith("-packages")]
    system = ["/usr", "/lib", "/lib64", "/bin", "/etc/ld.so.cache", "/etc/localtime", "/dev/urandom"]
    readable = [*system, sys.prefix, sys.base_prefix, *packages]
    for path, allowed in [(str(folder), every), ("/dev/null", 0b110), *((path, READS) for path in readable)]:
        try:
            place = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except FileNotFoundError:
            continue
        rule = Beneath(allowed if Path(path).is_dir() else allowed & OF_FILES & every, place)
        must(libc.syscall(ADD_RULE, rules, 1, ctypes.byref(rule), 0), f"no rule for {path}")
        os.close(place)
    must(libc.prctl(NO_NEW_PRIVILEGES, 1, 0, 0, 0), "privileges could come back")
    must(libc.syscall(RESTRICT_SELF, rules, 0), "the rules do not hold")
    os.close(rules)


def must(result: int, what: str) -> None:
    """End if the kernel refuses."""
    if result < 0:
        os.write(2, f"{what}: {os.strerror(ctypes.get_errno())}".encode())
        os._exit(REFUSED)


if __name__ == "__main__":
    main()
