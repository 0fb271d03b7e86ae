"""Who is kept out of plans though it is up, how many may be, and for how long."""

from collections.abc import Mapping
from dataclasses import replace
from math import inf

from elasticrl.core.model import Member, Quarantine
from elasticrl.core.scene import Scene


def confinements(scene: Scene, reasons: Mapping[Member, str]) -> tuple[Quarantine, ...]:
    """Quarantines for these members, as long as enough are left and not too many are put away.

    Found by seed 243: each was weighed by itself, so a partition put away nine nodes of twelve at one stroke.
    """
    health, known, held = scene.settings.health, len(scene.records), len(scene.held)
    most = min(known - scene.settings.membership.min_nodes, max(1, int(health.quarantine_share * known)))
    room = max(0, most - held)
    fresh = [member for member in reasons if member.node not in scene.held and member.node in scene.records]
    before = scene.view.quarantines or {}
    return tuple(
        Quarantine(
            member=member,
            reason=reasons[member],
            strikes=before[member.node].strikes + 1 if member.node in before else 1,
        )
        for member in fresh[:room]
    )


def guard(scene: Scene) -> tuple[tuple[Quarantine, ...], float]:
    """Let those go who have served their time; each further quarantine of a node lasts twice as long."""
    health = scene.settings.health
    wake_at = inf
    released = []
    for node, quarantine in sorted(scene.held.items()):
        served_at = scene.lead.confined[node] + min(
            health.quarantine_max_s, health.quarantine_s * 2 ** (quarantine.strikes - 1)
        )
        if scene.now >= served_at:
            released.append(replace(quarantine, held=False))
        else:
            wake_at = min(wake_at, served_at)
    return tuple(released), wake_at
