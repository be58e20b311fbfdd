"""Selection of groups, group sizes and replay, against values worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from polar_proxy.training.selection import (
    ReplayCandidate,
    SolveRateBelief,
    allocate,
    allocate_more,
    chance_of_spread,
    choose_tasks,
    effective_sample_size,
    group_size,
    half_width,
    replay,
    select_groups,
    truncated_weights,
    updated,
    verdict,
)

GROUPS = {
    "mixed": [0.0, 1.0, 0.0],
    "solved": [1.0, 1.0, None],
    "failed": [0.0, 0.0, 0.0],
    "half": [0.5, 0.5],
    "lonely": [1.0, None, None],
    "nearly": [0.5, 0.50001],
}


def test_every_group_gets_one_decision() -> None:
    selection = select_groups(GROUPS, tolerance=0.001)
    assert selection.train == ("mixed",)
    # Failed and unscored groups are queued again; a solved group has no signal.
    assert selection.requeue == ("failed", "half", "lonely", "nearly")
    assert selection.drop == ("solved",)
    assert selection.verdicts["lonely"] == "too_few"
    assert verdict(GROUPS["nearly"]) == "train"


def test_group_is_dropped_after_max_attempts() -> None:
    selection = select_groups(GROUPS, attempts={"failed": 2, "half": 3}, tolerance=0.001)
    assert selection.requeue == ("lonely", "nearly")
    assert selection.drop == ("solved", "failed", "half")


def test_belief_by_hand() -> None:
    # Three solved of five; the one without a reward is ignored: Beta(1 + 3, 1 + 2).
    belief = updated(SolveRateBelief(), [1, 1, 0, 0, 1, None])
    assert belief == SolveRateBelief(4.0, 3.0)
    assert belief.mean == pytest.approx(4 / 7)
    # Halved towards Beta(1, 1): 1 + 3/2 + 0 and 1 + 2/2 + 2.
    assert updated(belief, [0, 0], decay=0.5) == SolveRateBelief(2.5, 4.0)
    assert updated(belief, [], decay=0.0) == SolveRateBelief()


def test_chance_of_spread_by_hand() -> None:
    # Uniform belief: E[p^n] = 1 / (n + 1), so 1 - 2 / (n + 1): n = 2 -> 1/3, n = 3 -> 1/2, n = 9 -> 0.8.
    assert [chance_of_spread(SolveRateBelief(), n) for n in (0, 1, 2, 3, 9)] == pytest.approx([0, 0, 1 / 3, 1 / 2, 0.8])
    # Beta(2, 1): E[p^2] = 2/3 * 3/4 = 1/2; E[q^2] = 1/3 * 2/4 = 1/6 -> 1/3.
    assert chance_of_spread(SolveRateBelief(2, 1), 2) == pytest.approx(1 / 3)
    # Nearly certain p = 1/2: 1 - 2 / 2^n.
    assert chance_of_spread(SolveRateBelief(1e6, 1e6), 4) == pytest.approx(1 - 2 / 16, abs=1e-5)


def test_group_size_by_hand() -> None:
    # Uniform: 1 - 2 / (n + 1) >= 0.8 from n = 9 on; 0.9 needs 19, more than 16.
    assert group_size(SolveRateBelief(), wanted=0.8) == 9
    assert group_size(SolveRateBelief(), wanted=0.9) == 16
    # p = 1/2: 1 - 2 / 2^n >= 0.9 from n = 5 (0.9375) on.
    assert group_size(SolveRateBelief(1e6, 1e6)) == 5


def test_allocation_maximises_the_gain_of_spread() -> None:
    # Certain p = 1/2 (a) and p = 0.1 (b), from two each. Gain of the next: p^n q + q^n p.
    # a: n = 2: 2 * 1/8 = 0.25; 3: 0.125; 4: 0.0625; 5: 0.031.
    # b: n = 2: 0.01 * 0.9 + 0.81 * 0.1 = 0.09; 3: 0.0009 + 0.0729 = 0.0738; 4: 0.0657; 5: 0.059.
    # Six more: a .25, a .125, b .09, b .0738, b .0657, a .0625 -> a 5, b 5.
    beliefs = {"a": SolveRateBelief(1e7, 1e7), "b": SolveRateBelief(1e6, 9e6)}
    assert allocate(beliefs, 10) == {"a": 5, "b": 5}
    assert allocate(beliefs, 7) == {"a": 4, "b": 3}
    assert allocate(beliefs, 100, largest=6) == {"a": 6, "b": 6}
    with pytest.raises(ValueError, match="too few"):
        allocate(beliefs, 3)


def test_greedy_allocation_is_optimal() -> None:
    beliefs = {"a": SolveRateBelief(1, 1), "b": SolveRateBelief(9, 2), "c": SolveRateBelief(2, 2)}
    sizes = allocate(beliefs, 15)

    def expected_groups(a: int, b: int, c: int) -> float:
        return sum(chance_of_spread(beliefs[name], n) for name, n in zip("abc", (a, b, c), strict=True))

    best = max(expected_groups(a, b, 15 - a - b) for a in range(2, 12) for b in range(2, 12) if 15 - a - b >= 2)
    assert expected_groups(sizes["a"], sizes["b"], sizes["c"]) == pytest.approx(best)


def test_thompson_sampling_prefers_even_odds_and_explores_unknown_tasks() -> None:
    generator = np.random.default_rng(0)
    beliefs = {"easy": SolveRateBelief(200, 2), "hard": SolveRateBelief(2, 200), "even": SolveRateBelief(100, 100)}
    assert all(choose_tasks(beliefs, 1, generator) == ["even"] for _ in range(50))
    # Even odds win mostly, not always: the draw of an unknown task is sometimes nearer to one half.
    first = [choose_tasks({**beliefs, "new": SolveRateBelief()}, 1, generator)[0] for _ in range(400)]
    assert 5 < first.count("new") < 100
    assert len(choose_tasks(beliefs, 9, generator)) == 3


def test_half_width_by_hand() -> None:
    # Rewards 0 0 1 1: s^2 = 4 * 1/4 / 3 = 1/3. t(0.975, 3) = 3.182446: 3.182446 * sqrt(1/3) / 2 = 0.918693.
    assert half_width([0, 0, 1, 1]) == pytest.approx(3.182446305 * math.sqrt(1 / 3) / 2)
    # With a fifth of the same spread: t(0.975, 4) = 2.776445.
    assert half_width([0, 0, 1, 1, None], n=5) == pytest.approx(2.776445105 * math.sqrt(1 / 3) / math.sqrt(5))
    assert half_width([1, None]) == math.inf


def test_further_rollouts_narrow_the_widest_intervals() -> None:
    # h(n) - h(n+1) grows with s: s = sqrt(1/3) for "wide", a tenth of it for "narrow"; 0 for "flat".
    first = {"wide": [0, 0, 1, 1], "narrow": [0, 0, 0.1, 0.1], "flat": [1, 1, 1, 1]}
    # Wide, in units of s: h(4), h(5), ... = 1.5912, 1.2417, 1.0494, 0.9248, 0.8360, 0.7687, 0.7154, 0.6718, 0.6354,
    # 0.6043 (t of 3, 4, 5, ... over the root of n). Gains .3495 .1923 .1246 .0888 .0673 .0533 .0436 .0364 .0311.
    # Narrow's first gain is .0350: it comes after eight of wide's.
    assert allocate_more(first, 8) == {"wide": 8, "narrow": 0, "flat": 0}
    assert allocate_more(first, 9) == {"wide": 8, "narrow": 1, "flat": 0}
    assert allocate_more(first, 10) == {"wide": 9, "narrow": 1, "flat": 0}
    # Without any gain the budget is kept; the bonus spends it on the task with the fewest rollouts.
    assert allocate_more({"flat": [1, 1, 1], "same": [0, 0]}, 5) == {"flat": 0, "same": 0}
    assert allocate_more({"flat": [1, 1, 1], "same": [0, 0]}, 1, bonus=1.0) == {"flat": 0, "same": 1}
    with pytest.raises(ValueError, match="no confidence interval yet"):
        allocate_more({"a": [1]}, 3)


def test_half_width_uses_students_t() -> None:
    # Two-sided 95 % quantiles from a table of t. The sample deviation of 0 0 1 1 is sqrt(1/3).
    table = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 10: 2.228, 11: 2.201, 30: 2.042, 120: 1.980}
    for freedom, quantile in table.items():
        width = half_width([0, 0, 1, 1], n=freedom + 1)
        assert width * math.sqrt(3 * (freedom + 1)) == pytest.approx(quantile, abs=6e-4)
    # One degree of freedom is Cauchy's distribution: P(|T| <= 1) = 1/2.
    assert half_width([0, 0, 1, 1], n=2, confidence=0.5) * math.sqrt(6) == pytest.approx(1.0)
    with pytest.raises(ValueError, match="no quantile"):
        half_width([0, 1], confidence=1.5)


def test_replay_prefers_fresh_and_excludes_stale_or_used_rollouts() -> None:
    candidates = [
        ReplayCandidate("now", 10),
        ReplayCandidate("old", 6),
        ReplayCandidate("stale", 5),
        ReplayCandidate("used", 10, uses=2),
        ReplayCandidate("future", 11),
    ]
    generator = np.random.default_rng(1)
    drawn = [replay(candidates, 10, 1, generator)[0] for _ in range(600)]
    # Ages 0 and 4: odds 1 to 1/5, so 500 of 600 expected.
    assert set(drawn) == {"now", "old"}
    assert 460 < drawn.count("now") < 540
    assert sorted(replay(candidates, 10, 9, generator)) == ["now", "old"]
    assert replay([], 10, 3, generator) == []


def test_truncated_weights_and_effective_sample_size_by_hand() -> None:
    weights = truncated_weights([0.0, math.log(0.5), math.log(8.0), 1e9])
    np.testing.assert_allclose(weights, [1, 0.5, 2, 2])
    # (1 + 0.5 + 2 + 2)^2 / (1 + 0.25 + 4 + 4) = 30.25 / 9.25.
    assert effective_sample_size(weights) == pytest.approx(30.25 / 9.25)
    assert effective_sample_size([3, 3, 3]) == pytest.approx(3.0)
    assert effective_sample_size([]) == 0.0
