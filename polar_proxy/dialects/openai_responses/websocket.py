"""Requests over a WebSocket: the event `response.create` holds the fields of a body of `POST /v1/responses`.

Source: the types `ResponsesClientEvent` and `ResponsesServerEvent` of the `openai` SDK.

The answer is always streamed. A request with `generate: false` is a warm-up: nothing is sampled, and a later request
may name the warm-up's response id in `previous_response_id`. Refused: other events (`response.steer`), `stream_id`
(several answers at a time on one WebSocket), `background`, and `stream: false`.
"""

from __future__ import annotations

from dataclasses import replace

from polar_proxy.dialects.base import ParsedRequest
from polar_proxy.dialects.fields import invalid, invalid_type, unsupported
from polar_proxy.dialects.openai_responses.dialect import OpenAIResponses
from polar_proxy.types import Json

_ENVELOPE = ("type", "generate")
"""Fields of `response.create` that the body of an HTTP request does not have."""


class ResponsesWebSocketDialect(OpenAIResponses):
    """Dialect of the WebSocket route. Calls are recorded like those of the same requests over HTTP."""

    heartbeat = None

    def parse(self, body: Json, previous: ParsedRequest | None = None) -> ParsedRequest:
        if body.get("type") != "response.create":
            raise invalid("type", "expected response.create")
        if body.get("stream_id") is not None:
            raise unsupported("stream_id", "a WebSocket sends one answer at a time; open another one")
        if body.get("background"):
            raise unsupported("background", "a response in the background is created over HTTP")
        if body.get("stream") is False:
            raise unsupported("stream", "answers are always streamed over a WebSocket")
        generate = True if body.get("generate") is None else body["generate"]
        if not isinstance(generate, bool):
            raise invalid_type("generate", "a boolean")
        fields = {name: value for name, value in body.items() if name not in _ENVELOPE}
        return replace(super().parse({**fields, "stream": True}), generate=generate)
