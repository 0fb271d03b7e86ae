"""The runbook leaves no alert and no verdict without a word; folklore and decisions say what is so."""

import re
from pathlib import Path

import pytest
import yaml

from elasticrl.contract.verdict import Fault
from elasticrl.diagnose.environment import lint

ROOT = Path(__file__).parents[2]
RUNBOOK = (ROOT / "docs" / "OPERATIONS.md").read_text(encoding="utf-8")
RULES = yaml.safe_load((ROOT / "configs" / "prometheus" / "elasticrl.rules.yaml").read_text())
ALERTS = [rule["alert"] for group in RULES["groups"] for rule in group["rules"]]


@pytest.mark.parametrize("name", [*ALERTS, *map(str, Fault)])
def test_the_runbook_says_what_to_do(name: str) -> None:
    found = re.search(rf"^### {name}\n\n(.+?)(?=\n#|\Z)", RUNBOOK, flags=re.MULTILINE | re.DOTALL)
    assert found, f"docs/OPERATIONS.md has no section {name!r}"
    assert len(found[1].split()) >= 8


def test_the_runbook_knows_no_others() -> None:
    assert set(re.findall(r"^### (.+)$", RUNBOOK, flags=re.MULTILINE)) == {*ALERTS, *map(str, Fault)}


def test_every_decision_has_its_line() -> None:
    page = (ROOT / "docs" / "DECISIONS.md").read_text(encoding="utf-8")
    for path in sorted((ROOT / "docs" / "decisions").glob("*.md")):
        assert f"(decisions/{path.name})" in page, path.name
    assert all((ROOT / "docs" / link).exists() for link in re.findall(r"\((decisions/[^)]+)\)", page))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("NCCL_TIMEOUT", "1200000"), ("NCCL_TIMEOUT_MS", "360000000"), ("NCCL_MAX_RINGS", "8"), ("NCCL_MAX_NRINGS", "8"),
        ("NCCL_MIN_NRINGS", "4"), ("NCCL_TREE_THRESHOLD", "0"), ("NCCL_IB_DISABLE", "0"), ("NCCL_IB_GID_INDEX", "3"),
        ("NCCL_NET_GDR_LEVEL", "2"), ("NCCL_ASYNC_ERROR_HANDLING", "1"), ("CUDA_DEVICE_MAX_CONNECTIONS", "1"),
        ("CUDA_LAUNCH_BLOCKING", "1"), ("VERL_DEBUG", "1"), ("VERL_LOG_LEVEL", "INFO"), ("VLLM_USE_V1", "1"),
        ("NCCL_IB_HCA", "mlx5_1"), ("NCCL_NVLS_ENABLE", "0"),
    ],
)  # fmt: skip
def test_what_folklore_says_the_linter_finds_it_finds(name: str, value: str) -> None:
    assert f"`{name}" in (ROOT / "docs" / "FOLKLORE.md").read_text(encoding="utf-8")
    assert [finding for finding in lint({name: value}) if finding.name == name], f"{name}={value} passes the linter"


def test_right_settings_pass() -> None:
    assert not lint({"NCCL_DEBUG": "WARN"})
