"""What a worker knows of its job before it does anything: the configuration, its node, and where state is kept.

The one idea: under a daemon everything comes from one file that the daemon wrote (ELASTICRL_CONFIG); alone it comes from a file
that the script names, or from nothing but defaults. What the rest of the runtime reads is this one value.
"""

from __future__ import annotations

import os
import re
import socket
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from elasticrl.config import Tree, digest, load, loads, run_dir
from elasticrl.runtime.lone import mark
from elasticrl.runtime.vault.slots import word

CONFIG = "ELASTICRL_CONFIG"  # the path of the configuration, as the daemon uses it
VAULT = "ELASTICRL_VAULT"  # this node's vault
NODE = "ELASTICRL_NODE"


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """One worker's job.

    Example: Context(tree=load("job.yaml"), node="n03", vault=Path("/dev/shm/elasticrl/ppo-7b/n03"), alone=False)
    """

    tree: Tree
    node: str
    vault: Path
    alone: bool  # no daemon: a world of one, and nobody to commit

    @property
    def job(self) -> str:
        """Its name."""
        return self.tree.job.name

    @property
    def run_dir(self) -> str:
        """Where checkpoints, ledger and chronicle go."""
        return run_dir(self.tree, self.node)

    @property
    def own_disk(self) -> bool:
        """Whether a gang's nodes have disks of their own, of which nobody sees another's."""
        return not self.tree.checkpoint.shared and not self.alone

    @property
    def notes_dir(self) -> Path:
        """Ledger and chronicle are appended to line by line, which no object store can: those stay beside the state."""
        remote = "://" in self.run_dir
        return Path(self.tree.node.state_dir) / self.job if remote else Path(self.run_dir)

    @property
    def node_dir(self) -> Path:
        """This node's own folder, which outlives its workers."""
        return Path(self.tree.node.state_dir) / self.job / self.node

    @property
    def config(self) -> str:
        """A hash of the configuration, for manifests."""
        return digest(self.tree)

    @property
    def backend(self) -> Literal["elastic", "nccl"]:
        """What carries the collectives."""
        wanted = self.tree.comm.backend
        return "nccl" if wanted == "nccl" or (wanted == "auto" and self.device == "cuda") else "elastic"

    @property
    def device(self) -> str:
        """Where this worker computes."""
        wanted = self.tree.node.device
        if wanted != "auto":
            return wanted
        import torch

        return "cuda" if torch.cuda.is_available() else "cpu"


def context(config: Path | str | Tree | None, *, seated: bool) -> Context:
    """From what the daemon left in the environment; else from `config`; else defaults, named after the script."""
    told = os.environ.get(CONFIG)
    if told:
        tree = loads(Path(told).read_text(encoding="utf-8"))
    elif config is None:
        tree = Tree.model_validate({"job": {"name": _named(sys.argv[0])}, "checkpoint": {"dir": "run"}})
    elif isinstance(config, (str, Path)):
        tree = load(config)
    else:
        tree = config
    node = os.environ.get(NODE) or tree.node.name or socket.gethostname()
    vault = os.environ.get(VAULT)
    place = Path(vault) if vault else Path(tree.vault.dir) / word(tree.job.name) / word(node)
    found = Context(tree=tree, node=node, vault=place, alone=not seated)
    return found if seated or vault else replace(found, vault=place.with_name(mark(found.notes_dir)))


def _named(script: str) -> str:
    """A job's name from a file's.

    >>> _named("examples/train_grpo.py"), _named("")
    ('train-grpo', 'alone')
    """
    return re.sub("[^a-z0-9]+", "-", Path(script).stem.lower())[:63].strip("-") or "alone"
