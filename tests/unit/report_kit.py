"""What a small run leaves: three nodes, of which one dies and comes back."""

import json
from pathlib import Path

from elasticrl.contract.evidence import of_exit
from elasticrl.contract.model import Exit
from elasticrl.core.judge.judge import judge
from elasticrl.diagnose import incident

NASTY = "n1/1: <script>alert(1)</script> & died; 2 nodes train"


def log(second: float, event: str, node: str, **fields: object) -> dict[str, object]:
    at = f"2026-11-21T20:34:{second:09.6f}Z"
    return {"job": "toy", "node": node, "event": event, "level": "info", "at": at, **fields}


def lines_of(node: str) -> list[dict[str, object]]:
    """A node that trains from 2 s on; n1 dies at 6 s and is back at 9 s; the others reform from 6.0 to 6.5 s; end at 12 s."""
    plan = {"phase": "train", "resume": 0}
    head = [
        log(0.0, "daemon.started", node, member=f"{node}/1", adopted=False),
        log(1.0, "plan.adopted", node, generation=1, rung="start", world=3, members=3, reason="first plan", **plan),
        log(1.1, "workers.changed", node, work="joining", generation=1, step=0),
        log(2.0, "workers.changed", node, work="training", generation=1, step=0),
    ]
    grown = {"generation": 3, "rung": "start", "world": 3, "members": 3, "reason": "1 node joined", **plan}
    tail = [
        log(10.0, "plan.adopted", node, **grown),
        log(10.1, "workers.changed", node, work="training", generation=3, step=8),
        log(
            12.0, "plan.adopted", node, generation=4, phase="stop", rung="start", world=3, members=3, reason="all done"
        ),
        log(12.1, "workers.changed", node, work="done", generation=4, step=10),
        log(12.5, "daemon.stopped", node, code=0, reason="done", workers="ended"),
    ]
    if node == "n1":
        return [
            *head,
            log(9.0, "vault.changed", node, state="up"),
            log(9.1, "daemon.started", node, adopted=False),
            *tail,
        ]
    middle = [
        log(6.0, "workers.changed", node, work="parked", generation=1, step=4),
        log(6.1, "plan.adopted", node, generation=2, rung="reform", world=2, members=2, reason=NASTY, **plan),
        log(6.5, "workers.changed", node, work="training", generation=2, step=4),
        log(
            6.6, "recovery.done", node, generation=2, rung="reform", total_s=0.6 if node == "n0" else 0.7,
            stages={"decide": 0.1, "reform": 0.4, "first_step": 0.1 if node == "n0" else 0.2},
        ),
        log(7.0, "checkpoint.committed", node, step=5, generation=2, manifest="m"),
    ]  # fmt: skip
    return [*head, *middle, *tail]


def leave(folder: Path) -> Path:
    """Its files, in this folder."""
    (folder / "log").mkdir(parents=True)
    for node in ("n0", "n1", "n2"):
        rows = lines_of(node)
        body = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / "log" / f"{node}.daemon.log").write_text(f"not JSON\n{body}" + '{"event": "torn')
        rank = int(node[1])
        steps = [
            {"at": 1795293243.0 + s, "node": node, "rank": rank, "step": s, "generation": 1 if s < 5 else 2,
             "seconds": {"rollout": 0.2, "update": 0.8 if rank == 2 else 0.4}, "waited": {"update": 0.1}, "bytes": 10}
            for s in range(1, 11) if node != "n1" or s < 4
        ]  # fmt: skip
        (folder / "log" / node).mkdir()
        (folder / "log" / node / "steps.jsonl").write_text("".join(json.dumps(row) + "\n" for row in steps))
    history = [
        {"at": 1.0, "step": s, "generation": 1, "world": 3, "reward": s / 10, "kl": 0.1, "loss": -s} for s in range(10)
    ]
    (folder / "history.jsonl").write_text("".join(json.dumps(row) + "\n" for row in history))
    evidence = (
        of_exit(Exit(generation=1, slot=0, step=4, cause="signal 9 (SIGKILL)", own=False, signal=9), rank=1, node="n1"),
    )
    built = incident.build(lines_of("n0")[4:8], judge(evidence), evidence, job="toy", node="n0")
    assert built is not None
    incident.save(folder / "state" / "toy" / "n0" / "incidents", built)
    return folder
