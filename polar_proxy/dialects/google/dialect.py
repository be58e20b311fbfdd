"""Google GenerateContent: which route is what. Source: https://ai.google.dev/api/generate-content

Unlike elsewhere the URL says which model is asked and whether it streams, so there is one `GoogleGenerateContent` a
request.

    POST /v1beta/models/{model}:generateContent            one JSON object
    POST /v1beta/models/{model}:streamGenerateContent      a JSON array, or server-sent events with ?alt=sse
    POST /v1beta/models/{model}:countTokens
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from urllib.parse import parse_qs

import orjson

from polar_proxy.dialects.base import Dialect, Encoder, ParsedRequest, TokenCount, stored_tools, to_json
from polar_proxy.dialects.google.encoder import GoogleEncoder
from polar_proxy.dialects.google.errors import google_error
from polar_proxy.dialects.google.fields import field, objects, raw_field, without
from polar_proxy.dialects.google.request import parse_request, shows_thoughts
from polar_proxy.errors import RequestError
from polar_proxy.types import ChatRequest, Json

_ROUTE = re.compile(
    r"(?:/v1(?:alpha|beta)?[0-9]*)?"  # /v1, /v1beta, /v1alpha, Vertex's /v1beta1; or nothing
    r"(?:/projects/[^/]+/locations/[^/]+)?(?:/publishers/[^/]+)?"
    r"/(?:models|tunedModels|endpoints)/(?P<model>.+)"
    r":(?P<verb>generateContent|streamGenerateContent|countTokens)"
)


class GoogleGenerateContent(Dialect):
    """`model`: as the URL names it. `sse`: a stream is server-sent events, else a JSON array."""

    name = "google_generate_content"
    # Gemini CLI takes a comment for a broken event and asks again.
    heartbeat = None

    def __init__(self, model: str, *, stream: bool = False, sse: bool = False) -> None:
        self.model = model
        self.stream = stream
        self.sse = sse
        self.stream_media_type = "text/event-stream" if sse else "application/json"

    def parse(self, body: Json) -> ParsedRequest:
        messages = [to_json(item, f"contents[{i}]") for i, item in enumerate(objects(body, "contents"))]
        system = raw_field(body, "systemInstruction")
        if system is not None:
            messages.insert(0, to_json({"systemInstruction": system}, "systemInstruction"))
        tools = raw_field(body, "tools")
        params = without(body, "contents", "systemInstruction", "tools")
        to_json(params, "body")
        tools_json = to_json(tools, "tools") if tools else None
        request = parse_request(self.model, body)  # behind to_json, which bounds how deep schemas can be
        return ParsedRequest(
            requests=(request,),
            stream=self.stream,
            messages=(tuple(messages),),
            tools=tools_json,
            params=params,
            options={
                "model": self.model,
                "thoughts": shows_thoughts(body),
                "logprobs": request.sampling.logprobs,
            },
        )

    def body(self, messages: Sequence[bytes], tools: bytes | None, params: Json) -> Json:
        items = [orjson.loads(message) for message in messages]
        body = {**params, "contents": items, **stored_tools(tools)}
        # Never a client's content: `parse` refuses one without a role and without parts.
        if items and items[0].keys() == {"systemInstruction"}:
            body |= {**items[0], "contents": items[1:]}
        return body

    def encoder(self, parsed: ParsedRequest, call_id: str, created: int) -> Encoder:
        return GoogleEncoder(parsed.options, call_id, sse_stream=self.sse)

    def error(self, error: RequestError) -> bytes:
        return orjson.dumps(google_error(str(error), error.status, error.param))


class GoogleTokenCount(TokenCount):
    """Counts what the engine would read: system instruction, tools and template included."""

    def __init__(self, model: str) -> None:
        self.model = model

    def parse(self, body: Json) -> ChatRequest:
        inner = field(body, "generateContentRequest", dict)
        asked = body if inner is None else inner
        to_json(asked, "body")
        return parse_request(self.model, asked)

    def respond(self, tokens: int) -> bytes:
        details = [{"modality": "TEXT", "tokenCount": tokens}]
        return orjson.dumps({"totalTokens": tokens, "promptTokensDetails": details})

    def error(self, error: RequestError) -> bytes:
        return orjson.dumps(google_error(str(error), error.status, error.param))


def google_route(path: str, query: str) -> Dialect | TokenCount | None:
    """What serves this path (percent-decoded) and query string; None for a path that is not Google's."""
    found = _ROUTE.fullmatch(path)
    if found is None:
        return None
    if found["verb"] == "countTokens":
        return GoogleTokenCount(found["model"])
    stream = found["verb"] == "streamGenerateContent"
    asked = parse_qs(query)
    alt = (asked.get("alt") or asked.get("$alt") or ["json"])[-1]
    return GoogleGenerateContent(found["model"], stream=stream, sse=stream and alt == "sse")


def google_model_card(name: str, context_length: int) -> Json:
    """`GET /v1beta/models/{name}`. Source: https://ai.google.dev/api/models#Model"""
    return {
        "name": f"models/{name}",
        "version": "001",
        "displayName": name,
        "inputTokenLimit": context_length,
        "outputTokenLimit": context_length,
        "supportedGenerationMethods": ["generateContent", "streamGenerateContent", "countTokens"],
    }


def google_model_list(cards: list[Json]) -> Json:
    """`GET /v1beta/models`."""
    return {"models": cards}
