"""A collective that a rank never enters: ours times out and forms again in place, torch's own watchdog ends the process, and
`elasticrl diagnose` reads what it said. Then aborts while CUDA graphs are held.
"""

import json
import os
import subprocess
import sys
import time
from itertools import count

from bench.gpu.say import ROOT, Say, begin

LIMIT_S = 4.0
WATCHED_S = 30.0  # for torch's watchdog to end a process: it looks seldom
GRAPHS = "there are no CUDA graphs"
GENERATION = count(1, 10)


def main(say: Say) -> None:
    from forked_workers import Workers

    from bench.gpu import group_jobs

    workers = Workers(2)
    try:
        with say.check(
            "a collective that a rank never enters ends by its limit", on_card="gloo has the limit, not NCCL"
        ):
            first, _ = workers.run(group_jobs.never_enters, 2, generation=next(GENERATION), limit_s=LIMIT_S)
            say.figure("it ended after", first["took_s"], "s", f"the limit is {LIMIT_S:g} s: {first['said']}")
            say.figure("from there to a sum of all in the next gang", first["again_s"], "s")
            assert "Timed out" in first["said"], first
            assert first["took_s"] < LIMIT_S + 10.0
        with say.check("a graph without collectives is held through an abort", on_card=GRAPHS):
            if say.card:
                found = workers.run(group_jobs.keeps_a_graph, 2, generation=next(GENERATION))
                assert found == [[2.0, 999.0]] * 2, found
    finally:
        workers.close()
    with say.check("torch's own watchdog ends a rank that waits", on_card="gloo raises; there is no watchdog"):
        stock(say)
    for dropped in (True, False):
        graph = "dropped before" if dropped else "still held"
        with say.check(f"torch's NCCL is aborted, a graph with its collective {graph}", on_card=GRAPHS):
            if say.card:
                abort(say, graph, dropped=dropped)


def stock(say: Say) -> None:
    """Two plain processes, and what diagnose makes of their logs."""
    from elasticrl.store.embedded import free_ports

    logs, address = say.folder / "logs", f"127.0.0.1:{free_ports()[0]}"
    logs.mkdir()
    ranks = []
    for rank in range(2):
        own = {"NCCL_HOSTID": str(rank), "NCCL_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo", "NCCL_DEBUG": "WARN"}
        own |= {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1", "TORCH_NCCL_DUMP_ON_TIMEOUT": "0", "RANK": str(rank)}
        command = [
            sys.executable,
            str(ROOT / "bench" / "gpu" / "stock.py"),
            say.device,
            address,
            str(rank),
            str(LIMIT_S),
        ]
        with (logs / f"rank_{rank}.log").open("wb") as out:
            ranks.append(subprocess.Popen(command, env={**os.environ, **own}, stdout=out, stderr=out))
    begun = time.monotonic()
    try:
        code = ranks[0].wait(WATCHED_S)
    finally:
        for each in ranks:
            each.kill()
            each.wait()
    say.figure("the rank that waited ended after", time.monotonic() - begun, "s", f"exit code {code}")
    assert code != 0, "it ended as if nothing had been wrong"
    command = [sys.executable, "-m", "elasticrl.cli.main", "diagnose", "--log", str(logs), "--world", "2", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    said = json.loads(done.stdout)["verdict"]
    say.row("what diagnose says of its log", "figure", said=f"{said['class']}: {said['cause']}")


def abort(say: Say, graph: str, *, dropped: bool) -> None:
    """In processes that are used for nothing else."""
    from forked_workers import Workers

    from bench.gpu import group_jobs

    workers = Workers(2)
    try:
        found = workers.run(group_jobs.aborts_with_a_graph, 2, generation=next(GENERATION), dropped=dropped)
    finally:
        workers.close()
    say.figure(f"abort, graph {graph}", max(each["took_s"] for each in found), "s", json.dumps(found))
    assert all(each["ended"] for each in found) or not dropped, "the abort did not end"


if __name__ == "__main__":
    begin(main)
