"""Sequences that share prefixes, laid out as a forest so that each shared prefix is computed once. Numpy, no state.

A `PrefixTree` stores every node (one token in one context) once, in preorder: a token comes before all that continue
it, and
what continues it stands together. So node k is an ancestor of node q (or q itself) exactly where k <= q < ends[k],
which is the whole attention mask; the position id of a node is its depth. A causal model then computes at each node
what it would compute at that place of each sequence through it: the prefix is the same, token by token.

What is sampled is not what is computed. Several sequences may train the same node, see `targets`.
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
    """A forest of tokens in preorder; n nodes, s sequences."""

    token_ids: IntArray
    """[n]"""
    positions: IntArray
    """[n]: depth, 0 at the roots. The position ids of the model."""
    ends: IntArray
    """[n]: one behind the last node below. Node q sees node k where k <= q < ends[k]."""
    paths: tuple[IntArray, ...]
    """Of each sequence [its length]: the node of each of its tokens."""

    def __len__(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True, slots=True)
class Branch:
    """A sequence of an explicit forest: the first `branch_at` tokens of sequence `parent`, then `token_ids`."""

    token_ids: Ids
    parent: int | None = None
    branch_at: int = 0


@dataclass(frozen=True, slots=True)
class Targets:
    """The sampled tokens of all sequences of a tree, m in all, sequence by sequence.

    `logits_at` [m] is the node whose logits predict the token; `nodes` [m] the node of the token itself; `token_ids`
    [m] the token; `sequences` [m] and `offsets` [m] say where it stands; `weights` float64 [m] are the shares that the
    copies of one sample have (they sum to 1 for each sample) and go into `normalise.token_weights` as its mask.
    `rows` [r] are the different values of `logits_at`, ascending, and `row_of` [m] points into them: a model needs
    logits at `rows` only.
    """

    logits_at: IntArray
    nodes: IntArray
    token_ids: IntArray
    sequences: IntArray
    offsets: IntArray
    weights: npt.NDArray[np.float64]
    rows: IntArray
    row_of: IntArray

    def __len__(self) -> int:
        return len(self.token_ids)


def shared_prefixes(sequences: Sequence[Ids]) -> tuple[list[int], list[int]]:
    """An order of the sequences in which those that share most are neighbours, and what each shares with the last.

    The order is the lexicographic one of their tokens; the number is the length of the common prefix with the sequence
    before it in that order, 0 for the first. Laying the sequences out in this order shares all that can be shared.
    """
    order = sorted(range(len(sequences)), key=lambda index: np.asarray(sequences[index]).astype(">u4").tobytes())
    common = [0] * len(order)
    for place in range(1, len(order)):
        common[place] = _common(sequences[order[place - 1]], sequences[order[place]])
    return order, common


def pack_sequences(sequences: Sequence[Ids]) -> PrefixTree:
    """The tree of all prefixes that are equal token for token (int arrays, ids from 0 to 2^32 - 1, none empty)."""
    if empty := [index for index, sequence in enumerate(sequences) if len(sequence) == 0]:
        raise ValueError(f"sequences without a token: {empty}")
    order, common = shared_prefixes(sequences)
    return _lay_out(sequences, order, common)


def pack_forest(branches: Sequence[Branch]) -> PrefixTree:
    """The tree that the branches declare: only what they say is shared is shared, even where more tokens are equal.

    One sequence per branch, in the order given. A parent stands before its children in the list; `branch_at` is at
    most the parent's length, and 0 without a parent. Branches without parents are trees of their own: independent
    sequences in one pack. Raises ValueError for a branch that cannot be.
    """
    sequences: list[Ids] = []
    attached: list[tuple[int | None, int]] = []
    for index, branch in enumerate(branches):
        sequences.append(_whole(branches, sequences, index))
        parent, at = branch.parent, branch.branch_at
        # What is left of the parent may be all its own parent's: then the branch hangs there.
        while parent is not None and at <= attached[parent][1]:
            parent = attached[parent][0]
        attached.append((parent, at))
    order = _preorder(attached)
    common = [attached[index][1] if attached[index][0] is not None else 0 for index in order]
    return _lay_out(sequences, order, common)


def unshared(sequences: Sequence[Ids]) -> PrefixTree:
    """The same sequences, packed behind each other with nothing shared."""
    return pack_forest([Branch(sequence) for sequence in sequences])


def visible(tree: PrefixTree) -> BoolArray:
    """The attention mask, bool [n, n]: row q is True at the nodes that q sees, itself among them."""
    index = np.arange(len(tree))
    return (index[None, :] <= index[:, None]) & (index[:, None] < tree.ends[None, :])


def targets(
    tree: PrefixTree,
    loss_masks: Sequence[npt.NDArray[np.integer] | BoolArray],
    *,
    rollouts: Sequence[int] | None = None,
    samples: Sequence[IntArray] | None = None,
) -> Targets:
    """Where the logits of every sampled token are, and what share of its sample it stands for.

    `loss_masks`: of each sequence [its length], not 0 where the token was sampled and is to be trained.

    Which copies are one sample? A response that several branches of one rollout share was sampled once and is trained
    once: each of its k copies gets the weight 1 / k. Two rollouts that sampled the same tokens made two samples, with
    an advantage each: they share the computation, and each keeps its weight of 1. So copies are the same sample where
    they stand on the same node in the same rollout; `rollouts` [s] says whose the sequences are, each its own by
    default. Where one rollout sampled the same tokens twice behind one prompt (best of n), nodes cannot tell the
    copies apart: `samples` then gives each token an id of its sample (int64, of each sequence [its length], read on
    the mask only), and copies are the same where it is.

    Raises ValueError where a mask does not fit, or marks a sequence's first token, which nothing predicts.
    """
    if len(loss_masks) != len(tree.paths):
        raise ValueError(f"{len(loss_masks)} masks for {len(tree.paths)} sequences")
    offsets: list[IntArray] = []
    for index, (path, mask) in enumerate(zip(tree.paths, loss_masks, strict=True)):
        if len(mask) != len(path):
            raise ValueError(f"sequence {index} has {len(path)} tokens, its mask {len(mask)}")
        offsets.append(np.flatnonzero(mask).astype(np.int64))
        if len(offsets[-1]) and offsets[-1][0] == 0:
            raise ValueError(f"the first token of sequence {index} is marked as sampled, but no logits predict it")
    counts = [len(places) for places in offsets]
    nodes = _join([path[places] for path, places in zip(tree.paths, offsets, strict=True)])
    logits_at = _join([path[places - 1] for path, places in zip(tree.paths, offsets, strict=True)])
    owners = np.repeat(np.arange(len(counts)) if rollouts is None else np.asarray(rollouts, dtype=np.int64), counts)
    if samples is None:
        identity = np.stack([owners, nodes], axis=1)
    else:
        identity = _join([ids[places] for ids, places in zip(samples, offsets, strict=True)])[:, None]
    _, inverse, copies = np.unique(identity, axis=0, return_inverse=True, return_counts=True)
    rows, row_of = np.unique(logits_at, return_inverse=True)
    return Targets(
        logits_at=logits_at,
        nodes=nodes,
        token_ids=tree.token_ids[nodes],
        sequences=np.repeat(np.arange(len(counts)), counts),
        offsets=_join(offsets),
        weights=1.0 / copies[inverse.reshape(-1)],
        rows=rows,
        row_of=row_of.reshape(-1),
    )


def _lay_out(sequences: Sequence[Ids], order: Sequence[int], common: Sequence[int]) -> PrefixTree:
    """The tree of sequences taken in `order`, each sharing `common` nodes with the one laid out before it."""
    paths: list[IntArray] = [np.zeros(0, dtype=np.int64)] * len(sequences)
    tokens: list[Ids] = []
    depths: list[IntArray] = []
    ends = np.zeros(sum(len(sequence) for sequence in sequences), dtype=np.int64)
    path, n = np.zeros(0, dtype=np.int64), 0
    for index, shared in zip(order, common, strict=True):
        length = len(sequences[index])
        # Whatever the last sequence has beyond what this one shares is closed: nothing below it will come.
        ends[path[shared:]] = n
        tokens.append(sequences[index][shared:])
        depths.append(np.arange(shared, length, dtype=np.int64))
        path = np.concatenate([path[:shared], np.arange(n, n + length - shared, dtype=np.int64)])
        paths[index] = path
        n += length - shared
    ends[path] = n
    return PrefixTree(_join(tokens), _join(depths), ends[:n], tuple(paths))


def _whole(branches: Sequence[Branch], sequences: Sequence[Ids], index: int) -> Ids:
    """The full sequence of a branch, given those of the branches before it."""
    branch = branches[index]
    if branch.parent is None:
        if branch.branch_at != 0 or len(branch.token_ids) == 0:
            raise ValueError(f"branch {index} has no parent: it begins at 0 and needs tokens of its own")
        return branch.token_ids
    if not 0 <= branch.parent < index:
        raise ValueError(f"branch {index} names parent {branch.parent}, which does not stand before it")
    if not 0 < branch.branch_at <= len(sequences[branch.parent]):
        raise ValueError(
            f"branch {index} leaves its parent at {branch.branch_at}, which has {len(sequences[branch.parent])} tokens"
        )
    return np.concatenate([sequences[branch.parent][: branch.branch_at], branch.token_ids])


def _preorder(attached: Sequence[tuple[int | None, int]]) -> list[int]:
    """Branches so that each shares its prefix with the one before it: of a parent's children, the deepest first."""
    children: dict[int | None, list[int]] = {}
    for index, (parent, _) in enumerate(attached):
        children.setdefault(parent, []).append(index)
    for brood in children.values():
        brood.sort(key=lambda child: attached[child][1], reverse=True)
    order: list[int] = []
    waiting = list(reversed(children.get(None, [])))
    while waiting:
        index = waiting.pop()
        order.append(index)
        waiting.extend(reversed(children.get(index, [])))
    return order


def _common(left: Ids, right: Ids) -> int:
    n = min(len(left), len(right))
    different = np.flatnonzero(np.asarray(left[:n]) != np.asarray(right[:n]))
    return int(different[0]) if len(different) else n


def _join(pieces: Sequence[Ids]) -> IntArray:
    return np.concatenate([np.asarray(piece, dtype=np.int64) for piece in pieces] or [np.zeros(0, dtype=np.int64)])
