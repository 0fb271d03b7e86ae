"""`elasticrl diagnose`: who, what and why: of the job that runs here, or from the logs of any job, offline."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from elasticrl.base.words import plain
from elasticrl.cli.options import AsJson

if TYPE_CHECKING:  # what looks at jobs is imported when one is looked at
    from elasticrl.diagnose import foreign

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
Now = Annotated[
    bool, typer.Option("--now", help="Ask all of the job's workers where they are, and judge what is known of it.")
]
Job = Annotated[
    str | None, typer.Option("--job", help="With --now: which job, if several run here.", show_default=False)
]
Run = Annotated[
    Path | None, typer.Option("--run-dir", help="With --now: where the daemons' sockets are.", show_default=False)
]
Pids = Annotated[
    list[int] | None,
    typer.Option(
        "--pid", metavar="PID", min=1, show_default=False,
        help="A running job on this machine, of any launcher: its launcher, or its ranks. May be repeated.",
    ),
]  # fmt: skip
Slurm = Annotated[
    str | None,
    typer.Option("--slurm", metavar="JOB", help="The ranks of that Slurm job on this machine.", show_default=False),
]
Hosts = Annotated[
    str | None,
    typer.Option(
        "--host", metavar="HOST[,HOST]...", show_default=False,
        help="The machines of a running job of any launcher, asked over ssh (keys, no passwords). They need Python and nothing "
        "of ours; py-spy gives stacks. With --slurm: of that job. With --job: the one with that MASTER_ADDR:MASTER_PORT.",
    ),
]  # fmt: skip
Within = Annotated[
    float, typer.Option("--within", min=4.0, help="With --host: seconds that each machine has to answer.")
]


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("diagnose")(diagnose)


def diagnose(
    context: typer.Context,
    log: Logs = None,
    more: More = None,
    world: World = None,
    now: Now = False,
    job: Job = None,
    run_dir: Run = None,
    pid: Pids = None,
    slurm: Slurm = None,
    host: Hosts = None,
    within: Within = 9.0,
    as_json: AsJson = False,
) -> None:
    """Say which rank or node is at fault, why, how sure that is, and what to do.

    With --log: from the logs of a job, ours or not. With --pid, --slurm or --host: of a job that runs under another launcher.
    Without: of the job that elasticrl runs on this machine. No job is disturbed.
    """
    from elasticrl.cli import ignored

    if host:
        ignored.refuse(
            context,
            "now",
            "run_dir",
            "log",
            "world",
            "pid",
            because="--host looks at all ranks of a job of another launcher on those machines",
        )
        _afar(host, slurm or "", job or "", within, as_json=as_json)
        return
    ignored.refuse(context, "within", because="only with --host")
    if pid or slurm:
        ignored.refuse(
            context,
            "now",
            "job",
            "run_dir",
            "log",
            "world",
            because="--pid and --slurm look at a job of another launcher",
        )
        _foreign(pid or (), slurm or "", as_json=as_json)
        return
    if now and (log or more):
        ignored.refuse(context, "now", because="it asks the job that runs here, and logs are named too: one of them")
    if log or more:
        ignored.refuse(context, "job", "run_dir", because="only for the job that runs here; logs are read without it")
    else:
        ignored.refuse(context, "world", because="only for logs (--log); of the job that runs here it is known")
        _live(run_dir, job, as_json=as_json)
        return
    from elasticrl.cli.main import Exit
    from elasticrl.contract.verdict import Known
    from elasticrl.core.judge.judge import judge
    from elasticrl.diagnose import report
    from elasticrl.diagnose.logs import read

    paths = [*(log or ()), *(more or ())]
    reading = read(paths)
    if not reading.files:
        for reason in reading.unread or ("no files in these directories",):
            typer.echo(plain(f"cannot read {reason}"), err=True)
        raise typer.Exit(Exit.REFUSED)
    verdict = judge(reading.evidence, Known(world=world, heard=reading.ranks))
    if as_json:
        typer.echo(json.dumps(report.plain(verdict, reading.evidence, reading.ways), indent=2))
        for reason in reading.unread:
            typer.echo(plain(f"not read: {reason}"), err=True)
    else:
        typer.echo(plain(report.page(verdict, reading), keep="\n"))


def show(text: str) -> None:
    """A line of it. It quotes nodes, programs and logs."""
    typer.echo(plain(text))


def _foreign(pids: Sequence[int], slurm: str, *, as_json: bool) -> None:
    """Look at the ranks of a job that is not ours."""
    from elasticrl.cli.main import Exit
    from elasticrl.diagnose import foreign

    try:
        found = foreign.look(foreign.job(foreign.processes(), pids=pids, slurm=slurm))
    except foreign.NoJob as error:
        typer.echo(plain(str(error)), err=True)
        raise typer.Exit(Exit.REFUSED) from None
    _told(found, as_json=as_json)


def _afar(host: str, slurm: str, address: str, within_s: float, *, as_json: bool) -> None:
    """The same over ssh."""
    from elasticrl.cli.main import Exit
    from elasticrl.diagnose import afar, foreign

    try:
        found = afar.look(afar.ask(afar.hosts(host), within_s=within_s), slurm=slurm, address=address)
    except foreign.NoJob as error:
        typer.echo(plain(str(error)), err=True)
        raise typer.Exit(Exit.REFUSED) from None
    _told(found, as_json=as_json)


def _told(found: "foreign.Look", *, as_json: bool) -> None:
    from elasticrl.diagnose import foreign, report

    job = found.job
    if as_json:
        told = report.plain(found.verdict, found.evidence)
        ranks = {str(rank): number for rank, number in job.ranks.items()}
        about = {
            "job": job.name, "world": job.world, "ranks": ranks, "gone": list(job.gone), "moving": list(found.moving),
            "hosts": list(found.hosts),
        }  # fmt: skip
        typer.echo(json.dumps({**told, **about, "said": found.said}, indent=2))
        return
    place = "there" if found.hosts else "here"
    here = f"{len(job.ranks)} of {job.world} ranks run {place}" if job.world else f"{len(job.ranks)} processes"
    show(f"JOB      {job.name}: {here}")
    for line in found.hosts:
        show(f"HOST     {line}")
    show(f"NOW      {found.said or 'nobody stands still'}")
    if moved := foreign.moved(found):
        show(f"MOVING   {moved}")
    if found.blind:
        show(f"BLIND    {found.blind}")
    for line in judged(found.verdict.plain(), "no fault was seen"):
        show(line)
    if job.world and job.world > len(job.ranks) + len(job.gone):
        show("ALSO     other ranks run on other machines: ask there too, and look at the one that waits for nobody")


def _live(run_dir: Path | None, job: str | None, *, as_json: bool) -> None:
    """The daemon of this machine asks all of them, and judges that together with what it knows."""
    from elasticrl.cli import find
    from elasticrl.cli.main import Exit
    from elasticrl.daemon.client import Unanswered, ask

    try:
        told = ask(find.daemon(run_dir, job), "diagnose")
    except (find.NotFound, Unanswered) as error:
        typer.echo(f"{error}\nTo read logs instead: elasticrl diagnose --log FILE (or a directory of them)", err=True)
        raise typer.Exit(Exit.FAILED) from None
    if as_json:
        typer.echo(json.dumps(told, indent=2))
        return
    for line in live(told):
        show(line)


def live(told: Mapping[str, Any]) -> Iterator[str]:
    """What the daemon has answered, for people."""
    from elasticrl.contract.verdict import rank_names

    yield f"NOW      {told['said']}"
    if moved := told["moved"]:
        yield f"MOVING   {rank_names(moved)} made progress while this was asked"
    yield f"PLAN     {told['reason']}"
    yield from judged(told["verdict"], "no fault is known")
    if lasting := told["if_it_lasts"]:
        yield f"IF IT LASTS  {lasting['class']}: {lasting['cause']}"
    if before := told["before"]:
        yield f"BEFORE   {before['class']}: {before['cause']}"


def judged(verdict: Mapping[str, Any], none: str) -> Iterator[str]:
    """A verdict, as `Verdict.plain` has it; `none`: what is said where there is none."""
    if verdict["class"] == "unknown":
        yield f"VERDICT  {none}"
    else:
        who = [*(f"rank {rank}" for rank in verdict["culprit"]["ranks"]), *verdict["culprit"]["nodes"]]
        yield f"VERDICT  {verdict['class']} (confidence {verdict['confidence']}): {verdict['cause']}"
        yield f"CULPRIT  {', '.join(who) or 'unknown'}"
        yield f"DO       {verdict['remedy']}"
    yield from (f"  - {fact}" for fact in verdict["because"])
