"""What this node measures of itself, and where Prometheus reads it: `telemetry.metrics_port`.

The one idea: what happens is told here when it happens, and what can only be looked at (ages, totals, the plan's numbers) is
looked at after each step of the core. Where nobody can read it, nothing is kept, and Prometheus' client is not imported.
"""

import time
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any, cast

from elasticrl.base.goodput import stepped
from elasticrl.config.cluster import Telemetry
from elasticrl.contract.model import Exit, Rung, Work
from elasticrl.core.node.state import State
from elasticrl.daemon.steps import Line, count
from elasticrl.status.recovery import Done, Goodput, kind_of

if TYPE_CHECKING:
    from elasticrl.telemetry.metrics import Metrics


class Measures:
    """One daemon's."""

    def __init__(self, conf: Telemetry, *, log: Any) -> None:
        self.log = log
        self.metrics = metrics_of(conf)
        for rung in Rung:
            self.metrics.recoveries.labels(rung=rung.name.lower())  # a first one would not be seen to have come
        self._conf = conf
        self._trains_since: float | None = None  # by the wall clock: since this daemon has seen its workers train
        self._beats = (0, 0)  # sent and heard, as the metrics know it
        self._goodput = Goodput()

    def serve(self, stack: AsyncExitStack) -> None:
        """Until the stack ends, if they are to be served at all."""
        conf = self._conf
        if conf.metrics_port:
            from elasticrl.daemon.exposed import serve

            try:
                server = serve(self.metrics.registry, conf.metrics_address, conf.metrics_port)
            except OSError as error:  # a port that is taken costs the metrics alone
                where = f"{conf.metrics_address}:{conf.metrics_port}"
                self.log.info(
                    "metrics.refused",
                    reason=f"{where}: {error.strerror or error}; choose another telemetry.metrics_port",
                )
                return
            stack.callback(server.server_close)
            stack.callback(server.shutdown)

    def exited(self, left: Exit) -> None:
        """A worker ended that should not have."""
        self.metrics.exits.labels(cause=kind_of(left)).inc()

    def stalled(self, phase: str) -> None:
        """A worker makes no progress in that phase."""
        self.metrics.stalls.labels(phase=phase).inc()

    def recovered(self, done: Done) -> None:
        """A recovery is over: one line, and the metrics."""
        stages = {name: round(seconds, 4) for name, seconds in done.stages.items()}
        lost = {} if done.lost is None else {"lost": done.lost}
        self.log.info(
            "recovery.done",
            generation=done.generation,
            rung=done.rung,
            total_s=round(done.total_s, 4),
            stages=stages,
            **lost,
        )
        self.metrics.recoveries.labels(rung=done.rung).inc()
        for name, seconds in done.stages.items():
            self.metrics.recovery_s.labels(stage=name).observe(max(0.0, seconds))

    def look(self, state: State, beats: tuple[int, int], now: float) -> None:
        """What is so after a step of the core. `beats`: how many were sent and heard, ever."""
        metrics, view, workers = self.metrics, state.view, state.workers
        metrics.generation.set(view.generation)
        metrics.world.set(view.plan.world if view.plan else 0)
        metrics.committed.set(view.committed)
        metrics.leading.set(1 if state.lead else 0)
        metrics.lease_age.set(max(0.0, now - state.leased) if state.leased > 0 else 0.0)
        metrics.suspected.set(len(state.suspects))
        if self._trains_since is None and workers is not None and workers.work is Work.TRAINING:
            self._trains_since = time.time()
        if self._trains_since is not None:
            # A commit of an earlier run is as old as the job's pause, which is nobody's fault.
            written = view.commit.written if view.commit else 0.0
            metrics.commit_age.set(max(0.0, time.time() - max(written, self._trains_since)))
        (sent, heard), (sent_before, heard_before) = beats, self._beats
        metrics.beats_sent.inc(sent - sent_before)
        metrics.beats_heard.inc(heard - heard_before)
        self._beats = beats
        if workers is not None:
            metrics.step.set(workers.step)
            metrics.goodput.set(self._goodput.share(now))

    def count(self, line: Line) -> None:
        """A worker's steps. Not to be called where nobody reads them: it costs as much."""
        count(self.metrics, line)
        if stepped(line.seconds):
            took_s = sum(line.seconds.values())
            self._goodput = self._goodput.after(step=line.step, steps=line.steps, seconds=took_s, now=time.monotonic())


class Unserved:
    """Metrics that nobody can read: whatever is counted here is forgotten. A sixteenth of a start is prometheus' client."""

    def __getattr__(self, _: str) -> "Unserved":
        return self

    def __call__(self, *_: object, **__: object) -> "Unserved":
        """A counter's `labels`, `inc`, `set` or `observe`."""
        return self


def metrics_of(conf: Telemetry) -> "Metrics":
    """This daemon's, where they are served."""
    if not conf.metrics_port:
        return cast("Metrics", Unserved())
    from elasticrl.telemetry.metrics import Metrics

    return Metrics()
