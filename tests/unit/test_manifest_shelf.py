"""The checkpoints of a place, with small files in place of tensors: trust, stepping back, retention."""

import errno
import os
from pathlib import Path

import pytest

from elasticrl.runtime.checkpoint import shelf
from elasticrl.runtime.checkpoint.manifest import COMMITTED, MANIFEST, Conditions, Manifest, name_of, seal, unseal
from elasticrl.runtime.checkpoint.place import STAGING, TRASH, Local, Place, Url, explained, place
from elasticrl.runtime.checkpoint.shelf import (
    Entry,
    Fresh,
    best_of,
    doomed,
    mark_all,
    mark_committed,
    newest_good,
    overtaken,
    prunable,
    prune,
    read_committed,
    verify,
)
from elasticrl.runtime.vault.errors import CheckpointCorrupt, CheckpointRefused, CheckpointStorage
from elasticrl.runtime.vault.version import Version


def save(
    where: Place, step: int, *, generation: int = 1, commit: bool = True, parts: int = 2, parent: str | None = None
) -> str:
    """A checkpoint of `parts` small files, as a real one is written."""
    name = name_of(Version(step), generation)
    where.begin(name)
    files = []
    for shard in range(parts):
        with where.output(name, f"data-{shard:04d}.distcp") as out:
            out.write(f"{step}.{shard}".encode() * 100)
        files.append(out.entry(f"data-{shard:04d}.distcp", shard=shard, node=f"n{shard:02d}"))
    manifest = Manifest(
        version=Version(step),
        generation=generation,
        world=parts,
        parent=parent,
        facts=Conditions(),
        contents={},
        files=tuple(files),
    )
    with where.output(name, MANIFEST) as out:
        out.write(manifest.encode())
    where.publish(name)
    if commit:
        mark_committed(where, name)
    return name


def flip(path: Path, at: int = 10) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 0x10
    path.write_bytes(data)


def hurt(where: Place, path: Path) -> None:
    """So that whoever looks for a good checkpoint sees it: at a URL nobody reads data for that."""
    if isinstance(where, Url):
        path.write_bytes(path.read_bytes()[:-3])
    else:
        flip(path)


