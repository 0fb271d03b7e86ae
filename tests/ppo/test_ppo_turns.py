"""Several turns: what a row looks like, what is trained on, what a reply may be, and what becomes of trouble."""

import json
import threading
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest
import torch
import turns_kit
from turns_kit import PATIENCE, WORDS, learns, turned

from elasticrl.ppo import models, tiny
from elasticrl.ppo.advantages import contested, group_gains, leave_one_out, of_all_tokens
from elasticrl.ppo.environments import EnvironmentFault, Message, Reply, Task, Trouble, is_trouble, made_by
from elasticrl.ppo.handed import OUTCOMES
from elasticrl.ppo.rollout.calls import RESET, Call, Desk, Outcome
from elasticrl.ppo.rollout.episodes import Words
from elasticrl.ppo.rollout.tape import Tape, Taped, key_of


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny.write(tmp_path_factory.mktemp("model"), hidden=32, layers=2, words=WORDS)


def few(**more):
    return learns(**{"batch": 32, "mini_batch": 16, "epochs": 1, **more})


class Echo:
    """Says the message again, twice; then it is over."""

    def reset(self, _task: Task) -> str:
        self.turns = 0
        return "="

    def step(self, message: Message) -> Reply:
        self.turns += 1
        return Reply(observation="=" + message.text[:1], reward=1.0, done=self.turns == 2)


def rolled(path: str, **more):
    trainer, run = turned(path, **{"ppo": few(), "environment": f"{__name__}:Echo", "turns": 3, **more})
    run.begin(0)
    trainer.rollout(trainer.flow.order[0])
    return trainer, run


def test_a_row_has_all_turns_and_the_mask_has_the_policys_tokens_alone(path):
    _trainer, run = rolled(path)
    rows, tokenizer = run.buffer.rows[0], models.tokenizer(path)
    asterisk = tokenizer.convert_tokens_to_ids("=")
    answers = rows["tokens"][:, 5:]
    assert (answers[:, 0] == asterisk).all(), "what reset showed comes first"
    assert not rows["mask"][:, 0].any()
    shown = rows["attention"][:, 5:] & ~rows["mask"]
    assert shown.sum() > len(shown)
    assert (rows["rollout_logprobs"][~rows["mask"]] == 0).all()
    assert (rows["rollout_logprobs"][rows["mask"]] < 0).all()
    assert torch.equal(rows["earned"].sum(1), rows["turns"].float())
    assert (rows["earned"][~rows["mask"]] == 0).all(), "a reward stands on a token of the policy's"
    assert {"turn", "over", "state"}.isdisjoint(rows)


def test_the_trainers_log_probabilities_are_those_of_the_rollout(path):
    trainer, _run = turned(path, ppo=few(), environment=f"{__name__}:Echo", turns=3)
    metrics = trainer.step(0).metrics
    assert abs(metrics["rollout_gap"]) < 1e-6
    assert metrics["rollout_gap_std"] < 1e-5


class Seeds:
    """Tells what it was given."""

    seen: ClassVar = {}

    def reset(self, task: Task) -> None:
        Seeds.seen[task.id] = task.seed

    def step(self, message: Message) -> Reply:
        return Reply(reward=float(message.whole), done=True)


def test_a_group_has_one_task_and_is_compared(path):
    ppo = few(algorithm="grpo", group=4)
    trainer, _ = turned(path, ppo=ppo, environment=f"{__name__}:Seeds")
    trainer.step(0)
    assert len(Seeds.seen) == 32
    groups = {name.partition(".")[0] for name in Seeds.seen}
    assert {(name.partition(".")[0], seed) for name, seed in Seeds.seen.items()} == {
        (group, Seeds.seen[f"{group}.0"]) for group in groups
    }


def test_a_message_that_is_cut_ends_its_sample_unfinished(path):
    _, run = rolled(path)
    cut = 0
    for rows in run.buffer.rows.values():
        eos = WORDS.index(tiny.EOS)
        for tokens, mask, turns, ended in zip(
            rows["tokens"][:, 5:], rows["mask"], rows["turns"], rows["ended"], strict=True
        ):
            last = tokens[mask][-1]
            assert bool(ended) == bool(last == eos and turns == 2)
            cut += last != eos
    assert cut


def test_lanes_may_be_carried_in_any_order_and_by_one_or_two(path):
    digests = set()
    for carried in (None, ((1, 0),)):
        trainer, run = turned(path, ppo=few(), carried=carried)
        for step in range(2):
            trainer.step(step)
        digests.add(run.digest())
    assert len(digests) == 1


