"""Advantages: from the rewards of a group of rollouts to one number per rollout. Numpy, float64, no state.

Promises, kept by every function here:

* A rollout counts once, however many traces it has: `rollout_rewards` brings rewards of traces to one per rollout,
  `spread` hands the rollout's advantage to all of its traces.
* No reward (None or NaN) is not reward 0. Such a rollout has no part in any mean, deviation or median, and its
  advantage is NaN: it is not to be trained.
* A group in which fewer than two rollouts have a reward, or all have the same, gives advantage 0 exactly. (Not `raft`,
  which compares with nothing.)
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]
Rewards = Sequence[float | None] | Floats


def reward_array(rewards: Rewards) -> Floats:
    """Rewards as float64 [n], with NaN for None. Raises ValueError for infinite ones."""
    values = np.array([np.nan if reward is None else float(reward) for reward in rewards], dtype=np.float64)
    if np.isinf(values).any():
        raise ValueError("a reward is infinite; a group cannot be compared with it")
    return values


def rollout_rewards(trace_rewards: Rewards, rollout_of_trace: Sequence[int], rollouts: int) -> Floats:
    """One reward per rollout, float64 [rollouts]: the mean of those of its traces that have one, NaN where none has.

    `trace_rewards` [m] and `rollout_of_trace` [m], values in [0, rollouts).
    """
    values, owners = reward_array(trace_rewards), np.asarray(rollout_of_trace, dtype=np.int64)
    known = ~np.isnan(values)
    sums = np.bincount(owners[known], weights=values[known], minlength=rollouts)
    counts = np.bincount(owners[known], minlength=rollouts)
    means: Floats = np.full(rollouts, np.nan)
    np.divide(sums, counts, out=means, where=counts > 0)
    return means


def spread(advantages: Floats, rollout_of_trace: Sequence[int]) -> Floats:
    """The advantage of each trace, float64 [m]: that of its rollout."""
    return advantages[np.asarray(rollout_of_trace, dtype=np.int64)]


def dr_grpo(rewards: Rewards) -> Floats:
    """Dr. GRPO: A_i = r_i - mean(r). Without the deviation, which would favour groups that are nearly all alike.

    Its other half, a constant instead of each answer's length, is `normalise.token_weights(how="constant")`.
    Source: Liu et al., Understanding R1-Zero-Like Training, arXiv 2503.20783.
    """
    values = reward_array(rewards)
    return _centred(values, _known_mean(values))


def grpo(rewards: Rewards, *, eps: float = 1e-6, ddof: int = 1) -> Floats:
    """GRPO: A_i = (r_i - mean(r)) / (std(r) + eps).

    The paper says "std" only; `ddof=1` is the sample deviation, which TRL and verl take.
    Source: Shao et al., DeepSeekMath, arXiv 2402.03300 (outcome supervision).
    """
    values = reward_array(rewards)
    centred = dr_grpo(values)
    known = values[~np.isnan(values)]
    return centred if _flat(known) else centred / (float(np.std(known, ddof=ddof)) + eps)


def rloo(rewards: Rewards) -> Floats:
    """Leave-one-out: A_i = r_i - mean of the other rewards = n / (n - 1) * (r_i - mean(r)). An unbiased baseline.

    Source: Ahmadian et al., Back to Basics, arXiv 2402.14740; after Kool et al. 2019.
    """
    values = reward_array(rewards)
    n = int(np.count_nonzero(~np.isnan(values)))
    return dr_grpo(values) * (n / (n - 1) if n > 1 else 1.0)


def raft(rewards: Rewards) -> Floats:
    """RAFT: A_i = r_i where r_i > 0, else NaN. What was rewarded is imitated; what was not is not trained.

    Without a baseline: a group that solved everything is trained, one that solved nothing is not. Nothing is pushed
    down, so that a policy which is sure of most tokens keeps them, also with few rollouts and many updates; no group
    learns more than its own best. With a clipped ratio (`losses.dapo`) this is what the second source calls RAFT++.
    Source: Dong et al., RAFT, arXiv 2304.06767; Xiong et al., A Minimalist Approach to LLM Reasoning, arXiv 2504.11343.
    """
    values = reward_array(rewards)
    return np.where(values > 0.0, values, np.nan)


def mc_grpo(rewards: Rewards, *, scale: Literal["mad", "none"] = "mad", eps: float = 1e-3) -> Floats:
    """MC-GRPO: A_i = (r_i - median(r)) / (MAD + eps), MAD = median(|r - median(r)|); for groups of G + 1 rollouts.

    With an odd number of rewards one rollout is the median itself: it is the pivot, and its advantage is NaN (left out
    of training, so that G remain), the first of several that equal it. With an even number there is none.

    Where the MAD is 0 though rewards differ (binary rewards, a minority stands out), the mean absolute deviation
    from the median takes its place: the authors' code divides by eps alone there, which makes advantages of 1,000.
    It also multiplies what is not 0 by n / (number not 0), which the paper's text does not have; we do not.

    Source: Kim, MC-GRPO, arXiv 2601.22582 (median baseline, pivot); the MAD from its README and code.
    """
    values = reward_array(rewards)
    known = values[~np.isnan(values)]
    if _flat(known):
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
    """GDPO: every reward is normalised in its group by itself, then summed, then normalised over the batch.

    A_ik = (r_ik - mean_group(r_k)) / (std_group(r_k) + eps);  S_i = sum_k w_k A_ik;
    A_i = (S_i - mean_batch(S)) / (std_batch(S) + eps).

    `rewards` [n, k], `groups` [n] (the group of each rollout), `weights` [k], all 1 by default. A rollout that lacks
    one of its rewards cannot be compared: it counts nowhere and gets NaN. A batch without spread gives 0.

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


