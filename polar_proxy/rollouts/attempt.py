"""One attempt at a rollout, top to bottom: preparing -> ready -> running -> scoring -> done | failed | timed_out.

`AttemptRunner.run` is the whole attempt, stage by stage. Promises:

* every stage is recorded in the store before it starts, and the wait for a stage counts towards no time limit;
* however the attempt ends, its sandboxes are closed and its session key is revoked;
* a result is recorded as the rollout's final status; InfrastructureError asks the worker for another attempt;
  UnsafeSandboxError means that this machine must make no more attempts; a cancellation is passed on;
* every recorded call of a rollout that has ended is in a trace, or excluded with a reason.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

import orjson

from harness_adapters.base import ExitOutcome, HarnessError, LaunchContext
from polar_proxy.allowed_code import NO_CODE, AllowedCode
from polar_proxy.config import SandboxSettings
from polar_proxy.engines.base import Engine
from polar_proxy.errors import BadTaskError, EngineError, PolarError, StoreError
from polar_proxy.gateway import Gateway
from polar_proxy.rewards import EvaluationInput, Score, apply_sign_policy, reward_source
from polar_proxy.rollout_spec import RolloutSpec
from polar_proxy.rollouts.admission import AdmissionRequest, StageLimits
from polar_proxy.rollouts.agent_patch import read_patch, save_base
from polar_proxy.rollouts.dialogue import AgentRun, open_user, play_dialogue, read_last_answer
from polar_proxy.rollouts.harnesses import HarnessInstaller, PrebuiltImageCache
from polar_proxy.rollouts.infrastructure import InfrastructureError, UnsafeSandboxError, infrastructure_errors
from polar_proxy.rollouts.interception import SandboxInterception
from polar_proxy.rollouts.pool import SandboxPool
from polar_proxy.rollouts.prepared_agent import PreparedAgent, write_files
from polar_proxy.rollouts.recovery import exclude_earlier_attempts
from polar_proxy.rollouts.scoring import score_work
from polar_proxy.rollouts.stopping import (
    OVER_BUDGET,
    STOPPED_EARLY,
    EarlyStopCheck,
    early_stop_check,
    stop_early,
    stop_over_budget,
)
from polar_proxy.rollouts.task_sandboxes import TaskSandboxes
from polar_proxy.rollouts.workspace import TaskNotPossibleError, prepare_workspace
from polar_proxy.sessions.identity import hash_key, new_key
from polar_proxy.store import RolloutStatus, Store
from polar_proxy.store.repositories.rollouts import Claim, ClaimLostError
from polar_proxy.tasks import Task, check_task, task_from_json
from polar_proxy.terminal import LogContext
from polar_proxy.traces.operations import build_traces
from polar_proxy.types import CallRecord
from sandboxes.base import Mount, Sandbox, SandboxKind, uncancellable
from sandboxes.choice import choose
from sandboxes.self_test import SelfTests

log = logging.getLogger(__name__)

_PREPARE_SECONDS = 300.0
_IDLE_SECONDS = 30.0
"""Maximum time to wait for calls that are still in flight when the agent has ended. Most end within a moment."""
_RELEASE_IDLE_SECONDS = 5.0
"""Maximum time to wait for calls in flight on other gateways when the attempt is abandoned. Shorter than
`_IDLE_SECONDS`, because an abandoned attempt gets no traces."""
_PROVIDER_LIMITS = frozenset({402, 429})
"""HTTP statuses with which a provider refuses every request while a limit (credit or rate) is reached."""
_CAUSES: Mapping[ExitOutcome, str | None] = {"ok": None, "failed": "agent", "timed_out": "agent_timeout"}
"""The cause that is recorded for a rollout's end, by the outcome of its agent."""


class ProgressReporter(Protocol):
    """Receives the progress of rollouts. Called in the event loop, so it must be quick."""

    def stage(self, rollout_id: str, status: str, detail: str = "", reward: float | None = None) -> None: ...
    def session(self, rollout_id: str, session_id: str) -> None: ...


RemoteScorer = Callable[[EvaluationInput, SandboxKind, Mapping[str, str]], Awaitable[Score]]
"""Waits until another machine has capacity, then scores there (`rollouts/cluster/node.py`). The wait uses up no time
limit. Raises InfrastructureError if the other machine cannot score."""


@dataclass(slots=True)
class RunningAttempt:
    """State of an attempt while it runs."""

    claim: Claim
    session_id: str | None = None
    """Id of the session that records the agent's calls; None until it is open."""

    @property
    def rollout_id(self) -> str:
        return self.claim.rollout_id

    @property
    def labels(self) -> dict[str, str]:
        return {"polar.rollout": self.rollout_id}


