"""The whole training loop learns, with a real engine, store, feed and weight sync, in the smallest environment."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
from torch import Tensor

from polar_proxy.errors import TrainingError
from polar_proxy.training import metrics
from polar_proxy.training.weight_sync import LocalSync
from tests.training.bandit import CONFIG, Bandit, opened, trainer

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]

LEARN = CONFIG.model_copy(update={"groups": 2, "steps": 10, "learning_rate": 2e-3})


async def train_run(folder: Path, model: Path, *, shuffled: bool) -> tuple[list[float], list[metrics.Json]]:
    """Train a run; return the mean reward of each step, and the lines of its metrics."""
    async with opened(folder, model) as (store, engine):
        config = LEARN.model_copy(update={"shuffle_rewards": shuffled})
        state = await trainer(folder, model, store, engine, config).train()
        assert (state.step, await engine.weight_version()) == (LEARN.steps, str(LEARN.steps))
        assert await store.feed.depth() == {"delivered": LEARN.groups * LEARN.steps}
    lines = list(metrics.read_lines(folder / "run"))
    return [line["reward"] for line in lines if line["kind"] == "step"], lines


async def test_rewards_rise_and_recorded_logprobs_match_the_trainers(tmp_path: Path, model: Path) -> None:
    found, lines = await train_run(tmp_path, model, shuffled=False)
    assert sum(found[:2]) / 2 < 0.65
    assert sum(found[-2:]) / 2 > 0.85
    steps = [line for line in lines if line["kind"] == "step"]
    # The engine samples and the trainer scores with the same weights: every step is on policy up to rounding.
    # (A step whose groups have equal rewards makes no update and has no mismatch.)
    assert max(line["mismatch_max"] for line in steps if line["updated"]) < 1e-3
    assert max(line["largest"] for line in lines if line["kind"] == "sync") < 1e-3
    assert [line["staleness"] for line in steps] == [0] * LEARN.steps
    (start,) = (line for line in lines if line["kind"] == "start")
    assert (start["engine_precision"], start["trainer_precision"]) == ("float32", "float32")


async def test_shuffled_rewards_do_not_improve_the_policy(tmp_path: Path, model: Path) -> None:
    found, _ = await train_run(tmp_path, model, shuffled=True)
    assert sum(found[-2:]) / 2 < 0.7


async def test_async_rollouts_are_stale_by_at_most_the_bound(tmp_path: Path, model: Path) -> None:
    config = CONFIG.model_copy(update={"max_async_steps": 1, "loss": "decoupled", "samples": 4})
    async with opened(tmp_path, model) as (store, engine):
        await trainer(tmp_path, model, store, engine, config).train()
    steps = [line for line in metrics.read_lines(tmp_path / "run") if line["kind"] == "step"]
    assert [line["staleness"] for line in steps] == [0, 1, 1]
    # Samples of the step before are off policy by the update of that step. The proximal policy is the one that sampled.
    assert steps[0]["ratio_max"] < 1.001 < steps[1]["ratio_max"]
    assert steps[1]["mismatch_max"] < 1e-3


async def test_a_trainer_in_another_precision_than_the_engine_is_reported(tmp_path: Path, model: Path) -> None:
    config = CONFIG.model_copy(update={"dtype": "bfloat16", "steps": 0})
    reports: list[str] = []
    async with opened(tmp_path, model) as (store, engine):
        with pytest.raises(TrainingError, match="probe"):
            await trainer(tmp_path, model, store, engine, config, report=reports.append).train()
    assert "the engine samples in float32 and the trainer computes in bfloat16: expect a mismatch" in reports
    (start,) = metrics.read_lines(tmp_path / "run")
    assert (start["engine_precision"], start["trainer_precision"]) == ("float32", "bfloat16")


async def test_async_training_drops_groups_of_unknown_policy_version(tmp_path: Path, model: Path) -> None:
    config = CONFIG.model_copy(update={"max_async_steps": 1, "samples": 2})
    async with opened(tmp_path, model) as (store, engine):
        source = Bandit(store, engine, "unknown", config.groups, config.samples, with_versions=False)
        with pytest.raises(TrainingError, match="unknown policy version"):
            await trainer(tmp_path, model, store, engine, config, rollouts=source).train()
        assert (await store.feed.depth()).keys() == {"dropped"}


async def test_engine_updated_by_another_program_stops_the_run(tmp_path: Path, model: Path) -> None:
    class OtherVersion(LocalSync):
        async def push(self, weights: Mapping[str, Tensor], version: str) -> None:
            await super().push(weights, version if version == "0" else "another run's 7")

    async with opened(tmp_path, model) as (store, engine):
        with pytest.raises(TrainingError, match=r"to version 1 the engine reports version another run's 7"):
            await trainer(tmp_path, model, store, engine, CONFIG, weight_sync=OtherVersion(engine)).train()
