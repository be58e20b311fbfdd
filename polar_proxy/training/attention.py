"""A tree as a model wants it: inputs, the mask for SDPA or FlexAttention, log-probabilities of its targets.

Works with Transformers decoders that take `position_ids` and a ready-made 4-D mask (or `BlockMask`), and that look
back only by attention: a sliding window or a recurrent layer would see packed neighbours instead of ancestors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from polar_proxy.training.tree import PrefixTree, Targets, visible


def boolean_mask(tree: PrefixTree, device: torch.device | str = "cpu") -> Tensor:
    """bool [1, 1, n, n], True where a query may look: for `scaled_dot_product_attention`."""
    return torch.from_numpy(visible(tree)).to(device)[None, None]


def additive_mask(tree: PrefixTree, dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
    """The same as numbers [1, 1, n, n], 0 or the dtype's lowest: for eager attention, which adds it to the scores."""
    hidden = ~boolean_mask(tree, device)
    return torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(hidden, torch.finfo(dtype).min)


def mask_mod(ends: Tensor) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """The mask as FlexAttention's function of (batch, head, query, key). `ends` is `PrefixTree.ends` on the device."""

    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (query < ends[key])

    return sees


def block_mask(tree: PrefixTree, device: torch.device | str) -> Any:
    """FlexAttention's `BlockMask` of the tree: blocks between branches are never computed. Memory O((n / 128)^2).

    Raises RuntimeError where this PyTorch has no FlexAttention.
    """
    try:
        from torch.nn.attention.flex_attention import create_block_mask
    except ImportError as error:
        raise RuntimeError("FlexAttention needs PyTorch 2.5 or newer; use `boolean_mask` with SDPA") from error
    ends = torch.from_numpy(tree.ends).to(device)
    return create_block_mask(mask_mod(ends), None, None, len(tree), len(tree), device=device)


def model_inputs(tree: PrefixTree, mask: Any, device: torch.device | str = "cpu") -> dict[str, Any]:
    """`input_ids` and `position_ids` int64 [1, n] and the given mask, by the names of Transformers."""
    return {
        "input_ids": torch.from_numpy(tree.token_ids).to(device)[None],
        "position_ids": torch.from_numpy(tree.positions).to(device)[None],
        "attention_mask": mask,
        "use_cache": False,
    }


def target_logprobs(logits: Tensor, wanted: Targets, *, temperature: float = 1.0) -> Tensor:
    """log softmax(logits / temperature) at each target [m], float32 at least, with gradient.

    `logits` [r, V] stand at `wanted.rows` (what a Transformers model returns for `logits_to_keep=rows`). Each row is
    normalised once, however many targets it has.
    """
    if logits.shape[0] != len(wanted.rows):
        raise ValueError(f"{logits.shape[0]} rows of logits for {len(wanted.rows)} rows of targets")
    scores = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
    row_of = torch.from_numpy(wanted.row_of).to(logits.device)
    token_ids = torch.from_numpy(wanted.token_ids).to(logits.device)
    return scores[row_of, token_ids] - torch.logsumexp(scores, dim=-1)[row_of]
