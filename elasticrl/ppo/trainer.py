"""One iteration of PPO (or GRPO), top to bottom: rollout, reward, logprobs, ref, values, advantage, update, sync.

The idea: every stage does one thing for each lane that is here and puts the result in the buffer; only `advantage` and
`update` need the other lanes, and they ask for numbers folded in the order of lanes. Nothing knows how many workers there are,
so nothing depends on it. The order of stages is flow.py's; the mathematics is in losses.py, advantages.py and kl.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from elasticrl.ppo import flow, kl
from elasticrl.ppo.advantages import gae, group_advantages, token_rewards, whiten
from elasticrl.ppo.batches import Rows, blocks, take, updates
from elasticrl.ppo.generation import Feed, Generator
from elasticrl.ppo.idle import Idle
from elasticrl.ppo.losses import entropies, importance_weights, logprobs, masked, policy_loss, value_loss
from elasticrl.ppo.report import Report, facts_of, lr_factor
from elasticrl.ppo.rewards import Answer, Endpoint, Function, RewardModel, Score, Scorer, placed
from elasticrl.ppo.roles import Roles, response
from elasticrl.ppo.rollout.engine import Engine
from elasticrl.runtime.scalars import Tally

if TYPE_CHECKING:
    from elasticrl.config.training import Ppo
    from elasticrl.ppo.prompts import Prompt
    from elasticrl.ppo.run import Run


class Trainer:
    """The algorithm over a run. `steps` is the job's length, for schedules of the learning rate."""

    def __init__(
        self,
        run: Run,
        roles: Roles,
        *,
        ppo: Ppo,
        lanes: int,
        steps: int,
        feed: Feed,
        engine: Engine | None = None,
        scorer: Scorer | None = None,
        overlap: bool = False,
    ) -> None:
        self.run, self.roles, self.ppo = run, roles, ppo
        self.lanes, self.steps, self.feed = lanes, steps, feed
        self.engine, self.scorer = engine, scorer
        self.generator = Generator(run, engine, feed, group=ppo.group, steps=steps, overlap=overlap) if engine else None
        apart = engine is not None and not engine.by_lane
        asked = scorer is not None and not isinstance(scorer, Function)
        self.flow = flow.of(ppo, tied=roles.tied, overlap=overlap, apart=apart, asked=asked)
        self.coefficient = kl.Coefficient(ppo.kl.coef, target=ppo.kl.target, horizon=ppo.kl.horizon)
        self.losses: dict[str, Callable[[Rows, float, Tally], torch.Tensor]] = {
            "actor": self.actor_loss,
            "critic": self.critic_loss,
        }
        self.parts = parts_of(ppo, lanes)
        self.idle = Idle({})
        self.unit = 1  # rows that must stay together in a mini-batch

    def step(self, number: int) -> Report:
        """One iteration, or what is left of it: stages whose results were kept are not done again."""
        self.run.begin(number)
        for stage in self.flow.order:
            if stage.name not in self.run.buffer.done:
                with self.run.phase(stage.phase or stage.name), self.idle.but(stage.role):
                    getattr(self, stage.name)(stage)
                assert all(self.run.buffer.has(lane, stage.rows) for lane in self.run.lanes), (
                    f"{stage} left something out"
                )
                self.run.keep(stage.name, how=stage.keeps)
        return Report.of(number, self.run.buffer.facts, self.run.seconds)

    def rollout(self, _stage: flow.Stage) -> None:
        """Prompts to samples."""
        assert self.generator is not None
        self.generator.rollout()

    def ahead(self, _stage: flow.Stage) -> None:
        """Half of the next step's samples are here, by the weights that this one began with."""
        assert self.generator is not None
        self.generator.ahead()

    def reward(self, stage: flow.Stage) -> None:
        """Samples to scores. The stage is kept before anyone uses them, so a scorer is believed once."""
        assert self.scorer is not None
        todo = self._todo(stage)
        if isinstance(self.scorer, Endpoint):
            lanes = list(dict.fromkeys(todo))
            for lane, scores in zip(lanes, self.scorer.each([self._answers(lane) for lane in lanes]), strict=True):
                self._score(lane, scores)
            return
        shared = isinstance(self.scorer, RewardModel) and self.scorer.collective
        for lane in todo if shared else dict.fromkeys(todo):
            answers = self._answers(lane)
            with self.run.streams.at(update=0, lane=lane).ambient("reward"):  # a function may draw
                scores = self.scorer.score(answers)
            self._score(lane, scores)

    def logprobs(self, stage: flow.Stage) -> None:
        """The trainer's own log-probabilities of the samples, in the very shapes of the update: its first ratio is exactly 1.

        A tied head gives the values in the same pass.
        """
        for lane in self._todo(stage):
            found = self._forward(lane, self.roles.policy)
            self.run.buffer.put(lane, **dict(zip(("logprobs", "values"), found, strict=False)))

    def ref(self, stage: flow.Stage) -> None:
        """The reference's log-probabilities of the samples."""
        todo = self._todo(stage)
        if self.roles.judge is None:
            for lane in todo:
                self.run.buffer.put(lane, ref_logprobs=self._forward(lane, self.roles.reference)[0])
            return
        rows = {lane: self.run.buffer.rows[lane] for lane in todo}
        cut = {lane: self._blocks(its, torch.arange(len(its["mask"]))) for lane, its in rows.items()}
        said = iter(self.roles.judge("ref", [block for its in cut.values() for block in its]))
        for lane, its in cut.items():
            whole = torch.cat([next(said) for _ in its])
            self.run.buffer.put(lane, ref_logprobs=whole[: len(rows[lane]["mask"])])

    def values(self, stage: flow.Stage) -> None:
        """The critic's values of the samples."""
        for lane in self._todo(stage):
            self.run.buffer.put(lane, values=self._forward(lane, self.roles.values)[0])

    def advantage(self, _stage: flow.Stage) -> None:
        """Scores, KL and values to advantages; with the batch's moments, in the order of lanes, to whitened ones."""
        ppo, buffer, tallies = self.ppo, self.run.buffer, {}
        for lane in self.run.lanes:
            rows, tally = buffer.rows[lane], Tally()
            mask = rows["mask"]
            divergence = torch.zeros_like(rows["logprobs"])
            if "ref" in self.flow:
                divergence = torch.where(mask, kl.k1(rows["logprobs"], rows["ref_logprobs"]), 0.0)
            coef = self.coefficient.of(buffer.step) if ppo.kl.where == "reward" else 0.0
            rewards = token_rewards(
                rows["scores"], mask, rows["ended"], penalty=ppo.missing_eos_penalty, kl=divergence, coef=coef
            )
            if ppo.algorithm == "grpo":
                buffer.put(lane, advantages=group_advantages(rewards.sum(1), mask, ppo.group))
            else:
                advantages, returns = gae(rewards, rows["values"], mask, gamma=ppo.gamma, lam=ppo.lam)
                buffer.put(lane, advantages=advantages, returns=returns)
                tally.spread("returns", returns, mask)
                tally.spread("errors", returns - rows["values"], mask)
            tally.spread("advantages", rows["advantages"], mask)
            tally.spread("scores", rows["scores"].sum(1))
            tally.spread("kl", divergence.sum(1))
            tally.spread("kl_per_token", divergence.sum(1) / mask.sum(1).clamp(min=1))
            tally.spread("gap", torch.where(mask, rows["logprobs"] - rows["rollout_logprobs"], 0.0), mask)
            tally.spread("length", mask.sum(1))
            tally.add(ended=rows["ended"].sum().item())
            tally.add(tokens=rows["attention"].sum().item(), places=rows["attention"].numel())
            self._tally_entries(lane, tally)
            tallies[lane] = tally
        whole = self.run.exchange(tallies)
        if ppo.algorithm == "ppo" and ppo.whiten:
            for lane in dict.fromkeys(self.run.lanes):
                rows = buffer.rows[lane]
                buffer.put(lane, advantages=whiten(rows["advantages"], rows["mask"], whole.moments["advantages"]))
        buffer.facts |= facts_of(whole)
        if "ref" in self.flow:
            buffer.facts |= {"kl": whole.moments["kl"].mean, "kl_coef": self.coefficient.of(buffer.step)}
        seen = whole.moments["kl" if ppo.kl.per == "sample" else "kl_per_token"]
        self.coefficient.observe(step=buffer.step, kl=seen.mean, samples=int(seen.count))

    def update(self, _stage: flow.Stage) -> None:
        """Mini-batches of several epochs. Each lane's loss is its sum over the count of the whole mini-batch."""
        buffer, ppo = self.run.buffer, self.ppo
        if self.generator is not None:
            self.generator.begin()  # already under way, unless the step was taken up after its rollout
        orders = {lane: self._orders(lane) for lane in self.run.lanes}
        count = len(orders[self.run.lanes[0]])
        keeps = self.flow.again(self.flow.made(buffer.done), updates=1) is not None
        for number in range(self.run.streams.update, count):
            for role in self.flow.trained:
                with self.run.part(f"{role}_update"):
                    for lane, part, tally in self.run.passes(role):
                        rows = self._blocks(buffer.rows[lane], orders[lane][number], slice(part, part + 1))[0]
                        with self.run.streams.at(lane=lane).ambient(f"{role} update, part {part}"):
                            backward(self.losses[role](rows, buffer.facts[f"entries.{number}"], tally))
            for lane in dict.fromkeys(self.run.lanes):
                chosen = [buffer.ids[lane][i] for i in orders[lane][number].tolist()]
                self.run.used(lane, number * ppo.epochs // count, chosen)
            done = self.run.update(lr_factor=self._lr_factor(), max_norm=ppo.max_grad_norm, keeps=keeps)
            entries = max(buffer.facts[f"entries.{number}"], 1.0)
            for role, reduced in done.items():
                buffer.facts[f"{role}_norm"] = reduced.norm
                for name, total in reduced.tally.sums.items():  # the mean over the step's updates so far
                    buffer.facts[name] = (buffer.facts.get(name, 0.0) * number + total / entries) / (number + 1)

    def sync(self, _stage: flow.Stage) -> None:
        """The new weights to the rollout engine."""
        assert self.engine is not None
        self.engine.publish(self.run.version)

    def actor_loss(self, rows: Rows, entries: float, tally: Tally) -> torch.Tensor:
        """The clipped surrogate, and what is added to it."""
        ppo, mask = self.ppo, rows["mask"]
        logits, values = self.roles.logits(self.roles.actor, rows)
        new = logprobs(logits, response(rows), self.roles.temperature)
        limit = ppo.importance_limit
        weights = importance_weights(rows["logprobs"], rows["rollout_logprobs"], mask, limit) if limit else None
        term = policy_loss(
            new,
            rows["logprobs"],
            rows["advantages"],
            mask,
            clip_low=ppo.clip_low,
            clip_high=ppo.clip_high,
            dual_clip=ppo.dual_clip,
            log_ratio_limit=ppo.log_ratio_limit,
            weights=weights,
        )
        loss = term.loss.over(entries)
        with torch.set_grad_enabled(ppo.entropy_coef > 0):
            entropy = masked(entropies(logits, self.roles.temperature), mask)
        if ppo.entropy_coef:
            loss = loss - ppo.entropy_coef * entropy.over(entries)
        if ppo.kl.where == "loss":
            coef = self.coefficient.of(self.run.buffer.step)
            loss = loss + coef * masked(kl.k3(new, rows["ref_logprobs"], mask, limit=ppo.kl.limit), mask).over(entries)
        if values is not None and ppo.algorithm == "ppo":
            critic = value_loss(values, rows["values"], rows["returns"], mask, clip=ppo.value_clip)
            loss = loss + ppo.value_coef * critic.over(entries)
            tally.add(value_loss=critic.total)
        tally.add(policy_loss=term.loss.total, entropy=entropy.total)
        tally.add(clip_fraction=term.clipped.total, approx_kl=term.approx_kl.total)
        return loss

    def critic_loss(self, rows: Rows, entries: float, tally: Tally) -> torch.Tensor:
        """A separate critic's."""
        term = value_loss(
            self.roles.values(rows)[0], rows["values"], rows["returns"], rows["mask"], clip=self.ppo.value_clip
        )
        tally.add(value_loss=term.total)
        return term.over(entries)

    # Lanes, blocks and forward passes.

    def _answers(self, lane: int) -> list[Answer]:
        rows = self.run.buffer.rows[lane]
        prompts = [p for _, p in self.feed(self.run.streams.step, lane) for _ in range(self.ppo.group)]
        return [
            self._answer(name, prompt, {key: value[i] for key, value in rows.items()})
            for i, (name, prompt) in enumerate(zip(self.run.buffer.ids[lane], prompts, strict=True))
        ]

    def _score(self, lane: int, scores: Sequence[Score]) -> None:
        self.run.buffer.put(lane, scores=placed(scores, self.run.buffer.rows[lane]["mask"]))

    def _answer(self, name: str, prompt: Prompt, row: Rows) -> Answer:
        said = row["tokens"][-len(row["mask"]) :][row["mask"]].tolist()
        decode = self.roles.tokenizer.decode
        return Answer(
            id=name,
            prompt=prompt.text,
            response=decode(said, skip_special_tokens=True),
            pieces=tuple(decode([token]) for token in said),
            tokens=tuple(row["tokens"][row["attention"]].tolist()),
            ended=bool(row["ended"]),
            record=prompt.record,
        )

    def _todo(self, stage: flow.Stage) -> Sequence[int]:
        """The lanes without this stage's results. In lockstep all of them: nobody may leave a collective out."""
        lanes = self.run.lanes
        return lanes if self.run.lockstep else [lane for lane in lanes if not self.run.buffer.has(lane, stage.rows)]

    def _orders(self, lane: int) -> list[torch.Tensor]:
        size = self.ppo.mini_batch // self.lanes
        streams = self.run.streams.at(update=0, lane=lane)
        rows = len(self.run.buffer.rows[lane]["mask"])
        return updates(rows, size, self.ppo.batch // self.ppo.mini_batch, self.ppo.epochs, streams, unit=self.unit)

    def _tally_entries(self, lane: int, tally: Tally) -> None:
        """How much each update's loss is a sum of: every lane must know of all before the first backward pass."""
        mask = self.run.buffer.rows[lane]["mask"]
        tally.add(**{f"entries.{i}": mask[index].sum().item() for i, index in enumerate(self._orders(lane))})

    def _blocks(self, rows: Rows, index: torch.Tensor, part: slice = slice(None)) -> list[Rows]:
        cut = blocks(index, self.ppo.micro_batch, self.parts)[part]
        return [{name: x.to(self.roles.device) for name, x in take(rows, *block).items()} for block in cut]

    def _forward(self, lane: int, compute: Callable[[Rows], tuple[torch.Tensor, ...]]) -> list[torch.Tensor]:
        return self._forward_rows(self.run.buffer.rows[lane], compute)

    @torch.no_grad()
    def _forward_rows(self, rows: Rows, compute: Callable[[Rows], tuple[torch.Tensor, ...]]) -> list[torch.Tensor]:
        count = len(rows["mask"])
        parts = [compute(block) for block in self._blocks(rows, torch.arange(count))]
        return [torch.cat(column)[:count].cpu() for column in zip(*parts, strict=True)]

    def _lr_factor(self) -> float:
        return lr_factor(self.ppo.schedule, self.run.streams.step, warmup=self.ppo.warmup_steps, steps=self.steps)


def parts_of(ppo: Ppo, lanes: int) -> int:
    """How many micro-batches, each a backward pass, a lane makes in an update."""
    return -(-ppo.mini_batch // lanes // ppo.micro_batch)


def backward(loss: torch.Tensor) -> None:
    """For the type checker: torch has not annotated it."""
    loss.backward()  # type: ignore[no-untyped-call]
