"""Fixtures that several test folders share."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import HealthCheck, settings

from benchmarks._stacks.kill_targets import Postgres
from benchmarks._stacks.stacks import StackError
from polar_proxy.config import GatewaySettings
from polar_proxy.engines.base import Engine
from polar_proxy.gateway import Gateway
from polar_proxy.store import Store, open_store

# The time that an example takes, or its generation, depends on how busy the machine is.
settings.register_profile("polar", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("polar")


def pytest_configure(config: pytest.Config) -> None:
    """Restore Ctrl-C: a shell's background job ignores it, and so would every program that a test starts and
    interrupts."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print each missing optional part once, with the command that installs it, instead of once for each skipped
    test."""
    reasons: Counter[str] = Counter()
    for report in terminalreporter.stats.get("skipped", []):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        reasons[reason.removeprefix("Skipped: ")] += 1
    if reasons:
        terminalreporter.section("skipped, because something is not installed here")
    for reason, count in reasons.most_common():
        terminalreporter.write_line(f"{count} test{'s' if count > 1 else ''}: {reason}")


class _QuickAsyncio:
    """`asyncio` with `sleep` ten times as fast."""

    def __getattr__(self, name: str) -> Any:
        return getattr(asyncio, name)

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds / 10)


@pytest.fixture(scope="session", autouse=True)
def quick_uvicorn() -> Iterator[None]:
    """Make uvicorn check every 10 ms, not every 100 ms, whether it should stop: hundreds of tests stop a server."""
    with patch("uvicorn.server.asyncio", _QuickAsyncio()):
        yield


@pytest.fixture
def polar_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give each test a new Polar home, so that a developer's real database is not touched."""
    home = tmp_path / "polar-home"
    monkeypatch.setenv("POLAR_HOME", str(home))
    monkeypatch.setenv("POLAR_DB", f"sqlite:///{home}/polar.db")
    return home


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Store]:
    async with open_store(f"sqlite:///{tmp_path}/calls.db") as opened:
        yield opened


Serve = Callable[..., AbstractAsyncContextManager[Gateway]]


@pytest.fixture
def serve(store: Store) -> Serve:
    """`async with serve(engine, **gateway_settings) as gateway:` on a free loopback port."""

    @contextlib.asynccontextmanager
    async def make(engine: Engine, **settings: object) -> AsyncIterator[Gateway]:
        given = GatewaySettings.model_validate({"port": 0, **settings})
        async with engine, Gateway(engine, store, given) as gateway:
            yield gateway

    return make


@pytest.fixture(scope="module")
def postgres_process() -> Iterator[Postgres]:
    """A PostgreSQL server of this test module, which its tests kill and start again."""
    try:
        process = Postgres()
    except StackError as error:
        pytest.skip(str(error))
    yield process
    process.stop()
