"""An environment: what answers the policy's messages, turn by turn, until an episode is over.

The idea: two calls are all of it. `reset` begins one sample's episode and `step` answers one message. What they reply comes
from outside, so it is written down before anything is made of it, and a step that is run again uses what was written. The
policy sees an observation and is never trained on it.

    class Guess:
        def reset(self, task):
            self.number = random.Random(task.seed).randrange(100)

        def step(self, message):
            right = message.text == str(self.number)
            return Reply(observation="", reward=float(right), done=True)

There is one environment for each sample, made by `environment.function`: a class, or a function without arguments. It may have:

- `save() -> str` and `load(str)`: after a fault a fresh one is loaded with what was saved after its last reply, and nothing is
  asked twice. Without them a fresh one is reset, and given the same messages again; its replies to those are thrown away.
- `close()`: the episode is over.
- `troubles`: classes of exceptions that say nothing about the message (a client's own timeouts), beside those of `is_trouble`.
- `tools`: what the chat template of the prompts is told of, as OpenAI writes functions down.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from elasticrl.ppo.rewards import Score

Observation = str | tuple[int, ...] | tuple[Mapping[str, Any], ...]
"""Text as it is, tokens, or chat messages, which go through the chat template."""


class EnvironmentFault(RuntimeError):
    """An environment that cannot be used: which, where, and what to do."""


class Trouble(Exception):
    """Something between us and the answer failed. It says nothing about the message, so it is no reward: it is tried again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What a sample is about. Example: Task(id="0:17", prompt="6*7", seed=557700679194777941, record={"prompt": "6*7"})"""

    id: str
    prompt: str
    seed: int  # of the prompt in this step, so alike in a group; all chance of an episode should come from it
    record: Mapping[str, Any] = field(default_factory=dict)  # the prompt's other fields


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """What the policy said in a turn.

    Example: Message(turn=0, tokens=(6, 15, 7, 11), text="6*7", raw="6*7<eos>", whole=True)
    """

    turn: int  # from 0
    tokens: tuple[int, ...]
    text: str  # without special tokens
    raw: str  # with them
    whole: bool  # it ended by itself; else there was no room for more, and nothing comes after it


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What comes back. Example: Reply(observation="=42", reward=0.5)"""

    observation: Observation = ""
    reward: Score = 0.0  # for the message, or one number for each of its tokens
    done: bool = False


class Environment(Protocol):
    """One sample's."""

    def reset(self, task: Task, /) -> Observation | None:
        """A new episode. What the policy sees of it after the prompt, if anything."""

    def step(self, message: Message, /) -> Reply:
        """The answer to a message."""


