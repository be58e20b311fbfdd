"""With `refill` a step is made of groups that teach something; those that do not are asked for anew, and given up."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from polar_proxy.training import metrics
from tests.training import bandit
from tests.training.bandit import CONFIG, opened, trainer

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("refill", [False, True])
async def test_groups_that_are_all_alike(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch, refill: bool
) -> None:
    """Two groups without spread, then others."""
    rewards = itertools.chain([1.0] * 4, [0.0] * 4, itertools.cycle([0.0, 1.0]))
    monkeypatch.setattr(bandit, "reward_of", lambda tokens: next(rewards))
    config = CONFIG.model_copy(update={"samples": 4, "groups": 1, "steps": 2, "refill": refill})
    async with opened(tmp_path, model) as (store, engine):
        state = await trainer(tmp_path, model, store, engine, config).train()
        assert await store.feed.depth() == {"delivered": 4 if refill else 2}
    steps = [line for line in metrics.read_lines(tmp_path / "run") if line["kind"] == "step"]
    assert [len(step["groups"]) for step in steps] == ([3, 1] if refill else [1, 1])
    assert [step["updated"] for step in steps] == ([True, True] if refill else [False, False])
    assert steps[0]["left_out"]["no_spread"]["rollouts"] == (8 if refill else 4)
    assert state.updates == (2 if refill else 0)


async def test_a_task_that_is_solved_is_given_up(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bandit, "reward_of", lambda tokens: 1.0)
    config = CONFIG.model_copy(update={"samples": 2, "groups": 2, "steps": 1, "refill": True})
    async with opened(tmp_path, model) as (store, engine):
        assert (await trainer(tmp_path, model, store, engine, config).train()).step == 1
    (step,) = [line for line in metrics.read_lines(tmp_path / "run") if line["kind"] == "step"]
    assert (len(step["groups"]), step["updated"]) == (8, False)
