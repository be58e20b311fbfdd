"""What each token weighs: per token, per sequence, per rollout, by a constant."""

from __future__ import annotations

import pytest
import torch

from polar_proxy.training.loss_terms import token_weights, trained

# Rollout 0 has the sequences 0 (2 sampled, 1 context) and 1 (4 sampled); rollout 1 has sequence 2 (2 sampled).
MASK = torch.tensor([1, 0, 1, 1, 1, 1, 1, 1, 1]).bool()
SEQUENCES = torch.tensor([0, 0, 0, 1, 1, 1, 1, 2, 2])
ROLLOUTS = torch.tensor([0, 0, 0, 0, 0, 0, 0, 1, 1])


def test_per_token() -> None:
    # Eight sampled tokens.
    assert token_weights(MASK, SEQUENCES, ROLLOUTS, how="token").tolist() == [1 / 8, 0] + [1 / 8] * 7


def test_per_sequence() -> None:
    # Three sequences of 2, 4 and 2 sampled tokens: 1 / (3 * 2), 1 / (3 * 4), 1 / (3 * 2).
    got = token_weights(MASK, SEQUENCES, ROLLOUTS, how="sequence")
    assert got.tolist() == pytest.approx([1 / 6, 0, 1 / 6] + [1 / 12] * 4 + [1 / 6] * 2)


def test_per_rollout_counts_a_rollout_once_whatever_its_traces() -> None:
    # Two rollouts of 6 and 2 sampled tokens: 1 / (2 * 6), 1 / (2 * 2). Each rollout weighs one half.
    got = token_weights(MASK, SEQUENCES, ROLLOUTS, how="rollout")
    assert got.tolist() == pytest.approx([1 / 12, 0, 1 / 12] + [1 / 12] * 4 + [1 / 4] * 2)
    assert float(got[ROLLOUTS == 0].sum()) == pytest.approx(0.5)


def test_by_a_constant() -> None:
    # Two rollouts of at most 10 tokens: 1 / 20 each, whatever was sampled.
    got = token_weights(MASK, SEQUENCES, ROLLOUTS, how="constant", length=10)
    assert got.tolist() == pytest.approx([1 / 20, 0] + [1 / 20] * 7)
    with pytest.raises(ValueError, match="length"):
        token_weights(MASK, SEQUENCES, how="constant")


def test_sequences_without_a_sampled_token_are_not_counted() -> None:
    # Sequence 2 is all context: two sequences are left, of 1 token each.
    mask, sequences = torch.tensor([True, True, False]), torch.tensor([7, 9, 2])
    assert token_weights(mask, sequences, how="sequence").tolist() == [0.5, 0.5, 0]


def test_shares_of_one_sample_weigh_what_one_sample_weighs() -> None:
    # One sample in two copies of one half, and one whole: (1/2, 1/2, 1) / 2.
    shares, sequences = torch.tensor([0.5, 0.5, 1.0]), torch.tensor([0, 1, 1])
    assert token_weights(shares, sequences, how="token").tolist() == [0.25, 0.25, 0.5]
    # Sequence 0 holds 1/2, sequence 1 holds 3/2: each is averaged by what it holds. (1, 1/3, 2/3) / 2.
    assert token_weights(shares, sequences, how="sequence").tolist() == pytest.approx([1 / 2, 1 / 6, 1 / 3])


def test_all_but_the_constant_sum_to_one() -> None:
    for how in ("token", "sequence", "rollout"):
        assert float(token_weights(MASK, SEQUENCES, ROLLOUTS, how=how).sum()) == pytest.approx(1.0)


def test_nothing_to_train_is_an_error() -> None:
    with pytest.raises(ValueError, match="no token is trained"):
        token_weights(torch.zeros(3).bool(), torch.zeros(3).long())


def test_who_has_no_advantage_is_in_no_denominator() -> None:
    mask, advantages = torch.tensor([True, False, True, True]), torch.tensor([1.0, 1.0, float("nan"), 0.0])
    assert trained(mask, advantages).tolist() == [True, False, False, True]
    assert trained(mask.double() / 2, advantages).tolist() == [0.5, 0.0, 0.0, 0.5]
    assert token_weights(trained(mask, advantages), torch.tensor([0, 0, 1, 2]), how="sequence").tolist() == [
        0.5,
        0,
        0,
        0.5,
    ]