def test_a_step_that_is_taken_up_asks_for_nothing_that_is_there(path, monkeypatch):
    trainer, run = turned(path, ppo=few())
    trainer.step(0)
    whole = run.digest()
    asked = Counter()
    step = turns_kit.made_by("elasticrl.ppo.tasks:Calculator").step

    def counting(self, message):
        asked[message.turn] += 1
        return step(self, message)

    monkeypatch.setattr("elasticrl.ppo.tasks.Calculator.step", counting)
    trainer, run = turned(path, ppo=few())
    keep, at = run.keep, "reply 0"

    class Cut(Exception):
        pass

    def cutting(stage, *, how="never"):
        keep(stage, how=how)
        if stage == at:
            raise Cut

    run.keep = cutting
    with pytest.raises(Cut):
        trainer.step(0)
    assert asked == {0: 32}
    state = {**run.buffer.state_dict(), "rows": {k: dict(v) for k, v in run.buffer.rows.items()}}
    trainer, run = turned(path, ppo=few())
    run.begin(0)
    run.buffer.load_state_dict(state)
    trainer.step(0)
    assert asked[0] == 32, "a reply that is kept is not asked for again"
    assert run.digest() == whole


class Bad:
    """Fails as its class says, so often for each sample."""

    fails, error, seen = 0, Trouble("the tool is away"), Counter()

    def reset(self, task: Task) -> None:
        self.name = task.id

    def step(self, _message: Message) -> Reply:
        Bad.seen[self.name] += 1
        if Bad.seen[self.name] <= Bad.fails and self.name.endswith("3"):
            raise Bad.error
        return Reply(reward=1.0, done=True)


@pytest.fixture
def bad(monkeypatch):
    monkeypatch.setattr(Bad, "seen", Counter())
    monkeypatch.setattr("elasticrl.ppo.rollout.calls.PAUSE_S", (0.001, 0.001))
    return monkeypatch


def test_trouble_is_tried_again_and_counted_and_is_no_reward(path, bad):
    bad.setattr(Bad, "fails", 2)
    trainer, run = turned(path, ppo=few(), environment=f"{__name__}:Bad")
    metrics = trainer.step(0).metrics
    unlucky = sum(name.endswith("3") for names in run.buffer.ids.values() for name in names)
    assert unlucky
    assert (metrics["lost"], metrics["troubles"], metrics["reward"]) == (0, 2 * unlucky, 1.0)


def test_a_sample_whose_tries_all_failed_is_masked_and_counts_nowhere(path, bad):
    bad.setattr(Bad, "fails", 9)
    trainer, run = turned(path, ppo=few(), environment=f"{__name__}:Bad")
    metrics = trainer.step(0).metrics
    unlucky = sum(name.endswith("3") for names in run.buffer.ids.values() for name in names)
    assert (metrics["lost"], metrics["troubles"]) == (unlucky, 3 * unlucky)
    assert metrics["reward"] == 1.0, "it is not 0, it is none"
    assert all(not rows["mask"][i].any() for rows in run.buffer.rows.values() for i in rows["lost"].nonzero()[:, 0])


def test_an_outage_burns_no_data(path, bad):
    bad.setattr(Bad, "fails", 9)
    trainer, run = turned(path, ppo=few(), environment=f"{__name__}:Bad", patience=replace(PATIENCE, may_lose=0.01))
    with pytest.raises(
        EnvironmentFault, match=r"Bad lost \d of the 32 samples of step 0: .* set environment.trouble: hold"
    ):
        trainer.step(0)
    assert "reply 0" not in run.buffer.done, "what is not kept is asked again"


def test_a_job_that_holds_tries_until_its_budget_is_over_and_then_says_so(path, bad):
    bad.setattr(Bad, "fails", 10**9)
    trainer, _ = turned(
        path, ppo=few(), environment=f"{__name__}:Bad", patience=replace(PATIENCE, holds=True, deadline_s=0.3)
    )
    with pytest.raises(EnvironmentFault, match=r"did not answer sample .*the tool is away; see that it runs, raise"):
        trainer.step(0)


