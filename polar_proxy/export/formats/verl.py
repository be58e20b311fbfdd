"""verl: the outputs of an agent loop, the dataset that asks for them, and an agent loop that hands recorded groups out.

verl's trainer repeats a prompt `rollout.n` times and calls the agent loop with `session_id` 0 .. n - 1; the loop may
return several outputs, one a trace, and the baseline counts the last of each session. So row k of the dataset is one
group, and session i is its i-th rollout. Records: verl 0.9.1 `experimental/agent_loop/agent_loop.py` (AgentLoopOutput),
`trainer/ppo/v1/agent_loop_tq.py`, `utils/dataset/rl_dataset.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from polar_proxy.errors import UsageError
from polar_proxy.export.formats.training_rows import (
    TrainingRow,
    UnsupportedRowError,
    group_by_rollout,
    read_jsonl,
    read_row,
    require_reward,
)
from polar_proxy.types import Json

AGENT_NAME = "polar_recorded"


def agent_loop_output(row: TrainingRow) -> Json:
    """The fields of an `AgentLoopOutput`. `response_mask` is 1 where a token is trained: zeros for a masked rollout.

    `num_turns` counts sampled runs and what stands between, the prompt included. Raises BridgeError without a reward.
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
            "reward_extra_info": {},
            "turn_scores": [],
            "tool_rewards": [],
        },
    }


def dataset(rows: Iterable[Json]) -> list[Json]:
    """One row a group, in `RLHFDataset`'s columns, for a `.jsonl` file or parquet; `rollout.n` must be its rollouts.

    The prompt is only a name: the recorded tokens have their own. Raises BridgeError where groups differ in size.
    """
    sizes: dict[str, set[str]] = {}
    tasks: dict[str, str] = {}
    for row in map(read_row, rows):
        if row.group_id is None or row.rollout_id is None:
            raise UnsupportedRowError(
                "no_group", f"the row {row.trace_id} belongs to no group: it was not rolled out by Polar"
            )
        sizes.setdefault(row.group_id, set()).add(row.rollout_id)
        tasks[row.group_id] = row.task_id or row.group_id
    if len({len(members) for members in sizes.values()}) > 1:
        told = ", ".join(f"{group}: {len(members)}" for group, members in sizes.items())
        raise UnsupportedRowError(
            "group_size", f"verl repeats every prompt alike, and these groups differ in rollouts: {told}"
        )
    return [
        {
            "data_source": "polar",
            "prompt": [{"role": "user", "content": tasks[group]}],
            "ability": "agent",
            "reward_model": {"style": "rule", "ground_truth": ""},
            "extra_info": {"index": index, "split": "train", "group_id": group, "rollouts": len(members)},
            "agent_name": AGENT_NAME,
        }
        for index, (group, members) in enumerate(sizes.items())
    ]


class RecordedGroups:
    """Rows by group: what session i of a dataset row is answered with."""

    def __init__(self, rows: Iterable[Json]) -> None:
        found: dict[str, list[TrainingRow]] = {}
        for row in map(read_row, rows):
            found.setdefault(str(row.group_id), []).append(row)
        self._groups = {group: list(group_by_rollout(members).values()) for group, members in found.items()}

    @classmethod
    def from_file(cls, path: str) -> RecordedGroups:
        """Of tokens-jsonl."""
        return cls(read_jsonl(path))

    def session(self, extra_info: Mapping[str, Any], session_id: int) -> list[Json]:
        """The outputs of one rollout, in order. Raises UsageError for an unknown group or session."""
        members = self._groups.get(str(extra_info.get("group_id")))
        if members is None:
            raise UsageError(f"The recorded rows have no group {extra_info.get('group_id')!r}.")
        if not 0 <= session_id < len(members):
            raise UsageError(f"Group {extra_info['group_id']} has {len(members)} rollouts: set rollout.n to that.")
        return [agent_loop_output(row) for row in members[session_id]]


def outputs(records: Sequence[Json]) -> list[Any]:
    """Records as verl's own `AgentLoopOutput`s (needs `pip install verl`)."""
    from verl.experimental.agent_loop.agent_loop import AgentLoopOutput

    return [AgentLoopOutput(**record) for record in records]
