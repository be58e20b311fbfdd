"""Convert rows of the store into models of the API."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TypeVar

from pydantic import BaseModel

from polar_proxy import api_models as m
from polar_proxy.api.context import not_found
from polar_proxy.store import RewardRow, RolloutRow, Store
from polar_proxy.store.service.feed import GroupLease
from polar_proxy.store.service.groups import GroupRow
from polar_proxy.store.service.jobs import JobRow
from polar_proxy.store.training import TrainingRunRow
from polar_proxy.training import metrics
from polar_proxy.types import Json

M = TypeVar("M", bound=BaseModel)


def _convert(model: type[M], row: object, **more: object) -> M:
    """Copy the fields that the row and the model share, and add `more`."""
    shared = {name: getattr(row, name) for name in model.model_fields if name not in more and hasattr(row, name)}
    return model.model_validate({**shared, **more})


def job(row: JobRow) -> m.Job:
    return _convert(m.Job, row)


def submitted_job(row: JobRow, new: bool, refused: Sequence[Json]) -> m.SubmittedJob:
    return _convert(m.SubmittedJob, row, new=new, refused=list(refused))


def group(row: GroupRow) -> m.Group:
    return _convert(m.Group, row)


def rollout(row: RolloutRow) -> m.Rollout:
    return _convert(m.Rollout, row, wall_seconds=_wall_seconds(row))


def reward(row: RewardRow) -> m.Reward:
    return _convert(m.Reward, row)


def lease(row: GroupLease) -> m.Lease:
    return m.Lease.model_validate(asdict(row))


def training_run(row: TrainingRunRow) -> m.TrainingRun:
    return _convert(m.TrainingRun, row)


async def training_run_detail(store: Store, run_id: str) -> m.TrainingRunDetail:
    """Raises ApiError 404."""
    row = await require_training_run(store, run_id)
    return _convert(m.TrainingRunDetail, row, series=metrics.series(await store.training.lines(run_id)))


async def require_training_run(store: Store, run_id: str) -> TrainingRunRow:
    """Raises ApiError 404."""
    rows = await store.training.runs(run_id)
    if not rows:
        raise not_found("training run", run_id)
    return rows[0]


async def job_detail(store: Store, job_id: str) -> m.JobDetail:
    """Raises ApiError 404."""
    row = await store.jobs.get(job_id)
    if row is None:
        raise not_found("job", job_id)
    return _convert(m.JobDetail, row, group_list=[group(one) for one in await store.groups.of_job(job_id)])


async def group_detail(store: Store, group_id: str) -> m.GroupDetail:
    """Raises ApiError 404."""
    row = await store.groups.get(group_id)
    if row is None:
        raise not_found("group", group_id)
    return _convert(m.GroupDetail, row, rollouts=[rollout(one) for one in await group_rollouts(store, group_id)])


async def group_rollouts(store: Store, group_id: str) -> list[RolloutRow]:
    return sorted(await store.rollouts.find(group_id=group_id), key=lambda row: row.group_index)


async def rollout_detail(store: Store, rollout_id: str) -> m.RolloutDetail:
    """Raises ApiError 404."""
    row = await store.rollouts.get(rollout_id)
    if row is None:
        raise not_found("rollout", rollout_id)
    stages = [_convert(m.Stage, stage) for stage in await store.rollouts.stages(rollout_id)]
    rewards = [reward(one) for one in await store.rewards.of_rollout(rollout_id)]
    return _convert(m.RolloutDetail, row, wall_seconds=_wall_seconds(row), stages=stages, rewards=rewards)


def _wall_seconds(row: RolloutRow) -> float | None:
    return None if row.started_at is None or row.ended_at is None else round(row.ended_at - row.started_at, 3)
