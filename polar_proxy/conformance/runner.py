"""Run a scenario: a real program in a sandbox against the real gateway, with a recording proxy between them."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from typing import Protocol, Self, runtime_checkable

from harness_adapters.base import ExitOutcome, HarnessAdapter, HarnessError, Installation, LaunchContext, LaunchPlan
from polar_proxy.config import GatewaySettings
from polar_proxy.conformance.recording_proxy import Exchange, RecordingProxy
from polar_proxy.conformance.scripted_model import ReceivedRequest, ScriptedModel
from polar_proxy.engines.base import Engine
from polar_proxy.engines.scripted import Script
from polar_proxy.gateway import Gateway
from polar_proxy.sessions.identity import hash_key, new_key
from polar_proxy.store import Store, open_store
from polar_proxy.types import CallRecord, PromptMode
from sandboxes.base import Mount, ResourceLimits, Sandbox, SandboxError, SandboxKind, SandboxSpec
from sandboxes.choice import choose, open_sandbox

_TAIL = 200_000
_PREPARE_SECONDS = 120.0
_SETTLE_SECONDS = 30.0
_BEFORE_KILL = 1.5
_REPOSITORY = """
git init -q -b main && git add -A &&
git -c user.name=polar -c user.email=polar@localhost commit -q -m 'Initial commit'
"""


@runtime_checkable
class ScriptableEngine(Protocol):
    """An engine whose answers come from a script."""

    script: Script


@dataclass(frozen=True, slots=True)
class ProgramRun:
    """One start of the program and its end."""

    exit_code: int | None
    """Exit status of the program; None if it reached its time limit or was killed on purpose."""
    outcome: ExitOutcome
    detail: str
    seconds: float


@dataclass(slots=True)
class ScenarioRun:
    """One scenario with one harness, and everything that was recorded of it."""

    model: ScriptedModel
    starts: list[ProgramRun] = field(default_factory=list)
    exchanges: list[Exchange] = field(default_factory=list)
    calls: list[CallRecord] = field(default_factory=list)
    killed: bool = False
    fault: str | None = None
    """Why the scenario could not be run."""

    @property
    def last(self) -> ProgramRun:
        return self.starts[-1]

    def requests(self, kind: str = "main") -> list[ReceivedRequest]:
        return [request for request in self.model.requests if request.kind == kind]

    def last_request(self, step: int) -> ReceivedRequest | None:
        """Return the main conversation's last request for this step of the script; None if there was no request."""
        return next((request for request in reversed(self.requests()) if request.step == step), None)


@contextlib.asynccontextmanager
async def temporary_store() -> AsyncIterator[Store]:
    with tempfile.TemporaryDirectory(prefix="polar-conformance-") as folder:
        async with open_store(f"sqlite:///{folder}/conformance.db") as store:
            yield store


async def choose_kind(sandbox: str) -> SandboxKind:
    """Return the kind of sandbox to use; for `auto`, the strongest that works here."""
    return (await asyncio.to_thread(choose, sandbox)).kind  # type: ignore[arg-type]


