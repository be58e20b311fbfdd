r"""The worker of one process: claims rollouts from the queue in the database and runs each to its end.

    claim -> attempt (preparing | running | scoring, each with its limit) -> final status -> group ended, if complete
                 \-> infrastructure failed: back into the queue, for a new attempt
                 \-> the sandbox fails its self-test: back into the queue, and this worker claims nothing more

The database is the queue, and each row in it records how far a rollout is. So any number of workers may run side by
side, and the rollouts of a killed worker are claimed by another when their leases expire. All state that must survive
is in the database.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import socket
import time
from collections.abc import Awaitable, Callable, Collection
from typing import Self

from polar_proxy.errors import EngineError, StoreError, UsageError
from polar_proxy.gateway.health import OutageLog
from polar_proxy.rollouts.admission import ServiceLimits
from polar_proxy.rollouts.infrastructure import InfrastructureError, UnsafeSandboxError
from polar_proxy.rollouts.recovery import MAX_ATTEMPTS, account_for_reclaimed, exclude_orphaned_calls
from polar_proxy.rollouts.stopping import GroupPolicy, get_group_policy, wait_for_all
from polar_proxy.store import Store
from polar_proxy.store.repositories.rollouts import Claim, ClaimLostError
from polar_proxy.store.service.groups import KEEP_OVERFLOW, GroupRow
from polar_proxy.types import new_id
from sandboxes.base import uncancellable

log = logging.getLogger(__name__)

AttemptFunction = Callable[[Claim], Awaitable[None]]
"""Runs one attempt to a final status in the store (`AttemptRunner.run`). Raises InfrastructureError to ask for another
attempt, and UnsafeSandboxError if this machine must make no more attempts.

