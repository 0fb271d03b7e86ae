"""A leader of thousands: what it looks at at once, and what it gathers first."""

from dataclasses import fields, replace

import pytest
from core_kit import Life, leads, record, trains

from elasticrl.contract import events
from elasticrl.contract.events import Tick
from elasticrl.contract.evidence import Evidence, Kind, Sign
from elasticrl.contract.model import Exit, Intent, Phase, Record, Work
from elasticrl.contract.settings import Membership, Settings

MANY = 2000  # news of so many records is gathered for 20 ms


def leader_of(number):
    names = [f"n{i:02d}" for i in range(number)]
    life = Life(settings=Settings(lanes=number, steps=0, membership=Membership(min_nodes=2, max_nodes=number)))
    leads(life)
    life.leased(0.8)
    trains(life, 1.0, 1, *names)
    life.at(2.0, Tick(now=0))
    return life


def failed(name):
    left = Exit(generation=1, slot=0, step=3, cause="signal 9 (SIGKILL)", own=False, signal=9)
    return record(name, work=Work.FAILED, generation=1, exit=left)


def proposed(decision):
    return [action.plan for action in decision.actions if isinstance(action, events.Propose)]


def shown(life, now, **changes):
    life.view = replace(life.view, revision=life.view.revision + 1, **changes)
    return life.at(now, events.Seen(now=now, view=life.view))


def with_news(life, *records):
    return {**life.view.records, **{r.member.node: r for r in records}}


def test_a_leader_of_thousands_gathers_news_of_records_before_it_looks_at_all():
    life = leader_of(MANY)
    first = shown(life, 2.001, records=with_news(life, failed("n07")))
    assert not proposed(first)
    assert first.wake_at == pytest.approx(2.02)
    second = shown(life, 2.002, records=with_news(life, failed("n09")))
    assert not proposed(second)
    looked = life.at(2.021, Tick(now=0))
    (answer,) = proposed(looked)
    assert {n for cause in answer.causes for n in (m.node for m in cause.who)} == {"n07", "n09"}


def test_a_leader_of_few_looks_at_each_piece_of_news_as_it_comes():
    life = leader_of(20)
    assert proposed(shown(life, 2.001, records=with_news(life, failed("n07"))))


def test_what_is_no_record_is_looked_at_at_once_by_a_leader_of_thousands():
    life = leader_of(MANY)
    (stop,) = proposed(shown(life, 2.001, intent=Intent.STOP, intent_generation=1, intent_revision=50))
    assert stop.phase is Phase.STOP


def test_what_was_wished_for_is_not_sent_again_while_news_is_gathered():
    life = leader_of(MANY)
    (answer,) = proposed(shown(life, 2.1, records=with_news(life, failed("n07"))))
    later = shown(life, 2.101, records=with_news(life, record("n11", work=Work.TRAINING, generation=1, born=1, step=4)))
    assert not proposed(later)
    after = life.at(2.13, Tick(now=0))
    assert not proposed(after)  # its answer is awaited still, so it has not been forgotten meanwhile
    assert answer.generation == 2
    seen = shown(life, 2.14, plan=answer, plan_revision=20)
    assert not proposed(seen)


def test_a_record_says_all_but_its_beat():
    mine = record("n00", work=Work.TRAINING, generation=3, born=1, step=4, beat_at=1.0)
    plain = {field.name: getattr(mine, field.name) for field in fields(Record)}
    assert mine.says(plain)
    assert mine.says({**plain, "beat_at": 2.0})
    other = Evidence(kind=Kind.STACK, sign=Sign.ELSEWHERE, source="test")
    for name in plain.keys() - {"beat_at"}:
        assert not mine.says({**plain, name: other}), name
