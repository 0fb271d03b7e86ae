"""Environments made of what there is: Python functions as tools, Gymnasium's, OpenEnv's and verifiers' environments.

The idea: each is a few lines around `reset` and `step`. None of their packages is imported here: who hands one over has it.

    def add(a: int, b: int) -> int:
        "Adds two numbers. Args: a: one of them. b: the other."
        return a + b

    class Sums(Tools):
        tools = (add,)

        def score(self, answer):
            return float(answer.strip() == self.task.record["answer"])
"""

from __future__ import annotations

import asyncio
import inspect
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, ClassVar

from elasticrl.base.parsed import parsed
from elasticrl.ppo.environments import Message, Observation, Reply, Task, is_trouble

CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|$)", re.DOTALL)
SAID = 2000  # letters of a tool's error, to be shown


class Tools:
    """Functions that the policy may call; a message without a call is its answer, which `score` judges. Their results are chat
    messages of the role `tool`, so the tokenizer needs a chat template that knows it.
    """

    tools: ClassVar[Sequence[Callable[..., Any]]] = ()
    task: Task

    def score(self, answer: str) -> float:
        """The reward of an answer."""
        raise NotImplementedError

    def reset(self, task: Task) -> None:
        """A new task."""
        self.task = task

    def step(self, message: Message) -> Reply:
        """The results of the message's calls, or its reward."""
        calls = calls_in(message.raw)
        if not calls:
            return Reply(reward=self.score(message.text), done=True)
        return Reply(observation=tuple(self._result(name, arguments) for name, arguments in calls))

    def save(self) -> str:
        """The task. A subclass with more to remember adds it."""
        return json.dumps(asdict(self.task), default=str)

    def load(self, state: str) -> None:
        """The reverse of `save`."""
        self.task = Task(**parsed(state))

    def _result(self, name: str | None, arguments: Any) -> Mapping[str, Any]:
        known = {tool.__name__: tool for tool in self.tools}
        if name is None:
            content = f"error: {arguments}"
        elif name not in known:
            content = f"error: there is no tool {name!r}, only {sorted(known)}"
        else:
            try:
                content = str(known[name](**arguments))
            except Exception as error:
                if is_trouble(error, tuple(getattr(self, "troubles", ()))):
                    raise
                content = f"error: {type(error).__name__}: {error}"[:SAID]  # the policy's own: it called it so
        return {"role": "tool", "name": name or "", "content": content}


def calls_in(text: str) -> list[tuple[str | None, Any]]:
    """(name, arguments) of each call in a message, in the form of Hermes and Qwen. A call that is none has no name, and says
    why.

    >>> calls_in('I add. <tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>')
    [('add', {'a': 1, 'b': 2})]
    >>> calls_in("<tool_call>add</tool_call>")
    [(None, 'the call is not JSON')]
    >>> calls_in("It is 3.")
    []
    """
    return [_call(inner) for inner in CALL.findall(text)]


def _call(inner: str) -> tuple[str | None, Any]:
    try:
        found = parsed(inner.strip())
    except ValueError:
        return None, "the call is not JSON"
    arguments = found.get("arguments", found.get("parameters", {})) if isinstance(found, dict) else None
    if isinstance(arguments, str):  # as OpenAI's own API has them
        try:
            arguments = parsed(arguments)
        except ValueError:
            arguments = None
    if not isinstance(arguments, dict) or not isinstance(found.get("name"), str):
        return None, 'a call is {"name": ..., "arguments": {...}}'
    return found["name"], arguments


class Gymnasium:
    """An environment with Gymnasium's `reset` and `step`. `action` makes an action of a message's text, and raises ValueError
    if there is none in it, which ends the episode with the reward `amiss`. `show` makes a text of an observation.

        def lake():
            return Gymnasium(gymnasium.make("FrozenLake-v1", is_slippery=False), action=int)
    """

    def __init__(
        self,
        env: Any,
        *,
        action: Callable[[str], Any] = int,
        show: Callable[[Any], Observation] = str,
        amiss: float = 0.0,
    ) -> None:
        self.env, self.action, self.show, self.amiss = env, action, show, amiss

    def reset(self, task: Task) -> Observation:
        """With the task's seed."""
        observation, _ = self.env.reset(seed=task.seed % 2**31)
        return self.show(observation)

    def step(self, message: Message) -> Reply:
        """One action."""
        try:
            action = self.action(message.text)
        except ValueError:
            return Reply(reward=self.amiss, done=True)
        observation, reward, terminated, truncated, _ = self.env.step(action)
        return Reply(observation=self.show(observation), reward=float(reward), done=bool(terminated or truncated))

    def close(self) -> None:
        """The inner one's."""
        self.env.close()


class OpenEnv:
    """A client whose `reset()` and `step(action)` return something with an observation, a reward and done, as OpenEnv's do. Its
    server cannot be asked to be as it was: after a fault a fresh client is reset, and given the same messages again.

        def echo():
            client = EchoEnv(base_url="http://tools:8000")
            return OpenEnv(client, action=lambda text: EchoAction(message=text), show=lambda seen: seen.echoed_message)
    """

    def __init__(self, client: Any, *, action: Callable[[str], Any], show: Callable[[Any], Observation] = str) -> None:
        self.client, self.action, self.show = client, action, show

    def reset(self, _task: Task) -> Observation:
        """A new episode at the server."""
        return self.show(now(self.client.reset()).observation)

    def step(self, message: Message) -> Reply:
        """One action."""
        found = now(self.client.step(self.action(message.text)))
        return Reply(observation=self.show(found.observation), reward=float(found.reward or 0.0), done=bool(found.done))

    def close(self) -> None:
        """The client's."""
        now(self.client.close())


