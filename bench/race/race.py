"""The race: the same small loop and the same faults under elasticrl and under the others, in turn.

    python bench/race/race.py [--sides elasticrl,torchrun,...] [--faults worker,node,...] [--trials 6] [--json]

Three one-worker nodes on loopback, 50 ms steps, gloo, CPU; all save to disk every 20 steps. Each trial is a fresh job, to
which one thing is done. Peers live in environments of their own, which `bench/race/environments.py` makes from PyPI.

worker       kill -9 of one worker
node         kill -9 of everything of one node, which stays away
node-back    the same, and the node is started again after 0.5 s
stop         SIGSTOP of one worker
hang         one training thread sleeps for ever
coordinator  kill -9 of whatever coordinates, started again after 0.5 s: elasticrl's leading daemon, torchft's lighthouse,
             elsewhere the node that hosts the rendezvous or the store
store        kill -9 of elasticrl's whole etcd, started again after 0.5 s
join         a third node is started beside two that train
power        kill -9 of everything everywhere, memory is lost, all is started again after 0.5 s

A round of all takes some hours; without `--trials` the record gets one more. Every trial is written to a record as soon as
it is over (`--record`), and what is in the record is not run again: `--minutes 60` goes on for an hour from wherever the
race stands, another day too. `bench/race/RESULTS.md` and its plot are made of all trials in the record. `--report` makes
them anew and runs nothing; `--fresh` begins a new record.
"""

import argparse
import json
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from math import inf
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.race.environments import environment
from bench.race.judge import Outcome, progress, same_bits, steps_lost
from bench.race.results import figures, noise, show_table, write
from bench.race.sides import NODE, SAVE_EVERY, SIDES, STEP_S, Peer, Side
from bench.recovery import NODES
from bench.report import Watch, commit, cpu, dump, end_cleanly, some_of
from chaos.live.errors import Late

FAULTS = ("worker", "node", "node-back", "stop", "hang", "coordinator", "store", "join", "power")
PATIENCE_S = 60.0
AFTER_S = 2.0  # of steps that are judged as well
UNDISTURBED_STEPS = 1500
RECORD = Path(__file__).parent / "trials.jsonl"
# Digests of undisturbed runs; made again where they are missing.
REFERENCES = Path(__file__).parents[2] / "out" / "race" / "undisturbed.json"
FAILED = ("did not start", "the bench failed")  # how a trial ends that says nothing, and is run again


def schedule(
    sides: list[str], faults: list[str], trials: int | None = None, done: Sequence[Outcome] = ()
) -> list[tuple[int, str, str]]:
    """Which fault when to whom: sides in turn, so that a slow minute of the machine meets all. Without what is done, and up to
    so many of each; one more than all have, if that is not said.
    """
    told = Counter((outcome.fault, outcome.side) for outcome in done if not outcome.end.startswith(FAILED))
    trials = trials or 1 + min(told[fault, side] for fault in faults for side in sides)
    every = [(number, fault, side) for number in range(1, trials + 1) for fault in faults for side in sides]
    return [(number, fault, side) for number, fault, side in every if number > told[fault, side]]


def trial(name: str, fault: str, undisturbed: dict[int, str]) -> Outcome:
    """One fresh job, one fault."""
    kind, none = SIDES[name], Outcome(side=name, fault=fault)
    if why := kind.faults.get(fault) or unfit(name):
        return replace(none, end=f"not run: {why}")
    with kind() as side:
        nodes = [node for node in NODES if fault != "join" or node != NODE]
        side.start(*nodes)
        try:
            side.ready(len(nodes))
        except Late as late:
            return replace(none, end=f"did not start: {str(late).partition('; last steps')[0]}")
        # At any moment between two saves: where a fault falls there decides how many steps a loss of power takes.
        time.sleep(AFTER_S + random.uniform(0.0, SAVE_EVERY * STEP_S))
        at = time.monotonic()
        struck = side.strike(fault)
        survivors = [node for node in nodes if node not in struck]
        survivors_s, full_s, end = watch(side, fault, survivors, at)
        time.sleep(AFTER_S)
        lines = side.lines()
        newest = max(line.step for line in lines if line.at <= at)
        went_on = survivors_s is not None or full_s is not None
        blamed = side.blamed(at)[:200]
        # The last question: it ends the job where the ledger is whole only then.
        lost = side.samples(newest - SAVE_EVERY) if went_on else None
        return replace(
            none,
            survivors_s=survivors_s,
            full_s=full_s,
            end=end,
            steps_lost=steps_lost(lines, at) if went_on else None,
            samples_lost=lost[0] if lost else None,
            samples_repeated=lost[1] if lost else None,
            same_bits=same_bits([line for line in lines if line.at > at], undisturbed) if went_on else None,
            blamed=blamed,
        )


