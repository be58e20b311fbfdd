"""Preference data: pairs of conversations about one task, of which one was rewarded more. For DPO and reward models.

A row has TRL's conversational form: `prompt` (the messages that both begin with), `chosen` and `rejected`. Each group
gives one pair: the conversation with the highest reward and the one with the lowest. If a rollout has several
conversations, the longest one counts. Results of tools are among `chosen` and `rejected`: a trainer must mask them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from polar_proxy.types import Json


@dataclass(slots=True)
class _GroupExtremes:
    best: Json
    worst: Json


class PreferencePairs:
    """Collects rows of chat-jsonl, one rollout after another, and keeps the best and the worst of each group."""

    def __init__(self) -> None:
        self._groups: dict[str, _GroupExtremes] = {}
        self.left_out: Counter[str] = Counter()

    def add(self, rows: Sequence[Json]) -> list[Json]:
        """Take the rows of one rollout. Returns no rows: pairs are complete only at the end."""
        if not rows:
            return []
        longest = max(rows, key=lambda row: len(row["messages"]))
        group_id, reward = longest.get("group_id"), longest["reward"]
        if group_id is None or reward is None or longest.get("masked"):
            reason = "no_group" if group_id is None else "no_reward" if reward is None else "masked"
            self.left_out[reason] += len(rows)
            return []
        group = self._groups.setdefault(group_id, _GroupExtremes(longest, longest))
        if reward > group.best["reward"]:
            group.best = longest
        if reward < group.worst["reward"]:
            group.worst = longest
        return []

    def pairs(self) -> Iterator[Json]:
        """Yield a row for each group whose rewards differ, and count the others."""
        for group_id, group in self._groups.items():
            if group.best["reward"] == group.worst["reward"]:
                self.left_out["no_spread"] += 1
                continue
            yield _pair(group_id, group)


def _pair(group_id: str, group: _GroupExtremes) -> Json:
    best, worst = group.best, group.worst
    shared = 0
    for one, other in zip(best["messages"], worst["messages"], strict=False):
        if one != other or one["role"] == "assistant":
            break
        shared += 1
    row: Json = {
        "schema": best["schema"],
        "group_id": group_id,
        "task_id": best.get("task_id"),
        "prompt": best["messages"][:shared],
        "chosen": best["messages"][shared:],
        "rejected": worst["messages"][shared:],
        "chosen_reward": best["reward"],
        "rejected_reward": worst["reward"],
        "chosen_rollout_id": best.get("rollout_id"),
        "rejected_rollout_id": worst.get("rollout_id"),
    }
    return row if best.get("tools") is None else {**row, "tools": best["tools"]}
