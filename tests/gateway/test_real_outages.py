"""A real full disk and a real stopped PostgreSQL server behind a gateway: nothing lost, and recording comes back."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks._stacks.kill_targets import Postgres
from polar_proxy.config import GatewaySettings
from polar_proxy.engines.scripted import ScriptedEngine
from polar_proxy.gateway import Gateway
from polar_proxy.store import Store, open_store
from tests.gateway.agents import client, new_session, until_ready
from tests.until import GUARD_SECONDS

pytestmark = pytest.mark.full

FEW_SECONDS = 8.0


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A folder on a disk of 12 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=12m", "polar-test", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, check=False, capture_output=True).returncode != 0:
        pytest.skip("a small disk of its own needs root, and the right to mount")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(file: Path) -> None:
    """Fill the disk to its last byte."""
    with file.open("ab", buffering=0) as out, contextlib.suppress(OSError):
        while True:
            out.write(b"x" * (1 << 16))
    with file.open("ab", buffering=0) as out:
        for size in (4096, 512, 1):
            try:
                while True:
                    out.write(b"x" * size)
            except OSError as error:
                assert error.errno == errno.ENOSPC  # noqa: PT017


@contextlib.asynccontextmanager
async def serving(store: Store, **settings: Any) -> AsyncIterator[tuple[Gateway, httpx.AsyncClient]]:
    given = GatewaySettings.model_validate({"port": 0, **settings})
    async with (
        ScriptedEngine() as engine,
        Gateway(engine, store, given) as gateway,
        client(gateway.url, "own") as http,
    ):
        yield gateway, http


async def ask(http: httpx.AsyncClient, text: str) -> tuple[httpx.Response, float]:
    """Send a call. Return its answer and the seconds that it took."""
    began = time.monotonic()
    body = {"model": "m", "messages": [{"role": "user", "content": text}]}
    answer = await http.post("/chat/completions", json=body)
    return answer, time.monotonic() - began


@pytest.mark.parametrize("record", ["required", "best_effort"])
async def test_full_disk(small_disk: Path, record: str) -> None:
    """Every acknowledged call is stored, the file stays sound, and recording begins again when space is freed."""
    acknowledged = []
    async with open_store(str(small_disk / "polar.db")) as store:
        session_id = await new_session(store, "own")
        async with serving(store, record=record) as (gateway, http):
            for number in range(4):
                acknowledged.append((await ask(http, f"before {number}"))[0].headers["x-polar-call-id"])
            fill(small_disk / "ballast")
            for number in range(6):
                answer, seconds = await ask(http, f"full {number} " + "\n".join(map(str, range(20_000))))
                assert seconds < FEW_SECONDS
                if record == "required":
                    assert (answer.status_code, answer.headers["retry-after"]) == (503, "5")
                else:
                    assert answer.status_code == 200
            health = (await http.get(f"{gateway.url}/readyz")).json()
            assert "disk is full" in health["record"]["reason"]
            (small_disk / "ballast").unlink()
            await until_ready(http, gateway)
            acknowledged.append((await ask(http, "after"))[0].headers["x-polar-call-id"])
        assert [call.call_id for call in await store.calls.of_session(session_id)] == acknowledged
        assert await store.sessions.is_incomplete(session_id) == (record == "best_effort")
        assert await store.maintenance.verify() == []


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("how", ["killed", "hangs"])
async def test_postgresql_away(postgres_process: Postgres, tmp_path: Path, how: str, shared: bool) -> None:
    """A call costs seconds at most, then none; nothing has to be restarted when the server is back."""
    processes: list[int] = []
    async with open_store(postgres_process.url, artifacts=tmp_path / "artifacts") as store:
        session_id = await new_session(store, key := os.urandom(6).hex())
        async with serving(store, record="required", shared=shared) as (gateway, http):
            http.headers["authorization"] = f"Bearer {key}"
            answer, _ = await ask(http, "before")
            acknowledged = [answer.headers["x-polar-call-id"]]
            if how == "killed":
                postgres_process.kill()
            else:
                processes = postgres_process.processes()
                for pid in processes:
                    os.kill(pid, signal.SIGSTOP)
            try:
                answer, seconds = await ask(http, "away")
                assert (answer.status_code, answer.headers["retry-after"]) == (503, "5")
                assert seconds < FEW_SECONDS
                for number in range(3):
                    answer, seconds = await ask(http, f"away {number}")
                    assert answer.status_code == 503
                    assert seconds < 1.0
                began = time.monotonic()
                assert (await http.get(f"{gateway.url}/readyz")).status_code == 503
                assert time.monotonic() - began < 2.0
            finally:
                for pid in processes:
                    os.kill(pid, signal.SIGCONT)
                if how == "killed":
                    await asyncio.to_thread(postgres_process.start)
            await until_ready(http, gateway)
            async with asyncio.timeout(GUARD_SECONDS):
                while (await ask(http, "after"))[0].status_code != 200:
                    await asyncio.sleep(0.2)
            answer, _ = await ask(http, "after again")
            acknowledged.append(answer.headers["x-polar-call-id"])
        assert set(acknowledged) <= {call.call_id for call in await store.calls.of_session(session_id)}
