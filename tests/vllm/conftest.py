"""These run in an environment that has vLLM: `make vllm` makes it, and sets ELASTICRL_VLLM, with which skipping is failing.

With ELASTICRL_VLLM_PYTHON, the Python of that environment, they are the tests of whole jobs, whose engines alone live there.
"""

import os
import sys
from importlib.util import find_spec
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "ppo"))

REQUIRED = os.environ.get("ELASTICRL_VLLM") == "required"

spec = find_spec("vllm")
if os.environ.get("ELASTICRL_VLLM_PYTHON"):
    collect_ignore_glob = ["test_vllm.py", "test_vllm_server.py"]
elif (spec is None or spec.origin is None) and not REQUIRED:  # this very folder is found as a package without a file
    collect_ignore_glob = ["test_*.py"]
else:
    collect_ignore_glob = ["test_vllm_daemon.py"]
