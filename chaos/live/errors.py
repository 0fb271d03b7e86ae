"""What can go wrong in a live run, each with its own name for whoever answers for it. The message says what was seen.

BoxError    the lab: a box, a cable or a disk
NotStruck   the fault: it has tested nothing
Late        the job
"""


class BoxError(RuntimeError):
    """A box could not be made, or is not as it should be."""


class NotStruck(RuntimeError):
    """It was put in and did nothing; the sentence says what was seen."""


class Late(AssertionError):
    """Something did not happen in time; the message says what, and what was seen instead."""
