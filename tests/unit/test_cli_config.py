"""`elasticrl config` and what the command line imports, as processes: exit codes, outputs, modules."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from elasticrl.cli.script import Script, written
from elasticrl.cli.serve import implied
from elasticrl.config import load
from elasticrl.contract.model import REFUSED

ROOT = Path(__file__).parents[2]
FIVE = """\
job:
  name: demo
  program: train.py
store: {embedded: true}
membership:
  keepalive: 6s
  min_node: 2
lanes:
  count: eight
  exact: require
  exact: warn
vault: {window: 16}
"""


def elasticrl(*arguments: str | Path, **environ: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("ELASTICRL")}
    return subprocess.run(
        [sys.executable, "-m", "elasticrl.cli.main", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=60,
        env=clean | environ | {"COLUMNS": "200", "NO_COLOR": "1"},
    )


def line_of(file: Path, key: str) -> int:
    return next(
        number for number, line in enumerate(file.read_text().splitlines(), 1) if line.strip().startswith(f"{key}:")
    )


@pytest.fixture
def five(tmp_path: Path) -> Path:
    file = tmp_path / "five.yaml"
    file.write_text(FIVE)
    return file


def test_check_says_ok_and_exits_with_0() -> None:
    done = elasticrl("config", "check", ROOT / "configs/two-nodes.yaml")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("ok: ")


def test_check_prints_five_mistakes_as_five_findings_with_remedies_and_exits_with_2(five: Path) -> None:
    done = elasticrl("config", "check", five)
    assert (done.returncode, done.stderr) == (2, "")
    assert done.stdout == (
        f"{five}:6 membership.lease_ttl must exceed 2 x keepalive + store.retry"
        " (10s is not over 2 x 6s + 1s; membership.lease_ttl and store.retry are not set).\n"
        "    Raise lease_ttl to 16s or lower keepalive to 3.4s.\n"
        f"{five}:7 membership.min_node must be a known key (the nearest is min_nodes).\n"
        "    Rename it to min_nodes, or remove it.\n"
        f"{five}:9 lanes.count must be a whole number at least 1 (eight is not).\n"
        "    Write for example count: 8 (the default).\n"
        f"{five}:11 lanes.exact must be given once (line 10 and line 11 both have it).\n"
        "    Remove one of the two.\n"
        f"{five}:12 vault.window must be a size over 0B (16 has no unit).\n"
        "    Write its unit behind it, for example window: 16MiB.\n"
        f"refused: {five} has 5 mistakes\n"
    )


def test_check_as_json_has_the_same_findings(five: Path) -> None:
    done = elasticrl("config", "check", five, "--json")
    said = json.loads(done.stdout)
    assert (done.returncode, said["ok"], len(said["findings"])) == (2, False, 5)
    assert said["findings"][0] == {
        "level": "error",
        "where": {"source": "file", "name": str(five), "line": 6},
        "key": "membership.lease_ttl",
        "rule": "must exceed 2 x keepalive + store.retry",
        "values": "10s is not over 2 x 6s + 1s; membership.lease_ttl and store.retry are not set",
        "remedy": "Raise lease_ttl to 16s or lower keepalive to 3.4s.",
    }


def test_overrides_and_environment_are_checked_too() -> None:
    file = ROOT / "configs/two-nodes.yaml"
    done = elasticrl("config", "check", file, "vault.copies=2", ELASTICRL__PPO__LR="fast")
    assert done.returncode == 2
    assert "environment ELASTICRL__PPO__LR ppo.lr must be" in done.stdout
    assert "command line vault.copies must not exceed min_nodes - 1" in done.stdout


def test_warnings_do_not_refuse() -> None:
    done = elasticrl("config", "check", ROOT / "configs/two-nodes.yaml", "vault.copies=0")
    assert done.returncode == 0
    assert "vault.copies warning: should be at least 1" in done.stdout
    assert done.stdout.endswith("8 lanes, 1 warning\n")


def test_show_prints_each_value_with_its_origin() -> None:
    file = ROOT / "configs/cluster.yaml"
    done = elasticrl(
        "config", "show", file, "ppo.lr=1e-5", ELASTICRL__STORE__PASSWORD="geheim", ELASTICRL__NODE__NAME="n07"
    )
    assert done.returncode == 2, "a password and a password file"
    done = elasticrl(
        "config", "show", file, "ppo.lr=1e-5", "store.password_file=null",
        ELASTICRL__STORE__PASSWORD="geheim", ELASTICRL__NODE__NAME="n07",
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    shown = {tuple(" ".join(line.split()).split(" # ")) for line in done.stdout.splitlines() if "#" in line}
    assert {
        ("lr: 1e-05", "command line"),
        ("name: n07", "environment ELASTICRL__NODE__NAME"),
        ('password: "***"', "environment ELASTICRL__STORE__PASSWORD"),
        ("lease_ttl: 12s", f"{file}:{line_of(file, 'lease_ttl')}"),
        ("eps: 1e-08", "default"),
        ("NCCL_DEBUG: WARN", f"{file}:{line_of(file, 'NCCL_DEBUG')}"),
    } <= shown
    assert "geheim" not in done.stdout


def test_show_as_json_has_value_and_origin_by_key() -> None:
    done = elasticrl("config", "show", ROOT / "configs/two-nodes.yaml", "--json", "lanes.count=16")
    shown = json.loads(done.stdout)
    assert shown["lanes.count"] == {"value": 16, "origin": "command line"}
    assert shown["membership.settle"] == {"value": "1s", "origin": "default"}
    assert shown["agent.env.NCCL_DEBUG"]["value"] == "WARN"


def test_show_of_a_refused_file_prints_no_tree(five: Path) -> None:
    done = elasticrl("config", "show", five)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("must") == 5


@pytest.mark.long
def test_diff_prints_what_differs_and_when_it_takes_effect(tmp_path: Path, five: Path) -> None:
    old, new = tmp_path / "old.yaml", tmp_path / "new.yaml"
    old.write_text("job: {name: demo, program: t.py}\nstore: {embedded: true}\n")
    new.write_text(
        "job: {name: demo, program: t.py}\nstore: {embedded: true, retry: 1500ms}\nrecovery: {drain: 3s}\n"
        "lanes: {count: 16, threads: 2}\n"
    )
    assert elasticrl("config", "diff", old, new).stdout == (
        "store.retry: 1s -> 1.5s  # after a restart\n"
        "recovery.drain: 1m -> 3s  # on SIGHUP\n"
        "lanes.count: 8 -> 16  # another job: checkpoints of the old one are refused\n"
        "lanes.threads: 1 -> 2  # after a restart, with other bits: checkpoints of the old one are gone on from\n"
    )
    assert json.loads(elasticrl("config", "diff", old, new, "--json").stdout)[1]["key"] == "recovery.drain"
    refused = elasticrl("config", "diff", old, five)
    assert (refused.returncode, refused.stdout, refused.stderr.count("must")) == (2, "", 5)


@pytest.mark.long
def test_schema_prints_json_schema_and_the_reference() -> None:
    assert json.loads(elasticrl("config", "schema").stdout)["title"] == "elasticrl"
    assert elasticrl("config", "schema", "--markdown").stdout.startswith("# Configuration\n")


def test_version_prints_the_version() -> None:
    from elasticrl import __version__

    assert elasticrl("version").stdout.startswith(f"elasticrl {__version__} ")
    assert json.loads(elasticrl("version", "--json").stdout)["elasticrl"] == __version__


def test_a_misspelt_verb_is_refused_with_the_nearest() -> None:
    done = elasticrl("confg")
    assert done.returncode == 2
    assert "config" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--config", "absent.yaml"], REFUSED, "absent.yaml must be a file that can be read"),
        (["--config", "absent.yaml", "a"], REFUSED, "absent.yaml must be a file that can be read"),
        (["--config"], 2, "--config"),
        (["job.name=j"], 2, "Missing option"),
        (["--config", "absent.yaml", "--foregruond"], 2, "No such option"),
    ],
)
def test_a_daemon_that_is_started_wrongly_says_so(arguments: list[str], code: int, said: str) -> None:
    done = elasticrl("daemon", *arguments)
    assert (done.returncode, done.stdout) == (code, "")
    assert said in done.stderr


@pytest.mark.long
def test_a_daemons_help_is_typers() -> None:
    assert "--foreground" in elasticrl("daemon", "--help").stdout


@pytest.mark.parametrize("arguments", [["version"], ["--help"], ["config", "--help"]])
def test_verbs_cost_no_more_than_they_need(arguments: list[str]) -> None:
    script = f"""
