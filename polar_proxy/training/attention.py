"""Attention over a prefix tree without an n x n mask: one causal attention call per tree segment, over the visible
nodes.

A dense mask makes SDPA compare all n * n pairs and hide most of them. Here each segment (a branch up to the node at
which the next one begins) is compared with its own past only. The result is the same up to rounding, on every device
and in every dtype that SDPA supports.

It works for Transformers decoders that take `position_ids` and read the past only by attention: a sliding window or a
recurrent layer would read neighbours in the packed tree instead of ancestors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from polar_proxy.training.tree import PrefixTree

ATTENTION_NAME = "polar_tree"
"""The name under which Transformers finds it (`attn_implementation`, `set_attn_implementation`)."""


@dataclass(frozen=True, slots=True)
class TreeSegment:
    """Nodes [start, stop), each the parent of the next. `visible` int64: their ancestors, then the nodes themselves."""

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


def tree_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segments: Sequence[TreeSegment],
    *,
    scale: float | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Return the attention output [b, heads, n, d] of query [b, heads, n, d], key and value [b, kv heads, n, d].

    `heads` is a multiple of `kv heads`; `scale` defaults to 1 / sqrt(d).
    """
    grouped = query.shape[1] != key.shape[1]
    outputs = []
    for segment in segments:
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
                scale=scale,
                enable_gqa=grouped,
            )
        )
    return torch.cat(outputs, dim=2)


def register_tree_attention() -> str:
    """Register this attention with Transformers and return its name. The model then needs `tree_segments` in every
    call."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION_NAME, _transformers_attention)
    return ATTENTION_NAME


def _transformers_attention(
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
    """Adapt `tree_attention` to Transformers' interface, which takes [b, heads, n, d] and returns [b, n, heads, d]."""
    if tree_segments is None or attention_mask is not None:
        raise ValueError(
            f"attention {ATTENTION_NAME!r} needs `tree_segments` and takes no mask: it is only for training on packed "
            "trees"
        )
    if sliding_window is not None or softcap is not None:
        raise ValueError(f"attention {ATTENTION_NAME!r} has no sliding window and no soft cap; this model needs one")
    if tree_segments[-1].stop != query.shape[2]:
        raise ValueError(
            f"the segments are of a tree of {tree_segments[-1].stop} nodes, the model was given {query.shape[2]}"
        )
    output = tree_attention(query, key, value, tree_segments, scale=scaling, dropout=dropout)
    return output.transpose(1, 2).contiguous(), None
