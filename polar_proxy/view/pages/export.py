"""Download of the rollouts that a list shows, as rows in a format of `polar export`."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request, Response

from polar_proxy.api.records import stream_export
from polar_proxy.view.context import ViewContext
from polar_proxy.view.pages.lists import Where


def add_routes(pages: APIRouter, view: ViewContext) -> None:
    @pages.get("/view/export")
    async def download(
        request: Request,
        where: Where = "",
        form: Annotated[str, Query(alias="format", description="A format of `polar export`.")] = "tokens-jsonl",
    ) -> Response:
        response = await stream_export(view.api, form, where=where or None)
        response.headers["content-disposition"] = 'attachment; filename="polar-export.jsonl"'
        return response
