"""Several gateways on one database: in this process, slow, or in a process that can be killed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import httpx

from polar_proxy.config import GatewaySettings
from polar_proxy.engines.base import Engine
from polar_proxy.engines.scripted import ScriptedEngine, ScriptedReply
from polar_proxy.gateway import Gateway
from polar_proxy.store import Store, open_store
from polar_proxy.types import ChatRequest, EngineRequest, ToolCall

TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
HELLO = [{"role": "user", "content": "hello"}]


def look_once_more(request: EngineRequest) -> ScriptedReply:
    """Answer with reasoning, text and a tool call, all numbered by the turn."""
    assert isinstance(request, ChatRequest)
    turn = sum(message.role == "assistant" for message in request.messages)
    return ScriptedReply(
        f"Step {turn}.", f"Thought {turn}.", (ToolCall(f"call_{turn}", "look", '{"n":1,  "deep": false}'),)
    )


@contextlib.asynccontextmanager
async def run_gateway(
    url: str,
    script: Callable[[EngineRequest], ScriptedReply] = look_once_more,
    *,
    engine: Engine | None = None,
    **settings: Any,
) -> AsyncIterator[tuple[Gateway, Store]]:
    """Run a gateway that shares the database `url`. Yields it and its own connection to the database.

    `engine`: in place of the scripted one.
    """
    given = GatewaySettings.model_validate({"port": 0, "require_known_keys": True, "shared": True, **settings})
    async with (
        open_shared_store(url) as store,
        engine or ScriptedEngine(script) as used,
        Gateway(used, store, given) as gateway,
    ):
        yield gateway, store


@contextlib.asynccontextmanager
async def open_shared_store(url: str) -> AsyncIterator[Store]:
    """Open a database. The files of a PostgreSQL store are in a temporary folder, not in the current one."""
    with tempfile.TemporaryDirectory() as folder:
        artifacts = Path(folder) / "artifacts" if url.startswith("postgresql") else None
        async with open_store(url, artifacts=artifacts) as store:
            yield store


def run_slow_gateway(url: str, wait: float) -> contextlib.AbstractAsyncContextManager[tuple[Gateway, Store]]:
    """Run a gateway whose answers begin after `wait` seconds."""
    return run_gateway(url, lambda request: ScriptedReply("Done.", wait=wait))


@contextlib.asynccontextmanager
async def run_killable_gateway(
    url: str, *arguments: str, program: str = "killable_gateway"
) -> AsyncIterator[tuple[asyncio.subprocess.Process, int]]:
    """Run a gateway in another process. Yields the process and its port."""
    root = Path(__file__).parents[2]
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", f"tests.gateway.{program}", url, *arguments),
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root)},
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    try:
        yield process, int(await asyncio.wait_for(process.stdout.readline(), 240))
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def ask(gateway: Gateway, key: str, messages: Sequence[Any]) -> httpx.Response:
    body = {"model": "m", "messages": messages, "tools": [TOOL]}
    async with httpx.AsyncClient(timeout=120) as http:
        return await http.post(
            f"{gateway.url}/v1/chat/completions", json=body, headers={"authorization": f"Bearer {key}"}
        )


async def ask_in_vain(port: int, key: str) -> None:
    """Send a call whose gateway will be killed."""
    body = {"model": "m", "messages": HELLO}
    async with httpx.AsyncClient(timeout=300) as http:
        with contextlib.suppress(httpx.TransportError):
            await http.post(
                f"http://127.0.0.1:{port}/v1/chat/completions", json=body, headers={"authorization": f"Bearer {key}"}
            )


async def until_open(store: Store, session_id: str, count: int = 1) -> None:
    """Wait until `count` calls of a session are in flight."""
    async with asyncio.timeout(120):
        while len(await store.open_calls.of_session(session_id)) != count:
            await asyncio.sleep(0.02)
