"""The weight of each token: per token, per sequence, per rollout, by a constant."""

from __future__ import annotations

import pytest
import torch

from polar_proxy.training.loss_terms import token_weights

# Rollout 0 has the sequences 0 (2 sampled, 1 context) and 1 (4 sampled); rollout 1 has sequence 2 (2 sampled).
MASK = torch.tensor([1, 0, 1, 1, 1, 1, 1, 1, 1]).bool()
SEQUENCES = torch.tensor([0, 0, 0, 1, 1, 1, 1, 2, 2])
ROLLOUTS = torch.tensor([0, 0, 0, 0, 0, 0, 0, 1, 1])


def test_aggregation_by_token() -> None:
    # Eight sampled tokens.
    assert token_weights(MASK, SEQUENCES, ROLLOUTS, aggregation="token").tolist() == [1 / 8, 0] + [1 / 8] * 7


def test_aggregation_by_sequence() -> None:
    # Three sequences of 2, 4 and 2 sampled tokens: 1 / (3 * 2), 1 / (3 * 4), 1 / (3 * 2).
    weights = token_weights(MASK, SEQUENCES, ROLLOUTS, aggregation="sequence")
    assert weights.tolist() == pytest.approx([1 / 6, 0, 1 / 6] + [1 / 12] * 4 + [1 / 6] * 2)


def test_aggregation_by_rollout_counts_a_rollout_once() -> None:
    # Two rollouts of 6 and 2 sampled tokens: 1 / (2 * 6), 1 / (2 * 2). Each rollout weighs one half.
    weights = token_weights(MASK, SEQUENCES, ROLLOUTS, aggregation="rollout")
    assert weights.tolist() == pytest.approx([1 / 12, 0, 1 / 12] + [1 / 12] * 4 + [1 / 4] * 2)
    assert float(weights[ROLLOUTS == 0].sum()) == pytest.approx(0.5)


def test_aggregation_by_constant() -> None:
    # Two rollouts of at most 10 tokens: 1 / 20 each, however much was sampled.
    weights = token_weights(MASK, SEQUENCES, ROLLOUTS, aggregation="constant", length=10)
    assert weights.tolist() == pytest.approx([1 / 20, 0] + [1 / 20] * 7)
    with pytest.raises(ValueError, match="length"):
        token_weights(MASK, SEQUENCES, aggregation="constant")


def test_sequences_without_a_sampled_token_are_not_counted() -> None:
    # Sequence 2 is all context: two sequences are left, of 1 token each.
    mask, sequences = torch.tensor([True, True, False]), torch.tensor([7, 9, 2])
    assert token_weights(mask, sequences, aggregation="sequence").tolist() == [0.5, 0.5, 0]


def test_weights_sum_to_one_except_by_constant() -> None:
    for aggregation in ("token", "sequence", "rollout"):
        weights = token_weights(MASK, SEQUENCES, ROLLOUTS, aggregation=aggregation)
        assert float(weights.sum()) == pytest.approx(1.0)


def test_rejects_a_mask_without_a_trained_token() -> None:
    with pytest.raises(ValueError, match="no token is trained"):
        token_weights(torch.zeros(3).bool(), torch.zeros(3).long())
