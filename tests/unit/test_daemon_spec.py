"""What a daemon tells its agent of the workers to come."""

from pathlib import Path

import pytest
import structlog

from elasticrl.agent.spec import NO_PLUGINS, Spec, environment
from elasticrl.config.tree import Tree
from elasticrl.daemon.history import History
from elasticrl.daemon.main import Daemon


@pytest.mark.parametrize(("device", "sees"), [("cpu", ""), ("auto", None), ("cuda", None)])
def test_only_a_job_on_processors_is_kept_from_the_cards(tmp_path: Path, device: str, sees: str | None) -> None:
    folders = {"run_dir": str(tmp_path / "run"), "state_dir": str(tmp_path / "state")}
    tree = Tree.model_validate(
        {
            "job": {"name": "j", "program": "x"},
            "node": {"device": device, "interface": "lo", **folders},
            "checkpoint": {"dir": str(tmp_path / "saves")},
        }
    )
    daemon = Daemon(tree, log=structlog.get_logger(), history=History())
    assert daemon.spec().env.get("CUDA_VISIBLE_DEVICES") == sees


@pytest.mark.parametrize(("level", "ahead"), [("told", False), ("kept", True)])
def test_a_script_whose_state_is_kept_finds_what_keeps_it_imported(tmp_path: Path, level: str, ahead: bool) -> None:
    folders = {"run_dir": str(tmp_path / "run"), "state_dir": str(tmp_path / "state")}
    tree = Tree.model_validate(
        {
            "job": {"name": "j", "program": "x.py", "level": level},
            "node": {"interface": "lo", **folders},
            "checkpoint": {"dir": str(tmp_path / "saves")},
        }
    )
    daemon = Daemon(tree, log=structlog.get_logger(), history=History())
    assert ("elasticrl.runtime.kept" in daemon.spec().preload) is ahead


@pytest.mark.parametrize("tp", [1, 2])
def test_a_team_finds_imported_what_it_forms_with(tmp_path: Path, tp: int) -> None:
    folders = {"run_dir": str(tmp_path / "run"), "state_dir": str(tmp_path / "state")}
    tree = Tree.model_validate(
        {
            "job": {"name": "j", "program": "x"},
            "node": {"interface": "lo", "workers": 2, **folders},
            "model": {"tp": tp},
            "checkpoint": {"dir": str(tmp_path / "saves")},
        }
    )
    daemon = Daemon(tree, log=structlog.get_logger(), history=History())
    imported = {
        name.rpartition(".")[2] for name in daemon.spec().preload if name.startswith("torch.distributed.tensor.")
    }
    assert imported == ({"parallel", "debug"} if tp > 1 else set())


@pytest.mark.parametrize("entries", [0, 500])
def test_the_recorder_s_size_is_said_also_where_it_is_off(tmp_path: Path, entries: int) -> None:
    """torch 2.13 remembers 2,000 collectives where nothing is said."""
    folders = {"run_dir": str(tmp_path / "run"), "state_dir": str(tmp_path / "state")}
    tree = Tree.model_validate(
        {
            "job": {"name": "j", "program": "x"},
            "node": {"interface": "lo", **folders},
            "checkpoint": {"dir": str(tmp_path / "saves")},
            "comm": {"recorder": entries},
        }
    )
    daemon = Daemon(tree, log=structlog.get_logger(), history=History())
    assert daemon.spec().env["TORCH_FR_BUFFER_SIZE"] == str(entries)


@pytest.mark.parametrize(("value", "theirs"), [("__all__", None), ("logfire-plugin", "logfire-plugin")])
def test_workers_get_their_plugins_and_what_the_user_says_of_them(
    monkeypatch: pytest.MonkeyPatch, value: str, theirs: str | None
) -> None:
    assert NO_PLUGINS[1] == "__all__"
    monkeypatch.setenv(NO_PLUGINS[0], value)
    spec = Spec(job="j", node="n0", program=("x",), log_dir="/nowhere")
    assert environment(spec).get(NO_PLUGINS[0]) == theirs
