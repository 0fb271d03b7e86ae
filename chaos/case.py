"""What a check is given, a history and its scenario, and what it gives: complaints, each of which is a violation."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

from chaos.history import Began, Eased, History, Planned, Struck
from chaos.scenario import Scenario


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """A guarantee that did not hold."""

    check: str
    at: float
    what: str

    def __str__(self) -> str:
        return f"{self.at:.3f} s  {self.check}: {self.what}"


@dataclass(frozen=True)  # no slots: what many checks ask for is looked up once
class Case:
    """A history, and the scenario that it is judged by."""

    scenario: Scenario
    history: History

    @cached_property
    def rest(self) -> History:
        """The history without who began when: of a big cluster that is nearly all of it."""
        return [fact for fact in self.history if not isinstance(fact, Began)]

    @cached_property
    def plans(self) -> list[Planned]:
        """Every plan that was written."""
        return [fact for fact in self.rest if isinstance(fact, Planned)]

    @cached_property
    def faults(self) -> list[Struck | Eased]:
        """What was put in, and taken out again."""
        return [fact for fact in self.rest if isinstance(fact, Struck | Eased)]


Complaint = tuple[float, str]  # when, and what is wrong
Check = Callable[[Case], Iterator[Complaint]]


def node_of(member: str) -> str:
    """The node of a member as it is written."""
    return member.partition("/")[0]
