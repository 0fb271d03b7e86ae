"""The drawings, as inline SVG, by matplotlib.

The one idea: a colour is a name. matplotlib draws with stand-ins that are replaced by CSS variables, so that one drawing is
right in the light and in the dark; and each is drawn twice, for a wide page and for a phone, because text that shrinks with its
picture cannot be read. No script: the page works in a mail client and under any content policy.

Why matplotlib: its SVG of one of these is 10 to 40 kB and needs nothing to be shown; plotly's or vega's needs 1 to 5 MB of
script in each page, and a browser that runs it.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from io import StringIO
from itertools import pairwise
from typing import Any, Final

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.patches import Polygon, Rectangle
from matplotlib.ticker import FuncFormatter, MaxNLocator

from elasticrl.base.parsed import instant
from elasticrl.report.story import SHOWN, SLOW, STAGES, Age, Generation, Story
from elasticrl.report.text import human

#: name -> the stand-in that is drawn with; the page's style says what it looks like.
COLOURS: Final[Mapping[str, str]] = {
    "ink": "#010101", "soft": "#010102", "grid": "#010103", "paper": "#010104",
    "training": "#020201", "starting": "#020202", "recovering": "#020203", "waiting": "#020204", "done": "#020205",
    "fault": "#030301", "change": "#030302",
    **{f"s{i}": f"#0404{i:02x}" for i in range(8)},
}  # fmt: skip
STYLE: Final[Any] = {
    "svg.fonttype": "none", "svg.hashsalt": "elasticrl", "font.family": "sans-serif", "font.size": 9,
    "text.color": COLOURS["ink"], "axes.labelcolor": COLOURS["soft"], "axes.edgecolor": COLOURS["grid"],
    "xtick.color": COLOURS["soft"], "ytick.color": COLOURS["soft"], "grid.color": COLOURS["grid"], "axes.grid.axis": "x",
    "axes.spines.top": False, "axes.spines.right": False, "axes.axisbelow": True, "legend.frameon": False,
    "axes.facecolor": "none", "figure.facecolor": "none", "legend.labelcolor": COLOURS["ink"], "grid.linewidth": 0.6,
    "lines.linewidth": 1.6, "lines.solid_capstyle": "round", "xtick.major.size": 0, "ytick.major.size": 0,
}  # fmt: skip
WIDE, PHONE = 9.4, 4.3  # inches; 72 units of the drawing each
ROWS: Final = SHOWN
TOLD: Final = 250  # bars of a drawing that have a tooltip, and lines across it
DRAWN: Final = 10_000  # bars of a drawing
POINTS: Final = 400  # of a curve; of more, each stretch's mean

#: Seconds between the ticks of an axis of time.
APART: Final = (
    0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400,
)  # fmt: skip

MARKED: Final = frozenset({"timeline", "phases", "curve", "pace"})  # drawings with a line for each generation
DRAWN_OF: Final = 8  # curves: as many as there are colours
CURVES: Final = ("reward", "kl", "loss")

Draw = Callable[[Figure, Story, bool], None]  # True: for a phone


def svg(name: str, draw: Draw, story: Story, height: Callable[[bool], float], alt: str) -> str:
    """Both drawings, of which the page shows the one that fits."""
    both = []
    for kind, width in (("wide", WIDE), ("phone", PHONE)):
        with mpl.rc_context(STYLE):
            figure = Figure(figsize=(width, height(kind == "phone")), layout="constrained")
            draw(figure, story, kind == "phone")
            out = StringIO()
            figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None}, transparent=True)
        drawn = _inline(out.getvalue(), f"{name}-{kind}")
        both.append(f'<div class="{kind}" role="img" aria-label="{escape(alt, quote=True)}">{drawn}</div>')
    return "".join(both)


def _inline(text: str, prefix: str) -> str:
    """An SVG file as part of a page: no prologue, ids of its own, colours by name, a width that follows the page."""
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
    text = re.sub(
        r'<svg [^>]*?viewBox="([^"]*)"[^>]*>',
        r'<svg xmlns="http://www.w3.org/2000/svg" viewBox="\1" aria-hidden="true">',
        text,
        count=1,
    )
    text = re.sub(r'\bid="([^"]+)"', rf'id="{prefix}-\1"', text)
    text = re.sub(r'(href="|url\()#([^")]+)', rf"\1#{prefix}-\2", text)
    text = re.sub(r"xmlns:xlink=\"[^\"]*\"", "", text).replace("xlink:href", "href")
    for name, stand_in in COLOURS.items():
        text = text.replace(stand_in, f"var(--{name})")
    text = re.sub(r"font: [^;\"]*", lambda m: re.sub(r"'[^']*'.*$", "var(--font)", m[0]), text)
    tip = rf'<g id="{prefix}-tip:([^"]*)">'
    text = re.sub(tip, lambda m: f"<g><title>{_untip(m[1])}</title>", text)
    return "\n".join(line.strip() for line in text.splitlines() if line.strip() and not line.strip().startswith("<!--"))


def tip(text: str) -> str:
    """A gid that becomes a tooltip. Coded, because an id is written unescaped."""
    return "tip:" + text.encode().hex()


def _untip(code: str) -> str:
    return escape(bytes.fromhex(code).decode())


# ---- what happens when


def timeline(figure: Figure, story: Story, phone: bool) -> None:
    """Nodes by rows, what they did by colour, generations as lines."""
    axes = figure.subplots()
    nodes = story.nodes[:ROWS]
    rows = {node: row for row, node in enumerate(nodes)}
    bars(
        axes,
        [
            Bar(
                row=rows[span.node], left=span.start - story.begin, width=span.end - span.start, height=0.62,
                colour=COLOURS[span.state], said=f"{span.node} {span.state} for {human(span.end - span.start)}",
            )
            for span in story.spans if span.node in rows
        ],
    )  # fmt: skip
    axes.set_yticks(range(len(nodes)), nodes)
    axes.set_ylim(len(nodes) - 0.45, -0.95)
    clock(axes, story, phone=phone)  # before the marks, whose numbers are as far apart as the axis allows
    marks(axes, [(each.at - story.begin, each) for each in story.generations], at=-0.6)
    diamonds(axes, story, rows)
    present = [
        state
        for state in ("training", "starting", "recovering", "waiting", "done")
        if any(span.state == state for span in story.spans)
    ]
    handles = [Rectangle((0, 0), 1, 1, color=COLOURS[state], label=state) for state in present]
    figure.legend(
        handles=handles, loc="outside upper left", ncols=3 if phone else 5, handlelength=0.9, columnspacing=1.2
    )
    if len(story.nodes) > ROWS:
        axes.set_title(f"the first {ROWS} of {len(story.nodes)} nodes", loc="left", fontsize=8, color=COLOURS["soft"])


def diamonds(axes: Axes, story: Story, rows: Mapping[str, int]) -> None:
    """Incidents, in the rows of those whom the verdict names; above all rows, where it names none that is shown."""
    for each in story.incidents[-TOLD:]:
        at = instant(each.began) - story.begin
        named: list[float] = [rows[node] for node in each.verdict.nodes if node in rows]
        for row in named or [-0.6]:
            (mark,) = axes.plot(
                [at], [row], marker="D", markersize=5.5, linestyle="none", color=COLOURS["fault"],
                markeredgecolor=COLOURS["paper"], zorder=4,
            )  # fmt: skip
            mark.set_gid(tip(f"incident: {each.verdict.said}"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """A rectangle on a row.

    Example: Bar(row=0, left=1.0, width=2.5, height=0.6, colour="#020201", said="n0 training for 2.5 s")
    """

    row: int
    left: float
    width: float
    height: float
    colour: str
    said: str
    alpha: float = 1.0

    @property
    def corners(self) -> list[tuple[float, float]]:
        """In the axes' own units."""
        low, high, right = self.row - self.height / 2, self.row + self.height / 2, self.left + self.width
        return [(self.left, low), (right, low), (right, high), (self.left, high)]


