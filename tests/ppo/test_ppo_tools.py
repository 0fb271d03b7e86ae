"""Tools as Python functions, and the environments of others, by what they look like."""

import http.client
import json
import subprocess
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from elasticrl.config.training import Data
from elasticrl.ppo import prompts, tiny
from elasticrl.ppo.environments import Message, Reply, Task, is_trouble
from elasticrl.ppo.rollout.calls import RESET, Call, Desk, Patience
from elasticrl.ppo.rollout.tape import Tape
from elasticrl.ppo.tools import Gymnasium, OpenEnv, Tools, Verifiers, calls_in

TASK = Task(id="0:17", prompt="1+2", seed=2**40 + 5, record={"prompt": "1+2", "answer": "3"})


def add(a: int, b: int) -> int:
    """Adds two numbers.

    Args:
        a: one of them
        b: the other
    """
    return a + b


def away() -> str:
    """Is not there."""
    raise ConnectionError("no route")


class Sums(Tools):
    tools = (add, away)

    def score(self, answer: str) -> float:
        return float(answer == self.task.record["answer"])


def said(text: str, turn: int = 0) -> Message:
    return Message(turn=turn, tokens=(1,), text=text, raw=text, whole=True)


def called(name: str, **arguments: Any) -> Message:
    return said(f"So: <tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>")


def test_a_call_gets_its_result_and_an_answer_its_reward():
    sums = Sums()
    sums.reset(TASK)
    reply = sums.step(called("add", a=1, b=2))
    assert reply == Reply(observation=({"role": "tool", "name": "add", "content": "3"},))
    fresh = Sums()
    fresh.load(sums.save())
    assert fresh.step(said("3")) == Reply(reward=1.0, done=True)
    assert fresh.step(said("4")) == Reply(reward=0.0, done=True)


@pytest.mark.parametrize(
    ("message", "why"),
    [
        (called("sub", a=1), "error: there is no tool 'sub', only ['add', 'away']"),
        (called("add", a=1), "error: TypeError: add() missing 1 required positional argument: 'b'"),
        (said("<tool_call>add(1, 2)</tool_call>"), "error: the call is not JSON"),
        (said('<tool_call>{"name": 3}</tool_call>'), 'error: a call is {"name": ..., "arguments": {...}}'),
    ],
)
def test_a_call_that_is_none_is_told_the_policy(message: Message, why: str):
    sums = Sums()
    sums.reset(TASK)
    (seen,) = sums.step(message).observation
    assert seen["content"] == why


def test_a_tool_that_is_away_is_trouble_and_nothing_is_told():
    patience = Patience(timeout_s=5.0, retries=0, at_once=1, holds=False, deadline_s=5.0)
    (found,) = Desk("sums", Sums, patience, Tape(None)).ask([Call(lane=0, task=TASK, turn=0, message=called("away"))])
    assert (found.taped, found.troubles) == (None, 1)


def test_several_calls_are_found_and_arguments_may_be_a_text():
    text = '<tool_call>{"name": "a", "arguments": "{\\"x\\": 1}"}</tool_call><tool_call>{"name": "b", "parameters": {}}'
    assert calls_in(text) == [("a", {"x": 1}), ("b", {})]


def test_the_chat_template_is_told_of_tools_and_of_its_arguments():
    words = (*"0123456789{}[]:,\"' add", *"TFals", tiny.PAD, tiny.EOS, "<user>", "<answer>", "<tools>", "<deep>")
    tokenizer = tiny.tokenizer(tuple(dict.fromkeys(words)))
    tokenizer.add_special_tokens({"additional_special_tokens": ["<user>", "<answer>", "<tools>", "<deep>"]})
    tokenizer.chat_template = (
        "{% if tools %}<tools>{{ tools[0]['function']['name'] }}{% endif %}{% if think is false %}<deep>{% endif %}"
        "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
        "{% if add_generation_prompt %}<answer>{% endif %}"
    )
    data = Data(template_arguments={"think": "false"})
    told = prompts.arguments_of(data, (add,))
    assert told["think"] is False
    assert told["tools"][0]["function"]["parameters"]["required"] == ["a", "b"]
    assert tokenizer.decode(prompts.encode("12", tokenizer, chat=True, told=told)) == "<tools>add<deep><user>12<answer>"
    assert tokenizer.decode(prompts.encode("12", tokenizer, chat=True)) == "<user>12<answer>"


