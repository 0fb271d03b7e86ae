"""`dataclass`, as the standard library has it, for a fifteenth of the time that making one of its classes takes.

The one idea: the standard library writes and compiles six functions for each class while its module is imported. A daemon's
start makes two hundred classes, which was its largest cost, and uses a few dozen of them. Here a method is compiled when it is
first called, and what is alike in all classes is shared. Fields, `replace`, `asdict`, and whatever else reads
`__dataclass_fields__` are the standard library's own.

A class here and a frozen one of the standard library's cannot inherit from each other. No `InitVar`, no `init=False`.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import MISSING, FrozenInstanceError, fields
from functools import partial
from reprlib import recursive_repr
from types import MemberDescriptorType
from typing import TYPE_CHECKING, Any, Final

ORDER: Final = {"__lt__": "<", "__le__": "<=", "__gt__": ">", "__ge__": ">="}
Write = Callable[[Any, dict[str, Any]], str]  # a method's source, for a class; what it needs goes into the dictionary

if TYPE_CHECKING:
    from dataclasses import dataclass as dataclass  # noqa: PLC0414 - so it is re-exported
else:

    def dataclass(cls=None, /, *, frozen=False, slots=False, kw_only=False, eq=True, order=False):
        """As `dataclasses.dataclass`."""
        if cls is None:
            return partial(dataclass, frozen=frozen, slots=slots, kw_only=kw_only, eq=eq, order=order)
        bare = dataclasses.dataclass(cls, init=False, repr=False, eq=False, slots=slots, kw_only=kw_only)
        return _equip(bare, frozen=frozen, slots=slots, eq=eq, order=order)


def _equip(cls: Any, *, frozen: bool, slots: bool, eq: bool, order: bool) -> Any:
    """Give a class that has its fields the methods that it has not written itself."""
    own = set(cls.__dict__)
    written: dict[str, Write] = {"__init__": partial(_init, frozen=frozen)}
    if eq:
        written["__eq__"] = partial(_compare, name="__eq__", sign="==")
    if order:
        written |= {name: partial(_compare, name=name, sign=sign) for name, sign in ORDER.items()}
    if eq and cls.__dict__.get("__hash__") is None:  # Python puts None beside an __eq__
        own.discard("__hash__")
        if frozen:
            written["__hash__"] = _hash
        else:
            cls.__hash__ = None  # its value may change
    if frozen:
        cls.__setattr__ = cls.__delattr__ = _refuse
        if slots:
            cls.__getstate__, cls.__setstate__ = _state, _restore  # else a copy would be made by setting its attributes
    for name in written.keys() - own:
        setattr(cls, name, _compiled_later(cls, name, written[name]))
    if "__repr__" not in own:
        cls.__repr__ = _repr
    return cls


def _compiled_later(cls: Any, name: str, write: Write) -> Callable[..., Any]:
    """A method that puts what is written for it in its place when it is called first."""

    def method(*args: Any, **named: Any) -> Any:
        known: dict[str, Any] = {}
        source = write(cls, known)
        exec(source, known)  # noqa: S102 - made of the names of the fields alone
        known[name].__qualname__ = f"{cls.__qualname__}.{name}"
        setattr(cls, name, known[name])
        return known[name](*args, **named)

    return method


def _init(cls: Any, known: dict[str, Any], *, frozen: bool) -> str:
    known |= {"MISSING": MISSING, "_set": object.__setattr__}
    parameters, body = ["self"], []
    for field in sorted(fields(cls), key=lambda field: bool(field.kw_only)):
        name, value, default = field.name, field.name, ""
        if field.default is not MISSING:
            known[f"_default_{name}"], default = field.default, f"=_default_{name}"
        elif field.default_factory is not MISSING:
            known[f"_make_{name}"], default = field.default_factory, "=MISSING"
            value = f"_make_{name}() if {name} is MISSING else {name}"
        if field.kw_only and "*" not in parameters:
            parameters.append("*")
        parameters.append(name + default)
        slot = getattr(cls, name, None)
        if not frozen:
            body.append(f"self.{name} = {value}")
        elif isinstance(slot, MemberDescriptorType):
            known[f"_set_{name}"] = slot.__set__  # quicker than the general way, and refused as little
            body.append(f"_set_{name}(self, {value})")
        else:
            body.append(f"_set(self, {name!r}, {value})")
    if hasattr(cls, "__post_init__"):
        body.append("self.__post_init__()")
    return f"def __init__({', '.join(parameters)}):\n " + "\n ".join(body or ["pass"])


def _compare(cls: Any, _: dict[str, Any], *, name: str, sign: str) -> str:
    same = " if self is other:\n  return True\n" if sign == "==" else ""
    return (
        f"def {name}(self, other):\n{same} if other.__class__ is not self.__class__:\n  return NotImplemented\n"
        f" return {_values(cls, 'self')} {sign} {_values(cls, 'other')}"
    )


def _hash(cls: Any, _: dict[str, Any]) -> str:
    return f"def __hash__(self):\n return hash({_values(cls, 'self')})"


def _values(cls: Any, of: str) -> str:
    """A tuple of what the class compares by."""
    return "(" + "".join(f"{of}.{field.name}, " for field in fields(cls) if field.compare) + ")"


def unshare(value: object) -> None:
    """Give a value whose attributes lie in a dictionary one with keys of its own: where that is asked for (`vars`, a cached
    property), keys that are shared by all of a class make each attribute three times as slow to read.
    """
    object.__setattr__(value, "__dict__", {**vars(value)})


@recursive_repr()
def _repr(self: Any) -> str:
    said = ", ".join(f"{field.name}={getattr(self, field.name)!r}" for field in fields(self) if field.repr)
    return f"{type(self).__qualname__}({said})"


def _refuse(self: Any, name: str, *_: object) -> None:
    raise FrozenInstanceError(f"cannot change field {name!r} of {type(self).__qualname__}")


def _state(self: Any) -> list[Any]:
    return [getattr(self, field.name) for field in fields(self)]


def _restore(self: Any, state: list[Any]) -> None:
    for field, value in zip(fields(self), state, strict=True):
        object.__setattr__(self, field.name, value)
