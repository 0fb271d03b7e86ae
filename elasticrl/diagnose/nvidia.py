"""What NVIDIA's GPUs of this machine say of themselves, by NVML."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from elasticrl.contract.evidence import Kind, Sign
from elasticrl.diagnose.health import FAIL, GIB, OK, ROOT, WARN, Check, gib

NVIDIA: Final = "proc/driver/nvidia/version"  # where there is a driver there are GPUs
#: Why what a GPU says of itself matters, whoever made it.
WHY_UNSEEN: Final = "GPU health cannot be looked at."
WHY_ECC: Final = "An uncorrected error has changed data; the run's numbers cannot be trusted."
WHY_CLOCKS: Final = "A throttled GPU is the straggler that all others wait for."
WHY_MEMORY: Final = "Memory that a dead process holds is missing at the next start."


def _unseen(value: str, remedy: str) -> Check:
    return Check(name="gpu", level=WARN, value=value, why=WHY_UNSEEN, remedy=remedy, unseen=True)


def cards(root: Path = ROOT) -> int:
    """How many GPUs of NVIDIA this process may open."""
    return sum(path.name.removeprefix("nvidia").isdigit() for path in (root / "dev").glob("nvidia[0-9]*"))


def gpus(root: Path = ROOT) -> tuple[tuple[Check, ...], str]:
    """What NVML says of this machine's GPUs. The second is why there is nothing to say."""
    if not (root / NVIDIA).exists():
        return (), "no NVIDIA driver"
    try:
        import pynvml  # type: ignore[import-not-found,import-untyped,unused-ignore]
    except ImportError:
        return (_unseen("a driver, but no nvidia-ml-py", "pip install nvidia-ml-py, where elasticrl is."),), ""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        remedy = "See whether nvidia-smi works for this user, and whether the unit hides /dev/nvidia* (PrivateDevices)."
        return (_unseen(f"a driver, but NVML does not start: {error}", remedy),), ""
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        return tuple(check for i, handle in enumerate(handles) for check in gpu(pynvml, i, handle)), ""
    except pynvml.NVMLError as error:
        lost = Check(
            name="gpu", level=FAIL, value=f"NVML: {error}", why="A GPU has fallen off the bus, or is being reset.",
            remedy="See the kernel log for its Xid; reboot the node.", sign=Sign.GPU_BROKEN, kind=Kind.CUDA_ERROR,
        )  # fmt: skip
        return (lost,), ""
    finally:
        pynvml.nvmlShutdown()


#: Reasons for lower clocks that mean trouble (nvml.h): hardware slowdown, thermal slowdown, power brake.
THROTTLED: Final = {0x8: "hardware slowdown", 0x20: "software thermal slowdown", 0x40: "hardware thermal slowdown",
                    0x80: "power brake"}  # fmt: skip


NVLINKS: Final = 18  # the most that a GPU has


def gpu(nvml: Any, index: int, handle: Any) -> Iterator[Check]:
    """One GPU. What a card does not support says nothing."""

    def ask(name: str, *arguments: Any) -> Any:
        try:
            return getattr(nvml, name)(*arguments)
        except (nvml.NVMLError, AttributeError):
            return None

    ecc = ask("nvmlDeviceGetTotalEccErrors", handle, 1, 0)  # uncorrected, since the driver was loaded
    if ecc is not None:
        yield Check(
            name=f"gpu.{index}.ecc", level=FAIL if ecc else OK, value=f"{ecc} uncorrected errors", why=WHY_ECC,
            remedy="Drain the node, reset the GPU, replace it if it comes again." if ecc else "", sign=Sign.GPU_BROKEN,
            kind=Kind.CUDA_ERROR,
        )  # fmt: skip
    rows = ask("nvmlDeviceGetRemappedRows", handle)
    if rows is not None:
        pending, failed = bool(rows[2]), bool(rows[3])
        yield Check(
            name=f"gpu.{index}.rows", level=FAIL if failed else WARN if pending else OK,
            value=f"{rows[0] + rows[1]} remapped{', pending' * pending}{', failed' * failed}", why=WHY_ECC,
            remedy="Reset the GPU (pending) or replace it (failed)." if pending or failed else "",
            sign=Sign.GPU_BROKEN if failed else None, kind=Kind.CUDA_ERROR,
        )  # fmt: skip
    reasons = ask("nvmlDeviceGetCurrentClocksThrottleReasons", handle)
    if reasons is not None:
        said = ", ".join(text for bit, text in THROTTLED.items() if reasons & bit)
        yield Check(
            name=f"gpu.{index}.clocks", level=WARN if said else OK, value=said or "not throttled", why=WHY_CLOCKS,
            remedy="Look at cooling and power." if said else "",
        )  # fmt: skip
    used, running = ask("nvmlDeviceGetMemoryInfo", handle), ask("nvmlDeviceGetComputeRunningProcesses", handle)
    if used is not None and running is not None:
        left = not running and used.used > GIB
        yield Check(
            name=f"gpu.{index}.memory", level=WARN if left else OK,
            value=f"{gib(used.used)} of {gib(used.total)} used by {len(running)} processes", why=WHY_MEMORY,
            remedy="Find the leftover (fuser -v /dev/nvidia*), or reset the GPU." if left else "",
        )  # fmt: skip
    states = {link: ask("nvmlDeviceGetNvLinkState", handle, link) for link in range(NVLINKS)}
    up, down = ([link for link, state in states.items() if state == word] for word in (1, 0))
    if up:  # a card without a bridge has links that are all inactive: that is how it was bought
        said = f"{len(up)} of {len(up) + len(down)} links active" + f"; inactive: {', '.join(map(str, down))}" * bool(
            down
        )
        yield Check(
            name=f"gpu.{index}.nvlink", level=WARN if down else OK, value=said,
            why="GPUs of a node exchange gradients over NVLink; with fewer links all of them wait for this one.",
            remedy="nvidia-smi nvlink -s and -e; fabric manager's log; if the other GPUs show the same, it may be how they are "
            "bridged." if down else "",
        )  # fmt: skip
