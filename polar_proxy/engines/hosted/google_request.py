"""A request in the format of Google's GenerateContent. Source: https://ai.google.dev/api/generate-content

* System messages at the beginning are `systemInstruction`. Later ones become text parts of a `user` content, because
  the API has no system role there; `not_carried` then includes `messages.system`.
* The result of a tool is a `functionResponse` with the text as `output`; its images follow in the same content.
* If an earlier answer was signed, its text and tool calls are sent with their `thoughtSignature`s, unless the client
  changed them. Reasoning is left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from polar_proxy.engines.base import enforced_format
from polar_proxy.engines.hosted.carried import passed_fields, refuse_sampling
from polar_proxy.engines.hosted.content import (
    TEXT_PARTS,
    add_to_turn,
    arguments_object,
    forced_tool,
    part_text,
    parts_of,
    read_media,
    schema_of,
    split_system,
    unsupported_part,
)
from polar_proxy.types import ChatRequest, ClientOptions, Json, Message, ToolCall

_BUDGETS = {"minimal": 1024, "low": 1024, "medium": 8192, "high": 24_576, "xhigh": 24_576, "max": 24_576}
"""Number of thinking tokens by effort. Models before Gemini 3 take this number instead of a level.
Source: https://ai.google.dev/gemini-api/docs/openai"""
_LEVELS = {"minimal": "MINIMAL", "low": "LOW", "medium": "MEDIUM", "high": "HIGH", "xhigh": "HIGH", "max": "HIGH"}
_CONFIG = "generationConfig."


def google_body(request: ChatRequest, model: str) -> Json:
    """Return the body. Raises RequestError for a request that Google's format cannot express."""
    refuse_sampling(request.sampling, "google")
    body = google_prompt(request)
    config = _generation_config(request, model)
    for name, value in passed_fields(request, "google").items():
        if name.startswith(_CONFIG):
            config[name.removeprefix(_CONFIG)] = value
        else:
            body[name] = value
    if config:
        body["generationConfig"] = config
    return body


def google_prompt(request: ChatRequest) -> Json:
    """Return the fields of the body that determine the prompt. A request to count the prompt's tokens has the same
    fields."""
    leading, messages = split_system(request.messages)
    body: Json = {"contents": _contents(messages)}
    if system := [part for message in leading for part in _parts(message)]:
        body["systemInstruction"] = {"parts": system}
    if request.tools:
        body["tools"] = [{"functionDeclarations": [_declaration(tool["function"]) for tool in request.tools]}]
        if request.tool_choice is not None:
            body["toolConfig"] = {"functionCallingConfig": _calling_config(request.tool_choice)}
    return body


def _contents(messages: Iterable[Message]) -> list[Json]:
    out: list[Json] = []
    names: dict[str, str] = {}
    for message in messages:
        role = "model" if message.role == "assistant" else "user"
        if message.role == "tool":
            parts = _result(message, names)
        elif role == "model":
            names |= {call.id: call.name for call in message.tool_calls}
            parts = _model_parts(message)
        else:
            parts = _parts(message)
        add_to_turn(out, role, "parts", parts)
    return out


def _parts(message: Message) -> list[Json]:
    return [_part(part) for part in parts_of(message) if part.get("type") not in TEXT_PARTS or part_text(part)]


def _part(part: Json) -> Json:
    if part.get("type") in TEXT_PARTS:
        return {"text": part_text(part)}
    media = read_media(part)
    if media.url:
        return {"fileData": {"fileUri": media.url} | ({"mimeType": media.mime} if media.mime else {})}
    if not media.mime:
        raise unsupported_part(f"a {media.kind} of unknown type")
    return {"inlineData": {"mimeType": media.mime, "data": media.data}}


def _result(message: Message, names: Mapping[str, str]) -> list[Json]:
    call_id = message.tool_call_id or ""
    name = names.get(call_id) or message.name or "unknown"
    parts = _parts(message)
    text = "".join(part["text"] for part in parts if "text" in part)
    response = {"name": name, "response": {"output": text}} | ({"id": call_id} if call_id else {})
    return [{"functionResponse": response}, *(part for part in parts if "text" not in part)]


def _model_parts(message: Message) -> list[Json]:
    turn = message.provider_turn
    signed = turn.content if turn is not None and turn.provider == "google" else ()
    calls = {
        part["functionCall"].get("id"): part["thoughtSignature"]
        for part in signed
        if "functionCall" in part and "thoughtSignature" in part
    }
    text = "".join(part_text(part) for part in parts_of(message))
    texts = [part for part in signed if "text" in part and not part.get("thought")]
    if text and "".join(part["text"] for part in texts) == text:
        parts = [dict(part) for part in texts]
    else:
        parts = [{"text": text}] if text else []
    return [*parts, *(_function_call(call, calls.get(call.id)) for call in message.tool_calls)]


def _function_call(call: ToolCall, signature: str | None) -> Json:
    part: Json = {"functionCall": {"name": call.name, "args": arguments_object(call.arguments)}}
    if call.id:
        part["functionCall"]["id"] = call.id
    return part if signature is None else {**part, "thoughtSignature": signature}


def _declaration(function: Json) -> Json:
    out: Json = {"name": function["name"], "description": function.get("description") or function["name"]}
    if function.get("parameters"):
        out["parametersJsonSchema"] = function["parameters"]
    return out


def _calling_config(choice: str | Json) -> Json:
    if (name := forced_tool(choice)) is not None:
        return {"mode": "ANY", "allowedFunctionNames": [name]}
    return {"mode": {"required": "ANY", "none": "NONE"}.get(str(choice), "AUTO")}


def _generation_config(request: ChatRequest, model: str) -> Json:
    sampling = request.sampling
    config: dict[str, Any] = {
        "temperature": sampling.temperature,
        "topP": sampling.top_p,
        "topK": sampling.top_k or None,
        "maxOutputTokens": sampling.max_tokens,
        "seed": sampling.seed,
        "stopSequences": list(sampling.stop) or None,
        "candidateCount": sampling.n if sampling.n != 1 else None,
        "presencePenalty": sampling.presence_penalty or None,
        "frequencyPenalty": sampling.frequency_penalty or None,
    }
    if (response_format := enforced_format(request)) is not None:
        config["responseMimeType"] = "application/json"
        config["responseJsonSchema"] = schema_of(response_format)
    if request.options is not None:
        config["thinkingConfig"] = _thinking(request.options, model) or None
    return {name: value for name, value in config.items() if value is not None}


def _thinking(options: ClientOptions, model: str) -> Json:
    out: Json = {}
    takes_budget = model.removeprefix("models/").startswith(("gemini-1", "gemini-2"))
    if options.effort == "none":
        out["thinkingBudget"] = 0
    elif options.thinking_tokens is not None:
        out["thinkingBudget"] = options.thinking_tokens
    elif options.effort in _LEVELS and takes_budget:
        out["thinkingBudget"] = _BUDGETS[options.effort]
    elif options.effort in _LEVELS:
        out["thinkingLevel"] = _LEVELS[options.effort]
    if options.show_reasoning:
        out["includeThoughts"] = True
    return out
