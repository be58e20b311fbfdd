"""What every verb shares: settings from flags, one event loop, one way to print, one place where errors become text."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Coroutine
from typing import Annotated, Any, TypeVar

import orjson
import typer
import uvloop
from pydantic import ValidationError
from rich.console import Console

from polar_proxy.config import Settings
from polar_proxy.errors import UsageError
from polar_proxy.store import Store, default_url, normalise_url, open_store

T = TypeVar("T")

out = Console()
err = Console(stderr=True)

DbOption = Annotated[
    str | None, typer.Option("--db", help="Database: a file, sqlite:///FILE or postgresql://...", show_default=False)
]
PromptModeOption = Annotated[
    str | None,
    typer.Option(
        help="continue: sample each turn from the exact tokens of the last. render: let the engine render it.",
        show_default=False,
    ),
]
PastReasoningOption = Annotated[
    str | None,
    typer.Option(
        help="Reasoning of earlier turns: keep it, or strip it if the template does.",
        show_default=False,
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="One JSON document on standard output.")]


def load_settings(db: str | None = None, **sections: dict[str, Any]) -> Settings:
    """Settings with the given flags on top; a flag that is None was not given."""
    given: dict[str, Any] = {
        name: {key: value for key, value in section.items() if value is not None} for name, section in sections.items()
    }
    if db is not None:
        given["db"] = db
    try:
        return Settings(**{name: value for name, value in given.items() if value})
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        got = "" if "key" in where else f" (got {first.get('input')!r})"  # secrets are not shown
        raise UsageError(f"Bad setting {where}: {first['msg']}{got}.") from error
    except ValueError as error:  # not TOML, or a section in the environment that is no JSON
        raise UsageError(f"The settings (polar.toml, POLAR_... variables) cannot be read: {error}.") from error


def database_url(settings: Settings) -> str:
    return settings.db or default_url(settings.home)


def reader(settings: Settings) -> Store:
    """The store for looking at; it must exist already."""
    return _store(settings, create=False)


def writer(settings: Settings) -> Store:
    """The store for recording; made or brought up to date when needed."""
    return _store(settings, create=True)


def _store(settings: Settings, *, create: bool) -> Store:
    url = database_url(settings)
    # Artifacts lie beside an SQLite file; a database server has no such place on this machine.
    beside = normalise_url(url).startswith("sqlite")
    return open_store(url, create=create, artifacts=None if beside else settings.home / "artifacts")


def run_async(main: Coroutine[Any, Any, T]) -> T:
    """Run to the end; SIGINT and SIGTERM cancel it, so that everything is closed in order. Exit code 130 then."""

    async def guarded() -> T:
        task = asyncio.current_task()
        assert task is not None
        for name in (signal.SIGINT, signal.SIGTERM):
            # Also where SIGINT came in ignored, as it does to background jobs of a shell without job control.
            asyncio.get_running_loop().add_signal_handler(name, task.cancel)
        return await main

    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(guarded())
    except (KeyboardInterrupt, asyncio.CancelledError):
        err.print("[yellow]stopped[/]")
        raise typer.Exit(130) from None


def print_json(value: Any) -> None:
    """Exactly one JSON document on standard output."""
    sys.stdout.write(orjson.dumps(value, option=orjson.OPT_INDENT_2 | orjson.OPT_NON_STR_KEYS).decode() + "\n")
    sys.stdout.flush()
