"""Memory that the machine gives before anybody needs it.

The one idea: new memory is no memory yet. The kernel finds and clears each page of it when it is first written to, which takes
0.4 s for a gigabyte, and the first step after a restore would wait for that. A thread has it done meanwhile, beside a restore
that waits for others, without the interpreter's lock. Where the kernel cannot (before Linux 5.14), nothing is lost.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

POPULATE_WRITE: Final = 23  # of madvise: as a write to each page would, and what is there stays
AT_ONCE: Final = 16 << 20  # bytes; between two such parts the thread may be told to end
LITTLE: Final = 16 << 20  # not worth a thread


class Touch:
    """Tensors on the host whose pages come from now on, one tensor after the other. Nobody needs to wait for it."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = tensors
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        if sum(tensor.nbytes for tensor in tensors) >= LITTLE:
            self._thread = threading.Thread(target=self._run, name="elasticrl-pages", daemon=True)
            self._thread.start()

    def end(self) -> None:
        """What has not come yet comes as it is needed. Does not wait."""
        self._over.set()

    def wait(self, timeout_s: float) -> None:
        """Until all is there, or could not be had; for tests and benches."""
        if self._thread is not None:
            self._thread.join(timeout_s)

    def _run(self) -> None:
        madvise = ctypes.CDLL(None, use_errno=True).madvise
        for tensor in self._tensors:
            start = tensor.data_ptr()
            stop = (start + tensor.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
            start = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE  # whole pages: on the others something else may lie too
            for at in range(start, stop, AT_ONCE):
                count = min(AT_ONCE, stop - at)
                if self._over.is_set() or madvise(ctypes.c_void_p(at), ctypes.c_size_t(count), POPULATE_WRITE):
                    self._tensors = ()
                    return
        self._tensors = ()
