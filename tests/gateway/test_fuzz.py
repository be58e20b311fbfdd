"""Random requests to all routes of a real gateway, in brief. `benchmarks/fuzz.py` sends a hundred thousand."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.fuzz import P99_SECONDS, run


@pytest.mark.full
async def test_random_requests_find_nothing(tmp_path: Path) -> None:
    report = await run(3000, seed=7, only=None, folder=tmp_path)
    # Other tests share the machine, so the honest session's waiting says nothing here, but the gateway's own stalls do.
    assert [finding for finding in report.findings if "p99" not in finding] == []
    assert report.longest_stall < P99_SECONDS
    assert report.statuses[200] > 300
    assert report.statuses[400] > 300
