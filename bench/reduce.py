"""What exactness costs: the whole training step of `replicated` against DistributedDataParallel, on 2 ranks.

    python bench/reduce.py [--json] [--steps 60] [--models small,medium] [--fsdp]

Both train the same model on the same samples in the same two processes and take turns, step by step, so that a noisy machine is
noisy for both. A step is everything from the first forward pass to parameters that the next one can use: forward, backward,
reduction, clipping, AdamW.
Each pair of neighbouring steps gives one ratio; shown are their median and its 95 % interval. CPU time, of all threads of rank
0, is shown beside it, since it suffers less from what else the machine is doing.
DDP runs its share of the batch in one pass, the faster way for it; with 4 lanes ours runs two passes of half the size. `ddp x2`
is DDP made to do the same two passes (no_sync for the first), which shows how much of the price is the smaller passes alone.

With --fsdp the other strategy is measured against plain FSDP2, which also reduces after each of its two passes; and, in
processes of their own, how much memory each side's training takes at its peak (ours keeps two versions of the state). Bytes
sent are the same by construction: an all-to-all of a pass's gradient is what its reduce-scatter sends; gloo's reduce-scatter,
an all-reduce, sends twice that.
"""

import argparse
import os
import random
import resource
import statistics
import sys
import time
import warnings
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.report import Watch, against, dump, interval
from elasticrl.runtime.fsdp import Fsdp
from elasticrl.runtime.group import form
from elasticrl.runtime.lanes import Deal
from elasticrl.runtime.optim import AdamW
from elasticrl.runtime.replicated import Replicated

WORLD = 2
MODELS = {  # width, layers, vocabulary, sequences in the global batch, their length
    "small": (128, 4, 512, 16, 32),
    "medium": (256, 6, 2048, 16, 32),
}


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.one, self.two = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.one(x)).view(batch, length, 3, 4, width // 4).permute(2, 0, 3, 1, 4)
        a = (
            functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            .transpose(1, 2)
            .reshape(batch, length, width)
        )
        x = x + self.out(a)
        return x + self.down(functional.gelu(self.up(self.two(x))))


def build(width: int, layers: int, vocabulary: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Embedding(vocabulary, width), *(Block(width) for _ in range(layers)), nn.Linear(width, vocabulary)
    )


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    logits = model(tokens[:, :-1])
    return functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def exact_side(lanes: int, rank: int, tokens: torch.Tensor, shape: tuple[int, int, int]):
    model = build(*shape)
    deal = Deal.contiguous(lanes, WORLD)
    strategy = Replicated(model, lambda _name: AdamW(), deal=deal, rank=rank, group=dist.group.WORLD)
    parts = tokens.chunk(lanes)

    def step() -> None:
        for turn in strategy.turns:
            strategy.begin(turn)
            loss_of(model, parts[turn.lane]).backward()
            strategy.done()
        strategy.update(scale=1 / lanes, max_norm=1.0)

    return step


def ddp_side(passes: int, rank: int, tokens: torch.Tensor, shape: tuple[int, int, int], *, fused: bool):
    model = nn.parallel.DistributedDataParallel(build(*shape), gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), fused=fused or None)
    parts = tokens.chunk(WORLD)[rank].chunk(passes)

    def step() -> None:
        for i, part in enumerate(parts):
            with nullcontext() if i == passes - 1 else model.no_sync():
                (loss_of(model, part) / passes).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def shard(model: nn.Module, mesh) -> nn.Module:
    for part in model:
        if isinstance(part, Block):
            fully_shard(part, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def fsdp_side(kind: str, rank: int, tokens: torch.Tensor, shape: tuple[int, int, int]):
    """Four lanes, or plain FSDP2 with two passes per rank."""
    parts = tokens.chunk(4)
    if kind == "plain":
        model = shard(build(*shape), init_device_mesh("cpu", (WORLD,)))
        optimizer = torch.optim.AdamW(model.parameters())

        def step() -> None:
            for part in (parts[2 * rank], parts[2 * rank + 1]):
                (loss_of(model, part) / 2).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

        return step
    deal = Deal.interleaved(4, WORLD) if kind == "interleaved" else Deal.contiguous(4, WORLD)
    strategy = Fsdp(
        lambda mesh: shard(build(*shape), mesh), lambda _name: AdamW(), deal=deal, rank=rank, group=dist.group.WORLD
    )

    def exact_step() -> None:
        for turn in strategy.turns:
            strategy.begin(turn)
            loss_of(strategy.model, parts[turn.lane]).backward()
            strategy.done()
        strategy.update(scale=1 / 4, max_norm=1.0)

    return exact_step


def sides_of(suite: str, rank: int, tokens: torch.Tensor, shape: tuple[int, int, int]) -> dict:
    if suite == "ddp":
        return {
            "ddp": lambda: ddp_side(1, rank, tokens, shape, fused=False),
            "ddp fused": lambda: ddp_side(1, rank, tokens, shape, fused=True),
            "ddp x2": lambda: ddp_side(2, rank, tokens, shape, fused=False),
            "exact, 2 lanes": lambda: exact_side(2, rank, tokens, shape),
            "exact, 4 lanes": lambda: exact_side(4, rank, tokens, shape),
        }
    return {
        "fsdp2": lambda: fsdp_side("plain", rank, tokens, shape),
        "exact, by round": lambda: fsdp_side("interleaved", rank, tokens, shape),
        "exact, by rank": lambda: fsdp_side("contiguous", rank, tokens, shape),
    }


def worker(rank: int, port: int, suite: str, model: str, steps: int, only: str | None, out) -> None:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message=".*returned a view tensor.*")  # of a model whose output nobody writes to
    store = dist.TCPStore("127.0.0.1", port, is_master=rank == 0, wait_for_workers=False)
    gang = form(generation=1, rank=rank, world=WORLD, store=store)
    width, layers, vocabulary, batch, length = MODELS[model]
    tokens = torch.randint(vocabulary, (batch, length + 1), generator=torch.Generator().manual_seed(1))
    shape = (width, layers, vocabulary)
    makers = sides_of(suite, rank, tokens, shape)
    build(*shape)  # what every side allocates once does not count for any
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    sides = {name: make() for name, make in makers.items() if only in (None, name)}
    times: dict[str, list[float]] = {name: [] for name in sides}
    cpu: dict[str, list[float]] = {name: [] for name in sides}
    order = random.Random(0)
    for step in range(steps + 5):
        for name in order.sample(sorted(sides), len(sides)):
            dist.barrier()
            begin, busy = time.perf_counter(), time.process_time()
            sides[name]()
            busy = time.process_time() - busy
            dist.barrier()  # a step is as long as the slower rank's
            if step >= 5:
                times[name].append(time.perf_counter() - begin)
                cpu[name].append(busy)
    peak = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    if rank == 0:
        out.put((sum(p.numel() for p in build(*shape).parameters()), times, cpu, peak))
    gang.leave()


