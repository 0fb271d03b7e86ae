"""Scorers: a function, a model, an endpoint that fails in the ways endpoints do."""

import json
import random
import threading
import time
from collections import Counter
from contextlib import nullcontext, suppress
from dataclasses import replace
from datetime import date
from decimal import Decimal
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise

import pytest
import torch

from chaos.patience import patience
from elasticrl.agent.gather import Beating, stall_of
from elasticrl.config.training import Model, Reward
from elasticrl.contract.beats import Beat, Page
from elasticrl.contract.model import OUTSIDE
from elasticrl.core.node.suspect import Budgets, Timeouts
from elasticrl.ppo import models, rewards
from elasticrl.ppo.rewards import Answer, Endpoint, Function, RewardError, RewardModel, Weighted, scores_of
from elasticrl.ppo.sizes import Sizes
from elasticrl.runtime.interrupt import GangError


def answer(i, prompt="3141", response="1413"):
    digits = tuple(int(c) for c in prompt + response)
    return Answer(id=str(i), prompt=prompt, response=response, pieces=tuple(response), tokens=digits, ended=True)


@pytest.fixture
def endpoint():
    """A real server that answers with what the test puts into `replies`, in order, then with the lengths of the responses."""
    replies, asked = [], []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            asked.append(body)
            status, text = replies.pop(0) if replies else (200, None)
            if status == "hang":
                released.wait(10)
                return
            if status == "cut":  # in the middle of a reply whose headers are `text`
                self.wfile.write(f"HTTP/1.1 200 OK\r\n{text}\r\n\r\n".encode() + b'{"sco')
                self.close_connection = True
                return
            if status == "call":  # before it answers
                text()
                status, text = 200, None
            if status == "drip":  # a byte now and then, for as long as somebody reads
                self.wfile.write(b"HTTP/1.1 200 OK\r\n\r\n")
                self.close_connection = True
                with suppress(OSError):
                    while not released.wait(0.05):
                        self.wfile.write(b" ")
                return
            scores = [float(len(a["response"])) for a in body["answers"]]
            payload = (json.dumps({"scores": scores}) if text is None else text).encode()
            self.send_response(status)
            if 300 <= status < 400:
                self.send_header("Location", text)
            self.send_header("Content-Length", str(len(payload)))
            self.end_headers()
            self.wfile.write(payload)

        def log_message(self, *_):
            pass

    released = threading.Event()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/score", replies, asked
    released.set()
    server.shutdown()
    server.server_close()
    thread.join(10)


def test_a_function_is_found_by_name_and_scores_each_answer():
    scorer = rewards.of(Reward(function="elasticrl.ppo.tasks:reverse"), deadline_s=1, load=None)
    assert scorer.score([answer(0, response="1413"), answer(1, response="14")]) == [[0.25] * 4, [0.25, 0.25]]
    sort = Function.named("elasticrl.ppo.tasks:sort")
    assert sort.score([answer(0, response="11349")]) == [[0.25, 0.25, 0.25, 0.25, 0.0]]


@pytest.mark.parametrize(
    ("scores", "sentence"),
    [
        ([1.0], "returned 1 scores for 2 answers"),
        ([1.0, float("nan")], "scored sample 1 with nan"),
        ([1.0, [0.1, 0.2]], "gave 2 scores to the 4 tokens of sample 1"),
        (["good", 1], "must return 2 scores"),
        (None, "must return 2 scores"),
    ],
)
def test_scores_that_would_poison_the_batch_are_refused(scores, sentence):
    with pytest.raises(RewardError, match=sentence):
        Function("mine", lambda _answers: scores).score([answer(0), answer(1)])


def test_a_function_that_does_not_exist_is_named():
    with pytest.raises(RewardError, match=r"'elasticrl\.ppo\.tasks:nothing' cannot be found"):
        Function.named("elasticrl.ppo.tasks:nothing")
    with pytest.raises(RewardError, match="nothing scores the samples"):
        rewards.of(Reward(), deadline_s=1, load=None)


