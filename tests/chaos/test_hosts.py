"""Scenarios on hosts of one's own: what would be done on each, that it is done and undone, and what is said of the job."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from chaos.faults import ALL, Fault
from chaos.live import box
from chaos.live.hosts import KNOWN, Hosts, Known, Seen, Tour, load, orders, why_not
from chaos.live.lab import Lab
from chaos.live.labjob import LabJob, conf_of
from chaos.live.play import BASE
from chaos.run import LIVE, main
from chaos.scenario import Scenario, Unusable
from chaos.scenario import load as scenario_of

ROOT = Path(__file__).parents[2]
HOSTS = Hosts(
    job="staging", store=("http://10.0.0.1:2379",), hosts={"a": "host-a", "b": "host-b", "c": "host-c", "d": "host-d"}
)
KNOWN_JOB = Known(
    rows=tuple(
        {"node": node, "rank": rank, "leader": node == "b", "state": "training" if rank is not None else "spare"}
        for node, rank in (("a", 2), ("b", 1), ("c", 0), ("d", None))
    ),
    addresses={"a": "10.0.0.10", "b": "10.0.0.11", "c": "10.0.0.12", "d": "10.0.0.13"},
)


def test_of_every_kind_there_are_scripts_that_a_shell_can_read_and_that_name_no_more_than_they_should() -> None:
    assert set(ALL) >= KNOWN
    for kind in sorted(KNOWN):
        made = orders(HOSTS, Fault(kind=kind, at=0.0, node="a", peer="b", for_s=3.0, value=500.0), KNOWN_JOB, 7)
        assert made, kind
        for order in made:
            assert order.node in HOSTS.hosts
            for script in filter(None, (order.do, order.undo, order.proof)):
                subprocess.run(["sh", "-n", "-c", script], check=True)
            if "nft" in order.do:
                assert "tcp dport '{ 22 }' accept" in order.do or "tcp sport '{ 22 }' accept" in order.do
                assert "sleep 63; nft delete table inet elasticrl_chaos_7" in order.do, "the host heals itself"
                assert (order.undo, "packets" in order.proof) == ("nft delete table inet elasticrl_chaos_7", True)


@pytest.mark.parametrize(
    ("role", "node"),
    [
        ("leader", "b"),
        ("deputy", "c"),
        ("rank 0", "c"),
        ("last rank", "a"),
        ("spare", "d"),
        ("d", "d"),
        ("n1", "b"),
        ("n7", ""),
    ],
)
def test_roles_are_looked_up_in_the_picture_and_names_of_scenarios_in_the_file(role: str, node: str) -> None:
    made = orders(HOSTS, Fault(kind="kill_worker", at=0.0, node=role), KNOWN_JOB, 1)
    assert [order.node for order in made] == ([node] if node else [])


def test_a_partition_is_drawn_between_halves_and_one_way_in_one_direction() -> None:
    halves = orders(HOSTS, Fault(kind="partition", at=0.0), KNOWN_JOB, 1)
    assert [order.node for order in halves] == ["a", "b"]
    for order in halves:
        assert set(re.findall(r"(?:saddr|daddr) ([0-9.]+)", order.do)) == {"10.0.0.12", "10.0.0.13"}
    (out,) = orders(HOSTS, Fault(kind="isolate", at=0.0, node="a", way="out"), KNOWN_JOB, 1)
    assert "hook output" in out.do
    assert "hook input" not in out.do
    alone = orders(HOSTS, Fault(kind="store_alone", at=0.0), KNOWN_JOB, 1)
    assert [order.node for order in alone] == ["a", "b", "c", "d"]
    assert "10.0.0.1 " in alone[0].do


def test_what_only_the_lab_can_do_is_left_out_with_the_reason() -> None:
    assert why_not(scenario_of(LIVE / "one-bit-rots.yaml")).startswith("hosts have no corrupt_save")
    assert "place in a step" in why_not(Scenario(faults=(Fault(kind="kill_worker", when="before reduce"),)))
    assert why_not(scenario_of(LIVE / "halves.yaml")) == ""


def test_a_dry_run_prints_what_would_be_done_where_and_does_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "hosts.yaml"
    file.write_text("job: staging\nstore: ['http://10.0.0.1:2379']\nhosts: {n0: host-a, n1: host-b, n2: host-c}\n")
    halves, rots = str(LIVE / "halves.yaml"), str(LIVE / "one-bit-rots.yaml")
    assert main(["live", "--hosts", str(file), "--dry-run", halves, rots]) == 0
    said = capsys.readouterr().out
    assert "partition at 0 s, do: ssh -o BatchMode=yes -o ConnectTimeout=5 root@host-a -- sh -c" in said
    assert "undo: ssh -o BatchMode=yes -o ConnectTimeout=5 root@host-a -- sh -c 'nft delete table" in said
    assert "one-bit-rots: left out: hosts have no corrupt_save" in said
    assert "0 faults struck; no violation" in said
    assert main(["live", "--hosts", str(file), "--dry-run", "--random", "--seed", "3"]) == 0
    assert capsys.readouterr().out.count(", do: ") >= 20


def test_the_example_can_be_read() -> None:
    assert load(ROOT / "chaos" / "hosts.example.yaml").hosts["n03"] == "10.0.0.13"


def test_a_file_that_is_wrong_is_refused_with_all_that_is_wrong_with_it(tmp_path: Path) -> None:
    (tmp_path / "hosts.yaml").write_text("job: 3\nhosts: [a]\n")
    with pytest.raises(Unusable, match=r"(?s)job.*store.*hosts"):
        load(tmp_path / "hosts.yaml")


def test_steps_that_come_late_and_numbers_that_fall_are_said() -> None:
    seen = Seen()
    for at, step in ((0.0, 10), (1.0, 11), (60.0, 12)):
        seen.take(at, {"generation": 3, "committed": 8, "step": step})
    fault = Fault(kind="kill_worker", at=0.0)
    assert seen.late(fault, 0.5, 1.0) == ""
    assert seen.late(fault, 2.0, 1.0) == "kill_worker: the next steps came after 58.0 s, the budget is 16 s"
    assert seen.late(fault, 2.0, 20.0) == ""
    assert "came never" in seen.late(fault, 70.0, 1.0)
    seen.take(61.0, {"generation": 2, "committed": 7, "step": 12})
    assert seen.wrong == ["generation fell from 3 to 2", "committed fell from 8 to 7"]


@pytest.mark.slow
@pytest.mark.skipif(bool(box.missing()), reason=box.missing() or "there are namespaces")
@pytest.mark.timeout(400)
def test_on_real_nodes_faults_strike_are_undone_and_the_job_goes_on(tmp_path: Path) -> None:
    """The lab's boxes stand for hosts: a way in, an address, daemons that somebody has started."""
    said: list[str] = []
    with Lab(3) as lab:
        job = LabJob(lab, "j1", conf=conf_of(BASE, nodes=3))
        for node in lab.boxes:
            job.start(node)
        own = f"node.run_dir=/run/elasticrl vault.dir=/dev/shm/elasticrl node.interface=eth0 node.state_dir={tmp_path}"
        elasticrl = f"{sys.executable} -m elasticrl.cli.main"
        cluster = Hosts(
            job="j1", store=lab.endpoints, hosts={name: str(one.pid) for name, one in lab.boxes.items()},
            shell="nsenter -t {host} -a -- {command}", command=elasticrl, factor=3.0,
            start=f"setsid -f {elasticrl} daemon --config {job.config} node.name=$(hostname) {own} >> /run/daemon.log 2>&1",
        )  # fmt: skip
        tour = Tour(cluster, say=said.append)
        faults = [
            ("kill_worker", {"node": "rank 0"}), ("stop_worker", {"node": "last rank", "for_s": 8.0}),
            ("isolate", {"node": "leader", "for_s": 4.0}), ("cut_store", {"node": "n1", "for_s": 4.0}),
            ("kill_vault", {"node": "n2"}), ("kill_daemon", {"node": "n0", "for_s": 1.0}),
            ("kill_node", {"node": "n2", "for_s": 3.0}), ("pause", {"for_s": 3.0}),
        ]  # fmt: skip
        scenarios = [Scenario(name=kind, faults=(Fault(kind=kind, at=0.0, **more),)) for kind, more in faults]
        try:
            assert tour.play(scenarios) == 0, "\n".join(said)
        finally:
            job.kill_all()
        assert tour.struck == len(faults), "\n".join(said)
        rules = [one.run("nft", "list", "tables", check=False).stdout for one in lab.boxes.values()]
        assert not any("elasticrl_chaos" in table for table in rules)
