"""Losses for tokens that another policy sampled: an engine that computes a little differently, or weights gone stale.

Three policies: mu sampled and recorded; pi_prox is the trainer's own value at the start of the step
(`LossInputs.proximal`); pi_theta is being trained. k_t = pi_prox(t) / mu(t) corrects the first gap, the clip bounds
u_t = pi_theta(t) / pi_prox(t).
"""

from __future__ import annotations

import torch
from torch import Tensor

from polar_proxy.training.tokens import LossInputs, LossStats, clipped_objective, known_advantages, log_ratio, reduce


def decoupled(
    batch: LossInputs, *, clip_low: float = 0.2, clip_high: float = 0.2, largest_weight: float | None = None
) -> tuple[Tensor, LossStats]:
    """Decoupled PPO for stale data: L = -sum_t w_t k_t min(u_t A_t, clip(u_t, 1 - clip_low, 1 + clip_high) A_t).

    The clip is centred on recent weights instead of on those that sampled, so stale tokens are not all clipped away.
    Tokens with k_t above `largest_weight` are left out.
    Source: Hilton et al., arXiv 2110.00641; used by AReaL, arXiv 2505.24298.
    """
    weight = log_ratio(_proximal(batch), batch.recorded, batch.mask).exp()
    dropped = torch.zeros_like(batch.mask) if largest_weight is None else weight > largest_weight
    return _corrected(batch, torch.where(dropped, 0.0, weight), dropped, clip_low, clip_high)


def tis(
    batch: LossInputs, *, cap: float = 2.0, clip_low: float = 0.2, clip_high: float = 0.2
) -> tuple[Tensor, LossStats]:
    """Truncated importance sampling: L = -sum_t w_t min(k_t, cap) min(u_t A_t, clip(u_t, ...) A_t).

    Source: Yao et al., Your Efficient RL Framework Secretly Brings You Off-Policy RL Training (2025); the formula as in
    TRL's paper index, with its cap of 2.
    """
    weight = log_ratio(_proximal(batch), batch.recorded, batch.mask).exp().clamp(max=cap)
    return _corrected(batch, weight, torch.zeros_like(batch.mask), clip_low, clip_high)


def icepop(
    batch: LossInputs, *, low: float = 0.5, high: float = 5.0, clip_low: float = 0.2, clip_high: float = 0.2
) -> tuple[Tensor, LossStats]:
    """IcePop: tokens on which trainer and engine disagree too much are left out, on both sides.

    M(k) = k where low <= k <= high, else 0 (no gradient decides it).
    With `proximal`:    L = -sum_t w_t M(k_t) min(u_t A_t, clip(u_t, 1 - clip_low, 1 + clip_high) A_t).
    Without `proximal`: L = -sum_t w_t M(r_t) A_t, r_t = pi_theta / mu with gradient; nothing is clipped.

    Source: Ring-1T, arXiv 2510.18855, with `proximal` as we read it; INTELLECT-3, arXiv 2512.16144, equation 1,
    without. The default bounds are ours.
    """
    if batch.proximal is None:
        ratio = log_ratio(batch.new, batch.recorded, batch.mask).exp()
        dropped = (ratio < low) | (ratio > high)
        objective = torch.where(dropped, 0.0, ratio * known_advantages(batch))
        return reduce(batch, objective, ratio, dropped=dropped)
    weight = log_ratio(batch.proximal, batch.recorded, batch.mask).exp()
    dropped = (weight < low) | (weight > high)
    return _corrected(batch, torch.where(dropped, 0.0, weight), dropped, clip_low, clip_high)


def interpolated_proximal(new: Tensor, recorded: Tensor, sampled_version: Tensor, version: int) -> Tensor:
    """log pi_prox [n] without a forward pass of its own, for tokens of known policy versions. Without gradient.

    log pi_prox ~ log mu + a (log pi_theta - log mu), a = (v_prox - v_mu) / (v_theta - v_mu), v_prox = v_theta - 1.
    `sampled_version` int64 [n] is v_mu; `version` is v_theta, the version that the step under way will make.
    A token of v_mu >= v_prox has a = 0: its recorded value is the proximal one.
    Source: AReaL's documentation, Proximal Log-Probability Approximation.
    """
    age = (version - sampled_version).to(new.dtype)
    share = torch.where(age > 1, (age - 1.0) / age.clamp_min(1.0), 0.0)
    return recorded + share * (new.detach() - recorded)


def _proximal(batch: LossInputs) -> Tensor:
    if batch.proximal is None:
        raise ValueError(
            "this loss needs `proximal`: log-probabilities by the trainer's weights at the start of the step"
        )
    return batch.proximal


def _corrected(
    batch: LossInputs, weight: Tensor, dropped: Tensor, clip_low: float, clip_high: float
) -> tuple[Tensor, LossStats]:
    ratio = log_ratio(batch.new, _proximal(batch), batch.mask).exp()
    objective, clipped = clipped_objective(ratio, known_advantages(batch), 1.0 - clip_low, 1.0 + clip_high)
    return reduce(batch, weight.detach() * objective, ratio, clipped=clipped & ~dropped, dropped=dropped)
