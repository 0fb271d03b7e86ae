"""Whether all ranks of a Lightning job came, by the lines with which they report: each names its rank and how many there are.

The one idea: such a line is no fault, but a roll that is never called complete, or in which a rank comes twice, is one.
"""

import re
from typing import Final

from elasticrl.contract.evidence import Evidence, Kind, Sign

_REPORTS: Final = re.compile(r"GLOBAL_RANK: (\d{1,6}), MEMBER: (\d{1,6})/(\d{1,6})")
_COMPLETE: Final = re.compile(r"[Aa]ll \S{1,20} ?(?:\S{1,20} )?processes registered")


class Roll:
    """The ranks that have reported in one stream."""

    def __init__(self) -> None:
        self._seen: dict[int, int] = {}
        self._of = 0
        self._complete = False

    def read(self, text: str) -> None:
        """A line."""
        if "MEMBER: " in text and (match := _REPORTS.search(text)):
            rank = int(match[1])
            if int(match[3]) != self._of:  # another start, of another size
                self._seen, self._of, self._complete = {}, int(match[3]), False
            self._seen[rank] = self._seen.get(rank, 0) + 1
        elif "processes registered" in text and _COMPLETE.search(text):
            self._complete = True

    def fact(self) -> Evidence | None:
        """What is wrong with the roll at the end."""
        if not self._seen or self._complete or len(self._seen) >= self._of:
            return None
        twice = sorted(rank for rank, times in self._seen.items() if times > 1)
        if twice:
            detail = f"rank {twice[0]} reported {self._seen[twice[0]]} times: nodes start with the same ranks"
            return Evidence(kind=Kind.RENDEZVOUS, sign=Sign.SETTING, detail=detail)
        detail = f"{len(self._seen)} of {self._of} ranks reported, and not all were registered"
        return Evidence(kind=Kind.RENDEZVOUS, sign=Sign.UNSUITED, detail=detail)
