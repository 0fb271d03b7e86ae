"""When a daemon hears of its workers: of news at once, of all else every second."""

from dataclasses import replace
from typing import Any, cast

from elasticrl.agent.reports import Reports
from elasticrl.contract.model import Work
from elasticrl.contract.wire import Report

TRAINS = Report(work=Work.TRAINING, generation=3, step=10, pid=1, started=1)


class Heard:
    """The daemon's end."""

    def __init__(self) -> None:
        self.reports: list[Report] = []

    def send(self, report: Report) -> None:
        self.reports.append(report)


def test_a_generation_has_sealed_a_step_once_it_is_beyond_the_one_it_went_on_from() -> None:
    reports = Reports()
    assert not reports.steps(TRAINS)
    assert not reports.steady(3, Work.TRAINING, 10)
    assert reports.steps(replace(TRAINS, step=11))
    assert reports.steady(3, Work.TRAINING, 11)
    assert not reports.steps(replace(TRAINS, step=11, generation=4)), "the next one begins there"
    assert not reports.steady(4, Work.TRAINING, 11)
    assert not reports.steps(replace(TRAINS, step=12, generation=4, work=Work.PARKED))


def test_the_first_sealed_step_is_told_at_once_and_the_next_ones_with_the_second() -> None:
    reports, heard = Reports(), Heard()
    for report in (TRAINS, TRAINS, replace(TRAINS, step=11), replace(TRAINS, step=12), replace(TRAINS, step=13)):
        reports.steps(report)
        reports.send(cast("Any", heard), report, grows=False)
    assert [report.step for report in heard.reports] == [10, 11]
