"""Prometheus metrics of a daemon, each declared once. `docs/METRICS.md` is generated from this table."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0)
LONG = (*SECONDS, 300.0, 600.0, 1800.0)


class Metrics:
    """One daemon's metrics, in a registry of their own, so that two daemons in one process (tests) do not meet.

    Long because it is one list: an attribute for each metric.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        r = self.registry
        self.generation = Gauge("elasticrl_generation", "Number of the plan this node follows.", registry=r)
        self.world = Gauge("elasticrl_world_ranks", "Training ranks in the present plan.", registry=r)
        self.step = Gauge("elasticrl_sealed_step", "Newest sealed step of this node's workers.", registry=r)
        self.committed = Gauge("elasticrl_committed_step", "Step of the newest disk checkpoint.", registry=r)
        self.commit_age = Gauge(
            "elasticrl_commit_age_seconds",
            "Time since the newest commit, or since this daemon saw its workers train, if that is less.",
            registry=r,
        )
        self.leading = Gauge("elasticrl_leading", "1 while this node leads.", registry=r)
        self.lease_age = Gauge(
            "elasticrl_lease_age_seconds", "Time since the last keepalive that the store acknowledged.", registry=r
        )
        self.goodput = Gauge(
            "elasticrl_goodput_ratio",
            "Sealed steps, each at what a step usually takes, by the time since this node's workers first made one.",
            registry=r,
        )
        self.recoveries = Counter("elasticrl_recoveries", "Recoveries, by rung of the ladder.", ["rung"], registry=r)
        self.exits = Counter(
            "elasticrl_worker_exits",
            "Workers that ended without being told to, by cause: signal N, or program, peer_gone, gone, killed, oom_killed, "
            "host_stuck, stopped, unjoined, diverged, miscomputed, other_files, unkept.",
            ["cause"],
            registry=r,
        )
        self.stalls = Counter(
            "elasticrl_worker_stalls", "Workers without progress beyond their budget, by phase.", ["phase"], registry=r
        )
        self.timeouts = Counter(
            "elasticrl_collective_timeouts",
            "Collectives of this node's workers that ran into their timeout.",
            registry=r,
        )
        self.lost = Counter(
            "elasticrl_steps_lost",
            "Steps that were made again after a fault, as this node's incidents say.",
            registry=r,
        )
        self.step_s = Histogram(
            "elasticrl_step_seconds", "Seconds of each step of each of this node's workers.", buckets=LONG, registry=r
        )
        self.phase_s = Histogram(
            "elasticrl_phase_seconds",
            "Of these, in each phase. `sync` is the switch of elasticrl.ppo: the weights' way to its engines.",
            ["phase"],
            buckets=LONG,
            registry=r,
        )
        self.waited_s = Counter(
            "elasticrl_waited_seconds", "Of these, spent waiting in collectives, by phase.", ["phase"], registry=r
        )
        self.collective_bytes = Counter(
            "elasticrl_collective_bytes", "Bytes that the collectives of this node's workers have moved.", registry=r
        )
        self.recovery_s = Histogram(
            "elasticrl_recovery_seconds",
            "Seconds of each stage of a recovery: detect, decide, reform, restore, first_step.",
            ["stage"],
            buckets=SECONDS,
            registry=r,
        )
        self.store_s = Histogram(
            "elasticrl_store_seconds",
            "Seconds that an action on the store took.",
            ["action"],
            buckets=SECONDS,
            registry=r,
        )
        self.beats_sent = Counter("elasticrl_beats_sent", "Beats sent to neighbours.", registry=r)
        self.beats_heard = Counter("elasticrl_beats_heard", "Beats heard from neighbours.", registry=r)
        self.suspected = Gauge("elasticrl_neighbours_suspected", "Neighbours that this node does not hear.", registry=r)


def document() -> str:
    """`docs/METRICS.md`, from the declarations."""
    lines = [
        "# Metrics",
        "",
        "Served in Prometheus' text format where `telemetry.metrics_address` says (loopback by default).",
        "This page is generated: `python -m elasticrl.telemetry.metrics > docs/METRICS.md`.",
        "",
        "| name | kind | labels | meaning |",
        "|---|---|---|---|",
    ]
    for metric in vars(Metrics()).values():
        if isinstance(metric, CollectorRegistry):
            continue
        name = metric._name + ("_total" if isinstance(metric, Counter) else "")  # noqa: SLF001 - there is no public accessor
        labels = ", ".join(metric._labelnames)  # noqa: SLF001 - see above
        lines.append(f"| `{name}` | {type(metric).__name__.lower()} | {labels} | {metric._documentation} |")  # noqa: SLF001 - see above
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(document(), end="")
