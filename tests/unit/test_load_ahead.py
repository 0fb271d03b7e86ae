"""Which programs a spare process may begin before it has a rank."""

import subprocess
import sys
from pathlib import Path

import pytest

from elasticrl.agent.worker import Job, unfit


def job(tmp_path: Path, source: str, *args: str, joins: bool = False) -> Job:
    script = tmp_path / "train.py"
    script.write_text(source)
    return Job(program=(str(script),), args=args, page="", log="", witness="", joins=joins)


@pytest.mark.parametrize(
    "source",
    [
        "import elasticrl\nelasticrl.loaded()",
        "import elasticrl as e\ndef main():\n    e.loaded()",
        "from elasticrl import loaded\nloaded()",
        "from elasticrl import loaded as ready\nready()",
    ],
)
def test_a_script_that_calls_it_may(tmp_path: Path, source: str) -> None:
    assert not unfit(job(tmp_path, source))


@pytest.mark.parametrize(
    "source",
    [
        "print('model loaded')",
        "import elasticrl\n# elasticrl.loaded()\nelasticrl.beat(1)",
        "def loaded(): ...\nloaded()",
        "import hub\nhub.loaded()",
        "import elasticrl\nelasticrl.loaded",
        "this is no Python",
    ],
)
def test_a_script_that_only_has_the_word_may_not(tmp_path: Path, source: str) -> None:
    assert "own file does not call elasticrl.loaded()" in unfit(job(tmp_path, source))


def test_one_at_level_exact_may_as_it_asks_for_its_rank_and_one_whose_arguments_name_it_may_not(tmp_path: Path) -> None:
    assert not unfit(job(tmp_path, "", joins=True))
    assert "${local_rank}" in unfit(job(tmp_path, "", "--gpu=${local_rank}", joins=True))


def test_a_file_that_is_not_there_may_not() -> None:
    gone = Job(program=("-m", "no_such_module_anywhere"), args=(), page="", log="", witness="", joins=False)
    assert unfit(gone)


SEAT = """
import os, socket, sys, threading
from elasticrl.contract import seat
from elasticrl.contract.beats import Beat, Stage
from elasticrl.contract.orders import Halt, Park, Place

ours, theirs = socket.socketpair()
mine = seat.OwnSeat(theirs, Beat())
mine.begin_early(script=False)
claimed = []

def claim():
    try:
        mine.claim()
        claimed.append(os.environ["LOCAL_RANK"])
    except SystemExit as left:
        claimed.append(left.code)

threads = [threading.Thread(target=claim) for _ in range(2)]  # a loader of the program's asks too
for thread in threads:
    thread.start()
ours.sendall(seat.write(Park(generation=3)))
while mine.beat.now.state is not Stage.PARKED:
    pass
print("parked", claimed)
order = Halt(generation=4, save=True, within_s=1.0)
if sys.argv[1] == "place":
    order = Place(generation=4, born=4, rank=5, slot=1, world=8, all_lanes=8, nodes=("n0",) * 8, log=sys.argv[2])
ours.sendall(seat.write(order))
for thread in threads:
    thread.join(30)
print("claimed", claimed, flush=True)
mine.claim()  # there is nothing to wait for any more
sys.stdout.flush()
os._exit(0)
"""


def test_who_claims_a_rank_waits_through_a_park_and_gets_it_whoever_else_asks(tmp_path: Path) -> None:
    log = tmp_path / "rank_5.log"
    done = subprocess.run(
        [sys.executable, "-c", SEAT, "place", str(log)], capture_output=True, text=True, timeout=120, check=True
    )
    assert "parked []" in done.stdout
    assert log.read_text().splitlines()[-1] == "claimed ['1', '1']", "its words are where the agent looks for them"


def test_who_waits_for_a_rank_leaves_when_the_job_ends() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SEAT, "halt", ""], capture_output=True, text=True, timeout=120, check=True
    )
    assert "claimed [0" in done.stdout
