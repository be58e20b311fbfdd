"""Policy losses. Each takes `LossInputs` and returns a scalar to minimise (differentiable) and `LossStats`.

Notation: mu is the policy that sampled (its log-probabilities were recorded by the engine), pi_prox the trainer's own
weights at the start of the step, pi_theta the weights in training. r_t = pi_theta(t) / mu(t) is the importance ratio,
k_t = pi_prox(t) / mu(t) corrects for mismatch and staleness, u_t = pi_theta(t) / pi_prox(t) is what the corrected
losses clip. A_t is the advantage, w_t the weight of the token (`loss_terms.token_weights`), sg stops the gradient.

Each docstring shows the formula with the paper's own normalisation; the caller chooses the weights
(`LossInputs.weights`). `gspo` and `minpro` use whole sequences, so a microbatch must not cut a sequence
(`packing` never does).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to +-20, so that exp never overflows. Clamped values pass no gradient."""


@dataclass(frozen=True, slots=True)
class LossInputs:
    """The tokens of a microbatch, all tensors [n]; tokens of one sequence are in the order in which they were sampled.

    Log-probabilities are natural. Log-probabilities and advantages outside of `mask` are ignored and may be NaN.
    Raises ValueError for tensors of different lengths, and for a trained token with a log-probability or advantage
    that is not finite.
    """

    logprobs: Tensor
    """log pi_theta, with gradient."""
    old_logprobs: Tensor
    """log mu, as the engine reported it when it sampled."""
    advantages: Tensor
    mask: Tensor
    """bool: which tokens are trained."""
    sequences: Tensor
    """int64: index of the sequence that each token belongs to."""
    proximal_logprobs: Tensor | None = None
    """log pi_prox. Only the losses that correct for mismatch need it."""
    weights: Tensor | None = None
    """Weights of `loss_terms.token_weights`. None: the mean over the trained tokens."""
    entropy: Tensor | None = None
    """Entropy of the distribution at each token, nats. Only reported."""

    def __post_init__(self) -> None:
        n = len(self.logprobs)
        tensors = {
            "old_logprobs": self.old_logprobs,
            "advantages": self.advantages,
            "mask": self.mask,
            "sequences": self.sequences,
            "proximal_logprobs": self.proximal_logprobs,
            "weights": self.weights,
            "entropy": self.entropy,
        }
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items() if tensor is not None}
        if wrong := {name: shape for name, shape in shapes.items() if shape != (n,)}:
            raise ValueError(f"expected {n} values in each tensor, but got {wrong}")
        if self.mask.dtype != torch.bool:
            raise ValueError(f"the mask must be boolean, not {self.mask.dtype}")
        for name in ("logprobs", "old_logprobs", "advantages", "proximal_logprobs"):
            tensor = getattr(self, name)
            if tensor is not None and not bool(torch.isfinite(tensor.detach()[self.mask]).all()):
                raise ValueError(f"a trained token has no finite value in `{name}`: mask it out, or find out why")


@dataclass(frozen=True, slots=True)
class LossStats:
    """Statistics over the trained tokens. Every token counts the same, whatever its weight in the loss."""

    tokens: int
    clipped_share: float
    """Share of tokens whose gradient was removed or bounded by clipping."""
    dropped_share: float
    """Share of tokens that a mismatch mask removed."""
    ratio_mean: float
    ratio_max: float
    """Maximum of the ratio that the loss uses (token, sequence or prefix); `ratio_mean` is its mean."""
    approx_kl: float
    """KL(mu || pi_theta) by the k3 estimator: mean(r - 1 - log r)."""
    entropy: float | None = None


def ppo_clip(batch: LossInputs, *, clip_low: float = 0.2, clip_high: float = 0.2) -> tuple[Tensor, LossStats]:
    """L = -sum_t w_t min(r_t A_t, clip(r_t, 1 - clip_low, 1 + clip_high) A_t).

    With `aggregation="sequence"` this is the loss of GRPO without its KL term (`loss_terms.kl_to_reference`).
    Source: Schulman et al., PPO, arXiv 1707.06347; GRPO: arXiv 2402.03300.
    """
    ratio = log_ratio(batch.logprobs, batch.old_logprobs, batch.mask).exp()
    objective, clipped = _clipped_objective(ratio, _masked_advantages(batch), 1.0 - clip_low, 1.0 + clip_high)
    return _reduce(batch, objective, ratio, clipped=clipped)


def dapo(batch: LossInputs, *, clip_low: float = 0.2, clip_high: float = 0.28) -> tuple[Tensor, LossStats]:
    """DAPO: `ppo_clip` with a higher upper clip, which lets the probability of unlikely tokens grow; every token weighs
    the same.

    DAPO's dynamic sampling is the setting `dynamic_sampling`.
    Source: Yu et al., DAPO, arXiv 2503.14476; 0.2 and 0.28 from its section 4.1.
    """
    return ppo_clip(batch, clip_low=clip_low, clip_high=clip_high)


