"""A real API server on a free port: gateway, store, rollout service and background loops."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from polar_proxy.api import API_ROUTES, ApiContext, BackgroundLoops, new_api_key, server_state
from polar_proxy.api.service import ServiceCollector
from polar_proxy.api_models import API_PREFIX, Role
from polar_proxy.config import Settings
from polar_proxy.engines.base import Engine
from polar_proxy.export.processes import ExportProcesses
from polar_proxy.gateway import Gateway
from polar_proxy.rollouts import RolloutService, ServiceLimits
from polar_proxy.sessions.identity import hash_key
from polar_proxy.store import Store
from tests.fakes.player import PlayerEngine
from tests.fakes.tiny_agent import TINY_AGENTS
from tests.rollouts.quick_limits import QUICK_LIMITS

LIMITS = replace(QUICK_LIMITS, in_flight=4, pool_size=1)


@dataclass(frozen=True)
class RunningServer:
    """A server and one client for each role."""

    gateway: Gateway
    service: RolloutService | None
    admin: httpx.AsyncClient
    trainer: httpx.AsyncClient
    store: Store

    async def post(self, path: str, body: Any = None, *, status: int = 200, **headers: str) -> Any:
        """Post as admin; the response must have this status."""
        return _checked(await self.admin.post(path, json=body, headers=headers), status)

    async def get(self, path: str, *, status: int = 200, **params: Any) -> Any:
        return _checked(await self.admin.get(path, params=params), status)


def _checked(answer: httpx.Response, status: int) -> Any:
    assert answer.status_code == status, answer.text
    return answer.json()


async def make_key(store: Store, role: Role) -> str:
    key = new_api_key(role)
    await store.api_keys.add(hash_key(key), role)
    return key


ServeApi = Callable[..., AbstractAsyncContextManager[RunningServer]]


@pytest.fixture(autouse=True)
def own_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setattr("tempfile.tempdir", None)


@pytest.fixture
def serve_api(store: Store, tmp_path: Path) -> ServeApi:
    """`async with serve_api(work=True) as running:`"""

    @contextlib.asynccontextmanager
    async def serve(
        *,
        work: bool = False,
        engine: Engine | None = None,
        limits: ServiceLimits = LIMITS,
        grace: float = 5.0,
        gateway_limits: dict[str, Any] | None = None,
        **api: Any,
    ) -> AsyncIterator[RunningServer]:
        settings = Settings(
            home=tmp_path / "home",
            allowed_code=TINY_AGENTS,
            api={"private_callbacks": True, **api},
            gateway={"port": 0, "limits": gateway_limits or {}},
            run={"sandbox": "process"},
        )
        async with contextlib.AsyncExitStack() as stack:
            opened = await stack.enter_async_context(engine or PlayerEngine())
            gateway = await stack.enter_async_context(Gateway(opened, store, settings.gateway, grace=grace))
            service = None
            if work:
                made = RolloutService(
                    store, gateway, opened, tmp_path / "harnesses", limits=limits, code=settings.code()
                )
                service = await stack.enter_async_context(made)
            exports = await stack.enter_async_context(ExportProcesses(store.database.url))
            parts = ApiContext(store, settings, service, opened, exports=exports)
            keeping = await stack.enter_async_context(BackgroundLoops(parts))
            gateway.include(API_ROUTES, **server_state(parts))
            gateway.metrics.registry.register(ServiceCollector(service, lambda: keeping.feed_depth))

            async def client(role: Role) -> httpx.AsyncClient:
                headers = {"authorization": f"Bearer {await make_key(store, role)}"}
                http = httpx.AsyncClient(
                    base_url=gateway.url + API_PREFIX, headers=headers, timeout=300, trust_env=False
                )
                return await stack.enter_async_context(http)

            yield RunningServer(gateway, service, await client("admin"), await client("trainer"), store)

    return serve


def job_request(agent: str = "TinyAgent", samples: int = 1, **given: Any) -> dict[str, Any]:
    """Return a job request whose rollouts run on any machine."""
    return {
        "task": "swe-task",
        "seed": 3,
        "samples": samples,
        "harness": f"tests.fakes.tiny_agent:{agent}",
        "sandbox": "process",
        "timeout": 600.0,
        **given,
    }
