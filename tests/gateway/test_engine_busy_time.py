"""The time in which the engine is busy. Parallel calls count once."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack

import httpx
import pytest

from polar_proxy.engines.scripted import ScriptedEngine
from polar_proxy.gateway.metrics import BusyClock
from tests.conftest import Serve


def test_counts_time_with_several_calls_once() -> None:
    now = 100.0
    busy = BusyClock(lambda: now)
    assert busy.seconds() == 0.0
    with ExitStack() as first, ExitStack() as second:
        first.enter_context(busy)
        now = 103.0
        second.enter_context(busy)
        assert busy.seconds() == 3.0  # a call that has not ended counts until now
        now = 104.0
        first.close()
        now = 110.0
    now = 150.0  # no calls in the meantime
    assert busy.seconds() == 10.0

    def failing_call() -> None:
        nonlocal now
        with busy:
            now = 151.0
            raise RuntimeError("the engine failed")

    with pytest.raises(RuntimeError):
        failing_call()
    assert busy.seconds() == 11.0


async def test_metrics_report_the_engines_busy_time(serve: Serve) -> None:
    async with serve(ScriptedEngine()) as gateway, httpx.AsyncClient(base_url=gateway.url, timeout=120) as http:
        assert "polar_engine_busy_seconds 0.0" in (await http.get("/metrics")).text
        chat = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
        answers = await asyncio.gather(*(http.post("/v1/chat/completions", json=chat) for _ in range(3)))
        assert [answer.status_code for answer in answers] == [200] * 3
        spent = gateway.metrics.busy.seconds()
        assert spent > 0
        await asyncio.sleep(0.05)
        assert gateway.metrics.busy.seconds() == spent