def bars(axes: Axes, found: Sequence[Bar]) -> None:
    """All of them as one collection but those that somebody may point at, the longest and darkest, which say what they are: a
    day of faults is thousands, and each that is an object of its own costs milliseconds.
    """
    ranked = sorted(found, key=lambda bar: -bar.width * bar.alpha)[:DRAWN]
    for bar in ranked[:TOLD]:
        shape = Polygon(bar.corners, facecolor=to_rgba(bar.colour, bar.alpha), linewidth=0)
        shape.set_gid(tip(bar.said))
        axes.add_patch(shape)
    rest = ranked[TOLD:]
    if rest:
        colours = [to_rgba(bar.colour, bar.alpha) for bar in rest]
        axes.add_collection(
            PolyCollection([bar.corners for bar in rest], facecolors=colours, linewidths=0), autolim=False
        )


def marks(axes: Axes, places: Sequence[tuple[float, Generation]], at: float | None = None) -> None:
    """Faults as full lines, other changes of the plan as dotted ones; numbers where there is room."""
    low, high = axes.get_xlim()
    last = -1e18
    for x, each in spaced(places):
        line = axes.axvline(
            x,
            color=COLOURS["fault" if each.fault else "change"],
            linewidth=1.1 if each.fault else 0.8,
            linestyle="-" if each.fault else (0, (2, 2)),
            zorder=3,
        )
        line.set_gid(tip(f"generation {each.number}: {each.reason}"))
        if at is not None and x - last > (high - low) / 28:
            axes.text(
                x,
                at,
                f"{each.number}",
                ha="center",
                va="center",
                fontsize=7.5,
                color=COLOURS["fault" if each.fault else "soft"],
                bbox={"facecolor": COLOURS["paper"], "edgecolor": "none", "pad": 1.2},
            )
            last = x


