"""What each process of a lab is doing at this moment, in a file each: for the folder that a failure leaves.

The one idea: the kernel says where a process stands, whatever it is; a worker's witness says in which line of its program. So
nobody needs to be asked who may not be able to answer.
"""

import shutil
import subprocess
import time
from contextlib import suppress
from pathlib import Path

from chaos.live.box import Box
from chaos.live.labjob import RUN_DIR, LabJob
from chaos.live.proc import command_line, inner_pid
from elasticrl.diagnose import witness

ANSWER_S, SPY_S, SETTLED_S = 3.0, 5.0, 0.1
SAID = ("State", "VmRSS", "Threads", "SigPnd", "ShdPnd", "SigBlk", "SigIgn", "SigCgt")  # of /proc/PID/status


def keep(job: LabJob, folder: Path) -> None:
    """Every process of the job's nodes and of the store, as `<folder>/<node>/<its number there>`."""
    boxes = [*job.lab.boxes.values(), *(member.box for member in job.lab.members.values())]
    running = [(box, pid) for box in boxes if box.on for pid in box.pids()]
    lines = python([(witnessed(job, box, pid), pid) for box, pid in running])
    for box, pid in running:
        file = folder / box.name / str(inner_pid(pid))
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{command_line(pid)}\n{kernel(pid)}\n{lines.get(pid) or spied(pid)}", encoding="utf-8")


def witnessed(job: LabJob, box: Box, pid: int) -> Path:
    """Where a process of the job writes its stack when it is asked to, if it has a witness."""
    runtime = box.path(f"{RUN_DIR}/{job.name}/{box.name}")
    return witness.stack_file(witness.folder_of(runtime), inner_pid(pid))


def python(asked: list[tuple[Path, int]]) -> dict[int, str]:
    """The Python stacks of those that have a witness: all are asked at once, and nobody is waited for alone."""
    sizes: dict[int, tuple[Path, int]] = {}
    for file, pid in asked:
        with suppress(OSError):
            if file.exists() and witness.listens(pid):
                sizes[pid] = file, file.stat().st_size
                witness.signal_main(pid)
    said = dict.fromkeys(sizes, "")
    deadline = time.monotonic() + ANSWER_S
    while time.monotonic() < deadline:
        time.sleep(SETTLED_S)
        before = said
        said = {pid: _after(file, size) for pid, (file, size) in sizes.items()}
        if said == before and all(said.values()):  # all have answered, and their answers grow no more
            break
    return said


def _after(file: Path, size: int) -> str:
    try:
        return file.read_bytes()[size:].decode(errors="replace")
    except OSError:
        return ""


def spied(pid: int) -> str:
    """Its Python stack as py-spy sees it, where that is installed; empty else."""
    spy = shutil.which("py-spy")
    if spy is None or "python" not in command_line(pid):
        return ""
    with suppress(OSError, subprocess.TimeoutExpired):
        asked = [spy, "dump", "--nonblocking", "--pid", str(pid)]
        return subprocess.run(asked, capture_output=True, text=True, timeout=SPY_S).stdout
    return ""


def kernel(pid: int) -> str:
    """What the kernel says of a process and its threads: state, signals, and where each sleeps."""
    lines = [line for line in _read(f"/proc/{pid}/status").splitlines() if line.partition(":")[0] in SAID]
    with suppress(OSError):
        for task in sorted(Path(f"/proc/{pid}/task").iterdir(), key=lambda path: int(path.name)):
            state = _read(f"{task}/stat").rpartition(")")[2].split()[:1]
            lines.append(
                f"thread {task.name} {_read(f'{task}/comm').strip()} {' '.join(state)} {_read(f'{task}/wchan')}"
            )
            lines += [f"    {frame}" for frame in _read(f"{task}/stack").splitlines()]
    return "\n".join(lines)


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""  # it is gone, or we may not look