class Corridor:
    """Like one of Gymnasium's: the end is three steps to the right."""

    def reset(self, *, seed: int) -> tuple[int, dict[str, Any]]:
        assert 0 <= seed < 2**31
        self.at = 0
        return self.at, {}

    def step(self, action: int) -> tuple[int, float, bool, bool, dict[str, Any]]:
        self.at += action
        return self.at, float(self.at == 3), self.at == 3, self.at < 0, {}

    def close(self) -> None:
        self.at = None


def test_an_environment_of_gymnasium_s_is_stepped_by_messages():
    corridor = Gymnasium(Corridor(), amiss=-1.0)
    assert corridor.reset(TASK) == "0"
    assert corridor.step(said("2")) == Reply(observation="2")
    assert corridor.step(said("1")) == Reply(observation="3", reward=1.0, done=True)
    assert corridor.step(said("right")) == Reply(reward=-1.0, done=True)
    corridor.reset(TASK)
    assert corridor.step(said("-1")).done, "what is truncated is over"
    corridor.close()
    assert corridor.env.at is None


@dataclass
class Result:
    observation: str
    reward: float | None = None
    done: bool = False


class Client:
    """Like one of OpenEnv's; its newer ones have to be awaited."""

    def reset(self) -> Result:
        return Result("ready")

    async def step(self, action: str) -> Result:
        return Result(f"{action}!", 0.5, done=True)

    def close(self) -> None:
        pass


def test_a_client_of_openenv_s_is_asked_and_awaited_where_it_must_be():
    echo = OpenEnv(Client(), action=str.upper)
    assert echo.reset(TASK) == "ready"
    assert echo.step(said("hey")) == Reply(observation="HEY!", reward=0.5, done=True)
    echo.close()


class Doubles:
    """Like a MultiTurnEnv of verifiers: two turns, and a rubric. `old` takes messages and returns the state too."""

    def __init__(self, *, old: bool) -> None:
        self.old = old
        self.rubric = SimpleNamespace(score_rollout=self.score)
        self.is_completed = self.completed_of if old else self.completed

    async def setup_state(self, state: dict[str, Any]) -> dict[str, Any]:
        return {**state, "set": True}

    async def completed_of(self, _messages: list[Any], state: dict[str, Any]) -> bool:
        return state["turn"] >= 2

    async def completed(self, state: dict[str, Any]) -> bool:
        return state["turn"] >= 2

    async def env_response(self, messages: list[Any], state: dict[str, Any]) -> Any:
        found = [{"role": "user", "content": 2 * messages[-1]["content"]}]
        return (found, state) if self.old else found

    async def score(self, state: dict[str, Any]) -> Any:
        state["reward"] = float(state["set"] and state["completion"][-1]["content"] == state["answer"])
        return SimpleNamespace(reward=state["reward"]) if self.old else None


@pytest.mark.parametrize("old", [True, False])
def test_an_environment_of_verifiers_replies_and_its_rubric_scores(old: bool):
    doubles = Verifiers(Doubles(old=old))
    assert doubles.reset(TASK) is None
    assert doubles.step(said("ab")) == Reply(observation=({"role": "user", "content": "abab"},))
    assert doubles.step(said("3")) == Reply(reward=1.0, done=True)


