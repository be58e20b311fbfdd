"""Requests in the provider's own form, of what one dialect has and another has not. No network."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, get_args

import pytest
from anthropic.types import AnthropicBetaParam

from polar_proxy.dialects import get_dialect
from polar_proxy.engines.hosted.anthropic_request import anthropic_body
from polar_proxy.engines.hosted.carried import PASSED_BETAS, not_carried, passed_betas
from polar_proxy.engines.hosted.google_request import google_body
from polar_proxy.engines.hosted.openai_request import chat_fields
from polar_proxy.errors import RequestError
from polar_proxy.sessions.identity import read_betas
from polar_proxy.types import ChatRequest, Json, Message, ProviderTurn, Sampling, ToolCall
from tests.fakes.providers import AnthropicProvider, GoogleProvider, OpenAIProvider, Provider

PNG = "iVBORw0KGgo="
WEATHER: Json = {"type": "function", "function": {"name": "w", "parameters": {"type": "object"}}}


def parsed(dialect: str, **body: Any) -> ChatRequest:
    """Return the request of a body, with the options that only hosted models know."""
    known = get_dialect(dialect, "m")
    made = known.parse(body)
    (request,) = made.requests
    assert isinstance(request, ChatRequest)
    return replace(request, options=known.client_options(made.params))


def to_anthropic(request: ChatRequest) -> Json:
    body = anthropic_body(request, "claude", 8192, stream=False)
    AnthropicProvider().validate("/v1/messages", body)
    return body


def to_google(request: ChatRequest, model: str = "gemini-3-pro") -> Json:
    body = google_body(request, model)
    GoogleProvider().validate(":generateContent", body)
    return body


def to_openai(request: ChatRequest) -> Json:
    body = {"model": "gpt", **chat_fields(request, reasoning=False, official=True)}
    provider: Provider = OpenAIProvider()
    provider.validate("/v1/chat/completions", body)
    return body


def chat(**body: Any) -> ChatRequest:
    return parsed("openai_chat", **{"model": "m", "messages": [{"role": "user", "content": "hi"}], **body})


def test_images_of_all_dialects_reach_all_providers() -> None:
    url = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PNG}"}}
    anthropic: Json = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PNG}}
    google: Json = {"inlineData": {"mimeType": "image/png", "data": PNG}}
    requests = (
        chat(messages=[{"role": "user", "content": [url]}]),
        parsed(
            "openai_responses",
            model="m",
            input=[
                {"role": "user", "content": [{"type": "input_image", "image_url": url["image_url"]["url"]}]}  # type: ignore[index]
            ],
        ),
        parsed("anthropic_messages", model="m", max_tokens=9, messages=[{"role": "user", "content": [anthropic]}]),
        parsed("google_generate_content", contents=[{"role": "user", "parts": [google]}]),
    )
    for request in requests:
        assert to_openai(request)["messages"][-1]["content"] == [url]
        assert to_anthropic(request)["messages"][-1]["content"] == [anthropic]
        assert to_google(request)["contents"][-1]["parts"] == [google]


def test_images_of_a_tool_result_follow_it_at_openai() -> None:
    image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PNG}"}}
    call = ToolCall("c1", "w", "{}")
    messages = (
        Message("user", "look"),
        Message("assistant", None, tool_calls=(call,)),
        Message("tool", [{"type": "text", "text": "seen"}, image], tool_call_id="c1", name="w"),
    )
    request = ChatRequest("m", messages, tools=(WEATHER,))
    assert to_openai(request)["messages"][2:] == [
        {"role": "tool", "content": [{"type": "text", "text": "seen"}], "tool_call_id": "c1"},
        {"role": "user", "content": [image]},
    ]
    (result,) = to_anthropic(request)["messages"][-1]["content"]
    assert [block["type"] for block in result["content"]] == ["text", "image"]
    parts = to_google(request)["contents"][-1]["parts"]
    assert parts[0]["functionResponse"]["response"] == {"output": "seen"}
    assert parts[1]["inlineData"]["data"] == PNG


@pytest.mark.parametrize(
    ("part", "providers"),
    [
        ({"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}, "openai google"),
        ({"type": "file", "file": {"file_data": "data:application/pdf;base64,AAAA", "filename": "a.pdf"}}, "all"),
        ({"type": "file", "file": {"file_url": "https://example.com/a.pdf"}}, "anthropic google"),
        ({"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AAAA"}}, "google"),
        ({"type": "hologram", "hologram": {}}, ""),
    ],
)
def test_what_a_provider_cannot_read_is_refused(part: Json, providers: str) -> None:
    request = ChatRequest("m", (Message("user", [part]),))
    for name, convert in (("openai", to_openai), ("anthropic", to_anthropic), ("google", to_google)):
        if providers == "all" or name in providers.split():
            convert(request)
        else:
            with pytest.raises(RequestError, match="does not accept"):
                convert(request)


@pytest.mark.parametrize(
    ("choice", "anthropic", "google"),
    [
        ("auto", {"type": "auto"}, {"mode": "AUTO"}),
        ("none", {"type": "none"}, {"mode": "NONE"}),
        ("required", {"type": "any"}, {"mode": "ANY"}),
        (
            {"type": "function", "function": {"name": "w"}},
            {"type": "tool", "name": "w"},
            {"mode": "ANY", "allowedFunctionNames": ["w"]},
        ),
    ],
)
def test_tool_choices(choice: Any, anthropic: Json, google: Json) -> None:
    request = chat(tools=[WEATHER], tool_choice=choice)
    assert to_anthropic(request)["tool_choice"] == anthropic
    assert to_google(request)["toolConfig"]["functionCallingConfig"] == google
    assert to_openai(request)["tool_choice"] == choice
    alone = to_anthropic(replace(request, parallel_tool_calls=False))
    assert alone["tool_choice"] == anthropic | ({} if choice == "none" else {"disable_parallel_tool_use": True})


def test_sampling_parameters_and_limits() -> None:
    request = chat(temperature=0.5, top_p=0.9, max_tokens=7, stop=["END"], seed=3, presence_penalty=0.5)
    anthropic, google = to_anthropic(request), to_google(request)["generationConfig"]
    assert (anthropic["max_tokens"], anthropic["stop_sequences"]) == (7, ["END"])
    assert to_anthropic(chat())["max_tokens"] == 8192  # the API requires one
    assert google == {
        "temperature": 0.5,
        "topP": 0.9,
        "maxOutputTokens": 7,
        "seed": 3,
        "stopSequences": ["END"],
        "presencePenalty": 0.5,
    }
    assert "generationConfig" not in to_google(chat())  # the model's own defaults hold


def test_not_carried_names_what_the_provider_is_not_given() -> None:
    request = chat(temperature=0.5, seed=3, top_k=5, min_p=0.1, logprobs=True, user="me", verbosity="low")
    assert not_carried(request, "anthropic") == (
        *("logprobs", "min_p", "seed", "temperature", "top_k", "user", "verbosity"),
    )
    assert not_carried(request, "google") == ("logprobs", "min_p", "user", "verbosity")
    assert not_carried(request, "openai") == ("logprobs", "min_p", "top_k")
    assert {key: to_openai(request)[key] for key in ("user", "verbosity")} == {"user": "me", "verbosity": "low"}
    assert not_carried(chat(), "anthropic") == ()


def test_features_in_a_beta_header_are_passed_on_or_named() -> None:
    headers = {
        "anthropic-beta": "context-1m-2025-08-07,code-execution-2025-05-22, oauth-2025-04-20,context-1m\r\nx: y",
        "openai-beta": "assistants=v2",
    }
    options = parsed(
        "anthropic_messages", model="m", max_tokens=9, messages=[{"role": "user", "content": "hi"}]
    ).options
    assert options is not None
    request = replace(chat(), options=replace(options, betas=read_betas(headers)))
    left_out = {
        "anthropic-beta: code-execution-2025-05-22",
        "anthropic-beta: oauth-2025-04-20",
        "anthropic-beta: context-1m\r\nx: y",
        "openai-beta: assistants=v2",
    }
    assert passed_betas(request, "anthropic") == ("context-1m-2025-08-07",)
    assert set(not_carried(request, "anthropic")) == left_out
    assert passed_betas(request, "openai") == ()
    assert set(not_carried(request, "openai")) == left_out | {"anthropic-beta: context-1m-2025-08-07"}
    assert passed_betas(chat(), "anthropic") == ()


def test_features_that_are_passed_on_are_documented_by_anthropic() -> None:
    documented = get_args(get_args(AnthropicBetaParam)[1])
    assert PASSED_BETAS["anthropic"] <= {f"anthropic-beta: {name}" for name in documented}


@pytest.mark.parametrize("changes", [{"n": 2}, {"logit_bias": {"5": 1.0}}])
def test_what_changes_the_answer_is_refused(changes: Any) -> None:
    request = replace(chat(), sampling=Sampling(**changes))
    with pytest.raises(RequestError, match=next(iter(changes))):
        to_anthropic(request)
    if "logit_bias" in changes:
        with pytest.raises(RequestError, match="logit_bias"):
            to_google(request)
    else:
        assert to_google(request)["generationConfig"]["candidateCount"] == 2


def test_response_formats() -> None:
    schema: Json = {"type": "object", "properties": {"a": {"type": "string"}}}
    named = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    request = chat(response_format=named)
    assert to_anthropic(request)["output_config"] == {"format": {"type": "json_schema", "schema": schema}}
    assert to_google(request)["generationConfig"] == {
        "responseMimeType": "application/json",
        "responseJsonSchema": schema,
    }
    any_object = chat(response_format={"type": "json_object"})
    assert to_google(any_object)["generationConfig"] == {"responseMimeType": "application/json"}
    with pytest.raises(RequestError, match="response_format"):
        to_anthropic(any_object)


@pytest.mark.parametrize(
    ("effort", "anthropic", "gemini_3", "gemini_2"),
    [
        ("low", {"output_config": {"effort": "low"}}, {"thinkingLevel": "LOW"}, {"thinkingBudget": 1024}),
        ("high", {"output_config": {"effort": "high"}}, {"thinkingLevel": "HIGH"}, {"thinkingBudget": 24_576}),
        ("none", {"thinking": {"type": "disabled"}}, {"thinkingBudget": 0}, {"thinkingBudget": 0}),
    ],
)
def test_reasoning_effort(effort: str, anthropic: Json, gemini_3: Json, gemini_2: Json) -> None:
    request = chat(reasoning_effort=effort)
    body = to_anthropic(request)
    assert {key: body[key] for key in ("thinking", "output_config") if key in body} == anthropic
    assert to_google(request)["generationConfig"]["thinkingConfig"] == gemini_3
    assert to_google(request, "gemini-2.5-pro")["generationConfig"]["thinkingConfig"] == gemini_2
    assert to_openai(request)["reasoning_effort"] == effort


def test_thinking_of_anthropic_and_google() -> None:
    body: Json = {"model": "m", "max_tokens": 4000, "messages": [{"role": "user", "content": "hi"}]}
    enabled = parsed("anthropic_messages", **body, thinking={"type": "enabled", "budget_tokens": 2000})
    assert to_anthropic(enabled)["thinking"] == {"type": "enabled", "budget_tokens": 2000}
    assert to_google(enabled)["generationConfig"]["thinkingConfig"] == {
        "thinkingBudget": 2000,
        "includeThoughts": True,
    }
    assert to_openai(enabled)["reasoning_effort"] == "low"
    adaptive = parsed("anthropic_messages", **body, thinking={"type": "adaptive"}, output_config={"effort": "max"})
    sent = to_anthropic(adaptive)
    assert (sent["thinking"], sent["output_config"]) == (
        {"type": "adaptive", "display": "summarized"},
        {"effort": "max"},
    )
    other = parsed("anthropic_messages", **body, thinking={"type": "disabled"})
    assert to_google(other)["generationConfig"]["thinkingConfig"] == {"thinkingBudget": 0}
    contents = [{"role": "user", "parts": [{"text": "hi"}]}]
    level = parsed(
        "google_generate_content", contents=contents, generationConfig={"thinkingConfig": {"thinkingLevel": "HIGH"}}
    )
    assert to_google(level)["generationConfig"]["thinkingConfig"] == {"thinkingLevel": "HIGH"}
    assert to_anthropic(level)["output_config"] == {"effort": "high"}


def test_cache_marks_reach_anthropic_where_they_were() -> None:
    mark, hour = {"type": "ephemeral"}, {"type": "ephemeral", "ttl": "1h"}
    request = parsed(
        "anthropic_messages",
        model="m",
        max_tokens=9,
        system=[{"type": "text", "text": "a"}, {"type": "text", "text": "b", "cache_control": hour}],
        tools=[{"name": "w", "input_schema": {"type": "object"}, "cache_control": mark}],
        messages=[
            {"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "text", "text": "y"}]},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "t1", "name": "w", "input": {}}]},
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "t1", "content": "r", "cache_control": mark},
                    {"type": "text", "text": "go on", "cache_control": mark},
                ],
            },
        ],
        cache_control=mark,
    )
    body = to_anthropic(request)
    assert body["system"] == [{"type": "text", "text": "a"}, {"type": "text", "text": "b", "cache_control": hour}]
    assert body["tools"][-1]["cache_control"] == mark
    assert [block.get("cache_control") for block in body["messages"][-1]["content"]] == [mark, mark]
    assert "cache_control" not in body["messages"][-1]["content"][0]["content"][0]
    assert body["cache_control"] == mark
    assert not_carried(request, "anthropic") == ()
    assert not_carried(request, "google") == ("cache_control",)


def test_signed_turns_come_back_as_far_as_the_client_kept_them() -> None:
    thinking = {"type": "thinking", "thinking": "hm", "signature": "s"}
    blocks = (
        thinking,
        {"type": "text", "text": "Let me look."},
        {"type": "tool_use", "id": "t1", "name": "w", "input": {"a": 1}},
    )
    call = ToolCall("t1", "w", '{"a": 1}')
    signed = Message("assistant", "Let me look.", tool_calls=(call,), provider_turn=ProviderTurn("anthropic", blocks))
    result = Message("tool", "r", tool_call_id="t1")
    user = Message("user", "q")

    def answer(message: Message) -> list[Json]:
        request = ChatRequest("m", (user, message, result))
        blocks: list[Json] = anthropic_body(request, "claude", 9, stream=False)["messages"][1]["content"]
        return blocks

    assert answer(signed) == list(blocks)
    changed = answer(replace(signed, content="Look.", tool_calls=(replace(call, arguments='{"a": 2}'),)))
    assert changed == [thinking, {"type": "text", "text": "Look."}, {**blocks[2], "input": {"a": 2}}]
    other = replace(signed, provider_turn=ProviderTurn("google", ({"text": "Let me look."},)))
    assert answer(other) == list(blocks[1:])


def test_arguments_that_are_no_object_stay_readable() -> None:
    call = ToolCall("a b", "w", "[1, broken")
    messages = (
        Message("user", "q"),
        Message("assistant", None, tool_calls=(call,)),
        Message("tool", "r", tool_call_id="a b"),
    )
    request = ChatRequest("m", messages)
    use, result = to_anthropic(request)["messages"][1:]
    assert use["content"][0] == {"type": "tool_use", "id": "a_b", "name": "w", "input": {"arguments": "[1, broken"}}
    assert result["content"][0]["tool_use_id"] == "a_b"
    part = google_body(request, "gemini-3-pro")["contents"][1]["parts"][0]
    assert part["functionCall"]["args"] == {"arguments": "[1, broken"}


def test_a_later_system_message_keeps_its_place_or_is_named() -> None:
    messages = (Message("system", "a"), Message("user", "q"), Message("assistant", "x"), Message("system", "b"))
    request = ChatRequest("m", (*messages, Message("user", "go")))
    assert [item["role"] for item in to_anthropic(request)["messages"]] == ["user", "assistant", "system", "user"]
    assert to_google(request)["contents"][-1] == {"role": "user", "parts": [{"text": "b"}, {"text": "go"}]}
