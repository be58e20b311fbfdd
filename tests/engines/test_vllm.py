"""The vLLM engine against a fake server: its probe, errors, cancellation, load."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from typing import Any

import pytest

from polar_proxy.engines import openai_client
from polar_proxy.engines.base import EngineLoad
from polar_proxy.engines.logprobs import at_temperature, logprob_mode
from polar_proxy.engines.vllm import VllmEngine
from polar_proxy.engines.vllm.client import parse_load
from polar_proxy.engines.vllm.probe import read_precision
from polar_proxy.errors import EngineDroppedError, EngineError, PolarError, RequestError
from polar_proxy.types import SampleEvent, Sampling
from tests.engines.engine_contract import WEATHER, AbortContract, chat, gather, run
from tests.fakes.engine_server import Fault
from tests.fakes.vllm_server import END, Answer, FakeVllm, ids, text_of
from tests.until import until

TOOLS = {"tools": (WEATHER,)}


async def entered(fake: FakeVllm, **more: Any) -> VllmEngine:
    async with VllmEngine(fake.url, **more) as engine:
        return engine


async def test_probe_finds_capabilities() -> None:
    async with FakeVllm(weight_version="7") as fake, VllmEngine(fake.url + "/v1/") as engine:
        info = engine.info
        assert (info.engine, info.version, info.model, info.context_length) == ("vllm", "0.32.0", "fake", 4096)
        assert info.logprob_mode == "raw"
        assert info.eos_token_ids == (END,)
        every = {"token_ids", "logprobs", "tools", "tool_choice_required", "json_schema", "token_prompt", "score"}
        every.add("continue")
        assert info.capabilities == every
        assert await engine.weight_version() == "7"
        assert await engine.health() is None


async def test_template_hash_changes_with_the_template() -> None:
    async with FakeVllm() as fake:
        one = (await entered(fake)).info.template_hash
        fake.render = lambda body: [1, *FakeVllm.render(fake, body)]  # type: ignore[method-assign]
        assert (await entered(fake)).info.template_hash != one


@pytest.mark.parametrize("quirks", [set(), {"no_tokenize"}])
async def test_rendering_equals_the_prompt_ids(quirks: set[str]) -> None:
    async with FakeVllm(quirks=frozenset(quirks)) as fake, VllmEngine(fake.url) as engine:
        assert (engine.info.eos_token_ids == ()) == bool(quirks)
        for request in (chat(), chat(**TOOLS), chat(sampling=Sampling(n=2, stop=("x",)))):
            assert list((await run(engine, request)).prompt_ids) == await engine.render(request)


@pytest.mark.parametrize(
    ("fake", "capability"),
    [
        (FakeVllm(quirks=frozenset({"no_tools"})), "tools"),
        (FakeVllm(quirks=frozenset({"no_score"})), "score"),
    ],
    ids=["tools", "score"],
)
async def test_probe_does_not_claim_missing_capabilities(fake: FakeVllm, capability: str) -> None:
    async with fake, VllmEngine(fake.url) as engine:
        assert capability not in engine.info.capabilities


async def test_score_needs_the_capability() -> None:
    async with FakeVllm(quirks=frozenset({"no_score"})) as fake, VllmEngine(fake.url) as engine:
        with pytest.raises(RequestError, match="does not return the log-probabilities of a prompt"):
            await engine.score([5, 6])


@pytest.mark.parametrize(
    ("quirk", "message"),
    [
        ("no_ids", "does not return token ids.*update it"),
        ("no_stream_ids", "loses them in streamed ones"),
        ("no_logprobs", "does not return log-probabilities.*--max-logprobs"),
        ("logits", "returns logits.*raw_logprobs"),
    ],
)
async def test_rejects_a_server_without_ids_or_logprobs(quirk: str, message: str) -> None:
    async with FakeVllm(quirks=frozenset({quirk})) as fake:
        with pytest.raises(EngineError, match=message + r".*Recording for training is refused\."):
            await entered(fake)


@pytest.mark.parametrize("processed", [False, True])
async def test_measures_the_logprob_mode(processed: bool) -> None:
    async with FakeVllm(processed=processed) as fake:
        assert (await entered(fake)).info.logprob_mode == ("processed" if processed else "raw")


@pytest.mark.parametrize(
    ("one", "two", "expected"),
    [
        ({"a": -0.1, "b": -4.1}, {"a": -0.1, "b": -4.1}, "raw"),
        ({"a": -0.1, "b": -4.1}, {"a": -0.3, "b": -2.3}, "processed"),
        ({"a": -0.1, "b": -4.1, "c": -9999.0}, {"a": -0.3, "b": -2.3, "c": -9999.0}, "processed"),
        ({"a": -0.1, "b": -4.1, "d": -6.0}, {"b": -4.09, "a": -0.11, "e": -5.0}, "raw"),
        ({"a": -0.7, "b": -0.7}, {"a": -0.7, "b": -0.7}, "no two tokens with different probabilities"),
        ({"a": -0.1, "b": -4.1}, {"a": -0.3, "b": -3.3}, "neither raw nor processed"),
        ({"a": 12.0, "b": 3.0}, {"a": 12.0, "b": 3.0}, "logits"),
        ({"a": -0.1, "b": -0.2}, {"a": -0.1, "b": -0.2}, "logits"),
        ({"a": -0.1}, {"b": -0.1}, "no two tokens with different probabilities"),
    ],
)
def test_logprob_mode(one: dict[str, float], two: dict[str, float], expected: str) -> None:
    if expected in ("raw", "processed"):
        assert logprob_mode(one, two) == expected
    else:
        with pytest.raises(ValueError, match=expected):
            logprob_mode(one, two)


async def test_unknown_model_error_lists_served_models() -> None:
    async with FakeVllm(model="qwen") as fake:
        with pytest.raises(EngineError, match=r"does not serve 'llama'. It serves: qwen\."):
            await entered(fake, model="llama")


async def test_unreachable_server_is_an_engine_error() -> None:
    async with FakeVllm() as fake:
        url = fake.url
    with pytest.raises(EngineError, match="cannot be reached") as caught:
        async with VllmEngine(url):
            pass
    assert caught.value.status == 502


async def test_sends_the_api_key_and_reports_a_refused_one() -> None:
    async with FakeVllm(api_key="k") as fake:
        assert (await entered(fake, api_key="k")).info.model == "fake"
        with pytest.raises(EngineError, match="refused the API key") as caught:
            await entered(fake, api_key="wrong")
        assert caught.value.status == 502
        assert "wrong" not in str(caught.value)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("fault", "kind", "status", "param", "code"),
    [
        (Fault(400, "bad top_p", "top_p"), RequestError, 400, "top_p", None),
        (Fault(422, "bad"), RequestError, 422, None, None),
        (
            Fault(400, "This model's maximum context length is 9 tokens.", "input_tokens"),
            RequestError,
            400,
            "input_tokens",
            "context_length_exceeded",
        ),
        (Fault(429, "later"), EngineError, 429, None, None),
        (Fault(503, "loading"), EngineError, 503, None, None),
        (Fault(500, "died"), EngineError, 502, None, None),
        (Fault(502, body=b"<html>bad gateway</html>"), EngineError, 502, None, None),
        (Fault(200, body=b"{"), EngineError, 502, None, None),
    ],
    ids=["400", "422", "too long", "429", "503", "500", "html", "malformed"],
)
async def test_server_errors_become_typed_errors(
    fault: Fault, kind: type[PolarError], status: int, param: str | None, code: str | None, stream: bool
) -> None:
    async with FakeVllm() as fake, VllmEngine(fake.url) as engine:
        fake.script(fault)
        with pytest.raises(kind) as caught:
            _ = [event async for event in engine.sample(chat(), stream=stream)]
        assert getattr(caught.value, "status", None) == status
        if isinstance(caught.value, RequestError):
            assert (caught.value.param, caught.value.code) == (param, code)
        assert (await run(engine, chat())).choices[0].text == "Hello."


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (Answer(drop_after=3), "broke off"),
        (Answer(garbage_after=3), "malformed JSON"),
        (Answer(error_after=3), "EngineCore encountered"),
    ],
    ids=["dropped", "malformed", "error chunk"],
)
async def test_broken_stream_yields_its_events_before_the_error(answer: Answer, message: str) -> None:
    async with FakeVllm() as fake, VllmEngine(fake.url) as engine:
        answer.delay = 0.02
        fake.script(answer)
        events: list[SampleEvent] = []

        async def listen() -> None:
            async for event in engine.sample(chat()):
                events.append(event)

        with pytest.raises(EngineError, match=message):
            await listen()
        assert [token for event in events for token in event.token_ids] == ids("He")
        assert events[0].prompt_ids is not None


async def test_does_not_sample_again_when_a_connection_drops(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server may have sampled an answer. Requests that do not sample are sent again."""
    monkeypatch.setattr(openai_client, "RETRY_WITHIN_SECONDS", 3600.0)
    async with FakeVllm() as fake, VllmEngine(fake.url) as engine:
        fake.script(Fault(status=None))
        fake.bodies.clear()
        with pytest.raises(EngineDroppedError, match="broke off"):
            await run(engine, chat())
        assert len(fake.bodies) == 1
        assert (await run(engine, chat())).choices[0].text == "Hello."


