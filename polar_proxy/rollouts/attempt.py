"""One attempt at a rollout: preparing -> ready -> running -> scoring -> done | failed | timed_out.

Promises:

* every stage is in the store before it begins, and waiting for one is charged to nobody's time;
* whatever happens the sandboxes are closed, the session's key is revoked, and the scheduler is told what it was: a
  result is written as the final status; InfrastructureError means another attempt; a cancellation comes out;
* every recorded call of a rollout that has ended is in a trace or excluded with a reason.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import socket
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from harness_adapters.base import HarnessError, InstallError, LaunchContext, LaunchPlan
from polar_proxy.engines.base import Engine
from polar_proxy.errors import BadTaskError, EngineError, PolarError, StoreError
from polar_proxy.gateway import Gateway
from polar_proxy.rewards import EvaluationInput, SandboxFactory, Score, evaluate, reward_source, scoring_seconds
from polar_proxy.rollout_spec import RolloutSpec
from polar_proxy.rollouts.early_stop import CAUSE as LOST
from polar_proxy.rollouts.early_stop import early_stop_check, stop_early
from polar_proxy.rollouts.git import WorkspaceError
from polar_proxy.rollouts.harnesses import HarnessInstaller, ReadyHarness
from polar_proxy.rollouts.pool import SandboxPool
from polar_proxy.rollouts.prebuilt import PrebuiltImageCache
from polar_proxy.rollouts.stage_limits import AdmissionRequest
from polar_proxy.rollouts.task_sandboxes import TaskSandboxes
from polar_proxy.rollouts.traces import supersede_earlier
from polar_proxy.rollouts.worker import InfrastructureError, StageLimits
from polar_proxy.rollouts.workspace import TaskNotPossibleError, prepare_workspace, read_patch
from polar_proxy.sessions import hash_key, new_key
from polar_proxy.store import RolloutStatus, Store
from polar_proxy.store.stages import Claim, ClaimLostError
from polar_proxy.tasks import Task, task_from_json
from polar_proxy.traces.operations import build_traces
from polar_proxy.types import CallRecord
from sandboxes import Mount, Sandbox, SandboxError, choose
from sandboxes.base import SandboxKind, uncancellable

log = logging.getLogger(__name__)

_PREPARE_SECONDS = 300.0
_SCORE_SECONDS = 300.0
"""For sandboxes and patches; the evaluators' own commands have the task's limit each."""
_IDLE_SECONDS = 30.0
"""A call that was in flight when the agent died is committed a moment later."""
_RELEASE_IDLE_SECONDS = 5.0
"""The same, on other gateways, where nobody waits for the traces: a cancellation shall not take long."""
# OpenHands prints its whole first prompt after the event that tells why it failed.
_LOG_TAIL_BYTES = 200_000
_DISK_ERRNOS = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO}


class ProgressReporter(Protocol):
    """Who wants to watch rollouts as they go; called in the event loop, so it must be quick."""

    def stage(self, rollout_id: str, status: str, detail: str = "") -> None: ...
    def session(self, rollout_id: str, session_id: str) -> None: ...
    def output(self, rollout_id: str, data: bytes) -> None: ...


class RemoteScorer(Protocol):
    """Judging on another machine (`cluster.scoring`)."""

    async def __call__(self, attempt: EvaluationInput, kind: SandboxKind, labels: Mapping[str, str]) -> Score:
        """Wait until some machine has room, which is charged to nobody's time, and judge there.

        Raises InfrastructureError where that failed."""
        ...


@dataclass(slots=True)
class RunningAttempt:
    """An attempt while it goes on."""

    held: Claim
    gates: StageLimits
    ticket: AdmissionRequest
    session_id: str | None = None
    away: bool = False
    """It is scored on whatever machine has room."""

    @property
    def rollout_id(self) -> str:
        return self.held.rollout_id


@dataclass(frozen=True, slots=True)
class PreparedAttempt:
    """A sandbox with the workspace and the agent's files in it."""

    task: Task
    recipe: RolloutSpec
    harness: ReadyHarness
    environments: TaskSandboxes
    sandbox: Sandbox
    base: str
    plan: LaunchPlan


@dataclass(frozen=True, slots=True)
class AgentResult:
    task: Task
    environments: TaskSandboxes
    status: RolloutStatus
    detail: str
    exit_code: int | None
    patch: bytes
    no_patch: str | None
    masked: bool
    lost: bool
    """It was ended early."""


