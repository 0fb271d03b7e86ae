"""What rides on a vote, as a table: every 64-bit word survives the way through floats, and all ranks hear the same."""

from dataclasses import replace

from elasticrl.runtime import notes
from elasticrl.runtime.digest import MASK, Digest

WORDS = (0, 1, MASK, 1 << 63, 0xFFFFFFFF, 0x1F3C_77AA_02D1_9E0B)


def part(param: int, moment: int, replica: int | None = None) -> tuple[Digest, ...]:
    sums = {"param": param, "exp_avg": moment} | ({} if replica is None else {notes.REPLICA: replica})
    return (Digest(version=7, sums=sums),)


def heard(
    *parts: tuple[Digest, ...], ending: int | None = None, late: int | None = None, added: tuple[int, ...] = (0, 0, 0)
) -> notes.Heard:
    rows = [
        notes.write(
            ending=rank == ending,
            added=added[rank],
            late=rank == late,
            cost_s=0.1 * rank,
            since_s=5.0 - rank,
            digests=mine,
        )
        for rank, mine in enumerate(parts)
    ]
    return notes.read(rows, parts[0])


def test_the_parts_of_all_ranks_make_the_digest_of_the_whole():
    for word in WORDS:
        whole = Digest(version=7, sums={"param": (word + 5) & MASK, "exp_avg": (2 * word) & MASK})
        assert heard(part(word, word), part(5, word)).digest == whole.hex


def test_a_replica_that_parted_is_named_and_is_no_part_of_the_digest():
    alike = heard(part(1, 2, WORDS[5]), part(3, 4, WORDS[5]), part(5, 6, WORDS[5]))
    odd = heard(part(1, 2, WORDS[5]), part(3, 4, WORDS[5] ^ 1), part(5, 6, WORDS[5]))
    assert alike.odd == ()
    assert odd.odd == (1,)
    assert alike.digest == odd.digest


def test_one_ranks_word_is_heard_by_all():
    assert heard(part(1, 2), part(3, 4), ending=1).ending
    assert heard(part(1, 2), part(3, 4), late=0).late
    quiet = heard((), ())
    assert (quiet.ending, quiet.parting, quiet.late, quiet.digest, quiet.odd) == (False, False, False, None, ())


def test_a_state_is_worth_keeping_by_what_the_last_one_cost_where_it_cost_most():
    said = heard((), (), ())
    assert (said.cost_s, said.since_s) == (0.2, 5.0)
    assert [said.worth(part) for part in (0.0, 0.03, 0.04, 1.0)] == [False, False, True, True]
    assert not replace(said, cost_s=0.0).worth(0.0), "none is asked for"
    assert replace(said, cost_s=9.0).worth(1.0), "each is"


def test_a_gang_parts_to_grow_when_one_knows_that_the_others_are_there_and_all_know_of_the_plan():
    said = {
        added: heard((), (), (), added=added).parting
        for added in [(0, 0, 0), (1, 1, 1), (2, 1, 0), (2, 1, 1), (1, 2, 2)]
    }
    assert said == {(0, 0, 0): False, (1, 1, 1): False, (2, 1, 0): False, (2, 1, 1): True, (1, 2, 2): True}
