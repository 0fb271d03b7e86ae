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
    return _split(tree, (name,), tensors), tensors


def _split(value: object, path: Path, tensors: dict[str, torch.Tensor]) -> Any:
    if value is None or type(value) in _PLAIN:
        return value
    match value:
        case bool() | int() | float() | str():  # of a subclass (an IntEnum, a numpy float64): what it is underneath
            return next(base(value) for base in _PLAIN if isinstance(value, base))
        case torch.Tensor():
            return {TENSOR: _tensor(value, path, tensors)}
        case Mapping():
            return _split_mapping(value, path, tensors)
        case tuple():
            return {TUPLE: [_split(item, (*path, i), tensors) for i, item in enumerate(value)]}
        case list():
            return [_split(item, (*path, i), tensors) for i, item in enumerate(value)]
        case bytes() | bytearray():
            return {BYTES: base64.b64encode(value).decode()}
    if hasattr(value, "dtype") and hasattr(value, "item") and getattr(value, "shape", None) == ():
        return _split(value.item(), path, tensors)  # a number of numpy's
    raise StateError(
        f"{'.'.join(map(str, path))} is a {type(value).__module__}.{type(value).__qualname__}, which could only be kept by "
        "pickling. Let state_dict() return numbers, strings, bytes, lists, tuples, dicts and tensors."
    )


def _split_mapping(value: Mapping[Any, object], path: Path, tensors: dict[str, torch.Tensor]) -> Any:
    items = [(key, _split(item, (*path, str(key)), tensors)) for key, item in value.items()]
    if all(type(key) is str and not key.startswith("$") for key, _ in items):
        return dict(items)
    for key, _ in items:
        if type(key) not in _PLAIN:
            raise StateError(
                f"{'.'.join(map(str, path))} has a key {key!r} of type {type(key).__name__}: use str or int."
            )
    return {MAP: [[key, item] for key, item in items]}


def _tensor(value: torch.Tensor, path: Path, tensors: dict[str, torch.Tensor]) -> str:
    name = ".".join(map(str, path))
    if name in tensors:
        raise StateError(
            f"Two tensors of one state are both called {name}: a key contains a dot that makes it ambiguous."
        )
    if value.layout != torch.strided or value.is_quantized:
        raise StateError(
            f"{name} is a {type(value).__name__} (layout {value.layout}): its owner has to say what plain tensors it is "
            "made of; register it as an object with pieces()."
        )
    tensors[name] = value.detach()
    return name


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
