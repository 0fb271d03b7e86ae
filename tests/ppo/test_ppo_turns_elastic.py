"""Several turns under the elastic runtime: the same bits for any gang and through kills; each reply is used once."""

import random
import re
import time
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import turns_kit
from elastic_kit import STEPS, ending, events, nodes, outcome, strike
from gang_kit import Nodes
from server_kit import serving

from elasticrl.runtime.chronicle import read
from elasticrl.runtime.data.audit import audit

AT_ONCE = 2  # calls of a worker under way


@pytest.fixture(scope="module")
def conf(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    found = turns_kit.small(tmp_path_factory.mktemp("model"))
    more = {"function": "turns_ends:Calculator", "at_once": AT_ONCE}
    return {**found, "environment": {**found["environment"], **more}}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, conf: dict[str, Any]) -> dict[int, str]:
    with nodes(tmp_path_factory.mktemp("alone"), conf, copies=0) as gang:
        gang.plan("n0")
        gang.until_done()
        return outcome(gang)


@pytest.mark.slow  # the kills below go through three workers, two and three
@pytest.mark.parametrize(("strategy", "world"), [("replicated", 2), ("replicated", 3), ("fsdp", 2)])
def test_any_number_of_workers_trains_on_turns_to_the_same_bits(
    tmp_path: Path, conf, undisturbed, strategy: str, world: int
):
    with nodes(tmp_path, conf, strategy=strategy) as gang:
        gang.plan(*(f"n{i}" for i in range(world)))
        gang.until_done()
        assert outcome(gang) == undisturbed


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_an_engine_that_is_a_process_of_its_own_makes_the_same_bits(tmp_path: Path, conf, undisturbed):
    conf = {**conf, "rollout": {**conf["rollout"], "engine": "served"}}
    with nodes(tmp_path, conf) as gang:
        gang.plan("n0", "n1")
        gang.until_done(within_s=240.0)
        assert outcome(gang) == undisturbed


