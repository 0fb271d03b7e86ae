"""What a script is told that calls the runtime in a way that cannot be meant."""


class Misuse(RuntimeError):
    """The script calls the runtime in a way that cannot be meant; the sentence says what to do."""
