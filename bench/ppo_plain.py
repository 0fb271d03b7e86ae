"""Our trainer on the job that bench/ppo.py describes, under nothing: no seats, no vaults, no ledger, a gang that never changes.

    python bench/ppo_plain.py JOB.json          (or under torchrun, for several workers)

What the elastic runtime costs is the difference to this. Writes a JSON line for each step: when it was made, how long its
answers were on average, and what its phases took.
"""

import json
import os
import sys
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import torch.distributed as dist

from bench.fixed_run import FixedRun, InOrder
from elasticrl.config.training import Data, Kl, Model, Ppo
from elasticrl.ppo import models, prompts, rewards, sizes
from elasticrl.ppo.roles import Roles
from elasticrl.ppo.rollout.engine import Sampling
from elasticrl.ppo.rollout.inline import TorchEngine
from elasticrl.ppo.trainer import Trainer
from elasticrl.runtime.lanes import Deal
from elasticrl.runtime.optim import AdamW


def main() -> None:
    torch.set_num_threads(1)
    job = json.loads(Path(sys.argv[1]).read_text())
    world, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    if world > 1:
        dist.init_process_group("gloo")
    lanes, model = job["lanes"], Model(path=job["model"])
    ppo = Ppo(
        algorithm=job["algorithm"], batch=job["batch"], mini_batch=job["batch"], epochs=job["epochs"], group=job["group"],
        micro_tokens=job["micro_batch"] * (job["prompt"] + job["max_tokens"]),
        lr=job["lr"], critic_lr=job["lr"], kl=Kl(where="loss", coef=0.05) if job["algorithm"] == "grpo" else Kl(),
    )  # fmt: skip
    widest = {"prompt": job["prompt"], "answer": job["max_tokens"]}
    share = models.shares(job["model"], model, ppo, lanes, **widest)
    passes = sizes.of(ppo, device="cpu", share=share, **widest)
    tokenizer = models.tokenizer(job["model"])
    actor = models.actor(model, job["model"], seed=7)
    critic = models.critic(model, job["reward"]) if job["algorithm"] == "ppo" else None
    trained = {"actor": actor} | ({"critic": critic} if critic else {})
    rule = AdamW(lr=ppo.lr, betas=ppo.betas, eps=ppo.eps, weight_decay=ppo.weight_decay)
    run = FixedRun(
        {name: (each, lambda _name: rule) for name, each in trained.items()},
        deal=Deal.contiguous(lanes, world),
        seed=7,
        parts=sizes.parts_of(ppo, lanes, passes),
        rank=rank,
        group=dist.group.WORLD if world > 1 else None,
    )
    data = prompts.load(Data(path=job["prompts"], max_prompt=job["prompt"], chat_template=False), tokenizer)
    scorer: rewards.Scorer = rewards.Function.named("elasticrl.ppo.tasks:sort")
    if job["algorithm"] == "ppo":
        scorer = rewards.RewardModel(
            model=models.reward_model(model, job["reward"]),
            sizes=replace(passes, unit=1, share=False),
            pad=tokenizer.pad_token_id,
        )
    sampling = Sampling(
        prompt_tokens=job["prompt"], max_tokens=job["max_tokens"], rows=ppo.batch // lanes,
        eos=(tokenizer.eos_token_id,), pad=tokenizer.pad_token_id,
    )  # fmt: skip
    roles = Roles(
        model=model, actor=actor, critic=critic, ref=models.reference(model, job["model"]), tokenizer=tokenizer
    )
    feed = InOrder(data, per_lane=ppo.batch // lanes // ppo.group, lanes=lanes, seed=7, shuffle=True)
    trainer = Trainer(
        run,
        roles,
        ppo=ppo,
        lanes=lanes,
        steps=job["steps"],
        feed=feed,
        sizes=passes,
        engine=TorchEngine(actor, sampling),
        scorer=scorer,
    )
    with Path(job["history"]).open("a") if rank == 0 else nullcontext() as history:
        for step in range(job["steps"]):
            report = trainer.step(step)
            if history:
                told = {"made": time.time(), "length": report.metrics["length"], "seconds": dict(run.seconds)}
                history.write(json.dumps(told) + "\n")
                history.flush()
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
