"""How weights get from a trainer to an engine: from each layout of training to engines of each width, bucket by bucket.

    python bench/switch.py [--layouts dp,fsdp,tp,tp-fsdp,ep] [--engines 1,2] [--rounds 3] [--bucket 512MiB] [--json]

Random models of about 1e8 parameters in float32, sent as bfloat16: a Llama, and for `ep` a mixture (Qwen3-MoE) whose experts a
team has dealt. Each layout has real processes over gloo that put one bucket at a time together and write it where an engine
finds it, as `elasticrl.ppo` does (`ppo/rollout/weights.py`): one rank writes, the others join. Then an engine reads the set,
bucket by bucket, with checksums; of one of several workers wide each worker keeps its part of each tensor.

Shown are the seconds of the writing and of the reading, the bytes that the writer gets from others, and the peak memory beyond
what a process had before (an engine has its own part of the weights before), of the writer and of the largest of the others.
With a bucket as large as the model that is what it would be to put the model together on one rank: `--bucket 1TiB`.
"""

import argparse
import random
import re
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any, Self

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.report import Watch, dump, end_cleanly, show, some_of, summary
from elasticrl.config.units import parse_size

TP = 2
LLAMA = {
    "vocab_size": 16384, "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 6, "num_attention_heads": 16,
    "num_key_value_heads": 8, "tie_word_embeddings": False,
}  # fmt: skip
MIXTURE = {
    "vocab_size": 16384, "hidden_size": 512, "intermediate_size": 1536, "moe_intermediate_size": 768, "num_hidden_layers": 2,
    "num_attention_heads": 8, "num_key_value_heads": 4, "num_experts": 32, "num_experts_per_tok": 2, "head_dim": 64,
    "tie_word_embeddings": False,
}  # fmt: skip
WORLDS = {"dp": 2, "fsdp": 2, "tp": 2, "tp-fsdp": 4, "ep": 2}
LIMIT = timedelta(minutes=5)
#: Along which dimension an engine's workers share a tensor, by its name; what is not named each of them has.
SHARED = {r"(q|k|v|gate|up)_proj|embed_tokens|lm_head|experts": 0, r"(o|down)_proj\.weight$": 1}


def built(layout: str, mesh: Any) -> Any:
    """The model in a layout."""
    import torch
    import transformers
    from torch.distributed.fsdp import fully_shard

    from elasticrl.runtime.planned import share

    torch.manual_seed(0)
    kind, sizes = ("qwen3_moe", MIXTURE) if layout == "ep" else ("llama", LLAMA)
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(kind, **sizes))
    if layout in ("tp", "tp-fsdp", "ep"):
        share(model, mesh)
    if layout in ("fsdp", "tp-fsdp"):
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])
    return model


