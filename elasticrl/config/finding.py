"""What is wrong with a configuration, said so that one can repair it: where, which key, the rule, the values, the remedy.

As in:
    configs/cluster.yaml:14 membership.lease_ttl must exceed 2 x keepalive + store.retry (10s is not over 2 x 4s + 2s).
        Raise lease_ttl to 12s or lower keepalive to 3s.
"""

from collections.abc import Iterable
from typing import Literal

from elasticrl.base.value import dataclass
from elasticrl.base.words import plain

Source = Literal["default", "file", "environment", "command line"]
_ORDER: dict[Source, int] = {"file": 0, "environment": 1, "command line": 2, "default": 3}


@dataclass(frozen=True, slots=True, kw_only=True, order=False)
class Origin:
    """Where a value was written.

    Example: Origin(source="file", name="configs/cluster.yaml", line=14), written configs/cluster.yaml:14.
    """

    source: Source
    name: str = ""  # the file or the variable
    line: int | None = None  # in the file, from 1

    def __str__(self) -> str:
        if self.source == "file":
            return f"{self.name}:{self.line}" if self.line else self.name
        return f"environment {self.name}" if self.source == "environment" else self.source


DEFAULT = Origin(source="default")


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One rule that is broken. A warning is advice: the configuration is taken as it is.

    Example: Finding(where=Origin(...), key="membership.lease_ttl", rule="must exceed 2 x keepalive + store.retry",
        values="10s is not over 2 x 4s + 2s", remedy="Raise lease_ttl to 12s or lower keepalive to 3s.")
    """

    where: Origin
    key: str  # empty when it is about the file as a whole
    rule: str
    values: str
    remedy: str
    level: Literal["error", "warning"] = "error"

    def __str__(self) -> str:
        subject = f"{self.where} {self.key}".rstrip()
        word = "warning: " if self.level == "warning" else ""
        return plain(f"{subject} {word}{self.rule} ({self.values}).\n    {self.remedy}", keep="\n")

    def plain(self) -> dict[str, object]:
        """The same as JSON."""
        where = {"source": self.where.source, "name": self.where.name, "line": self.where.line}
        return {
            "level": self.level,
            "where": where,
            "key": self.key,
            "rule": self.rule,
            "values": self.values,
            "remedy": self.remedy,
        }


def in_order(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """As one reads the file: by line, then what came from elsewhere."""

    def place(finding: Finding) -> tuple[int, float, str, str, str]:
        where = finding.where
        line = float("inf") if where.line is None else where.line
        return _ORDER[where.source], line, where.name, finding.key, finding.rule

    return tuple(sorted(findings, key=place))


class ConfigError(Exception):
    """A configuration was refused; the message is all of its findings."""

    def __init__(self, findings: tuple[Finding, ...]) -> None:
        super().__init__("\n".join(map(str, findings)))
        self.findings = findings
