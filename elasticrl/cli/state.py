"""`elasticrl verify`, `audit` and `checkpoint`: what a run left on disks, and whether it is what it should be.

The one idea: everything here is read from the run's own files and computed again, with no daemon, store or GPU; so it works on
a copy, on a laptop, and years later. RUN is a run's directory; where nodes kept theirs on their own disks, put them side by
side in one directory.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, NoReturn

import typer

from elasticrl.cli.main import Exit
from elasticrl.cli.options import AsJson, Yes
from elasticrl.cli.render import size
from elasticrl.report.table import table

if TYPE_CHECKING:
    from elasticrl.config import Tree
    from elasticrl.runtime.checkpoint.manifest import Manifest
    from elasticrl.runtime.checkpoint.place import Place
    from elasticrl.runtime.checkpoint.shelf import Entry

Run = Annotated[Path, typer.Argument(metavar="RUN", help="A run's directory.", show_default=False)]
Other = Annotated[Path | None, typer.Argument(metavar="[RUN_B]", help="Another run's directory.", show_default=False)]
BEST: Final = "best"  # stands for the checkpoint that scored best when it was evaluated
IDLE_S: Final = 86400.0  # a save that nobody has written into for so long is nobody's: far over any checkpoint.timeout
Where = Annotated[
    str,
    typer.Argument(metavar="RUN_OR_URL", help="A run's or a checkpoint directory, or a URL.", show_default=False),
]
Which = Annotated[
    str | None, typer.Argument(metavar="[NAME]", help="One checkpoint, as `list` calls it.", show_default=False)
]


def register(app: typer.Typer) -> None:
    """Add the verbs."""
    app.command("verify")(verify)
    app.command("audit")(audit)
    group = typer.Typer(name="checkpoint", help="List, verify, prune and export checkpoints.", no_args_is_help=True)
    group.command("list")(checkpoint_list)
    group.command("verify")(checkpoint_verify)
    group.command("prune")(checkpoint_prune)
    group.command("export")(checkpoint_export)
    group.command("assemble")(checkpoint_assemble)
    app.add_typer(group)


def verify(run: Run, other: Other = None, as_json: AsJson = False) -> None:
    """Did two runs compute the same bits? Names the first step where they part. With one run: did every step that was computed
    again come to the same bits? Exits with 1 if not, and with 2 if there is nothing to read.
    """
    from elasticrl.runtime.chronicle import FOLDER, compare, read
    from elasticrl.runtime.vault.errors import StateError

    run, other = run_of(run, FOLDER), None if other is None else run_of(other, FOLDER)
    try:
        histories = {str(each): read(each) for each in (run, other) if each is not None}
    except (StateError, OSError) as error:
        refuse(str(error))
    beside = None if other is None else compare(histories[str(run)], histories[str(other)])
    ok = all(history.ok for history in histories.values()) and (beside is None or beside.ok)
    if as_json:
        runs = [
            {
                "run": name,
                "ok": history.ok,
                "steps": len(history.steps),
                "generations": history.generations,
                "rerun": history.rerun,
                "digests": history.lines,
                "torn": history.torn,
                "kind": history.kind,
                "findings": history.findings,
            }
            for name, history in histories.items()
        ]
        compared = None
        if beside is not None:
            compared = {
                "ok": beside.ok,
                "steps": beside.steps,
                "first": beside.first,
                "last": beside.last,
                "parted": beside.parted,
                "digests": beside.digests,
                "why": beside.why,
            }
        typer.echo(json.dumps({"ok": ok, "runs": runs, "compared": compared}, indent=2))
    else:
        for name, history in histories.items():
            if beside is None or not history.ok:
                typer.echo(f"{name}: {history.sentence}")
        if beside is not None:
            typer.echo(beside.sentence)
    raise typer.Exit(Exit.OK if ok else Exit.FAILED)


def audit(
    run: Run,
    through: Annotated[
        int | None,
        typer.Option("--through", min=0, help="Up to this step, which must be complete.", show_default=False),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Prove from a run's ledger that every sample was used exactly once, or name those that were not. Exits with 1 if any was
    lost or used twice, and with 2 if there is no ledger.
    """
    from dataclasses import asdict

    from elasticrl.runtime.data.audit import audit as judge
    from elasticrl.runtime.data.ledger import FOLDER
    from elasticrl.runtime.vault.errors import StateError
    from elasticrl.runtime.vault.version import Version

    run = run_of(run, FOLDER)
    try:
        found = judge(run, through=None if through is None else Version(through, 1 << 62))
    except (StateError, OSError) as error:
        refuse(str(error))
    if through is not None and found.last < through:
        fail(f"{run} has samples up to step {found.last} only, and not up to {through}", as_json=as_json)
    typer.echo(json.dumps({"ok": found.ok, **asdict(found)}, indent=2) if as_json else found.sentence)
    raise typer.Exit(Exit.OK if found.ok else Exit.FAILED)


