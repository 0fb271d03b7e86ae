"""What teams cost a step: a Llama that two workers share under elasticrl, beside torch's own `parallelize_module` and FSDP2.

    python bench/teams.py [--teams 1,2] [--rounds 6] [--swaps 4] [--turn 2.0] [--sides daemon-each,plain] [--json]   (as root)

The same Llama (6 million parameters, float32), the same batch in one pass for each team, AdamW, clipping, one thread in each
worker, gloo. With one team it is tensor parallel over two processes; with two teams, four processes, FSDP2 cuts it further.
`daemon-each` is a script of level exact under a node's daemon, with agent, vault and etcd beside it, at the default keeping of
state; `daemon` keeps the state every 8 steps. `plain` is torch's own loop under torchrun: the same plan by hand, fused AdamW.

The two sides take turns on the same processors and are frozen in between, as bench/cost.py does it and says why. Shown is, of
all rounds, the median of what a step takes the first side by what it takes the other: time, and the processors' time. That both
train the same is checked by the gradient's norm of their first step.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench import cost, ppo
from bench.report import Watch, dump, end_cleanly, show, some_of, summary

ROOT = Path(__file__).parents[1]
HOW, HISTORY = "TEAMS_BENCH_HOW", "TEAMS_BENCH_HISTORY"  # what this file is run for
SIDES = ("daemon", "daemon-each", "plain")
TP = 2
SIZES = {
    "vocab_size": 2048, "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 6, "num_attention_heads": 8,
    "num_key_value_heads": 4, "max_position_embeddings": 256, "tie_word_embeddings": False,
}  # fmt: skip
BATCH, LENGTH, LR, MOST = 16, 64, 1e-3, 1.0
GOAL = 1.05
CLOSE = 1e-3  # of two norms of one gradient, added up in other orders


# What the workers run


def llama() -> Any:
    """The same on each of them."""
    import torch
    import transformers

    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))


def data(index: int) -> Any:
    """A sample."""
    import torch

    return torch.randint(SIZES["vocab_size"], (LENGTH,), generator=torch.Generator().manual_seed(index))


def say(norm: float) -> None:
    """A step is made."""
    with Path(os.environ[HISTORY]).open("a") as out:
        out.write(json.dumps({"made": time.time(), "norm": norm}) + "\n")


def ours(mesh: Any, *, fsdp: bool) -> Any:
    """As docs/TEAMS.md has it."""
    from torch.distributed.fsdp import fully_shard

    from elasticrl.runtime.planned import share

    model = share(llama(), mesh)
    if fsdp:
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])
    return model


def exact() -> None:
    """A script of level exact."""
    import torch

    import elasticrl
    from elasticrl.runtime.data.cursor import Cursor, Walk
    from elasticrl.runtime.optim import AdamW

    with elasticrl.runtime.join() as run:
        lanes = run.tree.lanes.count
        cursor = Cursor(Walk(name="words", size=BATCH, lanes=lanes, per_lane=BATCH // lanes, seed=7))
        fsdp = run.tree.model.strategy == "fsdp"
        run.register(model=partial(ours, fsdp=fsdp), optimizer=AdamW(lr=LR, weight_decay=0.01), data=cursor)
        for _ in run.steps():
            for lane in run.lanes():
                tokens = torch.stack([data(sample.index) for sample in lane.ids()])
                with lane.rng("pass"):
                    run.model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
                lane.done()
            reduced = run.update(max_norm=MOST)
            if run.rank == 0 and reduced is not None:
                say(reduced.norm / lanes)


def plain() -> None:
    """torch's own."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    teams = dist.get_world_size() // TP
    mesh = init_device_mesh("cpu", (teams, TP), mesh_dim_names=("dp", "tp"))
    columns, rows = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"), (
        "self_attn.o_proj", "mlp.down_proj",
    )  # fmt: skip
    plan = {f"model.layers.*.{name}": ColwiseParallel() for name in columns}
    plan |= {f"model.layers.*.{name}": RowwiseParallel() for name in rows}
    plan["model.embed_tokens"] = RowwiseParallel(input_layouts=Replicate())
    plan["lm_head"] = ColwiseParallel(output_layouts=Replicate())
    model = parallelize_module(llama(), mesh["tp"], plan, src_data_rank=None)
    if teams > 1:
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])
    groups: dict[Any, list[Any]] = {}  # what lies on one mesh can be stepped and measured together
    for param in model.parameters():
        groups.setdefault(getattr(param, "device_mesh", None), []).append(param)
    optimizer = torch.optim.AdamW([{"params": params} for params in groups.values()], lr=LR, fused=True)
    number = dist.get_rank() // TP
    mine = range(number * BATCH // teams, (number + 1) * BATCH // teams)
    while True:
        tokens = torch.stack([data(index) for index in mine])
        model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
        norms = [torch.nn.utils.get_total_norm([param.grad for param in params]) for params in groups.values()]
        norm = torch.stack([getattr(each, "full_tensor", lambda each=each: each)() for each in norms]).norm()
        for params in groups.values():
            torch.nn.utils.clip_grads_with_norm_(params, MOST, norm)
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            say(norm.item())


# The sides


def side(
    name: str, freezer: cost.Freezer, job: Mapping[str, Any], folder: Path, world: int, where: set[int], _other: Path
) -> None:
    """One of them, in a process of its own, until it is ended."""
    end_cleanly()
    freezer.join()
    os.sched_setaffinity(0, where)
    folder.mkdir(parents=True)
    history = str(folder / ppo.HISTORY)
    if name == "plain":
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}", __file__]
        env = {name: value for name, value in os.environ.items() if not name.startswith("ELASTICRL")}
        env |= {"OMP_NUM_THREADS": "1", HOW: "plain", HISTORY: history}
        with (folder / "log").open("wb") as log:
            subprocess.run(command, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, check=False)
        raise SystemExit(f"torchrun ended: {(folder / 'log').read_text()[-3000:]}")
    daemon(job, world, history, vault={} if name == "daemon-each" else ppo.SELDOM)


