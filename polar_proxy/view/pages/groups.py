"""The page of a group: its rollouts with rewards and advantages, their conversations side by side, and the tokens that
a trainer uses."""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass
from typing import Annotated

from cachetools import LRUCache
from fastapi import APIRouter, Query, Request, Response
from pydantic import ValidationError

from polar_proxy.api.context import require
from polar_proxy.records import rollouts_of_group
from polar_proxy.store import RolloutRow, Store
from polar_proxy.store.repositories.traces import TraceSummary
from polar_proxy.store.service.feed import LeaseRow
from polar_proxy.traces.operations import STORED_BUILDER
from polar_proxy.training.batch import BatchPlan, plan_batch
from polar_proxy.training.config import GrpoConfig
from polar_proxy.training.feed import read_traces
from polar_proxy.types import Json
from polar_proxy.view.context import ViewContext
from polar_proxy.view.pages.comparison import MOST
from polar_proxy.view.token_source import group_advantages

_BESIDE = 4
"""Number of rollouts that are shown side by side until the reader chooses others."""
_BUILT_KEPT = 1000
BuiltTraces = MutableMapping[tuple[str, str], Sequence[TraceSummary]]
"""Cache of the traces of ended rollouts, by (session id, builder). These traces no longer change."""
Beside = Annotated[list[str], Query(alias="run", description="Ids of the rollouts that are shown side by side.")]


@dataclass(frozen=True, slots=True)
class GroupTraining:
    """The batch that a trainer makes of a group. `config`: the settings of the run that leased the group last, or the
    default settings."""

    plan: BatchPlan
    config: GrpoConfig
    is_default: bool
    """True if `config` is the default, because no trainer of Polar has leased the group."""
    run_id: str | None
    """The training run that leased the group last; None if no run has leased it."""
    step: int | None
    """The step of the run `run_id` that trained the group; None if no step has trained it yet."""


def add_routes(pages: APIRouter, view: ViewContext) -> None:
    store = view.store
    built: BuiltTraces = LRUCache(_BUILT_KEPT)

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
            advantages=group_advantages(rows),
            beside=beside[:MOST] or _extremes(rows),
            most=MOST,
        )

    @pages.get("/view/parts/groups/{group_id}/training")
    async def training_part(request: Request, group_id: str) -> Response:
        """Return the page's part about training. The browser loads this part separately, because it can be slow: if the
        run's builder is not `STORED_BUILDER`, the first view of a group builds the traces from all calls."""
        await require("group", group_id, store.groups.get(group_id))
        leases = await store.feed.leases_of(group_id)
        training = await _read_training(store, group_id, leases, built)
        return await view.page(request, "parts/group_training.html", training=training, leases=leases)


def _extremes(rows: Sequence[RolloutRow]) -> list[str]:
    """Return the ids of the rollouts with the highest and the lowest rewards, to be shown side by side at first."""
    answered = [row.rollout_id for row in sorted(rows, key=lambda row: -(row.reward or 0.0)) if row.calls]
    half = _BESIDE // 2
    return answered if len(answered) <= _BESIDE else answered[:half] + answered[-half:]


async def _read_training(store: Store, group_id: str, leases: Sequence[LeaseRow], built: BuiltTraces) -> GroupTraining:
    leased_config, run_id, step = None, None, None
    # A trainer leases under the name of its run.
    runs = [run for run in await store.training.runs() if leases and run.name == leases[-1].consumer]
    if runs:
        leased_config, run_id = _read_config(runs[0].config), runs[0].run_id
        step = await store.training.step_of_group(run_id, group_id)
    config = leased_config or GrpoConfig()
    rows = await rollouts_of_group(store, group_id)
    traces: dict[str, Sequence[TraceSummary]] = {**await store.traces.of_group(group_id, builder=config.builder)}
    for row in rows:
        if config.builder != STORED_BUILDER and row.final and row.rollout_id not in traces:
            key = (row.session_id or "", config.builder)
            if key not in built:
                built[key] = [TraceSummary.of(trace) for trace in await read_traces(store, row, config.builder)]
            traces[row.rollout_id] = built[key]
    plan = plan_batch([[(row, traces.get(row.rollout_id, ())) for row in rows]], config, step or 0)
    return GroupTraining(plan, config, leased_config is None, run_id, step)


def _read_config(values: Json) -> GrpoConfig | None:
    """Return the settings of a run; None if they are not settings of Polar's trainer."""
    try:
        return GrpoConfig.model_validate(values)
    except ValidationError:
        return None
