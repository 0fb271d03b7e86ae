"""Pictures as text. Plain f-strings on purpose: `status` has 300 ms, and importing a table library takes half of them."""

import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from elasticrl.base.words import ago, notes, past, plain, span
from elasticrl.report.table import table

BOLD, DIM, RED, GREEN, YELLOW, RESET = "\033[1m", "\033[2m", "\033[31m", "\033[32m", "\033[33m", "\033[0m"
COLOUR = {
    "TRAINING": GREEN, "GROWING": GREEN, "FINISHED": GREEN, "STARTING": YELLOW, "RECOVERING": YELLOW, "FORMING": YELLOW,
    "HOLDING": YELLOW, "PAUSED": YELLOW, "PROBING": YELLOW, "WAITING FOR ETCD": RED, "CRASH LOOP": RED,
    "STOPPED": DIM, "quarantined": RED, "gone": RED, "lost": RED, "failed": RED,
    "stalled": RED, "spare": DIM, "warming up": DIM, "no engine": RED,
}  # fmt: skip

UNTOLD = "script"  # the phase of a script that has told nothing, as `contract.model` has it

#: Commands that operators are told to give, up to where `--job` goes.
ASKED = re.compile(
    r"elasticrl (incidents(?: last)?|logs|pause|resume|status|stop|top|(?:events|admit|drain) \w(?:[\w.-]*\w)?)\b(?! --job)"
)
#: Those that a store answers as well.
OF_STORES = frozenset({"status", "events", "drain", "admit", "pause", "resume", "stop"})
TOLD = ("reason", "here")  # what of a picture is a sentence, beside its advice
OLD_S = 10.0  # from when on a plan's reason is told with its age: what it says is over by then
STALE_S = 1.0  # from when on a row's step is told with its age
WELL = frozenset({"training", "done", "rollout"})  # states of which nothing is to be seen

#: What each line says of itself beside what it is about, and fields that are a sentence: the first of them that is there is.
BESIDE = frozenset({"at", "ts", "event", "level", "job", "run", "node", "member"})
SENTENCES = ("reason", "cause", "said", "why", "error", "problem", "text")


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
    return "\n".join([*_head(picture, on, ages), *_nodes(picture["rows"], on, ages), *_advice(picture, on)])


def watched(picture: Mapping[str, Any], pace: str, *, colour: bool | None = None, ages: bool = True) -> str:
    """The same for a screen that may be too small: what is cut off is the end, so that is the table's, and who is well."""
    on = sys.stdout.isatty() if colour is None else colour
    rows = sorted(
        picture["rows"], key=lambda row: (row["state"] in WELL and not row["note"] and not row["leader"], row["node"])
    )
    lines = [*_head(picture, on, ages), *_advice(picture, on), *([pace] if pace else []), *_nodes(rows, on, ages)]
    return "\n".join(lines)


def _head(picture: Mapping[str, Any], on: bool, ages: bool) -> list[str]:
    state, committed_s = picture["state"], picture.get("committed_s")
    since = f", {ago(committed_s)} ago" if ages and committed_s is not None else ""
    needs = f", needs {picture['needs']}" if picture["needs"] else ""
    who = f"  {picture['nodes']} of {picture['known']} nodes{needs}" if picture.get("exit_code") is None else ""
    head = (
        f"{paint(plain(picture['job']), BOLD, on=on)}  {paint(state, COLOUR.get(state, ''), on=on)}"
        f"  generation {picture['generation']}{_how_far(picture, since, ages=ages)}{who}"
    )
    reason_s = picture.get("reason_s")
    old = f" ({ago(reason_s)} ago)" if ages and reason_s is not None and reason_s >= OLD_S else ""
    lines = [head, paint(plain(picture["reason"]) + old, DIM, on=on)]
    if said := past(picture, ages=ages):
        lines.append(paint(plain(said), DIM, on=on))
    return lines


def _how_far(picture: Mapping[str, Any], since: str, *, ages: bool) -> str:
    """The newest step and the newest commit, as far as the job has such."""
    if picture.get("milestone"):
        return f"  {plain(picture['milestone'])}, by its log{_old(picture.get('milestone_s'), ages=ages)}"
    if not picture.get("tells", True):
        return ""
    committed = f" (committed {picture['committed']:,}{since})" if picture.get("commits", True) else ""
    return f"  step {picture['step']:,}{committed}"


def _nodes(told: Sequence[Mapping[str, Any]], on: bool, ages: bool) -> list[str]:
    teams = any(row.get("teams") for row in told)  # a column that few need
    rows = [
        (
            ("* " if row["leader"] else "  ") + plain(row.get("member") or row["node"]),
            span(row["rank"], row["slots"]),
            *((span(row.get("team"), row.get("teams", 0)),) if teams else ()),
            row["state"],
            _step(row, ages=ages),
            *((plain(row.get("phase") or "-"),) if ages else ()),
            plain("; ".join(filter(None, ("leader" if row["leader"] else "", *notes(row, ages=ages))))),
        )
        for row in told
    ]
    if not rows:
        return []
    more = ("team",) if teams else ()
    text = table(("  node", "rank", *more, "state", "step", *(("phase",) if ages else ()), "note"), rows)
    lines = [paint(text[0], DIM, on=on)]
    for row, line in zip(rows, text[1:], strict=True):
        state = row[2 + len(more)]
        lines.append(line.replace(state, paint(state, COLOUR.get(state, ""), on=on), 1))
    return lines


