"""A daemon whose embedded etcd does not start at once: what may pass is waited for, what cannot is refused."""

import asyncio
from pathlib import Path

import pytest
from structlog.testing import CapturingLogger

from elasticrl.config.tree import Tree
from elasticrl.daemon.history import History
from elasticrl.daemon.main import REFUSALS, Daemon
from elasticrl.store.embedded import find_binary


def daemon_of(folder: Path, binary: Path) -> tuple[Daemon, CapturingLogger]:
    """One that starts its etcd with this program."""
    said = CapturingLogger()
    tree = Tree.model_validate({
        "job": {"name": "j", "program": "x"},
        "node": {"interface": "lo", "name": "n0", "run_dir": str(folder / "run"), "state_dir": str(folder / "state")},
        "checkpoint": {"dir": str(folder / "saves")},
        "store": {"embedded": True, "embedded_binary": str(binary)},
    })  # fmt: skip
    return Daemon(tree, log=said, history=History(), keep=False), said


def test_an_etcd_that_does_not_start_at_the_first_attempt_is_waited_for(tmp_path: Path) -> None:
    binary, tried = tmp_path / "etcd", tmp_path / "tried"
    binary.write_text(f"""#!/bin/sh
if [ ! -e {tried} ]; then
    touch {tried}
    echo "the disk is slow today" >&2
    exit 1
fi
exec {find_binary()} "$@"
""")
    binary.chmod(0o755)
    daemon, said = daemon_of(tmp_path, binary)

    async def start() -> None:
        try:
            async with await daemon._store() as store:
                assert await store.get("nothing") is None
        finally:
            await daemon._stop_store()

    asyncio.run(start())
    assert [call.args[0] for call in said.calls] == ["store.failed", "store.started"]
    assert "the disk is slow today" in said.calls[0].kwargs["error"]


def test_an_etcd_that_is_not_there_is_refused(tmp_path: Path) -> None:
    daemon, said = daemon_of(tmp_path, tmp_path / "none")
    with pytest.raises(REFUSALS, match="does not exist or may not be run"):
        asyncio.run(daemon._store())
    assert not said.calls