async def test_streams_text_and_waits_for_a_slow_start() -> None:
    async with FakeVllm() as fake, VllmEngine(fake.url) as engine:
        fake.script(Answer("abcdef", first_delay=0.3, delay=0.02))
        events = [event async for event in engine.sample(chat())]
        assert len(events) > 4
        assert gather(events).choices[0].text == "abcdef"


class TestAbort(AbortContract):
    @pytest.fixture
    async def generating(self) -> AsyncIterator[tuple[FakeVllm, VllmEngine]]:
        async with FakeVllm() as fake, VllmEngine(fake.url) as engine:
            fake.script(Answer("x" * 500, delay=0.05))
            yield fake, engine


async def test_cancelling_a_whole_answer_aborts_the_generation() -> None:
    async with FakeVllm() as fake, VllmEngine(fake.url) as engine:
        fake.script(Answer(first_delay=3600))
        fake.bodies.clear()

        async def ask() -> None:
            _ = [event async for event in engine.sample(chat(), stream=False)]

        task = asyncio.create_task(ask())
        await until(lambda: fake.bodies)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(lambda: fake.aborted)
        assert fake.aborted == 1


@pytest.mark.parametrize("more", [{}, TOOLS], ids=["plain", "tools"])
@pytest.mark.parametrize("stream", [True, False])
async def test_streams_from_the_server_if_the_client_streams_or_has_tools(more: dict[str, Any], stream: bool) -> None:
    """With tools it always streams: a call cut by `max_tokens` differs in a whole answer."""
    async with FakeVllm() as fake, VllmEngine(fake.url) as engine:
        fake.bodies.clear()
        fake.script(Answer("Hi", tool_calls=(("get_weather", '{"city":"Bern"}'),)))
        request = chat(sampling=Sampling(max_tokens=200), **more)
        answer = gather([event async for event in engine.sample(request, stream=stream)]).choices[0]
        assert (answer.text, answer.names, answer.arguments) == ("Hi", {0: "get_weather"}, {0: '{"city":"Bern"}'})
        assert bool(fake.bodies[0].get("stream")) == (stream or bool(more))