def together(suite: str, model: str, steps: int, only: str | None = None):
    context = mp.get_context("spawn")
    out = context.SimpleQueue()
    port = random.SystemRandom().randrange(20000, 30000)
    running = mp.spawn(worker, args=(port, suite, model, steps, only, out), nprocs=WORLD, join=False)
    while not running.join(timeout=1) and out.empty():
        pass
    found = out.get()
    while not running.join(timeout=30):
        pass
    return found


def measure(suite: str, model: str, steps: int) -> dict:
    parameters, times, cpu, _ = together(suite, model, steps)
    base = next(iter(times))
    rows = {}
    for name, mine in times.items():
        ratios = [a / b for a, b in zip(mine, times[base], strict=True)]
        rows[name] = {
            "median_ms": 1e3 * statistics.median(mine),
            "range_ms": [1e3 * min(mine), 1e3 * max(mine)],
            "count": len(mine),
            "ratio": statistics.median(ratios),
            "ratio_95": interval(ratios),
            "cpu_ms": 1e3 * statistics.median(cpu[name]),
            "cpu_ratio": statistics.median(a / b for a, b in zip(cpu[name], cpu[base], strict=True)),
        }
        if suite == "fsdp":
            rows[name]["peak_mb"] = together(suite, model, 3, only=name)[3]
        rows[name]["verdict"] = verdict(name, rows[name])
    return {"suite": suite, "model": model, "parameters": parameters, "rows": rows}


TARGETS = {"exact, 2 lanes": 1.05, "exact, 4 lanes": 1.15}


def verdict(name: str, row: dict) -> str:
    if "peak_mb" in row:
        return f"peak {row['peak_mb']:.0f} MB"
    if name not in TARGETS:
        return ""
    return f"{against(row['ratio_95'], TARGETS[name])} (target {TARGETS[name]:.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--models", default="small,medium")
    parser.add_argument("--fsdp", action="store_true")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    watch, results = Watch(), []
    for model in options.models.split(","):
        results.append(measure("fsdp" if options.fsdp else "ddp", model, options.steps))
        watch.look()
    noise = watch.noise()
    if options.json:
        dump({"bench": "reduce", "results": results, "noise": noise, "machine": watch.machine()})
        return
    for result in results:
        print(f"\n{result['model']}: {result['parameters'] / 1e6:.2f} M parameters, {WORLD} ranks, 1 thread each")
        print(f"  {'':16} {'median':>9}  {'range':>19}  {'n':>4}  {'ratio':>6}  {'95 % of it':>14}  {'of cpu':>6}")
        for name, row in result["rows"].items():
            low, high = row["range_ms"]
            sure = "{:.3f} to {:.3f}".format(*row["ratio_95"]) if row["ratio_95"] else ""
            print(
                f"  {name:16} {row['median_ms']:6.1f} ms  {low:6.1f} to {high:6.1f} ms  {row['count']:4}  {row['ratio']:6.3f}"
                f"  {sure:>14}  {row['cpu_ratio']:6.3f}  {row['verdict']}"
            )
    machine = watch.machine()
    print(f"\n{machine['cores']} cores, load {machine['load']:.1f} before, torch {machine['torch']}")
    if noise:
        print(noise)


if __name__ == "__main__":
    sys.exit(main())
