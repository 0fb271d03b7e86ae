"""What a section of the configuration is made of: a frozen pydantic model whose leaves know their key, rule and meaning.

The one idea: the class body is the only place where a field is written down. Its key is the attribute's name without the
unit, its rule comes from the annotation, its meaning from the docstring under it; the loader, `config show`, the JSON
Schema and docs/CONFIGURATION.md all walk the same `leaves`.
"""

import ast
import inspect
import sys
import types
import typing
from collections.abc import Iterator, Mapping
from functools import cache
from itertools import pairwise
from typing import Annotated, Any, Literal, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, SecretStr, WithJsonSchema
from pydantic.fields import FieldInfo

from elasticrl.base.value import dataclass
from elasticrl.config.source import flow
from elasticrl.config.units import DURATION, SIZE, format_duration, format_size, parse_duration, parse_size


def key_of(attribute: str) -> str:
    """The key in the file: the attribute without its unit.

    >>> key_of("lease_ttl_s"), key_of("bucket_bytes"), key_of("min_nodes")
    ('lease_ttl', 'bucket', 'min_nodes')
    """
    return attribute.removesuffix("_s").removesuffix("_bytes")


EXTRA = "__pydantic_extra__"


class Section(BaseModel):
    """A named group of keys. Frozen; strict: a value of another type is refused, never converted."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        hide_input_in_errors=True,
        alias_generator=key_of,
        populate_by_name=True,
    )


@dataclass(frozen=True, slots=True)
class Says:
    """The rule of a value in words, where the annotation alone would not say it well.

    Example: Says("host:port", "etcd-1:2379")
    """

    words: str
    example: str


def _duration(value: object) -> object:
    return parse_duration(value) if isinstance(value, str) else value


def _size(value: object) -> object:
    return parse_size(value) if isinstance(value, str) else value


DURATION_MARK = Says("a duration", "10s")
SIZE_MARK = Says("a size", "64MiB")

Span = Annotated[
    float, BeforeValidator(_duration), DURATION_MARK, Ge(0), WithJsonSchema({"type": "string", "pattern": DURATION})
]
"""A duration in seconds that may be zero."""
Seconds = Annotated[Span, Gt(0)]
"""A duration in seconds."""
Bytes = Annotated[int, BeforeValidator(_size), SIZE_MARK, Gt(0), WithJsonSchema({"type": "string", "pattern": SIZE})]
"""A size in bytes."""
Count = Annotated[int, Ge(1)]
"""A whole number of things, at least one."""
Whole = Annotated[int, Ge(0)]
"""A whole number of things, perhaps none."""
Share = Annotated[float, Gt(0), Le(1)]
"""A part of a whole."""
Portion = Annotated[float, Ge(0), Le(1)]
"""A part of a whole, perhaps nothing."""
Rate = Annotated[
    str, Field(pattern=r"^([01]|1/[1-9][0-9]{0,8})$"), Says("1/n: one of so many; 1: each; 0: none", "1/200")
]
"""How often."""
Positive = Annotated[float, Gt(0)]
Amount = Annotated[float, Ge(0)]
Port = Annotated[int, Ge(0), Le(65535)]
Text = Annotated[str, Field(min_length=1), Says("a text", "text")]
Name = Annotated[
    str,
    Field(pattern=r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$"),
    Says("a name of lower-case letters, digits and dashes (at most 63)", "ppo-7b"),
]
NodeName = Annotated[
    str,
    Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$", max_length=253),
    Says("a name of letters, digits, dots, dashes and underscores, as hosts have", "n03"),
]
Prefix = Annotated[
    str,
    Field(pattern=r"^(/[A-Za-z0-9_.-]+)+$"),
    Says("a key that starts with a slash and does not end in one", "/elasticrl"),
]
Endpoint = Annotated[
    str,
    Field(pattern=r"^(https?://)?(\[[0-9A-Fa-f:.]+\]|[^\s:/\[\]]+):[0-9]{1,5}$"),
    Says("host:port", "etcd-1:2379"),
]
FUNCTION = r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*$"
Function = Annotated[
    str,
    Field(pattern=FUNCTION),
    Says("a Python function, module:function", "rewards:score"),
]
URL = r"^https?://[^\s/?#@]+([/?#]\S*)?$"
Url = Annotated[
    str,
    Field(pattern=URL),
    Says("an http or https URL without a user's name in it", "http://rm-1:8000/score"),
]


@dataclass(frozen=True, slots=True)
class Names(Mapping[str, str]):
    """A mapping that cannot change, so that a tree that holds one is frozen all the way down, and hashable.

    Example: Names((("NCCL_DEBUG", "WARN"),))["NCCL_DEBUG"]
    """

    pairs: tuple[tuple[str, str], ...] = ()

    def __getitem__(self, name: str) -> str:
        return dict(self.pairs)[name]

    def __iter__(self) -> Iterator[str]:
        return iter(dict(self.pairs))

    def __len__(self) -> int:
        return len(self.pairs)


Mapped = Annotated[Mapping[str, str], AfterValidator(lambda value: Names(tuple(sorted(value.items()))))]
"""Free names and texts: the one kind of leaf that has keys of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaf:
    """One key of the tree: where it is, what it may be, what it means.

    Example: leaves(Tree)["membership.lease_ttl"].rule == "a duration over 0s"
    """

    key: str  # dotted, as in a file
    section: type[Section]
    attribute: str  # on that section
    annotation: Any
    metadata: tuple[object, ...]
    default: object
    required: bool

    @property
    def path(self) -> tuple[str, ...]:
        """The key, cut at its dots."""
        return tuple(self.key.split("."))

    @property
    def marks(self) -> tuple[object, ...]:
        """All of the annotation's markers, those inside of an optional included."""
        return self.metadata + tuple(mark for option in _options(self.annotation) for mark in _split(option)[1])

    @property
    def secret(self) -> bool:
        """It is never printed and never written in a file."""
        return SecretStr in _options(self.annotation)

    @property
    def mapping(self) -> bool:
        """It has free keys of its own."""
        return get_origin(_split(self.annotation)[0]) is Mapping

    @property
    def textual(self) -> bool:
        """Any scalar in the file is taken as the text that it is: `name: 007` is the name 007."""
        bases = [_split(option)[0] for option in _options(self.annotation)]
        bases += [_split(item)[0] for base in bases if get_origin(base) is tuple for item in get_args(base)]
        return self.mapping or str in bases or SecretStr in bases

    @property
    def unit(self) -> bool:
        """Its value carries a unit in the file."""
        return DURATION_MARK in self.marks or SIZE_MARK in self.marks

    @property
    def choices(self) -> tuple[str, ...]:
        """The words it may be, if it is one of a few."""
        return tuple(
            word for option in _options(self.annotation) if get_origin(option) is Literal for word in get_args(option)
        )

    @property
    def rule(self) -> str:
        """What it must be, in words."""
        return _words(self.annotation, self.metadata)

    @property
    def example(self) -> str:
        """A value one could write."""
        if not self.required and self.default is not None:
            return self.render(self.default)
        says = [mark.example for mark in self.marks if isinstance(mark, Says)]
        if says or self.choices:
            return [*says, *self.choices][0]
        lower, _ = _limits(self.marks)
        return "1" if lower is None else f"{lower[0] + 1:g}"

    @property
    def doc(self) -> str:
        """The docstring under the field."""
        return docs(self.section)[self.attribute]

    def plain(self, value: object) -> object:
        """The value as a file has it: JSON types, durations and sizes with their unit, secrets as stars."""
        if value is None:
            return None
        if self.secret:
            return "***"
        if DURATION_MARK in self.marks:
            assert isinstance(value, float | int)
            return format_duration(float(value))
        if SIZE_MARK in self.marks:
            assert isinstance(value, int)
            return format_size(value)
        if isinstance(value, tuple):
            return list(value)
        return dict(value) if isinstance(value, Mapping) else value

    def render(self, value: object) -> str:
        """The value as one would write it in a file."""
        return flow(self.plain(value))