def discounted_returns(step_rewards: Sequence[float], gamma: float = 1.0) -> Floats:
    """The return of each step of one rollout, float64 [steps]: R_t = r_t + gamma * R_(t+1).

    Source: GiGPO, arXiv 2505.10978, equation 5.
    """
    returns = np.zeros(len(step_rewards))
    running = 0.0
    for index in range(len(step_rewards) - 1, -1, -1):
        running = returns[index] = step_rewards[index] + gamma * running
    return returns


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
    """GiGPO: advantages per step, A = A_rollout + weight * A_step, for one group. Float64 [steps].

    A_rollout compares whole rollouts (`rewards` [n]). A_step compares the returns of all steps of the group that
    stand at the same anchor (the same state of the environment, any hashable), whichever rollout took them; a step
    whose anchor nobody shares has A_step 0. Both by mean, and by deviation as well where `normalise="std"`. A step
    of a rollout without a reward has no part and gets NaN.

    `rollout_of_step`, `anchors` and `step_returns` (see `discounted_returns`) are [steps].
    Source: Feng et al., GiGPO, arXiv 2505.10978: equations 3 (rollout), 6 (step groups), 7 (step), 8 (sum).
    """

    def relative(values: Floats) -> Floats:
        return grpo(values, eps=eps) if normalise == "std" else dr_grpo(values)

    whole = spread(relative(reward_array(rewards)), rollout_of_step)
    returns = np.where(np.isnan(whole), np.nan, np.asarray(step_returns, dtype=np.float64))
    members: dict[Hashable, list[int]] = {}
    for index, anchor in enumerate(anchors):
        members.setdefault(anchor, []).append(index)
    steps = np.zeros(len(returns))
    for indices in members.values():
        steps[indices] = relative(returns[indices])
    return whole + weight * steps


def focal_weight(rewards: Rewards, *, solved_at: float = 1.0, gamma: float = 1.0) -> float:
    """Difficulty-aware weight of a group: (1 - p)^gamma, p the share of its rewards that reach `solved_at`.

    Multiplies the advantages of the group; groups that are mostly solved count less. NaN where there is no reward.
    Source: F-GRPO, arXiv 2602.06717 (focal weight g = (1 - mean success)^gamma).
    """
    values = reward_array(rewards)
    known = values[~np.isnan(values)]
    return float((1.0 - np.mean(known >= solved_at)) ** gamma) if len(known) else float("nan")


def variance_weight(rewards: Rewards, *, low: float = 0.0, high: float = 1.0) -> float:
    """Variance-aware weight of a group in [0, 1]: its variance as a share of the largest that n rewards can have.

    p = s^2 / s_max^2, both with n - 1 below. For rewards in [low, high] the largest is that of floor(n / 2) at one end
    and the rest at the other: floor(n/2) * ceil(n/2) / (n (n - 1)) * (high - low)^2. 0 for fewer than two rewards.
    Raises ValueError for a reward outside [low, high].

    Source: VCRL, arXiv 2509.19803 (p for binary rewards, used there to choose tasks and as here it grades a group).
    """
    values = reward_array(rewards)
    known = values[~np.isnan(values)]
    n = len(known)
    if n < 2 or _flat(known):
        return 0.0
    if known.min() < low or known.max() > high:
        raise ValueError(f"rewards {known.min()} to {known.max()} leave the range [{low}, {high}] that was given")
    largest = (n // 2) * (n - n // 2) / (n * (n - 1)) * (high - low) ** 2
    return float(np.var(known, ddof=1) / largest)


def _flat(known: Floats) -> bool:
    return len(known) < 2 or bool(known.min() == known.max())


def _known_mean(values: Floats) -> float:
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else float("nan")


def _centred(values: Floats, baseline: float) -> Floats:
    # Exactly 0 where nothing differs: the mean of equal numbers is not always that number.
    known = values[~np.isnan(values)]
    return np.where(np.isnan(values), np.nan, 0.0) if _flat(known) else values - baseline


ADVANTAGES: dict[str, Callable[[Rewards], Floats]] = {
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "rloo": rloo,
    "mc_grpo": mc_grpo,
    "raft": raft,
}
"""Rewards of one group [n] -> advantages [n]. `gdpo` (several rewards) and `gigpo` (steps) take more than that."""