def daemon(job: Mapping[str, Any], world: int, history: str, *, vault: Mapping[str, int]) -> None:
    """A node's daemon, agent and vault, and an etcd."""
    from chaos.live.local import Job

    conf = {
        "job": {"program": __file__, "args": [], "seed": 7, "steps": cost.STEPS},
        "agent": {"env": {HOW: "exact", HISTORY: history}},
        "node": {"workers": world},
        "model": {"tp": TP, "strategy": job["strategy"]},
        "lanes": {"count": world // TP, "digest": "sample"},
        "membership": {"min_nodes": 1, "max_nodes": 1, **cost.PATIENT["membership"]},
        "timeouts": cost.PATIENT["timeouts"],
        "vault": {"copies": 0, **vault, **cost.PATIENT["vault"]},
        "checkpoint": {"every": 100_000},
    }
    live = Job(etcd=1, name="bench", conf=conf)
    try:
        with live:
            live.start("n0")
            (ended,) = live.daemons.values()
            ended.wait()
            raise RuntimeError(f"the daemon ended with {ended.returncode}: see {live.folder}")
    except SystemExit:  # it has run for long enough
        shutil.rmtree(live.folder, ignore_errors=True)
        raise


# The figures


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Of one number of teams: what each round's step took each side, and processor seconds."""

    teams: int
    costs: Sequence[Sequence[tuple[float, float]]]

    def ratios(self, which: int) -> list[float]:
        """Of the rounds: of time (0), of processors' time (1)."""
        mine, theirs = self.costs
        return [a[which] / b[which] for a, b in zip(mine, theirs, strict=True)]


def measure(teams: int, options: argparse.Namespace, watch: Watch) -> Found:
    """Both sides, in turn."""
    with tempfile.TemporaryDirectory(prefix="bench-teams-") as base:
        asked = cost.Asked(
            options.sides, TP * teams, options.swaps, options.turn, beside=False, other=Path(),
            job={"strategy": "fsdp" if teams > 1 else "replicated"}, side=side,
        )  # fmt: skip
        found = Found(teams=teams, costs=cost.measure(asked, options.rounds, Path(base), watch))
        same(Path(base))
    return found


def same(base: Path) -> None:
    """The first step of all that ran had one gradient."""
    norms = {str(path.parent.name): ppo.made(path.parent)[0]["norm"] for path in base.glob(f"*/*/{ppo.HISTORY}")}
    if max(norms.values()) > (1 + CLOSE) * min(norms.values()):
        raise SystemExit(f"the sides do not train the same: their first gradients have the norms {norms}")


def told(found: Found, names: Sequence[str]) -> dict[str, Any]:
    """For machines."""
    what = ("time", "processors' time")
    steps = {
        name: {key: summary([one[i] for one in rows]) for i, key in enumerate(("step_s", "processors_s"))}
        for name, rows in zip(names, found.costs, strict=True)
    }
    return {
        "teams": found.teams,
        "steps": steps,
        **{key: cost.told(found.ratios(i), GOAL) for i, key in enumerate(what)},
    }


def main() -> int:
    """Measure, and print."""
    if how := os.environ.get(HOW):
        {"exact": exact, "plain": plain}[how]()
        return 0
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--teams", default="1,2")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--swaps", type=int, default=4)
    parser.add_argument("--turn", type=float, default=2.0)
    parser.add_argument("--sides", default="daemon-each,plain", type=some_of(SIDES))
    parser.add_argument("--json", action="store_true")
    end_cleanly()
    options = parser.parse_args()
    if len(options.sides) != 2:
        parser.error(f"--sides wants two of {', '.join(SIDES)}")
    watch = Watch()
    results = [told(measure(int(word), options, watch), options.sides) for word in options.teams.split(",")]
    noise = watch.noise()
    if options.json:
        dump({"bench": "teams", "results": results, "sides": options.sides, "noise": noise, "machine": watch.machine()})
        return 0
    rows, notes = [], []
    for result in results:
        name = f"TP {TP}" if result["teams"] == 1 else f"TP {TP} x FSDP2 {result['teams']}"
        rows += [
            (name, one, *(f"{result['steps'][one][key]['median']:.3f} s" for key in ("step_s", "processors_s")))
            for one in options.sides
        ]
        for what in ("time", "processors' time"):
            ratio, sure = result[what]["ratio"], result[what]["ratio_95"]
            between = "; 95 % {:.3f}-{:.3f}".format(*sure) if sure else ""
            notes.append(
                f"{name}, {what}, {options.sides[0]} by {options.sides[1]}: {ratio['median']:.3f} "
                f"({ratio['min']:.3f}-{ratio['max']:.3f}, n={ratio['count']}{between}); goal {GOAL}: {result[what]['verdict']}"
            )
    title = f"a step of {BATCH} sequences of {LENGTH} tokens, on {os.cpu_count()} processors, in turn"
    show(title, ("teams", "side", "a step", "processors' time"), rows, [*notes, *([noise] if noise else [])])
    return 0


if __name__ == "__main__":
    sys.exit(main())
