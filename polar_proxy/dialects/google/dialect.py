"""Google GenerateContent and its routes. Source: https://ai.google.dev/api/generate-content

The URL names the model and says whether to stream, so each request has its own `GoogleGenerateContent`.

    POST /v1beta/models/{model}:generateContent            one JSON object
    POST /v1beta/models/{model}:streamGenerateContent      a JSON array, or server-sent events with ?alt=sse
    POST /v1beta/models/{model}:countTokens
"""

from __future__ import annotations

import re
from functools import partial
from typing import Any
from urllib.parse import parse_qs

import orjson

from polar_proxy.dialects.base import Dialect, ParsedRequest, provider_tools
from polar_proxy.dialects.fields import invalid, missing, other_fields, unsupported
from polar_proxy.dialects.google.contents import parse_contents, parse_system
from polar_proxy.dialects.google.encoder import GoogleEncoder, google_error
from polar_proxy.dialects.google.schema import (
    CountTokensRequest,
    GenerateContentRequest,
    GenerationConfig,
    ThinkingConfig,
    camel_case,
)
from polar_proxy.dialects.google.tools import json_schema, parse_tool_choice, parse_tools, tools_of_provider
from polar_proxy.dialects.wire import storable_params, to_json
from polar_proxy.errors import RequestError
from polar_proxy.types import ChatRequest, ClientOptions, EngineInfo, Json, Sampling

_ROUTE = re.compile(
    r"(?:/v1(?:alpha|beta)?[0-9]*)?"  # /v1, /v1beta, /v1alpha, Vertex's /v1beta1; or nothing
    r"(?:/projects/[^/]+/locations/[^/]+)?(?:/publishers/[^/]+)?"
    r"/(?:models|tunedModels|endpoints)/(?P<model>.+)"
    r":(?P<verb>generateContent|streamGenerateContent|countTokens)"
)
_CONFIG = "generationConfig"
_ENUM = "text/x.enum"
_SEPARATE = ("contents", "systemInstruction", "tools")
"""Fields of the body that are stored apart from the others."""


class GoogleGenerateContent(Dialect):
    """Google's dialect for one request URL, which gives `model` and `stream`.

    `sse`: True if a streamed answer is sent as server-sent events; False: as a JSON array.
    """

    name = "google_generate_content"
    # Gemini CLI treats a comment as a broken event, and retries.
    heartbeat = None

    def __init__(self, model: str, *, stream: bool = False, sse: bool = False) -> None:
        self.model = model
        self.stream = stream
        self.sse = sse
        self.stream_media_type = "text/event-stream" if sse else "application/json"

    def requested_model(self, body: Json) -> str:
        return self.model

    def parse(self, body: Json, previous: ParsedRequest | None = None) -> ParsedRequest:
        messages = [to_json(item, f"contents[{i}]") for i, item in enumerate(_as_list(_field(body, "contents")))]
        system = _field(body, "systemInstruction")
        if system is not None:
            messages.insert(0, to_json({"systemInstruction": system}, "systemInstruction"))
        tools = _field(body, "tools")
        tools_json = to_json(tools, "tools") if tools else None
        params = storable_params(body, *(key for key in body if camel_case(key) in _SEPARATE))
        # Only after `to_json`, which refuses tool schemas that are nested too deeply to be validated.
        fields = GenerateContentRequest.read(body)
        request = _chat_request(self.model, fields)
        return ParsedRequest(
            requests=(request,),
            stream=self.stream,
            messages=(tuple(messages),),
            tools=tools_json,
            params=params,
            encoder=partial(
                GoogleEncoder,
                model=self.model,
                sse=self.sse,
                thoughts=fields.generation_config.thinking_config.include_thoughts,
                logprobs=request.sampling.logprobs,
                enum=fields.generation_config.response_mime_type == _ENUM,
            ),
            provider_tools=provider_tools(tools_of_provider(_as_list(tools)), body),
        )

    def message_fields(self, stored: list[Json]) -> Json:
        # This is never a client's content: `parse` refuses one that has neither a role nor parts.
        if stored and stored[0].keys() == {"systemInstruction"}:
            return {**stored[0], "contents": stored[1:]}
        return {"contents": stored}

    def client_options(self, params: Json) -> ClientOptions:
        body = {camel_case(key): value for key, value in params.items() if value is not None}
        config = {camel_case(key): value for key, value in (body.get(_CONFIG) or {}).items() if value is not None}
        thinking = {camel_case(key): value for key, value in (config.get("thinkingConfig") or {}).items()}
        level = thinking.get("thinkingLevel")
        return ClientOptions(
            self.name,
            effort=level.lower() if isinstance(level, str) else None,
            thinking_tokens=ThinkingConfig.read(thinking).thinking_budget,
            show_reasoning=bool(thinking.get("includeThoughts")),
            fields={
                **other_fields(body, GenerateContentRequest),
                **{f"{_CONFIG}.{key}": value for key, value in other_fields(config, GenerationConfig).items()},
            },
        )

    def error_body(self, error: RequestError, request_id: str) -> bytes:
        return orjson.dumps(google_error(str(error), error.status, error.param, error.retry_after))

    def parse_count(self, body: Json) -> ChatRequest:
        inner = CountTokensRequest.read(body).generate_content_request
        counted = body if inner is None else inner
        to_json(counted, "body")
        return _chat_request(self.model, GenerateContentRequest.read(counted))

    def count_body(self, tokens: int) -> bytes:
        details = [{"modality": "TEXT", "tokenCount": tokens}]
        return orjson.dumps({"totalTokens": tokens, "promptTokensDetails": details})


