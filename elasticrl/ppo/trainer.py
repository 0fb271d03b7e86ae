"""One iteration of PPO (or GRPO), top to bottom: rollout, reward, logprobs, ref, values, advantage, update, sync.

The idea: every stage does one thing for each lane that is here and puts the result in the buffer; only `advantage` and
`update` need the other lanes, and they ask for numbers folded in the order of lanes. Nothing knows how many workers there are,
so nothing depends on it. The order of stages is flow.py's; the mathematics is in losses.py, advantages.py and kl.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch

from elasticrl.ppo import again, flow, groups, kl, rewards
from elasticrl.ppo.advantages import (
    WHITENED,
    contested,
    gae,
    over_batch,
    overlong_penalties,
    token_rewards,
    whiten,
)  # fmt: skip
from elasticrl.ppo.again import PART
from elasticrl.ppo.batches import Block, Rows, blocks, nothing, take, updates
from elasticrl.ppo.generation import Feed, Generator
from elasticrl.ppo.handed import SCORES, VERDICTS
from elasticrl.ppo.idle import Idle
from elasticrl.ppo.losses import (
    Entries,
    importance_weights,
    masked,
    policy_loss,
    summed,
    value_loss,
)  # fmt: skip
from elasticrl.ppo.models import steady
from elasticrl.ppo.report import Report, facts_of, gains_of, guard_of, lr_factor, spiked
from elasticrl.ppo.rewards import Answer, Function, Scored, Scorer, answer_of, placed, scores_of, total
from elasticrl.ppo.roles import Roles, Said
from elasticrl.ppo.rollout.engine import Engine
from elasticrl.ppo.sizes import Sizes, parts_of
from elasticrl.ppo.staleness import ON_TIME, Staleness
from elasticrl.runtime.scalars import Tally

if TYPE_CHECKING:
    from elasticrl.config.training import Ppo
    from elasticrl.ppo.evaluation import Evaluation
    from elasticrl.ppo.rollout.begun import Begun
    from elasticrl.ppo.rollout.episodes import Episodes
    from elasticrl.ppo.run import Run
    from elasticrl.runtime.strategy import Reduced


Compute = Callable[[Rows], "tuple[torch.Tensor, ...]"]  # of one block's rows


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
        sizes: Sizes,
        engine: Engine | None = None,
        scorer: Scorer | None = None,
        staleness: Staleness = ON_TIME,
        begun: Begun | None = None,
        episodes: Episodes | None = None,
        evaluation: Evaluation | None = None,
    ) -> None:
        self.run, self.roles, self.ppo = run, roles, ppo
        self.lanes, self.steps, self.feed, self.sizes = lanes, steps, feed, sizes
        self.engine, self.scorer, self.begun, self.evaluation = engine, scorer, begun, evaluation
        self.groups = groups.of(ppo, lanes)
        self.generator = episodes or (
            Generator(run, engine, feed, groups=self.groups, steps=steps, staleness=staleness, begun=begun)
            if engine
            else None
        )
        apart = engine is not None and not engine.by_lane
        asked = scorer is not None and not all(isinstance(part, Function) for part in rewards.parts_of(scorer).values())
        self.heard = self._hears(staleness)
        self._valued: tuple[torch.Tensor, ...] = ()  # values, advantages and returns of the critic's last pass
        self.flow = flow.of(ppo, tied=roles.tied, staleness=staleness, apart=apart, asked=asked, turns=self.turns)
        self.coefficient = kl.Coefficient(ppo.kl.coef, target=ppo.kl.target, horizon=ppo.kl.horizon)
        self.losses: dict[str, Callable[[Rows, Entries, Tally], torch.Tensor]] = {
            "actor": self.actor_loss,
            "critic": self.critic_loss,
        }
        self.parts = parts_of(ppo, lanes, sizes)
        self.idle = Idle({})

    @property
    def together(self) -> bool:
        """Are the values made in the first update of the critic?"""
        return flow.together(self.ppo, tied=self.roles.tied)

    @property
    def turns(self) -> bool:
        """Do samples come about in several turns?"""
        return self.generator is not None and not isinstance(self.generator, Generator)

    def _hears(self, staleness: Staleness) -> bool:
        """Whether the engine's log-probabilities are the trainer's own: the same weights by the same code, in the same type."""
        if self.engine is None or not self.engine.alike or self.ppo.importance_limit:
            return False
        if staleness or self.turns or self.roles.tied or self.roles.model.dtype != "float32":
            return False
        return steady(getattr(self.roles.actor, "config", None))

    def step(self, number: int) -> Report:
        """One iteration, or what is left of it: stages whose results were kept are not done again."""
        self.run.begin(number)
        first = self.evaluation and self.evaluation.before(number, self.scorer, self.roles.tokenizer, self.idle)
        for stage in self.flow.order:
            if stage.name not in self.run.buffer.done:
                with self.run.phase(stage.phase or stage.name), self.idle.but(stage.role):
                    getattr(self, stage.name)(stage)
                assert all(self.run.buffer.has(lane, stage.rows) for lane in self.run.lanes), (
                    f"{stage} left something out"
                )
                self.run.keep(stage.name, how=stage.keeps)
        last = self.evaluation and self.evaluation.after(number, self.scorer, self.roles.tokenizer, self.idle)
        evaluated = tuple(found for found in (first, last) if found)
        return Report.of(number, self.run.buffer.facts, self.run.seconds, evaluated)

    def rollout(self, _stage: flow.Stage) -> None:
        """Prompts to samples."""
        assert self.generator is not None
        self.generator.rollout()

    def ahead(self, _stage: flow.Stage) -> None:
        """What the next step has of samples that are generated before it begins."""
        assert self.generator is not None
        self.generator.ahead()

    def reward(self, stage: flow.Stage) -> None:
        """Samples to scores. The stage is kept before anyone uses them, so a scorer is believed once."""
        self._scored(stage)
        if self.ppo.filter_groups and self.groups.spans > 1:
            for lane, unlike in groups.unlike(self.run, self.groups).items():
                self.run.buffer.put(lane, unlike=unlike)

    def _scored(self, stage: flow.Stage) -> None:
        todo = self._todo(stage)
        if self.scorer is None:  # an environment has said it all
            for lane in todo:
                self.run.buffer.put(lane, scores=self.run.buffer.rows[lane]["earned"])
            return
        for lane, scored in self.run.ask_once(partial(self._scores, todo), SCORES).items():
            self._score(lane, scored)
        again.reward(self)

    def logprobs(self, stage: flow.Stage) -> None:
        """The trainer's own log-probabilities of the samples, in the very shapes of the update: its first ratio is exactly 1.

        A tied head gives the values in the same pass. Where the engine computes as the trainer does, it has said them already,
        to the last bits but a few.
        """
        if self.heard:
            for lane in dict.fromkeys(self.run.lanes):
                self.run.buffer.put(lane, logprobs=self.run.buffer.rows[lane]["rollout_logprobs"])
            return
        for lane, found in self._forward(stage, self.roles.policy):
            self.run.buffer.put(lane, **dict(zip(("logprobs", "values"), found, strict=False)))

    def ref(self, stage: flow.Stage) -> None:
        """The reference's log-probabilities of the samples."""
        if self.roles.judge is None:
            for lane, found in self._forward(stage, self.roles.reference):
                self.run.buffer.put(lane, ref_logprobs=found[0])
            again.reference(self)
            return
        cut = {lane: self._first_epoch(lane) for lane in self._todo(stage)}
        asked = [take(self.run.buffer.rows[lane], block) for lane, its in cut.items() for block in its]
        verdicts = self.run.ask_once(partial(self.roles.judge, "ref", asked), VERDICTS)
        said = iter(verdicts)
        for lane, its in cut.items():
            mask = self.run.buffer.rows[lane]["mask"]
            self.run.buffer.put(lane, ref_logprobs=_placed(its, [next(said) for _ in its], mask))

    def values(self, stage: flow.Stage) -> None:
        """The critic's values of the samples."""
        for lane, found in self._forward(stage, self.roles.values):
            self.run.buffer.put(lane, values=found[0])

    def advantage(self, _stage: flow.Stage) -> None:
        """Scores, KL and values to advantages; with the batch's moments, in the order of lanes, to whitened ones."""
        ppo, buffer, tallies = self.ppo, self.run.buffer, {}
        of_tokens = {lane: self._rewards(buffer.rows[lane]) for lane in dict.fromkeys(self.run.lanes)}
        self._against_others(of_tokens)
        for lane in self.run.lanes:
            rows, tally = buffer.rows[lane], Tally()
            mask = rows["mask"]
            divergence = torch.zeros_like(rows["logprobs"])
            if "ref" in self.flow:
                divergence = torch.where(mask, kl.k1(rows["logprobs"], rows["ref_logprobs"]), 0.0)
            rewards, there = of_tokens[lane], ~rows["lost"] if self.turns else None
            if ppo.algorithm == "ppo" and self.together:
                buffer.put(lane, rewards=rewards)
            elif ppo.algorithm == "ppo":
                advantages, returns = gae(rewards, rows["values"], mask, gamma=ppo.gamma, lam=ppo.lam)
                buffer.put(lane, advantages=advantages, returns=returns)
            asked, chosen = self._asked(lane), self._chosen(lane)
            buffer.put(lane, kept=asked & rows["ended"] if ppo.mask_truncated else asked)
            tally.add(left_out=(~rows["kept"]).sum().item())
            tally.spread("scores", rows["scores"].sum(1), there)
            for name in (name for name in rows if name.startswith(PART)):
                tally.spread(f"reward/{name.removeprefix(PART)}", rows[name], there)
            if not self.together:
                self._tally_gains(lane, tally)
            heard = None if there is None else there[chosen]
            if ppo.algorithm != "ppo":  # no reference has seen the others
                tally.spread("sums", rewards.sum(1)[chosen], heard)
            tally.spread("kl", divergence.sum(1)[chosen], heard)
            tally.spread("kl_per_token", (divergence.sum(1) / mask.sum(1).clamp(min=1))[chosen], heard)
            if not self.heard:
                gap = torch.where(mask, rows["logprobs"] - rows["rollout_logprobs"], 0.0)
                tally.spread("gap", gap[chosen], mask[chosen])
            tally.spread("length", mask.sum(1), there)
            tally.add(ended=rows["ended"].sum().item())
            if self.turns:
                tally.spread("turns", rows["turns"])
                tally.add(lost=rows["lost"].sum().item(), troubles=rows["troubles"].sum().item())
            self._tally_entries(lane, tally)
            tallies[lane] = tally
        whole = self.run.exchange(tallies)
        if not self.together:
            self._scale(whole)
        buffer.facts |= facts_of(whole)
        if "ref" in self.flow:
            buffer.facts |= {"kl": whole.moments["kl"].mean, "kl_coef": self.coefficient.of(buffer.step)}
        seen = whole.moments["kl" if ppo.kl.per == "sample" else "kl_per_token"]
        self.coefficient.observe(step=buffer.step, kl=seen.mean, samples=int(seen.count))

    def _against_others(self, rewards: Mapping[int, torch.Tensor]) -> None:
        """The advantages of an algorithm without a critic."""
        if self.ppo.algorithm != "ppo":
            for lane, gained in groups.advantages(self.run, self.groups, self.ppo, rewards).items():
                self.run.buffer.put(lane, advantages=gained)

    def _tally_gains(self, lane: int, tally: Tally) -> None:
        rows, chosen = self.run.buffer.rows[lane], self._chosen(lane)
        mask = rows["mask"]
        tally.spread("advantages", rows["advantages"][chosen], mask[chosen])
        if "returns" in rows:
            tally.spread("returns", rows["returns"], mask)
            tally.spread("errors", rows["returns"] - rows["values"], mask)

    def _scale(self, whole: Tally) -> None:
        """Advantages by the moments of the whole batch."""
        ppo, buffer = self.ppo, self.run.buffer
        for lane in dict.fromkeys(self.run.lanes):
            rows = buffer.rows[lane]
            if ppo.algorithm in WHITENED and ppo.whiten:
                buffer.put(lane, advantages=whiten(rows["advantages"], rows["mask"], whole.moments["advantages"]))
            if ppo.algorithm == "grpo" and ppo.scale_rewards == "batch":
                buffer.put(lane, advantages=over_batch(rows["advantages"], whole.moments["sums"]))

    def _gain(self, made: Mapping[int, Mapping[int, tuple[Block, tuple[torch.Tensor, ...]]]]) -> None:
        """What the critic's first passes came to, by lane and part: values, advantages and returns, and these scaled. As
        `advantage` does it where the values have a stage by themselves.
        """
        buffer, tallies = self.run.buffer, {}
        for lane in dict.fromkeys(self.run.lanes):
            its, mask = [part for _, part in sorted(made[lane].items())], buffer.rows[lane]["mask"]
            columns = zip(*(found for _, found in its), strict=True)
            values, advantages, returns = (_placed([block for block, _ in its], column, mask) for column in columns)
            buffer.put(lane, values=values, advantages=advantages, returns=returns)
        for lane in self.run.lanes:
            tallies[lane] = Tally()
            self._tally_gains(lane, tallies[lane])
        whole = self.run.exchange(tallies)
        self._scale(whole)
        buffer.facts |= gains_of(whole)

    def _rewards(self, rows: Rows) -> torch.Tensor:
        """[samples, tokens]: scores, and what is taken from them."""
        ppo, mask = self.ppo, rows["mask"]
        overlong, divergence, coef = None, None, 0.0
        if ppo.overlong_buffer:
            overlong = overlong_penalties(
                mask, most=self.sizes.answer, buffer=ppo.overlong_buffer, factor=ppo.overlong_penalty
            )
        if ppo.kl.where == "reward":
            divergence = self._divergence(rows["logprobs"], rows)
            coef = self.coefficient.of(self.run.buffer.step)
        return token_rewards(
            rows["scores"],
            mask,
            rows["ended"],
            penalty=ppo.missing_eos_penalty,
            overlong=overlong,
            kl=divergence,
            coef=coef,
        )

    def _chosen(self, lane: int) -> torch.Tensor:
        """The rows that are trained on: of more than a lane's part of the batch the first of groups that scored unlike."""
        rows, most = self.run.buffer.rows[lane], self.ppo.batch // self.lanes
        if len(rows["mask"]) <= most:
            return torch.arange(len(rows["mask"]))
        alike = ~self._unlike(rows)
        return alike.to(torch.int8).argsort(stable=True)[:most].sort().values

    def _asked(self, lane: int) -> torch.Tensor:
        """[samples]: the chosen ones of groups that there is something to learn from."""
        rows = self.run.buffer.rows[lane]
        asked = torch.zeros(len(rows["mask"]), dtype=torch.bool)
        asked[self._chosen(lane)] = True
        return asked & self._unlike(rows, rows.get("lost")) if self.ppo.filter_groups else asked

    def _unlike(self, rows: Rows, lost: torch.Tensor | None = None) -> torch.Tensor:
        """[samples]: whether the scores of a sample's group are not all alike."""
        return rows["unlike"] if "unlike" in rows else contested(rows["scores"].sum(1), self.ppo.group, lost)

    def _divergence(self, policy: torch.Tensor, rows: Rows) -> torch.Tensor:
        kind = self.ppo.kl.estimator or ("k1" if self.ppo.kl.where == "reward" else "k3")
        return kl.estimate(kind, policy, rows["ref_logprobs"], rows["mask"], limit=self.ppo.kl.limit)

    def update(self, _stage: flow.Stage) -> None:
        """Mini-batches of several epochs. Each lane's loss is its sum over the count of the whole mini-batch."""
        buffer, ppo = self.run.buffer, self.ppo
        if self.generator is not None:
            self.generator.begin()  # already under way, unless the step was taken up after its rollout
        orders = {lane: self._orders(lane) for lane in self.run.lanes}
        cut = {lane: self._cut(lane) for lane in self.run.lanes}
        passes = self._passes({lane: list(map(len, its)) for lane, its in cut.items()}, self.parts)
        count = len(passes)
        keeps = self.flow.again(self.flow.made(buffer.done), updates=1) is not None
        for number in range(self.run.streams.update, count):
            entries = self._entries(number)
            for role in self.flow.trained:
                with self.run.part(f"{role}_update"):
                    said, made = Tally(), dict[int, dict[int, tuple[Block, tuple[torch.Tensor, ...]]]]()
                    for lane, part, tally in self.run.passes(role):
                        its = (cut.get(lane) or self._cut(lane))[number]  # a lane that is audited is carried elsewhere
                        if part < max(len(its), passes[number]):
                            rows = self._take(buffer.rows[lane], its[part] if part < len(its) else nothing(self.sizes))
                            with self.run.streams.at(lane=lane).ambient(f"{role} update, part {part}"):
                                backward(self.losses[role](rows, entries, tally))
                            said = tally
                            if part < len(its):
                                made.setdefault(lane, {})[part] = its[part], self._valued
                        else:  # nothing is left of this lane: its gradient is 0, and so is all that it says
                            self.run.leave_out()
                            tally.add(**dict.fromkeys(said.held, 0.0))
                if role == "critic" and number == 0 and self._valued:
                    self._gain(made)
            for lane in dict.fromkeys(self.run.lanes):
                self._use(lane, number, orders[lane][number], each=count // ppo.epochs)
            done = self.run.update(
                lr_factor=self._lr_factor(), max_norm=ppo.max_grad_norm, keeps=keeps, skips=ppo.not_finite == "skip",
                guard=guard_of(ppo.spike, entries),
            )  # fmt: skip
            self._told(done, number, entries)

    def _use(self, lane: int, number: int, index: torch.Tensor, *, each: int) -> None:
        """Into the ledger: each sample once in an epoch of `each` updates, as used or as filtered. What is in none of them goes
        with the first.
        """
        asked, ids = self._asked(lane), self.run.buffer.ids[lane]
        filtered = index[~asked[index]].tolist()
        if number % each == 0:
            chosen = set(self._chosen(lane).tolist())
            filtered += [i for i in range(len(ids)) if i not in chosen]
        self.run.used(lane, number // each, [ids[i] for i in index[asked[index]].tolist()])
        if filtered:
            self.run.used(lane, number // each, [ids[i] for i in filtered], filtered=True)

    def _told(self, done: Mapping[str, Reduced], number: int, entries: Entries) -> None:
        """The means over the step's updates so far, without those that were skipped."""
        facts = self.run.buffer.facts
        facts.update(spiked(next(iter(done.values())), number, facts))
        if any(reduced.skipped for reduced in done.values()):
            facts["skipped"] = facts.get("skipped", 0.0) + 1.0
            return
        made = number - facts.get("skipped", 0.0)
        for role, reduced in done.items():
            facts[f"{role}_norm"] = reduced.norm
            for name, sum_ in reduced.tally.sums.items():
                facts[name] = (facts.get(name, 0.0) * made + sum_ / max(entries.tokens, 1.0)) / (made + 1)

    def sync(self, _stage: flow.Stage) -> None:
        """The new weights to the rollout engine."""
        assert self.generator is not None
        self.generator.sync()

    def actor_loss(self, rows: Rows, entries: Entries, tally: Tally) -> torch.Tensor:
        """The surrogate, and what is added to it."""
        ppo, mask, how = self.ppo, rows["mask"] & rows["kept"][:, None], self.ppo.loss_agg_mode
        count = entries.of(how, most=self.sizes.answer)
        said = self.said(rows, mask, entropy=ppo.calculate_entropy, slopes=bool(ppo.entropy_coef))
        new, entropy, values = said.logprobs, said.entropy, said.values
        limit = ppo.importance_limit
        weights = importance_weights(rows["logprobs"], rows["rollout_logprobs"], mask, ppo, limit) if limit else None
        term = policy_loss(new, rows["logprobs"], rows["advantages"], mask, ppo, weights)
        loss = term.loss.over(count)
        if ppo.entropy_coef and entropy is not None:
            loss = loss - ppo.entropy_coef * summed(entropy, mask, how).over(count)
        if ppo.kl.where == "loss":
            coef = self.coefficient.of(self.run.buffer.step)
            loss = loss + coef * summed(self._divergence(new, rows), mask, how).over(count)
        if values is not None and ppo.algorithm == "ppo":
            critic = value_loss(values, rows["values"], rows["returns"], mask, clip=ppo.value_clip)
            loss = loss + ppo.value_coef * critic.over(entries.tokens)
            tally.add(value_loss=critic.total)
        # What is tallied is divided by the tokens later; the loss has a count of its own.
        tally.add(policy_loss=term.loss.total * (entries.tokens / count))
        if entropy is not None:
            tally.add(entropy=masked(entropy, mask).total)
        tally.add(clip_fraction=term.clipped.total, approx_kl=term.approx_kl.total)
        return loss + self.evenly(said, mask, entries, tally)

    def said(self, rows: Rows, mask: torch.Tensor, *, entropy: bool = False, slopes: bool = False) -> Said:
        """What the actor says in an update, as `roles.said`."""
        counted = mask.any(1) if self.ppo.router_aux_coef else None
        return self.roles.said(self.roles.actor, rows, entropy=entropy, slopes=slopes, counted=counted)

    def evenly(self, said: Said, mask: torch.Tensor, entries: Entries, tally: Tally) -> torch.Tensor | float:
        """What a mixture's auxiliary loss adds to a loss: the mean of the passes', of which each weighs as it has samples."""
        if said.aux is None:
            return 0.0
        share = mask.any(1).sum() / max(entries.samples, 1.0)
        tally.add(router_aux=said.aux * share * entries.tokens)  # which is divided by the tokens later
        return self.ppo.router_aux_coef * said.aux * share

    def critic_loss(self, rows: Rows, entries: Entries, tally: Tally) -> torch.Tensor:
        """A separate critic's. In the first update of a step its values may be the old ones, of which returns are made."""
        values = self.roles.values(rows)[0]
        if "rewards" in rows and self.run.streams.update == 0:
            old, mask, ppo = values.detach(), rows["mask"], self.ppo
            # On the host: it goes from token to token, in steps that are too small for a GPU.
            its = (it.cpu() for it in (rows["rewards"], old, mask))
            advantages, returns = (it.to(old.device) for it in gae(*its, gamma=ppo.gamma, lam=ppo.lam))
            self._valued = old, advantages, returns
        else:
            old, returns = rows["values"], rows["returns"]
        term = value_loss(
            values,
            old,
            returns,
            rows["mask"] & rows["kept"][:, None],
            clip=self.ppo.value_clip,
        )
        tally.add(value_loss=term.total)
        return term.over(entries.tokens)

    # Lanes, blocks and forward passes.

    def _answers(self, lane: int) -> list[Answer]:
        rows = self.run.buffer.rows[lane]
        prompts = [p for _, p in self.feed(self.run.streams.step, lane) for _ in range(self.groups.part)]
        return [
            answer_of(self.roles.tokenizer, name, prompt, {key: value[i] for key, value in rows.items()})
            for i, (name, prompt) in enumerate(zip(self.run.buffer.ids[lane], prompts, strict=True))
        ]

    def _scores(self, todo: Sequence[int]) -> dict[int, Scored]:
        """These lanes' answers, scored."""
        assert self.scorer is not None, "an environment has said it all"
        streams = self.run.streams.at(update=0)
        return scores_of(
            self.scorer,
            {lane: self._answers(lane) for lane in todo},
            rounds=todo,
            within=lambda lane: streams.at(lane=lane).ambient("reward"),  # a function may draw
        )

    def _score(self, lane: int, scored: Scored) -> None:
        rows = self.run.buffer.rows[lane]
        found = placed(scored.scores, rows["mask"])
        parts = {f"{PART}{name}": torch.tensor(list(map(total, its))) for name, its in scored.parts.items()}
        self.run.buffer.put(lane, scores=found + rows["earned"] if self.turns else found, **parts)

    def _todo(self, stage: flow.Stage) -> Sequence[int]:
        """The lanes without this stage's results. In lockstep all of them: nobody may leave a collective out."""
        lanes = self.run.lanes
        return lanes if self.run.lockstep else [lane for lane in lanes if not self.run.buffer.has(lane, stage.rows)]

    def _orders(self, lane: int) -> list[torch.Tensor]:
        size = self.ppo.mini_batch // self.lanes
        streams = self.run.streams.at(update=0, lane=lane)
        chosen = self._chosen(lane)
        count = self.ppo.batch // self.ppo.mini_batch
        orders = updates(len(chosen), size, count, self.ppo.epochs, streams, unit=self.sizes.unit)
        return [chosen[index] for index in orders]

    def _tally_entries(self, lane: int, tally: Tally) -> None:
        """How much each update's loss is a sum of: every lane must know of all before the first backward pass. And what the
        passes of the updates compute, of which the rest is padding.
        """
        rows = self.run.buffer.rows[lane]
        for i, (index, its) in enumerate(zip(self._orders(lane), self._cut(lane), strict=True)):
            mask = (rows["mask"] & rows["kept"][:, None])[index] if "kept" in rows else rows["mask"][index]
            tally.add(**{f"entries.{i}": self._count(mask), f"entries.{i}.samples": float(mask.any(1).sum())})
            tally.add(tokens=float(sum(b.tokens for b in its)), places=float(sum(b.places for b in its)))

    def _entries(self, number: int) -> Entries:
        """Of the whole mini-batch."""
        facts = self.run.buffer.facts
        return Entries(facts[f"entries.{number}"], facts[f"entries.{number}.samples"])

    def _count(self, mask: torch.Tensor) -> float:
        return float(mask.sum())

    def _cut(self, lane: int) -> list[list[Block]]:
        """Each update's passes."""
        rows = self.run.buffer.rows[lane]
        return [blocks(index, rows, self.sizes) for index in self._orders(lane)]

    def _first_epoch(self, lane: int, rows: Rows | None = None) -> list[Block]:
        """Passes that have each row once: those of the updates, so that their log-probabilities are the same bits."""
        rows = self.run.buffer.rows[lane] if rows is None else rows
        orders = self._orders(lane)[: self.ppo.batch // self.ppo.mini_batch]
        return [block for index in orders for block in blocks(index, rows, self.sizes)]

    def _passes(self, counts: Mapping[int, Sequence[int]], most: int) -> list[int]:
        """How many passes all make of each of several things, of which each lane has so many, `most` at most. A lane that has
        more than that makes its own; where passes are nobody's collective nobody makes any more. Collective.
        """
        each = len(next(iter(counts.values()), ()))
        if self.run.joins != "most":
            return [most if self.run.joins == "all" else 0] * each
        tallies = {lane: Tally() for lane in counts}
        for lane, its in counts.items():
            for i, mine in enumerate(its):  # how many lanes have that many: the greatest is read from the sums
                tallies[lane].add(**{f"{i}.{k}": float(k < mine) for k in range(most)})
        sums = self.run.exchange(tallies).sums
        return [sum(sums[f"{i}.{k}"] > 0 for k in range(most)) for i in range(each)]

    def _take(self, rows: Rows, block: Block) -> Rows:
        return {name: x.to(self.roles.device) for name, x in take(rows, block).items()}

    def _forward(self, stage: flow.Stage, compute: Compute) -> Iterator[tuple[int, list[torch.Tensor]]]:
        """What is computed of each lane that lacks this stage's results."""
        lanes = self._todo(stage)
        return self._forward_rows(lanes, {lane: self.run.buffer.rows[lane] for lane in lanes}, compute)

    @torch.no_grad()
    def _forward_rows(
        self, lanes: Sequence[int], rows: Mapping[int, Rows], compute: Compute
    ) -> Iterator[tuple[int, list[torch.Tensor]]]:
        cut = {lane: self._first_epoch(lane, its) for lane, its in rows.items()}
        updates_of_epoch = self.ppo.batch // self.ppo.mini_batch
        (count,) = self._passes({lane: [len(its)] for lane, its in cut.items()}, self.parts * updates_of_epoch) or [0]
        for lane in lanes:
            made = [compute(self._take(rows[lane], block)) for block in cut[lane]]
            for _ in range(count - len(made)):
                compute(self._take(rows[lane], nothing(self.sizes)))
            yield lane, [_placed(cut[lane], column, rows[lane]["mask"]) for column in zip(*made, strict=True)]

    @torch.no_grad()
    def asked_of_reference(self, lane: int) -> torch.Tensor:
        """The reference's log-probabilities of a lane's samples, in the passes that `ref` makes of them."""
        rows = self.run.buffer.rows[lane]
        cut = self._first_epoch(lane)
        made = [self.roles.reference(self._take(rows, block))[0] for block in cut]
        return _placed(cut, made, rows["mask"])

    def _lr_factor(self) -> float:
        return lr_factor(self.ppo.schedule, self.run.streams.step, warmup=self.ppo.warmup_steps, steps=self.steps)


def _placed(cut: Sequence[Block], values: Sequence[torch.Tensor], mask: torch.Tensor) -> torch.Tensor:
    """[samples, tokens] from what each block's rows came to; 0 in what was cut off."""
    found = torch.zeros(mask.shape, dtype=values[0].dtype)
    for block, its in zip(cut, values, strict=True):
        found[block.index, : its.shape[1]] = its[: len(block.index)].cpu()
    return found


def backward(loss: torch.Tensor) -> None:
    """For the type checker: torch has not annotated it."""
    loss.backward()  # type: ignore[no-untyped-call]
