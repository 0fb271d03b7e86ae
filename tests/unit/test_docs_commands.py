"""Every command that README and docs show is one: its program takes it, and the cheap ones are run.

How pages are read is in docs_kit. Configuration keys and files are looked up too.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from docs_kit import PAGES, ROOT, Line, Misread, hidden, lines, read

from elasticrl.config.section import leaves, sections
from elasticrl.config.tree import Tree
from elasticrl.telemetry.events import BY_NAME

LINES = [line for page in PAGES for line in lines(page)]
#: What costs nothing and changes nothing, so it is run as it stands, at the top of the repository.
CHEAP = (["version"], ["config", "check"], ["config", "show"], ["config", "schema"])
HOMES = {"docs/EVENTS.md", "docs/METRICS.md", "docs/CONFIGURATION.md"}  # generated, with tests of their own


def understood(line: Line) -> list[list[str]]:
    """The elasticrl commands in a line, where it can be read at all."""
    try:
        return read(line)
    except Misread:
        return []


EXACT = [words for line in LINES if not line.loose for words in understood(line)]


def test_every_command_on_every_page_is_one_that_its_program_takes() -> None:
    wrong = []
    for line in LINES:
        try:
            read(line)
        except Misread as error:
            wrong.append(f"{line.place}: {line.text}\n    {error}")
    assert not wrong, "\n".join(wrong)
    assert sum(not line.loose for line in LINES) >= 35
    assert sum(line.loose for line in LINES) >= 200


def test_no_block_hides_commands() -> None:
    wrong = [what for page in PAGES for what in hidden(page)]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("elasticrl statsu", "no verb"),
        ("elasticrl status --wacth", "No such option"),
        ("elasticrl checkpoint lsit", "checkpoint has no"),
        ("elasticrl config check configs/none.yaml", "there is no configs/none.yaml"),
        ("elasticrl drain n1 n2", "too many"),
        ("python -m chaos.run liev", "invalid choice"),
        ("python -m chaos.run live --sed 7", "unrecognized"),
        ("python -m chaos.run live chaos/scenarios/none.yaml", "there is no chaos/scenarios/none.yaml"),
        ("python bench/none.py", "there is no bench/none.py"),
        ("python bench/recovery.py --trails 3", "unrecognized"),
        ("python bench/recovery.py --trials many", "invalid int"),
        ("make tset", "no target"),
        ("make race FRO=60", "nothing reads FRO"),
        ("torchrun --nnode-s=2 train.py", "required|unrecognized"),
        ("pip install '.[trian]'", "no extra"),
        ("systemctl start elasticlr", "no unit"),
        ("docker exec n00 elasticrl drian", "no verb"),
        ("cd /tmp && frobnicate it", "nobody here knows the program"),
        ("elasticrl status 'open", "No closing quotation"),
    ],
)
def test_a_line_that_is_no_command_is_told(text: str, why: str) -> None:
    with pytest.raises(Misread, match=why):
        read(Line("here:1", text, loose=False))


def test_a_block_without_a_word_an_indented_one_and_a_command_in_text_are_told(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "```\nelasticrl status\n```\n\n    make run\n\n- an item\n\n    of a list\n\n      make run\n\n"
        "```text\n$ elasticrl status\n```\n"
    )
    assert [what.split(":")[1] for what in hidden(page)] == ["1", "5", "11", "14"]


@pytest.mark.parametrize(
    "words", [words for words in EXACT if any(words[: len(cheap)] == cheap for cheap in CHEAP)], ids=" ".join
)
def test_the_cheap_ones_do_what_they_say(words: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "elasticrl.cli.main", *words], cwd=ROOT, capture_output=True, text=True, timeout=120,
        env={name: value for name, value in os.environ.items() if not name.startswith("ELASTICRL")},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


def test_plan_shows_what_the_quick_start_says_it_does(tmp_path: Path) -> None:
    (planned,) = [words for words in EXACT if words[0] == "plan"]
    shape = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 512,
    }
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **shape}))
    # The sample's lie on a disk that is not here.
    models = [f"{key}={tmp_path}" for key in ("model.path", "model.critic_path", "reward.model")]
    command = [sys.executable, "-m", "elasticrl.cli.main", *planned, *models]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(word in done.stdout for word in ("memory that stays", "bytes that it sends", "phase budgets"))


def test_every_key_that_is_mentioned_exists() -> None:
    keys = set(leaves(Tree)) | {key for key, _ in sections(Tree)}
    tops = {key.split(".")[0] for key in keys if key}
    wrong = []
    for page in PAGES:
        if str(page.relative_to(ROOT)) in HOMES:
            continue
        for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
            for text in re.findall(r"`([a-z]+(?:\.[a-z_]+)+)(?::[^`]*)?`", line):
                top = text.split(".")[0]
                if top in tops and text not in keys and not text.endswith((".py", ".md", ".yaml")):
                    wrong.append(f"{page.name}:{number}: {text}")
    known = {*BY_NAME, "data.train_batch_size", "rollout.n"}  # events; and what others call their keys
    wrong = [text for text in wrong if text.split(": ")[1] not in known and not module(text.split(": ")[1])]
    assert not wrong, "\n".join(wrong)


def module(text: str) -> bool:
    """Is it a module of ours, or something in one?"""
    parts = text.split(".")
    places = [ROOT / "elasticrl" / Path(*parts[:n]) for n in range(2, len(parts) + 1)]
    return any(place.with_suffix(".py").exists() or place.is_dir() for place in places)


def test_every_page_that_is_named_is_there() -> None:
    wrong = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for name in set(re.findall(r"(?<![/\w])([A-Z]{4,}\.md)\b", text)) | set(
            re.findall(r"`((?:docs|configs|bench|systemd)/[\w./-]+)`", text)
        ):
            place = ROOT / name if "/" in name else ROOT / "docs" / name
            if not any(each.exists() for each in (place, ROOT / name, page.parent / name)):
                wrong.append(f"{page.name}: {name}")
    assert not wrong, "\n".join(wrong)
