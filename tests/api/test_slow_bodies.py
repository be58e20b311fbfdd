"""A request body that comes too slowly to the HTTP API is refused in its own form, and others are served meanwhile."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from polar_proxy.api_models import API_PREFIX, ErrorResponse
from tests.api.conftest import ServeApi
from tests.gateway.test_limits import connection, read_answer, send_slowly

pytestmark = pytest.mark.slow

TOO_SLOW = {"body_window_seconds": 0.4, "body_rate_kb": 1}
TOO_LONG = {"body_window_seconds": 0.2, "body_rate_kb": 0, "body_seconds": 0.4}


@pytest.mark.parametrize("path", ["/jobs", "/feed/lease", "/service/pause"])
@pytest.mark.parametrize(
    ("limits", "reason"), [(TOO_SLOW, "1 KiB/s for 0.4 seconds"), (TOO_LONG, "longer than 0.4 seconds")]
)
async def test_a_slow_body_is_refused(serve_api: ServeApi, path: str, limits: dict[str, Any], reason: str) -> None:
    async with serve_api(gateway_limits=limits) as running, connection(running.gateway) as (reader, writer):
        key = running.admin.headers["authorization"]
        head = f"POST {API_PREFIX}{path} HTTP/1.1\r\nhost: localhost\r\nauthorization: {key}\r\n"
        head += "content-type: application/json\r\ncontent-length: 100000\r\n\r\n{"
        writer.write(head.encode())
        trickle = asyncio.create_task(send_slowly(writer))
        assert (await running.get("/feed"))["depth"] == {}
        status, body = await read_answer(reader)
        trickle.cancel()
    assert status == 408
    error = ErrorResponse.model_validate(body).error
    assert (error.code, reason in error.message) == ("bad_request", True)
