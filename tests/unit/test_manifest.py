"""What a checkpoint says of itself: every changed byte shows, every difference has a sentence."""

from dataclasses import replace

import pytest

from elasticrl.runtime.checkpoint.manifest import (
    Committed,
    Conditions,
    FileEntry,
    Manifest,
    Row,
    ShardTable,
    differences,
    name_of,
    parse_name,
    seal,
    unseal,
)
from elasticrl.runtime.vault.errors import CheckpointCorrupt, CheckpointRefused
from elasticrl.runtime.vault.piece import Piece
from elasticrl.runtime.vault.version import Cut, Version

FACTS = Conditions(
    job="ppo",
    lanes=8,
    batch=64,
    data="prompts:1000",
    config="abc",
    threads=1,
    tp=2,
    cp=4,
    isa="AVX2",
    versions={"torch": "2.13"},
)
MANIFEST = Manifest(
    version=Version(1280, 2),
    generation=14,
    world=3,
    parent="step-00001260-g13",
    facts=FACTS,
    contents={"model": 400, "schedule": 0},
    files=(FileEntry(name="data-0000.distcp", nbytes=400, sha256="ab", shard=0, node="n00"),),
    lineage=(Cut(14, Version(1260)),),
    written="2026-11-20T12:00:00+00:00",
)
TABLE = ShardTable(
    shard=0,
    node="n00",
    data=MANIFEST.files[0],
    rows=(Row(Piece("model.w", "float32", (10, 10), (0, 0), (5, 10)), 704, 64, 1500),),
    values={"schedule": {"b": 1, "a": [1.5, None, float("inf")]}},
    block=256,
    sums=("cd", "ef"),
)


def test_names_tell_version_and_generation_and_nothing_of_the_world():
    assert name_of(Version(1280), 14) == "step-00001280-g14"
    assert parse_name("step-00001280.2-g14") == (Version(1280, 2), 14)
    assert parse_name(name_of(Version(123456789), 3)) == (Version(123456789), 3)
    for other in (".saving-step-00001280-g14", "step-12-g1", "step-00001280", "step-00001280-g14.bak", ""):
        assert parse_name(other) is None


def test_documents_come_back_as_they_were():
    assert Manifest.decode(MANIFEST.encode(), "m") == MANIFEST
    assert ShardTable.decode(TABLE.encode(), "t") == TABLE
    record = Committed(name=MANIFEST.name, generation=14, manifest_sha256="ab")
    assert Committed.decode(record.encode(), "c") == record


def test_order_of_keys_survives():
    assert list(unseal(seal({"b": {"z": 1, "a": 2}, "a": 3}), "x")["b"]) == ["z", "a"]


@pytest.mark.parametrize("document", [MANIFEST, TABLE], ids=["manifest", "table"])
def test_any_changed_or_missing_byte_is_noticed(document: Manifest | ShardTable):
    whole = document.encode()
    for at in range(len(whole)):
        for changed in (
            whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :],
            whole[:at],
            whole[:at] + whole[at + 1 :],
        ):
            if changed == whole:
                continue
            with pytest.raises(CheckpointCorrupt, match="where"):
                type(document).decode(changed, "where")


def test_a_whole_document_of_another_kind_or_format_is_refused_with_a_sentence():
    with pytest.raises(
        CheckpointRefused, match=r"m has format 1 and this version reads 2\. It is not damaged: go on from"
    ):
        Manifest.decode(seal({"format": 1}), "m")
    with pytest.raises(CheckpointCorrupt, match="not a manifest"):
        Manifest.decode(seal({"format": 2}), "m")
    with pytest.raises(CheckpointCorrupt, match="not a shard's table"):
        ShardTable.decode(MANIFEST.encode(), "t")
    with pytest.raises(CheckpointCorrupt, match="not a commit record"):
        Committed.decode(MANIFEST.encode(), "c")


@pytest.mark.parametrize(
    ("name", "value"), [("lanes", 4), ("batch", 32), ("data", "other:7"), ("job", "sft"), ("tp", 4), ("cp", 2)]
)
def test_changed_lanes_batch_or_data_are_refused_and_can_be_allowed(name: str, value: object):
    now = replace(FACTS, **{name: value})
    (change,) = differences(FACTS, now)
    assert change.refuse
    assert f"--allow {name}" in change.sentence
    assert repr(value) in change.sentence
    (change,) = differences(FACTS, now, allow={name})
    assert not change.refuse
    assert "--allow" not in change.sentence


def test_what_only_changes_bits_is_said_and_not_refused():
    now = replace(FACTS, threads=2, isa="AVX512", versions={"torch": "2.14"}, config="def")
    found = differences(FACTS, now)
    assert [change.field for change in found] == ["config", "threads", "isa", "versions"]
    assert not any(change.refuse for change in found)
    assert (
        found[-1].sentence
        == "versions was torch 2.13 and is torch 2.14: other library versions may compute other last bits."
    )


def test_what_is_unknown_on_one_side_is_no_difference():
    assert differences(Conditions(), FACTS) == ()
    assert differences(FACTS, FACTS) == ()
