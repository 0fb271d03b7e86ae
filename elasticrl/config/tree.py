"""The tree: all sections of one configuration, and the ways to hand it on.

A tree is frozen. It leaves this process as the very keys and texts of a file (`dumps`), without its secrets, so that what
a worker is handed, what a manifest's hash covers and what `config show` prints are one thing.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping

from elasticrl.config.cluster import (
    Agent,
    Audit,
    Checkpoint,
    Comm,
    Health,
    Job,
    Lanes,
    Membership,
    Node,
    Policy,
    Recovery,
    Store,
    Telemetry,
    Timeouts,
    Vault,
    Web,
)
from elasticrl.config.section import Leaf, Section, key_of, leaf_of
from elasticrl.config.training import Data, Environment, Evaluate, Model, Placement, Ppo, Reward, Rollout


class Tree(Section):
    """The configuration of one job on one node."""

    job: Job
    node: Node = Node()
    store: Store = Store()
    membership: Membership = Membership()
    recovery: Recovery = Recovery()
    timeouts: Timeouts = Timeouts()
    lanes: Lanes = Lanes()
    audit: Audit = Audit()
    vault: Vault = Vault()
    checkpoint: Checkpoint = Checkpoint()
    health: Health = Health()
    policy: Policy = Policy()
    comm: Comm = Comm()
    agent: Agent = Agent()
    telemetry: Telemetry = Telemetry()
    web: Web = Web()
    ppo: Ppo = Ppo()
    model: Model = Model()
    placement: Placement = Placement()
    reward: Reward = Reward()
    environment: Environment = Environment()
    rollout: Rollout = Rollout()
    evaluate: Evaluate = Evaluate()
    data: Data = Data()


def run_dir(tree: Tree, node: str) -> str:
    """Where a node finds its job's checkpoints, ledger and chronicle. Where each has a disk of its own, its name is in it: so
    several on one machine do not meet, and folders that were put side by side are one run.
    """
    where = f"{tree.checkpoint.dir.rstrip('/')}/{tree.job.name}"
    return where if tree.checkpoint.shared else f"{where}/{node}"


def values(tree: Tree) -> Mapping[str, object]:
    """Every key with its value, as the code holds it."""
    return dict(_values(tree, ""))


def _values(section: Section, prefix: str) -> Iterator[tuple[str, object]]:
    for name in type(section).model_fields:
        key, value = f"{prefix}{key_of(name)}", getattr(section, name)
        if isinstance(value, Section):
            yield from _values(value, f"{key}.")
        else:
            yield key, value
    for name, value in sorted((section.model_extra or {}).items()):
        yield f"{prefix}{name}", value


def leaf(key: str) -> Leaf:
    """That of a key which `values` has."""
    found = leaf_of(Tree, key)
    assert found is not None, f"{key} is no key"
    return found


def dumps(tree: Tree) -> str:
    """The tree as JSON that `loads` reads back to an equal tree, but for secrets, which are left out."""
    return _dumped(values(tree))


def _dumped(found: Mapping[str, object]) -> str:
    root: dict[str, object] = {}
    for key, value in found.items():
        if not leaf(key).secret:
            put(root, leaf(key).path, leaf(key).plain(value))
    return json.dumps(root, sort_keys=True, allow_nan=False)


def loads(text: str) -> Tree:
    """What `dumps` wrote. It was checked before it was written; a damaged one raises pydantic's ValidationError."""
    return Tree.model_validate_json(text)


def digest(tree: Tree) -> str:
    """Names this configuration, secrets apart: the config hash of manifests. Where the job runs is left out: a node's own keys
    differ between nodes, and under Slurm between runs, and `elasticrl run` starts a store at another port each time.
    """
    lasting = {key: value for key, value in values(tree).items() if not key.startswith(("node.", "store."))}
    return hashlib.sha256(_dumped(lasting).encode()).hexdigest()


def put(root: dict[str, object], path: tuple[str, ...], value: object) -> None:
    """Set a value at a path, making the dictionaries on the way."""
    for name in path[:-1]:
        inner = root.setdefault(name, {})
        assert isinstance(inner, dict)
        root = inner
    root[path[-1]] = value
