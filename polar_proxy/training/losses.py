"""Policy losses. Each takes `LossInputs`, returns the loss (a scalar to minimise, differentiable) and `LossStats`.

Written here: r_t = pi_theta(t) / mu(t), mu being the recorded log-probability of the engine that sampled; A_t the
advantage; w_t the weight of the token (`normalise`); sg = no gradient. The paper's normalisation is named with each
loss and is what its formula shows; which weights are used is the caller's choice (`LossInputs.weights`). `gspo` and
`minpro` look at whole sequences: a micro-batch must not cut one (`packing` never does).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from polar_proxy.training.tokens import (
    LossInputs,
    LossStats,
    clipped_objective,
    known_advantages,
    log_ratio,
    reduce,
    segments,
)


def ppo_clip(batch: LossInputs, *, clip_low: float = 0.2, clip_high: float = 0.2) -> tuple[Tensor, LossStats]:
    """L = -sum_t w_t min(r_t A_t, clip(r_t, 1 - clip_low, 1 + clip_high) A_t).

    With `how="sequence"` this is the loss of GRPO without its KL term (`auxiliary.kl_to_reference`).
    Source: Schulman et al., PPO, arXiv 1707.06347; GRPO: arXiv 2402.03300.
    """
    ratio = log_ratio(batch.new, batch.recorded, batch.mask).exp()
    objective, clipped = clipped_objective(ratio, known_advantages(batch), 1.0 - clip_low, 1.0 + clip_high)
    return reduce(batch, objective, ratio, clipped=clipped)


def dapo(batch: LossInputs, *, clip_low: float = 0.2, clip_high: float = 0.28) -> tuple[Tensor, LossStats]:
    """DAPO: `ppo_clip` with the upper clip higher than the lower, and every token alike (`how="token"`, the default).

    The room above lets unlikely tokens grow. Its dynamic sampling is `selection.select_groups`.
    Source: Yu et al., DAPO, arXiv 2503.14476; 0.2 and 0.28 from its section 4.1.
    """
    return ppo_clip(batch, clip_low=clip_low, clip_high=clip_high)


def gspo(batch: LossInputs, *, clip_low: float = 3e-4, clip_high: float = 4e-4) -> tuple[Tensor, LossStats]:
    """GSPO: one ratio per sequence, the geometric mean of those of its tokens, clipped as one.

    s_i = exp(mean_t log r_it);  L = -mean_i min(s_i A_i, clip(s_i, 1 - clip_low, 1 + clip_high) A_i).

    The mean over sequences is `how="sequence"`; its formula is met exactly where all tokens of a sequence have the
    same advantage. A sequence is a trace: the sampled tokens of all its turns.
    Source: Zheng et al., GSPO, arXiv 2507.18071; the clips from its section 5.1.
    """
    logs = log_ratio(batch.new, batch.recorded, batch.mask)
    owner, counts = segments(batch.sequences, batch.mask)
    sums = torch.zeros(len(counts), dtype=logs.dtype, device=logs.device).index_add(0, owner, logs)
    ratio = (sums / counts.clamp_min(1)).exp()[owner]
    objective, clipped = clipped_objective(ratio, known_advantages(batch), 1.0 - clip_low, 1.0 + clip_high)
    return reduce(batch, objective, ratio, clipped=clipped)


def cispo(batch: LossInputs, *, min_ratio: float = 0.0, max_ratio: float = 5.0) -> tuple[Tensor, LossStats]:
    """CISPO: L = -sum_t w_t sg(clip(r_t, min_ratio, max_ratio)) A_t log pi_theta(t), `how="token"`.

    The weight is bounded, never the gradient: no token is lost. The paper has no lower bound; 5 is ScaleRL's
    (arXiv 2510.13786).
    Source: MiniMax-M1, arXiv 2506.13585.
    """
    ratio = log_ratio(batch.new, batch.recorded, batch.mask).exp()
    return _weighted_likelihood(batch, ratio, min_ratio, max_ratio)


def minpro(batch: LossInputs, *, clip_low: float = 0.2, clip_high: float = 0.28) -> tuple[Tensor, LossStats]:
    """MinPRO: the ratio of the whole prefix, replaced by what cannot explode: the smallest ratio before, times its own.

    q_t = min_{j < t} r_j * r_t (the minimum over nothing is 1);
    L = -sum_t w_t sg(clip(q_t, 1 - clip_low, 1 + clip_high)) A_t log pi_theta(t), `how="token"`.

    The prefix is what was sampled before in the same sequence; context does not count. The default clips are ours.
    Source: Lei et al., A Step Back: Prefix Importance Ratio Stabilizes Policy Optimization, arXiv 2601.22718
    (formula as a survey gives it; the paper's text was not at hand).
    """
    logs = log_ratio(batch.new, batch.recorded, batch.mask)
    prefix = _smallest_before(logs.detach(), batch.sequences, batch.mask)
    ratio = (logs + prefix).exp()
    return _weighted_likelihood(batch, ratio, 1.0 - clip_low, 1.0 + clip_high)


@dataclass(frozen=True, slots=True)
class ClipBounds:
    """The interval of ratios that `bapo` chose, and the share of positive contributions that it reached."""

    low: float
    high: float
    positive_share: float


def adaptive_bounds(
    ratio: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    target: float = 0.5,
    low: tuple[float, float] = (0.6, 0.9),
    high: tuple[float, float] = (1.2, 3.0),
    step: float = 0.05,
) -> ClipBounds:
    """The narrowest clip, from low[0] and high[0] on, at which positive advantages carry `target` of the gradient.

    P = sum of r A over unclipped A > 0, N = sum of r |A| over unclipped A < 0; wanted: P / (P + N) >= target. First
    the lower bound is raised to at most low[1] (fewer negative tokens), then the upper to at most high[1] (more
    positive ones), by `step`. Where there is nothing negative the share is 1; where nothing at all, it is 1 too.

    Source: Xi et al., BAPO, arXiv 2510.18927, as we read it: the target, the ranges and the order are those of the
    authors' repository. It counts clipped tokens with their clipped value; then raising the lower bound could only
    lower the share, so we count tokens that still have a gradient.
    """
    kept = mask & (advantages != 0)
    share, bottom, top = _positive_share(ratio, advantages, kept, low[0], high[0]), low[0], high[0]
    while share < target and bottom < low[1]:
        bottom = min(round(bottom + step, 12), low[1])
        share = _positive_share(ratio, advantages, kept, bottom, top)
    while share < target and top < high[1]:
        top = min(round(top + step, 12), high[1])
        share = _positive_share(ratio, advantages, kept, bottom, top)
    return ClipBounds(bottom, top, share)


def bapo(
    batch: LossInputs,
    *,
    target: float = 0.5,
    low: tuple[float, float] = (0.6, 0.9),
    high: tuple[float, float] = (1.2, 3.0),
    step: float = 0.05,
) -> tuple[Tensor, LossStats]:
    """BAPO: L = -sum_t w_t min(r_t A_t, clip(r_t, c_low, c_high) A_t), the bounds chosen by `adaptive_bounds`.

    The bounds are chosen on the tokens of this batch: call it on the tokens of a whole step, or choose the bounds on
    them first and call `ppo_clip(clip_low=1 - low, clip_high=high - 1)` per micro-batch.
    Source: arXiv 2510.18927, see `adaptive_bounds`.
    """
    ratio = log_ratio(batch.new, batch.recorded, batch.mask).exp()
    advantages = known_advantages(batch)
    bounds = adaptive_bounds(ratio.detach(), advantages, batch.mask, target=target, low=low, high=high, step=step)
    objective, clipped = clipped_objective(ratio, advantages, bounds.low, bounds.high)
    return reduce(batch, objective, ratio, clipped=clipped)


def _weighted_likelihood(batch: LossInputs, ratio: Tensor, low: float, high: float) -> tuple[Tensor, LossStats]:
    """sg(clip(ratio)) A log pi."""
    bounded = ratio.detach().clamp(low, high)
    likelihood = torch.where(batch.mask, batch.new, 0.0)
    outside = (ratio < low) | (ratio > high)
    return reduce(batch, bounded * known_advantages(batch) * likelihood, ratio, clipped=outside)


def _smallest_before(logs: Tensor, sequences: Tensor, mask: Tensor) -> Tensor:
    """min of `logs` over the trained tokens that stand earlier in the same sequence [n]; 0 where there is none."""
    smallest = torch.zeros_like(logs)
    for sequence in torch.unique(sequences[mask]):
        here = torch.nonzero(mask & (sequences == sequence)).squeeze(1)
        smallest[here[1:]] = torch.cummin(logs[here], dim=0).values[:-1]
    return smallest


def _positive_share(ratio: Tensor, advantages: Tensor, kept: Tensor, low: float, high: float) -> float:
    weight = ratio * advantages.abs()
    positive = float(weight[kept & (advantages > 0) & (ratio <= high)].sum())
    negative = float(weight[kept & (advantages < 0) & (ratio >= low)].sum())
    return 1.0 if negative == 0.0 else positive / (positive + negative)
