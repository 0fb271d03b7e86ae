"""What runs: `daemon` (one node, for systemd), `agent` (its unit), `run` (some nodes on this machine, in the foreground)."""

import asyncio
import errno
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from elasticrl.base.owned import appended, write_private
from elasticrl.base.words import bar, count
from elasticrl.cli import find, node, render
from elasticrl.cli.claims import claimed, refused
from elasticrl.cli.main import Exit
from elasticrl.cli.options import Overrides
from elasticrl.cli.script import Output, Script
from elasticrl.cli.torchrun import Asked
from elasticrl.contract.level import means_of
from elasticrl.contract.model import REFUSED, Outcome

GONE = frozenset({errno.EIO, errno.EPIPE})  # what a terminal says that is closed, and a pipe that nobody reads
WORD_S = 3.0  # for the store to say how the job ended
OVER = frozenset({Outcome.CRASH_LOOP.value, Outcome.STOPPED.value})  # exit codes of a daemon whose job has ended
ORDERLY = OVER | {Outcome.FINISHED.value, Exit.REFUSED, REFUSED}  # of one that nobody starts again
BURST, BURST_S = 5, 60.0  # one that ends more often than this within this time is left, as systemd would
VAULT_S = 5.0  # for a vault of this run to end
ENDS_S = 45.0  # for a daemon that has drained, or has not within its time, to end its agent and its vault
REST_S = 10.0  # between two lines that only tell how far the job is, where there is no terminal
CLEAR = "\r\033[K"  # back to the beginning of the line, which is emptied
Config = Annotated[Path, typer.Option("--config", "-c", help="The configuration.", show_default=False)]
Adopt = Annotated[
    bool, typer.Option("--adopt", help="If the store has lost the job, go on from its newest good checkpoint.")
]


def register(app: typer.Typer) -> None:
    """Add the verbs."""
    for verb in (run, daemon, agent):
        app.command()(verb)


def daemon(
    config: Config,
    overrides: Overrides = None,
    foreground: Annotated[bool, typer.Option("--foreground", help="End the workers with the daemon.")] = False,
    adopt: Adopt = False,
    again: Annotated[
        bool, typer.Option("--again", help="In place of one that died: a job that has ended is not begun anew.")
    ] = False,
    parent: Annotated[int, typer.Option(node.PARENT, hidden=True)] = 0,
) -> None:
    """Run this node's daemon. SIGTERM hands over: the workers go on, and the next daemon adopts them."""
    raise typer.Exit(node.run(node.Asked(config, tuple(overrides or ()), foreground, adopt, again, parent)))


def agent(config: Config, overrides: Overrides = None) -> None:
    """Run this node's agent in the foreground, as its systemd unit does."""
    from elasticrl.agent.link import agent_command
    from elasticrl.agent.spec import environment
    from elasticrl.config import ConfigError, load
    from elasticrl.daemon.history import History
    from elasticrl.daemon.main import Daemon
    from elasticrl.daemon.refusal import Refusal
    from elasticrl.telemetry.log import set_up

    try:
        tree = load(config, overrides or ())
    except ConfigError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(REFUSED) from None
    if tree.node.role == "rollout":
        typer.echo("a rollout node has no agent: its daemon sees to the engine")
        return
    try:
        here = Daemon(tree, log=set_up(), history=History())
        spec = here.spec()
    except Refusal as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(REFUSED) from None
    command = agent_command(spec, here.home.folder)
    env = environment(spec)  # without what is said to the daemon alone; here systemd speaks to the agent
    if "NOTIFY_SOCKET" in os.environ:
        env["NOTIFY_SOCKET"] = os.environ["NOTIFY_SOCKET"]
    os.execve(sys.executable, command, env)  # noqa: S606 - it becomes the agent, as its unit's main process


