"""Functions that all commands share: settings, the event loop, and the connection to a store or an API."""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import gc
import importlib
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from importlib.machinery import PathFinder
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

import typer
from pydantic import BaseModel, ValidationError

from polar_proxy.allowed_code import is_code
from polar_proxy.cli.output import err, styled
from polar_proxy.config import Settings, is_loopback, start_no_blas_threads
from polar_proxy.errors import UsageError

if TYPE_CHECKING:  # sqlalchemy, httpx and fastapi take a second to import, and `polar --help` needs none of them
    from polar_proxy.client import AsyncClient
    from polar_proxy.gateway import Gateway
    from polar_proxy.store import Store

M = TypeVar("M", bound=BaseModel)
T = TypeVar("T")

_SHORT_COMMAND_SECONDS = 1.0
"""Commands that end within this time collect no garbage: collecting would take a tenth of their time."""
PATIENT_TRIES = 12
"""Number of tries of a request while the server restarts. Together they take about a minute."""


def load_settings(
    db: str | None = None, *, allow_code: Sequence[str] | None = None, **sections: dict[str, Any]
) -> Settings:
    """Return the settings, overridden by the flags that are not None. Raises UsageError if a setting is wrong or cannot
    be read.

    `allow_code` is added to the setting `allowed_code`.
    """
    flags: dict[str, Any] = {"db": db}
    flags |= {name: given(section) or None for name, section in sections.items()}
    try:
        settings = Settings(**given(flags))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        got = "" if "key" in where else f" (got {first.get('input')!r})"  # never print a secret
        raise UsageError(f"Bad setting {where}: {first['msg']}{got}.") from error
    except ValueError as error:  # not TOML, or a section in the environment that is not JSON
        raise UsageError(f"The settings (polar.toml, POLAR_... variables) cannot be read: {error}.") from error
    settings.allowed_code = settings.allowed_code.union(allow_code or ())
    return settings


def import_named_code(*names: str | None) -> None:
    """Import the module of each name `module:object`, if the module is in the current folder. Skip all other names.

    Call this function only with names that the user typed. The folder is on the module path only during these imports,
    so that names in tasks, requests and settings files are not looked up there. Raises UsageError if a module cannot be
    imported.
    """
    folder = os.getcwd()
    for name in names:
        module = (name or "").partition(":")[0]
        if name is None or not is_code(name) or PathFinder.find_spec(module.partition(".")[0], [folder]) is None:
            continue
        sys.path.insert(0, folder)
        try:
            importlib.import_module(module)
        except Exception as error:
            raise UsageError(f"Cannot load {name} from {folder}: {type(error).__name__}: {error}.") from error
        finally:
            sys.path.remove(folder)


def given(flags: dict[str, Any]) -> dict[str, Any]:
    """Return the flags that were given: those whose value is not None."""
    return {name: value for name, value in flags.items() if value is not None}


def load_client_settings(url: str | None, db: str | None) -> Settings:
    """Return the settings of a command that takes --url or --db. Raises UsageError if both options are given.

    Either option overrides POLAR_URL as well as POLAR_DB.
    """
    if url is not None and db is not None:
        raise UsageError("Give --url (a server) or --db (a database), not both.")
    settings = load_settings(db)
    if url is not None or db is not None:
        settings.url = url
    return settings


def make_request(model: type[M], **fields: Any) -> M:
    """Return a request of the class `model` with these fields. If a field is invalid, raise UsageError with the first
    problem."""
    try:
        return model(**fields)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        message = first["msg"].removeprefix("Value error, ")
        raise UsageError(f"{where}: {message}" if where else f"{message[:1].upper()}{message[1:]}.") from error


def _collect_garbage() -> None:
    gc.freeze()  # what was imported until now is never garbage
    gc.enable()


def run_async(main: Coroutine[Any, Any, T]) -> T:
    """Run `main` to its end. SIGINT, SIGTERM and SIGHUP cancel it, so that it closes everything; the exit code is then
    130. A crash of the interpreter or of a library prints where it happened."""
    import uvloop

    if not faulthandler.is_enabled() and sys.__stderr__ is not None:
        faulthandler.enable(sys.__stderr__)
    came: list[signal.Signals] = []

    async def guarded() -> T:
        task = asyncio.current_task()
        assert task is not None
        loop = asyncio.get_running_loop()
        loop.call_later(_SHORT_COMMAND_SECONDS, _collect_garbage)

        def stop(number: signal.Signals) -> None:
            came.append(number)
            task.cancel()

        # A handler also works if SIGINT was ignored at start, as in background jobs of a shell without job control.
        # SIGHUP stays ignored (`nohup`).
        numbers = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
            numbers.append(signal.SIGHUP)
        for number in numbers:
            loop.add_signal_handler(number, stop, number)
        return await main

    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(guarded())
    except (KeyboardInterrupt, asyncio.CancelledError):
        err.print(styled("[yellow]stopped[/]{}", f" by {came[0].name}" if came else ""))
        raise typer.Exit(130) from None


