"""README.md stays a first page, and the commands are all in their table."""

import re
from pathlib import Path

from elasticrl.cli.main import VERBS

ROOT = Path(__file__).parents[2]
HISTORY = r"\b(?:January|February|March|April|May|June|July|August|September|October|November|December)\b|\b20\d\d\b|\bseed \d+"
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_it_fits_on_a_few_screens() -> None:
    lines = README.splitlines()
    assert len(lines) <= 130
    assert [line for line in lines if len(line) > 140] == []


def test_it_has_no_history() -> None:
    assert not re.search(HISTORY, README)


def test_every_verb_is_in_the_list_of_commands() -> None:
    listed = (ROOT / "docs" / "COMMANDS.md").read_text(encoding="utf-8")
    assert [verb for verb in VERBS if not re.search(rf"`elasticrl {verb}\b", listed)] == []
