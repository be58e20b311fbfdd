"""What each token weighs in the loss. A loss is always sum_t w_t * l_t; the weights are made here, once per step.

Because the weights of the whole step are known before the first forward pass, the losses of micro-batches simply add
up to the loss of the step: no micro-batch has a denominator of its own.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

LossAggregation = Literal["token", "sequence", "rollout", "constant"]


def trained(mask: Tensor, advantages: Tensor) -> Tensor:
    """The mask [n] without the tokens whose advantage is NaN: those of rollouts without a reward, and what an
    advantage leaves out.

    Comes before `token_weights`, so that no such token is counted in a denominator.
    """
    return torch.where(torch.isnan(advantages), torch.zeros_like(mask), mask)


def token_weights(
    mask: Tensor,
    sequences: Tensor,
    rollouts: Tensor | None = None,
    *,
    how: LossAggregation = "token",
    length: int | None = None,
) -> Tensor:
    """Weights [n], float64, 0 where `mask` is 0. `sequences` and `rollouts` int64 [n] say where each token belongs.

    `mask` [n] is boolean, or a number in [0, 1]: the share of a sample that this copy of it stands for
    (`tree.Targets.weights`). With m_t the mask:

    * token:    w_t = m_t / sum(m).                         Every token alike (DAPO, arXiv 2503.14476).
    * sequence: w_t = m_t / (S * sum of m in its sequence). Mean of means; S sequences (GRPO, arXiv 2402.03300).
    * rollout:  w_t = m_t / (R * sum of m in its rollout).  As `sequence`, but the traces of one rollout together
                weigh what another rollout weighs, however many they are.
    * constant: w_t = m_t / (R * length).                   No answer's own length enters (Dr. GRPO, arXiv 2503.20783;
                its code divides by the largest length allowed).

    Sequences and rollouts without a trained token are not counted. `rollouts` defaults to `sequences`.
    Raises ValueError where nothing is trained, or `constant` comes without `length`.
    """
    shares = mask.to(torch.float64)
    total = shares.sum()
    if not bool(total > 0):
        raise ValueError("no token is trained: all of the loss mask is 0")
    if how == "token":
        return shares / total
    owners = sequences if how == "sequence" or rollouts is None else rollouts
    _, owner = torch.unique(owners, return_inverse=True)
    sums = torch.zeros(int(owner.max()) + 1, dtype=torch.float64, device=shares.device).index_add_(0, owner, shares)
    counted = int((sums > 0).sum())
    if how == "constant":
        if length is None or length < 1:
            raise ValueError(
                "normalisation by a constant needs `length`: the number of tokens that one rollout may sample"
            )
        return shares / (counted * length)
    return torch.where(shares > 0, shares / (counted * sums[owner].clamp_min(torch.finfo(torch.float64).tiny)), 0.0)
