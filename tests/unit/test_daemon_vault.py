"""What a daemon tells its vault, and where it lies: pure functions of a plan and of names."""

import asyncio
import subprocess
import time
from pathlib import Path

import pytest
from structlog.testing import CapturingLogger

from chaos.patience import patience
from elasticrl.base.address import CONTROL
from elasticrl.base.started import Started
from elasticrl.contract.model import Member, Phase, Plan, Seat
from elasticrl.contract.ring import Ring
from elasticrl.daemon.refusal import Refusal
from elasticrl.daemon.secret import engine_key, run_of, vault_key
from elasticrl.daemon.vault import Options, Vault, folder_of, ring_of


def seat(node: str, vault: str = "") -> Seat:
    return Seat(member=Member(node=node, incarnation=1), born=1, vault=vault)


def test_the_ring_is_the_seats_in_rank_order() -> None:
    seats = (seat("b", "10.0.0.2:1"), seat("a", "10.0.0.1:1"), seat("c"))
    plan = Plan(generation=7, phase=Phase.TRAIN, seats=seats)
    addresses = (("b", "10.0.0.2:1"), ("a", "10.0.0.1:1"))
    assert ring_of(plan, 2) == Ring(generation=7, nodes=("b", "a", "c"), addresses=addresses, copies=2)


def test_without_a_gang_the_last_ring_holds() -> None:
    assert ring_of(None, 1) is None
    assert ring_of(Plan(generation=7, phase=Phase.HOLD), 1) is None


def test_two_jobs_or_nodes_on_one_host_never_meet() -> None:
    places = {folder_of("/dev/shm/elasticrl", job, node) for job in ("a", "b") for node in ("n0", "n1")}
    assert len(places) == 4
    assert folder_of("/dev/shm/elasticrl", "a", "n0") == Path("/dev/shm/elasticrl/a/n0")


def test_a_path_that_no_socket_may_have_is_refused_in_a_sentence() -> None:
    fits = "n" * (107 - len(f"/v/j//{CONTROL}"))
    assert folder_of("/v", "j", fits).name == fits
    with pytest.raises(Refusal, match="bytes"):
        folder_of("/v", "j", fits[:-1] + "ü")
    with pytest.raises(Refusal, match=r"108 bytes.* may have 107: shorten vault\.dir, job\.name or node\.name"):
        folder_of("/v", "j", fits + "n")


def test_the_vaults_key_is_derived_for_this_purpose_alone() -> None:
    assert len(vault_key(b"s" * 32)) == 64
    assert vault_key(b"s" * 32) != vault_key(b"t" * 32)
    assert bytes.fromhex(vault_key(b"s" * 32)) != b"s" * 32


def test_what_is_made_of_the_secret_is_the_same_in_all_versions() -> None:
    secret = b"s" * 32
    assert vault_key(secret) == "b9082a09405b843731d9115ef445fb73d40efb5285c92b1a9285e302620845dc"
    assert engine_key(secret) == "2b1cc8454d79d4e6dd64e605f7610f63269268e4ffcc8d959b3f9fbd80043df7"
    assert run_of(secret) == "64c3bb6c"


def test_a_vault_that_does_not_end_when_it_is_killed_silences_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As one that hangs in the kernel does not. Beats and the lease's renewal run in the same event loop.
    child = subprocess.Popen(["sleep", "60"])
    options = Options(job="j", node="n", folder=tmp_path, home=tmp_path, host="127.0.0.1", deadline_s=0.6)
    vault = Vault(options, log=CapturingLogger())
    vault.process = Started.of(child.pid)
    monkeypatch.setattr(Started, "send", lambda *_: None)

    async def longest_silence() -> float:
        killing, longest, last = asyncio.create_task(vault._kill()), 0.0, time.monotonic()
        while not killing.done():
            await asyncio.sleep(0.01)
            now = time.monotonic()
            longest, last = max(longest, now - last), now
        await killing
        return longest

    begun = time.monotonic()
    try:
        assert asyncio.run(longest_silence()) < 0.55  # it blocked for 0.6
        assert 0.6 <= time.monotonic() - begun < patience(10.0)
    finally:
        child.kill()
        child.wait()
