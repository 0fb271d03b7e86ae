"""Which guarantee holds for a run: a table from its configuration and its device to a sentence for the log.

The idea: what weakens the guarantee is known before the first step, so it is said there, and nobody has to find it out from two
runs that part. The weakest clause that applies is what holds; the sentence names all that apply.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

from elasticrl.ppo.answers import PER_RECORD
from elasticrl.runtime.trained import strategy_of
from elasticrl.runtime.zero import CLOSE

if TYPE_CHECKING:
    from elasticrl.config import Tree

Holds = Literal["bits", "close", "ledger"]
ORDER: Final[tuple[Holds, ...]] = ("bits", "close", "ledger")  # the strongest first


@dataclass(frozen=True, slots=True, kw_only=True)
class Guarantee:
    """`bits`: the same bits; `close`: the same samples, close in floats; `ledger`: each sample once, its text may be another.

    Example: Guarantee(holds="bits", text="the same bits for any number of workers and through any fault")
    """

    holds: Holds
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What a guarantee depends on. `experts`: the actor is a mixture of experts."""

    tree: Tree
    device: str
    experts: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Clause:
    """Something to be said where it applies; `holds` is the most that is left there."""

    applies: Callable[[Job], bool]
    text: str
    holds: Holds = "bits"


def of(tree: Tree, device: str, *, experts: bool = False) -> Guarantee:
    """What holds for a job of this configuration whose workers compute there. `experts`: see `Job`.

    >>> from elasticrl.config import Tree
    >>> of(Tree.model_validate({"job": {"name": "j"}}), "cpu").holds
    'bits'
    """
    job = Job(tree=tree, device=device, experts=experts)
    found = [clause for clause in CLAUSES if clause.applies(job)]
    weakest: Holds = max(found, key=lambda clause: ORDER.index(clause.holds)).holds if found else "bits"
    said = [clause.text for clause in found]
    return Guarantee(holds=weakest, text="; ".join([BITS, *said] if weakest == "bits" else said))


def _close(job: Job) -> bool:
    # As in config's relations: a critic under DeepSpeed counts, though the algorithm may have none.
    return "deepspeed" in {strategy_of(job.tree, role) for role in ("actor", "critic")}


def _generates(job: Job) -> bool:
    return job.tree.ppo.algorithm not in PER_RECORD


def _vllm(job: Job) -> bool:
    return _generates(job) and job.tree.rollout.engine == "vllm"


def _fresh(job: Job) -> bool:
    """Of rollout nodes nobody here knows the devices, so no more is promised than GPUs keep."""
    rollout = job.tree.rollout
    return _vllm(job) and not rollout.vllm.batch_invariant and (job.device != "cpu" or rollout.nodes > 0)


def _threads(job: Job) -> bool:
    return _vllm(job) and not _fresh(job) and job.device == "cpu" and job.tree.lanes.threads > 1


def _mixed(job: Job) -> bool:
    """An engine of its own has rows of several lanes in a block; `torch` has one lane's."""
    return _generates(job) and job.experts and job.tree.rollout.engine != "torch"


def _url(job: Job) -> bool:
    return _generates(job) and bool(job.tree.reward.urls)


BITS: Final = "the same bits for any number of workers and through any fault, on nodes that compute alike"
_FRESH: Final = (
    "so what a fault makes it generate again is a fresh sample: each sample is used exactly once, and bits differ"
)

CLAUSES: Final = (
    Clause(applies=_close, holds="close", text=CLOSE),
    Clause(
        applies=lambda job: _generates(job) and job.tree.rollout.engine == "server",
        holds="ledger",
        text="nobody here knows how the server at rollout.server.url rounds, " + _FRESH,
    ),
    Clause(
        applies=_fresh,
        holds="ledger",
        text="vLLM on a GPU rounds otherwise in another batch (rollout.vllm.batch_invariant is false), " + _FRESH,
    ),
    Clause(
        applies=_threads,
        holds="ledger",
        text="vLLM on several threads rounds otherwise from time to time (lanes.threads is over 1), " + _FRESH,
    ),
    Clause(
        applies=_mixed,
        holds="ledger",
        text="a mixture of experts rounds otherwise beside other rows, which any engine but torch has there, " + _FRESH,
    ),
    Clause(
        applies=_url,
        text="scores of an endpoint are recorded before they are first used, and replayed in what a fault makes do again",
    ),
    Clause(
        applies=lambda job: job.tree.lanes.exact == "warn",
        text="a node that computes other bits is let in, and the plan that does it says so (lanes.exact: warn)",
    ),
    Clause(
        applies=lambda job: job.tree.lanes.exact == "off",
        text="nobody looks whether nodes compute alike (lanes.exact: off)",
    ),
)
