"""Which groups are worth training, how many rollouts a task should get next, and which old rollouts may come again.

Numpy, no state: beliefs about tasks come in and go out as values, and what is random takes a generator.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from polar_proxy.training.advantages import Floats, Rewards, reward_array
from polar_proxy.training.student import t_quantile

Verdict = Literal["train", "all_alike_best", "all_alike", "too_few"]


@dataclass(frozen=True, slots=True)
class GroupSelection:
    """Groups by what becomes of them, in the order in which they came; every group is in exactly one of the three."""

    train: tuple[str, ...]
    requeue: tuple[str, ...]
    drop: tuple[str, ...]
    verdicts: Mapping[str, Verdict]


def verdict(rewards: Rewards, *, best: float = 1.0, tolerance: float = 0.0) -> Verdict:
    """`train` where rewards differ by more than `tolerance`; else why not.

    `too_few`: fewer than two rollouts have a reward. `all_alike_best`: all reach `best`, the task is solved.
    `all_alike`: no spread below that.
    """
    values = reward_array(rewards)
    known = values[~np.isnan(values)]
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
    """Groups without spread have advantage 0 and teach nothing: train the others.

    A group that failed whole, or in which too few were scored, is tried again until it had `max_attempts` (`attempts`
    says how many it had, this one included; 1 where it says nothing). A group that is solved whole is dropped, as are
    those out of attempts. The caller asks for other groups until its batch is full.
    Source: dynamic sampling of DAPO, arXiv 2503.14476 (groups of 0 < number solved < G are kept); re-queueing is ours.
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
    """What is believed of a task's solve rate p: Beta(solved, failed); both count 1 for nothing known."""

    solved: float = 1.0
    failed: float = 1.0

    @property
    def mean(self) -> float:
        return self.solved / (self.solved + self.failed)


def updated(
    belief: SolveRateBelief, rewards: Rewards, *, solved_at: float = 1.0, decay: float = 1.0
) -> SolveRateBelief:
    """The belief after a group: what was believed fades towards Beta(1, 1) by `decay`, what was seen is added.

    solved' = 1 + decay * (solved - 1) + number solved; failed' likewise. Rollouts without a reward tell nothing.
    With decay < 1 the belief follows a policy that learns.
    """
    values = reward_array(rewards)
    known = values[~np.isnan(values)]
    won = int(np.count_nonzero(known >= solved_at))
    return SolveRateBelief(
        1.0 + decay * (belief.solved - 1.0) + won, 1.0 + decay * (belief.failed - 1.0) + len(known) - won
    )


def chance_of_spread(belief: SolveRateBelief, n: int) -> float:
    """How likely n rollouts of 0-1 reward are not all alike: 1 - E[p^n] - E[(1 - p)^n], exact under the belief.

    E[p^n] = prod_{i < n} (solved + i) / (solved + failed + i), the Beta-binomial's ends.
    """
    return 0.0 if n < 2 else 1.0 - _all(belief.solved, belief.failed, n) - _all(belief.failed, belief.solved, n)


def group_size(belief: SolveRateBelief, *, wanted: float = 0.9, smallest: int = 2, largest: int = 16) -> int:
    """The smallest group in [smallest, largest] whose chance of spread reaches `wanted`; `largest` where none does."""
    return next((n for n in range(smallest, largest) if chance_of_spread(belief, n) >= wanted), largest)


def allocate(
    beliefs: Mapping[str, SolveRateBelief], budget: int, *, smallest: int = 2, largest: int = 16
) -> dict[str, int]:
    """Group sizes that make the most groups with spread out of `budget` rollouts, in expectation.

    Every task gets `smallest` (at least 1), then each further rollout goes to the task whose chance of spread it
    raises most (ties to the earlier). The gains shrink with every rollout, so this greedy choice is the best one.
    Raises ValueError where the budget is too small for all.
    Source: ours, after the idea of VADE (arXiv 2511.18902: Beta beliefs that fade, and information as the aim) and of
    adaptive rollout allocation in XRPO (arXiv 2510.06672).
    """
    gains = {
        name: [chance_of_spread(belief, n + 1) - chance_of_spread(belief, n) for n in range(smallest, largest)]
        for name, belief in beliefs.items()
    }
    return _greedy(gains, budget, smallest)


def choose_tasks(beliefs: Mapping[str, SolveRateBelief], count: int, generator: np.random.Generator) -> list[str]:
    """The `count` tasks of the most information, by Thompson sampling: p drawn of each belief, largest p (1 - p) first.

    p (1 - p) is the variance of the reward, largest at one half. A task little is known of is drawn widely, and so gets
    its turn.
    Source: VADE, arXiv 2511.18902, as we read it (Beta beliefs, Thompson sampling, information gain as the aim; its
    exact measure was not at hand).
    """
    drawn = {name: generator.beta(belief.solved, belief.failed) for name, belief in beliefs.items()}
    return sorted(drawn, key=lambda name: drawn[name] * (1.0 - drawn[name]), reverse=True)[:count]