@pytest.mark.parametrize("error", [ValueError("a bug"), FileNotFoundError("no such tool")])
def test_an_environments_own_error_ends_the_job_with_its_name(path, bad, error):
    bad.setattr(Bad, "fails", 1)
    bad.setattr(Bad, "error", error)
    trainer, _ = turned(path, ppo=few(), environment=f"{__name__}:Bad")
    with pytest.raises(EnvironmentFault, match=r"test_ppo_turns:Bad, asked in turn 0 of sample 0/\d*3, failed: "):
        trainer.step(0)


class Slow:
    """Takes long the first time."""

    seen: ClassVar = Counter()

    def reset(self, task: Task) -> None:
        self.name = task.id

    def step(self, _message: Message) -> Reply:
        Slow.seen[self.name] += 1
        if Slow.seen[self.name] == 1:
            time.sleep(5)
        return Reply(done=True, reward=1.0)


def call(name: str, turn: int = 0, **more) -> Call:
    task = Task(id=name, prompt="6*7", seed=1)
    message = Message(turn=turn, tokens=(1, 2), text="12", raw="12", whole=True) if turn != RESET else None
    heard = (1, 2) * max(turn, 0)
    return Call(**{"lane": 0, "task": task, "turn": turn, "message": message, "heard": heard, **more})


def test_a_call_has_a_deadline():
    desk = Desk("slow", Slow, replace(PATIENCE, timeout_s=0.2), Tape(None))
    begun = time.monotonic()
    (found,) = desk.ask([call("a")])
    assert found.troubles == 1
    assert found.taped.reply.done
    assert time.monotonic() - begun < 4


class Late:
    """The first one's answer comes after its deadline, while the second is asked."""

    made: ClassVar[list["Late"]] = []

    def __init__(self) -> None:
        Late.made.append(self)
        self.closed = threading.Event()

    def reset(self, task: Task) -> None:
        """Nothing to do."""

    def step(self, _message: Message) -> Reply:
        if len(Late.made) == 1:
            time.sleep(1.4)
        else:  # until the first one is through
            Late.made[0].closed.wait(0.9)
        return Reply(done=True, reward=1.0)

    def close(self) -> None:
        self.closed.set()


def test_a_late_answer_closes_the_environment_that_gave_it_and_not_that_of_the_next_try():
    (found,) = Desk("late", Late, replace(PATIENCE, timeout_s=1.0), Tape(None)).ask([call("a")])
    assert found.troubles == 1
    first, second = Late.made
    assert first.closed.wait(2), "nobody talks to it any more"
    assert not second.closed.is_set(), "it is the sample's"


class Gate:
    """Answers once it is let."""

    let, seen = threading.Event(), Counter()

    def reset(self, task: Task) -> None:
        self.name = task.id

    def step(self, _message: Message) -> Reply:
        Gate.seen[self.name] += 1
        assert Gate.let.wait(10)
        return Reply(done=True)


def test_a_call_that_was_under_way_as_the_gang_was_cut_short_is_not_made_twice():
    desk = Desk("gate", Gate, PATIENCE, Tape(None))

    class Elsewhere(Exception):
        pass

    def check() -> None:
        raise Elsewhere

    desk.check = check
    with pytest.raises(Elsewhere):
        desk.ask([call("a"), call("b")])
    desk.check = lambda: None
    threading.Timer(0.2, Gate.let.set).start()
    assert [found.taped.reply.done for found in desk.ask([call("a"), call("b")])] == [True, True]
    assert Gate.seen == {"a": 1, "b": 1}


def test_replies_come_to_the_members_of_a_team_as_they_were():
    replies = [
        Reply(observation="=42", reward=0.1 + 0.2),
        Reply(observation=(3, 1), reward=[0.5, -0.0], done=True),
        Reply(observation=({"role": "tool", "content": "ü"},)),
    ]
    found = [
        Outcome(taped=Taped(reply=reply, state=state), troubles=2)
        for reply, state in zip(replies, ("s", "", None), strict=True)
    ]
    found.append(Outcome(taped=None, troubles=4))
    packed = OUTCOMES.pack(found)
    assert OUTCOMES.unpack(replace(packed, words=json.loads(json.dumps(packed.words)))) == found


class Remembers:
    """Says all that it has heard."""

    made = 0

    def __init__(self) -> None:
        Remembers.made += 1

    def reset(self, _task: Task) -> None:
        self.heard = ""

    def step(self, message: Message) -> Reply:
        self.heard += message.text
        return Reply(observation=self.heard)


