"""Quantiles of Student's t distribution, for whole degrees of freedom (SciPy would be a dependency for one number)."""

from __future__ import annotations

import math


def t_quantile(probability: float, freedom: int) -> float:
    """The t with P(T <= t) = `probability`, 0.5 <= probability < 1, `freedom` >= 1; to about 1e-10.

    By bisection of `central`. Raises ValueError outside of that range.
    """
    if freedom < 1 or not 0.5 <= probability < 1.0:
        raise ValueError(f"no quantile for probability {probability} and {freedom} degrees of freedom")
    wanted, low, high = 2.0 * probability - 1.0, 0.0, 1.0
    while central(high, freedom) < wanted:
        high *= 2.0
    for _ in range(100):
        middle = (low + high) / 2.0
        low, high = (middle, high) if central(middle, freedom) < wanted else (low, middle)
    return high


def central(t: float, freedom: int) -> float:
    """P(|T| <= t) for t >= 0.

    With theta = atan(t / sqrt(freedom)), a finite sum: odd freedom, 2/pi (theta + sin cos (1 + 2/3 cos^2 + ...)); even,
    sin (1 + 1/2 cos^2 + 1*3/(2*4) cos^4 + ...). Source: Abramowitz and Stegun, 26.7.3 and 26.7.4.
    """
    theta = math.atan(t / math.sqrt(freedom))
    sine, square = math.sin(theta), math.cos(theta) ** 2
    odd = freedom % 2
    term = total = 0.0 if freedom == 1 else (math.cos(theta) if odd else 1.0)
    for k in range(3 if odd else 2, freedom - 1, 2):
        term *= square * (k - 1) / k
        total += term
    return 2.0 / math.pi * (theta + sine * total) if odd else sine * total
