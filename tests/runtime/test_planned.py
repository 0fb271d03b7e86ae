"""Models of transformers, cut by their own plans: a team computes what one process does."""

from collections.abc import Iterator
from itertools import count

import planned_job
import pytest
from forked_workers import Workers

GENERATION = count(1)
CLOSE = 2e-5  # sums are taken in another order


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    gang = Workers(2)
    yield gang
    gang.close()


@pytest.mark.parametrize("kind", planned_job.KINDS)
def test_a_team_computes_what_one_process_does_and_each_member_has_about_half(workers: Workers, kind: str):
    first, second = workers.run(planned_job.compare, 2, generation=next(GENERATION), kind=kind)
    elements = first.pop("elements"), second.pop("elements")
    whole = first.pop("of")
    second.pop("of")
    assert first == second, "the members see the same"
    assert {name: apart for name, apart in first.items() if apart > CLOSE} == {}
    assert max(elements) < 0.53 * whole


def test_sizes_that_a_team_does_not_divide_are_refused_by_name(workers: Workers):
    cases = [
        ({"num_attention_heads": 3, "num_key_value_heads": 3, "hidden_size": 36}, "num_attention_heads is 3"),
        ({"num_key_value_heads": 1}, "num_key_value_heads is 1"),
        ({"intermediate_size": 45}, "gate_proj is cut along 45"),
    ]
    for sizes, said in cases:
        for found in workers.run(planned_job.refused, 2, generation=next(GENERATION), **sizes):
            assert said in found
