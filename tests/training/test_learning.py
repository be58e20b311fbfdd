"""The whole loop learns: real engine, store, feed, batch, step and sync, with the smallest environment there is."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
from torch import Tensor

from polar_proxy.errors import TrainingError
from polar_proxy.training import metrics
from polar_proxy.training.weight_sync import LocalSync
from tests.training.bandit import CONFIG, Bandit, opened, trainer

pytestmark = pytest.mark.usefixtures("one_thread")

LEARN = CONFIG.model_copy(update={"groups": 2, "steps": 10, "learning_rate": 2e-3})


async def rewards(folder: Path, model: Path, *, shuffled: bool) -> tuple[list[float], list[metrics.Json]]:
    """Mean reward of each step, and the lines of the run."""
    async with opened(folder, model) as (store, engine):
        config = LEARN.model_copy(update={"shuffle_rewards": shuffled})
        state = await trainer(folder, model, store, engine, config).train()
        assert (state.step, await engine.weight_version()) == (LEARN.steps, str(LEARN.steps))
        assert await store.feed.depth() == {"delivered": LEARN.groups * LEARN.steps}
    lines = list(metrics.read_lines(folder / "run"))
    return [line["reward"] for line in lines if line["kind"] == "step"], lines


async def test_rewards_rise_and_the_recorded_logprobs_are_the_trainers(tmp_path: Path, model: Path) -> None:
    found, lines = await rewards(tmp_path, model, shuffled=False)
    assert sum(found[:2]) / 2 < 0.65
    assert sum(found[-2:]) / 2 > 0.85
    steps = [line for line in lines if line["kind"] == "step"]
    # Sampled by the engine, scored by the trainer, with the same weights: every step on policy to rounding.
    # (A step whose groups are all of one reward teaches nothing and has none.)
    assert max(line["mismatch_max"] for line in steps if line["updated"]) < 1e-3
    assert max(line["largest"] for line in lines if line["kind"] == "sync") < 1e-3
    assert [line["staleness"] for line in steps] == [0] * LEARN.steps


async def test_shuffled_rewards_teach_nothing(tmp_path: Path, model: Path) -> None:
    found, _ = await rewards(tmp_path, model, shuffled=True)
    assert sum(found[-2:]) / 2 < 0.7


async def test_rollouts_that_run_ahead_are_stale_by_no_more_than_the_bound(tmp_path: Path, model: Path) -> None:
    config = CONFIG.model_copy(update={"max_async_steps": 1, "loss": "decoupled", "samples": 4})
    async with opened(tmp_path, model) as (store, engine):
        await trainer(tmp_path, model, store, engine, config).train()
    steps = [line for line in metrics.read_lines(tmp_path / "run") if line["kind"] == "step"]
    assert [line["staleness"] for line in steps] == [0, 1, 1]
    # What was sampled a step ago is off policy by what that step taught.
    assert steps[0]["mismatch_max"] < 1e-3 < steps[1]["mismatch_max"]


async def test_groups_of_an_unknown_version_are_not_trained_ahead(tmp_path: Path, model: Path) -> None:
    config = CONFIG.model_copy(update={"max_async_steps": 1, "samples": 2})
    async with opened(tmp_path, model) as (store, engine):
        blind = Bandit(store, engine, "blind", config.groups, config.samples, tells_versions=False)
        with pytest.raises(TrainingError, match="unknown policy version"):
            await trainer(tmp_path, model, store, engine, config, rollouts=blind).train()
        assert (await store.feed.depth()).keys() == {"dropped"}


async def test_an_engine_that_others_update_too_stops_the_run(tmp_path: Path, model: Path) -> None:
    class Meddled(LocalSync):
        async def push(self, weights: Mapping[str, Tensor], version: str) -> None:
            await super().push(weights, version if version == "0" else "another run's 7")

    async with opened(tmp_path, model) as (store, engine):
        with pytest.raises(TrainingError, match=r"to version 1 the engine reports version another run's 7"):
            await trainer(tmp_path, model, store, engine, CONFIG, weight_sync=Meddled(engine)).train()
