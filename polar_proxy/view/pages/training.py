"""Pages of training runs: the list, and the page of one run with its steps and curves. Curves of other runs can be
drawn over these."""

from __future__ import annotations

import asyncio
from typing import Annotated

from fastapi import APIRouter, Query, Request, Response

from polar_proxy.api.context import not_found
from polar_proxy.records import list_training_runs
from polar_proxy.view.context import ViewContext
from polar_proxy.view.curves import HEIGHT, WIDTH, draw_panels

MOST = 6
"""Maximum number of runs in one drawing."""
PAGE = 50
Others = Annotated[list[str], Query(alias="with", description="Ids of runs to draw over this one.")]
Before = Annotated[int | None, Query(description="Only steps before this one.")]


def add_routes(pages: APIRouter, view: ViewContext) -> None:
    store = view.store

    @pages.get("/view/training")
    async def training(request: Request) -> Response:
        return await view.page(request, "training.html", rows=(await list_training_runs(store)).runs)

    @pages.get("/view/training/{run_id}")
    async def run_page(request: Request, run_id: str, others: Others = [], before: Before = None) -> Response:  # noqa: B006
        runs = {run.run_id: run for run in await store.training.runs()}
        if run_id not in runs:
            raise not_found("training run", run_id)
        shown = [run_id, *(other for other in dict.fromkeys(others) if other in runs and other != run_id)][:MOST]
        lines = await asyncio.gather(*(store.training.lines(one) for one in shown))
        named = [(runs[one].name, found) for one, found in zip(shown, lines, strict=True)]
        steps = [line for line in lines[0] if line["kind"] == "step" and (before is None or line["step"] < before)]
        return await view.page(
            request,
            "training_run.html",
            run=runs[run_id],
            runs=list(runs.values()),
            shown=shown,
            panels=await asyncio.to_thread(draw_panels, named),
            size=(WIDTH, HEIGHT),
            steps=steps[-PAGE:][::-1],
            before=before,
            older=steps[-PAGE]["step"] if len(steps) > PAGE else None,
        )
