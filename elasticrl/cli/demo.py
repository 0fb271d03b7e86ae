"""`elasticrl demo`: the whole promise in two minutes. A model learns with PPO on three nodes, some are killed, the bits stay.

The one idea: nothing in it is for show. It is an ordinary job under ordinary daemons, killed with ordinary signals; what it
prints is read from what every job writes (the trainer's history, the daemons' logs, the chronicles), and the claim at its end
is the comparison that `elasticrl verify` makes with a run that nothing happened to.
"""

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self

import typer

from elasticrl.base.address import CONTROL
from elasticrl.cli import find, render
from elasticrl.cli.main import Exit

if TYPE_CHECKING:
    from rich.live import Live

NODES = ("n0", "n1", "n2")
DIGITS, PROMPTS = 4, 20_000
PATIENCE_S = 120.0  # for anything that should take seconds; a busy machine may need it
VERDICT_S = 10.0  # for the incident of a fault that is over
DRAW_S = 0.2  # between two looks for the live view
ENDS = 5  # steps at the beginning and at the end, whose rewards are compared
RISE = 0.3  # of a reward from 0 to 1. After 30 steps it is 0.4 over what it was, after 60 it is 0.6
BARS = " ▁▂▃▄▅▆▇█"
FILES = {"state": "state", "checkpoints": "checkpoints", "log": "log", "model": "model", "prompts": "prompts.jsonl"}
JOB = """\
# A tiny model learns to read four digits backwards. See docs/CONFIGURATION.md for every key.
job: {{name: {name}, program: elasticrl.ppo, seed: 0, steps: {steps}}}
node: {{device: {device}, interface: lo, state_dir: {state}}}
store: {{embedded: true, try_timeout: 500ms, timeout: 5s, retry: 1s}}
membership: {{min_nodes: 2, max_nodes: 3, settle: 1s, lease_ttl: 5s, keepalive: 1500ms}}
timeouts: {{floor: 5s, slack: 20, confirm: 1s}}
lanes: {{count: 3, digest: full}}
vault: {{dir: {vault}, copies: 1}}
checkpoint: {{dir: {checkpoints}, every: 20}}
telemetry: {{log_dir: {log}}}
model: {{path: {model}}}
ppo:
  batch: 120
  mini_batch: 30
  micro_tokens: 100
  epochs: 2
  lr: 4e-3
  critic_lr: 4e-3
  gamma: 0.05
  clip_high: 0.5
  entropy_coef: 0.2
  kl: {{coef: 0.002}}
reward: {{function: "elasticrl.ppo.tasks:reverse"}}
rollout: {{max_tokens: {digits}}}
data: {{path: {prompts}, max_prompt: 6}}
"""


def job(name: str, folder: Path, vault: Path, *, steps: int, device: str) -> str:
    """The configuration. Paths may have anything in them that YAML knows as its own."""
    here = {key: json.dumps(str(folder / file)) for key, file in FILES.items()}
    return JOB.format(name=name, steps=steps, vault=json.dumps(str(vault)), digits=DIGITS, device=device, **here)


class Device(StrEnum):
    """What the demonstration's workers compute on."""

    CPU = "cpu"
    CUDA = "cuda"


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command()(demo)


