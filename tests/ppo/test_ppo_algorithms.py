"""Each algorithm of docs/ALGORITHMS.md on real processes: the same bits alone, and in a gang of which a worker is killed."""

import re
import sys
import time
from math import isfinite
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "runtime"))

from elastic_kit import arm, ending, events, small, strike
from gang_kit import Nodes

from chaos.patience import patience
from elasticrl.config import dumps
from elasticrl.contract.beats import Stage
from elasticrl.runtime.chronicle import read
from elasticrl.runtime.data.audit import audit

STEPS, BATCH = 3, 32

# Together they have every advantage, policy loss, aggregation, estimator and bound that a plain PPO or GRPO has not.
KINDS: dict[str, dict[str, Any]] = {
    "Dr.GRPO": {
        "algorithm": "grpo", "group": 4, "scale_rewards": "none", "loss_agg_mode": "seq-mean-token-sum-norm",
        "kl": {"where": "off"},
    },
    "DAPO": {
        "algorithm": "grpo", "group": 4, "clip_high": 0.28, "overlong_buffer": 2, "kl": {"where": "off"},
        "scale_rewards": "batch", "filter_groups": True, "gen_batch": 2 * BATCH, "mask_truncated": True,
    },
    "RLOO with GSPO": {
        "algorithm": "rloo", "group": 4, "loss_mode": "gspo", "loss_agg_mode": "seq-mean-token-mean", "clip_low": 0.01,
        "kl": {"where": "reward", "estimator": "k2", "coef": 0.01},
    },
    "OPO with GMPO": {
        "algorithm": "opo", "group": 4, "loss_mode": "geo_mean", "loss_agg_mode": "seq-mean-token-mean", "clip_low": 0.01,
        "kl": {"where": "off"},
    },
    "REINFORCE++ with CISPO": {
        "algorithm": "reinforce_plus_plus", "loss_mode": "cispo", "loss_agg_mode": "seq-mean-token-sum",
        "kl": {"where": "reward", "coef": 0.01},
    },
    "REINFORCE++ with a baseline and SAPO": {
        "algorithm": "reinforce_plus_plus_baseline", "group": 4, "loss_mode": "sapo",
        "kl": {"where": "loss", "estimator": "k1+", "coef": 0.01},
    },
    "GRPO with IcePop, a dual clip and k2": {
        "algorithm": "grpo", "group": 4, "dual_clip": 3.0, "importance_mode": "token_mask", "importance_floor": 0.5,
        "importance_limit": 5.0, "kl": {"where": "loss", "estimator": "k2", "coef": 0.01},
    },
    "GRPO with masked answers, a bonus and k3+": {
        "algorithm": "grpo", "group": 4, "importance_mode": "sequence_mask", "importance_floor": 0.5,
        "importance_limit": 3.0, "entropy_coef": 0.01, "kl": {"where": "loss", "estimator": "k3+", "coef": 0.01},
    },
}  # fmt: skip
# The others have a loss or an advantage of each kind.
SELDOM = (
    "RLOO with GSPO", "OPO with GMPO", "REINFORCE++ with CISPO", "GRPO with IcePop, a dual clip and k2",
    "GRPO with masked answers, a bonus and k3+",
)  # fmt: skip


@pytest.fixture(scope="module")
def conf(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    conf = small(tmp_path_factory.mktemp("model"))
    ppo = {"batch": BATCH, "mini_batch": 16, "micro_tokens": 40, "epochs": 1, "lr": 4e-3}
    return {**conf, "ppo": ppo}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SELDOM)) for name in KINDS])
