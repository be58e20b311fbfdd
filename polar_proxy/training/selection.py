"""Curriculum and replay: which groups to train, how many rollouts each task gets next, which old rollouts to reuse.

Numpy, pure functions: estimates of solve rates are passed and returned as values, and functions that choose at random
take a generator. The training loop does not use this module yet.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from polar_proxy.training.advantages import Floats, Rewards, known_rewards

Verdict = Literal["train", "all_alike_best", "all_alike", "too_few"]


@dataclass(frozen=True, slots=True)
class GroupSelection:
    """Group names by decision, in the given order. Every group is in exactly one of `train`, `requeue` and `drop`."""

    train: tuple[str, ...]
    requeue: tuple[str, ...]
    drop: tuple[str, ...]
    verdicts: Mapping[str, Verdict]


def verdict(rewards: Rewards, *, best: float = 1.0, tolerance: float = 0.0) -> Verdict:
    """Return `train` if rewards differ by more than `tolerance`, otherwise why the group is not trained.

    `too_few`: fewer than two rollouts have a reward. `all_alike_best`: all rewards reach `best`, so the task is solved.
    `all_alike`: the rewards do not differ, and not all of them reach `best`.
    """
    known = known_rewards(rewards)
    if len(known) < 2:
        return "too_few"
    if known.max() - known.min() > tolerance:
        return "train"
    return "all_alike_best" if known.min() >= best else "all_alike"


def select_groups(
    groups: Mapping[str, Rewards],
    *,
    attempts: Mapping[str, int] | None = None,
    max_attempts: int = 2,
    best: float = 1.0,
    tolerance: float = 0.0,
) -> GroupSelection:
    """Select for training the groups whose rewards differ; the others have advantage 0 and no signal.

    A group with equal rewards below `best`, or with fewer than two rewards, is queued again if it has had fewer than
    `max_attempts` attempts. `attempts`: how many attempts each group has had, including this one; 1 by default. Groups
    that are solved completely or have no attempts left are dropped. The caller starts other groups until its batch is
    full. Source: dynamic sampling of DAPO, arXiv 2503.14476 (groups of 0 < number solved < G are kept). Queueing a
    group again is our addition.
    """
    verdicts = {name: verdict(rewards, best=best, tolerance=tolerance) for name, rewards in groups.items()}
    had = attempts or {}
    again = {
        name
        for name, found in verdicts.items()
        if found in ("all_alike", "too_few") and had.get(name, 1) < max_attempts
    }
    return GroupSelection(
        train=tuple(name for name, found in verdicts.items() if found == "train"),
        requeue=tuple(name for name in verdicts if name in again),
        drop=tuple(name for name, found in verdicts.items() if found != "train" and name not in again),
        verdicts=verdicts,
    )


@dataclass(frozen=True, slots=True)
class SolveRateBelief:
    """A distribution over a task's solve rate p: Beta(solved, failed). Beta(1, 1) means that nothing is known."""

    solved: float = 1.0
    failed: float = 1.0

    @property
    def mean(self) -> float:
        return self.solved / (self.solved + self.failed)


def updated(
    belief: SolveRateBelief, rewards: Rewards, *, solved_at: float = 1.0, decay: float = 1.0
) -> SolveRateBelief:
    """Return the belief after a group: the old counts decay towards Beta(1, 1), the new outcomes are added.

    solved' = 1 + decay * (solved - 1) + number solved; failed' likewise. Rollouts without a reward are ignored. With
    decay < 1 the belief follows a policy that learns.
    """
    known = known_rewards(rewards)
    won = int(np.count_nonzero(known >= solved_at))
    return SolveRateBelief(
        1.0 + decay * (belief.solved - 1.0) + won, 1.0 + decay * (belief.failed - 1.0) + len(known) - won
    )


def chance_of_spread(belief: SolveRateBelief, n: int) -> float:
    """Return the probability that the rewards of n rollouts, each 0 or 1, are not all equal: 1 - E[p^n] - E[(1 - p)^n].

    E[p^n] = prod_{i < n} (solved + i) / (solved + failed + i), from the Beta-binomial distribution.
    """
    return 0.0 if n < 2 else 1.0 - _all(belief.solved, belief.failed, n) - _all(belief.failed, belief.solved, n)


def group_size(belief: SolveRateBelief, *, wanted: float = 0.9, smallest: int = 2, largest: int = 16) -> int:
    """Return the smallest group size at which rewards differ with a probability of at least `wanted`.

    Tries the sizes from `smallest` on, and returns `largest` if no smaller one is enough (see `chance_of_spread`).
    """
    return next((n for n in range(smallest, largest) if chance_of_spread(belief, n) >= wanted), largest)