class Called:
    """Like a ToolEnv of verifiers: it is over at a message without a call, or after three turns."""

    def __init__(self, *, old: bool) -> None:
        self.old = old
        self.rubric = SimpleNamespace(score_rollout=self.score_of if old else self.score)
        self.is_completed = self.completed_of if old else self.completed
        self.oai_tools = [{"type": "function", "function": {"name": "add"}}]

    async def setup_state(self, state: dict[str, Any]) -> dict[str, Any]:
        return state

    async def completed_of(self, messages: list[Any], state: dict[str, Any], **_more: Any) -> bool:
        return state["turn"] >= 3 or (messages[-1]["role"] == "assistant" and "tool_calls" not in messages[-1])

    async def completed(self, state: dict[str, Any], **_more: Any) -> bool:
        its = state["trajectory"]
        return len(its) >= 3 or bool(its and not its[-1]["completion"][-1].get("tool_calls"))

    async def env_response(self, messages: list[Any], state: dict[str, Any], **_more: Any) -> Any:
        assert "tool_calls" in messages[-1]
        assert self.old or state["trajectory"][-1]["prompt"] == messages[:-1]
        found = [
            {"role": "tool", "content": str(add(**json.loads(its["function"]["arguments"]))), "tool_call_id": its["id"]}
            for its in messages[-1]["tool_calls"]
        ]
        return (found, state) if self.old else found

    async def score(self, state: dict[str, Any]) -> None:
        state["reward"] = float(state["completion"][-1]["content"] == state["answer"])

    async def score_of(self, prompt: list[Any], completion: list[Any], answer: str, state: dict[str, Any]) -> Any:
        assert prompt == state["prompt"]
        return SimpleNamespace(reward=float(completion[-1]["content"] == answer))


@pytest.mark.parametrize("old", [True, False])
def test_a_tool_environment_of_verifiers_is_handed_the_calls_and_its_turns(old: bool):
    # Found by reading: it was shown the text alone, and so no tool was ever called: the first message was the last.
    tools = Verifiers(Called(old=old))
    assert tools.tools == ({"type": "function", "function": {"name": "add"}},)
    tools.reset(TASK)
    reply = tools.step(called("add", a=1, b=2))
    assert reply == Reply(observation=({"role": "tool", "content": "3", "tool_call_id": "call_0_0"},))
    assert tools.state["completion"][0]["content"] == "So:"
    assert tools.step(said("3", turn=1)) == Reply(reward=1.0, done=True)
    tools.reset(TASK)
    for turn in range(2):
        assert not tools.step(called("add", a=1, b=2)).done, turn
    assert tools.step(called("add", a=1, b=2)).done, "it has had its turns"


def test_adapters_go_through_the_desk_like_any_other():
    patience = Patience(timeout_s=5.0, retries=0, at_once=2, holds=False, deadline_s=5.0)
    desk = Desk("doubles", lambda: Verifiers(Doubles(old=True)), patience, Tape(None))
    (found,) = desk.ask([Call(lane=0, task=TASK, turn=RESET)])
    assert found.taped.reply == Reply(observation="")
    (found,) = desk.ask([Call(lane=0, task=TASK, turn=0, message=said("ab"))])
    assert found.taped.reply.observation == ({"role": "user", "content": "abab"},)


def raised(module: str, *names: str, said: dict[str, Any] | None = None) -> Exception:
    """An error of a client that is not installed here: classes of these names, each of the one before."""
    kind: type[Exception] = Exception
    for name in names:
        kind = type(name, (kind,), {"__module__": module})
    error = kind("as it is")
    error.__dict__.update(said or {})
    return error


def behind(error: Exception, cause: Exception | None, *, says: bool = True) -> Exception:
    """An error that was raised because of another one, or while it was handled."""
    try:
        try:
            raise cause or ValueError
        except Exception as first:  # noqa: BLE001 - any of them
            raise error from (first if says else None)
    except Exception as found:  # noqa: BLE001 - it is the one that was given
        return found


def answered(status: int) -> Any:
    return SimpleNamespace(status_code=status)


