"""State dicts as JSON and named tensors, and back: what makes unpickling unnecessary.

The one idea: a state dict is a tree whose leaves are tensors and plain values. The tree goes into JSON with a mark where each
tensor was (`split`); what JSON has no word for (tuples, bytes, number keys) is marked too. Anything else is refused by name.
"""

import base64
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from elasticrl.runtime.vault.errors import StateError

TENSOR, TUPLE, BYTES, MAP = "$tensor", "$tuple", "$bytes", "$map"
_PLAIN: tuple[type, ...] = (bool, int, float, str)
Path = tuple[str | int, ...]


def split(name: str, tree: object) -> tuple[Any, dict[str, torch.Tensor]]:
    """JSON with marks, and the tensors by name. Names are paths joined by dots, as torch's checkpoints have them.

    >>> split("opt", {"lr": 0.1, "state": {0: {"m": torch.zeros(1)}}})
    ({'lr': 0.1, 'state': {'$map': [[0, {'m': {'$tensor': 'opt.state.0.m'}}]]}}, {'opt.state.0.m': tensor([0.])})
    """
    tensors: dict[str, torch.Tensor] = {}
    return _split(tree, name, tensors), tensors


def _split(value: object, name: str, tensors: dict[str, torch.Tensor]) -> Any:
    """The training thread waits for this, a thousand tensors long: the common cases come first and build nothing twice."""
    kind = type(value)
    if value is None or kind in _PLAIN:
        return value
    if isinstance(value, torch.Tensor):
        if name in tensors:
            raise StateError(
                f"Two tensors of one state are both called {name}: a key with a dot in it makes that ambiguous."
            )
        tensors[name] = value
        return {TENSOR: name}
    if isinstance(value, dict | Mapping):
        return _split_mapping(value, name, tensors)
    if isinstance(value, list | tuple):
        items = [_split(item, f"{name}.{i}", tensors) for i, item in enumerate(value)]
        return {TUPLE: items} if isinstance(value, tuple) else items
    if isinstance(value, bytes | bytearray):
        return {BYTES: base64.b64encode(value).decode()}
    for base in _PLAIN:  # of a subclass (an IntEnum, a numpy float64): what it is underneath
        if isinstance(value, base):
            return base(value)
    if hasattr(value, "dtype") and hasattr(value, "item") and getattr(value, "shape", None) == ():
        return _split(value.item(), name, tensors)  # a number of numpy's
    raise StateError(
        f"{name} is a {kind.__module__}.{kind.__qualname__}, which could only be kept by pickling. "
        "Let state_dict() return numbers, strings, bytes, lists, tuples, dicts and tensors."
    )


def _split_mapping(value: Mapping[Any, object], name: str, tensors: dict[str, torch.Tensor]) -> Any:
    items = {key: _split(item, f"{name}.{key}", tensors) for key, item in value.items()}
    if all(type(key) is str and not key.startswith("$") for key in items):
        return items
    for key in items:
        if type(key) not in _PLAIN:
            raise StateError(f"{name} has a key {key!r} of type {type(key).__name__}: use str or int.")
    return {MAP: [[key, item] for key, item in items.items()]}


def join(tree: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """The reverse of `split`."""
    if isinstance(tree, list):
        return [join(item, tensors) for item in tree]
    if not isinstance(tree, dict):
        return tree
    if len(tree) == 1:
        (mark, inner), *_ = tree.items()
        match mark:
            case "$tensor":
                return tensors[inner]
            case "$tuple":
                return tuple(join(item, tensors) for item in inner)
            case "$bytes":
                return base64.b64decode(inner)
            case "$map":
                return {key: join(item, tensors) for key, item in inner}
    return {key: join(item, tensors) for key, item in tree.items()}


def names(tree: Any) -> Iterator[str]:
    """The tensors that a tree mentions."""
    if isinstance(tree, list):
        for item in tree:
            yield from names(item)
    elif isinstance(tree, dict):
        if len(tree) == 1 and TENSOR in tree:
            yield tree[TENSOR]
        else:
            for item in tree.values():
                yield from names(item)


def leaves(part: str, tree: Any) -> tuple[dict[str, Path], list[tuple[Path, object]]]:
    """For torch's readers: where each tensor belongs, and the plain values with their paths.

    Lists stay whole unless there is a tensor or a dict in them, as torch flattens state dicts.
    """
    tensors: dict[str, Path] = {}
    plain: list[tuple[Path, object]] = []
    _leaves(tree, (part,), tensors, plain)
    return tensors, plain


def _leaves(tree: Any, path: Path, tensors: dict[str, Path], plain: list[tuple[Path, object]]) -> None:
    if isinstance(tree, dict) and len(tree) == 1 and TENSOR in tree:
        tensors[tree[TENSOR]] = path
    elif isinstance(tree, dict) and not (len(tree) == 1 and (TUPLE in tree or BYTES in tree)):
        for key, item in tree[MAP] if len(tree) == 1 and MAP in tree else tree.items():
            _leaves(item, (*path, str(key)), tensors, plain)
    elif _opaque(tree):
        plain.append((path, join(tree, {})))
    else:
        for i, item in enumerate(tree if isinstance(tree, list) else tree[TUPLE]):
            _leaves(item, (*path, i), tensors, plain)


def _opaque(tree: Any) -> bool:
    """Whether torch keeps it as one object."""
    inner = tree[TUPLE] if isinstance(tree, dict) and TUPLE in tree else tree
    if not isinstance(inner, list):
        return True
    return not any(isinstance(item, dict) and not ({TUPLE, BYTES} & item.keys()) for item in inner) and all(
        _opaque(item) for item in inner
    )
