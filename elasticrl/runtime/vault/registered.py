"""The vault's files as memory that a GPU copies into directly (`cudaHostRegister`), several times as fast as into other memory.

The one idea: a file's mapping lives as long as the layout of a shard does, so it is registered once and then used by every
snapshot. Where that is refused nothing is lost but speed: snapshots are copied as before, and the first refusal is told.
"""

from __future__ import annotations

import ctypes
import threading
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import mmap
    from collections.abc import Callable


class Cudart(Protocol):
    """What is asked of CUDA's runtime; torch has it as `torch.cuda.cudart()`. 0 is success."""

    def cudaHostRegister(self, pointer: int, size: int, flags: int) -> Any:  # noqa: N802 - CUDA's names
        """Lock this memory into place, and tell the GPU of it."""

    def cudaHostUnregister(self, pointer: int) -> Any:  # noqa: N802
        """The reverse."""


class Registered:
    """The mappings of one worker that its GPU knows, by the name of their place. For one thread."""

    def __init__(
        self, cudart: Cudart, told: Callable[[str], None], *, choose: Callable[[], None] = lambda: None
    ) -> None:
        """`choose` makes this worker's GPU that of the calling thread. Without it CUDA takes the first one, and makes a context
        there.
        """
        self._cudart, self._choose = cudart, choose
        self._told = told
        self._refused = False
        self._known: dict[int, tuple[mmap.mmap, int]] = {}  # the mapping stays until it is let go of here

    def know(self, place: int, mapping: mmap.mmap) -> bool:
        """Whether the GPU copies into this mapping directly: it is registered unless it is already, and what was registered
        for the same place before is let go of.
        """
        held = self._known.get(place)
        if held is not None and held[0] is mapping:
            return True
        self.forget(place)
        if self._refused:
            return False
        view = ctypes.c_char.from_buffer(mapping)
        pointer = ctypes.addressof(view)
        del view  # a mapping with a view of it cannot be closed
        if why := self._asked(lambda: self._cudart.cudaHostRegister(pointer, len(mapping), 0)):
            self._refused = True
            self._told(
                f"The GPU cannot copy into the vault's memory directly (cudaHostRegister of {len(mapping)} bytes: {why}). "
                "Snapshots go through pageable memory, which is several times slower; nothing else changes."
            )
            return False
        self._known[place] = mapping, pointer
        return True

    def forget(self, place: int) -> None:
        """Before its mapping goes. No copy into it is under way."""
        if (held := self._known.pop(place, None)) is not None:
            self._asked(lambda: self._cudart.cudaHostUnregister(held[1]))

    def close(self) -> None:
        """All of them."""
        for place in list(self._known):
            self.forget(place)

    def _asked(self, ask: Callable[[], Any]) -> str:
        """Why CUDA did not do it, or "". In a thread of its own: CUDA remembers a thread's last error, and torch would take it
        for that of the next kernel which this thread starts.
        """
        said: list[str] = []

        def run() -> None:
            try:
                self._choose()
                code = ask()
            except RuntimeError as error:  # torch's CudaError is one
                said.append(str(error))
            else:
                said.extend([f"error {int(code)}"] if int(code) else [])

        thread = threading.Thread(target=run, name="vault-register", daemon=True)
        thread.start()
        thread.join()
        return said[0] if said else ""
