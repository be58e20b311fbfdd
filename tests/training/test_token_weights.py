"""The weight of each token: per token, per sequence, per rollout, by a constant."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from polar_proxy.training.batch import GroupRollout, TrainingBatch, make_batch
from polar_proxy.training.config import GrpoConfig
from polar_proxy.training.loss_names import LossAggregation
from polar_proxy.training.losses import token_weights
from tests.training.group_factories import group, microbatch_of, rollout, trace

# Rollout 0 has the sequences 0 (2 tokens) and 1 (4 tokens); rollout 1 has sequence 2 (2 tokens).
SEQUENCES = torch.tensor([0, 0, 1, 1, 1, 1, 2, 2])
ROLLOUTS = torch.tensor([0, 0, 0, 0, 0, 0, 1, 1])


def test_aggregation_by_token() -> None:
    assert token_weights(SEQUENCES, ROLLOUTS, aggregation="token").tolist() == [1 / 8] * 8


def test_aggregation_by_sequence_shares_the_weight_of_a_rollout() -> None:
    # Two rollouts, of two sequences and one: 1 / (2 * 2 * 2), 1 / (2 * 2 * 4), 1 / (2 * 1 * 2).
    weights = token_weights(SEQUENCES, ROLLOUTS, aggregation="sequence")
    assert weights.tolist() == pytest.approx([1 / 8] * 2 + [1 / 16] * 4 + [1 / 4] * 2)


def test_aggregation_by_rollout_counts_a_rollout_once() -> None:
    # Two rollouts of 6 and 2 tokens: 1 / (2 * 6), 1 / (2 * 2). Each rollout weighs one half.
    weights = token_weights(SEQUENCES, ROLLOUTS, aggregation="rollout")
    assert weights.tolist() == pytest.approx([1 / 12] * 6 + [1 / 4] * 2)
    assert float(weights[ROLLOUTS == 0].sum()) == pytest.approx(0.5)


def test_aggregation_by_constant() -> None:
    weights = token_weights(SEQUENCES, ROLLOUTS, aggregation="constant", constants=torch.full((8,), 20))
    assert weights.tolist() == pytest.approx([1 / 20] * 8)


def run_cut_into(pieces: int) -> TrainingBatch:
    """Return a group of a rollout with 8 sampled tokens in so many traces, and one with 4 in one trace; of five
    rollouts, three have no trace."""
    size = 8 // pieces
    cut = tuple(trace(f"a{n}", [1, 2], [3 + n] * size) for n in range(pieces))
    members = [GroupRollout(rollout(0, 1.0), cut), GroupRollout(rollout(1, 0.0), (trace("b", [1, 2], [4] * 4),))]
    members += [GroupRollout(rollout(2 + n, 0.5), ()) for n in range(3)]
    return make_batch([group(*members)], GrpoConfig())


def weight_of_rollouts(pieces: int, **settings: Any) -> list[float]:
    """Return the total weight of the two rollouts' tokens in the loss."""
    config = GrpoConfig(**settings)
    batch = run_cut_into(pieces)
    microbatch = microbatch_of(batch, config)
    owners = torch.tensor([one.rollout for one in batch.sequences])[microbatch.sequences]
    return [float(microbatch.weights[owners == number].sum()) for number in (0, 1)]


@pytest.mark.parametrize("pieces", [1, 2, 4])
def test_weight_of_a_rollout_does_not_depend_on_how_it_was_cut(pieces: int) -> None:
    assert weight_of_rollouts(pieces) == pytest.approx([0.5, 0.5])
    assert weight_of_rollouts(pieces, loss_aggregation="sequence") == pytest.approx([0.5, 0.5])
    assert weight_of_rollouts(pieces, loss_aggregation="token") == pytest.approx([8 / 12, 4 / 12])
    # Dr. GRPO divides by G = 5, although two rollouts are trained.
    constant = {"loss_aggregation": "constant", "max_rollout_tokens": 10}
    assert weight_of_rollouts(pieces, **constant) == pytest.approx([8 / 50, 4 / 50])


@pytest.mark.parametrize("aggregation", ["token", "sequence", "rollout", "constant"])
def test_gspo_has_the_mean_over_sequences_of_its_paper(aggregation: str) -> None:
    settings = {"loss": "gspo", "loss_aggregation": aggregation, "max_rollout_tokens": 10}
    assert weight_of_rollouts(1, **settings) == pytest.approx([0.5, 0.5])
    assert weight_of_rollouts(4, **settings) == pytest.approx([0.5, 0.5])


def test_weights_sum_to_one_except_by_constant() -> None:
    aggregations: tuple[LossAggregation, ...] = ("token", "sequence", "rollout")
    for aggregation in aggregations:
        weights = token_weights(SEQUENCES, ROLLOUTS, aggregation=aggregation)
        assert float(weights.sum()) == pytest.approx(1.0)
