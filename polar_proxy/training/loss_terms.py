"""Token weights, and terms added to a policy loss: the KL to a reference model and the observation loss.

The weights are made once for a whole update, before the first forward pass. So the losses of microbatches add up to the
loss of the update: no microbatch is normalised by itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from polar_proxy.training.losses import log_ratio

LossAggregation = Literal["token", "sequence", "rollout", "constant"]


def token_weights(
    mask: Tensor,
    sequences: Tensor,
    rollouts: Tensor | None = None,
    *,
    aggregation: LossAggregation = "token",
    length: int | None = None,
) -> Tensor:
    """Return the weight of each token in the loss, float64 [n], 0 where `mask` (bool or 0/1 [n]) is 0.

    `sequences` and `rollouts` int64 [n] name the sequence and the rollout of each token; `rollouts` defaults to
    `sequences`. With m_t the mask:

    * token:    w_t = m_t / sum(m). Every token weighs the same (DAPO, arXiv 2503.14476).
    * sequence: w_t = m_t / (S * sum of m in its sequence). The mean of S means (GRPO, arXiv 2402.03300).
    * rollout:  w_t = m_t / (R * sum of m in its rollout). Every rollout weighs the same, however many traces it has.
    * constant: w_t = m_t / (R * length). The length of an answer has no influence (Dr. GRPO, arXiv 2503.20783, whose
                code divides by the largest length allowed).

    Sequences and rollouts without a trained token are not counted. Raises ValueError when the mask is all 0, and for
    "constant" without `length`.
    """
    trained = mask.to(torch.float64)
    total = trained.sum()
    if not bool(total > 0):
        raise ValueError("no token is trained: all of the loss mask is 0")
    if aggregation == "token":
        return trained / total
    owners = sequences if aggregation == "sequence" or rollouts is None else rollouts
    _, owner = torch.unique(owners, return_inverse=True)
    sums = torch.zeros(int(owner.max()) + 1, dtype=torch.float64, device=trained.device).index_add_(0, owner, trained)
    counted = int((sums > 0).sum())
    if aggregation == "constant":
        if length is None or length < 1:
            raise ValueError("aggregation by a constant needs `length`: the tokens that one rollout may sample")
        return trained / (counted * length)
    return torch.where(trained > 0, trained / (counted * sums[owner].clamp_min(torch.finfo(torch.float64).tiny)), 0.0)


@dataclass(frozen=True, slots=True)
class KlStats:
    """Mean and maximum of the KL estimator over the masked tokens."""

    tokens: int
    mean: float
    largest: float


@dataclass(frozen=True, slots=True)
class ObservationStats:
    """Cross-entropy of the observation tokens in nats per token, and its exponential."""

    tokens: int
    cross_entropy: float
    perplexity: float


def kl_to_reference(
    logprobs: Tensor,
    reference_logprobs: Tensor,
    mask: Tensor,
    *,
    estimator: Literal["k1", "k2", "k3"] = "k3",
    old_logprobs: Tensor | None = None,
    weights: Tensor | None = None,
) -> tuple[Tensor, KlStats]:
    """Estimate KL(pi_theta || pi_ref) at the sampled tokens. All tensors [n].

    With d = log pi_theta - log pi_ref: k1 = d;  k2 = d^2 / 2;  k3 = exp(-d) - 1 + d. The loss is sum_t w_t k_t, by
    default the mean over the mask.

    As values k1 and k3 are unbiased for tokens that pi_theta sampled, but their gradients are not that of the KL (the
    gradient of k1 is 0 on average); the gradient of k2 is, on policy. With `old_logprobs` (log mu) each estimate is
    multiplied by r = pi_theta / mu, with gradient; value and gradient of k1 and k3 are then unbiased off policy too
    (k3: DeepSeek-V3.2, arXiv 2512.02556, as TRL's paper index gives it).

    Source: Schulman, Approximating KL Divergence (joschu.net/blog/kl-approx.html).
    """
    distance = log_ratio(logprobs, reference_logprobs, mask)
    if estimator == "k1":
        estimate = distance
    elif estimator == "k2":
        estimate = 0.5 * distance**2
    elif estimator == "k3":
        estimate = torch.expm1(-distance) + distance
    else:
        raise ValueError(f"unknown KL estimator {estimator!r}: choose k1, k2 or k3")
    values = estimate.detach()[mask]
    if old_logprobs is not None:
        estimate = log_ratio(logprobs, old_logprobs, mask).exp() * estimate
    loss = _weighted_sum(estimate, mask, weights)
    n = len(values)
    return loss, KlStats(n, float(values.mean()) if n else 0.0, float(values.max()) if n else 0.0)


def observation_loss(
    logprobs: Tensor, mask: Tensor, *, weights: Tensor | None = None
) -> tuple[Tensor, ObservationStats]:
    """ECHO: the policy learns to predict the environment's answers to its actions. L = -(1 / |O|) sum_{t in O} log
    pi_theta(t).

    `mask` (bool [n]) selects O, the tokens of the environment's answers (tool output). They were not sampled, so they
    have no importance ratio and no advantage, and are not part of `LossInputs`. The result is added to the policy loss
    times a coefficient, 0.05 in the paper.

    Source: Shrivastava et al., ECHO, arXiv 2605.24517 (length-normalised cross-entropy; coefficient and normalisation
    as rLLM's ECHO states them).
    """
    loss = -_weighted_sum(logprobs, mask, weights)
    values = -logprobs.detach()[mask]
    n = len(values)
    mean = float(values.mean()) if n else 0.0
    return loss, ObservationStats(n, mean, float(torch.tensor(mean, dtype=torch.float64).exp()))


def _weighted_sum(values: Tensor, mask: Tensor, weights: Tensor | None) -> Tensor:
    weights = mask / mask.sum().clamp_min(1) if weights is None else weights
    return (weights.to(values.dtype) * torch.where(mask, values, 0.0)).sum()