def test_a_reward_model_scores_an_answer_alike_beside_others_of_any_length(folders):
    model = models.reward_model(Model(), folders["reward"])
    scorer = RewardModel(model=model, sizes=Sizes(tokens=96, sample=12, answer=4), pad=10)
    answers = [answer(i, prompt="12345"[: 1 + i % 5], response="678"[: i % 4]) for i in range(19)]
    whole = scorer.score(answers)
    assert len(set(whole)) > 5
    assert scorer.score(answers) == whole
    assert scorer.score(answers[::-1]) == pytest.approx(whole[::-1], abs=1e-5)
    assert scorer.score(answers[3:4]) == pytest.approx(whole[3:4], abs=1e-5)
    assert scorer.score([]) == []


def test_an_endpoint_is_asked_again_after_what_may_heal(endpoint):
    url, replies, asked = endpoint
    replies += [(503, "busy"), (429, "slow down")]
    scorer = Endpoint(url=url, retries=3, timeout_s=5, deadline_s=20)
    assert scorer.score([answer(0), answer(1, response="1")]) == [4.0, 1.0]
    assert len(asked) == 3
    assert asked[0]["answers"][0]["prompt"] == "3141"
    assert asked[0] == asked[2]


@pytest.mark.parametrize("headers", ["Content-Length: 100", "Transfer-Encoding: chunked\r\n\r\n100"])
def test_an_endpoint_whose_reply_is_cut_short_is_asked_again(endpoint, headers):
    url, replies, asked = endpoint
    replies += [("cut", headers)] * 3
    assert Endpoint(url=url, retries=1, timeout_s=5, deadline_s=20).score([answer(0)]) == [4.0]
    assert len(asked) == 4
    replies += [("cut", headers)] * 100
    # the last try may begin so late that the deadline comes first
    with pytest.raises(
        RewardError, match=r"did not answer \(\d+ attempts? in .*(reply (was cut short|had no end)|timed out)"
    ):
        Endpoint(url=url, retries=1, timeout_s=5, deadline_s=0.5).score([answer(0)])


def test_an_endpoint_that_drips_has_until_the_deadline(endpoint):
    url, replies, asked = endpoint
    replies += [("drip", "")]
    with pytest.raises(
        RewardError, match=r"did not answer \(1 attempt in 0\.[5-9] s\): its reply had no end after \d+ bytes"
    ):
        Endpoint(url=url, retries=3, timeout_s=5, deadline_s=0.5).score([answer(0)])
    assert len(asked) == 1


def test_an_endpoint_that_restarts_is_waited_for_though_it_fails_at_once(endpoint):
    """Found by reading: four refusals were over within a second, which ended the worker, and the third time the job."""
    url, replies, asked = endpoint
    replies += [(503, "starting")] * 6
    assert Endpoint(url=url, retries=0, timeout_s=5, deadline_s=20).score([answer(0)]) == [4.0]
    assert len(asked) == 7


def test_what_an_endpoint_says_as_it_refuses_is_told(endpoint):
    url, replies, _ = endpoint
    replies += [(422, "no such field: answers")]
    with pytest.raises(RewardError, match=r"refused with HTTP 422 .*: no such field: answers") as refused:
        Endpoint(url=url).score([answer(0)])
    assert "did not answer" not in str(refused.value)


def test_an_endpoint_is_told_of_a_record_s_dates_and_decimals_in_words(endpoint):
    url, _, asked = endpoint
    record = {"day": date(2024, 2, 29), "price": Decimal("1.50"), "n": 3}
    assert Endpoint(url=url).score([replace(answer(0), record=record)]) == [4.0]
    assert asked[0]["answers"][0]["record"] == {"day": "2024-02-29", "price": "1.50", "n": 3}


def test_an_endpoint_is_not_asked_again_after_what_will_not_heal(endpoint):
    url, replies, asked = endpoint
    for reply in [(400, "no"), (200, '{"scores": [1]}'), (200, "[]"), (200, "<html>")]:
        replies.append(reply)
        asked.clear()
        with pytest.raises(RewardError):
            Endpoint(url=url, retries=3).score([answer(0), answer(1)])
        assert len(asked) == 1