def test_a_reply_is_to_all_that_was_said_before_and_so_is_an_environment_that_lives():
    """An engine whose text may be another after a fault: the same message may then follow another one."""
    desk = Desk("remembers", Remembers, PATIENCE, Tape(None))
    for turn in (RESET, 0, 1):
        (found,) = desk.ask([call("a", turn)])
    assert (found.taped.reply.observation, Remembers.made) == ("1212", 1), "it lives from turn to turn"
    other = call("a", 0, message=Message(turn=0, tokens=(3,), text="3", raw="3", whole=True))
    (found,) = desk.ask([other])
    assert (found.taped.reply.observation, Remembers.made) == ("3", 2), "that of another beginning is not asked"
    four = Message(turn=1, tokens=(4,), text="4", raw="4", whole=True)
    (found,) = desk.ask([call("a", 1, message=four, past=lambda: [call("a").message])])
    assert (found.taped.reply.observation, Remembers.made) == ("124", 3), "one with another beginning was asked"
    (found,) = desk.ask([call("a", 1, heard=(3,), past=lambda: [other.message])])
    assert (found.taped.reply.observation, Remembers.made) == ("312", 4), (
        "its reply to the same words after others was taken"
    )


class Counts:
    """Says how many messages it has had."""

    made = 0

    def __init__(self) -> None:
        Counts.made += 1
        self.had = 0

    def reset(self, _task: Task) -> None:
        self.had = 0

    def step(self, _message: Message) -> Reply:
        self.had += 1
        return Reply(observation=str(self.had))


class Saves(Counts):
    def save(self) -> str:
        return str(self.had)

    def load(self, state: str) -> None:
        self.had = int(state)


@pytest.mark.parametrize("kind", [Counts, Saves])
def test_a_fresh_environment_is_brought_to_where_the_dead_one_was(kind):
    past = (call("a", 0).message, call("a", 1).message)
    state = "2" if kind is Saves else None
    (found,) = Desk("counts", kind, PATIENCE, Tape(None)).ask([call("a", 2, past=lambda: past, state=state)])
    assert found.taped.reply.observation == "3"
    assert found.taped.state == ("3" if kind is Saves else None)


class Steady(Counts):
    """Takes as long for each message as a try may take, all but a little."""

    def step(self, message: Message) -> Reply:
        time.sleep(0.15)
        return super().step(message)


def test_an_environment_that_is_told_all_again_has_time_for_all_of_it():
    # Found by reading: one trouble at a late turn lost each sample of an environment without `save`, as its replay came late.
    past = tuple(call("a", turn).message for turn in range(4))
    desk = Desk("steady", Steady, replace(PATIENCE, timeout_s=0.4, retries=0), Tape(None))
    (found,) = desk.ask([call("a", 4, past=lambda: past)])
    assert found.troubles == 0
    assert found.taped.reply.observation == "5"


class Hangs(Counts):
    """Answers the first message of all; what comes after it, and its end, take long."""

    def step(self, message: Message) -> Reply:
        if message.turn:
            time.sleep(0.3)
        return super().step(message)

    def close(self) -> None:
        time.sleep(3)


def test_telling_all_again_takes_no_longer_than_what_is_left_of_the_steps_time():
    past = tuple(call("a", turn).message for turn in range(20))
    patience = replace(PATIENCE, timeout_s=0.4, retries=0, deadline_s=0.5)
    begun = time.monotonic()
    (found,) = Desk("hangs", Hangs, patience, Tape(None)).ask([call("a", 20, past=lambda: past)])
    assert found.taped is None
    assert time.monotonic() - begun < 3, "the messages alone take twice that"


def test_an_environment_that_does_not_close_is_no_trouble_of_the_call_that_needs_a_fresh_one():
    desk = Desk("hangs", Hangs, replace(PATIENCE, timeout_s=1.0, retries=0), Tape(None))
    desk.ask([call("a", 0)])
    past = tuple(call("a", turn).message for turn in range(2))
    (found,) = desk.ask([call("a", 2, past=lambda: past)])
    assert (found.troubles, found.taped is None) == (0, False)


def test_what_grpcs_servers_answer_when_a_handler_fails_may_be_what_the_message_says():
    def told(name: str) -> bool:
        kind = type(
            "RpcError", (Exception,), {"__module__": "grpc", "code": lambda _: type("Code", (), {"name": name})}
        )
        return is_trouble(kind())

    assert told("UNAVAILABLE")
    assert not told("UNKNOWN"), "it comes again however often it is tried"


class Unmade(Exception):
    pass