class Peak:
    """Bytes that a process had at most beyond what it had at the beginning, by the kernel's count."""

    def __enter__(self) -> Self:
        Path("/proc/self/clear_refs").write_text("5")
        self._before = self._of("VmRSS")
        return self

    def __exit__(self, *_: object) -> None:
        self.nbytes = max(0, self._of("VmHWM") - self._before)

    @staticmethod
    def _of(name: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * int(next(line.split()[1] for line in lines if line.startswith(f"{name}:")))


def train(rank: int, port: int, layout: str, home: str, rounds: int, bucket: int, out: Any) -> None:
    """One rank of a layout: it sends its weights so often."""
    import torch
    import torch.distributed as dist

    from elasticrl.ppo.rollout import weights
    from elasticrl.runtime.group import form
    from elasticrl.runtime.team import ACROSS, form_team

    torch.set_num_threads(1)
    world, received = WORLDS[layout], 0
    store = dist.TCPStore("127.0.0.1", port, is_master=rank == 0, wait_for_workers=False)
    gang = form(generation=1, rank=rank, world=world, store=store)
    if layout in ("dp", "fsdp"):
        mesh = dist.device_mesh.init_device_mesh("cpu", (world,), mesh_dim_names=(ACROSS,))
    else:
        team = form_team(gang.group, TP, form_s=LIMIT, limit=LIMIT)
        mesh = team.grid("cpu") if layout == "tp-fsdp" else team.mesh("cpu")
    model, gathers = built(layout, mesh), weights.all_gather_single

    def counted(whole: torch.Tensor, mine: torch.Tensor, **named: Any) -> Any:
        nonlocal received
        received += (whole.numel() - mine.numel()) * mine.element_size()
        return gathers(whole, mine, **named)

    weights.all_gather_single = counted
    for number in range(rounds):
        received = 0
        dist.barrier()
        with Peak() as peak:
            begun = time.perf_counter()
            parts = weights.buckets(model, nbytes=bucket, dtype=torch.bfloat16, kept=rank == 0)
            if rank == 0:
                nbytes = weights.write(Path(home), weights.Tag(life="1", version=number), parts, within_s=60.0)
            else:
                nbytes = sum(1 for _ in parts) * 0
            took = time.perf_counter() - begun
        out.put({"rank": rank, "took": took, "peak": peak.nbytes, "received": received, "nbytes": nbytes})
    if rank == 0:
        out.put({"parameters": sum(param.numel() for param in model.parameters())})
    gang.leave()


def part_of(name: str, shape: Sequence[int], rank: int, width: int) -> tuple[int, int, int]:
    """Which of a tensor one of so many workers has: along which dimension, from where, how much.

    >>> part_of("model.layers.0.self_attn.q_proj.weight", (8, 4), 1, 2), part_of("model.norm.weight", (4,), 1, 2)
    ((0, 4, 4), (0, 0, 4))
    """
    dim = next((dim for pattern, dim in SHARED.items() if re.search(pattern, name)), None)
    if dim is None or shape[dim] % width:
        return 0, 0, shape[0]
    return dim, rank * (shape[dim] // width), shape[dim] // width


def take(rank: int, width: int, home: str, version: int, out: Any) -> None:
    """One worker of an engine: it has room for its part, and reads the set into it."""
    import torch

    from elasticrl.ppo.rollout import weights

    torch.set_num_threads(1)
    tag, parts = weights.Tag(life="1", version=version), dict[str, torch.Tensor]()
    for number in range(2):  # the first time makes the room
        with Peak() as peak:
            begun = time.perf_counter()
            for name, tensor in weights.read(Path(home), tag, within_s=60.0):
                mine = tensor.narrow(*part_of(name, tensor.shape, rank, width))
                if number == 0:
                    parts[name] = mine.clone(memory_format=torch.contiguous_format)
                else:
                    parts[name].copy_(mine)
            took = time.perf_counter() - begun
    own = sum(part.numel() * part.element_size() for part in parts.values())
    out.put({"rank": rank, "took": took, "peak": peak.nbytes, "own": own})


def together(work: Any, count: int, *args: Any) -> list[dict[str, Any]]:
    """What so many processes say."""
    import torch.multiprocessing as mp

    context = mp.get_context("spawn")
    out = context.Queue()
    running = mp.spawn(work, args=(*args, out), nprocs=count, join=False)
    said = list[dict[str, Any]]()
    while not running.join(timeout=0.2):
        while not out.empty():
            said.append(out.get())
    while not out.empty():
        said.append(out.get())
    return said


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Of one layout."""

    layout: str
    parameters: int
    nbytes: int
    writes: Sequence[float]  # of each round, until the writer is through
    received: int  # by the writer
    peaks: tuple[int, int]  # of the writer, and of the largest of the others
    reads: Mapping[
        int, tuple[float, int, int]
    ]  # by the engine's width: seconds, peak of the largest worker, its own part


def measure(layout: str, engines: Sequence[int], rounds: int, bucket: int) -> Found:
    """A layout, and all engines."""
    shm = Path("/dev/shm")
    with tempfile.TemporaryDirectory(prefix="bench-switch-", dir=shm if shm.is_dir() else None) as home:
        port = random.SystemRandom().randrange(20000, 30000)
        said = together(train, WORLDS[layout], port, layout, home, rounds + 1, bucket)
        parameters = next(one["parameters"] for one in said if "parameters" in one)
        said = [one for one in said if "rank" in one]
        mine = [one for one in said if one["rank"] == 0][1:]  # the first makes the file
        others = [[one["peak"] for one in said if one["rank"] == rank][1:] for rank in range(1, WORLDS[layout])]
        reads = {}
        for width in engines:
            read = together(take, width, width, home, rounds)
            reads[width] = (max(r["took"] for r in read), max(r["peak"] for r in read), max(r["own"] for r in read))
    return Found(
        layout=layout, parameters=parameters, nbytes=mine[0]["nbytes"], writes=[one["took"] for one in mine],
        received=mine[0]["received"],
        peaks=(max(one["peak"] for one in mine), max(map(max, others))), reads=reads,
    )  # fmt: skip


def main() -> int:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layouts", default=",".join(WORLDS), type=some_of(WORLDS))
    parser.add_argument("--engines", default="1,2")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--bucket", default="64MiB")
    parser.add_argument("--json", action="store_true")
    end_cleanly()
    options = parser.parse_args()
    engines, watch = [int(word) for word in options.engines.split(",")], Watch()
    found = []
    for layout in options.layouts:
        found.append(measure(layout, engines, options.rounds, parse_size(options.bucket)))
        watch.look()
    noise = watch.noise()
    if options.json:
        results = [
            {
                "layout": each.layout, "parameters": each.parameters, "bytes": each.nbytes, "write_s": summary(each.writes),
                "received": each.received, "peak": each.peaks,
                "engines": {w: dict(zip(("read_s", "peak", "own"), read, strict=True)) for w, read in each.reads.items()},
            }
            for each in found
        ]  # fmt: skip
        dump(
            {
                "bench": "switch",
                "bucket": options.bucket,
                "results": results,
                "noise": noise,
                "machine": watch.machine(),
            }
        )
        return 0
    rows = [
        (
            each.layout, str(WORLDS[each.layout]), f"{each.nbytes / 1e6:.0f} MB", f"{median(each.writes):.2f} s",
            f"{each.received / 1e6:.0f} MB", *(f"{peak / 1e6:.0f} MB" for peak in each.peaks),
            *(f"{took:.2f} s, {peak / 1e6:.0f} MB" for took, peak, _ in each.reads.values()),
        )
        for each in found
    ]  # fmt: skip
    title = f"{found[0].parameters / 1e6:.0f} million parameters, buckets of {options.bucket}"
    heads = ("layout", "ranks", "sent", "written in", "received", "writer's peak", "others' peak")
    show(title, (*heads, *(f"engine of {w}: read, peak" for w in engines)), rows, [noise] if noise else [])
    return 0


if __name__ == "__main__":
    sys.exit(main())
