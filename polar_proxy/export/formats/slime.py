"""slime and Miles: rows converted for their own `Sample.from_dict`, and a reward function for their trainer.

Several traces of one rollout are several samples with one `rollout_id`: both trainers average the loss over a rollout.
But their own normalisation of rewards averages over samples, so that a rollout with several samples counts several
times. To prevent this, give `--custom-reward-post-process-path polar_proxy.export.formats.slime.reward_post_process`.

A file for `--load-debug-rollout-data` is `debug_data(samples)` written by `torch.save`. Source of the fields: slime's
`utils/types.py` and `rollout/batch_builder.py`; Miles has the same fields.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from polar_proxy.export.formats.training_rows import (
    IdNumbers,
    TrainingRow,
    require_group,
    require_reward,
    require_same_temperature,
)
from polar_proxy.training.advantages import dr_grpo, grpo
from polar_proxy.types import Json


def sample(row: TrainingRow, numbers: IdNumbers) -> Json:
    """Return the fields of a `Sample`. The loss mask begins after the prompt; a masked rollout has `remove_sample` set.

    Raise RowError for a rollout without a reward or a group.
    """
    reward = require_reward(row)
    group_id, rollout_id = require_group(row)
    return {
        "group_index": numbers.groups[group_id],
        "index": numbers.traces[row.trace_id],
        "rollout_id": numbers.rollouts[rollout_id],
        "prompt": "",
        "tokens": list(row.token_ids),
        "response": "",
        "response_length": len(row.response_ids),
        "label": None,
        "reward": reward,
        "loss_mask": list(row.loss_mask),
        "weight_versions": list(row.versions),
        "rollout_log_probs": list(row.logprobs),
        "remove_sample": row.masked,
        "status": "truncated" if row.status == "timed_out" else "completed",
        "metadata": {
            "trace_id": row.trace_id,
            "rollout_id": rollout_id,
            "group_id": group_id,
            "task_id": row.task_id,
            "temperature": row.temperature,
        },
        "session_id": row.session_id,
    }


def debug_data(samples: Sequence[Json], rollout_id: int = 0) -> Json:
    """Return the data that slime loads instead of running rollouts: `torch.save(debug_data(...), path)`."""
    return {"rollout_id": rollout_id, "samples": list(samples)}


def reward_post_process(args: Any, samples: Sequence[Any]) -> tuple[list[float], list[float]]:
    """Return the samples' rewards and advantages. Each rollout counts once in its group's mean and deviation.

    The formula is slime's own for `grpo`: (r - mean) / (std + 1e-6). For a group of one rollout, or if
    `grpo_std_normalization` is off, it is r - mean. Raise RowError if a sample has another temperature than
    `--rollout-temperature`, by which slime divides its logits.
    """
    for sample in samples:
        name = f"the sample {sample.metadata['trace_id']}"
        require_same_temperature(name, sample.metadata["temperature"], args.rollout_temperature)
    rewards = [float(sample.get_reward_value(args)) for sample in samples]
    groups: dict[int, dict[int, float]] = {}
    for sample, reward in zip(samples, rewards, strict=True):
        groups.setdefault(sample.group_index, {})[sample.rollout_id] = reward
    compute = grpo if getattr(args, "grpo_std_normalization", True) else dr_grpo
    advantages = {
        group: dict(zip(members, compute(list(members.values())).tolist(), strict=True))
        for group, members in groups.items()
    }
    return rewards, [advantages[sample.group_index][sample.rollout_id] for sample in samples]