@cache
def leaves(root: type[Section], prefix: str = "") -> Mapping[str, Leaf]:
    """All keys under a section, in the order they are written."""
    return types.MappingProxyType({leaf.key: leaf for leaf in _walk(root, prefix)})


def sections(root: type[Section], prefix: str = "") -> Iterator[tuple[str, type[Section]]]:
    """All sections under one, each with its dotted key, itself first."""
    yield prefix, root
    for name, field in root.model_fields.items():
        if inner := section_class(field):
            yield from sections(inner, f"{prefix}.{key_of(name)}".lstrip("."))


@cache
def open_sections(root: type[Section]) -> Mapping[str, type[Section]]:
    """Those that take names beside their fields, by key. What such a name may have is the annotation of their extras."""
    return {key: kind for key, kind in sections(root) if kind.model_config.get("extra") == "allow"}


def leaf_of(root: type[Section], key: str) -> Leaf | None:
    """The leaf of a key: a field, or a name beside the fields of an open section."""
    where, _, name = key.rpartition(".")
    kind = None if key in leaves(root) else open_sections(root).get(where)
    return leaves(root).get(key) if kind is None or not name else extra_leaf(kind, key)


def extra_leaf(kind: type[Section], key: str) -> Leaf:
    """That of a name beside an open section's fields."""
    (annotation,) = get_args(inspect.get_annotations(kind)[EXTRA])[1:]
    return Leaf(
        key=key, section=kind, attribute=EXTRA, annotation=annotation, metadata=(), default=None, required=False
    )