def test_an_endpoint_that_hangs_is_given_up_in_time_with_a_sentence(endpoint):
    url, replies, asked = endpoint
    replies += [("hang", None)] * 3
    with pytest.raises(RewardError, match=r"did not answer \(2 attempts in .*; see that it runs, raise reward.timeout"):
        Endpoint(url=url, retries=1, timeout_s=0.2, deadline_s=5).score([answer(0)])
    assert len(asked) == 2
    with pytest.raises(RewardError, match="did not answer"):
        Endpoint(url="http://127.0.0.1:1/", retries=100, timeout_s=1, deadline_s=0.5).score([answer(0)])


def test_a_worker_whose_endpoint_is_away_for_longer_than_a_learned_budget_is_no_hang(endpoint, tmp_path):
    url, replies, _ = endpoint
    replies += [("hang", None)] * 3
    budgets = Budgets(settings=Timeouts())
    for _ in range(20):
        budgets = budgets.learn("reward", 0.1).learn(OUTSIDE, 0.1)
    beat, page = Beat(tmp_path / "beat"), Page(tmp_path / "beat")
    beat.joining(1, 1, 0)
    beat.training()
    beat.phase("reward")
    scorer = Endpoint(url=url, retries=3, timeout_s=0.8, deadline_s=20, waits=lambda: beat.still(OUTSIDE))
    stalls, over = [], threading.Event()

    def watch():  # as the agent does
        while not over.wait(0.02):
            stalls.append(stall_of(Beating(slot=0, beat=page.read()), budgets, time.monotonic()))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        assert scorer.score([answer(0)]) == [4.0]
        time.sleep(0.05)
    finally:
        over.set()
        watcher.join(10)
    assert len(stalls) > 50
    assert not any(stalls)


def test_what_a_worker_does_between_two_waits_for_its_endpoint_is_not_measured_by_how_often_it_says_that_it_waits(
    endpoint, tmp_path
):
    # Found by reading: it stayed outside, and a lane that took long to be put into words had its worker killed there.
    url, replies, _ = endpoint
    replies += [("hang", None)]
    beat = Beat(tmp_path / "beat")
    beat.joining(1, 1, 0)
    beat.training()
    beat.phase("reward")
    said = []

    def waits():
        beat.still(OUTSIDE)
        said.append(beat.now)

    scorer = Endpoint(url=url, retries=3, timeout_s=0.8, deadline_s=20, waits=waits, alone=beat.alone)
    assert scorer.score([answer(0)]) == [4.0]
    assert {beat.phase for beat in said} == {OUTSIDE}
    assert beat.now.phase == "reward"
    assert beat.now.since > said[-1].since
    replies += [("hang", None)]
    before = len(said)
    with pytest.raises(RewardError):
        replace(scorer, retries=0).score([answer(0)])
    assert len(said) > before
    assert beat.now.phase == "reward"


def test_short_waits_of_many_lanes_add_up_to_one_that_is_told(endpoint):
    # Found by reading: one that took 0.4 s for each of ten lanes, where the budget was of 2 s, had its worker killed.
    url, replies, asked = endpoint
    said = []

    def waits():
        said.append(time.monotonic())

    begun = time.monotonic()
    replies += [("hang", None), (200, None)] * 6
    scorer = Endpoint(url=url, retries=1, timeout_s=0.3, deadline_s=20, at_once=1, waits=waits)
    assert scorer.each([[answer(lane)] for lane in range(6)]) == [[4.0]] * 6
    assert len(asked) == 12
    signs = [begun, *said, time.monotonic()]
    assert max(after - before for before, after in pairwise(signs)) < 1.5, "the floor of a budget is 2 s"


def test_an_endpoint_is_asked_about_several_lanes_at_once_and_about_no_more(endpoint):
    # Found by reading: one after the other, twice the lanes took a worker twice the time.
    url, replies, asked = endpoint
    together, under_way, most = threading.Barrier(3), Counter(), []

    def meet():
        under_way["now"] += 1
        most.append(under_way["now"])
        together.wait(10)  # broken, which fails the request, unless three of them meet
        under_way["now"] -= 1

    replies += [("call", meet)] * 6
    lanes = [[answer(lane, response="1" * lane)] * lane for lane in range(7)]  # lane 0 has none, and asks for nothing
    scorer = Endpoint(url=url, retries=0, timeout_s=20, deadline_s=30, at_once=3)
    assert scorer.each(lanes) == [[float(lane)] * lane for lane in range(7)]
    assert len(asked) == 6
    assert max(most) == 3


