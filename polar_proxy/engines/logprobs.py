"""Interpretation of servers' log-probabilities: from which distribution they are (before or after the temperature), and
their values at another temperature."""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, log, nan

from polar_proxy.engines.openai_stream import MISSING_BELOW
from polar_proxy.types import LogprobMode

ALTERNATIVES = 20
"""Number of the most likely tokens whose log-probabilities are requested for each position. By default, vLLM refuses a
larger number (`--max-logprobs`)."""
_LARGEST_VOCABULARY = 1 << 20
_UNCERTAINTY = 1e-3
"""Greatest distance, in nats, between the bounds of a log-probability that `at_temperature` returns."""


def logprob_mode(at_one: dict[str, float], at_two: dict[str, float]) -> LogprobMode:
    """Return `raw` or `processed`, from the log-probabilities of the same tokens at temperature 1 and 2.

    log p_a - log p_b is the difference of two logits divided by the temperature that was applied: from temperature 1
    to 2 it stays the same in raw mode and is halved in processed mode. The pair of tokens with the largest difference
    at temperature 1 is used, because it is the least noisy.
    Raises ValueError if neither fits. The caller puts the server's name before the error's text.
    """
    if any(value > 1e-3 for value in at_one.values()) or sum(map(exp, at_one.values())) > 1.01:
        raise ValueError("returns logits, not log-probabilities.")
    common = [t for t in at_one if t in at_two and min(at_one[t], at_two[t]) > MISSING_BELOW]
    high, low = max(common, key=at_one.__getitem__, default=""), min(common, key=at_one.__getitem__, default="")
    gap = at_one[high] - at_one[low] if common else 0.0
    if gap < 1e-2:
        raise ValueError(
            "returned no two tokens with different probabilities, so it is unknown whether its log-probabilities are "
            "raw or processed."
        )
    ratio = (at_two[high] - at_two[low]) / gap
    if abs(ratio - 1.0) < 0.15:
        return "raw"
    if abs(ratio - 0.5) < 0.15:
        return "processed"
    raise ValueError(
        "returns log-probabilities that are neither raw nor processed: from temperature 1 to 2, the difference between "
        f"those of two tokens changed by the factor {ratio:.2f} (expected: 1.0 if raw, 0.5 if processed)."
    )


def at_temperature(logprob: float, known: Sequence[float], temperature: float) -> float:
    """Return the log-probability of a token at a temperature, from log-probabilities at temperature 1.

    `known`: log-probabilities of the `ALTERNATIVES` most likely tokens and of the token itself.

    The result is log(p) / T - log(sum of p_v^(1/T) over all tokens v of the vocabulary). The part of the sum for the
    unknown tokens has only bounds: together these tokens have the remaining probability, and none is more likely than
    the last of the `ALTERNATIVES` most likely tokens. Return the middle of the bounds, or NaN if they are more than
    0.001 nats apart.
    """
    power = 1.0 / temperature
    probabilities = [exp(value) for value in known]
    total = sum(value**power for value in probabilities)
    rest = max(0.0, 1.0 - sum(probabilities))
    cutoff = sorted(probabilities, reverse=True)[min(ALTERNATIVES, len(probabilities)) - 1]
    bounds = [0.0, rest * cutoff ** (power - 1.0)]
    if power < 1.0:
        bounds = [bounds[1], _LARGEST_VOCABULARY ** (1.0 - power) * rest**power]
    low, high = (log(total + bound) for bound in bounds)
    return power * logprob - (low + high) / 2 if high - low <= _UNCERTAINTY else nan