def test_an_algorithm_has_the_same_bits_alone_and_through_a_kill(tmp_path: Path, conf, name: str):
    conf = {**conf, "ppo": {**conf["ppo"], **KINDS[name]}}
    found = []
    for members in (("n0",), ("n0", "n1", "n2")):
        how: dict[str, Any] = {"steps": STEPS, "lanes": 4, "program": "ppo_ends", "conf": conf}
        with Nodes(tmp_path / str(len(members)), copies=min(1, len(members) - 1), **how) as gang:
            ending(gang)
            gang.plan(*members)
            if members[1:]:
                gang.until_sealed(1)
                strike(gang, "n1", "update", after_ms=3)
            gang.until_done()
            found.append(outcome(gang, conf["ppo"].get("group", 1), conf["ppo"].get("gen_batch", BATCH)))
            drawn, trained = (conf["ppo"].get(name, BATCH) // 4 for name in ("gen_batch", "batch"))
            filtered = audit(gang.run_dir).filtered
            assert filtered >= STEPS * (drawn - trained), "each prompt is used or filtered, once"
    assert found[0] == found[1]
    assert len(set(found[0].values())) == STEPS + 1, "each step has trained"


@pytest.mark.timeout(300)
def test_an_update_of_which_one_lane_is_not_finite_or_a_spike_is_skipped_by_all_workers_and_the_ledger_says_so(
    tmp_path: Path, conf
):
    guard = {"does": "skip", "sigma": 1000.0, "window": 4}
    conf = {**conf, "ppo": {**conf["ppo"], "not_finite": "skip", "spike": guard}, "telemetry": {"format": "json"}}
    found = []
    for world, strategy in ((1, "replicated"), (3, "replicated"), (2, "fsdp")):
        members = [f"n{i}" for i in range(world)]
        it = {**conf, "model": {**conf["model"], "strategy": strategy}}
        how: dict[str, Any] = {"steps": STEPS, "lanes": 4, "program": "ppo_ends", "conf": it}
        with Nodes(tmp_path / f"{world}-{strategy}", copies=min(1, world - 1), **how) as gang:
            ending(gang, PPO_FACTORS="[[1, 0, 2, NaN], [2, 0, 1, 1e6]]")
            gang.plan(*members)
            log = gang.workers["n0"].log
            if world == 3:
                gang.until_sealed(2)
                strike(gang, "n1", "update", after_ms=3)
            gang.until_done()
            [jump] = [event for event in events(log) if event["event"] == "ppo.spike"]
            found.append((outcome(gang, 1), {name: jump[name] for name in ("name", "value", "usual", "spread")}))
            used = audit(gang.run_dir)
            assert (used.skipped, used.spikes) == (32, 16), "the samples of two updates"
            told = [event["metrics"] for event in events(log) if event["event"] == "ppo.step"]
            assert [metrics.get("skipped") for metrics in told] == [None, 1.0, 1.0]
            assert [metrics.get("spikes") for metrics in told] == [None, None, 1.0]
            assert all(isfinite(value) for metrics in told for value in metrics.values())
            assert (jump["step"], jump["update"], jump["name"], jump["skipped"]) == (2, 0, "actor_norm", True)
            assert jump["value"] > 1000 * jump["usual"]
            assert "update 0 of step 1 is skipped on all ranks" in log.read_text()
            assert (
                "update 0 of step 2 is skipped on all ranks, and its samples count as used: actor_norm is"
                in log.read_text()
            )
    assert found[0] == found[1] == found[2], "the same bits, and judged by the same past"


# Two steps one after another have a spike. The second one is far larger, as the first one is a part of the past by then.
IN_A_ROW = "[[1, 1, 2, 1e6], [2, 0, 1, 1e12]]"


@pytest.mark.timeout(300)
def test_spikes_in_a_row_end_the_job_for_all_workers_also_if_one_was_killed_between_them(tmp_path: Path, conf):
    guard = {"does": "skip", "sigma": 1000.0, "window": 4, "in_a_row": 2}
    conf = {**conf, "ppo": {**conf["ppo"], "spike": guard}, "telemetry": {"format": "json"}}
    found = []
    for world, killed in ((1, False), (2, False), (2, True)):
        members = [f"n{i}" for i in range(world)]
        how: dict[str, Any] = {"steps": STEPS, "lanes": 4, "program": "ppo_ends", "conf": conf}
        with Nodes(tmp_path / f"{world}-{killed}", copies=world - 1, **how) as gang:
            ending(gang, PPO_FACTORS=IN_A_ROW)
            if killed:  # in the step after the one whose spike was left out
                arm(gang, "n1", "update", after_ms=3, stay=True, entry=3)
            gang.plan(*members)
            if killed:
                strike(gang, "n1", "update", after_ms=3, armed=True)
            sentence = ended(gang)
            assert sentence.startswith("Update 0 of step 2 is a spike: actor_norm is ")
            assert "So were all before it in 2 steps one after another" in sentence
            assert "Go on from an older checkpoint" in sentence
            logs = [log.read_text() for log in sorted(gang.folder.glob("n*.log"))]
            assert sum("update 1 of step 1 is skipped on all ranks" in text for text in logs) == world
            assert not any("step 2 is skipped" in text for text in logs), "what ends the job is not left out"
            told, used = read(gang.run_dir), audit(gang.run_dir)
            assert not told.findings, told.findings
            assert used.ok, used.sentence
            assert (used.steps, used.skipped, used.spikes) == (2, 16, 16), "of the update that was left out"
            found.append((dict(told.steps), sentence))
    assert max(found[0][0]) == 2, "the state before the update that ended the job"
    assert found[0] == found[1] == found[2], "the same bits, and judged by the same past"


@pytest.mark.timeout(300)
def test_a_job_that_a_spike_stops_meets_it_again_and_goes_on_without_it_once_that_is_asked_for(tmp_path: Path, conf):
    found = []
    for world, lives in ((1, 1), (2, 2)):
        members = [f"n{i}" for i in range(world)]
        guard = {"does": "stop", "sigma": 1000.0, "window": 4}
        its = {**conf, "ppo": {**conf["ppo"], "spike": guard}, "telemetry": {"format": "json"}}
        how: dict[str, Any] = {"steps": STEPS, "lanes": 4, "program": "ppo_ends", "conf": its}
        with Nodes(tmp_path / str(world), copies=world - 1, **how) as gang:
            ending(gang, PPO_FACTORS="[[1, 1, 2, 1e6]]")
            said = []
            for _ in range(lives):
                gang.plan(*members)
                said.append(ended(gang))
                for node in members:
                    gang.kill_worker(node)
            assert len(set(said)) == 1, "judged by the same past"
            assert "is a spike, and is applied" not in "".join(log.read_text() for log in gang.folder.glob("n*.log"))
            ppo = gang.tree.ppo
            skips = ppo.model_copy(update={"spike": ppo.spike.model_copy(update={"does": "skip"})})
            (gang.folder / "config.json").write_text(dumps(gang.tree.model_copy(update={"ppo": skips})))
            gang.plan(*members)
            gang.until_done()
            found.append((outcome(gang, 1), said[0]))
            used = audit(gang.run_dir)
            assert (used.skipped, used.spikes) == (16, 16), "of one update"
    assert found[0] == found[1]
    assert found[0][1].startswith("Update 1 of step 1 is a spike: actor_norm is ")
    assert "Nothing of it was applied, and the state before it is kept" in found[0][1]


def ended(gang: Nodes) -> str:
    """What all workers say of the spike that has ended them."""
    said = set()
    for node in gang.plan_now:
        worker, limit = gang.workers[node], time.monotonic() + patience(60)
        while worker.process.exitcode is None and worker.beat.state is not Stage.DONE and time.monotonic() < limit:
            time.sleep(0.01)
        assert worker.process.exitcode == 1, worker.text[-3000:]
        said |= set(re.findall(r"Spiked: ([^\n]*)", worker.text))
    [sentence] = said
    return sentence


def outcome(gang: Nodes, group: int, drawn: int = BATCH) -> dict[int, str]:
    told, used = read(gang.run_dir), audit(gang.run_dir)
    assert not told.findings, told.findings
    assert used.ok, used.sentence
    assert (used.steps, used.samples) == (STEPS, STEPS * drawn // group)
    return dict(told.steps)
