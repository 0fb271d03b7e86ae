"""The doctor: numbered checks with what to do, for a machine as it is and for one that is broken on purpose."""

import asyncio
import json
import shutil
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from chaos.etcd import LocalCluster
from elasticrl.cli import doctor
from elasticrl.config import Tree, read, run_dir
from elasticrl.contract.pairs import Result as PairResult
from elasticrl.contract.verdict import Fault
from elasticrl.core.judge.judge import judge
from elasticrl.diagnose import doctor as diagnosis
from elasticrl.diagnose.health import Check, Level

app = typer.Typer()
app.callback()(lambda: None)
doctor.register(app)


def config(folder: Path, **sections: str) -> Path:
    """A sound configuration, with further lines in some sections."""
    lines = {"job": "{name: doctored, program: my.training}",
             "node": f"{{state_dir: {folder}/state, run_dir: {folder}/run, interface: lo}}",
             "store": "{embedded: true}", "checkpoint": f"{{dir: {folder}/ckpt, shared: false}}"}  # fmt: skip
    path = folder / "job.yaml"
    path.write_text("".join(f"{name}: {text}\n" for name, text in (lines | sections).items()))
    return path


def tree_of(path: Path) -> Tree:
    loaded = read(path, environ={})
    assert loaded.tree is not None, [str(finding) for finding in loaded.findings]
    return loaded.tree


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["doctor", *map(str, arguments)])


def checked(result: Result) -> dict[str, dict[str, str]]:
    return {check["name"]: check for check in json.loads(result.stdout)["checks"]}


