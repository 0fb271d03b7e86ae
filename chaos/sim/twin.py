"""`twin(run)`: the same run once more, so that it can go on in two ways from where it is.

The one idea: few things of a run ever change, the simulator's own objects and plain containers; they are copied. What is frozen
(plans, records, states, facts) belongs to both. A callback is copied with what it holds on to, as it acts on that.
"""

from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import is_dataclass
from enum import Enum
from functools import partial
from itertools import count
from random import Random
from types import BuiltinMethodType, CellType, FunctionType, MethodType, ModuleType
from typing import Any, Final, TypeVar

from chaos.sim.beats import Beats
from chaos.sim.cluster import Cluster
from chaos.sim.disk import Disk, Save
from chaos.sim.drive import Run
from chaos.sim.gang import Gang
from chaos.sim.nemesis import Nemesis
from chaos.sim.node import Node
from chaos.sim.store import Lease, LeaseGone, Store, Watcher
from chaos.sim.vault import Vault
from chaos.sim.world import Clock, Network, World

T = TypeVar("T")
Copy = Callable[[Any, "Twins"], Any]


class Twins(dict[int, Any]):
    """What has been copied, by the `id` of what it was copied from. That is kept, else its number could be another's."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[object] = []

    def of(self, one: Any) -> Any:
        """Its twin: itself, if it never changes."""
        how = HOW.get(type(one))
        if how is None:
            how = HOW[type(one)] = _how(type(one))
        if how is _itself:
            return one
        known = self.get(id(one), self)
        if known is not self:
            return known
        self.kept.append(one)
        return how(one, self)

    def put(self, one: object, other: T) -> T:
        """This is its twin. (Known before its parts are copied, which may lead back to it.)"""
        self[id(one)] = other
        return other


def twin(run: Run) -> Run:
    """The same run once more. What happens to one does not touch the other."""
    copied: Run = Twins().of(run)
    return copied


def _itself(one: Any, _: Twins) -> Any:
    return one


def _object(one: Any, twins: Twins) -> Any:
    other = twins.put(one, object.__new__(type(one)))
    if hasattr(one, "__dict__"):
        vars(other).update({name: twins.of(value) for name, value in vars(one).items()})
    for name in getattr(type(one), "__slots__", ()):
        setattr(other, name, twins.of(getattr(one, name)))
    return other


def _list(one: list[Any], twins: Twins) -> list[Any]:
    other: list[Any] = twins.put(one, [])
    other += map(twins.of, one)
    return other


def _dict(one: dict[Any, Any], twins: Twins) -> dict[Any, Any]:
    other: dict[Any, Any] = twins.put(one, type(one)())
    for key, value in one.items():
        other[twins.of(key)] = twins.of(value)
    return other


def _default(one: defaultdict[Any, Any], twins: Twins) -> defaultdict[Any, Any]:
    other: defaultdict[Any, Any] = twins.put(one, defaultdict(one.default_factory))
    for key, value in one.items():
        other[twins.of(key)] = twins.of(value)
    return other


def _set(one: set[Any], twins: Twins) -> set[Any]:
    return twins.put(one, set(one))  # of names and numbers


def _tuple(one: tuple[Any, ...], twins: Twins) -> tuple[Any, ...]:
    other = tuple(map(twins.of, one))
    return twins.put(one, one if all(a is b for a, b in zip(one, other, strict=True)) else other)


def _chance(one: Random, twins: Twins) -> Random:
    other = twins.put(one, Random())
    other.setstate(one.getstate())
    return other


def _count(one: "count[int]", twins: Twins) -> "count[int]":
    return twins.put(one, count(next(one) + 1))  # both skip one number, which changes no order


def _method(one: MethodType, twins: Twins) -> Any:
    return twins.put(one, MethodType(one.__func__, twins.of(one.__self__)))


def _builtin(one: BuiltinMethodType, twins: Twins) -> Any:
    of = one.__self__
    return one if isinstance(of, ModuleType) else twins.put(one, getattr(twins.of(of), one.__name__))


def _partial(one: partial[Any], twins: Twins) -> Any:
    named = {name: twins.of(value) for name, value in one.keywords.items()}
    return twins.put(one, partial(twins.of(one.func), *map(twins.of, one.args), **named))


def _function(one: FunctionType, twins: Twins) -> Any:
    if not one.__closure__:
        return one
    cells = tuple(map(twins.of, one.__closure__))
    other = FunctionType(one.__code__, one.__globals__, one.__name__, one.__defaults__, cells)
    other.__kwdefaults__ = one.__kwdefaults__
    return twins.put(one, other)


def _cell(one: CellType, twins: Twins) -> CellType:
    other: CellType = twins.put(one, CellType())
    other.cell_contents = twins.of(one.cell_contents)
    return other


OURS: Final = (
    Run, World, Clock, Network, Cluster, Store, Lease, Watcher, Disk, Save, Beats, Gang, Node, Vault, Nemesis,
)  # fmt: skip
HOW: Final[dict[type, Copy]] = {
    **dict.fromkeys((type(None), bool, int, float, str, bytes, frozenset, type, LeaseGone), _itself),
    **dict.fromkeys(OURS, _object),
    **dict.fromkeys((dict, Counter), _dict),
    list: _list, defaultdict: _default, set: _set, tuple: _tuple, Random: _chance, count: _count, MethodType: _method,
    BuiltinMethodType: _builtin, partial: _partial, FunctionType: _function, CellType: _cell,
}  # fmt: skip


def _how(kind: type) -> Copy:
    """How one of these is copied that is not known yet."""
    if issubclass(kind, Enum | type):
        return _itself
    if is_dataclass(kind) and kind.__setattr__ is not object.__setattr__:  # frozen
        return _itself
    raise TypeError(f"nobody knows how to copy a {kind.__qualname__} of a run")
