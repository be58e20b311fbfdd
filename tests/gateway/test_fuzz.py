"""Random requests to all routes of a real gateway, in brief. `benchmarks/fuzz.py` sends a hundred thousand."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.fuzz import P99_SECONDS, FuzzReport, judge_the_log, run


@pytest.mark.full
async def test_random_requests_find_nothing(tmp_path: Path) -> None:
    report = await run(3000, seed=7, only=None, folder=tmp_path)
    # Other tests share the machine, so the honest session's waiting says nothing here, but the gateway's own stalls do.
    assert [finding for finding in report.findings if "p99" not in finding] == []
    assert report.longest_stall < P99_SECONDS
    assert report.statuses[200] > 300
    assert report.statuses[400] > 300
    over_websockets = sum(counts[101] for name, counts in report.by_route.items() if "WebSocket" in name)
    assert over_websockets > 20
    for route in ("GET /v1/responses/{id}", "responses of a stored response", "/s/{key} chat"):
        assert report.by_route[route][200] >= 3, route


def test_finds_faults_in_the_log(tmp_path: Path) -> None:
    report = FuzzReport()
    log = tmp_path / "gateway.log"
    log.write_text("INFO call call_1 was broken off\nWARNING the engine is away\n")
    judge_the_log(log, report)
    assert report.findings == []
    log.write_text("INFO started\nERROR call call_1 failed inside Polar\nTraceback (most recent call last):\n  x\n")
    judge_the_log(log, report)
    (finding,) = report.findings
    assert "call_1 failed inside Polar" in finding
