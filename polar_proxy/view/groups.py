"""A group: its rollouts with their rewards and advantages."""

from __future__ import annotations

import math

from fastapi import APIRouter, Request, Response

from polar_proxy.api.context import require
from polar_proxy.records import rollouts_of_group
from polar_proxy.training.advantages import grpo
from polar_proxy.view.context import ViewContext


def add_routes(pages: APIRouter, view: ViewContext) -> None:
    store = view.store

    @pages.get("/view/groups/{group_id}")
    async def group_page(request: Request, group_id: str) -> Response:
        group = await require("group", group_id, store.groups.get(group_id))
        rows = await rollouts_of_group(store, group_id)
        counted = [row for row in rows if row.final and not row.incomplete]
        values = grpo([row.reward for row in counted]).tolist()
        advantages = {
            row.rollout_id: None if math.isnan(value) else value for row, value in zip(counted, values, strict=True)
        }
        task = await store.tasks.get(group.task_id)
        return await view.page(request, "group.html", group=group, task=task, rows=rows, advantages=advantages)
