"""Sequences that begin alike share memory, and none changes another."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polar_proxy.store.buffers import TextPrefix, TokenPrefix
from polar_proxy.store.codec import CONTEXT, CellCodec, bytes_before, low_bytes
from tests.factories import token_ids


def then(before: TokenPrefix, *piece: int) -> TokenPrefix:
    """With a piece as the store has it: in as few bytes as its ids need."""
    return before.and_then(*CellCodec().unpack_ids_bytes(CellCodec().pack_ids(token_ids(*piece))))


def test_what_extends_shares() -> None:
    first = then(TokenPrefix.none(), 1, 2, 3)
    opening = then(first, 4)
    longer = then(first, 4, 5, 6)  # the opening of an answer, and then the answer
    assert opening.ids.tolist() == [1, 2, 3, 4]
    assert longer.ids.tolist() == [1, 2, 3, 4, 5, 6]
    assert np.shares_memory(opening.ids, longer.ids)
    assert then(first, 4, 5).ids.tolist() == [1, 2, 3, 4, 5]


def test_what_goes_on_otherwise_does_not() -> None:
    first = then(TokenPrefix.none(), 1, 2, 3)
    one, other = then(first, 4), then(first, 5)
    assert (one.ids.tolist(), other.ids.tolist()) == ([1, 2, 3, 4], [1, 2, 3, 5])
    assert not np.shares_memory(one.ids, other.ids)


def test_nobody_can_write_into_it() -> None:
    tokens = then(TokenPrefix.none(), 1, 2).ids
    with pytest.raises(ValueError, match="read-only"):
        tokens[0] = 5


_pieces = st.lists(
    st.tuples(st.integers(0, 20), st.lists(st.sampled_from([0, 1, 2, 300, 70_000, 2**31 - 1, -1]), max_size=700)),
    max_size=12,
)


@settings(max_examples=100, deadline=None)
@given(pieces=_pieces)
def test_whatever_is_added_to_whatever(pieces: list[tuple[int, list[int]]]) -> None:
    made: list[tuple[TokenPrefix, list[int]]] = [(TokenPrefix.none(), [])]
    views = []
    for place, piece in pieces:
        before, expected = made[place % len(made)]
        made.append((then(before, *piece), expected + piece))
        views.append((made[-1][0].ids, made[-1][1]))
    for tokens, expected in made:
        assert (tokens.size, tokens.ids.tolist()) == (len(expected), expected)
        for width in (1, 3, 4, 2):
            known = np.array(expected, dtype=np.int32)[-(CONTEXT // width) :]
            assert tokens.low_bytes(width) == low_bytes(known, width)
    for view, expected in views:  # also those taken before the buffers grew
        assert view.tolist() == expected


@given(st.lists(st.tuples(st.integers(0, 20), st.binary(max_size=CONTEXT // 2)), max_size=12))
def test_the_end_of_a_conversation(messages: list[tuple[int, bytes]]) -> None:
    made: list[tuple[TextPrefix, list[bytes]]] = [(TextPrefix.none(), [])]
    for place, message in messages:
        before, above = made[place % len(made)]
        made.append((before.and_then(message), [*above, message]))
    for text, contents in made:
        assert text.end == bytes_before(contents)
