"""AMD's GPUs of this machine, as `amd-smi` tells of them: the same checks as NVML's, so that verdicts need no row of their own.

The one idea: the program is asked three questions, each as JSON and within one deadline, and everything about its answers is
doubted. ROCm 6 answers with a list of GPUs, ROCm 7 with an object around it; a figure is a number, or a value with a unit, or
"N/A"; an old driver, or one that may not be asked, leaves whole sections out. What is not said gives no check. A program that
hangs, as it does when the driver does, is killed and said to; one that not even that ends is left, and no other is started.
"""

import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from elasticrl.base.parsed import parsed
from elasticrl.contract.evidence import Kind, Sign
from elasticrl.diagnose import nvidia
from elasticrl.diagnose.health import FAIL, GIB, OK, ROOT, WARN, Check, gib

PROGRAM: Final = "amd-smi"
WITHIN_S: Final = 10.0  # for all questions: it imports Python, and looks for 0.1 s at the throttling of each card
END_S: Final = 1.0  # for one that was killed; one that waits in a dead driver never ends
DRIVER: Final = "sys/module/amdgpu/initstate"
DEVICES: Final = "dev/kfd"

#: What holds clocks down and means trouble. (That the package's power is at its limit, `ppt`, is how a busy card runs.)
THROTTLED: Final = {
    "prochot_violation_status": "processor hot", "socket_thermal_violation_status": "socket too hot",
    "vr_thermal_violation_status": "voltage regulator too hot", "hbm_thermal_violation_status": "memory too hot",
}  # fmt: skip
UNITS: Final = {"B": 1, "KB": 1 << 10, "MB": 1 << 20, "GB": 1 << 30}  # amd-smi's MB are binary
NOBODY: Final = "No running processes detected"

Card = Mapping[str, Any]  # one GPU's part of an answer, as it was parsed

_left: list[subprocess.Popen[str]] = []  # killed, and not ended when that was looked at last


def gpus(root: Path = ROOT, program: str = PROGRAM, within_s: float = WITHIN_S) -> tuple[tuple[Check, ...], str]:
    """What amd-smi says. The second is why there is nothing to say."""
    if not (root / DRIVER).exists() and not (root / DEVICES).exists():
        return (), "no AMD driver"
    path = shutil.which(program)
    if path is None:
        check = Check(
            name="gpu", level=WARN, value="a driver of AMD's, but no amd-smi", why=nvidia.WHY_UNSEEN, unseen=True,
            remedy="Install amd-smi-lib (it is part of ROCm), or add /opt/rocm/bin to PATH.",
        )  # fmt: skip
        return (check,), ""
    deadline = time.monotonic() + within_s
    metrics, problem = ask(path, "metric", deadline)
    if problem:
        check = Check(
            name="gpu", level=WARN, value=f"amd-smi metric: {problem}",
            why=f"{nvidia.WHY_UNSEEN} A driver that hangs, or has lost a GPU, lets nobody look.",
            remedy="See the kernel log for amdgpu's lines; the job's user must be in the groups render and video.",
            unseen=True,
        )  # fmt: skip
        return (check,), ""
    pages = ask(path, "bad-pages", deadline)[0]
    running = ask(path, "process", deadline)[0]
    checks = [check for number in sorted(metrics) for check in of(number, metrics[number], pages, running)]
    return tuple(checks), "" if checks else "amd-smi tells of no GPU"


def ask(path: str, question: str, deadline: float) -> tuple[dict[int, Card], str]:
    """The answer by GPU, or what happened instead."""
    left_s = deadline - time.monotonic()
    if left_s <= 0:
        return {}, "there was no time left to ask"
    _left[:] = [process for process in _left if process.poll() is None]
    if _left:
        return {}, f"process {_left[0].pid}, which was asked before, was killed and does not end"
    try:
        process = subprocess.Popen(
            [path, question, "--json"], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            errors="replace",
        )  # fmt: skip
    except OSError as error:
        return {}, str(error.strerror or error)
    try:
        told, complained = process.communicate(timeout=left_s)
    except subprocess.TimeoutExpired:
        _end(process)
        return {}, f"no answer within {left_s:.0f} s"
    try:
        plain = parsed(told)
    except ValueError:
        said = (complained.strip() or told.strip()).splitlines()
        return {}, said[-1][:160] if said else f"it ended with {process.returncode} and said nothing"
    if isinstance(plain, dict) and "error" in plain:
        return {}, str(plain["error"])[:160]
    return cards(plain), ""


def _end(process: subprocess.Popen[str]) -> None:
    """As far as that can be done: `subprocess.run` would wait for its end without a limit."""
    process.kill()
    for stream in (process.stdout, process.stderr):
        if stream is not None:
            stream.close()
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        _left.append(process)


def cards(plain: object) -> dict[int, Card]:
    """The GPUs of an answer by their number.

    >>> sorted(cards({"gpu_data": [{"gpu": 1}, {"gpu": 0}]})), sorted(cards([{"gpu": 3}])), cards("N/A")
    ([0, 1], [3], {})
    """
    rows = plain.get("gpu_data", ()) if isinstance(plain, Mapping) else plain
    listed = rows if isinstance(rows, list) else []
    return {row["gpu"]: row for row in listed if isinstance(row, Mapping) and isinstance(row.get("gpu"), int)}


