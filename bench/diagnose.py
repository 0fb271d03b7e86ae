"""How often `elasticrl diagnose --log` is right about logs that its rules were not written for.

    python bench/diagnose.py [--part work|held] [--wrong] [--json]
    python bench/diagnose.py --torch    of which torch the jobs of both parts were

tests/data/corpus has excerpts of real logs, each with the cause that its public thread proves (`class`), and the other classes
that an expert could defend from these lines alone (`also`). Rules are written by the part `work`. The part `held` judges them:
nobody reads it, so this prints of it what was counted, and never a log.

right       the verdict is the proven class, or one that can be defended
unknown     the verdict is `unknown`, and a cause could be known
wrong       another class, with confidence `low`
sure        another class, with more confidence than that: confidently wrong
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT)]

from elasticrl.contract.verdict import Confidence, Fault, Known, Verdict  # noqa: E402
from elasticrl.core.judge.judge import judge  # noqa: E402
from elasticrl.diagnose.logs import Parser  # noqa: E402

CORPUS = ROOT / "tests" / "data" / "corpus"
PARTS = ("work", "held")
KEYS = ("class", "also", "source", "versions", "family", "proof")
OUTCOMES = ("right", "unknown", "wrong", "sure")


@dataclass(frozen=True, slots=True, kw_only=True)
class Excerpt:
    """One file of the corpus."""

    name: str
    proven: Fault
    also: frozenset[Fault]
    source: str
    versions: str
    family: str
    proof: str
    log: str

    @property
    def right(self) -> frozenset[Fault]:
        """The classes that count as right."""
        return self.also | {self.proven}


@dataclass(frozen=True, slots=True)
class Judged:
    """An excerpt, and what was made of it."""

    excerpt: Excerpt
    verdict: Verdict

    @property
    def outcome(self) -> str:
        """One of OUTCOMES."""
        if self.verdict.fault in self.excerpt.right:
            return "right"
        if self.verdict.fault is Fault.UNKNOWN:
            return "unknown"
        return "wrong" if self.verdict.confidence is Confidence.LOW else "sure"


def excerpt(path: Path) -> Excerpt:
    """Of a file: lines of `# key: value`, a line of three dashes, the log."""
    head, _, log = path.read_text(encoding="utf-8").partition("\n---\n")
    rows = (line[2:].partition(":") for line in head.splitlines())
    said = {key: value.strip() for key, _, value in rows}
    return Excerpt(
        name=path.stem, proven=Fault(said["class"]), also=frozenset(map(Fault, said["also"].replace(",", " ").split())),
        source=said["source"], versions=said["versions"], family=said["family"], proof=said["proof"], log=log,
    )  # fmt: skip


def corpus(part: str) -> Iterator[Excerpt]:
    """All of a part, by name."""
    return map(excerpt, sorted((CORPUS / part).glob("*.txt")))


def judged(one: Excerpt) -> Judged:
    """As `elasticrl diagnose --log` judges it."""
    parser = Parser(source=one.name)
    facts = parser.read(one.log.encode())
    return Judged(one, judge(facts, Known(heard=frozenset(parser.ranks))))


def torches() -> Mapping[str, int]:
    """How many excerpts of both parts name each torch (major.minor), the oldest first."""
    named = (re.search(r"\btorch (\d+)\.(\d+)", one.versions) for part in PARTS for one in corpus(part))
    counts = Counter((int(found[1]), int(found[2])) for found in named if found)
    return {f"{major}.{minor}": counts[major, minor] for major, minor in sorted(counts)}


def share(found: Sequence[Judged], outcome: str) -> float:
    """Of all excerpts."""
    return sum(each.outcome == outcome for each in found) / max(len(found), 1)


def knowable(found: Sequence[Judged]) -> list[Judged]:
    """Those whose cause can be known."""
    return [each for each in found if each.excerpt.proven is not Fault.UNKNOWN]


def counted(found: Sequence[Judged]) -> Mapping[str, object]:
    """For JSON."""
    families: dict[str, Counter[str]] = defaultdict(Counter)
    table: dict[str, Counter[str]] = defaultdict(Counter)
    for each in found:
        families[each.excerpt.family][each.outcome] += 1
        table[str(each.excerpt.proven)][str(each.verdict.fault)] += 1
    return {
        "excerpts": len(found),
        "threads": len({each.excerpt.source for each in found}),
        "knowable": {outcome: sum(each.outcome == outcome for each in knowable(found)) for outcome in OUTCOMES},
        "outcomes": {outcome: sum(each.outcome == outcome for each in found) for outcome in OUTCOMES},
        "families": {family: dict(row) for family, row in sorted(families.items())},
        "table": {proven: dict(row) for proven, row in sorted(table.items())},
    }


def confusion(found: Sequence[Judged]) -> str:
    """As Markdown: a row for each proven class. A class that can be defended counts as the proven one."""
    lines = [
        "| proven | excerpts | right | unknown | wrong, low | wrong, sure | what was said instead |",
        "|---|---|---|---|---|---|---|",
    ]
    for fault in Fault:
        its = [each for each in found if each.excerpt.proven is fault]
        if not its:
            continue
        counts = Counter(each.outcome for each in its)
        instead = Counter(str(each.verdict.fault) for each in its if each.outcome in {"wrong", "sure"})
        said = ", ".join(f"`{name}` {count}" for name, count in instead.most_common())
        lines.append(
            f"| `{fault}` | {len(its)} | " + " | ".join(str(counts[outcome]) for outcome in OUTCOMES) + f" | {said} |"
        )
    counts = Counter(each.outcome for each in found)
    lines.append(f"| all | {len(found)} | " + " | ".join(str(counts[outcome]) for outcome in OUTCOMES) + " | |")
    return "\n".join(lines)


def main() -> None:
    """Print it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=("work", "held"), default="work")
    parser.add_argument(
        "--wrong", action="store_true", help="also each excerpt of the part `work` that is not judged right"
    )
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--torch", action="store_true", help="only count the excerpts of each torch")
    chosen = parser.parse_args()
    if chosen.torch:
        print(", ".join(f"{torch}: {count}" for torch, count in torches().items()))
        return
    found = [judged(one) for one in corpus(chosen.part)]
    if chosen.json:
        print(json.dumps(counted(found), indent=2))
        return
    if chosen.wrong and chosen.part == "work":
        for each in found:
            if each.outcome != "right":
                right = ", ".join(sorted(each.excerpt.right))
                print(
                    f"{each.outcome:8}{each.excerpt.name}: {right}; said {each.verdict.fault} ({each.verdict.confidence})"
                )
                print(f"        {each.verdict.cause}")
    print(confusion(found))
    known = knowable(found)
    print(f"\nright {share(found, 'right'):.1%}, confidently wrong {share(found, 'sure'):.1%}")
    print(f"where a cause can be known: right {share(known, 'right'):.1%} of {len(known)}")
    for family, row in counted(found)["families"].items():  # type: ignore[attr-defined]
        print(f"  {family:12}" + ", ".join(f"{row[outcome]} {outcome}" for outcome in OUTCOMES if outcome in row))


if __name__ == "__main__":
    main()
