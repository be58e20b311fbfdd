"""`polar top`: what a server or a database does now."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Annotated

import typer

from polar_proxy.cli import options
from polar_proxy.cli.common import database_url, load_client_settings, read_store_or_server
from polar_proxy.cli.output import out, print_json
from polar_proxy.cli.views.top import top_view

if TYPE_CHECKING:
    from polar_proxy.api_models import Activity, ServiceState
    from polar_proxy.client import AsyncClient
    from polar_proxy.config import Settings
    from polar_proxy.store import Store

    TopState = tuple[ServiceState | None, Activity]


def top(
    every: Annotated[float, typer.Option(min=0.2, help="Seconds between two updates of the view.")] = 2.0,
    url: options.Url = None,
    db: options.Db = None,
    as_json: options.AsJson = False,
) -> None:
    """Show what a server or a database does now: engine, stages, rates, active sessions and newest failures.

    On a terminal the view is renewed until Ctrl-C. Otherwise, and with --json, it is printed once. Engine and
    stages are shown only for a server, because a database does not have them.
    """

    server = load_client_settings(url, db).url

    async def from_server(client: AsyncClient) -> None:
        async def read() -> TopState:
            return await client.service(), await client.activity()

        await _show(server or "", read, every, as_json)

    async def from_store(store: Store, settings: Settings) -> None:
        from polar_proxy.records import recent_activity
        from polar_proxy.store import display_url

        async def read() -> TopState:
            return None, await recent_activity(store)

        await _show(display_url(database_url(settings)), read, every, as_json)

    read_store_or_server(url, db, from_store, from_server)


async def _show(place: str, read: Callable[[], Awaitable[TopState]], every: float, as_json: bool) -> None:
    service, activity = await read()
    if as_json:
        print_json({"service": service, "activity": activity})
    elif not out.is_terminal:
        out.print(top_view(place, service, activity))
    else:
        from rich.live import Live

        with (
            contextlib.suppress(asyncio.CancelledError),  # Ctrl-C is the usual end
            Live(top_view(place, service, activity), console=out, screen=True, auto_refresh=False) as live,
        ):
            while True:
                live.refresh()
                await asyncio.sleep(every)
                service, activity = await read()
                live.update(top_view(place, service, activity))