def run(
    context: typer.Context,
    config: Annotated[
        str, typer.Argument(metavar="[CONFIG]", help="The configuration; or -- and a script.", show_default=False)
    ] = "",
    overrides: Overrides = None,
    nodes: Annotated[int, typer.Option("--nodes", min=1, help="How many nodes to play on this machine.")] = 1,
    workers: Annotated[
        int | None, typer.Option("--workers", min=1, help="Workers on each node, one to a GPU.", show_default=False)
    ] = None,
    level: Annotated[
        str | None,
        typer.Option(
            "--level", help="supervised, told, kept or exact; of a script what it calls for.", show_default=False
        ),
    ] = None,
    every: Annotated[float, typer.Option("--every", min=0.05, help="Seconds between looks at the status.")] = 1.0,
    allow: Annotated[
        list[str] | None,
        typer.Option(
            "--allow", help="What may differ from the checkpoint's run: lanes, batch, data, job, parts, frozen."
        ),
    ] = None,
    adopt: Adopt = False,
) -> None:
    """Run a job on this machine, in the foreground, with an etcd of its own. Ctrl-C ends it and leaves nothing running.

    A script that torchrun runs needs no configuration: elasticrl run --workers 2 -- train.py ARGS. Or say it as to torchrun:
    elasticrl run --nnodes 2:4 --nproc-per-node 8 -m pkg.train ARGS.
    """
    said: Asked = context.obj or Asked()
    if said.problems:
        raise refused("\n".join(said.problems))
    for note in said.notes:
        typer.echo(note, err=True)
    chosen = [*(overrides or ()), *([f"checkpoint.allow=[{', '.join(allow)}]"] if allow else [])]
    file, chosen = asked_for(said.script, config, chosen, nodes=nodes, workers=workers, level=level)
    tree, run_dir = settled(file, chosen, nodes)
    logs = Path(tree.telemetry.log_dir) / tree.job.name
    names = [f"n{n}" for n in range(nodes)]
    with claimed(tree, run_dir, names):
        etcd = start_store(tree) if tree.store.embedded else None
        endpoints = (etcd.endpoint,) if etcd else tree.store.endpoints
        endpoint = [f"store.endpoints=[{etcd.endpoint}]", "store.embedded=false"] if etcd else []
        if why := unfit(tree, endpoints, names, adopt=adopt):
            if etcd is not None:
                stop_store(tree)
            raise refused(why)
        own = [*chosen, f"node.run_dir={run_dir}", "telemetry.format=json", *endpoint]
        named = [[f"node.name={name}"] for name in names]
        named += [[f"node.name=r{n}", "node.role=rollout"] for n in range(tree.rollout.nodes)]
        shows = Output(logs) if said.script is not None or not means_of(tree.job.level).joins else None
        code = play(file, own, named, tree, run_dir, logs, every, endpoints, guarding(tree, etcd), shows)
    if code == Outcome.STOPPED.value:
        typer.echo("stopped, as somebody asked for; the same command goes on from there")
    elif code == Exit.OK:
        typer.echo("\n".join(afterwards(tree, run_dir)))
    elif code != Exit.INTERRUPTED:
        typer.echo(
            f"ended with {code}; why: elasticrl incidents --job {tree.job.name} --state-dir {tree.node.state_dir}, and the "
            f"logs in {logs}",
            err=True,
        )
    raise typer.Exit(code)


def afterwards(tree: Any, run_dir: Path) -> Iterator[str]:
    """What one may ask of a run that is over."""
    from elasticrl.config import run_dir as run_of

    if note := find.ended(run_dir, tree.job.name):
        yield f"the run as one page: {find.report_of(note)}"
    if means_of(tree.job.level).joins and "://" not in (run := run_of(tree, "n0")) and Path(run).is_dir():
        yield f"was each sample used once? elasticrl audit {shlex.quote(str(find.near(Path(run))))}"


