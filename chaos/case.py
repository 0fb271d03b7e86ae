"""What a check is given, a history and its scenario, and what it gives: complaints, each of which is a violation."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from chaos.history import History, Planned
from chaos.scenario import Scenario


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """A guarantee that did not hold."""

    check: str
    at: float
    what: str

    def __str__(self) -> str:
        return f"{self.at:.3f} s  {self.check}: {self.what}"


@dataclass(frozen=True, slots=True)
class Case:
    """A history, and the scenario that it is judged by."""

    scenario: Scenario
    history: History

    @property
    def plans(self) -> list[Planned]:
        """Every plan that was written."""
        return [fact for fact in self.history if isinstance(fact, Planned)]


Complaint = tuple[float, str]  # when, and what is wrong
Check = Callable[[Case], Iterator[Complaint]]


def node_of(member: str) -> str:
    """The node of a member as it is written."""
    return member.partition("/")[0]
