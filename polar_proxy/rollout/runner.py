"""One rollout through its stages: preparing -> running -> scoring -> done | failed | timed_out | cancelled.

Promises: every stage is in the store before it begins; whatever happens the sandboxes are closed, the session's key is
revoked and a final status is written; every recorded call of the rollout is in a trace or excluded with a reason.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from harness_adapters.base import HarnessAdapter, Installed, LaunchContext, LaunchPlan
from polar_proxy.config import RunSettings
from polar_proxy.errors import PolarError
from polar_proxy.gateway import Gateway, hash_key, new_key
from polar_proxy.rewards import Attempt, Score, budget, evaluate, source_of
from polar_proxy.rollout.environment import Environments
from polar_proxy.rollout.traces import build_traces
from polar_proxy.rollout.workspace import lay_out, read_patch
from polar_proxy.store import Store
from polar_proxy.tasks import Task
from polar_proxy.types import CallRecord, EngineInfo
from sandboxes import Mount, Sandbox, SandboxError, open_sandbox
from sandboxes.base import Kind, settle

_PREPARE_SECONDS = 300.0
_SCORE_SECONDS = 300.0
"""For sandboxes and patches; the evaluators' own commands have the task's limit each."""
# OpenHands prints its whole first prompt after the event that tells why it failed.
_TAIL = 200_000


class Listener(Protocol):
    """Who wants to watch rollouts as they go; called in the event loop, so it must be quick."""

    def stage(self, rollout_id: str, status: str, detail: str = "") -> None: ...
    def session(self, rollout_id: str, session_id: str) -> None: ...
    def output(self, rollout_id: str, data: bytes) -> None: ...


@dataclass(frozen=True, slots=True)
class Rollout:
    """One attempt to make."""

    rollout_id: str
    task: Task


@dataclass(frozen=True, slots=True)
class _AgentEnd:
    status: str
    detail: str
    exit_code: int | None
    patch: bytes
    no_patch: str | None


class RolloutRunner:
    """Runs rollouts, any number at once, with one harness, kind of sandbox and gateway."""

    def __init__(
        self,
        store: Store,
        gateway: Gateway,
        adapter: HarnessAdapter,
        installed: Installed,
        sandbox: Kind,
        engine: EngineInfo,
        settings: RunSettings,
        listener: Listener,
    ) -> None:
        self._store = store
        self._gateway = gateway
        self._adapter = adapter
        self._installed = installed
        self._kind: Kind = sandbox
        self._environments = Environments(sandbox)
        self._engine = engine
        self._settings = settings
        self._listener = listener

    async def run(self, rollout: Rollout) -> None:
        """From `preparing` to a final status. Only cancellation comes out, after the status is written."""
        started = time.monotonic()
        session_id: str | None = None
        try:
            await self._stage(rollout, "preparing")
            key = new_key()
            session = await self._store.create_session(
                key_hash=hash_key(key),
                label=None,
                rollout_id=rollout.rollout_id,
                policy=self._policy(),
                origin="rollout",
            )
            session_id = session.session_id
            self._listener.session(rollout.rollout_id, session_id)
            await self._store.set_rollout(rollout.rollout_id, session_id=session_id)
            end = await self._agent(rollout, key)
            await self._store.close_session(session_id)
            await self._stage(rollout, "scoring", exit_code=end.exit_code)
            score = await self._score(rollout, session_id, end)
            await self._reward(rollout, score)
            await self._finish(rollout, session_id, end.status, end.detail, reward=score.reward)
        except asyncio.CancelledError:
            await settle(self._cancelled(rollout, session_id))
            raise
        except (PolarError, SandboxError, OSError, TimeoutError) as error:
            after = f"after {time.monotonic() - started:.0f} s"
            text = str(error) or f"{type(error).__name__} {after}"
            await self._finish(rollout, session_id, "failed", text)

    async def _cancelled(self, rollout: Rollout, session_id: str | None) -> None:
        row = await self._store.rollout(rollout.rollout_id)
        if row is None or not row.final:  # final: the cancellation came when all was done
            await self._finish(rollout, session_id, "cancelled", "cancelled by the user")

    def _policy(self) -> dict[str, float | int]:
        # Sampled from the whole distribution, so that the recorded log-probabilities are those of the samples.
        return {
            "temperature": self._settings.temperature,
            "top_p": 1.0,
            "top_k": 0,
            "max_tokens": self._settings.max_tokens,
        }

    async def _agent(self, rollout: Rollout, key: str) -> _AgentEnd:
        task = rollout.task
        spec = await self._environments.spec(
            task,
            memory_mb=4096,
            labels={"polar.rollout": rollout.rollout_id},
            mounts=_mounts(self._installed.mounts),
        )
        async with contextlib.AsyncExitStack() as stack:
            async with asyncio.timeout(_PREPARE_SECONDS):
                sandbox = await stack.enter_async_context(await open_sandbox(self._kind, spec))
                base = await lay_out(task, sandbox, await self._environments.bundle(task))
                url = await stack.enter_async_context(self._reachable(sandbox))
                plan = self._plan(task, sandbox, url, key)
                for name, text in plan.files.items():
                    await sandbox.write(f"{sandbox.home}/{name}", text.encode(), 0o600)
            await self._stage(rollout, "running")
            result = await sandbox.exec(
                plan.argv,
                env=plan.env,
                cwd=sandbox.workdir,
                timeout=min(self._settings.timeout, task.agent_seconds or self._settings.timeout),
                on_output=lambda data: self._listener.output(rollout.rollout_id, data),
            )
            # Nothing that the agent left running may touch the workspace while it is read.
            await sandbox.kill_all()
            log = result.stdout + result.stderr
            await self._store.add_artifact(rollout.rollout_id, "agent.log", log)
            exit_code = None if result.timed_out else result.exit_code
            outcome, detail = self._adapter.interpret(exit_code, log[-_TAIL:].decode(errors="replace"))
            patch, no_patch = await read_patch(sandbox, base, snapshot=task.environment.snapshot)
            await self._store.add_artifact(rollout.rollout_id, "patch.diff", patch)
        status = {"ok": "done", "failed": "failed", "timed_out": "timed_out"}[outcome]
        return _AgentEnd(status, detail, exit_code, patch, no_patch)

    def _plan(self, task: Task, sandbox: Sandbox, url: str, key: str) -> LaunchPlan:
        return self._adapter.launch(
            self._installed,
            LaunchContext(
                base_url=url + "/v1",
                api_key=key,
                model=self._engine.model,
                context_length=self._engine.context_length,
                instruction=task.instruction,
                home=sandbox.home,
                workdir=sandbox.workdir,
            ),
        )

    @contextlib.asynccontextmanager
    async def _reachable(self, sandbox: Sandbox) -> AsyncIterator[str]:
        """The gateway's URL as seen from inside, which is all that a sandbox with its own network can reach."""
        listener: socket.socket | None = await sandbox.listen()
        if listener is None:
            yield self._gateway.url
            return
        port = listener.getsockname()[1]
        await self._gateway.serve_on(listener)
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            await self._gateway.stop_serving_on(listener)

    async def _score(self, rollout: Rollout, session_id: str, end: _AgentEnd) -> Score:
        task = rollout.task
        calls: list[CallRecord] = []
        if any(evaluation.kind == "python" for evaluation in task.evaluators):
            # A call that was in flight when the agent died is committed a moment later.
            await self._gateway.sessions.idle(session_id, timeout=30)
            calls = await self._store.calls(session_id)
        labels = {"polar.rollout": rollout.rollout_id}
        async with asyncio.timeout(_SCORE_SECONDS + budget(task)):
            score = await evaluate(
                Attempt(task, end.patch, end.exit_code, calls), lambda: self._environments.fresh(task, labels)
            )
        if end.no_patch is not None:
            score.detail["no_patch"] = end.no_patch
        await self._store.add_artifact(rollout.rollout_id, "tests.log", score.log)
        return score

    async def _reward(self, rollout: Rollout, score: Score) -> None:
        source = source_of(rollout.task)
        for call_id, value in score.calls.items():
            await self._store.add_reward(rollout.rollout_id, value, source, {}, call_id=call_id)
        await self._store.add_reward(rollout.rollout_id, score.reward, source, score.detail)

    async def _finish(
        self,
        rollout: Rollout,
        session_id: str | None,
        status: str,
        detail: str,
        *,
        reward: float | None = None,
    ) -> None:
        lost = 0
        if session_id is not None:
            await self._store.close_session(session_id)
            # A call that was in flight when the agent died is committed a moment later.
            await self._gateway.sessions.idle(session_id, timeout=30)
            lost = self._gateway.sessions.lost(session_id)
            await build_traces(self._store, session_id, rollout.rollout_id, reward=reward, incomplete=lost > 0)
            self._gateway.sessions.forget(session_id)
        if lost:
            detail = f"{lost} call(s) were answered but not recorded; not to be trained on. {detail}"
        await self._stage(
            rollout, status, detail=detail, error=None if status == "done" and not lost else detail, incomplete=lost > 0
        )

    async def _stage(
        self,
        rollout: Rollout,
        status: str,
        *,
        detail: str = "",
        exit_code: int | None = None,
        error: str | None = None,
        incomplete: bool = False,
    ) -> None:
        changes: dict[str, object] = {"status": status}
        if exit_code is not None:
            changes["exit_code"] = exit_code
        if error is not None:
            changes["error"] = error
        if incomplete:
            changes["incomplete"] = True
        await self._store.set_rollout(rollout.rollout_id, **changes)  # type: ignore[arg-type]
        self._listener.stage(rollout.rollout_id, status, detail)


def _mounts(paths: tuple[Path, ...]) -> tuple[Mount, ...]:
    return tuple(Mount(path, str(path)) for path in paths)
