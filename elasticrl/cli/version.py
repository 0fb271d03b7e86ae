"""`elasticrl version`."""

import json
import platform
from typing import Annotated

import typer

from elasticrl import __version__


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("version")(version)


def version(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Print the versions of elasticrl and Python."""
    python = platform.python_version()
    if as_json:
        typer.echo(json.dumps({"elasticrl": __version__, "python": python}))
    else:
        typer.echo(f"elasticrl {__version__} (Python {python})")