def made_by(name: str) -> Callable[[], Environment]:
    """What makes environments, from `module:name`."""
    module, _, attribute = name.partition(":")
    try:
        found = getattr(import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise EnvironmentFault(
            f"environment.function {name!r} cannot be found ({error}); it is module:class, or module:function"
        ) from error
    assert callable(found), f"environment.function {name!r} is no class and no function"
    return found  # type: ignore[no-any-return]


def checked(who: str, reply: Any, message: Message) -> Reply:
    """The reply, if it is one: of plain values, with finite rewards."""
    if not isinstance(reply, Reply):
        raise EnvironmentFault(f"{who} must return a Reply, not {str(reply)[:200]!r}")
    scores = reply.reward if isinstance(reply.reward, list | tuple) else [reply.reward]
    try:
        rewards = [float(score) for score in scores]
    except (TypeError, ValueError, OverflowError) as error:
        raise EnvironmentFault(f"{who} gave the reward {str(reply.reward)[:200]!r}, which is no number") from error
    if not all(map(math.isfinite, rewards)):
        raise EnvironmentFault(f"{who} gave the reward {reply.reward}, which would poison the whole batch")
    each = isinstance(reply.reward, list | tuple)
    if each and len(rewards) != len(message.tokens):
        raise EnvironmentFault(f"{who} gave {len(rewards)} rewards to a message of {len(message.tokens)} tokens")
    return Reply(
        observation=observed(who, reply.observation), reward=rewards if each else rewards[0], done=bool(reply.done)
    )


def observed(who: str, observation: Any) -> Observation:
    """The observation as one of the three kinds; nothing is an empty text."""
    if observation is None:
        return ""
    if isinstance(observation, str):
        return observation
    if isinstance(observation, Sequence):
        if all(isinstance(part, int) and not isinstance(part, bool) for part in observation):
            return tuple(observation)
        if all(isinstance(part, Mapping) and "role" in part for part in observation):
            return tuple(observation)
    raise EnvironmentFault(
        f"{who} gave the observation {str(observation)[:200]!r}; it must be a text, a list of tokens, or of chat messages"
    )


#: Errors of the operating system that are the environment's own: they come again, however often it is tried.
ITS_OWN = (FileNotFoundError, FileExistsError, PermissionError, IsADirectoryError, NotADirectoryError)


#: Classes of clients' errors that say that nobody answered, by the package that they are from: they are no OSErrors.
CLIENTS = {
    "httpx": ("TimeoutException", "NetworkError", "RemoteProtocolError", "ProxyError"),
    "httpcore": ("TimeoutException", "NetworkError", "RemoteProtocolError", "ProxyError", "ConnectionNotAvailable"),
    "aiohttp": ("ClientConnectionError", "ClientPayloadError"),
    "websockets": ("ConnectionClosed", "InvalidMessage"),
    "urllib3": ("TimeoutError", "ProtocolError", "MaxRetryError", "NewConnectionError", "ProxyError", "SSLError"),
    "http": ("IncompleteRead", "BadStatusLine"),
    "openai": ("APIConnectionError",),
    "anthropic": ("APIConnectionError",),
}
#: No UNKNOWN: so grpc's servers answer whatever a handler raises, which may be what the message says.
GRPC = ("UNAVAILABLE", "DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED", "ABORTED", "INTERNAL", "DATA_LOSS")
DEEP = 20  # errors that one was raised because of


def is_trouble(error: BaseException, more: tuple[type[BaseException], ...] = ()) -> bool:
    """Whether an error says nothing about the message: timeouts, connections, HTTP 408, 429 and 5xx, or one that was raised
    because of such an error. What comes again however often it is tried is none, though: the nearest error that tells decides.
    A subprocess that takes too long is none either: it may well run what the message says.

    >>> [is_trouble(error) for error in (TimeoutError(), ConnectionResetError(), ValueError(), FileNotFoundError())]
    [True, True, False, False]
    """
    for _ in range(DEEP):
        if (told := _told(error, more)) is not None:
            return told
        behind = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
        if behind is None:
            return False
        error = behind
    return False


def _told(error: BaseException, more: tuple[type[BaseException], ...]) -> bool | None:
    """Whether an error by itself is trouble. None: it does not tell."""
    if isinstance(error, (Trouble, *more)) or _is_a_clients(error):
        return True
    if isinstance(error, BaseExceptionGroup):
        return any(is_trouble(each, more) for each in error.exceptions) or None
    if (status := _status(error)) is not None:
        return status in (408, 429) or status >= 500
    if isinstance(error, OSError):
        return not isinstance(error, ITS_OWN)
    return None


def _is_a_clients(error: BaseException) -> bool:
    """Whether it is one of `CLIENTS`, or grpc's for a server that did not answer."""
    for kind in type(error).__mro__:
        package = kind.__module__.partition(".")[0]
        if kind.__name__ in CLIENTS.get(package, ()):
            return True
        if package == "grpc" and callable(code := getattr(error, "code", None)):
            return getattr(code(), "name", "") in GRPC
    return False


def _status(error: BaseException) -> int | None:
    """Of HTTP, wherever clients put it: a `code` may be a word beside it."""
    answer = getattr(error, "response", None)
    found = [getattr(error, name, None) for name in ("code", "status", "status_code")]
    found += [getattr(answer, name, None) for name in ("status_code", "status")]
    return next((status for status in found if type(status) is int and 400 <= status < 600), None)
