"""From the tree to what the core decides by: the same names, but for a handful that the tree files elsewhere."""

from dataclasses import fields, replace
from typing import TypeVar

from elasticrl.config.section import Section
from elasticrl.config.tree import Tree
from elasticrl.contract import settings
from elasticrl.contract.level import Level, means_of

_T = TypeVar("_T", settings.Membership, settings.Recovery, settings.Health)


def to_core(tree: Tree) -> settings.Settings:
    """The core's settings."""
    times = tree.timeouts
    scripted = not means_of(tree.job.level).joins
    membership = _same(settings.Membership, tree.membership)
    if tree.membership.fixed:
        membership = replace(membership, min_nodes=membership.max_nodes)
    if scripted:  # lanes, and what they decide, are the runtime's
        membership = replace(membership, grow="always")
    return settings.Settings(
        job=tree.job.name,
        level=Level(tree.job.level),
        lanes=max_world(tree) if scripted else tree.lanes.count,
        team=1 if scripted else tree.model.team,
        steps=tree.job.steps,
        copies=tree.vault.copies,
        retry_s=tree.store.retry_s,
        exact="off" if scripted else tree.lanes.exact,
        membership=membership,
        recovery=_same(settings.Recovery, tree.recovery),
        health=_same(settings.Health, tree.health),
        timeouts=settings.Timeouts(
            phase_s={name: cap_s for name, cap_s in times.phase.caps().items() if cap_s is not None},
            default_phase_s=times.default_phase_s,
            floor_s=times.floor_s,
            slack=times.slack,
            quiet_s=times.quiet_s,
            progress=times.progress,
            confirm_s=times.confirm_s,
            dump_s=times.dump_s,
        ),
        policy=dict(tree.policy),
        fallback=tree.comm.fallback,
        fallback_limit=tree.comm.fallback_limit,
    )


def max_world(tree: Tree) -> int:
    """The most workers that may ever train together."""
    return tree.membership.max_nodes * tree.node.workers


def _same(kind: type[_T], section: Section) -> _T:
    return kind(**{field.name: getattr(section, field.name) for field in fields(kind)})
