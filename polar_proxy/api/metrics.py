"""What the rollout service adds to the gateway's /metrics: asked when it is read, so that nothing is counted twice."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from polar_proxy.types import Json


class ServiceCollector(Collector):
    """Register it with the gateway's registry."""

    def __init__(self, counts: Callable[[], Json | None], feed_depth: Callable[[], dict[str, int]]) -> None:
        """`counts`: as `RolloutService.counts`, None where there is no service."""
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
        yield GaugeMetricFamily("polar_rollouts_in_hand", "Rollouts that this process has.", counts["in_flight"])
        yield from _gates(counts)
        yield from _pool(counts["pool"])


def _gates(counts: Json) -> Iterator[Metric]:
    gauges = {
        name: GaugeMetricFamily(f"polar_stage_{name}", text, labels=["stage"])
        for name, text in (
            ("inside", "Rollouts in a stage now."),
            ("waiting", "Rollouts that wait for a place in a stage."),
            ("limit", "Places of a stage."),
        )
    }
    entered = CounterMetricFamily("polar_stage_entered", "Rollouts that entered a stage.", labels=["stage"])
    waited = CounterMetricFamily("polar_stage_waited_seconds", "What they waited for a place.", labels=["stage"])
    refusals = CounterMetricFamily("polar_stage_refusals", "Why nobody was let in.", labels=["stage", "reason"])
    for stage, gate in counts["gates"].items():
        for name, family in gauges.items():
            family.add_metric([stage], gate[name])
        entered.add_metric([stage], gate["entered"])
        waited.add_metric([stage], gate["waited_seconds"])
        for reason, times in counts["refusals"][stage].items():
            refusals.add_metric([stage, reason], times)
    yield from (*gauges.values(), entered, waited, refusals)


def _pool(pool: Json) -> Iterator[Metric]:
    yield GaugeMetricFamily("polar_pool_on_shelf", "Sandboxes opened ahead of need.", pool["on_shelf"])
    asked = CounterMetricFamily("polar_pool_taken", "Sandboxes taken, by where they came from.", labels=["result"])
    for result, name in (("hit", "hits"), ("miss", "misses"), ("dead", "dead")):
        asked.add_metric([result], pool[name])
    yield asked
    yield CounterMetricFamily("polar_pool_waited_seconds", "What all who took one waited.", pool["waited_seconds"])
