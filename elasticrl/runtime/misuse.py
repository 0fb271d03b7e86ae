"""What a script is told that calls the runtime in a way that cannot be meant.

The one idea: a mistake is told where it is made, with what to do. Some mistakes end in torch, which cannot know of us: a script
of torchrun has brought them along. What torch says of those has a sentence of ours behind it.
"""

from __future__ import annotations

from typing import Final


class Misuse(RuntimeError):
    """The script calls the runtime in a way that cannot be meant; the sentence says what to do."""


NO_GROUP: Final = (
    "There is no process group here: the runtime makes one inside of `for step in run.steps()`, and a new one after each "
    "fault. Remove DistributedDataParallel, init_process_group, barriers and collectives of your own: lanes are summed by "
    "run.update(), numbers by lane.tally, words by run.tell() inside of `with step:`."
)
NO_SCALER: Final = (
    "A GradScaler looks at gradients that the runtime has taken, and so finds none. Use LossScaler of "
    "elasticrl.runtime.scaler, or bfloat16, which needs none."
)
# What torch says, and what a script should do instead.
FROM_TORCH: Final = (
    ("Default process group has not been initialized", NO_GROUP),
    ("Error initializing torch.distributed using env://", NO_GROUP),
    ("trying to initialize the default process group twice", NO_GROUP),
    ("No inf checks were recorded", NO_SCALER),
)


def explained(error: BaseException | None) -> Misuse | None:
    """What is behind an error of torch; None if it is no known one."""
    said = str(error) if error is not None and not isinstance(error, Misuse) else ""
    return next((Misuse(sentence) for words, sentence in FROM_TORCH if words in said), None)
