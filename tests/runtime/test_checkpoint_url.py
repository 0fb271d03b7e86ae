"""Checkpoints at a URL: what is read of them, by a store that counts; and what becomes of a store that fails."""

import errno
import hashlib
import json
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from math import prod
from pathlib import Path
from threading import Timer
from types import SimpleNamespace

import pytest
import torch
import typer
import url_job
from counted_store import Counted, hanging
from forked_workers import Workers
from gang_kit import Nodes, digests
from state_jobs import FACTS, Job, pinned, same, snapshots
from typer.testing import CliRunner

from elasticrl.base.parsed import LARGEST
from elasticrl.cli import state
from elasticrl.config import Tree
from elasticrl.runtime.checkpoint.export import export
from elasticrl.runtime.checkpoint.far import AT_ONCE, Patience
from elasticrl.runtime.checkpoint.flat import FlatShard
from elasticrl.runtime.checkpoint.load import far_source, open_checkpoint, read_table, read_tables
from elasticrl.runtime.checkpoint.manifest import (
    COMMITTED,
    MANIFEST,
    FileEntry,
    Manifest,
    Row,
    ShardTable,
    seal,
    unseal,
)
from elasticrl.runtime.checkpoint.parts import Parts
from elasticrl.runtime.checkpoint.place import Local, Place, Url
from elasticrl.runtime.checkpoint.save import finish, write_shard
from elasticrl.runtime.checkpoint.shelf import looked_at, mark_committed, newest_good, prune, read_manifest, verify
from elasticrl.runtime.fetched import open_together
from elasticrl.runtime.layout import Layout, buckets, striped, up
from elasticrl.runtime.layout import Piece as Range
from elasticrl.runtime.optim import AdamW
from elasticrl.runtime.restore import patience_s
from elasticrl.runtime.shard import Shard
from elasticrl.runtime.vault.client import Vault
from elasticrl.runtime.vault.errors import CheckpointCorrupt, CheckpointRefused, CheckpointStorage
from elasticrl.runtime.vault.piece import Piece
from elasticrl.runtime.vault.source import Source
from elasticrl.runtime.vault.version import Version

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

BLOCK = 1 << 12  # small beside a shard
ROWS = 3  # AdamW's: parameters and two moments
SHAPES = [(f"layer{i}.{name}", shape) for i in range(4) for name, shape in (("w", (960, 64)), ("b", (960,)))]
TOTAL = ROWS * 4 * sum(prod(shape) for _, shape in SHAPES)


@pytest.fixture
def where() -> Iterator[Url]:
    """An empty store."""
    Counted.fresh()
    yield Url("counted://bucket/run", answer_s=0.5, wait_s=0.0)
    Counted.fresh()


def zero(world: int) -> Layout:
    """As ZeRO cuts: all parameters in a row, and that in equal parts."""
    return striped(buckets(SHAPES, 20_000), world)