def gspo(batch: LossInputs, *, clip_low: float = 3e-4, clip_high: float = 4e-4) -> tuple[Tensor, LossStats]:
    """GSPO: one ratio per sequence, the geometric mean of its tokens' ratios, clipped as one.

    s_i = exp(mean_t log r_it);  L = -mean_i min(s_i A_i, clip(s_i, 1 - clip_low, 1 + clip_high) A_i).

    `aggregation="sequence"` gives the mean over sequences; it equals the formula when all tokens of a sequence have
    the same advantage. A sequence is a trace: the sampled tokens of all its turns.
    Source: Zheng et al., GSPO, arXiv 2507.18071; the clips from its section 5.1.
    """
    log_ratios = log_ratio(batch.logprobs, batch.old_logprobs, batch.mask)
    _, owner = torch.unique(batch.sequences, return_inverse=True)
    n = int(owner.max()) + 1
    counts = torch.zeros(n, dtype=torch.int64, device=owner.device).index_add_(0, owner, batch.mask.to(torch.int64))
    sums = torch.zeros(n, dtype=log_ratios.dtype, device=owner.device).index_add(0, owner, log_ratios)
    ratio = (sums / counts.clamp_min(1)).exp()[owner]
    objective, clipped = _clipped_objective(ratio, _masked_advantages(batch), 1.0 - clip_low, 1.0 + clip_high)
    return _reduce(batch, objective, ratio, clipped=clipped)


def cispo(batch: LossInputs, *, min_ratio: float = 0.0, max_ratio: float = 5.0) -> tuple[Tensor, LossStats]:
    """CISPO: L = -sum_t w_t sg(clip(r_t, min_ratio, max_ratio)) A_t log pi_theta(t), every token weighing the same.

    The clip bounds the weight and never removes the gradient, so every token is trained. The paper has no lower
    bound; the upper bound of 5 is from ScaleRL (arXiv 2510.13786).
    Source: MiniMax-M1, arXiv 2506.13585.
    """
    ratio = log_ratio(batch.logprobs, batch.old_logprobs, batch.mask).exp()
    return _weighted_likelihood(batch, ratio, min_ratio, max_ratio)


def minpro(batch: LossInputs, *, clip_low: float = 0.2, clip_high: float = 0.28) -> tuple[Tensor, LossStats]:
    """MinPRO: replace the ratio of the whole prefix, which can explode, by the smallest earlier ratio times r_t.

    q_t = min_{j < t} r_j * r_t (the minimum over nothing is 1);
    L = -sum_t w_t sg(clip(q_t, 1 - clip_low, 1 + clip_high)) A_t log pi_theta(t), every token weighing the same.

    The prefix consists of the tokens sampled earlier in the same sequence, without the context. The default clips are
    ours. Source: Lei et al., A Step Back: Prefix Importance Ratio Stabilizes Policy Optimization, arXiv 2601.22718 (the
    formula as quoted by a survey; we had no access to the paper's text).
    """
    log_ratios = log_ratio(batch.logprobs, batch.old_logprobs, batch.mask)
    smallest = _smallest_earlier(log_ratios.detach(), batch.sequences, batch.mask)
    ratio = (log_ratios + smallest).exp()
    return _weighted_likelihood(batch, ratio, 1.0 - clip_low, 1.0 + clip_high)


@dataclass(frozen=True, slots=True)
class ClipBounds:
    """The clip interval that `bapo` chose, and the share of positive contributions that it reaches."""

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
    """Return the narrowest clip, starting at low[0] and high[0], with which positive advantages carry `target` of the
    gradient.

    P = sum of r A over unclipped A > 0, N = sum of r |A| over unclipped A < 0; the goal is P / (P + N) >= target. The
    lower bound is raised first, to at most low[1] (fewer negative tokens), then the upper one, to at most high[1]
    (more positive tokens), both by `step`. Without negative tokens the share is 1.

    Source: Xi et al., BAPO, arXiv 2510.18927. Target, ranges and order are those of the authors' repository. It counts
    clipped tokens with their clipped value, so that raising the lower bound can only lower the share; we count the
    tokens that still have a gradient.
    """
    counted = mask & (advantages != 0)
    bottom, top = low[0], high[0]
    share = _positive_share(ratio, advantages, counted, bottom, top)
    while share < target and bottom < low[1]:
        bottom = min(round(bottom + step, 12), low[1])
        share = _positive_share(ratio, advantages, counted, bottom, top)
    while share < target and top < high[1]:
        top = min(round(top + step, 12), high[1])
        share = _positive_share(ratio, advantages, counted, bottom, top)
    return ClipBounds(bottom, top, share)


