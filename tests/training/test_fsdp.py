"""Several processes with shards of the weights: their steps and checkpoints equal those of a single process."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from polar_proxy.errors import TrainingError, UsageError
from polar_proxy.training import metrics
from polar_proxy.training.config import GrpoConfig, make_config
from polar_proxy.training.policy import checkpoint
from polar_proxy.training.policy.fsdp import ShardedCoordinator, launch_sharded
from polar_proxy.training.policy.model import Learner, load_model
from tests.training import bandit
from tests.training.test_model import ANSWERS, PROMPT, batch
from tests.training.test_model import CONFIG as STEP_CONFIG

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]


def single_process(model: Path, config: GrpoConfig) -> Learner:
    return Learner(load_model(model), config, load_model(model) if config.kl_coef else None)


def largest_difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(float((one[name].cpu() - other[name].cpu()).abs().max()) for name in one)


def assert_same_state(one: dict[str, object], other: dict[str, object]) -> None:
    """Compare the states of two optimisers up to rounding."""
    assert one["state"].keys() == other["state"].keys()  # type: ignore[attr-defined]
    for index, values in one["state"].items():  # type: ignore[attr-defined]
        for name, value in values.items():
            torch.testing.assert_close(other["state"][index][name], value, rtol=1e-3, atol=1e-6)  # type: ignore[index]


CONFIG = STEP_CONFIG.model_copy(
    update={
        "max_tokens_per_microbatch": 8,
        "kl_coef": 0.1,
        "ppo_epochs": 2,
        "loss_aggregation": "rollout",
        "loss": "gspo",
        "processes": 2,
        "activation_checkpointing": True,
        "learning_rate": 1e-4,
    }
)
"""Several packs, two epochs, a reference model, and activations that are computed again."""


@pytest.fixture(scope="module")
def two(model: Path) -> Iterator[ShardedCoordinator]:
    """A learner of two processes. Starting a process takes seconds, so all tests use this one."""
    with launch_sharded(model, model, CONFIG) as coordinator:
        yield coordinator
    assert multiprocessing.active_children() == []


async def test_run_syncs_the_engine_and_is_resumed_by_one_process(
    tmp_path: Path, model: Path, two: ShardedCoordinator
) -> None:
    run_settings = {"groups": 1, "samples": 8, "steps": 2, "lease_seconds": 60, "wait_seconds": 60}
    config = CONFIG.model_copy(update=run_settings)
    run = tmp_path / "run"
    async with bandit.opened(tmp_path, model) as (store, engine):
        state = await bandit.trainer(tmp_path, model, store, engine, config, learner=two).train()
        assert (state.step, await engine.weight_version()) == (2, "2")
        folder = checkpoint.latest(run)
        assert folder is not None
        saved = {name: tensor.clone() for name, tensor in load_model(folder).named_parameters()}
        assert largest_difference(saved, dict(load_model(model).named_parameters())) > 1e-4
        alone = config.model_copy(update={"processes": 1, "steps": 3})
        learner = single_process(model, alone)
        state = await bandit.trainer(tmp_path, model, store, engine, alone, learner=learner).train()
        assert (state.step, await store.feed.depth()) == (3, {"delivered": 3})
    syncs = [line for line in metrics.read_lines(run) if line["kind"] == "sync"]
    assert max(line["largest"] for line in syncs) < 1e-3  # after each sync the engine agrees with the trainer


def test_steps_equal_those_of_one_process_and_a_dead_process_is_reported(model: Path, two: ShardedCoordinator) -> None:
    step, one = batch(model, shift=-0.05), single_process(model, CONFIG)
    before = {name: tensor.clone() for name, tensor in one.weights().items()}
    two.restore(before, one.state())
    assert largest_difference(two.weights(), before) == 0.0
    for number in range(2):
        expected, stats = one.update(step, number), two.update(step, number)
        assert stats.grad_norm == pytest.approx(expected.grad_norm, rel=1e-4)
        assert stats.loss == pytest.approx(expected.loss, abs=1e-5)
        assert stats.kl_reference == pytest.approx(expected.kl_reference, abs=1e-5)
        assert stats.mismatch_max == pytest.approx(expected.mismatch_max, abs=1e-5)
        assert stats.mismatch_mean == pytest.approx(expected.mismatch_mean, abs=1e-5)
        assert (stats.tokens, stats.flat_tokens) == (expected.tokens, expected.flat_tokens)
        assert stats.microbatches > 1
    # Adam divides by the size of the gradient, so weights differ by far less than a step of 1e-4 moves them.
    moved = largest_difference(one.weights(), before)
    assert moved > 2e-4
    assert largest_difference(two.weights(), one.weights()) < moved / 50
    ids = [*PROMPT, *ANSWERS[0]]
    assert two.logprobs(ids) == pytest.approx(one.logprobs(ids), abs=1e-4)
    weights, state = two.weights(), two.state()
    assert_same_state(one.state(), state)

    # Resumed by one process and by two: the next step is the same.
    resumed = single_process(model, CONFIG)
    resumed.restore(weights, state)
    two.update(step, 2)
    two.restore(weights, state)
    assert largest_difference(two.weights(), weights) == 0.0
    assert_same_state(state, two.state())
    assert two.update(step, 2).grad_norm == pytest.approx(resumed.update(step, 2).grad_norm, rel=1e-4)
    assert largest_difference(two.weights(), resumed.weights()) < moved / 50
    with pytest.raises(TrainingError, match="another model"):
        two.restore({}, state)

    (process,) = multiprocessing.active_children()
    process.kill()
    process.join()
    with pytest.raises(TrainingError, match="ended during 'update'"):
        two.update(step, 3)


@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        ({"lora": {"rank": 2}}, "LoRA"),
        ({"loss": "bapo"}, "bapo"),
        ({"num_minibatches": 2}, "num_minibatches"),
        ({"device": "cuda:1"}, "each process gets its own GPU"),
    ],
)
def test_rejects_settings_that_several_processes_do_not_support(setting: dict[str, object], reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        make_config({"processes": 2, **setting})
