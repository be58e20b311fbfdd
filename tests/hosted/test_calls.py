"""Calls of hosted models: errors, keys, usage and price, signatures, counts."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest
import tiktoken
from google.genai import errors as google_errors

from polar_proxy.config import EngineSettings, provider_key
from polar_proxy.engines.factory import make_engine
from polar_proxy.engines.hosted.openai import OpenAIEngine
from polar_proxy.engines.hosted.token_counts import TokenCounter
from polar_proxy.errors import EngineError, UsageError
from polar_proxy.prices import PriceTable
from polar_proxy.store import Store
from polar_proxy.types import Usage
from tests.conftest import Serve
from tests.fakes.providers import KEY, AnthropicProvider, GoogleProvider, OpenAIProvider, Refused, Scripted
from tests.gateway.agents import recorded_calls
from tests.hosted.agents import QUESTION, anthropic_client, google_client, messages_agent, openai_client
from tests.hosted.stand_ins import PROVIDERS, engine_of, providers, streams

pytestmark = pytest.mark.slow

CHAT: Any = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


async def post(url: str, **body: Any) -> httpx.Response:
    async with httpx.AsyncClient(timeout=60, headers={"authorization": "Bearer agent"}) as http:
        return await http.post(url + "/v1/chat/completions", json={**CHAT, **body})


async def ask(url: str, dialect: str) -> None:
    if dialect == "anthropic_messages":
        async with anthropic_client(url) as claude:
            await claude.messages.create(model="m", max_tokens=9, messages=CHAT["messages"])
    elif dialect == "google_generate_content":
        async with google_client(url) as google:
            await google.models.generate_content(model="m", contents=QUESTION)
    else:
        async with openai_client(url) as client:
            if dialect == "openai_chat":
                await client.chat.completions.create(**CHAT)
            else:
                await client.responses.create(model="m", input="hi")


async def failure_of(url: str, dialect: str) -> tuple[int, str | None, str]:
    """Return status, retry-after and text of the error that the dialect's SDK raises."""
    with pytest.raises((openai.APIStatusError, anthropic.APIStatusError, google_errors.APIError)) as caught:
        await ask(url, dialect)
    error = caught.value
    status = error.code if isinstance(error, google_errors.APIError) else error.status_code
    return status, error.response.headers.get("retry-after"), str(error)


@providers
@pytest.mark.parametrize(
    "dialect", ["openai_chat", "openai_responses", "anthropic_messages", "google_generate_content"]
)
async def test_errors_keep_status_meaning_and_retry_after(serve: Serve, dialect: str, provider: str) -> None:
    cases = (
        (Refused(429, "slow down", "rate_limit_error", {"retry-after": "17"}), 429, "17"),
        (Refused(503, "down", "unavailable", {"retry-after": "9"}), 503, "9"),
        (Refused(529, "overloaded", "overloaded_error", {"retry-after": "5"}), 529, "5"),
        (Refused(500, "broken", "api_error"), 500, None),
        (Refused(404, "no such model", "not_found_error"), 404, None),
    )
    async with PROVIDERS[provider]() as api, serve(engine_of(api)) as gateway:
        for refusal, status, after in cases:
            api.script(refusal)
            code, header, text = await failure_of(gateway.url, dialect)
            assert (code, header) == (status, after)
            assert refusal.message in text
        assert len(api.bodies) == len(cases)  # no request was repeated


async def test_a_conversation_that_is_too_long_is_named_as_each_client_expects(serve: Serve) -> None:
    too_long = Refused(400, "prompt is too long: 210000 tokens > 200000 maximum", "invalid_request_error")
    async with AnthropicProvider() as api, serve(engine_of(api)) as gateway:
        api.script(too_long, too_long)
        assert (await post(gateway.url)).json()["error"]["code"] == "context_length_exceeded"
        async with anthropic_client(gateway.url) as client:
            with pytest.raises(anthropic.BadRequestError) as caught:
                await client.messages.create(model="m", max_tokens=9, messages=CHAT["messages"])
        assert caught.value.body["error"]["message"] == too_long.message  # type: ignore[index]


