"""DPO, KTO and SFT under the elastic runtime: the same bits for any gang, each record used once; what their data must be."""

import json
import random
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "runtime"))

from gang_kit import Nodes

from elasticrl.config.training import Data
from elasticrl.ppo import answers, models, tiny
from elasticrl.ppo.prompts import DataError
from elasticrl.runtime.checkpoint.load import open_checkpoint
from elasticrl.runtime.checkpoint.place import place
from elasticrl.runtime.chronicle import read
from elasticrl.runtime.data.audit import audit
from elasticrl.runtime.data.cursor import Cursor, Segment

STEPS = 4


@pytest.fixture(scope="module")
def conf(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("given")
    chance = random.Random(5)
    pairs, singles = [], []
    for number in range(400):
        prompt = f"{chance.randrange(1000):03}"
        pairs.append({"prompt": prompt, "chosen": prompt[::-1], "rejected": prompt[:1]})
        good = number % 2 == 0
        singles.append({"prompt": prompt, "completion": prompt[::-1] if good else prompt[:1], "label": good})
    for name, rows in (("dpo", pairs), ("kto", singles), ("sft", singles)):
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return {
        "ppo": {"batch": 32, "mini_batch": 16, "micro_tokens": 44, "epochs": 1, "lr": 3e-3},
        "model": {"path": tiny.write(folder / "actor", hidden=32, layers=1)},
        "rollout": {"max_tokens": 5},
        "data": {"path": str(folder), "max_prompt": 6},
    }


def nodes(folder: Path, conf: dict[str, Any], kind: dict[str, Any], world: int, strategy: str = "replicated") -> Nodes:
    path = f"{conf['data']['path']}/{kind['algorithm']}.jsonl"
    conf = {
        **conf, "ppo": {**conf["ppo"], **kind}, "data": {**conf["data"], "path": path},
        "model": {**conf["model"], "strategy": strategy},
    }  # fmt: skip
    return Nodes(folder, steps=STEPS, lanes=4, program="elasticrl.ppo.__main__", conf=conf, copies=min(1, world - 1))


def outcome(gang: Nodes, algorithm: str) -> tuple[dict[int, str], list[dict[str, Any]]]:
    """Digests, and what was told of the steps; every record of every step was used once."""
    found, used = read(gang.run_dir), audit(gang.run_dir)
    assert not found.findings, found.findings
    assert used.ok, used.sentence
    where = place(gang.run_dir)
    kept = open_checkpoint(where, where.names()[-1]).values
    cursor = Cursor(Segment.from_json(kept["data"]["segments"][-1]).walk)
    assert kept["buffer"]["head"]["recipe"] == cursor.recipe(), "rows are kept with what their step was made of"
    assert (used.steps, used.samples) == (STEPS, STEPS * 32 // answers.PER_RECORD[algorithm])
    notes = [json.loads(line) for line in (gang.folder / "history").read_text().splitlines()]
    told = ("step", "loss") if algorithm == "sft" else ("step", "preference_loss", "right")
    return dict(found.steps), [{name: note[name] for name in told} for note in notes]


KINDS = [
    ({"algorithm": "dpo"}, 2),
    ({"algorithm": "dpo", "preference_loss": "simpo", "preference_beta": 1.0}, None),
    ({"algorithm": "sft"}, None),
    ({"algorithm": "dpo", "preference_loss": "ipo"}, 2),
    ({"algorithm": "dpo", "preference_loss": "hinge"}, 2),
    ({"algorithm": "kto", "desirable_weight": 1.3}, 3),
    ({"algorithm": "sft", "loss_agg_mode": "seq-mean-token-mean"}, 2),
]


@pytest.mark.parametrize(
    ("kind", "sharded"),
    [pytest.param(*each, marks=[pytest.mark.slow] * (i > 2)) for i, each in enumerate(KINDS)],
    ids=["-".join(str(value) for value in kind.values()) for kind, _ in KINDS],
)
def test_given_answers_train_to_the_same_bits_for_any_gang(
    tmp_path: Path, conf, kind: dict[str, Any], sharded: int | None
):
    algorithm = kind["algorithm"]
    gangs = [(1, "replicated"), (3, "replicated"), *([(sharded, "fsdp")] if sharded else [])]
    results = []
    for number, (world, strategy) in enumerate(gangs):
        with nodes(tmp_path / str(number), conf, kind, world, strategy) as gang:
            gang.env["ELASTICRL_HISTORY"] = str(gang.folder / "history")
            gang.plan(*(f"n{i}" for i in range(world)))
            if (world, strategy) == (3, "replicated"):
                gang.until_sealed(1)
                gang.kill_worker("n1")
                gang.plan("n0", "n1", "n2")
            gang.until_done()
            results.append(outcome(gang, algorithm))
    assert all(result == results[0] for result in results[1:])
    losses = [step["loss" if algorithm == "sft" else "preference_loss"] for step in results[0][1]]
    assert all(0.0 < loss < (30.0 if kind.get("preference_loss") == "ipo" else 4.0) for loss in losses)


@pytest.mark.slow
@pytest.mark.parametrize(("algorithm", "how"), [("sft", "tp"), ("dpo", "cp")])
def test_a_team_learns_given_answers_as_one_worker_does_but_for_rounding(
    tmp_path: Path, conf, algorithm: str, how: str
):
    told = []
    for team, world in ((1, 1), (2, 2), (2, 4)):
        shares = {**conf, "model": {**conf["model"], how: team}, "node": {"workers": team}}
        with nodes(tmp_path / f"{team}-{world}", shares, {"algorithm": algorithm}, world) as gang:
            gang.env["ELASTICRL_HISTORY"] = str(gang.folder / "history")
            gang.plan(*(f"n{i}" for i in range(world)))
            gang.until_done()
            told.append(outcome(gang, algorithm))
    (alone, plain), one, two = told
    assert one == two, "of one team and of two"
    assert one[0] != alone, "sums of a team have another order"
    loss = "loss" if algorithm == "sft" else "preference_loss"
    assert [step[loss] for step in one[1]] == pytest.approx([step[loss] for step in plain], rel=1e-4)


def written(folder, *records):
    path = folder / "given.jsonl"
    path.write_text("\n".join(map(json.dumps, records)))
    return Data(path=str(path), max_prompt=5)


def test_records_become_answers_that_end(conf, tmp_path):
    tokenizer = models.tokenizer(conf["model"]["path"])
    pair = {"prompt": "12", "chosen": "21", "rejected": [{"role": "assistant", "content": "1"}]}
    long = {"prompt": "12", "chosen": "123456", "rejected": "1"}
    for _ in range(2):  # made, and then kept
        found = answers.load(
            written(tmp_path, pair, long), tokenizer, algorithm="dpo", answer_tokens=4, keep=tmp_path / "keep"
        )
        assert (len(found), found.left_out) == (1, 1)
        assert found[0] == answers.Answered(prompt=(12, 1, 2, 13), answers=((2, 1, 11), (1, 11)), good=(True, False))
    single = {"prompt": "12", "completion": "21", "label": 0}
    found = answers.load(written(tmp_path, single), tokenizer, algorithm="kto", answer_tokens=4, keep=tmp_path / "keep")
    assert (found[0].answers, found[0].good) == (((2, 1, 11),), (False,))
    found = answers.load(written(tmp_path, single), tokenizer, algorithm="sft", answer_tokens=4)
    assert (found[0].answers, found[0].good) == (((2, 1, 11),), (True,))


def test_answers_in_a_chat_end_as_a_turn_of_it_does_and_none_ends_twice(conf, tmp_path):
    tokenizer = models.tokenizer(conf["model"]["path"])
    tokenizer.chat_template = (  # a turn ends with <user>, as Gemma's with <end_of_turn>
        "{% for m in messages %}{{ m['content'] }}<user>{% endfor %}{% if add_generation_prompt %}<answer>{% endif %}"
    )
    asked = [{"role": "user", "content": "12"}]
    record = {"prompt": asked, "chosen": "21", "rejected": "1<eos>"}
    data, how = written(tmp_path, record, {**record, "prompt": "12"}), {"algorithm": "dpo", "answer_tokens": 4}
    found = answers.load(data, tokenizer, ends=(11, 12), **how)
    assert found[0] == answers.Answered(prompt=(1, 2, 12, 13), answers=((2, 1, 12), (1, 11)), good=(True, False))
    found = answers.load(data.model_copy(update={"chat_template": False}), tokenizer, ends=(11, 12), **how)
    assert [found[i].answers for i in (0, 1)] == [((2, 1, 12), (1, 11)), ((2, 1, 11), (1, 11))]


@pytest.mark.parametrize(
    ("record", "algorithm", "said"),
    [
        ({"prompt": "1", "chosen": "1"}, "dpo", "has no field 'rejected', only .*; set data.rejected to one"),
        ({"prompt": "1", "completion": "1", "label": "yes"}, "kto", "has the label 'yes'; it must be true or false"),
        ({"prompt": "1", "chosen": "1" * 9, "rejected": "1"}, "dpo", "1 were left out.*raise data.max_prompt"),
    ],
)
def test_data_that_cannot_serve_say_why(conf, tmp_path, record, algorithm, said):
    tokenizer = models.tokenizer(conf["model"]["path"])
    with pytest.raises(DataError, match=said):
        answers.load(written(tmp_path, record), tokenizer, algorithm=algorithm, answer_tokens=4)
