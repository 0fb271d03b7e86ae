"""The vault's file format: whole or not, at every byte."""

import json
import mmap
import os
import signal

import pytest

from elasticrl.runtime.vault import faults, layout
from elasticrl.runtime.vault.layout import Sealed, Stamp, Table, Torn
from elasticrl.runtime.vault.piece import Piece
from elasticrl.runtime.vault.version import Cut, Version


def stamp(step: int = 7) -> Stamp:
    return Stamp(
        job="ppo",
        node="n00",
        writer="w0",
        version=Version(step, 1),
        generation=3,
        shard=1,
        world=2,
        lineage=(Cut(3, Version(5)),),
        base=Version(step),
        sealed=((Version(6), 2), (Version(5), 2)),
    )


TABLE = Table((Piece("w", "float32", (9,), (3,), (5,)), Piece("b", "int64", (3,), (0,), (3,))))


def write(memory: memoryview, step: int, fill: int) -> layout.Shape:
    text = layout.header(stamp(step), TABLE, {"schedule": {"lr": 0.1}})
    shape = layout.shape_of(text, TABLE.starts[-1])
    layout.unseal(memory)
    memory[shape.data_start : shape.data_start + shape.data_bytes] = bytes([fill]) * shape.data_bytes
    layout.seal(memory, shape, text, layout.sums_of(memory, shape))
    return shape


def test_a_sealed_file_gives_back_what_was_written():
    memory = memoryview(bytearray(16384))
    write(memory, 7, 42)
    found = layout.read(memory)
    assert isinstance(found, Sealed)
    assert found.stamp == stamp(7)
    assert found.table == TABLE
    assert json.loads(found.values) == {"schedule": {"lr": 0.1}}
    assert layout.damage(memory, found) == ()


def states(before: bytes, after: bytes):
    """Every state on the way from one version to the next: the seal is cleared, then data and sums, header, prelude, seal."""
    now = bytearray(before)
    now[56:64] = bytes(8)
    yield bytes(now)
    for start, stop in [(4096, 16384), (64, 4096), (0, 56), (56, 64)]:
        for at in range(start, stop):
            if now[at] != after[at]:
                now[at] = after[at]
                yield bytes(now)


def test_a_writer_killed_at_any_byte_leaves_no_sealed_version():
    size = 16384
    old, new = memoryview(bytearray(size)), memoryview(bytearray(size))
    write(old, 7, 1)
    write(new, 8, 2)
    passed = list(states(bytes(old), bytes(new)))
    assert len(passed) > 100
    assert passed[-1] == bytes(new)
    for state in passed[:-1]:
        assert isinstance(layout.read(memoryview(state)), Torn)
    assert isinstance(layout.read(memoryview(passed[-1])), Sealed)


@pytest.mark.parametrize(
    ("point", "whole"),
    [("vault.seal.sums", False), ("vault.seal.header", False), ("vault.seal.last", False), ("vault.seal.done", True)],
)
def test_a_writer_killed_while_sealing_leaves_a_whole_version_only_after_the_last_store(point: str, whole: bool):
    shared = mmap.mmap(-1, 16384)
    memory = memoryview(shared)
    write(memory, 7, 1)
    child = os.fork()
    if not child:
        os.environ[faults.FAULT] = f"{point}:kill"
        faults.reset()
        write(memory, 8, 2)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL, "the fault never fired"
    found = layout.read(memory)
    assert isinstance(found, Sealed) == whole
    assert not whole or found.stamp.version == Version(8, 1)


@pytest.mark.parametrize("bit", range(0, 8, 3))
def test_a_flipped_bit_anywhere_is_noticed(bit: int):
    memory = memoryview(bytearray(16384))
    shape = write(memory, 7, 42)
    whole = bytes(memory)
    header_end = layout.HEADER_AT + shape.header_bytes
    data = range(shape.data_start, shape.data_start + shape.data_bytes)
    sums = range(shape.sums_start, shape.total)
    for at in [
        *range(52),
        *range(56, header_end),
        *data,
        *sums,
    ]:  # 52 to 56 is padding, covered by the prelude's checksum
        changed = bytearray(whole)
        changed[at] ^= 1 << bit
        found = layout.read(memoryview(changed))
        assert isinstance(found, Torn) or layout.damage(memoryview(changed), found), f"byte {at} changed unnoticed"


def test_blocks_of_a_piece_cover_its_bytes():
    big = Table(
        (Piece("a", "uint8", (3 * layout.BLOCK,), (0,), (3 * layout.BLOCK,)), Piece("b", "uint8", (10,), (0,), (10,)))
    )
    text = layout.header(stamp(), big, {})
    shape = layout.shape_of(text, big.starts[-1])
    assert shape.blocks == 4
    sealed = Sealed(stamp=stamp(), table=big, shape=shape, text=text, sums=b"", seal=0)
    assert layout.blocks_of(sealed, 0) == range(3)
    assert layout.blocks_of(sealed, 1) == range(3, 4)


def test_a_header_that_nobody_here_wrote_is_torn_not_a_crash():
    for text in (b"[]", b"{}\n[]\n{}", b'{"job":3}\n{}', b"3\n[]\n{}"):
        memory = memoryview(bytearray(16384))
        shape = layout.shape_of(text, 0)
        layout.seal(memory, shape, text, b"")
        found = layout.read(memory)
        assert isinstance(found, Torn)
        assert "not understood" in found.reason
