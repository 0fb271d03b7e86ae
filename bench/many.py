"""`bench/recovery.py --nodes 16`: each fault once on many one-worker nodes, and who was blamed for it.

The one idea: with as many nodes as one machine carries its own slowness looks like faults, so what counts is not how long a
recovery takes but that nobody is blamed, or put out, whom nothing befell, and that no sealed step is lost.
"""

import os
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.recovery import Cost, Elastic, monotonic
from bench.report import Watch, dump, show
from chaos.live.errors import Late

STEP_MS = 500.0
#: Whom each fault befalls; the leader's is known when it strikes.
VICTIMS = {"worker": "n1", "stop": "n1", "hang": "n1", "node": "n2", "join": "n2", "cut": "n2"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What one fault cost, and whom the job blamed.

    Example: Answer(fault="stop", victim="n1", cost=Cost(took_s=1.9), plans=1, wronged=())
    """

    fault: str
    victim: str
    cost: Cost
    plans: int  # written until the job was well again
    wronged: tuple[str, ...]  # blamed by a verdict, named in a plan's causes or put out, though nothing befell them


class Many(Elastic):
    """A job on many nodes."""

    before: tuple[float, str] | None = None  # when the last answer ended, and to what befell whom

    def answer(self, fault: str) -> Answer:
        """Do it, wait until all train again, and see who was blamed since the last answer's end."""
        victim, at = VICTIMS.get(fault) or self.job.leader(), time.monotonic()
        since, last = self.before or (at, victim)
        cost = getattr(self, fault)()
        if fault != "node":  # that one is still away
            self.ready()
        self.before = (time.monotonic(), victim)
        plans = [line for line in self.log("plan.adopted") if monotonic(line["at"]) > since]
        wronged: set[str] = set()
        for line in (*plans, *self.log("verdict.found")):
            told = monotonic(line["at"])
            if told > since:
                wronged |= set(line["nodes"]) - {victim if told > at else last}
        count = len({line["generation"] for line in plans if monotonic(line["at"]) > at})
        return Answer(fault=fault, victim=victim, cost=cost, plans=count, wronged=tuple(sorted(wronged)))


def trial(nodes: int, faults: Sequence[str]) -> list[Answer]:
    """One fresh job, each fault once."""
    found: list[Answer] = []
    with Many(nodes=nodes, step_ms=STEP_MS) as job:
        print(f"{nodes} nodes train; load {os.getloadavg()[0]:.0f}", file=sys.stderr)
        for fault in faults:
            try:
                if found and found[-1].fault == "node" and fault != "join":
                    job.join()
                    job.ready()
                found.append(job.answer(fault))
            except Late as error:
                print(f"  {fault}: {error}"[:600], file=sys.stderr)
                break
            one = found[-1]
            said = (
                f"blamed beside {one.victim}: {', '.join(one.wronged)}"
                if one.wronged
                else f"nobody but {one.victim} blamed"
            )
            print(f"  {fault}: {one.cost.took_s:.2f} s, {one.plans} plans, {said}", file=sys.stderr)
    return found


def measure(nodes: int, faults: Sequence[str], trials: int, *, as_json: bool) -> int:
    """Some trials, as a table or as one object."""
    watch = Watch()
    answers: dict[str, list[Answer]] = {fault: [] for fault in faults}
    for _ in range(trials):
        for answer in trial(nodes, faults):
            answers[answer.fault].append(answer)
        watch.look()
    rows = [row(fault, found, trials) for fault, found in answers.items()]
    good = all(each["back"] == trials and not each["wronged"] and not each["lost"] for each in rows)
    if as_json:
        dump(
            {
                "bench": "recovery of many",
                "nodes": nodes,
                "rows": rows,
                "noise": watch.noise(),
                "machine": watch.machine(),
            }
        )
    else:
        shown = [
            (each["fault"], f"{each['back']} of {trials}", f"{each['took_s']:.2f}", f"{each['stall_s']:.2f}",
             f"{each['plans']}", f"{each['lost']}", ", ".join(each["wronged"]) or "nobody")
            for each in rows
        ]  # fmt: skip
        heads = ("fault", "back", "seconds", "stall of others", "plans", "steps lost", "blamed wrongly")
        show(
            f"{nodes} one-worker nodes on one machine (medians)", heads, shown, [watch.noise()] if watch.noise() else []
        )
    return 0 if good else 1


def row(fault: str, found: Sequence[Answer], trials: int) -> Mapping[str, Any]:
    """One fault's line."""
    return {
        "fault": fault,
        "tried": trials,
        "back": len(found),
        "took_s": statistics.median([one.cost.took_s for one in found] or [0.0]),
        "stall_s": statistics.median([one.cost.stall_s or 0.0 for one in found] or [0.0]),
        "plans": max((one.plans for one in found), default=0),
        "lost": sum(one.cost.lost or 0 for one in found),
        "wronged": sorted({node for one in found for node in one.wronged}),
    }
