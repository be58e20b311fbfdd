"""Run a scenario: a real program in a sandbox against the real gateway, with a recording proxy between them."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from types import TracebackType
from typing import Protocol, Self, runtime_checkable

from harness_adapters.base import ExitOutcome, HarnessAdapter, Installation, LaunchContext, LaunchPlan
from polar_proxy.config import GatewaySettings
from polar_proxy.conformance.recording_proxy import Exchange, RecordingProxy
from polar_proxy.conformance.scripted_model import ScriptedModel
from polar_proxy.engines.base import Engine
from polar_proxy.engines.scripted import Script, ScriptedEngine
from polar_proxy.store import Store
from polar_proxy.types import CallRecord, PromptMode
from sandboxes import Mount, ResourceLimits, Sandbox, SandboxSpec, open_sandbox
from sandboxes.base import SandboxKind

_TAIL = 200_000
_PREPARE_SECONDS = 120.0
_SETTLE_SECONDS = 30.0
_BEFORE_KILL = 1.5


@runtime_checkable
class ScriptableEngine(Protocol):
    """An engine whose answers come from a script."""

    script: Script


@dataclass(frozen=True, slots=True)
class ProgramRun:
    """One start of the program and its end."""

    exit_code: int | None
    """None if it reached its time limit or was killed on purpose."""
    outcome: ExitOutcome
    detail: str
    output: str
    seconds: float


@dataclass(slots=True)
class ScenarioRun:
    """One scenario with one harness, and everything that was recorded of it."""

    model: ScriptedModel
    session_id: str = ""
    starts: list[ProgramRun] = field(default_factory=list)
    exchanges: list[Exchange] = field(default_factory=list)
    calls: list[CallRecord] = field(default_factory=list)
    killed: bool = False
    fault: str | None = None
    """Why the scenario could not be run."""
    time_limit: float = 0.0
    """Seconds that a start may take."""

    @property
    def last(self) -> ProgramRun:
        return self.starts[-1]


class ScenarioRunner:
    """`async with ScenarioRunner(engine, store, sandbox) as runner:` starts a gateway and a recording proxy in front of
    it.

    `play` runs one scenario at a time. `patience` multiplies all time limits.
    """

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
        from polar_proxy.gateway import Gateway  # imported here to keep a web framework out of `polar --help`

        self._stack = contextlib.AsyncExitStack()
        await self._stack.enter_async_context(self.engine)
        settings = GatewaySettings(host="127.0.0.1", port=0, require_known_keys=True, prompt_mode=self._prompt_mode)
        self.gateway = await self._stack.enter_async_context(Gateway(self.engine, self._store, settings, grace=2))
        self.gateway.observe(lambda record: self._committed.add(record.call_id))
        proxy = RecordingProxy("127.0.0.1", self.gateway.port, self._committed.__contains__)
        self._proxy = await self._stack.enter_async_context(proxy)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    async def play(self, model: ScriptedModel, adapter: HarnessAdapter, installed: Installation) -> ScenarioRun:
        """Run the model's scenario: start the program once or twice, in a new sandbox and a new session."""
        scenario = model.scenario
        run = ScenarioRun(model)
        self._proxy.exchanges = run.exchanges
        self._proxy.should_cut = model.should_cut
        if isinstance(self.engine, ScriptableEngine):
            self.engine.script = model
        from polar_proxy.sessions import hash_key, new_key

        key = new_key()
        session = await self._store.sessions.create(key_hash=hash_key(key), label=None, policy=None, origin="key")
        run.session_id = session.session_id
        run.time_limit = self._patience * scenario.seconds
        run.time_limit += model.slow if "slow" in model.faults.values() else 0
        try:
            async with self._sandbox(installed) as (sandbox, url):
                for turn in range(2 if scenario.second else 1):
                    context = LaunchContext(
                        base_url=url + "/v1",
                        api_key=key,
                        model=self._model_name(model),
                        instruction=model.instruction(turn),
                        home=sandbox.home,
                        workdir=sandbox.workdir,
                        max_steps=model.profile.max_steps,
                        resume=turn > 0,
                        context_length=model.profile.context_window,
                    )
                    plan = adapter.launch(installed, context)
                    run.starts.append(await self._start(run, sandbox, plan, adapter))
                    if run.last.outcome != "ok":
                        break
        finally:
            await self._proxy.close_connections()
            with contextlib.suppress(TimeoutError):
                await self.gateway.sessions.idle(run.session_id, timeout=_SETTLE_SECONDS)
        run.calls = list(await self._store.calls.of_session(run.session_id))
        return run

    def _model_name(self, model: ScriptedModel) -> str:
        return model.profile.model if isinstance(self.engine, ScriptedEngine) else self.engine.info.model

    @contextlib.asynccontextmanager
    async def _sandbox(self, installed: Installation) -> AsyncIterator[tuple[Sandbox, str]]:
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
                port = self._proxy.port
                if listener is not None:
                    port = listener.getsockname()[1]
                    await self._proxy.serve_on(listener)
            yield sandbox, f"http://127.0.0.1:{port}"

    async def _start(self, run: ScenarioRun, sandbox: Sandbox, plan: LaunchPlan, adapter: HarnessAdapter) -> ProgramRun:
        for name, text in plan.files.items():
            await sandbox.write(f"{sandbox.home}/{name}", text.encode(), 0o600)
        began = time.monotonic()
        tail = bytearray()
        program = asyncio.create_task(
            sandbox.exec(
                plan.argv,
                env=plan.env,
                cwd=sandbox.workdir,
                timeout=run.time_limit,
                on_output=tail.extend,
            )
        )
        try:
            if run.model.scenario.endless:
                await self._wait_for_answer(run, program)
                run.killed = not program.done()
                program.cancel()
            await asyncio.wait({program})
        finally:
            program.cancel()  # no effect if it is done
            await asyncio.wait({program})
            await sandbox.kill_all()
        exit_code = None
        if not program.cancelled():
            result = program.result()
            exit_code = None if result.timed_out else result.exit_code
        output = tail[-_TAIL:].decode(errors="replace")
        outcome, detail = adapter.interpret(exit_code, output)
        return ProgramRun(exit_code, outcome, detail, output, time.monotonic() - began)

    async def _wait_for_answer(self, run: ScenarioRun, program: asyncio.Task[object]) -> None:
        """Wait until the engine has been answering for a moment."""
        while not program.done():
            if any(request.kind == "main" for request in run.model.requests):
                await asyncio.sleep(_BEFORE_KILL)
                return
            await asyncio.sleep(0.1)


_REPOSITORY = """
git init -q -b main && git add -A &&
git -c user.name=polar -c user.email=polar@localhost commit -q -m 'Initial commit'
"""
