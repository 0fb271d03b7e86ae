"""The data of configs/tools.yaml, a tiny model and products to calculate: `python calculator.py FOLDER`."""

import json
import random
import sys
from pathlib import Path

from elasticrl.ppo import tiny

folder = Path(sys.argv[1])
words = (*"0123456789*=", tiny.PAD, tiny.EOS, "<user>", "<answer>")
tiny.write(folder / "model", hidden=32, layers=2, words=words)
chance = random.Random(7)
prompts = [{"prompt": f"{chance.randrange(10)}*{chance.randrange(10)}"} for _ in range(5000)]
(folder / "prompts.jsonl").write_text("\n".join(map(json.dumps, prompts)))
