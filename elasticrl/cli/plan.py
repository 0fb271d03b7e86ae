"""`elasticrl plan`: what a job will need, before anything starts, with the arithmetic; or the declared flow of its step."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from elasticrl.cli.main import Exit
from elasticrl.cli.options import AsJson, Overrides

if TYPE_CHECKING:
    from elasticrl.config import Tree
    from elasticrl.config.training import FrozenPlacement
    from elasticrl.ppo.estimate import Estimate, Line

File = Annotated[Path, typer.Argument(metavar="CONFIG", help="A configuration in YAML.", show_default=False)]


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("plan")(plan)


def plan(
    context: typer.Context,
    file: File,
    overrides: Overrides = None,
    graph: Annotated[bool, typer.Option("--graph", help="Print the stages of a step instead.")] = False,
    workers: Annotated[int | None, typer.Option("--workers", min=1, help="Workers of the gang; else the most.")] = None,
    memory: Annotated[
        str | None, typer.Option("--memory", metavar="SIZE", help="Memory of each worker's device, such as 80GiB.")
    ] = None,
    parameters: Annotated[
        str | None,
        typer.Option("--parameters", metavar="COUNT", help="Of the model of a program of your own: 7B, 350M, 1.5e9."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Estimate memory, bytes on the wire and phase budgets of CONFIG; nothing is started, no weights are read."""
    from elasticrl.cli import ignored
    from elasticrl.config import ConfigError, load
    from elasticrl.config.units import parse_count, parse_size
    from elasticrl.ppo import estimate
    from elasticrl.ppo.shapes import ShapeError

    if graph:
        ignored.refuse(
            context, "workers", "memory", "parameters", "as_json", because="only without --graph, which reckons nothing"
        )
    try:
        tree = load(file, overrides or ())
        if graph:
            typer.echo(_graph(tree))
            return
        limit = parse_size(memory) if memory else None
        if parameters is not None:
            found = estimate.counted(tree, parse_count(parameters), workers=workers, memory_bytes=limit)
        else:
            found = _read(tree, workers, limit)
    except (ConfigError, ShapeError, ValueError) as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(Exit.REFUSED) from error
    typer.echo(json.dumps(_plain(found), indent=2) if as_json else _text(found))


def _read(tree: "Tree", workers: int | None, limit: int | None) -> "Estimate":
    """By the model that the configuration names; a program of one's own may have another."""
    from elasticrl.config.relations import OUR_TRAINER
    from elasticrl.ppo import estimate
    from elasticrl.ppo.shapes import ShapeError

    try:
        return estimate.read(tree, workers=workers, memory_bytes=limit)
    except ShapeError as error:
        if tree.job.program == OUR_TRAINER or tree.model.path is None:
            raise
        raise ShapeError(f"{error} Or say how many parameters {tree.job.program} trains: --parameters 7B.") from None


def _graph(tree: "Tree") -> str:
    from elasticrl.ppo import flow
    from elasticrl.ppo.staleness import staleness_of

    place, usual = tree.placement, tree.model.strategy
    kinds = [_kind(one.strategy or usual, one.offload) for one in (place.actor, place.critic)]
    actor, critic = (f"every worker, {kind}" for kind in kinds)
    both = actor if actor == critic else f"{actor}; and {kinds[1]}"
    placed = {"actor": actor, "critic": critic, "actor+critic": both, "actor+ref": actor}
    adapted = tree.model.lora.rank and tree.model.ref_path is None and place.ref.where == "train"
    placed["ref"] = f"{actor}, without its adapters" if adapted else _frozen(place.ref)
    placed["reward"] = _frozen(place.reward) if tree.reward.model else "every worker"
    placed["rollout"] = f"{_where('rollout' if tree.rollout.nodes else 'train')}, engine {tree.rollout.engine}"
    tied, apart = tree.model.value_head == "tied", tree.rollout.engine != "torch"
    return flow.of(tree.ppo, tied=tied, staleness=staleness_of(tree), apart=apart).text(placed)


def _kind(strategy: str, offload: str) -> str:
    return strategy if offload == "none" else f"{strategy}, offload {offload}"


def _frozen(placement: "FrozenPlacement") -> str:
    """On rollout nodes a model is whole, and stays."""
    where = _where(placement.where)
    return where if placement.where == "rollout" else f"{where}, {_kind(placement.strategy, placement.offload)}"


def _where(place: str) -> str:
    return "every worker" if place == "train" else "rollout nodes"


def _plain(found: "Estimate") -> dict[str, object]:
    from dataclasses import asdict

    return asdict(found) | {"fixed": found.fixed, "peak": found.peak}


def _text(found: "Estimate") -> str:
    from elasticrl.cli.render import size
    from elasticrl.report.table import table

    def block(title: str, lines: "tuple[Line, ...]") -> list[str]:
        rows = [(f"  {line.role}", line.what, size(line.bytes), line.formula) for line in lines]
        return [title, *(table(rows[0], rows[1:]) if rows else ["  nothing"])]

    budgets = [
        (f"  {b.phase}", f"{b.seconds:.3g}s", f"{b.suggested_s:.3g}s", f"{b.cap_s:g}s", b.formula)
        for b in found.budgets
    ]
    largest = (
        "give --memory to know it" if found.memory_limit is None else str(found.largest_micro_tokens or "none fits")
    )
    stays = [
        f"{found.workers} workers; each of them needs, on its {found.device}:",
        *block("memory that stays", found.memory),
    ]
    host = block("in host memory, for each worker", found.host)
    notes = [f"# {note}" for note in found.notes]
    if found.micro_tokens is None:
        wire = block("bytes that it sends in an update (one backward pass for each lane)", found.wire)
        return "\n".join([*stays, f"  together {size(found.fixed)}", *host, *wire, *notes])
    return "\n".join(
        [
            *stays,
            *block("and the greatest of these", found.transient),
            f"  peak {size(found.peak)}; passes of {found.micro_tokens} tokens, the largest that fit: {largest}",
            *host,
            *block("bytes that it sends in a step", found.wire),
            "phase budgets (orders of magnitude: they are learned in the run, and capped by timeouts.phase)",
            *table(("  phase", "expected", "suggested", "cap", "by"), budgets),
            *notes,
        ]
    )
