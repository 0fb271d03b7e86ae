"""Prompts from files, and synthetic ones."""

import json
import multiprocessing
import os
import subprocess
import sys
import time
from datetime import UTC, datetime
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
from digits import Digits
from transformers.utils import chat_template_utils

from bench.fixed_run import InOrder
from chaos.patience import patience
from elasticrl.config.training import Data
from elasticrl.ppo import prompts, tiny, tokens
from elasticrl.ppo.records import DataError

TOKENIZER = tiny.tokenizer()


def write(path, *lines):
    path.write_text("".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines))
    return str(path)


def test_records_become_prompts_through_the_chat_template(tmp_path):
    chat = [{"role": "user", "content": "12"}]
    path = write(tmp_path / "a.jsonl", {"q": "123", "answer": 6}, "\n", {"q": chat, "answer": 3})
    found = prompts.load(Data(path=path, prompt="q"), TOKENIZER)
    assert [p.tokens for p in found] == [(12, 1, 2, 3, 13), (12, 1, 2, 13)]
    assert [p.text for p in found] == ["123", "12"]
    assert found[0].record["answer"] == 6
    plain = prompts.load(Data(path=write(tmp_path / "b.jsonl", {"prompt": "123"}), chat_template=False), TOKENIZER)
    assert plain[0].tokens == (1, 2, 3)


def test_too_long_prompts_are_left_out_and_counted_and_the_others_keep_their_places(tmp_path):
    path = write(tmp_path / "a.jsonl", {"prompt": "1"}, {"prompt": "123456"}, {"prompt": "2"})
    found = prompts.load(Data(path=path, max_prompt=4), TOKENIZER)
    assert ([p.place for p in found], found.left_out) == ([0, 2], 1)


def test_processes_make_of_a_file_what_the_worker_makes_of_it_itself(tmp_path):
    rows = [{"prompt": str(number) * (1 + number % 3)} for number in range(2 * tokens.CHUNK + 7)]
    path = write(tmp_path / "a.jsonl", *rows)
    alone, helped = (prompts.load(Data(path=path, max_prompt=6, workers=n, prefetch=1), TOKENIZER) for n in (0, 2))
    assert list(helped) == list(alone)
    assert helped.left_out == alone.left_out > 0
    with pytest.raises(DataError, match=r"record 519 of .* has no field 'prompt'"):
        prompts.load(Data(path=write(tmp_path / "b.jsonl", *rows, {"other": 1}), workers=1), TOKENIZER)


def hangs(_place, _record):
    time.sleep(600)


def test_a_process_that_hangs_is_given_up_and_ended_with_a_sentence(monkeypatch):
    monkeypatch.setattr(tokens, "PATIENCE_S", 1.0)
    before = set(multiprocessing.active_children())
    begun = time.monotonic()
    with pytest.raises(DataError, match=r"256 records were not tokenized within 1 s; set data.workers to 0"):
        list(tokens._rows(iter([[(0, {"prompt": "1"})]]), hangs, Data(workers=1)))
    assert time.monotonic() - begun < patience(60)
    deadline = time.monotonic() + patience(20)
    while (left := {*multiprocessing.active_children()} - before) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not left


class Counting:
    """A tokenizer that counts what it is asked for."""

    def __init__(self):
        self.asked = 0

    def __getattr__(self, name):
        return getattr(TOKENIZER, name)

    def apply_chat_template(self, *given, **options):
        self.asked += 1
        return TOKENIZER.apply_chat_template(*given, **options)


def seen(data, keep):
    """(the prompts, how many of them were tokenized for it)"""
    tokenizer = Counting()
    found = prompts.load(data, tokenizer, keep)
    return [*found, found.left_out], tokenizer.asked


def test_tokens_are_kept_until_anything_they_depend_on_changes(tmp_path):
    keep, path = tmp_path / "keep", tmp_path / "data" / "a.jsonl"
    path.parent.mkdir()
    write(path, {"prompt": "1", "answer": 1}, "\n", {"prompt": "123456"}, {"prompt": "2", "answer": 2})
    write(path.parent / "b.jsonl", {"prompt": "31"})
    data = Data(path=str(path.parent), max_prompt=4)
    alone, _ = seen(data, None)
    assert [p.record.get("answer") for p in alone[:-1]] == [1, 2, None]
    assert seen(data, keep) == (alone, 4)
    assert seen(data, keep) == (alone, 0)
    assert seen(data.model_copy(update={"max_prompt": 9}), keep)[1] == 4
    assert seen(data, keep) == (alone, 0)
    write(path.parent / "b.jsonl", {"prompt": "32"})
    assert seen(data, keep)[1] == 4
    assert len(list(keep.iterdir())) == tokens.TABLES