def spaced(places: Sequence[tuple[float, Generation]], most: int | None = None) -> list[tuple[float, Generation]]:
    """At most so many lines: of more, the first in each stretch of the axis, or the first that answers a fault."""
    most = TOLD if most is None else most
    if len(places) <= most:
        return list(places)
    low = min(x for x, _ in places)
    width = (max(x for x, _ in places) - low) / most or 1.0
    kept: dict[int, tuple[float, Generation]] = {}
    for x, each in places:
        stretch = min(most - 1, int((x - low) / width))
        if stretch not in kept or (each.fault and not kept[stretch][1].fault):
            kept[stretch] = x, each
    return [kept[stretch] for stretch in sorted(kept)]


def undrawn(name: str, story: Story) -> str:
    """What a drawing leaves out, because it would be too much for a page, in sentences."""
    said = []
    if name in MARKED and len(story.generations) > TOLD:
        said.append(
            f"Of {len(story.generations):,} generations at most {TOLD} are drawn as lines: one in each stretch, which answers "
            "a fault if any of it does."
        )
    if name == "timeline" and len(story.spans) > DRAWN:
        said.append(f"Of {len(story.spans):,} bars the longest {DRAWN:,} are drawn.")
    return "".join(f" {sentence}" for sentence in said)


def clock(axes: Axes, story: Story, *, phone: bool) -> None:
    """Time since the first line."""
    span = max(1e-3, story.end - story.begin)
    axes.set_xlim(0, span)
    axes.set_xticks(ticks(span, 4 if phone else 7))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: human(value)))
    axes.grid(visible=True, axis="x")


def ticks(span: float, most: int) -> list[float]:
    """Moments for an axis of time: whole seconds, minutes, hours or days, as people count them.

    >>> ticks(200.0, 7), ticks(200.0, 4), ticks(5000.0, 4)
    ([0, 30, 60, 90, 120, 150, 180], [0, 60, 120, 180], [0, 1800, 3600])
    """
    step = next((step for step in APART if span / step < most), 86400 * int(span // (86400 * most) + 1))
    return [step * i for i in range(int(span / step) + 1)]


# ---- what it cost


def recoveries(figure: Figure, story: Story, phone: bool) -> None:
    """A bar for each recovery, by stage."""
    axes = figure.subplots()
    shown = story.recoveries[-ROWS:]
    stages = [name for name in STAGES if any(name in each.stages for each in shown)]
    for row, each in enumerate(shown):
        left = 0.0
        for i, name in enumerate(stages):
            took = max(0.0, each.stages.get(name, 0.0))
            bar = axes.barh(row, took, left=left, height=0.6, color=COLOURS[f"s{i}"], linewidth=0)
            bar[0].set_gid(tip(f"{name.replace('_', ' ')}: {human(took)}"))
            left += took
        axes.annotate(
            human(each.total_s), (left, row), xytext=(4, 0), textcoords="offset points", va="center", fontsize=8.5
        )
    axes.set_yticks(
        range(len(shown)), [f"{each.generation}" if phone else f"{each.generation} {each.rung}" for each in shown]
    )
    axes.set_ylim(len(shown) - 0.4, -0.6)
    axes.set_xlim(0, max(each.total_s for each in shown) * (1.25 if phone else 1.12))
    axes.xaxis.set_major_locator(MaxNLocator(5))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: human(value)))
    axes.set_ylabel("generation")
    axes.grid(visible=True, axis="x")
    handles = [
        Rectangle((0, 0), 1, 1, color=COLOURS[f"s{i}"], label=name.replace("_", " ")) for i, name in enumerate(stages)
    ]
    figure.legend(
        handles=handles, loc="outside upper left", ncols=3 if phone else 5, handlelength=0.9, columnspacing=1.2
    )


