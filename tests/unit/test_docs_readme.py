"""What README.md counts is counted again."""

import re
from pathlib import Path

from chaos.faults import ALL
from chaos.live.strikes import Hands
from elasticrl.cli.main import VERBS

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")


def test_as_many_kinds_of_faults_as_the_live_driver_can_put_in() -> None:
    (said,) = re.findall(r"(\d+) kinds of faults", README)
    assert int(said) == sum(Hands.can(kind) for kind in ALL)


def test_every_verb_is_in_its_list_of_commands() -> None:
    listed = README.partition("## Commands")[2].partition("\n## ")[0]
    assert [verb for verb in VERBS if not re.search(rf"`elasticrl {verb}\b", listed)] == []
