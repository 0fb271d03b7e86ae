"""What the fork server does before it forks anyone: import all that a worker will need, once for all of them.

The rules of forking, each learned from children that hung: no parallel torch operation, no TCPStore, no channel of gRPC and no
thread before the fork. `prepare` checks the last; the others are kept by only importing here.
"""

import contextlib
import ctypes
import gc
import importlib
import multiprocessing
import multiprocessing.forkserver
import os
import signal
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import Final

FORK_SERVER: Final = "ELASTICRL_FORK_SERVER"  # in the fork server's environment: the agent's pid, and what to import
KEPT: Final = ("jemalloc_bg_thd",)  # threads that come again by themselves after a fork: pyarrow's allocator has one
PARENT: Final = "ELASTICRL_PARENT"  # in a worker's: whose death is its own

_libc = ctypes.CDLL(None, use_errno=True)
_PR_SET_PDEATHSIG: Final = 1

failure: str = (
    ""  # why the imports did not succeed; every worker then fails with it, instead of the server over and over
)


def die_with(parent: int) -> None:
    """The kernel kills this process when its parent ends, stopped or not."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died before we could ask
        os._exit(1)


def load(modules: Iterable[str]) -> None:
    """Import them, in this order."""
    for name in modules:
        importlib.import_module(name)


def lost(threads: Iterable[str]) -> list[str]:
    """Those of a process's threads that a fork would lose, this one among them."""
    return [name for name in threads if name not in KEPT]


def prepare(agent: int, modules: Iterable[str]) -> None:
    """Make this process a fork server of the agent."""
    global failure  # noqa: PLW0603 - read in the children
    die_with(agent)
    os.environ[PARENT] = str(os.getpid())
    try:
        load(modules)
    except Exception:  # noqa: BLE001 - a program's module may raise anything; its workers will tell
        failure = traceback.format_exc()
    threads = lost([(task / "comm").read_text(encoding="utf-8").strip() for task in Path("/proc/self/task").iterdir()])
    if len(threads) > 1:
        failure = failure or (
            f"importing {', '.join(modules)} has started threads ({', '.join(sorted(threads))}), which a fork would lose: "
            "import less beforehand (agent.preload)"
        )
    gc.collect()
    gc.freeze()  # children then do not copy these pages only because the collector looks at them


def start_server(modules: Iterable[str]) -> None:
    """In the agent: start the fork server, which gets warm while the agent imports torch for itself."""
    os.environ[FORK_SERVER] = f"{os.getpid()}:{','.join(('elasticrl.agent.worker', *modules))}"
    multiprocessing.set_forkserver_preload(["elasticrl.agent.warm"])
    multiprocessing.forkserver.ensure_running()


if _told := os.environ.pop(FORK_SERVER, ""):
    _agent, _, _modules = _told.partition(":")
    with contextlib.suppress(ValueError):
        prepare(int(_agent), [name for name in _modules.split(",") if name])
