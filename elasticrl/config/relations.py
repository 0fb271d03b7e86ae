"""The rules that hold between keys: one row each. To add a rule, add a row, and a case to tests/unit/test_config_relations.py.

A row's first key is its subject. `broken` decides; `values` says by which numbers; `remedy` names a value that mends it.

Long because it is one table.
"""

import re
from collections.abc import Callable
from itertools import combinations
from math import ceil, gcd, isfinite, lcm
from os import fsencode
from socket import gethostname
from typing import Any, Literal
from urllib.parse import urlsplit

from elasticrl.base.address import CONTROL, SOCKET_BYTES, loops
from elasticrl.base.expression import expected
from elasticrl.base.value import dataclass
from elasticrl.config.ports import PORTS, Listener
from elasticrl.config.section import FUNCTION, URL, leaves
from elasticrl.config.tree import Tree
from elasticrl.config.units import format_duration
from elasticrl.contract.level import means_of

OUR_TRAINER = "elasticrl.ppo"
GIVEN = ("dpo", "kto", "sft")  # algorithms whose answers are in the data
MIXED = 1000  # the sum of a stage's weights in a curriculum, at most
GROUPED = ("grpo", "rloo", "opo", "reinforce_plus_plus_baseline")  # that compare the samples of one prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Relation:
    """A rule between keys, when it is broken, and what mends it.

    Example: see the first of RELATIONS.
    """

    keys: tuple[str, ...]  # all that `broken` reads, the subject first
    rule: str  # goes on after the subject: "must ..."
    broken: Callable[[Tree], bool]
    values: Callable[[Tree], str] | str
    remedy: Callable[[Tree], str] | str
    level: Literal["error", "warning"] = "error"

    def says(self, tree: Tree) -> tuple[str, str]:
        """The values that break it and the remedy, for a tree that does."""
        values = self.values if isinstance(self.values, str) else self.values(tree)
        return values, self.remedy if isinstance(self.remedy, str) else self.remedy(tree)


def _s(seconds: float) -> str:
    return format_duration(seconds)


def _over(seconds: float) -> str:
    """A plain duration with some room above this one."""
    return _s(_two_digits(seconds * 1.2))


def _under(seconds: float) -> str:
    """A plain duration with some room below this one."""
    return _s(_two_digits(seconds * 0.75))


def _two_digits(seconds: float) -> float:
    return float(f"{seconds:.2g}")


def _ttl(t: Tree) -> str:
    return f"{ceil(1.2 * _lease_needs(t))}s"


def _lease_needs(t: Tree) -> float:
    return 2 * t.membership.keepalive_s + t.store.retry_s


def _caps(t: Tree) -> dict[str, float]:
    """The cap of each phase."""
    default = t.timeouts.default_phase_s
    return {name: default if cap is None else cap for name, cap in t.timeouts.phase.caps().items()}


def _longest(t: Tree) -> tuple[str, float]:
    caps = _caps(t)
    name = max(caps, key=caps.__getitem__)
    return name, caps[name]


SELDOM_S = 5.0  # between looks at GPUs, at least


def _stall_s(t: Tree) -> float:
    """From a phase's last progress until its gang may be broken up."""
    return _longest(t)[1] + t.timeouts.confirm_s + t.timeouts.dump_s


_CAPS = (*(key for key in leaves(Tree) if key.startswith("timeouts.phase.")), "timeouts.default_phase")


def _world(t: Tree) -> int:
    """The most workers that may ever train together."""
    return t.membership.max_nodes * t.node.workers


def _unreadable(t: Tree) -> str:
    """Why no log can be read by the operator's expression; "" if it can."""
    try:
        expected(t.agent.progress or "(n)")
    except ValueError as error:
        return str(error)
    return ""


_NO_TEAMS = (
    "model.strategy", "rollout.staleness",
    "placement.actor.strategy", "placement.actor.offload", "placement.critic.strategy", "placement.critic.offload",
    "placement.ref.strategy", "placement.ref.offload", "placement.reward.strategy",
)  # fmt: skip
PART = r"^[A-Za-z]\w{0,31}$"  # a part of a reward


def _beyond_teams(t: Tree) -> list[str]:
    """What is set that teams of the trainer do not know: a model's layers are cut by one plan alone, and of weights that an
    engine's period began with nobody keeps a member's part.
    """
    off = {None, "none", "replicated"}
    trained = {"model.strategy", "placement.actor.strategy", "placement.critic.strategy"}
    found: list[str] = []
    for key in _NO_TEAMS:
        value: Any = t
        for word in key.split("."):
            value = getattr(value, word)
        if key in trained and value == "fsdp":
            continue
        if key == "rollout.staleness" and (value < 2 or t.rollout.engine == "torch"):
            continue
        if value not in off:
            found.append(f"{key}: {value}")
    return found


def _beyond_sharing(t: Tree) -> list[str]:
    """What is set that does not go with shared tokens: kernels that are told of positions, and a head that reads all that a
    model has collected from its layers.
    """
    return [
        *([f"model.attention: {t.model.attention}"] if t.model.attention == "flash_attention_2" else []),
        *([f"model.value_head: {t.model.value_head}"] if t.model.value_head == "tied" else []),
    ]


def _beyond_evaluation(t: Tree) -> list[str]:
    """What is set that evaluations do not know."""
    return [
        *([f"algorithm: {t.ppo.algorithm}"] if not _generates(t) else []),
        *(["value_head: tied under fsdp"] if _tied_apart(t) and not t.rollout.evaluates else []),
    ]


def _tied_apart(t: Tree) -> bool:
    """The value head is on the actor, whose layers are sharded: torch would generate past their gathering."""
    return t.model.value_head == "tied" and (t.placement.actor.strategy or t.model.strategy) == "fsdp"


def _teams(t: Tree) -> int:
    """The most that lanes may ever be dealt to."""
    return _world(t) // t.model.team


def _of_team(t: Tree) -> str:
    """How large one is, after tp's name."""
    return f"it is {t.model.tp}" if t.model.cp == 1 else f"it is {t.model.tp}, and model.cp is {t.model.cp}"


def _no_team(t: Tree) -> str:
    """What leads to none."""
    return " and ".join(f"{name}: 1" for name, size in (("tp", t.model.tp), ("cp", t.model.cp)) if size > 1)


def _ours(t: Tree) -> bool:
    """The trainer that comes with elasticrl runs, so that ppo, model, data, reward and rollout are read."""
    return t.job.program == OUR_TRAINER


def _sample(t: Tree) -> int:
    """Tokens that a pass must hold."""
    return (2 if t.ppo.algorithm == "dpo" else 1) * (t.data.max_prompt + t.rollout.max_tokens)


def _somewhere_float32(t: Tree) -> bool:
    """Engines torch and served generate with float32 weights, whatever is trained in."""
    return t.model.dtype == "float32" or (_generates(t) and not t.rollout.foreign)


def _generates(t: Tree) -> bool:
    return _ours(t) and t.ppo.algorithm not in GIVEN


