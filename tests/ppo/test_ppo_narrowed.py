"""Weights that are sent in bfloat16 where a pass narrows them anyway: the same bits from fewer bytes."""

import json
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "runtime"))

from alone import live
from narrowed_job import LARGE

from elasticrl.config.tree import Tree
from elasticrl.ppo import estimate
from elasticrl.ppo.shapes import Shape

JOB = Path(__file__).with_name("narrowed_job.py")
# again: what a layer keeps is made again in backward; valued: a value head; raw: a bias is read in float32
HOWS = ("plain", "tied", "again", "valued", "raw")


def ranks(folder: Path, *hows: str) -> list[Any]:
    """What both ranks' processes came to."""
    scripts = [Path(shutil.copy(JOB, folder / f"rank{rank}.py")) for rank in range(2)]
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda rank: live(scripts[rank], str(folder), str(rank), *hows), range(2)))


def test_passes_of_autocast_come_to_the_same_bits_with_weights_that_were_sent_narrow(tmp_path: Path):
    for life in ranks(tmp_path, *HOWS):
        assert life.returncode == 0, life.stderr
        said = [json.loads(line) for line in life.stdout.splitlines()]
        for how in HOWS:
            wide, narrow = ([one for one in said if (one["how"], one["narrow"]) == (how, it)] for it in (False, True))
            assert [one["bits"] for one in narrow] == [one["bits"] for one in wide], how
            assert len({one["bits"] for one in wide}) == len(wide), "other samples, other bits"
            assert [one["kind"] for one in wide[:3]] == ["frozen", "train", "plain"]
            assert narrow[1]["sent"] < 0.55 * wide[1]["sent"], "all but norms"
            assert narrow[2]["sent"] >= wide[2]["sent"], "a plain pass gets all of the numbers"


def test_a_head_that_computes_in_float32_is_refused_before_it_computes_with_narrow_weights(tmp_path: Path):
    for life in ranks(tmp_path, "apart"):
        assert life.returncode != 0
        assert "Misuse: A Linear is asked outside of autocast in a pass of autocast" in life.stderr


def planned(how: str) -> tuple[int, int]:
    """What `elasticrl plan` says is there of weights beside a rank's part in a pass, and of their narrow copies."""
    it = LARGE[how]
    shape = Shape(
        layers=it["num_hidden_layers"], hidden=it["hidden_size"], inner=it["intermediate_size"], words=it["vocab_size"],
        heads=4, kv_heads=4, head=it["hidden_size"] // 4,
    )  # fmt: skip

    def lines(dtype: str) -> dict[str, int]:
        ppo = {"batch": 32, "mini_batch": 32, "micro_tokens": 10, "logits_mib": 0, "algorithm": "grpo", "group": 4}
        conf: dict[str, Any] = {
            "job": {"name": "job", "program": "elasticrl.ppo"}, "lanes": {"count": 4}, "ppo": {**ppo, "kl": {"where": "off"}},
            "model": {"path": "x", "strategy": "fsdp", "dtype": dtype}, "reward": {"function": "elasticrl.ppo.tasks:reverse"},
            "data": {"path": "x", "max_prompt": 6}, "rollout": {"max_tokens": 4},
        }  # fmt: skip
        said = estimate.of(Tree.model_validate(conf), dict.fromkeys(("actor", "critic", "ref"), shape), workers=2)
        return {line.what: line.bytes for line in (*said.memory, *said.transient) if line.role == "actor"}

    wide, narrow = lines("float32"), lines("bfloat16")
    kept = shape.saved(10, 10, checkpointing=False)  # at most 10 tokens, which may be all answer
    copies = narrow["activations"] - 2 * kept - (wide["activations"] - 4 * kept)
    return narrow["weights"] - 4 * shape.count // 2 + narrow.get("the root once more", 0), copies


def test_what_is_put_together_from_narrow_weights_takes_the_memory_that_is_planned(tmp_path: Path):
    for life in ranks(tmp_path, *LARGE):
        assert life.returncode == 0, life.stderr
        said = [json.loads(line) for line in life.stdout.splitlines() if line.startswith("{")]
        for how in LARGE:
            top = {(one["narrow"], one["kind"]): one["top"] for one in said if one["how"] == how}
            gathered, copies = planned(how)
            assert 0.9 * gathered < top[True, "frozen"] < 1.1 * gathered, how
            assert top[True, "frozen"] < top[False, "frozen"], how
            # The root is still there from the pass before.
            assert copies < top[True, "train"] < 1.05 * (gathered + copies), how
