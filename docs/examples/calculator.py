"""The data of configs/tools.yaml: a tiny model with random weights, and products to calculate."""

import argparse
import json
import random
from pathlib import Path

from elasticrl.ppo import tiny


def main() -> None:
    """Write them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="where they are written")
    folder = parser.parse_args().folder
    words = (*"0123456789*=", tiny.PAD, tiny.EOS, "<user>", "<answer>")
    tiny.write(folder / "model", hidden=32, layers=2, words=words)
    chance = random.Random(7)
    prompts = [{"prompt": f"{chance.randrange(10)}*{chance.randrange(10)}"} for _ in range(5000)]
    (folder / "prompts.jsonl").write_text("\n".join(map(json.dumps, prompts)))


if __name__ == "__main__":
    main()
