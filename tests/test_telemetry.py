"""Traces arrive at an OTLP receiver by the GenAI conventions, cost nothing when off, and never wait for it."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import orjson
import pytest

from polar_proxy.config import TelemetrySettings
from polar_proxy.engines.scripted import ScriptedEngine
from polar_proxy.store import Store
from polar_proxy.telemetry import SpanSender, traced
from polar_proxy.types import CallRecord
from tests.cli.runner import polar_json
from tests.conftest import Serve
from tests.factories import call_record, new_rollout

pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="pip install 'polar-proxy[otel]'")

from tests.fakes.otlp_server import OtlpServer, attributes_of, otlp_server

SECRET = "a message that nobody else may read"


@pytest.fixture
def collector() -> Iterator[OtlpServer]:
    with otlp_server() as server:
        yield server


def settings(collector: OtlpServer, **more: object) -> TelemetrySettings:
    return TelemetrySettings.model_validate({"endpoint": collector.url, "headers": {"x-key": "k"}, **more})


async def ended_rollout(store: Store) -> tuple[str, str]:
    """Store a rollout that prepared, ran and was scored, and return its id and its session's."""
    session = (await store.sessions.create(key_hash=None, label=None, origin="rollout")).session_id
    rollout_id = await new_rollout(store)
    (claim,) = await store.queue.claim("host:1:w", 1, 60, job_id=(await store.rollouts.find())[0].job_id)
    session = (
        await store.sessions.create(key_hash=None, label=None, origin="rollout", rollout_id=rollout_id)
    ).session_id
    await store.rollouts.enter_stage(claim, "preparing", session_id=session)
    await store.rollouts.enter_stage(claim, "running")
    await store.rollouts.enter_stage(claim, "scoring")
    await store.rewards.add(rollout_id, 0.5, "hidden_tests", {})
    await store.rollouts.end(claim, "done")
    return rollout_id, session


async def test_a_rollout_is_one_trace_of_stages_and_calls(store: Store, collector: OtlpServer) -> None:
    rollout_id, session = await ended_rollout(store)
    observers: list[Callable[[CallRecord], None]] = []
    async with traced(settings(collector), store, observers.append, lambda session_id: rollout_id) as ended:
        call = call_record(session, messages=(orjson.dumps({"role": "user", "content": SECRET}),))
        observers[0](call)
        observers[0](replace(call, call_id="call_2", status="upstream_error", http_status=502, choices=()))
        ended(rollout_id)
    (root,) = collector.named("rollout mini-swe-agent")
    (agent,) = collector.named("invoke_agent mini-swe-agent")
    first, failed = sorted(collector.named("chat "), key=lambda span: span.status.code)
    assert {span.trace_id for span in collector.spans} == {root.trace_id}
    assert [span.parent_span_id for span in (first, failed)] == [agent.span_id] * 2
    assert {span.parent_span_id for name in ("preparing", "scoring") for span in collector.named(name)} == {
        root.span_id
    }
    assert agent.parent_span_id == root.span_id
    assert root.parent_span_id == b""
    found = attributes_of(first)
    assert found["gen_ai.operation.name"] == "chat"
    assert (found["gen_ai.request.model"], found["gen_ai.provider.name"]) == (call.model, "vllm")
    assert (found["gen_ai.usage.input_tokens"], found["gen_ai.usage.output_tokens"]) == (7, 5)
    assert found["gen_ai.response.id"] == call.call_id
    assert found["gen_ai.conversation.id"] == session
    assert attributes_of(failed)["error.type"] == "upstream_error"
    assert failed.status.code == 2
    assert first.end_time_unix_nano - first.start_time_unix_nano == pytest.approx(1.862654e9, abs=1e6)
    (event,) = root.events
    assert event.name == "gen_ai.evaluation.result"
    assert attributes_of(event)["gen_ai.evaluation.score.value"] == 0.5
    assert collector.services == {"polar"}
    assert collector.headers[0]["x-key"] == "k"
    assert SECRET not in str(collector.spans)


async def test_messages_are_sent_only_by_a_setting(store: Store, collector: OtlpServer) -> None:
    observers: list[Callable[[CallRecord], None]] = []
    silent = {"role": "tool", "tool_call_id": "call_1", "content": ""}
    messages = tuple(map(orjson.dumps, ({"role": "user", "content": SECRET}, silent)))
    async with traced(settings(collector, content=True), store, observers.append, lambda session_id: None):
        observers[0](call_record("sess_1", messages=messages, tools=None))
    (span,) = collector.spans
    assert orjson.loads(attributes_of(span)["gen_ai.input.messages"]) == [
        {"role": "user", "parts": [{"type": "text", "content": SECRET}]},
        {"role": "tool", "parts": [{"type": "tool_call_response", "id": "call_1", "response": ""}]},
    ]
    assert span.parent_span_id == b""


async def test_a_slow_receiver_costs_spans_and_no_time(collector: OtlpServer) -> None:
    collector.gate.clear()
    sender = SpanSender(settings(collector, queue=10))
    record = call_record("sess_1")
    started = time.perf_counter()
    for _ in range(1000):
        sender.put((record, None))
    assert time.perf_counter() - started < 1.0
    assert sender.dropped == 990


@pytest.mark.slow
async def test_calls_of_a_gateway_are_traced(serve: Serve, store: Store, collector: OtlpServer) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "temperature": 0.5}
    async with (
        serve(ScriptedEngine()) as gateway,
        httpx.AsyncClient(timeout=60) as http,
        traced(settings(collector), store, gateway.observe, gateway.sessions.rollout_of),
    ):
        answer = await http.post(f"{gateway.url}/v1/chat/completions", json=body)
    (span,) = collector.spans
    found = attributes_of(span)
    assert (found["gen_ai.response.id"], found["gen_ai.request.temperature"]) == (answer.headers["x-request-id"], 0.5)


@pytest.mark.slow
def test_nothing_is_imported_without_an_endpoint() -> None:
    program = """
import asyncio, sys
from polar_proxy.config import TelemetrySettings
from polar_proxy.telemetry import traced
async def main():
    async with traced(TelemetrySettings(), None, None, None) as ended:
        ended("roll_1")
asyncio.run(main())
print([name for name in sys.modules if name.startswith("opentelemetry")])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.slow
def test_a_run_sends_the_traces_of_its_rollouts(
    polar_home: Path, collector: OtlpServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POLAR_TELEMETRY__ENDPOINT", collector.url)
    agent = ("--engine", "tests.fakes.player:PlayerEngine", "--harness", "tests.fakes.tiny_agent:TinyAgent")
    (row,) = polar_json("run", "swe-task", *agent, "--sandbox", "process")["rollouts"]
    (root,) = collector.named("rollout ")
    (running,) = collector.named("invoke_agent ")
    calls = collector.named("chat ")
    assert attributes_of(root)["polar.rollout.id"] == row["rollout_id"]
    assert attributes_of(root)["polar.reward"] == 1.0
    assert len(calls) == row["calls"] > 3
    assert {call.parent_span_id for call in calls} == {running.span_id}
    assert {span.trace_id for span in collector.spans} == {root.trace_id}
