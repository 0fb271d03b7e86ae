"""PPO's kin under the elastic runtime: GRPO, adapters, rollouts beside the updates, and whether it learns through kills."""

import json
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "runtime"))

from elastic_kit import STEPS, ending, events, generated, nodes, outcome, small, strike
from gang_kit import Nodes

from elasticrl.runtime.chronicle import read
from elasticrl.runtime.data.audit import audit


@pytest.fixture(scope="module")
def conf(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return small(tmp_path_factory.mktemp("model"))


@pytest.mark.timeout(600)
def test_grpo_trains_to_the_same_bits_in_a_gang_and_through_kills_with_each_group_whole(tmp_path: Path, conf):
    ppo = {**conf["ppo"], "algorithm": "grpo", "group": 4, "kl": {"where": "loss", "coef": 0.01}}
    conf = {**conf, "ppo": ppo}
    with nodes(tmp_path / "alone", conf, copies=0) as gang:
        gang.plan("n0")
        gang.until_done()
        undisturbed = outcome(gang, group=4)
    with nodes(tmp_path / "killed", conf, program="ppo_ends") as gang:
        ending(gang, PPO_GENERATED=str(tmp_path / "generated"))
        gang.plan("n0", "n1", "n2")
        for number, (node, phase) in enumerate([("n1", "logprobs"), ("n0", "update"), ("n2", "update")]):
            gang.until_sealed(2 * number + 1, within_s=240.0)
            strike(gang, node, phase, after_ms=6)
        gang.until_done(within_s=240.0)
        assert outcome(gang, group=4) == undisturbed
    times = generated(tmp_path / "generated")
    assert set(times.values()) == {1}
    groups = Counter((step, name.partition(".")[0]) for step, name in times)
    assert (set(groups.values()), len(groups)) == ({4}, STEPS * 16)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("strategy", ["replicated", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_values_that_are_made_in_an_update_are_the_same_bits_in_a_gang_and_through_kills(
    tmp_path: Path, conf, strategy: str
):
    conf = {**conf, "ppo": {**conf["ppo"], "mini_batch": conf["ppo"]["batch"]}}
    with nodes(tmp_path / "alone", conf, copies=0) as gang:
        gang.plan("n0")
        gang.until_done()
        undisturbed = outcome(gang)
    with nodes(tmp_path / "killed", conf, strategy=strategy, program="ppo_ends") as gang:
        ending(gang)
        gang.plan("n0", "n1", "n2")
        for number, (node, after_ms) in enumerate([("n1", 6), ("n0", 40), ("n2", 90)]):
            gang.until_sealed(2 * number + 1, within_s=240.0)
            strike(gang, node, "update", after_ms=after_ms)
        gang.until_done(within_s=240.0)
        assert outcome(gang) == undisturbed


LEARNS = {
    "batch": 128, "mini_batch": 64, "micro_tokens": 160, "epochs": 2, "lr": 4e-3, "critic_lr": 4e-3, "gamma": 0.05,
    "clip_high": 0.5, "entropy_coef": 0.2, "kl": {"coef": 0.002},
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_ppo_learns_through_six_kills_what_it_learns_undisturbed(tmp_path: Path, conf):
    def learn(
        folder: Path, *present: str, steps: int = 80, kills: tuple[int, ...] = ()
    ) -> tuple[list[float], dict[int, str]]:
        copies = min(1, len(present) - 1)
        learns = {**conf, "ppo": LEARNS}
        with Nodes(folder, steps=steps, lanes=4, program="elasticrl.ppo.__main__", conf=learns, copies=copies) as gang:
            gang.env["ELASTICRL_HISTORY"] = str(folder / "history")
            gang.plan(*present)
            for number, step in enumerate(kills):
                gang.until_sealed(step)
                gang.kill_worker(present[number % len(present)])
                gang.plan(*present)
            gang.until_done(within_s=400.0)
            notes = [json.loads(line) for line in (folder / "history").read_text().splitlines()]
            assert sorted(note["step"] for note in notes) == list(range(steps)), "each step is told once"
            rewards = {note["step"]: note["reward"] for note in notes}
            assert audit(gang.run_dir).ok
            return [rewards[step] for step in range(steps)], dict(read(gang.run_dir).steps)

    undisturbed, bits = learn(tmp_path / "alone", "n0", "n1")
    assert sum(undisturbed[:10]) / 10 < 0.25, "it knew before"
    assert sum(undisturbed[-10:]) / 10 > 0.9
    # Half of it, with all kills in it: the same bits go on to the same end.
    rewards, same = learn(tmp_path / "killed", "n0", "n1", "n2", steps=40, kills=(4, 9, 14, 19, 24, 29))
    assert same == {step: bits[step] for step in range(41)}
    assert rewards == undisturbed[:40]


def test_adapters_train_to_the_same_bits_and_the_reference_costs_nothing(tmp_path_factory, conf):
    folder = tmp_path_factory.mktemp("gangs")  # a short path: an engine listens below it
    conf = {**conf, "model": {**conf["model"], "lora": {"rank": 2}}}
    digests = []
    for world, engine in ((1, "torch"), (2, "torch"), (2, "served")):
        conf = {**conf, "rollout": {**conf["rollout"], "engine": engine}}
        with nodes(folder / f"{world}-{engine}", conf, copies=world - 1) as gang:
            gang.env["ELASTICRL_HISTORY"] = str(gang.folder / "history")
            gang.plan(*(f"n{i}" for i in range(world)))
            gang.until_done()
            digests.append(outcome(gang))
            notes = [json.loads(line) for line in (gang.folder / "history").read_text().splitlines()]
            assert abs(notes[0]["kl"]) < 1e-6, "the reference is the actor without its adapters, which begin at 0"
            assert abs(notes[-1]["kl"]) > 1e-5
    assert len(set(map(str, digests))) == 1


@pytest.mark.parametrize("behind", [pytest.param(1, marks=pytest.mark.slow), 2])
@pytest.mark.timeout(600)
def test_stale_samples_train_to_the_same_bits_for_any_gang_and_through_kills(tmp_path_factory, conf, behind):
    folder = tmp_path_factory.mktemp("gangs")  # a short path: an engine listens below it
    digests = []
    for world, engine in ((1, "torch"), (2, "served")):
        conf = {
            **conf,
            "rollout": {**conf["rollout"], "staleness": behind, "engine": engine},
            "telemetry": {"format": "json"},
        }
        conf["ppo"] = {**conf["ppo"], "importance_limit": 2.0}
        with nodes(folder / f"{world}-{engine}", conf, copies=min(1, world - 1), program="ppo_ends") as gang:
            members = [f"n{i}" for i in range(world)]
            ending(gang)
            gang.plan(*members)
            log = gang.workers["n0"].log
            logs = [gang.workers[node].log for node in members]
            for number, phase in enumerate(["update", "rollout"] if members[-1] != "n0" else []):
                gang.until_sealed(2 + 2 * number, within_s=240.0)
                strike(gang, members[-1], phase, after_ms=6)
                logs.append(gang.workers[members[-1]].log)
            gang.until_done(within_s=240.0)
            digests.append(outcome(gang))
            told = [event for log in logs for event in events(log) if event["event"] == "ppo.step"]
            older = {event["step"]: event["metrics"].get("ahead_behind") for event in told}
            assert older == {0: None} | {step: 4.0 * ((step - 1) % behind + 1) for step in range(1, STEPS)}, (
                "a step's 4 updates, whoever died meanwhile"
            )
            if (
                engine == "served" and behind == 1
            ):  # it is busy with the weights that the step began with until all updates are made
                marks = [mark for _, mark in re.findall(r"from step (\d+)\.(\d+) ", log.read_text())]
                assert len(marks) == 3
                assert set(marks) <= {"0", "1", "2"}, (
                    "the rollout, and with its scores; nothing from between the updates"
                )
    assert all(each == digests[0] for each in digests)