# The store


def database_url(settings: Settings) -> str:
    from polar_proxy.store import default_url

    return settings.db or default_url(settings.home)


def open_database(settings: Settings, *, create: bool = False) -> contextlib.AbstractAsyncContextManager[Store]:
    """Return the store, which the caller must enter with `async with`.

    With `create`, entering it creates or upgrades the database. Without `create`, a missing or older database raises
    StoreError."""
    from polar_proxy.store import normalise_url, open_store

    url = database_url(settings)
    # Artifacts of SQLite are stored beside the file; for PostgreSQL they are stored in the home.
    is_file = normalise_url(url).startswith("sqlite")
    return open_store(url, create=create, artifacts=None if is_file else settings.home / "artifacts")


def with_store(settings: Settings, work: Callable[[Store], Awaitable[T]], *, create: bool = False) -> T:
    """Open the store, run `work` with it, and return its result."""

    async def main() -> T:
        async with open_database(settings, create=create) as store:
            return await work(store)

    start_no_blas_threads()
    return run_async(main())


# The gateway


def observe_warnings(gateway: Gateway, settings: Settings, note: Callable[[str], None]) -> None:
    """Warn through `note` when sampling parameters make traces approximate. Warn in the log when an agent other than
    mini-swe-agent uses the bundled policy."""
    from polar_proxy.engines.bundled import OtherAgentWarning, is_bundled
    from polar_proxy.traces.grades import DistributionNotes

    gateway.observe(DistributionNotes(note))
    if is_bundled(settings.engine):
        gateway.observe(OtherAgentWarning())


# The API


@contextlib.asynccontextmanager
async def connect(settings: Settings, *, create: bool = False, patient: bool = False) -> AsyncIterator[AsyncClient]:
    """Yield a client of the server at `settings.url`. Without a URL, open the database and serve the API in-process.

    `patient` (only with a URL): wait about a minute for a server that restarts.
    `create` (only without a URL): create or upgrade the database.
    """
    from polar_proxy.client import AsyncClient
    from polar_proxy.client.requests import MAX_TRIES

    if settings.url is not None:
        tries = PATIENT_TRIES if patient else MAX_TRIES
        async with AsyncClient(settings.url, api_key_for(settings), tries=tries) as client:
            yield client
        return
    from polar_proxy.api import allow_all, create_api
    from polar_proxy.client.inprocess import InProcessTransport

    async with open_database(settings, create=create) as store:
        application = create_api(store, settings=settings, auth=allow_all, from_this_process=True)
        async with AsyncClient("http://in-process", transport=InProcessTransport(application)) as client:
            yield client


def with_client(
    url: str | None, db: str | None, work: Callable[[AsyncClient], Coroutine[Any, Any, T]], **how: bool
) -> T:
    """Connect (see `connect`), run `work` with the client, and return its result."""

    async def main() -> T:
        async with connect(load_client_settings(url, db), **how) as client:
            return await work(client)

    return run_async(main())


def read_store_or_server(
    url: str | None,
    db: str | None,
    from_store: Callable[[Store, Settings], Awaitable[T]],
    from_server: Callable[[AsyncClient], Coroutine[Any, Any, T]],
    *,
    patient: bool = False,
) -> T:
    """Return the result of `from_server` if there is a --url or POLAR_URL, otherwise that of `from_store`.

    Without a URL, the database is read directly: running the API in this process would take a second more, for its
    imports. `patient`: see `connect`.
    """
    settings = load_client_settings(url, db)
    if settings.url is not None:
        return with_client(url, db, from_server, patient=patient)
    return with_store(settings, lambda store: from_store(store, settings))


def api_key_for(settings: Settings) -> str | None:
    """Return the configured API key. Default for a server on this machine: the key that `polar serve` stored."""
    is_local = is_local_url(settings.url or "")
    if settings.api_key is not None:
        return settings.api_key
    file = settings.home / "api-key"
    return file.read_text().strip() if is_local and file.exists() else None


def is_local_url(url: str) -> bool:
    """Return whether the server is on this machine. Raises UsageError for an invalid URL."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UsageError(f"{url!r} is not the URL of a server: write http://HOST:PORT.")
    return is_loopback(parts.hostname)
