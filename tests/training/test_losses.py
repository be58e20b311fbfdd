"""Policy losses and their gradients against values worked out by hand.

d r / d log pi = r, so a token whose objective is r A has the gradient -w r A, and one that was clipped has 0.
"""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from polar_proxy.training.losses import (
    LOSSES,
    LossInputs,
    adaptive_bounds,
    bapo,
    cispo,
    dapo,
    gspo,
    minpro,
    ppo_clip,
    token_weights,
)
from tests.training.loss_inputs import gradient, tokens


def test_ppo_clip_by_hand() -> None:
    # r = 1.5, 1.5, 0.5, 0.5, 1.1 with A = 1, -1, 1, -1, 2 and clip [0.8, 1.2]:
    #   min(1.5, 1.2) = 1.2 (clipped)      min(-1.5, -1.2) = -1.5
    #   min(0.5, 0.8) = 0.5                min(-0.5, -0.8) = -0.8 (clipped)        1.1 * 2 = 2.2
    # Mean (1.2 - 1.5 + 0.5 - 0.8 + 2.2) / 5 = 1.6 / 5 = 0.32.
    batch = tokens([1.5, 1.5, 0.5, 0.5, 1.1], [1, -1, 1, -1, 2])
    loss, stats = ppo_clip(batch)
    assert loss.item() == pytest.approx(-0.32)
    # -r A / 5 where nothing was clipped: 0, 0.3, -0.1, 0, -0.44.
    assert gradient(loss, batch) == pytest.approx([0, 0.3, -0.1, 0, -0.44])
    assert (stats.tokens, stats.clipped_share, stats.ratio_max) == (5, pytest.approx(0.4), pytest.approx(1.5))
    # Mean ratio 5.1 / 5. KL: mean of r - 1 - log r = 0.02 - (2 log 1.5 + 2 log 0.5 + log 1.1) / 5.
    assert stats.ratio_mean == pytest.approx(1.02)
    assert stats.approx_kl == pytest.approx(0.02 - (2 * math.log(1.5) + 2 * math.log(0.5) + math.log(1.1)) / 5)


def test_dapo_clips_higher_above_than_below() -> None:
    # r = 1.25: below 1.28, so kept (1.25); PPO would clip at 1.2. r = 1.4: clipped to 1.28. r = 0.7, A = -1: to -0.8.
    batch = tokens([1.25, 1.4, 0.7], [1, 1, -1])
    loss, stats = dapo(batch)
    assert loss.item() == pytest.approx(-(1.25 + 1.28 - 0.8) / 3)
    assert gradient(loss, batch) == pytest.approx([-1.25 / 3, 0, 0])
    assert stats.clipped_share == pytest.approx(2 / 3)


def test_token_and_sequence_aggregation_differ_as_in_the_papers() -> None:
    # Ratios 1. Sequence 0: one token, A = 3. Sequence 1: three tokens, A = -1.
    # Per token (DAPO): (3 - 1 - 1 - 1) / 4 = 0. Per sequence (GRPO): (3 + (-1)) / 2 = 1.
    plain = tokens([1, 1, 1, 1], [3, -1, -1, -1], sequences=[0, 1, 1, 1])
    weights = token_weights(plain.sequences, plain.sequences, aggregation="sequence")
    assert ppo_clip(plain)[0].item() == pytest.approx(0.0)
    per_sequence = tokens([1, 1, 1, 1], [3, -1, -1, -1], sequences=[0, 1, 1, 1], weights=weights)
    assert ppo_clip(per_sequence)[0].item() == pytest.approx(-1.0)


def test_gspo_by_hand() -> None:
    # Sequence 0: ratios 2 and 1/2 -> s = sqrt(1) = 1, A = 1: objective 1 though both tokens are far outside.
    # Sequence 1: ratios 4, 1 -> s = sqrt 4 = 2, A = 2: clipped to 1.1 -> 2.2.
    # Mean over sequences: (1 + 2.2) / 2 = 1.6.
    sequences = torch.tensor([0, 0, 1, 1])
    weights = token_weights(sequences, sequences, aggregation="sequence")
    batch = tokens([2, 0.5, 4, 1], [1, 1, 2, 2], sequences=[0, 0, 1, 1], weights=weights)
    loss, stats = gspo(batch, clip_low=0.1, clip_high=0.1)
    assert loss.item() == pytest.approx(-1.6)
    # d s_0 / d log pi_t = s_0 / 2: the gradient of -(1/2) s_0 A is -1/4 at both tokens; sequence 1 is clipped.
    assert gradient(loss, batch) == pytest.approx([-0.25, -0.25, 0, 0])
    assert stats.clipped_share == pytest.approx(0.5)
    assert stats.ratio_max == pytest.approx(2.0)


