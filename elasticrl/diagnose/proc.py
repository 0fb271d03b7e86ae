"""What texts of /proc and /sys say. Pure."""

from elasticrl.base.value import dataclass


def pressure(text: str) -> dict[str, float]:
    r"""Shares of the last 10 s in which tasks waited, in percent.

    >>> pressure("some avg10=1.50 avg60=0.00 avg300=0.00 total=9\nfull avg10=0.25 avg60=0.00 avg300=0.00 total=3")
    {'some': 1.5, 'full': 0.25}
    """
    found = {}
    for line in text.splitlines():
        name, _, rest = line.partition(" ")
        value = next((word[6:] for word in rest.split() if word.startswith("avg10=")), None)
        if value is not None:
            found[name] = float(value)
    return found


def meminfo(text: str) -> dict[str, int]:
    """Bytes by name."""
    rows = (line.replace(":", " ").split() for line in text.splitlines())
    return {
        row[0]: int(row[1]) * (1024 if row[2:] == ["kB"] else 1) for row in rows if len(row) > 1 and row[1].isdigit()
    }


def flat(text: str) -> dict[str, int]:
    """Lines of `name number`: memory.events, memory.oom_control, memory.stat."""
    rows = (line.split() for line in text.splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) == 2 and row[1].isdigit()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Mount:
    """Where a path lies.

    Example: Mount(point="/data", kind="nfs4", options=frozenset({"rw", "hard"}))
    """

    point: str
    kind: str
    options: frozenset[str] = frozenset()


def mount_of(text: str, path: str) -> Mount | None:
    """The mount that holds a path, from /proc/self/mountinfo: the last one at the longest point above it."""
    best: Mount | None = None
    for line in text.splitlines():
        left, dash, right = line.partition(" - ")
        row, tail = left.split(" "), right.split(" ")
        if not dash or len(row) < 6 or len(tail) < 3:
            continue
        point = row[4].encode().decode("unicode_escape") if "\\" in row[4] else row[4]
        above = path == point or path.startswith(point.rstrip("/") + "/")
        if above and (best is None or len(point) >= len(best.point)):
            best = Mount(point=point, kind=tail[0], options=frozenset(row[5].split(",") + tail[2].split(",")))
    return best


def chosen(text: str) -> str:
    """The word in brackets.

    >>> chosen("always [madvise] never")
    'madvise'
    """
    return text.partition("[")[2].partition("]")[0]


def snmp(text: str) -> dict[str, int]:
    """`Tcp.RetransSegs` and the like, from /proc/net/snmp or netstat: pairs of lines, names and numbers."""
    lines = text.splitlines()
    found: dict[str, int] = {}
    for names, numbers in zip(lines[::2], lines[1::2], strict=False):
        family, _, rest = names.partition(":")
        values = numbers.partition(":")[2].split()
        found |= {
            f"{family}.{n}": int(v) for n, v in zip(rest.split(), values, strict=False) if v.lstrip("-").isdigit()
        }
    return found


def cpu_times(text: str) -> dict[str, int]:
    """Ticks of all CPUs together, from /proc/stat."""
    names = ("user", "nice", "system", "idle", "iowait", "irq", "softirq", "steal")
    row = next((line.split()[1:] for line in text.splitlines() if line.startswith("cpu ")), [])
    return dict(zip(names, map(int, row), strict=False))
