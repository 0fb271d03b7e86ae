"""Torch's own tools read what we write: would notice a torch release that changes the format."""

import os
import pickletools
import zipfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from state_jobs import Job, same, snapshots, write
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from elasticrl.runtime.checkpoint.load import open_checkpoint
from elasticrl.runtime.checkpoint.parts import Parts
from elasticrl.runtime.checkpoint.place import place
from elasticrl.runtime.vault.client import Vault
from elasticrl.runtime.vault.version import Version

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture(params=[1, 3])
def saved(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Job, Path]:
    job = Job(seed=1).train(3)
    where = place(tmp_path / "ck")
    return job, tmp_path / "ck" / write(where, snapshots(tmp_path, job, request.param)).name


def test_dcp_to_torch_save_gives_the_nested_state(saved: tuple[Job, Path], tmp_path: Path):
    job, path = saved
    dcp_to_torch_save(str(path), str(tmp_path / "out.pt"))
    loaded = torch.load(tmp_path / "out.pt", weights_only=False)
    before = job.state()
    assert all(torch.equal(loaded["model"][name], tensor) for name, tensor in before["model"].items())
    for number, state in before["optimizer"]["state"].items():
        assert all(torch.equal(loaded["optimizer"]["state"][str(number)][key], state[key]) for key in state)
    (group,) = loaded["optimizer"]["param_groups"]
    assert same(dict(sorted(group.items())), dict(sorted(before["optimizer"]["param_groups"][0].items())))
    assert loaded["schedule"]["last_epoch"] == 3
    assert loaded["rollout"]["tokens"].tolist() == [[100 * lane + i for i in range(5)] for lane in range(4)]


def test_dcp_load_fills_a_model_and_its_optimizer(saved: tuple[Job, Path]):
    job, path = saved
    other = Job(seed=7).train(1)
    state = {"model": other.model.state_dict(), "optimizer": other.optimizer.state_dict()}
    dcp.load(state, checkpoint_id=str(path))
    other.model.load_state_dict(state["model"])
    other.optimizer.load_state_dict(state["optimizer"])
    assert same(other.state()["model"], job.state()["model"])
    assert same(other.state()["optimizer"]["state"], job.state()["optimizer"]["state"])


def test_our_loader_uses_raw_bytes_that_are_torchs_own(saved: tuple[Job, Path]):
    """Each blob, opened as the zip archive that torch.save makes, holds in data/0 exactly what we map."""
    _, path = saved
    source = open_checkpoint(place(path.parent), path.name)
    checked = 0
    from elasticrl.runtime.checkpoint.manifest import ShardTable

    for shard, ours in enumerate(source.shards):
        table = ShardTable.decode((path / f"data-{shard:04d}.json").read_bytes(), "t")
        data = (path / table.data.name).read_bytes()
        for row, tensor in zip(table.rows, ours.tensors, strict=True):
            blob = data[row.blob_at : row.blob_at + row.blob_bytes]
            (path.parent / "blob.pt").write_bytes(blob)
            assert torch.equal(torch.load(path.parent / "blob.pt", weights_only=True), tensor)
            with zipfile.ZipFile(path.parent / "blob.pt") as archive:
                raw = archive.read(next(name for name in archive.namelist() if name.endswith("/data/0")))
            assert raw == data[row.raw_at : row.raw_at + row.piece.nbytes]
            assert row.raw_at % 64 == 0
            checked += 1
    assert checked > 10


def test_nothing_of_ours_is_in_a_pickle(saved: tuple[Job, Path]):
    """A stock reader needs torch and nothing else to unpickle the index."""
    _, path = saved
    modules = {
        str(arg).split()[0].split(".")[0]
        for op, arg, _ in pickletools.genops((path / ".metadata").read_bytes())
        if op.name in ("GLOBAL", "SHORT_BINUNICODE") and arg and str(arg).startswith(("elasticrl", "torch"))
    }
    assert "elasticrl" not in modules


def test_a_sharded_module_is_kept_by_what_each_rank_has_of_it(tmp_path: Path):
    """FSDP2's DTensors, here on a mesh of one process; the pieces come from their placements."""
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        from torch.distributed.fsdp import fully_shard

        plain = torch.nn.Linear(6, 5)
        model = torch.nn.Linear(6, 5)
        model.load_state_dict(plain.state_dict())
        fully_shard(model)
        vault = Vault(tmp_path / "n0", job="j", node="n0")
        ticket = vault.snapshot(Parts(model=model).capture(0, 1), version=Version(1), generation=1, shard=0, world=1)
        ticket.wait_sealed(5)
        vault.close()
        assert ticket.path is not None
        where = place(tmp_path / "ck")
        manifest = write(where, [ticket.path])
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        Parts(model=model).restore(open_checkpoint(where, manifest.name))
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter.full_tensor(), plain.state_dict()[name])
    finally:
        dist.destroy_process_group()
