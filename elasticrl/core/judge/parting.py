"""Where the ranks' flight recorders part: the first number at which they entered different collectives."""

from collections.abc import Iterable, Mapping

from elasticrl.base.value import dataclass
from elasticrl.contract.evidence import Call, Evidence, Kind, Sign

LESS = "less than that"  # what a rank brought that gloo has ended for it


@dataclass(frozen=True, slots=True, kw_only=True)
class Parted:
    """Where recorders differ.

    Example: Parted(group="default_pg", seq=41, sides=(("all_reduce 64 Float", (0, 2)), ("broadcast 7 Float", (1,))), odd=(1,))
    """

    group: str
    seq: int
    sides: tuple[tuple[str, tuple[int, ...]], ...]
    odd: tuple[int, ...]  # the fewer, else who brought what nobody had before; all of them where that tells nothing


def part(evidence: Iterable[Evidence]) -> Parted | None:
    """The first number at which ranks of one group entered different collectives.

    A rank that gloo has ended for bringing less than was sent to it has no recorder any more: it was with those that brought
    least, and alone if all others brought the same.
    """
    evidence = tuple(evidence)
    short = {f.rank for f in evidence if f.kind is Kind.GLOO_ERROR and f.sign is Sign.MISMATCH and f.rank is not None}
    rows: dict[tuple[int, str], dict[int, dict[int, Call]]] = {}
    for fact in evidence:
        if fact.kind is Kind.RECORDER and fact.calls and fact.group and fact.rank is not None:
            row = rows.setdefault((fact.generation or 0, fact.group), {}).setdefault(fact.rank, {})
            row.update({call.seq: call for call in fact.calls})
    for (_, group), ranks in sorted(rows.items()):
        last = max(max(row) for row in ranks.values())
        for seq in sorted({seq for row in ranks.values() for seq in row}):
            here = {rank: row[seq] for rank, row in sorted(ranks.items()) if seq in row}
            sides: dict[str, list[int]] = {}
            for rank, call in here.items():
                sides.setdefault(call.what, []).append(rank)
            if lost := sorted(short - set(ranks)):
                if len(sides) > 1:
                    least = min(here.values(), key=lambda call: (call.numel or 0, call.what)).what
                    sides[least] = sorted([*sides[least], *lost])
                elif seq == last:
                    sides[LESS] = lost
            if len(sides) > 1:
                most = max(map(len, sides.values()))
                odd = sorted(r for members in sides.values() if len(members) < most for r in members)
                odd = odd or _unheard_of(
                    sides, (call.what for row in ranks.values() for n, call in row.items() if n < seq)
                )
                odd = odd or sorted(r for members in sides.values() for r in members)
                told = tuple((what, tuple(members)) for what, members in sides.items())
                return Parted(group=group, seq=seq, sides=told, odd=tuple(odd))
    return None


def _unheard_of(sides: Mapping[str, list[int]], before: Iterable[str]) -> list[int]:
    """Of sides of equal strength (a third may not have come yet), those who brought what nobody has ever brought before.

    Who brought less than the others and is dead has left no word of what it was: it is odd if theirs is as ever.
    """
    known = frozenset(before)
    usual = [what for what in sides if what in known]
    strange = [what for what in sides if what not in known and what != LESS]
    odd = [what for what in sides if what not in usual] if usual else strange if known and LESS in sides else []
    return sorted(rank for what in odd for rank in sides[what])
