"""Limits on how many rollouts are in a stage at a time, and the order in which waiting rollouts enter.

Promises:

* there are never more than `limit` rollouts inside; one that is cancelled while it waits, or fails inside, frees its
  place;
* waiting rollouts enter by priority; then siblings of a group that is inside already come first, because they share the
  engine's prefix cache; then the job with the fewest rollouts inside; then the one that has waited longest;
* nothing enters while `may_enter` refuses (the engine does not respond);
* nothing joins other rollouts while `may_join` refuses (too little memory, a long engine queue). While everything is
  idle, `may_join` is not called and one rollout enters in any case, so that work never stops for good.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

_Key = TypeVar("_Key")
_RECHECK_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class AdmissionRequest:
    """A rollout that wants to enter a stage."""

    rollout_id: str
    group_id: str
    job_id: str | None = None
    priority: int = 0
    memory_mb: int | None = None
    """Memory that its sandbox needs; None if its task does not specify it."""


AdmissionCheck = Callable[[AdmissionRequest], str | None]
"""Returns why a rollout may not enter now, or None. Called in the event loop, so it must be quick."""


@dataclass(slots=True, eq=False)
class WaitingRequest:
    request: AdmissionRequest
    number: int
    entered: asyncio.Future[None]


QueueKey = tuple[int, str | None, str]
"""(priority, job, group). Requests with the same key enter in the order in which they came."""


@dataclass(slots=True)
class StageCounts:
    """Counts of a limiter, for the metrics."""

    entered: int = 0
    waited: float = 0.0
    """Seconds that all rollouts that entered waited in total."""
    refusals: Counter[str] = field(default_factory=Counter)


class StageLimiter:
    """The limit of one stage. All methods belong to one event loop."""

    def __init__(
        self,
        limit: int,
        *,
        may_enter: AdmissionCheck | None = None,
        may_join: AdmissionCheck | None = None,
        idle: Callable[[], bool] | None = None,
    ) -> None:
        """`idle` returns whether no other rollout is at work; by default, whether no rollout is inside."""
        if limit < 1:
            raise ValueError(f"A stage must admit at least one rollout, not {limit}.")
        self._limit = limit
        self._may_enter = may_enter
        self._may_join = may_join
        self._idle = idle or (lambda: not self._inside)
        # One queue per group: with ten thousand waiting, choosing the next examines each group and not each request.
        self._queues: dict[QueueKey, dict[int, WaitingRequest]] = {}
        self._inside: dict[str, AdmissionRequest] = {}
        self._groups: Counter[str] = Counter()
        self._jobs: Counter[str | None] = Counter()
        self._next_number = 0
        self._waiting = 0
        self._recheck: asyncio.TimerHandle | None = None
        self.count = StageCounts()

    @property
    def inside(self) -> int:
        return len(self._inside)

    @property
    def waiting(self) -> int:
        return self._waiting

    @property
    def full(self) -> bool:
        """True if a request made now must wait until a rollout leaves."""
        return self.inside + self.waiting >= self._limit

    def counts(self) -> dict[str, float]:
        """Return inside, waiting, limit, entered, waited_seconds and refused, for the metrics."""
        return {
            "inside": self.inside,
            "waiting": self.waiting,
            "limit": self._limit,
            "entered": self.count.entered,
            "waited_seconds": self.count.waited,
            "refused": self.count.refusals.total(),
        }

    @contextlib.asynccontextmanager
    async def enter(self, request: AdmissionRequest) -> AsyncIterator[None]:
        """Wait for a place and keep it until the block ends."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        waiting = WaitingRequest(request, self._next_number, loop.create_future())
        self._next_number += 1
        self._queues.setdefault(_queue_key(request), {})[waiting.number] = waiting
        self._waiting += 1
        self._admit()
        try:
            await waiting.entered
        except BaseException:
            if not self._dequeue(waiting):  # it was admitted at the moment of its cancellation
                self._leave(request)
            raise
        self.count.entered += 1
        self.count.waited += loop.time() - began
        try:
            yield
        finally:
            self._leave(request)

    def _leave(self, request: AdmissionRequest) -> None:
        del self._inside[request.rollout_id]
        _decrement(self._groups, request.group_id)
        _decrement(self._jobs, request.job_id)
        self._admit()

    def _admit(self) -> None:
        while len(self._inside) < self._limit and (following := self._next()) is not None:
            if (reason := self._refusal(following.request)) is not None:
                self.count.refusals[reason] += 1
                self._recheck_later()
                return
            self._dequeue(following)
            self._inside[following.request.rollout_id] = following.request
            self._groups[following.request.group_id] += 1
            self._jobs[following.request.job_id] += 1
            following.entered.set_result(None)

    def _refusal(self, request: AdmissionRequest) -> str | None:
        if self._may_enter is not None and (reason := self._may_enter(request)) is not None:
            return reason
        return None if self._may_join is None or self._idle() else self._may_join(request)

    def _dequeue(self, waiting: WaitingRequest) -> bool:
        """Remove the request from its queue; return False if it is in no queue."""
        key = _queue_key(waiting.request)
        queue = self._queues.get(key, {})
        if queue.pop(waiting.number, None) is None:
            return False
        self._waiting -= 1
        if not queue:
            del self._queues[key]
        return True

    def _next(self) -> WaitingRequest | None:
        best: tuple[int, bool, int, int] | None = None
        following = None
        for (priority, job, group), queue in self._queues.items():
            # A request that was cancelled a moment ago leaves its queue only when its task runs.
            head = next((waiting for waiting in queue.values() if not waiting.entered.done()), None)
            if head is not None:
                rank = -priority, group not in self._groups, self._jobs[job], head.number
                if best is None or rank < best:
                    best, following = rank, head
        return following

    def _recheck_later(self) -> None:
        """Check admission again soon, because nothing reports when a check's result changes."""
        if self._recheck is None:

            def recheck() -> None:
                self._recheck = None
                self._admit()

            self._recheck = asyncio.get_running_loop().call_later(_RECHECK_SECONDS, recheck)


@dataclass(frozen=True, slots=True)
class StageLimits:
    """The limiters of an attempt's stages."""

    preparing: StageLimiter
    running: StageLimiter
    scoring: StageLimiter

    @property
    def at_work(self) -> int:
        """How many rollouts are preparing, or have been prepared and not ended."""
        later = (self.running, self.scoring)
        return self.preparing.inside + sum(limiter.inside + limiter.waiting for limiter in later)

    def by_name(self) -> Mapping[str, StageLimiter]:
        return {"preparing": self.preparing, "running": self.running, "scoring": self.scoring}


def _queue_key(request: AdmissionRequest) -> QueueKey:
    return request.priority, request.job_id, request.group_id


def _decrement(counter: Counter[_Key], key: _Key) -> None:
    """Decrement; drop the key at zero."""
    counter[key] -= 1
    if not counter[key]:
        del counter[key]
