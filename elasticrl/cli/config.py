"""`elasticrl config check | show | diff | schema`: what a configuration says, and what is wrong with it."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from elasticrl.base.words import count
from elasticrl.cli.main import Exit
from elasticrl.cli.options import AsJson, Overrides

if TYPE_CHECKING:
    from elasticrl.config import Loaded

File = Annotated[Path, typer.Argument(metavar="FILE", help="A configuration in YAML.", show_default=False)]


def register(app: typer.Typer) -> None:
    """Add the group."""
    group = typer.Typer(name="config", help="Check, show and describe configurations.", no_args_is_help=True)
    group.command("check")(check)
    group.command("show")(show)
    group.command("diff")(diff)
    group.command("schema")(schema)
    app.add_typer(group)


def check(file: File, overrides: Overrides = None, as_json: AsJson = False) -> None:
    """Say everything that is wrong with FILE, with the remedy. Exits with 2 if it is refused."""
    from elasticrl.config import read
    from elasticrl.diagnose.program import absent

    loaded = read(file, overrides or ())
    if as_json:
        findings = [finding.plain() for finding in loaded.findings]
        typer.echo(json.dumps({"ok": loaded.tree is not None, "file": loaded.file, "findings": findings}, indent=2))
    else:
        for finding in loaded.findings:
            typer.echo(str(finding))
        if loaded.tree is not None and (why := absent(loaded.tree)):
            typer.echo(why)  # it may be on the nodes all the same
        typer.echo(_summary(loaded))
    raise typer.Exit(Exit.REFUSED if loaded.tree is None else Exit.OK)


def show(file: File, overrides: Overrides = None, as_json: AsJson = False) -> None:
    """Print every value that is in effect, and where each was written: default, file:line, environment, command line."""
    from elasticrl.config import read, render

    loaded = read(file, overrides or ())
    for finding in loaded.findings:
        typer.echo(str(finding), err=True)
    if loaded.tree is None:
        raise typer.Exit(Exit.REFUSED)
    if as_json:
        typer.echo(json.dumps(render.shown(loaded.tree, loaded.origins), indent=2))
    else:
        typer.echo(render.show(loaded.tree, loaded.origins), nl=False)


def diff(old: File, new: File, as_json: AsJson = False) -> None:
    """Print what differs between two configurations, and when each change takes effect."""
    from dataclasses import asdict

    from elasticrl.config import ConfigError, changes, load
    from elasticrl.config.changes import SAID

    try:
        found = changes(load(old), load(new))
    except ConfigError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(Exit.REFUSED) from error
    if as_json:
        typer.echo(json.dumps([asdict(change) for change in found], indent=2))
        return
    for change in found:
        said = _SAID if change.key in SAID else _EFFECT[change.when]
        typer.echo(f"{change.key}: {change.old} -> {change.new}  # {said}")


_EFFECT = {
    "live": "on SIGHUP",
    "restart": "after a restart",
    "never": "another job: checkpoints of the old one are refused",
}
_SAID = "after a restart, with other bits: checkpoints of the old one are gone on from"


def schema(
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the reference for people.")] = False,
) -> None:
    """Print the JSON Schema, for editors."""
    from elasticrl.config import render

    typer.echo(render.markdown() if markdown else render.json_schema(), nl=False)


def _summary(loaded: "Loaded") -> str:
    if loaded.tree is None:
        return f"refused: {loaded.file} has {count(len(loaded.errors), 'mistake')}"
    tree, members = loaded.tree, loaded.tree.membership
    advice = f", {count(len(loaded.findings), 'warning')}" if loaded.findings else ""
    return (
        f"ok: {loaded.file}: job {tree.job.name}, {members.min_nodes} to {count(members.max_nodes, 'node')} with "
        f"{count(tree.node.workers, 'worker')} each, {count(tree.lanes.count, 'lane')}{advice}"
    )
