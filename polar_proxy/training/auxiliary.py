"""Terms that are added to a policy loss, each times its own coefficient."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from polar_proxy.training.tokens import log_ratio


@dataclass(frozen=True, slots=True)
class KlStats:
    """Over the masked tokens: the mean of the estimator, and its largest value."""

    tokens: int
    mean: float
    largest: float


@dataclass(frozen=True, slots=True)
class ObservationStats:
    """Over the observation tokens: cross-entropy in nats per token, and its exponential."""

    tokens: int
    cross_entropy: float
    perplexity: float


def kl_to_reference(
    new: Tensor,
    reference: Tensor,
    mask: Tensor,
    *,
    kind: Literal["k1", "k2", "k3"] = "k3",
    recorded: Tensor | None = None,
    weights: Tensor | None = None,
) -> tuple[Tensor, KlStats]:
    """KL(pi_theta || pi_ref), estimated at the sampled tokens, with d = log pi_theta - log pi_ref. All tensors [n].

    k1 = d;  k2 = d^2 / 2;  k3 = exp(-d) - 1 + d;  loss = sum_t w_t k_t, the mean over the mask by default.

    k1 and k3 are unbiased as values where pi_theta sampled, but their gradients are not that of the KL (that of k1 is
    0 on average); the gradient of k2 is, on policy. With `recorded` (log mu) each estimate is multiplied by
    r = pi_theta / mu, with gradient, and then value and gradient of k1 and k3 are unbiased off policy as well (k3:
    DeepSeek-V3.2, arXiv 2512.02556, as TRL's paper index gives it).

    Source: Schulman, Approximating KL Divergence (joschu.net/blog/kl-approx.html).
    """
    distance = log_ratio(new, reference, mask)
    if kind == "k1":
        estimate = distance
    elif kind == "k2":
        estimate = 0.5 * distance**2
    elif kind == "k3":
        estimate = torch.expm1(-distance) + distance
    else:
        raise ValueError(f"no estimator {kind!r}; there are k1, k2 and k3")
    values = estimate.detach()[mask]
    if recorded is not None:
        estimate = log_ratio(new, recorded, mask).exp() * estimate
    loss = _weighted(estimate, mask, weights)
    n = len(values)
    return loss, KlStats(n, float(values.mean()) if n else 0.0, float(values.max()) if n else 0.0)


def observation_loss(new: Tensor, mask: Tensor, *, weights: Tensor | None = None) -> tuple[Tensor, ObservationStats]:
    """ECHO: the policy learns to predict what its actions bring about. L = -(1 / |O|) sum_{t in O} log pi_theta(t).

    `new` [n] are log-probabilities of the tokens that stand in the sequence, `mask` [n] (bool) picks O: tokens of the
    environment's answers (tool output), neither sampled ones nor the task's prompt. Added to the policy loss times a
    coefficient; the paper's is 0.05. These tokens were not sampled: they have no ratio and no advantage, and no
    place in `Tokens.mask`.

    Source: Shrivastava et al., ECHO, arXiv 2605.24517 (length-normalised cross-entropy; coefficient and normalisation
    as rLLM's ECHO states them).
    """
    loss = -_weighted(new, mask, weights)
    values = -new.detach()[mask]
    n = len(values)
    mean = float(values.mean()) if n else 0.0
    return loss, ObservationStats(n, mean, float(torch.tensor(mean, dtype=torch.float64).exp()))


def _weighted(values: Tensor, mask: Tensor, weights: Tensor | None) -> Tensor:
    shares = mask / mask.sum().clamp_min(1) if weights is None else weights
    return (shares.to(values.dtype) * torch.where(mask, values, 0.0)).sum()
