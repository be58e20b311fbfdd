"""Routes of recorded data: lists of sessions, single records by name, and exports."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Annotated, Any

import orjson
from fastapi import Query, Response

from polar_proxy import api_models as m
from polar_proxy.api.context import ApiContext, ApiStore, Context, StreamedResponse, make_routers
from polar_proxy.export.exporter import ExportReport, export_lines
from polar_proxy.records import convert, find_record, list_sessions
from polar_proxy.types import Json

_EXPORT: dict[int | str, Json] = {
    200: {
        "content": {m.NDJSON: {}},
        "description": 'One row per line. The last line is `{"export_report": ...}` with the counts (ExportSummary); '
        "without it the export is not complete.",
    }
}

routers = make_routers()
trainer = routers.trainer


@trainer.get("/sessions", tags=["sessions"])
async def get_sessions(
    store: ApiStore,
    limit: Annotated[int, Query(ge=1, le=1000, description="Maximum number of sessions to return.")] = 20,
    before: Annotated[str | None, Query(description="Only sessions created before the session with this id.")] = None,
) -> m.SessionList:
    """List sessions, newest first."""
    return await list_sessions(store, limit=limit, before=before)


@trainer.get("/records", tags=["sessions"], response_model=m.Record)
async def get_record(
    context: Context,
    store: ApiStore,
    name: Annotated[
        str,
        Query(description="An id, a session's label, the beginning of either, or `last` (the session used last)."),
    ],
    tokens: Annotated[bool, Query(description="Return the sampled tokens with their texts.")] = False,
) -> Response:
    """Return a rollout, a session or a call in full."""
    settings = context.settings.engine if tokens else None
    record = await find_record(store, name, tokens_from=settings, engine=context.engine)
    document = await asyncio.to_thread(record.model_dump_json)  # a long session has many megabytes
    return Response(document, media_type="application/json")


@trainer.get("/export", tags=["export"], response_class=StreamedResponse, responses=_EXPORT)
async def export_rows(
    context: Context,
    form: Annotated[str, Query(alias="format", description="A format of `polar export`.")] = "jsonl",
    where: Annotated[str | None, Query(description="Conditions such as `reward>=1, harness=codex`.")] = None,
    session: Annotated[
        list[str] | None, Query(description="Only the session with this id. May be given several times.")
    ] = None,
    builder: Annotated[str, Query(description="The builder: merged, per_call, tree or rescored.")] = "merged",
    all_grades: Annotated[bool, Query(description="Also return traces of grade approximate or rejected.")] = False,
    advantage: Annotated[
        str,
        Query(description="Advantage function of the formats trl and tinker: grpo, dr_grpo, rloo, mc_grpo or raft."),
    ] = "grpo",
) -> StreamedResponse:
    """Return the rows that `polar export` writes."""
    return await stream_export(
        context,
        form,
        where=where,
        session_ids=session or (),
        builder=builder,
        all_grades=all_grades,
        advantage=advantage,
    )


async def stream_export(context: ApiContext, form: str, **options: Any) -> StreamedResponse:
    """Return the rows of an export, and the export's report as the last line. `options`: the options of
    `export_lines`."""
    report = ExportReport()
    if context.exports is not None:
        rows = context.exports.export(form, report, **options)
    else:
        rows = export_lines(context.store, form, report, **options)
    first = await anext(rows, b"")  # an invalid request is refused before the response begins
    return StreamedResponse(_with_report(first, rows, report), media_type=m.NDJSON)


async def _with_report(first: bytes, rows: AsyncGenerator[bytes], report: ExportReport) -> AsyncIterator[bytes]:
    async with aclosing(rows):
        yield first
        async for piece in rows:
            yield piece
        yield orjson.dumps({m.EXPORT_REPORT: convert(m.ExportSummary, report).model_dump()}) + b"\n"
