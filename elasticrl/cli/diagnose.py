"""`elasticrl diagnose --log`: who, what and why, from the logs of any job, offline."""

import json
from pathlib import Path
from typing import Annotated

import typer

Logs = Annotated[
    list[Path] | None,
    typer.Option(
        "--log", metavar="FILE|DIR", help="A log, or a directory of per-rank logs. May be repeated.", show_default=False
    ),
]
More = Annotated[list[Path] | None, typer.Argument(metavar="[FILE|DIR]...", help="Further logs.", show_default=False)]
World = Annotated[
    int | None, typer.Option("--world", min=1, help="The number of ranks, if known: then a silent rank can be named.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("diagnose")(diagnose)


def diagnose(log: Logs = None, more: More = None, world: World = None, as_json: AsJson = False) -> None:
    """Read the logs of a job, ours or not, and say which rank or node is at fault, why, how sure that is, and what to do."""
    from elasticrl.cli.main import Exit
    from elasticrl.core.verdict import Facts, judge
    from elasticrl.diagnose import report
    from elasticrl.diagnose.logs import read

    paths = [*(log or ()), *(more or ())]
    if not paths:
        typer.echo(
            "diagnose needs a log to read: elasticrl diagnose --log FILE (or a directory of per-rank files)", err=True
        )
        raise typer.Exit(Exit.REFUSED)
    reading = read(paths)
    if not reading.files:
        for reason in reading.unread or ("no files in these directories",):
            typer.echo(f"cannot read {reason}", err=True)
        raise typer.Exit(Exit.REFUSED)
    verdict = judge(reading.evidence, Facts(world=world, heard=reading.ranks))
    if as_json:
        typer.echo(json.dumps(report.plain(verdict, reading.evidence), indent=2))
        for reason in reading.unread:
            typer.echo(f"not read: {reason}", err=True)
    else:
        typer.echo(report.page(verdict, reading))