async def test_googles_retry_delay_is_handed_on_in_both_forms(serve: Serve) -> None:
    async with GoogleProvider() as api, serve(engine_of(api)) as gateway:
        api.script(*[Refused(429, "quota", "resource_exhausted", delay="16.2s")] * 2)
        assert (await post(gateway.url)).headers["retry-after"] == "17"
        async with google_client(gateway.url) as client:
            with pytest.raises(google_errors.ClientError) as caught:
                await client.models.generate_content(model="m", contents="hi")
        assert "'retryDelay': '17s'" in str(caught.value)


@providers
async def test_a_stream_that_fails_or_breaks_off_is_an_error_and_recorded(
    serve: Serve, store: Store, provider: str
) -> None:
    async with PROVIDERS[provider]() as api, serve(engine_of(api)) as gateway:
        for answer in (Scripted("Hello there", error_in_stream=True), Scripted("Hello there", cut=True)):
            api.script(answer)
            async with openai_client(gateway.url) as client:
                with pytest.raises(openai.APIError):
                    async for _ in await client.chat.completions.create(**CHAT, stream=True):
                        pass
    first, second = await recorded_calls(store, count=2)
    assert first.status == second.status == "upstream_error"
    assert "overloaded" in str(first.error)
    assert "broke off" in str(second.error)
    assert len(api.bodies) == 2


