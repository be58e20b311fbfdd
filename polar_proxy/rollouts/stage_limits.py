"""Gates: how many rollouts may be in a stage at once, and who is next.

Promises:

* never more than `limit` inside; whoever is cancelled while it waits, or fails inside, leaves its place to the next;
* among those who wait, a higher priority enters first; then siblings of a group that is inside already, so that they
  share the engine's prefix cache; then the job with the fewest inside; then whoever came first;
* nobody enters while `admission` says no (an engine that does not answer);
* nobody joins others while `crowded` says no (too little memory, an engine with a long queue). Where everything is idle
  it is not asked: whatever it says, one is let in then, so that work never stands still.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import TypeVar

_Key = TypeVar("_Key")
_RECHECK_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class AdmissionRequest:
    """Who wants to enter."""

    rollout_id: str
    group_id: str
    job_id: str | None = None
    priority: int = 0
    memory_mb: int | None = None
    """What its sandbox is taken to need of the machine; None: it is not said."""


StageCheck = Callable[[], str | None]
"""Why nobody may enter now, or None. Asked in the event loop: it must be quick."""
AdmissionCheck = Callable[[AdmissionRequest], str | None]
"""Why this one may not join the others, or None. Asked in the event loop: it must be quick."""


@dataclass(slots=True, eq=False)
class WaitingRequest:
    ticket: AdmissionRequest
    number: int
    entered: asyncio.Future[None]


QueueKey = tuple[int, str | None, str]
"""(priority, job, group): among these whoever came first is next."""


@dataclass(slots=True)
class StageCounts:
    """What a gate has seen so far, for the metrics. `waited` in seconds, of all who entered."""

    entered: int = 0
    waited: float = 0.0
    refusals: Counter[str] = field(default_factory=Counter)


class StageLimiter:
    """One stage. All methods on one event loop."""

    def __init__(
        self,
        limit: int,
        admission: StageCheck | None = None,
        *,
        crowded: AdmissionCheck | None = None,
        idle: Callable[[], bool] | None = None,
    ) -> None:
        """`idle`: whether there are no others whom one could join; None: none are inside."""
        if limit < 1:
            raise ValueError(f"A stage must let at least one in, not {limit}.")
        self._limit = limit
        self._admission = admission
        self._crowded = crowded
        self._idle = idle or (lambda: not self._inside)
        # Lines and not one list: with ten thousand waiting, choosing the next looks at each group, not at each of them.
        self._lines: dict[QueueKey, dict[int, WaitingRequest]] = {}
        self._inside: dict[str, AdmissionRequest] = {}
        self._groups: Counter[str] = Counter()
        self._jobs: Counter[str | None] = Counter()
        self._came = 0
        self._waiting = 0
        self._asking: asyncio.TimerHandle | None = None
        self.count = StageCounts()

    @property
    def inside(self) -> int:
        return len(self._inside)

    @property
    def waiting(self) -> int:
        return self._waiting

    @property
    def full(self) -> bool:
        """Whether whoever comes now must wait for one inside to leave."""
        return self.inside + self.waiting >= self._limit

    def counts(self) -> dict[str, float]:
        """For the metrics: inside, waiting, limit, entered, waited_seconds, refused."""
        return {
            "inside": self.inside,
            "waiting": self.waiting,
            "limit": self._limit,
            "entered": self.count.entered,
            "waited_seconds": self.count.waited,
            "refused": self.count.refusals.total(),
        }

    @contextlib.asynccontextmanager
    async def enter(self, ticket: AdmissionRequest) -> AsyncIterator[None]:
        """Wait for a place and keep it until the block ends."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        me = WaitingRequest(ticket, self._came, loop.create_future())
        self._came += 1
        self._lines.setdefault(_queue_key(ticket), {})[me.number] = me
        self._waiting += 1
        self._admit()
        try:
            await me.entered
        except BaseException:
            if not self._take_out(me):  # let in at the very moment of its cancellation
                self._leave(ticket)
            raise
        self.count.entered += 1
        self.count.waited += loop.time() - began
        try:
            yield
        finally:
            self._leave(ticket)

    def _leave(self, ticket: AdmissionRequest) -> None:
        del self._inside[ticket.rollout_id]
        _decrement(self._groups, ticket.group_id)
        _decrement(self._jobs, ticket.job_id)
        self._admit()

    def _admit(self) -> None:
        while len(self._inside) < self._limit and (following := self._next()) is not None:
            if (reason := self._refusal(following.ticket)) is not None:
                self.count.refusals[reason] += 1
                self._ask_again()
                return
            self._take_out(following)
            self._inside[following.ticket.rollout_id] = following.ticket
            self._groups[following.ticket.group_id] += 1
            self._jobs[following.ticket.job_id] += 1
            following.entered.set_result(None)

    def _refusal(self, ticket: AdmissionRequest) -> str | None:
        if self._admission is not None and (reason := self._admission()) is not None:
            return reason
        return None if self._crowded is None or self._idle() else self._crowded(ticket)

    def _take_out(self, one: WaitingRequest) -> bool:
        """Out of its line; False if it is in none."""
        line = self._lines.get(_queue_key(one.ticket), {})
        if line.pop(one.number, None) is None:
            return False
        self._waiting -= 1
        if not line:
            del self._lines[_queue_key(one.ticket)]
        return True

    def _next(self) -> WaitingRequest | None:
        found: tuple[int, bool, int, int] | None = None
        following = None
        for (priority, job, group), line in self._lines.items():
            # One that was cancelled a moment ago takes itself out of its line when its task runs.
            head = next((one for one in line.values() if not one.entered.done()), None)
            if head is not None:
                place = -priority, group not in self._groups, self._jobs[job], head.number
                if found is None or place < found:
                    found, following = place, head
        return following

    def _ask_again(self) -> None:
        """Whoever refused will not say when it changes its mind."""
        if self._asking is None:

            def again() -> None:
                self._asking = None
                self._admit()

            self._asking = asyncio.get_running_loop().call_later(_RECHECK_SECONDS, again)


def _queue_key(ticket: AdmissionRequest) -> QueueKey:
    return ticket.priority, ticket.job_id, ticket.group_id


def _decrement(counter: Counter[_Key], key: _Key) -> None:
    """One less of it; none at all leaves no entry."""
    counter[key] -= 1
    if not counter[key]:
        del counter[key]
