"""What there is to say of one step of the optimiser, summed up over its passes and over processes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

from polar_proxy.training.auxiliary import ObservationStats
from polar_proxy.training.tokens import LossStats
from polar_proxy.types import Json


@dataclass(frozen=True, slots=True)
class StepStats:
    """Of the last epoch of a step, but for the mismatch, which is of the weights before it."""

    loss: float
    tokens: int
    """Trained."""
    computed_tokens: int
    """Nodes put through the model, forward and backward, in one epoch."""
    flat_tokens: int
    """What they would have been with nothing shared."""
    passes: int
    learning_rate: float
    grad_norm: float
    """Before clipping, of the last epoch."""
    ratio_mean: float
    ratio_max: float
    clipped_share: float
    dropped_share: float
    approx_kl: float
    entropy: float
    mismatch_mean: float
    """Mean |trainer's own log-probability before the step - recorded|, nats."""
    mismatch_max: float
    kl_reference: float | None
    observation_loss: float | None
    """Cross-entropy of the observed tokens, nats each; None without ECHO."""
    seconds: float

    def to_json(self) -> Json:
        return asdict(self)


@dataclass(slots=True)
class StepAccumulator:
    """Of the passes that one process makes in an epoch."""

    loss: float = 0.0
    kls: float = 0.0
    """Sum over tokens of the KL to the reference."""
    found: list[LossStats] = field(default_factory=list)
    observations: list[ObservationStats] = field(default_factory=list)
    computed: int = 0
    gaps: list[tuple[float, float]] = field(default_factory=list)
    """Of each pass: sum and largest of the mismatch."""


def step_stats(
    tallies: Sequence[StepAccumulator],
    *,
    flat_tokens: int,
    learning_rate: float,
    grad_norm: float,
    with_reference: bool,
    seconds: float,
) -> StepStats:
    """`tallies`: of all processes."""
    found = [stats for each in tallies for stats in each.found]
    gaps = [gap for each in tallies for gap in each.gaps]
    tokens = sum(stats.tokens for stats in found)
    seen = [stats for each in tallies for stats in each.observations]
    observed = sum(stats.tokens for stats in seen)
    return StepStats(
        loss=sum(each.loss for each in tallies),
        tokens=tokens,
        computed_tokens=sum(each.computed for each in tallies),
        flat_tokens=flat_tokens,
        passes=len(found),
        learning_rate=learning_rate,
        grad_norm=grad_norm,
        ratio_mean=_mean(found, "ratio_mean"),
        ratio_max=max(stats.ratio_max for stats in found),
        clipped_share=_mean(found, "clipped_share"),
        dropped_share=_mean(found, "dropped_share"),
        approx_kl=_mean(found, "approx_kl"),
        entropy=_mean(found, "entropy"),
        mismatch_mean=sum(total for total, _ in gaps) / tokens,
        mismatch_max=max(largest for _, largest in gaps),
        kl_reference=sum(each.kls for each in tallies) / tokens if with_reference else None,
        observation_loss=sum(stats.cross_entropy * stats.tokens for stats in seen) / observed if observed else None,
        seconds=seconds,
    )


def _mean(found: Sequence[LossStats], name: str) -> float:
    """Over tokens, of the passes' own means."""
    tokens = sum(stats.tokens for stats in found)
    return sum(float(getattr(stats, name)) * stats.tokens for stats in found) / tokens
