"""Transformers' Trainer under elasticrl."""

from typing import Any


def __getattr__(name: str) -> Any:
    # Not imported at once: transformers takes seconds.
    if name in {"Callback", "latest"}:
        from elasticrl.hf import callback

        return getattr(callback, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
