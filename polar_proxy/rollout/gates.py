"""Gates: how many rollouts may be in a stage at once, and who is next.

Promises:

* never more than `limit` inside; whoever is cancelled while it waits, or fails inside, leaves its place to the next;
* among those who wait, a higher priority enters first; then siblings of a group that is inside already, so that they
  share the engine's prefix cache; then the job with the fewest inside; then whoever came first;
* nobody enters while `admission` says no (too little memory, an engine with a long queue).
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

Admission = Callable[[], str | None]
"""Why nobody may enter now, or None. Asked in the event loop: it must be quick."""

_ASK_AGAIN_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class Ticket:
    """Who wants to enter."""

    rollout_id: str
    group_id: str
    job_id: str | None = None
    priority: int = 0


@dataclass(slots=True, eq=False)
class _Waiting:
    ticket: Ticket
    number: int
    entered: asyncio.Future[None]


@dataclass(slots=True)
class GateCount:
    """What a gate has seen so far, for the metrics. `waited` in seconds, of all who entered."""

    entered: int = 0
    waited: float = 0.0
    refusals: Counter[str] = field(default_factory=Counter)


class Gate:
    """One stage. All methods on one event loop."""

    def __init__(self, limit: int, admission: Admission | None = None) -> None:
        if limit < 1:
            raise ValueError(f"A stage must let at least one in, not {limit}.")
        self._limit = limit
        self._admission = admission
        self._waiting: list[_Waiting] = []
        self._inside: dict[str, Ticket] = {}
        self._came = 0
        self._asking: asyncio.TimerHandle | None = None
        self.count = GateCount()

    @property
    def inside(self) -> int:
        return len(self._inside)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @contextlib.asynccontextmanager
    async def enter(self, ticket: Ticket) -> AsyncIterator[None]:
        """Wait for a place and keep it until the block ends."""
        began = time.monotonic()
        loop = asyncio.get_running_loop()
        me = _Waiting(ticket, self._came, loop.create_future())
        self._came += 1
        self._waiting.append(me)
        self._admit()
        try:
            await me.entered
        except BaseException:
            if me in self._waiting:
                self._waiting.remove(me)
            else:  # let in at the very moment of its cancellation
                self._leave(ticket)
            raise
        self.count.entered += 1
        self.count.waited += time.monotonic() - began
        try:
            yield
        finally:
            self._leave(ticket)

    def _leave(self, ticket: Ticket) -> None:
        del self._inside[ticket.rollout_id]
        self._admit()

    def _admit(self) -> None:
        while len(self._inside) < self._limit and (following := self._next()) is not None:
            if self._admission is not None and (reason := self._admission()) is not None:
                self.count.refusals[reason] += 1
                self._ask_again()
                return
            self._waiting.remove(following)
            self._inside[following.ticket.rollout_id] = following.ticket
            following.entered.set_result(None)

    def _next(self) -> _Waiting | None:
        groups = {ticket.group_id for ticket in self._inside.values()}
        jobs = Counter(ticket.job_id for ticket in self._inside.values())

        def order(one: _Waiting) -> tuple[int, bool, int, int]:
            ticket = one.ticket
            return -ticket.priority, ticket.group_id not in groups, jobs[ticket.job_id], one.number

        # One that was cancelled a moment ago takes itself off the list when its task runs.
        return min((one for one in self._waiting if not one.entered.done()), key=order, default=None)

    def _ask_again(self) -> None:
        """Whoever refused will not say when it changes its mind."""
        if self._asking is None:

            def again() -> None:
                self._asking = None
                self._admit()

            self._asking = asyncio.get_running_loop().call_later(_ASK_AGAIN_SECONDS, again)
