"""Sequences that begin alike share memory, and none changes another."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polar_proxy.store.buffers import Tokens
from tests.store.records import ids


def test_what_extends_shares() -> None:
    first = Tokens.none().and_then(ids(1, 2, 3))
    opening = first.and_then(ids(4))
    longer = first.and_then(ids(4, 5, 6))  # the opening of an answer, and then the answer
    assert opening.ids.tolist() == [1, 2, 3, 4]
    assert longer.ids.tolist() == [1, 2, 3, 4, 5, 6]
    assert np.shares_memory(opening.ids, longer.ids)
    assert first.and_then(ids(4, 5)).ids.tolist() == [1, 2, 3, 4, 5]


def test_what_goes_on_otherwise_does_not() -> None:
    first = Tokens.none().and_then(ids(1, 2, 3))
    one, other = first.and_then(ids(4)), first.and_then(ids(5))
    assert (one.ids.tolist(), other.ids.tolist()) == ([1, 2, 3, 4], [1, 2, 3, 5])
    assert not np.shares_memory(one.ids, other.ids)


def test_nobody_can_write_into_it() -> None:
    tokens = Tokens.none().and_then(ids(1, 2)).ids
    with pytest.raises(ValueError, match="read-only"):
        tokens[0] = 5


_pieces = st.lists(st.tuples(st.integers(0, 20), st.lists(st.integers(0, 2), max_size=700)), max_size=12)


@settings(max_examples=100, deadline=None)
@given(pieces=_pieces)
def test_whatever_is_added_to_whatever(pieces: list[tuple[int, list[int]]]) -> None:
    made: list[tuple[Tokens, list[int]]] = [(Tokens.none(), [])]
    views = []
    for place, piece in pieces:
        before, expected = made[place % len(made)]
        made.append((before.and_then(np.array(piece, dtype=np.int32)), expected + piece))
        views.append((made[-1][0].ids, made[-1][1]))
    for tokens, expected in made:
        assert (tokens.size, tokens.ids.tolist()) == (len(expected), expected)
    for view, expected in views:  # also those taken before the buffers grew
        assert view.tolist() == expected
