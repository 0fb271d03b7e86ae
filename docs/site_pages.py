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
    """Writes the links between docs/ and the rest anew: in the site, docs/ is the root."""
    if page.file.src_uri == "index.md":
        markdown = markdown.replace("](docs/examples)", f"]({SCRIPTS})")
        return re.sub(r"\]\(docs/", "](", markdown)
    if page.file.src_uri.startswith("bench/"):
        return re.sub(r"\]\(((?:\.\./)+)docs/", r"](\1", markdown)
    return re.sub(r"\]\(((?:\.\./)*)\.\./bench/", r"](\1bench/", markdown)