class Verifiers:
    """A `MultiTurnEnv` of verifiers (0.1 and 0.2), or a `ToolEnv`, which replies with chat messages and has a rubric. One may
    be shared by all samples: what it knows of an episode is in its state. The calls in a message are handed over as a server
    would. A tool that is away is told the policy by the ToolEnv itself, unless its `stop_errors` name what it raises then.

        gsm = vf.load_environment("gsm8k")

        def math():
            return Verifiers(gsm)

        math.tools = math().tools  # for the chat template
    """

    def __init__(self, env: Any) -> None:
        self.env = env
        self.state: Any = {}
        # Newer ones judge by the state alone, and have classes for messages.
        self.newer = next(iter(inspect.signature(env.is_completed).parameters), "") == "state"

    @property
    def tools(self) -> Sequence[Mapping[str, Any]]:
        """What the chat template is told of."""
        known = getattr(self.env, "tool_defs", None) or getattr(self.env, "oai_tools", None) or ()
        plain = (_plain(tool) for tool in known)
        return tuple(tool if "function" in tool else {"type": "function", "function": tool} for tool in plain)

    def reset(self, task: Task) -> None:
        """A fresh state, of the prompt's record."""
        record, prompt = task.record, task.record.get("prompt", task.prompt)
        asked = prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
        self.state = {
            "id": 0, "task": record.get("task", "default"), "prompt": self._theirs(asked), "answer": record.get("answer", ""),
            "info": record.get("info", {}), "completion": [], "responses": [], "turn": 0, "trajectory": [],
            "timing": {"generation_ms": 0.0, "scoring_ms": 0.0, "total_ms": 0.0},
            "trajectory_id": task.id, "is_completed": False, "is_truncated": False, "error": None, "final_env_response": None,
        }  # fmt: skip
        self.state = now(self.env.setup_state(self.state)) or self.state

    def step(self, message: Message) -> Reply:
        """Its response, or the rubric's reward."""
        state = self.state
        asked = [*state["prompt"], *state["completion"]]
        said = self._theirs([spoken(message)])
        state["completion"] = [*state["completion"], *said]
        state["turn"] += 1
        state["trajectory"].append(
            {
                "prompt": asked, "completion": said, "response": None, "tokens": None, "reward": None, "advantage": None,
                "is_truncated": not message.whole, "trajectory_id": state["trajectory_id"], "extras": {},
            }
        )  # fmt: skip
        if self._over():
            return Reply(reward=self._reward(), done=True)
        found = now(self.env.env_response([*asked, *said], state))
        messages, self.state = found if isinstance(found, tuple) else (found, state)
        messages = messages or self.state.get("final_env_response") or []
        self.state["completion"] = [*self.state["completion"], *self._theirs(messages)]
        if self._over():
            return Reply(reward=self._reward(), done=True)
        return Reply(observation=tuple(map(_plain, messages)))

    def _over(self) -> bool:
        ask, context = self.env.is_completed, [*self.state["prompt"], *self.state["completion"]]
        return bool(now(ask(self.state) if self.newer else ask(context, self.state)))

    def _reward(self) -> float:
        score = self.env.rubric.score_rollout
        asked = inspect.signature(score).parameters  # the state has all of it, but older ones want it by name
        named = {name: self.state[name] for name in ("prompt", "completion", "answer", "task", "info") if name in asked}
        found = now(score(state=self.state, **named))
        return float(found.reward if hasattr(found, "reward") else self.state.get("reward", 0.0))

    def _theirs(self, messages: Sequence[Any]) -> list[Any]:
        """Messages as it wants them: plain, or of its own classes."""
        normal = getattr(sys.modules.get("verifiers.utils.message_utils"), "normalize_messages", None)
        return list(messages) if normal is None or not self.newer else list(normal(list(messages)))


def spoken(message: Message) -> dict[str, Any]:
    """A message as OpenAI's servers have it, its calls apart from its text. What is no call stays in the text.

    >>> said = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    >>> spoken(Message(turn=2, tokens=(), text=said, raw=said, whole=True))["tool_calls"]
    [{'id': 'call_2_0', 'type': 'function', 'function': {'name': 'add', 'arguments': '{"a": 1}'}}]
    """
    calls = [(name, arguments) for name, arguments in calls_in(message.raw) if name is not None]
    if not calls:
        return {"role": "assistant", "content": message.text}
    made = [
        {
            "id": f"call_{message.turn}_{place}",
            "type": "function",
            "function": {"name": name, "arguments": json.dumps(arguments)},
        }
        for place, (name, arguments) in enumerate(calls)
    ]
    return {"role": "assistant", "content": CALL.sub("", message.text).strip(), "tool_calls": made}


def _plain(value: Any) -> Mapping[str, Any]:
    """A message or a tool as a dict."""
    return value if isinstance(value, Mapping) else value.model_dump(exclude_none=True)


def now(found: Any) -> Any:
    """What it is, or what it comes to if it has to be awaited. Each call has a thread of its own, so a loop of its own too."""
    if not inspect.isawaitable(found):
        return found

    async def awaited() -> Any:
        return await found

    return asyncio.run(awaited())
