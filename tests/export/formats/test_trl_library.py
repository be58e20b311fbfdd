"""TRL itself trains on groups that Polar recorded. Marked `full`: it needs `pip install trl==1.16.0`.

pip install trl==1.16.0 && pytest -m full tests/export/formats/test_trl_library.py
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from polar_proxy.engines.factory import POLAR_TINY
from polar_proxy.export.formats import read_training_row, trl, with_advantages
from polar_proxy.training.batch import BatchPlan, TrainingBatch, TrainingSequence
from polar_proxy.training.config import GrpoConfig
from polar_proxy.training.policy.model import Learner, load_model
from polar_proxy.types import Json
from tests.export.formats.bandit_rows import recorded_groups
from tests.export.formats.row_factory import group, row

library = pytest.importorskip("trl", reason="needs TRL: pip install trl==1.16.0")
pytestmark = pytest.mark.full
GENERATIONS = 4


@pytest.fixture(scope="module")
def groups(tmp_path_factory: pytest.TempPathFactory) -> list[list[Json]]:
    return asyncio.run(recorded_groups(tmp_path_factory.mktemp("recorded"), POLAR_TINY, samples=GENERATIONS))


def grpo_trainer(folder: Path, groups: list[list[Json]], **settings: Any) -> Any:
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer

    config = library.GRPOConfig(
        output_dir=str(folder),
        per_device_train_batch_size=GENERATIONS,
        num_generations=GENERATIONS,
        max_steps=1,
        learning_rate=1e-3,
        weight_decay=0.0,
        max_grad_norm=1e9,
        loss_type="bnpo",  # a mean over the tokens of the batch: Polar's loss_aggregation = "token"
        beta=0.0,
        use_cpu=True,
        bf16=False,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        **settings,
    )
    return trl.recorded_ratios(library.GRPOTrainer)(
        model=AutoModelForCausalLM.from_pretrained(POLAR_TINY, dtype=torch.float32),
        args=config,
        train_dataset=Dataset.from_list([{"prompt": "recorded"}] * 4),
        reward_funcs=trl.recorded_reward,
        processing_class=AutoTokenizer.from_pretrained(POLAR_TINY),
        rollout_func=trl.RecordedRollouts(groups),
    )


def gradients_at_the_step(trainer: Any) -> dict[str, torch.Tensor]:
    """Train, and return the gradients that the optimiser gets."""
    from transformers import TrainerCallback

    kept: dict[str, torch.Tensor] = {}

    class Keep(TrainerCallback):  # type: ignore[misc]
        def on_pre_optimizer_step(self, *_: Any, model: Any, **__: Any) -> None:
            kept.update({name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None})

    trainer.add_callback(Keep())
    trainer.train()
    return kept


def polars_gradients(rows: list[Json], advantages: list[float]) -> dict[str, torch.Tensor]:
    sequences = []
    for number, (one, advantage) in enumerate(zip(map(read_training_row, rows), advantages, strict=True)):
        off = [False] * len(one.prompt_ids)
        trained = np.array(off + [bool(bit) for bit in one.loss_mask])
        recorded = np.array([np.nan] * len(off) + list(one.logprobs))
        ids = np.array(one.token_ids, dtype=np.int64)
        recorded = np.where(trained, recorded, np.nan)
        sequences.append(
            TrainingSequence(
                trace_id=one.trace_id,
                group_id="g",
                rollout=number,
                token_ids=ids,
                trained=trained,
                old_logprobs=recorded,
                advantage=advantage,
                observed=~trained,
                temperatures=np.full(len(ids), one.temperature),
                versions=np.full(len(ids), None, dtype=object),
                group_size=len(rows),
            )
        )
    settings: Json = {"loss": "ppo_clip", "loss_aggregation": "token"}
    learner = Learner(load_model(POLAR_TINY), GrpoConfig(**settings, learning_rate=1e-3, max_grad_norm=1e9))
    kept: dict[str, torch.Tensor] = {}
    learner.optimiser.register_step_pre_hook(
        lambda *_: kept.update({n: p.grad.clone() for n, p in learner.model.named_parameters() if p.grad is not None})
    )
    batch = TrainingBatch(tuple(sequences), ("g",), (), BatchPlan(()))
    learner.update(batch, 0)
    return kept


def with_context_token(row: Json) -> Json:
    """Return a row with one answer of four tokens in which the second token counts as context."""
    *context, answer = row["spans"]
    assert (answer["start"], answer["end"]) == (0, 4)
    parts = (("sampled", 0, 1), ("context", 1, 2), ("sampled", 2, 4))
    return row | {
        "loss_mask": [1, 0, 1, 1],
        "logprobs": [row["logprobs"][0], None, *row["logprobs"][2:]],
        "spans": [*context, *({**answer, "kind": kind, "start": start, "end": end} for kind, start, end in parts)],
    }


@pytest.mark.parametrize("turns", [1, 2])
def test_one_step_of_trl_equals_polars_step(tmp_path: Path, groups: list[list[Json]], turns: int) -> None:
    """The gradients that TRL's optimiser gets from a recorded group are those of Polar's own step on it.

    With two turns: a token between the sampled ones is context.
    """
    if turns == 2:
        groups = [[with_context_token(one) for one in rows] for rows in groups]
    trainer = grpo_trainer(tmp_path, groups)
    before = {name: one.detach().clone() for name, one in trainer.model.named_parameters()}
    theirs = gradients_at_the_step(trainer)
    assert any(not torch.equal(before[name], one) for name, one in trainer.model.named_parameters())
    rewards = np.array([one["reward"] for one in groups[0]])
    # TRL: (r - mean) / (std + 1e-4), the deviation unbiased.
    advantages = ((rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-4)).tolist()
    ours = polars_gradients(groups[0], advantages)
    assert ours.keys() <= theirs.keys()
    largest = max(float(one.abs().max()) for one in ours.values())
    assert largest > 1e-4
    for name, one in ours.items():
        torch.testing.assert_close(theirs[name], one, rtol=1e-3, atol=1e-4 * largest)
    logged = trainer.state.log_history[0]
    assert logged["rewards/recorded_reward/mean"] == pytest.approx(float(rewards.mean()))


def test_ratios_are_to_the_recorded_logprobs(tmp_path: Path, groups: list[list[Json]]) -> None:
    """The recorded log-probabilities are lowered by 1, so that each ratio is e, and is clipped for the good
    rollouts."""
    shifted = [
        one | {"logprobs": [value if value is None else value - 1.0 for value in one["logprobs"]]} for one in groups[0]
    ]
    trainer = grpo_trainer(tmp_path, [shifted])
    trainer.train()
    assert trainer.state.log_history[0]["clip_ratio/high_mean"] > 0.2
    plain = grpo_trainer(tmp_path, groups)
    plain.train()
    assert plain.state.log_history[0]["clip_ratio/high_mean"] == 0.0


def test_masked_and_unscored_rollouts(tmp_path: Path, groups: list[list[Json]]) -> None:
    """A masked rollout gives no gradient and stays in the baseline; an unscored one is in neither."""
    rows = [one | {"masked": number == 0} for number, one in enumerate(groups[0])]
    theirs = gradients_at_the_step(grpo_trainer(tmp_path, [rows]))
    rewards = np.array([one["reward"] for one in rows])
    advantages = ((rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-4)).tolist()
    ours = polars_gradients(rows[1:], advantages[1:])
    largest = max(float(one.abs().max()) for one in ours.values())
    for name, one in ours.items():
        torch.testing.assert_close(theirs[name], one, rtol=1e-3, atol=1e-4 * largest)


def test_samples_through_the_async_trainers_own_queue_batcher_and_packing() -> None:
    """Everything of AsyncGRPOTrainer except its attention kernel, which needs a GPU."""
    module = pytest.importorskip("trl.experimental.async_grpo.async_grpo_trainer")
    rows = [row(0, 0), row(0, 0, 1), row(0, 1), row(0, 2, masked=True), row(0, 3)]
    worker = trl.RecordedWorker([group(1, size=2), rows])
    worker.start()
    dataset = module.RolloutQueueDataset(
        worker.rollout_buffer, lambda: 4, worker.check_health, 10.0, module.defaultdict(list), poll_interval_s=0.2
    )
    (packed,) = next(iter(module.FixedCountBatcher(dataset, 1, 6)))
    tensors = packed.pack()
    read = {
        one.trace_id: one
        for one in map(read_training_row, with_advantages([*group(1, size=2), *rows]))
        if not one.masked
    }
    assert worker.left_out == {"masked": 1}
    assert sorted(tensors["old_log_probs"].tolist()) == pytest.approx(
        sorted(value for one in read.values() for value, bit in zip(one.logprobs, one.loss_mask, strict=True) if bit)
    )
    wanted = sum(sum(one.loss_mask) * (one.advantage or 0.0) for one in read.values())
    assert float(tensors["advantages"].sum()) == pytest.approx(wanted, abs=1e-5)
    # Each loss term predicts the token that was sampled at its position.
    labels = tensors["shift_labels"][tensors["token_index"]].tolist()
    sampled = [ids for one in read.values() for ids, bit in zip(one.response_ids, one.loss_mask, strict=True) if bit]
    assert sorted(labels) == sorted(sampled)
    with pytest.raises(Exception, match="no recorded groups left"):
        next(iter(dataset))
    worker.stop()


def test_exported_rows_are_an_sft_dataset(tmp_path: Path) -> None:
    """SFTTrainer reads `input_ids` and `labels`: -100 where nothing was sampled."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from polar_proxy.export.formats import RecordConverter

    records = RecordConverter("trl")
    rows = [one for number in range(2) for one in records([row(0, number, advantage=1.0)])]
    trainer = library.SFTTrainer(
        model=AutoModelForCausalLM.from_pretrained(POLAR_TINY, dtype=torch.float32),
        args=library.SFTConfig(output_dir=str(tmp_path), use_cpu=True, report_to=[], bf16=False),
        train_dataset=Dataset.from_list([{k: r[k] for k in ("input_ids", "labels")} for r in rows]),
        processing_class=AutoTokenizer.from_pretrained(POLAR_TINY),
    )
    batch = next(iter(trainer.get_train_dataloader()))
    for ids, labels in zip(batch["input_ids"].tolist(), batch["labels"].tolist(), strict=True):
        assert [-100] * 3 + ids[3:5] + [-100] * 2 + ids[7:10] == labels[:10]