def test_what_one_lane_s_endpoint_refuses_is_told_while_another_s_hangs(endpoint):
    url, replies, asked = endpoint
    replies += [("hang", None), (422, "no")]
    begun = time.monotonic()
    with pytest.raises(RewardError, match="refused with HTTP 422"):
        Endpoint(url=url, timeout_s=1.5, deadline_s=20, at_once=2).each([[answer(lane)] for lane in range(9)])
    assert time.monotonic() - begun < patience(1.4)
    for thread in threading.enumerate():  # one is left behind, and sees its request time out
        if thread.name == "reward":
            thread.join(10)
    assert len(asked) == 2, "nothing more is asked"


def test_an_endpoint_that_is_asked_again_draws_nothing_of_the_lane_s(endpoint):
    url, replies, asked = endpoint
    replies += [(503, "busy"), (503, "busy")]
    random.seed(7)
    before = random.getstate()
    assert Endpoint(url=url, retries=3, timeout_s=5, deadline_s=20).score([answer(0)]) == [4.0]
    assert len(asked) == 3
    assert random.getstate() == before


def test_who_is_wanted_elsewhere_leaves_an_endpoint_that_hangs_and_asks_it_nothing_more(endpoint):
    url, replies, asked = endpoint
    replies += [("hang", None)] * 3
    begun = time.monotonic()

    def check():
        if asked:
            raise GangError("the plan changed")

    with pytest.raises(GangError):
        Endpoint(url=url, retries=3, timeout_s=1.5, deadline_s=20, check=check).score([answer(0)])
    assert time.monotonic() - begun < patience(1.4)
    for thread in threading.enumerate():  # the one that is left behind sees its request time out
        if thread.name == "reward":
            thread.join(10)
    assert len(asked) == 1


def test_all_that_is_asked_in_a_stage_has_one_deadline(endpoint):
    url, replies, _ = endpoint
    replies += [("hang", None)] * 3 + [(200, None)] + [("hang", None)] * 100
    begun = time.monotonic()
    with pytest.raises(RewardError, match=r"timeouts\.phase\.reward"):
        Endpoint(url=url, retries=100, timeout_s=0.3, deadline_s=2.0, at_once=1).each([[answer(0)], [answer(1)]])
    assert time.monotonic() - begun < patience(3.5), "the second lane had 2 s of its own"


def test_scores_reach_the_rewards_as_numbers():
    mask = torch.ones(1, 4, dtype=torch.bool)
    assert rewards.placed([2.5], mask).tolist() == [[0, 0, 0, 2.5]]


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_a_redirect_is_not_followed_and_is_told(endpoint, status):
    """Found from outside: an endpoint sent the workers to a metadata server on the loopback, and they read it."""
    url, replies, asked = endpoint
    inner_asked = []

    class Inner(BaseHTTPRequestHandler):
        def do_GET(self):
            inner_asked.append(self.path)
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b'{"scores": [1.0]}')

        do_POST = do_GET  # noqa: N815 - the name that it is called by

        def log_message(self, *_):
            pass

    inner = ThreadingHTTPServer(("127.0.0.1", 0), Inner)
    threading.Thread(target=inner.serve_forever, daemon=True).start()
    try:
        replies.append((status, f"http://127.0.0.1:{inner.server_port}/latest/meta-data/"))
        with pytest.raises(RewardError, match=r"redirects to .*meta-data.*reward.url"):
            Endpoint(url=url).score([answer(0)])
        assert inner_asked == []
        assert len(asked) == 1, "it will not heal"
    finally:
        inner.shutdown()
        inner.server_close()


