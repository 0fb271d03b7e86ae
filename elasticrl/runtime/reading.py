"""A model's weights from its files, of which each rank reads its own part and nothing else.

    with outlined():
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained("model"))
    share(model, mesh)
    read(model, "model")

The one idea: a parameter is made of blocks, each of which is one tensor in a file. Mostly there is one block. Of a mixture
there is one for each matrix of an expert: experts lie one by one in the files, and in one parameter here. transformers' own
table says which these are. So a member reads its experts alone. What that table says otherwise is refused.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from elasticrl.base.parsed import parsed
from elasticrl.runtime.outline import give_memory
from elasticrl.runtime.team import local, part_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

ONE, INDEX = "model.safetensors", "model.safetensors.index.json"  # a model's file, or what names several
FLOATS = {"F64", "F32", "F16", "BF16"}  # what safetensors calls them
Shape = tuple[int, ...]


class Unreadable(ValueError):
    """A model's files are not those that its parameters can be read from part by part."""


class Block(NamedTuple):
    """A stored tensor's place in a parameter: where it begins, and its lengths there, of which the first may be an expert's 1.

    Example: Block(param="model.layers.0.mlp.experts.gate_up_proj", begin=(3, 768, 0), lengths=(1, 768, 2048))
    """

    param: str
    begin: Shape
    lengths: Shape


def read(model: nn.Module, folder: str | Path, *, device: str = "cpu") -> None:
    """The weights of a model that was built without memory, and that a team shares or FSDP2 has cut up since. Unreadable where
    its files hold something else, or lack some: then build it with `from_pretrained`.
    """
    from torch.distributed.fsdp import FSDPModule

    if saved := saved_buffers(model):
        raise Unreadable(
            f"{min(saved)} is no parameter but a buffer that files have, which is not read here: build the model by "
            "from_pretrained."
        )
    if any(isinstance(module, FSDPModule) for module in model.modules()):
        from elasticrl.runtime import fsdp

        fsdp.give_memory(model, device)
    else:
        give_memory(model, device)
    files = files_of(Path(folder))
    if not files:
        raise Unreadable(f"{folder} has no weights in safetensors that are all there.")
    blocks = blocks_of(model, stored_in(files, codes=True))
    if blocks is None:
        raise Unreadable(
            f"The files in {folder} call weights otherwise than the model does: build it by from_pretrained."
        )
    if any(number > 1 for number in stored_of_tied(model, blocks).values()):
        raise Unreadable(
            f"The files in {folder} have each of two weights that the model ties, and may not be tied themselves: build it by "
            "from_pretrained."
        )
    if lacks := fill(dict(model.named_parameters()), blocks, files):
        raise Unreadable(f"{folder} lacks {len(lacks)} weights of the model ({min(lacks)}, ...).")


def saved_buffers(model: nn.Module) -> set[str]:
    """What a model's files have beside its parameters: nobody reads that part by part."""
    return model.state_dict().keys() - {name for name, _ in model.named_parameters(remove_duplicate=False)}


def stored_of_tied(model: nn.Module, blocks: Mapping[str, Block]) -> dict[tuple[str, str], int]:
    """Of each two weights that the model ties, how many its files have. With both they may differ, and transformers then ties
    nothing.
    """
    stored = {block.param for block in blocks.values()}
    tied: dict[str, str] = getattr(model, "all_tied_weights_keys", {})
    return {pair: sum(any(name.endswith(end) for name in stored) for end in pair) for pair in tied.items()}


def files_of(folder: Path) -> Sequence[Path]:
    """Those of a model's weights in safetensors, as transformers picks them; none where some are missing."""
    if (folder / ONE).is_file():
        return [folder / ONE]
    index = folder / INDEX
    names = parsed(index.read_text(encoding="utf-8"))["weight_map"].values() if index.is_file() else ()
    files = [folder / name for name in sorted(set(names))]
    return files if all(file.is_file() for file in files) else ()


def stored_in(files: Sequence[Path], *, codes: bool = False) -> dict[str, Shape]:
    """The shapes of the weights in these files, by name, as far as they are numbers, else `codes`."""
    from safetensors import safe_open

    found: dict[str, Shape] = {}
    for file in files:
        with safe_open(file, "pt") as opened:
            held = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118 - no mapping
            found |= {name: tuple(one.get_shape()) for name, one in held.items() if codes or one.get_dtype() in FLOATS}
    return found


