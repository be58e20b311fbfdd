"""Routes of training runs: their trainers tell of them here, and whoever draws curves reads them."""

from __future__ import annotations

from polar_proxy import api_models as m
from polar_proxy.api import serializers
from polar_proxy.api.context import ApiContext, Routers


def add(rooms: Routers, api: ApiContext) -> None:
    trainer, store = rooms.trainer, api.store

    @trainer.put("/training/{run_id}", tags=["training"])
    async def put(run_id: str, body: m.TrainingRunRequest) -> m.TrainingRun:
        """Make a run known, or take it up: these are all its lines, and what else is known of it is forgotten."""
        await store.training.put_run(run_id, body.name, body.config, [line.model_dump() for line in body.lines])
        return serializers.training_run(await serializers.require_training_run(store, run_id))

    @trainer.post("/training/{run_id}/lines", tags=["training"])
    async def more(run_id: str, body: m.TrainingLinesRequest) -> m.TrainingRun:
        """Add lines; what is known already stays as it is. 409 `conflict` where lines before these are missing."""
        await serializers.require_training_run(store, run_id)
        await store.training.add_lines(run_id, body.first, [line.model_dump() for line in body.lines])
        return serializers.training_run(await serializers.require_training_run(store, run_id))

    @trainer.get("/training", tags=["training"])
    async def listed() -> m.TrainingRunList:
        """All runs, newest first."""
        return m.TrainingRunList(runs=[serializers.training_run(run) for run in await store.training.runs()])

    @trainer.get("/training/{run_id}", tags=["training"])
    async def one(run_id: str) -> m.TrainingRunDetail:
        """A run's settings, and its curves as lists."""
        return await serializers.training_detail(store, run_id)
