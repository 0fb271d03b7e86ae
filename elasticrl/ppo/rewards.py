"""What scores an answer: a Python function, a reward model, an HTTP endpoint, or several of these, weighed.

The idea: a scorer maps a lane's answers to as many scores, and that is all. A score is a number for the whole answer, or one
for each of its tokens where a rule can tell which of them were right. What a scorer outside of the process says is not a
function of anything we know, so it is asked once: the numbers are kept with the samples before anyone uses them, and a step
that is run again uses those.
"""

from __future__ import annotations

import http.client
import json
import math
import random
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import cache, partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import tenacity
import torch

from elasticrl.base.parsed import parsed
from elasticrl.base.words import count
from elasticrl.ppo import models
from elasticrl.ppo.batches import Rows, blocks, nothing, take
from elasticrl.ppo.sizes import Sizes

if TYPE_CHECKING:
    from torch import nn

    from elasticrl.config.training import Reward
    from elasticrl.ppo.prompts import Prompt


MAX_REPLY = 64 << 20
REDIRECTS = frozenset({301, 302, 303, 307, 308})
MODEL = "model"  # the name of reward.model among reward.parts
REASON = 500  # bytes of a reply that refuses, to be told
_T = TypeVar("_T")
TURN_S = 0.05  # between looks whether somebody wants us elsewhere
SIGN_S = 0.5  # between signs that this worker waits: two are well within `timeouts.floor`
Score = float | list[float]
Judge = Callable[[str, Sequence[Rows]], list[torch.Tensor]]  # a role elsewhere, asked about blocks


class RewardError(RuntimeError):
    """A scorer that gave no usable scores: which, what, and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One sample, as a scorer sees it.

    Example: Answer(id="0/17", prompt="3141", response="1413", pieces=("1", "4", "1", "3"),
    tokens=(12, 3, 1, 4, 1, 13, 1, 4, 1, 3), ended=False)
    """

    id: str
    prompt: str
    response: str  # without special tokens
    pieces: tuple[str, ...]  # the response, token by token
    tokens: tuple[int, ...]  # prompt and response
    ended: bool
    record: Mapping[str, Any] = field(default_factory=dict)  # the prompt's other fields


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """What a lane's answers scored. `parts`: what each of several rewards said, before it was weighed; of one alone nothing.

    Example: Scored(scores=[0.7], parts={"correct": [1.0], "brief": [-0.6]})
    """

    scores: list[Score]
    parts: Mapping[str, list[Score]] = field(default_factory=dict)


def joined(found: Sequence[Scored]) -> Scored:
    """Of one lane's answers, what was scored one part after the other."""
    names = found[0].parts if found else ()
    return Scored(
        scores=[score for one in found for score in one.scores],
        parts={name: [score for one in found for score in one.parts[name]] for name in names},
    )


class Scorer(Protocol):
    """Anything that scores."""

    def score(self, answers: Sequence[Answer]) -> list[Score]:
        """One for each answer, in order."""


def checked(who: str, scores: Any, answers: Sequence[Answer]) -> list[Score]:
    """The scores as floats, if there are as many finite ones as there should be."""
    try:
        found = [[float(x) for x in score] if isinstance(score, list | tuple) else float(score) for score in scores]
    except (TypeError, ValueError, OverflowError) as error:
        raise RewardError(f"{who} must return {len(answers)} scores, not {str(scores)[:200]!r}") from error
    if len(found) != len(answers):
        raise RewardError(f"{who} returned {len(found)} scores for {len(answers)} answers")
    for answer, score in zip(answers, found, strict=True):
        if isinstance(score, list) and len(score) != len(answer.pieces):
            raise RewardError(
                f"{who} gave {len(score)} scores to the {len(answer.pieces)} tokens of sample {answer.id}"
            )
        if not all(map(math.isfinite, score if isinstance(score, list) else [score])):
            raise RewardError(f"{who} scored sample {answer.id} with {score}, which would poison the whole batch")
    return found


def answer_of(tokenizer: Any, name: str, prompt: Prompt, row: Rows) -> Answer:
    """A sample's row, as a scorer sees it."""
    said = row["tokens"][-len(row["mask"]) :][row["mask"]].tolist()
    return Answer(
        id=name,
        prompt=prompt.text,
        response=tokenizer.decode(said, skip_special_tokens=True),
        pieces=tuple(tokenizer.decode([token]) for token in said),
        tokens=tuple(row["tokens"][row["attention"]].tolist()),
        ended=bool(row["ended"]),
        record=prompt.record,
    )


