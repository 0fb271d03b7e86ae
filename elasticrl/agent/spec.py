"""What an agent is told at its start, once: which program its workers run, how many, where their output goes.

The daemon writes it as JSON (`dump`) into the runtime directory; everything that changes later comes as orders.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import field
from functools import cache
from pathlib import Path
from typing import Final

from pydantic import TypeAdapter, ValidationError

from elasticrl.base.inherited import inherited
from elasticrl.base.value import dataclass
from elasticrl.contract.settings import Timeouts

# Asking all installed packages whether they have a plugin for pydantic takes a fifth of a daemon's start, and would bring in
# code that it has no use for; a worker's program may have.
NO_PLUGINS: Final = ("PYDANTIC_DISABLE_PLUGINS", "__all__")

# What the fork server imports, so that its children need not; the trainer's own entry brings the rest.
PRELOAD: Final = ("torch", "torch.distributed", "torch.optim")
# What it imports when nobody waits for it any more: a second's worth of what the first checkpoint to be committed needs, and of
# what torch's optimizers do, which many jobs never have.
LATER: Final = ("torch.distributed.checkpoint.filesystem", "torch._dynamo")

# Libraries that start threads as they are imported, which a fork would lose, start none where these are 1.
FORKING: Final = ("OPENBLAS_NUM_THREADS", "TORCHINDUCTOR_COMPILE_THREADS")

# By this torch's allocator asks for huge pages, from 2 MB on.
HUGE_PAGES: Final = "THP_MEM_ALLOC_ENABLE"
# The size from which a virtual machine gives free memory back to its host, as a power of two of pages. Where it does not, the
# kernel says -1, and from 5.14 to 6.0 one more than the largest there is, which was 11.
NO_ORDER: Final = 11
REPORTED: Final = Path("/sys/module/page_reporting/parameters/page_reporting_order")


class BadSpec(ValueError):
    """The agent's spec cannot be used; the sentence says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """One node's workers.

    Example: Spec(job="ppo-7b", node="n03", slots=8, program=("-m", "elasticrl.ppo"), args=("run.yaml",),
        log_dir="/var/log/elasticrl/ppo-7b")
    """

    job: str
    node: str
    program: tuple[str, ...]  # ("train.py",) or ("-m", "package.module")
    args: tuple[str, ...] = ()
    slots: int = 1
    log_dir: str
    host: str = "127.0.0.1"  # where other nodes reach this one's TCPStore
    interface: str = ""  # for gloo and NCCL; "": theirs to choose
    preload: tuple[str, ...] = PRELOAD  # before the first worker
    later: tuple[str, ...] = LATER  # when the first gang trains, for all workers after it
    # A worker process computes what decides its bits, once for each agent; by name, as the agent knows nothing of what it runs.
    fingerprint: str = ""  # the module with `bits()` and `versions()`; "": nobody asks
    ahead: str = ""  # the module whose `fork()` each worker process calls while it has no threads; "": there is none
    config: str = (
        ""  # the effective configuration as a file's text, secrets removed; workers find it at ELASTICRL_CONFIG
    )
    spares: int = 1  # warm processes kept while training; none is kept for 0
    threads: int = 1  # per worker, the same for every world size: another number computes other bits
    env: Mapping[str, str] = field(default_factory=dict)
    script: bool = False  # the program is one as torchrun would run it: nothing in it asks for its rank
    reads: bool = False  # and its log is read for how far it is
    progress: str = ""  # by this regular expression; "": by the table of diagnose.progress
    unset: tuple[str, ...] = ()  # of FORKING: what a script's own process has not in its environment
    imports: tuple[str, ...] = ()  # what a spare imports while nobody waits for it: "module", or "module:name"
    load_ahead: bool = False  # a spare process runs the program as far as it comes without a rank
    on_cards: bool = True  # its workers hold memory of GPUs: others can begin only when they have really ended
    grace_s: float = 10.0  # with `script`: from SIGTERM to SIGKILL
    stop_s: float = 5.0  # from asking a healthy worker to end until it is killed
    log_limit_bytes: int = 64 * 1024 * 1024
    log_keep: int = 5
    led: tuple[int, ...] = ()  # end without a daemon when these processes have ended; none: wait for the next daemon
    timeouts: Timeouts = field(default_factory=Timeouts)


@cache
def _spec() -> TypeAdapter[Spec]:
    return TypeAdapter(Spec)


def dump(spec: Spec) -> str:
    """As JSON."""
    return json.dumps(_spec().dump_python(spec, mode="json"), indent=1)


def environment(spec: Spec) -> dict[str, str]:
    """What the agent runs in: `common_env`, and ours without what only the daemon itself wants."""
    theirs = dict(inherited(os.environ).items() - {NO_PLUGINS})
    return {"NCCL_DEBUG": "WARN"} | theirs | common_env(spec)  # its warnings are read as evidence


def load(path: Path) -> Spec:
    """From a file, or BadSpec."""
    try:
        return _spec().validate_json(path.read_bytes())
    except OSError as error:
        raise BadSpec(f"the agent's spec cannot be read: {error}") from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise BadSpec(f"the agent's spec {path} is wrong at {where or 'its top'}: {first['msg']}") from None


def common_env(spec: Spec) -> dict[str, str]:
    """What all of this node's processes have in their environment, whatever the world size.

    torchrun sets OMP_NUM_THREADS only where a node has several workers, and so computes other bits on a node that has one.
    """
    if spec.script:
        return _as_torchrun(spec)
    threads = str(spec.threads)
    pools = (
        "OMP_NUM_THREADS",
        "MKL_NUM_THREADS",
        "OPENBLAS_NUM_THREADS",
        "NUMEXPR_NUM_THREADS",
        "VECLIB_MAXIMUM_THREADS",
    )
    return {
        **dict.fromkeys(pools, threads),
        # c10d's default and torchrun's (1) tear the process down at the first broken collective. A survivor must outlive it:
        # only the runtime aborts communicators (0; see runtime.group), and the watchdog's monitor does not end the process.
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
        "TORCH_NCCL_ENABLE_MONITORING": "0",
        "NCCL_RUNTIME_CONNECT": "0",  # connect while the gang forms, not in the middle of a call
        "NCCL_HOSTID": f"{spec.job}.{spec.node}",  # nodes that share a machine may share a GPU: NCCL refuses that of one host
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # without it cuBLAS's sums depend on what else the GPU does
        "FLASH_ATTENTION_DETERMINISTIC": "1",  # without it flash-attn adds in any order backwards, unseen by torch
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # asking CUDA itself before the fork would break it in the children
        "TORCHINDUCTOR_COMPILE_THREADS": threads,  # else importing it may start threads, and a fork would lose them
        # A fresh process touches gigabytes of new memory until its first step is made: a fault for each 4 kB, or for each 2 MB.
        HUGE_PAGES: os.environ.get(HUGE_PAGES, str(int(not gives_back()))),
        "TOKENIZERS_PARALLELISM": "false",  # its threads would be lost in a spare that is forked
        **_ours(spec),
    }


def gives_back(order: Path = REPORTED) -> bool:
    """Does this machine give free memory back to a host? Then what is free in pieces of 2 MB is what the host has to find anew:
    measured on such a machine, huge pages of new memory take five times as long as small ones.
    """
    try:
        return 0 <= int(order.read_text()) < NO_ORDER
    except (OSError, ValueError):
        return False


def _as_torchrun(spec: Spec) -> dict[str, str]:
    """What torchrun sets, and nothing that would make a script compute otherwise than under torchrun."""
    threads = {"OMP_NUM_THREADS": "1"} if spec.slots > 1 and "OMP_NUM_THREADS" not in os.environ else {}
    return {
        **threads,
        **dict.fromkeys(spec.unset, "1"),
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # asking CUDA itself before the fork would break it in the children
        **_ours(spec),
    }


def _ours(spec: Spec) -> dict[str, str]:
    """By what a process knows that it is ours, the network to use, and what the operator has set."""
    net = {"GLOO_SOCKET_IFNAME": spec.interface, "NCCL_SOCKET_IFNAME": spec.interface} if spec.interface else {}
    return {"ELASTICRL_JOB": spec.job, "ELASTICRL_NODE": spec.node, **net, **spec.env}
