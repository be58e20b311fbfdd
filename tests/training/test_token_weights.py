"""The weight of each token: per token, per sequence, per rollout, by a constant."""

from __future__ import annotations

import pytest
import torch

from polar_proxy.training.losses import token_weights

# Rollout 0 has the sequences 0 (2 tokens) and 1 (4 tokens); rollout 1 has sequence 2 (2 tokens).
SEQUENCES = torch.tensor([0, 0, 1, 1, 1, 1, 2, 2])
ROLLOUTS = torch.tensor([0, 0, 0, 0, 0, 0, 1, 1])


def test_aggregation_by_token() -> None:
    assert token_weights(SEQUENCES, ROLLOUTS, aggregation="token").tolist() == [1 / 8] * 8


def test_aggregation_by_sequence() -> None:
    # Three sequences of 2, 4 and 2 tokens: 1 / (3 * 2), 1 / (3 * 4), 1 / (3 * 2).
    weights = token_weights(SEQUENCES, ROLLOUTS, aggregation="sequence")
    assert weights.tolist() == pytest.approx([1 / 6] * 2 + [1 / 12] * 4 + [1 / 6] * 2)


def test_aggregation_by_rollout_counts_a_rollout_once() -> None:
    # Two rollouts of 6 and 2 tokens: 1 / (2 * 6), 1 / (2 * 2). Each rollout weighs one half.
    weights = token_weights(SEQUENCES, ROLLOUTS, aggregation="rollout")
    assert weights.tolist() == pytest.approx([1 / 12] * 6 + [1 / 4] * 2)
    assert float(weights[ROLLOUTS == 0].sum()) == pytest.approx(0.5)


def test_aggregation_by_constant() -> None:
    # Two rollouts of at most 10 tokens: 1 / 20 each, however much was sampled.
    weights = token_weights(SEQUENCES, ROLLOUTS, aggregation="constant", length=10)
    assert weights.tolist() == pytest.approx([1 / 20] * 8)


def test_weights_sum_to_one_except_by_constant() -> None:
    for aggregation in ("token", "sequence", "rollout"):
        weights = token_weights(SEQUENCES, ROLLOUTS, aggregation=aggregation)
        assert float(weights.sum()) == pytest.approx(1.0)
