"""One node's daemon in this process. typer, which takes a tenth of its start, is needed for help and for mistakes only.

The one idea: arguments as a unit, a script or `elasticrl run` write them are read here (`plain`); whatever else was written is
typer's to read, to refuse and to explain.
"""

import asyncio
import gc
import os
import signal
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

PARENT = "--die-with"  # for `elasticrl run` and the task under Slurm, which start another daemon in the place of one that dies


class Asked(NamedTuple):
    """What the verb `daemon` was given."""

    config: Path
    overrides: tuple[str, ...] = ()
    foreground: bool = False
    adopt: bool = False
    again: bool = False
    parent: int = 0  # whose death is its own; 0: nobody's


def plain(arguments: Sequence[str]) -> Asked | None:
    """The arguments after the verb, if there is nothing to explain about them.

    >>> plain(["--config", "job.yaml", "node.name=n0"])
    Asked(config=PosixPath('job.yaml'), overrides=('node.name=n0',), foreground=False, adopt=False, again=False, parent=0)
    >>> plain(["--config", "job.yaml", "--foregruond"])
    """
    config: list[str] = []
    overrides, flags, parents = [], [], []
    words = iter(arguments)
    for word in words:
        if word in {"--config", "-c"}:
            config.append(next(words, "-"))
        elif word in {"--foreground", "--adopt", "--again"}:
            flags.append(word)
        elif word == PARENT:
            parents.append(next(words, "-"))
        elif "=" in word and not word.startswith("-"):
            overrides.append(word)
        else:
            return None
    if len(config) != 1 or config[0].startswith("-") or len(flags) != len(set(flags)):
        return None
    if len(parents) > 1 or not all(map(str.isdecimal, parents)):
        return None
    parent = int(parents[0]) if parents else 0
    given = ("--foreground" in flags, "--adopt" in flags, "--again" in flags)
    return Asked(Path(config[0]), tuple(overrides), *given, parent)


def follows(asked: Asked) -> int:
    """Whose end is this daemon's too; 0: nobody's. One that was started under nohup outlives its shell."""
    if not asked.foreground:
        return 0
    return asked.parent or (0 if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else os.getppid())


def run(asked: Asked) -> int:
    """Run the daemon; its exit code."""
    gc.disable()  # until all is imported: looking again and again at what stays takes a tenth of the start
    from elasticrl.agent.spec import NO_PLUGINS
    from elasticrl.contract.model import REFUSED

    os.environ.setdefault(*NO_PLUGINS)  # before pydantic's first model is built; the agent does not get it
    from elasticrl.config import ConfigError, load

    try:
        tree = load(asked.config, asked.overrides)
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        return REFUSED
    if parent := follows(asked):  # one that is killed takes its daemons along: the kernel sends them a signal
        from elasticrl.base.parent import die_with, stops

        die_with(parent, stops()[0])
    fresh = partial(load, asked.config, asked.overrides)
    return serve(
        tree, keep=not asked.foreground, adopt=asked.adopt, again=asked.again, starter=asked.parent, reload=fresh
    )


def serve(
    tree: Any,
    *,
    keep: bool,
    adopt: bool = False,
    again: bool = False,
    starter: int = 0,
    reload: Callable[[], Any] | None = None,
) -> int:
    """Run a daemon by a configuration."""
    from elasticrl.cli.kept import checkpoints
    from elasticrl.contract.model import REFUSED
    from elasticrl.daemon.history import History
    from elasticrl.daemon.main import REFUSALS, Daemon
    from elasticrl.daemon.refusal import FAILED, FULL
    from elasticrl.daemon.resident import Resident
    from elasticrl.telemetry.log import set_up

    history = History()
    pretty = {"auto": None, "console": True, "json": False}[tree.telemetry.format]
    node: Resident | None = None
    log = set_up(
        pretty=pretty,
        level=lambda: (node.tree if node else tree).telemetry.level,
        tap=history,
        names=lambda: node.names if node else {"job": tree.job.name},
    )
    try:
        if tree.node.role == "rollout":
            from elasticrl.daemon.rollout import RolloutDaemon

            node = RolloutDaemon(tree, log=log, history=history, keep=keep)
        else:
            node = Daemon(
                tree, log=log, history=history, keep=keep, starter=starter, reload=reload, kept=checkpoints(tree),
                adopt=adopt, again=again,
            )  # fmt: skip
        gc.freeze()  # what was imported stays; collections need not look at it
        gc.enable()
        return asyncio.run(node.run())
    except REFUSALS as error:
        log.info("daemon.refused", reason=str(error))
        return REFUSED
    except OSError as error:
        if error.errno not in FULL:
            log.exception("bug")
        else:
            places = f"node.run_dir ({tree.node.run_dir}), node.state_dir ({tree.node.state_dir}), telemetry.log_dir"
            what = f"{error.strerror}: {error.filename or f'see df of {places} ({tree.telemetry.log_dir})'}"
            log.info("daemon.refused", reason=f"{what}. Free space there; whoever started this daemon starts it again")
        return FAILED
    except Exception:
        log.exception("bug")
        return FAILED
