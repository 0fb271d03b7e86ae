"""How fast a job goes, from pictures of it that follow each other: what `status --watch` says beside the picture."""

from collections import deque
from dataclasses import dataclass, field

KEPT_S = 60.0


@dataclass(slots=True)
class Pace:
    """Steps of the last minute.

    >>> pace = Pace()
    >>> [pace.after(now, step) for now, step in ((0.0, 10), (10.0, 10), (20.0, 30))]
    ['', 'no step for 10 s', '1 step a second']
    """

    seen: deque[tuple[float, int]] = field(default_factory=deque)
    moved: float = 0.0  # when the step last changed

    def after(self, now: float, step: int) -> str:
        """A moment later: the sentence."""
        if not self.seen or step != self.seen[-1][1]:
            self.moved = now
        if self.seen and step < self.seen[-1][1]:
            self.seen.clear()
        self.seen.append((now, step))
        while self.seen[0][0] < now - KEPT_S:
            self.seen.popleft()
        (first, start), (last, end) = self.seen[0], self.seen[-1]
        if now - self.moved >= 10.0:
            return f"no step for {now - self.moved:.0f} s"
        if last <= first or end <= start:
            return ""
        rate = (end - start) / (last - first)
        return (
            f"{rate:.3g} step{'' if rate == 1 else 's'} a second" if rate >= 0.5 else f"a step every {1 / rate:.3g} s"
        )
