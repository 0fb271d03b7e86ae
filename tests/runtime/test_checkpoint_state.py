"""Whole states through vault files and checkpoints, from any number of ranks to any other, bit for bit."""

import json
import random
from enum import IntEnum
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from state_jobs import FACTS, LANES, Job, Rollout, pinned, resume, same, snapshots, write

from elasticrl.runtime import alike
from elasticrl.runtime.checkpoint import tree
from elasticrl.runtime.checkpoint.export import export
from elasticrl.runtime.checkpoint.flat import FlatShard
from elasticrl.runtime.checkpoint.load import open_checkpoint
from elasticrl.runtime.checkpoint.parts import Parts
from elasticrl.runtime.checkpoint.place import place
from elasticrl.runtime.checkpoint.save import finish, write_shard
from elasticrl.runtime.checkpoint.shelf import mark_committed, verify
from elasticrl.runtime.layout import buckets, striped
from elasticrl.runtime.misuse import Misuse
from elasticrl.runtime.names import parameters
from elasticrl.runtime.optim import AdamW
from elasticrl.runtime.shard import Shard
from elasticrl.runtime.vault.client import Vault
from elasticrl.runtime.vault.errors import CheckpointCorrupt, CheckpointError, CheckpointRefused, StateError
from elasticrl.runtime.vault.piece import Piece
from elasticrl.runtime.vault.source import Source, merge, shard_of
from elasticrl.runtime.vault.version import Version

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.mark.parametrize("medium", ["vault", "disk"])
@pytest.mark.parametrize("old", [1, 2, 3, 4])
def test_any_world_restores_what_any_other_kept_bit_for_bit(tmp_path: Path, medium: str, old: int):
    job = Job(seed=1).train(3)
    before = job.state()
    paths = snapshots(tmp_path, job, old)
    then = [torch.rand(3), random.random(), np.random.rand()]  # noqa: NPY002
    if medium == "disk":
        where = place(tmp_path / "ck")
        source = open_checkpoint(where, write(where, paths).name)
    else:
        source = Source([shard_of(pinned(path)) for path in paths], name="vault")
    for new in (1, 2, 3, 4):
        for rank in range(new):
            other = Job(seed=100 + rank, rank=rank, world=new).train(rank)
            other.parts.restore(source)
            assert same(other.state(), before)
            for row, lane in enumerate(other.rollout.lanes):
                assert other.rollout.tokens[row].tolist() == [100 * lane + i for i in range(5)]
                assert other.rollout.marks[f"lane.{lane}"] == f"prompt {lane}"
    assert same([torch.rand(3), random.random(), np.random.rand()], then)  # noqa: NPY002


def test_the_next_steps_after_a_restore_are_the_same_bits(tmp_path: Path):
    job = Job(seed=1).train(3)
    paths = snapshots(tmp_path, job, 3)
    after = job.train(4).state()
    where = place(tmp_path / "ck")
    other = Job(seed=9)
    other.parts.restore(open_checkpoint(where, write(where, paths).name))
    assert same(other.train(4).state(), after)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64", "int8", "bool", "complex64", "float8_e4m3fn"])
@pytest.mark.parametrize("shape", [(), (1,), (0,), (3, 0), (7, 5, 3), (200,)])
def test_odd_dtypes_and_shapes_survive(tmp_path: Path, dtype: str, shape: tuple[int, ...]):
    raw = torch.randint(0, 2, (*shape, 1), dtype=torch.uint8)
    value = raw.squeeze(-1).to(getattr(torch, dtype))

    class Holder:
        def __init__(self, tensor: torch.Tensor) -> None:
            self.tensor = tensor

        def state_dict(self) -> dict[str, Any]:
            return {"t": self.tensor, "view": self.tensor.expand(2, *shape)}

        def load_state_dict(self, state: dict[str, Any], /) -> None:
            self.tensor, self.view = state["t"], state["view"]

    paths = []
    for rank in range(2):
        vault = Vault(tmp_path / f"n{rank}", job="j", node=f"n{rank}")
        content = Parts(holder=Holder(value)).capture(rank, 2)
        ticket = vault.snapshot(content, version=Version(1), generation=1, shard=rank, world=2)
        ticket.wait_sealed(5)
        paths.append(ticket.path)
        vault.close()
    where = place(tmp_path / "ck")
    other = Holder(torch.zeros(3))
    Parts(holder=other).restore(open_checkpoint(where, write(where, paths).name))
    assert other.tensor.dtype == value.dtype
    assert other.tensor.shape == value.shape
    assert other.tensor.to(torch.complex64).tolist() == value.to(torch.complex64).tolist()
    assert other.view.shape == (2, *shape)


