"""`elasticrl`: finds the module of the verb that was asked for, and lets typer do the rest.

The one idea: a table names each verb's module, and only that one is imported; help and shell completion import all. So a
verb costs what it needs: `version` and `status` never pay for pydantic, gRPC or torch. A verb module imports at its top only
the standard library and typer, and what it works with inside of its functions. `daemon`, which is to be there soon, does
without typer where nothing has to be explained (`node`).

To add verbs: write `elasticrl/cli/<group>.py` with a `register(app)`, and a row for each verb in VERBS.
"""

import sys
from collections.abc import Sequence
from enum import IntEnum
from importlib import import_module
from io import TextIOWrapper
from typing import TYPE_CHECKING, Final

from elasticrl.cli import terminal

if TYPE_CHECKING:
    import typer

#: verb -> the module whose `register` brings it, in the order that help lists them.
VERBS: Final = {
    "demo": "elasticrl.cli.demo",
    "init": "elasticrl.cli.init",
    "run": "elasticrl.cli.serve",
    "daemon": "elasticrl.cli.serve",
    "agent": "elasticrl.cli.serve",
    "status": "elasticrl.cli.operate",
    "top": "elasticrl.cli.top",
    "events": "elasticrl.cli.lines",
    "logs": "elasticrl.cli.lines",
    "drain": "elasticrl.cli.operate",
    "admit": "elasticrl.cli.operate",
    "pause": "elasticrl.cli.operate",
    "resume": "elasticrl.cli.operate",
    "stop": "elasticrl.cli.operate",
    "replay": "elasticrl.cli.replay",
    "diagnose": "elasticrl.cli.diagnose",
    "incidents": "elasticrl.cli.incidents",
    "doctor": "elasticrl.cli.doctor",
    "report": "elasticrl.cli.report",
    "verify": "elasticrl.cli.state",
    "audit": "elasticrl.cli.state",
    "checkpoint": "elasticrl.cli.state",
    "certify": "elasticrl.cli.certify",
    "plan": "elasticrl.cli.plan",
    "config": "elasticrl.cli.config",
    "support-bundle": "elasticrl.cli.bundle",
    "version": "elasticrl.cli.version",
}


class Exit(IntEnum):
    """What a verb's exit code says. Stable: scripts rely on it. A job's own end is `contract.model.Outcome`."""

    OK = 0
    FAILED = 1  # it could not be done; the message says why
    REFUSED = 2  # the arguments or the configuration are wrong; nothing was done
    INTERRUPTED = 130  # Ctrl-C of `run`, `demo` and `status --watch`


def build(arguments: Sequence[str]) -> "typer.Typer":
    """The application with the verb that these arguments ask for, or with all verbs if they ask for none of them."""
    import typer

    app = typer.Typer(
        name="elasticrl",
        help="Fault-tolerant elastic training for LLM post-training.",
        no_args_is_help=True,
        # Tracebacks with local variables would print passwords.
        pretty_exceptions_enable=False,
    )
    app.callback()(_options)  # with a single verb, typer would make the verb's name optional
    asked = arguments[0] if arguments else ""
    modules = [VERBS[asked]] if asked in VERBS else dict.fromkeys(VERBS.values())
    for module in modules:
        import_module(module).register(app)
    return app


def main(arguments: Sequence[str] | None = None) -> None:
    """The entry point. Ends the process with one of `Exit`, or the job's own exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # what the terminal's locale cannot say ends no command
            stream.reconfigure(errors="backslashreplace")
    terminal.guard()
    if list(arguments[:1]) == ["daemon"]:
        from elasticrl.cli import node

        if asked := node.plain(arguments[1:]):
            sys.exit(node.run(asked))
    own, said = list(arguments), None
    if own[:1] == ["run"]:
        from elasticrl.cli.torchrun import asked as understood

        said = understood(own[1:])
        own = ["run", *said.own]
    build(own)(args=own, prog_name="elasticrl", obj=said)


def _options() -> None:
    """Fault-tolerant elastic training for LLM post-training."""


if __name__ == "__main__":
    main()
