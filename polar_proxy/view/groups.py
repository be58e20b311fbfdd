"""A group: its rollouts with rewards and advantages, their conversations side by side, and what is trained of them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

from fastapi import APIRouter, Query, Request, Response

from polar_proxy.api.context import require
from polar_proxy.records import rollouts_of_group
from polar_proxy.store import RolloutRow, Store
from polar_proxy.store.service.feed import LeaseRow
from polar_proxy.training.advantages import grpo
from polar_proxy.training.batch import TrainingBatch, make_batch
from polar_proxy.training.config import GrpoConfig
from polar_proxy.training.feed import StoreGroupReader
from polar_proxy.view.comparison import MOST
from polar_proxy.view.context import ViewContext

_BESIDE = 4
"""Number of rollouts that are shown side by side at first."""
Beside = Annotated[list[str], Query(alias="run", description="Ids of the rollouts that are shown side by side.")]


@dataclass(frozen=True, slots=True)
class GroupTraining:
    """The part of a group that a trainer uses. `config`: the settings of the run that leased it, else the defaults."""

    batch: TrainingBatch
    config: GrpoConfig
    trained: Mapping[str, int]
    """Rollout id -> its trained tokens."""
    run_id: str | None
    step: int | None
    """The training run that leased the group last, and the step that trained it; None if there is none yet."""


def add_routes(pages: APIRouter, view: ViewContext) -> None:
    store = view.store

    @pages.get("/view/groups/{group_id}")
    async def group_page(request: Request, group_id: str, beside: Beside = []) -> Response:  # noqa: B006
        group = await require("group", group_id, store.groups.get(group_id))
        rows = await rollouts_of_group(store, group_id)
        task = await store.tasks.get(group.task_id)
        return await view.page(
            request,
            "group.html",
            group=group,
            task=task,
            rows=rows,
            advantages=advantages(rows),
            beside=beside[:MOST] or _extremes(rows),
            most=MOST,
        )

    @pages.get("/view/parts/groups/{group_id}/training")
    async def training_part(request: Request, group_id: str) -> Response:
        """Return the part that shows the trained tokens. The page loads it later, because it reads all tokens of the
        group."""
        await require("group", group_id, store.groups.get(group_id))
        leases = await store.feed.leases_of(group_id)
        training = await _read_training(store, group_id, leases)
        return await view.page(request, "parts/group_training.html", training=training, leases=leases)


def advantages(rows: Iterable[RolloutRow]) -> dict[str, float | None]:
    """Return rollout id -> GRPO advantage within the group; None without one. Unfinished rollouts do not count."""
    counted = [row for row in rows if row.final and not row.incomplete]
    values = grpo([row.reward for row in counted]).tolist()
    return {row.rollout_id: None if math.isnan(value) else value for row, value in zip(counted, values, strict=True)}


def _extremes(rows: Sequence[RolloutRow]) -> list[str]:
    """Return the rollouts that are side by side at first: those with the highest and with the lowest rewards."""
    answered = [row.rollout_id for row in sorted(rows, key=lambda row: -(row.reward or 0.0)) if row.calls]
    half = _BESIDE // 2
    return answered if len(answered) <= _BESIDE else answered[:half] + answered[-half:]


async def _read_training(store: Store, group_id: str, leases: Sequence[LeaseRow]) -> GroupTraining:
    config, run_id, step = GrpoConfig(), None, None
    if leases:
        # A trainer leases under the name of its run.
        runs = [run for run in await store.training.runs() if run.name == leases[-1].consumer]
        if runs:
            config, run_id = GrpoConfig.model_validate(runs[0].config), runs[0].run_id
            lines = await store.training.lines(run_id)
            step = next((line["step"] for line in lines if group_id in line.get("groups", ())), None)
    group = await StoreGroupReader(store).read_group(group_id, config.builder, None)
    batch = make_batch([group], config, step or 0)
    trained = {member.rollout.rollout_id: 0 for member in group.members}
    for sequence in batch.sequences:
        trained[group.members[sequence.rollout].rollout.rollout_id] += int(sequence.trained.sum())
    return GroupTraining(batch, config, trained, run_id, step)
