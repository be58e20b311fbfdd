"""Google GenerateContent and its routes. Source: https://ai.google.dev/api/generate-content

The URL names the model and says whether to stream, so each request has its own `GoogleGenerateContent`.

    POST /v1beta/models/{model}:generateContent            one JSON object
    POST /v1beta/models/{model}:streamGenerateContent      a JSON array, or server-sent events with ?alt=sse
    POST /v1beta/models/{model}:countTokens
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any
from urllib.parse import parse_qs

import orjson

from polar_proxy.dialects.base import Dialect, Encoder, ParsedRequest, TokenCount
from polar_proxy.dialects.google.encoder import GoogleEncoder
from polar_proxy.dialects.google.errors import google_error
from polar_proxy.dialects.google.request import to_chat_request
from polar_proxy.dialects.google.schema import CountTokensRequest, GenerateContentRequest, camel_case
from polar_proxy.dialects.wire import storable_params, stored_tools, to_json
from polar_proxy.errors import RequestError
from polar_proxy.types import ChatRequest, Json

_ROUTE = re.compile(
    r"(?:/v1(?:alpha|beta)?[0-9]*)?"  # /v1, /v1beta, /v1alpha, Vertex's /v1beta1; or nothing
    r"(?:/projects/[^/]+/locations/[^/]+)?(?:/publishers/[^/]+)?"
    r"/(?:models|tunedModels|endpoints)/(?P<model>.+)"
    r":(?P<verb>generateContent|streamGenerateContent|countTokens)"
)
_SEPARATE = ("contents", "systemInstruction", "tools")
"""The fields that are not stored with the parameters."""


class GoogleGenerateContent(Dialect):
    """`model`: as in the URL. `sse`: stream server-sent events, otherwise a JSON array."""

    name = "google_generate_content"
    # Gemini CLI treats a comment as a broken event, and retries.
    heartbeat = None

    def __init__(self, model: str, *, stream: bool = False, sse: bool = False) -> None:
        self.model = model
        self.stream = stream
        self.sse = sse
        self.stream_media_type = "text/event-stream" if sse else "application/json"

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
        request = to_chat_request(self.model, fields)
        return ParsedRequest(
            requests=(request,),
            stream=self.stream,
            messages=(tuple(messages),),
            tools=tools_json,
            params=params,
            options={
                "model": self.model,
                "thoughts": fields.generation_config.thinking_config.include_thoughts,
                "logprobs": request.sampling.logprobs,
            },
        )

    def rebuild_body(self, messages: Sequence[bytes], tools: bytes | None, params: Json) -> Json:
        items = [orjson.loads(message) for message in messages]
        body = {**params, "contents": items, **stored_tools(tools)}
        # This is never a client's content: `parse` refuses one that has neither a role nor parts.
        if items and items[0].keys() == {"systemInstruction"}:
            body |= {**items[0], "contents": items[1:]}
        return body

    def encoder(self, parsed: ParsedRequest, call_id: str, created: int) -> Encoder:
        return GoogleEncoder(parsed.options, call_id, sse_stream=self.sse)

    def error_body(self, error: RequestError) -> bytes:
        return orjson.dumps(google_error(str(error), error.status, error.param))


class GoogleTokenCount(TokenCount):
    """`:countTokens`: the length of the whole prompt, with system instruction, tools and template."""

    def __init__(self, model: str) -> None:
        self.model = model

    def parse(self, body: Json) -> ChatRequest:
        inner = CountTokensRequest.read(body).generate_content_request
        asked = body if inner is None else inner
        to_json(asked, "body")
        return to_chat_request(self.model, GenerateContentRequest.read(asked))

    def respond(self, tokens: int) -> bytes:
        details = [{"modality": "TEXT", "tokenCount": tokens}]
        return orjson.dumps({"totalTokens": tokens, "promptTokensDetails": details})

    def error_body(self, error: RequestError) -> bytes:
        return orjson.dumps(google_error(str(error), error.status, error.param))


def google_route(path: str, query: str) -> Dialect | TokenCount | None:
    """Return the dialect or token count of this path (percent-decoded) and query string; None if it is not Google's."""
    found = _ROUTE.fullmatch(path)
    if found is None:
        return None
    if found["verb"] == "countTokens":
        return GoogleTokenCount(found["model"])
    stream = found["verb"] == "streamGenerateContent"
    parameters = parse_qs(query)
    alt = (parameters.get("alt") or parameters.get("$alt") or ["json"])[-1]
    return GoogleGenerateContent(found["model"], stream=stream, sse=stream and alt == "sse")


def google_model_card(name: str, context_length: int) -> Json:
    """Return the answer to `GET /v1beta/models/{name}`. Source: https://ai.google.dev/api/models#Model"""
    return {
        "name": f"models/{name}",
        "version": "001",
        "displayName": name,
        "inputTokenLimit": context_length,
        "outputTokenLimit": context_length,
        "supportedGenerationMethods": ["generateContent", "streamGenerateContent", "countTokens"],
    }


def google_model_list(cards: list[Json]) -> Json:
    """Return the answer to `GET /v1beta/models`."""
    return {"models": cards}


def _field(body: Json, name: str) -> Any:
    """Return a field of a body in either spelling, as it came; None when it is absent or null."""
    found = [value for key, value in body.items() if value is not None and camel_case(key) == name]
    return found[-1] if found else None


def _as_list(value: Any) -> list[Any]:
    """Return the items of a repeated field; no items for a value of the wrong type, which is refused later."""
    if isinstance(value, dict):
        return [value]
    return value if isinstance(value, list) else []
