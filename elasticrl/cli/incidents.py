"""`elasticrl incidents [ID]`: what went wrong so far, and the page of one of them."""

import json
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Final

import typer

from elasticrl.base.words import plain
from elasticrl.cli.options import AsJson, Config, Job

Id = Annotated[str | None, typer.Argument(metavar="[ID]", help="One of them, or the beginning of its id; `last`.")]
State = Annotated[
    Path | None, typer.Option("--state-dir", metavar="DIR", help="In place of node.state_dir.", show_default=False)
]
ALL: Final = "*"  # jobs
#: Where `elasticrl run` by the configuration of the repository keeps them, below the folder in which it is called, and `demo`.
FOREGROUND: Final = (Path("run/state"), Path("run/demo/state"))
SYSTEM: Final = Path("/var/lib/elasticrl")  # node.state_dir as it is unless a configuration says otherwise


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("incidents")(incidents)


def incidents(
    id: Id = None,  # noqa: A002 - the argument's name is its help
    config: Config = None,
    state_dir: State = None,
    job: Job = None,
    as_json: AsJson = False,
) -> None:
    """List the incidents that this machine's daemons wrote down, or tell one. Works without a daemon."""
    from elasticrl.cli import find
    from elasticrl.cli.main import Exit
    from elasticrl.diagnose import incident as kept
    from elasticrl.report.table import table

    if state_dir is not None and not state_dir.is_dir():
        typer.echo(f"{state_dir} is not a directory", err=True)
        raise typer.Exit(Exit.REFUSED)
    roots, named = _roots(config, state_dir)
    whose = job or named
    shut = [folder for root in roots for folder in (root, *_below(root, whose)) if find.shut(folder)]
    none = find.why_shut(shut[0]) if shut else _none(roots, whose)
    if config is None and state_dir is None and not _there(roots, whose):
        roots = [root for root in FOREGROUND if _there([root], whose)] or roots
    found, unread = kept.found(_there(roots, whose))
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
            said = f"{said}; see them all: elasticrl incidents" if found else none
            typer.echo(said, err=True)
            raise typer.Exit(Exit.FAILED)
        if as_json:
            typer.echo(json.dumps([each.plain() for each in chosen], indent=2))
        else:  # one for each node of this machine that saw it
            typer.echo(plain("\n".join(map(kept.page, chosen)), keep="\n"))
    elif as_json:
        typer.echo(json.dumps([each.plain() for each in found], indent=2))
    elif found:
        typer.echo(plain("\n".join(table(kept.HEAD, kept.rows(found))), keep="\n"))
    elif shut:
        typer.echo(none, err=True)
        raise typer.Exit(Exit.FAILED)
    else:
        typer.echo(none)


def _there(roots: Iterable[Path], job: str) -> list[Path]:
    """The folders of their incidents."""
    return sorted(folder for root in roots for folder in root.glob(f"{job}/*/incidents"))


def _below(root: Path, job: str) -> list[Path]:
    """The folders of jobs and of their nodes, as far as this user sees them."""
    with suppress(OSError):
        return [*root.glob(job), *root.glob(f"{job}/*")]
    return []


def _none(roots: list[Path], job: str) -> str:
    where = ", ".join(map(str, roots))
    if job == ALL:
        return (
            f"no incidents below {where}; of a job whose node.state_dir is another: elasticrl incidents --config FILE, or "
            f"--state-dir DIR, which is run/state after elasticrl run and run/demo/state after the demonstration"
        )
    others = sorted({path.parts[-3] for root in roots for path in root.glob("*/*/incidents")})
    told = f"; there are those of {', '.join(others)}: elasticrl incidents --state-dir {roots[0]}" if others else ""
    return f"no incidents of the job {job} below {where}{told}"


def _roots(config: Path | None, state_dir: Path | None) -> tuple[list[Path], str]:
    """State directories, and the job: of the configuration, or of all jobs that have run or run now on this machine."""
    if config is None:
        return ([state_dir] if state_dir else sorted({SYSTEM, *_running()})), ALL
    from elasticrl.cli.main import Exit
    from elasticrl.config import read

    loaded = read(config)
    if loaded.tree is None:
        for finding in loaded.findings:
            typer.echo(str(finding), err=True)
        raise typer.Exit(Exit.REFUSED)
    return [state_dir or Path(loaded.tree.node.state_dir)], loaded.tree.job.name


def _running() -> set[Path]:
    """Where the daemons that run here keep theirs: those of `elasticrl run` do so where its configuration says."""
    from elasticrl.cli import find
    from elasticrl.daemon.client import Unanswered, ask

    found = set()
    for path in find.sockets():
        try:
            found.add(Path(ask(path, "ping", deadline_s=1.0)["state_dir"]))
        except (Unanswered, KeyError):  # gone, or of an older version
            continue
    return found
