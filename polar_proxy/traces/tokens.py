"""Comparing token sequences. All are int32 [n].

The prompts of a session begin alike, and the store reads them into one buffer (`store/load.py`): where two arrays begin
at the same address nothing needs to be compared, so a turn costs what is new in it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from polar_proxy.types import TokenIds

_STEP = 256


def common_prefix_length(one: TokenIds, other: TokenIds) -> int:
    """How many tokens both begin with alike."""
    size = min(len(one), len(other))
    if size == 0 or _same(one[:size], other[:size]) or share_buffer(one, other):
        return size
    start, step = 0, _STEP
    while start < size:  # in growing steps: what differs mostly differs early
        end = min(start + step, size)
        differs = one[start:end] != other[start:end]
        place = int(differs.argmax())
        if differs[place]:
            return start + place
        start, step = end, step * 8
    return size


def _same(one: TokenIds, other: TokenIds) -> bool:
    """Whether two short runs of equal length are the same tokens; False of long ones. For few tokens several times as
    fast as comparing arrays."""
    return len(one) <= _STEP and one.tobytes() == other.tobytes()


def share_buffer(one: TokenIds, other: TokenIds) -> bool:
    """Whether both begin at the same address of one buffer, so that the shorter is how the longer begins."""
    owner, other_owner = one.base, other.base
    if (one if owner is None else owner) is not (other if other_owner is None else other_owner):
        return False
    same = one.__array_interface__["data"][0] == other.__array_interface__["data"][0]
    return bool(same and one.strides == other.strides)


def begins_with(whole: TokenIds, start: TokenIds) -> bool:
    size = len(start)
    if size == 0:
        return True
    if size > len(whole) or whole[size - 1] != start[-1]:
        return False
    if size <= _STEP:
        return _same(whole[:size], start)
    if share_buffer(whole, start):
        return True
    # The end is compared first: it is where histories that only look alike differ.
    near = max(0, size - _STEP)
    return bool((whole[near:size] == start[near:]).all()) and common_prefix_length(whole[:near], start[:near]) == near


def is_any(ids: TokenIds, wanted: Sequence[int]) -> npt.NDArray[np.bool_]:
    """bool [n]: which of `ids` are among a few wanted ones."""
    found = np.zeros(len(ids), dtype=np.bool_)
    for token in wanted:
        found |= ids == token
    return found
