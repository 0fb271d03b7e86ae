"""What keeping state costs the training thread: our vault and background saves beside torch.save, dcp.save and dcp.async_save.

    python bench/checkpoint.py [--json] [--cycles 2] [--rounds 3] [--step-s 2] [--params 99500000] [--dir /tmp]

A side is one way to save, in a process of its own that trains on one thread: an AdamW update of all parameters in place, then
matrix products for about `--step-s` seconds; it saves after every update. *Stall* is the time the training thread spends in
saving or waiting for it, the wait before the next update included; *step* is the whole step, so it also shows what copying,
checksums and transfers take from the training core and its memory. A process takes turns between its side and plain steps;
shown is the median of the ratios to the plain step just before, with its 95 % interval (fewer than six ratios have none). What
a side leaves running is drained before the next plain step, untimed. Sides run one after the other, in another order in each
cycle, because each holds several copies of the state: none needs more than 6 GB at the default size, and *memory* is the most
that it had.

`vault + buddy` keeps what a worker of a gang of two keeps, half of the state, sends every version to a second vault server on
this machine (both ends on these cores) and lets no update begin before the copy is sealed there. `vault + disk` also has
versions written to disk by the background process, the next one as soon as the last one is there.
"""

import argparse
import json
import os
import random
import select
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from math import isnan
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.report import Watch, dump, interval, summary
from elasticrl.runtime.checkpoint.manifest import Conditions
from elasticrl.runtime.checkpoint.parts import Ambient, Parts
from elasticrl.runtime.checkpoint.saver import Outcome, Saver
from elasticrl.runtime.vault.client import Ticket, Vault
from elasticrl.runtime.vault.version import Version

WIDTH = 768
BLOCK = 12 * WIDTH * WIDTH  # parameters of a block of six matrices
GOALS = {"stall_vs_async_save": 0.1, "share_of_wall": 0.02}
STEADY = 0.1  # how far plain steps may vary
LIMIT_S = 120.0
SIDE_S = 1200.0  # one process of one side
NEED = 60.0  # bytes of memory for each parameter, and
NEED_FIXED = 0.5e9  # for the interpreters


class Trainer:
    """About `params` parameters, AdamW, and some work to do between updates."""

    def __init__(self, params: int, step_s: float) -> None:
        torch.manual_seed(0)
        layers: list[nn.Module] = []
        for _ in range(max(params // BLOCK, 1)):
            layers += [nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)]
            layers += [nn.Linear(WIDTH, WIDTH) for _ in range(4)]
        self.model = nn.Sequential(*layers)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-6, fused=True)
        # One gradient stands for all: they are no part of the state, and their memory is not what is measured.
        grad = torch.full((max(p.numel() for p in self.model.parameters()),), 1e-3)
        for parameter in self.model.parameters():
            parameter.grad = grad[: parameter.numel()].view_as(parameter)
        self.update()
        self.work = torch.randn(WIDTH, WIDTH)
        alone = min(self._time(20) for _ in range(5)) / 20
        self.products = max(int(step_s / alone), 1)

    @property
    def nbytes(self) -> int:
        state = [*self.model.parameters(), *(t for s in self.optimizer.state.values() for t in s.values())]
        return sum(t.numel() * t.element_size() for t in state)

    def update(self) -> None:
        self.optimizer.step()

    def compute(self) -> None:
        self._time(self.products)

    def _time(self, products: int) -> float:
        began = time.perf_counter()
        x = self.work
        for _ in range(products):
            x = torch.mm(x, self.work).mul_(0.01)
        return time.perf_counter() - began

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}


class Side:
    """One way to save. The base saves nothing."""

    warm = 2  # steps before it is measured
    share = 1.0  # of the state that it keeps

    def __init__(self, trainer: Trainer, root: Path) -> None:
        self.trainer = trainer
        self.root = root
        self.count = 0

    def after_update(self) -> None:
        """Parameters will not change until `before_update`."""

    def before_update(self) -> None:
        """Parameters are about to change."""

    def drain(self) -> None:
        """Untimed: let nothing run on, leave nothing behind."""

    def close(self) -> None:
        """The bench is over."""

    def path(self) -> Path:
        self.count += 1
        return self.root / f"{type(self).__name__}-{self.count}"


