"""Advantages, losses, aggregations and KL terms equal an independent implementation (`reference.py`) in float64: values
and gradients, on random groups of rollouts with several traces."""

from __future__ import annotations

import dataclasses
import random
from dataclasses import dataclass
from typing import Any, Literal

import pytest
import torch

from polar_proxy.training.advantages import ADVANTAGES
from polar_proxy.training.batch import GroupRollout, TrainingBatch, TrainingGroup, make_batch
from polar_proxy.training.config import GrpoConfig
from polar_proxy.training.losses import LOSSES, LossInputs, kl_to_reference
from polar_proxy.training.policy.packing import Microbatch
from tests.training import reference
from tests.training.group_factories import group, microbatch_of, rollout, trace

LENGTH = 20


def random_groups(draw: random.Random) -> list[TrainingGroup]:
    """Return groups whose rewards differ or not, whose rollouts have none to four traces, and some no reward."""
    groups = []
    for number in range(draw.randint(2, 4)):
        members = []
        for index in range(draw.randint(2, 5)):
            reward = draw.choice([None, 0.0, 0.25, 1.0, 1.0])
            traces = []
            for part in range(draw.randint(0, 4)):
                sampled = [draw.randrange(50) for _ in range(draw.randint(1, 5))]
                logprobs = [-draw.uniform(0.1, 4.0) for _ in sampled]
                name = f"g{number}r{index}t{part}"
                traces.append(trace(name, [number, index, part], sampled, logprobs=logprobs))
            members.append(GroupRollout(rollout(index, reward), tuple(traces)))
        groups.append(group(*members, name=f"group_{number}"))
    return groups


@dataclass
class Update:
    """One update, as the product and as the reference see it; their tokens are in the same order."""

    microbatch: Microbatch
    tokens: list[reference.Token]
    new: list[float]


def reference_tokens(groups: list[TrainingGroup], advantage: str, draw: random.Random) -> dict[str, list[Any]]:
    """Return trace id -> its tokens, for the rollouts that are trained."""
    found: dict[str, list[Any]] = {}
    rollout_number = trace_number = 0
    for number, each in enumerate(groups):
        advantages = reference.ADVANTAGES[advantage](each.rewards)
        for member, value in zip(each.members, advantages, strict=True):
            rollout_number += 1
            for one in member.traces if value is not None and any(advantages) else ():
                trace_number += 1
                found[one.trace_id] = [
                    reference.Token(
                        old=float(old),
                        proximal=float(old) + draw.uniform(-1.0, 1.0),
                        reference=float(old) + draw.uniform(-0.5, 0.5),
                        advantage=value,
                        group=number,
                        rollout=rollout_number,
                        trace=trace_number,
                        group_size=len(each.members),
                    )
                    for old in one.logprobs[one.loss_mask == 1]
                ]
    return found


def random_update(seed: int, config: GrpoConfig) -> Update | None:
    draw = random.Random(seed)
    groups = random_groups(draw)
    by_trace = reference_tokens(groups, config.advantage, draw)
    batch: TrainingBatch = make_batch(groups, config)
    assert {one.trace_id for one in batch.sequences} == set(by_trace)
    if not by_trace:
        return None
    microbatch = microbatch_of(batch, config)
    order = [batch.sequences[index].trace_id for index in dict.fromkeys(microbatch.sequences.tolist())]
    tokens = [token for name in order for token in by_trace[name]]
    new = [token.old + draw.uniform(-0.6, 0.6) for token in tokens]
    return Update(microbatch, tokens, new)


def float64(values: list[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def assert_equal(loss: torch.Tensor, new: torch.Tensor, expected: tuple[float, list[float]]) -> None:
    value, gradient = expected
    assert loss.item() == pytest.approx(value, rel=1e-7, abs=1e-9)
    (own,) = torch.autograd.grad(loss, new)
    assert own.tolist() == pytest.approx(gradient, rel=1e-5, abs=1e-8)


@pytest.mark.parametrize("name", sorted(ADVANTAGES))
def test_advantages_equal_the_reference(name: str) -> None:
    draw = random.Random(name)
    for _ in range(300):
        rewards = [draw.choice([None, 0.0, 0.5, 1.0, draw.random()]) for _ in range(draw.randint(1, 7))]
        found = [None if value != value else value for value in ADVANTAGES[name](rewards).tolist()]
        expected = reference.ADVANTAGES[name](rewards)
        assert [value is None for value in found] == [value is None for value in expected], rewards
        assert [value or 0 for value in found] == pytest.approx([value or 0 for value in expected], abs=1e-9), rewards


@pytest.mark.parametrize("aggregation", ["token", "sequence", "rollout", "constant"])
@pytest.mark.parametrize("name", sorted(LOSSES))
def test_losses_and_gradients_equal_the_reference(name: str, aggregation: Any) -> None:
    advantages = sorted(ADVANTAGES)
    compared = 0
    for seed in range(15):
        config = GrpoConfig(
            advantage=advantages[seed % len(advantages)],
            loss=name,
            loss_aggregation=aggregation,
            max_rollout_tokens=LENGTH,
        )
        update = random_update(seed, config)
        if update is None:
            continue
        compared += 1
        own = "sequence" if name == "gspo" else aggregation
        weights = [reference.weight(update.tokens, token, own, LENGTH) for token in update.tokens]
        assert update.microbatch.weights.tolist() == pytest.approx(weights)
        assert update.microbatch.advantages.tolist() == pytest.approx([token.advantage for token in update.tokens])
        new = float64(update.new).requires_grad_()
        inputs = LossInputs(
            logprobs=new,
            old_logprobs=float64([token.old for token in update.tokens]),
            proximal_logprobs=float64([token.proximal for token in update.tokens]),
            advantages=float64([token.advantage for token in update.tokens]),
            weights=update.microbatch.weights,
            sequences=update.microbatch.sequences,
            entropy=torch.zeros(len(new)),
        )
        loss, stats = LOSSES[name](inputs)
        assert stats.tokens == len(update.tokens)
        expected = reference.loss_and_gradient(update.tokens, update.new, reference.LOSSES[name], weights)
        assert_equal(loss, new, expected)
    assert compared > 10


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_and_its_gradient_equal_the_reference(estimator: Literal["k1", "k2", "k3"]) -> None:
    compared = 0
    for seed in range(15):
        update = random_update(seed, GrpoConfig(advantage="rloo"))
        if update is None:
            continue
        compared += 1
        # One stale token, whose ratio is bounded.
        tokens = [dataclasses.replace(update.tokens[0], old=update.new[0] - 7.0), *update.tokens[1:]]
        new = float64(update.new).requires_grad_()
        loss, stats = kl_to_reference(
            new,
            float64([token.reference for token in tokens]),
            float64([token.old for token in tokens]),
            update.microbatch.weights,
            estimator=estimator,
            max_ratio=3.0,
        )
        objective = reference.kl(estimator, max_ratio=3.0)
        weights = update.microbatch.weights.tolist()
        assert_equal(loss, new, reference.loss_and_gradient(tokens, update.new, objective, weights))
        assert stats.bounded_share > 0
        assert stats.mean == pytest.approx(-sum(objective(tokens, update.new, update.new)) / len(tokens))
    assert compared > 10
