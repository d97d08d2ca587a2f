"""A record is what a frozen dataclass is."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from frameshard.records import record


@record
class Point:
    """A point."""

    x: int
    tags: tuple[str, ...] = ()
    key: str = dataclasses.field(default="", repr=False)
    note: str = dataclasses.field(default="", repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "x", int(self.x))


@record
class Place(Point):
    """A point with a height and a text of its own."""

    z: list[int] = dataclasses.field(default_factory=list)

    def __repr__(self) -> str:
        return "a place"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mark(Point):
    """A point of a program that has no records."""

    name: str


def test_it_has_the_methods_of_a_frozen_dataclass() -> None:
    assert (
        str(inspect.signature(Point))
        == "(x: 'int', tags: 'tuple[str, ...]' = (), key: 'str' = '', note: 'str' = '') -> None"
    )
    point = Point("3", key="secret", note="mine")  # type: ignore[arg-type]
    assert repr(point) == "Point(x=3, tags=())"
    assert (point, hash(point)) == (Point(3, (), "secret"), hash(Point(3, (), "secret")))
    assert point not in (Point(3), Place(3, (), "secret"), (3, (), "secret"))
    assert dataclasses.asdict(dataclasses.replace(point, x=4)) == {
        "x": 4,
        "tags": (),
        "key": "secret",
        "note": "mine",
    }
    assert copy.copy(point) == pickle.loads(pickle.dumps(point)) == point
    assert repr(Mark(1, name="a")) == "Mark(x=1, tags=(), name='a')"
    place = Place(1, z=[2])
    assert repr(place) == "a place"
    assert (
        [field.name for field in dataclasses.fields(Place)]
        == list(Place.__match_args__)
        == ["x", "tags", "key", "note", "z"]
    )
    assert place.z is not Place(1).z is not Place(1).z


def test_it_does_not_change() -> None:
    point = Point(1)
    mark = Mark(1, name="a")
    changes: list[Callable[[], Any]] = [
        lambda: setattr(point, "x", 2),
        lambda: setattr(point, "other", 2),
        lambda: delattr(point, "x"),
        lambda: setattr(mark, "x", 2),
    ]
    for change in changes:
        with pytest.raises(dataclasses.FrozenInstanceError):
            change()
    assert vars(point) == {"x": 1, "tags": (), "key": "", "note": ""}


@pytest.mark.parametrize(
    ("values", "named", "reason"),
    [
        ((), {}, "missing 1 required positional argument: 'x'"),
        ((1,), {"y": 1}, "got an unexpected keyword argument 'y'"),
    ],
)
def test_wrong_arguments_are_named(values: tuple[Any, ...], named: dict[str, Any], reason: str) -> None:
    with pytest.raises(TypeError, match=rf"Point.__init__\(\) {reason}"):
        Point(*values, **named)


def test_threads_make_the_first_ones() -> None:
    with ThreadPoolExecutor(8) as threads:
        for _ in range(50):
            cls = record(type("Made", (), {"__annotations__": {"x": int, "y": int}, "y": 2}))
            assert {each.x + each.y for each in threads.map(cls, [1] * 8)} == {3}
