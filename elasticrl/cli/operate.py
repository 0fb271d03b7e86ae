"""What operators ask of a running job: `status`, `drain`, `pause` and the like. It imports neither torch nor pydantic."""

import json
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Annotated, Any

import typer

from elasticrl.cli import find, render, screen
from elasticrl.cli.main import Exit
from elasticrl.cli.options import AsJson, Job, Run, Yes
from elasticrl.cli.pace import Pace

SOON_S = 3.0  # for one of several daemons to answer, before another one is asked
StoreAt = Annotated[
    str | None,
    typer.Option(
        "--store",
        metavar="HOST:PORT,...|FILE",
        help="Ask etcd itself, without a daemon: its endpoints (and --job), or a configuration that names them.",
        show_default=False,
    ),
]


def register(app: typer.Typer) -> None:
    """Add the verbs."""
    for verb in (status, drain, admit, pause, resume, stop):
        app.command()(verb)


def status(
    job: Job = None,
    run_dir: Run = None,
    as_json: AsJson = False,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Stay, and look again every second.")] = False,
    store: StoreAt = None,
) -> None:
    """Is it training, how far, who is in, what should I do. Exits with 0 if it trains or has finished, else with 1."""
    picture: dict[str, Any] = {}
    if not watch:
        try:
            picture = seen(store, run_dir, job, over=True)
        except find.NotFound as error:  # what its run has left in place of a picture
            picture = {**error.note, "said": render.named(str(error), job)}
            if not as_json and picture["state"] != "FINISHED":
                raise failed(str(error), job) from None
        typer.echo(json.dumps(picture) if as_json else picture.get("said") or render.status(picture))
    else:  # a job that is about to start, or a daemon that is restarted, is waited for
        pace = Pace()

        def look() -> str:
            said = quietly(store, job) if store else patiently(run_dir, job, "status")
            picture.update(render.addressed(said, job, store))
            if as_json:
                return json.dumps(picture)
            moving = pace.after(time.monotonic(), picture["step"]) if picture.get("tells", True) else ""
            return render.watched(picture, moving, ages=sys.stdout.isatty())  # in a file only what has changed is told

        with explained() if store else nullcontext():  # outside of the screen: what is said there goes with it
            if screen.watch(look, every_s=1.0):
                raise typer.Exit(Exit.INTERRUPTED)
    raise typer.Exit(Exit.OK if picture.get("state") in {"TRAINING", "GROWING", "FINISHED"} else Exit.FAILED)


def drain(
    node: Annotated[str | None, typer.Argument(help="The node that shall leave; this one if none is named.")] = None,
    job: Job = None,
    run_dir: Run = None,
    yes: Yes = False,
    force: Annotated[bool, typer.Option("--force", help="Though fewer than membership.min_nodes are left.")] = False,
    store: StoreAt = None,
) -> None:
    """Let a node finish its step, leave the plan and end. The others go on without it; if they cannot, it is refused."""
    if not yes:
        picture = seen(store, run_dir, job)
        if node := node or picture.get("node"):  # else: there is none here, which is said to who asks
            confirm(f"job {picture['job']}: {drained(picture, node, force=force)}", yes=yes)
    say(store, run_dir, job, "drain", node, force=force)


def drained(picture: Mapping[str, Any], node: str, *, force: bool) -> str:
    """What a drain of this node does.

    >>> drained({"rows": [{"node": "n2", "state": "gone"}]}, "n2", force=False)
    'n2 is gone; nobody waits for it any more.'
    """
    if any(row["node"] == node and row["state"] == "gone" for row in picture["rows"]):
        return f"{node} is gone; nobody waits for it any more."
    then = "if too few are left, the job saves and holds until another comes" if force else "well under a second"
    return f"{node} leaves; the others reform without it ({then})."


def admit(node: str, job: Job = None, run_dir: Run = None, store: StoreAt = None) -> None:
    """Let a quarantined node back."""
    say(store, run_dir, job, "admit", node)


def pause(job: Job = None, run_dir: Run = None, yes: Yes = False, store: StoreAt = None) -> None:
    """Hold the job at its next step; processes and state stay."""
    if not yes:
        name = seen(store, run_dir, job)["job"]
        confirm(
            render.named(f"job {name}: no node makes steps any more until `elasticrl resume`.", job, store), yes=yes
        )
    say(store, run_dir, job, "pause")


def resume(job: Job = None, run_dir: Run = None, store: StoreAt = None) -> None:
    """Go on after a pause."""
    say(store, run_dir, job, "resume")


def stop(job: Job = None, run_dir: Run = None, yes: Yes = False, store: StoreAt = None) -> None:
    """End the job on all nodes, after a save."""
    if not yes:
        from elasticrl.status.answers import ending

        picture = seen(store, run_dir, job)
        ends = ending(picture["step"], picture.get("unsaved", 0))
        confirm(f"job {picture['job']} {ends}. The daemons end with it (exit code 75).", yes=yes)
    say(store, run_dir, job, "stop")


