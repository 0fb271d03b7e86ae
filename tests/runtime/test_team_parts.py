"""A team's norm counts each parameter once; what would make a team wrong without a word is said."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import count

import pytest
import team_parts
from forked_workers import Workers

from elasticrl.config.training import Model
from elasticrl.contract.orders import Place
from elasticrl.runtime.misuse import Misuse
from elasticrl.runtime.team import check_team

GENERATION = count(1)


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    gang = Workers(2)
    yield gang
    gang.close()


def test_the_norm_is_that_of_the_whole_model_on_all_members(workers: Workers):
    first, second = workers.run(team_parts.one_update, 2, generation=next(GENERATION))
    assert first == second == pytest.approx(team_parts.norm_of_the_whole(), rel=1e-5)


def test_a_team_that_cuts_nothing_is_told_so(workers: Workers):
    for said in workers.run(team_parts.one_update, 2, generation=next(GENERATION), cut=False):
        assert "would all compute the same: no parameter is cut" in said


def test_members_that_tally_different_numbers_of_one_lane_are_named(workers: Workers):
    for said in workers.run(team_parts.one_update, 2, generation=next(GENERATION), unlike=True):
        assert "Ranks 0 and 1 are one team and tallied different numbers of the same lanes" in said


def test_members_that_share_tokens_add_up_to_one_lane_and_have_to_tally_alike(workers: Workers):
    first, second = workers.run(team_parts.one_update_of_shared_tokens, 2, generation=next(GENERATION))
    assert first == second == pytest.approx(team_parts.norm_of_the_whole(), rel=1e-5)
    for said in workers.run(team_parts.one_update_of_shared_tokens, 2, generation=next(GENERATION), unlike=True):
        assert "Ranks 0 and 1 are one team and tallied different numbers of the same lanes" in said


@pytest.mark.parametrize("fsdp", [False, True])
def test_where_there_are_no_teams_a_step_calls_nothing_of_them(workers: Workers, fsdp: bool):
    assert workers.run(team_parts.called_of_teams, 2, generation=next(GENERATION), fsdp=fsdp) == [[], []]


@pytest.mark.parametrize("even", [True, False])
def test_what_a_team_has_cut_goes_to_an_engine_whole_and_bucket_by_bucket(workers: Workers, even: bool):
    for right, buckets, largest in workers.run(
        team_parts.sent_in_buckets, 2, generation=next(GENERATION), fsdp=False, even=even
    ):
        assert right
        assert buckets > 2
        assert largest <= 56, "a bucket, and what its chunks are padded by"


@pytest.mark.parametrize("even", [True, False])
def test_what_fsdp_has_cut_of_a_teams_parts_goes_to_an_engine_whole_and_bucket_by_bucket(even: bool):
    gang = Workers(4)
    try:
        found = gang.run(team_parts.sent_in_buckets, 4, generation=next(GENERATION), fsdp=True, even=even)
    finally:
        gang.close()
    assert all(right and buckets > 2 and largest <= 56 for right, buckets, largest in found), found


PLACE = Place(generation=3, born=1, rank=5, world=8, all_lanes=8, team=2)


def test_a_rank_carries_its_teams_lanes():
    assert [list(replace(PLACE, rank=rank).lanes) for rank in range(8)] == [[0, 1]] * 2 + [[2, 3]] * 2 + [
        [4, 5]
    ] * 2 + [[6, 7]] * 2


def test_a_node_with_another_size_of_teams_than_the_plan_is_told_so():
    check_team(Model(tp=2), PLACE)
    check_team(Model(cp=2), PLACE)
    with pytest.raises(Misuse, match=r"model.tp is 4 in .* the job's plan has teams of 2"):
        check_team(Model(tp=4), PLACE)
    with pytest.raises(Misuse, match=r"model.tp x model.cp is 2 x 2 in .* the job's plan has teams of 2"):
        check_team(Model(tp=2, cp=2), PLACE)
    with pytest.raises(Misuse, match="one process alone is no team"):
        check_team(Model(tp=2), replace(PLACE, world=1, rank=0, team=1))