def test_a_machine_that_is_well_is_ready_and_every_complaint_says_what_to_do(tmp_path: Path) -> None:
    result = run("--config", config(tmp_path), "--json")
    checks = checked(result)
    for name in ("versions", "network.interface", "checkpoint.semantics", "checkpoint.speed", "checkpoint.space",
                 "memory.available", "shm.space", "cpu.load", "limits.files", "tcp.retransmits", "kernel.log"):  # fmt: skip
        assert name in checks, name
    assert [check["number"] for check in checks.values()] == list(range(1, len(checks) + 1))
    assert all(check["remedy"] for check in checks.values() if check["level"] in {"warn", "fail"}), result.stdout
    assert result.exit_code == (1 if any(check["level"] == "fail" for check in checks.values()) else 0)
    assert "torch 2.13.0" in checks["versions"]["value"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["job.yaml"], "the doctor leaves nothing behind"


@pytest.mark.parametrize(
    ("cards", "visible", "level", "words"),
    [
        (2, None, Level.OK, "2 for 2 workers"),
        (8, "4,5", Level.OK, "2 for 2 workers (node.workers); CUDA_VISIBLE_DEVICES=4,5"),
        (1, None, Level.FAIL, "1 for 2 workers"),
        (8, "3", Level.FAIL, "1 for 2 workers"),
        (8, "", Level.FAIL, "0 for 2 workers"),
    ],
)
def test_more_workers_than_cards_are_told_of(
    tmp_path: Path, cards: int, visible: str | None, level: Level, words: str
) -> None:
    tree = tree_of(config(tmp_path, node="{workers: 2, device: cuda}", membership="{max_nodes: 1}"))
    env = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    (check,) = diagnosis.shared(tree, env, cards)
    assert (check.level, bool(check.remedy)) == (level, level is Level.FAIL)
    assert words in check.value
    on_processors = tree_of(config(tmp_path, node="{workers: 2, device: cpu}", membership="{max_nodes: 1}"))
    assert not list(diagnosis.shared(on_processors, env, cards))
    assert not list(diagnosis.shared(tree, env, 0))


def test_the_page_is_numbered_and_ends_with_the_verdict(tmp_path: Path) -> None:
    result = run("--config", config(tmp_path))
    lines = result.stdout.splitlines()
    assert lines[0].startswith("  1 ")
    assert "READY" in lines[-1]
    assert "skipped" in lines[-1]


def test_an_interface_that_is_not_there_fails_and_names_those_that_are(tmp_path: Path) -> None:
    node = f"{{state_dir: {tmp_path}/state, interface: eth77}}"
    result = run("--config", config(tmp_path, node=node), "--json")
    check = checked(result)["network.interface"]
    assert (check["level"], result.exit_code) == ("fail", 1)
    assert "lo" in check["value"]


def test_a_port_that_somebody_has_and_an_address_of_another_machine_fail(tmp_path: Path) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as taken:
        taken.bind(("127.0.0.1", 0))
        node = (
            f"{{state_dir: {tmp_path}/state, interface: lo, address: 127.0.0.1, beat_port: {taken.getsockname()[1]}}}"
        )
        found = {check.name: check for check in diagnosis.network(tree_of(config(tmp_path, node=node)))}
    assert found["network.port.beats"].level is Level.FAIL
    assert found["network.address"].level is Level.OK
    node = f"{{state_dir: {tmp_path}/state, interface: lo, address: 192.0.2.1}}"
    found = {check.name: check for check in diagnosis.network(tree_of(config(tmp_path, node=node)))}
    assert found["network.address"].level is Level.FAIL


def test_each_port_that_is_fixed_is_tried(tmp_path: Path) -> None:
    probe, web = free(), free()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", probe))
        taken.listen()
        node = f"{{state_dir: {tmp_path}/state, interface: lo, address: 127.0.0.1, probe_port: {probe}}}"
        found = {
            check.name: check
            for check in diagnosis.network(tree_of(config(tmp_path, node=node, web=f"{{port: {web}}}")))
        }
    ports = {name: check.level for name, check in found.items() if name.startswith("network.port")}
    assert ports == {
        "network.port.probe.udp": Level.OK, "network.port.probe.tcp": Level.FAIL, "network.port.web": Level.OK,
    }  # fmt: skip
    assert found["network.port.probe.tcp"].value.startswith(f"node.probe_port (TCP): 127.0.0.1:{probe}: ")


def test_the_environment_of_the_workers_is_linted_with_what_the_configuration_adds(tmp_path: Path) -> None:
    tree = tree_of(config(tmp_path, agent="{env: {NCCL_TIMEOUT: '1200'}}"))
    found = {check.name: check for check in diagnosis.linted(tree, {"NCCL_SOCKET_IFNAME": "eth77"}, None)}
    assert set(found) == {"environment.NCCL_TIMEOUT", "environment.NCCL_SOCKET_IFNAME"}
    assert found["environment.NCCL_SOCKET_IFNAME"].level is Level.FAIL
    (clean,) = diagnosis.linted(None, {"PATH": "/bin"}, None)
    assert clean.level is Level.OK


def test_one_connection_to_the_gpu_is_no_mistake_where_megatron_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    assert any("Megatron" in check.value for check in diagnosis.linted(None, one, None))
    (tmp_path / "megatron" / "core").mkdir(parents=True)  # a namespace, as megatron-core installs it
    monkeypatch.syspath_prepend(tmp_path)
    assert not any("Megatron" in check.value for check in diagnosis.linted(None, one, None))


def test_a_checkpoint_that_is_larger_than_what_is_free_fails(tmp_path: Path) -> None:
    tree = tree_of(config(tmp_path))
    newest = Path(run_dir(tree, socket.gethostname())) / "step-00000100-g3"
    newest.mkdir(parents=True)
    with (newest / "shard").open("wb") as stream:
        stream.truncate(shutil.disk_usage(tmp_path).free)  # sparse: it has no bytes on the disk
    found = {check.name: check for check in diagnosis.checkpoints(tree)}
    assert found["checkpoint.space"].level is Level.FAIL
    assert (
        "16384" in found["checkpoint.space"].why
        or "TiB" in found["checkpoint.space"].why
        or "GiB" in found["checkpoint.space"].why
    )


def test_checkpoints_in_memory_are_refused(tmp_path: Path) -> None:
    tree = tree_of(config(tmp_path, checkpoint="{dir: /dev/shm/elasticrl-doctor-test, shared: false}"))
    found = {check.name: check for check in diagnosis.checkpoints(tree)}
    assert found["checkpoint.filesystem"].level is Level.FAIL
    assert "reboot" in found["checkpoint.filesystem"].remedy
    assert not Path("/dev/shm/elasticrl-doctor-test").exists()


def test_a_configuration_that_does_not_fit_together_is_part_of_the_answer(tmp_path: Path) -> None:
    result = run("--config", config(tmp_path, membership="{lease_ttl: 2s, keepalive: 3s}"), "--json")
    checks = checked(result)
    assert result.exit_code == 1
    assert any(name.startswith("config.") and check["level"] == "fail" for name, check in checks.items())


def test_a_living_store_is_measured_and_a_dead_member_is_named(tmp_path: Path) -> None:
    async def look() -> tuple[list[Check], list[Check]]:
        async with LocalCluster(tmp_path / "etcd", members=3) as etcd:
            tree = tree_of(config(tmp_path, store=f"{{endpoints: [{', '.join(map(repr, etcd.endpoints))}]}}"))
            well = [check async for check in diagnosis.store(tree)]
            etcd.kill(0)
            return well, [check async for check in diagnosis.store(tree)]

    well, ill = asyncio.run(look())
    found = {check.name: check for check in well}
    assert sum("127.0.0.1:" in name and check.level is Level.OK for name, check in found.items()) == 3
    assert "ms, the median" in found["store.latency"].value
    assert sum(check.level is Level.FAIL for check in ill) == 1


def test_a_store_that_nobody_runs_fails_with_what_to_do(tmp_path: Path) -> None:
    async def look() -> list[Check]:
        tree = tree_of(config(tmp_path, store="{endpoints: ['127.0.0.1:9'], timeout: 1s, try_timeout: 200ms}"))
        return [check async for check in diagnosis.store(tree)]

    found = asyncio.run(look())
    assert any(check.level is Level.FAIL and check.remedy for check in found)


def test_a_password_file_that_is_not_here_is_a_finding_too(tmp_path: Path) -> None:
    secret = f"{{endpoints: ['127.0.0.1:9'], username: elasticrl, password_file: {tmp_path}/password}}"

    async def look() -> list[Check]:
        return [check async for check in diagnosis.store(tree_of(config(tmp_path, store=secret)))]

    (found,) = asyncio.run(look())
    assert (found.level, found.remedy) == (Level.FAIL, "Create it for the daemon's user, mode 0400.")
    assert f"{tmp_path}/password must be readable" in found.value


def test_the_node_with_other_versions_is_named_and_of_two_both() -> None:
    same = {"torch": "2.13.0", "numpy": "2.3.5"}
    of = {"n0": same, "n1": same, "n2": {**same, "torch": "2.12.1"}}
    assert (judge(diagnosis.differing(of)).fault, judge(diagnosis.differing(of)).nodes) == (
        Fault.VERSION_MISMATCH,
        ("n2",),
    )
    assert {fact.node for fact in diagnosis.differing({"n0": same, "n1": {"torch": "2.12.1"}})} == {"n0", "n1"}
    assert diagnosis.differing({"n0": same, "n1": same}) == ()


def test_what_a_peer_says_of_itself_is_compared_with_ours() -> None:
    theirs = json.dumps({**diagnosis.versions(), "torch": "2.12.1"})
    result = PairResult(node="n0", peer="n1", sent=9, answered=9, heard=9, tcp="ok", offset_s=31.0, facts=theirs)
    found = {check.name: check for check in diagnosis.probed([result], "n0", {})}
    assert found["pair.n0-n1"].level is Level.OK
    assert found["clock"].level is Level.WARN
    assert "torch 2.12.1" in found["versions.n1"].value
    assert diagnosis.facts_of("[]") == diagnosis.facts_of("{") == {}


def test_a_nccl_beside_torchs_own_is_named(tmp_path: Path) -> None:
    module, wheel = tmp_path / "nccl" / "2.18.1", tmp_path / "site-packages" / "nvidia" / "nccl" / "lib"
    for folder in (module, wheel):
        folder.mkdir(parents=True)
        (folder / "libnccl.so.2").touch()
    (check,) = diagnosis.other_nccl({"LD_LIBRARY_PATH": f"/nowhere:{module}:{wheel}", "LD_PRELOAD": "/lib/libfoo.so"})
    assert (check.level, check.value.count("libnccl")) == (Level.WARN, 1)
    assert str(module / "libnccl.so.2") in check.value
    assert [c.name for c in diagnosis.other_nccl({"LD_PRELOAD": "/usr/lib/libnccl.so.2.18"})] == ["versions.nccl"]
    assert not list(diagnosis.other_nccl({"LD_LIBRARY_PATH": str(wheel), "VLLM_NCCL_SO_PATH": ""}))


def test_a_way_that_is_much_slower_than_another_is_named() -> None:
    ways = [PairResult(node="n0", peer=f"n{i}", mbps=rate) for i, rate in ((1, 940.0), (2, 410.0), (3, None))]
    (uneven,) = doctor.paced(ways)
    assert (uneven.level, uneven.value) == (
        Level.WARN, "slowest: n0 to n2 with 410 Mbit/s over one connection; fastest: 940",
    )  # fmt: skip
    assert [check.level for check in doctor.paced([replace(ways[1], mbps=600.0), ways[0]])] == [Level.OK]
    assert not list(doctor.paced(ways[2:]))


def test_a_way_that_carries_less_than_was_asked_for_fails_though_all_are_alike() -> None:
    ways = [PairResult(node="n0", peer="n1", mbps=940.0), PairResult(node="n1", peer="n0", mbps=938.0)]
    alike, short = doctor.paced(ways, least=9_000.0)
    assert alike.level is Level.OK
    assert (short.level, short.value) == (
        Level.FAIL, "2 of 2 connections carry less than 9,000 Mbit/s: n1 to n0 938, n0 to n1 940",
    )  # fmt: skip
    assert [check.level for check in doctor.paced(ways, least=900.0)] == [Level.OK, Level.OK]
    many = [PairResult(node=f"n{i}", peer="n9", mbps=1.0) for i in range(9)]
    assert list(doctor.paced(many, least=2.0))[1].value.endswith("n7 to n9 1, ...")


def cluster(count: int, bad: str = "", **ill: object) -> list[PairResult]:
    """What all nodes of a cluster say of each other; the ways of one are ill."""
    names = [f"n{i}" for i in range(count)]
    well = PairResult(
        node="", peer="", sent=9, answered=9, heard=9, tcp="ok", latency_ms=0.2, mbps=9400.0, mtu=9000, largest=9000
    )
    return [
        replace(well, node=a, peer=b, **(ill if bad in {a, b} else {}))  # type: ignore[arg-type]
        for a in names for b in names if a != b
    ]  # fmt: skip


def test_the_odd_one_out_of_all_pairs_is_named_and_marked_in_the_table() -> None:
    results = cluster(4, "n2", latency_ms=31.0, mbps=910.0)
    found = {check.name: check for check in diagnosis.compared(results, "n0", ())}
    assert (found["matrix.latency"].level, found["matrix.latency"].value) == (
        Level.WARN,
        "n2: 31 ms at worst, usual are 0.2",
    )
    assert (found["matrix.rate"].level, found["matrix.rate"].value) == (
        Level.WARN,
        "n2: 910 Mbit/s at worst, usual are 9,400",
    )
    assert found["matrix.mtu"].value == "9000 on all 4 nodes"
    plain = json.loads(json.dumps(doctor.measured(results)))
    assert plain["nodes"] == ["n0", "n1", "n2", "n3"]
    assert plain["latency_ms"][0] == [None, 0.2, 31.0, 0.2]
    assert plain["odd"]["mbps"]["nodes"] == ["n2"]
    assert (
        doctor.drawn(plain)
        == """\
Round trip in ms (* far off the others):
      n0   n1  n2*   n3
n0        0.2  31*  0.2
n1   0.2       31*  0.2
n2*  31*  31*       31*
n3   0.2  0.2  31*
Mbit/s over one connection, from row to column (* far off the others):
       n0    n1   n2*    n3
n0         9400  910*  9400
n1   9400        910*  9400
n2*  910*  910*        910*
n3   9400  9400  910*"""
    )


def test_a_cluster_that_is_well_has_no_odd_one_and_its_table_no_mark() -> None:
    results = cluster(3)
    assert {check.level for check in diagnosis.compared(results, "n0", ())} == {Level.OK}
    assert "*" not in doctor.drawn(doctor.measured(results))
    lost = [result for result in results if "n2" not in {result.node, result.peer}]
    page = doctor.drawn(doctor.measured([*lost, PairResult(node="n0", peer="n2", tcp="connect: timed out")]))
    assert page.splitlines()[4] == "n2", "nobody has measured anything there"


def test_packet_sizes_that_differ_are_a_warning() -> None:
    results = [replace(result, mtu=1500) if result.node == "n1" else result for result in cluster(3)]
    (check,) = (check for check in diagnosis.compared(results, "n0", ()) if check.name == "matrix.mtu")
    assert (check.level, check.value) == (Level.WARN, "n1 1500; others 9000")


def test_nccl_over_sockets_beside_active_ports_is_a_warning() -> None:
    for way, ports, level in (
        ("NET/Socket", {"mlx5_0:1"}, Level.WARN),
        ("NET/IB", {"mlx5_0:1"}, Level.OK),
        ("NET/Socket", (), Level.OK),
    ):
        results = [PairResult(node="n0", peer="n1", tcp="ok", nccl="ok", transport=way)]
        (check,) = diagnosis.compared(results, "n0", ports)
        assert (check.name, check.level, bool(check.remedy)) == ("pair.transport", level, level is Level.WARN)


def test_of_many_nodes_a_ring_is_tested_and_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = {f"n{i}": f"10.0.0.{i}:7" for i in range(40)}
    (check,) = doctor.compared([], "n0", ends)
    assert check.value.startswith("40 nodes: this one tested its two neighbours")
    assert not list(doctor.compared([], "n0", dict(list(ends.items())[:16])))
    asked: list[dict[str, object]] = []

    def probe(*_: object, input: bytes, **__: object) -> subprocess.CompletedProcess[bytes]:  # noqa: A002 - as subprocess has it
        asked.append(json.loads(input))
        return subprocess.CompletedProcess([], 0, stdout=b"")

    monkeypatch.setattr(subprocess, "run", probe)
    for count in (16, 17):
        doctor._probe("n0", dict(list(ends.items())[:count]), 30.0)
    assert [len(task["rounds"]) for task in asked] == [15, 0]  # type: ignore[arg-type]


def test_what_a_step_sends_is_held_against_the_rate(tmp_path: Path) -> None:
    model = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 512,
    }
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps({"model_type": "llama", **model}))
    (tmp_path / "data.jsonl").write_text("{}\n")
    tree = tree_of(
        config(
            tmp_path, job="{name: doctored, program: elasticrl.ppo, steps: 9}", model=f"{{path: {tmp_path}/model}}",
            data=f"{{path: {tmp_path}/data.jsonl}}", reward="{function: 'my:reward'}",
            membership="{min_nodes: 2, max_nodes: 2}",
        )
    )  # fmt: skip
    quick, slow = (list(doctor.paced([PairResult(node="a", peer="b", mbps=rate)], tree)) for rate in (1e4, 0.01))
    assert [check.level for check in quick] == [Level.OK, Level.OK]
    assert [(check.name, check.level) for check in slow] == [("pair.rate", Level.OK), ("pair.step", Level.WARN)]
    assert quick[1].value.startswith("a step's ")


