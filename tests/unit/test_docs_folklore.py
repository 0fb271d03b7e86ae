"""FOLKLORE.md answers every statement: each one's number stands on the page, in a sentence that says what is true."""

import re
from pathlib import Path

PAGE = (Path(__file__).parents[2] / "docs" / "FOLKLORE.md").read_text(encoding="utf-8")
#: article -> how many statements it makes; they are numbered from 01.
ARTICLES = {"S0": 26, "S1": 70, "S2": 16, "S3": 49, "S4": 28}
STATEMENTS = {f"{article}-{number:02}" for article, last in ARTICLES.items() for number in range(1, last + 1)}
NUMBER = re.compile(r"S\d-\d+")


def test_each_statement_stands_on_the_page_and_none_that_nobody_makes() -> None:
    assert set(NUMBER.findall(PAGE)) == STATEMENTS


def test_the_page_says_how_many_there_are() -> None:
    assert f"Of {len(STATEMENTS)} statements" in PAGE


def test_numbers_stand_in_parentheses_at_the_end_of_what_they_are_about() -> None:
    loose = re.sub(r"\((?:S\d-\d\d(?:,\s+)?)+\)", "", PAGE)
    assert NUMBER.findall(loose) == []
