"""What a program registers to run at exit runs, whoever imported it."""

import os
import subprocess
import sys
from pathlib import Path

#: A part of a program, which the fork server imports beforehand.
PART = """
import atexit, weakref
from elasticrl.agent import worker

class Thing:
    pass

early, late = Thing(), Thing()
weakref.finalize(early, print, "a finalizer of the part", flush=True)
atexit.register(print, "an exit of the part", flush=True)

def program():
    weakref.finalize(late, print, "a finalizer of the program", flush=True)
    atexit.register(print, "an exit of the program", flush=True)
    worker.end(3)
"""
AGENT = """
import multiprocessing, os
from elasticrl.agent import warm

os.environ[warm.FORK_SERVER] = f"{os.getpid()}:part:"
multiprocessing.set_forkserver_preload(["elasticrl.agent.warm"])
context = multiprocessing.get_context("forkserver")
import part
for _ in range(2):
    child = context.Process(target=part.program)
    child.start()
    child.join()
    print("ended with", child.exitcode, flush=True)
os._exit(0)  # what the part registered here, too, is not asked for
"""


def test_what_a_module_registered_that_was_imported_beforehand_runs_as_the_program_ends(tmp_path: Path) -> None:
    (tmp_path / "part.py").write_text(PART, encoding="utf-8")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    done = subprocess.run([sys.executable, "-c", AGENT], capture_output=True, text=True, env=env, timeout=300)
    exits = ["an exit of the part", "an exit of the program", "a finalizer of the part", "a finalizer of the program"]
    assert sorted(done.stdout.splitlines()) == sorted(2 * [*exits, "ended with 3"]), done.stderr