def total(score: Score) -> float:
    """Of the whole answer. Example: 1.5 of [0.5, 1.0, 0.0]"""
    return math.fsum(score) if isinstance(score, list) else score


def weighed(said: Sequence[tuple[float, Score]], tokens: int) -> Score:
    """Several weights and scores of one answer as one score: of each of its tokens, if one of them is.

    >>> weighed([(1.0, 0.5), (2.0, 0.25)], 3), weighed([(1.0, 0.5), (2.0, [0.25, 0.0, 1.0])], 3)
    (1.0, [0.5, 0.0, 2.5])
    """
    if not tokens or not any(isinstance(score, list) for _, score in said):
        return math.fsum(weight * total(score) for weight, score in said)
    rows = [
        [weight * x for x in (score if isinstance(score, list) else [*[0.0] * (tokens - 1), score])]
        for weight, score in said
    ]
    return [math.fsum(column) for column in zip(*rows, strict=True)]


def scores_of(
    scorer: Scorer, answers: Mapping[int, Sequence[Answer]], *, rounds: Sequence[int],
    within: Callable[[int], AbstractContextManager[None]], most: int = 0,
) -> dict[int, Scored]:  # fmt: skip
    """Each lane's answers, scored. Endpoints are asked about all lanes, and all of them at once; what computes here takes one
    lane after the other meanwhile. `within` surrounds a lane, for what draws random numbers. Collective passes are made for the
    lanes of `rounds`, each as for a lane with `most` answers.
    """
    parts, lanes = parts_of(scorer), list(answers)
    asked = {
        name: part.begin([answers[lane] for lane in lanes])
        for name, part in parts.items()
        if isinstance(part, Endpoint)
    }
    try:
        said = {
            name: _here(part, answers, rounds, within, most)
            for name, part in parts.items()
            if not isinstance(part, Endpoint)
        }
        for name, found in outcomes_of(parts, asked).items():
            said[name] = dict(zip(lanes, found, strict=True))
    finally:
        for one in asked.values():
            one.gone.set()
    if not isinstance(scorer, Weighted):
        return {lane: Scored(scores=scores) for lane, scores in said[""].items()}
    return {lane: scorer.scored(answers[lane], {name: said[name][lane] for name in parts}) for lane in lanes}


def _here(
    part: Scorer, answers: Mapping[int, Sequence[Answer]], rounds: Sequence[int],
    within: Callable[[int], AbstractContextManager[None]], most: int,
) -> dict[int, list[Score]]:  # fmt: skip
    if isinstance(part, RewardModel):
        return {lane: part.score(answers[lane], most=most) for lane in (rounds if part.collective else answers)}
    found: dict[int, list[Score]] = {}
    for lane, its in answers.items():
        with within(lane):
            found[lane] = part.score(its) if its else []
    return found


def placed(scores: Sequence[Score], mask: torch.Tensor) -> torch.Tensor:
    """[samples, tokens]: a whole answer's score on its last valid token, tokens' scores each on its own."""
    rewards = torch.zeros(mask.shape)
    for row, keep, score in zip(rewards, mask, scores, strict=True):
        places = keep.nonzero()[:, 0]
        if isinstance(score, list):
            row[places] = torch.tensor(score)
        elif len(places):
            row[places[-1]] = score
    return rewards