def free() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@pytest.mark.long
def test_two_nodes_that_run_it_together_test_the_way_between_them() -> None:
    ends = f"a=127.0.0.1:{free()},b=127.0.0.1:{free()}"
    command = [
        sys.executable,
        "-m",
        "elasticrl.cli.main",
        "doctor",
        "--json",
        "--nodes",
        ends,
        "--within",
        "90",
        "--me",
    ]
    running = [subprocess.Popen([*command, me], stdout=subprocess.PIPE, text=True) for me in "ab"]
    try:
        answers = [json.loads(process.communicate(timeout=240)[0]) for process in running]
    finally:
        for process in running:
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()
    assert answers[0]["matrix"]["nodes"] == ["a", "b"]
    for table in ("latency_ms", "mbps"):
        (none, there), (back, nothing) = answers[0]["matrix"][table]
        assert (none, nothing, there > 0, back > 0) == (None, None, True, True), (
            "both directions, though it asked in one"
        )
    for answer in answers:
        (pair,) = answer["pairs"]
        assert (pair["tcp"], pair["gloo"]) == ("ok", "ok"), pair
        assert abs(pair["offset_s"]) < 1.0
        assert json.loads(pair["facts"])["torch"].startswith("2.13.0")
        checks = {check["name"]: check for check in answer["checks"]}
        assert checks["pair.a-b"]["level"] == "ok"
        assert not [name for name in checks if name.startswith("versions.")]