def say(
    store: str | None, run_dir: Path | None, job: str | None, verb: str, node: str | None = None, **more: bool
) -> None:
    """Ask for something, and print what will happen."""
    said = outside(store, job, "ask", verb, node, **more) if store else ask(run_dir, job, verb, node=node, **more)
    typer.echo(render.named(said, job, store))


def seen(store: str | None, run_dir: Path | None, job: str | None, *, over: bool = False) -> dict[str, Any]:
    """The picture of the job, with its name in commands where it was asked for by name. `over`: as `ask` has it."""
    picture = outside(store, job, "look") if store else ask(run_dir, job, "status", over=over)
    return render.addressed(picture, job, store)


def ask(run_dir: Path | None, job: str | None, verb: str, *, over: bool = False, **fields: Any) -> Any:
    """Ask a daemon of this machine; a refusal ends the command with its sentence. `over`: that the job has ended is raised."""
    from elasticrl.daemon.client import Unanswered

    try:
        return put(run_dir, job, verb, **fields)
    except (find.NotFound, Unanswered) as error:
        if over and isinstance(error, find.NotFound) and error.note:
            raise
        raise failed(str(error), job) from None


def put(run_dir: Path | None, job: str | None, verb: str, **fields: Any) -> Any:
    """Ask a daemon of this machine. What all of them show, another one is asked where the first is silent."""
    from elasticrl.daemon.client import SEEN, Unanswered
    from elasticrl.daemon.client import ask as put_to

    first, *others = find.daemons(run_dir, job)
    if others and verb in SEEN:
        for path in (first, *others):
            with suppress(Unanswered):
                return put_to(path, verb, deadline_s=SOON_S, **fields)
    return put_to(first, verb, **fields)


def failed(said: str, job: str | None, store: str | None = None) -> typer.Exit:
    """To be raised, once it is said."""
    typer.echo(render.named(said, job, store), err=True)
    return typer.Exit(Exit.FAILED)


def patiently(run_dir: Path | None, job: str | None, verb: str) -> Any:
    """Ask, for a screen that stays when nobody answers for a while: a daemon that is restarted comes back."""
    from elasticrl.daemon.client import Unanswered

    try:
        return put(run_dir, job, verb)
    except (find.NotFound, Unanswered) as error:
        raise screen.Silent(str(error)) from None


def quietly(where: str, job: str | None) -> Any:
    """The look at a store, for a screen that stays while it is away."""
    import asyncio

    from elasticrl.daemon import outside as store
    from elasticrl.store import StoreError, StoreRefused

    try:
        return asyncio.run(store.look(store.reach(where, job)))
    except store.NoJob as error:
        raise screen.Silent(str(error)) from None  # it may begin
    except StoreRefused:
        raise  # that does not pass
    except StoreError as error:
        raise screen.Silent(str(error)) from None


def outside(
    where: str, job: str | None, what: str, verb: str = "", node: str | None = None, *, force: bool = False
) -> Any:
    """The same without a daemon, from etcd itself."""
    import asyncio

    from elasticrl.contract.model import Verb
    from elasticrl.daemon import outside as store

    with explained(job, where):
        settings = store.reach(where, job)
        if what == "look":
            return asyncio.run(store.look(settings))
        unless = None if force else store.settings_of(where, job)
        return asyncio.run(store.ask(settings, Verb(verb), node, unless=unless))


@contextmanager
def explained(job: str | None = None, where: str | None = None) -> Iterator[None]:
    """Inside, a store that cannot be used ends the command with its sentence."""
    from elasticrl.config import ConfigError
    from elasticrl.store import StoreError, StoreRefused

    try:
        yield
    except (ConfigError, StoreRefused) as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(Exit.REFUSED) from None
    except StoreError as error:
        raise failed(str(error), job, where) from None


def from_store(where: str, job: str | None, node: str | None, *, follow: bool) -> Iterator[dict[str, Any]]:
    """Events without a daemon."""
    import asyncio

    from elasticrl.daemon import outside as store

    with explained(), asyncio.Runner() as runner:
        try:
            lines = store.events(store.reach(where, job), node, follow=follow)

            async def next_line() -> dict[str, Any]:
                return await anext(lines)

            while True:
                yield runner.run(next_line())
        except (StopAsyncIteration, KeyboardInterrupt):
            return


def confirm(cost: str, *, yes: bool) -> None:
    """Say what it will cost, and ask; a script says --yes."""
    if yes:
        return
    if not sys.stdin.isatty():
        typer.echo(f"{cost} Say --yes to do it.", err=True)
        raise typer.Exit(Exit.REFUSED)
    typer.confirm(f"{cost} Do it?", abort=True)
