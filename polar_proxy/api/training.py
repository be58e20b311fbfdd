"""Routes of training runs: their trainers tell of them here, and whoever draws curves reads them."""

from __future__ import annotations

from dataclasses import asdict

from polar_proxy.api.context import Api, Rooms, not_found
from polar_proxy.client import models as m
from polar_proxy.client.errors import ApiError
from polar_proxy.store.training import TrainingRun
from polar_proxy.training import curves


def add(rooms: Rooms, api: Api) -> None:
    trainer, store = rooms.trainer, api.store

    async def known(run_id: str) -> TrainingRun:
        for run in await store.training_runs(run_id):
            return run
        raise not_found("training run", run_id)

    async def told(run_id: str) -> m.TrainingRun:
        return m.TrainingRun.model_validate(asdict(await known(run_id)))

    @trainer.put("/training/{run_id}", tags=["training"])
    async def put(run_id: str, body: m.TrainingRunRequest) -> m.TrainingRun:
        """Make a run known, or take it up: these are all its lines, and what else is known of it is forgotten."""
        await store.put_training_run(run_id, body.name, body.config, [line.model_dump() for line in body.lines])
        return await told(run_id)

    @trainer.post("/training/{run_id}/lines", tags=["training"])
    async def more(run_id: str, body: m.TrainingLinesRequest) -> m.TrainingRun:
        """Add lines; what is known already stays as it is. 409 `conflict` where lines before these are missing."""
        run = await known(run_id)
        if run.lines < body.first:
            message = f"The training run {run_id} has {run.lines} lines here: line {body.first} cannot follow."
            raise ApiError(message, status=409, code="conflict", detail={"lines": run.lines})
        await store.add_training_lines(run_id, body.first, [line.model_dump() for line in body.lines])
        return await told(run_id)

    @trainer.get("/training", tags=["training"])
    async def listed() -> m.TrainingRunList:
        """All runs, newest first."""
        runs = await store.training_runs()
        return m.TrainingRunList(runs=[m.TrainingRun.model_validate(asdict(run)) for run in runs])

    @trainer.get("/training/{run_id}", tags=["training"])
    async def one(run_id: str) -> m.TrainingDetail:
        """A run's settings, and its curves as lists."""
        run = await known(run_id)
        series = curves.series(await store.training_lines(run_id))
        return m.TrainingDetail(**asdict(run), series=series)
