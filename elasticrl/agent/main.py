"""`python -m elasticrl.agent --runtime-dir DIR --spec SPEC.json`: the agent of one node, a process of its own.

It alone starts and reaps workers. It is independent of the daemon, which may die, be upgraded and come back; its own death
ends its workers. `agent.sock` in the runtime directory is where a daemon leads it.
"""

import argparse
import fcntl
import logging
import os
import signal
import sys
from pathlib import Path

from elasticrl.agent import warm
from elasticrl.agent.spec import BadSpec, common_env, load
from elasticrl.base.owned import write_private
from elasticrl.base.title import title
from elasticrl.shell.notify import Notify

CONFIG = "config.yaml"  # the effective configuration, for the workers


def main() -> int:
    """Serve until told to quit. Exit codes: 0 ended as asked, 2 cannot begin."""
    parser = argparse.ArgumentParser(prog="python -m elasticrl.agent", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--runtime-dir", type=Path, required=True)
    parser.add_argument("--spec", type=Path, required=True)
    options = parser.parse_args()
    title("agent")
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # which Python would make an exception of, in the middle of an import
    runtime: Path = options.runtime_dir.resolve()
    try:
        spec = load(options.spec)
    except BadSpec as error:
        print(error, file=sys.stderr)
        return 2
    runtime.mkdir(parents=True, exist_ok=True, mode=0o700)
    with (runtime / "agent.lock").open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            print(f"an agent runs here already ({runtime}); stop it, or use another runtime directory", file=sys.stderr)
            return 2
        notify = Notify()
        os.environ.pop("NOTIFY_SOCKET", None)  # it is this process's alone
        os.environ.update(common_env(spec))  # before torch is imported: thread pools read it then
        if spec.config:
            # Not the daemon's file: one that changes under a running gang would let its later processes train by other values.
            write_private(runtime / CONFIG, spec.config)
            os.environ["ELASTICRL_CONFIG"] = str(runtime / CONFIG)
        forks = runtime / "fork.sock"
        warm.start_server(spec.preload, spec.later, forks)
        whose = f"{spec.job}/{spec.node}".replace("%", "%%")
        layout = f"%(asctime)s %(levelname)s {whose} %(name)s %(message)s"
        logging.basicConfig(level=logging.INFO, format=layout, stream=sys.stderr)  # the agent's: workers have their own
        from elasticrl.agent.led_agent import LedAgent

        logging.getLogger("torch.distributed.elastic").setLevel(
            logging.CRITICAL
        )  # how processes end is reported, not logged
        try:
            LedAgent(spec, runtime, notify).run()
        finally:
            forks.unlink(missing_ok=True)
    return 0
