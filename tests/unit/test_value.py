"""`base.value.dataclass` does what the standard library's does, and later."""

import copy
import dataclasses
import pickle
from collections.abc import Callable, Mapping
from dataclasses import FrozenInstanceError, asdict, field, replace
from functools import cached_property
from typing import Any

import pytest

from elasticrl.base import value
from elasticrl.contract.model import Record, Seat


@value.dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """One that pickle can find."""

    name: str
    more: Mapping[str, int] = field(default_factory=dict)


@pytest.fixture(params=[dataclasses.dataclass, value.dataclass], ids=["theirs", "ours"])
def made(request: pytest.FixtureRequest) -> Callable[..., Any]:
    return request.param


def frozen(made: Callable[..., Any]) -> Any:
    @made(frozen=True, slots=True, kw_only=True)
    class Value:
        """A value."""

        name: str
        size: int = 3
        tags: list[str] = field(default_factory=list)
        note: str = field(default="", compare=False)
        hidden: str = field(default="secret", repr=False)

    return Value


def test_values_compare_and_show_what_their_fields_say(made: Callable[..., Any]) -> None:
    kind = frozen(made)
    one = kind(name="a", tags=["x"])
    assert one == kind(name="a", tags=["x"], note="not compared")
    assert one != kind(name="b", tags=["x"])
    assert one != ("a", 3, ["x"], "", "secret")
    assert repr(one).endswith(".Value(name='a', size=3, tags=['x'], note='')")
    assert asdict(replace(one, size=4)) == {"name": "a", "size": 4, "tags": ["x"], "note": "", "hidden": "secret"}
    assert kind(name="a").tags is not kind(name="a").tags
    assert copy.copy(one) == copy.deepcopy(one) == one


def test_a_frozen_value_is_hashed_by_its_fields_and_cannot_be_changed(made: Callable[..., Any]) -> None:
    kind = frozen(made)
    one = kind(name="a", tags=())
    assert hash(one) == hash(("a", 3, (), "secret"))
    for change in (lambda: setattr(one, "name", "b"), lambda: delattr(one, "name")):
        with pytest.raises(FrozenInstanceError, match="'name'"):
            change()
    with pytest.raises((AttributeError, TypeError)):  # slots
        one.other = 1


def test_a_value_of_many_fields_is_of_its_class_once_it_is_made_and_cannot_be_changed(made: Callable[..., Any]) -> None:
    @made(frozen=True, slots=True, kw_only=True)
    class Many:
        """Of many fields."""

        a: int = 0
        b: int = 0
        c: int = 0
        d: int = 0
        e: int = 0
        f: int = 0
        g: int = 0
        h: list[int] = field(default_factory=list)

    @made(frozen=True, slots=True, kw_only=True)
    class More(Many):
        """And one more."""

        i: int = 0

        def __post_init__(self) -> None:
            assert type(self) is More
            with pytest.raises(FrozenInstanceError, match="'i'"):
                self.i = 1  # type: ignore[misc] # that it is refused

    class Loose(Many):  # of another layout
        pass

    for kind in (Many, More):
        one = kind(a=1, g=7)
        assert type(one) is kind
        assert one == kind(a=1, g=7) != kind(a=1)
        assert (one.a, one.b, one.g, one.h) == (1, 0, 7, [])
        assert one.h is not kind().h
        with pytest.raises(FrozenInstanceError, match="'g'"):
            one.g = 8  # type: ignore[misc] # that it is refused
        with pytest.raises((AttributeError, TypeError)):  # slots
            one.other = 1  # type: ignore[attr-defined] # likewise
    assert Many(a=1) != More(a=1)
    assert Loose(a=2).a == 2


def test_a_value_with_a_dictionary_of_its_own_is_the_same_value() -> None:
    @value.dataclass(frozen=True)
    class Loose:
        name: str
        more: int = 3

        def __post_init__(self) -> None:
            value.unshare(self)

        @cached_property
        def twice(self) -> str:
            return 2 * self.name

    one = Loose("a")
    assert (one, one.twice, vars(one)) == (Loose("a"), "aa", {"name": "a", "more": 3, "twice": "aa"})
    assert replace(one, name="b").twice == "bb"
    with pytest.raises(FrozenInstanceError, match="'name'"):
        one.name = "b"  # type: ignore[misc] # that it is refused


