"""How a model that is trained is spread over a gang: the strategy of its kind, made anew for each generation.

The one idea: a model of kind `replicated` is the script's own object, which goes from gang to gang. Each other kind binds a
model to its gang, so the script gives a function, which builds the same model for each.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from elasticrl.runtime.misuse import Misuse
from elasticrl.runtime.outline import check_memory, give_memory
from elasticrl.runtime.replicated import Replicated, Rows
from elasticrl.runtime.rng import Streams
from elasticrl.runtime.team import ACROSS, AXIS
from elasticrl.runtime.tokens import check_known
from elasticrl.runtime.trained import check_model, check_rules, offloaded, strategy_of
from elasticrl.runtime.zero import CLOSE, Zero

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from elasticrl.config import Tree
    from elasticrl.runtime.agree import Agreed
    from elasticrl.runtime.context import Context
    from elasticrl.runtime.generation import Generation
    from elasticrl.runtime.lanes import Deal
    from elasticrl.runtime.layout import Piece
    from elasticrl.runtime.shard import Shard
    from elasticrl.runtime.strategy import Strategy
    from elasticrl.runtime.team import Team
    from elasticrl.runtime.tokens import Tokens
    from elasticrl.runtime.trained import Registered, Trained


def spread(generation: Generation, given: Registered, agreed: Agreed) -> set[str]:
    """New strategies around all models. Returns the roles whose shard is in this process's memory already."""
    worker, tree = generation.worker, generation.worker.context.tree
    leaves = _leaves(generation)
    count = given.counts.get(agreed.version) if agreed.remembered else None
    given.counts = {}  # until all is restored: a shard that was only begun must not pass for one that is whole
    here: set[str] = set()
    # No name may stay for a strategy here: it would hold a sharded model while the next one is built.
    olds = {name: role.strategy.rows for name, role in given.roles.items() if isinstance(role.strategy, Replicated)}
    olds |= {name: role.rows for name, role in given.roles.items() if role.rows is not None}
    for role in given.roles.values():
        role.rows = None
    held = given.let_go(count)
    # With something allowed to be amiss in a checkpoint, a role of its own may not be in it.
    filled = agreed.remembered or (agreed.checkpoint is not None and not tree.checkpoint.allow)
    for name, role in given.roles.items():
        shard = held.pop(name, None)
        anew = strategy_of(tree, name) == "fsdp" or generation.place.team > 1
        generation.fills = fills = filled and anew
        if shard is not None and count is not None:
            shard.go_to(count)
        rows = olds.get(name)
        if rows is not None and rows.version != count:
            rows = replace(rows, version=None)  # its parameters are those of another version
        whole = agreed.remembered and not anew  # a vault's state has all of each role
        role.strategy = strategy_for(
            name, role, worker.context, generation, deal=leaves, shard=shard, fills=fills or whole, rows=rows
        )
        generation.fills = False
        if isinstance(role.strategy, Replicated):
            role.strategy.touch()
        if whole and isinstance(role.strategy, Replicated) and role.strategy.shows is None:
            given.hollow = True  # until all is restored
        if count is None or role.strategy.shows != count:
            role.strategy.shows = None  # its parameters are those of another version
        if agreed.remembered:
            role.lacks = _from_memory(role.strategy, shard, count)
        if shard is not None and role.strategy.shard is shard:
            here.add(name)
    if any(isinstance(role.strategy, Zero) for role in given.roles.values()):
        worker.say_once(CLOSE)
    return here


def _leaves(generation: Generation) -> Deal:
    """Which rank, or which rank of each index in its team, adds up what."""
    tokens = generation.tokens
    return generation.deal.leaves(generation.parts_per_lane).shared(tokens.size if tokens else 1)


def _from_memory(strategy: Strategy, old: Shard | None, count: int | None) -> list[tuple[int, Piece]] | None:
    """Fills a new shard with what this process had in its `old` one, and others in theirs. Returns what it lacks then."""
    shard, lacks = strategy.shard, None
    if strategy.team is not None:  # its parts have other names with another index in the team
        return None
    if old is not None and count is not None and old is not shard:
        lacks = shard.take_over(old, count)
    if isinstance(strategy, Replicated):
        lacks = strategy.hand_over(old, count)
    if old is not shard:
        shard.clear()
    if strategy.shows is not None and lacks is not None:  # the parameters' row is filled from the model
        lacks = [(row, piece) for row, piece in lacks if row]
    return lacks


def ahead(generation: Generation, given: Registered) -> None:
    """Memory for the models of a process that joins, before it meets the gang, which would have to wait for that."""
    context, leaves = generation.worker.context, _leaves(generation)
    if context.device != "cpu":  # elsewhere memory takes no time
        return
    for name, role in given.roles.items():
        if strategy_of(context.tree, name) == "replicated" and isinstance(role.given, torch.nn.Module):
            role.rows = Replicated(
                role.given,
                role.rule_of,
                deal=leaves,
                rank=generation.place.rank,
                bucket_bytes=context.tree.lanes.bucket_bytes,
            ).ahead()