class ScenarioRunner:
    """Runs scenarios on one gateway. `patience` multiplies the time limit of each program."""

    def __init__(
        self,
        engine: Engine,
        store: Store,
        sandbox: SandboxKind,
        *,
        patience: float = 1.0,
        prompt_mode: PromptMode = "continue",
    ) -> None:
        self.engine = engine
        self._prompt_mode = prompt_mode
        self._store = store
        self._kind: SandboxKind = sandbox
        self._patience = patience
        self._committed: set[str] = set()

    async def __aenter__(self) -> Self:
        self._stack = contextlib.AsyncExitStack()
        await self._stack.enter_async_context(self.engine)
        settings = GatewaySettings(host="127.0.0.1", port=0, require_known_keys=True, prompt_mode=self._prompt_mode)
        self.gateway = await self._stack.enter_async_context(Gateway(self.engine, self._store, settings, grace=2))
        self.gateway.observe(lambda record: self._committed.add(record.call_id))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def play(self, model: ScriptedModel, adapter: HarnessAdapter, installed: Installation) -> ScenarioRun:
        """Run `model.scenario` with a harness in a new sandbox and session, and return what happened.

        The harness is started once, or twice if the scenario has a second user turn and the first start succeeds. If
        the sandbox does not open or the harness cannot be started, the result has only a `fault`.
        """
        proxy = RecordingProxy("127.0.0.1", self.gateway.port, self._committed.__contains__, model.should_cut)
        run = ScenarioRun(model, exchanges=proxy.exchanges)
        if isinstance(self.engine, ScriptableEngine):
            self.engine.script = model
        key = new_key()
        session = await self._store.sessions.create(key_hash=hash_key(key), label=None, policy=None, origin="key")
        try:
            async with proxy, self._sandbox(installed, proxy) as (sandbox, url):
                context = LaunchContext(
                    base_url=url + "/v1",
                    api_key=key,
                    model=self.engine.info.model,
                    instruction=model.instruction(0),
                    home=sandbox.home,
                    workdir=sandbox.workdir,
                    max_steps=model.profile.max_steps,
                    context_length=model.profile.context_window,
                )
                await self._run_program(run, sandbox, adapter.launch(installed, context), adapter)
                if model.scenario.second and run.last.outcome == "ok":
                    context = replace(context, instruction=model.instruction(1), resume=True)
                    await self._run_program(run, sandbox, adapter.launch(installed, context), adapter)
        except (HarnessError, SandboxError, OSError, TimeoutError) as error:
            return ScenarioRun(model, fault=f"{type(error).__name__}: {error}")
        finally:
            with contextlib.suppress(TimeoutError):
                await self.gateway.sessions.idle(session.session_id, timeout=_SETTLE_SECONDS)
        run.calls = list(await self._store.calls.of_session(session.session_id))
        return run

    @contextlib.asynccontextmanager
    async def _sandbox(self, installed: Installation, proxy: RecordingProxy) -> AsyncIterator[tuple[Sandbox, str]]:
        """Open a sandbox with a small repository; yield it with the URL at which programs inside reach the proxy."""
        spec = SandboxSpec(
            mounts=tuple(Mount(path, str(path)) for path in installed.mounts),
            limits=ResourceLimits(memory_mb=None if self._kind == "process" else 4096),
            labels={"polar.role": "conformance"},
        )
        async with contextlib.AsyncExitStack() as stack:
            async with asyncio.timeout(_PREPARE_SECONDS):
                sandbox = await stack.enter_async_context(await open_sandbox(self._kind, spec))
                await sandbox.write(f"{sandbox.workdir}/a.txt", b"hello\n")
                await sandbox.exec(["sh", "-c", _REPOSITORY], timeout=30)
                listener = await sandbox.listen()
                port = proxy.port
                if listener is not None:
                    port = listener.getsockname()[1]
                    await proxy.serve_on(listener)
            yield sandbox, f"http://127.0.0.1:{port}"

    async def _run_program(self, run: ScenarioRun, sandbox: Sandbox, plan: LaunchPlan, adapter: HarnessAdapter) -> None:
        """Run the program until it ends, reaches its time limit or is killed, and add the result to `run.starts`."""
        for name, text in plan.files.items():
            await sandbox.write(f"{sandbox.home}/{name}", text.encode(), 0o600)
        model = run.model
        limit = self._patience * model.scenario.seconds + (model.slow if "slow" in model.faults.values() else 0)
        began = time.monotonic()
        tail = bytearray()
        program = asyncio.create_task(
            sandbox.exec(plan.argv, env=plan.env, cwd=sandbox.workdir, timeout=limit, on_output=tail.extend)
        )
        try:
            if model.scenario.endless:
                await self._wait_for_answer(run, program)
                run.killed = not program.done()
                program.cancel()
            await asyncio.wait({program})
        finally:
            program.cancel()  # no effect if it is done
            await asyncio.wait({program})
        exit_code = None
        if not program.cancelled():
            result = program.result()
            exit_code = None if result.timed_out else result.exit_code
        outcome, detail = adapter.interpret(exit_code, tail[-_TAIL:].decode(errors="replace"))
        run.starts.append(ProgramRun(exit_code, outcome, detail, time.monotonic() - began))

    async def _wait_for_answer(self, run: ScenarioRun, program: asyncio.Task[object]) -> None:
        """Wait until the first request has been in the engine for `_BEFORE_KILL` seconds, or the program has ended."""
        while not program.done():
            if run.requests():
                await asyncio.sleep(_BEFORE_KILL)
                return
            await asyncio.sleep(0.1)