def test_a_missing_shard_is_named_and_nothing_is_published(tmp_path: Path):
    paths = snapshots(tmp_path, Job(seed=1).train(1), 3)
    where = place(tmp_path / "ck")
    for path in paths[:2]:
        write_shard(where, pinned(path))
    with pytest.raises(CheckpointError, match=r"has 2 of 3 shards \(missing: 2; not within 0.1 s\)"):
        finish(where, version=Version(5), generation=2, world=3, facts=FACTS, timeout_s=0.1)
    assert where.names() == []


def test_a_source_without_a_shard_names_what_is_missing(tmp_path: Path):
    paths = snapshots(tmp_path, Job(seed=1).train(1), 3)
    source = Source([shard_of(pinned(path)) for path in paths[:2]], name="half a vault")
    with pytest.raises(StateError, match=r"half a vault cannot give model\.0\.weight"):
        Job(seed=2).parts.restore(source)


def test_a_model_of_another_shape_is_refused_before_anything_is_changed(tmp_path: Path):
    source = Source([shard_of(pinned(p)) for p in snapshots(tmp_path, Job(seed=1).train(1), 1)], name="the vault")
    model = torch.nn.Linear(3, 3)
    before = model.weight.clone()
    with pytest.raises(CheckpointRefused, match="would be lost"):
        Parts(model=model).restore(source)
    with pytest.raises(RuntimeError, match="Missing key"):
        Parts(model=model).restore(source, allow={"parts"})
    assert torch.equal(model.weight, before)


def test_a_part_that_was_not_saved_is_refused_unless_allowed(tmp_path: Path):
    job = Job(seed=1).train(1)
    source = Source([shard_of(pinned(p)) for p in snapshots(tmp_path, job, 1)], name="the vault")
    other = Job(seed=2)
    other.parts.register("extra", torch.nn.Linear(2, 2))
    with pytest.raises(CheckpointRefused, match=r"extra would start anew\. .*--allow parts"):
        other.parts.restore(source)
    other.parts.restore(source, allow={"parts"})
    assert same(other.state()["model"], job.state()["model"])


def test_resume_refuses_other_lanes_and_says_why(tmp_path: Path):
    from dataclasses import replace

    where = place(tmp_path / "ck")
    assert resume(where, FACTS) is None
    manifest = write(where, snapshots(tmp_path, Job(seed=1).train(1), 2))
    mark_committed(where, manifest.name)
    found = resume(where, FACTS)
    assert found is not None
    assert found[2] == ()
    with pytest.raises(CheckpointRefused, match=r"lanes was 4 and is 8: samples, random streams .* --allow lanes"):
        resume(where, replace(FACTS, lanes=8))
    allowed = resume(where, replace(FACTS, lanes=8, threads=7), allow={"lanes"})
    assert allowed is not None
    assert [change.field for change in allowed[2]] == ["lanes", "threads"]


def test_a_manifest_tells_what_is_in_it(tmp_path: Path):
    where = place(tmp_path / "ck")
    manifest = write(where, snapshots(tmp_path, Job(seed=1).train(1), 3), parent="step-00000001-g1")
    assert set(manifest.contents) == {"model", "optimizer", "schedule", "controller", "ambient", "rollout"}
    assert manifest.contents["rollout"] == LANES * 5 * 8
    assert manifest.facts.threads == 1
    assert manifest.facts.versions["torch"] == version("torch")
    assert manifest.facts.isa == torch.backends.cpu.get_cpu_capability()
    assert (manifest.parent, manifest.world, manifest.facts.lanes) == ("step-00000001-g1", 3, LANES)
    assert not any("3" in path.name.replace("data-000", "") for path in (tmp_path / "ck" / manifest.name).iterdir())
    assert verify(where, manifest.name) == ()


def test_a_checkpoint_goes_through_any_url(tmp_path: Path):
    where = place("memory://bucket/run")
    job = Job(seed=1).train(2)
    manifest = write(where, snapshots(tmp_path, job, 3))
    other = Job(seed=2)
    other.parts.restore(open_checkpoint(where, manifest.name))
    assert same(other.state(), job.state())
    where.remove(manifest.name)
    assert where.names() == []


def test_a_flipped_byte_is_found_before_it_is_loaded(tmp_path: Path):
    where = place(tmp_path / "ck")
    manifest = write(where, snapshots(tmp_path, Job(seed=1).train(1), 2))
    path = tmp_path / "ck" / manifest.name / "data-0001.distcp"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointCorrupt, match=r"data-0001\.distcp \(shard 1, written by n1\) was changed"):
        open_checkpoint(where, manifest.name)


