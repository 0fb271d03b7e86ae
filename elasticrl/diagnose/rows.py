"""A row of the tables of texts: what a line must hold, and what it is then a sign of.

The one idea: a row is a cheap substring, a regular expression and a sign. The substring lets a line skip the row in
nanoseconds (an expression of several alternatives may need several). The expression has only bounded repetitions, so that no
line can make it slow.
"""

import re
from dataclasses import field
from functools import cached_property

from elasticrl.base.value import dataclass
from elasticrl.contract.evidence import Kind, Sign


@dataclass(frozen=True)  # no slots: the compiled expression is kept
class Text:
    """One text. Named groups: rank, ranks, peer, node, code, seconds; the whole match is the detail if `detail` is ""."""

    needle: str  # must be in the line, else the expression is not tried
    kind: Kind
    sign: Sign
    pattern: str = ""  # "" means that the needle says it all
    detail: str = ""
    family: str = field(default="")  # of one family, only the first row that matches a line counts
    more: tuple[str, ...] = ()  # needles of the expression's other alternatives

    @cached_property
    def needles(self) -> tuple[str, ...]:
        """One of these is in each line that the expression is tried on."""
        return (self.needle, *self.more)

    @cached_property
    def expression(self) -> re.Pattern[str]:
        """Compiled when it is first needed: most runs never see most texts."""
        return re.compile(self.pattern or re.escape(self.needle))
