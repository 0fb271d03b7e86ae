"""What systemd puts into the environment of our units: a daemon and its workers see that, and not the shell's.

The one idea: systemd is asked, as it knows which files and drop-ins count; only what is in an EnvironmentFile= is read here, as
systemd reads it when the unit starts. Where systemd is not, there are no units.
"""

import shlex
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from elasticrl.base.value import dataclass

#: The daemon's unit and its agent's, whose environment the workers inherit; and the instances of either, one for each job.
UNITS: Final = ("elasticrl.service", "elasticrl-agent.service", "elasticrl@*.service", "elasticrl-agent@*.service")
ASKED: Final = "--property=Id,LoadState,Environment,EnvironmentFiles"
OPTIONAL: Final = " (ignore_errors=yes)"  # EnvironmentFile=-/path
WITHIN_S: Final = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """One of our units, as systemd has loaded it.

    Example: Unit(name="elasticrl-agent.service", environment={"NCCL_DEBUG": "WARN"}, unread={})
    """

    name: str
    environment: Mapping[str, str]
    unread: Mapping[str, str]  # files that it names and that could not be read: why


def units() -> tuple[Unit, ...]:
    """Those that systemd knows here."""
    try:
        said = subprocess.run(
            ("systemctl", "show", ASKED, *UNITS), stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=WITHIN_S
        ).stdout  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return ()
    return tuple(unit for block in said.split("\n\n") if (unit := unit_of(block)) is not None)


def unit_of(block: str) -> Unit | None:
    """One unit's properties, as `systemctl show` prints them; None if there is no such unit."""
    pairs = [line.partition("=")[::2] for line in block.splitlines()]
    said = dict(pairs)
    if said.get("LoadState") != "loaded":
        return None
    environment = dict(assigned(said.get("Environment", "")))
    unread = {}
    for file in (value for name, value in pairs if name == "EnvironmentFiles" and value):  # a line for each
        path = file.removesuffix(OPTIONAL).removesuffix(" (ignore_errors=no)")
        try:
            environment |= read(Path(path).read_text(encoding="utf-8", errors="replace"))  # a file wins
        except FileNotFoundError as error:
            if not file.endswith(OPTIONAL):
                unread[path] = str(error.strerror)
        except OSError as error:
            unread[path] = str(error.strerror)
    return Unit(name=said.get("Id", ""), environment=environment, unread=unread)


def read(text: str) -> dict[str, str]:
    """An EnvironmentFile=: assignments, a line each; one that ends in a backslash goes on in the next.

    >>> read("# ours" + chr(10) + "NCCL_DEBUG=WARN" + chr(10) + "A='b c'  ")
    {'NCCL_DEBUG': 'WARN', 'A': 'b c'}
    """
    found = {}
    for line in text.replace("\\\n", "").splitlines():
        name, equals, value = line.strip().partition("=")
        if not equals or name.startswith(("#", ";")):
            continue
        quoted = value[:1] in {'"', "'"} and value.endswith(value[:1]) and len(value) > 1
        found[name.strip()] = value[1:-1] if quoted else value
    return found


def assigned(text: str) -> Iterator[tuple[str, str]]:
    """Environment= as systemd prints it: assignments between blanks, quoted where they have some.

    >>> list(assigned('GOGC=800 "A=b c" B=1'))
    [('GOGC', '800'), ('A', 'b c'), ('B', '1')]
    """
    try:
        words = shlex.split(text)
    except ValueError:  # a quote that has no end
        words = text.split()
    for word in words:
        name, equals, value = word.partition("=")
        if equals:
            yield name, value
