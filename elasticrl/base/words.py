"""Words that sentences for people share."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

SPACES: Final = "\u00a0\u202f\u3000"  # which steer nothing, and are no more printable than what does
BAR: Final = 24  # characters
ENDS: Final = {  # after which a node's daemon runs; with how long ago that was
    "handed": "daemon restarted{}; its workers kept running",
    "died": "daemon died and was restarted{}; its workers kept running",
    "killed": "restarted{} after all its processes had died (the machine stayed up)",
    "rebooted": "restarted{} after the machine was down",
}
HOW: Final = {  # what recovered a job, by the rung of the plan that answered the fault
    "reform": "workers formed a new group in place",
    "replace": "a warm process took over",
    "restart": "all workers were restarted",
    "reload": "all workers went back to the checkpoint on disk",
}


def plain(text: str, keep: str = "") -> str:
    r"""Without what would steer a terminal: a worker's own words may have anything in them. `keep`: what may stay of it.

    >>> plain("no \x1b[2K way\n"), plain("a\tb\n\x9b", keep="\t\n")
    ('no ?[2K way?', 'a\tb\n?')
    """
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() or char in keep or char in SPACES else "?" for char in text)


def count(number: int, thing: str) -> str:
    """A number of things.

    >>> count(1, "step"), count(3, "step")
    ('1 step', '3 steps')
    """
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"


def some(names: Sequence[str]) -> str:
    """Names; of many the first, and how many more; "" for none.

    >>> some(["n1"]), some(["n1", "n2"]), some(["n1", "n2", "n3", "n4"])
    ('n1', 'n1 and n2', 'n1, n2 and 2 more')
    """
    if not names:
        return ""
    shown, more = (names, 0) if len(names) < 4 else (names[:2], len(names) - 2)
    *first, last = [*shown, f"{more} more"] if more else shown
    return f"{', '.join(first)} and {last}" if first else last


def span(first: int | None, count: int) -> str:
    """Numbers in a row: ranks of a node, or its teams.

    >>> span(8, 8), span(3, 1), span(None, 1)
    ('8-15', '3', '-')
    """
    if first is None:
        return "-"
    return str(first) if count == 1 else f"{first}-{first + count - 1}"


def notes(row: Mapping[str, Any], *, ages: bool) -> Iterator[str]:
    """What is to be said of a node in the status; with ages, since when.

    >>> list(notes({"state": "gone", "beat_s": 83.0, "note": "its lease expired"}, ages=True))
    ['its lease expired (83 s ago)']
    >>> list(notes({"state": "training", "taken_s": 5.0, "taken": "died", "note": ""}, ages=True))
    ['daemon died and was restarted 5.0 s ago; its workers kept running']
    """
    since = f" ({ago(row['beat_s'])} ago)" if ages and row["state"] == "gone" and row.get("beat_s") is not None else ""
    if row["note"]:
        yield row["note"] + since
    elif (taken_s := row.get("taken_s")) is not None:
        yield ENDS.get(row.get("taken", ""), "restarted{}").format(f" {ago(taken_s)} ago" if ages else "")


def ago(seconds: float | None) -> str:
    """An age or a span for people, to the nearest: in two parts where one alone would hide a tenth of it and more.

    >>> ago(0.42), ago(41.3), ago(100), ago(168), ago(740), ago(7300), ago(90_000), ago(None)
    ('0.4 s', '41 s', '1 m 40 s', '2 m 48 s', '12 m', '2 h 2 m', '25 h', '-')
    >>> ago(99.7), ago(599.7), ago(5399), ago(7199)
    ('1 m 40 s', '10 m', '90 m', '2 h')
    """
    if seconds is None:
        return "-"
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    if seconds < 99.5:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return _parts(round(seconds), 60, "m", "s")
    return _parts(round(seconds / 60), 60, "h", "m")


def _parts(number: int, size: int, large: str, small: str) -> str:
    whole, rest = divmod(number, size)
    if number >= 10 * size:
        return f"{number / size:.0f} {large}"
    return f"{whole} {large} {rest} {small}" if rest else f"{whole} {large}"


def bar(done: int, steps: int) -> str:
    """Steps done of all.

    >>> bar(1500, 6000)
    '[######..................] 1,500 of 6,000 steps'
    """
    full = BAR * min(done, steps) // steps
    return f"[{'#' * full}{'.' * (BAR - full)}] {done:,} of {steps:,} steps"


def past(picture: Mapping[str, Any], *, ages: bool = True) -> str:
    """What befell the job so far; empty if that is not known.

    >>> last = {"said": "n03: rank 1 died", "seconds": 0.21, "steps": 0, "rung": ""}
    >>> past({"uptime_s": 7300.0, "faults": 2, "mtbf_s": 3650.0, "last": last, "last_s": 41.0})
    '2 faults in 2 h 2 m (one every 61 m). Last fault 41 s ago: n03: rank 1 died. Recovered in 0.21 s; no steps lost.'
    >>> past({"uptime_s": 740.0, "faults": 0})
    'no fault in 12 m'
    >>> past({"uptime_s": 740.0, "faults": 0, "state": "RECOVERING"})
    'recovering from the first fault in 12 m'
    >>> past({"uptime_s": 740.0, "faults": 0, "state": "RECOVERING", "orderly": True})
    'no fault in 12 m'
    """
    uptime_s, faults, last = picture.get("uptime_s"), picture.get("faults", 0), picture.get("last")
    if uptime_s is None:
        return ""
    stops = ["stops and pauses not counted"] if ages and picture.get("stopped_s") else []
    since = f" in {ago(uptime_s)}" if ages else " so far"
    if not faults or not last:
        recovers = picture.get("state") == "RECOVERING" and not picture.get("orderly")
        return f"recovering from the first fault{since}" if recovers else f"no fault{since}"
    often = [f"one every {ago(picture['mtbf_s'])}"] if ages and faults > 1 else []
    aside = f" ({', '.join([*often, *stops])})" if often or stops else ""
    when = f" {ago(picture['last_s'])} ago" if ages and picture.get("last_s") is not None else ""
    return (
        f"{count(faults, 'fault')}{since}{aside}. Last fault{when}: {ended(last['said'])}{_how_it_ended(picture, last)}"
    )


def ended(sentence: str) -> str:
    """With a full stop.

    >>> ended("rank 1 died"), ended("rank 1 died.")
    ('rank 1 died.', 'rank 1 died.')
    """
    return f"{sentence.rstrip('.')}."


def _how_it_ended(picture: Mapping[str, Any], last: Mapping[str, Any]) -> str:
    lost = last.get("steps")
    cost = "" if lost is None else f"{count(lost, 'step') if lost else 'no steps'} lost"
    if last["seconds"] is not None:
        how = HOW.get(last.get("rung", ""), "")
        return ended(f" Recovered in {last['seconds']:.2f} s{f' ({how})' if how else ''}{f'; {cost}' if cost else ''}")
    state = ""
    if last.get("lasts"):
        state = " Training again." if picture.get("state") in {"TRAINING", "GROWING"} else " Not recovered yet."
    return f"{state} {cost[0].upper()}{cost[1:]}." if cost else state
