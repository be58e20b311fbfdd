"""Token sequences with a common beginning share memory and never change each other."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polar_proxy.store.encoding.cells import CONTEXT, CellCodec, TokenPrefix, low_bytes
from tests.factories import token_ids

pytestmark = pytest.mark.slow


def extend(before: TokenPrefix, *piece: int) -> TokenPrefix:
    """Extend a sequence by a piece as it is stored: in as few bytes as its ids need."""
    return before.extended(*CellCodec().unpack_id_bytes(CellCodec().pack_ids(token_ids(*piece))))


def test_extensions_share_memory() -> None:
    first = extend(TokenPrefix.empty(), 1, 2, 3)
    opening = extend(first, 4)
    longer = extend(first, 4, 5, 6)  # the opening of an answer, then the answer
    assert opening.ids.tolist() == [1, 2, 3, 4]
    assert longer.ids.tolist() == [1, 2, 3, 4, 5, 6]
    assert np.shares_memory(opening.ids, longer.ids)
    assert extend(first, 4, 5).ids.tolist() == [1, 2, 3, 4, 5]


def test_different_continuations_do_not_share_memory() -> None:
    first = extend(TokenPrefix.empty(), 1, 2, 3)
    one, other = extend(first, 4), extend(first, 5)
    assert (one.ids.tolist(), other.ids.tolist()) == ([1, 2, 3, 4], [1, 2, 3, 5])
    assert not np.shares_memory(one.ids, other.ids)


def test_arrays_are_read_only() -> None:
    tokens = extend(TokenPrefix.empty(), 1, 2).ids
    with pytest.raises(ValueError, match="read-only"):
        tokens[0] = 5


_pieces = st.lists(
    st.tuples(st.integers(0, 20), st.lists(st.sampled_from([0, 1, 2, 300, 70_000, 2**31 - 1, -1]), max_size=700)),
    max_size=12,
)


@settings(max_examples=100, deadline=None)
@given(pieces=_pieces)
def test_any_extensions_keep_all_sequences(pieces: list[tuple[int, list[int]]]) -> None:
    made: list[tuple[TokenPrefix, list[int]]] = [(TokenPrefix.empty(), [])]
    views = []
    for place, piece in pieces:
        before, expected = made[place % len(made)]
        made.append((extend(before, *piece), expected + piece))
        views.append((made[-1][0].ids, made[-1][1]))
    for tokens, expected in made:
        assert (tokens.size, tokens.ids.tolist()) == (len(expected), expected)
        for width in (1, 3, 4, 2):
            known = np.array(expected, dtype=np.int32)[-(CONTEXT // width) :]
            assert tokens.low_bytes(width) == low_bytes(known, width)
    for view, expected in views:  # including views from before the buffers grew
        assert view.tolist() == expected
