"""What /metrics tells, in one place. Each gateway has its own registry, so that two in one process do not collide."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from polar_proxy.types import CallRecord

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class BusyClock:
    """The time in which at least one call was with the engine, however many there were."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._calls = 0
        self._since = self._before = 0.0

    @contextlib.contextmanager
    def call(self) -> Iterator[None]:
        """A call is with the engine for as long as the block lasts."""
        if self._calls == 0:
            self._since = self._clock()
        self._calls += 1
        try:
            yield
        finally:
            self._calls -= 1
            if self._calls == 0:
                self._before += self._clock() - self._since

    def seconds(self) -> float:
        """Until now, calls that have not ended included."""
        return self._before + (self._clock() - self._since if self._calls else 0.0)


class GatewayMetrics:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.calls = Counter(
            "polar_calls",
            "Model calls by dialect and final status.",
            ["dialect", "status"],
            registry=self.registry,
        )
        self.refused = Counter(
            "polar_refused_requests",
            "Requests refused before they became calls.",
            ["status"],
            registry=self.registry,
        )
        self.lost = Counter(
            "polar_lost_calls", "Calls answered but not recorded (must stay 0).", registry=self.registry
        )
        self.joined = Counter(
            "polar_joined_retries",
            "Requests answered from the call that they retry.",
            registry=self.registry,
        )
        self.prompt_tokens = Counter("polar_prompt_tokens", "Prompt tokens of all calls.", registry=self.registry)
        self.cached_tokens = Counter(
            "polar_cached_tokens",
            "Prompt tokens that the engine had in its prefix cache.",
            registry=self.registry,
        )
        self.completion_tokens = Counter("polar_completion_tokens", "Sampled tokens.", registry=self.registry)
        self.in_flight = Gauge("polar_calls_in_flight", "Calls being answered now.", registry=self.registry)
        self.busy = BusyClock()
        busy = Gauge(
            "polar_engine_busy_seconds",
            "Seconds in which at least one call was with the engine, since the start.",
            registry=self.registry,
        )
        busy.set_function(self.busy.seconds)
        self.first_token = Histogram(
            "polar_first_token_seconds", "Request to first event.", registry=self.registry, buckets=_SECONDS
        )
        self.duration = Histogram("polar_call_seconds", "Request to commit.", registry=self.registry, buckets=_SECONDS)
        self.commit = Histogram(
            "polar_commit_seconds",
            "Waiting for the commit of a call.",
            registry=self.registry,
            buckets=_SECONDS,
        )

        self._by_outcome: dict[tuple[str, str], Counter] = {}

    def count(self, record: CallRecord) -> None:
        """A call has ended."""
        outcome = (record.dialect, record.status)
        calls = self._by_outcome.get(outcome)
        if calls is None:  # looking a label up costs as much as all the rest here
            calls = self._by_outcome[outcome] = self.calls.labels(*outcome)
        calls.inc()
        self.prompt_tokens.inc(0 if record.prompt_ids is None else len(record.prompt_ids))
        self.cached_tokens.inc(record.cached_tokens or 0)
        self.completion_tokens.inc(sum(len(choice.token_ids) for choice in record.choices))
        if record.first_token_at is not None:
            self.first_token.observe(record.first_token_at - record.started_at)
        self.duration.observe(record.ended_at - record.started_at)

    def render(self) -> bytes:
        """The Prometheus text exposition."""
        return generate_latest(self.registry)