def allocate(
    beliefs: Mapping[str, SolveRateBelief], budget: int, *, smallest: int = 2, largest: int = 16
) -> dict[str, int]:
    """Return group sizes for `budget` rollouts that maximise the expected number of groups with unequal rewards.

    Every task gets at least `smallest` (1 or more) and at most `largest` rollouts. Beyond `smallest`, each rollout goes
    to the task whose `chance_of_spread` it raises most (the earlier task if equal). The gains shrink with every
    rollout, so the greedy choice is optimal. Raises ValueError if the budget is too small for all tasks.
    Source: ours, after VADE (arXiv 2511.18902: decaying Beta beliefs, maximal information) and the adaptive rollout
    allocation of XRPO (arXiv 2510.06672).
    """
    gains = {
        name: [chance_of_spread(belief, n + 1) - chance_of_spread(belief, n) for n in range(smallest, largest)]
        for name, belief in beliefs.items()
    }
    return _greedy(gains, budget, smallest)


def choose_tasks(beliefs: Mapping[str, SolveRateBelief], count: int, generator: np.random.Generator) -> list[str]:
    """Return the `count` most informative tasks by Thompson sampling: draw p from each belief, largest p (1 - p) first.

    p (1 - p) is the variance of the reward, which is largest at one half. A belief with few observations is wide, so
    such a task is chosen from time to time.
    Source: VADE, arXiv 2511.18902, as we read it (Beta beliefs, Thompson sampling, maximal information gain; we had no
    access to its exact measure).
    """
    drawn = {name: generator.beta(belief.solved, belief.failed) for name, belief in beliefs.items()}
    return sorted(drawn, key=lambda name: drawn[name] * (1.0 - drawn[name]), reverse=True)[:count]


def half_width(rewards: Rewards, *, n: int | None = None, confidence: float = 0.95) -> float:
    """Return half the confidence interval of a task's mean reward: h(n) = t_{1 - a/2, n - 1} s / sqrt(n).

    a = 1 - confidence, and s is the sample standard deviation of the known rewards. `n` is their number by default.
    With a larger `n`, return the half width that n rewards would have if s stayed the same. Infinite if fewer than two
    rewards are known. Source: XRPO, arXiv 2510.06672.
    """
    known = known_rewards(rewards)
    if len(known) < 2:
        return math.inf
    size = len(known) if n is None else n
    return _t_quantile(0.5 + confidence / 2.0, size - 1) * float(np.std(known, ddof=1)) / math.sqrt(size)


def allocate_more(
    rewards: Mapping[str, Rewards],
    budget: int,
    *,
    most: int = 16,
    confidence: float = 0.95,
    bonus: float = 0.0,
) -> dict[str, int]:
    """Return how many more rollouts each task gets, after a first round gave every task at least two rewards.

    Each rollout goes to the task whose confidence interval it narrows most, that is, with the largest
    h(n) - h(n + 1) + bonus * sqrt(log(1 + N) / n). h: `half_width` of the interval; n: the task's rewards plus the
    rollouts already given to it; N: all rewards of the first round. A task gets at most `most` more rollouts. If
    nothing can be gained (no spread anywhere, no bonus), the rest of the budget is not used. Raises ValueError for a
    task with fewer than two rewards. Source: XRPO, arXiv 2510.06672, as we read it: h(n) - h(n + 1) is the paper's
    measure, and the form of the exploration bonus is ours (0 switches it off).
    """
    known = {name: len(known_rewards(values)) for name, values in rewards.items()}
    if few := [name for name, n in known.items() if n < 2]:
        raise ValueError(f"tasks with fewer than two rewards have no confidence interval yet: {few}")
    everything = sum(known.values())

    def gain(name: str, n: int) -> float:
        here, there = (half_width(rewards[name], n=size, confidence=confidence) for size in (n, n + 1))
        return here - there + bonus * math.sqrt(math.log(1 + everything) / n)

    gains = {name: [gain(name, n) for n in range(first, first + most)] for name, first in known.items()}
    return _greedy(gains, budget, 0)


@dataclass(frozen=True, slots=True)
class ReplayCandidate:
    """A rollout that the policy was trained on, and may be trained on again."""

    name: str
    version: int
    """Policy version that sampled the rollout."""
    uses: int = 1
    """Number of times the policy was trained on the rollout."""


