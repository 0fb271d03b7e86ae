"""`elasticrl support-bundle`: what somebody else needs to understand what went wrong, in one tar, and no secret in it.

The one idea: nothing is copied that was not looked through. Files come from a short list of places; the configuration is
written anew by the schema, which knows its secrets; and every text passes one filter, which knows the secrets by value where
this machine has them, and by the look of them where it has not. What is too long loses its middle, not its end.
"""

import io
import json
import os
import re
import subprocess
import tarfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from elasticrl.base.owned import strange
from elasticrl.base.parsed import parsed
from elasticrl.base.redact import HIDDEN, NAMED, veiled
from elasticrl.base.regular import open_regular, read_regular
from elasticrl.cli.options import Config

if TYPE_CHECKING:
    from elasticrl.config import Tree

JOURNAL: Final = 20_000  # lines of systemd's
JOURNAL_S: Final = 30.0  # for them to be found
PART: Final = 8 * 1024 * 1024  # bytes of a file; of a longer one, the beginning and the end
WHOLE: Final = 256 * 1024 * 1024  # bytes of all
LEAST: Final = 4  # letters of a secret that is looked for by value: a shorter one would blacken half the log
#: Files that are taken, by folder; vaults, checkpoints, samples and keys are not among them.
LOGS: Final = ("*.log", "*.log.*", "steps*.jsonl", "attempt_*/*.log*", "warm/*.log")
OURS: Final = ("state", "logs")  # folders of the configured job, in the tar
STATE: Final = ("trace/*.jsonl", "incidents/*.json")
#: Where daemons and agents write their keys down, in a node's runtime directory: as a whole file, or as that field of one.
KEYS: Final = {"vault.key": "", "rollout.key": "", "rollouts.json": "key", "echo.json": "secret"}
Folders = Annotated[
    list[Path] | None, typer.Argument(metavar="[FOLDER]...", help="Also what lies in these: logs, state of a run.")
]
Out = Annotated[Path | None, typer.Option("--output", "-o", metavar="FILE", help="The tar.", show_default=False)]


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("support-bundle")(bundle)


def bundle(folders: Folders = None, config: Config = None, output: Out = None) -> None:
    """Collect logs, configuration, traces, incidents and versions of this machine's part of a job in one tar, no secrets."""
    from elasticrl.cli.main import Exit

    if config is not None and not config.is_file():
        typer.echo(f"{config} is not a file", err=True)
        raise typer.Exit(Exit.REFUSED)
    tree, findings = _configuration(config)
    for folder in folders or ():
        if not folder.is_dir():
            typer.echo(f"{folder} is not a folder", err=True)
            raise typer.Exit(Exit.REFUSED)
    output = output or Path(time.strftime("elasticrl-support-%Y%m%d-%H%M%S.tar.gz", time.gmtime()))
    veil = Veil(secrets_here(tree))
    parts = chain(said(tree, findings), found(tree, folders or ()))  # one in memory at a time: they may be gigabytes
    count, size, ours = 0, 0, False
    try:
        handle = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError as error:
        typer.echo(f"{output} cannot be written: {error.strerror}; name another: -o FILE", err=True)
        raise typer.Exit(Exit.REFUSED) from None
    try:
        with os.fdopen(handle, "wb") as file, tarfile.open(fileobj=file, mode="w:gz") as tar:
            for part in parts:
                text = veil.over(part.text)
                if size + len(text) > WHOLE:
                    typer.echo(f"left out, as it would be over {WHOLE // 2**20} MiB: {part.name}", err=True)
                    continue
                info = tarfile.TarInfo(f"elasticrl-support/{part.name}")
                data = text.encode()
                info.size, info.mtime, info.mode = len(data), int(part.at or time.time()), 0o600
                tar.addfile(info, io.BytesIO(data))
                count, size, ours = count + 1, size + len(data), ours or part.name.startswith(OURS)
    except OSError as error:  # the night on which it is wanted may be that of a full disk
        output.unlink(missing_ok=True)
        typer.echo(f"{output} cannot be written: {error.strerror}; put it elsewhere: -o FILE", err=True)
        raise typer.Exit(Exit.FAILED) from None
    if config is not None and tree is None:
        typer.echo(
            f"{config} is wrong: what is wrong with it is in config-findings.txt; of logs and state only FOLDERs are here",
            err=True,
        )
    elif tree is None and not folders:
        typer.echo("no logs and no state are in it: name the configuration (--config FILE), or their folders", err=True)
    elif tree is not None and not ours:
        typer.echo(_nothing_of(tree), err=True)
    typer.echo(
        f"{output}: {count} files, {size / 2**20:.1f} MiB; {veil.removed} secrets removed. Look through it, then send it."
    )


