"""When what is done again and again is done: at multiples of its period by the wall clock.

The one idea: a process that wakes once for five small things needs little more than for one of them, as most of what it costs
is the waking; and all nodes do it in the same instant, so that it disturbs a step once and not each rank at another time.
"""


def until_next(period_s: float, now: float) -> float:
    """Seconds from `now`, by the wall clock, to the next multiple of the period; one that is as good as now counts as now.

    >>> [round(until_next(0.2, now), 3) for now in (7.0, 7.05, 7.15, 7.16, 7.1999)]
    [0.2, 0.15, 0.05, 0.24, 0.2]
    """
    left_s = period_s - now % period_s
    return left_s if left_s >= period_s / 4 else left_s + period_s
