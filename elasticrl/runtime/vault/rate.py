"""How fast copies go, in bytes per second and in bytes on their way, so that they leave the network to the gradients."""

import asyncio


class Rate:
    """A bucket that fills at `bytes_per_s` up to a quarter of a second's worth; 0 is no limit."""

    def __init__(self, bytes_per_s: float, window_bytes: int = 16 << 20) -> None:
        self.bytes_per_s = bytes_per_s
        self.window_bytes = window_bytes  # sent and not acknowledged yet, at most; one block in any case
        self._left = bytes_per_s / 4
        self._at = 0.0

    async def allow(self, nbytes: int) -> None:
        """Wait until `nbytes` may go."""
        if not self.bytes_per_s:
            return
        now = asyncio.get_running_loop().time()
        if self._at:
            self._left = min(self._left + (now - self._at) * self.bytes_per_s, self.bytes_per_s / 4)
        self._at = now
        self._left -= nbytes
        if self._left < 0:
            await asyncio.sleep(-self._left / self.bytes_per_s)
