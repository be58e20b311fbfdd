"""Key and value tensors: the slots of the running batch, the rows being prefilled, and the rows kept for reuse.

Invariant: the first `length` positions of a row hold the keys and values of exactly the tokens that stand beside it,
made by the weights now loaded. Whatever lies behind is finite (never NaN), so a mask is enough to hide it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers.cache_utils import Cache

from polar_proxy.types import TokenIds

MIN_REUSE = 16
"""Fewer common tokens than this are not worth looking up or keeping."""


@dataclass(frozen=True, slots=True)
class KVShape:
    """Size of one token's keys and values: `layers` x 2 x `heads` x `head_dim` numbers of `dtype` on `device`."""

    layers: int
    heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device

    def zeros(self, rows: int, capacity: int) -> torch.Tensor:
        """[layers, 2, rows, heads, capacity, head_dim]. Zeroed, because a masked NaN would still poison a softmax
        times V; on CPU the pages are only committed when they are touched."""
        size = (self.layers, 2, rows, self.heads, capacity, self.head_dim)
        return torch.zeros(size, dtype=self.dtype, device=self.device)


def grown(capacity: int, need: int, limit: int) -> int:
    """The next capacity for `need` positions: doubles, so that growing costs O(1) per token."""
    while capacity < need:
        capacity *= 2
    return max(min(capacity, limit), need)


class PositionedCache(Cache):  # type: ignore[misc]  # transformers has no stubs
    """A Cache over rows of a buffer, whose `update` writes each row's new keys at that row's own position.

    `data` [layers, 2, rows, heads, capacity, head_dim]; `start` is one int for a single row that gets a chunk, or an
    int64 tensor [rows] of positions when each row gets one token. `length` is how far attention may look.
    """

    def __init__(self, data: torch.Tensor, start: int | torch.Tensor, length: int) -> None:
        super().__init__(layers=[])
        self._data = data
        self._start = start
        self._length = length
        if isinstance(start, torch.Tensor):
            self._rows = torch.arange(data.shape[2], device=data.device)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """key_states and value_states [rows, heads, new, head_dim] -> both [rows, heads, length, head_dim]."""
        keys, values = self._data[layer_idx]
        if isinstance(self._start, int):
            new = key_states.shape[2]
            keys[:, :, self._start : self._start + new] = key_states
            values[:, :, self._start : self._start + new] = value_states
        else:
            keys[self._rows, :, self._start] = key_states[:, :, 0]
            values[self._rows, :, self._start] = value_states[:, :, 0]
        return keys[:, :, : self._length], values[:, :, : self._length]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return int(self._start) if isinstance(self._start, int) else self._length - 1

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self._length, 0


class SequenceKV:
    """Keys and values of one sequence, on their own: `data` [layers, 2, 1, heads, capacity, head_dim]."""

    __slots__ = ("data",)

    def __init__(self, shape: KVShape, capacity: int) -> None:
        self.data = shape.zeros(1, capacity)

    def take(self, other: torch.Tensor, length: int) -> None:
        """Copy the first `length` positions of `other` [layers, 2, 1, heads, >= length, head_dim]."""
        self.data[..., :length, :] = other[..., :length, :]


class BatchKV:
    """The rows of the running batch, in one buffer: rows 0..n-1 are in use, n is the caller's to know."""

    def __init__(self, shape: KVShape, rows: int, limit: int, capacity: int = 1024) -> None:
        self._shape = shape
        self._rows = rows
        self._limit = limit
        self._initial = min(capacity, limit)
        self.data = shape.zeros(rows, self._initial)

    def row(self, slot: int) -> torch.Tensor:
        """A view of one slot: [layers, 2, 1, heads, capacity, head_dim]."""
        return self.data[:, :, slot : slot + 1]

    def put(self, slot: int, other: torch.Tensor, length: int) -> None:
        self.row(slot)[..., :length, :] = other[..., :length, :]

    def fit(self, need: int, lengths: Sequence[int]) -> None:
        """Make room for `need` positions in every slot; `lengths` are those of the slots in use."""
        capacity = self.data.shape[-2]
        if need <= capacity:
            return
        old, self.data = self.data, self._shape.zeros(self._rows, grown(capacity, need, self._limit))
        for slot, length in enumerate(lengths):
            self.put(slot, old[:, :, slot : slot + 1], length)

    def shrink(self) -> None:
        """Give memory back after a long sequence; only when no slot is in use."""
        if self.data.shape[-2] > 8 * self._initial:
            self.data = self._shape.zeros(self._rows, self._initial)


def common_prefix(one: TokenIds, two: TokenIds) -> int:
    """Number of equal leading tokens of two int32 arrays."""
    length = min(len(one), len(two))
    differ = one[:length] != two[:length]
    first = int(differ.argmax()) if length else 0
    return first if length and differ[first] else length


@dataclass(frozen=True, slots=True)
class _CachedPrefix:
    tokens: TokenIds
    data: torch.Tensor


class PrefixCache:
    """Rows of finished sequences, most recently used last, at most `limit_bytes` of them.

    A row that is a prefix of a newer one is dropped, so that a session keeps one row and not one for each turn.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit = limit_bytes
        self._rows: OrderedDict[int, _CachedPrefix] = OrderedDict()
        self._next = 0
        self.nbytes = 0

    def __len__(self) -> int:
        return len(self._rows)

    def clear(self) -> None:
        self._rows.clear()
        self.nbytes = 0

    def keep(self, tokens: TokenIds, data: torch.Tensor) -> None:
        """Copy the row `data` [layers, 2, 1, heads, >= n, head_dim] of the n `tokens`."""
        length = len(tokens)
        size = data[..., :length, :].nbytes
        if length < MIN_REUSE or size > self._limit:
            return
        for key, row in list(self._rows.items()):
            common = common_prefix(row.tokens, tokens)
            if common == length:  # already covered by a row that is at least as long
                self._rows.move_to_end(key)
                return
            if common == len(row.tokens):
                self._drop(key)
        while self._rows and self.nbytes + size > self._limit:
            self._drop(next(iter(self._rows)))
        kept = data[..., :length, :].clone(memory_format=torch.contiguous_format)
        self._rows[self._next] = _CachedPrefix(tokens, kept)
        self._next += 1
        self.nbytes += kept.nbytes

    def find(self, tokens: TokenIds) -> tuple[int, torch.Tensor | None]:
        """The longest common prefix of `tokens` with a kept row: its length, and that row's tensor."""
        best, best_key = 0, None
        for key, row in self._rows.items():
            common = common_prefix(row.tokens, tokens)
            if common > best:
                best, best_key = common, key
        if best_key is None or best < MIN_REUSE:
            return 0, None
        self._rows.move_to_end(best_key)
        return best, self._rows[best_key].data

    def _drop(self, key: int) -> None:
        self.nbytes -= self._rows.pop(key).data.nbytes


def ids_array(tokens: Sequence[int]) -> TokenIds:
    return np.asarray(tokens, dtype=np.int32)
