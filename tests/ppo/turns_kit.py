"""Small jobs of several turns: products, a calculator that must be called, a tiny model that learns to."""

import random
from dataclasses import dataclass, replace
from typing import Any

from bench.fixed_run import FixedRun, InOrder
from elasticrl.config.training import Evaluate, Kl, Model, Ppo
from elasticrl.ppo import groups, models, tiny
from elasticrl.ppo.environments import made_by
from elasticrl.ppo.evaluation import Evaluation
from elasticrl.ppo.prompts import Prompt, encode
from elasticrl.ppo.rewards import Scorer
from elasticrl.ppo.roles import Roles
from elasticrl.ppo.rollout.calls import Desk, Patience
from elasticrl.ppo.rollout.engine import Sampling
from elasticrl.ppo.rollout.episodes import Episodes, Shape, Words
from elasticrl.ppo.rollout.inline import TorchEngine
from elasticrl.ppo.rollout.tape import Tape
from elasticrl.ppo.sizes import of, parts_of
from elasticrl.ppo.trainer import Trainer
from elasticrl.runtime.lanes import Deal
from elasticrl.runtime.optim import AdamW
from elasticrl.runtime.rng import seed

WORDS = (*"0123456789", "*", "=", tiny.PAD, tiny.EOS, "<user>", "<answer>")
PATIENCE = Patience(timeout_s=10.0, retries=2, at_once=4, holds=False, deadline_s=60.0)


@dataclass(frozen=True)
class Products:
    """Place n is a function of n."""

    tokenizer: Any
    size: int = 1_000_000

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, place: int) -> Prompt:
        number = seed("products", place)
        text = f"{number % 10}*{number // 10 % 10}"
        return Prompt(place=place, tokens=encode(text, self.tokenizer, chat=True), text=text, record={"prompt": text})


def turned(
    path: str, *, ppo: Ppo, environment: str = "elasticrl.ppo.tasks:Calculator", lanes: int = 2, carried=None, rank: int = 0,
    group=None, steps: int = 10, patience: Patience = PATIENCE, tape: Tape | None = None, turns: int = 2, room: int = 12,
    evaluate: Evaluate | None = None, held_out: Tape | None = None, scorer: Scorer | None = None,
) -> tuple[Trainer, FixedRun]:  # fmt: skip
    """(trainer, run). `held_out` is the tape of evaluations."""
    passes = of(ppo, prompt=5, answer=room)
    model = Model(path=path)
    tokenizer = models.tokenizer(path)
    actor = models.actor(model, path, seed=0)
    trained = {"actor": (actor, lambda _name: AdamW(lr=ppo.lr, weight_decay=0.0))}
    critic = None
    if ppo.algorithm == "ppo":
        critic = models.critic(model, path)
        trained["critic"] = (critic, lambda _name: AdamW(lr=ppo.critic_lr, weight_decay=0.0))
    run = FixedRun(
        trained, deal=Deal(lanes=lanes, carried=carried or (tuple(range(lanes)),)), seed=0, parts=parts_of(ppo, lanes, passes),
        rank=rank, group=group,
    )  # fmt: skip
    per_lane = ppo.batch // lanes
    sampling = Sampling(
        prompt_tokens=5 + room, max_tokens=4, rows=per_lane, eos=(tokenizer.eos_token_id,), pad=tokenizer.pad_token_id
    )
    engine = TorchEngine(actor, sampling)
    its = groups.of(ppo, lanes)
    feed = InOrder(Products(tokenizer), per_lane=per_lane // its.part, lanes=lanes, seed=0, spans=its.spans)
    desk = Desk(environment, made_by(environment), patience, tape or Tape(None))
    words = Words(tokenizer=tokenizer, ends=sampling.eos)
    shape = Shape(turns=turns, prompt=5, answer=room)
    episodes = Episodes(run, engine, feed, desk=desk, words=words, shape=shape, groups=its)
    evaluation = None
    if evaluate is not None:
        beside = TorchEngine(actor, replace(sampling, temperature=float(evaluate.temperature or 0.0), rows=4))
        asked = Desk(environment, made_by(environment), patience, held_out or Tape(None))
        evaluation = Evaluation(
            run, beside, [Products(tokenizer)[10_000 + i] for i in range(evaluate.limit)], evaluate, lanes=lanes, steps=steps,
            episodes=lambda run, feed: Episodes(
                run, beside, feed, desk=asked, words=words, shape=shape, called="an evaluation"
            ),
        )  # fmt: skip
    ref = models.reference(model, path) if ppo.kl.where != "off" else None
    roles = Roles(model=model, actor=actor, critic=critic, ref=ref, tokenizer=tokenizer)
    trainer = Trainer(
        run, roles, ppo=ppo, lanes=lanes, steps=steps, sizes=passes, feed=feed, engine=engine, episodes=episodes,
        evaluation=evaluation, scorer=scorer,
    )  # fmt: skip
    return trainer, run


def learns(**more: Any) -> Ppo:
    """Settings that learn the calculator's call in half a minute."""
    return Ppo(
        **{
            "batch": 128, "mini_batch": 32, "micro_tokens": 400, "epochs": 2, "lr": 4e-3, "critic_lr": 4e-3, "gamma": 0.05,
            "clip_high": 0.5, "entropy_coef": 0.1, "kl": Kl(where="off"),
            **more,
        }
    )  # fmt: skip


def small(folder: Any, *, steps_of: int = 5000) -> dict[str, Any]:
    """A job's configuration, with its model and its prompts in this folder."""
    chance = random.Random(5)
    lines = [f'{{"prompt": "{chance.randrange(10)}*{chance.randrange(10)}"}}' for _ in range(steps_of)]
    (folder / "prompts.jsonl").write_text("\n".join(lines))
    return {
        "ppo": {
            "batch": 64, "mini_batch": 32, "micro_tokens": 80, "epochs": 2, "lr": 4e-3, "critic_lr": 4e-3,
            "kl": {"coef": 0.01, "target": 1.0, "horizon": 100},
        },
        "model": {"path": tiny.write(folder / "actor", hidden=32, layers=2, words=WORDS)},
        "environment": {"function": "elasticrl.ppo.tasks:Calculator", "turns": 2, "turn_tokens": 4},
        "rollout": {"max_tokens": 12},
        "data": {"path": str(folder / "prompts.jsonl"), "max_prompt": 5},
        "vault": {"inside": 1},
    }  # fmt: skip
