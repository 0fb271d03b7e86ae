"""How a configuration's store is reached, by whoever asks."""

from pathlib import Path

import pytest

from elasticrl.config import Tree
from elasticrl.config.cluster import Job
from elasticrl.daemon.outside import reach
from elasticrl.diagnose.job_store import store_settings
from elasticrl.shell import keys
from elasticrl.store import Tls


def tree(**store: object) -> Tree:
    return Tree.model_validate({"job": {"name": "j"}, "store": {"endpoints": ("https://h1:2379",), **store}})


@pytest.mark.parametrize(
    ("given", "used"),
    [
        ({}, None),
        ({"server_name": "etcd"}, Tls(server_name="etcd")),
        ({"ca": "/ca"}, Tls(ca="/ca")),
        ({"cert": "/c", "key": "/k"}, Tls(cert="/c", key="/k")),
    ],
)
def test_each_key_of_tls_counts_the_name_without_an_authority_too(given: dict[str, str], used: Tls | None) -> None:
    assert store_settings(tree(tls=given)).tls == used


def test_pings_prefix_and_times_are_those_of_the_file() -> None:
    found = store_settings(tree(prefix="/team/a", ping="7s", ping_timeout="2s", try_timeout="1s", timeout="9s"))
    assert (found.namespace, found.endpoints) == ("/team/a/j/", ("https://h1:2379",))
    assert (found.ping_s, found.ping_timeout_s, found.try_timeout_s, found.timeout_s) == (7.0, 2.0, 1.0, 9.0)


def test_an_embedded_etcds_endpoints_stand_in_for_those_of_the_file() -> None:
    assert store_settings(tree(), ("127.0.0.1:1",)).endpoints == ("127.0.0.1:1",)


def test_a_file_and_a_list_of_hosts_lead_to_the_same_keys(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("job: {name: j, program: t.py}\nstore: {endpoints: ['h1:2379']}\n")
    assert reach(str(file), None).namespace == reach("h1:2379", "j").namespace == keys.namespace("j")
    assert store_settings(Tree(job=Job(name="j")), ("h1:2379",)).namespace == keys.namespace("j")
