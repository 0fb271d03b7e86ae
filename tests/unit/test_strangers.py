"""Who is put out where a port is crowded, as tables."""

import pytest

from elasticrl.base.strangers import OF_ONE, PLACES, put_out

OURS = {"10.0.0.1", "10.0.0.2"}
EVERYWHERE = {n: f"10.9.{n // 250}.{n % 250}" for n in range(PLACES)}  # one from each address
MEMBERS = {f"m{n}": "10.0.0.1" for n in range(OF_ONE)}


@pytest.mark.parametrize(
    ("waiting", "address", "out"),
    [
        ({}, "10.9.0.9", None),
        (dict.fromkeys(range(OF_ONE - 1), "10.9.0.9"), "10.9.0.9", None),
        (dict.fromkeys(range(OF_ONE), "10.9.0.9"), "10.9.0.9", 0),  # the oldest of its own address
        (dict.fromkeys(range(OF_ONE), "10.9.0.9"), "10.9.0.8", None),
        (EVERYWHERE, "10.8.0.1", 0),  # the oldest of all
        (EVERYWHERE, "10.0.0.1", None),  # a node of the job has places apart
        (MEMBERS, "10.0.0.1", "m0"),  # but no more than anybody
        (MEMBERS, "10.0.0.2", None),
        (MEMBERS | EVERYWHERE, "10.8.0.1", 0),  # and it is not its own that make room for the others
    ],
)
def test_the_stranger_that_has_waited_longest_makes_room(waiting: dict[object, str], address: str, out: object) -> None:
    assert put_out(waiting, address, OURS) == out
