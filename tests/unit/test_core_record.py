"""What a node says of its phase and beat, and that this costs the store no write more."""

from dataclasses import fields, replace
from itertools import cycle

from core_kit import Life, leads, member, record, trains

from elasticrl.contract import events
from elasticrl.contract.events import Tick, Workers
from elasticrl.contract.evidence import Evidence, Kind, Sign
from elasticrl.contract.model import Record, Work, saying
from elasticrl.contract.settings import Membership, Settings
from elasticrl.core.lead.growth import unready

SETTINGS = Settings(lanes=4, membership=Membership(min_nodes=2, report_s=5.0))
PHASES = ("rollout", "update", "sync")


class Writer(Life):
    """A node whose store shows it each record as soon as it is written; counts them."""

    def __init__(self):
        super().__init__("n00/1", SETTINGS)
        self.written = []

    def at(self, now, event, label=None):
        decision = super().at(now, event, label)
        found = [action.record for action in decision.actions if isinstance(action, events.Publish)]
        self.written += found
        if found:
            self.seen(now, "own record")
        return decision


def writes(*, step_s=0.05, phases=PHASES, beats=True):
    """The records that a training node writes in a minute."""
    life = Writer()
    leads(life)
    trains(life, 2.6, 1, "n00", "n01")
    life.leased(3.9)
    life.written.clear()
    for second, phase in zip(range(60), cycle(phases)):
        now = 4.0 + second
        word = Workers(
            now=0, work=Work.TRAINING, generation=1, born=1, warm=True, endpoint="n00:29500", step=int(second / step_s),
            phase=phase, beat_at=1000.0 + now if beats else 1000.0,
        )  # fmt: skip
        life.at(now, word)
        life.leased(now + 0.3)
        life.at(now + 0.6, Tick(now=0))
    return life.written


def test_a_record_says_what_its_workers_do_and_when_they_last_beat():
    record = writes()[-1]
    assert record.phase in PHASES
    assert 1055.0 < record.beat_at <= 1064.0
    assert record.step > 1000


def test_phases_and_beats_cost_a_job_of_short_steps_no_write():
    plain = len(writes(phases=("",), beats=False))
    assert plain <= 60 / 5 + 2
    assert len(writes()) == plain


def test_of_long_steps_each_phase_is_told_at_most_as_often_as_steps_are():
    assert len(writes(step_s=1000.0)) <= 60 / 5 + 2


def test_a_beat_alone_is_worth_no_write():
    assert len(writes(step_s=1000.0, phases=("rollout",))) <= 2


def test_a_node_says_why_it_gets_no_worker_ready_until_it_has_one():
    life = Writer()
    leads(life)
    life.at(2.6, Workers(now=0, problem="a process ended before it was warm: exit code 1: " + "x" * 1000))
    life.at(2.7, Workers(now=0, warm=True, endpoint="n00:29500"))
    said = [record.problem for record in life.written]
    assert said[-2].startswith("a process ended before it was warm: exit code 1: xxx")
    assert len(said[-2]) == 200
    assert said[-1] == ""


def test_who_cannot_get_ready_is_named_once_for_all_who_say_the_same():
    one, two, three = (
        record("n00", warm=False, problem="no peft"),
        record("n01", warm=False, problem="disk full"),
        record("n02"),
    )
    assert unready({}) == unready({"n02": three}) == ""
    assert unready({"n01": two, "n02": three}) == "; n01 cannot get ready: disk full"
    same = replace(one, member=member("n03"))
    assert unready({"n00": one, "n01": two, "n03": same}) == "; n00 and 2 more cannot get ready: no peft"
    assert unready({"n00": replace(one, warm=True)}) == "", "it has workers; only their successor does not get ready"


def test_a_node_says_that_its_words_are_lost_until_they_are_not():
    life = Writer()
    leads(life)
    life.at(2.6, Workers(now=0, unlogged="the log folder takes nothing new"))
    life.at(2.7, Workers(now=0))
    assert [record.unlogged for record in life.written][-2:] == ["the log folder takes nothing new", ""]


def test_a_record_says_all_that_it_was_made_of_but_its_beat():
    mine = record("n00", work=Work.TRAINING, generation=3, born=1, step=4, beat_at=1.0)
    passed_on = ("warm", "endpoint", "echo", "vault", "versions", "restores")
    words = {f.name: getattr(mine, f.name) for f in fields(Record) if f.name not in (*passed_on, "beat_at")}
    facts = Workers(now=0, **{name: getattr(mine, name) for name in passed_on})
    assert saying({**words, "beat_at": 1.0}, facts) == mine
    assert mine.says(words, replace(facts, beat_at=2.0, work=Work.NONE, step=9))
    other = Evidence(kind=Kind.STACK, sign=Sign.ELSEWHERE, source="test")
    for name in words:
        assert not mine.says({**words, name: other}, facts), name
    for name in passed_on:
        assert not mine.says(words, replace(facts, **{name: other})), name