def blocks_of(model: nn.Module, stored: Mapping[str, Shape]) -> dict[str, Block] | None:
    """Where each stored tensor lies in which parameter. None where transformers would make these of them in a way that is not
    known here.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping

    names: list[tuple[str, str]] = []
    several: dict[
        str, list[tuple[str, str]]
    ] = {}  # a parameter's part of a name: what its experts' matrices are called
    for one in get_model_conversion_mapping(model, add_legacy=False):  # type: ignore[arg-type] # a PreTrainedModel
        table: Any = one
        # Empty where FSDP2 has given the outermost class another name: what is within it then speaks for all names.
        if getattr(table, "scope_prefix", None):
            return None  # it is for some of the names alone
        sources, targets, steps = table.source_patterns, table.target_patterns, getattr(table, "operations", ())
        how = [(type(step).__name__, getattr(step, "dim", None)) for step in steps]
        if not how and len(sources) == len(targets) == 1:
            names.append((sources[0], targets[0]))
        elif (
            how in ([EACH], [EACH, BEHIND]) and len(targets) == 1 and all(source.count("*") == 1 for source in sources)
        ):
            several[targets[0]] = [tuple(source.split("*")) for source in sources]
        else:
            return None
    found: dict[str, Block] = {}
    parts: dict[str, dict[tuple[int, int], str]] = {}  # by expert and matrix
    for name, shape in stored.items():
        called = name
        for source, target in names:
            called = re.sub(source, target, called)
        if (part := _part(called, several)) is not None:
            param, expert, which = part
            parts.setdefault(param, {})[expert, which] = name
        else:
            found[name] = Block(called, (0,) * len(shape), shape)
    for param, its in parts.items():
        heights = {which: stored[name][0] for (_, which), name in sorted(its.items(), reverse=True)}
        for (expert, which), name in its.items():
            shape = stored[name]
            above = sum(height for other, height in heights.items() if other < which)
            found[name] = Block(param, (expert, above) + (0,) * (len(shape) - 1), (1, *shape))
    return found


EACH = ("MergeModulelist", 0)  # experts one after the other
BEHIND = ("Concatenate", 1)  # of each its matrices


def _part(name: str, several: Mapping[str, Sequence[tuple[str, str]]]) -> tuple[str, int, int] | None:
    """(parameter, expert, which of its matrices) of a stored tensor.

    >>> _part("layers.0.experts.3.w2.weight", {".experts.down_proj": [(".experts.", ".w2.weight")]})
    ('layers.0.experts.down_proj', 3, 0)
    """
    for target, sources in several.items():
        for which, (before, behind) in enumerate(sources):
            found = re.fullmatch(rf"(.*){re.escape(before)}(\d+){re.escape(behind)}", name)
            if found:
                return found[1] + target, int(found[2]), which
    return None


def whole_shapes(blocks: Mapping[str, Block]) -> dict[str, Shape]:
    """What the blocks of each parameter come to; nothing of one whose blocks leave gaps."""
    ends: dict[str, Shape] = {}
    sizes: dict[str, int] = {}
    for param, begin, lengths in blocks.values():
        end = tuple(start + length for start, length in zip(begin, lengths, strict=True))
        ends[param] = tuple(map(max, ends.get(param, end), end))
        sizes[param] = sizes.get(param, 0) + torch.Size(lengths).numel()
    return {param: end for param, end in ends.items() if torch.Size(end).numel() == sizes[param]}


def fill(params: Mapping[str, nn.Parameter], blocks: Mapping[str, Block], files: Sequence[Path]) -> set[str]:
    """This rank's part of each parameter, as far as the files have it. Returns the names of those that lack some. Unreadable
    where a file has another one, in shape or kind.
    """
    from safetensors import safe_open

    shapes = whole_shapes(blocks)
    lacks = {name: local(param).numel() for name, param in params.items()}
    with torch.no_grad():
        for file in files:
            with safe_open(file, "pt") as opened:
                for name in blocks.keys() & set(opened.keys()):
                    block = blocks[name]
                    if (param := params.get(block.param)) is None:
                        continue
                    whole = opened.get_slice(name)
                    if shapes.get(block.param) != tuple(param.shape) or whole.get_dtype() not in FLOATS:
                        raise Unreadable(
                            f"{name} in {file} is another one than as the model was made: give it a folder of its own"
                        )
                    skipped = len(block.lengths) - len(whole.get_shape())
                    if (its := _meet(part_of(param), block)) is None:
                        continue
                    here, there = its
                    into = local(param)[here]
                    into.copy_(whole[there[skipped:]].reshape(into.shape))
                    lacks[block.param] -= into.numel()
    return {name for name, left in lacks.items() if left}


def _meet(mine: Sequence[slice], block: Block) -> tuple[tuple[slice, ...], tuple[slice, ...]] | None:
    """What of a block is in this part: as places in the part, and in the stored tensor. None: nothing.

    >>> _meet((slice(2, 4), slice(0, 5)), Block("w", (3, 0), (1, 5)))
    ((slice(1, 2, None), slice(0, 5, None)), (slice(0, 1, None), slice(0, 5, None)))
    """
    here, there = [], []
    for own, begin, length in zip(mine, block.begin, block.lengths, strict=True):
        start, stop = max(own.start, begin), min(own.stop, begin + length)
        if start >= stop:
            return None
        here.append(slice(start - own.start, stop - own.start))
        there.append(slice(start - begin, stop - begin))
    return tuple(here), tuple(there)
