"""Routes of training runs: their trainers tell of them here, and whoever draws curves reads them."""

from __future__ import annotations

from polar_proxy.api import answers
from polar_proxy.api.context import Api, Rooms
from polar_proxy.client import models as m


def add(rooms: Rooms, api: Api) -> None:
    trainer, store = rooms.trainer, api.store

    @trainer.put("/training/{run_id}", tags=["training"])
    async def put(run_id: str, body: m.TrainingRunRequest) -> m.TrainingRun:
        """Make a run known, or take it up: these are all its lines, and what else is known of it is forgotten."""
        await store.put_training_run(run_id, body.name, body.config, [line.model_dump() for line in body.lines])
        return answers.training_run(await answers.known_run(store, run_id))

    @trainer.post("/training/{run_id}/lines", tags=["training"])
    async def more(run_id: str, body: m.TrainingLinesRequest) -> m.TrainingRun:
        """Add lines; what is known already stays as it is. 409 `conflict` where lines before these are missing."""
        await answers.known_run(store, run_id)
        await store.add_training_lines(run_id, body.first, [line.model_dump() for line in body.lines])
        return answers.training_run(await answers.known_run(store, run_id))

    @trainer.get("/training", tags=["training"])
    async def listed() -> m.TrainingRunList:
        """All runs, newest first."""
        return m.TrainingRunList(runs=[answers.training_run(run) for run in await store.training_runs()])

    @trainer.get("/training/{run_id}", tags=["training"])
    async def one(run_id: str) -> m.TrainingDetail:
        """A run's settings, and its curves as lists."""
        return await answers.training_detail(store, run_id)
