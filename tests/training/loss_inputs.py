"""Loss inputs made from importance ratios, which are easy to calculate with by hand; gradients of a loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from polar_proxy.training.losses import LossInputs

HALF = 0.5
"""Probability of every token under the sampling policy. Only ratios matter."""


def tokens(
    ratios: Sequence[float],
    advantages: Sequence[float],
    *,
    mask: Sequence[int] | None = None,
    sequences: Sequence[int] | None = None,
    proximal: Sequence[float] | None = None,
    weights: Tensor | None = None,
) -> LossInputs:
    """Return inputs with pi_theta = ratio * mu, mu = 1/2 and pi_prox = proximal * mu, float64.

    `logprobs` is a leaf with gradient.
    """
    n = len(ratios)
    old_logprobs = torch.full((n,), HALF, dtype=torch.float64).log()

    def logprobs(ratios: Sequence[float]) -> Tensor:
        return torch.tensor(ratios, dtype=torch.float64).log() + old_logprobs

    return LossInputs(
        logprobs=logprobs(ratios).requires_grad_(),
        old_logprobs=old_logprobs,
        advantages=torch.tensor(advantages, dtype=torch.float64),
        mask=torch.ones(n).bool() if mask is None else torch.tensor(mask).bool(),
        sequences=torch.zeros(n).long() if sequences is None else torch.tensor(sequences),
        proximal_logprobs=None
        if proximal is None
        else torch.tensor(proximal, dtype=torch.float64).log() + old_logprobs,
        weights=weights,
    )


def with_noise_off_the_mask(batch: LossInputs) -> LossInputs:
    """Put NaN and infinity at all positions that are not trained; they must not change a loss."""
    off = ~batch.mask
    proximal = batch.proximal_logprobs
    return replace(
        batch,
        logprobs=torch.where(off, -torch.inf, batch.logprobs.detach()).requires_grad_(),
        old_logprobs=batch.old_logprobs.masked_fill(off, torch.nan),
        advantages=batch.advantages.masked_fill(off, torch.nan),
        proximal_logprobs=None if proximal is None else proximal.masked_fill(off, torch.nan),
    )


def gradient(loss: Tensor, batch: LossInputs) -> list[float]:
    """Return d loss / d log pi_theta of each token."""
    (result,) = torch.autograd.grad(loss, batch.logprobs)
    values: list[float] = result.tolist()
    return values
