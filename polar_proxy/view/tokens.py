"""The token view: every token of a trace or of a call, with its log-probability and its origin."""

from __future__ import annotations

from typing import Annotated, Any

import orjson
from fastapi import APIRouter, Query, Request, Response

from polar_proxy.view.context import ViewContext

Start = Annotated[int, Query(ge=0, description="Position of the first token.")]


def add_routes(pages: APIRouter, view: ViewContext) -> None:
    sources = view.tokens

    @pages.get("/view/traces/{trace_id}")
    async def trace_page(request: Request, trace_id: str) -> Response:
        sequence = await sources.of_trace(view.store, trace_id)
        return await view.page(request, "tokens.html", sequence=sequence)

    @pages.get("/view/traces/{trace_id}/head")
    async def trace_head(trace_id: str) -> Response:
        return _json((await sources.of_trace(view.store, trace_id)).head())

    @pages.get("/view/traces/{trace_id}/tokens")
    async def trace_tokens(trace_id: str, start: Start = 0) -> Response:
        return _json(await sources.chunk(view.api, await sources.of_trace(view.store, trace_id), start))

    @pages.get("/view/calls/{call_id}/sequence")
    async def call_page(request: Request, call_id: str) -> Response:
        sequence = await sources.of_call(view.store, call_id)
        return await view.page(request, "tokens.html", sequence=sequence)

    @pages.get("/view/calls/{call_id}/sequence/head")
    async def call_head(call_id: str) -> Response:
        return _json((await sources.of_call(view.store, call_id)).head())

    @pages.get("/view/calls/{call_id}/sequence/tokens")
    async def call_tokens(call_id: str, start: Start = 0) -> Response:
        return _json(await sources.chunk(view.api, await sources.of_call(view.store, call_id), start))


def _json(value: Any) -> Response:
    return Response(orjson.dumps(value), media_type="application/json")
