"""The report as one HTML file: no script, no link, nothing to fetch.

The one idea: a page is read from the top by somebody who was asleep. First what came of it, then what it cost, then why, then
the figures for those who want them; what is not known stands at the end, with what would have kept it.
"""

from collections.abc import Iterable, Sequence
from html import escape
from importlib.resources import files
from typing import Final

from elasticrl.diagnose.incident import Incident
from elasticrl.diagnose.report import TITLES
from elasticrl.report.charts import drawings, undrawn
from elasticrl.report.story import SLOW, STAGES, Story
from elasticrl.report.text import evaluation_rows, facts, headline, human, sample_rows, within

EVIDENCE: Final = 12  # facts of an incident that are spelled out
LISTED: Final = 1000  # rows of a table, the newest
LIGHT: Final = {
    "paper": "#ffffff", "page": "#f6f7f9", "ink": "#16191f", "soft": "#5b6472", "grid": "#d9dde4", "card": "#ffffff",
    "training": "#2f9e6e", "starting": "#b9c2cf", "recovering": "#e39b1f", "waiting": "#d5dae2", "done": "#7aa6d9",
    "fault": "#cf3a2f", "change": "#6b7482",
    "s0": "#3b6fb6", "s1": "#e08a2c", "s2": "#4aa17b", "s3": "#b0598f", "s4": "#8a7fd1", "s5": "#c9b037", "s6": "#5fb3c4",
    "s7": "#9aa3af",
}  # fmt: skip
DARK: Final = LIGHT | {
    "paper": "#171b22", "page": "#0f1216", "ink": "#e7eaef", "soft": "#a0a9b6", "grid": "#323945", "card": "#171b22",
    "training": "#3db981", "starting": "#525c6b", "recovering": "#efae3f", "waiting": "#3a424f", "done": "#5f8fc7",
    "fault": "#f0655a", "change": "#8c96a5", "s0": "#6b9be0", "s1": "#efa052", "s2": "#5fbf95", "s3": "#d07fb2",
    "s4": "#a79dea", "s5": "#dcc653", "s6": "#74c7d8", "s7": "#7d8794",
}  # fmt: skip
CSS: Final = (files(__package__) / "page.css").read_text(encoding="utf-8")
TITLED: Final = {
    "timeline": ("What happened when", "A line is a new generation, red if it answers a fault. No bar: the node was away."),
    "recoveries": ("What each recovery took", "From the first sign of the fault to the next sealed step."),
    "phases": ("Where a step's time goes", "Seconds of each step by phase"),
    "stragglers": ("Slow ranks", "A rank's own work beside the others' median, waits taken off."),
    "curve": ("What it learned", "A line at a fault, dotted at other changes of the plan: the curve should not notice either."),
    "pace": ("When it learned it", "The same over time: it stands still where a fault cost something."),
    "ages": ("What a fault would have cost", "How old the newest checkpoint on disk, and the newest step in memory, were."),
}  # fmt: skip


def page(story: Story) -> str:
    """The whole file."""
    drawn = drawings(story)
    body = [_head(story)]
    for name, (title, words) in TITLED.items():
        if name in drawn:
            said = f"<h2>{title}</h2><p class=soft>{escape(words + _more(name, story) + undrawn(name, story))}</p>"
            body.append(f"<section>{said}{drawn[name]}{_details(name, story)}</section>")
        if name == "pace":
            body.append(_evaluations(story))
        if name == "recoveries":
            body.append(_incidents(story.incidents, troubled=bool(story.faults)))
    body += [_state(story), _foot(story)]
    title = escape(f"{story.left.job}: elasticrl report")
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><meta name="color-scheme" content="light dark">'
        f"<style>{_variables(LIGHT)}@media (prefers-color-scheme: dark) {{{_variables(DARK)}}}{CSS}</style></head>"
        f"<body><main>{''.join(body)}</main></body></html>\n"
    )


def _more(name: str, story: Story) -> str:
    if name == "phases":
        return f", {story.phases_of}."
    if name == "stragglers" and story.heat is not None:
        return f" The slowest cell is at {story.heat.worst:.2f} times them; nothing under {SLOW:.2f} is coloured."
    return ""


def _variables(colours: dict[str, str]) -> str:
    font = "--font: system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif"
    return ":root {" + "; ".join([*(f"--{name}: {value}" for name, value in colours.items()), font]) + "}"


def _head(story: Story) -> str:
    tiles = "".join(
        f"<div{' class=bad' if 'NOT' in value + meaning else ''}><span>{escape(name)}</span><b>{escape(value)}</b>"
        f"<small>{escape(meaning)}</small></div>"
        for name, value, meaning in facts(story)
    )
    return (
        f"<header><h1>{escape(story.left.job)}</h1><p class=lead>{escape(headline(story))}</p></header>"
        f"<div class=figures>{tiles}</div>"
    )


