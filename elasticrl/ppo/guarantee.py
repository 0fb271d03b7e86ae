"""Which guarantee holds for a run: a table from its configuration and its device to a sentence for the log.

The idea: what weakens the guarantee is known before the first step, so it is said there, and nobody has to find it out from two
runs that part. The weakest clause that applies is what holds; the sentence names all that apply.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

from elasticrl.ppo.given import PER_RECORD
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
class Clause:
    """Something to be said where it applies; `holds` is the most that is left there."""

    applies: Callable[[Tree, str], bool]
    text: str
    holds: Holds = "bits"


def of(tree: Tree, device: str, *, experts: bool = False) -> Guarantee:
    """What holds for a job of this configuration whose workers compute there. `experts`: the actor is a mixture of experts.

    >>> from elasticrl.config import Tree
    >>> of(Tree.model_validate({"job": {"name": "j"}}), "cpu").holds
    'bits'
    """
    found = [clause for clause in CLAUSES if clause.applies(tree, device)]
    found += [MIXED] if experts and _served(tree) else []
    weakest: Holds = max(found, key=lambda clause: ORDER.index(clause.holds)).holds if found else "bits"
    said = [clause.text for clause in found]
    return Guarantee(holds=weakest, text="; ".join([BITS, *said] if weakest == "bits" else said))


def _close(tree: Tree, _device: str) -> bool:
    # As in config's relations: a critic under DeepSpeed counts, though the algorithm may have none.
    return "deepspeed" in {strategy_of(tree, role) for role in ("actor", "critic")}


def _vllm(tree: Tree) -> bool:
    return tree.ppo.algorithm not in PER_RECORD and tree.rollout.engine == "vllm"


def _fresh(tree: Tree, device: str) -> bool:
    """Of rollout nodes nobody here knows the devices, so no more is promised than GPUs keep."""
    return _vllm(tree) and not tree.rollout.vllm.batch_invariant and (device != "cpu" or tree.rollout.nodes > 0)


def _threads(tree: Tree, device: str) -> bool:
    return _vllm(tree) and not _fresh(tree, device) and device == "cpu" and tree.lanes.threads > 1


def _served(tree: Tree) -> bool:
    return tree.ppo.algorithm not in PER_RECORD and tree.rollout.engine == "served"


def _url(tree: Tree, _device: str) -> bool:
    return tree.ppo.algorithm not in PER_RECORD and tree.reward.url is not None


BITS: Final = "the same bits for any number of workers and through any fault, on nodes that compute alike"
_FRESH: Final = (
    "so what a fault makes it generate again is a fresh sample: each sample is used exactly once, and bits differ"
)

MIXED: Final = Clause(
    applies=lambda *_: True,
    holds="ledger",
    text="a mixture of experts in the engine served rounds otherwise beside other rows (the engine torch does not), "
    + _FRESH,
)

CLAUSES: Final = (
    Clause(applies=_close, holds="close", text=CLOSE),
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
        applies=_url,
        text="scores of reward.url are recorded before they are first used, and replayed in what a fault makes do again",
    ),
    Clause(
        applies=lambda tree, _: tree.lanes.exact == "warn",
        text="a node that computes other bits is let in, and the plan that does it says so (lanes.exact: warn)",
    ),
    Clause(
        applies=lambda tree, _: tree.lanes.exact == "off",
        text="nobody looks whether nodes compute alike (lanes.exact: off)",
    ),
)
