"""The weights on their way from a trainer to its engines: a file in memory, and a page that says when it is whole.

The idea: the page is written last and taken away first, so there is no moment at which half a set could pass for one. Because
the file stays, an engine that died is fed again from there, by nobody's collective; because every bucket has its checksum, what
was torn or changed since is found before it computes. To an engine on another node the same page and file travel piece by
piece, and lie there as they lie here (`Outgoing`, `Incoming`).
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from math import prod
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from zlib_ng.zlib_ng import crc32

from elasticrl.base.parsed import parsed
from elasticrl.ppo.rollout.wire import TURN_S, Lost
from elasticrl.runtime.group import settle
from elasticrl.runtime.team import ACROSS, AXIS
from elasticrl.runtime.torch_names import all_gather_single
from elasticrl.runtime.vault.source import dtype_of, name_of
from elasticrl.runtime.zero import gathered

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from contextlib import AbstractContextManager
    from io import BufferedReader
    from pathlib import Path

    import torch.distributed as dist
    from torch import nn

FILE: Final = "weights"
PAGE: Final = "weights.json"
LOCK: Final = "weights.lock"

PIECE: Final = 4 << 20  # bytes of the file in one frame, on its way to another node

Bucket = list[tuple[str, torch.Tensor]]


class Torn(RuntimeError):
    """The file is not what its page says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tag:
    """Which weights. The same version in another life of the job may be other numbers.

    Example: Tag(life="14 10.0.0.3:41327", version=2560)
    """

    life: str
    version: int


def tag_of(home: Path) -> Tag | None:
    """Of the set that lies there; None if none is whole."""
    page = _page(home)
    return None if page is None else Tag(**page["tag"])


