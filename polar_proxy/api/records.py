"""Routes of recorded sessions: lists, and everything that was recorded under a name."""

from __future__ import annotations

import asyncio
from typing import Annotated

from fastapi import Query, Response

from polar_proxy import api_models as m
from polar_proxy.api.context import ApiContext, Routers
from polar_proxy.records import find_record, list_sessions


def add_routes(routers: Routers, context: ApiContext) -> None:
    trainer, store = routers.trainer, context.store

    @trainer.get("/sessions", tags=["sessions"])
    async def get_sessions(
        limit: Annotated[int, Query(ge=1, le=1000, description="Maximum number of sessions to return.")] = 20,
        before: Annotated[str | None, Query(description="Only sessions created before the one with this id.")] = None,
    ) -> m.SessionList:
        """List sessions, newest first."""
        return await list_sessions(store, limit=limit, before=before)

    @trainer.get("/records", tags=["sessions"], response_model=m.Record)
    async def get_record(
        name: Annotated[
            str,
            Query(description="An id, the beginning of an id, a session's label, or `last` (the last used session)."),
        ],
        tokens: Annotated[bool, Query(description="Return the text of each token of a call.")] = False,
    ) -> Response:
        """Return a rollout, a session or a call in full."""
        settings = context.settings.engine if tokens else None
        record = await find_record(store, name, tokens_from=settings, engine=context.engine)
        document = await asyncio.to_thread(record.model_dump_json)  # of a long session: many megabytes
        return Response(document, media_type="application/json")
