"""Evaluations of what has several turns: scored as in training, beside it, and each reply is asked for once."""

from collections import Counter
from dataclasses import replace
from typing import ClassVar

import pytest
from turns_kit import PATIENCE, WORDS, learns, turned

from elasticrl.config.training import Evaluate
from elasticrl.ppo import tiny
from elasticrl.ppo.environments import EnvironmentFault, Message, Reply, Task, Trouble
from elasticrl.ppo.evaluation import pass_at
from elasticrl.ppo.rewards import Function
from elasticrl.ppo.rollout.tape import Tape

ASKED = Evaluate(every=1, at_start=True, prompts="x", samples=3, temperature=1.0, limit=7, threshold=1.0, shown=2)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny.write(tmp_path_factory.mktemp("model"), hidden=32, layers=2, words=WORDS)


class Likes:
    """Gives 1 for a message that begins with an even digit, and asks for a second one."""

    asked: ClassVar = Counter()  # how often each call was made
    ends: ClassVar = dict[str, BaseException]()  # by sample: what its next message raises

    def reset(self, task: Task) -> str:
        self.name = task.id
        Likes.asked[self.name, -1] += 1
        return "="

    def step(self, message: Message) -> Reply:
        Likes.asked[self.name, message.turn] += 1
        if self.name in Likes.ends:
            raise Likes.ends[self.name]
        return Reply(observation="*", reward=float(message.text[:1] in (*"02468",)), done=message.turn == 1)

    def save(self) -> str:
        return self.name

    def load(self, state: str) -> None:
        self.name = state


@pytest.fixture(autouse=True)
def fresh():
    Likes.asked.clear()
    Likes.ends.clear()


def few(path, evaluate=ASKED, **more):
    ppo = learns(batch=16, mini_batch=16, epochs=1)
    return turned(path, ppo=ppo, environment=f"{__name__}:Likes", evaluate=evaluate, **more)


def made(path, evaluate, **more):
    trainer, run = few(path, evaluate, steps=2, **more)
    reports = [trainer.step(number) for number in range(2)]
    return run.digest(), [found for report in reports for found in report.evaluated]


def evaluated(trainer, run, step=0):
    run.begin(step)
    return trainer.evaluation.after(step, trainer.scorer, trainer.roles.tokenizer, trainer.idle)


def test_no_bit_of_training_depends_on_it_nor_it_on_how_lanes_are_dealt(path):
    without, _ = made(path, None)
    digest, found = made(path, ASKED)
    assert digest == without
    assert [each.step for each in found] == [0, 1, 2]
    first, *_, last = (each.figures for each in found)
    names = ["score", "score_std", "length", "ended", "pass@1", "pass@2", "pass@3", "turns", "lost", "troubles"]
    assert list(first) == names
    assert first != last
    assert 0 < first["score"] < 2
    assert 1 < first["turns"] <= 2
    assert first["lost"] == first["troubles"] == 0
    assert all(sample.answer.startswith("=") for sample in found[0].samples), "what the environment said is shown too"
    assert made(path, ASKED, carried=((1, 0),)) == (digest, found)


def test_the_same_weights_play_alike_whenever_they_are_asked_and_a_prompts_samples_have_one_task(path):
    trainer, run = few(path)
    seeds = {}
    reset = Likes.reset

    def told(self, task):
        seeds[task.id] = task.seed
        return reset(self, task)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Likes, "reset", told)
        found = [evaluated(trainer, run, step) for step in (3, 8)]
    assert found[0].figures == found[1].figures
    assert found[0].samples == found[1].samples
    assert set(Likes.asked.values()) == {2}
    assert len(seeds) == 7 * 3
    assert {seeds[f"evaluate/{n}.{i}"] for n in range(7) for i in range(3)} == {
        seeds[f"evaluate/{n}.0"] for n in range(7)
    }
    assert len(set(seeds.values())) == 7


def test_an_evaluation_that_was_cut_short_goes_on_with_the_replies_on_its_tape(path, tmp_path):
    whole = evaluated(*few(path))
    calls = Counter(Likes.asked)
    Likes.asked.clear()
    trainer, run = few(path, held_out=Tape(tmp_path))
    Likes.ends["evaluate/2.1"] = KeyError("the worker dies")
    with pytest.raises(EnvironmentFault):
        evaluated(trainer, run)
    assert 0 < sum(Likes.asked.values()) < sum(calls.values())
    Likes.ends.clear()
    assert evaluated(*few(path, held_out=Tape(tmp_path))) == whole, "in the process that takes its place"
    again = Likes.asked - calls
    assert again["evaluate/2.1", 0] == 1
    assert sum(again.values()) <= PATIENCE.at_once, "a reply was asked for that was on the tape"


def test_what_trouble_has_cost_is_in_no_figure_but_its_own(path):
    trainer, run = few(path, patience=replace(PATIENCE, retries=0))
    rows, spread = [], trainer.evaluation._tally

    def told(its, answers, scored):
        rows.extend(zip((answer.id for answer in answers), its, strict=True))
        return spread(its, answers, scored)

    trainer.evaluation._tally = told
    lost = ["evaluate/0.1", *(f"evaluate/4.{i}" for i in range(3))]
    Likes.ends |= dict.fromkeys(lost, Trouble("down"))
    figures = evaluated(trainer, run).figures
    assert figures["lost"] == figures["troubles"] == 4
    scores = {name: float(row["earned"].sum()) for name, row in rows if name not in lost}
    assert len(scores) == 17
    assert figures["score"] == pytest.approx(sum(scores.values()) / 17)
    by_prompt = [
        [scores[f"evaluate/{n}.{i}"] >= 1 for i in range(3) if f"evaluate/{n}.{i}" in scores] for n in range(7)
    ]
    for k in (1, 2, 3):
        enough = [its for its in by_prompt if len(its) >= k]
        assert len(enough) == (6, 6, 5)[k - 1]
        assert figures[f"pass@{k}"] == pytest.approx(
            sum(pass_at(k, len(its), sum(its)) for its in enough) / len(enough)
        )


def test_what_may_be_lost_is_a_share_of_all_that_is_held_out_and_not_of_a_part(path):
    trainer, run = few(path, patience=replace(PATIENCE, retries=0, may_lose=0.25))
    lane = trainer.evaluation.lanes - 1
    last = max(n for n in range(7) if n % trainer.evaluation.lanes == lane)  # which are few in a part of their own
    lost = [f"evaluate/{n}.{i}" for n in (last, 6) for i in (1, 2)]
    Likes.ends |= dict.fromkeys(lost, Trouble("down"))
    assert evaluated(trainer, run).figures["lost"] == len(set(lost))


def test_an_outage_is_no_evaluation(path):
    trainer, run = few(path, patience=replace(PATIENCE, retries=0, may_lose=0.1))
    Likes.ends |= {f"evaluate/{n}.{i}": Trouble("down") for n in range(7) for i in range(3)}
    with pytest.raises(EnvironmentFault, match="of an evaluation"):
        evaluated(trainer, run)


def test_a_scorer_beside_the_environment_adds_to_it(path):
    alone = evaluated(*few(path)).figures
    scorer = Function("ten", lambda answers: [10.0] * len(answers))
    both = evaluated(*few(path, scorer=scorer)).figures
    assert both["score"] == pytest.approx(alone["score"] + 10.0)
