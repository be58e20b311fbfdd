"""Tokens given by the ratios that a hand calculation begins with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from polar_proxy.training.tokens import LossInputs

HALF = 0.5
"""Probability by the sampling policy of every token below: only ratios matter."""


def tokens(
    ratios: Sequence[float],
    advantages: Sequence[float],
    *,
    mask: Sequence[int] | None = None,
    sequences: Sequence[int] | None = None,
    proximal: Sequence[float] | None = None,
    weights: Tensor | None = None,
) -> LossInputs:
    """pi_theta = ratio * mu with mu = 1/2; `proximal` gives pi_prox / mu. float64, `new` is a leaf with gradient."""
    n = len(ratios)
    recorded = torch.full((n,), HALF, dtype=torch.float64).log()
    return LossInputs(
        new=(torch.tensor(ratios, dtype=torch.float64).log() + recorded).requires_grad_(),
        recorded=recorded,
        advantages=torch.tensor(advantages, dtype=torch.float64),
        mask=torch.ones(n).bool() if mask is None else torch.tensor(mask).bool(),
        sequences=torch.zeros(n).long() if sequences is None else torch.tensor(sequences),
        proximal=None if proximal is None else torch.tensor(proximal, dtype=torch.float64).log() + recorded,
        weights=weights,
    )


def with_noise_off_the_mask(batch: LossInputs) -> LossInputs:
    """NaN and infinity wherever nothing is trained; a loss must not notice."""
    off = ~batch.mask
    new = torch.where(off, -torch.inf, batch.new.detach()).requires_grad_()
    return replace(
        batch,
        new=new,
        recorded=batch.recorded.masked_fill(off, torch.nan),
        advantages=batch.advantages.masked_fill(off, torch.nan),
        proximal=None if batch.proximal is None else batch.proximal.masked_fill(off, torch.nan),
    )


def gradient(loss: Tensor, batch: LossInputs) -> list[float]:
    """d loss / d log pi_theta of each token."""
    (result,) = torch.autograd.grad(loss, batch.new)
    values: list[float] = result.tolist()
    return values