def replay(
    candidates: Sequence[ReplayCandidate],
    version: int,
    count: int,
    generator: np.random.Generator,
    *,
    max_age: int = 4,
    max_uses: int = 2,
) -> list[str]:
    """Return at most `count` different rollouts to train on again at policy `version`; fresh ones are more likely.

    Rollouts that were sampled more than `max_age` versions ago or used `max_uses` times are excluded. The others are
    drawn without replacement with probability proportional to 1 / (1 + age), age = version - sampled version. Train
    on them with a loss that corrects for staleness (`losses.decoupled`, `losses.tis`, `losses.icepop`), the recorded
    log-probabilities and the original advantages. `effective_sample_size` measures their remaining value.
    Source: ours; freshness as in TorchRL's StalenessAwareSampler.
    """
    fit = [one for one in candidates if 0 <= version - one.version <= max_age and one.uses < max_uses]
    if not fit or count < 1:
        return []
    fresh = np.array([1.0 / (1.0 + version - one.version) for one in fit])
    picked = generator.choice(len(fit), size=min(count, len(fit)), replace=False, p=fresh / fresh.sum())
    return [fit[index].name for index in picked]


def truncated_weights(log_ratios: Sequence[float] | Floats, *, cap: float = 2.0) -> Floats:
    """Return importance weights of replayed sequences, float64 [n]: min(exp(log ratio), cap).

    `log_ratios` [n]: log pi_prox - log mu, summed over the sampled tokens of each sequence.
    Source: Ionides, Truncated Importance Sampling, JCGS 2008.
    """
    return np.exp(np.minimum(np.asarray(log_ratios, dtype=np.float64), math.log(cap)))


def effective_sample_size(weights: Sequence[float] | Floats) -> float:
    """Return the equivalent number of equally weighted samples: (sum w)^2 / sum w^2, from 1 to n.

    Return 0 if all weights are 0. Source: Kish, Survey Sampling, 1965.
    """
    values = np.asarray(weights, dtype=np.float64)
    squares = float((values**2).sum())
    return float(values.sum()) ** 2 / squares if squares > 0.0 else 0.0


def _all(a: float, b: float, n: int) -> float:
    return math.prod((a + i) / (a + b + i) for i in range(n))


def _t_quantile(probability: float, freedom: int) -> float:
    """Return the quantile of Student's t: the t with P(T <= t) = `probability`, to about 1e-10.

    Raises ValueError unless 0.5 <= `probability` < 1 and `freedom` >= 1.
    """
    if freedom < 1 or not 0.5 <= probability < 1.0:
        raise ValueError(f"no quantile for probability {probability} and {freedom} degrees of freedom")
    central, low, high = 2.0 * probability - 1.0, 0.0, 1.0
    while _t_central(high, freedom) < central:
        high *= 2.0
    for _ in range(100):  # bisection
        middle = (low + high) / 2.0
        low, high = (middle, high) if _t_central(middle, freedom) < central else (low, middle)
    return high


def _t_central(t: float, freedom: int) -> float:
    """Return P(|T| <= t) of Student's t with `freedom` degrees of freedom, for t >= 0.

    It is a finite sum of sines and cosines of theta = atan(t / sqrt(freedom)). For odd `freedom` the sum is
    2/pi (theta + sin cos (1 + 2/3 cos^2 + ...)), for even `freedom` sin (1 + 1/2 cos^2 + 1*3/(2*4) cos^4 + ...).
    Source: Abramowitz and Stegun, 26.7.3 and 26.7.4.
    """
    theta = math.atan(t / math.sqrt(freedom))
    sine, square = math.sin(theta), math.cos(theta) ** 2
    odd = freedom % 2
    term = total = 0.0 if freedom == 1 else (math.cos(theta) if odd else 1.0)
    for k in range(3 if odd else 2, freedom - 1, 2):
        term *= square * (k - 1) / k
        total += term
    return 2.0 / math.pi * (theta + sine * total) if odd else sine * total


def _greedy(gains: Mapping[str, Sequence[float]], budget: int, smallest: int) -> dict[str, int]:
    """Give `smallest` to each name, then the rest one by one, always to the name with the largest next gain.

    Stop early when no gain is above 0. Raises ValueError if `budget` is too small."""
    sizes = dict.fromkeys(gains, smallest)
    left = budget - smallest * len(sizes)
    if left < 0:
        raise ValueError(f"{budget} rollouts are too few for {len(sizes)} groups of {smallest}")
    for _ in range(left):
        open_names = [name for name in sizes if sizes[name] - smallest < len(gains[name])]
        best = max(open_names, key=lambda name: gains[name][sizes[name] - smallest], default=None)
        if best is None or gains[best][sizes[best] - smallest] <= 0.0:
            break
        sizes[best] += 1
    return sizes
