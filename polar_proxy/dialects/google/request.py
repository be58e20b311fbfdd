"""A GenerateContentRequest as a chat request. Source: https://ai.google.dev/api/generate-content"""

from __future__ import annotations

from polar_proxy.dialects.google.contents import parse_contents, parse_system
from polar_proxy.dialects.google.fields import field, objects, raw_field
from polar_proxy.dialects.google.tools import json_schema, parse_tool_choice, parse_tools
from polar_proxy.errors import RequestError
from polar_proxy.types import ChatRequest, Json, Sampling

_CONFIG = "generationConfig"


def parse_request(model: str, body: Json) -> ChatRequest:
    """Raises RequestError. Safety settings, labels and unknown fields are tolerated: they change nothing here."""
    if raw_field(body, "cachedContent") is not None:
        raise RequestError(
            "'cachedContent' is not supported here: send the contents themselves, repeated prefixes are cached anyway.",
            param="cachedContent",
            code="unsupported_parameter",
        )
    contents = objects(body, "contents")
    if not contents:
        raise RequestError("Missing required parameter: 'contents'.", param="contents", code="empty_array")
    said = parse_contents(contents)
    if not said:
        raise RequestError("'contents' say nothing.", param="contents", code="empty_array")
    system = parse_system(raw_field(body, "systemInstruction"))
    tools, tool_choice = parse_tool_choice(body, parse_tools(body))
    config = field(body, _CONFIG, dict) or {}
    return ChatRequest(
        model=model,
        messages=tuple(said if system is None else [system, *said]),
        sampling=_sampling(config),
        tools=tools,
        tool_choice=tool_choice,
        response_format=_response_format(config),
        template_kwargs=_thinking(config),
    )


def shows_thoughts(body: Json) -> bool:
    """Whether the client wants to see thoughts; Google's default is not to."""
    config = field(body, _CONFIG, dict) or {}
    thinking = field(config, "thinkingConfig", dict, _CONFIG) or {}
    return bool(field(thinking, "includeThoughts", bool, f"{_CONFIG}.thinkingConfig"))


def _thinking(config: Json) -> Json:
    """A budget of 0 switches thinking off. Other budgets and levels are wishes that open models have no dial for."""
    thinking = field(config, "thinkingConfig", dict, _CONFIG) or {}
    where = f"{_CONFIG}.thinkingConfig"
    field(thinking, "thinkingLevel", str, where)
    budget = field(thinking, "thinkingBudget", int, where, low=-1)
    return {"enable_thinking": False} if budget == 0 else {}


def _sampling(config: Json) -> Sampling:
    top_k = field(config, "topK", int, _CONFIG, low=-1, high=2**31 - 1)
    stops = field(config, "stopSequences", list, _CONFIG) or []
    if not all(isinstance(stop, str) for stop in stops):
        path = f"{_CONFIG}.stopSequences"
        raise RequestError(f"Invalid type for '{path}': expected an array of strings.", param=path)
    top = field(config, "logprobs", int, _CONFIG, low=0, high=20) or 0
    logprobs = bool(field(config, "responseLogprobs", bool, _CONFIG))
    if top and not logprobs:
        path = f"{_CONFIG}.logprobs"
        raise RequestError(f"'{path}' needs 'responseLogprobs' to be true.", param=path)
    modalities = field(config, "responseModalities", list, _CONFIG) or []
    if any(not isinstance(item, str) or item.upper() not in ("TEXT", "MODALITY_UNSPECIFIED") for item in modalities):
        path = f"{_CONFIG}.responseModalities"
        raise RequestError(f"Invalid '{path}': only TEXT can be answered here.", param=path)
    return Sampling(
        temperature=field(config, "temperature", float, _CONFIG, low=0, high=2),
        top_p=field(config, "topP", float, _CONFIG, low=0, high=1),
        top_k=None if top_k is None or top_k <= 0 else top_k,
        max_tokens=field(config, "maxOutputTokens", int, _CONFIG, low=1),
        seed=field(config, "seed", int, _CONFIG),
        stop=tuple(stop for stop in stops if stop),
        n=field(config, "candidateCount", int, _CONFIG, low=1, high=128) or 1,
        presence_penalty=field(config, "presencePenalty", float, _CONFIG, low=-2, high=2),
        frequency_penalty=field(config, "frequencyPenalty", float, _CONFIG, low=-2, high=2),
        logprobs=logprobs,
        top_logprobs=top,
    )


def _response_format(config: Json) -> Json | None:
    """Structured output; a schema without a MIME type means JSON."""
    schema = field(config, "responseJsonSchema", dict, _CONFIG)
    if schema is None:
        own = field(config, "responseSchema", dict, _CONFIG)
        schema = None if own is None else json_schema(own)
    mime = field(config, "responseMimeType", str, _CONFIG) or ("text/plain" if schema is None else "application/json")
    if mime == "application/json":
        if schema is None:
            return {"type": "json_object"}
        return {"type": "json_schema", "json_schema": {"name": "response", "schema": schema}}
    path = f"{_CONFIG}.responseMimeType"
    if mime != "text/plain":
        raise RequestError(f"Invalid '{path}': expected text/plain or application/json.", param=path)
    if schema is not None:
        raise RequestError(f"A response schema needs '{path}' to be application/json.", param=path)
    return None
