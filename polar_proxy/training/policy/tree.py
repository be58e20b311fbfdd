"""Token sequences with common prefixes, packed as trees in which every shared prefix is computed once.

A `PrefixTree` has one node for each distinct prefix of its sequences, with the last token of that prefix. The nodes are
in preorder: a node comes before its descendants, which are contiguous. So node k is an ancestor of node q (or q itself)
exactly if k <= q < ends[k]. This condition is the whole attention mask; the position id of a node is its depth. At each
node, a causal model computes the same values as at the same position of any sequence that contains the node.

`packing.py` groups the sequences of an update into trees. `tree_attention` works for Transformers decoders that take
`position_ids` and read the past only by attention: a sliding window or a recurrent layer would read neighbours in the
packed tree instead of ancestors.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from polar_proxy.sequences import common_prefix_length

IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]
Ids = npt.NDArray[np.integer]


@dataclass(frozen=True, slots=True)
class PrefixTree:
    """Token sequences merged by their common prefixes: a forest of n nodes in preorder, with one token each."""

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

    `rows` [r]: the nodes at which a model must compute logits, in ascending order. `row_of` [m]: for each target, the
    index in `rows` of the node whose logits predict the target. `sequences` [m] and `offsets` [m]: for each target, the
    index of its sequence, and its position in this sequence.
    """

    token_ids: IntArray
    sequences: IntArray
    offsets: IntArray
    rows: IntArray
    row_of: IntArray

    def __len__(self) -> int:
        return len(self.token_ids)


def sort_by_prefix(sequences: Sequence[Ids]) -> tuple[list[int], list[int]]:
    """Return the lexicographic order of the sequences. For each sequence in this order, also return the length of the
    prefix that it shares with the sequence before.

    Neighbours in this order have the longest common prefixes, so every common prefix is stored once.
    """
    order = sorted(range(len(sequences)), key=lambda index: np.asarray(sequences[index]).astype(">u4").tobytes())
    shared = [0] * len(order)
    for place in range(1, len(order)):
        shared[place] = common_prefix_length(sequences[order[place - 1]], sequences[order[place]])
    return order, shared


def build_tree(sequences: Sequence[Ids]) -> PrefixTree:
    """Return the tree in which every prefix that is equal token for token is stored once.

    Sequences are integer arrays with ids from 0 to 2^32 - 1. Raises ValueError for an empty sequence.
    """
    if empty := [index for index, sequence in enumerate(sequences) if len(sequence) == 0]:
        raise ValueError(f"the sequences with these indices are empty: {empty}")
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
    """Return the tokens that `masks` marks as targets.

    `masks`: one for each sequence, as long as the sequence, nonzero at the targets. Several sequences may have targets
    at the same node. Raises ValueError for a wrong number of masks, for a mask of another length, and for a mask that
    marks the first token of a sequence, because no logits predict this token.
    """
    if len(masks) != len(tree.paths):
        raise ValueError(f"{len(masks)} masks for {len(tree.paths)} sequences")
    offsets: list[IntArray] = []
    for index, (path, mask) in enumerate(zip(tree.paths, masks, strict=True)):
        if len(mask) != len(path):
            raise ValueError(f"sequence {index} has {len(path)} tokens, its mask {len(mask)}")
        offsets.append(np.flatnonzero(mask).astype(np.int64))
        if len(offsets[-1]) and offsets[-1][0] == 0:
            raise ValueError(f"the mask marks the first token of sequence {index}, but no logits predict it")
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


# Log-probabilities

ENTROPY_ROWS = 256


@dataclass(frozen=True, slots=True)
class TemperatureScores:
    """The targets that share one temperature, and the logits for them, divided by this temperature."""

    targets: Tensor
    """int64 [k]: indices of the targets."""
    scores: Tensor
    """[r', V]: logits / temperature, at least float32, of the r' rows that these targets need."""
    row_of: Tensor
    """int64 [k]: the row in `scores` of each target."""


def by_temperature(logits: Tensor, targets: Targets, temperatures: Tensor) -> Iterator[TemperatureScores]:
    """Yield the scaled logits for each temperature of the targets. Usually all targets have the same temperature."""
    row_of = torch.from_numpy(targets.row_of)
    for temperature in torch.unique(temperatures).tolist():
        here = torch.nonzero(temperatures == temperature).squeeze(1)
        rows, own_row_of = torch.unique(row_of[here], return_inverse=True)
        scores = logits if len(rows) == len(logits) else logits[rows.to(logits.device)]
        scores = scores.to(torch.promote_types(logits.dtype, torch.float32))
        if temperature != 1.0:
            scores = scores / temperature
        yield TemperatureScores(here.to(logits.device), scores, own_row_of.to(logits.device))