def google_route(path: str, query: str) -> tuple[GoogleGenerateContent, bool] | None:
    """Return the dialect for a path (percent-decoded) and query string, and whether the route only counts tokens.

    Returns None for a path that is not Google's.
    """
    found = _ROUTE.fullmatch(path)
    if found is None:
        return None
    stream = found["verb"] == "streamGenerateContent"
    parameters = parse_qs(query)
    alt = (parameters.get("alt") or parameters.get("$alt") or ["json"])[-1]
    dialect = GoogleGenerateContent(found["model"], stream=stream, sse=stream and alt == "sse")
    return dialect, found["verb"] == "countTokens"


def google_model_card(name: str, engine: EngineInfo) -> Json:
    """Return the answer to `GET /v1beta/models/{name}`. Source: https://ai.google.dev/api/models#Model"""
    return {
        "name": f"models/{name}",
        "version": "001",
        "displayName": name,
        "inputTokenLimit": engine.context_length,
        "outputTokenLimit": engine.max_answer or engine.context_length,
        "supportedGenerationMethods": ["generateContent", "streamGenerateContent", "countTokens"],
    }


def _field(body: Json, name: str) -> Any:
    """Return a field's value, unchanged, whether its name is in camelCase or snake_case; None if absent or null."""
    found = [value for key, value in body.items() if value is not None and camel_case(key) == name]
    return found[-1] if found else None


def _as_list(value: Any) -> list[Any]:
    """Return the items of a repeated field; no items for a value of the wrong type, which is refused later."""
    if isinstance(value, dict):
        return [value]
    return value if isinstance(value, list) else []


def _chat_request(model: str, fields: GenerateContentRequest) -> ChatRequest:
    """Convert Google's fields to a chat request. Raises RequestError. Safety settings and labels are tolerated: they
    have no effect here."""
    if fields.cached_content is not None:
        raise unsupported("cachedContent", "send the contents themselves; repeated prefixes are cached anyway")
    if not fields.contents:
        raise missing("contents")
    messages = parse_contents(fields.contents)
    if not messages:
        raise RequestError("'contents' contains nothing to answer.", param="contents", code="empty_array")
    system = parse_system(fields.system_instruction)
    tools, tool_choice = parse_tool_choice(fields.tool_config.function_calling_config, parse_tools(fields.tools))
    config = fields.generation_config
    return ChatRequest(
        model=model,
        messages=tuple(messages if system is None else [system, *messages]),
        sampling=_sampling(config),
        tools=tools,
        tool_choice=tool_choice,
        response_format=_response_format(config),
        # Other thinking budgets, and thinking levels, are hints for which open models have no setting.
        template_kwargs={"enable_thinking": False} if config.thinking_config.thinking_budget == 0 else {},
    )


def _sampling(config: GenerationConfig) -> Sampling:
    if config.logprobs and not config.response_logprobs:
        path = f"{_CONFIG}.logprobs"
        raise RequestError(f"'{path}' needs 'responseLogprobs' to be true.", param=path)
    for modality in config.response_modalities:
        if not isinstance(modality, str) or modality.upper() not in ("TEXT", "MODALITY_UNSPECIFIED"):
            raise invalid(f"{_CONFIG}.responseModalities", "only TEXT is supported")
    return Sampling(
        temperature=config.temperature,
        top_p=config.top_p,
        top_k=config.top_k,
        max_tokens=config.max_output_tokens,
        seed=config.seed,
        stop=tuple(stop for stop in config.stop_sequences if stop),
        n=config.candidate_count,
        presence_penalty=config.presence_penalty,
        frequency_penalty=config.frequency_penalty,
        logprobs=config.response_logprobs,
        top_logprobs=config.logprobs,
    )


def _response_format(config: GenerationConfig) -> Json | None:
    """Return the structured output format. A schema without a MIME type means JSON."""
    schema = config.response_json_schema
    if schema is None and config.response_schema is not None:
        schema = json_schema(config.response_schema)
    mime = config.response_mime_type or ("text/plain" if schema is None else "application/json")
    path = f"{_CONFIG}.responseMimeType"
    if mime == "application/json":
        if schema is None:
            return {"type": "json_object"}
        return {"type": "json_schema", "json_schema": {"name": "response", "schema": schema}}
    if mime == _ENUM:
        values = schema.get("enum") if isinstance(schema, dict) else None
        if not isinstance(values, list) or not values or not all(isinstance(value, str) for value in values):
            raise invalid(path, f"{_ENUM} needs a response schema with an 'enum' of strings")
        strings = {"type": "string", "enum": values}
        return {"type": "json_schema", "json_schema": {"name": "response", "schema": strings}}
    if mime != "text/plain":
        raise invalid(path, f"expected text/plain, application/json or {_ENUM}")
    if schema is not None:
        raise RequestError(f"A response schema needs '{path}' to be application/json or {_ENUM}.", param=path)
    return None