def _step(row: Mapping[str, Any], *, ages: bool) -> str:
    """As its node has told it last; how long ago that was, where it was not just now."""
    if row["rank"] is not None and row.get("milestone"):
        return f"{plain(row['milestone'])}{_old(row.get('milestone_s'), ages=ages)}"
    if row["rank"] is None or (not row["step"] and (row["state"] == "joining" or row.get("phase") == UNTOLD)):
        return "-"
    return f"{row['step']:,}{_old(row.get('beat_s'), ages=ages)}"


def _old(seconds: float | None, *, ages: bool) -> str:
    """How long ago, where it was not just now."""
    return f" ({ago(seconds)} ago)" if ages and seconds is not None and seconds >= STALE_S else ""


def _advice(picture: Mapping[str, Any], on: bool) -> list[str]:
    lines = [f"# {plain(text)}" for text in picture["advice"]]
    if picture.get("here") and picture["here"] != picture["reason"]:
        who = f"{picture['node']} (this node): " if picture.get("node") else ""
        lines.insert(0, paint(f"{who}{plain(picture['here'])}", DIM, on=on))
    return lines


def addressed(picture: Mapping[str, Any], job: str | None, store: str | None = None) -> dict[str, Any]:
    """The same with the job in the commands that it gives, where it was asked for by name, as where several run."""
    told = {name: named(picture[name], job, store) for name in TOLD if name in picture}
    return {**picture, **told, "advice": [named(text, job, store) for text in picture["advice"]]}


def named(text: str, job: str | None, store: str | None = None) -> str:
    """With the job in the commands that a sentence gives, and with the `store` where they are asked of that.

    >>> named("See why: elasticrl events n2. Let it back: elasticrl admit n2.", "ppo")
    'See why: elasticrl events n2 --job ppo. Let it back: elasticrl admit n2 --job ppo.'
    >>> named("elasticrl drain b --force; elasticrl status --watch; elasticrl resume --job x; elasticrl run FILE", "ppo")
    'elasticrl drain b --job ppo --force; elasticrl status --job ppo --watch; elasticrl resume --job x; elasticrl run FILE'
    >>> named("elasticrl resume. More: elasticrl incidents last.", "ppo", "etcd1:2379")
    'elasticrl resume --store etcd1:2379 --job ppo. More: elasticrl incidents last --job ppo.'
    """

    def more(found: re.Match[str]) -> str:
        at = f" --store {shlex.quote(store)}" if store and found[1].split()[0] in OF_STORES else ""
        return f"{found[0]}{at}{f' --job {job}' if job else ''}"

    return ASKED.sub(more, text) if job or store else text


def event(line: Mapping[str, Any], *, colour: bool | None = None) -> str:
    """One log event on one line: when, how bad, where, what; then its sentence, what it is about, and what to do.

    >>> line = {"at": "2026-11-23T16:02:37.123456Z", "level": "warning", "job": "j", "node": "n3", "event": "worker.exited"}
    >>> print(event(line | {"generation": 3, "cause": "signal 9 (SIGKILL)", "own": False}, colour=False))
    2026-11-23T16:02:37.123 warning n3 worker.exited  signal 9 (SIGKILL)  generation=3 own=False
    """
    on = sys.stdout.isatty() if colour is None else colour
    level, node, name = (
        plain(str(line.get(key, other))) for key, other in (("level", "info"), ("node", "-"), ("event", None))
    )
    fields = {key: value for key, value in line.items() if key not in BESIDE and value not in (None, "", [], (), {})}
    sentence = plain(next((str(fields.pop(key)) for key in SENTENCES if key in fields), ""))
    remedy, trace = plain(str(fields.pop("remedy", ""))), str(fields.pop("exception", ""))
    tone = {"warning": YELLOW, "error": RED}.get(level, "")
    at = paint(plain(str(line.get("at") or line.get("ts") or "")[:23]), DIM, on=on)
    head = f"{at} {paint(f'{level:7}', tone, on=on)} {node} {paint(name, tone or BOLD, on=on)}"
    about = plain(" ".join(f"{key}={_value(value)}" for key, value in fields.items()))
    about = paint(about, DIM, on=on and bool(fields))
    said = "  ".join(filter(None, (head, sentence, about, remedy and f"-> {remedy}")))
    return "\n    ".join([said, *map(plain, trace.splitlines())])


def _value(value: Any) -> str:
    """A field's value in few letters.

    >>> _value({"reward": 0.712345, "kl": 0.5}), _value(["n0", "n1"]), _value("two words"), _value(1280)
    ('(reward 0.7123, kl 0.5)', 'n0,n1', "'two words'", '1280')
    """
    match value:
        case float():
            return f"{value:.4g}"
        case Mapping():
            return f"({', '.join(f'{key} {_value(each)}' for key, each in value.items())})"
        case list() | tuple():
            return ",".join(map(_value, value))
        case str() if " " in value:
            return repr(value)
        case _:
            return str(value)
