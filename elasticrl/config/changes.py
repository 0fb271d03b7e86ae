"""What may change in a job's life, and when: the answer to SIGHUP, and to a resume under another file.

The one idea: most keys take a restart of the node's daemon and workers, so only the others are listed: those a running
daemon takes up at once, and those that would make another run of it.
"""

from typing import Literal, TypeVar

from elasticrl.base.redact import shown_of
from elasticrl.base.value import dataclass
from elasticrl.config.relations import RELATIONS
from elasticrl.config.section import Section, key_of
from elasticrl.config.source import flow
from elasticrl.config.tree import Tree, leaf, values

When = Literal["live", "restart", "never"]
_S = TypeVar("_S", bound=Section)

#: A running daemon takes these up on SIGHUP: it decides by them. A section stands for all of its keys. Agents and workers never
#: hear of a reload, so what they go by is not here: job.steps, a phase's budget, when a checkpoint is due, how long
#: they wait for each other (recovery.start and the rungs' own). `timeouts.confirm` is the leader's; an agent, which gives a
#: worker that is stopped no longer than that, keeps the old one.
LIVE = (
    "membership.min_nodes",
    "membership.max_nodes",
    "membership.spares",
    "membership.settle",
    "membership.fixed",
    "membership.grow",
    "membership.grow_every",
    "membership.report",
    "membership.rejoin",
    "recovery.probe",
    "recovery.drain",
    "recovery.steady",
    "recovery.no_progress_limit",
    "timeouts.confirm",
    "timeouts.dump",
    "health",
    "policy",
    "telemetry.level",
)

#: These decide which samples are used and what state there is. A checkpoint made under other values is refused where they make
#: another job, lanes, batch, data, parts or frozen weights: it knows these, and not the keys (`checkpoint.allow` names what
#: may differ).
REFUSED = (
    "job.name",
    "job.seed",
    "lanes.count",
    "ppo.algorithm",
    "ppo.batch",
    "ppo.gen_batch",
    "ppo.group",
    "model.path",
    "model.ref_path",
    "model.dtype",
    "model.value_head",
    "model.tp",
    "model.cp",
    "model.lora.rank",
    "model.lora.targets",
    "reward.model",
    "data.path",
    "data.format",
    "data.split",
    "data.chat_template",
    "data.max_prompt",
    "data.shuffle",
    "data.curriculum",
)

#: A checkpoint made under other values is gone on from, and the log says that something is other: bits differ from there on.
SAID = (
    "lanes.threads",
    "ppo.mini_batch",
    "ppo.micro_tokens",
    "ppo.logits_mib",
    "ppo.epochs",
    "rollout.max_tokens",
)

NEVER = (*REFUSED, *SAID)


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A key whose value differs, as one would write both.

    Example: Change(key="membership.min_nodes", old="2", new="3", when="live")
    """

    key: str
    old: str
    new: str
    when: When


def when(key: str) -> When:
    """How a change of this key takes effect."""
    for keys, answer in ((LIVE, "live"), (NEVER, "never")):
        if any(key == one or key.startswith(f"{one}.") for one in keys):
            return "live" if answer == "live" else "never"
    return "restart"


def changes(old: Tree, new: Tree) -> tuple[Change, ...]:
    """All keys that differ between two trees, in the order of the schema."""
    before, after = values(old), values(new)
    return tuple(
        Change(key=key, old=_shown(key, before.get(key)), new=_shown(key, after.get(key)), when=when(key))
        for key in dict.fromkeys((*before, *after))
        if before.get(key) != after.get(key)
    )


def _shown(key: str, value: object) -> str:
    return flow(shown_of(leaf(key).plain(value)))


def taken_up(old: Tree, new: Tree) -> Tree:
    """What a running daemon goes on under when it is told of a new tree: the old one with the live keys of the new."""
    return _with_live(old, new, "")


def clash(mixed: Tree) -> str:
    """Which rules a tree breaks that was put together of two; "" if none."""
    broken = [one for one in RELATIONS if one.level == "error" and one.broken(mixed)]
    return "; ".join(f"{one.keys[0]} {one.rule} ({one.says(mixed)[0]})" for one in broken)


def _with_live(old: _S, new: _S, prefix: str) -> _S:
    update: dict[str, object] = {}
    for name in type(old).model_fields:
        key = f"{prefix}.{key_of(name)}".lstrip(".")
        before, after = getattr(old, name), getattr(new, name)
        if isinstance(before, Section):
            update[name] = _with_live(before, after, key)
        elif when(key) == "live":
            update[name] = after
    return old.model_copy(update=update)
