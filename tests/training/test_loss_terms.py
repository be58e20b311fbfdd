"""KL to a reference model and observation loss: by hand, and the KL against the true divergence."""

from __future__ import annotations

import math
from typing import Literal

import pytest
import torch

from polar_proxy.training.loss_terms import kl_to_reference, observation_loss

ALL = torch.tensor([True, True])


def leaf(values: list[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64).log().requires_grad_()


def test_kl_estimators_by_hand() -> None:
    # pi = 1/2 and 1/4, reference 1/4 and 1/2: d = log 2, -log 2 (log2).
    new, reference, log2 = leaf([0.5, 0.25]), leaf([0.25, 0.5]).detach(), math.log(2)
    # k1: (log2 - log2) / 2 = 0. k2: log2^2 / 2. k3: exp(-d) - 1 + d = 1/2 - 1 + log2 and 2 - 1 - log2, mean 1/4.
    assert kl_to_reference(new, reference, ALL, estimator="k1")[0].item() == pytest.approx(0)
    assert kl_to_reference(new, reference, ALL, estimator="k2")[0].item() == pytest.approx(log2**2 / 2)
    loss, stats = kl_to_reference(new, reference, ALL, estimator="k3")
    assert loss.item() == pytest.approx(0.25)
    assert (stats.tokens, stats.mean) == (2, pytest.approx(0.25))
    assert stats.largest == pytest.approx(1 - log2)
    # d k3 / d log pi = 1 - exp(-d) = 1/2 and -1; halved.
    assert torch.autograd.grad(loss, new)[0].tolist() == pytest.approx([0.25, -0.5])


def test_kl_off_policy_by_hand() -> None:
    # mu = 1/4 and 1/2: r = 2 and 1/2. k3 as above log2 - 1/2 and 1 - log2: (2 (log2 - 1/2) + (1 - log2) / 2) / 2.
    new, reference, log2 = leaf([0.5, 0.25]), leaf([0.25, 0.5]).detach(), math.log(2)
    loss, stats = kl_to_reference(new, reference, ALL, old_logprobs=leaf([0.25, 0.5]).detach())
    assert loss.item() == pytest.approx((2 * (log2 - 0.5) + 0.5 * (1 - log2)) / 2)
    assert stats.mean == pytest.approx(0.25)


@pytest.mark.parametrize(("kind", "off_policy"), [("k1", True), ("k3", True), ("k2", False)])
def test_kl_gradient_equals_that_of_the_true_divergence(kind: Literal["k1", "k2", "k3"], off_policy: bool) -> None:
    """Over a whole vocabulary of three, each outcome weighted by its probability under the sampling policy."""
    logits = torch.tensor([0.3, -0.8, 1.1], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([1.0, 0.2, -0.4], dtype=torch.float64).log_softmax(0)
    new = logits.log_softmax(0)
    sampler = torch.tensor([-0.5, 0.4, 0.1], dtype=torch.float64).log_softmax(0) if off_policy else new.detach()
    loss, _ = kl_to_reference(
        new,
        reference,
        torch.ones(3).bool(),
        estimator=kind,
        old_logprobs=sampler if off_policy else None,
        weights=sampler.exp(),
    )
    truth = (new.exp() * (new - reference)).sum()
    torch.testing.assert_close(torch.autograd.grad(loss, logits, retain_graph=True), torch.autograd.grad(truth, logits))
    if kind != "k2":
        assert loss.item() == pytest.approx((new.exp() * (new - reference)).sum().item())


def test_kl_ignores_tokens_outside_of_the_mask() -> None:
    new = leaf([0.5, 0.25])
    loss, stats = kl_to_reference(new, torch.tensor([math.nan, math.log(0.5)]), torch.tensor([False, True]))
    assert torch.autograd.grad(loss, new)[0].tolist() == pytest.approx([0, -1])
    assert stats.tokens == 1


def test_observation_loss_by_hand() -> None:
    # Observations with probabilities 1/2 and 1/8; the sampled token between them is ignored.
    # (log 2 + log 8) / 2 = 2 log 2; perplexity 4.
    new = leaf([0.5, 0.9, 0.125])
    loss, stats = observation_loss(new, torch.tensor([True, False, True]))
    assert loss.item() == pytest.approx(2 * math.log(2))
    assert torch.autograd.grad(loss, new)[0].tolist() == pytest.approx([-0.5, 0, -0.5])
    assert (stats.tokens, stats.cross_entropy) == (2, pytest.approx(2 * math.log(2)))
    assert stats.perplexity == pytest.approx(4.0)


def test_observation_loss_without_observations_is_zero() -> None:
    new = leaf([0.5])
    loss, stats = observation_loss(new, torch.tensor([False]))
    assert (loss.item(), stats.tokens) == (0.0, 0)
