"""The race's results as a page, a plot, and the comparison's table of them; pure, but for `write`.

The one idea: a cell is made of all its trials. What did not come back is counted in it, and never averaged away.
"""

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any
from xml.sax.saxutils import escape

from bench.race.judge import Outcome
from bench.report import noisy, show, summary

#: What each fault is, in the order of the page.
FAULTS: Mapping[str, str] = {
    "worker": "kill -9 of one worker",
    "node": "kill -9 of a node, never back",
    "node-back": "kill -9 of a node, back after 0.5 s",
    "stop": "SIGSTOP of one worker",
    "hang": "a training thread hangs",
    "coordinator": "the coordinator dies, back after 0.5 s",
    "store": "the whole store dies, back after 0.5 s",
    "join": "a third node joins",
    "power": "power loss of all, back after 0.5 s",
}
HEAD = [
    "fault",
    "side",
    "trials",
    "survivors",
    "full strength",
    "steps lost",
    "samples",
    "same bits",
    "blamed",
    "would help",
]
JOB_HEAD = ["side", "faults", "steps", "of undisturbed", "lost", "same bits", "what else", "when, of what"]
MADE = (
    "Made by `python bench/race/race.py` (`make race`), which says what each fault is and how it is done; do not edit."
)
BUSY_LOAD = 0.75  # of the cores: the median load, where nobody looked what others took
BUSY = "**The machine was too busy to tell seconds:** read who comes back and who does not, not how fast."
WHAT = """\
Three one-worker nodes on loopback, 50 ms steps, gloo, CPU, a save to disk every 20 steps. Seconds from the fault to the next
step of the *survivors* / of *all three* (for elasticrl: the next sealed step); medians, with ranges where there are several
trials. After the death of a coordinator or a store, and while a node joins, the survivors' figure is their longest pause;
whether a job whose coordinator came back also survives its next fault is not asked."""
COLUMNS = """\
*Steps lost*: made before the fault and made again. *Samples*: lost / trained more than once, by the steps that count in the
end. *Same bits*: the last step's weights are those of an undisturbed run of three workers. *Blamed*: what the side's own plan
or logs name; for launchers each agent's word of its own worker. *Would help*: the setting that avoids what was lost."""
GOODPUT = """\
One job of each side, struck for some minutes (`python bench/goodput.py --record --sides ...`): a worker and a node are killed
in turn, and nodes come back. *Of undisturbed*: the share of an undisturbed job's steps that it makes. *Lost*: seconds of
training by a fault of each kind, until the next one; medians, with ranges. The newest run of each."""
JOBS = Path(__file__).parent / "goodput.jsonl"
PAGE = Path(__file__).parents[1] / "COMPARISON.md"
BEGIN, END = "<!-- by bench/race/race.py; do not edit -->", "<!-- end of what it writes -->"
NOT_RUN = ("not run", "did not start", "the bench failed")
COLOURS = ("#0b6e4f", "#b3541e", "#e0a458", "#3d5a80", "#7fa6d6", "#8e44ad", "#c39bd3", "#7f8c8d", "#2c3e50")


def seconds(values: Sequence[float | None], ends: Sequence[str] = ()) -> str:
    """Median and range of those that came, and how many did not. Example: "4.1 (3.9-6.0), 2 of 5 job lost" """
    came = sorted(value for value in values if value is not None)
    said = []
    if came:
        spread = f" ({number(came[0])}-{number(came[-1])})" if len(came) > 1 else ""
        said.append(f"{number(median(came))}{spread}")
    for end in sorted({end for end in ends if end}):
        count = list(ends).count(end)
        said.append(end if count == len(ends) else f"{count} of {len(ends)} {end}")
    return ", ".join(said) or "-"


def number(value: float) -> str:
    """Seconds with as many digits as they deserve."""
    return f"{value:.2f}" if value < 10 else f"{value:.0f}"


def sides(outcomes: Sequence[Outcome]) -> list[str]:
    """In the order of their first trials."""
    return list(dict.fromkeys(outcome.side for outcome in outcomes))


def ran(trial: Outcome) -> bool:
    """Was the fault done to a job that trained? What never got so far says nothing about the fault."""
    return not trial.end.startswith(NOT_RUN)


def cell(trials: Sequence[Outcome]) -> str:
    """Survivors / full strength; what did not come; or why the trial could not be."""
    trials = [trial for trial in trials if ran(trial)] or trials
    if not trials:
        return "-"
    survivors, full = [trial.survivors_s for trial in trials], [trial.full_s for trial in trials]
    ends = [trial.end for trial in trials]
    if not any(value is not None for value in (*survivors, *full)):
        return seconds([], [end.partition(":")[0] for end in ends])
    return f"{seconds(survivors)} / {seconds(full, ends)}"