@pytest.mark.parametrize("names", ["ab", "abc"])
def test_a_node_that_nobody_answers_is_not_ready_and_the_others_are_named(names: str) -> None:
    # Found by a user: with nobody at b it was READY, as the word of one node about a node that may begin later proves nothing.
    ends = {name: f"127.0.0.1:{free()}" for name in names}
    listed = ",".join(f"{name}={end}" for name, end in ends.items())
    result = run("--nodes", listed, "--me", "a", "--within", "3", "--json")
    checks = checked(result)
    assert result.exit_code == 1
    for name in names[1:]:
        check = checks[f"pair.a-{name}"]
        assert (check["level"], f"{name} at {ends[name]} does not answer" in check["value"]) == ("fail", True), check
        assert f"on {name} at the same time" in check["remedy"]
        assert f"nc -vz {ends[name].replace(':', ' ')}" in check["remedy"]
    assert json.loads(result.stdout)["verdict"] is None, "whose fault it is one end alone cannot know"


def test_two_nodes_whose_way_is_cut_each_fail_with_the_others_name() -> None:
    # Each has the other at a port where it is not, as behind a firewall that rejects.
    ports = {name: free() for name in "ab"}
    lists = [f"a=127.0.0.1:{ports['a']},b=127.0.0.1:{free()}", f"a=127.0.0.1:{free()},b=127.0.0.1:{ports['b']}"]
    command = [sys.executable, "-m", "elasticrl.cli.main", "doctor", "--within", "4", "--nodes"]
    running = [
        subprocess.Popen([*command, listed, "--me", me], stdout=subprocess.PIPE, text=True)
        for listed, me in zip(lists, "ab", strict=True)
    ]
    try:
        said = [process.communicate(timeout=120)[0] for process in running]
    finally:
        for process in running:
            process.kill()
            process.wait()
    assert [process.returncode for process in running] == [1, 1]
    for page, other in zip(said, "ba", strict=True):
        assert f"pair.a-b: {other} at 127.0.0.1:" in page
        assert "NOT READY" in page
        assert "Round trip" not in page, "nothing was measured"