class Fails(Counts):
    """Cannot be made the first time, as its server is away."""

    troubles = (Unmade,)
    left = 1

    def __init__(self) -> None:
        if Fails.left:
            Fails.left -= 1
            raise Unmade
        super().__init__()


@pytest.mark.usefixtures("bad")
def test_trouble_with_making_an_environment_is_told_by_its_class():
    (found,) = Desk("fails", Fails, PATIENCE, Tape(None)).ask([call("a", RESET)])
    assert (found.troubles, found.taped is None) == (1, False)


def test_a_tape_is_read_by_the_next_worker_and_a_torn_line_is_none(tmp_path: Path):
    first, key = Tape(tmp_path), key_of("0:17", 1, (6, 15, 7))
    first.begin(3)
    said = Taped(reply=Reply(observation=({"role": "tool", "content": "ü\n"},), reward=[0.1, 0.2]), state="s")
    first.add(1, key, said)
    first.add(1, "other", Taped(reply=Reply(observation=(1, 2))))
    file = tmp_path / "3" / "1"
    file.write_text(file.read_text() + "deadbeef {\n")
    second = Tape(tmp_path)
    second.begin(3)
    assert second.find(1, key) == said
    assert second.find(1, "other") == Taped(reply=Reply(observation=(1, 2)))
    assert second.find(0, key) is None
    second.begin(4)
    assert file.exists()
    second.begin(5)
    assert not file.exists(), "nobody goes back that far"


def test_groups_are_compared_without_those_that_were_lost():
    scores = torch.tensor([1.0, 0.0, 0.0, 2.0])
    lost = torch.tensor([False, False, True, False])
    found = of_all_tokens(group_gains(scores, 4, lost=lost), torch.ones(4, 1, dtype=torch.bool), lost)[:, 0]
    alone = group_gains(scores[~lost], 3)
    assert torch.allclose(found[~lost], alone)
    assert found[2] == 0
    assert torch.equal(group_gains(scores, 4, lost=torch.zeros(4, dtype=torch.bool)), group_gains(scores, 4))


@pytest.mark.parametrize(
    ("reply", "why"),
    [
        ("=42", "must return a Reply"),
        (Reply(reward=float("nan")), "would poison the whole batch"),
        (Reply(reward=[0.5]), "1 rewards to a message of 2 tokens"),
        (Reply(reward="much"), "is no number"),
        (Reply(observation=3), "it must be a text, a list of tokens, or of chat messages"),
    ],
)
def test_a_reply_that_is_none_is_refused(reply, why):
    class Wrong(Counts):
        def step(self, _message: Message) -> Reply:
            return reply

    with pytest.raises(EnvironmentFault, match=why):
        Desk("wrong", Wrong, PATIENCE, Tape(None)).ask([call("a")])


def test_an_environment_that_is_not_there_is_said_so():
    with pytest.raises(EnvironmentFault, match=r"'elasticrl\.ppo\.tasks:Abacus' cannot be found"):
        made_by("elasticrl.ppo.tasks:Abacus")


def test_chat_messages_go_through_the_template_behind_the_policys_own_end():
    tokenizer = tiny.tokenizer((*"0123456789", "*", "\n", tiny.PAD, tiny.EOS, "<user>", "<answer>", "<tool>"))
    tokenizer.add_special_tokens({"additional_special_tokens": ["<user>", "<answer>", "<tool>"]})
    tokenizer.chat_template = (
        "{% for m in messages %}{{ '<answer>' if m['role'] == 'assistant' else '<' + m['role'] + '>' }}{{ m['content'] }}"
        "<eos>\n{% endfor %}{% if add_generation_prompt %}<answer>{% endif %}"
    )
    words = Words(tokenizer=tokenizer, ends=(tokenizer.eos_token_id,))
    seen = words.observation(({"role": "tool", "content": "42"},))
    assert tokenizer.decode(seen) == "\n<tool>42<eos>\n<answer>"
    assert words.observation("42") == (4, 2)
    assert words.observation((7, 7)) == (7, 7)
    assert words.observation("") == ()
    with pytest.raises(EnvironmentFault, match="an observation has token 99, which is none of the tokenizer's 17"):
        words.observation((99,))