class AttemptRunner:
    """The scheduler's attempts: any number at once, with any harness and kind of sandbox, on one gateway."""

    def __init__(
        self,
        store: Store,
        gateway: Gateway,
        engine: Engine,
        harnesses: HarnessInstaller,
        pool: SandboxPool,
        listener: ProgressReporter,
        elsewhere: RemoteScorer | None = None,
        prebuilt: PrebuiltImageCache | None = None,
    ) -> None:
        """`elsewhere`: who judges what finds no place to be scored in here. `prebuilt`: images that hold the agent, for
        docker sandboxes; None: it is mounted."""
        self._store = store
        self._gateway = gateway
        self._engine = engine
        self._harnesses = harnesses
        self._pool = pool
        self._listener = listener
        self._elsewhere = elsewhere
        self._baked = prebuilt
        self._environments: dict[SandboxKind, TaskSandboxes] = {}

    async def __call__(self, held: Claim, gates: StageLimits, ticket: AdmissionRequest) -> None:
        """See `scheduler.EvaluationInput`."""
        one = RunningAttempt(held, gates, ticket)
        try:
            end = await self._agent(one)
            async with self._place_to_score(one):
                stage = {"done": "ok"}.get(end.status, end.status)
                await self._enter(one, "scoring", outcome=stage, exit_code=end.exit_code)
                score = await self._score(one, end)
                await self._reward(one, end.task, score)
                await self._finish(one, end, score.reward)
        except (asyncio.CancelledError, InfrastructureError, ClaimLostError):
            await uncancellable(self._leave(one))
            raise
        except StoreError as error:
            await uncancellable(self._leave(one))
            raise InfrastructureError("store", str(error)) from error
        except (PolarError, HarnessError) as error:  # what no other attempt would change
            await self._give_up(one, error)

    # Stages

    async def _agent(self, one: RunningAttempt) -> AgentResult:
        """From a place to prepare in to the patch. The sandbox is closed when this is left, in whatever way."""
        row = await self._store.tasks.get(one.held.task_id)
        assert row is not None
        task = task_from_json(row.spec)
        early_stop_check(task.metadata)  # what is wrong with it is said before anything begins
        one.ticket = replace(one.ticket, memory_mb=task.environment.memory_mb)
        async with contextlib.AsyncExitStack() as stack:
            async with one.gates.preparing.enter(one.ticket):
                key = new_key()
                await self._open_session(one, key)
                ready = await self._prepare(one, task, key, stack)
            await self._enter(one, "ready")
            async with one.gates.running.enter(one.ticket):
                await self._enter(one, "running")
                with infrastructure_errors("sandbox"):
                    end = await self._run(one, ready)
                    await stack.aclose()
            return end

    async def _prepare(
        self, one: RunningAttempt, task: Task, key: str, stack: contextlib.AsyncExitStack
    ) -> PreparedAttempt:
        """Nothing that happens before the agent begins is its fault."""
        recipe = RolloutSpec.read(one.held.config)
        with infrastructure_errors("harness"):
            harness = await self._harnesses.get(recipe.harness)
        with infrastructure_errors("sandbox"):
            kind: SandboxKind = (await asyncio.to_thread(choose, recipe.sandbox)).kind
            if kind != one.held.sandbox:
                await self._store.rollouts.update(one.rollout_id, sandbox=kind)
            if kind not in self._environments:
                self._environments[kind] = TaskSandboxes(kind, opener=self._pool.take)
            environments = self._environments[kind]
            spec = await environments.spec(
                task,
                memory_mb=4096,
                labels={"polar.rollout": one.rollout_id},
                mounts=_mounts(harness.installed.mounts),
            )
            if kind == "docker" and self._baked is not None:
                spec = await self._baked.spec(spec, harness.installed.mounts)
            async with asyncio.timeout(_PREPARE_SECONDS):
                sandbox = await stack.enter_async_context(await self._pool.take(kind, spec))
                base = await prepare_workspace(task, sandbox, await environments.bundle(task))
                url = await stack.enter_async_context(self._reachable(sandbox))
                plan = self._plan(harness, task, sandbox, url, key)
                for name, text in plan.files.items():
                    await sandbox.write(f"{sandbox.home}/{name}", text.encode(), 0o600)
        return PreparedAttempt(task, recipe, harness, environments, sandbox, base, plan)

    async def _run(self, one: RunningAttempt, ready: PreparedAttempt) -> AgentResult:
        task, sandbox = ready.task, ready.sandbox
        # Opened while the agent works, so that it is there when the patch is.
        self._pool.expect(sandbox.kind, await ready.environments.evaluator(task, _labels(one)))
        limit = ready.recipe.timeout
        async with stop_early(sandbox, early_stop_check(task.metadata)) as early:
            result = await sandbox.exec(
                ready.plan.argv,
                env=ready.plan.env,
                cwd=sandbox.workdir,
                timeout=min(limit, task.agent_seconds or limit),
                on_output=lambda data: self._listener.output(one.rollout_id, data),
            )
        # Nothing that the agent left running may touch the workspace while it is read.
        await sandbox.kill_all()
        said = result.stdout + result.stderr
        await self._store.artifacts.add(one.rollout_id, "agent.log", said)
        exit_code = None if result.timed_out or early.reason is not None else result.exit_code
        if early.reason is None:
            outcome, detail = ready.harness.adapter.interpret(
                exit_code, said[-_LOG_TAIL_BYTES:].decode(errors="replace")
            )
        else:
            outcome, detail = "ok", early.reason
        if outcome != "ok" and (reason := await self._engine_failed(one)) is not None:
            raise InfrastructureError("engine", f"the agent {outcome.replace('_', ' ')}, and {reason}")
        patch, no_patch = await read_patch(sandbox, ready.base, snapshot=task.environment.snapshot)
        await self._store.artifacts.add(one.rollout_id, "patch.diff", patch)
        statuses: dict[str, RolloutStatus] = {"ok": "done", "failed": "failed", "timed_out": "timed_out"}
        trained = ready.recipe.train_timed_out or bool(task.metadata.get("train_timed_out"))
        masked = outcome == "timed_out" and not trained
        status, lost = statuses[outcome], early.reason is not None
        return AgentResult(task, ready.environments, status, detail, exit_code, patch, no_patch, masked, lost)

    async def _score(self, one: RunningAttempt, end: AgentResult) -> Score:
        task = end.task
        calls: list[CallRecord] = []
        assert one.session_id is not None
        if any(evaluation.kind == "python" for evaluation in task.evaluators):
            with contextlib.suppress(TimeoutError):  # what is still in flight will make the rollout incomplete
                await self._gateway.idle(one.session_id, _IDLE_SECONDS)
            calls = await self._store.calls.of_session(one.session_id)
        attempt = EvaluationInput(task, end.patch, end.exit_code, calls)
        try:
            score = await self._evaluate(one, end, attempt)
        except InfrastructureError as error:
            # The agent's work is done, and may have taken an hour: its judge gets a second sandbox first.
            log.warning("rollout %s: %s; scoring it once more", one.rollout_id, error)
            score = await self._evaluate(one, end, attempt)
        if end.no_patch is not None:
            score.detail["no_patch"] = end.no_patch
        await self._store.artifacts.add(one.rollout_id, "tests.log", score.log)
        return score

    @contextlib.asynccontextmanager
    async def _place_to_score(self, one: RunningAttempt) -> AsyncIterator[None]:
        """Here, unless it would have to wait and there are other machines."""
        if self._elsewhere is not None and one.gates.scoring.full:
            one.away = True
            yield
        else:
            async with one.gates.scoring.enter(one.ticket):
                yield

    async def _evaluate(self, one: RunningAttempt, end: AgentResult, attempt: EvaluationInput) -> Score:
        if one.away and self._elsewhere is not None:
            return await self._elsewhere(attempt, end.environments.kind, _labels(one))
        return await score_attempt(attempt, lambda: end.environments.fresh(end.task, _labels(one)))

    async def _reward(self, one: RunningAttempt, task: Task, score: Score) -> None:
        source = reward_source(task)
        for call_id, value in score.calls.items():
            await self._store.rewards.add(one.rollout_id, value, source, {}, call_id=call_id)
        await self._store.rewards.add(one.rollout_id, score.reward, source, score.detail)

    # The end

    async def _finish(self, one: RunningAttempt, end: AgentResult, reward: float | None) -> None:
        causes = {"done": LOST if end.lost else None, "failed": "agent", "timed_out": "agent_timeout"}
        lost = await self._close_session(one)
        await self._write_traces(one, reward, incomplete=lost is not None)
        detail = end.detail if lost is None else f"{lost}; not to be trained on. {end.detail}"
        await self._store.rollouts.end(
            one.held,
            end.status,
            cause=causes[end.status],
            error=None if end.status == "done" and lost is None else detail,
            incomplete=lost is not None,
            masked=end.masked,
        )
        self._listener.stage(one.rollout_id, end.status, detail)

    async def _give_up(self, one: RunningAttempt, error: Exception) -> None:
        cause = "task" if isinstance(error, (TaskNotPossibleError, BadTaskError)) else _cause_of(error)
        lost = await self._close_session(one)
        await self._write_traces(one, None, incomplete=lost is not None)
        detail = str(error) if lost is None else f"{lost}; not to be trained on. {error}"
        await self._store.rollouts.end(
            one.held, "failed", outcome="failed", cause=cause, error=detail, incomplete=lost is not None
        )
        self._listener.stage(one.rollout_id, "failed", detail)

    async def _leave(self, one: RunningAttempt) -> None:
        """Revoke the key and wait for what is in flight; the scheduler decides what becomes of the calls."""
        try:
            if await self._close_session(one, elsewhere=_RELEASE_IDLE_SECONDS) is not None:
                await self._store.rollouts.update(one.rollout_id, incomplete=True)
        except StoreError:
            log.exception("rollout %s: its session cannot be closed", one.rollout_id)

    async def _close_session(self, one: RunningAttempt, *, elsewhere: float = _IDLE_SECONDS) -> str | None:
        """Returns what was lost of it, if anything was. For calls in flight on other gateways it waits as long as
        `elsewhere` says, in seconds."""
        if one.session_id is None:
            return None
        await self._store.sessions.close(one.session_id)
        self._gateway.end_session(one.session_id)
        return await self._gateway.forget_session(one.session_id, _IDLE_SECONDS, timeout_elsewhere=elsewhere)

    async def _write_traces(self, one: RunningAttempt, reward: float | None, *, incomplete: bool) -> None:
        if one.session_id is not None:
            await build_traces(self._store, one.session_id, one.rollout_id, reward=reward, incomplete=incomplete)
            if one.held.attempt > 1:
                await supersede_earlier(self._store, one.rollout_id, one.session_id)

    # Parts

    async def _open_session(self, one: RunningAttempt, key: str) -> None:
        recipe = RolloutSpec.read(one.held.config)
        session = await self._store.sessions.create(
            key_hash=hash_key(key),
            label=None,
            rollout_id=one.rollout_id,
            policy=recipe.sampling_policy(),
            origin="rollout",
        )
        one.session_id = session.session_id
        self._listener.session(one.rollout_id, session.session_id)
        await self._enter(one, "preparing", session_id=session.session_id)

    async def _enter(
        self,
        one: RunningAttempt,
        stage: RolloutStatus,
        *,
        outcome: str = "ok",
        session_id: str | None = None,
        exit_code: int | None = None,
    ) -> None:
        await self._store.rollouts.enter_stage(
            one.held, stage, outcome=outcome, session_id=session_id, exit_code=exit_code
        )
        self._listener.stage(one.rollout_id, stage)

    async def _engine_failed(self, one: RunningAttempt) -> str | None:
        """Why no agent could have done better, or None: the engine is gone, or failed the last call that it was asked.
        (What it failed before and then answered is the agent's to bear; what the agent left is nobody's fault.)"""
        try:
            gone = await self._engine.health()
        except EngineError as error:
            gone = str(error)
        if gone is not None:
            return f"the engine is gone: {gone}"
        assert one.session_id is not None
        calls = [call for call in await self._store.calls.summaries(one.session_id) if call.status != "client_gone"]
        if calls and calls[-1].status == "upstream_error" and (calls[-1].http_status or 0) >= 500:
            return f"the engine failed its last call: {calls[-1].error}"
        return None

    def _plan(self, harness: ReadyHarness, task: Task, sandbox: Sandbox, url: str, key: str) -> LaunchPlan:
        info = self._engine.info
        return harness.adapter.launch(
            harness.installed,
            LaunchContext(
                base_url=url + "/v1",
                api_key=key,
                model=info.model,
                context_length=info.context_length,
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


async def score_attempt(attempt: EvaluationInput, fresh: SandboxFactory) -> Score:
    """The score that the task's evaluators give, within their time. Raises InfrastructureError."""
    with infrastructure_errors("evaluator"):
        async with asyncio.timeout(_SCORE_SECONDS + scoring_seconds(attempt.task)):
            return await evaluate(attempt, fresh)


@contextlib.contextmanager
def infrastructure_errors(what: str) -> Iterator[None]:
    """What fails in here is no fault of the agent's."""
    try:
        yield
    except (SandboxError, WorkspaceError, InstallError, TimeoutError, OSError) as error:
        cause = "disk" if isinstance(error, OSError) and error.errno in _DISK_ERRNOS else what
        words = str(error) or f"{type(error).__name__} with the {what}"
        raise InfrastructureError(cause, words) from error


def _cause_of(error: Exception) -> str:
    return "harness" if isinstance(error, HarnessError) else type(error).__name__.removesuffix("Error").lower()


def _labels(one: RunningAttempt) -> dict[str, str]:
    return {"polar.rollout": one.rollout_id}


def _mounts(paths: tuple[Path, ...]) -> tuple[Mount, ...]:
    return tuple(Mount(path, str(path)) for path in paths)
