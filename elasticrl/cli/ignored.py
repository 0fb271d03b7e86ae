"""Options that would do nothing beside the others that were given: refused, as who gives one means something by it."""

import typer

from elasticrl.cli.main import Exit


def refuse(context: typer.Context, *names: str, because: str) -> None:
    """Those of these parameters that the command line gives, all at once.

    Example: refuse(context, "me", because="only for the test of other nodes: name them with --nodes")
    """
    given = [
        next(option for option in parameter.opts if option.startswith("--"))
        for parameter in context.command.params
        if parameter.name in names and (source := context.get_parameter_source(parameter.name))
        if source.name == "COMMANDLINE"
    ]
    if given:
        typer.echo(f"{', '.join(given)}: {because}", err=True)
        raise typer.Exit(Exit.REFUSED)