def _multiple(number: int, unit: int) -> int:
    """The smallest multiple of `unit` that is not below `number`."""
    return -(-number // unit) * unit


def _reward_s(t: Tree) -> float:
    return t.reward.timeout_s * (t.reward.retries + 1)


def _scorers(t: Tree) -> list[str]:
    return [name for name in ("function", "model", "url", "parts") if getattr(t.reward, name)]


def _too_many_scorers(t: Tree) -> bool:
    found = set(_scorers(t))
    alone = len(found) == 1 or found == {"parts", "model"}
    return not alone and (bool(found) or t.environment.function is None)


def _odd_parts(t: Tree) -> list[str]:
    """Parts of a reward that are no function and no endpoint, or whose name would be none of a curve."""
    parts = t.reward.parts.items()
    right = {name for name, where in parts if re.match(FUNCTION, where) or re.match(URL, where)}
    return [
        f"{name}: {where}" for name, where in parts if name not in right or not re.match(PART, name) or name == "model"
    ]


def _odd_weights(t: Tree) -> list[str]:
    """Weights that belong to no part, or are no number."""
    names = {*t.reward.parts, *(["model"] if t.reward.parts and t.reward.model else [])}
    return [f"{name}: {text}" for name, text in t.reward.weights.items() if name not in names or not _is_number(text)]


def _odd_stages(t: Tree) -> str:
    """What is wrong with the curriculum's stages; "" if nothing is."""
    curriculum = t.data.curriculum
    if curriculum.field is None:
        return "there are stages, and no field" if curriculum.stages else ""
    try:
        steps = sorted(map(int, curriculum.stages))
        sums = [sum(stage[1:]) for stage in curriculum.weights]
    except ValueError as error:
        return str(error)
    if steps[:1] != [0] or len(set(steps)) != len(steps):
        return f"the first steps are {', '.join(curriculum.stages) or 'none'}"
    odd = [its for its in sums if not 1 <= its <= MIXED]
    return f"the weights of a stage sum up to {odd[0]}" if odd else ""


def _is_number(text: str) -> bool:
    try:
        return isfinite(float(text))
    except ValueError:
        return False


def _inexact(t: Tree) -> list[str]:
    """The trained roles that DeepSpeed shards."""
    roles = {"actor": t.placement.actor, "critic": t.placement.critic}
    return [role for role, placement in roles.items() if (placement.strategy or t.model.strategy) == "deepspeed"]


def _fresh(t: Tree) -> bool:
    """Whether vLLM is known to generate on a GPU, where it rounds by what else is in the batch, or a server does, of which
    nobody here knows how it rounds. With rollout nodes it is their own configuration that knows of the GPU.
    """
    here = not t.rollout.nodes or t.node.role == "rollout"
    gpu = here and t.node.device == "cuda"
    rounds = t.rollout.engine == "vllm" and gpu and not t.rollout.vllm.batch_invariant
    return _generates(t) and (rounds or t.rollout.engine == "server")


def _on_loopback(url: str) -> bool:
    """Is that an address of this machine alone, over HTTP?"""
    try:
        parts = urlsplit(url)
        local, _ = loops(parts.hostname or ""), parts.port  # raises for one that is no number
    except ValueError:
        return False
    return local and parts.scheme == "http" and not (parts.username or parts.query or parts.fragment)


def _away(t: Tree) -> list[str]:
    roles = {"ref": t.placement.ref, "reward": t.placement.reward}
    return [role for role, placement in roles.items() if placement.where == "rollout"]


def _spread_away(t: Tree) -> list[str]:
    roles = {"ref": t.placement.ref, "reward": t.placement.reward}
    return [role for role in _away(t) if (roles[role].strategy, roles[role].offload) != ("replicated", "none")]


def _socket(t: Tree, folder: str) -> str:
    """Where a process of this node would listen."""
    return f"{folder}/{t.job.name}/{t.node.name or gethostname()}/{CONTROL}"


def _engine_socket(t: Tree) -> str:
    """Where a rollout engine of this node would listen."""
    node = t.node.name or gethostname()
    folder = f"{t.rollout.dir}/{t.job.name}/{node}" if t.rollout.dir else f"{t.vault.dir}/{t.job.name}/{node}.engine"
    return f"{folder}/engine.sock"


def _room(t: Tree) -> int:
    """Bytes that are left for the folder."""
    return SOCKET_BYTES - len(fsencode(_socket(t, "")))


TLS = ("store.tls.ca", "store.tls.cert", "store.tls.key", "store.tls.server_name")


def _encrypts(t: Tree) -> bool:
    tls = t.store.tls
    return any(value is not None for value in (tls.ca, tls.cert, tls.key, tls.server_name))


def _plain(t: Tree) -> list[str]:
    return [endpoint for endpoint in t.store.endpoints if not endpoint.startswith("https://")]


def _far(endpoint: str) -> bool:
    return not loops(endpoint.removeprefix("http://").rpartition(":")[0].strip("[]"))


def _stray_auth(t: Tree) -> bool:
    return t.store.username is not None and t.store.password is None and t.store.password_file is None


def _apart(one: Listener, other: Listener) -> Relation:
    """Two ports of one kind, whatever their addresses: a node's own is often known on that node alone."""
    return Relation(
        keys=(one.key, other.key),
        rule=f"must differ from {other.key}",
        broken=lambda t: one.port(t) == other.port(t) != 0,
        values=lambda t: f"both are {one.port(t)}",
        remedy="Change one of the two, or set one to 0.",
    )


def _exact(t: Tree) -> bool:
    return means_of(t.job.level).joins


RELATIONS: tuple[Relation, ...] = (
    # What the program does for its recovery.
    Relation(
        keys=("job.level", "job.program"),
        rule="must be exact for the program elasticrl.ppo, which uses elasticrl.runtime",
        broken=lambda t: _ours(t) and not _exact(t),
        values=lambda t: f"it is {t.job.level}",
        remedy="Set level: exact, or name your script as job.program.",
    ),
    Relation(
        keys=("job.steps", "job.level"),
        rule="must be 0 below job.level exact, where the script alone knows when it is done",
        broken=lambda t: not _exact(t) and t.job.steps > 0,
        values=lambda t: f"it is {t.job.steps}",
        remedy="Remove it, and give the script its number of steps in job.args.",
    ),
    Relation(
        keys=("vault.copies", "job.level"),
        rule="must be 0 below job.level kept, where no state is in memory",
        broken=lambda t: not means_of(t.job.level).keeps and t.vault.copies > 0,
        values=lambda t: f"it is {t.vault.copies}",
        remedy="Remove it.",
    ),
    Relation(
        keys=("comm.backend", "job.level"),
        rule="must be auto below job.level exact, where the script itself chooses in init_process_group",
        broken=lambda t: not _exact(t) and t.comm.backend != "auto",
        values=lambda t: f"it is {t.comm.backend}",
        remedy="Remove it.",
    ),
    Relation(
        keys=("comm.fallback", "job.level"),
        rule="must be none below job.level exact: a script's own process group cannot be moved to gloo",
        broken=lambda t: not _exact(t) and t.comm.fallback != "none",
        values=lambda t: f"it is {t.comm.fallback}",
        remedy="Set fallback: none.",
    ),
    Relation(
        keys=("timeouts.quiet", "job.level"),
        rule="must be 0 at job.level exact, whose workers say what they do",
        broken=lambda t: _exact(t) and t.timeouts.quiet_s > 0,
        values=lambda t: f"it is {_s(t.timeouts.quiet_s)}",
        remedy="Remove it; timeouts.phase and timeouts.default_phase hold there.",
    ),
    Relation(
        keys=("agent.progress", "job.level"),
        rule="must be null above job.level supervised, where the program tells its steps and no log is read for them",
        broken=lambda t: means_of(t.job.level).tells and bool(t.agent.progress),
        values=lambda t: f"it is {t.agent.progress} at job.level {t.job.level}",
        remedy="Remove it.",
    ),
    Relation(
        keys=("agent.progress",),
        rule="must have a group for the step, as a regular expression has it in parentheses",
        broken=lambda t: bool(_unreadable(t)),
        values=_unreadable,
        remedy="Put the step into parentheses, and repeat nothing twice, as in: step (\\d+) of (?P<of>\\d+).",
    ),
    Relation(
        keys=("membership.fixed", "membership.min_nodes", "membership.max_nodes"),
        rule="must not be true with a min_nodes between 1 and max_nodes: the job would never train on so few",
        broken=lambda t: t.membership.fixed and 1 < t.membership.min_nodes < t.membership.max_nodes,
        values=lambda t: f"min_nodes is {t.membership.min_nodes}, max_nodes {t.membership.max_nodes}",
        remedy=lambda t: f"Remove min_nodes, or set it to {t.membership.max_nodes}.",
    ),
    # Who is in, and how a death is noticed.
    Relation(
        keys=("membership.lease_ttl", "membership.keepalive", "store.retry"),
        rule="must exceed 2 x keepalive + store.retry",
        broken=lambda t: t.membership.lease_ttl_s <= _lease_needs(t),
        values=lambda t: (
            f"{_s(t.membership.lease_ttl_s)} is not over 2 x {_s(t.membership.keepalive_s)} + {_s(t.store.retry_s)}"
        ),
        remedy=lambda t: (
            f"Raise lease_ttl to {_ttl(t)} or lower keepalive to {_under((t.membership.lease_ttl_s - t.store.retry_s) / 2)}."
            if t.membership.lease_ttl_s > t.store.retry_s
            else f"Raise lease_ttl to {_ttl(t)}."
        ),
    ),
    Relation(
        keys=("membership.lease_ttl",),
        rule="must be whole seconds, as etcd counts them",
        broken=lambda t: t.membership.lease_ttl_s != int(t.membership.lease_ttl_s),
        values=lambda t: f"{_s(t.membership.lease_ttl_s)} is not",
        remedy=lambda t: f"Write {ceil(t.membership.lease_ttl_s)}s.",
    ),
    Relation(
        keys=("membership.suspect", "membership.beat"),
        rule="must exceed 2 x beat, or one lost packet is a suspicion",
        broken=lambda t: t.membership.suspect_s <= 2 * t.membership.beat_s,
        values=lambda t: f"{_s(t.membership.suspect_s)} is not over 2 x {_s(t.membership.beat_s)}",
        remedy=lambda t: (
            f"Raise suspect to {_over(2 * t.membership.beat_s)} or lower beat to {_under(t.membership.suspect_s / 2)}."
        ),
    ),
    Relation(
        keys=("membership.doubt", "membership.suspect"),
        rule="must be under suspect, or a broken collective says nothing that silence does not say",
        broken=lambda t: t.membership.doubt_s >= t.membership.suspect_s,
        values=lambda t: f"{_s(t.membership.doubt_s)} is not under {_s(t.membership.suspect_s)}",
        remedy=lambda t: f"Lower doubt to {_under(t.membership.suspect_s)}.",
    ),
    Relation(
        keys=("membership.suspect", "membership.lease_ttl"),
        rule="must be under lease_ttl, or beats find nothing sooner than the lease",
        broken=lambda t: t.membership.suspect_s >= t.membership.lease_ttl_s,
        values=lambda t: f"{_s(t.membership.suspect_s)} is not under {_s(t.membership.lease_ttl_s)}",
        remedy=lambda t: f"Lower suspect to {_under(t.membership.lease_ttl_s)}.",
    ),
    Relation(
        keys=("membership.min_nodes", "membership.max_nodes"),
        rule="must not exceed max_nodes",
        broken=lambda t: t.membership.min_nodes > t.membership.max_nodes,
        values=lambda t: f"{t.membership.min_nodes} is over {t.membership.max_nodes}",
        remedy=lambda t: f"Lower min_nodes to {t.membership.max_nodes} or raise max_nodes to {t.membership.min_nodes}.",
    ),
    # The store.
    Relation(
        keys=("store.endpoints", "store.embedded"),
        rule="must name an etcd member, unless store.embedded starts one",
        broken=lambda t: not t.store.endpoints and not t.store.embedded,
        values="there is neither",
        remedy="List etcd's members as endpoints: [host:2379, ...], or set embedded: true on a single machine.",
    ),
    Relation(
        keys=("store.embedded", "store.endpoints"),
        rule="must be false where store.endpoints name an etcd",
        broken=lambda t: t.store.embedded and bool(t.store.endpoints),
        values=lambda t: f"it is true beside {len(t.store.endpoints)} endpoints",
        remedy="Remove endpoints to use the embedded etcd, or set embedded: false.",
    ),
    Relation(
        keys=("store.endpoints", "store.client"),
        rule="must be a single one for the client etcd3, which knows no more",
        broken=lambda t: t.store.client == "etcd3" and len(t.store.endpoints) > 1,
        values=lambda t: f"there are {len(t.store.endpoints)}",
        remedy="Set client: grpc, or name one endpoint.",
    ),
    Relation(
        keys=("store.endpoints", *TLS),
        rule="must all begin with https://, or none, where store.tls says nothing",
        broken=lambda t: not _encrypts(t) and 0 < len(_plain(t)) < len(t.store.endpoints),
        values=lambda t: f"{', '.join(_plain(t))} would be spoken to in clear",
        remedy="Write https:// before each.",
    ),
    Relation(
        keys=("store.username", "store.endpoints", *TLS),
        rule="should be sent encrypted, as its password is",
        broken=lambda t: t.store.username is not None and not _encrypts(t) and any(map(_far, _plain(t))),
        values=lambda t: f"{', '.join(filter(_far, _plain(t)))} would be told both in clear",
        remedy="Write https:// before the endpoints, or set store.tls.ca.",
        level="warning",
    ),
    Relation(
        keys=("store.try_timeout", "store.timeout"),
        rule="must not exceed store.timeout, of which it is one try",
        broken=lambda t: t.store.try_timeout_s > t.store.timeout_s,
        values=lambda t: f"{_s(t.store.try_timeout_s)} is over {_s(t.store.timeout_s)}",
        remedy=lambda t: f"Raise timeout to {_s(4 * t.store.try_timeout_s)}.",
    ),
    Relation(
        keys=("store.username", "store.password", "store.password_file"),
        rule="must come with a password",
        broken=_stray_auth,
        values="there is none",
        remedy="Set password_file, or ELASTICRL__STORE__PASSWORD in the environment.",
    ),
    Relation(
        keys=("store.password", "store.password_file"),
        rule="must not be given beside password_file",
        broken=lambda t: t.store.password is not None and t.store.password_file is not None,
        values="both are set",
        remedy="Remove one of the two.",
    ),
    Relation(
        keys=("store.username", "store.password", "store.password_file"),
        rule="must be given with a password",
        broken=lambda t: t.store.username is None and bool(t.store.password or t.store.password_file),
        values="it is null",
        remedy="Set username, or remove the password.",
    ),
    Relation(
        keys=("web.token", "web.token_file"),
        rule="must not be given beside token_file",
        broken=lambda t: t.web.token is not None and t.web.token_file is not None,
        values="both are set",
        remedy="Remove one of the two.",
    ),
    Relation(
        keys=("web.address", "web.port", "web.token", "web.token_file"),
        rule="must be a loopback address where there is no token",
        broken=lambda t: bool(t.web.port) and not loops(t.web.address) and not (t.web.token or t.web.token_file),
        values=lambda t: f"{t.web.address} is not",
        remedy="Set token_file, or ELASTICRL__WEB__TOKEN in the environment, or address: 127.0.0.1.",
    ),
    Relation(
        keys=("store.tls.cert", "store.tls.key"),
        rule="must come with its key, and the key with its certificate",
        broken=lambda t: (t.store.tls.cert is None) != (t.store.tls.key is None),
        values=lambda t: f"{'cert' if t.store.tls.cert is None else 'key'} is null",
        remedy=lambda t: f"Set {'cert' if t.store.tls.cert is None else 'key'} too, or neither.",
    ),
    Relation(
        keys=("membership.lease_ttl", "store.ping", "store.ping_timeout", "store.endpoints"),
        rule="should exceed store.ping + store.ping_timeout, to move to another endpoint before the lease lapses",
        broken=lambda t: (
            len(t.store.endpoints) > 1 and t.membership.lease_ttl_s <= t.store.ping_s + t.store.ping_timeout_s
        ),
        values=lambda t: (
            f"{_s(t.membership.lease_ttl_s)} is not over {_s(t.store.ping_s)} + {_s(t.store.ping_timeout_s)}"
        ),
        remedy=lambda t: (
            f"Raise lease_ttl to {ceil(1.2 * (t.store.ping_s + t.store.ping_timeout_s))}s,"
            " unless a frozen etcd may cost a member."
        ),
        level="warning",
    ),
    # The ladder and the budgets.
    Relation(
        keys=("recovery.reform", "recovery.replace", "recovery.restart", "recovery.reload"),
        rule="should rise from rung to rung: reform, replace, restart, reload",
        broken=lambda t: _rungs(t) != sorted(_rungs(t)),
        values=lambda t: ", ".join(_s(rung) for rung in _rungs(t)),
        remedy="Give a later rung more time, or an earlier one less: a rung slower than the next is not worth trying.",
        level="warning",
    ),
    Relation(
        keys=("recovery.start", "recovery.restart", "recovery.reload"),
        rule="should be no longer than restart and reload, whose fresh processes load the same models",
        broken=lambda t: t.recovery.start_s > min(t.recovery.restart_s, t.recovery.reload_s),
        values=lambda t: f"{_s(t.recovery.start_s)} is over {_s(min(t.recovery.restart_s, t.recovery.reload_s))}",
        remedy=lambda t: f"Set restart and reload to {_s(t.recovery.start_s)} or more.",
        level="warning",
    ),
    Relation(
        keys=("timeouts.collective", "timeouts.confirm", "timeouts.dump", *_CAPS),
        rule="must exceed the longest phase + confirm + dump, or the backend tears processes down before there is a verdict",
        broken=lambda t: t.timeouts.collective_s <= _stall_s(t),
        values=lambda t: (
            f"{_s(t.timeouts.collective_s)} is not over {_longest(t)[0]}'s {_s(_longest(t)[1])}"
            f" + {_s(t.timeouts.confirm_s)} + {_s(t.timeouts.dump_s)}"
        ),
        remedy=lambda t: (
            f"Raise collective to {_over(_stall_s(t))} or lower {_longest(t)[0]}'s budget"
            " (timeouts.phase, else timeouts.default_phase)."
        ),
    ),
    Relation(
        keys=("timeouts.floor", *_CAPS),
        rule="must not exceed any phase's cap",
        broken=lambda t: t.timeouts.floor_s > min(_caps(t).values()),
        values=lambda t: f"{_s(t.timeouts.floor_s)} is over {_s(min(_caps(t).values()))}",
        remedy=lambda t: f"Lower floor to {_s(min(_caps(t).values()))} or raise that cap.",
    ),
    Relation(
        keys=("health.quarantine", "health.quarantine_max"),
        rule="must not exceed quarantine_max",
        broken=lambda t: t.health.quarantine_s > t.health.quarantine_max_s,
        values=lambda t: f"{_s(t.health.quarantine_s)} is over {_s(t.health.quarantine_max_s)}",
        remedy=lambda t: f"Raise quarantine_max to {_s(8 * t.health.quarantine_s)}.",
    ),
    # Lanes.
    Relation(
        keys=("health.sample",),
        rule="should be 5s or more: asking a GPU's driver every second has been seen to slow its collectives",
        broken=lambda t: t.health.sample_s < SELDOM_S,
        values=lambda t: f"it is {_s(t.health.sample_s)}",
        remedy="Set sample: 10s; what ends a worker is known at once in any case.",
        level="warning",
    ),
    Relation(
        keys=("lanes.count", "membership.max_nodes", "node.workers", "model.tp", "model.cp", "job.level"),
        rule="must be at least the largest world: max_nodes x node.workers, over model.tp x model.cp",
        broken=lambda t: _exact(t) and t.lanes.count < _teams(t),
        values=lambda t: (
            f"{t.lanes.count} lanes are fewer than {_teams(t)} {'workers' if t.model.team == 1 else 'teams of workers'}"
        ),
        remedy=lambda t: (
            f"Raise lanes.count to {_teams(t)} before the job starts, or lower max_nodes to "
            f"{max(1, t.lanes.count * t.model.team // t.node.workers)}."
        ),
    ),
    Relation(
        keys=("model.tp", "model.cp", "node.workers", "job.level"),
        rule="x model.cp must divide node.workers, because a team's workers are on one node",
        broken=lambda t: _exact(t) and t.node.workers % t.model.team != 0,
        values=lambda t: f"{t.node.workers} workers of a node are no teams of {t.model.team}",
        remedy=lambda t: (
            f"Set node.workers: {_multiple(t.node.workers, t.model.team)}, or another tp{' or cp' if t.model.cp > 1 else ''}."
        ),
    ),
    Relation(
        keys=("model.tp", "model.cp", "job.level"),
        rule="and model.cp must be 1 below job.level exact, where a script shares models out among its workers by itself",
        broken=lambda t: not _exact(t) and t.model.team > 1,
        values=lambda t: f"{_of_team(t)}, at job.level {t.job.level}",
        remedy="Leave tp and cp out, or set job.level: exact.",
    ),
    Relation(
        keys=("model.tp", "model.cp", "model.strategy", "job.level"),
        rule="and model.cp must be 1 with the strategy deepspeed, which knows no teams",
        broken=lambda t: _exact(t) and t.model.team > 1 and t.model.strategy == "deepspeed",
        values=lambda t: f"{_of_team(t)}, and model.strategy is {t.model.strategy}",
        remedy=lambda t: f"Set model.strategy: fsdp, or {_no_team(t)}.",
    ),
    Relation(
        keys=("model.tp", "model.cp", "job.program", *_NO_TEAMS, "rollout.engine"),
        rule="and model.cp must be 1 with what elasticrl.ppo cannot do in teams yet",
        broken=lambda t: _ours(t) and t.model.team > 1 and bool(_beyond_teams(t)),
        values=lambda t: f"{_of_team(t)}, with {', '.join(_beyond_teams(t))}",
        remedy=lambda t: (
            f"Set {_no_team(t)}, or leave {', '.join(said.split(':')[0] for said in _beyond_teams(t))} at its default."
        ),
    ),
    Relation(
        keys=("audit.lanes", "model.tp", "model.cp", "job.level"),
        rule="has no effect with teams: no team computes a lane of another one once more",
        broken=lambda t: _exact(t) and t.model.team > 1 and t.audit.lanes not in ("0", t.audit.__class__().lanes),
        values=lambda t: f"it is {t.audit.lanes}, and workers are in teams of {t.model.team}",
        remedy="Leave audit.lanes out. Digests of what all teams have alike are still compared (lanes.digest).",
        level="warning",
    ),
    Relation(
        keys=("model.cp", "model.attention", "model.value_head", "job.program"),
        rule="must be 1 with attention or a value head whose tokens cannot be shared",
        broken=lambda t: _ours(t) and t.model.cp > 1 and bool(_beyond_sharing(t)),
        values=lambda t: f"it is {t.model.cp}, with {' and '.join(_beyond_sharing(t))}",
        remedy="Set cp: 1, or attention: sdpa and value_head: separate.",
    ),
    Relation(
        keys=("lanes.exact", "model.strategy", "placement.actor.strategy", "placement.critic.strategy", "job.program"),
        rule="must not be require with deepspeed, which is close in floats but not exact",
        broken=lambda t: _ours(t) and t.lanes.exact == "require" and bool(_inexact(t)),
        values=lambda t: f"it is require, and deepspeed shards {' and '.join(_inexact(t))}",
        remedy="Set exact: warn, or strategy: fsdp.",
    ),
    Relation(
        keys=("lanes.exact", "rollout.engine", "rollout.vllm.batch_invariant", "node.device", "job.program"),
        rule="must not be require with vllm on a GPU without batch_invariant, or with a server: after a fault they generate "
        "other text",
        broken=lambda t: t.lanes.exact == "require" and _fresh(t),
        values=lambda t: (
            "it is require, and rollout.engine is server"
            if t.rollout.engine == "server"
            else "it is require, and rollout.vllm.batch_invariant is false with node.device: cuda"
        ),
        remedy="Set exact: warn, rollout.vllm.batch_invariant: true, or rollout.engine: served.",
    ),
    Relation(
        keys=(
            "model.zero_stage",
            "model.strategy",
            "placement.actor.strategy",
            "placement.critic.strategy",
            "job.program",
        ),
        rule="has no effect unless the strategy of a role is deepspeed",
        broken=lambda t: _ours(t) and t.model.zero_stage != t.model.__class__().zero_stage and not _inexact(t),
        values=lambda t: f"it is {t.model.zero_stage}, and no trained role is sharded by deepspeed",
        remedy="Set model.strategy: deepspeed, or leave zero_stage out.",
        level="warning",
    ),
    # What survives.
    Relation(
        keys=("vault.copies", "membership.min_nodes"),
        rule="must not exceed min_nodes - 1, because copies never sit on one node",
        broken=lambda t: t.vault.copies > t.membership.min_nodes - 1,
        values=lambda t: f"{t.vault.copies} is over {t.membership.min_nodes} - 1",
        remedy=lambda t: f"Raise min_nodes to {t.vault.copies + 1} or lower copies to {t.membership.min_nodes - 1}.",
    ),
    Relation(
        keys=("vault.copies", "membership.min_nodes", "job.level"),
        rule="should be at least 1 with several nodes, or a lost node costs the steps since the last disk checkpoint",
        broken=lambda t: means_of(t.job.level).keeps and t.membership.min_nodes > 1 and t.vault.copies == 0,
        values=lambda t: f"0 copies with at least {t.membership.min_nodes} nodes",
        remedy="Set copies: 1, if memory allows.",
        level="warning",
    ),
    Relation(
        keys=("checkpoint.shared", "checkpoint.dir"),
        rule="should be true where checkpoint.dir is a URL: all nodes see that, and parts would be kept apart for nothing",
        broken=lambda t: not t.checkpoint.shared and "://" in t.checkpoint.dir,
        values=lambda t: f"false with {t.checkpoint.dir}",
        remedy="Set shared: true, or dir to a directory on each node's disk.",
        level="warning",
    ),
    Relation(
        keys=("checkpoint.shared", "membership.grow"),
        rule="should go with grow: always where it is false, or a node whose disk is waited for may not be let in",
        broken=lambda t: not t.checkpoint.shared and t.membership.max_nodes > 1 and t.membership.grow != "always",
        values=lambda t: f"false with grow: {t.membership.grow} and up to {t.membership.max_nodes} nodes",
        remedy="Set membership.grow: always.",
        level="warning",
    ),
    Relation(
        keys=("checkpoint.every", "vault.every"),
        rule="must be a multiple of vault.every, because disk checkpoints are written from snapshots",
        broken=lambda t: t.checkpoint.every % t.vault.every != 0,
        values=lambda t: f"{t.checkpoint.every} is not a multiple of {t.vault.every}",
        remedy=lambda t: f"Write every: {_multiple(t.checkpoint.every, t.vault.every)}, or set vault.every: 1.",
    ),
    Relation(
        keys=("checkpoint.keep_every", "checkpoint.every"),
        rule="must be a multiple of checkpoint.every, or those steps are never saved",
        broken=lambda t: t.checkpoint.keep_every % t.checkpoint.every != 0,
        values=lambda t: f"{t.checkpoint.keep_every} is not a multiple of {t.checkpoint.every}",
        remedy=lambda t: f"Write keep_every: {_multiple(t.checkpoint.keep_every, t.checkpoint.every)}.",
    ),
    Relation(
        keys=("checkpoint.keep_best", "evaluate.every", "job.program"),
        rule="must be false without evaluate.every, as nothing has a score",
        broken=lambda t: _ours(t) and t.checkpoint.keep_best and t.evaluate.every == 0,
        values="it is true",
        remedy="Set evaluate.every and evaluate.prompts, or remove keep_best.",
    ),
    Relation(
        keys=("checkpoint.keep_best", "checkpoint.every", "evaluate.every", "job.program"),
        rule="should go with an evaluate.every that is a multiple of checkpoint.every, or divides it: only what is saved and"
        " evaluated can be the best",
        broken=lambda t: (
            _ours(t)
            and t.checkpoint.keep_best
            and t.evaluate.every > 0
            and gcd(t.checkpoint.every, t.evaluate.every) != min(t.checkpoint.every, t.evaluate.every)
        ),
        values=lambda t: f"checkpoint.every is {t.checkpoint.every}, and evaluate.every {t.evaluate.every}",
        remedy=lambda t: f"Write evaluate.every: {_multiple(t.evaluate.every, t.checkpoint.every)}.",
        level="warning",
    ),
    Relation(
        keys=("vault.timeout", "timeouts.phase.update", "timeouts.default_phase"),
        rule="must be under the budget of the phase update, which waits for the copy",
        broken=lambda t: t.vault.timeout_s >= _caps(t)["update"],
        values=lambda t: f"{_s(t.vault.timeout_s)} is not under {_s(_caps(t)['update'])}",
        remedy=lambda t: f"Lower vault.timeout to {_under(_caps(t)['update'])} or raise timeouts.phase.update.",
    ),
    # Collectives.
    Relation(
        keys=("comm.backend", "node.device"),
        rule="must not be nccl on CPUs",
        broken=lambda t: t.comm.backend == "nccl" and t.node.device == "cpu",
        values="it is nccl, and node.device is cpu",
        remedy="Set backend: gloo, or device: cuda.",
    ),
    Relation(
        keys=("policy.fabric", "comm.fallback"),
        rule="must not be fallback while comm.fallback is none",
        broken=lambda t: t.policy.fabric == "fallback" and t.comm.fallback == "none",
        values="it is fallback, and comm.fallback is none",
        remedy="Set comm.fallback: gloo, or another action.",
    ),
    *(_apart(one, other) for one, other in combinations(PORTS, 2) if one.kind == other.kind),
    # What is trained.
    Relation(
        keys=("model.path", "job.program"),
        rule="must be given for the program elasticrl.ppo",
        broken=lambda t: _ours(t) and t.model.path is None,
        values="it is null",
        remedy="Write the model's folder or hub name as path under model.",
    ),
    Relation(
        keys=("data.path", "job.program"),
        rule="must be given for the program elasticrl.ppo",
        broken=lambda t: _ours(t) and t.data.path is None,
        values="it is null",
        remedy="Write the prompts' file as path under data.",
    ),
    Relation(
        keys=(
            "reward.function",
            "reward.model",
            "reward.url",
            "reward.parts",
            "environment.function",
            "ppo.algorithm",
            "job.program",
        ),
        rule="must be the only scorer, or model, url or parts in its place; an environment scores alone, or with one beside",
        broken=lambda t: _generates(t) and _too_many_scorers(t),
        values=lambda t: f"set are {' and '.join(_scorers(t))}" if _scorers(t) else "none of them is set",
        remedy="Set exactly one of function, model and url under reward; or list several as parts.",
    ),
    Relation(
        keys=("reward.parts", "job.program"),
        rule="must each be a word with module:function or http://..., and none called model, as reward.model is",
        broken=lambda t: _ours(t) and bool(_odd_parts(t)),
        values=lambda t: f"not so are {', '.join(_odd_parts(t))}",
        remedy="Write each as correct: rewards:correct, or judge: http://judge:8000/score.",
    ),
    Relation(
        keys=("reward.weights", "reward.parts", "reward.model", "job.program"),
        rule="must each be a number, for a name under reward.parts (or model, if reward.model is beside them)",
        broken=lambda t: _ours(t) and bool(_odd_weights(t)),
        values=lambda t: f"not so are {', '.join(_odd_weights(t))}",
        remedy="Write each as correct: 1.0, with the name of a part.",
    ),
    # Held-out prompts.
    Relation(
        keys=("evaluate.every", "evaluate.prompts", "job.program"),
        rule="must be 0 without evaluate.prompts",
        broken=lambda t: _ours(t) and t.evaluate.every > 0 and t.evaluate.prompts is None,
        values=lambda t: f"it is {t.evaluate.every}, and prompts is null",
        remedy="Write a file of held-out prompts as prompts under evaluate, or set every: 0.",
    ),
    Relation(
        keys=("evaluate.at_start", "evaluate.every", "job.program"),
        rule="must be false with evaluate.every: 0, which makes no evaluation",
        broken=lambda t: _ours(t) and t.evaluate.at_start and t.evaluate.every == 0,
        values="it is true",
        remedy="Set every, or remove at_start.",
    ),
    Relation(
        keys=(
            "evaluate.every",
            "ppo.algorithm",
            "rollout.engine",
            "rollout.nodes",
            "model.value_head",
            "model.strategy",
            "placement.actor.strategy",
            "job.program",
        ),
        rule="must be 0 with what an evaluation cannot do: answers to prompts are generated, in the worker unless vllm, a "
        "server or rollout nodes generate, and scored",
        broken=lambda t: _ours(t) and t.evaluate.every > 0 and bool(_beyond_evaluation(t)),
        values=lambda t: f"it is {t.evaluate.every}, with {' and '.join(_beyond_evaluation(t))}",
        remedy="Set evaluate.every: 0, or an algorithm that has a reward, and value_head: separate.",
    ),
    Relation(
        keys=("evaluate.every", "rollout.staleness", "rollout.engine", "rollout.nodes", "ppo.algorithm", "job.program"),
        rule="must be a multiple of rollout.staleness where vllm, a server or rollout nodes generate: they get the weights "
        "every so many steps, and answer held-out prompts by them",
        broken=lambda t: (
            _generates(t)
            and t.rollout.evaluates
            and t.rollout.staleness > 1
            and t.evaluate.every % t.rollout.staleness != 0
        ),
        values=lambda t: f"it is {t.evaluate.every}, and staleness is {t.rollout.staleness}",
        remedy=lambda t: f"Write every: {_multiple(t.evaluate.every, t.rollout.staleness)}.",
    ),
    Relation(
        keys=("evaluate.max_tokens", "rollout.max_tokens", "job.program"),
        rule="must not exceed rollout.max_tokens, the longest answer that rewards are made for",
        broken=lambda t: _ours(t) and (t.evaluate.max_tokens or 0) > t.rollout.max_tokens,
        values=lambda t: f"{t.evaluate.max_tokens} is over {t.rollout.max_tokens}",
        remedy=lambda t: f"Lower it to {t.rollout.max_tokens}, or remove it.",
    ),
    Relation(
        keys=("evaluate.samples", "evaluate.temperature", "job.program"),
        rule="should be 1 at temperature 0, where all answers to a prompt are the same",
        broken=lambda t: _ours(t) and t.evaluate.samples > 1 and t.evaluate.temperature == 0.0,
        values=lambda t: f"it is {t.evaluate.samples}",
        remedy="Set samples: 1, or temperature: 1.",
        level="warning",
    ),
    Relation(
        keys=("environment.function", "ppo.algorithm", "job.program"),
        rule="must be null for dpo, kto and sft, which generate nothing that an environment could answer",
        broken=lambda t: _ours(t) and t.environment.function is not None and t.ppo.algorithm in GIVEN,
        values=lambda t: f"it is {t.environment.function}, with algorithm: {t.ppo.algorithm}",
        remedy="Set an algorithm that generates, such as grpo, or remove environment.function.",
    ),
    Relation(
        keys=("environment.function", "rollout.staleness", "ppo.algorithm", "job.program"),
        rule="must be null with rollout.staleness: nothing is generated ahead where an environment answers",
        broken=lambda t: _generates(t) and t.environment.function is not None and t.rollout.staleness > 0,
        values=lambda t: f"it is {t.environment.function}, and staleness is {t.rollout.staleness}",
        remedy="Set staleness: 0.",
    ),
    Relation(
        keys=("environment.function", "ppo.gen_batch", "ppo.algorithm", "job.program"),
        rule="must be null with ppo.gen_batch: no more episodes are played than are trained on",
        broken=lambda t: _generates(t) and t.environment.function is not None and t.ppo.gen_batch is not None,
        values=lambda t: f"it is {t.environment.function}, and gen_batch is {t.ppo.gen_batch}",
        remedy="Remove gen_batch; ppo.filter_groups alone is possible.",
    ),
    Relation(
        keys=("environment.function", "vault.every", "ppo.algorithm", "job.program"),
        rule="must be null unless vault.every is 1: each reply is in the vault before the next message goes out",
        broken=lambda t: _generates(t) and t.environment.function is not None and t.vault.every != 1,
        values=lambda t: f"it is {t.environment.function}, and every is {t.vault.every}",
        remedy="Set every: 1.",
    ),
    Relation(
        keys=("environment.turn_tokens", "environment.function", "rollout.max_tokens", "job.program"),
        rule="must be at most rollout.max_tokens, which all turns have together",
        broken=lambda t: (
            _generates(t)
            and t.environment.function is not None
            and (t.environment.turn_tokens or 0) > t.rollout.max_tokens
        ),
        values=lambda t: f"{t.environment.turn_tokens} is over {t.rollout.max_tokens}",
        remedy=lambda t: f"Write turn_tokens: {t.rollout.max_tokens}, or raise max_tokens.",
    ),
    Relation(
        keys=("data.curriculum.stages", "data.curriculum.field", "job.program"),
        rule="must begin with step 0, and give levels whole numbers as weights, 1 to 1000 in all; and a field says the levels",
        broken=lambda t: _ours(t) and bool(_odd_stages(t)),
        values=_odd_stages,
        remedy='Write field: level and stages: {0: "easy 1", 200: "easy 1, hard 3"}.',
    ),
    Relation(
        keys=("data.curriculum.field", "ppo.algorithm", "job.program"),
        rule="must be null for dpo, kto and sft, whose records are one row",
        broken=lambda t: _ours(t) and t.ppo.algorithm in GIVEN and t.data.curriculum.field is not None,
        values=lambda t: f"it is {t.data.curriculum.field}, with {t.ppo.algorithm}",
        remedy="Remove curriculum; a file that is sorted, with shuffle: false, keeps its order.",
    ),
    Relation(
        keys=("ppo.batch", "lanes.count", "job.program"),
        rule="must be divisible by lanes.count, because lanes are equal",
        broken=lambda t: _ours(t) and t.ppo.batch % t.lanes.count != 0,
        values=lambda t: f"{t.ppo.batch} samples do not divide into {t.lanes.count} lanes",
        remedy=lambda t: f"Write batch: {_multiple(t.ppo.batch, t.lanes.count)}.",
    ),
    Relation(
        keys=("ppo.mini_batch", "lanes.count", "job.program"),
        rule="must be divisible by lanes.count, because lanes are equal",
        broken=lambda t: _ours(t) and t.ppo.mini_batch % t.lanes.count != 0,
        values=lambda t: f"{t.ppo.mini_batch} samples do not divide into {t.lanes.count} lanes",
        remedy=lambda t: f"Write mini_batch: {_multiple(t.ppo.mini_batch, t.lanes.count)}.",
    ),
    Relation(
        keys=("ppo.batch", "ppo.mini_batch", "lanes.count", "job.program"),
        rule="must be divisible by mini_batch",
        # A batch that does not even divide into lanes has its finding already.
        broken=lambda t: _ours(t) and t.ppo.batch % t.lanes.count == 0 and t.ppo.batch % t.ppo.mini_batch != 0,
        values=lambda t: f"{t.ppo.batch} is not a multiple of {t.ppo.mini_batch}",
        remedy=lambda t: (
            f"Write batch: {_multiple(t.ppo.batch, t.ppo.mini_batch)} or mini_batch: {gcd(t.ppo.batch, t.ppo.mini_batch)}."
        ),
    ),
    Relation(
        keys=("ppo.micro_tokens", "data.max_prompt", "rollout.max_tokens", "ppo.algorithm", "job.program"),
        rule="must hold the longest sample; of dpo a pair, whose two samples stay together",
        broken=lambda t: _ours(t) and t.ppo.micro_tokens < _sample(t),
        values=lambda t: f"{t.ppo.micro_tokens} is under {_sample(t)}",
        remedy=lambda t: f"Write micro_tokens: {_sample(t)}, or lower data.max_prompt or rollout.max_tokens.",
    ),
    Relation(
        keys=("ppo.group", "ppo.algorithm", "job.program"),
        rule="must be at least 2 for an algorithm that compares samples of one prompt",
        broken=lambda t: _ours(t) and t.ppo.algorithm in GROUPED and t.ppo.group < 2,
        values=lambda t: f"it is {t.ppo.group}, with {t.ppo.algorithm}",
        remedy="Write group: 8.",
    ),
    Relation(
        keys=("ppo.scale_rewards", "ppo.algorithm", "job.program"),
        rule="must be group but for grpo: no other algorithm divides by a standard deviation of scores",
        broken=lambda t: _ours(t) and t.ppo.algorithm != "grpo" and t.ppo.scale_rewards != "group",
        values=lambda t: f"it is {t.ppo.scale_rewards}, with {t.ppo.algorithm}",
        remedy="Remove it, or set algorithm: grpo.",
    ),
    Relation(
        keys=("ppo.preference_loss", "ppo.algorithm", "job.program"),
        rule="must be sigmoid but for dpo, whose loss it is",
        broken=lambda t: _ours(t) and t.ppo.algorithm != "dpo" and t.ppo.preference_loss != "sigmoid",
        values=lambda t: f"it is {t.ppo.preference_loss}, with {t.ppo.algorithm}",
        remedy="Remove it, or set algorithm: dpo.",
    ),
    Relation(
        keys=("ppo.gen_batch", "ppo.batch", "ppo.group", "lanes.count", "job.program"),
        rule="must be a multiple of lanes.count x the samples of a group in a lane, and over batch",
        broken=lambda t: (
            _ours(t)
            and t.ppo.gen_batch is not None
            and (t.ppo.gen_batch <= t.ppo.batch or t.ppo.gen_batch % (t.lanes.count * t.ppo.part(t.lanes.count)) != 0)
        ),
        values=lambda t: (
            f"it is {t.ppo.gen_batch}, with {t.lanes.count} lanes, each with {t.ppo.part(t.lanes.count)} of a group of "
            f"{t.ppo.group}, and a batch of {t.ppo.batch}"
        ),
        remedy=lambda t: (
            f"Write gen_batch: {2 * _multiple(t.ppo.batch, t.lanes.count * t.ppo.part(t.lanes.count))}, or remove it."
        ),
    ),
    Relation(
        keys=("ppo.gen_batch", "ppo.filter_groups", "job.program"),
        rule="must be null without filter_groups, which chooses from it",
        broken=lambda t: _ours(t) and t.ppo.gen_batch is not None and not t.ppo.filter_groups,
        values=lambda t: f"filter_groups is {str(t.ppo.filter_groups).lower()}",
        remedy="Set filter_groups: true, or remove gen_batch.",
    ),
    Relation(
        keys=("ppo.filter_groups", "ppo.algorithm", "ppo.group", "job.program"),
        rule="must be false for an algorithm that compares no samples of one prompt",
        broken=lambda t: _ours(t) and t.ppo.filter_groups and t.ppo.algorithm not in GROUPED,
        values=lambda t: f"it is true, with {t.ppo.algorithm}",
        remedy="Remove it, or set algorithm: grpo and group: 8.",
    ),
    Relation(
        keys=("ppo.dual_clip", "ppo.loss_mode", "job.program"),
        rule="must be null but for vanilla and gspo, whose loss of a negative advantage has no bound",
        broken=lambda t: _ours(t) and t.ppo.dual_clip is not None and t.ppo.loss_mode not in {"vanilla", "gspo"},
        values=lambda t: f"it is {t.ppo.dual_clip:g}, with {t.ppo.loss_mode}",
        remedy="Remove it, or set loss_mode: vanilla.",
    ),
    Relation(
        keys=("ppo.clip_low", "ppo.loss_mode", "job.program"),
        rule="should be far smaller with gspo: a sample's ratio is the geometric mean of its tokens', and stays near 1",
        broken=lambda t: _ours(t) and t.ppo.loss_mode == "gspo" and t.ppo.clip_low > 0.1,
        values=lambda t: f"it is {t.ppo.clip_low:g}",
        remedy="Write clip_low: 0.0003 and clip_high: 0.0004.",
        level="warning",
    ),
    Relation(
        keys=("ppo.overlong_buffer", "rollout.max_tokens", "job.program"),
        rule="must not exceed rollout.max_tokens, of which it is the end",
        broken=lambda t: _ours(t) and t.ppo.overlong_buffer > t.rollout.max_tokens,
        values=lambda t: f"{t.ppo.overlong_buffer} is over {t.rollout.max_tokens}",
        remedy=lambda t: f"Write overlong_buffer: {max(t.rollout.max_tokens // 4, 1)}.",
    ),
    Relation(
        keys=("ppo.kl.estimator", "ppo.kl.where", "job.program"),
        rule="must be k1, k2 or k3 in the reward, which has no gradient to send straight through",
        broken=lambda t: _ours(t) and t.ppo.kl.where == "reward" and (t.ppo.kl.estimator or "").endswith("+"),
        values=lambda t: f"it is {t.ppo.kl.estimator}",
        remedy=lambda t: f"Write estimator: {(t.ppo.kl.estimator or '').removesuffix('+')}, or where: loss.",
    ),
    Relation(
        keys=("ppo.kl.estimator", "ppo.kl.where", "job.program"),
        rule="should be another than k1 in the loss, where k1's gradient is 0 in the mean: it holds nothing",
        broken=lambda t: _ours(t) and t.ppo.kl.where == "loss" and t.ppo.kl.estimator == "k1",
        values="it is k1",
        remedy="Write estimator: k1+ (k2's gradient), or k3.",
        level="warning",
    ),
    Relation(
        keys=("ppo.kl.where", "ppo.algorithm", "job.program"),
        rule="should be loss with grpo: in the reward it ranks answers that scored alike, whatever kl.coef is",
        broken=lambda t: _ours(t) and t.ppo.algorithm == "grpo" and t.ppo.kl.where == "reward",
        values=lambda t: f"it is {t.ppo.kl.where}",
        remedy="Write where: loss (or off).",
        level="warning",
    ),
    Relation(
        keys=("model.attention", "model.dtype", "rollout.engine", "job.program"),
        rule="must be another than flash_attention_2 where something is computed in float32, which that does not know",
        broken=lambda t: _ours(t) and t.model.attention == "flash_attention_2" and _somewhere_float32(t),
        values=lambda t: (
            f"model.dtype is {t.model.dtype}"
            + (f", and engine {t.rollout.engine} generates in float32" if _generates(t) else "")
        ),
        remedy="Set attention: sdpa, or dtype: bfloat16 with rollout.engine: vllm.",
    ),
    Relation(
        keys=("ppo.group", "ppo.batch", "lanes.count", "ppo.algorithm", "job.program"),
        rule="must divide batch, because a step has whole groups; one that is larger than a lane's part lies in several lanes",
        broken=lambda t: _generates(t) and t.ppo.batch % t.lanes.count == 0 and t.ppo.batch % t.ppo.group != 0,
        values=lambda t: f"{t.ppo.batch} is not a multiple of {t.ppo.group}",
        remedy=lambda t: f"Write batch: {_multiple(t.ppo.batch, lcm(t.lanes.count, t.ppo.group, t.ppo.mini_batch))}.",
    ),
    Relation(
        keys=("ppo.batch", "lanes.count", "ppo.algorithm", "job.program"),
        rule="must be at least 2 samples in each lane for kto, whose baseline gives each answer its neighbour's prompt",
        broken=lambda t: _ours(t) and t.ppo.algorithm == "kto" and t.ppo.batch == t.lanes.count,
        values=lambda t: f"{t.ppo.batch} samples are one for each of {t.lanes.count} lanes",
        remedy=lambda t: f"Write batch: {2 * t.lanes.count}.",
    ),
    Relation(
        keys=("ppo.schedule", "job.steps", "job.program"),
        rule="must be constant while job.steps is 0, because the others end at the last step",
        broken=lambda t: _ours(t) and t.ppo.schedule != "constant" and t.job.steps == 0,
        values=lambda t: f"it is {t.ppo.schedule}",
        remedy="Set job.steps, or schedule: constant.",
    ),
    Relation(
        keys=("rollout.sync_timeout", "timeouts.phase.sync", "timeouts.default_phase", "job.program", "ppo.algorithm"),
        rule="must be under the budget of the phase sync, so that a dead engine does not cost a healthy worker",
        broken=lambda t: _generates(t) and t.rollout.sync_timeout_s >= _caps(t)["sync"],
        values=lambda t: f"{_s(t.rollout.sync_timeout_s)} is not under {_s(_caps(t)['sync'])}",
        remedy=lambda t: (
            f"Raise timeouts.phase.sync to {_over(t.rollout.sync_timeout_s)}"
            f" or lower sync_timeout to {_under(_caps(t)['sync'])}."
        ),
    ),
    Relation(
        keys=(
            "reward.timeout",
            "reward.retries",
            "reward.url",
            "reward.parts",
            "timeouts.phase.reward",
            "timeouts.default_phase",
            "job.program",
            "ppo.algorithm",
        ),
        rule="must leave all tries, timeout x (retries + 1), under the budget of the phase reward",
        broken=lambda t: _generates(t) and bool(t.reward.urls) and _reward_s(t) >= _caps(t)["reward"],
        values=lambda t: f"{_s(t.reward.timeout_s)} x {t.reward.retries + 1} is not under {_s(_caps(t)['reward'])}",
        remedy=lambda t: (
            f"Raise timeouts.phase.reward to {_over(_reward_s(t))} or lower timeout to "
            f"{_under(_caps(t)['reward'] / (t.reward.retries + 1))}."
        ),
    ),
    Relation(
        keys=("node.run_dir", "job.name", "node.name"),
        rule="must leave the path of the daemon's socket, node.run_dir/job.name/node.name/control.sock, at 107 bytes",
        broken=lambda t: len(fsencode(_socket(t, t.node.run_dir))) > SOCKET_BYTES,
        values=lambda t: f"{_socket(t, t.node.run_dir)} has {len(fsencode(_socket(t, t.node.run_dir)))}",
        remedy=lambda t: f"Name a folder of at most {_room(t)} bytes, or shorten job.name or node.name.",
    ),
    Relation(
        keys=("vault.dir", "job.name", "node.name"),
        rule="must leave the path of the vault's socket, vault.dir/job.name/node.name/control.sock, at 107 bytes",
        broken=lambda t: len(fsencode(_socket(t, t.vault.dir))) > SOCKET_BYTES,
        values=lambda t: f"{_socket(t, t.vault.dir)} has {len(fsencode(_socket(t, t.vault.dir)))}",
        remedy=lambda t: f"Name a folder of at most {_room(t)} bytes, or shorten job.name or node.name.",
    ),
    Relation(
        keys=("rollout.dir", "vault.dir", "job.name", "node.name"),
        rule="must leave the path of a rollout engine's socket, rollout.dir/job.name/node.name/engine.sock, at 107 bytes; if "
        "it is null, vault.dir/job.name/node.name.engine/engine.sock",
        broken=lambda t: (
            _generates(t) and t.rollout.engine != "torch" and len(fsencode(_engine_socket(t))) > SOCKET_BYTES
        ),
        values=lambda t: f"{_engine_socket(t)} has {len(fsencode(_engine_socket(t)))}",
        remedy="Name a shorter folder (rollout.dir, or vault.dir where that is null), or shorten job.name or node.name.",
    ),
    # A server that somebody else starts.
    Relation(
        keys=("rollout.server.url", "rollout.engine", "job.program"),
        rule="must be http on this machine's loopback (http://127.0.0.1:8000): weights go to it through a folder of this "
        "machine, and two nodes that gave weights to one server would not know by which it generates",
        broken=lambda t: _generates(t) and t.rollout.engine == "server" and not _on_loopback(t.rollout.server.url),
        values=lambda t: f"it is {t.rollout.server.url}",
        remedy="For a server elsewhere, run a rollout node (node.role: rollout, rollout.nodes) on its machine.",
    ),
    Relation(
        keys=("rollout.temperature", "rollout.engine", "job.program"),
        rule="must be 1 with a server, whose log-probabilities may or may not be at the temperature, as its own flags say",
        broken=lambda t: _generates(t) and t.rollout.engine == "server" and t.rollout.temperature != 1.0,
        values=lambda t: f"it is {t.rollout.temperature:g}",
        remedy="Set temperature: 1, or rollout.engine: vllm.",
    ),
    # Nodes that only generate.
    Relation(
        keys=("node.role", "rollout.nodes", "ppo.algorithm", "job.program"),
        rule="must be train unless rollout.nodes expects nodes that only generate",
        broken=lambda t: t.node.role == "rollout" and not (t.rollout.nodes and _generates(t)),
        values=lambda t: (
            "it is rollout, and rollout.nodes is 0"
            if _generates(t)
            else f"it is rollout, and {t.ppo.algorithm if _ours(t) else t.job.program} asks no engine of ours"
        ),
        remedy=lambda t: "Set rollout.nodes: 1 on all nodes, or role: train." if _generates(t) else "Set role: train.",
    ),
    Relation(
        keys=("rollout.engine", "rollout.nodes", "ppo.algorithm", "job.program"),
        rule="must be served, vllm or server with rollout.nodes: torch generates in the worker",
        broken=lambda t: _generates(t) and t.rollout.nodes > 0 and t.rollout.engine == "torch",
        values=lambda t: f"it is torch, with {t.rollout.nodes} rollout nodes",
        remedy="Set engine: served for the same bits from an engine elsewhere, or nodes: 0.",
    ),
    Relation(
        keys=(
            "rollout.engine",
            "model.value_head",
            "model.strategy",
            "placement.actor.strategy",
            "ppo.algorithm",
            "job.program",
        ),
        rule="must be served, vllm or server with a tied value head under fsdp: torch would generate past the head's gathering",
        broken=lambda t: _generates(t) and t.rollout.engine == "torch" and _tied_apart(t),
        values="it is torch, with value_head: tied, and fsdp shards the actor",
        remedy="Set engine: served for the same bits from a process of its own, or value_head: separate.",
    ),
    Relation(
        keys=("rollout.sync_transport", "rollout.nodes"),
        rule="must be auto or ipc beside the workers, and with rollout.nodes anything but ipc",
        broken=lambda t: (
            t.rollout.sync_transport != "auto" and (t.rollout.sync_transport == "ipc") == (t.rollout.nodes > 0)
        ),
        values=lambda t: f"it is {t.rollout.sync_transport}, with {t.rollout.nodes} rollout nodes",
        remedy="Set sync_transport: auto.",
    ),
    Relation(
        keys=("ppo.importance_limit", "rollout.staleness", "ppo.algorithm", "job.program"),
        rule="should be given with rollout.staleness: samples are from the weights of a step before",
        broken=lambda t: _generates(t) and t.rollout.staleness > 0 and t.ppo.importance_limit is None,
        values="it is null, so those samples are weighed as if they were the present weights' own",
        remedy="Set importance_limit: 2.",
        level="warning",
    ),
    Relation(
        keys=("ppo.importance_mode", "ppo.importance_floor", "ppo.importance_limit", "ppo.algorithm", "job.program"),
        rule="must not be given without importance_limit (importance_floor likewise): there is no correction then",
        broken=lambda t: (
            _generates(t)
            and t.ppo.importance_limit is None
            and (t.ppo.importance_mode != "token_truncate" or t.ppo.importance_floor > 0)
        ),
        values=lambda t: (
            f"it is {t.ppo.importance_mode}, with importance_floor {t.ppo.importance_floor:g} and importance_limit null"
        ),
        remedy="Set importance_limit (5 with a floor of 0.5 is IcePop), or remove importance_mode and importance_floor.",
    ),
    Relation(
        keys=("ppo.importance_floor", "ppo.importance_limit", "ppo.algorithm", "job.program"),
        rule="must be below importance_limit: no weight lies between them, and masks would leave every token out",
        broken=lambda t: (
            _generates(t) and t.ppo.importance_limit is not None and t.ppo.importance_floor >= t.ppo.importance_limit
        ),
        values=lambda t: f"{t.ppo.importance_floor:g} is not below {t.ppo.importance_limit:g}",
        remedy="Lower importance_floor, or raise importance_limit.",
    ),
    Relation(
        keys=("rollout.stale_share", "rollout.staleness", "ppo.algorithm", "job.program"),
        rule="must be 1 unless rollout.staleness is 1: a longer period generates whole batches",
        broken=lambda t: _generates(t) and t.rollout.stale_share < 1.0 and t.rollout.staleness != 1,
        values=lambda t: f"it is {t.rollout.stale_share:g}, and staleness is {t.rollout.staleness}",
        remedy="Set staleness: 1, or remove stale_share.",
    ),
    Relation(
        keys=("rollout.stale_share", "ppo.batch", "ppo.group", "lanes.count", "ppo.algorithm", "job.program"),
        rule="must be large enough for one group of each lane's samples",
        broken=lambda t: _generates(t) and t.rollout.staleness == 1 and not _ahead(t),
        values=lambda t: (
            f"it is {t.rollout.stale_share:g}, and a batch of {t.ppo.generated} has "
            f"{_groups(t)} groups of {t.ppo.group} in each of {t.lanes.count} lanes"
        ),
        remedy="Remove stale_share, or write a larger batch.",
    ),
    Relation(
        keys=("rollout.staleness", "placement.actor.strategy", "model.strategy", "rollout.engine", "job.program"),
        rule="must be 0 or 1 with strategy deepspeed: it cuts the weights up in a way that cannot be kept beside them",
        broken=lambda t: (
            _generates(t)
            and t.rollout.staleness > 1
            and t.rollout.engine != "torch"
            and (t.placement.actor.strategy or t.model.strategy) == "deepspeed"
        ),
        values=lambda t: f"it is {t.rollout.staleness}",
        remedy="Set staleness: 1, or strategy: fsdp.",
    ),
    Relation(
        keys=("placement.ref.where", "placement.reward.where", "rollout.nodes"),
        rule="must be train without rollout nodes (placement.reward.where likewise)",
        broken=lambda t: bool(_away(t)) and not (t.rollout.nodes and _generates(t)),
        values=lambda t: f"{' and '.join(_away(t))} would live where no node is",
        remedy="Set rollout.nodes, or where: train.",
    ),
    Relation(
        keys=("placement.reward.where", "reward.model"),
        rule="must be train unless reward.model names a model: functions and endpoints are asked by the trainer",
        broken=lambda t: t.placement.reward.where == "rollout" and t.reward.model is None,
        values=lambda _: "there is no reward.model",
        remedy="Set where: train.",
    ),
    Relation(
        keys=(
            "placement.ref.strategy",
            "placement.ref.offload",
            "placement.reward.strategy",
            "placement.reward.offload",
        ),
        rule="must be at its default for a role on rollout nodes, where it is whole and stays on its device",
        broken=lambda t: bool(_spread_away(t)),
        values=lambda t: f"{' and '.join(_spread_away(t))} is to live on rollout nodes",
        remedy="Remove strategy and offload, or set where: train.",
    ),
)


def _rungs(t: Tree) -> list[float]:
    return [t.recovery.reform_s, t.recovery.replace_s, t.recovery.restart_s, t.recovery.reload_s]


def _ahead(t: Tree) -> int:
    """How many groups of a lane's samples are generated ahead."""
    return int(_groups(t) * t.rollout.stale_share)


def _groups(t: Tree) -> int:
    """Of how many groups a lane has all samples, or its part of them."""
    return t.ppo.generated // t.lanes.count // t.ppo.part(t.lanes.count)