def test_a_kept_table_that_is_torn_is_made_anew_and_one_whose_bytes_flip_is_not_trained_on(tmp_path):
    keep, data = tmp_path / "keep", Data(path=write(tmp_path / "a.jsonl", *({"prompt": str(n)} for n in range(9))))
    alone, _ = seen(data, keep)
    (kept,) = keep.iterdir()
    with (kept / "tokens.npy").open("r+b") as file:
        file.truncate(140)
    assert seen(data, keep) == (alone, 9)
    with (kept / "tokens.npy").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x40")
    found = prompts.load(data, Counting(), keep)
    assert found[7] == alone[7]
    with pytest.raises(DataError, match=r"tokens of record 8 are not what was written.*remove that folder"):
        found[8]


def test_tokens_that_cannot_be_kept_are_used_all_the_same_and_that_is_said(tmp_path, capsys):
    data = Data(path=write(tmp_path / "a.jsonl", {"prompt": "1"}))
    (tmp_path / "keep").write_text("a file where the folder should be")
    assert seen(data, tmp_path / "keep")[1] == 1
    assert "a worker that is replaced makes them anew" in capsys.readouterr().out


def test_data_that_change_under_a_job_are_noticed_and_not_trained_on(tmp_path):
    path = tmp_path / "a.jsonl"
    write(path, {"prompt": "12"}, {"prompt": "34"})
    found = prompts.load(Data(path=str(path)), TOKENIZER, tmp_path / "keep")
    path.touch()
    assert found[1].text == "34"
    write(path, {"prompt": "12"}, {"prompt": "35"})
    assert found[0].text == "12"
    with pytest.raises(DataError, match=r"a\.jsonl is not what it was .*\(record 1\).* Put the file back"):
        found[1]
    path.unlink()
    with pytest.raises(DataError, match=r"record 0 cannot be read from"):
        found[0]


def test_data_are_known_again_by_what_is_in_them_wherever_they_lie(tmp_path):
    rows = [{"prompt": "12", "answer": 3}, {"prompt": "123456", "answer": 1}]

    def content(name, *rows, keep=None, **options):
        path = write(tmp_path / name, *rows)
        return prompts.load(Data(path=path, max_prompt=4, **options), TOKENIZER, keep).content

    first = content("a.jsonl", *rows)
    keep = tmp_path / "keep"
    assert {first} == {
        content("b.jsonl", *rows),
        content("c.jsonl", *rows, keep=keep),
        content("c.jsonl", *rows, keep=keep),
    }
    assert {first} == {
        content("d.jsonl", *({"answer": row["answer"], "prompt": row["prompt"]} for row in rows), workers=1)
    }
    others = [
        [{"prompt": "12", "answer": 4}, rows[1]],  # what the reward sees
        [rows[0], {"prompt": "123457", "answer": 1}],  # what is left out
        rows[::-1],
        rows[:1],
    ]
    assert (
        len({first, content("a.jsonl", *rows, chat_template=False), *(content("a.jsonl", *other) for other in others)})
        == 6
    )


def test_a_folder_is_read_in_the_order_of_its_names(tmp_path):
    write(tmp_path / "2.jsonl", {"prompt": "2"})
    write(tmp_path / "1.jsonl", {"prompt": "1"})
    assert [p.text for p in prompts.load(Data(path=str(tmp_path)), TOKENIZER)] == ["1", "2"]


def test_parquet_files_are_read_or_the_sentence_says_what_to_install(tmp_path):
    data = Data(path=str(tmp_path), format="parquet", prompt="q")
    if find_spec("pyarrow") is None:
        with pytest.raises(DataError, match=r"data\.format is parquet: pip install 'elasticrl\[data\]'"):
            prompts.load(data, TOKENIZER)
        return
    import pyarrow as pa
    from pyarrow import parquet

    chat = [[{"role": "user", "content": "3"}], [{"role": "user", "content": "45"}]]
    parquet.write_table(pa.table({"q": chat, "answer": [3, 9]}), tmp_path / "2.parquet", row_group_size=1)
    parquet.write_table(pa.table({"q": ["12", "9"], "answer": [3, 9]}), tmp_path / "1.parquet")
    found = prompts.load(data, TOKENIZER)
    assert [(p.place, p.text, p.record["answer"]) for p in found] == [
        (0, "12", 3),
        (1, "9", 9),
        (2, "3", 3),
        (3, "45", 9),
    ]
    assert found[3].tokens == (12, 4, 5, 13)
    parquet.write_table(pa.table({"q": ["12", "9"], "answer": [3, 8]}), tmp_path / "1.parquet")
    assert prompts.load(data, TOKENIZER).content != found.content
    with pytest.raises(DataError, match=r"record 0 of .* has no field 'p', only \['answer', 'q'\]"):
        prompts.load(data.model_copy(update={"prompt": "p"}), TOKENIZER)


LOADS = """
import sys
from elasticrl.config.training import Data
from elasticrl.ppo.records import DataError, records

try:
    found = records(Data(path=sys.argv[1], format="datasets", split="test"))
    for place, record in enumerate(found):
        assert found[place] == record
        print(record)
except DataError as error:
    print(error)
"""


