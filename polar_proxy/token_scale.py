"""The scale that colours sampled tokens by their probability, in the terminal and in the pages."""

from __future__ import annotations

import math

PROBABILITIES = (0.9, 0.5, 0.1, 0.01, 0.0)
"""The lowest probability of each step, from the likeliest tokens to the least likely."""


def scale_step(logprob: float) -> int:
    """Return the step to which a log-probability belongs, as an index in `PROBABILITIES`."""
    probability = math.exp(logprob)
    return next(step for step, lowest in enumerate(PROBABILITIES) if probability >= lowest)


def scale_legend() -> list[str]:
    """Return the label of each step of the scale, for a legend."""
    first, *rest, _ = PROBABILITIES
    return [f"p ≥ {first}", *(f"≥ {lowest}" for lowest in rest), "less"]