class VaultSide(Side):
    """A snapshot of every step."""

    warm = 5  # until every file here and at the buddy has its memory

    def __init__(self, trainer: Trainer, root: Path, *, buddy: bool = False, disk: bool = False) -> None:
        super().__init__(trainer, root)
        self.shared = Path(tempfile.mkdtemp(prefix="elasticrl-bench-", dir="/dev/shm"))
        self.servers: list[subprocess.Popen[str]] = []
        if buddy:
            addresses = [self._serve(node) for node in ("n0", "n1")]
        # With a reader on the disk's side one version is kept instead of two: that is a file less in memory, and no other wait.
        self.vault = Vault(self.shared / "n0", job="bench", node="n0", keep=1 if disk else 2, deadline_s=LIMIT_S)
        if buddy:
            ring = {"nodes": ["n0", "n1"], "addresses": dict(zip(("n0", "n1"), addresses, strict=True))}
            self.vault.control.ask("ring", generation=1, copies=1, **ring)
        self.buddy = buddy
        self.saver = Saver(str(root / f"disk-{disk}"), facts=Conditions()) if disk else None
        self.parts = Parts(model=trainer.model, optimizer=trainer.optimizer, ambient=Ambient())
        self.world = 2 if buddy else 1
        self.share = 1 / self.world
        self.ticket: Ticket | None = None
        self.saves = 0

    def _serve(self, node: str) -> str:
        command = [sys.executable, "-m", "elasticrl.runtime.vault", "--job", "bench", "--node", node]
        key = self.shared / f"{node}.key"
        key.touch(0o600)
        key.write_text("a key for benches, 32 bytes long")
        command += ["--dir", str(self.shared / node), "--listen", "127.0.0.1:0", "--key-file", str(key)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self.servers.append(process)
        assert process.stdout is not None
        assert select.select([process.stdout], [], [], 30)[0], "the vault server did not start"
        return f"127.0.0.1:{json.loads(process.stdout.readline())['port']}"

    def after_update(self) -> None:
        self.count += 1
        content = self.parts.capture(0, self.world)
        self.ticket = self.vault.snapshot(content, version=Version(self.count), generation=1, shard=0, world=self.world)

    def before_update(self) -> None:
        if self.ticket is None:
            return
        if self.buddy:
            self.vault.wait_copied(self.ticket, LIMIT_S)
        self.vault.settle(LIMIT_S)
        if self.saver is not None:
            self.outcomes(self.saver.poll())
            if self.saver.busy_s == 0.0 and self.ticket.done:
                self.saver.save(self.ticket, finish=True)
        self.ticket = None

    def outcomes(self, found: tuple[Outcome, ...]) -> None:
        for outcome in found:
            assert outcome.ok, outcome.why
            self.saves += 1

    def drain(self) -> None:
        if self.saver is not None:
            self.outcomes(self.saver.wait(LIMIT_S))
            assert self.saves, "nothing was written to disk"
            shutil.rmtree(self.saver.where, ignore_errors=True)

    def close(self) -> None:
        if self.saver is not None:
            self.saver.close()
        self.vault.close()
        for process in self.servers:
            process.terminate()
            process.wait(20)
            if process.stdout is not None:
                process.stdout.close()
        shutil.rmtree(self.shared, ignore_errors=True)


class TorchSave(Side):
    def after_update(self) -> None:
        torch.save(self.trainer.state(), self.path())

    def drain(self) -> None:
        os.sync()
        (self.root / f"{type(self).__name__}-{self.count}").unlink(missing_ok=True)


class DcpSave(Side):
    def after_update(self) -> None:
        dcp.save(self.trainer.state(), checkpoint_id=self.path())

    def drain(self) -> None:
        shutil.rmtree(self.root / f"{type(self).__name__}-{self.count}", ignore_errors=True)


class DcpAsync(Side):
    """Its copy is made within the call; the save before must have ended, as it insists itself."""

    def __init__(self, trainer: Trainer, root: Path, *, reuse: bool = False) -> None:
        super().__init__(trainer, root)
        options = StagingOptions(
            use_pinned_memory=False, use_shared_memory=True, use_async_staging=False, use_non_blocking_copy=False
        )
        self.stager = DefaultStager(options) if reuse else None
        self.future: Any = None

    def after_update(self) -> None:
        if self.future is not None:
            self.future.result(LIMIT_S)
        self.future = dcp.async_save(self.trainer.state(), checkpoint_id=self.path(), async_stager=self.stager)

    def drain(self) -> None:
        if self.future is not None:
            self.future.result(LIMIT_S)
            self.future = None
        shutil.rmtree(self.root, ignore_errors=True)
        self.root.mkdir()

    def close(self) -> None:
        if self.stager is not None:
            self.stager.close()


SIDES: dict[str, Callable[[Trainer, Path], Side]] = {
    "vault": VaultSide,
    "vault + buddy": lambda trainer, at: VaultSide(trainer, at, buddy=True),
    "vault + disk": lambda trainer, at: VaultSide(trainer, at, disk=True),
    "dcp.async_save (reusing)": lambda trainer, at: DcpAsync(trainer, at, reuse=True),
    "dcp.async_save": DcpAsync,
    "dcp.save": DcpSave,
    "torch.save": TorchSave,
}


def run(trainer: Trainer, side: Side, steps: int) -> tuple[list[float], list[float]]:
    """Stall and whole time of each step. A step begins when its update may, and ends when the next one's may."""
    stalls, walls = [], []
    for _ in range(steps):
        began = time.perf_counter()
        trainer.update()
        updated = time.perf_counter()
        side.after_update()
        saved = time.perf_counter()
        trainer.compute()
        computed = time.perf_counter()
        side.before_update()
        ended = time.perf_counter()
        stalls.append(saved - updated + ended - computed)
        walls.append(ended - began)
    return stalls, walls


def one_side(args: argparse.Namespace) -> dict[str, Any]:
    """One side, step by step beside plain steps: what its process does."""
    torch.set_num_threads(1)
    trainer = Trainer(args.params, args.step_s)
    root = Path(tempfile.mkdtemp(prefix="elasticrl-bench-", dir=args.dir))
    side, plain = SIDES[args.one](trainer, root / "side"), Side(trainer, root)
    side.root.mkdir(exist_ok=True)
    stalls: list[float] = []
    walls: list[float] = []
    ratios: list[float] = []
    bare: list[float] = []
    try:
        first = run(trainer, side, 1)[0][0]  # pays for memory that later ones use again
        run(trainer, side, side.warm - 1)
        side.drain()
        for _ in range(args.rounds):
            beside = statistics.median(run(trainer, plain, 1)[1])
            stall, wall = run(trainer, side, args.steps)
            side.drain()
            bare.append(beside)
            stalls += stall
            walls += wall
            ratios.append(statistics.median(wall) / beside)
    finally:
        side.close()
        shutil.rmtree(root, ignore_errors=True)
    return {
        "nbytes": trainer.nbytes,
        "share": side.share,
        "first": first,
        "stalls": stalls,
        "walls": walls,
        "ratios": ratios,
        "bare": bare,
    }


def in_a_process(args: argparse.Namespace, name: str) -> dict[str, Any]:
    """One side in a process of its own, and the most memory that it and its helpers had."""
    command = [sys.executable, __file__, "--one", name, "--dir", args.dir]
    for option in ("params", "rounds", "steps"):
        command += [f"--{option}", str(getattr(args, option))]
    process = subprocess.Popen([*command, "--step-s", str(args.step_s)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    limit, peak = time.monotonic() + SIDE_S, 0
    try:
        while not select.select([process.stdout], [], [], 0.2)[0]:
            peak = max(peak, memory_of(process.pid))
            assert time.monotonic() < limit, f"{name} has not ended within {SIDE_S:g} s"
        found = json.loads(process.stdout.read())
        process.wait(30)
    finally:
        if process.poll() is None:
            process.terminate()  # it removes its shared memory
            process.wait(30)
        process.stdout.close()
    return {**found, "memory": peak}


def memory_of(pid: int) -> int:
    """Bytes that a process and those that it started have: each one's own, and once what they share."""
    own, shared = 0, 0
    todo = [pid]
    while todo:
        one = Path(f"/proc/{todo.pop()}")
        try:
            words = dict(line.split(":", 1) for line in (one / "status").read_text().splitlines() if ":" in line)
            todo += [
                int(child) for task in (one / "task").iterdir() for child in (task / "children").read_text().split()
            ]
        except OSError:
            continue  # it has just ended
        own += 1024 * int(words.get("RssAnon", "0").split()[0])
        shared = max(shared, 1024 * int(words.get("RssShmem", "0").split()[0]))
    folders = Path("/dev/shm").glob("elasticrl-bench-*/*/*.shard")
    return own + max(shared, sum(_allocated(path) for path in folders))


def _allocated(path: Path) -> int:
    try:
        return 512 * path.stat().st_blocks
    except OSError:
        return 0


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """All sides, in `--cycles` rounds of processes."""
    watch = Watch()
    chosen = [name for name in SIDES if not args.sides or name in args.sides.split(",")]
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in chosen}
    order = random.Random(0)
    for _ in range(args.cycles):
        for name in order.sample(chosen, len(chosen)):
            found[name].append(in_a_process(args, name))
            watch.look()
    results = {name: row_of(parts) for name, parts in found.items()}
    spread = [row["plain_s"]["max"] / row["plain_s"]["min"] - 1 for row in results.values()]
    return {
        "bench": "checkpoint",
        "nbytes": found[chosen[0]][0]["nbytes"],
        "step_s": statistics.median(row["plain_s"]["median"] for row in results.values()),
        "sides": results,
        "goals": goals(results),
        "spread": statistics.median(spread),
        "noise": "; ".join(filter(None, [watch.noise(), unsteady(statistics.median(spread))])),
        "machine": {**watch.machine(), "disk": args.dir},
    }


def unsteady(spread: float) -> str:
    """A warning when plain steps, which are alike, were not."""
    said = f"plain steps vary by {100 * spread:.0f} %: too noisy to tell differences of whole steps below that"
    return said if spread > STEADY else ""


def row_of(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """One side's processes as one row."""
    stalls, walls, ratios, bare = (
        [value for part in parts for value in part[key]] for key in ("stalls", "walls", "ratios", "bare")
    )
    return {
        "share": parts[0]["share"],
        "stall_s": summary(stalls),
        "first_stall_s": statistics.median(part["first"] for part in parts),
        "step_s": summary(walls),
        "plain_s": summary(bare),
        "slowdown": {"median": statistics.median(ratios), "ratio_95": interval(ratios)},
        "share_of_wall": statistics.median(s / w for s, w in zip(stalls, walls, strict=True)),
        "memory": max(part["memory"] for part in parts),
    }


def goals(results: dict[str, Any]) -> dict[str, Any]:
    """Against the better of torch's two asynchronous savers, byte for byte."""
    best = min((v["stall_s"]["median"] for k, v in results.items() if k.startswith("dcp.async")), default=float("nan"))
    found = {}
    for name in (name for name in results if name.startswith("vault")):
        ratio = results[name]["stall_s"]["median"] / (best * results[name]["share"])
        share = results[name]["share_of_wall"]
        reached = ratio <= GOALS["stall_vs_async_save"] and share <= GOALS["share_of_wall"]
        found[name] = {
            "stall_vs_async_save": ratio,
            "share_of_wall": share,
            "verdict": "reached" if reached else "nothing to compare with" if isnan(ratio) else "NOT reached",
        }
    return found


def show(found: dict[str, Any]) -> None:
    print(f"{found['nbytes'] / 1e9:.2f} GB of state, a plain step takes {found['step_s']:.2f} s\n")
    head = f"{'every step':32} {'stall':>10} {'range':>19} {'first':>9} {'of wall':>8} {'whole step':>11} {'95 %':>13}"
    print(f"{head} {'memory':>8}")
    for name, row in found["sides"].items():
        stall, slow = row["stall_s"], row["slowdown"]
        sure = "{:.3f}-{:.3f}".format(*slow["ratio_95"]) if slow["ratio_95"] else "too few"
        print(
            f"{name:32} {1e3 * stall['median']:7.1f} ms {1e3 * stall['min']:7.1f} - {1e3 * stall['max']:6.0f} ms "
            f"{1e3 * row['first_stall_s']:6.0f} ms {100 * row['share_of_wall']:6.2f} % {slow['median']:9.3f} x "
            f"{sure:>13} {row['memory'] / 1e9:5.1f} GB"
        )
    print("\ngoals: at most a tenth of dcp.async_save's stall, at most 2 % of the wall")
    for name, row in found["goals"].items():
        print(f"  {name}: {row['stall_vs_async_save']:.3f} of it, {100 * row['share_of_wall']:.2f} %: {row['verdict']}")
    machine = found["machine"]
    print(
        f"\n{machine['cores']} cores, load {machine['load']:.1f} before and {machine['load_after']:.1f} after, "
        f"torch {machine['torch']}"
    )
    if found["noise"]:
        print(found["noise"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--params", type=int, default=99_500_000)
    parser.add_argument("--cycles", type=int, default=2, help="processes of each side")
    parser.add_argument("--rounds", type=int, default=3, help="in a process: a plain step, and then the side's")
    parser.add_argument("--steps", type=int, default=2, help="steps of a side in a round")
    parser.add_argument("--step-s", type=float, default=2.0)
    parser.add_argument("--sides", default="", help=f"only these, separated by commas, of: {', '.join(SIDES)}")
    parser.add_argument("--dir", default=tempfile.gettempdir(), help="where the disk is that checkpoints go to")
    parser.add_argument("--one", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that a gigabyte of shared memory is not left behind
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    if args.one:
        print(json.dumps(one_side(args)))
        return
    if unknown := sorted(set(filter(None, args.sides.split(","))) - SIDES.keys()):
        sys.exit(f"there is no side {unknown[0]!r}; there are: {', '.join(SIDES)}")
    need, available = NEED * args.params + NEED_FIXED, available_memory()
    if available < need:
        sys.exit(
            f"{args.params:,} parameters need about {need / 1e9:.1f} GB of memory, and {available / 1e9:.1f} GB are "
            f"available: take --params {int(max(available - NEED_FIXED, 0) / NEED / 1e6)}000000"
        )
    found = measure(args)
    if args.json:
        dump(found)
    else:
        show(found)


def available_memory() -> float:
    """Bytes that can be had without pushing anybody out."""
    words = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    return 1024.0 * int(words["MemAvailable"].split()[0])


if __name__ == "__main__":
    main()
