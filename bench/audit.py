"""What it costs to compute things twice on another node (`audit.lanes`): all of it, and each kind alone.

    python bench/audit.py [--world 2] [--lanes 4] [--steps 160] [--json]
    python bench/audit.py --kinds [--world 2] [--lanes 4] [--steps 40] [--json]

One gang, with vaults, over gloo. By `audit.lanes: 1/2` each is done in half of the cases, drawn apart.

Without `--kinds` a script trains, and a step with both a lane and a shard's update computed twice is compared with the nearest
step that has neither, so a machine whose speed changes is slow for both. What the two cost at the default rate is that ratio,
less 1, by the rate. With as many lanes as workers a lane is all that a worker computes in a step: nothing costs more.

With `--kinds` a small PPO job trains, with a reference and a reward model, and each audit is timed where it is done.
All ranks are in it, and who comes first waits, so it took what it took the rank that came last. What a step has less its audits
is the step. A kind's cost is its time, by how often a step may have it, by the rate. The same in processor seconds of all ranks
does not depend on what else the machine does.
"""

import argparse
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fractions import Fraction
from functools import wraps
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.report import Watch, against, dump, interval, show
from elasticrl.config.cluster import Audit
from elasticrl.runtime.audit import drawn

ROOT = Path(__file__).parents[1]
TIMES, KINDS = "AUDIT_TIMES", "AUDIT_KINDS"
RATE, SEED = "1/2", 7
WIDTH, LAYERS, ROWS = 384, 6, 64
GOAL = 1.01
WARM_UP = 2
BATCH, TOKENS = 32, 24
Cost = tuple[float, float]  # seconds, and seconds of a processor


def work() -> None:
    """What the workers run: a line a step, when it ended."""
    import torch
    from torch import nn

    import elasticrl
    from elasticrl.runtime.data.cursor import Cursor, Walk
    from elasticrl.runtime.optim import AdamW

    with elasticrl.runtime.join() as run:
        lanes = run.tree.lanes.count
        model = nn.Sequential(*(layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU())))
        walk = Walk(name="points", size=100_000, lanes=lanes, per_lane=ROWS, seed=SEED)
        run.register(model=model, optimizer=AdamW(), data=Cursor(walk))
        for step in run.steps():
            for lane in run.lanes():
                numbers = torch.tensor([[sample.index] for sample in lane.ids()]).float()
                loss = run.model(torch.sin(numbers * torch.arange(WIDTH))).square().mean()
                loss.backward()  # type: ignore[no-untyped-call]
                lane.tally.add(loss=loss)
                lane.done()
            run.update()
            if run.rank == 0:
                with Path(os.environ[TIMES]).open("a") as out:
                    out.write(f"{step} {time.monotonic():.6f}\n")


def times(world: int, lanes: int, steps: int) -> dict[int, float]:
    """What each step took."""
    sys.path.insert(0, str(ROOT / "tests" / "runtime"))
    from gang_kit import Nodes

    with tempfile.TemporaryDirectory(prefix="elasticrl-audit-") as folder:
        conf = {"audit": {"lanes": RATE}, "lanes": {"digest": "sample"}}
        with Nodes(Path(folder), steps=steps, lanes=lanes, program="bench.audit", conf=conf, copies=1) as gang:
            gang.env = {TIMES: f"{folder}/times"}
            gang.plan(*(f"n{number}" for number in range(world)))
            gang.until_done(within_s=600.0)
        rows = [line.split() for line in Path(folder, "times").read_text().splitlines()]
    return {int(after[0]): float(after[1]) - float(before[1]) for before, after in pairwise(rows)}


def ratios(took: dict[int, float], world: int, lanes: int) -> list[float]:
    """Of each step with both audits and the nearest one with neither."""

    def audits(step: int) -> int:
        both = (("model", lanes), ("model shard", world))
        return sum(drawn(SEED, name, step, 0, lanes=count, rate=RATE) is not None for name, count in both)

    plain = [step for step in took if audits(step) == 0]
    return [took[step] / took[min(plain, key=lambda one: abs(one - step))] for step in took if audits(step) == 2]


LANE, SHARD, KEPT = "a lane of an update", "a window of the optimizer's state", "the digest of a shard, at rest"


class Clock:
    """Of one rank: what its audits took in this step, and how often there might have been one."""

    def __init__(self) -> None:
        self.took: dict[str, list[Cost]] = {}
        self.chances: dict[str, int] = {}

    def now(self) -> Cost:
        return time.perf_counter(), time.process_time()

    @contextmanager
    def timing(self, kind: str) -> Iterator[None]:
        began = self.now()
        yield
        self.add(kind, began)

    def add(self, kind: str, began: Cost) -> None:
        ended = self.now()
        self.took.setdefault(kind, []).append((ended[0] - began[0], ended[1] - began[1]))

    def might(self, kind: str) -> None:
        self.chances[kind] = self.chances.get(kind, 0) + 1


