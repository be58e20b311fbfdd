"""KL to a reference model and observation loss: by hand, and the KL against the true divergence."""

from __future__ import annotations

import math
from typing import Literal

import pytest
import torch

from polar_proxy.training.losses import kl_to_reference, observation_loss

HALF = torch.tensor([0.5, 0.5])


def leaf(values: list[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64).log().requires_grad_()


def test_kl_estimators_by_hand() -> None:
    # pi = 1/2 and 1/4, reference 1/4 and 1/2: d = log 2, -log 2 (log2).
    new, reference, log2 = leaf([0.5, 0.25]), leaf([0.25, 0.5]).detach(), math.log(2)
    on_policy = new.detach()
    # k1: (log2 - log2) / 2 = 0. k2: log2^2 / 2. k3: exp(-d) - 1 + d = 1/2 - 1 + log2 and 2 - 1 - log2, mean 1/4.
    assert kl_to_reference(new, reference, on_policy, HALF, estimator="k1")[0].item() == pytest.approx(0)
    assert kl_to_reference(new, reference, on_policy, HALF, estimator="k2")[0].item() == pytest.approx(log2**2 / 2)
    loss, stats = kl_to_reference(new, reference, on_policy, HALF, estimator="k3")
    assert loss.item() == pytest.approx(0.25)
    assert stats.mean == pytest.approx(0.25)
    # d (r k3) / d log pi = r (k3 + 1 - exp(-d)) = r d, with r = 1; halved.
    assert torch.autograd.grad(loss, new)[0].tolist() == pytest.approx([log2 / 2, -log2 / 2])


def test_kl_off_policy_by_hand() -> None:
    # mu = 1/4 and 1/2: r = 2 and 1/2. k3 as above log2 - 1/2 and 1 - log2: (2 (log2 - 1/2) + (1 - log2) / 2) / 2.
    new, reference, log2 = leaf([0.5, 0.25]), leaf([0.25, 0.5]).detach(), math.log(2)
    loss, stats = kl_to_reference(new, reference, leaf([0.25, 0.5]).detach(), HALF)
    assert loss.item() == pytest.approx((2 * (log2 - 0.5) + 0.5 * (1 - log2)) / 2)
    assert (stats.mean, stats.ratio_max) == (pytest.approx(loss.item()), pytest.approx(2.0))


def test_kl_ratio_is_bounded_and_reported() -> None:
    """One stale token with r = 1000, d = log 2 would outweigh everything; it counts as one with the ratio 4."""
    new, reference = leaf([0.5, 0.25]), leaf([0.25, 0.25]).detach()
    old = leaf([0.0005, 0.25]).detach()
    loss, stats = kl_to_reference(new, reference, old, HALF, estimator="k3", max_ratio=4.0)
    assert loss.item() == pytest.approx(4 * (math.log(2) - 0.5) / 2)
    # d (r k3) / d log pi = r (k3 + 1 - exp(-d)) = r d; with the ratio 4 and the weight 1/2: 2 log 2.
    assert torch.autograd.grad(loss, new)[0].tolist() == pytest.approx([2 * math.log(2), 0.0])
    assert stats.mean == pytest.approx(loss.item())
    assert (stats.ratio_max, stats.bounded_share) == (pytest.approx(1000.0), pytest.approx(0.5))


@pytest.mark.parametrize("off_policy", [True, False])
@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_kl_gradient_equals_that_of_the_true_divergence(kind: Literal["k1", "k2", "k3"], off_policy: bool) -> None:
    """Over a whole vocabulary of three, each outcome weighted by its probability under the sampling policy."""
    logits = torch.tensor([0.3, -0.8, 1.1], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([1.0, 0.2, -0.4], dtype=torch.float64).log_softmax(0)
    new = logits.log_softmax(0)
    sampler = torch.tensor([-0.5, 0.4, 0.1], dtype=torch.float64).log_softmax(0) if off_policy else new.detach()
    loss, _ = kl_to_reference(new, reference, sampler, sampler.exp(), estimator=kind, max_ratio=100.0)
    truth = (new.exp() * (new - reference)).sum()
    torch.testing.assert_close(torch.autograd.grad(loss, logits, retain_graph=True), torch.autograd.grad(truth, logits))
    if kind != "k2":
        assert loss.item() == pytest.approx((new.exp() * (new - reference)).sum().item())


def test_observation_loss_by_hand() -> None:
    # Observations with probabilities 1/2 and 1/8, of four in the update: (log 2 + log 8) / 4 = log 2.
    new = leaf([0.5, 0.125])
    loss = observation_loss(new, 4)
    assert loss.item() == pytest.approx(math.log(2))
    assert torch.autograd.grad(loss, new)[0].tolist() == pytest.approx([-0.25, -0.25])


def test_observation_loss_without_observations_is_zero() -> None:
    assert observation_loss(leaf([]), 0).item() == 0.0
