"""Options and arguments that verbs of several modules have, each with the one text that help says of it."""

from pathlib import Path
from typing import Annotated

import typer

Job = Annotated[str | None, typer.Option("--job", help="Which job, if several run here.", show_default=False)]
Run = Annotated[Path | None, typer.Option("--run-dir", help="Where the daemons' sockets are.", show_default=False)]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]
Config = Annotated[
    Path | None, typer.Option("--config", "-c", metavar="FILE", help="The job's configuration.", show_default=False)
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[KEY=VALUE]...", help="Values in place of the file's, such as ppo.lr=1e-5.", show_default=False
    ),
]