def test_cispo_by_hand() -> None:
    # Weights: r = 3 -> 2 (bounded), r = 0.5 stays. Gradient -w * sg(weight) * A, also where it was bounded.
    batch = tokens([3, 0.5], [1, -1])
    loss, stats = cispo(batch, max_ratio=2.0)
    assert gradient(loss, batch) == pytest.approx([-2 / 2, 0.5 / 2])
    # Value: -(2 log(1.5) - 0.5 log(0.25)) / 2, with pi = r / 2.
    assert loss.item() == pytest.approx(-(2 * math.log(1.5) - 0.5 * math.log(0.25)) / 2)
    assert stats.clipped_share == pytest.approx(0.5)


def test_minpro_by_hand() -> None:
    # Sequence 0: ratios 0.5, 2, 1, 4. Smallest before: 1 (nothing), 0.5, 0.5, 0.5.
    # Products: 0.5, 1, 0.5, 2. Clip [0.6, 1.5]: 0.6, 1, 0.6, 1.5. Sequence 1: 1.2 * 1 = 1.2.
    batch = tokens([0.5, 2, 1, 4, 1.2], [1, 1, -1, 1, 1], sequences=[0, 0, 0, 0, 1])
    loss, stats = minpro(batch, clip_low=0.4, clip_high=0.5)
    assert gradient(loss, batch) == pytest.approx([-0.6 / 5, -1 / 5, 0.6 / 5, -1.5 / 5, -1.2 / 5])
    assert stats.clipped_share == pytest.approx(3 / 5)
    assert stats.ratio_max == pytest.approx(2.0)
    # A prefix whose every ratio is above 1 has its minimum above 1 as well: 2, then 2 * 1.5 = 3.
    rising = tokens([2, 1.5], [1, 1])
    loss, _ = minpro(rising, clip_low=0.9, clip_high=9.0)
    assert gradient(loss, rising) == pytest.approx([-2 / 2, -3 / 2])


def test_adaptive_bounds_by_hand() -> None:
    ratio = torch.tensor([1.0, 1.35, 0.65, 0.85, 1.0], dtype=torch.float64)
    advantage = torch.tensor([1.0, 1.0, -1.0, -1.0, -1.0], dtype=torch.float64)
    settings = {"low": (0.6, 0.9), "high": (1.2, 3.0), "step": 0.1}
    # [0.6, 1.2]: positive 1.0 (1.35 is clipped); negative 0.65 + 0.85 + 1 = 2.5 -> 1 / 3.5 = 0.2857.
    assert adaptive_bounds(ratio, advantage, target=0.2, **settings) == pytest.approx((0.6, 1.2))
    # Low 0.7 clips 0.65: 1 / (1 + 1.85) = 0.351 reaches 0.3, and the upper bound stays.
    assert adaptive_bounds(ratio, advantage, target=0.3, **settings) == pytest.approx((0.7, 1.2))
    assert adaptive_bounds(ratio, advantage, target=1 / 2.84, **settings) == pytest.approx((0.9, 1.2))
    # 0.5: low 0.8 changes nothing, 0.9 clips 0.85: 1 / 2 = 0.5 is reached.
    assert adaptive_bounds(ratio, advantage, target=0.5, **settings) == pytest.approx((0.9, 1.2))
    # 0.6: low is at its limit; high 1.3, then 1.4 includes 1.35: 2.35 / 3.35 = 0.701.
    assert adaptive_bounds(ratio, advantage, target=0.6, **settings) == pytest.approx((0.9, 1.4))
    assert adaptive_bounds(ratio, advantage, target=2.35 / 3.34, **settings) == pytest.approx((0.9, 3.0))
    # An unreachable target moves both bounds to their limits; without negative tokens they stay.
    assert adaptive_bounds(ratio, advantage, target=0.99, **settings) == pytest.approx((0.9, 3.0))
    assert adaptive_bounds(ratio, advantage.abs(), target=0.9, **settings) == pytest.approx((0.6, 1.2))


