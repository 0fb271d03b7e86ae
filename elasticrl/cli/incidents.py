"""`elasticrl incidents [ID]`: what went wrong so far, and the page of one of them."""

import json
from pathlib import Path
from typing import Annotated

import typer

Id = Annotated[str | None, typer.Argument(metavar="[ID]", help="One of them, or the beginning of its id; `last`.")]
Config = Annotated[
    Path | None, typer.Option("--config", "-c", metavar="FILE", help="The job's configuration.", show_default=False)
]
State = Annotated[Path | None, typer.Option("--state-dir", metavar="DIR", help="In place of node.state_dir.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("incidents")(incidents)


def incidents(id: Id = None, config: Config = None, state_dir: State = None, as_json: AsJson = False) -> None:  # noqa: A002 - the argument's name is its help
    """List the incidents that this machine's daemons wrote down, or tell one. Works without a daemon."""
    from elasticrl.cli.main import Exit
    from elasticrl.diagnose import incident as kept
    from elasticrl.report.table import table

    found, unread = kept.found(_folders(config, state_dir))
    for text in unread:
        typer.echo(text, err=True)
    if id is not None:
        chosen = found[-1:] if id == "last" else [each for each in found if each.id.startswith(id)]
        if len({each.id for each in chosen}) != 1:
            said = (
                f"several begin with {id}: {', '.join(sorted({each.id for each in chosen}))}"
                if chosen
                else f"none is {id}"
            )
            typer.echo(f"{said}; see them all: elasticrl incidents", err=True)
            raise typer.Exit(Exit.FAILED)
        for each in chosen:  # one for each node of this machine that saw it
            typer.echo(json.dumps(each.plain(), indent=2) if as_json else kept.page(each))
    elif as_json:
        typer.echo(json.dumps([each.plain() for each in found], indent=2))
    elif found:
        typer.echo("\n".join(table(kept.HEAD, [kept.row(each) for each in found])))
    else:
        typer.echo("no incidents")


def _folders(config: Path | None, state_dir: Path | None) -> list[Path]:
    """`<state_dir>/<job>/<node>/incidents`, of the configuration's job, or of all."""
    job = "*"
    if config is not None:
        from elasticrl.cli.main import Exit
        from elasticrl.config import read

        loaded = read(config)
        if loaded.tree is None:
            for finding in loaded.findings:
                typer.echo(str(finding), err=True)
            raise typer.Exit(Exit.REFUSED)
        job, state_dir = loaded.tree.job.name, state_dir or Path(loaded.tree.node.state_dir)
    return sorted((state_dir or Path("/var/lib/elasticrl")).glob(f"{job}/*/incidents"))