def checkpoint_list(where: Where, as_json: AsJson = False) -> None:
    """What is there, the newest first. Reads manifests, not data: `verify` says whether it can be trusted."""
    from elasticrl.runtime.checkpoint.shelf import listing

    place = place_of(where)
    with there():
        entries = listing(place)
    if as_json:
        typer.echo(json.dumps({"place": str(place), "checkpoints": [plain(entry) for entry in entries]}, indent=2))
        return
    if not entries:
        typer.echo(f"no checkpoints at {place}")
        return
    rows = [
        (
            entry.name,
            str(entry.version.step),
            str(entry.generation),
            "BROKEN" if entry.problem else _state(entry),
            size(entry.manifest.nbytes) if entry.manifest else "-",
            entry.manifest.written if entry.manifest else "-",
            entry.problem or contents(entry.manifest),
        )
        for entry in entries
    ]
    typer.echo("\n".join(table(("name", "step", "generation", "state", "size", "written", "contents"), rows)))


def checkpoint_verify(where: Where, name: Which = None, as_json: AsJson = False) -> None:
    """Hash every file again, of one checkpoint or of all, and say which shard of which node is bad. Exits with 1 if any is."""
    from dataclasses import asdict

    from elasticrl.runtime.checkpoint import shelf

    place = place_of(where)
    with there():
        entries = [entry for entry in shelf.listing(place) if name in (None, entry.name)]
    if not entries:
        refuse(f"there is no checkpoint{f' {name}' if name else ''} at {place}; `elasticrl checkpoint list` shows them")
    problems: dict[str, tuple[shelf.Problem, ...]] = {}
    for entry in entries:
        with there():
            problems[entry.name] = found = shelf.verify(place, entry.name)
        if as_json:
            continue
        for problem in found:
            typer.echo(problem.sentence)
        if not found and entry.manifest is not None:
            typer.echo(
                f"{entry.name}: good, {_state(entry)}, {len(entry.manifest.files)} files, {size(entry.manifest.nbytes)}"
            )
    trusted = next((entry.name for entry in entries if entry.committed and not problems[entry.name]), None)
    bad = sum(bool(found) for found in problems.values())
    if as_json:
        rows = [
            {**plain(entry), "ok": not problems[entry.name], "problems": [asdict(p) for p in problems[entry.name]]}
            for entry in entries
        ]
        typer.echo(
            json.dumps({"ok": not bad, "place": str(place), "newest_good": trusted, "checkpoints": rows}, indent=2)
        )
    elif name is None:
        on = f"a run would resume from {trusted}" if trusted else "no run could resume from any of them"
        if trusted and any(entry.manifest and entry.manifest.own is not None for entry in entries):
            on = f"of {trusted} this disk's part is good; a run resumes from the newest of which all nodes' parts are"
        typer.echo(f"{bad} of {len(entries)} bad; {on}")
    raise typer.Exit(Exit.FAILED if bad else Exit.OK)


def _state(entry: "Entry") -> str:
    manifest = entry.manifest
    state = "committed" if entry.committed else "not committed"
    if manifest is None or len(manifest.shards) == manifest.world:
        return state
    return f"{state}, {len(manifest.shards)} of {manifest.world} parts"


