"""Evaluations: held-out prompts are answered and scored, the same on any gang, and no bit of training depends on them."""

import random
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from elastic_kit import arm, ending, events, small, strike
from gang_kit import Nodes
from ppo_job import job

from elasticrl.config.training import Evaluate
from elasticrl.ppo import tiny
from elasticrl.ppo.evaluation import CUT, cut, pass_at
from elasticrl.ppo.handed import SCORES
from elasticrl.ppo.rewards import Function, Scored, Weighted
from elasticrl.ppo.staleness import Staleness
from elasticrl.runtime.checkpoint.place import place
from elasticrl.runtime.checkpoint.shelf import listing
from elasticrl.runtime.chronicle import read
from elasticrl.runtime.data.audit import audit

STEPS = 3
EVALUATE = {"every": 2, "at_start": True, "samples": 3, "threshold": 0.25, "shown": 2, "limit": 30}


def test_a_pass_at_k_is_the_share_of_all_choices_of_k_answers_with_one_that_passes():
    for n in range(1, 7):
        for right in range(n + 1):
            for k in range(1, n + 1):
                chosen = list(combinations([i < right for i in range(n)], k))
                assert pass_at(k, n, right) == pytest.approx(sum(map(any, chosen)) / len(chosen), abs=1e-12)


def test_what_is_shown_is_cut():
    assert cut("a" * CUT) == "a" * CUT
    assert len(cut("a" * 9999)) == CUT
    assert cut("a" * 9999).endswith("a...")
    assert cut("\ud800 é") == "? é", "half of a pair is no text to a file"


def made(path, asked: Evaluate | None, **more: Any):
    trainer, run = job(path, evaluate=asked, steps=3, **more)
    reports = [trainer.step(number) for number in range(3)]
    return run.digest(), [dict(each.metrics) for each in reports], [each.evaluated for each in reports]


@pytest.mark.parametrize(
    "more", [{}, pytest.param({"staleness": Staleness(steps=1)}, marks=pytest.mark.slow)], ids=["on time", "stale"]
)
def test_no_bit_of_training_depends_on_evaluations_nor_these_on_how_lanes_are_dealt(folders, more):
    asked = Evaluate(every=2, at_start=True, prompts="x", samples=3, temperature=1.0, limit=10, threshold=0.3, shown=2)
    without, found = made(folders["qwen2"], None, **more), made(folders["qwen2"], asked, **more)
    assert found[:2] == without[:2]
    assert without[2] == [(), (), ()]
    assert [each.step for its in found[2] for each in its] == [0, 2, 3], "the last weights are evaluated too"
    first, second, third = (each for its in found[2] for each in its)
    assert first.figures != second.figures != third.figures
    assert list(first.figures) == ["score", "score_std", "length", "ended", "pass@1", "pass@2", "pass@3"]
    assert first.figures["pass@1"] < first.figures["pass@2"] < first.figures["pass@3"]
    assert [len(sample.prompt) for sample in first.samples] == [3, 3]
    assert made(folders["qwen2"], asked, carried=((3, 1, 0, 2),), **more) == found


def test_a_scorer_is_asked_about_no_more_at_once_than_in_training_and_in_the_phase_that_scores_there(folders):
    asked, phases = list[tuple[int, str]](), [""]

    def scores(answers):
        asked.append((len(answers), phases[-1]))
        return [float(len(answer.response)) for answer in answers]

    held_out = Evaluate(every=1, prompts="x", samples=3, temperature=1.0, limit=10)  # a lane has 9 answers, or 6
    figures = []
    for scored in (4, 0):
        asked.clear()
        more = {"scorer": Function("long", scores), "scored": scored, "on_phase": phases.append}
        trainer, _ = job(folders["qwen2"], evaluate=held_out, steps=1, **more)
        figures.append([found.figures for found in trainer.step(0).evaluated])
        trained, its = asked[:4], asked[4:]
        assert {phase for _, phase in asked} == {"reward"}
        assert max(size for size, _ in its) == (scored or 9)
        assert sum(size for size, _ in its) == 30, trained
    assert figures[0] == figures[1]


def test_the_scores_of_an_evaluation_are_those_that_the_member_which_asks_was_told(folders, monkeypatch):
    """Another member of a team does not ask its own scorer, which may say something else."""
    held_out = Evaluate(every=1, prompts="x", samples=2, temperature=1.0, limit=10)
    scorer = Function("mine", lambda answers: [1.0] * len(answers))
    trainer, _ = job(folders["qwen2"], evaluate=held_out, steps=1, scorer=scorer)

    def told(_self, ask, kind):
        found = ask()
        return {k: Scored(scores=[-3.0] * len(its.scores)) for k, its in found.items()} if kind is SCORES else found

    monkeypatch.setattr(type(trainer.run), "ask_once", told)
    assert [found.figures["score"] for found in trainer.step(0).evaluated] == [-3.0]