def write(
    home: Path, tag: Tag, buckets: Iterable[Bucket], *, within_s: float, check: Callable[[], None] = lambda: None,
    alone: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> int:  # fmt: skip
    """The set, bucket by bucket as they come; its bytes. Lost if the file stays in use for too long. `check` is called in each
    turn of waiting for it, inside of `alone`.
    """
    with _locked(home, fcntl.LOCK_EX, within_s, check, alone):
        (home / PAGE).unlink(missing_ok=True)
        listed: list[dict[str, Any]] = []
        at = 0
        with os.fdopen(os.open(home / FILE, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600), "r+b") as file:
            for bucket in buckets:
                start, crc, tensors = at, 0, []
                for name, tensor in bucket:
                    data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data
                    try:
                        file.write(data)
                    except OSError as error:
                        why = f"{error.strerror} for the weights in {home}, after {at / 1e9:.1f} GB: enlarge that (--shm-size)"
                        raise OSError(error.errno, f"{why}, or set rollout.dir to a folder with room") from error
                    crc = crc32(data, crc)
                    tensors.append([name, name_of(tensor.dtype), list(tensor.shape), data.nbytes])
                    at += data.nbytes
                listed.append({"bytes": at - start, "crc": crc, "tensors": tensors})
            file.truncate(at)
        _publish(home, {"tag": asdict(tag), "buckets": listed})
    return at


def _publish(home: Path, page: dict[str, Any]) -> None:
    """Last of all."""
    fresh = home / f"{PAGE}.new"
    fresh.write_text(json.dumps(page), encoding="utf-8")
    fresh.rename(home / PAGE)


def read(home: Path, tag: Tag, *, within_s: float) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of that set, in order, bucket by bucket. Torn if it is another, or not what it was."""
    with _opened(home, tag, within_s) as (page, file):
        for number, bucket in enumerate(page["buckets"]):
            data = bytearray(bucket["bytes"])
            if file.readinto(data) != len(data) or crc32(data) != bucket["crc"]:
                raise Torn(f"bucket {number} of the weights in {home} does not have its checksum")
            at = 0
            for name, dtype, shape, nbytes in bucket["tensors"]:
                yield (
                    name,
                    torch.frombuffer(data, dtype=torch.uint8, count=nbytes, offset=at)
                    .view(dtype_of(dtype))
                    .reshape(shape),
                )
                at += nbytes


@contextmanager
def outgoing(home: Path, tag: Tag, *, within_s: float) -> Iterator[tuple[dict[str, Any], Iterator[bytes]]]:
    """The page of that set, and its file in pieces; nobody writes another while they are read. Torn if it is another."""
    with _opened(home, tag, within_s) as (page, file):
        yield page, iter(lambda: file.read(PIECE), b"")


class Incoming:
    """A set that comes piece by piece from another node. Until its last bucket has been found to be right there is none here.

    Lost if the file stays in use.
    """

    def __init__(self, home: Path, page: dict[str, Any], *, within_s: float = 0.0) -> None:
        self.tag, self._page, self._home = Tag(**page["tag"]), page, home
        self.nbytes = sum(int(bucket["bytes"]) for bucket in page["buckets"])
        self._left = [(int(bucket["bytes"]), int(bucket["crc"])) for bucket in page["buckets"]]
        self._crc = 0
        with ExitStack() as stack:
            stack.enter_context(_locked(home, fcntl.LOCK_EX, within_s))
            (home / PAGE).unlink(missing_ok=True)
            file = os.open(home / FILE, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_TRUNC, 0o600)
            self._file = stack.enter_context(os.fdopen(file, "r+b"))
            self._turn()
            self._held = stack.pop_all()

    def take(self, data: bytes | memoryview) -> None:
        """The next piece. Torn if a bucket does not have its checksum."""
        view = memoryview(data)
        while view:
            if not self._left:
                raise Torn(f"more was sent than the page of version {self.tag.version} names")
            left, crc = self._left[0]
            part, view = view[:left], view[left:]
            self._file.write(part)
            self._crc = crc32(part, self._crc)
            self._left[0] = (left - len(part), crc)
            self._turn()

    def _turn(self) -> None:
        """To the next bucket, if this one is whole."""
        while self._left and self._left[0][0] == 0:
            if self._left.pop(0)[1] != self._crc:
                raise Torn(f"a bucket of version {self.tag.version} does not have its checksum")
            self._crc = 0

    def done(self) -> None:
        """All of it has come: it is a set from now on. Torn if not."""
        if self._left:
            raise Torn(f"{len(self._left)} buckets of version {self.tag.version} were not sent whole")
        self._file.flush()
        _publish(self._home, self._page)

    def close(self) -> None:
        """Let go of the file, whatever is in it."""
        self._held.close()


def good(home: Path, tag: Tag) -> bool:
    """Whether every bucket of that set has its checksum. One that is torn is forgotten."""
    try:
        for _ in read(home, tag, within_s=0.0):
            pass
    except Lost:
        return False  # a trainer is writing another
    except Torn:
        forget(home)
        return False
    return True


def forget(home: Path) -> None:
    """Gives their memory back."""
    for name in (PAGE, FILE):
        (home / name).unlink(missing_ok=True)


def buckets(
    model: nn.Module, *, nbytes: int, dtype: torch.dtype, within: nn.Module | None = None, kept: bool = True
) -> Iterator[Bucket]:
    """A model's parameters, whole, as `dtype`, on the host: so many bytes at a time, or one parameter that has more. `within`
    is the module of which it is a part, if it is: what FSDP has cut up may be that.

    Of one with adapters they alone: what is frozen the engine has read from the same files.

    With parameters that FSDP, DeepSpeed or a team has sharded this is a collective, one for each bucket, and two where FSDP has
    cut what a team shares. No rank has more of the model whole at a time than a bucket. Who only joins it has nothing `kept`:
    its buckets are empty, and nothing is copied to its host.
    """
    return in_buckets(sent(model, within=within), nbytes=nbytes, dtype=dtype, kept=kept)


def sent(model: nn.Module, *, within: nn.Module | None = None) -> Iterator[tuple[str, torch.Tensor]]:
    """The parameters that an engine gets, as this rank has them."""
    for module in (within or model).modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # the root stays gathered after a forward pass, and would hide its shards
    adapters = any(".lora_" in name for name, _ in model.named_parameters())
    return ((name, param) for name, param in model.named_parameters() if param.requires_grad or not adapters)


def in_buckets(
    params: Iterable[tuple[str, torch.Tensor]], *, nbytes: int, dtype: torch.dtype, kept: bool = True
) -> Iterator[Bucket]:
    """As `buckets`, of these."""
    mine: list[tuple[str, torch.Tensor]] = []
    size = 0
    for name, param in params:
        numel = getattr(param, "ds_numel", param.numel())  # DeepSpeed's stage 3 leaves nothing where the parameter was
        if mine and size + numel * dtype.itemsize > nbytes:
            yield _whole(mine, dtype, kept=kept)
            mine, size = [], 0
        mine.append((name, param if hasattr(param, "ds_numel") else param.detach()))
        size += numel * dtype.itemsize
    if mine:
        yield _whole(mine, dtype, kept=kept)


def _whole(params: Sequence[tuple[str, torch.Tensor]], dtype: torch.dtype, *, kept: bool) -> Bucket:
    """These parameters whole, on the host and in `dtype`, put together from all ranks where they are cut up."""
    if hasattr(params[0][1], "ds_numel"):
        with gathered([param for _, param in params]):
            return [(name, param.detach().to("cpu", dtype, copy=True)) for name, param in params if kept]
    axes = [_axes(param) for _, param in params]
    if not kept and not any(axes):
        return []
    parts = [param.to_local() if isinstance(param, DTensor) else param for _, param in params]
    # FSDP2 has cut what each member of a team has: it is put together first, and from all members only what a bucket has.
    for axis in (ACROSS, AXIS):
        cut = [i for i, its in enumerate(axes) if axis in its]
        if not cut:
            continue
        last = axis == AXIS or not any(AXIS in its for its in axes)
        mine = [parts[i] for i in cut], [axes[i][axis] for i in cut]
        whole = _joined(*mine, dtype, kept=kept or not last, host=last)
        for i, part in zip(cut, whole, strict=True):
            parts[i] = part
    return [(name, part.to(dtype).cpu()) for (name, _), part in zip(params, parts, strict=True)] if kept else []


@dataclass(frozen=True, slots=True, kw_only=True)
class _Axis:
    """That a parameter is cut up between the ranks of a group: into chunks of equal height, the last ones shorter or empty."""

    group: dist.ProcessGroup
    dim: int
    length: int  # of all chunks


def _axes(param: torch.Tensor) -> dict[str, _Axis]:
    """Along which axes a parameter is cut up: between teams, or all ranks where there are none, and within a team."""
    if not isinstance(param, DTensor):
        return {}
    mesh = param.device_mesh
    names, shape = mesh.mesh_dim_names or (ACROSS,), list(param.shape)
    found: dict[str, _Axis] = {}
    for i, (name, placement) in reversed(list(enumerate(zip(names, param.placements, strict=True)))):
        dim: int | None = getattr(
            placement, "dim", None
        )  # torch's strided shards have one as well, and say they are none
        if dim is None:
            continue
        axis = AXIS if name == AXIS else ACROSS
        found[axis] = _Axis(group=mesh.get_group(i), dim=dim, length=shape[dim])
        height = -(-shape[dim] // mesh.size(i))
        at = mesh.get_local_rank(i) * height
        shape[dim] = max(0, min(height, shape[dim] - at))  # what the next axis, which was cut after it, is cut out of
    return found


def _joined(
    parts: Sequence[torch.Tensor], axes: Sequence[_Axis], dtype: torch.dtype, *, kept: bool, host: bool
) -> Sequence[torch.Tensor]:
    """All chunks of these put together, in one collective; on the host, if that is where they go. Who only joins it has nothing
    of it `kept`.
    """
    group, world = axes[0].group, axes[0].group.size()
    if world == 1:
        return parts
    shapes = [
        (*part.shape[: axis.dim], -(-axis.length // world), *part.shape[axis.dim + 1 :])
        for part, axis in zip(parts, axes, strict=True)
    ]
    flat, at = parts[0].new_zeros(sum(map(prod, shapes)), dtype=dtype), 0
    for part, axis, shape in zip(parts, axes, shapes, strict=True):
        row = flat[at : (at := at + prod(shape))].view(shape)
        row.narrow(axis.dim, 0, part.shape[axis.dim]).copy_(part)
    everyone = flat.new_empty(world, flat.numel())
    all_gather_single(everyone.view(-1), flat, group=group)
    settle(group)
    if not kept:
        return parts
    everyone = everyone.cpu() if host else everyone
    found, at = [], 0
    for axis, shape in zip(axes, shapes, strict=True):
        its = everyone[:, at : (at := at + prod(shape))]
        found.append(torch.cat([row.view(shape) for row in its], axis.dim).narrow(axis.dim, 0, axis.length))
    return found


def _page(home: Path) -> dict[str, Any] | None:
    try:
        page: dict[str, Any] = parsed((home / PAGE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return page


@contextmanager
def _opened(home: Path, tag: Tag, within_s: float) -> Iterator[tuple[dict[str, Any], BufferedReader]]:
    """The page of that set, and its file; nobody writes another meanwhile. Torn if it is another."""
    with _locked(home, fcntl.LOCK_SH, within_s):
        page = _page(home)
        if page is None or Tag(**page["tag"]) != tag:
            raise Torn(f"the weights in {home} are not version {tag.version}, or not whole")
        with (home / FILE).open("rb") as file:
            yield page, file


@contextmanager
def _locked(
    home: Path, how: int, within_s: float, check: Callable[[], None] = lambda: None,
    alone: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> Iterator[None]:  # fmt: skip
    """One writer or several readers. The kernel lets go of what a dead process held."""
    deadline = time.monotonic() + within_s
    with (home / LOCK).open("ab") as file:
        with alone():
            while True:
                try:
                    fcntl.flock(file, how | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    check()
                    if time.monotonic() > deadline:
                        raise Lost(f"the weights in {home} stayed in use for {within_s:g} s") from None
                    time.sleep(TURN_S)
        try:
            yield
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)  # closed alone it would stay with a child that was forked meanwhile
