"""An in-memory queue with the methods of `polar_proxy.store` that the worker calls, without a database.

For fleets in which the real queue would dominate the run time. `tests/rollouts/test_fleet.py` checks that both queues
give the same figures.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from polar_proxy.store import FINAL_STATUSES
from polar_proxy.store.repositories.rollouts import Claim, ClaimLostError
from polar_proxy.store.service.groups import GroupRow
from polar_proxy.store.service.jobs import NewGroup
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
    group_size: int
    config: Json
    rollouts: list[_Rollout] = field(default_factory=list)
    status: str = "open"
    reason: str | None = None


class MemoryQueue:
    """A queue of one job."""

    def __init__(self) -> None:
        self._group_rows: dict[str, _Group] = {}
        self._rollout_rows: dict[str, _Rollout] = {}
        self._queue: deque[_Rollout] = deque()
        self._of_task: dict[str, list[_Group]] = {}
        self.tasks = SimpleNamespace(put=self._put_task)
        self.jobs = SimpleNamespace(submit=self._submit_job)
        self.groups = SimpleNamespace(
            of_job=self._groups,
            unsettled=self._unsettled_groups,
            get=self._group,
            cancel=self._cancel_group,
            keep_overflow=self._carry_over,
            settle=self._settle_group,
        )
        self.queue = SimpleNamespace(
            claim=self._claim, heartbeat=self._heartbeat, reclaim_expired=self._reclaim_expired, release=self._release
        )
        self.rollouts = SimpleNamespace(
            enter_stage=self._enter_stage,
            end=self._end_rollout,
            get=self._rollout,
            group_id=self._group_of,
            find=self._rollouts,
        )
        self.rewards = SimpleNamespace(add=self._add_reward)
        self.sessions = SimpleNamespace(ids_of_rollout=self._sessions_of)

    async def _put_task(self, task_id: str, *rest: Any) -> None:
        """Do nothing: tasks are never read."""

    async def _submit_job(self, spec: Json, groups: Sequence[NewGroup]) -> tuple[Any, bool]:
        for group in groups:
            made = _Group(f"group_{len(self._group_rows):08}", group.task_id, group.group_size, group.config)
            self._group_rows[made.group_id] = made
            self._of_task.setdefault(made.task_id, []).append(made)
            for index, rollout in enumerate(group.rollouts):
                name = f"roll_{len(self._rollout_rows):08}"
                one = _Rollout(name, made.group_id, index, rollout.seed, rollout.config)
                self._rollout_rows[one.rollout_id] = one
                made.rollouts.append(one)
                self._queue.append(one)
        return SimpleNamespace(job_id="job"), True

    async def _groups(self, job_id: str) -> list[_Group]:
        return list(self._group_rows.values())

    async def _claim(
        self, worker: str, limit: int, seconds: float, *, policy_version: str | None = None, job_id: str | None = None
    ) -> list[Claim]:
        claims: list[Claim] = []
        while self._queue and len(claims) < limit:
            one = self._queue.popleft()
            if one.status != "queued":
                continue  # it was cancelled
            one.claimed_by = worker
            ids = (one.rollout_id, one.group_id, "job", "task", one.group_index)
            claims.append(Claim(*ids, 1, "h", "process", one.seed, one.config, worker))
        return claims

    async def _heartbeat(self, worker: str, rollout_ids: Collection[str], seconds: float) -> tuple[set[str], set[str]]:
        return {name for name in rollout_ids if self._rollout_rows[name].cancelled}, set()

    async def _reclaim_expired(self, *, attempts: int, job_id: str | None = None) -> dict[str, int]:
        return {}

    async def _unsettled_groups(self) -> list[str]:
        return []

    async def _enter_stage(self, claim: Claim, stage: str, **given: Any) -> None:
        self._claimed(claim).status = stage

    async def _add_reward(self, rollout_id: str, value: float | None, source: str, detail: Json) -> None:
        self._rollout_rows[rollout_id].reward = value

    async def _end_rollout(self, claim: Claim, status: str, **given: Any) -> None:
        self._claimed(claim).status = status

    def _claimed(self, claim: Claim) -> _Rollout:
        one = self._rollout_rows[claim.rollout_id]
        if one.final or one.claimed_by != claim.claimed_by:
            raise ClaimLostError(claim.rollout_id)
        return one

    async def _rollout(self, rollout_id: str) -> _Rollout:
        return self._rollout_rows[rollout_id]

    async def _group_of(self, rollout_id: str) -> str:
        return self._rollout_rows[rollout_id].group_id

    async def _release(self, rollout_id: str, *, cause: str) -> int:
        self._rollout_rows[rollout_id].status = "queued"
        return 2

    async def _rollouts(self, *, group_id: str) -> list[_Rollout]:
        return self._group_rows[group_id].rollouts

    async def _sessions_of(self, rollout_id: str, *, closed: bool = False) -> list[str]:
        return []

    async def _group(self, group_id: str) -> GroupRow:
        group = self._group_rows[group_id]
        size, state = len(group.rollouts), (group.status, group.reason, None)
        return GroupRow(group_id, "job", "task", size, group.group_size, group.config, *state, 0.0, None)

    async def _cancel_group(self, group_id: str, *, reason: str) -> list[str]:
        group = self._group_rows[group_id]
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

    async def _carry_over(self, group_id: str, *, reason: str) -> dict[str, str]:
        group = self._group_rows[group_id]
        if group.status != "open":
            return {}
        group.reason = reason
        moved: dict[str, str] = {}
        overflow: _Group | None = None
        for one in list(group.rollouts):
            if one.final:
                continue
            if one.claimed_by is None:
                one.status = "cancelled"
                continue
            unstarted = next(
                (unstarted for unstarted in self._unstarted(group) if unstarted.config == one.config), None
            )
            if unstarted is None:
                overflow = overflow or _Group(f"overflow_{len(self._group_rows):08}", "", 0, {})
                self._group_rows[overflow.group_id] = overflow
                group.rollouts.remove(one)
                overflow.rollouts.append(one)
                one.group_id = overflow.group_id
            else:
                other = self._group_rows[unstarted.group_id]
                group.rollouts[group.rollouts.index(one)] = unstarted
                other.rollouts[other.rollouts.index(unstarted)] = one
                one.group_id, unstarted.group_id = unstarted.group_id, one.group_id
                unstarted.status = "cancelled"
            moved[one.rollout_id] = one.group_id
        return moved

    def _unstarted(self, group: _Group) -> Iterator[_Rollout]:
        """Yield the rollouts of other open groups of the same task that have not started."""
        for other in self._of_task[group.task_id]:
            if other is not group and other.status == "open":
                yield from (one for one in other.rollouts if one.status == "queued" and one.claimed_by is None)

    async def _settle_group(self, group_id: str) -> tuple[GroupRow, bool] | None:
        group = self._group_rows[group_id]
        if group.status != "open":
            return await self._group(group_id), False
        if not all(one.final for one in group.rollouts):
            return None
        group.status = "finished"
        return await self._group(group_id), True
