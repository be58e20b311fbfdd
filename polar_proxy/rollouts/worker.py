r"""The scheduler of one process: takes rollouts from the queue in the database and sees each to its end.

    claim -> attempt (preparing | running | scoring, each behind its gate) -> final status -> group settled
                 \-> infrastructure failed: back into the queue, for a fresh attempt

The database is the queue, and each row in it says how far a rollout is; so any number of these may work side by side,
and what a killed one had in hand is taken up by another when its hold runs out. In memory is only what can be lost.
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

from polar_proxy.errors import EngineError, PolarError, StoreError, UsageError
from polar_proxy.rollouts.stage_limits import AdmissionCheck, AdmissionRequest, StageCheck, StageLimiter
from polar_proxy.rollouts.stopping import GroupPolicy, get_group_policy, wait_for_all
from polar_proxy.rollouts.traces import exclude_orphaned_calls
from polar_proxy.store import Store
from polar_proxy.store.groups import KEEP, GroupRow
from polar_proxy.store.stages import Claim, ClaimLostError
from polar_proxy.types import Json, new_id
from sandboxes.base import uncancellable

log = logging.getLogger(__name__)


class InfrastructureError(PolarError):
    """An attempt failed for no fault of the agent: a sandbox, the engine, the disk. Tried again, afresh."""

    def __init__(self, cause: str, text: str) -> None:
        """`cause` is machine-readable: sandbox, engine, store, disk."""
        super().__init__(text)
        self.cause = cause


@dataclass(frozen=True, slots=True)
class WorkerLimits:
    """How much one process takes on."""

    in_flight: int = 64
    """Rollouts claimed at once, those that wait at a gate included."""
    preparing: int = 4
    running: int = 8
    scoring: int = 4
    attempts: int = 3
    pause_seconds: float = 1.0
    """Before a second attempt at what the infrastructure failed; twice that before the third, and so on."""
    lease_seconds: float = 30.0
    """A process that says nothing for so long has lost what it held."""
    poll_seconds: float = 0.5
    """How often the queue is looked at, and how soon a cancellation from elsewhere is noticed."""
    backlog: int | None = None
    """Nothing new is begun while so many finished groups wait for the trainer; None: no bound."""


@dataclass(frozen=True, slots=True)
class StageLimits:
    preparing: StageLimiter
    running: StageLimiter
    scoring: StageLimiter

    @property
    def at_work(self) -> int:
        """How many have something prepared, or are preparing it."""
        later = (self.running, self.scoring)
        return self.preparing.inside + sum(gate.inside + gate.waiting for gate in later)


class AttemptFunction(Protocol):
    async def __call__(self, held: Claim, gates: StageLimits, ticket: AdmissionRequest) -> None:
        """See one rollout to a final status in the store. Raises InfrastructureError where it should be tried again.

        On cancellation it leaves nothing behind but what was recorded, and lets the cancellation out: the scheduler
        knows what it means, and writes the status."""
        ...


PolicyVersionReader = Callable[[], Awaitable[str | None]]


class Worker:
    """`async with Scheduler(store, attempt, limits) as scheduler:` works until the block ends.

    Leaving the block puts what is in hand back into the queue; `drain` first to let it end.
    """

    def __init__(
        self,
        store: Store,
        attempt: AttemptFunction,
        limits: WorkerLimits,
        *,
        policy_version: PolicyVersionReader | None = None,
        admission: StageCheck | None = None,
        crowded: AdmissionCheck | None = None,
        room: AdmissionCheck | None = None,
        on_release: Callable[[str], None] | None = None,
        on_settled: Callable[[str], None] | None = None,
        job_id: str | None = None,
    ) -> None:
        """`policy_version` is asked at every claim; `on_release` is told of each rollout whose attempt is over,
        `on_settled` of each group that ended. With `job_id` it works on that job alone, which this process may own
        ("": on none yet); else on all that no process owns.

        `admission`: whether agents may run at all; `crowded`: whether one more may join them; `room`: whether one
        more may be prepared."""
        self.worker = f"{socket.gethostname()}:{os.getpid()}:{new_id('w')[-8:]}"
        self._store = store
        self._attempt = attempt
        self._limits = limits
        self._version = policy_version
        self._on_left = on_release
        self._on_settled = on_settled
        self._job_id = job_id
        self.gates = StageLimits(
            StageLimiter(limits.preparing, crowded=room, idle=lambda: self.gates.at_work == 0),
            StageLimiter(limits.running, admission, crowded=crowded),
            StageLimiter(limits.scoring),
        )
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._held: set[str] = set()
        """Of the tasks, those whose rollout is this process's to decide about."""
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()
        self._taking, self._stopping, self._claiming = True, False, False
        self._loops: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        self._loops = [
            asyncio.create_task(self._claim_forever(), name="polar-claim"),
            asyncio.create_task(self._hold_forever(), name="polar-hold"),
        ]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._taking, self._stopping = False, True
        for loop in self._loops:
            loop.cancel()
        await asyncio.gather(*self._loops, return_exceptions=True)
        await self._end(list(self._tasks))

    # What others may ask

    def wake(self) -> None:
        """There is something new in the queue."""
        self._wake.set()

    def work_on(self, job_id: str) -> None:
        """From now on, work on this job alone."""
        self._job_id = job_id
        self.wake()

    @property
    def in_flight(self) -> int:
        return len(self._tasks)

    def counts(self) -> Json:
        """For the metrics: rollouts in hand, and what each gate has seen (`StageLimiter.counts`, and why it
        refused)."""
        gates = {name: getattr(self.gates, name) for name in ("preparing", "running", "scoring")}
        return {
            "in_flight": self.in_flight,
            "gates": {name: gate.counts() for name, gate in gates.items()},
            "refusals": {name: dict(gate.count.refusals) for name, gate in gates.items()},
        }

    async def cancel(self, rollout_ids: Sequence[str]) -> None:
        """End these, where they are in hand, and wait until nothing of them is left."""
        await self._end([rollout_id for rollout_id in rollout_ids if rollout_id in self._tasks])

    @property
    def taking(self) -> bool:
        """Whether it takes from the queue."""
        return self._taking

    def take(self, new: bool) -> None:
        """Whether to take from the queue from now on; what is in hand goes on in any case."""
        self._taking = new
        self.wake()

    async def drain(self, timeout: float | None = None) -> list[str]:
        """Take nothing new and wait for what is in hand, `timeout` seconds at most; returns what is left of it."""
        self.take(False)
        loop = asyncio.get_running_loop()
        deadline = None if timeout is None else loop.time() + timeout
        while (self._tasks or self._claiming) and (deadline is None or loop.time() < deadline):
            left = None if deadline is None else deadline - loop.time()
            # Some may come of a claim that was under way, so it is looked at again.
            await asyncio.wait(list(self._tasks.values()) or [asyncio.create_task(asyncio.sleep(0.01))], timeout=left)
        return list(self._tasks)

    async def until_idle(self) -> None:
        """Wait until the queue is empty and nothing is in hand."""
        self._idle.clear()
        self._wake.set()
        await self._idle.wait()

    # The two loops

    async def _claim_forever(self) -> None:
        while True:
            self._wake.clear()
            self._claiming = True
            try:
                taken = await self._claim()
            except EngineError as error:  # killed, or restarting: nothing is begun that it could not serve
                log.warning("nothing is taken from the queue, as the engine does not say its policy version: %s", error)
                taken = 0
            except Exception:  # who would take anything from the queue if this loop ended?
                log.exception("the queue cannot be read; trying again")
                taken = 0
            finally:
                self._claiming = False
            if not taken and not self._tasks:
                self._idle.set()
            if not taken:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._limits.poll_seconds):
                        await self._wake.wait()

    async def _claim(self) -> int:
        room = self._limits.in_flight - len(self._tasks)
        if not self._taking or room <= 0 or await self._backed_up():
            return 0
        version = await self._version() if self._version is not None else None
        held = await self._store.queue.claim(
            self.worker, room, self._limits.lease_seconds, policy_version=version, job_id=self._job_id
        )
        for one in held:
            task = asyncio.create_task(self._see_through(one), name=f"polar-{one.rollout_id}")
            self._tasks[one.rollout_id] = task
            self._held.add(one.rollout_id)
        return len(held)

    async def _backed_up(self) -> bool:
        if self._limits.backlog is None:
            return False
        return (await self._store.feed.depth()).get("waiting", 0) >= self._limits.backlog

    async def _hold_forever(self) -> None:
        """Keep what is in hand, end what was cancelled elsewhere, take from the dead, and finish what they left."""
        swept = time.monotonic() - self._limits.lease_seconds
        while True:
            await asyncio.sleep(self._limits.poll_seconds)
            try:
                if time.monotonic() - swept >= self._limits.lease_seconds:
                    swept = time.monotonic()
                    for group_id in await self._store.groups.unsettled():
                        await self._settle(group_id)
                cancelled, others = await self._store.queue.heartbeat(
                    self.worker, list(self._held), self._limits.lease_seconds
                )
                lost = await self._store.queue.reclaim_expired(attempts=self._limits.attempts, job_id=self._job_id)
                await self._taken(lost)
            except Exception:  # without this loop every hold would run out
                log.exception("the queue cannot be written; trying again")
                continue
            for rollout_id in (cancelled | others) & self._held:
                if rollout_id in others:
                    log.warning("rollout %s is not ours any more: another worker's, or its job is paused", rollout_id)
                    self._held.discard(rollout_id)
                self._tasks[rollout_id].cancel()
            if lost:
                self._wake.set()

    async def _taken(self, lost: Mapping[str, int]) -> None:
        for rollout_id, attempt in lost.items():
            log.warning("rollout %s was taken from a silent worker (attempt %d)", rollout_id, attempt)
            await exclude_orphaned_calls(self._store, rollout_id)
            if not attempt and (row := await self._store.rollouts.get(rollout_id)) is not None:
                await self._settle(row.group_id)

    # One rollout

    async def _see_through(self, held: Claim) -> None:
        try:
            failed = await self._try(held)
            self._held.discard(held.rollout_id)
            if failed is not None:
                await uncancellable(self._again(held, failed))
            await self._after(held)
        except asyncio.CancelledError:
            # To its end: a second cancellation must not leave the rollout without a status.
            await uncancellable(self._interrupted(held))
            raise
        except ClaimLostError as error:
            self._held.discard(held.rollout_id)
            log.warning("%s", error)
        except StoreError:
            log.exception("rollout %s: the store failed; its hold will run out and it is tried again", held.rollout_id)
        finally:
            # This process may have claimed the next attempt already.
            if self._tasks.get(held.rollout_id) is asyncio.current_task():
                del self._tasks[held.rollout_id]
                self._held.discard(held.rollout_id)
            self._wake.set()

    async def _try(self, held: Claim) -> InfrastructureError | None:
        """One attempt; what failed it, if that is to be tried again, after a pause in which it may have recovered."""
        try:
            try:
                await self._attempt(held, self.gates, AdmissionRequest(held.rollout_id, held.group_id, held.job_id))
            finally:
                if self._on_left is not None:
                    self._on_left(held.rollout_id)
        except InfrastructureError as error:
            log.warning("rollout %s, attempt %d: %s", held.rollout_id, held.attempt, error)
            if held.attempt < self._limits.attempts:
                await asyncio.sleep(self._limits.pause_seconds * 2 ** (held.attempt - 1))
            return error
        return None

    async def _interrupted(self, held: Claim) -> None:
        row = await self._store.rollouts.get(held.rollout_id)
        if row is not None and not row.final and held.rollout_id in self._held:
            if self._stopping:
                await self._store.queue.release(held.rollout_id, cause="service_stopped")
            else:
                await self._store.rollouts.end(
                    held, "cancelled", outcome="cancelled", cause="cancelled", error="cancelled"
                )
            await exclude_orphaned_calls(self._store, held.rollout_id)
        if not self._stopping:
            await self._settle(await self._store.rollouts.group_id(held.rollout_id))

    async def _again(self, held: Claim, error: InfrastructureError) -> None:
        if held.attempt < self._limits.attempts:
            await self._store.queue.release(held.rollout_id, cause=error.cause)
        else:
            await self._store.rollouts.end(held, "failed", outcome="failed", cause=error.cause, error=str(error))
        await exclude_orphaned_calls(self._store, held.rollout_id)

    async def _after(self, held: Claim) -> None:
        """The group may be decided by now, or over."""
        group_id = await self._store.rollouts.group_id(
            held.rollout_id
        )  # it may have been kept for another one meanwhile
        if await self._settle(group_id):
            return
        group = await self._store.groups.get(group_id)
        assert group is not None
        decide = _policy(group)
        reason = decide(group.wanted, await self._store.rollouts.find(group_id=group_id))
        if reason is None:
            return
        if group.config.items() >= KEEP.items():
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
        settled = await self._store.groups.settle(group_id)
        if settled is not None and settled[1] and self._on_settled is not None:
            self._on_settled(group_id)
        return settled is not None

    async def _end(self, rollout_ids: Sequence[str]) -> None:
        tasks = [self._tasks[rollout_id] for rollout_id in rollout_ids]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _policy(group: GroupRow) -> GroupPolicy:
    """Checked when it was submitted; but that may have been by a version that knows more of them."""
    try:
        return get_group_policy(str(group.config.get("group_policy", "wait_for_all")))
    except UsageError as error:
        log.warning("group %s: %s All of it is waited for.", group.group_id, error)
        return wait_for_all


__all__ = ["AttemptFunction", "InfrastructureError", "StageLimits", "Worker", "WorkerLimits"]
