"""A step's samples where an environment answers: message, reply, message, until each episode is over.

The idea: a turn is two things that all lanes do together, and after each of them the step's rows are worth keeping. So a step
that was cut short goes on at its last turn, and a reply is sealed in the vault before a message goes out that was made of it.
A sample is one row, prompt first. The policy's tokens have the mask; what the environment said has not, so no loss, no
advantage and no log-probability is of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

import torch

from elasticrl.ppo.environments import EnvironmentFault, Message, Observation, Reply, Task
from elasticrl.ppo.generation import ALONE, by_lane, by_of, requests_of
from elasticrl.ppo.groups import Groups
from elasticrl.ppo.handed import OUTCOMES, SAMPLES
from elasticrl.ppo.prompts import templated
from elasticrl.ppo.rewards import placed
from elasticrl.ppo.rollout.calls import RESET, Call, Desk, Outcome
from elasticrl.ppo.rollout.engine import Engine, Request
from elasticrl.ppo.rollout.inline import left_padded
from elasticrl.ppo.sizes import width_of
from elasticrl.runtime.rng import Streams
from elasticrl.runtime.scalars import Tally

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from elasticrl.ppo.batches import Rows
    from elasticrl.ppo.flow import Keeps
    from elasticrl.ppo.prompts import Prompt
    from elasticrl.ppo.rollout.engine import Draw
    from elasticrl.ppo.run import Buffer
    from elasticrl.runtime.asked import Kind

T = TypeVar("T")
Fed = Callable[[int, int], "Sequence[tuple[str, Prompt]]"]  # as Feed's: the prompts of a step and a lane
OWN = ("turn", "over", "state")  # rows that nobody needs once the episodes are over


@dataclass(frozen=True, slots=True, kw_only=True)
class Words:
    """From tokens to messages, and from observations to tokens."""

    tokenizer: Any
    ends: tuple[int, ...]
    told: Mapping[str, Any] = field(default_factory=dict)  # to the chat template, as with the prompts

    def message(self, turn: int, tokens: Sequence[int]) -> Message:
        """What the policy said."""
        decode = self.tokenizer.decode
        return Message(
            turn=turn, tokens=tuple(tokens), text=decode(tokens, skip_special_tokens=True), raw=decode(tokens),
            whole=bool(tokens) and tokens[-1] in self.ends,
        )  # fmt: skip

    def observation(self, seen: Observation) -> tuple[int, ...]:
        """What the policy is shown."""
        if isinstance(seen, str):
            return tuple(self.tokenizer(seen, add_special_tokens=False)["input_ids"]) if seen else ()
        if not seen or isinstance(seen[0], int):
            tokens = cast("tuple[int, ...]", seen)
            if strange := [token for token in tokens if not 0 <= token < len(self.tokenizer)]:
                raise EnvironmentFault(
                    f"an observation has token {strange[0]}, which is none of the tokenizer's {len(self.tokenizer)}"
                )
            return tokens
        return self._templated(seen)

    def _templated(self, messages: Sequence[Mapping[str, Any]]) -> tuple[int, ...]:
        """What the chat template puts after an answer's last token: the rest of its turn, these messages, a beginning.

        Where a template writes no end behind an answer, the first one is that of a message: then nothing is left out. It lies
        behind where other words of the first message would make a difference.
        """
        behind, first = self._behind(messages), messages[0]
        before, content = len(behind), first.get("content")
        if isinstance(content, str):
            changed = {**first, "content": "1" if content.lstrip().startswith("0") else "0"}
            pairs = zip(behind, self._behind([changed, *messages[1:]]), strict=False)
            before = next((i for i, (a, b) in enumerate(pairs) if a != b), before)
        return behind[next((i + 1 for i, token in enumerate(behind[:before]) if token in self.ends), 0) :]

    def _behind(self, messages: Sequence[Mapping[str, Any]]) -> tuple[int, ...]:
        """What the template puts behind an answer's words.

        Two answers are shown to it, as what comes behind an answer is alike for both. A beginning that is alike says less:
        Qwen3's template writes an answer that is last in other words than one that is followed by messages.
        """
        one, other = (
            templated(
                self.tokenizer,
                [{"role": "user", "content": "0"}, {"role": "assistant", "content": answer}, *messages],
                answer=True,
                told=self.told,
            )
            for answer in "01"
        )
        backwards = zip(reversed(one), reversed(other), strict=False)
        alike = next((i for i, (a, b) in enumerate(backwards) if a != b), None)
        if alike is None:
            raise EnvironmentFault(
                "the chat template leaves out what the policy has said where these messages come after it, so nobody can tell "
                f"where they begin: {str(messages)[:200]}; give the tokenizer another template, or reply with a text"
            )
        return one[len(one) - alike :]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Of a job's samples: turns at most, and tokens of the prompt and of all that follows it. Constants, as of `Sampling`.

    Example: Shape(turns=4, prompt=512, answer=1024)
    """

    turns: int
    prompt: int
    answer: int


