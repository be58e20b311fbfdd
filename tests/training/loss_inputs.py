"""Loss inputs made from importance ratios, which are easy to calculate with by hand; gradients of a loss."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from polar_proxy.training.losses import LossInputs

HALF = 0.5
"""Probability of every token under the sampling policy. Only ratios matter."""


def tokens(
    ratios: Sequence[float],
    advantages: Sequence[float],
    *,
    sequences: Sequence[int] | None = None,
    proximal: Sequence[float] | None = None,
    weights: Tensor | None = None,
) -> LossInputs:
    """Return inputs with pi_theta = ratio * mu, mu = 1/2 and pi_prox = proximal * mu (mu by default), float64.

    `logprobs` is a leaf with gradient. By default every token weighs the same.
    """
    n = len(ratios)
    old_logprobs = torch.full((n,), HALF, dtype=torch.float64).log()

    def logprobs(ratios: Sequence[float]) -> Tensor:
        return torch.tensor(ratios, dtype=torch.float64).log() + old_logprobs

    return LossInputs(
        logprobs=logprobs(ratios).requires_grad_(),
        old_logprobs=old_logprobs,
        proximal_logprobs=logprobs([1.0] * n if proximal is None else proximal),
        advantages=torch.tensor(advantages, dtype=torch.float64),
        weights=torch.full((n,), 1 / n, dtype=torch.float64) if weights is None else weights,
        sequences=torch.zeros(n).long() if sequences is None else torch.tensor(sequences),
        entropy=torch.zeros(n),
    )


def gradient(loss: Tensor, batch: LossInputs) -> list[float]:
    """Return d loss / d log pi_theta of each token."""
    (result,) = torch.autograd.grad(loss, batch.logprobs)
    values: list[float] = result.tolist()
    return values