@pytest.fixture(params=["local", "url"])
def where(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    """A directory, and the same through fsspec, which knows no rename and no fsync."""
    return place(tmp_path / "ck") if request.param == "local" else place(f"file://{tmp_path}/ck")


def test_places_are_told_apart(tmp_path: Path):
    assert isinstance(place(tmp_path), Local)
    assert isinstance(place("memory://x"), Url)


def test_the_newest_committed_checkpoint_is_found(where: Place):
    assert newest_good(where) is None
    save(where, 10)
    save(where, 20)
    save(where, 30, commit=False)
    found = newest_good(where)
    assert found is not None
    assert (found.manifest.version.step, found.passed_over) == (20, ())


@pytest.mark.parametrize("at", ["names", "read", "digest"])
def test_a_file_server_that_is_away_makes_no_checkpoint_a_bad_one(tmp_path: Path, at: str):
    class Server(Local):
        """Away for a moment, at that call."""

        away = False

        def _served(self, name: str) -> None:
            if name == at and self.away:
                raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

        def names(self) -> list[str]:
            self._served("names")
            return super().names()

        def read(self, name: str, file: str) -> bytes:
            self._served("read")
            return super().read(name, file)

        def digest(self, name: str, file: str) -> tuple[int, str]:
            self._served("digest")
            return super().digest(name, file)

    where = Server(tmp_path / "ck")
    save(where, 10)
    save(where, 20)
    where.away = True
    with pytest.raises(CheckpointStorage, match=r"Stale file handle\. See that the place is mounted"):
        newest_good(where)
    where.away = False
    found = newest_good(where)
    assert found is not None
    assert (found.manifest.version.step, found.passed_over) == (20, ())


def test_the_stores_commit_counts_even_if_its_record_was_not_written(where: Place):
    """Killed between the transaction and the record: the store knows better."""
    save(where, 10)
    name = save(where, 20, commit=False)
    found = newest_good(where, commit=name)
    assert found is not None
    assert found.manifest.version.step == 20


def test_an_operator_can_take_what_was_never_committed(where: Place):
    save(where, 20, commit=False)
    assert newest_good(where) is None
    assert newest_good(where, uncommitted=True) is not None


@pytest.mark.parametrize("file", ["data-0000.distcp", "data-0001.distcp", MANIFEST, COMMITTED])
@pytest.mark.parametrize("harm", ["flip", "cut", "remove"])
def test_a_changed_cut_or_missing_file_is_stepped_over_with_a_sentence(
    where: Place, tmp_path: Path, file: str, harm: str
):
    save(where, 10)
    name = save(where, 20)
    path = tmp_path / "ck" / name / file
    match harm:
        case "flip":
            flip(path)
        case "cut":
            path.write_bytes(path.read_bytes()[:-3])
        case "remove":
            path.unlink()
    found = newest_good(where)
    assert found is not None
    if isinstance(where, Url) and harm == "flip" and file.startswith("data"):
        assert found.manifest.name == name, "no data is read from afar; who does, finds it"
        (problem,) = verify(where, name)
        found = newest_good(where, damaged={name: problem.sentence})
        assert found is not None
    assert found.manifest.version.step == 10
    if (file, harm) == (COMMITTED, "remove") or (file, harm, type(where)) == (MANIFEST, "remove", Url):
        return  # then it never was committed, or in an object store never published
    (sentence,) = found.passed_over
    assert "step 20.0 of generation 1 is not good" in sentence
    if file.startswith("data"):
        shard = int(file[5:9])
        assert f"{file} (shard {shard}, written by n{shard:02d})" in sentence


def test_no_good_one_at_all_is_an_error_and_not_a_fresh_start(where: Place, tmp_path: Path):
    name = save(where, 10)
    hurt(where, tmp_path / "ck" / name / "data-0000.distcp")
    with pytest.raises(CheckpointCorrupt, match="Restore one from a backup"):
        newest_good(where)


def test_a_manifest_in_another_directory_is_not_trusted(where: Place, tmp_path: Path):
    save(where, 10)
    name = save(where, 20)
    (tmp_path / "ck" / name).rename(tmp_path / "ck" / name_of(Version(30), 1))
    found = newest_good(where)
    assert found is not None
    assert found.manifest.version.step == 10
    assert "directories were mixed up" in found.passed_over[0]


def test_a_commit_record_belongs_to_its_manifest(where: Place, tmp_path: Path):
    name = save(where, 10)
    record = read_committed(where, name)
    assert record is not None
    assert record.name == name
    other = save(where, 20)
    (tmp_path / "ck" / other / COMMITTED).write_bytes((tmp_path / "ck" / name / COMMITTED).read_bytes())
    assert read_committed(where, other) is None


def entry(step: int, *, generation: int = 1, committed: bool = True, score: float | None = None) -> Entry:
    version = Version(step)
    manifest = Manifest(
        version=version,
        generation=generation,
        world=1,
        parent=None,
        facts=Conditions(),
        contents={},
        files=(),
        score=score,
    )
    return Entry(
        name=manifest.name, version=version, generation=generation, committed=committed,
        manifest=Manifest.decode(manifest.encode(), "it"),
    )  # fmt: skip


def steps(names: tuple[str, ...]) -> list[int]:
    return sorted(int(name[5:13]) for name in names)


def test_retention_keeps_the_last_the_multiples_and_the_newest_good():
    entries = [entry(step) for step in range(10, 110, 10)]
    assert steps(doomed(entries, keep_last=3, good=entries[-1].name)) == [10, 20, 30, 40, 50, 60, 70]
    assert steps(doomed(entries, keep_last=3, keep_every=50, good=entries[-1].name)) == [10, 20, 30, 40, 60, 70]
    assert steps(doomed(entries, keep_last=1, good=entries[2].name)) == [10, 20, 40, 50, 60, 70, 80, 90]
    assert steps(doomed(entries, keep_last=0, good=entries[-1].name)) == [10, 20, 30, 40, 50, 60, 70, 80, 90]


def test_retention_keeps_the_best_that_was_committed_if_it_is_asked_to():
    scores = {10: 0.5, 20: 0.7, 30: None, 40: 0.7, 50: 0.9, 60: -1.0}
    entries = [entry(step, score=score, committed=step != 50) for step, score in scores.items()]
    assert steps(doomed(entries, keep_last=1, good=None)) == [10, 20, 30, 40, 50]
    assert steps(doomed(entries, keep_last=1, good=None, keep_best=True)) == [10, 20, 30, 50], "of equals the newest"
    found, any_of_them = best_of(entries), best_of(entries, uncommitted=True)
    assert found is not None
    assert any_of_them is not None
    assert (found.version.step, any_of_them.version.step) == (40, 50)
    assert best_of([entry(10)]) is None


def test_a_manifest_of_before_there_were_scores_is_read():
    body = unseal(Manifest(
        version=Version(7), generation=1, world=1, parent=None, facts=Conditions(), contents={}, files=()
    ).encode(), "it")  # fmt: skip
    del body["score"]
    assert Manifest.decode(seal(body), "it").score is None


def test_what_was_never_committed_goes_only_when_it_never_can_be():
    entries = [
        entry(10, committed=False),
        entry(20),
        entry(30, committed=False),
        entry(40, committed=False, generation=2),
    ]
    assert steps(doomed(entries, keep_last=3, good=entries[1].name)) == [10]
    later = [*entries, entry(35, generation=3)]
    assert steps(doomed(later, keep_last=3, good=later[-1].name)) == [10, 30, 40]  # generation 2 is fenced off for good
    assert doomed([entry(10, committed=False)], keep_last=1, good=None) == ()
    back = [entry(10), entry(90), entry(20, generation=2), entry(30, committed=False, generation=2)]  # 90 was not good
    assert doomed(back, keep_last=3, good=back[2].name) == (), "step 30 may be committed yet"


def test_pruning_never_removes_the_newest_good_one(where: Place, tmp_path: Path):
    names = [save(where, step) for step in (10, 20, 30, 40)]
    for name in names[2:]:
        hurt(where, tmp_path / "ck" / name / "data-0000.distcp")
    gone = prune(where, keep_last=1)
    assert names[1] not in gone
    found = newest_good(where)
    assert found is not None
    assert found.manifest.version.step == 20


def test_pruning_reads_nothing_of_what_this_node_has_just_written_but_how_long_it_is(tmp_path: Path):
    where = Local(tmp_path / "ck")
    names = [save(where, step) for step in (10, 20, 30)]
    newest = tmp_path / "ck" / names[2] / "data-0000.distcp"
    newest.write_bytes(bytes(len(newest.read_bytes())))
    assert names[1] not in prune(where, keep_last=1), "it is read, and not good"
    assert names[1] not in prune(where, keep_last=1, fresh=Fresh(names[2], "n01")), "another node wrote it"
    assert names[1] in prune(where, keep_last=1, fresh=Fresh(names[2], "n00"))
    names.append(save(where, 40))
    (tmp_path / "ck" / names[3] / "data-0000.distcp").write_bytes(b"")
    fresh = Fresh(names[3], "n00")
    assert names[2] not in prune(where, keep_last=1, fresh=fresh), "it is not as long as it was"


def test_pruning_removes_nothing_when_nothing_is_good(where: Place, tmp_path: Path):
    for step in (10, 20):
        hurt(where, tmp_path / "ck" / save(where, step) / "data-0000.distcp")
    assert prune(where, keep_last=1) == ()


def test_pruning_clears_what_dead_saves_of_older_generations_left(tmp_path: Path):
    where = Local(tmp_path)
    save(where, 10)
    for generation in (1, 2):
        where.begin(name_of(Version(20), generation))
    (tmp_path / f"{TRASH}step-00000005-g1").mkdir()
    gone = prune(where, keep_last=1, generation=2)
    assert set(gone) == {f"{STAGING}step-00000020-g1", f"{TRASH}step-00000005-g1"}
    assert where.leftovers() == [f"{STAGING}step-00000020-g2"]


def test_pruning_clears_what_failed_saves_left_before_this_generations_newest_commit(where: Place):
    def left(step: int, generation: int) -> None:
        name = name_of(Version(step), generation)
        where.begin(name)
        with where.output(name, "data-0000.distcp") as out:
            out.write(b"a shard whose fellow never came")

    save(where, 900, generation=1)  # the newest of all; generation 2 went back behind it
    for step in (10, 30):
        left(step, 2)
    assert prune(where, keep_last=3, generation=2) == (), "step 30 may be under way"
    name = save(where, 20, generation=2, commit=False)
    assert prune(where, keep_last=3, generation=2) == ()
    (gone,) = prune(where, keep_last=3, generation=2, commit=name)
    assert "step-00000010-g2" in gone
    (still,) = where.leftovers()
    assert "step-00000030-g2" in still


def test_who_does_not_know_the_generation_clears_what_the_newest_commit_has_overtaken(where: Place):
    # Found by reading: an operator's prune left all of it, which after days of full disks may be most of what is there.
    for step, generation in ((5, 1), (10, 2), (30, 2), (20, 3)):
        name = name_of(Version(step), generation)
        where.begin(name)
        with where.output(name, "data-0000.distcp") as out:
            out.write(b"a shard whose fellow never came")
    save(where, 20, generation=2)
    save(where, 25, generation=3, commit=False)
    assert prunable(where, keep_last=3) == (), "the newest commit may be another job's, and these just being written"
    if isinstance(where, Local):
        for leftover in where.leftovers():
            for path in (where.root / leftover, where.root / leftover / "data-0000.distcp"):
                os.utime(path, (1.0, 1.0))
        gone = prunable(where, keep_last=3)
        assert sorted(name[-16:] for name in gone) == ["step-00000005-g1", "step-00000010-g2"]


def test_a_save_into_which_nothing_is_written_any_more_is_nobodys(tmp_path: Path):
    where = Local(tmp_path)
    save(where, 10)
    old, new = (name_of(Version(step), 1) for step in (20, 30))
    for name in (old, new):
        where.begin(name)
        with where.output(name, "data-0000.distcp") as out:
            out.write(b"a shard whose fellow never came")
    for path in (
        tmp_path / f"{STAGING}{old}",
        tmp_path / f"{STAGING}{old}" / "data-0000.distcp",
        tmp_path / f"{STAGING}{new}",
    ):
        os.utime(path, (1.0, 1.0))  # of the newer one's the file is of now: its writer goes on with it
    assert prunable(where, keep_last=3, idle_s=3600.0) == (f"{STAGING}{old}",)
    assert prunable(where, keep_last=3) == ()


def test_a_commit_whose_mark_failed_is_marked_with_the_one_that_follows_it(where: Place):
    first = save(where, 10, commit=False)  # the disk was full at that moment
    second = save(where, 20, commit=False, parent=first)
    mark_all(where, second)
    assert [(e.version.step, e.committed) for e in shelf.listing(where)] == [(20, True), (10, True)]
    mark_all(where, save(where, 30, commit=False, parent="step-00000005-g1"))  # which has gone
    assert prune(where, keep_last=3, generation=1, commit="step-00000030-g1") == ()


def test_what_saves_of_earlier_generations_left_is_overtaken_only_where_room_is_needed(where: Place):
    for step, generation in ((10, 1), (20, 2), (40, 1)):
        name = name_of(Version(step), generation)
        where.begin(name)
        with where.output(name, "data-0000.distcp") as out:
            out.write(b"a shard whose fellow never came")
    assert [name[-16:] for name in overtaken(where, Version(30), 2)] == ["step-00000020-g2"]
    assert [name[-16:] for name in overtaken(where, Version(30), 2, earlier=True)] == [
        "step-00000010-g1", "step-00000020-g2",
    ]  # fmt: skip


def test_a_place_that_is_away_is_not_an_empty_one(tmp_path: Path):
    assert place(tmp_path / "nothing").names() == place(tmp_path / "nothing").leftovers() == []
    (tmp_path / "file").touch()
    for read in (place(tmp_path / "file").names, place(tmp_path / "file").leftovers):
        with pytest.raises(OSError, match="Not a directory"):
            read()


def test_a_commit_record_that_cannot_be_read_costs_its_own_checkpoint_and_no_other(where: Place, tmp_path: Path):
    save(where, 10)
    name = save(where, 20)
    record = tmp_path / "ck" / name / COMMITTED
    record.unlink()
    record.symlink_to("/proc/self/mem")  # opens, and reads as a bad sector does
    assert [(e.version.step, e.committed) for e in shelf.listing(where)] == [(20, True), (10, True)]
    (problem,) = verify(where, name)
    assert problem.sentence.startswith(f"{name}: COMMITTED cannot be read (")
    found = newest_good(where)
    assert found is not None
    assert found.manifest.version.step == 10
    assert "COMMITTED cannot be read" in found.passed_over[0]
    assert prune(where, keep_last=3) == ()


def test_a_checkpoint_of_another_format_is_refused_and_not_passed_over(where: Place, tmp_path: Path):
    first, name = save(where, 10), save(where, 20)
    path = tmp_path / "ck" / name / MANIFEST
    path.write_bytes(seal({**unseal(path.read_bytes(), "it"), "format": 1}))
    newest, _ = shelf.listing(where)
    assert (newest.name, newest.foreign) == (name, True)
    for look in (lambda: newest_good(where), lambda: prunable(where, keep_last=1)):
        with pytest.raises(
            CheckpointRefused, match=rf"{name}/manifest.json has format 1 and this version reads 2\. It is not"
        ):
            look()
    assert prune(where, keep_last=1) == ()
    assert where.names() == [first, name]


def test_a_list_shows_what_cannot_be_read(where: Place, tmp_path: Path):
    save(where, 10)
    name = save(where, 20)
    flip(tmp_path / "ck" / name / MANIFEST)
    first, second = shelf.listing(where)
    assert (first.name, first.manifest) == (name, None)
    assert "checksum of its own contents" in first.problem
    assert second.manifest is not None
    assert second.committed


def test_the_disks_refusal_becomes_a_sentence():
    with (
        pytest.raises(CheckpointStorage, match=r"Saving step 3 at /x failed: No space left.*Training goes on"),
        explained("Saving step 3", "/x"),
    ):
        raise OSError(28, "No space left on device")
