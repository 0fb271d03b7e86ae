"""`elasticrl doctor`: what is wrong with this machine, before anything breaks."""

import asyncio
import json
import os
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from elasticrl.base.parsed import parsed
from elasticrl.cli.options import AsJson, Config

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from elasticrl.config import Tree
    from elasticrl.contract.pairs import Result
    from elasticrl.diagnose.health import Check

MORE_S: Final = 10.0  # than it was given, until the test of other nodes is ended: it imports torch, and ends by itself
NAMED: Final = 8  # ways that a line names
MOST: Final = 16  # nodes of which all pairs are tested; each then has fifteen partners, one after the other

Nodes = Annotated[
    str | None,
    typer.Option(
        "--nodes",
        metavar="NAME=HOST:PORT,...",
        help="Test the way to these nodes too. Run it on each of them at the same time, with the same list (srun, pdsh).",
        show_default=False,
    ),
]
Me = Annotated[str | None, typer.Option("--me", metavar="NAME", help="Which of --nodes this is; the host's name.")]
Within = Annotated[float, typer.Option("--within", min=3.0, help="Seconds for the test of other nodes.")]
Least = Annotated[
    float,
    typer.Option("--least", metavar="MBIT", min=0.0, help="What each way must carry over one connection, in Mbit/s."),
]


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("doctor")(doctor)


def doctor(
    context: typer.Context,
    config: Config = None,
    nodes: Nodes = None,
    me: Me = None,
    as_json: AsJson = False,
    within: Within = 30.0,
    least: Least = 0.0,
) -> None:
    """Check this machine, and the way to others. Exits with 1 if anything fails, with 0 if there are only warnings."""
    from elasticrl.cli import ignored
    from elasticrl.cli.main import Exit
    from elasticrl.config import read
    from elasticrl.contract.pairs import findings
    from elasticrl.core.judge.judge import judge
    from elasticrl.diagnose import doctor as diagnosis
    from elasticrl.diagnose.health import FAIL, worst

    if not nodes:
        ignored.refuse(
            context, "me", "within", "least", because="only for the test of other nodes: name them with --nodes"
        )
    loaded = read(config) if config else None
    tree = loaded.tree if loaded else None
    listed = _nodes(nodes, me) if nodes else None
    results: list[Result] = []
    checks = asyncio.run(
        diagnosis.examine(
            tree, loaded.findings if loaded else (), env=os.environ, nodes=len(listed[1]) if listed else None
        )
    )
    if listed is not None:
        name, ends = listed
        results, problem = _probe(name, ends, within)
        checks += [*untested(problem), *diagnosis.probed(results, name, ends), *paced(results, tree, least)]
        checks += compared(results, name, ends)
    # Not of whoever met nobody: that a node does not answer fails it, and whose fault that is one end alone cannot know.
    verdict = judge(facts) if (facts := findings(results)) else None
    level = worst(checks)
    if as_json:
        plain: dict[str, object] = {
            "level": str(level), "checks": [{"number": i, **check.plain()} for i, check in enumerate(checks, 1)]
        }  # fmt: skip
        if results:
            own = [result.plain() for result in results if listed is not None and result.node == listed[0]]
            plain |= {"pairs": own, "matrix": measured(results), "verdict": verdict and verdict.plain()}
        typer.echo(json.dumps(plain, indent=2))
    else:
        typer.echo(page(checks, colour=sys.stdout.isatty()))
        if any(value is not None for result in results for value in (result.latency_ms, result.mbps)):
            typer.echo(drawn(measured(results)))
        if verdict is not None and verdict.nodes:
            typer.echo(f"The network: {verdict.cause} (confidence {verdict.confidence}). {verdict.remedy}")
    raise typer.Exit(Exit.FAILED if level is FAIL else Exit.OK)


def untested(problem: str) -> "Iterator[Check]":
    """What kept the test of other nodes from its end: what it has not told is not known to be well."""
    from elasticrl.diagnose.health import FAIL, Check

    if problem:
        yield Check(
            name="pairs", level=FAIL, value=f"the test of other nodes {problem}",
            why="The connections to them are not known to work.",
            remedy="Read its error output (stderr). Its port must be free (ss -tulpn). If a daemon uses it, name another port "
            "in --nodes, on all nodes.",
        )  # fmt: skip


