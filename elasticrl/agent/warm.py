"""What the fork server does before it forks anyone: import what a worker will need, once for all of them. What only some will,
it imports when nobody waits for its children any more.

It is a fork of the agent itself, as soon as that has imported what both of them need of torch: a node pays for it once, in
seconds and in memory. One that died is started anew as multiprocessing does it, as by then the agent has threads.

The rules of forking, each learned from children that hung: no parallel torch operation, no TCPStore, no channel of gRPC and no
thread before the fork. `prepare` checks the last; the others are kept by only importing here.
"""

import atexit
import contextlib
import gc
import importlib
import inspect
import multiprocessing
import multiprocessing.forkserver
import os
import signal
import socket
import sys
import threading
import traceback
import types
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from elasticrl.base.parent import die_with
from elasticrl.base.title import title

SHARED: Final = ("torch.distributed",)  # what an agent and its workers both import, and is most of what an agent does
FORK_SERVER: Final = "ELASTICRL_FORK_SERVER"  # in the fork server's environment: the agent's pid, and what to import
KEPT: Final = ("jemalloc_bg_thd",)  # threads that come again by themselves after a fork: pyarrow's allocator has one
PARENT: Final = "ELASTICRL_PARENT"  # in a worker's: whose death is its own
COMPLETE: Final = signal.SIGUSR1  # to a fork server: import the rest; from it: that is done
SPOILT: Final = signal.SIGUSR2  # from it: that has started threads, so nobody can be forked from it any more

_before: list[int] = []  # what keeps fork servers alive that were renewed
failure: str = (
    ""  # why the imports did not succeed; every worker then fails with it, instead of the server over and over
)


def load(modules: Iterable[str]) -> None:
    """Import them, in this order, without looking for garbage on the way: a tenth of the time, and there is none."""
    gc.disable()
    try:
        for name in modules:
            importlib.import_module(name)
    finally:
        gc.enable()


def lost(threads: Iterable[str]) -> list[str]:
    """Those of a process's threads that a fork would lose, this one among them."""
    return [name for name in threads if name not in KEPT]


def own_threads() -> list[str]:
    """The names of this process's."""
    return [(task / "comm").read_text(encoding="utf-8").strip() for task in Path("/proc/self/task").iterdir()]


def load_later(modules: Iterable[str]) -> None:
    """Import what only some need. One that cannot be imported is no fault of those who never use it."""
    for name in modules:
        try:
            module, _, inner = name.partition(":")
            load((module,))
            if inner:  # some packages import what is asked of them, and not before
                getattr(sys.modules[module], inner)
        except Exception as error:  # noqa: BLE001 - a module may raise anything, and who needs it will meet it again
            print(f"{name} is not imported beforehand: {type(error).__name__}: {error}", file=sys.stderr)


def prepare(agent: int, modules: Iterable[str], later: Iterable[str] = ()) -> None:
    """Make this process a fork server of the agent."""
    global failure  # noqa: PLW0603 - read in the children
    die_with(agent)
    title("fork")
    keep_exits()
    os.environ[PARENT] = str(os.getpid())
    try:
        load(modules)
    except Exception:  # noqa: BLE001 - a program's module may raise anything; its workers will tell
        failure = traceback.format_exc()
    ready_to_fork(modules)

    def rest() -> None:
        load_later(later)
        os.kill(agent, COMPLETE if ready_to_fork(later, threads=2) else SPOILT)

    # In a thread, as how children end is told by this one. A child that is asked for meanwhile waits until there is but one.
    importing = threading.Thread(target=rest, name="rest", daemon=True)

    def begin(*_: object) -> None:
        if importing.ident is None:
            importing.start()

    def wait() -> None:
        if importing.is_alive():
            importing.join()

    def forget() -> None:
        if signal.getsignal(COMPLETE) is begin:  # and not the program's own
            signal.signal(COMPLETE, signal.SIG_DFL)

    signal.signal(COMPLETE, begin)
    os.register_at_fork(before=wait, after_in_child=forget)


def keep_exits() -> None:
    """Have children run at exit what was registered before the fork, as `worker.end` does: Python 3.13's fork server has them
    forget it, and with it whatever is registered once for all that comes, as `logging` and `weakref.finalize` do.
    """
    server: Any = multiprocessing.forkserver
    if hasattr(server, "atexit"):
        server.atexit = types.ModuleType("atexit")
        vars(server.atexit).update(vars(atexit), _clear=lambda: None)


