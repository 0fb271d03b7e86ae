"""These want TRL, which `make hf` installs into an environment of its own; with ELASTICRL_HF=required skipping is failing."""

import os
import sys
from importlib.util import find_spec
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "runtime"))
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"

import forked_workers

# Each worker is forked from a server that has these: importing them takes ten seconds.
forked_workers.PRELOAD += ["transformers.trainer", "trl.trainer.sft_trainer", "trl.trainer.dpo_trainer"]
forked_workers.PRELOAD += ["trl.trainer.grpo_trainer", "trl.trainer.reward_trainer", "elasticrl.hf.elastic"]

REQUIRED = os.environ.get("ELASTICRL_HF") == "required"

if find_spec("trl") is None and not REQUIRED:
    collect_ignore_glob = ["test_*.py"]
elif find_spec("lightning") is None and not REQUIRED:
    collect_ignore_glob = ["test_hf_lightning.py", "test_hf_passes.py"]
