"""Prometheus metrics of the rollout service and the feed, added to the gateway's `/metrics`.

The numbers are read from the service when `/metrics` is requested, so that they are kept in one place only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from polar_proxy.types import Json


class ServiceCollector(Collector):
    """A Prometheus collector, to be registered with the gateway's registry."""

    def __init__(self, counts: Callable[[], Json | None], feed_depth: Callable[[], dict[str, int]]) -> None:
        """`counts`: `RolloutService.counts`, or a function that returns None on a server without a service."""
        self._counts = counts
        self._feed_depth = feed_depth

    def collect(self) -> Iterator[Metric]:
        feed = GaugeMetricFamily("polar_feed_groups", "Groups of the trainer feed by state.", labels=["state"])
        for state, groups in self._feed_depth().items():
            feed.add_metric([state], groups)
        yield feed
        counts = self._counts()
        if counts is None:
            return
        yield GaugeMetricFamily("polar_rollouts_in_flight", "Rollouts that this process works on.", counts["in_flight"])
        yield from _stage_metrics(counts)
        yield from _pool_metrics(counts["pool"])


def _stage_metrics(counts: Json) -> Iterator[Metric]:
    gauges = {
        name: GaugeMetricFamily(f"polar_stage_{name}", text, labels=["stage"])
        for name, text in (
            ("inside", "Rollouts in the stage now."),
            ("waiting", "Rollouts that wait to enter the stage."),
            ("limit", "Rollouts that may be in the stage at a time."),
        )
    }
    entered = CounterMetricFamily("polar_stage_entered", "Rollouts that entered the stage.", labels=["stage"])
    waited = CounterMetricFamily(
        "polar_stage_waited_seconds", "Seconds that rollouts waited to enter the stage.", labels=["stage"]
    )
    refusals = CounterMetricFamily(
        "polar_stage_refusals", "Times that a rollout was not admitted, by reason.", labels=["stage", "reason"]
    )
    for stage, limiter in counts["stages"].items():
        for name, family in gauges.items():
            family.add_metric([stage], limiter[name])
        entered.add_metric([stage], limiter["entered"])
        waited.add_metric([stage], limiter["waited_seconds"])
        for reason, times in counts["refusals"][stage].items():
            refusals.add_metric([stage, reason], times)
    yield from (*gauges.values(), entered, waited, refusals)


def _pool_metrics(pool: Json) -> Iterator[Metric]:
    yield GaugeMetricFamily("polar_pool_on_shelf", "Sandboxes that are ready now.", pool["on_shelf"])
    taken = CounterMetricFamily("polar_pool_taken", "Sandboxes taken, by where they came from.", labels=["result"])
    for result, name in (("hit", "hits"), ("miss", "misses"), ("dead", "dead")):
        taken.add_metric([result], pool[name])
    yield taken
    yield CounterMetricFamily("polar_pool_waited_seconds", "Seconds waited for a sandbox.", pool["waited_seconds"])
