"""Which of several token sequences are the beginning of another one, so that a pass over the longer serves both."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from polar_proxy.types import TokenIds


def cover(sequences: Sequence[TokenIds]) -> list[int]:
    """For each sequence (int32 [n]) the index of the longest one found that begins with it; else its own.

    The causal mask makes the log-probabilities of a prefix those of the same tokens in the longer sequence.
    """
    order = sorted(range(len(sequences)), key=lambda index: -len(sequences[index]))
    within = list(range(len(sequences)))
    whole: list[int] = []
    for index in order:
        found = next((other for other in whole if _begins_with(sequences[other], sequences[index])), None)
        if found is None:
            whole.append(index)
        else:
            within[index] = found
    return within


def _begins_with(longer: TokenIds, shorter: TokenIds) -> bool:
    n = len(shorter)
    # The last token first: histories that only look alike differ late.
    return n == 0 or bool(longer[n - 1] == shorter[n - 1] and np.array_equal(longer[:n], shorter))
