"""One run of a real program against the real gateway, the front between them, and all that was seen of it."""

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
    """An engine that says what a script tells it."""

    script: Script


@dataclass(frozen=True, slots=True)
class ProgramRun:
    """One start of the program and its end."""

    exit_code: int | None
    """None: it was ended by the clock, or killed on purpose."""
    outcome: ExitOutcome
    detail: str
    output: str
    seconds: float


@dataclass(slots=True)
class ScenarioRun:
    """A scenario as it was played."""

    director: ScriptedModel
    session_id: str = ""
    starts: list[ProgramRun] = field(default_factory=list)
    exchanges: list[Exchange] = field(default_factory=list)
    calls: list[CallRecord] = field(default_factory=list)
    killed: bool = False
    fault: str | None = None
    """Why it could not be played."""
    limit: float = 0.0
    """Seconds that a start may take."""

    @property
    def last(self) -> ProgramRun:
        return self.starts[-1]


class ScenarioRunner:
    """`async with Bench(engine, store) as bench:` has gateway and front; `play` runs one scenario at a time."""

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
        from polar_proxy.gateway import Gateway  # here: a web framework, which `polar --help` should not load

        self._stack = contextlib.AsyncExitStack()
        await self._stack.enter_async_context(self.engine)
        settings = GatewaySettings(host="127.0.0.1", port=0, require_known_keys=True, prompt_mode=self._prompt_mode)
        self.gateway = await self._stack.enter_async_context(Gateway(self.engine, self._store, settings, grace=2))
        self.gateway.observe(lambda record: self._committed.add(record.call_id))
        front = RecordingProxy("127.0.0.1", self.gateway.port, self._committed.__contains__)
        self._front = await self._stack.enter_async_context(front)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    async def play(self, director: ScriptedModel, adapter: HarnessAdapter, installed: Installation) -> ScenarioRun:
        """One scenario: a start of the program, or two, in a sandbox of their own with a session of their own."""
        scenario = director.scenario
        run = ScenarioRun(director)
        self._front.exchanges = run.exchanges
        self._front.cut_due = director.cut_due
        if isinstance(self.engine, ScriptableEngine):
            self.engine.script = director
        from polar_proxy.sessions import hash_key, new_key

        key = new_key()
        session = await self._store.sessions.create(key_hash=hash_key(key), label=None, policy=None, origin="key")
        run.session_id = session.session_id
        run.limit = self._patience * scenario.seconds
        run.limit += director.slow if "slow" in director.faults.values() else 0
        try:
            async with self._sandbox(installed) as (sandbox, url):
                for turn in range(2 if scenario.second else 1):
                    context = LaunchContext(
                        base_url=url + "/v1",
                        api_key=key,
                        model=self.model_of(director),
                        instruction=director.instruction(turn),
                        home=sandbox.home,
                        workdir=sandbox.workdir,
                        max_steps=director.profile.max_steps,
                        resume=turn > 0,
                        context_length=director.profile.window,
                    )
                    plan = adapter.launch(installed, context)
                    run.starts.append(await self._start(run, sandbox, plan, adapter))
                    if run.last.outcome != "ok":
                        break
        finally:
            await self._front.hang_up()
            with contextlib.suppress(TimeoutError):
                await self.gateway.sessions.idle(run.session_id, timeout=_SETTLE_SECONDS)
        run.calls = list(await self._store.calls.of_session(run.session_id))
        return run

    def model_of(self, director: ScriptedModel) -> str:
        return director.profile.model if isinstance(self.engine, ScriptedEngine) else self.engine.info.model

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
                port = self._front.port
                if listener is not None:
                    port = listener.getsockname()[1]
                    await self._front.serve_on(listener)
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
                timeout=run.limit,
                on_output=tail.extend,
            )
        )
        try:
            if run.director.scenario.endless:
                await self._until_answering(run, program)
                run.killed = not program.done()
                program.cancel()
            await asyncio.wait({program})
        finally:
            program.cancel()  # of no effect when it is done
            await asyncio.wait({program})
            await sandbox.kill_all()
        exit_code = None
        if not program.cancelled():
            result = program.result()
            exit_code = None if result.timed_out else result.exit_code
        output = tail[-_TAIL:].decode(errors="replace")
        outcome, detail = adapter.interpret(exit_code, output)
        return ProgramRun(exit_code, outcome, detail, output, time.monotonic() - began)

    async def _until_answering(self, run: ScenarioRun, program: asyncio.Task[object]) -> None:
        """Until the engine has been at the answer for a moment."""
        while not program.done():
            if any(asked.kind == "main" for asked in run.director.asked):
                await asyncio.sleep(_BEFORE_KILL)
                return
            await asyncio.sleep(0.1)


_REPOSITORY = """
git init -q -b main && git add -A &&
git -c user.name=polar -c user.email=polar@localhost commit -q -m 'Initial commit'
"""
