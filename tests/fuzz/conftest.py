from collections.abc import Iterator

import pytest
from fuzz_kit import bounded


@pytest.fixture(autouse=True)
def _held_to_its_memory() -> Iterator[None]:
    """All examples of a test together: what grows with hostile input shows here, whoever reads it."""
    with bounded():
        yield