class Plays(Protocol):
    """What episodes ask of a `Run`."""

    @property
    def streams(self) -> Streams:
        """The random streams of the present step."""

    @property
    def buffer(self) -> Buffer:
        """What there is of it."""

    @property
    def version(self) -> int:
        """Of the weights."""

    @property
    def lanes(self) -> Sequence[int]:
        """As Run's."""

    @property
    def lockstep(self) -> bool:
        """As Run's."""

    def part(self, name: str) -> AbstractContextManager[None]:
        """As Run's."""

    def keep(self, stage: str, *, how: Keeps = "never") -> None:
        """As Run's."""

    def exchange(self, tallies: Mapping[int, Tally]) -> Tally:
        """As Run's."""

    def ask_once(self, ask: Callable[[], T], kind: Kind[T]) -> T:
        """As Run's."""


class Episodes:
    """In place of a `Generator`. `groups` is how the samples of each prompt lie in lanes. The engine's prompts are a whole
    sample wide, its answers one message long (`configured.sampling_of`), drawn as `draw` says. `called`: what an error calls
    the samples, where they are none of a step.
    """

    def __init__(
        self, run: Plays, engine: Engine, feed: Fed, *, desk: Desk, words: Words, shape: Shape, groups: Groups = ALONE,
        draw: Draw | None = None, called: str = "",
    ) -> None:  # fmt: skip
        self.run, self.engine, self.feed, self.desk = run, engine, feed, desk
        self.words, self.shape, self.groups = words, shape, groups
        self._draw, self._called = draw, called
        assert engine.sampling.prompt_tokens >= shape.prompt + shape.answer

    def rollout(self) -> None:
        """All samples of this step, from where they are."""
        if all(self.run.buffer.has(lane, ("turns",)) for lane in self.run.lanes):
            return  # cut short behind them
        self.desk.begin(self.run.streams.step)
        if self.engine.version != self.run.version:
            self.engine.publish(self.run.version)
        self.play()

    def play(self) -> None:
        """All turns, from where they are, by the weights that the engine has."""
        self._open()
        for turn in range(RESET, self.shape.turns):
            if turn != RESET:
                self._once(f"turn {turn}", turn, self._say)
            self._once(f"reply {turn}", turn, self._ask)
            if not self._left():
                break
        self.desk.forget()
        for lane in dict.fromkeys(self.run.lanes):
            rows = self.run.buffer.rows[lane]
            self.run.buffer.put(lane, turns=rows["turn"].amax(1))
            for name in OWN:
                rows.pop(name, None)

    def begin(self) -> None:
        """Nothing: no episode is begun ahead."""

    def ahead(self) -> None:
        """Nothing: no episode is begun ahead."""

    def sync(self) -> None:
        """Gives the engine the newest weights."""
        self.engine.publish(self.run.version)

    def end(self) -> None:
        """This node is let go, or all steps are made."""
        self.desk.tape.remove()

    def _once(self, name: str, turn: int, work: Callable[[int], None]) -> None:
        """Unless it is done and kept. Keeping seals what was kept before, so a reply before the next message goes out."""
        if name not in self.run.buffer.done:
            with self.run.part("environment" if work == self._ask else "rollout"):
                work(turn)
            # Text that is not to be had again is kept, or what a fault cuts short would be asked about other messages.
            dear = work == self._ask or not self.engine.sampling.blocks
            self.run.keep(name, how="always" if dear else "worth it")

    def _open(self) -> None:
        step, buffer = self.run.streams.step, self.run.buffer
        for lane in dict.fromkeys(self.run.lanes):
            if not buffer.has(lane, ("tokens",)):
                asked = requests_of(self.feed(step, lane), self.groups, lane, self._streams(), self.shape.prompt)
                buffer.ids[lane] = [request.id for request in asked]
                buffer.put(lane, **opened(asked, self.shape, self.engine.sampling.pad), by=by_of(len(asked), step))

    def _left(self) -> bool:
        """Whether any episode goes on, in whatever lane. Collective."""
        return self._count(lambda rows: ~rows["over"])[0] > 0

    def _count(self, which: Callable[[Rows], torch.Tensor]) -> tuple[float, float]:
        """How many samples of the whole batch, and of how many. Collective."""
        tallies = {lane: Tally() for lane in self.run.lanes}
        for lane, tally in tallies.items():
            chosen = which(self.run.buffer.rows[lane])
            tally.add(chosen=float(chosen.sum()), all=float(len(chosen)))
        sums = self.run.exchange(tallies).sums
        return sums["chosen"], sums["all"]

    def _say(self, turn: int) -> None:
        """The policy's messages of this turn: in lockstep a lane at a time, else as the engine likes them best."""
        lockstep, lanes = self.run.lockstep and self.engine.by_lane, list(self.run.lanes)
        groups = [[lane] for lane in lanes]
        if not lockstep:
            lanes = list(dict.fromkeys(lanes))
            sizes = [int((~self.run.buffer.rows[lane]["over"]).sum()) for lane in lanes]
            groups = [[lanes[at] for at in some] for some in self.engine.crowds(sizes)]
        for together in groups:
            asked = {lane: self._silent(lane, turn) for lane in together}
            wanted = {lane: list(its.values()) for lane, its in asked.items()}
            if any(wanted.values()) or lockstep:
                ask = partial(by_lane, self.engine, wanted, self.run.version)
                made = ask() if self.engine.by_lane else self.run.ask_once(ask, SAMPLES)
                for lane, its in asked.items():
                    found = made[lane]
                    answers = zip(found.tokens[:, -found.mask.shape[1] :], found.mask, found.logprobs, strict=True)
                    self.run.buffer.put(lane, **self._heard(lane, turn, dict(zip(its, answers, strict=True))))

    def _silent(self, lane: int, turn: int) -> dict[int, Request]:
        """What is to be generated of a lane, by place; nothing if it came before, as one of lockstep may."""
        rows, names = self.run.buffer.rows[lane], self.run.buffer.ids[lane]
        if bool((rows["turn"] == turn + 1).any()):
            return {}
        streams, speaking = self._streams(), (~rows["over"]).nonzero()[:, 0].tolist()
        said = {place: tuple(rows["tokens"][place][rows["attention"][place]].tolist()) for place in speaking}
        width = width_of(max(map(len, said.values()), default=1), self.engine.sampling.prompt_tokens)
        return {
            place: Request(
                id=names[place],
                prompt=prompt,
                seed=streams.number(f"sample {names[place]}, turn {turn}"),
                width=width,
                draw=self._draw,
            )
            for place, prompt in said.items()
        }

    def _heard(self, lane: int, turn: int, answers: Mapping[int, tuple[torch.Tensor, ...]]) -> Rows:
        """The rows with these messages, cut where there is no room for more."""
        kept = {name: value.clone() for name, value in self.run.buffer.rows[lane].items()}
        for place, (tokens, mask, scores) in answers.items():
            room = kept["mask"].shape[1] - length_of(kept, place)
            append(kept, place, turn, tokens[mask][:room].tolist(), scores[mask][:room])
        return kept

    def _ask(self, turn: int) -> None:
        """The environment's replies to them."""
        buffer, calls, places = self.run.buffer, [], []
        for lane in dict.fromkeys(self.run.lanes):
            for place, call in self._calls(lane, turn):
                places.append((lane, place))
                calls.append(call)
        outcomes = self.run.ask_once(partial(self.desk.ask, calls), OUTCOMES)
        for lane in dict.fromkeys(self.run.lanes):
            mine = {place: found for (its, place), found in zip(places, outcomes, strict=True) if its == lane}
            buffer.put(lane, **self._answered(buffer.rows[lane], turn, mine))
        self._bear()

    def _bear(self) -> None:
        """An outage must not burn the data: with too many lost samples the turn is asked again, as it is not kept yet. All
        ranks fail alike.
        """
        if not self._called:
            self.bear(*self._count(lambda rows: rows["lost"]), of=f"step {self.run.streams.step}")

    def bear(self, lost: float, most: float, *, of: str) -> None:
        """So many samples of so many are lost, of a step or of all that is held out: EnvironmentFault if that is too much."""
        if lost > self.desk.patience.may_lose * most:
            raise EnvironmentFault(
                f"{self.desk.name} lost {lost:.0f} of the {most:.0f} samples of {of}: their calls "
                "failed in all tries, or a first observation left no room for a message; see that its tools run, raise "
                "environment.retries, environment.timeout, environment.may_lose or rollout.max_tokens, or set "
                "environment.trouble: hold"
            )

    def _calls(self, lane: int, turn: int) -> list[tuple[int, Call]]:
        rows, names = self.run.buffer.rows[lane], self.run.buffer.ids[lane]
        fed = [of for of in self.feed(self.run.streams.step, lane) for _ in range(self.groups.part)]
        states, found = unpacked(rows.get("state")), []
        for place, (name, (sample, prompt)) in enumerate(zip(names, fed, strict=True)):
            if not rows["over"][place]:
                # The same for all samples of a prompt, which are compared.
                seed = self._streams().number(f"episode {sample.partition('.')[0]}")
                message = None if turn == RESET else self.words.message(turn, said(rows, place, turn))
                told = rows["tokens"][place][rows["attention"][place]].tolist()
                call = Call(
                    lane=lane,
                    task=Task(id=name, prompt=prompt.text, seed=seed, record=prompt.record),
                    turn=turn,
                    message=message,
                    past=partial(self._past, rows, place, turn),
                    state=states[place] if states else None,
                    heard=tuple(told[: len(told) - len(message.tokens if message else ())]),
                )
                found.append((place, call))
        return found

    def _past(self, rows: Rows, place: int, turn: int) -> list[Message]:
        """The messages before this turn's, for an environment that has to be told them again."""
        return [self.words.message(before, said(rows, place, before)) for before in range(turn)]

    def _answered(self, rows: Rows, turn: int, outcomes: Mapping[int, Outcome]) -> Rows:
        """The rows with what came back."""
        kept = {name: value.clone() for name, value in rows.items()}
        states = unpacked(rows.get("state")) or [None] * len(rows["over"])
        for place, outcome in outcomes.items():
            kept["troubles"][place] += outcome.troubles
            if outcome.taped is None:
                lose(kept, place)
                continue
            states[place] = outcome.taped.state
            self._reply(kept, place, turn, outcome.taped.reply)
        if any(state is not None for state in states):
            kept["state"] = packed(states)
        return kept

    def _reply(self, rows: Rows, place: int, turn: int, reply: Reply) -> None:
        mine = (rows["turn"][place] == turn + 1) & rows["mask"][place]
        rows["earned"][place] += placed([reply.reward], mine[None])[0]
        seen = self.words.observation(reply.observation)
        spoke = said(rows, place, turn)
        cut = turn != RESET and not (spoke and spoke[-1] in self.words.ends)
        room = rows["mask"].shape[1] - length_of(rows, place)
        if reply.done and turn != RESET:
            rows["ended"][place], rows["over"][place] = not cut, True
        elif cut or turn + 1 == self.shape.turns or len(seen) >= room:
            rows["over"][place] = True
            if turn == RESET:  # not a word of the policy's
                lose(rows, place)
        else:
            append(rows, place, turn, seen)

    def _streams(self) -> Streams:
        """Those of the step: a sample's do not depend on the lane or the update."""
        return Streams(seed=self.run.streams.seed, step=self.run.streams.step)