def test_what_each_of_several_rewards_said_is_among_the_metrics_of_a_step_and_an_evaluation(folders):
    parts = {"right": Function.named("elasticrl.ppo.tasks:reverse"), "long": Function("long", lambda answers: [
        float(len(answer.response)) for answer in answers
    ])}  # fmt: skip
    asked = Evaluate(every=3, prompts="x", limit=8, shown=1)
    scorer = Weighted(parts=parts, weights={"right": 1.0, "long": -0.5})
    _, metrics, [*_, [found]] = made(folders["qwen2"], asked, scorer=scorer)
    for each in (*metrics, {"reward": found.figures["score"], **found.figures}):
        assert each["reward"] == pytest.approx(each["reward/right"] - 0.5 * each["reward/long"], abs=1e-6)
        assert each["reward/long_std"] > 0
    [sample] = found.samples
    assert sample.parts == {"right": sample.score + 0.5 * len(sample.answer), "long": len(sample.answer)}


def test_the_same_weights_answer_alike_whenever_they_are_asked(folders):
    trainer, run = job(folders["qwen2"], evaluate=Evaluate(every=1, prompts="x", samples=2, temperature=1.0, limit=6))
    found = []
    for step in (3, 8):
        run.begin(step)
        found.append(trainer.evaluation.after(step, trainer.scorer, trainer.roles.tokenizer, trainer.idle))
    assert [each.step for each in found] == [4, 9]
    assert (found[0].figures, found[0].samples) == (found[1].figures, found[1].samples)
    assert len({sample.answer for sample in found[0].samples}) > 1


def test_a_greedy_evaluation_of_fewer_prompts_than_lanes_asks_a_scorer_about_no_empty_lane(folders):
    sizes = []

    def scores(answers):
        sizes.append(len(answers))
        return [float(len(answer.response)) for answer in answers]

    asked = Evaluate(every=3, prompts="x", limit=3)
    *_, [_, _, [found]] = made(folders["qwen2"], asked, scorer=Function("scores", scores))
    assert sizes[-3:] == [1, 1, 1]
    assert found.figures["score"] == sum(len(sample.answer) for sample in found.samples) / 3