QWEN3 = """
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and message.content is string and not(
        message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content %}
    {%- if message.role == "user" %}
        {{- '<|im_start|>' + message.role + '\n' + content + '<|im_end|>' + '\n' }}
    {%- elif message.role == "assistant" %}
        {%- set reasoning_content = '' %}
        {%- if loop.index0 > ns.last_query_index and (loop.last or (not loop.last and reasoning_content)) %}
            {{- '<|im_start|>' + message.role + '\n<think>\n' + reasoning_content + '\n</think>\n\n' + content }}
        {%- else %}
            {{- '<|im_start|>' + message.role + '\n' + content }}
        {%- endif %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.first or (messages[loop.index0 - 1].role != "tool") %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\n<tool_response>\n' + content + '\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}
            {{- '<|im_end|>\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\n\n</think>\n\n' }}
    {%- endif %}
{%- endif %}"""
"""Qwen3's own, without its part on a system's message and on calls. Only a last answer has an empty thought before it."""


@pytest.mark.parametrize("told", [{}, {"enable_thinking": False}])
@pytest.mark.parametrize("role", ["tool", "user"])
def test_a_template_that_writes_thoughts_into_last_answers_alone_shows_the_policy_no_answer_of_nobodys(told, role):
    marks = ("<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_response>", "</tool_response>")
    words = tiny.tokenizer((*dict.fromkeys("0123456789\nuserassistanttool"), tiny.PAD, tiny.EOS, *marks))
    words.add_special_tokens({"additional_special_tokens": list(marks)})
    words.chat_template = QWEN3
    ends = (words.eos_token_id, words.convert_tokens_to_ids("<|im_end|>"))
    seen = Words(tokenizer=words, ends=ends, told=told).observation(({"role": role, "content": "42"},))
    shown = "\n<tool_response>\n42\n</tool_response>" if role == "tool" else "\n42"
    thought = "<think>\n\n</think>\n\n" if told else ""
    assert words.decode(seen) == f"\n<|im_start|>user{shown}<|im_end|>\n<|im_start|>assistant\n{thought}"


@pytest.mark.parametrize("content", ["42", "042", ""])
def test_a_message_whose_end_is_the_first_behind_an_answer_is_shown_whole(content):
    # Found by reading: of a template that writes no end behind an answer the observation was dropped without a word.
    tokenizer = tiny.tokenizer((*"0123456789", tiny.PAD, tiny.EOS, "<user>", "<answer>", "<tool>"))
    tokenizer.add_special_tokens({"additional_special_tokens": ["<user>", "<answer>", "<tool>"]})
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m['role'] == 'assistant' %}<answer>{{ m['content'] }}"
        "{% else %}<{{ m['role'] }}>{{ m['content'] }}<eos>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<answer>{% endif %}"
    )
    words = Words(tokenizer=tokenizer, ends=(tokenizer.eos_token_id,))
    seen = words.observation(({"role": "tool", "content": content}, {"role": "user", "content": "7"}))
    assert tokenizer.decode(seen) == f"<tool>{content}<eos><user>7<eos><answer>"


def test_a_template_that_leaves_an_answer_out_is_refused():
    tokenizer = tiny.tokenizer((*"0123456789", tiny.PAD, tiny.EOS))
    tokenizer.chat_template = "{% for m in messages if m['role'] != 'assistant' %}{{ m['content'] }}<eos>{% endfor %}"
    with pytest.raises(EnvironmentFault, match="chat template leaves out what the policy has said"):
        Words(tokenizer=tokenizer, ends=(tokenizer.eos_token_id,)).observation(({"role": "user", "content": "42"},))


def test_a_tiny_model_learns_to_call_the_calculator(path):
    """Without a call half of the reward is the most."""
    trainer, _ = turned(path, ppo=learns(), steps=60)
    rewards = []
    while len(rewards) < 60 and sum(rewards[-3:]) / 3 <= 0.55:
        rewards.append(trainer.step(len(rewards)).metrics["reward"])
    assert sum(rewards[:3]) / 3 < 0.2, "it knew before"
    assert sum(rewards[-3:]) / 3 > 0.55, rewards


def test_what_is_lost_has_no_part_in_a_baseline_nor_in_what_a_group_agrees_on() -> None:
    scores = torch.tensor([1.0, 0.0, 7.0, 2.0, 1.0, 9.0, 1.0, 1.0], dtype=torch.float64)
    lost = torch.zeros(8, dtype=torch.bool)
    lost[2] = lost[5] = True
    found = leave_one_out(scores, 4, lost=lost)
    alone = leave_one_out(scores[~lost], 3)
    torch.testing.assert_close(found[~lost], alone)
    assert contested(scores, 4).all()
    assert contested(scores, 4, lost).tolist() == [True] * 4 + [False] * 4