def fsdp(world: int) -> Layout:
    """As FSDP2 cuts: each parameter by its rows."""
    ranks: list[list[Range]] = [[] for _ in range(world)]
    at = 0
    for name, shape in SHAPES:
        height, row = -(-shape[0] // world), prod(shape[1:])
        for rank, mine in enumerate(ranks):
            start, stop = min(rank * height, shape[0]) * row, min((rank + 1) * height, shape[0]) * row
            mine.append(Range(name=name, shape=shape, start=start, stop=stop, at=at))
        at += up(height * row)
    return Layout(size=at, pieces=tuple(map(tuple, ranks)))


Cut = Callable[[int], Layout]
BOTH = pytest.mark.parametrize("cut", [zero, fsdp])


def shards(cut: Cut, world: int) -> list[Shard]:
    layout = cut(world)
    device = torch.device("cpu")
    return [Shard(layout, rank, lambda _: AdamW(), dtype=torch.float32, device=device) for rank in range(world)]


def numbers(piece: Range, row: int) -> torch.Tensor:
    return torch.arange(piece.start, piece.stop) + 100_000.0 * row + 7_000_000.0 * sum(map(ord, piece.name))


def save(where: Place, folder: Path, cut: Cut, world: int, *, step: int = 1) -> Manifest:
    """A checkpoint of `world` ranks."""
    for rank, shard in enumerate(shards(cut, world)):
        shard.version = 41
        for row in range(ROWS):
            for piece in shard.pieces:
                shard.state[row, piece.there] = numbers(piece, row)
        vault = Vault(folder / f"{step}-n{rank}", job="j", node=f"n{rank:02d}")
        content = Parts(model=FlatShard(shard, optimizer="model_optimizer")).capture(rank, world)
        ticket = vault.snapshot(content, version=Version(step), generation=1, shard=rank, world=world)
        ticket.wait_sealed(10)
        assert ticket.path is not None
        with pinned(ticket.path) as found:
            write_shard(where, found, block=BLOCK)
        vault.close()
    manifest = finish(where, version=Version(step), generation=1, world=world, facts=FACTS, timeout_s=1.0)
    mark_committed(where, manifest.name)
    return manifest


def load(source: Source, shard: Shard) -> None:
    """What a rank does with a checkpoint."""
    parts = Parts(model=FlatShard(shard, optimizer="model_optimizer"))
    source.bring(parts.needs(source))
    came = Counted.data()
    parts.restore(source)
    assert Counted.data() == came, "something was read that nobody had said he needs"
    assert shard.version == 41
    for row in range(ROWS):
        for piece in shard.pieces:
            assert torch.equal(shard.state[row, piece.there], numbers(piece, row))


@BOTH
def test_a_rank_of_four_reads_a_quarter(where: Url, tmp_path: Path, cut: Cut):
    name = save(where, tmp_path, cut, 4).name
    for shard in shards(cut, 4):
        Counted.well()
        load(open_checkpoint(where, name), shard)
        assert Counted.data() < 1.1 * TOTAL / 4, "its own file, with what torch.save writes around each tensor"


@BOTH
@pytest.mark.parametrize(("old", "new"), [(3, 2), (2, 3), (4, 1), (1, 4)])
def test_other_ranks_than_wrote_it_read_each_row_once_but_for_the_edges_of_blocks(
    where: Url, tmp_path: Path, cut: Cut, old: int, new: int
):
    manifest = save(where, tmp_path, cut, old)
    Counted.well()
    for shard in shards(cut, new):
        load(open_checkpoint(where, manifest.name), shard)
    runs = 0
    for file, some in Counted.spans.items():
        if not file.endswith(".distcp"):
            continue
        times = Counter(block for start, stop in some for block in range(start // BLOCK, -(-stop // BLOCK)))
        assert max(times.values()) <= new
        runs += sum(count - 1 for count in times.values())
    cuts = (
        ROWS * len(SHAPES) * (old + new)
    )  # where a parameter, or a moment of it, goes on in another file or at another rank
    assert runs <= cuts
    assert Counted.data() <= TOTAL + 2 * BLOCK * cuts + 5_000 * ROWS * len(SHAPES) * old
    if (old, new) == (1, 4):
        assert Counted.data() < 1.5 * TOTAL, "the whole would be four times that"


def test_a_whole_state_comes_back_bit_for_bit(where: Url, tmp_path: Path):
    job = Job(seed=1).train(3)
    before = job.state()
    for path in snapshots(tmp_path, job, 3):
        with pinned(path) as found:
            write_shard(where, found, block=BLOCK)
    name = finish(where, version=Version(5), generation=2, world=3, facts=FACTS, timeout_s=1.0).name
    for rank in range(2):
        other = Job(seed=100 + rank, rank=rank, world=2).train(rank)
        other.parts.restore(open_checkpoint(where, name))
        assert same(other.state(), before)


def test_a_prune_reads_no_state(where: Url, tmp_path: Path):
    names = [save(where, tmp_path, zero, 2, step=step).name for step in (1, 2, 3, 4)]
    Counted.well()
    assert prune(where, keep_last=2, generation=1, commit=names[-1]) == tuple(names[1::-1])
    assert where.names() == names[2:]
    assert Counted.data() == Counted.tables() == 0


def test_an_export_reads_the_model_and_not_its_moments(where: Url, tmp_path: Path):
    name = save(where, tmp_path, fsdp, 2).name
    Counted.well()
    export(where, name, tmp_path / "out")
    assert Counted.data() < 1.3 * TOTAL / ROWS


def test_an_export_asks_a_store_again_that_fails_meanwhile(where: Url, tmp_path: Path):
    name = save(where, tmp_path, fsdp, 2).name
    Counted.raising["data-0001.json"] = [OSError(errno.EBUSY, "SlowDown")]
    Counted.raising["data-0001.distcp"] = [OSError(errno.EBUSY, "SlowDown")]
    export(Url(where.url), name, tmp_path / "out")
    assert not any(Counted.raising.values())


def test_how_long_an_export_waits_for_a_store_is_what_the_configuration_says():
    plain = {"job": {"name": "j"}, "node": {"name": "n0"}, "checkpoint": {"answer": 7, "wait": 11}}
    place = state.place_of("counted://bucket/run", Tree.model_validate(plain))
    assert isinstance(place, Url)
    assert (place.answer_s, place.wait_s) == (7.0, 11.0)


def test_an_export_steps_back_from_a_changed_block(where: Url, tmp_path: Path):
    good, flipped = (save(where, tmp_path, fsdp, 2, step=step).name for step in (1, 2))
    Counted.flip(flipped, "data-0000.distcp", 3 * BLOCK)
    app = typer.Typer()
    app.callback()(lambda: None)
    state.register(app)
    done = CliRunner().invoke(app, ["checkpoint", "export", where.url, str(tmp_path / "out"), "--json"])
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    assert told["name"] == good
    assert "data-0000.distcp (shard 0, written by n00) was changed: block 3 " in told["passed_over"][0]


@pytest.mark.parametrize("harm", ["flip", "cut", "remove"])
def test_a_damaged_block_is_found_and_named_by_who_needs_it(where: Url, tmp_path: Path, harm: str):
    name = save(where, tmp_path, zero, 2).name
    source = open_checkpoint(where, name)
    file = "data-0001.distcp"
    if harm == "flip":
        Counted.flip(name, file, 3 * BLOCK + 5)
        said = (
            r"data-0001.distcp \(shard 1, written by n01\) was changed: block 3 \(bytes 12288 to 16384\) has the sha256"
        )
        assert looked_at(where, name) == (), "its size is right"
        assert len(verify(where, name)) == 1
    elif harm == "cut":
        with where._fs.open(where._at(name, file), "wb") as there:
            there.write(b"short")
        said = r"data-0001.distcp \(shard 1, written by n01\) was cut off"
    else:
        where._fs.rm_file(where._at(name, file))
        said = r"data-0001.distcp \(shard 1, written by n01\) is missing"
    one, other = shards(zero, 2)
    load(source, one)
    with pytest.raises(CheckpointCorrupt, match=said):
        load(source, other)
    assert not other.state.any(), "nothing was changed"
    if harm != "flip":
        with pytest.raises(CheckpointCorrupt, match=r"No checkpoint at .* is good"):
            newest_good(where)


def test_a_save_waits_for_a_table_that_is_just_being_written(where: Url, tmp_path: Path):
    # Found live, at file://, where a file is seen before it is whole: the last save of a job failed.
    name = save(where, tmp_path, zero, 2).name
    whole = where.read(name, "data-0001.json")
    for file in (MANIFEST, COMMITTED):
        where._fs.rm_file(where._at(name, file))
    where.put(name, "data-0001.json", whole[:100])
    later = Timer(0.3, lambda: where.put(name, "data-0001.json", whole))
    later.start()
    finish(where, version=Version(1), generation=1, world=2, facts=FACTS, timeout_s=30.0)
    later.join()
    assert verify(where, name) == ()


WORD = Piece("m.w", "uint8", (10,), (0,), (10,))


@pytest.mark.parametrize(
    ("raw_at", "nbytes", "piece"),
    [
        (-5, 100, WORD),
        (1 << 70, 100, WORD),
        (95, 100, WORD),
        (0, 1 << 61, WORD),
        (0, 1 << 70, WORD),
        (0, 100, Piece("m.w", "uint8", (0, 1 << 80), (0, 0), (0, 1 << 80))),
        (0, 100, Piece("m.w", "float64", (0, 1 << 62, 1 << 62), (0, 0, 0), (0, 1 << 62, 1 << 62))),
        (0, 100, Piece("m.w", "float64", (1 << 62, 4), (0, 0), (1 << 62, 4))),
    ],
)
def test_numbers_that_no_file_has_are_a_damaged_table(where: Url, raw_at: int, nbytes: int, piece: Piece):
    data = FileEntry(name="data-0000.distcp", nbytes=nbytes, sha256="a", shard=0)
    rows = (Row(piece, raw_at, 0, 0),)
    text = ShardTable(shard=0, node="n0", data=data, rows=rows, values={}, block=1 << 70, sums=("a",)).encode()
    table = FileEntry(name="data-0000.json", nbytes=len(text), sha256=hashlib.sha256(text).hexdigest(), shard=0)
    manifest = Manifest(
        version=Version(1), generation=1, world=1, parent=None, facts=FACTS, contents={}, files=(data, table)
    )
    with pytest.raises(CheckpointCorrupt, match=r"data-0000"):
        far_source(where, manifest, {0: text}, Patience())


def test_a_table_that_is_not_the_manifests_is_refused(where: Url, tmp_path: Path):
    manifest = save(where, tmp_path, zero, 2)
    other = save(where, tmp_path, fsdp, 2, step=2)
    texts = {0: read_table(where, manifest, 0), 1: read_table(where, other, 1)}
    with pytest.raises(CheckpointCorrupt, match=r"data-0001.json is not the table that manifest.json lists"):
        far_source(where, manifest, texts, Patience())


@pytest.mark.parametrize("parts", ["ignored", "refused"])
def test_of_a_store_that_gives_no_parts_each_file_is_read_once(where: Url, tmp_path: Path, parts: str):
    manifest = save(where, tmp_path, fsdp, 3)
    Counted.well()
    Counted.parts = parts
    source = open_checkpoint(where, manifest.name)
    for shard in shards(fsdp, 2):
        load(source, shard)
    assert Counted.data() == sum(
        file.nbytes for file in manifest.files if file.name.endswith("distcp") and file.shard is not None
    )


def test_a_checkpoint_of_a_disk_has_no_sums_of_blocks_and_at_a_url_is_read_file_by_file(where: Url, tmp_path: Path):
    disk = Local(tmp_path / "disk")
    manifest = save(disk, tmp_path, zero, 2)
    for file in sorted((tmp_path / "disk" / manifest.name).iterdir()):
        where.put(manifest.name, file.name, file.read_bytes())
    table = ShardTable.decode(read_table(where, manifest, 0), "it")
    assert (table.block, table.sums) == (0, ())
    one, other = shards(zero, 2)
    Counted.well()
    load(open_checkpoint(where, manifest.name), one)
    assert Counted.data() == table.data.nbytes, "its own file, once"
    Counted.flip(manifest.name, "data-0001.distcp", 5)
    with pytest.raises(CheckpointCorrupt, match=r"data-0001\.distcp \(shard 1, written by n01\) was changed"):
        load(open_checkpoint(where, manifest.name), other)


def gang_source(where: Url, name: str, patience: Patience) -> Source:
    manifest = read_manifest(where, name)
    texts = {shard: read_table(where, manifest, shard) for shard in manifest.shards}
    return far_source(where, manifest, texts, patience)


def test_a_store_that_fails_is_asked_again_and_not_for_ever(where: Url, tmp_path: Path):
    name = save(where, tmp_path, zero, 2).name
    one, other = shards(zero, 2)
    source = gang_source(where, name, Patience(wait_s=20.0))
    Counted.failing = 1
    load(source, one)
    source = gang_source(where, name, Patience(wait_s=0.6))
    Counted.failing = 1_000
    with pytest.raises(CheckpointStorage, match=r"Reading step-.* failed: Trouble: 503 slow down"):
        load(source, other)
    with pytest.raises(CheckpointStorage, match="503 slow down"):
        newest_good(where)
    Counted.failing = 0
    load(source, other)


SAID_503 = {  # by the libraries of stores
    "s3fs": OSError(errno.EBUSY, "SlowDown"),
    "s3fs, 500": OSError(errno.EREMOTEIO, "InternalError"),
    "s3fs, unknown": OSError(errno.EIO, "an error that is not known"),
    "forbidden for a moment": PermissionError(errno.EACCES, "the token has expired"),
    "words": RuntimeError("connection reset"),
    "late": TimeoutError(errno.ETIMEDOUT, "timed out"),
}


@pytest.mark.parametrize("error", SAID_503.values(), ids=SAID_503)
@pytest.mark.parametrize("file", [MANIFEST, COMMITTED])
def test_a_failure_that_passes_makes_no_checkpoint_a_bad_one(where: Url, tmp_path: Path, error: Exception, file: str):
    save(where, tmp_path, zero, 1)
    newest = save(where, tmp_path, zero, 1, step=2).name
    failed = 0
    for answers_before in range(20):
        Counted.raising[file] = [None] * answers_before + [error]
        try:
            found = newest_good(where)
        except CheckpointStorage:
            failed += 1
        else:
            assert found is not None
            assert (found.manifest.name, found.passed_over) == (newest, ())
            assert Counted.raising[file], "nothing failed, as it is not asked for so often"
            break
    assert failed == 3, "two in the listing, and the newest is looked at once"


@pytest.mark.parametrize("file", [MANIFEST, COMMITTED, "data-0000.json"])
def test_a_save_that_is_asked_for_again_removes_nothing_while_the_store_fails(where: Url, tmp_path: Path, file: str):
    manifest = save(where, tmp_path, zero, 1)

    def again() -> Manifest:
        return finish(where, version=Version(1), generation=1, world=1, facts=FACTS, timeout_s=0.5)

    for error in SAID_503.values():
        Counted.raising[file] = [error]
        with pytest.raises(CheckpointStorage):
            again()
        Counted.well()
        assert verify(where, manifest.name) == ()
    assert again() == manifest
    text = where.read(manifest.name, MANIFEST)
    where.put(manifest.name, MANIFEST, seal({**unseal(text, "it"), "format": 1}))
    with pytest.raises(CheckpointRefused, match="has format 1"):
        again()
    assert where.names() == [manifest.name]


def test_a_save_that_is_asked_for_again_removes_nothing_that_just_cannot_be_read(tmp_path: Path):
    disk = Local(tmp_path / "disk")
    manifest = save(disk, tmp_path, zero, 1)
    file = tmp_path / "disk" / manifest.name / "data-0000.distcp"
    data = file.read_bytes()
    file.unlink()
    file.symlink_to("/proc/self/mem")  # opens, and reads as a bad sector does
    with pytest.raises(CheckpointStorage, match=r"data-0000\.distcp .* cannot be read \(.*It stays"):
        finish(disk, version=Version(1), generation=1, world=1, facts=FACTS, timeout_s=0.5)
    file.unlink()
    file.write_bytes(data)
    assert verify(disk, manifest.name) == ()


@pytest.mark.parametrize("listed", ["unsized", "stale", "late"])
def test_a_listing_that_knows_too_little_makes_no_checkpoint_a_bad_one(where: Url, tmp_path: Path, listed: str):
    name = save(where, tmp_path, zero, 2).name
    Counted.listed = listed
    assert looked_at(where, name) == ()
    with where._fs.open(where._at(name, "data-0000.distcp"), "wb") as there:
        there.write(b"short")
    where._fs.rm_file(where._at(name, "data-0001.distcp"))
    assert [problem.why.split(" bytes")[0] for problem in looked_at(where, name)] == ["has 5", "is missing"]


def test_a_file_system_that_is_not_made_for_threads_is_asked_by_one_at_a_time(where: Url, tmp_path: Path):
    # As ftp's, which has one connection: answers came to who had asked for something else.
    name = save(where, tmp_path, fsdp, 8).name
    source = gang_source(where, name, Patience())
    Counted.well()
    Counted.slow_s = 0.01
    load(source, shards(fsdp, 1)[0])
    assert Counted.clashes == 0
    assert 1 < len(set(map(id, Counted.asked))) <= AT_ONCE, "and yet several are at work"


def test_a_file_system_that_has_hung_is_not_asked_again(where: Url, tmp_path: Path):
    name = save(where, tmp_path, zero, 2).name
    where.read(name, MANIFEST)
    Counted.asked.clear()
    with hanging(), pytest.raises(OSError, match="no answer within"):
        where.read(name, MANIFEST)
    where.read(name, MANIFEST)
    hung, other = Counted.asked
    assert hung is not other, "fsspec calls all of one store equal"


def test_a_store_that_hangs_is_waited_for_until_its_deadline(where: Url, tmp_path: Path):
    name = save(where, tmp_path, zero, 2).name
    source = gang_source(where, name, Patience())
    with hanging() as begun:
        for read in (lambda: load(source, shards(zero, 2)[0]), lambda: newest_good(where)):
            with pytest.raises(CheckpointStorage, match=r"no answer within 0\.5 s \(checkpoint\.answer\)"):
                read()
        assert time.monotonic() - begun < 8.0


def test_what_a_store_denies_for_a_moment_is_asked_for_again(where: Url, tmp_path: Path):
    name = save(where, tmp_path, zero, 2).name
    one, other = shards(zero, 2)
    source = gang_source(where, name, Patience(wait_s=20.0))
    Counted.raising["data-0000.distcp"] = [FileNotFoundError("404")] * 3
    load(source, one)
    Counted.short = 2
    load(source, other)
    Counted.raising["data-0001.json"] = [FileNotFoundError("404")] * 3
    assert len(read_tables(where, read_manifest(where, name), (0, 1), Patience(wait_s=20.0))) == 2
    Counted.raising["data-0001.json"] = [FileNotFoundError("404")] * 1_000
    with pytest.raises(CheckpointCorrupt, match=r"data-0001\.json is missing"):
        read_tables(where, read_manifest(where, name), (0, 1), Patience(wait_s=0.6))


class Elsewhere(Exception):
    pass


def leave() -> None:
    raise Elsewhere


def test_a_new_plan_ends_the_reading_of_tables_too(where: Url, tmp_path: Path):
    manifest = save(where, tmp_path, zero, 2)
    where.answer_s = 8.0
    gang = SimpleNamespace(rank=0, world=1, backend="gloo", group=None)
    with hanging() as begun, pytest.raises(Elsewhere):
        open_together(where, manifest, gang, lambda _: [], Patience(wait_s=60.0, check=leave))
    assert time.monotonic() - begun < 4.0


def test_the_patience_of_one_rank_ends_before_that_of_those_who_wait_for_it():
    tree = Tree.model_validate({"job": {"name": "j"}, "node": {"name": "n0"}})
    assert tree.checkpoint.wait_s == tree.timeouts.collective_s == 600.0
    assert patience_s(tree) + 2 * tree.checkpoint.answer_s < 0.8 * tree.timeouts.collective_s


def test_a_part_of_a_checkpoint_is_refused_by_a_gang_as_by_anybody(where: Url, tmp_path: Path):
    manifest = replace(save(where, tmp_path, zero, 2), own=(1,), nodes=("n0", "n1"))
    gang = SimpleNamespace(rank=0, world=1, backend="gloo", group=None)
    with pytest.raises(CheckpointRefused, match="has 1 of its 2 parts; the others are on the disks of n0"):
        open_together(where, manifest, gang, lambda _: [], Patience())


def test_a_new_plan_ends_the_reading(where: Url, tmp_path: Path):
    source = gang_source(where, save(where, tmp_path, zero, 2).name, Patience(wait_s=60.0, check=leave))
    with hanging(), pytest.raises(Elsewhere):
        load(source, shards(zero, 2)[0])


def test_a_gang_reads_each_table_once_and_all_hear_what_one_has_found(tmp_path: Path):
    where = Url(f"file://{tmp_path}/there")
    good, flipped, away = (save(where, tmp_path, fsdp, 3, step=step).name for step in (1, 2, 3))
    file = tmp_path / "there" / flipped / "data-0001.distcp"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    (tmp_path / "there" / away / "data-0002.json").unlink()
    gang = Workers(3)
    try:
        options = {"url": where.url, "generation": 1}
        for rank, (asked, said) in enumerate(gang.run(url_job.reads, 3, name=good, **options)):
            assert said == ""
            assert set(asked) == {f"data-{rank:04d}.json", f"data-{rank:04d}.distcp"}
            assert asked.count(f"data-{rank:04d}.json") == 1
        found = {said for _, said in gang.run(url_job.reads, 3, name=flipped, **{**options, "generation": 2})}
        (sentence,) = found
        assert re.match(
            r"BlockCorrupt: step-00000002-g1: data-0001\.distcp \(shard 1, written by n01\) was changed: bl", sentence
        )
        found = {said for _, said in gang.run(url_job.reads, 3, name=away, **{**options, "generation": 3})}
        assert found == {"BlockCorrupt: step-00000003-g1: data-0002.json is missing."}
    finally:
        gang.close()


@pytest.mark.slow  # 64 MiB of JSON are written and read some times
def test_a_table_longer_than_a_message_of_words_may_be_is_told(tmp_path: Path):
    where = Url(f"file://{tmp_path}/there")
    data = FileEntry(name="data-0000.distcp", nbytes=0, sha256=hashlib.sha256(b"").hexdigest(), shard=0)
    values = {"run": "w" * (LARGEST + 1)}
    text = ShardTable(shard=0, node="n0", data=data, rows=(), values=values, block=1, sums=()).encode()
    table = FileEntry(name="data-0000.json", nbytes=len(text), sha256=hashlib.sha256(text).hexdigest(), shard=0)
    manifest = Manifest(
        version=Version(1), generation=1, world=1, parent=None, facts=FACTS, contents={}, files=(data, table)
    )
    where.begin(manifest.name)
    where.put(manifest.name, table.name, text)
    where.put(manifest.name, MANIFEST, manifest.encode())
    gang = Workers(1)
    try:
        asked = gang.run(url_job.reads, 1, url=where.url, name=manifest.name, generation=1)
        assert asked == [(["data-0000.json"], "")]
    finally:
        gang.close()


def test_a_gang_steps_back_from_a_checkpoint_of_which_one_rank_finds_a_block_changed(tmp_path: Path):
    def run(folder: Path, *, hurt: bool) -> tuple[dict[int, str], str]:
        conf = {"checkpoint": {"dir": f"file://{folder}/there", "every": 20, "keep_last": 9}}
        with Nodes(folder, steps=60, step_ms=30.0, strategy="fsdp", conf=conf) as nodes:
            nodes.plan("n0", "n1")
            if hurt:
                nodes.until(lambda: nodes.commit() >= 40, "two commits", 90.0)
                file = folder / "there/job/step-00000040-g1/data-0001.distcp"
                data = bytearray(file.read_bytes())
                data[len(data) // 2] ^= 1
                file.write_bytes(data)
                for node in ("n0", "n1"):
                    nodes.lose(node)
                nodes.plan("n0", "n1")
            nodes.until_done()
            return digests(folder / "state/job"), nodes.workers["n0"].text

    undisturbed, _ = run(tmp_path / "plain", hurt=False)
    found, text = run(tmp_path / "hurt", hurt=True)
    assert re.search(r"step 40\.0 of generation 1 is not good: .*data-0001\.distcp .*was changed: block \d+ ", text), (
        text
    )
    assert "generation 2: rank 0 of 2, lanes" in text
    assert "from step 20.0 " in text
    assert found == undisturbed
