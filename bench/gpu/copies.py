"""How fast a state goes from the card into the vault's memory: pageable, registered with CUDA, and by the vault itself."""

import mmap
import os
import statistics
import tempfile
import time
from pathlib import Path

import torch

from bench.gpu.say import Say, begin

SIZES = {"cuda": 2 << 30, "cpu": 64 << 20}  # bytes
TIMES = 4


def rate(say: Say, state: torch.Tensor, room: torch.Tensor) -> float:
    """Bytes a second from there to here, the median of some; the first pays for memory."""
    took = []
    for _ in range(TIMES + 1):
        begun = time.perf_counter()
        room.copy_(state, non_blocking=True)
        if say.card:
            torch.cuda.synchronize()
        took.append(time.perf_counter() - begun)
    return state.numel() * state.element_size() / statistics.median(took[1:])


def main(say: Say) -> None:
    from elasticrl.runtime.vault.registered import Registered

    size = SIZES[say.device]
    with tempfile.TemporaryDirectory(
        prefix="copies-", dir=os.environ.get("ELASTICRL_BENCH_MEMORY", "/dev/shm")
    ) as name:
        folder = Path(name)
        state = torch.rand(size // 4, device=say.device)
        with (folder / "room").open("w+b") as file:
            os.posix_fallocate(file.fileno(), 0, size)
            mapping = mmap.mmap(file.fileno(), size)
        room = torch.frombuffer(mapping, dtype=torch.float32)
        say.figure("a copy into pageable memory", rate(say, state, room) / 1e9, "GB/s")
        with say.check("memory is registered with CUDA", on_card="there is no CUDA to register memory with"):
            if say.card:
                refusals: list[str] = []
                registered, begun = Registered(torch.cuda.cudart(), refusals.append), time.monotonic()
                assert registered.know(0, mapping), refusals
                say.figure("registering takes", 1e9 * (time.monotonic() - begun) / size, "s for each GB")
                say.figure("a copy into registered memory", rate(say, state, room) / 1e9, "GB/s")
                assert torch.equal(room[-1000:], state[-1000:].cpu())
                registered.close()
        with say.check("the vault's own snapshots", on_card="its copies are the host's own here"):
            snapshots(say, folder, state)


def snapshots(say: Say, folder: Path, state: torch.Tensor) -> None:
    """As a worker keeps it: until the state may change again, and until it is sealed."""
    from elasticrl.runtime.vault.client import Content, Vault
    from elasticrl.runtime.vault.layout import Table
    from elasticrl.runtime.vault.piece import whole
    from elasticrl.runtime.vault.version import Version

    vault = Vault(folder / "vault", job="gpu", node="n0", deadline_s=60.0)
    content = Content(table=Table((whole("state", "float32", tuple(state.shape)),)), tensors=(state,))
    taken, sealed = [], []
    for step in range(4 + TIMES):
        begun = time.perf_counter()
        ticket = vault.snapshot(content, version=Version(step), generation=1, shard=0, world=1)
        ticket.wait_taken(60.0)
        taken.append(time.perf_counter() - begun)
        ticket.wait_sealed(60.0)
        sealed.append(time.perf_counter() - begun)
    vault.close()
    nbytes = state.numel() * state.element_size()
    say.figure("a first snapshot holds up an update", max(taken[:4]), "s", f"{nbytes / 1e9:.1f} GB, memory is made")
    say.figure("a snapshot holds up an update", statistics.median(taken[4:]), "s", f"{nbytes / 1e9:.1f} GB")
    say.figure("the vault's copy", nbytes / statistics.median(taken[4:]) / 1e9, "GB/s", vault.slower)
    say.figure("copied and summed", nbytes / statistics.median(sealed[4:]) / 1e9, "GB/s")
    assert not vault.slower, vault.slower


if __name__ == "__main__":
    begin(main)
