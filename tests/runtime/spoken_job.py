"""A small job with a tiny model of transformers, that a team shares as the configuration says."""

import argparse
import time
from functools import partial

import torch
import transformers
from planned_job import KINDS, SIZES
from run_job import tell
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import elasticrl
from elasticrl.runtime.data.cursor import Cursor, Walk
from elasticrl.runtime.optim import AdamW
from elasticrl.runtime.planned import share
from elasticrl.runtime.rng import Streams

ROWS, LENGTH, WORDS = 3, 9, 64


def built(kind: str, mesh: DeviceMesh | None, *, fsdp: bool) -> nn.Module:
    """In sizes that FSDP2 can cut further. Without a mesh it is whole."""
    sizes = {**SIZES, "vocab_size": WORDS, "tie_word_embeddings": False, **KINDS[kind]}
    config = transformers.AutoConfig.for_model(kind, **sizes)
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(config)
    if mesh is not None:
        share(model, mesh)
    if mesh is not None and fsdp:
        from torch.distributed.fsdp import fully_shard

        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])
    return model


def data(index: int) -> torch.Tensor:
    """One sample, which repeats itself."""
    start = torch.randint(1, WORDS, (3,), generator=torch.Generator().manual_seed(index))
    return start.repeat(LENGTH // 3)


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--steps", type=int)
    options.add_argument("--step-ms", type=float, default=0.0)
    options.add_argument("--faults", default="")
    options.add_argument("--history", default="")
    options.add_argument("--save", default="")  # taken from the configuration here
    options.add_argument("--kind", default="qwen3")
    args = options.parse_args()
    with elasticrl.runtime.join() as run:
        lanes, seed = run.tree.lanes.count, run.tree.job.seed
        cursor = Cursor(Walk(name="words", content="", size=1000, lanes=lanes, per_lane=ROWS, turns=1, seed=seed))
        fsdp = run.tree.model.strategy == "fsdp"
        with Streams(seed=seed).ambient("init"):  # as a function is called
            model = (
                partial(built, args.kind, fsdp=fsdp) if run.tree.model.team > 1 else built(args.kind, None, fsdp=False)
            )
        run.register(model=model, optimizer=AdamW(lr=1e-2), data=cursor)
        told = 0
        for _ in run.steps(args.steps):
            for lane in run.lanes():
                tokens = torch.stack([data(sample.index) for sample in lane.ids()])
                more = {"output_router_logits": True} if hasattr(run.model.config, "router_aux_loss_coef") else {}
                with lane.rng("pass"):
                    loss = run.model(input_ids=tokens, labels=tokens, use_cache=False, **more).loss
                    loss.backward()
                    loss = loss.detach()
                    lane.tally.add(loss=loss.item())
                lane.done()
            time.sleep(args.step_ms / 1000)
            found = run.update(max_norm=0.5)
            if found is not None:
                print("made", found.tally.sums["loss"], found.norm, flush=True)
            told = tell(run, args.history, told)
        tell(run, args.history, told)


if __name__ == "__main__":
    main()
