"""A real Slurm on this machine's loopback: munge, a controller, and some nodes, each with a slurmd of its own.

The one idea: everything of it lies in one folder (keys, sockets, state, logs), under ports of its own, and every process dies
with the test that started it: nothing of the machine's own Slurm, if it has one, is read or touched.
"""

import os
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Self

from chaos.live.proc import all_pids, command_line, parent
from chaos.patience import patience
from elasticrl.base.parent import on_parents_death
from elasticrl.store.embedded import free_ports

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel", "squeue", "sinfo")
PATH = "/usr/sbin:/usr/local/bin:/usr/bin:/sbin:/bin"
KILL_WAIT_S = 60  # between TERM and KILL, for a busy machine; Slurm's own default is 30
DEAD_S = 5  # after which a node whose slurmd does not answer is down

CONF = """
ClusterName={name}
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket,cred_expire=10
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
FirstJobId={first}
# No cgroups: they would be the machine's. So a signal reaches every descendant of a step, where proctrack/cgroup sends all but
# KILL to its first process alone.
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
SlurmdTimeout={dead_s}
KillWait={kill_wait_s}
MessageTimeout=5
ReturnToService=2
SchedulerParameters=requeue_delay=1,bf_interval=1,sched_interval=1
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


class Slurm:
    """Some nodes. Use it as a context; it leaves nothing behind."""

    def __init__(self, nodes: int = 3) -> None:
        self.nodes = tuple(f"s{number}" for number in range(nodes))
        self.folder = Path(tempfile.mkdtemp(prefix="elasticrl-slurm-"))  # short: sockets live below it
        self.env = {**os.environ, "PATH": PATH, "SLURM_CONF": str(self.folder / "slurm.conf")}
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._keep = bool(os.environ.get("ELASTICRL_KEEP"))  # leave the folder for somebody to look at

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self._keep = True
            self._end()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self._keep = self._keep or exc[0] is not None
        self._end()

    def _start(self) -> None:
        self.folder.chmod(0o755)  # munge wants to be reachable
        for name in ("munge", "state", "log"):
            (self.folder / name).mkdir(mode=0o755)
        key = self.folder / "munge" / "key"
        key.touch(mode=0o600)
        key.write_bytes(secrets.token_bytes(128))
        ports = [port for _ in range(len(self.nodes) // 2 + 1) for port in free_ports()]
        host = socket.gethostname()
        conf = CONF.format(
            name=self.folder.name.lower().replace("_", "-"), host=host, port=ports.pop(), user=_user(), folder=self.folder,
            first=10_000 + secrets.randbelow(1_000_000), dead_s=DEAD_S, kill_wait_s=KILL_WAIT_S,
            nodes="\n".join(
                f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=2 RealMemory=1000"
                for name, port in zip(self.nodes, ports, strict=False)
            ),
        )  # fmt: skip
        Path(self.env["SLURM_CONF"]).write_text(conf, encoding="utf-8")
        munge = self.folder / "munge"
        self._run(
            "munged", "--foreground", f"--key-file={key}", f"--socket={munge}/socket", f"--pid-file={munge}/pid",
            f"--seed-file={munge}/seed", f"--log-file={munge}/log",
        )  # fmt: skip
        self.until((munge / "socket").is_socket, 10.0, "munge's socket")
        self._run("slurmctld", "-D", "-i")
        for node in self.nodes:
            self.start_node(node)
        self.idle()

    def _run(self, program: str, *args: str, name: str = "") -> None:
        with (self.folder / "log" / (name or program)).open("ab") as log:
            self._processes[name or program] = subprocess.Popen(
                [program, *args], stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self.env, start_new_session=True,
                preexec_fn=lambda: on_parents_death(signal.SIGKILL),  # noqa: PLW1509 - this process has no other thread
            )  # fmt: skip

    def clear(self) -> None:
        """No job runs any more, or is queued."""
        self.said(["scancel", f"--user={_user()}"])
        for pid in self.pids(b"SLURMD_NODENAME="):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.idle()

    def _end(self) -> None:
        for process in reversed(self._processes.values()):
            process.kill()
            process.wait()
        for pid in self.pids():  # steps and what they have started, whose slurmd is gone
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if not self._keep:
            shutil.rmtree(self.folder, ignore_errors=True)

    def pids(self, mark: bytes = b"") -> list[int]:
        """Whatever runs under this Slurm, or speaks of its folder; with `mark`, what has that in its environment beside."""
        ours, found = f"SLURM_CONF={self.folder}/".encode(), []
        for pid in all_pids():
            with suppress(OSError):
                environment = Path(f"/proc/{pid}/environ").read_bytes()
                if (
                    pid != os.getpid()
                    and mark in environment
                    and (ours in environment or str(self.folder) in command_line(pid))
                ):
                    found.append(pid)
        return found

    # ---- nodes

    def start_node(self, node: str) -> None:
        """A node comes up."""
        self._run("slurmd", "-D", "-N", node, name=node)

    def lose_node(self, node: str) -> None:
        """A node dies: its slurmd, its steps and whatever they have started."""
        manager = self._processes.pop(node)
        manager.kill()
        manager.wait()
        mark = f"SLURMD_NODENAME={node}\0".encode()
        for pid in self.pids(mark):
            managers = [above] if "slurmstepd" in command_line(above := parent(pid)) else []
            for dying in (*managers, pid):
                with suppress(ProcessLookupError):
                    os.kill(dying, signal.SIGKILL)

    def idle(self) -> None:
        """Until all nodes are up, and have nothing to do.

        A node that still cleans up after a job passes for idle too, but a job of a range of nodes would begin without it.
        """
        asked = ["sinfo", "--noheader", "--Node", "--format=%T"]
        ready = ["idle"] * len(self.nodes)
        self.until(lambda: self.said(asked, check=False).split() == ready, 180.0, "all nodes to be idle")

    def down(self, node: str) -> None:
        """Until Slurm has noticed that a node is gone."""
        asked = ["sinfo", "--noheader", "--states=down", f"--nodes={node}", "--format=%D"]
        self.until(lambda: self.said(asked) == "1", 180.0, f"{node} to be down")

    # ---- jobs

    def said(self, command: Sequence[str], *, check: bool = True, **env: str) -> str:
        """What a command says."""
        done = subprocess.run(
            command, env={**self.env, **env}, capture_output=True, text=True, timeout=30.0, check=False
        )
        assert not check or done.returncode == 0, f"{command}: {done.returncode}\n{done.stdout}{done.stderr}"
        return done.stdout.strip()

    def state(self, job: str) -> dict[str, str]:
        """What the controller says of a job: JobState, Restarts, NodeList, ...

        Example: {"JobState": "RUNNING", "Restarts": "0", "NodeList": "s[0-2]", "BatchHost": "s0", "ExitCode": "0:0"}
        """
        words = self.said(["scontrol", "show", "job", job]).split()
        return dict(word.partition("=")[::2] for word in words if "=" in word)

    def until(self, claim: Callable[[], bool], within_s: float, what: str) -> None:
        """Wait for something, or say where all is written down."""
        deadline = time.monotonic() + patience(within_s)
        while not claim():
            assert time.monotonic() < deadline, f"{what}: not within {within_s:g} s; see {self.folder}"
            time.sleep(0.1)


def missing() -> list[str]:
    """Which of Slurm's programs are not here."""
    return [name for name in PROGRAMS if shutil.which(name, path=PATH) is None]


def _user() -> str:
    return subprocess.run(["id", "-un"], capture_output=True, text=True, check=True).stdout.strip()