@pytest.mark.parametrize("to", ["http://[", "", "file:///etc/passwd", "http://x:99999999/"])
def test_a_redirect_to_no_address_is_told_as_one(endpoint, to):
    url, replies, asked = endpoint
    replies.append((302, to))
    with pytest.raises(RewardError, match=r"redirects to .*reward.url"):
        Endpoint(url=url).score([answer(0)])
    assert len(asked) == 1


@pytest.mark.parametrize(
    "reply", ["[" * 200_000, '{"scores": [1' + "0" * 400 + "]}", '{"scores": [1e999]}', '{"scores": {"a": 1}}']
)
def test_a_reply_that_no_reader_can_bear_is_an_error_of_the_reward(endpoint, reply):
    url, replies, _ = endpoint
    replies.append((200, reply))
    with pytest.raises(RewardError):
        Endpoint(url=url).score([answer(0)])


def brief(answers):
    return [-0.5 * len(each.response) for each in answers]


def each_right(answers):
    return [[1.0] * len(each.pieces) for each in answers]


def test_several_rewards_are_weighed_and_what_each_said_is_kept(endpoint):
    url, _, asked = endpoint
    scorer = rewards.of(
        Reward(
            parts={"brief": f"{__name__}:brief", "right": f"{__name__}:each_right", "judge": url},
            weights={"judge": "2", "brief": "0.5"},
        ),
        deadline_s=20.0,
        load=lambda _: None,
    )
    answers = {lane: [answer(lane, response="141"), answer(f"{lane}b", response="7")][: 2 - lane] for lane in range(3)}
    found = scores_of(scorer, answers, rounds=range(3), within=lambda _: nullcontext())
    assert [found[lane].parts["judge"] for lane in range(3)] == [[3.0, 1.0], [3.0], []]
    assert found[0].parts == {"brief": [-1.5, -0.5], "right": [[1.0] * 3, [1.0]], "judge": [3.0, 1.0]}
    assert found[0].scores == [[1.0, 1.0, 1.0 + 6.0 - 0.75], [1.0 + 2.0 - 0.25]], "of a whole answer, on its last token"
    assert len(asked) == 2, "an empty lane is not asked about"
    assert scorer.score(answers[1]) == found[1].scores


def test_endpoints_of_several_rewards_are_asked_at_once_and_the_first_that_fails_ends_the_wait(endpoint):
    url, replies, asked = endpoint
    meet = threading.Barrier(2, timeout=10.0)
    replies += [("call", meet.wait)] * 2  # each answers when the other was asked
    parts = {"one": Endpoint(url=url, timeout_s=9.0), "other": Endpoint(url=f"{url}2", timeout_s=9.0)}
    scorer = Weighted(parts=parts, weights={"one": 1.0, "other": -1.0})
    found = scores_of(scorer, {0: [answer(0)]}, rounds=[0], within=lambda _: nullcontext())
    assert found[0].scores == [0.0]
    assert len(asked) == 2
    replies += [("hang", None), (404, "no such model")]
    begun = time.monotonic()
    with pytest.raises(RewardError, match="no such model"):
        scores_of(scorer, {0: [answer(0)]}, rounds=[0], within=lambda _: nullcontext())
    assert time.monotonic() - begun < patience(5.0)


def test_a_reward_model_among_several_is_found_and_gets_each_generation_s_weights(folders):
    model = models.reward_model(Model(path=folders["reward"]), folders["reward"])
    empty = RewardModel(model=torch.nn.Module(), sizes=Sizes(tokens=64, sample=10, answer=4), pad=10)
    scorer = rewards.of(Reward(parts={"brief": f"{__name__}:brief"}, model="m"), deadline_s=1.0, load=lambda _: empty)
    assert rewards.model_of(scorer) is empty
    full = rewards.with_model(scorer, model)
    assert rewards.model_of(full).model is model
    answers = [answer(0), answer(1, response="77")]
    found = scores_of(full, {0: answers}, rounds=[0], within=lambda _: nullcontext())[0]
    alone = replace(empty, model=model).score(answers)
    assert found.parts["model"] == alone
    assert found.scores == [score - 0.5 * len(each.response) for score, each in zip(alone, answers, strict=True)]
    assert rewards.model_of(Function.named("elasticrl.ppo.tasks:reverse")) is None
