"""The report in words: `elasticrl report RUN --text`, and the sentences that the page begins with."""

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from math import isfinite
from statistics import fmean, median
from typing import Final

from elasticrl.base.words import count
from elasticrl.contract.evaluated import Evaluated
from elasticrl.diagnose.incident import Incident
from elasticrl.diagnose.report import TITLES
from elasticrl.report.story import Story
from elasticrl.report.table import table

SHORT: Final = 60  # characters of a prompt or an answer in a terminal


def human(seconds: float) -> str:
    """A duration in as few words as will do.

    >>> human(0.034), human(4.2), human(75), human(5400), human(200000)
    ('34 ms', '4.2 s', '1 min 15 s', '1 h 30 min', '2 d 7 h')
    """
    if seconds < 0.1:
        return f"{seconds * 1000:.0f} ms" if seconds else "0"
    if seconds < 60:
        return f"{seconds:.3g} s"
    size, name, small, under = (
        (60, "min", 1, "s")
        if seconds < 3600
        else (3600, "h", 60, "min")
        if seconds < 86400
        else (86400, "d", 3600, "h")
    )
    rest = int(seconds % size // small)
    return f"{int(seconds // size)} {name}" + (f" {rest} {under}" if rest else "")


def clock(at: float) -> str:
    """When, UTC."""
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S")


def gone(story: Story) -> float | None:
    """Until when times of its first steps are not kept any more; None if they are, or but for a moment."""
    since, counted = story.since, story.counted
    return counted if since and counted and within(story, counted) > within(story, since) else None


def within(story: Story, at: float) -> str:
    """When, with the day where the story has several."""
    return clock(at)[11 if clock(story.begin)[:10] == clock(story.end)[:10] else 5 :]


def facts(story: Story) -> list[tuple[str, str, str]]:
    """The figures that matter, each as name, value and what it means."""
    left, whole = story.left, "of the time from its first training to its end"
    found = [
        ("steps", f"{story.steps:,}", "sealed: applied on every rank, whole in memory")
        if story.steps or not left.log.milestone
        else ("how far", left.log.milestone, "as the script's own log said last")
    ]
    if story.end > story.begin:
        found.append(
            ("time", human(story.end - story.begin), f"{clock(story.begin)} to {within(story, story.end)} UTC")
        )
    if story.goodput is not None:
        found.append(
            (
                "goodput",
                f"{story.goodput:.1%}",
                f"{whole}: the sealed steps, each counted with the time of a usual step"
                + (f" (as far as steps' times go back: {within(story, old)})" if (old := gone(story)) else ""),
            )
        )
    if story.trained is not None:
        words = (
            f"{whole if story.goodput is None else 'of the same time'}: every node of the plan was training; "
            "the rest is starting, recovering and holding"
        )
        found.append(("trained", f"{story.trained:.1%}", words))
    if story.held_s:
        words = "of that time: paused, or fewer nodes than it needs, so that no step is made"
        found.append(("held", human(story.held_s), words))
    if left.log.events:
        words = "each answered by a new generation" if story.faults else "no generation had to answer one"
        found.append(("faults", str(len(story.faults)), words))
    if story.faults and story.since is not None and story.until > story.since:
        apart = (story.until - story.since) / len(story.faults)
        found.append(("between faults", human(apart), "on average, from the first training to the end"))
    if story.recoveries:
        times = [each.total_s for each in story.recoveries]
        found.append(("recovery", human(median(times)), f"median; longest {human(max(times))}"))
    if left.samples is not None:
        word = "each exactly once" if left.samples.ok else "NOT proven" if left.samples.absent else "NOT exactly once"
        so_far = f", through step {left.samples.last}: the run goes on" if left.samples.beyond else ""
        found.append(("samples", f"{left.samples.samples:,}", word + so_far))
    if left.digests is not None:
        again = left.digests.rerun
        word = f"{count(again, 'step')} made again"
        found.append(
            ("bits", "same" if left.digests.ok else "NOT the same", f"{word}; {len(left.digests.steps):,} digests")
        )
    return found


def headline(story: Story) -> str:
    """One sentence."""
    left, faults = story.left, len(story.faults)
    met = {0: "no fault", 1: "one fault"}.get(faults, f"{faults} faults")
    met = met if left.log.events else "faults not known (no daemon's log is here)"
    far = f"{story.steps:,} steps"
    if left.log.milestone and not story.steps:
        far = f"{left.log.milestone} (by the script's log)"
    return f"{far} on {len(story.nodes) or 'unknown'} nodes, {met}. Its end: {story.outcome}."


def text(story: Story) -> str:
    """The whole report."""
    left = story.left
    lines = [f"{left.job}: {headline(story)}", "", *table(("", "", ""), facts(story))[1:]]
    for title, head, body in _tables(story):
        lines += ["", title, *table(head, body)] if body else []
    lines += _curves(story)
    for name, ages in (("newest disk checkpoint", story.commits), ("newest sealed step", story.sealed)):
        lines += ["", f"AGE of the {name}: at most {human(max(age.end - age.start for age in ages))}"] if ages else []
    lines += ["", "INCIDENTS", *(_incidents(story.incidents) or ["none was written down"])]
    lines += ["", f"Read: {', '.join(left.files)}."]
    lines += [f"Passed over: {reason}" for reason in left.unread]
    lines += [f"Left out: {reason}" for reason in story.left_out]
    lines += [f"Not known: {reason}" for reason in story.missing]
    return "\n".join(lines)


def _tables(story: Story) -> Iterator[tuple[str, Sequence[str], list[Sequence[str]]]]:
    """Title, head and rows of each."""
    yield (
        "GENERATIONS",
        ("number", "at (UTC)", "phase", "rung", "ranks", "step", "reason"),
        [
            (str(g.number), within(story, g.at), g.phase, g.rung, str(g.world), f"{g.step:,}", g.reason)
            for g in story.generations
        ],
    )
    yield (
        "RECOVERIES, each as its slowest node saw it",
        ("generation", "rung", "node", "total", "stages"),
        [
            (
                str(r.generation),
                r.rung,
                r.node,
                human(r.total_s),
                ", ".join(f"{k} {human(v)}" for k, v in r.stages.items()),
            )
            for r in story.recoveries
        ],
    )
    names = dict.fromkeys(name for _, spent in story.phases for name in spent)
    # The mean: a phase shorter than a look is seen in some steps only, and its median would be nothing.
    typical = {name: fmean(spent.get(name, 0.0) for _, spent in story.phases) for name in names}
    whole = sum(typical.values()) or 1.0
    yield (
        f"PHASES OF A STEP ({story.phases_of}), means of all steps; a phase under 50 ms may be counted in the one before it",
        ("phase", "takes", "share"),
        [
            (name, human(value), f"{value / whole:.0%}")
            for name, value in sorted(typical.items(), key=lambda kv: -kv[1])
        ],
    )
    cells = {} if story.heat is None else {r: [v for v in row if v is not None] for r, row in story.heat.cells.items()}
    slow = sorted(((rank, values) for rank, values in cells.items() if values), key=lambda kv: -median(kv[1]))[:10]
    nodes = story.heat.nodes if story.heat else {}
    yield (
        "SLOW RANKS, by their own work in relation to the others' median (1.00: the same)",
        ("rank", "node", "usually", "at worst"),
        [(str(rank), nodes[rank], f"{median(values):.2f}", f"{max(values):.2f}") for rank, values in slow],
    )
    if told := story.left.evaluated:
        yield ("HELD-OUT PROMPTS", *evaluation_rows(told))
        head, samples = sample_rows(told)
        yield (f"SOME ANSWERS to them, after step {told[-1].step:,}", head, [list(map(_short, row)) for row in samples])
    yield (
        "CHECKPOINTS",
        ("name", "state"),
        [
            (c.name, f"BROKEN: {c.problem}" if c.problem else "committed" if c.committed else "not committed")
            for c in story.left.checkpoints
        ],
    )


def evaluation_rows(told: Sequence[Evaluated]) -> tuple[Sequence[str], list[Sequence[str]]]:
    """Head and rows of the figures, a row for each evaluation."""
    names = list(dict.fromkeys(name for each in told for name in each.figures))
    rows = [
        [f"{each.step:,}", *(f"{each.figures[name]:.4g}" if name in each.figures else "" for name in names)]
        for each in told
    ]
    return ["after step", *names], list(rows)


def sample_rows(told: Sequence[Evaluated]) -> tuple[Sequence[str], list[Sequence[str]]]:
    """Head and rows of the newest one's answers."""
    samples = told[-1].samples
    parts = list(dict.fromkeys(name for each in samples for name in each.parts))
    rows = [
        [
            each.prompt,
            each.answer,
            f"{each.score:.4g}",
            *(f"{each.parts[name]:.4g}" if name in each.parts else "" for name in parts),
        ]
        for each in samples
    ]
    return ["prompt", "answer", "score", *parts], list(rows)


def _short(text: str) -> str:
    """In a terminal's line."""
    line = "".join(c if c.isprintable() else " " for c in text)
    return line if len(line) <= SHORT else f"{line[: SHORT - 3]}..."


def _curves(story: Story) -> list[str]:
    lines: list[str] = []
    parts = sorted({name for note in story.curve for name in note.facts if name.startswith("reward/")})
    for name in ("reward", *parts, "kl", "loss", "padding"):
        told = [(note.step, note.facts[name]) for note in story.curve if name in note.facts]
        if len(told) > 1:
            (first, start), (last, end), shape = told[0], told[-1], bars([value for _, value in told])
            lines.append(f"{name:7} {start:.3f} at step {first}, {end:.3f} at step {last}  {shape}")
    return ["", "CURVES", *lines] if lines else []


def _incidents(incidents: Sequence[Incident]) -> list[str]:
    lines: list[str] = []
    for each in incidents:
        verdict = each.verdict
        who = ", ".join([*(f"rank {rank}" for rank in verdict.ranks), *verdict.nodes]) or "nobody is named"
        what = f"{TITLES[verdict.fault]}, {who}, {verdict.confidence} confidence: {verdict.cause}"
        lines += [f"{each.id} ({each.node}): {what}", *(f"  because {fact}" for fact in verdict.because[:5])]
    return lines


def bars(values: Sequence[float], width: int = 40) -> str:
    """A curve in a line of text; an x where it is no number, as of a run that diverged.

    >>> bars([0.0, 0.5, 1.0]), bars([0.0, float("nan"), 1.0])
    ('▁▄█', '▁x█')
    """
    size = -(-len(values) // width)
    means = [sum(values[i : i + size]) / len(values[i : i + size]) for i in range(0, len(values), size)]
    drawn = [value for value in means if isfinite(value)]
    low, high = min(drawn, default=0.0), max(drawn, default=0.0)

    def bar(value: float) -> str:
        if not isfinite(value):
            return "x"
        return "▁▂▃▄▅▆▇█"[int(7 * (value - low) / (high - low)) if high > low else 0]

    return "".join(map(bar, means))
