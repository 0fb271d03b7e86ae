"""What a daemon serves to Prometheus, for the tests of rules and dashboards."""

from prometheus_client import CollectorRegistry

from elasticrl.telemetry.metrics import Metrics


def names() -> set[str]:
    """Every metric's."""
    return {metric._name for metric in vars(Metrics()).values() if not isinstance(metric, CollectorRegistry)}


def served() -> dict[str, set[str]]:
    """Every series with its own labels."""
    found: dict[str, set[str]] = {}
    for metric in vars(Metrics()).values():
        if isinstance(metric, CollectorRegistry):
            continue
        kind, labels = type(metric).__name__, set(metric._labelnames)
        endings = {"Counter": ["_total"], "Histogram": ["_bucket", "_sum", "_count"]}.get(kind, [""])
        found |= {metric._name + end: labels | ({"le"} if end == "_bucket" else set()) for end in endings}
    return found
