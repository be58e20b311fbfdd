"""A leak for the test of `benchmarks/soak.py`: with it, the soak must fail."""

from __future__ import annotations

from polar_proxy.gateway.metrics import GatewayMetrics
from polar_proxy.types import CallRecord


def leak(size: int) -> None:
    """Let the gateways of this process keep `size` bytes with each call."""
    kept: list[bytes] = []
    count = GatewayMetrics.count

    def count_and_leak(self: GatewayMetrics, record: CallRecord) -> None:
        kept.append(b"x" * size)
        count(self, record)

    GatewayMetrics.count = count_and_leak  # type: ignore[method-assign]