If it is cancelled, it removes everything except its records and raises CancelledError. The worker then records the
status, because it knows why the attempt was cancelled."""


class Worker:
    """`async with Worker(store, attempt, limits) as worker:` works until the block ends.

    Leaving the block puts the rollouts in flight back into the queue; call `drain` first to let them end.
    """

    def __init__(
        self,
        store: Store,
        attempt: AttemptFunction,
        limits: ServiceLimits,
        *,
        policy_version: Callable[[], Awaitable[str | None]] | None = None,
        on_release: Callable[[str], None] = lambda rollout_id: None,
        on_settled: Callable[[str], None] = lambda group_id: None,
        on_end: Callable[[str], None] = lambda rollout_id: None,
        job_id: str | None = None,
    ) -> None:
        """`policy_version` is called before every claim. `on_release` is called with a rollout's id when its attempt
        has ended. `on_end` is called with this id when the worker is finished with the attempt. By then the end of the
        attempt is recorded, unless the claim was lost or the store failed. `on_settled` is called with the id of each
        group that has ended.

        With `job_id` the worker claims only rollouts of that job; with "" it claims nothing until `work_on` names a
        job. Without `job_id` it claims rollouts of all jobs, except the jobs of `polar run`, which only their own
        process runs."""
        self.name = f"{socket.gethostname()}:{os.getpid()}:{new_id('w')[-8:]}"
        """The name under which this worker claims rollouts: host, process id and a random part."""
        self._store = store
        self._attempt = attempt
        self._limits = limits
        self._policy_version = policy_version
        self._on_release = on_release
        self._on_settled = on_settled
        self._on_end = on_end
        self._job_id = job_id
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._claimed: set[str] = set()
        """The rollouts in `_tasks` on which this worker still has a claim."""
        self._wake = asyncio.Event()
        self.paused_until = 0.0
        """Nothing is claimed before this time, in seconds since the epoch; infinity: until `resume`."""
        self.problem: str | None = None
        """The problem given to `refuse`. While there is one, nothing is claimed. `resume` sets it to None."""
        self._stopping = False
        self._claiming = False

    async def __aenter__(self) -> Self:
        self._loops = [
            asyncio.create_task(self._claim_forever(), name="polar-claim"),
            asyncio.create_task(self._heartbeat_forever(), name="polar-heartbeat"),
        ]
        return self

    async def __aexit__(self, *exception: object) -> None:
        self._stopping = True
        for loop in self._loops:
            loop.cancel()
        await asyncio.gather(*self._loops, return_exceptions=True)
        await self.cancel(list(self._tasks))

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
        return len(self._tasks)

    def stop(self, rollout_ids: Collection[str]) -> list[asyncio.Task[None]]:
        """Cancel the given rollouts that are in flight here, and return the asyncio tasks that run them."""
        tasks = [self._tasks[rollout_id] for rollout_id in rollout_ids if rollout_id in self._tasks]
        for task in tasks:
            task.cancel()
        return tasks

    async def cancel(self, rollout_ids: Collection[str]) -> None:
        """End the given rollouts that are in flight here, and wait until they have ended."""
        await asyncio.gather(*self.stop(rollout_ids), return_exceptions=True)

    @property
    def accepting(self) -> bool:
        """True while the worker claims new rollouts."""
        return time.time() >= self.paused_until

    def pause(self, seconds: float | None = None) -> None:
        """Claim nothing new for this many seconds or until `resume`; rollouts in flight continue."""
        self.paused_until = math.inf if seconds is None else time.time() + seconds

    def refuse(self, problem: str) -> None:
        """Claim nothing until `resume`, because of this problem."""
        if self.problem is None:
            log.error("this worker claims no rollouts: %s", problem)
        self.problem = problem
        self.pause()

    def resume(self) -> None:
        self.paused_until = 0.0
        self.problem = None
        self.wake()

    async def drain(self, timeout: float | None = None) -> list[str]:
        """Claim nothing new and wait for the rollouts in flight.

        Return the rollouts that still run after `timeout` seconds. If there are any, the worker goes back to its
        earlier state: it claims again, or stays paused."""
        paused_until = self.paused_until
        self.pause()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                while self._tasks or self._claiming:  # a claim that is under way may add tasks
                    await asyncio.wait([asyncio.create_task(asyncio.sleep(0.01)), *self._tasks.values()])
        if self._tasks:
            self.paused_until = paused_until
            self.wake()
        return list(self._tasks)

    # The two loops

    async def _claim_forever(self) -> None:
        outage = OutageLog("nothing is claimed, because the queue cannot be read")
        while True:
            self._wake.clear()
            self._claiming = True
            claimed = 0
            try:
                claimed = await self._claim()
                outage.worked()
            except StoreError as error:
                outage.failed(error)
            except EngineError as error:  # the engine was killed or restarts: start nothing that it could not serve
                log.warning("nothing is claimed, because the engine does not report its policy version: %s", error)
            except Exception:  # without this loop nothing would be claimed any more
                log.exception("claiming failed inside Polar; trying again")
            finally:
                self._claiming = False
            if not claimed:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._limits.poll_seconds):
                        await self._wake.wait()

    async def _claim(self) -> int:
        free = self._limits.in_flight - len(self._tasks)
        if not self.accepting or free <= 0 or await self._trainer_is_behind():
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
        """Renew the claims, end rollouts that others cancelled, and reclaim the rollouts of dead workers."""
        settled_at = -math.inf
        outage = OutageLog("claims are not renewed, because the queue cannot be written")
        while True:
            await asyncio.sleep(self._limits.poll_seconds)
            try:
                if time.monotonic() - settled_at >= self._limits.lease_seconds:
                    settled_at = time.monotonic()
                    await self._settle_all(await self._store.groups.unsettled())
                cancelled, lost = await self._store.queue.heartbeat(
                    self.name, list(self._claimed), self._limits.lease_seconds
                )
                await self._reclaim_expired()
                outage.worked()
            except StoreError as error:
                outage.failed(error)
                continue
            except Exception:  # without this loop every claim would expire
                log.exception("the heartbeat failed inside Polar; trying again")
                continue
            lost &= self._claimed
            for rollout_id in lost:
                log.warning("rollout %s: another worker has it now, or its job is paused", rollout_id)
            self.stop(lost | (cancelled & self._claimed))
            self._claimed -= lost

    async def _reclaim_expired(self) -> None:
        expired = await self._store.queue.reclaim_expired(attempts=MAX_ATTEMPTS, job_id=self._job_id)
        for rollout_id, attempt in expired.items():
            what = f"attempt {attempt} follows" if attempt else "it has ended, because no attempt follows"
            log.warning("rollout %s was reclaimed from a worker without a heartbeat; %s", rollout_id, what)
        await self._settle_all(await account_for_reclaimed(self._store, expired))
        if expired:
            self.wake()

    # One rollout

    async def _run_to_end(self, claim: Claim) -> None:
        try:
            failure = await self._try(claim)
            self._claimed.discard(claim.rollout_id)  # this worker may claim the next attempt
            if failure is not None:
                await uncancellable(self._retry_or_fail(claim, failure))
            await self._stop_group_if_complete(claim)
        except asyncio.CancelledError:
            # A second cancellation must not leave the rollout without a status.
            await uncancellable(self._record_cancellation(claim))
            raise
        except UnsafeSandboxError as error:
            await uncancellable(self._refuse(claim, error))
        except ClaimLostError as error:
            self._claimed.discard(claim.rollout_id)
            log.warning("%s", error)
        except StoreError as error:
            log.warning(
                "rollout %s: the store failed, so its claim expires and it is tried again: %s", claim.rollout_id, error
            )
        finally:
            # This worker may have claimed the next attempt already.
            if self._tasks.get(claim.rollout_id) is asyncio.current_task():
                del self._tasks[claim.rollout_id]
                self._claimed.discard(claim.rollout_id)
            self._on_end(claim.rollout_id)
            self.wake()

    async def _try(self, claim: Claim) -> InfrastructureError | None:
        """Run one attempt and return None. After an infrastructure failure, pause and return the failure."""
        try:
            try:
                await self._attempt(claim)
            finally:
                self._on_release(claim.rollout_id)
        except InfrastructureError as error:
            log.warning("rollout %s, attempt %d: %s", claim.rollout_id, claim.attempt, error)
            if claim.attempt < MAX_ATTEMPTS:
                await asyncio.sleep(self._limits.retry_seconds * 2 ** (claim.attempt - 1))
            return error
        return None

    async def _retry_or_fail(self, claim: Claim, failure: InfrastructureError) -> None:
        """Queue the rollout for another attempt, or record it as failed if this was the last one.

        If the store fails, try to write again; the heartbeat keeps the claim meanwhile.
        """
        while True:
            try:
                if claim.attempt < MAX_ATTEMPTS:
                    await self._store.queue.release(claim, cause=failure.cause)
                else:
                    await self._store.rollouts.end(
                        claim, "failed", outcome="failed", cause=failure.cause, error=str(failure)
                    )
                break
            except ClaimLostError:
                raise
            except StoreError:
                if self._stopping:
                    raise
            self._claimed.add(claim.rollout_id)
            await asyncio.sleep(self._limits.poll_seconds)
            self._claimed.discard(claim.rollout_id)
        await exclude_orphaned_calls(self._store, claim.rollout_id)

    async def _refuse(self, claim: Claim, error: UnsafeSandboxError) -> None:
        """Claim nothing more, and queue the rollout as if this worker had not claimed it."""
        self.refuse(str(error))
        self._claimed.discard(claim.rollout_id)
        await self._store.queue.release(claim, cause="unsafe_sandbox", counts=False)

    async def _record_cancellation(self, claim: Claim) -> None:
        """Queue the rollout again if this process is stopping; otherwise record it as cancelled."""
        row = await self._store.rollouts.get(claim.rollout_id)
        if row is not None and not row.final and claim.rollout_id in self._claimed:
            if self._stopping:
                await self._store.queue.release(claim, cause="service_stopped")
            else:
                await self._store.rollouts.end(
                    claim, "cancelled", outcome="cancelled", cause="cancelled", error="cancelled"
                )
            await exclude_orphaned_calls(self._store, claim.rollout_id)
        if not self._stopping:
            await self._settle(await self._store.rollouts.group_id(claim.rollout_id))

    # The group of a rollout

    async def _stop_group_if_complete(self, claim: Claim) -> None:
        """End the group if all its rollouts have ended.

        The group's policy may declare the group complete while rollouts are unfinished. Then cancel these rollouts, or
        move them to other groups if the group's option `overflow` is `keep`.
        """
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
            in_flight = []
        else:
            in_flight = await self._store.groups.cancel(group_id, reason=reason)
        self.stop(in_flight)
        if not in_flight:
            await self._settle(group_id)

    async def _settle(self, group_id: str) -> bool:
        """End the group if all its rollouts have ended; return whether it has ended."""
        settled = await self._store.groups.settle(group_id)
        if settled is not None and settled[1]:
            self._on_settled(group_id)
        return settled is not None

    async def _settle_all(self, group_ids: Collection[str]) -> None:
        for group_id in group_ids:
            await self._settle(group_id)


def _group_policy(group: GroupRow) -> GroupPolicy:
    """Return the group's policy, or `wait_for_all` if this version of Polar does not know the policy."""
    try:
        return get_group_policy(str(group.config.get("group_policy", "wait_for_all")))
    except UsageError as error:
        log.warning("group %s: %s Waiting for all of its rollouts.", group.group_id, error)
        return wait_for_all
