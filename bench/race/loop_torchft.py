"""The small loop under torchft: one replica group per node, samples dealt as by its `DistributedSampler`, whose
position is saved at every step, as its example advises."""

import os
from typing import Any

from loop import BATCH, SAVE_EVERY, Loop, arguments
from torchft import Manager, ProcessGroupGloo

REPLICAS = 3


def main() -> None:
    options = arguments().parse_args()
    loop = Loop(options.folder, options.step_s, options.timeout_s)
    number = int(loop.node[1:])
    position = Position(options.folder / f"position-{loop.node}")

    def load(state: dict[str, Any]) -> None:
        loop.weights = state["weights"].clone()

    manager = Manager(
        pg=ProcessGroupGloo(**loop.timeout),
        load_state_dict=load,
        state_dict=lambda: {"weights": loop.weights},
        min_replica_size=1,
        replica_id=f"race_{loop.node}",
        **loop.timeout,
    )
    loop.load()
    if loop.step:  # after a loss of all: otherwise a living replica's state comes over what was loaded
        manager.load_state_dict({"step": loop.step, "batches_committed": loop.step * REPLICAS})
    while True:
        manager.start_quorum()
        manager.wait_quorum()
        quorum = manager._quorum_id  # noqa: SLF001 - it has no public name
        loop.step = manager.current_step()
        counted = quorum if manager.is_participating() else -1  # what a healing replica has computed is not added
        total = loop.gradient(position.next(number), generation=counted, rank=number)
        manager.allreduce(total).wait()
        if not manager.should_commit():
            continue
        loop.step = manager.current_step() - 1  # it counts the steps itself
        loop.apply(total * REPLICAS)  # it has taken the mean of the replicas that took part
        if manager.participating_rank() == 0 and loop.step % SAVE_EVERY == 0:
            loop.save()
        loop.tell(generation=quorum, rank=number, world=manager.num_participants())


class Position:
    """How far this replica is in its own share of the samples."""

    def __init__(self, path: Any) -> None:
        self.path = path
        self.at = int(path.read_text()) if path.exists() else 0

    def next(self, number: int) -> list[int]:
        share = BATCH // REPLICAS
        found = [(self.at + i) * REPLICAS + number for i in range(share)]
        self.at += share
        fresh = self.path.with_suffix(f".{os.getpid()}")
        fresh.write_text(str(self.at))
        fresh.replace(self.path)
        return found


if __name__ == "__main__":
    main()