def of(number: int, card: Card, pages: Mapping[int, Card], running: Mapping[int, Card]) -> Iterator[Check]:
    """One GPU. What it does not say gives nothing."""
    wrong = number_of(_section(card, "ecc").get("total_uncorrectable_count"))
    if wrong is not None:
        yield Check(
            name=f"gpu.{number}.ecc", level=FAIL if wrong else OK, value=f"{wrong:.0f} uncorrected errors", why=nvidia.WHY_ECC,
            remedy="Drain the node, reset the GPU (amd-smi reset -G), replace it if it comes again." if wrong else "",
            sign=Sign.GPU_BROKEN, kind=Kind.CUDA_ERROR,
        )  # fmt: skip
    if number in pages:
        yield from _pages(number, pages[number])
    yield from _clocks(number, card)
    yield from _memory(number, _section(card, "mem_usage"), running.get(number))


def _pages(number: int, card: Card) -> Iterator[Check]:
    """Pages of memory that have failed: put away, to be put away at the next reset, or in use where that cannot be done."""
    counted = {name: _listed(card.get(name)) for name in ("retired", "pending", "un_res")}
    if all(count is None for count in counted.values()):
        return
    retired, pending, stuck = (count or 0 for count in counted.values())
    said = (
        f"{retired} retired{f', {pending} pending' * bool(pending)}{f', {stuck} that cannot be retired' * bool(stuck)}"
    )
    yield Check(
        name=f"gpu.{number}.pages", level=FAIL if stuck else WARN if pending else OK, value=said, why=nvidia.WHY_ECC,
        remedy="Reset the GPU (pending) or replace it (pages that cannot be retired)." if stuck or pending else "",
        sign=Sign.GPU_BROKEN if stuck else None, kind=Kind.CUDA_ERROR,
    )  # fmt: skip


def _clocks(number: int, card: Card) -> Iterator[Check]:
    throttle, power = _section(card, "throttle"), _section(card, "power")
    told = {name: said for name in THROTTLED if (said := _word(throttle.get(name))) in {"ACTIVE", "NOT ACTIVE"}}
    old = _word(power.get("throttle_status"))  # MI200 and before do not tell why
    if not told and old not in {"THROTTLED", "UNTHROTTLED"}:
        return
    said = ", ".join(words for name, words in THROTTLED.items() if told.get(name) == "ACTIVE")
    said = said or ("throttled" if not told and old == "THROTTLED" else "")
    yield Check(
        name=f"gpu.{number}.clocks", level=WARN if said else OK, value=said or "not throttled", why=nvidia.WHY_CLOCKS,
        remedy="Look at cooling and power (amd-smi metric -t -p)." if said else "",
    )  # fmt: skip


def _memory(number: int, memory: Card, running: Card | None) -> Iterator[Check]:
    used, total = size_of(memory.get("used_vram")), size_of(memory.get("total_vram"))
    if used is None or total is None:
        return
    busy = None if running is None else len(_processes(running))
    left = busy == 0 and used > GIB
    yield Check(
        name=f"gpu.{number}.memory", level=WARN if left else OK,
        value=f"{gib(used)} of {gib(total)} used" + ("" if busy is None else f" by {busy} processes"), why=nvidia.WHY_MEMORY,
        remedy="Find the leftover (fuser -v /dev/kfd /dev/dri/render*), or reset the GPU." if left else "",
    )  # fmt: skip


def _processes(card: Card) -> list[object]:
    listed = card.get("process_list")
    rows = listed if isinstance(listed, list) else []
    return [
        row
        for row in rows
        if isinstance(row, Mapping) and _word(row.get("process_info", NOBODY)) not in {NOBODY, "N/A"}
    ]


def _section(card: Card, name: str) -> Card:
    found = card.get(name)
    return found if isinstance(found, Mapping) else {}


def _word(value: object) -> str:
    return value if isinstance(value, str) else ""


def _listed(value: object) -> int | None:
    """How many pages: a list, one alone, a sentence that there are none, or not known."""
    if isinstance(value, list):
        return len(value)
    if isinstance(value, Mapping):
        return 1
    return 0 if isinstance(value, str) and value.startswith("No bad pages") else None


def number_of(value: object) -> float | None:
    """A figure, with or without its unit.

    >>> number_of({"value": 41, "unit": "W"}), number_of(3), number_of("7"), number_of("N/A")
    (41.0, 3.0, 7.0, None)
    """
    plain = value.get("value") if isinstance(value, Mapping) else value
    if isinstance(plain, bool) or not isinstance(plain, int | float | str):
        return None
    try:
        return float(plain)
    except ValueError:
        return None


def size_of(value: object) -> float | None:
    """Bytes. Without a unit amd-smi means MB."""
    number = number_of(value)
    unit = str(value.get("unit", "MB")) if isinstance(value, Mapping) else "MB"
    return None if number is None else number * UNITS.get(unit, 1 << 20)
