"""The budget of a session: its limits, what the session has used of them, and whether it is spent.

Promises:

* A call begins only while no limit is reached. The calls in flight count towards `max_calls`, so that this limit is
  never exceeded. Tokens, prices and repeats are counted when a call ends, so the calls in flight may exceed these
  limits, but no call begins after that.
* Once spent, a budget stays spent: the store keeps the name of the limit (`sessions.spent`).
* After a restart the counters are those of the session's row, and repeats are counted from the stored fingerprints.
* If several gateways share a database (setting `gateway.shared`), these promises hold for all of them together. Each
  gateway reads the session's row before a call, and announces the call in the database. The calls that any gateway
  has announced count towards `max_calls` (`store/repositories/calls.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from types import TracebackType
from typing import Self

from polar_proxy.errors import RequestError
from polar_proxy.rollout_spec import SessionBudget
from polar_proxy.store.repositories.sessions import SessionSummary
from polar_proxy.types import Json

_FINAL_ANSWERS = 10
"""Once the budget is spent, Polar answers this many calls with a final text. Further calls are refused."""


class BudgetSpentError(RequestError):
    """Refuses a call because the budget of its session is spent. The status is 403, because SDKs and agents do
    not retry after this status."""

    def __init__(self, limit: str) -> None:
        text = f"The budget of this session is spent ({limit}). No further call is answered; stop here."
        super().__init__(text, status=403, code="insufficient_quota")


class BudgetUsage:
    """The use of one session's budget, as its gateway knows it. A session without limits never spends its budget."""

    def __init__(self, policy: Json) -> None:
        """`policy`: the session's policy, which holds the limits (`SessionBudget.as_policy`)."""
        given = {name: policy[name] for name in SessionBudget.model_fields if name in policy}
        self.limits = SessionBudget(**given)
        self.limited = bool(given)
        self.spent: str | None = None
        """The name of the limit that was reached first; None until a limit is reached."""
        self.stored = False
        """Whether `spent` has been written to the store."""
        self.repeats = 0
        """The largest `CallIndex.repeats` of a call so far."""
        self._calls = 0
        self._pending = 0
        """Calls that have begun and are not counted in `_calls` yet."""
        self._prompt_tokens = 0
        self._sampled_tokens = 0
        self._price_usd = 0.0
        self._last_end: float | None = None
        self._final_answers = 0

    def load(self, row: SessionSummary) -> None:
        """Take over the store's counts where they are larger. The store also counts the calls of other gateways, but
        may lack the latest calls of this gateway."""
        self._calls = max(self._calls, row.calls)
        self._prompt_tokens = max(self._prompt_tokens, row.prompt_tokens)
        self._sampled_tokens = max(self._sampled_tokens, row.completion_tokens)
        self._price_usd = max(self._price_usd, row.price_usd or 0.0)
        self._last_end = max(self._last_end or 0.0, row.last_call_at or 0.0) or None
        self.spent, self.stored = row.spent or self.spent, row.spent is not None

    def reserve(self, calls: int, now: float) -> Reservation:
        """Reserve `calls` new calls. If the budget is spent, the reservation has a refusal or a final answer
        instead."""
        if self.limited and self.spent is None:
            self.spent = self._reached(calls, now)
        if self.spent is None:
            self._pending += calls
            return Reservation(self, calls)
        return self._over_budget()

    def reached_elsewhere(self) -> Reservation:
        """Mark `max_calls` as reached, because other gateways took the last calls. Return a reservation that refuses
        the calls of this request, or gives them a final answer."""
        self.spent = self.spent or "max_calls"
        return self._over_budget()

    def _over_budget(self) -> Reservation:
        if self.limits.at_budget == "refuse" or self._final_answers >= _FINAL_ANSWERS:
            return Reservation(self, 0, refusal=BudgetSpentError(self.description))
        self._final_answers += 1
        text = (
            f"The budget of this session is spent ({self.description}). This text is not from the model, which answers "
            "no further call. Finish now, without another tool call."
        )
        return Reservation(self, 0, final_answer=text)

    def spend_if_idle(self, now: float, *, since: float) -> bool:
        """If no call is in flight and the session was idle for longer than `max_idle_seconds`, mark the budget as spent
        and return True. The idle time begins when the last call ended, or at `since` if this is later."""
        limit = self.limits.max_idle_seconds
        idle = limit is not None and not self._pending and now - max(since, self._last_end or 0.0) > limit
        if idle and self.spent is None:
            self.spent = "max_idle_seconds"
        return idle

    @property
    def description(self) -> str:
        """The limit that was reached, with its value."""
        return f"{self.spent} = {getattr(self.limits, self.spent or '')}"

    def _reached(self, calls: int, now: float) -> str | None:
        """Return the name of the limit that forbids `calls` further calls; None if they may begin."""
        limits = self.limits
        if limits.max_calls is not None and self._calls + self._pending + calls > limits.max_calls:
            return "max_calls"
        for name, used in (
            ("max_sampled_tokens", self._sampled_tokens),
            ("max_prompt_tokens", self._prompt_tokens),
            ("max_price_usd", self._price_usd),
            ("max_repeats", self.repeats),
        ):
            limit = getattr(limits, name)
            if limit is not None and used >= limit:
                return name
        if self._last_end is not None and self.spend_if_idle(now, since=self._last_end):
            return "max_idle_seconds"
        return None

    def count(self, prompt_tokens: int, sampled_tokens: int, ended_at: float, price_usd: float) -> None:
        """Count a call that has ended."""
        self._calls += 1
        self._prompt_tokens += prompt_tokens
        self._sampled_tokens += sampled_tokens
        self._price_usd += price_usd
        self._last_end = max(self._last_end or 0.0, ended_at)

    def release(self, calls: int) -> None:
        """Undo the reservation of `calls` calls."""
        self._pending -= calls


@dataclass(slots=True)
class Reservation:
    """The calls of one request, reserved in the budget. Leaving the `with` block releases the calls that were not
    counted."""

    usage: BudgetUsage
    calls: int
    refusal: BudgetSpentError | None = None
    """The error for the agent if the calls are refused; otherwise None. Then the model or `final_answer` answers."""
    final_answer: str | None = None
    """Polar's answer in place of the model's if the budget is spent; None if the model answers or the calls are
    refused."""

    def count(self, prompt_tokens: int, sampled_tokens: int, ended_at: float, price_usd: float | None = None) -> None:
        """Count one call that has ended, and release its reservation. `price_usd`: None if the price is not known."""
        self.usage.count(prompt_tokens, sampled_tokens, ended_at, price_usd or 0.0)
        if self.calls:
            self.usage.release(1)
            self.calls -= 1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.usage.release(self.calls)
        self.calls = 0