def bapo(
    batch: LossInputs,
    *,
    target: float = 0.5,
    low: tuple[float, float] = (0.6, 0.9),
    high: tuple[float, float] = (1.2, 3.0),
    step: float = 0.05,
) -> tuple[Tensor, LossStats]:
    """BAPO: L = -sum_t w_t min(r_t A_t, clip(r_t, c_low, c_high) A_t), with bounds from `adaptive_bounds`.

    The bounds are chosen on the tokens of this batch, so it must hold a whole update.
    Source: arXiv 2510.18927, see `adaptive_bounds`.
    """
    ratio = log_ratio(batch.logprobs, batch.old_logprobs, batch.mask).exp()
    advantages = _masked_advantages(batch)
    bounds = adaptive_bounds(ratio.detach(), advantages, batch.mask, target=target, low=low, high=high, step=step)
    objective, clipped = _clipped_objective(ratio, advantages, bounds.low, bounds.high)
    return _reduce(batch, objective, ratio, clipped=clipped)


# Losses that correct for the mismatch between trainer and engine, or for stale samples


def decoupled(
    batch: LossInputs, *, clip_low: float = 0.2, clip_high: float = 0.2, max_weight: float | None = None
) -> tuple[Tensor, LossStats]:
    """Decoupled PPO for stale data: L = -sum_t w_t k_t min(u_t A_t, clip(u_t, 1 - clip_low, 1 + clip_high) A_t).

    The clip is centred on recent weights instead of those that sampled, so that stale tokens keep a gradient. Tokens
    with k_t above `max_weight` are dropped.
    Source: Hilton et al., arXiv 2110.00641; used by AReaL, arXiv 2505.24298.
    """
    weight = log_ratio(_proximal(batch), batch.old_logprobs, batch.mask).exp()
    dropped = torch.zeros_like(batch.mask) if max_weight is None else weight > max_weight
    return _corrected(batch, torch.where(dropped, 0.0, weight), dropped, clip_low, clip_high)


def tis(
    batch: LossInputs, *, cap: float = 2.0, clip_low: float = 0.2, clip_high: float = 0.2
) -> tuple[Tensor, LossStats]:
    """Truncated importance sampling: L = -sum_t w_t min(k_t, cap) min(u_t A_t, clip(u_t, ...) A_t).

    Source: Yao et al., Your Efficient RL Framework Secretly Brings You Off-Policy RL Training (2025); the formula and
    the cap of 2 as in TRL's paper index.
    """
    weight = log_ratio(_proximal(batch), batch.old_logprobs, batch.mask).exp().clamp(max=cap)
    return _corrected(batch, weight, torch.zeros_like(batch.mask), clip_low, clip_high)


def icepop(
    batch: LossInputs, *, low: float = 0.5, high: float = 5.0, clip_low: float = 0.2, clip_high: float = 0.2
) -> tuple[Tensor, LossStats]:
    """IcePop: drop tokens on which trainer and engine disagree too much, in either direction.

    M(k) = k where low <= k <= high, else 0. No gradient flows through M.
    With `proximal_logprobs`:    L = -sum_t w_t M(k_t) min(u_t A_t, clip(u_t, 1 - clip_low, 1 + clip_high) A_t).
    Without `proximal_logprobs`: L = -sum_t w_t M(r_t) A_t, r_t = pi_theta / mu with gradient and no clip.

    Source: Ring-1T, arXiv 2510.18855, for the first form, as we read it; INTELLECT-3, arXiv 2512.16144, equation 1,
    for the second. The default bounds are ours.
    """
    if batch.proximal_logprobs is None:
        ratio = log_ratio(batch.logprobs, batch.old_logprobs, batch.mask).exp()
        dropped = (ratio < low) | (ratio > high)
        objective = torch.where(dropped, 0.0, ratio * _masked_advantages(batch))
        return _reduce(batch, objective, ratio, dropped=dropped)
    weight = log_ratio(batch.proximal_logprobs, batch.old_logprobs, batch.mask).exp()
    dropped = (weight < low) | (weight > high)
    return _corrected(batch, torch.where(dropped, 0.0, weight), dropped, clip_low, clip_high)


LOSSES: dict[str, Callable[..., tuple[Tensor, LossStats]]] = {
    "ppo_clip": ppo_clip,
    "dapo": dapo,
    "gspo": gspo,
    "cispo": cispo,
    "minpro": minpro,
    "bapo": bapo,
    "decoupled": decoupled,
    "tis": tis,
    "icepop": icepop,
}
"""Losses by the name that a configuration uses. `LossInputs` -> loss and statistics; settings by keyword."""


