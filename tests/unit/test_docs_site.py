"""The site (mkdocs.yml) has every page once, where the README's readers look for it, and brings what it shows along."""

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
SITE = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
DOCS = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")}


def pages(nav: Any) -> Iterator[str]:
    """The files of a navigation, in order."""
    if isinstance(nav, str):
        yield nav
    elif isinstance(nav, dict):
        for under in nav.values():
            yield from pages(under)
    else:
        for each in nav:
            yield from pages(each)


NAV = list(pages(SITE["nav"]))


def outside() -> dict[str, str]:
    """The pages from outside of docs/, and where they are in the site: read from the source, as mkdocs may not be there."""
    tree = ast.parse((ROOT / "docs" / "site_pages.py").read_text(encoding="utf-8"))
    (found,) = (
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == "OUTSIDE"
    )
    return dict(ast.literal_eval(found))


def test_the_navigation_lists_every_page_of_docs_once() -> None:
    others = set(outside().values())
    listed = Counter(page for page in NAV if page not in others)
    assert {page: times for page, times in listed.items() if times > 1} == {}
    assert set(listed) == DOCS, "a page of docs/ needs a line in mkdocs.yml, and a line there a page"


def test_the_pages_from_elsewhere_exist_and_are_listed_once() -> None:
    assert [source for source in outside() if not (ROOT / source).exists()] == []
    assert [target for target in outside().values() if NAV.count(target) != 1] == []


def test_a_page_that_the_readme_names_under_read_on_is_in_the_navigation() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    named = re.findall(r"\]\(docs/(\w+\.md)\)", readme.partition("## Read on")[2])
    assert len(named) >= 10
    assert [page for page in named if page not in NAV] == []


def test_a_page_that_is_viewed_fetches_no_fonts_and_a_dead_link_fails() -> None:
    assert SITE["theme"]["font"] is False
    assert SITE["strict"] is True
    assert {
        SITE["validation"][what] for what in ("omitted_files", "absolute_links", "unrecognized_links", "anchors")
    } == {"warn"}