def _nothing_of(tree: "Tree") -> str:
    """A job that was begun under another name than its configuration has, by job.name=..., lies elsewhere."""
    logs = Path(tree.telemetry.log_dir)
    others = sorted(path.name for path in logs.iterdir() if path.is_dir()) if logs.is_dir() else []
    there = f"; {logs} has those of {', '.join(others)}: name its folders there as well" if others else ""
    return f"no logs and no state of the job {tree.job.name} are in it{there}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One file of the bundle. Example: Part(name="versions.txt", text="elasticrl 0.1.0")"""

    name: str
    text: str
    at: float = 0.0  # when it was last written; 0: now


class Veil:
    """The filter that every text passes."""

    def __init__(self, secrets: Iterable[str]) -> None:
        forms = chain.from_iterable(map(written, secrets))
        known = sorted({form for form in forms if len(form) >= LEAST}, key=len, reverse=True)
        self._known = re.compile("|".join(map(re.escape, known))) if known else None
        self.removed = 0

    def over(self, text: str) -> str:
        """The text without secrets."""
        if self._known is not None:
            text, count = self._known.subn(HIDDEN, text)
            self.removed += count
        text, count = veiled(text)
        self.removed += count
        return text


def written(secret: str) -> tuple[str, ...]:
    """As it may stand in a text, and in one of JSON.

    >>> [len(form) for form in written('"ü')]
    [2, 3, 8]
    """
    return secret, json.dumps(secret, ensure_ascii=False)[1:-1], json.dumps(secret)[1:-1]


def secrets_here(tree: "Tree | None") -> set[str]:
    """Those that this machine knows: of the environment and that of our units, by their names; of the configuration; and the
    keys in daemons' runtime directories.
    """
    from elasticrl.cli import find
    from elasticrl.diagnose.units import units

    environments = [os.environ, *(unit.environment for unit in units())]
    found = {value for each in environments for name, value in each.items() if NAMED.search(name)}
    folders = (*find.run_dirs(), *(() if tree is None else (Path(tree.node.run_dir),)))
    mine = find.private_run_dir()  # below /tmp: anybody may have made it first
    found |= set(keys_in(folder for folder in folders if folder != mine or not strange(folder)))
    if tree is None:
        return found
    from elasticrl.config import ConfigError, reveal
    from elasticrl.config.tree import leaf, values

    for key, value in values(tree).items():
        if leaf(key).secret and value is not None:
            found.add(value.get_secret_value())  # type: ignore[attr-defined] # a secret's type
    for file in (tree.store.password_file, tree.web.token_file):
        try:
            found.add(reveal(None, file) or "")
        except ConfigError:
            continue  # not readable by us: then it cannot be in what we read either, but by its look
    return found | {value for name, value in tree.agent.env.items() if NAMED.search(name)}


def keys_in(folders: Iterable[Path]) -> Iterator[str]:
    """The keys in these runtime directories, as far as this user may read them."""
    for folder in folders:
        with suppress(OSError):  # it is below one that this user cannot enter
            for path in [path for name in KEYS for path in folder.glob(f"*/*/{name}") if path.is_file()]:
                with suppress(OSError, ValueError, LookupError, TypeError):
                    text, name = read_regular(path).decode(), KEYS[path.name]
                    yield str(parsed(text)[name]) if name else text.strip()


def _configuration(config: Path | None) -> tuple["Tree | None", str]:
    if config is None:
        return None, ""
    from elasticrl.config import read

    loaded = read(config)
    return loaded.tree, "\n".join(map(str, loaded.findings))


