"""How busy a vLLM server is, as its `/metrics` says it."""

from __future__ import annotations

import pytest

from polar_proxy.engines.base import EngineLoad
from polar_proxy.engines.vllm import VllmEngine
from polar_proxy.engines.vllm.client import parse_load
from tests.fakes.vllm_server import FakeVllm

TWO = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 4.0
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="m"} 0.0
vllm:num_requests_waiting{engine="1",model_name="a } b"} 5.0
vllm:num_requests_waiting_by_reason{engine="1",reason="capacity"} 99.0
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.9375
vllm:kv_cache_usage_perc_other 7.0
"""


def test_of_replicas_the_mean_of_the_caches_and_all_that_wait() -> None:
    assert parse_load(TWO) == EngineLoad(0.59375, 5, 7, 2)


@pytest.mark.parametrize(
    ("text", "load"),
    [
        ("", None),
        ("# TYPE vllm:num_requests_waiting gauge\nother 3\n", None),
        ("vllm:gpu_cache_usage_perc 0.5\n", EngineLoad(0.5, None, None)),
        ("vllm:num_requests_waiting 12\n", EngineLoad(None, 12, None)),
        ("vllm:kv_cache_usage_perc NaN\nvllm:num_requests_waiting 1e0\n", EngineLoad(None, 1, None)),
        ("vllm:num_requests_waiting x\n", None),
    ],
)
def test_what_is_not_said_is_none(text: str, load: EngineLoad | None) -> None:
    assert parse_load(text) == load


async def test_asked_of_a_server() -> None:
    async with FakeVllm(metrics=TWO) as fake, VllmEngine(fake.url) as engine:
        assert await engine.load() == EngineLoad(0.59375, 5, 7, 2)
        fake.metrics = None
        assert await engine.load() is None
