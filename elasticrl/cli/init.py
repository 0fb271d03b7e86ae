"""`elasticrl init`: a first configuration for a training script, with a comment on each line, and what comes next.

The one idea: what is asked for is checked as a whole (`problems`), then the file is a table of keys, values and reasons
(`lines_of`). Both are functions of values. The text is the one that `elasticrl config check` reads before anything is written.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from elasticrl.cli import script as scripts
from elasticrl.cli.claims import refused
from elasticrl.cli.reading import Reading, read
from elasticrl.contract.level import Level, Means, means_of

COMMENT = 44  # the column where the comments begin
LANES = 8  # the default of lanes.count, which must be at least the number of workers


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What a configuration is wanted for. No store: all nodes are played on this machine, with an etcd of their own.

    Example: Asked(script="train.py", nodes="2:4", workers=8, level="told", store="etcd-1:2379", output=Path("job.yaml"))
    """

    script: str
    nodes: str = "1"
    workers: int = 1
    level: str | None = None
    store: str | None = None
    args: tuple[str, ...] = ()
    output: Path = Path("job.yaml")
    force: bool = False

    @property
    def least(self) -> int:
        """Nodes that it needs."""
        return int(self.nodes.partition(":")[0])

    @property
    def most(self) -> int:
        """Nodes that it uses."""
        return int(self.nodes.rpartition(":")[2])


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One key. Example: Line(key="node.workers", value=8, why="processes on each node, one to a GPU")"""

    key: str
    value: Any
    why: str


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command()(init)


def init(
    args: Annotated[
        list[str] | None, typer.Argument(metavar="[-- ARGS]", help="The script's arguments.", show_default=False)
    ] = None,
    script: Annotated[str | None, typer.Option("--script", help="The training script.", show_default=False)] = None,
    nodes: Annotated[
        str | None,
        typer.Option("--nodes", metavar="MIN:MAX", help="Nodes that it needs, and uses.", show_default=False),
    ] = None,
    workers: Annotated[
        int | None, typer.Option("--workers", help="Workers on each node, one to a GPU.", show_default=False)
    ] = None,
    level: Annotated[
        str | None, typer.Option("--level", help="By default what the script calls for.", show_default=False)
    ] = None,
    store: Annotated[
        str | None,
        typer.Option(
            "--store", metavar="HOST:PORT,...", help="Your etcd. None: this machine alone.", show_default=False
        ),
    ] = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="The file to write.")] = Path("job.yaml"),
    force: Annotated[bool, typer.Option("--force", help="Overwrite it.")] = False,
) -> None:
    """Write a first configuration for a training script, and say what comes next.

    elasticrl init --script train.py --nodes 2:4 --workers 8 -- --lr 1e-4
    """
    if sys.stdin.isatty():
        script = script or typer.prompt("Training script")
        nodes = nodes or typer.prompt("Nodes, as MIN:MAX", default="1:1")
        workers = (
            typer.prompt("Workers on each node (one to a GPU)", default=1, type=int) if workers is None else workers
        )
    asked = Asked(
        script=script or "", nodes=nodes or "1", workers=1 if workers is None else workers, level=level, store=store,
        args=tuple(args or ()), output=output, force=force,
    )  # fmt: skip
    if wrong := problems(asked):
        raise refused("\n".join(wrong))
    reading = read(Path(asked.script))
    lines = lines_of(asked, reading)
    text = text_of(lines, asked)
    try:
        asked.output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise refused(f"{asked.output} cannot be written ({error.strerror}): name another file (-o)") from None
    typer.echo(
        "\n".join(
            [f"wrote {asked.output}: {reading.kind.name}, level {level_of(asked, reading)}", *after(asked, reading)]
        )
    )
    accepted(asked.output)


def problems(asked: Asked) -> list[str]:
    """All that is wrong with what was asked for, each with what to do."""
    return [
        *_script(asked.script),
        *_nodes(asked.nodes),
        *(
            [f"--workers {asked.workers}: there must be at least 1 on each node."] if asked.workers < 1 else []
        ),
        *_level(asked.level),
        *_store(asked.store),
        *(
            [f"{asked.output} is there already. Name another file (-o), or overwrite it (--force)."]
            if asked.output.exists() and not asked.force
            else []
        ),
    ]  # fmt: skip


def _script(script: str) -> list[str]:
    path = Path(script)
    if not script:
        return ["There is no script. Name one: --script train.py."]
    if path.suffix != ".py" or not path.is_file():
        return [f"--script {script}: there is no such Python file here (its name must end with .py)."]
    try:
        read(path)
    except (SyntaxError, ValueError, OSError) as error:
        return [f"--script {script}: it cannot be read as Python ({error}). Mend it, or name another."]
    return []


def _nodes(nodes: str) -> list[str]:
    ends = nodes.split(":")
    if len(ends) > 2 or not all(end.isdecimal() and int(end) > 0 for end in ends):
        return [f"--nodes {nodes}: write MIN:MAX, such as 2:4 (go on while two are up, use up to four)."]
    return [] if int(ends[0]) <= int(ends[-1]) else [f"--nodes {nodes}: the first number must not be over the second."]


def _level(level: str | None) -> list[str]:
    names = [each.value for each in Level]
    return (
        [] if level in (None, *names) else [f"--level {level}: there is no such level. Use one of {', '.join(names)}."]
    )


def _store(store: str | None) -> list[str]:
    wrong = [
        place
        for place in (store.split(",") if store is not None else ())
        if not (place.rpartition(":")[0] and place.rpartition(":")[2].isdecimal())
    ]
    return [f"--store {place}: write HOST:PORT, such as etcd-1:2379." for place in wrong]


def level_of(asked: Asked, reading: Reading) -> str:
    """The level that was asked for, else the one that the script calls for."""
    return asked.level or reading.level


def lines_of(asked: Asked, reading: Reading) -> list[Line]:
    """The configuration: at most twelve keys."""
    script = scripts.Script(program=str(Path(asked.script).absolute()), args=asked.args)
    level, name = level_of(asked, reading), scripts.name_of(script)
    lines = [
        Line(key="job.name", value=name, why="what elasticrl status calls it"),
        Line(key="job.level", value=level, why=SAYS[means_of(level).joins]),
        Line(key="job.program", value=script.program, why="the same path on all nodes"),
        *([Line(key="job.args", value=list(asked.args), why="the script's arguments")] if asked.args else []),
        Line(key="node.workers", value=asked.workers, why="processes on each node, one to a GPU"),
    ]
    means = means_of(level)
    lines += _cluster(asked, means) if asked.store else _machine(asked, name, means)
    lines.append(Line(key="membership.max_nodes", value=asked.most, why="more nodes are spares"))
    if reading.kind.fixed and asked.most > 1:
        lines.append(Line(key="membership.fixed", value=True, why=reading.kind.fixed))
    else:
        lines.append(Line(key="membership.min_nodes", value=asked.least, why="with fewer nodes the job waits"))
    if means.joins and (lanes := asked.most * asked.workers) > LANES:
        lines.append(Line(key="lanes.count", value=lanes, why="micro-batches of a step, for the job's whole life"))
    if means.keeps and asked.least > 1:
        lines.append(Line(key="vault.copies", value=1, why="a neighbour keeps each node's state"))
    return lines


#: What happens after a fault, by whether the workers take their seats again.
SAYS = {
    False: "after a fault all workers start again",
    True: "after a fault the other workers keep their memory",
}


def _cluster(asked: Asked, means: Means) -> list[Line]:
    assert asked.store is not None
    saves = Line(key="checkpoint.dir", value="/mnt/shared/checkpoints", why="a folder that all nodes see")
    return [
        Line(key="store.endpoints", value=asked.store.split(","), why="your etcd"),
        *([saves] if means.joins else []),
    ]  # fmt: skip


def _machine(asked: Asked, name: str, means: Means) -> list[Line]:
    places = scripts.places(name)
    return [
        Line(key="node.state_dir", value=places["state"], why="incidents, traces, etcd's data"),
        Line(key="store.embedded", value=True, why="elasticrl run starts an etcd"),
        Line(key="telemetry.log_dir", value=places["log"], why="the logs of all workers"),
        *(
            []
            if means.keeps and asked.least > 1
            else [Line(key="vault.dir", value=places["vault"], why="memory for snapshots")]
        ),
        (
            Line(key="checkpoint.dir", value=places["checkpoints"], why="the job's checkpoints")
            if means.joins
            else Line(key="node.interface", value="lo", why="all nodes are on this machine")
        ),
    ]


def text_of(lines: Sequence[Line], asked: Asked) -> str:
    """As YAML, a comment on each line."""
    text = [f"# Written by elasticrl init for {asked.script}. docs/CONFIGURATION.md describes every key."]
    section = ""
    heads = [line.key.partition(".")[0] for line in lines]
    for _, line in sorted(enumerate(lines), key=lambda item: heads.index(heads[item[0]])):
        head, _, key = line.key.partition(".")
        if head != section:
            text.append(f"{head}:")
            section = head
        said = f"  {key}: {json.dumps(line.value)}"
        text.append(f"{said:{COMMENT}} # {line.why}")
    return "\n".join(text) + "\n"


def after(asked: Asked, reading: Reading) -> list[str]:
    """What to do now, and what the next level takes."""
    from elasticrl.diagnose.program import unfit

    level, kind = level_of(asked, reading), reading.kind
    check = f"# Check it: elasticrl config check {asked.output}"
    start = (
        f"# Start it on each node: elasticrl daemon --foreground --config {asked.output} (as a unit: docs/QUICKSTART.md)"
        if asked.store
        else f"# Start it: elasticrl run {asked.output}" + (f" --nodes {asked.most}" if asked.most > 1 else "")
    )
    said = [check, start]
    if why := unfit(Path(asked.script)):  # it may be there on the nodes all the same
        said.append(f"# {why.removeprefix('job.program: ')}.")
    if not reading.resumes:
        said.append(
            f"# {asked.script} does not seem to load a checkpoint. After a fault it would begin anew. Add:\n    {kind.resume}"
        )
    if reading.torn:
        said.append(
            "# get_last_checkpoint also takes a checkpoint that a kill has cut short, and then each start fails. Use instead:\n"
            "    elasticrl.hf.latest(output_dir)"
        )
    if level != reading.level and not _over(reading.level, level):
        said.append(
            f"# {asked.script} does not seem to call what level {level} needs. Add:\n    {line_for(level, reading)}"
        )
    following = next((each.value for each in Level if _over(each.value, level) and line_for(each.value, reading)), None)
    if following:
        said.append(f"# Level {following} needs this ({PAGE}):\n    {line_for(following, reading)}")
    return said


PAGE = "docs/LEVELS.md"


def _over(one: str, other: str) -> bool:
    order = [each.value for each in Level]
    return order.index(one) > order.index(other)


def line_for(level: str, reading: Reading) -> str | None:
    """The line that brings a script of this kind to a level."""
    return {"told": reading.kind.told, "kept": reading.kind.kept, "exact": reading.kind.exact}.get(level)


def accepted(file: Path) -> None:
    """Say what `elasticrl config check` says of it, and refuse what it refuses."""
    from elasticrl.config import read as settle

    loaded = settle(file, ())
    for finding in loaded.findings:
        typer.echo(str(finding), err=True)
    if loaded.tree is None:
        raise refused(f"{file} is written, and refused as above: mend it there")
