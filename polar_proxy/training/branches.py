"""Attention over a tree without an n x n mask: one causal call per branch, over what that branch can see.

A dense mask makes SDPA compare all n * n pairs, most of them only to hide them. Here each run of nodes (a branch up to
where the next one begins) is compared with its own past: the pairs that `packing.tree_cost` counts, up to the half of
each run that is causal. The same numbers up to rounding, on any device, in any dtype that SDPA knows.
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
"""By which a Transformers model is told to use it (`attn_implementation`, `set_attn_implementation`)."""


@dataclass(frozen=True, slots=True)
class TreeSegment:
    """Nodes [start, stop), each the parent of the next; `seen` int64: their ancestors, then the nodes themselves."""

    start: int
    stop: int
    seen: Tensor


def tree_segments(tree: PrefixTree, device: torch.device | str = "cpu") -> list[TreeSegment]:
    """The runs of a tree in the order of its nodes: as many as it has leaves, at most as many as sequences."""
    n = len(tree)
    begins = np.flatnonzero(np.diff(tree.positions, prepend=-1) != 1) if n else np.zeros(0, dtype=np.int64)
    begins = np.union1d(begins, [0][:n])
    path = np.zeros(0, dtype=np.int64)
    found: list[TreeSegment] = []
    for start, stop in zip(begins.tolist(), [*begins[1:].tolist(), n], strict=True):
        path = np.concatenate([path[: tree.positions[start]], np.arange(start, stop)])
        found.append(TreeSegment(start, stop, torch.from_numpy(path).to(device)))
    return found


def tree_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    tree_segments: Sequence[TreeSegment],
    *,
    scale: float | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Attention output [b, heads, n, d] of query [b, heads, n, d], key and value [b, kv heads, n, d].

    `heads` is a multiple of `kv heads`; `scale` is 1 / sqrt(d) by default.
    """
    grouped = query.shape[1] != key.shape[1]
    pieces = []
    for run in tree_segments:
        length, past = run.stop - run.start, len(run.seen) - (run.stop - run.start)
        mask = None
        if past:
            mask = torch.ones(length, past + length, dtype=torch.bool, device=query.device).tril(past)
        pieces.append(
            scaled_dot_product_attention(
                query[:, :, run.start : run.stop],
                key.index_select(2, run.seen),
                value.index_select(2, run.seen),
                attn_mask=mask,
                is_causal=mask is None,
                dropout_p=dropout,
                scale=scale,
                enable_gqa=grouped,
            )
        )
    return torch.cat(pieces, dim=2)


def register_tree_attention() -> str:
    """Make `ATTENTION_NAME` known to Transformers, and return it. Calls of the model then need
    `tree_segments=runs(tree)`."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION_NAME, _for_transformers)
    return ATTENTION_NAME


def _for_transformers(
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
    """Transformers' attention function: heads first in, [b, n, heads, d] out."""
    if tree_segments is None or attention_mask is not None:
        raise ValueError(
            f"attention {ATTENTION_NAME!r} takes `tree_segments` and no mask: it serves training on packed trees only"
        )
    if sliding_window is not None or softcap is not None:
        raise ValueError(f"attention {ATTENTION_NAME!r} has no sliding window and no soft cap; this model needs one")
    if tree_segments[-1].stop != query.shape[2]:
        raise ValueError(
            f"the runs are of a tree of {tree_segments[-1].stop} nodes, the model was given {query.shape[2]}"
        )
    output = tree_attention(query, key, value, tree_segments, scale=scaling, dropout=dropout)
    return output.transpose(1, 2).contiguous(), None
