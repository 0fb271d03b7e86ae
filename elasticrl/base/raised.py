"""What an exception is called: the full name of its type, so that what it says need not be read to know what it is."""

from typing import Final

KEY: Final = "raised"  # beside torch's own words in a worker's error file
LONGEST: Final = 200


def name_of(error: BaseException) -> str:
    """Its type's name with its module; of Python's own without.

    >>> name_of(ValueError("Diverged: no")), name_of(__import__("json").JSONDecodeError("x", "", 0))
    ('ValueError', 'json.decoder.JSONDecodeError')
    """
    kind = type(error)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    return name[:LONGEST]


def short(name: str) -> str:
    """Without the module.

    >>> short("torch.distributed.DistNetworkError"), short("")
    ('DistNetworkError', '')
    """
    return name.rpartition(".")[2]