def test_export_gives_safetensors_that_load_without_us(tmp_path: Path):
    job = Job(seed=1).train(1)
    where = place(tmp_path / "ck")
    manifest = write(where, snapshots(tmp_path, job, 3))
    config = tmp_path / "config.json"
    config.write_text("{}")
    files = export(where, manifest.name, tmp_path / "hf", beside=[config])
    assert [path.name for path in files] == ["config.json", "model.safetensors"]
    loaded = load_file(tmp_path / "hf" / "model.safetensors")
    assert same(dict(sorted(loaded.items())), dict(sorted(job.state()["model"].items())))
    export(where, manifest.name, tmp_path / "many", max_bytes=1000, dtype="bfloat16")
    index = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(loaded)
    assert len(set(index["weight_map"].values())) > 1
    part = load_file(tmp_path / "many" / index["weight_map"]["0.weight"])
    assert part["0.weight"].dtype == torch.bfloat16
    with pytest.raises(CheckpointError, match="exists already"):
        export(where, manifest.name, tmp_path / "hf")
    with pytest.raises(CheckpointError, match=r"try one of model\., optimizer\., rollout\."):
        export(where, manifest.name, tmp_path / "none", prefix="actor.")


def test_state_that_could_only_be_pickled_is_refused_by_name():
    class Odd:
        def state_dict(self) -> dict[str, Any]:
            return {"nested": [{"thing": object()}]}

        def load_state_dict(self, _: dict[str, Any], /) -> None:
            raise AssertionError

    with pytest.raises(StateError, match=r"odd\.nested\.0\.thing is a builtins\.object"):
        Parts(odd=Odd()).capture(0, 1)
    with pytest.raises(StateError, match="without state_dict"):
        Parts(thing=object())  # type: ignore[arg-type]


def test_a_tensor_that_was_replaced_is_kept_and_not_the_one_that_was_there_before():
    """Shares are cut once and remembered: by address, because a name and a shape are not a tensor."""
    model = torch.nn.Linear(30, 10)
    parts = Parts(model=model)
    first = parts.capture(0, 2)
    model.weight.data = torch.full((10, 30), 7.0)
    second = parts.capture(0, 2)
    assert not torch.equal(first.tensors[0], second.tensors[0])
    assert second.tensors[0].unique().tolist() == [7.0]
    assert second.table is first.table
    with torch.no_grad():
        model.weight.fill_(8.0)
    assert second.tensors[0].unique().tolist() == [8.0]  # a live view: the vault's thread reads it later
    assert parts.capture(1, 2).table.pieces != first.table.pieces


SHAPES: list[tuple[str, tuple[int, ...]]] = [("a", (33, 7)), ("b", (5,)), ("c", (3, 4, 11)), ("d", (300,)), ("e", ())]


def flat_shards(world: int, fill: bool, words: str = "") -> list[Shard]:
    """What a strategy has on each rank: parameters of odd shapes in buckets, cut into two-version shards."""
    shapes = [(words + name, shape) for name, shape in SHAPES]
    layout = striped(buckets(shapes, 256), world)
    made = []
    for rank in range(world):
        shard = Shard(layout, rank, lambda _: AdamW(), dtype=torch.float32, device=torch.device("cpu"))
        if fill:
            shard.version = 41
            for row in range(3):
                for piece in shard.pieces:
                    shard.state[row, piece.there] = torch.arange(piece.start, piece.stop) + 1000.0 * row
        made.append(shard)
    return made


@pytest.mark.parametrize(("old", "new"), list(product(range(1, 5), repeat=2)))
def test_a_strategys_shards_are_cut_anew_for_another_world(tmp_path: Path, old: int, new: int):
    paths = []
    for rank, shard in enumerate(flat_shards(old, fill=True)):
        vault = Vault(tmp_path / f"n{rank}", job="j", node=f"n{rank}")
        content = Parts(shard=FlatShard(shard)).capture(rank, old)
        ticket = vault.snapshot(content, version=Version(1), generation=1, shard=rank, world=old)
        ticket.wait_sealed(5)
        assert ticket.path is not None
        paths.append(ticket.path)
        vault.close()
    source = Source([shard_of(pinned(path)) for path in paths], name="vault")
    for shard in flat_shards(new, fill=False):
        Parts(shard=FlatShard(shard)).restore(source)
        assert shard.version == 41
        for row in range(3):
            for piece in shard.pieces:
                expected = torch.arange(piece.start, piece.stop) + 1000.0 * row
                assert torch.equal(shard.state[row, piece.there], expected)
    if old == 3 and new == 1:
        alike.check_kept(source, {"model": set("abcde")})
        with pytest.raises(CheckpointRefused, match=r"2 weights of model that .* has not \(model\.b, "):
            alike.check_kept(source, {"model": set("acd")})
        where = place(tmp_path / "ck")
        manifest = write(where, paths)
        state = {"model": {"a": torch.zeros(33, 7)}, "optimizer": {"state": {"c": {"exp_avg": torch.zeros(3, 4, 11)}}}}
        dcp.load(state, checkpoint_id=str(tmp_path / "ck" / manifest.name))
        assert state["model"]["a"].flatten().tolist() == list(range(231))
        assert state["optimizer"]["state"]["c"]["exp_avg"].flatten().tolist() == [1000 + i for i in range(132)]


