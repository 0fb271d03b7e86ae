"""What transformers and Accelerate do when the first model and the first Trainer are made, done by a spare process beforehand.

The one idea: a fresh process stands between a dead worker and the next step, so whatever needs no rank is done before.
"""

from contextlib import suppress
from typing import Any

from accelerate.utils import is_deepspeed_available

if is_deepspeed_available():
    import deepspeed  # noqa: F401 - Accelerate imports it to look whether a model is one of its engines: two seconds

with suppress(ImportError, AttributeError):  # transformers before 5 has none; a later one may have it elsewhere
    from transformers import conversion_mapping

    conversions: Any = conversion_mapping.get_checkpoint_conversion_mapping
    conversions("llama")  # some hundred regular expressions for all models, compiled once
