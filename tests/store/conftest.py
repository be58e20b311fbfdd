"""Every test of the store runs on SQLite, and, in `full` runs, on a real PostgreSQL server."""

from __future__ import annotations

import asyncio
import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio

from polar_proxy.store import Store, migrate, open_store
from tests.ports import free_port

_TEMPORARY = tempfile.gettempdir()
"""The folder of temporary files outside of tests: those of a test may belong to this account alone."""


@dataclass(frozen=True)
class PostgresServer:
    """A temporary server; `new_database` gives the URL of an empty database on it."""

    bin: Path
    port: int
    as_user: tuple[str, ...]

    def new_database(self, name: str, template: str = "template1") -> str:
        """Create a database as a copy of another one, by default an empty one, and return its URL."""
        options = ("-h", "127.0.0.1", "-p", str(self.port), "-U", "postgres", "-T", template)
        subprocess.run([*self.as_user, str(self.bin / "createdb"), *options, name], check=True, cwd="/")
        return f"postgresql://postgres@127.0.0.1:{self.port}/{name}"


def _postgres_bin() -> Path | None:
    on_path = shutil.which("initdb")
    candidates = [Path(on_path).resolve().parent] if on_path else []
    candidates += sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    return next((folder for folder in candidates if (folder / "initdb").exists()), None)


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    folder = _postgres_bin()
    if folder is None:
        pytest.skip("PostgreSQL's server programs are not installed (Debian: apt-get install postgresql)")
    as_user: tuple[str, ...] = ()
    with tempfile.TemporaryDirectory(prefix="polar-pg-", dir=_TEMPORARY) as data:
        if os.geteuid() == 0:  # the server refuses to run as root
            account = pwd.getpwnam("postgres")
            os.chown(data, account.pw_uid, account.pw_gid)
            as_user = ("runuser", "-u", "postgres", "--")
        cluster = f"{data}/cluster"

        def run(*command: str) -> None:
            subprocess.run([*as_user, *command], check=True, cwd="/", stdout=subprocess.DEVNULL)

        run(str(folder / "initdb"), "-D", cluster, "-A", "trust", "-U", "postgres", "--no-sync")
        for more in (True, True, True, True, False):  # another program may take a free port before the server does
            port = free_port()
            options = f"-p {port} -k {data} -c listen_addresses=127.0.0.1 -c fsync=off"
            try:
                run(
                    str(folder / "pg_ctl"),
                    "-D",
                    cluster,
                    "-w",
                    "-t",
                    "240",
                    "-o",
                    options,
                    "-l",
                    f"{data}/log",
                    "start",
                )
                break
            except subprocess.CalledProcessError:
                if not more:
                    raise
        try:
            yield PostgresServer(folder, port, as_user)
        finally:
            run(str(folder / "pg_ctl"), "-D", cluster, "-m", "immediate", "stop")


@pytest.fixture(scope="session")
def postgres_template(postgres: PostgresServer) -> str:
    """The name of a PostgreSQL database that Polar has created and that others are copied from."""
    asyncio.run(migrate.upgrade(postgres.new_database("created")))
    return "created"


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.full)])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The address of a database that does not exist yet (SQLite), or of a new one (PostgreSQL).

    The new one has Polar's tables, except for tests that ask for `created_databases`.
    """
    if request.param == "sqlite":
        return str(tmp_path / "home" / "polar.db")
    server: PostgresServer = request.getfixturevalue("postgres")
    empty = "created_databases" in request.fixturenames
    template = "template1" if empty else request.getfixturevalue("postgres_template")
    return server.new_database(f"t{os.urandom(6).hex()}", template)


@pytest_asyncio.fixture
async def store(url: str, tmp_path: Path) -> AsyncIterator[Store]:
    async with open_store(url, artifacts=tmp_path / "artifacts") as opened:
        yield opened
