"""What a daemon hands its workers: the configuration as a file, equal to its own but for passwords."""

import os
import signal
import stat
import threading
from pathlib import Path

import pytest

from elasticrl.agent.spec import Spec, dump, environment
from elasticrl.agent.spec import load as load_spec
from elasticrl.base.owned import opened, taken_by, write_private
from elasticrl.cli.node import Asked, follows, serve
from elasticrl.config import ConfigError, dumps, load, loads
from elasticrl.contract.model import REFUSED
from elasticrl.daemon.adopt import Lost
from elasticrl.daemon.life import LOCK, MOMENT_S, Home, Taken
from elasticrl.daemon.main import REFUSALS
from elasticrl.daemon.refusal import FAILED, Refusal
from elasticrl.daemon.resident import own_address
from elasticrl.daemon.spec import for_workers, there
from elasticrl.shell import keys
from elasticrl.shell.route import ABROAD, outward
from elasticrl.store import StoreError

CONFIGS = Path(__file__).parents[2] / "configs"
OVERRIDES = (
    "ppo.lr=3e-7",
    "recovery.drain=90500ms",
    "agent.env={NCCL_DEBUG: 'yes', PATHS: 'a: b, #c'}",
    "job.args=[--x, 'true', '1', 'a b', 'ü']",
    "node.interface=null",
)
ENVIRON = {"ELASTICRL__VAULT__LINGER": "7s"}


@pytest.mark.parametrize(
    "name", ["cluster", "two-nodes", "one-machine", "own-trainer", "tools", "trl", "dense-32b", "mixture-235b"]
)
def test_the_loader_reads_the_handed_over_file_back_to_the_same_tree(name: str, tmp_path: Path) -> None:
    tree = load(CONFIGS / f"{name}.yaml", OVERRIDES, ENVIRON)
    file = tmp_path / "config.yaml"
    write_private(file, dumps(for_workers(tree)))
    assert load(file, (), {}) == tree
    assert loads(file.read_text()) == tree
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


@pytest.mark.parametrize(
    "name", ["cluster", "two-nodes", "one-machine", "own-trainer", "tools", "trl", "dense-32b", "mixture-235b"]
)
def test_a_password_stays_with_the_daemon_and_the_file_can_be_read_without_it(name: str, tmp_path: Path) -> None:
    secret = {"ELASTICRL__STORE__PASSWORD": "geheim"}
    tree = load(CONFIGS / f"{name}.yaml", ("store.username=u", "store.password_file=null", *OVERRIDES), secret)
    file = tmp_path / "config.yaml"
    file.write_text(dumps(for_workers(tree)))
    assert "geheim" not in file.read_text()
    back = load(file, (), {})
    assert back.store == tree.store.model_copy(update={"username": None, "password": None})
    assert back.model_copy(update={"store": tree.store}) == tree


def test_an_agents_environment_has_no_overrides(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("ELASTICRL__STORE__PASSWORD", "NOTIFY_SOCKET", "WATCHDOG_USEC"):
        monkeypatch.setenv(name, "geheim")
    monkeypatch.setenv("ELASTICRL_AGENT", "systemd")
    spec = Spec(job="j", node="n", program=("x.py",), log_dir=str(tmp_path), config="{}")
    write_private(tmp_path / "spec.json", dump(spec))
    assert load_spec(tmp_path / "spec.json") == spec
    found = environment(spec)
    assert "geheim" not in found.values()
    assert found["ELASTICRL_AGENT"] == "systemd"
    assert found["OMP_NUM_THREADS"] == "1"


def test_a_module_is_imported_beforehand_only_where_it_exists() -> None:
    assert there("elasticrl.runtime.bits")
    assert not there("elasticrl.runtime.nonesuch")
    assert not there("nonesuch.at.all")


def test_a_runtime_directory_too_deep_for_a_socket_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 107) / "n0"
    with pytest.raises(Refusal, match=r"a socket's path may have 107: shorten node\.run_dir, job\.name or node\.name"):
        Home(deep)
    assert not deep.parent.exists()