def test_bapo_by_hand() -> None:
    # As above with target 0.5: bounds [0.9, 1.2]. A = 1: 1 and min(1.35, 1.2) = 1.2; A = -1: max(r, 0.9) = 0.9, 0.9, 1.
    batch = tokens([1, 1.35, 0.65, 0.85, 1], [1, 1, -1, -1, -1])
    loss, stats = bapo(batch, step=0.1)
    assert loss.item() == pytest.approx(-(1 + 1.2 - 0.9 - 0.9 - 1) / 5)
    assert gradient(loss, batch) == pytest.approx([-1 / 5, 0, 0, 0, 1 / 5])
    assert stats.clipped_share == pytest.approx(3 / 5)


# Every loss ---------------------------------------------------------------------------------------------------------


def batch_for(weights: torch.Tensor | None = None) -> LossInputs:
    return tokens(
        [1.3, 0.6, 1.05, 0.9, 1.0],
        [1, -1, 0.5, 2, -2],
        sequences=[0, 0, 1, 1, 1],
        proximal=[1.1, 0.9, 1.3, 0.7, 1.0],
        weights=weights,
    )


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_on_policy_every_loss_has_the_policy_gradient(name: str) -> None:
    """At pi_theta = pi_prox = mu all of them have the gradient -w A."""
    advantages = [1.0, 1.0, -2.0, -2.0]
    batch = tokens([1.0] * 4, advantages, sequences=[0, 0, 1, 1], proximal=[1.0] * 4)
    loss, stats = LOSSES[name](batch)
    assert gradient(loss, batch) == pytest.approx([-value / 4 for value in advantages])
    assert (stats.clipped_share, stats.dropped_share, stats.approx_kl) == (0.0, 0.0, 0.0)


@pytest.mark.parametrize("name", sorted(set(LOSSES) - {"bapo"}))
def test_microbatches_add_up_to_the_update(name: str) -> None:
    """With the weights of the whole update, losses and gradients of its sequences sum to those of the update."""
    sequences = batch_for().sequences
    weights = token_weights(sequences, sequences, aggregation="sequence")
    whole = batch_for(weights)
    loss, _ = LOSSES[name](whole)
    total, parts = 0.0, []
    for piece in (slice(0, 2), slice(2, 5)):
        values = {field.name: getattr(whole, field.name)[piece] for field in dataclasses.fields(whole)}
        part = LossInputs(**values | {"logprobs": values["logprobs"].detach().clone().requires_grad_()})
        part_loss, _ = LOSSES[name](part)
        total += part_loss.item()
        parts += gradient(part_loss, part)
    assert total == pytest.approx(loss.item())
    assert parts == pytest.approx(gradient(loss, whole))


def test_huge_ratio_stays_finite() -> None:
    extreme = dataclasses.replace(
        tokens([1.0, 1.0], [-1, -1]),
        logprobs=torch.tensor([0.0, -0.7], requires_grad=True),
        old_logprobs=torch.tensor([-500.0, -0.7]),
    )
    loss, stats = ppo_clip(extreme)
    assert math.isfinite(loss.item())
    assert stats.ratio_max == pytest.approx(math.exp(20), rel=1e-4)


def test_entropy_and_mismatch_are_reported() -> None:
    # |log prox - log mu| = log 2 and log 4.
    batch = tokens([1, 1], [1, 1], proximal=[2, 0.25])
    stats = ppo_clip(dataclasses.replace(batch, entropy=torch.tensor([1.0, 2.0])))[1]
    assert stats.entropy == pytest.approx(1.5)
    assert stats.mismatch_mean == pytest.approx(1.5 * math.log(2))
    assert stats.mismatch_max == pytest.approx(2 * math.log(2))


@pytest.mark.parametrize("field", ["old_logprobs", "advantages"])
def test_rejects_trained_token_without_finite_values(field: str) -> None:
    batch = tokens([1, 1], [1, 1])
    values = getattr(batch, field).clone()
    values[1] = float("nan")
    with pytest.raises(ValueError, match=f"`{field}` of a trained token is not finite"):
        dataclasses.replace(batch, **{field: values})


def test_rejects_wrong_shapes() -> None:
    batch = tokens([1, 1], [1, 1])
    with pytest.raises(ValueError, match="expected 2 values"):
        dataclasses.replace(batch, old_logprobs=batch.old_logprobs[:1])
