"""The server of fake_server.py as a process, for tests."""

import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

from elasticrl.ppo.rollout.server_process import Http
from elasticrl.store.embedded import free_ports

FAKE = Path(__file__).with_name("fake_server.py")


class Fake:
    """The server, which may be started anew."""

    def __init__(self, dialect, model, folder, *more):
        self.port = free_ports()[0]
        self.url, self.hang = f"http://127.0.0.1:{self.port}", folder / f"hang-{self.port}"
        self.command = [
            sys.executable, FAKE, "--dialect", dialect, "--port", str(self.port), "--model", model, "--hang", self.hang, *more,
        ]  # fmt: skip
        self.start()

    def start(self):
        self.process = subprocess.Popen(self.command)

    def kill(self):
        self.process.kill()
        self.process.wait()

    def ask(self, path, body=None):
        return Http(self.url, "").ask(path, body, within_s=20.0)


@contextmanager
def serving(dialect, model, folder, *more):
    fake = Fake(dialect, model, folder, *more)
    try:
        yield fake
    finally:
        fake.kill()
