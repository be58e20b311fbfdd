"""The queue of `polar_proxy.store` in a dictionary: what the scheduler calls, with the same answers, and no database.

For fleets where the real one would take longer than everything else. `tests/rollouts/test_fleet.py` holds both to the
same figures.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from polar_proxy.store import FINAL_STATUSES
from polar_proxy.store.jobs import GroupRow, NewGroup
from polar_proxy.store.stages import Claim, ClaimLostError
from polar_proxy.types import Json


@dataclass(slots=True)
class _Rollout:
    rollout_id: str
    group_id: str
    group_index: int
    seed: int | None
    config: Json
    status: str = "queued"
    reward: float | None = None
    incomplete: bool = False
    claimed_by: str | None = None
    cancelled: bool = False
    completion_tokens: int = 0

    @property
    def final(self) -> bool:
        return self.status in FINAL_STATUSES


@dataclass(slots=True)
class _Group:
    group_id: str
    task_id: str
    wanted: int
    config: Json
    rollouts: list[_Rollout] = field(default_factory=list)
    status: str = "open"
    reason: str | None = None


class ThinQueue:
    """One job."""

    def __init__(self) -> None:
        self._groups: dict[str, _Group] = {}
        self._rollouts: dict[str, _Rollout] = {}
        self._queue: deque[_Rollout] = deque()
        self._of_task: dict[str, list[_Group]] = {}

    async def put_task(self, task_id: str, *rest: Any) -> None:
        """Nothing is asked of tasks."""

    async def submit_job(self, spec: Json, groups: Sequence[NewGroup]) -> tuple[Any, bool]:
        for group in groups:
            made = _Group(f"group_{len(self._groups):08}", group.task_id, group.wanted, group.config)
            self._groups[made.group_id] = made
            self._of_task.setdefault(made.task_id, []).append(made)
            for index, rollout in enumerate(group.rollouts):
                name = f"roll_{len(self._rollouts):08}"
                one = _Rollout(name, made.group_id, index, rollout.seed, rollout.config)
                self._rollouts[one.rollout_id] = one
                made.rollouts.append(one)
                self._queue.append(one)
        return SimpleNamespace(job_id="job"), True

    async def groups(self, job_id: str) -> list[_Group]:
        return list(self._groups.values())

    async def claim(
        self, worker: str, limit: int, seconds: float, *, policy_version: str | None = None, job_id: str | None = None
    ) -> list[Claim]:
        held: list[Claim] = []
        while self._queue and len(held) < limit:
            one = self._queue.popleft()
            if one.status != "queued":
                continue  # cancelled meanwhile
            one.claimed_by = worker
            place = (one.rollout_id, one.group_id, "job", "task", one.group_index)
            held.append(Claim(*place, 1, "h", "process", one.seed, one.config, worker))
        return held

    async def hold(self, worker: str, rollout_ids: Collection[str], seconds: float) -> tuple[set[str], set[str]]:
        return {name for name in rollout_ids if self._rollouts[name].cancelled}, set()

    async def lost(self, *, attempts: int, job_id: str | None = None) -> dict[str, int]:
        return {}

    async def unsettled_groups(self) -> list[str]:
        return []

    async def enter_stage(self, held: Claim, stage: str, **given: Any) -> None:
        self._held(held).status = stage

    async def add_reward(self, rollout_id: str, value: float | None, source: str, detail: Json) -> None:
        self._rollouts[rollout_id].reward = value

    async def end_rollout(self, held: Claim, status: str, **given: Any) -> None:
        self._held(held).status = status

    def _held(self, held: Claim) -> _Rollout:
        one = self._rollouts[held.rollout_id]
        if one.final or one.claimed_by != held.claimed_by:
            raise ClaimLostError(held.rollout_id)
        return one

    async def rollout(self, rollout_id: str) -> _Rollout:
        return self._rollouts[rollout_id]

    async def group_of(self, rollout_id: str) -> str:
        return self._rollouts[rollout_id].group_id

    async def release(self, rollout_id: str, *, cause: str) -> int:
        self._rollouts[rollout_id].status = "queued"
        return 2

    async def rollouts(self, *, group_id: str) -> list[_Rollout]:
        return self._groups[group_id].rollouts

    async def sessions_of(self, rollout_id: str, *, closed: bool = False) -> list[str]:
        return []

    async def group(self, group_id: str) -> GroupRow:
        group = self._groups[group_id]
        size, state = len(group.rollouts), (group.status, group.reason, None)
        return GroupRow(group_id, "job", "task", size, group.wanted, group.config, *state, 0.0, None)

    async def cancel_group(self, group_id: str, *, reason: str) -> list[str]:
        group = self._groups[group_id]
        group.reason = reason
        in_flight = []
        for one in group.rollouts:
            if one.final:
                continue
            if one.claimed_by is None:
                one.status = "cancelled"
            else:
                one.cancelled = True
                in_flight.append(one.rollout_id)
        return in_flight

    async def keep_surplus(self, group_id: str, *, reason: str) -> dict[str, str]:
        group = self._groups[group_id]
        if group.status != "open":
            return {}
        group.reason = reason
        gone: dict[str, str] = {}
        shelf: _Group | None = None
        for one in list(group.rollouts):
            if one.final:
                continue
            if one.claimed_by is None:
                one.status = "cancelled"
                continue
            place = next((place for place in self._places(group) if place.config == one.config), None)
            if place is None:
                shelf = shelf or _Group(f"shelf_{len(self._groups):08}", "", 0, {})
                self._groups[shelf.group_id] = shelf
                group.rollouts.remove(one)
                shelf.rollouts.append(one)
                one.group_id = shelf.group_id
            else:
                other = self._groups[place.group_id]
                group.rollouts[group.rollouts.index(one)] = place
                other.rollouts[other.rollouts.index(place)] = one
                one.group_id, place.group_id = place.group_id, one.group_id
                place.status = "cancelled"
            gone[one.rollout_id] = one.group_id
        return gone

    def _places(self, group: _Group) -> Iterator[_Rollout]:
        """Those that have not begun, of other groups of the same task."""
        for other in self._of_task[group.task_id]:
            if other is not group and other.status == "open":
                yield from (one for one in other.rollouts if one.status == "queued" and one.claimed_by is None)

    async def settle_group(self, group_id: str) -> tuple[GroupRow, bool] | None:
        group = self._groups[group_id]
        if group.status != "open":
            return await self.group(group_id), False
        if not all(one.final for one in group.rollouts):
            return None
        group.status = "finished"
        return await self.group(group_id), True

    async def stands(self) -> Counter[str]:
        return Counter(one.status for one in self._rollouts.values())