GRPC = {"code": lambda: SimpleNamespace(name="UNAVAILABLE")}
TROUBLES = {
    "httpx.ConnectTimeout": raised("httpx", "HTTPError", "TransportError", "TimeoutException", "ConnectTimeout"),
    "httpx.ReadError": raised("httpx", "HTTPError", "TransportError", "NetworkError", "ReadError"),
    "httpx 503": raised("httpx", "HTTPError", "HTTPStatusError", said={"response": answered(503)}),
    "httpcore.ReadTimeout": raised("httpcore._exceptions", "TimeoutException", "ReadTimeout"),
    "aiohttp.ServerDisconnectedError": raised(
        "aiohttp.client_exceptions", "ClientConnectionError", "ServerDisconnectedError"
    ),
    "aiohttp.ClientPayloadError": raised("aiohttp.client_exceptions", "ClientError", "ClientPayloadError"),
    "aiohttp 502": raised("aiohttp.client_exceptions", "ClientResponseError", said={"status": 502}),
    "websockets.ConnectionClosedError": raised("websockets.exceptions", "ConnectionClosed", "ConnectionClosedError"),
    "urllib3.ReadTimeoutError": raised("urllib3.exceptions", "HTTPError", "TimeoutError", "ReadTimeoutError"),
    "openai.APITimeoutError": raised("openai", "APIError", "APIConnectionError", "APITimeoutError"),
    "openai 429": raised(
        "openai", "APIStatusError", "RateLimitError", said={"code": "rate_limit_exceeded", "response": answered(429)}
    ),
    "grpc": raised("grpc._channel", "RpcError", said=GRPC),
    "IncompleteRead": http.client.IncompleteRead(b""),
    "RemoteDisconnected": http.client.RemoteDisconnected(),
    "wrapped": behind(RuntimeError("the search is away"), ConnectionError()),
    "in a group": ExceptionGroup("tasks", [ValueError(), TimeoutError()]),
}
OWN = {
    "httpx.UnsupportedProtocol": raised("httpx", "HTTPError", "TransportError", "UnsupportedProtocol"),
    "httpx 404": behind(raised("httpx", "HTTPStatusError", said={"response": answered(404)}), ConnectionError()),
    "openai 400": raised("openai", "APIStatusError", said={"code": None, "response": answered(400)}),
    "grpc": raised("grpc._channel", "RpcError", said={"code": lambda: SimpleNamespace(name="INVALID_ARGUMENT")}),
    "said to be its own": behind(ValueError(), ConnectionError(), says=False),
    "a missing file": behind(FileNotFoundError(), ConnectionError()),
    "a subprocess that takes too long": subprocess.TimeoutExpired("the policy's own program", 3.0),
    "a mistake": ZeroDivisionError(),
}


@pytest.mark.parametrize("error", TROUBLES.values(), ids=list(TROUBLES))
def test_what_clients_raise_when_nobody_answers_is_trouble_and_is_never_told_the_policy(error: Exception):
    assert is_trouble(error)

    def search() -> str:
        raise error

    sums = type("Searches", (Sums,), {"tools": (search,)})()
    sums.reset(TASK)
    with pytest.raises(type(error)):
        sums.step(called("search"))


@pytest.mark.parametrize("error", OWN.values(), ids=list(OWN))
def test_what_comes_again_however_often_it_is_tried_is_no_trouble(error: Exception):
    assert not is_trouble(error)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("aiohttp:ServerDisconnectedError", ()),
        ("aiohttp:ClientPayloadError", ()),
        ("urllib3.exceptions:ReadTimeoutError", (None, "/", "late")),
        ("urllib3.exceptions:MaxRetryError", (None, "/")),
        ("requests:ReadTimeout", ()),
        ("httpx:ConnectTimeout", ("late",)),
        ("httpx:RemoteProtocolError", ("cut",)),
        ("websockets.exceptions:ConnectionClosedError", (None, None)),
    ],
)
def test_the_clients_that_are_here_raise_what_is_looked_for(name: str, arguments: tuple[Any, ...]):
    module, _, kind = name.partition(":")
    assert is_trouble(getattr(pytest.importorskip(module), kind)(*arguments))
