r"""The worker of one process: claims rollouts from the queue in the database and runs each to its end.

    claim -> attempt (preparing | running | scoring, each with its limit) -> final status -> group settled
                 \-> infrastructure failed: back into the queue, for a new attempt

The database is the queue, and each row in it records how far a rollout is. So any number of workers may run side by
side, and the rollouts of a killed worker are claimed by another when their leases expire. All state that must survive
is in the database.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self

from polar_proxy.errors import EngineError, StoreError, UsageError
from polar_proxy.rollouts.infrastructure import InfrastructureError
from polar_proxy.rollouts.orphaned_calls import exclude_orphaned_calls
from polar_proxy.rollouts.stage_limits import AdmissionCheck, AdmissionRequest, StageLimiter, StageLimits
from polar_proxy.rollouts.stopping import GroupPolicy, get_group_policy, wait_for_all
from polar_proxy.store import Store
from polar_proxy.store.rollouts import Claim, ClaimLostError
from polar_proxy.store.service.groups import KEEP_OVERFLOW, GroupRow
from polar_proxy.types import Json, new_id
from sandboxes.base import uncancellable

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class WorkerLimits:
    """Limits on the concurrent work of one process."""

    in_flight: int = 64
    """Rollouts claimed at a time, including those that wait to enter a stage."""
    preparing: int = 4
    running: int = 8
    scoring: int = 4
    attempts: int = 3
    retry_seconds: float = 1.0
    """Pause before the second attempt after an infrastructure failure; it doubles with each further attempt."""
    lease_seconds: float = 30.0
    """A worker without a heartbeat for this long loses its claims."""
    poll_seconds: float = 0.5
    """How often the queue is read, and how soon a cancellation by another process is noticed."""
    backlog: int | None = None
    """Start no new rollouts while this many finished groups wait for the trainer; None: no limit."""


class AttemptFunction(Protocol):
    """Runs one attempt (`AttemptRunner.run`)."""

    async def __call__(self, claim: Claim, limits: StageLimits, request: AdmissionRequest) -> None:
        """Run a rollout to a final status in the store. Raises InfrastructureError to ask for another attempt.

        When cancelled it removes everything except its records and passes the cancellation on; the worker knows its
        reason and records the status."""
        ...


PolicyVersionReader = Callable[[], Awaitable[str | None]]


class Worker:
    """`async with Worker(store, attempt, limits) as worker:` works until the block ends.

    Leaving the block puts the rollouts in flight back into the queue; call `drain` first to let them end.
    """

    def __init__(
        self,
        store: Store,
        attempt: AttemptFunction,
        limits: WorkerLimits,
        *,
        policy_version: PolicyVersionReader | None = None,
        may_prepare: AdmissionCheck | None = None,
        may_run: AdmissionCheck | None = None,
        engine_ready: AdmissionCheck | None = None,
        on_release: Callable[[str], None] | None = None,
        on_settled: Callable[[str], None] | None = None,
        job_id: str | None = None,
    ) -> None:
        """`policy_version` is read at every claim. `on_release` is called with each rollout whose attempt has ended,
        `on_settled` with each group that has ended. With `job_id` the worker claims only rollouts of that job, which
        this process may own ("": no job yet); otherwise it claims rollouts of all jobs that no process owns.

        `may_prepare` and `may_run` limit how many rollouts run at a time; `engine_ready` delays every agent.
        """
        self.name = f"{socket.gethostname()}:{os.getpid()}:{new_id('w')[-8:]}"
        """The name under which it claims rollouts: host, process id and a random part."""
        self._store = store
        self._attempt = attempt
        self._limits = limits
        self._policy_version = policy_version
        self._on_release = on_release
        self._on_settled = on_settled
        self._job_id = job_id
        self.stages = StageLimits(
            StageLimiter(limits.preparing, may_join=may_prepare, idle=lambda: self.stages.at_work == 0),
            StageLimiter(limits.running, may_enter=engine_ready, may_join=may_run),
            StageLimiter(limits.scoring),
        )
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._claimed: set[str] = set()
        """The rollouts in `_tasks` on which this worker still has a claim."""
        self._wake = asyncio.Event()
        self._accepting, self._stopping, self._claiming = True, False, False
        self._loops: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        self._loops = [
            asyncio.create_task(self._claim_forever(), name="polar-claim"),
            asyncio.create_task(self._heartbeat_forever(), name="polar-heartbeat"),
        ]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._accepting, self._stopping = False, True
        for loop in self._loops:
            loop.cancel()
        await asyncio.gather(*self._loops, return_exceptions=True)
        await self._cancel_tasks(list(self._tasks))

    # For other parts of the process

    def wake(self) -> None:
        """Look at the queue now, because something was added to it."""
        self._wake.set()

    def work_on(self, job_id: str) -> None:
        """Claim only rollouts of this job from now on."""
        self._job_id = job_id
        self.wake()

    @property
    def in_flight(self) -> int:
        """How many rollouts are claimed."""
        return len(self._tasks)

    def counts(self) -> Json:
        """Return the rollouts in flight, and the counts and refusals of each stage, for the metrics."""
        return {
            "in_flight": self.in_flight,
            "stages": {name: limiter.counts() for name, limiter in self.stages.by_name().items()},
            "refusals": {name: dict(limiter.count.refusals) for name, limiter in self.stages.by_name().items()},
        }

    async def cancel(self, rollout_ids: Sequence[str]) -> None:
        """End the given rollouts that are in flight here, and wait until they have ended."""
        await self._cancel_tasks([rollout_id for rollout_id in rollout_ids if rollout_id in self._tasks])

    @property
    def accepting(self) -> bool:
        """True while the worker claims new rollouts."""
        return self._accepting

    def accept(self, new: bool) -> None:
        """Start or stop claiming new rollouts; those in flight continue in either case."""
        self._accepting = new
        self.wake()

    async def drain(self, timeout: float | None = None) -> list[str]:
        """Stop claiming and wait for the rollouts in flight, at most `timeout` seconds; return those that still run."""
        self.accept(False)
        loop = asyncio.get_running_loop()
        deadline = None if timeout is None else loop.time() + timeout
        while (self._tasks or self._claiming) and (deadline is None or loop.time() < deadline):
            left = None if deadline is None else deadline - loop.time()
            # A claim that was under way may add tasks, so check again.
            await asyncio.wait(list(self._tasks.values()) or [asyncio.create_task(asyncio.sleep(0.01))], timeout=left)
        return list(self._tasks)

    # The two loops

    async def _claim_forever(self) -> None:
        while True:
            self._wake.clear()
            self._claiming = True
            try:
                claimed = await self._claim()
            except EngineError as error:  # the engine was killed or restarts: start nothing that it could not serve
                log.warning("nothing is claimed, because the engine does not report its policy version: %s", error)
                claimed = 0
            except Exception:  # without this loop nothing would be claimed any more
                log.exception("the queue cannot be read; trying again")
                claimed = 0
            finally:
                self._claiming = False
            if not claimed:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._limits.poll_seconds):
                        await self._wake.wait()

    async def _claim(self) -> int:
        free = self._limits.in_flight - len(self._tasks)
        if not self._accepting or free <= 0 or await self._trainer_is_behind():
            return 0
        version = await self._policy_version() if self._policy_version is not None else None
        claims = await self._store.queue.claim(
            self.name, free, self._limits.lease_seconds, policy_version=version, job_id=self._job_id
        )
        for claim in claims:
            task = asyncio.create_task(self._run_to_end(claim), name=f"polar-{claim.rollout_id}")
            self._tasks[claim.rollout_id] = task
            self._claimed.add(claim.rollout_id)
        return len(claims)

    async def _trainer_is_behind(self) -> bool:
        if self._limits.backlog is None:
            return False
        return (await self._store.feed.depth()).get("waiting", 0) >= self._limits.backlog

    async def _heartbeat_forever(self) -> None:
        """Renew the claims, end rollouts that others cancelled, and reclaim those of dead workers."""
        settled_at = time.monotonic() - self._limits.lease_seconds
        while True:
            await asyncio.sleep(self._limits.poll_seconds)
            try:
                if time.monotonic() - settled_at >= self._limits.lease_seconds:
                    settled_at = time.monotonic()
                    for group_id in await self._store.groups.unsettled():
                        await self._settle(group_id)
                cancelled, lost = await self._store.queue.heartbeat(
                    self.name, list(self._claimed), self._limits.lease_seconds
                )
                expired = await self._store.queue.reclaim_expired(attempts=self._limits.attempts, job_id=self._job_id)
                await self._account_for_expired(expired)
            except Exception:  # without this loop every claim would expire
                log.exception("the queue cannot be written; trying again")
                continue
            for rollout_id in (cancelled | lost) & self._claimed:
                if rollout_id in lost:
                    log.warning("rollout %s: another worker has it now, or its job is paused", rollout_id)
                    self._claimed.discard(rollout_id)
                self._tasks[rollout_id].cancel()
            if expired:
                self._wake.set()

    async def _account_for_expired(self, expired: Mapping[str, int]) -> None:
        for rollout_id, attempt in expired.items():
            log.warning("rollout %s was reclaimed from a worker without a heartbeat (attempt %d)", rollout_id, attempt)
            await exclude_orphaned_calls(self._store, rollout_id)
            if not attempt and (row := await self._store.rollouts.get(rollout_id)) is not None:
                await self._settle(row.group_id)

    # One rollout

    async def _run_to_end(self, claim: Claim) -> None:
        try:
            failure = await self._try(claim)
            self._claimed.discard(claim.rollout_id)
            if failure is not None:
                await uncancellable(self._retry_or_fail(claim, failure))
            await self._stop_group_if_complete(claim)
        except asyncio.CancelledError:
            # A second cancellation must not leave the rollout without a status.
            await uncancellable(self._record_cancellation(claim))
            raise
        except ClaimLostError as error:
            self._claimed.discard(claim.rollout_id)
            log.warning("%s", error)
        except StoreError:
            log.exception("rollout %s: the store failed; its claim will expire and it is tried again", claim.rollout_id)
        finally:
            # This worker may have claimed the next attempt already.
            if self._tasks.get(claim.rollout_id) is asyncio.current_task():
                del self._tasks[claim.rollout_id]
                self._claimed.discard(claim.rollout_id)
            self._wake.set()

    async def _try(self, claim: Claim) -> InfrastructureError | None:
        """Run one attempt and return None. After an infrastructure failure, pause and return the failure."""
        try:
            try:
                request = AdmissionRequest(claim.rollout_id, claim.group_id, claim.job_id)
                await self._attempt(claim, self.stages, request)
            finally:
                if self._on_release is not None:
                    self._on_release(claim.rollout_id)
        except InfrastructureError as error:
            log.warning("rollout %s, attempt %d: %s", claim.rollout_id, claim.attempt, error)
            if claim.attempt < self._limits.attempts:
                await asyncio.sleep(self._limits.retry_seconds * 2 ** (claim.attempt - 1))
            return error
        return None

    async def _retry_or_fail(self, claim: Claim, failure: InfrastructureError) -> None:
        if claim.attempt < self._limits.attempts:
            await self._store.queue.release(claim.rollout_id, cause=failure.cause)
        else:
            await self._store.rollouts.end(claim, "failed", outcome="failed", cause=failure.cause, error=str(failure))
        await exclude_orphaned_calls(self._store, claim.rollout_id)

    async def _record_cancellation(self, claim: Claim) -> None:
        """Queue the rollout again if this process stops; otherwise it was cancelled."""
        row = await self._store.rollouts.get(claim.rollout_id)
        if row is not None and not row.final and claim.rollout_id in self._claimed:
            if self._stopping:
                await self._store.queue.release(claim.rollout_id, cause="service_stopped")
            else:
                await self._store.rollouts.end(
                    claim, "cancelled", outcome="cancelled", cause="cancelled", error="cancelled"
                )
            await exclude_orphaned_calls(self._store, claim.rollout_id)
        if not self._stopping:
            await self._settle(await self._store.rollouts.group_id(claim.rollout_id))

    # The group of a rollout

    async def _stop_group_if_complete(self, claim: Claim) -> None:
        """Settle the group, or stop its other rollouts if its policy says that it is complete."""
        group_id = await self._store.rollouts.group_id(claim.rollout_id)  # the rollout may have moved to another group
        if await self._settle(group_id):
            return
        group = await self._store.groups.get(group_id)
        assert group is not None
        reason = _group_policy(group)(group.group_size, await self._store.rollouts.find(group_id=group_id))
        if reason is None:
            return
        if group.config.items() >= KEEP_OVERFLOW.items():
            await self._store.groups.keep_overflow(group_id, reason=reason)
            await self._settle(group_id)
            return
        in_flight = await self._store.groups.cancel(group_id, reason=reason)
        for rollout_id in in_flight:
            if rollout_id in self._tasks:
                self._tasks[rollout_id].cancel()
        if not in_flight:
            await self._settle(group_id)

    async def _settle(self, group_id: str) -> bool:
        """End the group if all its rollouts have ended; return whether it has ended."""
        settled = await self._store.groups.settle(group_id)
        if settled is not None and settled[1] and self._on_settled is not None:
            self._on_settled(group_id)
        return settled is not None

    async def _cancel_tasks(self, rollout_ids: Sequence[str]) -> None:
        tasks = [self._tasks[rollout_id] for rollout_id in rollout_ids]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _group_policy(group: GroupRow) -> GroupPolicy:
    """Return the group's policy. It was checked on submission, but perhaps by a version that knows more policies."""
    try:
        return get_group_policy(str(group.config.get("group_policy", "wait_for_all")))
    except UsageError as error:
        log.warning("group %s: %s Waiting for all of its rollouts.", group.group_id, error)
        return wait_for_all
