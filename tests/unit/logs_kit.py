"""Evidence in a text, as in a log of it."""

from elasticrl.contract.evidence import Evidence
from elasticrl.diagnose.logs import Parser


def parse(text: str) -> tuple[Evidence, ...]:
    return tuple(Parser().read(text.encode()))