def section_class(field: FieldInfo) -> type[Section] | None:
    """The class, if the field is a section and not a leaf."""
    kind = field.annotation
    return kind if isinstance(kind, type) and issubclass(kind, Section) else None


def _walk(root: type[Section], prefix: str) -> Iterator[Leaf]:
    for name, field in root.model_fields.items():
        key = f"{prefix}.{key_of(name)}".lstrip(".")
        if inner := section_class(field):
            yield from _walk(inner, key)
            continue
        yield Leaf(
            key=key,
            section=root,
            attribute=name,
            annotation=field.annotation,
            metadata=tuple(field.metadata),
            default=None if field.is_required() else field.get_default(call_default_factory=True),
            required=field.is_required(),
        )


def _options(annotation: Any) -> tuple[Any, ...]:
    union = get_origin(annotation) in {types.UnionType, typing.Union}
    return get_args(annotation) if union else (annotation,)


def _split(annotation: Any) -> tuple[Any, tuple[object, ...]]:
    if get_origin(annotation) is Annotated:
        base, *marks = get_args(annotation)
        return base, tuple(marks)
    return annotation, ()


_BASES: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "a text",
    SecretStr: "a text",
    type(None): "null",
}


def _words(annotation: Any, metadata: tuple[object, ...] = ()) -> str:
    options = _options(annotation)
    if len(options) > 1:
        return " or ".join(_words(option, metadata) for option in options)
    base, marks = _split(annotation)
    says = [mark.words for mark in metadata + marks if isinstance(mark, Says)]
    if get_origin(base) is Literal:
        return "one of " + ", ".join(get_args(base))
    if get_origin(base) is tuple:
        items = get_args(base)
        inner = _words(items[0])
        text = f"a list of {len(items)} values, each {inner}" if items[-1] is not ... else f"a list, each {inner}"
    elif get_origin(base) is Mapping:
        text = "names with a text each"
    else:
        text = says[0] if says else _BASES[base]
    return text + _bounds(metadata + marks)


def _bounds(marks: tuple[object, ...]) -> str:
    def unit(number: Any) -> str:
        if DURATION_MARK in marks:
            return format_duration(float(number))
        return format_size(int(number)) if SIZE_MARK in marks else flow(number)

    lower, upper = _limits(marks)
    bounds = []
    if lower and not (DURATION_MARK in marks and lower == (0.0, "at least")):  # no duration has a sign anyway
        bounds.append(f"{lower[1]} {unit(lower[0])}")
    if upper:
        bounds.append(f"{upper[1]} {unit(upper[0])}")
    return " " + " and ".join(bounds) if bounds else ""


def _limits(marks: tuple[object, ...]) -> tuple[tuple[float, str] | None, tuple[float, str] | None]:
    """The narrowest lower and upper bound: `Annotated[Seconds, Ge(2)]` carries Seconds' own as well."""
    lower: list[tuple[Any, str]] = [(mark.ge, "at least") for mark in marks if isinstance(mark, Ge)]
    lower += [(mark.gt, "over") for mark in marks if isinstance(mark, Gt)]
    upper: list[tuple[Any, str]] = [(mark.le, "at most") for mark in marks if isinstance(mark, Le)]
    upper += [(mark.lt, "under") for mark in marks if isinstance(mark, Lt)]
    return max(lower, default=None), min(upper, default=None)


@cache
def docs(section: type[Section]) -> Mapping[str, str]:
    """The docstring under each field, read from the source.

    pydantic can collect these itself (`use_attribute_docstrings`), at 6 ms a class on every import of the tree; only
    `config schema` and the tests ever want them.
    """
    found: dict[str, str] = {}
    for kind in reversed(section.__mro__):
        if issubclass(kind, Section) and kind is not Section:
            found |= _docs_in(kind)
    return types.MappingProxyType(found)


def _docs_in(kind: type) -> dict[str, str]:
    module = ast.parse(inspect.getsource(sys.modules[kind.__module__]))
    body = next(node.body for node in module.body if isinstance(node, ast.ClassDef) and node.name == kind.__name__)
    found = {}
    for field, text in pairwise(body):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(text, ast.Expr):
            assert isinstance(text.value, ast.Constant)
            found[field.target.id] = " ".join(str(text.value.value).split())
    return found
