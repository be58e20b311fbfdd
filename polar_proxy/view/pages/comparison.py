"""The page that compares rollouts side by side: their properties, and their conversations from the first difference
on."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from fastapi import APIRouter, Query, Request, Response

from polar_proxy.api.context import require
from polar_proxy.errors import UsageError
from polar_proxy.store import RolloutRow, Store
from polar_proxy.store.repositories.calls import CallSummary
from polar_proxy.types import Json, Trace
from polar_proxy.view.alignment import Alignment, RunMessage, align, main_call, read_messages, shared_tokens
from polar_proxy.view.context import ViewContext

MOST = 6
"""Maximum number of rollouts that are shown side by side."""
_SHOWN_ANYWAY = {"harness", "sandbox"}
"""Options that the page shows in any case: the agent with its version, and the kind of sandbox that was chosen."""
Chosen = Annotated[list[str], Query(alias="run", description="Ids of rollouts, or the beginnings of ids.")]


@dataclass(frozen=True, slots=True)
class ComparedRun:
    """A column of the comparison."""

    row: RolloutRow
    call: CallSummary | None
    """The call whose conversation is shown; None if no call was answered."""
    messages: Sequence[RunMessage]
    trace: Trace | None
    """The longest merged trace."""


@dataclass(frozen=True, slots=True)
class Comparison:
    runs: Sequence[ComparedRun]
    alignment: Alignment
    shared_tokens: int | None
    """Length in tokens of the common prefix of the runs' longest traces; None if a run has no trace."""
    options: Sequence[tuple[str, Sequence[object]]]
    """The options in which the runs differ, each as (name, values), with one value for each run."""


def add_routes(pages: APIRouter, view: ViewContext) -> None:
    store = view.store

    @pages.get("/view/compare")
    async def compare_page(request: Request, names: Chosen = []) -> Response:  # noqa: B006
        chosen = list(dict.fromkeys(filter(None, (name.strip() for name in names))))
        if len(chosen) < 2:
            return await view.page(request, "compare.html", comparison=None, names=chosen)
        rows = [await _find_rollout(store, name) for name in chosen[:MOST]]
        return await view.page(request, "compare.html", comparison=await compare(store, rows), names=chosen)

    @pages.get("/view/parts/compare")
    async def compare_part(request: Request, names: Chosen = []) -> Response:  # noqa: B006
        """Return the conversations side by side as a part of a group's page."""
        rows = [await _find_rollout(store, name) for name in names[:MOST]]
        return await view.page(request, "parts/side_by_side.html", comparison=await compare(store, rows))


async def compare(store: Store, rows: Sequence[RolloutRow]) -> Comparison:
    runs = await asyncio.gather(*(_read_run(store, row) for row in rows))
    tokens = [run.trace.token_ids for run in runs if run.trace is not None]
    alignment = await asyncio.to_thread(align, [run.messages for run in runs])
    shared = shared_tokens(tokens) if len(tokens) == len(runs) else None
    return Comparison(runs, alignment, shared, _different_options([row.config for row in rows]))


async def _find_rollout(store: Store, name: str) -> RolloutRow:
    found = await store.names.find(name)
    if found.kind != "rollout":
        raise UsageError(f"{name} is a {found.kind}. Only rollouts can be compared.")
    return await require("rollout", found.record_id, store.rollouts.get(found.record_id))


async def _read_run(store: Store, row: RolloutRow) -> ComparedRun:
    if row.session_id is None:
        return ComparedRun(row, None, (), None)
    calls, traces = await asyncio.gather(
        store.calls.summaries(row.session_id), store.traces.find(session_id=row.session_id)
    )
    trace = max(traces, key=lambda one: len(one.token_ids), default=None)
    chosen = main_call(calls)
    call = None if chosen is None else await store.calls.get(chosen.call_id)
    messages = [] if call is None else await asyncio.to_thread(read_messages, call)
    return ComparedRun(row, chosen, messages, trace)


def _different_options(configs: Sequence[Json]) -> list[tuple[str, Sequence[object]]]:
    names = sorted({name for config in configs for name in config} - _SHOWN_ANYWAY)
    values = [(name, [config.get(name) for config in configs]) for name in names]
    return [(name, found) for name, found in values if any(value != found[0] for value in found)]
