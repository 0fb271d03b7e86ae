"""`elasticrl run -- train.py ARGS`: a script as torchrun would run it, on this machine, without a configuration of its own.

The one idea: the command writes the configuration that somebody would write for it, and runs that. So all that a job has is
there (status, incidents, report), and the file is a start for the cluster's.
"""

import hashlib
import json
import os
import re
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import typer

MARK: Final = "--"  # what comes after it is the script, and its arguments
LANES: Final = 8  # of a job whose configuration does not say
LINES: Final = 1 << 16  # bytes of a script's output that are shown at once; of more the newest


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """What is to be run, with its arguments.

    Example: Script(program="train.py", args=("--lr", "1e-4"))
    """

    program: str
    args: tuple[str, ...] = ()
    module: bool = False  # the program is a module's name, as behind -m

    def __str__(self) -> str:
        return f"-m {self.program}" if self.module else self.program


def name_of(script: Script) -> str:
    """The job's name: the script's, and a mark of where it lies, so that two scripts of one name never meet."""
    said = script.program if script.module else Path(script.program).stem
    stem = re.sub(r"[^a-z0-9-]+", "-", said.lower()).strip("-")[:20].strip("-") or "script"
    place = hashlib.blake2b(os.fsencode(Path(script.program).absolute()), digest_size=2).hexdigest()
    return f"{stem if stem[0].isalpha() else f's-{stem}'}-{place}"


def level_of(script: Script) -> str:
    """What a script's calls of ours belong to, by its text."""
    from elasticrl.cli import reading
    from elasticrl.diagnose.program import module_file

    file = module_file(script.program, Path.cwd()) if script.module else Path(script.program)
    try:
        return reading.read(file).level if file else reading.NONE
    except (SyntaxError, ValueError, OSError):  # said before it starts, with where
        return reading.NONE


def folder_of(name: str) -> Path:
    """Where its configuration, logs and incidents lie."""
    state = os.environ.get("XDG_STATE_HOME")
    return (Path(state) if state else Path.home() / ".local" / "state") / "elasticrl" / name


def places(name: str) -> dict[str, str]:
    """Where a job on this machine keeps its things, for a user who owns nothing of the system's folders."""
    folder, shm = folder_of(name), Path("/dev/shm")  # noqa: S108 - the vault makes its own folder there, closed to others
    return {
        "state": str(folder / "state"),
        "vault": str(shm / f"elasticrl-{os.getuid()}" if shm.is_dir() else folder / "vault"),
        "checkpoints": str(folder / "checkpoints"),
        "log": str(folder / "log"),
    }


def written(script: Script, level: str, nodes: int, workers: int) -> Path:
    """The configuration for it, as a file."""
    name = name_of(script)
    folder = folder_of(name)
    where = places(name)
    conf: dict[str, Any] = {
        "job": {"name": name, "level": level, "program": script.program, "args": list(script.args)},
        "node": {"workers": workers, "interface": "lo", "state_dir": where["state"]},
        "store": {"embedded": True},
        "membership": {
            "min_nodes": 1, "max_nodes": nodes, "settle": "1s", "lease_ttl": "5s", "keepalive": "1500ms",
            "grow_every": "10s",
        },
        # A script's save, or its evaluation, may take long, and reports nothing meanwhile.
        "timeouts": {"floor": "30s", "default_phase": "30m", "collective": "1h"},
        "vault": {"dir": where["vault"]},
        "checkpoint": {"dir": where["checkpoints"]},
        "telemetry": {"log_dir": where["log"]},
    }  # fmt: skip
    if level == "exact" and nodes * workers > LANES:  # each worker needs one
        conf["lanes"] = {"count": nodes * workers}
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    file = folder / "job.yaml"
    head = f"# Written by `elasticrl run -- {script}`. See docs/CONFIGURATION.md for every key.\n"
    # JSON is YAML: whatever paths and arguments have in them is read back as it is.
    text = "".join(f"{key}: {json.dumps(value)}\n" for key, value in conf.items())
    file.write_text(head + text, encoding="utf-8")
    return file


def overrides(script: Script) -> list[str]:
    """The script in place of the one that a configuration names."""
    return [f"job.program={json.dumps(script.program)}", f"job.args={json.dumps(list(script.args))}"]


class Output:
    """What rank 0 of a script writes, on this terminal: the end of its newest log, as far as it was not shown yet."""

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self._shown: dict[Path, int] = {}
        self._began = time.time()

    def look(self, picture: Mapping[str, Any]) -> None:
        """Show what is new."""
        node = next((row["node"] for row in picture.get("rows", ()) if row["rank"] == 0), None)
        if node is not None:
            self.show((self._logs / node / f"attempt_{picture['generation']}" / "rank_0.log").resolve())

    def show(self, log: Path) -> None:
        """Of one log."""
        begin = self._shown.get(log, 0)
        try:
            with log.open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(begin, size - LINES))
                data = file.read()
        except OSError:
            return
        if whole := data[: data.rfind(b"\n") + 1]:
            self._shown[log] = max(begin, size - LINES) + len(whole)
            typer.echo(whole.decode(errors="replace"), nl=False)
            sys.stdout.flush()

    def rest(self) -> None:
        """What was written since the last look, by workers that ended before there was one, too."""
        for log in sorted(self._logs.glob("*/latest/rank_0.log")):
            if log.stat().st_mtime >= self._began:
                self.show(log.resolve())
