"""README.md stays a first page, and the commands are all in their table."""

import re
from pathlib import Path

import pytest

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


#: Made by the code, with its words; and what is history by its nature.
OTHERS = {"CONFIGURATION.md", "EVENTS.md", "METRICS.md", "DECISIONS.md"}
WRITTEN = [path for path in sorted((ROOT / "docs").glob("*.md")) if path.name not in OTHERS]


def prose(text: str) -> list[str]:
    """The lines of a page that are neither code nor rows of a table, which may be long."""
    shown = re.sub(r"^ *```.*?^ *```$", "", text, flags=re.MULTILINE | re.DOTALL)
    return [line for line in shown.splitlines() if not line.lstrip().startswith("|")]


@pytest.mark.parametrize("page", WRITTEN, ids=lambda page: page.name)
def test_a_page_has_short_lines_and_no_history(page: Path) -> None:
    lines = prose(page.read_text(encoding="utf-8"))
    assert [line for line in lines if len(line) > 140] == []
    assert re.findall(HISTORY, re.sub(r"`[^`]*`", "", "\n".join(lines))) == []


@pytest.mark.parametrize("page", WRITTEN, ids=lambda page: page.name)
def test_a_page_begins_with_what_it_is_for(page: Path) -> None:
    title, blank, purpose, *_ = page.read_text(encoding="utf-8").splitlines()
    assert title.startswith("# ")
    assert blank == ""
    assert purpose[0].isalpha(), "a sentence, and no table, picture or note"
