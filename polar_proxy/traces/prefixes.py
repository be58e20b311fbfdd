"""Find the prefixes of a token sequence in a table of many sequences that grow.

The hash of a sequence t is the sum of t[i] * B^(i+1) modulo 2^64. When a sequence grows, only the terms of the new
tokens are added to its hash. One cumulative sum gives the hashes of all prefixes of a sequence.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt

from polar_proxy.types import TokenIds

_BASE = 0x9E3779B97F4A7C15
"""An odd number with evenly spread bits."""
_FEW = 32
"""Up to this many sequences are compared one by one, because that is faster than hashing a long prompt."""


@lru_cache(maxsize=64)
def _powers_of_base(count: int) -> npt.NDArray[np.uint64]:
    return np.cumprod(np.full(count, _BASE, np.uint64), dtype=np.uint64)


def _terms(ids: TokenIds, start: int) -> npt.NDArray[np.uint64]:
    """Return the terms of the hash for tokens at the positions from `start` on."""
    end = start + len(ids)
    powers = _powers_of_base(1 << end.bit_length())[start:end]
    return ids.astype(np.uint64) * powers


class PrefixTable:
    """The length and hash of each numbered token sequence, to find those that are prefixes of another sequence."""

    def __init__(self) -> None:
        self._count = 0
        self._sizes = np.zeros(_FEW, np.int64)
        self._hashes = np.zeros(_FEW, np.uint64)

    def extend(self, number: int, piece: TokenIds) -> None:
        """Append tokens to the sequence with this number. The lowest unused number starts a new sequence."""
        if number == len(self._sizes):
            self._sizes = np.concatenate([self._sizes, np.zeros_like(self._sizes)])
            self._hashes = np.concatenate([self._hashes, np.zeros_like(self._hashes)])
        self._count = max(self._count, number + 1)
        here = slice(number, number + 1)
        self._hashes[here] += _terms(piece, int(self._sizes[number])).sum(dtype=np.uint64)
        self._sizes[here] += len(piece)

    def candidates(self, ids: TokenIds) -> list[int]:
        """Return the numbers of all sequences that are prefixes of `ids`.

        The result may contain numbers of sequences that are not prefixes, so the caller must compare the tokens.
        """
        if self._count <= _FEW:
            return list(range(self._count))
        sizes, hashes = self._sizes[: self._count], self._hashes[: self._count]
        (fitting,) = np.nonzero(sizes <= len(ids))
        of_beginnings = np.cumsum(_terms(ids, 0), dtype=np.uint64)
        found: list[int] = fitting[of_beginnings[sizes[fitting] - 1] == hashes[fitting]].tolist()
        return found