@pytest.mark.parametrize("medium", ["vault", "disk"])
def test_what_was_kept_under_names_with_wrappers_in_them_is_read_and_exported_without(tmp_path: Path, medium: str):
    """As versions wrote it that took names as they came."""
    paths = []
    for rank, shard in enumerate(flat_shards(2, fill=True, words="_orig_mod.body._checkpoint_wrapped_module.")):
        vault = Vault(tmp_path / f"n{rank}", job="j", node=f"n{rank}")
        content = Parts(model=FlatShard(shard, optimizer="model_optimizer")).capture(rank, 2)
        ticket = vault.snapshot(content, version=Version(1), generation=1, shard=rank, world=2)
        ticket.wait_sealed(5)
        assert ticket.path is not None
        paths.append(ticket.path)
        vault.close()
    where = place(tmp_path / "ck")
    manifest = write(where, paths)
    disk = medium == "disk"
    source = (
        open_checkpoint(where, manifest.name) if disk else Source([shard_of(pinned(p)) for p in paths], name="vault")
    )
    alike.check_kept(source, {"model": {f"body.{name}" for name, _ in SHAPES}})
    with pytest.raises(CheckpointRefused, match="1 weights of model"):
        alike.check_kept(source, {"model": {f"body.{name}" for name, _ in SHAPES[1:]}})
    [shard] = flat_shards(1, fill=False, words="body.")
    parts = Parts(model=FlatShard(shard, optimizer="model_optimizer"))
    assert {piece.name for piece in parts.needs(source)} == {piece.name for piece in source.pieces}, "which are fetched"
    parts.restore(source)
    for row in range(3):
        for piece in shard.pieces:
            assert torch.equal(shard.state[row, piece.there], torch.arange(piece.start, piece.stop) + 1000.0 * row)
    if disk:
        export(where, manifest.name, tmp_path / "out")
        found = load_file(tmp_path / "out" / "model.safetensors")
        assert {name: tuple(tensor.shape) for name, tensor in found.items()} == {f"body.{n}": s for n, s in SHAPES}


def test_parameters_that_differ_in_wrappers_words_alone_are_refused():
    model = torch.nn.Module()
    model.head, model._orig_mod = torch.nn.Linear(2, 2), torch.nn.Module()
    model._orig_mod.head = torch.nn.Linear(2, 2)
    with pytest.raises(Misuse, match=r"Two parameters are called head\.weight, but for what wrappers put into names"):
        parameters(model)
    model._orig_mod.head = model.head
    assert [name for name, _ in parameters(model)] == ["head.weight", "head.bias"], "one that is shared has one name"


class Extra(torch.nn.Linear):
    """With state that is no tensor."""

    def __init__(self) -> None:
        super().__init__(3, 2)
        self.seen = {"batches": 0}

    def get_extra_state(self) -> dict[str, int]:
        return dict(self.seen)

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.seen = dict(state)


def test_a_module_with_extra_state_comes_back_from_memory_whose_pieces_are_asked_for(tmp_path: Path):
    before, vault = Extra(), Vault(tmp_path / "vault", job="job", node="n0")
    before.seen["batches"] = 7
    content = Parts(scorer=before).capture(0, 1)
    ticket = vault.snapshot(content, version=Version(1), generation=1, shard=0, world=1)
    ticket.wait_sealed(5)
    assert ticket.path is not None
    source = Source([shard_of(pinned(ticket.path))], name="vault")
    for seen in (0, 7):  # with a skeleton of its own, and with the very same
        after = Extra()
        after.seen["batches"] = seen
        parts = Parts(scorer=after)
        assert {piece.name for piece in parts.needs(source)} == {"scorer.weight", "scorer.bias"}
        parts.restore(source)
        assert (after.seen, torch.equal(after.weight, before.weight)) == ({"batches": 7}, True)
    vault.close()


