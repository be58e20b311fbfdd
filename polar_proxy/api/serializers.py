"""Convert rows of the store into models of the API."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

from pydantic import BaseModel

from polar_proxy import api_models as m
from polar_proxy.api.context import require
from polar_proxy.store import RolloutRow, Store

M = TypeVar("M", bound=BaseModel)


def convert(model: type[M], row: object, **more: object) -> M:
    """Copy the fields that the row and the model share, and add `more`."""
    shared = {name: getattr(row, name) for name in model.model_fields if name not in more and hasattr(row, name)}
    return model.model_validate({**shared, **more})


def convert_all(model: type[M], rows: Iterable[object]) -> list[M]:
    return [convert(model, row) for row in rows]


async def job_detail(store: Store, job_id: str) -> m.JobDetail:
    """Return a job with its groups. Raises ApiError 404."""
    row = await require("job", job_id, store.jobs.get(job_id))
    return convert(m.JobDetail, row, group_list=convert_all(m.Group, await store.groups.of_job(job_id)))


async def group_detail(store: Store, group_id: str) -> m.GroupDetail:
    """Return a group with its rollouts. Raises ApiError 404."""
    row = await require("group", group_id, store.groups.get(group_id))
    return convert(m.GroupDetail, row, rollouts=convert_all(m.Rollout, await group_rollouts(store, group_id)))


async def group_rollouts(store: Store, group_id: str) -> list[RolloutRow]:
    return sorted(await store.rollouts.find(group_id=group_id), key=lambda row: row.group_index)
