"""Weights that are sent in bfloat16 where a pass narrows them anyway: the same bits from fewer bytes."""

import json
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "runtime"))

from alone import live

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
