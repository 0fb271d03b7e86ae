"""The calculator, with a count of its calls, and sudden ends inside of them.

Each call is two lines in the file `$TURNS_CALLS`: "asked 0:17 1" and "replied 0:17 1". Where the folder `$PPO_ENDS` has a file
"call.n1" that holds a turn, node n1's worker dies in the next call of that turn, by a signal that nothing catches.
"""

import os
import signal
import threading
from dataclasses import replace
from pathlib import Path

from elasticrl.ppo import tasks
from elasticrl.ppo.environments import Message, Reply, Task

lock = threading.Lock()


def note(what: str, name: str, turn: int) -> None:
    if path := os.environ.get("TURNS_CALLS"):
        with lock, Path(path).open("a") as file:
            file.write(f"{what} {name} {turn}\n")


def perhaps_the_end(turn: int) -> None:
    path = Path(os.environ.get("PPO_ENDS", "/nonexistent")) / f"call.{os.environ['ELASTICRL_NODE']}"
    with lock:
        if path.exists() and path.read_text() == str(turn):
            path.unlink()
            os.kill(os.getpid(), signal.SIGKILL)


class Calculator(tasks.Calculator):
    def reset(self, task: Task) -> None:
        self.name = task.id
        note("asked", self.name, -1)
        perhaps_the_end(-1)
        super().reset(task)
        note("replied", self.name, -1)

    def step(self, message: Message) -> Reply:
        note("asked", self.name, message.turn)
        perhaps_the_end(message.turn)
        reply = super().step(message)
        note("replied", self.name, message.turn)
        return replace(reply, done=message.turn == 1)  # a model that has learned nothing gets further too

    def save(self) -> str:
        return f"{self.name} {super().save()}"

    def load(self, state: str) -> None:
        self.name, _, asked = state.partition(" ")
        super().load(asked)
