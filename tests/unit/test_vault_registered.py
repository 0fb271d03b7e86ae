"""The vault's memory is told to the GPU once for each mapping, let go of before the next, and never needed. CUDA is played."""

import ctypes
import mmap
import threading
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from elasticrl.runtime.vault.client import Content, Vault
from elasticrl.runtime.vault.layout import Table
from elasticrl.runtime.vault.piece import whole
from elasticrl.runtime.vault.registered import Registered
from elasticrl.runtime.vault.version import Version


@dataclass
class Cudart:
    """CUDA's runtime, as far as it is asked: what is registered now, and what it answers."""

    answer: int | Exception = 0
    known: dict[int, int] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    threads: set[int] = field(default_factory=set)

    def cudaHostRegister(self, pointer: int, size: int, flags: int) -> int:  # noqa: N802
        self.asked.append("register")
        self.threads.add(threading.get_ident())
        if isinstance(self.answer, Exception):
            raise self.answer
        assert flags == 0
        if not self.answer:
            assert pointer not in self.known, "CUDA refuses what it knows already"
            self.known[pointer] = size
        return self.answer

    def cudaHostUnregister(self, pointer: int) -> int:  # noqa: N802
        self.asked.append("unregister")
        del self.known[pointer]
        return 0


def address(mapping: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(mapping))


def test_a_mapping_is_registered_once_and_the_one_before_is_let_go_of():
    cudart, told = Cudart(), []
    registered = Registered(cudart, told.append)
    first, second, other = (mmap.mmap(-1, size) for size in (4096, 8192, 4096))
    assert [registered.know(1, first), registered.know(1, first), registered.know(2, other)] == [True] * 3
    assert cudart.known == {address(first): 4096, address(other): 4096}
    assert registered.know(1, second)
    assert cudart.known == {address(second): 8192, address(other): 4096}
    assert cudart.asked == ["register", "register", "unregister", "register"]
    registered.close()
    assert cudart.known == {}
    assert told == []
    first.close()  # nobody holds a view of it


@pytest.mark.parametrize("answer", [1, RuntimeError("CUDA error: operation not supported")])
def test_a_refusal_is_told_once_and_nothing_is_asked_again(answer: int | Exception):
    cudart, told = Cudart(answer), []
    registered = Registered(cudart, told.append)
    assert not registered.know(1, mmap.mmap(-1, 4096))
    assert not registered.know(2, mmap.mmap(-1, 4096))
    assert cudart.asked == ["register"]
    (said,) = told
    assert ("error 1" if answer == 1 else "operation not supported") in said
    assert "pageable memory" in said
    registered.close()


def test_cuda_is_asked_in_a_thread_whose_last_error_nobody_reads():
    cudart = Cudart()
    Registered(cudart, print).know(1, mmap.mmap(-1, 4096))
    assert threading.get_ident() not in cudart.threads


def test_a_vault_registers_each_of_its_files_once_and_lets_go_of_all_at_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Its tensors are said to be a GPU's: torch's copies to the host are made as they are everywhere."""
    cudart = Cudart()
    vault = Vault(tmp_path / "v", job="j", node="n0")
    monkeypatch.setattr(vault, "_register", lambda slot, _tensors: registered.know(id(slot), slot.mapping))
    monkeypatch.setattr("elasticrl.runtime.vault.client._cuda_event", lambda _tensors: "an event")
    monkeypatch.setattr(
        "elasticrl.runtime.vault.client._copy",
        lambda targets, tensors, _ready: [
            target.copy_(tensor) for target, tensor in zip(targets, tensors, strict=True)
        ],
    )
    registered = vault._registered = Registered(cudart, print)
    weights = torch.arange(1000.0)
    content = Content(table=Table((whole("w", "float32", (1000,)),)), tensors=(weights,), values={})
    for step in range(8):
        vault.snapshot(content, version=Version(step), generation=1, shard=0, world=1).wait_sealed(5)
    files = len(list((tmp_path / "v").glob("*.shard")))
    assert cudart.asked == ["register"] * files
    assert len(cudart.known) == files > 1
    vault.close()
    assert cudart.known == {}


def test_each_call_is_made_with_this_workers_gpu_chosen_in_its_thread():
    # A thread of CUDA begins with the first GPU, whichever its process computes on.
    cudart, chosen = Cudart(), list[int]()
    registered = Registered(cudart, lambda _: None, choose=lambda: chosen.append(threading.get_ident()))
    assert registered.know(1, mmap.mmap(-1, 4096))
    assert cudart.threads == set(chosen)
    registered.forget(1)
    assert len(chosen) == len(cudart.asked) == 2
