"""Token sequences with common prefixes, stored as a forest in which every shared prefix is computed once.

A `PrefixTree` holds one node for each token in its context, in preorder: a token comes before everything that continues
it, and its continuations are contiguous. Node k is therefore an ancestor of node q (or q itself) exactly when k <= q <
ends[k], which is the whole attention mask; the position id of a node is its depth. At each node a causal model computes
the same values as at that position of every sequence through the node.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]
Ids = npt.NDArray[np.integer]


@dataclass(frozen=True, slots=True)
class PrefixTree:
    """A forest of n tokens in preorder that holds s sequences."""

    token_ids: IntArray
    """[n]"""
    positions: IntArray
    """[n]: depth, 0 at the roots. The model's position ids."""
    ends: IntArray
    """[n]: one past the last descendant. Node q attends to node k when k <= q < ends[k]."""
    paths: tuple[IntArray, ...]
    """For each sequence, the node of each of its tokens."""

    def __len__(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True, slots=True)
class Targets:
    """The m tokens of a tree that enter the loss, sequence by sequence, and where their logits are.

    A model needs to compute logits only at the nodes `rows` [r] (ascending). `row_of` [m] is the index in `rows` of the
    logits that predict each target; `sequences` [m] and `offsets` [m] say which token of which sequence it is.
    """

    token_ids: IntArray
    sequences: IntArray
    offsets: IntArray
    rows: IntArray
    row_of: IntArray

    def __len__(self) -> int:
        return len(self.token_ids)


def sort_by_prefix(sequences: Sequence[Ids]) -> tuple[list[int], list[int]]:
    """Return the lexicographic order of the sequences, and the length of the prefix each shares with the one before.

    Neighbours in this order share the most, so every common prefix is stored once.
    """
    order = sorted(range(len(sequences)), key=lambda index: np.asarray(sequences[index]).astype(">u4").tobytes())
    shared = [0] * len(order)
    for place in range(1, len(order)):
        shared[place] = _common_prefix(sequences[order[place - 1]], sequences[order[place]])
    return order, shared


def build_tree(sequences: Sequence[Ids]) -> PrefixTree:
    """Return the tree in which every prefix that is equal token for token is stored once.

    Sequences are integer arrays with ids from 0 to 2^32 - 1. Raises ValueError for an empty one.
    """
    if empty := [index for index, sequence in enumerate(sequences) if len(sequence) == 0]:
        raise ValueError(f"sequences without a token: {empty}")
    order, shared = sort_by_prefix(sequences)
    paths: list[IntArray] = [np.zeros(0, dtype=np.int64)] * len(sequences)
    tokens: list[Ids] = []
    depths: list[IntArray] = []
    ends = np.zeros(sum(len(sequence) for sequence in sequences), dtype=np.int64)
    path, n = np.zeros(0, dtype=np.int64), 0
    for index, common in zip(order, shared, strict=True):
        length = len(sequences[index])
        # The nodes of the last sequence beyond the common prefix get no further descendants.
        ends[path[common:]] = n
        tokens.append(sequences[index][common:])
        depths.append(np.arange(common, length, dtype=np.int64))
        path = np.concatenate([path[:common], np.arange(n, n + length - common, dtype=np.int64)])
        paths[index] = path
        n += length - common
    ends[path] = n
    return PrefixTree(_concatenate(tokens), _concatenate(depths), ends[:n], tuple(paths))


def find_targets(tree: PrefixTree, masks: Sequence[npt.NDArray[np.integer] | BoolArray]) -> Targets:
    """Return the tokens that `masks` marks (one mask per sequence, of the same length, nonzero at the targets).

    Several sequences may have targets at the same node. Raises ValueError for a mask of another length, and for one
    that marks the first token of a sequence, which no logits predict.
    """
    if len(masks) != len(tree.paths):
        raise ValueError(f"{len(masks)} masks for {len(tree.paths)} sequences")
    offsets: list[IntArray] = []
    for index, (path, mask) in enumerate(zip(tree.paths, masks, strict=True)):
        if len(mask) != len(path):
            raise ValueError(f"sequence {index} has {len(path)} tokens, its mask {len(mask)}")
        offsets.append(np.flatnonzero(mask).astype(np.int64))
        if len(offsets[-1]) and offsets[-1][0] == 0:
            raise ValueError(f"the first token of sequence {index} is marked as sampled, but no logits predict it")
    nodes = _concatenate([path[places] for path, places in zip(tree.paths, offsets, strict=True)])
    predecessors = _concatenate([path[places - 1] for path, places in zip(tree.paths, offsets, strict=True)])
    rows, row_of = np.unique(predecessors, return_inverse=True)
    return Targets(
        token_ids=tree.token_ids[nodes],
        sequences=np.repeat(np.arange(len(offsets)), [len(places) for places in offsets]),
        offsets=_concatenate(offsets),
        rows=rows,
        row_of=row_of.reshape(-1),
    )


def _common_prefix(left: Ids, right: Ids) -> int:
    n = min(len(left), len(right))
    different = np.flatnonzero(np.asarray(left[:n]) != np.asarray(right[:n]))
    return int(different[0]) if len(different) else n


def _concatenate(arrays: Sequence[Ids]) -> IntArray:
    return np.concatenate([np.asarray(array, dtype=np.int64) for array in arrays] or [np.zeros(0, dtype=np.int64)])
