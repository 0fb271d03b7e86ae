"""A small whole job for tests: PPO on digits, with everything real."""

from dataclasses import replace

from digits import Digits

from bench.fixed_run import FixedRun, InOrder
from elasticrl.config.training import Kl, Model, Ppo
from elasticrl.ppo import models
from elasticrl.ppo.evaluation import Evaluation
from elasticrl.ppo.rewards import Function
from elasticrl.ppo.roles import Roles
from elasticrl.ppo.rollout.begun import Begun
from elasticrl.ppo.rollout.engine import Sampling
from elasticrl.ppo.rollout.inline import TorchEngine
from elasticrl.ppo.sizes import of, parts_of
from elasticrl.ppo.staleness import ON_TIME
from elasticrl.ppo.trainer import Trainer
from elasticrl.runtime.lanes import Deal
from elasticrl.runtime.optim import AdamW


def settings(**more):
    return Ppo(
        **(
            {
                "batch": 32,
                "mini_batch": 16,
                "micro_tokens": 20,
                "epochs": 2,
                "lr": 1e-3,
                "critic_lr": 1e-3,
                "kl": Kl(coef=0.002),
            }
            | more
        )
    )


def job(
    path, *, ppo=None, lanes=4, carried=None, rank=0, group=None, steps=10, seed=0, head="separate", on_phase=None,
    staleness=ON_TIME, begun=False, engine=TorchEngine, sizes=None, evaluate=None, scored=0, scorer=None,
):  # fmt: skip
    """(trainer, run). `carried` are the lanes of each rank, in the order in which they are computed."""
    ppo = ppo or settings()
    passes = sizes or of(ppo, prompt=6, answer=4, device="cpu")
    model = Model(path=path, value_head=head)
    tokenizer = models.tokenizer(path)
    actor, ref = models.actor(model, path, seed=seed), models.reference(model, path)
    trained = {"actor": (actor, lambda _name: AdamW(lr=ppo.lr, weight_decay=0.0))}
    critic = None
    if ppo.algorithm == "ppo" and head == "separate":
        critic = models.critic(model, path)
        trained["critic"] = (critic, lambda _name: AdamW(lr=ppo.critic_lr, weight_decay=0.0))
    run = FixedRun(
        trained,
        deal=Deal(lanes=lanes, carried=carried or (tuple(range(lanes)),)),
        seed=seed,
        parts=parts_of(ppo, lanes, passes),
        rank=rank,
        group=group,
        on_phase=on_phase or (lambda _name: None),
    )
    per_lane = ppo.generated // lanes
    sampling = Sampling(
        prompt_tokens=6,
        max_tokens=4,
        rows=max(staleness.part(per_lane), per_lane - staleness.part(per_lane)),
        eos=(tokenizer.eos_token_id,),
        pad=tokenizer.pad_token_id,
    )
    body = actor.actor if head == "tied" else actor
    scorer = scorer or Function.named("elasticrl.ppo.tasks:reverse")
    evaluation = None
    if evaluate is not None:
        held_out, drawn = Digits(tokenizer, 3), replace(sampling, temperature=float(evaluate.temperature or 0.0))
        its = TorchEngine(body, drawn)
        evaluation = Evaluation(
            run, its, [held_out[i] for i in range(evaluate.limit)], evaluate, lanes=lanes, steps=steps, scored=scored
        )
    trainer = Trainer(
        run,
        Roles(model=model, actor=actor, critic=critic, ref=ref, tokenizer=tokenizer),
        ppo=ppo,
        lanes=lanes,
        steps=steps,
        sizes=passes,
        feed=InOrder(
            Digits(tokenizer, 4),
            per_lane=per_lane // ppo.part(lanes),
            lanes=lanes,
            seed=seed,
            spans=ppo.group // ppo.part(lanes),
        ),
        engine=engine(body, sampling),
        scorer=scorer,
        staleness=staleness,
        begun=Begun(actor.named_parameters) if begun else None,
        evaluation=evaluation,
    )
    return trainer, run