def half_width(rewards: Rewards, *, n: int | None = None, confidence: float = 0.95) -> float:
    """Half the confidence interval of a task's mean reward: h(n) = t_{1 - a/2, n - 1} s / sqrt(n), a = 1 - confidence.

    s is the sample deviation of the rewards known; `n` (their number by default) asks what h would be with more of
    the same spread. Infinite for fewer than two rewards.
    Source: XRPO, arXiv 2510.06672.
    """
    values = reward_array(rewards)
    known = values[~np.isnan(values)]
    if len(known) < 2:
        return math.inf
    size = len(known) if n is None else n
    return t_quantile(0.5 + confidence / 2.0, size - 1) * float(np.std(known, ddof=1)) / math.sqrt(size)


def allocate_more(
    rewards: Mapping[str, Rewards],
    budget: int,
    *,
    most: int = 16,
    confidence: float = 0.95,
    bonus: float = 0.0,
) -> dict[str, int]:
    """How many more rollouts each task gets out of `budget`, after a first round gave every task at least two rewards.

    Each goes where it narrows the interval most: the largest h(n) - h(n + 1) + bonus * sqrt(log(1 + N) / n), N being
    the number of all rollouts of the first round; at most `most` more for one task. Where nothing is gained any more
    (no spread anywhere, no bonus) the rest of the budget is kept. Raises ValueError where a task has fewer than two
    rewards.
    Source: XRPO, arXiv 2510.06672, as we read it: the reduction of the half width is its measure, the form of the
    bonus for tasks that were tried little is ours (0 switches it off).
    """
    known = {name: int(np.count_nonzero(~np.isnan(reward_array(values)))) for name, values in rewards.items()}
    if few := [name for name, n in known.items() if n < 2]:
        raise ValueError(f"tasks with fewer than two rewards have no interval yet: {few}")
    everything = sum(known.values())

    def gain(name: str, n: int) -> float:
        here, there = (half_width(rewards[name], n=size, confidence=confidence) for size in (n, n + 1))
        return here - there + bonus * math.sqrt(math.log(1 + everything) / n)

    gains = {name: [gain(name, n) for n in range(first, first + most)] for name, first in known.items()}
    return _greedy(gains, budget, 0)


@dataclass(frozen=True, slots=True)
class ReplayCandidate:
    """A rollout that was trained and could be again. `version` is the policy version that sampled it."""

    name: str
    version: int
    uses: int = 1


def replay(
    candidates: Sequence[ReplayCandidate],
    version: int,
    count: int,
    generator: np.random.Generator,
    *,
    max_age: int = 4,
    max_uses: int = 2,
) -> list[str]:
    """At most `count` different rollouts to train again at policy `version`, the fresher the likelier.

    Left out: sampled more than `max_age` versions ago, or used `max_uses` times. Drawn without replacement with
    probability proportional to 1 / (1 + age), age = version - sampled version. What is replayed must be corrected
    for its age: by a loss of `corrections` with the log-probabilities that were recorded (never made anew), and its
    group's advantages as they were. `effective_sample_size` tells what is left of it.
    Source: ours; freshness as in TorchRL's StalenessAwareSampler.
    """
    fit = [one for one in candidates if 0 <= version - one.version <= max_age and one.uses < max_uses]
    if not fit or count < 1:
        return []
    fresh = np.array([1.0 / (1.0 + version - one.version) for one in fit])
    picked = generator.choice(len(fit), size=min(count, len(fit)), replace=False, p=fresh / fresh.sum())
    return [fit[index].name for index in picked]


def truncated_weights(log_ratios: Sequence[float] | Floats, *, cap: float = 2.0) -> Floats:
    """Importance weights of replayed sequences, float64 [n]: min(exp(log ratio), cap).

    `log_ratios` [n]: log pi_prox - log mu, summed over the sampled tokens of each sequence.
    Source: Ionides, Truncated Importance Sampling, JCGS 2008.
    """
    return np.exp(np.minimum(np.asarray(log_ratios, dtype=np.float64), math.log(cap)))


def effective_sample_size(weights: Sequence[float] | Floats) -> float:
    """How many equally weighted samples these are worth: (sum w)^2 / sum w^2, from 1 to n; 0 for none.

    Source: Kish, Survey Sampling, 1965.
    """
    values = np.asarray(weights, dtype=np.float64)
    squares = float((values**2).sum())
    return float(values.sum()) ** 2 / squares if squares > 0.0 else 0.0


def _all(a: float, b: float, n: int) -> float:
    return math.prod((a + i) / (a + b + i) for i in range(n))


def _greedy(gains: Mapping[str, Sequence[float]], budget: int, smallest: int) -> dict[str, int]:
    """`smallest` for each name, and the rest of the budget one by one to the largest next gain above 0."""
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
