"""Losses that correct for stale or mismatched tokens: decoupled PPO, TIS, IcePop."""

from __future__ import annotations

import pytest

from polar_proxy.training.losses import decoupled, icepop, tis
from tests.training.loss_inputs import gradient, tokens


def test_decoupled_by_hand() -> None:
    # r = pi/mu = 3, 0.5; k = prox/mu = 2, 0.5; u = r/k = 1.5, 1. A = 1, -1, clip [0.8, 1.2].
    # Objectives: 2 * min(1.5, 1.2) = 2.4 (clipped); 0.5 * (-1) = -0.5. Mean 1.9 / 2.
    batch = tokens([3, 0.5], [1, -1], proximal=[2, 0.5])
    loss, stats = decoupled(batch)
    assert loss.item() == pytest.approx(-0.95)
    assert gradient(loss, batch) == pytest.approx([0, 0.25])
    # The ratio reported is u: mean 1.25.
    assert (stats.clipped_share, stats.ratio_mean) == (pytest.approx(0.5), pytest.approx(1.25))


def test_decoupled_keeps_the_gradient_of_a_stale_token_that_ppo_clips() -> None:
    # pi/mu = 2 is outside of [0.8, 1.2], but comes from staleness alone: u = 1. Gradient -k u A = -2.
    batch = tokens([2], [1], proximal=[2])
    loss, stats = decoupled(batch)
    assert gradient(loss, batch) == pytest.approx([-2.0])
    assert stats.clipped_share == 0.0


def test_decoupled_drops_tokens_above_max_weight() -> None:
    batch = tokens([8, 1], [1, 1], proximal=[8, 1])
    loss, stats = decoupled(batch, max_weight=5.0)
    assert gradient(loss, batch) == pytest.approx([0, -0.5])
    assert stats.dropped_share == pytest.approx(0.5)


def test_tis_by_hand() -> None:
    # k = 4 is capped to 2; k = 0.5 stays. u = 1, 1.5; A = 1, 1: 2 * 1 = 2; 0.5 * 1.2 = 0.6 (clipped). Mean 1.3.
    batch = tokens([4, 0.75], [1, 1], proximal=[4, 0.5])
    loss, stats = tis(batch)
    assert loss.item() == pytest.approx(-1.3)
    assert gradient(loss, batch) == pytest.approx([-1, 0])
    assert stats.clipped_share == pytest.approx(0.5)


def test_icepop_with_a_proximal_policy_by_hand() -> None:
    # k = 6 (above 5: dropped), 0.4 (below 0.5: dropped), 2, 0.5 (on the bound: kept). u = 1 each; A = 1.
    # Objectives 0, 0, 2, 0.5: loss -2.5 / 4.
    batch = tokens([6, 0.4, 2, 0.5], [1, 1, 1, 1], proximal=[6, 0.4, 2, 0.5])
    loss, stats = icepop(batch)
    assert loss.item() == pytest.approx(-0.625)
    assert gradient(loss, batch) == pytest.approx([0, 0, -0.5, -0.125])
    assert stats.dropped_share == pytest.approx(0.5)
