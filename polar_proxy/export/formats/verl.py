"""verl: convert rows to the outputs of an agent loop, make a dataset with one prompt for each group, and return the
recorded rollouts of a group to verl's trainer.

verl's trainer repeats a prompt `rollout.n` times and calls the agent loop with `session_id` 0 .. n - 1. So row k of the
dataset is one group, and session i is its i-th rollout. The loop may return several outputs, one for each trace. The
trainer's baseline counts only the last output of each session.

Source: verl 0.9.1, `experimental/agent_loop/agent_loop.py` (AgentLoopOutput), `trainer/ppo/v1/agent_loop_tq.py`,
`utils/dataset/rl_dataset.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from polar_proxy.errors import UsageError
from polar_proxy.export.formats.training_rows import (
    TrainingRow,
    group_by_rollout,
    read_training_row,
    require_group,
    require_reward,
)
from polar_proxy.traces.rows import RowError, read_jsonl
from polar_proxy.types import Json

AGENT_NAME = "polar_recorded"


def agent_loop_output(row: TrainingRow) -> Json:
    """Return the fields of an `AgentLoopOutput`.

    `response_mask` is 1 where a token is trained; for a masked rollout it is 0 everywhere. `num_turns` counts the
    prompt, each stretch of sampled tokens and each stretch of context. Raise RowError for a rollout without a reward.
    """
    return {
        "prompt_ids": list(row.prompt_ids),
        "response_ids": list(row.response_ids),
        "response_mask": row.trained_mask(),
        "response_logprobs": list(row.logprobs),
        "reward_score": require_reward(row),
        "num_turns": 1 + len(row.runs()),
        "metrics": {},
        "extra_fields": {
            "trace_id": row.trace_id,
            "rollout_id": row.rollout_id,
            "group_id": row.group_id,
            "temperature": row.temperature,
            "reward_extra_info": {},
            "turn_scores": [],
            "tool_rewards": [],
        },
    }


def dataset(rows: Iterable[Json]) -> list[Json]:
    """Return one row for each group, in the columns of `RLHFDataset`, for a `.jsonl` file or parquet.

    `rollout.n` must be the number of rollouts per group. The prompt is only the id of the task (or of the group, if no
    task is known), because the recorded tokens contain the real prompt. Raise RowError if groups differ in size.
    """
    members: dict[str, set[str]] = {}
    tasks: dict[str, str] = {}
    for row in map(read_training_row, rows):
        group_id, rollout_id = require_group(row)
        members.setdefault(group_id, set()).add(rollout_id)
        tasks[group_id] = row.task_id or group_id
    if len({len(rollouts) for rollouts in members.values()}) > 1:
        sizes = ", ".join(f"{group}: {len(rollouts)}" for group, rollouts in members.items())
        raise RowError(
            "group_size",
            f"verl repeats every prompt equally often, but these groups have different numbers of rollouts: {sizes}",
        )
    return [
        {
            "data_source": "polar",
            "prompt": [{"role": "user", "content": tasks[group]}],
            "ability": "agent",
            "reward_model": {"style": "rule", "ground_truth": ""},
            "extra_info": {"index": index, "split": "train", "group_id": group, "rollouts": len(rollouts)},
            "agent_name": AGENT_NAME,
        }
        for index, (group, rollouts) in enumerate(members.items())
    ]


class RecordedGroups:
    """Recorded rows by group. Session i of a dataset row gets the i-th rollout of its group."""

    def __init__(self, rows: Iterable[Json]) -> None:
        found: dict[str, list[TrainingRow]] = {}
        for row in map(read_training_row, rows):
            found.setdefault(str(row.group_id), []).append(row)
        self._groups = {group: list(group_by_rollout(rows).values()) for group, rows in found.items()}

    @classmethod
    def from_file(cls, path: str) -> RecordedGroups:
        return cls(read_jsonl(path))

    def session(self, extra_info: Mapping[str, Any], session_id: int) -> list[Json]:
        """Return the outputs of one rollout, in order. Raise UsageError for an unknown group or session."""
        rollouts = self._groups.get(str(extra_info.get("group_id")))
        if rollouts is None:
            raise UsageError(f"The recorded rows have no group {extra_info.get('group_id')!r}.")
        if not 0 <= session_id < len(rollouts):
            raise UsageError(
                f"Group {extra_info['group_id']} has {len(rollouts)} rollouts: set rollout.n to this number."
            )
        return [agent_loop_output(row) for row in rollouts[session_id]]


def outputs(records: Sequence[Json]) -> list[Any]:
    """Return records as verl's own `AgentLoopOutput`s (needs `pip install verl`)."""
    from verl.experimental.agent_loop.agent_loop import AgentLoopOutput

    return [AgentLoopOutput(**record) for record in records]
