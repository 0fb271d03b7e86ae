"""Which scenarios make sense on real nodes, how they share labs and jobs, and what a random one is.

The one idea: scenarios that want the same nodes and settings share one job, in a lab that outlives the job. Whatever a seed
draws is a scenario like those in files, so what failed is repeated from the file that is kept.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from math import inf
from operator import attrgetter
from pathlib import Path
from random import Random

from chaos.case import Violation
from chaos.faults import ALL, IN_A_STEP, IN_A_STEP_OF_PPO, OF_PPO, Fault
from chaos.history import Struck
from chaos.live import box
from chaos.live.drive import Drive, Outcome, terminal, wanted_end
from chaos.live.errors import Late
from chaos.live.everywhere import NODES, SETTINGS, Tour
from chaos.live.lab import Lab
from chaos.live.strikes import Hands, left_out
from chaos.scenario import Scenario, aimed, lasting, save
from chaos.sim.cluster import Shape
from elasticrl.contract.settings import Membership, Settings

MOST_NODES = 5  # more than this many are for machines with more cores than ours
MOST_WORKERS = 8  # of all nodes: one node may have several
JOB_S = 420.0  # of random faults; then the job ends and is compared with the undisturbed one, which takes its time
BASE = Settings(lanes=12, copies=1, membership=Membership(min_nodes=2))

#: What the random nemesis draws, and how often, beside the weights of the vocabulary: what ends the job is for files.
#: Engines are for files as well: each takes seconds of a processor to start.
NEVER = ("stop", "crash_loop", "join_node", "sick_node", "admit", "drain", "slow_worker", *OF_PPO)
ROLES = ("leader", "deputy", "rank 0", "last rank")
AT_A_PLACE = 0.3  # of its faults strike at a position
MEMBER_S = 3.0  # until a member that a failover has cost comes back: while it is away no other can be struck (seed 109)
COMING = ("saving", "published", "committing")  # places that a job comes to by itself, whatever else befalls it
LONG = ("port_taken", "late_node")  # takes longer to put in than a worker may stand still without being suspected


def why_not(scenario: Scenario, *, boxes: bool = True, lacks: Mapping[str, str] | None = None) -> str:
    """Why a scenario cannot be run on real nodes here; empty if it can. `lacks` is what the machine has not (`box.lacking`)."""
    shape = scenario.shape
    if scenario.virtual:
        return f"only the simulator meets its moment: {scenario.virtual}"
    unknown = sorted({fault.kind for fault in scenario.faults if not Hands.can(fault.kind)})
    if unknown:
        return f"only the simulator has {', '.join(unknown)}"
    ppo = sorted({f.kind for f in scenario.faults if f.kind in OF_PPO or f.place in IN_A_STEP_OF_PPO})
    if ppo and shape.trainer != "ppo":
        return f"`shape.trainer` is not ppo, which {', '.join(ppo)} needs"
    out = left_out((fault.kind for fault in scenario.faults), boxes=boxes, lacks=lacks or {})
    if out and not boxes:
        return f"without namespaces there is no {', '.join(out)}"
    if out:
        return "; ".join(f"this machine has {why}, which {kind} needs" for kind, why in out.items())
    scoped = sorted({fault.kind for fault in scenario.faults if fault.scope != "all"})
    if scoped:
        return f"a cable does not tell beats from data ({', '.join(scoped)})"
    if shape.nodes > MOST_NODES:
        return f"{shape.nodes} nodes are for the simulator"
    if shape.nodes * shape.slots > MOST_WORKERS:
        return f"{shape.nodes} nodes of {shape.slots} workers are for the simulator"
    if shape.slots > 1 and shape.trainer == "ppo":
        return "a node of the lab has one worker where that is PPO's"
    if shape.alien or shape.foreign or shape.settings.steps:
        return "the lab's nodes have the same bits and wire, and a job without an end"
    return "" if scenario.faults else "nothing goes wrong in it"


@dataclass(slots=True)
class Score:
    """What many scenarios came to."""

    struck: Counter[str] = field(default_factory=Counter)
    played: int = 0
    steps: int = 0
    failed: list[tuple[str, str]] = field(default_factory=list)  # how to repeat it, and the first violation

    def show(self, wall_s: float, say: Callable[[str], None] = terminal) -> None:
        """The summary, for people."""
        total, kinds = sum(self.struck.values()), len(self.struck)
        say(f"\n{self.played} scenarios, {total} faults of {kinds} kinds, {self.steps} steps in {wall_s:.0f} s")
        rows = sorted(self.struck.items(), key=lambda item: (-item[1], item[0]))
        for start in range(0, len(rows), 4):
            say("  " + "".join(f"{kind:<18}{number:>4}   " for kind, number in rows[start : start + 4]))
        for again, what in self.failed[:20]:
            say(f"VIOLATION  {what}\n           {again}")
        say("no violation" if not self.failed else f"{len(self.failed)} violations")


class Play:
    """Runs scenarios, keeps what failed."""

    def __init__(self, out: Path, *, say: Callable[[str], None] = terminal, boxes: bool = True) -> None:
        self.out, self.say, self.boxes = out, say, boxes
        self.lacks = box.lacking() if boxes else {}
        self.score = Score()
        self._jobs = 0

    def files(self, scenarios: Iterable[Scenario]) -> Score:
        """Each scenario once; those that fit share a job."""
        chosen: list[Scenario] = []
        for scenario in scenarios:
            why = why_not(scenario, boxes=self.boxes, lacks=self.lacks)
            if why:
                self.say(f"{scenario.name}: left out: {why}")
            else:
                chosen.append(scenario)
        groups: dict[tuple[int, int, str], list[Scenario]] = {}
        for scenario in chosen:
            shape = scenario.shape
            # What ends the job, or begins with nodes that are not there, has a job of its own.
            own = (
                scenario.name
                if wanted_end(scenario) or shape.late
                else f"{shape.settings} {shape.load_s} {shape.trainer} {shape.slots}"
            )
            groups.setdefault((max(2, shape.nodes), shape.late, own), []).append(scenario)
        for nodes in sorted({key[0] for key in groups}):
            with Lab(nodes, boxes=self.boxes) as lab:
                for key in sorted(key for key in groups if key[0] == nodes):
                    self.job(lab, groups[key][0], iter(groups[key]))
            self._cleared(lab, "python -m chaos.run live")
        return self.score

    def random(self, seed: int, minutes: float, nodes: int) -> Score:
        """Random scenarios until the time is over, in jobs that end and are compared with the undisturbed one."""
        end = time.monotonic() + 60.0 * minutes
        chance = Random(f"live {seed} {nodes}")
        number = iter(range(1, 1_000_000))
        again = f"python -m chaos.run live --random --seed {seed} --minutes {minutes:g} --nodes {nodes}"
        while time.monotonic() < end:
            over = min(end, time.monotonic() + JOB_S)

            def some(over: float = over) -> Iterator[Scenario]:
                while time.monotonic() < over:
                    name = f"seed {seed} number {next(number)}"
                    yield draw(chance, name, nodes, boxes=self.boxes, lacks=self.lacks)

            with Lab(nodes, boxes=self.boxes) as lab:
                self.job(lab, Scenario(name=f"seed {seed}", shape=Shape(nodes=nodes, settings=BASE)), some(), again)
            self._cleared(lab, again)
        return self.score

    def everywhere(self, tour: Tour, minutes: float | None = None) -> Score:
        """Each case of a tour, as far as the time goes, in jobs that end and are compared with the undisturbed one."""
        end = time.monotonic() + 60.0 * minutes if minutes else inf
        again, shape = (
            "python -m chaos.run live --everywhere",
            Scenario(name="everywhere", shape=Shape(nodes=NODES, settings=SETTINGS)),
        )
        while tour.left and time.monotonic() < end:
            before, over = self.score.played, min(end, time.monotonic() + JOB_S)

            def late(over: float = over) -> bool:
                return time.monotonic() > over

            with Lab(NODES, boxes=self.boxes) as lab:
                self.job(lab, shape, tour.some(late), again, tour.heard)
            self._cleared(lab, again)
            if self.score.played == before:
                break  # its job does not even start
        tour.show(self.say)
        return self.score

    def job(
        self, lab: Lab, shape: Scenario, scenarios: Iterator[Scenario], again: str = "",
        heard: Callable[[Outcome], list[Violation]] = attrgetter("violations"),
    ) -> None:  # fmt: skip
        """One job, and its scenarios one after the other; after a violation another job would be needed, so it ends. `heard` is
        told what became of each, and says what is wrong with it.
        """
        self._jobs += 1
        name = f"j{self._jobs}"
        played: list[Scenario] = []
        with ExitStack() as stack:
            try:
                drive = stack.enter_context(Drive(lab, shape, name=name, say=self.say))
            except Late as late:
                self.say(f"VIOLATION  {late}")
                self.score.failed.append((again or shape.name, str(late)))
                lab.keep = True
                return
            bad = False
            for scenario in scenarios:
                played.append(scenario)
                outcome = drive.scenario(scenario)
                self.score.played += 1
                if wrong := heard(outcome):
                    self._failed(drive, [scenario], str(wrong[0]), again)
                    bad = True
                    break
                if drive.over:
                    break
            self.score.steps += drive.eye.newest
            self.score.struck.update(fact.kind for fact in drive.eye.facts if isinstance(fact, Struck))
            left = list(scenarios) if bad and not again else []
            found = [] if bad else drive.finish()
            if found:
                self._failed(drive, played, str(found[0]), again)
        if left:
            self.job(lab, shape, iter(left), again)

    def _cleared(self, lab: Lab, again: str) -> None:
        """Nothing of a lab that is down may be left on the machine."""
        if lab.left:
            self.say(f"VIOLATION  {lab.name} is down and has left {', '.join(lab.left)}")
            self.score.failed.append((again, f"{lab.name} has left {', '.join(lab.left)}"))

    def _failed(self, drive: Drive, scenarios: list[Scenario], what: str, again: str) -> None:
        last = scenarios[-1]
        folder = self.out / f"{last.name.replace(' ', '-')}-{drive.job.name}"
        paths = []
        for scenario in scenarios:
            file = replace(
                scenario, shape=replace(scenario.shape, nodes=len(drive.lab.boxes), settings=drive.shape.shape.settings)
            )
            paths.append(folder / f"{scenario.name.replace(' ', '-')}.yaml")
            save(file, paths[-1])
        command = f"python -m chaos.run live {' '.join(map(str, paths))}"
        drive.keep(folder, f"{command}\n{again}")
        self.say(f"  everything is kept in {folder}; again: {command}")
        self.score.failed.append((command, what))


def draw(
    chance: Random, name: str, nodes: int, *, boxes: bool = True, lacks: Mapping[str, str] | None = None
) -> Scenario:
    """A scenario of chance: mostly one fault, sometimes two or three at once or shortly after each other."""
    out = left_out(ALL, boxes=boxes, lacks=lacks or {})
    kinds = sorted(k for k in ALL if k not in NEVER and k not in out and Hands.can(k))
    count = chance.choice((1, 1, 1, 1, 1, 2, 2, 3))
    picked: list[str] = []
    while len(picked) < count:
        kind = chance.choices(kinds, [ALL[kind].weight for kind in kinds])[0]
        if kind not in picked:
            picked.append(kind)
    at = 0.0
    faults = []
    for kind in picked:
        faults.append(_fault(chance, kind, nodes, round(at, 2)))
        at += chance.choice((0.0, 0.02, 0.2, 1.0, 3.0))
    return Scenario(name=name, shape=Shape(nodes=nodes, settings=BASE), faults=tuple(faults))


def _fault(chance: Random, kind: str, nodes: int, at: float) -> Fault:
    known = ALL[kind]
    for_s = lasting(chance, known.for_s[0], min(known.for_s[1], 10.0)) if known.for_s else None
    if kind == "store_failover":
        for_s = MEMBER_S
    place = _place(chance, kind) if chance.random() < AT_A_PLACE else ""
    nth = chance.choice((1, 1, 2, 5)) if place in IN_A_STEP else 1
    fault = Fault(kind=kind, at=None if place else at, when=place, nth=nth, for_s=for_s)
    return aimed(chance, fault, ROLES, [f"n{i}" for i in range(nodes)])


def _place(chance: Random, kind: str) -> str:
    """Where it strikes: in a step, if that is of use against a node and done before its worker is missed."""
    inside = ALL[kind].reach in ("node", "link") and kind not in LONG
    return chance.choice((*IN_A_STEP, *COMING) if inside else COMING)