def opened(asked: Sequence[Request], shape: Shape, pad: int) -> Rows:
    """Rows of samples of which nothing but the prompt is there."""
    count, answer = len(asked), shape.answer
    prompts, real = left_padded([request.prompt for request in asked], shape.prompt, pad)
    no = torch.zeros(count, answer, dtype=torch.bool)
    return {
        "tokens": torch.cat([prompts, torch.full((count, answer), pad)], 1),
        "attention": torch.cat([real, no], 1),
        "mask": no,
        "rollout_logprobs": torch.zeros(count, answer),
        "earned": torch.zeros(count, answer),
        "turn": torch.zeros(count, answer, dtype=torch.int32),  # of each token, from 1; that of a reset has 0
        "ended": torch.zeros(count, dtype=torch.bool),
        "over": torch.zeros(count, dtype=torch.bool),
        "lost": torch.zeros(count, dtype=torch.bool),
        "troubles": torch.zeros(count, dtype=torch.int32),
    }


def length_of(rows: Rows, place: int) -> int:
    """Tokens after the prompt."""
    return int(rows["attention"][place, -rows["mask"].shape[1] :].sum())


def said(rows: Rows, place: int, turn: int) -> list[int]:
    """The policy's tokens of a turn."""
    mine = (rows["turn"][place] == turn + 1) & rows["mask"][place]
    found: list[int] = rows["tokens"][place, -len(mine) :][mine].tolist()
    return found


