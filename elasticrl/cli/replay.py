"""`elasticrl replay TRACE`: decide again what a daemon decided, from its event trace."""

from pathlib import Path
from typing import Annotated

import typer

from elasticrl.cli.main import Exit


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("replay")(replay)


def replay(
    trace: Annotated[Path, typer.Argument(metavar="TRACE", help="A trace-new.jsonl or trace-old.jsonl.")],
    every: Annotated[bool, typer.Option("--all", help="Also the steps in which nothing was decided.")] = False,
) -> None:
    """Print each event and what the core decides on it. Exits with 1 if any decision differs from the one that was made."""
    from elasticrl.shell.keys import Unreadable
    from elasticrl.shell.trace import replay as again

    differ = steps = 0
    try:
        for step in again(trace):
            steps += 1
            differ += not step.same
            actions = [type(action).__name__ for action in step.decision.actions]
            if actions or every or not step.same:
                mark = "" if step.same else f"   BUT THEN: {[type(action).__name__ for action in step.written]}"
                reason = step.decision.state.reason
                typer.echo(
                    f"{step.event.now:14.3f}  {type(step.event).__name__:9}  {' '.join(actions) or '-'}  ({reason}){mark}"
                )
    except (OSError, Unreadable) as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(Exit.REFUSED) from None
    typer.echo(f"{steps} steps, {differ} decided differently")
    raise typer.Exit(Exit.FAILED if differ else Exit.OK)