def phases(figure: Figure, story: Story, phone: bool) -> None:
    """Seconds of a step, stacked by phase, over steps."""
    axes = figure.subplots()
    steps = [float(step) for step, _ in story.phases]
    names = by_weight(story)
    rows = [[spent.get(name, 0.0) for _, spent in story.phases] for name in names[:7]]
    rest = [sum(spent.get(name, 0.0) for name in names[7:]) for _, spent in story.phases]
    labels = [*names[:7], *(["the rest"] if len(names) > 7 else [])]
    rows = [*rows, *([rest] if len(names) > 7 else [])]
    thin = [thinned(steps, row) for row in rows]
    axes.stackplot(
        thin[0][0],
        *[row for _, row in thin],
        colors=[COLOURS[f"s{i}"] for i in range(len(rows))],
        linewidth=0,
        step="mid",
    )
    axes.set_xlim(steps[0], steps[-1])
    total = sorted(sum(spent.values()) for _, spent in story.phases)
    axes.set_ylim(
        0, 1.15 * total[min(len(total) - 1, int(0.98 * len(total)))]
    )  # one long recovery must not flatten all else
    marks(axes, [(each.step + 0.5, each) for each in story.generations[1:]])
    step_axis(axes)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: human(value)))
    handles = [Rectangle((0, 0), 1, 1, color=COLOURS[f"s{i}"], label=name) for i, name in enumerate(labels)]
    figure.legend(
        handles=handles, loc="outside upper left", ncols=4 if phone else 8, handlelength=0.9, columnspacing=1.0
    )


def by_weight(story: Story) -> list[str]:
    """Phases, the longest in all first."""
    total: dict[str, float] = {}
    for _, spent in story.phases:
        for name, seconds in spent.items():
            total[name] = total.get(name, 0.0) + seconds
    return sorted(total, key=lambda name: -total[name])


def thinned(xs: Sequence[float], ys: Sequence[float], points: int = POINTS) -> tuple[list[float], list[float]]:
    """At most so many points: means of stretches.

    >>> thinned([0, 1, 2, 3], [1.0, 3.0, 5.0, 7.0], points=2)
    ([0.5, 2.5], [2.0, 6.0])
    """
    size = -(-len(xs) // points)
    cut = [(xs[i : i + size], ys[i : i + size]) for i in range(0, len(xs), size)]
    return [sum(x) / len(x) for x, _ in cut] if size > 1 else list(xs), [
        sum(y) / len(y) for _, y in cut
    ] if size > 1 else list(ys)


def step_axis(axes: Axes) -> None:
    """Steps, whole ones."""
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.set_xlabel("step")


def stragglers(figure: Figure, story: Story, phone: bool) -> None:
    """Ranks by rows, time by columns; the darker, the slower beside the others."""
    found = story.heat
    assert found is not None
    axes = figure.subplots()
    ranks = sorted(found.ranks, key=lambda rank: -max((v or 1.0) for v in found.cells[rank]))[:ROWS]
    ranks.sort()
    top = max(2.0, found.worst)
    for row in range(len(ranks)):
        axes.barh(
            row,
            found.edges[-1] - found.edges[0],
            left=found.edges[0] - story.begin,
            height=0.9,
            color=COLOURS["grid"],
            alpha=0.35,
            linewidth=0,
        )
    bars(
        axes,
        [
            Bar(
                row=row, left=left - story.begin, width=right - left, height=0.9, colour=COLOURS["fault"],
                alpha=round(min(1.0, 0.15 + 0.85 * (value - 1.0) / (top - 1.0)), 2),
                said=f"rank {rank} on {found.nodes[rank]}: {value:.2f} times the others' median",
            )
            for row, rank in enumerate(ranks)
            for (left, right), value in zip(pairwise(found.edges), found.cells[rank], strict=True)
            if value is not None and value >= SLOW
        ],
    )  # fmt: skip
    axes.set_yticks(range(len(ranks)), [f"{rank}" if phone else f"{rank} ({found.nodes[rank]})" for rank in ranks])
    axes.set_ylim(len(ranks) - 0.5, -0.5)
    axes.set_ylabel("rank")
    clock(axes, story, phone=phone)
    axes.grid(visible=False)


def curves_of(story: Story) -> list[str]:
    """What is drawn over steps: the trainer's figures, and each of several rewards."""
    told = {name for note in story.curve for name in note.facts}
    return [*(name for name in CURVES if name in told), *sorted(name for name in told if name.startswith("reward/"))][
        :DRAWN_OF
    ]


def curve(figure: Figure, story: Story, _phone: bool) -> None:
    """Reward, KL and loss over steps."""
    names = curves_of(story)
    panels = figure.subplots(len(names), 1, sharex=True, squeeze=False)[:, 0]
    for i, (name, axes) in enumerate(zip(names, panels, strict=True)):
        told = [(float(note.step), note.facts[name]) for note in story.curve if name in note.facts]
        xs, ys = thinned([x for x, _ in told], [y for _, y in told])
        axes.plot(xs, ys, color=COLOURS[f"s{i}"])
        axes.set_ylabel(name)
        axes.set_xlim(told[0][0], max(told[-1][0], told[0][0] + 1))
        axes.grid(visible=True, axis="y")
        axes.yaxis.set_major_locator(MaxNLocator(4))
        marks(axes, [(each.step - 0.5, each) for each in story.generations[1:]])
    step_axis(panels[-1])


def timed(story: Story) -> list[tuple[float, float]]:
    """The first of the curves, by seconds since the beginning, as far as its history has the time of day."""
    name = next((name for name in CURVES if any(name in note.facts for note in story.curve)), "")
    rows = [
        (note.at - story.begin, note.facts[name]) for note in story.curve if note.at is not None and name in note.facts
    ]
    return [(x, y) for x, y in rows if 0 <= x <= story.end - story.begin]


def pace(figure: Figure, story: Story, phone: bool) -> None:
    """Reward over time."""
    axes = figure.subplots()
    told = timed(story)
    axes.plot(*thinned([x for x, _ in told], [y for _, y in told]), color=COLOURS["s0"])
    axes.set_ylabel(next(name for name in CURVES if any(name in note.facts for note in story.curve)))
    axes.yaxis.set_major_locator(MaxNLocator(4))
    clock(axes, story, phone=phone)
    marks(axes, [(each.at - story.begin, each) for each in story.generations[1:]])


def ages(figure: Figure, story: Story, phone: bool) -> None:
    """How old the newest checkpoint, and the newest step in memory, were."""
    rows: list[tuple[str, Sequence[Age]]] = [("disk checkpoint", story.commits), ("newest sealed step", story.sealed)]
    rows = [(name, found) for name, found in rows if found]
    panels = figure.subplots(len(rows), 1, sharex=True, squeeze=False)[:, 0]
    for i, ((name, found), axes) in enumerate(zip(rows, panels, strict=True)):
        kept = (
            found
            if len(found) <= POINTS
            else sorted(sorted(found, key=lambda age: age.start - age.end)[:POINTS], key=lambda age: age.start)
        )
        xs = [x - story.begin for age in kept for x in (age.start, age.end, age.end)]
        ys = [y for age in kept for y in (0.0, age.end - age.start, 0.0)]
        axes.fill_between(xs, ys, color=COLOURS[f"s{i}"], alpha=0.25, linewidth=0)
        axes.plot(xs, ys, color=COLOURS[f"s{i}"], linewidth=1.1)
        axes.set_title(name, loc="left", fontsize=8.5, color=COLOURS["soft"])
        axes.yaxis.set_major_locator(MaxNLocator(3))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: human(value)))
        axes.set_ylim(bottom=0)
        clock(axes, story, phone=phone)