def asked_for(
    script: Script | None, config: str, chosen: list[str], *, nodes: int, workers: int | None, level: str | None
) -> tuple[Path, list[str]]:
    """The configuration's file, and what is to hold in place of what it says."""
    from elasticrl.cli import script as scripts

    if "=" in config:  # no configuration, and a first override
        config, chosen = "", [config, *chosen]
    if script is not None and not script.program:
        raise refused("there is no script after --. Name one: elasticrl run -- train.py ARGS")
    if not config and script is None:
        raise refused("name a configuration (elasticrl run FILE) or a script (elasticrl run train.py ARGS)")
    if config:
        own = [*([f"node.workers={workers}"] if workers else []), *([f"job.level={level}"] if level else [])]
        asked = [*own, *(scripts.overrides(script) if script else []), *chosen]
        return Path(config), [*implied(Path(config), asked, nodes), *asked]
    assert script is not None
    try:
        return scripts.written(script, level or scripts.level_of(script), nodes, workers or 1), chosen
    except OSError as error:
        raise refused(
            f"{error.filename} cannot be written ({error.strerror}): set XDG_STATE_HOME to a folder of yours"
        ) from None


def implied(config: Path, chosen: list[str], nodes: int) -> list[str]:
    """What goes without saying where all nodes are on this machine: an etcd for them, and no more nodes than are played."""
    from elasticrl.config.load import read

    said = read(config, chosen).origins
    store = [] if {"store.embedded", "store.endpoints"} & said.keys() else ["store.embedded=true"]
    most = [] if {"membership.max_nodes", "membership.min_nodes"} & said.keys() else [f"membership.max_nodes={nodes}"]
    return [*store, *most]


def settled(config: Path, chosen: list[str], nodes: int) -> tuple[Any, Path]:
    """What is to be run, and where its sockets lie; refused if it cannot be."""
    from elasticrl.config import ConfigError, load
    from elasticrl.daemon.folders import not_ours

    try:
        run_dir = find.made_private(find.private_run_dir())
        tree = load(config, [*chosen, f"node.run_dir={run_dir}", f"node.name=n{nodes - 1}"])
    except (find.NotOurs, ConfigError) as error:
        raise refused(str(error)) from None
    if why := not_ours(tree, str(tree.node.name)):
        raise refused(why)
    if absent := missing(tree):
        raise refused("\n".join(absent))
    return tree, run_dir


def play(
    config: Path,
    own: list[str],
    names: list[list[str]],
    tree: Any,
    run_dir: Path,
    logs: Path,
    every_s: float,
    endpoints: tuple[str, ...],
    guard: Callable[[], str],
    shows: Output | None,
) -> int:
    """The daemons of all nodes, until the job ends or somebody ends it; then nothing of it is left. The exit code."""
    job = tree.job.name
    (run_dir / job / find.ENDED).unlink(missing_ok=True)
    ending, daemons = Ending(tree.recovery.drain_s), list[Started]()
    try:
        for words in names:
            name = words[0].partition("=")[2]
            log = logs / f"{name}.daemon.log"
            back = shlex.join(["elasticrl", "daemon", "--foreground", "--config", str(config), *own, *words])
            back = f"{back} >> {shlex.quote(str(log))} 2>&1 &"
            daemons.append(Started(name, partial(launch, config, [*own, *words], log), back))
        typer.echo(
            f"{count(len(names), 'node')}, logs in {logs}; from another terminal: elasticrl status --watch --job {job}\n"
        )
        last = partial(last_look, tree, endpoints)
        code = follow(daemons, run_dir, tree.job.name, every_s, tree.job.steps, guard, shows, last)
        ending.begun = True
    except (KeyboardInterrupt, OSError) as ended:
        ending.begun = True
        if isinstance(ended, OSError) and ended.errno not in GONE:
            raise
        with suppress(OSError):
            typer.echo("ending: workers, daemons, etcd")
        stop_job([each.process for each in daemons], run_dir, tree.job.name, within_s=tree.recovery.drain_s)
        return Exit.INTERRUPTED
    else:
        return code
    finally:
        end([each.process for each in daemons], within_s=tree.recovery.drain_s + ENDS_S)
        asyncio.run(end_vaults(vaults_of(Path(tree.vault.dir) / tree.job.name)))
        try:
            leave_word(tree, endpoints, run_dir / tree.job.name / find.ENDED)
        finally:
            if tree.store.embedded:
                stop_store(tree)
            ending.done()