@pytest.fixture(scope="module")
def conf(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A short job with held-out prompts, one of which is too long."""
    folder, chance = tmp_path_factory.mktemp("model"), random.Random(8)
    lines = [f'{{"prompt": "{chance.randrange(10 ** chance.randrange(1, 5))}"}}' for _ in range(40)]
    lines[3:3] = ['{"prompt": "123456789"}']
    (folder / "held-out.jsonl").write_text("\n".join(lines))
    found = small(folder)
    evaluate = {**EVALUATE, "prompts": str(folder / "held-out.jsonl")}
    reward = {
        "parts": {"right": "elasticrl.ppo.tasks:reverse", "sorted": "elasticrl.ppo.tasks:sort"},
        "weights": {"sorted": "0.5"},
    }
    return {**found, "evaluate": evaluate, "reward": reward, "telemetry": {"format": "json"}}


def gang_of(folder: Path, conf: dict[str, Any], *, program: str = "elasticrl.ppo.__main__", **more: Any) -> Nodes:
    return Nodes(folder, steps=STEPS, lanes=4, program=program, conf=conf, **more)


def outcome(gang: Nodes) -> tuple[dict[int, str], list[dict[str, Any]]]:
    """The digests of all steps, and the evaluations that any worker told of."""
    found, used = read(gang.run_dir), audit(gang.run_dir)
    assert not found.findings, found.findings
    assert used.ok, used.sentence
    told = [event for log in gang.folder.glob("*.log") for event in events(log) if event["event"] == "ppo.evaluate"]
    plain = [{name: event[name] for name in ("step", "metrics", "samples")} for event in told]
    return dict(found.steps), sorted(plain, key=lambda event: event["step"])


@pytest.fixture(scope="module")
def alone(
    tmp_path_factory: pytest.TempPathFactory, conf: dict[str, Any]
) -> tuple[dict[int, str], list[dict[str, Any]]]:
    with gang_of(tmp_path_factory.mktemp("alone"), conf, copies=0) as gang:
        gang.plan("n0")
        log = gang.workers["n0"].log
        gang.until_done()
        assert "held-out.jsonl: 40 records fit; left out: 1 (of no tokens, or too many)" in log.read_text()
        [saved] = listing(place(str(gang.run_dir)))
        assert saved.manifest is not None
        found = outcome(gang)
        assert saved.manifest.score == found[1][-1]["metrics"]["score"], (
            "the checkpoint of the last step, which was evaluated"
        )
        return found


@pytest.mark.slow
def test_with_and_without_evaluations_a_job_trains_to_the_same_bits(tmp_path: Path, conf, alone):
    digests, told = alone
    assert [event["step"] for event in told] == [0, 2, 3]
    assert all(len(event["samples"]) == 2 for event in told)
    for each in (event["metrics"] for event in told):
        assert each["score"] == pytest.approx(each["reward/right"] + 0.5 * each["reward/sorted"])
    with gang_of(tmp_path, {**conf, "evaluate": {}}, copies=0) as gang:
        gang.plan("n0")
        gang.until_done()
        assert outcome(gang) == (digests, [])


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "world"), [("fsdp", 2), ("replicated", 2)])
def test_any_number_of_workers_evaluates_to_the_same_figures(tmp_path: Path, conf, alone, strategy: str, world: int):
    with gang_of(tmp_path, conf, strategy=strategy) as gang:
        gang.plan(*(f"n{i}" for i in range(world)))
        gang.until_done()
        assert outcome(gang) == alone


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("how", "strategy"), [("tp", "replicated"), ("cp", "replicated"), ("tp", "fsdp")])
def test_teams_evaluate_to_the_same_figures_for_any_number_of_them_and_train_to_the_same_bits(
    tmp_path: Path, conf, how: str, strategy: str
):
    words = (*tiny.WORDS, "<one>")  # an odd number: neither a team nor FSDP2 cuts it evenly
    model = {"path": tiny.write(tmp_path / "small", hidden=32, layers=1, words=words), how: 2, "strategy": "replicated"}
    ppo = {
        "algorithm": "grpo", "group": 4, "batch": 16, "mini_batch": 16, "micro_tokens": 80, "lr": 4e-3, "kl": {"where": "loss"},
    }  # fmt: skip
    conf = {**conf, "model": model, "ppo": ppo, "node": {"workers": 2}}
    found = []
    for name, teams, evaluate in (("one", 1, conf["evaluate"]), ("off", 1, {}), ("two", 2, conf["evaluate"])):
        if teams == 2:
            conf = {**conf, "model": {**model, "strategy": strategy}}  # the same bits
        with gang_of(tmp_path / name, {**conf, "evaluate": evaluate}, copies=teams) as gang:
            members = [f"n{i}" for i in range(2 * teams)]
            gang.plan(*members)
            if teams == 2:
                gang.until_new(1, within_s=240.0)
                gang.kill_worker("n2")
                gang.plan(*members)
            gang.until_done(within_s=240.0)
            found.append(outcome(gang))
    one, off, two = found
    assert two == one
    assert off == (one[0], [])
    assert [event["step"] for event in one[1]] == [0, 2, 3]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_beside_an_engine_of_its_own_it_evaluates_to_the_same_figures(tmp_path: Path, conf, alone):
    served = {"engine": "served", "health_timeout": "60s", "start_timeout": "120s"}
    with gang_of(tmp_path, {**conf, "rollout": {**conf["rollout"], **served}}) as gang:
        gang.plan("n0", "n1")
        gang.until_done(within_s=240.0)
        assert outcome(gang) == alone


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_beside_an_engine_that_generates_ahead_no_bit_of_training_depends_on_it(tmp_path: Path, conf):
    ahead = {"engine": "served", "health_timeout": "60s", "start_timeout": "120s", "staleness": 2}
    conf = {**conf, "ppo": {**conf["ppo"], "importance_limit": 2.0}, "rollout": {**conf["rollout"], **ahead}}
    found = []
    for name, evaluate in (("on", conf["evaluate"]), ("off", {})):
        with gang_of(tmp_path / name, {**conf, "evaluate": evaluate}) as gang:
            gang.plan("n0", "n1")
            gang.until_done(within_s=240.0)
            found.append(outcome(gang))
    assert found[0][0] == found[1][0]
    assert [event["step"] for event in found[0][1]] == [0, 2, 3]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_reward_model_in_shards_makes_as_many_passes_on_all_ranks_though_lanes_have_other_numbers_of_prompts(
    tmp_path: Path, conf
):
    judge = {"model": tiny.write(tmp_path / "judge", hidden=32, layers=1, seed=2, kind="reward")}
    conf = {**conf, "reward": {**conf["reward"], **judge}, "placement": {"reward": {"strategy": "fsdp"}}}
    conf["evaluate"] = {**conf["evaluate"], "limit": 9, "samples": 7, "threshold": 0.0}
    found = []
    for world in (1, 3):
        with gang_of(tmp_path / str(world), conf, strategy="fsdp", copies=min(1, world - 1)) as gang:
            gang.plan(*(f"n{i}" for i in range(world)))
            gang.until_done(within_s=240.0)
            found.append(outcome(gang))
    assert found[0] == found[1]
    assert all("reward/model" in each["metrics"] for each in found[0][1])


@pytest.mark.timeout(600)
def test_a_worker_that_dies_in_the_middle_of_evaluations_costs_no_bit_and_changes_no_figure(
    tmp_path: Path, conf, alone
):
    with gang_of(tmp_path, conf, program="ppo_ends") as gang:
        ending(gang)
        arm(gang, "n1", "evaluate", after_ms=1, entry=3)
        gang.plan("n0", "n1", "n2")
        strike(gang, "n1", "evaluate", after_ms=1, armed=True)  # before the first step, in the second pass
        assert gang.sealed() < 1
        gang.until_sealed(1, within_s=240.0)
        strike(gang, "n0", "evaluate", after_ms=500, stay=True)  # who tells of it, as the others have answered
        gang.until_done(within_s=240.0)
        assert outcome(gang) == alone
