"""Which programs a spare process may begin before it has a rank."""

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
