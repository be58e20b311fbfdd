"""Routes of training runs: trainers report their metrics here, and dashboards read the curves."""

from __future__ import annotations

from typing import Annotated

from fastapi import Path

from polar_proxy import api_models as m
from polar_proxy.api import serializers
from polar_proxy.api.context import ApiContext, Routers

RunId = Annotated[str, Path(description="The id of a training run, chosen by its trainer.")]


def add_routes(routers: Routers, context: ApiContext) -> None:
    trainer, store = routers.trainer, context.store

    @trainer.put("/training/{run_id}", tags=["training"])
    async def put_run(run_id: RunId, body: m.TrainingRunRequest) -> m.TrainingRun:
        """Register a run with all its lines so far, or replace the lines of a known run."""
        await store.training.put_run(run_id, body.name, body.config, [line.model_dump() for line in body.lines])
        return serializers.training_run(await serializers.require_training_run(store, run_id))

    @trainer.post("/training/{run_id}/lines", tags=["training"])
    async def add_lines(run_id: RunId, body: m.TrainingLinesRequest) -> m.TrainingRun:
        """Append lines to a run. 409 `conflict` if lines before them are missing."""
        await serializers.require_training_run(store, run_id)
        await store.training.add_lines(run_id, body.first, [line.model_dump() for line in body.lines])
        return serializers.training_run(await serializers.require_training_run(store, run_id))

    @trainer.get("/training", tags=["training"])
    async def list_runs() -> m.TrainingRunList:
        """List all runs, newest first."""
        return m.TrainingRunList(runs=[serializers.training_run(run) for run in await store.training.runs()])

    @trainer.get("/training/{run_id}", tags=["training"])
    async def get_run(run_id: RunId) -> m.TrainingRunDetail:
        """Return the settings of a run, and its curves as lists."""
        return await serializers.training_run_detail(store, run_id)
