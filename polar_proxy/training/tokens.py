"""What every policy loss takes and gives: the tokens of a batch, and the statistics of a loss."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

LARGEST_LOG_RATIO = 20.0
"""Log-ratios are cut at +-20, so that exp never overflows; no gradient passes there."""


@dataclass(frozen=True, slots=True)
class LossInputs:
    """Tokens in a row, all tensors [n]; those of a sequence stand in the order in which they were sampled.

    Log-probabilities are natural. Outside of `mask` they and the advantages may be anything, NaN too. Raises
    ValueError where a tensor has another length, or a trained token has no finite log-probability or advantage.
    """

    new: Tensor
    """log pi_theta, with gradient."""
    recorded: Tensor
    """log mu: what the engine reported when it sampled."""
    advantages: Tensor
    mask: Tensor
    """bool: trained."""
    sequences: Tensor
    """int64: which sequence a token belongs to."""
    proximal: Tensor | None = None
    """log pi_prox: of the weights at the start of the step, by the trainer. Only what corrects mismatch needs it."""
    weights: Tensor | None = None
    """Of `normalise.token_weights`; default: the mean over the trained tokens."""
    entropy: Tensor | None = None
    """Of the distribution at each token, nats; only reported."""

    def __post_init__(self) -> None:
        n = len(self.new)
        named = {"recorded": self.recorded, "advantages": self.advantages, "mask": self.mask}
        named |= {"sequences": self.sequences}
        given = {"proximal": self.proximal, "weights": self.weights, "entropy": self.entropy}
        named |= {name: value for name, value in given.items() if value is not None}
        if wrong := {name: tuple(value.shape) for name, value in named.items() if value.shape != (n,)}:
            raise ValueError(f"{n} log-probabilities, but {wrong}")
        if self.mask.dtype != torch.bool:
            raise ValueError(f"the mask is {self.mask.dtype}, not boolean")
        for name in ("new", "recorded", "advantages", "proximal"):
            value = getattr(self, name)
            if value is not None and not bool(torch.isfinite(value.detach()[self.mask]).all()):
                raise ValueError(f"a trained token has no finite value of `{name}`: mask it out, or find out why")


@dataclass(frozen=True, slots=True)
class LossStats:
    """Over the trained tokens, each counted once whatever it weighs."""

    tokens: int
    clipped_share: float
    """Of tokens whose gradient clipping took away or bounded."""
    dropped_share: float
    """Of tokens that a mismatch mask left out."""
    ratio_mean: float
    ratio_max: float
    """Of the ratio that the loss uses (token, sequence or prefix)."""
    approx_kl: float
    """KL(mu || pi_theta) by k3: mean(r - 1 - log r), r = pi_theta / mu."""
    entropy: float | None = None


def log_ratio(numerator: Tensor, denominator: Tensor, mask: Tensor) -> Tensor:
    """log(numerator / denominator) [n], cut at +-20, 0 outside of the mask."""
    return torch.where(mask, numerator - denominator, 0.0).clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)


def clipped_objective(ratio: Tensor, advantages: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    """min(r A, clip(r, low, high) A) [n], and where the clip took the gradient away [n] (bool)."""
    bounded = ratio.clamp(low, high)
    clipped = ((advantages > 0) & (ratio > high)) | ((advantages < 0) & (ratio < low))
    return torch.minimum(ratio * advantages, bounded * advantages), clipped


def known_advantages(batch: LossInputs) -> Tensor:
    """Advantages [n], 0 outside of the mask."""
    return torch.where(batch.mask, batch.advantages, 0.0)


def segments(sequences: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """A number in [0, S) for the sequence of each token [n], and how many trained tokens each sequence has [S]."""
    _, owner = torch.unique(sequences, return_inverse=True)
    counts = torch.zeros(int(owner.max()) + 1, dtype=torch.int64, device=owner.device)
    return owner, counts.index_add_(0, owner, mask.to(torch.int64))


def reduce(
    batch: LossInputs,
    objective: Tensor,
    ratio: Tensor,
    *,
    clipped: Tensor | None = None,
    dropped: Tensor | None = None,
) -> tuple[Tensor, LossStats]:
    """loss = -sum_t w_t * objective_t over the trained tokens, with its statistics."""
    mask = batch.mask
    n = int(mask.sum())
    if n == 0:
        # A micro-batch of context alone adds nothing, but stays part of the graph.
        return (torch.where(mask, objective, 0.0)).sum() * 0.0, LossStats(0, 0.0, 0.0, 0.0, 0.0, 0.0)
    weights = mask / n if batch.weights is None else batch.weights
    loss = -(weights.to(objective.dtype) * torch.where(mask, objective, 0.0)).sum()
    with torch.no_grad():
        drift = log_ratio(batch.new.detach(), batch.recorded, mask)[mask]
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


def _share(flags: Tensor | None, mask: Tensor, n: int) -> float:
    return 0.0 if flags is None else int((flags & mask).sum()) / n
