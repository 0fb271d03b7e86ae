"""How long to wait before what has ended, or has been put off, is tried again."""


def pause(before_s: float, lived_s: float, *, first_s: float, most_s: float, steady_s: float) -> float:
    """The first pause; after one of `before_s` (0: none yet) twice that, unless what was started has lived steadily since.

    >>> pauses = [0.0]
    >>> for lived_s in (0.2, 0.2, 0.2, 0.2, 99.0, 0.2):
    ...     pauses.append(pause(pauses[-1], lived_s, first_s=0.5, most_s=3.0, steady_s=60.0))
    >>> pauses[1:]
    [0.5, 1.0, 2.0, 3.0, 0.5, 1.0]
    """
    return first_s if not before_s or lived_s > steady_s else min(most_s, 2 * before_s)


def doubled(first_s: float, times: int, most_s: float) -> float:
    """The first wait, doubled so many times, up to the longest. (A float has no place for 2 to the 1,024th.)

    >>> [doubled(60.0, times, 3600.0) for times in (0, 1, 5, 6, 1024)]
    [60.0, 120.0, 1920.0, 3600.0, 3600.0]
    """
    return min(most_s, first_s * 2.0 ** min(times, 64))