def strategy_for(
    name: str, role: Trained, context: Context, generation: Generation, *, deal: Deal, shard: Shard | None, fills: bool,
    rows: Rows | None = None,
) -> Strategy:  # fmt: skip
    """This role's strategy for the gang as it is now; Misuse if what was registered does not suit its kind. `shard` is that of
    an earlier generation, whose versions are kept if it is cut as this one's will be. `fills`: it is filled with what was kept.
    `rows` are those of an earlier generation.
    """
    tree: Tree = context.tree
    kind, given, host = strategy_of(tree, name), role.given, offloaded(tree, name)
    gang, team, device, bucket_bytes = generation.gang, generation.team, context.device, tree.lanes.bucket_bytes
    group, tokens = gang.group, generation.tokens

    def built(mesh: DeviceMesh) -> torch.nn.Module:
        assert not isinstance(given, torch.nn.Module)
        with Streams(seed=tree.job.seed).ambient("init"):  # built anew, it begins with the same numbers each time
            return given(mesh)

    def build(mesh: DeviceMesh) -> torch.nn.Module:
        model = built(mesh)
        if fills and any(param.is_meta and not param.requires_grad for param in model.parameters()):
            # It left out what nobody keeps, since run.fills told it so.
            generation.fills = False
            model = built(mesh)
        if kind == "replicated":
            check_model(name, model)
        check_rules(name, model, role.rule_of)
        if tokens is not None:
            check_known(model, name, tokens)
        return model

    if generation.place.team > 1:
        _check_shared(name, role, tree)
        rank, group = (gang.rank, group) if team is None else (team.number, team.across)
        if kind == "fsdp":
            from elasticrl.runtime.fsdp import Fsdp

            return Fsdp(
                build, role.rule_of, deal=deal, rank=rank, group=group, device=device, shard=shard, offload=host, fills=fills,
                team=team, tokens=tokens,
            )  # fmt: skip
        model = build(team_mesh(team, tokens, device))
        check_memory(model, fills=fills)
        give_memory(model, device)
        return Replicated(
            model, role.rule_of, deal=deal, rank=rank, group=group if deal.world > 1 else None,
            bucket_bytes=bucket_bytes, shard=shard, offload=host, team=team, tokens=tokens,
        )  # fmt: skip
    if isinstance(given, torch.nn.Module):
        if kind != "replicated":
            raise Misuse(
                f"The strategy of {name} is {kind}, which binds a model to one gang: register a function of the DeviceMesh "
                "that returns the model (for fsdp with fully_shard applied), and use run.model."
            )
        return Replicated(
            given,
            role.rule_of,
            deal=deal,
            rank=gang.rank,
            group=group if gang.world > 1 else None,  # gloo would copy what one rank sends itself
            bucket_bytes=bucket_bytes,
            shard=shard,
            offload=host,
            rows=rows,
            fills=fills,
        )

    if kind == "replicated":
        raise Misuse(
            f"The strategy of {name} is replicated: register the model itself, not a function that builds it. For one that "
            "fully_shard cuts up set model.strategy: fsdp."
        )

    if kind == "deepspeed":
        return Zero(
            build, role.rule_of, deal=deal, rank=gang.rank, group=group, stage=tree.model.zero_stage, offload=host,
            device=device, bucket_bytes=bucket_bytes, shard=shard,
        )  # fmt: skip
    from elasticrl.runtime.fsdp import Fsdp  # half a second of imports, which only this strategy needs

    return Fsdp(
        build, role.rule_of, deal=deal, rank=gang.rank, group=group, device=device, shard=shard, offload=host,
        fills=fills,
    )  # fmt: skip


def _check_shared(name: str, role: Trained, tree: Tree) -> None:
    """A team shares it."""
    said = f"model.cp is {tree.model.cp}" if tree.model.tp == 1 else f"model.tp is {tree.model.tp}"
    if (kind := strategy_of(tree, name)) == "deepspeed":
        raise Misuse(f"The strategy of {name} is {kind}, which knows no teams ({said}): set fsdp.")
    if isinstance(role.given, torch.nn.Module):
        raise Misuse(
            f"{said}, so a team shares the model of {name}: register a function of the DeviceMesh that returns the model with "
            f'share(model, mesh), or parallelize_module over mesh["{AXIS}"], applied (and for fsdp then fully_shard over '
            f'mesh["{ACROSS}"]), and use run.model.'
        )


def team_mesh(team: Team | None, tokens: Tokens | None, device: str) -> DeviceMesh:
    """What a builder is given where parameters are not sharded."""
    if team is None:
        assert tokens is not None
        return tokens.mesh(device)
    mesh = team.mesh(device)
    return tokens.on(mesh) if tokens else mesh
