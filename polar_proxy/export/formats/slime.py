"""slime and Miles: `Sample`, read by their own `Sample.from_dict`, and a reward post-process that counts rollouts once.

Several traces of one rollout are several samples with one `rollout_id`: both take a rollout's loss as one mean. Their
built-in normalisation of rewards averages over samples, so give
`--custom-reward-post-process-path polar_proxy.export.formats.slime.reward_post_process`. A file for
`--load-debug-rollout-data` is `debug_data(samples)` written by `torch.save`. Record: slime `utils/types.py`,
`rollout/batch_builder.py`; Miles has the same.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from polar_proxy.export.formats.training_rows import IdNumbers, TrainingRow, UnsupportedRowError, require_reward
from polar_proxy.types import Json


class Samples:
    """Numbers groups, rollouts and samples from 0 on, as slime wants them; one object per data set."""

    def __init__(self) -> None:
        self._groups, self._rollouts, self._count = IdNumbers(), IdNumbers(), 0

    def sample(self, row: TrainingRow) -> Json:
        """The fields of a `Sample`. The loss mask begins behind the prompt; a masked rollout is a `remove_sample`.

        Raises BridgeError for a rollout without a reward or a group.
        """
        reward = require_reward(row)
        if row.group_id is None or row.rollout_id is None:
            raise UnsupportedRowError(
                "no_group", f"the row {row.trace_id} belongs to no group: it was not rolled out by Polar"
            )
        made: Json = {
            "group_index": self._groups[row.group_id],
            "index": self._count,
            "rollout_id": self._rollouts[row.rollout_id],
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
                "rollout_id": row.rollout_id,
                "group_id": row.group_id,
                "task_id": row.task_id,
            },
            "session_id": row.session_id,
        }
        self._count += 1
        return made


def debug_data(samples: Sequence[Json], rollout_id: int = 0) -> Json:
    """What slime loads instead of rolling out: `torch.save(debug_data(...), path)`."""
    return {"rollout_id": rollout_id, "samples": list(samples)}


def reward_post_process(args: Any, samples: Sequence[Any]) -> tuple[list[float], list[float]]:
    """(rewards, advantages) per sample, each rollout counted once in its group's mean and deviation.

    As slime's own for `grpo`: (r - mean) / (std + 1e-6), the deviation only where `grpo_std_normalization` is set.
    """
    rewards = [float(sample.get_reward_value(args)) for sample in samples]
    groups: dict[Any, dict[Any, float]] = {}
    for sample, reward in zip(samples, rewards, strict=True):
        groups.setdefault(sample.group_index, {})[sample.rollout_id] = reward
    made = []
    for sample, reward in zip(samples, rewards, strict=True):
        members = list(groups[sample.group_index].values())
        centred = reward - statistics.fmean(members)
        scaled = getattr(args, "grpo_std_normalization", True) and len(members) > 1
        made.append(centred / (statistics.stdev(members) + 1e-6) if scaled else centred)
    return rewards, made