def test_a_wrong_call_is_refused_by_the_name_of_the_class(made: Callable[..., Any]) -> None:
    kind = frozen(made)
    with pytest.raises(TypeError, match=r"Value\.__init__\(\) missing 1 required keyword-only argument: 'name'"):
        kind()
    with pytest.raises(TypeError, match=r"Value\.__init__\(\) takes 1 positional argument but 2 were given"):
        kind("a")
    with pytest.raises(TypeError, match=r"Value\.__init__\(\) got an unexpected keyword argument 'nane'"):
        kind(name="a", nane="b")


def test_what_may_change_has_no_hash_and_takes_positions(made: Callable[..., Any]) -> None:
    @made(slots=True)
    class Open:
        first: int
        second: list[int] = field(default_factory=list)
        total: int = 0

        def __post_init__(self) -> None:
            self.total = self.first + sum(self.second)

    one = Open(1, [2, 3])
    assert (one.total, one == Open(1, [2, 3])) == (6, True)
    one.first = 5
    assert one != Open(1, [2, 3])
    with pytest.raises(TypeError, match="unhashable"):
        hash(one)


def test_a_child_has_its_parents_fields_and_equals_none_of_its_siblings(made: Callable[..., Any]) -> None:
    @made(frozen=True, slots=True, kw_only=True)
    class Event:
        """What happens."""

        now: float

    @made(frozen=True, slots=True, kw_only=True)
    class Seen(Event):
        """It was seen."""

        what: str = ""

    @made(frozen=True, slots=True, kw_only=True)
    class Tick(Event):
        """Nothing was."""

    assert Seen(now=1.0, what="x") == Seen(now=1.0, what="x") != Seen(now=2.0, what="x")
    assert Tick(now=1.0) != Event(now=1.0)
    assert repr(Tick(now=1.0)).endswith("Tick(now=1.0)")
    match Seen(now=1.0, what="x"):
        case Seen(now=now, what=what):
            assert (now, what) == (1.0, "x")


def test_methods_that_a_class_has_written_itself_stay(made: Callable[..., Any]) -> None:
    @made(frozen=True, slots=True, kw_only=True)
    class Own:
        """Its own."""

        name: str

        def __eq__(self, other: object) -> bool:
            return isinstance(other, str) and other == self.name

        def __hash__(self) -> int:
            return 7

        def __repr__(self) -> str:
            return "own"

    @made(slots=True)
    class Hashed:
        name: str

        def __hash__(self) -> int:
            return 8

    assert hash(Hashed("a")) == 8
    assert (Own(name="a") == "a", hash(Own(name="a")), repr(Own(name="a"))) == (True, 7, "own")


def test_a_value_can_be_pickled() -> None:
    one = Kept(name="a", more={"x": 1})
    assert pickle.loads(pickle.dumps(one)) == one


def test_values_can_be_sorted(made: Callable[..., Any]) -> None:
    @made(frozen=True, slots=True, order=True)
    class Ordered:
        number: int
        name: str = ""

    one, two = Ordered(1, "b"), Ordered(2, "a")
    assert sorted([two, one]) == [one, two]
    assert (one < two, one <= two, two > one, two >= one) == (True, True, True, True)
    with pytest.raises(TypeError, match="not supported"):
        one < 1  # noqa: B015


def test_a_value_without_slots_can_keep_what_is_computed_of_it(made: Callable[..., Any]) -> None:
    @made(frozen=True)
    class Computed:
        number: int = 2

        @cached_property
        def square(self) -> int:
            return self.number**2

    one = Computed(3)
    assert (one.square, one, replace(one, number=2).square) == (9, Computed(3), 4)
    assert copy.deepcopy(one) == one
    with pytest.raises(FrozenInstanceError):
        one.number = 4


def test_what_is_itself_and_no_value_is_compared_by_identity(made: Callable[..., Any]) -> None:
    @made(slots=True, eq=False)
    class Thing:
        name: str = "a"

    one = Thing()
    assert one != Thing()
    assert {one: 1}[one] == 1


def test_our_values_are_dataclasses_to_everybody_else() -> None:
    assert dataclasses.is_dataclass(Record)
    assert [one.name for one in dataclasses.fields(Seat)][:3] == ["member", "born", "slots"]


def test_nothing_is_compiled_before_it_is_needed() -> None:
    kind = frozen(value.dataclass)
    before = {name: getattr(kind, name) for name in ("__init__", "__eq__", "__hash__")}
    assert {method.__name__ for method in before.values()} == {"method"}
    one = kind(name="a", tags=())
    assert kind.__init__ is not before["__init__"]
    assert kind.__eq__ is before["__eq__"]
    assert (one == kind(name="a", tags=()), hash(one) == hash(kind(name="a", tags=()))) == (True, True)
    assert kind.__eq__ is not before["__eq__"]
