"""The bound of `Bounded`, and which of its values go."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from polar_proxy.bounded import Bounded


def test_what_was_used_least_recently_goes_first() -> None:
    known = Bounded[str, int](3)
    for key in "abc":
        known.put(key, ord(key))
    assert known.get("a") == ord("a")  # used again: now "b" is the oldest
    known.put("d", 4)
    assert [key for key in "abcd" if known.get(key) is not None] == ["a", "c", "d"]


def test_sizes_are_counted() -> None:
    known = Bounded[str, str](10)
    known.put("a", "A", 4)
    known.put("b", "B", 4)
    known.put("a", "A2", 6)  # in place of the 4, not beside them
    assert (known.get("a"), known.get("b")) == ("A2", "B")
    known.put("c", "C", 5)  # "a" and "b" are 10
    assert (known.get("a"), known.get("b"), known.get("c")) == (None, "B", "C")


def test_one_that_is_too_large_is_not_kept_and_pushes_nothing_out() -> None:
    known = Bounded[str, str](10)
    known.put("a", "A", 4)
    known.put("b", "B", 11)
    assert (known.get("a"), known.get("b")) == ("A", None)
    known.put("a", "too large", 11)  # the old value is not the key's any more
    assert known.get("a") is None


def test_forgetting_all_gives_all_the_room_back() -> None:
    known = Bounded[str, str](10)
    known.put("a", "A", 10)
    known.forget_all()
    assert known.get("a") is None
    known.put("b", "B", 10)
    assert known.get("b") == "B"


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 12))))
def test_never_more_than_its_capacity(puts: list[tuple[int, int]]) -> None:
    known = Bounded[int, int](10)
    for number, (key, size) in enumerate(puts):
        known.put(key, number, size)
        kept = {key: value for key in range(6) if (value := known.get(key)) is not None}
        assert sum(puts[value][1] for value in kept.values()) <= 10
        assert all(puts[value][0] == key for key, value in kept.items())
        assert (key in kept) == (size <= 10)
