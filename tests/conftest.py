"""Fixtures that several test folders share."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import re
import shutil
import signal
import ssl
import sys
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from contextlib import AbstractAsyncContextManager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import certifi
import pytest
from hypothesis import HealthCheck, settings
from sqlalchemy.ext import asyncio as sqlalchemy_asyncio

from benchmarks._stacks.kill_targets import Postgres
from benchmarks._stacks.stacks import StackError
from polar_proxy.config import GatewaySettings
from polar_proxy.engines.base import Engine
from polar_proxy.gateway import Gateway
from polar_proxy.store import Store, database, migrate, open_store
from polar_proxy.store.database import Database, create_file

pytest_plugins = ["tests.forked_workers"]

# The time that an example takes, or its generation, depends on how busy the machine is.
settings.register_profile("polar", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("polar")

LONG_FILES = (
    "conformance/test_families_real.py",
    "conformance/test_real.py",  # installs the harnesses that others use if they are there
    "rollouts/cluster/test_cluster.py",
    "test_image.py",
    "conformance/test_fidelity.py",
    "view/test_screenshots.py",
    "view/test_harness_pages.py",
    "gateway/test_soak.py",
    "training/test_weight_sync_vllm.py",
    "engines/test_vllm_real.py",
    "rollouts/test_chaos.py",
    "training/test_resume_benchmark.py",
    "rollouts/test_attacks.py",
    "training/test_nccl.py",
    "rollouts/test_agent_patch.py",
    "rollouts/test_run.py",
    "rollouts/test_service.py",
    "rewards/test_pytest_guard.py",
    "training/test_learning.py",
    "training/test_resume.py",
    "cli/test_serve.py",
    "rewards/test_isolated_tests.py",
    "engines/test_local.py",
    "client/test_docs.py",
    "conformance/test_measure.py",
    "rollouts/test_fleet.py",
)
"""The test files that take longest. Files with real services come first; otherwise the longest comes first."""


def pytest_configure(config: pytest.Config) -> None:
    """Restore Ctrl-C. A background job of a shell ignores it, and so would every program that a test starts and
    interrupts. Also see `_skip_version_manager`."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    _skip_version_manager()


def _skip_version_manager() -> None:
    """Make `python3` start an interpreter directly. With pyenv it is a script, which starts thirty programs for each
    call."""
    found = shutil.which("python3")
    if found is not None and Path(found).read_bytes().startswith(b"#!"):
        os.environ["PATH"] = f"{sys.base_prefix}/bin{os.pathsep}{os.environ['PATH']}"


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Start the files that take long first, so that no process is left alone with one of them at the end."""
    items.sort(key=lambda item: _place(item.path))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not import a file whose tests are all deselected by their mark, as by `-m 'not slow'`: importing PyTorch and
    the providers' SDKs takes longer than many a test."""
    if not collection_path.match("test_*.py"):
        return None
    terms = config.option.markexpr.split(" and ")
    excluded = {term.removeprefix("not ") for term in terms if term.startswith("not ")}
    marks = re.search(r"^pytestmark = (.*)$", collection_path.read_text(), re.MULTILINE)
    return True if marks and excluded & set(re.findall(r"pytest\.mark\.(\w+)", marks[1])) else None


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect no garbage while tests are imported: it would take half of the time, and everything imported stays."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def _place(path: Path) -> int:
    name = path.relative_to(Path(__file__).parent).as_posix()
    return LONG_FILES.index(name) if name in LONG_FILES else len(LONG_FILES)


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


@pytest.fixture(scope="session", autouse=True)
def quick_databases(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Copy each new SQLite file from one that Polar created once: thousands of tests open a new database.

    `created_databases` lifts this for tests of the creation itself.
    """
    created = tmp_path_factory.mktemp("created") / "polar.db"
    asyncio.run(migrate.upgrade(str(created)))

    def copy_file(database: Database) -> None:
        if database.path is not None and not database.path.exists():
            with contextlib.suppress(OSError):  # another task was first, or `create_file` reports what is wrong
                database.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
                copy = shutil.copy(created, f"{database.path}.{uuid.uuid4().hex}")
                os.link(copy, database.path)
                os.unlink(copy)
        create_file(database)

    with patch.object(migrate, "create_file", copy_file):
        yield


class _SharedStatements(dict[Any, Any]):
    """SQLAlchemy's cache of compiled statements, shared by all databases. For this, its keys contain the type of a
    dialect instead of the dialect object of one database."""

    def get(self, key: Any, default: Any = None) -> Any:
        return super().get((type(key[0]), *key[1:]), default)

    def __setitem__(self, key: Any, compiled: Any) -> None:
        super().__setitem__((type(key[0]), *key[1:]), compiled)


@pytest.fixture(scope="session", autouse=True)
def quick_statements() -> Iterator[None]:
    """Compile each SQL statement once, not once for each database: thousands of tests open a new database."""
    options = {"execution_options": {"compiled_cache": _SharedStatements()}}
    create_async_engine = sqlalchemy_asyncio.create_async_engine
    with (
        patch.object(database, "create_engine", partial(database.create_engine, **options)),
        patch.object(sqlalchemy_asyncio, "create_async_engine", partial(create_async_engine, **options)),
    ):
        yield


@pytest.fixture
def created_databases(monkeypatch: pytest.MonkeyPatch) -> None:
    """Create each new database by its migrations, as outside the tests."""
    monkeypatch.setattr(migrate, "create_file", create_file)


@pytest.fixture(scope="session", autouse=True)
def quick_certificates() -> Iterator[None]:
    """Keep HTTP clients from reading the certificates of the internet's authorities: it takes as long as a test."""
    load, public = ssl.SSLContext.load_verify_locations, {certifi.where(), ssl.get_default_verify_paths().cafile}

    def load_others(context: ssl.SSLContext, cafile: Any = None, capath: Any = None, cadata: Any = None) -> None:
        if cafile not in public:
            load(context, cafile, capath, cadata)

    with patch.object(ssl.SSLContext, "load_verify_locations", load_others):
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
    """Serve a gateway on a free loopback port: `async with serve(engine, **gateway_settings) as gateway:`."""

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
