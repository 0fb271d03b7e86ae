"""An evaluation: held-out prompts that the policy answers now and then, what it scored, and how many prompts it passed.

The idea: nothing of training is touched. The answers are generated in the worker, by the trainer's own weights. Their noise
belongs to a prompt and to nothing else: it is the same in each evaluation, so only the weights differ between two. Prompts
belong to lanes by their number, and all figures come from one tally that is folded in the order of lanes, so they are the same
for any number of workers. What a fault cuts short is made again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from math import comb
from typing import TYPE_CHECKING, Any

import torch

from elasticrl.contract.evaluated import Evaluated, Sample
from elasticrl.ppo.generation import rows_of
from elasticrl.ppo.handed import SCORES
from elasticrl.ppo.report import AT_START, FACTS, parts_said
from elasticrl.ppo.rewards import answer_of, joined, scores_of, total
from elasticrl.ppo.rollout.engine import Request
from elasticrl.ppo.sizes import width_of
from elasticrl.runtime.rng import Streams, seed
from elasticrl.runtime.scalars import Tally

if TYPE_CHECKING:
    from elasticrl.config.training import Evaluate
    from elasticrl.ppo.batches import Rows
    from elasticrl.ppo.idle import Idle
    from elasticrl.ppo.prompts import Prompt
    from elasticrl.ppo.rewards import Answer, Scored, Scorer
    from elasticrl.ppo.rollout.inline import TorchEngine
    from elasticrl.ppo.run import Run

CUT = 400  # characters of a prompt or an answer that is shown


class Evaluation:
    """`prompts` are dealt to `lanes`; `engine` generates by the trainer's own weights. `tell` brings each rank's words to all,
    `says` is told what a step's weights scored. `steps` is the job's length, 0 for no end. `scored`: so many answers of a lane
    are scored at once in training, and no more here; 0: all of them.
    """

    def __init__(
        self, run: Run, engine: TorchEngine, prompts: Sequence[Prompt], asked: Evaluate, *,
        lanes: int, steps: int = 0, scored: int = 0, tell: Callable[[Any], list[Any]] = lambda words: [words],
        says: Callable[[float], None] = lambda _score: None,
    ) -> None:  # fmt: skip
        self.run, self.engine, self.prompts, self.asked = run, engine, prompts, asked
        self.lanes, self.steps, self._tell, self._says = lanes, steps, tell, says
        self._most = -(-len(prompts) // lanes) * asked.samples  # answers of a lane
        self._at_once = min(scored, self._most) or self._most
        self._at_start: Evaluated | None = None

    def before(self, step: int, scorer: Scorer | None, tokenizer: Any, idle: Idle) -> Evaluated | None:
        """Of the weights that the job begins with, if it begins here. They are gone after the first update, so the figures are
        state.
        """
        if step or not self.asked.at_start:
            return None
        facts = self.run.buffer.facts
        if found := figures_of(facts, AT_START):
            return self._at_start or Evaluated(step=0, figures=found)
        if self.run.streams.update:
            return None  # this step was begun without evaluations
        self._at_start = self._made(0, scorer, tokenizer, idle)
        facts |= {AT_START + name: value for name, value in self._at_start.figures.items()}
        return self._at_start

    def after(self, step: int, scorer: Scorer | None, tokenizer: Any, idle: Idle) -> Evaluated | None:
        """Of the weights that the step ends with, if it is their turn."""
        if (step + 1) % self.asked.every and step + 1 != self.steps:
            return None
        found = self._made(step + 1, scorer, tokenizer, idle)
        self.run.buffer.facts |= {FACTS + name: value for name, value in found.figures.items()}
        self._says(found.figures["score"])
        return found

    def _made(self, step: int, scorer: Scorer | None, tokenizer: Any, idle: Idle) -> Evaluated:
        assert scorer is not None
        with self.run.phase("evaluate"):
            with idle.but("actor"):
                answers = self._answers(tokenizer)
            with idle.but("reward"):
                scored = self._scored(scorer, answers)
            whole = self.run.exchange({lane: self._tally(answers[lane], scored[lane]) for lane in answers})
            shown = self._shown(answers, scored)
        return Evaluated(step=step, figures=self._figures(whole), samples=shown)

    def _answers(self, tokenizer: Any) -> dict[int, list[Answer]]:
        """Of each lane that is here. Each pass is a phase by itself, so that a budget is one pass's, however many prompts there
        are; and of one lane alone, so that who carries it changes nothing.
        """
        found: dict[int, list[Answer]] = {}
        self.engine.publish(self.run.version)
        for lane in self.run.lanes if self.run.lockstep else dict.fromkeys(self.run.lanes):
            requests = self._requests(lane)
            rows: list[Rows] = []
            for at in range(0, self._most if self.run.lockstep else len(requests), self.engine.rows):
                with self.run.phase("evaluate"):
                    samples = self.engine.generate(
                        self._block(requests[at : at + self.engine.rows]), version=self.run.version
                    )
                if samples.ids:
                    rows += _each(rows_of(samples))
            found[lane] = [
                answer_of(tokenizer, request.id, prompt, row)
                for (request, prompt), row in zip(requests, rows, strict=True)
            ]
        return found

    def _requests(self, lane: int) -> list[tuple[Request, Prompt]]:
        job = self.run.streams.seed
        return [
            (Request(id=f"evaluate/{number}.{i}", prompt=prompt.tokens, seed=seed(job, "evaluate", number, i)), prompt)
            for number in range(lane, len(self.prompts), self.lanes)
            for prompt in [self.prompts[number]]
            for i in range(self.asked.samples)
        ]

    def _block(self, requests: Sequence[tuple[Request, Prompt]]) -> list[Request]:
        """Those of one pass, of one width."""
        longest = max((len(request.prompt) for request, _ in requests), default=1)
        width = width_of(longest, self.engine.sampling.prompt_tokens)
        return [Request(id=r.id, prompt=r.prompt, seed=r.seed, width=width) for r, _ in requests]

    def _scored(self, scorer: Scorer, answers: Mapping[int, list[Answer]]) -> dict[int, Scored]:
        """In parts as large as a lane of training, each in the phase that scores there: so the budget that was learned there
        holds, and an endpoint is asked about no more than there.
        """
        streams = Streams(seed=self.run.streams.seed)
        found: list[dict[int, Scored]] = []
        for at in range(0, self._most, self._at_once):
            part = {lane: its[at : at + self._at_once] for lane, its in answers.items()}
            with self.run.phase("reward"):
                ask = partial(
                    scores_of, scorer, part, rounds=self.run.lanes, most=self._at_once,
                    within=lambda lane: streams.at(lane=lane).ambient("evaluate"),
                )  # fmt: skip
                found.append(self.run.ask_once(ask, SCORES))
        return {lane: joined([one[lane] for one in found]) for lane in answers}

    def _tally(self, answers: Sequence[Answer], scored: Scored) -> Tally:
        tally, n = Tally(), self.asked.samples
        whole = [total(score) for score in scored.scores]
        tally.spread("score", whole)
        tally.spread("length", [float(len(answer.pieces)) for answer in answers])
        tally.add(ended=float(sum(answer.ended for answer in answers)), prompts=float(len(answers) // n))
        for name, scores in scored.parts.items():
            tally.spread(f"reward/{name}", list(map(total, scores)))
        passed = [sum(score >= self.asked.threshold for score in whole[at : at + n]) for at in range(0, len(whole), n)]
        tally.add(**{f"pass@{k}": sum(pass_at(k, n, right) for right in passed) for k in range(1, n + 1)})
        return tally

    def _figures(self, whole: Tally) -> dict[str, float]:
        sums, moments = whole.sums, whole.moments
        score, prompts = moments["score"], max(sums.pop("prompts"), 1.0)
        found = {"score": score.mean, "score_std": score.std(), "length": moments["length"].mean}
        found |= {"ended": sums.pop("ended") / max(score.count, 1.0)}
        found |= {name: sums[name] / prompts for name in sorted(sums, key=lambda name: int(name.removeprefix("pass@")))}
        return found | parts_said(moments)

    def _shown(self, answers: Mapping[int, list[Answer]], scored: Mapping[int, Scored]) -> tuple[Sample, ...]:
        """The first answers to the first prompts, on all ranks: any of them may have to tell of it."""
        n, mine = self.asked.samples, {}
        for lane, its in answers.items():
            for number in range(lane, min(self.asked.shown, len(self.prompts)), self.lanes):
                at = (number - lane) // self.lanes * n
                parts = {name: total(scores[at]) for name, scores in scored[lane].parts.items()}
                mine[str(number)] = [cut(its[at].prompt), cut(its[at].response), total(scored[lane].scores[at]), parts]
        told = {int(number): words for part in self._tell(mine) for number, words in part.items()}
        return tuple(
            Sample(prompt=prompt, answer=answer, score=score, parts=parts)
            for _, (prompt, answer, score, parts) in sorted(told.items())
        )


def pass_at(k: int, n: int, right: int) -> float:
    """How probable it is that one of k answers passes, of n of which so many did: the unbiased estimate of Chen et al. (2021).

    >>> pass_at(1, 4, 1), pass_at(2, 4, 1), pass_at(4, 4, 1), pass_at(2, 4, 0)
    (0.25, 0.5, 1.0, 0.0)
    """
    return 1.0 - comb(n - right, k) / comb(n, k)


def figures_of(facts: Mapping[str, float], prefix: str = FACTS) -> dict[str, float]:
    """Those of an evaluation, among a step's facts.

    >>> figures_of({"reward": 0.5, "evaluate.score": 0.7})
    {'score': 0.7}
    """
    return {name.removeprefix(prefix): value for name, value in facts.items() if name.startswith(prefix)}


def cut(text: str) -> str:
    """As much of it as is shown, without what is no text to a file: half of a surrogate pair, which JSON may hold."""
    text = text.encode("utf-8", "replace").decode()
    return text if len(text) <= CUT else f"{text[: CUT - 3]}..."


def _each(rows: Rows) -> Iterator[dict[str, torch.Tensor]]:
    """Row by row."""
    for i in range(len(rows["mask"])):
        yield {name: value[i] for name, value in rows.items()}
