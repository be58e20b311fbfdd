"""A memory with a bound: what was used least recently is forgotten first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Bounded(Generic[K, V]):
    """Values by key, each of a size (bytes, or 1 to count them), `capacity` in all. Used by one thread at a time.

    One that is larger than `capacity` is not kept, and pushes nothing else out. Only for values that can be had again.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._size = 0
        self._known: OrderedDict[K, tuple[V, int]] = OrderedDict()

    def get(self, key: K) -> V | None:
        """None: never put, or forgotten."""
        found = self._known.get(key)
        if found is None:
            return None
        self._known.move_to_end(key)
        return found[0]

    def put(self, key: K, value: V, size: int = 1) -> None:
        """In place of what the key had before."""
        if (old := self._known.pop(key, None)) is not None:
            self._size -= old[1]
        if size > self._capacity:
            return
        self._known[key] = (value, size)
        self._size += size
        while self._size > self._capacity:
            self._size -= self._known.popitem(last=False)[1][1]

    def forget_all(self) -> None:
        self._known.clear()
        self._size = 0
