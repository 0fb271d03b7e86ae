"""What the parameters of a model are called: in rules, shards, digests, checkpoints and what is exported.

The one idea: a name is where a parameter lies in the model, whatever that is wrapped in. `checkpoint_wrapper` and
`torch.compile` put a word of theirs into the path; without it the same state is read with and without them, and is called as
torch's own `get_model_state_dict` calls it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from elasticrl.runtime.misuse import Misuse

if TYPE_CHECKING:
    import torch

WRAPPERS: Final = frozenset({"_checkpoint_wrapped_module", "_orig_mod"})


def bare(name: str) -> str:
    """A name without what wrappers put into it.

    >>> bare("layers.0._orig_mod._checkpoint_wrapped_module.weight")
    'layers.0.weight'
    """
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def parameters(model: torch.nn.Module) -> list[tuple[str, torch.nn.Parameter]]:
    """All parameters, in the model's order, one that is shared under its first name. Misuse if two are called alike."""
    found = [(bare(name), param) for name, param in model.named_parameters()]
    seen: set[str] = set()
    for name, _ in found:
        if name in seen:
            raise Misuse(
                f"Two parameters are called {name}, but for what wrappers put into names ({', '.join(sorted(WRAPPERS))}): "
                "give one of them another name."
            )
        seen.add(name)
    return found