def checkpoint_assemble(
    run: Run,
    target: Annotated[Path, typer.Argument(metavar="TARGET", help="A directory for checkpoints.", show_default=False)],
    name: Annotated[
        str | None, typer.Option("--name", help="Which one; the newest whole one if none is named.", show_default=False)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Make one whole checkpoint of the parts in nodes' own directories, put side by side in RUN (checkpoint.shared: false)."""
    from elasticrl.runtime.checkpoint.local import assemble
    from elasticrl.runtime.checkpoint.place import place
    from elasticrl.runtime.vault.errors import StateError

    disks = {path.name: place(path) for path in sorted(run.glob("*/")) if place(path).names()}
    if not disks:
        refuse(f"no directory in {run} has checkpoints: put those of all nodes there, side by side")
    try:
        made = assemble(disks, place(target), name=name)
    except StateError as error:
        fail(str(error), as_json=as_json)
    if as_json:
        plainly = {"ok": True, "name": made.name, "target": str(target), "nbytes": made.nbytes, "parts": made.world}
        typer.echo(json.dumps(plainly, indent=2))
        return
    typer.echo(f"{made.name}: {made.world} parts of {len(disks)} nodes, {size(made.nbytes)}, in {target}")


def checkpoint_prune(
    where: Where,
    keep_last: Annotated[int, typer.Option("--keep-last", min=1, help="The newest so many stay.")] = 3,
    keep_every: Annotated[int, typer.Option("--keep-every", min=0, help="Those at multiples of this step stay.")] = 0,
    keep_best: Annotated[
        bool, typer.Option("--keep-best", help="The one that scored best when evaluated stays.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would go, and remove nothing.")] = False,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Remove old checkpoints, and what saves left that nobody goes on with: those that a commit has overtaken, and those into
    which nothing was written for a day. Never the newest good one, which is found by hashing (at a URL by sizes), and no
    checkpoint newer than the last commit.
    """
    from elasticrl.cli.operate import confirm
    from elasticrl.runtime.checkpoint import shelf
    from elasticrl.runtime.vault.errors import StateError

    place = place_of(where)
    try:
        going = shelf.prunable(place, keep_last=keep_last, keep_every=keep_every, keep_best=keep_best, idle_s=IDLE_S)
        if going and not dry_run:
            if not as_json:
                typer.echo("\n".join(going))
            confirm(f"{len(going)} of these are removed from {place} for good.", yes=yes)
            shelf.clear(place, going)
    except StateError as error:
        fail(str(error), as_json=as_json)
    if as_json:
        typer.echo(json.dumps({"place": str(place), "removed": not dry_run, "names": going}, indent=2))
    elif dry_run or not going:
        typer.echo("\n".join(going) if going else f"nothing at {place} may go")


def checkpoint_export(
    where: Where,
    target: Annotated[Path, typer.Argument(metavar="TARGET", help="A new directory.", show_default=False)],
    name: Annotated[
        str | None,
        typer.Option(
            "--name",
            help="Which one; best: the one that scored best when evaluated; the newest good one if none is named.",
            show_default=False,
        ),
    ] = None,
    prefix: Annotated[
        str | None,
        typer.Option("--prefix", help="The part that is the model, with a dot: model. or actor., unless you say it."),
    ] = None,
    dtype: Annotated[
        str | None, typer.Option("--dtype", help="Convert to this, such as bfloat16.", show_default=False)
    ] = None,
    beside: Annotated[
        list[Path] | None,
        typer.Option("--beside", metavar="FILE", help="Copy this there too: config.json, tokenizer.json.", exists=True),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(
            "--config",
            metavar="FILE",
            help="The configuration of the job, if elasticrl.ppo trained it: adapters are merged into its model, and the "
            "model's config.json and tokenizer are written too.",
            exists=True,
        ),
    ] = None,
    uncommitted: Annotated[bool, typer.Option("--uncommitted", help="Also what was never committed.")] = False,
    as_json: AsJson = False,
) -> None:
    """Write a checkpoint's model as Hugging Face expects it: safetensors, and their index if there are several."""
    from elasticrl.config import ConfigError, load
    from elasticrl.runtime.checkpoint import shelf
    from elasticrl.runtime.vault.errors import StateError

    if config is not None and (prefix or beside):
        refuse("--prefix and --beside say by hand what --config says: give the one or the others")
    try:
        tree = None if config is None else load(config)
    except ConfigError as error:
        refuse(str(error))
    place = place_of(where, tree)

    def exported(name: str) -> tuple[Path, ...]:
        from elasticrl.runtime.checkpoint.export import export

        if tree is None:
            return export(place, name, target, prefix=prefix, dtype=dtype, beside=beside or ())
        from elasticrl.ppo.export import export as export_actor

        return export_actor(place, name, target, tree, dtype=dtype)

    passed_over: tuple[str, ...] = ()
    try:
        if name == BEST:
            best = shelf.best_of(shelf.listing(place), uncommitted=uncommitted)
            if best is None:
                refuse(
                    f"no committed checkpoint at {place} has a score: set evaluate.every, and checkpoint.keep_best, "
                    "without which the best is pruned"
                )
            name = best.name
        if name is None:
            name, passed_over, files = _newest(place, exported, uncommitted=uncommitted)
        else:
            files = exported(name)
    except StateError as error:
        fail(str(error), as_json=as_json)
    nbytes = sum(file.stat().st_size for file in files)
    if as_json:
        plainly = {"ok": True, "name": name, "target": str(target), "nbytes": nbytes}
        files_out = [file.name for file in files]
        typer.echo(json.dumps({**plainly, "files": files_out, "passed_over": passed_over}, indent=2))
        return
    for sentence in passed_over:
        typer.echo(sentence, err=True)
    typer.echo(f"{name}: {len(files)} files, {size(nbytes)}, in {target}")


def _newest(
    place: "Place", export: Callable[[str], tuple[Path, ...]], *, uncommitted: bool
) -> tuple[str, tuple[str, ...], tuple[Path, ...]]:
    """The newest good checkpoint, what was passed over, and the exported files. At a URL who reads it finds what is bad."""
    from elasticrl.runtime.checkpoint import shelf
    from elasticrl.runtime.vault.errors import CheckpointCorrupt

    damaged: dict[str, str] = {}
    while True:
        found = shelf.newest_good(place, uncommitted=uncommitted, damaged=damaged)
        if found is None:
            refuse(
                f"there is no committed checkpoint at {place}; `elasticrl checkpoint list` shows what is there, "
                "--uncommitted takes any"
            )
        name = found.manifest.name
        try:
            return name, found.passed_over, export(name)
        except CheckpointCorrupt as error:
            damaged[name] = str(error)


def run_of(named: Path, part: str) -> Path:
    """The run's directory, which has this part: what was named, where nodes' may lie side by side, or the only one below."""
    if any(named.glob(part)) or any(named.glob(f"*/{part}")):
        return named
    below = sorted({path.parent for depth in ("*/*", "*/*/*") for path in named.glob(f"{depth}/{part}")})
    if len(below) > 1:
        refuse(f"several runs lie below {named}; name one: {', '.join(map(str, below))}")
    return below[0] if below else named


@contextmanager
def there() -> Iterator[None]:
    """Inside, a place that does not answer ends the command with its sentence."""
    from elasticrl.runtime.vault.errors import CheckpointStorage

    try:
        yield
    except CheckpointStorage as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(Exit.FAILED) from None


def place_of(where: str, tree: "Tree | None" = None) -> "Place":
    """The place that holds the checkpoints of what was named: itself, its `checkpoints`, or the only one below it. The job's
    configuration says how long the store at a URL is waited for.
    """
    from elasticrl.runtime.checkpoint.place import place

    if "://" in where:
        if tree is None:
            return place(where)
        return place(where, answer_s=tree.checkpoint.answer_s, wait_s=tree.checkpoint.wait_s)
    root = Path(where)
    if not root.is_dir():
        refuse(f"{root} is not a directory: name a run's directory, a checkpoint directory or a URL")
    for candidate in (root, root / "checkpoints"):
        if place(candidate).names():
            return place(candidate)
    holding: list[Path] = []
    for depth in ("*/", "*/*/"):  # the second: a node's own directory, below the job's
        below = [path for parent in (root, root / "checkpoints") for path in sorted(parent.glob(depth))]
        holding = holding or [path for path in below if place(path).names()]
    if len(holding) > 1:
        refuse(f"several jobs or nodes have checkpoints below {root}; name one: {', '.join(map(str, holding))}")
    return place(holding[0] if holding else root / "checkpoints" if (root / "checkpoints").is_dir() else root)


def plain(entry: "Entry") -> dict[str, Any]:
    """An entry as JSON has it."""
    manifest = entry.manifest
    return {
        "name": entry.name,
        "step": entry.version.step,
        "update": entry.version.update,
        "generation": entry.generation,
        "committed": entry.committed,
        "problem": entry.problem,
        "nbytes": manifest.nbytes if manifest else None,
        "written": manifest.written if manifest else None,
        "parent": manifest.parent if manifest else None,
        "score": manifest.score if manifest else None,
        "contents": dict(manifest.contents) if manifest else None,
        "world": manifest.world if manifest else None,
        "shards": list(manifest.shards) if manifest else None,
        "lanes": manifest.facts.lanes if manifest else None,
        "data": manifest.facts.data if manifest else None,
        "versions": dict(manifest.facts.versions) if manifest else None,
    }


def contents(manifest: "Manifest | None") -> str:
    """The parts, the large ones with their size."""
    if manifest is None:
        return ""
    parts = [f"{part} {size(nbytes)}" if nbytes else part for part, nbytes in manifest.contents.items()]
    return ", ".join([*parts, *([] if manifest.score is None else [f"scored {manifest.score:.4g}"])])


def refuse(sentence: str) -> NoReturn:
    """The arguments are wrong; nothing was done."""
    typer.echo(sentence, err=True)
    raise typer.Exit(Exit.REFUSED)


def fail(sentence: str, *, as_json: bool) -> NoReturn:
    """It could not be done."""
    typer.echo(json.dumps({"ok": False, "why": sentence}) if as_json else sentence, err=not as_json)
    raise typer.Exit(Exit.FAILED)
