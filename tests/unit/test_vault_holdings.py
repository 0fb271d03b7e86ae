"""Which version a gang goes on from, and from whose memory."""

from dataclasses import replace
from itertools import combinations

import pytest

from elasticrl.contract.ring import buddies
from elasticrl.runtime.vault.holdings import Holding, newest_whole
from elasticrl.runtime.vault.version import Cut, Version, alive, grow, lineage_from_json, mark

NODES = ("n00", "n01", "n02")


def held(
    step: int, shard: int, at: str, *, generation: int = 1, world: int = 3, update: int = 0, lineage=(), base=None
) -> Holding:
    return Holding(
        at=at,
        node=NODES[shard],
        writer="w0",
        version=Version(step, update),
        generation=generation,
        shard=shard,
        world=world,
        nbytes=100,
        lineage=lineage,
        base=base,
    )


def gang(step: int, **kwargs) -> list[Holding]:
    """Every shard of a step on its own node and at the next one."""
    return [held(step, n, NODES[at % 3], **kwargs) for n in range(3) for at in (n, n + 1)]


def test_the_newest_version_with_all_shards_wins_and_the_nearest_copy_is_named_first():
    found = newest_whole(gang(9) + gang(10), here="n01")
    assert found is not None
    assert found.version == Version(10)
    assert found.sources == (("n01", "n00"), ("n01", "n02"), ("n02", "n00"))


def test_updates_within_a_step_are_ordered():
    found = newest_whole(gang(10, update=1) + gang(10) + gang(10, update=2)[:3], here="n00")
    assert found is not None
    assert found.version == Version(10, 1)


def test_a_version_with_a_missing_shard_is_passed_over_and_named():
    partial = [h for h in gang(11) if h.shard != 2]
    found = newest_whole(gang(10) + partial, here="n00")
    assert found is not None
    assert found.version == Version(10)
    assert found.passed_over == ("step 11.0 of generation 1 has 2 of 3 shards (missing: 2)",)


def test_what_lies_on_another_version_is_whole_with_that_alone():
    light = gang(10, update=1, base=Version(10))
    found = newest_whole(gang(9) + gang(10) + light, here="n01")
    assert found is not None
    assert [(layer.version, layer.sources[0]) for layer in found.layers] == [
        (Version(10, 1), ("n00", "n01")[::-1]),
        (Version(10), ("n01", "n00")),
    ]
    for under in ([h for h in gang(10) if h.shard], gang(10, generation=2)):
        other = newest_whole(gang(9) + under + light, here="n01")
        assert other is not None
        assert other.version != Version(10, 1)
        assert any("step 10.1 lies on step 10.0: " in sentence for sentence in other.passed_over)
    assert Holding.from_json(light[0].to_json(), {mark(()): ()}) == light[0]


@pytest.mark.parametrize("copies", [1, 2])
def test_any_loss_of_as_many_nodes_as_there_are_copies_loses_nothing(copies: int):
    nodes = [f"n{i:02}" for i in range(5)]
    everything = [
        replace(held(7, 0, keeper, world=5), node=node, shard=number)
        for number, node in enumerate(nodes)
        for keeper in (node, *buddies(nodes, node, copies))
    ]
    for lost in combinations(nodes, copies):
        left = [h for h in everything if h.at not in lost]
        assert newest_whole(left, here=left[0].at) is not None
    worse = (*nodes[: copies + 1],)
    assert newest_whole([h for h in everything if h.at not in worse], here="n04") is None


def test_shards_of_two_worlds_never_mix():
    three = [held(10, 0, "n00"), held(10, 1, "n01")]
    two = [held(10, 0, "n00", generation=2, world=2)]
    assert newest_whole(three + two, here="n00") is None
    assert newest_whole([*three, *two, held(10, 1, "n01", generation=2, world=2)], here="n00") is not None


def test_of_two_whole_sets_of_one_version_the_newer_generations_is_taken():
    found = newest_whole(gang(10) + gang(10, generation=2), here="n00")
    assert found is not None
    assert found.generation == 2