def _details(name: str, story: Story) -> str:
    """The figures under a drawing."""
    if name == "timeline":
        rows = [
            (str(g.number), within(story, g.at), g.phase, g.rung, str(g.world), f"{g.step:,}", g.reason)
            for g in story.generations[-LISTED:]
        ]
        return _folded(
            _newest("Generations", len(story.generations)),
            table(("", "at (UTC)", "phase", "rung", "ranks", "step", "reason"), rows),
        )
    if name == "recoveries":
        rows2 = [
            (
                str(r.generation),
                r.rung,
                r.node,
                *(human(r.stages.get(n, 0.0)) for n in STAGES),
                r.reason,
            )
            for r in story.recoveries[-LISTED:]
        ]
        return _folded(
            _newest("Figures", len(story.recoveries)),
            table(("", "rung", "slowest at", *(n.replace("_", " ") for n in STAGES), "reason"), rows2),
        )
    return ""


def _newest(title: str, rows: int) -> str:
    return title if rows <= LISTED else f"{title}: the newest {LISTED:,} of {rows:,}"


def _incidents(incidents: Sequence[Incident], *, troubled: bool) -> str:
    if not incidents:
        said = "Faults were answered, but no verdict was written down." if troubled else "Nothing went wrong."
        return f"<section><h2>Incidents</h2><p class=soft>{said}</p></section>"
    return f"<section><h2>Incidents</h2>{''.join(map(_incident, incidents))}</section>"


def _incident(each: Incident) -> str:
    verdict = each.verdict
    who = (
        ", ".join([*(f"rank {rank}" for rank in verdict.ranks), *(f"node {node}" for node in verdict.nodes)])
        or "nobody is named"
    )
    cost = (
        f", {each.seconds:.2f} s without a sealed step"
        if each.seconds is not None
        else ", it lasts"
        if not each.ended
        else ""
    )
    because = [str(fact) for fact in verdict.because[:EVIDENCE]]
    parts = [
        f"<div class=incident><h3>{escape(TITLES[verdict.fault].capitalize())}: {escape(who)}</h3>",
        (
            f"<p class=soft>{escape(each.began.replace('T', ' ')[:19])} UTC, seen by {escape(each.node)}{escape(cost)}; "
            f"{escape(str(verdict.confidence))} confidence; {escape(each.id)}</p><p>{escape(verdict.cause)}</p>"
        ),
    ]
    if verdict.remedy:
        parts.append(f"<p><b>What to do.</b> {escape(verdict.remedy)}</p>")
    for title, lines in (
        ("Evidence", because),
        ("What would contradict it", verdict.against),
        ("What was done", each.actions),
        ("What happened", [f"{moment.at[11:23]} {moment.node} {moment.text}" for moment in each.timeline]),
    ):
        if lines:
            parts.append(_folded(title, _bullets(lines), shown=title == "Evidence"))
    return "".join([*parts, "</div>"])


def _state(story: Story) -> str:
    left = story.left
    lines = [
        each.sentence[:1].upper() + each.sentence[1:] + "." for each in (left.samples, left.digests) if each is not None
    ]
    if not (lines or left.checkpoints):
        return ""
    rows = [
        (
            entry.name, f"{entry.version.step:,}",
            "BROKEN" if entry.problem else "committed" if entry.committed else "not committed",
            entry.problem or (entry.manifest.written.replace("T", " ")[:19] if entry.manifest else ""),
        )
        for entry in left.checkpoints
    ]  # fmt: skip
    shown = table(("checkpoint", "step", "state", "written (UTC)"), rows) if rows else ""
    return f"<section><h2>Samples, bits, checkpoints</h2>{''.join(f'<p>{escape(line)}</p>' for line in lines)}{shown}</section>"


def _evaluations(story: Story) -> str:
    """How the policy answered held-out prompts, and some answers of the newest time, to be looked at."""
    told = story.left.evaluated
    if not told:
        return ""
    figures = evaluation_rows(told[-LISTED:])
    samples, newest = sample_rows(told), told[-1].step
    shown = f"<h3>Some answers, after step {newest:,}</h3>{table(*samples)}" if samples[1] else ""
    return f"<section><h2>Held-out prompts</h2>{table(*figures)}{shown}</section>"


def _foot(story: Story) -> str:
    parts = [f"<p class=soft>Read: {escape(', '.join(story.left.files) or 'nothing')}.</p>"]
    if story.left.unread:
        parts.append(_folded("Passed over", _bullets(story.left.unread)))
    if story.left_out:
        parts.append(f"<h3>Left out</h3>{_bullets(story.left_out)}")
    if story.missing:
        parts.append(f"<h3>Not known</h3>{_bullets(story.missing)}")
    return f"<section>{''.join(parts)}</section>"


def _folded(title: str, inner: str, *, shown: bool = False) -> str:
    return f"<details{' open' if shown else ''}><summary>{escape(title)}</summary>{inner}</details>"


def _bullets(lines: Iterable[str]) -> str:
    return f"<ul>{''.join(f'<li>{escape(line)}</li>' for line in lines)}</ul>"


def table(head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """As HTML."""
    first = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    rest = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in body)
    return f"<div class=scroll><table><tr>{first}</tr>{rest}</table></div>"