class Ending:
    """What a signal begins (Ctrl-C, a service manager's, a terminal that is closed): the end of a run, in order. A further one
    would break that, and leave daemons and agents: it is only answered.
    """

    def __init__(self, drain_s: float) -> None:
        self.begun = False
        heard = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
        self._heard = [each for each in heard if signal.getsignal(each) is not signal.SIG_IGN]  # SIGHUP under nohup is
        for number in self._heard:
            signal.signal(number, self)
        self._said = f"it is ending already, which may take {drain_s:g} s (recovery.drain) for a last save\n".encode()

    def __call__(self, *_: object) -> None:
        """As a handler of signals."""
        if self.begun:
            with suppress(OSError):
                os.write(2, self._said)  # whatever is being printed just now
            return
        self.begun = True
        raise KeyboardInterrupt

    def done(self) -> None:
        """All has ended; from here on a signal comes too late. Python would give them back to the kernel as it ends."""
        for number in self._heard:
            signal.signal(number, signal.SIG_IGN)


def last_look(tree: Any, endpoints: tuple[str, ...]) -> dict[str, Any] | None:
    """How the job stands in its store, whose daemons have gone; None if the store doesn't say."""
    from elasticrl.daemon.outside import look
    from elasticrl.diagnose.job_store import store_settings
    from elasticrl.shell.keys import Unreadable
    from elasticrl.store import StoreError

    async def last() -> dict[str, Any]:
        async with asyncio.timeout(WORD_S):
            return await look(store_settings(tree, endpoints))

    with suppress(StoreError, OSError, TimeoutError, Unreadable, KeyboardInterrupt):
        return asyncio.run(last())
    return None


def leave_word(tree: Any, endpoints: tuple[str, ...], note: Path) -> None:
    """How the job ended, for who asks later: its daemons are gone, and so is a store of its own."""
    if (picture := last_look(tree, endpoints)) is None:
        return
    with suppress(OSError, KeyboardInterrupt):
        told = {name: picture[name] for name in ("job", "state", "step", "committed", "reason")}
        state = str(Path(tree.node.state_dir).absolute())
        left = os.path.commonpath([Path(tree.telemetry.log_dir).absolute(), state])
        write_private(note, json.dumps({**told, "at": time.time(), "left": left, "state_dir": state}))


def missing(tree: Any) -> list[str]:
    """Files that this configuration names and that are not here, where all nodes of `run` look for them."""
    from elasticrl.diagnose.program import absent

    named: dict[str, str | None] = {}
    if tree.job.program == "elasticrl.ppo":
        if tree.data.format != "datasets":
            named |= {"data.path": tree.data.path}
            named |= {"evaluate.prompts": tree.evaluate.prompts} if tree.evaluate.every else {}
        models = {"model.path": tree.model.path, "reward.model": tree.reward.model}
        named |= {
            key: path for key, path in models.items() if path and path.startswith(("/", "."))
        }  # else: maybe of a hub
    return [
        *filter(None, [absent(tree)]),
        *(
            f"{key}: {path} is not here; name one that is: {key}=..."
            for key, path in named.items()
            if path and "://" not in path and not Path(path).exists()
        ),
    ]


class Started:
    """A daemon of this run. One that does not end in order is started again, as systemd would: it adopts what still runs, or
    comes back as another life of its node.
    """

    def __init__(self, name: str, begin: Callable[[], subprocess.Popen[bytes]], back: str) -> None:
        self.name, self._begin = name, begin
        self.back = back  # what somebody types for its node to come back, once it has been drained
        self.began: list[float] = []  # when it was started, of late
        self.start()

    def start(self) -> None:
        """A process of its own."""
        now = time.monotonic()
        self.began = [at for at in self.began if now < at + BURST_S] + [now]
        self.process = self._begin()

    @property
    def broken(self) -> bool:
        """Has it ended otherwise than a job or an operator would end it, and not too often lately?"""
        code = self.process.poll()
        return code is not None and code not in ORDERLY and len(self.began) < BURST


