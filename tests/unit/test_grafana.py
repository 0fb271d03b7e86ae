"""The dashboard asks for metrics that exist, by labels that they have; the Slurm script is one that a shell can run."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from metrics_kit import names, served

CONFIGS = Path(__file__).parents[2] / "configs"
BOARD = json.loads((CONFIGS / "grafana" / "elasticrl.json").read_text(encoding="utf-8"))
PANELS: list[dict[str, Any]] = BOARD["panels"]
SCRIPT = CONFIGS / "slurm" / "elasticrl.sbatch"


def expressions() -> list[str]:
    return [t["expr"] for p in PANELS for t in p["targets"]] + [note["expr"] for note in BOARD["annotations"]["list"]]


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel["title"])
def test_a_panel_shows_what_is_served(panel: dict[str, Any]) -> None:
    series = served()
    for target in panel["targets"]:
        asked = re.findall(r"elasticrl_\w+", target["expr"])
        assert asked
        assert set(asked) <= set(series)
        labels = set().union(*(series[name] for name in asked)) | {"job", "instance"}
        grouped = {name.strip() for names in re.findall(r"by \(([^)]*)\)", target["expr"]) for name in names.split(",")}
        shown = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
        assert grouped | shown <= labels
        assert target["expr"].count('job="$job"') == len(asked), "two jobs must not be added up"
        assert target["expr"].count("(") == target["expr"].count(")")
        if grouped:
            assert shown <= grouped, "what the legend names must survive the aggregation"
    assert panel["description"].endswith(".")


def test_every_metric_has_its_place() -> None:
    shown = set(re.findall(r"elasticrl_\w+?(?=_bucket|_sum|_total|[{ ,)])", " ".join(expressions())))
    there = names()
    assert there - shown == set(), "add a panel, or say here why not"


def test_panels_do_not_lie_over_each_other() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in PANELS:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert place["x"] + place["w"] <= 24
        assert not cells & taken, panel["title"]
        taken |= cells
    assert len({panel["id"] for panel in PANELS}) == len(PANELS)


def test_the_slurm_script_is_one_and_its_signal_is_trapped() -> None:
    text = SCRIPT.read_text(encoding="utf-8")
    done = subprocess.run([shutil.which("bash") or "bash", "-n", str(SCRIPT)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "--ntasks-per-node=1" in text
    assert "--signal=B:USR1@120" in text
    assert re.search(r"^trap .* USR1$", text, flags=re.MULTILINE)
    assert "scontrol requeue" in text


def test_at_the_limit_the_slurm_script_stops_the_job_and_queues_it_again(tmp_path: Path) -> None:
    """With stand-ins for Slurm's programs: the script's own logic, from USR1 to the requeue."""
    said = tmp_path / "said"
    programs = {
        "srun": 'trap "exit 75" TERM; touch "$UP"; while :; do sleep 0.05; [ -e "$STOPPED" ] && exit 75; done',
        "elasticrl": 'echo "elasticrl $*" >> "$SAID"; touch "$STOPPED"',
        "scontrol": 'echo "scontrol $*" >> "$SAID"',
    }
    for name, body in programs.items():
        program = tmp_path / name
        program.write_text(f"#!/bin/bash\n{body}\n")
        program.chmod(0o755)
    up = tmp_path / "up"
    env = {
        "PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_ID": "42", "SAID": str(said), "UP": str(up),
        "STOPPED": str(tmp_path / "stopped"), "CONFIG": "/shared/x.yaml",
    }  # fmt: skip
    script = subprocess.Popen(["bash", str(SCRIPT)], env=env, stdout=subprocess.PIPE, text=True)
    wait = subprocess.run(["bash", "-c", f"for i in $(seq 600); do [ -e {up} ] && exit 0; sleep 0.1; done; exit 1"])
    assert wait.returncode == 0
    script.send_signal(10)  # USR1
    output, _ = script.communicate(timeout=60)
    assert script.returncode == 75
    assert said.read_text().splitlines() == ["elasticrl stop --yes --store /shared/x.yaml", "scontrol requeue 42"]
    assert "queued again" in output