async def test_floored_logprob_is_missing() -> None:
    async with FakeVllm() as fake, VllmEngine(fake.url) as engine:
        fake.script(Answer(token_ids=[*ids("ab"), END], logprobs=[-0.5, None, -0.25]))
        events = [event async for event in engine.sample(chat())]
        values = [value for event in events for value in event.logprobs]
        assert values == pytest.approx([-0.5, math.nan, -0.25], nan_ok=True)


async def test_alternatives_have_ids_and_texts() -> None:
    async with FakeVllm() as fake, VllmEngine(fake.url) as engine:
        for stream in (True, False):
            fake.script(Answer("hé"))
            request = chat(sampling=Sampling(top_logprobs=3))
            events = [event async for event in engine.sample(request, stream=stream)]
            for event in events:
                for token, row in zip(event.token_ids, event.top, strict=True):
                    assert row[0].token_id == token
                    assert [entry.token for entry in row] == [text_of([entry.token_id]) for entry in row]


async def test_reuses_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("KEEPALIVE_SECONDS", "FINISH_SECONDS"):
        monkeypatch.setattr(openai_client, name, 3600.0)
    async with FakeVllm() as fake, VllmEngine(fake.url) as engine:
        opened = len(fake.peers)
        for stream in (True, False, True):
            await run(engine, chat())
            _ = [event async for event in engine.sample(chat(), stream=stream)]
        assert len(fake.peers) == opened
        assert 1 <= opened <= 8  # concurrent requests of the probe


