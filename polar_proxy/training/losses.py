"""Policy losses, the terms added to them (KL to a reference model, observation loss), and the weights of tokens.

A policy loss takes `LossInputs` and returns a scalar to minimise (differentiable) and `LossStats`.

Notation:

* mu is the policy that sampled the token, with the log-probabilities that the engine recorded.
* pi_theta is the policy in training.
* pi_prox is the proximal policy: the policy that sampled the token, but with log-probabilities that the trainer
  computes. The setting `proximal` in `[grpo]` may choose an approximation of this policy.
* r_t = pi_theta(t) / mu(t) is the importance ratio.
* k_t = pi_prox(t) / mu(t) corrects for staleness and for the mismatch of trainer and engine. A loss that uses k_t clips
  u_t = pi_theta(t) / pi_prox(t) instead of r_t.
* A_t is the advantage, w_t is the weight of the token (`token_weights`), and sg stops the gradient.

The weights are computed once for a whole update, so the losses of microbatches add up to the loss of the update. `gspo`
and `minpro` use whole sequences, so a microbatch must not cut a sequence (`pack_trees` never does).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from polar_proxy.training.loss_names import MAX_LOG_RATIO, LossAggregation


@dataclass(frozen=True, slots=True)
class LossInputs:
    """The trained tokens of a microbatch, all tensors [n]; tokens of one sequence are in the order of sampling.

    Raises ValueError for tensors of different lengths and for values that are not finite.
    """

    logprobs: Tensor
    """log pi_theta, with gradient."""
    old_logprobs: Tensor
    """log mu, as the engine reported it when it sampled the token."""
    proximal_logprobs: Tensor
    """log pi_prox (see the module)."""
    advantages: Tensor
    weights: Tensor
    """w_t: the weight of each token, from `token_weights`."""
    sequences: Tensor
    """int64: index of the sequence that each token belongs to."""
    entropy: Tensor
    """Entropy of the distribution at each token, nats. Only reported."""

    def __post_init__(self) -> None:
        for name in ("logprobs", "old_logprobs", "proximal_logprobs", "advantages", "weights", "sequences", "entropy"):
            tensor: Tensor = getattr(self, name).detach()
            if tensor.shape != self.logprobs.shape:
                raise ValueError(f"expected {len(self.logprobs)} values in `{name}`, but got {tuple(tensor.shape)}")
            if not bool(torch.isfinite(tensor).all()):
                raise ValueError(f"`{name}` of a trained token is not finite: leave the token out, or find the cause")


@dataclass(frozen=True, slots=True)
class LossStats:
    """Statistics over the trained tokens. Every token counts the same, whatever its weight in the loss."""

    tokens: int
    clipped_share: float
    """Share of tokens whose gradient was removed or bounded by clipping."""
    dropped_share: float
    """Share of tokens that were dropped because trainer and engine disagree."""
    ratio_mean: float
    """Mean of the ratio that the loss uses (of the token, the sequence or the prefix)."""
    ratio_max: float
    mismatch_mean: float
    """Mean of |log pi_prox - log mu|, nats."""
    mismatch_max: float
    approx_kl: float
    """KL(mu || pi_theta) by the k3 estimator: mean(r - 1 - log r) with r = pi_theta / mu."""
    entropy: float


def ppo_clip(batch: LossInputs, *, clip_low: float = 0.2, clip_high: float = 0.2) -> tuple[Tensor, LossStats]:
    """PPO: L = -sum_t w_t min(r_t A_t, clip(r_t, 1 - clip_low, 1 + clip_high) A_t).

    With `aggregation="sequence"` this is the loss of GRPO without its KL term (`kl_to_reference`).
    Source: Schulman et al., PPO, arXiv 1707.06347; GRPO: arXiv 2402.03300.
    """
    ratio = log_ratio(batch.logprobs, batch.old_logprobs).exp()
    objective, clipped = _clipped_objective(ratio, batch.advantages, 1.0 - clip_low, 1.0 + clip_high)
    return _reduce(batch, objective, ratio, clipped=clipped)


def dapo(batch: LossInputs, *, clip_low: float = 0.2, clip_high: float = 0.28) -> tuple[Tensor, LossStats]:
    """DAPO: `ppo_clip` with a higher upper bound, so that the probability of unlikely tokens can grow.

    In the paper every token weighs the same (`aggregation="token"`). DAPO's dynamic sampling is the setting
    `dynamic_sampling`.
    Source: Yu et al., DAPO, arXiv 2503.14476; 0.2 and 0.28 from its section 4.1.
    """
    return ppo_clip(batch, clip_low=clip_low, clip_high=clip_high)


def gspo(batch: LossInputs, *, clip_low: float = 3e-4, clip_high: float = 4e-4) -> tuple[Tensor, LossStats]:
    """GSPO: clip one ratio per sequence, the geometric mean of the ratios of its tokens.

    s_i = exp(mean_t log r_it);  L = -mean_i min(s_i A_i, clip(s_i, 1 - clip_low, 1 + clip_high) A_i).

    The mean over sequences is part of the formula, so `loss_aggregation` has no effect on this loss
    (`OWN_AGGREGATION`). Here a sequence consists of the sampled tokens of one trace, over all its turns; the traces of
    a rollout share the weight of one sequence.
    Source: Zheng et al., GSPO, arXiv 2507.18071; the clips from its section 5.1.
    """
    log_ratios = log_ratio(batch.logprobs, batch.old_logprobs)
    _, owner, counts = torch.unique(batch.sequences, return_inverse=True, return_counts=True)
    sums = torch.zeros(len(counts), dtype=log_ratios.dtype, device=owner.device).index_add(0, owner, log_ratios)
    ratio = (sums / counts).exp()[owner]
    objective, clipped = _clipped_objective(ratio, batch.advantages, 1.0 - clip_low, 1.0 + clip_high)
    return _reduce(batch, objective, ratio, clipped=clipped)


def cispo(batch: LossInputs, *, min_ratio: float = 0.0, max_ratio: float = 5.0) -> tuple[Tensor, LossStats]:
    """CISPO: L = -sum_t w_t sg(clip(r_t, min_ratio, max_ratio)) A_t log pi_theta(t).

    The clip bounds the ratio and never removes the gradient, so every token is trained. In the paper every token weighs
    the same (`aggregation="token"`), and there is no lower bound. The upper bound of 5 is from ScaleRL (arXiv
    2510.13786).
    Source: MiniMax-M1, arXiv 2506.13585.
    """
    ratio = log_ratio(batch.logprobs, batch.old_logprobs).exp()
    return _weighted_likelihood(batch, ratio, min_ratio, max_ratio)


def minpro(batch: LossInputs, *, clip_low: float = 0.2, clip_high: float = 0.28) -> tuple[Tensor, LossStats]:
    """MinPRO: weigh a token by r_t times the smallest earlier ratio, because the ratio of the whole prefix can explode.

    q_t = r_t * min_{j < t} r_j (for the first token, r_t);
    L = -sum_t w_t sg(clip(q_t, 1 - clip_low, 1 + clip_high)) A_t log pi_theta(t).

    In the source every token weighs the same (`aggregation="token"`). The prefix of a token consists of the sampled
    tokens before it in the same sequence; prompts and tool output do not count. The default clips are ours.
    Source: Lei et al., A Step Back: Prefix Importance Ratio Stabilizes Policy Optimization, arXiv 2601.22718 (the
    formula as quoted by a survey; we had no access to the paper's text).
    """
    log_ratios = log_ratio(batch.logprobs, batch.old_logprobs)
    ratio = (log_ratios + _smallest_earlier(log_ratios.detach(), batch.sequences)).exp()
    return _weighted_likelihood(batch, ratio, 1.0 - clip_low, 1.0 + clip_high)


def adaptive_bounds(
    ratio: Tensor,
    advantages: Tensor,
    *,
    target: float,
    low: tuple[float, float],
    high: tuple[float, float],
    step: float,
) -> tuple[float, float]:
    """Choose clip bounds (low, high) with which positive advantages carry at least the share `target` of the gradient.

    P = sum of r A over unclipped A > 0, N = sum of r |A| over unclipped A < 0; the goal is P / (P + N) >= target. The
    search starts at low[0] and high[0] and ends at the first bounds that reach the goal. Bounds are raised in
    steps of `step`: first the lower one, to at most low[1] (fewer negative tokens), then the upper one, to at most
    high[1] (more positive tokens). If the goal is not reached, the last bounds are returned. Without negative tokens
    the share is 1.

    Source: Xi et al., BAPO, arXiv 2510.18927. Target, ranges and order are those of the authors' repository. Their
    code also counts clipped tokens, with the clipped value, so that raising the lower bound can only lower the share;
    this function counts only the tokens that still have a gradient.
    """
    bottom, top = low[0], high[0]
    share = _positive_share(ratio, advantages, bottom, top)
    while share < target and bottom < low[1]:
        bottom = min(round(bottom + step, 12), low[1])
        share = _positive_share(ratio, advantages, bottom, top)
    while share < target and top < high[1]:
        top = min(round(top + step, 12), high[1])
        share = _positive_share(ratio, advantages, bottom, top)
    return bottom, top


def bapo(
    batch: LossInputs,
    *,
    target: float = 0.5,
    low: tuple[float, float] = (0.6, 0.9),
    high: tuple[float, float] = (1.2, 3.0),
    step: float = 0.05,
) -> tuple[Tensor, LossStats]:
    """BAPO: L = -sum_t w_t min(r_t A_t, clip(r_t, c_low, c_high) A_t), with bounds from `adaptive_bounds`.

    The bounds are chosen on the tokens of `batch`, so `batch` must hold a whole update.
    Source: arXiv 2510.18927, see `adaptive_bounds`.
    """
    ratio = log_ratio(batch.logprobs, batch.old_logprobs).exp()
    bounds = adaptive_bounds(ratio.detach(), batch.advantages, target=target, low=low, high=high, step=step)
    objective, clipped = _clipped_objective(ratio, batch.advantages, *bounds)
    return _reduce(batch, objective, ratio, clipped=clipped)


# Losses that correct for the mismatch between trainer and engine, or for stale samples


def decoupled(
    batch: LossInputs, *, clip_low: float = 0.2, clip_high: float = 0.2, max_weight: float | None = None
) -> tuple[Tensor, LossStats]:
    """Decoupled PPO for stale data: L = -sum_t w_t k_t min(u_t A_t, clip(u_t, 1 - clip_low, 1 + clip_high) A_t).

    The clip is centred on pi_prox instead of mu, so that stale tokens keep a gradient. Tokens with k_t above
    `max_weight` are dropped. (Notation: see the module.)
    Source: Hilton et al., arXiv 2110.00641; used by AReaL, arXiv 2505.24298.
    """
    weight = log_ratio(batch.proximal_logprobs, batch.old_logprobs).exp()
    if max_weight is not None:
        weight = torch.where(weight > max_weight, 0.0, weight)
    return _corrected(batch, weight, clip_low, clip_high)


def tis(
    batch: LossInputs, *, cap: float = 2.0, clip_low: float = 0.2, clip_high: float = 0.2
) -> tuple[Tensor, LossStats]:
    """Truncated importance sampling: L = -sum_t w_t min(k_t, cap) min(u_t A_t, clip(u_t, ...) A_t).

    Source: Yao et al., Your Efficient RL Framework Secretly Brings You Off-Policy RL Training (2025); the formula and
    the cap of 2 as in TRL's paper index.
    """
    weight = log_ratio(batch.proximal_logprobs, batch.old_logprobs).exp().clamp(max=cap)
    return _corrected(batch, weight, clip_low, clip_high)


def icepop(
    batch: LossInputs, *, low: float = 0.5, high: float = 5.0, clip_low: float = 0.2, clip_high: float = 0.2
) -> tuple[Tensor, LossStats]:
    """IcePop: drop tokens on which trainer and engine disagree too much, in either direction.

    L = -sum_t w_t M(k_t) min(u_t A_t, clip(u_t, 1 - clip_low, 1 + clip_high) A_t); M(k) = k where low <= k <= high,
    else 0. No gradient flows through M.

    Source: Ring-1T, arXiv 2510.18855, as we read it. In the first update of a step, u_t is 1: the clip has no effect,
    and the loss is equation 1 of INTELLECT-3, arXiv 2512.16144. The default bounds are ours. (Notation: see the
    module.)
    """
    weight = log_ratio(batch.proximal_logprobs, batch.old_logprobs).exp()
    weight = torch.where((weight < low) | (weight > high), 0.0, weight)
    return _corrected(batch, weight, clip_low, clip_high)


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
"""Losses by the name that a configuration uses. Each takes `LossInputs`, and its settings as keyword arguments."""

OWN_AGGREGATION: Mapping[str, LossAggregation] = {"gspo": "sequence"}
"""The aggregation of the losses that ignore the setting `loss_aggregation`, because their formula prescribes it."""


# Weights and added terms


def token_weights(
    sequences: Tensor,
    rollouts: Tensor,
    *,
    aggregation: LossAggregation,
    constants: Tensor | None = None,
) -> Tensor:
    """Return the weight of each trained token in the loss, float64 [n].

    `sequences` and `rollouts`, int64 [n]: the sequence and the rollout of each token. R is the number of rollouts. The
    total weight of a rollout does not depend on the number of sequences into which it is cut. The weight by
    `aggregation`:

    * token:    w_t = 1 / n. Every token weighs the same (DAPO, arXiv 2503.14476).
    * sequence: w_t = 1 / (R * sequences of its rollout * tokens of its sequence). All rollouts weigh the same, and so
                do all sequences of a rollout. With one sequence per rollout: GRPO, arXiv 2402.03300.
    * rollout:  w_t = 1 / (R * tokens of its rollout). All rollouts weigh the same, and so do all tokens of a rollout.
    * constant: w_t = 1 / `constants` [n]. The constant of a token is (number of groups) * (number of rollouts in the
                token's group) * (a fixed length), so that the length of an answer has no influence (Dr. GRPO, arXiv
                2503.20783, whose code divides by the largest length allowed).
    """
    if aggregation == "constant":
        assert constants is not None, "the caller has the groups"
        return 1.0 / constants.to(torch.float64)
    if aggregation == "token":
        return torch.full((len(sequences),), 1.0 / max(1, len(sequences)), dtype=torch.float64)
    _, rollout, rollout_tokens = torch.unique(rollouts, return_inverse=True, return_counts=True)
    if aggregation == "rollout":
        share = rollout_tokens[rollout]
    else:
        _, sequence, sequence_tokens = torch.unique(sequences, return_inverse=True, return_counts=True)
        owner = torch.zeros_like(sequence_tokens).scatter_(0, sequence, rollout)
        share = torch.bincount(owner)[rollout] * sequence_tokens[sequence]
    return 1.0 / (len(rollout_tokens) * share).to(torch.float64)


@dataclass(frozen=True, slots=True)
class KlStats:
    """Statistics of the KL term over the trained tokens."""

    mean: float
    """Unweighted mean over tokens of the KL estimate times the bounded importance ratio."""
    ratio_max: float
    """Largest importance ratio before it is bounded."""
    bounded_share: float
    """Share of tokens whose ratio was bounded."""


def kl_to_reference(
    logprobs: Tensor,
    reference_logprobs: Tensor,
    old_logprobs: Tensor,
    weights: Tensor,
    *,
    estimator: Literal["k1", "k2", "k3"] = "k3",
    max_ratio: float = 5.0,
) -> tuple[Tensor, KlStats]:
    """Estimate KL(pi_theta || pi_ref) at the trained tokens, and return the loss and statistics. All tensors [n].

    The loss is the sum of the tokens' estimates, each weighted by w_t.

    With d = log pi_theta - log pi_ref, the estimate of a token is k1 = d, k2 = d^2 / 2 or k3 = exp(-d) - 1 + d.

    Each estimate is multiplied by r = pi_theta / mu. For k1 and k3, r is differentiated too, so value and gradient are
    unbiased, even off policy (k3: DeepSeek-V3.2, arXiv 2512.02556, as TRL's paper index gives it). For k2, r is not
    differentiated: the estimate is sg(r) d^2 / 2, and its gradient, `r * d * grad(log pi_theta)`, is that of the KL.

    To bound r, each estimate is also multiplied by the constant min(1, max_ratio / r). Without this bound, a single
    token could outweigh all others, if it is much likelier under pi_theta than under mu.

    Source: Schulman, Approximating KL Divergence (joschu.net/blog/kl-approx.html).
    """
    distance = log_ratio(logprobs, reference_logprobs)
    if estimator == "k1":
        estimate = distance
    elif estimator == "k2":
        estimate = 0.5 * distance**2
    else:
        estimate = torch.expm1(-distance) + distance
    ratio = log_ratio(logprobs, old_logprobs).exp()
    if estimator == "k2":
        ratio = ratio.detach()
    estimate = ratio * (max_ratio / ratio.detach()).clamp(max=1.0) * estimate
    stats = KlStats(
        mean=float(estimate.detach().mean()),
        ratio_max=float(ratio.detach().max()),
        bounded_share=float((ratio.detach() > max_ratio).double().mean()),
    )
    return (weights.to(estimate.dtype) * estimate).sum(), stats


def observation_loss(logprobs: Tensor, total: int) -> Tensor:
    """ECHO: the policy learns to predict the environment's answers to its actions. L = -(1 / |O|) sum_{t in O} log
    pi_theta(t).

    `logprobs` [n]: log pi_theta of the observed tokens of a microbatch. `total`: |O|, the number of observed tokens in
    the whole update. Observed tokens were not sampled, so they have no importance ratio and no advantage. The caller
    multiplies the result by a coefficient (0.05 in the paper) and adds it to the policy loss.

    Source: Shrivastava et al., ECHO, arXiv 2605.24517 (length-normalised cross-entropy; coefficient and normalisation
    as rLLM's ECHO states them).
    """
    return -logprobs.sum() / max(1, total)


def log_ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    """Return `numerator` - `denominator` [n], both log-probabilities, clamped to +-`MAX_LOG_RATIO`."""
    return (numerator - denominator).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def _clipped_objective(ratio: Tensor, advantages: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    """Return min(r A, clip(r, low, high) A) [n], and where the clip removed the gradient (bool [n])."""
    bounded = ratio.clamp(low, high)
    clipped = ((advantages > 0) & (ratio > high)) | ((advantages < 0) & (ratio < low))
    return torch.minimum(ratio * advantages, bounded * advantages), clipped


def _weighted_likelihood(batch: LossInputs, ratio: Tensor, low: float, high: float) -> tuple[Tensor, LossStats]:
    """Return the loss with the objective sg(clip(ratio, low, high)) A log pi_theta, and its statistics."""
    bounded = ratio.detach().clamp(low, high)
    outside = (ratio < low) | (ratio > high)
    return _reduce(batch, bounded * batch.advantages * batch.logprobs, ratio, clipped=outside)


def _corrected(batch: LossInputs, weight: Tensor, clip_low: float, clip_high: float) -> tuple[Tensor, LossStats]:
    """Return the loss with the objective sg(weight) min(u A, clip(u, ...) A), u = pi_theta / pi_prox, and its
    statistics. Tokens of weight 0 count as dropped."""
    dropped = weight == 0.0
    ratio = log_ratio(batch.logprobs, batch.proximal_logprobs).exp()
    objective, clipped = _clipped_objective(ratio, batch.advantages, 1.0 - clip_low, 1.0 + clip_high)
    return _reduce(batch, weight.detach() * objective, ratio, clipped=clipped & ~dropped, dropped=dropped)


def _reduce(
    batch: LossInputs, objective: Tensor, ratio: Tensor, *, clipped: Tensor, dropped: Tensor | None = None
) -> tuple[Tensor, LossStats]:
    """Return loss = -sum_t w_t * objective_t and its statistics."""
    loss = -(batch.weights.to(objective.dtype) * objective).sum()
    ratio, drift = ratio.detach(), log_ratio(batch.logprobs.detach(), batch.old_logprobs)
    mismatch = (batch.proximal_logprobs - batch.old_logprobs).abs()
    n = len(ratio)
    stats = LossStats(
        tokens=n,
        clipped_share=int(clipped.sum()) / n,
        dropped_share=0.0 if dropped is None else int(dropped.sum()) / n,
        ratio_mean=float(ratio.mean()),
        ratio_max=float(ratio.max()),
        mismatch_mean=float(mismatch.mean()),
        mismatch_max=float(mismatch.max()),
        approx_kl=float((drift.exp() - 1.0 - drift).mean()),
        entropy=float(batch.entropy.mean()),
    )
    return loss, stats


def _smallest_earlier(log_ratios: Tensor, sequences: Tensor) -> Tensor:
    """Return the smallest log-ratio among the earlier tokens of each token's sequence, [n]; 0 for a first token."""
    smallest = torch.zeros_like(log_ratios)
    for sequence in torch.unique(sequences):
        here = torch.nonzero(sequences == sequence).squeeze(1)
        smallest[here[1:]] = torch.cummin(log_ratios[here], dim=0).values[:-1]
    return smallest


def _positive_share(ratio: Tensor, advantages: Tensor, low: float, high: float) -> float:
    weight = ratio * advantages.abs()
    positive = float(weight[(advantages > 0) & (ratio <= high)].sum())
    negative = float(weight[(advantages < 0) & (ratio >= low)].sum())
    return 1.0 if negative == 0.0 else positive / (positive + negative)