def target_logprobs(logits: Tensor, targets: Targets, temperatures: Tensor) -> Tensor:
    """Return log softmax(logits / temperature) at each target [m], at least float32, with gradient.

    `logits` [r, V] are the logits at `targets.rows`, as a Transformers model returns them for `logits_to_keep=rows`;
    `temperatures` [m]. Each row is normalised once for each of its temperatures, however many targets it has.
    """
    if logits.shape[0] != len(targets.rows):
        raise ValueError(f"{logits.shape[0]} rows of logits for {len(targets.rows)} rows of targets")
    token_ids = torch.from_numpy(targets.token_ids).to(logits.device)
    logprobs = torch.zeros(len(targets), dtype=torch.promote_types(logits.dtype, torch.float32), device=logits.device)
    for part in by_temperature(logits, targets, temperatures):
        values = part.scores[part.row_of, token_ids[part.targets]] - torch.logsumexp(part.scores, dim=-1)[part.row_of]
        logprobs = logprobs.index_add(0, part.targets, values)
    return logprobs


def entropy_of_rows(scores: Tensor) -> Tensor:
    """Return the entropy of softmax(scores) for each row of `scores` [r, V], in nats [r].

    Few rows are computed at a time, because the whole would need the memory of `scores` three times more.
    """

    def entropy(rows: Tensor) -> Tensor:
        log_softmax = torch.log_softmax(rows, dim=-1)
        return -(log_softmax.exp() * log_softmax).sum(dim=-1)

    return torch.cat([entropy(rows) for rows in scores.split(ENTROPY_ROWS)])


# Attention

ATTENTION_NAME = "polar_tree"
"""The name under which Transformers finds `tree_attention` (`attn_implementation`, `set_attn_implementation`)."""


@dataclass(frozen=True, slots=True)
class TreeSegment:
    """A chain of nodes [start, stop) in a tree: each node is the parent of the next.

    `visible`, int64: the ancestors of node `start`, then the nodes themselves.
    """

    start: int
    stop: int
    visible: Tensor


def split_into_segments(tree: PrefixTree, device: torch.device | str = "cpu") -> list[TreeSegment]:
    """Return the segments of a tree in the order of its nodes: one for each leaf."""
    n = len(tree)
    starts = np.flatnonzero(np.diff(tree.positions, prepend=-1) != 1) if n else np.zeros(0, dtype=np.int64)
    starts = np.union1d(starts, [0][:n])
    path = np.zeros(0, dtype=np.int64)
    segments: list[TreeSegment] = []
    for start, stop in zip(starts.tolist(), [*starts[1:].tolist(), n], strict=True):
        path = np.concatenate([path[: tree.positions[start]], np.arange(start, stop)])
        segments.append(TreeSegment(start, stop, torch.from_numpy(path).to(device)))
    return segments


def register_tree_attention() -> str:
    """Register `tree_attention` with Transformers and return its name. The model then needs `tree_segments` in every
    call."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION_NAME, tree_attention)
    return ATTENTION_NAME


def tree_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    tree_segments: Sequence[TreeSegment] | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Compute the attention over a prefix tree without an n x n mask, in Transformers' interface.

    query: [b, heads, n, d]; key and value: [b, kv heads, n, d]; output: [b, n, heads, d].

    A dense mask would make SDPA compare all n * n pairs and hide most of them. Here each segment is compared with its
    own past only, in one causal call. The result is the same up to rounding, on every device and in every dtype that
    SDPA supports.
    """
    if tree_segments is None or attention_mask is not None:
        raise ValueError(
            f"attention {ATTENTION_NAME!r} needs `tree_segments` and takes no mask: it is only for training on packed "
            "trees"
        )
    if sliding_window is not None or softcap is not None:
        raise ValueError(
            f"attention {ATTENTION_NAME!r} has no sliding window and no soft cap; this model needs one of them"
        )
    if tree_segments[-1].stop != query.shape[2]:
        raise ValueError(
            f"`tree_segments` cover {tree_segments[-1].stop} nodes, but the model was given {query.shape[2]} tokens"
        )
    outputs = []
    for segment in tree_segments:
        length = segment.stop - segment.start
        past = len(segment.visible) - length
        mask = None
        if past:
            mask = torch.ones(length, past + length, dtype=torch.bool, device=query.device).tril(past)
        outputs.append(
            scaled_dot_product_attention(
                query[:, :, segment.start : segment.stop],
                key.index_select(2, segment.visible),
                value.index_select(2, segment.visible),
                attn_mask=mask,
                is_causal=mask is None,
                dropout_p=dropout,
                scale=scaling,
                enable_gqa=query.shape[1] != key.shape[1],
            )
        )
    return torch.cat(outputs, dim=2).transpose(1, 2).contiguous(), None


def _concatenate(arrays: Sequence[Ids]) -> IntArray:
    return np.concatenate([np.asarray(array, dtype=np.int64) for array in arrays] or [np.zeros(0, dtype=np.int64)])
