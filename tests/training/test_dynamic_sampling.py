"""With `dynamic_sampling`, groups of further rounds replace those without a signal, up to a limit."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from polar_proxy.training import metrics
from tests.training import bandit
from tests.training.bandit import CONFIG, opened, trainer

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]


@pytest.mark.parametrize("dynamic", [False, True])
async def test_groups_without_signal_are_replaced(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch, dynamic: bool
) -> None:
    """Two groups of equal rewards, then others."""
    rewards = itertools.chain([1.0] * 4, [0.0] * 4, itertools.cycle([0.0, 1.0]))
    monkeypatch.setattr(bandit, "reward_of", lambda tokens: next(rewards))
    config = CONFIG.model_copy(update={"samples": 4, "groups": 1, "steps": 2, "dynamic_sampling": dynamic})
    async with opened(tmp_path, model) as (store, engine):
        state = await trainer(tmp_path, model, store, engine, config).train()
        assert await store.feed.depth() == {"delivered": 4 if dynamic else 2}
    steps = [line for line in metrics.read_lines(tmp_path / "run") if line["kind"] == "step"]
    assert [len(step["groups"]) for step in steps] == ([3, 1] if dynamic else [1, 1])
    assert [step["updated"] for step in steps] == ([True, True] if dynamic else [False, False])
    assert steps[0]["skipped"]["no_spread"]["rollouts"] == (8 if dynamic else 4)
    assert state.updates == (2 if dynamic else 0)


async def test_step_ends_when_no_group_gets_a_signal(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bandit, "reward_of", lambda tokens: 1.0)
    config = CONFIG.model_copy(update={"samples": 2, "groups": 2, "steps": 1, "dynamic_sampling": True})
    async with opened(tmp_path, model) as (store, engine):
        assert (await trainer(tmp_path, model, store, engine, config).train()).step == 1
    (step,) = [line for line in metrics.read_lines(tmp_path / "run") if line["kind"] == "step"]
    assert (len(step["groups"]), step["updated"]) == (8, False)