def said(tree: "Tree | None", findings: str) -> Iterator[Part]:
    """What is asked now: versions, configuration, environment, what this machine's daemons say."""
    from elasticrl.cli.version import verbosely

    yield Part(name="versions.json", text=json.dumps(verbosely(), indent=1))
    if findings:
        yield Part(name="config-findings.txt", text=findings)
    if tree is not None:
        from elasticrl.config import dumps

        yield Part(name="config.json", text=json.dumps(json.loads(dumps(tree)), indent=1))
    shown = {
        name: HIDDEN if NAMED.search(name) else value
        for name, value in sorted(os.environ.items())
        if re.match(
            r"(ELASTICRL|NCCL|TORCH|RCCL|GLOO|CUDA|OMP|HSA|HIP|ROCR|VLLM|SLURM|LD_LIBRARY|PYTORCH|MASTER)", name
        )
    }
    yield Part(name="environment.json", text=json.dumps(shown, indent=1))
    yield from journal()
    yield from _answers()


def journal() -> Iterator[Part]:
    """What systemd keeps of our units: where they are such, that is the daemon's log."""
    command = ["journalctl", "--unit", "elasticrl*", "--output", "cat", "--no-pager", "--lines", str(JOURNAL)]
    try:
        done = subprocess.run(command, capture_output=True, timeout=JOURNAL_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        if not isinstance(error, FileNotFoundError):
            yield Part(name="journal.txt", text=f"not read: {error}")
        return
    text = done.stdout.decode(errors="replace")
    if not done.returncode and text.strip() and "-- No entries --" not in text[:100]:
        yield Part(name="journal.log", text=text)
    elif done.returncode:
        yield Part(name="journal.txt", text=f"not read: {done.stderr.decode(errors='replace')}")


def _answers() -> Iterator[Part]:
    from elasticrl.cli import find
    from elasticrl.daemon.client import Unanswered, ask, ask_stream

    for path in find.sockets():
        node = f"{path.parent.parent.name}/{path.parent.name}"
        try:
            yield Part(
                name=f"daemons/{node}/status.json", text=json.dumps(ask(path, "status", deadline_s=5.0), indent=1)
            )
            lines = [json.dumps(line) for line in ask_stream(path, "events", deadline_s=5.0)]
        except Unanswered as error:
            yield Part(name=f"daemons/{node}/unanswered.txt", text=str(error))
            continue
        yield Part(name=f"daemons/{node}/events.jsonl", text="\n".join(lines))


def found(tree: "Tree | None", folders: Sequence[Path]) -> Iterator[Part]:
    """What lies on this machine's disks: logs, traces, incidents."""
    places: list[tuple[str, Path, tuple[str, ...]]] = []
    if tree is not None:
        logs, state = Path(tree.telemetry.log_dir) / tree.job.name, Path(tree.node.state_dir) / tree.job.name
        places += [(OURS[0], state, tuple(f"*/{name}" for name in STATE))]
        places += [(OURS[1], logs, tuple(f"{deep}{name}" for name in LOGS for deep in ("", "*/")))]
    for number, folder in enumerate(folders):
        name, others = folder.resolve().name, [other.resolve().name for other in folders]
        name = (
            f"{number}-{name}" if others.count(name) > 1 else name
        )  # of two members with one name the first would be lost
        places.append((name, folder, tuple(f"**/{name}" for name in (*LOGS, *STATE, "history.jsonl"))))
    taken: set[Path] = set()
    for name, folder, patterns in places:
        # The newest first: if there is too much, what is left out is of long ago.
        for path in sorted({path for pattern in patterns for path in folder.glob(pattern)}, key=_written, reverse=True):
            real = path.resolve()
            if not path.is_file() or path.is_symlink() or real in taken or not real.is_relative_to(folder.resolve()):
                continue
            taken.add(real)
            try:
                text, at = shortened(path), path.stat().st_mtime
            except OSError as error:
                text, at = f"not readable: {error}", 0.0
            yield Part(name=f"{name}/{path.relative_to(folder)}", text=text, at=at)


def _written(path: Path) -> tuple[float, Path]:
    try:
        return path.stat().st_mtime, path
    except OSError:
        return 0.0, path


def shortened(path: Path) -> str:
    """A file's text; of a long one the beginning and the end."""
    size = path.stat().st_size
    with open_regular(path) as file:
        if size <= PART:
            return file.read().decode(errors="replace")
        head = file.read(PART // 4)
        file.seek(size - 3 * PART // 4)
        tail = file.read()
    left_out = f"\n... {size - len(head) - len(tail)} bytes are left out ...\n"
    return (
        head.rpartition(b"\n")[0].decode(errors="replace")
        + left_out
        + tail.partition(b"\n")[2].decode(errors="replace")
    )
