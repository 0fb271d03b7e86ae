"""The same digests through kills, a stop, a lost node and a new one; and through gloo in NCCL's place and back."""

import time
from collections.abc import Callable
from pathlib import Path

from bench.gpu.bits import NCCL
from bench.gpu.say import Say, begin

STEPS = 60  # at 60 ms: more than are made while faults are dealt out, or nothing would be left to wait for


def through(folder: Path, strategy: str, faults: Callable[..., None]) -> dict[int, str]:
    """The digests of a gang of three to which that happens."""
    from gang_kit import Nodes, digests

    from elasticrl.runtime.data.audit import audit

    with Nodes(folder, steps=STEPS, strategy=strategy, step_ms=60.0) as nodes:
        nodes.plan("n0", "n1", "n2")
        nodes.until_new(2)
        faults(nodes)
        nodes.until_done()
        found = audit(nodes.run_dir)
        assert found.ok, found.sentence
        return digests(nodes.run_dir)


def main(say: Say) -> None:
    from gang_kit import Nodes, undisturbed_digests

    def again(nodes: Nodes, what: str, *plan: str, count: int = 2) -> None:
        begun = time.monotonic()
        nodes.plan(*plan)
        nodes.until_new(1)
        say.figure(f"{strategy}: from the plan to a sealed step: {what}", time.monotonic() - begun, "s")
        nodes.until_new(count)

    def faults(nodes: Nodes) -> None:
        nodes.kill_worker("n1")
        again(nodes, "a killed worker", "n0", "n1", "n2")
        nodes.freeze("n2")
        time.sleep(1.0)  # the others stand in a collective by then
        nodes.kill_worker("n2")
        again(nodes, "a stopped worker", "n0", "n1", "n2")
        nodes.lose("n2")
        again(nodes, "a lost node", "n0", "n1")
        again(nodes, "a new node", "n0", "n1", "n3")

    def there_and_back(nodes: Nodes) -> None:
        nodes.plan("n0", "n1", "n2", backend="gloo")
        nodes.until_new(2)
        nodes.kill_worker("n1")
        nodes.plan("n0", "n1", "n2", backend="gloo")
        nodes.until_new(2)
        nodes.plan("n0", "n1", "n2")
        nodes.until_new(2)

    alone: dict[int, str] = {}
    with say.check("one worker, undisturbed", on_card=NCCL):
        alone = undisturbed_digests(say.folder / "alone", STEPS)
    for strategy in ("replicated", "fsdp"):
        with say.check(f"{strategy}, killed, stopped, lost and joined", on_card=NCCL):
            assert through(say.folder / strategy, strategy, faults) == alone
    with say.check("replicated, over gloo and back", on_card="gloo carries all of it here"):
        assert through(say.folder / "back", "replicated", there_and_back) == alone


if __name__ == "__main__":
    begin(main)
