"""What this node's agent is told of the workers to come: their program, their environment, and the configuration that they see.

The one idea: all of it follows from the configuration and from where this node's things lie, so it is said again, and the same,
to every agent that comes. What is the daemon's alone, such as a password, never gets there.
"""

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from elasticrl.agent.spec import FORKING, PRELOAD, Spec
from elasticrl.config import Tree, dumps
from elasticrl.config.cluster import Web
from elasticrl.contract.level import means_of
from elasticrl.contract.settings import Timeouts
from elasticrl.daemon.roll import NAME as ROLL
from elasticrl.daemon.vault import folder_of
from elasticrl.diagnose import witness
from elasticrl.diagnose.program import imports

RUNTIME: Final = "elasticrl.runtime.run"  # by name: the daemon knows nothing of what runs
# Programs of ours, and what they import: with it a spare is in its gang in milliseconds instead of seconds.
OWN: Final = {"elasticrl.ppo": ("elasticrl.ppo.__main__", "transformers.models.qwen2.modeling_qwen2")}
KEPT: Final = "elasticrl.runtime.kept"  # for scripts whose state is kept: a second
FSDP: Final = "elasticrl.runtime.fsdp"  # for jobs that use it: half a second
# Likewise: a second of each fresh process, for which all others wait as their gang forms.
TEAMS: Final = ("torch.distributed.tensor.parallel", "torch.distributed.tensor.debug")
AHEAD: Final = "elasticrl.runtime.checkpoint.ahead"  # its fork writes a worker's checkpoints
FINGERPRINT: Final = "elasticrl.runtime.bits"


def spec_of(
    tree: Tree, *, node: str, host: str, home: Path, logs: Path, timeouts: Timeouts, led: tuple[int, ...]
) -> Spec:
    """What the agent is told. `led`: it ends with the last of these processes; none: it outlives them."""
    program = (tree.job.program,) if tree.job.program.endswith(".py") else ("-m", tree.job.program)
    strategies = {
        tree.model.strategy,
        *(role.strategy for role in (tree.placement.actor, tree.placement.critic) if role),
    }
    means = means_of(tree.job.level)
    script = not means.joins
    own = (
        *(name for name in (RUNTIME, AHEAD) if there(RUNTIME)),
        *OWN.get(tree.job.program, ()),
        *((FSDP,) if "fsdp" in strategies else ()),
        *(TEAMS if tree.model.tp > 1 else ()),
    )
    return Spec(
        job=tree.job.name,
        node=node,
        slots=tree.node.workers,
        program=program,
        args=tree.job.args,
        log_dir=str(logs),
        host=host,
        interface=tree.node.interface or "",
        spares=tree.agent.spares,
        threads=tree.lanes.threads,
        preload=(*PRELOAD, *(() if script else own), *((KEPT,) if script and means.keeps else ()), *tree.agent.preload),
        script=script,
        reads=script and not means.tells,
        progress=tree.agent.progress or "",
        unset=tuple(name for name in FORKING if script and name not in {**os.environ, **tree.agent.env}),
        imports=imports(program[-1]) if tree.agent.script_imports and tree.job.program not in OWN else (),
        load_ahead=tree.agent.load_ahead,
        on_cards=tree.node.device != "cpu",
        grace_s=tree.recovery.grace_s,
        fingerprint=FINGERPRINT,
        ahead=AHEAD if there(RUNTIME) and not script else "",
        config=dumps(for_workers(tree)),
        env=worker_env(tree, node, home),
        stop_s=tree.agent.stop_timeout_s,
        log_limit_bytes=tree.agent.log_limit_bytes,
        log_keep=tree.agent.log_keep,
        led=led,
        timeouts=timeouts,
    )


def worker_env(tree: Tree, node: str, home: Path) -> dict[str, str]:
    """What workers find in their environment beside ours. What the operator has set himself, here or there, wins."""
    ours = {
        "ELASTICRL_VAULT": str(folder_of(tree.vault.dir, tree.job.name, node)),
        **({"ELASTICRL_ROLLOUTS": str(home / ROLL)} if tree.rollout.nodes else {}),
        **witness.environment(tree.comm.recorder),
        # Libraries that look for cards find none: a job on processors has no business in a card's memory.
        **({"CUDA_VISIBLE_DEVICES": ""} if tree.node.device == "cpu" else {}),
    }
    profile = {}
    if tree.comm.profile != "none":
        from elasticrl.diagnose import environment

        profile = environment.PROFILES[tree.comm.profile].apply({**os.environ, **tree.agent.env})
    return {**ours, **profile, **tree.agent.env}


def for_workers(tree: Tree) -> Tree:
    """The configuration as workers find it in a file: a password never gets there, and a user without one would be refused."""
    if tree.web.token is not None:
        tree = tree.model_copy(update={"web": Web()})  # likewise: an address for all without its token
    if tree.store.password is None:
        return tree
    return tree.model_copy(update={"store": tree.store.model_copy(update={"username": None, "password": None})})


def there(module: str) -> bool:
    """Can this be imported? (A program of somebody's own may come without the trainer.)"""
    try:
        return find_spec(module) is not None
    except ImportError:
        return False