def test_a_look_at_whether_a_daemon_runs_refuses_no_daemon_that_starts_just_then(tmp_path: Path) -> None:
    folder = tmp_path / "run" / "job" / "n0"
    home, state = Home(folder), tmp_path / "state"
    state.mkdir()
    look = opened(folder / LOCK)
    assert not taken_by(look)
    waits = threading.Timer(MOMENT_S / 3, look.close)
    waits.start()
    home.lock(state)
    waits.join()
    other = Home(folder)
    with pytest.raises(Taken, match=f"runs here already .pid {os.getpid()}"):
        other.lock(state)
    for lock in home._locks:
        lock.close()


def test_a_value_error_that_nobody_meant_is_a_bug_and_no_refusal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # systemd starts a daemon that refused never again, and no test sees the word `bug` in its log.
    tree = load(CONFIGS / "one-machine.yaml", ("telemetry.format=json",), {})
    tree = tree.model_copy(update={"node": tree.node.model_copy(update={"run_dir": f"{tmp_path}/\0"})})
    assert serve(tree, keep=True) == FAILED
    said = capsys.readouterr()
    assert '"bug"' in said.out + said.err
    assert "daemon.refused" not in said.out + said.err
    for meant in (Taken, Lost, StoreError, keys.Unreadable, ConfigError):
        assert issubclass(meant, REFUSALS)


def test_a_sentence_for_the_operator_is_a_refusal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tree = load(CONFIGS / "one-machine.yaml", (f"node.run_dir={tmp_path}", "telemetry.format=json"), {})
    node = tree.node.model_copy(update={"interface": "none0", "address": None})
    assert serve(tree.model_copy(update={"node": node}), keep=True) == REFUSED
    said = capsys.readouterr()
    assert "daemon.refused" in said.out + said.err
    assert "see: ip address" in said.out + said.err
    with pytest.raises(Refusal, match="none0"):
        own_address("none0")


@pytest.mark.parametrize(
    ("ways", "endpoints", "address"),
    [
        ({ABROAD: "10.0.0.3"}, ["10.9.0.1:2379"], "10.0.0.3"),
        (
            {"10.9.0.1": "10.9.0.7"},
            ["https://10.9.0.1:2379"],
            "10.9.0.7",
        ),  # an isolated network, without a default route
        ({"etcd-2": "10.9.0.7", "etcd-1": "127.0.1.1"}, ["etcd-1:2379", "etcd-2:2379"], "10.9.0.7"),
        ({"127.0.0.1": "127.0.0.1"}, ["http://127.0.0.1:2379"], "127.0.0.1"),
        ({"localhost": "127.0.0.1"}, ["localhost:2379"], "127.0.0.1"),
        ({}, [], "127.0.0.1"),
        ({}, ["10.9.0.1:2379"], None),
        ({"etcd-1": "127.0.1.1"}, ["etcd-1:2379"], None),
    ],
)
def test_a_node_without_a_default_route_is_not_called_the_loopback(
    ways: dict[str, str], endpoints: list[str], address: str | None
) -> None:
    # Found by reading: all nodes of an isolated network called themselves 127.0.0.1, and no gang formed.
    def way(host: str) -> str:
        if host not in ways:
            raise OSError("network is unreachable")
        return ways[host]

    assert outward(endpoints, way) == address


def test_a_machine_without_any_way_out_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("elasticrl.daemon.resident.outward", lambda _: None)
    with pytest.raises(Refusal, match=r"no way leads out of this machine.*node\.interface"):
        own_address(None, ["10.9.0.1:2379"], within_s=0.0)


def test_a_foreground_daemon_ends_with_who_started_it_unless_that_is_to_be_outlived() -> None:
    # Found by reading: one under nohup was ended with its shell, and its job held.
    asked = Asked(Path("job.yaml"), (), foreground=True, adopt=False, parent=0)
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests themselves may run under nohup
    try:
        assert follows(asked) == os.getppid()
        assert follows(asked._replace(parent=7)) == 7
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        assert follows(asked) == 0
        assert follows(asked._replace(parent=7)) == 7, "`elasticrl run` ends its own"
        assert follows(asked._replace(foreground=False)) == 0
    finally:
        signal.signal(signal.SIGHUP, before)
