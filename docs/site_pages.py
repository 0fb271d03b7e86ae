"""Brings README.md and the pages of bench/ into the site, which mkdocs makes of docs/ alone.

The one idea: the files stay where GitHub shows them, with links that work there. Only the links are written anew for the site.
"""

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
#: What lies outside of docs/, and where it is in the site.
OUTSIDE = {
    "README.md": "index.md",
    "bench/README.md": "bench/README.md",
    "bench/FIGURES.md": "bench/FIGURES.md",
    "bench/COMPARISON.md": "bench/COMPARISON.md",
    "bench/race/RESULTS.md": "bench/race/RESULTS.md",
}
SCRIPTS = "examples/supervised.py"  # a folder has no page: its first script stands for it


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages from outside of docs/."""
    for source, target in OUTSIDE.items():
        files.append(File.generated(config, target, abs_src_path=str(ROOT / source)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:  # noqa: ARG001 # mkdocs names them
    """Writes the links between docs/ and the rest anew (in the site, docs/ is the root), and the bars in code."""
    return bars(links(markdown, page.file.src_uri))


def links(markdown: str, place: str) -> str:
    """The page's links, as they are in the site.

    >>> links("[a](docs/A.md) [e](docs/examples)", "index.md"), links("[f](../bench/F.md)", "A.md")
    ('[a](A.md) [e](examples/supervised.py)', '[f](bench/F.md)')
    """
    if place == "index.md":
        return markdown.replace("](docs/examples)", f"]({SCRIPTS})").replace("](docs/", "](")
    if place.startswith("bench/"):
        return re.sub(r"\]\(((?:\.\./)+)docs/", r"](\1", markdown)
    return re.sub(r"\]\(((?:\.\./)*)\.\./bench/", r"](\1bench/", markdown)


def bars(markdown: str) -> str:
    r"""A bar in code in a table: GitHub wants a backslash before it, and mkdocs would show that.

    >>> bars(r"| `a\|b` |")
    '| `a|b` |'
    """
    return re.sub(r"`[^`\n]*`", lambda code: code[0].replace(r"\|", "|"), markdown)
