"""Statistics of a training step, added up over its microbatches and processes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from polar_proxy.training.losses import KlStats, LossStats


@dataclass(frozen=True, slots=True)
class StepStats:
    """Statistics of the last epoch of a step. The mismatch is the same in every epoch, because the proximal
    log-probabilities are computed once per step."""

    loss: float
    tokens: int
    """Number of trained tokens."""
    computed_tokens: int
    """Number of tokens put through the model, forward and backward, in one epoch; a shared prefix counts once."""
    flat_tokens: int
    """Number of tokens that would be put through the model if every sequence were computed by itself."""
    microbatches: int
    learning_rate: float
    grad_norm: float
    """Norm of the gradient before clipping."""
    ratio_mean: float
    ratio_max: float
    clipped_share: float
    dropped_share: float
    approx_kl: float
    entropy: float
    mismatch_mean: float
    """Mean of |proximal log-probability - recorded one|, nats."""
    mismatch_max: float
    kl_reference: float | None
    """Mean of the KL estimates, each multiplied by its bounded importance ratio; None without a reference."""
    kl_ratio_max: float | None
    """Largest importance ratio of the KL term, before it is bounded."""
    kl_bounded_share: float | None
    """Share of tokens whose importance ratio was bounded in the KL term."""
    observation_loss: float | None
    """Cross-entropy of the observed tokens, nats per token; None without ECHO."""
    proximal_seconds: float
    """Time for passes with older weights (`proximal = "sampler"`)."""
    seconds: float


@dataclass(slots=True)
class StepAccumulator:
    """Sums over the microbatches that one process computes in one epoch."""

    loss: float = 0.0
    losses: list[LossStats] = field(default_factory=list)
    kl: list[tuple[int, KlStats]] = field(default_factory=list)
    """For each microbatch: (number of trained tokens, statistics of the KL term). Empty without a reference."""
    observation_sum: float = 0.0
    """Cross-entropy of the observed tokens, summed."""
    observed: int = 0
    computed_tokens: int = 0
    microbatches: int = 0


def step_stats(
    accumulators: Sequence[StepAccumulator],
    *,
    flat_tokens: int,
    learning_rate: float,
    grad_norm: float,
    proximal_seconds: float,
    seconds: float,
) -> StepStats:
    """Return the statistics of a step from the accumulators of all processes. Means over no tokens are 0."""
    losses = [stats for each in accumulators for stats in each.losses]
    kl = [stats for each in accumulators for stats in each.kl]
    tokens = sum(stats.tokens for stats in losses)
    observed = sum(each.observed for each in accumulators)
    means = ("ratio_mean", "clipped_share", "dropped_share", "approx_kl", "entropy", "mismatch_mean")
    return StepStats(
        loss=sum(each.loss for each in accumulators),
        tokens=tokens,
        computed_tokens=sum(each.computed_tokens for each in accumulators),
        flat_tokens=flat_tokens,
        microbatches=sum(each.microbatches for each in accumulators),
        learning_rate=learning_rate,
        grad_norm=grad_norm,
        ratio_max=max((stats.ratio_max for stats in losses), default=0.0),
        mismatch_max=max((stats.mismatch_max for stats in losses), default=0.0),
        kl_reference=sum(n * stats.mean for n, stats in kl) / tokens if kl else None,
        kl_ratio_max=max((stats.ratio_max for _, stats in kl), default=None),
        kl_bounded_share=sum(n * stats.bounded_share for n, stats in kl) / tokens if kl else None,
        observation_loss=sum(each.observation_sum for each in accumulators) / observed if observed else None,
        proximal_seconds=proximal_seconds,
        seconds=seconds,
        **{name: sum(getattr(stats, name) * stats.tokens for stats in losses) / max(1, tokens) for name in means},
    )