def by_cell(outcomes: Sequence[Outcome]) -> dict[tuple[str, str], list[Outcome]]:
    """Trials of each fault and side."""
    found: dict[tuple[str, str], list[Outcome]] = {}
    for outcome in outcomes:
        found.setdefault((outcome.fault, outcome.side), []).append(outcome)
    return found


def rows(outcomes: Sequence[Outcome]) -> list[list[str]]:
    """The short table."""
    cells, names = by_cell(outcomes), sides(outcomes)
    seen = [fault for fault in FAULTS if any(key[0] == fault for key in cells)]
    return [[fault, *(cell(cells.get((fault, side), [])) for side in names)] for fault in seen]


def comparison(outcomes: Sequence[Outcome]) -> str:
    """What bench/COMPARISON.md says of the race: a table of medians, and of what was lost in all faults."""
    cells, names = by_cell(outcomes), sides(outcomes)
    there = [fault for fault in FAULTS if any(key[0] == fault for key in cells)]
    body = [[FAULTS[fault], *(brief(cells.get((fault, side), [])) for side in names)] for fault in there]
    of = {side: [trial for trial in outcomes if trial.side == side and ran(trial)] for side in names}
    power = {side: [trial.steps_lost for trial in of[side] if trial.fault == "power"] for side in names}
    body += [
        ["steps that power loss took", *(counts(power[side]) for side in names)],
        ["samples lost / used twice, at most in one fault", *(worst(of[side]) for side in names)],
        ["of trials whose bits were compared: the undisturbed run's", *(exact(of[side]) for side in names)],
    ]
    busy = [BUSY] if too_busy(outcomes) else []
    return "\n\n".join([f"{often(outcomes)}, {days(outcomes)}.", *busy, markdown(["", *names], body)])


def brief(trials: Sequence[Outcome]) -> str:
    """Medians of survivors / full strength, one figure where they are alike; and how the others ended."""
    tried = [trial for trial in trials if ran(trial)]
    if not tried:
        return trials[0].end.partition(":")[0] if trials else "-"
    first, full = short([trial.survivors_s for trial in tried]), short([trial.full_s for trial in tried])
    ends = Counter(trial.end for trial in tried if trial.end)
    said = [end if count == len(tried) else f"{count} of {len(tried)} {end}" for end, count in sorted(ends.items())]
    return " / ".join(dict.fromkeys(filter(None, (first, ", ".join(filter(None, (full, *said))))))) or "-"


def short(values: Sequence[float | None]) -> str:
    """The median, with two digits that count; empty if there is none."""
    came = [value for value in values if value is not None]
    if not came:
        return ""
    middle = median(came)
    return f"{middle:.2f}" if middle < 1 else f"{middle:.1f}" if middle < 10 else f"{middle:.0f}"


def worst(trials: Sequence[Outcome]) -> str:
    """Example: "46 / 0" """
    fields = ([trial.samples_lost for trial in trials], [trial.samples_repeated for trial in trials])
    known = [[value for value in values if value is not None] for values in fields]
    return " / ".join(str(max(values)) if values else "-" for values in known)


def exact(trials: Sequence[Outcome]) -> str:
    """Of those whose bits could be compared. Example: "9 of 10" """
    known = [trial.same_bits for trial in trials if trial.same_bits is not None]
    return f"{sum(known)} of {len(known)}" if known else "-"


def newest(lines: Iterable[str]) -> list[dict[str, Any]]:
    """The newest job of each side, as `bench/goodput.py --record` has left them; in the order of their first ones."""
    found: dict[tuple[str, bool], dict[str, Any]] = {}
    for line in lines:
        job = json.loads(line)
        found[job["side"], job["mixed"]] = job
    return list(found.values())


