"""Code that a policy has written runs confined: its time, memory, files, processes and network are taken from it."""

import os
import socket
import sys
import time
from pathlib import Path

import pytest

from elasticrl.ppo.sandbox import Limits, run

QUICK = Limits(wall_s=10.0, cpu_s=5)


def test_a_program_says_what_it_says():
    ran = run(
        "import sys; print(int(input()) * 7); print('oh', file=sys.stderr); sys.exit(3)", stdin="6\n", limits=QUICK
    )
    assert (ran.code, ran.out, ran.err, ran.late, ran.ok) == (3, "42\n", "oh\n", False, False)
    assert run("print(6 * 7)", limits=QUICK).ok
    assert "ZeroDivisionError" in run("1 / 0", limits=QUICK).err


def test_it_ends_at_its_time_with_all_that_it_has_started():
    begun = time.monotonic()
    code = "import os, time\nif not os.fork():\n    os.setsid()\ntime.sleep(60)"
    ran = run(code, limits=Limits(wall_s=1.0))
    assert ran.late
    assert not ran.ok
    assert time.monotonic() - begun < 10
    deadline = time.monotonic() + 10
    while left := [
        entry
        for entry in Path("/proc").glob("[0-9]*/cwd")
        if os.path.lexists(entry) and "sandbox-" in _read(entry) and "(deleted)" in _read(entry)
    ]:
        assert time.monotonic() < deadline, left
        time.sleep(0.05)


def _read(link: Path) -> str:
    try:
        return str(link.readlink())
    except OSError:
        return ""


def test_it_has_no_more_time_of_a_processor_memory_or_disk_than_its_limits():
    assert run("while True: pass", limits=Limits(cpu_s=1)).code in (-9, -24)
    assert "MemoryError" in run("x = bytearray(10 ** 9)", limits=Limits(memory_bytes=256 << 20)).err
    ran = run("open('big', 'wb').write(b'x' * 10 ** 6)", limits=Limits(file_bytes=10**5))
    assert not ran.ok
    assert len(run("print('x' * 10 ** 6)", limits=Limits(output_bytes=100)).out) == 100


def test_it_reaches_nobody():
    with socket.create_server(("127.0.0.1", 0)) as server:
        ran = run(f"import socket; socket.create_connection(('127.0.0.1', {server.getsockname()[1]}), 2)", limits=QUICK)
    assert "OSError" in ran.err or "Error" in ran.err
    assert not ran.ok


@pytest.mark.parametrize(
    "code",
    [
        "print(open({path!r}).read())",
        "open({path!r}, 'w')",
        "import os; os.remove({path!r})",
        "import os; os.listdir({folder!r})",
    ],
)
def test_it_sees_no_file_of_ours(tmp_path: Path, code: str):
    secret = tmp_path / "secret"
    secret.write_text("ours")
    ran = run(code.format(path=str(secret), folder=str(tmp_path)), limits=QUICK)
    assert "PermissionError" in ran.err
    assert secret.read_text() == "ours"
    assert (
        run("open('mine', 'w').write('x'); import json, random; print(open('mine').read())", limits=QUICK).out == "x\n"
    )


def test_it_sees_neither_our_environment_nor_our_processes(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("ELASTICRL__STORE__PASSWORD", "geheim")
    assert "geheim" not in run("import os; print(dict(os.environ))", limits=QUICK).out
    assert "ProcessLookupError" in run(f"import os; os.kill({os.getpid()}, 0)", limits=QUICK).err


def test_its_packages_are_those_of_the_interpreter():
    assert run("import numpy; print(numpy.arange(3).sum())", limits=QUICK, python=sys.executable).out == "3\n"