def mend(daemons: list[Started]) -> Iterator[str]:
    """Start again who has broken; each with a sentence. Not while the job ends: one that began then would begin it anew."""
    if any(daemon.process.poll() in OVER for daemon in daemons):
        return
    for daemon in daemons:
        if daemon.broken:
            code = daemon.process.returncode
            how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            daemon.start()
            yield f"the daemon of {daemon.name} ended ({how}) and is started again"


def launch(config: Path, overrides: list[str], log: Path) -> subprocess.Popen[bytes]:
    """A daemon of this run, in a session of its own: Ctrl-C reaches the run alone, which then ends them in order."""
    command = [
        sys.executable,
        "-P",  # what lies where the command is given must not stand in for a module of ours
        "-m",
        "elasticrl.cli.main",
        "daemon",
        "--foreground",
        node.PARENT,
        str(os.getpid()),
        "--config",
        str(config),
        *overrides,
    ]
    with appended(log) as output:
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True)


def follow(
    daemons: list[Started],
    run_dir: Path,
    job: str,
    every_s: float,
    steps: int,
    guard: Callable[[], str] = str,
    output: Output | None = None,
    last: Callable[[], dict[str, Any] | None] = lambda: None,
) -> int:
    """Print the status when more of it changes than steps, and under it how far the job is: on a terminal always on the same
    line. Until all daemons have ended; returns the worst of their exit codes. `guard` looks after the store. `output`: what
    a script writes is shown instead of how far it is. `last`: how the job stands once no daemon answers any more, which is
    shown where none has shown its end.
    """
    from elasticrl.daemon.client import Unanswered, ask

    live, shown, said, due, over = sys.stdout.isatty(), "", "", 0.0, False
    left: list[Started] = []  # who was drained, and that is said
    typer.echo("starting\n")
    while True:
        for mended in (*mend(daemons), *filter(None, [guard()])) if not over else ():
            typer.echo(f"{CLEAR if live else ''}{mended}\n")
        if all(daemon.process.poll() is not None for daemon in daemons):
            break
        done = [each for each in daemons if each.process.poll() == Outcome.FINISHED.value]
        try:
            picture = ask(find.daemon(run_dir, job), "status", deadline_s=3.0)
        except (find.NotFound, Unanswered):
            pass  # not yet; at the end nobody answers either
        else:
            picture = render.addressed(picture, job)
            # Who dies as the job ends would, if it were started again, wait for the others, who do not come back.
            over = picture["exit_code"] is not None
            fresh = [each for each in done if each not in left] if not over else []
            left += fresh
            typer.echo(
                "".join(
                    f"{CLEAR if live else ''}{each.name} has left. To bring it back: {each.back}\n\n" for each in fresh
                ),
                nl=False,
            )
            if (still := render.status(at_rest(picture), ages=False)) != shown:
                typer.echo(f"{CLEAR if live else ''}{render.status(picture, ages=False)}\n")
                shown, due = still, time.monotonic() + REST_S
            if output is not None:
                output.look(picture)
            else:
                said, due = tell(picture, steps, said, due)
        time.sleep(every_s)
    if output is not None:
        output.rest()
    elif live:
        typer.echo()  # the end of the line that told how far it was
    if not over:
        show_end(last(), job)
    codes = [daemon.process.returncode for daemon in daemons]
    return max((code if code >= 0 else 1 for code in codes), default=0)


def show_end(picture: dict[str, Any] | None, job: str) -> None:
    """What nobody has told who watches: a job can end between two looks."""
    if picture is not None:
        typer.echo(f"{render.status(render.addressed(picture, job), ages=False)}\n")


def tell(picture: Mapping[str, Any], steps: int, said: str, due: float) -> tuple[str, float]:
    """How far the job is; what was told of it last, and when there may be a next line where there is no terminal."""
    far = bar(picture["step"], steps) if steps else f"step {picture['step']:,}"
    if sys.stdout.isatty():
        typer.echo(f"{CLEAR}{far}", nl=False)
    elif far != said and time.monotonic() > due:
        typer.echo(far)
        return far, time.monotonic() + REST_S
    return said, due


