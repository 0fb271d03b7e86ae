"""`python -m chaos.explore`: a small world, searched whole; exit code 1 if a guarantee does not hold somewhere in it.

The one idea: seeds find what they draw, and `chaos.everywhere` puts a fault at every place of one run. Here there is no run:
every state that two or three nodes can come to with a few faults is made, from every state every next one, and each once.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

from chaos.mutants import MUTANTS, ROOT, Broken

#: Guards that two nodes, a store and two faults can be in need of: with how many faults, and of which kinds, to look first.
#: "boot": from the first moment on.
GUARDS: Final[dict[str, tuple[int, str]]] = {
    "a commit is fenced by the plan": (1, ""),
    "a commit is fenced by the commit before it": (1, "repeat_request"),
    "a plan is fenced by the plan before it": (2, "kill_node repeat_request"),
    "a plan is fenced by the commit": (1, ""),
    "a plan is fenced by the office": (2, "boot lose_request lose_lease"),
    "the office is taken as it was seen": (1, "boot lose_request"),
    "a wish is not repeated before its time": (1, "boot kill_worker"),
    "a step is committed once": (0, ""),
    "a stop is heeded": (1, "stop"),
    "a plan resumes from the newest commit": (1, "kill_worker"),
    "survivors keep their order": (1, "kill_worker"),
    "the leaving lose their seat": (1, "drain"),
    "the quarantined get no seat": (1, "cut"),
    "who was found cut off has no seat before a test has passed": (1, "cut"),
    "quarantines end": (1, "cut"),
    "a probe waits for the answers": (1, "cut"),
    "those out of reach lose their seats": (1, "cut"),
    "a stall with nobody to blame is probed": (1, "cut"),
    "a cut way is tested again and again": (1, "cut"),
    "a plan names whose workers are fresh": (1, "kill_worker"),
    "growth waits for the gang": (1, "kill_node"),
    "a rung has a deadline": (2, "kill_node cut"),
    "who left before the gang had formed is not waited for": (2, "kill_node kill_worker"),
    "a gang that does not grow goes on without who does not come": (2, "kill_node kill_worker"),
    "a gang that breaks waits for nobody to load": (2, "kill_node kill_worker"),
}
EACH_S: Final = 60.0  # of computing, for one guard
BACK_S: Final = 10  # for each fault: two nodes are well again after that, if nothing keeps them from it


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m chaos.explore", description=__doc__)
    parser.add_argument("--nodes", type=int, choices=(2, 3), default=2)
    parser.add_argument("--faults", type=int, default=1, help="so many may come, at any moment (default: 1)")
    parser.add_argument("--turns", type=int, default=0, help="so often what is due comes before its turn (default: 0)")
    parser.add_argument("--boot", action="store_true", help="from the first moment on, in place of from when all train")
    parser.add_argument("--always", action="store_true", help="further faults come when the job is well again, too")
    parser.add_argument("--symmetric", action="store_true", help="states that differ in the nodes' names alone are one")
    parser.add_argument("--kinds", default="", help="of faults, separated by spaces (default: all)")
    parser.add_argument("--seconds", type=float, default=3600.0, help="of computing, at most (default: 3600)")
    parser.add_argument("--states", type=int, default=3_000_000, help="at most")
    parser.add_argument("--mutants", action="store_true", help="break guards in turn: is each missed?")
    parser.add_argument("--broken", default="", help="break this guard (of chaos/mutants.py) first")
    parser.add_argument(
        "--back", type=int, default=0, help="the job is well again after so many seconds (default: 10 a fault)"
    )
    parser.add_argument("--json", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args(argv)
    if asked.mutants:
        return table(asked)
    if asked.broken:
        mutant = next((mutant for mutant in MUTANTS if mutant.name == asked.broken), None)
        if mutant is None:
            parser.error(f"chaos/mutants.py has no guard {asked.broken!r}")
        sys.meta_path.insert(0, Broken(mutant))
    return search(asked)


def search(asked: argparse.Namespace) -> int:
    """Search, and say what was found."""
    from chaos.small.search import Bound, Search, told
    from chaos.small.world import Rules

    bound = Bound(
        faults=asked.faults, turns=asked.turns, states=asked.states, seconds=asked.seconds, boot=asked.boot,
        recovering=not asked.always, one=bool(asked.json), symmetric=asked.symmetric,
        kinds=frozenset(asked.kinds.split()), back_s=BACK_S * max(1, asked.faults) if asked.nodes == 2 else 0,
    )  # fmt: skip
    rules = Rules(asked.nodes)
    looked = Search(rules, bound)
    result = looked.run()
    if asked.json:
        first = result.found[0] if result.found else None
        said = {"check": first.check, "what": first.what, "moves": len(first.way)} if first else {}
        looked_at = {"states": result.states, "seconds": round(result.seconds, 1), "back": result.back_s}
        print(json.dumps({**looked_at, **said}))
        return bool(first)
    print(f"{asked.nodes} nodes, up to {asked.faults} faults, up to {asked.turns} things before their turn")
    print(
        f"{result.states} states, {result.transitions} transitions, depth {result.depth}, {result.seconds:.0f} s of computing"
    )
    print(
        f"merged: {result.merged} transitions led to a state that was known; the core was asked {result.asked} questions"
    )
    print(f"faults: {', '.join(f'{kind} {n}' for kind, n in sorted(result.kinds.items()))} (first ways to a new state)")
    print(f"back: from wherever it is left alone, the job is well again after {result.back_s} s at most")
    for why, n in result.cut.items():
        print(f"cut: {n} {why}")
    for found in result.found:
        print(f"\n{found.check}: {found.what}")
        for line in told(rules, looked.worlds[0], found.way):
            print(f"  {line}")
    print(summed(len(result.found), result.left))
    return bool(result.found)


def summed(wrong: int, left: int) -> str:
    """What a search comes to. One that was cut has proven nothing about what it left.

    >>> summed(0, 0)
    'nothing is wrong'
    >>> summed(0, 41)
    'nothing is wrong as far as it went: it was cut, and 41 states were not followed'
    """
    far = f" as far as it went: it was cut, and {left} states were not followed" if left else ""
    return (f"{wrong} things are wrong" if wrong else "nothing is wrong") + far


def table(asked: argparse.Namespace) -> int:
    """Break each guard in turn, over all cores; say which search noticed. 1 if most did not.

    Where one fault is enough, the same is searched with nothing broken first: so long as the job takes then to be well it may
    take.
    """
    begun, missed = time.monotonic(), list[str]()
    cores = os.cpu_count() or 1
    with ThreadPoolExecutor(cores) as pool:
        short = sorted({where for where in GUARDS.values() if where[0] < 2})
        whole = dict(zip(short, pool.map(lambda where: _apart("", asked, *where), short), strict=True))
        for where, found in whole.items():
            if "check" in found:
                print(f"with nothing broken, {where}: {found['check']}: {found['what']}")

        def one(name: str) -> dict[str, Any]:
            return _apart(name, asked, *GUARDS[name], whole.get(GUARDS[name], {"back": 0})["back"])

        for name, found in zip(GUARDS, pool.map(one, GUARDS), strict=True):
            missed += [] if "check" in found else [name]
            said = f"{found['check']}: {found['what']}" if "check" in found else "NOBODY NOTICED"
            how = f"{GUARDS[name][0]} faults {found.get('moves', '-'):>4} moves {found['seconds']:>6} s"
            print(f"{name:<60} {how}  {said[:110]}", flush=True)
    noticed = len(GUARDS) - len(missed)
    print(f"{noticed} of {len(GUARDS)} broken guards were noticed ({time.monotonic() - begun:.0f} s)")
    if missed:
        print(f"missed: {'; '.join(missed)}")
    return 0 if noticed > len(GUARDS) * 2 / 3 else 1


def _apart(name: str, asked: argparse.Namespace, faults: int, kinds: str, back: int = 999) -> dict[str, Any]:
    """In a process of its own, without the core's own asserts."""
    command = [
        sys.executable, "-O", "-m", "chaos.explore", "--json", "--broken", name, "--nodes", str(asked.nodes),
        "--faults", str(faults), "--turns", str(asked.turns), "--seconds", str(min(EACH_S, asked.seconds)),
        "--kinds", kinds.removeprefix("boot"), "--back", str(back or 999), *(["--boot"] if kinds.startswith("boot") else []),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=40 * EACH_S, check=False)
    if not done.stdout:  # a broken core that crashes has been noticed
        raised = done.stderr.strip().splitlines()
        return {"seconds": 0.0, "back": 0, **({"check": "it crashed", "what": raised[-1]} if raised else {})}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


if __name__ == "__main__":
    raise SystemExit(main())
