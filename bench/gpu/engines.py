"""The engine `served` in a process beside the worker: the same digests as with the engine in the worker. vLLM, where it is."""

import importlib.metadata
from pathlib import Path
from typing import Any

from bench.gpu.say import Say, begin

ALONE = "the engine computes on a processor"


def digests_of(folder: Path, engine: dict[str, Any]) -> dict[int, str]:
    """Of a small job of PPO with this engine; every prompt was used once."""
    from gang_kit import Nodes
    from served_kit import STEPS, job, outcome

    conf = job(folder, engine)
    with Nodes(folder, steps=STEPS, lanes=4, program="elasticrl.ppo.__main__", conf=conf, copies=0) as gang:
        gang.plan("n0")
        gang.until_done(within_s=90.0)
        return outcome(gang)


def main(say: Say) -> None:
    within: dict[int, str] = {}
    with say.check("the engine in the worker", on_card=ALONE):
        within = digests_of(say.folder / "torch", {"engine": "torch"})
    with say.check("the engine beside it has the same bits", on_card=ALONE):
        assert digests_of(say.folder / "served", {"engine": "served"}) == within
    if say.has("vLLM", "vllm"):
        with say.check(f"vLLM {importlib.metadata.version('vllm')} makes its steps", on_card=ALONE):
            digests_of(say.folder / "vllm", {"engine": "vllm"})


if __name__ == "__main__":
    begin(main)