class Fused(torch.nn.Module):
    """Keeps two weights as one, and says it has two: its state dict is made of copies."""

    def __init__(self):
        super().__init__()
        self.both = torch.nn.Parameter(torch.randn(6, 4))
        self.register_state_dict_post_hook(self._split)
        self.register_load_state_dict_pre_hook(self._join)

    @staticmethod
    def _split(_, state, prefix, *__):
        both = state.pop(f"{prefix}both")
        state[f"{prefix}a"], state[f"{prefix}b"] = both[:3].clone(), both[3:].clone()

    @staticmethod
    def _join(_, state, prefix, *__):
        state[f"{prefix}both"] = torch.cat([state.pop(f"{prefix}a"), state.pop(f"{prefix}b")])


def test_a_module_whose_state_dict_is_made_of_copies_comes_back(tmp_path: Path):
    before, after, vault = Fused(), Fused(), Vault(tmp_path / "vault", job="job", node="n0")
    ticket = vault.snapshot(Parts(model=before).capture(0, 1), version=Version(1), generation=1, shard=0, world=1)
    ticket.wait_sealed(5)
    assert ticket.path is not None
    Parts(model=after).restore(Source([shard_of(pinned(ticket.path))], name="vault"))
    assert torch.equal(before.both, after.both)
    vault.close()


def test_values_that_are_no_number_contradict_nothing():
    nan = [("shard 0", {"part": {"loss": float("nan")}}), ("shard 1", {"part": {"loss": float("nan")}})]
    assert list(merge(nan)["part"]) == ["loss"]
    with pytest.raises(StateError, match=r"another value for part.loss"):
        merge([nan[0], ("shard 1", {"part": {"loss": 0.0}})])


def test_pieces_that_contradict_their_tensors_are_refused():
    class Wrong(Rollout):
        def pieces(self):
            yield Piece("rollout.tokens", "int64", (4, 5), (0, 0), (4, 5)), self.tokens.to(torch.int32)

    with pytest.raises(StateError, match="its tensor is int32"):
        Parts(rollout=Wrong(0, 1)).capture(0, 1)


class Level(IntEnum):
    LOW = 1


@pytest.mark.parametrize(
    "value",
    [
        {"a": (1, (2.5, None)), "b": [True, "x", b"\x00\xff"], "c": {}},
        {0: {"k": 1}, "1": 2, (True): 3},
        {"$tensor": "a key that looks like a mark"},
        {"nan": float("inf"), "neg": -0.0, "big": 2**70},
        [],
    ],
)
def test_plain_trees_come_back_with_their_types(value: object):
    skeleton, tensors = tree.split("p", value)
    assert tensors == {}
    back = tree.join(json.loads(json.dumps(skeleton)), {})
    assert same(back, value)


def test_numbers_of_other_types_become_plain_ones():
    skeleton, _ = tree.split("p", {"a": np.float64(1.5), "b": np.int32(3), "c": Level.LOW, "d": np.bool_(True)})
    assert same(skeleton, {"a": 1.5, "b": 3, "c": 1, "d": True})


def test_flattening_for_stock_readers_is_torchs_own():
    from torch.distributed.checkpoint._nested_dict import flatten_state_dict

    t = torch.zeros(1)
    states = {
        "opt": {"state": {0: {"m": t, "step": 3}}, "param_groups": [{"lr": 0.1, "betas": (0.9, 0.99), "params": [0]}]},
        "odd": {
            "list": [1, 2],
            "mixed": [1, t, [t]],
            "empty": {},
            "none": None,
            "raw": b"x",
            "deep": [[1], [{"a": 1}]],
        },
    }
    skeletons = {name: tree.split(name, state)[0] for name, state in states.items()}
    ours = {}
    for name, skeleton in skeletons.items():
        tensors, plain = tree.leaves(name, skeleton)
        ours.update({".".join(map(str, path)): path for path in tensors.values()})
        ours.update({".".join(map(str, path)): path for path, _ in plain})
    assert ours == flatten_state_dict(states)[1]


@pytest.mark.parametrize(("old", "new"), list(product((1, 2, 3), repeat=2)))
def test_only_blocks_that_change_owner_need_to_move(tmp_path: Path, old: int, new: int):
    """What a rank of the new world reads is its own share: no more bytes than that."""
    paths = snapshots(tmp_path, Job(seed=1).train(1), old)
    source = Source([shard_of(pinned(path)) for path in paths], name="vault")
    for rank in range(new):
        rollout = Rollout(rank, new)
        plan = source.plan([piece for piece, _ in rollout.pieces()])
        assert not plan.missing
        assert sum(r.box[1][0] * r.box[1][1] for r in plan.reads) == len(rollout.lanes) * 5