def paced(results: "Iterable[Result]", tree: "Tree | None" = None, least: float = 0.0) -> "Iterator[Check]":
    """Whether one way is much slower than another or than `least`, and what a step's bytes take on the slowest."""
    from elasticrl.diagnose.health import FAIL, OK, WARN, Check

    rates = sorted((result.mbps, result.node, result.peer) for result in results if result.mbps)
    if not rates:
        return
    (slow, node, peer), fast = rates[0], rates[-1][0]
    uneven = slow < fast / 2
    yield Check(
        name="pair.rate", level=WARN if uneven else OK, value=f"slowest: {node} to {peer} with {slow:,.0f} Mbit/s over one "
        f"connection; fastest: {fast:,.0f}", why="A collective is as fast as its slowest connection.",
        remedy="ethtool on both (speed, duplex), cable, switch port; then ask again." if uneven else "",
    )  # fmt: skip
    if least:  # two nodes, or a fabric that is slow everywhere, are not slow beside others
        short = [f"{one} to {other} {rate:,.0f}" for rate, one, other in rates if rate < least]
        yield Check(
            name="pair.least", level=FAIL if short else OK, value=f"{len(short)} of {len(rates)} connections carry less than "
            f"{least:,.0f} Mbit/s{': ' if short else ''}{', '.join(short[:NAMED])}{', ...' if short[NAMED:] else ''}",
            why="--least requires this rate on each connection.",
            remedy="ethtool and the switch port's counters for a node that is in all of them, or of the switch; then ask "
            "again." if short else "",
        )  # fmt: skip
    if tree is None or not (needs := _wire(tree)):
        return
    seconds, cap = needs * 8 / (slow * 1e6), tree.timeouts.phase.update_s or tree.timeouts.default_phase_s
    late = seconds > cap / 2
    yield Check(
        name="pair.step", level=WARN if late else OK, value=f"a step's {needs / 1e6:,.0f} MB take {seconds:.2g} s at that rate",
        why=f"timeouts.phase.update gives an update {cap:g} s, computing included (`elasticrl plan` has the bytes, by part).",
        remedy="A faster network, fewer updates in a step (ppo.mini_batch, ppo.epochs), or a longer phase." if late else "",
    )  # fmt: skip


def compared(results: "list[Result]", me: str, ends: "dict[str, str]") -> "Iterator[Check]":
    """The odd one out; and, where the nodes are too many for all pairs, that only some were tried."""
    from elasticrl.diagnose.doctor import compared
    from elasticrl.diagnose.fabric import active
    from elasticrl.diagnose.health import SKIP, Check

    yield from compared(results, me, active())
    if len(ends) > MOST:
        yield Check(
            name="matrix", level=SKIP, value=f"{len(ends)} nodes: this one tested its two neighbours in the ring of all; up to "
            f"{MOST} nodes each tests all others",
        )  # fmt: skip


def measured(results: "list[Result]") -> "dict[str, Any]":
    """For JSON: rows ask, columns answer; null is not measured. `odd`: ways far off the others, and what they share."""
    from elasticrl.contract.pairs import ring
    from elasticrl.core.judge.matrix import late, rates, slow, trips

    names = ring(node for result in results for node in (result.node, result.peer))
    by_pair = {(result.node, result.peer): result for result in results}

    def table(what: str) -> list[list[float | None]]:
        return [[getattr(by_pair.get((a, b)), what, None) for b in names] for a in names]

    odd = {
        what: None if found is None else {
            "nodes": list(found.reach.nodes), "links": [list(pair) for pair in found.reach.links],
            "apart": [list(part) for part in found.reach.apart], "ways": [list(pair) for pair in found.bad],
            "usual": found.usual, "worst": found.worst,
        }
        for what, found in (("latency_ms", late(trips(results))), ("mbps", slow(rates(results))))
    }  # fmt: skip
    return {"nodes": list(names), "latency_ms": table("latency_ms"), "mbps": table("mbps"), "odd": odd}


def drawn(plain: "dict[str, Any]") -> str:
    """For people: one table for each measure; `*` marks the ways, and the nodes, that are odd."""
    names, lines = plain["nodes"], []
    for what, title in (("latency_ms", "Round trip in ms"), ("mbps", "Mbit/s over one connection, from row to column")):
        odd = plain["odd"][what] or {"nodes": [], "ways": []}
        bad = {frozenset(way) for way in odd["ways"]}
        heads = [f"{name}*" if name in odd["nodes"] else name for name in names]
        rows = [
            [head, *("" if value is None else f"{value:.4g}" + "*" * (frozenset((a, b)) in bad)
                     for b, value in zip(names, row, strict=True))]
            for a, head, row in zip(names, heads, plain[what], strict=True)
        ]  # fmt: skip
        widths = [max(map(len, column)) for column in zip(["", *heads], *rows, strict=True)]
        lines.append(f"{title}{' (* far off the others)' if bad else ''}:")
        table = [["", *heads], *rows]
        lines += ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip() for row in table]
    return "\n".join(lines)