def ready_to_fork(modules: Iterable[str], threads: int = 1) -> bool:
    """These were imported, with so many threads: can a child begin with them?"""
    global failure  # noqa: PLW0603 - a child is a fork and reads it there: it has no other way to hear
    names = lost(own_threads())
    if len(names) > threads:
        failure = failure or (
            f"importing {', '.join(modules)} has started threads ({', '.join(sorted(names))}), which a fork would lose: "
            "import less beforehand (agent.preload)"
        )
    gc.collect()
    gc.freeze()  # children then do not copy these pages only because the collector looks at them
    return len(names) <= threads


def complete(server: int) -> bool:
    """Have a fork server import the rest. It answers with the same signal; a child that is asked for meanwhile waits.

    False: it is gone, or is not through with the first part yet, and the signal would end it.
    """
    from elasticrl.diagnose.witness import (
        listens,  # of the agent's alone: this module is the first that a fork server imports
    )

    if not listens(server, COMPLETE):
        return False
    with contextlib.suppress(ProcessLookupError):
        os.kill(server, COMPLETE)
        return True
    return False


def start_server(modules: Iterable[str], later: Iterable[str], address: Path) -> None:
    """In the agent, before it has threads: start the fork server, which gets warm while the agent goes on and listens here."""
    load(SHARED)
    wanted = ("elasticrl.agent.worker", *modules)
    multiprocessing.set_forkserver_preload(["elasticrl.agent.warm"])
    wants_key = "authkey_r" in inspect.signature(multiprocessing.forkserver.main).parameters  # as Python 3.14's does
    forked = not wants_key and len(lost(own_threads())) == 1
    if forked:
        _fork(wanted, later, address)
    os.environ[FORK_SERVER] = f"{os.getpid()}:{','.join(wanted)}:{','.join(later)}"  # for one that is started anew
    if not forked:
        multiprocessing.forkserver.ensure_running()


def _fork(modules: Iterable[str], later: Iterable[str], address: Path) -> None:
    """What `ensure_running` does, with a fork of this process in place of a new Python."""
    server: Any = multiprocessing.forkserver._forkserver  # noqa: SLF001 - told below which server runs: it has no other way
    agent = os.getpid()
    alive, held = os.pipe()
    gc.collect()
    gc.freeze()
    with socket.socket(socket.AF_UNIX) as listener:
        address.unlink(missing_ok=True)
        listener.bind(str(address))
        address.chmod(0o600)
        listener.listen()
        pid = os.fork()
        if pid == 0:
            try:
                _keep_only(0, 1, 2, listener.fileno(), alive)
                prepare(agent, modules, later)
                multiprocessing.forkserver.main(listener.fileno(), alive, [])  # until the agent ends
            except Exception:  # noqa: BLE001 - nothing of the agent's may run in its fork
                traceback.print_exc()
            finally:
                os._exit(0)
    os.close(alive)
    # As ensure_running leaves them; test_agent_processes notices when a later Python names them otherwise.
    server._forkserver_address, server._forkserver_alive_fd, server._forkserver_pid = str(address), held, pid  # noqa: SLF001


def renew() -> None:
    """In the agent: have another fork server, which imports less. The one before stays, as its children would die with it: they
    import the rest by themselves.
    """
    ours: Any = multiprocessing.forkserver._forkserver  # noqa: SLF001 - it has no way to be told
    _before.append(ours._forkserver_alive_fd)  # noqa: SLF001
    ours._forkserver_address = ours._forkserver_alive_fd = ours._forkserver_pid = None  # noqa: SLF001
    os.environ[FORK_SERVER] = os.environ[FORK_SERVER].rpartition(":")[0] + ":"
    multiprocessing.forkserver.ensure_running()


def server() -> int:
    """The fork server that the newest process was started by. multiprocessing tells nobody."""
    return int(multiprocessing.forkserver._forkserver._forkserver_pid or 0)  # type: ignore[attr-defined]  # noqa: SLF001


def _keep_only(*descriptors: int) -> None:
    """Close all others: the agent's lock among them, which would outlive the agent."""
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 - the folder's own descriptor is closed by now
        if int(name) not in descriptors:
            with contextlib.suppress(OSError):
                os.close(int(name))


if _told := os.environ.pop(FORK_SERVER, ""):
    _agent, *_both = _told.split(":")
    with contextlib.suppress(ValueError):
        prepare(int(_agent), *([name for name in _names.split(",") if name] for _names in _both))
