"""Several turns under the elastic runtime: the same bits for any gang and through kills; each reply is used once."""

import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import turns_kit
from elastic_kit import STEPS, nodes, outcome, strike


@pytest.fixture(scope="module")
def conf(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    found = turns_kit.small(tmp_path_factory.mktemp("model"))
    return {**found, "environment": {**found["environment"], "function": "turns_ends:Calculator"}}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, conf: dict[str, Any]) -> dict[int, str]:
    with nodes(tmp_path_factory.mktemp("alone"), conf, copies=0) as gang:
        gang.plan("n0")
        gang.until_done()
        return outcome(gang)


@pytest.mark.parametrize(
    ("strategy", "world"),
    [("replicated", 2), *(pytest.param(*one, marks=pytest.mark.slow) for one in (("replicated", 3), ("fsdp", 2)))],
)
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
        ends = tmp_path / "ends"
        ends.mkdir()
        gang.env |= {"PPO_ENDS": str(ends), "TURNS_CALLS": str(calls)}
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
            gang.plan(*members)
            deaths += 1
        gang.until_sealed(5, within_s=240.0)
        strike(gang, "n1", "rollout", after_ms=30)
        gang.until_done(within_s=240.0)
        assert outcome(gang) == undisturbed
    made = [line.split() for line in calls.read_text().splitlines()]
    begun = Counter((name, turn) for what, name, turn in made if what == "asked")
    replied = Counter((name, turn) for what, name, turn in made if what == "replied")
    assert len({name for name, _ in begun}) == STEPS * 64
    again = {key: times for key, times in begun.items() if times > 1}
    assert len(again) <= (deaths + 1) * 16, "more than what was under way in the workers that died was asked again"
    assert set(again.values()) <= {2}
    assert deaths <= sum(begun.values()) - sum(replied.values()) <= (deaths + 1) * 16
    assert len(re.findall(r"from step (\d+)\.(\d+) ", log.read_text())) == deaths + 2