def append(rows: Rows, place: int, turn: int, tokens: Sequence[int], scores: torch.Tensor | None = None) -> None:
    """Tokens after what is there: the policy's with their log-probabilities, or an observation."""
    answer = rows["mask"].shape[1]
    at, prompt = length_of(rows, place), rows["tokens"].shape[1] - answer
    part = slice(at, at + len(tokens))
    rows["tokens"][place, prompt:][part] = torch.tensor(tokens, dtype=torch.long)
    rows["attention"][place, prompt:][part] = True
    rows["turn"][place, part] = turn + 1
    if scores is not None:
        rows["mask"][place, part] = True
        rows["rollout_logprobs"][place, part] = scores


def lose(rows: Rows, place: int) -> None:
    """Nothing of this sample is trained on, and it has no reward."""
    rows["lost"][place] = rows["over"][place] = True
    rows["mask"][place] = rows["ended"][place] = False
    rows["earned"][place] = rows["rollout_logprobs"][place] = 0.0


def packed(states: Sequence[str | None]) -> torch.Tensor:
    """[samples, bytes] uint8: each text's length plus 1 in 8 bytes, and the text; 0 is none.

    >>> unpacked(packed(["a", None, "über"])), unpacked(None)
    (['a', None, 'über'], [])
    """
    texts = [None if state is None else state.encode() for state in states]
    width = max(len(text or b"") for text in texts)
    lines = [
        (0 if text is None else len(text) + 1).to_bytes(8, "little") + (text or b"").ljust(width, b"\0")
        for text in texts
    ]
    return torch.frombuffer(bytearray(b"".join(lines)), dtype=torch.uint8).view(len(texts), -1).clone()


def unpacked(rows: torch.Tensor | None) -> list[str | None]:
    """The reverse of `packed`."""
    found: list[str | None] = []
    for line in () if rows is None else rows:
        text = bytes(line.tolist())
        length = int.from_bytes(text[:8], "little")
        found.append(text[8 : 7 + length].decode() if length else None)
    return found
