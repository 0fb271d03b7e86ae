"""PPO under the elastic runtime: the same bits and the same samples for any gang, and through faults at any stage."""

import json
import random
import re
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self

import pytest
from elastic_kit import LANES, SEED, STEPS, ending, events, generated, mixed, nodes, outcome, small, strike

from elasticrl.certificate.make import make
from elasticrl.ppo import estimate
from elasticrl.runtime.audit import drawn
from elasticrl.runtime.lanes import Deal


@pytest.fixture(scope="module")
def conf(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return small(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, conf: dict[str, Any]) -> dict[int, str]:
    with nodes(tmp_path_factory.mktemp("alone"), conf, copies=0) as gang:
        gang.plan("n0")
        gang.until_done()
        return outcome(gang)


OFTEN = [("replicated", 4), ("fsdp", 3)]
RARE = [("replicated", 2), ("replicated", 3), ("fsdp", 1), ("fsdp", 2), ("fsdp", 4)]
SELDOM = [pytest.param(*one, marks=pytest.mark.slow) for one in RARE]


@pytest.mark.parametrize(("strategy", "world"), [*OFTEN, *SELDOM])
def test_any_number_of_workers_trains_to_the_same_bits(tmp_path: Path, conf, undisturbed, strategy: str, world: int):
    conf = {**conf, "telemetry": {"format": "json", "tensorboard": str(tmp_path / "curves")}}
    with nodes(tmp_path, conf, strategy=strategy, copies=min(1, world - 1)) as gang:
        gang.plan(*(f"n{i}" for i in range(world)))
        logs = {node: worker.log for node, worker in gang.workers.items()}
        gang.until_done()
        assert outcome(gang) == undisturbed
        certified = make(gang.run_dir)
        told = {node: events(log) for node, log in logs.items()}
    assert certified.model is not None, certified.no_model
    assert [each.by for each in certified.used] == list(range(STEPS)), (
        "the weights that a step begins with generate for it"
    )
    for log in logs.values():
        assert re.findall(r"prompts.jsonl: (.*)", log.read_text()) == [
            "5,000 records fit; left out: 1 (of no tokens, or too many)"
        ]
    for name in ("ppo.step", "ppo.comm"):
        assert [event["step"] for event in told["n0"] if event["event"] == name] == list(range(STEPS))
    assert [event["holds"] for event in told["n0"] if event["event"] == "ppo.guarantee"] == ["bits"]
    assert not any(told[node] for node in told if node != "n0"), "a step is told by one worker"
    assert list((tmp_path / "curves").iterdir())
    if strategy == "replicated":
        sent_as_planned(gang.tree, world, [event for event in told["n0"] if event["event"] == "ppo.comm"])


@pytest.fixture(scope="module")
def mixed_lengths(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[int, str]]:
    """The job, and its digests alone."""
    conf = mixed(tmp_path_factory.mktemp("mixed"))
    with nodes(tmp_path_factory.mktemp("mixed-alone"), conf, copies=0) as gang:
        gang.plan("n0")
        gang.until_done()
        return conf, outcome(gang)


@pytest.mark.parametrize(
    ("strategy", "world"),
    [
        ("replicated", 3),
        ("fsdp", 2),
        *(
            pytest.param(*one, marks=pytest.mark.slow)
            for one in (("replicated", 2), ("replicated", 4), ("fsdp", 1), ("fsdp", 3), ("fsdp", 4))
        ),
    ],
)
def test_samples_of_mixed_lengths_train_to_the_same_bits_though_lanes_make_other_numbers_of_passes(
    tmp_path: Path, mixed_lengths, strategy: str, world: int
):
    conf, undisturbed = mixed_lengths
    conf = {**conf, "telemetry": {"format": "json"}}
    with nodes(tmp_path, conf, strategy=strategy, copies=min(1, world - 1)) as gang:
        gang.plan(*(f"n{i}" for i in range(world)))
        log = gang.workers["n0"].log
        gang.until_done()
        assert outcome(gang) == undisturbed
        steps = [event for event in events(log) if event["event"] == "ppo.step"]
    assert all(0.0 <= step["metrics"]["padding"] < 0.3 for step in steps)


def sent_as_planned(tree, world: int, told: list[dict[str, Any]]) -> None:
    """The bytes of the gradients' all-to-alls are those of `elasticrl plan`, up to padding."""
    planned = sum(line.bytes for line in estimate.read(tree, workers=world).wire if line.what == "all_to_all")
    sent = [event["costs"]["all_to_all"]["bytes"] for event in told]
    assert len(set(sent[1:])) == 1
    assert planned <= sent[1] <= 1.05 * planned
    assert {event["timeouts"] for event in told} == {0}


@pytest.mark.timeout(900)
@pytest.mark.parametrize("strategy", ["replicated", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_kills_at_any_stage_cost_no_bit_and_generate_nothing_twice(tmp_path: Path, conf, undisturbed, strategy: str):
    phases = ["rollout", "logprobs", "update", "reward", "update", "values"]
    chance = random.Random(3)
    with nodes(tmp_path, conf, strategy=strategy, program="ppo_ends") as gang:
        ending(gang, ELASTICRL_HISTORY=str(tmp_path / "history"), PPO_GENERATED=str(tmp_path / "generated"))
        gang.plan("n0", "n1", "n2")
        for number, phase in enumerate(phases):
            gang.until_sealed(number + 1, within_s=240.0)
            node = chance.choice(["n0", "n1", "n2"])
            after_ms, slow = (
                chance.choice([0.1, 3, 6]),
                phase == "reward",
            )  # a slow scorer: its samples have long been kept
            strike(gang, node, phase, after_ms=500 if slow else after_ms, stay=slow)
        gang.until_done(within_s=240.0)
        assert outcome(gang) == undisturbed
    told = [json.loads(line)["step"] for line in (tmp_path / "history").read_text().splitlines()]
    assert sorted(told) == list(range(STEPS)), "each step is told once, whoever died"
    times = generated(tmp_path / "generated")
    assert len(times) == STEPS * 64
    assert len({step for (step, _), count in times.items() if count > 1}) <= phases.count("rollout"), (
        "a step that was not cut short in its rollout was generated again"
    )


@pytest.mark.timeout(900)
@pytest.mark.parametrize("inside", [0, pytest.param(0.005, marks=pytest.mark.slow)])
def test_what_is_not_kept_inside_of_a_step_is_made_again_to_the_same_bits(
    tmp_path: Path, conf, undisturbed, inside: float
):
    phases = ["update", "values", "update"]
    with nodes(tmp_path, {**conf, "vault": {"inside": inside}}, program="ppo_ends") as gang:
        ending(gang)
        gang.plan("n0", "n1")
        for number, phase in enumerate(phases):
            gang.until_sealed(number + 1, within_s=240.0)
            strike(gang, "n1", phase, after_ms=3)
        log = gang.workers["n0"].log
        gang.until_done(within_s=240.0)
        assert outcome(gang) == undisturbed
    went_on = re.findall(r"from step (\d+)\.(\d+) ", log.read_text())
    assert len(went_on) == 1 + len(phases)
    if not inside:
        assert [mark for _, mark in went_on[1:]] == ["1"] * len(phases), (
            "a function's scores are kept, and nothing else"
        )


class Whims:
    """An endpoint that scores an answer otherwise each time it is asked, and remembers; or says again what it said last."""

    def __init__(self) -> None:
        self.said: dict[str, list[float]] = {}
        self.again = False
        chance, lock = random.Random(), threading.Lock()

        class Handler(BaseHTTPRequestHandler):
            def do_POST(handler) -> None:  # noqa: N805 - its name; `self` is ours
                answers = json.loads(handler.rfile.read(int(handler.headers["Content-Length"])))["answers"]
                with lock:
                    for name in () if self.again else (answer["id"] for answer in answers):
                        self.said.setdefault(name, []).append(chance.random())
                    text = json.dumps({"scores": [self.said[answer["id"]][-1] for answer in answers]}).encode()
                handler.send_response(200)
                handler.send_header("Content-Length", str(len(text)))
                handler.end_headers()
                handler.wfile.write(text)

            def log_message(handler, *_: object) -> None:  # noqa: N805
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self.url = f"http://127.0.0.1:{self._server.server_port}/score"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(10)


@pytest.mark.timeout(600)
def test_an_endpoint_s_scores_are_asked_for_once_samples_are_kept_and_used_as_they_were_recorded(tmp_path: Path, conf):
    phases = ["reward", "values"]
    with Whims() as whims:
        conf = {**conf, "reward": {"url": whims.url}, "vault": {"inside": 0}}
        with nodes(tmp_path / "killed", conf, program="ppo_ends") as gang:
            ending(gang, PPO_GENERATED=str(tmp_path / "generated"))
            gang.plan("n0", "n1")
            log = gang.workers["n0"].log
            for number, phase in enumerate(phases):
                gang.until_sealed(number + 1, within_s=240.0)
                strike(gang, "n1", phase, after_ms=500, stay=True)
            gang.until_done(within_s=240.0)
            killed = outcome(gang)
        marks = [mark for _, mark in re.findall(r"from step (\d+)\.(\d+) ", log.read_text())]
        assert marks == ["0", "1", "2"], "behind the rollout, and then behind its scores"
        assert set(generated(tmp_path / "generated").values()) == {1}
        # n0 had asked for its half as n1 died in `reward`, and asked again; nothing was used of it yet.
        assert Counter(map(len, whims.said.values())) == {1: STEPS * 64 - 32, 2: 32}
        whims.again = True
        with nodes(tmp_path / "replayed", conf, copies=0) as gang:
            gang.plan("n0")
            gang.until_done()
            assert outcome(gang) == killed, "it was trained on something else than what was recorded"


@pytest.mark.parametrize("world", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_a_lane_of_each_update_is_computed_on_two_nodes_and_costs_no_bit(
    tmp_path: Path, mixed_lengths, world: int
) -> None:
    conf, alone = mixed_lengths
    with nodes(tmp_path, {**conf, "audit": {"lanes": "1"}}) as gang:
        gang.plan(*(f"n{i}" for i in range(world)))
        workers = dict(gang.workers)
        gang.until_done()
        assert outcome(gang) == alone
        assert all("audit.lanes: a lane was computed twice" in worker.text for worker in workers.values())
        for what in ("samples", "reference's log-probabilities"):
            said = f"audit.lanes: the {what} of a lane were made twice"
            assert all(said in worker.text for worker in workers.values()), what
        assert not any("silent corruption" in worker.text for worker in workers.values())


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory, folders: dict[str, str]) -> tuple[dict[str, Any], dict[int, str]]:
    """With a reward model beside a function, and what it comes to undisturbed."""
    conf = small(tmp_path_factory.mktemp("judged"))
    parts, weights = {"reverse": "elasticrl.ppo.tasks:reverse"}, {"reverse": "1.0", "model": "0.5"}
    conf = {**conf, "reward": {"model": folders["reward"], "parts": parts, "weights": weights}}
    with nodes(tmp_path_factory.mktemp("alone"), conf, copies=0) as gang:
        gang.plan("n0")
        gang.until_done()
        return conf, outcome(gang)


def makes_drawn_lane(rank: int, world: int, what: str = "samples") -> int:
    """The first step from 2 on of which what this rank has made of a lane is looked at."""

    def owner(step: int) -> int:
        lane = drawn(SEED, what, step, 0, lanes=LANES, rate="1")
        return next(one for one, mine in enumerate(Deal.contiguous(LANES, world).carried) if lane in mine)

    return next(step for step in range(2, STEPS) if owner(step) == rank)


@pytest.mark.parametrize("ever", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["ever", "once"])
@pytest.mark.parametrize("world", [3, pytest.param(4, marks=pytest.mark.slow)])
def test_a_node_whose_cache_is_wrong_as_it_generates_is_named_and_nobody_trains_on_its_samples(
    tmp_path: Path, conf, undisturbed, world: int, *, ever: bool
) -> None:
    step = makes_drawn_lane(1, world)
    others = [f"n{i}" for i in range(world) if i != 1]
    with nodes(tmp_path, {**conf, "audit": {"lanes": "1"}}, program="ppo_ends") as gang:
        gang.env["PPO_CACHE"] = json.dumps(["n1", step, ever])
        gang.plan(*sorted([*others, "n1"]))
        bad = gang.workers["n1"]
        bad.process.join(120)
        assert bad.process.exitcode == 1, bad.text[-2000:]
        assert f"of step {step} came to different results" in bad.text
        assert "Miscomputed: the samples of lane " in bad.text
        for node in others:
            assert "that of rank 1 (n1) stands alone" in gang.workers[node].text
            assert gang.workers[node].process.exitcode is None
        gang.kill_worker("n1")
        gang.plan(*others)
        gang.until_done()
        assert outcome(gang) == undisturbed


@pytest.mark.parametrize(
    ("role", "what"),
    [
        ("ref", "reference's log-probabilities"),
        pytest.param("reward", "reward model's scores", marks=pytest.mark.slow),
    ],
)
def test_a_node_whose_frozen_model_has_a_flipped_bit_is_named_and_nobody_trains_on_what_it_says(
    tmp_path: Path, judged, role: str, what: str
) -> None:
    conf, alone = judged
    step = makes_drawn_lane(1, 3, what)
    with nodes(tmp_path, {**conf, "audit": {"lanes": "1"}}, program="ppo_ends") as gang:
        gang.env["PPO_FROZEN"] = json.dumps(["n1", step, role])
        gang.plan("n0", "n1", "n2")
        bad = gang.workers["n1"]
        bad.process.join(120)
        assert bad.process.exitcode == 1, bad.text[-2000:]
        assert f"Miscomputed: the {what} of lane " in bad.text
        assert f"of step {step} came to different results" in bad.text
        for node in ("n0", "n2"):
            assert "that of rank 1 (n1) stands alone" in gang.workers[node].text
            assert f"audit.lanes: the {what} of a lane were made twice, and came to the same" in gang.workers[node].text
            assert gang.workers[node].process.exitcode is None
        gang.kill_worker("n1")
        gang.plan("n0", "n2")
        gang.until_done()
        assert outcome(gang) == alone
