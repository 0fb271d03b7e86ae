"""Pictures as text. Plain f-strings on purpose: `status` has 300 ms, and importing a table library takes half of them."""

import sys
from collections.abc import Mapping
from typing import Any

from elasticrl.core.words import ago, past
from elasticrl.report.table import table

BOLD, DIM, RED, GREEN, YELLOW, RESET = "\033[1m", "\033[2m", "\033[31m", "\033[32m", "\033[33m", "\033[0m"
COLOUR = {
    "TRAINING": GREEN, "FINISHED": GREEN, "STARTING": YELLOW, "RECOVERING": YELLOW, "FORMING": YELLOW, "HOLDING": YELLOW,
    "PROBING": YELLOW, "CRASH LOOP": RED, "STOPPED": DIM, "quarantined": RED, "gone": RED, "failed": RED, "stalled": RED,
    "spare": DIM, "warming up": DIM, "no engine": RED,
}  # fmt: skip


def paint(text: str, colour: str, *, on: bool) -> str:
    """Coloured, on a terminal."""
    return f"{colour}{text}{RESET}" if on and colour else text


def size(count: float) -> str:
    """Bytes for people, in powers of 1024 as the configuration has them: 64MiB there is 64 MiB here.

    >>> size(512), size(81_920), size(412_000_000), size(1_190_000_000), size(3 << 41)
    ('512 B', '80 KiB', '393 MiB', '1.1 GiB', '6.0 TiB')
    """
    unit = "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if count < 1024:
            break
        count, unit = count / 1024, larger
    return f"{count:.0f} {unit}" if count >= 10 or unit == "B" else f"{count:.1f} {unit}"


def status(picture: Mapping[str, Any], *, colour: bool | None = None, ages: bool = True) -> str:
    """The four answers, in order: is it training, how far, who is in, what should I do. `ages`: what differs at each look."""
    on = sys.stdout.isatty() if colour is None else colour
    state, committed_s = picture["state"], picture.get("committed_s")
    since = f", {ago(committed_s)} ago" if ages and committed_s is not None else ""
    head = (
        f"{paint(picture['job'], BOLD, on=on)}  {paint(state, COLOUR.get(state, ''), on=on)}"
        f"  generation {picture['generation']}"
        f"  step {picture['step']:,} (committed {picture['committed']:,}{since})"
        f"  {picture['nodes']} of {picture['known']} nodes{f', needs {needs}' if (needs := picture['needs']) else ''}"
    )
    lines = [head, paint(picture["reason"], DIM, on=on)]
    if said := past(picture, ages=ages):
        lines.append(paint(said, DIM, on=on))
    rows = [
        (
            ("* " if row["leader"] else "  ") + row["node"],
            "-"
            if row["rank"] is None
            else str(row["rank"])
            if row["slots"] == 1
            else f"{row['rank']}-{row['rank'] + row['slots'] - 1}",
            row["state"],
            f"{row['step']:,}" if row["rank"] is not None else "-",
            *((row.get("phase") or "-", ago(row.get("beat_s"))) if ages else ()),
            "; ".join(filter(None, ("leader" if row["leader"] else "", row["note"]))),
        )
        for row in picture["rows"]
    ]
    if rows:
        text = table(("  node", "rank", "state", "step", *(("phase", "beat") if ages else ()), "note"), rows)
        lines.append(paint(text[0], DIM, on=on))
        for row, line in zip(rows, text[1:], strict=True):
            state = row[2]
            lines.append(line.replace(state, paint(state, COLOUR.get(state, ""), on=on), 1))
    if picture.get("here") and picture["here"] != picture["reason"]:
        lines.append(paint(f"this node: {picture['here']}", DIM, on=on))
    lines += [f"# {text}" for text in picture["advice"]]
    return "\n".join(lines)


def event(line: Mapping[str, Any], *, colour: bool | None = None) -> str:
    """One log event on one line."""
    on = sys.stdout.isatty() if colour is None else colour
    level = str(line.get("level", "info"))
    shown = {key: value for key, value in line.items() if key not in {"at", "event", "level", "job", "node", "member"}}
    fields = " ".join(f"{key}={value!r}" for key, value in shown.items())
    tone = {"warning": YELLOW, "error": RED}.get(level, BOLD)
    at, name = str(line.get("at", ""))[:23], str(line.get("event"))
    return f"{paint(at, DIM, on=on)} {line.get('node', '')} {paint(name, tone, on=on)} {fields}"