@providers
async def test_the_providers_key_is_in_no_answer_record_or_log(
    serve: Serve, store: Store, provider: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    async with PROVIDERS[provider]() as api, serve(engine_of(api)) as gateway:
        api.script(Scripted("Hello."), Refused(400, f"the key {KEY} cannot do this"), Refused(401, f"{KEY} is wrong"))
        answers = [await post(gateway.url) for _ in range(3)]
        assert [answer.status_code for answer in answers] == [200, 400, 502]
        assert all(KEY in str(headers) for headers in api.headers)
        # The agent's own key stays here.
        assert {key for headers in api.headers for key in _keys(headers)} == {_SENT[provider]}
    assert "[secret removed]" in answers[1].text
    assert not any(KEY in answer.text for answer in answers)
    assert KEY not in caplog.text
    assert KEY not in repr(EngineSettings(kind="openai", api_key=KEY))
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert files
    assert not any(KEY.encode() in path.read_bytes() for path in files)


_SENT = {"openai": f"Bearer {KEY}", "anthropic": KEY, "google": KEY}


def _keys(headers: Mapping[str, str]) -> list[str]:
    names = ("authorization", "x-api-key", "x-goog-api-key")
    return [value for name, value in headers.items() if name.lower() in names]


def test_keys_come_from_the_settings_or_the_variables_of_the_sdks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OPENAI_API_KEY", "ANTHROPIC_API_KEY", "GEMINI_API_KEY", "GOOGLE_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    assert provider_key(EngineSettings(kind="google")) is None
    monkeypatch.setenv("GOOGLE_API_KEY", "second")
    assert provider_key(EngineSettings(kind="google")) == "second"
    monkeypatch.setenv("GEMINI_API_KEY", "first")
    assert provider_key(EngineSettings(kind="google")) == "first"
    assert provider_key(EngineSettings(kind="google", api_key="set")) == "set"
    monkeypatch.setenv("ANTHROPIC_API_KEY", "a")
    monkeypatch.setenv("OPENAI_API_KEY", "o")
    assert [provider_key(EngineSettings(kind=kind)) for kind in ("anthropic", "openai", "vllm")] == ["a", "o", None]


def test_default_urls_and_missing_models() -> None:
    urls = {
        kind: make_engine(EngineSettings(kind=kind, model="m")).client.url  # type: ignore[attr-defined]
        for kind in ("openai", "anthropic", "google")
    }
    assert urls == {
        "openai": "https://api.openai.com",
        "anthropic": "https://api.anthropic.com",
        "google": "https://generativelanguage.googleapis.com",
    }
    for kind in ("anthropic", "google"):
        with pytest.raises(UsageError, match="--model"):
            make_engine(EngineSettings(kind=kind))


@providers
async def test_an_unknown_model_or_a_wrong_key_is_refused_at_the_start(provider: str) -> None:
    async with PROVIDERS[provider]() as api:
        wrong = engine_of(api)
        wrong.client._http._fields = wrong.client._http._fields.replace(KEY.encode(), b"other-key-000000")
        with pytest.raises(EngineError, match="refused the API key"):
            await wrong.__aenter__()
        api.model = "another"
        engine = engine_of(api)
        api.model = "stand-in"
        if provider != "openai":  # an alias need not be in OpenAI's list
            with pytest.raises(EngineError, match="another"):
                await engine.__aenter__()


# ---------------------------------------------------------------- usage and price


@streams
async def test_anthropics_cache_writes_are_counted_and_priced(serve: Serve, store: Store, stream: bool) -> None:
    async with AnthropicProvider() as api, serve(engine_of(api)) as gateway:
        api.script(
            Scripted("Look.", calls=(("get_weather", {"city": "Bern"}),), written=40), Scripted("It rains.", written=40)
        )
        done = await messages_agent(gateway.url, stream)
    assert done.input_tokens == 100
    call = (await recorded_calls(store, count=2))[-1]
    assert call.usage == Usage(
        100, 20, 30, cache_write_tokens=40, cache_write_1h_tokens=40, reasoning_tokens=5, model=api.model
    )
    assert call.price_usd == pytest.approx((30 * 3 + 30 * 0.3 + 40 * 6 + 20 * 15) / 1e6)
    sent = api.bodies[-1]
    assert sent["system"][-1]["cache_control"] == {"type": "ephemeral", "ttl": "1h"}
    assert sent["tools"][-1]["cache_control"] == {"type": "ephemeral"}
    assert sent["messages"][-1]["content"][0]["cache_control"] == {"type": "ephemeral"}


async def test_the_price_file_may_be_replaced(serve: Serve, store: Store, tmp_path: Path) -> None:
    prices = tmp_path / "prices.toml"
    prices.write_text('[[model]]\nname = "gpt-4.1"\ninput = 1\noutput = 10\ndate = 2026-01-01\nsource = "contract"\n')
    async with OpenAIProvider() as api, serve(engine_of(api), prices=str(prices)) as gateway:
        api.script(Scripted("Hello."))
        await post(gateway.url)
        api.model = "gpt-unknown"
        await post(gateway.url)
        metrics = (await httpx.AsyncClient().get(gateway.url + "/metrics")).text
    known, unknown = await recorded_calls(store, count=2)
    assert (known.price_usd, unknown.price_usd) == (pytest.approx((100 + 20 * 10) / 1e6), None)
    assert unknown.usage is not None
    (session,) = await store.sessions.recent()
    assert session.price_usd == pytest.approx(known.price_usd)
    assert "polar_price_usd_total 0.0003" in metrics


def test_price_files(tmp_path: Path) -> None:
    table = PriceTable()
    long = Usage(300_000, 1000, model="claude-sonnet-4-5-20250929")
    assert table.price(long) == pytest.approx((300_000 * 6 + 1000 * 22.5) / 1e6)
    assert table.price(Usage(100, 10, model="models/gemini-2.5-flash-001")) == pytest.approx((30 + 25) / 1e6)
    assert table.price(Usage(100, 10, model="gpt-4o-2024-05-13")) == pytest.approx((500 + 150) / 1e6)
    assert table.price(Usage(100, 10, model="gpt-4.1", service_tier="flex")) is None
    assert table.price(Usage(100, 10, model="llama")) is None
    assert table.price(None) is None
    bad = tmp_path / "bad.toml"
    for text in (
        '[[model]]\nname = "m"\n',
        "not toml",
        '[[model]]\nname="m"\ninput=1\noutput=1\n',
        "model = []\nx = 1",
    ):
        bad.write_text(text)
        with pytest.raises(UsageError, match=r"bad\.toml"):
            PriceTable(bad)
    with pytest.raises(UsageError, match="cannot be read"):
        PriceTable(tmp_path / "none.toml")


# ---------------------------------------------------------------- signatures


@pytest.mark.parametrize("provider", ["anthropic", "google"])
async def test_signed_answers_survive_a_restart_of_the_gateway(serve: Serve, store: Store, provider: str) -> None:
    """The agent's API has no field for signatures, so they come from the database."""
    tools = [{"type": "function", "function": {"name": "w", "parameters": {"type": "object"}}}]
    messages = [*CHAT["messages"]]
    async with PROVIDERS[provider]() as api:
        api.script(Scripted("Look.", reasoning="Hm.", calls=(("w", {"a": 1}),)))
        async with serve(engine_of(api)) as gateway:
            first = (await post(gateway.url, tools=tools)).json()["choices"][0]["message"]
        call = {key: first["tool_calls"][0][key] for key in ("id", "type", "function")}
        messages.append({"role": "assistant", "content": "Look.", "tool_calls": [call]})
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": "rain"})
        async with serve(engine_of(api)) as gateway:
            answer = await post(gateway.url, tools=tools, messages=messages)
        assert answer.status_code == 200, answer.text
        # Another session has not recorded the answer, so it cannot return the signature.
        async with serve(engine_of(api)) as gateway, httpx.AsyncClient(timeout=60) as http:
            body = {**CHAT, "tools": tools, "messages": messages}
            other = await http.post(
                gateway.url + "/v1/chat/completions", json=body, headers={"authorization": "Bearer other"}
            )
        assert other.status_code == 400
        assert "signature" in other.text


# ---------------------------------------------------------------- the rest of an answer


@streams
@providers
async def test_finish_reasons(serve: Serve, provider: str, stream: bool) -> None:
    async with PROVIDERS[provider]() as api, serve(engine_of(api)) as gateway:
        for finish, expected in (("stop", "stop"), ("length", "length"), ("filter", "content_filter")):
            api.script(Scripted("Hello.", finish=finish))
            async with openai_client(gateway.url) as client:
                if stream:
                    chunks = [chunk async for chunk in await client.chat.completions.create(**CHAT, stream=True)]
                    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == expected
                else:
                    answer = await client.chat.completions.create(**CHAT)
                    assert answer.choices[0].finish_reason == expected


async def test_a_stop_sequence_is_named(serve: Serve) -> None:
    async with AnthropicProvider() as api, serve(engine_of(api)) as gateway:
        api.script(Scripted("Hello ", finish="stop_sequence"))
        async with anthropic_client(gateway.url) as client:
            answer = await client.messages.create(
                model="m", max_tokens=9, messages=CHAT["messages"], stop_sequences=["END"]
            )
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", "END")
    assert api.bodies[0]["stop_sequences"] == ["END"]


async def test_what_was_not_carried_is_recorded_and_what_was_sent_is_the_clients(serve: Serve, store: Store) -> None:
    async with AnthropicProvider() as api, serve(engine_of(api)) as gateway:
        answer = await post(gateway.url, seed=3, temperature=0.2, user="me", max_tokens=9)
        assert answer.status_code == 200
        assert (await post(gateway.url, n=2)).status_code == 400
    call = (await recorded_calls(store, count=2))[0]
    assert call.sampling == {
        "temperature": 0.2,
        "max_tokens": 9,
        "seed": 3,
        "n": 1,
        "logprobs": False,
        "top_logprobs": 0,
        "not_carried": ["seed", "temperature", "user"],
    }
    assert len(api.bodies) == 1


async def test_features_in_a_beta_header_reach_the_provider_or_are_recorded(serve: Serve, store: Store) -> None:
    betas = ["interleaved-thinking-2025-05-14", "fast-mode-2026-02-01", "mcp-client-2025-04-04"]
    given: Any = {"model": "m", "max_tokens": 9, "messages": CHAT["messages"]}
    async with (
        AnthropicProvider() as api,
        serve(engine_of(api)) as gateway,
        anthropic_client(gateway.url) as client,
    ):
        await client.beta.messages.create(**given, betas=betas)
        await client.messages.create(**given)
    sent = [{name.lower(): value for name, value in one.items()} for one in api.headers[-2:]]
    assert [one.get("anthropic-beta") for one in sent] == ["interleaved-thinking-2025-05-14,fast-mode-2026-02-01", None]
    calls = await recorded_calls(store, count=2)
    assert calls[0].sampling["not_carried"] == ["anthropic-beta: mcp-client-2025-04-04"]
    assert "not_carried" not in calls[1].sampling


# ---------------------------------------------------------------- counts


async def test_prompts_are_counted_by_the_provider(serve: Serve) -> None:
    for name in ("anthropic", "google"):
        async with PROVIDERS[name]() as api, serve(engine_of(api)) as gateway:
            async with anthropic_client(gateway.url) as client:
                counted = await client.messages.count_tokens(model="m", messages=CHAT["messages"])
            assert counted.input_tokens == 4321
            async with google_client(gateway.url) as google:
                assert (await google.models.count_tokens(model="m", contents="hi")).total_tokens == 4321
            assert api.bodies == []


def _bytes_encoding(model: str) -> tiktoken.Encoding:
    if not model.startswith("gpt"):
        raise KeyError(model)
    ranks = {bytes([value]): value for value in range(256)}
    return tiktoken.Encoding("bytes", pat_str=r"[\s\S]", mergeable_ranks=ranks, special_tokens={"<|end|>": 256})


@streams
async def test_tokens_that_no_provider_counts_are_estimated_by_tiktoken(
    serve: Serve, store: Store, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    monkeypatch.setattr(tiktoken, "encoding_for_model", _bytes_encoding)
    async with OpenAIProvider() as api, serve(engine_of(api)) as gateway:
        api.script(Scripted("Hello.", counts=False))
        answer = await post(gateway.url, stream=stream)
        assert answer.status_code == 200
        async with anthropic_client(gateway.url) as client:
            counted = await client.messages.count_tokens(model="m", messages=CHAT["messages"])
    (call,) = await recorded_calls(store, count=1)
    assert call.usage is not None
    assert (call.usage.output_tokens, call.usage.estimated) == (len("Hello."), True)
    assert call.usage.input_tokens == counted.input_tokens > len("userhi")
    assert call.price_usd is not None


def test_without_a_vocabulary_bytes_are_counted_and_the_log_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def offline(model: str) -> tiktoken.Encoding:
        raise ConnectionError("no network")

    monkeypatch.setattr(tiktoken, "encoding_for_model", offline)
    counter = TokenCounter()
    assert [counter.count("gpt-4o", "Zürich") for _ in range(2)] == [2, 2]
    assert counter.split("gpt-4o", "Zürich") is None
    assert caplog.text.count("could not load the vocabulary") == 1
    monkeypatch.setattr(tiktoken, "encoding_for_model", _bytes_encoding)
    exact = TokenCounter()
    assert exact.count("gpt-4o", "ab<|end|>") == 9  # text is never a special token
    assert exact.split("gpt-4o", "abc") == ["a", "b", "c"]
    assert exact.count("claude-x", "abcde") == 2


def test_only_openais_own_hosts_get_its_options() -> None:
    for url, official in (
        ("https://api.openai.com/v1", True),
        ("https://x.openai.azure.com/openai/v1", True),
        ("https://openai.com.example.org/v1", False),
        ("http://127.0.0.1:11434/v1", False),
    ):
        assert OpenAIEngine(url, model="m")._official is official
