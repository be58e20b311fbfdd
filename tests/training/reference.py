"""Advantages, losses, aggregations and KL written again from their formulas: plain Python floats, loops, no tensors.

Slow and obvious; shares nothing with the product. A loss is a function of the new log-probabilities and of a second,
`frozen` copy of them, which stands wherever the formula stops the gradient. So the gradient is a central difference in
the first argument alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, median, stdev

Rewards = Sequence[float | None]


@dataclass(frozen=True)
class Token:
    """A trained token: its log-probabilities by the sampler, the proximal policy and the reference model, ..."""

    old: float
    proximal: float
    reference: float
    advantage: float
    group: int
    rollout: int
    trace: int
    group_size: int


# ---------------------------------------------------------------- advantages: None where nothing is trained


def grpo(rewards: Rewards) -> list[float | None]:
    known = [reward for reward in rewards if reward is not None]
    if len(set(known)) < 2:
        return [None if reward is None else 0.0 for reward in rewards]
    return [None if reward is None else (reward - fmean(known)) / (stdev(known) + 1e-6) for reward in rewards]


def dr_grpo(rewards: Rewards) -> list[float | None]:
    known = [reward for reward in rewards if reward is not None]
    if len(set(known)) < 2:
        return [None if reward is None else 0.0 for reward in rewards]
    return [None if reward is None else reward - fmean(known) for reward in rewards]


def rloo(rewards: Rewards) -> list[float | None]:
    found: list[float | None] = []
    for index, reward in enumerate(rewards):
        others = [other for place, other in enumerate(rewards) if place != index and other is not None]
        found.append(None if reward is None else reward - fmean(others) if others else 0.0)
    return found


def mc_grpo(rewards: Rewards) -> list[float | None]:
    known = [reward for reward in rewards if reward is not None]
    if len(set(known)) < 2:
        return [None if reward is None else 0.0 for reward in rewards]
    middle = median(known)
    deviations = [abs(reward - middle) for reward in known]
    spread = median(deviations) or fmean(deviations)
    found = [None if reward is None else (reward - middle) / (spread + 1e-3) for reward in rewards]
    if len(known) % 2:
        found[list(rewards).index(middle)] = None
    return found


def raft(rewards: Rewards) -> list[float | None]:
    return [reward if reward is not None and reward > 0 else None for reward in rewards]


ADVANTAGES: dict[str, Callable[[Rewards], list[float | None]]] = {
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "rloo": rloo,
    "mc_grpo": mc_grpo,
    "raft": raft,
}


# ---------------------------------------------------------------- aggregations


def weight(tokens: Sequence[Token], token: Token, aggregation: str, length: int) -> float:
    """Return the weight of one token."""
    rollouts = len({other.rollout for other in tokens})
    own_rollout = [other for other in tokens if other.rollout == token.rollout]
    own_trace = [other for other in tokens if other.trace == token.trace]
    if aggregation == "token":
        return 1 / len(tokens)
    if aggregation == "rollout":
        return 1 / rollouts / len(own_rollout)
    if aggregation == "sequence":
        return 1 / rollouts / len({other.trace for other in own_rollout}) / len(own_trace)
    return 1 / len({other.group for other in tokens}) / token.group_size / length


# ---------------------------------------------------------------- losses: the objective of each token, to be maximised

Objective = Callable[[Sequence[Token], Sequence[float], Sequence[float]], list[float]]


def clip(value: float, low: float, high: float) -> float:
    return max(low, min(high, value))


def clipped(ratio: float, advantage: float, low: float, high: float) -> float:
    return min(ratio * advantage, clip(ratio, low, high) * advantage)


def ppo(low: float, high: float) -> Objective:
    def objective(tokens: Sequence[Token], new: Sequence[float], frozen: Sequence[float]) -> list[float]:
        return [
            clipped(math.exp(value - token.old), token.advantage, low, high)
            for token, value in zip(tokens, new, strict=True)
        ]

    return objective


def gspo(tokens: Sequence[Token], new: Sequence[float], frozen: Sequence[float]) -> list[float]:
    found = []
    for token in tokens:
        own = [place for place, other in enumerate(tokens) if other.trace == token.trace]
        ratio = math.exp(fmean([new[place] - tokens[place].old for place in own]))
        found.append(clipped(ratio, token.advantage, 1 - 3e-4, 1 + 4e-4))
    return found


def cispo(tokens: Sequence[Token], new: Sequence[float], frozen: Sequence[float]) -> list[float]:
    return [
        clip(math.exp(still - token.old), 0.0, 5.0) * token.advantage * value
        for token, value, still in zip(tokens, new, frozen, strict=True)
    ]


def minpro(tokens: Sequence[Token], new: Sequence[float], frozen: Sequence[float]) -> list[float]:
    found = []
    for place, token in enumerate(tokens):
        own = math.exp(frozen[place] - token.old)
        before = [math.exp(frozen[p] - tokens[p].old) for p in range(place) if tokens[p].trace == token.trace]
        found.append(clip(min(before, default=1.0) * own, 0.8, 1.28) * token.advantage * new[place])
    return found


def bapo(tokens: Sequence[Token], new: Sequence[float], frozen: Sequence[float]) -> list[float]:
    ratios = [math.exp(still - token.old) for token, still in zip(tokens, frozen, strict=True)]

    def share(low: float, high: float) -> float:
        pairs = list(zip(tokens, ratios, strict=True))
        positive = sum(r * t.advantage for t, r in pairs if t.advantage > 0 and r <= high)
        negative = sum(-r * t.advantage for t, r in pairs if t.advantage < 0 and r >= low)
        return 1.0 if not negative else positive / (positive + negative)

    lows = [0.6 + 0.05 * step for step in range(7)]
    highs = [1.2 + 0.05 * step for step in range(37)]
    candidates = [(low, 1.2) for low in lows] + [(0.9, high) for high in highs[1:]]
    bounds = next((pair for pair in candidates if share(*pair) >= 0.5), candidates[-1])
    return ppo(*bounds)(tokens, new, frozen)


def corrected(correction: Callable[[float], float]) -> Objective:
    def objective(tokens: Sequence[Token], new: Sequence[float], frozen: Sequence[float]) -> list[float]:
        return [
            correction(math.exp(token.proximal - token.old))
            * clipped(math.exp(value - token.proximal), token.advantage, 0.8, 1.2)
            for token, value in zip(tokens, new, strict=True)
        ]

    return objective


LOSSES: dict[str, Objective] = {
    "ppo_clip": ppo(0.8, 1.2),
    "dapo": ppo(0.8, 1.28),
    "gspo": gspo,
    "cispo": cispo,
    "minpro": minpro,
    "bapo": bapo,
    "decoupled": corrected(lambda k: k),
    "tis": corrected(lambda k: min(k, 2.0)),
    "icepop": corrected(lambda k: k if 0.5 <= k <= 5.0 else 0.0),
}


def kl(estimator: str, *, max_ratio: float) -> Objective:
    """Return minus the estimate of each token's KL to the reference."""

    def objective(tokens: Sequence[Token], new: Sequence[float], frozen: Sequence[float]) -> list[float]:
        found = []
        for token, value, still in zip(tokens, new, frozen, strict=True):
            d = value - token.reference
            estimate = {"k1": d, "k2": d * d / 2, "k3": math.exp(-d) - 1 + d}[estimator]
            bound = min(1.0, max_ratio / math.exp(still - token.old))
            found.append(-estimate * bound * math.exp((still if estimator == "k2" else value) - token.old))
        return found

    return objective


# ---------------------------------------------------------------- value and gradient


def loss_and_gradient(
    tokens: Sequence[Token], new: Sequence[float], objective: Objective, weights: Sequence[float]
) -> tuple[float, list[float]]:
    def loss(values: Sequence[float]) -> float:
        return -sum(w * one for w, one in zip(weights, objective(tokens, values, new), strict=True))

    step = 1e-6
    gradient = []
    for place in range(len(new)):
        higher, lower = list(new), list(new)
        higher[place] += step
        lower[place] -= step
        gradient.append((loss(higher) - loss(lower)) / (2 * step))
    return loss(new), gradient