def goodput(jobs: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """A row for each job."""
    found = []
    for job in jobs:
        result, settings = job["result"], job["settings"]
        costs = (
            f"{kind} {number(cost['median'])} ({number(cost['min'])}-{number(cost['max'])})"
            for kind, cost in result["lost_by_kind_s"].items()
        )
        found.append(
            [
                job["side"] + (" (faults of all kinds)" if job["mixed"] else ""),
                f"{sum(result['faults'].values())}, every {settings['every']:g} s for {settings['minutes']:g} minutes",
                str(result["steps"]),
                f"{100 * result['of_undisturbed']:.1f} %",
                ", ".join(costs),
                {True: "yes", False: "no", None: "-"}[result["same_bits"]],
                "; ".join(filter(None, (result["wrong"], job["noise"]))),
                f"{job['day']}, {job['commit']}",
            ]
        )
    return found


def between_marks(text: str, table: str) -> str:
    """The page with this table in the place of the one that it has."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    assert after, f"bench/COMPARISON.md has no {BEGIN} ... {END}"
    return f"{before}{BEGIN}\n\n{table}\n\n{END}{after}"


def detail(outcomes: Sequence[Outcome], remedies: Mapping[tuple[str, str], str]) -> list[list[str]]:
    """The long table: a row for each fault and side that was run."""
    cells = by_cell(outcomes)
    found = []
    for fault in FAULTS:
        for side in sides(outcomes):
            trials = [trial for trial in cells.get((fault, side), []) if ran(trial)]
            if trials:
                bad = any(trial.end for trial in trials)
                blamed = list(dict.fromkeys(trial.blamed for trial in trials if trial.blamed))
                found.append(
                    [
                        fault, side, str(len(trials)),
                        seconds([trial.survivors_s for trial in trials]),
                        seconds([trial.full_s for trial in trials], [trial.end for trial in trials]),
                        counts([trial.steps_lost for trial in trials]),
                        f"{counts([t.samples_lost for t in trials])} / {counts([t.samples_repeated for t in trials])}",
                        bits([trial.same_bits for trial in trials]),
                        " · ".join(blamed) or "nobody",
                        remedies.get((side, fault), "none known to us") if bad else "",
                    ]
                )  # fmt: skip
    return found


def counts(values: Sequence[int | None]) -> str:
    """Median, and the range if there is one. Example: "0", "12 (3-19)", "-" """
    known = sorted(value for value in values if value is not None)
    if not known:
        return "-"
    return f"{median(known):g}" + (f" ({known[0]}-{known[-1]})" if known[0] != known[-1] else "")


def bits(values: Sequence[bool | None]) -> str:
    """Are they the undisturbed run's?"""
    known = [value for value in values if value is not None]
    if not known:
        return "-"
    return "yes" if all(known) else "no" if not any(known) else f"{sum(known)} of {len(known)}"


def markdown(head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """A table."""
    lines = [head, ["---"] * len(head), *body]
    return "\n".join(
        "| " + " | ".join(text.replace("|", "\\|").replace("\n", " ") for text in line) + " |" for line in lines
    )


def page(
    outcomes: Sequence[Outcome],
    machine: Mapping[str, Any],
    when: datetime,
    about: Mapping[str, str],
    remedies: Mapping[tuple[str, str], str],
    note: str = "",
    jobs: Sequence[Mapping[str, Any]] = (),
) -> str:
    """RESULTS.md."""
    run = [outcome for outcome in outcomes if ran(outcome)]
    absent = sorted({(o.side, o.fault, o.end.removeprefix("not run: ")) for o in outcomes if not ran(o)})
    loads = [outcome.load for outcome in run if outcome.load] or [0.0]
    cores = int(machine.get("cores") or 1)
    facts = ", ".join(f"{name} {machine[name]}" for name in ("python", "torch", "elasticrl") if name in machine)
    places = [*seen(o.machine for o in run), *(f"commit {name}" for name in seen(o.commit for o in run))]
    load = f"{min(loads):.1f} to {max(loads):.1f}, median {median(loads):.1f}"
    ran_on = days(run) or f"{when:%Y-%m-%d}"
    parts = [
        "# The race",
        f"{MADE} {ran_on}, {cores} cores, {facts}. {often(run)}. Load when they began: {load}.",
        *([f"Where and of what, as far as trials say: {'; '.join(places)}."] if places else []),
        *([BUSY] if too_busy(run, cores) else []),
        *([note] if note else []),
        WHAT,
        markdown(["fault", *sides(outcomes)], rows(outcomes)),
        "![seconds to full strength](results.svg)",
        *(["## Goodput", GOODPUT, markdown(JOB_HEAD, goodput(jobs))] if jobs else []),
        "## Everything that was looked at",
        COLUMNS,
        markdown(HEAD, detail(outcomes, remedies)),
        "## How each side was run",
        "\n".join(f"- **{side}**: {about.get(side, '')}." for side in sides(outcomes)),
    ]
    if absent:
        parts += ["## What could not be run", "\n".join(f"- {side}, {fault}: {why}." for side, fault, why in absent)]
    return "\n\n".join(parts) + "\n"


def seen(values: Iterable[str]) -> list[str]:
    """Each once, in their order; what is not known is left out."""
    return list(dict.fromkeys(filter(None, values)))


def often(outcomes: Sequence[Outcome]) -> str:
    """Example: "Trials of each: 1 to 2" """
    tried = [len(trials) for trials in by_cell([o for o in outcomes if ran(o)]).values()] or [0]
    return f"Trials of each: {' to '.join(str(count) for count in dict.fromkeys((min(tried), max(tried))))}"


def too_busy(outcomes: Sequence[Outcome], cores: int = 2) -> bool:
    """Do the seconds say nothing? By what others took, and where nobody looked, by the load."""
    loads = [outcome.load for outcome in outcomes if ran(outcome) and outcome.load] or [0.0]
    return bool(noise(outcomes)) or median(loads) > BUSY_LOAD * cores


def noise(outcomes: Sequence[Outcome]) -> str:
    """Why seconds say nothing, by what others took before each trial; empty if they do, or if nobody looked."""
    return noisy([outcome.others for outcome in outcomes if ran(outcome) and outcome.others is not None])


def figures(outcomes: Sequence[Outcome]) -> dict[str, dict[str, dict[str, Any]]]:
    """The short table for machines: of each fault and side, how many trials, medians and ranges, and how the others ended."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for (fault, side), trials in by_cell([outcome for outcome in outcomes if ran(outcome)]).items():
        fields = ("survivors_s", "full_s", "steps_lost", "samples_lost", "samples_repeated")
        values = {name: [getattr(trial, name) for trial in trials] for name in fields}
        found.setdefault(fault, {})[side] = {
            "trials": len(trials),
            **{name: summary([value for value in row if value is not None]) for name, row in values.items()},
            "ends": dict(Counter(trial.end for trial in trials if trial.end)),
        }
    return found


def days(outcomes: Sequence[Outcome]) -> str:
    """When the trials were run. Example: "2026-11-22 to 2026-11-24" """
    known = sorted({outcome.day for outcome in outcomes if outcome.day})
    return " to ".join(dict.fromkeys((*known[:1], *known[-1:])))


def plot(outcomes: Sequence[Outcome]) -> str:
    """Seconds to full strength (to the survivors' next step, where the node stays away), on a logarithmic axis, as SVG."""
    names, cells = sides(outcomes), by_cell(outcomes)
    faults = [fault for fault in FAULTS if any(key[0] == fault for key in cells)]
    left, width, row = 250, 620, 14 * len(names) + 16
    height = 60 + row * len(faults)
    low, high = math.log10(0.1), math.log10(100.0)

    def x(value: float) -> float:
        return left + width * (math.log10(min(max(value, 0.1), 100.0)) - low) / (high - low)

    size = f'width="{left + width + 110}" height="{height + 20 * len(names)}"'
    svg = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="11">',
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    for tick in (0.1, 1, 10, 100):
        svg.append(f'<line x1="{x(tick):.0f}" x2="{x(tick):.0f}" y1="30" y2="{height - 20}" stroke="#ddd"/>')
        svg.append(f'<text x="{x(tick):.0f}" y="22" text-anchor="middle">{tick:g} s</text>')
    for index, fault in enumerate(faults):
        top = 36 + row * index
        svg.append(f'<text x="10" y="{top + row / 2:.0f}">{escape(FAULTS[fault])}</text>')
        for place, side in enumerate(names):
            trials, y, colour = cells.get((fault, side), []), top + 10 + 14 * place, COLOURS[place % len(COLOURS)]
            values = [value for t in trials if (value := t.survivors_s if fault == "node" else best(t)) is not None]
            dot = f'cy="{y}" r="4" fill="{colour}" fill-opacity="0.7"'
            svg += [f'<circle cx="{x(value):.1f}" {dot}/>' for value in values]
            lost = [t.end for t in trials if t.end and ran(t)]
            if lost:
                svg.append(
                    f'<text x="{left + width + 6}" y="{y + 4}" fill="{colour}">{escape(lost[0].partition(":")[0])}</text>'
                )
    for place, side in enumerate(names):
        y = height + 20 * place
        svg.append(f'<circle cx="{left}" cy="{y}" r="4" fill="{COLOURS[place % len(COLOURS)]}"/>')
        svg.append(f'<text x="{left + 10}" y="{y + 4}">{escape(side)}</text>')
    return "\n".join([*svg, "</svg>", ""])


def best(trial: Outcome) -> float | None:
    """To full strength; where that is not waited for, because nobody was struck, the survivors' pause."""
    return trial.full_s if trial.full_s is not None or trial.end else trial.survivors_s


def write(folder: Path, outcomes: Sequence[Outcome], machine: Mapping[str, Any], note: str) -> None:
    """RESULTS.md and its plot, and the comparison's table."""
    from bench.race.sides import SIDES

    remedies = {(name, fault): how for name, side in SIDES.items() for fault, how in side.remedy.items()}
    about = {name: side.about for name, side in SIDES.items()}
    jobs = newest(JOBS.read_text(encoding="utf-8").splitlines()) if JOBS.exists() else []
    text = page(outcomes, machine, datetime.now(UTC), about, remedies, note, jobs)
    (folder / "RESULTS.md").write_text(text, encoding="utf-8")
    (folder / "results.svg").write_text(plot(outcomes), encoding="utf-8")
    PAGE.write_text(between_marks(PAGE.read_text(encoding="utf-8"), comparison(outcomes)), encoding="utf-8")


def show_table(outcomes: Sequence[Outcome]) -> None:
    """For the terminal."""
    show("seconds to the next step: survivors / full strength", ("fault", *sides(outcomes)), rows(outcomes))
