"""A memory leak for the test of `benchmarks/soak.py`: a run with this leak must fail."""

from __future__ import annotations

from polar_proxy.gateway.metrics import GatewayMetrics
from polar_proxy.types import CallRecord


def leak(size: int) -> None:
    """Make the gateways of this process leak `size` bytes with each call."""
    kept: list[bytes] = []
    count = GatewayMetrics.count

    def count_and_leak(self: GatewayMetrics, record: CallRecord) -> None:
        kept.append(b"x" * size)
        count(self, record)

    GatewayMetrics.count = count_and_leak  # type: ignore[method-assign]
