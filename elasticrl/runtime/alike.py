"""What must be alike on all ranks: data, models and buffers at a beginning, the parameters they compute with after an update.
And a gradient's norm, which is alike by itself, has to be a number.

The one idea: each rank judges by what all have said, so all find the same ranks odd, at the same moment.
"""

from __future__ import annotations

from math import isfinite
from typing import TYPE_CHECKING

from elasticrl.runtime.agree import exchange
from elasticrl.runtime.checkpoint import tree as trees
from elasticrl.runtime.checkpoint.parts import Replicated as Plain
from elasticrl.runtime.digest import outliers
from elasticrl.runtime.misuse import Misuse
from elasticrl.runtime.names import bare
from elasticrl.runtime.replicated import Replicated
from elasticrl.runtime.vault.errors import CheckpointRefused, DataError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from elasticrl.runtime.agree import Agreed
    from elasticrl.runtime.checkpoint.parts import Part
    from elasticrl.runtime.data.cursor import Cursor
    from elasticrl.runtime.group import Gang
    from elasticrl.runtime.progress import Progress
    from elasticrl.runtime.strategy import Reduced
    from elasticrl.runtime.trained import Trained
    from elasticrl.runtime.vault.source import Source
    from elasticrl.runtime.vault.version import Version


class Diverged(RuntimeError):
    """This rank's parameters are not those of the others, although they must be bit for bit: silent corruption."""


class NotFinite(RuntimeError):
    """A gradient that would have made every parameter NaN. No rank has applied anything of its update."""


def check_beginning(agreed: Agreed, gang: Gang, cursor: Cursor | None, roles: Mapping[str, Trained]) -> None:
    """At the very beginning: nobody restored anything, so models and data must be alike on all ranks. Collective."""
    if agreed.whole is not None or agreed.checkpoint is not None:
        return
    told = exchange(gang, cursor.describe() if cursor else "")
    if len(set(told)) > 1:
        ranks = {data: [str(rank) for rank, one in enumerate(told) if one == data] for data in told}
        each = "; ".join(f"rank {', '.join(who)} has {data}" for data, who in ranks.items())
        raise DataError(f"The ranks have different data ({each}). Give each node the same files under the same name.")
    for name, role in roles.items():
        if isinstance(role.live, Replicated) and (odd := role.live.diverged()):
            raise Misuse(
                f"The ranks built different models ({name} of rank {', '.join(map(str, odd))}). Build models after join(), "
                "which seeds the generators from job.seed, and from nothing that differs between ranks."
            )


def check_kept(source: Source, models: Mapping[str, Collection[str]]) -> None:
    """What was kept has no weight that the models here do not have, by role: nobody would miss it, and it would be gone."""
    known = source.wholes("")
    for name, mine in models.items():
        lost = sorted(
            key for key in known if key.startswith(f"{name}.") and bare(key).removeprefix(f"{name}.") not in mine
        )
        if lost:
            raise CheckpointRefused(
                f"{source.name} has {len(lost)} weights of {name} that the model of this run has not ({lost[0]}, ...): it is "
                "another model than the job has trained until now. Go on with the files and the script that it was made with."
            )


def check_buffers(
    gang: Gang, roles: Mapping[str, Trained], others: Mapping[str, Part], say: Callable[[str], None]
) -> None:
    """No rank has built other buffers than the others, nor have they changed here. Those that a part of `others` has are state
    like any other. Collective.
    """
    plain = [part.state_dict() for part in others.values() if isinstance(part, Plain)]
    tensors = [tensor for state in plain for tensor in trees.split("", state)[1].values()]
    registered = {tensor.untyped_storage().data_ptr() for tensor in tensors if not hasattr(tensor, "to_local")}
    mine = {name: role.buffers.begin(role.model, registered) for name, role in roles.items()}
    told = exchange(gang, mine)  # also where there are none here: others may have some
    for name, theirs in mine.items():
        odd = outliers([int(one[name] or "0", 16) for one in told])
        if not odd:
            continue
        who = f"{name} of rank {', '.join(map(str, odd))}"
        say(f"the buffers of {who} of generation {gang.generation} are not those of the others")
        if gang.rank in odd:
            raise Misuse(
                f"The ranks built different buffers ({who}; here {theirs or 'none'}). Nobody restores buffers: build "
                "models from the same files on all nodes, and from nothing else that differs between ranks."
            )


def not_finite(found: Mapping[str, Reduced], *, losses: bool = False) -> str:
    """What of an update is not finite, or "": the sum's norm, and with `losses` what was tallied under a name that ends in
    loss. All ranks know both alike, so all say the same.
    """
    norms = [f"of {name} is {reduced.norm}" for name, reduced in found.items() if not isfinite(reduced.norm)]
    if norms:
        return f"The norm of the gradient {', '.join(norms)}"
    sums = [(name, value) for reduced in found.values() for name, value in reduced.tally.sums.items()]
    odd = [f"{name} is {value}" for name, value in sums if losses and name.endswith("loss") and not isfinite(value)]
    return f"The {', '.join(odd)}" if odd else ""


def check_finite(odd: str, progress: Progress) -> None:
    """Each rank raises, so the failure is the program's and no single node's."""
    if odd:
        raise NotFinite(
            f"{odd} in update {progress.update} of step "
            f"{progress.step}: nothing of it was applied, and the state before it is kept. Look at what this update's "
            "loss is made of (a division by zero, a logarithm of 0, an overflow in half precision, a reward that is out of "
            "range), and at the steps before for a norm that grows: then lower the learning rate or clip (max_norm)."
        )


def check_replicas(odd: Sequence[int], gang: Gang, now: Version, say: Callable[[str], None]) -> None:
    """No rank computes with other parameters than the others; the digests of version `now` have shown which are `odd`."""
    if not odd:
        return
    who = f"rank {', '.join(map(str, odd))} of generation {gang.generation}"
    say(f"divergence at step {now}: the parameters of {who} are not those of the others")
    if gang.rank in odd:
        raise Diverged(
            f"The parameters that rank {gang.rank} computes with are not those of the others at step {now}: memory "
            "or processor of this node corrupts data silently. This process ends, and a fresh one restores its state; if "
            "it happens again, have the node's memory tested."
        )