def _wire(tree: "Tree") -> int:
    """Bytes that a worker sends in a step; 0 where the program is another one, or the model cannot be read here."""
    from elasticrl.ppo import estimate
    from elasticrl.ppo.shapes import ShapeError

    if tree.job.program != "elasticrl.ppo":
        return 0
    try:
        return sum(line.bytes for line in estimate.read(tree).wire)
    except (ShapeError, ValueError, OSError):
        return 0


def page(checks: "list[Check]", *, colour: bool = False) -> str:
    """For people: the bad ones with why, each with what to do if there is something, then the verdict."""
    from elasticrl.cli.render import DIM, GREEN, RED, YELLOW, paint
    from elasticrl.diagnose.health import worst

    tone = {"ok": GREEN, "warn": YELLOW, "fail": RED, "skip": DIM}
    lines = []
    for number, check in enumerate(checks, 1):
        lines.append(
            f"{number:3} {paint(f'{check.level:4}', tone[check.level], on=colour)}  {check.name}: {check.value}"
        )
        if check.level in {"warn", "fail"}:
            lines += [f"           {check.why}"] if check.why else []
        lines += [f"           -> {check.remedy}"] if check.remedy else []
    counts = [sum(check.level == level for check in checks) for level in ("fail", "warn", "ok", "skip")]
    word = {"fail": "NOT READY", "warn": "READY, with warnings", "ok": "READY"}[worst(checks)]
    verdict = paint(word, tone[worst(checks)], on=colour)
    lines.append(f"{verdict}: {counts[0]} failed, {counts[1]} warnings, {counts[2]} ok, {counts[3]} skipped")
    return "\n".join(lines)


def _nodes(text: str, me: str | None) -> tuple[str, dict[str, str]]:
    """This node's name and everybody's address; a mistake ends the command with a sentence."""
    import socket

    from elasticrl.cli.main import Exit

    ends = dict(part.partition("=")[::2] for part in text.split(",") if part)
    bad = [name for name, end in ends.items() if not end.rpartition(":")[2].isdigit() or not end.rpartition(":")[0]]
    name = me or socket.gethostname()
    if bad or name not in ends:
        said = (
            f"{', '.join(bad)}: not NAME=HOST:PORT" if bad else f"{name} is none of them; say which one this is: --me"
        )
        typer.echo(f"--nodes: {said}", err=True)
        raise typer.Exit(Exit.REFUSED)
    return name, ends


def _probe(me: str, ends: dict[str, str], within_s: float) -> "tuple[list[Result], str]":
    """The probe as a process of its own: it imports torch, and ends when it is told to. What it told, and what went wrong."""
    import subprocess

    from elasticrl.contract.pairs import everyone, result_of
    from elasticrl.diagnose.doctor import nccl_here, versions

    # The list itself is the token: who was started with another list does not belong to this look.
    task = {"me": me, "token": ",".join(sorted(ends)), "nodes": ends, "within_s": within_s, "start_s": within_s / 3,
            "gloo_s": within_s / 4, "facts": json.dumps(versions()), "together": True,
            "rounds": everyone(ends) if len(ends) <= MOST else (), "nccl": "on" if nccl_here() else "off"}  # fmt: skip
    command, problem = [sys.executable, "-P", "-m", "elasticrl.diagnose.probe", "-"], ""
    try:
        done = subprocess.run(
            command, input=json.dumps(task).encode(), stdout=subprocess.PIPE, timeout=within_s + MORE_S
        )
    except subprocess.TimeoutExpired as late:
        said, problem = late.stdout or b"", f"did not end within {within_s + MORE_S:g} s"
    else:
        said, code = done.stdout, done.returncode
        if code:
            problem = f"ended with {f'signal {-code}' if code < 0 else f'exit code {code}'}"
    results = []
    for line in said.splitlines():
        with suppress(ValueError):  # a library's word, or what was cut off
            results.append(result_of(parsed(line)))
    if not results and len(ends) > 1:
        problem = problem or "gave no result"
    return results, problem