def test_a_test_of_the_network_that_could_not_be_made_is_a_failure() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as taken:
        taken.bind(("127.0.0.1", 0))
        ends = f"a=127.0.0.1:{taken.getsockname()[1]},b=127.0.0.1:{free()}"
        result = run("--nodes", ends, "--me", "a", "--within", "3", "--json")
    check = checked(result)["pairs"]
    assert (check["level"], result.exit_code) == ("fail", 1)
    assert "exit code 1" in check["value"]
    assert check["remedy"]


def test_a_test_of_the_network_that_does_not_end_or_tells_nothing_is_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "python"
    monkeypatch.setattr(sys, "executable", str(program))
    monkeypatch.setattr(doctor, "MORE_S", 0.2)
    told = json.dumps({"node": "a", "peer": "b", "tcp": "ok"})
    for script, count, said in (
        ("exec sleep 60", 0, "did not end"),
        (f"echo '{told}'; exec sleep 60", 1, "did not end"),
        ("exit 0", 0, "gave no result"),
        (f"echo '{told}'; kill -9 $$", 1, "signal 9"),
        (f"echo '{told}'; echo 'Warning: x'", 1, ""),
    ):
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
        results, problem = doctor._probe("a", {"a": "127.0.0.1:1", "b": "127.0.0.1:2"}, 0.3)
        assert (len(results), said in problem, bool(problem)) == (count, True, bool(said)), (script, problem)


@pytest.mark.parametrize("nodes", ["a", "a=host", "a=:1", "b=127.0.0.1:1"])
def test_a_list_of_nodes_that_makes_no_sense_is_refused(nodes: str) -> None:
    # It is looked at first: a minute of checks before a typing error is found is a minute lost.
    result = run("--nodes", nodes, "--me", "a")
    assert result.exit_code == 2
    assert "--nodes:" in result.stderr


def test_the_doctor_imports_no_torch() -> None:
    program = (
        "import sys, asyncio; from elasticrl.diagnose import doctor; asyncio.run(doctor.examine(None, env={})); "
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], timeout=60, capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
