"""The comparison of token sequences."""

from __future__ import annotations

import numpy as np
import pytest

from polar_proxy.sequences import common_prefix_length


@pytest.mark.parametrize(
    ("one", "other", "length"),
    [([], [1], 0), ([1, 2, 3], [1, 2], 2), ([1, 2, 3], [1, 9, 3], 1), ([1], [2], 0), ([4, 5], [4, 5], 2)],
)
def test_common_prefix_ends_at_the_first_difference(one: list[int], other: list[int], length: int) -> None:
    first, second = np.array(one, dtype=np.int32), np.array(other, dtype=np.int32)
    assert common_prefix_length(first, second) == common_prefix_length(second, first) == length


@pytest.mark.parametrize("place", [0, 63, 64, 65, 999, 50_000, 99_999])
def test_common_prefix_of_long_sequences(place: int) -> None:
    one = np.arange(100_000, dtype=np.int32)
    other = one.copy()
    other[place] = -1
    assert common_prefix_length(one, other) == place
    assert common_prefix_length(one, one[:place]) == place, "a part of the same buffer"
