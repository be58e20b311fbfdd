"""Preference data for DPO and reward models: pairs of conversations about one task with unequal rewards.

A row has TRL's conversational form: `prompt` (the messages that both begin with), `chosen` and `rejected`. Each group
gives one pair: the conversation with the highest reward and the one with the lowest. If a rollout has several
conversations, the longest one counts. `chosen` and `rejected` contain tool results, which a trainer must mask.
"""

from __future__ import annotations

import os
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from polar_proxy.store import json_codec
from polar_proxy.types import Json

_IN_MEMORY = 16 << 20
"""Size in bytes above which the rows are kept on disk instead of in memory."""


@dataclass(frozen=True, slots=True)
class _StoredRow:
    """Offset and size in bytes of a row in the temporary file, and its reward."""

    reward: float
    at: int
    size: int


@dataclass(slots=True)
class _GroupExtremes:
    best: _StoredRow
    worst: _StoredRow


class PreferencePairs:
    """Collects rows of chat-jsonl, one rollout after another, and keeps the best and the worst of each group.

    The rows are kept in a temporary file, because the rows of all groups may not fit in memory. All methods block. Call
    `close` at the end.
    """

    def __init__(self) -> None:
        self._groups: dict[str, _GroupExtremes] = {}
        self._file = tempfile.SpooledTemporaryFile(_IN_MEMORY)  # noqa: SIM115 (closed by `close`)
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
        group = self._groups.get(group_id)
        if group is None:
            stored = self._store(longest)
            self._groups[group_id] = _GroupExtremes(stored, stored)
        elif reward > group.best.reward:
            group.best = self._store(longest)
        elif reward < group.worst.reward:
            group.worst = self._store(longest)
        return []

    def _store(self, row: Json) -> _StoredRow:
        data = json_codec.dumps_object(row)
        at = self._file.seek(0, os.SEEK_END)
        self._file.write(data)
        return _StoredRow(row["reward"], at, len(data))

    def _read(self, stored: _StoredRow) -> Json:
        self._file.seek(stored.at)
        row: Json = json_codec.loads(self._file.read(stored.size))
        return row

    def close(self) -> None:
        self._file.close()

    def pairs(self) -> Iterator[Json]:
        """Yield a row for each group whose rewards differ. Count the groups with equal rewards in `left_out`."""
        for group_id, group in self._groups.items():
            if group.best.reward == group.worst.reward:
                self.left_out["no_spread"] += 1
                continue
            yield _pair(group_id, self._read(group.best), self._read(group.worst))


def _pair(group_id: str, best: Json, worst: Json) -> Json:
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
