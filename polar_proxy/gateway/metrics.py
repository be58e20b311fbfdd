"""What /metrics tells, in one place. Each gateway has its own registry, so that two in one process do not collide."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class Metrics:
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
        self.prompt_tokens = Counter("polar_prompt_tokens", "Prompt tokens of all calls.", registry=self.registry)
        self.cached_tokens = Counter(
            "polar_cached_tokens",
            "Prompt tokens that the engine had in its prefix cache.",
            registry=self.registry,
        )
        self.completion_tokens = Counter("polar_completion_tokens", "Sampled tokens.", registry=self.registry)
        self.in_flight = Gauge("polar_calls_in_flight", "Calls being answered now.", registry=self.registry)
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

    def render(self) -> bytes:
        """The Prometheus text exposition."""
        return generate_latest(self.registry)
