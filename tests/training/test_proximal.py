"""The proximal policy of tokens that older weights sampled: exact, from kept checkpoints, and the approximations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from polar_proxy.errors import TrainingError, UsageError
from polar_proxy.training.batch import TrainingBatch
from polar_proxy.training.config import LoraSettings, make_config
from polar_proxy.training.policy import checkpoint
from polar_proxy.training.policy.checkpoint import TrainerState
from polar_proxy.training.policy.model import Learner
from tests.training.test_model import batch, learner

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]

SHIFT = 0.05
"""Nats by which the recorded log-probabilities differ from those of the trainer's own weights."""
STALE: dict[str, Any] = {"loss": "decoupled", "max_async_steps": 2, "learning_rate": 1e-2}


def sampled_by(versions: list[str | None], model: Path) -> TrainingBatch:
    """Return a batch that the initial weights sampled, with a version for each of its four sequences."""
    step = batch(model, shift=SHIFT)
    named = [
        replace(one, versions=np.where(one.trained, version, None))
        for one, version in zip(step.sequences, versions, strict=True)
    ]
    return replace(step, sequences=tuple(named))


def saved(policy: Learner, step: int, run: Path, model: Path) -> None:
    checkpoint.save(run, TrainerState(step, step, str(step), ()), policy.weights(), policy.state(), model=model, keep=9)


@pytest.mark.parametrize("lora", [None, LoraSettings(rank=4)])
def test_sampler_is_recomputed_with_the_weights_that_sampled(model: Path, tmp_path: Path, lora: Any) -> None:
    """The mismatch of trainer and engine is then exactly that of the recording, however far the weights have moved."""
    policy = learner(model, **STALE, lora=lora)
    kept = partial(checkpoint.weights_after, tmp_path, initial=model, adapter=lora is not None)
    fresh = sampled_by(["0"] * 4, model)
    for step in range(2):
        stats = policy.update(fresh, step, kept)
        saved(policy, step + 1, tmp_path, model)
        assert stats.mismatch_mean == pytest.approx(SHIFT, abs=1e-4)
        assert stats.mismatch_max == pytest.approx(SHIFT, abs=1e-4)
    assert stats.proximal_seconds > 0
    start = learner(model, **STALE, lora=lora, proximal="start")
    stale = [start.update(fresh, step) for step in range(2)][1]
    assert abs(stale.mismatch_max - SHIFT) > 1e-2


def test_each_token_gets_the_weights_of_its_version(model: Path, tmp_path: Path) -> None:
    policy = learner(model, **STALE)
    asked = []

    def kept(step: int, policy_model: Any) -> Mapping[str, torch.Tensor]:
        asked.append(step)
        return checkpoint.weights_after(tmp_path, step, policy_model, initial=model, adapter=False)

    policy.update(sampled_by(["0"] * 4, model), 0, kept)
    saved(policy, 1, tmp_path, model)
    assert asked == []  # the current weights need no pass of their own
    policy.update(sampled_by(["1", "0", "1", "1"], model), 1, kept)
    saved(policy, 2, tmp_path, model)
    policy.update(sampled_by(["1", "0", "2", "1"], model), 2, kept)
    assert asked == [0, 0, 1]


@pytest.mark.parametrize("version", [None, "other", "7"])
def test_unknown_version_is_refused(model: Path, version: str | None) -> None:
    policy = learner(model, **STALE)
    with pytest.raises(TrainingError, match=r"not one of this run \(0 to 1\)"):
        policy.update(sampled_by([version] * 4, model), 1, lambda step, model: {})


def test_version_without_a_checkpoint_is_refused(model: Path, tmp_path: Path) -> None:
    kept = partial(checkpoint.weights_after, tmp_path, initial=model, adapter=False)
    with pytest.raises(TrainingError, match="no checkpoint of that step: raise keep_checkpoints"):
        learner(model, **STALE).update(sampled_by(["1"] * 4, model), 2, kept)


def test_recorded_and_interpolated(model: Path) -> None:
    recorded = learner(model, **STALE, proximal="recorded").update(sampled_by(["0"] * 4, model), 2)
    assert recorded.mismatch_max == 0.0
    # Two steps old: half of the recorded log-probability and half of the trainer's own, so half of the shift.
    interpolated = learner(model, **STALE, proximal="interpolated").update(sampled_by(["0"] * 4, model), 2)
    assert interpolated.mismatch_mean == pytest.approx(SHIFT / 2, abs=1e-4)
    fresh = learner(model, **STALE, proximal="interpolated").update(sampled_by(["2"] * 4, model), 2)
    assert fresh.mismatch_mean == pytest.approx(SHIFT, abs=1e-4)


def test_as_many_checkpoints_are_kept_as_the_proximal_policy_needs() -> None:
    assert make_config({"loss": "icepop"}).checkpoints_to_keep == 2
    assert make_config({"loss": "icepop", "max_async_steps": 4}).checkpoints_to_keep == 5
    assert make_config({"loss": "icepop", "max_async_steps": 4, "proximal": "recorded"}).checkpoints_to_keep == 2
    assert make_config({"loss": "dapo", "max_async_steps": 4}).checkpoints_to_keep == 2
    # Staleness up to 4 + 2 - 1 = 5 steps, a checkpoint every second step.
    every_second = {"loss": "tis", "max_async_steps": 4, "sync_every": 2, "checkpoint_every": 2}
    assert make_config(every_second).checkpoints_to_keep == 4
    with pytest.raises(UsageError, match="multiple of `checkpoint_every`"):
        make_config({"loss": "icepop", "max_async_steps": 4, "checkpoint_every": 2})
    with pytest.raises(UsageError, match="works only with a single process"):
        make_config({"loss": "icepop", "max_async_steps": 4, "processes": 2})