ALT: Final[Mapping[str, str]] = {
    "timeline": "what each node did when",
    "recoveries": "seconds of each recovery by stage",
    "phases": "seconds of each step by phase",
    "stragglers": "ranks that were slower than the others",
    "curve": "reward, KL and loss by step",
    "pace": "reward over time",
    "ages": "age of the newest checkpoint and of the newest sealed step",
}


def drawings(story: Story) -> dict[str, str]:
    """All that there is data for, by name."""
    nodes, ranks = min(ROWS, len(story.nodes)), min(ROWS, len(story.heat.ranks) if story.heat else 0)
    answered, facts = min(ROWS, len(story.recoveries)), len(curves_of(story))
    panels = bool(story.commits) + bool(story.sealed)
    plans: list[tuple[str, Draw, bool, Callable[[bool], float]]] = [
        ("timeline", timeline, bool(story.spans), lambda phone: 1.1 + 0.3 * nodes + 0.2 * phone),
        ("recoveries", recoveries, bool(story.recoveries), lambda _: 0.9 + 0.32 * answered),
        ("phases", phases, len(story.phases) > 1, lambda phone: 2.7 + 0.3 * phone),
        ("stragglers", stragglers, story.heat is not None, lambda _: 0.75 + 0.26 * ranks),
        ("curve", curve, len(story.curve) > 1, lambda _: 0.4 + 1.25 * facts),
        ("pace", pace, len(timed(story)) > 1, lambda _: 1.8),
        ("ages", ages, panels > 0, lambda _: 0.4 + 1.1 * panels),
    ]
    return {name: svg(name, draw, story, height, ALT[name]) for name, draw, there, height in plans if there}
