"""Who is kept out of plans though it is up, how many may be, and for how long."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from math import inf

from elasticrl.base.pauses import doubled
from elasticrl.contract.cause import Cause, Why
from elasticrl.contract.model import Member, Quarantine
from elasticrl.contract.partition import Pair
from elasticrl.core.lead.scene import Scene


def confinements(scene: Scene, reasons: Mapping[Member, Cause]) -> tuple[Quarantine, ...]:
    """Quarantines for these members, as long as enough are left and not too many are put away.

    Found by simulation: each was weighed by itself, so a partition put away nine nodes of twelve at one stroke.
    """
    room = max(0, _most(scene)[0] - len(scene.kept_out))
    fresh = _fresh(scene, reasons)
    written = [member for member in fresh if member.node in scene.kept_out]  # and not seen yet
    chosen = (*written, *[member for member in fresh if member not in written][:room])
    return tuple(Quarantine(member=member, cause=reasons[member], strikes=_strikes(scene, member)) for member in chosen)


def cut_off(
    scene: Scene, confined: Iterable[Quarantine], cuts: Mapping[Member, tuple[Pair, ...]]
) -> tuple[Quarantine, ...]:
    """These quarantines with the ways that were found cut. Where the caps spare a node that is up the ways are noted all the
    same: it is not kept out for a time, but gets no seat beside their other ends before a test of them has passed.
    """
    noted = {quarantine.member: quarantine for quarantine in confined}
    for member in _fresh(scene, cuts):
        before = (scene.view.quarantines or {}).get(member.node)
        quarantine = noted.get(member) or Quarantine(
            member=member,
            cause=Cause(why=Why.UNREACHED, who=(member,)),
            strikes=before.strikes if before else 0,
            held=False,
        )
        noted[member] = replace(quarantine, cuts=cuts[member], found=scene.view.generation)
    return tuple(noted.values())


def _strikes(scene: Scene, member: Member) -> int:
    """Which quarantine of its node this is. A life that was only silent, and is over, had died: that is not held against the
    next one. Found live, by bench/goodput.py: nodes that were killed again and again were kept out for minutes.
    """
    before = (scene.view.quarantines or {}).get(member.node)
    if before is None or (member != before.member and member.node in scene.conviction.guilty):
        return 1
    return before.strikes + 1


def capped(scene: Scene, reasons: Iterable[Member], confined: Iterable[Quarantine]) -> tuple[Cause, ...]:
    """Who is not kept out though there is reason to, and which cap keeps us from it."""
    put_out = {quarantine.member for quarantine in confined}
    who = tuple(member for member in _fresh(scene, reasons) if member not in put_out)
    most, cap = _most(scene)
    return (Cause(why=Why.CAPPED, who=who, of=most, setting=cap),) if who else ()


def _fresh(scene: Scene, members: Iterable[Member]) -> list[Member]:
    """Those lives that are up, and not kept out already."""
    return [m for m in members if m.node not in scene.held and (r := scene.records.get(m.node)) and r.member == m]


def _most(scene: Scene) -> tuple[int, str]:
    """How many nodes may be kept out at once, and which setting says so.

    The hour's quarantines are not counted here, as `policy` does for a node that is up and only judged to be unfit: who is out
    of reach, or fails again and again, would take its seat again at once, and break the next gang.
    """
    known = len(scene.records)
    share = max(1, int(scene.settings.health.quarantine_share * known))
    left = max(0, known - scene.settings.membership.min_nodes)
    return (share, "health.quarantine_share") if share <= left else (left, "membership.min_nodes")


def guard(scene: Scene) -> tuple[tuple[Quarantine, ...], float]:
    """Let those go who have served their time, and forgive those who have been well for as long again.

    Each further quarantine of a node that is not forgiven lasts twice as long. Found by a cut that never ended: a node was
    forgiven while all waited for it in vain, so that each time was its first.
    """
    wake_at = inf
    written = []
    served = [(scene.lead.custody.confined[node], replace(q, held=False), q) for node, q in sorted(scene.held.items())]
    forgiven = [
        (scene.lead.custody.well[m], replace(q, held=False, strikes=0, cuts=(), found=0), q)
        for m, q in sorted(scene.unforgiven.items())
        if m in scene.lead.custody.well and scene.proves_well(m)
    ]
    for since, after, quarantine in (*served, *forgiven):
        due = since + _term(scene, quarantine)
        if scene.now >= due:
            written.append(after)
        else:
            wake_at = min(wake_at, due)
    return tuple(written), wake_at


def _term(scene: Scene, quarantine: Quarantine) -> float:
    """How long a node is kept out, and must then be well to be forgiven."""
    health = scene.settings.health
    return doubled(health.quarantine_s, quarantine.strikes - 1, health.quarantine_max_s)