def log_ratio(numerator: Tensor, denominator: Tensor, mask: Tensor) -> Tensor:
    """Return log(numerator / denominator) [n], clamped to +-`MAX_LOG_RATIO`, 0 outside of the mask."""
    return torch.where(mask, numerator - denominator, 0.0).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def _clipped_objective(ratio: Tensor, advantages: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    """Return min(r A, clip(r, low, high) A) [n], and where the clip removed the gradient (bool [n])."""
    bounded = ratio.clamp(low, high)
    clipped = ((advantages > 0) & (ratio > high)) | ((advantages < 0) & (ratio < low))
    return torch.minimum(ratio * advantages, bounded * advantages), clipped


def _weighted_likelihood(batch: LossInputs, ratio: Tensor, low: float, high: float) -> tuple[Tensor, LossStats]:
    """Return the objective sg(clip(ratio)) A log pi_theta, per token."""
    bounded = ratio.detach().clamp(low, high)
    likelihood = torch.where(batch.mask, batch.logprobs, 0.0)
    outside = (ratio < low) | (ratio > high)
    return _reduce(batch, bounded * _masked_advantages(batch) * likelihood, ratio, clipped=outside)


def _corrected(
    batch: LossInputs, weight: Tensor, dropped: Tensor, clip_low: float, clip_high: float
) -> tuple[Tensor, LossStats]:
    ratio = log_ratio(batch.logprobs, _proximal(batch), batch.mask).exp()
    objective, clipped = _clipped_objective(ratio, _masked_advantages(batch), 1.0 - clip_low, 1.0 + clip_high)
    return _reduce(batch, weight.detach() * objective, ratio, clipped=clipped & ~dropped, dropped=dropped)


def _reduce(
    batch: LossInputs,
    objective: Tensor,
    ratio: Tensor,
    *,
    clipped: Tensor | None = None,
    dropped: Tensor | None = None,
) -> tuple[Tensor, LossStats]:
    """Return loss = -sum_t w_t * objective_t over the trained tokens, and its statistics."""
    mask = batch.mask
    n = int(mask.sum())
    if n == 0:
        # A microbatch without a trained token adds nothing, but stays part of the graph.
        return torch.where(mask, objective, 0.0).sum() * 0.0, LossStats(0, 0.0, 0.0, 0.0, 0.0, 0.0)
    weights = mask / n if batch.weights is None else batch.weights
    loss = -(weights.to(objective.dtype) * torch.where(mask, objective, 0.0)).sum()
    with torch.no_grad():
        drift = log_ratio(batch.logprobs.detach(), batch.old_logprobs, mask)[mask]
        stats = LossStats(
            tokens=n,
            clipped_share=_share(clipped, mask, n),
            dropped_share=_share(dropped, mask, n),
            ratio_mean=float(ratio.detach()[mask].mean()),
            ratio_max=float(ratio.detach()[mask].max()),
            approx_kl=float((drift.exp() - 1.0 - drift).mean()),
            entropy=None if batch.entropy is None else float(batch.entropy.detach()[mask].mean()),
        )
    return loss, stats


def _masked_advantages(batch: LossInputs) -> Tensor:
    """Return the advantages [n], 0 outside of the mask."""
    return torch.where(batch.mask, batch.advantages, 0.0)


def _proximal(batch: LossInputs) -> Tensor:
    if batch.proximal_logprobs is None:
        raise ValueError("this loss needs `proximal_logprobs`: those of the trainer's weights at the start of the step")
    return batch.proximal_logprobs


def _share(flags: Tensor | None, mask: Tensor, n: int) -> float:
    return 0.0 if flags is None else int((flags & mask).sum()) / n


def _smallest_earlier(log_ratios: Tensor, sequences: Tensor, mask: Tensor) -> Tensor:
    """Return the minimum over the earlier trained tokens of the same sequence [n]; 0 for its first one."""
    smallest = torch.zeros_like(log_ratios)
    for sequence in torch.unique(sequences[mask]):
        here = torch.nonzero(mask & (sequences == sequence)).squeeze(1)
        smallest[here[1:]] = torch.cummin(log_ratios[here], dim=0).values[:-1]
    return smallest


def _positive_share(ratio: Tensor, advantages: Tensor, counted: Tensor, low: float, high: float) -> float:
    weight = ratio * advantages.abs()
    positive = float(weight[counted & (advantages > 0) & (ratio <= high)].sum())
    negative = float(weight[counted & (advantages < 0) & (ratio >= low)].sum())
    return 1.0 if negative == 0.0 else positive / (positive + negative)