def test_the_package_datasets_loads_a_folder_or_the_sentence_says_what_to_install(tmp_path):
    """In a process of its own, which keeps its cache here and may not go online."""
    folder = tmp_path / "digits"
    folder.mkdir()
    write(folder / "train.jsonl", {"prompt": "1", "answer": 1})
    write(folder / "test.jsonl", {"prompt": "2", "answer": 2}, {"prompt": "3", "answer": 3})
    alone = os.environ | {"HF_HOME": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", LOADS, str(folder)], env=alone, capture_output=True, text=True, timeout=120
    )
    expected = "datasets is not installed; data.format is datasets: pip install 'elasticrl[data]'"
    if find_spec("datasets") is not None:
        expected = "{'prompt': '2', 'answer': 2}\n{'prompt': '3', 'answer': 3}"
    assert done.stdout.strip() == expected, done.stderr


@pytest.mark.parametrize(
    ("lines", "data", "sentence"),
    [
        (['{"prompt": "1"}\n', "{nonsense\n"], {}, r"a.jsonl:2 is not JSON"),
        (["[1]\n"], {}, r"a.jsonl:1 is a list"),
        ([{"question": "1"}], {}, r"record 0 of .* has no field 'prompt', only \['question'\]"),
        ([{"prompt": "123456"}], {"max_prompt": 2}, r"no prompt of 1 to 2 tokens \(1 were left out\)"),
    ],
)
def test_a_file_that_cannot_be_used_says_where_and_why(tmp_path, lines, data, sentence):
    with pytest.raises(DataError, match=sentence):
        prompts.load(Data(path=write(tmp_path / "a.jsonl", *lines), **data), TOKENIZER)


def test_what_is_missing_is_named(tmp_path):
    with pytest.raises(DataError, match=r"does not exist; check data\.path"):
        prompts.load(Data(path=str(tmp_path / "none.jsonl")), TOKENIZER)
    with pytest.raises(DataError, match=r"data\.path is not set"):
        prompts.load(Data(), TOKENIZER)
    bare = tiny.tokenizer()
    bare.chat_template = None
    with pytest.raises(DataError, match=r"no chat template; set data\.chat_template to false"):
        prompts.load(Data(path=write(tmp_path / "a.jsonl", {"prompt": "1"})), bare)


def test_a_record_that_the_tokenizer_or_the_template_refuses_is_named(tmp_path):
    with pytest.raises(DataError, match=r"record 1 of .*None"):
        prompts.load(Data(path=write(tmp_path / "a.jsonl", {"prompt": "1"}, {"prompt": None})), TOKENIZER)
    picky = tiny.tokenizer()
    picky.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(DataError, match=r"record 0 of .*roles must alternate"):
        prompts.load(Data(path=write(tmp_path / "b.jsonl", {"prompt": "1"})), picky)


def test_a_chat_template_that_prints_the_day_makes_the_same_prompts_every_day(tmp_path, monkeypatch):
    dated = tiny.tokenizer()
    dated.chat_template = "{{ strftime_now('%d') }}{{ messages[0]['content'] }}"
    data = Data(path=write(tmp_path / "a.jsonl", {"prompt": "5"}))
    found = []
    for day in (3, 4):
        clock = SimpleNamespace(now=lambda day=day: datetime(2031, 1, day, tzinfo=UTC))
        monkeypatch.setattr(chat_template_utils, "datetime", clock)
        one = prompts.load(data, dated)
        found.append((one[0].tokens, one.content))
    assert found[0] == found[1]
    assert found[0][0] == (0, 1, 5)


def test_a_synthetic_prompt_is_a_function_of_its_place():
    a, b = Digits(TOKENIZER, 4), Digits(TOKENIZER, 4)
    assert [a[i] for i in range(50)] == [b[i] for i in range(50)]
    assert len({a[i].text for i in range(50)}) > 45
    assert all(len(a[i].tokens) == 6 for i in range(50))


@pytest.mark.parametrize("shuffle", [False, True])
def test_in_order_gives_every_prompt_once_an_epoch_whatever_lane_asks_first(shuffle):
    data = Digits(TOKENIZER, 4, size=24)
    feed = InOrder(data, per_lane=3, lanes=4, seed=1, shuffle=shuffle)
    epoch = [name for step in range(2) for lane in range(4) for name, _ in feed(step, lane)]
    assert sorted(epoch) == sorted(f"0/{i}" for i in range(24))
    again = InOrder(data, per_lane=3, lanes=4, seed=1, shuffle=shuffle)
    assert [name for lane in (3, 1) for name, _ in again(3, lane)] == [
        name for lane in (3, 1) for name, _ in feed(3, lane)
    ]
    assert {name.split("/")[0] for name, _ in feed(2, 0)} == {"1"}
