"""The alert rules speak of metrics that exist, with labels that they have."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from metrics_kit import served

FILE = Path(__file__).parents[2] / "configs" / "prometheus" / "elasticrl.rules.yaml"
RULES: list[dict[str, Any]] = [rule for group in yaml.safe_load(FILE.read_text())["groups"] for rule in group["rules"]]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_an_alert_asks_for_what_is_served_and_says_what_to_do(rule: dict[str, Any]) -> None:
    series = served()
    asked = re.findall(r"elasticrl_\w+", rule["expr"])
    assert asked
    assert set(asked) <= set(series)
    labels = set().union(*(series[name] for name in asked)) | {"job", "instance"}
    grouped = {name.strip() for names in re.findall(r"by \(([^)]*)\)", rule["expr"]) for name in names.split(",")}
    chosen = set(re.findall(r"{(\w+)=", rule["expr"]))
    told = set(re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"]))
    assert grouped | chosen <= labels
    assert told <= grouped, "what the summary names must survive the aggregation"
    assert rule["labels"]["severity"] in {"page", "ticket"}
    assert rule["annotations"]["runbook"]
    assert rule["expr"].count("(") == rule["expr"].count(")")


def test_what_a_job_has_grown_by_is_asked_of_the_job_and_not_of_a_node_that_has_just_come() -> None:
    """Its gauge grows from 0 to the job's step: for ten minutes nobody would have been called."""
    board = (FILE.parents[1] / "grafana" / "elasticrl.json").read_text()
    for text in (FILE.read_text(), board):
        assert not re.search(r"(delta|deriv|rate|increase)\(elasticrl_sealed_step", text)
    assert "max_over_time(elasticrl_sealed_step[10m])" in FILE.read_text()
    assert "deriv(max(elasticrl_sealed_step" in board


def test_no_two_alerts_have_one_name() -> None:
    assert len({rule["alert"] for rule in RULES}) == len(RULES)
