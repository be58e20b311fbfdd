"""`polar view`: web pages with the recorded runs of a database."""

from __future__ import annotations

import asyncio
import webbrowser
from typing import Annotated

import typer

from polar_proxy.cli import options
from polar_proxy.cli.common import is_local_url, load_client_settings, open_database, run_async
from polar_proxy.cli.output import out, print_json, print_note, styled
from polar_proxy.config import Settings


def view(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME", help="Open this rollout, session, call, group or training run, named as for `polar show`."
        ),
    ] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 takes any free port.")] = 0,
    no_browser: Annotated[bool, typer.Option("--no-browser", help="Only print the URL.")] = False,
    url: options.Url = None,
    db: options.Db = None,
    as_json: options.AsJson = False,
) -> None:
    """Show the recorded runs of a database in the browser, read-only, until stopped.

    The pages are the same as those of `polar serve`. With --url, open the pages of that server instead.
    """
    settings = load_client_settings(url, db)
    if settings.url is not None:
        _show(settings.url.rstrip("/"), name, as_json, no_browser)
    else:
        run_async(_serve(settings, name, port, as_json, no_browser))


async def _serve(settings: Settings, name: str | None, port: int, as_json: bool, no_browser: bool) -> None:
    from polar_proxy.view import serve_pages

    async with open_database(settings) as store, serve_pages(store, settings, port) as url:
        await asyncio.to_thread(_show, url, name, as_json, no_browser)
        print_note("Ctrl-C stops.")
        await asyncio.Event().wait()


def _show(server: str, name: str | None, as_json: bool, no_browser: bool) -> None:
    """Print the URL of a page, and open it in the browser."""
    from urllib.parse import urlencode

    is_local_url(server)  # validates it
    page = f"{server}/" if name is None else f"{server}/view/find?{urlencode({'name': name})}"
    if as_json:
        print_json({"url": page})
    else:
        out.print(styled("{}", page), soft_wrap=True)
    if not no_browser and not webbrowser.open(page):
        print_note("No browser could be opened here: open the URL yourself.")