@dataclass(frozen=True, slots=True)
class Function:
    """A function of our own process. Example: Function("elasticrl.ppo.tasks:reverse", reverse)"""

    name: str
    call: Callable[[Sequence[Answer]], Sequence[Score]]

    @classmethod
    def named(cls, name: str) -> Function:
        """From `module:function`."""
        module, _, attribute = name.partition(":")
        try:
            call = getattr(import_module(module), attribute)
        except (ImportError, AttributeError) as error:
            raise RewardError(f"reward.function {name!r} cannot be found ({error}); it is module:function") from error
        return cls(name, call)

    def score(self, answers: Sequence[Answer]) -> list[Score]:
        """What the function says."""
        return checked(self.name, self.call(answers), answers)


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardModel:
    """A Hugging Face reward model, asked about a lane's answers by their real lengths, so no other lane changes a score."""

    model: nn.Module
    sizes: Sizes
    pad: int
    collective: bool = False  # its layers are sharded, so no rank may leave out a lane, or a pass of one
    judge: Judge | None = None  # whoever has the model in our place

    @torch.no_grad()
    def score(self, answers: Sequence[Answer], *, most: int = 0) -> list[Score]:
        """At each answer's last token. `most`: answers of a lane that has more than this one: where passes are collective, all
        make as many.
        """
        width = self.sizes.sample
        tokens = torch.full((len(answers), width), self.pad)
        attention = torch.zeros(len(answers), width, dtype=torch.bool)
        for i, answer in enumerate(answers):
            tokens[i, : len(answer.tokens)] = torch.tensor(answer.tokens)
            attention[i, : len(answer.tokens)] = True
        rows = {"tokens": tokens, "attention": attention, "mask": attention[:, self.sizes.prompt :]}
        cut = blocks(torch.arange(len(answers)), rows, self.sizes)
        if self.collective:
            cut += [nothing(self.sizes)] * (self.sizes.parts(max(len(answers), most)) - len(cut))
        found = torch.zeros(len(answers))
        for block, scores in zip(cut, self._said([take(rows, block) for block in cut]), strict=True):
            found[block.index] = scores[: len(block.index)]
        return checked("the reward model", found.tolist(), answers)

    def _said(self, cut: Sequence[Rows]) -> list[torch.Tensor]:
        if self.judge is not None:
            return self.judge("reward", cut)
        device = next(self.model.parameters()).device
        return [
            models.whole_scores(self.model, rows["tokens"].to(device), rows["attention"].to(device)).cpu()
            for rows in cut
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """An HTTP endpoint: POST {"answers": [...]}, answered with {"scores": [...]}.

    One request has `timeout_s`; all tries of all that is asked together `deadline_s`. What may heal (no connection, a timeout,
    429, 5xx) is tried again: `retries` times where it took all its time, until the deadline where it failed at once, as while a
    server restarts. What will not (4xx, a wrong number of scores) is an error at once. It is asked in threads, so many lanes
    `at_once`: the training thread turns on `check`, which raises if somebody wants us elsewhere, and says with `waits` that it
    waits and does not hang; it does so inside of `alone`.
    """

    url: str
    timeout_s: float = 10.0
    retries: int = 3
    deadline_s: float = 60.0
    at_once: int = 4
    check: Callable[[], None] = lambda: None
    waits: Callable[[], None] = lambda: None
    alone: Callable[[], AbstractContextManager[object]] = nullcontext

    def score(self, answers: Sequence[Answer]) -> list[Score]:
        """What the endpoint says. Call it once for a sample, and keep the answer."""
        return self.each([answers])[0]

    def each(self, lanes: Sequence[Sequence[Answer]]) -> list[list[Score]]:
        """What it says of several lanes' answers. A lane is a request, so that none grows as workers get fewer."""
        asked = self.begin(lanes)
        try:
            return outcomes_of({"": self}, {"": asked})[""]
        finally:
            asked.gone.set()

    def begin(self, lanes: Sequence[Sequence[Answer]]) -> Asked:
        """It is asked about these in threads, and nobody waits for it yet. Who does not wait any more says so (`gone`)."""
        ends = time.monotonic() + self.deadline_s
        return self._working([partial(self._scores, answers, ends) for answers in lanes])

    def _scores(self, answers: Sequence[Answer], ends: float, gone: threading.Event) -> list[Score]:
        if not answers:
            return []
        asked = [asdict(answer) for answer in answers]
        body = json.dumps({"answers": asked}, default=str).encode()  # a record may have dates and the like
        reply = self._ask(body, ends, gone)
        if not isinstance(reply, dict) or "scores" not in reply:
            raise RewardError(f'reward endpoint {self.url} must answer {{"scores": [...]}}, not {str(reply)[:200]}')
        return checked(f"reward endpoint {self.url}", reply["scores"], answers)

    def _working(self, works: Sequence[Callable[[threading.Event], list[Score]]]) -> Asked:
        """What the works will return, or raise. Their waits have deadlines; they are told when nobody waits for them."""
        found: list[Future[list[Score]]] = [Future() for _ in works]
        todo = iter(zip(works, found, strict=True))
        gone, lock = threading.Event(), threading.Lock()

        def working() -> None:
            while not gone.is_set():
                with lock:
                    work, future = next(todo, (None, None))
                if work is None or future is None:
                    return
                try:
                    future.set_result(work(gone))
                except BaseException as error:  # noqa: BLE001 - it is raised where it is waited for
                    future.set_exception(error)
                    gone.set()  # the rest is asked in vain

        for _ in range(min(self.at_once, len(works))):
            threading.Thread(target=working, name="reward", daemon=True).start()
        return Asked(found=found, gone=gone)

    def _ask(self, body: bytes, ends: float, gone: threading.Event) -> Any:
        """Again and again, until it answers or it is time to end."""
        start = time.monotonic()
        chance = random.Random()  # Python's own is the lane's meanwhile
        pause = tenacity.wait_exponential(multiplier=0.1, max=5.0)
        late = tenacity.stop_before_delay(ends - start) | tenacity.stop_when_event_set(gone)
        slow = 0

        def post() -> Any:
            nonlocal slow
            begun = time.monotonic()
            try:
                return self._post(body, ends)
            finally:
                slow += time.monotonic() - begun >= self.timeout_s

        ask = tenacity.Retrying(
            retry=tenacity.retry_if_exception(_may_heal),
            stop=lambda tried: slow > self.retries or late(tried),
            wait=lambda tried: chance.uniform(0.0, pause(tried)),
            sleep=tenacity.sleep_using_event(gone),
            reraise=True,
        )
        try:
            return ask(post)
        except Refusal as error:
            raise RewardError(f"reward endpoint {self.url} refused with {error}") from error
        except OSError as error:
            spent = f"{count(ask.statistics['attempt_number'], 'attempt')} in {time.monotonic() - start:.1f} s"
            raise RewardError(
                f"reward endpoint {self.url} did not answer ({spent}): {error}; see that it runs, raise reward.timeout, "
                "reward.retries or timeouts.phase.reward, which all lanes of a worker have together, or lower reward.at_once, "
                "how many of them it is asked about at once"
            ) from error

    def _post(self, body: bytes, ends: float) -> Any:
        left = max(ends - time.monotonic(), 0.001)
        request = urllib.request.Request(self.url, body, {"Content-Type": "application/json"})  # noqa: S310 - checked by config
        try:
            with _opener().open(request, timeout=min(self.timeout_s, left)) as reply:
                text = self._read(reply, ends)
        except urllib.error.HTTPError as error:
            with error:  # it holds the connection, and would for as long as somebody remembers the error
                said = _said(error)
            if error.code in REDIRECTS:
                to = str(error.headers.get("Location", "nowhere"))[:REASON]
                said = f"it redirects to {to!r}, and redirects are not followed: name the address itself in reward.url"
            kind = Busy if error.code == 429 or error.code >= 500 else Refusal
            raise kind(f"HTTP {error.code} {error.reason}: {said}") from None
        except http.client.HTTPException as error:  # no OSError, though it is the connection that ended early
            raise ConnectionError(f"its reply was cut short or is no HTTP ({error!r})") from error
        try:
            return parsed(text)
        except ValueError as error:
            raise RewardError(
                f"reward endpoint {self.url} answered something that is not JSON: {text[:200]!r}"
            ) from error

    def _read(self, reply: Any, ends: float) -> bytes:
        """Piece by piece: a timeout is per read, and an endpoint may drip for ever."""
        text, length = b"", reply.length  # None if it was not told
        while part := reply.read1(1 << 16):
            text += part
            if len(text) > MAX_REPLY:
                raise RewardError(f"reward endpoint {self.url} sent {len(text)} bytes and no end")
            if time.monotonic() > ends:
                raise TimeoutError(f"its reply had no end after {len(text)} bytes")
        if length is not None and len(text) < length:
            raise ConnectionError(f"its reply was cut short after {len(text)} of {length} bytes")
        return text


class _Unfollowed(urllib.request.HTTPRedirectHandler):
    """Who answers may not choose what else this node asks: its metadata server, or what listens on its loopback."""

    def http_error_302(self, req: Any, fp: Any, code: int, msg: str, headers: Any) -> None:
        """Not even read: an address that is none would end in a ValueError."""

    http_error_301 = http_error_303 = http_error_307 = http_error_308 = http_error_302


@cache
def _opener() -> urllib.request.OpenerDirector:
    return urllib.request.build_opener(_Unfollowed)


def outcomes(found: Sequence[Future[_T]], *, check: Callable[[], None], waits: Callable[[], None]) -> list[_T]:
    """What they come to, in order. Raises the first failure while others are still asked, and what `check` does."""
    signs = seldom(waits)
    while (left := wait(found, TURN_S, FIRST_EXCEPTION)).not_done:
        for future in left.done:
            future.result()
        check()
        signs()
    return [future.result() for future in found]


def seldom(waits: Callable[[], None]) -> Callable[[], None]:
    """Called as often as one likes, it signs every SIGN_S."""
    signed = time.monotonic()

    def sign() -> None:
        nonlocal signed
        if (now := time.monotonic()) > signed + SIGN_S:
            signed = now
            waits()

    return sign


class Busy(OSError):
    """It has answered that it cannot now."""


class Refusal(Exception):
    """It has answered that it will not."""


def _said(error: urllib.error.HTTPError) -> str:
    """What its reply says, shortened."""
    try:
        return error.read(REASON).decode(errors="replace").strip() or "nothing more"
    except (OSError, http.client.HTTPException):
        return "nothing more"


def _may_heal(error: BaseException) -> bool:
    return isinstance(error, OSError)  # URLError, timeouts, resets, Busy


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What an endpoint is asked about now: an answer for each lane. `gone`: nobody waits for them any more."""

    found: Sequence[Future[list[Score]]]
    gone: threading.Event


def outcomes_of(parts: Mapping[str, Scorer], asked: Mapping[str, Asked]) -> dict[str, list[list[Score]]]:
    """What endpoints that are asked at once say, by name. The first failure ends the wait for all of them."""
    if not asked:
        return {}
    first = next(part for name, part in parts.items() if name in asked)
    assert isinstance(first, Endpoint)
    with first.alone():
        outcomes([one for its in asked.values() for one in its.found], check=first.check, waits=first.waits)
    return {name: [one.result() for one in its.found] for name, its in asked.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Weighted:
    """Several scorers by name. A score is the sum of theirs, each times its weight; what each said is kept beside it.

    Example: Weighted(parts={"correct": Function(...), "judge": Endpoint(...)}, weights={"correct": 1.0, "judge": 0.5})
    """

    parts: Mapping[str, Scorer]
    weights: Mapping[str, float]

    def score(self, answers: Sequence[Answer]) -> list[Score]:
        """One for each answer, in order."""
        return self.scored(answers, {name: part.score(answers) for name, part in self.parts.items()}).scores

    def scored(self, answers: Sequence[Answer], said: Mapping[str, list[Score]]) -> Scored:
        """What all said, weighed."""
        scores = [
            weighed([(self.weights[name], its[i]) for name, its in said.items()], len(answer.pieces))
            for i, answer in enumerate(answers)
        ]
        return Scored(scores=scores, parts=said)


def parts_of(scorer: Scorer) -> Mapping[str, Scorer]:
    """By name; of one alone "" is the name."""
    return scorer.parts if isinstance(scorer, Weighted) else {"": scorer}


def model_of(scorer: Scorer | None) -> RewardModel | None:
    """The reward model that it is, or has among its parts."""
    parts = parts_of(scorer) if scorer is not None else {}
    return next((part for part in parts.values() if isinstance(part, RewardModel)), None)


def with_model(scorer: Scorer, model: nn.Module) -> Scorer:
    """The same, with this generation's model."""
    if isinstance(scorer, RewardModel):
        return replace(scorer, model=model)
    if isinstance(scorer, Weighted):
        return replace(scorer, parts={name: with_model(part, model) for name, part in scorer.parts.items()})
    return scorer


def of(
    reward: Reward,
    *,
    deadline_s: float,
    load: Callable[[str], RewardModel],
    check: Callable[[], None] = lambda: None,
    waits: Callable[[], None] = lambda: None,
    alone: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> Scorer:
    """The one that the configuration names. `load` makes a reward model from a path."""

    def named(where: str) -> Scorer:
        if not where.startswith(("http://", "https://")):
            return Function.named(where)
        return Endpoint(
            url=where, timeout_s=reward.timeout_s, retries=reward.retries, deadline_s=deadline_s, at_once=reward.at_once,
            check=check, waits=waits, alone=alone,
        )  # fmt: skip

    if reward.parts:
        parts = {name: named(where) for name, where in reward.parts.items()}
        if reward.model is not None:
            parts[MODEL] = load(reward.model)
        return Weighted(parts=parts, weights={name: float(reward.weights.get(name, "1")) for name in parts})
    if (one := reward.function or reward.url) is not None:
        return named(one)
    if reward.model is not None:
        return load(reward.model)
    raise RewardError(
        "nothing scores the samples; set one of reward.function, reward.model, reward.url and reward.parts"
    )