import sys
from elasticrl.cli.main import build, main
build({arguments!r})
early = sorted({{"pydantic", "rich"}} & set(sys.modules))
try:
    main({arguments!r})
except SystemExit:
    pass
late = sorted({{"torch", "grpc", "yaml", "structlog", "prometheus_client", "elasticrl.config"}} & set(sys.modules))
print(early, late, file=sys.stderr)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    # pydantic itself is imported by typer as soon as a verb runs; that is not ours to avoid.
    assert done.stderr == "[] []\n"


@pytest.mark.long
def test_show_and_diff_hide_what_looks_like_a_secret(tmp_path: Path) -> None:
    old, new = tmp_path / "old.yaml", tmp_path / "new.yaml"
    for path, secret in ((old, "first-secret-1"), (new, "other-secret-2")):
        env = f"{{HF_TOKEN: {secret}, NCCL_DEBUG: WARN, PLAIN: hf_abcdefghijklmnopqrstuvwxyz}}"
        path.write_text(
            f"job: {{name: demo, program: train.py, args: [--api-key, {secret}, --steps, 3]}}\nstore: {{embedded: true}}\n"
            f"lanes: {{count: 8}}\nmembership: {{min_nodes: 1}}\nagent: {{env: {env}}}\n"
        )
    for arguments in (["show", old], ["show", "--json", old], ["diff", old, new]):
        said = elasticrl("config", *arguments)
        assert "[removed]" in said.stdout, said.stderr
        assert "secret-" not in said.stdout, arguments
        assert "hf_abc" not in said.stdout
    assert "NCCL_DEBUG: WARN" in elasticrl("config", "show", old).stdout


def test_a_run_on_one_machine_needs_no_store_and_no_more_nodes_than_it_plays(tmp_path: Path):
    file = tmp_path / "job.yaml"
    file.write_text("job: {name: demo, program: train.py}\nlanes: {count: 2}\n")
    assert load(file, implied(file, [], 2)).membership.max_nodes == 2
    assert implied(file, ["store.endpoints=[etcd-1:2379]", "membership.max_nodes=4"], 2) == []
    file.write_text("job: {name: demo, program: train.py}\nstore: {embedded: false}\nmembership: {min_nodes: 2}\n")
    assert implied(file, [], 3) == []


def test_a_script_that_runs_without_a_configuration_has_a_name_and_lanes_for_all_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    program = tmp_path / "_My Script 1.0.py"
    program.touch()
    for workers, lanes in ((1, 8), (5, 15)):
        tree = load(written(Script(program=str(program)), "exact", 3, workers))
        assert tree.lanes.count == lanes
        assert tree.job.name.startswith("my-script-1-0-")