async def test_health_reports_the_reason() -> None:
    async with FakeVllm() as fake, VllmEngine(fake.url) as engine:
        await fake.stop()
        assert "cannot be reached" in str(await engine.health()) or "broke off" in str(await engine.health())


async def test_weight_version_is_refreshed_after_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    async with FakeVllm(weight_version="7") as fake, VllmEngine(fake.url) as engine:
        monkeypatch.setattr("polar_proxy.engines.vllm.engine.WEIGHT_VERSION_SECONDS", 3600.0)
        fake.weight_version = "8"
        assert await engine.weight_version() == "7"
        monkeypatch.setattr("polar_proxy.engines.vllm.engine.WEIGHT_VERSION_SECONDS", -1.0)
        assert await engine.weight_version() == "8"


# Load


METRICS_OF_TWO_REPLICAS = """\
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


def test_load_of_replicas() -> None:
    assert parse_load(METRICS_OF_TWO_REPLICAS) == EngineLoad(0.59375, 5, 7, 2)


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
def test_missing_metrics_are_none(text: str, load: EngineLoad | None) -> None:
    assert parse_load(text) == load


async def test_engine_reports_its_load() -> None:
    async with FakeVllm(metrics=METRICS_OF_TWO_REPLICAS) as fake, VllmEngine(fake.url) as engine:
        assert await engine.load() == EngineLoad(0.59375, 5, 7, 2)
        fake.metrics = None
        assert await engine.load() is None


@pytest.mark.parametrize(
    ("description", "expected"),
    [
        ("model='m', dtype=torch.bfloat16, max_seq_len=9, quantization=None, kv_cache_dtype=auto, ", "bfloat16"),
        ("dtype=torch.bfloat16, quantization=fp8, kv_cache_dtype=fp8_e4m3,", "bfloat16, fp8 weights, fp8_e4m3 cache"),
        ("something else", None),
    ],
)
def test_precision_is_read_from_the_servers_configuration(description: str, expected: str | None) -> None:
    assert read_precision(description) == expected


@pytest.mark.parametrize("temperature", [0.3, 0.6, 0.9])
def test_logprob_at_a_temperature_from_the_most_likely_tokens(temperature: float) -> None:
    """Of 200 tokens the 20 most likely are known, and the token itself."""
    logits = [-0.35 * rank for rank in range(200)]
    total = math.log(sum(map(math.exp, logits)))
    values = [value - total for value in logits]
    hot = math.log(sum(math.exp(value / temperature) for value in logits))
    for token in (0, 3, 40):
        known = [*values[:20], *([values[token]] if token >= 20 else [])]
        assert at_temperature(values[token], known, temperature) == pytest.approx(
            logits[token] / temperature - hot, abs=1e-3
        )


def test_logprob_at_a_temperature_is_unknown_if_the_rest_could_change_it() -> None:
    flat = [math.log(1 / 1000)] * 20
    assert math.isnan(at_temperature(flat[0], flat, 0.7))
    assert math.isnan(at_temperature(math.log(0.5), [math.log(0.5), math.log(0.2)], 1.5))
