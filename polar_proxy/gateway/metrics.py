"""The metrics of /metrics. Each gateway has its own registry, so that two gateways in one process do not collide."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from polar_proxy.types import CallRecord

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class BusyClock:
    """Measures the time in which at least one call was in the engine. Use: `with clock:` around each call."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._calls = 0
        self._since = self._earlier = 0.0

    def __enter__(self) -> None:
        if self._calls == 0:
            self._since = self._clock()
        self._calls += 1

    def __exit__(self, *error: object) -> None:
        self._calls -= 1
        if self._calls == 0:
            self._earlier += self._clock() - self._since

    def seconds(self) -> float:
        """Return the seconds measured so far. A call that is still in the engine counts up to this moment."""
        return self._earlier + (self._clock() - self._since if self._calls else 0.0)


class GatewayMetrics:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        counter = partial(Counter, registry=self.registry)
        gauge = partial(Gauge, registry=self.registry)
        seconds = partial(Histogram, registry=self.registry, buckets=_SECONDS)
        self.calls = counter("polar_calls", "Model calls by dialect and final status.", ["dialect", "status"])
        self.refused = counter("polar_refused_requests", "Requests refused before they became calls.", ["status"])
        self.lost = counter("polar_lost_calls", "Calls answered but not recorded (must stay 0).")
        self.joined = counter("polar_joined_retries", "Retries answered with the response to the first attempt.")
        self.prompt_tokens = counter("polar_prompt_tokens", "Prompt tokens of all calls.")
        self.cached_tokens = counter("polar_cached_tokens", "Prompt tokens that were in the engine's prefix cache.")
        self.completion_tokens = counter("polar_completion_tokens", "Sampled tokens.")
        self.price = counter("polar_price_usd", "Known prices of hosted calls in US dollars.")
        self.in_flight = gauge("polar_calls_in_flight", "Calls being answered now.")
        self.busy = BusyClock()
        help_text = "Seconds in which at least one call was in the engine, since the start."
        gauge("polar_engine_busy_seconds", help_text).set_function(self.busy.seconds)
        self.first_token = seconds("polar_first_token_seconds", "Seconds from a request to the answer's first event.")
        self.duration = seconds("polar_call_seconds", "Seconds from a request to the answer's end.")
        self.commit = seconds("polar_commit_seconds", "Seconds that a call waited for its commit.")
        self._calls_by_outcome: dict[tuple[str, str], Counter] = {}

    def count(self, record: CallRecord) -> None:
        outcome = (record.dialect, record.status)
        calls = self._calls_by_outcome.get(outcome)
        if calls is None:  # looking up a label costs as much as the rest of this function
            calls = self._calls_by_outcome[outcome] = self.calls.labels(*outcome)
        calls.inc()
        self.prompt_tokens.inc(record.prompt_tokens)
        if record.cached_tokens:
            self.cached_tokens.inc(record.cached_tokens)
        self.completion_tokens.inc(record.completion_tokens)
        if record.price_usd:
            self.price.inc(record.price_usd)
        if record.first_token_at is not None:
            self.first_token.observe(record.first_token_at - record.started_at)
        self.duration.observe(record.ended_at - record.started_at)

    def render(self) -> bytes:
        return generate_latest(self.registry)
