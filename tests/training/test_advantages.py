"""Advantages against values worked out by hand, and rollouts without a reward."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polar_proxy.training.advantages import (
    ADVANTAGES,
    dr_grpo,
    focal_weight,
    gdpo,
    gigpo,
    grpo,
    mc_grpo,
    raft,
    reward_array,
    rloo,
    variance_weight,
)

NAN = float("nan")


def test_grpo_by_hand() -> None:
    # mean (0 + 0 + 1 + 3) / 4 = 1; squares 1 + 1 + 0 + 4 = 6; sample std sqrt(6 / 3) = sqrt 2, population sqrt(6 / 4).
    centred = np.array([-1.0, -1.0, 0.0, 2.0])
    np.testing.assert_allclose(grpo([0, 0, 1, 3], eps=0.0), centred / math.sqrt(2), rtol=1e-12)
    np.testing.assert_allclose(grpo([0, 0, 1, 3], eps=0.0, ddof=0), centred / math.sqrt(1.5), rtol=1e-12)
    # eps is added to the deviation: 2 / (sqrt 2 + 1).
    assert grpo([0, 0, 1, 3], eps=1.0)[3] == pytest.approx(2 / (math.sqrt(2) + 1))


def test_dr_grpo_by_hand() -> None:
    np.testing.assert_allclose(dr_grpo([0, 0, 1, 3]), [-1, -1, 0, 2])


def test_rloo_by_hand() -> None:
    # 0 - (0+1+3)/3 = -4/3, twice; 1 - (0+0+3)/3 = 0; 3 - (0+0+1)/3 = 8/3.
    np.testing.assert_allclose(rloo([0, 0, 1, 3]), [-4 / 3, -4 / 3, 0, 8 / 3], rtol=1e-12)


def test_raft_by_hand() -> None:
    np.testing.assert_array_equal(raft([1, 0.5, 0, -2, None]), [1, 0.5, NAN, NAN, NAN])
    np.testing.assert_array_equal(raft([1, 1]), [1, 1])


def test_mc_grpo_by_hand() -> None:
    # Five rewards: median 2; deviations 2, 1, 0, 1, 7, sorted 0 1 1 2 7, MAD 1. The third is the pivot.
    np.testing.assert_allclose(mc_grpo([0, 1, 2, 3, 9], eps=0.0), [-2, -1, NAN, 1, 7])
    # eps 1: all over 2. Without scale: r - 2.
    np.testing.assert_allclose(mc_grpo([0, 1, 2, 3, 9], eps=1.0), [-1, -0.5, NAN, 0.5, 3.5])
    np.testing.assert_allclose(mc_grpo([0, 1, 2, 3, 9], scale="none"), [-2, -1, NAN, 1, 7])


def test_mc_grpo_has_a_pivot_only_in_odd_groups() -> None:
    # Median 1 three times: the first of them is the pivot, the others have advantage 0. |r - 1|: 1 0 0 0 2, MAD 0,
    # so the mean deviation 3/5 replaces it: -1 / 0.6 and 2 / 0.6.
    np.testing.assert_allclose(mc_grpo([0, 1, 1, 1, 3], eps=0.0), [-5 / 3, NAN, 0, 0, 10 / 3], rtol=1e-12)
    # Even: median of 0 1 3 4 is 2, deviations 2 1 1 2, MAD 1.5; all are trained.
    np.testing.assert_allclose(mc_grpo([0, 1, 3, 4], eps=0.0), [-4 / 3, -2 / 3, 2 / 3, 4 / 3], rtol=1e-12)


def test_mc_grpo_stays_bounded_for_binary_rewards_with_a_minority() -> None:
    # 0 0 0 0 1: median 0, MAD 0; mean deviation 1/5, so the solved one gets 1 / 0.2 = 5, not 1 / eps = 1000.
    np.testing.assert_allclose(mc_grpo([0, 0, 0, 0, 1], eps=0.0), [NAN, 0, 0, 0, 5], rtol=1e-12)


def test_gdpo_by_hand() -> None:
    # Two groups of two, two rewards. With sample std s of a pair (x, y): s = |x - y| / sqrt 2, so (x - mean) / s is
    # +-(1/2) sqrt 2 = +-c, c = 0.7071 for every distance. Group 0: rewards (1, 0) and (0, 5): -> (c - c), (-c + c)
    # = 0, 0. Group 1: (1, 3) and (0, 3): second without spread -> (c + 0), (-c + 0).
    # S = 0, 0, c, -c: mean 0, sample variance 2 c^2 / 3 = 1/3, std 1 / sqrt 3 -> 0, 0, c sqrt 3, -c sqrt 3.
    c = math.sqrt(0.5)
    rewards = [[1, 0], [0, 5], [1, 3], [0, 3]]
    expected = [0, 0, c * math.sqrt(3), -c * math.sqrt(3)]
    np.testing.assert_allclose(gdpo(rewards, [0, 0, 1, 1], eps=0.0), expected, atol=1e-12)
    # GRPO on the sums 1, 5 would set the first group apart: here both rewards weigh the same, whatever their range.
    # With weights (1, 0) only the first reward counts: S = c, -c, c, -c; sample variance 4 c^2 / 3 = 2/3.
    weighted = gdpo(rewards, [0, 0, 1, 1], weights=[1, 0], eps=0.0)
    np.testing.assert_allclose(weighted, np.array([c, -c, c, -c]) / math.sqrt(2 / 3), rtol=1e-12)


def test_gdpo_excludes_rollouts_that_lack_a_reward() -> None:
    with_gap = gdpo([[1, 0], [0, 5], [9, None], [1, 3], [0, 3]], [0, 0, 0, 1, 1], eps=0.0)
    assert math.isnan(with_gap[2])
    np.testing.assert_allclose(with_gap[[0, 1, 3, 4]], gdpo([[1, 0], [0, 5], [1, 3], [0, 3]], [0, 0, 1, 1], eps=0.0))


def test_gigpo_by_hand() -> None:
    # Rollouts 1 and 0: A_rollout = +0.5 and -0.5. Steps: rollout 0 at a, b; rollout 1 at a, c.
    # Anchor a: returns 1 and 0, mean 0.5 -> +0.5, -0.5. Anchors b and c occur once -> 0.
    got = gigpo([1, 0], [0, 0, 1, 1], ["a", "b", "a", "c"], [1, 1, 0, 0], weight=2.0)
    np.testing.assert_allclose(got, [0.5 + 1, 0.5, -0.5 - 1, -0.5])
    # With deviation: pairs give +-sqrt(1/2) at both levels.
    c = math.sqrt(0.5)
    got = gigpo([1, 0], [0, 0, 1, 1], ["a", "b", "a", "c"], [1, 1, 0, 0], normalise="std", eps=0.0)
    np.testing.assert_allclose(got, [2 * c, c, -2 * c, -c])


def test_gigpo_compares_steps_of_one_rollout_at_the_same_anchor() -> None:
    # Rollout 0 is at "a" twice, with returns 3 and 1; rollout 1 once with 2: mean 2 -> +1, -1, 0. Equal rewards: 0.
    np.testing.assert_allclose(gigpo([1, 1], [0, 0, 1], ["a", "a", "a"], [3, 1, 2]), [1, -1, 0])


def test_gigpo_excludes_steps_without_a_reward() -> None:
    got = gigpo([1, 0, None], [0, 1, 2], ["a", "a", "a"], [1, 0, 100])
    np.testing.assert_allclose(got, [1.0, -1.0, NAN])


WITH_BASELINE = sorted(set(ADVANTAGES) - {"raft"})


@pytest.mark.parametrize("name", sorted(ADVANTAGES))
def test_missing_reward_is_not_zero(name: str) -> None:
    """A rollout without a reward gets NaN, and the others get the same advantages as in a group without it."""
    function = ADVANTAGES[name]
    got = function([1.0, None, 0.25, 0.0, NAN, 0.5])
    assert np.isnan(got[[1, 4]]).all()
    np.testing.assert_array_equal(got[[0, 2, 3, 5]], function([1.0, 0.25, 0.0, 0.5]))
    as_zeros = function([1.0, 0.0, 0.25, 0.0, 0.0, 0.5])[[0, 2, 3, 5]]
    assert np.allclose(got[[0, 2, 3, 5]], as_zeros, equal_nan=True) == (name not in WITH_BASELINE)


@pytest.mark.parametrize("name", WITH_BASELINE)
@pytest.mark.parametrize("rewards", [[0.1] * 3, [1.0, None], [None, 0.3, 0.3], [0.0]])
def test_equal_rewards_give_exactly_zero(name: str, rewards: list[float | None]) -> None:
    got = ADVANTAGES[name](rewards)
    np.testing.assert_array_equal(got, [NAN if reward is None else 0.0 for reward in rewards])


@pytest.mark.parametrize("name", sorted(ADVANTAGES))
def test_group_without_any_reward_gets_nan(name: str) -> None:
    assert np.isnan(ADVANTAGES[name]([None, None])).all()


@given(st.lists(st.floats(-10, 10, width=32), min_size=2, max_size=9), st.floats(-5, 5), st.floats(0.5, 4))
def test_advantages_are_invariant_to_shift_and_follow_scale(rewards: list[float], shift: float, scale: float) -> None:
    rewards = [round(reward, 2) for reward in rewards]
    moved = [reward * scale + shift for reward in rewards]
    np.testing.assert_allclose(dr_grpo(moved), dr_grpo(rewards) * scale, atol=1e-9)
    np.testing.assert_allclose(rloo(moved), rloo(rewards) * scale, atol=1e-9)
    np.testing.assert_allclose(grpo(moved, eps=0.0), grpo(rewards, eps=0.0), atol=1e-6)
    assert abs(rloo(rewards).sum()) < 1e-9


def test_focal_weight_by_hand() -> None:
    # 3 of 4 solved: 1 - 3/4 = 1/4; squared 1/16. The rollout without a reward does not count.
    assert focal_weight([1, 1, 1, 0, None]) == pytest.approx(0.25)
    assert focal_weight([1, 1, 1, 0], gamma=2.0) == pytest.approx(1 / 16)
    assert focal_weight([0.4, 0.6], solved_at=0.5) == pytest.approx(0.5)
    assert math.isnan(focal_weight([None]))


def test_variance_weight_by_hand() -> None:
    # k solved of n: k (n - k) / (n (n - 1)) over its largest. n = 4: k = 2 is the largest -> 1; k = 1: 3 / 4.
    assert variance_weight([1, 1, 0, 0]) == pytest.approx(1.0)
    assert variance_weight([1, 0, 0, 0]) == pytest.approx(0.75)
    # n = 5: largest 2 * 3 = 6; k = 1: 4 / 6.
    assert variance_weight([1, 0, 0, 0, 0]) == pytest.approx(2 / 3)
    # Rewards from -1 to 3, the ends twice each: the largest variance of that range.
    assert variance_weight([-1, 3, -1, 3], low=-1, high=3) == pytest.approx(1.0)
    assert variance_weight([1, 1]) == 0.0
    assert variance_weight([1, None]) == 0.0
    with pytest.raises(ValueError, match="outside of the given range"):
        variance_weight([0, 2])


def test_rejects_infinite_reward() -> None:
    with pytest.raises(ValueError, match="infinite"):
        reward_array([1.0, float("inf")])