def demo(
    folder: Annotated[
        Path, typer.Option("--folder", help="Where everything goes; what an earlier demo left is removed.")
    ] = Path("run/demo"),
    steps: Annotated[int, typer.Option("--steps", min=30, help="Steps of PPO.")] = 60,
    device: Annotated[Device, typer.Option("--device", help="cuda: all nodes share one GPU, over NCCL.")] = Device.CPU,
) -> None:
    """Train a tiny model with PPO on three local nodes, kill some, and show that not a bit was lost. About two minutes."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    show = Show(folder.resolve(), steps, device.value)
    try:
        raise typer.Exit(show.run())
    except KeyboardInterrupt:
        typer.echo("ended; nothing is left running")
        raise typer.Exit(Exit.INTERRUPTED) from None
    except Stuck as stuck:
        typer.echo(f"{stuck}\nThe logs are in {show.folder / 'log'}.", err=True)
        raise typer.Exit(Exit.FAILED) from None
    finally:
        show.close()


class Stuck(Exception):
    """Something did not happen in time; the sentence says what."""


@dataclass(slots=True)
class Fault:
    """One thing done to the job, and what came of it. Example: Fault(step=15, what="kill -9 of n1's worker")"""

    step: int
    what: str
    at: float = 0.0
    back: float = 0.0  # when the next step was made
    usual: float = 0.0  # seconds of a step around then
    again: int = 0  # steps that were made before it, and had to be made again


@dataclass(slots=True)
class View:
    """What is seen of it: lines, and on a terminal below them nodes, phases and the reward as they are now."""

    live: "Live | None" = None
    picture: dict[str, Any] = field(default_factory=dict)
    looked: float = 0.0  # when the picture was asked for
    drawn: float = 0.0

    def __enter__(self) -> Self:
        if sys.stdout.isatty():
            from rich.console import Console
            from rich.live import Live

            self.live = Live(console=Console(highlight=False), auto_refresh=False, transient=True)
            self.live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.live is not None:
            self.live.stop()
            self.live = None

    def line(self, text: str) -> None:
        """One that stays."""
        if self.live is not None:
            self.live.console.print(text, markup=False)
        else:
            typer.echo(text)

    def draw(self, lines: "Lines") -> None:
        """What changes."""
        now = time.monotonic()
        if self.live is None or now - self.drawn < DRAW_S:
            return
        from rich.text import Text

        self.drawn = now
        said = [f"   reward {curve(lines.rewards)}  {lines.rewards[-1]:.2f}"] if lines.rewards else []
        if self.picture:
            said.append(render.status(self.picture, colour=True))
        self.live.update(Text.from_ansi("\n".join(["", *said])), refresh=True)


@dataclass(slots=True)
class Show:
    """The demonstration."""

    folder: Path
    steps: int
    device: str
    faults: list[Fault] = field(default_factory=list)
    daemons: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    alone: subprocess.Popen[bytes] | None = None
    etcd: Any = None
    tree: Any = None
    run_dir: Path = field(default_factory=find.private_run_dir)
    view: View = field(default_factory=View)

    @property
    def name(self) -> str:
        """Of the job: short, and this process's own, so that two demonstrations never meet."""
        return f"demo-{os.getpid()}"

    @property
    def config(self) -> Path:
        """The job's file."""
        return self.folder / "job.yaml"

    @property
    def history(self) -> Path:
        """What the trainer notes of each step."""
        return self.folder / "history.jsonl"

    def run(self) -> int:
        """All of it; the exit code."""
        begun = time.monotonic()
        with self.view:
            self.prepare()
            self.undisturbed()
            self.gang()
        kept = self.verdict()
        self.view.line(f"\n{time.monotonic() - begun:.0f} s in all; everything is in {self.folder}")
        return 0 if kept else Exit.FAILED

    # ---- before

    def prepare(self) -> None:
        """A random model, prompts, a configuration."""
        try:
            if self.folder.exists():
                if any(self.folder.iterdir()) and not self._earlier():
                    raise Stuck(f"{self.folder} is not empty and not of an earlier demo: name another with --folder.")
                shutil.rmtree(self.folder)
            (self.folder / "log").mkdir(parents=True)
        except OSError as error:
            raise Stuck(f"{self.folder} cannot be made ({error.strerror}): name another with --folder.") from None
        try:
            find.made_private(self.run_dir)
        except find.NotOurs as error:
            raise Stuck(str(error)) from None
        shm = Path("/dev/shm")  # noqa: S108 - tmpfs is the point; the vault makes its own folder there, closed to others
        vault = shm / f"elasticrl-demo-{os.getuid()}" if shm.is_dir() else self.folder / "vault"
        self.config.write_text(
            job(self.name, self.folder, vault, steps=self.steps, device=self.device), encoding="utf-8"
        )
        code = (
            "import json, sys; from elasticrl.ppo import tiny; from elasticrl.runtime.rng import seed\n"
            "folder, digits, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])\n"
            "tiny.write(folder + '/model', hidden=32, layers=2)\n"
            "with open(folder + '/prompts.jsonl', 'w') as file:\n"
            "    for i in range(count):\n"
            "        text = f\"{seed('digits', digits, i) % 10**digits:0{digits}}\"\n"
            "        file.write(json.dumps({'prompt': text}) + '\\n')\n"
        )
        command = [sys.executable, "-c", code, str(self.folder), str(DIGITS), str(PROMPTS)]
        if subprocess.run(command, check=False, timeout=PATIENCE_S).returncode:
            raise Stuck("the model could not be made (see above)")

    def _earlier(self) -> bool:
        """Whether this folder is of a demonstration: others have a job.yaml too."""
        try:
            return self.config.read_text(encoding="utf-8").startswith(JOB.partition("\n")[0])
        except (OSError, UnicodeDecodeError):
            return False

    def undisturbed(self) -> None:
        """The same job in one process, without faults: what the other is compared with."""
        from elasticrl.config import load

        self.tree = load(self.config)
        self.view.line(f"1. The same job undisturbed, in one process: {self.steps} steps of PPO")
        own = [
            "ELASTICRL__MEMBERSHIP__MIN_NODES=1", "ELASTICRL__VAULT__COPIES=0",
            f"ELASTICRL__VAULT__DIR={self.folder}/vault-alone", f"ELASTICRL__CHECKPOINT__DIR={self.folder}/undisturbed",
            f"ELASTICRL_HISTORY={self.folder}/undisturbed.jsonl", "OMP_NUM_THREADS=1",
        ]  # fmt: skip
        env = os.environ | dict(pair.split("=", 1) for pair in own)
        with (self.folder / "log" / "undisturbed.log").open("wb") as log:
            self.alone = subprocess.Popen(
                [sys.executable, "-m", "elasticrl.ppo", str(self.config)],
                env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
        lines = Lines(self.folder / "undisturbed.jsonl")
        self.until(lambda: self.alone is not None and self.alone.poll() is not None, "the undisturbed run", lines)
        if self.alone.returncode:
            raise Stuck(f"the undisturbed run failed: see {self.folder / 'log' / 'undisturbed.log'}")
        self.view.line(f"   reward {curve(lines.rewards)}  {lines.rewards[-1]:.2f}")

    # ---- the gang

    def gang(self) -> None:
        """The job on three nodes, and what is done to it."""
        from elasticrl.cli.serve import start_store

        self.view.line("2. Under three daemons, with an etcd of its own")
        self.etcd = start_store(self.tree)
        for node in NODES:
            self.start(node)
        lines = Lines(self.history)
        third = self.steps // 4
        self.until(lambda: lines.step >= third, f"step {third}", lines)
        self.hit(lines, "kill -9 of the worker on n1", lambda: self.kill(self.worker("n1")))
        self.until(lambda: lines.step >= 2 * third, f"step {2 * third}", lines)
        self.hit(lines, "kill -9 of all of n2: daemon, agent, worker, vault", lambda: self.kill_node("n2"))
        self.until(lambda: lines.step >= 2 * third + 4, "more steps", lines)
        self.view.line(f"   step {lines.step:3}  n2 is started again")
        self.start("n2")
        ended = [self.daemons[node] for node in NODES]

        def over() -> bool:
            return all(daemon.poll() is not None for daemon in ended)

        def back() -> bool:
            seen = self.look()
            return seen.get("state") == "TRAINING" and seen["nodes"] == len(NODES)

        self.until(lambda: back() or over(), "n2's return", lines)
        if not over():
            self.view.line("   what `elasticrl status` says now:")
            self.view.line("\n".join(f"      {line}" for line in render.status(self.look(), colour=False).splitlines()))
        self.until(over, "the end of the job", lines)
        codes = [daemon.returncode for daemon in ended]
        if any(codes):
            raise Stuck(f"the daemons ended with {codes}")
        self.view.line(f"   reward {curve(lines.rewards)}  {lines.rewards[-1]:.2f}")

    def start(self, node: str) -> None:
        """A node's daemon."""
        from elasticrl.cli.serve import launch

        own = [
            f"node.name={node}", f"node.run_dir={self.run_dir}", "telemetry.format=json",
            f"store.endpoints=[{self.etcd.endpoint}]", "store.embedded=false",
            f"agent.env.ELASTICRL_HISTORY={self.history}",
        ]  # fmt: skip
        self.daemons[node] = launch(self.config, own, self.log(node))

    def log(self, node: str) -> Path:
        """Of a node's daemon."""
        return self.folder / "log" / f"{node}.daemon.log"

    def hit(self, lines: "Lines", what: str, act: Callable[[], None]) -> None:
        """Do it, and wait for the next step."""
        fault = Fault(step=lines.step, what=what, usual=lines.usual_s)
        self.view.line(f"   step {fault.step:3}  {what}")
        fault.at = time.monotonic()
        act()
        self.until(lambda: lines.after(fault.at) > 0, "the next step", lines)
        fault.back = lines.after(fault.at)
        fault.again = max(0, fault.step + 1 - lines.first_after(fault.at))
        self.faults.append(fault)
        self.view.line(
            f"   step {lines.step:3}  made {fault.back - fault.at:.2f} s later, where a step takes {fault.usual:.2f} s"
        )
        before = len(self.faults) - 1
        deadline = time.monotonic() + VERDICT_S
        while self.look().get("faults", 0) <= before and time.monotonic() < deadline:
            time.sleep(DRAW_S)  # between looks, up to the deadline: a dead worker's last words are read first
        if (last := self.look().get("last")) is not None:
            self.view.line(f"   verdict   {last['verdict']['fault']}: {last['said']}")
        for stages in self.stages(self.look().get("generation", 0)):
            self.view.line(f"   {stages}")

    def look(self) -> dict[str, Any]:
        """What `elasticrl status` would say; the last that is known, where nobody answers."""
        from elasticrl.daemon.client import Unanswered, ask

        if time.monotonic() - self.view.looked >= DRAW_S:
            self.view.looked = time.monotonic()
            with suppress(Unanswered, OSError):
                self.view.picture = ask(self.home("n0") / CONTROL, "status", deadline_s=2.0)
        return self.view.picture

    def stages(self, generation: int | None = None) -> list[str]:
        """Where the milliseconds of each recovery went, as each node saw it; of that generation alone, the slowest."""
        found = [(node, line) for node in NODES for line in events(self.log(node), "recovery.done")]
        if generation is not None:
            found = (
                [max(found, key=lambda one: one[1]["total_s"])]
                if (found := [one for one in found if one[1]["generation"] == generation])
                else []
            )
        return [
            f"{node}: generation {line['generation']} ({line['rung']}) in {line['total_s']:.2f} s: "
            + ", ".join(f"{name.replace('_', ' ')} {1000 * took:.0f} ms" for name, took in line["stages"].items())
            for node, line in found
        ]  # fmt: skip

    def worker(self, node: str) -> int:
        """The pid of a node's worker."""
        from elasticrl.daemon.client import ask

        return int(ask(self.home(node) / CONTROL, "logs", deadline_s=10.0)[0]["pid"])

    def home(self, node: str) -> Path:
        """A node's runtime directory."""
        return self.run_dir / self.name / node

    def kill(self, *pids: int) -> None:
        """SIGKILL."""
        for pid in pids:
            os.kill(pid, signal.SIGKILL)

    def kill_node(self, node: str) -> None:
        """Everything of a node at once; the daemon first, so that it says nothing."""
        from elasticrl.daemon.vault import dismiss, folder_of

        agent = int(json.loads((self.home(node) / "life.json").read_text(encoding="utf-8"))["agent_pid"])
        worker, daemon = self.worker(node), self.daemons[node]
        self.kill(daemon.pid, worker, agent)
        daemon.wait()
        vault = folder_of(self.tree.vault.dir, self.name, node)
        asyncio.run(dismiss(vault, within_s=5.0))  # its memory goes with it
        shutil.rmtree(self.home(node), ignore_errors=True)

    def until(self, claim: Callable[[], bool], what: str, lines: "Lines") -> None:
        """Wait. As long as steps are made it may take as long as it takes."""
        seen, deadline = lines.step, time.monotonic() + PATIENCE_S
        while not claim():
            lines.read()
            if lines.step != seen:
                seen, deadline = lines.step, time.monotonic() + PATIENCE_S
            if time.monotonic() > deadline:
                raise Stuck(f"{what}: not within {PATIENCE_S:.0f} s")
            if self.view.live is not None and self.daemons:
                self.look()
            self.view.draw(lines)
            time.sleep(0.01)

    # ---- after

    def verdict(self) -> bool:
        """What was done, what it cost, whether the bits are the same, and whether the model learned."""
        from elasticrl.runtime.chronicle import compare, read
        from elasticrl.runtime.data.audit import audit

        ours, theirs = self.folder / "checkpoints" / self.name, self.folder / "undisturbed" / self.name
        self.view.line("3. What it cost")
        for fault in self.faults:
            lost = f"{fault.again} steps lost, and made again" if fault.again else "no step lost"
            took, usual = fault.back - fault.at, fault.usual
            self.view.line(f"   {fault.what}: {took:.2f} s to the next step, where one takes {usual:.2f} s; {lost}")
        for stages in self.stages():
            self.view.line(f"   {stages}")
        used, same = audit(ours), compare(read(theirs), read(ours))
        exact = same.ok and same.steps > self.steps
        self.view.line(f"   samples: {used.sentence}")
        self.view.line(f"   same bits as the undisturbed run: {'yes' if exact else 'NO'} ({same.sentence})")
        lines = Lines(self.history)
        lines.read()
        knows, said = learned(lines.rewards)
        self.view.line(f"   reward: {said}")
        return exact and used.ok and knows

    def close(self) -> None:
        """End whatever runs still."""
        from elasticrl.cli.serve import end, end_vaults, stop_store, vaults_of

        if self.alone is not None and self.alone.poll() is None:
            self.alone.kill()
            self.alone.wait()
        end(list(self.daemons.values()), within_s=20.0)
        if self.tree is not None:
            asyncio.run(end_vaults(vaults_of(Path(self.tree.vault.dir) / self.name)))
            remove(Path(self.tree.vault.dir) / self.name, around=True)
        if self.etcd is not None:
            stop_store(self.tree)
        remove(self.run_dir / self.name)


def remove(folder: Path, *, around: bool = False) -> None:
    """A folder of this demonstration, and that `around` it, which only demonstrations use, if no other does. That of sockets is
    of all runs: one that begins may have nothing in it yet.
    """
    shutil.rmtree(folder, ignore_errors=True)
    if around:
        with suppress(OSError):
            folder.parent.rmdir()


class Lines:
    """The trainer's notes, as far as they are written: one for each step that was made."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.notes: list[dict[str, Any]] = []
        self._read = 0

    def read(self) -> None:
        """What was added."""
        if not self.path.exists():
            return
        with self.path.open("rb") as file:
            file.seek(self._read)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._read += len(whole)
        self.notes += [json.loads(line) for line in whole.splitlines()]

    @property
    def step(self) -> int:
        """The newest."""
        return int(self.notes[-1]["step"]) if self.notes else -1

    @property
    def rewards(self) -> list[float]:
        """By step; of one that was made again, the last."""
        by_step = {int(note["step"]): float(note["reward"]) for note in self.notes}
        return [by_step[step] for step in sorted(by_step)]

    @property
    def usual_s(self) -> float:
        """Seconds of a step, lately: the median."""
        times = [float(note["at"]) for note in self.notes[-12:]]
        gaps = sorted(b - a for a, b in pairwise(times))
        return gaps[len(gaps) // 2] if gaps else 0.0

    def after(self, at: float) -> float:
        """When the first step after that time was made; 0 if none was yet."""
        self.read()
        return next((float(note["at"]) for note in self.notes if note["at"] > at), 0.0)

    def first_after(self, at: float) -> int:
        """Which step it was."""
        return next((int(note["step"]) for note in self.notes if note["at"] > at), 0)


def learned(rewards: list[float]) -> tuple[bool, str]:
    """Does the model know at the end what it did not know at first? With the sentence that says so."""
    first, last = (sum(some) / len(some) for some in (rewards[:ENDS], rewards[-ENDS:]))
    knows = last - first >= RISE
    told = f"{first:.2f} in the first {ENDS} steps, {last:.2f} in the last {ENDS}"
    return knows, told if knows else f"{told}: it has NOT learned, which takes {RISE:.2f} more"


def curve(values: list[float]) -> str:
    """A line of bars, one for each two values."""
    pairs = [max(values[i : i + 2]) for i in range(0, len(values), 2)]
    return "".join(BARS[min(8, max(0, round(8 * value)))] for value in pairs)


def events(log: Path, name: str) -> list[dict[str, Any]]:
    """A daemon's log lines of one event."""
    if not log.exists():
        return []
    lines = (line for line in log.read_text(encoding="utf-8").splitlines() if line.startswith("{"))
    return [line for line in map(json.loads, lines) if line["event"] == name]
