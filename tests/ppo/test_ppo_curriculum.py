"""A curriculum: levels that records name, mixed by step, with the same bits on any number of workers and through kills."""

import json
import random
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "runtime"))

from elastic_kit import ending, small, strike
from gang_kit import Nodes

from elasticrl.config.training import Curriculum, Data
from elasticrl.ppo import prompts, tiny
from elasticrl.ppo.records import DataError
from elasticrl.runtime.checkpoint import tree
from elasticrl.runtime.checkpoint.load import open_checkpoint
from elasticrl.runtime.checkpoint.place import place
from elasticrl.runtime.chronicle import read
from elasticrl.runtime.data.audit import examine
from elasticrl.runtime.data.cursor import Cursor, Segment

TOKENIZER = tiny.tokenizer()
STAGES = {"0": "easy 1, hard 0", "2": "easy 1, hard 3"}


def levelled(folder: Path, levels: list[Any], *, lines: str = "123", **more: Any) -> prompts.Prompts:
    path = folder / "a.jsonl"
    path.write_text("".join(json.dumps({"prompt": lines, "level": level}) + "\n" for level in levels))
    curriculum = Curriculum(field="level", stages=more.pop("stages", STAGES))
    return prompts.load(Data(path=str(path), curriculum=curriculum, **more), TOKENIZER, folder / "kept")


def test_records_of_a_level_follow_each_other_and_keep_their_places(tmp_path):
    found = levelled(tmp_path, ["hard", "easy", "hard", "easy", "easy"])
    assert (found.levels, [prompt.place for prompt in found]) == ((3, 2), [1, 3, 4, 0, 2])
    assert [prompt.record["level"] for prompt in found] == ["easy"] * 3 + ["hard"] * 2
    again = levelled(tmp_path, ["hard", "easy", "hard", "easy", "easy"])
    assert (again.levels, list(again), again.content) == (found.levels, list(found), found.content), "from what is kept"
    plain = prompts.load(Data(path=str(tmp_path / "a.jsonl")), TOKENIZER)
    assert (plain.levels, [prompt.place for prompt in plain]) == ((), [0, 1, 2, 3, 4])
    assert plain.content != found.content
    numbers = levelled(tmp_path, [2, 1, 1], stages={"0": "1 3, 2 1"})
    assert (numbers.levels, [prompt.place for prompt in numbers]) == ((2, 1), [1, 2, 0])


@pytest.mark.parametrize(
    ("levels", "sentence"),
    [
        (["easy", "odd"], r"record 1 of .* has the level 'odd' in the field 'level', and .* names easy, hard"),
        (["easy", None], "has the level None"),
        (["easy", True], "has the level True"),
        (["easy", ["hard"]], "has the level"),
        (["easy", "easy"], "has no record of the level 'hard' that fits"),
    ],
)
def test_a_record_without_a_level_and_a_level_without_a_record_are_refused(tmp_path, levels, sentence):
    with pytest.raises(DataError, match=sentence):
        levelled(tmp_path, levels)


STEPS, LANES = 5, 6


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("strategy", "worlds", "group"),
    [("replicated", (1, 3), 1), pytest.param("fsdp", (1, 2, 3), 8, marks=pytest.mark.slow)],
)
def test_a_curriculum_has_the_same_bits_and_prompts_on_any_number_of_workers_and_through_a_kill(
    tmp_path: Path, tmp_path_factory, strategy: str, worlds: tuple[int, ...], group: int
):
    conf = small(tmp_path_factory.mktemp("model"))
    chance, path = random.Random(3), Path(conf["data"]["path"])
    rows = [{"prompt": str(chance.randrange(100)), "level": chance.choice(["easy", "easy", "hard"])} for _ in range(40)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    ppo = {"batch": 24, "mini_batch": 12, "micro_tokens": 40, "epochs": 1, "lr": 4e-3, "kl": {"where": "off"}}
    if group > 1:
        ppo |= {"algorithm": "grpo", "group": group, "kl": {"where": "loss", "coef": 0.01}}
    data = {**conf["data"], "curriculum": {"field": "level", "stages": STAGES}}
    conf = {**conf, "ppo": ppo, "data": data, "model": {**conf["model"], "strategy": strategy}}
    found = []
    for world in worlds:
        members = [f"n{i}" for i in range(world)]
        how: dict[str, Any] = {"steps": STEPS, "lanes": LANES, "program": "ppo_ends", "conf": conf}
        with Nodes(tmp_path / str(world), copies=min(1, world - 1), **how) as gang:
            ending(gang)
            gang.plan(*members)
            if world > 1:
                gang.until_sealed(2)
                strike(gang, "n1", "update", after_ms=3)
            gang.until_done(within_s=240.0)
            steps, examined = read(gang.run_dir), examine(gang.run_dir)
            assert not steps.findings, steps.findings
            assert examined.audit.ok, examined.audit.sentence
            used = {step: sorted(sample for _, sample in uses) for step, uses in examined.used.items()}
            found.append((dict(steps.steps), used))
            where = place(gang.run_dir)
            kept = open_checkpoint(where, where.names()[-1]).values
            last = tree.join(kept["data"], {})["segments"][-1]
            cursor = Cursor(Segment.from_json(last).walk, group=group)
            assert kept["buffer"]["head"]["recipe"] == cursor.recipe(), "rows are kept with what their step was made of"
    assert all(one == found[0] for one in found)
    easy = sum(row["level"] == "easy" for row in rows)
    drawn = 24 // group
    mixed = {step: Counter(sample.index >= easy for sample in samples) for step, samples in found[0][1].items()}
    assert [mixed[step][False] for step in range(STEPS)][:2] == [drawn] * 2
    assert abs(sum(mixed[step][True] for step in range(2, STEPS)) - 3 * drawn * 3 / 4) <= 1
    assert group > 1 or max(sample.epoch for samples in found[0][1].values() for sample in samples) > 0