def at_rest(picture: Mapping[str, Any]) -> dict[str, Any]:
    """The same without what every step changes."""
    still = {"step": 0, "milestone": ""}
    return {**picture, **still, "committed": 0, "rows": [{**row, **still} for row in picture["rows"]]}


def stop_job(daemons: list[subprocess.Popen[bytes]], run_dir: Path, job: str, *, within_s: float) -> None:
    """End the whole job with one last save. Nodes that drained one by one would hold, and wait for those that have left."""
    from elasticrl.daemon.client import Unanswered, ask

    try:
        ask(find.daemon(run_dir, job), "stop", deadline_s=3.0)
    except (find.NotFound, Unanswered):
        return  # then each is asked by itself
    next(late(daemons, within_s), None)  # the first: then each is asked by itself


def end(daemons: list[subprocess.Popen[bytes]], *, within_s: float) -> None:
    """Ask, wait, and make sure."""
    for process in daemons:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
    for process in late(daemons, within_s):
        process.kill()
        process.wait()


def late(daemons: list[subprocess.Popen[bytes]], within_s: float) -> Iterator[subprocess.Popen[bytes]]:
    """Wait for all of them, and give each that has not ended in time when that is known."""
    deadline = time.monotonic() + within_s
    for process in daemons:
        try:
            process.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            yield process


def vaults_of(folder: Path) -> list[Path]:
    """Of a job. None where the folder is somebody else's, or leads to one: nothing of ours is in it."""
    from elasticrl.base.owned import unsafe

    return [] if unsafe(folder / "any") else sorted(folder.glob("*"))


async def end_vaults(vaults: list[Path]) -> None:
    """A node that was drained on the way has left its vault for the others; now there are none."""
    from elasticrl.daemon.vault import dismiss

    for vault in vaults:
        await dismiss(vault, within_s=VAULT_S)


def start_store(tree: Any) -> Any:
    """An etcd for this run."""
    from elasticrl.diagnose.job_store import embedded
    from elasticrl.store import StoreError

    try:
        return asyncio.run(embedded(tree, dies_with_us=True).ensure())
    except (StoreError, OSError) as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(Exit.FAILED) from None


def guarding(tree: Any, etcd: Any) -> Callable[[], str]:
    """Looks after the etcd of this run, at each call; the answer is what is to be said of it, mostly nothing."""
    if etcd is None:
        return str
    from elasticrl.diagnose.job_store import embedded
    from elasticrl.store.embedded import Guard

    guard = Guard(replace(embedded(tree, dies_with_us=True), ports=(etcd.client_port, etcd.peer_port)))

    def look() -> str:
        # A loop is made where there is something to do alone: one that a signal cuts short as it is made complains.
        if guard.well():
            return ""
        wrong, again = asyncio.run(guard.look())
        return wrong or ("etcd is started again" if again else "")

    return look


def unfit(tree: Any, endpoints: tuple[str, ...], names: list[str], *, adopt: bool) -> str:
    """Why these nodes cannot begin by this store; empty if they can. (Its daemons would say so too, but in their logs.)"""
    from elasticrl.cli.kept import checkpoints
    from elasticrl.core.node.names import twin
    from elasticrl.daemon.adopt import Lost, settle
    from elasticrl.daemon.stored import living_here
    from elasticrl.diagnose.job_store import store_settings
    from elasticrl.store import StoreError, open_store

    async def look() -> str:
        async with open_store(store_settings(tree, endpoints)) as store:
            for name in names:
                if (beside := await living_here(store, name)) is not None:
                    return twin(beside)
            kept = await settle(store, checkpoints(tree), adopt=adopt)
        if kept is not None:
            typer.echo(f"the store had lost the job: going on from {kept.name} at {kept.place}")
        return ""

    try:
        return asyncio.run(look())
    except Lost as error:
        return str(error)
    except StoreError:
        return ""  # the daemons wait for it, and ask again


def stop_store(tree: Any) -> None:
    """End it; its data stay, so that the job can go on later."""
    from elasticrl.diagnose.job_store import embedded

    asyncio.run(embedded(tree, dies_with_us=True).stop())