def test_what_lies_on_an_abandoned_branch_is_not_considered():
    """Generation 1 went on to step 12 while generation 2 was started from step 10: its 11 and 12 have no future."""
    past = (Cut(1, Version(0)),)
    present = grow(past, 2, Version(10))
    stale = gang(12, lineage=past)
    found = newest_whole(stale + gang(11, generation=2, lineage=present), here="n00")
    assert found is not None
    assert (found.version, found.generation) == (Version(11), 2)


def test_an_ancestor_is_still_good_while_its_successor_is_not_whole():
    past = (Cut(1, Version(0)),)
    present = grow(past, 2, Version(10))
    found = newest_whole(gang(10, lineage=past) + gang(11, generation=2, lineage=present)[:2], here="n00")
    assert found is not None
    assert (found.version, found.generation) == (Version(10), 1)
    assert len(found.passed_over) == 1


def test_nothing_older_than_the_commit_is_taken():
    assert newest_whole(gang(9), here="n00", floor=Version(10)) is None
    assert newest_whole(gang(10), here="n00", floor=Version(10)) is not None


def test_what_was_made_since_the_commit_was_found_rotten_counts_and_nothing_before_it():
    # Generation 2 committed step 20; generation 3 could read no more than step 10, and has made 12 steps since.
    before = (Cut(1, Version(0)), Cut(2, Version(5)))
    after = (*before, Cut(3, Version(10)))
    memory = gang(12, generation=3, lineage=after) + gang(11, generation=3, lineage=after)
    found = newest_whole(memory, here="n00", floor=Version(20), committed=2)
    assert found is not None
    assert found.version == Version(12)
    assert newest_whole(memory, here="n00", floor=Version(20)) is None, "who committed it is not known"
    assert newest_whole(memory, here="n00", floor=Version(20), committed=3) is None, (
        "generation 3 has committed that since"
    )
    old = gang(9, generation=2, lineage=before) + gang(12, generation=3, lineage=after)[:2]
    assert newest_whole(old, here="n00", floor=Version(20), committed=2) is None, "the disk has step 10"


def test_no_holdings_no_version():
    assert newest_whole([], here="n00") is None


def test_the_order_in_which_nodes_answered_does_not_matter():
    everything = gang(9) + gang(10)
    assert newest_whole(reversed(everything), here="n00") == newest_whole(everything, here="n00")


def test_buddies_are_distinct_other_nodes():
    for count in range(1, 6):
        ring = [f"n{i}" for i in range(count)]
        for node in ring:
            for copies in range(4):
                found = buddies(ring, node, copies)
                assert len(found) == min(copies, count - 1) == len(set(found))
                assert node not in found
    assert buddies(["n0", "n0", "n1"], "n0", 2) == ("n1",)  # two workers of one node are one node
    assert buddies(["n0"], "elsewhere", 1) == ()


def test_every_node_keeps_as_many_copies_as_it_gives():
    ring = [f"n{i}" for i in range(5)]
    kept = [buddy for node in ring for buddy in buddies(ring, node, 2)]
    assert sorted(kept) == sorted(ring * 2)


def test_a_holding_survives_json():
    holding = held(10, 1, "n02", update=3, lineage=(Cut(1, Version(4, 2)),))
    assert Holding.from_json(holding.to_json(), {mark(holding.lineage): holding.lineage}) == holding


def test_lineage_judges_every_generation_by_where_its_successors_started():
    lineage = grow(grow(grow((), 1, Version(0)), 3, Version(10)), 7, Version(8, 1))
    assert alive(lineage, 1, Version(8))
    assert not alive(lineage, 1, Version(9))  # generation 7 went back behind it
    assert not alive(lineage, 3, Version(9))
    assert alive(lineage, 7, Version(100))
    assert not alive(lineage, 2, Version(1))  # never led anywhere
    assert alive((), 5, Version(5))
    assert lineage_from_json([cut.to_json() for cut in lineage]) == lineage
