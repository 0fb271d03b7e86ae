"""Words that sentences for people share."""


def count(number: int, thing: str) -> str:
    """A number of things.

    >>> count(1, "step"), count(3, "step")
    ('1 step', '3 steps')
    """
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"
