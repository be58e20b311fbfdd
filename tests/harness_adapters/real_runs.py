"""Runs real harnesses, installed by their adapters, against the real gateway with the scripted engine."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from harness_adapters.base import HarnessAdapter, Installation, LaunchContext, LaunchPlan
from polar_proxy.engines.scripted import ScriptedAnswer
from polar_proxy.gateway import Gateway
from polar_proxy.store import Store
from polar_proxy.types import CallRecord, ChatRequest, EngineRequest, ToolCall

INSTRUCTION = 'Say `hello`; it\'s "broken".'
KEY = "sk-of-the-test"


@dataclass(frozen=True)
class FinishedRun:
    """The outcome of a run and its recorded calls."""

    exit_code: int | None
    output: str
    workdir: Path
    home: Path
    calls: list[CallRecord]


def install(adapter: HarnessAdapter, factory: pytest.TempPathFactory) -> Installation:
    """Return the harness from the cache in `POLAR_CACHE_DIR`, or install it for this test run."""
    cache = os.environ.get("POLAR_CACHE_DIR")
    return adapter.install(Path(cache) if cache else factory.mktemp("cache"))


async def run(
    adapter: HarnessAdapter,
    installed: Installation,
    gateway: Gateway,
    store: Store,
    folder: Path,
    *,
    timeout: float = 400.0,
    **changes: Any,
) -> FinishedRun:
    """Run the harness to its end below `folder`. A second call with the same folder is a second turn."""
    home, workdir = folder / "home", folder / "work"
    if not workdir.exists():
        home.mkdir()
        workdir.mkdir()
        (workdir / "a.txt").write_text("hello\n")
        await run_program(["git", "init", "-q", "-b", "main"], workdir, {}, 120)
    context = LaunchContext(
        base_url=gateway.url + "/v1",
        api_key=KEY,
        model="scripted-model",
        instruction=INSTRUCTION,
        home=str(home),
        workdir=str(workdir),
    )
    plan: LaunchPlan = adapter.launch(installed, replace(context, **changes))
    for name, text in plan.files.items():
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_text(text)
    exit_code, output = await run_program(plan.argv, workdir, plan.env, timeout)
    sessions = await store.sessions.recent()
    assert len(sessions) == 1, f"{len(sessions)} sessions; exit code {exit_code}\n{output[-3000:]}"
    (session,) = sessions
    await gateway.sessions.idle(session.session_id, timeout=120)
    return FinishedRun(exit_code, output, workdir, home, await store.calls.of_session(session.session_id))


async def run_program(
    argv: tuple[str, ...] | list[str], cwd: Path, env: Mapping[str, str], timeout: float
) -> tuple[int | None, str]:
    """Run a program with its output in a file: a process that it leaves running would keep a pipe open."""
    log = cwd.with_name("agent.log")
    with log.open("wb") as handle:
        process = await asyncio.create_subprocess_exec(
            *argv, cwd=cwd, env={"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": str(cwd.parent), **env},
            stdin=asyncio.subprocess.DEVNULL, stdout=handle, stderr=handle, start_new_session=True,
        )  # fmt: skip
        try:
            code: int | None = await asyncio.wait_for(process.wait(), timeout)
        except TimeoutError:
            code = None
        finally:
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass  # no process was left
            await process.wait()
    return code, log.read_text(errors="replace")


def answer_count(request: EngineRequest) -> int:
    """Return the number of answers in the conversation of a request."""
    assert isinstance(request, ChatRequest)
    return sum(message.role == "assistant" for message in request.messages)


def play(*replies: ScriptedAnswer) -> Callable[[EngineRequest], ScriptedAnswer]:
    """Return a script of replies in order; the last one repeats. A retry gets the same reply."""
    return lambda request: replies[min(answer_count(request), len(replies) - 1)]


def call(name: str, arguments: str, number: int = 0) -> ToolCall:
    return ToolCall(f"call_{number}", name, arguments)
