"""The token view: every token of a trace or of a call, with its log-probability and its origin; on request, its
importance ratio and alternatives."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Annotated, Any

import orjson
from fastapi import APIRouter, Query, Request, Response

from polar_proxy.store import Store
from polar_proxy.view.context import ViewContext
from polar_proxy.view.token_source import TokenSequence

Position = Annotated[int, Query(alias="at", description="Position of the token.")]
Start = Annotated[int, Query(ge=0, description="Position of the first token.")]


def add_routes(pages: APIRouter, view: ViewContext) -> None:
    _add_sequence(pages, view, "/view/traces/{record_id}", view.tokens.of_trace)
    _add_sequence(pages, view, "/view/calls/{record_id}/sequence", view.tokens.of_call)


def _add_sequence(
    pages: APIRouter, view: ViewContext, path: str, read: Callable[[Store, str], Awaitable[TokenSequence]]
) -> None:
    @pages.get(path)
    async def page(request: Request, record_id: str) -> Response:
        view.tokens.forget(record_id)  # grade, reward and advantage may have changed
        sequence = await read(view.store, record_id)
        problem = view.engine_values.problem(sequence)
        return await view.page(request, "tokens.html", sequence=sequence, values_problem=problem)

    @pages.get(f"{path}/head")
    async def head(record_id: str) -> Response:
        return _json((await read(view.store, record_id)).head())

    @pages.get(f"{path}/tokens")
    async def tokens(record_id: str, start: Start = 0) -> Response:
        return _json(await view.tokens.chunk(view.api, await read(view.store, record_id), start))

    @pages.get(f"{path}/ratios")
    async def ratios(record_id: str) -> Response:
        return _json(await view.engine_values.ratios(await read(view.store, record_id)))

    @pages.get(f"{path}/alternatives")
    async def alternatives(record_id: str, position: Position) -> Response:
        return _json(await view.engine_values.alternatives(await read(view.store, record_id), position))


def _json(value: Any) -> Response:
    return Response(orjson.dumps(value), media_type="application/json")
