"""`elasticrl report`: a run as one page."""

from pathlib import Path
from typing import Annotated

import typer

Run = Annotated[
    Path,
    typer.Argument(metavar="RUN", help="What a run left: its folder, logs and state below it.", show_default=False),
]
Out = Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="The HTML file.")]
Job = Annotated[
    str | None,
    typer.Option("--job", metavar="NAME", help="Which job, if several left theirs there.", show_default=False),
]
AsText = Annotated[bool, typer.Option("--text", help="Print it in words, and write no file.")]


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("report")(report)


def report(
    context: typer.Context, run: Run, job: Job = None, output: Out = Path("report.html"), as_text: AsText = False
) -> None:
    """Make one HTML page of a run, complete in itself: what happened, what it cost, why. Exits with 2 if nothing is there, or
    if several jobs left theirs and none is named.
    """
    from elasticrl.base.words import plain
    from elasticrl.cli import ignored
    from elasticrl.cli.main import Exit
    from elasticrl.report.owners import Unchosen
    from elasticrl.report.read import read
    from elasticrl.report.story import tell
    from elasticrl.report.text import headline, text

    if as_text:
        ignored.refuse(context, "output", because="only without --text, which writes no file")
    if not run.is_dir():
        typer.echo(f"{run} is not a folder: name the one that holds the run's logs, checkpoints and state", err=True)
        raise typer.Exit(Exit.REFUSED)
    try:
        left = read(run, job)
    except Unchosen as why:
        typer.echo(str(why), err=True)
        raise typer.Exit(Exit.REFUSED) from None
    if not left.files:
        typer.echo(f"nothing below {run} was left by a run: no daemon's log, no steps, no checkpoints", err=True)
        raise typer.Exit(Exit.REFUSED)
    story = tell(left)
    if as_text:
        typer.echo(plain(text(story), keep="\n"))
        return
    try:
        from elasticrl.report.page import page
    except ModuleNotFoundError as error:
        if error.name != "matplotlib":
            raise
        typer.echo("the page is drawn by matplotlib: pip install 'elasticrl[report]'; or say --text", err=True)
        raise typer.Exit(Exit.FAILED) from None
    try:
        output.write_text(page(story), encoding="utf-8")
    except OSError as error:
        typer.echo(f"{output} cannot be written: {error.strerror}", err=True)
        raise typer.Exit(Exit.REFUSED) from None
    typer.echo(f"{plain(headline(story))}\n{output}")
