"""Routes for trainers: lease finished groups from the feed, acknowledge or return them, and report training runs."""

from __future__ import annotations

import asyncio
import time
from typing import Annotated

from fastapi import Path, Request

from polar_proxy import api_models as m
from polar_proxy.api.context import ApiContext, ApiStore, Context, make_routers, not_found
from polar_proxy.records import convert, convert_all, list_training_runs
from polar_proxy.store import Store
from polar_proxy.store.repositories.training import TrainingRunRow
from polar_proxy.training import metrics

_POLL_SECONDS = 0.25
RunId = Annotated[str, Path(description="The id of a training run, chosen by its trainer.")]
LeaseId = Annotated[str, Path(description="The id of a lease.")]

routers = make_routers()
trainer = routers.trainer


@trainer.post("/feed/lease", tags=["feed"])
async def lease(context: Context, store: ApiStore, body: m.LeaseRequest, request: Request) -> m.LeaseResponse:
    """Lease finished groups, oldest first. No other consumer gets them until the leases expire.

    Groups that are too stale are dropped instead. If no group is ready, the server waits up to `wait` seconds for one
    before it responds.
    """
    deadline = time.monotonic() + body.wait
    dropped: list[str] = []
    while True:
        # Try to lease before waiting: that also validates the request and drops stale groups.
        batch = await store.feed.lease(
            body.consumer,
            body.limit,
            body.seconds,
            policy_version=body.policy_version,
            max_staleness=body.max_staleness,
        )
        dropped += batch.dropped
        if batch.leases or not await _wait_for_group(context, request, deadline):
            return m.LeaseResponse(leases=convert_all(m.Lease, batch.leases), dropped=dropped)


@trainer.post("/feed/leases/{lease_id}/ack", tags=["feed"])
async def acknowledge(store: ApiStore, lease_id: LeaseId) -> m.LeaseEndResponse:
    """Report that the group was trained on; it is never leased again. 409 `lease_lost` if the lease has expired or was
    returned."""
    await store.feed.acknowledge(lease_id)
    return m.LeaseEndResponse(lease_id=lease_id, outcome="acknowledged")


@trainer.post("/feed/leases/{lease_id}/return", tags=["feed"])
async def give_back(store: ApiStore, lease_id: LeaseId) -> m.LeaseEndResponse:
    """Return the group unused, so that it can be leased again. 409 `lease_lost` if the lease has expired or was
    acknowledged."""
    await store.feed.release(lease_id)
    return m.LeaseEndResponse(lease_id=lease_id, outcome="returned")


@trainer.post("/feed/leases/{lease_id}/extend", tags=["feed"])
async def extend(store: ApiStore, lease_id: LeaseId, body: m.ExtendRequest) -> m.LeaseExtendResponse:
    """Renew a lease: it expires later. 409 `lease_lost` if the lease has ended."""
    return m.LeaseExtendResponse(lease_id=lease_id, expires_at=await store.feed.extend(lease_id, body.seconds))


@trainer.get("/feed", tags=["feed"])
async def feed_state(store: ApiStore) -> m.FeedState:
    """Return the number of groups in each state, and why groups were dropped."""
    return m.FeedState(depth=await store.feed.depth(), dropped_reasons=await store.feed.drop_reasons())


@trainer.put("/training/{run_id}", tags=["training"])
async def put_run(store: ApiStore, run_id: RunId, body: m.TrainingRunRequest) -> m.TrainingRun:
    """Register a run with all lines of its metrics log so far, or replace the lines of a known run."""
    await store.training.put_run(run_id, body.name, body.config, [line.model_dump() for line in body.lines])
    return convert(m.TrainingRun, await _require_run(store, run_id))


@trainer.post("/training/{run_id}/lines", tags=["training"])
async def add_lines(store: ApiStore, run_id: RunId, body: m.TrainingLinesRequest) -> m.TrainingRun:
    """Append lines to a run. 409 `conflict` if the server does not have all earlier lines."""
    await _require_run(store, run_id)
    await store.training.add_lines(run_id, body.first, [line.model_dump() for line in body.lines])
    return convert(m.TrainingRun, await _require_run(store, run_id))


@trainer.get("/training", tags=["training"])
async def list_runs(store: ApiStore) -> m.TrainingRunList:
    """List all runs, newest first."""
    return await list_training_runs(store)


@trainer.get("/training/{run_id}", tags=["training"])
async def get_run(store: ApiStore, run_id: RunId) -> m.TrainingRunDetail:
    """Return the settings of a run and its curves, each as a list of values."""
    row = await _require_run(store, run_id)
    return convert(m.TrainingRunDetail, row, series=metrics.series(await store.training.lines(run_id)))


async def _wait_for_group(context: ApiContext, request: Request, deadline: float) -> bool:
    """Wait until a group may be ready to lease, and return True. Return False if the deadline comes first, the server
    stops or the client disconnects.

    A group that is leased to a disconnected client would be blocked until the lease expires.
    """
    while (remaining := deadline - time.monotonic()) > 0 and not context.closing.is_set():
        if await request.is_disconnected():
            return False
        if await context.store.feed.any_waiting():
            return True
        await asyncio.sleep(min(_POLL_SECONDS, remaining))
    return False


async def _require_run(store: Store, run_id: str) -> TrainingRunRow:
    """Return the run. Raises ApiError 404 if it does not exist."""
    rows = await store.training.runs(run_id)
    if not rows:
        raise not_found("training run", run_id)
    return rows[0]