@dataclass(frozen=True, slots=True)
class AttemptInput:
    """The task and the options of the rollout, as stored."""

    task: Task
    spec: RolloutSpec
    early_stop: EarlyStopCheck | None


@dataclass(frozen=True, slots=True)
class AgentResult:
    """How the agent's run ended, and the patch that it made."""

    outcome: ExitOutcome
    cause: str | None
    detail: str
    exit_code: int | None
    patch: bytes
    no_patch: str | None
    """Why the patch could not be read, or None."""
    masked: bool

    @property
    def status(self) -> RolloutStatus:
        return "done" if self.outcome == "ok" else self.outcome


@dataclass(frozen=True)
class AttemptRunner:
    """Runs attempts, any number at once, with any harness and kind of sandbox, against one gateway."""

    store: Store
    gateway: Gateway
    engine: Engine
    harnesses: HarnessInstaller
    pool: SandboxPool
    limits: StageLimits
    reporter: ProgressReporter
    remote_scorer: RemoteScorer | None
    """Scores on another machine when scoring here would have to wait. None: scoring waits."""
    prebuilt: PrebuiltImageCache | None
    """Provides docker images that contain the agent. None: the agent is mounted."""
    sandbox_settings: SandboxSettings
    self_tests: SelfTests
    interception: SandboxInterception
    code: AllowedCode = NO_CODE
    """The Python code that tasks may refer to by name."""
    _task_sandboxes: dict[SandboxKind, TaskSandboxes] = field(default_factory=dict)

    async def run(self, claim: Claim) -> None:
        """Run one attempt to a final status in the store (see `worker.AttemptFunction`)."""
        with LogContext(rollout_id=claim.rollout_id):
            await self._run(RunningAttempt(claim))

    async def _run(self, attempt: RunningAttempt) -> None:
        claim = attempt.claim
        try:
            given = await self._read_input(claim)
            memory_mb = given.task.environment.memory_mb
            request = AdmissionRequest(claim.rollout_id, claim.group_id, claim.job_id, memory_mb)
            async with contextlib.AsyncExitStack() as sandbox_stack:
                async with self.limits.preparing.enter(request):
                    key = await self._open_session(attempt, given.spec)
                    agent = await self._prepare(attempt, given, key, sandbox_stack)
                await self._enter_stage(attempt, "ready")
                async with self.limits.running.enter(request):
                    await self._enter_stage(attempt, "running")
                    with infrastructure_errors("sandbox"):
                        result = await self._run_agent(attempt, given, agent)
                        await sandbox_stack.aclose()
            # Scoring happens on another machine if it would have to wait here.
            remote = self.remote_scorer if self.limits.scoring.full else None
            async with self.limits.scoring.enter(request) if remote is None else contextlib.nullcontext():
                await self._enter_stage(attempt, "scoring", outcome=result.outcome, exit_code=result.exit_code)
                score = await self._score(attempt, given.task, agent, result, remote)
                score = apply_sign_policy(score, given.spec.signs)
                await self._record_reward(attempt, given.task, score)
                excluded = given.spec.signs == "exclude" and bool(score.detail.get("signs"))
                await self._finish(attempt, replace(result, masked=result.masked or excluded), score.reward)
        except (asyncio.CancelledError, InfrastructureError, UnsafeSandboxError, ClaimLostError):
            await uncancellable(self._abandon(attempt))
            raise
        except StoreError as error:
            await uncancellable(self._abandon(attempt))
            raise InfrastructureError("store", str(error)) from error
        except (PolarError, HarnessError) as error:  # another attempt would fail in the same way
            failure = AgentResult("failed", _failure_cause(error), str(error), None, b"", None, masked=False)
            await self._finish(attempt, failure, None, outcome="failed")
        except Exception as error:
            log.exception("rollout %s: a fault in Polar", attempt.rollout_id)
            await uncancellable(self._abandon(attempt))
            raise InfrastructureError("internal", f"a fault in Polar: {type(error).__name__}: {error}") from error

    # The stages, in order

    async def _read_input(self, claim: Claim) -> AttemptInput:
        """Read the task and the options. Raises BadTaskError for a task that cannot be run."""
        row = await self.store.tasks.get(claim.task_id)
        assert row is not None
        task = task_from_json(row.spec)
        await asyncio.to_thread(check_task, task, self.code)
        return AttemptInput(task, RolloutSpec.read(claim.config), early_stop_check(task.metadata))

    async def _open_session(self, attempt: RunningAttempt, spec: RolloutSpec) -> str:
        """Open the session that records the agent's calls; return its API key."""
        key = new_key()
        session = await self.store.sessions.create(
            key_hash=hash_key(key),
            label=None,
            rollout_id=attempt.rollout_id,
            policy=spec.session_policy(),
            origin="rollout",
        )
        attempt.session_id = session.session_id
        self.reporter.session(attempt.rollout_id, session.session_id)
        await self._enter_stage(attempt, "preparing", session_id=session.session_id)
        return key

    async def _prepare(
        self, attempt: RunningAttempt, given: AttemptInput, key: str, sandbox_stack: contextlib.AsyncExitStack
    ) -> PreparedAgent:
        """Open the sandbox and put workspace and agent into it. Errors count as infrastructure errors."""
        with infrastructure_errors("harness"):
            harness = await self.harnesses.get(given.spec.harness)
        if given.task.user is not None and "resume" not in harness.adapter.info.features:
            raise HarnessError(f"{harness.label} cannot resume a conversation, so it cannot play a dialogue")
        with infrastructure_errors("sandbox"):
            kind = await self._sandbox_kind(attempt, given.spec)
            self.self_tests.start(kind, given.task.environment.image)
            new = TaskSandboxes(kind, self.sandbox_settings, opener=self.pool.take)
            task_sandboxes = self._task_sandboxes.setdefault(kind, new)
            mounts = [Mount(path, str(path)) for path in harness.installed.mounts]
            spec = await task_sandboxes.spec(given.task, labels=attempt.labels, mounts=mounts)
            if kind == "docker" and self.prebuilt is not None:
                spec = await self.prebuilt.spec(spec, harness.installed.mounts)
            if intercepted := given.spec.intercept or harness.adapter.info.intercepted:
                spec = await self.interception.spec(kind, spec)
            async with asyncio.timeout(_PREPARE_SECONDS):
                sandbox = await sandbox_stack.enter_async_context(await self.pool.take(kind, spec))
                await prepare_workspace(given.task, sandbox, await task_sandboxes.bundle(given.task))
                base = await save_base(sandbox, snapshot=given.task.environment.snapshot)
                url = await sandbox_stack.enter_async_context(self._gateway_url(sandbox))
                if intercepted:
                    await sandbox_stack.enter_async_context(self.interception.serve(self.gateway, sandbox, key))
                context = self._launch_context(given.task, sandbox, url, key)
                plan = harness.adapter.launch(harness.installed, context)
                await write_files(sandbox, plan)
            await self.self_tests.require(kind)
        assert attempt.session_id is not None
        return PreparedAgent(harness, task_sandboxes, sandbox, base, context, plan, attempt.session_id)

    async def _run_agent(self, attempt: RunningAttempt, given: AttemptInput, agent: PreparedAgent) -> AgentResult:
        """Run the agent to its end and read its patch. Raises InfrastructureError if store or engine made it fail."""
        task, spec, sandbox = given.task, given.spec, agent.sandbox
        # The evaluator's sandbox opens while the agent works.
        self.pool.expect(sandbox.kind, await agent.task_sandboxes.evaluator(task, attempt.labels))
        budget = stop_over_budget(sandbox, self.gateway, agent.session_id, limited=bool(spec.as_policy()))
        async with stop_early(sandbox, given.early_stop) as early, budget:
            run = await self._play(attempt, given, agent)
        await self.store.artifacts.add(attempt.rollout_id, "agent.log", run.output)
        if run.messages:
            dialogue = {"end": run.end, "messages": [message.to_json() for message in run.messages]}
            await self.store.artifacts.add(attempt.rollout_id, "dialogue.json", orjson.dumps(dialogue))
        exit_code, outcome, detail = agent.interpret(run.last, stopped=early.reason is not None)
        cause = _CAUSES[outcome]
        if early.reason is not None:
            outcome, cause, detail = "ok", STOPPED_EARLY, early.reason
        if (spent := await self._spent_budget(agent.session_id, spec)) is not None:
            ended = "was stopped" if exit_code is None else f"exited with {exit_code}"
            outcome, cause = "ok", OVER_BUDGET
            detail = f"the budget was spent ({spent}); the agent {ended}: {detail}"
        if sandbox.exceeded is not None:
            outcome, cause, detail = "failed", "agent", sandbox.exceeded
        if outcome != "ok":
            await self._check_infrastructure(attempt, agent.session_id, outcome)
        patch, no_patch = b"", sandbox.exceeded
        if sandbox.exceeded is None:
            patch, no_patch = await read_patch(sandbox, agent.base)
        await self.store.artifacts.add(attempt.rollout_id, "patch.diff", patch)
        over_budget = cause == OVER_BUDGET and not spec.train_over_budget
        train_timed_out = spec.train_timed_out or bool(task.metadata.get("train_timed_out"))
        masked = over_budget or (outcome == "timed_out" and not train_timed_out)
        return AgentResult(outcome, cause, detail, exit_code, patch, no_patch, masked)

    async def _play(self, attempt: RunningAttempt, given: AttemptInput, agent: PreparedAgent) -> AgentRun:
        """Run the agent on the instruction and, in a dialogue, on each further text of the user."""
        task, spec = given.task, given.spec
        seconds = min(spec.timeout, task.agent_seconds or spec.timeout)
        if task.user is None:
            process = await agent.exec(task.instruction, False, seconds)
            return AgentRun(process, process.stdout + process.stderr)
        async with open_user(task.user, attempt.rollout_id, self.store, self.gateway) as user:
            return await play_dialogue(
                task.instruction,
                user,
                agent.exec,
                lambda: read_last_answer(self.store, agent.session_id),
                lambda process: agent.sandbox.exceeded is None and agent.interpret(process)[1] == "ok",
                max_turns=spec.max_user_turns,
                seconds=seconds,
            )

    async def _score(
        self,
        attempt: RunningAttempt,
        task: Task,
        agent: PreparedAgent,
        result: AgentResult,
        remote: RemoteScorer | None,
    ) -> Score:
        """Score the agent's patch, on another machine if `remote` is given. Without a readable patch the score is 0."""
        if result.no_patch is not None:
            return Score(0.0, {"solved": False, "no_patch": result.no_patch})
        calls: list[CallRecord] = []
        if any(evaluator.kind == "python" for evaluator in task.evaluators):
            with contextlib.suppress(TimeoutError):  # calls still in flight will make the rollout incomplete
                await self.gateway.idle(agent.session_id, _IDLE_SECONDS)
            calls = await self.store.calls.of_session(agent.session_id)
        work = EvaluationInput(task, result.patch, result.exit_code, calls, code=self.code)

        async def score_once() -> Score:
            if remote is not None:
                return await remote(work, agent.sandbox.kind, attempt.labels)
            return await score_work(work, lambda: agent.task_sandboxes.fresh(task, attempt.labels))

        try:
            score = await score_once()
        except InfrastructureError as error:
            # The agent's work is done and may have taken an hour, so scoring is repeated first, and the whole attempt
            # only if that fails.
            log.warning("rollout %s: %s; scoring it once more", attempt.rollout_id, error)
            score = await score_once()
        await self.store.artifacts.add(attempt.rollout_id, "tests.log", score.log)
        return score

    async def _record_reward(self, attempt: RunningAttempt, task: Task, score: Score) -> None:
        source = reward_source(task)
        for call_id, value in score.call_rewards.items():
            await self.store.rewards.add(attempt.rollout_id, value, source, {}, call_id=call_id)
        await self.store.rewards.add(attempt.rollout_id, score.reward, source, score.detail)

    async def _finish(
        self, attempt: RunningAttempt, result: AgentResult, reward: float | None, *, outcome: str = "ok"
    ) -> None:
        """Close the session, build its traces and record the final status. `outcome`: how the last stage ended."""
        lost = await self._close_session(attempt)
        if attempt.session_id is not None:
            await build_traces(
                self.store, attempt.session_id, attempt.rollout_id, reward=reward, incomplete=lost is not None
            )
            if attempt.claim.attempt > 1:
                await exclude_earlier_attempts(self.store, attempt.rollout_id, attempt.session_id)
        detail = result.detail if lost is None else f"{lost}; the rollout is not trained on. {result.detail}"
        await self.store.rollouts.end(
            attempt.claim,
            result.status,
            outcome=outcome,
            cause=result.cause,
            error=None if result.status == "done" and lost is None else detail,
            incomplete=lost is not None,
            masked=result.masked,
        )
        self.reporter.stage(attempt.rollout_id, result.status, detail, reward)

    async def _abandon(self, attempt: RunningAttempt) -> None:
        """Revoke the key and wait for calls in flight; the worker decides what happens to the recorded calls."""
        try:
            if await self._close_session(attempt, remote_seconds=_RELEASE_IDLE_SECONDS) is not None:
                await self.store.rollouts.update(attempt.rollout_id, incomplete=True)
        except StoreError as error:
            log.warning("rollout %s: its session cannot be closed: %s", attempt.rollout_id, error)

    # Parts of the stages

    async def _close_session(self, attempt: RunningAttempt, *, remote_seconds: float = _IDLE_SECONDS) -> str | None:
        """Revoke the key and wait for calls in flight.

        The wait for calls on other gateways takes at most `remote_seconds`. Return a line about lost calls, or None."""
        if attempt.session_id is None:
            return None
        await self.store.sessions.close(attempt.session_id)
        self.gateway.end_session(attempt.session_id)
        lost = await self.gateway.forget_session(attempt.session_id, _IDLE_SECONDS, timeout_elsewhere=remote_seconds)
        if lost is None and await self.store.sessions.is_incomplete(attempt.session_id):  # marked by another gateway
            return "calls were answered but not recorded"
        return lost

    async def _enter_stage(
        self,
        attempt: RunningAttempt,
        stage: RolloutStatus,
        *,
        outcome: str = "ok",
        session_id: str | None = None,
        exit_code: int | None = None,
    ) -> None:
        """Record that the previous stage ended with `outcome` and this one starts."""
        await self.store.rollouts.enter_stage(
            attempt.claim, stage, outcome=outcome, session_id=session_id, exit_code=exit_code
        )
        self.reporter.stage(attempt.rollout_id, stage)

    async def _sandbox_kind(self, attempt: RunningAttempt, spec: RolloutSpec) -> SandboxKind:
        kind = spec.sandbox if spec.sandbox != "auto" else (await asyncio.to_thread(choose)).kind
        if kind != attempt.claim.sandbox:
            await self.store.rollouts.update(attempt.rollout_id, sandbox=kind)
        return kind

    async def _spent_budget(self, session_id: str, spec: RolloutSpec) -> str | None:
        """Return the limit of the session's budget that was reached, or None."""
        if not spec.as_policy():
            return None
        row = await self.store.sessions.get(session_id)
        return None if row is None else row.spent

    async def _check_infrastructure(self, attempt: RunningAttempt, session_id: str, outcome: ExitOutcome) -> None:
        """Raise InfrastructureError if the store or the engine is to blame for the agent's bad `outcome`."""
        if (refusal := self.gateway.refusal(session_id)) is not None:
            cause, problem = "store", f"the agent's last call could not be recorded: {refusal}"
        elif (failure := await self._engine_failure(attempt, session_id)) is not None:
            cause, problem = "engine", failure
        else:
            return
        raise InfrastructureError(cause, f"{problem} (the agent {outcome.replace('_', ' ')} for this reason)")

    async def _engine_failure(self, attempt: RunningAttempt, session_id: str) -> str | None:
        """Return how the engine failed, if the agent failed because of the engine; otherwise None.

        The engine is to blame if it is down, or if it failed to answer the session's last call (not counting calls that
        the agent broke off). It is not to blame for earlier failures, because the agent must handle them, nor for a
        request that fails each time while the engine answers other requests.
        """
        try:
            down = await self.engine.health()
        except EngineError as error:
            down = str(error)
        if down is not None:
            return f"the engine is down: {down}"
        calls = [call for call in await self.store.calls.summaries(session_id) if call.status != "client_gone"]
        status = calls[-1].http_status if calls and calls[-1].status == "upstream_error" else 0
        if status >= 500 or status in _PROVIDER_LIMITS:
            if (fault := await self.gateway.request_fault(session_id)) is not None:
                log.warning("rollout %s: the agent's last request fails each time: %s", attempt.rollout_id, fault)
                return None
            return f"the engine failed to answer the agent's last call: {calls[-1].error}"
        return None

    def _launch_context(self, task: Task, sandbox: Sandbox, url: str, key: str) -> LaunchContext:
        info = self.engine.info
        return LaunchContext(
            base_url=url + "/v1",
            api_key=key,
            model=info.model,
            context_length=info.context_length,
            instruction=task.instruction,
            home=sandbox.home,
            workdir=sandbox.workdir,
        )

    @contextlib.asynccontextmanager
    async def _gateway_url(self, sandbox: Sandbox) -> AsyncIterator[str]:
        """Make the gateway reachable from inside the sandbox and yield its URL there.

        A sandbox with its own network reaches nothing but the gateway."""
        listener = await sandbox.listen()
        if listener is None:
            yield self.gateway.url
            return
        port = listener.getsockname()[1]
        await self.gateway.serve_on(listener)
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            await self.gateway.stop_serving_on(listener)


def _failure_cause(error: Exception) -> str:
    if isinstance(error, (TaskNotPossibleError, BadTaskError)):
        return "task"
    return "harness" if isinstance(error, HarnessError) else type(error).__name__.removesuffix("Error").lower()
