"""What exactness costs: the whole training step of `replicated` against DistributedDataParallel, on 2 ranks.

    python bench/reduce.py [--json] [--steps 60] [--models small,medium]

Both train the same model on the same samples in the same two processes and take turns, step by step, so that a noisy machine is
noisy for both. A step is everything from the first forward pass to parameters that the next one can use: forward, backward,
reduction, clipping, AdamW.
Each pair of neighbouring steps gives one ratio; shown are their median and its 95 % interval. CPU time, of all threads of rank
0, is shown beside it, since it suffers less from what else the machine is doing.
DDP runs its share of the batch in one pass, the faster way for it; with 4 lanes ours runs two passes of half the size. `ddp x2`
is DDP made to do the same two passes (no_sync for the first), which shows how much of the price is the smaller passes alone.
"""

import argparse
import json
import os
import platform
import random
import statistics
import sys
import time
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn import functional

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


def worker(rank: int, port: int, model: str, steps: int, out) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=rank == 0, wait_for_workers=False)
    gang = form(generation=1, rank=rank, world=WORLD, store=store)
    width, layers, vocabulary, batch, length = MODELS[model]
    tokens = torch.randint(vocabulary, (batch, length + 1), generator=torch.Generator().manual_seed(1))
    shape = (width, layers, vocabulary)
    sides = {
        "ddp": ddp_side(1, rank, tokens, shape, fused=False),
        "ddp fused": ddp_side(1, rank, tokens, shape, fused=True),
        "ddp x2": ddp_side(2, rank, tokens, shape, fused=False),
        "exact, 2 lanes": exact_side(2, rank, tokens, shape),
        "exact, 4 lanes": exact_side(4, rank, tokens, shape),
    }
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
    if rank == 0:
        out.put((sum(p.numel() for p in build(*shape).parameters()), times, cpu))
    gang.leave()


def interval(values: list[float]) -> tuple[float, float]:
    """95 % of the median, by order statistics."""
    values = sorted(values)
    n = len(values)
    half = 0.98 * n**0.5
    return values[max(0, int(n / 2 - half))], values[min(n - 1, int(n / 2 + half))]


def measure(model: str, steps: int) -> dict:
    context = mp.get_context("spawn")
    out = context.SimpleQueue()
    port = random.SystemRandom().randrange(20000, 30000)
    running = mp.spawn(worker, args=(port, model, steps, out), nprocs=WORLD, join=False)
    while not running.join(timeout=1) and out.empty():
        pass
    parameters, times, cpu = out.get()
    while not running.join(timeout=30):
        pass
    rows = {}
    for name, mine in times.items():
        ratios = [a / b for a, b in zip(mine, times["ddp"], strict=True)]
        low, high = interval(ratios)
        rows[name] = {
            "median_ms": 1e3 * statistics.median(mine),
            "range_ms": [1e3 * min(mine), 1e3 * max(mine)],
            "count": len(mine),
            "ratio": statistics.median(ratios),
            "ratio_95": [low, high],
            "cpu_ms": 1e3 * statistics.median(cpu[name]),
            "cpu_ratio": statistics.median(a / b for a, b in zip(cpu[name], cpu["ddp"], strict=True)),
        }
    return {"model": model, "parameters": parameters, "rows": rows}


TARGETS = {"exact, 2 lanes": 1.05, "exact, 4 lanes": 1.15}


def verdict(name: str, row: dict) -> str:
    if name not in TARGETS:
        return ""
    low, high = row["ratio_95"]
    if low <= TARGETS[name] < high and row["ratio"] > TARGETS[name]:
        return f"too noisy to tell (target {TARGETS[name]:.2f})"
    return f"{'met' if row['ratio'] <= TARGETS[name] else 'MISSED'} (target {TARGETS[name]:.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--models", default="small,medium")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    load = os.getloadavg()[0]
    results = [measure(model, options.steps) for model in options.models.split(",")]
    machine = {
        "cores": os.cpu_count(),
        "load_before": load,
        "load_after": os.getloadavg()[0],
        "cpu": platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    if options.json:
        print(json.dumps({"bench": "reduce", "machine": machine, "results": results}))
        return
    for result in results:
        print(f"\n{result['model']}: {result['parameters'] / 1e6:.2f} M parameters, {WORLD} ranks, 1 thread each")
        print(
            f"  {'':16} {'median':>9}  {'range':>19}  {'n':>4}  {'of ddp':>6}  {'95 % of it':>14}  {'cpu of ddp':>10}"
        )
        for name, row in result["rows"].items():
            low, high = row["range_ms"]
            a, b = row["ratio_95"]
            print(
                f"  {name:16} {row['median_ms']:6.1f} ms  {low:6.1f} to {high:6.1f} ms  {row['count']:4}  {row['ratio']:6.3f}"
                f"  {a:.3f} to {b:.3f}  {row['cpu_ratio']:10.3f}  {verdict(name, row)}"
            )
    print(f"\n{machine['cores']} cores, load {load:.1f} before, torch {machine['torch']}")


if __name__ == "__main__":
    sys.exit(main())