def timed(clock: Clock) -> None:
    """Has all that `audit.lanes` does told to the clock."""
    from elasticrl.runtime import audited
    from elasticrl.runtime import run as runs

    made_again, compare, kept = audited.Audit.again, audited.ShardAudit.compare, audited.kept
    audit_of, applied, computed, twice = audited.audit_of, audited.applied, audited.computed, audited.twice

    @wraps(made_again)
    def again(audit: Any) -> Iterator[int]:
        with clock.timing(LANE):
            yield from made_again(audit)

    def chance(kind: str, call: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(call)
        def counted(*args: Any, **more: Any) -> Any:
            clock.might(kind)
            return call(*args, **more)

        return counted

    def within(kind: str, call: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(call)
        def inside(*args: Any, **more: Any) -> Any:
            with clock.timing(kind):
                return call(*args, **more)

        return inside

    turns: list[bool] = []

    @wraps(computed)
    def noticed(*args: Any, **more: Any) -> Any:
        turns.append(True)
        return computed(*args, **more)

    @wraps(twice)
    def made_twice(generation: Any, audits: Any, progress: Any, what: str, result: Any, **more: Any) -> None:
        clock.might(what)
        turns.clear()
        began = clock.now()
        twice(generation, audits, progress, what, result, **more)
        if turns:
            clock.add(what, began)

    for place, name, call in (
        (audited.Audit, "again", again),
        (audited.ShardAudit, "compare", within(SHARD, compare)),
        (audited, "kept", within(KEPT, kept)),
        (audited, "audit_of", chance(LANE, audit_of)),
        (audited, "applied", chance(SHARD, applied)),
        (audited, "computed", noticed),
        (runs, "twice", made_twice),
    ):
        setattr(place, name, call)


def work_at_kinds() -> None:
    """What the workers run with `--kinds`: a line a step, of what it had."""
    from elasticrl.ppo import __main__ as ppo
    from elasticrl.runtime.run import Run

    clock = Clock()
    timed(clock)
    steps = Run.steps

    def told(run: Run, limit: int | None = None) -> Iterator[Any]:
        began = clock.now()
        for step in steps(run, limit):
            yield step
            ended = clock.now()
            line = {
                "step": run.progress.step,
                "took": (ended[0] - began[0], ended[1] - began[1]),
                "audits": clock.took,
                "chances": clock.chances,
            }
            with Path(f"{os.environ[TIMES]}-{run.rank}").open("a") as out:
                out.write(json.dumps(line) + "\n")
            clock.took, clock.chances, began = {}, {}, clock.now()

    setattr(Run, "steps", told)  # noqa: B010 - as `timed`, past the types
    ppo.main()


def small(folder: Path) -> dict[str, Any]:
    """A PPO job of about a million parameters a model, with a reference, a critic and a reward model."""
    from elasticrl.ppo import tiny

    chance = random.Random(7)
    rows = ["".join(chance.choice("0123456789") for _ in range(TOKENS)) for _ in range(2048)]
    (folder / "prompts.jsonl").write_text("\n".join(json.dumps({"prompt": row}) for row in rows))
    shape = {"hidden": 192, "layers": 4, "heads": 4, "positions": 4 * TOKENS}
    return {
        "ppo": {"batch": BATCH, "mini_batch": BATCH, "epochs": 2, "micro_tokens": 4 * 2 * TOKENS, "kl": {"coef": 0.05}},
        "model": {"path": tiny.write(folder / "actor", **shape)},
        "reward": {"model": tiny.write(folder / "reward", **shape, seed=1, kind="reward")},
        "rollout": {"max_tokens": TOKENS},
        "data": {"path": str(folder / "prompts.jsonl"), "max_prompt": TOKENS, "chat_template": False},
        "lanes": {"digest": "sample"},
    }


def kinds(world: int, lanes: int, steps: int) -> list[list[dict[str, Any]]]:
    """What each rank has told of each step."""
    sys.path.insert(0, str(ROOT / "tests" / "runtime"))
    from gang_kit import Nodes

    with tempfile.TemporaryDirectory(prefix="elasticrl-audit-") as folder:
        conf = small(Path(folder)) | {"audit": {"lanes": RATE}, "timeouts": {"collective": "15m"}}
        where = Path(folder, "gang")
        with Nodes(where, steps=steps, lanes=lanes, program="bench.audit", conf=conf, copies=1) as gang:
            gang.env = {TIMES: f"{folder}/times", KINDS: "1"}
            gang.plan(*(f"n{number}" for number in range(world)))
            gang.until_done(within_s=60.0 * steps)
        files = [Path(folder, f"times-{rank}").read_text().splitlines() for rank in range(world)]
    return [[json.loads(line) for line in lines[WARM_UP:]] for lines in files]


def costs(told: list[list[dict[str, Any]]]) -> tuple[Cost, dict[str, tuple[int, int, Cost]]]:
    """What a step takes without any audit; and of each kind how often a step may have it, how often it was seen, and what it
    takes. Medians, in seconds and in processor seconds of all ranks.
    """
    by: dict[str, list[Cost]] = {}
    rest: list[Cost] = []
    for ranks in zip(*told, strict=True):
        for kind in sorted({kind for rank in ranks for kind in rank["audits"]}):
            each = [rank["audits"][kind] for rank in ranks if kind in rank["audits"]]
            count = max(map(len, each))
            wall = min(sum(one[0] for one in row) for row in each)
            by.setdefault(kind, []).extend([(wall / count, sum(one[1] for row in each for one in row) / count)] * count)
        left = [
            [rank["took"][i] - sum(one[i] for row in rank["audits"].values() for one in row) for rank in ranks]
            for i in (0, 1)
        ]
        rest.append((min(left[0]), sum(left[1])))
    chances: dict[str, int] = {}
    for rank in told[0]:
        for kind, count in rank["chances"].items():
            chances[kind] = max(chances.get(kind, 0), count)
    chances[KEPT] = 2 * chances.get(SHARD, 0)  # after the update before, and before this one
    found = {kind: (chances[kind], len(each), middle(each)) for kind, each in by.items()}
    return middle(rest), found


def middle(each: list[Cost]) -> Cost:
    """The median of both."""
    return median(one[0] for one in each), median(one[1] for one in each)


def main() -> None:
    """Measure, and print."""
    if TIMES in os.environ:
        (work_at_kinds if KINDS in os.environ else work)()
        return
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("--world", type=int, default=2)
    asked.add_argument("--lanes", type=int, default=4)
    asked.add_argument("--steps", type=int, default=0, help="160, and 40 with --kinds")
    asked.add_argument("--kinds", action="store_true", help="of a PPO job, each kind alone")
    asked.add_argument("--json", action="store_true")
    args = asked.parse_args()
    (of_kinds if args.kinds else of_steps)(args.world, args.lanes, args.steps, as_json=args.json)


def of_steps(world: int, lanes: int, steps: int, *, as_json: bool) -> None:
    """A step with both audits by one with neither."""
    watch = Watch()
    took = times(world, lanes, steps or 160)
    found = ratios(took, world, lanes)
    rate = float(Fraction(Audit().lanes))
    between = interval(found)
    low, high = between or (0.0, 0.0)
    cost = None if between is None else (1 + (low - 1) * rate, 1 + (high - 1) * rate)
    step, ratio = median(took.values()), median(found)
    if as_json:
        dump({"step_s": step, "ratios": found, "cost": cost, "others": watch.look()})
        return
    between_95 = f"{cost[0]:.4f} to {cost[1]:.4f}" if cost else "too few"
    row = (f"{step * 1000:.0f} ms", f"{ratio:.2f}", f"{1 + (ratio - 1) * rate:.4f}", between_95, against(cost, GOAL))
    title = f"{world} workers, {lanes} lanes: a step with both audits, by one with neither ({len(found)} pairs)"
    show(title, ("step", "ratio", f"cost at {Audit().lanes}", "95 %", f"goal {GOAL}"), [row])


def of_kinds(world: int, lanes: int, steps: int, *, as_json: bool) -> None:
    """Each kind's part of a step."""
    watch = Watch()
    step, found = costs(kinds(world, lanes, steps or 40))
    rate = float(Fraction(Audit().lanes))
    rows, total = [], [0.0, 0.0]
    for kind, (chances, seen, took) in found.items():
        parts = [chances * took[i] / step[i] * rate for i in (0, 1)]
        total = [whole + part for whole, part in zip(total, parts, strict=True)]
        each = f"{took[0] * 1000:.0f}; {took[1] * 1000:.0f} ms"
        rows.append((kind, str(chances), str(seen), each, *(f"{part:.4%}" for part in parts)))
    rows.append(("all", "", "", f"a step: {step[0] * 1000:.0f}; {step[1] * 1000:.0f} ms", *(f"{x:.4%}" for x in total)))
    if as_json:
        dump({"step": step, "kinds": found, "cost": total, "others": watch.look()})
        return
    title = f"{world} workers, {lanes} lanes: what is computed twice in a step of PPO, seconds and processor seconds"
    show(title, ("what", "in a step", "seen", "each", f"at {Audit().lanes}", "of a processor"), rows)


if __name__ == "__main__":
    main()