def watch(side: Side, fault: str, survivors: list[str], at: float) -> tuple[float | None, float | None, str]:
    """Seconds until the survivors made a step, and until all did; and how it ended if one of them never came."""
    while True:
        now = time.monotonic()
        found = progress(side.lines(), fault, survivors, at=at, now=now)
        if found.enough or side.over() or now > at + PATIENCE_S:
            end = "" if found.enough else "job lost" if side.over() else f"not within {PATIENCE_S:.0f} s"
            return found.survivors_s, found.full_s, end
        time.sleep(0.05)  # between looks; the seconds are read from what workers wrote


def unfit(name: str) -> str:
    """Why this side cannot be run here; empty if it can."""
    kind = SIDES[name]
    if issubclass(kind, Peer) and kind.environment:
        return environment(kind.environment).problem
    return ""


def undisturbed(name: str, kept: Path) -> dict[int, str]:
    """Digests of a run of three ranks to which nothing is done, as fast as it goes.

    Those that compute what stock torchrun does have it from there: some begin with two ranks if one of three comes late.
    """
    name = SIDES[name].bits_of or name
    known = json.loads(kept.read_text()) if kept.exists() else {}
    if name not in known and not unfit(name):
        with SIDES[name](step_s=0.0) as side:
            side.start(*NODES)
            deadline = time.monotonic() + 150.0
            while not side.over() and time.monotonic() < deadline:
                if max((line.step for line in side.lines()), default=0) >= UNDISTURBED_STEPS:
                    break
                time.sleep(0.2)
            odd = [line for line in side.lines() if line.world != len(NODES)]
            if odd and side.begins_whole:
                raise ValueError(f"the undisturbed run of {name} made step {odd[0].step} on {odd[0].world} ranks")
            known[name] = {str(line.step): line.digest for line in side.lines() if line.world == len(NODES)}
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_text(json.dumps(known))
    return {int(step): digest for step, digest in known.get(name, {}).items()}


def recorded(path: Path) -> list[Outcome]:
    """All trials so far."""
    return [Outcome(**json.loads(line)) for line in path.read_text().splitlines()] if path.exists() else []


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sides", default=",".join(SIDES), type=some_of(SIDES))
    parser.add_argument("--faults", default=",".join(FAULTS), type=some_of(FAULTS))
    parser.add_argument("--trials", type=int, help="so many of each; else one more than there are of all")
    parser.add_argument("--minutes", type=float, default=inf, help="begin no trial after that")
    parser.add_argument("--record", type=Path, default=RECORD)
    parser.add_argument("--fresh", action="store_true")
    parser.add_argument("--report", action="store_true")
    parser.add_argument("--note", default="", help="a sentence for the page: what was unusual about this race")
    parser.add_argument("--json", action="store_true")
    end_cleanly()
    options = parser.parse_args()
    if options.fresh:
        options.record.unlink(missing_ok=True)
    record, until, watch = options.record, time.monotonic() + 60 * options.minutes, Watch()
    here = f"{os.cpu_count()} cores, {cpu()}"
    if not options.report:
        for number, fault, side in schedule(options.sides, options.faults, options.trials, recorded(record)):
            if time.monotonic() > until:
                break
            try:
                bits = undisturbed(side, REFERENCES)
                load, others = os.getloadavg()[0], watch.look()
                outcome = replace(trial(side, fault, bits), load=load, others=others)
            except (Late, OSError, ValueError) as error:
                outcome = Outcome(
                    side=side, fault=fault, end=f"the bench failed: {type(error).__name__}: {error}"[:200]
                )
            outcome = replace(outcome, day=f"{datetime.now(UTC):%Y-%m-%d}", commit=commit(), machine=here)
            with record.open("a") as file:
                file.write(json.dumps(asdict(outcome)) + "\n")
            print(f"trial {number}: {side}: {fault}: {outcome}", file=sys.stderr)
    outcomes = recorded(record)
    facts = watch.machine()
    write(Path(__file__).parent, outcomes, facts, options.note)
    if options.json:
        trials = [asdict(outcome) for outcome in outcomes]
        told = {"results": figures(outcomes), "noise": noise(outcomes), "trials": trials}
        dump({"bench": "race", **told, "machine": facts})
    else:
        show_table(outcomes)
    return 0


if __name__ == "__main__":
    sys.exit(main())
