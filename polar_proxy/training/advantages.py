"""Advantages: turn the rewards of a group of rollouts into one number per rollout. Numpy, float64, pure functions.

Promises, kept by every function here:

* A missing reward (None or NaN) is not reward 0. A rollout without a reward is left out of means, deviations and
  medians. Its advantage is NaN, so the rollout is not trained on.
* If fewer than two rollouts of a group have a reward, or all rewards are equal, the advantages are exactly 0.
  Exceptions: `raft` has no baseline, `gdpo` also compares the groups of a batch, and `gigpo` also compares steps.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Rewards = Sequence[float | None] | Floats


def reward_array(rewards: Rewards) -> Floats:
    """Return rewards as float64 [n], with NaN for None. Raises ValueError for an infinite reward."""
    values = np.array([np.nan if reward is None else float(reward) for reward in rewards], dtype=np.float64)
    if np.isinf(values).any():
        raise ValueError("a reward is infinite; the other rewards of its group cannot be compared with it")
    return values


def known_rewards(rewards: Rewards) -> Floats:
    """Return the rewards that are not missing."""
    values = reward_array(rewards)
    return values[~np.isnan(values)]


def dr_grpo(rewards: Rewards) -> Floats:
    """Dr. GRPO: A_i = r_i - mean(r). A division by the deviation would favour groups of small spread.

    The paper also divides the loss by a constant instead of each answer's length. The setting for this is
    `loss_aggregation = "constant"`.
    Source: Liu et al., Understanding R1-Zero-Like Training, arXiv 2503.20783.
    """
    values, known = reward_array(rewards), known_rewards(rewards)
    # Exactly 0 for equal rewards: the mean of equal numbers is not always that number.
    if _all_equal(known):
        return np.where(np.isnan(values), np.nan, 0.0)
    return values - float(known.mean())


def grpo(rewards: Rewards, *, eps: float = 1e-6, ddof: int = 1) -> Floats:
    """GRPO: A_i = (r_i - mean(r)) / (std(r) + eps).

    The paper says only "std"; `ddof=1` is the sample deviation, which TRL and verl use.
    Source: Shao et al., DeepSeekMath, arXiv 2402.03300 (outcome supervision).
    """
    centred, known = dr_grpo(rewards), known_rewards(rewards)
    return centred if _all_equal(known) else centred / (float(np.std(known, ddof=ddof)) + eps)


def rloo(rewards: Rewards) -> Floats:
    """Leave-one-out: A_i = r_i - mean of the other rewards = n / (n - 1) * (r_i - mean(r)). An unbiased baseline.

    Source: Ahmadian et al., Back to Basics, arXiv 2402.14740; after Kool et al. 2019.
    """
    n = len(known_rewards(rewards))
    return dr_grpo(rewards) * (n / (n - 1) if n > 1 else 1.0)


def raft(rewards: Rewards) -> Floats:
    """RAFT: A_i = r_i where r_i > 0, else NaN. Rewarded rollouts are imitated; the others are not trained.

    There is no baseline: a group that solved everything is trained, and a group that solved nothing is not. No token is
    made less likely. Tokens of which the policy is certain therefore stay likely, even with few rollouts and many
    updates, but the policy does not learn beyond the best rollouts of a group. RAFT++ in the second source is RAFT with
    a clipped ratio (`losses.dapo`).
    Source: Dong et al., RAFT, arXiv 2304.06767; Xiong et al., A Minimalist Approach to LLM Reasoning, arXiv 2504.11343.
    """
    values = reward_array(rewards)
    return np.where(values > 0.0, values, np.nan)


def mc_grpo(rewards: Rewards, *, scale: Literal["mad", "none"] = "mad", eps: float = 1e-3) -> Floats:
    """MC-GRPO: A_i = (r_i - median(r)) / (MAD + eps), MAD = median(|r - median(r)|); for groups of G + 1 rollouts.

    With an odd number of rewards the first rollout whose reward equals the median is the pivot. Its advantage is NaN,
    so that G rollouts are trained. With an even number there is no pivot.

    If rewards differ but the MAD is 0 (more than half of the rewards are equal), the mean absolute deviation from the
    median replaces the MAD. The authors' code divides by eps alone in this case, which gives advantages of 1,000. Their
    code also multiplies every nonzero advantage by n / (number of nonzero advantages). The paper does not mention this
    factor, and it is not used here.

    Source: Kim, MC-GRPO, arXiv 2601.22582 (median baseline, pivot); the MAD from its README and code.
    """
    values, known = reward_array(rewards), known_rewards(rewards)
    if _all_equal(known):
        return dr_grpo(values)
    median = float(np.median(known))
    centred = values - median
    if scale == "mad":
        deviations = np.abs(known - median)
        mad = float(np.median(deviations))
        centred /= (mad if mad > 0.0 else float(deviations.mean())) + eps
    if len(known) % 2 == 1:
        centred[np.flatnonzero(values == median)[0]] = np.nan
    return centred


def gdpo(
    rewards: Sequence[Sequence[float | None]] | Floats,
    groups: Sequence[int],
    *,
    weights: Sequence[float] | None = None,
    eps: float = 1e-4,
    ddof: int = 1,
) -> Floats:
    """GDPO, for several rewards per rollout.

    Each reward is normalised in its group. The weighted sum of a rollout's normalised rewards is then normalised over
    the batch:

    A_ik = (r_ik - mean_group(r_k)) / (std_group(r_k) + eps);  S_i = sum_k w_k A_ik;
    A_i = (S_i - mean_batch(S)) / (std_batch(S) + eps).

    `rewards` [n, k], `groups` [n] (the group of each rollout), `weights` [k], all 1 by default. A rollout that lacks
    one of its rewards is left out of all statistics and gets NaN. A batch without spread gives 0.

    Source: Liu et al., GDPO, arXiv 2601.05242; formula and eps as in the authors' TRL variant.
    """
    table = np.stack([reward_array(row) for row in rewards])
    owners, factors = np.asarray(groups), np.ones(table.shape[1]) if weights is None else np.asarray(weights, float)
    table[np.isnan(table).any(axis=1)] = np.nan
    sums = np.zeros(len(table))
    for group in np.unique(owners):
        rows = owners == group
        for column, factor in enumerate(factors):
            sums[rows] += factor * grpo(table[rows, column], eps=eps, ddof=ddof)
    return grpo(sums, eps=eps, ddof=ddof)


def gigpo(
    rewards: Rewards,
    rollout_of_step: Sequence[int],
    anchors: Sequence[Hashable],
    step_returns: Sequence[float],
    *,
    weight: float = 1.0,
    normalise: Literal["std", "none"] = "none",
    eps: float = 1e-6,
) -> Floats:
    """GiGPO: advantages of all steps of a group's rollouts, A = A_rollout + weight * A_step. Float64 [steps].

    An anchor is a hashable that identifies the state of the environment before a step. A_rollout compares the rollouts
    (`rewards` [n]). A_step compares the returns of all steps with the same anchor, across the rollouts of the group; it
    is 0 for a step whose anchor occurs once. Both subtract the mean and, with `normalise="std"`, divide by the
    deviation. The steps of a rollout without a reward are left out of all statistics and get NaN.

    `rollout_of_step`, `anchors` and `step_returns` (R_t = r_t + gamma * R_(t+1)) are [steps].
    Source: Feng et al., GiGPO, arXiv 2505.10978: equations 3 (rollout), 5 (return), 6 (step groups), 7 (step), 8 (sum).
    """

    def relative(values: Floats) -> Floats:
        return grpo(values, eps=eps) if normalise == "std" else dr_grpo(values)

    rollout_advantages = relative(reward_array(rewards))[np.asarray(rollout_of_step, dtype=np.int64)]
    returns = np.where(np.isnan(rollout_advantages), np.nan, np.asarray(step_returns, dtype=np.float64))
    members: dict[Hashable, list[int]] = {}
    for index, anchor in enumerate(anchors):
        members.setdefault(anchor, []).append(index)
    step_advantages = np.zeros(len(returns))
    for indices in members.values():
        step_advantages[indices] = relative(returns[indices])
    return rollout_advantages + weight * step_advantages


ADVANTAGES: dict[str, Callable[[Rewards], Floats]] = {
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "rloo": rloo,
    "mc_grpo": mc_grpo,
    "raft": raft,
}
"""Advantage functions by the name that a configuration uses. Each maps the rewards of one group [n] to advantages [n].
`gdpo` (several rewards) and `gigpo` (steps) are not listed, because they need other arguments."""


def focal_weight(rewards: Rewards, *, solved_at: float = 1.0, gamma: float = 1.0) -> float:
    """Return the difficulty weight of a group: (1 - p)^gamma, where p is the share of rewards that reach `solved_at`.

    The weight multiplies the group's advantages: groups that are mostly solved count less. NaN without a reward.
    Source: F-GRPO, arXiv 2602.06717 (focal weight g = (1 - mean success)^gamma).
    """
    known = known_rewards(rewards)
    return float((1.0 - np.mean(known >= solved_at)) ** gamma) if len(known) else float("nan")


def variance_weight(rewards: Rewards, *, low: float = 0.0, high: float = 1.0) -> float:
    """Return the variance of a group's rewards as a share of the largest variance that n rewards can have, in [0, 1].

    p = s^2 / s_max^2, both with denominator n - 1. The variance is largest if floor(n / 2) rewards are `low` and the
    others `high`: s_max^2 = floor(n/2) * ceil(n/2) / (n (n - 1)) * (high - low)^2. With fewer than two rewards, p is 0.
    Raises ValueError for a reward outside [low, high].

    Source: VCRL, arXiv 2509.19803 (p for binary rewards; the paper selects tasks by p, here p weights a group).
    """
    known = known_rewards(rewards)
    n = len(known)
    if n < 2 or _all_equal(known):
        return 0.0
    if known.min() < low or known.max() > high:
        raise ValueError(f"rewards {known.min()} to {known.max()} are outside of the given range [{low}, {high}]")
    largest = (n // 2) * (n - n // 2) / (n * (n - 1)) * (high - low) ** 2
    return float(np.var(known, ddof=1) / largest)


def _all_equal(known: Floats) -> bool:
    return len(known) < 2 or bool(known.min() == known.max())
