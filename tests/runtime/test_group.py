"""A group that can be left: dead and frozen peers, and everything torch does over it. Notices a torch that changes under us."""

import json
import os
import signal
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import group_job
import pytest
from forked_workers import Workers

GENERATION = count(1, 100)


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    gang = Workers(3)
    yield gang
    gang.close()


@pytest.mark.parametrize(
    ("how", "victim", "op"),
    [
        ("kill", 0, "all_reduce"),
        ("kill", 2, "all_to_all"),
        ("stop", 0, "all_gather"),
        ("stop", 2, "reduce_scatter"),
        ("stop", 1, "all_reduce"),
    ],
)
def test_survivors_form_again_in_place(
    workers: Workers, how: str, victim: int, op: str, capsys: pytest.CaptureFixture[str]
):
    if how == "stop":
        frozen = workers.pids[victim]
    others = [rank for rank in range(3) if rank != victim]
    options = {"generation": next(GENERATION), "victim": victim, "how": how, "op": op, "told_after_s": 0.3}
    results = workers.run(group_job.lose_one, 3, answers=others, **options)
    if how == "stop":
        os.kill(frozen, signal.SIGKILL)
    workers.replace(victim)
    for rank in others:
        result = results[rank]
        assert result["total"] == [2.0, 2.0, 2.0]
        assert result["kind"] == ("Broken" if how == "kill" else "Interrupted"), result["words"]
        assert result["all_ms"] < 2000, result["ms"]
    with capsys.disabled():
        print(
            f"\n  3 -> 2 after {how} of rank {victim} in {op}, ms:",
            json.dumps([results[rank]["ms"] for rank in others]),
        )


def test_every_collective_works_and_two_groups_go_side_by_side(workers: Workers):
    assert workers.run(group_job.every_collective, 3, generation=next(GENERATION)) == [[], [], []]


@pytest.mark.skipif(group_job.DEVICE != "cpu", reason="a GPU's group has no gloo of its own")
def test_a_gang_of_one_has_no_gloo_until_it_asks_for_what_wants_one(workers: Workers):
    [said] = workers.run(group_job.alone, 1, generation=next(GENERATION))
    assert said["same"]
    assert said["works"] == [[True, True, True, True]] * 2
    assert (said["without"], said["number"]) == (0, 4)
    assert said["scattered"] == [3.0, 4.0]
    assert said["with"]
    assert "the plan changed" in str(said["interrupted"])


def test_fsdp2_and_dcp_run_unchanged_and_a_frozen_peer_does_not_hold_them(workers: Workers, tmp_path: Path):
    options = {"generation": next(GENERATION), "folder": str(tmp_path), "stuck": True}
    frozen = workers.pids[2]
    results = workers.run(group_job.fsdp_and_dcp, 3, answers=[0, 1], **options)
    os.kill(frozen, signal.SIGKILL)
    workers.replace(2)
    for result in results[:2]:
        plain, elastic, *stuck = result
        assert plain == elastic
        assert stuck == ["Interrupted", "Interrupted"]


def test_forming_can_be_interrupted_and_has_a_deadline(workers: Workers):
    (words, waited, late), _ = workers.run(group_job.forms_at_the_third_try, 2, generation=next(GENERATION))
    assert "given up: n03/1 died (lease)" in words
    assert " / forming generation" in words
    assert waited < 1.5
    assert late < 3


def test_messages_between_two_can_come_late_and_be_interrupted(workers: Workers):
    said = workers.run(group_job.waits_for_a_message, 2, generation=next(GENERATION))
    assert said == ["1.0, then interrupted", "0.0, then interrupted"]


def test_what_a_gang_agrees_on_costs_no_more_after_many_generations(workers: Workers, tmp_path: Path):
    """Found by reading: each holding carried its whole lineage, and every rank's words were as long as the longest."""
    young, old = (
        workers.run(group_job.agrees, 3, generation=next(GENERATION), past=past, folder=str(tmp_path))
        for past in (2, 256)
    )
    for past, results in ((2, young), (256, old)):
        assert [(said["step"], said["cuts"], said["same"]) for said in results] == [(10 * past + 5, past, True)] * 3
        assert {said["told"] for said in results} == {4}, "two speakers, each its length and its words"
    for before, after in zip(young, old, strict=True):
        assert after["gathered"] < before["gathered"] + 200, "a cut has 11 letters and more"


def test_nothing_leaks_over_many_generations(workers: Workers):
    for done, files, threads in workers.run(group_job.many_generations, 3, generation=next(GENERATION), count=24):
        assert done == 24
        assert files <= 2, "file descriptors"
        assert threads <= 2, "threads"


def test_no_collective_of_torchs_is_missing():
    """A release that adds or renames one would let it slip past the interruptible waits."""
    import torch.distributed as dist

    from elasticrl.runtime.group import COLLECTIVES, UNSLICED, ElasticGroup

    others = [
        "BackendType",
        "CUSTOM",
        "GLOO",
        "MPI",
        "NCCL",
        "UCC",
        "UNDEFINED",
        "XCCL",
        "abort",
        "bound_device_id",
        "boxed",
        "get_group_store",
        "getBackendName",
        "getGroupDesc",
        "getGroupName",
        "group_desc",
        "group_name",
        "merge_remote_group",
        "monitored_barrier",
        "name",
        "rank",
        "set_timeout",
        "shutdown",
        "size",
        "split_group",
        "unbox",
        "use_pg_for_symm_mem_rendezvous",
        # Of torch 2.14.
        "get_backend", "get_reconfigure_handle", "new_window", "reconfigure", "register_abort_hook", "register_post_hook",
        "register_pre_hook", "supports_reconfigure", "supports_window", "unregister_abort_hook", "unregister_post_hook",
        "unregister_pre_hook",
        # Of torch 2.15.
        "supports_abort_hooks", "supports_completion_hooks",
    ]  # fmt: skip
    public = {name for name in dir(dist.ProcessGroup) if not name.startswith("_")}
    assert public - set(others) <= set(COLLECTIVES)
    assert set(COLLECTIVES) >= UNSLICED
    assert all(name in vars(ElasticGroup) for name in COLLECTIVES)
