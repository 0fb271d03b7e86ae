"""When what a gang goes on from is copied before its first step."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from elasticrl.runtime.search import thin

ALONE, TWICE = ({"n0": 1},), ({"n0": 1, "n1": 1},)  # the nodes that have a shard


@pytest.mark.parametrize(
    ("pace_s", "every", "copy_s", "lies", "copied"),
    [
        (0.3, 1, 0.1, ALONE, False),  # the next state comes soon, with its copies
        (0.3, 5, 0.1, ALONE, True),  # it does not, as each fifth is kept
        (3.0, 1, 0.0, ALONE, True),
        (4.0, 1, 1.0, ALONE, True),
        (3.0, 1, 2.0, ALONE, True),
        (3.0, 1, 3.0, ALONE, False),  # copies take as long
        (0.0, 1, 2.0, ALONE, True),  # nobody knows
        (3.0, 1, 0.1, TWICE, False),
    ],
)
def test_a_state_that_lies_with_too_few_nodes_is_copied_unless_the_next_comes_soon(
    pace_s: float, every: int, copy_s: float, lies: Any, *, copied: bool
) -> None:
    agreed = SimpleNamespace(
        pace_s=pace_s, copy_s=copy_s, whole=SimpleNamespace(layers=[SimpleNamespace(sources=lies)])
    )
    assert thin(cast("Any", agreed), copies=1, world=3, every=every) is copied
