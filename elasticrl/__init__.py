"""elasticrl: a fault-tolerant elastic training daemon for LLM post-training with PPO."""

from typing import Any

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    # A script says elasticrl.runtime.join(); whoever wants only the version or the command line pays nothing for it.
    if name in {"runtime", "hf", "lightning", "titan"}:
        from importlib import import_module

        return import_module(f"elasticrl.{name}")
    if name in {"beat", "leaving", "loaded", "phase"}:
        from elasticrl.runtime import told

        return getattr(told, name)
    if name == "keep":
        from elasticrl.runtime.kept import keep

        return keep
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