@pytest.mark.timeout(600)
def test_kills_in_turns_and_in_calls_cost_no_bit_and_each_reply_is_used_once(tmp_path: Path, conf, undisturbed):
    calls = tmp_path / "calls"
    with nodes(tmp_path, conf, program="ppo_ends") as gang:
        ends = ending(gang, TURNS_CALLS=str(calls))
        gang.plan("n0", "n1", "n2")
        log = gang.workers["n0"].log
        deaths = 0
        for number, (node, turn) in enumerate([("n1", "0"), ("n2", "1"), ("n1", "-1")]):
            gang.until_sealed(number + 1, within_s=240.0)
            members = gang.plan_now
            (ends / "fresh").write_text(turn)
            (ends / "fresh").rename(ends / f"call.{node}")
            gang.workers[node].process.join(120)
            assert gang.workers[node].process.exitcode == -9, "no call was struck"
            gang.kill_worker(node)
            shrinks = turn == "-1"  # its lanes go to the others, whose nodes have no tape of them
            gang.plan(*(name for name in members if not (shrinks and name == node)))
            deaths += 1
        gang.until_sealed(5, within_s=240.0)
        gang.plan("n0", "n1", "n2")
        gang.until_sealed(6, within_s=240.0)
        strike(gang, "n1", "rollout", after_ms=30)
        gang.until_done(within_s=240.0)
        assert outcome(gang) == undisturbed
    made = [line.split() for line in calls.read_text().splitlines()]
    begun = Counter((name, turn) for what, name, turn in made if what == "asked")
    replied = Counter((name, turn) for what, name, turn in made if what == "replied")
    assert len({name for name, _ in begun}) == STEPS * 64
    again = {key: times for key, times in begun.items() if times > 1}
    assert set(again.values()) <= {2}
    moved = {"-1": 2 * 16}  # two lanes at most went to a node without a tape of them
    for turn in ("-1", "0", "1"):
        most = 2 * AT_ONCE + moved.get(turn, 0)  # under way when the call was struck, and when the rollout was
        assert sum(key[1] == turn for key in again) <= most, f"in turn {turn} more was asked again than nobody can know"
    assert deaths <= sum(begun.values()) - sum(replied.values()) <= (deaths + 1) * AT_ONCE
    assert len(re.findall(r"from step (\d+)\.(\d+) ", log.read_text())) == deaths + 3


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("engine", ["torch", "server", "team"])
def test_a_worker_that_dies_in_calls_of_an_evaluation_and_of_training_changes_nothing(
    tmp_path: Path, conf, engine: str
):
    """The server is ours and says the same again; it is started anew in the middle. Of the team its first member asks."""
    evaluate = {
        "every": 2,
        "at_start": True,
        "prompts": conf["data"]["path"],
        "limit": 8,
        "samples": 2,
        "threshold": 0.1,
    }
    ppo = {**conf["ppo"], "batch": 16, "mini_batch": 16, "epochs": 1}
    conf = {**conf, "ppo": ppo, "evaluate": evaluate, "telemetry": {"format": "json"}}
    found, asked = [], list[Counter[tuple[str, ...]]]()
    with serving("vllm", conf["model"]["path"], tmp_path) if engine == "server" else nullcontext() as fake:
        if fake:
            more = {"engine": engine, "server": {"url": fake.url}, "health_timeout": "60s", "start_timeout": "120s"}
            conf = {**conf, "rollout": {**conf["rollout"], **more}}
        if team := engine == "team":
            conf = {**conf, "model": {**conf["model"], "tp": 2}, "node": {"workers": 2}}
        for name, world in (("alone", 2 if team else 1), ("struck", 1 if fake else 2)):
            ends, calls, members = tmp_path / name / "ends", tmp_path / f"calls.{name}", [f"n{i}" for i in range(world)]
            asks = members[0] if team else members[-1]
            with Nodes(tmp_path / name, steps=2, lanes=4, program="ppo_ends", conf=conf, copies=world - 1) as gang:
                ends.mkdir()
                gang.env |= {"PPO_ENDS": str(ends), "TURNS_CALLS": str(calls)}
                for turn in ("0", "-1") if name == "struck" else ():  # in the evaluation, and later in training
                    (ends / f"call.{asks}").write_text(turn)
                    gang.plan(*members)
                    gang.workers[asks].process.join(400)
                    assert gang.workers[asks].process.exitcode == -9, "no call was struck"
                    gang.kill_worker(asks)
                    if fake:
                        fake.kill()
                        fake.start()
                gang.plan(*members)
                gang.until_done(within_s=500.0)
                kept, used = read(gang.run_dir), audit(gang.run_dir)
                assert not kept.findings, kept.findings
                assert used.ok, used.sentence
                told = [
                    each for log in gang.folder.glob("*.log") for each in events(log) if each["event"] == "ppo.evaluate"
                ]
                plain = {each["step"]: (each["metrics"], each["samples"]) for each in told}
                found.append((dict(kept.steps), plain))
            lines = map(str.split, calls.read_text().splitlines())
            asked.append(Counter((one, turn) for what, one, turn in lines if what == "asked"))
    assert found[0] == found[1]
    assert sorted(found[0][1]) == [0, 2]
    assert {"turns", "lost", "pass@2"} <= found[0][1][0][0].keys()
    trained = [times for (sample, _), times in asked[0].items() if not sample.startswith("evaluate/")]
    assert set(trained) == {1}, "one member of a team asks"
    assert max(asked[0].values()) == 2, "there were two evaluations"
    again = asked[1] - asked[0]
    assert not asked[0] - asked[1]
    assert 2 <= sum(again.values()) <= 2 * AT_ONCE, "more was asked again than was under way"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_calculator_is_learned_under_chaos(tmp_path: Path, conf):
    ppo = {**conf["ppo"], "batch": 128, "mini_batch": 32, "micro_tokens": 400, "gamma": 0.05, "clip_high": 0.5}
    ppo |= {"entropy_coef": 0.1, "kl": {"where": "off"}}
    environment = {**conf["environment"], "function": "elasticrl.ppo.tasks:Calculator"}
    conf = {**conf, "ppo": ppo, "environment": environment, "telemetry": {"format": "json"}}
    chance, steps = random.Random(11), 50
    with Nodes(tmp_path, steps=steps, lanes=4, program="elasticrl.ppo.__main__", conf=conf) as gang:
        gang.plan("n0", "n1", "n2")
        for number in range(2, steps - 5, 6):
            gang.until_sealed(number, within_s=240.0)
            time.sleep(chance.uniform(0.0, 1.0))
            node = chance.choice(["n1", "n2"])
            if chance.random() < 0.7:
                gang.kill_worker(node)
            else:
                gang.lose(node)  # with its vault and its tape
            gang.plan("n0", "n1", "n2")
        log = gang.workers["n0"].log
        gang.until_done(within_s=400.0)
        told = {event["step"]: event["metrics"] for event in events(log) if event["event"] == "ppo.step"}
        assert audit(gang.run_dir).ok
    assert len(told) == steps
    last = [told[step]["reward"] for step in range(steps - 3, steps)]
    assert sum(last) / 3 > 0.6, "without a call half of the reward is the most"
    assert told[steps - 1]["turns"] > 1.3
