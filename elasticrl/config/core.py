"""From the tree to what the core decides by: the same names, but for a handful that the tree files elsewhere."""

from dataclasses import fields
from typing import TypeVar

from elasticrl.config.section import Section
from elasticrl.config.tree import Tree
from elasticrl.core import settings

_T = TypeVar("_T", settings.Membership, settings.Recovery, settings.Health)


def to_core(tree: Tree) -> settings.Settings:
    """The core's settings."""
    times = tree.timeouts
    return settings.Settings(
        job=tree.job.name,
        lanes=tree.lanes.count,
        steps=tree.job.steps,
        copies=tree.vault.copies,
        retry_s=tree.store.retry_s,
        exact=tree.lanes.exact,
        membership=_same(settings.Membership, tree.membership),
        recovery=_same(settings.Recovery, tree.recovery),
        health=_same(settings.Health, tree.health),
        timeouts=settings.Timeouts(
            phase_s={name: cap_s for name, cap_s in times.phase.caps().items() if cap_s is not None},
            default_phase_s=times.default_phase_s,
            floor_s=times.floor_s,
            slack=times.slack,
            confirm_s=times.confirm_s,
            dump_s=times.dump_s,
        ),
        policy=dict(tree.policy),
        fallback=tree.comm.fallback,
        fallback_limit=tree.comm.fallback_limit,
    )


def _same(kind: type[_T], section: Section) -> _T:
    return kind(**{field.name: getattr(section, field.name) for field in fields(kind)})
